"""What a host has run out of is told once, and tried again; it ends no node."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from rdzv_plugins.health.checks import CallCheck
from rdzv_plugins.health.command import CommandCheck
from rdzv_plugins.health.gate import Gate
from rdzv_plugins.kv import (
    Attempts,
    ExhaustedError,
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    exhausted,
)
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.peers.addresses import (
    gloo_address,
    is_own_ip,
    listen,
    loopback,
    node_address,
    route_to,
)
from rdzv_plugins.process.driver import Driver
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import NodeRecord, Status
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.testing.harness import until

pytestmark = pytest.mark.rule("a slow, a full and an exhausted store")

RULES = Rules(min_nodes=1, max_nodes=1, lease=0.6, interval=0.2, last_call_timeout=0.0)


def behind(cause: BaseException) -> Exception:
    error = ValueError("a library's own")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "this host can open no more"),
        (MemoryError(), "no memory left"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory left"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (behind(OSError(errno.EMFILE, "Too many open files")), "ulimit -n"),
    ],
)
def test_an_error_of_exhaustion_names_what_is_missing(error: Exception, words: str) -> None:
    missing = exhausted(error)
    assert isinstance(missing, RendezvousConnectionError)
    assert words in str(missing)
    assert exhausted(missing) is missing


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ECONNREFUSED, "Connection refused"),
        RuntimeError("can't create new thread at interpreter shutdown"),
        ValueError("no"),
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    ],
)
def test_no_other_error_counts_as_exhaustion(error: Exception) -> None:
    assert exhausted(error) is None


def test_a_signal_is_none_though_it_comes_while_one_is_handled() -> None:
    error = SignalException("got a signal", signal.SIGTERM)
    error.__context__ = OSError(errno.EMFILE, "Too many open files")
    assert exhausted(error) is None
    assert exhausted(error.__context__) is not None


def test_a_check_is_started_once_threads_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Refusing(monkeypatch, "rdzv-check-fit", "rdzv-check-poor")
    host.until = time.monotonic() + 0.6
    gate = Gate([CallCheck("fit", lambda: lambda: None)], 20.0, False, pytest.fail)
    assert gate.check() is None
    assert 3 <= len(host.refused) <= 6
    host.until = float("inf")
    gate = Gate([CallCheck("poor", lambda: lambda: None)], 0.3, False, pytest.fail)
    for _ in range(2):
        assert "it cannot be started (this host lets this process start no" in str(gate.check())
    host.until = 0.0
    assert gate.check() is None


@contextmanager
def no_descriptor() -> Iterator[None]:
    """This process can open nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_command_is_started_once_this_process_may_open_files() -> None:
    gate = Gate([CommandCheck(["true"])], 20.0, False, pytest.fail)
    answers: list[str | None] = []
    checking = threading.Thread(target=lambda: answers.append(gate.check()))
    with no_descriptor():
        checking.start()
        time.sleep(0.5)
        assert checking.is_alive()
    checking.join(20.0)
    assert answers == [None]
    gate = Gate([CommandCheck(["true"])], 0.3, False, pytest.fail)
    with no_descriptor():
        assert "it cannot be started ([Errno 24]" in str(gate.check())


def test_nothing_wrong_is_learnt_of_the_own_address() -> None:
    loopback.cache_clear()
    with no_descriptor():
        for asked in (
            lambda: is_own_ip("127.0.0.1"),
            loopback,
            lambda: listen(),
            lambda: route_to([("127.0.0.1", 1)]),
            # Its resolver can read no /etc/hosts.
            lambda: route_to([("localhost", 1)]),
            lambda: node_address(None, [("127.0.0.1", 1)]),
            gloo_address,
        ):
            with pytest.raises(OSError, match="Too many open files"):
                asked()
    assert is_own_ip("127.0.0.1")
    assert str(route_to([("127.0.0.1", 1)])) == "127.0.0.1"
    assert route_to([("no-such-host.invalid", 1)]) is None
    assert loopback() == ("::1" if is_own_ip("::1") else "127.0.0.1")


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_rank_0_without_a_descriptor_tries_again(address: str) -> None:
    """It is no fault of its address, nor of the ports, which would end its join."""
    server, settings = MemoryServer(), Settings(master_port="30000-30010")
    archive = Archive(lambda run: MemoryClient(server, run), "run", 3600.0)
    made = StoreRendezvousHandler(
        MemoryClient(server, "run"), archive, "run", RULES, settings, address
    )
    try:
        with no_descriptor(), pytest.raises(ExhaustedError, match=r"files|name"):
            made._open_master("1-a")
        assert made._open_master("1-a").startswith(address)
    finally:
        made.shutdown()


