"""Rank order: node2 before node10, survivors in place, by domain, or as hinted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING

from rdzv_plugins.protocol.documents import NodeRecord, RoundDocument
from rdzv_plugins.protocol.policies.network import able_to_host
from rdzv_plugins.protocol.policies.policy import Policy

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation

_NUMBER = re.compile(r"(\d+)")

_Key = tuple[str | tuple[int, str], ...]


class Ranks(Policy):
    """Rule: rank order."""

    def choose(self, at: Situation, nodes: Sequence[str]) -> Sequence[str]:
        document, records, rank_order = at.document, at.records, at.rules.rank_order
        able = able_to_host(document, records, nodes)
        places = old_places(document, records) if rank_order == "topology" else None
        return order_ranks(nodes, able, document.previous, rank_order, places)


def natural_key(record: NodeRecord) -> tuple[_Key, int]:
    """Sort key of a node: its address with numbers compared as numbers, then its process id."""
    return _natural(record.address), record.pid


def domain_key(domain: str | None) -> tuple[bool, tuple[tuple[_Key, str], ...]]:
    """Sort key of a domain, level by level; no domain comes last."""
    # Add the name, because rack7 and rack07 are two domains with equal keys.
    return domain is None, tuple((_natural(level), level) for level in (domain or "").split("/"))


def _natural(name: str) -> _Key:
    # The split alternates text and number, so that keys of equal length compare like with like.
    return tuple(_magnitude(part) if part.isdecimal() else part for part in _NUMBER.split(name))


def _magnitude(digits: str) -> tuple[int, str]:
    # Not int(): it fails for thousands of digits, and the name comes from the store.
    significant = digits.lstrip("0")
    return len(significant), significant


def order_ranks(
    chosen: Iterable[str],
    records: Mapping[str, NodeRecord],
    previous: Sequence[str],
    rank_order: str,
    places: Mapping[str, float] | None = None,
) -> tuple[str, ...]:
    """The ids in rank order.

    Args:
        chosen: ids of the future participants; each has a record.
        previous: the last round's ids in their rank order.
    """
    natural = sorted(chosen, key=lambda node: (natural_key(records[node]), node))
    if rank_order == "stable":
        place = {node: index for index, node in enumerate(previous)}
        natural.sort(key=lambda node: place.get(node, len(place)))
    elif rank_order == "hint":
        # Nodes without a hint come last. Sorting is stable, so ties stay in natural order.
        hints = {node: records[node].hint for node in natural}
        natural.sort(key=lambda node: (hints[node] is None, hints[node] or 0))
    elif rank_order == "topology":
        natural = _in_their_domains(natural, records, places or {})
    first = _first(natural, records)
    if rank_order == "topology" and first is not None:
        _put_its_domain_first(first, natural, records)
    natural.sort(key=lambda node: node != first)
    return tuple(natural)


def _first(order: Sequence[str], records: Mapping[str, NodeRecord]) -> str | None:
    """The first node that can open the round's TCPStore, if possible where all reach it."""
    able = [node for node in order if records[node].can_host]
    lacking = {records[node].lacks for node in order}
    reached = (node for node in able if _version(records[node].address) not in lacking)
    return next(reached, able[0] if able else None)


def _version(address: str) -> int | None:
    """The version of an IP address; None: the address is a name."""
    try:
        return ip_address(address).version
    except ValueError:
        return None


def by_domain(
    nodes: Iterable[str], records: Mapping[str, NodeRecord]
) -> dict[str | None, list[str]]:
    """The nodes of each domain, in the given order."""
    found: dict[str | None, list[str]] = {}
    for node in nodes:
        found.setdefault(records[node].domain, []).append(node)
    return found


def old_places(document: RoundDocument, records: Mapping[str, NodeRecord]) -> Mapping[str, float]:
    """The place of each node in the last round: its rank, or a number between two ranks.

    The records tell the ranks, of gone nodes too: their records stay in the store until the next
    round runs. If the store has lost a node's record, or the last round never ran, only the order
    of the document's nodes is known.
    """
    known = {
        node: record.rank
        for node, record in records.items()
        if record.rank is not None and document.ran is not None and record.world_id == document.ran
    }
    places: dict[str, float] = {**known}
    last, step = -1.0, 1 / (len(document.previous_order) + 1)
    for node in sorted(document.previous_order, key=document.previous_order.__getitem__):
        last = places.setdefault(node, last + step)
    return places


def _in_their_domains(
    natural: Sequence[str], records: Mapping[str, NodeRecord], places: Mapping[str, float]
) -> list[str]:
    """Domain by domain: survivors in their places, newcomers in the places of gone nodes."""
    chosen = {*natural}
    gone = by_domain((node for node in places if node in records and node not in chosen), records)
    order: list[str] = []
    domains = by_domain(natural, records)
    for domain in sorted(domains, key=domain_key):
        nodes = domains[domain]
        vacant = sorted(places[node] for node in gone.get(domain, ()))
        newcomers = [node for node in nodes if node not in places]
        place = {node: places[node] for node in nodes if node in places}
        place |= dict(zip(newcomers, vacant, strict=False))
        last = max(place.values(), default=0) + 1
        order += sorted(nodes, key=lambda node: place.get(node, last))
    return order


def _put_its_domain_first(node: str, order: list[str], records: Mapping[str, NodeRecord]) -> None:
    """Put each level of the node's domain before the other domains of that level."""
    if node == order[0]:
        return
    levels = (records[node].domain or "").split("/")
    for depth in range(len(levels), 0, -1):
        around = levels[:depth]
        order.sort(key=lambda it: (records[it].domain or "").split("/")[:depth] != around)
