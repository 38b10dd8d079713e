"""A node's own rank in a large round, whose nodes are in shards beside the document."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from rdzv_plugins.protocol.documents import RoundDocument, Shards
from rdzv_plugins.protocol.effects import Effects, Read
from rdzv_plugins.protocol.roster import ranks_in, shard_key, shard_mates

_KEPT = 4


def with_rank(
    document: RoundDocument,
    node: str,
    known: Mapping[str, dict[str, int]],
    shard_nodes: dict[str, tuple[str, ...]] | None = None,
) -> Effects[RoundDocument]:
    """The document with the node's rank, if its nodes are in shards that can be read.

    ``known`` has ranks by digest. ``shard_nodes`` is filled with the nodes of each read shard.
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
                if shard_nodes is not None:
                    shard_nodes[shards.digest] = tuple(sorted(part, key=part.__getitem__))
        return replace(shards, ranks=ranks)

    roster = yield from ranked(document.roster)
    previous_roster = yield from ranked(document.previous_roster)
    return replace(document, roster=roster, previous_roster=previous_roster)


class OwnRank:
    """The ranks that a node has read in the shards of the last `_KEPT` rosters.

    Args:
        inline: see `rules.Rules.inline`.
    """

    def __init__(self, node_id: str, inline: int) -> None:
        self._me, self._inline = node_id, inline
        # This node's rank, by the digest of the roster.
        self._ranks: dict[str, dict[str, int]] = {}
        # By roster digest: the nodes of this node's shard, in rank order.
        self._shard_nodes: dict[str, tuple[str, ...]] = {}

    def read(self, document: RoundDocument) -> Effects[RoundDocument]:
        """The document with this node's rank."""
        document = yield from with_rank(document, self._me, self._ranks, self._shard_nodes)
        for shards in document.rosters:
            if shards.ranks is not None:
                self._ranks[shards.digest] = shards.ranks
        for kept in (self._ranks, self._shard_nodes):
            while len(kept) > _KEPT:
                del kept[next(iter(kept))]
        return document

    def peers(self, document: RoundDocument) -> tuple[str, ...]:
        """The participants to which this node may have links, in rank order: all, or its shard."""
        if document.roster is not None:
            return self._shard_nodes.get(document.roster.digest, ())
        return shard_mates(document, self._me, self._inline)
