"""Real handlers of one run, in a few processes; each has a thread that stands for its agent.

The result is mostly the processor time of one machine; real nodes have their own processors. The
processes are forked from one that has imported torch, so that a run starts within milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from benchmarks.floors import FLOORS

__all__ = ["Crowd", "FailedError", "Run", "Worker", "World", "shares"]

# As torch's agent: how often it asks num_nodes_waiting().
_ASKS_EVERY = 0.1
# Between an order to join and the moment at which all processes carry it out.
_HEAD_START = 0.2
_START_SECONDS = 300.0


@dataclass(frozen=True)
class Run:
    """One run to measure.

    Attributes:
        backend: as in ``--rdzv-backend``, or a key of `FLOORS`.
        least, most: as in ``--nnodes``.
        config: as in ``--rdzv-conf``.
        environ: variables that a client needs to reach the server.
    """

    backend: str
    endpoint: str
    run_id: str
    least: int
    most: int
    config: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class World:
    """A round in which all nodes have their ranks.

    Attributes:
        at: when the last one had it, on the monotonic clock.
        ranks: of the nodes, in no order.
        worlds: of each node's round, the number of nodes and rank 0's address: one element.
        node: seconds of processor time since the order to join, of all nodes.
        leader: the same of the leader's thread since the handler began; None: not known.
        joins: how often each node has joined so far, in the order of `ranks`.
        leads: the processes in which a node leads.
    """

    at: float
    ranks: tuple[int, ...]
    worlds: frozenset[tuple[int, str]]
    node: float
    leader: float | None
    joins: tuple[int, ...]
    leads: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it is one world with the ranks 0 to n-1."""
        if len(self.worlds) != 1 or sorted(self.ranks) != [*range(len(self.ranks))]:
            return False
        return next(iter(self.worlds))[0] == len(self.ranks)


class FailedError(RuntimeError):
    """A handler raised an error."""


def shares(nodes: int, processes: int) -> list[int]:
    """How many nodes each process gets."""
    each, more = divmod(nodes, processes)
    return [share for index in range(processes) if (share := each + (index < more))]


