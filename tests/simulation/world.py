"""One seed, from the first host's start to the settled end."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NoReturn

from rdzv_plugins.kv import Entry, RendezvousStateError
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Exclusion,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.documents import Outcome as Ended
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.roster import complete
from rdzv_plugins.protocol.rules import Failure, Rules

from .connections import Connections
from .faults import FAULTS, end_faults, fail, part, refuse
from .host import Agent, Host
from .invariants import Checker, Evidence, InvariantError, show, world_of
from .kernel import Kernel
from .network import Network
from .orders import give
from .places import largest
from .plan import (
    EPOCH,
    EVERYTHING,
    FASTEST,
    OTHER_SETTINGS,
    QUIET_AFTER,
    SKEW,
    TORCH_TIMEOUT,
    Focus,
    Plan,
    settling,
)
from .store import Store
from .training import Trainings

__all__ = ["Result", "World", "bound", "simulate"]

_AMBUSHED, _MOST_AMBUSHES = 0.2, 6
_MOST_LAUNCHES = 3
_CLOSING = 5.0
"""Longest time in which a run is closed, when nothing fails."""
_LET_IN = 2.0
"""Seconds within which a node is let in whose exclusion has ended on each clock."""
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
        waited: the longest that a worker waited at a step for the run, in seconds.
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
    waited: float = 0.0
    trace: list[str] = field(default_factory=list)


def bound(plan: Plan) -> float:
    """Seconds after the last fault within which the run must stand still."""
    # Joins that cannot succeed end meanwhile: first the short ones, then those of the nodes started
    # in their places.
    ends = 2 * SKEW + 20.0 if plan.orders else 0.0
    if plan.rules.quarantine_after != 0:
        ends += 2 * SKEW + 2 * plan.rules.quarantine_window
    return settling(plan) + (plan.join_timeout + plan.long_join) / plan.rates[0] + ends


class World:
    """The hosts of a run and all that lies between them."""

    def __init__(self, plan: Plan, build: type[Node], traced: bool) -> None:
        self.plan = plan
        self.build = build
        self.chance = random.Random(~plan.seed)
        self.health = random.Random(f"checks of {plan.seed}")
        # For people who give orders; a source of its own: all else is as it would be without it.
        self.person = random.Random(f"orders given in {plan.seed}")
        # For the network between hosts.
        self.links = random.Random(f"links in {plan.seed}")
        # For the choice of agents and workers that fail besides.
        self.failures = random.Random(f"failures in {plan.seed}")
        # For the choice of nodes that the store refuses.
        self.refusals = random.Random(f"refusals in {plan.seed}")
        self.kernel = Kernel()
        self.store = Store(
            lambda: self.kernel.now, self.kernel.at, plan.staleness > 0, _has(plan, "fail-over")
        )
        self.network = Network(self)
        self.connections = Connections(self)
        # When a document first named each accusation, and what the store had lost by then.
        self._accused: dict[tuple[str, str, int], tuple[float, int]] = {}
        # When each round began to run.
        self._running_since: dict[str, float] = {}
        fastest = FASTEST if _has(plan, "clock changes its rate") else plan.rates[1]
        shortest = plan.rules.lease * (OTHER_SETTINGS[0] if plan.other_settings else 1.0)
        self.checker = Checker(
            lambda: self.kernel.now,
            plan.rules,
            fastest,
            plan.staleness,
            shortest,
            not _has(plan, "clock changes its rate"),
        )
        self.trainings = Trainings(lambda: self.kernel.now, self.violated)
        # What outlives runs, by host, and since when; nobody loses it.
        self.exclusions: dict[str, tuple[float, Exclusion]] = {}
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
        # All that were ever written, by key.
        self.shards: dict[str, Entry] = {}

    def note(self, text: str) -> None:
        if self._traced:
            self.trace.append(f"{self.kernel.now:8.3f}  {text}")

    def inject(self, kind: str) -> None:
        self.injected[kind] += 1

    @property
    def document(self) -> RoundDocument | None:
        """As it stands in the store; None also where nobody can read it."""
        entry = self.store.entries.get(STATE_KEY)
        try:
            return self.whole(RoundDocument.decode(entry.value)) if entry else None
        except RendezvousStateError:
            return None

    def whole(self, document: RoundDocument) -> RoundDocument:
        """The document with all nodes on which it counts, also where the store has lost them."""
        found = complete(document, self.shards, {})
        if not found.is_whole:
            self.violated("readable", f"nobody has written the roster of {document}")
        return found

    @property
    def join_timeout(self) -> float:
        """Seconds on its own clock that a node which starts now waits for a round.

        Giving up early is a fault of the launcher's. Where a run needs all its nodes, and each is
        away for a second now and then, the moment at which all are there may never come.
        """
        plan = self.plan
        return plan.long_join if self.network.quiet else plan.join_timeout or plan.long_join

    @property
    def closed(self) -> bool:
        document = self.document
        return document is not None and document.closed

    @property
    def usable(self) -> list[Host]:
        """Hosts that can be in a round, unless none of them can list records."""
        hosts = self._able
        return hosts if any(host.grey != "lists" for host in hosts) else []

    @property
    def _able(self) -> list[Host]:
        """Hosts that can be in a round, as far as others know: none sees that listings fail."""
        return [
            host
            for host in self.hosts
            if host.alive
            and not host.foreign
            and not host.wedged
            and host.agent is not Agent.BARRIER
            and not self._runs_on(host)
            and not self._is_excluded(host)
        ]

    def _is_excluded(self, host: Host, more: tuple[Exclusion, ...] = ()) -> bool:
        """Whether the clock of some host may say so; a quarantine ends where it must."""
        document = self.document
        held = (*(document.excluded if document is not None else ()), *more)
        now = EPOCH + self.kernel.now
        return any(it.host == host.address and it.is_in_force(now - 2 * SKEW) for it in held)

    def _runs_on(self, host: Host) -> bool:
        """Whether its workers go on in a run that is closed, and was not closed as failed."""
        if host.agent is not Agent.RUNNING or host.track.world is None:
            return False
        if self.checker.ended(host.track.world) in (Ended.SUCCEEDED, Ended.CLOSED):
            return True
        # The store lost the closing that it knows of, and the run was then closed as failed.
        known = host.node.latest
        if known is None or not known.closed or known.incarnation != host.track.world[0]:
            return False
        forgets = _has(self.plan, "fail-over") or _has(self.plan, "amnesia")
        return forgets and known.outcome in (Ended.SUCCEEDED, Ended.CLOSED)

    def _is_held(self, host: Host) -> bool:
        """Whether it is done, and waits for an agent that hangs, as torch does for 300 s."""
        document = self.document
        if host.agent is not Agent.BARRIER or document is None or host.id not in document.ranks:
            return False
        counted = {*document.participants} - {*document.absent}
        hung = (it for it in self.hosts if it.wedged and it.agent is Agent.STOPPING)
        return any(it.id in counted for it in hung)

    def domain(self, address: str) -> str | None:
        """Where the machine of this address is."""
        domains, number = self.plan.domains, int(address.removeprefix("host"))
        return domains[number % len(domains)] if domains else None

    def decode(self, entry: Entry) -> NodeRecord:
        record = self._decoded.get(entry.value)
        if record is None:
            record = self._decoded[entry.value] = NodeRecord.decode(entry.value)
        return record

    def start(self, address: str | None = None, rules: Rules | None = None) -> None:
        """A new process joins."""
        self.started += 1
        name = f"n{self.started}"
        chance, own = self.chance, rules or self.plan.rules
        if self.plan.other_settings and chance.random() < self.plan.other_settings:
            factor = chance.choice(OTHER_SETTINGS)
            own = replace(
                own,
                interval=factor * own.interval,
                lease=factor * own.lease,
                outage_limit=factor * own.outage_limit,
            )
            self.inject("other settings")
        if plan_without := self.plan.without_check:
            checks = self.links.random() >= plan_without
            own = replace(own, network_check=own.network_check and checks)
        if self.plan.without_links > self.connections.draw():
            own = replace(own, answer_timeout=None)
        foreign = " with other --nnodes" if rules else ""
        self.note(f"{name} starts{foreign}, a beat every {own.interval} s")
        self.hosts.append(Host(self, name, address or f"host{self.started}", own))

    def start_again(self, address: str, rules: Rules | None = None) -> None:
        """The launcher restarts a process that ended."""
        self.kernel.after(self.chance.uniform(0.0, 1.0), self._start_unless_closed, address, rules)

    def _start_unless_closed(self, address: str | None = None, rules: Rules | None = None) -> None:
        if not self.closed and not (rules and self.network.quiet):
            self.start(address, rules)

    def join_failed(self, host: Host, failure: str | None) -> None:
        """Once the faults have stopped, enough nodes get into a round before they time out."""
        if failure != Failure.TIMEOUT or not host.long_join:
            return
        if self.kernel.now < QUIET_AFTER + settling(self.plan):
            return
        if self.closed or STATE_KEY not in self.store.entries:
            return
        usable = self.usable
        if host in usable and largest([it.domain for it in usable], self.plan.rules):
            names = " ".join(other.id for other in usable)
            self.violated("gets going", f"{host.id} timed out, {names} could be in a round")

    def ended_without_a_round(self, host: Host, failure: str | None) -> None:
        """Its agent ended; a launcher may start another."""
        if self.network.quiet and (
            host.long_join
            or host.foreign
            or failure in (Failure.CLOSED, Failure.SPARE_CLOSED)
            or not self._is_readable
        ):
            return
        if failure is Failure.DRAINED:
            # No launcher starts again what ended with 0; people may start another elsewhere.
            if self.person.random() < 0.7:
                self.kernel.after(self.person.uniform(0.0, 3.0), self._start_unless_closed)
        elif host.foreign and self.plan.strays_return:
            self.start_again(host.address, self._foreign_rules)
        elif not host.foreign:
            self.start_again(host.address)

    @property
    def _is_readable(self) -> bool:
        return self.document is not None or STATE_KEY not in self.store.entries

    @property
    def _foreign_rules(self) -> Rules:
        rules = self.plan.rules
        return replace(rules, max_nodes=rules.max_nodes + 1)

    def start_foreigner(self) -> None:
        self.start(rules=self._foreign_rules)

    def is_unfit(self) -> bool:
        """Whether the check of a host fails now."""
        if not self.plan.unfit or self.network.quiet:
            return False
        unfit = self.health.random() < self.plan.unfit
        if unfit:
            self.inject("check failed")
        return unfit

    def many_crashed(self, hosts: list[Host]) -> None:
        """Have it checked that the run is done with them in time, unless more goes wrong."""
        plan, document = self.plan, self.document
        calm = not (plan.lost or plan.unacknowledged or plan.late or plan.ambush or plan.unfit)
        if not calm or {fault.kind for fault in plan.faults} != {"many crash at once"}:
            return
        if document is None or document.phase is not Phase.RUNNING or document.absent:
            return
        if not {host.id for host in hosts} <= {*document.participants}:
            return
        longest = plan.rules.lease * (OTHER_SETTINGS[-1] if plan.other_settings else 1.0)
        within = (2 * longest + 3 * plan.rules.interval) / plan.rates[0] + 8 * plan.poll + 1.0
        if any(0 < fault.at - self.kernel.now < within for fault in plan.faults):
            return
        names, launched = [host.id for host in hosts], self.started

        def check() -> None:
            left = [host for host in self.hosts if host.alive and host.id in document.ranks]
            # Or another node is to be rank 0, which takes a round.
            again = self.started > launched or "slow TCPStore" in self.injected
            if left:
                self.checker.crashed(names, document, self.document, again)

        self.inject("many crashed in a calm world")
        self.kernel.after(within, check)

    def failed(self, host: Host) -> None:
        """The agent failed; a launcher may start another, whatever became of the run."""
        if not self.network.quiet and self.chance.random() < self.plan.relaunches:
            self.kernel.after(self.chance.uniform(0.0, 2.0), self.start, host.address)

    def cuts_short(self) -> bool:
        cut = self.plan.cut_short > 0 and self.chance.random() < self.plan.cut_short
        if cut:
            self.inject("closing cut short")
        return cut

    def wrote(
        self,
        host: Host,
        before: Entry | None,
        after: RoundDocument,
        evidence: Evidence,
        *,
        given_up: bool,
    ) -> None:
        try:
            was = self.whole(RoundDocument.decode(before.value)) if before else None
        except RendezvousStateError:
            was = None
        after = self.whole(after)
        self.note(f"{host.id} writes {show(after)} ({after.reason})")
        self.rounds += after.phase is Phase.RUNNING
        # A write that it gave up was of an earlier listing, and may land after the next.
        if (
            host.gives_up
            and after.outcome is Ended.FAILED
            and not (was and was.closed)
            and not given_up
        ):
            self._judge_end(host)
        if after.phase is Phase.RUNNING:
            self._running_since.setdefault(after.world_id, self.kernel.now)
        self._judge_accusations(was, after)
        self._judge_hang(was, after)
        self.injected.update(_saving(after) - _saving(was))
        self.checker.wrote(host.id, was, after, evidence, self.store.epoch)
        if self.plan.ambush and self._ambushes and self.chance.random() < _AMBUSHED:
            soon = self.kernel.now + self.chance.uniform(0, 4 * self.plan.latency)
            if soon < QUIET_AFTER:
                self._ambushes -= 1
                self.kernel.at(soon, self._befall, self.plan.ambush)

    def process_died(self, host: Host) -> None:
        """Have it checked that the others are soon done with it, unless more goes wrong."""
        plan, document = self.plan, self.document
        answer = plan.rules.answer_timeout
        calm = not (plan.lost or plan.unacknowledged or plan.late or plan.ambush or plan.unfit)
        calm = calm and not (plan.breaks or plan.links or plan.refusals or plan.without_links)
        if self.network.quiet or not calm or answer is None:
            return
        if {fault.kind for fault in plan.faults} != {"crash"}:
            return
        if document is None or document.absent:
            return
        confirms = document.phase is Phase.CONFIRMING
        if not confirms and document.phase is not Phase.RUNNING:
            return
        ran = self.kernel.now - self._running_since.get(document.world_id, self.kernel.now)
        names = {*document.participants}
        here = [it for it in self.hosts if it.id in names and it.alive]
        if not confirms and ran < 1.0:
            return
        if len(here) < len(names) or host.id not in names:
            return
        # Links are held a second after the ranks are confirmed, if the round does not run.
        within = (2 * answer + confirms) / plan.rates[0] + 40 * plan.latency + 4 * plan.poll
        now = self.kernel.now
        if any(abs(fault.at - now) < within + 1.0 and fault.at != now for fault in plan.faults):
            return

        def check() -> None:
            after = self.document
            if after is None or not after.is_of(document) or after.closed:
                return
            if host.id in {*after.participants, *after.previous} - {*after.absent}:
                self.violated("at once", f"{host.id} died {within:.1f} s ago, {show(after)}")

        self.inject("died in a calm world")
        self.kernel.after(within, check)

    def _judge_accusations(self, before: RoundDocument | None, after: RoundDocument) -> None:
        """Nobody is lost by them who lives, and whom nothing kept from answering."""
        known = {it.node for it in before.accused if it.lost} if before is not None else set()
        for it in after.accused:
            accusation, now = (after.incarnation, it.node, it.beat), self.kernel.now
            since, epoch = self._accused.setdefault(accusation, (now, self.store.epoch))
            if not it.lost or it.node in known:
                continue
            host = next(each for each in self.hosts if each.id == it.node)
            self.inject("lost by an accusation" + (", and lives" if host.alive else ""))
            if host.alive and epoch == self.store.epoch and not host.may_not_answer(since):
                self.violated("accused", f"{host.id} lives, and is lost in {show(after)}")

    def _judge_end(self, host: Host) -> None:
        """Whether a host that gives up ends what others can go on with."""
        known = host.node.latest
        if host.foreign or known is None or known.closed:
            return
        new = host.gives_up == "workers"
        if not known.is_whole and (new or known.phase is not Phase.RUNNING):
            return  # Some are counted twice there.
        able = (Agent.JOINING, Agent.EXCHANGING, Agent.RUNNING, Agent.STOPPING)
        others = self.checker.could_go_on(host.id, known, host.listing, new)
        there = [it for it in self.hosts if it.id in others and it.agent in able and not it.wedged]
        if largest([it.domain for it in there], host.rules):
            names = " ".join(it.id for it in there)
            self.violated("goes on", f"{host.id} closes the run, and {names} could go on with it")

    def ordered(self, before: RoundDocument, after: RoundDocument) -> None:
        """An order from people stands in the document."""
        after = self.whole(after)
        self.note(f"an order stands: {show(after)}")
        self.checker.ordered(self.whole(before), after, self.store.epoch)

    def violated(self, invariant: str, what: str) -> NoReturn:
        raise InvariantError(invariant, what)

    def live(self) -> float:
        """Live through the seed; returns how long the run took to stand still."""
        plan, kernel = self.plan, self.kernel
        for _ in range(plan.nodes):
            kernel.at(self.chance.uniform(0, plan.arrival), self.start)
        for fault in plan.faults:
            kernel.at(fault.at, self._befall, fault.kind)
        for at in plan.checkpoints:
            kernel.at(at, self._name_the_moment, at)
        for at in plan.notices:
            kernel.at(at, self._give_notice, at)
        for at in plan.hangs:
            kernel.at(at, self._hang, at)
        for order in plan.orders:
            kernel.at(order.at, give, self, order.kind)
        for fault in plan.links:
            kernel.at(fault.at, part, self, fault.kind)
        for fault in plan.breaks:
            kernel.at(fault.at, self.connections.befall, fault.kind)
        for fault in plan.refusals:
            kernel.at(fault.at, refuse, self, fault.kind)
        for fault in plan.failures:
            kernel.at(fault.at, fail, self, fault.kind)
        kernel.run(QUIET_AFTER)
        end_faults(self)
        settled = self._stand_still(bound(plan) + self._held_up())
        self._end()
        return settled - QUIET_AFTER

    def _name_the_moment(self, at: float) -> None:
        """The workers of a host say that newcomers may come now."""
        running = [host for host in self.hosts if host.agent is Agent.RUNNING]
        if running:
            random.Random(f"{at} of {self.plan.seed}").choice(running).name_the_moment()

    def _give_notice(self, at: float) -> None:
        running = [host for host in self.hosts if host.agent is Agent.RUNNING]
        if running:
            random.Random(f"{at} of {self.plan.seed}").choice(running).give_notice()

    def _hang(self, at: float) -> None:
        training = [host for host in self.hosts if host.training.progress() is not None]
        if training and self.plan.rules.step_timeout:
            host = random.Random(f"{at} of {self.plan.seed}").choice(training)
            self.note(f"a worker of {host.id} hangs")
            self.inject("hang")
            host.training.hang(host.node.record.label)

    def _judge_hang(self, was: RoundDocument | None, after: RoundDocument) -> None:
        """Whether a round that ends for a hang names a node that hangs."""
        if was is None or was.phase is not Phase.RUNNING or after.phase is not Phase.FORMING:
            return
        for label in after.cause.stuck.first:
            self.inject("ended for a hang")
            since = self.trainings.hung.get((was.world_id, label), math.inf)
            if self.kernel.now - since < self.plan.rules.step_timeout:
                self.violated("hang", f"{label} does its steps, and {show(was)} ends for it")

    def _held_up(self) -> float:
        """What torch's own time-outs may add, where words in its c10d store were forgotten."""
        held = any(host.agent is Agent.EXCHANGING for host in self.hosts)
        return TORCH_TIMEOUT / self.plan.rates[0] if held else 0.0

    def _stand_still(self, limit: float) -> float:
        """Run until nothing changes any more; returns since when."""
        kernel, began = self.kernel, self.kernel.now
        still = (self.plan.rules.lease + 2) / self.plan.rates[0]
        since, place = kernel.now, ("", -1, 0)
        # A document that keeps changing is no end, even if each is a good one.
        while kernel.now < since + still:
            kernel.run(kernel.now + _LOOK)
            document = self.document
            was = place
            place = (document.incarnation, *document.place) if document else ("", -1, 0)
            why = self._unsettled() or ("" if was == place else "the round still changes")
            if why:
                since = kernel.now
            if since > began + limit:
                raise InvariantError("gets going", f"after {limit:.0f} s without faults {why}")
        return since

    def _end(self) -> None:
        """What becomes of a run that stands still: all agents end, and its keys."""
        if self.plan.writes_refused:
            for host in self.hosts:
                host.grey = ""
        plan, document = self.plan, self.document
        running = document is not None and document.phase is Phase.RUNNING
        members = [
            host
            for host in self.hosts
            if document is not None and host.agent is Agent.RUNNING and host.id in document.ranks
        ]
        if plan.ending == "fails":
            members = [host for host in members if not host.wedged and not host.is_to_leave]
        if document is not None and running and members and plan.ending != "is left":
            self.note(f"-- the run {plan.ending} --")
            if plan.ending == "fails":
                self._fail(members)
            else:
                for host in members:
                    self.kernel.after(self.chance.uniform(0, plan.stop), host.succeed)
            self._all_end()
        self._keys_end()

    def _fail(self, members: list[Host]) -> None:
        """Some of these fail; where they leave, since others can go on, some of those do."""
        plan = self.plan
        while members:
            if plan.failing == "one":
                members = [self.chance.choice(members)]
            for host in members:
                pause = self.failures.uniform(0.0, 0.5) if plan.failing != "one" else 0.0
                if plan.failing == "all agents":
                    self.kernel.after(pause, host.fail_agent)
                else:
                    self.kernel.after(pause, host.fail_workers, True)
            within = 1.0 + 2 * plan.stop + _CLOSING
            until = self.kernel.now + within
            while self.kernel.now < until and not all(it.has_parted for it in members):
                self.kernel.run(self.kernel.now + _LOOK / 5)
            document = self.document
            # One whose listings fail can find nothing out; the others find that it is gone.
            left = [it for it in members if it.has_left or (it.gives_up and it.grey)]
            if document is None or document.closed or not left:
                return
            self.inject("left at the end")
            if not any(it.grey for it in left):
                self._judge_those_left(document, members)
            self._stand_still(bound(plan) + self._held_up())
            document = self.document
            members = [
                host
                for host in self.hosts
                if document is not None
                and host.agent is Agent.RUNNING
                and host.id in document.ranks
                and not host.wedged
                and not host.is_to_leave
            ]

    def _keys_end(self) -> None:
        """All hosts vanish, and what they leave goes too."""
        plan, store = self.plan, self.store
        if store.entries and store.deadline is None:
            # Whoever leads does not know that the store lost the deadline; it soon sets another.
            self.kernel.run(self.kernel.now + plan.rules.abandoned_ttl / 4 / plan.rates[0] + 3)
        document = self.document
        for host in self.hosts:
            latest = host.node.latest
            if not host.alive or latest is None or not latest.closed or latest.is_of(document):
                continue
            # Where another run has moved the deadline on, the record ends with that; the next run
            # sweeps what a late write brought back.
            # It cannot end where the last closer dies at once and leaves a damaged document either.
            ends = self._is_readable and not host.landed_late
            if store.deadline is None and ends and NODES_PREFIX + host.id in store.entries:
                self.violated("keys end", f"{host.id} knows of its run's end, its record stays")
        # A leader that died before it had led for long could not see to it. A closer that died at
        # once could not either, in a store that had just forgotten the deadline.
        leads = document is not None and any(
            host.alive and not host.grey and host.id == document.leader for host in self.hosts
        )
        ends = document is not None and (document.expires or (leads and not document.closed))
        for host in self.hosts:
            if host.alive:
                host.crash()
        self.kernel.run(self.kernel.now + plan.rules.abandoned_ttl + plan.rules.sweep_after + 1)
        if store.entries and ends:
            left = " ".join(sorted(store.entries))
            self.violated("keys end", f"all are gone, and these keys stay: {left}")
        if store.entries and self._is_readable:
            self._sweep_by_the_next_run()

    def _sweep_by_the_next_run(self) -> None:
        """The id is used again, by as many nodes as a run needs, until nothing is left of it."""
        plan = self.plan
        for _ in range(_MOST_LAUNCHES):
            self.note("-- the id is used again --")
            self.inject("id used again")
            before = len(self.hosts)
            while not largest([host.domain for host in self.hosts[before:]], plan.rules):
                self.start()
            self._stand_still(bound(plan))
            if (document := self.document) is not None and not document.closed:
                for host in self.hosts:
                    if host.alive:
                        host.succeed()
                self._all_end()
            # One that was closed refuses them; they see to its end.
            self.kernel.run(self.kernel.now + _CLOSING + plan.rules.sweep_after)
            if not self.store.entries:
                return
        left = " ".join(sorted(self.store.entries))
        self.violated("keys end", f"the id was used again, and these keys stay: {left}")

    def _judge_those_left(self, document: RoundDocument, gone: list[Host]) -> None:
        """Whether they are enough for a round, as far as those that have gone could know."""
        hangs = any(host.alive and host.wedged for host in self.hosts)
        if hangs or document.excluded or document.quarantined or document.drained:
            return
        # A limit: a node that died as it asked counts for as long as its record stands.
        for host in self.hosts:
            entry = self.store.entries.get(NODES_PREFIX + host.id)
            if not host.alive and entry is not None and not self.decode(entry).is_over:
                return
        if all((known := it.node.latest) is not None and known.is_whole for it in gone):
            left = self._able
            if not largest([it.domain for it in left], self.plan.rules):
                names = " ".join(it.id for it in left) or "nobody"
                self.violated("goes on", f"{names} is left in {show(document)}, all others failed")

    def _all_end(self) -> None:
        plan, began = self.plan, self.kernel.now
        limit = (plan.rules.lease + 10) / plan.rates[0] + 2 * plan.stop
        # One that is in no round yet may come into the next.
        hangs = any(host.alive and host.wedged for host in self.hosts)
        grey = all(host.grey for host in self.hosts if host.alive and not host.wedged)
        while self.kernel.now < began + limit:
            self.kernel.run(self.kernel.now + _LOOK)
            left = [it for it in self.hosts if it.alive and not self._may_stay(it, hangs, grey)]
            after = self.document
            # Where the store lost the closing, all that knew of it have ended, or go on without it.
            was_closed = after is not None and self.checker.ended(world_of(after)) is not None
            closes = after is not None and not (was_closed or hangs or grey)
            if not left and not closes:
                break
        else:
            who = ", ".join(f"{host.id} is {host.agent}" for host in left)
            found = show(after) if after else "there is no document"
            raise InvariantError(
                "all end",
                f"the run {plan.ending}, after {limit:.0f} s {who or 'all ended'}, {found}",
            )

    def _may_stay(self, host: Host, hangs: bool, grey: bool) -> bool:
        """Also a spare, or a node that is done, as long as the agent of a participant hangs.

        Both also stay where no node that is left can list the records, and find out that the others
        are gone.
        """
        waits = (hangs or grey) and host.agent is Agent.JOINING
        done = (hangs or grey) and host.agent is Agent.BARRIER
        return host.wedged or waits or done or self._runs_on(host)

    def _befall(self, kind: str) -> None:
        self.inject(kind)
        FAULTS[kind](self)

    def _unsettled(self) -> str:
        """What keeps the run from standing still; empty: nothing."""
        document = self.document
        alive = [host for host in self.hosts if host.alive and not host.wedged]
        alive = [host for host in alive if not self._runs_on(host) and not self._is_held(host)]
        if all(host.grey for host in alive):
            return ""  # None of them can lead; that their joins end is looked at elsewhere.
        for host in alive:
            if host.agent not in (Agent.RUNNING, Agent.JOINING):
                return f"{host.id} is {host.agent}"
        if not alive:
            return ""
        for host in alive:
            if host.training.waits_since is not None:
                return f"the workers of {host.id} wait at a step"
            if host.training.hangs:
                return f"a worker of {host.id} hangs"
        if document is None:
            return "there is no document"
        if document.phase is not Phase.RUNNING:
            return f"there is only {show(document)}"
        waits = [host for host in alive if host.id not in document.ranks]
        now, hosts = EPOCH + self.kernel.now, {host.address for host in waits}
        rules = self.plan.rules
        pace = (
            max(rules.last_call_timeout, rules.min_uptime, rules.resize_interval)
            / self.plan.rates[0]
        )
        lets_in = _LET_IN + pace
        for it in (*document.excluded, *document.quarantined):
            if it.host in hosts and it.until is not None and now < it.until + 2 * SKEW + lets_in:
                return f"{it} ends, or has just ended"
        if document.restart:
            return f"nobody restarts {show(document)}"
        if kept := self.checker.kept_out(document):
            return f"{' '.join(kept)} is kept out of {show(document)}, and in it"
        if document.absent and self.plan.rules.restart_on_loss:
            return f"{show(document)} goes on"
        if document.all_absent and waits:
            return f"{waits[0].id} waits for {show(document)}"
        out = self.checker.excluded_before(document, self.exclusions.values())
        if out and not self.injected["told: exclusions"] and not self.store.epoch:
            return f"{' '.join(out)} was excluded before {show(document)}"
        present = {node for node in document.participants if node not in document.absent}
        by_id = {host.id: host for host in self.hosts}
        for host in alive:
            if host.id in present:
                if host.agent is not Agent.RUNNING or host.track.world != world_of(document):
                    return f"{host.id} is {host.agent} in {show(document)}"
            elif host.agent is not Agent.JOINING or host.node.record.status is not Status.SPARE:
                return f"{host.id} is {host.agent} outside {show(document)}"
        dead = [
            node
            for node in sorted(present)
            if not (by_id[node].alive or (by_id[node].succeeded and by_id[node].node.done))
        ]
        if dead:
            return f"{' '.join(dead)} is dead in {show(document)}"
        done = [node for node in present if by_id[node].succeeded]
        alive = [host for host in alive if not self._is_excluded(host, document.quarantined)]
        # No round is ended for a node that was cut off; it comes in with the next one.
        alive = [host for host in alive if host.id in present or not host.node.record.was_at_fault]
        could = largest([host.domain for host in alive], self.plan.rules)
        if could > len(present) and self.plan.rules.grow == "now" and not done:
            return f"there is room for spares in {show(document)}"
        leader = by_id.get(document.leader or "")
        if leader is None or not leader.alive:
            return f"nobody leads {show(document)}"
        if leader.grey and not self.plan.writes_refused and any(not host.grey for host in alive):
            return f"{leader.id}, whose listings fail, leads {show(document)}"
        return ""


def _saving(document: RoundDocument | None) -> set[str]:
    """How far the checkpoint of a round is."""
    it = document.saving if document is not None else None
    stages = {"asked for": it, "agreed": it and it.agreed, "saved": it and it.saved}
    return {f"told: checkpoint {stage}" for stage, reached in stages.items() if reached}


def _has(plan: Plan, kind: str) -> bool:
    return plan.ambush == kind or any(fault.kind == kind for fault in plan.faults)


def simulate(
    seed: int,
    most_nodes: int = 12,
    build: type[Node] = Node,
    traced: bool = False,
    focus: Focus = EVERYTHING,
) -> Result:
    """Live through one seed.

    Args:
        seed: the same seed and code give the same run, step by step.
        most_nodes: upper bound of the hosts that start the run.
        build: whose code it is.
        traced: whether to write down what happens.
        focus: what the plan is narrowed to.
    """
    plan = Plan.draw(seed, most_nodes, focus)
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
    result.trace, result.waited = world.trace, world.trainings.waited
    return result
