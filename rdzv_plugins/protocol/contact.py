"""A node's contact with the store, and when it takes itself for lost. Rule: not heard.

A node whose heartbeats do not arrive is lost for the others after its lease, and they go on without
it: two worlds of one run train for as long as its workers run. A store that answers, and does not
let this node read, proves that it lives, so that the others may go on: the node stops, unless its
links tell that the store accepts none of them. A node that may read sees for itself whether they go
on. A store that is silent proves nothing: ``on_outage`` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from enum import StrEnum

from rdzv_plugins.protocol.rules import Rules


class Standing(StrEnum):
    """What a node says of itself over its links, in one character."""

    # The store accepts it, as far as it knows.
    ACCEPTED = "a"
    # The store does not, and it knows of nobody whom the store accepts.
    CUT_OFF = "c"
    # The store does not, and others may go on without it.
    LOST = "l"


class Contact:
    """Since when the store has accepted no heartbeat of this node, and why.

    Another thread may read it.

    Args:
        rules: the run's settings.
        clock: this node's monotonic clock, in seconds.

    Attributes:
        fails: a request has failed since the store accepted a heartbeat.
    """

    def __init__(self, rules: Rules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._accepted = clock()
        # When it was first refused since then, and since it could read.
        self._denied: float | None = None
        self._longest = 0.0
        self._stopped: float | None = None
        self.fails = False
        # Since when the store may accept others; None: as links tell, it accepts nobody.
        self._apart: float | None = clock()

    def accepted(self, sent: float) -> None:
        """Note a heartbeat that the store accepted; ``sent``: when it was sent."""
        if self._stopped is None:
            self._longest = max(self._longest, sent - self._accepted)
        self._accepted, self._denied, self.fails = sent, None, False

    def denied(self) -> None:
        """Note that the store answered, and refuses this node."""
        if self._denied is None:
            self._denied = self._clock()

    def sees(self) -> None:
        """Note that the store lets this node read, which reads first once it is refused."""
        self._denied = None

    def hear(self, others: Collection[Standing]) -> None:
        """Note what all other nodes say, as far as links tell."""
        if Standing.LOST in others:
            self._apart = -math.inf
        elif Standing.ACCEPTED not in others:
            self._apart = None
        elif self.others_are_lost or self._apart is None:
            self._apart = self._clock()

    @property
    def others_are_lost(self) -> bool:
        """Whether one of them says so, who may be the only one to know."""
        return self._apart == -math.inf

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
        unheard = self._clock() - self._accepted
        return unheard >= self._rules.outage_limit or self._is_refused_alone

    @property
    def is_alone(self) -> bool:
        """Whether the others may have gone on without it, as far as it knows.

        Not at once: a store that comes back may not know all its users yet.
        """
        now, apart = self._clock(), self._apart  # Another thread may change it meanwhile.
        since_long = apart is not None and now - apart >= self._rules.interval
        return since_long and now - self._accepted >= self._rules.lease

    @property
    def is_refused_with_all(self) -> bool:
        """Whether it is not alone, though the store refused it for its lease."""
        over = self._clock() - self._accepted >= self._rules.lease
        return over and self._denied is not None and self._apart is None

    @property
    def _is_refused_alone(self) -> bool:
        denied = self._denied
        since_long = denied is not None and self._clock() - denied >= self._rules.interval
        return since_long and self.is_alone

    @property
    def why(self) -> str:
        """Why it takes itself for lost, for people."""
        lease, limit = self._rules.lease, self._rules.outage_limit
        if self._is_refused_alone:
            return f"the store refuses it, and has accepted no heartbeat of it for {lease:g} s"
        return f"the store has accepted no heartbeat of it for {limit:g} s (on_outage=stop)"
