"""Exchanges some megabytes with other nodes over TCP, for the network check.

The dialled node's `Listener` answers only a client that names the node's id, which only the run's
store holds. Any other client gets no answer and is dropped.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time

from rdzv_plugins.kv import RendezvousStateError
from rdzv_plugins.kv.gate import is_master
from rdzv_plugins.peers.addresses import ANY_PORT
from rdzv_plugins.peers.listener import Line, Listener
from rdzv_plugins.protocol.effects import DialPeer
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.settings.options import Settings

log = logging.getLogger(__name__)

EXCHANGED = 4 << 20
"""Bytes that each side sends."""

_CHUNK = os.urandom(1 << 16)  # Random, because a link that compresses would seem fast.

_CLIENT_SECONDS = 60.0
# Nodes choose hexadecimal ids, but tests and other programs choose other ids.
_NODE = re.compile(r"[\w.-]{1,64}")


def _greeting(node: str) -> bytes:
    return f"rdzv-plugins exchange {node}\n".encode()


def dial(endpoint: str, seconds: float) -> float:
    """Connect to ``address:port``; returns the seconds that it took. Raises as `exchange` does."""
    began = time.monotonic()
    _connect(endpoint, seconds).close()
    return time.monotonic() - began


def exchange(node: str, endpoint: str, seconds: float, size: int = EXCHANGED) -> float:
    """Send ``size`` bytes to a node, receive as many, and return the seconds that this took.

    Raises OSError, and UnicodeError if the endpoint's host cannot be a name.
    """
    began = time.monotonic()

    def left() -> float:
        rest = began + seconds - time.monotonic()
        if rest <= 0:
            raise TimeoutError("timed out")
        return rest

    if _NODE.fullmatch(node) is None:
        # The id comes from the store: a line end in it could send a command to another server.
        raise ConnectionError("what stands in the store is the id of no node")
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
    if not is_master(endpoint):
        raise ConnectionError("what stands in the store is no address:port")
    line = socket.create_connection((address.strip("[]"), int(port)), seconds)
    # TCP connects a socket to itself if the dialled port is free and becomes the socket's own.
    if line.getsockname() == line.getpeername():
        line.close()
        raise ConnectionRefusedError("nobody listens there")
    return line


def answer(listener: Listener, node: str, size: int = EXCHANGED) -> None:
    """Answer the exchanges that other nodes begin with this node: ``size`` bytes each way."""
    listener.answer(_greeting(node), 0, lambda line, _: _Exchanging(line, size))


class _Exchanging(Line):
    """A client that sends the data, and then receives as much."""

    def __init__(self, line: socket.socket, size: int) -> None:
        super().__init__(line, _CLIENT_SECONDS)
        self._size = size
        self._came = self._sent = 0

    def go_on(self) -> Line | None:
        if self.writes:
            self._sent += self.socket.send(_CHUNK[: self._size - self._sent])
            return self if self._sent < self._size else None
        data = self.socket.recv(1 << 18)
        self._came += len(data)
        self.writes = self._came >= self._size
        return self if data else None


def dial_peer(request: DialPeer, shares_store: bool) -> float:
    """Dial another node for the network check; return the seconds.

    ``shares_store``: workers share rank 0's TCPStore, which the agent has opened already.
    """
    if request.exchanges:
        return exchange(request.node, request.endpoint, request.limit)
    try:
        return dial(request.endpoint, request.limit)
    except ConnectionRefusedError:
        if shares_store:
            raise
        return 0.0  # The host has answered; a worker opens the port later.


def open_listener(
    node_id: str, address: str, run_id: str, rules: Rules, settings: Settings
) -> Listener | None:
    """Listen for the network check and other nodes' links; None: not needed or not possible."""
    if rules.max_nodes == 1 or not (rules.network_check or rules.answer_timeout is not None):
        return None
    # Links alone can use any port, if no firewall is in between.
    ports = [*settings.answer_ports, *([] if rules.network_check else ANY_PORT)]
    try:
        listener = Listener(address, f"rdzv-{run_id}-answers", ports)
    except (OSError, RuntimeError, MemoryError) as error:
        if not rules.network_check:
            log.debug("run '%s': this node has no links to others: %s", run_id, error)
            return None
        if not isinstance(error, OSError):
            raise
        raise RendezvousStateError(
            f"no port of master_port={settings.master_port or 'any'} is free at '{address}' for "
            f"the network check ({error}): name more, or end what listens there"
        ) from error
    if rules.network_check:
        answer(listener, node_id)
    return listener
