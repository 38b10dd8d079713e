"""Reads return exactly what was written, one request at a time."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable

import pytest

from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError, RendezvousStateError, Version
from rdzv_plugins.testing.harness import SLACK, Harness, Open, present, until
from rdzv_plugins.testing.network import REQUESTS

KEYS = [
    "plain",
    "with space",
    "slash/in/side",
    "/leading",
    "trailing/",
    "two//slashes",
    ".",
    "..",
    "a/../b",
    "percent%2Fquery?a=b&c#d",
    "quotes'\"`$\\*[x]{y}",
    "new\nline",
    "nul\0byte",
    "ключ-鍵-🔑",
    "CaSe",
    "l" * 240,
]

VALUES = [
    b"",
    b"\0",
    b"\n",
    b" lead and trail ",
    b"0",
    bytes(range(256)),
    zlib.compress(b"already compressed" * 100),
    b"\x1f\x8b\x08",
    "ü".encode("latin-1"),
    b"z" * 100_000,
    random.Random(1).randbytes(100_000),
]

GARBAGE: list[Version] = [
    "",
    "garbage",
    "0-0",
    b"bytes",
    0,
    -1,
    2**70,
    1.5,
    (),
    ("1", 1),
    frozenset({1}),
    object,
]

NAMESPACES = [("a", "b"), ("a", "ab"), ("a", "a/b"), ("a", "A"), ("a b", "a_b"), ("a", "a%")]

# The largest value of the tests, in bytes, if the store's limit is higher.
LARGEST_TRIED = 4 * 1024 * 1024


class ReadWriteTests(Harness):
    def test_absent_key_reads_as_none(self, client: KeyValueClient) -> None:
        assert client.get("key") is None

    def test_put_is_read_by_others(self, client: KeyValueClient, other: KeyValueClient) -> None:
        version = client.put("key", b"one")
        entry = present(other.get("key"))
        assert (entry.value, entry.version) == (b"one", version)
        second = client.put("key", b"two")
        assert present(other.get("key")).value == b"two"
        assert second != version

    @pytest.mark.parametrize("key", KEYS, ids=ascii)
    def test_every_key_is_possible(
        self, client: KeyValueClient, other: KeyValueClient, key: str
    ) -> None:
        client.put("neighbour", b"untouched")
        created, won = client.compare_and_set(key, b"one", None)
        assert won
        assert other.get(key) == created
        assert other.list("")[key] == created
        assert other.get_many([key]) == {key: created}
        client.put_many({key: b"two"})
        assert present(other.wait(key, present(created).version, 5)).value == b"two"
        client.delete(key)
        assert client.add(key, 3) == 3
        client.delete_many([key])
        assert other.get(key) is None
        assert [*other.list("")] == ["neighbour"]

    @pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{len(value)}-{value[:4]!r}")
    def test_every_value_is_possible(
        self, client: KeyValueClient, other: KeyValueClient, value: bytes
    ) -> None:
        client.put("put", value)
        client.put_many({"many": value})
        created, _ = client.compare_and_set("set", value, None)
        assert present(created).value == value
        assert present(other.wait("put", None, 5)).value == value
        found = other.get_many(["put", "many", "set"])
        assert {key: entry.value for key, entry in found.items()} == {
            "put": value,
            "many": value,
            "set": value,
        }
        assert other.list("") == found
        assert other.get("set") == created

    def test_largest_value_passes(self, client: KeyValueClient, other: KeyValueClient) -> None:
        size = min(client.capabilities.max_value_bytes, LARGEST_TRIED)
        value = random.Random(size).randbytes(size)
        version = client.put("key", value)
        assert present(other.get("key")).value == value
        changed = value[::-1]
        assert client.compare_and_set("key", changed, version)[1]
        assert present(other.wait("key", version, 5)).value == changed

    def test_larger_value_is_refused_naming_the_limit(self, client: KeyValueClient) -> None:
        limit = client.capabilities.max_value_bytes
        version = client.put("key", b"before")
        value = bytes(limit + 1)
        writes: list[Callable[[], object]] = [
            lambda: client.put("key", value),
            lambda: client.compare_and_set("key", value, version),
            lambda: client.put_many({"key": value}),
        ]
        for write in writes:
            with pytest.raises(RendezvousStateError, match=f"{limit:,}"):
                write()
        assert present(client.get("key")).value == b"before"

    def test_compare_and_set_creates_once(self, client: KeyValueClient) -> None:
        first, won = client.compare_and_set("key", b"one", None)
        assert won
        assert present(first).value == b"one"
        assert client.compare_and_set("key", b"two", None) == (first, False)
        assert client.get("key") == first

    def test_compare_and_set_wants_the_current_version(
        self, client: KeyValueClient, other: KeyValueClient
    ) -> None:
        first, _ = client.compare_and_set("key", b"one", None)
        old = present(first).version
        second, won = other.compare_and_set("key", b"two", old)
        assert won
        assert present(second).version != old
        assert client.compare_and_set("key", b"three", old) == (second, False)
        assert client.get("key") == second

    def test_compare_and_set_of_an_absent_key(self, client: KeyValueClient) -> None:
        version = client.put("other", b"")
        assert client.compare_and_set("key", b"one", version) == (None, False)
        assert client.get("key") is None

    @pytest.mark.parametrize("token", GARBAGE, ids=repr)
    def test_garbage_token_is_refused(self, client: KeyValueClient, token: Version) -> None:
        assert client.compare_and_set("key", b"mine", token) == (None, False)
        client.put("key", b"one")
        current = client.get("key")
        assert client.compare_and_set("key", b"mine", token) == (current, False)
        assert client.get("key") == current
        assert client.wait("key", token, 5) == current

    def test_another_keys_version_is_refused(self, client: KeyValueClient) -> None:
        client.put("key", b"same")
        version = client.put("other", b"same")
        assert client.compare_and_set("key", b"mine", version) == (client.get("key"), False)

    def test_delete_is_idempotent(self, client: KeyValueClient, other: KeyValueClient) -> None:
        client.delete("key")
        client.put("key", b"one")
        client.put("key/child", b"child")
        client.delete("key")
        other.delete("key")
        assert client.get("key") is None
        assert {*client.list("")} == {"key/child"}

    def test_version_does_not_come_back_after_a_delete(self, client: KeyValueClient) -> None:
        seen: set[Version] = set()
        for _ in range(10):
            first, won = client.compare_and_set("key", b"same", None)
            assert won
            seen |= {present(first).version, client.put("key", b"other")}
            client.delete("key")
        assert len(seen) == 20

    def test_stale_token_is_refused_after_delete_and_recreation(
        self, client: KeyValueClient, other: KeyValueClient
    ) -> None:
        stale = client.put("key", b"same")
        other.delete("key")
        assert client.compare_and_set("key", b"mine", stale) == (None, False)
        other.put("key", b"same")
        current = other.get("key")
        assert client.compare_and_set("key", b"mine", stale) == (current, False)
        assert client.wait("key", stale, 5) == current

    def test_list_has_exactly_the_prefix(self, client: KeyValueClient) -> None:
        keys = ["a", "a/b", "a/b/c", "ab", "a%", "a_", "A", "b", "b/a", "é"]
        client.put_many({key: key.encode() for key in keys})
        for prefix in ["", "a", "a/", "a/b", "a%", "a_", "A", "b/", "é", "z", "*", "%", "/"]:
            found = client.list(prefix)
            assert {*found} == {key for key in keys if key.startswith(prefix)}, prefix
            assert found == client.get_many(found)
            assert all(entry.value == key.encode() for key, entry in found.items())

    def test_many_keys_at_once(self, client: KeyValueClient, other: KeyValueClient) -> None:
        values = {f"many/{i:04}": b"%d" % i * (i % 50) for i in range(300)}
        client.put_many(values)
        assert {key: entry.value for key, entry in other.list("many/").items()} == values
        asked = [*values, "absent", *[*values][:3]]
        found = other.get_many(key for key in asked)
        assert {key: entry.value for key, entry in found.items()} == values
        assert found["many/0007"] == other.get("many/0007")
        other.delete_many([*[*values][:299], "absent"])
        assert [*client.list("")] == ["many/0299"]

    def test_large_values_at_once(self, client: KeyValueClient) -> None:
        size = min(client.capabilities.max_value_bytes, 300_000)
        values = {f"large/{i}": random.Random(i).randbytes(size) for i in range(8)}
        client.put_many(values)
        assert {key: entry.value for key, entry in client.list("").items()} == values
        assert {key: entry.value for key, entry in client.get_many(values).items()} == values

    def test_nothing_at_once(self, client: KeyValueClient) -> None:
        client.put_many({})
        client.delete_many([])
        assert client.get_many([]) == {}
        assert client.list("") == {}

    def test_add_counts(self, client: KeyValueClient, other: KeyValueClient) -> None:
        assert client.add("count", 5) == 5
        assert other.add("count", -7) == -2
        assert client.add("count", 0) == -2
        assert present(client.get("count")).value == b"-2"
        client.put("count", b"41")
        assert client.add("count", 1) == 42
        entry = present(client.get("count"))
        client.add("count", 1)
        assert client.compare_and_set("count", b"0", entry.version)[1] is False

    def test_add_is_exact_up_to_64_bits(self, client: KeyValueClient) -> None:
        assert client.add("count", 2**62) == 2**62
        assert client.add("count", 1) == 2**62 + 1
        assert client.add("count", -(2**62)) == 1

    @pytest.mark.parametrize("value", [b"", b"abc", b"1.5", b"0x10", b"1e3", b"nan", b"\xff"])
    def test_add_refuses_what_is_no_integer(self, client: KeyValueClient, value: bytes) -> None:
        client.put("count", value)
        with pytest.raises(RendezvousStateError, match="count"):
            client.add("count", 1)
        assert present(client.get("count")).value == value

    @pytest.mark.parametrize(("first", "second"), NAMESPACES)
    def test_namespaces_do_not_see_each_other(
        self, open: Open, namespace: str, first: str, second: str
    ) -> None:
        one, two = open(f"{namespace}/{first}"), open(f"{namespace}/{second}")
        one.put("key", b"one")
        assert two.get("key") is None
        two.put_many({"key": b"two", "b/key": b"two"})
        # Namespace "a" with "b/key" spells the same path as "a/b" with "key".
        one.put("b/key", b"one")
        assert {key: entry.value for key, entry in one.list("").items()} == {
            "key": b"one",
            "b/key": b"one",
        }
        assert {key: entry.value for key, entry in two.list("").items()} == {
            "key": b"two",
            "b/key": b"two",
        }
        one.delete_many(["key", "b/key"])
        one.expire(0)
        assert {*two.list("")} == {"key", "b/key"}

    def test_expire_empties_the_namespace(
        self, client: KeyValueClient, open: Open, namespace: str, unit: float, expiry_slack: float
    ) -> None:
        neighbour = open(f"{namespace}/neighbour")
        neighbour.put("key", b"stays")
        client.put_many({"key": b"one", "other/key": b"two"})
        stale = present(client.get("key")).version
        begun = time.monotonic()
        client.expire(2 * unit)
        before = client.get("key")
        if time.monotonic() - begun < unit:
            assert before is not None, "the namespace expired before its time"
        assert until(lambda: client.list("") == {}, 2 * unit + expiry_slack)
        assert client.get("key") is None
        assert client.get_many(["key", "other/key"]) == {}
        assert open().list("") == {}
        assert client.compare_and_set("key", b"mine", stale) == (None, False)
        assert client.wait("key", None, 0.05) is None
        assert present(neighbour.get("key")).value == b"stays"

    def test_run_begins_anew_after_expire(
        self, client: KeyValueClient, open: Open, unit: float, expiry_slack: float
    ) -> None:
        client.put("key", b"old")
        client.add("count", 7)
        client.expire(0.2 * unit)
        assert until(lambda: client.list("") == {}, expiry_slack)
        newcomer = open()
        created, won = newcomer.compare_and_set("key", b"new", None)
        assert won
        assert newcomer.add("count", 1) == 1
        assert client.get("key") == created
        # The old deadline must not apply to the new run.
        assert not until(lambda: client.get("key") is None, unit)

    def test_emptied_namespace_outlives_the_old_deadline(
        self, client: KeyValueClient, open: Open, unit: float, expiry_slack: float
    ) -> None:
        client.put_many({"key": b"old", "other/key": b"old"})
        client.add("count", 7)
        client.wait("key", None, 1)
        begun = time.monotonic()
        client.expire(2 * unit)
        newcomer = open()
        newcomer.delete_many([*newcomer.list("")])
        newcomer.expire(0)
        assert client.list("") == {}
        created, won = newcomer.compare_and_set("key", b"new", None)
        assert won
        newcomer.put_many({"other/key": b"new", "third": b"new"})
        assert newcomer.add("count", 1) == 1
        # Read past the old deadline with both clients, because one may remember it.
        past = begun + (2 + expiry_slack) * unit
        assert not until(
            lambda: {*client.list("")} != {"key", "other/key", "third", "count"},
            past - time.monotonic(),
        )
        assert client.get("key") == newcomer.get("key") == created

    def test_expire_at_once_empties_at_once(
        self, client: KeyValueClient, open: Open, unit: float
    ) -> None:
        newcomer = open()
        for number in range(5):
            client.put_many({"key": b"old", "other/key": b"old"})
            client.expire(0)
            assert newcomer.list("") == {}
            newcomer.put("key", b"%d" % number)
            assert present(client.get("key")).value == b"%d" % number
        assert not until(lambda: client.get("key") is None, 1.5 * unit)

    def test_what_expired_stays_so(
        self, client: KeyValueClient, open: Open, unit: float, expiry_slack: float
    ) -> None:
        client.put_many({"key": b"one", "other/key": b"two"})
        client.add("count", 7)
        client.expire(0.2 * unit)
        assert until(lambda: client.list("") == {}, expiry_slack)
        newcomer = open()
        newcomer.expire(30)
        assert newcomer.list("") == client.list("") == {}
        assert newcomer.get_many(["key", "other/key", "count"]) == {}
        assert client.get("key") is None

    def test_what_is_written_after_expire_ends_too(
        self, client: KeyValueClient, open: Open, unit: float, expiry_slack: float
    ) -> None:
        client.put_many({"key": b"one", "mine": b"one", "count": b"1"})
        begun = time.monotonic()
        client.expire(3 * unit)
        other = open()
        version = present(other.get("key")).version
        # Write existing and new keys, with the client that called `expire` and with another client.
        assert other.compare_and_set("key", b"two", version)[1]
        assert other.compare_and_set("new", b"two", None)[1]
        other.put_many({"many/1": b"two", "many/2": b"two", "many/3": b"two"})
        other.put("put", b"two")
        assert other.add("count", 1) == 2
        assert other.add("other count", 1) == 1
        client.put("mine", b"two")
        keys = {"key", "new", "many/1", "many/2", "many/3", "put", "count", "other count", "mine"}
        before = {*client.list("")}
        if time.monotonic() - begun < 2 * unit:
            assert before == keys, "something expired before its time"
        assert until(lambda: client.list("") == {} == other.list(""), 3 * unit + expiry_slack)
        # A client that remembers the old deadline must not give it to a new run.
        client.put("mine", b"new")
        other.put("key", b"new")
        assert other.add("count", 1) == 1
        assert not until(lambda: {*open().list("")} != {"mine", "key", "count"}, unit)

    def test_an_empty_namespace_can_have_a_deadline(
        self, client: KeyValueClient, unit: float, expiry_slack: float
    ) -> None:
        client.expire(unit)
        client.put("key", b"one")
        assert until(lambda: client.get("key") is None, unit + expiry_slack)

    @pytest.mark.parametrize("by", ["the same", "another"])
    def test_deadline_is_moved_forward(
        self, client: KeyValueClient, open: Open, by: str, unit: float, expiry_slack: float
    ) -> None:
        client.put_many({"key": b"one", "stays": b"one"})
        begun = time.monotonic()
        client.expire(4 * unit)
        other = open()
        assert other.get("key") is not None
        other.put("key", b"two")
        other.put("new", b"two")
        (client if by == "the same" else other).expire(600)
        assert client.get("new") is not None
        assert other.get("stays") is not None
        other.put("key", b"three")
        other.put("newer", b"three")
        client.put("mine", b"three")
        assert time.monotonic() - begun < 4 * unit, "this machine is too slow for the test"
        assert not until(
            lambda: {*open().list("")} != {"key", "stays", "new", "newer", "mine"},
            begun + (4 + expiry_slack) * unit - time.monotonic(),
        )
        assert present(client.get("key")).value == b"three"

    def test_deadline_is_renewed_again_and_again(
        self, client: KeyValueClient, other: KeyValueClient, unit: float, expiry_slack: float
    ) -> None:
        client.put("key", b"0")
        begun = time.monotonic()
        number = 0
        while time.monotonic() - begun < (4 + expiry_slack) * unit:
            client.expire(4 * unit)
            assert present(other.get("key")).value == b"%d" % number
            number += 1
            other.put("key", b"%d" % number)
            time.sleep(0.2 * unit)
        assert until(lambda: client.list("") == {}, 4 * unit + expiry_slack)

    def test_deadline_is_moved_back(
        self, client: KeyValueClient, other: KeyValueClient, unit: float, expiry_slack: float
    ) -> None:
        client.put_many({"key": b"one", "stays": b"one"})
        client.expire(600)
        assert other.get("key") is not None
        other.put_many({"key": b"two", "new": b"two"})
        client.expire(unit)
        assert other.get("stays") is not None
        other.put("newer", b"three")
        assert until(lambda: client.list("") == {}, unit + expiry_slack)

    def test_close_is_idempotent_and_final(self, client: KeyValueClient) -> None:
        client.put("key", b"one")
        client.close()
        client.close()
        client.interrupt()
        begun = time.monotonic()
        assert client.wait("key", None, 30) is None
        for request in REQUESTS.values():
            with pytest.raises(RendezvousConnectionError):
                request(client)
        assert time.monotonic() - begun < SLACK
