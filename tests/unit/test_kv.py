"""What the in-memory reference promises beyond the conformance suite, and the contract's defaults.

The suite itself runs on it in test_memory_conformance.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rdzv_plugins.kv import (
    Capabilities,
    Entry,
    KeyValueClient,
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
    parse_counter,
)


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def client(server: MemoryServer) -> MemoryClient:
    return MemoryClient(server, "run")


@pytest.mark.parametrize("token", [0, 1, True, 1.0, "", "1-", b"1", object(), (), [], {}])
def test_a_token_that_was_never_handed_out_is_refused(client: MemoryClient, token: Version) -> None:
    version = client.put("key", b"x")
    assert client.compare_and_set("key", b"y", token) == (Entry(b"x", version), False)
    assert client.compare_and_set("other", b"y", token) == (None, False)


def test_two_servers_share_nothing(client: MemoryClient) -> None:
    client.put("key", b"x")
    assert MemoryClient(MemoryServer(), "run").get("key") is None


def test_an_expired_namespace_is_empty_and_can_be_used_again(
    server: MemoryServer, client: MemoryClient
) -> None:
    old = client.put("key", b"x")
    other = MemoryClient(server, "other")
    other.put("key", b"z")
    client.expire(3600)
    assert client.get("key") is not None
    client.expire(0)
    assert client.list("") == {}
    assert client.compare_and_set("key", b"x", old) == (None, False)
    assert client.put("key", b"x") != old
    assert [*client.list("")] == [*other.list("")] == ["key"]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.get("key"),
        lambda client: client.put("key", b""),
        lambda client: client.compare_and_set("key", b"", None),
        lambda client: client.delete("key"),
        lambda client: client.add("key", 1),
        lambda client: client.list(""),
        lambda client: client.get_many(["key"]),
        lambda client: client.put_many({"key": b""}),
        lambda client: client.delete_many(["key"]),
    ],
)
def test_a_closed_client_refuses_every_call(
    client: MemoryClient, call: Callable[[KeyValueClient], object]
) -> None:
    client.close()
    client.close()
    with pytest.raises(RendezvousConnectionError, match="closed"):
        call(client)


def test_a_closed_client_does_not_wait(client: MemoryClient) -> None:
    client.put("key", b"x")
    client.close()
    assert client.wait("key", None, 60) is None


def test_a_closed_client_leaves_the_others_open(server: MemoryServer, client: MemoryClient) -> None:
    other = MemoryClient(server, "run")
    client.put("key", b"x")
    client.close()
    assert other.get("key") is not None


class Small(MemoryClient):
    name = "small"
    capabilities = Capabilities(
        push=True, linearizable=True, batch=False, ttl=True, max_value_bytes=4
    )


def test_a_value_over_the_limit_names_the_limit_and_changes_nothing(server: MemoryServer) -> None:
    client = Small(server, "run")
    version = client.put("key", b"1234")
    says = "the value of 'key' has 5 bytes; small holds at most 4"
    with pytest.raises(RendezvousStateError, match=says):
        client.put("key", b"12345")
    with pytest.raises(RendezvousStateError, match=says):
        client.compare_and_set("key", b"12345", version)
    client.put("count", b"9999")
    with pytest.raises(RendezvousStateError, match="'count' has 5 bytes"):
        client.add("count", 1)
    assert client.get("key") == Entry(b"1234", version)


@pytest.mark.parametrize(("value", "count"), [(b"0", 0), (b"-12", -12), (b"9" * 18, 10**18 - 1)])
def test_parse_counter(value: bytes, count: int) -> None:
    assert parse_counter("key", value) == count


@pytest.mark.parametrize("value", [b"", b"1.5", b"0x1", b"one", b"\xff", b"1_0", b" 1", b"9" * 30])
def test_parse_counter_refuses_what_is_no_integer(value: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="the value of 'key' is not a counter"):
        parse_counter("key", value)
