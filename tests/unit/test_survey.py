"""All runs under a prefix, as a survey sees them come, go and come again."""

from __future__ import annotations

import re
import time
from contextlib import closing

import msgspec
import pytest
from msgspec.structs import replace

from rdzv_plugins.kv import ClientClosedError, MemoryClient, MemoryServer, RendezvousConnectionError
from rdzv_plugins.observe.exporter import Exporter
from rdzv_plugins.observe.history import LIST, Archive
from rdzv_plugins.observe.inspection import Condition
from rdzv_plugins.observe.survey import Survey
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    Names,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.round_record import record_of
from tests.unit.life import Time

RUNNING = RoundDocument(
    incarnation="first", round=0, phase=Phase.RUNNING, leader="n1", min_nodes=1, max_nodes=2,
    participants=("n1",), master="host:1", cause=Cause(note="first round"),
)  # fmt: skip
NODE = NodeRecord(
    address="host", pid=1, beat=1, status=Status.RUN, round=0, min_nodes=1, max_nodes=2,
    interval=1.0, lease=3.0,
)  # fmt: skip


class Store:
    """A store that can go away; it remembers which connections are open."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.clients: dict[str, MemoryClient] = {}
        self.opened: list[str] = []
        self.away = False

    def open(self, run_id: str) -> MemoryClient:
        if self.away:
            raise RendezvousConnectionError("no answer")
        self.opened.append(run_id)
        self.clients[run_id] = MemoryClient(self.server, run_id)
        return self.clients[run_id]

    def archive(self, run_id: str) -> Archive:
        def open(name: str) -> MemoryClient:
            if self.away:
                raise RendezvousConnectionError("no answer")
            return MemoryClient(self.server, name)

        return Archive(open, run_id, 100.0)

    def write(self, run_id: str, document: RoundDocument | None, beat: int = 1) -> None:
        """A run as its leader leaves it, and its node's heartbeat; None: its keys expired."""
        client = MemoryClient(self.server, run_id)
        if document is None:
            client.delete_many([*client.list("")])
            return
        client.put(STATE_KEY, document.encode())
        client.put(NODES_PREFIX + "n1", replace(NODE, beat=beat).encode())
        self.archive(run_id).note(record_of(document, {"n1": NODE}))

    def is_open(self, run_id: str) -> bool:
        try:
            self.clients[run_id].get("any")
        except ClientClosedError:
            return False
        return True

    def end(self) -> None:
        self.away = True
        for client in self.clients.values():
            client.close()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def survey(store: Store) -> Survey:
    return Survey(store.open, store.archive)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr("rdzv_plugins.observe.inspection.time.monotonic", time)
    return time


def conditions(survey: Survey) -> dict[str, Condition | None]:
    return {run_id: seen.condition for run_id, seen in survey.runs.items()}


def test_a_run_keeps_its_connection_until_its_end_is_noted(store: Store, survey: Survey) -> None:
    store.write("job", RUNNING)
    survey.look()
    survey.look()
    assert conditions(survey) == {"job": Condition.RUNNING}
    assert store.opened == [LIST, "job"]
    ended = replace(RUNNING, phase=Phase.CLOSED, outcome=Outcome.SUCCEEDED, cause=Cause(note="ok"))
    store.write("job", ended)
    survey.look()
    assert conditions(survey) == {"job": Condition.CLOSED}
    assert survey.runs["job"].sentence.startswith("succeeded at ")
    assert not store.is_open("job")
    survey.look()
    assert store.opened == [LIST, "job"]


def test_a_run_that_is_closed_by_request_is_watched_until_its_keys_are_gone(
    store: Store, survey: Survey
) -> None:
    closed = replace(RUNNING, phase=Phase.CLOSED, outcome=Outcome.CLOSED)
    store.write("job", closed)
    survey.look()
    assert survey.runs["job"].report()["nodes"][0]["state"] == "running"
    store.write("job", None)
    survey.look()
    survey.look()
    assert not store.is_open("job")
    assert survey.runs["job"].report()["last"]["outcome"] == "closed"


