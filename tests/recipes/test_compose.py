"""Docker Compose: one of three agents is killed, and started again."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rdzv_plugins.testing.harness import until
from tests import Measure
from tests.integration.hosts import bring_up_loopback
from tests.recipes.docker import Engine, mounts
from tests.recipes.pages import block, take

STEP = re.compile(r"step (\d+) in a world of (\d+), loss")


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    bring_up_loopback()
    with closing(Engine(tmp_path_factory.mktemp("docker"))) as started:
        yield started


@pytest.mark.timeout(500)
def test_an_agent_is_killed(folder: Path, engine: Engine, record_property: Measure) -> None:
    take("compose", "train.py", "compose/compose.yml", "compose/Dockerfile")
    # Instead of `docker compose build`: the same commands in images of this host's files.
    path = f"{Path(sys.executable).parent}:/usr/bin"
    agent = {
        "volumes": [*mounts(), f"{folder}/train.py:/train.py:ro"],
        "environment": {"PATH": path},
    }
    ours = {"services": {"agent": agent}}
    (folder / "ours.json").write_text(json.dumps(ours))
    engine.environ["COMPOSE_FILE"] = f"compose.yml{os.pathsep}ours.json"
    engine.import_image("train")

    start, follow = block("compose", "docker compose up").splitlines()
    run(engine, start)
    first = await_world(engine, follow, 3, after=0)
    run(engine, block("compose", "docker kill"))
    second = await_world(engine, follow, 2, after=first)
    run(engine, block("compose", "docker start"))
    third = await_world(engine, follow, 3, after=second)
    record_property("steps", f"three agents {first}, two {second}, three {third}")


def run(engine: Engine, command: str) -> None:
    done = engine.run(*command.split())
    assert done.returncode == 0, done.stderr


def await_world(engine: Engine, follow: str, size: int, *, after: int) -> int:
    """Wait until the agents' logs have a later step of a world of this size; returns it."""
    command = follow.replace(" --follow", "").split()
    reached = 0
    logs = ""

    def found() -> bool:
        nonlocal reached, logs
        logs = engine.run(*command).stdout
        steps = [int(step) for step, its_size in STEP.findall(logs) if int(its_size) == size]
        reached = max(steps, default=0)
        return reached > after

    assert until(found, 120), f"no world of {size} after step {after}\n{logs[-8000:]}"
    return reached
