"""One contract for torch's dynamic handler: over torch's own backend and over ours.

The stock handler must behave the same over both. It runs without TCPStore sharing, under which a
late node waits for ever for an address that rank 0 wrote in an earlier round; the mended handler
shares the TCPStore, as is torch's default, and must give each round one of its own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from rdzv_plugins import stores
from rdzv_plugins.kv import KeyValueClient, MemoryClient, MemoryServer
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.testing.harness import until
from rdzv_plugins.torch.c10d_store import KeyValueStore
from rdzv_plugins.torch.dynamic_handler import TAKES_KEEP_ALIVE, create_torch_handler
from rdzv_plugins.torch.rendezvous_backend import KeyValueBackend, create_backend
from tests import servers
from tests.integration.stores import RunningStore

pytestmark = pytest.mark.usefixtures("cheap_method_names")

KINDS = ["stock, c10d", "stock, redis", "mended, redis"]
OTHERS = ["stock, memory", "mended, memory"]
ADDRESS = "127.0.0.1"
STORE_TIMEOUT = timedelta(seconds=30)


def heartbeats(lease: int) -> dict[str, Any]:
    """Options for a lease of so many seconds; torch's handler polls once a second."""
    return {"keep_alive_interval": 1, "keep_alive_max_attempt": lease} if TAKES_KEEP_ALIVE else {}


