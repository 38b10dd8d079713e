"""What another program has written among a run's keys, on real servers: it counts as absent.

Each value is written past the client's stamps, as whoever may write to the store can.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.kv import RendezvousError, RendezvousStateError
from rdzv_plugins.kv.base import Limit
from rdzv_plugins.kv.epochs import MARK
from rdzv_plugins.protocol.documents import STATE_KEY
from rdzv_plugins.testing.harness import until
from tests import servers
from tests.integration.agents import Run, one_world
from tests.integration.agents import until as until_so
from tests.integration.stores import RunningStore

VALUES = [
    b"", b"x", b"no stamp at all", b"{}", b"12345678", b"\xff" * 20, b"5", b"0-0", b"7-x value",
    b"99999999999999999999999-1 x", b"1-99999999999999999999999 x", b"1-01 x", b"-1-1 x",
]  # fmt: skip


MARKS = [
    b"x", b"", b"12345678=[]", b'12345678={"name": 0, "lasts": "x"}',
    b'12345678={"name": "../>"}', b'12345678={"name": "ab\\n"}',
    b'12345678={"name": "0", "lasts": 1e400}',
]  # fmt: skip


def _limit() -> Limit:
    return Limit(time.monotonic() + 10)


def _hash(client: Any, key: Any, data: bytes) -> None:
    field = b"=" + key if isinstance(key, bytes) else f"={key}"
    client._ask(_limit(), "HSET", client._hash, field, data)


def _item(client: Any, key: Any, data: bytes) -> None:
    ours = {"version_id": {"S": "0123456789abcdef"}, "payload": {"B": b"x"}}
    shapes: list[dict[str, Any]] = [
        {**ours, "expires_at": {"S": "x"}},
        {**ours, "expires_at": {"N": "1.5"}},
        {**ours, "expiry_set": {"N": "1e120"}},
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
    whole = (client._path + client._living(_limit()).path("")).encode() + key
    body = {name: base64.b64encode(it).decode() for name, it in (("key", whole), ("value", data))}
    client._ask("kv/put", body, _limit())


def _key_in_postgres(client: Any, key: bytes, data: bytes) -> None:
    query = "INSERT INTO {table} VALUES (%(run)b, %(key)b, %(data)b, clock_timestamp())"
    client._ask(query, _limit(), key=key, data=data)


def _key_in_consul(client: Any, key: bytes, data: bytes) -> None:
    epoch = client._living(_limit()).epoch.name
    path = f"{client._keys}{epoch}%2F" + "".join(f"%{byte:02X}" for byte in key) + "!"
    client._commit([client._operation("set", path, data)], _limit())
    # A key without the sign at its end is not one of ours either.
    client._commit([client._operation("set", client._keys + "cut", data)], _limit())


def _key_in_zookeeper(client: Any, key: bytes, data: bytes) -> None:
    from kazoo.protocol.serialization import Create

    name = "=" + "".join(f"%{byte:02X}" for byte in key)
    client._session.ask(_limit(), Create(f"{client._root}/{name}", data, client._acl, 0))


def _key_in_nats(client: Any, key: bytes, data: bytes) -> None:
    name = "".join(f"={byte:02X}" for byte in key)
    subject = f"{client._mark}./{client._living(_limit()).epoch.name}.{name}"
    client._transport.run(client._publish(subject, data), _limit())


def _key_in_a_quorum(client: Any, key: bytes, data: bytes) -> None:
    # Its keys are text, as msgpack has it.
    register = client._key(client._living(_limit()).path(key.decode("latin-1")))
    client._registers.change(register, lambda _: data, _limit())


def _key_in_a_bucket(client: Any, key: bytes, data: bytes) -> None:
    name = "".join(f"%{byte:02X}" for byte in key)
    for path in (name, name.lower(), f"+{name}+", "+cut", "+/+"):
        client._api.put(
            client._store, f"{client._name(client._living(_limit()).epoch.name)}/{path}", data
        )


WRITES: dict[str, Callable[[Any, Any, bytes], None]] = {"redis": _hash, "dynamodb": _item}
KEYS: dict[str, Callable[[Any, bytes, bytes], None]] = {
    "redis": _hash,
    "etcd-v3": _key_in_etcd,
    "postgres": _key_in_postgres,
    "consul": _key_in_consul,
    "zookeeper": _key_in_zookeeper,
    "nats": _key_in_nats,
    "quorum": _key_in_a_quorum,
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
            # What was there does not stand in the way of a plain write either.
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
            assert running_store.backend in ("dynamodb", "kubernetes"), "their keys are strings"
            return
        for key in (b"nodes/\xff\xfe", b"\xc3\x28"):
            write(client, key, b"12345678=x")
        for prefix in ("", "nodes/"):
            assert [*client.list(prefix)] == ["nodes/n1"]
        client.expire(0)
        assert client.list("") == {}


BESIDE: dict[str, Callable[[Any], list[Callable[[], object]]]] = {}
"""By backend, what one write past the client can do beside the values of a run's keys."""


