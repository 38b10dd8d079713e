"""The order of ranks: node2 before node10, survivors in place, or as the launcher hints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rdzv_plugins.protocol.documents import NodeRecord

__all__ = ["order_ranks"]

_NUMBER = re.compile(r"(\d+)")


def natural_key(record: NodeRecord) -> tuple[tuple[str | tuple[int, str], ...], int]:
    """Sort key of a node: its address with numbers compared as numbers, then its process id."""
    parts = _NUMBER.split(record.address)
    # The split alternates text and number, so that keys of equal length compare like with like.
    return tuple(_magnitude(part) if part.isdecimal() else part for part in parts), record.pid


def _magnitude(digits: str) -> tuple[int, str]:
    # Not int(): it refuses thousands of digits, and what stands in the store is not ours to trust.
    significant = digits.lstrip("0")
    return len(significant), significant


def order_ranks(
    chosen: Iterable[str],
    records: Mapping[str, NodeRecord],
    previous: Sequence[str],
    rank_order: str,
) -> tuple[str, ...]:
    """The ids in rank order.

    Args:
        chosen: ids of the participants-to-be; each has a record.
        previous: the last round's ids in their rank order.
        rank_order: ``natural``, ``stable`` or ``hint``, as in ``--rdzv-conf rank_order``.
    """
    natural = sorted(chosen, key=lambda node: (natural_key(records[node]), node))
    if rank_order == "stable":
        place = {node: index for index, node in enumerate(previous)}
        natural.sort(key=lambda node: place.get(node, len(place)))
    elif rank_order == "hint":
        # Nodes without a hint follow those with one; sorting is stable, so ties stay natural.
        hints = {node: records[node].hint for node in natural}
        natural.sort(key=lambda node: (hints[node] is None, hints[node] or 0))
    # Rank 0 opens the TCPStore of the round.
    first = next((node for node in natural if records[node].hosts), None)
    natural.sort(key=lambda node: node != first)
    return tuple(natural)
