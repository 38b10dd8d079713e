"""What a node does next, rule by rule; the simulator tries what nobody thought of."""

from __future__ import annotations

from typing import Any

import pytest

from rdzv_plugins.protocol import decide as decisions
from rdzv_plugins.protocol import rules
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import (
    Cause,
    Names,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.parting import newcomers_with
from rdzv_plugins.protocol.rules import (
    Abdicate,
    Action,
    AskTombstone,
    Close,
    Confirm,
    Fail,
    Failure,
    ListRecords,
    Rules,
    SetRecord,
    Start,
    View,
    Wait,
)
from rdzv_plugins.protocol.situation import nodes_waiting, waits_for_a_living_round
from tests import replace

from .views import (
    RULES,
    RUN,
    all_running,
    as_named,
    document,
    joining,
    record,
    running,
    view,
    watching,
    written,
)


@pytest.mark.rule("last call")
class TestFirstRound:
    def test_a_new_run_is_founded_by_whoever_comes(self) -> None:
        founded = written(decide(view(record("n1"), None)))
        assert (founded.round, founded.phase, founded.leader) == (0, Phase.FORMING, "n1")

    def test_a_node_that_nobody_asked_founds_nothing(self) -> None:
        assert decide(view(record("n1"), None, joining=False)) == Wait()

    def test_the_leader_needs_the_records(self) -> None:
        assert decide(view(record("n1"), document(Phase.FORMING))) == ListRecords()

    def test_others_wait_for_the_leaders_lease(self) -> None:
        assert decide(view(record("n2"), document(Phase.FORMING))) == Wait(3.0)

    def test_below_the_minimum_everybody_waits(self) -> None:
        action = decide(view(record("n1"), document(Phase.FORMING), joining("n1")))
        assert action == Wait(None, False)

    def test_the_maximum_completes_at_once(self) -> None:
        named = written(
            decide(view(record("n1"), document(Phase.FORMING), joining("n10", "n2", "n1")))
        )
        assert named.phase is Phase.CONFIRMING
        assert named.participants == ("n1", "n2", "n10")

    @pytest.mark.parametrize(("waited", "done"), [(None, False), (4.9, False), (5.0, True)])
    def test_the_minimum_completes_after_the_last_call(
        self, waited: float | None, done: bool
    ) -> None:
        forming = document(Phase.FORMING, round_=0)
        action = decide(view(record("n1"), forming, joining("n1", "n2"), enough_for=waited))
        if done:
            assert written(action).participants == ("n1", "n2")
        else:
            assert isinstance(action, Wait)
            assert action.enough
            assert action.seconds == pytest.approx(5.0 - (waited or 0.0))

    def test_a_node_is_not_counted_if_it_left_is_silent_or_sets_other_sizes(self) -> None:
        others = joining("n1", "n2", "n3") | {
            "n3": record("n3", Status.LEFT),
            "n4": record("n4", max_nodes=9),
            "n5": record("n5"),
        }
        forming = document(Phase.FORMING, round_=0)
        action = decide(view(record("n1"), forming, others, silent={"n5": 3.0}))
        assert action == Wait(5.0, True)

    def test_a_surplus_is_spare_and_survivors_come_before_newcomers(self) -> None:
        forming = document(Phase.FORMING, previous=("n8", "n9"))
        others = joining("n1", "n2", "n8", "n9", round_=3)
        named = written(decide(view(record("n1"), forming, others)))
        assert set(named.participants) == {"n8", "n9", "n1"}
        assert named.waiters == 1


@pytest.mark.rule("exclusivity")
class TestExclusivity:
    FORMING = document(Phase.FORMING, previous=("n2", "n3"))

    def lead(self, others: dict[str, NodeRecord], **silent: float) -> Action:
        everybody = joining("n1", "n4", "n5") | others
        return decide(view(record("n1"), self.FORMING, everybody, silent=silent))

    def test_a_participant_that_still_runs_is_waited_for(self) -> None:
        others = {"n2": record("n2", Status.RUN, 3), "n3": record("n3", round_=3)}
        assert self.lead(others, n2=1.0) == Wait(2.0, True)

    def test_a_join_older_than_the_round_does_not_count(self) -> None:
        others = {"n2": record("n2", round_=2), "n3": record("n3", round_=3)}
        assert self.lead(others, n2=1.0) == Wait(2.0, True)

    @pytest.mark.parametrize("status", [Status.JOIN, Status.SPARE])
    def test_all_have_asked_again(self, status: Status) -> None:
        others = {"n2": record("n2", status, 3), "n3": record("n3", status, 3)}
        assert set(written(self.lead(others)).participants) > {"n2", "n3"}

    def test_the_rest_have_left_or_are_silent(self) -> None:
        others = {"n2": record("n2", Status.LEFT, 3), "n3": record("n3", Status.RUN, 3)}
        assert set(written(self.lead(others, n3=3.0)).participants) == {"n1", "n4", "n5"}

    def test_a_record_that_is_missing_is_silence_not_a_leave(self) -> None:
        others = {"n2": record("n2", round_=3)}
        assert self.lead(others, n3=2.5) == Wait(0.5, True)
        assert set(written(self.lead(others, n3=3.0)).participants) >= {"n2"}


@pytest.mark.rule("a round")
class TestConfirming:
    NAMED = document(Phase.CONFIRMING)

    def test_rank_0_opens_the_master_and_others_do_not(self) -> None:
        for name, first in (("n1", True), ("n2", False)):
            action = decide(view(record(name, round_=3), self.NAMED))
            assert action == Confirm(self.NAMED, first)

    def test_a_node_that_has_confirmed_does_not_do_it_again(self) -> None:
        assert isinstance(decide(view(running("n2", self.NAMED), self.NAMED)), Wait)

    def test_a_node_that_has_asked_for_a_round_of_another_run_confirms_again(self) -> None:
        between = record("n2", round_=3, incarnation="another", world_id=self.NAMED.world_id)
        mine = view(between, self.NAMED, without_tombstone=frozenset({"another"}))
        assert decide(mine) == Confirm(self.NAMED, False)

    def test_another_round_of_the_same_number_is_confirmed_anew(self) -> None:
        other = replace(self.NAMED, participants=("n9", "n2"))
        assert isinstance(decide(view(running("n2", other), self.NAMED)), Confirm)

    def test_the_leader_waits_for_the_last_one(self) -> None:
        others = all_running(self.NAMED) | {"n3": record("n3", round_=3)}
        assert decide(view(others["n1"], self.NAMED, others)) == Wait(3.0)

    def test_a_round_runs_when_all_have_confirmed(self) -> None:
        others = all_running(self.NAMED)
        started = written(decide(view(others["n1"], self.NAMED, others)))
        assert (started.phase, started.master) == (Phase.RUNNING, "n1:1")
        assert started.ran == started.world_id

    def test_a_participant_that_dies_meanwhile_is_found_out(self) -> None:
        others = all_running(self.NAMED)
        again = written(decide(view(others["n1"], self.NAMED, others, silent={"n3": 3.0})))
        assert (again.round, again.phase) == (5, Phase.FORMING)
        assert again.previous == ("n1", "n2")
        assert again.reason == "lost n3[1]: lease ran out"


@pytest.mark.rule("loss")
class TestRunning:
    NOW = document(Phase.RUNNING)

    def lead(self, others: dict[str, NodeRecord], rules: Rules = RULES, now: RoundDocument = NOW,
             **silent: float) -> Action:  # fmt: skip
        everybody = all_running(now) | others
        return decide(
            view(everybody["n1"], now, everybody, joining=False, silent=silent, rules=rules)
        )

    def test_a_node_that_confirmed_starts(self) -> None:
        assert decide(view(running("n2", self.NOW), self.NOW)) == Start(self.NOW)

    @pytest.mark.parametrize(
        "later",
        [
            replace(NOW, phase=Phase.FORMING, round=5, participants=(), previous=("n1", "n2")),
            replace(NOW, phase=Phase.FORMING, round=9, participants=(), leader=None),
            replace(NOW, phase=Phase.CLOSED),
        ],
        ids=["next", "later", "closed"],
    )
    def test_a_round_that_was_over_before_it_was_seen_to_run_is_started(
        self, later: RoundDocument
    ) -> None:
        # The others were released, and their agents wait for this one's.
        me = running("n2", self.NOW)
        assert decide(view(me, later, confirmed=as_named(self.NOW))) == Start(self.NOW)
        other = replace(later, ran="4-00000000")
        assert not isinstance(decide(view(me, other, confirmed=as_named(self.NOW))), Start)
        again = replace(me, status=Status.JOIN)
        assert not isinstance(decide(view(again, later, confirmed=as_named(self.NOW))), Start)

    def test_what_follows_says_that_it_ran_until_the_next_is_named(self) -> None:
        """Rank 0 of that one is told which MASTER was the last."""
        following = written(self.lead({}, n3=3.0))
        assert (following.ran, following.master) == (self.NOW.world_id, "n1:1")
        everybody = joining("n1", "n2", round_=4)
        named = written(decide(view(everybody["n1"], following, everybody, enough_for=9.0)))
        assert (named.phase, named.ran, named.master) == (Phase.CONFIRMING, None, "n1:1")

    def test_a_node_that_did_not_confirm_is_not_in_the_round(self) -> None:
        assert decide(view(record("n2", round_=3), self.NOW)) == SetRecord(Status.JOIN, RUN, 4)

    def test_a_quiet_round_is_left_alone(self) -> None:
        assert self.lead({}, n2=1.0) == Wait(2.0)

    def test_a_newcomer_to_a_full_round_is_a_spare(self) -> None:
        assert decide(view(record("n4"), self.NOW)) == SetRecord(Status.SPARE, None, -1, ring=False)
        assert isinstance(self.lead(joining("n4")), Wait)

    def test_a_newcomer_with_room_starts_the_next_round(self) -> None:
        small = replace(self.NOW, participants=("n1", "n2"))
        following = written(self.lead(joining("n4"), now=small))
        assert (following.round, following.waiters) == (5, 1)
        assert following.reason == "n4[1] joined"

    def test_a_loss_starts_the_next_round(self) -> None:
        following = written(self.lead({}, n3=3.0))
        assert (following.round, following.previous) == (5, ("n1", "n2"))

    def test_a_loss_is_noted_where_it_shall_not_restart(self) -> None:
        rules = replace(RULES, restart_on_loss=False)
        noted = written(self.lead({}, rules, n3=3.0))
        assert (noted.round, noted.phase, noted.absent) == (4, Phase.RUNNING, ("n3",))
        assert self.lead({}, rules, noted, n3=9.0) == Wait(3.0)

    def test_the_lost_come_back_to_a_round_that_goes_on(self) -> None:
        rules, now = replace(RULES, restart_on_loss=False), replace(self.NOW, absent=("n3",))
        everybody = all_running(now)
        base = view(everybody["n1"], now, everybody, joining=False, rules=rules)
        assert isinstance(decide(base), Wait)
        back = replace(base, watched=watching({}, moved=("n1", "n2", "n3")))
        assert written(decide(back)).absent == ()

    def test_a_leave_is_a_loss_at_once(self) -> None:
        following = written(self.lead({"n3": record("n3", Status.LEFT, 4)}))
        assert following.reason == "n3[1] left"

    def test_a_participant_whose_workers_failed_takes_the_others_along(self) -> None:
        following = written(self.lead({"n3": record("n3", round_=4, failed=True)}))
        assert following.previous == ("n1", "n2", "n3")
        assert following.reason == "n3[1] joined again (its workers failed)"

    def test_a_participant_that_was_told_to_join_again_has_not_failed(self) -> None:
        """By a newcomer's run, in a store that forgot this one, which was then written back."""
        following = written(self.lead({"n3": record("n3", round_=4)} | joining("n4")))
        assert following.reason == "n3[1], n4[1] joined"

    def test_an_old_join_of_a_participant_is_nothing(self) -> None:
        assert isinstance(self.lead({"n3": record("n3", round_=3)}), Wait)


@pytest.mark.rule("loss")
class TestCauses:
    """Why a round: amended while it forms, and each node under what became of it."""

    NOW = document(Phase.FORMING, previous=("n1", "n2", "n3"), cause=Cause().plus(failed=["n1[1]"]))

    def lead(self, others: dict[str, NodeRecord], **silent: float) -> RoundDocument:
        everybody = joining("n1", "n2", round_=3) | others
        return written(decide(view(everybody["n1"], self.NOW, everybody, silent=silent)))

    def test_a_lost_node_is_named_though_the_others_workers_failed_first(self) -> None:
        after = self.lead({"n3": record("n3", Status.RUN, 3)}, n3=3.0)
        assert after.cause == Cause().plus(failed=["n1[1]"], lost=["n3[1]"])
        assert after.reason == "lost n3[1]: lease ran out; n1[1] joined again (its workers failed)"

    def test_a_node_that_left_is_named_so(self) -> None:
        after = self.lead({"n3": record("n3", Status.LEFT, 3)})
        assert after.cause == Cause().plus(failed=["n1[1]"], left=["n3[1]"])

    def test_a_node_that_came_in_the_meantime_is_named_when_it_is_let_in(self) -> None:
        others = {"n3": record("n3", Status.LEFT, 3), "n4": record("n4")}
        named = self.lead(others)
        assert named.phase is Phase.CONFIRMING
        assert named.cause == Cause().plus(failed=["n1[1]"], left=["n3[1]"], joined=["n4[1]"])

    def test_a_node_that_stays_a_spare_has_not_joined(self) -> None:
        """When the last round ended, nobody knew who of those that wait would be let in."""
        named = Cause().plus(lost=["n3[1]"], joined=["n4[1]", "n5[1]"])
        now = replace(self.NOW, previous=("n1", "n2"), cause=named)
        everybody = joining("n1", "n2", round_=3) | joining("n4", "n5")
        after = written(decide(view(everybody["n1"], now, everybody)))
        assert after.participants == ("n1", "n2", "n4")
        assert after.cause == Cause().plus(lost=["n3[1]"], joined=["n4[1]"])

    @pytest.mark.parametrize(("waiting", "room"), [(20, 20), (30, 4)])
    def test_each_of_many_newcomers_counts_once(self, waiting: int, room: int) -> None:
        most = 4 + room
        now = document(Phase.RUNNING, max_nodes=most, participants=("n1", "n2", "n3", "n4"))
        now = replace(now, ran=now.world_id)
        rules = replace(RULES, max_nodes=most, last_call_timeout=0.0)
        new = {f"n{i}": record(f"n{i}", max_nodes=most) for i in range(5, 5 + waiting)}
        old = {name: replace(it, max_nodes=most) for name, it in all_running(now).items()}
        forms = written(decide(view(old["n1"], now, old | new, joining=False, rules=rules)))
        old = {name: record(name, round_=now.round, max_nodes=most) for name in now.participants}
        named = written(decide(view(old["n1"], forms, old | new, rules=rules)))
        joined = named.cause.joined
        assert joined.count == room
        assert newcomers_with(joined.first[0], named) == joined

    def test_each_of_many_whose_workers_failed_counts_once(self) -> None:
        names = tuple(f"n{i}" for i in range(1, 21))
        cause = Cause().plus(failed=[f"{it}[1]" for it in names])
        now = document(Phase.FORMING, max_nodes=20, previous=names, ran="a-world", cause=cause)
        asks = {it: record(it, round_=3, max_nodes=20, failed=True) for it in names}
        rules = replace(RULES, max_nodes=20)
        named = written(decide(view(asks["n1"], now, asks, rules=rules)))
        assert (named.phase, named.cause.failed.count) == (Phase.CONFIRMING, 20)

    def test_each_whose_workers_failed_is_named_and_who_was_told_to_join_is_not(self) -> None:
        others = {
            "n2": record("n2", round_=3, failed=True),
            "n3": record("n3", round_=3),
        }
        assert self.lead(others).cause == Cause().plus(failed=["n1[1]", "n2[1]"])

    def test_what_ended_the_last_round_is_told_of_the_next_that_runs(self) -> None:
        """A round that was named, but never ran, is no cause of its own."""
        named = replace(self.NOW, phase=Phase.CONFIRMING, participants=("n1", "n2", "n3"),
                        previous=())  # fmt: skip
        others = all_running(named)
        again = written(decide(view(others["n1"], named, others, silent={"n3": 3.0})))
        assert again.cause == Cause().plus(failed=["n1[1]"], lost=["n3[1]"])


@pytest.mark.rule("lead")
class TestLeadership:
    def test_the_heir_takes_over_first(self) -> None:
        now = document(Phase.RUNNING)
        for name, patience in (("n2", 3.0), ("n3", 3.0 + decisions._TURN_SECONDS)):
            early = view(running(name, now), now, joining=False, silent={"n1": patience - 0.01})
            waits = decide(early)
            assert isinstance(waits, Wait)
            assert waits.seconds == pytest.approx(0.01)
            late = view(running(name, now), now, joining=False, silent={"n1": patience})
            following = written(decide(late))
            assert (following.leader, following.round) == (name, 5)
            assert "n1" not in following.previous

    def test_a_leader_that_left_is_followed_at_once(self) -> None:
        now = document(Phase.RUNNING, leader=None)
        assert written(decide(view(running("n1", now), now, joining=False))).leader == "n1"

    def test_a_dead_leader_is_not_waited_for_while_forming(self) -> None:
        now = document(Phase.FORMING, previous=("n1", "n2"))
        after = written(decide(view(record("n2", round_=3), now, silent={"n1": 3.0})))
        assert (after.leader, after.round, after.previous) == ("n2", 4, ("n2",))

    def test_a_deposed_leader_only_watches(self) -> None:
        now = document(Phase.RUNNING, leader="n2")
        assert isinstance(decide(view(running("n1", now), now, joining=False)), Wait)

    def test_a_leader_whose_looks_stand_still_is_followed_and_not_lost(self) -> None:
        """It beats, but does not lead: its looks are told by its beat, an interval later."""
        now = document(Phase.RUNNING)
        base = view(running("n2", now), now, joining=False)
        early = decide(replace(base, confirmed_idleness=3.9, possible_idleness=3.9))
        assert isinstance(early, Wait)
        after = written(decide(replace(base, confirmed_idleness=4.0, possible_idleness=4.0)))
        assert after == replace(now, leader="n2")

    def test_a_leader_that_cannot_list_hands_the_lead_over(self) -> None:
        now = document(Phase.RUNNING)
        here = view(running("n1", now), now, joining=False, cannot_list=True)
        assert decide(here) == Abdicate(replace(now, leader=None))

    def test_a_node_that_could_not_lead_takes_the_lead_last(self) -> None:
        now = document(Phase.RUNNING, leader=None)
        here = view(running("n1", now), now, joining=False, abdicated=True)
        assert decide(here) == Wait(RULES.lease)
        assert written(decide(replace(here, document_age=RULES.lease))).leader == "n1"

    def test_a_leader_is_judged_by_its_own_lease(self) -> None:
        now = document(Phase.RUNNING)
        patient = running("n1", now)
        patient = replace(patient, interval=10.0, lease=30.0)
        here = view(running("n2", now), now, joining=False, silent={"n1": 29.0}, leader=patient)
        assert decide(here) == Wait(1.0)
        silent = replace(here, watched=watching({"n1": 30.0}))
        assert written(decide(silent)).round == 5

    def test_a_leader_whose_workers_are_done_is_not_lost(self) -> None:
        now = document(Phase.RUNNING)
        done = replace(running("n1", now), status=Status.DONE)
        here = view(running("n2", now), now, joining=False, silent={"n1": 9.0}, leader=done)
        assert written(decide(here)) == replace(now, leader="n2")


@pytest.mark.rule("done")
class TestDone:
    """Workers of a node succeeded; those of others still work."""

    NOW = document(Phase.RUNNING, max_nodes=4)

    def lead(self, others: dict[str, NodeRecord], **silent: float) -> Action:
        everybody = {name: self.wide(one) for name, one in (all_running(self.NOW) | others).items()}
        rules = replace(RULES, max_nodes=4)
        return decide(
            view(everybody["n1"], self.NOW, everybody, joining=False, silent=silent, rules=rules)
        )

    def wide(self, one: NodeRecord) -> NodeRecord:
        return replace(one, max_nodes=4)

    def done(self, name: str) -> dict[str, NodeRecord]:
        return {name: replace(running(name, self.NOW), status=Status.DONE)}

    def test_a_node_that_is_done_is_not_lost_when_it_ends(self) -> None:
        assert isinstance(self.lead(self.done("n3"), n3=99.0), Wait)

    def test_when_all_that_are_left_are_done_the_run_is_closed(self) -> None:
        """They wait in torch's exit barrier, also for those that are gone."""
        now = replace(self.NOW, absent=("n3",))
        everybody = {name: self.wide(one) for name, one in all_running(now).items()}
        everybody |= {name: self.wide(one) for name, one in self.done("n2").items()}
        rules = replace(RULES, max_nodes=4, restart_on_loss=False)

        def lead() -> Action:
            return decide(
                view(everybody["n1"], now, everybody, joining=False, silent={"n3": 9.0},
                     rules=rules)
            )  # fmt: skip

        assert isinstance(lead(), Wait)
        everybody |= {name: self.wide(one) for name, one in self.done("n1").items()}
        assert lead() == Close(now, Outcome.SUCCEEDED, "its workers succeeded")

    def test_also_if_an_heir_took_one_for_lost_that_is_done(self) -> None:
        """It could not know: it took the lead before it had read the record."""
        now = replace(self.NOW, absent=("n1", "n2", "n3"), leader="n4")
        everybody = self.done("n1") | {name: running(name, now) for name in ("n2", "n3")}
        everybody = {name: self.wide(one) for name, one in everybody.items()}
        heir = everybody["n4"] = self.wide(record("n4", Status.SPARE))
        rules = replace(RULES, max_nodes=4, restart_on_loss=False)
        silent = dict.fromkeys(("n1", "n2", "n3"), 9.0)
        action = decide(view(heir, now, everybody, silent=silent, rules=rules))
        assert action == Close(now, Outcome.SUCCEEDED, "its workers succeeded")

    def test_when_all_are_done_the_run_is_closed(self) -> None:
        """Else a store that forgot who had come to torch's exit barrier holds them up for 300 s."""
        everybody = self.done("n1") | self.done("n2") | self.done("n3")
        assert self.lead(everybody) == Close(self.NOW, Outcome.SUCCEEDED, "its workers succeeded")

    def test_a_newcomer_disturbs_nobody(self) -> None:
        after = written(self.lead(self.done("n3") | joining("n4")))
        assert after == replace(self.NOW, finishing=True)

    def test_a_newcomer_to_what_is_about_to_end_is_a_spare(self) -> None:
        now = replace(self.NOW, finishing=True)
        here = view(self.wide(record("n4")), now, rules=replace(RULES, max_nodes=4))
        assert decide(here) == SetRecord(Status.SPARE, None, -1, ring=False)

    def test_the_next_round_is_without_it(self) -> None:
        after = written(self.lead(self.done("n3"), n2=3.0))
        assert (after.round, after.previous) == (5, ("n1",))
        assert after.reason == "lost n2[1]: lease ran out"


@pytest.mark.rule("exclusivity")
class TestEviction:
    """A node of the last round that lives, but does not ask for the next."""

    FORMING = document(Phase.FORMING, previous=("n1", "n2", "n3"))
    RULES = replace(RULES, rejoin_timeout=100.0, lease=30.0)

    def lead(self, round_age: float, *newcomers: str, **more: Any) -> Action:
        everybody = joining("n1", "n3", round_=3) | joining(*newcomers)
        everybody["n2"] = running("n2", document(Phase.RUNNING, round_=3))
        base = view(everybody["n1"], self.FORMING, everybody, rules=self.RULES, silent={"n2": 1.0})
        return decide(replace(base, round_age=round_age, **more))

    def test_a_node_that_does_not_ask_is_awaited(self) -> None:
        assert self.lead(99.0) == Wait(1.0, True)

    def test_a_node_that_does_not_ask_is_left_out_and_named(self) -> None:
        after = written(self.lead(100.0))
        assert (after.previous, after.still_running) == (("n1", "n3"), ("n2",))
        assert after.cause.evicted.first == ("n2[1]",)
        assert "left out" in after.reason

    def test_a_tenth_is_enough_where_the_others_fill_the_round(self) -> None:
        assert self.lead(9.0, "n4") == Wait(1.0, True)
        assert written(self.lead(10.0, "n4")).still_running == ("n2",)

    def test_whoever_died_meanwhile_is_lost_and_not_left_out(self) -> None:
        after = written(self.lead(50.0, watched=watching({"n2": 30.0})))
        assert after.cause.lost.first == ("n2[1]",)
        assert not after.still_running

    def test_an_evicted_node_is_no_stray_afterwards(self) -> None:
        now = replace(self.FORMING, previous=("n1", "n3"), still_running=("n2",))
        everybody = joining("n1", "n3", round_=3)
        everybody["n2"] = running("n2", document(Phase.RUNNING, round_=3))
        named = written(decide(view(everybody["n1"], now, everybody, enough_for=9.0)))
        assert (named.phase, named.participants) == (Phase.CONFIRMING, ("n1", "n3"))


@pytest.mark.rule("incarnations")
class TestAnotherRun:
    """Another run of the same id stands in the store."""

    MINE = document(Phase.RUNNING)
    THEIRS = document(Phase.RUNNING, incarnation="theirs", round_=0, leader="n9",
                      participants=("n8", "n9"))  # fmt: skip

    def look(self, now: RoundDocument, **more: Any) -> View:
        me = running("n1", self.MINE)
        more = {"latest": now, "member": self.MINE, "confirmed": as_named(self.MINE), **more}
        return view(me, now, joining=False, **more)

    def test_a_node_asks_first_whether_its_own_run_has_ended(self) -> None:
        assert decide(self.look(self.THEIRS)) == AskTombstone(RUN)
        assert nodes_waiting(self.look(self.THEIRS)) == 0

    def test_another_run_is_not_written_over(self) -> None:
        here = self.look(self.THEIRS, without_tombstone=frozenset({RUN}))
        assert isinstance(decide(here), Wait)
        # Its agent is told to join: there it is a newcomer.
        assert nodes_waiting(here) == 1

    def test_another_run_that_is_over_is_written_over(self) -> None:
        over = document(Phase.CLOSED, incarnation="theirs")
        here = replace(self.look(over), latest=self.MINE)
        assert decide(here) == AskTombstone(RUN)
        assert written(decide(replace(here, without_tombstone=frozenset({RUN})))) == self.MINE

    def test_an_agent_is_told_of_a_run_that_replaced_its_own_and_is_over(self) -> None:
        over = replace(self.THEIRS, phase=Phase.CLOSED, outcome=Outcome.FAILED)
        here = self.look(over)
        assert decide(here) == AskTombstone(RUN)
        assert nodes_waiting(here) == 0
        asked = replace(here, without_tombstone=frozenset({RUN}))
        assert decide(asked) == Wait()
        assert nodes_waiting(asked) == 1

    def test_a_node_of_a_run_that_ended_is_in_no_other(self) -> None:
        ended = replace(self.MINE, phase=Phase.CLOSED, outcome=Outcome.SUCCEEDED)
        here = replace(self.look(self.THEIRS, without_tombstone=frozenset({RUN})), latest=ended)
        assert decide(here) == Wait()
        assert nodes_waiting(here) == 0
        again = replace(here.record, status=Status.JOIN)
        assert decide(replace(here, joining=True, record=again)) == Fail(Failure.CLOSED)


@pytest.mark.rule("a store that forgets")
class TestAmnesia:
    RAN = document(Phase.RUNNING)

    def test_a_node_does_not_confirm_a_round_in_which_it_ran(self) -> None:
        """Also where its record tells of another run, which the store has forgotten too."""
        now, me = document(Phase.CONFIRMING), record("n1", round_=0, incarnation="another")
        assert decide(view(me, now)) == Confirm(now, is_master=True)
        assert decide(view(me, now, rounds_given={RUN: 4})) == SetRecord(Status.JOIN, RUN, 4)

    def test_the_leader_writes_the_document_back(self) -> None:
        lost = view(running("n1", self.RAN), None, joining=False, latest=self.RAN)
        # Not before it has looked whether the run ended, and was swept for that.
        assert decide(lost) == AskTombstone(RUN)
        assert written(decide(replace(lost, without_tombstone=frozenset({RUN})))) == self.RAN

    def test_the_others_do_so_in_turn(self) -> None:
        lost = view(running("n2", self.RAN), None, joining=False, latest=self.RAN)
        turn = decide(lost)
        assert isinstance(turn, Wait)
        assert turn.seconds is not None
        assert 0.0 < turn.seconds < RULES.interval
        later = replace(lost, document_age=turn.seconds, without_tombstone=frozenset({RUN}))
        assert written(decide(later)) == replace(self.RAN, leader="n2")

    def test_an_older_round_gives_way(self) -> None:
        older = document(Phase.RUNNING, round_=0, leader="n9", participants=("n9", "n8"))
        late = view(running("n1", self.RAN), older, joining=False, latest=self.RAN)
        assert decide(late) == AskTombstone(RUN)
        assert written(decide(replace(late, without_tombstone=frozenset({RUN})))) == self.RAN

    def test_a_newcomers_round_waits_for_those_that_run_and_is_numbered_above(self) -> None:
        founded = document(Phase.FORMING, round_=0, leader="n9")
        others = joining("n9", "n8") | {"n1": running("n1", self.RAN)}
        after = written(decide(view(others["n9"], founded, others)))
        assert (after.round, after.previous) == (5, ("n1",))
        # Rounds of another run are not numbered with these.
        other = replace(founded, incarnation="another")
        after = written(decide(view(others["n9"], other, others)))
        assert (after.incarnation, after.round, after.previous) == ("another", 0, ("n1",))


@pytest.mark.rule("closed stays closed")
class TestClosed:
    CLOSED = document(Phase.CLOSED)

    @pytest.mark.parametrize(
        ("status", "failure"),
        [(Status.JOIN, Failure.CLOSED), (Status.SPARE, Failure.SPARE_CLOSED)],
    )
    def test_a_node_that_waits_is_told(self, status: Status, failure: Failure) -> None:
        assert decide(view(record("n9", status), self.CLOSED)) == Fail(failure)

    def test_a_run_stays_closed_for_a_node_that_saw_it_closed(self) -> None:
        assert decide(view(record("n1"), None, latest=self.CLOSED)) == Fail(Failure.CLOSED)

    def test_a_node_that_runs_is_left_alone(self) -> None:
        now = replace(self.CLOSED, participants=("n1",))
        assert decide(view(running("n1", now), now, {}, joining=False)) == Wait()


@pytest.mark.rule("one size")
class TestMismatch:
    NOW = document(Phase.RUNNING)
    OTHER = record("n9", max_nodes=4)
    OTHERS = replace(RULES, max_nodes=4)

    def test_a_node_with_other_settings_is_refused_while_the_leader_lives(self) -> None:
        here = self.look(watched=watching({}, moved=("n1",)))
        assert decide(here) == Fail(Failure.MISMATCH)

    def test_a_node_with_other_settings_is_refused_while_any_participant_lives(self) -> None:
        """A healthy run whose leader has just died is not there for the taking."""
        assert decide(self.look(watched=watching({}, moved=("n3",)))) == Fail(Failure.MISMATCH)
        assert decide(self.look(silent={"n1": 9.0, "n2": 9.0, "n3": 1.0})) == Wait(2.5)

    def test_a_node_with_other_settings_needs_the_records_of_all(self) -> None:
        assert decide(replace(self.look(), records=None)) == ListRecords()

    def test_a_dead_run_is_founded_anew(self) -> None:
        """As another run: its rounds are not those of the one before."""
        after = written(decide(self.look(silent={"n1": 3.5, "n2": 3.5, "n3": 3.5})))
        assert (after.incarnation, after.round, after.max_nodes) == ("a-new-run", 0, 4)
        assert (after.participants, after.previous, after.ran) == ((), (), None)

    def test_a_node_that_left_is_not_awaited(self) -> None:
        left = {name: record(name, Status.LEFT, 4) for name in ("n2", "n3")}
        after = written(decide(self.look(left, silent={"n1": 3.5})))
        assert after.incarnation == "a-new-run"

    def look(self, others: dict[str, NodeRecord] | None = None, **more: Any) -> View:
        records = all_running(self.NOW) | (others or {})
        return view(self.OTHER, self.NOW, records, rules=self.OTHERS, **more)


@pytest.mark.rule("spares")
class TestSpares:
    NOW = document(Phase.RUNNING)

    def waits(
        self, now: RoundDocument = NOW, status: Status = Status.SPARE, **silent: float
    ) -> bool:
        return waits_for_a_living_round(view(record("n4", status), now, silent=silent))

    def test_one_waits_while_its_round_lives(self) -> None:
        assert self.waits()
        assert self.waits(n2=99.0, n1=2.9)

    def test_not_for_one_whose_leader_is_silent_or_that_has_none(self) -> None:
        assert not self.waits(n1=3.0)
        assert not self.waits(replace(self.NOW, leader=None))

    def test_not_for_one_that_has_lost_all_its_nodes(self) -> None:
        """restart_on_loss=false: nobody ends that round, and a spare may lead it."""
        led = replace(self.NOW, leader="n9")
        assert self.waits(replace(led, absent=("n1", "n2")))
        assert not self.waits(replace(led, absent=("n1", "n2", "n3")))

    def test_not_for_one_that_only_forms(self) -> None:
        assert not self.waits(document(Phase.FORMING))
        assert not self.waits(document(Phase.CLOSED))

    def test_a_node_that_is_no_spare_does_not_wait(self) -> None:
        assert not self.waits(status=Status.JOIN)


@pytest.mark.rule("replaced")
class TestNodesWaiting:
    NOW = document(Phase.RUNNING)

    def waiting(self, now: RoundDocument | None, **more: object) -> int:
        base = view(running("n2", self.NOW), now, joining=False, member=self.NOW)
        return nodes_waiting(replace(base, **more))

    def test_the_own_round_is_quiet(self) -> None:
        assert self.waiting(self.NOW) == 0
        assert self.waiting(replace(self.NOW, absent=("n3",), leader="n2")) == 0

    def test_a_later_round_says_join(self) -> None:
        assert self.waiting(document(Phase.FORMING, round_=5)) == 1
        assert self.waiting(document(Phase.FORMING, round_=5, waiters=3)) == 3

    def test_another_round_of_the_same_number_says_join(self) -> None:
        assert self.waiting(replace(self.NOW, participants=("n8", "n9"))) == 1

    def test_a_store_that_forgot_stops_nobody(self) -> None:
        assert self.waiting(None) == 0
        assert self.waiting(document(Phase.FORMING, round_=0), latest=self.NOW) == 0
        beside = replace(as_named(self.NOW), participants=("n8", "n9"))
        assert self.waiting(beside, latest=self.NOW) == 0

    @pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.CLOSED])
    def test_a_closed_run_stops_nobody(self, outcome: Outcome) -> None:
        assert self.waiting(document(Phase.CLOSED, round_=5, outcome=outcome)) == 0

    def test_a_run_that_failed_stops_all(self) -> None:
        assert self.waiting(document(Phase.CLOSED, round_=5, outcome=Outcome.FAILED)) == 1

    def test_a_node_that_joins_already_is_not_asked_to_join(self) -> None:
        assert self.waiting(document(Phase.FORMING, round_=5), joining=True) == 0


