"""A rank 0 that cannot open its TCPStore gives the rank up; real handlers, an in-memory store."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousInfo

from rdzv_plugins.kv import (
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.process.factory import rules_of
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background

pytestmark = pytest.mark.rule("a fresh MASTER")

SETTINGS = Settings(keep_alive_interval=0.2, last_call_timeout=0, join_timeout=20)
NODES = 3

Make = Callable[..., StoreRendezvousHandler]


@pytest.fixture
def make() -> Iterator[Make]:
    server = MemoryServer()
    made: list[StoreRendezvousHandler] = []

    def open_handler(
        address: str = "127.0.0.1", interval: float = 0.2, nodes: int = NODES
    ) -> StoreRendezvousHandler:
        settings = dataclasses.replace(SETTINGS, keep_alive_interval=interval)
        handler = StoreRendezvousHandler(
            MemoryClient(server, "run"),
            Archive(partial(MemoryClient, server), "run", history_ttl=0.0),
            "run",
            rules_of(settings, nodes, nodes),
            settings,
            address,
        )
        made.append(handler)
        return handler

    yield open_handler
    for handler in made:
        handler.shutdown()


def begin(handlers: list[StoreRendezvousHandler]) -> list[Background[RendezvousInfo]]:
    return [Background(handler.next_rendezvous) for handler in handlers]


def never(_: str) -> str:
    raise RendezvousConnectionError("nothing opens here")


def test_a_node_that_fails_for_a_lease_lets_another_be_rank_0(make: Make) -> None:
    unable, *able = handlers = [make(f"127.0.0.{place}") for place in (1, 2, 3)]
    unable._driver._open_master = never
    infos = [joined.result(20) for joined in begin(handlers)]
    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert infos[0].rank != 0, "it was rank 0 all the same"
    assert able[0]._masters._servers or able[1]._masters._servers


def test_a_node_that_hangs_lets_another_be_rank_0_and_beats(make: Make) -> None:
    hung, go_on = threading.Event(), threading.Event()

    def hang(_: str) -> str:
        hung.set()
        go_on.wait(20)
        return "127.0.0.1:1"

    handlers = [make(f"127.0.0.{place}") for place in (1, 2, 3)]
    handlers[0]._driver._open_master = hang
    joined = begin(handlers)
    assert hung.wait(10)
    before = handlers[0]._node.record.beat
    assert until(lambda: handlers[0]._node.record.beat >= before + 2, 5), "its beat stands still"
    assert not go_on.is_set()
    infos = [each.result(20) for each in joined]
    go_on.set()
    assert infos[0].rank != 0
    assert {info.world_size for info in infos} == {NODES}


def test_a_node_with_a_late_tcpstore_and_a_slow_store_is_woken(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing the round takes longer than rank 0 waits for its TCPStore, which opens after that."""
    alone = make(interval=60.0, nodes=1)
    opens, written = threading.Event(), threading.Event()
    replace, real = alone._driver._client.compare_and_set, alone._driver._open_master

    def slowly(*arguments: Any) -> Any:
        try:
            return replace(*arguments)
        finally:
            if opens.is_set():
                time.sleep(0.1)
                written.set()

    def late(world_id: str) -> str:
        opens.set()
        written.wait(20)
        time.sleep(0.2)
        return real(world_id)

    monkeypatch.setattr(alone._driver._client, "compare_and_set", slowly)
    alone._driver._open_master = late
    (joined,) = begin([alone])
    # Not only when its time to join is over.
    assert joined.result(SETTINGS.join_timeout / 2).world_size == 1


def test_where_none_can_they_are_asked_again(make: Make) -> None:
    """Each has its turn, and none is out for good: the fault may pass."""
    tries: list[str] = []
    handlers = [make(f"127.0.0.{place}") for place in (1, 2, 3)]
    for handler in handlers:
        real = handler._driver._open_master

        def late(world_id: str, real: Callable[[str], str] = real) -> str:
            tries.append(world_id)
            if len(set(tries)) <= NODES:
                raise RendezvousConnectionError("not yet")
            return real(world_id)

        handler._driver._open_master = late
    infos = [joined.result(20) for joined in begin(handlers)]
    assert {info.world_size for info in infos} == {NODES}
    assert len(set(tries)) == NODES + 1


def test_an_address_of_another_host_ends_the_join_at_once(make: Make) -> None:
    # A link's address without the link is nobody's.
    handlers = [make(f"fe80::{place}") for place in (1, 2, 3)]
    joined = begin(handlers)
    with pytest.raises(RendezvousStateError, match="--local-addr"):
        joined[0].result(5)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_the_server_is_reached_under_every_kind_of_address(make: Make, address: str) -> None:
    if ":" in address:
        try:
            socket.create_server((address, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this host has no IPv6")
    handlers = [make(address) for _ in range(NODES)]
    infos = [joined.result(20) for joined in begin(handlers)]
    for info in infos:
        master = info.bootstrap_store_info
        assert master is not None
        assert master.master_addr == address
        socket.create_connection((master.master_addr, master.master_port), 5).close()
