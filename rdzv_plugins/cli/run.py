"""``rdzv run``: torchrun with `rdzv_plugins.agent.RunAgent`."""

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
"""Settings with which typer leaves all arguments, even ``--help``, to torchrun's own parser."""


def run(context: typer.Context) -> None:
    """Run torchrun, without counting failures that follow a peer's loss against --max-restarts."""
    launch(context.args)


def launch(arguments: Sequence[str]) -> None:
    """Run torchrun with these arguments; raises what torchrun's main function raises.

    An error of the rendezvous, whose line the log has, is exit status 1 without torch's traceback.
    """
    from rdzv_plugins.entry_points import refuse_without_torch

    try:
        refuse_without_torch("rdzv run")
    except ValueError as error:
        typer.echo(f"rdzv: {error}", err=True)
        sys.exit(1)
    from rdzv_plugins.agent import torchrun
    from rdzv_plugins.logs import is_told
    from rdzv_plugins.torch_compat.torchrun import OURS

    # argparse prints this name in the usage.
    sys.argv = [OURS, *arguments]
    try:
        torchrun(arguments)
    except Exception as error:
        if not is_told(error):
            raise
        sys.exit(1)
