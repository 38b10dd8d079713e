"""Retry a request to a store until it succeeds or its time is up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rdzv_plugins.kv.contract import ClientClosedError, RendezvousConnectionError

__all__ = ["growing_pauses", "retry", "store_is_away"]

T = TypeVar("T")


def retry(
    request: Callable[[], T],
    *,
    timeout: float,
    retryable: Callable[[Exception], bool],
    sleep: Callable[[float], None] | None = None,
    failed: Exception | None = None,
) -> T:
    """Call ``request`` until it returns, at most ``timeout`` seconds long.

    Args:
        request: raises what the store's client raises.
        timeout: seconds; no attempt starts afterwards.
        retryable: whether another attempt may succeed after this exception; if not, it is raised
            at once.
        sleep: gets the seconds to pause; its exceptions end the attempts. None: ``time.sleep``.
        failed: what the first attempt raised, if the caller has made it.

    Raises:
        Exception: the last one that ``request`` raised; but the one before if in the last attempt
            only the time ran out, which tells nobody why.
    """
    deadline = time.monotonic() + timeout
    pauses = growing_pauses()
    before: Exception | None = None
    while True:
        if failed is None:
            try:
                return request()
            except Exception as error:
                failed = error
        pause = next(pauses)
        # Jitter: after an outage a thousand nodes must not return in step.
        delay = random.uniform(pause / 2, pause)
        if not retryable(failed) or time.monotonic() + delay >= deadline:
            if isinstance(failed, TimeoutError) and before is not None:
                raise before from None
            raise failed
        before, failed = failed, None
        (sleep or time.sleep)(delay)


def growing_pauses() -> Iterator[float]:
    """The longest pauses between attempts, in seconds."""
    pause = 0.01
    while True:
        yield pause
        pause = min(2 * pause, 0.5)


def store_is_away(error: Exception) -> bool:
    """Whether a client's call failed, after its own retries, because the store is unreachable."""
    away = isinstance(error, RendezvousConnectionError)
    return away and not isinstance(error, ClientClosedError)
