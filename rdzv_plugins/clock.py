"""The clock of a node, which goes on while its host is suspended; and a wait that signals end.

The others measure how long a node is silent. Where a virtual machine stands still, the monotonic
clock of Linux stands still too: its node would take itself for heard as long after that.
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

# How late a signal may be noticed that came just as a wait began.
_LOOK_SECONDS = 0.5

now: Callable[[], float] = time.monotonic
"""Seconds, of any zero; where the system has no such clock, the monotonic one."""

if hasattr(time, "CLOCK_BOOTTIME"):
    now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


def take(queue: SimpleQueue[T], seconds: float | None = None) -> T:
    """The next item of ``queue``, for a main thread in which signals raise exceptions.

    Python looks for signals before a wait and after it. A signal that comes between that look and
    the wait does not end the wait: this happened to 2 of 1,600. Hence this is many short waits.

    Raises:
        Empty: there was none for ``seconds``; None: wait for ever.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return queue.get(timeout=min(left, _LOOK_SECONDS))
        except Empty:
            if left <= _LOOK_SECONDS:
                raise
