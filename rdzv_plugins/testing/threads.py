"""Calls in background threads; a failed call fails the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["Background", "together"]

T = TypeVar("T")


class Background(Generic[T]):
    """A call in its own daemon thread, which starts at once."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="conformance", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error

    def done(self, timeout: float = 0.0) -> bool:
        """Whether the call ends within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self, timeout: float) -> T:
        """The result of the call, or its error; `AssertionError` if it has not ended in time."""
        assert self.done(timeout), f"the call had not ended after {timeout:g} s"
        if self._error is not None:
            raise self._error
        return self._results[0]


def together(calls: Sequence[Callable[[], T]], timeout: float = 90.0) -> list[T]:
    """Run the calls at the same time, each in a thread; return their results in order."""
    start = threading.Barrier(len(calls))

    def begin(call: Callable[[], T]) -> T:
        start.wait(timeout)
        return call()

    running = [Background(lambda call=call: begin(call)) for call in calls]  # type: ignore[misc]
    return [item.result(timeout) for item in running]
