"""Which accused nodes have answered, as far as a node has read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rdzv_plugins.protocol.documents import Accusation, NodeRecord
from rdzv_plugins.protocol.failure_detector import FailureDetector

# After an outage other nodes may reconnect up to 1 s later than this one (one retry pause).
_BACK_WITHIN = 1.0


class Answers:
    """Measures how long each accused node of the document has been silent."""

    def __init__(self) -> None:
        self._beats = FailureDetector()
        # The beat with which each node is accused.
        self._accused: dict[str, int] = {}

    def ask(self, accused: Iterable[Accusation], now: float) -> None:
        """Replace the accused nodes. A heartbeat before the accusation is no answer."""
        beats = {it.node: it.beat for it in accused}
        same = {node for node, beat in beats.items() if self._accused.get(node) == beat}
        self._beats.keep(same)
        for node, beat in beats.items():
            if node not in same:
                self._beats.observe(node, beat, now, now)
        self._accused = beats

    def observe(self, records: Mapping[str, NodeRecord], asked: float, now: float) -> None:
        """Call `FailureDetector.observe` for each accused node that has a record."""
        for node in self._accused:
            if node in records:
                self._beats.observe(node, records[node].beat, asked, now)

    def restart(self, now: float) -> None:
        """Give each accused node its full time again, because the store was away."""
        self._beats.restart(now, _BACK_WITHIN)

    @property
    def unanswered(self) -> dict[str, float]:
        """See `View.unanswered`."""
        silent = [it for it in self._accused if not self._beats.moved(it)]
        return {node: self._beats.confirmed_silence(node) for node in silent}
