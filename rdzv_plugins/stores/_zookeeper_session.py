"""A kazoo client whose requests end at their limit, and which says why it has no connection.

kazoo's own calls block without end while the server is away; here each one ends at its limit, and
nothing is queued while there is no connection: it could be applied long after its caller was told
that it failed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    EXCEPTIONS,
    AuthFailedError,
    ConnectionLoss,
    NoNodeError,
    SessionClosedRequireSaslError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import GetData, MultiHeader, int_struct, stat_struct
from kazoo.protocol.states import KazooState, KeeperState

from rdzv_plugins.kv.base import Limit
from rdzv_plugins.stores._tls import stays_refused

__all__ = ["NotConnectedError", "ReadMany", "Session"]

# In these states kazoo has given up for good.
_ENDED = (KeeperState.AUTH_FAILED, KeeperState.CLOSED)

# So often a request that takes long looks whether it is still wanted, in seconds.
_GLANCE = 0.1


class NotConnectedError(ConnectionLoss):  # type: ignore[misc]
    """There is no connection: nothing was sent."""


class ReadMany:
    """ZooKeeper's multi-read (3.6 and later), which kazoo does not have: one request, many znodes.

    Its result is a list of ``(data, stat)``, None where there is no znode, or the znode's error.
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
                offset += int_struct.size + len(data or b"") + stat_struct.size
            else:
                error = EXCEPTIONS[int_struct.unpack_from(message, offset)[0]]()
                results.append(None if isinstance(error, NoNodeError) else error)
                offset += int_struct.size


class Session:
    """One kazoo client, made anew when it gave up."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Begin to connect, with these arguments of `KazooClient`."""
        self._settings = settings
        self._changed = threading.Condition()
        self._closed = False
        self._proven = False
        self._reason = _LastWarning(logging.WARNING)
        self._logger = logging.Logger("rdzv_plugins.zookeeper", logging.WARNING)
        self._logger.addHandler(self._reason)
        self._ended = False
        self._zk = self._connect()

    @property
    def reason(self) -> str:
        """kazoo's last complaint about the connection; "" where it had none."""
        return self._reason.message

    def ask(self, limit: Limit, *requests: Any) -> list[Any]:
        """Send kazoo's requests one behind the other; their results, in order.

        Raises kazoo's errors, `NotConnectedError` if nothing was sent, TimeoutError and
        `WokenError`.
        """
        zk = self._connected(limit)
        answers = [zk.handler.async_result() for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            zk._call(request, answer)
        return [self._result(answer, limit) for answer in answers]

    def may_recover(self, error: Exception) -> bool:
        """Whether a connection that was lost or refused may yet be accepted."""
        if isinstance(error, AuthFailedError | SessionClosedRequireSaslError):
            # A server that stops in the middle of a log-in looks like a refusal.
            return self._proven
        return self._proven or not stays_refused(self.reason)

    def close(self) -> None:
        """End the session; idempotent. The server forgets it in the background."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        # Quick while connected; without a server kazoo may take as long as a connect.
        _stop(self._zk, 1.0)

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
            self._changed.notify_all()

    def _connected(self, limit: Limit) -> Any:
        """The kazoo client, once it is connected."""
        with self._changed:
            while self._ended or not self._zk.connected:
                if self._closed:
                    raise NotConnectedError("closed")
                if self._ended:
                    self._ended = False
                    _stop(self._zk, 0.0)
                    self._zk = self._connect()
                    raise AuthFailedError
                if not self.may_recover(ConnectionLoss()):
                    raise NotConnectedError(self.reason)
                try:
                    seconds = limit.seconds
                except TimeoutError as error:
                    raise NotConnectedError(self.reason) from error
                self._changed.wait(min(seconds, _GLANCE))
            return self._zk

    def _result(self, answer: Any, limit: Limit) -> Any:
        while not answer.ready():
            answer.wait(min(limit.seconds, _GLANCE))
        value = answer.get()
        self._proven = True
        return value


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

    message = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith(("Connection", "Cannot", "AUTH", "Unhandled")):
            self.message = message
