"""A host without a resource, as an outage: told once, and tried again after growing pauses.

Threads, descriptors and memory are missing for a second as well as for good, and whoever has none
can end nothing but itself. A node therefore treats this as it treats a store that is away.
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
# CPython's words; while the interpreter ends it says something else.
_NO_THREAD = "can't start new thread"

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0

# Opening a TCPStore, or starting a worker, takes up to a dozen descriptors at once.
_DESCRIPTORS = 16


class ExhaustedError(RendezvousConnectionError):
    """This host has run out of threads, descriptors or memory: the store was not asked."""


def exhausted(error: BaseException | None) -> ExhaustedError | None:
    """The error for what this host has run out of, if this one, or one behind it, says that."""
    behind: list[BaseException] = []
    # A signal that comes while an error is handled has that error as its context.
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
        # A resolver that can open no socket says that it knows no such name.
        try:
            require_descriptors(1)
        except OSError as found:
            error = found
    return _ERRNOS.get(error.errno or 0) if isinstance(error, OSError) else None


def is_signal(error: BaseException) -> bool:
    """Whether it is torch's `SignalException`, which a signal handler raises anywhere."""
    # Nobody raises it who has not loaded torch.
    torchs = sys.modules.get("torch.distributed.elastic.multiprocessing.api")
    return isinstance(error, getattr(torchs, "SignalException", ()))


def require_descriptors(count: int = _DESCRIPTORS) -> None:
    """Raise OSError unless this process may open so many more files now."""
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
    """When to try again what has failed: after pauses that grow.

    Args:
        clock: monotonic, in seconds; None: this host's.
        longest: pause, in seconds.

    Attributes:
        failures: since one succeeded.
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
        """Until the next one; 0: it is due."""
        return max(0.0, self._due - self._clock()) if self.failures else 0.0

    def fail(self) -> bool:
        """One has failed; returns whether it is the first since one succeeded, which is told."""
        self._due = self._clock() + min(_FIRST_PAUSE * 2.0**self.failures, self._longest)
        self.failures = min(self.failures + 1, 16)
        return self.failures == 1

    def succeed(self) -> bool:
        """One has succeeded; returns whether others had failed before."""
        failures, self.failures = self.failures, 0
        return failures > 0
