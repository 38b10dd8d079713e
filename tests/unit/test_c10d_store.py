"""The c10d store over the in-memory reference; over real servers in test_c10d_store.py."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from rdzv_plugins.kv import Capabilities, Entry, MemoryClient, MemoryServer, Version
from rdzv_plugins.torch.c10d_store import KeyValueStore

SHORT = timedelta(milliseconds=50)


@pytest.fixture
def client() -> MemoryClient:
    return MemoryClient(MemoryServer(), "run")


@pytest.fixture
def bare(client: MemoryClient) -> KeyValueStore:
    return KeyValueStore(client, "store/0/", timeout=timedelta(seconds=10))


@pytest.fixture(params=["direct", "prefix", "prefix of prefix"])
def store(bare: KeyValueStore, request: pytest.FixtureRequest) -> Iterator[Any]:
    # `bare` outlives the PrefixStore, which does not keep it alive.
    wrapped: dict[str, Callable[[], Any]] = {
        "direct": lambda: bare,
        "prefix": lambda: PrefixStore("p", bare),
        "prefix of prefix": lambda: PrefixStore("q", PrefixStore("p", bare)),
    }
    yield wrapped[request.param]()
    assert bare is not None


@pytest.fixture(scope="module")
def tcp() -> TCPStore:
    # One for all: each looks up its client's name, and some resolvers take seconds for that.
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_set_and_get(store: Any) -> None:
    store.set("text", "é")
    store.set("binary", b"\x00\xff")
    store.set("empty", "")
    assert store.get("text") == "é".encode()
    assert store.get("binary") == b"\x00\xff"
    assert store.get("empty") == b""


@pytest.mark.parametrize("key", ["/", "//a", "a/", "a//b", "a b", "é", "a:b{c}"])
def test_keys_of_any_shape(store: Any, key: str) -> None:
    store.set(key, "x")
    assert store.get(key) == b"x"
    assert store.delete_key(key)
    assert not store.check([key])


def test_get_waits_for_the_key(store: Any, bare: KeyValueStore) -> None:
    timer = threading.Timer(0.05, lambda: store.set("late", "x"))
    timer.daemon = True
    timer.start()
    assert store.get("late") == b"x"


def test_a_get_that_times_out_names_the_key(store: Any) -> None:
    store.set_timeout(SHORT)
    start = time.monotonic()
    with pytest.raises(DistStoreError, match=r"wait timeout after 0\.05 s, keys: .*absent"):
        store.get("absent")
    assert 0.05 <= time.monotonic() - start < 5


def test_set_timeout_is_read_at_each_call(store: Any, bare: KeyValueStore) -> None:
    assert store.timeout == timedelta(seconds=10)
    store.set_timeout(SHORT)
    assert bare.timeout == SHORT  # type: ignore[attr-defined]
    with pytest.raises(DistStoreError):
        store.wait(["absent"])


def test_wait(store: Any) -> None:
    store.wait([])
    store.set("a", "x")
    store.wait(["a", "a"])
    with pytest.raises(DistStoreError, match="b"):
        store.wait(["a", "b"], SHORT)
    timer = threading.Timer(0.05, lambda: store.set("b", "x"))
    timer.daemon = True
    timer.start()
    store.wait(["a", "b"], timedelta(seconds=10))


def test_a_wait_outlives_interrupts_of_the_client(store: Any, client: MemoryClient) -> None:
    done = threading.Event()

    def waiter() -> None:
        store.wait(["key"], timedelta(seconds=10))
        done.set()

    thread = threading.Thread(target=waiter, daemon=True)
    thread.start()
    deadline = time.monotonic() + 0.1
    while time.monotonic() < deadline:
        client.interrupt()
    assert not done.is_set()
    store.set("key", "x")
    assert done.wait(10)


def test_a_wait_on_a_closed_client_ends(store: Any, client: MemoryClient) -> None:
    timer = threading.Timer(0.05, client.close)
    timer.daemon = True
    timer.start()
    with pytest.raises(DistNetworkError, match="closed"):
        store.wait(["key"], timedelta(seconds=60))


def test_a_long_list_of_missing_keys_is_cut_short(bare: KeyValueStore) -> None:
    with pytest.raises(DistStoreError, match=r"keys: k0, k1, k2, k3, k4 and 95 more$"):
        bare.wait([f"k{n}" for n in range(100)], SHORT)


def test_add_counts_and_is_readable_as_text(store: Any) -> None:
    assert store.add("count", 5) == 5
    assert store.add("count", -7) == -2
    assert store.add("count", 0) == -2
    assert store.get("count") == b"-2"
    store.set("text", "x")
    with pytest.raises(DistStoreError, match="not a counter"):
        store.add("text", 1)


def test_check(store: Any) -> None:
    assert store.check([])
    store.set("a", "")
    store.set("b", "x")
    assert store.check(["a", "b", "a"])
    assert not store.check(["a", "absent"])


@pytest.mark.parametrize(
    ("held", "expected", "returned", "afterwards"),
    [
        (None, "", b"new", b"new"),
        (None, "old", b"old", None),
        ("old", "old", b"new", b"new"),
        ("old", "other", b"old", b"old"),
        ("old", "", b"old", b"old"),
        ("", "", b"new", b"new"),
    ],
)
@pytest.mark.parametrize("kind", ["ours", "tcp"])
def test_compare_set_is_c10ds(
    bare: KeyValueStore,
    tcp: TCPStore,
    kind: str,
    held: str | None,
    expected: str,
    returned: bytes,
    afterwards: bytes | None,
) -> None:
    # Each case has its own keys in the one TCPStore.
    store: Any = PrefixStore(f"{held}/{expected}", bare if kind == "ours" else tcp)
    if held is not None:
        store.set("key", held)
    assert store.compare_set("key", expected, "new") == returned
    assert store.check(["key"]) == (afterwards is not None)
    if afterwards is not None:
        assert store.get("key") == afterwards


def test_concurrent_writers_lose_nothing(store: Any) -> None:
    def write(name: str) -> None:
        for number in range(50):
            mark, seen = f"{name}{number};".encode(), b""
            # c10d returns the desired value to its writer, and the current one to the others.
            while (now := store.compare_set("marks", seen, seen + mark)) != seen + mark:
                seen = now
            store.append("log", "x")

    threads = [threading.Thread(target=write, args=(name,), daemon=True) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    marks = [f"{name}{number}" for name in "abcd" for number in range(50)]
    assert sorted(store.get("marks").decode().split(";")[:-1]) == sorted(marks)
    assert store.get("log") == b"x" * 200


def test_append(store: Any) -> None:
    store.append("key", "a")
    store.append("key", b"\xff")
    assert store.get("key") == b"a\xff"


def test_multi_set_and_multi_get_keep_the_order(store: Any) -> None:
    store.multi_set(["a", "b", "c"], ["1", b"\xff", ""])
    assert store.multi_get(["c", "a", "b", "a"]) == [b"", b"1", b"\xff", b"1"]
    assert store.multi_get([]) == []


def test_multi_set_of_unequal_lists_is_refused(bare: KeyValueStore) -> None:
    with pytest.raises(ValueError, match="2 keys but 1 values"):
        bare.multi_set(["a", "b"], ["1"])


def test_multi_get_waits_for_keys_in_any_order(store: Any) -> None:
    keys = [f"key{n}" for n in range(20)]
    shuffled = random.Random(7).sample(keys, len(keys))

    def write() -> None:
        for key in shuffled:
            store.set(key, key)

    timer = threading.Timer(0.02, write)
    timer.daemon = True
    timer.start()
    assert store.multi_get(keys) == [key.encode() for key in keys]


def test_delete_key_says_whether_it_was_there(store: Any) -> None:
    store.set("key", "x")
    assert store.delete_key("key")
    assert not store.delete_key("key")
    assert not store.check(["key"])


def test_keys_are_counted_below_the_prefix_only(bare: KeyValueStore, client: MemoryClient) -> None:
    client.put("state", b"")
    client.put("store/1/a", b"")
    bare.multi_set(["a", "b/c"], ["", ""])
    assert bare.num_keys() == PrefixStore("p", bare).num_keys() == 2
    assert sorted(bare.list_keys()) == ["a", "b/c"]


@pytest.mark.skipif(not hasattr(PrefixStore, "clone"), reason="this torch clones no store")
def test_a_clone_has_the_keys_but_its_own_timeout(bare: KeyValueStore) -> None:
    prefixed: Any = PrefixStore("p", bare)
    clone = prefixed.clone()
    clone.set_timeout(SHORT)
    clone.set("key", "x")
    assert prefixed.get("key") == b"x"
    assert prefixed.timeout == timedelta(seconds=10)
    assert clone.has_extended_api()


def test_torchs_own_test_of_python_stores(bare: KeyValueStore) -> None:
    # Private; it alone reaches a Python store from C++ threads as process groups do.
    dist._test_python_store(bare)  # type: ignore[attr-defined]
    assert "key0" in bare.list_keys()


class Unreachable(MemoryClient):
    """Closed: every call fails as one to a store that is gone does."""

    def __init__(self) -> None:
        super().__init__(MemoryServer(), "run")
        self.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.set("a", "b"),
        lambda store: store.get("a"),
        lambda store: store.add("a", 1),
        lambda store: store.check(["a"]),
        lambda store: store.wait(["a"]),
        lambda store: store.wait(["a"], SHORT),
        lambda store: store.compare_set("a", "", "b"),
        lambda store: store.append("a", "b"),
        lambda store: store.multi_get(["a"]),
        lambda store: store.multi_set(["a"], ["b"]),
        lambda store: store.delete_key("a"),
        lambda store: store.num_keys(),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_lost_connection_is_torchs_error_in_one_line(
    call: Callable[[Any], object], wrapped: bool
) -> None:
    bare = KeyValueStore(Unreachable(), "store/")
    with pytest.raises(DistNetworkError, match=r"^the connection to memory is closed$"):
        call(PrefixStore("p", bare) if wrapped else bare)


class Small(MemoryClient):
    name = "small"
    capabilities = Capabilities(
        push=True, linearizable=True, batch=False, ttl=True, max_value_bytes=4
    )


def test_a_value_over_the_limit_is_torchs_error() -> None:
    store = KeyValueStore(Small(MemoryServer(), "run"), "store/")
    with pytest.raises(DistStoreError, match="small holds at most 4"):
        store.set("key", "12345")


class Counting(MemoryClient):
    """Counts requests, to show that N keys do not take N of them."""

    requests = 0

    def get(self, key: str) -> Entry | None:
        self.requests += 1
        return super().get(key)

    def get_many(self, keys: Any) -> dict[str, Entry]:
        self.requests += 1
        return {key: entry for key, entry in self.list("").items() if key in set(keys)}

    def put_many(self, values: Any) -> None:
        self.requests += 1
        for key, value in values.items():
            super().put(key, value)

    def put(self, key: str, value: bytes) -> Version:
        self.requests += 1
        return super().put(key, value)


def test_batches_are_one_request() -> None:
    client = Counting(MemoryServer(), "run")
    store = KeyValueStore(client, "store/")
    keys = [f"key{n}" for n in range(100)]
    store.multi_set(keys, keys)
    store.multi_get(keys)
    store.check(keys)
    store.wait(keys)
    assert client.requests == 4


class TestQueues:
    """As torch's TCPStore and HashStore have them."""

    def test_values_come_out_once_in_the_order_of_their_pushes(self, bare: KeyValueStore) -> None:
        for value in ("é", b"\x00\xff", ""):
            bare.queue_push("jobs", value)
        assert bare.queue_len("jobs") == 3
        popped = [bare.queue_pop("jobs"), bare.queue_pop("jobs", False), bare.queue_pop("jobs")]
        assert popped == ["é".encode(), b"\x00\xff", b""]
        assert bare.queue_len("jobs") == bare.queue_len("none") == 0

    def test_a_pop_waits_for_a_push(self, bare: KeyValueStore) -> None:
        bare.queue_push("jobs", "first")
        bare.queue_pop("jobs")
        timer = threading.Timer(0.05, lambda: bare.clone().queue_push("jobs", "late"))
        timer.daemon = True
        timer.start()
        assert bare.queue_pop("jobs") == b"late"

    def test_an_empty_queue_is_told_at_once_or_times_out(self, bare: KeyValueStore) -> None:
        # Since torch 2.8.
        empty = getattr(dist, "QueueEmptyError", DistStoreError)
        with pytest.raises(empty, match="queue is empty"):
            bare.queue_pop("jobs", False)
        bare.set_timeout(SHORT)
        with pytest.raises(DistStoreError, match=r"wait timeout after 0\.05 s, keys: jobs"):
            bare.queue_pop("jobs")

    def test_check_and_wait_see_a_queue_while_it_is_not_empty(self, bare: KeyValueStore) -> None:
        bare.queue_push("jobs", "x")
        bare.wait(["jobs"], SHORT)
        assert bare.check(["jobs"])
        assert bare.get("jobs") == b""
        assert bare.num_keys() == 0
        bare.queue_pop("jobs")
        assert not bare.check(["jobs"])
        with pytest.raises(DistStoreError, match="timeout"):
            bare.wait(["jobs"], SHORT)
        timer = threading.Timer(0.05, lambda: bare.queue_push("jobs", "y"))
        timer.daemon = True
        timer.start()
        bare.wait(["jobs"])

    def test_a_value_does_not_become_a_queue(self, bare: KeyValueStore) -> None:
        bare.set("plain", "x")
        with pytest.raises(DistStoreError, match="'plain' holds a value"):
            bare.queue_push("plain", "y")
        assert bare.queue_len("plain") == 0
        assert bare.get("plain") == b"x"

    def test_an_unreadable_queue_is_told(self, bare: KeyValueStore, client: MemoryClient) -> None:
        bare.queue_push("jobs", "x")
        damaged = client.get("store/0/jobs")
        assert damaged is not None
        client.put("store/0/jobs", damaged.value[:-2] + b"\xc1")
        with pytest.raises(DistStoreError, match="a queue is unreadable"):
            bare.queue_pop("jobs")
        with pytest.raises(DistStoreError, match="a queue is unreadable"):
            bare.queue_len("jobs")


class Contended(MemoryClient):
    """Whose keys somebody else always changes first."""

    attempts = 0

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        self.attempts += 1
        entry = self.get(key)
        self.put(key, entry.value if entry is not None else value)
        return super().compare_and_set(key, value, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.append("key", "x"),
        lambda store: store.queue_push("queue", "x"),
        lambda store: store.queue_pop("queue"),
        lambda store: store.compare_set("key", "1", "2"),
    ],
    ids=["append", "push", "pop", "compare"],
)
def test_a_client_that_is_never_the_first_to_write_gives_up(
    change: Callable[[Any], object],
) -> None:
    """It asked without a pause, for ever."""
    server = MemoryServer()
    before, client = MemoryClient(server, "run"), Contended(server, "run")
    plain = KeyValueStore(before, "")
    plain.set("key", "1")
    plain.queue_push("queue", "1")
    store = KeyValueStore(client, "", timedelta(seconds=0.5))
    with pytest.raises(DistStoreError, match=r"others changed '(key|queue)' throughout 0.5 s"):
        change(store)
    assert 2 <= client.attempts < 500
