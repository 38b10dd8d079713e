"""The rendezvous time of N nodes that join at once, on each store and on torch's own backends.

N handlers run in a few processes on one machine, so the result is mostly the CPU time of that
machine; real nodes have their own CPUs. The handlers are created and connected first. The time runs
from the common start until the last handler has its rank.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

from benchmarks.floors import FLOORS
from rdzv_plugins import servers

TORCH_OWN = ("c10d", "etcd-v2")
# The limit for one measurement; a run that needs longer has failed.
RENDEZVOUS_SECONDS = 60.0


@dataclass(frozen=True)
class Run:
    """One rendezvous to measure."""

    backend: str
    endpoint: str
    run_id: str
    nodes: int
    config: dict[str, str]


def make_handler(run: Run, is_host: bool) -> Any:
    if run.backend in FLOORS:
        return FLOORS[run.backend](run.endpoint, run.run_id, run.nodes)
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters

    config = dict(run.config)
    if run.backend == "c10d":
        config["is_host"] = str(is_host).lower()
    params = RendezvousParameters(
        run.backend,
        run.endpoint,
        run.run_id,
        run.nodes,
        run.nodes,
        local_addr="127.0.0.1",
        **config,
    )
    return rendezvous_handler_registry.create_handler(params)


def host(run: Run, share: int, first: bool, start: Event, results: Any) -> None:
    """One process with ``share`` handlers, each in its own thread."""
    # By default hundreds of waiting threads each request the interpreter every 5 ms. The resulting
    # 100,000 switches a second would dominate the measurement. Real nodes have one process each.
    sys.setswitchinterval(0.05)
    # The lines of hundreds of nodes in one terminal.
    os.environ.setdefault("RDZV_PLUGINS_LOG_LEVEL", "WARNING")
    handlers = [make_handler(run, first and index == 0) for index in range(share)]
    # A garbage collection over torch's modules takes 0.2 s and could fall into the measurement.
    gc.collect()
    gc.freeze()
    finished: list[tuple[float, int]] = []
    errors: list[str] = []
    go = threading.Event()

    def join(handler: Any) -> None:
        go.wait()
        try:
            info = handler.next_rendezvous()
            finished.append((time.monotonic(), info.rank))
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=join, args=(item,), daemon=True) for item in handlers]
    for thread in threads:
        thread.start()
    results.put(("ready", os.getpid()))
    start.wait()
    go.set()
    for thread in threads:
        thread.join()
    results.put(("done", (max((at for at, _ in finished), default=0.0), finished, errors)))
    # The parent kills this process: the time of closing is not measured.
    time.sleep(3600)


def measure(run: Run, processes: int) -> float | None:
    """Seconds until the last node had its rank; None if a node had none within the limit.

    Raises `RuntimeError` if a node's rendezvous failed.
    """
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    each, more = divmod(run.nodes, processes)
    shares = [share for index in range(processes) if (share := each + (index < more))]
    workers = []
    for index, share in enumerate(shares):
        worker = context.Process(
            target=host, args=(run, share, index == 0, start, results), daemon=True
        )
        worker.start()
        workers.append(worker)
        if run.backend == "c10d" and index == 0:
            # The first process hosts the TCPStore for the others.
            assert results.get(timeout=120)[0] == "ready"
    try:
        for _ in range(len(shares) - (run.backend == "c10d")):
            assert results.get(timeout=120)[0] == "ready"
        began = time.monotonic()
        start.set()
        ends: list[float] = []
        ranks: list[int] = []
        deadline = began + RENDEZVOUS_SECONDS
        for _ in shares:
            _, (end, finished, errors) = results.get(timeout=max(0.1, deadline - time.monotonic()))
            if errors:
                raise RuntimeError(f"{len(errors)} of {run.nodes} {run.backend}: {errors[0]}")
            ends.append(end)
            ranks += [rank for _, rank in finished]
        assert sorted(ranks) == list(range(run.nodes)), "the ranks are not 0..n-1"
        return max(ends) - began
    except queue.Empty:
        return None
    finally:
        for worker in workers:
            if worker.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
            worker.join()


@contextlib.contextmanager
def server_of(backend: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Start a server for the backend and yield its endpoint and options; stop it afterwards."""
    if backend == "c10d":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        yield f"127.0.0.1:{port}", {}
        return
    if backend == "etcd-v2":
        import etcd  # noqa: F401  # torch's backend needs this client; without it torch only warns.

        os.environ["ETCD_ENABLE_V2"] = "true"
    kind = {"etcd-v3": "etcd", "etcd-v2": "etcd"}.get(backend, backend)
    kind = "redis" if backend in FLOORS else kind
    with servers.start(kind) as server:
        os.environ.update(server.environ)
        endpoint = server.endpoint.partition("://")[2] if backend == "etcd-v2" else server.endpoint
        yield endpoint or server.endpoint, dict(server.config)


def show(seconds: float | None) -> str:
    return "not within 60 s" if seconds is None else f"{seconds * 1000:,.0f} ms"


def measure_new_run(
    backend: str, endpoint: str, config: dict[str, str], nodes: int, processes: int
) -> float | None:
    """Call `measure` with a new run id."""
    return measure(Run(backend, endpoint, uuid.uuid4().hex[:8], nodes, config), processes)
