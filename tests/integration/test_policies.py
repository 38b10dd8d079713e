"""Real torchrun agents under policies: when a run grows, and when it is given up."""

from __future__ import annotations

import signal
import time

from tests import Measure
from tests.integration.jobs import Begin
from tests.integration.stores import every_store

LAST_CALL = 15.0


@every_store
def test_a_scale_up_stops_training_for_no_last_call(begin: Begin, record_property: Measure) -> None:
    """It costs a healthy job what a restart costs, however long it waits for newcomers."""
    run = begin(nodes="2:4", last_call_timeout=LAST_CALL)
    before = run.begin("ab")
    run.await_step(before, before.resumed + 10)
    run.start_at("c")
    larger = run.await_world("abc", timeout=60 + LAST_CALL)
    scale_up = min(larger.stepped.values()) - before.last_step_at
    # One that stopped training for the last call would stand still for longer than that.
    assert scale_up < LAST_CALL
    # A restart of as many workers on this machine, for comparison.
    run.await_step(larger, larger.resumed + 10)
    killed = run.agents["b"].signal_workers(signal.SIGKILL)
    again = run.await_world("abc", after=killed + 1)
    restart = min(again.stepped.values()) - larger.last_step_at
    record_property("stands still, s", f"{scale_up:.2f} at a scale-up, {restart:.2f} at a restart")


@every_store
def test_newcomers_wait_for_min_uptime(begin: Begin) -> None:
    # Longer than a forked agent takes to start on a loaded machine.
    run = begin(nodes="1:3", min_uptime=25)
    run.start_at("a")
    run.await_that(lambda: "round 0: rank 0" in run.agents["a"].log.read_text(), "round 0", 60)
    began = time.monotonic()
    agent = run.start_at("b")
    run.await_that(lambda: "waits as a spare" in agent.log.read_text(), "word of the spare", 25)
    assert "lets newcomers in later (min_uptime=25" in agent.log.read_text()
    world = run.await_world("ab", by_rank=True)
    # The round formed up to a look at the log before.
    assert min(world.stepped.values()) - began > 25 - 5


@every_store
def test_newcomers_come_in_at_a_checkpoint(begin: Begin, record_property: Measure) -> None:
    """The demo's training calls saved() each time that it has saved one."""
    run = begin(nodes="1:2", grow="checkpoint")
    saves = {"checkpoint-every": 100}
    run.start_at("a", training=saves)
    before = run.await_world("a")
    run.start_at("b", training=saves)
    world = run.await_world("ab", by_rank=True)
    lost = before.last_step - world.resumed
    record_property("steps that are done again", f"{lost} of {before.last_step}")
    # At any other moment half of the hundred steps between two checkpoints would be.
    assert 0 <= lost <= 30


@every_store
def test_a_run_without_progress_ends_with_93(begin: Begin) -> None:
    # Nobody is new: a node that is leaves where its workers fail.
    run = begin(nodes="2:2", max_restarts=100, no_progress_rounds=2, no_progress_uptime=1000)
    run.begin("ab")
    killed = run.agents["a"].signal_workers(signal.SIGKILL)
    run.await_world("ab", after=killed + 1, by_rank=True)
    run.agents["b"].signal_workers(signal.SIGKILL)
    assert run.await_ends("ab") == {"a": 93, "b": 93}
    said = "no progress: 2 rounds in a row ran for less than 1000 s"
    assert all(said in run.agents[name].log.read_text() for name in "ab")
