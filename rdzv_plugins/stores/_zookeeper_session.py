"""A kazoo client whose requests end at their limit, and which knows why it has no connection.

kazoo's own calls block forever while the server is unreachable. Here each call ends at its limit,
and nothing is queued while there is no connection: a queued write could be applied long after its
caller got an error.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    EXCEPTIONS,
    AuthFailedError,
    ConnectionDropped,
    ConnectionLoss,
    NoNodeError,
    SessionClosedRequireSaslError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import GetData, MultiHeader, int_struct, stat_struct
from kazoo.protocol.states import KazooState, KeeperState

from rdzv_plugins.kv.base import Limit, in_background
from rdzv_plugins.settings.options import UnreadableFileError
from rdzv_plugins.stores._tls import stays_refused

# In these states kazoo never connects again.
_ENDED = (KeeperState.AUTH_FAILED, KeeperState.CLOSED)

# kazoo's warning if a server hung up during a SASL log-in; a server that stops does so too.
_CUT_SHORT = "Connection dropped in SASL"

# Bytes of an answer; the server's jute.maxbuffer is 1 MiB by default.
_MOST = 1 << 26

# A long request checks this often, in seconds, whether its caller was woken.
_GLANCE = 0.1

Encrypt = Callable[[socket.socket, str], socket.socket]


class NotConnectedError(ConnectionLoss):  # type: ignore[misc]
    """There is no connection: nothing was sent."""


class ReadMany:
    """ZooKeeper's multi-read (3.6 and later), which kazoo does not have: one request, many znodes.

    The result is a list with ``(data, stat)`` for each path, None without a znode, or its error.
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
    """A kazoo client, which is replaced when it has given up."""

    def __init__(
        self, settings: dict[str, Any], encrypt: Encrypt, check: Callable[[], None]
    ) -> None:
        """Begin to connect.

        Args:
            settings: the arguments of `KazooClient`.
            encrypt: wraps the connection to a host, because kazoo would also trust the system's
                authorities.
            check: raises the error of an unreadable file, which kazoo does not report.
        """
        self._settings, self._encrypt = settings, encrypt
        self._check = check
        self._changed = threading.Condition()
        self._closed = False
        self._proven = False
        self._reason = _LastWarning(logging.WARNING)
        self._logger = logging.Logger("rdzv_plugins.zookeeper", logging.WARNING)
        self._logger.addHandler(self._reason)
        self._ended = False
        # The error that has ended kazoo's thread.
        self._broken: Exception | None = None
        self._zk = self._connect()

    @property
    def reason(self) -> str:
        """kazoo's last warning about the connection; "" without one."""
        return self._reason.message

    def ask(self, limit: Limit, *requests: Any) -> list[Any]:
        """Send kazoo's requests in a pipeline; returns their results, in order.

        Raises kazoo's errors, `NotConnectedError` if nothing was sent, TimeoutError and
        `WokenError`.
        """
        zk = self._connected(limit)
        answers = [zk.handler.async_result() for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            zk._call(request, answer)
        return [self._result(answer, limit) for answer in answers]

    def may_recover(self, error: Exception) -> bool:
        """Whether a retry may succeed after a connection was lost or refused."""
        if isinstance(error, AuthFailedError | SessionClosedRequireSaslError):
            # A server that stops during a log-in looks like a refusal.
            return self._proven
        return self._proven or not stays_refused(self.reason)

    def close(self) -> None:
        """End the session; idempotent. After 1 s the work continues in the background."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        # Without a server, kazoo's stop may take as long as its attempt to connect.
        _stop(self._zk, 1.0)

    def _connect(self) -> Any:
        zk = KazooClient(
            handler=_NamedThreads(self._encrypt, self._break),
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
                # An ensemble that lost its data would refuse this client's newer zxid forever.
                # Reads stay fresh without the zxid, because a sync precedes each read.
                zk.last_zxid = 0
            elif state == KazooState.LOST and zk.client_state in _ENDED:
                self._ended = True
            self._changed.notify_all()

    def _break(self, error: Exception) -> None:
        with self._changed:
            self._ended, self._broken = True, error
            self._changed.notify_all()

    def _connected(self, limit: Limit) -> Any:
        """Wait for the connection; returns the kazoo client."""
        with self._changed:
            while self._ended or not self._zk.connected:
                if self._closed:
                    raise NotConnectedError("closed")
                if self._ended:
                    failure, self._broken = self._broken or self._refusal(), None
                    _stop(self._zk, 0.0)
                    self._zk = self._connect()
                    self._ended = False  # After _connect, which may raise.
                    self._check()
                    raise failure
                if not self.may_recover(ConnectionLoss()):
                    self._check()
                    raise NotConnectedError(self.reason)
                try:
                    seconds = limit.seconds
                except TimeoutError as error:
                    self._check()
                    raise NotConnectedError(self.reason) from error
                self._changed.wait(min(seconds, _GLANCE))
            return self._zk

    def _result(self, answer: Any, limit: Limit) -> Any:
        while not answer.ready():
            # Only a request with a `Wake` polls: hundreds that poll keep a slow host busy.
            answer.wait(min(limit.seconds, _GLANCE) if limit.wake else limit.seconds)
        try:
            value = answer.get()
        except AuthFailedError:
            raise self._refusal() from None
        self._proven = True
        return value

    def _refusal(self) -> Exception:
        """The cause of a failed log-in. Since 3.6 a server answers a client that it refuses."""
        failure: Exception = AuthFailedError()
        if self.reason.endswith(_CUT_SHORT):
            failure = NotConnectedError(self.reason)
        return failure


def _stop(zk: Any, seconds: float) -> None:
    """Stop a kazoo client in the background, and wait up to ``seconds`` for it."""

    def stop() -> None:
        zk.stop()
        zk.close()

    with contextlib.suppress(Exception):
        in_background("rdzv-zookeeper-stop", stop).result(seconds)


class _Bounded:
    """Wraps kazoo's socket, and limits the length of an answer, which the server names."""

    def __init__(self, line: Any) -> None:
        self._line = line

    def recv(self, size: int) -> bytes:
        if not 0 <= size <= _MOST:
            error = OSError(f"its answer has more than {_MOST >> 20} MiB")
            error.strerror = str(error)  # kazoo shows strerror.
            raise error
        data: bytes = self._line.recv(size)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)


class _NamedThreads(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's handler with this package's TLS and named threads.

    ``broke`` gets the error that ends a thread, such as a malformed answer.
    """

    def __init__(self, encrypt: Encrypt, broke: Callable[[Exception], None]) -> None:
        super().__init__()
        self._encrypt, self._broke = encrypt, broke

    def create_connection(self, address: Any, hostname: str, timeout: float, **_: Any) -> Any:
        line = super().create_connection(address, timeout=timeout)
        try:
            return _Bounded(self._encrypt(line, hostname))
        except UnreadableFileError as error:
            line.close()
            raise ConnectionDropped(str(error)) from error

    def spawn(self, func: Any, *args: Any, **kwargs: Any) -> threading.Thread:
        def run() -> None:
            try:
                func(*args, **kwargs)
            except Exception as error:
                self._broke(error)

        thread = threading.Thread(target=run, name="rdzv-zookeeper", daemon=True)
        thread.start()
        return thread


class _LastWarning(logging.Handler):
    """Keeps kazoo's last warning about its connection attempts, for the error that is raised."""

    message = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith(("Connection", "Cannot", "AUTH", "Unhandled")):
            self.message = message
