"""What the nodes of a run do, and how long it takes: form, grow, leave, lose nodes, rest.

Each function takes one sample: a dict of what was measured, by its name and unit; None if the nodes
did not come to an end in time.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from benchmarks.counting import counted
from benchmarks.crowd import Crowd, FailedError, Run, Worker, shares
from benchmarks.floors import FLOORS
from benchmarks.usage import Meter, raise_client_limit
from rdzv_plugins.kv.findings import Finding
from rdzv_plugins.protocol.documents import NODES_PREFIX
from rdzv_plugins.stores import is_store, open_client
from tests import servers

__all__ = [
    "KILLED",
    "LIFE",
    "TORCH_OWN",
    "Sample",
    "Target",
    "count_bytes",
    "form",
    "killed",
    "late",
    "life",
    "rest",
    "started",
]

Sample: TypeAlias = dict[str, float]

TORCH_OWN = ("c10d", "etcd-v2")
LIFE = ("grow", "leave", "lose one", "lose the leader", "lose a third")
"""What `life` measures, in this order."""

KILLED = {"one": 1, "two at once": 2, "the leader": 0}
"""What `killed` kills, in this order, and how many of the nodes that do not lead."""

_SERVERS = {"etcd-v3": "etcd", "etcd-v2": "etcd"}
_BACKENDS = {"valkey": "redis"}
# Until the last nodes that were ordered to join wait in the store.
_QUIET = 0.5
_LEASE_ATTEMPTS = 3
# Until neighbours have their links, once a round runs.
_LINKED = 2.0


@dataclass(frozen=True)
class Target:
    """What is measured: a backend on a running server.

    Attributes:
        server: None for c10d, which has none.
        config: as in ``--rdzv-conf``.
    """

    backend: str
    endpoint: str
    server: servers.LocalServer | None = None
    config: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return is_store(self.backend)

    @property
    def version(self) -> str:
        """What the server says of itself, where the backend is one of this package."""
        if not self.is_ours or self.server is None:
            return ""
        with contextlib.closing(self._open("version")) as client:
            found: list[Finding] = [it for it in client.inspect() if it.what == "version"]
        return found[0].found if found else ""

    def run(self, least: int, most: int, **config: str) -> Run:
        """A run of its own."""
        return Run(
            self.backend,
            self.endpoint,
            uuid.uuid4().hex[:8],
            least,
            most,
            {**self.config, **config},
            dict(self.server.environ) if self.server is not None else {},
        )

    def count_records(self, run: Run) -> int:
        """How many nodes of a run have written their record."""
        with contextlib.closing(self._open(run.run_id)) as client:
            return len(client.list(NODES_PREFIX))

    def _open(self, run_id: str) -> Any:
        return open_client(self.backend, self.endpoint, run_id, self.config)


@contextlib.contextmanager
def started(subject: str, ensemble: int = 1) -> Iterator[Target]:
    """Start a server for a store, a floor or a backend of torch's; stop it afterwards."""
    if subject == "c10d":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        yield Target("c10d", f"127.0.0.1:{port}")
        return
    if subject == "etcd-v2":
        import etcd  # noqa: F401  # torch's backend needs this client; without it torch only warns.

        os.environ["ETCD_ENABLE_V2"] = "true"
    kind = "redis" if subject in FLOORS else _SERVERS.get(subject, subject)
    with servers.start(kind, nodes=ensemble, timeout=120) as server:
        os.environ.update(server.environ)
        raise_client_limit(server)
        endpoint = server.endpoint.partition("://")[2] if subject == "etcd-v2" else ""
        backend = _BACKENDS.get(subject, subject)
        yield Target(backend, endpoint or server.endpoint, server, dict(server.config))


