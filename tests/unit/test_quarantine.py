"""Quarantine: whose rounds count, when a host is kept out, for how long, and when it is let in."""

from __future__ import annotations

from typing import Any

import pytest

from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import (
    Cause,
    Exclusion,
    Names,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
    Strikes,
)
from rdzv_plugins.protocol.policies.quarantine import blamed
from rdzv_plugins.protocol.rules import Action, Wait
from tests import replace

from .views import RULES, all_running, document, joining, record, view, written

pytestmark = pytest.mark.rule("quarantine")

ON = replace(RULES, quarantine_after=3, quarantine_window=600.0)
NOW = 1000.0
TWICE = Strikes("n3", (NOW - 200.0, NOW - 100.0))
LOST = Cause(lost=Names(("n3[1]",)))
FORMING = document(Phase.FORMING, round_=5, cause=LOST, strikes=(TWICE,))


def lead(now: RoundDocument, others: dict[str, NodeRecord], **more: Any) -> Action:
    me = others.get("n1") or record("n1")
    options = {"rules": ON, "wall": NOW, "enough_for": 5.0, **more}
    return decide(view(me, now, others, joining=False, **options))


class TestWhoIsBlamed:
    def test_a_lost_node_is_blamed(self) -> None:
        cause = Cause(lost=Names(("n3[1]", "n3[2]", "n4[1]")), failed=Names(("n1[1]",)))
        assert blamed(cause, ON) == ["n3", "n4"]

    def test_a_host_is_blamed_where_only_its_workers_failed(self) -> None:
        assert blamed(Cause(failed=Names(("n3[1]", "n3[2]"))), ON) == ["n3"]
        assert blamed(Cause(failed=Names(("n3[1]", "n4[1]"))), ON) == []

    @pytest.mark.parametrize("reason", ["joined", "left", "drained", "excluded"])
    def test_nobody_whose_workers_failed_as_a_peer_stopped_for_another_reason(
        self, reason: str
    ) -> None:
        cause = replace(Cause(failed=Names(("n3[1]",))), **{reason: Names(("n4[1]",))})
        assert blamed(cause, ON) == []
        assert blamed(replace(cause, lost=Names(("n2[1]",))), ON) == ["n2"]

    def test_nobody_who_left_joined_or_has_no_record(self) -> None:
        names = Names(("n3[1]",))
        assert blamed(Cause(left=names, joined=names, drained=names), ON) == []
        assert blamed(Cause(lost=Names(("0123456789abcdef",))), ON) == []

    def test_a_node_that_failed_and_left_is_blamed_and_not_those_that_failed_with_it(self) -> None:
        failed = Names(("n1[1]", "n2[1]", "n3[1]"))
        cause = Cause(left=Names(("n3[1]", "n4[1]")), failed=failed)
        assert blamed(cause, ON) == ["n3"]
        assert str(cause) == "n3[1], n4[1] left; n1[1], n2[1] joined again (their workers failed)"


class TestStrikes:
    CONFIRMED = document(Phase.CONFIRMING, participants=("n1", "n2"), cause=LOST)

    def test_each_round_that_runs_counts_once_whom_it_lost(self) -> None:
        runs = written(lead(self.CONFIRMED, all_running(self.CONFIRMED)))
        assert runs.phase is Phase.RUNNING
        assert runs.strikes == (Strikes("n3", (NOW,)),)

    def test_what_is_older_than_the_window_does_not(self) -> None:
        old = Strikes("n3", (NOW - 700.0, NOW - 10.0))
        others = Strikes("n4", (NOW - 700.0,))
        now = replace(self.CONFIRMED, strikes=(old, others))
        runs = written(lead(now, all_running(self.CONFIRMED)))
        assert runs.strikes == (Strikes("n3", (NOW - 10.0, NOW)),)

    def test_nothing_is_written_where_it_is_off(self) -> None:
        runs = written(lead(self.CONFIRMED, all_running(self.CONFIRMED), rules=RULES))
        assert runs.strikes == ()


