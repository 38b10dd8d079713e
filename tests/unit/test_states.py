"""What a node does is one word, and when it wrote is its own clock's, wherever one looks."""

from __future__ import annotations

import math
import re
import time
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from rdzv_plugins.cli.runs import _nodes, _on_a_screen, _summary
from rdzv_plugins.kv import MemoryClient, MemoryServer
from rdzv_plugins.observe.exporter import Exporter, _now
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.observe.inspection import Inspection
from rdzv_plugins.observe.survey import Survey
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    Exclusion,
    Names,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.round_record import record_of
from rdzv_plugins.protocol.states import State, state_of
from rdzv_plugins.protocol.wall_clock import as_iso, shown
from rdzv_plugins.testing.harness import until
from tests import replace

from .life import RULES, Life, Time, finish, stored
from .views import document, record, running

ROOT = Path(__file__).parents[2]
FORMING = document(Phase.FORMING, 5, previous=("n1", "n2"))
CONFIRMING = document(Phase.CONFIRMING)
RUNNING = document(Phase.RUNNING)
CLOSED = replace(document(Phase.CLOSED), participants=("n1", "n2", "n3"))
ASKS = record("n4")
RUNS = running("n1", RUNNING)
AT = 1_790_000_000  # 14:13:20 UTC


@pytest.mark.parametrize(
    ("of", "node", "its", "state"),
    [
        (FORMING, "n4", ASKS, "joining"),
        (FORMING, "n4", replace(ASKS, status=Status.SPARE), "joining"),
        (FORMING, "n4", replace(ASKS, max_nodes=9), "waiting"),
        (CONFIRMING, "n2", record("n2"), "joining"),
        (CONFIRMING, "n2", running("n2", CONFIRMING), "ready"),
        (CONFIRMING, "n4", ASKS, "waiting"),
        (RUNNING, "n1", RUNS, "running"),
        (RUNNING, "n1", record("n1", round_=4), "joining"),
        (RUNNING, "n4", ASKS, "waiting"),
        (RUNNING, "n4", replace(ASKS, status=Status.SPARE), "waiting"),
        (RUNNING, "n1", replace(RUNS, status=Status.DONE), "done"),
        (RUNNING, "n1", replace(RUNS, status=Status.LEFT), "left"),
        (RUNNING, "n4", replace(ASKS, status=Status.LEFT, unfit="disk: full"), "unfit"),
        (RUNNING, "n3", None, "unknown"),
        (replace(RUNNING, absent=("n3",)), "n3", None, "lost"),
        (replace(RUNNING, absent=("n1",)), "n1", RUNS, "lost"),
        # It was in the round that ended, and the leader waits for it or has found it lost.
        (FORMING, "n1", RUNS, "running"),
        (replace(FORMING, previous=("n2",)), "n1", RUNS, "lost"),
        (replace(FORMING, previous=("n2",), still_running=("n1",)), "n1", RUNS, "evicted"),
        (replace(FORMING, previous=("n2",), drained=("n1",)), "n1", replace(RUNS), "lost"),
        (
            replace(FORMING, previous=("n2",), drained=("n1",), still_running=("n1",)),
            "n1",
            RUNS,
            "drained",
        ),
        (
            replace(FORMING, previous=("n2",), excluded=(Exclusion("n1"),), still_running=("n1",)),
            "n1",
            RUNS,
            "excluded",
        ),
        (replace(RUNNING, drained=("n4",)), "n4", replace(ASKS, status=Status.LEFT), "drained"),
        (replace(RUNNING, drained=("n1",)), "n1", RUNS, "running"),
        (replace(RUNNING, excluded=(Exclusion("n4"),)), "n4", ASKS, "excluded"),
        (replace(RUNNING, excluded=(Exclusion("n4", AT - 1.0),)), "n4", ASKS, "waiting"),
        (replace(FORMING, quarantined=(Exclusion("n4", AT + 1.0),)), "n4", ASKS, "excluded"),
        (CLOSED, "n1", RUNS, "running"),
        (CLOSED, "n4", replace(ASKS, status=Status.SPARE), "waiting"),
    ],
)  # fmt: skip
def test_what_a_node_does(of: RoundDocument, node: str, its: NodeRecord | None, state: str) -> None:
    found = state_of(of, node, its, silent=False, lost=False, now=float(AT))
    assert found.value == state