def _beside(*backends: str) -> Callable[[Any], Any]:
    def note(writes: Any) -> Any:
        BESIDE.update(dict.fromkeys(backends, writes))
        return writes

    return note


@_beside("redis")
def _of_redis(client: Any) -> list[Callable[[], object]]:
    def instead(*command: str) -> None:
        client._ask(_limit(), "DEL", client._hash)
        client._ask(_limit(), *command)

    return [
        partial(instead, "SET", client._hash, "x"),
        partial(instead, "SADD", client._hash, "x"),
        partial(client._ask, _limit(), "HSET", client._hash, "#n", "x", "#e", "x", "#t", "x"),
    ]


@_beside("zookeeper")
def _of_zookeeper(client: Any) -> list[Callable[[], object]]:
    from kazoo.exceptions import NodeExistsError, NoNodeError
    from kazoo.protocol.serialization import Create, Delete, SetData

    def ask(request: Any) -> None:
        # The run's nodes may have mended it meanwhile.
        with suppress(NodeExistsError, NoNodeError):
            client._session.ask(_limit(), request)

    def below(*names: str) -> None:
        for name in names:
            ask(Create(f"{client._root}/{name}", b"x", client._acl, 0))

    def ephemeral() -> None:
        client.expire(0)
        ask(Create(client._root, b"0123456789abcdef", client._acl, 1))

    return [
        partial(ask, SetData(client._root, b"\xff/../x 12", -1)),
        partial(ask, SetData(client._root, None, -1)),
        partial(ask, SetData(client._path(STATE_KEY), None, -1)),
        partial(below, "=state/x", "=state/x/y", "!junk", "!junk/x", "=nodes%2fn1"),
        lambda: ask(Delete(client._run.guard, -1)),
        ephemeral,
    ]


@_beside("dynamodb")
def _of_dynamodb(client: Any) -> list[Callable[[], object]]:
    ours = {"version_id": {"S": "0123456789abcdef"}, "payload": {"B": b"x"}}
    tally = {"version_id": {"S": "0123456789abcdef"}, "tally": {"S": "x"}}
    items: dict[str, dict[str, Any]] = {
        STATE_KEY: {**ours, "expires_at": {"N": "9" * 30}, "expiry_set": {"N": "1e120"}},
        "nodes/n1": {**ours, "expires_at": {"S": "x"}, "expiry_set": {"S": "x"}},
        "count": tally,
    }

    def put(key: str) -> None:
        client._table.ask(_limit(), "put_item", Item={**client._key(key), **items[key]})

    return [partial(put, key) for key in items]


@_beside("consul")
def _of_consul(client: Any) -> list[Callable[[], object]]:
    mark, keys = client._mark, client._keys
    places = {f"{mark}x": b"1", f"{mark[:-1]}/y!": b"1", f"{keys}nodes%2fn1!": b""}

    def put(path: str, data: bytes) -> None:
        client._commit([client._operation("set", path, data)], _limit())

    marks = (partial(put, mark, data) for data in MARKS)
    return [*marks, *(partial(put, path, data) for path, data in places.items())]


@_beside("etcd-v3")
def _of_etcd(client: Any) -> list[Callable[[], object]]:
    def put(data: bytes) -> None:
        value = {"value": base64.b64encode(data).decode()}
        client._ask("kv/put", {**client._one(MARK), **value}, _limit())

    return [partial(put, data) for data in MARKS]


@_beside("postgres")
def _of_postgres(client: Any) -> list[Callable[[], object]]:
    query = (
        "INSERT INTO {table} VALUES (%(run)b, %(key)b, 'x', %(time)s) ON CONFLICT (run, key) "
        "DO UPDATE SET data = excluded.data, time = excluded.time"
    )
    return [
        partial(client._ask, query, _limit(), key=key, time=time)
        for key in (b"", b"nodes/n1")
        for time in ("infinity", "-infinity", "0044-03-15 BC")
    ]


@_beside("quorum")
def _of_quorum(client: Any) -> list[Callable[[], object]]:
    def put(register: str, data: bytes) -> None:
        client._registers.change(register, lambda _: data, _limit())

    marks = [b"x", b"", b"\xff" * 40, b"\x93\xa2ab\xa1x\xc0"]
    values = [b"", b"\xff", b"\x01short"]
    writes = [partial(put, client._key(MARK), data) for data in marks]
    state = client._key(client._living(_limit()).path(STATE_KEY))
    return [*writes, *(partial(put, state, data) for data in values)]


@_beside("nats")
def _of_nats(client: Any) -> list[Callable[[], object]]:
    def put(subject: str, data: bytes) -> None:
        client._transport.run(client._publish(subject, data), _limit())

    writes = [partial(put, client._mark, data) for data in MARKS]
    epoch = client._living(_limit()).epoch.name
    return [*writes, lambda: put(f"{client._mark}./{epoch}.nodes.=6E1", b"x")]