@pytest.mark.parametrize("number", [0, 10**400])
def test_no_number_of_nodes_stops_an_heir(number: int) -> None:
    """What stands in the store is not ours to trust."""
    strange = document(Phase.FORMING, leader=None, min_nodes=0, max_nodes=number)
    action = decide(view(record("n1", Status.RUN, 4), strange, joining=False))
    assert isinstance(action, Wait)
    assert action.seconds is not None
    assert 0.0 <= action.seconds <= RULES.interval


def test_a_node_that_left_does_nothing() -> None:
    here = view(record("n2", Status.LEFT), document(Phase.RUNNING), joining=False)
    assert decide(here) == Wait()


def test_reasons_name_a_few_and_count_the_rest() -> None:
    now = document(Phase.RUNNING, max_nodes=9, participants=("n1", "n2"))
    newcomers = {f"n{i}": record(f"n{i}", max_nodes=9) for i in range(3, 9)}
    everybody = {name: replace(one, max_nodes=9) for name, one in all_running(now).items()}
    here = view(everybody["n1"], now, everybody | newcomers, joining=False,
                rules=replace(RULES, max_nodes=9, last_call_timeout=0.0))  # fmt: skip
    assert written(decide(here)).reason == "n3[1], n4[1], n5[1], n6[1] and 2 more joined"


