"""A host without threads, descriptors or memory: logged once, and tried again after growing pauses.

The lack may last for a second or for good, and a process without resources can only end itself. A
node therefore treats the lack like a store that is away.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

from rdzv_plugins.kv.contract import RendezvousConnectionError

_ERRNOS = {
    errno.EMFILE: "this process may open no more files (see ulimit -n)",
    errno.ENFILE: "this host can open no more files",
    errno.ENOMEM: "this host has no memory left",
    errno.ENOBUFS: "this host has no memory left for a socket",
}
# CPython's message; while the interpreter ends, the message differs.
_NO_THREAD = "can't start new thread"

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0

# Opening a TCPStore, or starting a worker, takes up to a dozen descriptors at once.
_DESCRIPTORS = 16


class ExhaustedError(RendezvousConnectionError):
    """This host has run out of threads, descriptors or memory: the store was not asked."""


def exhausted(error: BaseException | None) -> ExhaustedError | None:
    """The error for the missing resource, if ``error`` or one of its causes names one; or None."""
    behind: list[BaseException] = []
    # The exception of a signal has the error as its context that was being handled.
    while not (error is None or error in behind or is_signal(error)):
        if isinstance(error, ExhaustedError):
            return error
        if said := _missing(error):
            return ExhaustedError(said)
        behind.append(error)
        error = error.__cause__ or error.__context__
    return None


def _missing(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return _ERRNOS[errno.ENOMEM]
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return "this host lets this process start no thread (see ulimit -u, or its pids limit)"
    if isinstance(error, socket.gaierror):
        # A resolver that can open no socket reports an unknown name.
        try:
            require_descriptors(1)
        except OSError as found:
            error = found
    return _ERRNOS.get(error.errno or 0) if isinstance(error, OSError) else None


def is_signal(error: BaseException) -> bool:
    """Whether ``error`` is torch's `SignalException`, which a signal handler may raise anywhere."""
    # Only a process that has loaded torch raises it.
    torchs = sys.modules.get("torch.distributed.elastic.multiprocessing.api")
    return isinstance(error, getattr(torchs, "SignalException", ()))


def require_descriptors(count: int = _DESCRIPTORS) -> None:
    """Raise OSError unless this process may open ``count`` more files now."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def missing_for_workers() -> ExhaustedError | None:
    """The resource that this host lacks to start workers; None: it has enough now.

    A process that may start no thread may start no process either.
    """
    thread = threading.Thread(target=int, name="rdzv-room", daemon=True)
    try:
        require_descriptors()
        thread.start()
        thread.join()
    except (OSError, RuntimeError, MemoryError) as error:
        if (missing := exhausted(error)) is None:
            raise
        return missing
    return None


class Attempts:
    """Growing pauses between attempts that fail.

    Args:
        clock: monotonic seconds; None: this host's clock.
        longest: the longest pause in seconds.

    Attributes:
        failures: failed attempts since the last success.
    """

    def __init__(
        self, clock: Callable[[], float] | None = None, longest: float = _LONGEST_PAUSE
    ) -> None:
        self._clock = clock or (lambda: time.monotonic())
        self._longest = longest
        self.failures = 0
        self._due = 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds until the next attempt; 0: it is due."""
        return max(0.0, self._due - self._clock()) if self.failures else 0.0

    def fail(self) -> bool:
        """Note a failed attempt; returns whether it is the first since a success, to log it."""
        self._due = self._clock() + min(_FIRST_PAUSE * 2.0**self.failures, self._longest)
        self.failures = min(self.failures + 1, 16)
        return self.failures == 1

    def succeed(self) -> bool:
        """Note a success; returns whether attempts had failed before."""
        failures, self.failures = self.failures, 0
        return failures > 0
