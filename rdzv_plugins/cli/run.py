"""``rdzv run``: torchrun with `rdzv_plugins.process.agent.RunAgent`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

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

    An error of the rendezvous gives exit status 1 without torch's traceback, because the log has
    its line. A signal gives a line and, as in a shell, the exit status 128 plus its number: 130 for
    Ctrl-C.
    """
    try:
        _launch(arguments)
    except KeyboardInterrupt:  # A signal before torch's agent handles signals.
        _end_by(signal.SIGINT)


def _launch(arguments: Sequence[str]) -> None:
    from rdzv_plugins.entry_points import refuse_without_torch

    try:
        refuse_without_torch("rdzv run")
    except ValueError as error:
        typer.echo(f"rdzv: {error}", err=True)
        sys.exit(1)
    from rdzv_plugins.observe.logs import is_told
    from rdzv_plugins.process.agent import torchrun
    from rdzv_plugins.process.signals import signal_behind
    from rdzv_plugins.torch.torchrun import OURS

    # argparse prints this name in the usage.
    sys.argv = [OURS, *arguments]
    try:
        torchrun(arguments)
    except Exception as error:
        if (signalled := signal_behind(error)) is not None:
            _end_by(signalled.sigval)
        if not is_told(error):
            raise
        sys.exit(1)


def _end_by(number: signal.Signals) -> NoReturn:
    typer.echo(f"rdzv: {number.name} ended this agent", err=True)
    sys.exit(128 + number)
