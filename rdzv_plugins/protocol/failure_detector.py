"""Judges which nodes live, by beats on the observer's own clock alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["FailureDetector"]


@dataclass(slots=True)
class _Seen:
    beat: int | None
    since: float
    looked: float
    # Not looked at since an outage: what is seen next may have been written before it.
    stale: bool = False
    # The silence that is not held against it, see `FailureDetector.doubt`; None: all of it is.
    forgiven: float | None = None


class FailureDetector:
    """Since when each node's beat has stood still, as far as this observer has looked.

    Times are seconds of one monotonic clock, the observer's. A node seen for the first time is as
    good as one whose beat has just moved: what happened before is not this observer's to judge.

    Attributes:
        grace_ends: until then no silence counts of a node that has not been heard since an outage.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._moved: set[str] = set()
        self.grace_ends = float("-inf")

    def observe(self, node: str, beat: int | None, asked: float, now: float) -> None:
        """Note a look at a node's beat; None: it has no record.

        The answer that came at ``now`` may be as old as the question, of ``asked``: a beat that
        stands still has done so up to then, one that moved may have moved just now.
        """
        seen = self._seen.get(node)
        if seen is None:
            forgiven = 0.0 if now < self.grace_ends else None
            self._seen[node] = _Seen(beat, max(now, self.grace_ends), now, forgiven=forgiven)
        elif beat == seen.beat or (beat is not None and beat < (seen.beat or 0)):
            # A lower one was written before the last one that was seen, and is no sign of life.
            seen.looked, seen.stale = asked, False
        elif seen.stale:
            seen.since = max(seen.since, now)  # It takes no grace away.
            seen.beat, seen.looked, seen.stale = beat, asked, False
        else:
            # A record that is gone was forgotten by the store, perhaps with beats never seen here.
            if beat is not None and seen.beat is not None:
                self._moved.add(node)
            since = now if beat is not None else max(seen.since, now)  # No sign of life.
            forgiven = None if beat is not None else seen.forgiven
            self._seen[node] = _Seen(beat, since, now, forgiven=forgiven)

    def heard(self, node: str, now: float) -> None:
        """Note something else that the node has written, as good as a beat.

        A store that forgets again and again may lose each beat before anybody looks.
        """
        seen = self._seen.setdefault(node, _Seen(None, now, now))
        seen.since, seen.looked, seen.forgiven = max(seen.since, now), now, None

    def doubt(self, nodes: Iterable[str]) -> None:
        """Forgive each of these its silence so far, once until its next beat is seen."""
        for node in nodes:
            if (seen := self._seen.get(node)) is not None and seen.forgiven is None:
                seen.forgiven = max(0.0, seen.looked - seen.since)

    def forgiven(self, node: str) -> float | None:
        """Seconds of its silence that are not held against it; None: it was never doubted.

        A node that was given a lease of grace has had what a doubt would give it: 0.
        """
        seen = self._seen.get(node)
        return seen.forgiven if seen else None

    def confirmed_silence(self, node: str) -> float:
        """Seconds that the beat is known to have stood still: up to the last look, not to now."""
        seen = self._seen.get(node)
        return max(0.0, seen.looked - seen.since) if seen else 0.0

    def possible_silence(self, node: str, now: float) -> float:
        """Seconds since the beat was last seen to move; a look may end it."""
        seen = self._seen.get(node)
        return now - seen.since if seen else 0.0

    def longest(self, now: float) -> tuple[float, float]:
        """The longest confirmed and the longest possible silence of all nodes that it watches."""
        confirmed, since = 0.0, now
        # A copy: people ask in other threads, while this node lists.
        for seen in [*self._seen.values()]:
            # Not max() and min(): of many nodes these calls are most of the time.
            if seen.looked - seen.since > confirmed:
                confirmed = seen.looked - seen.since
            if seen.since < since:
                since = seen.since
        return confirmed, now - since

    def moved(self, node: str) -> bool:
        """Whether the beat has moved since its window began: the node surely lives."""
        return node in self._moved

    def restart(self, now: float, grace: float = 0.0, unless: str | None = None) -> None:
        """Begin every window afresh but one: the observer was late, or could not reach the store.

        ``grace`` seconds more are given to each node until its next beat is seen: after an outage
        some are connected again later than others. A later call takes no grace away. A node that
        is first seen after it has the same grace.
        """
        if grace:
            self.grace_ends = now + grace
        for node, seen in self._seen.items():
            if node != unless:
                seen.since, seen.looked = max(seen.since, now + grace), now
                seen.stale = seen.stale or grace > 0
                seen.forgiven = 0.0 if grace or seen.since > now else None
        self._moved.clear()

    def discount(self, seconds: float, now: float) -> None:
        """Take out of every window the time in which the observer could not reach the store."""
        for seen in self._seen.values():
            seen.since = max(seen.since, min(seen.since + seconds, now))

    def keep(self, nodes: set[str]) -> None:
        """Forget all nodes but these."""
        self._seen = {node: seen for node, seen in self._seen.items() if node in nodes}
        self._moved &= nodes
