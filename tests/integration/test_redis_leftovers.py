"""What a run leaves on a Redis server, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.testing.harness import SLACK, present, until
from rdzv_plugins.testing.threads import Background
from tests.integration.stores import RunningStore

# A stream, and a hash that only waiters made.
LONGEST_LIFE = 60


class Run:
    """A run, and what the server has of it."""

    def __init__(self, redis_server: RunningStore, run_id: str) -> None:
        self._admin: Any = redis.Redis(*redis_server.address)
        self._hash = f"{{rdzv/{run_id}}}"
        self.client: KeyValueClient = redis_server.open(run_id)

    @property
    def lives(self) -> dict[str, int]:
        """For each record the seconds that it has to live; -1: no end."""
        names = [key.decode() for key in self._admin.scan_iter(match=f"{self._hash}*", count=1000)]
        return {name.removeprefix(self._hash): self._admin.ttl(name) for name in names}

    def drop(self, record: str) -> bool:
        return bool(self._admin.delete(self._hash + record))

    def close(self) -> None:
        self.client.close()
        self._admin.close()


@pytest.fixture
def run(redis_server: RunningStore, run_id: str) -> Iterator[Run]:
    run = Run(redis_server, run_id)
    yield run
    run.close()


def test_stream_that_outlives_its_run_is_not_current(run: Run) -> None:
    run.client.put("key", b"one")
    assert run.client.wait("key", None, 1) is not None
    run.client.expire(3)
    assert run.client.wait("key", None, 1) is not None
    version = run.client.put("key", b"two")
    assert until(lambda: run.client.get("key") is None, 3 + SLACK)
    assert [*run.lives] == [":watch:key"], "nothing outlived the run"
    assert run.client.wait("key", version, 0.1) is None
    assert run.client.wait("key", None, 0.1) is None
    assert all(0 <= life <= LONGEST_LIFE for life in run.lives.values())


def test_stream_of_a_deleted_key_ends(run: Run) -> None:
    run.client.put("key", b"one")
    for _ in range(2):
        assert run.client.wait("key", None, 1) is not None
        run.client.delete("key")
        assert run.client.wait("key", None, 0.1) is None
        run.client.put("key", b"two")
    assert 0 <= run.lives[":watch:key"] <= LONGEST_LIFE


def test_stream_may_end_under_its_waiter(run: Run) -> None:
    run.client.put("key", b"zero")
    assert run.client.wait("key", None, 1) is not None
    # A stream comes with the first write that somebody may wait for.
    known = run.client.put("key", b"one")
    waiter = Background(lambda: run.client.wait("key", known, 30))
    assert not waiter.done(0.2)
    assert run.drop(":watch:key")
    version = run.client.put("key", b"two")
    # Told by the server, long before the waiter asks again.
    assert present(waiter.result(SLACK)).version == version


def test_nothing_stays_of_a_run_that_was_only_waited_for(run: Run) -> None:
    assert run.client.wait("mistyped", None, 0.1) is None
    assert [0 <= life <= LONGEST_LIFE for life in run.lives.values()] == [True]
    run.client.put("key", b"one")
    assert run.client.wait("another", None, 0.1) is None
    assert run.lives[""] == -1, "a run would be lost"


@pytest.mark.parametrize("deleted", [False, True])
def test_expire_0_empties_at_once_and_spares_what_comes_next(run: Run, deleted: bool) -> None:
    run.client.put_many({"key": b"one", "other": b"one"})
    for key in ("key", "other"):
        assert run.client.wait(key, None, 1) is not None
    run.client.expire(3600)
    if deleted:
        run.client.delete_many(["key", "other"])
    run.client.expire(0)
    left = run.lives
    # The streams of deleted keys have told their waiters, and end by themselves.
    assert left.keys() == ({":watch:key", ":watch:other"} if deleted else set())
    assert all(0 <= life <= LONGEST_LIFE for life in left.values())
    run.client.put("key", b"two")
    assert run.lives[""] == -1
    assert run.client.list("").keys() == {"key"}
