"""What torchrun was told, where this process is torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["max_restarts"]

_MODULE = "torch.distributed.run"


def max_restarts() -> int | None:
    """torchrun's ``--max-restarts``; None in any other process, also in that of ``rdzv run``.

    torch hands it to the agent and not to the handler, so it is read from the command line again.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if Path(sys.argv[0]).name != "torchrun" and (spec is None or spec.name != _MODULE):
        return None
    # It imports the launcher, which only torchrun's own process has loaded.
    from torch.distributed.run import parse_args

    try:
        return int(parse_args(sys.argv[1:]).max_restarts)  # type: ignore[no-untyped-call]
    except SystemExit:
        return None  # A program of that name, with arguments of its own.
