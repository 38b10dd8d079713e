"""A signal to ``rdzv run``: the workers train on until the run has saved, and then the node leaves.

torch's agent stops its workers as soon as it gets a signal, and the steps since the last checkpoint
are lost on all nodes. While workers run, this module's handler takes the place of torch's. A second
signal, and one at which the workers tell no steps, has torch's effect at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from rdzv_plugins.process.signals import is_torchs

if TYPE_CHECKING:
    from rdzv_plugins.process.handler import StoreRendezvousHandler

log = logging.getLogger(__name__)


class Notice:
    """The signals of one agent; its methods are for the main thread."""

    def __init__(self, handler: StoreRendezvousHandler) -> None:
        self._handler = handler
        self._seconds = handler.leave_notice
        # torch's handlers, while they are replaced.
        self._torchs: dict[signal.Signals, Any] = {}
        # The first signal, and when it came.
        self._signal: signal.Signals | None = None
        self._came = 0.0
        # Whether `look` has told the node to leave once the run has saved.
        self._ordered = False

    def begin(self) -> None:
        """Replace torch's handlers while workers run, except SIGINT's: a person waits for it."""
        if not self._seconds or threading.current_thread() is not threading.main_thread():
            return
        for number in {*signal.Signals} - {signal.SIGINT}:
            found = signal.getsignal(number)
            if is_torchs(found):
                self._torchs[number] = found
                signal.signal(number, self._take)

    def end(self) -> None:
        """Restore torch's handlers, because the workers have ended or are to end."""
        for its, handler in self._torchs.items():
            signal.signal(its, handler)
        self._torchs = {}  # Not before: a signal in between calls this method again.
        number, self._signal = self._signal, None
        if number is not None:
            # Repeat the signal, so that the leave is announced and torch stops the workers.
            os.kill(os.getpid(), number)

    def look(self) -> None:
        """Leave if a signal came, and the run has saved or the time is up. Raises torch's error."""
        if self._signal is None:
            return
        if not self._ordered:
            self._ordered = True
            log.warning(
                "got %s: this node leaves once all ranks have saved, in %g s at the latest; again "
                "ends it at once",
                self._signal.name,
                self._seconds,
            )
            self._handler.order_leave()
        if time.monotonic() - self._came > self._seconds or self._handler.may_leave:
            self.end()

    def _take(self, number: int, _: object) -> None:
        again, self._signal = self._signal is not None, signal.Signals(number)
        self._came = self._came or time.monotonic()
        # Do no more here: the main thread may hold a lock of the handler.
        if again or not self._handler.can_save:
            self.end()
