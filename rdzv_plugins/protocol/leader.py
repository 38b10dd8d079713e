"""What the leader of a run decides from the records of all nodes. Pure functions, as in `member`.

Several nodes may believe that they lead. That is safe: each decision is a compare-and-set, and only
the one that read the latest document succeeds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from rdzv_plugins.protocol.choice import Sizes, choose, world_size
from rdzv_plugins.protocol.documents import (
    Cause,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
    labels,
)
from rdzv_plugins.protocol.growth import hold, last_call
from rdzv_plugins.protocol.kept_out import (
    carried_over,
    kept_out,
    naming,
    pruned,
    until_the_first_ends,
)
from rdzv_plugins.protocol.links import (
    able_to_host,
    judge,
    naming_links,
    pause,
    still_not_to_host,
)
from rdzv_plugins.protocol.quarantine import counted, let_in, quarantined
from rdzv_plugins.protocol.ranks import old_places, order_ranks
from rdzv_plugins.protocol.roster import MISSING, members_by_their_records
from rdzv_plugins.protocol.rules import (
    Action,
    AwaitExclusions,
    Close,
    Doubt,
    ListRecords,
    Rules,
    View,
    Wait,
    Write,
)

__all__ = [
    "doubted",
    "fits",
    "has_rejoined",
    "is_done",
    "lead",
    "may_grow",
    "next_round",
    "rejoin_patience",
    "unconfirmed",
    "without",
]

# Where spares fill the round, the leader waits only this share of `Rules.rejoin` for a participant
# that does not ask for it.
_SPARES_SUFFICE = 0.1

# More than one in so many nodes, and at least so many, are a large part of the world.
_LARGE_PART, _FEWEST_DOUBTED = 3, 8
# A node is late that has been silent for half its lease, but for more than a beat takes at most.
_LATE_LEASES, _LATE_INTERVALS = 0.5, 1.25


def lead(view: View, document: RoundDocument) -> Action:
    if view.records is None:
        return ListRecords()
    records = {**view.records, view.me: view.record}
    if not document.is_whole:
        return _lead_without_roster(view, document, records)
    if (doubt := _doubt(view, document, records)) is not None:
        return doubt
    if view.carried and (after := carried_over(document, view.carried)) != document:
        return Write(after)
    if document.phase is Phase.FORMING:
        action = _lead_forming(view, document, records)
    elif document.phase is Phase.CONFIRMING:
        action = _lead_confirming(view, document, records)
    else:
        action = _lead_running(view, document, records)
    if isinstance(action, Wait):
        # Nobody rings when an exclusion ends.
        ends = until_the_first_ends(document, records, view.wall)
        if ends is not None and (action.seconds is None or ends < action.seconds):
            return Wait(ends, action.enough)
    return action


def _lead_forming(view: View, document: RoundDocument, records: Mapping[str, NodeRecord]) -> Action:
    rules = view.rules
    if 0 < rules.no_progress_rounds <= document.short_rounds:
        why = (
            f"no progress: {document.short_rounds} rounds in a row ran for less than "
            f"{rules.no_progress_uptime:g} s, the last one ended so: {document.reason}"
        )
        return Close(document, Outcome.NO_PROGRESS, why)
    live = {node for node, record in records.items() if _is_live(view, node, record)}
    if (ahead := _ahead_of(document, records, live)) is not None:
        return Write(ahead)
    out = kept_out(document, records, view.wall)
    if ordered := [node for node in document.previous if node in out]:
        return Write(_leave_out(view, document, records, ordered))
    awaited = [
        node
        for node in document.previous
        if not has_rejoined(document, records.get(node), document.round - 1)
    ]
    gone = [node for node in awaited if _is_gone(view, node, records.get(node))]
    asks = {
        node
        for node in live
        if fits(records[node], document) and records[node].asks and node not in awaited
    }
    ready, sizes = asks.difference(out), Sizes.of(rules)
    if document.faults.rounds:
        # Who was cut off is tried again once a round has run, or where the others are too few.
        well = {node for node in ready if not records[node].suspect}
        ready = well if world_size(well, records, sizes) else ready
    size = world_size(ready, records, sizes)
    enough = size > 0
    if pending := without(awaited, gone):  # Rule 5.
        patience = rejoin_patience(rules, size)
        if view.round_age >= patience:
            return Write(_evict(document, records, pending, gone))
        if gone:
            return Write(_amend(document, records, gone))
        until = (_until_lease(view, pending), patience - view.round_age)
        return Wait(min(seconds for seconds in until if seconds is not None), enough)
    # Those that are doubted, and have asked for this round already, are neither here nor gone.
    unsure = doubted(view, records)
    if size >= sizes.most:
        unsure = [node for node in unsure if node in document.previous]
    if unsure:
        if gone:
            return Write(_amend(document, records, gone))
        return Wait(_until_lease(view, unsure), enough)
    if size < sizes.most or not enough:
        # Also of those that had asked for this round: then it may wait for replacements.
        gone = [node for node in document.previous if _is_gone(view, node, records.get(node))]
        if gone:
            return Write(_amend(document, records, gone))
        if not enough:
            let = let_in(document, records, asks, ready, rules, view.wall)
            if let is not None:
                return Write(let)
        left = last_call(rules, document, size) - (view.enough_for or 0.0)
        if not enough or left > 0:
            return Wait(left if enough else None, enough)
    if document.round == 0 and view.fetches:
        return AwaitExclusions()
    named = _name_participants(view, document, records, ready)
    after = quarantined(document, named.cause, records, ready, rules, view.wall)
    # Decide again without them.
    return Write(named if after == document else after)


def _lead_without_roster(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord]
) -> Action:
    """What a new leader does whose store has lost the shards: form a round without the silent.

    Before that, each node has a lease to write its record again; with those of all, the document
    is whole.
    """
    lease = max(record.lease for record in records.values())
    if view.confirmed_silence(MISSING) < lease:
        return Wait(max(0.0, lease - view.possible_silence(MISSING)))
    known = members_by_their_records(document, records)
    shards = document.previous_roster or document.roster
    assert shards is not None
    ran = document.phase is Phase.RUNNING
    gone = [node for node in known if _said_so(records[node])]
    cause = _amended(Cause() if ran else document.cause, records, gone)
    # Of these some may have lost only their rank, and join again.
    cause = replace(cause, lost=cause.lost.and_more(max(0, shards.size - len(known))))
    known = without(known, gone)
    if document.phase is Phase.FORMING:
        return Write(replace(document, previous=known, previous_roster=None, cause=cause))
    after = next_round(view, document, (), 0, cause)
    return Write(replace(after, previous=known, roster=None))


def _doubt(view: View, document: RoundDocument, records: Mapping[str, NodeRecord]) -> Doubt | None:
    """Whom to give one more lease, since a large part of the world falls silent at once.

    The store or the load may be what is slow. If the nodes are lost, they are so all together
    when that lease ends. The others of a large part are late already when the first one's lease
    runs out; without that, the first would be taken for a single loss.
    """
    if view.until_first_lease is not None:
        return None
    fresh = [
        node
        for node in {*document.participants, *document.previous, *records} - {view.me}
        if view.confirmed_silence(node) >= view.lease(node) and _is_fresh(view, node)
    ]
    if not fresh:
        return None
    if document.phase is Phase.FORMING:
        world = {*document.previous, *(node for node in records if fits(records[node], document))}
    else:
        world = {*document.participants} - {*document.lost}
    # Old records stay, of nodes that were lost one by one.
    world = {
        node
        for node in world
        if not _said_so(records.get(node)) and (_is_fresh(view, node) or not view.is_silent(node))
    }
    late = {node for node in world if node != view.me and _is_late(view, node, records.get(node))}
    if len(late) < _FEWEST_DOUBTED or len(late) * _LARGE_PART <= len(world):
        return None
    if world.isdisjoint(fresh):
        return None
    begins = not any(view.forgiven(node) for node in late)
    nodes = sorted(node for node in late if view.forgiven(node) is None)
    # Nobody where the lease that ran out is shorter than a beat may take: that node is not late.
    return Doubt(tuple(nodes), begins, len(late), len(world)) if nodes else None


def _is_fresh(view: View, node: str) -> bool:
    """Whether the node was not doubted yet, and has not been lost for long."""
    longest = view.lease(node) + view.rules.outage
    return view.forgiven(node) is None and view.confirmed_silence(node) < longest


def _is_late(view: View, node: str, record: NodeRecord | None) -> bool:
    interval = record.interval if record is not None else view.rules.interval
    lease = view.lease(node) - view.lag
    least = max(_LATE_LEASES * lease, _LATE_INTERVALS * interval)
    return view.confirmed_silence(node) >= least


def _said_so(record: NodeRecord | None) -> bool:
    return record is not None and record.is_over


def doubted(view: View, records: Mapping[str, NodeRecord]) -> list[str]:
    """Nodes whose lease ran out, and which have one more since so many were late at once."""
    if view.until_first_lease is not None:
        return []
    return [
        node
        for node, record in records.items()
        if node != view.me
        and not _said_so(record)
        and view.forgiven(node)
        and view.lease(node) <= view.confirmed_silence(node) < view.patience(node)
    ]


def rejoin_patience(rules: Rules, size: int) -> float:
    """Seconds that a round waits for a live participant of the last one, where it has so many."""
    return rules.rejoin * (_SPARES_SUFFICE if size >= Sizes.of(rules).most else 1.0)


def _ahead_of(
    document: RoundDocument, records: Mapping[str, NodeRecord], live: Iterable[str]
) -> RoundDocument | None:
    """The document with the rounds and nodes that its writer, after an amnesia, did not know of."""
    runs = [node for node in live if _may_run(document, records[node])]
    strays = sorted({*runs} - {*document.previous, *document.evicted})
    highest = max((_round_in(document, records[node]) for node in live), default=-1)
    if strays or highest >= document.round:
        return replace(
            document,
            round=max(document.round, highest + 1),
            previous=(*document.previous, *strays),
        )
    return None


def _may_run(document: RoundDocument, record: NodeRecord) -> bool:
    """Whether the node may run in a round that nobody has ended.

    It does not in one before the last of this run, which was formed without it: it was lost, and
    the leader that knew may be so too.
    """
    ended = record.incarnation == document.incarnation and record.round < document.round - 1
    return record.status is Status.RUN and not ended


def _evict(
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    pending: Iterable[str],
    gone: Iterable[str],
) -> RoundDocument:
    """The forming round without those that did not ask for it in time, or are gone."""
    return replace(
        document,
        previous=without(document.previous, (*pending, *gone)),
        evicted=(*document.evicted, *pending),
        cause=_amended(document.cause, records, gone).plus(evicted=labels(records, pending)),
    )


def _evicted_with(view: View, document: RoundDocument, out: Iterable[str]) -> tuple[str, ...]:
    """Those that may still run, with more of them; who has left does not."""
    records = view.records or {}
    fresh = (node for node in out if not _said_so(records.get(node)))
    return (*document.evicted, *without(fresh, document.evicted))


def _leave_out(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord], ordered: Collection[str]
) -> RoundDocument:
    """The forming round without those that people took out; nobody waits for them to stop."""
    return replace(
        document,
        previous=without(document.previous, ordered),
        evicted=_evicted_with(view, document, ordered),
        cause=naming(document.cause, document, records, ordered, view.wall),
    )


def _name_participants(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord], ready: Collection[str]
) -> RoundDocument:
    """The round with its ranks, of those that are chosen; at most ``max_nodes``."""
    rules, old = view.rules, {*document.previous}
    survivors = [node for node in document.previous if node in ready]
    newcomers = order_ranks(
        (node for node in ready if node not in old), records, (), rules.rank_order
    )
    chosen = choose(document, survivors, newcomers, records, rules)
    taken = {*chosen}
    failed = [records[node].label for node in survivors if records[node].failed]
    # Nodes that had asked for this round, and were lost since.
    missing = [node for node in document.previous if _is_gone(view, node, records.get(node))]
    cause = _amended(document.cause, records, missing).plus(failed=failed)
    held = [records[node].label for node in survivors if node not in taken]
    if held or cause.held:  # Also of rounds since the last one that ran.
        cause = replace(cause, held=cause.held.without(set(labels(records, chosen))).plus(held))
    if document.round > 0:
        # The cause names every node that waited when the last round ended; some stay spares.
        spares = [records[node].label for node in newcomers if node not in taken]
        cause = replace(cause, joined=cause.joined.without(spares))
        cause = cause.plus(joined=[records[node].label for node in newcomers if node in taken])
    still_run = tuple(
        node
        for node in document.evicted
        if (record := records.get(node)) is not None
        and record.status is Status.RUN
        and _is_live(view, node, record)
    )
    document = pruned(document, records, view.wall)
    hosts = able_to_host(document, records, chosen)
    places = old_places(document, records) if rules.rank_order == "topology" else None
    return replace(
        document,
        phase=Phase.CONFIRMING,
        participants=order_ranks(chosen, hosts, document.previous, rules.rank_order, places),
        previous=(),
        evicted=still_run,
        waiting=len(ready) - len(chosen),
        cause=cause,
        grew=document.round if {*chosen} - old else document.grew,
        ran=None,
        master=None,
        faults=replace(document.faults, out=()) if document.faults.out else document.faults,
        fencing_token=_next_token(document, view.wall),
    )


def _next_token(document: RoundDocument, wall: float) -> int:
    """Larger than the last one; milliseconds, so that it is so where the store forgot that too."""
    return max(document.fencing_token + 1, int(wall * 1000))


def unconfirmed(document: RoundDocument, records: Mapping[str, NodeRecord]) -> list[str]:
    """The participants that have not confirmed their rank."""
    world_id = document.world_id
    return [
        node
        for node in document.participants
        if (record := records.get(node)) is None
        or record.status is not Status.RUN
        or record.world_id != world_id
    ]


def _lead_confirming(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord]
) -> Action:
    kept = kept_out(document, records, view.wall)
    lost, rejoined, out = _changes(view, document, records, kept)
    if lost or rejoined or out:
        # This round never ran: keep the cause of the round before it.
        cause = _amended(document.cause, records, lost)
        cause = naming(cause, document, records, out, view.wall)
        return Write(next_round(view, document, lost, 0, cause, out))
    if unconfirmed(document, records):
        return Wait(_until_lease(view, document.participants))
    judged = judge(document, records, view.rules)
    if not judged.runs:
        if (left := pause(judged.faults, view.rules) - view.document_age) > 0:
            return Wait(left)
        cause = naming_links(document.cause, judged.failed, records)
        return Write(replace(next_round(view, document, (), 0, cause), faults=judged.faults))
    master = records[document.participants[0]].master
    document = counted(document, view.rules, view.wall)
    world_id, faults = document.world_id, judged.faults
    return Write(replace(document, phase=Phase.RUNNING, ran=world_id, master=master, faults=faults))


def _lead_running(view: View, document: RoundDocument, records: Mapping[str, NodeRecord]) -> Action:
    kept = kept_out(document, records, view.wall)
    lost, rejoined, out = _changes(view, document, records, kept)
    newcomers = [
        node
        for node, record in records.items()
        if node not in document.ranks
        and node not in kept
        and _is_live(view, node, record)
        and fits(record, document)
        and record.asks
    ]
    # A node that was only cut off, and was not replaced, never stopped running.
    back = {
        node
        for node in document.lost
        if (record := records.get(node)) is not None
        and (record.status, record.world_id) == (Status.RUN, document.world_id)
        and _is_live(view, node, record)
        and (node == view.me or view.moved(node))
    }
    gone = {*lost, *document.lost} - {*rejoined, *back} - {*out}
    done = {node for node in document.participants if is_done(document, records.get(node))}
    # Once a node is done, newcomers no longer restart the others.
    present = without(document.participants, gone)
    if present and not document.resize:
        # Who was cut off comes in when a round forms anyway.
        newcomers = [node for node in newcomers if not records[node].suspect]
    sizes = Sizes.of(view.rules)
    size = 0
    if newcomers and not done:
        size = world_size([*present, *newcomers], records, sizes)
    grows = size > len(present)
    room = sizes.most - len(present)
    more = size - len(present)
    permitted = may_grow(document, records)
    held = hold(view, more, room, permitted, lost=len(gone)) if grows else None
    # What is done is not done again: a restart would wait for those nodes in vain.
    ordered = bool(out or (document.restart and not done))
    if rejoined or ordered or (lost and view.rules.restart_on_loss) or (grows and held is None):
        cause = _amended(Cause(), records, gone).plus(
            failed=[records[node].label for node in rejoined if records[node].failed],
            # A node without failed workers joins again where the store forgot its round.
            joined=[
                records[node].label
                for node in (*newcomers, *rejoined)
                if node in newcomers or not records[node].failed
            ],
        )
        cause = naming(cause, document, records, out, view.wall)
        return Write(next_round(view, document, gone | done, len(newcomers), cause, out))
    if gone != set(document.lost):
        return Write(replace(document, lost=tuple(sorted(gone))))
    if done and done >= set(document.participants) - gone:
        # They may wait in torch's exit barrier for nodes that are gone; or for each other, if the
        # store forgot who had come. An heir may have taken one that is done for lost.
        return Close(document, Outcome.SUCCEEDED, "its workers succeeded")
    if done and newcomers and not document.finishing:
        return Write(replace(document, finishing=True))
    if document.resize or document.restart:
        # The moment is over: nobody waits, or a node is done.
        return Write(replace(document, resize=False, restart=""))
    # Nothing follows from the silence of who is done.
    until = [_until_lease(view, without(present, done)), held.seconds if held is not None else None]
    return Wait(min((it for it in until if it is not None), default=None), enough=grows)


def may_grow(document: RoundDocument, records: Mapping[str, NodeRecord]) -> bool:
    """Whether workers of the round say that now is a good moment to let newcomers in."""
    return any(records[node].may_grow for node in document.participants if node in records)


def _changes(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord], kept: Collection[str]
) -> tuple[list[str], list[str], list[str]]:
    """Participants that are newly gone, that ask to join again, and that are to be kept out."""
    out = [
        node
        for node in document.participants
        if node in kept and not view.is_silent(node) and not is_done(document, records.get(node))
    ]
    lost = [
        node
        for node in document.participants
        if node not in document.lost
        and node not in out
        and _is_gone(view, node, records.get(node))
        and not is_done(document, records.get(node))
    ]
    rejoined = [
        node
        for node in document.participants
        if node not in lost
        and node not in out
        and has_rejoined(document, records.get(node), document.round)
    ]
    return lost, rejoined, out


def next_round(
    view: View,
    document: RoundDocument,
    gone: Iterable[str],
    waiting: int,
    cause: Cause,
    out: Collection[str] = (),
) -> RoundDocument:
    """The round after ``document``, without those that are gone, or that people took ``out``."""
    short_rounds = document.short_rounds
    ordered = bool(out or document.restart)
    if document.phase is Phase.RUNNING and view.rules.no_progress_rounds and not ordered:
        short = view.longest_uptime < view.rules.no_progress_uptime
        # One that ended for newcomers alone counts neither against the run nor for it.
        only_grows = cause == Cause(joined=cause.joined)
        short_rounds = short_rounds + (not only_grows) if short else 0
    if document.restart:
        cause = replace(cause, note="; ".join(filter(None, (cause.note, document.restart))))
    return replace(
        document,
        round=document.round + 1,
        phase=Phase.FORMING,
        leader=view.me,
        participants=(),
        previous=without(document.participants, (*gone, *out)),
        lost=(),
        evicted=_evicted_with(view, document, out),
        waiting=waiting,
        finishing=False,
        cause=cause,
        resize=False,
        short_rounds=short_rounds,
        restart="",
        faults=document.faults
        if document.phase is Phase.CONFIRMING
        else still_not_to_host(document.faults),
    )


def _is_live(view: View, node: str, record: NodeRecord) -> bool:
    if node == view.me:
        return True
    if record.status is Status.LEFT:
        return False
    return view.until_first_lease is not None or view.confirmed_silence(node) < view.lease(node)


def _is_gone(view: View, node: str, record: NodeRecord | None) -> bool:
    """Left, done, or silent for a lease. A record that is missing is silence, not a leave."""
    return _said_so(record) or view.is_silent(node)


def is_done(document: RoundDocument, record: NodeRecord | None) -> bool:
    """Whether the node's workers succeeded in this round; the node may have ended since."""
    if record is None or record.status is not Status.DONE:
        return False
    return record.world_id == document.world_id


