"""Ten thousand nodes in one process, on one event loop, against a real server.

`protocol.node.Node` is a generator of requests, so a node needs no thread of its own. Here each one
is driven in a greenlet. `driver.perform` carries out its requests, as in a real agent, on the
store's own client, which is not changed either: it sends the same requests. Where the client would
wait for its socket, the greenlet gives way to asyncio's event loop.

What the swarm leaves out: threads and their switches; a handler's second connection, so that each
beat on Redis ends the node's wait for a change and begins another; the TCPStore of rank 0, whose
address is made up; the history of runs; torch, its agent and its workers. All nodes share one
processor, which one node of a real job has for itself: a round takes longer here than on 10,000
hosts. What the server and the leader do is the same while a round forms.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import resource
import secrets
import select
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import greenlet
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from benchmarks.usage import Meter, raise_client_limit
from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.kv.base import Limit, StoreClient, Wake
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.process.driver import perform
from rdzv_plugins.process.factory import rules_of
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.documents import NodeRecord, RoundDocument, Status
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.stores import client_class, opener
from tests import servers

__all__ = ["Swarm", "sample"]

T = TypeVar("T")

_SERVERS = {"etcd-v3": "etcd"}

_MASTER = "127.0.0.1:29500"
"""Said to be where rank 0's TCPStore is."""


class Swarm:
    """Nodes of one run, connected to a server; none has joined yet.

    Args:
        backend: as in ``--rdzv-backend``: a store whose client waits with `Limit.await_ready`
            (redis, etcd-v3, consul).
        config: as in ``--rdzv-conf``.
    """

    def __init__(
        self,
        backend: str,
        server: servers.LocalServer,
        nodes: int,
        config: dict[str, str] | None = None,
    ) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        raise_client_limit(server)
        self.server = server
        self.loop = asyncio.new_event_loop()
        self.main = greenlet.getcurrent()
        self._running: Member | None = None
        self._awaited = 0
        run_id = secrets.token_hex(4)
        params = RendezvousParameters(
            backend, server.endpoint, run_id, nodes, nodes, **{**server.config, **(config or {})}
        )
        base: Any = client_class(backend)
        # The first base gives way to the event loop where the second would block.
        client: Any = type("SwarmClient", (_GivesWay, base), {"swarm": self})
        self.settings, connect = opener(client, params)
        archive = Archive(connect, run_id, self.settings.history_ttl)
        self.members = [
            Member(self, connect(run_id), archive, self.settings, nodes, number)
            for number in range(nodes)
        ]

    def form(self, limit: float) -> dict[str, float] | None:
        """All nodes join at once; None: not all had a rank within ``limit`` seconds."""
        # A collection walks the objects of all nodes, for seconds; a real process has one node.
        gc.disable()
        self._awaited = len(self.members)
        meter = Meter(self.server)
        began = time.monotonic()
        for member in self.members:
            self.loop.call_soon(member.join)
        self.pass_time(limit)
        gc.enable()
        if self._awaited:
            return None
        used = meter.read()
        last = max(member.placed_at for member in self.members)
        spent = [member.spent for member in self.members]
        nodes = len(spent)
        sample = {
            "s": last - began,
            "node ms": 1000 * sum(spent) / nodes,
            "server s": used.seconds,
            "server ms a node": 1000 * used.seconds / nodes,
        }
        leaders = [member.spent for member in self.members if member.leads]
        if len(leaders) == 1:
            sample["leader ms"] = 1000 * leaders[0]
        if used.passed is not None:
            sample["bytes a node"] = used.passed / nodes
        return sample

    @property
    def is_one_world(self) -> bool:
        """Whether all nodes are in one round, with the ranks 0 to n-1."""
        documents = [it.document for it in self.members if it.document is not None]
        worlds = {(it.world_id, it.master) for it in documents}
        ranks = sorted(it.rank for it in self.members if it.document is not None)
        return len(worlds) == 1 and ranks == [*range(len(self.members))]

    def rest(self, seconds: float) -> dict[str, float]:
        """What the round that runs costs the server, while nothing happens."""
        meter, began = Meter(self.server), time.monotonic()
        self.pass_time(seconds)
        used = meter.read()
        each = len(self.members) * (time.monotonic() - began)
        sample = {"server us a node and s": 1e6 * used.seconds / each}
        if used.passed is not None:
            sample["bytes a node and s"] = used.passed / each
        return sample

    def close(self) -> None:
        """Close all connections; no node announces that it leaves."""
        for member in self.members:
            member.client.close()
        self.loop.close()

    def pass_time(self, seconds: float) -> None:
        """Run the event loop for so long, or until the last awaited node has its rank."""
        timer = self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()
        timer.cancel()

    # For the members.

    def resume(self, member: Member) -> None:
        """Let a node go on, in the event loop, until it waits again."""
        began, self._running = time.thread_time(), member
        try:
            member.life.switch()
        finally:
            self._running = None
            member.spent += time.thread_time() - began

    def give_way(self, seconds: float, fd: int | None = None, events: int = 0) -> bool:
        """In a node: wait for a socket, or so long; whether the socket is ready."""
        member = self._running
        assert member is not None
        ready = False

        def on_ready() -> None:
            nonlocal ready
            ready = True
            self.resume(member)

        timer = self.loop.call_later(seconds, self.resume, member)
        if fd is not None and events & select.POLLOUT:
            self.loop.add_writer(fd, on_ready)
        elif fd is not None:
            self.loop.add_reader(fd, on_ready)
        self.main.switch()
        timer.cancel()
        if fd is not None and events & select.POLLOUT:
            self.loop.remove_writer(fd)
        elif fd is not None:
            self.loop.remove_reader(fd)
        return ready

    @property
    def in_a_node(self) -> bool:
        """Whether a node runs now, which may give way; not while the clients connect."""
        return self._running is not None

    def placed(self) -> None:
        """A node has its rank, or has none for good."""
        self._awaited -= 1
        if not self._awaited:
            self.loop.stop()


