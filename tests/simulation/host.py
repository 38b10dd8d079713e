"""One simulated host: a node's requests carried over a faulty network, and torch's agent above."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from rdzv_plugins.kv import (
    AccessDeniedError,
    Entry,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
)
from rdzv_plugins.protocol import effects, parting
from rdzv_plugins.protocol.contact import Standing
from rdzv_plugins.protocol.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    STORE_PREFIX,
    NodeRecord,
    RoundDocument,
    Status,
    store_prefix,
)
from rdzv_plugins.protocol.documents import Outcome as Ended
from rdzv_plugins.protocol.effects import Effect, Effects, JoinOutcome
from rdzv_plugins.protocol.rules import Failure, Rules

from .invariants import Evidence, show
from .kernel import Clock
from .orders import Command
from .plan import EPOCH, LONGEST_PAUSE, SKEW, TORCH_TIMEOUT
from .training import Training

if TYPE_CHECKING:
    from .world import World

__all__ = ["Agent", "Host"]

_POLL = 0.1
"""Seconds between two looks of the agent at ``num_nodes_waiting()``."""
_CLOSE_TIMEOUT = 10.0
_EXACT = 1e-6
_SLOW = 0.25
"""Seconds after which a request is not answered as fast as a store does."""
_STOPS_WITHIN = 2 * _POLL
"""Seconds on its clock, from the moment when its workers are to stop until its agent stops them."""
_MOST_VAIN = 20
"""Most listings that show nothing new, within an interval and for any reason but a node's lease."""
_MOST_REQUESTS = 2000
"""In a second, on one host; a leader whose store answers in no time comes to some hundreds."""
_MANY = 8
"""If this many nodes are late at once, they are doubted first."""
_MOST_OPENINGS = 6
"""Tries to open a TCPStore for one round, in a second, where none could be opened."""


class Agent(StrEnum):
    """Where the host's torch agent is."""

    JOINING = "joining"
    UNFIT = "unfit"
    EXCHANGING = "exchanging roles"
    RUNNING = "running"
    STOPPING = "stopping its workers"
    BARRIER = "in the exit barrier"
    IDLE = "without a round"
    GONE = "gone"


