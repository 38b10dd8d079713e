"""A store that refuses a client in the midst of a run, and says so: `AccessDeniedError`."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rdzv_plugins.kv import AccessDeniedError, KeyValueClient, RendezvousConnectionError
from rdzv_plugins.observe.history import archive_run_id
from rdzv_plugins.testing.threads import Background
from tests.integration.agents import Run, one_world, until
from tests.integration.credentials import ADMINISTRATORS, Administrator, administered
from tests.integration.stores import GUARDED, Kind, started
from tests.servers import Security


@pytest.fixture(params=ADMINISTRATORS, ids=lambda kind: kind.name)
def administrator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Administrator]:
    with administered(request.param, tmp_path) as administrator:
        yield administrator


# What an administrator can paste.
GRANTS = {
    "redis": "ACL SETUSER joe ~{rdzv/* +@hash +@stream",
    "zookeeper": "setAcl /rdzv sasl:joe:cdra",
    "consul": 'key_prefix "rdzv/" { policy = "write" }',
    "etcd-v3": "etcdctl role grant-permission <role> readwrite --prefix 'rdzv/'",
    "postgres": "GRANT SELECT, INSERT, UPDATE, DELETE ON rdzv TO joe",
    "nats": 'publish: ["$KV.rdzv.rdzv.>", "$JS.API.STREAM.INFO.KV_rdzv"',
}


def only_on(*names: str) -> pytest.MarkDecorator:
    kinds = [kind for kind in ADMINISTRATORS if kind.name in names]
    return pytest.mark.parametrize(
        "administrator", kinds, ids=lambda kind: kind.name, indirect=True
    )


def test_rights_that_end_while_connected(administrator: Administrator, run_id: str) -> None:
    with closing(administrator.store.open(run_id)) as client:
        client.put("key", b"value")
        administrator.forbid(run_id)
        with pytest.raises(AccessDeniedError, match=re.escape(GRANTS[administrator.name])):
            client.put("key", b"another")
        with pytest.raises(AccessDeniedError):
            client.wait("key", None, 5)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with pytest.raises(AccessDeniedError):
                client.put("key", b"another")
        # NATS keeps the connection open on which it refused a request.
        until(lambda: len(os.listdir("/proc/self/fd")) < before + 10, 20)


@only_on(*GRANTS.keys() - {"consul"})
def test_a_client_that_may_write_and_not_read_finds_nothing_absent(
    administrator: Administrator, run_id: str
) -> None:
    """A node that took a refusal for an absent document would found a run of its own."""
    client = administrator.store.open(run_id)
    reads: list[Callable[[], object]] = [
        lambda: client.get("key"),
        lambda: client.get_many(["key", "other"]),
        lambda: client.list(""),
        lambda: client.wait("key", None, 5),
        lambda: client.compare_and_set("other", b"value", None),
        lambda: client.add("counter", 1),
    ]
    try:
        client.put("key", b"value")
        administrator.forbid_to_read(run_id)
        for read in reads:
            with pytest.raises(AccessDeniedError):
                read()
        with pytest.raises(AccessDeniedError):
            administrator.store.open(run_id)
        # What every heartbeat does. Where the store takes it, a node reads before it beats again.
        with suppress(AccessDeniedError):
            client.put_many({"key": b"another", "bell": b"1"})
    finally:
        client.close()


@pytest.mark.soak
@only_on("etcd-v3")
def test_a_user_of_one_run_runs_it_and_sees_no_other(
    administrator: Administrator, run_id: str
) -> None:
    """As on Redis, see its rights' tests."""
    administrator.limit_to(run_id)
    with Run(administrator.store, run_id) as run:
        agents = [run.start((2, 2)) for _ in range(2)]
        until(one_world(agents), 120)
        # The leader notes the round in the list of all runs.
        until(lambda: bool(run.history()), 60)
        with closing(administrator.store.open(archive_run_id(run_id))) as history:
            history.expire(60)  # It may not delete the runs of others that are over.
        for other in (f"{run_id}-b", archive_run_id(f"{run_id}-b"), "x"):
            with pytest.raises(AccessDeniedError), closing(administrator.store.open(other)) as it:
                it.get("state")


