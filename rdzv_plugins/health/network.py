"""The check ``network``: rank 0 of this node's last round can be dialled.

Before its first round a node knows no other, and passes. That rank 0 does not answer proves nothing
while it may be what is gone: the check then waits until the run counts on it no more, and only a
rank 0 that stays in the run and does not answer for the whole time makes this node unfit.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

_DIAL_SECONDS = 3.0
_PAUSE_SECONDS = 0.5


def check(peer: Callable[[], tuple[str, int] | None], seconds: float) -> str | None:
    """Why this node is cut off from the others; None where it is not, or nobody can tell.

    ``peer`` tells address and port of rank 0 in this node's last round; None: the run does not
    count on it, or this node is it.
    """
    deadline = time.monotonic() + seconds
    while (place := peer()) is not None:
        left = deadline - time.monotonic()
        why = _dial(place, max(0.1, min(_DIAL_SECONDS, left)))
        if why is None:
            return None
        if time.monotonic() + _PAUSE_SECONDS >= deadline:
            return f"rank 0 of the last round, {place[0]}:{place[1]}, does not answer: {why}"
        time.sleep(_PAUSE_SECONDS)
    return None


def _dial(place: tuple[str, int], seconds: float) -> str | None:
    """Why nobody answers; None: somebody does, if only to refuse, for the round may be over."""
    try:
        socket.create_connection(place, seconds).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return None
    except (OSError, UnicodeError) as error:
        return str(error)
    return None