class Host:
    """A process: its node, its clock, its one outstanding request, its agent.

    Args:
        world: where it lives.
        node_id: unique in the run.
        address: of the machine; a restarted process has the same.
        rules: its settings; those of a foreigner differ from the run's.
    """

    def __init__(self, world: World, node_id: str, address: str, rules: Rules) -> None:
        chance = world.chance
        self.world = world
        self.id = node_id
        self.address = address
        self.rules = rules
        self.foreign = rules.max_nodes != world.plan.rules.max_nodes
        low, high = world.plan.rates
        self.clock = Clock(world.kernel, chance.uniform(0, 1000), chance.uniform(low, high))
        self.agent = Agent.JOINING
        self.started = world.kernel.now
        self.changed = world.kernel.now
        self.restarts_left = world.plan.max_restarts
        self.wedged = False
        """Its agent never comes back from stopping its workers."""
        self.succeeded = False
        """Its workers did."""
        self.landed_late = False
        """A record that it had given up writing was written all the same."""
        self.grey = ""
        """What of its requests fails: "lists", "some", or "slow" ones."""
        self.long_join = world.join_timeout > world.plan.join_timeout
        self.stalled_until = self.last_stall = 0.0
        self.woke = 0.0
        """When its last stall ended, on its clock."""
        self._stalled_at: float | None = None
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.cut_off = self.refused = False
        self.may = ""
        """Where it is refused, it may "read" or "write" all the same."""
        # When it sent the last heartbeat that was accepted; when it was first refused since then.
        self._accepted = self._came_at = self.clock()
        self._refused_at: float | None = None
        self.accepted_since: float | None = None
        """Since when the store accepts its heartbeats, without an error, in the world's time."""
        self.fails_since: float | None = None
        """Where it does not: since when."""
        self.link = ""
        """To other hosts it is "cut off", "unreachable", "hidden" as rank 0, or "slow"."""
        # It has a source of its own, so that all else is as it would be without orders.
        self._skew = random.Random(f"wall clock of {node_id}").uniform(-SKEW, SKEW)
        record = NodeRecord(
            address=address,
            pid=world.started,
            beat=0,
            status=Status.JOIN,
            round=-1,
            min_nodes=rules.min_nodes,
            max_nodes=rules.max_nodes,
            interval=rules.interval,
            lease=rules.lease,
            hint=chance.choice((None, chance.randrange(8))),
            domain=world.domain(address),
            port=1 if rules.network_check else 0,
            link=1 if rules.answer_timeout is not None else 0,
        )
        self.domain = record.domain
        self.track = world.checker.host(
            node_id, record.label, address, self.clock.rate, rules, record.domain
        )
        self.training = Training(
            world.trainings,
            random.Random(f"steps of {node_id}"),
            world.plan.pace,
            rules.save_timeout,
        )
        self.node = world.build(
            node_id,
            record,
            rules,
            world.join_timeout,
            self.clock,
            random.Random(chance.getrandbits(64)),
            self._wall,
            self.training,
        )
        self._service = parting.Service(self.node, self.clock, self._wall, world.plan.max_restarts)
        self.gives_up = ""
        """What it gives up for, "agent" or "workers", though it is new; or "" for nothing."""
        self.parted: object = None
        """What came of that, as `parting.Parting`."""
        self.listing: Mapping[str, NodeRecord] | None = None
        """The records that it has found since it gave up; None: it has not looked."""
        self._life: Generator[Effect[Any], Any, object] | None = None
        self._at_end: Callable[[object], None] | None = None
        self._request: Effect[Any] | None = None
        self._asked = 0.0
        # The same, and that of the last look at others, in the world's time.
        self._asked_at = self._looked = 0.0
        self._trouble: float | None = None
        self._turn = 0
        # The turn whose request was lost: it hears of nothing until that fails.
        self.deaf = -1
        # What the answer on its way tells of others, and as of when.
        self._delivery: tuple[int, str | None, dict[str, NodeRecord], float] | None = None
        # Grows when the agent goes on to something else: what was planned before is void.
        self._shift = 0
        self._fatal = self._failed = False
        self._failed_at = 0.0
        self._all_done = False
        self._round: RoundDocument | None = None
        self._polling = False
        self._masters = 0
        # For the round of which world_id it opened each.
        self._opened_for: dict[str, str] = {}
        # What it did by itself since it last asked the store, waited, or heard anything new.
        self._did: list[Effect[Any]] = []
        self._heard: dict[str, object] = {}
        # When it began to open a TCPStore for the round of a world_id, of which none was opened.
        self._openings: tuple[str, list[float]] = "", []
        self._opening = self._dialling = "", 0.0
        self._pause = 1.0
        self._close_until = 0.0
        self._closes = False
        self._requests = 0
        self._second_ends = 0.0
        self._leave_at = 0.0
        # The version of the document that it was told last, and tombstones not found since then,
        # with when it asked for them.
        self._version: Version | None = None
        self._no_tombstone: dict[str, float] = {}
        # When it listed all nodes in vain: nothing was new.
        self._vain_listings: list[float] = []
        self._ask()
        if self.alive:
            self._live(self.node.run())

    def _wall(self) -> float:
        return EPOCH + self.world.kernel.now + self._skew

    @property
    def alive(self) -> bool:
        return self.agent is not Agent.GONE

    @property
    def has_parted(self) -> bool:
        """Whether it is gone, and has said its last word."""
        return not self.alive and self._life is None and not self._closes

    @property
    def has_left(self) -> bool:
        """Whether it gave the run up, and others can go on with it."""
        return self.parted == "left"

    @property
    def stalls(self) -> bool:
        return self._stalled_at is not None

    @property
    def is_to_leave(self) -> bool:
        """Whether a signal told it to leave, which it does even if its workers fail meanwhile."""
        return self._leave_at > 0

    # What befalls it.

    def crash(self) -> None:
        self.world.connections.ended(self)
        self._set(Agent.GONE)
        self.world.checker.stopped(self.id, self.node.record.beat)
        self._end_life()

    def stall(self, seconds: float, frozen: bool) -> None:
        """Stand still, then go on as if nothing had happened."""
        now = self.last_stall = self.world.kernel.now
        if self._stalled_at is None:
            self._stalled_at = self.clock()
        if frozen:
            self.clock.set(frozen=True)
        self.stalled_until = max(self.stalled_until, now + seconds)
        self.world.kernel.at(self.stalled_until, self._wake)

    def wake(self) -> None:
        """End a stall now."""
        self.stalled_until = min(self.stalled_until, self.world.kernel.now)
        self._wake()

    def _wake(self) -> None:
        now = self.world.kernel.now
        if now < self.stalled_until or self._stalled_at is None:
            return
        # Certainly longer than an outage, wherever in a wait of 1.1 intervals the stall began.
        if self.clock() - self._stalled_at > 1.1 * (self.rules.interval + self._outage):
            self.track.evidence.disturbed = now
        self._stalled_at = None
        self.clock.set()
        self.woke = self.clock()
        held, self._held = self._held, []
        for call, arguments in held:
            self.world.kernel.at(now, call, *arguments)

    def hear_of(self, node: str, gone: bool) -> None:
        """What its links tell it of another node."""
        if not self.alive or self._is_late(self.hear_of, node, gone):
            return
        self.world.note(f"{self.id} finds {node} {'gone' if gone else 'back'}")
        self._did.clear()
        (self.node.neighbours.report_dead if gone else self.node.neighbours.report_alive)(node)
        self._nudge()

    def hear_of_others(self, others: frozenset[Standing]) -> None:
        """What its links tell it of how others stand with the store."""
        if not self.alive or self._is_late(self.hear_of_others, others):
            return
        self.world.note(f"{self.id} hears: {' '.join(sorted(it.name for it in others))}")
        self._did.clear()
        self.node.neighbours.report_others(others)
        self._nudge()

    def may_not_answer(self, since: float) -> bool:
        """Whether something keeps it from reaching the store in time, or has since then."""
        network, now = self.world.network, self.world.kernel.now
        asks = not isinstance(self._request, effects.Park | effects.Rest)
        waits = self._request is not None and asks and now - self._asked_at > _SLOW
        return (
            # A node whose join has failed is silent, until its agent asks again or ends.
            self.agent is Agent.IDLE
            or bool(self.stalls or self.cut_off or self.refused or self.grey or waits)
            or self.deaf == self._turn
            or bool(network.down or network.slow)
            or max(self.last_stall, self.track.evidence.troubled) >= since - _SLOW
            or self.stalled_until >= since
        )

    def set_rate(self, rate: float) -> None:
        self.clock.set(rate)
        self.track.rate = max(self.track.rate, rate)

    def leave(self) -> None:
        """End, and say so: what a signal's handler does."""
        self.world.note(f"{self.id} leaves")
        self._depart()
        self._say_farewell()

    def fail_workers(self, for_good: bool = False) -> None:
        if self.agent is not Agent.RUNNING:
            return
        self._fatal, self._failed = for_good or self.restarts_left == 0, True
        self._failed_at = self.world.kernel.now
        self.restarts_left -= 1
        self.world.note(f"{self.id}: its workers fail{' for good' if self._fatal else ''}")
        self._stop_workers()

    def fail_agent(self) -> None:
        """It ends with an exception that is no failure of workers."""
        if self.agent in (Agent.RUNNING, Agent.STOPPING, Agent.EXCHANGING) and not self.stalls:
            self.world.note(f"{self.id}: its agent fails")
            self._fail()

    @property
    def came_late(self) -> bool:
        """Whether it came to a run that went on already, and not long ago: not as the code has it.

        A mutant may take it for old, or for new.
        """
        probation = self.rules.min_uptime or self.rules.probation
        return self.track.came is not None and self.clock() - self._came_at < probation - _EXACT

    def succeed(self, of: tuple[str, int, tuple[str, ...]] | None = None) -> None:
        """Its workers are done: wait for those of the others in torch's exit barrier.

        Args:
            of: the world of which they are; None: of any.
        """
        document = self.world.document
        if of is not None and document is not None:
            incarnation, number, _ = of
            if document.incarnation != incarnation or document.round > number:
                return
        if self.agent in (Agent.JOINING, Agent.EXCHANGING):
            # They begin soon. The others wait for them as long as the round lasts.
            self.world.kernel.after(1.0, self.succeed, of)
        if self.agent is not Agent.RUNNING:
            return
        self.world.note(f"{self.id}: its workers succeed")
        self.succeeded = True
        self._set(Agent.BARRIER)
        self.world.checker.stopped(self.id, self.node.record.beat)
        self.node.inbox.report_done()
        self._nudge()
        self._meet("barrier")

    def name_the_moment(self) -> None:
        """Its workers say that newcomers may come now."""
        self.world.note(f"{self.id}: newcomers may come now")
        self.world.inject("checkpoint")
        self.track.named_moment = self.world.kernel.now
        self.node.inbox.note_saved()
        self._nudge()

    def give_notice(self) -> None:
        """A signal: leave once the run has saved."""
        if self.agent is not Agent.RUNNING or self.training.progress() is None:
            return
        self.world.note(f"{self.id} is to leave")
        self.world.inject("notice")
        self.node.inbox.leave()
        self._nudge()
        self._leave_at = self.world.kernel.now + self.world.plan.rules.save_timeout

    def _look_at_steps(self, shift: int) -> None:
        """The agent's regular look at its workers."""
        if shift != self._shift or self._is_late(self._look_at_steps, shift):
            return
        if self.training.has_saved():
            self.node.inbox.note_saved()
            self._nudge()
        latest = self.node.latest
        saved = latest is not None and latest.saving is not None and latest.saving.saved
        if self._leave_at and (saved or self.world.kernel.now > self._leave_at):
            self.world.inject("left after a checkpoint" if saved else "left without a checkpoint")
            self.leave()
            return
        self.world.kernel.after(_POLL, self._look_at_steps, shift)

    def abandon_join(self) -> None:
        """What waited in ``next_rendezvous()`` got an exception."""
        if self.agent is not Agent.JOINING:
            return
        self.world.note(f"{self.id} abandons its join")
        self._set(Agent.IDLE)
        self.world.checker.stopped(self.id, self.node.record.beat)
        self.node.inbox.withdraw()
        self._nudge()
        chance, shift = self.world.chance, self._shift
        self.world.kernel.after(chance.uniform(1.0, 3.0), self._after_join, shift, chance.random())

    def shut_down(self, error: bool, of_workers: bool = False) -> None:
        """What ``handler.shutdown()`` does.

        Args:
            error: while an exception is raised.
            of_workers: which says that workers failed.
        """
        if self._service.only_leaves(self._all_done):
            self.leave()
            return
        if error and (self.came_late if of_workers else not self.node.done):
            self.gives_up = "workers" if of_workers else "agent"
        if error and self._service.may_give_up(of_workers):
            self._give_up(of_workers)
            return
        outcome = Ended.FAILED if error else Ended.SUCCEEDED
        self.world.note(f"{self.id} closes the run, which {outcome.value}")
        self._depart()
        work = partial(self._service.close, outcome, "closed")
        self._end_with(work, self.world.kernel.now + _CLOSE_TIMEOUT)

    def _give_up(self, of_workers: bool, looked: bool = False) -> None:
        """Leave a run that others can go on with, or close it."""
        why = f"its {'workers' if of_workers else 'agent'} failed"
        self.world.note(f"{self.id} gives up: {why}")
        self._depart()
        self.world.checker.unfit(self.id, self.node.record.beat)
        work = partial(self._service.give_up, why, of_workers=of_workers, looked=looked)
        self._end_with(work, self.world.kernel.now + _CLOSE_TIMEOUT)

    def _depart(self) -> None:
        self._end_life()
        self._set(Agent.GONE)
        self.world.checker.stopped(self.id, self.node.record.beat)

    def _say_farewell(self) -> None:
        if self.node.latest is None or not self.node.latest.closed:
            self._live(self.node.farewell())

    def _end_with(self, last_word: Callable[[], Effects[object]], deadline: float) -> None:
        """Have its last word said, again and again until the store hears it."""
        if self.world.kernel.now >= deadline:
            return
        self._closes = True
        self.listing = None  # Another attempt may list nothing: in a large round the leader looks.

        def end(result: object) -> None:
            self._closes = False
            if result is None:
                # The store was away: once more.
                self.world.checker.closing_failed(self.node.latest, self.world.store.tombstones)
                pause = self.world.chance.uniform(0.1, 0.5)
                self.world.kernel.after(pause, self._end_with, last_word, deadline)
            elif not result:
                self._say_farewell()  # It was replaced meanwhile.
            elif self.gives_up:
                self.parted = result
                self.world.note(f"{self.id} gave up: {result}")
                self.world.inject(f"gave up: {result}")
                known = self.node.latest
                if self.has_left and self.listing is not None and known is not None:
                    new = self.gives_up == "workers"
                    self.world.checker.left(self.id, known, self.listing, new)

        self._live(last_word(), end)

    # The agent.

    def _set(self, agent: Agent) -> None:
        if self.agent is Agent.RUNNING and agent is not Agent.RUNNING:
            self.training.end()
        self.agent = agent
        self._shift += 1
        self.changed = self.world.kernel.now

    def _ended(self, outcome: JoinOutcome) -> None:
        world, document = self.world, outcome.document
        if self.agent is not Agent.JOINING:
            if self.agent is Agent.IDLE and not outcome.error:
                return  # It gave the join up meanwhile.
            ends = outcome.failure in (Failure.CLOSED, Failure.SPARE_CLOSED, Failure.DRAINED)
            world.checker.gave_up(self.id)
            if not (self.agent is Agent.UNFIT and ends):
                world.violated("join ends", f"{self.id} was given {outcome}, it had not asked")
        if document is not None:
            world.note(f"{self.id} is given round {document.round}")
            rank = document.ranks[self.id]
            document = world.whole(document)
            if rank != document.ranks.get(self.id):
                world.violated("agreement", f"{self.id} takes rank {rank} of {show(document)}")
            self._set(Agent.EXCHANGING)
            self._pause = 1.0
            self._round, self._all_done = document, False
            self._masters_seen(document)
            world.checker.given(self.id, document)
            assert outcome.document is not None
            if self._service.last is None or not document.is_of(self._service.last):
                self._came_at = self.clock()
            self._service.begin(outcome.document)
            world.rounds_given += 1
            self._meet("role")
            return
        world.note(f"{self.id}: its join failed: {outcome.failure or outcome.error}")
        world.checker.stopped(self.id, self.node.record.beat)
        world.join_failed(self, outcome.failure)
        if outcome.failure is Failure.AT_FAULT:
            self._set(Agent.UNFIT)
            world.checker.unfit(self.id, self.node.record.beat - 1)
            world.kernel.after(0.0, self._stay_cut_off, self._shift)
            return
        self._set(Agent.IDLE)
        again = world.chance.random() < world.plan.rejoins
        over = (Failure.CLOSED, Failure.SPARE_CLOSED, Failure.DRAINED, Failure.MISMATCH)
        if outcome.failure in over:
            again = False
        if world.network.quiet and (outcome.error or outcome.failure == Failure.TIMEOUT):
            # It would keep its short time-out; the node in its place has a long one.
            again = False
        pause = world.chance.uniform(0, 1)
        gives_up = float(not again)
        world.kernel.after(pause, self._after_join, self._shift, gives_up, outcome.failure)

    def _masters_seen(self, document: RoundDocument) -> None:
        if document.master is None or not document.master.startswith(document.participants[0]):
            self.world.violated("agreement", f"{document.master} is not of rank 0")

    def _after_join(self, shift: int, gives_up: float, failure: str | None = None) -> None:
        """The join failed: ask again, or end, as torch's agent does."""
        if shift != self._shift or self._is_late(self._after_join, shift, gives_up, failure):
            return
        if gives_up < 0.5:
            self._ask()
            return
        self.shut_down(error=True)
        self.world.ended_without_a_round(self, failure)

    def _meet(self, what: str) -> None:
        """Say a word in the c10d store of the round, then wait for those of all others."""
        assert self._round is not None
        prefix = store_prefix(self._round.incarnation, self._round.round) + what + "/"
        if not self.node.over:
            self._say(self._shift, prefix + self.id)
        look = self.clock() + TORCH_TIMEOUT
        pause = 2 * self.world.network.latency()
        self.world.kernel.after(pause, self._look, self._shift, prefix, look)

    def _say(self, shift: int, key: str) -> None:
        if shift != self._shift or self._is_late(self._say, shift, key):
            return
        if self.world.network.reaches(self):
            expired = self.world.store.expired
            self.world.kernel.after(self.world.network.latency(), self._said, key, expired)
        elif self.agent is not Agent.BARRIER and not self.node.over:
            # In the exit barrier torch counts, which is done once.
            self.world.kernel.after(0.2, self._say, shift, key)

    def _said(self, key: str, expired: int) -> None:
        # No run is swept as soon as that after its end.
        if expired == self.world.store.expired:
            self.world.store.put(key, b"")

    def _look(self, shift: int, prefix: str, deadline: float) -> None:
        if shift != self._shift or self._is_late(self._look, shift, prefix, deadline):
            return
        assert self._round is not None
        entries = self.world.store.entries
        over = self.node.over
        if self.world.network.reaches(self) and (
            over or all(prefix + node in entries for node in self._round.participants)
        ):
            if self.agent is Agent.EXCHANGING:
                self._set(Agent.RUNNING)
                if self.world.plan.pace:
                    self.training.begin(self._round.world_id)
                    self._look_at_steps(self._shift)
                self._watch()
            else:
                self._all_done = not over
                self._end_well()
        elif self.agent is Agent.BARRIER or self.clock() < deadline:
            self.world.kernel.after(_POLL, self._look, shift, prefix, deadline)
        else:
            self.world.note(f"{self.id}: its agent fails in the exchange of roles")
            self.world.inject("exchange of roles timed out")
            self._fail()

    def _end_well(self) -> None:
        self.world.note(f"{self.id}: its agent ends, all done: {self._all_done}")
        self.shut_down(error=False)

    def _fail(self, of_workers: bool = False) -> None:
        self.shut_down(error=True, of_workers=of_workers)
        self.world.failed(self)

    def _watch(self) -> None:
        """torch polls ``num_nodes_waiting()``; here only once it is above 0."""
        if self.agent is Agent.RUNNING and self.node.num_nodes_waiting > 0 and not self._polling:
            self._polling = True
            pause = self.clock.real(self.world.chance.uniform(0, _POLL))
            self.world.kernel.after(pause, self._poll)

    def _poll(self) -> None:
        if self._is_late(self._poll):
            return
        self._polling = False
        if self.agent is Agent.RUNNING and self.node.num_nodes_waiting > 0:
            if self.node.is_cut_off and self._knows_that_it_is_closed:
                self.world.violated("two worlds", f"the workers of {self.id} stop in a closed run")
            if self.node.is_cut_off and self.clock() < self._lost_at - _EXACT:
                self.world.violated("two worlds", f"the workers of {self.id} stop too soon")
            if self.node.is_cut_off and self._nobody_is_accepted:
                self.world.violated(
                    "two worlds", f"the workers of {self.id} stop, refused with all"
                )
            self._failed = False
            self._stop_workers()

    def _stop_workers(self) -> None:
        if self._leave_at:
            self.leave()
            return
        self._set(Agent.STOPPING)
        world = self.world
        if self.wedged:
            world.note(f"{self.id}: its agent hangs")
            return
        world.kernel.after(world.chance.uniform(0, world.plan.stop), self._stopped, self._shift)

    def _stopped(self, shift: int) -> None:
        if shift != self._shift or self._is_late(self._stopped, shift):
            return
        if self._fatal:
            self._fail(of_workers=True)
            return
        plan = self.world.plan
        fails_again = self._failed and plan.torchrun and self._service.fails_again()
        if fails_again and self.node.in_round:
            Command(
                self.world, self._service.costs_the_others(), self, partial(self._judged, shift)
            )
        else:
            self._join_again()

    def _lost_before(self) -> str:
        """Which node of its round died before its workers failed, if all could have found out."""
        assert self._round is not None
        plan, failed_at = self.world.plan, self._failed_at
        hosts = {host.id: host for host in self.world.hosts}
        here = [hosts[it] for it in self._round.participants]
        leader = hosts.get((self.node.latest or self._round).leader or "")
        slow = plan.late or plan.staleness or plan.poll or plan.other_settings
        if plan.rates != (1.0, 1.0) or slow or len(here) >= _MANY or leader is None:
            return ""
        if not leader.alive or leader.grey or self.world.injected["slow store"]:
            return ""
        for host in (self, leader):
            of = host.track.evidence
            if max(of.troubled, of.disturbed, host.last_stall) > failed_at - plan.rules.lease:
                return ""
        dead = [
            host.id
            for host in here
            if not host.alive and host.changed < failed_at
            if host.node.record.status is Status.RUN and not host.node.done
        ]
        return " ".join(dead)

    def _judged(self, shift: int, costs: object) -> None:
        if shift != self._shift or self._is_late(self._judged, shift, costs):
            return
        if costs:
            self.world.inject("a newcomer failed again")
            if lost := self._lost_before():
                self.world.violated("goes on", f"{self.id} leaves, and {lost} was lost before")
            self.gives_up = "workers" if self.came_late else ""
            self._give_up(of_workers=True, looked=True)
            self.world.failed(self)
        else:
            self._join_again()

    def _join_again(self) -> None:
        self.world.note(f"{self.id} joins again")
        self.world.checker.stopped(self.id, self.node.record.beat)
        self._ask(self._failed)

    # Its check, and what comes of it.

    def _ask(self, failed: bool = False) -> None:
        """Its agent asks for a round, if this host is fit."""
        checked = not self.node.in_round or self.world.plan.checks_restarts
        if checked and self.world.is_unfit():
            self._stay_out(failed, 1.0, 0.0)
        else:
            self._order_join(failed)

    def _order_join(self, failed: bool = False, waited: float = 0.0) -> None:
        self._set(Agent.JOINING)
        self.world.checker.fit(self.id, self.node.record.beat)
        self.node.inbox.join(failed, waited)
        self._nudge()

    def _stay_out(self, failed: bool, pause: float, waited: float) -> None:
        world = self.world
        world.note(f"{self.id} is unfit")
        self._set(Agent.UNFIT)
        world.checker.unfit(self.id, self.node.record.beat)
        self.node.inbox.report_unfit(f"check {world.injected['check failed']} failed")
        self._nudge()
        if world.plan.exits_unfit:
            self.shut_down(error=True)
            world.ended_without_a_round(self, Failure.TIMEOUT)
            return
        wakes = self.clock.real(pause)
        world.kernel.after(wakes, self._check_again, self._shift, failed, pause, waited)

    def _stay_cut_off(self, shift: int) -> None:
        """What `StoreRendezvousHandler` does with a node whose network check failed."""
        if shift != self._shift or self._is_late(self._stay_cut_off, shift):
            return
        world = self.world
        self.node.inbox.report_unfit(self.node.record.unfit)
        self._nudge()
        if world.plan.exits_unfit:
            self.shut_down(error=True)
            world.ended_without_a_round(self, Failure.TIMEOUT)
            return
        world.kernel.after(self.clock.real(self._pause), self._ask_once_more, shift)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _ask_once_more(self, shift: int) -> None:
        if shift == self._shift and not self._is_late(self._ask_once_more, shift):
            self._order_join()

    def _check_again(self, shift: int, failed: bool, pause: float, waited: float) -> None:
        if shift != self._shift or self._is_late(self._check_again, shift, failed, pause, waited):
            return
        waited += pause
        if self.world.is_unfit():
            self._stay_out(failed, min(2 * pause, LONGEST_PAUSE), waited)
        else:
            self._order_join(failed, waited)

    def _nudge(self) -> None:
        """End a wait of the node."""
        self._did.clear()  # For something new.
        if isinstance(self._request, effects.Park | effects.Rest):
            self.receive(self._turn, None)

    def _is_late(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Whether the host stands still; then the call is made when it wakes."""
        if self._stalled_at is None:
            return False
        self._held.append((call, arguments))
        return True

    # The node's requests.

    def _live(
        self,
        life: Generator[Effect[Any], Any, object],
        at_end: Callable[[object], None] | None = None,
    ) -> None:
        self._life, self._at_end = life, at_end
        self._turn += 1
        self._step(None, None)

    def _end_life(self) -> None:
        if isinstance(self._request, effects.Park):
            self.world.store.unpark(self, self._request.key)
        if self._life is not None:
            self._life.close()
        self._life = self._request = self._at_end = None
        self._turn += 1

    def receive(self, turn: int, answer: Any, error: Exception | None = None) -> None:
        """An answer arrives, unless the request has been given up."""
        if turn != self._turn:
            return
        if self._is_late(self.receive, turn, answer, error):
            return
        self._turn += 1
        if isinstance(self._request, effects.Park):
            self.world.store.unpark(self, self._request.key)
        if self._delivery is not None and self._delivery[0] == turn and error is None:
            self._note_read(*self._delivery[1:])
        self._delivery = None
        self._note_trouble(error)
        self._note_contact(error)
        if error is None:
            self._note_news(answer)
        self._step(answer, error)

    def _note_contact(self, error: Exception | None) -> None:
        """Not heard, as protocol.md has it: look whether it stops its workers in time."""
        news = False
        reads, now = isinstance(self._request, effects.Read), self.world.kernel.now
        if error is None and isinstance(self._request, effects.PutRecord):
            self._accepted, self._refused_at = self._asked, None
            news = self.rules.outage_limit < math.inf
            self.accepted_since, self.fails_since = self.accepted_since or now, None
        elif error is None and reads:
            self._refused_at = None
        elif (
            isinstance(error, RendezvousConnectionError)
            and type(self._request) not in effects.LOCAL
        ):
            self.accepted_since, self.fails_since = None, self.fails_since or now
            if isinstance(error, AccessDeniedError) and self._refused_at is None:
                self._refused_at, news = self.clock(), True
        if news:
            left = max(0.0, self._lost_at - self.clock())
            self._plan_to_look(self.clock.real(left) + 1e-6)

    @property
    def _lost_at(self) -> float:
        """Until when its workers run on, if no heartbeat is accepted any more."""
        rules, limit = self.rules, self._accepted + self.rules.outage_limit
        if self._refused_at is None:
            return limit
        return min(limit, max(self._accepted + rules.lease, self._refused_at + rules.interval))

    @property
    def _mates(self) -> list[Host]:
        """The others in its round, as long as they are in none that is later."""
        here = self._round.participants if self._round is not None else ()
        return [it for it in self.world.hosts if it.id in here and it is not self]

    @property
    def _tells_within(self) -> float:
        """How long it may take until the nodes of a round know of each other how they stand."""
        return 1.1 * self.rules.interval + 2 * self.world.plan.rules.request_timeout

    @property
    def _others_go_on(self) -> bool:
        """Whether it must know by now that the store accepts others, if they have links."""
        rules, now = self.rules, self.world.kernel.now
        if rules.answer_timeout is None or self.clock() >= self._accepted + rules.outage_limit:
            return True
        waits = (self, *self._mates) if len(self._mates) >= rules.inline else (self,)
        # The leader alone links shards, and says that it is lost only after its own lease.
        if any(it.fails_since and it.clock() - it._lost_at < it._tells_within for it in waits):
            return False
        told = now - self.clock.real(self._tells_within + 1.1 * rules.interval)
        return any(
            it.alive and it.accepted_since is not None and it.accepted_since < told
            for it in self._mates
        )

    @property
    def _nobody_is_accepted(self) -> bool:
        """Whether it must know by now that nobody is, by links that nothing has befallen."""
        rules, plan, now = self.rules, self.world.plan, self.world.kernel.now
        if rules.answer_timeout is None or self.clock() >= self._accepted + rules.outage_limit:
            return False
        if plan.breaks or plan.without_links or self._round is None:
            return False
        told = now - self.clock.real(self._tells_within + rules.interval)
        here = all(
            it.agent is Agent.RUNNING
            and it.fails_since is not None
            and it.fails_since - it.changed > self._tells_within
            for it in (self, *self._mates)
        )
        return here and all(
            it.fails_since is not None and it.accepted_since is None and it.fails_since < told
            for it in self.world.hosts
            if it.alive
        )

    @property
    def _knows_that_it_is_closed(self) -> bool:
        """In a closed run nobody beats, and workers may run to their end."""
        return self.node.latest is not None and self.node.latest.closed

    @property
    def _could_have_polled(self) -> bool:
        """Whether it has neither stood still nor begun to run just now."""
        ran = (self.world.kernel.now - self.changed) * self.clock.rate
        return min(ran, self.clock() - self.woke) >= _STOPS_WITHIN - _EXACT

    def _plan_to_look(self, seconds: float) -> None:
        """Its agent polls in real life; here only when that may tell it something."""
        after = self.world.kernel.after
        after(seconds, self._watch)
        after(seconds + self.clock.real(_STOPS_WITHIN), self._look_at_rule_24, self._accepted)

    def _look_at_rule_24(self, accepted: float) -> None:
        if accepted != self._accepted or self._is_late(self._plan_to_look, 0.0):
            return
        if self._knows_that_it_is_closed:
            return
        over = self.clock() - self._lost_at
        if self.agent is Agent.RUNNING and over >= _STOPS_WITHIN - _EXACT:
            if self._could_have_polled and self._others_go_on:
                self.world.violated("two worlds", f"the workers of {self.id} run on, cut off")
            self._plan_to_look(0.0)

    @property
    def _outage(self) -> float:
        """As protocol.md has it, and not as the code under test computes it."""
        return max(self.rules.interval, self.rules.lease / 3)

    def _note_trouble(self, error: Exception | None) -> None:
        """What it saw before an outage proves nothing after it."""
        clock = self.clock()
        if error is not None:
            self.track.evidence.troubled = self.world.kernel.now
            if self._trouble is None:
                waited = isinstance(self._request, effects.Park)
                self._trouble = clock if waited else self._asked
        elif not isinstance(self._request, _LOCAL):
            pause = self._request.seconds if isinstance(self._request, effects.Park) else 0.0
            since = self._asked + pause if self._trouble is None else self._trouble
            # A client may have repeated the request until the store was back.
            if clock - since > self._outage:
                evidence = self.track.evidence
                evidence.disturbed = evidence.outage = self.world.kernel.now
                evidence.known = {node: it.beat for node, it in evidence.seen.items()}
            if self._trouble is not None:
                self.track.evidence.troubled = self.world.kernel.now
            self._trouble = None

    def _note_news(self, answer: Any) -> None:
        """What the document says is a word of its leader, and a reason to look for a tombstone."""
        match self._request:
            case effects.ReadTombstone(incarnation) if answer is None:
                self._no_tombstone[incarnation] = self._asked
                return
            case effects.CompareAndSet():
                entry = answer[0]
            case effects.Read(key) if key == STATE_KEY:
                entry = answer
            case effects.Park(key) if key == STATE_KEY and answer is not None:
                entry = answer
            case _:
                return
        version = entry.version if entry else None
        if version == self._version:
            return
        self._version = version
        self._no_tombstone.clear()
        self._vain_listings.clear()
        with suppress(RendezvousStateError):
            document = RoundDocument.decode(entry.value) if entry else None
            if document is not None and document.leader is not None:
                self.track.evidence.heard[document.leader] = self.world.kernel.now
            if document is not None:
                self._note_later_round(document)

    def _note_later_round(self, document: RoundDocument) -> None:
        """Where a later round of its run has run without it, its workers are to stop at once."""
        mine = self._round
        if self.agent is not Agent.RUNNING or mine is None or not document.is_of(mine):
            return
        known = self.node.latest
        if document.closed or (known and (known.closed or known.place > document.place)):
            return  # A node that knows that its run was closed goes on, whatever the store forgot.
        if document.round > mine.round and document.ran not in (None, mine.world_id):
            seconds = self.clock.real(_STOPS_WITHIN)
            self.world.kernel.after(seconds, self._look_at_later_round, self._shift)

    def _look_at_later_round(self, shift: int) -> None:
        if shift == self._shift and self.agent is Agent.RUNNING and not self.stalls:
            if self._could_have_polled:
                self.world.violated("two worlds", f"the workers of {self.id} run on, replaced")
            self.world.kernel.after(
                self.clock.real(_STOPS_WITHIN), self._look_at_later_round, shift
            )

    def _step(self, answer: Any, error: Exception | None) -> None:
        life = self._life
        if isinstance(self._request, effects.PutTombstone):
            self.world.checker.left_tombstone(self._request.document, error is None)
        while life is not None:
            try:
                request = life.throw(error) if error is not None else life.send(answer)
            except StopIteration as stop:
                self._finish(stop.value)
                return
            except (RendezvousConnectionError, RendezvousStateError):
                self._finish(None)
                return
            self._request, error = request, None
            self._note_action(request)
            if isinstance(request, effects.FinishJoin):
                answer = None
                self._ended(request.outcome)
                life = self._life  # The agent may have ended it.
                continue
            if isinstance(request, effects.Tell):
                answer = None
                if request.warns:
                    self.world.inject(f"told: {request.about}")
                continue
            if isinstance(request, effects.KeepLinks):
                answer = None
                peers = tuple(node for node, _ in request.peers)
                self.world.connections.hold(self, peers, request.standing)
                continue
            if isinstance(request, effects.Register):
                answer = None
                continue
            self._issue(request)
            break
        self._watch()

    def _note_action(self, request: Effect[Any]) -> None:
        if not isinstance(request, _LOCAL) or isinstance(request, effects.Rest):
            self._did.clear()
        elif request in self._did:
            self.world.violated(
                "rests",
                f"{self.id} repeats {request}, and neither asked, nor waited, nor heard anything",
            )
        else:
            self._did.append(request)

    def _hear(self, of: str, news: object) -> None:
        """It is told what came of what it does beside; what it was told before is no news."""
        if self._heard.get(of) != news:
            self._did.clear()
        self._heard[of] = news

    def _waited(self, seconds: float, ended: float) -> None:
        """What it does beside had not ended after so long."""
        if seconds > 0 and ended > self.world.kernel.now + seconds:
            self._did.clear()

    def _finish(self, result: object) -> None:
        at_end = self._at_end
        self._life = self._request = self._at_end = None
        if at_end is not None:
            at_end(result)

    def _issue(self, request: Effect[Any]) -> None:
        world, turn = self.world, self._turn
        world.requests += 1
        self._requests += 1
        self.clock.looks = 0
        self._asked = self.clock()
        self._asked_at = world.kernel.now
        if world.kernel.now >= self._second_ends:
            self._requests, self._second_ends = 0, world.kernel.now + 1.0
        elif self._requests > _MOST_REQUESTS:
            world.violated("rests", f"{self.id} asks without a pause: {request}")
        again = (
            isinstance(request, effects.ReadTombstone)
            and (asked := self._no_tombstone.get(request.incarnation)) is not None
            and self._asked - asked < self.rules.sweep_after
        )
        if again and self.alive:  # A closer asks anew at each try.
            world.violated("rests", f"{self.id} asks again: {request}")
        if self._closes and not world.network.quiet and world.cuts_short():
            world.note(f"{self.id} dies while it closes the run, before {request}"[:160])
            world.checker.closing_failed(self.node.latest, world.store.tombstones)
            self._end_life()
        elif isinstance(request, effects.Rest):
            seconds = 0.001 if self.node.has_messages else self.clock.real(request.seconds)
            world.kernel.after(seconds, self.receive, turn, None)
        elif isinstance(request, effects.OpenMaster):
            self._open_master(turn, request)
        elif isinstance(request, effects.ReadExclusions) and not world.plan.orders:
            world.kernel.after(1e-6, self.receive, turn, ())
        elif isinstance(request, effects.DialPeer):
            self._dial(turn, request)
        elif isinstance(request, effects.Park):
            if self.node.has_messages:
                world.kernel.after(0.001, self.receive, turn, None)
                return
            # Time always moves between two looks at a real clock.
            end = world.kernel.now + self.clock.real(request.seconds) + 1e-6
            world.kernel.at(end, self.receive, turn, None)
            world.network.carry(self, turn, request)
        else:
            world.network.carry(self, turn, request)

    def _open_master(self, turn: int, request: effects.OpenMaster) -> None:
        """At once as a rule; else the node is told later, in the midst of whatever it does."""
        now, world_id = self.world.kernel.now, request.key
        if self._opening[0] != world_id or self._opening[1] <= now:
            self._opening = world_id, now + self._begin_to_open(request)
        ends = min(self._opening[1], now + request.seconds)
        self._waited(request.seconds, self._opening[1])
        # Not before the node was told that it is open.
        self.world.kernel.at(max(ends, now + 0.0001) + 1e-6, self.receive, turn, None)

    def _begin_to_open(self, request: effects.OpenMaster) -> float:
        """Seconds until the node is told."""
        world, world_id = self.world, request.key
        self._masters += 1
        before = self._openings[1] if self._openings[0] == world_id else []
        now = world.kernel.now
        self._openings = world_id, [*(it for it in before if now - it < 1.0), now]
        if len(self._openings[1]) > _MOST_OPENINGS:
            world.violated("rests", f"{self.id} opens a TCPStore again and again, without a pause")
        plan, chance, pause, fails = world.plan, world.chance, 0.001, False
        result: str | Exception
        if not world.network.quiet:
            if chance.random() < plan.slow_master:
                world.inject("slow TCPStore")
                pause = chance.uniform(0.0, 2.0) * plan.rules.lease
            if fails := chance.random() < plan.no_master:
                world.inject("no TCPStore")
                kind = RendezvousStateError if chance.random() < 0.2 else RendezvousConnectionError
                result = kind("cannot open a TCPStore")
        if not fails:
            result = f"{self.id}:{self._masters}"
            self._opened_for[result] = world_id
        world.kernel.after(pause, self._opened, request, result, request.wakes and pause > 0.05)
        return pause

    def _opened(self, request: effects.OpenMaster, result: str | Exception, nudge: bool) -> None:
        self._hear("master", str(result))
        self.node.finished(request, result)
        if nudge:
            self._nudge()

    def _dial(self, turn: int, request: effects.DialPeer) -> None:
        """In a thread of its own, as `_open_master`."""
        world, now = self.world, self.world.kernel.now
        if not self.rules.network_check:
            world.violated("network", f"{self.id} dials {request}, and has no such option")
        waits = self.clock.real(request.seconds)
        if self._dialling[0] != request.key:
            seconds, error = world.network.dial(self, request)
            document = self.node.document
            assert document is not None
            self._dialling = request.key, now + seconds
            world.kernel.after(seconds, self._dialled, request, world.whole(document),
                               seconds * self.clock.rate, error,
                               request.wakes and seconds > waits)  # fmt: skip
        ends = min(self._dialling[1], now + waits)
        self._waited(waits, self._dialling[1])
        world.kernel.at(max(ends, now + 0.0001) + 1e-6, self.receive, turn, None)

    def _dialled(self, request: effects.DialPeer, document: RoundDocument, seconds: float,
                 error: Exception | None, nudge: bool) -> None:  # fmt: skip
        if self._is_late(self._dialled, request, document, seconds, error, nudge):
            return
        self.world.checker.dialled(
            self.id, document, request.node, request.exchanges, error is None
        )
        self._hear("peer", (request.key, str(error)))
        self.node.finished(request, seconds if error is None else error)
        if nudge:
            self._nudge()

    def awaits(self, turn: int) -> bool:
        """Whether the request of the turn is still outstanding."""
        return turn == self._turn

    def fails(self, turn: int, why: str) -> None:
        """The outstanding request ends in an error."""
        self.receive(turn, None, RendezvousConnectionError(why))

    def is_refused(self, turn: int) -> None:
        """The store answers that this host has no right."""
        self.receive(turn, None, AccessDeniedError("refused"))

    def break_wait(self) -> None:
        """The connection on which it waits breaks."""
        if isinstance(self._request, effects.Park):
            self.fails(self._turn, "the connection broke")

    def perform(
        self, turn: int, request: Effect[Any], back: float, evidence: Evidence | None
    ) -> None:
        """The request has reached the store: do it, and send the answer; turn -1: nobody waits."""
        world, store = self.world, self.world.store
        answer: Any = None
        match request:
            case effects.Park(key, version, _):
                if turn == self._turn:
                    asked = world.kernel.now
                    store.park(self, key, version, lambda entry: self._notify(turn, entry, asked))
                return
            case effects.PutRecord(node, record, ring):
                if record.master and self._opened_for.get(record.master) != record.world_id:
                    world.violated("confirmed", f"{self.id} opened {record.master} for another")
                store.put(NODES_PREFIX + node, record.encode())
                world.checker.beat_arrived(node, record, store.epoch)
                if ring and not world.network.splits_batch():
                    store.put(BELL_KEY, b"")
            case effects.PutShards(values):
                for key, value in values.items():
                    world.shards[key] = store.put(key, value)
            case effects.Ring():
                store.put(BELL_KEY, b"")
            case effects.Read(key):
                answer = store.entries.get(key)
                if key.startswith(NODES_PREFIX):
                    self._read(turn, {key: answer} if answer else {}, key)
            case effects.CompareAndSet(key, value, expected):
                before = store.entries.get(key)
                answer = store.compare_and_set(key, value, expected)
                if answer[1] and evidence is not None:
                    try:
                        after = RoundDocument.decode(value)
                    except RendezvousStateError as error:
                        world.violated("readable", f"{self.id}: {error}")
                    world.wrote(self, before, after, evidence, given_up=turn < 0)
            case effects.List(prefix):
                answer = world.network.list(prefix)
                if prefix == NODES_PREFIX:
                    self._read(turn, answer, None)
            case effects.Drop(keys):
                for key in keys:
                    store.delete(key)
            case effects.DropStores(incarnation, before_round):
                kept = store_prefix(incarnation, 0).removesuffix("0/")
                for key in [key for key in store.entries if key.startswith(STORE_PREFIX)]:
                    number = key.removeprefix(kept).partition("/")[0]
                    if not (key.startswith(kept) and int(number) >= before_round):
                        store.delete(key)
            case effects.Expire(seconds):
                store.expire(seconds)
            case effects.RecordHistory():
                pass  # It stands outside the run's keys.
            case effects.PutTombstone(document):
                store.put_tombstone(document.incarnation, document.outcome or Ended.CLOSED)
            case effects.ReadExclusions():
                held = (it for _, it in world.exclusions.values())
                answer = tuple(it for it in held if it.is_in_force(self._wall()))
            case effects.ReadTombstone(incarnation):
                answer = store.tombstones.get(incarnation)
                if turn == self._turn:
                    self.track.evidence.asked[incarnation] = world.kernel.now
        world.network.answer(self, turn, answer, back)

    def _notify(self, turn: int, entry: Entry, asked: float) -> None:
        world = self.world
        delay, poll = world.network.latency(), world.chance.uniform(0, world.plan.poll)
        # A wait begins with a look, so that only a later change awaits a poll.
        world.network.answer(self, turn, entry, delay + (poll if world.kernel.now > asked else 0))

    def _read(self, turn: int, entries: dict[str, Entry], key: str | None) -> None:
        """Note what evidence of others this host is being sent."""
        if turn != self._turn:
            return
        now = self.world.kernel.now
        records = {
            name.removeprefix(NODES_PREFIX): self.world.decode(entry)
            for name, entry in entries.items()
        }
        self._delivery = turn, key, records, now
        self._looked = self._asked_at

    def _note_vain(self, vain: bool) -> None:
        """A leader looks again when something is new, or when time may tell it something."""
        if not vain:
            self._vain_listings.clear()
            return
        now, interval = self.world.kernel.now, self.clock.real(self.rules.interval)
        self._vain_listings = [it for it in self._vain_listings if now - it < interval]
        self._vain_listings.append(now)
        if len(self._vain_listings) > _MOST_VAIN + 2 * len(self.world.hosts):
            self.world.violated("rests", f"{self.id} lists again and again, and nothing is new")

    def _note_read(self, key: str | None, records: dict[str, NodeRecord], now: float) -> None:
        evidence = self.track.evidence
        if key is None:
            document = self.node.document
            document = self.world.whole(document) if document is not None else None
            named = {*document.participants, *document.previous} if document else set()
            if document is not None and document.leader is not None:
                named.add(document.leader)
            came = self.world.kernel.now
            self.listing = records
            self._note_vain(all(_shows_no_news(it, evidence.seen, records) for it in records))
            evidence.looked = self._looked
            evidence.changed = {
                node: evidence.changed[node]
                if node in evidence.changed and _shows_no_news(node, evidence.seen, records)
                else came
                for node in {*records, *named}
            }
            evidence.seen = _never_back(evidence.seen, records)
            evidence.listed = _never_back(evidence.listed, records)
            known = self.node.document
            if known is not None and known.is_whole and self.node.record.status != Status.LEFT:
                self.world.checker.looked(self.id, known)
            evidence.read.update(dict.fromkeys({*records, *named}, now))
            # Whoever is in no listing is forgotten; it would be seen as if for the first time.
            listed = {*records, *named}
            evidence.known = {node: it for node, it in evidence.known.items() if node in listed}
            evidence.missing = {
                node: evidence.missing.get(node, self.world.kernel.now)
                for node in named
                if node not in records
            }
        else:
            node = key.removeprefix(NODES_PREFIX)
            was, record = evidence.seen.get(node), records.get(node)
            if record is None:
                # Its lease is not known any more either.
                evidence.seen = {name: it for name, it in evidence.seen.items() if name != node}
                evidence.missing = {node: self.world.kernel.now, **evidence.missing}
            elif was is None or was.beat <= record.beat:
                evidence.seen = {**evidence.seen, node: record}
            evidence.read[node] = now
            if record is not None:
                evidence.missing = {n: it for n, it in evidence.missing.items() if n != node}


def _never_back(
    known: Mapping[str, NodeRecord], records: Mapping[str, NodeRecord]
) -> dict[str, NodeRecord]:
    """What is known once ``records`` are listed; an older one is a write that was held up."""
    return {
        node: was if (was := known.get(node)) and was.beat > record.beat else record
        for node, record in records.items()
    }


def _shows_no_news(
    node: str, known: Mapping[str, NodeRecord], records: Mapping[str, NodeRecord]
) -> bool:
    was, record = known.get(node), records.get(node)
    return record is None or (was is not None and record.beat <= was.beat)


_LOCAL = (
    effects.Rest
    | effects.Begin
    | effects.KeepLinks
    | effects.Register
    | effects.Tell
    | effects.FinishJoin
)
