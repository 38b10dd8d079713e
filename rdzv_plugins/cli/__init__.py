"""The ``rdzv`` command: be an agent, ask after a run, check a store, serve one, see a demo."""

from __future__ import annotations

import sys
import warnings

import typer

# torch says so, as it is imported, to every program of an environment without NumPy.
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
    """Entry point; what the user can mend is one line on standard error and exit status 1."""
    from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError
    from rdzv_plugins.servers import ServerError

    if sys.argv[1:2] == ["run"]:
        # Not through typer, to which "--", Ctrl-C and a broken pipe mean something else; and what
        # it raises is shown as torchrun shows it.
        run.launch(sys.argv[2:])
        return
    try:
        app()
    except (ValueError, RendezvousConnectionError, RendezvousStateError, ServerError) as error:
        typer.echo(f"rdzv: {error}", err=True)
        sys.exit(1)
