"""A node that fails ends no run that others can go on with; real agents on real stores.

Two nodes train with ``--nnodes=1:3``; a third comes and fails. Beside torchrun's agents, whose
workers fail with the third's, the two need a restart each; `rdzv run` counts none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rdzv_plugins.protocol.documents import Phase
from tests.fleet.agents import RDZV_RUN, TORCHRUN
from tests.integration.hosts import in_namespaces
from tests.integration.jobs import PATIENCE, Begin, Run, runs
from tests.integration.launchers import NO_ROOM
from tests.integration.stores import RunningStore, kind_of, running

# How Python is to run the third node's launcher, the script, and what the others are told of it.
BROKEN = {
    "no program": ((), ("--no-python", "/none/train"), "its agent failed (FileNotFoundError: "),
    "no room": (NO_ROOM, ("train.py",), "its agent failed (OSError: [Errno 28] No space left"),
    "script": ((), ("--no-python", "/bin/sh", "-c", "exit 3"), "its workers failed"),
}


@pytest.fixture(scope="module", params=["redis", pytest.param("etcd-v3", marks=pytest.mark.soak)])
def store(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    with running(kind_of(request.param)) as started:
        yield started


@pytest.fixture
def begin(store: RunningStore, tmp_path: Path) -> Iterator[Begin]:
    with runs(store, tmp_path, nodes="1:3", run_id=tmp_path.name, quarantine_after=3) as make:
        yield make


def restarts(launcher: Sequence[str]) -> int | None:
    return 3 if launcher == TORCHRUN else None


def has_a_strike(run: Run, host: str) -> bool:
    """An old node may have one too: its worker loses a peer that stops for the newcomer."""
    document = run.document()
    return document is not None and host in [it.host for it in document.strikes]


def is_open(run: Run) -> bool:
    document = run.document()
    return document is not None and document.phase is not Phase.CLOSED


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        pytest.param(TORCHRUN, "script", id="script torchrun"),
        pytest.param(RDZV_RUN, "script", id="script rdzv run"),
        pytest.param(TORCHRUN, "no program", id="no program torchrun"),
        pytest.param(RDZV_RUN, "no program", id="no program rdzv run", marks=pytest.mark.soak),
        pytest.param(TORCHRUN, "no room", id="no room torchrun", marks=pytest.mark.soak),
        pytest.param(RDZV_RUN, "no room", id="no room rdzv run", marks=pytest.mark.soak),
    ],
)
def test_a_newcomer_that_fails_leaves_the_others_alone(
    begin: Begin, launcher: Sequence[str], how: str
) -> None:
    python, script, why = BROKEN[how]
    if python:
        in_namespaces("tests")  # Skips where there are none.
    run = begin(launcher=launcher, max_restarts=restarts(launcher))
    broken = begin(launcher=(*python, *launcher), max_restarts=restarts(launcher), script=script)
    run.begin("ab")
    broken.start_at("c")
    assert broken.await_ends("c") == {"c": 1}
    ended = time.monotonic()
    world = run.await_world("ab", after=ended)
    run.await_step(world, world.last_step + 10)
    assert is_open(run)
    assert has_a_strike(run, "127.0.0.3")
    # The history is written about a second after the round began.
    (said,) = run.await_that(
        lambda: [row.reason for row in run.archive.rows() if "left (" in row.reason],
        "the leave in the history",
        PATIENCE,
    )
    assert f"127.0.0.3[{broken.agents['c'].pid}] left ({why}" in said
    log = broken.agents["c"].log.read_text()
    assert f"this node leaves the run, which goes on without it: {why}" in log
    run.stop_training()
    assert run.await_ends("ab") == {"a": 0, "b": 0}


@pytest.mark.soak
def test_a_newcomer_whose_workers_fail_since_another_node_was_lost_stays(begin: Begin) -> None:
    """With one restart its first failure would cost the others their last one; but they need it."""
    run = begin(nodes="2:3", launcher=TORCHRUN, max_restarts=1)
    run.begin("ab")
    run.start_at("c")
    world = run.await_world("abc")
    run.await_step(world, world.resumed + 5)
    killed = run.agents["a"].kill()
    world = run.await_world("bc", after=killed)
    run.await_step(world, world.resumed + 5)
    assert is_open(run)
    run.stop_training()
    assert run.await_ends("bc") == {"b": 0, "c": 0}
