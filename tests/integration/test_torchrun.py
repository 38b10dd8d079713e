"""Real torchrun agents, TCPStore sharing as torch has it by default; nodes die.

Where nodes are killed, and under torch's own handler, the workers train with torch and gloo;
elsewhere they are those of `programs.train`. Times are measured and reported; they are
asserted only with wide margins.
"""

from __future__ import annotations

import signal
import time

import pytest

from rdzv_plugins.protocol.documents import STATE_KEY
from tests import Measure
from tests.integration.jobs import ATTEMPTS, LEASE, PATIENCE, TRAINS_WITH_TORCH, Begin, Pause, Run
from tests.integration.stores import RunningStore, every_store

# Above all that was measured on a busy machine (4.5 s), below what a second lease would cost.
SECOND_LEASE = 2 * LEASE - 0.3


@every_store
@pytest.mark.parametrize(
    "who",
    ["rank 0", *(pytest.param(who, marks=pytest.mark.soak) for who in ("leader", "middle rank"))],
)
def test_killed_node(begin: Begin, who: str, record_property: Measure) -> None:
    run = begin(script=TRAINS_WITH_TORCH)
    before = run.begin("abc")
    victim = {"rank 0": "a", "middle rank": "b", "leader": run.leader().name}[who]
    others = sorted({"a", "b", "c"} - {victim})
    killed = run.agents[victim].kill()
    world = run.await_world(others, after=killed, by_rank=True)
    pause = Pause.of(world, killed)
    report(record_property, pause)
    assert pause.began < SECOND_LEASE + polled(run)
    # From the checkpoint on: neither from the start nor from beyond what was trained.
    assert 10 <= world.resumed <= before.last_step


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("who", ["rank 0", "middle rank", "leader"])
def test_killed_nodes_ten_times(begin: Begin, who: str, record_property: Measure) -> None:
    # How long to wait for a replacement is the user's choice, and no part of what is measured.
    run = begin(
        script=TRAINS_WITH_TORCH, max_restarts=100, last_call_timeout=0.02, quarantine_after=0
    )
    run.begin("abc")
    for turn in range(10):
        world = run.worlds()[-1]
        names = [world.nodes[rank] for rank in range(3)]
        victim = {"rank 0": names[0], "middle rank": names[1], "leader": run.leader().name}[who]
        others = [name for name in names if name != victim]
        killed = run.agents[victim].kill()
        world = run.await_world(others, after=killed, by_rank=True)
        pause = Pause.of(world, killed)
        report(record_property, pause, f" {turn + 1}")
        assert pause.began < SECOND_LEASE
        # The replacement takes the address, and so the rank, of the node that it replaces.
        rank = names.index(victim)
        names[rank] = f"{victim[0]}{turn + 1}"
        run.start_at(names[rank], rank + 1)
        run.await_world(names, after=time.monotonic(), by_rank=True)


@every_store
@pytest.mark.parametrize("order", [pytest.param("last", marks=pytest.mark.soak), "first"])
def test_late_node(begin: Begin, order: str, record_property: Measure) -> None:
    run = begin()
    late, names = ("c", "abc") if order == "last" else ("a", "abc")
    run.begin("ab" if order == "last" else "bc")
    number = run.round()
    started = run.start_at(late).started
    ran = run.await_round(number)
    world = run.await_world(names, by_rank=True)
    pause = Pause.of(world, started)
    record_property("its agent in the round, s", round(ran - started, 2))
    report(record_property, pause)
    # From its agent's start; the agent's import of torch is within.
    assert pause.began < 20
    run.await_step(world, world.resumed + 10)


@pytest.mark.soak
def test_late_node_that_is_hinted_to_be_first(begin: Begin) -> None:
    run = begin(rank_order="hint")
    run.start_at("b", 2, rank=1)
    run.start_at("c", 3, rank=2)
    run.await_world("bc", by_rank=True)
    run.start_at("a", 9, rank=0)
    run.await_world("abc", by_rank=True)


@every_store
def test_sigterm(begin: Begin, record_property: Measure) -> None:
    # A lease that nobody could take for the time until a polled change is noticed.
    run = begin(keep_alive_max_attempt=3 * ATTEMPTS)
    run.begin("abc")
    number = run.round()
    told = run.agents["b"].signal(signal.SIGTERM)
    ran = run.await_round(number)
    world = run.await_world("ac", after=told, by_rank=True)
    record_property("next round runs, s", round(ran - told, 2))
    report(record_property, Pause.of(world, told))
    assert ran - told < 3 * LEASE - 1.5, (
        "the others waited for the lease of a node that said it left"
    )
    assert run.await_ends("b")["b"] != 0


