"""What workers can know of their round, as the agent's process hands it down."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rdzv_plugins
from rdzv_plugins.process.worker import (
    VARIABLE,
    CurrentRound,
    FencedError,
    current,
    hand_down,
    take_back,
)
from rdzv_plugins.settings.environment import ENVIRONMENT_PREFIX
from tests import replace

NOW = CurrentRound(
    run_id="run", round=3, world_id="3-abc", cause="n2[7] left", spares=1, domain="r7"
)


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests set them in this process."""
    for name in (VARIABLE, "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class TestVariable:
    def test_what_is_handed_down_arrives(self) -> None:
        hand_down(NOW)
        assert rdzv_plugins.current() == NOW

    @pytest.mark.parametrize("value", [None, "", "{", "[]", '{"round": "x"}'])
    def test_another_process_knows_of_no_round(self, value: str | None) -> None:
        if value is not None:
            os.environ[VARIABLE] = value
        assert current() is None

    def test_a_field_of_a_later_version_is_no_fault(self) -> None:
        os.environ[VARIABLE] = '{"run_id":"r","round":1,"world_id":"1-a","cause":"","more":[1]}'
        assert current() == CurrentRound(run_id="r", round=1, world_id="1-a", cause="")

    def test_a_worker_of_another_run_does_not_take_it_for_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other run has another backend's agent, which a worker of this one started."""
        hand_down(NOW)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
        assert current() is None
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        assert current() == NOW

    def test_only_who_handed_it_down_takes_it_back(self) -> None:
        first = hand_down(NOW)
        second = hand_down(CurrentRound(run_id="other", round=0, world_id="0-b", cause=""))
        take_back(first)
        assert VARIABLE in os.environ
        take_back(second)
        take_back(second)
        take_back(None)
        assert VARIABLE not in os.environ

    def test_it_does_not_look_like_an_option(self) -> None:
        """`rdzv check` tells of variables that do, and are none."""
        assert not VARIABLE.startswith(ENVIRONMENT_PREFIX)

    def test_a_worker_need_not_import_torch(self) -> None:
        code = (
            "import sys, rdzv_plugins; now = rdzv_plugins.current()\n"
            "print(now.round, now.cause, now.domain, 'torch' in sys.modules)"
        )
        hand_down(NOW)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout == "3 n2[7] left r7 False\n"


@pytest.mark.rule("fencing token")
class TestFence:
    """Whoever has the largest token last keeps all others out."""

    def test_an_older_round_is_kept_out(self, tmp_path: Path) -> None:
        file = tmp_path / "checkpoint.fence"
        wrote = []
        for token, world in ((5, "1-a"), (5, "1-a"), (9, "2-b")):
            hand_down(replace(NOW, fencing_token=token, world_id=world))
            with rdzv_plugins.fence(file):
                wrote.append(token)
        assert wrote == [5, 5, 9]
        for token, world in ((5, "1-a"), (8, "1-c"), (9, "2-other")):
            hand_down(replace(NOW, fencing_token=token, world_id=world))
            refused = pytest.raises(FencedError, match=rf"token 9, this worker's is {token}")
            with refused, rdzv_plugins.fence(file):
                wrote.append(token)
        assert wrote == [5, 5, 9]

    def test_a_process_that_is_no_worker_is_let_through(self, tmp_path: Path) -> None:
        with rdzv_plugins.fence(tmp_path / "checkpoint.fence"):
            pass
        assert not [*tmp_path.iterdir()]

    def test_an_error_inside_lets_the_fence_go(self, tmp_path: Path) -> None:
        hand_down(replace(NOW, fencing_token=1))
        with pytest.raises(ValueError, match="full"), rdzv_plugins.fence(tmp_path / "fence"):
            raise ValueError("full")
        hand_down(replace(NOW, fencing_token=2))
        with rdzv_plugins.fence(tmp_path / "fence"):
            pass

    def test_a_checkpoint_is_no_fence(self, tmp_path: Path) -> None:
        """Whoever gives the checkpoint itself keeps it."""
        hand_down(replace(NOW, fencing_token=1))
        for data in (b"weights", b"x" * 512, b"{}".ljust(600)):
            file = tmp_path / "checkpoint.pt"
            file.write_bytes(data)
            with pytest.raises(ValueError, match="is no fence"), rdzv_plugins.fence(file):
                pass
            assert file.read_bytes() == data

    @pytest.mark.parametrize("left", [b"", bytes(512)])
    def test_what_a_crash_before_the_first_write_leaves_is_a_new_fence(
        self, tmp_path: Path, left: bytes
    ) -> None:
        (tmp_path / "fence").write_bytes(left)
        hand_down(replace(NOW, fencing_token=1))
        with rdzv_plugins.fence(tmp_path / "fence"):
            pass
        hand_down(replace(NOW, fencing_token=0, world_id="0-a"))
        with pytest.raises(FencedError), rdzv_plugins.fence(tmp_path / "fence"):
            pass

    def test_a_long_id_is_fenced_too(self, tmp_path: Path) -> None:
        late = replace(NOW, run_id="\1" * 2000, fencing_token=2**62, world_id="2-b")
        hand_down(late)
        for _ in range(2):
            with rdzv_plugins.fence(tmp_path / "fence"):
                pass
        hand_down(replace(late, fencing_token=1, world_id="1-a"))
        with pytest.raises(FencedError), rdzv_plugins.fence(tmp_path / "fence"):
            pass

    def test_all_of_one_world_hold_it_whichever_token_they_know(self, tmp_path: Path) -> None:
        """A store that forgot has named a round twice, and one node began before that."""
        for token in (1, 2, 1):
            hand_down(replace(NOW, fencing_token=token))
            with rdzv_plugins.fence(tmp_path / "fence"):
                pass
        hand_down(replace(NOW, fencing_token=1, world_id="2-other"))
        with pytest.raises(FencedError, match="token 2"), rdzv_plugins.fence(tmp_path / "fence"):
            pass

    def test_a_process_that_holds_the_fence_does_not_wait_for_itself(self, tmp_path: Path) -> None:
        code = (
            "import os, sys, rdzv_plugins\n"
            "with rdzv_plugins.fence('fence'), rdzv_plugins.fence('./fence'):\n"
            "    print('inside')\n"
        )
        hand_down(replace(NOW, fencing_token=1))
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=30, check=True
        )
        assert done.stdout == b"inside\n"

    def test_a_handler_that_saves_does_not_wait_for_who_saves(self, tmp_path: Path) -> None:
        """A signal at any moment of a save, as SIGTERM where the script saves at it."""
        code = (
            "import signal, rdzv_plugins\n"
            "saved = 0\n"
            "def save(*_):\n"
            "    global saved\n"
            "    with rdzv_plugins.fence('fence'):\n"
            "        saved += 1\n"
            "save()\n"
            "signal.signal(signal.SIGALRM, save)\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0013)\n"
            "while saved < 1500:\n"
            "    save()\n"
            "signal.setitimer(signal.ITIMER_REAL, 0)\n"
        )
        hand_down(replace(NOW, fencing_token=1))
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=True)

    def test_threads_hold_it_one_after_the_other(self, tmp_path: Path) -> None:
        hand_down(replace(NOW, fencing_token=1))
        inside: list[int] = []
        most: list[int] = []

        def save(number: int) -> None:
            for _ in range(20):
                with rdzv_plugins.fence(tmp_path / "fence"):
                    inside.append(number)
                    most.append(len(inside))
                    time.sleep(0.0005)
                    inside.remove(number)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(save, range(8)))
        assert most == [1] * 160

    def test_what_was_forked_meanwhile_does_not_keep_it(self, tmp_path: Path) -> None:
        """As a loader's workers are, while another thread saves."""
        hand_down(replace(NOW, fencing_token=1))
        code = (
            "import os, sys, time, rdzv_plugins\n"
            "with rdzv_plugins.fence('fence'):\n"
            "    child = os.fork()\n"
            "    if child == 0:\n"
            "        time.sleep(60)\n"
            "        os._exit(0)\n"
            "print(child, flush=True)\n"
            "sys.stdin.read()\n"
            "os.kill(child, 9)\n"
        )
        forked = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdin=-1, stdout=-1)
        assert forked.stdout is not None
        assert forked.stdout.readline()
        hold = "import rdzv_plugins\nwith rdzv_plugins.fence('fence'): pass"
        try:
            subprocess.run([sys.executable, "-c", hold], cwd=tmp_path, timeout=20, check=True)
        finally:
            forked.communicate(b"", timeout=20)

    def test_an_error_names_the_file(self, tmp_path: Path) -> None:
        hand_down(replace(NOW, fencing_token=1))
        with pytest.raises(OSError, match="missing"), rdzv_plugins.fence(tmp_path / "missing/it"):
            pass
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))  # Like a disk that is full.
        try:
            with pytest.raises(OSError, match="fence"), rdzv_plugins.fence(tmp_path / "fence"):
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        with rdzv_plugins.fence(tmp_path / "fence"):
            pass

    def test_no_older_process_writes_after_a_newer_one(self, tmp_path: Path) -> None:
        """Twelve processes, each of a round of its own, write one checkpoint again and again."""
        code = (
            "import sys, time, rdzv_plugins\n"
            "from rdzv_plugins.process.worker import CurrentRound, FencedError, hand_down\n"
            "token, folder = int(sys.argv[1]), sys.argv[2]\n"
            "hand_down(CurrentRound(run_id='run', round=token, world_id=f'{token}-a', cause='',\n"
            "                       fencing_token=token))\n"
            "end = time.monotonic() + 1.0\n"
            "try:\n"
            "    while time.monotonic() < end:\n"
            "        with rdzv_plugins.fence(folder + '/fence'):\n"
            "            with open(folder + '/log', 'a') as log: log.write(f'{token}\\n')\n"
            "except FencedError:\n"
            "    pass\n"
        )
        processes = [
            subprocess.Popen([sys.executable, "-c", code, str(token), str(tmp_path)])
            for token in range(12, 0, -1)
        ]
        assert [process.wait(60) for process in processes] == [0] * 12
        wrote = [int(line) for line in (tmp_path / "log").read_text().split()]
        assert wrote == sorted(wrote)
        assert wrote[-1] == 12


