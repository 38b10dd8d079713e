"""All nodes' records as a leader lists them, each decoded once a version."""

from __future__ import annotations

from collections.abc import Mapping

from rdzv_plugins.kv import Entry, RendezvousStateError, Version
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord

__all__ = ["RecordCache", "readable"]


class RecordCache:
    """Its length is how many records the last one held."""

    def __init__(self) -> None:
        self._decoded: dict[str, tuple[Version, NodeRecord]] = {}

    def __len__(self) -> int:
        return len(self._decoded)

    def remember(self, node: str, version: Version, record: NodeRecord) -> None:
        """Note a record that was read by itself."""
        known = self._decoded.get(node)
        if known is None or known[1].beat <= record.beat:
            self._decoded[node] = version, record

    def decode(self, entries: Mapping[str, Entry]) -> dict[str, NodeRecord]:
        """The records by node; those that nobody can read are left out.

        A record never goes back: what stands there may be a write that was held up on its way.
        """
        decoded: dict[str, tuple[Version, NodeRecord]] = {}
        for key, entry in entries.items():
            node = key.removeprefix(NODES_PREFIX)
            known = self._decoded.get(node)
            if known is not None and known[0] == entry.version:
                decoded[node] = known
            elif (record := readable(entry)) is not None:
                late = known is not None and known[1].beat > record.beat
                decoded[node] = entry.version, known[1] if known and late else record
        self._decoded = decoded
        return {node: record for node, (_, record) in decoded.items()}


def readable(entry: Entry | None) -> NodeRecord | None:
    """A record that nobody can read is silence: its lease runs out."""
    if entry is None:
        return None
    try:
        return NodeRecord.decode(entry.value)
    except RendezvousStateError:
        return None
