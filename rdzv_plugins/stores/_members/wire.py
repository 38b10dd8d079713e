"""One TCP connection to or from a member: frames, and a greeting.

In the greeting both sides prove that they know the secret, which nobody sends.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ["CLIENT", "OtherClusterError", "SecretError", "Wire", "dial", "encode"]

CLIENT = -1
"""The index of a client in a greeting."""

STRANGER_BYTES = 1 << 10
"""The largest frame of somebody who has not proved to know the secret."""

_VERSION = 1
_LENGTH = struct.Struct(">I")
_READ_BYTES = 1 << 18


class OtherClusterError(Exception):
    """The other side is no member of this cluster."""


class SecretError(Exception):
    """The other side does not know this secret, or refuses what this side says of it."""


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    cluster: str
    index: int
    nonce: bytes


_decode_hello = msgspec.msgpack.Decoder(_Hello).decode


class Wire:
    """A connection. Neither side reads or sends a request before both have proved the secret.

    Args:
        line: a socket; it becomes non-blocking.
        cluster: the members' name for their cluster.
        secret: what both sides must know; empty: none is needed.
        index: of the member on this side, or `CLIENT`.
        accepted: the other side has dialled.
        most: the largest frame that is read once the other side has proved the secret.

    Attributes:
        peer: the index of the other side; None: it has not proved the secret yet.
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
        self.line = line
        self.peer: int | None = None
        self._cluster, self._secret, self._accepted, self.most = cluster, secret, accepted, most
        self._mine = _Hello(_VERSION, cluster, index, secrets.token_bytes(16))
        self._theirs: _Hello | None = None
        self._got, self._unsent = bytearray(), bytearray()
        self.send(msgspec.msgpack.encode(self._mine))

    @property
    def unsent(self) -> int:
        """How many bytes the socket has not taken yet."""
        return len(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame, as soon as the other side takes it."""
        self._unsent += _LENGTH.pack(len(frame)) + frame

    def flush(self) -> None:
        """Send what the socket takes now; raises OSError."""
        try:
            while self._unsent:
                del self._unsent[: self.line.send(self._unsent)]
        except BlockingIOError:
            pass

    def receive(self) -> Iterator[bytes]:
        """The frames that have come; raises OSError and the errors of the greeting."""
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
            else:
                yield frame

    def _greet(self, frame: bytes) -> None:
        if self._theirs is None:
            self._theirs = theirs = _decode_hello(frame)
            if (theirs.version, theirs.cluster) != (_VERSION, self._cluster):
                raise OtherClusterError(f"'{theirs.cluster}' is there (version {theirs.version})")
            # A server proves last: nobody gets a proof of it without the secret.
            if not self._accepted:
                self.send(self._proof(self._mine, theirs))
            return
        if not hmac.compare_digest(frame, self._proof(self._theirs, self._mine)):
            if self._accepted:
                self.send(b"")  # No proof: this side tells the other one that it is refused.
                self.flush()
            raise SecretError
        if self._accepted:
            self.send(self._proof(self._mine, self._theirs))
        self.peer = self._theirs.index

    def _proof(self, by: _Hello, to: _Hello) -> bytes:
        # It says whether the prover has accepted the connection: a proof cannot be sent back.
        said = msgspec.msgpack.encode((by, to, self._accepted == (by is self._mine)))
        return hmac.new(self._secret, said, hashlib.sha256).digest()

    def close(self) -> None:
        self.line.close()


def dial(host: str, port: int) -> socket.socket:
    """A socket that is connecting; raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    line = socket.socket(family, kind, proto)
    line.setblocking(False)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.connect_ex(address)
    return line


def encode(number: int, message: Any) -> bytes:
    """A frame with the number of a request, and the message."""
    return msgspec.msgpack.encode((number, message))
