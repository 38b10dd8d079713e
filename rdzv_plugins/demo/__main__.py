"""``python -m rdzv_plugins.demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from rdzv_plugins.demo import run


def main(
    endpoint: Annotated[str, typer.Option(help="of your own store; default: a new one")] = "",
    backend: Annotated[
        str,
        typer.Option(help="as in --rdzv-backend; default: redis for an endpoint, else quorum"),
    ] = "",
    agents: Annotated[int, typer.Option(min=3, max=16, help="how many nodes to start")] = 3,
    kill: Annotated[int, typer.Option(min=0, help="the rank whose node is killed")] = 0,
) -> None:
    """Train on this host, kill a node, and see the training continue."""
    raise typer.Exit(run(endpoint, backend=backend, agents=agents, kill=kill))


if __name__ == "__main__":
    typer.run(main)
