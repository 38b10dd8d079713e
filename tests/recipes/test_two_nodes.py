"""Recipes of two or three nodes: one is killed, the others train on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import Measure
from tests.integration.pages import seen
from tests.recipes.pages import Node, block, descendants, kill, lose_one, page, shorten, take

# The page, its script and other files, how its command begins, the workers of a node.
RECIPES = [
    ("lightning", ["lightning/train.py"], "rdzv run", 1),
    ("accelerate", ["accelerate/train.py"], "rdzv run", 2),
    ("accelerate", ["accelerate/train.py"], "export PET_LOCAL_ADDR", 2),
    ("environment", ["train.py", "environment/job.env"], "export PET", 1),
]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis", "folder")
@pytest.mark.parametrize(("name", "files", "command", "workers"), RECIPES)
def test_a_node_is_killed(
    name: str, files: list[str], command: str, workers: int, record_property: Measure
) -> None:
    take(name, *files)
    shorten()
    record_property("resumed", lose_one(terminals(block(name, command)), workers))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis", "folder")
@pytest.mark.parametrize(("name", "files", "command", "workers"), RECIPES[:2])
def test_a_node_is_killed_on_a_redis(
    name: str, files: list[str], command: str, workers: int, record_property: Measure
) -> None:
    """As one line of the page says."""
    take(name, *files)
    shorten()
    (on_redis,) = re.findall(r"`(--rdzv-backend=redis [^`]*)`, without `--local-addr`", page(name))
    shown = re.sub(
        r"--local-addr=\S+|--nnodes=\S+|--rdzv-(backend|endpoint)=\S+", "", block(name, command)
    )
    changed = shown.replace("--rdzv-id", f"{on_redis} --rdzv-id").replace("\\\n", "")
    record_property("resumed", lose_one([changed] * 2, workers))


def terminals(command: str) -> list[str]:
    """The command in each terminal: with a last digit of its own in three, or the same in two."""
    local, count = re.subn(r"(local.addr=127\.0\.0\.)1\b", r"\1{}", command, flags=re.IGNORECASE)
    return [local.format(digit) for digit in (1, 2, 3)] if count else [command] * 2


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis", "folder")
def test_a_node_of_a_tool_that_calls_torchrun_is_killed(record_property: Measure) -> None:
    take("environment", "train.py", "environment/job.env")
    shorten()
    assert "needs `PET_MAX_RESTARTS=100`" in page("environment")
    command = block("environment", "export PET").replace(
        "rdzv run", "PET_MAX_RESTARTS=100 torchrun"
    )
    record_property("resumed", lose_one(terminals(command), 1))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("redis", "folder")
@pytest.mark.parametrize(
    ("component", "launcher"), [("dist.ddp", "torchrun"), ("elastic.py", "rdzv run")]
)
def test_torchx(component: str, launcher: str) -> None:
    take("torchx", "train.py", "torchx/elastic.py")
    shorten()
    job = Node(block("torchx", f"torchx run -s local_cwd {component}"))
    try:
        seen(job.is_in_a_world_of(2), job)
        killed, _ = agents(job, launcher)
        kill(killed)
        seen(job.is_in_a_world_of(1, after=job.steps[-1][0]), job)
        job.process.wait(120)
        assert job.steps[-1] == (600, 1)
        # As the page says: local_cwd counts the replica that was killed.
        assert job.process.returncode != 0
        assert "reports the job as\nfailed" in page("torchx")
    finally:
        job.end()


def agents(job: Node, launcher: str) -> list[int]:
    """The processes of torchrun, or of `rdzv run`, of the job."""

    def is_agent(pid: int) -> bool:
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return f"/{launcher} " in words

    return [pid for pid in descendants(job.process.pid) if is_agent(pid)]
