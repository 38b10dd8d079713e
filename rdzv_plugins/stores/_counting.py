"""`add` by compare-and-set, when many add to one counter at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from rdzv_plugins.kv import RendezvousConnectionError

__all__ = ["outlast", "uncounted"]

# Of the request timeout: a minute by default. The store is up, the others just are faster.
_TIMEOUTS = 12

_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.5


def outlast(attempt: Callable[[], int | None], key: str, where: str, request_timeout: float) -> int:
    """Call ``attempt`` until it returns the sum; None means that a rival was faster.

    Whenever that happens one of the rivals is done. The pauses grow, or hundreds that begin at once
    would keep the store busy with refusals.

    Raises:
        RendezvousConnectionError: the others were faster for twelve request timeouts.
    """
    seconds = _TIMEOUTS * request_timeout
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while (total := attempt()) is None:
        if time.monotonic() >= deadline:
            raise RendezvousConnectionError(
                f"'{key}' in {where} was changed by others all through {seconds:g} s and nothing "
                "was counted: they are too many for it, or it is too slow"
            )
        time.sleep(random.uniform(0, pause))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return total


def uncounted(key: str, where: str) -> RendezvousConnectionError:
    """The error for an attempt whose answer was lost and whose trace a rival has written over."""
    return RendezvousConnectionError(
        f"the answer of {where} was lost: whether '{key}' was counted is unknown"
    )
