"""Servers that speak nonsense, or nothing, on real sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

__all__ = ["ENVIRON", "SAMPLES", "reached", "serving", "silent", "speaking"]

ENVIRON = {
    "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
    "AZURE_STORAGE_ACCOUNT_KEY": "eA==",
}  # fmt: skip
"""What the clients need."""

_ANSWER = (
    b"HTTP/1.1 200 OK\r\nDate: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
)
_DATE = b"Fri, 27 Nov 2026 18:42:00 GMT"


def _told(body: bytes, date: bytes = _DATE) -> bytes:
    return _ANSWER % (date, len(body), body)


def _info(text: bytes) -> bytes:
    return b"INFO " + text + b"\r\n"


def _framed(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


_ANY = [b"\x00" * 64, b"\xff" * 4096, b"\r\n" * 9, b"HTTP/1.1 999 \r\n\r\n", b"[" * 50_000]
_HTTP = [
    *(_told(it) for it in (b"", b"null", b"[]", b"5", b'"x"', b"<a>\nb", b"\xff", b"[" * 50_000)),
    _told(b"{}", b"x"),
    _told(b'{"kvs":5,"metadata":5,"Results":5,"Item":5,"header":{"revision":"x"}}'),
    _told(b'{"kvs":[{"value":"="}],"metadata":{"resourceVersion":"x"},"header":[]}'),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nx\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
]
_BY_HTTP = ("etcd-v3", "consul", "kubernetes", "dynamodb", "s3", "azure")
# A server's greeting, with which this client can log in.
_LINE = b'{"server_id":"a","version":"2.10.0","max_payload":%s}'
SAMPLES: dict[str, list[bytes]] = {
    "redis": [*_ANY, b":5\r\n", b"*1\r\n:5\r\n", b"*9\r\n" * 9, b"*-2\r\n", b":x\r\n", b"$x\r\n"],
    "zookeeper": [
        *_ANY, _framed(b"\xff"), *(_framed(bytes([at]) * 40) for at in (0, 127, 255, 1)),
    ],
    "postgres": [*_ANY, b"R\x00\x00\x00\x08\x00\x00\x00\x63", b"E\x00\x00\x00\x04", b"S", b"N"],
    "nats": [
        *_ANY,
        *(_info(it) for it in (b"", b"null", b"[]", b"5", b'"x"', b"{", b"\xff")),
        _info(b'{"connect_urls":5}'), _info(b'{"connect_urls":[5]}'), _info(b'{"nonce":5}'),
        _info(_LINE % b'"x"'), _info(_LINE % b"1") + b"PONG\r\nINFO []\r\n",
        _info(_LINE % b"9999") + b"PONG\r\nMSG x\r\n",
    ],
    **{it: [*_ANY, *_HTTP] for it in _BY_HTTP},
}  # fmt: skip
"""By store: what its server says at first, and to whatever it is asked."""


def reached(store: str, address: tuple[str, int]) -> tuple[str, dict[str, str]]:
    """Endpoint and options for a server at this address."""
    host, port = address
    url = f"http://{host}:{port}"
    if store == "s3":
        return "s3://bucket", {"url": url}
    if store == "azure":
        return "az://container", {"url": url, "account": "account"}
    return url if store in ("dynamodb", "kubernetes") else f"{host}:{port}", {}


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A server that hands each connection to ``serve``, in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                line = listener.accept()[0]
                threading.Thread(target=handle, args=(line,), daemon=True).start()

    def handle(line: socket.socket) -> None:
        with contextlib.suppress(OSError), line:
            serve(line)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def speaking(sample: bytes, greets: bool) -> contextlib.AbstractContextManager[tuple[str, int]]:
    """A server that says this at each request; ``greets``: and before the first."""

    def speak(line: socket.socket) -> None:
        if greets:
            line.sendall(sample)
        while line.recv(65536):
            line.sendall(sample)

    return serving(speak)


@contextlib.contextmanager
def silent(address: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """An address that answers nobody, as behind a firewall: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(address, backlog=0))
        for _ in range(8):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(server.getsockname())
        yield server.getsockname()
