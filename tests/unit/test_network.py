"""What a leader makes of the links that its participants have tried."""

from __future__ import annotations

import pytest

from rdzv_plugins.protocol.documents import Dials, Faults, NodeRecord, Phase, RoundDocument
from rdzv_plugins.protocol.policies import network
from rdzv_plugins.protocol.policies.network import Verdict, partner_in, pause, slow, verdict_on
from tests import replace

from .views import RULES, document, running

pytestmark = pytest.mark.rule("network check")

CHECKS = replace(RULES, network_check=True)


def ring(size: int, round_: int) -> dict[str, str]:
    ranks = {f"n{rank}": rank for rank in range(size)}
    return {node: partner_in(ranks, node, round_) or "" for node in ranks}


def a_round(size: int, faults: Faults = Faults(), round_: int = 4) -> RoundDocument:  # noqa: B008
    people = tuple(f"n{rank}" for rank in range(size))
    return document(Phase.CONFIRMING, round_, "n0", participants=people, faults=faults)


def records_of(
    of: RoundDocument, *bad: tuple[str, str], blind: str = "", cut: str = ""
) -> dict[str, NodeRecord]:
    """What all have found: bad links, a node that cannot be dialled, and one that is cut off."""
    first = of.participants[0]

    def fails(one: str, other: str) -> bool:
        return {one, other} in map(set, bad) or other == blind or cut in (one, other)

    found: dict[str, NodeRecord] = {}
    for node in of.participants:
        partner = partner_in(of.ranks, node, of.round) or ""
        it = Dials(partner, 0.1, f"{partner}[1] at h:1 (timed out)" if fails(node, partner) else "")
        if node != first:
            why = f"rank 0, {first}[1], at h:2 (timed out)" if fails(node, first) else ""
            it = replace(it, first=first, unreached=why)
        found[node] = replace(running(node, of), dials=it)
    return found


def after(of: RoundDocument, verdict: Verdict) -> RoundDocument:
    """The next round of the same nodes."""
    return replace(of, round=of.round + 1, faults=replace(verdict.faults, out=()))


class TestPairs:
    def test_each_dials_one_and_is_dialled_by_one(self) -> None:
        for size in range(2, 9):
            for round_ in range(20):
                pairs = ring(size, round_)
                assert sorted(pairs.values()) == sorted(pairs)
                assert all(one != other for one, other in pairs.items())

    def test_the_next_round_pairs_differently(self) -> None:
        for size in range(3, 9):
            for round_ in range(20):
                assert not ring(size, round_).items() & ring(size, round_ + 1).items()

    def test_one_node_alone_dials_nobody(self) -> None:
        assert partner_in({"n1": 0}, "n1", 3) is None
        assert partner_in({"n1": 0, "n2": 1}, "n3", 3) is None

    def test_a_shard_has_a_ring_of_its_own(self) -> None:
        ranks = {"a": 700, "b": 3, "c": 90}
        assert [partner_in(ranks, node, 0) for node in "abc"] == ["b", "c", "a"]


