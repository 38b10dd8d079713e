"""Whether the others go on without a node that gives up. Pure functions, as in `member`."""

from __future__ import annotations

from collections.abc import Mapping

from rdzv_plugins.protocol.choice import Sizes, world_size
from rdzv_plugins.protocol.documents import Names, NodeRecord, RoundDocument, Status
from rdzv_plugins.protocol.kept_out import kept_out
from rdzv_plugins.protocol.leader import fits
from rdzv_plugins.protocol.rules import Rules

__all__ = ["goes_on_without", "newcomers_with"]


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
        return size - len(document.lost) - max(1, newcomers.count) >= rules.min_nodes
    out = {me, *document.lost, *kept_out(document, records, wall)}
    others = [
        node
        for node, record in records.items()
        if node not in out
        and record.label not in newcomers
        and fits(record, document)
        and (record.asks or _runs(document, record))
    ]
    # Of so many newcomers nobody knows the names.
    others = others[newcomers.more :]
    return world_size(others, records, Sizes.of(rules)) > 0


def _runs(document: RoundDocument, record: NodeRecord) -> bool:
    """Whether the node works in the round, or in the one before that forms anew."""
    if record.status is not Status.RUN or record.incarnation != document.incarnation:
        return False
    return record.round >= document.round - 1
