"""What a node has read of its run: the document, the leader's record or all records, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from rdzv_plugins.kv import Entry, RendezvousStateError, Version
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.protocol.answers import Answers
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    CorruptDocumentError,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    SealedRunError,
)
from rdzv_plugins.protocol.effects import Effects, List, PutShards, Read, Rest
from rdzv_plugins.protocol.failure_detector import FailureDetector
from rdzv_plugins.protocol.outages import Delays, Outages
from rdzv_plugins.protocol.own_rank import OwnRank
from rdzv_plugins.protocol.record_cache import RecordCache, Unbelieved
from rdzv_plugins.protocol.roster import MISSING, ShardKeys, apart, complete, prefixes, shards_of
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.protocol.since import Since

# A leader rests this long per record between two listings, so that a thousand joins cost a handful
# of listings.
_REST_PER_RECORD = 20e-6
_SHORTEST_REST = 0.5e-3

# Milliseconds by which wall clocks may differ: two runs of an id that began within this time have
# no known order.
_CLOCKS_APART = 600_000

_PUT_BACK = (
    "the round document is an earlier one: somebody has put it back, or the store has lost the "
    "last one"
)


class Observer:
    """Reads what the rules need, and notes when each value last changed.

    Other modules read its attributes; only its own methods change them. An attribute that
    `rules.View` has too means the same here.

    Args:
        clock: the node's monotonic clock, in seconds.

    Attributes:
        document: as last read, with this node's own rank; with all its nodes after a listing.
        arriving: a document that was read, while this node still reads its own rank in it.
        token: the version of the document's key as last read.
        shards: the keys of the shards of that document.
        since: when each part of the document last changed.
        liveness: since when each node's beat has stood still.
        listings: since when the leader's count of listings has stood still.
        looks: see `NodeRecord.looks`.
        is_to_write: this node has decided to write the document, and has not done so yet.
        listed_since: when this node last listed all records, or began to have to.
        document_is_fresh: the document was read or written since this node last paused.
        unbelieved: values that were read and count as absent.
    """

    def __init__(self, node_id: str, rules: Rules, clock: Callable[[], float]) -> None:
        self._me = node_id
        self._rules = rules
        self._clock = clock
        self.document: RoundDocument | None = None
        self.arriving: RoundDocument | None = None
        self.token: Version | None = None
        self.shards = ShardKeys()
        self.since = Since(clock())
        self.latest: RoundDocument | None = None
        self.leader: NodeRecord | None = None
        self.liveness = FailureDetector()
        self.listings = FailureDetector()
        self.records: dict[str, NodeRecord] | None = None
        self.looks = 0
        self.is_to_write = False
        self.listed_since = clock()
        self.outages = Outages(rules, clock)
        self.delays = Delays(rules.interval)
        self.answers = Answers()
        self.document_is_fresh = False
        self.confirmed: RoundDocument | None = None
        self.unbelieved = Unbelieved()
        # The readings that are due before the next decision.
        self._due = {"document", "records"}
        # Whether this node lists all records although it does not lead.
        self._lists = False
        self._leader_is: str | None = None  # The id of the node whose record `leader` is.
        self._listing = RecordCache(rules.lease)
        self.own_rank = OwnRank(node_id, rules.inline)
        self._listed_at = float("-inf")
        # The lost leader whose place this node took, until all records have been listed.
        self._outlived: str | None = None
        # When an incarnation was found to have no tombstone; emptied by a later document.
        self._without_tombstone: dict[str, float] = {}

    @property
    def closed(self) -> bool:
        return self.latest is not None and self.latest.closed

    @property
    def cannot_list(self) -> bool:
        document = self.document
        if document is None or document.leader != self._me or document.closed:
            return False
        return self._clock() - self.listed_since >= self._rules.lease

    def beat_was_late(self, seconds: float) -> None:
        """Note how late this node's beat was written, without the time of an outage."""
        self.delays.beat_was_late(min(seconds, self._clock() - self.outages.over_at))

    def read_again(
        self, *, document: bool = False, leader: bool = False, records: bool = False
    ) -> None:
        """Have the document, the leader's record or all records read before the next decision."""
        asked = {"document": document, "leader": leader, "records": records}
        self._due.update(what for what, due in asked.items() if due)

    def list_records(self) -> None:
        """List all records, as a leader does, until the lead changes."""
        self._lists = True
        self._due.add("records")

    def confirm(self, document: RoundDocument) -> None:
        """Note that this node confirms its rank in this round."""
        self.confirmed = document

    def read_document(self) -> Effects[None]:
        entry = yield from Read(STATE_KEY)
        yield from self.adopt(entry)

    def adopt(
        self,
        entry: Entry | None,
        known: RoundDocument | None = None,
        stored: dict[str, list[str]] | None = None,
    ) -> Effects[None]:
        """Take the entry of the document's key as the document.

        Args:
            known: the document in ``entry``, which this node wrote itself; saves decoding it.
            stored: the keys of its shards.

        Raises `RendezvousStateError` if the entry is unreadable, and this node knows no valid
        document.
        """
        token = entry.version if entry else None
        if token != self.token or (entry is None) != (self.document is None):
            document = known or self._decode(entry)
            if document is not None and not document.is_whole:
                self.arriving = document
                document = yield from self.own_rank.read(document)
            self.arriving = None
            was, self.document, self.token = self.document, document, token
            self.shards.replace(shards_of(document) if stored is None else stored)
            self.since.note(was, document, self._clock())
            if document is not None:
                self._compare(was, document)
        self.document_is_fresh = True
        self._due.discard("document")

    @property
    def misses_its_rank(self) -> bool:
        """Whether the store has lost the shard with this node's rank, or does not show it yet."""
        document = self.document
        if document is None or document.is_whole:
            return False
        return any(it.ranks is None for it in document.rosters)

    def _improve(self, document: RoundDocument) -> None:
        """Replace the document by the same document with more of its nodes."""
        if self.latest is self.document:
            self.latest = document
        self.document = document

    def _compare(self, was: RoundDocument | None, document: RoundDocument) -> None:
        """Note changes in the document's leader, round and place."""
        if was is None or (was.incarnation, was.leader) != (document.incarnation, document.leader):
            self._begin_windows(was, document)
        if document.leader is not None:
            # Only the leader writes in the leader's name, so the write is a sign of life.
            self.liveness.heard(document.leader, self._clock())
            self.listings.heard(document.leader, self._clock())
        self.answers.ask(document.accused, self._clock())
        if self._is_later(document):
            self.latest = document
            self._without_tombstone.clear()

    def _decode(self, entry: Entry | None) -> RoundDocument | None:
        """The document; None: there is none, or it is not believed (live nodes write it again)."""
        if entry is None:
            return None
        try:
            document = RoundDocument.decode(entry.value)
            if document.run and self._rules.run and document.run != self._rules.run:
                raise CorruptDocumentError(
                    f"the round document is that of the run '{plain(document.run, 80)}': somebody "
                    "has put it here"
                )
        except RendezvousStateError as error:
            damaged = isinstance(error, CorruptDocumentError)
            damaged = damaged and not isinstance(error, SealedRunError)
            if self.latest is None and not (damaged and self.unbelieved.is_overwritten):
                raise
            self.unbelieved.note({"": str(error)})
            return None
        latest = self.latest
        if self._rules.sealed and latest is not None and not latest.closed:
            older = 0 < document.edition < latest.edition - _CLOCKS_APART
            if document.is_before(latest) if document.is_of(latest) else older:
                self.unbelieved.note({"": _PUT_BACK})
                return None
        return document

    def _begin_windows(self, was: RoundDocument | None, document: RoundDocument) -> None:
        """Restart all windows for a new leader; a deposed leader's stays, to prove its loss."""
        deposed = was.leader if was and document.leader == self._me else None
        lost = deposed is not None and self._has_lost(deposed, self.leader)
        self._outlived = deposed if lost else None
        self.records = None
        if self._leader_is != document.leader:
            self.leader = None
        self.since.enough = None
        self._due.add("records")
        self._lists = False
        now = self._clock()
        self.liveness.restart(now, unless=deposed)
        self.listings = FailureDetector()
        self.listed_since = now

    def _is_later(self, document: RoundDocument) -> bool:
        """Whether the document is newer than `latest`, or of a run that replaces this node's."""
        latest = self.latest
        if latest is None:
            return True
        if document.is_of(latest):
            return document.closed or (not latest.closed and document.place >= latest.place)
        # A live run replaces `latest`, unless `latest` is closed and this node was in it: a node is
        # in one run only.
        return not document.closed and not (latest.closed and latest.is_of(self.confirmed))

    def without_tombstone(self) -> frozenset[str]:
        """See `View.without_tombstone`; an answer holds for ``sweep_after`` seconds."""
        oldest = self._clock() - self._rules.sweep_after
        # A copy, because other threads call this while the node's thread adds answers.
        answers = [*self._without_tombstone.items()]
        return frozenset(incarnation for incarnation, asked in answers if asked > oldest)

    def hear_of_the_end(self, incarnation: str, outcome: Outcome | None, asked: float) -> None:
        """Note the tombstone of a run that this node remembers; None: there was none."""
        self._without_tombstone[incarnation] = asked
        for run in (self.latest, self.confirmed):
            if outcome is not None and run is not None and run.incarnation == incarnation:
                self.latest = replace(run, phase=Phase.CLOSED, outcome=outcome, expires=True)
                return

    def read_record(self, node: str) -> Effects[tuple[Entry | None, NodeRecord | None]]:
        """Read one node's entry and record, or None. Later listings show no older record."""
        asked = self._clock()
        entry = yield from Read(NODES_PREFIX + node)
        record = self._listing.read(node, entry)
        self.unbelieved.note(self._listing.unbelieved)
        if record is not None:
            self.liveness.observe(node, record.beat, asked, self._clock())
            self.answers.observe({node: record}, asked, self._clock())
        return entry, record

    def observe(self) -> Effects[None]:
        """Read what is due: the document, then the leader's record, or all records as a leader."""
        if "document" in self._due:
            yield from self.read_document()
        if self.misses_its_rank and self.document is not None:
            self._improve((yield from self.own_rank.read(self.document)))
        document = self.document
        if document is None or document.closed or self.cannot_list:
            return
        if document.leader == self._me or self._lists:
            if "records" in self._due:
                yield from self._list()
        elif document.leader is not None:
            self.records = None
            if "leader" in self._due:
                yield from self._look_at_the_leader(document.leader)

    def _look_at_the_leader(self, leader: str) -> Effects[None]:
        self._due.discard("leader")
        asked = self._clock()
        _, record = yield from self.read_record(leader)
        self._leader_is = leader
        # Keep the known record if it is newer: a store that lost writes may show an older record,
        # or none.
        if record is not None and (self.leader is None or record.beat >= self.leader.beat):
            self.leader = record
        if record is None:
            self.liveness.observe(leader, None, asked, self._clock())
        self.listings.observe(leader, record.looks if record else None, asked, self._clock())
        # A store that lost the leader's record may have lost the document too.
        self.read_again(document=record is None)

    def _list(self) -> Effects[None]:
        rest = self._listed_at + _REST_PER_RECORD * len(self._listing) - self._clock()
        if rest > _SHORTEST_REST:
            yield from Rest(rest)
        document = self.document
        assert document is not None
        asked = self._clock()
        entries = yield from List(NODES_PREFIX)
        now = self._clock()
        records = self.records = self._listing.decode(entries)
        self.unbelieved.note(self._listing.unbelieved)
        if not document.is_whole:
            document = yield from self._complete(document, records, asked)
        named = {*document.participants, *document.previous}
        if document.leader is not None:
            # Watch a leader without a record too, so that its loss is noticed.
            named.add(document.leader)
        watched = {*records, *named}
        self.liveness.keep(watched if document.is_whole else {*watched, MISSING})
        for node in watched:
            record = records.get(node)
            self.liveness.observe(node, record.beat if record else None, asked, now)
        self.answers.observe(records, asked, now)
        self.delays.listing = now - asked
        if self._outlived is not None:
            # The restarted windows give the other nodes one more lease; no doubt may give another.
            # The deposed leader gets one here if this node is slow, because it may be as slow.
            self.liveness.doubt(watched - (set() if self.delays.lag else {self._outlived}))
            self._outlived = None
        self._listed_at = self.listed_since = now
        self.looks += not self.is_to_write
        self._due.discard("records")

    def _complete(
        self, document: RoundDocument, records: Mapping[str, NodeRecord], asked: float
    ) -> Effects[RoundDocument]:
        stored: dict[str, Entry] = {}
        for prefix in prefixes(document):
            stored |= yield from List(prefix)
        document = complete(document, stored, records)
        if document.leader == self._me:
            for digest, shards in apart(document, self._rules.inline)[1].items():
                if not stored.keys() >= shards.keys():
                    # The store has lost these shards, in which participants look for their ranks.
                    yield from PutShards(shards)
                    self.shards.stored[digest] = [*shards]
        # Watch a missing roster like a node, so that outages and lags excuse it too.
        self.liveness.observe(MISSING, None, asked, self._clock())
        self._improve(document)
        return document

    def paused(self, seconds: float) -> None:
        """Note that the node paused on purpose; the document may have changed in the meantime."""
        self.document_is_fresh = False
        self.outages.paused(seconds)

    def failed(self) -> None:
        """Note that a request failed: read everything again."""
        self.outages.fails()
        self.read_again(document=True, leader=True, records=True)

    def answered(self) -> None:
        """Note that the store answered a request.

        Silence while the store is away proves nothing, because other nodes cannot beat then either.
        After an outage all windows begin again, and each node has a lease to beat again, because
        some nodes reconnect later than others. A shorter absence, in which a request failed, is
        taken out of each window. An accused node has little time, so its window begins again after
        any trouble.
        """
        if (away := self.outages.ends()) is None:
            return
        now, lease = self._clock(), self._rules.lease
        if away.is_outage:
            # Order no extra reads, because the store may be slow.
            self.liveness.restart(now, lease)
            self.listings.restart(now, lease)
            self.listed_since = now
            self.since.enough = None
        elif away.failed:
            self.liveness.discount(away.seconds, now)
            self.listings.discount(away.seconds, now)
        self.answers.restart(now)

    def until_first_lease(self, now: float) -> float | None:
        if self.records is None:
            return None
        lease = self._listing.shortest_lease
        confirmed, possible = self.liveness.longest(now)
        return max(0.0, lease + self.delays.lag - possible) if confirmed < lease else None

    def longest_loss(self, nodes: Iterable[str]) -> float:
        """Seconds since the last sign of life of the lost nodes among ``nodes``."""
        now = self._clock()
        silent = [self.liveness.possible_silence(it, now) for it in nodes if self.is_lost(it)]
        return max([*silent, *self.answers.unanswered.values()], default=0.0)

    def is_lost(self, node: str) -> bool:
        """See `View.is_lost`."""
        record = self.records.get(node) if self.records else None
        return node != self._me and self._has_lost(node, record)

    def _has_lost(self, node: str, record: NodeRecord | None) -> bool:
        seen, lease = self.liveness.watched.get(node), record.lease if record else self._rules.lease
        return seen is not None and seen.is_lost(lease + self.delays.lag)
