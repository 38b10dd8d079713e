"""An administrator deletes all that a store holds, while clients use it: they make it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import nats
import pytest
from kazoo.client import KazooClient

from rdzv_plugins.kv.base import Limit
from rdzv_plugins.testing.harness import SLACK, present
from rdzv_plugins.testing.threads import Background
from tests import Measure
from tests.integration.stores import RunningStore


def _limit() -> Limit:
    return Limit(time.monotonic() + 30)


def _of_redis(_: RunningStore, client: Any) -> None:
    client._ask(_limit(), "FLUSHALL")
    client._ask(_limit(), "SCRIPT", "FLUSH")


def _of_zookeeper(store: RunningStore, _: Any) -> None:
    admin: Any = KazooClient(store.endpoint)
    admin.start(10)
    admin.delete("/rdzv", recursive=True)
    admin.stop()
    admin.close()


def _of_etcd(_: RunningStore, client: Any) -> None:
    gone = client._ask("kv/deleterange", {"key": "AA==", "range_end": "AA=="}, _limit())
    client._ask("kv/compaction", {"revision": gone["header"]["revision"]}, _limit())


def _of_nats(store: RunningStore, _: Any) -> None:
    async def delete() -> None:
        connection = await nats.connect(f"nats://{store.endpoint}")
        await connection.jetstream().delete_stream("KV_rdzv")
        await connection.close()

    asyncio.run(delete())


def _of_a_bucket(_: RunningStore, client: Any) -> None:
    client._empty("", _limit())


WIPES: dict[str, Callable[[RunningStore, Any], object]] = {
    "redis": _of_redis,
    "zookeeper": _of_zookeeper,
    "dynamodb": lambda _, client: client._table.ask(_limit(), "delete_table"),
    "consul": lambda _, client: client._commit([client._operation("delete-tree", "")], _limit()),
    "etcd-v3": _of_etcd,
    "postgres": lambda _, client: client._ask("DROP TABLE {table}", _limit()),
    "nats": _of_nats,
    "kubernetes": lambda _, client: client._ask("DELETE", client._maps, _limit()),
    "s3": _of_a_bucket,
    "azure": _of_a_bucket,
}


def test_what_holds_the_data_is_made_again(
    running_store: RunningStore, run_id: str, record_property: Measure
) -> None:
    if running_store.backend == "quorum":
        pytest.skip("its members alone write there")
    requests: list[Callable[[Any], object]] = [
        lambda it: it.put("key", b"two"),
        lambda it: it.put_many({"key": b"two", "other": b"two", "third": b"two"}),
        lambda it: it.compare_and_set("key", b"two", None),
        lambda it: it.expire(600),
        lambda it: it.add("count", 1),
        lambda it: it.delete("key"),
        lambda it: it.get("key"),
        lambda it: it.list(""),
        lambda it: it.wait("key", None, 0.1),
    ]
    wipe = WIPES[running_store.backend]
    with closing(running_store.open(run_id)) as client, closing(running_store.open(run_id)) as peer:
        for request in requests:
            client.put_many(dict.fromkeys(("key", "other", "third"), b"one"))
            wipe(running_store, client)
            request(client)
            client.put("key", b"two")
            assert present(peer.get("key")).value == b"two"
        # The waiter has seen a number that is higher than the next one.
        version = present(peer.get("key")).version
        waiter = Background(lambda: peer.wait("key", version, 60))
        assert not waiter.done(0.3)
        wipe(running_store, client)
        client.put("key", b"three")
        peer.put("beat", b"three")
        began = time.monotonic()
        assert present(waiter.result(8 + SLACK)).value == b"three"
        record_property("told after, s", round(time.monotonic() - began, 2))
