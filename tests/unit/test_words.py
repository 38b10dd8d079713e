"""What a run is said to do and to wait for, and how long still."""

from __future__ import annotations

import pytest

from rdzv_plugins.protocol.documents import Cause, Names, NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.join import Pace
from rdzv_plugins.protocol.rules import View
from rdzv_plugins.protocol.words import Diagnosis, before_the_first_round, of_node
from tests import replace

from .views import RULES, all_running, diagnose, document, joining, record, running, view

FIRST = document(Phase.FORMING, 0)
LATER = document(Phase.FORMING, 5, previous=("n1", "n2", "n3"))
EXACT = replace(LATER, min_nodes=3)
CONFIRMING = document(Phase.CONFIRMING)
RUNNING = document(Phase.RUNNING)


def exactly(of: dict[str, NodeRecord], nodes: int = 3) -> dict[str, NodeRecord]:
    return {node: replace(it, min_nodes=nodes, max_nodes=nodes) for node, it in of.items()}


class TestOneWhoSeesAllRecords:
    def test_no_run(self) -> None:
        assert str(before_the_first_round([])) == "no round has begun"

    def test_too_few_nodes(self) -> None:
        assert str(diagnose(FIRST, joining("n1"))) == "waiting for 1 node: 1 of 2..3 is here"
        exact = replace(FIRST, min_nodes=3)
        two = exactly(joining("n1", "n2"))
        assert str(diagnose(exact, two)) == "waiting for 1 node: 2 of 3 are here"
        assert str(diagnose(exact, exactly(joining("n1")))).startswith("waiting for 2 nodes: 1 of")

    def test_enough_nodes(self) -> None:
        assert str(diagnose(FIRST, joining("n1", "n2"))) == "enough nodes (2 of 2..3)"

    def test_all_nodes(self) -> None:
        text = str(diagnose(FIRST, joining("n1", "n2", "n3")))
        assert text == "3 of 2..3 nodes are here: their round begins"

    def test_a_node_with_other_settings_is_not_here(self) -> None:
        records = {**joining("n1"), **exactly(joining("n2"))}
        assert str(diagnose(FIRST, records)) == "waiting for 1 node: 1 of 2..3 is here"

    def test_nodes_of_the_last_round_that_have_not_come_back(self) -> None:
        records = {**joining("n1", round_=4), "n2": running("n2", RUNNING)}
        records["n3"] = running("n3", RUNNING)
        text = str(diagnose(LATER, records))
        assert text == (
            "waiting for 2 nodes: 1 of 2..3 is here; n2[1], n3[1] of the last round have not come "
            "back"
        )
        records |= joining("n3", round_=4)
        text = str(diagnose(LATER, records))
        assert text == (
            "waiting for 1 node: 2 of 2..3 are here; n2[1] of the last round has not come back"
        )

    def test_an_earlier_request_is_none_for_this_round(self) -> None:
        records = {**joining("n1", "n3", round_=4), **joining("n2", round_=3)}
        assert "n2[1] of the last round has not come back" in str(diagnose(LATER, records))

    def test_a_node_that_is_lost_or_left_is_missing(self) -> None:
        cause = Cause(lost=Names(("n3[1]",)))
        forming = replace(EXACT, previous=("n1", "n2"), cause=cause)
        records = exactly({**joining("n1", "n2", round_=4), "n4": record("n4", Status.LEFT)})
        assert str(diagnose(forming, records)) == (
            "waiting for 1 node: 2 of 3 are here; missing: lost n3[1], left n4[1]"
        )

    def test_a_node_that_falls_silent_while_the_round_forms_is_missing(self) -> None:
        text = str(diagnose(FIRST, joining("n1", "n2"), lambda node: node == "n2"))
        assert text == "waiting for 1 node: 1 of 2..3 is here; missing: lost n2[1]"

    def test_nobody_is_missing_where_the_others_are_enough(self) -> None:
        cause = Cause(lost=Names(("n3[1]",)))
        forming = replace(LATER, previous=("n1", "n2"), cause=cause)
        text = str(diagnose(forming, joining("n1", "n2", round_=4)))
        assert text == "enough nodes (2 of 2..3); lost n3[1]"
        back = joining("n1", "n2", "n3", round_=4)
        assert "lost" not in str(diagnose(forming, back))

    def test_since_when_a_round_forms_and_when_its_last_call_ends(self) -> None:
        cause, began = Cause(lost=Names(("node16[1]",))), 1_790_000_000
        forming = replace(LATER, previous=("n1", "n2"), cause=cause, since=began)
        records = joining("n1", "n2", round_=4)
        text = "enough nodes (2 of 2..3); lost node16[1]; forming since 14:13:20 UTC"
        assert str(diagnose(forming, records, now=began + 5.0)) == text
        records["n1"] = replace(records["n1"], call_ends=(5, began + 60))
        assert str(diagnose(forming, records, now=began + 22.0)) == (
            f"{text}; 38 s more for a third, until 14:14:20 UTC"
        )
        # That of another round, and what is no time.
        for other in ((4, began + 60), (5, 1 << 62)):
            records["n1"] = replace(records["n1"], call_ends=other)
            assert str(diagnose(forming, records, now=began + 5.0)) == text
        many = replace(forming, max_nodes=9)
        records = {
            node: replace(it, max_nodes=9, call_ends=(5, began + 60))
            for node, it in records.items()
        }
        assert "; 38 s more for up to 7 others" in str(diagnose(many, records, now=began + 22.0))
        days_later = str(diagnose(forming, joining("n1", "n2", round_=4), now=began + 1e6))
        assert days_later.endswith("; forming since 2026-09-21 14:13:20 UTC")

    def test_a_silent_node_is_not_lost_yet(self) -> None:
        text = str(
            diagnose(FIRST, joining("n1", "n2"), {"n2"}.__contains__, is_lost=lambda _: False)
        )
        assert text == "waiting for 1 node: 1 of 2..3 is here; missing: silent n2[1]"
        text = str(diagnose(FIRST, joining("n1", "n2"), {"n2"}.__contains__))
        assert text == "waiting for 1 node: 1 of 2..3 is here; missing: lost n2[1]"

    def test_many_names_are_cut_short(self) -> None:
        names = tuple(f"m{number:02}" for number in range(20))
        forming = replace(LATER, previous=names)
        records = {**joining("n1", "n2"), **{name: running(name, RUNNING) for name in names}}
        text = str(diagnose(forming, records))
        assert "m00[1], m01[1], m02[1], m03[1] and 16 more of the last round have not" in text

    def test_ranks_that_are_not_confirmed(self) -> None:
        records = {name: running(name, CONFIRMING) for name in ("n1", "n2", "n3")}
        all_of_them = "confirming round 4: all nodes have confirmed their rank"
        assert str(diagnose(CONFIRMING, records)) == all_of_them
        records["n2"] = record("n2")
        text = "confirming round 4: 1 of 3 nodes has not confirmed its rank: n2[1]"
        assert str(diagnose(CONFIRMING, records)) == text
        del records["n3"]
        text = "confirming round 4: 2 of 3 nodes have not confirmed their rank: n2[1], n3"
        assert str(diagnose(CONFIRMING, records)) == text

    def test_a_round_that_runs(self) -> None:
        assert str(diagnose(RUNNING, all_running(RUNNING))) == "running round 4, 3 of 2..3 nodes"
        exact = replace(RUNNING, min_nodes=3)
        assert str(diagnose(exact, all_running(exact))) == "running round 4, 3 nodes"

    def test_its_spares_and_those_that_wait_for_the_next_one(self) -> None:
        spares = {name: record(name, Status.SPARE) for name in ("n4", "n5")}
        text = str(diagnose(RUNNING, {**all_running(RUNNING), **spares}))
        assert text == "running round 4, 3 of 2..3 nodes, 2 spares"
        pair = document(Phase.RUNNING, participants=("n1", "n2"))
        text = str(diagnose(pair, {**all_running(pair), **joining("n3")}))
        assert text == "running round 4, 2 of 2..3 nodes, 1 waiting"

    def test_its_nodes_that_are_lost_or_done(self) -> None:
        records = all_running(RUNNING)
        records["n2"] = replace(records["n2"], status=Status.DONE)
        text = str(diagnose(replace(RUNNING, absent=("n3",)), records))
        assert text == "running round 4, 3 of 2..3 nodes, 1 of them gone, 1 of them done"

    @pytest.mark.parametrize("of", [FIRST, CONFIRMING, RUNNING], ids=lambda it: it.phase.value)
    def test_a_run_without_a_sign_of_life_is_dead(self, of: RoundDocument) -> None:
        records = {**joining("n1"), "n2": record("n2", Status.LEFT)}
        text = str(diagnose(of, records, lambda _: True, 240.2))
        assert text == (
            f"dead: round {of.round} is {of.phase.value}, but none of its nodes lives; 240 s "
            "watched without a heartbeat"
        )
        records["n1"] = replace(records["n1"], at=1_790_000_000)
        text = str(diagnose(of, records, lambda _: True, 2.2, 1_790_000_600.0))
        assert text.endswith("none of its nodes lives; the last heartbeat came at 14:13:20 UTC")

    def test_also_one_whose_nodes_have_left(self) -> None:
        text = str(diagnose(RUNNING, {"n1": record("n1", Status.LEFT)}))
        assert text == "stopped: all nodes left during round 4"

    def test_a_closed_run(self) -> None:
        closed = document(Phase.CLOSED, cause=Cause(note="its agent failed; closed by n1[1]"))
        text = str(diagnose(closed, joining("n1"), lambda _: True, 60.0))
        assert text == "closed: its agent failed; closed by n1[1]"


