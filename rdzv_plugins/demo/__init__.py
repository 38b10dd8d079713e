"""A training job on this host that loses a node and continues; ``python -m rdzv_plugins.demo``."""

from __future__ import annotations

__all__ = ["run"]


def run(endpoint: str = "", *, backend: str = "", agents: int = 3, kill: int = 0) -> int:
    """Run the demonstration; returns an exit status, 0 only if the training continued to its end.

    Args:
        endpoint: as ``--rdzv-endpoint``; "": the agents run a quorum on this host, or for another
            backend a server is started there, for ``redis`` a Valkey.
        backend: as ``--rdzv-backend``; "": ``redis`` where an endpoint is given, else ``quorum``.
        agents: the number of nodes to start; at least 3, so that two are left.
        kill: the rank whose node is killed.
    """
    # Imported late: the workers import this package too, and must start fast.
    from rdzv_plugins.demo.show import show

    return show(endpoint, backend or ("redis" if endpoint else "quorum"), agents, kill)