class TestQuarantine:
    def test_a_host_that_ends_a_third_round_is_kept_out(self) -> None:
        after = written(lead(FORMING, joining("n1", "n2", "n3", round_=4)))
        (held,) = after.quarantined
        # A tenth of the window.
        assert held == Exclusion("n3", NOW + 60.0, "3 rounds ended because of it within 200 s")
        assert after.strikes == (Strikes("n3", (), 1, NOW + 60.0),)
        named = written(lead(after, joining("n1", "n2", "n3", round_=4)))
        assert named.participants == ("n1", "n2")

    def test_a_single_round_is_told_without_a_time(self) -> None:
        rules = replace(RULES, quarantine_after=1, quarantine_window=600.0)
        first = replace(FORMING, strikes=())
        (held,) = written(lead(first, joining("n1", "n2", round_=4), rules=rules)).quarantined
        assert held.why == "a round ended because of it"

    def test_also_one_that_is_not_there_yet(self) -> None:
        after = written(lead(FORMING, joining("n1", "n2", round_=4)))
        assert [it.host for it in after.quarantined] == ["n3"]

    def test_each_time_twice_as_long_up_to_the_window(self) -> None:
        for served, seconds in ((1, 120.0), (2, 240.0), (9, 600.0), (5000, 600.0)):
            again = replace(FORMING, strikes=(replace(TWICE, served=served),))
            (held,) = written(lead(again, joining("n1", "n2", "n3", round_=4))).quarantined
            assert held.until == NOW + seconds

    def test_a_node_whose_workers_failed_is_named_in_the_cause(self) -> None:
        cause = Cause(failed=Names(("n3[1]",)))
        forming = replace(FORMING, cause=cause, previous=("n1", "n2", "n3"))
        everybody = joining("n1", "n2", "n3", round_=4)
        after = written(lead(forming, everybody))
        out = written(lead(after, everybody))
        assert out.previous == ("n1", "n2")
        why = "quarantined, 3 rounds ended because of it within 200 s"
        assert out.reason.endswith(f"excluded n3[1]: {why}")

    def test_by_default_for_three_losses_and_for_no_failures(self) -> None:
        default, everybody = replace(ON, quarantine_after=None), joining("n1", "n2", "n3", round_=4)
        after = written(lead(FORMING, everybody, rules=default))
        assert [it.host for it in after.quarantined] == ["n3"]
        failed = replace(FORMING, cause=Cause(failed=Names(("n3[1]",))))
        assert written(lead(failed, everybody, rules=default)).participants

    def test_not_the_second_time(self) -> None:
        once = replace(FORMING, strikes=(Strikes("n3", (NOW - 100.0,)),))
        assert written(lead(once, joining("n1", "n2", "n3", round_=4))).participants

    def test_not_below_the_minimum(self) -> None:
        named = written(lead(FORMING, joining("n1", "n3", round_=4)))
        assert named.participants == ("n1", "n3")

    def test_when_it_is_over_the_host_comes_back(self) -> None:
        held = Exclusion("n3", NOW + 60.0)
        ran = document(Phase.RUNNING, participants=("n1", "n2"), quarantined=(held,))
        others = all_running(ran) | {"n3": record("n3", Status.SPARE)}
        assert isinstance(lead(ran, others, wall=NOW + 59.0), Wait)
        assert written(lead(ran, others, wall=NOW + 60.0)).reason == "n3[1] joined"


class TestWithoutIt:
    HELD = (Exclusion("n3", NOW + 90.0), Exclusion("n2", NOW + 60.0))
    ALONE = document(Phase.FORMING, round_=5, quarantined=HELD)

    def test_a_run_that_cannot_do_without_a_host_lets_it_in_the_first_to_end_first(self) -> None:
        after = written(lead(self.ALONE, joining("n1", "n2", "n3", round_=4)))
        assert after.quarantined == (Exclusion("n3", NOW + 90.0),)
        named = written(lead(after, joining("n1", "n2", "n3", round_=4)))
        assert named.participants == ("n1", "n2")

    def test_nobody_is_let_in_where_it_would_not_help(self) -> None:
        more = replace(ON, min_nodes=3)
        fits = {name: replace(it, min_nodes=3) for name, it in joining("n1", "n2").items()}
        alone = replace(self.ALONE, min_nodes=3)
        assert lead(alone, fits, rules=more) == Wait(60.0)

    def test_a_host_that_people_keep_out_is_not_let_in(self) -> None:
        now = replace(self.ALONE, excluded=(Exclusion("n2"),))
        after = written(lead(now, joining("n1", "n2", "n3", round_=4)))
        assert [it.host for it in after.quarantined] == ["n2"]

    def test_while_others_of_the_last_round_are_awaited_nobody_is_let_in(self) -> None:
        now = replace(self.ALONE, previous=("n1", "n4"))
        others = joining("n1", "n2", "n3", round_=4) | {"n4": record("n4", Status.RUN, 4)}
        assert isinstance(lead(now, others), Wait)