def has_rejoined(document: RoundDocument, record: NodeRecord | None, ended_round: int) -> bool:
    """Whether the node asked to join after ``ended_round``; an earlier request does not count."""
    if record is None or not record.asks:
        return False
    return _round_in(document, record) >= ended_round


def _round_in(document: RoundDocument, record: NodeRecord) -> int:
    """The last round of this run in which the node was named; -1: none."""
    return record.round if record.incarnation == document.incarnation else -1


def fits(record: NodeRecord, document: RoundDocument) -> bool:
    return (record.min_nodes, record.max_nodes) == (document.min_nodes, document.max_nodes)


def _until_lease(view: View, nodes: Iterable[str]) -> float | None:
    """Seconds until the first of these leases could run out."""
    if view.until_first_lease is not None:
        return view.until_first_lease
    left = [view.patience(node) - view.possible_silence(node) for node in nodes if node != view.me]
    return max(0.0, min(left)) if left else None


def without(nodes: Iterable[str], gone: Iterable[str | None]) -> tuple[str, ...]:
    left_out = set(gone)
    return tuple(node for node in nodes if node not in left_out)


def _amended(cause: Cause, records: Mapping[str, NodeRecord], gone: Iterable[str]) -> Cause:
    """The cause with the nodes that are gone: each as lost, or as left."""
    left: list[str] = []
    silent: list[str] = []
    failed: list[str] = []
    unfit: dict[str, str] = {}
    for node in gone:
        record = records.get(node)
        if record is None or record.status is not Status.DONE:
            said_so = record is not None and record.status is Status.LEFT
            (left if said_so else silent).append(record.label if record else node)
            if record is not None and record.is_unfit:
                unfit[record.label] = record.unfit
            if said_so and record is not None and record.failed:
                failed.append(record.label)
    return cause.plus(lost=silent, left=left, failed=failed).because(unfit)


def _amend(
    document: RoundDocument, records: Mapping[str, NodeRecord], gone: Iterable[str]
) -> RoundDocument:
    """The forming round without the nodes of the last one that are gone."""
    cause = _amended(document.cause, records, gone)
    return replace(document, previous=without(document.previous, gone), cause=cause)
