"""A request that cannot be broken off is asked in a thread of its own, and can be left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["aside"]

T = TypeVar("T")

# So often the caller looks whether the answer is still wanted.
_GLANCE = 0.05


def aside(request: Callable[[], T], wanted: Callable[[], bool]) -> T | None:
    """What ``request`` returns or raises; None soon after it is not wanted any more.

    It then goes on to its own end, and nobody learns what came of it.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(request())
        except Exception as error:
            answer.set_exception(error)

    thread = threading.Thread(target=ask, name="rdzv-aside", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # From Python 3.12 on there are no new threads once the interpreter ends.
        ask()
    while not answer.done():
        if not wanted():
            return None
        thread.join(_GLANCE)
    return answer.result()
