"""Follows the README to the letter, in a network of its own, where port 6379 is free.

Run as a program (see `test_readme`) in an empty folder. It prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rdzv_plugins.testing.harness import until
from tests.integration.namespaces import bring_up_loopback

README = Path(__file__).resolve().parents[2] / "README.md"

# A lease of 15 s, an import of torch by two workers on two cores, and time to spare.
PATIENCE = 90.0

SERVE = "rdzv serve --port 6379\n"

# Asked before a job and after its end, too; and what frees an id at once.
EARLY = ("rdzv status -i job1", "rdzv history -i job1")
CLEAN = "rdzv clean -i job1"

_STEP = re.compile(r"step (\d+) in a world of (\d+), loss")


def blocks(language: str = "") -> list[str]:
    """The README's blocks of code in a language, in their order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    return [text for its_language, text in found if its_language == language]


def block(beginning: str, language: str = "") -> str:
    """The README's only block of code that begins so."""
    (found,) = (text for text in blocks(language) if text.startswith(beginning))
    return found


STEPS = int(re.findall(r"^STEPS = (.*)$", block("import os", "python"), re.MULTILINE)[0])


class Terminal:
    """A command of the README in a shell, in the current folder."""

    def __init__(self, command: str) -> None:
        self._shown = Path(f"terminal-{time.monotonic_ns()}.txt")
        bin_folder = str(Path(sys.executable).parent)
        with self._shown.open("w") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
            )  # fmt: skip

    @property
    def shown(self) -> str:
        return self._shown.read_text()

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The lines of train.py: step and world size."""
        return [(int(step), int(size)) for step, size in _STEP.findall(self.shown)]

    def is_in_a_world_of(self, size: int, after: int = 0) -> Callable[[], bool]:
        """Whether its last line is of such a world, and of a later step than ``after``."""
        return lambda: bool(self.steps) and self.steps[-1][1] == size and self.steps[-1][0] > after

    def end(self) -> None:
        """End whatever is left, orphaned workers too."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def seen(condition: Callable[[], bool], *terminals: Terminal) -> None:
    """Wait for what the README promises; a command that has ended promises nothing more."""

    def over() -> bool:
        return condition() or all(it.process.poll() is not None for it in terminals)

    if not until(over, PATIENCE) or not condition():
        for terminal in terminals:
            sys.stderr.write(f"--- terminal ---\n{terminal.shown}\n")
        raise TimeoutError("the README promises more")


def example() -> dict[str, object]:
    """The first hour: twice, slowly, and in part out of order.

    Two terminals; the one with rank 0 is killed and started again. Nothing depends on how fast the
    commands on the run are: it trains for longer than a test may take, until Ctrl-C.
    """
    lines = block("export RDZV_BACKEND").splitlines()[1:]
    early = {line: ask(line) for line in lines if command_of(line) in EARLY}
    Path("train.py").write_text(block("import os", "python"))
    command = block("rdzv run --rdzv-backend")
    terminals: list[Terminal] = []

    def start(count: int) -> list[Terminal]:
        started = [Terminal(command) for _ in range(count)]
        terminals.extend(started)
        return started

    def ended(*started: Terminal) -> list[int]:
        seen(lambda: None not in [it.process.poll() for it in started], *started)
        return [it.process.returncode for it in started]

    def interrupt(*started: Terminal) -> None:
        for terminal in started:
            os.killpg(terminal.process.pid, signal.SIGINT)
        ended(*started)

    try:
        start(2)
        seen(lambda: any(it.is_in_a_world_of(2)() for it in terminals), *terminals)
        # Rank 0 alone prints.
        first, second = sorted(terminals, key=lambda it: not it.is_in_a_world_of(2)())
        before = first.steps[-1][0]
        os.kill(first.process.pid, signal.SIGKILL)
        killed = time.monotonic()
        # Its lines are rank 0's, which it was not before.
        seen(second.is_in_a_world_of(1, after=before), *terminals)
        alone = time.monotonic() - killed
        (third,) = start(1)
        seen(
            lambda: any(it.is_in_a_world_of(2, after=before)() for it in (second, third)),
            *terminals,
        )
        asked = {line: ask(line) for line in lines[:-2]}
        interrupt(second, third)
        reached = nearly_done()
        last = start(2)
        statuses = ended(*last)
        late = {line: ask(line) for line in lines if command_of(line) in EARLY}

        # Again from the top, at once.
        served = ask(SERVE)
        (closed,) = start(1)
        statuses += ended(closed)
        asked |= {line: ask(line) for line in lines[-2:]}
        (nothing_left,) = start(1)
        statuses += ended(nothing_left)
        asked[CLEAN] = ask(CLEAN)
        Path("job1.pt").unlink()
        anew = start(2)
        seen(lambda: any(it.is_in_a_world_of(2)() for it in anew), *anew)
        interrupt(*anew)
        return {
            "early": {command_of(line): it for line, it in early.items()},
            "asked": {command_of(line): it for line, it in asked.items()},
            "late": {command_of(line): it for line, it in late.items()},
            "alone": alone, "reached": reached, "statuses": statuses, "served": served,
            "last": max(step for it in last for step, _ in it.steps),
            "closed": closed.shown, "nothing left": nothing_left.shown,
            "anew": min(step for it in anew for step, _ in it.steps),
        }  # fmt: skip
    finally:
        for terminal in terminals:
            terminal.end()


def command_of(line: str) -> str:
    """A line under "Inspecting a run" without its comment."""
    return line.partition(" # ")[0].strip()


def nearly_done() -> int:
    """Put the checkpoint 40 steps before the end, as if it had trained on; returns its step."""
    import torch

    saved = torch.load("job1.pt")
    reached = int(saved["step"])
    torch.save({**saved, "step": STEPS - 40}, "job1.pt")
    return reached


def ask(line: str) -> tuple[int, str]:
    """The exit status and the output of a line under "Inspecting a run"."""
    export = block("export RDZV_BACKEND").splitlines()[0]
    terminal = Terminal(f"bash -c '{export}; {line}'")
    # `rdzv watch` does not end by itself.
    with suppress(subprocess.TimeoutExpired):
        terminal.process.wait(6 if "watch" in line else 60)
    runs_on = terminal.process.poll() is None and "watch" in line
    terminal.end()
    return 0 if runs_on else terminal.process.returncode, terminal.shown


def torchrun() -> dict[str, object]:
    """torchrun itself: one node trains, and ends when it is told to."""
    Path("train.py").write_text(block("import os", "python"))
    terminal = Terminal(block("torchrun --rdzv-backend"))
    try:
        seen(terminal.is_in_a_world_of(1), terminal)
        os.kill(terminal.process.pid, signal.SIGTERM)
        return {"status": terminal.process.wait(PATIENCE), "shown": terminal.shown}
    finally:
        terminal.end()


if __name__ == "__main__":
    bring_up_loopback()
    server = Terminal(SERVE)
    try:
        json.dump({"example": example, "torchrun": torchrun}[sys.argv[1]](), sys.stdout)
    finally:
        server.end()
