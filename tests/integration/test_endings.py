"""Which node may end a run, and what an ended run leaves to the next: real handlers on every store.

`tests/handlers/test_handlers.py` has more of these, on the in-memory store.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.testing import Proxy
from rdzv_plugins.testing.threads import Background, together
from tests.integration.agents import Run, exchange_roles, one_world, until
from tests.integration.forked import Forked
from tests.integration.stores import RunningStore

# Options of one node: a node that is cut off must not wait for its requests for long.
CUT_OFF = {"heartbeat_timeout": "1", "close_timeout": "20"}


@pytest.fixture
def run(running_store: RunningStore, run_id: str) -> Iterator[Run]:
    with Run(running_store, run_id) as run:
        yield run


@pytest.fixture
def proxy(running_store: RunningStore) -> Iterator[Proxy]:
    with running_store.proxy() as proxy:
        yield proxy


def fail(handler: StoreRendezvousHandler) -> bool:
    """What torch's launcher does when its agent raised."""
    try:
        raise RuntimeError("its workers failed")
    except RuntimeError:
        return handler.shutdown()


def test_a_node_that_was_cut_off_and_replaced_does_not_end_the_run(run: Run, proxy: Proxy) -> None:
    cut = run.handler_through(proxy.address, (2, 3), last_call_timeout="3", **CUT_OFF)
    joins = Background(lambda: exchange_roles(cut, cut.next_rendezvous()))
    others = [run.start((2, 3), last_call_timeout="3") for _ in range(2)]
    joins.result(30)
    until(lambda: all(agent.world is not None for agent in others), 30)
    proxy.refuse()
    until(one_world(others), 60)
    ends = Background(lambda: fail(cut))
    assert not ends.done(1)
    proxy.accept()
    ends.result(60)
    assert not any(agent.handler.is_closed() for agent in others)
    run.start((2, 3))
    until(one_world(run.agents), 60)


def test_a_node_that_comes_back_does_not_run_an_ended_run_again(run: Run, proxy: Proxy) -> None:
    away = run.handler_through(proxy.address, (1, 2), last_call_timeout="3", **CUT_OFF)
    other = run.handler((1, 2), last_call_timeout="3", closed_ttl="1")
    try:
        together([away.next_rendezvous, other.next_rendezvous])
        proxy.refuse()
        until(lambda: other.num_nodes_waiting() > 0, 30)
        Background(other.next_rendezvous).result(30)
        assert other.shutdown()
        until(run.is_swept, 60)
        proxy.accept()
        # It finds an empty store, and does not write its round back.
        until(away.is_closed, 60)
        assert run.is_swept()
        with pytest.raises(RendezvousClosedError):
            Background(away.next_rendezvous).result(30)
    finally:
        away.shutdown()
        other.shutdown()
    # The id is free: for others, and as another run.
    pair = [run.start((2, 2)) for _ in range(2)]
    until(one_world(pair), 60)


def test_a_death_just_after_release_holds_nobody_up(run: Run) -> None:
    """The others wait for a word of it in their exchange of roles."""
    # Whoever leads waits for the last of them, however long a request takes.
    silent = run.handler((1, 3), last_call_timeout="3")
    joins = Background(silent.next_rendezvous)
    others = [run.start((1, 3), last_call_timeout="3") for _ in range(2)]
    try:
        assert joins.result(30).world_size == 3
    finally:
        silent._driver.stop(5)
        silent._ended = True
        silent._release()
    until(one_world(others), 60)
    assert [agent.error for agent in others] == [None, None]


REQUEST_SECONDS = 3.0
# It leaves its three nodes open, and ends once each has missed the store for longer than a request
# may take.
UNENDED = f"""
import sys
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import together

endpoint, run_id = sys.argv[1:]
params = RendezvousParameters(
    "redis", endpoint, run_id, 3, 3, local_addr="127.0.0.1", keep_alive_interval=0.5,
    heartbeat_timeout={REQUEST_SECONDS},
)
nodes = [create_handler("redis", params) for _ in range(3)]
together([node.next_rendezvous for node in nodes], 30)
print("in", flush=True)
drivers = [node._driver for node in nodes]
assert until(lambda: min(it.outage_seconds for it in drivers) > {REQUEST_SECONDS}, 60)
print("away", flush=True)
"""


def test_a_process_does_not_wait_for_a_store_that_is_gone(
    store: RunningStore, run_id: str, tmp_path: Path
) -> None:
    assert store.server is not None
    log = tmp_path / "log"
    program = [sys.executable, "-c", UNENDED, store.endpoint, run_id]
    process = Forked(program, os.environ, log)
    try:
        until(lambda: "in" in log.read_text().splitlines(), 60)
        store.server.nodes[0].kill()
        until(lambda: "away" in log.read_text().splitlines(), 60)
        began = time.monotonic()
        assert process.wait(60) == 0
    finally:
        process.send_signal(signal.SIGKILL)
    # Three nodes would wait three times for their farewell.
    assert time.monotonic() - began < 2 * REQUEST_SECONDS
