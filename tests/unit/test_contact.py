"""Not heard: when a node that the store does not hear takes itself for lost."""

from __future__ import annotations

import math

import pytest

from rdzv_plugins.kv import AccessDeniedError, MemoryServer
from rdzv_plugins.protocol.cleanup import close_run
from rdzv_plugins.protocol.documents import Outcome
from rdzv_plugins.protocol.effects import Effect, List, Park, PutRecord, Read
from tests import replace
from tests.unit.life import RULES, Life, Time, finish


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
        while other.node.waiting == 0:
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
        other.node.order_join()
        bear(other, 5.0)
        assert len(other.outcomes) == 1
        assert other.node.waiting == 0
        other.down = False
        leader.node.order_join()
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
        assert other.node.waiting == 0

    def test_a_store_that_comes_back_may_refuse_for_a_moment(self, pair: tuple[Life, Life]) -> None:
        """One whose users come after its restart stops no workers."""
        leader, other = pair
        finish(leader, other)
        other.down = True
        other.send(None)
        bear(other, 3 * RULES.lease)
        refuse(other)
        bear(other, RULES.interval / 2)
        assert other.node.waiting == 0
        bear(other, RULES.interval)
        assert other.node.waiting == 1


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
        assert other.node.waiting == 1

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
        assert other.node.waiting == 0


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
        while node.node.waiting == 0:
            node.go()
            node.wake()
            assert time.now < sent + limit + 1.0
        assert time.now >= sent + limit - RULES.interval
        bear(node, 1.0)
        assert any("on_outage=stop" in line for line in node.told)

    def test_who_hears_of_it_only_with_the_answer_says_why_it_asks(
        self, server: MemoryServer, time: Time
    ) -> None:
        """Its driver waited for one request all the time."""
        node = Life("n1", server, time, replace(RULES, min_nodes=1, max_nodes=1, outage_limit=4.0))
        finish(node, node)
        time.now += 6.0
        assert node.node.waiting == 1
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
        assert node.node.waiting == 1


@pytest.mark.parametrize("limit", [4.0, math.inf])
def test_in_a_closed_run_nobody_is_cut_off(server: MemoryServer, time: Time, limit: float) -> None:
    """Its nodes beat no more, and the round that runs goes on to its end."""
    rules = replace(RULES, min_nodes=1, max_nodes=1, outage_limit=limit)
    node = Life("n1", server, time, rules)
    finish(node, node)
    closing = close_run("rdzv", None, Outcome.CLOSED, "by request", 600.0, lambda _: True)
    node.carry_out(closing)
    bear(node, 3 * RULES.lease)
    assert node.node.waiting == 0
    refuse(node)
    node.send(None)
    bear(node, 3 * RULES.lease)
    assert node.node.waiting == 0


def test_who_comes_back_tells_for_how_long_two_worlds_may_have_trained(
    server: MemoryServer, time: Time
) -> None:
    rules = replace(RULES, min_nodes=1, last_call=2.0)
    leader = Life("n1", server, time, rules)
    leader.go()
    other = Life("n2", server, time, rules)
    finish(leader, other)
    heard = time.now
    other.down = True
    other.send(None)
    while len(leader.outcomes) == 1:
        bear(other, 0.1)
        if leader.node.waiting:
            leader.node.order_join()
            leader.send(None)
        elif not leader.go():
            leader.wake()
        assert time.now < heard + 30.0
    assert other.node.waiting == 0
    other.down = False
    other.wake()
    other.go()
    assert other.node.waiting == 1
    (told,) = [line for line in other.told if "two worlds" in line]
    assert "came without this node, whose workers ran on in round 0" in told
