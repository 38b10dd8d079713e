"""A Redis server that answers, and refuses to do what it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError
from rdzv_plugins.testing.harness import SLACK, present, until
from rdzv_plugins.testing.threads import Background
from tests.integration.stores import RunningStore
from tests.servers.process import HOST, free_ports

REQUEST_TIMEOUT = 1.0

# What begins an outage, and what ends it.
OUTAGES = {
    "demoted": (f"REPLICAOF {HOST} {free_ports(1)[0]}", "REPLICAOF NO ONE"),
    "no replicas": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
}

WRITES: dict[str, Callable[[KeyValueClient], object]] = {
    "put": lambda client: client.put("key", b"two"),
    "compare_and_set": lambda client: client.compare_and_set("key", b"two", None),
    "add": lambda client: client.add("count", 1),
    "delete": lambda client: client.delete("key"),
    "wait": lambda client: client.wait("key", None, 30),
}


class Outage:
    """What a server refuses until it is ended."""

    def __init__(self, redis_admin: Any, kind: str) -> None:
        self._admin = redis_admin
        self._begin, self._end = (words.split() for words in OUTAGES[kind])

    def begin(self) -> None:
        self._admin.execute_command(*self._begin)

    def end(self) -> None:
        self._admin.execute_command(*self._end)


@pytest.fixture(params=OUTAGES)
def outage(request: pytest.FixtureRequest, redis_admin: Any) -> Iterator[Outage]:
    if request.param == "no replicas" and redis_admin.info("server")["redis_version"].startswith(
        "6."
    ):
        pytest.skip("Redis 6 asks for no replicas when a script writes")
    outage = Outage(redis_admin, request.param)
    yield outage
    outage.end()


def test_outage_is_told_as_one_and_passes(
    redis_server: RunningStore, outage: Outage, run_id: str
) -> None:
    client = redis_server.open(run_id, request_timeout=REQUEST_TIMEOUT)
    outage.begin()
    began = time.monotonic()
    running = [Background(lambda call=call: call(client)) for call in WRITES.values()]  # type: ignore[misc]
    for request in running:
        with pytest.raises(RendezvousConnectionError, match="did not execute a request within 1 s"):
            request.result(REQUEST_TIMEOUT + SLACK)
    assert time.monotonic() - began < REQUEST_TIMEOUT + SLACK
    outage.end()
    client.put("key", b"one")
    assert present(client.get("key")).value == b"one"
    assert client.add("count", 1) == 1, "what was refused was counted"
    client.close()


def test_addition_is_made_up_for(redis_server: RunningStore, outage: Outage, run_id: str) -> None:
    client = redis_server.open(run_id)
    outage.begin()
    adding = Background(lambda: client.add("count", 1))
    assert not adding.done(0.3)
    outage.end()
    assert adding.result(5 + SLACK) == 1
    client.close()


def test_waiter_outlives_a_demotion(
    redis_server: RunningStore, redis_admin: Any, run_id: str
) -> None:
    client = redis_server.open(run_id)
    known = client.put("key", b"one")
    demotion = Outage(redis_admin, "demoted")
    waiter = Background(lambda: client.wait("key", known, 30))
    assert until(lambda: redis_admin.info("clients")["blocked_clients"] == 1, SLACK)
    woken = unblocked(redis_admin)
    demotion.begin()
    demotion.end()
    assert unblocked(redis_admin) > woken, "the server did not turn the waiter away"
    client.put("key", b"two")
    assert present(waiter.result(5 + SLACK)).value == b"two"
    client.close()


def unblocked(redis_admin: Any) -> int:
    """How often the server has turned away whom it had parked."""
    counted: int = redis_admin.info("errorstats").get("errorstat_UNBLOCKED", {"count": 0})["count"]
    return counted
