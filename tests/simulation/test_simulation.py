"""The protocol under seeded faults, with the same seeds for everybody.

``make test`` tries some of them, ``make test-all`` all, and ``make simulate`` new ones.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from rdzv_plugins import protocol
from rdzv_plugins.protocol import decide as decisions
from rdzv_plugins.protocol import node
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.policies import growth
from rdzv_plugins.protocol.rules import Action, View
from rdzv_plugins.protocol.situation import Situation, assess
from tests import Measure

from .campaign import Totals, failure_report, run_seeds
from .faults import FAULTS
from .mutants import CALM, FORGETS_A_STEP, MOST_SEEDS_PER_MUTANT, MUTANTS, Mutant, Patch, broken
from .plan import AT_ONCE, EVERYTHING, KINDS, UNSTEERED, Fault, Focus
from .world import simulate

# Other tests run at the same time.
PROCESSES = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT") or 1))

# All nodes stand in the document, and nobody steers, as when these seeds were found.
_WHOLE = Focus(settings={"inline": 128, **UNSTEERED})
# The same, and no client tries again while it cannot reach the store.
_AT_ONCE = Focus(settings={"retries": 0.0, **_WHOLE.settings})

_SEALED = Focus(settings={"sealed": True})

# There are no links.
_UNLINKED = Focus(settings={"answer_timeout": None, "breaks": ()})

# What seeds found in the protocol or its checks, each mended. A seed always draws the same faults,
# but after a change of the protocol's requests it is another run: unit tests keep the rules.
_FORGETS = Focus(
    kinds=("amnesia", "fail-over", "worker failure", "partition", "stall"),
    settings={"stop": 0.05, "latency": 0.05, "max_restarts": 100, **_AT_ONCE.settings},
)
_FORGETS_TWICE = Focus(
    kinds=("amnesia", "partition", "close", "close"),
    settings={"rates": (1.0, 1.0), "lease": 6.0, "poll": 0.5, **_AT_ONCE.settings},
)
_ONCE_RESTARTED = Focus(
    settings={"nodes": 3, "max_nodes": 3, "orders": (Fault(0.7, "restart"),)},
)
_GROWS_ONCE_SAVED = Focus(
    settings={"pace": 0.02, "save_timeout": 20.0, "grow": "checkpoint", "last_call_timeout": 0.0},
)
FOUND = (
    (24, _AT_ONCE, "a node with other --nnodes sent requests without a pause for a lease"),
    (97, _FORGETS, "a leader was judged by the lease of another node that had led for a moment"),
    (171, _AT_ONCE, "nodes that were done waited for lost nodes in the exit barrier for ever"),
    (269, _AT_ONCE, "a TCPStore that opened too late kept its node busy for ever"),
    (1271, _AT_ONCE, "a node that was in two runs asked for their tombstones in turn, for ever"),
    (2005, _AT_ONCE, "a document that was damaged before any node read it stays: a limit"),
    (2647, _AT_ONCE, "nodes were killed before one led: the next run sweeps their keys"),
    (5022, _AT_ONCE, "the first look after an outage hid a new heartbeat"),
    (5137, _AT_ONCE, "a node that asked for a round and was then lost was not named"),
    (5181, _AT_ONCE, "the grace after an outage was lost to the next restart of windows"),
    (5437, _AT_ONCE, "a node that came back after the sweep left its record for ever"),
    (5989, _AT_ONCE, "an abandoned join took the next one with it"),
    (2001624, _AT_ONCE, "the checker counted a heartbeat that the store lost unread"),
    (2002304, _AT_ONCE, "a fail-over lost the closing of a run: those that knew it stay closed"),
    (11334, _AT_ONCE, "a fail-over restored an older record: a done leader was declared lost"),
    (770501, _AT_ONCE, "like 2647, of three nodes"),
    (199, _FORGETS_TWICE, "a node ran in one round of a run twice, with another run between"),
    (9000851, _AT_ONCE, "a node whose listings fail waits for the dead in the exit barrier"),
    (9001105, _AT_ONCE, "the checker counted a heartbeat that two fail-overs had lost"),
    (9008470, _AT_ONCE, "a join that its agent had abandoned ended with an error"),
    (7000703, _AT_ONCE, "a write that was given up arrived after its node dropped its record"),
    (7006531, _AT_ONCE, "an evicted node without a record was not named"),
    (6012455, _AT_ONCE, "a launcher started short joins again and again, after the faults"),
    (6014157, _AT_ONCE, "a node that a launcher started after the faults has its join's time"),
    (6005412, _AT_ONCE, "a lost answer left a run that ended without a tombstone"),
    (4004804, _AT_ONCE, "a node that is killed in the exit barrier has done its work"),
    (4007927, _AT_ONCE, "a store that forgot saw one round confirmed twice, on two ports"),
    (10011006, _AT_ONCE, "a join was given up while the record that confirms was on its way"),
    (13001468, _AT_ONCE, "a held-up write hid that the leader was done, which its heir had read"),
    (13002042, _AT_ONCE, "a node that asked again, since its run was replaced, was no newcomer"),
    (13006767, _AT_ONCE, "a node that stood still in its last request before a wait forgot that"),
    (13015519, _AT_ONCE, "like 12006232, in a store that lost all data"),
    (12006232, _AT_ONCE, "a node knows a closing that was lost, and not the later one as failed"),
    (11016117, _AT_ONCE, "a node whose run was replaced by one that ended was never told"),
    (10013557, _AT_ONCE, "like 10011006; the farewell was lost too, in a run of two"),
    (4008719, _AT_ONCE, "a spare led, lost the lead to a fail-over, and closed the run"),
    (15001960, _AT_ONCE, "an older beat after an outage and a fail-over took the grace away"),
    (15004330, _AT_ONCE, "a rank confirmed before a turn to another run was not confirmed again"),
    (19000382, _AT_ONCE, "an outage outlived a run whose closer had died at once: a limit"),
    (19015537, _AT_ONCE, "a round ran twice, as the store forgot before anybody was told"),
    (35004072, _WHOLE, "a closer died at once in a store that had lost its deadline: a limit"),
    (37000401, _WHOLE, "a round came back that a fail-over had lost, after another had run"),
    (31000127, _WHOLE, "a client that repeated its request hid an outage from its node"),
    (31001045, _WHOLE, "a node that was first seen after an outage had no grace"),
    (59003741, _AT_ONCE, "a closer whose tombstone took long swept the keys of another run"),
    (59003763, _AT_ONCE, "a node of another run counts as lost where the roster is lost"),
    (60003632, _AT_ONCE, "three closers die at once and leave a damaged document: a limit"),
    (65003205, _UNLINKED, "a record was under way while the check of its node passed"),
    (
        63602633,
        _UNLINKED,
        "a node whose shard was lost did not know that it had confirmed its rank",
    ),
    (65004234, _UNLINKED, "a node was given its round just after it had been drained"),
    (93002403, _UNLINKED, "newcomers replaced a node that was back already, against grow=never"),
    (9108820, _UNLINKED, "a run was closed and swept after a node had looked for its tombstone"),
    (9111127, _UNLINKED, "a spare waited for ever for a round that had lost all its nodes"),
    (
        9813214,
        _UNLINKED,
        "a leader took a node for lost whose heartbeat it had just read by itself",
    ),
    (121074, _UNLINKED, "workers ran on in a round that was over while their node read its rank"),
    (93002648, _UNLINKED, "a lost round came back beside one of its number that grew later"),
    (93006472, _UNLINKED, "a node that is cut off asks again, and waits: the links name it"),
    (95002577, _UNLINKED, "nodes whose records were lost twice followed the others of their rack"),
    (96019498, _UNLINKED, "an exclusion ended while the request was repeated that acted on it"),
    (96019685, _UNLINKED, "the host of a node that was done was excluded: it stays in the round"),
    (98403179, _UNLINKED, "one link of a node that had been cut off kept a run from ever running"),
    (98608117, _UNLINKED, "a round was written back with an order to let newcomers in"),
    (98608442, _UNLINKED, "a run of strays grew by a segment, to their --nnodes"),
    (98710154, _UNLINKED, "a leader forgot what its network check had read of a node: it lives"),
    (98711003, _UNLINKED, "a leader forgot what its network check had read of a node: it left"),
    (98804518, _UNLINKED, "the tombstone of a run was lost three times, and a spare wrote it back"),
    (98818482, _UNLINKED, "nodes that were silent for long counted as late, after a short trouble"),
    (98915673, _UNLINKED, "a node gave up a join in an outage, turned unfit, and did not say why"),
    (97002974, _UNLINKED, "the store lost with all else that nobody reached rank 0"),
    (102007428, _UNLINKED, "the host of a node that had left its round was excluded: it is out"),
    (
        610001946,
        _UNLINKED,
        "a node that read before it beat again wrote that it was unfit, and was fit by then",
    ),
    (20004787, Focus(), "the checker took an excluded node that was unfit for one waited for"),
    (350002543, Focus(), "the checker forgot that a wait which is lost hears of no accusation"),
    (350003471, Focus(), "a node that read whom it accuses did not write that it is unfit"),
    (310000437, Focus(), "the checker did not see that a lost document, closed anew, had formed"),
    (310002077, Focus(), "a node that was lost and is back hid one that a lost roster had"),
    (370001878, Focus(), "the checker held a node's failing listings against one that left"),
    (730056, Focus(), "the checker judged a closing that landed late by a later listing"),
    (380012327, Focus(), "the checker forgot that a leader knows first that it is done itself"),
    (380016244, Focus(), "the checker began a tenure anew with a document that was put again"),
    (380001708, Focus(), "a failed node closed a run whose records the store had just set back"),
    (380011693, Focus(), "a failed node closed a run whose leader's record had been set back"),
    (360007216, Focus(), "the checker judged a node that left a run which another had closed"),
    (7202175, Focus(), "a failed node closed a run founded since the store had lost its own"),
    (770346, Focus(), "a node left a large run that broke its segment, though nobody replaced it"),
    (98002436, Focus(), "the grace after an outage named an earlier step for the checkpoint"),
    (98002828, Focus(), "a checkpoint was refused because the store had lost the records"),
    (98003867, Focus(), "the checker expected the failure of a node that leaves to close the run"),
    (98003969, Focus(), "the checker forgot that a refused leader says later that it is lost"),
    (99301335, Focus(), "a leader whose writes failed opened rank 0's TCPStore again at each try"),
    (99900965, Focus(), "the simulated store told a wait a poll late of a key that had changed"),
    (99001833, Focus(), "a hang was never told once ranks had agreed on a step that none reached"),
    (99010637, Focus(), "the checker took the second worker that hung for the first"),
    (99000297, Focus(), "a leader that had not read its round's shards noted no rank's first step"),
    (99001146, Focus(), "a node in a network check saw its accusation too late to answer"),
    (98000998, Focus(), "the checker forgot that done nodes wait for one whose agent hangs"),
    (8101171, FORGETS_A_STEP, "ranks differed where the store lost the step that all agreed on"),
    (8101114, _ONCE_RESTARTED, "the checker expected an answer of a node whose join had failed"),
    (2, _GROWS_ONCE_SAVED, "the checker forgot that a run may grow once it has saved"),
    (112400179, _AT_ONCE, "a leader in its network check wrote no lost shards again"),
)


def judge(totals: Totals, record_property: Measure) -> None:
    record_property("simulated", str(totals))
    if totals.failed:
        pytest.fail(failure_report(totals.failed[0], totals.most_nodes), pytrace=False)


def some_of(some: int, seeds: int) -> pytest.MarkDecorator:
    """Run a test for ``some`` seeds, and in the full run for the others of ``seeds``, too."""
    others = pytest.param(range(some + 1, seeds + 1), id="others", marks=pytest.mark.full)
    return pytest.mark.parametrize("seeds", [pytest.param(range(1, some + 1), id="some"), others])


def run(seeds: range, most_nodes: int = 12, focus: Focus = EVERYTHING) -> Totals:
    return run_seeds(seeds.start, len(seeds), most_nodes, processes=PROCESSES, focus=focus)


@some_of(100, 500)
@pytest.mark.timeout(900)
def test_seeds(seeds: range, record_property: Measure) -> None:
    totals = run(seeds)
    judge(totals, record_property)
    assert totals.rounds > len(seeds)
    # A simulator whose faults never happen proves nothing.
    assert set(KINDS) <= set(totals.injected)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_seeds_of_200_nodes(record_property: Measure) -> None:
    totals = run(range(1, 5), 200)
    judge(totals, record_property)
    assert totals.given > 400


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_seeds_of_runs_with_a_secret(record_property: Measure) -> None:
    """What is older than what a node has read counts as absent there."""
    judge(run(range(1, 501), focus=_SEALED), record_property)


@some_of(8, 20)
@pytest.mark.timeout(600)
def test_seeds_of_36_nodes(seeds: range, record_property: Measure) -> None:
    """As many as it takes for a large part of the world to fall silent at once."""
    totals = run(seeds, 36)
    judge(totals, record_property)
    assert set(AT_ONCE) <= set(totals.injected)
    assert totals.injected["told: doubt"]


@some_of(20, 50)
@pytest.mark.timeout(600)
def test_many_that_crash_at_once_in_a_calm_world(seeds: range, record_property: Measure) -> None:
    totals = run(seeds, focus=CALM)
    judge(totals, record_property)
    assert totals.injected["many crashed in a calm world"]


@pytest.mark.parametrize(("seed", "focus", "what"), FOUND, ids=[str(found[0]) for found in FOUND])
def test_what_was_found_stays_mended(seed: int, focus: Focus, what: str) -> None:
    result = simulate(seed, focus=focus)
    assert result.violation is None, f"{what}: {failure_report(result, 12, focus)}"


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.timeout(600)
def test_a_broken_rule_is_caught(name: str) -> None:
    """An invariant holds in its seed on the package's own code, and not where it is broken."""
    mutant, focus = MUTANTS[name], MUTANTS[name].plans
    for seed in range(mutant.seed, mutant.seed + MOST_SEEDS_PER_MUTANT):
        with broken(name) as patch:
            result = simulate(seed, focus=focus)
        if result.violation:
            assert all(patch.taken.values()), f"{patch.taken}, and yet {result.violation}"
            own = simulate(seed, focus=focus)
            assert own.violation is None, failure_report(own, 12, focus)
            return
    pytest.fail(f"{MOST_SEEDS_PER_MUTANT} seeds do not notice: {mutant.breaks}")


