"""torchrun rendezvous on the store you already run."""

from __future__ import annotations

# Nothing is imported here: torch loads every entry point of this package at each start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from rdzv_plugins.worker import CurrentRound

__version__ = "0.1.0"


def current() -> CurrentRound | None:
    """The round that this worker was started in; None in a process that is no worker.

    It costs no request: the agent hands it down as it starts its workers::

        import rdzv_plugins

        now = rdzv_plugins.current()
        if now is not None:
            print(f"round {now.round}: {now.cause}; {now.spares} spares, domain {now.domain}")
    """
    from rdzv_plugins import worker

    return worker.current()
