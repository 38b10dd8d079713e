"""One simulated host: a node's requests carried over a faulty network, and torch's agent above."""

from __future__ import annotations

import random
from collections.abc import Generator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rdzv_plugins import steps
from rdzv_plugins.closing import close_run
from rdzv_plugins.decisions import Rules
from rdzv_plugins.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    RoundDocument,
    Wants,
)
from rdzv_plugins.documents import Outcome as Ended
from rdzv_plugins.kv import Entry, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.steps import Outcome, Request

from .invariants import Evidence
from .kernel import Clock

if TYPE_CHECKING:
    from .world import World

__all__ = ["Agent", "Host"]

_POLL = 0.1
"""Seconds between two looks of the agent at ``num_nodes_waiting()``."""
_CLOSE_TIMEOUT = 10.0
_MOST_REQUESTS = 2000
"""In a second, on one host; a leader whose store answers in no time comes to some hundreds."""


class Agent(StrEnum):
    """Where the host's torch agent is."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping its workers"
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
        self.stalled_until = 0.0
        self._stalled_at: float | None = None
        self.cut_off = False
        self.track = world.checker.host(node_id, self.clock.rate, rules)
        record = NodeRecord(
            address=address,
            pid=world.started,
            beat=0,
            wants=Wants.JOIN,
            round=-1,
            min_nodes=rules.min_nodes,
            max_nodes=rules.max_nodes,
            interval=rules.interval,
            lease=rules.lease,
            rank=chance.choice((None, chance.randrange(8))),
        )
        self.node = world.build(
            node_id,
            record,
            rules,
            world.join_timeout,
            self.clock,
            random.Random(chance.getrandbits(64)),
        )
        self._life: Generator[Request, Any, object] | None = None
        self._request: Request | None = None
        self._turn = 0
        self._polling = False
        self._masters = 0
        self._close_until = 0.0
        self._requests = 0
        self._second_ends = 0.0
        self.node.order_join()
        self._live(self.node.run())

    @property
    def alive(self) -> bool:
        return self.agent is not Agent.GONE

    # What befalls it.

    def crash(self) -> None:
        self.agent = Agent.GONE
        self.world.checker.stopped(self.id)
        self._end_life()

    def stall(self, seconds: float, frozen: bool) -> None:
        """Stand still, then go on as if nothing had happened."""
        now = self.world.kernel.now
        if now >= self.stalled_until:
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
        # Certainly later than an interval, wherever in a wait of 1.1 the stall began.
        if self.clock() - self._stalled_at > 2.2 * self.rules.interval:
            self.track.evidence.disturbed = now
        self._stalled_at = None
        self.clock.set()

    def set_rate(self, rate: float) -> None:
        self.clock.set(rate)
        self.track.rate = max(self.track.rate, rate)

    def leave(self) -> None:
        """End, and say so: what a signal's handler does."""
        self.world.note(f"{self.id} leaves")
        self._depart()
        if self.node.latest is None or not self.node.latest.closed:
            self._live(self.node.farewell())

    def finish(self) -> None:
        """The job is done on this host: close the run if this host is in it."""
        if not self.node.in_round:
            self.leave()
            return
        self.world.note(f"{self.id} is done and closes the run")
        self._depart()
        self._close(self.world.kernel.now + _CLOSE_TIMEOUT)

    def _depart(self) -> None:
        self._end_life()
        self.agent = Agent.GONE
        self.world.checker.stopped(self.id)

    def _close(self, deadline: float) -> None:
        self._close_until = deadline
        work = close_run(self.id, self.node.latest, Ended.SUCCEEDED, "done", 60.0)
        self._live(work)

    def fail_workers(self) -> None:
        if self.agent is Agent.RUNNING:
            self.world.note(f"{self.id}: its workers fail")
            self._stop_workers()

    # The agent.

    def _ended(self, outcome: Outcome) -> None:
        world, document = self.world, outcome.document
        if self.agent is not Agent.JOINING:
            world.violated("join ends", f"{self.id} was given {outcome}, it had not asked")
        if document is not None:
            world.note(f"{self.id} runs round {document.round}")
            self.agent = Agent.RUNNING
            self._masters_seen(document)
            world.checker.given(self.id, document)
            world.rounds_given += 1
            return
        world.note(f"{self.id}: its join failed: {outcome.failure or outcome.error}")
        world.checker.stopped(self.id)
        self.agent = Agent.IDLE
        if outcome.failure in ("closed", "spare closed"):
            self.agent = Agent.GONE
            # Told of an earlier run of this id, it is wanted in the one that goes on.
            world.start_again(self.address)
            return
        again = outcome.failure != "mismatch" and world.chance.random() < world.plan.rejoins
        if outcome.failure == "timeout" and world.network.quiet:
            # It would keep its short time-out; the node in its place has a long one.
            again = False
        world.kernel.after(world.chance.uniform(0, 1), self._ask_again if again else self._give_up)

    def _masters_seen(self, document: RoundDocument) -> None:
        if document.master is None or not document.master.startswith(document.participants[0]):
            self.world.violated("agreement", f"{document.master} is not of rank 0")

    def _give_up(self) -> None:
        if self.agent is Agent.IDLE:
            self.leave()
            if not self.foreign:
                self.world.start_again(self.address)

    def _ask_again(self) -> None:
        if self.agent is Agent.IDLE:
            self._order_join()

    def _poll(self) -> None:
        if self._is_late(self._poll):
            return
        self._polling = False
        if self.agent is Agent.RUNNING and self.node.waiting > 0:
            self._stop_workers()

    def _stop_workers(self) -> None:
        self.agent = Agent.STOPPING
        world = self.world
        world.kernel.after(world.chance.uniform(0, world.plan.stop), self._stopped)

    def _stopped(self) -> None:
        if self.agent is Agent.STOPPING and not self._is_late(self._stopped):
            self.world.note(f"{self.id} joins again")
            self.world.checker.stopped(self.id)
            self._order_join()

    def _order_join(self) -> None:
        self.agent = Agent.JOINING
        self.node.order_join()
        if isinstance(self._request, steps.Park | steps.Rest):
            self.receive(self._turn, None)

    def _is_late(self, call: Any) -> bool:
        """Whether the host stands still; then the call is made when it wakes."""
        late = self.world.kernel.now < self.stalled_until
        if late:
            self.world.kernel.at(self.stalled_until, call)
        return late

    # The node's requests.

    def _live(self, life: Generator[Request, Any, object]) -> None:
        self._life = life
        self._turn += 1
        self._step(None, None)

    def _end_life(self) -> None:
        if isinstance(self._request, steps.Park):
            self.world.store.unpark(self, self._request.key)
        if self._life is not None:
            self._life.close()
        self._life = self._request = None
        self._turn += 1

    def receive(self, turn: int, answer: Any, error: Exception | None = None) -> None:
        """An answer arrives, unless the request has been given up."""
        now = self.world.kernel.now
        if turn != self._turn:
            return
        if now < self.stalled_until:
            self.world.kernel.at(self.stalled_until, self.receive, turn, answer, error)
            return
        self._turn += 1
        if isinstance(self._request, steps.Park):
            self.world.store.unpark(self, self._request.key)
        if error is not None:
            self.track.evidence.disturbed = now
        self._step(answer, error)

    def _step(self, answer: Any, error: Exception | None) -> None:
        life = self._life
        while life is not None:
            try:
                request = life.throw(error) if error is not None else life.send(answer)
            except StopIteration:
                self._life = self._request = None
                return
            except RendezvousConnectionError:
                self._life = self._request = None
                self._departure_failed()
                return
            self._request, error = request, None
            if isinstance(request, steps.Deliver):
                answer = None
                self._ended(request.outcome)
                life = self._life  # The agent may have ended it.
                continue
            self._issue(request)
            break
        if self.agent is Agent.RUNNING and self.node.waiting > 0 and not self._polling:
            self._polling = True
            pause = self.clock.real(self.world.chance.uniform(0, _POLL))
            self.world.kernel.after(pause, self._poll)

    def _departure_failed(self) -> None:
        if self.world.kernel.now < self._close_until:
            self._close(self._close_until)

    def _issue(self, request: Request) -> None:
        world, turn = self.world, self._turn
        world.requests += 1
        self._requests += 1
        self.clock.looks = 0
        if world.kernel.now >= self._second_ends:
            self._requests, self._second_ends = 0, world.kernel.now + 1.0
        elif self._requests > _MOST_REQUESTS:
            world.violated("rests", f"{self.id} asks without a pause: {request}")
        if isinstance(request, steps.Rest):
            seconds = 0.001 if self.node.ordered else self.clock.real(request.seconds)
            world.kernel.after(seconds, self.receive, turn, None)
        elif isinstance(request, steps.OpenMaster):
            world.kernel.after(0.001, self._opened, turn, request.naming)
        elif isinstance(request, steps.Park):
            if self.node.ordered:
                world.kernel.after(0.001, self.receive, turn, None)
                return
            # Time always moves between two looks at a real clock.
            end = world.kernel.now + self.clock.real(request.seconds) + 1e-6
            world.kernel.at(end, self.receive, turn, None)
            world.network.carry(self, turn, request)
        else:
            world.network.carry(self, turn, request)

    def _opened(self, turn: int, naming: str) -> None:
        self._masters += 1
        self.node.master_opened(naming, f"{self.id}:{self._masters}", None)
        self.receive(turn, None)

    def fails(self, turn: int, why: str) -> None:
        """The outstanding request ends in an error."""
        self.receive(turn, None, RendezvousConnectionError(why))

    def break_wait(self) -> None:
        """The connection on which it waits breaks."""
        if isinstance(self._request, steps.Park):
            self.fails(self._turn, "the connection broke")

    def perform(self, turn: int, request: Request, back: float, evidence: Evidence | None) -> None:
        """The request has reached the store: do it, and send the answer."""
        world, store = self.world, self.world.store
        answer: Any = None
        match request:
            case steps.Park(key, version, _):
                if turn == self._turn:
                    store.park(self, key, version, lambda entry: self._notify(turn, entry))
                return
            case steps.PutRecord(node, record, ring):
                store.put(NODES_PREFIX + node, record.encode())
                world.checker.beat_arrived(node, record, store.epoch)
                if ring and not world.network.splits_batch():
                    store.put(BELL_KEY, b"")
            case steps.Ring():
                store.put(BELL_KEY, b"")
            case steps.Read(key):
                answer = store.entries.get(key)
                if key != STATE_KEY:
                    self._read(turn, {key: answer} if answer else {}, key)
            case steps.CompareAndSet(key, value, expected):
                before = store.entries.get(key)
                answer = store.compare_and_set(key, value, expected)
                if answer[1] and evidence is not None:
                    try:
                        after = RoundDocument.decode(value)
                    except RendezvousStateError as error:
                        world.violated("readable", f"{self.id}: {error}")
                    world.wrote(self, before, after, evidence)
            case steps.List(prefix):
                answer = world.network.list(prefix)
                self._read(turn, answer, None)
            case steps.Drop(keys):
                for key in keys:
                    store.delete(key)
            case steps.PutTombstone(document):
                store.tombstones[document.incarnation] = document.outcome or Ended.CLOSED
            case steps.ReadTombstone(incarnation):
                answer = store.tombstones.get(incarnation)
        world.network.answer(self, turn, answer, back)

    def _notify(self, turn: int, entry: Entry) -> None:
        world = self.world
        delay = world.network.latency() + world.chance.uniform(0, world.plan.poll)
        world.network.answer(self, turn, entry, delay)

    def _read(self, turn: int, entries: dict[str, Entry], key: str | None) -> None:
        """Note what evidence of others this host is being sent."""
        if turn != self._turn:
            return
        now, evidence = self.world.kernel.now, self.track.evidence
        records = {
            name.removeprefix(NODES_PREFIX): self.world.decode(entry)
            for name, entry in entries.items()
        }
        if key is None:
            document = self.node.document
            named = {*document.participants, *document.previous} if document else set()
            evidence.seen = records
            evidence.read.update(dict.fromkeys({*records, *named}, now))
        else:
            node = key.removeprefix(NODES_PREFIX)
            evidence.seen = {**evidence.seen, **records}
            evidence.read[node] = now