def form(target: Target, nodes: int, processes: int, limit: float, **config: str) -> Sample | None:
    """All nodes join at once, until the last one has its rank."""
    run = target.run(nodes, nodes, **config)
    with contextlib.closing(Crowd(run, shares(nodes, processes))) as crowd:
        meter = Meter(target.server) if target.server is not None else None
        began = crowd.join(crowd.workers)
        world = crowd.settle(crowd.workers, limit)
        if world is None:
            return None
        sample = {"s": world.at - began, "node ms": 1000 * world.node / nodes}
        if world.leader is not None:
            sample["leader ms"] = 1000 * world.leader
        if meter is not None:
            used = meter.read()
            sample["server ms a node"] = 1000 * used.seconds / nodes
            if used.passed is not None:
                sample["bytes a node"] = used.passed / nodes
        return sample


def late(target: Target, nodes: int, processes: int, limit: float, **config: str) -> Sample | None:
    """All but one wait already: from the order to join of the last one."""
    run = target.run(nodes, nodes, **config)
    with contextlib.closing(Crowd(run, [*shares(nodes - 1, processes), 1])) as crowd:
        *others, last = crowd.workers
        crowd.join(others)
        _await_records(target, run, nodes - 1, limit)
        began = crowd.join([last])
        world = crowd.settle(crowd.workers, limit)
        return {"s": world.at - began} if world is not None else None


