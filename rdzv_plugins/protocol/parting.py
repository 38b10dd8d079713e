"""Whether the others go on without a node that gives up. Pure functions, as in `member`."""

from __future__ import annotations

from collections.abc import Mapping

from rdzv_plugins.protocol.choice import Sizes, world_size
from rdzv_plugins.protocol.documents import Names, NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.kept_out import kept_out
from rdzv_plugins.protocol.leader import fits
from rdzv_plugins.protocol.rules import Rules

__all__ = ["all_live", "goes_on_without", "lost_one", "newcomers_with"]


def newcomers_with(label: str, document: RoundDocument) -> Names | None:
    """The nodes that came to a run together with this one, in its first round of that run.

    None: no round had run before, or it was in that too.
    """
    joined = document.cause.joined
    is_new = document.round > 0 and (label in joined or joined.more > 0)
    return joined if is_new and joined.count < document.size else None


def goes_on_without(
    me: str,
    document: RoundDocument,
    records: Mapping[str, NodeRecord] | None,
    rules: Rules,
    wall: float,
    newcomers: Names,
) -> bool:
    """Whether the other nodes of a run are enough for a round.

    Args:
        records: of all nodes; None: they are many, and participants are counted instead.
        wall: the time on this host's wall clock, in seconds since the epoch.
        newcomers: nodes that do not count.
    """
    if document.closed:
        return False
    if records is None:
        shards = document.roster or document.previous_roster
        size = shards.size if shards is not None else document.size
        lost = document.cause.lost.count if document.phase is Phase.FORMING else len(document.lost)
        return size - lost - max(1, newcomers.count) >= rules.min_nodes
    out = {me, *document.lost, *kept_out(document, records, wall)}
    others = [
        node
        for node, record in records.items()
        if node not in out
        and record.label not in newcomers
        # Its record is the last that it wrote.
        and record.label not in document.cause.lost
        and fits(record, document)
        and (record.asks or _runs(document, record))
    ]
    # Of so many newcomers nobody knows the names.
    others = others[newcomers.more :]
    return world_size(others, records, Sizes.of(rules)) > 0


def lost_one(last: RoundDocument, latest: RoundDocument) -> bool:
    """Whether the nodes of a round, the last one, have lost one of theirs."""
    if not latest.is_of(last):
        return False
    return bool(latest.lost or (latest.round > last.round and latest.cause.lost))


def all_live(
    me: str,
    last: RoundDocument,
    before: Mapping[str, NodeRecord],
    records: Mapping[str, NodeRecord],
) -> bool:
    """Whether all others of a round, the last one, have written their records since ``before``.

    Who asks for the next round or left has done so too. False of many nodes: nobody looks at each.
    """
    return bool(last.participants) and all(
        (now := records.get(node)) is not None
        and (now.asks or now.is_over or ((old := before.get(node)) is None or old.beat < now.beat))
        for node in last.participants
        if node != me
    )


def _runs(document: RoundDocument, record: NodeRecord) -> bool:
    """Whether the node works in the round, or in the one before that forms anew."""
    if record.status is not Status.RUN or record.incarnation != document.incarnation:
        return False
    return record.round >= document.round - 1
