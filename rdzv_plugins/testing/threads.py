"""Calls in background threads; a failed call fails the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Generic, TypeVar

from rdzv_plugins.kv.base import in_background

__all__ = ["Background", "together"]

T = TypeVar("T")


class Background(Generic[T]):
    """A call in its own daemon thread, which starts at once."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._future = in_background("conformance", call)

    def done(self, timeout: float = 0.0) -> bool:
        """Whether the call ends within ``timeout`` seconds."""
        return not wait([self._future], timeout).not_done

    def result(self, timeout: float) -> T:
        """The result of the call, or its error; `AssertionError` if it has not ended in time."""
        assert self.done(timeout), f"the call had not ended after {timeout:g} s"
        return self._future.result()


def together(calls: Sequence[Callable[[], T]], timeout: float = 90.0) -> list[T]:
    """Run the calls at the same time, each in a thread; return their results in order."""
    start = threading.Barrier(len(calls))

    def begin(call: Callable[[], T]) -> T:
        start.wait(timeout)
        return call()

    running = [Background(lambda call=call: begin(call)) for call in calls]  # type: ignore[misc]
    return [item.result(timeout) for item in running]
