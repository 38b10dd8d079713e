"""From the kill of a node to the next step of all others: what a user waits for after a loss.

Three real agents, started as README starts them. Each has one worker that imports torch and
all-reduces over gloo every 50 ms. One node is killed, or its host falls silent.

Run as a program, in namespaces of its own, it plays the silent hosts, and prints a sample a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from benchmarks.rendezvous import Sample
from benchmarks.warm import is_ready
from rdzv_plugins.observe.history import Archive, Row
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.stores import open_client
from tests import servers
from tests.fleet.agents import RDZV_RUN, TORCHRUN, Fleet
from tests.integration.hosts import PROGRAM, Host, Network, in_namespaces

__all__ = [
    "NODES",
    "ON_HOSTS",
    "PHASES",
    "STORES",
    "TOLD",
    "TOTAL",
    "WARM",
    "Restarts",
    "silent_hosts",
]

STORES = ("redis", "quorum", "dynamodb")
ON_HOSTS = ("redis", "quorum")
"""The stores on which a silent host is measured too."""
WARM = (*RDZV_RUN, "--warm")
TOTAL = "kill to step"
PHASES = ("noticed", "stopped", "last call", "formed", "started", "first step")
"""The phases, in order; their sum is `TOTAL`."""
TOLD = "as told"
"""The sum of the phases as the run's history tells them."""

_NAMES = ("a", "b", "c")
NODES = len(_NAMES)
# As in README's example; but no host is quarantined for the many times that it is killed.
_NNODES, _CONFIG = "2:3", {"last_call_timeout": 1, "quarantine_after": 0}
# Neighbours need 2 s for their links; the kill comes at no fixed moment between two heartbeats.
_SETTLE, _SPREAD = 2.5, 1.0
_LIMIT = 120.0
_BUSY = f"import time\nend = time.monotonic() + {2 * _LIMIT}\nwhile time.monotonic() < end: pass"


@dataclass(frozen=True)
class Place:
    """Where the agents run: at three addresses of this host, or on three hosts."""

    addresses: Sequence[str] = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    hosts: Sequence[Host] = ()


class Restarts:
    """A run of three nodes, of which one after the other is killed; a context manager.

    Args:
        launcher: `RDZV_RUN`, `WARM` or `TORCHRUN`.
    """

    def __init__(
        self, store: str, launcher: Sequence[str] = RDZV_RUN, place: Place | None = None
    ) -> None:
        self._place = place or Place()
        self._killed = 0
        self._is_warm = launcher is WARM
        with ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix="rdzv-bench-")
            folder = Path(stack.enter_context(temporary))
            run_id, endpoint, config = uuid.uuid4().hex[:8], ",".join(self._place.addresses), {}
            if store != "quorum":
                server = stack.enter_context(_server(store, on_hosts=bool(self._place.hosts)))
                os.environ.update(server.environ)
                endpoint, config = server.endpoint, server.config
            opened = partial(open_client, store, endpoint, config=config, job=run_id)
            self._archive = Archive(opened, run_id, 0)
            self.fleet = Fleet(
                folder,
                backend=store,
                endpoint=endpoint,
                run_id=run_id,
                nodes=_NNODES,
                config={**config, **_CONFIG},
                environ={"GLOO_SOCKET_IFNAME": "eth1"} if self._place.hosts else {},
                # torchrun counts the failures that follow from a loss.
                max_restarts=1000 if launcher is TORCHRUN else None,
                training={"seconds": 24 * 3600},
                launcher=launcher,
            )
            stack.enter_context(self.fleet)
            self._stack = stack.pop_all()

    def __enter__(self) -> Restarts:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def sample(self, busy: int = 0) -> Sample:
        """Kill the next node, beside so many processes that compute; raises `TrainingError`.

        Seconds of `TOTAL`, of each of `PHASES`, and of `TOLD`; and how many rounds were formed.
        """
        self._make_whole()
        victim = _NAMES[self._killed % len(_NAMES)]
        self._killed += 1
        others = [it for it in _NAMES if it != victim]
        with _others_compute(busy):
            time.sleep(_SETTLE + random.uniform(0, _SPREAD))
            if self._place.hosts:
                self._place.hosts[_NAMES.index(victim)].cut()
            at, wall = time.monotonic(), time.time()
            self.fleet.agents[victim].kill()
            world = self.fleet.await_world(others, after=at, timeout=_LIMIT)
        resumed = max(
            it.at for it in self.fleet.events if it.master == world.master and it.event == "resume"
        )
        rows = self._rows_since(wall)
        return split(at, wall, rows, resumed, max(world.stepped.values()))

    def _make_whole(self) -> None:
        began = time.monotonic()
        for number, name in enumerate(_NAMES):
            if name in self.fleet.agents and self.fleet.agents[name].process.poll() is None:
                continue
            host = self._place.hosts[number] if self._place.hosts else None
            if host is not None:
                host.mend()
            within = host.within if host is not None else ()
            self.fleet.start(name, self._place.addresses[number], within=within)
        self.fleet.await_world(_NAMES, after=began, timeout=_LIMIT)
        for agent in self.fleet.agents.values() if self._is_warm else ():
            self.fleet.await_that(partial(is_ready, agent), "a standby", _LIMIT)

    def _rows_since(self, wall: float) -> list[Row]:
        """The rounds that formed after the kill, once the round of the others is among them."""

        def found() -> list[Row]:
            rows = [it for it in self._archive.rows() if it.phase is Phase.RUNNING and it.seconds]
            rows = [it for it in rows if _time_of(it) > wall]
            is_whole = rows and rows[-1].nodes == len(_NAMES) - 1 and rows[-1].trains_since
            return rows if is_whole else []

        return self.fleet.await_that(found, "the round in the run's history", _LIMIT)