def test_reasons_count_nodes_that_nobody_can_name_besides_a_few_names() -> None:
    assert str(Names(("n1[1]",)).and_more(2)) == "n1[1] and 2 more"
    assert str(Names().and_more(2)) == "2 nodes"


def test_every_action_is_one_of_the_module() -> None:
    assert {kind.__name__ for kind in rules.Action.__args__} == {
        "Write", "SetRecord", "Confirm", "Start", "Fail", "ListRecords", "AskTombstone", "Abdicate",
        "Close", "Doubt", "Wait",
    }  # fmt: skip


class TestTimes:
    NAMED = document(Phase.CONFIRMING)

    def named(self, **more: Any) -> Action:
        others = joining("n1", "n2", "n3", round_=3)
        return decide(view(others["n1"], self.NAMED, others, **more))

    def test_a_join_ends_when_its_time_is_over(self) -> None:
        here = view(record("n1"), document(Phase.FORMING, 0), joining("n1"))
        assert decide(replace(here, join_left=0.1)) == Wait()
        assert decide(replace(here, join_left=0.0)) == Fail(Failure.TIMEOUT)
        assert not isinstance(decide(replace(here, join_left=0.0, joining=False)), Fail)

    def test_a_node_that_is_named_has_one_more_lease(self) -> None:
        assert isinstance(self.named(join_left=-1.0), Confirm)
        late = self.named(join_left=-1.0, document_age=RULES.lease)
        assert late == Fail(Failure.TIMEOUT)

    def test_a_spare_has_as_much_as_the_round_lasts(self) -> None:
        now = document(Phase.RUNNING)
        assert decide(view(record("n9", Status.SPARE), now, join_left=-1.0)) == Wait(RULES.lease)

    def test_rank_0_gives_up_a_tcpstore_that_does_not_open_within_a_lease(self) -> None:
        assert isinstance(self.named(opening_for=RULES.lease - 0.1), Confirm)
        given_up = SetRecord(Status.JOIN, RUN, 4, can_host=False)
        assert self.named(opening_for=RULES.lease) == given_up
