"""Real agents and workers that save at one step before a planned change of their round."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from rdzv_plugins.observe.history import Row
from tests import Measure
from tests.fleet.agents import RDZV_RUN, TORCHRUN, World
from tests.integration.jobs import Begin, Run
from tests.integration.stores import RunningStore
from tests.integration.test_orders import rdzv

# The aim is 200, which take ten minutes.
REQUESTS = int(os.environ.get("RDZV_TEST_REQUESTS", "3"))
# No checkpoint but those that the run asks for.
NEVER = {"checkpoint-every": 1_000_000}


def begun(begin: Begin, names: str, **options: object) -> tuple[Run, World]:
    """A run that has trained some steps and saved none of them."""
    run = begin(nodes="1:4", launcher=RDZV_RUN, max_restarts=0, **options)
    for name in names:
        run.start_at(name, training=NEVER)
    world = run.await_world(names, by_rank=True)
    run.await_step(world, world.resumed + 30)
    await_steps_told(run)
    return run, world


def await_steps_told(run: Run) -> None:
    """Only then does a planned change of the round ask for a checkpoint."""
    run.await_that(lambda: all(it.step for it in run.records()), "the steps in all records", 30)


def terminate(run: Run, name: str, store: RunningStore) -> None:
    run.agents[name].process.send_signal(signal.SIGTERM)


def drain(run: Run, name: str, store: RunningStore) -> None:
    rdzv(run, store, "drain", f"127.0.0.{ord(name) - ord('a') + 1}")


@pytest.mark.parametrize("leave", [terminate, drain])
@pytest.mark.parametrize("name", "ac", ids=["leader", "follower"])
def test_a_planned_leave_loses_no_step(
    begin: Begin,
    store: RunningStore,
    leave: Callable[[Run, str, RunningStore], None],
    name: str,
    record_property: Measure,
) -> None:
    run, before = begun(begin, "abc")
    leave(run, name, store)
    after = run.await_world("abc".replace(name, ""), by_rank=True)
    record_property("steps", f"{before.last_step} before, goes on from {after.resumed}")
    assert after.resumed == before.last_step


@pytest.mark.timeout(60 + 20 * REQUESTS)
def test_all_ranks_save_at_one_step_at_each_request(begin: Begin, store: RunningStore) -> None:
    run, world = begun(begin, "abc")
    for _ in range(REQUESTS):
        known = len(run.events)
        rdzv(run, store, "restart")
        before, world = world, run.await_world("abc", after=time.monotonic(), by_rank=True)
        asked = [(it.step, it.rank) for it in run.events[known:] if it.event == "asked"]
        assert sorted(asked) == [(before.last_step, rank) for rank in range(3)]
        assert world.resumed == before.last_step
        await_steps_told(run)


def test_the_run_saves_once_if_all_nodes_leave(begin: Begin, store: RunningStore) -> None:
    run, before = begun(begin, "ab")
    for name in "ab":
        terminate(run, name, store)
    run.await_that(
        lambda: all(it.process.poll() is not None for it in run.agents.values()), "end", 30
    )
    run.read_events()
    again = run.start_at("c", training=NEVER)
    assert run.await_world("c").resumed == before.last_step
    assert again.process.poll() is None


def test_a_second_signal_ends_an_agent_at_once(begin: Begin, store: RunningStore) -> None:
    # With steps of a minute the run cannot save before the notice ends.
    run = begin(nodes="1:2", launcher=RDZV_RUN, max_restarts=0)
    agent = run.start_at("a", training={"pace": 60})
    run.await_that(lambda: any(it.step for it in run.records()), "its first step", 30)
    terminate(run, "a", store)
    run.await_that(lambda: "this node leaves once" in agent.log.read_text(), "the notice", 30)
    terminate(run, "a", store)
    run.await_that(lambda: agent.process.poll() is not None, "its end", 15)


def test_newcomers_ask_for_a_checkpoint(begin: Begin) -> None:
    run, before = begun(begin, "a", grow="checkpoint")
    run.start_at("b", training=NEVER)
    assert run.await_world("ab", by_rank=True).resumed == before.last_step


@pytest.mark.parametrize("launcher", [RDZV_RUN, TORCHRUN], ids=["rdzv run", "torchrun"])
def test_a_hang_ends_the_round_and_names_the_rank(
    begin: Begin, store: RunningStore, launcher: tuple[str, ...], record_property: Measure
) -> None:
    run = begin(nodes="1:3", launcher=launcher, step_timeout=2.5)
    run.begin("abc")
    before = run.round()
    stopped = run.agents["b"].signal_workers(signal.SIGSTOP)
    record_property("seconds", f"{run.await_round(before) - stopped:.1f} to the next round")
    run.await_world("abc", after=time.monotonic())
    document = run.document()
    assert document is not None
    assert "rank 1 on 127.0.0.2 stands at step" in document.reason
    assert "it answers no signal" in document.reason
    told = "of this node stood still; the stacks of its threads"
    logs = {name: run.agents[name].log.read_text() for name in "abc"}
    assert [name for name in "abc" if told in logs[name]] == ["b"]
    assert ", line" in logs["b"].partition(told)[2]
    assert all("no step for" in logs[name] for name in "abc")


def test_a_restart_tells_where_its_time_went_and_what_it_lost(
    begin: Begin, store: RunningStore, record_property: Measure
) -> None:
    run, before = begun(begin, "abc")
    killed = run.agents["c"].kill()
    after = run.await_world("ab", after=killed, timeout=60)
    taken = max(after.stepped.values()) - killed

    def told() -> Row | None:
        row = run.archive.rows()[-1]
        return row if row.nodes == 2 and row.trains_since is not None else None

    row = run.await_that(told, "the first step in the run's history", 30)
    assert row is not None
    assert row.seconds is not None
    record_property("phases", f"{row.took}; measured: {taken:.2f} s")
    assert [*row.seconds.phases][-2:] == ["started", "first_step"]
    assert sum(row.seconds.phases.values()) == pytest.approx(taken, abs=0.5 * taken)
    # Nobody has saved; a rank may have finished one step more than another.
    assert row.lost_steps in (before.last_step - 1, before.last_step)
    assert row.trained == pytest.approx(0, abs=0.5)
    found = json.loads(rdzv(run, store, "status", "--json"))
    assert 0 < found["goodput"] < 1
    assert f"; {row.lost_steps} steps lost" in rdzv(run, store, "history")
    assert "\ngoodput " in rdzv(run, store, "status")
