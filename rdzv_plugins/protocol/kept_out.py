"""Nodes that a run keeps out of its rounds: drained ones, and those of excluded hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime

from msgspec.structs import replace

from rdzv_plugins.protocol.documents import (
    Cause,
    Exclusion,
    NodeRecord,
    RoundDocument,
    labels,
)

__all__ = [
    "as_data",
    "carried_over",
    "describe",
    "describe_held",
    "exclusion_of",
    "in_force",
    "kept_out",
    "naming",
    "pruned",
    "summary",
    "until_the_first_ends",
    "why_kept_out",
    "with_orders_of",
    "without_hosts",
]

_NOBODY: frozenset[str] = frozenset()
_DAY = 24 * 3600.0

# A sentence tells of so many exclusions.
_SHOWN = 2

# A document names so many drained nodes that have ended; each may be away and come back.
_DRAINED_KEPT = 64


def in_force(document: RoundDocument, now: float) -> dict[str, Exclusion]:
    """The exclusions and quarantines that hold at this time, by host; seconds since the epoch."""
    both = (*document.quarantined, *document.excluded)
    return {it.host: it for it in both if it.holds(now)}


def without_hosts(held: Iterable[Exclusion], hosts: Collection[str]) -> tuple[Exclusion, ...]:
    """Exclusions or quarantines but for those of some hosts."""
    return tuple(it for it in held if it.host not in hosts)


def exclusion_of(document: RoundDocument, host: str, now: float) -> Exclusion | None:
    """The exclusion of a host that holds at this time."""
    if not (document.excluded or document.quarantined):
        return None
    return in_force(document, now).get(host)


def kept_out(
    document: RoundDocument, records: Mapping[str, NodeRecord], now: float
) -> Collection[str]:
    """The nodes that no round may name."""
    hosts = in_force(document, now)
    if not hosts and not document.drained:
        return _NOBODY
    excluded = (node for node, record in records.items() if record.address in hosts)
    return {*document.drained, *excluded}


def carried_over(document: RoundDocument, carried: Iterable[Exclusion]) -> RoundDocument:
    """The document with the exclusions of earlier runs; its own are newer."""
    hosts = {it.host for it in document.excluded}
    fresh = tuple(it for it in carried if it.host not in hosts)
    return replace(document, excluded=(*document.excluded, *fresh))


def with_orders_of(document: RoundDocument, stored: RoundDocument) -> RoundDocument:
    """A document that is written back over an older one, with the orders that stand in that."""
    fresh = (node for node in stored.drained if node not in document.drained)
    return replace(
        carried_over(replace(document, excluded=stored.excluded), document.excluded),
        drained=(*document.drained, *fresh),
        restart=document.restart or stored.restart,
        resize=document.resize or stored.resize,
    )


def naming(
    cause: Cause,
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    nodes: Collection[str],
    now: float,
) -> Cause:
    """The cause with these nodes that are kept out: each as drained, or as excluded and why."""
    if not nodes:
        return cause
    drained = [node for node in nodes if node in document.drained]
    excluded = [node for node in nodes if node not in document.drained]
    hosts = in_force(document, now)
    held = [hosts[records[node].address] for node in excluded if node in records]
    found = {f"quarantined, {it.why}" if it in document.quarantined else it.why for it in held}
    reasons = [cause.why, *sorted(found)]
    cause = cause.plus(drained=labels(records, drained), excluded=labels(records, excluded))
    return _because(cause, reasons)


def _because(cause: Cause, reasons: Iterable[str]) -> Cause:
    return replace(cause, why=", ".join(dict.fromkeys(filter(None, reasons))))


def pruned(document: RoundDocument, records: Mapping[str, NodeRecord], now: float) -> RoundDocument:
    """The document without what is over: exclusions, and most of the drained nodes."""
    drained = document.drained
    if len(drained) > _DRAINED_KEPT:
        old = drained[:-_DRAINED_KEPT]
        alive = (node for node in old if node in records and not records[node].has_ended)
        drained = (*alive, *drained[-_DRAINED_KEPT:])
    return replace(
        document,
        drained=drained,
        excluded=tuple(it for it in document.excluded if it.holds(now)),
        quarantined=tuple(it for it in document.quarantined if it.holds(now)),
    )


def until_the_first_ends(
    document: RoundDocument, records: Mapping[str, NodeRecord], now: float
) -> float | None:
    """Seconds until the first exclusion ends for which a node waits; None: there is none."""
    if not (document.excluded or document.quarantined):
        return None
    hosts = {
        record.address
        for node, record in records.items()
        if record.asks and node not in document.drained
    }
    ends = [
        it.until - now
        for host, it in in_force(document, now).items()
        if host in hosts and it.until is not None
    ]
    return max(0.0, min(ends)) if ends else None


def describe(exclusion: Exclusion, now: float, done: str = "excluded") -> str:
    """For people: "node-9 excluded until 14:00 UTC: ECC errors"; ``done`` is the participle."""
    until = ""
    if exclusion.until is not None:
        try:
            at = datetime.fromtimestamp(exclusion.until, UTC)
        except (OverflowError, OSError, ValueError):
            at = None  # It stands in the store, and is not ours to trust.
        if at is not None:
            shape = "%H:%M UTC" if exclusion.until - now < _DAY else "%Y-%m-%d %H:%M UTC"
            until = f" until {at.strftime(shape)}"
    why = f": {exclusion.why}" if exclusion.why else ""
    return f"{exclusion.host} {done}{until}{why}"


def describe_held(document: RoundDocument, exclusion: Exclusion, now: float) -> str:
    """The same; a quarantine of this document is called so."""
    quarantine = exclusion in document.quarantined
    return describe(exclusion, now, "quarantined" if quarantine else "excluded")


def why_kept_out(document: RoundDocument, node: str, record: NodeRecord | None, now: float) -> str:
    """Why no round names the node, for people; empty: it is not kept out."""
    if node in document.drained:
        return "drained"
    exclusion = exclusion_of(document, record.address, now) if record is not None else None
    return describe_held(document, exclusion, now) if exclusion is not None else ""


def as_data(exclusion: Exclusion) -> dict[str, str | float | None]:
    """As plain data; ``until`` in seconds since the epoch, or None."""
    return {"host": exclusion.host, "until": exclusion.until, "why": exclusion.why}


def summary(document: RoundDocument, now: float) -> str:
    """The exclusions that hold, for the sentence of a run; empty: there are none."""
    found = [describe_held(document, it, now) for it in in_force(document, now).values()]
    more = len(found) - _SHOWN
    rest = [f"{more} more kept out"] if more > 0 else []
    return "; ".join((*found[:_SHOWN], *rest))
