"""How a command that goes on until Ctrl-C learns of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from queue import Empty, SimpleQueue

_LOOK_SECONDS = 0.5


class Interrupt:
    """SIGINT and SIGTERM from now on; for the main thread."""

    def __init__(self) -> None:
        # A handler runs in the thread that waits: it might wait for ever for the lock of an Event.
        self._signals: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._signals.put(number))

    def wait(self, look: Callable[[], object] = lambda: None) -> None:
        """Wait for one of them, and call ``look`` every half second.

        Many short waits: a signal that comes as one begins does not end it.
        """
        while True:
            try:
                self._signals.get(timeout=_LOOK_SECONDS)
            except Empty:
                look()
            else:
                return
