"""Real torchrun agents whose checks fail: they stay out, and the others train."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import Measure
from tests.integration import forked
from tests.integration.jobs import Begin, Pause, Run
from tests.integration.stores import RunningStore, every_store


class Check:
    """A program that a node runs as its check.

    Attributes:
        bad: the program fails with the text of this file, if it is there.
        asked: a line for each time that it was run.
    """

    def __init__(self, folder: Path, script: str) -> None:
        self.bad, self.asked = folder / "bad", folder / "asked"
        self.path = folder / "check-gpus"
        self.path.write_text(f"#!/bin/sh\necho $$ >> {self.asked}\n{script}\n")
        self.path.chmod(0o755)

    @property
    def runs(self) -> list[int]:
        """The process ids of its runs so far."""
        return [*map(int, self.asked.read_text().split())] if self.asked.exists() else []


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path, f"cat {tmp_path}/bad || exit 0; exit 1")


def status(run: Run, store: RunningStore) -> dict[str, Any]:
    """What `rdzv status` prints for a program."""
    command = [sys.executable, "-m", "rdzv_plugins.cli", "status", "--json", "-i", run.run_id]
    said = forked.run([*command, *store.where])
    assert said.stdout, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    return found


def test_a_node_joins_once_its_check_passes(begin: Begin, tmp_path: Path) -> None:
    twice = Check(tmp_path, f'[ "$(wc -l < {tmp_path}/asked)" -gt 2 ] || {{ echo hot; exit 3; }}')
    run = begin()
    run.begin("ab")
    agent = run.start_at("c", check_command=twice.path)
    run.await_world("abc", by_rank=True)
    assert len(twice.runs) == 3
    log = agent.log.read_text()
    assert "this node is unfit and does not join: check-gpus: hot; it tries again in 1" in log
    assert "this node is fit again, and joins" in log
    leader = run.leader().log.read_text()
    assert leader.count("does not join: check-gpus: hot") == 1


@every_store
def test_a_participant_that_turns_unfit_is_left_out_at_once(
    begin: Begin, store: RunningStore, check: Check, record_property: Measure
) -> None:
    run = begin()
    for name in "ab":
        run.start_at(name)
    run.start_at("c", check_command=check.path, check_at="restart")
    before = run.await_world("abc", by_rank=True)
    run.await_step(before, before.resumed + 12)
    check.bad.write_text("GPU 3 is hot\n")
    failed = run.agents["c"].signal_workers(signal.SIGKILL)
    world = run.await_world("ab", after=failed, by_rank=True)
    pause = Pause.of(world, failed)
    record_property("trained, s", round(pause.trained, 2))
    # Far below rejoin_timeout, 72 s here, for which a node is waited for that says nothing.
    assert pause.began < 25
    document = run.document()
    assert document is not None
    assert " left (check-gpus: GPU 3 is hot)" in document.reason
    said = status(run, store)
    (node,) = (it for it in said["nodes"] if it["state"] == "unfit")
    assert (node["pid"], node["unfit"]) == (run.agents["c"].pid, "check-gpus: GPU 3 is hot")
    assert said["sentence"].endswith(f"unfit: {node['name']} (check-gpus: GPU 3 is hot)")
    check.bad.unlink()
    run.await_world("abc", after=time.monotonic(), by_rank=True, timeout=90)


def test_a_node_that_is_to_exit_disturbs_nobody(begin: Begin, check: Check) -> None:
    run = begin()
    before = run.begin("ab")
    number = run.round()
    check.bad.write_text("GPU 3 is hot\n")
    agent = run.start_at("c", check_command=check.path, on_unhealthy="exit")
    assert run.await_ends("c") == {"c": 1}
    said = "this node is unfit, and exits: check-gpus: GPU 3 is hot"
    assert said in agent.log.read_text()
    run.await_step(before, before.last_step + 10)
    assert run.round() == number


# The second interrupts the main thread as it ends the check.
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_ends_a_check_at_once(begin: Begin, tmp_path: Path, signals: int) -> None:
    hangs = Check(tmp_path, "trap '' TERM; while :; do sleep 1; done")
    run = begin()
    agent = run.start_at("a", check_command=hangs.path, check_timeout=1000)
    (pid,) = run.await_that(lambda: hangs.runs, "the check", 60)
    told = agent.signal(signal.SIGTERM)
    for _ in range(signals - 1):
        time.sleep(0.005)
        agent.signal(signal.SIGTERM)
    run.await_ends("a", timeout=30)
    assert time.monotonic() - told < 20
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert run.document() is None
