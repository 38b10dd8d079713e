"""The shared handler on every store: real clients and servers, agents played by threads."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from rdzv_plugins.process.factory import rules_of
from rdzv_plugins.protocol.rules import Rules
from tests import Measure
from tests.handlers.site import succeed
from tests.integration.agents import Run, one_world, until
from tests.integration.stores import RunningStore


@pytest.fixture
def run(running_store: RunningStore, run_id: str) -> Iterator[Run]:
    with Run(running_store, run_id) as run:
        yield run


def test_nodes_form_one_world_and_share_a_store(run: Run) -> None:
    agents = [run.start((3, 3)) for _ in range(3)]
    until(one_world(agents), 30)
    stores: list[Any] = [agent.rounds[-1].store for agent in agents]
    stores[0].set("greeting", "hello")
    assert [store.get("greeting") for store in stores] == [b"hello"] * 3


def test_nodes_that_trickle_in_end_in_one_world(run: Run) -> None:
    # Some come while a round is confirmed, and end it the moment that it runs.
    agents = []
    for _ in range(8):
        agents.append(run.start((2, 8), last_call_timeout="0"))
        time.sleep(random.uniform(0, 0.1))
    until(one_world(agents), 60)


def test_a_late_node_is_let_in(run: Run) -> None:
    agents = [run.start((1, 3)) for _ in range(2)]
    until(one_world(agents), 30)
    agents.append(run.start((1, 3)))
    until(one_world(agents), 30)
    until(run.tells("joined"), 30)


def test_a_silent_death_of_any_node_starts_the_next_round(run: Run) -> None:
    agents = [run.start((1, 4)) for _ in range(4)]
    until(one_world(agents), 30)
    while len(agents) > 1:
        # The leader is whoever founded the run; in four deaths minus one it is among the dead.
        agents.pop(0).crash()
        until(one_world(agents), 30)
    until(run.tells("lease ran out"), 30)


def test_rounds_whose_nodes_stand_in_shards_survive_deaths_too(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rounds of more than 128 nodes do; here already those of two."""

    def with_shards(*args: Any) -> Rules:
        return replace(rules_of(*args), inline=1)

    monkeypatch.setattr("rdzv_plugins.process.factory.rules_of", with_shards)
    agents = [run.start((1, 5), links="false") for _ in range(5)]
    until(one_world(agents), 30)
    leader = agents[0].handler._node.document.leader  # type: ignore[union-attr]
    agents.sort(key=lambda agent: agent.handler._node.id != leader)
    agents.pop(0).crash()
    until(one_world(agents), 30)
    until(run.tells("lease ran out"), 30)
    agents.pop().leave()
    until(one_world(agents), 30)
    agents.append(run.start((1, 5), links="false"))
    until(one_world(agents), 30)


@pytest.mark.full
def test_a_round_of_hundreds_survives_its_leader(
    store: RunningStore, run_id: str, record_property: Measure
) -> None:
    with Run(store, run_id) as run:
        began = time.monotonic()
        agents = [run.start((2, 150), keep_alive_interval="3") for _ in range(150)]
        until(one_world(agents), 60)
        record_property("formed", round(time.monotonic() - began, 3))
        leader = agents[0].handler._node.document.leader  # type: ignore[union-attr]
        agents.sort(key=lambda agent: agent.handler._node.id != leader)
        agents.pop(0).leave()
        until(one_world(agents), 60)
        record_property("seconds", round(time.monotonic() - began, 3))


def test_leaving_is_announced(run: Run, record_property: Measure) -> None:
    agents = [run.start((1, 3), keep_alive_interval="20") for _ in range(3)]
    until(one_world(agents), 60)
    leader = agents[0].handler._node.document.leader  # type: ignore[union-attr]
    agents.sort(key=lambda agent: agent.handler._node.id != leader)
    began = time.monotonic()
    agents.pop(0).leave()
    # Far below the lease of a minute: nobody waited for it, not even that of a leader.
    until(one_world(agents), 30)
    record_property("seconds", round(time.monotonic() - began, 3))
    until(run.tells(" left"), 30)


def test_shutting_down_at_a_signal_is_leaving(run: Run) -> None:
    agents = [run.start((1, 2)) for _ in range(2)]
    until(one_world(agents), 30)
    try:
        raise SignalException("got signal 15", sigval=signal.SIGTERM)
    except SignalException:
        assert agents.pop(0).handler.shutdown()
    until(one_world(agents), 30)
    until(run.tells(" left"), 30)


