"""Not heard: when a node that the store does not hear takes itself for lost."""

from __future__ import annotations

import math

import pytest

from rdzv_plugins.kv import AccessDeniedError, MemoryServer
from rdzv_plugins.protocol.cleanup import close_run
from rdzv_plugins.protocol.contact import Contact
from rdzv_plugins.protocol.documents import Outcome
from rdzv_plugins.protocol.effects import Effect, List, Park, PutRecord, Read
from tests import replace
from tests.unit.crowd import Crowd, Member
from tests.unit.life import RULES, Life, Time, finish

pytestmark = pytest.mark.rule("not heard")


def refuse(life: Life) -> None:
    life.error = AccessDeniedError("the store refused the credentials")
    life.down = True


def bear(life: Life, seconds: float) -> None:
    until = life.time.now + seconds
    while life.time.now < until:
        life.go()
        life.wake()


class TestANodeThatTheStoreRefuses:
    def test_it_stops_its_workers_after_its_lease(self, pair: tuple[Life, Life]) -> None:
        leader, other = pair
        finish(leader, other)
        sent = other.time.now
        refuse(other)
        other.send(None)
        while other.node.num_nodes_waiting == 0:
            other.go()
            other.wake()
            assert other.time.now < sent + RULES.lease + 1.0
        assert other.time.now >= sent + RULES.lease
        bear(other, 1.0)
        (told,) = [line for line in other.told if "its agent stops the workers" in line]
        assert "the store refuses it" in told
        assert "refused the credentials" in told

    def test_it_asks_again_and_comes_back_once_it_is_let_in(self, pair: tuple[Life, Life]) -> None:
        leader, other = pair
        finish(leader, other)
        refuse(other)
        other.send(None)
        bear(other, RULES.lease + 1.0)
        other.node.inbox.join()
        bear(other, 5.0)
        assert len(other.outcomes) == 1
        assert other.node.num_nodes_waiting == 0
        other.down = False
        leader.node.inbox.join()
        finish(leader, other)
        assert other.outcomes[-1].document is not None

    def test_an_accepted_heartbeat_ends_it(self, pair: tuple[Life, Life]) -> None:
        leader, other = pair
        finish(leader, other)
        refuse(other)
        other.send(None)
        bear(other, RULES.lease / 2)
        other.down = False
        bear(other, 1.0)
        other.down, other.error = True, None  # Now it is silent.
        bear(other, 3 * RULES.lease)
        assert other.node.num_nodes_waiting == 0

    def test_a_store_that_comes_back_may_refuse_for_a_moment(self, pair: tuple[Life, Life]) -> None:
        """One whose users come after its restart stops no workers."""
        leader, other = pair
        finish(leader, other)
        other.down = True
        other.send(None)
        bear(other, 3 * RULES.lease)
        refuse(other)
        bear(other, RULES.interval / 2)
        assert other.node.num_nodes_waiting == 0
        bear(other, RULES.interval)
        assert other.node.num_nodes_waiting == 1


class TestANodeThatMayWriteAndNotRead:
    """It would be waited for, and never be told what for."""

    @staticmethod
    def blind(life: Life) -> None:
        life.error = AccessDeniedError("the user may not read")
        life.fails = lambda request: isinstance(request, Read | List | Park)

    @staticmethod
    def beats(life: Life) -> list[str]:
        return [name for name in life.log if name == "PutRecord"]

    def test_it_beats_no_more_and_stops(self, pair: tuple[Life, Life]) -> None:
        leader, other = pair
        finish(leader, other)
        self.blind(other)
        other.log.clear()
        other.send(None)
        bear(other, RULES.lease + 2 * RULES.interval)
        # The one of the turn in which it is refused for the first time.
        assert len(self.beats(other)) <= 1
        assert other.node.num_nodes_waiting == 1

    def test_it_asks_for_no_round_until_it_may_read(self, pair: tuple[Life, Life]) -> None:
        leader, other = pair
        finish(leader, other)
        self.blind(other)
        other.send(None)
        bear(other, RULES.interval)
        other.log.clear()
        other.join_again()
        bear(other, RULES.lease)
        assert self.beats(other) == []
        other.fails = lambda request: False
        other.wake()
        leader.join_again()
        finish(leader, other)
        assert other.outcomes[-1].document is not None

    def test_it_beats_on_where_it_may_only_not_wait(self, pair: tuple[Life, Life]) -> None:
        leader, other = pair
        finish(leader, other)
        other.error = AccessDeniedError("the user may not wait")
        other.fails = lambda request: isinstance(request, Park)
        other.log.clear()
        other.send(None)
        bear(other, RULES.lease + RULES.interval)
        assert len(self.beats(other)) >= 3
        assert other.node.num_nodes_waiting == 0


