"""Recipes of two nodes: one is killed, the other trains on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import Measure
from tests.integration.readme import seen
from tests.recipes.pages import Node, block, descendants, kill, page, shorten, take

# The page, its script and other files, how its command begins, the workers of a node.
RECIPES = [
    ("lightning", ["lightning/train.py"], "torchrun", 1),
    ("accelerate", ["accelerate/train.py"], "torchrun", 2),
    ("accelerate", ["accelerate/train.py"], "export PET_RDZV_ID", 2),
    ("environment", ["train.py", "environment/job.env"], "set -a", 1),
]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis", "folder")
@pytest.mark.parametrize(("name", "files", "command", "workers"), RECIPES)
def test_a_node_is_killed(
    name: str, files: list[str], command: str, workers: int, record_property: Measure
) -> None:
    take(name, *files)
    shorten()
    nodes = [Node(block(name, command)) for _ in range(2)]
    try:
        seen(lambda: any(it.is_in_a_world_of(2 * workers)() for it in nodes), *nodes)
        # Rank 0 alone prints.
        first, second = sorted(nodes, key=lambda it: not it.steps)
        before = first.steps[-1][0]
        first.die()
        seen(second.is_in_a_world_of(workers, after=before), second)
        resumed = second.steps[0][0]
        # From the last checkpoint, which may be one step newer than what was seen.
        assert before < resumed <= before + 60
        assert second.process.wait(120) == 0, second.shown
        assert second.steps[-1][0] == 600
        record_property("resumed", f"killed after step {before}, next line of step {resumed}")
    finally:
        for node in nodes:
            node.end()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis", "folder")
@pytest.mark.parametrize("component", ["dist.ddp", "elastic.py"])
def test_torchx(component: str) -> None:
    take("torchx", "train.py", "torchx/elastic.py")
    shorten()
    job = Node(block("torchx", f"torchx run -s local_cwd {component}"))
    try:
        seen(job.is_in_a_world_of(2), job)
        killed, _ = agents(job)
        kill(killed)
        seen(job.is_in_a_world_of(1, after=job.steps[-1][0]), job)
        job.process.wait(120)
        assert job.steps[-1] == (600, 1)
        # As the page says: local_cwd counts the replica that was killed.
        assert job.process.returncode != 0
        assert "reports the job as\nfailed" in page("torchx")
    finally:
        job.end()


def agents(job: Node) -> list[int]:
    """The torchrun processes of the job."""

    def is_agent(pid: int) -> bool:
        return b"torchrun\0" in Path(f"/proc/{pid}/cmdline").read_bytes()

    return [pid for pid in descendants(job.process.pid) if is_agent(pid)]