# The others refuse a heartbeat too.
@only_on("redis", "etcd-v3")
@pytest.mark.parametrize("leads", [True, False], ids=["leads", "follows"])
@pytest.mark.parametrize("asks", [True, False], ids=["asks for a round", "runs"])
def test_nobody_waits_for_a_node_that_may_write_and_not_read(
    administrator: Administrator, run_id: str, leads: bool, asks: bool
) -> None:
    """Its heartbeats said that it lives, and it could never see its rank."""
    blind, others = Run(administrator.store, run_id), Run(administrator.of_others(), run_id)
    try:
        agents = [run.start((1, 2)) for run in ((blind, others) if leads else (others, blind))]
        until(one_world(agents), 30)
        (other,) = others.agents
        administrator.forbid_to_read(run_id)
        if asks:
            blind.agents[0].fail_workers()
        # Several leases; it took as long as a join may, which is 30 s.
        until(one_world([other]), 30)
        assert blind.agents[0].error is None
    finally:
        for agent in blind.agents:
            agent.crash()  # It could not say that it leaves.
        for agent in others.agents:
            agent.end()


@only_on("etcd-v3")
def test_a_leader_that_may_not_write_the_document_is_replaced(
    administrator: Administrator, run_id: str
) -> None:
    """Its heartbeats and listings said that it leads, and no round followed the last one."""
    with (
        Run(administrator.store, run_id) as refused,
        Run(administrator.of_others(), run_id) as others,
    ):
        agents = [run.start((2, 3)) for run in (refused, others)]
        until(one_world(agents), 30)
        administrator.forbid_the_document(run_id)
        agents.append(others.start((2, 3)))
        until(one_world(agents), 30)


def test_secret_that_ends_and_is_not_handed_out(administrator: Administrator, run_id: str) -> None:
    with closing(administrator.store.open(run_id)) as client:
        client.put("key", b"value")
        administrator.rotate(hand_out=False)
        with pytest.raises(AccessDeniedError):
            client.get("key")
        with pytest.raises(AccessDeniedError):
            administrator.store.open(run_id)


# Several hosts of Redis are Sentinels, see test_sentinel_security, or a Cluster, of whose nodes the
# one counts that was asked last.
@only_on(*GRANTS.keys() - {"redis"})
def test_one_server_refuses_and_another_is_away(administrator: Administrator, run_id: str) -> None:
    host = "{}:{}".format(*administrator.store.address)
    endpoint = administrator.store.endpoint.replace(host, f"127.0.0.1:1,{host}")
    store = replace(administrator.store, endpoint=endpoint)
    with closing(store.open(run_id, request_timeout=2)) as client:
        client.put("key", b"value")
        administrator.rotate(hand_out=False)
        with pytest.raises(AccessDeniedError):
            client.get("key")
        with pytest.raises(AccessDeniedError):
            store.open(run_id, request_timeout=2)


@pytest.mark.parametrize("how", ["stopped", pytest.param("killed", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", GUARDED, ids=lambda kind: kind.name)
def test_server_that_starts_again_denies_nobody(kind: Kind, run_id: str, how: str) -> None:
    """Whoever is refused may end its training: an outage must never look like a refusal."""
    security = Security(user="joe", password=str(uuid.uuid4()))
    with started(kind, security=security) as store:
        assert store.server is not None
        (node,) = store.server.nodes
        clients = [store.open(run_id, request_timeout=1) for _ in range(4)]
        told: list[Exception] = []
        ended = threading.Event()

        def ask(client: KeyValueClient) -> None:
            while not ended.is_set():
                try:
                    client.put("key", b"value")
                except RendezvousConnectionError as error:
                    told.append(error)

        asking = [Background(partial(ask, client)) for client in clients]
        try:
            for _ in range(3):
                node.stop() if how == "stopped" else node.kill()
                time.sleep(1.2)
                node.start()
                time.sleep(0.5)
        finally:
            ended.set()
            for client, thread in zip(clients, asking, strict=True):
                thread.result(20)
                client.close()
    assert told, "nobody noticed the outage"
    assert [error for error in told if isinstance(error, AccessDeniedError)] == []
