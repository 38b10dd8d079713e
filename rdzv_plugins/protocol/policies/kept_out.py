"""Drain and exclusions: nodes that people keep out of a run, and the sentences about them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rdzv_plugins.protocol.documents import Exclusion, NodeRecord, Phase, RoundDocument
from rdzv_plugins.protocol.policies.policy import NOTHING, Policy, Reason, Stage
from rdzv_plugins.protocol.rules import Action, Failure, View, Write
from rdzv_plugins.protocol.wall_clock import shown

if TYPE_CHECKING:
    from rdzv_plugins.protocol.situation import Situation

# A sentence tells at most this many exclusions.
_SHOWN = 2

# A document names at most this many drained nodes that have ended; each may come back.
_DRAINED_KEPT = 64


class KeptOut(Policy):
    """Rule: drain. Rule: exclusions. Keeps out drained nodes, and excluded or quarantined hosts."""

    def keep_out(
        self, document: RoundDocument, records: Mapping[str, NodeRecord], now: float
    ) -> Mapping[str, Reason]:
        hosts = in_force(document, now)
        if not hosts and not document.drained:
            return NOTHING
        reasons = {host: _reason(document, it, now) for host, it in hosts.items()}
        excluded = {
            node: reasons[host]
            for node, record in records.items()
            for host in record.called
            if host in reasons
        }
        drained = Reason(document.drain_why, cause="drained")
        return {**excluded, **dict.fromkeys(document.drained, drained)}

    def judge(self, view: View, at: Situation, stage: Stage) -> Action | None:
        if stage is Stage.BEFORE_ALL and view.carried:
            after = carried_over(at.document, view.carried)
            return Write(after) if after != at.document else None
        return None

    def note(self, view: View, at: Situation, after: RoundDocument) -> RoundDocument:
        named = at.document.phase is Phase.FORMING and after.phase is Phase.CONFIRMING
        return pruned(after, at.records, view.wall) if named else after

    def delays(self, view: View, document: RoundDocument) -> bool:
        return exclusion_of(document, view.record, view.wall) is not None

    def leave(self, view: View, document: RoundDocument) -> Failure | None:
        """A drained node leaves, but not while others may count on its rank."""
        counts = document.phase is Phase.CONFIRMING and view.me in document.ranks
        return Failure.DRAINED if view.me in document.drained and not counts else None


def _reason(document: RoundDocument, exclusion: Exclusion, now: float) -> Reason:
    why = f"quarantined, {exclusion.why}" if exclusion in document.quarantined else exclusion.why
    left = None if exclusion.until is None else exclusion.until - now
    return Reason(why, left, cause="excluded")


def in_force(document: RoundDocument, now: float) -> dict[str, Exclusion]:
    """The exclusions and quarantines in force, by host; ``now``: seconds since the epoch."""
    both = (*document.quarantined, *document.excluded)
    return {it.host: it for it in both if it.is_in_force(now)}


def without_hosts(exclusions: Iterable[Exclusion], hosts: Collection[str]) -> tuple[Exclusion, ...]:
    """The exclusions or quarantines of all other hosts."""
    return tuple(it for it in exclusions if it.host not in hosts)


def exclusion_of(document: RoundDocument, record: NodeRecord, now: float) -> Exclusion | None:
    """The exclusion in force of a node's host."""
    if not (document.excluded or document.quarantined):
        return None
    hosts = in_force(document, now)
    return next((hosts[it] for it in record.called if it in hosts), None)


def carried_over(document: RoundDocument, carried: Iterable[Exclusion]) -> RoundDocument:
    """The document with the exclusions of earlier runs; its own exclusions are newer."""
    hosts = {it.host for it in document.excluded}
    fresh = tuple(it for it in carried if it.host not in hosts)
    return replace(document, excluded=(*document.excluded, *fresh))


def pruned(document: RoundDocument, records: Mapping[str, NodeRecord], now: float) -> RoundDocument:
    """The document without ended exclusions, and without most drained nodes that have ended."""
    drained = document.drained
    if len(drained) > _DRAINED_KEPT:
        old = drained[:-_DRAINED_KEPT]
        alive = (node for node in old if node in records and not records[node].has_ended)
        drained = (*alive, *drained[-_DRAINED_KEPT:])
    return replace(
        document,
        drained=drained,
        excluded=tuple(it for it in document.excluded if it.is_in_force(now)),
        quarantined=tuple(it for it in document.quarantined if it.is_in_force(now)),
    )


def describe(exclusion: Exclusion, now: float, done: str = "excluded") -> str:
    """A text such as "node-9 excluded until 14:00 UTC: ECC errors"; ``done``: the participle."""
    at = shown(exclusion.until or 0.0, now, "%H:%M")
    until = f" until {at}" if at else ""
    why = f": {exclusion.why}" if exclusion.why else ""
    return f"{exclusion.host} {done}{until}{why}"


def describe_in_force(document: RoundDocument, exclusion: Exclusion, now: float) -> str:
    """Like `describe`, but says "quarantined" for a quarantine of this document."""
    quarantine = exclusion in document.quarantined
    return describe(exclusion, now, "quarantined" if quarantine else "excluded")


def why_kept_out(document: RoundDocument, node: str, record: NodeRecord | None, now: float) -> str:
    """Why no round names the node, for people; empty: it is not kept out."""
    if node in document.drained:
        return "drained"
    exclusion = exclusion_of(document, record, now) if record is not None else None
    return describe_in_force(document, exclusion, now) if exclusion is not None else ""


def as_data(exclusion: Exclusion) -> dict[str, str | float | None]:
    """An exclusion as plain data; ``until`` in seconds since the epoch, or None."""
    return {"host": exclusion.host, "until": exclusion.until, "why": exclusion.why}


def summary(document: RoundDocument, now: float) -> str:
    """The exclusions in force, for the sentence of a run; empty: there are none."""
    found = [describe_in_force(document, it, now) for it in in_force(document, now).values()]
    more = len(found) - _SHOWN
    rest = [f"{more} more kept out"] if more > 0 else []
    return "; ".join((*found[:_SHOWN], *rest))
