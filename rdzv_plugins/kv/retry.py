"""Retry a request to a store until it succeeds or its time is up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from rdzv_plugins.kv.contract import ClientClosedError, RendezvousConnectionError

T = TypeVar("T")


def retry(
    request: Callable[[], T],
    *,
    timeout: float,
    retryable: Callable[[Exception], bool],
    sleep: Callable[[float], None] | None = None,
) -> T:
    """Call ``request`` until it returns.

    Args:
        timeout: seconds; no attempt starts afterwards.
        retryable: whether another attempt may succeed after this exception.
        sleep: pauses for some seconds; its exceptions end the attempts. None: ``time.sleep``.

    Raises:
        Exception: the last exception of ``request``; or the one before it, if the last is a
            TimeoutError, which does not tell the cause.
    """
    deadline = time.monotonic() + timeout
    failures = 0
    before: Exception | None = None
    while True:
        try:
            return request()
        except Exception as error:
            failed = error
        pause = longest_pause(failures)
        # Jitter, so that after an outage a thousand nodes do not return at the same time.
        delay = random.uniform(pause / 2, pause)
        if not retryable(failed) or time.monotonic() + delay >= deadline:
            if isinstance(failed, TimeoutError) and before is not None:
                raise before from None
            raise failed
        before, failures = failed, failures + 1
        (sleep or time.sleep)(delay)


def longest_pause(failures: int) -> float:
    """The longest pause in seconds, after ``failures`` failures before the last."""
    return min(0.01 * 2.0 ** min(failures, 10), 0.5)


def pause_after(failures: int) -> float:
    """A random pause in seconds, so that clients that failed together retry at different times."""
    return random.uniform(0, longest_pause(failures))


def store_is_away(error: Exception) -> bool:
    """Whether this error of a client's call means that the store is unreachable."""
    away = isinstance(error, RendezvousConnectionError)
    return away and not isinstance(error, ClientClosedError)
