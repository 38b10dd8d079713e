"""Serves the page, its data as JSON, and changes as server-sent events. Read-only."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.resources import files
from threading import Thread
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rdzv_plugins.dashboard.poller import Poller, Snapshot
from rdzv_plugins.observe.page_access import HEALTH, PageAccess
from rdzv_plugins.observe.survey import Survey
from rdzv_plugins.settings.endpoint import at

# A stream checks every _LOOK_SECONDS whether the server ends. Proxies close a stream that is silent
# for longer than _SILENT_SECONDS.
_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 15.0
_END_SECONDS = 5
# With more clients at once, the client that has been idle for longest is cut off. If all wait for
# an answer, the new client is told that the server is busy.
_MOST_CLIENTS = 200
_KEEP_ALIVE_SECONDS = 10
# A request must arrive whole within this many seconds, and have no more bytes than this.
_REQUEST_SECONDS = 10.0
_MOST_REQUEST_BYTES = 16 << 10

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Dashboard:
    """The page's server, which closes the survey when it ends; ``where`` names the store.

    Raises OSError if it cannot listen at the host and the port; port 0: any free port.
    """

    def __init__(
        self, survey: Survey, where: str, host: str, port: int, access: PageAccess
    ) -> None:
        self._poller = Poller(survey)
        self._where = where
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._application(access),
                log_level="warning",
                server_header=False,
                limit_concurrency=_MOST_CLIENTS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                h11_max_incomplete_event_size=_MOST_REQUEST_BYTES,
                http=_Protocol,
                timeout_graceful_shutdown=_END_SECONDS,
            )
        )

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{at(host, port)}"

    def serve(self, wait: Callable[[], None]) -> None:
        """Serve until ``wait`` returns."""
        # In a thread uvicorn handles no signals: a signal in its event loop would show a traceback.
        sockets = {"sockets": [self._socket]}
        server = Thread(target=self._server.run, kwargs=sockets, name="rdzv-page", daemon=True)
        server.start()
        wait()
        self._server.should_exit = True
        server.join()

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def _application(self, access: PageAccess) -> Starlette:
        return Starlette(
            routes=[
                *(Route(path, _file(*what)) for path, what in _FILES.items()),
                Route("/api/runs", self._runs),
                Route("/api/runs/{run_id:path}", self._run),
                Route("/events", self._events),
                Route(HEALTH, self._health),
            ],
            middleware=[Middleware(_Access, access, self.port)],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._poller.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._poller.close)

    async def _runs(self, _: Request) -> Response:
        snapshot = await self._poller.fresh()
        if snapshot is None:
            return PlainTextResponse("the store has not been read yet\n", 503)
        return _json(self._store(snapshot) | {"runs": snapshot.runs})

    async def _run(self, request: Request) -> Response:
        await self._poller.fresh()
        run = await self._poller.run(request.path_params["run_id"])
        if run is None:
            return PlainTextResponse("there is no such run in the list of runs\n", 404)
        return _json(run)

    async def _health(self, _: Request) -> Response:
        # Healthy even while the store is away, because a restart of this process would not help.
        if self._poller.lives:
            return PlainTextResponse("ok\n")
        return PlainTextResponse("the thread that reads the store has ended\n", 503)

    async def _events(self, request: Request) -> Response:
        stream = self._stream(request.query_params.get("run"))
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream(self, run_id: str | None) -> AsyncIterator[bytes]:
        """Events ``store``, ``runs`` and ``run``, each whenever it differs from the one before."""
        sent: dict[str, bytes] = {}
        taken, silent = 0.0, 0.0
        self._poller.viewers += 1
        try:
            while not self._server.should_exit:
                snapshot = self._poller.snapshot
                if snapshot is None or snapshot.taken == taken:
                    await self._poller.news(_LOOK_SECONDS)
                    silent += _LOOK_SECONDS
                    if silent >= _SILENT_SECONDS:
                        silent = 0.0
                        yield b": nothing new\n\n"
                    continue
                taken, silent = snapshot.taken, 0.0
                events: dict[str, Any] = {"store": self._store(snapshot), "runs": snapshot.runs}
                if run_id is not None:
                    events["run"] = await self._poller.run(run_id)
                for name, value in events.items():
                    data = _encode(value)
                    if sent.get(name) != data:
                        sent[name] = data
                        yield b"event: %s\ndata: %s\n\n" % (name.encode(), data)
        finally:
            self._poller.viewers -= 1

    def _store(self, snapshot: Snapshot) -> dict[str, Any]:
        return {"schema": 1, "store": self._where, "at": snapshot.at, "away": snapshot.away}


class _Protocol(H11Protocol):
    """Ends a connection whose next request does not come in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_in: object = None
        self._since = self.loop.time()
        if len(self.connections) >= _MOST_CLIENTS:
            others = (it for it in self.connections if isinstance(it, _Protocol) and it is not self)
            idle = [it for it in others if it._is_idle and not it.transport.is_closing()]
            if idle:
                min(idle, key=lambda it: it._since).transport.close()
        self._late = self.loop.call_later(_REQUEST_SECONDS / 2, self._end_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _end_if_idle(self) -> None:
        idle = self._is_idle
        if idle and self._idle_in is (self.cycle or self):
            self.transport.close()
            return
        self._idle_in = (self.cycle or self) if idle else None
        self._late = self.loop.call_later(_REQUEST_SECONDS / 2, self._end_if_idle)


class _Access:
    """Refuses clients without access, and adds the headers of every answer.

    A browser that sends the token in the address gets a cookie for it.
    """

    def __init__(self, app: ASGIApp, access: PageAccess, port: int) -> None:
        self._app = app
        self._access = access
        # Browsers send cookies to all ports of a host.
        self._cookie = f"rdzv-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._answer(Request(scope)) if scope["type"] == "http" else None
        await (self._app if answer is None else answer)(scope, receive, with_headers)

    def _answer(self, request: Request) -> Response | None:
        headers, access = request.headers, self._access
        refusal = access.refusal(
            request.url.path, headers.get("host", ""), headers.get("authorization", "")
        )
        if refusal is None or access.is_cookie(request.cookies.get(self._cookie, "")):
            return None
        if access.is_token(request.query_params.get("token", "")):
            # Redirect, so that the token leaves the address bar and the browser's history.
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._cookie, access.cookie, httponly=True, samesite="lax")
            return answer
        text = refusal.text
        if refusal.status is HTTPStatus.UNAUTHORIZED:
            text += "; a browser opens it as /?token=..."
        return PlainTextResponse(f"{text}\n", refusal.status, refusal.headers)


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files(__package__).joinpath(name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


# A string of JSON holds no line end, so that one event is one line.
_encode = msgspec.json.Encoder().encode


def _json(value: object) -> Response:
    return Response(_encode(value), media_type="application/json")
