"""Commands for this host: a local server, and a demonstration."""

from __future__ import annotations

from typing import Annotated

import typer

from rdzv_plugins.cli.interrupt import Interrupt

__all__ = ["demo", "serve"]

# The backend for a kind of server, where the names differ.
_BACKENDS = {"valkey": "redis", "etcd": "etcd-v3"}


def serve(
    kind: Annotated[
        str,
        typer.Argument(help="one of: redis, valkey, zookeeper, dynamodb, consul, etcd, postgres"),
    ] = "valkey",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="first server's port; default: a free one")
    ] = None,
    nodes: Annotated[int, typer.Option(help="number of servers, 1 or 3")] = 1,
) -> None:
    """Run a server on 127.0.0.1 until Ctrl-C: for tests, not for production."""
    from rdzv_plugins import servers

    with servers.start(kind, nodes=nodes, port=port) as server:
        interrupt = Interrupt()
        conf = ",".join(f"{name}={value}" for name, value in server.config.items())
        typer.echo(f"{kind} runs at {server.endpoint}; Ctrl-C stops it. For torchrun:")
        for name, value in server.environ.items():
            typer.echo(f"  export {name}={value}")
        typer.echo(
            f"  torchrun --rdzv-backend={_BACKENDS.get(kind, kind)} "
            f"--rdzv-endpoint={server.endpoint}{f' --rdzv-conf={conf}' if conf else ''} "
            "--max-restarts=100 ..."
        )

        def look() -> None:
            for node in server.nodes:
                node.check()

        interrupt.wait(look)


def demo(
    endpoint: Annotated[str, typer.Option(help="Redis endpoint; default: embedded Valkey")] = "",
) -> None:
    """Train with three agents, kill one, continue the training, and show a timeline."""
    from rdzv_plugins.demo import run

    raise typer.Exit(run(endpoint))
