"""The ``rdzv`` command: run an agent, inspect a run, check a store, start one, show a demo."""

from __future__ import annotations

import sys
import warnings

import typer

# torch warns so on import in every environment without NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from rdzv_plugins.cli import local, run, runs, stores  # noqa: E402

__all__ = ["app", "main"]

app = typer.Typer(
    help="torchrun rendezvous on the store you already run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(context_settings=run.VERBATIM)(run.run)
app.command()(runs.status)
app.command()(runs.watch)
app.command()(runs.close)
app.command()(runs.clean)
app.command()(stores.check)
app.command()(local.serve)
app.command()(local.demo)


def main() -> None:
    """Entry point; an error that the user can fix is one line on stderr and exit status 1."""
    from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError
    from rdzv_plugins.servers import ServerError

    if sys.argv[1:2] == ["run"]:
        # Not through typer, which treats "--", Ctrl-C and a broken pipe differently; errors look
        # as in torchrun.
        run.launch(sys.argv[2:])
        return
    try:
        app()
    except (ValueError, RendezvousConnectionError, RendezvousStateError, ServerError) as error:
        typer.echo(f"rdzv: {error}", err=True)
        sys.exit(1)
