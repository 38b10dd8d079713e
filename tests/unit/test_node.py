"""What a node asks of the store, request by request, and what that costs."""

from __future__ import annotations

import contextlib
import random
import textwrap
import time as clock
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rdzv_plugins import protocol
from rdzv_plugins.kv import (
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.process.driver import perform
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.cleanup import close_run
from rdzv_plugins.protocol.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.rules import Failure
from tests import replace
from tests.unit.crowd import Crowd
from tests.unit.life import NAMESPACE, RULES, Life, Time, archive, finish, stored, sweep
from tests.unit.views import record


@pytest.mark.rule("joins commute")
def test_a_joiner_asks_five_times(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    assert joiner.log == [
        "PutRecord", "Read state", "Park state", "PutRecord", "Park state", "FinishJoin",
    ]  # fmt: skip
    assert joiner.outcomes[0].document == stored(leader)


@pytest.mark.rule("consistency")
def test_a_participant_starts_a_round_that_was_over_before_it_saw_it_run(
    server: MemoryServer, time: Time
) -> None:
    rules = replace(RULES, max_nodes=3)
    leader = Life("n1", server, time, rules)
    leader.go()
    slow = Life("n2", server, time, rules)
    slow.go()
    while stored(leader).phase is not Phase.CONFIRMING:
        leader.wake() if isinstance(leader.request, effects.Rest) else leader.go()
    slow.go()
    # There is room for it: the round runs, and at once gives way to the next.
    Life("n3", server, time, rules).go()
    while stored(leader).round == 0:
        leader.wake() if isinstance(leader.request, effects.Rest) else leader.go()
    assert leader.outcomes
    slow.go()
    assert [outcome.document for outcome in slow.outcomes] == [leader.outcomes[0].document]
    assert slow.node.num_nodes_waiting == leader.node.num_nodes_waiting == 1


def test_the_founder_leads_and_hears_of_joins_by_the_bell(server: MemoryServer, time: Time) -> None:
    leader = Life("n1", server, time, RULES)
    assert leader.go() == [
        "PutRecord", "Read state", "CompareAndSet state", "Register",
        "List nodes/",
        "Park bell", "List nodes/", "Read state",
    ]  # fmt: skip
    assert isinstance(leader.request, effects.Park)
    assert leader.request.key == BELL_KEY


def test_the_leaders_own_agent_does_not_wait_for_the_tidying(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    assert leader.log.index("FinishJoin") < leader.log.index("RecordHistory")
    assert leader.log.count("RecordHistory") == leader.log.count("DropStores") == 1


def test_a_steady_node_writes_once_and_reads_once_an_interval() -> None:
    for logged, asked in (
        ("n2", ["PutRecord", "Read nodes/n1"]),
        ("n1", ["PutRecord", "List nodes/", "Read state"]),
    ):
        crowd = Crowd()
        crowd.begin(RULES, "n1", "n2")
        assert crowd.document.leader == "n1"
        log = crowd.members[logged].log
        crowd.play(5.0)
        log.clear()
        crowd.play(20.0)
        beats = log.count("PutRecord")
        # 1 to 1.1 s each, and what a request takes.
        assert 18 <= beats <= 20
        assert log[: len(asked) * (beats - 1)] == asked * (beats - 1)


def test_a_node_that_nobody_asked_again_stays_in_its_round(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    assert joiner.node.in_round
    assert (joiner.node.num_nodes_waiting, leader.node.num_nodes_waiting) == (0, 0)


def test_a_failed_worker_brings_the_others_to_join_again(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    joiner.join_again()
    joiner.go()
    leader.go()
    assert leader.node.num_nodes_waiting > 0
    leader.join_again()
    finish(leader, joiner)
    assert stored(leader).round == 1
    assert "n2[1] joined again" in stored(leader).reason


def test_a_node_that_joins_again_looks_at_the_leader_without_delay(pair: tuple[Life, Life]) -> None:
    """Its lease counts from the look: one that died with the workers has a lease, not more."""
    leader, joiner = pair
    finish(leader, joiner)
    joiner.wake()
    # The leader beats once more, dies, and its end makes the joiner's workers fail.
    last = replace(leader.node.record, beat=leader.node.record.beat + 1)
    perform(leader.client, leader.archive, effects.PutRecord("n1", last, ring=False))
    joiner.time.now += 0.2
    joiner.join_again()
    assert joiner.go() == ["PutRecord", "Read state", "Read nodes/n1"]
    died = joiner.time.now
    while stored(joiner).leader == "n1" and joiner.time.now < died + 10:
        joiner.wake()
    assert stored(joiner).leader == "n2"
    assert joiner.time.now - died < RULES.lease + 0.01


@pytest.mark.rule("leave")
def test_a_leader_that_says_farewell_is_followed_at_once(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    joiner.go()
    before = joiner.time.now
    leader.life.close()
    assert leader.carry_out(leader.node.farewell()) == [
        "PutRecord", "Read state", "CompareAndSet state", "Ring", "Read nodes/n1",
    ]  # fmt: skip
    joiner.go()
    while stored(joiner).leader is None:
        joiner.wake()
    assert stored(joiner).leader == "n2"
    assert stored(joiner).reason == "n1[1] left"
    assert joiner.node.num_nodes_waiting > 0
    assert joiner.time.now - before < 0.1


@pytest.mark.rule("keys")
def test_a_leader_that_leaves_at_once_lets_the_keys_end(server: MemoryServer, time: Time) -> None:
    leader = Life("n1", server, time, RULES)
    assert "Expire" not in leader.go()
    assert "Expire" in leader.carry_out(leader.node.farewell())


@pytest.mark.rule("keys")
def test_a_leader_lets_the_keys_end_as_soon_as_the_round_runs(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    assert leader.log.index("FinishJoin") < leader.log.index("Expire")
    assert "Expire" not in leader.carry_out(leader.node.farewell())


@pytest.mark.rule("leave")
def test_a_participant_that_says_farewell_rings(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    joiner.life.close()
    # It reads its last word back: a late beat may have undone it.
    assert joiner.carry_out(joiner.node.farewell()) == ["PutRecord", "Read state", "Read nodes/n2"]
    leader.go()
    assert stored(leader).reason == "n2[1] left"


@pytest.mark.rule("leave")
def test_a_beat_that_lands_after_the_farewell_is_written_over(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    joiner.life.close()
    late = joiner.node.record
    work = joiner.node.farewell()
    request: effects.Effect[Any] = next(work)
    asked: list[effects.Effect[Any]] = []
    with contextlib.suppress(StopIteration):
        while True:
            answer = perform(joiner.client, joiner.archive, request)
            if not asked:
                # The one that its thread hung in when it was stopped.
                perform(joiner.client, joiner.archive, effects.PutRecord("n2", late, ring=False))
            asked.append(request)
            request = work.send(answer)
    entry = joiner.client.get(NODES_PREFIX + "n2")
    assert entry is not None
    assert NodeRecord.decode(entry.value).status is Status.LEFT
    assert len([each for each in asked if isinstance(each, effects.PutRecord)]) == 2


NEVER_SEEN = RoundDocument(
    incarnation="new", round=0, phase=Phase.FORMING, leader=None, min_nodes=2, max_nodes=2
)


def close(life: Life, latest: RoundDocument, why: str) -> list[str]:
    return life.carry_out(
        close_run(life.node.id, latest, Outcome.CLOSED, why, 60.0, may_close=lambda _: True)
    )


@pytest.mark.parametrize("known", [True, False])
def test_closing_wakes_whoever_waits(known: bool, server: MemoryServer, time: Time) -> None:
    leader = Life("n1", server, time, RULES)
    if known:
        leader.go()
    asked = close(leader, stored(leader) if known else NEVER_SEEN, "done")
    assert asked == [
        "Read state", *([] if known else ["ReadTombstone"]), "CompareAndSet state", "Ring",
        "RecordHistory", "PutTombstone", "Read state", "Expire", "CompareAndSet state",
    ]  # fmt: skip
    assert (stored(leader).phase, stored(leader).reason) == (Phase.CLOSED, "done")
    assert (stored(leader).outcome, stored(leader).expires) == (Outcome.CLOSED, True)
    if known:
        leader.go()
        assert leader.outcomes[0].failure == Failure.CLOSED


@pytest.mark.rule("closed stays closed")
def test_another_run_with_the_id_keeps_its_keys(server: MemoryServer, time: Time) -> None:
    """The store loses the closed run while the one that closed it still notes its end."""
    closer, newcomer = Life("n1", server, time, RULES), Life("n2", server, time, RULES)

    def slowly(work: effects.Effects[bool]) -> effects.Effects[None]:
        request = next(work)
        with contextlib.suppress(StopIteration):
            while True:
                answer = yield request
                if isinstance(request, effects.PutTombstone):
                    sweep(server)
                    newcomer.go()
                request = work.send(answer)

    closing = close_run("n1", NEVER_SEEN, Outcome.CLOSED, "done", 60.0, may_close=lambda _: True)
    assert "Expire" not in closer.carry_out(slowly(closing))
    assert stored(newcomer).leader == "n2"


@pytest.mark.rule("closed stays closed")
def test_a_leader_that_lost_the_lead_does_not_close_the_run(
    server: MemoryServer, time: Time
) -> None:
    """All its nodes are done, as the last leader saw it; the next one may know better."""
    leader, joiner = Life("n1", server, time, RULES), Life("n2", server, time, RULES)
    leader.go()
    finish(leader, joiner)
    joiner.node.inbox.report_done()
    joiner.send(None)
    joiner.go()
    leader.node.inbox.report_done()
    leader.send(None)
    for _ in range(20):
        if leader.node.closing:
            break
        leader.answer()
    assert leader.node.closing
    leader.client.put(STATE_KEY, replace(stored(leader), leader="n2").encode())
    leader.go()
    assert stored(leader).phase is Phase.RUNNING


@pytest.mark.rule("closed stays closed")
def test_a_closed_run_is_not_closed_twice(server: MemoryServer, time: Time) -> None:
    life = Life("n1", server, time, RULES)
    close(life, NEVER_SEEN, "done")
    # It trains there no longer, so `rdzv close` need not name it.
    assert close(life, NEVER_SEEN, "again") == ["Read state", "Drop"]
    assert stored(life).reason == "done"


def test_the_driver_that_the_package_describes_forms_a_round(server: MemoryServer) -> None:
    """Each node in a thread, on the in-memory store."""
    loop = protocol.__doc__.partition("::\n\n")[2].partition("\n\nWhat")[0]
    names: dict[str, Any] = {
        "effects": effects, "perform": perform, "time": clock,
        "RendezvousConnectionError": RendezvousConnectionError,
        "RendezvousStateError": RendezvousStateError,
    }  # fmt: skip
    exec(textwrap.dedent(loop), names)

    def live(name: str) -> effects.JoinOutcome:
        mine = replace(record(name), min_nodes=RULES.min_nodes, max_nodes=RULES.max_nodes)
        chance, wall = random.Random(name), clock.time
        node = Node(name, mine, RULES, 60.0, clock.monotonic, chance, wall)
        outcome: effects.JoinOutcome = names["drive"](
            node, MemoryClient(server, NAMESPACE), archive(server)
        )
        return outcome

    with ThreadPoolExecutor(2) as pool:
        documents = [it.document for it in pool.map(live, ("n1", "n2"))]
    assert documents[0] is not None
    assert sorted(documents[0].ranks) == ["n1", "n2"]
    assert [it and it.world_id for it in documents] == [documents[0].world_id] * 2


def test_the_package_describes_every_effect() -> None:
    of = effects.Effect, effects.Begin
    kinds = {kind.__name__ for it in of for kind in it.__subclasses__()}
    assert [name for name in sorted(kinds) if f"`{name}`" not in protocol.__doc__] == []
