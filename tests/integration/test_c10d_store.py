"""The c10d store on a real Redis: torch's helpers for agents, and process groups of trainers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    PrefixStore,
)
from torch.distributed.elastic.utils import store as elastic

from rdzv_plugins import servers
from rdzv_plugins.backends import open_client
from rdzv_plugins.store import KeyValueStore

T = TypeVar("T")
WORLD = 3


@pytest.fixture(scope="module")
def server() -> Iterator[servers.LocalServer]:
    with servers.start("redis") as started:
        yield started


@pytest.fixture
def stores(server: servers.LocalServer) -> Iterator[list[KeyValueStore]]:
    """The store as each of the nodes of one run sees it, over a connection of its own."""
    run = uuid.uuid4().hex
    clients = [open_client("redis", server.endpoint, run) for _ in range(WORLD)]
    yield [KeyValueStore(client, "store/0/", timedelta(seconds=30)) for client in clients]
    for client in clients:
        client.close()


def on_each(stores: list[KeyValueStore], call: Callable[[int, KeyValueStore], T]) -> list[T]:
    """What the call returns for each rank, all ranks at once."""
    with ThreadPoolExecutor(len(stores)) as pool:
        return [*pool.map(call, range(len(stores)), stores, timeout=60)]


def test_torchs_own_test_of_python_stores(stores: list[KeyValueStore]) -> None:
    # Private; it alone reaches a Python store from C++ threads as process groups do.
    dist._test_python_store(stores[0])  # type: ignore[attr-defined]


def test_barrier(stores: list[KeyValueStore]) -> None:
    passed: list[int] = []

    def late(rank: int, store: KeyValueStore) -> None:
        if rank == WORLD - 1:
            # The others are at the barrier once they have all been counted.
            while store.add("b/num_members", 0) < WORLD - 1:
                time.sleep(0.01)
            assert not passed
        elastic.barrier(store, WORLD, "b", barrier_timeout=30)
        passed.append(rank)

    on_each(stores, late)
    assert sorted(passed) == [*range(WORLD)]


def test_a_barrier_that_one_rank_misses_names_it(stores: list[KeyValueStore]) -> None:
    def wait(rank: int, store: KeyValueStore) -> str:
        with pytest.raises(DistStoreError) as caught:
            elastic.barrier(
                store, WORLD, "b", 3, rank, lambda missing: f"node-{missing}", trace_timeout=0.2
            )
        return str(caught.value)

    messages = on_each(stores[: WORLD - 1], wait)
    assert "missing_ranks=[node-2]" in messages[0]
    assert "check rank 0 (node-0)" in messages[1]


def test_get_all(stores: list[KeyValueStore]) -> None:
    def share(rank: int, store: KeyValueStore) -> list[bytes]:
        store.set(f"data{rank}", f"of {rank}")
        return [*elastic.get_all(store, rank, "data", WORLD)]

    assert on_each(stores, share) == [[b"of 0", b"of 1", b"of 2"]] * WORLD


@pytest.mark.parametrize("wrapped", [False, True])
def test_synchronize(stores: list[KeyValueStore], wrapped: bool) -> None:
    def share(rank: int, store: KeyValueStore) -> list[bytes]:
        return elastic.synchronize(
            PrefixStore("agents", store) if wrapped else store,
            bytes([rank, 255]), rank, WORLD, "sync", timeout=30,
        )  # fmt: skip

    assert on_each(stores, share) == [[b"\x00\xff", b"\x01\xff", b"\x02\xff"]] * WORLD
    assert stores[0].timeout == timedelta(seconds=30)  # type: ignore[attr-defined]


def test_a_large_value(stores: list[KeyValueStore]) -> None:
    value = os.urandom(2_000_000)
    stores[0].set("key", value)
    assert stores[1].get("key") == value


def test_a_server_that_dies_under_a_wait_is_told_in_one_line() -> None:
    with servers.start("redis") as server:
        client = open_client("redis", server.endpoint, "run", request_timeout=1.0)
        store = KeyValueStore(client, "store/0/")
        store.set("key", "x")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.wait, ["absent"], timedelta(seconds=60))
            server.nodes[0].kill()
            with pytest.raises(DistNetworkError, match=r"^redis at \S+ could not be reached .*$"):
                waiting.result(timeout=30)
        with pytest.raises(DistNetworkError):
            PrefixStore("p", store).get("key")
        client.close()


TRAINER = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from rdzv_plugins.backends import open_client
from rdzv_plugins.store import KeyValueStore

endpoint, run, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = KeyValueStore(open_client("redis", endpoint, run), "store/0/")
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(total, group=pair)
gathered = [None] * world
dist.all_gather_object(gathered, f"rank {rank}")
dist.monitored_barrier()
print(total.item(), gathered)
dist.destroy_process_group()
"""


def test_a_process_group_forms_over_it(server: servers.LocalServer) -> None:
    run = uuid.uuid4().hex
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    trainers = [
        subprocess.Popen(
            [sys.executable, "-c", TRAINER, server.endpoint, run, str(rank), str(WORLD)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        results = [trainer.communicate(timeout=100) for trainer in trainers]
    finally:
        for trainer in trainers:
            trainer.kill()
    names = "['rank 0', 'rank 1', 'rank 2']"
    expected = [f"12.0 {names}\n", f"12.0 {names}\n", f"6.0 {names}\n"]
    assert [printed for printed, _ in results] == expected, [errors for _, errors in results]
