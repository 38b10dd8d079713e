"""Whether the others go on without a node that gives up."""

from __future__ import annotations

import pytest

from rdzv_plugins.protocol.documents import (
    Cause,
    Names,
    NodeRecord,
    Phase,
    RoundDocument,
    Shards,
    Status,
)
from rdzv_plugins.protocol.parting import all_live, goes_on_without, lost_one
from rdzv_plugins.protocol.rules import Rules
from tests import replace

pytestmark = pytest.mark.rule("who counts when a node parts")

RULES = Rules(min_nodes=2, max_nodes=3, lease=3.0, interval=1.0, last_call_timeout=1.0)


def record(place: int, status: Status, round_: int = 1) -> NodeRecord:
    return NodeRecord(
        address=f"10.0.0.{place}", pid=place, beat=1, status=status, round=round_,
        min_nodes=2, max_nodes=3, interval=1.0, lease=3.0, incarnation="i",
    )  # fmt: skip


LAST = RoundDocument(
    incarnation="i", round=1, phase=Phase.RUNNING, leader="a", min_nodes=2, max_nodes=3,
    participants=("a", "b", "c"),
)  # fmt: skip
FORMS = replace(LAST, round=2, phase=Phase.FORMING, participants=(), previous=("b", "c"))
LOST_A = replace(FORMS, cause=Cause(lost=Names(("10.0.0.1[1]",))))
NEW = Names(("10.0.0.3[3]",))
RECORDS = {
    "a": record(1, Status.RUN),
    "b": record(2, Status.JOIN),
    "c": record(3, Status.RUN),
}


def goes_on(document: RoundDocument, records: dict[str, NodeRecord] | None = RECORDS) -> bool:
    return goes_on_without("c", document, records, RULES, 0.0, NEW)


class TestLostNodes:
    def test_a_node_that_runs_yet_counts(self) -> None:
        assert goes_on(FORMS)

    def test_a_node_that_the_round_that_forms_has_lost_does_not_count(self) -> None:
        assert not goes_on(LOST_A)

    def test_a_node_that_was_lost_as_it_asked_does_not_count(self) -> None:
        assert not goes_on(LOST_A, {**RECORDS, "a": record(1, Status.JOIN)})

    def test_a_node_that_was_lost_and_is_in_the_round_again_counts(self) -> None:
        back = replace(LAST, round=2, cause=LOST_A.cause)
        assert goes_on(back, {node: replace(it, round=2) for node, it in RECORDS.items()})

    def test_a_node_that_has_not_come_to_the_round_that_runs_does_not_count(self) -> None:
        left_out = replace(LAST, round=2, participants=("b", "c"))
        records = {**RECORDS, "b": record(2, Status.RUN, 2)}
        assert not goes_on(left_out, records)
        assert goes_on(left_out, {**records, "a": record(1, Status.RUN, 2)})

    def test_a_lost_node_does_not_count_where_many_are_only_counted(self) -> None:
        many = Shards(digest="d", size=3, count=1)
        assert goes_on(replace(FORMS, previous=(), previous_roster=many), None)
        assert not goes_on(replace(LOST_A, previous=(), previous_roster=many), None)

    def test_a_counted_node_may_break_a_segment(self) -> None:
        for size, enough in ((4, False), (6, True)):
            many = replace(LAST, participants=(), roster=Shards(digest="d", size=size, count=1))
            rules = replace(RULES, min_nodes=4, max_nodes=6, segment=2)
            assert goes_on_without("c", many, None, rules, 0.0, NEW) is enough

    def test_one_lost_before_the_round_that_runs_is_no_loss_of_that(self) -> None:
        assert not lost_one(LAST, replace(LAST, cause=Cause(lost=Names(("10.0.0.9[9]",)))))
        assert lost_one(LAST, LOST_A)
        assert lost_one(LAST, replace(LAST, absent=("a",)))
        assert not lost_one(LAST, FORMS)


class TestWhoLives:
    def test_a_node_that_beats_or_asks_lives(self) -> None:
        beaten = replace(RECORDS["a"], beat=2)
        assert all_live("c", LAST, RECORDS, {**RECORDS, "a": beaten})
        assert all_live("c", LAST, RECORDS, {**RECORDS, "a": record(1, Status.JOIN)})

    def test_a_node_that_stands_still_or_is_unknown_may_not_live(self) -> None:
        assert not all_live("c", LAST, RECORDS, RECORDS)
        assert not all_live("c", LAST, {}, {"b": RECORDS["b"]})

    def test_the_nodes_of_a_large_round_are_not_known_to_live(self) -> None:
        assert not all_live("c", replace(LAST, participants=()), RECORDS, RECORDS)
