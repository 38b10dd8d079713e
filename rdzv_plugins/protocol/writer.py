"""How a node changes the document, and ends a run."""

from __future__ import annotations

import math

from msgspec.structs import replace

from rdzv_plugins.kv import RendezvousStateError
from rdzv_plugins.protocol.cleanup import close_run, let_expire
from rdzv_plugins.protocol.documents import NODES_PREFIX, STATE_KEY, Outcome, RoundDocument, Status
from rdzv_plugins.protocol.effects import (
    CompareAndSet,
    Drop,
    Effects,
    Expire,
    PutShards,
    Read,
    ReadTombstone,
    Register,
    Ring,
)
from rdzv_plugins.protocol.heartbeat import Heartbeat
from rdzv_plugins.protocol.join import Join
from rdzv_plugins.protocol.lead import Lead
from rdzv_plugins.protocol.observer import Observer
from rdzv_plugins.protocol.roster import apart, shards_of
from rdzv_plugins.protocol.round_record import Durations, record_of
from rdzv_plugins.protocol.rules import Own

# The ranks that keep the id of a closed run while they train: no world trains on without them.
_KEEPERS = range(16)


class Writer:
    """Writes documents.

    Attributes:
        fresh: see `View.fresh`.
        closing: see `Node.closing`.
    """

    def __init__(
        self, own: Own, seen: Observer, heartbeat: Heartbeat, join: Join, lead: Lead
    ) -> None:
        self._own, self._id, self._rules, self._clock = own, own.id, own.rules, own.clock
        self._seen, self._heartbeat, self._join, self._lead = seen, heartbeat, join, lead
        self.fresh = ""
        self.closing = False
        self._keeps_id_at = -math.inf

    def draw_incarnation(self) -> None:
        """Draw another incarnation for each run that this node founds."""
        self.fresh = f"{self._own.chance.getrandbits(64):016x}"

    def write(self, document: RoundDocument) -> Effects[bool]:
        """Replace the document as last read; returns whether it was written."""
        seen, join, now = self._seen, self._join, self._clock()
        gathered = Durations(
            gathering=now - seen.since.round,
            last_call=now - seen.since.enough if seen.since.enough is not None else 0.0,
        )
        if document.run != self._rules.run:
            document = replace(document, run=self._rules.run)
        document = document.edited
        stored, shards = apart(document, self._rules.inline)
        outages = seen.outages.count
        for digest, values in shards.items():
            if digest not in seen.shards.stored:
                # Write the shards first, because readers of the document must find them.
                yield from PutShards(values)
        if seen.outages.count != outages:
            return False  # Decide again: silence before an outage proves nothing.
        latest = seen.latest
        if latest is None or not document.is_of(latest) or document.place > latest.place:
            document = replace(document, since=int(self._own.wall()))
            stored = replace(stored, since=document.since)
        entry, written = yield from CompareAndSet(STATE_KEY, stored.encode(), seen.token)
        before, given = seen.document, join.given
        if not written:
            yield from seen.adopt(entry)
            return False
        yield from seen.adopt(entry, document, shards_of(stored))
        if before and given and before.is_whole and before.world_id == given.world_id:
            # Add the other nodes: a leader's successor knew only its own rank when it confirmed.
            join.given = replace(given, participants=before.participants, roster=None)
        if document.incarnation == self.fresh:
            self.draw_incarnation()
            yield from Register(record_of(document, {self._id: self._heartbeat.record}))
        self._lead.note_written(before, document, join.given, gathered, shards)
        asks = before is not None and before.accused != document.accused
        passes_on = before is not None and before.leader not in (document.leader, None)
        if passes_on or (asks and document.leader != self._id):
            # Ring: a former or accused leader waits for the bell, not for the document.
            yield from Ring(self._id)
        return True

    def leave_the_lead(self) -> Effects[None]:
        """Give up the lead if this node has it, so that another node leads."""
        for _ in range(3):
            entry = yield from Read(STATE_KEY)
            try:
                yield from self._seen.adopt(entry)
            except RendezvousStateError:
                return  # The run is of another version, which this node does not lead.
            document = self._seen.document
            if document is None or document.leader != self._id or document.closed:
                return
            if (yield from self.write(replace(document, leader=None))):
                yield from self._lead.set_deadline()
                return

    def close(self, document: RoundDocument, outcome: Outcome, why: str) -> Effects[None]:
        """Close the run; `close_run` finishes this after `shutdown` if it is interrupted."""
        self.closing = True
        try:
            yield from close_run(
                self._id,
                document,
                outcome,
                f"{why}; closed by {self._heartbeat.record.label}",
                self._rules.sweep_after,
                # Any leader may close the run, even a spare, but no node that has lost the lead.
                may_close=lambda now: now.leader == self._id,
            )
        finally:
            self.closing = False
        self._seen.read_again(document=True)

    def ask_tombstone(self, incarnation: str) -> Effects[None]:
        """See `rules.AskTombstone`."""
        asked = self._clock()
        ended = yield from ReadTombstone(incarnation)
        if ended is not None:
            # Keys written since the sweep have no deadline. If the Drop fails, the node asks again.
            yield from Drop((NODES_PREFIX + self._id,))
        self._seen.hear_of_the_end(incarnation, ended, asked)

    def clear_away(self) -> Effects[None]:
        """Delete this node's record in a closed run; free its id if the closing node could not."""
        # A record written after the run was closed may outlive the sweep.
        yield from Drop((NODES_PREFIX + self._id,))
        document = self._seen.document
        newcomer = self._seen.confirmed is None
        if newcomer and document is not None and document.closed and not document.expires:
            yield from let_expire(document, self._seen.token, self._rules.sweep_after)

    @property
    def trains_on(self) -> bool:
        """Whether this node's round goes on in a run that was closed by request."""
        document, status = self._seen.document, self._heartbeat.record.status
        by_hand = document is not None and document.outcome is Outcome.CLOSED
        return by_hand and status in (Status.RUN, Status.DONE) and not self._join.joining

    def keep_id(self) -> Effects[None]:
        """Keep the closed run's keys, so that no other job has its id while workers train."""
        if self._heartbeat.record.rank in _KEEPERS and self._clock() >= self._keeps_id_at:
            self._keeps_id_at = self._clock() + self._rules.sweep_after / 4
            yield from self._seen.read_document()
            if self.trains_on:
                yield from Expire(self._rules.sweep_after)
