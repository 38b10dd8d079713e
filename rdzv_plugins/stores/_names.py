"""The addresses of a store's servers, also while the resolver does not answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

from rdzv_plugins.kv.base import in_background

AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]
"""As of ``socket.getaddrinfo``."""

# Then the last answer counts: who asks has a request to make, and a lease that runs out.
_PATIENCE = 1.0

_known: dict[tuple[str, int], list[AddressInfo]] = {}


class _LookUp:
    """One that goes on in a thread of its own: a resolver cannot be told a deadline."""

    def __init__(self, host: str, port: int) -> None:
        self.since = time.monotonic()
        self.done = threading.Event()
        self.error: Exception | None = None

        def ask() -> None:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                _known[host, port] = found
            except Exception as error:
                self.error = error
            self.done.set()

        in_background("rdzv-store-name", ask)


# By process too: a child has none of its parent's threads.
_asked: dict[tuple[int, str, int], _LookUp] = {}


def look_up(host: str, port: int, seconds: float) -> list[AddressInfo]:
    """As ``socket.getaddrinfo``, but an answer that does not come is the last one that came.

    glibc asks for 10 s and longer, which no caller can shorten: a node that connects anew, while
    DNS is away or its packets are lost, would be silent for so long, and lost.

    Args:
        seconds: to wait for a name that was never resolved.

    Raises:
        socket.gaierror: there is no such name, or no answer came in time and none had come before.
    """
    try:
        flags = socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except socket.gaierror:
        pass  # It is a name.
    place = (os.getpid(), host, port)
    asked = _asked.get(place)
    if asked is None or asked.done.is_set():
        # Two threads that come at once ask twice, which does no harm.
        asked = _asked[place] = _LookUp(host, port)
    known = _known.get((host, port))
    if known is not None:
        seconds = min(seconds, asked.since + _PATIENCE - time.monotonic())
    answered = asked.done.wait(max(0.0, seconds))
    error: Exception | None = asked.error
    if not answered:
        error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    if error is None:
        return _known[host, port]
    passing = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
    if known is not None and passing:
        return known
    raise error
