"""More nodes at once than this machine can serve within their lease: the load ends, and they form.

All beats come late here, since everybody works. If nodes were declared lost for that, or leaders
deposed, each loss would make everybody work again, and no round would ever form.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.synchronize import Event
from typing import Any

import pytest

from rdzv_plugins import servers
from tests import Measure

PROCESSES = 4
# Two cores that others use too took 15 to 30 s for the round: eight leases and more.
INTERVAL = 0.6
# From the start of the processes; 30 to 80 s were seen, as busy as the machine was.
SECONDS = 240.0


def _host(endpoint: str, nodes: int, start: Event, results: Any) -> None:
    """One process with its share of the nodes, each in its own thread."""
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

    from rdzv_plugins.handler import create_handler

    os.environ["RDZV_PLUGINS_LOG_LEVEL"] = "ERROR"
    # Hundreds of threads that wait for the interpreter ask for it every 5 ms by default.
    sys.setswitchinterval(0.05)
    options = {
        "keep_alive_interval": str(INTERVAL),
        "last_call_timeout": "0.1",
        "join_timeout": str(SECONDS),
    }
    handlers = [
        create_handler(
            "redis",
            RendezvousParameters(
                "redis", endpoint, "overload", nodes, nodes, local_addr="127.0.0.1", **options
            ),
        )
        for _ in range(nodes // PROCESSES)
    ]
    gc.freeze()
    found: queue.SimpleQueue[tuple[int, int] | str] = queue.SimpleQueue()

    def join(handler: Any) -> None:
        try:
            info = handler.next_rendezvous()
            found.put((info.rank, info.world_size))
        except Exception as error:
            found.put(repr(error))

    results.put("ready")
    start.wait()
    for handler in handlers:
        threading.Thread(target=join, args=(handler,), daemon=True).start()
    results.put([found.get() for _ in handlers])
    time.sleep(SECONDS)  # Until it is killed: nodes that end would disturb those that still form.


# With other tests beside it the load does not end, and 2,048 nodes did not always form within the
# time.
@pytest.mark.parametrize("nodes", [768, pytest.param(2048, marks=pytest.mark.soak)])
@pytest.mark.timeout(SECONDS + 60)
def test_nodes_form_though_their_lease_is_too_short(nodes: int, record_property: Measure) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    deadline = time.monotonic() + SECONDS
    with servers.start("redis") as server, contextlib.ExitStack() as ends:
        for _ in range(PROCESSES):
            worker = context.Process(
                target=_host,
                args=(server.endpoint, nodes, start, results),
                daemon=True,
            )
            worker.start()
            ends.callback(worker.join)
            assert worker.pid is not None
            ends.callback(os.kill, worker.pid, signal.SIGKILL)
        for _ in range(PROCESSES):
            assert results.get(timeout=deadline - time.monotonic()) == "ready"
        began = time.monotonic()
        start.set()
        found = [
            one
            for _ in range(PROCESSES)
            for one in results.get(timeout=deadline - time.monotonic())
        ]
        took = time.monotonic() - began
    record_property("formed", f"{nodes} nodes with a lease of {3 * INTERVAL:g} s in {took:.1f} s")
    assert sorted(map(str, found)) == sorted(str((rank, nodes)) for rank in range(nodes))