def _protocol() -> dict[tuple[str, str], object]:
    """All that stands in the protocol's modules and in their classes."""
    modules = [sys.modules[it] for it in sys.modules if it.startswith(protocol.__name__)]
    found = {}
    for module in modules:
        for name, value in vars(module).items():
            found[module.__name__, name] = value
            if isinstance(value, type):
                known = vars(value).items()
                found |= {(f"{value.__module__}.{value.__name__}", it): was for it, was in known}
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_undone(name: str) -> None:
    before = _protocol()
    with broken(name) as patch:
        assert patch.taken
        during = _protocol()
    assert any(during[it] is not before[it] for it in before)
    after = _protocol()
    assert after.keys() == before.keys()
    assert [it for it in before if after[it] is not before[it]] == []


def test_a_function_is_replaced_wherever_it_was_imported() -> None:
    original = decisions.decide
    with broken("coup"):
        assert decisions.decide is vars(node)["decide"] is not original
    assert decisions.decide is vars(node)["decide"] is original


def test_a_mutant_of_what_is_gone_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(patch: Patch) -> None:
        patch(decisions, "no_such_function", lambda *_: None)

    monkeypatch.setitem(MUTANTS, "gone", Mutant("nothing", gone))
    with pytest.raises(KeyError, match="no_such_function"), broken("gone"):
        pass


