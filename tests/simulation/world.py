"""One seed, from the first host's start to the settled end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NoReturn

from rdzv_plugins.decisions import Rules
from rdzv_plugins.documents import STATE_KEY, NodeRecord, Phase, RoundDocument, Wants
from rdzv_plugins.kv import Entry
from rdzv_plugins.node import Node

from .faults import FAULTS, end_faults
from .host import Agent, Host
from .invariants import Checker, Evidence, InvariantError, show
from .kernel import Kernel
from .network import Network
from .plan import FASTEST, LONG_JOIN, QUIET_AFTER, Plan
from .store import Store

__all__ = ["Result", "World", "bound", "simulate"]

_AMBUSHED, _MOST_AMBUSHES = 0.2, 6
_LOOK = 0.5
"""Seconds between two looks at whether the run has settled."""


@dataclass(slots=True)
class Result:
    """What became of a seed.

    Attributes:
        violation: the invariant that failed, and how; None: all held.
        settled: seconds from the end of the faults until the run stood still.
        bound: within which it had to.
        injected: faults by kind.
    """

    seed: int
    violation: str | None = None
    settled: float = 0.0
    bound: float = 0.0
    requests: int = 0
    rounds: int = 0
    given: int = 0
    checks: int = 0
    excused: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


def bound(plan: Plan) -> float:
    """Seconds after the last fault within which the run must stand still."""
    slowest = plan.rates[0]
    settling = (8 * plan.rules.lease + plan.rules.last_call) / slowest + 2 * plan.stop + 10
    if plan.join_timeout == LONG_JOIN:
        return settling
    # Until then nodes that have waited in vain still go, and others come in their place.
    return settling + plan.join_timeout / slowest


class World:
    """The hosts of a run and all that lies between them."""

    def __init__(self, plan: Plan, build: type[Node], traced: bool) -> None:
        self.plan = plan
        self.build = build
        self.chance = random.Random(~plan.seed)
        self.kernel = Kernel()
        self.store = Store(lambda: self.kernel.now, plan.staleness > 0)
        self.network = Network(self)
        changes = any(fault.kind == "clock changes its rate" for fault in plan.faults)
        fastest = FASTEST if changes else plan.rates[1]
        self.checker = Checker(lambda: self.kernel.now, plan.rules, fastest, plan.staleness)
        self.hosts: list[Host] = []
        self.started = 0
        self.requests = 0
        self.rounds = 0
        self.rounds_given = 0
        self.injected: Counter[str] = Counter()
        self.trace: list[str] = []
        self._traced = traced
        self._ambushes = _MOST_AMBUSHES
        self._decoded: dict[bytes, NodeRecord] = {}

    def note(self, text: str) -> None:
        if self._traced:
            self.trace.append(f"{self.kernel.now:8.3f}  {text}")

    def inject(self, kind: str) -> None:
        self.injected[kind] += 1

    @property
    def document(self) -> RoundDocument | None:
        """As it stands in the store."""
        entry = self.store.entries.get(STATE_KEY)
        return RoundDocument.decode(entry.value) if entry else None

    @property
    def join_timeout(self) -> float:
        """Seconds on its own clock that a node which starts now waits for a round.

        Giving up early is a fault of the launcher's. Where a run needs all its nodes, and each is
        away for a second now and then, the moment at which all are there may never come.
        """
        return LONG_JOIN if self.network.quiet else self.plan.join_timeout

    @property
    def closed(self) -> bool:
        document = self.document
        return document is not None and document.phase is Phase.CLOSED

    @property
    def concerned(self) -> list[Host]:
        """Live hosts but those that saw this run closed before it was submitted again."""
        return [host for host in self.hosts if host.alive and not _knows_the_end(host)]

    def decode(self, entry: Entry) -> NodeRecord:
        record = self._decoded.get(entry.value)
        if record is None:
            record = self._decoded[entry.value] = NodeRecord.decode(entry.value)
        return record

    def start(self, address: str | None = None, rules: Rules | None = None) -> None:
        """A new process joins."""
        self.started += 1
        name = f"n{self.started}"
        foreign = " with other --nnodes" if rules else ""
        self.note(f"{name} starts{foreign}")
        host = Host(self, name, address or f"host{self.started}", rules or self.plan.rules)
        self.hosts.append(host)

    def start_again(self, address: str) -> None:
        """The launcher restarts a process that ended."""
        self.kernel.after(self.chance.uniform(0.0, 1.0), self._start_unless_closed, address)

    def _start_unless_closed(self, address: str) -> None:
        if not self.closed:
            self.start(address)

    def sweep(self) -> None:
        """The store drops a closed run."""
        self.store.forget()

    def wrote(
        self, host: Host, before: Entry | None, after: RoundDocument, evidence: Evidence
    ) -> None:
        was = RoundDocument.decode(before.value) if before else None
        self.note(f"{host.id} writes {show(after)} ({after.reason})")
        self.rounds += after.phase is Phase.RUNNING
        self.checker.wrote(host.id, was, after, evidence, self.store.epoch)
        if self.plan.ambush and self._ambushes and self.chance.random() < _AMBUSHED:
            soon = self.kernel.now + self.chance.uniform(0, 4 * self.plan.latency)
            if soon < QUIET_AFTER:
                self._ambushes -= 1
                self.kernel.at(soon, self._befall, self.plan.ambush)

    def violated(self, invariant: str, what: str) -> NoReturn:
        raise InvariantError(invariant, what)

    def live(self) -> float:
        """Live through the seed; returns how long the run took to stand still."""
        plan, kernel = self.plan, self.kernel
        for _ in range(plan.nodes):
            kernel.at(self.chance.uniform(0, plan.arrival), self.start)
        for fault in plan.faults:
            kernel.at(fault.at, self._befall, fault.kind)
        kernel.run(QUIET_AFTER)
        end_faults(self)
        limit, still = bound(plan), (plan.rules.lease + 2) / plan.rates[0]
        since, place = kernel.now, (-1, 0)
        # A document that keeps changing is no end, even if each is a good one.
        while kernel.now < since + still:
            kernel.run(kernel.now + _LOOK)
            document = self.document
            was, place = place, document.place if document else (-1, 0)
            why = self._unsettled() or ("" if was == place else "the round still changes")
            if why:
                since = kernel.now
            if since > QUIET_AFTER + limit:
                raise InvariantError("gets going", f"after {limit:.0f} s without faults {why}")
        return since - QUIET_AFTER

    def _befall(self, kind: str) -> None:
        self.inject(kind)
        FAULTS[kind](self)

    def _unsettled(self) -> str:
        """What keeps the run from standing still; empty: nothing."""
        document = self.document
        alive = self.concerned
        if document is not None and document.phase is Phase.CLOSED:
            waiting = [host.id for host in self.hosts if host.agent is Agent.JOINING]
            return f"{' '.join(waiting)} still join a closed run" if waiting else ""
        if not alive:
            return ""
        if document is None:
            return "there is no document"
        if document.phase is not Phase.RUNNING:
            return f"there is only {show(document)}"
        present = {node for node in document.participants if node not in document.lost}
        world = document.round, document.participants
        if document.lost and self.plan.rules.restart_on_loss:
            return f"{show(document)} goes on"
        for host in alive:
            if host.id in present:
                if host.agent is not Agent.RUNNING or host.track.world != world:
                    return f"{host.id} is {host.agent} in {show(document)}"
            elif host.agent is not Agent.JOINING or host.node.record.wants is not Wants.SPARE:
                return f"{host.id} is {host.agent} outside {show(document)}"
        dead = present - {host.id for host in alive}
        if dead:
            return f"{' '.join(sorted(dead))} is dead in {show(document)}"
        if len(alive) > len(present) and len(present) < document.max_nodes:
            return f"there is room for spares in {show(document)}"
        return ""


def _knows_the_end(host: Host) -> bool:
    """It has seen a run of this id closed, which has been submitted again since."""
    latest = host.node.latest
    return latest is not None and latest.phase is Phase.CLOSED and host.agent is not Agent.JOINING


def simulate(
    seed: int, most_nodes: int = 12, build: type[Node] = Node, traced: bool = False
) -> Result:
    """Live through one seed.

    Args:
        seed: the same seed and code give the same run, step by step.
        most_nodes: upper bound of the hosts that start the run.
        build: whose code it is.
        traced: whether to write down what happens.
    """
    plan = Plan.draw(seed, most_nodes)
    world = World(plan, build, traced)
    result = Result(seed, bound=bound(plan))
    try:
        result.settled = world.live()
    except InvariantError as violation:
        result.violation = str(violation)
        world.note(f"VIOLATED {violation}")
    result.requests, result.rounds = world.requests, world.rounds
    result.given, result.checks = world.rounds_given, world.checker.checks
    result.excused, result.injected = world.checker.excused, world.injected
    result.trace = world.trace
    return result
