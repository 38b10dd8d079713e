"""torch's events over one life of real torchrun agents: of this package's handler, and of torch's.

A platform that listens to torch's dynamic handler must hear the same of ours.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
from torch.distributed.elastic.events.api import NodeState, RdzvEvent

from tests.integration.jobs import Job
from tests.integration.stores import RunningStore, kind_of

_RECORDED = ("-m", "tests.integration.launchers", "recorded", "torchrun")

HANDLER = "dynamic_rendezvous.py:DynamicRendezvousHandler."

Events = dict[str, list[RdzvEvent]]


def events(job: Job, name: str) -> list[RdzvEvent]:
    file = job.folder / f"{name}.events"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [RdzvEvent.deserialize(line) for line in lines]
    for event in found:
        # The subclass in which `handler=torch` mends torch's handler.
        event.name = event.name.replace(":MendedDynamic", ":Dynamic")
    # torch's private classes record steps of its own protocol; its heartbeats are its own too.
    kept = [it for it in found if it.name.startswith(HANDLER)]
    return [it for it in kept if not it.name.endswith("._keep_alive")]


def one_life(store: RunningStore, folder: Path, handler: str) -> tuple[Job, Events]:
    """Two nodes; the workers of one are killed, both train again, and both succeed."""
    with Job(
        folder,
        store,
        nodes="2:2",
        max_restarts=1,
        launcher=_RECORDED,
        handler=handler,
        # No node is lost; a TCPStore that a slow resolver holds up is to cost no round.
        keep_alive_max_attempt=12,
    ) as job:
        assert isinstance(job, Job)
        job.begin("ab")
        killed = job.agents["a"].signal_workers(signal.SIGKILL)
        job.await_begun("ab", after=killed)
        for name in "ab":
            job.finish(name)
        assert job.await_ends("ab") == {"a": 0, "b": 0}
        return job, {name: events(job, name) for name in "ab"}


@pytest.fixture(scope="module")
def lives(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Job, Events]]:
    from tests.integration.stores import running

    with running(kind_of("redis")) as store:
        return {
            handler: one_life(store, tmp_path_factory.mktemp(handler), handler)
            for handler in ("rdzv", "torch")
        }


def told(
    lives: dict[str, tuple[Job, Events]], tell: Callable[[str, list[RdzvEvent]], object]
) -> list[object]:
    """What ``tell`` makes of each life, which is to be the same."""
    return [[tell(name, found) for name, found in heard.items()] for _, heard in lives.values()]


def test_the_events_of_a_life_are_the_same(lives: dict[str, tuple[Job, Events]]) -> None:
    ours, torchs = (
        {(event.name, event.node_state) for found in heard.values() for event in found}
        for _, heard in lives.values()
    )
    assert ours == torchs


def steps(found: list[RdzvEvent]) -> list[tuple[str, NodeState, bool]]:
    """torch's handler repeats a step that another node overtook."""
    all_steps = [(event.name, event.node_state, event.rank is not None) for event in found]
    return [step for step, _ in groupby(all_steps)]


def test_each_node_takes_the_same_steps_in_the_same_order(
    lives: dict[str, tuple[Job, Events]],
) -> None:
    ours, torchs = told(lives, lambda _, found: steps(found))
    assert ours == torchs
    joined = (f"{HANDLER}next_rendezvous", NodeState.RUNNING, True)
    attempt = (f"{HANDLER}next_rendezvous", NodeState.RUNNING, False)
    close = (f"{HANDLER}_close", NodeState.SUCCEEDED, False)
    assert ours == [[attempt, joined, attempt, joined, close]] * 2


def test_the_fields_of_the_events_say_the_same(lives: dict[str, tuple[Job, Events]]) -> None:
    for job, heard in lives.values():
        for name, found in heard.items():
            fields = {
                (it.run_id, it.hostname, it.pid, it.local_id, it.master_endpoint, it.error_trace)
                for it in found
            }
            address = job.label(name).partition("[")[0]
            assert fields == {(job.run_id, address, job.agents[name].pid, 0, "", "")}
            assert all(job.run_id in event.message for event in found)
    ranks = told(lives, lambda _, found: [it.rank for it in found if it.rank is not None])
    assert [sorted(map(tuple, life)) for life in ranks] == [[(0, 0), (1, 1)]] * 2  # type: ignore[call-overload]