class Worker:
    """A process, as the one that started it sees it."""

    def __init__(self, run: Run, share: int, first: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.crowd", "benchmarks.imports"])
        self.pipe, theirs = context.Pipe()
        self.share = share
        self.world: World | None = None
        self._process = context.Process(target=_host, args=(run, share, first, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, *command: Any) -> None:
        """Give an order."""
        try:
            self.pipe.send(command)
        except OSError:
            raise FailedError("a process with handlers has ended") from None

    def hear(self) -> None:
        """Take one message."""
        try:
            kind, what = self.pipe.recv()
        except (EOFError, OSError):
            raise FailedError("a process with handlers has ended") from None
        if kind == "failed":
            raise FailedError(what)
        if kind == "world":
            self.world = what

    def kill(self) -> None:
        """SIGKILL: its nodes say nothing."""
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Wait for the end of a process that was killed."""
        self._process.join()
        self.pipe.close()


class Crowd:
    """Processes with the handlers of a run, all connected, until `close`.

    Args:
        sizes: how many nodes each process has.
    """

    def __init__(self, run: Run, sizes: Sequence[int]) -> None:
        self.workers: list[Worker] = []
        try:
            for index, share in enumerate(sizes):
                self.workers.append(Worker(run, share, first=index == 0))
                if run.backend == "c10d" and index == 0:
                    # The first process hosts the TCPStore for the others.
                    self._await_ready(self.workers)
            others = self.workers[1:] if run.backend == "c10d" else self.workers
            self._await_ready(others)
        except BaseException:
            self.close()
            raise

    def join(self, workers: Iterable[Worker]) -> float:
        """Order all nodes of the processes to join at once; returns when that is."""
        at = time.monotonic() + _HEAD_START
        for worker in workers:
            worker.world = None
            worker.send("join", at)
        return at

    def watch(self, workers: Iterable[Worker]) -> None:
        """Let the agents ask for changes from now on, and join again when there are any."""
        for worker in workers:
            worker.send("watch")

    def leave(self, worker: Worker) -> None:
        """Let the process's last node leave, as at SIGTERM."""
        worker.share -= 1
        worker.send("leave")

    def kill(self, workers: Sequence[Worker]) -> None:
        """SIGKILL processes, all at once; their nodes are lost."""
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.end()
            self.workers.remove(worker)

    def settle(self, workers: Sequence[Worker], seconds: float) -> World | None:
        """Wait until all nodes of these processes are in one round; None: not within ``seconds``.

        Raises `FailedError` if a handler has failed.
        """
        nodes = sum(worker.share for worker in workers)
        deadline = time.monotonic() + seconds
        while True:
            worlds = [worker.world for worker in workers if worker.world is not None]
            if len(worlds) == len(workers):
                world = _joined(worlds)
                if world.is_whole and len(world.ranks) == nodes:
                    return world
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            ready = wait([worker.pipe for worker in workers], left)
            for worker in workers:
                if worker.pipe in ready:
                    worker.hear()

    def joins(self) -> dict[Worker, tuple[int, ...]]:
        """How often each node had joined when all of its process were in a round last."""
        return {it: it.world.joins for it in self.workers if it.world is not None}

    def close(self) -> None:
        """Kill all processes."""
        self.kill([*self.workers])

    def _await_ready(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if not worker.pipe.poll(_START_SECONDS):
                raise FailedError(f"no handlers within {_START_SECONDS:g} s")
            worker.hear()


def _joined(worlds: Sequence[World]) -> World:
    """What all processes say together."""
    leaders = [it.leader for it in worlds if it.leader is not None]
    return World(
        at=max(it.at for it in worlds),
        ranks=tuple(rank for it in worlds for rank in it.ranks),
        worlds=frozenset().union(*(it.worlds for it in worlds)),
        node=sum(it.node for it in worlds),
        leader=leaders[0] if len(leaders) == 1 else None,
        joins=tuple(joins for it in worlds for joins in it.joins),
        leads=tuple(index for index, it in enumerate(worlds) if it.leader is not None),
    )


# In the processes.


class _Agent:
    """A handler, and the thread that stands for torch's agent."""

    def __init__(self, host: _Host, handler: Any) -> None:
        self.handler = handler
        self.joining = False
        self.at = 0.0
        self.joins = 0
        self.place: tuple[int, int, str] | None = None
        self._host = host
        self._orders: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._live, daemon=True).start()

    def join(self) -> None:
        self.joining = True
        self.joins += 1
        self._orders.put(None)

    @property
    def told(self) -> bool:
        return not self.joining and bool(self.handler.num_nodes_waiting() > 0)

    @property
    def leader_seconds(self) -> float | None:
        """Processor time of the node's thread, if the node leads."""
        node = getattr(self.handler, "_node", None)
        if node is None or node.document is None or node.document.leader != node.id:
            return None
        clock = time.pthread_getcpuclockid(self.handler._driver._thread.ident)
        return time.clock_gettime(clock)

    def _live(self) -> None:
        while True:
            self._orders.get()
            try:
                self._has_joined(self.handler.next_rendezvous())
            except (Exception, SystemExit) as error:
                self._host.tell("failed", repr(error))
                return

    def _has_joined(self, info: Any) -> None:
        self.at = time.monotonic()
        master = getattr(info, "bootstrap_store_info", None)
        address = f"{master.master_addr}:{master.master_port}" if master is not None else ""
        self.place = info.rank, info.world_size, address
        self._host.joined(self)


class _Host:
    """One process with handlers."""

    def __init__(self, run: Run, share: int, first: bool, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._spent = 0.0
        handlers = [_make(run, first and index == 0) for index in range(share)]
        self._agents = [_Agent(self, handler) for handler in handlers]

    def tell(self, kind: str, what: Any = None) -> None:
        with self._lock:
            self._pipe.send((kind, what))

    def obey(self) -> None:
        """Carry out commands until the parent kills this process."""
        while True:
            match self._pipe.recv():
                case "join", at:
                    time.sleep(max(0.0, at - time.monotonic()))
                    self._spent = time.process_time()
                    for agent in self._agents:
                        agent.joining = True
                    for agent in self._agents:
                        agent.join()
                case ("watch",):
                    threading.Thread(target=self._watch, daemon=True).start()
                case ("leave",):
                    self._leave(self._agents.pop().handler)

    def joined(self, agent: _Agent) -> None:
        """A node has its rank; if all of this process have theirs, say so."""
        with self._lock:
            agent.joining = False
            agents = [*self._agents]
            if any(it.joining for it in agents):
                return
            places = [it.place for it in agents if it.place is not None]
            leaders = [seconds for it in agents if (seconds := it.leader_seconds) is not None]
            world = World(
                at=max(it.at for it in agents),
                ranks=tuple(rank for rank, _, _ in places),
                worlds=frozenset((size, address) for _, size, address in places),
                node=time.process_time() - self._spent,
                leader=leaders[0] if leaders else None,
                joins=tuple(it.joins for it in agents),
            )
            self._pipe.send(("world", world))

    def _watch(self) -> None:
        while True:
            time.sleep(_ASKS_EVERY)
            for agent in [*self._agents]:
                if agent.told:
                    agent.join()

    def _leave(self, handler: Any) -> None:
        def leave() -> None:
            try:
                raise SignalException("SIGTERM", signal.SIGTERM)
            except SignalException:
                handler.shutdown()

        threading.Thread(target=leave, daemon=True).start()


def _host(run: Run, share: int, first: bool, pipe: Connection) -> None:
    os.environ.update(run.environ)
    # By default hundreds of waiting threads each request the interpreter every 5 ms. The resulting
    # 100,000 switches a second would dominate the measurement. Real nodes have one process each.
    sys.setswitchinterval(0.05)
    # The lines of hundreds of nodes in one terminal.
    os.environ.setdefault("RDZV_PLUGINS_LOG_LEVEL", "ERROR")
    try:
        host = _Host(run, share, first, pipe)
    except Exception as error:
        pipe.send(("failed", repr(error)))
        return
    # A garbage collection over torch's modules takes 0.2 s and could fall into the measurement.
    gc.collect()
    gc.freeze()
    host.tell("ready")
    with contextlib.suppress(EOFError):
        host.obey()


def _make(run: Run, is_host: bool) -> Any:
    if run.backend in FLOORS:
        return FLOORS[run.backend](run.endpoint, run.run_id, run.most)
    config = dict(run.config)
    if run.backend == "c10d":
        config["is_host"] = str(is_host).lower()
    return rendezvous_handler_registry.create_handler(
        RendezvousParameters(
            run.backend,
            run.endpoint,
            run.run_id,
            run.least,
            run.most,
            local_addr="127.0.0.1",
            **config,
        )
    )
