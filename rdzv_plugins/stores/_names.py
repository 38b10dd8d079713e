"""Looks up and dials a store's servers, also while the resolver does not answer."""

from __future__ import annotations

import os
import select
import socket
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from rdzv_plugins.kv.base import Limit, in_background

AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]
"""An item of the result of ``socket.getaddrinfo``."""

# After this time the last answer counts, because the caller's lease runs out.
_PATIENCE = 1.0

_known: dict[tuple[str, int], list[AddressInfo]] = {}


# Look-ups under way and their begin. By process, because a child has no threads of its parent.
_asked: dict[tuple[int, str, int], tuple[float, Future[list[AddressInfo]]]] = {}


def _ask(host: str, port: int) -> list[AddressInfo]:
    found = _known[host, port] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found


def look_up(host: str, port: int, seconds: float) -> list[AddressInfo]:
    """Like ``socket.getaddrinfo``, but without an answer it returns the last answer.

    glibc asks for 10 s and longer, which no caller can shorten. If DNS is away or loses packets, a
    node that connects again would be silent for that time, and lost.

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
    except UnicodeError:
        # A part between its dots is empty or too long.
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
    place = (os.getpid(), host, port)
    asked = _asked.get(place)
    if asked is None or asked[1].done():
        # In a thread, because a resolver takes no deadline. Two callers at once may ask twice.
        answer = in_background("rdzv-store-name", partial(_ask, host, port))
        asked = _asked[place] = time.monotonic(), answer
    since, answer = asked
    known = _known.get((host, port))
    if known is not None:
        seconds = min(seconds, since + _PATIENCE - time.monotonic())
    try:
        return answer.result(max(0.0, seconds))
    except TimeoutError:
        error = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    except socket.gaierror as failure:
        error = failure
    if known is not None and error.errno == socket.EAI_AGAIN:
        return known
    raise error


def connected(host: tuple[str, int], limit: Limit) -> socket.socket:
    """A connected, non-blocking socket; each address left has an equal share of the time left."""
    problem = OSError("the host has no address")
    found = look_up(*host, limit.seconds)
    for at, (family, kind, protocol, _, address) in enumerate(found):
        share = limit.within(limit.seconds / (len(found) - at))
        try:
            line = socket.socket(family, kind, protocol)
        except OSError as error:  # The kernel has no IPv6.
            problem = error
            continue
        try:
            line.setblocking(False)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(BlockingIOError):
                line.connect(address)
            share.await_ready(line.fileno(), select.POLLOUT)
            if number := line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, os.strerror(number))
        except OSError as error:
            problem = error
        except BaseException:
            line.close()
            raise
        else:
            return line
        line.close()
    raise problem
