"""The pages of docs/recipes, and the nodes that run their commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from tests.integration.pages import Terminal, seen

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / "recipes" / f"{name}.md").read_text()


def block(name: str, beginning: str) -> str:
    """The page's only block of code that begins so."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page(name), re.DOTALL | re.MULTILINE)
    (found,) = (text for text in blocks if text.startswith(beginning))
    return str(found)


def take(name: str, *files: str) -> None:
    """Copy files of examples/ that the page names into the current folder."""
    for file in files:
        assert f"examples/{file}" in page(name), f"{name}.md does not name {file}"
        shutil.copy(ROOT / "examples" / file, Path(file).name)


def shorten() -> None:
    """The training of examples/train.py takes longer than most tests need."""
    script = Path("train.py")
    script.write_text(script.read_text().replace("20_000", "600"))


class Node(Terminal):
    """Commands of a page on a node; lines as those of examples/train.py tell of its training."""

    def __init__(self, commands: str) -> None:
        super().__init__(f"bash -c {shlex.quote(commands)}")

    def die(self) -> None:
        """As a host dies: its agent and its workers at once."""
        kill(self.process.pid)
        self.process.wait()

    end = die


def lose_one(commands: list[str], workers: int) -> str:
    """Start the nodes and kill that of rank 0: the others train to the end. Says what was seen.

    Args:
        commands: of each node
        workers: of each node
    """
    nodes = [Node(it) for it in commands]
    try:
        size = len(nodes) * workers
        seen(lambda: any(it.is_in_a_world_of(size)() for it in nodes), *nodes)
        # Rank 0 alone prints.
        first, *others = sorted(nodes, key=lambda it: not it.steps)
        before = first.steps[-1][0]
        first.die()
        size -= workers
        seen(lambda: any(it.is_in_a_world_of(size, after=before)() for it in others), *others)
        second = next(it for it in others if it.steps)
        resumed = second.steps[0][0]
        # From the last checkpoint, which may be one step newer than what was seen.
        assert before < resumed <= before + 60
        for other in others:
            assert other.process.wait(120) == 0, other.shown
        assert second.steps[-1][0] == 600
    finally:
        for node in nodes:
            node.end()
    return f"killed after step {before}, next line of step {resumed}"


def kill(pid: int) -> None:
    """Kill a process and all that it has started, also those in sessions of their own."""
    for process in (pid, *descendants(pid)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            children.setdefault(parent(int(folder.name)), []).append(int(folder.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def parent(pid: int) -> int:
    # The name, in brackets, may have spaces.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
