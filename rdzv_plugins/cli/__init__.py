"""The ``rdzv`` command: ask after a run, check a store, serve one, see a demonstration."""

from __future__ import annotations

import sys
import warnings

import typer

# torch says so, as it is imported, to every program of an environment without NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from rdzv_plugins.cli import local, runs, stores  # noqa: E402

__all__ = ["app", "main"]

app = typer.Typer(
    help="torchrun rendezvous on the store you already run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(runs.status)
app.command()(runs.watch)
app.command()(runs.close)
app.command()(runs.clean)
app.command()(stores.check)
app.command()(local.serve)
app.command()(local.demo)


def main() -> None:
    """Entry point; what the user can mend is one line on standard error and exit status 1."""
    from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError
    from rdzv_plugins.servers import ServerError

    try:
        app()
    except (ValueError, RendezvousConnectionError, RendezvousStateError, ServerError) as error:
        typer.echo(f"rdzv: {error}", err=True)
        sys.exit(1)
