"""A short test of every store; the long ones run on a few in ``make test``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

from rdzv_plugins.kv import Entry
from tests.integration.agents import Run, one_world, until
from tests.integration.stores import RunningStore


def test_a_write_is_read_and_wakes_a_waiter(running_store: RunningStore, run_id: str) -> None:
    with ExitStack() as stack:
        writer, reader = (
            stack.enter_context(closing(running_store.open(run_id))) for _ in range(2)
        )
        first = writer.put("key", b"first")
        assert reader.get("key") == Entry(b"first", first)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        waiting = pool.submit(reader.wait, "key", first, 30)
        second = writer.put("key", b"second")
        assert waiting.result() == Entry(b"second", second)


def test_a_round_forms_again_when_a_node_leaves(running_store: RunningStore, run_id: str) -> None:
    with Run(running_store, run_id) as run:
        agents = [run.start((1, 2)) for _ in range(2)]
        until(one_world(agents), 30)
        agents.pop().leave()
        until(one_world(agents), 30)
