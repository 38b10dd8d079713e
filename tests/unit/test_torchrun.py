"""What torchrun was told is read where this process is torchrun, and nowhere else."""

from __future__ import annotations

import pytest

from rdzv_plugins.torch.torchrun import idle_arguments, max_restarts


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


@pytest.mark.parametrize("program", ["torchrun", "rdzv run"])
def test_arguments_of_torchs_static_rendezvous_are_named(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [program, "--nnodes=2", "train.py", "--node-rank=1"])
    assert idle_arguments() == []
    monkeypatch.setenv("PET_MASTER_ADDR", "node1")
    given = ["--node-rank=3", "--master_port=29400"]
    monkeypatch.setattr("sys.argv", [program, *given, "train.py"])
    assert [line.partition(" has no effect: ")[0] for line in idle_arguments()] == [
        "--node-rank=3", "--master-addr=node1", "--master-port=29400",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["train.py", *given])
    assert idle_arguments() == []
