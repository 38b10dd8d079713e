"""The nodes of a large round, in shards beside the document, so that a node reads only its own.

All nodes wait for the document, so it stays small: more than `Rules.inline` participants are stored
apart from it, as `documents.Shards`. The leader writes the shards before the document that names
them. Their keys contain a digest of all nodes in rank order and their values never change, so that
the compare-and-set of the document still decides for all nodes. The hash of a node's id tells its
shard, which holds its rank. Only a leader and people's commands read all shards.

If the store loses the shards, the nodes' records tell the ranks, and the digest tells whether the
records of all nodes are there.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rdzv_plugins.kv.gate import SHARD_BYTES, Id, InvalidValueError, Nodes, decode
from rdzv_plugins.protocol.documents import NodeRecord, Phase, RoundDocument, Shards, digest_of

if TYPE_CHECKING:
    from rdzv_plugins.kv import Entry

ROSTER_PREFIX = "roster/"
MISSING = "/roster"
"""Stands for an unreadable roster among the nodes that a leader watches; no node has this id."""

_OUTDATED_KEPT = 16

_SHARDS = msgspec.json.Decoder(dict[Id, Nodes])


def apart(
    document: RoundDocument, inline: int
) -> tuple[RoundDocument, dict[str, dict[str, bytes]]]:
    """The stored form of the document, and the shards of its nodes: by digest, then by key."""
    found: dict[str, dict[str, bytes]] = {}
    if len(document.participants) > inline:
        shards, found[shards.digest] = _split(document.incarnation, document.participants, inline)
        document = replace(document, participants=(), roster=shards)
    if len(document.previous) > inline:
        shards, found[shards.digest] = _split(document.incarnation, document.previous, inline)
        document = replace(document, previous=(), previous_roster=shards)
    return document, found


# A leader stores one roster with several documents, and 10,000 nodes take some 20 ms to split.
@lru_cache(maxsize=4)
def _split(
    incarnation: str, nodes: tuple[str, ...], inline: int
) -> tuple[Shards, dict[str, bytes]]:
    count = -(-len(nodes) // max(1, inline))
    shards = Shards(digest=digest_of(incarnation, nodes), size=len(nodes), count=count)
    parts: list[dict[str, int]] = [{} for _ in range(count)]
    for rank, node in enumerate(nodes):
        parts[_number(shards, node)][node] = rank
    keys = _keys(incarnation, shards)
    return shards, dict(zip(keys, map(msgspec.json.encode, parts), strict=True))


def shards_of(document: RoundDocument | None) -> dict[str, list[str]]:
    """The keys of the shards that a stored document names, by digest."""
    if document is None:
        return {}
    return {it.digest: _keys(document.incarnation, it) for it in document.rosters}


class ShardKeys:
    """Shard keys by digest: of the stored document (``stored``), and of earlier documents."""

    def __init__(self) -> None:
        self.stored: dict[str, list[str]] = {}
        self._outdated: dict[str, list[str]] = {}

    def replace(self, stored: dict[str, list[str]]) -> None:
        """Take the keys of another document."""
        self._outdated |= self.stored
        while len(self._outdated) > _OUTDATED_KEPT:
            del self._outdated[next(iter(self._outdated))]
        self.stored = stored

    def take_outdated(self) -> list[str]:
        """The keys that only earlier documents name; each key is returned once."""
        found = [keys for digest, keys in self._outdated.items() if digest not in self.stored]
        self._outdated.clear()
        return [key for keys in found for key in keys]


def _keys(incarnation: str, shards: Shards) -> list[str]:
    prefix = _prefix(incarnation, shards)
    return [f"{prefix}{number}" for number in range(shards.count)]


def prefixes(document: RoundDocument) -> list[str]:
    """The key prefixes of the shards of a stored document."""
    return [_prefix(document.incarnation, it) for it in document.rosters]


def _prefix(incarnation: str, shards: Shards) -> str:
    return f"{ROSTER_PREFIX}{incarnation}/{shards.digest}/"


def known_ranks(document: RoundDocument | None) -> dict[str, dict[str, int]]:
    """The ranks that a document or its rosters hold, by the digest of their nodes."""
    if document is None:
        return {}
    known: dict[str, dict[str, int]] = {}
    for nodes, shards, ranks in (
        (document.participants, document.roster, document.ranks),
        (document.previous, document.previous_roster, document.previous_order),
    ):
        if shards is None:
            known[digest_of(document.incarnation, nodes)] = ranks
        elif shards.ranks is not None:
            known[shards.digest] = shards.ranks
    return known


def shard_key(incarnation: str, shards: Shards, node: str) -> str:
    """The key of the shard that holds the node's rank, if the node is in the roster."""
    return f"{_prefix(incarnation, shards)}{_number(shards, node)}"


def shard_mates(document: RoundDocument, node: str, inline: int) -> tuple[str, ...]:
    """The participants in the same shard as ``node``, in rank order."""
    if len(document.participants) <= inline:
        return document.participants
    shards, _ = _split(document.incarnation, document.participants, inline)
    number = _number(shards, node)
    return tuple(it for it in document.participants if _number(shards, it) == number)


def shard_firsts(document: RoundDocument, inline: int) -> tuple[str, ...]:
    """The first participant of each shard."""
    shards, _ = _split(document.incarnation, document.participants, inline)
    return tuple({_number(shards, it): it for it in reversed(document.participants)}.values())


def _number(shards: Shards, node: str) -> int:
    return zlib.crc32(node.encode(errors="backslashreplace")) % shards.count


def ranks_in(entry: Entry | None) -> dict[str, int] | None:
    """The ranks in a shard; None: it is missing or unreadable."""
    if entry is None:
        return None
    try:
        return decode(_SHARDS, entry.value, SHARD_BYTES)
    except InvalidValueError:
        return None


def complete(
    document: RoundDocument,
    stored: Mapping[str, Entry],
    records: Mapping[str, NodeRecord],
) -> RoundDocument:
    """The document with all its nodes, if its shards or the records of all nodes tell them."""
    for field, roster in (("participants", "roster"), ("previous", "previous_roster")):
        shards: Shards | None = getattr(document, roster)
        if shards is None:
            continue
        nodes = _from_shards(document.incarnation, shards, stored)
        if nodes is None:
            nodes = members_by_their_records(document, records)
            if not _are(document.incarnation, nodes, shards):
                continue
        document = replace(document, **{field: nodes, roster: None})
    return document


def _from_shards(
    incarnation: str, shards: Shards, stored: Mapping[str, Entry]
) -> tuple[str, ...] | None:
    ranks: dict[str, int] = {}
    for key in _keys(incarnation, shards):
        part = ranks_in(stored.get(key))
        if part is None:
            return None
        ranks |= part
    nodes = tuple(sorted(ranks, key=ranks.__getitem__))
    return nodes if _are(incarnation, nodes, shards) else None


def _are(incarnation: str, nodes: tuple[str, ...], shards: Shards) -> bool:
    return len(nodes) == shards.size and digest_of(incarnation, nodes) == shards.digest


def members_by_their_records(
    document: RoundDocument, records: Mapping[str, NodeRecord]
) -> tuple[str, ...]:
    """The nodes that confirmed this round (while it forms: the last round), by their records."""
    world_id, last = document.world_id, (document.incarnation, document.round - 1)
    forms = document.phase is Phase.FORMING
    found = [
        (record.rank, node)
        for node, record in records.items()
        if record.rank is not None
        and ((record.incarnation, record.round) == last if forms else record.world_id == world_id)
    ]
    return tuple(node for _, node in sorted(found))
