"""The ``rdzv`` command: run an agent, inspect a run, check a store, start one, show the docs."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from rdzv_plugins import __version__
from rdzv_plugins.cli import demo, docs, local, orders, pages, run, runs
from rdzv_plugins.cli.check import check
from rdzv_plugins.cli.options import UnknownRunError, spread

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rdzv-plugins {__version__}")
        raise typer.Exit


@app.callback()
def rdzv(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    """torchrun rendezvous on the store you already run, or on none at all."""


app.command(context_settings=run.VERBATIM)(run.run)
app.command("list")(spread(runs.list_runs))
for command in (
    runs.status, runs.history, runs.watch, runs.close, orders.drain, orders.restart, orders.resize,
    orders.exclude, orders.include, orders.excluded, orders.accuse, runs.clean, check,
    pages.dashboard, pages.exporter, local.serve, demo.demo, docs.docs,
):  # fmt: skip
    app.command()(spread(command))


def main() -> None:
    """Entry point; an error that the user can fix is one line on stderr and exit status 1."""
    # torch, which `run` imports, gives this warning in every environment without NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if sys.argv[1:2] == ["run"]:
        # Not through typer, which treats "--", Ctrl-C and a broken pipe differently.
        run.launch(sys.argv[2:])
        return
    try:
        app()
    except Exception as error:
        if not _is_for_the_user(error):
            raise
        typer.echo(f"rdzv: {error}", err=True)
        absent = isinstance(error, UnknownRunError) and sys.argv[1] in ("status", "watch")
        sys.exit(runs.STATUSES["absent"] if absent else 1)


def _is_for_the_user(error: Exception) -> bool:
    if isinstance(error, ValueError):
        return True
    # Import late, because the help needs none of these modules.
    from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError, exhausted
    from rdzv_plugins.servers import ServerError

    expected = RendezvousConnectionError, RendezvousStateError, ServerError
    return isinstance(error, expected) or exhausted(error) is not None
