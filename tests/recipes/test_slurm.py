"""Slurm: a node is killed, then the whole job is preempted and queued again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rdzv_plugins.testing.harness import until
from tests import Measure
from tests.recipes.pages import block, take
from tests.recipes.slurm import Cluster

STEP = re.compile(r"step (\d+) in a world of (\d+), loss")


class Log:
    """The job's log, to which each of its runs appends."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def text(self) -> str:
        return self._file.read_text(errors="replace") if self._file.exists() else ""

    @property
    def steps(self) -> list[tuple[int, int]]:
        return [(int(step), int(size)) for step, size in STEP.findall(self.text)]

    def await_that(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        assert until(condition, seconds), f"not within {seconds} s: {what}\n{self.text[-8000:]}"

    def await_world(self, size: int) -> int:
        """Wait for a new line of a world of this size; returns its step."""
        known = len(self.steps)
        self.await_that(
            lambda: any(it[1] == size for it in self.steps[known:]), f"a world of {size}"
        )
        return self.steps[-1][0]


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("redis")
def test_a_node_is_killed_and_the_job_is_queued_again(
    folder: Path, slurm: Cluster, record_property: Measure
) -> None:
    take("slurm", "train.py", "slurm/train.sbatch")
    # The cluster is one machine of two cores: three workers that import torch at once are slow.
    submitted = slurm.ask("bash", "-c", block("slurm", "export RDZV_ENDPOINT"))
    job = submitted.removeprefix("Submitted batch job ")
    assert job.isdigit(), submitted
    log = Log(folder / f"train-{job}.log")
    step = log.await_world(3)

    slurm.kill_node("node2")
    after = log.await_world(2)
    assert after > step
    record_property("killed", f"after step {step}; two nodes went on at step {after}")
    log.await_that(lambda: "down" in slurm.ask("sinfo", "--nodes=node2"), "node2 down")
    # Slurm knows of the loss, and lets the job run.
    assert log.await_world(2) > after
    assert slurm.ask("squeue", "--noheader", "--format=%t") == "R"

    slurm.start_node("node2")
    log.await_that(lambda: "idle" in slurm.ask("sinfo", "--nodes=node2"), "node2 idle")
    before = log.steps[-1][0]
    urgent = slurm.ask("sbatch", "--partition=urgent", "--nodes=3", "--wrap=true")
    assert urgent.startswith("Submitted"), urgent
    await_restart(slurm, log, job, 1)
    assert "PREEMPTION" in log.text
    resumed = log.await_world(3)
    assert resumed > before - 20
    record_property("preempted", f"after step {before}; three nodes went on at step {resumed}")

    # What Slurm does before the time limit, because of --signal.
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    before = log.steps[-1][0]
    await_restart(slurm, log, job, 2)
    assert log.await_world(3) > before - 20
    assert all(f"slurm-{job}-{restart}" in log.text for restart in range(3))
    slurm.ask("scancel", job)


def await_restart(slurm: Cluster, log: Log, job: str, restarts: int) -> None:
    def runs_again() -> bool:
        # Else Slurm lets the job wait for two minutes.
        slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        shown = slurm.ask("scontrol", "show", "job", job)
        return f"Restarts={restarts} " in shown and "JobState=RUNNING" in shown

    log.await_that(runs_again, f"restart {restarts}")
