"""The handler and its driver decide nothing: what the simulator proves is what runs."""

from __future__ import annotations

import ast
import atexit
import importlib.util
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace
from torch.distributed.elastic.multiprocessing import SignalException

from rdzv_plugins.kv import (
    AccessDeniedError,
    Entry,
    ExhaustedError,
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.observe.history import Archive, Listed, list_runs
from rdzv_plugins.process.driver import Driver, Watcher, carry_out
from rdzv_plugins.protocol import decide, effects, rounds, rules, situation
from rdzv_plugins.protocol.contact import Standing
from rdzv_plugins.protocol.documents import NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.round_record import RoundRecord, record_of
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.testing.harness import until


def tree_of(module: str) -> ast.Module:
    spec = importlib.util.find_spec(f"rdzv_plugins.process.{module}")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())


def names_used(tree: ast.AST) -> set[str]:
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return used | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def names_imported_from_the_protocol(tree: ast.Module) -> set[str]:
    modules = {module.__name__ for module in (decide, rounds, rules, situation)}
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for alias in node.names
    }


@pytest.mark.parametrize("module", ["handler", "driver"])
def test_handler_and_driver_know_the_settings_and_the_failures_and_no_rule(module: str) -> None:
    tree = tree_of(module)
    assert names_imported_from_the_protocol(tree) <= {"Rules", "Failure"}
    theirs = {
        name
        for it in (rules, decide, rounds, situation)
        for name, value in vars(it).items()
        if getattr(value, "__module__", "") == it.__name__ and not name.startswith("_")
    }
    assert {"View", "decide", "naming", "assess"} < theirs
    theirs -= {"Rules", "Failure"}
    # Names that are also everyday words of these modules.
    theirs -= {"Wait", "Write", "Start", "Fail"}
    assert not names_used(tree) & theirs
    for call in ("order_ranks", "FailureDetector"):
        assert call not in names_used(tree)


@pytest.mark.parametrize("module", ["handler", "driver"])
def test_handler_and_driver_write_neither_rounds_nor_records_of_their_own(module: str) -> None:
    """They make a first record and a document to close where there is none, and change none."""
    used = names_used(tree_of(module))
    assert "replace" not in used
    if module == "driver":
        assert not used & {"RoundDocument", "NodeRecord", "Phase", "Status"}


class Recording(MemoryClient):
    """Notes what the driver calls, not what a call makes of it."""

    def __init__(self, server: MemoryServer, namespace: str, calls: list[str]) -> None:
        super().__init__(server, namespace)
        self.calls = calls

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or not callable(value) or name == "check_size":
            return value
        calls = super().__getattribute__("calls")

        def noted(*arguments: Any) -> Any:
            calls.append(name)
            before = len(calls)
            answer = value(*arguments)
            del calls[before:]
            return answer

        return noted


