"""A store's name is resolved while the resolver answers, and known while it does not."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rdzv_plugins.stores import _names
from rdzv_plugins.stores._names import look_up
from rdzv_plugins.stores._tls import unheard_alert
from tests.nonsense import serving

HOST, PORT = "store.test", 6379
# Far longer than any of this takes.
LONG = 60.0


class Resolver:
    """In place of the C library's: it says what the test wants, when it wants it."""

    def __init__(self) -> None:
        self.says: Any = "10.0.0.1"
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0
        self._real = socket.getaddrinfo

    def getaddrinfo(self, host: str, port: int, *arguments: Any, **options: Any) -> Any:
        if host != HOST or options.get("flags"):
            return self._real(host, port, *arguments, **options)
        self.asked += 1
        self.answers.wait(LONG)
        if isinstance(self.says, Exception):
            raise self.says
        return self._real(self.says, port, *arguments, **options)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    monkeypatch.setattr(_names, "_PATIENCE", LONG)
    for kept in ("_known", "_asked"):
        monkeypatch.setattr(_names, kept, {})
    yield made
    made.answers.set()


def addresses(seconds: float = LONG) -> list[str]:
    return [str(it[-1][0]) for it in look_up(HOST, PORT, seconds)]


def test_an_address_is_no_name(resolver: Resolver) -> None:
    assert look_up("127.0.0.1", PORT, 0)[0][-1] == ("127.0.0.1", PORT)
    assert resolver.asked == 0


@pytest.mark.parametrize("host", ["store..test", "x" * 64 + ".test"])
def test_what_cannot_be_a_name_is_not_known(host: str) -> None:
    with pytest.raises(socket.gaierror, match="not known"):
        look_up(host, PORT, LONG)


def test_the_newest_answer_counts(resolver: Resolver) -> None:
    assert addresses() == ["10.0.0.1"]
    resolver.says = "10.0.0.2"
    assert addresses() == ["10.0.0.2"]


def test_without_an_answer_the_last_one_counts_and_nobody_asks_twice(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses()
    resolver.answers.clear()
    monkeypatch.setattr(_names, "_PATIENCE", 0.05)
    began = time.monotonic()
    assert [addresses() for _ in range(3)] == [["10.0.0.1"]] * 3
    assert time.monotonic() - began < LONG / 2
    assert resolver.asked == 2
    resolver.says = "10.0.0.3"
    resolver.answers.set()
    deadline = time.monotonic() + LONG
    while addresses() != ["10.0.0.3"]:
        assert time.monotonic() < deadline


def test_a_name_that_was_never_known_is_waited_for_no_longer_than_told(resolver: Resolver) -> None:
    resolver.answers.clear()
    began = time.monotonic()
    with pytest.raises(socket.gaierror, match="name resolution"):
        addresses(0.1)
    assert time.monotonic() - began < LONG / 2


def test_an_alert_is_asked_for_at_the_last_address(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver.says = "127.0.0.1"
    dialled: list[bytes] = []
    with serving(lambda line: dialled.append(line.recv(1))) as (_, port):
        look_up(HOST, port, LONG)
        resolver.answers.clear()
        monkeypatch.setattr(_names, "_PATIENCE", 0.05)
        began = time.monotonic()
        assert unheard_alert(HOST, port, ssl.create_default_context()) is None
        assert time.monotonic() - began < LONG / 2
    assert dialled == [b"\x16"]


def test_a_resolver_that_is_away_is_no_refusal_and_one_that_knows_no_such_name_is(
    resolver: Resolver,
) -> None:
    addresses()
    resolver.says = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert addresses() == ["10.0.0.1"]
    resolver.says = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with pytest.raises(socket.gaierror, match="not known"):
        addresses()
