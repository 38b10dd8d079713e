"""All nodes' records as a leader lists them; each version is decoded once."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rdzv_plugins.kv import Entry, RendezvousStateError, Version
from rdzv_plugins.kv.gate import LEASES, is_host, plain
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord

# Remember the last beats of at most this many nodes whose records are gone.
_MOST_GONE = 1 << 16
# The log names at most this many nodes whose records are not believed.
_MOST_UNBELIEVED = 16
_START = len(NODES_PREFIX)


class RecordCache:
    """The last listing's records; its length is their number.

    A record whose lease differs from ``lease`` by more than a factor of LEASES is not believed.

    Attributes:
        unbelieved: by node, why its record counts as absent, as of the last look.
        shortest_lease: the shortest lease of all nodes; a node without a record has ``lease``.
    """

    def __init__(self, lease: float | None = None) -> None:
        self._decoded: dict[str, tuple[Version, NodeRecord]] = {}
        self._shortest = lease / LEASES if lease is not None else 0.0
        self._longest = lease * LEASES if lease is not None else math.inf
        self._lease = self.shortest_lease = lease or 0.0
        # The last beats of nodes whose records are gone.
        self._gone: dict[str, int] = {}
        self.unbelieved: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._decoded)

    def read(self, node: str, entry: Entry | None) -> NodeRecord | None:
        """The record in a single read entry; None: it is missing, unreadable or not believed."""
        known = self._decoded.get(node)
        found = self._take(node, entry, known) if entry is not None else None
        if found is None:
            return None
        self._decoded[node] = found
        return found[1]

    def decode(self, entries: Mapping[str, Entry]) -> dict[str, NodeRecord]:
        """The records by node, without unreadable and unbelieved records."""
        decoded: dict[str, tuple[Version, NodeRecord]] = {}
        self.unbelieved.clear()
        before, take = self._decoded, self._take
        for key, entry in entries.items():
            node = key[_START:]
            known = before.get(node)
            if known is not None and known[0] == entry.version:
                decoded[node] = known
            elif (found := take(node, entry, known)) is not None:
                decoded[node] = found
        if not before.keys() <= decoded.keys():
            self._gone |= {it: before[it][1].beat for it in before if it not in decoded}
            while len(self._gone) > _MOST_GONE:
                del self._gone[next(iter(self._gone))]
        self._decoded = decoded
        records = {node: record for node, (_, record) in decoded.items()}
        self.shortest_lease = min([self._lease, *(it.lease for it in records.values())])
        return records

    def _take(
        self, node: str, entry: Entry, known: tuple[Version, NodeRecord] | None
    ) -> tuple[Version, NodeRecord] | None:
        """The version and record of a node after its entry was read; None: it is not believed.

        A record never goes back: an older one is a write that was held up on its way.
        """
        try:
            record = NodeRecord.decode(entry.value)
        except RendezvousStateError as error:
            self.unbelieved[node] = str(error)
            return None
        if not self._shortest <= record.lease <= self._longest:
            self.unbelieved[node] = (
                f"a node's record is not believed: a lease of {record.lease:g} s, where this "
                f"node's is {self._shortest * LEASES:g} s - at `$.lease`"
            )
            return None
        if known is None:
            if not node.isalnum() and not is_host(node):
                # Otherwise nodes would dial this node, and name its id to others.
                self.unbelieved[plain(node, 40)] = (
                    "a node's record is not believed: the id of no node"
                )
                return None
            # A forgetful store has found this record again, unless its beat is lower than before.
            return None if record.beat < self._gone.get(node, 0) else (entry.version, record)
        return entry.version, record if record.beat >= known[1].beat else known[1]


class Unbelieved:
    """Lines for the log on values that were read and count as absent, one for each node.

    ``is_overwritten``: from now on this node overwrites an unreadable document, because no live
    node has written it again.
    """

    def __init__(self) -> None:
        self.is_overwritten = False
        self._nodes: set[str] = set()
        self._lines: list[str] = []

    def note(self, unbelieved: Mapping[str, str]) -> None:
        """Note why values are not believed, by node; the key "" is for the document."""
        for node, why in unbelieved.items():
            if node not in self._nodes and len(self._nodes) < _MOST_UNBELIEVED:
                self._nodes.add(node)
                self._lines.append(why + (f"; it is that of '{plain(node, 40)}'" if node else ""))

    def take(self) -> list[str]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        return lines


def readable(entry: Entry | None) -> NodeRecord | None:
    """The record; None if it is unreadable, so that its lease runs out."""
    if entry is None:
        return None
    try:
        return NodeRecord.decode(entry.value)
    except RendezvousStateError:
        return None
