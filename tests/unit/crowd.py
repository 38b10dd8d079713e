"""Several nodes of one run on virtual time, over the in-memory store: each request takes 1 ms.

For faults that need many nodes and long times, and are told in a few lines. What nobody thought of
is the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rdzv_plugins.kv import MemoryClient, MemoryServer
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.contact import Standing
from rdzv_plugins.protocol.documents import STATE_KEY, RoundDocument
from rdzv_plugins.protocol.rules import Rules
from tests import replace
from tests.unit.life import NAMESPACE, Life, Time

__all__ = ["Crowd", "Member"]

_REQUEST = 0.001

_AT_ONCE = effects.FinishJoin | effects.KeepLinks | effects.Tell | effects.Begin


class Member(Life):
    """A node and its agent, which asks for another round whenever it is told to.

    Attributes:
        stops: seconds that its agent takes to stop its workers; None: it hangs.
        slow: seconds that a request takes.
        given: the rounds that its agent was given.
        failed: when and how its join failed, which ends its agent.
        others: what it heard last over its links.
    """

    stops: float | None = 0.1
    alive = True
    joining = True
    others: frozenset[Standing] = frozenset()

    def __init__(
        self,
        name: str,
        server: MemoryServer,
        time: Time,
        rules: Rules,
        seed: int,
        domain: str | None = None,
    ) -> None:
        self.slow: Callable[[effects.Effect[Any]], float] = lambda request: _REQUEST
        self.given: list[RoundDocument] = []
        self.failed: list[tuple[float, effects.JoinOutcome]] = []
        self.since = time.now
        self._asks_at: float | None = None
        super().__init__(name, server, time, rules, seed, domain)

    def crash(self) -> None:
        self.alive = False

    def leave(self) -> None:
        self.alive = False
        self.carry_out(self.node.farewell())

    def ask(self) -> None:
        """Its agent asks for a round: its workers failed, or it was told to."""
        self.joining, self._asks_at = True, None
        self.node.inbox.join()

    @property
    def due(self) -> float:
        """When this node does something next."""
        request, now = self.request, self.time.now
        if self._asks_at is not None and self._asks_at <= now:
            return now
        if isinstance(request, _AT_ONCE):
            return self.since
        if not isinstance(request, effects.Park | effects.Rest):
            return self.since + self.slow(request)
        if self.node.has_messages:
            return now
        if not self.waits():
            return self.since + _REQUEST
        ends = self.since + request.seconds + 1e-6
        return ends if self._asks_at is None else min(ends, self._asks_at)

    def step(self) -> None:
        if self._asks_at is not None and self._asks_at <= self.time.now:
            self.ask()
            return
        if isinstance(self.request, effects.Park | effects.Rest) and (
            self.node.has_messages or self.waits()
        ):
            self.send(None)
        else:
            self.answer()
        self.since = self.time.now
        for outcome in self.outcomes:
            self.joining = False
            if outcome.document is None:
                self.failed.append((self.time.now, outcome))
                self.alive = False
            else:
                self.given.append(outcome.document)
        self.outcomes.clear()
        told = not self.joining and self.node.num_nodes_waiting > 0
        if told and self._asks_at is None and self.stops is not None:
            self._asks_at = self.time.now + self.stops


class Crowd:
    """The nodes of one run."""

    def __init__(self, seed: int = 1) -> None:
        self.server = MemoryServer()
        self.time = Time()
        self.members: dict[str, Member] = {}
        self._seed = seed
        self._client = MemoryClient(self.server, NAMESPACE)

    def join(self, name: str, rules: Rules, domain: str | None = None) -> Member:
        self._seed += 1
        assert name not in self.members
        self.members[name] = Member(name, self.server, self.time, rules, self._seed, domain)
        return self.members[name]

    def begin(self, rules: Rules, *names: str) -> list[Member]:
        """Let these join, the first as the leader, and play until they are in one round."""
        members = []
        for name in names:
            members.append(self.join(name, rules))
            self.play(0.01)
        self.play_until(lambda: all(member.given for member in members), 60.0)
        return members

    def play(self, seconds: float) -> None:
        end = self.time.now + seconds
        while living := [member for member in self.members.values() if member.alive]:
            due, member = min(((each.due, each) for each in living), key=lambda pair: pair[0])
            if due > end:
                break
            self.time.now = max(self.time.now, due)
            member.step()
            self._talk()
        self.time.now = end

    def _talk(self) -> None:
        """Everybody hears what stands at the other ends of links."""
        members = self.members
        for name, member in members.items():
            ends = {*member.links, *(it for it, other in members.items() if name in other.links)}
            living = (it for it in ends if it in members and members[it].alive)
            missing = {Standing.ACCEPTED for it in member.links if not members[it].alive}
            others = frozenset(missing.union(members[it].standing for it in living))
            if member.alive and others != member.others:
                member.others = others
                member.node.neighbours.report_others(others)

    def play_until(self, condition: Callable[[], bool], seconds: float) -> float:
        """Play until this holds; returns the seconds that it took."""
        began = self.time.now
        while not condition():
            assert self.time.now < began + seconds, self.stored
            self.play(0.05)
        return self.time.now - began

    def forget_the_dead(self) -> None:
        """They cost a look each step."""
        self.members = {name: member for name, member in self.members.items() if member.alive}

    @property
    def stored(self) -> RoundDocument | None:
        entry = self._client.get(STATE_KEY)
        return RoundDocument.decode(entry.value) if entry else None

    @property
    def document(self) -> RoundDocument:
        document = self.stored
        assert document is not None
        return document

    def write(self, **changes: object) -> None:
        """Change the document behind everybody's back."""
        self._client.put(STATE_KEY, replace(self.document, **changes).encode())
