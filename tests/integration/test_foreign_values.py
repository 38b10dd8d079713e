"""What another program has written among a run's keys, on real servers: it counts as absent.

Each value is written past the client's stamps, as whoever may write to the store can.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from rdzv_plugins.kv import RendezvousError, RendezvousStateError
from rdzv_plugins.kv.base import Limit
from rdzv_plugins.protocol.documents import STATE_KEY
from tests.integration.stores import RunningStore

VALUES = [
    b"x", b"no stamp at all", b"{}", b"12345678", b"\xff" * 20, b"5", b"0-0", b"7-x value",
    b"99999999999999999999999-1 x", b"1-99999999999999999999999 x", b"1-01 x", b"-1-1 x",
]  # fmt: skip


def _limit() -> Limit:
    return Limit(time.monotonic() + 10)


def _hash(client: Any, key: Any, data: bytes) -> None:
    field = b"=" + key if isinstance(key, bytes) else f"={key}"
    client._ask(_limit(), "HSET", client._hash, field, data)


def _item(client: Any, key: Any, data: bytes) -> None:
    shapes: list[dict[str, Any]] = [
        {"payload": {"B": data}},
        {"version_id": {"N": "5"}, "payload": {"S": "x"}},
        {"version_id": {"S": "0123456789abcdef"}},
        {"version_id": {"S": "0123456789abcdef"}, "tally": {"S": "x"}},
    ]
    item = {**client._key(key), **shapes[len(data) % len(shapes)]}
    client._table.ask(_limit(), "put_item", Item=item)


def _put(client: Any, key: Any, data: bytes) -> None:
    client._put({key: data}, _limit())


def _key_in_etcd(client: Any, key: bytes, data: bytes) -> None:
    whole = client._path.encode() + key
    body = {name: base64.b64encode(it).decode() for name, it in (("key", whole), ("value", data))}
    client._ask("kv/put", body, _limit())


def _key_in_postgres(client: Any, key: bytes, data: bytes) -> None:
    query = "INSERT INTO {table} VALUES (%(run)b, %(key)b, %(data)b, clock_timestamp())"
    client._ask(query, _limit(), key=key, data=data)


def _key_in_consul(client: Any, key: bytes, data: bytes) -> None:
    path = client._keys + "".join(f"%{byte:02X}" for byte in key) + "!"
    client._commit([client._operation("set", path, data)], _limit())
    # Nor is one without the sign at its end.
    client._commit([client._operation("set", client._keys + "cut", data)], _limit())


def _key_in_zookeeper(client: Any, key: bytes, data: bytes) -> None:
    from kazoo.protocol.serialization import Create

    name = "=" + "".join(f"%{byte:02X}" for byte in key)
    client._session.ask(_limit(), Create(f"{client._root}/{name}", data, client._acl, 0))


def _key_in_nats(client: Any, key: bytes, data: bytes) -> None:
    name = "".join(f"={byte:02X}" for byte in key)
    subject = f"{client._mark}./{client._known[0].epoch}.{name}"
    client._transport.run(client._publish(subject, data), _limit())


def _key_in_a_bucket(client: Any, key: bytes, data: bytes) -> None:
    name = "".join(f"%{byte:02X}" for byte in key)
    for path in (name, name.lower(), f"+{name}+", "+cut", "+/+"):
        client._api.put(client._store, f"{client._folder(_limit())}/{path}", data)


WRITES: dict[str, Callable[[Any, Any, bytes], None]] = {"redis": _hash, "dynamodb": _item}
KEYS: dict[str, Callable[[Any, bytes, bytes], None]] = {
    "redis": _hash,
    "etcd-v3": _key_in_etcd,
    "postgres": _key_in_postgres,
    "consul": _key_in_consul,
    "zookeeper": _key_in_zookeeper,
    "nats": _key_in_nats,
    "quorum": _key_in_nats,
    "s3": _key_in_a_bucket,
    "azure": _key_in_a_bucket,
}


def test_a_value_of_another_program_counts_as_absent(
    running_store: RunningStore, run_id: str
) -> None:
    write = WRITES.get(running_store.backend, _put)
    with closing(running_store.open(run_id)) as client:
        client.put("nodes/n1", b"ours")
        for data in VALUES:
            write(client, STATE_KEY, data)
            assert client.get(STATE_KEY) is None, data
            assert [*client.list("")] == ["nodes/n1"], data
            assert [*client.get_many(["nodes/n1", STATE_KEY])] == ["nodes/n1"]
            assert client.wait(STATE_KEY, None, 0.01) is None
            assert client.compare_and_set(STATE_KEY, b"no", "0123456789abcde0") == (None, False)
            entry, written = client.compare_and_set(STATE_KEY, data + b"ours", None)
            assert written, data
            assert client.get(STATE_KEY) == entry
            # Nor does what was there stand in the way of a plain write.
            write(client, STATE_KEY, data)
            version = client.put(STATE_KEY, b"ours")
            entry = client.get(STATE_KEY)
            assert entry is not None
            assert (entry.value, entry.version) == (b"ours", version)
        write(client, STATE_KEY, VALUES[0])
        assert client.compare_and_set(STATE_KEY, b"two", version) == (None, False)


@pytest.mark.parametrize("value", [b"x", b"", b"1" * 30, b"9223372036854775808", b" 1", b"1_0"])
def test_what_is_no_counter_of_64_bits_is_told(
    running_store: RunningStore, run_id: str, value: bytes
) -> None:
    with closing(running_store.open(run_id)) as client:
        client.put("count", value)
        with pytest.raises(RendezvousStateError, match="is not a counter"):
            client.add("count", 1)


def test_a_key_that_is_no_utf_8_costs_no_other(running_store: RunningStore, run_id: str) -> None:
    write = KEYS.get(running_store.backend)
    with closing(running_store.open(run_id)) as client:
        client.put("nodes/n1", b"ours")
        if write is None:
            assert running_store.backend == "dynamodb", "its keys are strings"
            return
        for key in (b"nodes/\xff\xfe", b"\xc3\x28"):
            write(client, key, b"12345678=x")
        for prefix in ("", "nodes/"):
            assert [*client.list(prefix)] == ["nodes/n1"]
        client.expire(0)
        assert client.list("") == {}


class TestRedis:
    """Keys of another type, counters that are none: the run goes on, or there is one plain line."""

    @pytest.mark.parametrize("store", ["redis"], indirect=True)
    def test_what_is_of_another_type(self, store: RunningStore, run_id: str) -> None:
        client: Any
        with closing(store.open(run_id)) as client:
            client.put(STATE_KEY, b"one")
            # The counter of writes.
            for number in ("x", "9223372036854775807", "-5", "9007199254740993", "1.5"):
                client._ask(_limit(), "HSET", client._hash, "#n", number)
                entry = client.get(STATE_KEY)
                version = client.put(STATE_KEY, b"two")
                assert entry is not None
                assert entry.version != version
                assert client.wait(STATE_KEY, entry.version, 5.0).value == b"two"
            # The stream of those who wait.
            entry = client.get(STATE_KEY)
            for command in (("SET", client._stream(STATE_KEY), "x"), ("SADD", "k", "x")):
                client._ask(_limit(), "DEL", client._stream(STATE_KEY))
                client._ask(_limit(), *command)
                assert client.wait(STATE_KEY, entry.version, 0.05) is None
            # The run itself.
            client._ask(_limit(), "DEL", client._hash)
            client._ask(_limit(), "SET", client._hash, "x")
            for request in (
                partial(client.get, STATE_KEY),
                partial(client.list, ""),
                partial(client.put, STATE_KEY, b"x"),
                partial(client.compare_and_set, STATE_KEY, b"x", None),
                partial(client.add, "count", 1),
            ):
                with pytest.raises(RendezvousError, match="another program has written") as told:
                    request()
                assert "\n" not in str(told.value)


def test_a_write_that_others_undo_again_and_again_ends(
    running_store: RunningStore, run_id: str
) -> None:
    """In time, and with few requests: `rdzv drain` sent 165,510 scripts in 45 s."""
    client: Any
    with closing(running_store.open(run_id, request_timeout=1.0)) as client:
        client.put(STATE_KEY, b"one")
        requests = 0
        if running_store.backend in ("redis", "dynamodb", "etcd-v3"):
            return  # One request writes, or tells what is there.

        def refuse(*_: object) -> bool:
            nonlocal requests
            requests += 1
            return False

        client._replace = refuse
        entry = client.get(STATE_KEY)
        with pytest.raises(RendezvousError):
            client.compare_and_set(STATE_KEY, b"two", entry.version)
        assert 3 < requests < 100
