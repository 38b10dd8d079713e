"""A TCP connection to or from a member: frames, and a greeting.

In the greeting both sides prove that they know the secret; neither sends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rdzv_plugins import clock
from rdzv_plugins.stores._names import AddressInfo, look_up

CLIENT, NODE = -1, -2
"""Indexes in the greeting of a client and of a node; members do not end before their nodes."""

STRANGER_BYTES = 1 << 10
"""The largest frame before the other side has proved that it knows the secret."""

ALIKE = "name the same hosts, by the same names, on all nodes"

HostPort = tuple[str, int]
"""A host and a port."""

_VERSION = 1
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 18

# The other host counts as gone if it leaves data unacknowledged for `_SILENT_SECONDS`, or if an
# idle connection has no answer after `_IDLE_SECONDS`.
_SILENT_SECONDS, _IDLE_SECONDS = 2, 10
# How long the first look-up of a name may delay the caller; the look-up goes on in a thread.
_RESOLVER_SECONDS = 0.05
_looked_up: set[HostPort] = set()


class OtherClusterError(Exception):
    """The other side is not of this cluster."""


class SecretError(Exception):
    """One side does not have the secret of the other."""


# msgspec raises these errors for a frame that is not of this protocol.
_NONSENSE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError

BREAKS = OSError, *_NONSENSE, OtherClusterError, SecretError
"""The errors that end a connection."""


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    cluster: str
    index: int
    nonce: bytes


_decode_hello = msgspec.msgpack.Decoder(_Hello).decode


class Wire:
    """A connection. Both sides prove the secret before either sends or reads a request.

    Args:
        line: the socket; it becomes non-blocking.
        secret: empty: no secret is needed.
        index: the index of the member on this side, or `CLIENT` or `NODE`.
        accepted: whether the other side has dialled.
        most: the largest frame in bytes, once the other side has proved the secret.

    Attributes:
        since: when the connection was made, by `rdzv_plugins.clock`.
        peer: the index of the other side; None: it has not proved the secret yet.
        theirs: the other side's hello, proved or not; None: it has not come yet.
    """

    def __init__(
        self,
        line: socket.socket,
        cluster: str,
        secret: bytes,
        index: int,
        accepted: bool,
        most: int,
    ) -> None:
        line.setblocking(False)
        _end_when_silent(line)
        self.line, self.since = line, clock.now()
        self.peer: int | None = None
        self._cluster, self._secret, self._accepted, self.most = cluster, secret, accepted, most
        self._mine = _Hello(_VERSION, cluster, index, secrets.token_bytes(16))
        self.theirs: _Hello | None = None
        # The key that seals frames, once both hellos are known; how many frames each side sealed.
        self._key, self._sealed = b"", [0, 0]
        self._got, self._unsent = bytearray(), bytearray()
        self.send(msgspec.msgpack.encode(self._mine))

    @property
    def unsent(self) -> int:
        """How many bytes wait for the socket."""
        return len(self._unsent)

    def send(self, frame: bytes) -> None:
        """Queue a frame for `flush`."""
        if self.peer is not None:
            frame += self._seal(frame, self._accepted)
        self._unsent += _LENGTH.pack(len(frame)) + frame

    def flush(self) -> None:
        """Send as many bytes as the socket takes now; raises OSError."""
        try:
            while self._unsent:
                del self._unsent[: self.line.send(self._unsent)]
        except BlockingIOError:
            pass

    def receive(self) -> Iterator[bytes]:
        """The frames that have arrived; raises `BREAKS`."""
        try:
            data = self.line.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the connection was closed")
        self._got += data
        while len(self._got) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._got)
            if length > (STRANGER_BYTES if self.peer is None else self.most):
                raise ConnectionError(f"a message of {length:,} bytes")
            end = _LENGTH.size + length
            if len(self._got) < end:
                return
            frame = bytes(self._got[_LENGTH.size : end])
            del self._got[:end]
            if self.peer is None:
                self._greet(frame)
                continue
            body = frame[: length - len(self._key) // 2]
            if not hmac.compare_digest(frame, body + self._seal(body, not self._accepted)):
                raise ConnectionError("somebody in between has changed a message")
            yield body

    def _greet(self, frame: bytes) -> None:
        if self.theirs is None:
            self.theirs = theirs = _decode_hello(frame)
            if (theirs.version, theirs.cluster) != (_VERSION, self._cluster):
                raise OtherClusterError(f"'{theirs.cluster}' is there (version {theirs.version})")
            # The accepting side proves last, so that nobody without the secret gets its proof.
            if not self._accepted:
                self.send(self._proof(self._mine, theirs))
            if self._secret:
                both = {self._accepted: self._mine, not self._accepted: theirs}
                said = msgspec.msgpack.encode([both[True], both[False], "frames"])
                self._key = hmac.digest(self._secret, said, "sha256")
            return
        if not hmac.compare_digest(frame, self._proof(self.theirs, self._mine)):
            if self._accepted:
                self.send(b"")  # An empty proof tells the other side that it is refused.
                self.flush()
            raise SecretError
        if self._accepted:
            self.send(self._proof(self._mine, self.theirs))
        self.peer = self.theirs.index

    def _proof(self, by: _Hello, to: _Hello) -> bytes:
        # The proof names the prover's role, so that nobody can return the other side's own proof.
        said = msgspec.msgpack.encode((by, to, self._accepted == (by is self._mine)))
        return hmac.new(self._secret, said, hashlib.sha256).digest()

    def _seal(self, frame: bytes, by_accepter: bool) -> bytes:
        """The end of a frame. A relay of the greeting can then neither add nor change a frame."""
        self._sealed[by_accepter] += 1
        said = b"%d %d " % (by_accepter, self._sealed[by_accepter])
        return hmac.digest(self._key, said + frame, "sha256")[: len(self._key) // 2]

    def close(self) -> None:
        self.line.close()


def addresses(places: Iterable[HostPort]) -> list[AddressInfo]:
    """The addresses of these places, without names whose look-up is not done yet."""
    found: list[AddressInfo] = []
    for place in places:
        # Only the first look-up waits, so that a slow resolver does not delay the other members.
        seconds = 0 if place in _looked_up else _RESOLVER_SECONDS
        _looked_up.add(place)
        with contextlib.suppress(OSError):
            found += look_up(*place, seconds)
    return found


def dial(address: AddressInfo) -> socket.socket:
    """A socket whose connection is being made; raises OSError."""
    family, kind, proto, _, place = address
    line = socket.socket(family, kind, proto)
    line.setblocking(False)
    line.connect_ex(place)
    return line


def greetings(
    places: Iterable[HostPort], seconds: float, wanted: str | None = None
) -> tuple[set[str], bool]:
    """The clusters whose members listen at these places, and whether each place has answered.

    It ends as soon as it has found the cluster ``wanted``.
    """
    found: set[str] = set()
    with selectors.DefaultSelector() as poll, contextlib.ExitStack() as opened:
        for address in addresses(places):
            with contextlib.suppress(OSError):
                line = opened.enter_context(contextlib.closing(dial(address)))
                wire = Wire(line, "", b"", CLIENT, False, STRANGER_BYTES)
                poll.register(line, selectors.EVENT_READ, wire)
        end = time.monotonic() + seconds
        while wanted not in found and poll.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in poll.select(left):
                with contextlib.suppress(*BREAKS):
                    for _ in key.data.receive():
                        pass
                if key.data.theirs is not None:
                    found.add(key.data.theirs.cluster)
                poll.unregister(key.fileobj)
        return found, not poll.get_map()


def identify(host: str, port: int, cluster: str, secret: bytes, seconds: float) -> int:
    """The index of the member that listens at ``host`` and ``port``.

    Raises:
        OSError: nothing listens there, or nothing answers in time.
        OtherClusterError: a member of another cluster listens there.
        SecretError: a member of this cluster, with another secret, listens there.
        ValueError: another program listens there.
    """
    end = time.monotonic() + seconds
    line = socket.create_connection((host, port), seconds)
    with contextlib.closing(Wire(line, cluster, secret, CLIENT, False, STRANGER_BYTES)) as wire:
        poll = select.poll()
        poll.register(line, select.POLLIN)
        while wire.peer is None:
            wire.flush()
            if not poll.poll(max(0, 1000 * (end - time.monotonic()))):
                raise TimeoutError("no answer in time")
            try:
                for _ in wire.receive():
                    pass
            except (ConnectionError, *_NONSENSE):
                raise ValueError("it is another program") from None
        return wire.peer


def _end_when_silent(line: socket.socket) -> None:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_SECONDS)


def encode(number: int, message: Any) -> bytes:
    """A frame with the number of a request and a message."""
    return msgspec.msgpack.encode((number, message))
