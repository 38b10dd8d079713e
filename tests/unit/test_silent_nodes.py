"""Which nodes are awaited, and how long: several nodes on virtual time, one of them half-dead."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.documents import Phase, Status
from rdzv_plugins.protocol.rules import Failure, Rules
from tests import replace

from .crowd import Crowd, Member

LEASE, INTERVAL = 15.0, 5.0
# A lease, and what it takes to look at it and to agree; a second lease would be too much.
NOTICED = LEASE + 2 * INTERVAL

# One death in fourteen was a take-over in a run of two when only the leader was looked at.
DEATHS = 90


def rules(low: int, high: int, **more: object) -> Rules:
    base = Rules(
        min_nodes=low, max_nodes=high, lease=LEASE, interval=INTERVAL, last_call_timeout=1.0
    )
    return replace(base, **more)


def lists(request: effects.Effect[Any]) -> bool:
    return isinstance(request, effects.List)


def test_a_leader_lists_no_more_often_once_a_node_is_done_and_gone() -> None:
    crowd = Crowd()
    members = crowd.begin(rules(2, 3), "n1", "n2", "n3")
    leader = next(it for it in members if it.node.id == crowd.document.leader)
    done = next(it for it in members if it is not leader)
    done.node.inbox.report_done()
    crowd.play(1.0)
    done.leave()
    crowd.play(NOTICED)
    began = len(leader.log)
    crowd.play(10 * INTERVAL)
    listed = [it for it in leader.log[began:] if it.startswith("List")]
    assert 0 < len(listed) <= 2 * 10
    assert len(members[0].given) == 1


@pytest.mark.rule("a leader shows that it leads")
class TestGreyLeader:
    """Its beats pass while it cannot read what the others wrote."""

    def test_a_leader_that_can_never_list_is_followed(self) -> None:
        crowd = Crowd()
        grey = crowd.join("grey", rules(2, 4, last_call_timeout=0.0))
        grey.fails = lists
        crowd.play(0.5)
        healthy = [
            crowd.join(f"n{number}", rules(2, 4, last_call_timeout=0.0)) for number in range(3)
        ]
        took = crowd.play_until(lambda: all(member.given for member in healthy), 60.0)
        assert took < NOTICED
        assert not any(member.failed for member in crowd.members.values())
        assert crowd.document.leader != "grey"

    @pytest.mark.parametrize("heals", [False, True])
    def test_a_death_is_noticed_though_the_leader_lists_no_more(self, heals: bool) -> None:
        crowd = Crowd()
        grey, other, victim = crowd.begin(rules(2, 3), "grey", "n1", "n2")
        crowd.play(60.0)
        grey.fails = lists
        crowd.play(10.0)
        victim.crash()
        # It is deposed, and the one that follows waits for the lease of the dead one.
        crowd.play_until(lambda: len(other.given) > 1, 2 * NOTICED)
        assert crowd.document.leader == "n1"
        assert set(crowd.document.participants) == {"grey", "n1"}
        assert "n2[1]" in crowd.document.cause.lost
        # It lived all the time: its own listings prove nothing against it.
        assert "grey[1]" not in crowd.document.cause.lost
        if heals:
            grey.fails = lambda request: False
        crowd.play(300.0)
        assert crowd.document.leader == "n1"
        assert (crowd.document.round, crowd.document.phase) == (1, Phase.RUNNING)

    def test_a_death_is_noticed_though_every_second_listing_fails(self) -> None:
        crowd = Crowd()
        grey, _, victim = crowd.begin(rules(2, 3), "grey", "n1", "n2")
        crowd.play(60.0)
        turns = itertools.count()
        grey.fails = lambda request: lists(request) and next(turns) % 4 < 2
        crowd.play(10.0)
        victim.crash()
        crowd.play_until(lambda: len(grey.given) > 1, 2 * NOTICED)
        assert "n2[1]" in crowd.document.cause.lost

    def test_slow_requests_are_no_lateness(self) -> None:
        """A beat and a listing take more than an interval: that voids no window."""
        crowd = Crowd()
        quick = rules(2, 3, lease=10.0, interval=1.0)
        slow, _, victim = crowd.begin(quick, "slow", "n1", "n2")
        crowd.play(60.0)
        slow.slow = lambda request: 1.1 if lists(request) else 0.001
        crowd.play(10.0)
        victim.crash()
        # A lease, and some ten listings: where windows are voided, it never comes.
        crowd.play_until(lambda: len(slow.given) > 1, 40.0)
        assert "n2[1]" in crowd.document.cause.lost

    def test_a_leader_that_cannot_read_leaves_the_lead_to_any_other_node(self) -> None:
        crowd = Crowd()
        grey, other = crowd.begin(rules(2, 2), "grey", "n1")
        grey.fails = lists
        crowd.play_until(lambda: crowd.document.leader == "n1", 2 * NOTICED)
        other.crash()
        # Nobody else is left: then it is better than none.
        grey.fails = lambda request: False
        crowd.play_until(lambda: "n1" not in crowd.document.participants, 3 * NOTICED)
        assert crowd.document.leader == "grey"


@pytest.mark.rule("leases")
class TestOwnLeases:
    @pytest.mark.parametrize("leads", ["often", "seldom"])
    def test_a_node_that_beats_less_often_is_not_lost_for_it(self, leads: str) -> None:
        crowd = Crowd()
        each = {
            "often": rules(2, 2, lease=6.0, interval=2.0),
            "seldom": rules(2, 2, lease=60.0, interval=20.0),
        }
        for name in sorted(each, key=lambda name: name != leads):
            crowd.join(name, each[name])
            crowd.play(0.2)
        members = crowd.members.values()
        crowd.play_until(lambda: all(member.given for member in members), 30.0)
        crowd.play(3600.0)
        assert [len(member.given) for member in members] == [1, 1]
        assert (crowd.document.round, crowd.document.leader) == (0, leads)
        # The leader says so, once.
        told = {name: member.told for name, member in crowd.members.items() if member.told}
        assert list(told) == [leads]
        (line,) = told[leads]
        assert "beats every 20 s" in line or "one of 60 s" in line
        assert "set keep_alive_interval and keep_alive_max_attempt alike" in line

    def test_each_is_lost_after_its_own_lease(self) -> None:
        crowd = Crowd()
        often = crowd.join("often", rules(1, 2, lease=6.0, interval=2.0))
        seldom = crowd.join("seldom", rules(1, 2, lease=60.0, interval=20.0))
        crowd.play_until(lambda: bool(often.given and seldom.given), 30.0)
        seldom.crash()
        took = crowd.play_until(lambda: len(often.given) > 1, 100.0)
        assert 40.0 <= took <= 70.0


@pytest.mark.rule("exclusivity")
class TestWedgedAgent:
    """Its node beats while its agent hangs, and never asks for the next round."""

    RULES = rules(2, 3, rejoin_timeout=48.0)

    def test_it_is_left_out_told_so_and_can_come_back(self) -> None:
        crowd = Crowd()
        failing, wedged, other = crowd.begin(self.RULES, "n1", "n2", "n3")
        wedged.stops = None
        failing.ask()
        took = crowd.play_until(lambda: len(failing.given) > 1, 70.0)
        assert 48.0 <= took < 55.0
        assert set(crowd.document.participants) == {"n1", "n3"}
        assert crowd.document.cause.evicted.first == ("n2[1]",)
        assert not crowd.document.cause.lost
        crowd.play(10.0)
        assert len(wedged.told) == 1
        assert "goes on without this node" in wedged.told[0]
        assert [len(member.given) for member in (failing, other)] == [2, 2]
        # Its record still says that it runs: that alone disturbs nobody.
        assert wedged.node.record.status is Status.RUN
        wedged.ask()
        crowd.play_until(lambda: len(wedged.given) > 1, 30.0)
        assert set(crowd.document.participants) == {"n1", "n2", "n3"}
        assert not crowd.document.still_running

    def test_it_is_waited_for_a_tenth_of_that_where_a_spare_takes_its_place(self) -> None:
        crowd = Crowd()
        failing, wedged, _ = crowd.begin(self.RULES, "n1", "n2", "n3")
        spare = crowd.join("spare", self.RULES)
        crowd.play(10.0)
        assert spare.node.record.status is Status.SPARE
        wedged.stops = None
        failing.ask()
        took = crowd.play_until(lambda: bool(spare.given), 70.0)
        assert 4.8 <= took < 8.0

    def test_a_wedged_leader_leads_on_and_leaves_itself_out(self) -> None:
        crowd = Crowd()
        wedged, failing, _ = crowd.begin(self.RULES, "n1", "n2", "n3")
        wedged.stops = None
        failing.ask()
        crowd.play_until(lambda: len(failing.given) > 1, 70.0)
        assert set(crowd.document.participants) == {"n2", "n3"}


@pytest.mark.rule("spares")
class TestSparesOfTheDead:
    def test_a_run_resubmitted_with_too_few_nodes_times_out(self) -> None:
        crowd = Crowd()
        for old in crowd.begin(rules(4, 4), *(f"old{number}" for number in range(4))):
            old.crash()
        crowd.play(10.0)
        began = crowd.time.now
        new = [crowd.join(f"new{number}", rules(4, 4)) for number in range(3)]
        crowd.play(400.0)
        assert [[outcome.failure for _, outcome in member.failed] for member in new] == [
            [Failure.TIMEOUT]
        ] * 3
        # The time-out is 60 s, from when the old run was known to be dead.
        assert all(60.0 <= member.failed[0][0] - began < 60.0 + 2 * NOTICED for member in new)

    def test_a_spare_times_out_when_its_round_is_gone(self) -> None:
        crowd = Crowd()
        pair = crowd.begin(rules(2, 2), "n1", "n2")
        spare = crowd.join("n3", rules(2, 2))
        crowd.play(1000.0)
        # While the round lives it waits, however long.
        assert not spare.failed
        for member in pair:
            member.crash()
        died = crowd.time.now
        crowd.play(400.0)
        ((at, outcome),) = spare.failed
        assert outcome.failure == Failure.TIMEOUT
        assert 60.0 <= at - died < 60.0 + 2 * NOTICED


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.rule("one size")
def test_a_stray_with_other_nnodes_never_takes_over_from_a_dead_leader(size: int) -> None:
    """Its launcher starts it again and again; the others still hold on to their run."""
    for seed in range(DEATHS // size):
        crowd = Crowd(seed=1000 * seed)
        healthy = crowd.begin(rules(2, size), *(f"n{number}" for number in range(size)))
        strays = itertools.count()
        chance = random.Random(seed)
        dies = crowd.time.now + chance.uniform(20.0, 40.0)
        ends = dies + 60.0
        stray: Member | None = None
        while crowd.time.now < ends:
            if stray is None or not stray.alive:
                stray = crowd.join(f"stray{next(strays)}", rules(1, 4))
            if healthy[0].alive and crowd.time.now >= dies:
                healthy[0].crash()
            crowd.play(1.0)
            crowd.forget_the_dead()
        assert not any(member.failed for member in healthy), f"seed {seed}"
        assert crowd.document.max_nodes == size, f"seed {seed}"
        # The run of two cannot go on with one, but it is held.
        assert size == 2 or crowd.document.phase is Phase.RUNNING


@pytest.mark.parametrize("who", ["n1", "n2"])
@pytest.mark.rule("leave")
def test_an_announced_leave_does_not_depend_on_the_lease(who: str) -> None:
    """keep_alive_max_attempt may be long: partitions are borne, and leaves are not slow."""
    crowd = Crowd()
    patient = rules(2, 3, lease=100 * INTERVAL)
    crowd.begin(patient, "n1", "n2", "n3")
    crowd.play(60.0)
    leaver = crowd.members[who]
    leaver.leave()
    others = [member for member in crowd.members.values() if member is not leaver]
    assert crowd.play_until(lambda: all(len(member.given) > 1 for member in others), 10.0) < 2.0
    assert crowd.document.cause.left.first == (f"{who}[1]",)


@pytest.mark.parametrize("late", ["n1", "n3"])
@pytest.mark.rule("outage")
def test_a_node_connected_again_later_than_others_costs_no_restart(late: str) -> None:
    crowd = Crowd()
    members = crowd.begin(rules(2, 3), "n1", "n2", "n3")
    for member in members:
        member.down = True
    crowd.play(60.0)
    for member in members:
        member.down = member.node.id == late
    crowd.play(1.3 * LEASE)
    crowd.members[late].down = False
    crowd.play(120.0)
    assert [len(member.given) for member in members] == [1, 1, 1]
    assert crowd.document.round == 0


@pytest.mark.rule("lead")
class TestTwoDeaths:
    def test_nobody_waits_for_the_first_again_if_the_leader_dies_before_it_has_tidied_up(
        self,
    ) -> None:
        crowd = Crowd()
        leader, victim, *others = crowd.begin(rules(1, 4), "n0", "n1", "n2", "n3")
        crowd.play(60.0)
        victim.crash()
        crowd.play_until(lambda: crowd.document.phase is Phase.FORMING, 2 * NOTICED)
        while crowd.document.phase is not Phase.RUNNING:
            crowd.play(0.0005)
        leader.crash()
        before = crowd.document.round
        crowd.play_until(
            lambda: crowd.document.round > before and crowd.document.phase is Phase.RUNNING, NOTICED
        )
        assert set(crowd.document.participants) == {other.node.id for other in others}
