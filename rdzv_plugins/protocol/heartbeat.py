"""A node's record: what changes it, and when it is written. Each write is a heartbeat."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.protocol.documents import NodeRecord, Status
from rdzv_plugins.protocol.effects import Effects, PutRecord
from rdzv_plugins.protocol.observer import Observer
from rdzv_plugins.protocol.progress import Workers
from rdzv_plugins.protocol.rules import Own
from rdzv_plugins.protocol.stalls import stall_of

# The record's `slow` is 0 below this many milliseconds.
_SLOW = 50
# For _ANSWERS_FOR times `Rules.answer_timeout`, an accused node beats _ANSWERS times within it.
_ANSWERS, _ANSWERS_FOR = 3, 4
# A round's first heartbeats carry `NodeRecord.resumed`: the leader needs to read it only once.
_RESUMED_TOLD = 12


class Heartbeat:
    """Writes a node's record when a heartbeat is due. ``record``: what it writes next."""

    def __init__(self, own: Own, record: NodeRecord, seen: Observer, workers: Workers) -> None:
        self.record = record
        self._own, self._rules, self._clock = own, own.rules, own.clock
        self._seen, self._workers = seen, workers
        # Whether to write the record before the next decision, and whether to ring the bell then.
        self._is_due = self._rings = False
        # The first heartbeat comes with the join.
        self._next = own.clock() + own.rules.interval
        # Seconds that the last two writes took.
        self._took = (0.0, 0.0)
        # Until this time the node beats more often, because it is accused.
        self._answers_until = -math.inf
        # When a step may have stood still for `Rules.step_timeout`.
        self._stalls_at = math.inf
        # How many heartbeats have told `NodeRecord.resumed` in this round.
        self._resumed_told = 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the next heartbeat is due."""
        return max(0.0, min(self._next, self._stalls_at) - self._clock())

    def require(self, *, rings: bool = False) -> None:
        """Have the record written before the next decision; ``rings``: and ring the bell."""
        self._is_due, self._rings = True, self._rings or rings

    def amend(self, **fields: Any) -> None:
        """Change the record; the next heartbeat tells it."""
        self.record = replace(self.record, **fields)

    def change(self, *, rings: bool = False, **fields: Any) -> None:
        """Change the record, and have it written before the next decision."""
        self.amend(**fields)
        self.require(rings=rings)

    def answer(self) -> None:
        """Beat at once and more often: the node is accused, and a store may lose one heartbeat."""
        self._answers_until = self._clock() + _ANSWERS_FOR * (self._rules.answer_timeout or 0.0)
        self.require(rings=True)

    def keep_alive(self, call_ends: Callable[[], tuple[int, int] | None]) -> Effects[None]:
        """Beat once an interval, and look at the others; write a changed record at once."""
        self._watch_steps()
        interval_over = self._clock() >= self._next
        if interval_over and not self._is_due:
            self.amend(may_grow=False)  # `may_grow` holds for one interval.
        if self._is_due or interval_over:
            due = min(self._clock(), self._next)
            yield from self._write(call_ends())
            self._seen.beat_was_late(self._clock() - due)
            # At least one interval. The random part keeps thousands of nodes from beating together.
            pause = self._rules.interval * (1 + 0.1 * self._own.chance.random())
            if self._clock() < self._answers_until:
                pause = min(pause, (self._rules.answer_timeout or 0.0) / _ANSWERS)
            self._next = self._clock() + pause
        if interval_over:
            self._seen.read_again(leader=True, records=True)

    def _watch_steps(self) -> None:
        """Have the leader told at once that a step has stood still for `Rules.step_timeout`."""
        limit, told = self._rules.step_timeout, self.record.stall
        self._stalls_at = math.inf
        if not limit or self.record.status is not Status.RUN or self._seen.closed:
            return
        progress = self._workers.progress()
        stood = progress.stood / 1000 if progress is not None else 0.0
        if stood < limit:
            self._stalls_at = self._clock() + limit - stood
        elif told is None or told[0] < 1000 * limit:
            self._workers.probe()
            self.require(rings=True)

    def _write(self, call_ends: tuple[int, int] | None) -> Effects[None]:
        progress = self._workers.progress() if self.record.status is Status.RUN else None
        resumed = progress.resumed if progress else None
        self._resumed_told = self._resumed_told + 1 if resumed else 0
        slow = int(1000 * max(*self._took, self._seen.delays.overslept))
        self.amend(
            beat=self.record.beat + 1,
            looks=self._seen.looks,
            step=(progress.step, progress.milliseconds, progress.rank) if progress else None,
            stall=stall_of(progress, self._rules),
            resumed=resumed if self._resumed_told <= _RESUMED_TOLD else None,
            slow=slow if slow >= _SLOW else 0,
            # Only people read `at`.
            at=int(self._own.wall()),
            call_ends=call_ends,
        )
        rings, self._is_due, self._rings = self._rings, False, False
        asked = self._clock()
        try:
            yield from PutRecord(self._own.id, self.record, rings)
        except RendezvousConnectionError:
            self.require(rings=rings)
            raise
        self._took = self._took[1], self._clock() - asked