# A worker that has read a line before it asks to end with its agent; it prints what came of it.
BEGINS = """
import os, sys, rdzv_plugins
sys.stdin.readline()
print(rdzv_plugins.end_with_agent(), flush=True)
"""
# An agent that starts a worker, and is killed before that asks.
AGENT = """
import os, subprocess, sys
from rdzv_plugins.process.worker import CurrentRound, hand_down
hand_down(CurrentRound(run_id="run", round=0, world_id="", cause="", agent=os.getpid()))
subprocess.Popen(sys.argv[1:], start_new_session=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
class TestEndWithAgent:
    def run(self, *program: str, **options: Any) -> tuple[int, str]:
        with subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        ) as process:
            said, _ = process.communicate("go\n", timeout=20)
            return process.returncode, said

    def test_its_parent_is_the_agent(self) -> None:
        hand_down(replace(NOW, agent=os.getpid()))
        assert self.run(sys.executable, "-c", BEGINS) == (0, "True\n")

    def test_a_shell_stands_in_between(self) -> None:
        hand_down(replace(NOW, agent=os.getpid()))
        shell = "sh", "-c", '"$@"; exit 0', "sh", sys.executable, "-c", BEGINS
        assert self.run(*shell, start_new_session=True) == (0, "False\n")

    def test_a_process_that_is_no_worker(self) -> None:
        assert self.run(sys.executable, "-c", BEGINS) == (0, "False\n")

    def test_the_agent_is_gone_before_it_asks(self) -> None:
        status, said = self.run(sys.executable, "-c", AGENT, sys.executable, "-c", BEGINS)
        assert (status, said) == (-9, "")
