"""A node's contact with the store, and when it takes itself for lost. Rule: not heard.

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
        # When it was first refused since then.
        self._denied: float | None = None
        self._longest = 0.0
        self._stopped: float | None = None

    def accepted(self, sent: float) -> None:
        """Note a heartbeat that the store accepted; ``sent``: when it was sent."""
        if self._stopped is None:
            self._longest = max(self._longest, sent - self._accepted)
        self._accepted, self._denied = sent, None

    def denied(self) -> None:
        """Note that the store answered, and refuses this node."""
        if self._denied is None:
            self._denied = self._clock()

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
        unheard, rules = self._clock() - self._accepted, self._rules
        return unheard >= rules.outage_limit or (self._is_refused and unheard >= rules.lease)

    @property
    def _is_refused(self) -> bool:
        """Not at once: a store that comes back may not know its users yet."""
        since = self._denied  # Another thread may forget it meanwhile.
        return since is not None and self._clock() - since >= self._rules.interval

    @property
    def why(self) -> str:
        """Why it takes itself for lost, for people."""
        lease, limit = self._rules.lease, self._rules.outage_limit
        if self._is_refused and self._clock() - self._accepted >= lease:
            return f"the store refuses it, and has accepted no heartbeat of it for {lease:g} s"
        return f"the store has accepted no heartbeat of it for {limit:g} s (on_outage=stop)"
