"""Commands about this machine: a local server, and a demonstration on it."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from rdzv_plugins import servers

__all__ = ["demo", "serve"]

# Where a server's kind and the backend that speaks to it differ by name.
_BACKENDS = {"valkey": "redis", "etcd": "etcd-v3"}


def serve(
    kind: Annotated[str, typer.Argument(help=f"one of: {', '.join(servers.KINDS)}")] = "valkey",
    port: Annotated[int | None, typer.Option(help="of the first server; default: a free one")] = (
        None
    ),
    nodes: Annotated[int, typer.Option(help="servers of the ensemble, 1 or 3")] = 1,
) -> None:
    """Run a server on 127.0.0.1 until Ctrl-C: for trying things out, not for production."""
    with servers.start(kind, nodes=nodes, port=port) as server:
        conf = ",".join(f"{name}={value}" for name, value in server.config.items())
        typer.echo(f"{kind} runs at {server.endpoint}; Ctrl-C ends it. For torchrun:")
        for name, value in server.environ.items():
            typer.echo(f"  export {name}={value}")
        typer.echo(
            f"  torchrun --rdzv-backend={_BACKENDS.get(kind, kind)} "
            f"--rdzv-endpoint={server.endpoint}{f' --rdzv-conf={conf}' if conf else ''} "
            "--max-restarts=100 ..."
        )
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()


def demo(
    endpoint: Annotated[str, typer.Option(help="of a Redis; default: an embedded Valkey")] = "",
) -> None:
    """Three agents train, one is killed, training goes on; then a timeline of what happened."""
    from rdzv_plugins.demo import run

    raise typer.Exit(run(endpoint))
