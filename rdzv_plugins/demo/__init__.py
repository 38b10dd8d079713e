"""A training job on this host that loses a node and continues; ``python -m rdzv_plugins.demo``."""

from __future__ import annotations

__all__ = ["run"]


def run(endpoint: str = "", *, backend: str = "redis", agents: int = 3, kill: int = 0) -> int:
    """Run the demonstration; returns an exit status, 0 only if the training continued to its end.

    Args:
        endpoint: as ``--rdzv-endpoint``; "": a server is started on this host, for ``redis`` a
            Valkey.
        backend: as ``--rdzv-backend``.
        agents: the number of nodes to start; at least 3, so that two are left.
        kill: the rank whose node is killed.
    """
    # Imported late: the workers import this package too, and must start fast.
    from rdzv_plugins.demo.show import show

    return show(endpoint, backend, agents, kill)
