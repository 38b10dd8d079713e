"""`KeyValueClient.wait` ends at every change of its key, and at no other change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import pytest

from rdzv_plugins.kv import Entry, KeyValueClient, Version
from rdzv_plugins.testing.harness import SLACK, Harness, Open, present, until
from rdzv_plugins.testing.threads import Background

WAKE = 0.1
"""Seconds within which a store that pushes wakes a waiter."""

POLLED_WAKE = 5.0

# How many units a waiter may take to park; if that is too few, the tests test less.
PARKING = 0.1

Write = Callable[[KeyValueClient, Entry], object]

WRITES: dict[str, Write] = {
    "put": lambda client, entry: client.put("key", b"%d" % time.monotonic_ns()),
    "compare_and_set": lambda client, entry: client.compare_and_set(
        "key", b"%d" % time.monotonic_ns(), entry.version
    ),
    "add": lambda client, entry: client.add("key", 1),
    "put_many": lambda client, entry: client.put_many(
        {"a": b"", "key": b"%d" % time.monotonic_ns()}
    ),
}


class Park(Protocol):
    """Starts a `wait` in the background, and returns once it is parked."""

    def __call__(
        self, client: KeyValueClient, version: Version | None, key: str = "key"
    ) -> Background[Entry | None]: ...


class WaitingTests(Harness):
    @pytest.fixture
    def park(self, unit: float) -> Park:
        def park(
            client: KeyValueClient, version: Version | None, key: str = "key"
        ) -> Background[Entry | None]:
            waiter = Background(lambda: client.wait(key, version, 30))
            assert not waiter.done(PARKING * unit), "the wait ended although nothing had happened"
            return waiter

        return park

    def test_existing_key_is_returned_at_once(self, client: KeyValueClient) -> None:
        first = client.put("key", b"one")
        second = client.put("key", b"two")
        begun = time.monotonic()
        for known in (None, first):
            entry = present(client.wait("key", known, 30))
            assert (entry.value, entry.version) == (b"two", second)
        assert time.monotonic() - begun < SLACK

    def test_zero_time_out_is_a_look(self, client: KeyValueClient) -> None:
        assert client.wait("key", None, 0) is None
        version = client.put("key", b"one")
        assert client.wait("key", None, 0) == client.get("key")
        assert client.wait("key", version, 0) is None

    @pytest.mark.parametrize("exists", [False, True])
    def test_time_out(self, client: KeyValueClient, exists: bool, unit: float) -> None:
        version = client.put("key", b"one") if exists else None
        begun = time.monotonic()
        assert client.wait("key", version, 0.5 * unit) is None
        assert 0.45 * unit < time.monotonic() - begun < 0.5 * unit + SLACK

    def test_created_key_wakes(
        self, client: KeyValueClient, other: KeyValueClient, park: Park
    ) -> None:
        waiter = park(client, None)
        version = other.put("key", b"one")
        assert waiter.result(POLLED_WAKE) == Entry(b"one", version)

    @pytest.mark.parametrize("kind", WRITES)
    def test_every_write_wakes_in_time(
        self, client: KeyValueClient, other: KeyValueClient, kind: str, park: Park
    ) -> None:
        client.add("key", 1)
        delays = []
        for _ in range(5):
            before = present(client.get("key"))
            waiter = park(client, before.version)
            WRITES[kind](other, before)
            written = time.monotonic()
            entry = waiter.result(POLLED_WAKE)
            delays.append(time.monotonic() - written)
            assert entry == other.get("key")
        limit = WAKE if client.capabilities.push else POLLED_WAKE
        assert statistics.median(delays) < limit, f"seconds: {delays}"

    def test_own_write_wakes_own_waiter(self, client: KeyValueClient, park: Park) -> None:
        waiter = park(client, client.put("key", b"one"))
        version = client.put("key", b"two")
        assert waiter.result(POLLED_WAKE) == Entry(b"two", version)

    def test_other_keys_do_not_wake(
        self, client: KeyValueClient, other: KeyValueClient, park: Park, unit: float
    ) -> None:
        waiter = park(client, client.put("key", b"one"))
        for key in ("k", "keys", "key/child", "KEY"):
            other.put(key, b"two")
            other.delete(key)
        assert not waiter.done(0.3 * unit)
        version = other.put("key", b"two")
        assert waiter.result(POLLED_WAKE) == Entry(b"two", version)

    def test_recreation_after_a_delete_wakes(
        self, client: KeyValueClient, other: KeyValueClient, park: Park, unit: float
    ) -> None:
        waiter = park(client, client.put("key", b"same"))
        other.delete("key")
        assert not waiter.done(PARKING * unit) or waiter.result(0) is None
        if waiter.done():
            waiter = park(client, None)
        version = other.put("key", b"same")
        assert waiter.result(POLLED_WAKE) == Entry(b"same", version)

    def test_waiters_of_several_clients_wake(self, open: Open, park: Park) -> None:
        clients = [open() for _ in range(5)]
        version = clients[0].put("key", b"one")
        waiters = [park(client, version) for client in clients]
        new = clients[0].put("key", b"two")
        assert [waiter.result(POLLED_WAKE) for waiter in waiters] == [Entry(b"two", new)] * 5

    def test_waiters_of_one_client_wake_each_for_its_key(
        self, client: KeyValueClient, other: KeyValueClient, park: Park
    ) -> None:
        waiters = {key: park(client, None, key) for key in ("a", "b", "c")}
        for key in ("b", "c", "a"):
            version = other.put(key, key.encode())
            assert waiters.pop(key).result(POLLED_WAKE) == Entry(key.encode(), version)
            assert not any(waiter.done() for waiter in waiters.values())

    def test_interrupt_wakes_every_waiter_and_nobody_elses(
        self, client: KeyValueClient, other: KeyValueClient, park: Park, unit: float
    ) -> None:
        mine = [park(client, None), park(client, None), park(client, None, "elsewhere")]
        others = park(other, None)
        client.interrupt()
        assert [waiter.result(1 + SLACK) for waiter in mine] == [None] * 3
        assert not others.done(PARKING * unit)
        version = client.put("key", b"one")
        assert others.result(POLLED_WAKE) == Entry(b"one", version)

    def test_interrupted_client_goes_on(
        self, client: KeyValueClient, other: KeyValueClient, park: Park
    ) -> None:
        for number in range(5):
            waiter = park(client, None, f"key-{number}")
            begun = time.monotonic()
            client.interrupt()
            assert waiter.result(1 + SLACK) is None
            assert time.monotonic() - begun < 1, "the interrupt was not prompt"
            waiter = park(client, None, f"key-{number}")
            version = other.put(f"key-{number}", b"one")
            assert waiter.result(POLLED_WAKE) == Entry(b"one", version)

    def test_interrupt_is_not_kept_for_later(
        self, client: KeyValueClient, park: Park, unit: float
    ) -> None:
        client.interrupt()
        waiter = park(client, None)
        client.interrupt()
        assert waiter.result(1 + SLACK) is None
        client.interrupt()
        begun = time.monotonic()
        assert client.wait("key", None, 0.5 * unit) is None
        assert time.monotonic() - begun > 0.45 * unit

    def test_close_wakes_every_waiter(self, client: KeyValueClient, park: Park) -> None:
        waiters = [park(client, None), park(client, None, "elsewhere")]
        begun = time.monotonic()
        client.close()
        assert [waiter.result(1 + SLACK) for waiter in waiters] == [None, None]
        assert time.monotonic() - begun < 1, "the close was not prompt"

    def test_nothing_is_missed_between_read_and_wait(
        self, client: KeyValueClient, other: KeyValueClient
    ) -> None:
        """Each side writes when it sees the other's write, so a missed write stops both."""
        rounds = 150

        def answer() -> None:
            version: Version | None = None
            for number in range(rounds):
                entry = present(other.wait("ping", version, 20))
                assert entry.value == b"%d" % number
                version = entry.version
                other.put("pong", entry.value)

        answering = Background(answer)
        version: Version | None = None
        for number in range(rounds):
            client.put("ping", b"%d" % number)
            entry = present(client.wait("pong", version, 20))
            assert entry.value == b"%d" % number
            version = entry.version
        answering.result(20)

    def test_last_of_a_burst_is_seen(self, client: KeyValueClient, other: KeyValueClient) -> None:
        last = b"199"

        def follow() -> int:
            wakes, version, value = 0, None, b""
            while value != last:
                entry = present(client.wait("key", version, 20))
                assert entry.version != version
                version, value = entry.version, entry.value
                wakes += 1
            return wakes

        following = Background(follow)
        for number in range(200):
            other.put("key", b"%d" % number)
        assert 1 <= following.result(20) <= 200

    def test_expired_namespace_does_not_wake(
        self, client: KeyValueClient, open: Open, park: Park, unit: float, expiry_slack: float
    ) -> None:
        version = client.put("key", b"old")
        client.expire(0.3 * unit)
        assert until(lambda: client.get("key") is None, expiry_slack)
        waiter = park(client, version)
        new = open().put("key", b"new")
        assert waiter.result(POLLED_WAKE) == Entry(b"new", new)
