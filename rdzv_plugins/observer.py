"""What a node has seen of its run: the document, the leader's beat or all records, and when."""

from __future__ import annotations

from collections.abc import Callable

from rdzv_plugins.decisions import Rules
from rdzv_plugins.documents import NODES_PREFIX, STATE_KEY, NodeRecord, Phase, RoundDocument
from rdzv_plugins.kv import Entry, Version
from rdzv_plugins.leases import Leases
from rdzv_plugins.listing import Listing, readable
from rdzv_plugins.steps import List, Read, Rest, Steps

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
        latest: the document of the highest place that was seen.
        forming_since: when the document's round was first seen.
        leader_label: the leader's name for people; None: its record was not read.
        leases: of the nodes that were looked at.
        records: all nodes' records, where this node leads; None: not listed since it does.
        minimum_since: when this leader first counted enough nodes; None: there were fewer.
        idle_until: when the node was last where it should be.
        document_due, leader_due, list_due: what is to be read before the next decision.
    """

    def __init__(self, node_id: str, rules: Rules, clock: Callable[[], float]) -> None:
        self._me = node_id
        self._rules = rules
        self._clock = clock
        self.document: RoundDocument | None = None
        self.token: Version | None = None
        self.document_since = clock()
        self.latest: RoundDocument | None = None
        self.forming_since = clock()
        self.leader_label: str | None = None
        self.leases = Leases()
        self.records: dict[str, NodeRecord] | None = None
        self.minimum_since: float | None = None
        self.idle_until = clock()
        self.document_due = True
        self.leader_due = False
        self.list_due = True
        self._listing = Listing()
        self._listed_at = float("-inf")

    @property
    def closed(self) -> bool:
        """Whether the run was closed."""
        return self.latest is not None and self.latest.phase is Phase.CLOSED

    def read_document(self) -> Steps:
        entry: Entry | None = yield Read(STATE_KEY)
        self.adopt(entry)
        self.document_due = False

    def adopt(self, entry: Entry | None, known: RoundDocument | None = None) -> None:
        """Make what stands in the store the document; ``known`` saves decoding our own."""
        token = entry.version if entry else None
        if token == self.token and (entry is None) == (self.document is None):
            return
        was = self.document
        self.document = known or (RoundDocument.decode(entry.value) if entry else None)
        self.token = token
        self.document_since = self._clock()
        document = self.document
        if document is None:
            return
        leader_changed = was is None or was.leader != document.leader
        if leader_changed:
            self.records = self.leader_label = None
            self.minimum_since = None
            self.list_due = True
            # What this node saw before it led, perhaps long ago, is too old to judge by: every
            # window begins now, but for the leader that it deposed on good evidence.
            deposed = was.leader if was and document.leader == self._me else None
            self.leases.restart(self._clock(), unless=deposed)
        if document.leader is not None:
            # Nobody else writes in its name.
            self.leases.heard(document.leader, self._clock())
        if was is None or was.round != document.round:
            self.forming_since = self._clock()
            self.minimum_since = None
        latest = self.latest
        if (
            latest is None
            or document.phase is Phase.CLOSED
            or (latest.phase is not Phase.CLOSED and document.place >= latest.place)
        ):
            self.latest = document

    def observe(self) -> Steps:
        """Read what is due of others: all records as the leader, else the leader's."""
        document = self.document
        if document is None or document.phase is Phase.CLOSED or document.leader is None:
            return
        if document.leader != self._me:
            self.records = None
            if self.leader_due:
                yield from self._look_at_the_leader(document.leader)
        elif self.list_due:
            yield from self._list()

    def _look_at_the_leader(self, leader: str) -> Steps:
        self.leader_due = False
        asked = self._clock()
        entry: Entry | None = yield Read(NODES_PREFIX + leader)
        record = readable(entry)
        beat, self.leader_label = (record.beat, record.label) if record else (None, None)
        self.leases.observe(leader, beat, asked, self._clock())
        # Without the leader's record the document may be gone too.
        self.document_due = record is None

    def _list(self) -> Steps:
        rest = self._listed_at + _REST_PER_RECORD * len(self._listing) - self._clock()
        if rest > _SHORTEST_REST:
            self.idle_until = self._clock() + rest
            yield Rest(rest)
        # The document first: records may be newer than it, never older. Its token then guards us.
        yield from self.read_document()
        document = self.document
        if document is None or document.leader != self._me:
            return
        asked = self._clock()
        entries: dict[str, Entry] = yield List(NODES_PREFIX)
        now = self._clock()
        records = self.records = self._listing.decode(entries)
        named = {*document.participants, *document.previous}
        self.leases.keep({*records, *named})
        for node in {*records, *named}:
            record = records.get(node)
            self.leases.observe(node, record.beat if record else None, asked, now)
        self._listed_at = now
        self.list_due = False

    def judge_punctuality(self) -> None:
        """Begin all windows afresh if this node was away: suspended, starved, held up by a store.

        What it saw, or did not see, in that time proves nothing of others.
        """
        now = self._clock()
        if now - self.idle_until > self._rules.interval:
            self.leases.restart(now)
        self.idle_until = now

    def void(self) -> None:
        """Forget since when things are as they are, and read all again: a request failed."""
        self.leases.restart(self._clock())
        self.minimum_since = None
        self.document_due = self.leader_due = self.list_due = True

    def is_silent(self, node: str) -> bool:
        """Whether the lease of another node has run out."""
        return node != self._me and self.leases.age(node) >= self._rules.lease
