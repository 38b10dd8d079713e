"""Compare the capabilities that a backend declares with its behaviour."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.testing.harness import Harness, Store, present, until
from rdzv_plugins.testing.proxy import Proxy
from rdzv_plugins.testing.threads import Background

# Round trips allowed while a waiter is parked: a renewed long poll, a session's ping.
PARKED_ROUND_TRIPS = 3
POLLS_PER_SECOND = 25

# How long a server may take to delete expired keys; DynamoDB takes days and is not tested.
SWEEP = 90.0


class CapabilityTests(Harness):
    def test_parked_waiter_is_quiet(
        self, through: KeyValueClient, proxy: Proxy, client: KeyValueClient
    ) -> None:
        waiter = Background(lambda: through.wait("key", None, 30))
        assert not waiter.done(0.5)
        before = proxy.round_trips
        assert not waiter.done(2)
        asked = proxy.round_trips - before
        client.put("key", b"one")
        assert present(waiter.result(5)).value == b"one"
        limit = PARKED_ROUND_TRIPS if through.capabilities.push else 2 * POLLS_PER_SECOND
        assert asked <= limit, f"{asked} round trips in 2 s of waiting"

    def test_batch_is_one_round_trip(self, through: KeyValueClient, proxy: Proxy) -> None:
        if not through.capabilities.batch:
            pytest.skip(f"{through.name} does not claim to batch")
        values = {f"key-{number}": b"value" for number in range(20)}

        def all_of_them() -> list[int]:
            counts = [proxy.round_trips]
            through.put_many(values)
            counts.append(proxy.round_trips)
            assert len(through.get_many(values)) == 20
            counts.append(proxy.round_trips)
            assert len(through.list("")) == 20
            counts.append(proxy.round_trips)
            return [after - before for before, after in pairwise(counts)]

        all_of_them()  # The first calls also open connections and load scripts.
        # A session's ping may come in between, but not in all three.
        counts = [all_of_them() for _ in range(3)]
        assert [min(each) for each in zip(*counts, strict=True)] == [1, 1, 1]

    def test_read_returns_the_latest_write(
        self, client: KeyValueClient, other: KeyValueClient
    ) -> None:
        if not client.capabilities.linearizable:
            pytest.skip(f"{client.name} does not claim to be linearizable")
        for number in range(100):
            value = b"%d" % number
            client.put("key", value)
            assert present(other.get("key")).value == value
            assert other.get_many(["key"])["key"].value == value
            assert other.list("")["key"].value == value

    def test_server_deletes_what_expired(
        self, store: Store, client: KeyValueClient, namespace: str
    ) -> None:
        if not client.capabilities.ttl:
            pytest.skip(f"{client.name} does not claim to delete what has expired")
        stored = store.stored
        if stored is None:
            pytest.skip("Store.stored is not given")
        client.put_many({"key": b"one", "other/key": b"two"})
        client.wait("key", None, 1)
        assert stored(namespace) > 0, "Store.stored does not see what is stored"
        client.expire(1)
        client.close()
        assert until(lambda: stored(namespace) == 0, SWEEP), f"{stored(namespace)} are left"