def test_an_id_that_is_used_again_is_watched_again(store: Store, survey: Survey) -> None:
    store.write("job", RUNNING)
    survey.look()
    store.write("job", None)
    survey.look()
    survey.look()
    assert conditions(survey) == {"job": Condition.DEAD}
    assert not store.is_open("job")
    store.write("job", replace(RUNNING, incarnation="second"))
    survey.look()
    assert survey.runs["job"].report()["incarnation"] == "second"
    assert conditions(survey) == {"job": Condition.RUNNING}


def test_a_run_goes_on_that_only_the_list_has_lost(store: Store, survey: Survey) -> None:
    store.write("job", RUNNING)
    survey.look()
    MemoryClient(store.server, LIST).delete("job")
    survey.look()
    assert conditions(survey) == {"job": Condition.RUNNING}
    store.write("job", None)
    for _ in range(3):
        survey.look()
    assert conditions(survey) == {}
    assert not store.is_open("job")


def test_an_outage_is_told_once_and_counts_against_no_heartbeat(
    store: Store, survey: Survey, clock: Time
) -> None:
    store.write("job", RUNNING)
    survey.look()
    survey.runs["job"].client.get = refuse  # type: ignore[union-attr, method-assign]
    survey.look()
    assert survey.away is not None
    since, why = survey.away
    assert why == "no answer"
    clock.now += 60.0
    survey.look()
    assert survey.away == (since, why)
    assert conditions(survey) == {"job": Condition.RUNNING}
    del survey.runs["job"].client.get  # type: ignore[union-attr]
    survey.look()
    assert survey.away is None
    assert conditions(survey) == {"job": Condition.RUNNING}
    clock.now += 60.0
    survey.look()
    assert conditions(survey) == {"job": Condition.DEAD}


def refuse(key: str) -> None:
    raise RendezvousConnectionError("no answer")


def test_a_document_that_nobody_can_read_hides_no_other_run(store: Store, survey: Survey) -> None:
    store.write("bad", RUNNING)
    store.write("good", RUNNING)
    MemoryClient(store.server, "bad").put(STATE_KEY, b"?")
    survey.look()
    assert conditions(survey) == {"good": Condition.RUNNING, "bad": None}
    assert "unreadable" in survey.runs["bad"].sentence
    assert survey.runs["bad"].report()["condition"] == "unreadable"