def test_a_node_that_joins_again_takes_all_others_along(run: Run) -> None:
    agents = [run.start((2, 2)) for _ in range(2)]
    until(one_world(agents), 30)
    agents[0].fail_workers()
    until(lambda: [len(agent.rounds) for agent in agents] == [2, 2], 30)
    until(one_world(agents), 30)
    until(run.tells("joined again"), 30)


def test_a_spare_disturbs_nobody_until_there_is_room(run: Run) -> None:
    agents = [run.start((2, 2)) for _ in range(2)]
    until(one_world(agents), 30)
    spare = run.start((2, 2))
    until(lambda: spare.handler._node.record.status == "spare", 30)
    assert all(agent.handler.num_nodes_waiting() == 0 for agent in agents)
    agents.pop().leave()
    until(one_world([*agents, spare]), 30)


def test_closing_ends_the_run_until_its_id_is_swept(run: Run) -> None:
    # A longer lease: on a busy machine DynamoDB Local stands still for more than 1.5 s.
    ending = {"closed_ttl": "10", "keep_alive_interval": "2"}
    agents = [run.start((2, 2), **ending) for _ in range(2)]
    until(one_world(agents), 30)
    spare = run.start((2, 2), **ending)
    until(lambda: spare.handler._node.record.status == "spare", 30)
    for agent in agents:
        succeed(agent.handler)
        agent.end()
    until(lambda: spare.error is not None, 30)
    # torch's own RendezvousGracefulExitError makes its launcher fail.
    assert isinstance(spare.error, SystemExit)
    assert spare.error.code == 0
    late = run.start((2, 2), **ending)
    until(lambda: late.error is not None, 30)
    assert isinstance(late.error, RendezvousClosedError)

    until(run.is_swept, 60)
    pair = [run.start((2, 2), **ending) for _ in range(2)]
    until(one_world(pair), 30)


class SignalError(Exception):
    """What torch's launcher raises in the main thread at a signal."""


def test_a_signal_ends_the_first_join_and_the_node_can_still_leave(run: Run) -> None:
    handler = run.handler((2, 2))

    def tell() -> None:
        until(lambda: handler._node.document is not None, 30)
        os.kill(os.getpid(), signal.SIGUSR1)

    def be_told(*_: object) -> None:
        raise SignalError

    before = signal.signal(signal.SIGUSR1, be_told)
    try:
        teller = threading.Thread(target=tell)
        teller.start()
        with pytest.raises(SignalError):
            handler.next_rendezvous()
        teller.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handler._leave()
    pair = [run.start((2, 2)) for _ in range(2)]
    # Well before the lease of the node that left.
    until(one_world(pair), 30)
    until(lambda: bool(run.history()), 30)
    assert not any("lost" in row.reason for row in run.history())


def test_the_run_closes_for_joiners_that_wait(run: Run) -> None:
    waiting = run.start((2, 2))
    until(lambda: waiting.handler._node.document is not None, 30)
    closer = run.handler((2, 2))
    closer.set_closed()
    until(lambda: waiting.error is not None, 30)
    assert isinstance(waiting.error, RendezvousClosedError)
    assert closer.is_closed()
    closer.shutdown()


def test_other_nnodes_are_refused_and_do_not_end_the_run(run: Run) -> None:
    agents = [run.start((2, 3)) for _ in range(2)]
    until(one_world(agents), 30)
    other = run.start((2, 4))
    until(lambda: other.error is not None, 30)
    assert isinstance(other.error, RendezvousStateError)
    assert "--nnodes=2:3" in str(other.error)
    other.end()
    assert not agents[0].handler.is_closed()
    assert all(len(agent.rounds) == 1 for agent in agents)


def test_too_few_nodes_time_out_and_do_not_close_the_run(run: Run) -> None:
    lonely = run.start((2, 2), join_timeout="0.5")
    until(lambda: lonely.error is not None, 30)
    assert isinstance(lonely.error, RendezvousTimeoutError)
    lonely.end()
    agents = [run.start((2, 2)) for _ in range(2)]
    until(one_world(agents), 60)


def test_shutdown_ends_the_thread_at_once(run: Run) -> None:
    agent = run.start((1, 1), keep_alive_interval="60")
    until(one_world([agent]), 30)
    agent.end()
    assert not agent.handler._driver.running
