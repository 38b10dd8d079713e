"""examples/gpu_check.py, which has no GPU here: it runs with gloo."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_trainings import EXAMPLES

FAULTS = ["worker", "agent", "stop"]


@pytest.mark.full  # Each agent and each worker imports torch anew.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["cold", "warm"])
def test_it_times_the_restart_after_each_fault(mode: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "gpu_check.py"), "--modes", mode, "--faults", *FAULTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no GPU, gloo" in done.stdout
    rows = re.findall(
        rf"^\| {mode} \| .* \| \d+\.\d s \| \d of 2 \| \d of [23] \|$", done.stdout, re.M
    )
    assert len(rows) == len(FAULTS), done.stdout
