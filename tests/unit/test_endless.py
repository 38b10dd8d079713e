"""Servers that send without end cost no store's client more than its time, and bounded memory.

`test_http.py` has what our own client of HTTP does with them.
"""

from __future__ import annotations

import asyncio

import pytest

from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.stores import open_client
from rdzv_plugins.stores.nats import _Connection
from rdzv_plugins.testing.threads import Background
from tests.nonsense import serving
from tests.unit.test_http import CHUNKED, LONG, MEBIBYTE, endlessly

# For each store: what is sent once, what is sent without end, and what the error says.
ENDLESS = {
    "redis, a value": ("redis", b"$99999999999\r\n", MEBIBYTE, "more than 256 MiB|in time"),
    "redis, a line": ("redis", b"+", b"x", "no answer in time"),
    "zookeeper": ("zookeeper", b"\x7f\xff\xff\xff", MEBIBYTE, "its answer has more than 64 MiB"),
    "dynamodb, 100": ("dynamodb", b"", b"HTTP/1.1 100 Continue\r\n\r\n", "Read timeout"),
    "dynamodb, a body": ("dynamodb", LONG, MEBIBYTE, "before we received a valid response|Read"),
    "dynamodb, a chunk": (
        "dynamodb", CHUNKED + b"fffffffffff\r\n", MEBIBYTE, "before we received|Read timeout",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("backend", "once", "again", "says"), ENDLESS.values(), ids=ENDLESS)
def test_a_server_without_end_is_left(
    backend: str, once: bytes, again: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Redis and DynamoDB a request never ended, at 3 GiB after 20 s."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "a-1")
    with serving(endlessly(once, again)) as (host, port):
        endpoint = f"{'http://' if backend == 'dynamodb' else ''}{host}:{port}"
        opening = Background(lambda: open_client(backend, endpoint, "run", request_timeout=1.0))
        assert opening.done(30)
        with pytest.raises(RendezvousConnectionError, match=says):
            opening.result(0)


def test_a_message_of_nats_without_end_breaks_the_connection() -> None:
    async def read() -> None:
        parser = _Connection()._ps
        await parser.parse(b"MSG a 1 99999999999\r\n")
        for _ in range(65):
            await parser.parse(MEBIBYTE)

    with pytest.raises(OSError, match="its answer has more than 64 MiB"):
        asyncio.run(read())
