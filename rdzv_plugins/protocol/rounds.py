"""How one round document follows from another: the next round, who is left out, who is named."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from rdzv_plugins.protocol import policies
from rdzv_plugins.protocol.documents import (
    Accusation,
    Cause,
    Names,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
    labels,
)
from rdzv_plugins.protocol.policies.kept_out import carried_over
from rdzv_plugins.protocol.policies.policy import Reason
from rdzv_plugins.protocol.roster import members_by_their_records
from rdzv_plugins.protocol.rules import View
from rdzv_plugins.protocol.situation import Situation, round_in, without

NO_ACCUSATIONS: Mapping[str, Accusation] = {}


def founded(view: View, note: str) -> RoundDocument:
    """The document of a new run, which this node leads."""
    return RoundDocument(
        incarnation=view.fresh,
        round=0,
        phase=Phase.FORMING,
        leader=view.me,
        min_nodes=view.rules.min_nodes,
        max_nodes=view.rules.max_nodes,
        cause=Cause(note=note),
        # In milliseconds, so that a later run of the id has a greater edition.
        edition=int(view.wall * 1000) if view.rules.sealed else 0,
    )


def next_round(
    view: View,
    document: RoundDocument,
    gone: Iterable[str],
    waiters: int,
    cause: Cause,
    out: Collection[str] = (),
) -> RoundDocument:
    """The round after ``document``, without nodes that are gone, or kept ``out``."""
    if document.restart:
        cause = replace(cause, note="; ".join(filter(None, (cause.note, document.restart))))
    return replace(
        document,
        round=document.round + 1,
        phase=Phase.FORMING,
        leader=view.me,
        participants=(),
        previous=without(document.participants, (*gone, *out)),
        absent=(),
        still_running=_still_running_with(document, view.records or {}, out),
        waiters=waiters,
        finishing=False,
        cause=cause,
        resize=False,
        restart="",
        saving=None,
    )


def caught_up(at: Situation) -> RoundDocument | None:
    """The document with rounds and nodes that a forgetful store lost; None: it lacks none."""
    document, records = at.document, at.records
    strays = {node for node in at.live if _may_run(document, records[node])}
    strays -= {*document.previous, *document.still_running}
    highest = max((round_in(document, records[node]) for node in at.live), default=-1)
    if not strays and highest < document.round:
        return None
    return replace(
        document,
        round=max(document.round, highest + 1),
        previous=(*document.previous, *sorted(strays)),
    )


def _may_run(document: RoundDocument, record: NodeRecord) -> bool:
    """Whether the node may run in a round that no node has ended.

    A node of an earlier round than the last does not: the last round formed without it.
    """
    ended = record.incarnation == document.incarnation and record.round < document.round - 1
    return record.status is Status.RUN and not ended


def evicting(at: Situation, gone: Iterable[str]) -> RoundDocument:
    """The forming round without nodes that are gone, or did not ask for it in time."""
    document, records = at.document, at.records
    cause = amended(document.cause, records, gone, at.by_accusation)
    return replace(
        document,
        previous=without(document.previous, (*at.awaited, *gone)),
        still_running=(*document.still_running, *at.awaited),
        cause=cause.plus(evicted=labels(records, at.awaited)),
    )


def leaving_out(at: Situation, out: Collection[str]) -> RoundDocument:
    """The forming round without nodes that are kept out; it does not wait for them to stop."""
    document, records = at.document, at.records
    return replace(
        document,
        previous=without(document.previous, out),
        still_running=_still_running_with(document, records, out),
        cause=naming(document.cause, at, out),
    )


def without_the_gone(at: Situation, gone: Iterable[str]) -> RoundDocument:
    """The forming round without gone participants of the last round."""
    document = at.document
    cause = amended(document.cause, at.records, gone, at.by_accusation)
    return replace(document, previous=without(document.previous, gone), cause=cause)


def without_roster(view: View, at: Situation) -> RoundDocument:
    """The round of the nodes that wrote their records again, after the store lost its roster."""
    document, records = at.document, at.records
    known = members_by_their_records(document, records)
    shards = document.previous_roster or document.roster
    assert shards is not None
    gone = [node for node in known if records[node].is_over]
    ran = document.phase is Phase.RUNNING
    cause = amended(Cause() if ran else document.cause, records, gone)
    # Nodes that the cause calls lost are not in this roster, though they may be back.
    of_it = [node for node in known if records[node].label not in cause.lost]
    # Some of these nodes may have lost only their rank, and join again.
    cause = replace(cause, lost=cause.lost.and_more(max(0, shards.size - len(of_it))))
    known = without(known, gone)
    if document.phase is Phase.FORMING:
        return replace(document, previous=known, previous_roster=None, cause=cause)
    after = next_round(view, document, (), 0, cause)
    return replace(after, previous=known, roster=None)


def naming_participants(at: Situation) -> RoundDocument:
    """The round with the ranks of the chosen nodes."""
    document, records, ready = at.document, at.records, at.ready
    old = {*document.previous}
    survivors = [node for node in document.previous if node in ready]
    newcomers = [node for node in ready if node not in old]
    chosen = tuple(policies.chosen(at))
    taken = {*chosen}
    failed = [records[node].label for node in survivors if records[node].failed]
    # `Situation.previous_gone` includes nodes that had asked for this round and were lost since.
    cause = _without_counts(document)
    cause = amended(cause, records, at.previous_gone, at.by_accusation).plus(failed=failed)
    surplus = [records[node].label for node in survivors if node not in taken]
    if surplus or cause.surplus:  # cause.surplus is from rounds that never ran.
        cause = replace(
            cause, surplus=cause.surplus.without(set(labels(records, chosen))).plus(surplus)
        )
    if document.round > 0:
        # The cause names all nodes that waited when the last round ended; some stay spares.
        spares = [records[node].label for node in newcomers if node not in taken]
        cause = replace(cause, joined=cause.joined.without(spares))
        cause = cause.plus(joined=[records[node].label for node in newcomers if node in taken])
    still_running = tuple(
        node
        for node in document.still_running
        if node in at.live and records[node].status is Status.RUN
    )
    return replace(
        document,
        phase=Phase.CONFIRMING,
        participants=chosen,
        previous=(),
        still_running=still_running,
        waiters=len(ready) + len(at.not_admitted) - len(chosen),
        cause=cause,
        grew=document.round if taken - old else document.grew,
        ran=None,
        # Fencing token: in milliseconds, so that it grows even if the store forgot the last token.
        fencing_token=max(document.fencing_token + 1, int(at.wall * 1000)),
    )


def _without_counts(document: RoundDocument) -> Cause:
    """The cause; after a round that ran, without counts that `naming_participants` adds again."""
    cause = document.cause
    if document.ran is None:
        return cause
    return replace(cause, joined=Names(cause.joined.first), failed=Names(cause.failed.first))


def naming(cause: Cause, at: Situation, nodes: Collection[str]) -> Cause:
    """The cause with these nodes that are kept out, and the reasons."""
    reasons: dict[str, Reason] = {node: at.kept_out[node] for node in nodes}
    if not reasons:
        return cause
    why = sorted({it.why for it in reasons.values()})
    cause = replace(cause, why=", ".join(dict.fromkeys(filter(None, (cause.why, *why)))))
    for field in dict.fromkeys(filter(None, (it.cause for it in reasons.values()))):
        of_it = [node for node, it in reasons.items() if it.cause == field]
        cause = cause.plus(**{field: labels(at.records, of_it)})
    return cause


def with_orders_of(document: RoundDocument, stored: RoundDocument) -> RoundDocument:
    """The document to write over an older one, with the orders that the older one holds."""
    fresh = (node for node in stored.drained if node not in document.drained)
    return replace(
        carried_over(replace(document, excluded=stored.excluded), document.excluded),
        drained=(*document.drained, *fresh),
        drain_why=document.drain_why or stored.drain_why,
        restart=document.restart or stored.restart,
        resize=document.resize or stored.resize,
    )


def amended(
    cause: Cause,
    records: Mapping[str, NodeRecord],
    gone: Iterable[str],
    by_accusation: Mapping[str, Accusation] = NO_ACCUSATIONS,
) -> Cause:
    """The cause with the gone nodes as lost or left; ``by_accusation``: see `Situation`."""
    ended: dict[str, Accusation] = {}
    left: list[str] = []
    silent: list[str] = []
    failed: list[str] = []
    unfit: dict[str, str] = {}
    for node in gone:
        record = records.get(node)
        if record is None or record.status is not Status.DONE:
            said_so = record is not None and record.status is Status.LEFT
            (left if said_so else silent).append(record.label if record else node)
            if record is not None and node in by_accusation and not said_so:
                ended[record.label] = by_accusation[node]
            if record is not None and record.is_unfit:
                unfit[record.label] = record.unfit
            if said_so and record is not None and record.failed:
                failed.append(record.label)
    # Sorted, because a cause keeps only some of many names: every leader keeps the same names.
    cause = cause.plus(lost=silent, left=left, failed=failed)
    return cause.because(dict(sorted(unfit.items()))).with_accusers(dict(sorted(ended.items())))


def _still_running_with(
    document: RoundDocument, records: Mapping[str, NodeRecord], out: Iterable[str]
) -> tuple[str, ...]:
    """``still_running``, and the ``out`` nodes that may still run."""
    fresh = (node for node in out if node not in records or not records[node].is_over)
    return (*document.still_running, *without(fresh, document.still_running))