@every_store
def test_killed_worker(begin: Begin, record_property: Measure) -> None:
    run = begin()
    before = run.begin("abc")
    killed = run.agents["b"].signal_workers(signal.SIGKILL)
    world = run.await_world("abc", after=killed + 1, by_rank=True)
    report(record_property, Pause.of(world, killed))
    assert not set(world.pids.values()) & set(before.pids.values())
    assert all(agent.process.poll() is None for agent in run.agents.values())


@every_store
def test_killed_node_replaced_at_once(begin: Begin, record_property: Measure) -> None:
    run = begin()
    run.begin("abc")
    killed = run.agents["b"].kill()
    run.start_at("d", 2)
    world = run.await_world(["a", "d", "c"], after=killed, by_rank=True)
    report(record_property, Pause.of(world, killed))


@every_store
@pytest.mark.parametrize("memory", [pytest.param("kept", marks=pytest.mark.soak), "lost"])
def test_outage_of_the_store(
    begin: Begin, store: RunningStore, memory: str, record_property: Measure
) -> None:
    if store.server is None:
        pytest.skip("the store is not ours to stop")
    server = store.server.nodes[0]
    run = begin()
    world = run.begin("ab")
    number = run.round()
    server.stop()
    # Two leases and more: whoever judged by a store that is away would have by now.
    steps_before = world.last_step
    time.sleep(20)
    run.read_events()
    assert world.last_step - steps_before > 100, "training stood still while the store was away"
    server.start(empty=memory == "lost")
    back = time.monotonic()
    run.await_that(
        lambda: (document := run.document()) is not None and document.round == number,
        "the living round in the store again",
        10,
    )
    record_property("round in the store again, s", round(time.monotonic() - back, 2))
    time.sleep(LEASE + 2)
    assert [agent.process.poll() for agent in run.agents.values()] == [None, None]
    assert run.worlds() == [world], "the outage started another round"
    run.await_step(world, world.last_step + 10)
    started = run.start_at("c").started
    late = run.await_world("abc", by_rank=True)
    report(record_property, Pause.of(late, started))
    assert run.round() == number + 1


@every_store
def test_end_and_second_run(begin: Begin) -> None:
    run = begin(closed_ttl=20)
    run.begin("ab")
    run.stop_training()
    assert run.await_ends("ab") == {"a": 0, "b": 0}
    run.start_at("c")
    assert run.await_ends("c")["c"] != 0
    assert "RendezvousClosedError" in run.agents["c"].log.read_text()
    run.await_that(lambda: run.client.get(STATE_KEY) is None, "the sweep of the closed run", 25)
    (run.folder / "stop").unlink()
    began = time.monotonic()
    run.start_at("a")
    run.start_at("b")
    world = run.await_world("ab", after=began, by_rank=True)
    run.await_step(world, world.resumed + 10)
    run.stop_training()
    assert run.await_ends("ab") == {"a": 0, "b": 0}


@every_store
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param(False, id="agent", marks=pytest.mark.soak),
        pytest.param(True, id="agent and workers"),
    ],
)
def test_stopped_leader(begin: Begin, workers: bool, record_property: Measure) -> None:
    run = begin()
    run.begin("abc")
    leader = run.leader()
    others = sorted({"a", "b", "c"} - {leader.name})
    stopped = leader.signal(signal.SIGSTOP, workers=workers)
    world = run.await_world(others, after=stopped, by_rank=True)
    report(record_property, Pause.of(world, stopped))
    assert run.leader().name in others
    time.sleep(max(0.0, stopped + 3 * LEASE - time.monotonic()))
    resumed = leader.signal(signal.SIGCONT, workers=workers)
    world = run.await_world("abc", after=resumed, by_rank=True)
    report(record_property, Pause.of(world, resumed), " after SIGCONT")
    assert leader.process.poll() is None
    assert run.leader().name in others, "the leader that woke up took the lead again"


@pytest.mark.soak
def test_torch_handler(begin: Begin, record_property: Measure) -> None:
    run = begin(script=TRAINS_WITH_TORCH, handler="torch")
    run.begin("abc")
    killed = run.agents["a"].kill()
    world = run.await_world("bc", after=killed, timeout=2 * PATIENCE)
    report(record_property, Pause.of(world, killed))
    started = run.start_at("d", 9).started
    world = run.await_world("bcd", after=started, timeout=2 * PATIENCE)
    report(record_property, Pause.of(world, started), " late node")


def polled(run: Run) -> float:
    """How much later than on a store that pushes may a node notice a change."""
    return 0.0 if run.client.capabilities.push else run.client.longest_poll


def report(record_property: Measure, pause: Pause, suffix: str = "") -> None:
    record_property(f"workers began{suffix}, s", round(pause.began, 2))
    record_property(f"trained{suffix}, s", round(pause.trained, 2))
