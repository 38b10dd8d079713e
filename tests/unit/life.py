"""A node driven by hand, request by request, over the in-memory store."""

from __future__ import annotations

import random
from typing import Any

from rdzv_plugins import steps
from rdzv_plugins.decisions import Rules
from rdzv_plugins.documents import (
    STATE_KEY,
    NodeRecord,
    RoundDocument,
    Wants,
)
from rdzv_plugins.driver import perform
from rdzv_plugins.kv import (
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.node import Node


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Life:
    """Drives one node by hand, over the in-memory store."""

    def __init__(self, name: str, server: MemoryServer, time: Time, rules: Rules) -> None:
        self.client = MemoryClient(server, "run")
        self.time = time
        self.down = False
        self.last_word_fails: Exception | None = None
        self.log: list[str] = []
        self.outcomes: list[steps.Outcome] = []
        record = NodeRecord(
            address=name, pid=1, beat=0, wants=Wants.JOIN, round=-1,
            min_nodes=rules.min_nodes, max_nodes=rules.max_nodes,
        )  # fmt: skip
        self.node = Node(name, record, rules, 60.0, time, random.Random(1))
        self.node.order_join()
        self.life = self.node.run()
        self.request: steps.Request = next(self.life)

    def join_again(self) -> None:
        """What the driver does: order, and end the wait."""
        self.outcomes.clear()
        self.node.order_join()
        self.send(None)

    def go(self) -> list[str]:
        """Carry requests out until it waits; returns the names of what it asked."""
        already = len(self.log)
        while not self._waits():
            self.answer()
        return self.log[already:]

    def wake(self) -> list[str]:
        """End the wait, its time having passed."""
        assert isinstance(self.request, steps.Park | steps.Rest)
        # Time always moves between two looks at a real clock.
        self.time.now += self.request.seconds + 1e-6
        self.send(None)
        return self.go()

    def carry_out(self, work: steps.Steps) -> list[str]:
        """Drive other requests than the life's."""
        names: list[str] = []
        answer = None
        while True:
            try:
                request = work.send(answer)
            except StopIteration:
                return names
            names.append(_name(request))
            answer = self._perform(request)

    def _waits(self) -> bool:
        if isinstance(self.request, steps.Rest):
            return True
        if not isinstance(self.request, steps.Park) or self.down:
            return False
        entry = self.client.get(self.request.key)
        return entry is None or entry.version == self.request.version

    def answer(self) -> None:
        self.log.append(_name(self.request))
        try:
            answer = self._perform(self.request)
        except (RendezvousConnectionError, RendezvousStateError) as error:
            self.request = self.life.throw(error)
        else:
            self.send(answer)

    def send(self, answer: Any) -> None:
        self.request = self.life.send(answer)

    def _perform(self, request: steps.Request) -> Any:
        client = self.client
        if isinstance(request, steps.Deliver):
            return self.outcomes.append(request.outcome)
        leaves = isinstance(request, steps.PutRecord) and request.record.wants is Wants.LEFT
        if leaves and self.last_word_fails:
            raise self.last_word_fails
        if self.down:
            raise RendezvousConnectionError("down")
        return "host:1" if isinstance(request, steps.OpenMaster) else perform(client, request)


def _name(request: steps.Request) -> str:
    key = getattr(request, "key", getattr(request, "prefix", ""))
    return f"{type(request).__name__} {key}".strip()


RULES = Rules(min_nodes=2, max_nodes=2, lease=3.0, interval=1.0, last_call=0.0)


def finish(leader: Life, joiner: Life) -> None:
    """Let both go until both run."""
    for _ in range(10):
        joiner.go()
        leader.go()
        if leader.outcomes and joiner.outcomes:
            joiner.go()
            return
        if isinstance(leader.request, steps.Rest):
            leader.wake()
    raise AssertionError("no round")


def stored(life: Life) -> RoundDocument:
    entry = life.client.get(STATE_KEY)
    assert entry is not None
    return RoundDocument.decode(entry.value)
