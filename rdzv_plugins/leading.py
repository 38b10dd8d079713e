"""What the leader of a run decides from the records of all nodes. As pure as `protocol`.

Any number of nodes may believe that they lead: each decision is a compare-and-set, and only the one
whose view was the latest is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rdzv_plugins.decisions import Action, ListRecords, View, Wait, Write
from rdzv_plugins.documents import NodeRecord, Phase, RoundDocument, Wants
from rdzv_plugins.ranks import order_ranks

__all__ = ["lead", "next_round", "without"]

_NAMES_IN_A_REASON = 4


def lead(view: View, document: RoundDocument) -> Action:
    if view.records is None:
        return ListRecords()
    records = {**view.records, view.me: view.record}
    if document.phase is Phase.FORMING:
        return _lead_forming(view, document, records)
    if document.phase is Phase.CONFIRMING:
        return _lead_confirming(view, document, records)
    return _lead_running(view, document, records)


def _lead_forming(view: View, document: RoundDocument, records: Mapping[str, NodeRecord]) -> Action:
    rules, previous = view.rules, set(document.previous)
    live = {node for node, record in records.items() if _is_live(view, node, record)}
    strays = sorted(
        node for node in live if records[node].wants is Wants.RUN and node not in previous
    )
    highest = max((records[node].round for node in live), default=-1)
    if strays or highest >= document.round:
        # Somebody runs in a round that this document, written after an amnesia, knows nothing of.
        return Write(
            replace(
                document,
                round=max(document.round, highest + 1),
                previous=(*document.previous, *strays),
            )
        )
    pending = [
        node
        for node in document.previous
        if not _is_gone(view, node, records.get(node))
        and not _has_rejoined(records.get(node), document.round - 1)
    ]
    ready = {
        node
        for node in live
        if _fits(records[node], document)
        and records[node].wants in (Wants.JOIN, Wants.SPARE)
        and (node not in previous or _has_rejoined(records[node], document.round - 1))
    }
    enough = len(ready) >= rules.min_nodes
    if pending:  # Rule 5.
        return Wait(_until_lease(view, pending), enough)
    last_call = view.minimum_age or 0.0
    if len(ready) < rules.max_nodes and not (enough and last_call >= rules.last_call):
        return Wait(rules.last_call - last_call if enough else None, enough)
    survivors = [node for node in document.previous if node in ready]
    newcomers = order_ranks(
        (node for node in ready if node not in previous), records, (), rules.rank_order
    )
    chosen = [*survivors, *newcomers][: rules.max_nodes]
    reason = document.reason
    if document.round > 0 and newcomers and "joined" not in reason:
        joined = _listed(records[node].label for node in newcomers if node in chosen)
        reason = f"{reason}; {joined} joined" if joined else reason
    return Write(
        replace(
            document,
            phase=Phase.CONFIRMING,
            participants=order_ranks(chosen, records, document.previous, rules.rank_order),
            previous=(),
            waiting=len(ready) - len(chosen),
            reason=reason,
            ran=None,
            master=None,
        )
    )


def _lead_confirming(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord]
) -> Action:
    lost, rejoined = _changes(view, document, records)
    if lost or rejoined:
        reason = _reason(view, records, lost, rejoined, [])
        return Write(next_round(view, document, lost, 0, reason))
    naming = document.naming
    missing = [
        node
        for node in document.participants
        if (record := records.get(node)) is None
        or record.wants is not Wants.RUN
        or record.naming != naming
    ]
    if missing:
        return Wait(_until_lease(view, document.participants))
    master = records[document.participants[0]].master
    return Write(replace(document, phase=Phase.RUNNING, ran=naming, master=master))


def _lead_running(view: View, document: RoundDocument, records: Mapping[str, NodeRecord]) -> Action:
    lost, rejoined = _changes(view, document, records)
    newcomers = [
        node
        for node, record in records.items()
        if node not in document.ranks
        and _is_live(view, node, record)
        and _fits(record, document)
        and record.wants in (Wants.JOIN, Wants.SPARE)
    ]
    # Who was only out of reach, and has not been replaced, has never stopped running.
    back = {
        node
        for node in document.lost
        if (record := records.get(node)) is not None
        and (record.wants, record.naming) == (Wants.RUN, document.naming)
        and _is_live(view, node, record)
        and (node == view.me or view.moved(node))
    }
    gone = {*lost, *document.lost} - {*rejoined, *back}
    room = document.max_nodes - len(document.participants) + len(gone)
    if rejoined or (lost and view.rules.restart_on_loss) or (newcomers and room > 0):
        reason = _reason(view, records, lost, rejoined, newcomers)
        return Write(next_round(view, document, [*gone], len(newcomers), reason))
    if gone != set(document.lost):
        return Write(replace(document, lost=tuple(sorted(gone))))
    present = [node for node in document.participants if node not in gone]
    return Wait(_until_lease(view, present))


def _changes(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord]
) -> tuple[list[str], list[str]]:
    """Participants that are gone (and not known to be), and those that ask to join again."""
    lost = [
        node
        for node in document.participants
        if node not in document.lost and _is_gone(view, node, records.get(node))
    ]
    rejoined = [
        node
        for node in document.participants
        if node not in lost and _has_rejoined(records.get(node), document.round)
    ]
    return lost, rejoined


def next_round(
    view: View, document: RoundDocument, gone: Iterable[str], waiting: int, reason: str
) -> RoundDocument:
    return replace(
        document,
        round=document.round + 1,
        phase=Phase.FORMING,
        leader=view.me,
        participants=(),
        previous=without(document.participants, gone),
        lost=(),
        waiting=waiting,
        reason=reason,
    )


def _is_live(view: View, node: str, record: NodeRecord) -> bool:
    if node == view.me:
        return True
    return record.wants is not Wants.LEFT and view.age(node) < view.rules.lease


def _is_gone(view: View, node: str, record: NodeRecord | None) -> bool:
    """Left, or silent for a lease. A record that is missing counts as silence, not as a leave."""
    if node == view.me:
        return False
    if record is not None and record.wants is Wants.LEFT:
        return True
    return view.age(node) >= view.rules.lease


def _has_rejoined(record: NodeRecord | None, ended_round: int) -> bool:
    """Whether the node asked to join after ``ended_round``; an older request does not count."""
    if record is None or record.wants not in (Wants.JOIN, Wants.SPARE):
        return False
    return record.round >= ended_round


def _fits(record: NodeRecord, document: RoundDocument) -> bool:
    return (record.min_nodes, record.max_nodes) == (document.min_nodes, document.max_nodes)


def _until_lease(view: View, nodes: Iterable[str]) -> float | None:
    """Seconds until the first of these leases could run out."""
    left = [view.rules.lease - view.silence(node) for node in nodes if node != view.me]
    return max(0.0, min(left)) if left else None


def without(nodes: Iterable[str], gone: Iterable[str | None]) -> tuple[str, ...]:
    left_out = set(gone)
    return tuple(node for node in nodes if node not in left_out)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMES_IN_A_REASON])
    more = len(ordered) - _NAMES_IN_A_REASON
    return f"{shown} and {more} more" if more > 0 else shown


def _reason(
    view: View,
    records: Mapping[str, NodeRecord],
    lost: Iterable[str],
    rejoined: Iterable[str],
    newcomers: Iterable[str],
) -> str:
    left: list[str] = []
    silent: list[str] = []
    for node in lost:
        record = records.get(node)
        name = record.label if record else node
        (left if record is not None and record.wants is Wants.LEFT else silent).append(name)
    parts = []
    if silent:
        parts.append(f"lost {_listed(silent)}: lease ran out")
    if left:
        parts.append(f"{_listed(left)} left")
    if again := [records[node].label for node in rejoined]:
        parts.append(f"{_listed(again)} joined again (its workers failed)")
    if new := [records[node].label for node in newcomers]:
        parts.append(f"{_listed(new)} joined")
    return "; ".join(parts)
