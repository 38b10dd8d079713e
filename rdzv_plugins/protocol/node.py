"""One node's life in a run, as a generator of effects: the protocol without I/O or threads.

`Node.run` yields requests and is sent their answers; a failed request is thrown into it. A driver
only carries requests out: `driver.py` on a store, the simulator on virtual time.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from rdzv_plugins.kv import (
    AccessDeniedError,
    Attempts,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
)
from rdzv_plugins.kv.sealed import ForeignValueError
from rdzv_plugins.protocol import rules, words
from rdzv_plugins.protocol.accusations import found_gone
from rdzv_plugins.protocol.cleanup import close_run, let_expire, tidy_up
from rdzv_plugins.protocol.contact import Contact, Standing
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    Accusation,
    CorruptDocumentError,
    Exclusion,
    Found,
    NodeRecord,
    Phase,
    RoundDocument,
    SealedRunError,
    Status,
)
from rdzv_plugins.protocol.effects import (
    LOCAL,
    Begin,
    CompareAndSet,
    DialPeer,
    Drop,
    Effects,
    Expire,
    FinishJoin,
    HoldLinks,
    JoinOutcome,
    OpenMaster,
    Park,
    PutRecord,
    PutShards,
    Read,
    ReadExclusions,
    ReadTombstone,
    Register,
    Rest,
    Ring,
    Tell,
)
from rdzv_plugins.protocol.network_check import NetworkCheck
from rdzv_plugins.protocol.observer import Observer
from rdzv_plugins.protocol.policies.growth import last_call
from rdzv_plugins.protocol.roster import apart, shards_of
from rdzv_plugins.protocol.round_record import Durations, record_of
from rdzv_plugins.protocol.rules import Failure
from rdzv_plugins.protocol.situation import nodes_waiting, waits_for_a_living_round
from rdzv_plugins.protocol.wall_clock import shown

__all__ = ["Node"]

# A TCPStore opens within a few milliseconds, unless name resolution hangs.
_MASTER_SECONDS = 0.05

# A leader for whom nobody has rung the bell for so long has time for what nobody waits for: to read
# the exclusions, and to write when the last call ends.
_QUIET_SECONDS = 0.05
# A shorter last call is over before people can read of it.
_SHORTEST_CALL = 1.0

# A round that runs sooner after its ranks were confirmed has its links then, when nobody waits. One
# that does not may wait for a node that died meanwhile.
_LINKS_SECONDS = 1.0

# A node that waits for rank 0 to open its TCPStore looks at the document as often.
_LOOK_SECONDS = 1.0

_PAUSES = (Rest, Park)

# Kinds of actions. Not as unions: each mention of one makes it anew, ten times the check itself.
_WRITES = (rules.Write, rules.Abdicate)
_DECIDES = (*_WRITES, rules.Close)
_ENDS = (rules.Start, rules.Fail)
_TELLS = (rules.Wait, *_ENDS)

# It accuses so many, of more the first: as many as stand in a document.
_MOST_ACCUSED = 64
# It says by what it is held up, in milliseconds, if by so much.
_SLOW = 50
# An accused node beats so often within the time that it has, and for so many times as long.
_ANSWERS, _ANSWERS_FOR = 3, 4

_LONGEST_OUTAGE_PAUSE = 0.5
# A store may show a document before it shows the shards that were written before it.
_MISSING_SHARD_PAUSE = 0.1
# A leader renews the run's deadline so many times before it would pass.
_RENEWALS = 4


class Node:
    """The memory of a node between two decisions.

    Args:
        node_id: unique in the run, without spaces.
        record: what this node says of itself; its beat, status and round change here.
        rules: the run's settings.
        join_timeout: seconds within which a join must end in a round; a spare's begin when the
            round for which it waits has ended.
        clock: this node's monotonic clock, in seconds.
        chance: the source of its random share and of incarnations.
        wall: this host's wall clock, in seconds since the epoch; exclusions end by it.

    Public members may be used from other threads; one thread drives the generators.

    Attributes:
        closing: this node is closing the run. Do not stop it now: the first step ends all agents,
            this node's too, and a later one gives the run's keys their end.
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
    ) -> None:
        # The arguments, and what the class tells of.
        self.id = node_id
        self.record = record
        self.closing = False
        self._rules = rules
        self._join_timeout = join_timeout
        self._clock = clock
        self._chance = chance
        self._wall = wall
        # The answer of ``num_nodes_waiting()`` while this node is heard.
        self._waiting = 0
        # As `rules.View.share`.
        self._share = chance.random()
        # All that this node has read, and since when.
        self._seen = Observer(node_id, rules, clock)
        # Since when the store has accepted no heartbeat of this node.
        self._contact = Contact(rules, clock)
        # The store has refused this node something: the node reads before it beats again.
        self._reads_first = False
        # Why its workers were to stop last; empty: they were not.
        self._cut_off = ""
        # The log says so.
        self._told_to_stop = False
        # The log says that the store refuses all nodes.
        self._told_of_all = False
        # The document by which the node last looked whether the round of its agent is over.
        self._judged: RoundDocument | None = None

        # `order_join` was called, and has not been taken up yet.
        self._join_ordered = False
        # As for `order_withdrawal`.
        self._withdraw_ordered = False
        # As for `report_done`.
        self._done_reported = False
        # As for `allow_growth`.
        self._growth_allowed = False
        # The reason of a `report_unfit` that has not been taken up yet; None: there is none.
        self._unfit_reported: str | None = None
        # The workers failed, as the last `order_join` said.
        self._failed = False
        # The seconds of its `join_timeout` that were over then.
        self._waited = 0.0
        # Why this node's workers or its agent failed, so that it leaves.
        self._failure = ""

        # An agent waits for a round.
        self._joining = False
        # When that agent asked.
        self._joined_at = 0.0
        # When its time is over.
        self._join_deadline = 0.0
        # As `rules.View.fresh`.
        self._fresh = ""
        # The round that the agent was given last.
        self._member: RoundDocument | None = None
        # The number of the round that the agent was given last, by incarnation.
        self._given: dict[str, int] = {}
        # The network check found this node cut off, and no round was given to it since.
        self._suspect = False

        # Write the record before the next decision.
        self._record_due = False
        # Ring the leader's bell with it.
        self._ring = False
        # When the next heartbeat is due: the first comes with the order to join.
        self._next_beat = clock() + rules.interval

        # Of a leader: the bell as last heard.
        self._bell: Version | None = None
        # The round to tidy up after, the round before it, and the seconds that it took to form.
        self._untidy: tuple[RoundDocument, RoundDocument | None, Durations] | None = None
        # The seconds until the participants of the round were named.
        self._gathered = Durations()
        # The shards of the leader's document.
        self._shards: Mapping[str, bytes] = {}
        # The age of the document at which the leader writes its shards again.
        self._shards_due = 0.0
        # This node gave up a lead since its listings failed.
        self._abdicated = False
        # When the leader renews the deadline of the run's keys.
        self._expiry_due = clock()
        # The leader has renewed that deadline since it leads.
        self._expires = False

        # Of rank 0: the world_id for which a TCPStore is being opened, and since when.
        self._opening: tuple[str, float] | None = None
        # The world_id for which that came to an end, and the address, or why there is none.
        self._opened: tuple[str, str | Exception] | None = None
        # How often rank 0 failed to open one since one was open.
        self._openings = Attempts(clock)
        # Rank 0 is to try again after a pause.
        self._reopens = False

        # Of a leader: the incarnation for which it reads the exclusions that outlive runs, since
        # when it tries, when it tries again, and what it has read.
        self._looks_back_for, self._looks_back_since, self._looks_back_at = "", 0.0, 0.0
        self._carried: tuple[Exclusion, ...] | None = None

        # The check of the network for the round whose rank this node confirms.
        self._network = NetworkCheck(node_id, rules.lease, clock, self._seen.read_record)
        # What links tell, and has not been taken up: of which node, and whether it is gone.
        self._evidence: deque[tuple[str, bool]] = deque()
        # When links are due to other nodes; and where those that are known listen, None: nowhere.
        self._links_due = math.inf
        self._endpoints: dict[str, str | None] = {}
        # The round for which, and its leader if that is one of them.
        self._linked_for: tuple[str, str | None] = "", None
        # It is the first of a shard, of several.
        self._leads_shard = False
        # What this node said over its links last; what others say, and whether that is news.
        self._said = Standing.ACCEPTED
        self._others: frozenset[Standing] = frozenset()
        self._others_reported = False
        # How long the store took for its last two heartbeats.
        self._took = (0.0, 0.0)
        # The accusation that this node answers, and until when it beats more often for that.
        self._answers: tuple[str, Accusation] | None = None
        self._answers_until = -math.inf
        # The remarks that the log has, by kind and key.
        self._told: set[tuple[str, object]] = set()
        # When the sentence of a join that waits is told.
        self._pace = words.Pace(clock())
        # A line for the log once the record that asks for a round has been written.
        self._news: str | None = None

    @property
    def document(self) -> RoundDocument | None:
        """The document as last read."""
        return self._seen.document

    @property
    def waiting(self) -> int:
        """The answer of ``num_nodes_waiting()``."""
        return self._waiting or int(self.is_cut_off)

    @property
    def is_cut_off(self) -> bool:
        """Whether this node takes itself for lost while its workers run. Rule: not heard."""
        return self._is_at_work and self._contact.is_given_up

    @property
    def _is_at_work(self) -> bool:
        # In a closed run nobody beats, and nobody goes on without it.
        runs = self.record.status is Status.RUN and self._member is not None
        return runs and not self._joining and not self._seen.closed

    @property
    def _standing(self) -> Standing:
        """What this node says over its links."""
        document, contact = self.document, self._contact
        if not contact.fails:
            return Standing.ACCEPTED
        is_over = document is not None and document.world_id != self._linked_for[0]
        is_lost = is_over or self._cut_off or contact.is_alone or contact.others_are_lost
        return Standing.LOST if is_lost else Standing.CUT_OFF

    @property
    def outage_limit(self) -> float:
        """Seconds of silence of the store after which its workers stop; infinite: they go on."""
        return self._rules.outage_limit

    @property
    def ordered(self) -> bool:
        """Whether an order or a report has not been taken up yet."""
        orders = self._join_ordered, self._withdraw_ordered
        reports = self._done_reported, self._growth_allowed, self._unfit_reported is not None
        found = self._network.reported or bool(self._evidence)
        return any(orders) or any(reports) or found or self._others_reported

    @property
    def latest(self) -> RoundDocument | None:
        """As `observer.Observer.latest`."""
        return self._seen.latest

    @property
    def grace_ends(self) -> float:
        """As `failure_detector.FailureDetector.grace_ends`, of the nodes' beats."""
        return self._seen.liveness.grace_ends

    @property
    def told_of_the_end(self) -> bool:
        """Whether its log says that the run was closed."""
        return self.latest is not None and ("closed", self.latest.incarnation) in self._told

    @property
    def done(self) -> bool:
        """Whether this node's workers succeeded in the last round that its agent was given."""
        return self.record.status is Status.DONE or self._done_reported

    @property
    def diagnosis(self) -> words.Diagnosis:
        """A sentence: what this node does or waits for."""
        left = self._join_deadline - self._clock() if self._joining else None
        view = self.view()
        found = words.of_node(view, left)
        if view.document is None or view.document.phase is not Phase.FORMING:
            return found
        return dataclasses.replace(found, since=shown(view.document.since, view.wall))

    @property
    def over(self) -> bool:
        """Whether the run has left the round of this node's agent: no agent is to wait in it."""
        return self.waiting > 0 or self._seen.closed

    @property
    def in_round(self) -> bool:
        """Whether the run, as last seen, still counts on this node."""
        latest = self.latest
        gave_up = self.record.status is Status.LEFT or self._unfit_reported is not None
        if self._member is None or gave_up:
            return False  # The others decide about it.
        return latest is None or (latest.is_of(self._member) and latest.names(self.id))

    def order_join(self, failed: bool = False, waited: float = 0.0) -> None:
        """Ask to be in the next round; the driver ends its `Park` or `Rest` early for this.

        Args:
            failed: this node asks because its workers failed, not because it was told to.
            waited: seconds of its ``join_timeout`` that are over already.
        """
        self._failed, self._waited = failed, waited
        self._unfit_reported = None
        self._withdraw_ordered, self._join_ordered = False, True

    def order_withdrawal(self) -> None:
        """Give up the join: the agent that ordered it is gone. Like `order_join`."""
        if self._join_ordered:
            # Not taken up yet. Who ordered it was fit, and may report otherwise by now.
            self._join_ordered, self._unfit_reported = False, ""
        self._withdraw_ordered = True

    def report_done(self) -> None:
        """Say that this node's workers succeeded. Like `order_join`."""
        self._done_reported = True

    def allow_growth(self) -> None:
        """Say that now is a good moment to let newcomers in. Like `order_join`."""
        self._growth_allowed = True

    def report_unfit(self, reason: str) -> None:
        """Say that this node asks for no round, and why: its check failed. Like `order_join`.

        Until it joins again the others go on without it. If the run is closed meanwhile, that is
        the outcome, as of a join.
        """
        self._unfit_reported = reason

    def finished(self, begun: Begin, result: Any) -> None:
        """Answer a `Begin`, in any thread: what came of it, or why it failed, an exception."""
        # The node's thread may give it up meanwhile.
        opening = self._opening
        match begun:
            case OpenMaster(world_id) if opening is not None and opening[0] == world_id:
                self._opened = world_id, result
            case DialPeer(attempt):
                self._network.report(attempt, result)

    def report_gone(self, node: str) -> None:
        """Say that the process of a node has ended, as far as a link to it tells.

        Like `order_join`.
        """
        self._evidence.append((node, True))

    def report_back(self, node: str) -> None:
        """Say that a node of which `report_gone` was called answers. Like `order_join`."""
        self._evidence.append((node, False))

    def report_others(self, others: frozenset[Standing]) -> None:
        """Say what all other ends of links say of themselves. Like `order_join`.

        A node whose link is asked for and does not stand counts as `Standing.ACCEPTED`.
        """
        self._others, self._others_reported = others, True
        self._hear_others()  # At once: a request may take as long as this node has.

    def note_retry(self) -> None:
        """Say that the store's client makes a request again, in a wait too; from any thread."""
        self._seen.repeats()
        self._contact.fails = True

    def news_for_others(self) -> HoldLinks | None:
        """What to say over links that was not said yet; in the thread that drives.

        At once, although a request may not be over: others judge by it.
        """
        if not self.record.link or (standing := self._standing) is self._said:
            return None
        self._said = standing
        return self._links

    def run(self) -> Effects[None]:
        """Live until the driver stops driving."""
        failures = 0
        while True:
            try:
                yield from self._timed(self._turn())
                failures = 0
            except (RendezvousConnectionError, RendezvousStateError) as error:
                failures += 1
                yield from self._bear(error, failures)

    def farewell(self, failure: str = "") -> Effects[None]:
        """Announce that this node leaves; driven once, after `run` has been stopped. Rule: leave.

        Args:
            failure: why its workers or its agent failed, so that it leaves.
        """
        if failure:
            self._failure, self._unfit_reported = failure, failure
        yield from self._leave()
        # A last beat that was delayed on its way may be applied after the farewell.
        entry, _ = yield from self._seen.read_record(self.id)
        if entry is None or entry.value != self.record.encode():
            yield from self._leave()
        if self.record.unfit and self.latest is None:
            # There is no run, whose end would be the record's.
            yield from Drop((NODES_PREFIX + self.id,))

    def _leave(self) -> Effects[None]:
        """Say that this node is in no round, and leave the lead to others."""
        status = Status.DONE if self.done else Status.LEFT
        unfit = self.record.unfit if self._unfit_reported is None else self._unfit_reported
        if self._join_ordered:
            unfit = ""  # It is fit again, and leaves before it could say so.
        self.record = replace(
            self.record,
            beat=self.record.beat + 1,
            at=int(self._wall()),
            status=status,
            unfit=unfit,
            failed=bool(self._failure),
        )
        yield from PutRecord(self.id, self.record, ring=True)
        for _ in range(3):
            entry = yield from Read(STATE_KEY)
            try:
                yield from self._seen.adopt(entry)
            except RendezvousStateError:
                return  # Another version's document: this node does not lead there.
            document = self.document
            if document is None or document.leader != self.id or document.closed:
                return
            if (yield from self._write(replace(document, leader=None))):
                if not self._expires:
                    # No other node may be left to set the deadline.
                    yield from Expire(self._rules.abandoned)
                return

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
            if document is not self._judged and not self._joining:
                # At once: the requests before the next decision may take long.
                self._judged = document
                self._waiting = nodes_waiting(replace(self.view(), document=document))
            if (news := self.news_for_others()) is not None:
                yield from news
            answer, error, asked = None, None, self._clock()
            try:
                answer = yield request
            except (RendezvousConnectionError, RendezvousStateError) as failure:
                error = failure
            if isinstance(request, _PAUSES):
                # When the store went away during a wait is unknown.
                seen.paused(min(request.seconds, self._clock() - asked))
                if self._clock() - asked > request.seconds:
                    seen.woke_late(self._clock() - asked - request.seconds)
            if error is None:
                if type(request) not in LOCAL:
                    seen.answered()
                if isinstance(request, PutRecord):
                    self._contact.accepted(asked)
                    self._cut_off, self._told_to_stop, self._told_of_all = "", False, False
                elif isinstance(request, Read):
                    self._contact.sees()
            elif isinstance(error, RendezvousConnectionError) and type(request) not in LOCAL:
                seen.failed()
                self._contact.fails = True
                if isinstance(error, AccessDeniedError):
                    self._contact.denied()
                    self._reads_first = True

    def _turn(self) -> Effects[None]:
        self._take_orders()
        if self._withdraw_ordered:
            self._withdraw_ordered = self._joining = False
            yield from self._leave()
        self._network.take_up()
        while self._evidence:
            yield from self._take_evidence()
        self._answer_accusation()
        seen = self._seen
        if self._beats and not seen.closed:
            if self._reads_first:
                # Others would wait for a node that beats and may read nothing. One that may only
                # read sees whether they go on without it.
                yield from seen.read_document()
                self._reads_first = False
            self._take_orders()  # Of the meantime: what it beats next is not to be outdated.
            yield from self._keep_alive()
        yield from seen.observe()
        while seen.refused:
            yield from Tell("unreadable", f"it counts as absent: {seen.refused.pop(0)}")
        view = self.view()
        for about, key, text in words.remarks(view):
            if (about, key) not in self._told:
                yield from self._tell_what_it_asked_for()
                yield from Tell(about, text)
                self._told.add((about, key))
        action = decide(view)
        writes = isinstance(action, _WRITES)
        if view.records is not None and not (seen.document_is_fresh or writes):
            # The records may be newer than the document. Compare-and-set guards a write; any other
            # action must be for the document as it is now.
            token = seen.token
            yield from seen.read_document()
            if seen.token != token:
                return
        self._waiting = nodes_waiting(view)
        if waits_for_a_living_round(view):
            # A spare waits for as long as the round lasts, as torch's redundant nodes do.
            self._join_deadline = self._clock() + self._join_timeout
        elif view.is_late and not isinstance(action, _ENDS):
            # It has a rank: the round may be about to run.
            self._join_deadline = self._seen.document_since + self._rules.lease
        if isinstance(action, _TELLS):
            yield from self._tell_what_it_asked_for()
        if self._joining and isinstance(action, rules.Wait):
            yield from self._tell_what_it_waits_for(view)
        if self._join_ordered and isinstance(action, _ENDS):
            return  # It answers a join that was given up meanwhile; another one was ordered.
        # Where the write fails, this node does not lead, though it beats and lists.
        seen.is_to_write = isinstance(action, _DECIDES)
        yield from self._act(action)
        seen.is_to_write = False

    def _tell_what_it_asked_for(self) -> Effects[None]:
        """Tell it when this node has time: a line takes as long as a request to the store."""
        if self._news is not None:
            news, self._news = self._news, None
            yield from Tell("joined", news)

    def _tell_what_it_waits_for(self, view: rules.View) -> Effects[None]:
        now = self._clock()
        # A remark has told what a spare waits for, which may take days.
        if not self._pace.is_due(now) or waits_for_a_living_round(view):
            return
        found = words.of_node(view, self._join_deadline - now)
        if self._pace.tells(found.lasting, now):
            yield from Tell("waiting", str(found))

    @property
    def _beats(self) -> bool:
        """Whether the others are to see that this node lives."""
        return self.record.status is not Status.LEFT or self.record.is_unfit

    def _take_orders(self) -> None:
        if self._others_reported:
            self._others_reported = False
            # Whether the store refuses this node too is to be known before their leases are over.
            asks = Standing.CUT_OFF in self._others and not self._contact.fails
            self._record_due = self._record_due or asks
        if self._unfit_reported is not None:
            record, reason, self._unfit_reported = self.record, self._unfit_reported, None
            self.record = replace(record, status=Status.LEFT, unfit=reason, master=None)
            self._joining = False
            # Of the next reasons the leader reads with its next listing.
            self._ring = self._ring or not record.is_unfit
            self._record_due = self._record_due or self.record != record
        if self._join_ordered:
            cut_off = self._contact.why if self.is_cut_off else ""
            self._join_ordered = False
            self._joining = True
            self._joined_at = self._clock()
            self._pace = words.Pace(self._joined_at)
            self._join_deadline = self._joined_at + max(0.0, self._join_timeout - self._waited)
            self.record = replace(
                self.record,
                status=Status.JOIN,
                master=None,
                hosts=True,
                failed=self._failed,
                may_grow=False,
                unfit="",
                suspect=self._suspect,
            )
            self._cut_off = self._cut_off or cut_off
            self._news = self._what_it_asks_for()
            self._fresh = self._new_incarnation()
            self._record_due = self._ring = True
            # A node that joins again may have lost the leader: look at it now, not an interval on.
            self._seen.read_again(document=True, leader=self._member is not None)
            self._waiting = 0
            self._contact.workers_stopped()
        if self._done_reported:
            self._done_reported = False
            if self.record.status is Status.RUN and not self._joining:
                # No node waits for this: do not ring the bell.
                self.record = replace(self.record, status=Status.DONE)
                self._record_due = True
        if self._growth_allowed:
            self._growth_allowed = False
            if self.record.status is Status.RUN and not self._joining:
                self.record = replace(self.record, may_grow=True)
                self._record_due = self._ring = True

    def _what_it_asks_for(self) -> str:
        if self._member is None:
            nnodes = f"{self._rules.min_nodes}:{self._rules.max_nodes}"
            return f"joined as {self.record.label}, --nnodes={nnodes}"
        why = "its workers failed" if self._failed else "its round is over"
        if self._cut_off:
            why = f"it was cut off: {self._cut_off}"
        return f"{self.record.label} asks for the next round: {why}"

    def _new_incarnation(self) -> str:
        return f"{self._chance.getrandbits(64):016x}"

    def _keep_alive(self) -> Effects[None]:
        """Once an interval, beat and look at the others; write a changed record at once."""
        interval_over = self._clock() >= self._next_beat
        if interval_over and not self._record_due:
            self.record = replace(self.record, may_grow=False)  # The moment is over.
        if self._record_due or interval_over:
            due = min(self._clock(), self._next_beat)
            yield from self._write_record()
            self._seen.beat_was_late(self._clock() - due)
            # Never sooner than an interval. The random part keeps thousands of nodes out of step.
            interval = self._rules.interval
            self._next_beat = self._clock() + interval * (1 + 0.1 * self._chance.random())
            if self._clock() < self._answers_until:
                soon = self._clock() + (self._rules.answer or 0.0) / _ANSWERS
                self._next_beat = min(self._next_beat, soon)
        if interval_over:
            self._seen.read_again(leader=True, records=True)

    def _take_evidence(self) -> Effects[None]:
        """Accusations: say in this node's record who is gone, or is not."""
        node, gone = self._evidence[0]
        accuses = dict(self.record.accuses)
        accuses.pop(node, None)
        if gone:
            # Its last word first: it may have left, or be of a version that answers nobody.
            _, record = yield from self._seen.read_record(node)
            if record is not None and record.link and not record.is_over:
                accuses[node] = record.beat
        self._evidence.popleft()
        accused = tuple(accuses.items())[:_MOST_ACCUSED]
        if accused == self.record.accuses:
            return
        self.record = replace(self.record, accuses=accused)
        self._record_due = self._ring = True
        self._owe_links()
        document = self._seen.document
        if document is not None and document.leader == node:
            self._seen.read_again(document=True, leader=True)

    def _accusation(self) -> tuple[str, Accusation] | None:
        """The accusation against this node that the document has, and of which run."""
        document = self._seen.document
        if document is None or not document.accused or self._rules.answer is None:
            return None
        against = (it for it in document.accused if it.node == self.id and not it.lost)
        accusation = next(against, None)
        return (document.incarnation, accusation) if accusation is not None else None

    def _answer_accusation(self) -> None:
        """Accusations: beat at once, and again: a store may forget one heartbeat."""
        now, accusation = self._clock(), self._accusation()
        if accusation is not None and accusation != self._answers:
            self._answers = accusation
            self._answers_until = now + _ANSWERS_FOR * (self._rules.answer or 0.0)
            self._record_due = self._ring = True

    def _owe_links(self, seconds: float = 0.0) -> None:
        if self._rules.answer is not None:
            self._links_due = self._clock() + seconds

    def _links_for(self) -> tuple[str, str | None] | None:
        """The round for which links are due, and its leader if one is to be to it; None: unknown.

        The leader joins those that are no neighbours of one another. A node outside of the round
        shows it that others can go on; the first nodes of shards tell each other of it.
        """
        document, confirmed, leads_shard = self.document, self._seen.confirmed, self._leads_shard
        if self._rules.answer is None or document is None or document.phase is not Phase.RUNNING:
            return None
        leader = document.leader if document.leader != self.id else None
        if self._joining and self.id not in document.ranks:
            silence = self._seen.liveness.confirmed_silence(leader) if leader else 0.0
            return document.world_id, leader if silence >= self._rules.lease / 2 else None
        if confirmed is None or confirmed.world_id != document.world_id:
            return None
        return document.world_id, leader if leads_shard else None

    def _hold_links(self) -> Effects[None]:
        """Have links to both neighbours in the round, and go on to others past those that are gone.

        Nobody waits for this: the round runs, or is held up.
        """
        confirmed, accused = self._seen.confirmed, dict(self.record.accuses)
        links_for, held = self._links_for(), self._links
        ring: tuple[str, ...] = ()
        if confirmed is not None:
            if links_for is None or links_for[0] == confirmed.world_id:
                ring = self._seen.ring(confirmed)
            self._leads_shard = ring[:1] == (self.id,) and len(ring) < confirmed.size
            links_for = self._links_for() or (confirmed.world_id, None)
        here = ring.index(self.id) if self.id in ring else len(ring)
        others = (*ring[here + 1 :], *ring[:here])
        neighbours = *_as_far_as(others, accused), *_as_far_as(others[::-1], accused)
        leader = links_for[1] if links_for is not None else None
        known, endpoints = self._endpoints, dict[str, str | None]()
        for node in dict.fromkeys((*neighbours, *filter(None, [leader]))):
            endpoint = known.get(node)
            if node not in known:
                record = (self._seen.records or {}).get(node)
                if record is None:
                    _, record = yield from self._seen.read_record(node)
                if record is not None and record.link:
                    endpoint = f"{record.address}:{record.link}"
            endpoints[node] = endpoint
        self._endpoints = endpoints
        self._links_due, self._linked_for = math.inf, links_for or self._linked_for
        self._hear_others()
        if self._links != held:
            yield from self._links

    def _hear_others(self) -> None:
        """Where a link is missing that counts for the round of its agent, others may go on."""
        member = self._member
        linked = member is not None and member.world_id == self._linked_for[0]
        stand = linked and self._links_due == math.inf and None not in self._endpoints.values()
        self._contact.hear(self._others if stand else (*self._others, Standing.ACCEPTED))

    @property
    def _links(self) -> HoldLinks:
        known = tuple((node, it) for node, it in self._endpoints.items() if it is not None)
        return HoldLinks(known, self._said)

    def _write_record(self) -> Effects[None]:
        slow = int(1000 * max(*self._took, self._seen.overslept))
        self.record = replace(
            self.record,
            beat=self.record.beat + 1,
            looks=self._seen.looks,
            slow=slow if slow >= _SLOW else 0,
            # For people alone.
            at=int(self._wall()),
            last_call=self._last_call(),
        )
        ring, self._record_due, self._ring = self._ring, False, False
        asked = self._clock()
        try:
            yield from PutRecord(self.id, self.record, ring)
        except RendezvousConnectionError:
            self._record_due, self._ring = True, ring
            raise
        self._took = self._took[1], self._clock() - asked

    def _last_call(self) -> tuple[int, int] | None:
        """As `documents.NodeRecord.last_call`."""
        document, enough_for = self.document, self._seen.enough_for
        if document is None or document.phase is not Phase.FORMING or enough_for is None:
            return None
        left = last_call(self._rules, document) - enough_for
        if document.leader != self.id or left < _SHORTEST_CALL:
            return None
        return document.round, int(self._wall() + left)

    def view(self) -> rules.View:
        """The view of this node now. In another thread its parts may be of two moments."""
        now, seen = self._clock(), self._seen
        document = seen.document
        leader = document.leader if document and document.leader else ""
        return rules.View(
            me=self.id,
            rules=self._rules,
            record=self.record,
            joining=self._joining,
            join_left=self._join_deadline - now,
            document=document,
            document_age=now - seen.document_since,
            round_age=now - seen.round_since,
            uptime=now - seen.running_since if seen.running_since is not None else 0.0,
            longest_uptime=now - seen.forming_since if seen.forming_since is not None else math.inf,
            grown_for=now - seen.grown_since,
            latest=seen.latest,
            asked_tombstones=seen.asked_tombstones(),
            member=self._member,
            confirmed=seen.confirmed,
            given=self._given,
            records=seen.records,
            leader=seen.leader,
            now=now,
            watched=seen.liveness.watched,
            confirmed_idleness=seen.progress.confirmed_silence(leader),
            possible_idleness=seen.progress.possible_silence(leader, now),
            lag=seen.lag,
            cannot_list=seen.cannot_list,
            abdicated=self._abdicated,
            enough_for=seen.enough_for,
            share=self._share,
            fresh=self._fresh,
            wall=self._wall(),
            carried=self._carried if self._looks_back_in(document) else None,
            checks=document is not None and self._network.is_of(document),
            opening_for=self._opening_for(document, now),
            unheard=self._contact.unheard,
            until_first_lease=seen.until_first_lease(now),
            unanswered=seen.unanswered,
            latency=max(seen.latency, seen.overslept),
        )

    def _opening_for(self, document: RoundDocument | None, now: float) -> float | None:
        """As `rules.View.opening_for`."""
        opening = self._opening
        if opening is None or self._opened is not None or document is None:
            return None
        return now - opening[1] if opening[0] == document.world_id else None

    def _act(self, action: rules.Action) -> Effects[None]:
        match action:
            case rules.Write(document):
                first = document.phase is Phase.CONFIRMING and document.ranks.get(self.id) == 0
                # Not once it has confirmed, and takes the lead only then: its TCPStore is open.
                if first and self.record.world_id != document.world_id:
                    yield from self._begin_to_open_master(document.world_id)
                yield from self._write(document)
            case rules.Abdicate(document, fails):
                if (yield from self._write(document)):
                    self._abdicated = self._abdicated or fails
                    if not (fails or self._expires):
                        # No other node may be left to set the deadline.
                        yield from Expire(self._rules.abandoned)
            case rules.SetRecord(status, incarnation, round_, ring, hosts):
                if not hosts:
                    yield from Tell(
                        "master",
                        "this node, rank 0, opened no TCPStore within its lease: another node "
                        "becomes rank 0",
                    )
                    self._opening = None
                self.record = replace(
                    self.record, status=status, incarnation=incarnation, round=round_, master=None,
                    hosts=self.record.hosts and hosts,
                )  # fmt: skip
                self._record_due, self._ring = True, ring
            case rules.Confirm(document, is_master, seconds):
                yield from self._confirm(document, is_master, seconds)
            case rules.Start(document):
                self._member, self._suspect = document, False
                self._owe_links()
                named = (it for it in self.record.accuses if it[0] in document.ranks)
                self.record = replace(self.record, accuses=tuple(named))
                self._contact.workers_start()
                self._hear_others()
                self._given[document.incarnation] = document.round
                place = f"rank {document.ranks[self.id]} of {document.size}"
                text = f"round {document.round}: {place}, MASTER {document.master}"
                # Before the agent goes on: it may fork its workers, while no thread is to log.
                yield from Tell("round", f"{text} ({document.reason})")
                yield from self._end_join(JoinOutcome(document=document))
            case rules.Fail(failure):
                missed = words.of_node(self.view())
                yield from self._end_join(JoinOutcome(failure=failure, diagnosis=missed))
            case rules.Close(document, outcome, why):
                # The same words as shutdown()'s, which finishes this if it is interrupted.
                self.closing = True
                try:
                    yield from close_run(
                        self.id,
                        document,
                        outcome,
                        f"{why}; closed by {self.record.label}",
                        self._rules.sweep_after,
                        # Any leader, also a spare; not a node that has lost the lead since.
                        may_close=lambda now: now.leader == self.id,
                    )
                finally:
                    self.closing = False
                self._seen.read_again(document=True)
            case rules.Doubt(nodes, begins, late, world):
                self._seen.doubt(nodes)
                if begins:
                    yield from Tell(
                        "doubt",
                        f"{late} of {world} nodes are late with their heartbeats, all at once: "
                        "this may be the store or the load, so each of them has one more lease",
                    )
            case rules.ListRecords():
                self._seen.list_records()
            case rules.AskTombstone(incarnation):
                asked = self._clock()
                ended = yield from ReadTombstone(incarnation)
                if ended is not None:
                    # The keys that this node wrote since the sweep have no deadline. If the Drop
                    # fails, the node asks again; once it knows of the end it does nothing more.
                    yield from Drop((NODES_PREFIX + self.id,))
                self._seen.hear_of_the_end(incarnation, ended, asked)
            case rules.Wait(seconds, enough):
                if self._seen.note_enough(enough):
                    return  # Decide again: the last call may take no time.
                self._opening = None
                yield from self._wait(seconds)

    def _looks_back_in(self, document: RoundDocument | None) -> bool:
        return document is not None and document.incarnation == self._looks_back_for

    def _look_back(self, document: RoundDocument) -> Effects[None]:
        """Read once whom earlier runs have excluded: this leader has nothing else to do.

        No round waits for it: a node that should not be in a round is taken out later.
        """
        now = self._clock()
        if not self._looks_back_in(document):
            self._looks_back_for, self._carried = document.incarnation, None
            self._looks_back_since = self._looks_back_at = now
        if self._carried is not None or now < self._looks_back_at:
            return
        try:
            self._carried = yield from ReadExclusions()
        except (RendezvousConnectionError, RendezvousStateError) as error:
            self._looks_back_at = self._clock() + self._rules.interval
            refused = isinstance(error, RendezvousStateError)
            if refused or self._clock() - self._looks_back_since >= self._rules.lease:
                self._carried = ()
                yield from Tell(
                    "exclusions",
                    "this node cannot read which hosts are excluded, so the run goes on without "
                    f"exclusions; exclude the hosts again with rdzv exclude: {error}",
                )

    def _confirm(
        self, document: RoundDocument, is_master: bool, seconds: float | None
    ) -> Effects[None]:
        """Confirm the rank in this node's record; rank 0 opens MASTER_PORT first."""
        master = None
        if is_master:
            master = yield from self._open_master(document.world_id)
            if master is None:
                return
        found: Found | None = None
        if self._rules.network_check and document.size > 1:
            found = yield from self._check_network(document, seconds)
            if found is None:
                return
        self._opening = None
        self._seen.confirm(document)
        self.record = replace(
            self.record,
            status=Status.RUN,
            incarnation=document.incarnation,
            round=document.round,
            world_id=document.world_id,
            rank=document.ranks[self.id],
            master=master,
            failed=False,
            may_grow=False,
            found=found,
        )
        self._record_due = self._ring = True
        self._owe_links(_LINKS_SECONDS)

    def _check_network(
        self, document: RoundDocument, seconds: float | None
    ) -> Effects[Found | None]:
        """The findings of this node about its links; None: none yet, decide again."""
        found = yield from self._network.run(document)
        if found is not None or self.ordered:
            return found
        leads, awaits = document.leader == self.id, self._network.awaits
        patience = self._rules.interval if seconds is None else seconds
        if awaits is None or leads:
            # A leader hears the bell once rank 0 has confirmed.
            left = patience if awaits else min(patience, self._network.seconds_left)
            yield from self._park(left, leads)
        else:
            until_beat = max(0.0, self._next_beat - self._clock())
            yield from Park(*awaits, min(_LOOK_SECONDS, until_beat, patience))
            self._seen.read_again(document=True, leader=True)
        return None

    def _begin_to_open_master(self, world_id: str) -> Effects[None]:
        self._opening, self._opened, self._reopens = (world_id, self._clock()), None, False
        yield from OpenMaster(world_id, 0.0)

    def _open_master(self, world_id: str) -> Effects[str | None]:
        """The address of this round's TCPStore; None: it is not open yet, decide again."""
        now = self._clock()
        if self._opening is None or self._opening[0] != world_id:
            yield from self._begin_to_open_master(world_id)
        assert self._opening is not None
        since = self._opening[1]
        is_due = self._reopens and not self._openings.seconds_left
        if is_due or (self._opened is None and not self._reopens and now - since < _MASTER_SECONDS):
            self._reopens = False
            yield from OpenMaster(world_id, _MASTER_SECONDS)
        if self._opened is not None and self._opened[0] == world_id:
            _, opened = self._opened
            if not isinstance(opened, Exception):
                self._openings.succeed()
                return opened
            self._opened, self._reopens = None, True
            if isinstance(opened, RendezvousStateError):
                raise opened  # Trying again is of no use.
            if self._openings.fail():
                yield from Tell("master", f"{opened}; rank 0 tries again")
        if self._opened is None:
            left = since + self._rules.lease - now
            if self._reopens:
                left = min(left, self._openings.seconds_left)
            yield from self._wait(max(0.0, left))
        return None

    def _end_join(self, outcome: JoinOutcome) -> Effects[None]:
        self._joining = False
        if outcome.document is None:
            # The node is in no round and asks for none until its agent asks again.
            closed = outcome.failure in (Failure.CLOSED, Failure.SPARE_CLOSED)
            try:
                if closed:
                    self.record = replace(self.record, status=Status.LEFT, unfit="")
                    yield from self._clear_away()
                else:
                    if outcome.failure is Failure.DRAINED:
                        self.record = replace(self.record, unfit="")
                    elif outcome.failure is Failure.CUT_OFF and self.document is not None:
                        self._suspect = True
                        why = self.document.faults.why_out(self.id)
                        self.record = replace(self.record, unfit=why)
                    yield from self._leave()
            except (RendezvousConnectionError, RendezvousStateError):
                # The others wait for this node's lease; its agent is told all the same.
                self._seen.read_again(document=True, records=True)
        yield from FinishJoin(outcome)

    def _clear_away(self) -> Effects[None]:
        """Leave nothing in a closed run; free its id if the node that closed it could not."""
        # A record written after the run was closed may outlive the sweep.
        yield from Drop((NODES_PREFIX + self.id,))
        document = self.document
        newcomer = self._seen.confirmed is None
        if newcomer and document is not None and document.closed and not document.expires:
            yield from let_expire(document, self._seen.token, self._rules.sweep_after)

    def _write(self, document: RoundDocument) -> Effects[bool]:
        seen = self._seen
        waited = self._clock() - seen.round_since, seen.enough_for or 0.0
        if document.run != self._rules.run:
            document = replace(document, run=self._rules.run)
        document = document.edited
        stored, shards = apart(document, self._rules.inline)
        outages = seen.outages
        for digest, values in shards.items():
            if digest not in seen.stored:
                # Before the document names them: who reads it finds them.
                yield from PutShards(values)
        if seen.outages != outages:
            return False  # Decide again: nobody is lost by what was seen before an outage.
        latest = seen.latest
        if latest is None or not document.is_of(latest) or document.place > latest.place:
            document = replace(document, since=int(self._wall()))
            stored = replace(stored, since=document.since)
        entry, written = yield from CompareAndSet(STATE_KEY, stored.encode(), seen.token)
        before, member = self.document, self._member
        if not written:
            yield from seen.adopt(entry)
            return False
        yield from seen.adopt(entry, document, shards_of(stored))
        self._shards = {key: value for values in shards.values() for key, value in values.items()}
        self._shards_due = 2 * self._rules.interval
        if before and member and before.is_whole and before.world_id == member.world_id:
            # An heir of the leader knew its own rank alone when it confirmed that.
            self._member = replace(member, participants=before.participants, roster=None)
        if document.phase is Phase.CONFIRMING:
            self._gathered = Durations(gathering=waited[0], last_call=waited[1])
        if document.excluded:
            self._carried = ()  # They stand in the document now.
        if document.incarnation == self._fresh:
            self._fresh = self._new_incarnation()  # In case this node founds another run.
            yield from Register(record_of(document, {self.id: self.record}))
        if before is None or before.leader != self.id:
            # A store that forgot has forgotten the deadline too. Renew it soon, but not while the
            # others wait for this round.
            self._expires, self._expiry_due = False, self._clock() + self._rules.interval
        elif document.phase is Phase.RUNNING and not self._expires:
            self._expiry_due = self._clock()
        asks = before is not None and before.accused != document.accused
        passes_on = before is not None and before.leader not in (document.leader, None)
        if passes_on or (asks and document.leader != self.id):
            # The former leader, or the accused, waits for the bell, not for the document.
            yield from Ring(self.id)
        if document.phase is Phase.RUNNING and before and before.phase is Phase.CONFIRMING:
            took, gathered = self._clock() - seen.round_since, self._gathered
            seconds = replace(gathered, confirming=max(0.0, took - gathered.gathering))
            self._untidy = document, self._member, seconds
        return True

    def _wait(self, seconds: float | None) -> Effects[None]:
        """Wait for a change, a beat's time or ``seconds``; but first do what nobody waits for."""
        if self.ordered or (self._opening and self._opened):
            return  # The driver may have ended its waits for this before this wait began.
        if self._accusation() not in (None, self._answers):
            return  # Answer at once.
        if self._untidy is not None:
            (released, before, took), self._untidy = self._untidy, None
            # The round is released, to this node's agent too.
            records = self._seen.records or {}
            outdated = self._seen.take_outdated()
            gone = found_gone(released, records)

            def is_silent(node: str) -> bool:
                return node in gone or self._seen.is_silent(node)

            yield from tidy_up(released, before, took, records, is_silent, outdated)
            return
        until_links = self._links_due - self._clock()
        if until_links <= 0 or self._links_for() not in (None, self._linked_for):
            yield from self._hold_links()
            return
        document = self.document
        leads = document is not None and document.leader == self.id and not document.closed
        if leads and self._clock() >= self._expiry_due:
            # If nobody leads this run any more, its keys end by themselves.
            yield from Expire(self._rules.abandoned)
            self._expires = True
            self._expiry_due = self._clock() + self._rules.abandoned / _RENEWALS
            return
        waits = document is not None and document.phase in (Phase.FORMING, Phase.CONFIRMING)
        age = self._clock() - self._seen.document_since
        if leads and waits and self._shards and age >= self._shards_due:
            # A fail-over may have lost them and kept the document.
            self._shards_due *= 2
            yield from PutShards(self._shards)
            return
        yield from self._park(until_links if seconds is None else min(seconds, until_links), leads)

    def _park(self, seconds: float | None, leads: bool) -> Effects[None]:
        """Wait for the bell as the leader, else for the document."""
        seen = self._seen
        until_beat = max(0.0, self._next_beat - self._clock())
        if seen.closed or not self._beats:
            until_beat = self._rules.interval  # There is no beat to be late for.
        timeout = until_beat if seconds is None else min(until_beat, seconds)
        if seen.misses_its_rank and self._clock() - seen.document_since < self._rules.interval:
            timeout = min(timeout, _MISSING_SHARD_PAUSE)
        if self._joining:
            timeout = min(timeout, max(0.0, self._join_deadline - self._clock()))
        if leads:
            document = seen.document
            assert document is not None
            call, told = self._last_call(), self.record.last_call
            calls = call is not None and (told is None or told[0] != call[0])
            forms = document.phase is Phase.FORMING
            if calls or (forms and not self._looks_back_in(document)):
                timeout = min(timeout, _QUIET_SECONDS)
            bell = yield from Park(BELL_KEY, self._bell, timeout)
            if bell is not None:
                self._bell = bell.version
            elif document.phase is not Phase.CONFIRMING:
                yield from self._look_back(document)
                # People are told of a last call once nobody rings any more; nobody waits for that.
                self._record_due = self._record_due or calls
            seen.read_again(records=True)
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
        """Outage: an outage stops no node, and no node is judged by what could not be read."""
        self._seen.read_again(document=True, leader=True, records=True)
        sealed = isinstance(error, SealedRunError)
        damaged = isinstance(error, CorruptDocumentError) and not sealed
        if damaged and self._clock() >= self._joined_at + self._rules.lease + self._rules.interval:
            # The nodes of the run, if any lived, would have written the document again.
            self._seen.mend()
        elif self._joining and not self._withdraw_ordered and self._is_hopeless(error):
            self._joining = False
            self.record = replace(self.record, status=Status.LEFT)
            yield from FinishJoin(JoinOutcome(error=error))
        if self.is_cut_off:
            self._cut_off = self._contact.why
        if self._cut_off and not self._told_to_stop:
            self._told_to_stop = True
            yield from Tell(
                "cut off",
                f"the others may go on without this node, so its agent stops the workers: "
                f"{self._cut_off}; then it asks for a round again, for {self._join_timeout:g} s "
                f"({error})",
            )
        if self._is_at_work and self._contact.is_refused_with_all and not self._told_of_all:
            self._told_of_all = True
            yield from Tell(
                "refused",
                "the store refuses all nodes, as they say over their links: training goes on",
            )
        pause = min(0.05 * 2.0 ** min(failures, 10), _LONGEST_OUTAGE_PAUSE)
        pause *= 0.5 + 0.5 * self._chance.random()
        yield from Rest(pause)

    def _is_hopeless(self, error: Exception) -> bool:
        if isinstance(error, SealedRunError | ForeignValueError):
            # Its nodes may live; if none of another secret's lives, this node begins a run in its
            # place.
            return self._clock() >= self._joined_at + self._rules.lease + self._rules.interval
        if isinstance(error, CorruptDocumentError):
            return self._clock() >= self._join_deadline
        return isinstance(error, RendezvousStateError) or self._clock() >= self._join_deadline


def _as_far_as(nodes: Iterable[str], accused: Container[str]) -> list[str]:
    """These nodes up to the first that is not accused, which is among them."""
    found = []
    for node in nodes:
        found.append(node)
        if node not in accused:
            break
    return found
