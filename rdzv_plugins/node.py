"""One node's life in a run, as a generator of requests: the protocol without I/O or threads.

`Node.run` yields requests and is sent their answers; a failed request is thrown into it. Whoever
drives it only carries requests out: `handler.py` on a store, the simulator on virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from rdzv_plugins import decisions, protocol
from rdzv_plugins.closing import tidy_up
from rdzv_plugins.decisions import Failure
from rdzv_plugins.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Phase,
    RoundDocument,
    Wants,
)
from rdzv_plugins.kv import Entry, RendezvousConnectionError, RendezvousStateError, Version
from rdzv_plugins.observer import Observer
from rdzv_plugins.steps import (
    CompareAndSet,
    Deliver,
    Drop,
    OpenMaster,
    Outcome,
    Park,
    PutRecord,
    Request,
    Rest,
    Ring,
    Steps,
)

__all__ = ["Node"]

_LONGEST_OUTAGE_PAUSE = 0.5


class Node:
    """What a node remembers between two decisions.

    Args:
        node_id: unique in the run, without spaces.
        record: what this node says of itself; its beat, wants and round change here.
        rules: the run's settings.
        join_timeout: seconds within which a join must end in a round; spares wait for any time.
        clock: this node's monotonic clock, in seconds.
        chance: the source of its random share.

    Public members may be used from other threads; the generators are driven by one.
    """

    def __init__(
        self,
        node_id: str,
        record: NodeRecord,
        rules: decisions.Rules,
        join_timeout: float,
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        self.id = node_id
        self.record = record
        self.waiting = 0
        self._rules = rules
        self._join_timeout = join_timeout
        self._clock = clock
        self._chance = chance
        self._share = chance.random()
        self._seen = Observer(node_id, rules, clock)
        self._joining = False
        self._join_ordered = False
        self._join_deadline = 0.0
        self._member: RoundDocument | None = None
        self._confirmed: RoundDocument | None = None
        # The record is to be written before the next decision; and the leader told.
        self._record_due = False
        self._ring = False
        # Not the first: it comes with the order to join, and a look at the leader can wait.
        self._next_beat = clock() + rules.interval
        # As a leader: the bell as last heard, and a round that has left something behind, with
        # the seconds that it took to form.
        self._bell: Version | None = None
        self._untidy: tuple[RoundDocument, float] | None = None

    @property
    def document(self) -> RoundDocument | None:
        """The document as last read."""
        return self._seen.document

    @property
    def join_ordered(self) -> bool:
        """Whether an ordered join has not been taken up yet."""
        return self._join_ordered

    @property
    def latest(self) -> RoundDocument | None:
        """The document of the highest place that this node has seen."""
        return self._seen.latest

    @property
    def in_round(self) -> bool:
        """Whether the run, as last seen, still counts on this node: it would miss it."""
        document = self.document
        if self._member is None or self.record.wants is Wants.LEFT:
            return False  # What it gave up on is the business of the others.
        if document is None:
            return True
        return self.id in document.ranks or self.id in document.previous

    def order_join(self) -> None:
        """Ask to be in the next round; the driver ends its `Park` or `Rest` early for it."""
        self._join_ordered = True

    def run(self) -> Steps:
        """Live until the driver stops driving."""
        failures = 0
        while True:
            try:
                yield from self._turn()
                failures = 0
            except (RendezvousConnectionError, RendezvousStateError) as error:
                failures += 1
                yield from self._bear(error, failures)

    def farewell(self) -> Steps:
        """Announce that this node leaves; driven once, after `run` has been stopped. Rule 10."""
        self.record = replace(self.record, beat=self.record.beat + 1, wants=Wants.LEFT)
        yield PutRecord(self.id, self.record, ring=True)
        for _ in range(3):
            yield from self._seen.read_document()
            document = self.document
            if document is None or document.leader != self.id or document.phase is Phase.CLOSED:
                return
            if (yield from self._write(replace(document, leader=None))):
                return

    def _turn(self) -> Steps:
        self._take_order()
        seen = self._seen
        if self.record.wants is not Wants.LEFT and not seen.closed:
            yield from self._beat()
        if seen.document_due:
            yield from seen.read_document()
        yield from seen.observe()
        seen.judge_punctuality()
        action = protocol.decide(view := self._view())
        self.waiting = protocol.nodes_waiting(view)
        # After the store has answered: that it is away is told as such, and a round that runs by
        # now is no failure.
        if not isinstance(action, decisions.Start | decisions.Fail) and self._is_late():
            action = decisions.Fail(Failure.TIMEOUT)
        yield from self._act(action)

    def _take_order(self) -> None:
        if self._join_ordered:
            self._join_ordered = False
            self._joining = True
            self._join_deadline = self._clock() + self._join_timeout
            self.record = replace(self.record, wants=Wants.JOIN, master=None)
            self._record_due = self._ring = True
            self._seen.document_due = True
            # Who joins again may have lost the leader: its last beat is seen now, not at our next.
            self._seen.leader_due = self._seen.leader_due or self._member is not None
            self.waiting = 0

    def _is_late(self) -> bool:
        if not self._joining or self._clock() < self._join_deadline:
            return False
        # A spare waits for as long as the run lasts, as torch's redundant nodes do.
        if self.record.wants is Wants.SPARE:
            self._join_deadline = self._clock() + self._join_timeout
            return False
        # Named, it would break up a round that is about to run: among many nodes that have waited
        # for long, one after the other would.
        document, patience = self.document, self._seen.document_since + self._rules.lease
        if document is None or document.phase is not Phase.CONFIRMING:
            return True
        if self.id not in document.ranks or self._clock() >= patience:
            return True
        self._join_deadline = patience
        return False

    def _beat(self) -> Steps:
        """Write the record if it changed or a keep-alive interval has passed."""
        punctual = self._clock() >= self._next_beat
        if not (self._record_due or punctual):
            return
        self.record = replace(self.record, beat=self.record.beat + 1)
        ring, self._record_due, self._ring = self._ring, False, False
        try:
            yield PutRecord(self.id, self.record, ring)
        except RendezvousConnectionError:
            self._record_due, self._ring = True, ring
            raise
        # Never earlier than an interval; later by chance, or thousands of nodes beat in step.
        interval = self._rules.interval
        self._next_beat = self._clock() + interval * (1 + 0.1 * self._chance.random())
        if punctual:
            self._seen.leader_due = self._seen.list_due = True

    def _view(self) -> decisions.View:
        now, seen = self._clock(), self._seen
        minimum_age = None if seen.minimum_since is None else now - seen.minimum_since
        return decisions.View(
            me=self.id,
            rules=self._rules,
            record=self.record,
            joining=self._joining,
            document=seen.document,
            document_age=now - seen.document_since,
            latest=seen.latest,
            member=self._member,
            confirmed=self._confirmed,
            records=seen.records,
            leader_label=seen.leader_label,
            age=seen.leases.age,
            silence=lambda node: seen.leases.silence(node, now),
            moved=seen.leases.moved,
            minimum_age=minimum_age,
            share=self._share,
        )

    def _act(self, action: decisions.Action) -> Steps:
        match action:
            case decisions.Write(document):
                yield from self._write(document)
            case decisions.SetRecord(wants, round_, ring):
                self.record = replace(self.record, wants=wants, round=round_, master=None)
                self._record_due, self._ring = True, ring
            case decisions.Confirm(round_, naming, is_master):
                master = None
                if is_master:
                    master = yield OpenMaster(round_)
                self.record = replace(
                    self.record, wants=Wants.RUN, round=round_, naming=naming, master=master
                )
                self._record_due = self._ring = True
                self._confirmed = self.document
            case decisions.Start(document):
                self._member = document
                yield from self._end_join(Outcome(document=document))
            case decisions.Fail(failure):
                yield from self._end_join(Outcome(failure=failure))
            case decisions.ListRecords():
                self._seen.list_due = True
            case decisions.Wait(seconds, minimum_reached):
                if not minimum_reached:
                    self._seen.minimum_since = None
                elif self._seen.minimum_since is None:
                    self._seen.minimum_since = self._clock()
                    return  # Decide again: the last call may be of no length.
                yield from self._wait(seconds)

    def _end_join(self, outcome: Outcome) -> Steps:
        self._joining = False
        if outcome.document is None:
            # It is in no round and asks for none; its last word until the agent asks again.
            self.record = replace(self.record, wants=Wants.LEFT, beat=self.record.beat + 1)
            closed = outcome.failure in (Failure.CLOSED, Failure.SPARE_CLOSED)
            try:
                if closed:
                    # Written after the run was closed, it may outlive what the sweep takes away.
                    yield Drop((NODES_PREFIX + self.id,))
                else:
                    yield PutRecord(self.id, self.record, ring=True)
            except (RendezvousConnectionError, RendezvousStateError):
                # The others have this node's lease; its agent is told all the same.
                self._seen.void()
        yield Deliver(outcome)

    def _write(self, document: RoundDocument) -> Generator[Request, Any, bool]:
        entry, written = yield CompareAndSet(STATE_KEY, document.encode(), self._seen.token)
        before = self.document
        self._seen.adopt(entry, document if written else None)
        self._seen.document_due = False
        if not written:
            return False
        if before is not None and before.leader not in (document.leader, None):
            # The leader of before waits for its bell, not for the document.
            yield Ring(self.id)
        if document.phase is Phase.RUNNING and before and before.phase is Phase.CONFIRMING:
            self._untidy = document, self._clock() - self._seen.forming_since
        return True

    def _wait(self, seconds: float | None) -> Steps:
        seen = self._seen
        if self._join_ordered:
            return  # Its driver may have given up ending waits for it before this one began.
        if self._untidy is not None:
            (released, took), self._untidy = self._untidy, None
            # The round is released, to this node's own agent too: nobody waits for it.
            yield from tidy_up(released, took, seen.records or {}, seen.is_silent)
            return
        document = seen.document
        leads = document is not None and document.leader == self.id
        if document is not None and document.phase is Phase.CLOSED:
            leads = False
        until_beat = max(0.0, self._next_beat - self._clock())
        if seen.closed or self.record.wants is Wants.LEFT:
            until_beat = self._rules.interval  # There is no beat to be late for.
        timeout = until_beat if seconds is None else min(until_beat, seconds)
        if self._joining:
            timeout = min(timeout, max(0.0, self._join_deadline - self._clock()))
        began = self._clock()
        if leads:
            bell: Entry | None = yield Park(BELL_KEY, self._bell, timeout)
            if bell is not None:
                self._bell = bell.version
            seen.list_due = True
        else:
            entry: Entry | None = yield Park(STATE_KEY, seen.token, timeout)
            if entry is not None:
                seen.adopt(entry)
            elif seconds is not None and timeout == seconds:
                seen.leader_due = True
            if entry is None and timeout == until_beat and seen.document is None:
                seen.document_due = True
        seen.idle_until = began + timeout

    def _bear(self, error: Exception, failures: int) -> Steps:
        """Rule 11: an outage stops nobody; nobody is judged by what could not be read."""
        self._seen.void()
        hopeless = isinstance(error, RendezvousStateError) or self._clock() >= self._join_deadline
        because: Exception | None = error
        if self._joining and hopeless:
            self._joining = False
            self.record = replace(self.record, wants=Wants.LEFT)
            yield Deliver(Outcome(error=error))
            because = None  # Its agent knows.
        pause = min(0.05 * 2.0 ** min(failures, 10), _LONGEST_OUTAGE_PAUSE)
        yield Rest(pause * (0.5 + 0.5 * self._chance.random()), because=because)
