"""One way to ask a store again: until it answers or the request's time is up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from rdzv_plugins.kv.contract import ClientClosedError, RendezvousConnectionError

__all__ = ["retry", "store_is_away"]

T = TypeVar("T")

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.5


def retry(
    request: Callable[[], T],
    *,
    timeout: float,
    retryable: Callable[[Exception], bool],
    sleep: Callable[[float], None] | None = None,
) -> T:
    """Call ``request`` until it returns, at most ``timeout`` seconds long.

    Args:
        request: raises what the store's client raises.
        timeout: seconds; no attempt starts afterwards.
        retryable: whether the next attempt may succeed after an exception; any other is raised at
            once.
        sleep: pauses so many seconds; what it raises ends the attempts. None: ``time.sleep``.

    Raises:
        Exception: the last one that ``request`` raised.
    """
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while True:
        try:
            return request()
        except Exception as error:
            # Full jitter: after an outage a thousand nodes must not return in step.
            delay = random.uniform(pause / 2, pause)
            if not retryable(error) or time.monotonic() + delay >= deadline:
                raise
        (sleep or time.sleep)(delay)
        pause = min(2 * pause, _LONGEST_PAUSE)


def store_is_away(error: Exception) -> bool:
    """``retryable`` for the calls of a client, which has itself retried, and may be closed."""
    away = isinstance(error, RendezvousConnectionError)
    return away and not isinstance(error, ClientClosedError)