class TestAStoreThatIsSilent:
    @pytest.mark.parametrize("limit", [4.0, 9.0])
    def test_with_a_limit_workers_stop(
        self, server: MemoryServer, time: Time, limit: float
    ) -> None:
        rules = replace(RULES, min_nodes=1, max_nodes=1, outage_limit=limit)
        node = Life("n1", server, time, rules)
        finish(node, node)
        sent = time.now
        node.down = True
        node.send(None)
        while node.node.num_nodes_waiting == 0:
            node.go()
            node.wake()
            assert time.now < sent + limit + 1.0
        assert time.now >= sent + limit - RULES.interval
        bear(node, 1.0)
        assert any("on_outage=stop" in line for line in node.told)

    def test_a_node_that_hears_of_its_cut_off_with_the_answer_says_why_it_asks(
        self, server: MemoryServer, time: Time
    ) -> None:
        """Its driver waited for one request all the time."""
        node = Life("n1", server, time, replace(RULES, min_nodes=1, max_nodes=1, outage_limit=4.0))
        finish(node, node)
        time.now += 6.0
        assert node.node.num_nodes_waiting == 1
        node.join_again()
        finish(node, node)
        assert any("it was cut off: the store has accepted no" in line for line in node.said)

    def test_what_hears_but_accepts_no_heartbeat_is_silent_too(
        self, server: MemoryServer, time: Time
    ) -> None:
        rules = replace(RULES, min_nodes=1, max_nodes=1, outage_limit=4.0)
        node = Life("n1", server, time, rules)
        finish(node, node)

        def writes(request: Effect[object]) -> bool:
            return isinstance(request, PutRecord)

        node.fails = writes
        bear(node, 6.0)
        assert node.node.num_nodes_waiting == 1


@pytest.mark.parametrize("limit", [4.0, math.inf])
def test_in_a_closed_run_nobody_is_cut_off(server: MemoryServer, time: Time, limit: float) -> None:
    """Its nodes beat no more, and the round that runs goes on to its end."""
    rules = replace(RULES, min_nodes=1, max_nodes=1, outage_limit=limit)
    node = Life("n1", server, time, rules)
    finish(node, node)
    closing = close_run("rdzv", None, Outcome.CLOSED, "by request", 600.0, lambda _: True)
    node.carry_out(closing)
    bear(node, 3 * RULES.lease)
    assert node.node.num_nodes_waiting == 0
    refuse(node)
    node.send(None)
    bear(node, 3 * RULES.lease)
    assert node.node.num_nodes_waiting == 0


def test_a_node_that_comes_back_tells_how_long_two_worlds_may_have_trained(
    server: MemoryServer, time: Time
) -> None:
    rules = replace(RULES, min_nodes=1, last_call_timeout=2.0)
    leader = Life("n1", server, time, rules)
    leader.go()
    other = Life("n2", server, time, rules)
    finish(leader, other)
    heard = time.now
    other.down = True
    other.send(None)
    while len(leader.outcomes) == 1:
        bear(other, 0.1)
        if leader.node.num_nodes_waiting:
            leader.node.inbox.join()
            leader.send(None)
        elif not leader.go():
            leader.wake()
        assert time.now < heard + 30.0
    assert other.node.num_nodes_waiting == 0
    other.down = False
    other.wake()
    other.go()
    assert other.node.num_nodes_waiting == 1
    (told,) = [line for line in other.told if "two worlds" in line]
    assert "came without this node, whose workers ran on in round 0" in told


LINKED = replace(RULES, min_nodes=1, max_nodes=8, answer_timeout=0.5)
REFUSED = AccessDeniedError("the store refused the credentials")


