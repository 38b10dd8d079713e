"""The benchmarks measure what they say: a swarm forms rounds, and so do processes of handlers."""

from __future__ import annotations

from contextlib import closing

import pytest

from benchmarks import rendezvous
from benchmarks.restart import PHASES, TOTAL, Restarts
from benchmarks.startup import measure
from benchmarks.swarm import Swarm
from tests import servers

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("backend", "kind", "nodes"), [("redis", "redis", 64), ("etcd-v3", "etcd", 16)]
)
def test_a_swarm_forms_one_world(backend: str, kind: str, nodes: int) -> None:
    with servers.start(kind) as server, closing(Swarm(backend, server, nodes)) as swarm:
        sample = swarm.form(60.0)
        assert sample is not None
        assert sorted(member.rank for member in swarm.members) == [*range(nodes)]
        documents = [it.document for it in swarm.members if it.document is not None]
        assert len({(it.world_id, it.master) for it in documents}) == 1
        assert swarm.is_one_world
        assert 0 < sample["leader ms"] < 1000 * sample["s"]
        assert sample["server s"] > 0
        # Each node writes its record twice, and reads and waits for the document.
        assert backend != "redis" or sample["bytes a node"] > 1000
        assert swarm.rest(1.0)["server us a node and s"] >= 0
        assert sum(member.leads for member in swarm.members) == 1


@pytest.mark.full
def test_handlers_form_grow_leave_and_lose_nodes() -> None:
    with rendezvous.started("redis") as target:
        assert target.version
        formed = rendezvous.form(target, 5, 2, 60.0)
        assert formed is not None
        assert {"s", "node ms", "leader ms", "server ms a node", "bytes a node"} == formed.keys()
        assert rendezvous.late(target, 3, 2, 60.0) is not None
        found = rendezvous.life(target, 6, 1, 60.0, interval=1.0)
        assert [*found] == [*rendezvous.LIFE]
        # Not before the lease, but for an interval: then the last heartbeat may have been sent.
        assert all(found[it]["s"] > -1.2 for it in rendezvous.LIFE if it.startswith("lose"))
        assert all(sample["rounds"] >= 1 for sample in found.values())
        gone = rendezvous.killed(target, 6, 1, 60.0)
        assert gone is not None
        # The lease has 15 s.
        assert all(0 < seconds < 10 for seconds in gone.values())
        # Longer than an interval: a node that rests sends nothing between two heartbeats.
        [window] = rendezvous.rest(target, 2, 1, 60.0, 1, 6.0)
        assert window["bytes a node and s"] > 0


@pytest.mark.full
def test_the_phases_that_a_run_tells_are_those_of_a_restart() -> None:
    with Restarts("redis") as restarts:
        sample = restarts.sample()
    assert sample["as told"] == pytest.approx(sample[TOTAL], rel=0.05)
    assert sum(sample[it] for it in PHASES) == pytest.approx(sample[TOTAL])


def test_a_proxy_counts_the_bytes_of_a_round() -> None:
    with rendezvous.started("redis") as target:
        rendezvous.form(target, 2, 1, 60.0)
        formed, counted = (
            rendezvous.form(target, 8, 2, 60.0),
            rendezvous.count_bytes(target, 8, 2, 60.0),
        )
    assert formed is not None
    assert counted is not None
    # The server and the proxy count the same, but no two rounds are alike.
    assert 0.5 < counted["bytes a node"] / formed["bytes a node"] < 2


@pytest.mark.full
def test_the_start_up_is_measured_in_pairs() -> None:
    [sample] = measure(1)
    assert sample["ms without"] > 0
