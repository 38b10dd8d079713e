"""A node's contact with the store, and when the node takes itself for lost. Rule: not heard.

If a node's heartbeats do not arrive, the other nodes call it lost after its lease and go on without
it. Two worlds of one run then train for as long as its workers run. Therefore the node stops its
workers if the store answers but does not let it read, unless its links tell that the store accepts
no node. A node that may read sees for itself whether the others go on. If the store is silent,
``on_outage`` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from enum import StrEnum

from rdzv_plugins.protocol.rules import Rules


class Standing(StrEnum):
    """What a node says of itself over its links, in one character."""

    # The store accepts the node, as far as the node knows.
    ACCEPTED = "a"
    # A request has failed since its last accepted heartbeat.
    FAILING = "f"
    # The store does not accept the node, and others may go on without it.
    LOST = "l"


class Contact:
    """Since when the store has accepted no heartbeat of this node, and why.

    Another thread may read it.

    Attributes:
        fails: a request has failed since the last accepted heartbeat.
        why_cut_off: why this node stopped its workers; empty once a heartbeat is accepted.
    """

    def __init__(self, rules: Rules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._accepted = clock()
        # When the store first refused this node since the last accepted heartbeat or read.
        self._denied: float | None = None
        self._longest = 0.0
        self._stopped: float | None = None
        self.fails = False
        self.why_cut_off = ""
        # The kinds of lines that the log has since the last accepted heartbeat.
        self._told: set[str] = set()
        # Since when the store may accept other nodes. None: the links say that it accepts no node.
        # -inf: another node is lost.
        self._apart: float | None = clock()

    def accepted(self, sent: float) -> None:
        """Note that the store accepted a heartbeat; ``sent``: when it was sent."""
        # Count the silence up to now: the heartbeat may have reached the store only now.
        self._longest = self.unheard
        self._accepted, self._denied, self.fails = sent, None, False
        self.why_cut_off = ""
        self._told.clear()

    def denied(self) -> None:
        """Note that the store answered, and refuses this node."""
        if self._denied is None:
            self._denied = self._clock()

    def sees(self) -> None:
        """Note that the store lets this node read; after a refusal the node reads first."""
        self._denied = None

    def hear(self, others: Collection[Standing]) -> None:
        """Note the `Standing` of all other nodes with links."""
        if Standing.LOST in others:
            self._apart = -math.inf
        elif Standing.ACCEPTED not in others:
            self._apart = None
        elif self.others_are_lost or self._apart is None:
            self._apart = self._clock()

    @property
    def others_are_lost(self) -> bool:
        """Whether another node says that it is lost. Only that node may know it."""
        return self._apart == -math.inf

    def workers_start(self) -> None:
        """Forget earlier silence: the agent is given a round, and starts new workers."""
        self._longest, self._stopped = 0.0, None

    def workers_stopped(self) -> None:
        """Note that the workers have stopped, because the agent asks for a round."""
        if self._stopped is None:
            self._longest, self._stopped = self.unheard, self._clock()

    @property
    def unheard(self) -> float:
        """See `View.unheard`."""
        if self._stopped is not None:
            return self._longest
        return max(self._longest, self._clock() - self._accepted)

    @property
    def is_cut_off(self) -> bool:
        """Whether this node takes itself for lost, so that its workers stop."""
        unheard = self._clock() - self._accepted
        return unheard >= self._rules.outage_limit or self._is_refused_alone

    @property
    def others_may_go_on(self) -> bool:
        """Whether the other nodes may have gone on without this node.

        True only after an interval, because a store that comes back may not know all users yet.
        """
        now, apart = self._clock(), self._apart  # Another thread may change `_apart`.
        since_long = apart is not None and now - apart >= self._rules.interval
        return since_long and now - self._accepted >= self._rules.lease

    @property
    def _is_refused_with_all(self) -> bool:
        """Whether the store has refused this node for a lease, and all linked nodes too."""
        over = self._clock() - self._accepted >= self._rules.lease
        return over and self._denied is not None and self._apart is None

    @property
    def _is_refused_alone(self) -> bool:
        denied = self._denied
        since_long = denied is not None and self._clock() - denied >= self._rules.interval
        return since_long and self.others_may_go_on

    def stop_workers(self) -> None:
        """Note that the workers are to stop, because this node takes itself for lost."""
        self.why_cut_off = self._why

    def news(self, at_work: bool, patience: float, error: Exception) -> Iterator[tuple[str, str]]:
        """New lines for the log: (kind, text), each kind once; ``patience``: seconds of a join."""
        if self.why_cut_off and "cut off" not in self._told:
            yield (
                "cut off",
                f"the others may go on without this node, so its agent stops the workers: "
                f"{self.why_cut_off}; then it asks for a round again, for {patience:g} s ({error})",
            )
            self._told.add("cut off")
        if at_work and self._is_refused_with_all and "refused" not in self._told:
            yield (
                "refused",
                "the store refuses all nodes, as they say over their links: training goes on",
            )
            self._told.add("refused")

    @property
    def _why(self) -> str:
        lease, limit = self._rules.lease, self._rules.outage_limit
        if self._is_refused_alone:
            return f"the store refuses it, and has accepted no heartbeat of it for {lease:g} s"
        return f"the store has accepted no heartbeat of it for {limit:g} s (on_outage=stop)"
