"""Which nodes live, by their beats and the observer's own clock alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Watched:
    """What an observer knows of a node's beats; times are seconds of the observer's clock.

    Attributes:
        beat: as last seen; None: the node had no record.
        since: the start of the window of silence: when the beat was first seen, or when the
            observer began to watch.
        looked: when the observer last looked.
        stale: not looked at since an outage: the next beat may have been written before the outage.
        had_grace: the node was doubted, or was given time after an outage. It is given no more time
            until its next beat.
        forgiven: seconds of silence that do not count, because the node was doubted.
        moved: the beat has moved since the window began, so the node lives.
        last: the last beat that was seen, even if the record is gone now; -1: none was.
        was_absent: the record was missing once since ``last``; a second absence begins no window.
    """

    beat: int | None
    since: float
    looked: float
    stale: bool = False
    had_grace: bool = False
    forgiven: float = 0.0
    moved: bool = False
    last: int = -1
    was_absent: bool = False

    @property
    def silence(self) -> float:
        """Seconds for which the beat is known to have stood still: up to the last look."""
        return max(0.0, self.looked - self.since)

    def patience(self, lease_and_lag: float) -> float:
        """Seconds of silence after which the node is lost."""
        return lease_and_lag + self.forgiven

    def is_lost(self, lease_and_lag: float) -> bool:
        """Whether the node has been silent for its patience."""
        return self.silence >= self.patience(lease_and_lag)


class FailureDetector:
    """Since when each node's beat has stood still, as far as this observer has looked.

    A new node counts as if its beat had just moved. After an outage no silence counts before
    ``grace_ends``, unless the node was heard since.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Watched] = {}
        self.grace_ends = float("-inf")

    @property
    def watched(self) -> Mapping[str, Watched]:
        """All watched nodes: not a copy, because there may be thousands."""
        return self._seen

    def observe(self, node: str, beat: int | None, asked: float, now: float) -> None:
        """Note a look at a node's beat; None: it has no record.

        The node was read between ``asked`` and ``now``. A beat that stands still has certainly
        stood still only up to ``asked``; a beat that moved may have moved at ``now``.
        """
        seen = self._seen.get(node)
        last = beat if beat is not None else seen.last if seen is not None else -1
        if seen is None:
            since = max(now, self.grace_ends)
            self._seen[node] = Watched(beat, since, now, had_grace=since > now, last=last)
        elif beat == seen.beat or (seen.was_absent if beat is None else beat <= seen.last):
            # The same or a lower beat is no sign of life, because no node writes it again.
            # `RecordCache` decides whether a lower beat is believed.
            seen.beat, seen.last, seen.looked, seen.stale = beat, last, asked, False
        elif seen.stale:
            seen.since = max(seen.since, now)  # max() keeps a grace.
            seen.beat, seen.last, seen.looked, seen.stale = beat, last, asked, False
        else:
            # The store lost the record, perhaps with beats that were never seen here.
            moved = seen.moved or (beat is not None and seen.beat is not None)
            # A missing record is no sign of life.
            missing = beat is None
            since = max(seen.since, now) if missing else now
            new = Watched(beat, since, now, moved=moved, last=last, was_absent=missing)
            if missing:
                new.had_grace, new.forgiven = seen.had_grace, seen.forgiven
            self._seen[node] = new

    def heard(self, node: str, now: float) -> None:
        """Note another write of the node, which proves that it lives like a beat does."""
        seen = self._seen.setdefault(node, Watched(None, now, now))
        seen.since, seen.looked = max(seen.since, now), now
        seen.had_grace, seen.forgiven = False, 0.0

    def doubt(self, nodes: Iterable[str]) -> None:
        """Forgive each node's silence so far, at most once until its next beat is seen."""
        for node in nodes:
            if (seen := self._seen.get(node)) is not None and not seen.had_grace:
                seen.had_grace, seen.forgiven = True, seen.silence

    def confirmed_silence(self, node: str) -> float:
        """See `Watched.silence`."""
        seen = self._seen.get(node)
        return seen.silence if seen else 0.0

    def possible_silence(self, node: str, now: float) -> float:
        """Seconds since the beat was last seen to move; the next look may end it."""
        seen = self._seen.get(node)
        return now - seen.since if seen else 0.0

    def longest(self, now: float) -> tuple[float, float]:
        """The longest confirmed and the longest possible silence of all watched nodes."""
        confirmed, since = 0.0, now
        # A copy, because other threads call this while the node lists.
        for seen in [*self._seen.values()]:
            # Not max() and min(): for many nodes these calls take most of the time.
            if seen.looked - seen.since > confirmed:
                confirmed = seen.looked - seen.since
            if seen.since < since:
                since = seen.since
        return confirmed, now - since

    def moved(self, node: str) -> bool:
        """See `Watched.moved`."""
        seen = self._seen.get(node)
        return seen is not None and seen.moved

    def restart(self, now: float, grace: float = 0.0, unless: str | None = None) -> None:
        """Restart all windows except that of ``unless``: the observer was late or had no store.

        ``grace`` adds seconds for each node until its next beat is seen, because after an outage
        some nodes reconnect later than others. A later call takes no grace away. A node that is
        first seen later gets the same grace.
        """
        if grace:
            self.grace_ends = now + grace
        for node, seen in self._seen.items():
            seen.moved = False
            if node != unless:
                seen.since, seen.looked = max(seen.since, now + grace), now
                seen.stale = seen.stale or grace > 0
                seen.had_grace, seen.forgiven = grace > 0 or seen.since > now, 0.0

    def discount(self, seconds: float, now: float) -> None:
        """Shorten every window by ``seconds`` in which the observer could not reach the store."""
        for seen in self._seen.values():
            seen.since = max(seen.since, min(seen.since + seconds, now))

    def keep(self, nodes: set[str]) -> None:
        """Forget all nodes but these."""
        self._seen = {node: seen for node, seen in self._seen.items() if node in nodes}