class TestOfNodesWithLinks:
    """A store that refuses all of them accepts nobody's round."""

    @staticmethod
    def refuse(*members: Member, refused: bool = True) -> None:
        for member in members:
            member.down, member.error = refused, REFUSED

    def begin(self, count: int, **changes: object) -> tuple[Crowd, list[Member]]:
        crowd = Crowd()
        names = [f"n{number}" for number in range(count)]
        last_call_timeout = 0.01 * count + 0.1
        members = crowd.begin(
            replace(LINKED, last_call_timeout=last_call_timeout, **changes), *names
        )
        crowd.play(2 * RULES.lease)
        assert {member.given[-1].size for member in members} == {count}
        return crowd, members

    @pytest.mark.parametrize(("count", "inline"), [(1, 128), (2, 128), (5, 128), (8, 2)])
    def test_all_are_refused_and_none_stops(self, count: int, inline: int) -> None:
        crowd, members = self.begin(count, inline=inline)
        before = [len(member.given) for member in members]
        for member in members:
            self.refuse(member)
            crowd.play(0.1)
        crowd.play(50 * RULES.lease)
        for member in members:
            self.refuse(member, refused=False)
            crowd.play(0.1)
        crowd.play(2 * RULES.lease)
        assert [len(member.given) for member in members] == before
        told = [line for member in members for line in member.told if "refuses all nodes" in line]
        assert len(told) == count

    @pytest.mark.parametrize(
        ("count", "inline", "refused"),
        [
            (2, 128, "0"), (2, 128, "1"), (4, 128, "12"), (4, 128, "02"), (4, 128, "012"),
            (8, 128, "1234567"), (8, 128, "0123456"), (8, 2, "1234567"), (8, 2, "0234567"),
        ],
    )  # fmt: skip
    def test_some_are_refused_and_stop_after_their_lease(
        self, count: int, inline: int, refused: str
    ) -> None:
        crowd, members = self.begin(count, inline=inline)
        some = [members[int(number)] for number in refused]
        self.refuse(*some)
        crowd.play(RULES.lease - RULES.interval - 0.2)
        assert [member.node.num_nodes_waiting for member in some] == [0] * len(some)
        crowd.play(2 * RULES.interval)
        assert all(member.joining for member in some)
        rest = {member.node.id for member in members if member not in some}
        crowd.play_until(lambda: {*crowd.document.ranks} == rest, 30.0)

    def test_a_newcomer_is_accepted_and_they_stop_before_it_begins(self) -> None:
        crowd, members = self.begin(4)
        self.refuse(*members)
        crowd.play(10 * RULES.lease)
        assert not any(member.joining for member in members)
        newcomer = crowd.join("new", LINKED)
        crowd.play_until(lambda: bool(newcomer.given), 30.0)
        assert all(member.joining for member in members)

    def test_the_store_accepts_one_again_and_for_longer_than_an_interval_no_others(self) -> None:
        crowd, members = self.begin(4)
        self.refuse(*members)
        crowd.play(10 * RULES.lease)
        self.refuse(members[2], refused=False)
        crowd.play(RULES.interval / 2)
        assert not any(member.joining for member in members)
        crowd.play(2 * RULES.interval)
        assert [member.joining for member in members] == [True, True, False, True]

    def test_a_node_that_may_only_read_stops_once_others_have_gone_on_not_before(self) -> None:
        """Its rights were reduced, or a policy refuses what it writes."""
        crowd, members = self.begin(3, answer_timeout=None)
        for member in members:
            member.error = REFUSED
            member.fails = lambda request: isinstance(request, PutRecord)
        crowd.play(10 * RULES.lease)
        assert not any(member.joining for member in members)
        for member in members[:2]:
            member.fails = lambda request: False
        crowd.play(0.5)
        assert not any(member.joining for member in members)
        crowd.play_until(lambda: members[2].joining, 2 * RULES.lease)
        crowd.play_until(lambda: {*crowd.document.ranks} == {"n0", "n1"}, 30.0)


class TestHowLongTheStoreDidNotHear:
    """`View.unheard`: two worlds of a run may have trained for that long."""

    def test_unheard_time_lasts_up_to_the_answer_of_a_late_heartbeat(self) -> None:
        time = Time()
        contact = Contact(RULES, time)
        contact.workers_start()
        time.now += 1.0
        sent = time.now
        time.now += RULES.lease
        contact.accepted(sent)
        assert contact.unheard == 1.0 + RULES.lease

    def test_unheard_time_leaves_out_silence_after_the_workers_stopped(self) -> None:
        time = Time()
        contact = Contact(RULES, time)
        contact.workers_start()
        time.now += 1.0
        contact.workers_stopped()
        time.now += RULES.lease
        contact.accepted(time.now)
        assert contact.unheard == 1.0
