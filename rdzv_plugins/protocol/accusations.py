"""Nodes that are accused of having ended: named in the document, and lost if they do not answer.

Two signs are needed, which fail for different reasons. First, a participant that had a link to the
node dials it again, its connection is refused, and it says so in its record. Second, the node,
named in the document, writes no heartbeat within the time that a wake-up takes on this store. A
proxy, a firewall or a dead listener gives only the first sign; a node that stands still gives
neither. Rule: accusations.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from rdzv_plugins.protocol.documents import Accusation, NodeRecord, Phase, RoundDocument
from rdzv_plugins.protocol.rules import View

# Ignore accusations against at least _FEWEST nodes if these are over 1/_LARGE_PART of all.
# A common cause is likely then: a restarting service mesh refuses connections to all nodes,
# or a slowdown of all nodes delays all answers.
_LARGE_PART, _FEWEST = 3, 8
# A document names at most this many accused nodes at once.
_MOST_NAMED = 64
# Besides `answer_timeout` and the lag, an accused node has this many times the larger of its own
# and this node's delay to answer.
_TIMES = 4.0
# In a network check, a node that waits for rank 0 reads the document only once a second.
_CHECK_SECONDS = 2.0


def answered_within(view: View, record: NodeRecord) -> float:
    """Seconds within which a live accused node answers."""
    return _least(view, record) + _TIMES * max(view.latency, record.slow / 1000)


def _least(view: View, record: NodeRecord) -> float:
    document = view.document
    checks = (
        document is not None
        and document.phase is Phase.CONFIRMING
        and record.port > 0
        and record.world_id != document.world_id
    )
    return (view.rules.answer_timeout or 0.0) + view.lag + (_CHECK_SECONDS if checks else 0.0)


def until_answered(view: View, node: str, record: NodeRecord) -> float:
    """Seconds until the next look at an accused node's answer; 0: it did not answer in time."""
    silence, least = view.unanswered.get(node, 0.0), _least(view, record)
    # Wait `_least` first, because `View.latency` is only known after a wait.
    return max(0.0, (least if silence < least else answered_within(view, record)) - silence)


def naming_the_accused(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord]
) -> RoundDocument | None:
    """The document with newly accused nodes; None: there are none."""
    if view.rules.answer_timeout is None:
        return None
    accused = _accused(document, records)
    known = {(it.node, it.beat) for it in document.accused}
    fresh = [it for it in accused.values() if (it.node, it.beat) not in known]
    if not fresh or _too_many(document, accused):
        return None
    named = {it.node: it for it in still_accused(document, records)}
    named |= {it.node: it for it in fresh[: max(0, _MOST_NAMED - len(named))]}
    after = replace(document, accused=tuple(named.values()))
    return after if after.accused != document.accused else None


def with_verdicts(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord]
) -> RoundDocument:
    """The document after marking accused nodes without an answer in time as lost."""
    if view.rules.answer_timeout is None or not document.accused:
        return document
    accused = _accused(document, records)
    if not accused or _too_many(document, accused):
        return document

    def is_lost(it: Accusation) -> bool:
        against = accused.get(it.node)
        if against is None or against.beat != it.beat or it.node not in view.unanswered:
            return False
        return view.unanswered[it.node] >= answered_within(view, records[it.node])

    lost = {it.node for it in document.accused if not it.lost and is_lost(it)}
    if not lost:
        return document
    named = (
        replace(accused[it.node], lost=True) if it.node in lost else it for it in document.accused
    )
    return replace(document, accused=tuple(named))


def until_a_verdict(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord]
) -> float | None:
    """Seconds until the next accused node must have answered; None: no node is accused."""
    if view.rules.answer_timeout is None or not document.accused:
        return None
    accused = _accused(document, records)
    left = [
        until_answered(view, it.node, records[it.node])
        for it in document.accused
        if not it.lost and it.node in accused and it.node in view.unanswered
    ]
    return min(left) if left and not _too_many(document, accused) else None


def lost_by_accusation(
    document: RoundDocument, records: Mapping[str, NodeRecord]
) -> dict[str, Accusation]:
    """Nodes lost by accusations. A node that beats again joins like a new node."""
    found = {}
    for it in document.accused:
        record = records.get(it.node)
        if it.lost and record is not None and record.beat <= it.beat and not record.is_over:
            found[it.node] = it
    return found


def still_accused(
    document: RoundDocument, records: Mapping[str, NodeRecord]
) -> tuple[Accusation, ...]:
    """The accusations that no heartbeat has answered yet."""
    if not document.accused:
        return ()
    return tuple(
        it
        for it in document.accused
        if (record := records.get(it.node)) is not None
        and record.beat <= it.beat
        and not record.is_over
    )


def _accused(document: RoundDocument, records: Mapping[str, NodeRecord]) -> dict[str, Accusation]:
    """The nodes that refused a neighbour's connection (first sign) and have not beaten since."""
    found: dict[str, Accusation] = {}
    signs = (
        (node, beat, by)
        for by, record in records.items()
        if record.accuses and record.incarnation == document.incarnation
        for node, beat in record.accuses
    )
    for node, beat, by in signs:
        record = records.get(node)
        if record is None or record.beat != beat or record.is_over or not record.link:
            continue
        if node != by and document.names(node):
            found.setdefault(node, Accusation(node, beat, records[by].label))
    return found


def _too_many(document: RoundDocument, accused: Mapping[str, object]) -> bool:
    gone = {*document.absent, *(it.node for it in document.accused if it.lost)}
    many = len(accused.keys() - gone)
    world = (document.ranks or document.previous_order).keys() - gone
    return many >= _FEWEST and many * _LARGE_PART > len(world)
