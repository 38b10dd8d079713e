"""The remarks of a node for its log: what it has to tell people, each once. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from rdzv_plugins.protocol.accusations import lost_by_accusation
from rdzv_plugins.protocol.documents import Cause, Phase, RoundDocument
from rdzv_plugins.protocol.policies.kept_out import describe_in_force, exclusion_of
from rdzv_plugins.protocol.policies.network import own_findings, remark, slow, verdict_on
from rdzv_plugins.protocol.rounds import amended
from rdzv_plugins.protocol.rules import View
from rdzv_plugins.protocol.situation import has_no_room, unconfirmed, waits_for_a_living_round
from rdzv_plugins.protocol.sizes import Sizes
from rdzv_plugins.protocol.stalls import steps_of_node

Remark: TypeAlias = tuple[str, object, str, *tuple[str, ...]]
"""A remark of a node for people: kind, key (logged once), sentence, and `Tell.command`."""


def remarks(view: View) -> Iterator[Remark]:
    """The present remarks of this node."""
    yield from _of_the_end(view)
    document = view.document
    if document is not None and not document.closed:
        for row in _OF_A_LEADER if document.leader == view.me else _OF_ANY_NODE:
            yield from row(view, document)


def _of_the_end(view: View) -> Iterator[Remark]:
    document, latest = view.document, view.latest
    if latest is None or not latest.closed:
        return
    if document is None or not document.closed:
        yield "closed", latest.incarnation, "the run was closed while the store was away"
    elif not document.reason.endswith(f"closed by {view.record.label}"):
        # A node that closed the run itself has already logged its end.
        yield "closed", latest.incarnation, f"the run is closed: {document.reason}"


def _of_the_round(view: View, document: RoundDocument) -> Iterator[Remark]:
    this_round, number = (document.incarnation, document.round), document.round
    if document.phase is Phase.FORMING and number > 0:
        about = "lost" if document.cause.lost else "forming"
        yield about, this_round, f"round {number} forms: {document.reason}"
    records = view.records
    if document.absent and document.leader == view.me and records is not None:
        cause = amended(Cause(), records, document.absent, lost_by_accusation(document, records))
        text = f"round {number} goes on (restart_on_loss=false): {cause}"
        yield "lost", (*this_round, document.absent), text
    evicted = document.cause.evicted
    if evicted and view.record.label in evicted and not document.names(view.me):
        text = f"round {number} goes on without this node: its agent did not ask for it in time"
        yield "evicted", this_round, text


def _of_two_worlds(view: View, document: RoundDocument) -> Iterator[Remark]:
    was = view.member
    if was is None or view.unheard < view.rules.lease or not _went_on(view, document, was):
        return
    yield (
        "two worlds",
        was.world_id,
        f"round {document.round} came without this node, whose workers ran on in round "
        f"{was.round}: two worlds of this run may have trained at once, for at most "
        f"{view.unheard:.1f} s, in which the store accepted no heartbeat of this node",
    )


def _went_on(view: View, document: RoundDocument, member: RoundDocument) -> bool:
    """Whether the run has had a later round than ``member``, without this node."""
    if view.me in document.ranks or document.ran in (None, member.world_id):
        return False
    return document.is_of(member) or member.incarnation in view.without_tombstone


def _of_orders(view: View, document: RoundDocument) -> Iterator[Remark]:
    exclusion = exclusion_of(document, view.record, view.wall)
    if view.me in document.drained:
        why = f" ({document.drain_why})" if document.drain_why else ""
        text = (
            f"this node was drained{why}: the others go on without it, its agent ends with status 0"
        )
        yield "drained", document.incarnation, text
    elif exclusion is not None:
        text = f"{describe_in_force(document, exclusion, view.wall)}; this node waits meanwhile"
        yield "excluded", (document.incarnation, exclusion), text


def _of_a_spare(view: View, document: RoundDocument) -> Iterator[Remark]:
    excluded = exclusion_of(document, view.record, view.wall) is not None
    if excluded or view.leader is None or not waits_for_a_living_round(view):
        return
    why = "which is full"
    if document.finishing:
        why = "whose workers are about to end"
    elif view.record.was_at_fault:
        why = "which is not ended for a node that failed its network check"
    elif not has_no_room(document, Sizes.of(view.rules)):
        why = f"which lets newcomers in later ({view.record.run_options})"
    yield (
        "spare",
        (document.incarnation, document.round),
        f"this node waits as a spare of round {document.round}, {why}: {document.size} of "
        f"{document.max_nodes} nodes, led by {view.leader.label}. If that is another job, give "
        "this one an --rdzv-id of its own",
    )


def _of_stalls(view: View, document: RoundDocument) -> Iterator[Remark]:
    found = steps_of_node(view.record)
    if found is not None and found.stalled and view.record.world_id == document.world_id:
        yield "stalled", (document.world_id, found.step), str(found)


def _of_the_network(view: View, document: RoundDocument) -> Iterator[Remark]:
    if document.leader != view.me or view.records is None or not document.is_whole:
        if said := own_findings(view.record):
            yield "network", view.record.world_id, f"the network check of this node failed: {said}"
        return
    this_round = document.incarnation, document.round
    records = {**view.records, view.me: view.record}
    runs = document.phase is Phase.RUNNING
    if document.phase is Phase.CONFIRMING and not unconfirmed(document, records):
        if not verdict_on(document, records).runs:
            yield "network", this_round, remark(document, records, runs=False)
    elif runs and document.faults.links:
        yield "network", this_round, remark(document, records, runs=True)
    if runs and (late := slow(document, records)):
        yield "slow", this_round, f"round {document.round}: {late}"


def _of_quarantines(view: View, document: RoundDocument) -> Iterator[Remark]:
    for exclusion in document.quarantined:
        told = describe_in_force(document, exclusion, view.wall)
        text = f"{told}; rdzv include ends it, and quarantine_after=0 turns quarantine off"
        yield "quarantine", (document.incarnation, exclusion), text, "include", exclusion.host


def _of_other_nodes(view: View, document: RoundDocument) -> Iterator[Remark]:
    rules = view.rules
    for record in (view.records or {}).values():
        if record.is_unfit and record.label != view.record.label:
            text = f"{record.label} does not join: {record.unfit}"
            if record.failed:
                text = f"{record.label} left: {record.unfit}"
            yield "unfit", (record.label, record.unfit, record.round), text
        if (record.interval, record.lease) != (rules.interval, rules.lease):
            yield (
                "settings",
                record.label,
                f"{record.label} beats every {record.interval:g} s with a lease of "
                f"{record.lease:g} s, this node every {rules.interval:g} s with one of "
                f"{rules.lease:g} s: set keep_alive_interval and keep_alive_max_attempt alike",
            )
        if record.run_options != view.record.run_options:
            yield (
                "settings",
                record.run_options,
                f"{record.label} has {record.run_options or 'no such option'} in --rdzv-conf, this "
                f"node {view.record.run_options or 'none'}: set them alike on all nodes, for only "
                "those of the node that leads have an effect",
            )


_Row: TypeAlias = Callable[[View, RoundDocument], Iterator[Remark]]
_OF_ANY_NODE: tuple[_Row, ...] = (
    _of_the_round,
    _of_two_worlds,
    _of_orders,
    _of_a_spare,
    _of_stalls,
    _of_the_network,
)
_OF_A_LEADER: tuple[_Row, ...] = (*_OF_ANY_NODE, _of_quarantines, _of_other_nodes)