RUNNING = RoundDocument(
    incarnation="the-run", round=1, phase=Phase.RUNNING, leader="n1", min_nodes=1, max_nodes=1,
    participants=("n1",), master="host:1",
)  # fmt: skip
RECORD = NodeRecord(
    address="host", pid=1, beat=1, status=Status.JOIN, round=-1, min_nodes=1, max_nodes=1,
    interval=1.0, lease=3.0,
)  # fmt: skip
REQUESTS: dict[type, tuple[Any, list[str]]] = {
    effects.PutRecord: (effects.PutRecord("n1", RECORD, True), ["put_many"]),
    effects.PutShards: (effects.PutShards({"roster/a/b/0": b"{}"}), ["put_many"]),
    effects.Ring: (effects.Ring("n1"), ["put"]),
    effects.Read: (effects.Read("state"), ["get"]),
    effects.CompareAndSet: (effects.CompareAndSet("state", b"x", None), ["compare_and_set"]),
    effects.List: (effects.List("nodes/"), ["list"]),
    effects.Drop: (effects.Drop(("nodes/n2",)), ["delete_many"]),
    effects.Park: (effects.Park("state", None, 0.001), ["wait"]),
    effects.Rest: (effects.Rest(0.001), []),
    effects.KeepLinks: (effects.KeepLinks((("n2", "host:1"),)), ["hold"]),
    effects.OpenMaster: (effects.OpenMaster("1-world_id", 0.05), ["open"]),
    effects.ReadExclusions: (effects.ReadExclusions(), ["get_many", "close"]),
    effects.DialPeer: (effects.DialPeer("1-world_id 1", 0.05, "n2", "host:1", True, 1.0), ["dial"]),
    effects.DropStores: (effects.DropStores("the-run", 1), ["list", "delete_many"]),
    effects.Expire: (effects.Expire(60.0), ["expire"]),
    effects.PutTombstone: (effects.PutTombstone(RUNNING), ["put", "expire", "list", "close"]),
    effects.ReadTombstone: (effects.ReadTombstone("the-run"), ["get", "close"]),
    effects.RecordHistory: (effects.RecordHistory(record_of(RUNNING, {})), []),
    effects.Register: (effects.Register(record_of(RUNNING, {})), []),
    effects.Tell: (effects.Tell("found", "a line"), []),
    effects.FinishJoin: (effects.FinishJoin(effects.JoinOutcome(document=RUNNING)), []),
}


def archive(calls: list[str]) -> Archive:
    server = MemoryServer()
    return Archive(lambda run_id: Recording(server, run_id, calls), "run", history_ttl=60.0)


def make_driver(client: MemoryClient, calls: list[str] | None = None) -> Driver:
    rules = Rules(min_nodes=1, max_nodes=1, lease=3.0, interval=1.0, last_call_timeout=0.0)
    node = Node("n1", RECORD, rules, 60.0, lambda: 1.0, random.Random(1), lambda: 1.0)
    noted = [] if calls is None else calls

    def open_master(world_id: str) -> str:
        noted.append("open")
        return "host:1"

    def dial(request: effects.DialPeer) -> float:
        noted.append("dial")
        return 0.1

    def hold(peers: dict[str, str], standing: Standing) -> None:
        noted.append("hold")

    of = node, client, archive(noted), open_master, "test"
    return Driver(*of, dial=dial, keep_links=hold)


def test_every_request_is_carried_out() -> None:
    # By names: a dataclass with slots is a second class.
    kinds = {kind.__name__ for kind in effects.Effect.__subclasses__() if kind is not effects.Begin}
    kinds |= {kind.__name__ for kind in effects.Begin.__subclasses__()}
    assert {kind.__name__ for kind in REQUESTS} == kinds


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_a_request_is_one_errand(kind: type) -> None:
    """One call; two where it reads what to change, and that for people and for tidiness only."""
    request, calls = REQUESTS[kind]
    noted: list[str] = []
    make_driver(Recording(MemoryServer(), "run", noted), noted)._perform(request)
    # A TCPStore is opened in a thread of its own.
    assert until(lambda: noted == calls, 10.0), noted


def scripted(asked: list[Any], answers: list[Any]) -> effects.Effects[None]:
    for request in asked:
        try:
            answers.append((yield request))
        except (RendezvousConnectionError, RendezvousStateError) as error:
            answers.append(error)


def test_answers_and_errors_reach_the_node_unchanged() -> None:
    client = MemoryClient(MemoryServer(), "run")
    answers: list[Any] = []
    asked = [
        effects.CompareAndSet("state", b"a", None),
        effects.CompareAndSet("state", b"b", None),
        effects.Read("state"),
        effects.Park("state", None, 0.0),
        effects.List("st"),
    ]
    carry_out(client, archive([]), scripted(asked, answers), lambda _: None)
    (entry, written), (same, again), read, parked, listed = answers
    assert isinstance(entry, Entry)
    assert (written, again) == (True, False)
    assert same == read == parked == listed["state"] == entry

    client.close()
    driver, answers = make_driver(client), []
    with pytest.raises(StopIteration):
        driver._drive(scripted([effects.Read("state"), effects.Rest(0.001)], answers))
    assert isinstance(answers[0], RendezvousConnectionError)
    assert answers[1:] == [None]


