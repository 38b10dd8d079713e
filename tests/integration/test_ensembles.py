"""Ensembles of three servers whose leader dies: while nodes join, while they run and train."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests import Measure
from tests.integration.agents import QUICK, Agent, Run, Watch, await_beats, one_world, until
from tests.integration.jobs import LEASE, Pause
from tests.integration.jobs import Run as TorchRun
from tests.integration.stores import KINDS, Kind, RunningStore, started
from tests.servers import LocalServer

ENSEMBLES = [kind for kind in KINDS if kind.name in ("zookeeper", "consul", "etcd-v3", "nats")]

HANDLER_LEASE = 3 * float(QUICK["keep_alive_interval"])

# Seconds for the ensemble to find a new leader, on a machine that has other things to do too.
PATIENCE = 30.0


@dataclass(frozen=True)
class Ensemble:
    store: RunningStore
    servers: LocalServer

    def kill_leader(self) -> float:
        """SIGKILL; returns when."""
        leader = self.servers.nodes[self.servers.leader()]
        at = time.monotonic()
        leader.kill()
        return at

    def await_leader(self) -> float:
        """Wait for one among the survivors; returns when there was one."""
        self.servers.leader(PATIENCE)
        return time.monotonic()


@pytest.fixture(params=ENSEMBLES, ids=lambda kind: kind.name)
def ensemble(request: pytest.FixtureRequest) -> Iterator[Ensemble]:
    """Three servers of the test's own."""
    kind: Kind = request.param
    with started(kind, nodes=3) as store:
        assert store.server is not None
        hosts = store.endpoint.split(",")
        # First among the hosts: clients that take them in order are connected to the one that dies.
        hosts.insert(0, hosts.pop(store.server.leader()))
        yield Ensemble(replace(store, endpoint=",".join(hosts)), store.server)


@pytest.fixture
def run(ensemble: Ensemble, run_id: str) -> Iterator[Run]:
    with Run(ensemble.store, run_id) as run:
        yield run


def test_leader_dies_while_nodes_join(
    ensemble: Ensemble, run: Run, record_property: Measure
) -> None:
    # Its connection stands before the leader dies; the last node's has to be made afterwards.
    waiting = run.handler((4, 4))
    agents = [run.start((4, 4)) for _ in range(2)]
    until(lambda: all(agent.handler._node.document is not None for agent in agents), 30)
    killed = ensemble.kill_leader()
    agents.append(Agent(waiting))
    run.agents.append(agents[-1])
    # As long as an election may take here; torchrun's default is 5 s.
    agents.append(run.start((4, 4), heartbeat_timeout=str(PATIENCE)))
    record_property("last node connected, s", round(time.monotonic() - killed, 2))
    until(one_world(agents), PATIENCE)
    record_property("round of 4 complete, s", round(time.monotonic() - killed, 2))
    assert all(agent.error is None and len(agent.rounds) == 1 for agent in agents)
    until(run.tells("first round"), PATIENCE)
    assert len(run.history()) == 1


def test_leader_dies_while_a_round_runs(
    ensemble: Ensemble, run: Run, run_id: str, record_property: Measure
) -> None:
    agents = [run.start((2, 3)) for _ in range(2)]
    until(one_world(agents), 30)
    with Watch(agents) as watch:
        killed = ensemble.kill_leader()
        elected = ensemble.await_leader()
        record_property("new leader, s", round(elected - killed, 2))
        await_beats(ensemble.store, run_id, len(agents), PATIENCE)
        record_property("beating again, s", round(time.monotonic() - killed, 2))
        # Whoever judged by what could not be read would have by then.
        time.sleep(2 * HANDLER_LEASE)
    assert watch.asked > 100
    assert watch.seen == []
    assert [len(agent.rounds) for agent in agents] == [1, 1]
    documents = [agent.handler._node.document for agent in agents]
    assert all(it is not None and not it.absent for it in documents)
    late = time.monotonic()
    agents.append(run.start((2, 3)))
    until(one_world(agents), 30)
    record_property("late node let in, s", round(time.monotonic() - late, 2))
    until(run.tells("first round", "joined"), 30)
    assert len(run.history()) == 2


@pytest.mark.soak
def test_leader_dies_while_torchrun_trains(
    ensemble: Ensemble, tmp_path: Path, record_property: Measure
) -> None:
    with closing(TorchRun(tmp_path, ensemble.store)) as run:
        world = run.begin("ab")
        pids, number = dict(world.pids), run.round()
        killed = ensemble.kill_leader()
        record_property("new leader, s", round(ensemble.await_leader() - killed, 2))
        # Two leases: whoever judged by a store that is away would have by then.
        time.sleep(2 * LEASE)
        assert run.worlds() == [world], "the death of a server of the store started a round"
        run.await_step(world, world.last_step + 10)
        steps = [event.at for event in run.events if event.event == "step"]
        record_property("longest pause between steps, s", round(longest_gap(steps, killed), 2))
        assert world.pids == pids
        assert [agent.process.poll() for agent in run.agents.values()] == [None, None]
        assert run.round() == number
        late = run.start_at("c").started
        joined = run.await_world("abc", by_rank=True)
        record_property("late node trains, s", round(Pause.of(joined, late).trained, 2))
        assert run.round() == number + 1
    assert run.split() is None


def longest_gap(moments: list[float], since: float) -> float:
    """The longest time between two neighbours of which the later is after ``since``."""
    ordered = sorted(moments)
    return max(later - earlier for earlier, later in pairwise(ordered) if later > since)