class TestTheVerdict:
    def test_a_round_runs_where_all_passed(self) -> None:
        of = a_round(4, Faults(links=(("n0", "n1"),), rounds=2))
        assert verdict_on(of, records_of(of)) == Verdict(True, Faults())

    def test_without_the_option_nobody_is_judged(self) -> None:
        of = a_round(3)
        verdict = verdict_on(of, {node: running(node, of) for node in of.participants})
        assert verdict == Verdict(True, Faults())
        assert b"faults" not in replace(of, faults=verdict.faults).encode()

    def test_a_leader_without_the_option_judges_by_what_the_others_found(self) -> None:
        of = a_round(4)
        found = records_of(of, cut="n2")
        found["n0"] = replace(found["n0"], dials=None)
        assert not verdict_on(of, found).runs

    def test_a_node_that_cannot_be_dialled_as_rank_0_is_known_as_long_as_the_run(self) -> None:
        of = a_round(3, Faults(not_to_host=("n2",), rounds=1))
        verdict = verdict_on(of, records_of(of))
        assert verdict == Verdict(True, Faults(not_to_host=("n2",)))

    def test_a_node_without_the_option_counts_as_passed(self) -> None:
        of = a_round(3)
        found = {node: replace(it, dials=None) for node, it in records_of(of).items()}
        assert verdict_on(of, found).runs

    def test_a_node_that_is_cut_off_is_out_at_once(self) -> None:
        for size in (3, 5, 8):
            of = a_round(size)
            for cut in of.participants:
                verdict = verdict_on(of, records_of(of, cut=cut))
                assert not verdict.runs
                assert [node for node, _ in verdict.faults.out] == [cut], (size, cut)
                assert verdict.faults.not_to_host == ()
                assert [verdict.faults.links, verdict.faults.blind] == [(), ()]
        assert verdict.faults.why_out("n7").startswith("network: no data passed between this node ")

    def test_a_node_that_nobody_can_dial_is_out_after_two_rounds(self) -> None:
        of = a_round(5)
        verdict = verdict_on(of, records_of(of, blind="n3"))
        assert (verdict.runs, verdict.faults.out, len(verdict.faults.links)) == (False, (), 1)
        of = after(of, verdict)
        verdict = verdict_on(of, records_of(of, blind="n3"))
        assert [node for node, _ in verdict.faults.out] == ["n3"]

    @pytest.mark.parametrize("size", [3, 4, 5])
    def test_that_its_own_dials_pass_does_not_speak_for_it(self, size: int) -> None:
        of = a_round(size)
        for _ in range(size):
            verdict = verdict_on(of, records_of(of, blind=f"n{size - 1}"))
            if verdict.faults.out:
                break
            of = after(of, verdict)
        assert [node for node, _ in verdict.faults.out] == [f"n{size - 1}"]
        assert of.round <= 5

    def test_one_bad_link_costs_a_round_and_then_holds_nobody_up(self) -> None:
        """Also where the pairing meets it again."""
        of = a_round(3)
        verdict = verdict_on(of, records_of(of, ("n1", "n2")))
        assert (verdict.runs, verdict.faults.out) == (False, ())
        of = after(of, verdict)
        verdict = verdict_on(of, records_of(of, ("n1", "n2")))
        # Now the other one has dialled.
        assert (verdict.runs, verdict.faults.out) == (False, ())
        of = after(of, verdict)
        verdict = verdict_on(of, records_of(of, ("n1", "n2")))
        assert (verdict.runs, len(verdict.failed)) == (True, 1)
        assert verdict.faults == Faults(links=verdict.failed)

    def test_a_link_that_is_well_again_is_forgotten(self) -> None:
        of = a_round(3, Faults(links=(("n1", "n2"),), rounds=1))
        verdict = verdict_on(of, records_of(of, ("n0", "n1")))
        assert (verdict.runs, verdict.faults.links) == (False, (("n0", "n1"),))

    def test_new_links_that_fail_in_each_round_do_not_hold_it_up_for_ever(self) -> None:
        for rounds, runs in ((network._MOST_ROUNDS - 1, False), (network._MOST_ROUNDS, True)):
            of = a_round(9, Faults(links=(("n7", "n8"),), rounds=rounds))
            partner = str(partner_in(of.ranks, "n5", of.round))
            assert verdict_on(of, records_of(of, ("n5", partner))).runs is runs

    def test_two_that_are_cut_off_are_told_from_the_one_between_them(self) -> None:
        of = a_round(8, round_=0)
        bad = [(cut, other) for cut in ("n2", "n4") for other in of.participants if other != cut]
        verdict = verdict_on(of, records_of(of, *bad))
        assert not verdict.runs
        of = after(of, verdict)
        if not verdict.faults.out:
            verdict = verdict_on(of, records_of(of, *bad))
        assert sorted(node for node, _ in verdict.faults.out) == ["n2", "n4"]

    def test_where_each_may_be_at_fault_the_next_pairing_tells(self) -> None:
        of = a_round(3)
        bad = ("n0", "n1"), ("n1", "n2"), ("n0", "n2")
        verdict = verdict_on(of, records_of(of, *bad))
        assert (verdict.runs, verdict.faults.out) == (False, ())
        of = after(of, verdict)
        assert len(verdict_on(of, records_of(of, *bad)).faults.out) == 1

    def test_a_node_that_was_at_fault_before_may_have_one_bad_link(self) -> None:
        """Else a round that needs it never runs."""
        of, runs = a_round(3), list[bool]()
        while len(runs) < 3:
            found = records_of(of, ("n1", "n2"))
            found["n1"] = replace(found["n1"], was_at_fault=True)
            verdict = verdict_on(of, found)
            runs.append(verdict.runs)
            of = after(of, verdict)
        assert runs == [False, False, True]


