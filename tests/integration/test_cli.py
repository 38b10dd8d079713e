"""The rdzv command, as a person runs it: a process with arguments, output and an exit status."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import pytest
from rich.table import Table
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousParameters,
)

from rdzv_plugins import servers
from rdzv_plugins.cli import runs, stores
from rdzv_plugins.cli.options import plain_console
from rdzv_plugins.handler import StoreRendezvousHandler, create_handler
from rdzv_plugins.kv import Entry, MemoryClient, MemoryServer, RendezvousConnectionError, Version
from rdzv_plugins.protocol.documents import NODES_PREFIX
from rdzv_plugins.stores import open_client
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background, together


@pytest.fixture(scope="module")
def server() -> Iterator[servers.LocalServer]:
    with servers.start("redis") as server:
        yield server


def rdzv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rdzv_plugins.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def form(server: servers.LocalServer, run_id: str) -> list[RendezvousHandler]:
    """Two nodes in a round."""
    handlers = [
        create_handler(
            "redis",
            RendezvousParameters(
                "redis",
                server.endpoint,
                run_id,
                2,
                2,
                local_addr="127.0.0.1",
                keep_alive_interval="0.5",
            ),
        )
        for _ in range(2)
    ]
    together([handler.next_rendezvous for handler in handlers])
    return handlers


def test_status_says_who_is_in_a_run_and_why_it_restarted(
    server: servers.LocalServer, run_id: str
) -> None:
    handlers = form(server, run_id)
    shown = rdzv("status", "-e", server.endpoint, "-i", run_id)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"run '{run_id}': running round 0, 2 nodes\n")
    assert "why this round: first round" in shown.stdout
    assert "leader" in shown.stdout
    for handler in handlers:
        handler.shutdown()
    assert "closed by" in rdzv("status", "-e", server.endpoint, "-i", run_id).stdout


def test_status_of_a_run_without_a_sign_of_life(
    server: servers.LocalServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = form(server, run_id)
    for handler in handlers:
        assert isinstance(handler, StoreRendezvousHandler)
        handler._driver.stop(5)
    runs.status(run_id, "redis", server.endpoint)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == (
        f"run '{run_id}': dead: round 0 is running, but none of its nodes lives; 1 s without a "
        "heartbeat"
    )
    assert len([line for line in shown if "silent" in line]) == 2
    for handler in handlers:
        handler.shutdown()


def test_status_counts_the_nodes_that_wait(
    server: servers.LocalServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    params = RendezvousParameters(
        "redis", server.endpoint, run_id, 3, 3, local_addr="127.0.0.1", keep_alive_interval="0.2"
    )
    handlers = [create_handler("redis", params) for _ in range(3)]
    joins = [Background(handler.next_rendezvous) for handler in handlers[:2]]
    with closing(open_client("redis", server.endpoint, run_id)) as client:
        assert until(lambda: len(client.list(NODES_PREFIX)) == 2, 10)
        runs.status(run_id, "redis", server.endpoint)
        shown = capsys.readouterr().out.splitlines()
        assert shown[0] == f"run '{run_id}': waiting for 1 node: 2 of 3 are here"
        runs.close(run_id, "redis", server.endpoint)
    for join in joins:
        with pytest.raises(RendezvousClosedError):
            join.result(10)
    for handler in handlers:
        handler.shutdown()


def test_status_of_an_unknown_run(server: servers.LocalServer, run_id: str) -> None:
    shown = rdzv("status", "-e", server.endpoint, "-i", run_id)
    assert shown.returncode == 0
    assert "nothing is stored" in shown.stdout


def test_watch_ends_when_the_run_is_closed(server: servers.LocalServer, run_id: str) -> None:
    handlers = form(server, run_id)
    command = [sys.executable, "-m", "rdzv_plugins.cli"]
    watching = subprocess.Popen(
        [*command, "watch", "-e", server.endpoint, "-i", run_id],
        stdout=subprocess.PIPE,
        text=True,
    )
    closed = rdzv("close", "-e", server.endpoint, "-i", run_id, "-c", "closed_ttl=30")
    assert closed.returncode == 0, closed.stderr
    output, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert "closed" in output
    assert all(handler.is_closed() for handler in handlers)
    for handler in handlers:
        handler.shutdown()


def test_clean_refuses_a_run_that_lives(server: servers.LocalServer, run_id: str) -> None:
    handlers = form(server, run_id)
    conf = ("-e", server.endpoint, "-i", run_id, "-c", "keep_alive_interval=0.5")
    refused = rdzv("clean", *conf)
    assert refused.returncode == 1
    assert "live nodes" in refused.stderr
    for handler in handlers:
        handler.shutdown()
    assert "deleted" in rdzv("clean", *conf).stdout
    assert "nothing is stored" in rdzv("status", *conf[:4]).stdout


@pytest.fixture(scope="module")
def consul() -> Iterator[servers.LocalServer]:
    with servers.start("consul") as server:
        yield server


def test_a_cleaned_run_that_was_closed_can_begin_anew(
    consul: servers.LocalServer, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(open_client("consul", consul.endpoint, run_id)) as client:
        client.put("key", b"old")
        client.expire(2)
        began = time.monotonic()
        runs.clean(run_id, "consul", consul.endpoint)
        assert "deleted 1 keys" in capsys.readouterr().out
        client.put("key", b"new")
        past = began + 4 - time.monotonic()
        assert not until(lambda: client.get("key") is None, past), "the old deadline was kept"


def consul_keys(server: servers.LocalServer) -> str:
    connection = HTTPConnection(server.endpoint)
    connection.request("GET", "/v1/kv/?keys")
    answer = connection.getresponse()
    keys = answer.read().decode()
    connection.close()
    return keys if answer.status == 200 else ""


def test_check_leaves_nothing_behind(
    consul: servers.LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        assert "check-" in consul_keys(consul)
        raise RendezvousConnectionError("it went away")

    shown = rdzv("check", "-b", "consul", "-e", consul.endpoint)
    assert shown.returncode == 0, shown.stderr
    assert "check-" not in consul_keys(consul)
    monkeypatch.setattr(stores, "_wake_up", fail)
    with pytest.raises(RendezvousConnectionError, match="it went away"):
        stores.check("consul", consul.endpoint)
    assert "check-" not in consul_keys(consul)


class Deaf(MemoryClient):
    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        raise RendezvousConnectionError("the store hung up")


def test_check_tells_why_a_waiter_failed() -> None:
    server = MemoryServer()
    with pytest.raises(RendezvousConnectionError, match="the store hung up"):
        stores._wake_up(MemoryClient(server, "check"), Deaf(server, "check"))


def test_the_console_leaves_addresses_as_they_are() -> None:
    console = plain_console()
    table = Table("node")
    table.add_row("[fd00::1]:29400")
    with console.capture() as shown:
        console.print("[fd00:b:1]:29400", table)
    assert "[fd00:b:1]:29400" in shown.get()
    assert "[fd00::1]:29400" in shown.get()


def test_check_tries_what_a_rendezvous_does(server: servers.LocalServer) -> None:
    shown = rdzv("check", "-e", server.endpoint)
    assert shown.returncode == 0, shown.stderr
    assert "wake-up of a waiter" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "-i", "x", "-e", "redis://127.0.0.1:1"), "could not be reached"),
        (("status", "-i", "x", "-b", "rediss"), "unknown backend 'rediss'"),
        (("status", "-i", "x", "-c", "clustr=true"), "did you mean 'cluster'"),
        (("status", "-i", "x", "-c", "password=hunter2"), "$RDZV_PLUGINS_PASSWORD"),
        (("serve", "oracle"), "unknown server 'oracle'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    shown = rdzv(*arguments)
    assert shown.returncode == 1
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr
    assert "hunter2" not in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1


def test_serve_runs_a_server_until_it_is_interrupted() -> None:
    command = [sys.executable, "-u", "-m", "rdzv_plugins.cli", "serve", "valkey"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    endpoint = serving.stdout.readline().split(" runs at ")[1].split(";")[0]
    assert rdzv("check", "-e", endpoint).returncode == 0
    serving.send_signal(signal.SIGINT)
    assert serving.wait(30) == 0
    assert rdzv("check", "-e", endpoint, "-c", "").returncode == 1
