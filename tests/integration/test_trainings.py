"""The trainings of examples/ lose no step to a drain, and after a kill what followed their save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import Measure
from tests.fleet.agents import RDZV_RUN, TORCHRUN
from tests.integration.jobs import Begin
from tests.integration.programs import PROGRAMS
from tests.integration.stores import RunningStore
from tests.integration.test_orders import rdzv

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORKER = str(PROGRAMS / "example.py")


def drain_and_kill(
    begin: Begin,
    store: RunningStore,
    example: str,
    record_property: Measure,
    launcher: Sequence[str] = RDZV_RUN,
) -> None:
    """Train on three nodes, drain one of them, then kill one."""
    run = begin(nodes="1:3", launcher=launcher, script=(WORKER,))
    for name in "abc":
        run.start_at(name, training={"example": EXAMPLES / example})
    three = run.await_world("abc", by_rank=True)
    run.await_step(three, 30)
    rdzv(run, store, "drain", "127.0.0.3")
    two = run.await_world("ab", by_rank=True)
    (asked,) = {it.step for it in run.events if it.event == "asked"}
    assert two.resumed == three.last_step == asked
    # Not at a checkpoint, since a kill may hit it before or after.
    run.await_step(two, two.resumed // 20 * 20 + 45)
    killed = run.agents["b"].kill()
    one = run.await_world("a", after=killed)
    saves = [it for it in run.events if it.event == "saved" and it.rank == 0]
    assert one.resumed == max(it.step for it in saves if it.master == two.master)
    record_property(
        "steps", f"drained at {three.last_step}, killed at {two.last_step}, back at {one.resumed}"
    )


@pytest.mark.parametrize(
    ("example", "launcher"),
    [
        ("train.py", RDZV_RUN),
        pytest.param("train.py", TORCHRUN, marks=pytest.mark.full),
    ],
    ids=["rdzv run", "torchrun"],
)
def test_a_training_with_torch_alone(
    begin: Begin,
    store: RunningStore,
    example: str,
    launcher: Sequence[str],
    record_property: Measure,
) -> None:
    drain_and_kill(begin, store, example, record_property, launcher)