def split(at: float, wall: float, rows: Sequence[Row], resumed: float, stepped: float) -> Sample:
    """The phases of a restart.

    Args:
        at, wall: when the node was killed, by the monotonic and by the wall clock.
        rows: the rounds since then; their times are by the wall clock.
        resumed: when the last worker had imported torch, and had its process group.
        stepped: when the last worker had taken its first step.
    """
    told = [row.seconds for row in rows if row.seconds is not None]
    first, last = told[0], told[-1]
    began = _time_of(rows[0]) - first.total
    formed = _time_of(rows[-1])
    called = formed - last.confirming - last.last_call
    phases = (
        began - wall,
        called - began,
        last.last_call,
        last.confirming,
        resumed - at - (formed - wall),
        stepped - resumed,
    )
    return {
        TOTAL: stepped - at,
        **dict(zip(PHASES, phases, strict=True)),
        TOLD: sum(sum(it.phases.values()) for it in told),
        "rounds": len(rows),
    }


def silent_hosts(store: str, kills: int) -> Iterator[Sample | None]:
    """Samples where the killed node's host falls silent; in namespaces of their own."""
    command = in_namespaces("benchmarks.restart", store, str(kills))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    yield None  # It has ended, with what it says on stderr.


def _server(store: str, *, on_hosts: bool) -> servers.LocalServer:
    if not on_hosts:
        return servers.start(store, timeout=120)
    security = servers.Security(password=uuid.uuid4().hex)
    return servers.start(store, host=f"10.1.0.{PROGRAM}", security=security)


def _time_of(row: Row) -> float:
    return datetime.fromisoformat(row.at).timestamp()


@contextlib.contextmanager
def _others_compute(number: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _play(store: str, kills: int) -> None:
    with Network(_NAMES, seconds=kills * 2 * _LIMIT) as network:
        addresses = [f"10.1.0.{host.number}" for host in network.hosts]
        with Restarts(store, place=Place(addresses, network.hosts)) as restarts:
            for _ in range(kills):
                sys.stdout.write(json.dumps(restarts.sample()) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    _play(sys.argv[1], int(sys.argv[2]))
