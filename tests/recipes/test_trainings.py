"""As `tests.integration.test_trainings`, with more packages: sharded checkpoints need NumPy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import Measure
from tests.integration.jobs import runs
from tests.integration.stores import RunningStore
from tests.integration.test_trainings import drain_and_kill


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "example",
    ["fsdp/train.py", "lightning/train.py", "accelerate/train.py", "accelerate/trainer.py"],
)
def test_a_training_is_drained_and_killed(
    redis: str, tmp_path: Path, example: str, record_property: Measure
) -> None:
    store = RunningStore(name="redis", backend="redis", endpoint=redis, config={})
    with runs(store, tmp_path) as begin:
        drain_and_kill(begin, store, example, record_property)
