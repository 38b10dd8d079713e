"""The clock of a node, which goes on while its host is suspended.

The others measure how long a node is silent. Where a virtual machine stands still, the monotonic
clock of Linux stands still too: its node would take itself for heard as long after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

__all__ = ["now"]

now: Callable[[], float] = time.monotonic
"""Seconds, of any zero; where the system has no such clock, the monotonic one."""

if hasattr(time, "CLOCK_BOOTTIME"):
    now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
