"""A node's contact with the store, and when it takes itself for lost. Rule 24.

A node whose heartbeats do not arrive is lost for the others after its lease, and they go on without
it: two worlds of one run train for as long as its workers run. A store that answers and refuses
this node proves that it lives, so that the others may go on: the node stops. A store that is silent
proves nothing: ``on_outage`` decides.
"""

from __future__ import annotations

from collections.abc import Callable

from rdzv_plugins.protocol.rules import Rules

__all__ = ["Contact"]


class Contact:
    """Since when the store has accepted no heartbeat of this node, and why.

    Another thread may read it.

    Args:
        rules: the run's settings.
        clock: this node's monotonic clock, in seconds.
    """

    def __init__(self, rules: Rules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._accepted = clock()
        self._denied = False
        self._longest = 0.0
        self._stopped: float | None = None

    def accepted(self, sent: float) -> None:
        """Note a heartbeat that the store accepted; ``sent``: when it was sent."""
        if self._stopped is None:
            self._longest = max(self._longest, sent - self._accepted)
        self._accepted, self._denied = sent, False

    def denied(self) -> None:
        """Note that the store answered, and refuses this node."""
        self._denied = True

    def workers_start(self) -> None:
        """The agent is given a round: what was before concerns no worker of it."""
        self._longest, self._stopped = 0.0, None

    def workers_stopped(self) -> None:
        """The agent asks for a round, so that its workers have stopped."""
        if self._stopped is None:
            self._longest, self._stopped = self.unheard, self._clock()

    @property
    def unheard(self) -> float:
        """The most seconds in a row in which workers ran and no heartbeat was accepted."""
        if self._stopped is not None:
            return self._longest
        return max(self._longest, self._clock() - self._accepted)

    @property
    def is_given_up(self) -> bool:
        """Whether this node takes itself for lost, so that its workers are to stop."""
        return self._clock() - self._accepted >= self._patience

    @property
    def _patience(self) -> float:
        rules = self._rules
        return min(rules.lease, rules.outage_limit) if self._denied else rules.outage_limit

    @property
    def why(self) -> str:
        """Why it takes itself for lost, for people."""
        seconds = f"{self._patience:g} s"
        if self._denied:
            return f"the store refuses it, and has accepted no heartbeat of it for {seconds}"
        return f"the store has accepted no heartbeat of it for {seconds} (on_outage=stop)"
