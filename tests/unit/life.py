"""A node driven by hand, request by request, over the in-memory store."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from rdzv_plugins.kv import (
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.process.driver import perform
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.contact import Standing
from rdzv_plugins.protocol.documents import STATE_KEY, NodeRecord, RoundDocument, Status
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.progress import NoSteps, Progress
from rdzv_plugins.protocol.rules import Rules

NAMESPACE = "run"


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Reports(NoSteps):
    """Workers whose steps a test tells: ``found``."""

    found: Progress | None = None

    def progress(self) -> Progress | None:
        return self.found


class Life:
    """Drives one node by hand, over the in-memory store.

    Attributes:
        workers: the workers of this node.
        down: the store is away for this node, or fails with ``error``.
        fails: which requests fail besides.
        told, said: the lines of its log: warnings, and others.
        links: where it has links to, by node.
        standing: what it says over them.
        master: what opening a TCPStore comes to; None: it never ends.
        dials: what a dial of another node comes to: seconds, or why it failed; None: it never ends.
    """

    def __init__(
        self,
        name: str,
        server: MemoryServer,
        time: Time,
        rules: Rules,
        seed: int = 1,
        domain: str | None = None,
    ) -> None:
        self.client = MemoryClient(server, NAMESPACE)
        self.archive = archive(server)
        self.time = time
        self.down = False
        self.error: RendezvousConnectionError | None = None
        self.fails: Callable[[effects.Effect[Any]], bool] = lambda request: False
        self.last_word_fails: Exception | None = None
        self.master: str | Exception | None = "host:1"
        self.dials: Callable[[effects.DialPeer], float | Exception | None] = lambda request: 0.01
        self.links: dict[str, str] = {}
        self.standing = Standing.ACCEPTED
        self.log: list[str] = []
        self.told: list[str] = []
        self.said: list[str] = []
        self.outcomes: list[effects.JoinOutcome] = []
        record = NodeRecord(
            address=name, pid=1, beat=0, status=Status.JOIN, round=-1,
            min_nodes=rules.min_nodes, max_nodes=rules.max_nodes,
            interval=rules.interval, lease=rules.lease, domain=domain,
            port=4711 if rules.network_check else 0,
            link=4711 if rules.answer_timeout is not None else 0,
        )  # fmt: skip
        self.workers = Reports()
        chance = random.Random(seed)
        self.node = Node(name, record, rules, 60.0, time, chance, time, self.workers)
        self.node.inbox.join()
        self.life = self.node.run()
        self.request: effects.Effect[Any] = next(self.life)

    def join_again(self) -> None:
        """What the driver does; the workers of this node failed if nobody told it to."""
        self.outcomes.clear()
        self.node.inbox.join(failed=self.node.num_nodes_waiting == 0)
        self.send(None)

    def go(self) -> list[str]:
        """Carry requests out until it waits; returns the names of what it asked."""
        already = len(self.log)
        while not self.waits():
            self.answer()
        return self.log[already:]

    def wake(self) -> list[str]:
        """End the wait, its time having passed."""
        assert isinstance(self.request, effects.Park | effects.Rest)
        # Time always moves between two looks at a real clock.
        self.time.now += self.request.seconds + 1e-6
        self.send(None)
        return self.go()

    def carry_out(self, work: Generator[effects.Effect[Any], Any, object]) -> list[str]:
        """Drive other requests than the life's."""
        names: list[str] = []
        answer = None
        while True:
            try:
                request = work.send(answer)
            except StopIteration:
                return names
            if not isinstance(request, effects.Tell):
                names.append(_name(request))
            answer = self._perform(request)

    def waits(self) -> bool:
        if isinstance(self.request, effects.Rest):
            return True
        if not isinstance(self.request, effects.Park) or self.down or self.fails(self.request):
            return False
        entry = self.client.get(self.request.key)
        return entry is None or entry.version == self.request.version

    def answer(self) -> None:
        if not isinstance(self.request, effects.Tell):
            self.log.append(_name(self.request))
        try:
            answer = self._perform(self.request)
        except (RendezvousConnectionError, RendezvousStateError) as error:
            self.request = self.life.throw(error)
        else:
            self.send(answer)

    def send(self, answer: Any) -> None:
        self.request = self.life.send(answer)

    def _perform(self, request: effects.Effect[Any]) -> Any:
        match request:
            case effects.FinishJoin(outcome):
                return self.outcomes.append(outcome)
            case effects.Register():
                return None
            case effects.KeepLinks(peers, standing):
                self.links, self.standing = dict(peers), standing
                return None
            case effects.Tell(_, text):
                return (self.told if request.warns else self.said).append(text)
            case effects.Begin():
                if (result := self._result_of(request)) is not None:
                    self.node.finished(request, result)
                return None
        leaves = isinstance(request, effects.PutRecord) and request.record.status is Status.LEFT
        if leaves and self.last_word_fails:
            raise self.last_word_fails
        if self.down or self.fails(request):
            raise self.error or RendezvousConnectionError("down")
        if isinstance(request, effects.ReadExclusions):
            return self.archive.exclusions(self.time())
        return perform(self.client, self.archive, request)

    def _result_of(self, begun: effects.Begin) -> Any:
        match begun:
            case effects.OpenMaster():
                return self.master
            case effects.DialPeer():
                return self.dials(begun)


def _name(request: effects.Effect[Any]) -> str:
    key = getattr(request, "key", getattr(request, "prefix", ""))
    if isinstance(request, effects.Begin):
        key = ""
    return f"{type(request).__name__} {key}".strip()


def archive(server: MemoryServer) -> Archive:
    """The archive of the run id that all lives share."""
    return Archive(partial(MemoryClient, server), NAMESPACE, history_ttl=3600.0)


def sweep(server: MemoryServer) -> None:
    """What `Expire` comes to once its time has passed."""
    MemoryClient(server, NAMESPACE).expire(0)


RULES = Rules(min_nodes=2, max_nodes=2, lease=3.0, interval=1.0, last_call_timeout=0.0)


def finish(leader: Life, joiner: Life) -> None:
    """Let both go until both run."""
    for _ in range(10):
        joiner.go()
        leader.go()
        if leader.outcomes and joiner.outcomes:
            joiner.go()
            return
        if isinstance(leader.request, effects.Rest):
            leader.wake()
    raise AssertionError("no round")


def stored(life: Life) -> RoundDocument:
    entry = life.client.get(STATE_KEY)
    assert entry is not None
    return RoundDocument.decode(entry.value)
