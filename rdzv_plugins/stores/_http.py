"""Requests to one of several HTTP servers: reused connections, the next server after a failure.

Python's own ``http.client`` writes the requests and parses the answers. Its socket is replaced by
one that never blocks: connecting, the TLS handshake, sending and receiving all end at the deadline
of the request and, in a `wait`, as soon as the wait is woken, however much the server sends. An
answer's size is limited, including headers and interim answers.
"""

from __future__ import annotations

import contextlib
import io
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from math import inf
from typing import Any, NamedTuple, TypeVar

from rdzv_plugins.kv.base import Limit, Problem, StoreClient, WokenError
from rdzv_plugins.kv.findings import Finding, of_connection
from rdzv_plugins.settings.endpoint import Endpoint
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import ServerOptions
from rdzv_plugins.stores._names import connected
from rdzv_plugins.stores._tls import context_if, tls_problem, unheard_alert

T = TypeVar("T")

# The size of a chunk; 2**60 bytes at most.
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}(?=$|[;\s])")

# The most idle connections: a node seldom has more requests at once.
_KEPT = 8

# The most late connections: a node waits for one key, and sometimes for a second key.
_MOST_LATE = 2

# The most bytes of an answer. A listing of 10,000 nodes has 15 MB on Kubernetes.
_MOST = 1 << 26
# The most bytes of a line in a stream, and thus of an object.
_MOST_OF_A_LINE = 1 << 24
# Bodies are read in pieces of this size, for which http.client allocates memory in advance.
_PIECE = 1 << 20

# Errors of a TLS connection that was cut; after ssl's other errors every handshake fails.
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLSyscallError, ssl.SSLZeroReturnError)


class Request(NamedTuple):
    """A request; it is attempted once."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None = None


class Answer(NamedTuple):
    """A server's answer of any status; ``server`` is the server's index among the hosts."""

    status: int
    headers: Message
    body: bytes
    server: int


class Http:
    """Connections to the first of several servers that answers; safe to use from several threads.

    A request without an answer raises OSError or ``HTTPException``, although the server may have
    executed it; the next request goes to the next server. A woken request raises `WokenError`.

    Args:
        hosts: names and ports of the servers of one cluster.
        tls: gives the context of a new connection; None: no TLS.
        timeout: seconds of a request with its retries. Each server gets an equal share, so that a
            server that hangs leaves time for the others.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        tls: FromFiles[ssl.SSLContext] | None,
        timeout: float,
    ) -> None:
        self._hosts = hosts
        self._tls = tls
        self._patience = timeout / len(hosts)
        self._lock = threading.Lock()
        self._server = 0
        self._idle: list[_Connection] = []
        # Connections on which the server still holds an answer for a waiter that is gone.
        self._late: list[_Connection] = []
        self._closed = False

    def ask(self, request: Request, limit: Limit, held: float = 0.0) -> Answer:
        """Return the answer, which the server may hold back for ``held`` seconds.

        If the caller gives up earlier, the next caller with the same request takes the answer.
        """
        with self._exchange(request, limit, held) as (connection, response):
            answer = connection.answer(response)
        if answer.status >= 500:
            # This server may be cut off from the leader, so try another server.
            self.leave(answer.server)
        return answer

    def follow(self, request: Request, limit: Limit) -> Stream:
        """Send a request whose answer is a stream; the caller closes the stream."""
        with contextlib.ExitStack() as stack:
            connection, response = stack.enter_context(self._exchange(request, limit, inf))
            return Stream(connection, response, stack.pop_all())

    def hold(self, request: Request, connections: int, limit: Limit) -> list[Answer]:
        """Send the request over several connections, which stay open; returns the answers."""
        answers = []
        with contextlib.ExitStack() as exchanges:
            for _ in range(connections):
                connection, response = exchanges.enter_context(self._exchange(request, limit, 0.0))
                answers.append(connection.answer(response))
        return answers

    def leave(self, server: int) -> None:
        """Use the next server from now on, if ``server`` is still in use."""
        with self._lock:
            if self._server != server:
                return
            self._server = (server + 1) % len(self._hosts)
        self._drop_idle()

    def inspect(self, secret: bool) -> Finding:
        """The finding of `of_connection`; ``secret``: a password or token is sent."""
        return of_connection(self._tls is not None, secret, [host for host, _ in self._hosts])

    def close(self) -> None:
        """Close the idle connections; a running request closes its own when it ends."""
        self._closed = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        with self._lock:
            dropped, self._idle, self._late = [*self._idle, *self._late], [], []
        for connection in dropped:
            connection.hang_up()

    @contextlib.contextmanager
    def _exchange(
        self, request: Request, limit: Limit, held: float
    ) -> Iterator[tuple[_Connection, HTTPResponse]]:
        _ = limit.seconds
        # A stream's connection cannot be reused: leave idle connections to other requests.
        connection = self._take(request if held else None, limit) if held < inf else None
        kept, late = connection is not None, connection is not None and connection.awaits
        server = self._server if connection is None else connection.server
        until = time.monotonic() + held + self._patience
        gives_up = False
        try:
            if connection is None:
                context = self._tls.get() if self._tls is not None else None
                connection = _Connection(self._hosts[server], context, limit.until(until), server)
            until = connection.until if late else until
            connection.begin(limit.until(until))
            if not late:
                connection.asked, connection.until = request if held else None, until
                method, target, headers, body = request
                connection.http.request(method, target, body, dict(headers))
            yield connection, connection.http.getresponse()
        except WokenError:
            gives_up = held < inf
            raise
        except (OSError, HTTPException) as error:
            ended = isinstance(error, TimeoutError) and time.monotonic() >= limit.deadline
            gives_up = ended and 0 < held < inf
            if not (held and ended):
                self._failed(error, server, kept, held)
            raise
        finally:
            if connection is not None:
                self._give_back(connection, gives_up)

    def _failed(self, error: Exception, server: int, kept: bool, held: float) -> None:
        """Leave a server or connections that failed; raises the server's lost TLS alert, if any."""
        cut = isinstance(error, ConnectionError | ssl.SSLEOFError)
        if kept and cut:
            # The connection was closed while idle: that says nothing about the server.
            self._drop_idle()
        elif not cut or len(self._hosts) > 1:
            # Keep an only server's connections: it may be full. If it ended, they will fail.
            self.leave(server)
        if self._tls and cut and not kept and not held and not self._closed:
            alert = unheard_alert(*self._hosts[server], self._tls.get())
            if alert is not None:
                raise alert from error

    def _take(self, request: Request | None, limit: Limit) -> _Connection | None:
        """A connection on which the server holds this request already, else an idle connection."""
        while True:
            with self._lock:
                late = (it for it in self._late if it.asked in (None, request) or it.came)
                found = next(late, None)
                if found is not None:
                    self._late.remove(found)
                elif self._idle:
                    found = self._idle.pop()
            if found is None:
                return None
            if found.awaits and (found.asked is None or found.came):
                self._finish(found, limit)
            elif found.came:
                # Readable while idle: the server closed it.
                found.hang_up()
            else:
                return found

    def _finish(self, connection: _Connection, limit: Limit) -> None:
        """Read a held answer; it may be older than the last change of the key."""
        connection.begin(limit.until(connection.until))
        try:
            connection.answer(connection.http.getresponse())
        except (OSError, HTTPException):
            connection.awaits = False
        finally:
            self._give_back(connection, given_up=True)

    def _give_back(self, connection: _Connection, given_up: bool = False) -> None:
        with self._lock:
            wanted = connection.server == self._server and not self._closed
            if wanted and connection.reusable and len(self._idle) < _KEPT:
                self._idle.append(connection)
                return
            if wanted and given_up and connection.awaits:
                self._late.append(connection)
                if len(self._late) <= _MOST_LATE:
                    return
                connection = self._late.pop(0)
        connection.hang_up()


