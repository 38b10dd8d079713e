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
from tests.integration.hosts import bring_up_loopback

README = Path(__file__).resolve().parents[2] / "README.md"
# To which the README leads a reader whose job trains, or who has no server.
COMMANDS = README.parent / "docs" / "commands.md"

# A lease of 15 s and another one where the store was away, an import of torch by three workers on
# two cores, and time to spare.
PATIENCE = 120.0

SERVE = "rdzv serve --port 6379\n"

CLEAN = "rdzv clean -i job2"

# The line of the job on the quorum, and what differs in each terminal.
ON_QUORUM, LOCAL_ADDR = "rdzv run --local-addr", "--local-addr=127.0.0.1 "
ON_REDIS = "rdzv run --rdzv-backend=redis"

_STEP = re.compile(r"step (\d+) in a world of (\d+), loss")


def blocks() -> list[str]:
    """The blocks of commands of the README and of its page of commands."""
    text = README.read_text() + COMMANDS.read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [text for language, text in found if not language]


def block(beginning: str) -> str:
    """The only block that begins so."""
    (found,) = (text for text in blocks() if text.startswith(beginning))
    return found


TRAIN = (README.parent / "examples" / "train.py").read_text()
STEPS = int(re.findall(r"^STEPS = (.*)$", TRAIN, re.MULTILINE)[0])


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


class Terminals:
    """The reader's, one after the other; a context manager that ends what is left."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._opened: list[Terminal] = []

    def __enter__(self) -> Terminals:
        return self

    def __exit__(self, *_: object) -> None:
        for terminal in self._opened:
            terminal.end()

    def start(self, *digits: int) -> list[Terminal]:
        """Start an agent for each; the digit is the last one of its --local-addr, if it has one."""
        started = []
        for digit in digits:
            command = self._command.replace(LOCAL_ADDR, f"{LOCAL_ADDR.rstrip('1 ')}{digit} ")
            started.append(Terminal(command))
        self._opened += started
        return started

    def see(self, condition: Callable[[], bool]) -> None:
        seen(condition, *self._opened)

    def see_a_world_of(self, size: int, *terminals: Terminal, after: int = 0) -> Terminal:
        """Wait until these train together; the one that prints, which is rank 0's."""

        def printing() -> list[Terminal]:
            return [it for it in terminals if it.is_in_a_world_of(size, after)()]

        self.see(lambda: bool(printing()))
        return printing()[0]

    @property
    def reached(self) -> int:
        return max(step for it in self._opened for step, _ in it.steps)


def ended(*terminals: Terminal) -> list[int]:
    """Wait for their ends; their exit statuses."""
    seen(lambda: None not in [it.process.poll() for it in terminals], *terminals)
    return [it.process.returncode for it in terminals]


def interrupt(*terminals: Terminal) -> None:
    """Ctrl-C in one after the other."""
    for terminal in terminals:
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGINT)
    ended(*terminals)


