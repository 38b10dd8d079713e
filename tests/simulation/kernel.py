"""Virtual time: events in the order of their time, ties in the order in which they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from .invariants import InvariantError

__all__ = ["Clock", "Kernel"]


# A node that decides looks at its clock; one that decides so often and asks for nothing never will.
_MOST_LOOKS = 20_000


class Kernel:
    """A queue of calls; ``now`` is the time of the one being made, in virtual seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._planned += 1
        heapq.heappush(self._queue, (max(when, self.now), self._planned, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, call, *arguments)

    def run(self, until: float) -> None:
        """Make all calls planned up to ``until``, which is then the time."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(queue)
            call(*arguments)
        self.now = until


class Clock:
    """One host's monotonic clock: its own zero, its own rate, and it may stand still."""

    def __init__(self, kernel: Kernel, zero: float, rate: float) -> None:
        self._kernel = kernel
        self._base = kernel.now
        self._local = zero
        self.rate = rate
        self._frozen = False
        self.looks = 0
        """How often it was looked at since its host last asked for something."""

    def __call__(self) -> float:
        self.looks += 1
        if self.looks > _MOST_LOOKS:
            raise InvariantError("rests", "a host decides again and again, and asks for nothing")
        passed = 0.0 if self._frozen else (self._kernel.now - self._base) * self.rate
        return self._local + passed

    def real(self, seconds: float) -> float:
        """Virtual seconds in which this clock advances by ``seconds``."""
        return seconds / self.rate

    def set(self, rate: float | None = None, frozen: bool = False) -> None:
        """Go on from here at another rate, or stand still until the next call."""
        self._local = self()
        self._base = self._kernel.now
        self._frozen = frozen
        if rate is not None:
            self.rate = rate