class TestRankZero:
    def hidden(self, of: RoundDocument, *who: str) -> dict[str, NodeRecord]:
        """These cannot dial rank 0; all data pass."""
        found = records_of(of)
        for node in who:
            it = replace(found[node].dials, unreached="rank 0, n0[1], at h:2 (refused)")
            found[node] = replace(found[node], dials=it)
        return found

    def test_a_rank_0_that_nobody_reaches_gives_its_place_up(self) -> None:
        of = a_round(2)
        verdict = verdict_on(of, self.hidden(of, "n1"))
        assert (verdict.runs, verdict.faults.not_to_host) == (False, ("n0",))
        found = records_of(of)
        able = network.able_to_host(after(of, verdict), found, of.participants)
        assert [able[node].can_host for node in of.participants] == [False, True]
        # The other one could not open a TCPStore before; now it is to try again.
        found["n1"] = replace(found["n1"], can_host=False)
        able = network.able_to_host(after(of, verdict), found, of.participants)
        assert [able[node].can_host for node in of.participants] == [False, True]

    def test_a_rank_0_that_some_cannot_dial_gives_way_to_one_that_all_may(self) -> None:
        of = a_round(4)
        verdict = verdict_on(of, self.hidden(of, "n2"))
        assert (verdict.runs, verdict.faults.not_to_host) == (False, ("n0", "n2"))

    def test_a_rank_0_that_nobody_reaches_is_not_left_out_for_that(self) -> None:
        of = a_round(5)
        verdict = verdict_on(of, self.hidden(of, "n1", "n2", "n3", "n4"))
        assert (verdict.faults.out, verdict.faults.not_to_host) == ((), ("n0",))

    def test_a_node_that_can_dial_no_rank_0_is_left_out(self) -> None:
        of = a_round(4, Faults(rounds=1, blind=(("n2", "n1"),), not_to_host=("n1", "n2")))
        verdict = verdict_on(of, self.hidden(of, "n2"))
        assert [node for node, _ in verdict.faults.out] == ["n2"]
        assert (verdict.faults.not_to_host, verdict.faults.blind) == (("n1", "n2"), ())

    def test_no_round_runs_with_a_rank_0_that_a_node_cannot_dial(self) -> None:
        of = a_round(4, Faults(links=(("n0", "n2"),), rounds=50))
        assert not verdict_on(of, self.hidden(of, "n2")).runs

    def test_once_each_has_had_its_turn_they_begin_again(self) -> None:
        of = a_round(2, Faults(links=(("n0", "n1"),), rounds=1, not_to_host=("n1",)))
        assert verdict_on(of, self.hidden(of, "n1")).faults.not_to_host == ("n0",)


def test_what_fails_at_once_is_not_tried_without_a_pause() -> None:
    pauses = [pause(Faults(rounds=rounds), CHECKS) for rounds in range(6)]
    assert pauses == [0.0, 0.0, 1.0, 2.0, 3.0, 3.0]
    assert pause(Faults(rounds=10**6), CHECKS) == CHECKS.lease


class TestSlow:
    def took(self, *seconds: float) -> str:
        of = a_round(len(seconds))
        found = records_of(of)
        for node, it in zip(of.participants, seconds, strict=True):
            found[node] = replace(found[node], dials=replace(found[node].dials, seconds=it))
        return slow(of, found)

    def test_a_link_that_takes_over_twice_the_median_is_told(self) -> None:
        assert self.took(0.3, 0.4, 1.9, 0.5) == (
            "data passed slowly between n2[1] and n0[1] in 1.90 s; the median of all is 0.50 s"
        )

    def test_nobody_else_is(self) -> None:
        assert self.took(0.3, 0.4, 0.7, 0.5) == ""
        assert self.took(0.001, 0.002, 0.04, 0.002) == "", "that is no time at all"
        assert self.took(0.3, 1.9) == "", "nobody knows which of two is slow"


def test_the_remark_says_what_failed_where_and_what_to_do() -> None:
    of = a_round(5)
    said = network.remark(of, records_of(of, cut="n2"), runs=False)
    assert said.startswith(
        "round 4 does not run: n1[1] could not exchange data with n2[1] at h:1 ("
    )
    assert said.endswith("and the firewalls between these hosts, and their --local-addr")


def test_a_document_and_a_record_say_nothing_of_it_by_default() -> None:
    of = document(Phase.CONFIRMING)
    assert b"faults" not in of.encode()
    encoded = running("n1", of).encode()
    assert b"net" not in encoded
    assert b"port" not in encoded
    assert b"was_at_fault" not in encoded
