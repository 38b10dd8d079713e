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
    failures = 0
    before: Exception | None = None
    while True:
        if failed is None:
            try:
                return request()
            except Exception as error:
                failed = error
        pause = longest_pause(failures)
        # Jitter: after an outage a thousand nodes must not return in step.
        delay = random.uniform(pause / 2, pause)
        if not retryable(failed) or time.monotonic() + delay >= deadline:
            if isinstance(failed, TimeoutError) and before is not None:
                raise before from None
            raise failed
        before, failed, failures = failed, None, failures + 1
        (sleep or time.sleep)(delay)


def longest_pause(failures: int) -> float:
    """Seconds to pause at most after so many failures before the last one."""
    return min(0.01 * 2.0 ** min(failures, 10), 0.5)


def pause_after(failures: int) -> float:
    """Seconds to pause, at random: clients that were refused together try again apart."""
    return random.uniform(0, longest_pause(failures))


def store_is_away(error: Exception) -> bool:
    """Whether a client's call failed, after its own retries, because the store is unreachable."""
    away = isinstance(error, RendezvousConnectionError)
    return away and not isinstance(error, ClientClosedError)
