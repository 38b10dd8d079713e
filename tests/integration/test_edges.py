"""Where jobs die: real torchrun agents, signals, ends, and ids that are used twice.

The workers import no torch and do as they are told, so that what is measured is the rendezvous.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import STATE_KEY, Outcome, Status
from tests import Measure, replace
from tests.integration import forked
from tests.integration.agents import Run as Handlers
from tests.integration.agents import crash
from tests.integration.jobs import LEASE, Job
from tests.integration.stores import RunningStore, every_store

Submit = Callable[..., Job]

# A lease of 1.5 s, for tests that wait for many.
SHORT = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": 3}
SHORT_LEASE = 1.5

soak = pytest.mark.soak


@pytest.fixture
def submit(store: RunningStore, tmp_path: Path) -> Iterator[Submit]:
    """Makes a job on the store, or on another."""
    jobs: list[Job] = []

    def make(store: RunningStore = store, **options: object) -> Job:
        jobs.append(Job(tmp_path / str(len(jobs)), store, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@every_store
def test_spare_of_a_job_that_succeeds(submit: Submit, record_property: Measure) -> None:
    job = submit(nodes="1:1")
    job.begin("a")
    job.start_at("b")
    job.await_record("b", Status.SPARE)
    done = job.finish("a")
    assert job.await_ends("ab", 30) == {"a": 0, "b": 0}
    record_property("all agents ended, s", round(time.monotonic() - done, 2))
    assert job.noted("b") == []


@every_store
@pytest.mark.parametrize("who", ["a", pytest.param("b", marks=soak)])
def test_workers_that_fail_for_good_while_the_others_hang(
    submit: Submit, who: str, record_property: Measure
) -> None:
    job = submit(nodes="2:2", max_restarts=0)
    job.begin("ab")
    failed = job.finish(who, 1)
    statuses = job.await_ends("ab", LEASE + 10)
    record_property("all agents ended, s", round(time.monotonic() - failed, 2))
    assert 0 not in statuses.values(), statuses
    rank = "ab".index(who)
    why = f"its workers failed (rank {rank} exited with 1); closed by {job.label(who)}"
    job.await_line("ab".replace(who, ""), why)
    end = job.archive.rows()[-1]
    assert (end.outcome, end.reason) == (Outcome.FAILED, why)


@every_store
@pytest.mark.parametrize(("done", "works"), [("a", "b"), pytest.param("b", "a", marks=soak)])
def test_a_node_that_is_done_lets_nobody_disturb_the_others(
    submit: Submit, done: str, works: str, record_property: Measure
) -> None:
    job = submit(nodes="1:3")
    began = min(job.begin("ab").began.values())
    job.finish(done)
    job.await_record(done, Status.DONE)  # Else the next node may come first, and rightly gets in.
    job.start_at("c")
    job.await_record("c")
    job.assert_noted(works, ["begin"], began, 2 * LEASE)
    finished = job.finish(works)
    assert job.await_ends("abc", 30) == {"a": 0, "b": 0, "c": 0}
    record_property("all agents ended, s", round(time.monotonic() - finished, 2))
    assert [job.noted(name, began) for name in "abc"] == [["begin", "end"], ["begin", "end"], []]


@every_store
@pytest.mark.parametrize(
    ("nodes", "who"),
    [
        ("3:3", "leader"),
        ("3:3", "other"),
        # Within the last call.
        pytest.param("2:3", "leader", marks=soak),
        pytest.param("2:3", "other", marks=soak),
    ],
)
def test_sigterm_while_nodes_gather(
    submit: Submit, nodes: str, who: str, record_property: Measure
) -> None:
    # A lease so long that waiting for it is no mistake of measurement, and a shorter interval.
    lease = 60
    job = submit(
        nodes=nodes, keep_alive_interval=3, keep_alive_max_attempt=20, last_call_timeout=100
    )
    for name in "ab":
        job.start_at(name)
        job.await_record(name)
    leader = job.leader().name
    leaves, stays = "ab" if (leader == "a") == (who == "leader") else "ba"
    told = job.agents[leaves].signal(signal.SIGTERM)
    job.start_at("c")
    job.start_at("d")
    for name in "cd":
        job.await_record(name)
    came = time.monotonic()
    world = job.await_begun([stays, "c", "d"], timeout=lease + 30)
    ran = max(world.began.values())
    record_property("the others run, s after the signal", round(ran - told, 2))
    record_property("s after the last came", round(ran - came, 2))
    assert ran - told < lease - 20, "the others waited for the lease of a node that was told to go"
    assert job.await_ends(leaves, 10)[leaves] != 0


@every_store
@pytest.mark.parametrize("who", ["b", pytest.param("a", marks=soak)])
def test_sigterm_to_a_node_that_saves_for_long(
    submit: Submit, who: str, record_property: Measure
) -> None:
    saving = 10
    job = submit()
    others = sorted(set("abc") - {who})
    job.begin(others)
    # Last, so that its workers are not told to end when another comes.
    job.start_at(who, training={"saving": saving})
    job.await_begun("abc")
    told = job.agents[who].signal(signal.SIGTERM)
    world = job.await_begun(others, after=told, timeout=saving + 30)
    ran = max(world.began.values())
    record_property("the others run, s after the signal", round(ran - told, 2))
    assert ran - told < 6
    # Its workers have the time that they need, and its end is no news.
    assert job.await_event(who, "saved", saving + 20) - told > saving
    assert job.await_ends(who, 20)[who] != 0
    job.assert_noted(others[0], ["sigterm", "saved", "begin"], told, LEASE)


@every_store
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_run_that_nobody_leads_any_more_leaves_nothing(
    submit: Submit, number: signal.Signals, record_property: Measure
) -> None:
    seconds = 15  # Ten leases.
    job = submit(nodes="2:2", **SHORT, abandoned_ttl=seconds)
    world = job.begin("ab")
    if number is signal.SIGKILL:
        # It lives longer than that, and loses nothing.
        alive, first = set(job.stored()), job.round()
        deadline = time.monotonic() + seconds + 2 * SHORT_LEASE
        while time.monotonic() < deadline:
            lost = alive - set(job.stored())
            assert not lost or job.round() > first, lost
            time.sleep(0.1)
        killed = job.agents["b"].signal_workers(signal.SIGKILL)
        world = job.await_begun("ab", after=killed)
    before = job.stored()
    assert STATE_KEY in before
    for agent in job.agents.values():
        agent.signal(number, workers=number is signal.SIGKILL)
    assert 0 not in job.await_ends("ab", 30).values()
    ended = time.monotonic()
    job.await_that(lambda: job.stored() == [], f"the end of {before}", seconds + 10)
    record_property("no key is left, s", round(time.monotonic() - ended, 2))
    job.start_at("c", 1)
    job.start_at("d", 2)
    job.await_begun("cd", after=max(world.began.values()))
    for name in "cd":
        job.finish(name)
    assert job.await_ends("cd", 30) == {"c": 0, "d": 0}


@every_store
def test_two_jobs_without_an_id(
    store: RunningStore, submit: Submit, record_property: Measure
) -> None:
    shared = replace(store, config={**store.config, "prefix": f"edges-{secrets.token_hex(4)}"})
    first, second = (submit(shared, nodes="1:2", run_id="none") for _ in range(2))
    first.begin("a")
    second.start_at("b")
    second.await_record("b")
    line = second.await_line("b", "none", "default", first.label("a"))
    record_property("told", line)


@every_store
def test_an_id_that_a_full_run_holds(submit: Submit, record_property: Measure) -> None:
    job = submit(nodes="1:1")
    job.begin("a")
    job.start_at("b")
    job.await_record("b", Status.SPARE)
    record_property("told", job.await_line("b", job.run_id, "full", "spare", job.label("a")))


def test_the_agents_logs_tell_an_outage_and_a_leave(submit: Submit, store: RunningStore) -> None:
    job = submit(nodes="1:2")
    job.begin("ab")
    assert store.server is not None
    server = store.server.nodes[0]
    server.stop()
    stopped = time.monotonic()
    for name in "ab":
        job.await_line(name, "could not be reached", "what runs goes on")
    away = time.monotonic() - stopped
    server.start()
    for name in "ab":
        line = job.await_line(name, "the store is back after")
        # The outage began with the last answer, not with the first failure.
        told = re.search(r"the store is back after (\d+\.\d) s", line)
        assert told, line
        assert float(told[1]) > away - 0.1
    job.agents["b"].signal(signal.SIGTERM)
    job.await_line("b", f"{job.label('b')} has left")
    job.await_line("a", f"{job.label('b')} left")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rdzv-endpoint=redis://127.0.0.1:1"], "could not be reached"),
        (["--rdzv-conf=last_cal_timeout=1"], "did you mean 'last_call_timeout'"),
    ],
)
def test_what_torchrun_prints_begins_with_what_to_do(options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=redis", *options]
    ended = forked.run([*command, "--rdzv-id=x", "--nnodes=1", "train.py"])
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if "NumPy" not in line]
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("E")) :]
    assert "run 'x': " in lines[0]
    assert said in lines[0]
    assert said in lines[-1]
    assert len(lines) < 50
    assert not any("/redis/" in line for line in lines)


@soak
@pytest.mark.timeout(400)
def test_the_agents_logs_say_nothing_while_nothing_happens(submit: Submit) -> None:
    job = submit(nodes="2:2")
    job.begin("ab")
    for name in "ab":
        job.await_line(name, "round 0: rank")
    before = job.lines("ab")
    time.sleep(300)
    assert job.lines("ab") == before


def test_the_default_of_max_restarts_is_warned_of(submit: Submit) -> None:
    words = ("--max-restarts=0", "rdzv run")
    warned = submit(nodes="1:2", max_restarts=0)
    warned.start_at("a")
    warned.await_line("a", *words)
    for job in (submit(nodes="1:2", max_restarts=3), submit(nodes="1:1", max_restarts=0)):
        job.begin("a")
        assert not any(all(word in line for word in words) for line in job.lines("a"))


def test_the_agents_logs_say_what_happens(submit: Submit, record_property: Measure) -> None:
    """torchrun sets no logging up, and its own loggers show warnings only."""
    job = submit(nodes="3:3")
    job.start_at("a")
    job.await_record("a")
    job.start_at("b")
    here = f"run '{job.run_id}': waiting for 1 node: 2 of 3 are here"
    shown = [job.await_line("a", "] " + here, "s to join_timeout")]
    job.await_line("b", f"waiting for a round of 3 nodes, led by {job.label('a')}")
    job.start_at("c")
    world = job.await_begun("abc")
    for rank, name in enumerate("abc"):
        shown.append(job.await_line(name, f"joined as {job.label(name)}, --nnodes=3:3"))
        shown.append(job.await_line(name, f"round 0: rank {rank} of 3, MASTER {world.master}"))
    lost = job.label("c")
    job.agents["c"].kill()
    for name in "ab":
        shown.append(job.await_line(name, f"round 1 forms: lost {lost}: "))
    shown.append(job.await_line("a", f"{here}; missing: lost {lost}"))
    job.start_at("d", 3)
    job.await_begun("abd")
    shown.append(job.await_line("b", "round 1: rank 1 of 3", f"(lost {lost}: "))
    for name in "abd":
        job.finish(name)
    job.await_ends("abd", 30)
    for name in "abd":
        shown.append(job.await_line(name, "the run is closed: its workers succeeded; closed by"))
    record_property("lines", shown)
    for name in "abd":
        own = [line for line in job.lines(name) if "rdzv_plugins." in line]
        assert len(own) < 20, own


@every_store
@pytest.mark.parametrize("who", ["b", pytest.param("a", marks=soak)])
def test_a_lost_node_is_named_though_the_others_fail_first(
    submit: Submit, who: str, record_property: Measure
) -> None:
    job = submit(nodes="2:3")
    job.begin("abc")
    number = job.round()
    others = sorted(set("abc") - {who})
    workers = [pid for name in others for pid in job.agents[name].workers()]
    killed = job.agents[who].signal(signal.SIGKILL, workers=True)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    world = job.await_begun(others, after=killed)
    record_property("the others run, s", round(max(world.began.values()) - killed, 2))
    reason = job.await_cause(number)
    record_property("reason", reason)
    parts = reason.split(";")
    # Not who has found it gone.
    lost = " ".join(part.partition(": ")[0] for part in parts if "lost" in part)
    failed = " ".join(part for part in parts if "failed" in part)
    assert [name for name in "abc" if job.label(name) in lost] == [who], reason
    assert [name for name in "abc" if job.label(name) in failed] == others, reason
    row = job.archive.rows()[-1]
    assert [(it.name, it.rank) for it in row.lost] == [(job.label(who), "abc".index(who))]
    assert {it.name for it in row.failed} == {job.label(name) for name in others}
    assert job.label(who) in job.status()
    assert any("lost" in line and job.label(who) in line for line in job.lines(others))


@every_store
@pytest.mark.parametrize(
    ("fourth", "options"),
    [
        (False, {}),
        # Nobody ends the dead round: not for the loss, nor for newcomers.
        (False, {"restart_on_loss": False, "resize_interval": 600}),
        (True, {}),
        # Newcomers are held back for the sake of those who train, of whom nobody is left.
        (True, {"restart_on_loss": False, "resize_interval": 600, "min_uptime": 600}),
    ],
    ids=[
        "with 3",
        "with 3 that are held back",
        "with the fourth in time",
        "with the fourth, held back",
    ],
)
def test_killed_job_that_is_submitted_again(
    submit: Submit, fourth: bool, options: dict[str, object], record_property: Measure
) -> None:
    join_timeout = 8
    job = submit(nodes="4:4", **SHORT, **options)
    job.begin("abcd")
    for agent in job.agents.values():
        agent.kill()
    for place, name in enumerate("efg", 1):
        job.start_at(name, place, join_timeout=60 if fourth else join_timeout)
    for name in "efg":
        job.await_record(name)
    came = time.monotonic()
    if fourth:
        job.start_at("h", 4)
        world = job.await_begun("efgh")
        record_property("all run, s after three came", round(max(world.began.values()) - came, 2))
        return
    statuses = job.await_ends("efg", SHORT_LEASE + join_timeout + 10)
    record_property("all ended, s after they came", round(time.monotonic() - came, 2))
    assert 0 not in statuses.values()
    for name in "efg":
        assert "RendezvousTimeoutError" in job.agents[name].log.read_text()


class TorchAgent(SimpleElasticAgent):
    """torch's own agent in a thread, whose workers run until they are told that they are done."""

    def __init__(self, handler: StoreRendezvousHandler) -> None:
        spec = WorkerSpec(
            role="role",
            local_world_size=1,
            rdzv_handler=handler,
            entrypoint="played",
            max_restarts=3,
            monitor_interval=0.05,
        )
        super().__init__(spec, exit_barrier_timeout=30)
        self.handler = handler
        self.world: tuple[Any, ...] = ()
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._launch, daemon=True)
        self.thread.start()

    def _launch(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self.error = error
        finally:
            # As torch's launcher does.
            self.handler.shutdown()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.world = worker_group.group_world_size, worker_group.master_port
        return {0: 0}

    def _stop_workers(self, *_: object, **__: object) -> None:
        self.world = ()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        state = WorkerState.SUCCEEDED if self.done.is_set() else WorkerState.HEALTHY
        ranks = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=state, return_values=ranks)

    def _shutdown(self, *_: object, **__: object) -> None:
        pass


