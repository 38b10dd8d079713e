"""Opens rank 0's TCPStore, only on the announced address if that is this host's own."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rdzv_plugins.kv import require_descriptors
from rdzv_plugins.peers.addresses import ANY_PORT, is_own_ip, listen, loopback

TAKES_SOCKETS = torch.__version__ >= "2.8"
"""Whether TCPStore can listen with a given socket; torch 2.7's cannot."""

# The thread of `_Door` checks this often for the close, which may not wake it.
_LOOK_SECONDS = 0.5


def open_store(
    address: str, timeout: float, ports: Sequence[int] = ANY_PORT, name: str = "rdzv-door"
) -> TCPStore:
    """A TCPStore on the first free port of ``ports``; it serves, and is no client.

    It listens only at ``address`` if that is an IP address of this host and torch allows it, else
    on all addresses. TCPStore's constructor dials itself, and first looks up the name of the
    address, which takes 10 s if a DNS server does not answer. Hence it dials `loopback`, and a
    `_Door` forwards that connection.

    Args:
        timeout: seconds.
        name: the name of the door's thread.

    Raises OSError if no port is free or there are too few descriptors, and TCPStore's errors.
    """
    # c10d's event loop aborts the process if it gets no descriptor.
    require_descriptors()
    host = loopback()
    if not TAKES_SOCKETS:
        with listen(ports=ports) as found:
            port = found.getsockname()[1]
        return _construct(host, port if ports != ANY_PORT else 0, timeout)
    server = listen(address, ports)
    port = server.getsockname()[1]
    door: _Door | None = None
    if is_own_ip(address) and address != host:
        try:
            door = _Door((host, port), (address, port), name)
        except OSError:
            host = address  # Another process listens there.
    try:
        return _construct(host, port, timeout, server.detach())
    finally:
        if door is not None:
            door.close()


def _construct(host: str, port: int, timeout: float, number: int | None = None) -> TCPStore:
    return TCPStore(
        host_name=host,
        port=port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=number,
    )


class _Door:
    """Forwards its first connection to another address of this host."""

    def __init__(self, at: tuple[str, int], to: tuple[str, int], name: str) -> None:
        self._server = listen(at[0], [at[1]])
        self._to = to
        self._closed = threading.Event()
        self._lines: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the sockets, and end the thread."""
        self._closed.set()
        for line in (self._server, *self._lines):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self._thread.join(_LOOK_SECONDS)

    def _serve(self) -> None:
        with suppress(OSError), self._server:
            came, _ = self._server.accept()
            # TCPStore looks up the caller's name: every /etc/hosts contains this address.
            own = "::1" if ":" in self._to[0] else "127.0.0.1"
            with came, socket.create_connection(self._to, source_address=(own, 0)) as goes:
                self._lines = [came, goes]
                self._hand_on(came, goes)

    def _hand_on(self, came: socket.socket, goes: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(came, selectors.EVENT_READ, goes)
            selector.register(goes, selectors.EVENT_READ, came)
            while not self._closed.is_set():
                for key, _ in selector.select(_LOOK_SECONDS):
                    line, other = key.fileobj, key.data
                    assert isinstance(line, socket.socket)
                    if not (data := line.recv(1 << 16)):
                        return
                    other.sendall(data)
