"""A leader's work beside its decisions, done when the leader has nothing to decide."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError, Version
from rdzv_plugins.protocol.accusations import lost_by_accusation
from rdzv_plugins.protocol.cleanup import delete_earlier_rounds
from rdzv_plugins.protocol.documents import BELL_KEY, Exclusion, Phase, RoundDocument
from rdzv_plugins.protocol.effects import (
    Effects,
    Expire,
    Park,
    PutShards,
    ReadExclusions,
    RecordHistory,
    Tell,
)
from rdzv_plugins.protocol.heartbeat import Heartbeat
from rdzv_plugins.protocol.observer import Observer
from rdzv_plugins.protocol.policies.growth import last_call_seconds
from rdzv_plugins.protocol.round_record import Durations, RoundRecord, record_of, with_first_step
from rdzv_plugins.protocol.rules import Own

# After this long without a bell, the leader reads the exclusions and publishes the time
# at which the last call ends.
_QUIET_SECONDS = 0.05
# Announce no shorter last call: it would end before people read of it.
_SHORTEST_CALL = 1.0
# A leader renews the run's deadline this often before it would pass.
_RENEWALS = 4


class Lead:
    """The leader's memory; it stays unchanged in a node that does not lead."""

    def __init__(self, own: Own, seen: Observer, heartbeat: Heartbeat) -> None:
        self.abdicated = False
        self._own, self._rules, self._clock = own, own.rules, own.clock
        self._seen, self._heartbeat = seen, heartbeat
        # The version of the bell as last heard.
        self._bell: Version | None = None
        # The round that `record_round` records, the round before it, and how long it took to form.
        self._unrecorded: tuple[RoundDocument, RoundDocument | None, Durations] | None = None
        # The round whose first step is still to record; its record, and the record's date.
        self._stepless: tuple[RoundDocument, RoundRecord, float] | None = None
        # Seconds from a loss until it was noticed, and from then until the participants were named.
        self._noticed = 0.0
        self._gathered = Durations()
        # The shards of the document, and the age of the document at which they are written again.
        self._shards: Mapping[str, bytes] = {}
        self._shards_due = 0.0
        # When the deadline of the run's keys is renewed, and whether this leader has done so.
        self._expiry_due = own.clock()
        self._expires = False
        # Earlier runs' exclusions: the incarnation that needs them, since when this node reads
        # them, when it tries next, and the answer.
        self._looks_back_for, self._looks_back_since, self._looks_back_at = "", 0.0, 0.0
        self._carried: tuple[Exclusion, ...] | None = None

    def carried(self, document: RoundDocument | None) -> tuple[Exclusion, ...] | None:
        return self._carried if self._looks_back_in(document) else None

    def call_to_announce(self) -> tuple[int, int] | None:
        """See `NodeRecord.call_ends`."""
        document, began = self._seen.document, self._seen.since.enough
        if document is None or document.phase is not Phase.FORMING or began is None:
            return None
        left = began + last_call_seconds(self._rules, document) - self._clock()
        if document.leader != self._own.id or left < _SHORTEST_CALL:
            return None
        return document.round, int(self._own.wall() + left)

    def note_written(
        self,
        before: RoundDocument | None,
        document: RoundDocument,
        given: RoundDocument | None,
        gathered: Durations,
        shards: Mapping[str, Mapping[str, bytes]],
    ) -> None:
        """Note a document that this node has written.

        Args:
            before: the document that it replaced.
            given: the last round that this node's agent was given.
            shards: the document's shards, by digest and key.
        """
        self._shards = {key: value for values in shards.values() for key, value in values.items()}
        self._shards_due = 2 * self._rules.interval
        if before and document.round > before.round:
            lost = before.ranks if document.cause.lost.count else ()
            self._noticed = self._seen.longest_loss(lost) if lost else 0.0
        if document.phase is Phase.CONFIRMING:
            self._gathered = replace(gathered, noticed=self._noticed)
        if document.excluded:
            self._carried = ()  # The document has the exclusions now.
        if before is None or before.leader != self._own.id:
            # A store that forgot lost the deadline too: renew it, but do not delay this round.
            self._expires, self._expiry_due = False, self._clock() + self._rules.interval
        elif document.phase is Phase.RUNNING and not self._expires:
            self._expiry_due = self._clock()
        if document.phase is Phase.RUNNING and before and before.phase is Phase.CONFIRMING:
            took = self._clock() - self._seen.since.round
            confirming = max(0.0, took - self._gathered.gathering)
            self._unrecorded = document, given, replace(self._gathered, confirming=confirming)

    def set_deadline(self) -> Effects[None]:
        """Set the run's deadline when this node stops leading: it may be the last node."""
        if not self._expires:
            yield from Expire(self._rules.abandoned_ttl)

    def record_round(self) -> Effects[bool]:
        """Record a running round and delete earlier rounds; in a later call, record its first step.

        Returns whether there was something to do.
        """
        if self._unrecorded is None:
            return (yield from self._note_first_step())
        (released, before, took), self._unrecorded = self._unrecorded, None
        records = self._seen.records or {}
        outdated = self._seen.shards.take_outdated()
        gone = lost_by_accusation(released, records)

        def is_lost(node: str) -> bool:
            return node in gone or self._seen.is_lost(node)

        record, at = record_of(released, records, before, took), self._own.wall()
        self._stepless = released, record, at
        yield from RecordHistory(record, at)
        yield from delete_earlier_rounds(released, records, is_lost, outdated)
        return True

    def _note_first_step(self) -> Effects[bool]:
        """Record the first step of the running round, once all ranks have finished it."""
        if self._stepless is None:
            return False
        document, record, at = self._stepless
        if self._seen.document is None or self._seen.document.place != document.place:
            self._stepless = None
            return False
        whole = with_first_step(record, document, self._seen.records or {})
        if whole is None:
            return False
        self._stepless = None
        yield from RecordHistory(whole, at)
        return True

    def renew(self) -> Effects[bool]:
        """Renew what the store may lose or let expire; returns whether anything was due."""
        document = self._seen.document
        assert document is not None
        if self._clock() >= self._expiry_due:
            # Without a leader that renews this deadline, the run's keys expire.
            yield from Expire(self._rules.abandoned_ttl)
            self._expires = True
            self._expiry_due = self._clock() + self._rules.abandoned_ttl / _RENEWALS
            return True
        waits = document.phase in (Phase.FORMING, Phase.CONFIRMING)
        age = self._clock() - self._seen.since.document
        if waits and self._shards and age >= self._shards_due:
            # Write the shards again: a fail-over may have lost them and kept the document.
            self._shards_due *= 2
            yield from PutShards(self._shards)
            return True
        return False

    def await_bell(self, seconds: float) -> Effects[None]:
        """Wait until a node rings the bell, then read all records."""
        document = self._seen.document
        assert document is not None
        call, told = self.call_to_announce(), self._heartbeat.record.call_ends
        calls = call is not None and (told is None or told[0] != call[0])
        forms = document.phase is Phase.FORMING
        if calls or (forms and not self._looks_back_in(document)):
            seconds = min(seconds, _QUIET_SECONDS)
        bell = yield from Park(BELL_KEY, self._bell, seconds)
        if bell is not None:
            self._bell = bell.version
        elif document.phase is not Phase.CONFIRMING:
            yield from self._look_back(document)
            # Announce the last call once no node rings any more.
            if calls:
                self._heartbeat.require()
        self._seen.read_again(records=True)

    def _looks_back_in(self, document: RoundDocument | None) -> bool:
        return document is not None and document.incarnation == self._looks_back_for

    def _look_back(self, document: RoundDocument) -> Effects[None]:
        """Read the exclusions of earlier runs once; a later decision takes excluded nodes out."""
        now = self._clock()
        if not self._looks_back_in(document):
            self._looks_back_for, self._carried = document.incarnation, None
            self._looks_back_since = self._looks_back_at = now
        if self._carried is not None or now < self._looks_back_at:
            return
        try:
            carried = yield from ReadExclusions()
            # What the document has is not carried over again after `rdzv include` ends it.
            hosts = {it.host for it in document.excluded}
            self._carried = tuple(it for it in carried if it.host not in hosts)
        except (RendezvousConnectionError, RendezvousStateError) as error:
            self._looks_back_at = self._clock() + self._rules.interval
            is_final = isinstance(error, RendezvousStateError)
            if is_final or self._clock() - self._looks_back_since >= self._rules.lease:
                self._carried = ()
                yield from Tell(
                    "exclusions",
                    "this node cannot read which hosts are excluded, so the run goes on without "
                    f"exclusions; exclude the hosts again with rdzv exclude: {error}",
                    ("exclude", "HOST"),
                )
