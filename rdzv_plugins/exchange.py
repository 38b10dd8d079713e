"""Exchanges some megabytes with other nodes over TCP, for the network check.

The node that is dialled has an `Answering`: a socket and one thread. It answers only who names its
node id, which stands in the run's store alone; whoever else connects gets nothing, and is dropped.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from rdzv_plugins.addresses import ANY_PORT, listen

__all__ = ["EXCHANGED", "Answering", "dial", "exchange"]

EXCHANGED = 4 << 20
"""Bytes each way."""

_CHUNK = os.urandom(1 << 16)  # A link that compresses would seem fast otherwise.

# For the greeting, and for all.
_GREETING_SECONDS, _CLIENT_SECONDS = 5.0, 60.0
_MOST_CLIENTS = 16
# How soon `close` is noticed, and a client whose time is over.
_LOOK_SECONDS = 0.5


def _greeting(node: str) -> bytes:
    return f"rdzv-plugins exchange {node}\n".encode()


def dial(endpoint: str, seconds: float) -> float:
    """Connect to ``address:port``; returns the seconds that it took. Raises as `exchange` does."""
    began = time.monotonic()
    _connect(endpoint, seconds).close()
    return time.monotonic() - began


def exchange(node: str, endpoint: str, seconds: float, size: int = EXCHANGED) -> float:
    """Send so many bytes to a node and have as many sent back; returns the seconds that it took.

    Raises OSError, and UnicodeError for what cannot be a name.
    """
    began = time.monotonic()

    def left() -> float:
        rest = began + seconds - time.monotonic()
        if rest <= 0:
            raise TimeoutError("timed out")
        return rest

    with _connect(endpoint, seconds) as line:
        line.settimeout(left())
        line.sendall(_greeting(node))
        for at in range(0, size, len(_CHUNK)):
            line.settimeout(left())
            line.sendall(_CHUNK[: size - at])
        came = 0
        while came < size:
            line.settimeout(left())
            got = len(line.recv(1 << 18))
            if got == 0:
                raise ConnectionError(f"the connection ended after {came} bytes")
            came += got
    return time.monotonic() - began


def _connect(endpoint: str, seconds: float) -> socket.socket:
    address, _, port = endpoint.rpartition(":")
    line = socket.create_connection((address.strip("[]"), int(port)), seconds)
    # A port that is free may be this socket's own, and TCP connects it to itself.
    if line.getsockname() == line.getpeername():
        line.close()
        raise ConnectionRefusedError("nobody listens there")
    return line


class _Client:
    """Somebody who has connected: sends a greeting and the data, then gets as much."""

    def __init__(self, line: socket.socket, greeting: bytes, size: int) -> None:
        self.line = line
        self.since = time.monotonic()
        self._greeting = greeting
        self._size = size
        self._read = b""
        self._came = self._sent = 0
        self.known = self.writes = False

    @property
    def expires(self) -> float:
        return self.since + (_CLIENT_SECONDS if self.known else _GREETING_SECONDS)

    def go_on(self) -> bool:
        """Read or write what is possible now; returns whether more is to come."""
        try:
            return self._write() if self.writes else self._take()
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _take(self) -> bool:
        if self.known:
            data = self.line.recv(1 << 18)
            self._came += len(data)
        else:
            data = self.line.recv(len(self._greeting) - len(self._read))
            self._read += data
            if not self._greeting.startswith(self._read):
                return False
            self.known = self._read == self._greeting
        self.writes = self._came >= self._size
        return bool(data)

    def _write(self) -> bool:
        self._sent += self.line.send(_CHUNK[: self._size - self._sent])
        return self._sent < self._size


class Answering:
    """Answers exchanges that other nodes begin, in one thread.

    Args:
        node: the id of this node; who does not know it is a stranger.
        address: of this node; where it is an address of this host, nothing else is listened on.
        name: of the thread.
        ports: of which it takes the first that is free; raises OSError if none is.

    Attributes:
        port: where it listens.
    """

    def __init__(
        self,
        node: str,
        address: str,
        name: str,
        size: int = EXCHANGED,
        ports: Sequence[int] = ANY_PORT,
    ) -> None:
        self._greeting = _greeting(node)
        self._size = size
        self._server = listen(address, ports)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self.port: int = self._server.getsockname()[1]
        self._clients: dict[int, _Client] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._server.close()
            self._selector.close()
            raise

    def close(self, seconds: float = 2.0) -> None:
        """End the thread; after ``seconds`` it is left to end by itself."""
        self._ends.set()
        with suppress(OSError):
            # Ends the thread's wait.
            self._server.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _serve(self) -> None:
        with self._selector as selector, self._server:
            selector.register(self._server, selectors.EVENT_READ)
            while not self._ends.is_set():
                for key, _ in selector.select(_LOOK_SECONDS):
                    client: _Client | None = key.data
                    if client is None:
                        self._accept(selector)
                    elif client.line.fileno() >= 0:
                        self._serve_one(selector, client)
                self._drop_late(selector)
            for client in [*self._clients.values()]:
                self._drop(selector, client)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            line, _ = self._server.accept()
        except OSError:
            # This process may have no descriptor left: do not ask again at once.
            self._ends.wait(_LOOK_SECONDS)
            return
        with suppress(OSError):
            line.setblocking(False)
            if len(self._clients) >= _MOST_CLIENTS:
                # Strangers first, then who has been here for longest.
                clients = self._clients.values()
                self._drop(selector, min(clients, key=lambda it: (it.known, it.since)))
            client = _Client(line, self._greeting, self._size)
            selector.register(line, selectors.EVENT_READ, client)
            self._clients[line.fileno()] = client

    def _serve_one(self, selector: selectors.BaseSelector, client: _Client) -> None:
        wrote = client.writes
        if not client.go_on():
            self._drop(selector, client)
        elif client.writes and not wrote:
            selector.modify(client.line, selectors.EVENT_WRITE, client)

    def _drop_late(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for client in [it for it in self._clients.values() if it.expires <= now]:
            self._drop(selector, client)

    def _drop(self, selector: selectors.BaseSelector, client: _Client) -> None:
        del self._clients[client.line.fileno()]
        selector.unregister(client.line)
        client.line.close()
