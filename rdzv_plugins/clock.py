"""A node's clock, which goes on while its host is suspended; and a wait that signals can end.

Other nodes measure how long a node is silent. Linux's monotonic clock stands still while a virtual
machine is suspended, so the node would not notice the time for which the others have not heard it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["now", "take"]

T = TypeVar("T")

# A signal that comes just as a wait begins may be noticed this much later.
_LOOK_SECONDS = 0.5

now: Callable[[], float] = time.monotonic
"""Seconds from an arbitrary start; on a system without such a clock, monotonic seconds."""

if hasattr(time, "CLOCK_BOOTTIME"):
    now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


def take(queue: SimpleQueue[T], seconds: float | None = None) -> T:
    """The next item of ``queue``, for a main thread in which signals raise exceptions.

    Python checks for signals before and after a wait. A signal between the check and the wait does
    not end the wait, which happened to 2 of 1,600 signals. Hence this function waits many short
    times.

    Raises:
        Empty: no item came within ``seconds`` (None: wait forever).
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return queue.get(timeout=min(left, _LOOK_SECONDS))
        except Empty:
            if left <= _LOOK_SECONDS:
                raise
