"""What a store that is away or slow says about the silence of other nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from rdzv_plugins.protocol.rules import Rules


class Away(NamedTuple):
    """How long the store was away, whether that is an outage, and whether a request failed."""

    seconds: float
    is_outage: bool
    failed: bool


class Outages:
    """Notes when the store answered, to recognise outages.

    The cause of an outage makes no difference: requests failed, the store's client repeated one,
    or this process stood still.

    Attributes:
        count: how many outages there were.
        over_at: when the store last came back.
    """

    def __init__(self, rules: Rules, clock: Callable[[], float]) -> None:
        self._rules, self._clock = rules, clock
        self.count = 0
        self.over_at = -math.inf
        # When the store last answered, and for how long the node has paused on purpose since then.
        self._answered: float | None = None
        self._paused = 0.0
        # Whether a request failed; whether the store's client repeats a request, perhaps a wait.
        self._failed = self._repeated = False

    def paused(self, seconds: float) -> None:
        """Note that the node paused on purpose."""
        if not self._failed:
            self._paused += seconds

    def repeats(self) -> None:
        """Note that the store's client repeats a request; called from any thread."""
        self._repeated = True

    def fails(self) -> None:
        """Note that a request failed."""
        self._failed = True

    def ends(self) -> Away | None:
        """Note that the store answered; returns how long it was away, None: it was not away."""
        now, failed, repeated = self._clock(), self._failed, self._repeated
        seconds = now - self._answered - self._paused if self._answered is not None else 0.0
        self._answered, self._paused = now, 0.0
        self._failed = self._repeated = False
        is_outage = seconds > self._rules.shortest_outage
        if not (is_outage or failed or repeated):
            return None
        self.count += is_outage
        self.over_at = now
        return Away(seconds, is_outage, failed)


class Delays:
    """How late this node is: the store or the load then slows other nodes down too.

    Attributes:
        overslept: seconds by which the last pause was too long.
        listing: seconds that the last listing took.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self.overslept = self.listing = 0.0
        # How late this node's last two beats were.
        self._late = (0.0, 0.0)

    def beat_was_late(self, seconds: float) -> None:
        self._late = self._late[1], seconds

    @property
    def lag(self) -> float:
        """See `View.lag`."""
        return max(0.0, max(self._late) - self._interval / 2)

    @property
    def latency(self) -> float:
        """See `View.latency`."""
        return max(self.listing, self.overslept)
