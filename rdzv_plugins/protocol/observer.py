"""A node's readings of its run: the document, the leader's record or all records, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from rdzv_plugins.kv import Entry, RendezvousStateError, Version
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    CorruptDocumentError,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    SealedRunError,
    Shards,
)
from rdzv_plugins.protocol.effects import Effects, List, PutShards, Read, Rest
from rdzv_plugins.protocol.failure_detector import FailureDetector
from rdzv_plugins.protocol.record_cache import RecordCache
from rdzv_plugins.protocol.roster import (
    MISSING,
    apart,
    complete,
    prefixes,
    ranks_in,
    shard_key,
    shard_mates,
    shards_of,
)
from rdzv_plugins.protocol.rules import Rules

# A leader rests this long per record between two listings: a thousand joins then cost a handful of
# listings instead of a thousand.
_REST_PER_RECORD = 20e-6
_SHORTEST_REST = 0.5e-3

_RANKS_KEPT = 4
# The log names so many nodes whose records are not believed.
_UNBELIEVED_KEPT = 16
# By so many milliseconds, at most, wall clocks are believed to differ: of two runs of an id that
# began within less, either may be the later one.
_CLOCKS_APART = 600_000
_OUTDATED_KEPT = 16
# After an outage another node may reconnect so much later than this one: as long as a node pauses
# between two requests then, and a client between two attempts.
_BACK_WITHIN = 1.0


def with_rank(
    document: RoundDocument,
    node: str,
    known: Mapping[str, dict[str, int]],
    held_with: dict[str, tuple[str, ...]] | None = None,
) -> Effects[RoundDocument]:
    """The document with the node's rank, where its nodes stand in shards that can be read.

    Args:
        known: ranks that need not be read, by digest.
        held_with: is given the nodes of the shards that are read, in rank order, by digest.
    """

    def ranked(shards: Shards | None) -> Effects[Shards | None]:
        if shards is None or shards.ranks is not None:
            return shards
        ranks = known.get(shards.digest)
        if ranks is None:
            entry = yield from Read(shard_key(document.incarnation, shards, node))
            part = ranks_in(entry)
            if part is not None:
                ranks = {node: part[node]} if node in part else {}
                if held_with is not None:
                    held_with[shards.digest] = tuple(sorted(part, key=part.__getitem__))
        return replace(shards, ranks=ranks)

    roster = yield from ranked(document.roster)
    previous_roster = yield from ranked(document.previous_roster)
    return replace(document, roster=roster, previous_roster=previous_roster)


class Observer:
    """Reads what the rules need, and notes since when each thing has been as it is.

    Other modules read its attributes; only its own methods change them.

    Args:
        node_id: of the node that observes.
        rules: the run's settings.
        clock: the node's monotonic clock, in seconds.

    Attributes:
        document: as last read, with this node's own rank where its nodes stand in shards, or with
            all of them where it leads; None: there is none.
        arriving: a document that was read, while this node still reads its own rank in it.
        token: the version under which it was read.
        stored: the keys of the shards that stand under this version, by their digest.
        document_since: when it was first seen as it is.
        round_since: when its round was first seen.
        running_since: when the round that runs was first seen running; None: none runs.
        forming_since: when its last document before that was first seen; None: none was.
        grown_since: when the last round that let newcomers in was first seen.
        latest: of all documents of this node's run that it has read, the one of the highest place.
        leader: the leader's record, where another node leads; None: not read.
        liveness: since when each node's heartbeat has stood still.
        progress: since when the leader's count of listings has stood still.
        records: all nodes' records, where this node lists them; None: not listed yet.
        looks: how often this node has listed all records, as `documents.NodeRecord.looks`.
        is_to_write: it has decided to write the document, and has not done so yet.
        listed_since: when it last did, or when it began to have to.
        outages: how often all windows began again since the store was away.
        document_is_fresh: it was read or written since this node last paused.
        confirmed: the round whose rank this node confirmed last, as it stood then.
        accused: since when those have not beaten whom the document names as accused.
        latency: seconds that the last listing took.
        overslept: seconds by which its last pause that ended by itself was too long.
        unbelieved: lines for the log on values that were read and count as absent.
    """

    def __init__(self, node_id: str, rules: Rules, clock: Callable[[], float]) -> None:
        self._me = node_id
        self._rules = rules
        self._clock = clock
        self.document: RoundDocument | None = None
        self.arriving: RoundDocument | None = None
        self.token: Version | None = None
        self.stored: Mapping[str, list[str]] = {}
        self.document_since = clock()
        self.round_since = clock()
        self.running_since: float | None = None
        self.forming_since: float | None = None
        self.grown_since = clock()
        self.latest: RoundDocument | None = None
        self.leader: NodeRecord | None = None
        self.liveness = FailureDetector()
        self.progress = FailureDetector()
        self.records: dict[str, NodeRecord] | None = None
        self.looks = 0
        self.is_to_write = False
        self.listed_since = clock()
        self.outages = 0
        self.document_is_fresh = False
        self.confirmed: RoundDocument | None = None
        self.accused = FailureDetector()
        self.latency = self.overslept = 0.0
        # With which beat each is accused.
        self._accused_at: dict[str, int] = {}
        self.unbelieved: list[str] = []
        # The readings that are due before the next decision.
        self._document_due = True
        self._leader_due = False
        self._records_due = True
        # Whether it lists all records though it does not lead.
        self._lists = False
        self._runs: str | None = None  # The world_id of the round that `running_since` is of.
        self._grew: tuple[str, int] | None = None  # The document that `grown_since` is of.
        self._leader_is: str | None = None  # The node whose record `leader` is.
        self._listing = RecordCache(rules.lease)
        # This node's rank by the digest of the shards that it has read, the last ones.
        self._ranks: dict[str, dict[str, int]] = {}
        # The nodes of the same shards, in rank order.
        self._held_with: dict[str, tuple[str, ...]] = {}
        # The keys of shards that documents named which it has read or written, by digest.
        self._outdated: dict[str, list[str]] = {}
        # A newcomer has waited long enough for somebody to mend the document.
        self._mends = False
        # By node, why its record is not believed; "" stands for the document.
        self._unbelieved: dict[str, str] = {}
        self._listed_at = float("-inf")
        self._shortest_lease = rules.lease
        # The silent node from which the lead was taken, until all records have been listed.
        self._outlived: str | None = None
        # How late this node's last two beats were.
        self._late = (0.0, 0.0)
        # The incarnations of which it has read that they have no tombstone, and when it asked;
        # emptied when a later document is read.
        self._asked_tombstones: dict[str, float] = {}
        # Since when a leader has counted enough ready nodes; None: there are fewer.
        self._enough_since: float | None = None
        # When the store was back last.
        self._back = -math.inf
        # When the store last answered, and how long the node has paused on purpose since.
        self._answered: float | None = None
        self._paused = 0.0
        self._in_trouble = False
        # The store's client makes a request again, perhaps in a wait.
        self._repeated = False

    @property
    def closed(self) -> bool:
        """Whether the run was closed."""
        return self.latest is not None and self.latest.closed

    @property
    def cannot_list(self) -> bool:
        """Whether this node leads, and has not been able to read all records for a lease."""
        document = self.document
        if document is None or document.leader != self._me or document.closed:
            return False
        return self._clock() - self.listed_since >= self._rules.lease

    @property
    def enough_for(self) -> float | None:
        """Seconds since the leader has counted enough ready nodes; None: there are fewer."""
        return None if self._enough_since is None else self._clock() - self._enough_since

    def note_enough(self, enough: bool) -> bool:
        """Note whether enough nodes are ready; returns whether the last call begins with this."""
        begins = enough and self._enough_since is None
        if begins:
            self._enough_since = self._clock()
        elif not enough:
            self._enough_since = None
        return begins

    @property
    def lag(self) -> float:
        """Seconds more that this node gives others, as late as its own last beats were.

        What slows it down, the store or the load, slows the others down as well. The two last beats
        count, and half an interval of each is nothing unusual.
        """
        return max(0.0, max(self._late) - self._rules.interval / 2)

    def beat_was_late(self, seconds: float) -> None:
        """Note how long after its time this node's beat was written; an outage is no lateness."""
        self._late = self._late[1], min(seconds, self._clock() - self._back)

    def doubt(self, nodes: Iterable[str]) -> None:
        """Give each of these nodes one more lease, once until its next beat."""
        self.liveness.doubt(nodes)

    def read_again(
        self, *, document: bool = False, leader: bool = False, records: bool = False
    ) -> None:
        """Read these before the next decision."""
        self._document_due = self._document_due or document
        self._leader_due = self._leader_due or leader
        self._records_due = self._records_due or records

    def list_records(self) -> None:
        """List all records, as a leader does, until the lead changes."""
        self._lists = self._records_due = True

    def confirm(self, document: RoundDocument) -> None:
        """Note the round whose rank this node confirms."""
        self.confirmed = document

    def read_document(self) -> Effects[None]:
        entry = yield from Read(STATE_KEY)
        yield from self.adopt(entry)

    def adopt(
        self,
        entry: Entry | None,
        known: RoundDocument | None = None,
        stored: Mapping[str, list[str]] | None = None,
    ) -> Effects[None]:
        """Take what stands in the store as the document.

        Args:
            known: what this node has written there, which saves decoding it; with its ``stored``.

        Raises `RendezvousStateError` if it is unreadable, and this node knows no valid one.
        """
        token = entry.version if entry else None
        if token != self.token or (entry is None) != (self.document is None):
            document = known or self._decode(entry)
            if document is not None and not document.is_whole:
                self.arriving = document
                document = yield from self._with_own_rank(document)
            self.arriving = None
            self._outdated |= self.stored
            while len(self._outdated) > _OUTDATED_KEPT:
                del self._outdated[next(iter(self._outdated))]
            was, self.document, self.token = self.document, document, token
            self.stored = shards_of(document) if stored is None else stored
            before, self.document_since = self.document_since, self._clock()
            if document is not None:
                self._note_uptime(was, before, document)
                self._compare(was, document)
        self.document_is_fresh = True
        self._document_due = False

    def _with_own_rank(self, document: RoundDocument) -> Effects[RoundDocument]:
        document = yield from with_rank(document, self._me, self._ranks, self._held_with)
        for shards in document.rosters:
            if shards.ranks is not None:
                self._ranks[shards.digest] = shards.ranks
        for kept in (self._ranks, self._held_with):
            while len(kept) > _RANKS_KEPT:
                del kept[next(iter(kept))]
        return document

    def ring(self, document: RoundDocument) -> tuple[str, ...]:
        """The participants among which this node has links, in rank order: all, or of its shard."""
        if document.roster is not None:
            return self._held_with.get(document.roster.digest, ())
        return shard_mates(document, self._me, self._rules.inline)

    def take_outdated(self) -> list[str]:
        """The keys of shards that earlier documents named, and this one does not; each once."""
        found = [keys for digest, keys in self._outdated.items() if digest not in self.stored]
        self._outdated.clear()
        return [key for keys in found for key in keys]

    @property
    def misses_its_rank(self) -> bool:
        """Whether the store has lost the shard with this node's rank, or shows it too late."""
        document = self.document
        if document is None or document.is_whole:
            return False
        return any(it.ranks is None for it in document.rosters)

    def _improve(self, document: RoundDocument) -> None:
        """Take the same document with more of its nodes."""
        if self.latest is self.document:
            self.latest = document
        self.document = document

    def _compare(self, was: RoundDocument | None, document: RoundDocument) -> None:
        """Note what is new in the document: its leader, its round, its place."""
        if was is None or (was.incarnation, was.leader) != (document.incarnation, document.leader):
            self._begin_windows(was, document)
        if document.leader is not None:
            # Only the leader writes in the leader's name: the write is a sign of life.
            self.liveness.heard(document.leader, self._clock())
            self.progress.heard(document.leader, self._clock())
        if was is None or (was.incarnation, was.round) != (document.incarnation, document.round):
            self.round_since = self._clock()
        if was is None or was.place != document.place:
            self._enough_since = None
        if document.accused or self._accused_at:
            self._note_the_accused(document)
        if self._is_later(document):
            self.latest = document
            self._asked_tombstones.clear()

    def _note_the_accused(self, document: RoundDocument) -> None:
        """Note since when each is accused: what was seen of it before is no answer."""
        now, beats = self._clock(), {it.node: it.beat for it in document.accused}
        same = {node for node, beat in beats.items() if self._accused_at.get(node) == beat}
        self.accused.keep(same)
        for node, beat in beats.items():
            if node not in same:
                self.accused.observe(node, beat, now, now)
        self._accused_at = beats

    def _note_uptime(
        self, was: RoundDocument | None, was_since: float, document: RoundDocument
    ) -> None:
        """Note since when the round runs, and since when the last newcomers are in."""
        if document.phase is not Phase.RUNNING:
            self.running_since, self._runs = None, None
        elif document.world_id != self._runs:
            self.running_since, self._runs = self._clock(), document.world_id
            same = was is not None and was.is_of(document) and was.round == document.round
            self.forming_since = was_since if same else None
        first_forms = (document.round, document.phase) == (0, Phase.FORMING)
        grew = document.incarnation, -1 if first_forms else document.grew
        if grew != self._grew:
            self.grown_since, self._grew = self._clock(), grew

    def _decode(self, entry: Entry | None) -> RoundDocument | None:
        """What does not pass is as if the store had forgotten it: the living write it again."""
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
            mends = self._mends and damaged and not isinstance(error, SealedRunError)
            if self.latest is None and not mends:
                raise
            self._note_unbelieved({"": str(error)})
            return None
        latest = self.latest
        if self._rules.sealed and latest is not None and not latest.closed:
            older = 0 < document.edition < latest.edition - _CLOCKS_APART
            if document.is_before(latest) if document.is_of(latest) else older:
                self._note_unbelieved(
                    {
                        "": "the round document is an earlier one: somebody has put it back, or "
                        "the store has lost the last one"
                    }
                )
                return None
        return document

    def mend(self) -> None:
        """From now on write over a document that nobody can read: nobody else has mended it."""
        self._mends = True

    def _note_unbelieved(self, unbelieved: Mapping[str, str]) -> None:
        """Note what is to be told: once of each node, and of few of thousands."""
        for node, why in unbelieved.items():
            if node not in self._unbelieved and len(self._unbelieved) < _UNBELIEVED_KEPT:
                self._unbelieved[node] = why
                whose = f"; it is that of '{plain(node, 40)}'" if node else ""
                self.unbelieved.append(why + whose)

    def _begin_windows(self, was: RoundDocument | None, document: RoundDocument) -> None:
        """Begin every window now: another node leads, and older observations are too old.

        The window of a leader that this node has just deposed stays: its silence is proven.
        """
        deposed = was.leader if was and document.leader == self._me else None
        lost = deposed is not None and self._has_lost(deposed, self.leader)
        self._outlived = deposed if lost else None
        self.records = None
        if self._leader_is != document.leader:
            self.leader = None
        self._enough_since = None
        self._records_due, self._lists = True, False
        now = self._clock()
        self.liveness.restart(now, unless=deposed)
        self.progress = FailureDetector()
        self.listed_since = now

    def _is_later(self, document: RoundDocument) -> bool:
        """Whether the document is newer than `latest`, or of a run that replaces this node's."""
        latest = self.latest
        if latest is None:
            return True
        if document.is_of(latest):
            return document.closed or (not latest.closed and document.place >= latest.place)
        # Another run of this id. It replaces ours only while it lives, and not if this node was in
        # a run that was closed: a node is in one run only.
        return not document.closed and not (latest.closed and latest.is_of(self.confirmed))

    def asked_tombstones(self) -> frozenset[str]:
        """The incarnations that have no tombstone, as far as this node has asked.

        An answer holds for as long as the keys of a closed run stay: after that a run may have been
        closed and swept, and its document be missing as it was when the node asked.
        """
        oldest = self._clock() - self._rules.sweep_after
        # A copy: people ask in other threads, while this node hears of the end.
        answers = [*self._asked_tombstones.items()]
        return frozenset(incarnation for incarnation, asked in answers if asked > oldest)

    def hear_of_the_end(self, incarnation: str, outcome: Outcome | None, asked: float) -> None:
        """Note the tombstone of a run that this node remembers; None: there is none.

        Args:
            asked: when this node asked for it, on its clock.
        """
        self._asked_tombstones[incarnation] = asked
        for run in (self.latest, self.confirmed):
            if outcome is not None and run is not None and run.incarnation == incarnation:
                self.latest = replace(run, phase=Phase.CLOSED, outcome=outcome, expires=True)
                return

    def read_record(self, node: str) -> Effects[tuple[Entry | None, NodeRecord | None]]:
        """The entry there, and the record; a sign of life, behind which no later listing goes."""
        asked = self._clock()
        entry = yield from Read(NODES_PREFIX + node)
        record = self._listing.read(node, entry)
        self._note_unbelieved(self._listing.unbelieved)
        if record is not None:
            self.liveness.observe(node, record.beat, asked, self._clock())
            if node in self._accused_at:
                self.accused.observe(node, record.beat, asked, self._clock())
        return entry, record

    def observe(self) -> Effects[None]:
        """Read what is due: the document, then all records as the leader, else the leader's."""
        if self._document_due:
            yield from self.read_document()
        if self.misses_its_rank and self.document is not None:
            self._improve((yield from self._with_own_rank(self.document)))
        document = self.document
        if document is None or document.closed or self.cannot_list:
            return
        if document.leader == self._me or self._lists:
            if self._records_due:
                yield from self._list()
        elif document.leader is not None:
            self.records = None
            if self._leader_due:
                yield from self._look_at_the_leader(document.leader)

    def _look_at_the_leader(self, leader: str) -> Effects[None]:
        self._leader_due = False
        asked = self._clock()
        _, record = yield from self.read_record(leader)
        self._leader_is = leader
        # A record that is missing, or older than the last one, tells nothing new.
        if record is not None and (self.leader is None or record.beat >= self.leader.beat):
            self.leader = record
        if record is None:
            self.liveness.observe(leader, None, asked, self._clock())
        self.progress.observe(leader, record.looks if record else None, asked, self._clock())
        # A store that lost the leader's record may have lost the document too.
        self._document_due = record is None

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
        self._note_unbelieved(self._listing.unbelieved)
        # That of the settings is the lease of a node without a record.
        self._shortest_lease = min([self._rules.lease, *(it.lease for it in records.values())])
        if not document.is_whole:
            document = yield from self._complete(document, records, asked)
        named = {*document.participants, *document.previous}
        if document.leader is not None:
            # A leader without a record must be found dead too.
            named.add(document.leader)
        watched = {*records, *named}
        self.liveness.keep(watched if document.is_whole else {*watched, MISSING})
        for node in watched:
            record = records.get(node)
            self.liveness.observe(node, record.beat if record else None, asked, now)
        for node in self._accused_at:
            if node in records:
                self.accused.observe(node, records[node].beat, asked, now)
        self.latency = now - asked
        if self._outlived is not None:
            # If this node is slow itself, that leader may be no more than slow either.
            self.doubt(watched - (set() if self.lag else {self._outlived}))
            self._outlived = None
        self._listed_at = self.listed_since = now
        self.looks += not self.is_to_write
        self._records_due = False

    def _complete(
        self, document: RoundDocument, records: Mapping[str, NodeRecord], asked: float
    ) -> Effects[RoundDocument]:
        """Read all nodes of the document."""
        stored: dict[str, Entry] = {}
        for prefix in prefixes(document):
            stored |= yield from List(prefix)
        document = complete(document, stored, records)
        if document.leader == self._me:
            for digest, shards in apart(document, self._rules.inline)[1].items():
                if not stored.keys() >= shards.keys():
                    # The store has lost them. Participants and heirs still look for their ranks.
                    yield from PutShards(shards)
                    self.stored = {**self.stored, digest: [*shards]}
        # A roster that is missing is silent, as a node is: what excuses a node excuses it too.
        self.liveness.observe(MISSING, None, asked, self._clock())
        self._improve(document)
        return document

    @property
    def unanswered(self) -> dict[str, float]:
        """As `rules.View.unanswered`."""
        accused = [it for it in self._accused_at if not self.accused.moved(it)]
        return {node: self.accused.confirmed_silence(node) for node in accused}

    def woke_late(self, seconds: float) -> None:
        """Note by how much a pause was too long: a busy host holds the others up as well."""
        self.overslept = seconds

    def paused(self, seconds: float) -> None:
        """Note that the node has paused on purpose; the document may have changed meanwhile."""
        self.document_is_fresh = False
        if not self._in_trouble:
            self._paused += seconds

    def repeats(self) -> None:
        """Note that the store's client makes a request again; from any thread."""
        self._repeated = True

    def failed(self) -> None:
        """Note that a request failed: read everything again."""
        self._in_trouble = True
        self.read_again(document=True, leader=True, records=True)

    def answered(self) -> None:
        """Note that the store answered a request.

        What this node could not see proves nothing about others, and in an outage they cannot beat
        either. A short outage is taken out of each window. After a longer one, see `Rules.outage`,
        all windows begin again: each node's when it beats again or a lease later, for some are
        connected again later than others. It makes no difference whether requests failed, the
        store's client repeated one until it was answered, or this process stood still. An accused
        node has little time: its window begins again after any of these, once the node is back.
        """
        now, trouble, repeated = self._clock(), self._in_trouble, self._repeated
        away = now - self._answered - self._paused if self._answered is not None else 0.0
        self._answered, self._paused = now, 0.0
        self._in_trouble = self._repeated = False
        outage = away > self._rules.outage
        if outage:
            self._reset_windows(now)
        elif trouble:
            self.liveness.discount(away, now)
            self.progress.discount(away, now)
        if outage or trouble or repeated:
            self._back = now
            self.accused.restart(now, _BACK_WITHIN)

    def _reset_windows(self, now: float) -> None:
        """Begin all windows now.

        What is due is read as ever: a slow store is given no more to do. If the store lost the
        document meanwhile, it lost the leader's record too, or tells it to who waits for a change.
        """
        self.outages += 1
        self.liveness.restart(now, self._rules.lease)
        self.progress.restart(now, self._rules.lease)
        self.listed_since = now
        self._enough_since = None

    def until_first_lease(self, now: float) -> float | None:
        """As `rules.View.until_first_lease`."""
        if self.records is None:
            return None
        lease = self._shortest_lease
        confirmed, possible = self.liveness.longest(now)
        return max(0.0, lease + self.lag - possible) if confirmed < lease else None

    def is_lost(self, node: str) -> bool:
        """As `View.is_lost`."""
        record = self.records.get(node) if self.records else None
        return node != self._me and self._has_lost(node, record)

    def _has_lost(self, node: str, record: NodeRecord | None) -> bool:
        seen, lease = self.liveness.watched.get(node), record.lease if record else self._rules.lease
        return seen is not None and seen.is_lost(lease + self.lag)