class TestUnitsAndSegments:
    """What they hold back, as whoever sees all records knows from the leader's own."""

    def of(self, policy: str, phase: Phase, racks: str, runs: str = "") -> str:
        """``racks``: the domain of each node that asks for a round; ``runs``, that takes part."""
        members = [f"m{number}" for number in range(len(runs))]
        more: dict[str, object] = {"participants": tuple(members)} if runs else {}
        now = document(phase, 3, "m0" if runs else "n0", min_nodes=4, max_nodes=16, **more)
        records = {
            name: replace(it, domain=rack, run_options=policy, min_nodes=4, max_nodes=16)
            for name, it, rack in [
                *(
                    (name, running(name, now), rack)
                    for name, rack in zip(members, runs, strict=True)
                ),
                *((f"n{at}", record(f"n{at}"), rack) for at, rack in enumerate(racks)),
            ]
        }
        return str(diagnose(now, records))

    def test_the_sentence_says_how_many_nodes_are_let_in(self) -> None:
        forming = Phase.FORMING
        text = "enough nodes (7 of 4..16): node_unit=4 lets 4 of them in"
        assert self.of("node_unit=4", forming, "aaaaaaa") == text
        assert self.of("node_unit=4", forming, "aaaaaaaa") == "enough nodes (8 of 4..16)"
        text = "enough nodes (7 of 4..16): node_unit=4 and segment=2 let 4 of them in"
        assert self.of("node_unit=4,segment=2", forming, "aaabbbb") == text
        text = "17 of 4..16 nodes are here: their round begins"
        assert self.of("node_unit=4", forming, "a" * 17) == text

    def test_how_many_are_missing(self) -> None:
        forming = Phase.FORMING
        text = "waiting for 1 node: 5 of 4..16 are here, as node_unit=6 demands"
        assert self.of("node_unit=6", forming, "aaaaa") == text
        text = "waiting for 1 node: 4 of 4..16 are here, as segment=2 demands"
        assert self.of("segment=2", forming, "abcc") == text
        text = "waiting for 1 node: 4 of 4..16 are here, as node_unit=4 and segment=2 demand"
        assert self.of("node_unit=4,segment=2", forming, "abcc") == text
        assert self.of("node_unit=4", forming, "aaa") == "waiting for 1 node: 3 of 4..16 are here"

    def test_the_sentence_says_how_many_nodes_wait_while_a_round_runs(self) -> None:
        text = "running round 3, 8 of 4..16 nodes, 2 waiting for node_unit=4"
        assert self.of("node_unit=4", Phase.RUNNING, "aa", "aaaaaaaa") == text
        text = "running round 3, 4 of 4..16 nodes, 2 waiting for segment=2"
        assert self.of("segment=2", Phase.RUNNING, "bc", "aaaa") == text
        text = "running round 3, 4 of 4..16 nodes, 2 waiting"
        assert self.of("segment=2", Phase.RUNNING, "bb", "aaaa") == text
        text = "running round 3, 15 of 4..16 nodes, 1 spare"
        assert self.of("node_unit=5", Phase.RUNNING, "a", "a" * 15) == text

    def test_a_node_that_waits_knows_its_own_options(self) -> None:
        rules = replace(RULES, max_nodes=6, node_unit=2)
        pair = document(Phase.RUNNING, participants=("n1", "n2"), max_nodes=6)
        there = view(record("n4"), pair, leader=record("n1"), rules=rules)
        assert str(of_node(there, 60.0)) == (
            "waiting for the next round: round 4 runs with 2 of 2..6 nodes, led by n1[1], which "
            "lets more in as node_unit=2 demands; 60 s to join_timeout"
        )
        forming = replace(FIRST, max_nodes=6)
        three = {name: replace(it, max_nodes=6) for name, it in joining("n1", "n2", "n3").items()}
        found = of_node(view(three["n1"], forming, three, rules=rules, enough_for=1.0), 60.0)
        assert str(found) == (
            "enough nodes (3 of 2..6): node_unit=2 lets 2 of them in; 4 s more for up to 3 others"
        )


