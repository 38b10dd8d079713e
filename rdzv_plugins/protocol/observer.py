"""What a node has seen of its run: the document, the leader's beat or all records, and when."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from rdzv_plugins.kv import Entry, Version
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    CorruptDocumentError,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
)
from rdzv_plugins.protocol.effects import Effects, List, Read, Rest
from rdzv_plugins.protocol.failure_detector import FailureDetector
from rdzv_plugins.protocol.record_cache import RecordCache, readable
from rdzv_plugins.protocol.rules import Rules

__all__ = ["Observer"]

# A leader rests this long per record between two listings, so that a thousand joins cost a handful
# of listings and not a thousand.
_REST_PER_RECORD = 20e-6
_SHORTEST_REST = 0.5e-3


class Observer:
    """Reads what rules 2 to 5 need, and remembers since when it is as it is.

    Args:
        node_id: of the node that looks.
        rules: the run's settings.
        clock: the node's monotonic clock, in seconds.

    Attributes:
        document: as last read; None: there is none.
        token: the version under which it was read.
        document_since: when it was first seen as it is.
        latest: the document of the highest place that was seen of this node's run.
        asked_tombstones: incarnations that were looked for among those that ended, and had not;
            none since a later document was seen.
        forming_since: when the document's round was first seen.
        leader: the leader's record, where another node leads; None: it was not read.
        leases: of the nodes that were looked at.
        idle: the same of the leader's looks at all records.
        records: all nodes' records, where this node lists them; None: not listed since it does.
        lists: whether it reads all records though it does not lead.
        looks: how often it has.
        listed_since: when it last did, or began to have to.
        minimum_since: when this leader first counted enough nodes; None: there were fewer.
        idle_until: when the node was last where it should be.
        trouble_since: since when no request has succeeded; None: the last one did.
        document_due, leader_due, list_due: what is to be read before the next decision.
        document_is_fresh: it was read or written since this node last paused.
        named: the round that this node was last named in.
    """

    def __init__(self, node_id: str, rules: Rules, clock: Callable[[], float]) -> None:
        self._me = node_id
        self._rules = rules
        self._clock = clock
        self.document: RoundDocument | None = None
        self.token: Version | None = None
        self.document_since = clock()
        self.latest: RoundDocument | None = None
        self.asked_tombstones: frozenset[str] = frozenset()
        self.forming_since = clock()
        self.leader: NodeRecord | None = None
        self.liveness = FailureDetector()
        self.progress = FailureDetector()
        self.records: dict[str, NodeRecord] | None = None
        self.lists = False
        self.looks = 0
        self.listed_since = clock()
        self.minimum_since: float | None = None
        self.idle_until = clock()
        self.trouble_since: float | None = None
        self.document_due = True
        self.leader_due = False
        self.list_due = True
        self.named: RoundDocument | None = None
        self._leader_is: str | None = None  # Whose record `leader` is.
        self._listing = RecordCache()
        self._listed_at = float("-inf")
        self.document_is_fresh = False

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

    def read_document(self) -> Effects[None]:
        entry = yield from Read(STATE_KEY)
        self.adopt(entry)
        self.document_due = False

    def adopt(self, entry: Entry | None, known: RoundDocument | None = None) -> None:
        """Make what stands in the store the document; ``known`` saves decoding our own."""
        self.document_is_fresh = True
        token = entry.version if entry else None
        if token == self.token and (entry is None) == (self.document is None):
            return
        was = self.document
        self.document = known or self._decode(entry)
        self.token = token
        self.document_since = self._clock()
        document = self.document
        if document is None:
            return
        if was is None or (was.incarnation, was.leader) != (document.incarnation, document.leader):
            self._begin_windows(was, document)
        if document.leader is not None:
            # Nobody else writes in its name.
            self.liveness.heard(document.leader, self._clock())
            self.progress.heard(document.leader, self._clock())
        if was is None or (was.incarnation, was.round) != (document.incarnation, document.round):
            self.forming_since = self._clock()
            self.minimum_since = None
        if self._is_later(document):
            self.latest = document
            self.asked_tombstones = frozenset()

    def _decode(self, entry: Entry | None) -> RoundDocument | None:
        try:
            return RoundDocument.decode(entry.value) if entry else None
        except CorruptDocumentError:
            if self.latest is None:
                raise
            return None  # As good as forgotten: whoever has a valid one writes it back.

    def _begin_windows(self, was: RoundDocument | None, document: RoundDocument) -> None:
        """Another node leads: what was seen before, perhaps long ago, is too old to judge by.

        Every window begins now, but for the leader that this node deposed on good evidence.
        """
        self.records = None
        if self._leader_is != document.leader:
            self.leader = None
        self.minimum_since = None
        self.list_due, self.lists = True, False
        now = self._clock()
        deposed = was.leader if was and document.leader == self._me else None
        self.liveness.restart(now, unless=deposed)
        self.progress = FailureDetector()
        self.listed_since = now

    def _is_later(self, document: RoundDocument) -> bool:
        """Whether it says more of this node's run than the latest that was seen."""
        latest = self.latest
        if latest is None:
            return True
        if document.is_of(latest):
            return document.closed or (not latest.closed and document.place >= latest.place)
        # Another run of this id. One that is over is none of ours, and who was in a run that is
        # over is in no other.
        return not document.closed and not (latest.closed and self._member_of(latest))

    def _member_of(self, document: RoundDocument) -> bool:
        return document.is_of(self.named)

    def hear_of_the_end(self, incarnation: str, outcome: Outcome | None) -> None:
        """Note what the tombstone of a run says that this node remembers; None: there is none."""
        self.asked_tombstones |= {incarnation}
        for run in (self.latest, self.named):
            if outcome is not None and run is not None and run.incarnation == incarnation:
                self.latest = replace(run, phase=Phase.CLOSED, outcome=outcome, expires=True)
                return

    def read_record(self, node: str) -> Effects[Entry | None]:
        entry = yield from Read(NODES_PREFIX + node)
        return entry

    def observe(self) -> Effects[None]:
        """Read what is due of others: all records as the leader, else the leader's."""
        document = self.document
        if document is None or document.closed:
            return
        if document.leader == self._me or self.lists:
            if self.list_due:
                yield from self._list()
        elif document.leader is not None:
            self.records = None
            if self.leader_due:
                yield from self._look_at_the_leader(document.leader)

    def _look_at_the_leader(self, leader: str) -> Effects[None]:
        self.leader_due = False
        asked = self._clock()
        entry = yield from self.read_record(leader)
        record = readable(entry)
        self._leader_is = leader
        # One that is missing or goes back says no more than what is known.
        if record is not None and (self.leader is None or record.beat >= self.leader.beat):
            self.leader = record
        beat, looks = (record.beat, record.looks) if record else (None, None)
        self.liveness.observe(leader, beat, asked, self._clock())
        self.progress.observe(leader, looks, asked, self._clock())
        # Without the leader's record the document may be gone too.
        self.document_due = record is None

    def _list(self) -> Effects[None]:
        rest = self._listed_at + _REST_PER_RECORD * len(self._listing) - self._clock()
        if rest > _SHORTEST_REST:
            self.idle_until = self._clock() + rest
            yield from Rest(rest)
        document = self.document
        assert document is not None
        asked = self._clock()
        entries = yield from List(NODES_PREFIX)
        now = self._clock()
        records = self.records = self._listing.decode(entries)
        named = {*document.participants, *document.previous}
        if document.leader is not None:
            # It may have no record, and is to be found dead all the same.
            named.add(document.leader)
        self.liveness.keep({*records, *named})
        for node in {*records, *named}:
            record = records.get(node)
            self.liveness.observe(node, record.beat if record else None, asked, now)
        self._listed_at = self.listed_since = now
        self.looks += 1
        self.list_due = False

    def judge_punctuality(self) -> None:
        """Begin all windows afresh if this node stood still: suspended, or starved.

        What it saw, or did not see, in that time proves nothing of others. The time that its own
        requests take is no lateness: see `spent`.
        """
        now = self._clock()
        if now - self.idle_until > self._rules.interval:
            self._reset_windows(now, grace=0.0)
        self.idle_until = now

    def paused(self) -> None:
        """Time passed in which the document may have changed."""
        self.document_is_fresh = False

    def spent(self, seconds: float) -> None:
        """A request took so long; what is beyond its time-out, the node stood still."""
        self.idle_until += min(seconds, self._rules.request)

    def failed(self, asked: float) -> None:
        """A request of ``asked`` failed: read all again."""
        if self.trouble_since is None:
            self.trouble_since = asked
        self.document_due = self.leader_due = self.list_due = True

    def succeeded(self) -> None:
        """A request was answered: the store is there, perhaps again.

        While it was away nobody could beat. A short while is taken out of each window; after a
        longer one all windows begin afresh, each node's when it beats again or a lease later.
        """
        if self.trouble_since is None:
            return
        now, since = self._clock(), self.trouble_since
        self.trouble_since = None
        if now - since > self._rules.interval:
            self._reset_windows(now, grace=self._rules.lease)
        else:
            self.liveness.discount(now - since, now)
            self.progress.discount(now - since, now)

    def _reset_windows(self, now: float, grace: float) -> None:
        """Forget since when things are as they are, and read all again."""
        self.liveness.restart(now, grace)
        self.progress.restart(now, grace)
        self.listed_since = now
        self.minimum_since = None
        self.document_due = self.leader_due = self.list_due = True

    def is_silent(self, node: str) -> bool:
        """Whether the lease of another node has run out."""
        record = self.records.get(node) if self.records else None
        lease = record.lease if record else self._rules.lease
        return node != self._me and self.liveness.confirmed_silence(node) >= lease
