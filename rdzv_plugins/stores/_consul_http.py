"""Kept-alive HTTP connections to Consul agents; a parked one can be shut down from outside."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection, HTTPSConnection

__all__ = ["Answer", "Http", "InterruptedRequest"]


class InterruptedRequest(Exception):  # noqa: N818 - nothing went wrong
    """`Http.shut` came before or during the request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers and body of a response."""

    status: int
    headers: Message
    body: bytes


class Http:
    """Connections to the first of several agents that answers; safe to use from several threads.

    Args:
        hosts: names and ports of agents of one cluster.
        context: for TLS; None: none.
        headers: sent with each request.
        connect_timeout: seconds for one agent, after which the next one is tried.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        context: ssl.SSLContext | None,
        headers: Mapping[str, str],
        connect_timeout: float,
    ) -> None:
        self._hosts = hosts
        self._context = context
        self._headers = headers
        self._connect_timeout = connect_timeout
        self._lock = threading.Lock()
        self._current = 0
        self._idle: list[HTTPConnection] = []
        self._busy: dict[HTTPConnection, bool] = {}
        self._closed = False

    def ask(
        self,
        method: str,
        target: str,
        body: bytes | None,
        deadline: float,
        *,
        wanted: Callable[[], bool] | None = None,
    ) -> Answer:
        """One request and its answer, whatever its status.

        Args:
            deadline: on the monotonic clock, in seconds.
            wanted: given for a parked request, which `shut` ends; false once it has come.

        Raises:
            OSError, http.client.HTTPException: no answer; the request may have been carried out.
            InterruptedRequest: a parked request was shut down.
        """
        remaining = max(0.001, deadline - time.monotonic())
        connection, host = self._take(remaining)
        try:
            with self._lock:
                if self._closed or (wanted and not wanted()):
                    raise InterruptedRequest
                self._busy[connection] = wanted is not None
            try:
                connection.sock.settimeout(remaining)
                connection.request(method, target, body=body, headers=dict(self._headers))
                response = connection.getresponse()
                answer = Answer(response.status, response.headers, response.read())
            finally:
                with self._lock:
                    del self._busy[connection]
            if response.will_close:
                connection.close()
        except BaseException as error:
            connection.close()
            if wanted and not wanted():
                raise InterruptedRequest from error
            self._turn_from(host)
            raise
        if connection.sock is not None:
            with self._lock:
                if not self._closed:
                    self._idle.append(connection)
                    return answer
            connection.close()
        return answer

    def _take(self, timeout: float) -> tuple[HTTPConnection, int]:
        while True:
            with self._lock:
                host = self._current
                idle = self._idle.pop() if self._idle else None
            if idle is None:
                break
            if not _is_readable(idle.sock):
                return idle, host
            # Nothing was asked: the agent closed it.
            idle.close()
        name, port = self._hosts[host]
        timeout = min(timeout, self._connect_timeout)
        connection = (
            HTTPSConnection(name, port, timeout=timeout, context=self._context)
            if self._context
            else HTTPConnection(name, port, timeout=timeout)
        )
        try:
            connection.connect()
        except BaseException:
            connection.close()
            self._turn_from(host)
            raise
        return connection, host

    def turn(self) -> None:
        """Ask the next agent from now on: this one answers but cannot serve."""
        self._turn_from(self._current)

    def _turn_from(self, host: int) -> None:
        with self._lock:
            if host != self._current:
                return
            self._current = (host + 1) % len(self._hosts)
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def shut(self) -> None:
        """End the parked requests."""
        with self._lock:
            connections = [it for it, parked in self._busy.items() if parked]
        _shut_down(connections)

    def close(self) -> None:
        """End all requests and connections; idempotent."""
        with self._lock:
            self._closed = True
            busy, idle = [*self._busy], self._idle
            self._idle = []
        _shut_down(busy)
        for connection in idle:
            connection.close()


def _is_readable(connection: socket.socket) -> bool:
    # Not select.select, which takes no descriptor from 1024 on.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _shut_down(connections: Sequence[HTTPConnection]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            # Of the plain socket: SSLSocket's own shutdown pulls TLS from under the reader.
            socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