def leading(now: RoundDocument, others: dict[str, NodeRecord], **more: object) -> View:
    return view(record("n1", round_=now.round - 1), now, others, **more)  # type: ignore[arg-type]


class TestTheLeader:
    def test_it_knows_how_long_still(self) -> None:
        assert str(of_node(leading(FIRST, {}), 212.4)) == (
            "waiting for 1 node: 1 of 2..3 is here; 212 s to join_timeout"
        )

    def test_the_last_call(self) -> None:
        there = leading(FIRST, joining("n2"), enough_for=2.0)
        assert str(of_node(there, 212.0)) == "enough nodes (2 of 2..3); 3 s more for a third"

    @pytest.mark.parametrize(("join_left", "limit"), [(600.0, "rejoin"), (9.0, "join")])
    def test_the_limit_that_comes_first(self, join_left: float, limit: str) -> None:
        others = {"n2": running("n2", RUNNING), "n3": running("n3", RUNNING)}
        there = leading(LATER, others, round_age=RULES.rejoin_timeout - 100.0)
        seconds = min(100.0, join_left)
        assert str(of_node(there, join_left)).endswith(f"; {seconds:.0f} s to {limit}_timeout")

    def test_whose_lease_has_run_out_is_lost(self) -> None:
        there = leading(FIRST, joining("n2"), silent={"n2": RULES.lease})
        assert "missing: lost n2[1]" in str(of_node(there, 60.0))
        there = leading(FIRST, joining("n2"), silent={"n2": RULES.lease - 0.1})
        assert "missing" not in str(of_node(there, 60.0))


