"""What is mended in torch's own handler, and how our options reach it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from rdzv_plugins.kv import MemoryClient, MemoryServer
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.process.factory import _over
from rdzv_plugins.settings.endpoint import Place
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.torch import dynamic_handler
from rdzv_plugins.torch.dynamic_handler import MendedDynamicRendezvousHandler, create_torch_handler
from rdzv_plugins.torch.rendezvous_backend import KeyValueBackend

pytestmark = pytest.mark.usefixtures("cheap_method_names")

PARAMS = RendezvousParameters("redis", "", "run", 1, 1, local_addr="127.0.0.1")


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def handler(server: MemoryServer) -> Iterator[MendedDynamicRendezvousHandler]:
    client = MemoryClient(server, "run")
    created = create_torch_handler(PARAMS, Settings(), client, "127.0.0.1")
    yield created
    created._stop_heartbeats()


def test_the_handler_says_once_that_a_pickle_runs_in_the_agent(
    server: MemoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = MemoryClient(server, "run")
    archive = Archive(partial(MemoryClient, server), "run", 0.0)
    settings = Settings(handler="torch")
    created: Any = _over(client, archive, None, PARAMS, settings, "127.0.0.1", Place())
    try:
        created.next_rendezvous()
    finally:
        created._stop_heartbeats()
    assert sum("runs code on this node" in it for it in caplog.messages) == 1


def test_a_key_that_is_none_of_torchs_ends_no_round(
    handler: MendedDynamicRendezvousHandler, server: MemoryServer
) -> None:
    MemoryClient(server, "run").put("torch/torch.rendezvous.run.x/y", b"")
    handler._delete_past_rounds()


def master(info: RendezvousInfo) -> tuple[str, int]:
    assert info.bootstrap_store_info is not None
    return info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port


def test_torch_still_keeps_its_server_where_we_drop_it(
    handler: MendedDynamicRendezvousHandler,
) -> None:
    changed = "torch renamed what MendedDynamicRendezvousHandler.next_rendezvous must drop"
    assert "_bootstrap_store_info" in vars(handler), changed
    assert "_shared_tcp_store_server" in vars(handler), changed
    info = handler.next_rendezvous()
    assert handler._bootstrap_store_info is info.bootstrap_store_info, changed
    assert handler._shared_tcp_store_server is not None, changed
    assert handler._shared_tcp_store_server.port == master(info)[1], changed


def test_each_round_has_a_server_of_its_own(handler: MendedDynamicRendezvousHandler) -> None:
    masters = set()
    for _ in range(3):
        info = handler.next_rendezvous()
        assert handler._shared_tcp_store_server is not None
        # What the last round's workers left behind is not met again.
        assert not handler._shared_tcp_store_server.check(["left behind"])
        handler._shared_tcp_store_server.set("left behind", "x")
        masters.add(master(info))
    assert len(masters) == 3


def test_the_handler_goes_by_the_name_torch_asked_for(
    handler: MendedDynamicRendezvousHandler,
) -> None:
    assert handler.get_backend() == "redis"
    assert handler.get_run_id() == "run"
    assert handler.use_agent_store


beats_as_told = pytest.mark.skipif(
    not dynamic_handler.TAKES_KEEP_ALIVE,
    reason="this torch's handler cannot be told how often to beat",
)


@beats_as_told
def test_our_options_reach_torch_fractions_and_all(server: MemoryServer) -> None:
    settings = Settings(
        join_timeout=1.5, last_call_timeout=0, close_timeout=2.5, heartbeat_timeout=0.5,
        keep_alive_interval=0.25, keep_alive_max_attempt=7,
    )  # fmt: skip
    params = RendezvousParameters("redis", "", "run", 2, 4, local_addr="node-1")
    handler = create_torch_handler(params, settings, MemoryClient(server, "run"), "node-1")
    reached = handler.settings
    assert (reached.run_id, reached.min_nodes, reached.max_nodes) == ("run", 2, 4)
    assert reached.timeout.join == timedelta(seconds=1.5)
    assert timedelta() < reached.timeout.last_call < timedelta(milliseconds=1)
    assert reached.timeout.close == timedelta(seconds=2.5)
    assert reached.timeout.heartbeat == timedelta(seconds=0.5)
    assert reached.keep_alive_interval == timedelta(seconds=0.25)
    assert reached.keep_alive_max_attempt == 7
    assert handler._this_node.addr == "node-1"


def test_an_older_torch_refuses_what_it_cannot_be_told(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_backend(
        cls: type, run_id: str, store: object, backend: object, low: int, high: int,
        local_addr: str, timeout: object,
    ) -> object:  # fmt: skip
        return MendedDynamicRendezvousHandler.__new__(MendedDynamicRendezvousHandler)

    monkeypatch.setattr(dynamic_handler, "TAKES_KEEP_ALIVE", False)
    monkeypatch.setattr(DynamicRendezvousHandler, "from_backend", classmethod(from_backend))
    client = MemoryClient(server, "run")
    assert create_torch_handler(PARAMS, Settings(), client, "127.0.0.1")._client is client
    for settings in (Settings(keep_alive_interval=1), Settings(keep_alive_max_attempt=7)):
        with pytest.raises(ValueError, match="need a later torch, or handler=rdzv"):
            create_torch_handler(PARAMS, settings, client, "127.0.0.1")


def test_keys_of_rounds_long_past_are_deleted(
    server: MemoryServer, handler: MendedDynamicRendezvousHandler
) -> None:
    other = MemoryClient(server, "run")
    for number in range(4):
        handler.next_rendezvous().store.set("mark", str(number))
    marks = {key: entry.value for key, entry in other.list("").items() if key.endswith("/mark")}
    assert sorted(marks.values()) == [b"2", b"3"]
    assert other.get(KeyValueBackend.KEY) is not None


@beats_as_told
def test_shutdown_closes_the_run_and_the_client_and_frees_the_run_id(server: MemoryServer) -> None:
    settings = Settings(closed_ttl=1.0, keep_alive_interval=0.25)
    client = MemoryClient(server, "run")
    handler = create_torch_handler(PARAMS, settings, client, "127.0.0.1")
    handler.next_rendezvous()
    closed = time.monotonic()
    assert handler.shutdown()
    with pytest.raises(RendezvousConnectionError, match="closed"):
        client.get("key")
    latecomer = create_torch_handler(PARAMS, settings, MemoryClient(server, "run"), "127.0.0.1")
    with pytest.raises(RendezvousClosedError):
        latecomer.next_rendezvous()
    # The latecomer keeps nothing alive: the run's keys are gone after closed_ttl.
    observer = MemoryClient(server, "run")
    while observer.list("") and time.monotonic() < closed + 10:
        time.sleep(0.05)
    assert time.monotonic() >= closed + 1
    again = create_torch_handler(PARAMS, settings, MemoryClient(server, "run"), "127.0.0.1")
    assert again.next_rendezvous().world_size == 1
    again.shutdown()


def test_shutdown_closes_the_client_even_if_the_store_is_gone(server: MemoryServer) -> None:
    client = MemoryClient(server, "run")
    handler = create_torch_handler(PARAMS, Settings(), client, "127.0.0.1")
    client.close()
    assert not handler.shutdown()
