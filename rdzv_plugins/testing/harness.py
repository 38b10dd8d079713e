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

    ``address``: (host, port) to connect to; None: the store's own.
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
    """The store that the suite tests.

    Attributes:
        open: connects a client.
        address: (host, port) of the server, for the proxy.
        restart: restarts the server.
        keeps: whether the server keeps its data over a restart.
        stored: counts the records of a namespace in the server, without the client.
        deadline_unit: seconds; the unit of the suite's deadlines and waits. Less than 1 for a store
            with deadlines in fractions of a second that answers within microseconds.
        least_deadline: seconds; the store extends shorter deadlines.
        forks: whether ``open`` works in a forked process, and all clients see that process's
            writes; False for a store in one process, and for a client library that cannot fork.
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
    """Fixtures; they close the clients that a test opens."""

    @pytest.fixture
    def namespace(self) -> str:
        return f"conformance/{secrets.token_hex(8)}"

    @pytest.fixture
    def open(self, store: Store, namespace: str) -> Iterator[Open]:
        """Connects a client directly to the store; by default to the test's namespace."""
        yield from _opener(store, namespace, None)

    @pytest.fixture
    def unit(self, store: Store) -> float:
        return store.deadline_unit

    @pytest.fixture
    def expiry_slack(self, store: Store) -> float:
        """`SLACK` for deadlines."""
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
    """The entry, which must exist."""
    assert entry is not None, "there is no entry"
    return entry


def until(condition: Callable[[], bool], timeout: float) -> bool:
    """Check every 20 ms or, where a check takes longer, less often; False after ``timeout``."""
    began = time.monotonic()
    deadline = began + timeout
    while not condition():
        now = time.monotonic()
        if now >= deadline:
            return False
        # A check that runs a command leaves two thirds of a processor to what it waits for.
        time.sleep(min(max(0.02, 2 * (now - began)), 0.5))
        began = time.monotonic()
    return True
