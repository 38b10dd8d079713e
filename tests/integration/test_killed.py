"""Real agents that are killed with the default keep-alive, and those that are not.

The workers import no torch, so that what is measured is the rendezvous.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest

from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord, Phase
from tests import Measure
from tests.fleet.agents import RDZV_RUN
from tests.integration.jobs import Job
from tests.integration.stores import KINDS, Kind, RunningStore, every_store, started
from tests.servers.process import ServerProcess

# The options' defaults: a lease of 15 s.
DEFAULTS = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3, "last_call_timeout": 2}
LEASE = 15.0

soak = pytest.mark.soak

# Their servers keep their data when they are stopped, and start soon.
OF_OUR_OWN = [kind for kind in KINDS if kind.name in ("redis", "etcd-v3")]


@pytest.fixture
def job(store: RunningStore, tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, store, nodes="2:3", links="true", **DEFAULTS)
    yield job
    job.close()


def await_links(job: Job, names: str) -> None:
    """Wait until all say where they answer links: they begin theirs as soon as the round runs."""

    def found() -> bool:
        entries = job.client.list(NODES_PREFIX).values()
        return sum(NodeRecord.decode(it.value).link > 0 for it in entries) >= len(names)

    job.await_that(found, "links", 30)
    time.sleep(0.5)


def measured(job: Job, killed: str, *, workers: bool = True) -> float:
    """Seconds from the kill of these until the last worker of the others runs again."""
    job.begin("abc")
    await_links(job, "abc")
    names = "".join(sorted(set("abc") - set(killed)))
    lost = [job.label(name) for name in killed]
    began = time.monotonic()
    for name in killed:
        job.agents[name].signal(signal.SIGKILL, workers=workers)
    world = job.await_begun(names, after=began)
    document = job.document()
    assert document is not None
    assert all(label in document.reason for label in lost), document.reason
    assert "gone, as" in document.reason
    return max(world.began.values()) - began


@every_store
@pytest.mark.parametrize("killed", ["a", *(pytest.param(it, marks=soak) for it in "bc")])
def test_a_killed_agent_is_noticed_at_once(job: Job, killed: str, record_property: Measure) -> None:
    took = measured(job, killed)
    record_property("last worker began again, s", round(took, 2))


@every_store
@pytest.mark.parametrize("killed", ["b", *(pytest.param(it, marks=soak) for it in "c")])
def test_an_agent_that_is_killed_before_it_confirms_its_rank_is_lost_at_once(
    store: RunningStore, tmp_path: Path, killed: str, record_property: Measure
) -> None:
    options = {"nodes": "3:3", "links": "true", **DEFAULTS}
    with closing(Job(tmp_path, store, **options)) as job:
        others = "".join(sorted({*"abc"} - {killed}))
        job.start_at("a")
        job.await_record("a")
        job.start_at(killed)
        job.await_record(killed)
        job.agents[killed].signal(signal.SIGSTOP)
        job.start_at(max(others))

        def named() -> bool:
            document = job.document()
            return document is not None and document.phase is Phase.CONFIRMING

        job.await_that(named, "a round that names it", 30)
        label, at = job.label(killed), job.agents[killed].kill()
        job.start_at("d")
        world = job.await_begun(f"{others}d", after=at)
        document = job.document()
        assert document is not None
        assert f"lost {label}: its process is gone" in document.reason
    record_property("last worker began, s", round(max(world.began.values()) - at, 2))


@soak
@every_store
@pytest.mark.parametrize("killed", ["ab", "bc", "ca"])
def test_two_agents_that_are_killed_at_once_are_both_noticed(
    store: RunningStore, tmp_path: Path, killed: str, record_property: Measure
) -> None:
    with closing(Job(tmp_path, store, nodes="1:3", links="true", **DEFAULTS)) as job:
        took = measured(job, killed)
    record_property("last worker began again, s", round(took, 2))


@soak
@every_store
@pytest.mark.parametrize("killed", ["a", "b"])
def test_an_agent_that_is_killed_alone(job: Job, killed: str, record_property: Measure) -> None:
    took = measured(job, killed, workers=False)
    record_property("last worker began again, s", round(took, 2))


@contextmanager
def away(server: ServerProcess) -> Iterator[None]:
    """The store is, for 7 s; what is done within is done in the midst of them."""
    server.stop()
    time.sleep(3.5)
    yield
    time.sleep(3.5)
    server.start()


@soak
@pytest.mark.parametrize("kind", OF_OUR_OWN, ids=lambda kind: kind.name)
def test_an_agent_that_is_killed_while_the_store_is_away_is_lost(
    kind: Kind, tmp_path: Path, record_property: Measure
) -> None:
    options = {"nodes": "2:3", "links": "true", **DEFAULTS, "last_call_timeout": 0.1}
    with started(kind) as store, closing(Job(tmp_path, store, **options)) as job:
        job.begin("abc")
        await_links(job, "abc")
        label = job.label("b")
        assert store.server is not None
        with away(store.server.nodes[0]):
            killed = job.agents["b"].kill()
        back = time.monotonic()
        world = job.await_begun("ac", after=killed)
        document = job.document()
        assert document is not None
        assert f"lost {label}: its process is gone" in document.reason
    record_property("last worker began after the outage, s", max(world.began.values()) - back)


@soak
@pytest.mark.parametrize(("refused", "later"), [("", 3.0), ("c", 3.0), ("abc", 0.3)])
def test_a_live_agent_that_is_the_last_to_reach_the_store_again_is_not_lost(
    tmp_path: Path, refused: str, later: float
) -> None:
    with ExitStack() as stack:
        store = stack.enter_context(started(OF_OUR_OWN[0]))
        proxy = stack.enter_context(store.proxy())
        options = {"nodes": "2:3", "links": "true", **DEFAULTS}
        job = stack.enter_context(closing(Job(tmp_path, store, **options)))
        job.start_at("a")
        job.start_at("b")
        job.start("c", "127.0.0.3", endpoint=store.endpoint_at(proxy.address))
        job.await_begun("abc")
        number = job.round()
        await_links(job, "abc")
        pids = {job.agents[name].pid for name in refused}
        ports = [record.link for record in job.records() if record.pid in pids]
        assert store.server is not None
        with away(store.server.nodes[0]):
            proxy.refuse()
            refuse_at(ports)
        time.sleep(later)
        proxy.accept()
        time.sleep(LEASE + 5.0)
        assert job.round() == number, job.document()
        assert all(len(job.noted(name, 0.0)) == 1 for name in "abc")


def destroy(*sockets: str) -> None:
    """Have the kernel end these sockets of live processes, by what `ss` calls them."""
    subprocess.run(["ss", "--kill", "--tcp", "--no-header", *sockets], check=True, stdout=PIPE)


def refuse_for(job: Job, names: str) -> dict[str, int]:
    """End all links to nodes that live, and refuse new ones, as a firewall may.

    Returns their heartbeats, by node.
    """
    pids = {job.agents[name].pid for name in names}
    records = {key: record for key, record in by_key(job).items() if record.pid in pids}
    refuse_at([record.link for record in records.values()])
    return {key.removeprefix(NODES_PREFIX): record.beat for key, record in records.items()}


def refuse_at(ports: Iterable[int]) -> None:
    for state in ("listening", "established"):
        for port in ports:
            destroy("state", state, f"sport = :{port}")


def by_key(job: Job) -> dict[str, NodeRecord]:
    entries = job.client.list(NODES_PREFIX)
    return {key: NodeRecord.decode(it.value) for key, it in entries.items()}


@soak
@every_store
def test_accused_agents_that_live_answer_and_nobody_restarts(job: Job) -> None:
    """As where a firewall refuses for all."""
    world, number = job.begin("abc"), job.round()
    await_links(job, "abc")
    before = refuse_for(job, "abc")
    job.await_that(lambda: all(it.accuses for it in job.records()), "accusations of all", 30)

    def answered() -> bool:
        records = by_key(job)
        return all(records[NODES_PREFIX + node].beat > beat for node, beat in before.items())

    job.await_that(answered, "answers of all", 30)
    time.sleep(2.0)
    assert job.round() == number, job.document()
    assert all(len(job.noted(name, 0.0)) == 1 for name in "abc"), world


@soak
@every_store
def test_an_agent_whose_own_links_stand_is_accused_only_once_it_is_killed(job: Job) -> None:
    """As where its listener has died, or a firewall refuses for it."""
    world, number = job.begin("abc"), job.round()
    await_links(job, "abc")
    refuse_for(job, "b")
    time.sleep(3.0)
    assert not any(it.accuses for it in job.records())
    assert job.round() == number, job.document()
    assert all(len(job.noted(name, 0.0)) == 1 for name in "abc"), world
    label, killed = job.label("b"), job.agents["b"].kill()
    job.await_begun("ac", after=killed)
    document = job.document()
    assert document is not None
    assert f"lost {label}: its process is gone" in document.reason


@soak
def test_an_agent_that_stands_still_for_half_its_lease_is_not_lost(job: Job) -> None:
    job.begin("abc")
    number = job.round()
    await_links(job, "abc")
    job.agents["b"].signal(signal.SIGSTOP)
    time.sleep(LEASE / 2)
    job.agents["b"].signal(signal.SIGCONT)
    time.sleep(LEASE)
    assert job.round() == number, job.document()


@soak
def test_an_agent_that_stands_still_for_two_leases_is_lost_by_its_lease(job: Job) -> None:
    job.begin("abc")
    number = job.round()
    await_links(job, "abc")
    began, label = time.monotonic(), job.label("b")
    job.agents["b"].signal(signal.SIGSTOP)
    job.await_begun("ac", after=began, timeout=2 * LEASE + 45)
    # It had beaten an interval before, at most.
    assert time.monotonic() - began > LEASE - 1.1 * DEFAULTS["keep_alive_interval"]
    document = job.document()
    assert document is not None
    assert f"lost {label}: lease ran out" in document.reason
    assert job.round() > number
    job.agents["b"].signal(signal.SIGCONT)
    job.await_begun("abc", after=time.monotonic(), timeout=90)


@soak
def test_connections_that_are_destroyed_restart_nobody(job: Job) -> None:
    world, number = job.begin("abc"), job.round()
    await_links(job, "abc")
    chance = random.Random(7)
    ports = [record.link for record in job.records()]
    for _ in range(100):
        for port in chance.sample(ports, chance.randint(1, 3)):
            destroy("state", "established", f"sport = :{port}")
        time.sleep(chance.uniform(0.0, 0.4))
    time.sleep(2.0)
    assert job.round() == number, job.document()
    assert all(len(job.noted(name, 0.0)) == 1 for name in "abc"), world


@soak
def test_rdzv_run_waits_for_no_lease_to_learn_why_its_workers_failed(
    store: RunningStore, tmp_path: Path, record_property: Measure
) -> None:
    options = {"nodes": "2:3", "links": "true", "max_restarts": None, **DEFAULTS}
    with closing(Job(tmp_path, store, launcher=RDZV_RUN, **options)) as job:
        job.begin("abc")
        await_links(job, "abc")
        workers = [pid for name in "ac" for pid in job.agents[name].workers()]
        killed = job.agents["b"].kill()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        # A failure that counts would end the job: there are no restarts.
        world = job.await_begun("ac", after=killed)
        document = job.document()
        assert document is not None
        # The lease had nothing to tell any more.
        assert f"lost {job.label('b')}: its process is gone" in document.reason
        for name in "ac":
            job.await_line(name, "the workers failed because the round is over")
    record_property("last worker began again, s", round(max(world.began.values()) - killed, 2))