class Member:
    """One node of the swarm.

    Attributes:
        spent: seconds of processor time.
        placed_at: when its join ended.
        document: the round in which it has a rank.
    """

    def __init__(
        self,
        swarm: Swarm,
        client: Any,
        archive: Archive,
        settings: Settings,
        nodes: int,
        number: int,
    ) -> None:
        self.client = client
        self.spent = self.placed_at = 0.0
        self.document: RoundDocument | None = None
        self._swarm = swarm
        self._archive = archive
        rules = rules_of(settings, nodes, nodes)
        record = NodeRecord(
            address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            pid=1,
            beat=0,
            status=Status.JOIN,
            round=-1,
            min_nodes=nodes,
            max_nodes=nodes,
            interval=rules.interval,
            lease=rules.lease,
        )
        chance = random.Random(secrets.randbits(64))
        self.node = Node(
            secrets.token_hex(8),
            record,
            rules,
            settings.join_timeout,
            time.monotonic,
            chance,
            time.time,
        )
        self.life = greenlet.greenlet(self._live, parent=swarm.main)

    @property
    def leads(self) -> bool:
        """Whether it leads the run."""
        return self.node.document is not None and self.node.document.leader == self.node.id

    @property
    def rank(self) -> int:
        """In its round."""
        assert self.document is not None
        return self.document.ranks[self.node.id]

    def join(self) -> None:
        """What the agent's ``next_rendezvous()`` orders."""
        self.node.inbox.join()
        self._swarm.resume(self)

    def _live(self) -> None:
        life = self.node.run()
        request = next(life)
        while True:
            try:
                answer = self._perform(request)
            except (RendezvousConnectionError, RendezvousStateError) as error:
                request = life.throw(error)
            else:
                request = life.send(answer)

    def _perform(self, request: effects.Effect[Any]) -> Any:
        match request:
            case effects.FinishJoin(outcome):
                self.placed_at, self.document = time.monotonic(), outcome.document
                self._swarm.placed()
            case effects.OpenMaster():
                self.node.finished(request, _MASTER)
            case effects.ReadExclusions():
                return ()
            case effects.Rest(seconds):
                self._swarm.give_way(seconds)
            case effects.Tell() | effects.RecordHistory() | effects.Register():
                pass
            case _:
                return perform(self.client, self._archive, request)
        return None


def sample(
    backend: str, nodes: int, limit: float, rest_seconds: float
) -> tuple[dict[str, float] | None, dict[str, float]]:
    """One round, and a while at rest, in a process of its own on a server of its own.

    The first is None if there was no round in time, or no memory.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_in_a_process, args=(theirs, backend, nodes, limit, rest_seconds), daemon=True
    )
    process.start()
    theirs.close()
    try:
        found: tuple[dict[str, float] | None, dict[str, float]] = ours.recv()
    except EOFError:
        return None, {}
    finally:
        process.kill()
        process.join()
        ours.close()
    return found


def _in_a_process(
    pipe: Connection, backend: str, nodes: int, limit: float, rest_seconds: float
) -> None:
    # Memory runs out in this process, not in others of the machine.
    free = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (free * 900, free * 900))
    with servers.start(_SERVERS.get(backend, backend)) as server:
        # The server compiles the store's scripts.
        first = Swarm(backend, server, 2)
        first.form(limit)
        first.close()
        swarm = Swarm(backend, server, nodes)
        formed = swarm.form(limit)
        if formed is None:
            pipe.send((None, {}))
            return
        if not swarm.is_one_world:
            raise RuntimeError(f"{nodes} nodes of a swarm are not in one world")
        # The leader tidies up after the round.
        swarm.pass_time(1.0)
        pipe.send((formed, swarm.rest(rest_seconds)))


class _GivesWay(StoreClient):
    """The first base of a store's client: it waits in the event loop, where another would block."""

    swarm: Swarm

    def __init__(self, *arguments: Any) -> None:
        self._wake = _Wake(self.swarm)
        super().__init__(*arguments)
        # The one connection too many: a node without threads makes one request at a time.
        idle = getattr(self, "_idle", None)
        if isinstance(idle, deque):
            while len(idle) > 1:
                idle.popleft().disconnect()

    def _call(self, request: Callable[[Limit], T], wake: Wake | None = None) -> T:
        # A request that has a `Wake` waits for its answer with it.
        return super()._call(request, wake or (self._wake if self.swarm.in_a_node else None))

    def _take_wake(self) -> Wake:
        return self._wake

    def _return_wake(self, wake: Wake) -> None:
        pass

    # Redis only: a wait that goes on over beats would need the second connection.

    def _begin_to_park(self, key: str, after: bytes, limit: Limit) -> Any:
        return self._base._begin_to_park(key, after, limit, limit.seconds)

    def _await_change(self, key: str, parked: Any, limit: Limit) -> Any:
        return self._base._await_change(key, parked, Limit(parked.until, limit.wake))

    @property
    def _base(self) -> Any:
        return super()


class _Wake(Wake):
    """Waits in the event loop; it has no descriptors, and nobody rings it."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.fd = -1
        self.rung = False

    def poll(self, seconds: float, fd: int | None = None, events: int = 0) -> dict[int, int]:
        ready = self._swarm.give_way(seconds, fd, events)
        return {fd: events} if ready and fd is not None else {}
