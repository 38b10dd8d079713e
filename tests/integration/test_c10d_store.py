"""The c10d store on every real store: torch's helpers for agents, and trainers' process groups."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import timedelta
from typing import TypeVar

import pytest
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.utils import store as elastic

from rdzv_plugins.stores import open_client
from rdzv_plugins.torch.c10d_store import KeyValueStore
from tests import servers
from tests.integration import forked
from tests.integration.stores import KINDS, RunningStore

T = TypeVar("T")
WORLD = 3


@pytest.fixture
def stores(running_store: RunningStore, run_id: str) -> Iterator[list[KeyValueStore]]:
    """The c10d store as each node of one run sees it, over a connection of its own."""
    clients = [running_store.open(run_id) for _ in range(WORLD)]
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
        # Rank 0 has `trace_timeout` to hear of rank 1, whose wait must not begin much later.
        if rank == 0:
            store.wait(["b/num_members"])
        with pytest.raises(DistStoreError) as caught:
            elastic.barrier(
                store, WORLD, "b", 6, rank, lambda missing: f"node-{missing}", trace_timeout=2
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


@pytest.mark.parametrize("key", ["/", "//a", "a/", "a//b", "a b", "é", "a:b{c}", "..", "%2F"])
def test_keys_of_any_shape(stores: list[KeyValueStore], key: str) -> None:
    stores[0].set(key, "x")
    assert stores[1].get(key) == b"x"
    assert stores[2].list_keys() == [key]
    assert stores[1].delete_key(key)
    assert not stores[0].check([key])


def test_each_value_of_a_queue_is_given_once(stores: list[KeyValueStore]) -> None:
    each = 8

    def work(rank: int, store: KeyValueStore) -> list[bytes]:
        for number in range(each):
            store.queue_push("jobs", f"{rank}.{number}")
        return [store.queue_pop("jobs") for _ in range(each)]

    popped = on_each(stores, work)
    wanted = [b"%d.%d" % (rank, number) for rank in range(WORLD) for number in range(each)]
    assert sorted(value for values in popped for value in values) == wanted
    assert [store.queue_len("jobs") for store in stores] == [0] * WORLD
    for rank in range(WORLD):
        # Nobody sees two values of one rank in another order than they were pushed.
        for values in popped:
            own = [value for value in values if value.startswith(b"%d." % rank)]
            assert own == sorted(own)


def test_a_server_that_dies_under_a_wait_is_told_in_one_line() -> None:
    with servers.start("redis") as server:
        client = open_client("redis", server.endpoint, "run", request_timeout=1.0)
        store = KeyValueStore(client, "store/0/", timedelta(seconds=2))
        store.set("key", "x")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.wait, ["absent"], timedelta(seconds=5))
            server.nodes[0].kill()
            with pytest.raises(DistNetworkError, match=r"^redis at \S+ could not be reached .*$"):
                waiting.result(timeout=30)
        with pytest.raises(DistNetworkError):
            PrefixStore("p", store).get("key")
        client.close()


def test_an_outage_shorter_than_its_time_out_ends_no_wait() -> None:
    with servers.start("redis") as server, ThreadPoolExecutor(2) as pool:
        client = open_client("redis", server.endpoint, "run", request_timeout=0.5)
        store = KeyValueStore(client, "store/0/")
        waiting: Future[object] = pool.submit(store.get, "key")
        server.nodes[0].stop()
        writing: Future[object] = pool.submit(store.set, "key", "x")
        # Three times what one request may take.
        assert not wait_for([waiting, writing], 1.5).done
        server.nodes[0].start()
        assert (writing.result(30), waiting.result(30)) == (None, b"x")
        client.close()


TRAINER = """
import json
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from rdzv_plugins.stores import open_client
from rdzv_plugins.torch.c10d_store import KeyValueStore

backend, endpoint, config, run = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
rank, world = int(sys.argv[5]), int(sys.argv[6])
store = KeyValueStore(open_client(backend, endpoint, run, config), "store/0/")
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(total, group=pair)
gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
dist.all_gather(gathered, torch.tensor([rank]))
dist.monitored_barrier()
print(total.item(), *(each.item() for each in gathered))
dist.destroy_process_group()
"""


# On a store that pushes and on one that is polled; on all in the long run.
@pytest.mark.parametrize(
    "running_store",
    [
        pytest.param(
            kind,
            id=kind.name,
            marks=() if kind.name in ("redis", "dynamodb") else pytest.mark.soak,
        )
        for kind in KINDS
    ],
    indirect=True,
    scope="session",
)
def test_a_process_group_forms_over_the_store(running_store: RunningStore, run_id: str) -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    where = [running_store.backend, running_store.endpoint, json.dumps(dict(running_store.config))]
    program = [sys.executable, "-c", TRAINER, *where, run_id]
    with ThreadPoolExecutor(WORLD) as pool:
        train = [
            pool.submit(forked.run, [*program, str(rank), str(WORLD)], environ, 100)
            for rank in range(WORLD)
        ]
        results = [each.result() for each in train]
    expected = ["12.0 0 1 2\n", "12.0 0 1 2\n", "6.0 0 1 2\n"]
    assert [each.stdout for each in results] == expected, [each.stderr for each in results]