@pytest.mark.parametrize(("silent", "lost", "state"), [(1, 0, "silent"), (1, 1, "lost")])
def test_a_heartbeat_that_is_missing(silent: int, lost: int, state: str) -> None:
    def found(of: RoundDocument, its: NodeRecord) -> str:
        known = state_of(of, its.address, its, silent=bool(silent), lost=bool(lost), now=0.0)
        return known.value

    for its in (ASKS, RUNS, replace(ASKS, status=Status.LEFT, unfit="disk: full")):
        assert found(RUNNING, its) == state
    # No heartbeat of these is due.
    assert found(RUNNING, replace(RUNS, status=Status.LEFT)) == "left"
    assert found(RUNNING, replace(RUNS, status=Status.DONE)) == "done"
    assert found(replace(CLOSED, outcome=Outcome.SUCCEEDED), RUNS) == "running"
    # A person has closed it, and workers go on.
    assert found(replace(CLOSED, outcome=Outcome.CLOSED), RUNS) == state


def test_the_docs_have_each_state_once() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    table = page.partition("| state | meaning |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [state.value for state in State]


class Store:
    """A run in a store, with what its nodes wrote; and somebody who looks at it."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.client = MemoryClient(self.server, "job")
        self.archive = Archive(partial(MemoryClient, self.server), "job", 3600.0)
        self.seen = Inspection(self.client, self.archive, "job")

    def put(self, of: RoundDocument, records: dict[str, NodeRecord]) -> None:
        self.client.put(STATE_KEY, of.encode())
        self.beat(records)

    def beat(self, records: dict[str, NodeRecord]) -> None:
        self.client.put_many({NODES_PREFIX + node: it.encode() for node, it in records.items()})

    def look(self) -> Inspection:
        self.seen.look()
        return self.seen

    def states(self) -> dict[str, str]:
        return {it["name"]: it["state"] for it in self.seen.report()["nodes"]}

    def table(self) -> str:
        console = Console(width=200, markup=False, highlight=False)
        with console.capture() as shown_:
            console.print(_nodes(self.seen.nodes(), 100, False))
        return shown_.get()


@pytest.fixture
def store() -> Store:
    return Store()


def quick(of: dict[str, NodeRecord]) -> dict[str, NodeRecord]:
    return {node: replace(it, interval=0.1, lease=0.4) for node, it in of.items()}


def test_a_node_is_silent_then_lost_in_the_table_the_metrics_the_sentence_and_as_data(
    store: Store,
) -> None:
    of = replace(RUNNING, round=0, leader="n1")
    nodes = quick({node: running(node, of) for node in of.participants})
    store.put(of, nodes)
    Archive(partial(MemoryClient, store.server), "job", 3600.0).note(record_of(of, nodes))
    exporter = Exporter(Survey(partial(MemoryClient, store.server), lambda _: store.archive))

    def looked() -> str:
        nonlocal nodes
        nodes |= {it: replace(nodes[it], beat=nodes[it].beat + 1) for it in ("n1", "n2")}
        store.beat(nodes)
        store.seen.look()
        return store.states()["n3[1]"]

    assert looked() == "running"
    assert until(lambda: looked() == "silent", 10)
    assert re.search(r"n3\[1\] +│ silent ", store.table())
    assert until(lambda: looked() == "lost", 10)
    noted = re.compile(r"n3\[1\] +│ lost .* no beat in [0-9]+ s watched")
    assert until(lambda: looked() == "lost" and bool(noted.search(store.table())), 30)
    assert store.seen.report()["states"] == {"running": 2, "lost": 1}

    def counted(state: str) -> float:
        looked()
        exporter._looked = 0.0
        exporter.refresh()
        return next(
            sample.value
            for family in exporter.collect()
            for sample in family.samples
            if sample.name == "rdzv_nodes" and sample.labels["state"] == state
        )

    assert until(lambda: counted("lost") == 1, 10)
    assert counted("running") == 2
    # While a round forms, the sentence says it as well.
    forming = replace(FORMING, round=1, previous=("n1", "n2", "n3"), incarnation=of.incarnation)
    store.put(replace(forming, min_nodes=3), nodes)
    nodes |= {it: replace(nodes[it], status=Status.JOIN, min_nodes=3) for it in ("n1", "n2")}
    assert looked() == "lost"
    assert "lost n3[1]" in store.seen.sentence


def test_whom_the_leader_has_found_lost_is_lost_at_the_first_look(store: Store) -> None:
    """Killed 11 s ago: the command has watched for no time at all."""
    cause = Cause(lost=Names(("n3[1]", "n4[1]")))
    forming = replace(FORMING, min_nodes=3, cause=cause)
    asks = {node: record(node, round_=4, min_nodes=3) for node in ("n1", "n2", "n4")}
    store.put(forming, {**asks, "n3": replace(running("n3", RUNNING), at=AT)})
    store.seen.look()
    # n4 had asked for this round before it was lost.
    words = {"n1[1]": "joining", "n2[1]": "joining", "n3[1]": "lost", "n4[1]": "lost"}
    assert store.states() == words
    assert "missing: lost n3[1], n4[1]" in store.seen.sentence
    # It lives: a heartbeat comes.
    store.beat({"n4": replace(asks["n4"], beat=2)})
    store.seen.look()
    assert store.states() == words | {"n4[1]": "joining"}
    assert "n4" not in store.seen.sentence


def test_the_last_heartbeat_is_when_the_node_wrote_it_and_not_when_one_began_to_look(
    store: Store,
) -> None:
    ten_minutes_ago = int(time.time()) - 600
    nodes = {
        node: replace(running(node, RUNNING), at=ten_minutes_ago, interval=0.05, lease=0.1)
        for node in RUNNING.participants
    }
    store.put(RUNNING, nodes)
    store.seen.look()
    assert until(lambda: store.look().condition.value == "dead", 10)
    at = shown(ten_minutes_ago, time.time())
    assert store.seen.sentence.endswith(f"none of its nodes lives; the last heartbeat came at {at}")
    assert store.table().count(at) == 3
    assert {it["last_beat"] for it in store.seen.report()["nodes"]} == {as_iso(ten_minutes_ago)}


def test_what_an_earlier_version_wrote_has_no_times(store: Store) -> None:
    assert b'"at"' not in RUNS.encode()
    assert b"since" not in RUNNING.encode()
    store.put(RUNNING, {"n1": RUNS})
    store.seen.look()
    report = store.seen.report()
    assert (report["since"], report["last_call_until"], report["clocks"]) == (None, None, None)
    (mine,) = [it for it in report["nodes"] if it["name"] == "n1[1]"]
    assert (mine["state"], mine["last_beat"], mine["clock"]) == ("running", None, None)
    # Neither does it mind what it does not know.
    later = (
        replace(RUNS, at=AT, call_ends=(4, AT)).encode().replace(b'"at"', b'"of_a_later_version"')
    )
    assert NodeRecord.decode(later) == replace(RUNS, call_ends=(4, AT))
    later = replace(RUNNING, since=AT).encode().replace(b'"since"', b'"of_a_later_version"')
    assert RoundDocument.decode(later) == RUNNING


def test_clocks_that_differ_are_told_of_and_correct_nothing(store: Store) -> None:
    now = int(time.time())
    ahead = {"n1": replace(RUNS, at=now + 70), "n2": replace(running("n2", RUNNING), at=now)}
    # What stood there before one looked may be of any age.
    behind = replace(running("n3", RUNNING), at=now - 40)
    store.put(RUNNING, ahead | {"n3": behind})
    store.seen.look()
    assert re.fullmatch("clocks differ from this host's: n1 is (69|70) s ahead", store.seen.clocks)
    assert not store.seen.in_doubt or behind.interval < 40
    store.beat({"n3": replace(behind, beat=2)})
    store.seen.look()
    assert re.search(r"n1 is (69|70) s ahead, n3 is (3[89]|4\d) s behind$", store.seen.clocks)
    clocks = {it["name"]: it["clock"] for it in store.seen.report()["nodes"]}
    assert clocks["n2[1]"] is None
    assert (round(clocks["n1[1]"], -1), round(clocks["n3[1]"], -1)) == (70, -40)
    assert re.search(rf"n1\[1\].*{shown(now + 70, now)}.*its clock is \d+ s ahead", store.table())
    store.archive.note(record_of(RUNNING, {}))
    exporter = Exporter(Survey(partial(MemoryClient, store.server), lambda _: store.archive))
    assert re.search("; clocks differ from this host's: n1 is (69|70) s ahead$", exporter.why())
    found = {
        sample.labels["host"]: sample.value
        for family in exporter.collect()
        for sample in family.samples
        if sample.name == "rdzv_clock_difference_seconds"
    }
    assert {host: round(value, -1) for host, value in found.items()} == {"n1": 70}
    store.beat({"n1": replace(RUNS, at=int(time.time()), beat=3)})
    store.seen.look()
    assert "n1" not in store.seen.clocks


def test_a_command_watches_until_it_knows_if_a_heartbeat_is_missing_or_a_clock_behind(
    store: Store,
) -> None:
    nodes = quick({node: running(node, RUNNING) for node in RUNNING.participants})
    now = int(time.time())
    killed, behind = replace(nodes["n2"], at=now - 11), replace(nodes["n3"], at=now - 300)
    store.put(RUNNING, nodes | {"n1": replace(RUNS, at=now), "n2": killed, "n3": behind})
    store.seen.look()
    assert store.seen.in_doubt
    store.beat({"n3": replace(behind, beat=2)})
    assert until(lambda: not store.look().in_doubt, 10)
    assert store.states()["n2[1]"] in ("silent", "lost")
    assert "n3 is" in store.seen.clocks
    assert "n2" not in store.seen.clocks


def test_a_screen_of_24_rows_has_the_sentence_the_causes_and_the_abnormal_nodes(
    store: Store,
) -> None:
    names = tuple(f"n{number}" for number in range(300))
    of = replace(
        RUNNING, participants=names, leader="n0", max_nodes=300, absent=("n288", "n299"),
        cause=Cause(lost=Names(("node301[7]",))),
    )  # fmt: skip
    nodes = {name: replace(running(name, of), max_nodes=300, at=AT) for name in names}
    store.put(of, nodes)
    for number in range(20):
        store.archive.note(record_of(replace(of, round=number), nodes))
    store.seen.look()
    for width in (60, 80, 200):
        console = Console(width=width, height=24, markup=False, highlight=False)
        with console.capture() as shown_:
            console.print(_on_a_screen(store.seen, console))
        lines = shown_.get().splitlines()
        assert len(lines) < 24
        text = "\n".join(lines)
        assert lines[0].startswith("run 'job': running round 4, 300 of 2..300 nodes, 2 of")
        assert "why this round: lost node301[7]: lease ran out" in text
        assert re.search(r"300 nodes at [0-9:]{8} UTC: 2 lost, 298 running", text)
        first = [line.split("│")[2].strip() for line in lines if line.startswith("│")]
        assert first[:4] == ["n288[1]", "n299[1]", "n0[1]", "n1[1]"]
        assert re.search(r"and \d+ more", text)
    # Where all is abnormal, that takes the place of earlier rounds.
    store.put(replace(of, absent=names[:100]), nodes)
    store.seen.look()
    with console.capture() as shown_:
        console.print(_on_a_screen(store.seen, console))
    lines = shown_.get().splitlines()
    assert len(lines) < 24
    assert len([line for line in lines if "│ lost" in line]) >= 12


@pytest.fixture
def clock() -> Time:
    return Time()


def test_a_node_writes_when_it_beats_and_a_leader_since_when_a_phase_is(clock: Time) -> None:
    server = MemoryServer()
    leader = Life("n1", server, clock, RULES)
    leader.go()
    assert (stored(leader).since, of(leader).at) == (1000, 1000)
    clock.now = 1007.5
    joiner = Life("n2", server, clock, RULES)
    finish(leader, joiner)
    assert (stored(leader).phase, stored(leader).since) == (Phase.RUNNING, 1007)
    assert of(joiner).at == 1007
    joiner.wake()
    assert of(joiner).at == int(clock.now) > 1007
    # A leader that writes the same round back has not begun it.
    since = stored(leader).since
    leader.go()
    joiner.client.delete(STATE_KEY)
    clock.now += 100.0
    while joiner.client.get(STATE_KEY) is None:
        leader.go()
        leader.wake()
    assert (stored(leader).round, stored(leader).since) == (0, since)


def test_a_leader_tells_when_its_last_call_ends_once_nobody_rings(clock: Time) -> None:
    rules = replace(RULES, max_nodes=3, last_call_timeout=30.0)
    server = MemoryServer()
    leader = Life("n1", server, clock, rules)
    leader.go()
    joiner = Life("n2", server, clock, rules)
    joiner.go()
    leader.go()
    began = clock.now
    assert of(leader).call_ends is None
    while of(leader).call_ends is None:
        leader.wake()
        assert clock.now < began + 1.0
    assert of(leader).call_ends == (0, int(began + 30.0))
    beats = of(leader).beat
    for _ in range(3):
        leader.wake()
    # It is told once, and then with the heartbeats.
    assert of(leader).beat <= beats + 3
    assert of(leader).call_ends in ((0, int(began + 30.0)), (0, int(began + 29.0)))
    seen = Inspection(leader.client, leader.archive, "job")
    seen.look()
    assert seen.report()["last_call_until"] == as_iso(int(began + 30.0))
    assert "more for a third, until 1970-01-01 00:17:10 UTC" in seen.sentence
    while not leader.outcomes:
        leader.wake() if leader.waits() else leader.go()
        joiner.go()
    assert of(leader).call_ends is None


def of(life: Life) -> NodeRecord:
    entry = life.client.get(NODES_PREFIX + life.node.id)
    assert entry is not None
    return NodeRecord.decode(entry.value)


def test_times_that_are_none_are_not_shown() -> None:
    for seconds in (0, 1 << 62, -(1 << 62), 10**15):
        assert (as_iso(seconds), shown(seconds, 0.0)) == (None, "")
    assert as_iso(AT) == "2026-09-21T14:13:20+00:00"
    assert shown(AT, AT + 60.0) == "14:13:20 UTC"
    assert shown(AT, AT + 1e5) == "2026-09-21 14:13:20 UTC"


def test_where_the_workers_are_in_the_summary_the_metrics_and_as_data(store: Store) -> None:
    of = replace(RUNNING, round=0, leader="n1")
    nodes = {node: replace(running(node, of), at=int(time.time())) for node in of.participants}

    def shows() -> tuple[str, dict[str, float]]:
        store.put(of, nodes)
        text = str(_summary(store.look(), store.seen.nodes(), []))
        samples = _now(store.seen, of)
        return text, {name: value for name, _, value in samples if name.startswith("rdzv_step")}

    text, metrics = shows()
    assert store.seen.report()["steps"] is None
    assert "step" not in text
    assert all(map(math.isnan, metrics.values()))
    nodes = {node: replace(it, step=(41, 800, 7)) for node, it in nodes.items()}
    text, metrics = shows()
    assert "\nstep 41, 0.8 s each\n" in text
    assert [*metrics.values()] == [41, 0.8, 0]
    nodes["n2"] = replace(nodes["n2"], step=(40, 800, 3), stall=(312_000, 1))
    text, metrics = shows()
    said = "no step for 312 s (usually 0.8 s): rank 3 on n2 stands at step 40"
    assert text.startswith(f"run 'job': running round 0, 3 of 2..3 nodes; {said}\n")
    assert store.seen.report()["steps"]["text"] == said
    assert metrics["rdzv_step_stalled_seconds"] == 312
    assert ("rdzv_rank_behind", ["n2"], 3) in [*_now(store.seen, of)]
