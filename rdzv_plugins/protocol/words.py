"""What people should know of a run: a node's remarks, each told once in its log."""

from __future__ import annotations

from collections.abc import Iterator

from rdzv_plugins.protocol.choice import Sizes
from rdzv_plugins.protocol.documents import Names, Phase, RoundDocument, labels
from rdzv_plugins.protocol.kept_out import describe_held, exclusion_of
from rdzv_plugins.protocol.links import judge, own_findings, remark, slow
from rdzv_plugins.protocol.rules import View
from rdzv_plugins.protocol.situation import is_full, unconfirmed, waits_for_a_living_round

__all__ = ["remarks"]


def remarks(view: View) -> Iterator[tuple[str, object, str]]:
    """What people should know: its kind, a key for which it is told once, and a sentence."""
    document, latest = view.document, view.latest
    if latest is not None and latest.closed:
        if document is None or not document.closed:
            yield "closed", latest.incarnation, "the run was closed while the store was away"
        elif not document.reason.endswith(f"closed by {view.record.label}"):
            # Who closes a run itself has told that.
            yield "closed", latest.incarnation, f"the run is closed: {document.reason}"
    if document is None or document.closed:
        return
    this_round = document.incarnation, document.round
    number, rules = document.round, view.rules
    if document.phase is Phase.FORMING and number > 0:
        about = "lost" if document.cause.lost else "forming"
        yield about, this_round, f"round {number} forms: {document.reason}"
    if view.unheard >= view.rules.lease and (it := view.member) and _went_on(view, document, it):
        yield (
            "two worlds",
            it.world_id,
            f"round {number} came without this node, whose workers ran on in round {it.round}: "
            f"two worlds of this run may have trained at once, for at most {view.unheard:.1f} s, "
            "in which the store accepted no heartbeat of this node",
        )
    if document.lost and document.leader == view.me:
        names = Names().plus(labels(view.records or {}, document.lost))
        text = f"round {number} goes on without {names}: lease ran out"
        yield "lost", (*this_round, document.lost), text
    exclusion = exclusion_of(document, view.record.address, view.wall)
    if view.me in document.drained:
        text = "this node was drained: the others go on without it, its agent ends with status 0"
        yield "drained", document.incarnation, text
    elif exclusion is not None:
        told = describe_held(document, exclusion, view.wall)
        text = f"{told}; this node waits meanwhile"
        yield "excluded", (document.incarnation, exclusion), text
    if waits_for_a_living_round(view) and view.leader is not None and exclusion is None:
        why = "which is full"
        if document.finishing:
            why = "whose workers are about to end"
        elif view.record.suspect:
            why = "which is not ended for a node that failed its network check"
        elif not is_full(document, Sizes.of(rules)):
            why = f"which lets newcomers in later ({view.record.policy})"
        yield (
            "spare",
            this_round,
            f"this node waits as a spare of round {number}, {why}: {document.size} of "
            f"{document.max_nodes} nodes, led by {view.leader.label}. If that is another job, give "
            "this one an --rdzv-id of its own",
        )
    evicted = document.cause.evicted
    if evicted and view.record.label in evicted and not document.names(view.me):
        yield (
            "evicted",
            this_round,
            f"round {number} goes on without this node: its agent did not ask for it in time",
        )
    if document.leader == view.me and view.records is not None and document.is_whole:
        yield from _remarks_on_the_network(view, document)
    elif said := own_findings(view.record):
        yield "network", view.record.world_id, f"the network check of this node failed: {said}"
    if document.leader == view.me:
        for record in (view.records or {}).values():
            if record.is_unfit and record.label != view.record.label:
                key = record.label, record.unfit, record.round
                text = f"{record.label} does not join: {record.unfit}"
                if record.failed:
                    text = f"{record.label} left: {record.unfit}"
                yield "unfit", key, text
            if (record.interval, record.lease) != (rules.interval, rules.lease):
                yield (
                    "settings",
                    record.label,
                    f"{record.label} beats every {record.interval:g} s with a lease of "
                    f"{record.lease:g} s, this node every {rules.interval:g} s with one of "
                    f"{rules.lease:g} s: set keep_alive_interval and keep_alive_max_attempt alike",
                )
            if record.policy != view.record.policy:
                yield (
                    "settings",
                    record.policy,
                    f"{record.label} has {record.policy or 'no such option'} in --rdzv-conf, this "
                    f"node {view.record.policy or 'none'}: set them alike on all nodes, for only "
                    "those of the node that leads have an effect",
                )


def _went_on(view: View, document: RoundDocument, member: RoundDocument) -> bool:
    """Whether the run has had a later round than ``member``, without this node."""
    if view.me in document.ranks or document.ran in (None, member.world_id):
        return False
    return document.is_of(member) or member.incarnation in view.asked_tombstones


def _remarks_on_the_network(
    view: View, document: RoundDocument
) -> Iterator[tuple[str, object, str]]:
    this_round = document.incarnation, document.round
    records = {**(view.records or {}), view.me: view.record}
    runs = document.phase is Phase.RUNNING
    if document.phase is Phase.CONFIRMING and not unconfirmed(document, records):
        if not judge(document, records, view.rules).runs:
            yield "network", this_round, remark(document, records, runs=False)
    elif runs and document.faults.links:
        yield "network", this_round, remark(document, records, runs=True)
    if runs and (late := slow(document, records)):
        yield "slow", this_round, f"round {document.round}: {late}"
