"""What a node's agent asks for, and the rounds that it was given."""

from __future__ import annotations

from collections.abc import Callable

from rdzv_plugins.kv import RendezvousStateError
from rdzv_plugins.kv.sealed import ForeignValueError
from rdzv_plugins.protocol import words
from rdzv_plugins.protocol.contact import Contact
from rdzv_plugins.protocol.documents import (
    CorruptDocumentError,
    RoundDocument,
    SealedRunError,
    Status,
)
from rdzv_plugins.protocol.effects import Effects, Tell
from rdzv_plugins.protocol.heartbeat import Heartbeat
from rdzv_plugins.protocol.observer import Observer
from rdzv_plugins.protocol.rules import Own, View
from rdzv_plugins.protocol.situation import waits_for_a_living_round

# Log a changed sentence once it is unchanged for this long, not at each step of a forming round.
_SETTLED_SECONDS = 1.0
_REPEAT_SECONDS = 30.0


class Inbox:
    """What the agent's threads ask for and report, until the node takes it up.

    Each method may be called in any thread, and ends the node's `Park` or `Rest` early.

    Attributes:
        wake: ends the wait; the driver sets it.
        unfit: the reason of `report_unfit`; None: there is none.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], object] = bool
        self.joins = self.withdraws = self.done = self.leaves = self.saved = False
        self.unfit: str | None = None
        self.failed, self.waited = False, 0.0

    @property
    def any(self) -> bool:
        agent = self.joins or self.withdraws or self.done or self.leaves or self.saved
        return agent or self.unfit is not None

    def join(self, failed: bool = False, waited: float = 0.0) -> None:
        """Ask for the next round.

        ``failed``: this node's workers failed. ``waited``: seconds of ``join_timeout`` already
        over.
        """
        self.failed, self.waited, self.unfit = failed, waited, None
        self.withdraws, self.joins = False, True
        self.wake()

    def withdraw(self) -> None:
        """Give up the join, because its agent is gone."""
        if self.joins:
            # The join was not taken up yet. Its agent was fit, and may report otherwise by now.
            self.joins, self.unfit = False, ""
        self.withdraws = True
        self.wake()

    def report_done(self) -> None:
        """Say that this node's workers succeeded."""
        self.done = True
        self.wake()

    def leave(self) -> None:
        """Leave once the run has saved a checkpoint."""
        self.leaves = True
        self.wake()

    def note_saved(self) -> None:
        """Note that a worker of this node has saved."""
        self.saved = True
        self.wake()

    def report_unfit(self, reason: str) -> None:
        """Say that this node asks for no round, and why: its check failed.

        The others go on without it until it joins again. A closed run ends it like a join.
        """
        self.unfit = reason
        self.wake()


class Pace:
    """Decides when to log what a join waits for: once the sentence is stable, and every 30 s."""

    def __init__(self, now: float) -> None:
        self._looked = now
        self._candidate = self._told = ""
        self._told_at = now

    def is_due(self, now: float) -> bool:
        """Whether to look again; a leader of many nodes decides much more often."""
        return now - self._looked >= _SETTLED_SECONDS

    def tells(self, sentence: str, now: float) -> bool:
        """Whether to log the sentence now; it must not contain seconds, which always change."""
        settled = sentence == self._candidate
        self._looked, self._candidate = now, sentence
        if not (settled and sentence != self._told) and now - self._told_at < _REPEAT_SECONDS:
            return False
        self._told, self._told_at = sentence, now
        return True


