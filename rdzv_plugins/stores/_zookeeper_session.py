"""kazoo with a deadline for every request, many reads in one, and a reason when it fails.

kazoo's own calls block without end while the server is away; here each one ends at its deadline,
and nothing is queued while there is no connection: it could be applied long after its caller was
told that it failed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.client import KazooClient, TransactionRequest
from kazoo.exceptions import (
    EXCEPTIONS,
    AuthFailedError,
    ConnectionLoss,
    KazooException,
    SessionClosedRequireSaslError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import GetData, MultiHeader, int_struct
from kazoo.protocol.states import KazooState, KeeperState

from rdzv_plugins.stores._tls import stays_refused

__all__ = ["NotConnectedError", "ReadMany", "Session"]

# In these states kazoo has given up for good.
_ENDED = (KeeperState.AUTH_FAILED, KeeperState.CLOSED)

# So often a request that takes long looks whether it is still wanted.
_GLANCE = 0.1


def _always() -> bool:
    return True


class NotConnectedError(ConnectionLoss):  # type: ignore[misc]
    """There is no connection: nothing was sent."""


class ReadMany:
    """ZooKeeper's multi-read (3.6 and later), which kazoo does not have: one request, many znodes.

    Its result is a list of ``(data, stat)`` or the error of that znode, one for each path.
    """

    type = 22

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def serialize(self) -> bytes:
        message = bytearray()
        for path in self._paths:
            message += MultiHeader(GetData.type, False, -1).serialize()
            message += GetData(path, None).serialize()
        return bytes(message + MultiHeader(-1, True, -1).serialize())

    @staticmethod
    def deserialize(message: bytes, offset: int) -> list[Any]:
        results: list[Any] = []
        while True:
            header, offset = MultiHeader.deserialize(message, offset)
            if header.done:
                return results
            if header.type == GetData.type:
                data, stat = GetData.deserialize(message, offset)
                results.append((data, stat))
                offset += int_struct.size + len(data or b"") + _STAT_BYTES
            else:
                results.append(EXCEPTIONS[int_struct.unpack_from(message, offset)[0]]())
                offset += int_struct.size


_STAT_BYTES = 68


class Session:
    """One kazoo client, made anew when it gave up."""

    def __init__(self, settings: dict[str, Any], on_change: Callable[[], None]) -> None:
        """Begin to connect; ``on_change`` is called, briefly, whenever the connection changes."""
        self._settings = settings
        self._on_change = on_change
        self._changed = threading.Condition()
        self._closed = False
        self._proven = False
        self._reason = _LastWarning(self._notify)
        self._logger = logging.Logger("rdzv_plugins.zookeeper", logging.WARNING)
        self._logger.addHandler(self._reason)
        self._ended = False
        self._zk = self._connect()

    def _connect(self) -> Any:
        zk = KazooClient(
            handler=_NamedThreads(),
            logger=self._logger,
            connection_retry={"max_tries": -1, "delay": 0.02, "max_delay": 0.5},
            **self._settings,
        )
        zk.add_listener(lambda state: self._listen(zk, state))
        zk.start_async()
        return zk

    def _listen(self, zk: Any, state: str) -> None:
        with self._changed:
            if state == KazooState.CONNECTED:
                self._reason.message = ""
            elif state == KazooState.SUSPENDED:
                # Else an ensemble that lost its data refuses us for ever; that we do not read
                # what is older than we have seen rests on the sync before each read.
                zk.last_zxid = 0
            elif state == KazooState.LOST and zk.client_state in _ENDED:
                self._ended = True
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._on_change()

    @property
    def reason(self) -> str:
        """kazoo's last complaint about the connection; "" where it had none."""
        return self._reason.message

    def passing(self, error: Exception) -> bool:
        """Whether a connection that was refused may yet be accepted."""
        if isinstance(error, AuthFailedError | SessionClosedRequireSaslError):
            # A server that stops in the middle of a log-in looks like a refusal.
            return self._proven
        return self._proven or not stays_refused(self.reason)

    def client(self, deadline: float, wanted: Callable[[], bool] = _always) -> Any:
        """The connected kazoo client.

        Raises kazoo's errors if there is none at ``deadline``, or when it is not wanted any more.
        """
        with self._changed:
            while not (self._zk.connected and not self._ended):
                if self._closed:
                    raise NotConnectedError("closed")
                if self._ended:
                    self._ended = False
                    _stop(self._zk, 0.0)
                    self._zk = self._connect()
                    raise AuthFailedError
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not wanted() or not self.passing(ConnectionLoss()):
                    raise NotConnectedError(self.reason)
                self._changed.wait(min(remaining, _GLANCE))
            return self._zk

    def submit(self, request: Any, deadline: float, wanted: Callable[[], bool] = _always) -> Any:
        """Send one of kazoo's requests; its result is for `result`."""
        zk = self.client(deadline, wanted)
        answer = zk.handler.async_result()
        zk._call(request, answer)
        return answer

    def result(self, answer: Any, deadline: float, wanted: Callable[[], bool] = _always) -> Any:
        """Wait for an answer as long as it is wanted; raises kazoo's errors."""
        while not answer.ready():
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not wanted():
                raise ConnectionLoss("no answer in time")
            answer.wait(min(remaining, _GLANCE))
        value = answer.get()
        self._proven = True
        return value

    def commit(self, deadline: float, build: Callable[[Any], None]) -> list[Any] | None:
        """Commit what ``build`` puts into a transaction; None: it was refused, nothing was done.

        Raises:
            KazooException: it is not known to have been refused, or not for what the znodes hold.
        """
        transaction = TransactionRequest(self.client(deadline))
        build(transaction)
        results: list[Any] = self.result(transaction.commit_async(), deadline)
        errors = [error for error in results if isinstance(error, KazooException)]
        if not errors:
            return results
        for error in errors:
            if type(error).__name__ in _NOT_FOR_ITS_CONTENT:
                raise error
        return None

    def close(self) -> None:
        """End the session; idempotent. The server forgets it in the background."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._notify()
        # Quick while connected; without a server kazoo may take as long as a connect.
        _stop(self._zk, 1.0)


_NOT_FOR_ITS_CONTENT = frozenset({"NoAuthError", "InvalidACLError", "QuotaExceededError"})


def _stop(zk: Any, seconds: float) -> None:
    """End a kazoo client in the background, and wait so long for it."""

    def stop() -> None:
        with contextlib.suppress(Exception):
            zk.stop()
            zk.close()

    thread = threading.Thread(target=stop, name="rdzv-zookeeper-stop", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # From Python 3.12 on there are no new threads once the interpreter ends.
        stop()
    else:
        thread.join(seconds)


class _NamedThreads(SequentialThreadingHandler):  # type: ignore[misc]
    def spawn(self, func: Any, *args: Any, **kwargs: Any) -> threading.Thread:
        def run() -> None:
            # kazoo has told `_LastWarning` what it raises here.
            with contextlib.suppress(Exception):
                func(*args, **kwargs)

        thread = threading.Thread(target=run, name="rdzv-zookeeper", daemon=True)
        thread.start()
        return thread


class _LastWarning(logging.Handler):
    """Keeps what kazoo would log at every attempt to connect, for the one error that is raised."""

    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self.message = ""
        self._notify = notify

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith(("Connection", "Cannot", "AUTH", "Unhandled")):
            self.message = message
            self._notify()