@_beside("kubernetes")
def _of_kubernetes(client: Any) -> list[Callable[[], object]]:
    def put(name: str, **more: Any) -> None:
        metadata = {"name": name, "labels": client._labels | more.pop("labels", {})}
        metadata["annotations"] = {"rdzv-plugins/key": client._living(_limit()).path("nodes/n1")}
        client._remove(name, _limit())
        client._create({"metadata": metadata, **more}, _limit())

    mark, labels = client._run, {"rdzv-plugins/part": "mark"}
    node = client._name_of(client._living(_limit()).path("nodes/n1"))
    return [
        *(partial(put, mark, labels=labels, binaryData={"value": it}) for it in MARKS),
        partial(put, mark, labels=labels, binaryData={"value": MARKS[0]}, immutable=True),
        partial(put, node, immutable=True),
        partial(put, f"{mark}-zzz", labels={"rdzv-plugins/part": "of.nodes"}),
    ]


@_beside("s3", "azure")
def _of_buckets(client: Any) -> list[Callable[[], object]]:
    def put(path: str, data: bytes) -> None:
        client._api.put(client._store, path, data, use_multipart=False)

    def unlistable() -> None:
        # obstore can write no such name; SeaweedFS makes one of what it is given.
        if client.name == "azure":
            port = int(client.where.partition("127.0.0.1:")[2].partition("/")[0])
            path = f"rdzv/{quote(client._name(client._living(_limit()).epoch.name))}//x"
            assert servers.azure.put(port, path, **{"x-ms-blob-type": "BlockBlob"})[0] == 201

    return [
        *(partial(put, client._name(MARK), data) for data in MARKS),
        lambda: put(
            f"{client._name(client._living(_limit()).epoch.name)}/nodes/n1", bytes((4 << 20) + 10)
        ),
        unlistable,
    ]


def test_one_write_beside_the_values_costs_no_more_than_a_deletion(
    running_store: RunningStore, run_id: str
) -> None:
    """The run is as if it were deleted, at most: nothing is refused, and what is written stays."""
    client: Any
    seconds = 15.0 if running_store.backend == "kubernetes" else 5.0
    with closing(running_store.open(run_id)) as client:
        for at in range(len(BESIDE[running_store.backend](client))):
            for ending in (60, 0):
                client.put_many({STATE_KEY: b"one", "nodes/n1": b"one", "count": b"1"})
                client.expire(600)
                BESIDE[running_store.backend](client)[at]()
                with closing(running_store.open(run_id)) as newcomer:
                    for each in (client, newcomer):
                        each.list("")
                        each.wait(STATE_KEY, None, 0.01)
                        each.get_many([STATE_KEY, "nodes/n1"])
                    assert until(partial(_is_shared, newcomer, client), seconds), at
                    assert newcomer.add("count", 1) in (1, 2), at
                    with closing(running_store.open(f"{run_id}-neighbour")) as neighbour:
                        neighbour.expire(60)
                    newcomer.expire(ending)
                    assert until(partial(_has, client, 3 if ending else 0), seconds), at
                    client.expire(0)


def _has(client: Any, keys: int) -> bool:
    return len(client.list("")) == keys


def _is_shared(one: Any, other: Any) -> bool:
    """Whether each reads and lists what the other writes."""
    version = one.put("nodes/n1", b"two")
    state = other.put(STATE_KEY, b"two")
    return all(
        {key: it.version for key, it in found.items() if key != "count"}
        == {"nodes/n1": version, STATE_KEY: state}
        for it in (one, other)
        for found in (it.list(""), it.get_many(["nodes/n1", STATE_KEY]))
    )


def test_a_run_goes_on_and_can_be_cleaned_after_such_a_write(
    running_store: RunningStore, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a secret, of which the writer knows nothing; a newcomer joins, `rdzv clean` cleans."""
    client: Any = running_store.open(run_id)
    # A quorum's members let nobody in who does not know it.
    if running_store.backend != "quorum":
        monkeypatch.setenv("RDZV_PLUGINS_SECRET", "of the run")
    with closing(client), Run(running_store, run_id) as run:
        agents = [run.start((2, 4)) for _ in range(2)]
        until_so(one_world(agents), 30)
        for write in BESIDE[running_store.backend](client):
            client.list("")
            write()
        agents.append(run.start((2, 4)))
        until_so(one_world(agents), 60)
        BESIDE[running_store.backend](client)[0]()
        command = ["clean", "-b", running_store.backend, "-e", running_store.endpoint, "--force"]
        conf = ",".join(f"{name}={value}" for name, value in running_store.config.items())
        # Until a node writes again, nothing is stored: the write may come before the first history.
        until_so(lambda: bool(client.list("")), 10)
        told = CliRunner().invoke(app, [*command, "-c", conf, run_id])
        assert told.exit_code == 0, told.output


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
