"""One node's life in a run, as a generator of effects: the protocol without I/O or threads.

`Node.run` yields requests and is sent their answers; a failed request is thrown into it. A driver
only carries out requests: `process/driver.py` on a store, the simulator on virtual time.

A turn reads (`Observer`), decides (`decide`) and acts. Parts with a state of their own are
`Heartbeat`, `Join`, `Writer`, `Lead`, `Master`, `Neighbours`, `NetworkCheck` and `Contact`.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rdzv_plugins.kv import AccessDeniedError, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.protocol import rules, words
from rdzv_plugins.protocol.contact import Contact
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    CorruptDocumentError,
    Dials,
    NodeRecord,
    Phase,
    RoundDocument,
    SealedRunError,
    Status,
)
from rdzv_plugins.protocol.effects import (
    LOCAL,
    Begin,
    DialPeer,
    Drop,
    Effects,
    FinishJoin,
    JoinOutcome,
    OpenMaster,
    Park,
    PutRecord,
    Read,
    Rest,
    Tell,
)
from rdzv_plugins.protocol.heartbeat import Heartbeat
from rdzv_plugins.protocol.join import Inbox, Join
from rdzv_plugins.protocol.lead import Lead
from rdzv_plugins.protocol.master import Master
from rdzv_plugins.protocol.neighbours import Neighbours
from rdzv_plugins.protocol.network_check import NetworkCheck
from rdzv_plugins.protocol.observer import Observer
from rdzv_plugins.protocol.own_checkpoint import OwnCheckpoint
from rdzv_plugins.protocol.progress import NoSteps, Workers
from rdzv_plugins.protocol.remarks import remarks
from rdzv_plugins.protocol.rules import Failure, Own
from rdzv_plugins.protocol.situation import nodes_waiting, waits_for_a_living_round
from rdzv_plugins.protocol.wall_clock import shown
from rdzv_plugins.protocol.writer import Writer

# A node makes its links this long after it has confirmed its rank if the round does not run by
# then, because it may wait for a node that has died in the meantime.
_LINKS_SECONDS = 1.0

# A node whose network check waits for rank 0's TCPStore looks at the document this often.
_LOOK_SECONDS = 1.0

_PAUSES = (Rest, Park)

# Tuples, not `A | B`: building a union at each isinstance() costs ten times the check.
_WRITES = (rules.Write, rules.Abdicate)
_DECIDES = (*_WRITES, rules.Close)
_ENDS = (rules.Start, rules.Fail)
_TELLS = (rules.Wait, *_ENDS)

_LONGEST_OUTAGE_PAUSE = 0.5
# A store may show a document before it shows the shards that were written before it.
_MISSING_SHARD_PAUSE = 0.1


class Node:
    """The memory of a node between two decisions.

    Public members may be used from other threads; one thread drives the generators.

    Attributes:
        inbox: takes what the agent asks for and reports.
        neighbours: takes what links tell.

    Args:
        record: what this node says of itself; its beat, status and round change here.
        join_timeout: seconds within which a join must end in a round; for a spare they begin when
            the round for which it waits has ended.
        chance: the source of its random share and of incarnations.
        wall: see `View.wall`.
        workers: the node's workers; None: they tell no steps.
    """

    def __init__(
        self,
        node_id: str,
        record: NodeRecord,
        rules: rules.Rules,
        join_timeout: float,
        clock: Callable[[], float],
        chance: random.Random,
        wall: Callable[[], float],
        workers: Workers | None = None,
    ) -> None:
        self.id, self.rules, self._clock = node_id, rules, clock
        self._own = own = Own(node_id, rules, clock, wall, chance)
        self._join_timeout = join_timeout
        # The answer of ``num_nodes_waiting()`` unless this node is cut off.
        self._nodes_waiting = 0
        self._share = chance.random()
        workers = workers or NoSteps()
        self._seen = seen = Observer(node_id, rules, clock)
        self._contact = Contact(rules, clock)
        self.inbox = Inbox()
        self._heartbeat = heartbeat = Heartbeat(own, record, seen, workers)
        self._join = join = Join(own, self.inbox, join_timeout, seen, heartbeat, self._contact)
        self._checkpoint = OwnCheckpoint(workers, heartbeat)
        self._lead = Lead(own, seen, heartbeat)
        self._writer = Writer(own, seen, heartbeat, join, self._lead)
        self._master = Master(rules.lease, clock)
        self.neighbours = Neighbours(own, seen, heartbeat, join, self._contact, self.inbox)
        self._network = NetworkCheck(node_id, rules.lease, clock, seen.read_record)
        # Whether the node must read before it beats, because the store refused a request.
        self._reads_first = False
        # The document by which `_nodes_waiting` was last computed.
        self._judged: RoundDocument | None = None
        # Why this node's workers or agent failed, so that the node leaves.
        self._failure = ""
        # The kinds and keys of the remarks in the log.
        self._told: set[tuple[str, object]] = set()

    # Members for other threads.

    @property
    def record(self) -> NodeRecord:
        """The node's own record, which its next heartbeat writes."""
        return self._heartbeat.record

    @property
    def closing(self) -> bool:
        """Whether this node is closing the run. Do not stop it now: the first step ends all agents,
        and only a later step makes the run's keys expire.
        """
        return self._writer.closing

    @property
    def document(self) -> RoundDocument | None:
        """The document as last read."""
        return self._seen.document

    @property
    def num_nodes_waiting(self) -> int:
        """The answer of ``num_nodes_waiting()``."""
        return self._nodes_waiting or int(self.is_cut_off)

    @property
    def is_cut_off(self) -> bool:
        """Whether this node takes itself for lost while its workers run. Rule: not heard."""
        return self._is_at_work and self._contact.is_cut_off

    @property
    def _is_at_work(self) -> bool:
        # In a closed run the other nodes do not go on without this node.
        runs = self.record.status is Status.RUN and self._join.given is not None
        return runs and not self._join.joining and not self._seen.closed

    @property
    def has_messages(self) -> bool:
        """Whether the node has not taken up a message or a report yet."""
        return self.inbox.any or self._network.reported or self.neighbours.is_reported

    @property
    def latest(self) -> RoundDocument | None:
        """See `View.latest`."""
        return self._seen.latest

    @property
    def grace_ends(self) -> float:
        """See `FailureDetector.grace_ends`."""
        return self._seen.liveness.grace_ends

    @property
    def told_of_the_end(self) -> bool:
        """Whether the log says that the run was closed."""
        return self.latest is not None and ("closed", self.latest.incarnation) in self._told

    @property
    def done(self) -> bool:
        """Whether this node's workers succeeded in the last round that its agent was given."""
        return self.record.status is Status.DONE or self.inbox.done

    @property
    def diagnosis(self) -> words.Diagnosis:
        """A sentence about what this node does or waits for."""
        left = self._join.deadline - self._clock() if self._join.joining else None
        view = self.view()
        found = words.of_node(view, left)
        if view.document is None or view.document.phase is not Phase.FORMING:
            return found
        return dataclasses.replace(found, since=shown(view.document.since, view.wall))

    @property
    def over(self) -> bool:
        """Whether the agent must not wait in its round, because the run has left that round."""
        return self.num_nodes_waiting > 0 or self._seen.closed

    @property
    def trains_on(self) -> bool:
        """Whether this node's round goes on in a run that was closed by request."""
        return self._writer.trains_on

    @property
    def in_round(self) -> bool:
        """Whether the run, as last seen, still counts on this node."""
        latest, given = self.latest, self._join.given
        gave_up = self.record.status is Status.LEFT or self.inbox.unfit is not None
        if given is None or gave_up:
            return False  # This node gave up, so the others decide whether to go on.
        return latest is None or (latest.is_of(given) and latest.names(self.id))

    def finished(self, begun: Begin, result: Any) -> None:
        """Report the result of a `Begin`, or the exception that it ended with; from any thread."""
        match begun:
            case OpenMaster(world_id):
                self._master.report(world_id, result)
            case DialPeer(attempt):
                self._network.report(attempt, result)

    def note_retry(self) -> None:
        """Note that the store's client repeats a request, perhaps a wait; from any thread."""
        self._seen.outages.repeats()
        self._contact.fails = True

    # Members for the thread that drives the node.

    def run(self) -> Effects[None]:
        """Live until the driver stops asking."""
        failures = 0
        while True:
            try:
                yield from self._timed(self._turn())
                failures = 0
            except (RendezvousConnectionError, RendezvousStateError) as error:
                failures += 1
                yield from self._bear(error, failures)

    def farewell(self, failure: str = "") -> Effects[None]:
        """Announce that this node leaves, after `run` has been stopped. Rule: leave.

        ``failure``: why its workers or its agent failed, so that it leaves.
        """
        if failure:
            self._failure, self.inbox.unfit = failure, failure
        yield from self._leave()
        # Write the farewell again if a delayed beat has overwritten it.
        entry, _ = yield from self._seen.read_record(self.id)
        if entry is None or entry.value != self.record.encode():
            yield from self._leave()
        if self.record.unfit and self.latest is None:
            # No run exists whose end would delete the record.
            yield from Drop((NODES_PREFIX + self.id,))

    def _leave(self) -> Effects[None]:
        """Write that this node is in no round, and give up the lead."""
        unfit = self.record.unfit if self.inbox.unfit is None else self.inbox.unfit
        if self.inbox.joins:
            unfit = ""  # The node is fit again, and has not written so yet.
        self._heartbeat.amend(
            beat=self.record.beat + 1,
            at=int(self._own.wall()),
            status=Status.DONE if self.done else Status.LEFT,
            unfit=unfit,
            failed=bool(self._failure),
        )
        yield from PutRecord(self.id, self.record, ring=True)
        yield from self._writer.leave_the_lead()

    def _timed(self, steps: Effects[None]) -> Effects[None]:
        """Carry out ``steps``; note how long the node pauses, and what the store answers."""
        seen = self._seen
        answer: Any = None
        error: Exception | None = None
        while True:
            try:
                request = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration:
                return
            document = seen.arriving or seen.document
            if document is not self._judged and not self._join.joining:
                # Update the answer now, as the requests before the next decision may take long.
                self._judged = document
                self._nodes_waiting = nodes_waiting(replace(self.view(), document=document))
            if (news := self.neighbours.news()) is not None:
                yield from news
            answer, error, asked = None, None, self._clock()
            try:
                answer = yield request
            except (RendezvousConnectionError, RendezvousStateError) as failure:
                error = failure
            if isinstance(request, _PAUSES):
                # Count the whole wait as a pause, as the store may have gone away late in it.
                seen.paused(min(request.seconds, self._clock() - asked))
                if self._clock() - asked > request.seconds:
                    seen.delays.overslept = self._clock() - asked - request.seconds
            if type(request) not in LOCAL:
                self._note(request, error, asked)

    def _note(self, request: Any, error: Exception | None, asked: float) -> None:
        """Update the node's contact with the store after an answer or an error."""
        if error is None:
            self._seen.answered()
            if isinstance(request, PutRecord):
                self._contact.accepted(asked)
            elif isinstance(request, Read):
                self._contact.sees()
        elif isinstance(error, RendezvousConnectionError):
            self._seen.failed()
            self._contact.fails = True
            if isinstance(error, AccessDeniedError):
                self._contact.denied()
                self._reads_first = True

    def _turn(self) -> Effects[None]:
        yield from self._take_up()
        yield from self._look()
        view = self.view()
        for about, key, text, *command in remarks(view):
            if (about, key) not in self._told:
                yield from self._join.tell_news()
                yield from Tell(about, text, tuple(command))
                self._told.add((about, key))
        action = decide(view)
        seen = self._seen
        if view.records is not None and not (seen.document_is_fresh or isinstance(action, _WRITES)):
            # The records may be newer than the document, and compare-and-set guards only a write.
            token = seen.token
            yield from seen.read_document()
            if seen.token != token:
                return
        self._nodes_waiting = nodes_waiting(view)
        if waits_for_a_living_round(view):
            self._join.start_over()  # torch's redundant nodes start over too.
        elif view.join_timed_out and not isinstance(action, _ENDS):
            # One more lease for a node with a rank, whose round may be about to run.
            self._join.deadline = seen.since.document + self.rules.lease
        if isinstance(action, _TELLS):
            yield from self._join.tell_news()
        if self._join.joining and isinstance(action, rules.Wait):
            yield from self._join.tell_wait(view)
        if self.inbox.joins and isinstance(action, _ENDS):
            return  # The answer belongs to a join that was given up; the agent asks for another.
        # If the write fails, this node does not lead, although it beats and lists.
        seen.is_to_write = isinstance(action, _DECIDES)
        yield from self._act(action)
        seen.is_to_write = False

    def _take_up(self) -> Effects[None]:
        self._take_messages()
        if self.inbox.withdraws:
            self.inbox.withdraws = self._join.joining = False
            yield from self._leave()
        self._network.take_up()
        yield from self.neighbours.take_up_evidence()
        self.neighbours.answer()
        self._checkpoint.take_up(self.document)

    def _look(self) -> Effects[None]:
        """Beat if that is due, and read what a decision needs."""
        seen = self._seen
        if self._writer.trains_on:
            yield from self._writer.keep_id()
        if self._beats and (not seen.closed or self._writer.trains_on):
            if self._reads_first:
                # Other nodes would wait for a node that beats but may not read.
                yield from seen.read_document()
                self._reads_first = False
            self._take_messages()  # Again, so that the next beat is up to date.
            yield from self._heartbeat.keep_alive(self._lead.call_to_announce)
        yield from seen.observe()
        for line in seen.unbelieved.take():
            yield from Tell("unreadable", f"it counts as absent: {line}")

    @property
    def _beats(self) -> bool:
        """Whether this node shows that it lives."""
        return self.record.status is not Status.LEFT or self.record.is_unfit

    def _take_messages(self) -> None:
        self.neighbours.take_up_others()
        if self.inbox.joins and self.is_cut_off and not self._contact.why_cut_off:
            self._contact.stop_workers()
        if self._join.take_messages():
            self._writer.draw_incarnation()
            self._nodes_waiting = 0

    def view(self) -> rules.View:
        """This node's view now. Another thread may get parts of the view from two moments."""
        now, seen, join = self._clock(), self._seen, self._join
        document = seen.document
        leader = document.leader if document and document.leader else ""
        return rules.View(
            me=self.id,
            rules=self.rules,
            record=self.record,
            joining=join.joining,
            join_left=join.deadline - now,
            document=document,
            document_age=now - seen.since.document,
            round_age=now - seen.since.round,
            uptime=now - seen.since.running if seen.since.running is not None else 0.0,
            longest_uptime=now - seen.since.forming if seen.since.forming is not None else math.inf,
            saving_for=now - seen.since.saving if seen.since.saving is not None else 0.0,
            grown_for=now - seen.since.grown,
            latest=seen.latest,
            without_tombstone=seen.without_tombstone(),
            member=join.given,
            confirmed=seen.confirmed,
            rounds_given=join.rounds,
            records=seen.records,
            leader=seen.leader,
            now=now,
            watched=seen.liveness.watched,
            confirmed_idleness=seen.listings.confirmed_silence(leader),
            possible_idleness=seen.listings.possible_silence(leader, now),
            lag=seen.delays.lag,
            cannot_list=seen.cannot_list,
            abdicated=self._lead.abdicated,
            enough_for=None if seen.since.enough is None else now - seen.since.enough,
            share=self._share,
            fresh=self._writer.fresh,
            wall=self._own.wall(),
            carried=self._lead.carried(document),
            checks=document is not None and self._network.is_of(document),
            opening_for=self._master.opening_for(document),
            unheard=self._contact.unheard,
            until_first_lease=seen.until_first_lease(now),
            unanswered=seen.answers.unanswered,
            latency=seen.delays.latency,
        )

    def _act(self, action: rules.Action) -> Effects[None]:
        match action:
            case rules.Write(document):
                yield from self._write(document)
            case rules.Abdicate():
                yield from self._abdicate(action)
            case rules.SetRecord():
                yield from self._set_record(action)
            case rules.Confirm(document, is_master, seconds):
                yield from self._confirm(document, is_master, seconds)
            case rules.Start(document):
                yield from self._start(document)
            case rules.Fail(failure):
                missed = words.of_node(self.view())
                yield from self._end_join(JoinOutcome(failure=failure, diagnosis=missed))
            case rules.Close(document, outcome, why):
                yield from self._writer.close(document, outcome, why)
            case rules.Doubt():
                yield from self._doubt(action)
            case rules.ListRecords():
                self._seen.list_records()
            case rules.AskTombstone(incarnation):
                yield from self._writer.ask_tombstone(incarnation)
            case rules.Wait(seconds, enough):
                yield from self._wait(seconds, enough)

    def _write(self, document: RoundDocument) -> Effects[None]:
        first = document.phase is Phase.CONFIRMING and document.ranks.get(self.id) == 0
        # If this node confirmed before it took the lead, its TCPStore is open already.
        if first and self.record.world_id != document.world_id:
            yield from self._master.begin(document.world_id)
        yield from self._writer.write(document)

    def _abdicate(self, action: rules.Abdicate) -> Effects[None]:
        if (yield from self._writer.write(action.document)):
            self._lead.abdicated = self._lead.abdicated or action.fails
            if not action.fails:
                yield from self._lead.set_deadline()

    def _set_record(self, action: rules.SetRecord) -> Effects[None]:
        if not action.can_host:
            yield from Tell(
                "master",
                "this node, rank 0, opened no TCPStore within its lease: another node becomes rank "
                "0",
            )
            self._master.give_up()
        self._heartbeat.change(
            rings=action.ring,
            status=action.status,
            incarnation=action.incarnation,
            round=action.round,
            master=None,
            can_host=self.record.can_host and action.can_host,
        )

    def _doubt(self, action: rules.Doubt) -> Effects[None]:
        self._seen.liveness.doubt(action.nodes)
        if action.begins:
            yield from Tell(
                "doubt",
                f"{action.late} of {action.world} nodes are late with their heartbeats, all at "
                "once: this may be the store or the load, so each of them has one more lease",
            )

    def _start(self, document: RoundDocument) -> Effects[None]:
        self._join.succeed(document)
        self._contact.workers_start()
        self.neighbours.begin(document)
        place = f"rank {document.ranks[self.id]} of {document.size}"
        text = f"round {document.round}: {place}, MASTER {document.master}"
        # Log before the agent goes on: it may fork its workers, and no thread may log then.
        yield from Tell("round", f"{text} ({document.reason})")
        yield from self._end_join(JoinOutcome(document=document))

    def _confirm(
        self, document: RoundDocument, is_master: bool, seconds: float | None
    ) -> Effects[None]:
        master: str | float | None = None
        if is_master:
            master = yield from self._master.open(document.world_id)
            if isinstance(master, float):
                yield from self._pause(master)
                return
        dials: Dials | None = None
        if self.rules.network_check and document.size > 1:
            dials = yield from self._check_network(document, seconds)
            if dials is None:
                return
        self._master.give_up()
        self._seen.confirm(document)
        self._heartbeat.change(
            rings=True,
            status=Status.RUN,
            incarnation=document.incarnation,
            round=document.round,
            world_id=document.world_id,
            rank=document.ranks[self.id],
            master=master,
            failed=False,
            may_grow=False,
            dials=dials,
        )
        self.neighbours.owe_links(_LINKS_SECONDS, document.size)

    def _check_network(
        self, document: RoundDocument, seconds: float | None
    ) -> Effects[Dials | None]:
        """The dials of this node's network check; None: not known yet, decide again."""
        dials = yield from self._network.run(document)
        if dials is not None or self.has_messages:
            return dials
        leads, awaits = document.leader == self.id, self._network.awaits
        patience = self.rules.interval if seconds is None else seconds
        if awaits is None or leads:
            # A leader waits for the bell, which rank 0 rings when it confirms.
            left = patience if awaits else min(patience, self._network.seconds_left)
            yield from self._park(left, leads)
        else:
            until_beat = self._heartbeat.seconds_left
            yield from Park(*awaits, min(_LOOK_SECONDS, until_beat, patience))
            self._seen.read_again(document=True, leader=True)
        return None

    def _end_join(self, outcome: JoinOutcome) -> Effects[None]:
        self._join.joining = False
        if outcome.document is None:
            # The node is in no round and asks for none until its agent asks again.
            try:
                yield from self._leave_the_join(outcome)
            except (RendezvousConnectionError, RendezvousStateError):
                # The others wait for this node's lease; its agent learns the outcome anyway.
                self._seen.read_again(document=True, records=True)
        yield from FinishJoin(outcome)

    def _leave_the_join(self, outcome: JoinOutcome) -> Effects[None]:
        if outcome.failure in (Failure.CLOSED, Failure.SPARE_CLOSED):
            self._heartbeat.amend(status=Status.LEFT, unfit="")
            yield from self._writer.clear_away()
            return
        if outcome.failure is Failure.DRAINED:
            self._heartbeat.amend(unfit="")
        elif outcome.failure is Failure.AT_FAULT and self.document is not None:
            self._join.was_at_fault = True
            self._heartbeat.amend(unfit=self.document.faults.why_out(self.id))
        yield from self._leave()

    def _wait(self, seconds: float | None, enough: bool) -> Effects[None]:
        if not self._seen.since.note_enough(enough, self._clock()):
            self._master.give_up()
            yield from self._pause(seconds)
        # If the last call begins, decide again at once, because it may last 0 seconds.

    def _pause(self, seconds: float | None) -> Effects[None]:
        """Wait for a change, the next beat or ``seconds``; first do the work that can wait."""
        if self.has_messages or self._master.is_reported:
            return  # The driver's wake-up may have come before this wait began.
        neighbours = self.neighbours
        if neighbours.is_asked or (yield from self._lead.record_round()):
            return
        until_links = neighbours.seconds_left
        if until_links <= 0:
            yield from neighbours.keep_links()
            return
        document = self.document
        leads = document is not None and document.leader == self.id and not document.closed
        yield from self._park(until_links if seconds is None else min(seconds, until_links), leads)

    def _park(self, seconds: float | None, leads: bool) -> Effects[None]:
        """Renew what is due as the leader, or else wait for the bell; others: for the document."""
        if leads and (yield from self._lead.renew()):
            return
        seen = self._seen
        until_beat = self._heartbeat.seconds_left
        if not self._beats or (seen.closed and not self._writer.trains_on):
            until_beat = self.rules.interval  # No beat is due.
        timeout = until_beat if seconds is None else min(until_beat, seconds)
        if seen.misses_its_rank and self._clock() - seen.since.document < self.rules.interval:
            timeout = min(timeout, _MISSING_SHARD_PAUSE)
        if self._join.joining:
            timeout = min(timeout, self._join.seconds_left)
        if leads:
            yield from self._lead.await_bell(timeout)
            return
        entry = yield from Park(STATE_KEY, seen.token, timeout)
        if entry is not None:
            yield from seen.adopt(entry)
            return
        if seconds is not None and timeout == seconds:
            seen.read_again(leader=True, records=True)
        if timeout == until_beat and seen.document is None:
            seen.read_again(document=True)

    def _bear(self, error: Exception, failures: int) -> Effects[None]:
        """Outage: go on after an error. No node is lost because a read failed."""
        self._seen.read_again(document=True, leader=True, records=True)
        sealed = isinstance(error, SealedRunError)
        damaged = isinstance(error, CorruptDocumentError) and not sealed
        if damaged and self._join.has_asked_for_a_lease:
            # Overwrite the document: live nodes of the run would have written it again.
            self._seen.unbelieved.is_overwritten = True
        elif self._join.joining and not self.inbox.withdraws and self._join.is_hopeless(error):
            self._join.joining = False
            # Not written: the agent's shutdown says farewell, or the lease runs out.
            self._heartbeat.amend(status=Status.LEFT)
            yield from FinishJoin(JoinOutcome(error=error))
        if self.is_cut_off:
            self._contact.stop_workers()
        for about, text in self._contact.news(self._is_at_work, self._join_timeout, error):
            yield from Tell(about, text)
        pause = min(0.05 * 2.0 ** min(failures, 10), _LONGEST_OUTAGE_PAUSE)
        pause *= 0.5 + 0.5 * self._own.chance.random()
        yield from Rest(pause)