class Stream:
    """An answer that goes on. A waiter may give up and call `lines` again, without any loss.

    Attributes:
        status, headers, server: see `Answer`.
    """

    def __init__(
        self, connection: _Connection, response: HTTPResponse, exchange: contextlib.ExitStack
    ) -> None:
        self.status, self.headers = response.status, response.headers
        self.server = connection.server
        self._connection, self._response, self._exchange = connection, response, exchange
        self._chunks, self._text, self._searched, self._ended = b"", bytearray(), 0, False

    def lines(self, limit: Limit) -> list[bytes]:
        """The lines that have come; waits for the first. An empty list: the answer has ended.

        Raises TimeoutError and `WokenError`, after which it can be called again, OSError and
        ``HTTPException``.
        """
        self._connection.begin(limit)
        while True:
            # Search only new bytes, because a line may be long.
            end = self._text.rfind(b"\n", self._searched) + 1
            end = len(self._text) if self._ended else end
            self._searched = len(self._text) - end
            if end or self._ended:
                *lines, last = bytes(self._text[:end]).split(b"\n")
                del self._text[:end]
                return [*lines, last] if last else lines
            # Not response.read(): when interrupted, http.client loses its position within a chunk.
            self._take(self._response.fp.read1(1 << 16))
            _refuse_beyond(len(self._text) + len(self._chunks), _MOST_OF_A_LINE)

    def _take(self, data: bytes) -> None:
        if not data:
            self._ended = True
        if not self._response.chunked:
            self._text += data
            return
        self._chunks += data
        while True:
            size, mark, rest = self._chunks.partition(b"\r\n")
            if not mark:
                return
            if (found := _SIZE.match(size)) is None:
                raise HTTPException("its answer has a chunk of no size")
            if len(rest) < (length := int(found[0], 16)) + 2:
                return
            self._text += rest[:length]
            self._chunks = rest[length + 2 :]
            self._ended = self._ended or not length

    def close(self) -> None:
        """End the connection; idempotent."""
        self._exchange.close()


