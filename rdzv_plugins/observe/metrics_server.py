"""Serves one node's metrics and its state as pages: a thread for each client, of few clients."""

from __future__ import annotations

import logging
import math
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from rdzv_plugins.kv import exhausted
from rdzv_plugins.observe import page_access
from rdzv_plugins.observe.page_access import PageAccess
from rdzv_plugins.settings.endpoint import at

log = logging.getLogger(__name__)

# A client has this long to send its request, and again this long to read the answer.
# A client that sends or reads slowly gets no more time.
_CLIENT_SECONDS = 5.0
# The environment key under which a request names its client.
_CLIENT = "rdzv.client"
# With more clients, the oldest connection is cut off; clients whose pages are being made come last.
# Otherwise clients without a right to any page would cut off each slow page.
_MOST_CLIENTS = 16
# The server thread checks this often whether to stop; a closed socket may not wake it.
_LOOK_SECONDS = 0.5
_STOP_SECONDS = 2.0


class MetricsServer:
    """An HTTP server of ``/metrics``, ``/healthz`` and ``/why``.

    Args:
        port: the port; 0: any free port.
        before_metrics: called before ``registry`` is shown.
        health: whether all is well (status 200, else 503), and the text of ``/healthz``.
        why: the text of ``/why``.
        name: the thread's name.

    Raises OSError or UnicodeError if it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        access: PageAccess,
        registry: CollectorRegistry,
        before_metrics: Callable[[], object],
        health: Callable[[], tuple[bool, str]],
        why: Callable[[], str],
        name: str,
    ) -> None:
        self._access = access
        self._metrics = make_wsgi_app(registry)
        self._before_metrics = before_metrics
        self._health = health
        self._why = why
        self._stopping = threading.Event()
        # One thread at a time makes the page; the health check does not wait for it.
        self._one = threading.Lock()
        self._server = (_ServerOnIPv6 if ":" in host else _Server)((host, port), _Request)
        self._server.set_app(self._answer)
        _open.add(self._server)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._server.server_close()
            raise

    @property
    def url(self) -> str:
        """The server's URL without a path; it has the real port if port 0 was asked for."""
        host, port = self._server.server_address[:2]
        return f"http://{at(str(host), port)}"

    def close(self) -> None:
        """Stop serving, and end the thread."""
        self._stopping.set()
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # shutdown() wakes the thread.
        self._thread.join(_STOP_SECONDS)
        self._server.cut_late(math.inf)
        self._server.server_close()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                self._server.handle_request()
                # A client that sends a byte now and then is never silent: cut it off here.
                self._server.cut_late(time.monotonic())
            except (OSError, ValueError):
                if not self._stopping.is_set():
                    log.exception("the metrics of this node are served no longer")
                return

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        refusal = self._access.refusal(
            path, environ.get("HTTP_HOST", ""), environ.get("HTTP_AUTHORIZATION", "")
        )
        match path:
            case _ if refusal is not None:
                status, text = f"{refusal.status} {refusal.status.phrase}", refusal.text
                headers |= refusal.headers
            case "/metrics":
                with self._server.at_work_for(environ[_CLIENT]), self._one:
                    self._before_metrics()
                    page: Iterable[bytes] = [*self._metrics(environ, start_response)]
                return page
            case page_access.HEALTH:
                well, text = self._health()
                status = "200 OK" if well else "503 Service Unavailable"
            case "/why":
                with self._server.at_work_for(environ[_CLIENT]), self._one:
                    status, text = "200 OK", self._why()
            case _:
                status, text = "404 Not Found", "there are /metrics, /healthz and /why"
        start_response(status, [*headers.items()])
        return [f"{text}\n".encode(errors="backslashreplace")]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    timeout = _LOOK_SECONDS
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any) -> None:
        # The present clients, the oldest first, each with its deadline.
        self._clients: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._clients[request] = time.monotonic() + _CLIENT_SECONDS
            others = [*self._clients][:-1]
            crowded = len(others) >= _MOST_CLIENTS
            # A slow store delays a page. Cut a client whose page is being made only if the pages of
            # all the others are being made too.
            oldest = min(others, key=lambda it: self._clients[it] == math.inf) if crowded else None
        if oldest is not None:
            self._cut(oldest)
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can start, because the host lacks resources or the interpreter ends.
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        threading.current_thread().name = "rdzv-metrics-client"
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def cut_late(self, now: float) -> None:
        """Cut off all clients whose time is over at ``now``; infinite: all clients."""
        with self._lock:
            late = [client for client, until in self._clients.items() if until <= now]
        for client in late:
            self._cut(client)

    @contextmanager
    def at_work_for(self, client: socket.socket) -> Iterator[None]:
        """Stop the client's clock, because the page of many runs on a slow store takes long."""
        self._give(client, math.inf)
        try:
            yield
        finally:
            self._give(client, time.monotonic() + _CLIENT_SECONDS)

    def _give(self, client: socket.socket, until: float) -> None:
        with self._lock:
            if self._clients.pop(client, None) is not None:
                self._clients[client] = until

    def _cut(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.pop(client, None)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)  # This ends the next read or write of its thread.

    def server_bind(self) -> None:
        # HTTPServer.server_bind looks up the host's name, which may take a resolver's time-out.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if exhausted(error) is not None:
                time.sleep(_LOOK_SECONDS)  # Pause, because the client still waits.
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a client of the metrics went away", exc_info=True)


class _ServerOnIPv6(_Server):
    address_family = socket.AF_INET6


class _Request(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS

    def get_environ(self) -> WSGIEnvironment:
        return {**super().get_environ(), _CLIENT: self.connection}

    def log_message(self, format: str, *args: Any) -> None:
        pass


_open: WeakSet[_Server] = WeakSet()


def _close_in_child() -> None:
    for server in list(_open):
        server.socket.close()


# A forked child would keep the port taken after this process has ended.
os.register_at_fork(after_in_child=_close_in_child)
