"""The local servers: what a restart keeps, a death leaves behind and an ensemble survives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from rdzv_plugins import servers as local
from rdzv_plugins.kv import Entry, KeyValueClient, RendezvousConnectionError
from rdzv_plugins.testing.harness import present, until
from tests import servers
from tests.integration.stores import KINDS, RunningStore, kind_of, started
from tests.servers import process
from tests.servers.http import ask
from tests.servers.process import free_ports, release

# A quorum has no leader.
ENSEMBLES = [it for it in KINDS if servers.KINDS[it.server].largest == 3 and it.name != "quorum"]

DIES = """
import os, signal, sys, threading
from {package} import servers
server = []
# From a thread that ends: the server must outlive it, and die with the process.
thread = threading.Thread(target=lambda: server.append(servers.start("valkey")))
thread.start()
thread.join()
pid = getattr(server[0], "pid", 0) or server[0].nodes[0].pid
print(pid, os.readlink(f"/proc/{{pid}}/cwd"), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def own_store(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    with started(request.param) as store:
        yield store


@pytest.fixture(params=ENSEMBLES, ids=lambda kind: kind.name)
def ensemble(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    with started(request.param, nodes=3) as store:
        yield store


def test_stopped_server_keeps_its_data_and_an_empty_one_has_none(
    own_store: RunningStore, run_id: str
) -> None:
    assert own_store.server is not None
    node = own_store.server.nodes[0]
    client = own_store.open(run_id)
    client.put("key", b"kept")
    node.stop()
    assert not node.running
    node.start()
    found = _read(client)
    assert (found and found.value) == (b"kept" if own_store.keeps else None)
    node.kill()
    node.start(empty=True)
    assert _read(client) is None
    client.close()


def test_paused_server_says_nothing_until_it_is_resumed(
    own_store: RunningStore, run_id: str
) -> None:
    assert own_store.server is not None
    node = own_store.server.nodes[0]
    client = own_store.open(run_id, request_timeout=1)
    client.put("key", b"one")
    node.pause()
    with pytest.raises(RendezvousConnectionError):
        client.get("key")
    node.resume()
    assert present(_read(client)).value == b"one"
    client.close()


def test_ensemble_that_loses_its_leader_loses_nothing(ensemble: RunningStore, run_id: str) -> None:
    assert ensemble.server is not None
    client = ensemble.open(run_id)
    version = client.put("key", b"before")
    killed = ensemble.server.leader()
    ensemble.server.nodes[killed].kill()
    assert until(lambda: _written(client), 30), "the other two accept no write"
    entry, won = client.compare_and_set("key", b"after", version)
    assert won, "the write before the leader's death is lost"
    assert ensemble.server.leader() != killed
    ensemble.server.nodes[killed].start()
    assert _read(client) == entry
    client.close()


@pytest.mark.parametrize("package", ["rdzv_plugins", "tests"])
def test_server_dies_with_its_parent_and_not_with_a_thread(package: str) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", DIES.format(package=package)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        assert _alive(int(pid))
        parent.communicate("\n")
    assert until(lambda: not _alive(int(pid)), 10), "an orphan is left"
    assert until(lambda: not Path(folder).exists(), 10), "its data is left"


def test_closed_server_leaves_nothing() -> None:
    with servers.start("valkey") as server:
        pid, folder = server.nodes[0].pid, server.nodes[0].directory.parent
    assert not _alive(pid)
    assert not folder.exists()
    server.close()


def test_a_stranger_does_not_get_into_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user executes commands as the account of the server."""
    with started(kind_of("postgres")) as store:
        assert store.server is not None
        folder = store.server.nodes[0].directory
        assert folder.stat().st_mode & 0o777 == 0o700
        monkeypatch.delenv("PGPASSWORD")
        for login in ("postgres@", "postgres:postgres@"):
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(store.endpoint.replace("postgres@", login)).close()


@pytest.mark.parametrize(("kind", "version"), [("redis", ""), ("redis", "6.2.7"), ("valkey", "")])
def test_a_stranger_executes_nothing_by_redis(
    kind: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version:
        # Only its number: it has the commands of a later one, and refuses them.
        file, real = tmp_path / "redis-server", process.find_file("redis", ["redis-server"])
        told = f'case $1 in --version) echo "Redis server v={version}";; *) exec {real} "$@";; esac'
        file.write_text(f"#!/bin/sh\n{told}\n")
        file.chmod(0o755)
        monkeypatch.setenv("RDZV_REDIS_BINARY", str(file))
    with local.start(kind) as server, redis.Redis.from_url(server.endpoint) as stranger:
        stranger.set("key", "value")
        for line in ("CONFIG SET dir /tmp", "MODULE LOAD /tmp/x.so", "DEBUG SLEEP 0"):
            with pytest.raises(redis.ResponseError, match=r"not allowed|no permissions|protected"):
                stranger.execute_command(*line.split())
        if version:
            with pytest.raises(redis.exceptions.NoPermissionError):
                stranger.execute_command("REPLICAOF", "127.0.0.1", "1")


@pytest.mark.soak
def test_a_stranger_reads_no_logs_by_kubernetes() -> None:
    """The server's account may be root."""
    with started(kind_of("kubernetes")) as store:
        assert store.server is not None
        port, tls = store.server.nodes[0].port, servers.Security(cert_file="its own")
        assert ask(port, "GET", "/version", security=tls)[0] == 200
        assert ask(port, "GET", "/logs/", security=tls)[0] == 403


def test_missing_binary_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_CONSUL_BINARY", "/nowhere/consul")
    with pytest.raises(servers.ServerError, match="RDZV_CONSUL_BINARY names '/nowhere/consul'"):
        servers.start("consul")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(servers.NotInstalledError, match="apt-get install zookeeper"):
        servers.start("zookeeper")


def test_failed_start_shows_the_servers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_ETCD_BINARY", "/bin/false")
    with pytest.raises(servers.ServerError, match=r"etcd 1 on \S+ ended during its start"):
        servers.start("etcd")


def test_a_port_is_given_once_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PORTS", range(27000, 27200))
    held: list[int] = []

    def draw_all() -> None:
        while True:
            held.extend(free_ports(1))

    with pytest.raises(servers.ServerError, match="no port from 27000 to 27199 is free"):
        draw_all()
    # Some may be another test's.
    assert len(set(held)) == len(held) > 100
    one = held[0]
    # As a server that stops and starts again.
    for _ in range(2):
        with socket.create_server((process.HOST, one)) as server:
            socket.create_connection((process.HOST, one)).close()
            server.accept()[0].close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((process.HOST, one))
    with pytest.raises(servers.ServerError, match="no port from"):
        draw_all()
    assert held.count(one) == 1
    release(held)
    release(free_ports(1))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown server 'mysql'; there are: valkey, redis"):
        local.start("mysql")


def _read(client: KeyValueClient) -> Entry | None:
    def answers() -> bool:
        try:
            client.get("key")
        except RendezvousConnectionError:
            return False
        return True

    assert until(answers, 20), "the client did not come back"
    return client.get("key")


def _written(client: KeyValueClient) -> bool:
    try:
        client.put("other", b"")
    except RendezvousConnectionError:
        return False
    return True


def _alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet reaped does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
