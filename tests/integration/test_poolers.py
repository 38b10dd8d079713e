"""PgBouncer in front of PostgreSQL: told where it cannot work, and works where it can."""

from __future__ import annotations

import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.testing.harness import present, until
from tests.integration import agents
from tests.integration.agents import Run, one_world
from tests.integration.stores import RunningStore, absent, kind_of, started
from tests.servers import Security, ServerProcess
from tests.servers.postgres import Postgres
from tests.servers.process import HOST, Kind, find_file, free_ports


class PgBouncer(Kind):
    """PgBouncer; like PostgreSQL it does not run as root."""

    name = "pgbouncer"

    def __init__(self, postgres: RunningStore, mode: str, size: int) -> None:
        super().__init__(Security())
        binary = find_file("pgbouncer", ["pgbouncer"], ["/usr/sbin"])
        if binary is None:
            absent("pgbouncer is not installed: scripts/install-servers pgbouncer")
        assert postgres.server is not None
        server: Any = postgres.server.nodes[0]._kind
        assert isinstance(server, Postgres)
        self._binary, self._server, self._address = str(binary), server, postgres.address
        self._mode, self._size = mode, size

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        host, port = self._address
        users, config = node.directory / "users", node.directory / "pgbouncer.ini"
        users.touch(0o600)
        users.write_text(f'"postgres" "{self._server.environ()["PGPASSWORD"]}"\n')
        self._server._own(users)
        lines = [
            "[databases]",
            f"postgres = host={host} port={port}",
            "[pgbouncer]",
            f"listen_addr = {HOST}",
            f"listen_port = {node.port}",
            "unix_socket_dir =",
            "auth_type = trust",
            f"auth_file = {users}",
            f"pool_mode = {self._mode}",
            f"default_pool_size = {self._size}",
        ]
        config.write_text("\n".join(lines) + "\n")
        self._server._own(node.directory)
        return self._server._as_account(self._binary, str(config))

    def ready(self, node: ServerProcess) -> bool:
        with socket.create_connection((HOST, node.port), 1):
            return True


@pytest.fixture(scope="module")
def postgres() -> Iterator[RunningStore]:
    with started(kind_of("postgres")) as store:
        # Made here: the check of its rights needs it.
        store.open("first").close()
        yield store


Pool = Callable[[str, int], RunningStore]


@pytest.fixture
def pool(postgres: RunningStore) -> Iterator[Pool]:
    """Starts a pooler of a mode and size, and gives the store as it is reached through it."""
    made: list[ServerProcess] = []

    def start(mode: str, size: int) -> RunningStore:
        assert postgres.server is not None
        beside = postgres.server.nodes[0].directory.parent
        folder = beside / f"pooler-{secrets.token_hex(4)}"
        node = ServerProcess(PgBouncer(postgres, mode, size), 0, free_ports(1), folder)
        made.append(node)
        node.start()
        return replace(postgres, endpoint=postgres.endpoint_at((HOST, node.port)), server=None)

    yield start
    for node in made:
        node.end()


@pytest.mark.parametrize("mode", ["transaction", "statement"])
@pytest.mark.parametrize("size", [1, 20])
def test_a_pool_of_transactions_is_told_at_the_start(
    pool: Pool, postgres: RunningStore, run_id: str, mode: str, size: int
) -> None:
    store = pool(mode, size)
    with pytest.raises(RendezvousConnectionError) as caught:
        store.open(run_id)
    text = str(caught.value)
    assert "is behind a pooler that keeps no connection for a client" in text
    assert "pool_mode=session" in text
    assert "\n" not in text
    what, found = failure_of_check(store)
    assert what == "store"
    assert "is behind a pooler that keeps no connection for a client" in found
    # Nothing is left for the pooler's other clients.
    with psycopg.connect(postgres.endpoint, autocommit=True) as admin:
        held = admin.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone()
    assert held == (0,)
    if mode == "transaction":
        with psycopg.connect(store.endpoint, autocommit=True) as other:
            assert other.execute("SHOW statement_timeout").fetchone() == ("0",)


def test_a_busy_pool_of_transactions_is_told_too(pool: Pool, run_id: str) -> None:
    """Other clients take the servers in turn."""
    store = pool("transaction", 8)
    over = threading.Event()

    def work() -> None:
        with psycopg.connect(store.endpoint, autocommit=True) as other:
            while not over.is_set():
                other.execute("SELECT pg_sleep(0.001)", prepare=False)

    others = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for other in others:
        other.start()
    try:
        for _ in range(20):
            with pytest.raises(RendezvousConnectionError, match="keeps no connection for"):
                store.open(run_id)
    finally:
        over.set()
        for other in others:
            other.join(10)


def test_a_pool_of_sessions_tells_when_it_has_none_left(pool: Pool, run_id: str) -> None:
    store = pool("session", 4)
    with Run(store, run_id) as run:
        # A member whose request takes too long gives its connection up, and the third takes it.
        patient = {
            "heartbeat_timeout": "8",
            "keep_alive_interval": "1",
            "keep_alive_max_attempt": "20",
        }
        members = [run.start((2, 3), **patient) for _ in range(2)]
        agents.until(one_world(members), 30)
        with pytest.raises(RendezvousConnectionError) as caught:
            run.start((2, 3), heartbeat_timeout="3")
        told = str(caught.value)
        assert "is behind a pooler that had no connection left for 3 s (it logged this" in told
        assert "a node holds two, and at times two more for the history: raise its default" in told
        what, found = failure_of_check(store)
        assert what == "store"
        assert "a node holds two" in found


def test_check_and_nodes_agree_on_a_pool(pool: Pool, run_id: str) -> None:
    """The check opens no more at once than there are."""
    store = pool("session", 6)
    status, lines = check(store)
    assert status == 1, lines
    assert re.search("ok +pooler: a pooler in session mode is in between", lines)
    assert re.search("ok +contention: \\d+ writers at once, as no more could connect of 16", lines)
    # Six for the nodes, and two for what they note.
    with Run(pool("session", 8), run_id) as run:
        members = [run.start((3, 3)) for _ in range(3)]
        agents.until(one_world(members), 30)


def test_each_request_through_a_pool_of_sessions(pool: Pool, run_id: str) -> None:
    with closing(pool("session", 10).open(run_id)) as client:
        version = client.put("key", b"one")
        woken = threading.Timer(0.2, lambda: client.put("key", b"two"))
        woken.start()
        assert present(client.wait("key", version, 10)).value == b"two"
        assert client.add("count", 1) == 1
        client.expire(60)
        assert until(lambda: client.list("").keys() == {"key", "count"}, 30)


def check(store: RunningStore) -> tuple[int, str]:
    """The exit status of `rdzv check`, and its lines."""
    options = {**store.config, "heartbeat_timeout": "3"}
    conf = ",".join(f"{name}={value}" for name, value in options.items())
    arguments = ["-b", store.backend, "-e", store.endpoint, "-c", conf, "--nnodes", "1"]
    result = CliRunner().invoke(app, ["check", *arguments, "--local-addr", "127.0.0.1"])
    return result.exit_code, result.output


def failure_of_check(store: RunningStore) -> tuple[str, str]:
    """What failed, and its line."""
    status, lines = check(store)
    assert status == 2, lines
    (line,) = (line for line in lines.splitlines() if line.startswith("failed"))
    _, _, rest = line.partition(" ")
    what, _, found = rest.strip().partition(": ")
    return what, found