class TestAnotherNode:
    """It has read the document, and perhaps the leader's record."""

    def test_it_waits_for_a_round(self) -> None:
        me = record("n2")
        text = "waiting for a round of 2..3 nodes"
        assert str(of_node(view(me, FIRST), 60.0)) == f"{text}; 60 s to join_timeout"
        led = view(me, FIRST, leader=record("host1"))
        assert str(of_node(led, 60.0)) == f"{text}, led by host1[1]; 60 s to join_timeout"
        without = view(me, replace(FIRST, leader=None))
        assert of_node(without, 60.0).lasting == f"{text}, whose leader left"
        calls = replace(record("host1"), call_ends=(0, 1_790_000_000))
        told = of_node(view(me, FIRST, leader=calls, wall=1_790_000_000.0), 60.0).lasting
        assert told == f"{text}, led by host1[1]; its last call ends at 14:13:20 UTC"

    def test_the_document_names_who_was_lost(self) -> None:
        forming = replace(LATER, cause=Cause(lost=Names(("n3[1]",))))
        text = of_node(view(record("n2", round_=4), forming), 60.0).lasting
        assert text == "waiting for a round of 2..3 nodes; missing: lost n3[1]"

    def test_a_round_that_is_confirmed(self) -> None:
        text = str(of_node(view(running("n2", CONFIRMING), CONFIRMING), 60.0))
        assert text == "confirming round 4, 3 of 2..3 nodes; 60 s to join_timeout"

    def test_a_node_that_checks_its_network_says_so(self) -> None:
        here = replace(view(running("n2", CONFIRMING), CONFIRMING), checks=True)
        text = "confirming round 4, 3 of 2..3 nodes; this node checks its network"
        assert str(of_node(here, 60.0)) == f"{text}; 60 s to join_timeout"

    def test_a_round_that_runs_without_it(self) -> None:
        text = str(of_node(view(record("n4"), RUNNING, leader=record("n1")), 60.0))
        assert text == (
            "waiting for the next round: round 4 runs with 3 of 2..3 nodes, led by n1[1]; "
            "60 s to join_timeout"
        )

    def test_a_round_that_has_lost_all_its_nodes(self) -> None:
        dead = replace(RUNNING, absent=RUNNING.participants)
        text = str(of_node(view(record("n4"), dead, leader=record("n5")), 60.0))
        assert text == (
            "waiting for the next round: round 4 has lost all its nodes, led by n5[1]; "
            "60 s to join_timeout"
        )

    def test_a_round_that_runs_with_it(self) -> None:
        text = str(of_node(view(running("n2", RUNNING), RUNNING)))
        assert text == "running round 4, 3 of 2..3 nodes"

    def test_no_run_and_a_closed_one(self) -> None:
        me = record("n2")
        assert (
            str(of_node(view(me, None), 60.0)) == "waiting for a first round; 60 s to join_timeout"
        )
        assert str(of_node(view(me, document(Phase.CLOSED)))) == "closed"


