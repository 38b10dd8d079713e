"""``python -m examples.demo``, in a checkout: ``make demo``."""

from __future__ import annotations

from typing import Annotated

import typer

from examples.demo.show import show


def main(
    endpoint: Annotated[
        str, typer.Option(help="of your own store; default: the agents run one themselves")
    ] = "",
    backend: Annotated[str, typer.Option(help="of that endpoint, as in --rdzv-backend")] = "redis",
    agents: Annotated[int, typer.Option(min=3, max=16, help="how many nodes to start")] = 3,
    kill: Annotated[int, typer.Option(min=0, help="the rank whose node is killed")] = 0,
) -> None:
    """Train on this host, kill a node, and see the training continue."""
    raise typer.Exit(show(endpoint, backend if endpoint else "quorum", agents, kill))


if __name__ == "__main__":
    typer.run(main)