def kill(*terminals: Terminal) -> float:
    """``kill -9`` of the agents; the time of it."""
    for terminal in terminals:
        os.kill(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait()
    return time.monotonic()


def example() -> dict[str, object]:
    """The first hour, once.

    Nothing depends on how fast the commands on the run are: it trains for longer than a test may
    take, until Ctrl-C.
    """
    export, lines = of_commands("quorum")
    early = {line: ask(export, line) for line in lines if "status" in line or "history" in line}
    Path("train.py").write_text(TRAIN)
    with Terminals(block(ON_QUORUM)) as terminals:
        agents = dict(zip((3, 1, 2), terminals.start(3, 1, 2), strict=True))
        first = terminals.see_a_world_of(3, *agents.values())
        digit = next(it for it, agent in agents.items() if agent is first)
        before, killed = terminals.reached, kill(agents.pop(digit))
        terminals.see_a_world_of(2, *agents.values(), after=before)
        alone = time.monotonic() - killed
        (agents[digit],) = terminals.start(digit)
        terminals.see_a_world_of(3, *agents.values(), after=before)
        asked = {line: ask(export, line) for line in lines if "close" not in line}
        interrupt(*agents.values())
        reached = nearly_done()
        last = terminals.start(1, 2, 3)
        statuses = ended(*last)
        late = {line: ask(export, line) for line in early}
        return {
            "early": early, "asked": asked, "late": late, "alone": alone,
            "reached": reached, "statuses": statuses, "last": terminals.reached,
        }  # fmt: skip


def again() -> dict[str, object]:
    """What a reader does who kills two, and then goes through the hour anew, at once."""
    export, lines = of_commands("quorum")
    Path("train.py").write_text(TRAIN)
    with Terminals(block(ON_QUORUM)) as terminals:
        agents = dict(zip((1, 2, 3), terminals.start(1, 2, 3), strict=True))
        terminals.see_a_world_of(3, *agents.values())
        # Two are killed, and the third is started again with them.
        kill(agents[1], agents[3])
        before = terminals.reached
        interrupt(agents[2])
        agents = dict(zip((1, 2, 3), terminals.start(1, 2, 3), strict=True))
        terminals.see_a_world_of(3, *agents.values(), after=before)
        interrupt(*agents.values())
        nearly_done()
        statuses = ended(*terminals.start(1, 2, 3))

        # Again from the top: whoever comes when the others have ended is alone.
        nothing_left = terminals.start(2, 1, 3)
        terminals.see(lambda: any("trained to step" in it.shown for it in nothing_left))
        interrupt(*nothing_left)
        Path("job1.pt").unlink()
        anew = terminals.start(1, 2, 3)
        terminals.see_a_world_of(3, *anew)
        asked = {line: ask(export, line) for line in lines if "close" in line}
        for terminal in anew:
            interrupt(terminal)
        return {
            "statuses": statuses, "asked": asked,
            "nothing left": "".join(it.shown for it in nothing_left),
            "anew": min(step for it in anew for step, _ in it.steps),
        }  # fmt: skip


def store() -> dict[str, object]:
    """The same on a server: two terminals, of which one is killed; then again, at once."""
    server = Terminal(SERVE)
    export, lines = of_commands("redis")
    Path("train.py").write_text(TRAIN)
    try:
        with Terminals(block(ON_REDIS)) as terminals:
            agents = terminals.start(1, 2)
            first = terminals.see_a_world_of(2, *agents)
            before = terminals.reached
            kill(first)
            agents.remove(first)
            terminals.see_a_world_of(1, *agents, after=before)
            agents += terminals.start(1)
            terminals.see_a_world_of(2, *agents, after=before)
            asked = {line: ask(export, line) for line in lines if line != CLEAN}
            served = ask(export, SERVE)
            interrupt(*agents)
            nearly_done("job2.pt")
            statuses = ended(*terminals.start(1, 2))
            (closed,) = terminals.start(1)
            statuses += ended(closed)
            asked[CLEAN] = ask(export, CLEAN)
            (nothing_left,) = terminals.start(1)
            statuses += ended(nothing_left)
            return {
                "asked": asked, "served": served, "statuses": statuses, "closed": closed.shown,
                "nothing left": nothing_left.shown,
            }  # fmt: skip
    finally:
        server.end()


def of_commands(backend: str) -> tuple[str, list[str]]:
    """The export and the lines under "Looking at a run", without their comments."""
    export, *lines = block(f"export RDZV_BACKEND={backend}").splitlines()
    return export, [line.partition(" # ")[0].strip() for line in lines]


def nearly_done(checkpoint: str = "job1.pt") -> int:
    """Put it some seconds before the end, as if it had trained on; returns the step it had."""
    import torch

    saved = torch.load(checkpoint)
    reached = int(saved["step"])
    torch.save({**saved, "step": STEPS - 200}, checkpoint)
    return reached


def ask(export: str, line: str) -> tuple[int, str]:
    """The exit status and the output of a line under "Looking at a run"."""
    terminal = Terminal(f"bash -c '{export}; {line}'")
    # `rdzv watch` does not end by itself.
    with suppress(subprocess.TimeoutExpired):
        terminal.process.wait(6 if "watch" in line else 60)
    runs_on = terminal.process.poll() is None and "watch" in line
    terminal.end()
    return 0 if runs_on else terminal.process.returncode, terminal.shown


def torchrun() -> dict[str, object]:
    """torchrun itself: one node trains, and ends when it is told to."""
    Path("train.py").write_text(TRAIN)
    server = Terminal(SERVE)
    terminal = Terminal(block("torchrun --rdzv-backend"))
    try:
        seen(terminal.is_in_a_world_of(1), terminal)
        os.kill(terminal.process.pid, signal.SIGTERM)
        return {"status": terminal.process.wait(PATIENCE), "shown": terminal.shown}
    finally:
        terminal.end()
        server.end()


if __name__ == "__main__":
    bring_up_loopback()
    chapters = {"example": example, "again": again, "store": store, "torchrun": torchrun}
    json.dump(chapters[sys.argv[1]](), sys.stdout)