def test_the_end_of_a_join_has_no_time_left_and_more_names() -> None:
    found = Diagnosis(does="waiting", left=Names(("a[1]",)), seconds=0.0, limit="to join_timeout")
    assert str(found.at_the_end({"b[1]"})) == "waiting; missing: left a[1], b[1]"
    gave_up = str(found.at_the_end({"a[1]", "b[1]"}, {"b[1]", "c[1]"}))
    assert gave_up == "waiting; missing: left a[1], gave up b[1], c[1]"


class TestPace:
    def test_a_sentence_is_told_once_it_has_stood_for_a_second(self) -> None:
        pace = Pace(100.0)
        # A join that forms at once is spared the sentence.
        assert not pace.is_due(100.9)
        assert pace.is_due(101.0)
        assert not pace.tells("one of two", 101.0)
        assert not pace.is_due(101.9)
        assert not pace.tells("two of two", 102.0)
        assert pace.tells("two of two", 103.0)

    def test_a_sentence_is_told_again_after_30_seconds_and_when_it_changes(self) -> None:
        pace = Pace(0.0)
        told = [now for now in range(100) if pace.tells("the same", float(now))]
        assert told == [1, 31, 61, 91]
        assert [now for now in range(100, 105) if pace.tells("another", float(now))] == [101]

    def test_a_sentence_that_changes_all_the_time_is_told_every_30_seconds(self) -> None:
        pace = Pace(0.0)
        assert [now for now in range(100) if pace.tells(str(now), float(now))] == [30, 60, 90]