def life(
    target: Target, nodes: int, processes: int, limit: float, interval: float
) -> dict[str, Sample]:
    """What befalls a run, one after the other; by scenario, those of `LIFE` that came to an end.

    One more joins; a node leaves and says so; a node is killed; the leader is; a third of the nodes
    are at once, the leader not among them. Nodes are killed at a random moment between two of their
    heartbeats. A loss is measured from the end of the lease: the time from SIGKILL until the last
    node has its rank in the next round, less the lease. It can be negative, because the last
    heartbeat was sent before SIGKILL.
    """
    third = nodes // 3
    least = nodes - 2 - third
    config = {
        "keep_alive_interval": f"{interval:g}",
        "keep_alive_max_attempt": str(_LEASE_ATTEMPTS),
        # The rounds are to begin when the nodes are there: this wait is a setting, not a cost.
        "last_call_timeout": "0",
        # A loss is to be found by the lease, as that of a host is.
        "links": "false",
    }
    run = target.run(least, nodes + 1, **config)
    found: dict[str, Sample] = {}
    # As many nodes a process as the others have.
    shares_of_many = shares(third, max(1, processes // 2))
    sizes = [1, 1, 1, *shares_of_many, *shares(least, processes)]
    with contextlib.closing(Crowd(run, sizes)) as crowd:
        first, newcomer, one, *more = crowd.workers
        many, others = more[: len(shares_of_many)], more[len(shares_of_many) :]
        members = [first, one, *many, *others]
        crowd.watch(crowd.workers)
        # The first to come leads.
        crowd.join([first])
        _await_records(target, run, 1, limit)
        crowd.join([one, *many, *others])
        world = crowd.settle(members, limit)
        lease = _LEASE_ATTEMPTS * interval
        for scenario in LIFE:
            if world is None:
                return found
            if scenario.startswith("lose"):
                time.sleep(random.uniform(0, interval))
            before, began = crowd.joins(), time.monotonic()
            match scenario:
                case "grow":
                    members.append(newcomer)
                    began = crowd.join([newcomer])
                case "leave":
                    crowd.leave(others[0])
                case _:
                    lost = {"lose one": [one], "lose a third": many}.get(scenario, [first])
                    leads = [members[it] for it in world.leads]
                    if scenario == "lose the leader" and leads != [first]:
                        return found  # The lead has moved: there was more load than beats bore.
                    members = [it for it in members if it not in lost]
                    crowd.kill(lost)
            world = crowd.settle(members, limit + lease)
            if world is not None:
                seconds = world.at - began - (lease if scenario.startswith("lose") else 0.0)
                found[scenario] = {"s": seconds, "rounds": _rounds(before, crowd.joins())}
    return found


def killed(target: Target, nodes: int, processes: int, limit: float) -> Sample | None:
    """Seconds from SIGKILL of `KILLED` until the last of the others has its rank again.

    With the default keep-alive and with links, which tell of it; without a last call.
    """
    run = target.run(nodes - 4, nodes, last_call_timeout="0")
    found: Sample = {}
    with contextlib.closing(Crowd(run, [1, 1, 1, 1, *shares(nodes - 4, processes)])) as crowd:
        first, *others = crowd.workers
        members, dead = [*crowd.workers], iter(others)
        crowd.watch(members)
        # The first to come leads.
        crowd.join([first])
        _await_records(target, run, 1, limit)
        crowd.join(others)
        world = crowd.settle(members, limit)
        for whom in KILLED:
            if world is None or [members[it] for it in world.leads] != [first]:
                return None  # Too few came, or the lead has moved: there was too much load.
            time.sleep(_LINKED)
            lost = [next(dead) for _ in range(KILLED[whom])] or [first]
            members = [it for it in members if it not in lost]
            began = time.monotonic()
            crowd.kill(lost)
            world = crowd.settle(members, limit)
            if world is not None:
                found[f"{whom} s"] = world.at - began
    return found if len(found) == len(KILLED) else None


def _rounds(before: Mapping[Worker, Sequence[int]], after: Mapping[Worker, Sequence[int]]) -> float:
    """In how many rounds a node was that was there before: of the nodes, the most."""
    # The node that has left was the last one of its process.
    return max(
        late - early
        for worker, joins in after.items()
        for early, late in zip(before.get(worker, ()), joins, strict=False)
    )


def rest(
    target: Target, nodes: int, processes: int, limit: float, windows: int, seconds: float
) -> list[Sample]:
    """What the nodes of a round that runs cost, with the default interval; a sample a window."""
    assert target.server is not None
    found: list[Sample] = []
    with contextlib.closing(Crowd(target.run(nodes, nodes), shares(nodes, processes))) as crowd:
        crowd.join(crowd.workers)
        if crowd.settle(crowd.workers, limit) is None:
            return []
        # The leader tidies up after the round, and each record is read whole once more.
        time.sleep(max(_QUIET, seconds))
        for _ in range(windows):
            meter, began = Meter(target.server), time.monotonic()
            time.sleep(seconds)
            used = meter.read()
            each = nodes * (time.monotonic() - began)
            sample = {"server us a node and s": 1e6 * used.seconds / each}
            if used.passed is not None:
                sample["bytes a node and s"] = used.passed / each
            found.append(sample)
    return found


def count_bytes(target: Target, nodes: int, processes: int, limit: float) -> Sample | None:
    """The bytes of a round where the server does not count them: through a proxy that does."""
    assert target.server is not None
    ports = [node.port for node in target.server.nodes]
    with counted([("127.0.0.1", port) for port in ports]) as (proxies, counter):
        # A bucket's endpoint names no host; its url does.
        endpoint, url = target.endpoint, target.config.get("url", "")
        for port, (_, instead) in zip(ports, proxies, strict=True):
            endpoint, url = (it.replace(f":{port}", f":{instead}") for it in (endpoint, url))
        config = {"url": url} if url else {}
        run = replace(target.run(nodes, nodes, **config), endpoint=endpoint)
        with contextlib.closing(Crowd(run, shares(nodes, processes))) as crowd:
            before = counter.read()
            crowd.join(crowd.workers)
            if crowd.settle(crowd.workers, limit) is None:
                return None
            return {"bytes a node": (counter.read() - before) / nodes}


def _await_records(target: Target, run: Run, nodes: int, limit: float) -> None:
    """Until so many nodes wait in the store."""
    deadline = time.monotonic() + limit
    while target.is_ours and target.count_records(run) < nodes:
        if time.monotonic() >= deadline:
            raise FailedError(f"{nodes} nodes did not write their records within {limit:g} s")
        time.sleep(0.1)
    time.sleep(_QUIET)
