"""Announces at once that a signal is about to end this process.

torch's agent installs its signal handlers when its first workers start. They announce nothing: they
stop the workers, which may take as long as a worker needs to save, and exit. Before the first
workers start, a signal ends the process at once. So this module installs a handler that runs before
torch's, or instead of the default.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

__all__ = ["SignalWatch"]

_FATAL = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TORCHS = "torch.distributed.elastic"


class SignalWatch:
    """Calls ``announce`` in a separate thread when a signal arrives that ends this process.

    Args:
        announce: runs in the thread, because a signal handler must not take a lock.
        name: of the thread.
    """

    def __init__(self, announce: Callable[[], object], name: str) -> None:
        self._announce = announce
        self._name = name
        self._pid = os.getpid()
        # A signal handler may call its put() at any point of the interrupted thread.
        self._signals: SimpleQueue[int | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._released = False
        self._previous: dict[int, Any] = {}
        self._handler = self._on_signal

    def renew(self) -> None:
        """Install the handler before those of torch and of the system, unless installed; cheap.

        An application's own handlers stay in place, because their meaning is unknown. Does nothing
        outside the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if self._released or os.getpid() != self._pid:
            return
        for number in (*_FATAL, signal.SIGINT):
            current = signal.getsignal(number)
            if current is self._handler:
                continue
            torchs = getattr(current, "__module__", "") or ""
            if not torchs.startswith(_TORCHS) and not (
                current is signal.SIG_DFL and number in _FATAL
            ):
                continue
            self._previous[number] = current
            signal.signal(number, self._handler)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def release(self) -> None:
        """Restore the previous handlers, if this is the main thread, and end the thread."""
        self._released = True
        self._signals.put(None)
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                if signal.getsignal(number) is self._handler:
                    signal.signal(number, previous)

    def _run(self) -> None:
        if self._signals.get() is not None:
            self._announce()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if os.getpid() != self._pid:
            # A forked child inherits the handler, but is not this node.
            signal.signal(number, previous)
            signal.raise_signal(number)
            return
        self._signals.put(number)
        if callable(previous):
            previous(number, frame)
            return
        name = signal.Signals(number)
        # torch's own handler raises the same, once it is installed.
        raise SignalException(f"Process {os.getpid()} got signal: {name}", sigval=name)
