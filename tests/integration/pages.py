"""Pages of the docs: their blocks of commands, and the terminals in which a reader runs them."""

from __future__ import annotations

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

__all__ = ["DOCS", "PATIENCE", "README", "START", "Terminal", "blocks", "seen"]

README = Path(__file__).resolve().parents[2] / "README.md"
DOCS = README.parent / "docs"
START = DOCS / "start"

# A lease of 15 s and another one where the store was away, an import of torch by three workers on
# two cores, and time to spare.
PATIENCE = 120.0

_STEP = re.compile(r"step (\d+) in a world of (\d+), loss")


def blocks(page: Path) -> list[tuple[str, str]]:
    """What stands behind the backquotes of each block of the page, and its text, in their order."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


class Terminal:
    """A command of a page in a shell, in the current folder."""

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
    """Wait for what a page promises; a command that has ended promises nothing more."""

    def over() -> bool:
        return condition() or all(it.process.poll() is not None for it in terminals)

    if not until(over, PATIENCE) or not condition():
        for terminal in terminals:
            sys.stderr.write(f"--- terminal ---\n{terminal.shown}\n")
        raise TimeoutError("the page promises more")