def test_a_mutant_that_raises_an_error_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an invariant catches one: else a wrong call in a mutant would pass for its fault."""

    def wrong(patch: Patch) -> None:
        patch(growth, "last_call_seconds", lambda last_call, rules: 0.0)

    monkeypatch.setitem(MUTANTS, "wrong", Mutant("nothing", wrong))
    with pytest.raises(TypeError), broken("wrong"):
        simulate(1)


def test_every_planned_fault_can_befall() -> None:
    assert set(FAULTS) == {*KINDS, *AT_ONCE}


def test_a_seed_is_the_same_run_everywhere() -> None:
    """Also where sets and dicts are in another order."""
    script = (
        "from tests.simulation.world import simulate\n"
        "for seed in (11, 12, 13): print('\\n'.join(simulate(seed, traced=True).trace))"
    )
    traces = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1
    assert traces.pop().count("\n") > 50


def test_a_failure_says_what_happened_and_how_to_see_it_again() -> None:
    with broken("coup"):
        result = simulate(MUTANTS["coup"].seed)
    assert result.violation
    report = failure_report(result, 12)
    assert report.startswith(f"seed {result.seed}: {result.violation}")
    assert report.endswith(f"reproduce: python -m tests.simulation --seed {result.seed}")


@pytest.mark.parametrize("name", ["coup", "excluded-is-named", "torn-segments", "links-ignored"])
def test_a_log_of_what_nodes_knew_is_decided_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view and a situation are plain data. The plans are those of a mutant, without its fault."""
    log: list[tuple[bytes, Action]] = []

    def decide(view: View) -> Action:
        action = decisions.decide(view)
        log.append((msgspec.msgpack.encode(view), action))
        assert "<function" not in repr(view)
        return action

    monkeypatch.setattr(node, "decide", decide)
    mutant = MUTANTS[name]
    assert simulate(mutant.seed, focus=mutant.plans).violation is None
    for entry, action in log:
        view = msgspec.msgpack.decode(entry, type=View)
        assert decisions.decide(view) == action
        if view.document is not None:
            at = assess(view, view.document)
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(at), type=Situation)
            assert again == at
    assert len(log) > 50


def test_no_decision_reads_when_anything_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts whose wall clocks are years off and jump at each look live as those whose do not.

    But for exclusions, which end by the leader's: there are none here.
    """
    # Only such clocks make the fencing tokens of an id's second run larger than those of its first.
    monkeypatch.setattr("tests.simulation.invariants.SKEW", 1e10)

    class LostInTime(Node):
        def __init__(self, *parts: Any) -> None:
            chance = random.Random(f"wall clock of {parts[0]}")
            lost: tuple[Any, ...] = *parts[:-2], lambda: chance.uniform(-1e9, 4e9), parts[-1]
            super().__init__(*lost)

    for seed in range(1, 21):
        of = [simulate(seed, traced=True, focus=_WHOLE, build=it) for it in (Node, LostInTime)]
        assert of[0].violation is None
        assert of[1].trace == of[0].trace
        assert (of[1].requests, of[1].rounds) == (of[0].requests, of[0].rounds)
