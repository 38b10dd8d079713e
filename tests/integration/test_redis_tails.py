"""Redis: of a value that only ends otherwise than the last one, only the end is sent."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rdzv_plugins.kv import Entry, KeyValueClient, Version
from rdzv_plugins.protocol.documents import NodeRecord, Status
from rdzv_plugins.stores import redis as redis_store
from rdzv_plugins.testing import Proxy
from rdzv_plugins.testing.harness import SLACK
from rdzv_plugins.testing.threads import together
from tests import replace
from tests.integration.stores import RunningStore

HEAD = '{"addr":"node-17.example","pid":4711,"status":"run","in":"%s","every":5.0,"lease":15.0'
KEYS = st.sampled_from(["nodes/a", "nodes/b", "nodes/a\n"])
CLIENTS = st.integers(0, 2)
VALUES = st.builds(
    lambda head, looks, beat: f'{HEAD % head},{looks}"beat":{beat}}}'.encode(),
    st.sampled_from(["5f0c6a1b2d3e4f50", "0000000000000000"]),
    st.sampled_from(["", '"looks":7,', " \n\0"]),
    st.integers(0, 10**4),
)


@pytest.fixture
def clients(redis_server: RunningStore, run_id: str) -> Iterator[list[KeyValueClient]]:
    clients = [redis_server.open(run_id) for _ in range(3)]
    yield clients
    for client in clients:
        client.close()


def of_run(redis_admin: Any, run_id: str) -> bytes:
    (found,) = [it for it in redis_admin.scan_iter() if it.endswith(f"/{run_id}}}".encode())]
    return bytes(found)


def scripts(redis_admin: Any) -> int:
    calls = redis_admin.info("commandstats").get("cmdstat_evalsha", {"calls": 0})
    return int(calls["calls"])


def passed(redis_admin: Any) -> int:
    """Bytes from and to the server."""
    stats = redis_admin.info("stats")
    return int(stats["total_net_input_bytes"] + stats["total_net_output_bytes"])


class Machine(RuleBasedStateMachine):
    """Three clients of one run against a dict; the store also loses its last writes, or all."""

    clients: list[KeyValueClient]
    admin: Any

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, bytes] = {}
        self.versions: dict[str, Version] = {}
        self.meant: dict[Version, bytes] = {}
        self.saved: tuple[bytes, dict[str, bytes]] | None = None

    @initialize()
    def begin(self) -> None:
        self.clients[0].expire(0)
        self.clients[0].put("state", b"")
        self.hash = of_run(self.admin, "tails")

    def learn(self, key: str, entry: Entry | None) -> None:
        assert (entry.value if entry is not None else None) == self.held.get(key)
        if entry is not None:
            assert self.meant.setdefault(entry.version, entry.value) == entry.value
            self.versions[key] = entry.version

    @rule(client=CLIENTS, key=KEYS, value=VALUES, times=st.integers(1, 3))
    def put_many(self, client: int, key: str, value: bytes, times: int) -> None:
        for _ in range(times):
            self.held[key] = value = value[:-1] + b"1}"
            self.clients[client].put_many({key: value})

    @rule(client=CLIENTS, value=VALUES, other=VALUES)
    def put_two(self, client: int, value: bytes, other: bytes) -> None:
        values = {"nodes/a": value, "nodes/b": other}
        self.held |= values
        self.clients[client].put_many(values)

    @rule(client=CLIENTS, key=KEYS, value=VALUES)
    def put(self, client: int, key: str, value: bytes) -> None:
        version = self.clients[client].put(key, value)
        self.held[key] = value
        self.learn(key, Entry(value, version))

    @rule(client=CLIENTS, key=KEYS, value=VALUES)
    def compare_and_set(self, client: int, key: str, value: bytes) -> None:
        before = self.clients[client].get(key)
        self.learn(key, before)
        expected = before.version if before is not None else None
        entry, written = self.clients[client].compare_and_set(key, value, expected)
        assert written
        self.held[key] = value
        self.learn(key, entry)

    @rule(client=CLIENTS, key=KEYS)
    def delete(self, client: int, key: str) -> None:
        self.clients[client].delete(key)
        self.held.pop(key, None)

    @rule(client=CLIENTS, key=KEYS)
    def get(self, client: int, key: str) -> None:
        self.learn(key, self.clients[client].get(key))

    @rule(client=CLIENTS)
    def list_all(self, client: int) -> None:
        found = self.clients[client].list("nodes/")
        assert found.keys() == self.held.keys()
        for key, entry in found.items():
            self.learn(key, entry)

    @rule(client=CLIENTS, other=CLIENTS, key=KEYS, value=VALUES)
    def wait(self, client: int, other: int, key: str, value: bytes) -> None:
        before = self.clients[client].get(key)
        self.learn(key, before)
        if before is not None:
            self.held[key] = value
            self.clients[other].put_many({key: value})
            self.learn(key, self.clients[client].wait(key, before.version, SLACK))

    @rule()
    def save(self) -> None:
        dumped = self.admin.dump(self.hash)
        self.saved = (dumped, dict(self.held)) if dumped is not None else None

    @precondition(lambda self: self.saved is not None)
    @rule()
    def lose_the_last_writes(self) -> None:
        assert self.saved is not None
        dumped, self.held = self.saved[0], dict(self.saved[1])
        self.admin.restore(self.hash, 0, dumped, replace=True)

    @rule()
    def lose_all(self) -> None:
        self.admin.delete(self.hash)
        self.held.clear()
        self.saved = None


def test_every_client_reads_what_was_written_last(
    redis_server: RunningStore, redis_admin: Any
) -> None:
    clients = [redis_server.open("tails") for _ in range(3)]

    class OnTheServer(Machine):
        pass

    OnTheServer.clients, OnTheServer.admin = clients, redis_admin
    case = OnTheServer.TestCase
    case.settings = settings(
        max_examples=25, stateful_step_count=50, suppress_health_check=[*HealthCheck]
    )
    try:
        case().runTest()
    finally:
        for client in clients:
            client.close()


def beat(number: int, looks: int = 0) -> bytes:
    shown = f'"looks":{looks},' if looks else ""
    return f'{HEAD % "5f0c6a1b2d3e4f50"},{shown}"beat":{number}}}'.encode()


def test_a_heartbeat_sends_its_number_and_little_else(
    clients: list[KeyValueClient], redis_admin: Any
) -> None:
    node, leader, follower = clients

    def steps(whole: bool) -> int:
        before = passed(redis_admin)
        for number in range(100, 120):
            if whole:
                node.delete("nodes/n")
            node.put_many({"nodes/n": beat(number)})
            assert leader.list("nodes/")["nodes/n"].value == beat(number)
            seen = follower.get("nodes/n")
            assert seen is not None
            assert seen.value == beat(number)
        return passed(redis_admin) - before

    steps(whole=False)  # The scripts are known to the server by now.
    deletes = len(beat(100))  # More than the requests that delete a key take.
    tails, wholes = steps(whole=False), steps(whole=True) - 20 * 2 * deletes
    assert tails < wholes - 20 * 2 * len(HEAD), (tails, wholes)


def test_a_client_that_was_overtaken_sends_all(
    clients: list[KeyValueClient], redis_admin: Any
) -> None:
    node, other, reader = clients
    node.put_many({"nodes/n": beat(1)})
    node.put_many({"nodes/n": beat(2)})
    assert reader.get("nodes/n") == other.get("nodes/n")
    strange = beat(3).replace(b"run", b"left")
    other.put_many({"nodes/n": strange})
    assert reader.list("nodes/")["nodes/n"].value == strange
    node.put_many({"nodes/n": beat(4)})
    before = scripts(redis_admin)
    node.put_many({"nodes/n": beat(5)})
    assert scripts(redis_admin) == before + 1
    for entry in (reader.get("nodes/n"), reader.list("nodes/")["nodes/n"], other.get("nodes/n")):
        assert entry is not None
        assert entry.value == beat(5)


def test_a_lost_answer_and_forgotten_scripts_lose_nothing(
    redis_server: RunningStore, redis_admin: Any, run_id: str, clients: list[KeyValueClient]
) -> None:
    reader = clients[0]
    with Proxy(redis_server.address) as proxy:
        node = redis_server.open(run_id, address=proxy.address)
        for number in range(30):
            if number % 3 == 1:
                proxy.cut_answer()
            elif number % 10 == 5:
                redis_admin.script_flush()
            node.put_many({"nodes/n": beat(number)})
            assert number % 3 != 1 or proxy.answer_was_cut
            for entry in (reader.get("nodes/n"), reader.list("nodes/")["nodes/n"]):
                assert entry is not None
                assert entry.value == beat(number)
        node.close()


def test_a_chain_of_tails_ends_before_its_count_does(
    clients: list[KeyValueClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_COUNTED", 4)
    node, reader, lister = clients
    chains = set()
    for number in range(12):
        node.put_many({"nodes/n": beat(number)})
        seen, listed = reader.get("nodes/n"), lister.list("nodes/")["nodes/n"]
        assert seen == listed
        assert seen is not None
        assert seen.value == beat(number)
        chains.add(str(seen.version)[: redis_store._SHARED_DIGITS])
    assert 3 <= len(chains) < 12


def test_readers_see_each_value_whole_while_it_changes(clients: list[KeyValueClient]) -> None:
    node, leader, follower = clients
    chance = random.Random(secrets.randbits(64))
    last = 400
    written: set[bytes] = set()
    done: list[bool] = []

    def write() -> None:
        for number in range(last):
            head = b"done" if chance.random() < 0.1 else b"run"
            value = beat(number, looks=number).replace(b"run", head)
            written.add(value)
            node.put_many({"nodes/n": value})
            if chance.random() < 0.05:
                node.put_many({"nodes/n": value, "bell": b"n"})
        done.append(True)

    def look(client: KeyValueClient, lists: bool) -> None:
        known: dict[Version, bytes] = {}
        while not done:
            entry = client.list("nodes/").get("nodes/n") if lists else client.get("nodes/n")
            if entry is not None:
                assert entry.value in written
                assert known.setdefault(entry.version, entry.value) == entry.value

    together([write, lambda: look(leader, True), lambda: look(follower, False)])


def test_a_nodes_own_record_sends_its_time_in_few_bytes(
    clients: list[KeyValueClient], redis_admin: Any
) -> None:
    node, leader, _ = clients
    record = NodeRecord(
        address="node-17.example", pid=4711, beat=100, status=Status.RUN, round=12, min_nodes=2,
        max_nodes=64, interval=5.0, lease=15.0, incarnation="5f0c6a1b2d3e4f50", rank=17,
        world_id="12-5f0c6a1b2d3e4f50", at=1_790_000_000,
    )  # fmt: skip

    def beats(timed: bool) -> int:
        for number in range(40):
            if number == 20:  # The first ones are sent, and read, whole.
                before = passed(redis_admin)
            at = record.at + 5 * number if timed else 0
            value = replace(record, beat=record.beat + number, at=at).encode()
            node.put_many({"nodes/n": value})
            assert leader.list("nodes/")["nodes/n"].value == value
        return (passed(redis_admin) - before) // 20

    beats(timed=False)
    without, with_time = beats(timed=False), beats(timed=True)
    # Written, kept and read: three times its ten digits, and what stands before the number.
    assert with_time - without < 80, (with_time, without)
