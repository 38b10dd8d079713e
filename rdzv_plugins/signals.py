"""Tells at once that this process is about to end when a signal says so.

torch's agent installs its signal handlers when its first workers start, and announces nothing: it
stops its workers, which may take as long as they need to save, and exits. Before the first workers
a signal ends the process at once. So a handler of ours stands before torch's, or in the place of
none.
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
    """Calls ``announce``, in a thread of its own, when a signal comes that ends this process.

    Args:
        announce: what to do; the signal's handler itself must take no lock.
        name: of the thread.
    """

    def __init__(self, announce: Callable[[], object], name: str) -> None:
        self._announce = announce
        self._name = name
        self._pid = os.getpid()
        # Its put() may be called in a signal handler, whatever the thread was doing.
        self._signals: SimpleQueue[int | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._released = False
        self._previous: dict[int, Any] = {}
        self._handler = self._on_signal

    def renew(self) -> None:
        """Stand before the handlers of torch and of the system, where that is not so; it is cheap.

        An application's own handlers stay as they are: what they mean, only it knows. Only the main
        thread may do this; in another nothing happens.
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
        """Put the handlers back that stood before, where the caller may, and end the thread."""
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
            # A child that was forked has our handler, and not our node.
            signal.signal(number, previous)
            signal.raise_signal(number)
            return
        self._signals.put(number)
        if callable(previous):
            previous(number, frame)
            return
        name = signal.Signals(number)
        # As torch's own handler does, once it is installed.
        raise SignalException(f"Process {os.getpid()} got signal: {name}", sigval=name)
