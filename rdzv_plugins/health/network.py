"""The check ``network``: rank 0 of this node's last round can be dialled.

Before its first round a node knows no other node, and passes. If rank 0 does not answer, rank 0
itself may be gone: the check waits until the run no longer counts on rank 0. This node is unfit
only if rank 0 stays in the run for the whole time and does not answer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

_DIAL_SECONDS = 3.0
_PAUSE_SECONDS = 0.5


def check(peer: Callable[[], tuple[str, int] | None], seconds: float) -> str | None:
    """Why this node is cut off from the others; None: it is not, or this is not known.

    ``peer`` returns address and port of rank 0 in this node's last round; None: the run does not
    count on that rank 0, or this node is rank 0.
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
    """Why rank 0 does not answer. None: it answers; a refusal counts, as the round may be over."""
    try:
        socket.create_connection(place, seconds).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return None
    except (OSError, UnicodeError) as error:
        return str(error)
    return None
