"""``rdzv run``: torchrun, with an agent that knows the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer

__all__ = ["VERBATIM", "launch", "run"]

VERBATIM: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""What makes typer leave all arguments, ``--help`` too, to torchrun's own parser."""


def run(context: typer.Context) -> None:
    """torchrun, but what follows a peer's end does not count against --max-restarts."""
    launch(context.args)


def launch(arguments: Sequence[str]) -> None:
    """Be torchrun for these arguments; raises what torchrun's main function raises."""
    from rdzv_plugins.agent import torchrun

    # For the usage that argparse prints.
    sys.argv = ["rdzv run", *arguments]
    torchrun(arguments)
