"""The server of metrics beside clients that mean no good."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest
from prometheus_client import CollectorRegistry

from rdzv_plugins.observe import metrics_server
from rdzv_plugins.observe.metrics_server import MetricsServer
from rdzv_plugins.observe.page_access import PageAccess
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.testing.harness import until


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with closing(serving(str)) as server:
        yield server


def serving(before_metrics: Callable[[], object]) -> MetricsServer:
    return MetricsServer(
        "127.0.0.1",
        0,
        PageAccess("127.0.0.1", Settings()),
        CollectorRegistry(),
        before_metrics=before_metrics,
        health=lambda: (True, "ok"),
        why=str,
        name="rdzv-test-metrics",
    )


def drips(server: MetricsServer, ends: threading.Event) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", server._server.server_port))

    def drip() -> None:
        with suppress(OSError):
            line.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            while not ends.wait(0.2):
                line.sendall(b"x")

    threading.Thread(target=drip, daemon=True).start()
    return line


def asks(server: MetricsServer, path: str) -> bytes:
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        read: bytes = answer.read()
        return read


def test_the_server_answers_beside_clients_that_drip(server: MetricsServer) -> None:
    ends = threading.Event()
    with ExitStack() as stack:
        stack.callback(ends.set)
        lines = [stack.enter_context(drips(server, ends)) for _ in range(40)]
        assert asks(server, "/healthz") == b"ok\n"
        asks(server, "/metrics")
        assert len(server._server._clients) <= 16
        # None is served for ever, though each sends again and again.
        assert until(lambda: not server._server._clients, 60)
        for line in lines:
            line.settimeout(30)
            with suppress(OSError):
                while line.recv(4096):
                    pass
    assert asks(server, "/healthz") == b"ok\n"


def test_what_takes_long_to_show_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a client has is not for what the server does."""
    monkeypatch.setattr(metrics_server, "_CLIENT_SECONDS", 0.2)
    with closing(serving(lambda: time.sleep(1.5))) as server:
        assert asks(server, "/metrics") == b""
        assert until(lambda: not server._server._clients, 30)


def test_clients_that_say_nothing_cut_no_page_off_that_takes_long() -> None:
    """They may have no token, and be many."""
    begun, ends = threading.Event(), threading.Event()

    def make_page() -> None:
        begun.set()
        ends.wait(60)

    with ExitStack() as stack:
        server = stack.enter_context(closing(serving(make_page)))
        stack.callback(ends.set)

        def connect() -> socket.socket:
            target = "127.0.0.1", server._server.server_port
            return stack.enter_context(closing(socket.create_connection(target, 60)))

        asks_for_page = connect()
        asks_for_page.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert begun.wait(60)
        strangers = [connect() for _ in range(40)]
        # Each new one has the one go that has been there for longest.
        for line in strangers[: -metrics_server._MOST_CLIENTS]:
            assert line.recv(1) == b""
        ends.set()
        assert asks_for_page.recv(15).startswith(b"HTTP/1.0 200")


def test_none_of_its_threads_stays(server: MetricsServer) -> None:
    ends = threading.Event()
    with ExitStack() as stack:
        stack.callback(ends.set)
        for _ in range(3):
            stack.enter_context(drips(server, ends))
        assert until(lambda: len(server._server._clients) == 3, 30)
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 30
        assert until(
            lambda: not [it for it in threading.enumerate() if it.name == "rdzv-metrics-client"], 30
        )


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9400", 200), ("localhost", 200), ("LOCALHOST:1", 200), ("[::1]:9400", 200),
        ("evil.example:9400", 400), ("127.0.0.1.evil.example", 400), ("127.0.0.1@evil", 400),
    ],
)  # fmt: skip
def test_a_name_that_somebody_else_gave_this_host_is_not_answered(
    server: MetricsServer, host: str, status: int
) -> None:
    """DNS rebinding: a page in a browser here reads what is at loopback under its own name."""
    for path in ("/metrics", "/healthz", "/why"):
        request = urllib.request.Request(server.url + path, headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                found = answer.status
        except urllib.error.HTTPError as error:
            found = error.code
        assert found == status


def test_a_client_that_asks_without_a_host_is_answered(server: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", server._server.server_port), 30) as line:
        line.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert line.makefile("rb").readline().split()[1] == b"200"
