"""Requests to HTTP servers that hang, trickle, hang up or answer: real sockets on the loopback."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from email.message import Message
from email.utils import formatdate
from http.client import HTTPException
from queue import SimpleQueue
from typing import Any

import pytest

from rdzv_plugins.kv.base import Limit, Wake, WokenError
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.stores._http import Http, Request, time_of
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background
from tests.nonsense import serving

Serve = Callable[[socket.socket], None]
Host = tuple[str, int]

ASK = Request("GET", "/", {})
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def answer(line: socket.socket) -> None:
    while line.recv(65536):
        line.sendall(ANSWER)


def hang(line: socket.socket) -> None:
    while line.recv(65536):
        pass


def trickle(line: socket.socket) -> None:
    line.recv(65536)
    for byte in ANSWER:
        time.sleep(0.1)
        line.sendall(bytes([byte]))


def within(seconds: float, wake: Wake | None = None) -> Limit:
    return Limit(time.monotonic() + seconds, wake)


@pytest.fixture
def wake() -> Iterator[Wake]:
    wake = Wake()
    yield wake
    wake.close()


@pytest.mark.parametrize("serve", [hang, trickle])
def test_the_deadline_is_that_of_the_whole_request(serve: Serve) -> None:
    with serving(serve) as host:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            Http([host], None, 0.5).ask(ASK, within(0.5))
        assert 0.4 < time.monotonic() - began < 2


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n"
MEBIBYTE = b"x" * (1 << 20)
CHUNK = b"100000\r\n" + MEBIBYTE + b"\r\n"
BOUNDED = (TimeoutError, HTTPException)
# What is sent once, what is sent without end, and with what the request ends.
ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, BOUNDED),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000, HTTPException),
    "a header": (b"HTTP/1.1 200 OK\r\n", MEBIBYTE, HTTPException),
    "a body": (b"HTTP/1.1 200 OK\r\n\r\n", MEBIBYTE, HTTPException),
    "a body of a length": (LONG, MEBIBYTE, HTTPException),
    "chunks": (CHUNKED, CHUNK, HTTPException),
    "a chunk": (CHUNKED + b"fffffffffff\r\n", MEBIBYTE, HTTPException),
    "a chunk's size": (CHUNKED, b"1" * 1000, HTTPException),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 1000, BOUNDED),
    # Nobody makes room for what does not come.
    "a body that does not come": (LONG, b"", TimeoutError),
    "a chunk that does not come": (CHUNKED + b"fffffffffff\r\n", b"", TimeoutError),
}


def endlessly(once: bytes, again: bytes) -> Serve:
    def serve(line: socket.socket) -> None:
        line.recv(65536)
        line.sendall(once)
        while again:
            line.sendall(again)
        hang(line)

    return serve


@pytest.mark.parametrize(("once", "again", "error"), ENDLESS.values(), ids=ENDLESS)
def test_an_answer_without_end_ends(once: bytes, again: bytes, error: Any) -> None:
    """With 100 Continue without end a request never ended, and a body took 3 GiB in 11 s."""
    with serving(endlessly(once, again)) as host:
        asking = Background(lambda: Http([host], None, 1).ask(ASK, within(1)))
        assert asking.done(10)
        with pytest.raises(error):
            asking.result(0)


@pytest.mark.parametrize("start", [b"", CHUNKED + b"fffffffffff\r\n"])
def test_a_line_without_end_ends(start: bytes) -> None:
    start = start or b"HTTP/1.1 200 OK\r\n\r\n"
    with serving(endlessly(start, MEBIBYTE)) as host:
        stream = Http([host], None, 5).follow(ASK, within(5))
        with pytest.raises(HTTPException):
            stream.lines(within(60))
        stream.close()


def test_a_chunk_of_a_stream_has_a_size() -> None:
    with serving(endlessly(CHUNKED + b"-5\r\n", b"")) as host:
        stream = Http([host], None, 5).follow(ASK, within(5))
        with pytest.raises(HTTPException):
            stream.lines(within(5))
        stream.close()


def test_a_body_that_is_cut_off_is_no_answer() -> None:
    def cut_off(line: socket.socket) -> None:
        line.recv(65536)
        line.sendall(ANSWER[:-1])

    with serving(cut_off) as host, pytest.raises(HTTPException):
        Http([host], None, 5).ask(ASK, within(5))


# With TLS the handshake is never answered.
@pytest.mark.parametrize(("serve", "tls"), [(hang, False), (trickle, False), (hang, True)])
def test_a_request_is_woken_in_every_step(serve: Serve, tls: bool, wake: Wake) -> None:
    contexts = FromFiles(ssl.create_default_context) if tls else None
    with serving(serve) as host:
        asking = Background(lambda: Http([host], contexts, 30).ask(ASK, within(30, wake)))
        assert not asking.done(0.3)
        wake.ring()
        with pytest.raises(WokenError):
            asking.result(1)


def test_a_server_that_hangs_leaves_time_for_the_next() -> None:
    with serving(hang) as first, serving(answer) as second:
        http = Http([first, second], None, 2)
        with pytest.raises(TimeoutError):
            http.ask(ASK, within(2))
        began = time.monotonic()
        assert http.ask(ASK, within(1)).server == 1
        assert time.monotonic() - began < 0.9
        http.close()


def test_a_connection_is_kept_until_the_server_closes_it() -> None:
    lines: list[socket.socket] = []

    def remember(line: socket.socket) -> None:
        lines.append(line)
        answer(line)

    with serving(remember) as host:
        http = Http([host], None, 5)
        for _ in range(3):
            assert http.ask(ASK, within(5)).body == b"ok"
        assert len(lines) == 1
        lines[0].shutdown(socket.SHUT_RDWR)
        time.sleep(0.1)
        assert http.ask(ASK, within(5)).body == b"ok"
        assert len(lines) == 2
        http.close()


def test_a_held_request_that_is_given_up_goes_on(wake: Wake) -> None:
    asked: list[bytes] = []
    lines: set[socket.socket] = set()
    answers: SimpleQueue[bytes] = SimpleQueue()

    def hold_back(line: socket.socket) -> None:
        while request := line.recv(65536):
            lines.add(line)
            asked.append(request.split()[1])
            line.sendall(ANSWER[:-2] + answers.get())

    def give_up(target: str) -> None:
        with pytest.raises(WokenError):
            http.ask(Request("GET", target, {}), within(30, wake), held=20)

    with serving(hold_back) as host:
        http = Http([host], None, 5)
        waiting = Background(lambda: give_up("/a"))
        assert until(lambda: bool(asked), 5)
        wake.ring()
        waiting.result(5)
        wake.clear()
        with pytest.raises(TimeoutError):
            http.ask(Request("GET", "/a", {}), within(0.1), held=20)
        answers.put(b"no")
        (line,) = http._late
        assert until(lambda: line.came, 5)
        # It came before this one was asked, which another answers, over the same connection.
        answers.put(b"ok")
        assert http.ask(ASK, within(5)).body == b"ok"
        assert asked == [b"/a", b"/"]
        assert len(lines) == 1
        http.close()


def test_the_only_server_keeps_its_connections_where_it_takes_no_more() -> None:
    lines: list[socket.socket] = []

    def serve_two(line: socket.socket) -> None:
        lines.append(line)
        if len(lines) <= 2:
            answer(line)

    with serving(serve_two) as host:
        http = Http([host], None, 5)
        http.hold(ASK, 2, within(5))
        with pytest.raises(ConnectionError):
            http.follow(ASK, within(5))
        http.hold(ASK, 2, within(5))
        assert len(lines) == 3
        http.close()


def test_lines_come_one_by_one(wake: Wake) -> None:
    more = threading.Event()

    def stream(line: socket.socket) -> None:
        line.recv(65536)
        line.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n")
        more.wait(5)
        line.sendall(b"5\r\ntwo\nt\r\n")
        hang(line)

    with serving(stream) as host:
        # Longer than one server's share of a request's time.
        limit = within(30, wake)
        with contextlib.closing(Http([host], None, 0.1).follow(ASK, limit)) as lines:
            assert lines.lines(limit) == [b"one"]
            time.sleep(0.2)
            more.set()
            assert lines.lines(limit) == [b"two"]
            with pytest.raises(TimeoutError):
                lines.lines(within(0.2, wake))
        with contextlib.closing(Http([host], None, 5).follow(ASK, within(30, wake))) as lines:
            assert lines.lines(within(30, wake))[0] == b"one"
            wake.ring()
            with pytest.raises(WokenError):
                lines.lines(within(30, wake))


@pytest.mark.parametrize("ahead", [-3600.0, -1.5, 0.0, 1.5, 3600.0])
def test_the_agents_clock_counts(ahead: float) -> None:
    headers = Message()
    agent = time.time() + ahead
    headers["Date"] = formatdate(agent, usegmt=True)
    assert abs(time_of(headers) - agent) <= 1.1


def test_a_date_that_is_none_tells_nothing() -> None:
    headers = Message()
    headers["Date"] = "nonsense"
    assert abs(time_of(headers) - time.time()) < 1
