"""Requests to etcd's JSON gateway: members in turn, kept connections, tokens, streams.

Python's own ``http.client``, not etcd3gw, the one kept v3 client on PyPI. That has no
authentication and no second endpoint, its watch breaks when an event spans two chunks and cannot
be given a deadline, and a request through it and ``requests`` takes two to three times as long.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.stores._tls import unheard_alert

__all__ = ["Gateway", "GatewayError", "decoded", "encoded", "explain", "is_passing", "is_undone"]

# Codes of gRPC's status. What is cancelled was so by a member that stops: we only hang up.
_CANCELLED, _UNKNOWN, _DEADLINE, _DENIED, _EXHAUSTED, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = (
    1, 2, 4, 7, 8, 13, 14, 16,
)  # fmt: skip

# Because of the header hasleader a member that knows no leader refuses before it does anything.
_NO_LEADER = "etcdserver: no leader"

_HEADERS = {
    "Content-Type": "application/json",
    # A member that is cut off from the others shall end a watch, not sleep on it.
    "Grpc-Metadata-hasleader": "true",
}


class GatewayError(Exception):
    """etcd answered, and refused.

    Attributes:
        code: gRPC's status code; _UNKNOWN where the answer was not etcd's.
        status: the HTTP status.
    """

    def __init__(self, code: int, status: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decoded(text: str) -> bytes:
    return base64.b64decode(text)


@dataclass(eq=False, slots=True)
class _Link:
    """A connection to a member; its socket apart, for ``http.client`` forgets it at times."""

    member: int
    http: http.client.HTTPConnection
    socket: socket.socket
    fresh: bool = True
    answered: bool = False
    keep: bool = False

    def shut(self) -> None:
        # The plain socket's own method: that of a TLS socket pulls the rug from under its reader.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


class Gateway:
    """The members of one cluster. Safe to use from several threads.

    `post` and `stream` make one attempt at one member and raise `OSError`,
    `http.client.HTTPException` or `GatewayError`; the attempt after a failure goes to the next
    member. With ``going`` a request is parked: `interrupt`, called once ``going()`` is false,
    breaks it off.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        context: ssl.SSLContext | None,
        user: str | None,
        password: str | None,
        timeout: float,
    ) -> None:
        self._hosts = hosts
        self._context = context
        self._user, self._password = user, password
        # A member that hangs must leave time to ask another.
        self._attempt = timeout / len(hosts)
        # Not all nodes to the first member.
        self._member = random.randrange(len(hosts))
        self._idle: list[_Link] = []
        self._busy: set[_Link] = set()
        self._parked: set[_Link] = set()
        self._token: str | None = None
        self._lock = threading.Lock()
        self._closed = False

    def post(
        self, path: str, body: dict[str, Any], going: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """One request and its answer."""
        token = self._authorise()
        return self._post(path, body, token, going)

    def stream(
        self, path: str, body: dict[str, Any], going: Callable[[], bool], deadline: float
    ) -> Iterator[dict[str, Any]]:
        """The messages of an endless answer; raises `TimeoutError` at the deadline."""
        token = self._authorise()
        with self._link(token, going, reuse=False) as link:
            answer = _send(link, path, body, token)
            if answer.status != 200:
                raise _refusal(answer.status, answer.read())
            while True:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError
                link.socket.settimeout(remaining)
                line = answer.readline()
                if not line:
                    return
                if line.strip():
                    message = _parsed(line)
                    if refusal := message.get("error"):
                        code = refusal.get("grpc_code", refusal.get("code", _UNKNOWN))
                        raise GatewayError(code, 200, str(refusal.get("message")))
                    yield message["result"]

    def interrupt(self) -> None:
        """Break off every parked request."""
        with self._lock:
            for link in self._parked:
                link.shut()

    def close(self) -> None:
        """Break off every request; idempotent."""
        with self._lock:
            self._closed = True
            for link in self._busy | self._parked:
                link.shut()
            for link in self._idle:
                link.http.close()
            self._idle.clear()

    def _post(
        self,
        path: str,
        body: dict[str, Any],
        token: str | None,
        going: Callable[[], bool] | None,
    ) -> dict[str, Any]:
        with self._link(token, going, reuse=True) as link:
            answer = _send(link, path, body, token)
            data = answer.read()
            link.keep = not answer.will_close
            if answer.status != 200:
                raise _refusal(answer.status, data)
            return _parsed(data)

    def _authorise(self) -> str | None:
        if self._user is None or self._token is not None:
            return self._token
        body = {"name": self._user, "password": self._password or ""}
        self._token = str(self._post("auth/authenticate", body, None, None)["token"])
        return self._token

    @contextlib.contextmanager
    def _link(
        self, token: str | None, going: Callable[[], bool] | None, *, reuse: bool
    ) -> Iterator[_Link]:
        """A connection for one request; what fails in it decides where the next one goes."""
        member = self._member
        link: _Link | None = None
        try:
            link = (self._reused(member) if reuse else None) or self._connect(member)
            with self._lock:
                (self._parked if going else self._busy).add(link)
            if self._closed or (going and not going()):
                raise ConnectionAbortedError("broken off")
            yield link
        except TimeoutError:
            if link is None or not link.answered:
                self._failed(member)
            raise
        except Exception as error:
            ours = self._closed or (going is not None and not going())
            if link is not None and not ours and (alert := self._alert(link, error)):
                raise alert from error
            if _is_token_error(error):
                if self._token == token:
                    self._token = None
            elif is_passing(error) and not (going and not going()):
                # A kept connection that was closed meanwhile says nothing about the member.
                stale = link is not None and not link.fresh and isinstance(error, ConnectionError)
                self._failed(member, rotate=not stale)
            raise
        finally:
            if link is not None:
                self._give_back(link)

    def _alert(self, link: _Link, error: Exception) -> ssl.SSLError | None:
        """What a member said that hung up at the first request."""
        hung_up = isinstance(error, ConnectionError | ssl.SSLEOFError)
        if self._context is None or link.answered or not link.fresh or not hung_up:
            return None
        return unheard_alert(*self._hosts[link.member], self._context)

    def _reused(self, member: int) -> _Link | None:
        with self._lock:
            link = next((link for link in reversed(self._idle) if link.member == member), None)
            if link is not None:
                self._idle.remove(link)
                link.fresh = link.answered = link.keep = False
        return link

    def _connect(self, member: int) -> _Link:
        host, port = self._hosts[member]
        connection = (
            http.client.HTTPConnection(host, port, timeout=self._attempt)
            if self._context is None
            else http.client.HTTPSConnection(
                host, port, timeout=self._attempt, context=self._context
            )
        )
        connection.connect()
        return _Link(member, connection, connection.sock)

    def _give_back(self, link: _Link) -> None:
        with self._lock:
            self._busy.discard(link)
            self._parked.discard(link)
            keep = link.keep and not self._closed and len(self._idle) < 8
            if keep:
                self._idle.append(link)
        if not keep:
            link.http.close()
            link.socket.close()

    def _failed(self, member: int, *, rotate: bool = True) -> None:
        with self._lock:
            if rotate and self._member == member:
                self._member = (member + 1) % len(self._hosts)
            dropped = [link for link in self._idle if link.member == member]
            self._idle = [link for link in self._idle if link.member != member]
        for link in dropped:
            link.http.close()


def explain(error: Exception, where: str, timeout: float, prefix: str) -> Exception:
    """The contract's error for one of `Gateway`'s; any other is returned as it is."""
    if isinstance(error, GatewayError):
        return _explain_refusal(error, where, timeout, prefix)
    if isinstance(error, ssl.SSLError) and not is_passing(error):
        return RendezvousConnectionError(
            f"{where} and this node do not trust each other ({error}); see ca_file, cert_file and "
            "key_file in --rdzv-conf, and https:// in --rdzv-endpoint"
        )
    if isinstance(error, OSError | http.client.HTTPException):
        return RendezvousConnectionError(
            f"{where} could not be reached within {timeout:g} s "
            f"({str(error) or type(error).__name__}); "
            "is it running, does --rdzv-endpoint name it, and does it want https://?"
        )
    return error


def _explain_refusal(error: GatewayError, where: str, timeout: float, prefix: str) -> Exception:
    text = str(error)
    if "authentication is not enabled" in text:
        return RendezvousConnectionError(f"{where} knows no users ({text}); leave user out")
    if (
        error.code in {_DENIED, _UNAUTHENTICATED}
        or "user name is empty" in text
        or "authentication" in text
    ):
        return RendezvousConnectionError(
            f"{where} refused the credentials ({text}); set the user in the endpoint and the "
            f"password in $RDZV_PLUGINS_PASSWORD; its role needs readwrite on the prefix '{prefix}'"
        )
    if "CommonName of client" in text:
        return RendezvousConnectionError(
            f"{where} takes no client certificate with a common name while authentication is on; "
            "make one without for cert_file"
        )
    # etcd's own "not found", as of a lease, is a 404 too.
    if error.status == 404 and not text.startswith("etcdserver:"):
        return RendezvousConnectionError(
            f"{where} has no v3 gateway: it is older than 3.4, or runs with "
            "--enable-grpc-gateway=false, or is not etcd"
        )
    if "space exceeded" in text:
        return RendezvousConnectionError(
            f"{where} is full ({text}); compact and defragment it, then `etcdctl alarm disarm`"
        )
    if is_passing(error):
        return RendezvousConnectionError(
            f"{where} gave no answer within {timeout:g} s ({text}); "
            "has a majority of its members gone?"
        )
    return RendezvousStateError(f"{where} refused a request: {text}")


def _send(
    link: _Link, path: str, body: dict[str, Any], token: str | None
) -> http.client.HTTPResponse:
    headers = _HEADERS if token is None else {**_HEADERS, "Authorization": token}
    link.http.request("POST", f"/v3/{path}", json.dumps(body).encode(), headers)
    answer = link.http.getresponse()
    link.answered = True
    return answer


def _is_token_error(error: Exception) -> bool:
    """Whether a new token mends it."""
    return isinstance(error, GatewayError) and (
        error.code == _UNAUTHENTICATED or "revision of auth store is old" in str(error)
    )


def is_passing(error: Exception) -> bool:
    """Whether the next attempt, perhaps at another member, may succeed."""
    if isinstance(error, GatewayError):
        if error.code == _EXHAUSTED:
            return "too many requests" in str(error)
        return (
            _is_token_error(error)
            or error.status >= 500
            or error.code in {_CANCELLED, _DEADLINE, _INTERNAL, _UNAVAILABLE}
        )
    if isinstance(error, ssl.SSLError):
        # A refused certificate stays refused.
        return isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return isinstance(error, OSError | http.client.HTTPException)


def is_undone(error: Exception) -> bool:
    """Whether a request that failed so has certainly changed nothing."""
    if isinstance(error, GatewayError):
        text = str(error)
        return _is_token_error(error) or "too many requests" in text or text == _NO_LEADER
    return isinstance(error, ConnectionRefusedError | socket.gaierror)


def _refusal(status: int, data: bytes) -> GatewayError:
    with contextlib.suppress(ValueError, AttributeError):
        answer = json.loads(data)
        return GatewayError(
            int(answer.get("code", _UNKNOWN)),
            status,
            str(answer.get("message") or answer.get("error")),
        )
    return GatewayError(_UNKNOWN, status, f"HTTP {status}: {data[:200].decode(errors='replace')}")


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except ValueError as error:
        raise GatewayError(_UNKNOWN, 200, "the answer is not etcd's: no JSON") from error
