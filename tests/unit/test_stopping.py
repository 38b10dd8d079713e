"""How workers are stopped with what they have started: real processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rdzv_plugins.process.guard import processes
from rdzv_plugins.process.stopping import stop
from rdzv_plugins.testing.harness import until

STUBBORN = "(trap '' TERM; READY; exec sleep 600) &"


def never() -> None:
    """No node is lost."""


class Worker:
    """A shell in a session of its own; it writes ``ready`` once it has begun all it starts."""

    def __init__(self, folder: Path, script: str) -> None:
        script = f"cd {folder}; {script.replace('READY', 'touch ready')}"
        self.process = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
        self.pid = self.process.pid
        assert until((folder / "ready").exists, 20)

    def left(self) -> list[int]:
        return [pid for pid in processes([self.pid]) if pid != self.pid]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in tmp_path.glob("*.pid"):
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        pytest.param(f"{STUBBORN} exec sleep 600", "1 of them by SIGKILL", id="stubborn"),
        # timeout makes a process group of its own.
        pytest.param("timeout 600 sleep 600 & READY; exec sleep 600", "", id="another group"),
        pytest.param("sleep 600 & READY; exit 3", "0 of them by SIGKILL", id="ended"),
        pytest.param(f"{STUBBORN} kill -9 $$", "1 of them by SIGKILL", id="killed"),
        pytest.param(f"sleep 600 & {STUBBORN} exit", "left 2 of their", id="two kinds"),
    ],
)
def test_nothing_is_left_of_a_worker(
    folder: Path, script: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(folder, script)
    if not script.endswith("exec sleep 600"):
        worker.process.wait(20)
    stop({0: worker.pid}, signal.SIGTERM, 1.0, never)
    assert not processes([worker.pid]).keys() - {worker.pid}
    assert worker.process.wait(0.1) is not None
    assert told in caplog.text
    assert bool(told) is bool(caplog.text)


def test_what_a_wrapper_has_started_has_as_long_as_its_worker(folder: Path) -> None:
    """A shell ends at once, while the script in it saves; the shell of another has crashed."""
    saves = "(trap 'sleep 1; touch saved; exit' TERM; touch ready; while :; do sleep 0.1; done) &"
    worker = Worker(folder, f"{saves} wait")
    (folder / "other").mkdir()
    other = Worker(folder / "other", f"{STUBBORN} exit 1")
    other.process.wait(20)
    stop({0: worker.pid, 1: other.pid}, signal.SIGTERM, 60.0, never)
    assert (folder / "saved").exists()
    assert not other.left()


def test_a_loss_that_shows_meanwhile_shortens_the_time(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(folder, "trap '' TERM; READY; exec sleep 600")
    shows = iter([None, None, 0.2])
    stop({3: worker.pid}, signal.SIGTERM, 600.0, lambda: next(shows))
    assert worker.process.wait(0.1) == -signal.SIGKILL
    assert f"s get SIGKILL: local rank 3 (pid {worker.pid})" in caplog.text


def test_a_session_of_its_own_is_out_of_reach(folder: Path) -> None:
    script = "setsid sh -c 'echo $$ > free.pid; touch ready; exec sleep 600' & exec sleep 600"
    worker = Worker(folder, script)
    stop({0: worker.pid}, signal.SIGTERM, 1.0, never)
    assert worker.process.wait(0.1) == -signal.SIGTERM
    os.kill(int((folder / "free.pid").read_text()), 0)


def test_workers_without_a_session_of_their_own_are_stopped_too() -> None:
    """Python's own start methods give them none."""
    with subprocess.Popen(["sleep", "600"]) as worker:
        stop({0: worker.pid}, signal.SIGTERM, 60.0, never)
        assert worker.wait(0.1) == -signal.SIGTERM


def test_a_process_with_the_pid_of_a_reaped_worker_is_let_be(folder: Path) -> None:
    """A process of another parent stands for it."""
    Worker(folder, "sleep 600 & echo $! > free.pid; READY").process.wait(20)
    stranger = int((folder / "free.pid").read_text())
    stop({0: stranger}, signal.SIGTERM, 0.1, never)
    assert stranger in processes([stranger])