@dataclass
class Run:
    """The nodes of one run, each a handler of its own with a connection of its own."""

    kind: str
    open: Callable[[str], KeyValueClient]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    handlers: list[DynamicRendezvousHandler] = field(default_factory=list)
    clients: list[KeyValueClient] = field(default_factory=list)
    tcp: list[TCPStore] = field(default_factory=list)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))

    def node(
        self,
        least: int,
        most: int,
        *,
        join_timeout: float = 30,
        last_call: float = 0.5,
        lease: int = 4,
    ) -> DynamicRendezvousHandler:
        beats = heartbeats(lease)
        settings = Settings(join_timeout=join_timeout, last_call_timeout=last_call, **beats)
        handler = self._open(least, most, settings, beats)
        self.handlers.append(handler)
        return handler

    def _open(
        self, least: int, most: int, settings: Settings, beats: dict[str, Any]
    ) -> DynamicRendezvousHandler:
        backend: RendezvousBackend
        if self.kind.startswith("mended"):
            params = RendezvousParameters("redis", "", self.id, least, most, local_addr=ADDRESS)
            return create_torch_handler(params, settings, self._client(), ADDRESS)
        store: TCPStore | KeyValueStore
        if self.kind == "stock, c10d":
            port = self.tcp[0].port if self.tcp else 0
            store = TCPStore(
                ADDRESS, port, is_master=not self.tcp, wait_for_workers=False, timeout=STORE_TIMEOUT
            )
            self.tcp.append(store)
            backend = C10dRendezvousBackend(store, self.id)
        else:
            client = self._client()
            store, backend = KeyValueStore(client, "store/", STORE_TIMEOUT), KeyValueBackend(client)
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            self.id, store, backend, least, most, ADDRESS,
            RendezvousTimeout(
                join=timedelta(seconds=settings.join_timeout),
                close=timedelta(seconds=100),
                last_call=timedelta(seconds=settings.last_call_timeout),
            ),
            **beats,
        )  # fmt: skip
        return handler

    def _client(self) -> KeyValueClient:
        self.clients.append(self.open(self.id))
        return self.clients[-1]

    def join(self, *handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
        """Their next round, joined all at once."""
        return [future.result(60) for future in [self.start(handler) for handler in handlers]]

    def start(self, handler: DynamicRendezvousHandler) -> Future[RendezvousInfo]:
        return self.pool.submit(handler.next_rendezvous)

    def end(self) -> None:
        """Close the run, which ends every node that still waits, and the connections."""
        for handler in self.handlers:
            handler.shutdown()
        self.pool.shutdown()
        for client in self.clients:
            client.close()


@pytest.fixture(scope="module")
def server() -> Iterator[servers.LocalServer]:
    with servers.start("redis") as started:
        yield started


@pytest.fixture(params=[*KINDS, *(pytest.param(it, marks=pytest.mark.full) for it in OTHERS)])
def run(
    server: servers.LocalServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    stock = request.param.startswith("stock")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1" if stock else "0")
    open_client: Callable[[str], KeyValueClient] = partial(MemoryClient, MemoryServer())
    if request.param.endswith("redis"):
        open_client = partial(stores.open_client, "redis", server.endpoint)
    opened = Run(request.param, open_client)
    yield opened
    opened.end()


@pytest.fixture
def mended(running_store: RunningStore) -> Iterator[Run]:
    """A run of the mended handler over each store in turn."""
    opened = Run("mended", running_store.open)
    yield opened
    opened.end()


def masters(infos: list[RendezvousInfo]) -> set[tuple[str, int]]:
    found = [info.bootstrap_store_info for info in infos]
    return {(info.master_addr, info.master_port) for info in found if info is not None}


def assert_one_world(infos: list[RendezvousInfo]) -> None:
    assert sorted(info.rank for info in infos) == [*range(len(infos))]
    assert {info.world_size for info in infos} == {len(infos)}
    infos[0].store.set("from the first", "x")
    assert {bytes(info.store.get("from the first")) for info in infos} == {b"x"}


def assert_one_new_master(
    run: Run, infos: list[RendezvousInfo], earlier: list[RendezvousInfo]
) -> None:
    (address,) = masters(infos)
    assert address not in masters(earlier)
    if run.kind.startswith("mended"):
        # The agent of rank 0 serves there, and no worker of another round has been there.
        server = TCPStore(*address, is_master=False, wait_for_workers=False)
        assert server.add("reached", 1) == 1


def test_a_round_forms_at_once_with_all_nodes(run: Run) -> None:
    infos = run.join(*(run.node(3, 3) for _ in range(3)))
    assert_one_world(infos)
    assert_one_new_master(run, infos, [])
    assert [handler.num_nodes_waiting() for handler in run.handlers] == [0, 0, 0]


def test_a_round_forms_with_the_minimum_after_the_last_call(run: Run) -> None:
    start = time.monotonic()
    infos = run.join(*(run.node(2, 4, last_call=2) for _ in range(2)))
    assert time.monotonic() - start >= 2
    assert_one_world(infos)


def test_below_the_minimum_nobody_gets_in(run: Run) -> None:
    alone = run.node(2, 2, join_timeout=2)
    with pytest.raises(RendezvousTimeoutError):
        alone.next_rendezvous()


def test_a_late_node_waits_until_the_others_join_again(run: Run) -> None:
    add_a_late_node(run)


def test_a_late_node_gets_in_on_every_store(mended: Run) -> None:
    add_a_late_node(mended)


def add_a_late_node(run: Run) -> None:
    # All three ask at once; the slowest needs some requests to leave its last round first.
    *early, newcomer = [run.node(2, 3, last_call=2) for _ in range(3)]
    before = run.join(*early)
    before[0].store.set("from an earlier round", "x")
    late = run.start(newcomer)
    assert until(lambda: [handler.num_nodes_waiting() for handler in early] == [1, 1], 15)
    assert not late.done()
    infos = [*run.join(*early), late.result(60)]
    assert_one_world(infos)
    assert not infos[0].store.check(["from an earlier round"])
    assert_one_new_master(run, infos, before)


def test_a_node_too_many_disturbs_nobody(run: Run) -> None:
    # On a busy machine torch needs seconds to close a run, and sends no heartbeat meanwhile.
    members = [run.node(2, 2, lease=60) for _ in range(2)]
    run.join(*members)
    spare = run.start(run.node(2, 2, lease=60))
    # Three polls of the spare's: it has registered by then, and must not count.
    deadline = time.monotonic() + 3.5
    while time.monotonic() < deadline:
        assert [handler.num_nodes_waiting() for handler in members] == [0, 0]
        assert not spare.done()
        time.sleep(0.1)
    members[0].set_closed()
    # torch's own error makes its launcher fail.
    mended = run.kind.startswith("mended")
    with pytest.raises(SystemExit if mended else RendezvousGracefulExitError) as ended:
        spare.result(60)
    assert not mended or ended.value.args == (0,)


def test_closing_is_seen_by_all_and_keeps_newcomers_out(run: Run) -> None:
    members = [run.node(2, 3) for _ in range(2)]
    run.join(*members)
    assert [handler.is_closed() for handler in members] == [False, False]
    members[0].set_closed()
    assert members[0].is_closed()
    assert until(members[1].is_closed, 15)
    with pytest.raises(RendezvousClosedError):
        run.node(2, 3).next_rendezvous()
    with pytest.raises(RendezvousClosedError):
        members[1].next_rendezvous()


def test_shutdown_closes_the_run(run: Run) -> None:
    members = [run.node(2, 2) for _ in range(2)]
    run.join(*members)
    assert members[0].shutdown()
    run.handlers.remove(members[0])
    assert until(members[1].is_closed, 15)


def test_the_survivors_of_a_lost_rank_0_form_a_round(run: Run) -> None:
    lose_rank_0(run)


def test_the_survivors_form_a_round_on_every_store(mended: Run) -> None:
    lose_rank_0(mended)


def lose_rank_0(run: Run) -> None:
    nodes = [run.node(2, 3) for _ in range(3)]
    before = run.join(*nodes)
    lost = next(node for node, info in zip(nodes, before, strict=True) if info.rank == 0)
    # Private: the handler of a dead process beats no more, and says nothing.
    lost._stop_heartbeats()
    run.handlers.remove(lost)
    infos = run.join(*(node for node in nodes if node is not lost))
    assert_one_world(infos)
    assert_one_new_master(run, infos, before)
    # The lost one comes back as a latecomer, not as the rank 0 it was.
    back = run.start(lost)
    assert until(lambda: run.handlers[0].num_nodes_waiting() == 1, 15)
    assert not back.done()


def test_a_handler_of_ones_own_over_each_store(running_store: RunningStore, run_id: str) -> None:
    """As torch's modules do it: a backend and a store, for `DynamicRendezvousHandler`."""
    backends, handlers = [], []
    for _ in range(2):
        params = RendezvousParameters(
            running_store.backend, running_store.endpoint, run_id, 2, 2, **running_store.config
        )
        backend, store = create_backend(params)
        backends.append(backend)
        handlers.append(
            DynamicRendezvousHandler.from_backend(run_id, store, backend, 2, 2, ADDRESS)
        )
    with ThreadPoolExecutor(2) as pool:
        worlds = [*pool.map(lambda handler: handler.next_rendezvous(), handlers)]
    assert sorted(world.rank for world in worlds) == [0, 1]
    worlds[0].store.set("key", b"value")
    assert worlds[1].store.get("key") == b"value"
    for handler, backend in zip(handlers, backends, strict=True):
        assert handler.shutdown()
        backend.close()