@every_store
@pytest.mark.parametrize("rank", [0, 1])
def test_death_just_after_release(
    store: RunningStore, run_id: str, rank: int, record_property: Measure
) -> None:
    # The agents of a round wait for a word of each other before they start workers.
    run = Handlers(store, run_id)
    handlers = [run.handler((2, 3), rank_order="hint", rank=str(place)) for place in range(4)]
    victim = handlers.pop(rank)
    replacement = handlers.pop()
    released = threading.Thread(target=victim.next_rendezvous, daemon=True)
    released.start()
    agents = [TorchAgent(handler) for handler in handlers]
    try:
        released.join(30)
        crash(victim)
        died = time.monotonic()
        agents.append(TorchAgent(replacement))

        deadline = died + SHORT_LEASE + 10
        while len(worlds := {agent.world for agent in agents}) > 1 or 3 not in next(iter(worlds)):
            # () is the world of an agent that waits for one, or for a word of the others.
            states = [(agent.world, agent.error) for agent in agents]
            assert all(agent.thread.is_alive() for agent in agents), states
            assert time.monotonic() < deadline, states
            time.sleep(0.02)
        record_property("the others run, s", round(time.monotonic() - died, 2))
        for agent in agents:
            agent.done.set()
        for agent in agents:
            agent.thread.join(10)
        assert [(agent.thread.is_alive(), agent.error) for agent in agents] == [(False, None)] * 3
    finally:
        for handler in [*handlers, replacement]:
            handler.shutdown()
