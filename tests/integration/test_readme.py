"""Every command of the README, as it is written there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.observe.history import list_runs
from tests import Measure
from tests.integration.hosts import in_namespaces
from tests.integration.readme import (
    CLEAN,
    LOCAL_ADDR,
    ON_QUORUM,
    README,
    SERVE,
    STEPS,
    block,
    blocks,
)
from tests.integration.stores import RunningStore
from tests.integration.wheels import pip

ROOT = README.parent


def follow(chapter: str, folder: Path) -> Any:
    command = in_namespaces("tests.integration.readme", chapter)
    played = subprocess.run(
        command, stdout=subprocess.PIPE, cwd=folder, timeout=580,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert played.returncode == 0
    return json.loads(played.stdout)


def answers(asked: dict[str, tuple[int, str]]) -> None:
    for line, (status, shown) in asked.items():
        if "node9" in line and "--all-runs" not in line:
            # The job has no such host.
            assert (status, "nobody was excluded; --later" in shown) == (1, True), (line, shown)
            continue
        # `rdzv check` warns of loopback, and of a Redis without persistence.
        assert status in ((0, 1) if "rdzv check" in line else (0,)), (line, status, shown)
        assert "Traceback" not in shown


@pytest.mark.timeout(600)
def test_the_example_survives_a_kill_of_rank_0(tmp_path: Path, record_property: Measure) -> None:
    saw = follow("example", tmp_path)
    for status, shown in [*saw["early"].values(), *saw["late"].values()]:
        assert status != 0
        assert shown.count("\n") == 1
        assert "no run 'job1' is known at 127.0.0.1,127.0.0.2,127.0.0.3" in shown
    # It went on from the checkpoint, not from the beginning.
    assert 0 < saw["reached"] < STEPS
    assert saw["last"] == STEPS
    assert saw["statuses"] == [0, 0, 0]
    record_property("alone", f"{saw['alone']:.1f} s after the kill")
    asked = saw["asked"]
    answers(asked)
    assert "running round" in asked["rdzv status -i job1"][1]
    assert "round" in asked["rdzv history -i job1"][1]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_example_survives_a_reader_who_goes_through_it_again(tmp_path: Path) -> None:
    saw = follow("again", tmp_path)
    assert saw["statuses"] == [0, 0, 0]
    assert f"trained to step {STEPS}; to train anew, delete job1.pt" in saw["nothing left"]
    assert saw["anew"] == 1
    answers(saw["asked"])


@pytest.mark.timeout(600)
@pytest.mark.soak  # As `test_start` does with each store's page.
def test_the_example_on_a_server_survives_a_kill_of_rank_0(tmp_path: Path) -> None:
    saw = follow("store", tmp_path)
    asked = saw["asked"]
    answers(asked)
    assert "job2" in asked["rdzv list"][1]
    assert "round" in asked["rdzv history -i job2"][1]
    assert saw["served"] == [1, "rdzv: port 6379 of 127.0.0.1 is taken (Address already in use)\n"]
    # To the end; while the run is closed; with nothing left.
    assert saw["statuses"] == [0, 0, 1, 0]
    assert "run 'job2' is closed" in saw["closed"]
    assert CLEAN in saw["closed"]
    assert "Traceback" not in saw["closed"]
    assert f"trained to step {STEPS}; to train anew, delete job2.pt" in saw["nothing left"]


@pytest.mark.timeout(420)
def test_torchrun_takes_the_same_arguments(tmp_path: Path) -> None:
    saw = follow("torchrun", tmp_path)
    assert saw["status"] != 0, "SIGTERM ends it"
    assert "round 0: rank 0 of 1" in saw["shown"]


@pytest.mark.xdist_group("wheel")
@pytest.mark.parametrize(
    ("extras", "brought"), [("quorum", None), ("redis,embedded", "redis[hiredis]")]
)
def test_pip_installs_it_with_the_extra(
    wheel: Path, tmp_path: Path, extras: str, brought: str | None
) -> None:
    command = block(f'pip install "rdzv-plugins[{extras}]"').split()
    assert command[:2] == ["pip", "install"]
    # No index and no dependencies: what the extra brings is read from the metadata.
    offline = ["--no-index", "--no-deps", "--find-links", str(wheel.parent), "--target"]
    pip("install", command[2].strip('"'), *offline, str(tmp_path))
    asked = "from importlib.metadata import metadata; print(metadata('rdzv-plugins'))"
    told = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert all(f"Provides-Extra: {extra}\n" in told.stdout for extra in extras.split(","))
    if brought is None:
        assert f'extra == "{extras}"' not in told.stdout
    else:
        assert brought in told.stdout


@pytest.mark.full  # As the example.
@pytest.mark.timeout(300)
def test_the_demo_on_ones_own_server(store: RunningStore) -> None:
    line, _, says = block("make demo").splitlines()[0].partition("#")
    assert store.endpoint.startswith("redis://")
    assert "ENDPOINT=redis://" in says
    # The environment stands; where the system's Python is not ours, make would create another.
    command = f"{line} ENDPOINT={store.endpoint}"
    shown = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert shown.returncode == 0, shown.stderr
    assert f"the store is {store.endpoint}" in shown.stdout
    assert "three nodes train again" in shown.stdout
    assert any(run_id.startswith("demo-") for run_id in list_runs(store.open))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_demo_of_the_command() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(
        ["bash", "-c", block("rdzv demo")], capture_output=True, text=True, timeout=280,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    promised = re.findall(r"\d s  (\w+ (?:agents|nodes) .*?train)\b", README.read_text())
    assert len(promised) == 3
    assert [it for it in (*promised, "in a world of 2") if it not in shown.stdout] == []


def test_it_names_the_server_that_the_example_ran_on() -> None:
    assert block("rdzv serve") == SERVE
    assert CLEAN in block("export RDZV_BACKEND=redis")
    assert LOCAL_ADDR in block(ON_QUORUM)


def test_the_second_command_is_what_ci_runs() -> None:
    assert block("make demo").splitlines()[1].split()[:2] == ["make", "test"]
    assert (ROOT / ".ci" / "run").read_text().endswith("exec make test\n")


def test_no_command_is_left_out() -> None:
    tried = (
        "pip install", "rdzv serve", "torchrun --rdzv", "make demo", "rdzv run",
        "export RDZV_BACKEND", "rdzv demo",
    )  # fmt: skip
    assert not [it for it in blocks() if not it.startswith(tried)]