def test_rows_are_read_once_a_round_and_kept_through_an_outage(
    store: Store, survey: Survey, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    archive = store.archive

    def counting(run_id: str) -> Archive:
        asked.append(run_id)
        return archive(run_id)

    monkeypatch.setattr(survey, "_archive", counting)
    store.write("job", RUNNING)
    survey.look()
    asked.clear()
    assert [row.round for row in survey.rows("job")] == [0]
    assert [row.round for row in survey.rows("job")] == [0]
    assert asked == ["job"]
    lost = Cause(lost=Names(("host2[2]",)))
    store.write("job", replace(RUNNING, round=1, cause=lost))
    survey.look()
    assert [row.round for row in survey.rows("job")] == [0, 1]
    store.end()
    assert [row.round for row in survey.rows("job")] == [0, 1]


def test_runs_are_listed_the_newest_first(store: Store, survey: Survey) -> None:
    began = {
        run_id: f"2026-01-{day:02}T00:00+00:00"
        for run_id, day in (("old", 1), ("new", 3), ("middle", 2))
    }
    client = MemoryClient(store.server, LIST)
    for run_id, at in began.items():
        store.write(run_id, RUNNING)
        listed = msgspec.json.decode(client.list("")[run_id].value)
        client.put(run_id, msgspec.json.encode(listed | {"began": at}))
    survey.look()
    assert [*survey.runs] == ["new", "middle", "old"]


def test_a_brief_look_says_what_it_does_not_know() -> None:
    store = Store()
    store.write("dead", RUNNING)
    slow = replace(NODE, interval=60.0, lease=180.0, at=int(time.time()) - 600)
    MemoryClient(store.server, "dead").put(NODES_PREFIX + "n1", slow.encode())
    with closing(Survey(store.open, store.archive)) as survey:
        began = time.monotonic()
        survey.settle()
        assert time.monotonic() - began < 6, "a status watches for 12 s"
        seen = survey.runs["dead"]
        assert not seen.is_known
        assert seen.inspection is not None
        told = (
            r"not known yet whether its nodes live: they send heartbeats every 60 s, the last at "
        )
        assert re.fullmatch(
            told + r"\d\d:\d\d:\d\d UTC; rdzv status -i dead watches for longer",
            seen.inspection.why_unknown,
        )


def test_a_brief_look_at_a_store_that_is_away_says_so() -> None:
    store = Store()
    store.away = True
    with pytest.raises(RendezvousConnectionError, match="no answer"):
        Survey(store.open, store.archive).settle()


def test_hundreds_of_entries_open_few_connections() -> None:
    """240 kB of entries in the list of runs opened 600, up to what the server takes at all."""
    store = Store()
    many = [f"run{at}" for at in range(120)]
    entry = (
        '{"run":"%s","incarnation":"r","began":"2026-01-01T00:00+00:00",'
        '"at":"2026-01-01T00:00+00:00","until":"2027-01-01T00:00+00:00",'
        '"phase":"running","round":1,"nodes":2}'
    )
    with closing(store.open(LIST)) as client:
        for at in range(600):
            client.put(f"forged{at}", (entry % f"forged{at}").encode())
        for run in many:
            client.put(run, (entry % run).encode())
    for run in many:
        store.write(run, replace(RUNNING, run=run))
    open_now: set[str] = set()
    most = 0

    class Counted(MemoryClient):
        def close(self) -> None:
            open_now.discard(self._namespace)
            super().close()

    def open(run_id: str) -> MemoryClient:
        nonlocal most
        open_now.add(run_id)
        most = max(most, len(open_now))
        return Counted(store.server, run_id)

    with closing(Survey(open, store.archive)) as survey:
        for beat in range(2, 5):
            survey.look()
            for run in many:
                store.write(run, replace(RUNNING, run=run), beat=beat)
        assert most <= 40
        # Each was read all the same, and again in turn.
        assert all(survey.runs[run].condition is Condition.RUNNING for run in many)
        assert survey.runs["forged7"].condition is not Condition.RUNNING
    assert not open_now


@pytest.mark.parametrize(
    "value",
    [b"{" * 5000, b"\xff", replace(RUNNING, run="another").encode(), b"raises"],
    ids=["nested", "utf-8", "another's", "any error"],
)
def test_one_broken_run_costs_the_others_nothing(
    value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    for run in ("bad", "good"):
        store.write(run, replace(RUNNING, run=run))
        store.archive(run).note(record_of(RUNNING, {}))
    with closing(store.open("bad")) as client:
        client.put(STATE_KEY, value)
    if value == b"raises":
        decode = RoundDocument.decode

        def broken(data: bytes) -> RoundDocument:
            if data == value:
                raise IndexError("list index\nout of range")
            return decode(data)

        monkeypatch.setattr(RoundDocument, "decode", broken)
    with closing(Survey(store.open, store.archive)) as survey:
        survey.look()
        assert survey.away is None
        reports = {run: seen.report() for run, seen in survey.runs.items()}
        families = {it.name: it for it in Exporter(survey).collect()}
    assert reports["good"]["condition"] == "running"
    assert reports["bad"]["condition"] == "unreadable"
    assert reports["bad"]["sentence"].isprintable()
    rounds = families["rdzv_round"].samples
    assert [it.labels["run"] for it in rounds] == ["good"]
