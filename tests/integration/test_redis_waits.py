"""Redis: a wait that ends before its answer has come goes on with the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from rdzv_plugins.kv import Entry, KeyValueClient, RendezvousConnectionError, Version
from rdzv_plugins.stores import redis as redis_store
from rdzv_plugins.testing import Proxy
from rdzv_plugins.testing.harness import SLACK, present, until
from rdzv_plugins.testing.threads import Background
from tests.integration.stores import RunningStore

BEATS = 20
A_BEAT = 0.02


@pytest.fixture
def client(redis_server: RunningStore, run_id: str) -> Iterator[KeyValueClient]:
    client = redis_server.open(run_id)
    yield client
    client.close()


@pytest.fixture
def other(redis_server: RunningStore, run_id: str) -> Iterator[KeyValueClient]:
    other = redis_server.open(run_id)
    yield other
    other.close()


def asked(redis_admin: Any) -> int:
    """How often anybody has asked the server to wait."""
    counted: int = redis_admin.info("commandstats").get("cmdstat_xread", {"calls": 0})["calls"]
    return counted


def waiting(redis_admin: Any) -> int:
    counted: int = redis_admin.info("clients")["blocked_clients"]
    return counted


def connected(redis_admin: Any) -> int:
    counted: int = redis_admin.info("stats")["total_connections_received"]
    return counted


def parked(client: KeyValueClient, known: Version, redis_admin: Any) -> Background[Entry | None]:
    """A wait of this client, for which the server waits."""
    waiter = Background(lambda: client.wait("key", known, 30))
    assert until(lambda: waiting(redis_admin) == 1, SLACK)
    return waiter


def answered(client: KeyValueClient, other: KeyValueClient, redis_admin: Any) -> Version:
    """The version with which a wait of this client has ended, after it was parked."""
    known = begun_to_wait(client, other, redis_admin)
    waiter = parked(client, known, redis_admin)
    other.put("key", b"two")
    return present(waiter.result(SLACK)).version


def begun_to_wait(client: KeyValueClient, other: KeyValueClient, redis_admin: Any) -> Version:
    """The version of a key for whose next one a wait of this client has begun, and ended."""
    # The server has never seen the script of a wait.
    loading = Background(lambda: client.wait("script", None, 30))
    other.put("script", b"")
    assert loading.result(SLACK) is not None
    assert until(lambda: waiting(redis_admin) == 0, SLACK)
    known = client.put("key", b"one")
    waiter = parked(client, known, redis_admin)
    client.interrupt()
    assert waiter.result(SLACK) is None
    client.put("beat", b"")
    return known


def test_beats_between_waits_ask_for_nothing_again(
    client: KeyValueClient, other: KeyValueClient, redis_admin: Any
) -> None:
    known = begun_to_wait(client, other, redis_admin)
    before = asked(redis_admin), connected(redis_admin)
    for _ in range(BEATS):
        client.put("beat", b"")
        assert client.wait("key", known, A_BEAT) is None
    assert asked(redis_admin) - before[0] <= 2
    assert connected(redis_admin) - before[1] <= 2
    # Nobody waits now; the next wait finds it.
    other.put("key", b"two")
    entry = present(client.wait("key", known, SLACK))
    assert entry.value == b"two"
    assert client.wait("key", entry.version, A_BEAT) is None


def interrupt(client: KeyValueClient, waiter: Background[Any]) -> None:
    """Interrupt the waiter, again if it did not wait yet."""
    assert not waiter.done(A_BEAT)

    def ended() -> bool:
        client.interrupt()
        return waiter.done(A_BEAT)

    assert until(ended, SLACK)
    assert waiter.result(0) is None


def test_a_wait_that_is_interrupted_costs_no_connection(
    client: KeyValueClient, other: KeyValueClient, redis_admin: Any
) -> None:
    known = begun_to_wait(client, other, redis_admin)
    before = connected(redis_admin)
    for _ in range(BEATS):
        interrupt(client, Background(lambda: client.wait("key", known, 30)))
    assert connected(redis_admin) - before <= 2
    waiter = Background(lambda: client.wait("key", known, 30))
    assert not waiter.done(A_BEAT)
    other.put("key", b"two")
    assert present(waiter.result(SLACK)).value == b"two"


def test_a_wait_that_lasts_longer_than_a_request_may_costs_no_connection(
    redis_server: RunningStore, run_id: str, redis_admin: Any
) -> None:
    """With redis-py 5 to 7, the next wait dropped all connections."""
    with closing(redis_server.open(run_id, request_timeout=0.5)) as client:
        known = client.put("key", b"one")
        client.wait("key", known, A_BEAT)
        client.hold(2)
        before = connected(redis_admin)
        for _ in range(3):
            assert client.wait("key", known, 0.7) is None
        assert connected(redis_admin) == before


def test_a_wait_that_is_interrupted_while_it_looks_costs_no_connection(
    redis_server: RunningStore, run_id: str, other: KeyValueClient, redis_admin: Any
) -> None:
    with (
        Proxy(redis_server.address) as proxy,
        closing(redis_server.open(run_id, address=proxy.address)) as client,
    ):
        client.put("key", b"one")
        known = present(client.get("key")).version
        # Now the server knows the script.
        assert other.wait("key", known, A_BEAT) is None
        for it in (client, other):
            it.hold(2)
        before = connected(redis_admin)
        proxy.hold()
        interrupt(client, Background(lambda: client.wait("key", known, 30)))
        proxy.release()
        waiter = Background(lambda: client.wait("key", known, 30))
        other.put("key", b"two")
        assert present(waiter.result(SLACK)).value == b"two"
        client.hold(2)
        assert connected(redis_admin) == before


def test_a_script_that_the_server_does_not_know_costs_no_connection(
    client: KeyValueClient, redis_admin: Any
) -> None:
    known = client.put("key", b"one")
    client.hold(2)
    before = connected(redis_admin)
    redis_admin.script_flush()
    assert client.wait("key", known, A_BEAT) is None
    client.put("key", b"two")
    assert connected(redis_admin) == before


def test_a_wait_does_not_answer_for_another_version(
    client: KeyValueClient, other: KeyValueClient
) -> None:
    first = client.put("key", b"one")
    assert client.wait("key", first, A_BEAT) is None
    second = client.put("key", b"two")
    assert present(client.get("key")).version == second
    assert client.wait("key", second, A_BEAT) is None
    other.delete("key")
    assert until(lambda: client.get("key") is None, SLACK)
    third = other.put("key", b"three")
    assert present(client.wait("key", second, SLACK)).version == third


def test_what_came_between_two_waits_is_not_the_answer_if_more_came(
    client: KeyValueClient, other: KeyValueClient, redis_admin: Any
) -> None:
    known = begun_to_wait(client, other, redis_admin)
    client.put("key", b"two")
    client.put("key", b"three")
    assert present(client.wait("key", known, SLACK)).value == b"three"
    assert client.wait("absent", None, A_BEAT) is None
    other.put("absent", b"")
    other.delete("absent")
    assert client.wait("absent", None, A_BEAT) is None


def test_a_client_that_writes_between_waits_needs_no_more_connections(
    client: KeyValueClient, other: KeyValueClient, redis_admin: Any
) -> None:
    known = begun_to_wait(client, other, redis_admin)
    before = connected(redis_admin)
    for _ in range(BEATS):
        assert client.wait("key", known, A_BEAT) is None
        known = client.put("key", b"")
    assert connected(redis_admin) - before <= 2


def test_many_wait_for_one_key_and_for_many(client: KeyValueClient, other: KeyValueClient) -> None:
    keys = ["one", "one", "two", "three"]
    known = {key: client.put(key, b"") for key in keys}
    for _ in range(3):
        waiters = [Background(lambda key=key: client.wait(key, known[key], A_BEAT)) for key in keys]  # type: ignore[misc]
        assert [it.result(SLACK) for it in waiters] == [None] * len(keys)
    waiters = [Background(lambda key=key: client.wait(key, known[key], 30)) for key in keys]  # type: ignore[misc]
    other.put_many(dict.fromkeys(keys, b"new"))
    assert [present(it.result(SLACK)).value for it in waiters] == [b"new"] * len(keys)


def test_a_run_that_the_server_forgot_is_looked_at_after_the_next_beat(
    client: KeyValueClient, other: KeyValueClient, redis_admin: Any
) -> None:
    """The server has forgotten too that somebody waits: it tells nobody of a change."""
    known = client.put("key", b"one")
    assert client.wait("key", known, A_BEAT) is None
    redis_admin.flushall()
    other.put("key", b"two")
    client.put("beat", b"")
    assert present(client.wait("key", known, SLACK)).value == b"two"


def test_another_thread_that_waits_meanwhile_finds_the_write_too(
    client: KeyValueClient, other: KeyValueClient, redis_admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_LONGEST_LOOK", 0.2)
    known = begun_to_wait(client, other, redis_admin)
    waiter = Background(lambda: client.wait("key", known, 25))
    assert not waiter.done(A_BEAT)
    redis_admin.flushall()
    other.put("key", b"two")
    client.put("beat", b"")
    assert present(waiter.result(SLACK)).value == b"two"


def test_what_is_written_between_two_waits_is_found(
    client: KeyValueClient, other: KeyValueClient, redis_admin: Any
) -> None:
    known = answered(client, other, redis_admin)
    for count in range(BEATS):
        other.put("key", b"early")
        other.put("key", b"%d" % count)
        entry = present(client.wait("key", known, SLACK))
        assert entry.value == b"%d" % count
        known = entry.version
    other.delete("key")
    other.put("key", b"again")
    assert present(client.wait("key", known, SLACK)).value == b"again"


def _deleted_and_made_again(other: KeyValueClient, redis_admin: Any, run_id: str) -> None:
    other.delete("key")
    entry, written = other.compare_and_set("key", b"last", None)
    assert written
    assert other.wait("key", present(entry).version, A_BEAT) is None


def _expired(other: KeyValueClient, redis_admin: Any, run_id: str) -> None:
    other.expire(0)
    other.put("key", b"last")


def _forgotten(other: KeyValueClient, redis_admin: Any, run_id: str) -> None:
    redis_admin.flushall()
    other.put("key", b"last")


def _without_its_stream(other: KeyValueClient, redis_admin: Any, run_id: str) -> None:
    other.put("key", b"last")
    assert redis_admin.delete(*redis_admin.keys(f"*{run_id}*:watch:key")) == 1


@pytest.mark.parametrize(
    "happens", [_deleted_and_made_again, _expired, _forgotten, _without_its_stream]
)
def test_a_wait_after_an_answer_finds_what_the_stream_does_not_tell(
    client: KeyValueClient,
    other: KeyValueClient,
    redis_admin: Any,
    run_id: str,
    happens: Callable[[KeyValueClient, Any, str], None],
) -> None:
    known = answered(client, other, redis_admin)
    happens(other, redis_admin, run_id)
    assert present(client.wait("key", known, SLACK)).value == b"last"


def test_a_server_that_vanished_is_told(
    redis_server: RunningStore, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_LONGEST_PARK", 1.0)
    with Proxy(redis_server.address) as proxy:
        through = replace(redis_server, endpoint=f"redis://127.0.0.1:{proxy.address[1]}")
        client = through.open(run_id, request_timeout=1.0)
        known = client.put("key", b"one")
        assert client.wait("key", known, A_BEAT) is None
        proxy.black_hole()
        waiter = Background(lambda: client.wait("key", known, 30))
        with pytest.raises(RendezvousConnectionError, match="could not be reached"):
            waiter.result(1.0 + 2 * 1.0 + SLACK)
        client.close()
