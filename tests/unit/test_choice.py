"""Which nodes make a round: units, segments, whole domains; and when a round ends for newcomers."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import Cause, Names, NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.policies.ranks import natural_key
from rdzv_plugins.protocol.policies.selection import choose
from rdzv_plugins.protocol.remarks import remarks
from rdzv_plugins.protocol.rules import Action, Rules, SetRecord, Wait, Write
from rdzv_plugins.protocol.sizes import Sizes, needed, world_size
from tests import replace

from .views import RULES, document, record, running, view, written

pytestmark = pytest.mark.rule("units and segments")

FORMING = document(Phase.FORMING, 5)

SIZES = st.builds(
    lambda low, more, unit, segment: Sizes(low, low + more, unit, segment),
    st.integers(1, 8), st.integers(0, 8), st.integers(1, 4), st.integers(1, 4),
)  # fmt: skip
PLACES = st.lists(st.sampled_from(["a", "b", "c/d", None]), max_size=14)


def at(places: Sequence[str | None]) -> dict[str, NodeRecord]:
    return {f"n{number}": record(f"n{number}", domain=it) for number, it in enumerate(places)}


def in_racks(**racks: str) -> dict[str, NodeRecord]:
    """``rack="n1 n2"``: nodes that ask for round 5 after round 4."""
    return {
        name: record(name, round_=4, domain=rack, **LIMITS)
        for rack, names in racks.items()
        for name in names.split()
    }


LIMITS: dict[str, Any] = {"min_nodes": 1, "max_nodes": 8}


class TestSizes:
    def test_they_are_multiples_of_units_and_segments(self) -> None:
        sizes = Sizes(5, 40, node_unit=4, segment=6)
        assert (sizes.step, sizes.least, sizes.most) == (12, 12, 36)
        assert (Sizes(5, 40).step, Sizes(5, 40).least, Sizes(5, 40).most) == (1, 5, 40)

    @pytest.mark.parametrize(
        ("sizes", "says"),
        [
            (Sizes(4, 6, node_unit=8), "4:6 allows no multiple of 8 nodes, as node_unit=8 demands"),
            (Sizes(3, 3, segment=2), "3:3 allows no multiple of 2 nodes, as segment=2 demands"),
            (Sizes(1, 8, 4, 3), "multiple of 12 nodes, as node_unit=4 and segment=3 demand:"),
        ],
    )
    def test_what_can_never_start_is_refused(self, sizes: Sizes, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            sizes.refuse_if_impossible()

    @given(SIZES)
    def test_what_is_refused_has_no_size(self, sizes: Sizes) -> None:
        possible = [
            size
            for size in range(sizes.min_nodes, sizes.max_nodes + 1)
            if size % sizes.node_unit == size % sizes.segment == 0
        ]
        if possible:
            sizes.refuse_if_impossible()
            assert (sizes.least, sizes.most) == (possible[0], possible[-1])
        else:
            with pytest.raises(ValueError, match="allows no multiple"):
                sizes.refuse_if_impossible()

    def test_somebody_else_reads_them_in_the_leaders_record(self) -> None:
        policy = "restart_on_loss=False,node_unit=4,rank_order=topology,segment=2"
        told = Sizes.as_stored(FORMING, record("n1", run_options=policy))
        assert told == Sizes(2, 3, node_unit=4, segment=2)
        assert Sizes.as_stored(FORMING, record("n1", run_options="node_unit=x,segment=0")) == Sizes(
            2, 3
        )
        assert Sizes.as_stored(FORMING, None) == Sizes(2, 3)


class TestWorldSize:
    @given(SIZES, PLACES)
    def test_it_is_the_largest_that_is_possible(
        self, sizes: Sizes, places: list[str | None]
    ) -> None:
        records = at(places)
        segments = sum(
            count // sizes.segment
            for place, count in Counter(places).items()
            if place is not None or sizes.segment == 1
        )
        possible = [
            size
            for size in range(sizes.min_nodes, sizes.max_nodes + 1)
            if size % sizes.node_unit == size % sizes.segment == 0
            and size <= segments * sizes.segment
        ]
        assert world_size(records, records, sizes) == max(possible, default=0)

    @given(SIZES, PLACES)
    def test_needed_is_the_least_number_of_nodes_that_suffices(
        self, sizes: Sizes, places: list[str | None]
    ) -> None:
        if sizes.least > sizes.most:
            return
        more = needed(at(places), at(places), sizes)
        if world_size(at(places), at(places), sizes):
            assert more == 0
            return
        assert more > 0

        def suffice(number: int) -> bool:
            domains = ["a", "b", "c/d", *(f"new{it}" for it in range(4))]
            return any(
                world_size(records, records, sizes)
                for extra in itertools.combinations_with_replacement(domains, number)
                if (records := at([*places, *extra]))
            )

        if more <= 4:
            assert suffice(more)
            assert not suffice(more - 1)


class TestChoose:
    def choose(
        self,
        records: dict[str, NodeRecord],
        previous: str = "",
        gone: dict[str, NodeRecord] | None = None,
        **options: object,
    ) -> set[str]:
        rules = replace(RULES, **{**LIMITS, "rank_order": "topology", **options})
        order = [*previous.split(), *(gone or {})]
        last = document(Phase.RUNNING, 4, participants=tuple(order))
        records = {
            node: replace(it, world_id=last.world_id, rank=order.index(node))
            if node in order
            else it
            for node, it in {**records, **(gone or {})}.items()
        }
        survivors = previous.split()
        forming = replace(FORMING, previous=tuple(survivors), ran=last.world_id)
        others = [it for it in records if it not in survivors and it not in (gone or {})]
        newcomers = sorted(others, key=lambda it: natural_key(records[it]))
        chosen = choose(forming, survivors, newcomers, records, rules)
        assert len(chosen) == len({*chosen})
        return {*chosen}

    def test_without_a_policy_survivors_come_first_and_then_names(self) -> None:
        records = in_racks(r1="n1 n2 n3", r2="n8 n9")
        chosen = self.choose(records, "n9 n8", max_nodes=3, rank_order="natural")
        assert chosen == {"n9", "n8", "n1"}

    def test_whole_units_keep_survivors(self) -> None:
        records = in_racks(r1="n1 n2 n3", r2="n8 n9")
        assert self.choose(records, "n9 n8", node_unit=2, rank_order="stable") == {
            "n8", "n9", "n1", "n2",
        }  # fmt: skip

    def test_a_replacement_is_of_the_domain_that_lost_a_node(self) -> None:
        records = in_racks(r1="a1 a2 a9", r2="b1 b2 b3 b0")
        lost = in_racks(r1="a3")
        assert self.choose(records, "a1 a2 b1 b2 b3", lost, max_nodes=6) == {
            "a1", "a2", "a9", "b1", "b2", "b3",
        }  # fmt: skip

    def test_whole_domains_come_before_names(self) -> None:
        records = in_racks(r1="n1 n2 n3", r2="n4 n5", r3="n6 n7 n8")
        assert self.choose(records, max_nodes=6) == {"n1", "n2", "n3", "n6", "n7", "n8"}
        assert self.choose(records, max_nodes=5) == {"n1", "n2", "n3", "n4", "n5"}
        # What is left over is of one domain.
        assert self.choose(records, max_nodes=4) == {"n1", "n2", "n3", "n6"}

    def test_a_domain_that_is_in_the_round_grows_first(self) -> None:
        records = in_racks(r1="n1 n2", r2="n4 n5 n6")
        assert self.choose(records, "n1", max_nodes=3) == {"n1", "n2", "n4"}

    def test_segments_are_whole_though_survivors_wait(self) -> None:
        records = in_racks(r1="a1 a2 a3", r2="b1 b2 b3 b4", r3="c1 c2 c3 c4")
        assert self.choose(records, "a1 a2 a3 b1 b2 b3 b4", segment=4) == {
            "b1", "b2", "b3", "b4", "c1", "c2", "c3", "c4",
        }  # fmt: skip

    def test_segments_of_survivors_come_first(self) -> None:
        records = in_racks(r1="a1 a2 a3 a4", r2="b1 b2 b3", r3="c1 c2")
        chosen = self.choose(records, "b1 b2 b3", segment=2, max_nodes=4)
        # The third survivor is in no whole segment; of the others, r3 fits as a whole.
        assert chosen == {"b1", "b2", "c1", "c2"}

    def test_units_of_segments(self) -> None:
        records = in_racks(r1="a1 a2 a3", r2="b1 b2", r3="c1 c2")
        chosen = self.choose(records, segment=2, node_unit=4)
        assert len(chosen) == 4
        assert "a3" not in chosen

    @given(PLACES, st.randoms(use_true_random=False), SIZES, st.booleans())
    def test_what_is_chosen_is_whole_and_as_large_as_it_can_be(
        self, places: list[str | None], chance: random.Random, sizes: Sizes, topology: bool
    ) -> None:
        records = at(places)
        names = list(records)
        survivors = chance.sample(names, len(names) // 2)
        newcomers = [name for name in names if name not in survivors]
        rules = replace(
            RULES,
            rank_order="topology" if topology else "natural",
            min_nodes=sizes.min_nodes,
            max_nodes=sizes.max_nodes,
            node_unit=sizes.node_unit,
            segment=sizes.segment,
        )
        forming = replace(FORMING, previous=tuple(survivors))
        chosen = choose(forming, survivors, newcomers, records, rules)
        assert len(chosen) == len({*chosen}) == world_size(records, records, sizes)
        counts = Counter(records[name].domain for name in chosen)
        if sizes.segment > 1:
            assert None not in counts
            assert all(count % sizes.segment == 0 for count in counts.values())
        elif len({*chosen} & {*survivors}) < len(survivors):
            assert not {*chosen} & {*newcomers}, "a newcomer in the place of a survivor"
        if not rules.minds_domains:
            assert chosen == [*survivors, *newcomers][: len(chosen)]


def lead(
    now: RoundDocument, records: dict[str, NodeRecord], rules: Rules, **more: object
) -> Action:
    options: dict[str, object] = {"joining": False, "rules": rules, **more}
    return decide(view(records["n1"], now, records, **options))  # type: ignore[arg-type]


class TestRunning:
    """A round of n1 and n2 with room for more, in units of two."""

    RULES = replace(RULES, min_nodes=2, max_nodes=6, node_unit=2, last_call_timeout=0.0)
    NOW = document(Phase.RUNNING, participants=("n1", "n2"), min_nodes=2, max_nodes=6)

    def records(self, **more: NodeRecord) -> dict[str, NodeRecord]:
        runs = {node: running(node, self.NOW) for node in ("n1", "n2")}
        found: dict[str, NodeRecord] = {**runs, **more}
        return {node: replace(it, min_nodes=2, max_nodes=6) for node, it in found.items()}

    def test_one_newcomer_disturbs_nobody(self) -> None:
        assert lead(self.NOW, self.records(n3=record("n3")), self.RULES) == Wait(3.0, False)

    def test_two_do(self) -> None:
        records = self.records(n3=record("n3"), n4=record("n4", Status.SPARE))
        following = written(lead(self.NOW, records, self.RULES))
        assert (following.round, following.reason) == (5, "n3[1], n4[1] joined")

    def test_the_last_call_begins_once_a_whole_unit_has_come(self) -> None:
        rules = replace(self.RULES, last_call_timeout=2.0)
        records = self.records(n3=record("n3"), n4=record("n4"))
        assert lead(self.NOW, records, rules) == Wait(2.0, True)
        assert isinstance(lead(self.NOW, records, rules, enough_for=2.0), Write)
        records |= self.records(n5=record("n5"), n6=record("n6"))
        assert isinstance(lead(self.NOW, records, rules), Write), "they fill the round"

    def test_a_loss_begins_the_next_round_at_once(self) -> None:
        records = self.records(n3=record("n3"))
        action = lead(self.NOW, records, self.RULES, silent={"n2": 3.0})
        assert written(action).previous == ("n1",)

    def test_a_node_lost_without_a_restart_is_replaced_by_whole_units(self) -> None:
        rules = replace(self.RULES, restart_on_loss=False)
        now = replace(self.NOW, absent=("n2",))
        records = self.records(n3=record("n3"))
        following = written(lead(now, records, rules, silent={"n2": 9.0}))
        assert following.reason == "lost n2[1]: lease ran out; n3[1] joined"

    def test_a_segment_must_be_of_one_domain(self) -> None:
        rules = replace(self.RULES, node_unit=1, segment=2)
        records = self.records(n3=record("n3", domain="b"), n4=record("n4", domain="c"))
        racks = {"n1": "a", "n2": "a", "n3": "b", "n4": "c"}
        records = {node: replace(it, domain=racks[node]) for node, it in records.items()}
        assert isinstance(lead(self.NOW, records, rules), Wait)
        records["n4"] = replace(records["n4"], domain="b")
        assert isinstance(lead(self.NOW, records, rules), Write)

    def test_a_node_that_may_be_held_back_is_a_spare(self) -> None:
        """It waits as long as the round runs, not for join_timeout."""
        me = replace(record("n3"), min_nodes=2, max_nodes=6)
        found = view(me, self.NOW, rules=self.RULES)
        assert decide(found) == SetRecord(Status.SPARE, None, -1, ring=False)
        assert isinstance(decide(replace(found, rules=replace(RULES, max_nodes=6))), Wait)

    def test_a_spare_says_why_it_waits(self) -> None:
        me = record("n3", Status.SPARE, min_nodes=2, max_nodes=6, run_options="node_unit=2")
        found = view(me, self.NOW, rules=self.RULES, leader=running("n1", self.NOW))
        ((_, _, text, *_),) = [it for it in remarks(found) if it[0] == "spare"]
        assert text.startswith(
            "this node waits as a spare of round 4, which lets newcomers in later (node_unit=2): "
            "2 of 6 nodes, led by n1[1]."
        )


class TestForming:
    RULES = replace(RULES, min_nodes=2, max_nodes=7, node_unit=3)
    NOW = replace(FORMING, min_nodes=2, max_nodes=7)

    def lead(
        self, names: str, previous: str = "", now: RoundDocument = NOW, **more: object
    ) -> Action:
        records = {name: record(name, round_=4, min_nodes=2, max_nodes=7) for name in names.split()}
        now = replace(now, previous=tuple(previous.split()))
        return lead(now, records, self.RULES, joining=True, **more)

    def test_below_a_unit_everybody_waits(self) -> None:
        assert self.lead("n1 n2", enough_for=99.0) == Wait(None, False)

    def test_a_unit_waits_for_the_last_call(self) -> None:
        after_a_loss = replace(self.NOW, cause=Cause(lost=Names(("n9[1]",), more=3)))
        assert self.lead("n1 n2 n3 n4", now=after_a_loss) == Wait(5.0, True)
        named = written(self.lead("n1 n2 n3 n4", enough_for=5.0))
        assert (named.participants, named.waiters) == (("n1", "n2", "n3"), 1)

    def test_the_largest_multiple_completes_at_once(self) -> None:
        named = written(self.lead("n1 n2 n3 n4 n5 n6"))
        assert (len(named.participants), named.waiters) == (6, 0)

    def test_survivors_that_are_left_over_are_named_in_the_cause(self) -> None:
        survivors = "n5 n4 n3 n2"
        named = written(self.lead("n1 n2 n3 n4 n5 n6", survivors, enough_for=9.0))
        assert {*named.participants} >= {"n2", "n3", "n4", "n5"}
        assert not named.cause.surplus
        named = written(self.lead("n1 n2 n3 n4 n5", survivors, enough_for=9.0))
        assert {*named.participants} == {"n3", "n4", "n5"}
        assert named.reason == "n2[1] left over from whole units or segments"
        # The round never ran, and the next one has room for another of them.
        again = replace(self.NOW, previous=("n5", "n4"), cause=named.cause)
        records = {
            name: record(name, round_=4, min_nodes=2, max_nodes=7)
            for name in ("n1", "n2", "n4", "n5")
        }
        named = written(lead(again, records, self.RULES, joining=True, enough_for=9.0))
        assert named.participants == ("n1", "n4", "n5")
        assert named.reason == "n1[1] joined; n2[1] left over from whole units or segments"


def test_a_participant_without_a_record_is_in_no_segment() -> None:
    """The store forgot it: nobody is disturbed for a segment that may be whole."""
    rules = replace(RULES, min_nodes=2, max_nodes=4, segment=2)
    now = document(Phase.RUNNING, participants=("n1", "n2"), min_nodes=2, max_nodes=4)
    records = {
        "n1": replace(running("n1", now), domain="a", min_nodes=2, max_nodes=4),
        **{name: record(name, domain="b", min_nodes=2, max_nodes=4) for name in ("n3", "n4")},
    }
    assert isinstance(lead(now, records, rules), Wait)
