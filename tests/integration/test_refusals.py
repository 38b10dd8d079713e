"""A store that refuses all nodes of a run, or one alone, or what they write.

Real servers, and agents without workers.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rdzv_plugins.testing import Proxy
from tests.integration.agents import Agent, Run, one_world, until
from tests.integration.credentials import ADMINISTRATORS, Administrator, administered
from tests.integration.stores import RunningStore, kind_of, started
from tests.integration.test_kubernetes import ADMIN, VERBS, Cluster, allow, await_rights, manifests
from tests.integration.test_kubernetes import KIND as KUBERNETES

# Longer than etcd takes for the log-ins of three nodes on a busy machine.
INTERVAL, LEASE = 1.0, 3.0
# A client asks again for 5 s, as a new secret may be on its way.
SOON = 15.0
READS = ["get", "list", "watch"]


class Door(ABC):
    """Which nodes a store lets in.

    Attributes:
        one, others: the store, as one node and as the others reach it.
    """

    one: RunningStore
    others: RunningStore

    @abstractmethod
    def shut(self, *, alone: bool = False) -> None:
        """Refuse all, or one alone."""

    @abstractmethod
    def open(self) -> None:
        """Let all in."""

    def shut_writes(self) -> None:
        """Refuse what any of them writes."""
        raise NotImplementedError


class Secrets(Door):
    """The secret is replaced; one node reads it from a file of its own."""

    def __init__(self, administrator: Administrator) -> None:
        self._administrator = it = administrator
        self._own = it.file.with_name("own")
        self.others = it.store
        self.one = replace(it.store, config={**it.store.config, it.option: str(self._own)})
        self.open()

    def shut(self, *, alone: bool = False) -> None:
        self._administrator.rotate(hand_out=alone)

    def open(self) -> None:
        self._administrator.hand_out()
        self._own.write_text(self._administrator.file.read_text())

    def shut_writes(self) -> None:
        self._administrator.forbid_to_write()


class Rights(Door):
    """Rights of Kubernetes' service account; one node has its own token, which is replaced."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._space = cluster.namespace("refusals")
        cluster.apply(self._space, manifests())
        await_rights(cluster, self._space, VERBS)
        self._own, self._common = folder / "own", folder / "token"
        self._common.write_text(cluster.token(self._space))
        self._own.write_text(self._common.read_text())
        config = {"ca_file": str(cluster.certificate), "namespace": self._space, "owner": "none"}
        self.one, self.others = (
            replace(cluster.store, config={**config, "token_file": str(file)})
            for file in (self._own, self._common)
        )

    def shut(self, *, alone: bool = False) -> None:
        if alone:
            self._own.write_text("of nobody")
        else:
            allow(self._cluster, self._space, ["delete"])

    def open(self) -> None:
        self._own.write_text(self._common.read_text())
        allow(self._cluster, self._space, VERBS)

    def shut_writes(self) -> None:
        allow(self._cluster, self._space, READS)


