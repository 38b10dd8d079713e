"""What a node asks of the store, request by request: the costs, and how a join ends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from rdzv_plugins import steps
from rdzv_plugins.closing import close_run
from rdzv_plugins.decisions import Failure, Rules
from rdzv_plugins.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Phase,
    RoundDocument,
    Wants,
)
from rdzv_plugins.driver import perform
from rdzv_plugins.kv import (
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.node import Node


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Life:
    """Drives one node by hand, over the in-memory store."""

    def __init__(self, name: str, server: MemoryServer, time: Time, rules: Rules) -> None:
        self.client = MemoryClient(server, "run")
        self.time = time
        self.down = False
        self.last_word_fails: Exception | None = None
        self.log: list[str] = []
        self.outcomes: list[steps.Outcome] = []
        record = NodeRecord(
            address=name, pid=1, beat=0, wants=Wants.JOIN, round=-1,
            min_nodes=rules.min_nodes, max_nodes=rules.max_nodes,
        )  # fmt: skip
        self.node = Node(name, record, rules, 60.0, time, random.Random(1))
        self.node.order_join()
        self.life = self.node.run()
        self.request: steps.Request = next(self.life)

    def join_again(self) -> None:
        """What the driver does: order, and end the wait."""
        self.outcomes.clear()
        self.node.order_join()
        self.send(None)

    def go(self) -> list[str]:
        """Carry requests out until it waits; returns the names of what it asked."""
        already = len(self.log)
        while not self._waits():
            self.answer()
        return self.log[already:]

    def wake(self) -> list[str]:
        """End the wait, its time having passed."""
        assert isinstance(self.request, steps.Park | steps.Rest)
        # Time always moves between two looks at a real clock.
        self.time.now += self.request.seconds + 1e-6
        self.send(None)
        return self.go()

    def carry_out(self, work: steps.Steps) -> list[str]:
        """Drive other requests than the life's."""
        names: list[str] = []
        answer = None
        while True:
            try:
                request = work.send(answer)
            except StopIteration:
                return names
            names.append(_name(request))
            answer = self._perform(request)

    def _waits(self) -> bool:
        if isinstance(self.request, steps.Rest):
            return True
        if not isinstance(self.request, steps.Park) or self.down:
            return False
        entry = self.client.get(self.request.key)
        return entry is None or entry.version == self.request.version

    def answer(self) -> None:
        self.log.append(_name(self.request))
        try:
            answer = self._perform(self.request)
        except (RendezvousConnectionError, RendezvousStateError) as error:
            self.request = self.life.throw(error)
        else:
            self.send(answer)

    def send(self, answer: Any) -> None:
        self.request = self.life.send(answer)

    def _perform(self, request: steps.Request) -> Any:
        client = self.client
        if isinstance(request, steps.Deliver):
            return self.outcomes.append(request.outcome)
        leaves = isinstance(request, steps.PutRecord) and request.record.wants is Wants.LEFT
        if leaves and self.last_word_fails:
            raise self.last_word_fails
        if self.down:
            raise RendezvousConnectionError("down")
        return "host:1" if isinstance(request, steps.OpenMaster) else perform(client, request)


def _name(request: steps.Request) -> str:
    key = getattr(request, "key", getattr(request, "prefix", ""))
    return f"{type(request).__name__} {key}".strip()


RULES = Rules(min_nodes=2, max_nodes=2, lease=3.0, interval=1.0, last_call=0.0)


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def pair(server: MemoryServer, time: Time) -> tuple[Life, Life]:
    leader = Life("n1", server, time, RULES)
    leader.go()
    return leader, Life("n2", server, time, RULES)


def finish(leader: Life, joiner: Life) -> None:
    """Let both go until both run."""
    for _ in range(10):
        joiner.go()
        leader.go()
        if leader.outcomes and joiner.outcomes:
            joiner.go()
            return
        if isinstance(leader.request, steps.Rest):
            leader.wake()
    raise AssertionError("no round")


def stored(life: Life) -> RoundDocument:
    entry = life.client.get(STATE_KEY)
    assert entry is not None
    return RoundDocument.decode(entry.value)


