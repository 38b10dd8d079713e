"""The exchange of data of the network check: what passes, what fails, what a stranger can do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rdzv_plugins.peers import exchange as exchanges
from rdzv_plugins.peers import listener as listeners
from rdzv_plugins.peers.exchange import answer, dial, exchange
from rdzv_plugins.peers.listener import Listener
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background

pytestmark = pytest.mark.rule("network check")

SIZE = 300_000
NAME = "rdzv-test-answers"


@pytest.fixture
def answering() -> Iterator[Listener]:
    server = answers("127.0.0.1")
    yield server
    server.close()
    assert NAME not in {thread.name for thread in threading.enumerate()}


def answers(address: str) -> Listener:
    server = Listener(address, NAME)
    answer(server, "the-node", SIZE)
    return server


def endpoint(server: Listener) -> str:
    return f"127.0.0.1:{server.port}"


def stranger(server: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 5)


def is_dropped(line: socket.socket) -> bool:
    line.settimeout(5)
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def test_data_pass_both_ways(answering: Listener) -> None:
    took = [exchange("the-node", endpoint(answering), 5, SIZE) for _ in range(3)]
    assert all(0 < seconds < 5 for seconds in took)


def test_many_at_once(answering: Listener) -> None:
    others = [
        Background(lambda: exchange("the-node", endpoint(answering), 10, SIZE)) for _ in range(8)
    ]
    assert all(other.result(10) > 0 for other in others)


def test_the_listener_listens_on_its_own_address_only(answering: Listener) -> None:
    with pytest.raises(ConnectionRefusedError):
        dial(f"127.0.0.2:{answering.port}", 5)


def test_the_listener_of_a_name_or_a_routers_address_listens_on_all() -> None:
    for address in ("localhost", "192.0.2.7"):
        server = answers(address)
        assert exchange("the-node", endpoint(server), 5, SIZE) > 0
        server.close()


def test_a_client_that_does_not_know_the_node_gets_nothing(answering: Listener) -> None:
    with pytest.raises(ConnectionError):
        exchange("another-node", endpoint(answering), 5, SIZE)
    with stranger(answering) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert is_dropped(line)


def test_strangers_who_say_nothing_keep_nobody_out(
    answering: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_GREETING_SECONDS", 0.5)
    lines = [stranger(answering) for _ in range(3 * listeners._MOST_CLIENTS)]
    assert exchange("the-node", endpoint(answering), 5, SIZE) > 0
    assert all(map(is_dropped, lines))
    for line in lines:
        line.close()


def test_a_client_that_stops_half_way_is_dropped_in_time(
    answering: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "_CLIENT_SECONDS", 0.3)
    with stranger(answering) as line:
        line.sendall(exchanges._greeting("the-node") + b"x" * 1000)
        assert is_dropped(line)
    assert until(lambda: not answering._lines, 5)


def test_a_greeting_may_come_in_pieces(answering: Listener) -> None:
    with stranger(answering) as line:
        line.settimeout(5)
        for byte in exchanges._greeting("the-node"):
            line.sendall(bytes([byte]))
        line.sendall(b"x" * SIZE)
        came = 0
        while came < SIZE and (data := line.recv(1 << 16)):
            came += len(data)
        assert came == SIZE
        assert is_dropped(line)


def test_a_peer_that_swallows_data_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            exchange("the-node", f"127.0.0.1:{mute.getsockname()[1]}", 0.5)
        assert time.monotonic() - began < 3


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        dial(f"127.0.0.1:{port}", 5)
    with pytest.raises(ConnectionError):
        exchange("the-node", f"127.0.0.1:{port}", 5)


def test_the_listener_ends_at_once() -> None:
    server = answers("127.0.0.1")
    until(lambda: NAME in {thread.name for thread in threading.enumerate()}, 10.0)
    server.close(seconds=10.0)
    assert NAME not in {thread.name for thread in threading.enumerate()}