class Refuses(BaseHTTPRequestHandler):
    """What an S3 answers to a user who has no rights."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    def _refuse(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _refuse  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


class Gates(Door):
    """Before a bucket, one for each kind of user; a refused one is answered in its place."""

    def __init__(self, store: RunningStore, stack: ExitStack) -> None:
        self._store = store
        self._gates = [stack.enter_context(store.proxy()) for _ in range(2)]
        self.one, self.others = (
            replace(store, config=store.config_at(gate.address)) for gate in self._gates
        )
        self._refuses = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
        threading.Thread(target=self._refuses.serve_forever, daemon=True).start()
        stack.callback(self._refuses.shutdown)

    def shut(self, *, alone: bool = False) -> None:
        host, port = self._refuses.server_address[:2]
        self._lead((str(host), port), self._gates[: 1 if alone else 2])

    def open(self) -> None:
        self._lead(self._store.address, self._gates)

    def _lead(self, to: tuple[str, int], gates: list[Proxy]) -> None:
        for gate in gates:
            gate.lead_to(to)
            gate.cut()


@contextmanager
def door_of(name: str, folder: Path) -> Iterator[Door]:
    with ExitStack() as stack:
        if name == "kubernetes":
            store = stack.enter_context(started(KUBERNETES, security=ADMIN))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for variable in ("USER", "PASSWORD", "TOKEN"):
                patch.delenv(f"RDZV_PLUGINS_{variable}", raising=False)
            yield Rights(Cluster(store), folder)
        elif name == "s3":
            kind = kind_of(name)
            yield Gates(stack.enter_context(started(kind)), stack)
        else:
            (administrator,) = (it for it in ADMINISTRATORS if it.name == name)
            yield Secrets(stack.enter_context(administered(administrator, folder)))


@pytest.fixture
def door(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Door]:
    with door_of(request.param, tmp_path) as door:
        yield door


# ZooKeeper learns of a new password only as it starts again.
NAMES = [it.name for it in ADMINISTRATORS if it.name != "zookeeper"] + ["kubernetes", "s3"]
every_door = pytest.mark.parametrize(
    "door",
    [pytest.param(it, marks=() if it == "redis" else pytest.mark.soak) for it in NAMES],
    indirect=True,
)


@contextmanager
def trio(
    door: Door, run_id: str, least: int, **config: object
) -> Iterator[tuple[Agent, list[Agent]]]:
    """The agent that reaches the store by itself, and two others, in one round."""
    config["keep_alive_interval"] = INTERVAL
    options = {name: str(value) for name, value in config.items()}
    one, others = Run(door.one, run_id), Run(door.others, run_id)
    try:
        for run in (others, one, others):
            run.start((least, 3), **options)
        agents = [*one.agents, *others.agents]
        until(one_world(agents), 60)
        if config.get("links") != "false":
            until(lambda: all(map(is_linked, agents)), 60)
        yield one.agents[0], others.agents
    finally:
        for agent in (*one.agents, *others.agents):
            agent.crash()  # One that is refused could not say that it leaves.


def is_linked(agent: Agent) -> bool:
    """Whether it has a link to each of the others, and they to it."""
    links = agent.handler._links
    return links is not None and len(links._lines()) == 4


def unheard(agent: Agent) -> float:
    return agent.handler._node._contact.unheard


def stay(agents: list[Agent], seconds: float) -> None:
    """For so long nobody stops, or ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for agent in agents:
            assert agent.error is None
            assert len(agent.rounds) == 1
            assert agent.handler.num_nodes_waiting() == 0
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("door", "patience", "seconds"),
    [
        ("redis", 5, 7),
        *(pytest.param(name, 20, 30, marks=pytest.mark.soak) for name in NAMES),
    ],
    indirect=["door"],
)
def test_where_all_are_refused_nobody_stops_or_ends(
    door: Door, run_id: str, patience: float, seconds: float
) -> None:
    """For longer than a join may take: the store accepts nobody's round."""
    with trio(door, run_id, least=3, join_timeout=patience) as (one, others):
        agents = [one, *others]
        door.shut()
        stay(agents, seconds)
        assert min(map(unheard, agents)) > seconds / 2
        door.open()
        until(lambda: all(agent.handler._driver.outage_seconds == 0 for agent in agents), 60)
        stay(agents, 2 * LEASE)


@every_door
def test_a_node_that_alone_is_refused_stops_after_its_lease(door: Door, run_id: str) -> None:
    with trio(door, run_id, least=1) as (one, others):
        stopped = len(one.rounds)
        until(lambda: unheard(one) < INTERVAL / 3, 10)
        heard = time.monotonic()
        door.shut(alone=True)
        until(lambda: one.handler._node._join.joining, 60)
        assert time.monotonic() - heard > LEASE - 1.1 * INTERVAL
        assert unheard(one) < LEASE + SOON
        until(one_world(others), 60)
        assert one.error is None
        assert len(one.rounds) == stopped
        door.open()
        until(one_world([one, *others]), 60)


@pytest.mark.parametrize(
    "door",
    [
        "redis",
        *(pytest.param(it, marks=pytest.mark.soak) for it in ("etcd-v3", "postgres", "kubernetes")),
    ],
    indirect=True,
)
def test_where_all_may_read_alone_nobody_stops(door: Door, run_id: str) -> None:
    """As with a role that may only read, or under a policy."""
    with trio(door, run_id, least=3, links="false") as (one, others):
        agents = [one, *others]
        door.shut_writes()
        stay(agents, 2 * LEASE)
        assert min(map(unheard, agents)) > LEASE
