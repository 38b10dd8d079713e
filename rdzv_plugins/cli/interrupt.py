"""Tells a command that runs until Ctrl-C of the signal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from queue import Empty, SimpleQueue

_LOOK_SECONDS = 0.5


class Interrupt:
    """SIGINT and SIGTERM from now on; for the main thread."""

    def __init__(self) -> None:
        # Not an Event: the handler runs in the waiting thread, and could wait forever for its lock.
        self._signals: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._signals.put(number))

    def wait(self, look: Callable[[], object] = lambda: None) -> None:
        """Wait for SIGINT or SIGTERM, and call ``look`` every half second.

        Waits many short times, because a signal does not end a wait that is just beginning.
        """
        while True:
            try:
                self._signals.get(timeout=_LOOK_SECONDS)
            except Empty:
                look()
            else:
                return
