"""What torchrun was told is read where this process is torchrun, and nowhere else."""

from __future__ import annotations

import pytest

from rdzv_plugins.torch_compat.torchrun import max_restarts


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["/usr/bin/torchrun", "--nnodes=1:2", "train.py"], 0),
        (["torchrun", "--max-restarts", "7", "train.py", "--max-restarts=1"], 7),
        (["torchrun", "--max_restarts=2", "-m", "train"], 2),
        (["torchrun", "--no-such-option"], None),
        (["rdzv run", "--max-restarts=7", "train.py"], None),
        (["train.py", "--max-restarts=7"], None),
    ],
)
def test_max_restarts(argv: list[str], found: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert max_restarts() == found


def test_its_environment_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setattr("sys.argv", ["torchrun", "train.py"])
    assert max_restarts() == 3