def test_pauses_grow_and_the_first_failure_is_told() -> None:
    now = [100.0]
    attempts = Attempts(lambda: now[0])
    told, pauses = [], []
    for _ in range(9):
        assert attempts.seconds_left == 0
        told.append(attempts.fail())
        pauses.append(attempts.seconds_left)
        now[0] += attempts.seconds_left
    assert told == [True, *8 * [False]]
    assert pauses == sorted(pauses)
    assert [pauses[0], pauses[-1]] == pytest.approx([0.05, 2.0])
    assert attempts.succeed()
    assert not attempts.succeed()
    assert attempts.fail()


class Refusing:
    """A host that lets no thread of some names start for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: str) -> None:
        self.refused: list[float] = []
        self.until = float("inf")
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if time.monotonic() < self.until and thread.name.endswith(ends):
                self.refused.append(time.monotonic())
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)


def driver_of(client: Any, server: MemoryServer) -> Driver:
    record = NodeRecord(
        address="host", pid=1, beat=0, status=Status.JOIN, round=-1, min_nodes=1, max_nodes=1,
        interval=RULES.interval, lease=RULES.lease,
    )  # fmt: skip
    node = Node("n1", record, RULES, 20.0, time.monotonic, random.Random(1), time.time)
    archive = Archive(lambda run: MemoryClient(server, run), "run", 3600.0)
    return Driver(node, client, archive, lambda _: "host:1", "run")


def test_the_nodes_own_thread_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = Refusing(monkeypatch, "rdzv-run")
    host.until = time.monotonic() + 0.6
    server = MemoryServer()
    driver = driver_of(MemoryClient(server, "run"), server)
    outcome = driver.join(patience=20.0)
    assert outcome.document is not None
    assert 3 <= len(host.refused) <= 6
    lines = [it.message for it in caplog.records if "start no thread" in it.message]
    assert len(lines) == 1
    driver.stop(5)


def test_a_newcomer_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Refusing(monkeypatch, "rdzv-run")
    server = MemoryServer()
    driver = driver_of(MemoryClient(server, "run"), server)
    began = time.monotonic()
    with pytest.raises(ExhaustedError, match="start no thread"):
        driver.join(patience=0.5)
    assert time.monotonic() - began >= 0.5
    driver.stop(5)


def test_a_stop_ends_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Refusing(monkeypatch, "rdzv-run")
    server = MemoryServer()
    driver = driver_of(MemoryClient(server, "run"), server)
    ended: list[object] = []
    agent = threading.Thread(target=lambda: ended.append(driver.join(patience=60.0)))
    agent.start()
    assert until(lambda: len(host.refused) > 5, 10)
    driver.stop(0.1)
    agent.join(2)
    assert [getattr(it, "document", "none") for it in ended] == [None]


def test_whatever_a_node_does_beside_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = Refusing(monkeypatch, "-master")
    server = MemoryServer()
    driver = driver_of(MemoryClient(server, "run"), server)
    outcomes: list[Any] = []
    agent = threading.Thread(target=lambda: outcomes.append(driver.join(patience=20.0)))
    agent.start()
    assert until(lambda: len(host.refused) > 2, 10)
    host.until = 0.0
    agent.join(10)
    assert outcomes
    assert outcomes[0].document is not None
    archive = Archive(lambda run: MemoryClient(server, run), "run", 3600.0)
    assert until(lambda: len(archive.rows()) > 0, 10)
    driver.stop(5)
    assert driver.outage_seconds == 0
    assert not [it for it in caplog.records if it.exc_info]


class Poor(MemoryClient):
    """Its host lets it open nothing for a while."""

    seconds = float("inf")
    _since: float | None = None

    def put_many(self, values: Any) -> None:
        self._since = time.monotonic() if self._since is None else self._since
        if time.monotonic() < self._since + self.seconds:
            raise OSError(errno.EMFILE, "Too many open files")
        super().put_many(values)


def test_a_request_that_finds_no_descriptor_is_borne(caplog: pytest.LogCaptureFixture) -> None:
    server = MemoryServer()
    client = Poor(server, "run")
    client.seconds = 1.0
    driver = driver_of(client, server)
    assert driver.join(patience=20.0).document is not None
    driver.stop(5)
    lines = [it.message for it in caplog.records]
    assert len([it for it in lines if "may open no more files" in it]) == 1
    assert len([it for it in lines if "can ask the store again after 1." in it]) == 1


def test_a_node_that_has_no_memory_itself_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MemoryServer()
    driver = driver_of(MemoryClient(server, "run"), server)
    turn, failures = Node._turn, [MemoryError(), MemoryError()]

    def turns(self: Node) -> Any:
        if failures:
            raise failures.pop()
        return turn(self)

    monkeypatch.setattr(Node, "_turn", turns)
    assert driver.join(patience=20.0).document is not None
    driver.stop(5)
