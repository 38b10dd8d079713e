"""Announces the end of this process as soon as it gets a signal.

At a signal torch's agent stops its workers, which may take long because they save, and then exits;
it announces nothing. Before the first workers start, it has no handlers, and a signal ends the
process at once. Hence a thread sees every signal through the wakeup descriptor of Python's `signal`
module, whatever handler is installed, and this module replaces the system's handlers until torch
installs its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rdzv_plugins.kv import Attempts, exhausted, is_signal

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import SignalException

log = logging.getLogger(__name__)

_FATAL = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
# No process can handle the first two; the others end no process by default.
_NEVER = (
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGURG,
    signal.SIGWINCH,
)
# torch's launcher puts --signals-to-handle into this variable before it creates the handler.
_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_TORCHS = "torch.distributed.elastic"


def deaf_parent() -> str | None:
    """The name of this process's parent, if the parent is PID 1 and does not handle SIGTERM.

    A container's runtime signals only PID 1. Linux drops signals that PID 1 does not handle, and a
    shell that waits for a command forwards none.
    """
    if os.getppid() != 1:
        return None
    try:
        lines = Path("/proc/1/status").read_text().splitlines()
    except OSError:
        return None
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    # A blocked signal counts as handled: tini and systemd block signals and wait for them.
    heeded = int(status["SigCgt"], 16) | int(status["SigBlk"], 16)
    return None if heeded >> (signal.SIGTERM - 1) & 1 else status["Name"]


class SignalWatch:
    """Calls ``announce``, in a thread of its own, when a signal ends this process.

    A signal with a handler of the application is not announced, because only the application knows
    its meaning. One watch of a process listens at a time.
    """

    def __init__(self, announce: Callable[[], object], name: str) -> None:
        self._announce = announce
        self._name = name
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._released = False
        self._attempts = Attempts()
        # The signal that was announced.
        self._came: int | None = None

    def renew(self) -> None:
        """Listen, and replace the system's handlers; cheap, for repeated calls.

        Has no effect outside the main thread, as Python demands. If this host lacks a resource, the
        first call logs it, and later calls try again. Raises the exception of an announced signal:
        code that was interrupted, such as Python's logging, may have swallowed it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if self._came is not None:
            _raise(self._came, None)
        if self._released:
            return
        ending = _ending(os.environ.get(_HANDLED, ""))
        for number in ending:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _raise)
        if _listening is None and not self._attempts.seconds_left:
            # Block signals, because a handler's exception could leave a watch without a thread.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
            try:
                self._listen()
            except Exception as error:
                if (missing := exhausted(error)) is None:
                    raise
                if self._attempts.fail():
                    log.warning(
                        "%s, so nobody listens for signals yet: the leave of this node is "
                        "announced only when its process ends; this is tried again",
                        missing,
                    )
            else:
                self._attempts.succeed()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def release(self) -> None:
        """End the thread and, in the main thread, restore the system's handlers."""
        self._released = True
        if self._sockets is not None:
            with contextlib.suppress(OSError):
                self._sockets[1].send(b"\0")
        if _listening is self and threading.current_thread() is threading.main_thread():
            _restore()

    def _listen(self) -> None:
        global _listening
        receive, send = socket.socketpair()
        send.setblocking(False)
        thread = threading.Thread(target=self._run, args=(receive,), name=self._name, daemon=True)
        taken = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
        if taken != -1:
            signal.set_wakeup_fd(taken)  # An event loop in the main thread needs it.
            receive.close()
            send.close()
            return
        try:
            thread.start()
        except BaseException:
            signal.set_wakeup_fd(-1)
            receive.close()
            send.close()
            raise
        # Keeps the descriptor open while it is installed; another file could get its number.
        _listening = self
        self._sockets = receive, send

    def _run(self, receive: socket.socket) -> None:
        while not self._released:
            for number in filter(_ends_this_process, receive.recv(64)):
                self._came = number
                self._announce()
                return


_listening: SignalWatch | None = None


@cache
def _ending(handled: str) -> frozenset[signal.Signals]:
    """The signals that end this process unless an application handles them.

    Args:
        handled: the value of `_HANDLED`.
    """
    names = {name.strip() for name in handled.split(",")}
    more = {number for number in signal.Signals if number.name in names}
    return frozenset({*_FATAL, *more} - {*_NEVER})


def _ends_this_process(number: int) -> bool:
    if number not in _ending(os.environ.get(_HANDLED, "")):
        return False
    handler = signal.getsignal(number)
    return handler is _raise or is_torchs(handler)


def is_torchs(handler: object) -> bool:
    """Whether torch's launcher has installed this handler of a signal."""
    return (getattr(handler, "__module__", "") or "").startswith(_TORCHS)


def signal_behind(error: BaseException | None) -> SignalException | None:
    """The exception of a signal: ``error``, or one that ``error`` has replaced; None: neither.

    A signal that comes while `threading.Thread.start` runs may leave it as a KeyError.
    """
    while error is not None and not is_signal(error):
        error = error.__context__
    return error  # type: ignore[return-value]


def _raise(number: int, _: FrameType | None) -> None:
    """What torch's handler does."""
    # Imported late, so that this module needs no torch.
    from torch.distributed.elastic.multiprocessing import SignalException

    name = signal.Signals(number)
    raise SignalException(f"Process {os.getpid()} got signal: {name}", sigval=name)


def _restore() -> None:
    global _listening
    for number in signal.Signals:
        if signal.getsignal(number) is _raise:
            signal.signal(number, signal.SIG_DFL)
    if _listening is not None:
        signal.set_wakeup_fd(-1)
        _listening = None


# A forked child shares the descriptor, and must not report its own signals there.
os.register_at_fork(after_in_child=_restore)
