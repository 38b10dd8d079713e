"""The suite's description of a store, and the fixtures of its tests."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pytest

from rdzv_plugins.kv import Entry, KeyValueClient
from rdzv_plugins.testing.proxy import Address, Proxy

__all__ = ["SLACK", "Harness", "Open", "OpenClient", "Restart", "Store", "present", "until"]

SLACK = 3.0
"""Seconds that a call may take beyond its deadline on a busy machine."""

Open = Callable[..., KeyValueClient]
"""The fixtures' form of `OpenClient`: ``open(namespace=None, request_timeout=5.0)``."""


class OpenClient(Protocol):
    """Connects to a namespace.

    ``address``: (host, port) to connect to in place of the store's own; None: the store's own.
    ``request_timeout``: seconds.
    """

    def __call__(
        self, namespace: str, *, address: Address | None, request_timeout: float
    ) -> KeyValueClient: ...


class Restart(Protocol):
    """Restarts the server at the same address, with its data or (``empty``) without."""

    def __call__(self, *, empty: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Store:
    """The suite's knowledge of a store.

    Attributes:
        open: connects a client.
        address: (host, port) of the server, for the proxy.
        restart: restarts the server.
        keeps: whether it has its data again then, unless it is to be empty.
        stored: how many records of a namespace the server holds, counted without the client.
        deadline_unit: of the suite's deadlines, and of its waits for what must not come, in
            seconds; less than 1 for a store that keeps fractions of a second and answers within
            microseconds.
        least_deadline: seconds; the store makes a shorter deadline as long.
        forks: ``open`` also works in a forked process, whose writes all clients see; False for a
            store within one process, and for a client library that survives no fork.
    """

    open: OpenClient
    address: Address | None = None
    restart: Restart | None = None
    keeps: bool = True
    stored: Callable[[str], int] | None = None
    deadline_unit: float = 1.0
    least_deadline: float = 0.0
    forks: bool = True


class Harness:
    """Fixtures; every client that a test opens is closed after it."""

    @pytest.fixture
    def namespace(self) -> str:
        return f"conformance/{secrets.token_hex(8)}"

    @pytest.fixture
    def open(self, store: Store, namespace: str) -> Iterator[Open]:
        """Connects a client straight to the store; by default to the test's namespace."""
        yield from _opener(store, namespace, None)

    @pytest.fixture
    def unit(self, store: Store) -> float:
        return store.deadline_unit

    @pytest.fixture
    def expiry_slack(self, store: Store) -> float:
        """As `SLACK`, of what expires."""
        return SLACK + store.least_deadline

    @pytest.fixture
    def client(self, open: Open) -> KeyValueClient:
        return open()

    @pytest.fixture
    def other(self, open: Open) -> KeyValueClient:
        """A second client of the same namespace."""
        return open()

    @pytest.fixture
    def proxy(self, store: Store) -> Iterator[Proxy]:
        assert store.address is not None, "NetworkConformance needs Store.address"
        with Proxy(store.address) as proxy:
            yield proxy

    @pytest.fixture
    def open_through(self, store: Store, namespace: str, proxy: Proxy) -> Iterator[Open]:
        """Connects a client through ``proxy``."""
        yield from _opener(store, namespace, proxy.address)

    @pytest.fixture
    def through(self, open_through: Open) -> KeyValueClient:
        """A client through ``proxy``."""
        return open_through()


def _opener(store: Store, namespace: str, address: Address | None) -> Iterator[Open]:
    clients: list[KeyValueClient] = []

    def connect(name: str | None = None, request_timeout: float = 5.0) -> KeyValueClient:
        client = store.open(name or namespace, address=address, request_timeout=request_timeout)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.close()


def present(entry: Entry | None) -> Entry:
    """The entry, which must be there."""
    assert entry is not None, "there is no entry"
    return entry


def until(condition: Callable[[], bool], timeout: float) -> bool:
    """Check every 20 ms, at least once; False after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True