class _Connection(io.RawIOBase):
    """A connection in the form in which ``http.client`` uses its socket.

    Attributes:
        limit: the limit of the current request; every step ends at it.
        server: the index of its host.
        reusable: whether its request ended well, and the server keeps it open.
        awaits: whether a request has been sent, and nothing of the answer has come.
        asked: the sent request, if the server may hold back its answer.
        until: when its answer is overdue, in monotonic seconds.
    """

    asked: Request | None
    until: float

    def __init__(
        self, host: tuple[str, int], context: ssl.SSLContext | None, limit: Limit, server: int
    ) -> None:
        self.server, self._request = server, b""
        self.begin(limit)
        self.http = HTTPConnection(*host)
        self._socket = connected(host, limit)
        try:
            if context is not None:
                self._socket = context.wrap_socket(
                    self._socket, server_hostname=host[0], do_handshake_on_connect=False
                )
                self._step(select.POLLIN, self._socket.do_handshake)
        except BaseException:
            self._socket.close()
            raise
        self.http.sock = self

    def begin(self, limit: Limit) -> None:
        """Begin a request: its steps end at ``limit``, and its count of bytes starts at 0."""
        self.limit, self.reusable, self.awaits, self._read = limit, False, False, 0

    @property
    def came(self) -> bool:
        """Whether there is something to read; also true if the server has closed the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def answer(self, response: HTTPResponse) -> Answer:
        """The whole answer; raises `IncompleteRead` if the server hung up before its end."""
        parts = []
        while part := response.read(_PIECE):
            parts.append(part)
        if response.length:
            raise IncompleteRead(b"", response.length)
        self.reusable = not response.will_close
        return Answer(response.status, response.headers, b"".join(parts), self.server)

    def hang_up(self) -> None:
        self.http.close()
        self._socket.close()

    # http.client and io.BufferedReader call these methods.

    def sendall(self, data: bytes) -> None:
        self._request += data

    def makefile(self, mode: str) -> io.BufferedReader:
        # Sending headers and body at once saves a twentieth of a request's time.
        request, self._request = self._request, b""
        rest = memoryview(request)
        while rest:
            rest = rest[self._step(select.POLLOUT, self._socket.send, rest) :]
        self.awaits = True
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # Check the limit: with a server that always sends more, _step never waits.
        _ = self.limit.seconds
        came = self._step(select.POLLIN, self._socket.recv_into, buffer)
        self.awaits = False
        self._read += came
        _refuse_beyond(self._read, _MOST)
        return came

    def close(self) -> None:
        """Do nothing: ``http.client`` also calls it before the last answer is read."""

    def _step(self, event: int, action: Callable[..., T], *arguments: Any) -> T:
        while True:
            try:
                return action(*arguments)
            except BlockingIOError:
                self.limit.await_ready(self._socket.fileno(), event)
            except ssl.SSLWantReadError:
                self.limit.await_ready(self._socket.fileno())
            except ssl.SSLWantWriteError:
                self.limit.await_ready(self._socket.fileno(), select.POLLOUT)


def _refuse_beyond(length: int, most: int) -> None:
    if length > most:
        raise HTTPException(f"its answer has more than {most >> 20} MiB")


class BoundedResponse(HTTPResponse):
    """An answer for other libraries, limited in time and size."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Bounded(self.fp, sock.gettimeout() or inf))


class _Bounded(io.RawIOBase):
    def __init__(self, line: io.BufferedReader, seconds: float) -> None:
        self._line, self._came = line, 0
        # Limits when a read may begin; the last read has the socket's time-out too.
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if time.monotonic() >= self._until:
            raise TimeoutError("no answer in time")
        came = self._line.readinto1(buffer)
        self._came += came
        _refuse_beyond(self._came, _MOST)
        return came

    def close(self) -> None:
        self._line.close()
        super().close()


def http_of(target: Endpoint, options: ServerOptions, timeout: float) -> Http:
    """Connections to the endpoint's servers, with TLS if its scheme or the options demand it."""
    secure = options.tls or target.scheme == "https"
    tls = context_if(secure, options, "set tls=true, or write https:// in the endpoint")
    return Http(target.hosts, tls, timeout)


def http_problem(client: StoreClient, error: Exception, hint: str = "") -> Problem | None:
    """The meaning of an error of `Http`; None: another error. ``hint``: see `_unreachable`."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, _CUT_OFF):
        return tls_problem(str(error))
    if isinstance(error, OSError | HTTPException):
        undone = isinstance(error, ConnectionRefusedError | socket.gaierror)
        return client._unreachable(error, undone=undone, hint=hint)
    return None


def time_of(headers: Message) -> float:
    """The server's time in seconds: this host's clock, clamped to the second in its Date."""
    now = time.time()
    try:
        second = parsedate_to_datetime(headers["Date"]).timestamp()
    except (TypeError, ValueError):
        return now  # There is no Date, or a proxy has changed it.
    return min(max(now, second), second + 0.999)