def test_watchers_see_each_effect_and_what_they_raise_harms_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = MemoryClient(MemoryServer(), "run")
    seen: list[Any] = []
    answers: list[Any] = []

    def stumble(*_: object) -> None:
        raise KeyError("a watcher's bug")

    def watch(request: effects.Effect[Any], answer: Any, error: Exception | None) -> None:
        seen.append((request, answer if error is None else error))

    asked = [effects.CompareAndSet("state", b"a", None), effects.Read("state")]
    kept = archive([])
    watchers: list[Watcher] = [stumble, watch]
    carry_out(client, kept, scripted(asked, answers), lambda _: None, watchers)
    client.close()
    carry_out(client, kept, scripted(asked[1:], answers), lambda _: None, watchers)
    assert seen == [*zip([*asked, asked[1]], answers, strict=True)]
    assert isinstance(answers[2], RendezvousConnectionError)
    assert [it.getMessage() for it in caplog.records] == [
        "this node could not report what it does, and goes on; please report the error"
    ] * 2, "once a life"


def test_a_signal_passes_a_watcher() -> None:
    def interrupted(*_: object) -> None:
        raise SignalException("Process got signal", signal.SIGTERM)

    client, work = MemoryClient(MemoryServer(), "run"), scripted([effects.Rest(0.0)], [])
    with pytest.raises(SignalException):
        carry_out(client, archive([]), work, lambda _: None, [interrupted])


def test_what_fails_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    away, unreadable = RendezvousConnectionError("away"), RendezvousStateError("unreadable")
    met = [away, away, unreadable, unreadable, None, away]

    class Failing(MemoryClient):
        def get(self, key: str) -> Entry | None:
            error = met.pop(0)
            if error is not None:
                raise error
            return super().get(key)

    driver = make_driver(Failing(MemoryServer(), "run"))
    with pytest.raises(StopIteration):
        driver._drive(scripted([effects.Read("state"), effects.Rest(0.001)] * len(met), []))
    said = [message.split(" ")[2] for message in caplog.messages]
    assert said == ["away", "unreadable", "the", "away"]