class Join:
    """The agent's join, and the rounds that it was given.

    Attributes:
        joining: an agent waits for a round.
        asked_at, deadline: when it asked, and when its join times out.
        rounds: by incarnation, the number of the last round that it was given.
        was_at_fault: see `NodeRecord.was_at_fault`.
        news: a line for the log, once the record that asks for a round has been written.
    """

    def __init__(
        self,
        own: Own,
        inbox: Inbox,
        timeout: float,
        seen: Observer,
        heartbeat: Heartbeat,
        contact: Contact,
    ) -> None:
        self._inbox = inbox
        self._timeout, self._rules, self._clock = timeout, own.rules, own.clock
        self._seen, self._heartbeat, self._contact = seen, heartbeat, contact
        self.joining = False
        self.asked_at = self.deadline = 0.0
        self.given: RoundDocument | None = None
        self.rounds: dict[str, int] = {}
        self.was_at_fault = False
        self.news = ""
        self._pace = Pace(own.clock())

    def take_messages(self) -> bool:
        """Change the record as the agent's messages say; returns whether a join begins."""
        inbox, heartbeat = self._inbox, self._heartbeat
        record = heartbeat.record
        if inbox.unfit is not None:
            reason, inbox.unfit = inbox.unfit, None
            heartbeat.amend(status=Status.LEFT, unfit=reason, master=None)
            self.joining = False
            if heartbeat.record != record:
                # Ring only for the first reason; the leader sees later reasons at its next listing.
                heartbeat.require(rings=not record.is_unfit)
        if begins := inbox.joins:
            inbox.joins = False
            self._begin()
        if inbox.done:
            inbox.done = False
            if self._is_at_work:
                # No node waits for this, so do not ring the bell.
                heartbeat.change(status=Status.DONE)
        if inbox.leaves:
            inbox.leaves = False
            if self._is_at_work:
                heartbeat.change(rings=True, leaves=True)
        if inbox.saved:
            inbox.saved = False
            if self._is_at_work and self._rules.grow == "checkpoint":
                heartbeat.change(rings=True, may_grow=True)
        return begins

    @property
    def _is_at_work(self) -> bool:
        return self._heartbeat.record.status is Status.RUN and not self.joining

    def _begin(self) -> None:
        inbox, label, contact = self._inbox, self._heartbeat.record.label, self._contact
        self.joining, self.asked_at = True, self._clock()
        self.deadline = self.asked_at + max(0.0, self._timeout - inbox.waited)
        self._pace = Pace(self.asked_at)
        if self.given is None:
            record = self._heartbeat.record
            self.news = f"joined as {label}, --nnodes={record.min_nodes}:{record.max_nodes}"
        else:
            why = "its workers failed" if inbox.failed else "its round is over"
            why = f"it was cut off: {contact.why_cut_off}" if contact.why_cut_off else why
            self.news = f"{label} asks for the next round: {why}"
        self._heartbeat.change(
            rings=True,
            status=Status.JOIN,
            master=None,
            can_host=True,
            failed=inbox.failed,
            may_grow=False,
            leaves=False,
            vote=None,
            agreed=None,
            saved=0,
            step=None,
            resumed=None,
            unfit="",
            was_at_fault=self.was_at_fault,
        )
        # A node that joins again may have lost the leader: read it now, not an interval later.
        self._seen.read_again(document=True, leader=self.given is not None)
        contact.workers_stopped()

    def start_over(self) -> None:
        """Restart the time-out: a spare waits for as long as a round lasts."""
        self.deadline = self._clock() + self._timeout

    def succeed(self, document: RoundDocument) -> None:
        """Note that the agent is given this round."""
        self.given, self.was_at_fault = document, False
        self.rounds[document.incarnation] = document.round

    @property
    def seconds_left(self) -> float:
        """Seconds until the join times out."""
        return max(0.0, self.deadline - self._clock())

    def tell_news(self) -> Effects[None]:
        """Log what the agent asked for, when there is time: a line takes as long as a request."""
        if self.news:
            news, self.news = self.news, ""
            yield from Tell("joined", news)

    def tell_wait(self, view: View) -> Effects[None]:
        """Log what this node waits for."""
        now = self._clock()
        # A remark has already said what a spare waits for, and a spare may wait for days.
        if not self._pace.is_due(now) or waits_for_a_living_round(view):
            return
        found = words.of_node(view, self.deadline - now)
        if self._pace.tells(found.lasting, now):
            yield from Tell("waiting", str(found))

    @property
    def has_asked_for_a_lease(self) -> bool:
        """Whether this node has asked for so long that live nodes would have shown themselves."""
        return self._clock() >= self.asked_at + self._rules.lease + self._rules.interval

    def is_hopeless(self, error: Exception) -> bool:
        """Whether the join ends with this error."""
        if isinstance(error, SealedRunError | ForeignValueError):
            # Wait a lease first: if no node with another secret lives, this node founds a new run.
            return self.has_asked_for_a_lease
        if isinstance(error, CorruptDocumentError):
            return self._clock() >= self.deadline
        return isinstance(error, RendezvousStateError) or self._clock() >= self.deadline
