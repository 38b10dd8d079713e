"""How a join ends that fails, and what a node makes of a store that is away or unreadable."""

from __future__ import annotations

import pytest

from rdzv_plugins.kv import (
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Outcome,
    Phase,
    Status,
)
from rdzv_plugins.protocol.rules import Failure
from tests import replace
from tests.unit.life import RULES, Life, Time, finish, stored, sweep

pytestmark = pytest.mark.rule("outage")


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
    assert joiner.node.num_nodes_waiting == 0
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
    assert NodeRecord.decode(entry.value).status is Status.LEFT
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
        leader.answer() if not isinstance(leader.request, effects.Rest) else leader.wake()
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


def test_a_node_that_gave_up_joining_again_is_missed_by_nobody(pair: tuple[Life, Life]) -> None:
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
    assert isinstance(joiner.request, effects.Park)
    joiner.time.now += joiner.request.seconds + 1e-6
    joiner.send(None)
    joiner.node.inbox.join()
    assert joiner.go() == ["PutRecord", "Read nodes/n1", "PutRecord", "Read state", "Read nodes/n1"]


@pytest.mark.parametrize("away", [0.0, 0.8, 5.0])
def test_an_outage_at_the_end_of_a_failed_join_is_taken_out_of_what_was_seen(
    away: float, server: MemoryServer, time: Time
) -> None:
    rules = replace(RULES, min_nodes=3, max_nodes=3)
    leader = Life("n1", server, time, rules)
    leader.go()
    joiner = Life("n2", server, time, rules)
    beaten = 0.0
    while time.now < 1058:
        joiner.go()
        if leader.go().count("PutRecord"):
            beaten = time.now
        for life in (leader, joiner):
            life.wake()
    joiner.last_word_fails = RendezvousConnectionError("down")
    while not joiner.outcomes:
        joiner.wake()
    assert joiner.outcomes[0].failure == Failure.TIMEOUT
    time.now += away
    joiner.last_word_fails, back = None, time.now
    joiner.join_again()
    joiner.go()
    while stored(joiner).leader == "n1":
        joiner.wake()
    if away > rules.interval:
        assert time.now - back >= rules.lease
    else:
        assert time.now - beaten >= rules.lease + away


def test_a_newcomer_writes_over_an_unreadable_document_when_nobody_mends_it(
    server: MemoryServer, time: Time
) -> None:
    MemoryClient(server, "run").put(STATE_KEY, b"\x80\x04garbage")
    node = Life("n1", server, time, replace(RULES, min_nodes=1, max_nodes=1))
    node.go()
    while not node.outcomes:
        node.wake()
    assert node.outcomes[0].document is not None
    # The leader of a run that lives would have written it anew by then.
    assert time.now - 1000 >= RULES.lease + RULES.interval
    (line,) = [text for text in node.told if "unreadable" in text]
    assert line.startswith("it counts as absent: the round document is unreadable (")


def test_a_document_of_another_version_is_told_at_once(server: MemoryServer, time: Time) -> None:
    MemoryClient(server, "run").put(STATE_KEY, b'{"schema":1,"round":7}')
    node = Life("n1", server, time, RULES)
    node.go()
    assert isinstance(node.outcomes[0].error, RendezvousStateError)
    assert "install the same version" in str(node.outcomes[0].error)
    assert time.now == 1000.0
    # It is another version's run: not ours to mend.
    node.wake()
    assert MemoryClient(server, "run").get(STATE_KEY) is not None
    # That it leads nothing there is no failure.
    node.carry_out(node.node.farewell())


def test_a_node_of_another_version_disturbs_no_round(pair: tuple[Life, Life]) -> None:
    """Though it asks to join before it has read the document."""
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    newcomer = replace(joiner.node.record, address="new", status=Status.JOIN, round=-1)
    stranger = newcomer.encode().replace(b"{", b'{"schema":3,', 1)
    for record, round_ in ((stranger, 0), (newcomer.encode(), 1)):
        leader.client.put(NODES_PREFIX + "n9", record)
        leader.client.put(BELL_KEY, b"n9")
        for _ in range(2):
            leader.wake()
            leader.go()
        assert stored(leader).round == round_


def test_an_unreadable_record_is_silence(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    for _ in range(5):
        joiner.client.put(NODES_PREFIX + "n2", b"garbage")
        leader.wake()
    assert stored(leader).round == 1
    assert stored(leader).reason == "lost n2: lease ran out"


def test_a_node_that_comes_back_after_the_sweep_leaves_no_record(
    pair: tuple[Life, Life], server: MemoryServer
) -> None:
    """Also where the store is away when it is to be deleted."""
    leader, joiner = pair
    finish(leader, joiner)
    ended = replace(stored(leader), phase=Phase.CLOSED, outcome=Outcome.SUCCEEDED)
    leader.archive.put_tombstone(ended)
    sweep(server)
    failures = iter((True, True))
    joiner.fails = lambda request: isinstance(request, effects.Drop) and next(failures, False)
    for _ in range(20):
        joiner.wake()
    assert joiner.node.latest is not None
    assert joiner.node.latest.closed
    assert joiner.client.list("") == {}