def test_one_refused_request_among_others_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As of a leader without the right to list; a longer outage is told all the same."""

    class Refusing(MemoryClient):
        errors: ClassVar[list[Exception]] = []

        def get(self, key: str) -> Entry | None:
            raise self.errors.pop(0)

    refused, away = AccessDeniedError("refused"), RendezvousConnectionError("away")
    heard = [effects.Read("state"), effects.Rest(0.001), effects.List("nodes/")]
    Refusing.errors = [refused] * 5
    driver = make_driver(Refusing(MemoryServer(), "run"))
    with pytest.raises(StopIteration):
        driver._drive(scripted(heard * 5, []))
    said = [message.split(" ")[2] for message in caplog.messages]
    assert said == ["refused", "the"]
    assert driver.outage_seconds == 0.0
    caplog.clear()
    Refusing.errors = [refused, away, away, refused]
    unheard = [effects.Read("state"), effects.Rest(0.001)]
    with pytest.raises(StopIteration):
        driver._drive(scripted([*unheard * 4, effects.List("nodes/")], []))
    said = [message.split(" ")[2] for message in caplog.messages]
    assert said == ["away", "the"]


def test_a_store_that_may_lose_the_run_or_the_password_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Evicting(MemoryClient):
        def inspect(self) -> list[Finding]:
            return [
                Finding(Mark.OK, "persistence", "snapshots"),
                Finding(Mark.WARNING, "eviction", "allkeys-lru", "set noeviction"),
                Finding(Mark.WARNING, "TLS", "plain"),
            ]

    driver = make_driver(Evicting(MemoryServer(), "run"))
    record = effects.RecordHistory(record_of(RUNNING, {}))
    for _ in range(2):
        with pytest.raises(StopIteration):
            driver._drive(scripted([record], []))
        driver._note()
    assert caplog.messages == [
        "run 'test': memory: eviction: allkeys-lru; set noeviction",
        "run 'test': memory: TLS: plain",
    ]


def test_a_second_record_of_a_round_replaces_the_first_at_the_same_time() -> None:
    """Readers of the list of runs see that there is something new."""
    server = MemoryServer()
    driver = make_driver(MemoryClient(server, "run"))
    listed: list[Listed] = []
    for steps in (None, 40):
        again = replace(record_of(RUNNING, {}), lost_steps=steps)
        with pytest.raises(StopIteration):
            driver._drive(scripted([effects.RecordHistory(again, 1000.0)], []))
        driver._note()
        (row,) = driver._archive.rows()
        assert (row.at, row.lost_steps) == ("1970-01-01T00:16:40.000+00:00", steps)
        listed += list_runs(driver._archive._open).values()
        time.sleep(0.002)  # Times in the list are in milliseconds.
    assert listed[0] != listed[1]


def test_a_pause_is_no_longer_for_the_history_that_is_written_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, waits = make_driver(MemoryClient(MemoryServer(), "run")), list[float]()
    monkeypatch.setattr(driver._archive, "note", lambda record, at: time.sleep(0.2))
    monkeypatch.setattr(driver._client, "wait", lambda *it: waits.append(it[2]))
    driver._to_note.append((time.monotonic(), datetime.now(UTC), record_of(RUNNING, {})))
    driver._perform(effects.Park("state", None, 5.0))
    assert 0 < waits[0] <= 4.8


@pytest.mark.parametrize(
    ("error", "rows"), [(RendezvousConnectionError("away"), 1), (AccessDeniedError("refused"), 0)]
)
def test_the_history_is_written_once_the_store_has_a_leader_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, rows: int
) -> None:
    """A driver that is refused does not ask again."""
    driver = make_driver(MemoryClient(MemoryServer(), "run"))
    note, errors = driver._archive.note, [error] * 3

    def away(record: RoundRecord, at: datetime) -> None:
        if errors:
            raise errors.pop()
        note(record, at)

    monkeypatch.setattr(driver._archive, "note", away)
    with pytest.raises(StopIteration):
        driver._drive(scripted([effects.RecordHistory(record_of(RUNNING, {}))], []))
    for _ in range(4):
        driver._note()
    assert len(driver._archive.rows()) == rows


def test_the_outcome_reaches_the_agent() -> None:
    driver = make_driver(MemoryClient(MemoryServer(), "run"))
    assert driver.join().document is not None
    driver.stop(5.0)
    assert not driver.running


def test_a_thread_that_a_signal_interrupts_in_its_start_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = make_driver(MemoryClient(MemoryServer(), "run"))
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == driver._name:
            raise SignalException("Process got signal", signal.SIGTERM)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(SignalException):
        driver.join()
    assert driver.running
    driver.stop(5.0)
    assert not [it for it in threading.enumerate() if it.name == driver._name]


def test_a_node_without_a_thread_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    nudges: list[float] = []

    class Counting(MemoryClient):
        def interrupt(self) -> None:
            nudges.append(time.monotonic())

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ExhaustedError):
        make_driver(Counting(MemoryServer(), "run")).join()
    assert len(nudges) < 50


def test_the_end_of_the_process_awaits_each_tcpstore_that_still_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node leads a second round while the first look-up of a name hangs."""
    driver, found = make_driver(MemoryClient(MemoryServer(), "run")), threading.Event()
    monkeypatch.setattr(driver, "_open_master", lambda world_id: found.wait(30) and "host:1")
    awaited: list[tuple[Callable[[float], None], float]] = []
    monkeypatch.setattr(atexit, "register", lambda *what: awaited.append(what))
    for world_id in ("1-world", "2-world"):
        driver._perform(effects.OpenMaster(world_id, 0.0))
    driver.await_masters(0.01)
    found.set()
    assert len(awaited) == 2
    for join, seconds in awaited:
        join(seconds)
    driver.await_masters(0.0)
    assert len(awaited) == 2