def test_a_joiner_asks_five_times(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    assert joiner.log == [
        "PutRecord", "Read state", "Park state", "PutRecord", "Park state", "Deliver",
    ]  # fmt: skip
    assert joiner.outcomes[0].document == stored(leader)


def test_a_participant_starts_a_round_that_was_over_before_it_saw_it_run(
    server: MemoryServer, time: Time
) -> None:
    rules = replace(RULES, max_nodes=3)
    leader = Life("n1", server, time, rules)
    leader.go()
    slow = Life("n2", server, time, rules)
    slow.go()
    while stored(leader).phase is not Phase.CONFIRMING:
        leader.wake() if isinstance(leader.request, steps.Rest) else leader.go()
    slow.go()
    # There is room for it: the round runs, and at once gives way to the next.
    Life("n3", server, time, rules).go()
    while stored(leader).round == 0:
        leader.wake() if isinstance(leader.request, steps.Rest) else leader.go()
    assert leader.outcomes
    slow.go()
    assert [outcome.document for outcome in slow.outcomes] == [leader.outcomes[0].document]
    assert slow.node.waiting == leader.node.waiting == 1


def test_the_founder_leads_and_hears_of_joins_by_the_bell(server: MemoryServer, time: Time) -> None:
    leader = Life("n1", server, time, RULES)
    assert leader.go() == ["PutRecord", "Read state", "CompareAndSet state", "Read state",
                           "List nodes/", "Park bell", "Read state", "List nodes/"]  # fmt: skip
    assert isinstance(leader.request, steps.Park)
    assert leader.request.key == BELL_KEY


def test_the_leaders_own_agent_does_not_wait_for_the_tidying(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    assert leader.log.index("Deliver") < leader.log.index("Chronicle")
    assert leader.log.count("Chronicle") == leader.log.count("DropStores") == 1


def test_a_steady_node_writes_once_and_reads_once_an_interval(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    joiner.go()
    for _ in range(5):
        before = joiner.time.now
        asked = joiner.wake()
        assert asked == ["PutRecord", "Read nodes/n1"]
        assert 1.0 <= joiner.time.now - before <= 1.101
        leader.wake()


def test_a_steady_leader_writes_once_and_lists_once_an_interval(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    for _ in range(5):
        before = leader.time.now
        assert leader.wake() == ["PutRecord", "Read state", "List nodes/"]
        assert 1.0 <= leader.time.now - before <= 1.101
        joiner.wake()


def test_a_node_that_nobody_asked_again_stays_in_its_round(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    assert joiner.node.in_round
    assert (joiner.node.waiting, leader.node.waiting) == (0, 0)


def test_a_failed_worker_brings_the_others_to_join_again(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    joiner.join_again()
    joiner.go()
    leader.go()
    assert leader.node.waiting > 0
    leader.join_again()
    finish(leader, joiner)
    assert stored(leader).round == 1
    assert "n2[1] joined again" in stored(leader).reason


def test_who_joins_again_looks_at_the_leader_without_delay(pair: tuple[Life, Life]) -> None:
    """Its lease counts from the look: one that died with the workers has a lease, not more."""
    leader, joiner = pair
    finish(leader, joiner)
    joiner.wake()
    # The leader beats once more, dies, and its end makes the joiner's workers fail.
    last = replace(leader.node.record, beat=leader.node.record.beat + 1)
    perform(leader.client, steps.PutRecord("n1", last, ring=False))
    joiner.time.now += 0.2
    joiner.join_again()
    assert joiner.go() == ["PutRecord", "Read state", "Read nodes/n1"]
    died = joiner.time.now
    while stored(joiner).leader == "n1" and joiner.time.now < died + 10:
        joiner.wake()
    assert stored(joiner).leader == "n2"
    assert joiner.time.now - died < RULES.lease + 0.01


def test_a_leader_that_says_farewell_is_followed_at_once(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    joiner.go()
    before = joiner.time.now
    leader.life.close()
    assert leader.carry_out(leader.node.farewell()) == [
        "PutRecord", "Read state", "CompareAndSet state", "Ring",
    ]  # fmt: skip
    joiner.go()
    while stored(joiner).leader is None:
        joiner.wake()
    assert stored(joiner).leader == "n2"
    assert stored(joiner).reason == "n1[1] left"
    assert joiner.node.waiting > 0
    assert joiner.time.now - before < 0.1


def test_a_participant_that_says_farewell_rings(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    joiner.life.close()
    assert joiner.carry_out(joiner.node.farewell()) == ["PutRecord", "Read state"]
    leader.go()
    assert stored(leader).reason == "n2[1] left"


def test_an_outage_ends_no_round_and_delivers_nothing(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    joiner.go()
    joiner.down = True
    joiner.send(None)
    for _ in range(200):
        joiner.go()
        joiner.wake()
    assert len(joiner.outcomes) == 1
    assert joiner.node.waiting == 0
    joiner.down = False
    joiner.wake()
    assert joiner.node.in_round


def test_a_join_times_out_and_says_so(server: MemoryServer, time: Time) -> None:
    node = Life("n1", server, time, RULES)
    node.go()
    while not node.outcomes:
        node.wake()
    assert node.outcomes[0].failure == Failure.TIMEOUT
    assert 60 <= time.now - 1000 < 62
    entry = node.client.get(NODES_PREFIX + "n1")
    assert entry is not None
    assert NodeRecord.decode(entry.value).wants is Wants.LEFT
    before = time.now
    node.wake()
    assert time.now - before == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("late", [1.0, 4.0])
def test_a_named_node_gives_a_round_that_is_confirmed_a_lease(
    late: float, pair: tuple[Life, Life], time: Time
) -> None:
    leader, joiner = pair
    while time.now < 1059.5:
        leader.wake()
    joiner.go()
    while not (stored(leader).phase is Phase.CONFIRMING and leader.log[-1] == "PutRecord"):
        leader.answer() if not isinstance(leader.request, steps.Rest) else leader.wake()
    time.now += late
    if late < RULES.lease:
        finish(leader, joiner)
        assert leader.outcomes[0].document
    else:
        leader.go()
        assert leader.outcomes[0].failure == Failure.TIMEOUT


def test_a_join_without_a_store_ends_in_its_error(server: MemoryServer, time: Time) -> None:
    node = Life("n1", server, time, RULES)
    node.down = True
    while not node.outcomes:
        node.go()
        if not node.outcomes:
            node.wake()
    assert isinstance(node.outcomes[0].error, RendezvousConnectionError)
    assert 60 <= time.now - 1000 < 62


@pytest.mark.parametrize("error", [RendezvousConnectionError, RendezvousStateError])
def test_a_join_that_fails_is_reported_even_if_nobody_can_be_told(
    error: type[Exception], server: MemoryServer, time: Time
) -> None:
    node = Life("n1", server, time, RULES)
    node.go()
    time.now += 60
    node.last_word_fails = error("no")
    node.send(None)
    node.go()
    assert [outcome.failure for outcome in node.outcomes] == [Failure.TIMEOUT]


def test_who_gave_up_joining_again_is_missed_by_nobody(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    joiner.join_again()
    joiner.go()
    while not joiner.outcomes:
        leader.wake()
        joiner.wake()
    assert joiner.outcomes[0].failure == Failure.TIMEOUT
    assert not joiner.node.in_round


def test_an_order_that_came_before_a_wait_ends_it(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    joiner.go()
    assert isinstance(joiner.request, steps.Park)
    joiner.time.now += joiner.request.seconds + 1e-6
    joiner.send(None)
    joiner.node.order_join()
    assert joiner.go() == ["PutRecord", "Read nodes/n1", "PutRecord", "Read state", "Read nodes/n1"]


def test_an_outage_at_the_end_of_a_failed_join_voids_what_was_seen(
    server: MemoryServer, time: Time
) -> None:
    rules = replace(RULES, min_nodes=3, max_nodes=3)
    leader = Life("n1", server, time, rules)
    leader.go()
    joiner = Life("n2", server, time, rules)
    while time.now < 1058:
        joiner.go()
        leader.go()
        for life in (leader, joiner):
            life.wake()
    joiner.last_word_fails = RendezvousConnectionError("down")
    while not joiner.outcomes:
        joiner.wake()
    assert joiner.outcomes[0].failure == Failure.TIMEOUT
    joiner.last_word_fails, failed = None, time.now
    joiner.join_again()
    joiner.go()
    while stored(joiner).leader == "n1":
        joiner.wake()
    assert time.now - failed >= rules.lease


def test_an_unreadable_document_is_told_to_the_agent(server: MemoryServer, time: Time) -> None:
    MemoryClient(server, "run").put(STATE_KEY, b"\x80\x04garbage")
    node = Life("n1", server, time, RULES)
    while not node.outcomes:
        node.answer()
    assert isinstance(node.outcomes[0].error, RendezvousStateError)


def test_an_unreadable_record_is_silence(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    for _ in range(5):
        joiner.client.put(NODES_PREFIX + "n2", b"garbage")
        leader.wake()
    assert stored(leader).round == 1
    assert stored(leader).reason == "lost n2: lease ran out"


@pytest.mark.parametrize("known", [True, False])
def test_closing_wakes_whoever_waits(known: bool, server: MemoryServer, time: Time) -> None:
    leader = Life("n1", server, time, RULES)
    if known:
        leader.go()
    never = RoundDocument(round=0, phase=Phase.FORMING, leader=None, min_nodes=2, max_nodes=2)
    asked = leader.carry_out(close_run("n9", never, "done"))
    assert asked == ["Read state", "CompareAndSet state", "Ring", "Chronicle"]
    assert (stored(leader).phase, stored(leader).reason) == (Phase.CLOSED, "done")
    if known:
        leader.go()
        assert leader.outcomes[0].failure == Failure.CLOSED


def test_a_closed_run_is_not_closed_twice(server: MemoryServer, time: Time) -> None:
    life = Life("n1", server, time, RULES)
    never = RoundDocument(round=0, phase=Phase.FORMING, leader=None, min_nodes=2, max_nodes=2)
    life.carry_out(close_run("n9", never, "done"))
    assert life.carry_out(close_run("n8", never, "again")) == ["Read state"]
