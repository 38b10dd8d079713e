"""What a node decides from what it knows. No I/O, no clock, no thread.

`decide` is a pure function. `node.py` calls it and carries out its decisions; the simulator and the
handler run both unchanged. The numbers of rules are those of ``docs/design.md``.

A round goes forming -> confirming -> running. The phase confirming exists because torch's agent,
once it has its rank, waits for a message from every other agent. If a participant dies while the
round forms, the protocol must notice before it releases any agent; torch would need minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec.structs import replace

from rdzv_plugins.protocol.choice import Sizes
from rdzv_plugins.protocol.documents import (
    Cause,
    Names,
    Phase,
    RoundDocument,
    Status,
    labels,
)
from rdzv_plugins.protocol.growth import holds_newcomers
from rdzv_plugins.protocol.kept_out import describe_held, exclusion_of, with_orders_of
from rdzv_plugins.protocol.leader import fits, lead, next_round, unconfirmed, without
from rdzv_plugins.protocol.links import judge, own_findings, remark, slow
from rdzv_plugins.protocol.roster import MISSING
from rdzv_plugins.protocol.rules import (
    Abdicate,
    Action,
    AskTombstone,
    Confirm,
    Fail,
    Failure,
    ListRecords,
    Rules,
    SetRecord,
    Start,
    View,
    Wait,
    Write,
)

__all__ = ["decide", "nodes_waiting", "remarks", "waits_for_a_living_round"]

# How long each heir of the leader waits for the heir before it: many times a compare-and-set.
_TURN_SECONDS = 0.05

# For more nodes than any run has: the number stands in the store and is not ours to trust.
_STEEPEST = 30.0


def nodes_waiting(view: View) -> int:
    """What ``num_nodes_waiting()`` returns: above 0 tells the agent to join again."""
    document, member, latest = view.document, view.member, view.latest
    if view.joining or member is None or latest is None:
        return 0
    if latest.is_of(member) and latest.closed:
        # An agent gave up. The workers of this node may wait for its workers for ever.
        return int(latest.outcome is not None and latest.outcome.ends_workers)
    if latest.closed:
        # Another run of the id took the place of this node's, and is over.
        return int(member.incarnation in view.asked_tombstones)
    if document is None or document.closed:
        return 0
    if not document.is_of(member):
        return int(member.incarnation in view.asked_tombstones)
    if document.place < latest.place:
        return 0  # The store forgot; the nodes of the living round write it back.
    if document.round > member.round or document.world_id != member.world_id:
        return max(1, document.waiting)
    return 0


def waits_for_a_living_round(view: View) -> bool:
    """Whether this node is a spare of a round that runs, of live nodes and with a live leader."""
    document = view.document
    if not view.joining or document is None or document.phase is not Phase.RUNNING:
        return False
    if document.has_lost_all:
        return False
    if view.record.status is not Status.SPARE or view.me in document.ranks:
        return False
    leader = document.leader
    return leader is not None and (
        leader == view.me or view.confirmed_silence(leader) < view.lease(leader)
    )


def decide(view: View) -> Action:
    """What this node does next."""
    document, latest = view.document, view.latest
    if view.joining and (mine := _confirmed_and_released(view)) is not None:
        return Start(mine)
    if latest is not None and latest.closed:
        if view.record.status is Status.RUN and _is_strange(view, latest):
            return AskTombstone(str(view.own))
        return _on_closed(view)
    if view.record.status is Status.LEFT:
        return _stay_out(view)
    if document is not None and _is_strange(view, document):
        return AskTombstone(str(view.own))
    if _is_behind(document, latest):
        return _write_back(view)
    assert document is not None
    if view.joining and _is_drained(view, document):
        return Fail(Failure.DRAINED)
    if view.cannot_list:
        # Its heartbeats may still arrive, so that no other node finds it dead.
        return Abdicate(replace(document, leader=None))
    if view.joining:
        action = _take_part(view, document)
        if view.checks and isinstance(action, Confirm):
            # What it waits for may never come: rank 0 may be dead, or the leader.
            meanwhile = _look_after_the_run(view, document)
            if isinstance(meanwhile, Wait):
                return Confirm(action.document, action.is_master, meanwhile.seconds)
            return meanwhile
        if action is not None:
            return action
    return _look_after_the_run(view, document)


def _look_after_the_run(view: View, document: RoundDocument) -> Action:
    if document.leader == view.me:
        return lead(view, document)
    return _watch_leader(view, document)


def _confirmed_and_released(view: View) -> RoundDocument | None:
    """The round that this node confirmed, once it has run.

    Also if the round ended, or the run was closed, before this node saw it run: the agents of the
    other nodes were released and wait for this node's agent.
    """
    confirmed, latest = view.confirmed, view.latest
    if view.record.status is not Status.RUN or confirmed is None or latest is None:
        return None
    if latest.ran != confirmed.world_id:
        return None
    # The token of the round that ran: it may have been named twice, in a store that forgot.
    return replace(
        confirmed,
        phase=Phase.RUNNING,
        ran=latest.ran,
        master=latest.master,
        fencing_token=latest.fencing_token,
    )


def _stay_out(view: View) -> Action:
    """What a node does that asks for no round.

    One that is unfit beats, so that it must give up the lead, and must hear of its run's end.
    """
    document, latest = view.document, view.latest
    if not view.record.is_unfit:
        return Wait()
    if latest is None:
        return Wait()
    if document is None or _is_behind(document, latest):
        # The others write it back, unless the run has ended.
        asked = latest.incarnation in view.asked_tombstones
        return Wait() if asked else AskTombstone(latest.incarnation)
    if document.leader == view.me and not document.closed:
        return Abdicate(replace(document, leader=None), fails=False)
    # It may never be fit again, to ask for a round and hear of it then.
    return Fail(Failure.DRAINED) if view.me in document.drained else Wait()


def _on_closed(view: View) -> Action:
    record, latest = view.record, view.latest
    if not view.joining and not record.is_unfit:
        return Wait()
    # Who was in the run, and is left out of it since its check failed, ends as a spare does.
    was_in_it = record.is_unfit and latest is not None and view.own == latest.incarnation
    spare = record.status is Status.SPARE or was_in_it
    return Fail(Failure.SPARE_CLOSED if spare else Failure.CLOSED)


def _is_strange(view: View, document: RoundDocument) -> bool:
    """Whether the document is of another run, and this node has not asked if its own has ended."""
    own = view.own
    return own not in (None, document.incarnation) and own not in view.asked_tombstones


def _is_behind(document: RoundDocument | None, latest: RoundDocument | None) -> bool:
    """Whether the store has no document, or an older one than this node remembers."""
    if document is None or latest is None:
        return True
    if not document.is_of(latest):
        return True  # A run that is over stands in the place of a living one: see Observer.adopt.
    return document.place < latest.place


def _write_back(view: View) -> Action:
    """Rule 12: found a run in a new store; in one that forgot, restore the latest document."""
    latest = view.latest
    if latest is None:
        if not view.joining:
            return Wait()
        return _found(view, "first round")
    # The leader first; then the others in turn, in case the leader is gone too.
    patience = 0.0 if latest.leader == view.me else _spread(view, latest)
    if view.document_age < patience:
        return Wait(patience - view.document_age)
    if latest.incarnation not in view.asked_tombstones:
        # The document may have been swept because its run ended.
        return AskTombstone(latest.incarnation)
    if view.document is not None and view.document.is_of(latest):
        latest = with_orders_of(latest, view.document)
    return Write(replace(latest, leader=view.me))


def _is_drained(view: View, document: RoundDocument) -> bool:
    """Whether a person took this node out; not while others may count on a rank of it."""
    if view.me not in document.drained:
        return False
    return document.phase is not Phase.CONFIRMING or view.me not in document.ranks


def _take_part(view: View, document: RoundDocument) -> Action | None:
    """What a node that wants to be in a round does, whether it leads or not."""
    rules = view.rules
    if (document.min_nodes, document.max_nodes) != (rules.min_nodes, rules.max_nodes):
        return _on_mismatch(view, document)
    # A node that asked for a round of another run since then has the rank to confirm again. One
    # that confirmed it is in the round, also if the store has lost the shard that says so.
    runs = view.record.status is Status.RUN
    confirmed = runs and view.record.world_id == document.world_id
    if view.me in document.ranks and not confirmed:
        action = _on_rank(view, document)
        if action is not None:
            return action
    return _ask(view, document, confirmed)


def _on_rank(view: View, document: RoundDocument) -> Action | None:
    """What a node does that has a rank and has not confirmed it."""
    if view.record.asks and _last_round(view, document) >= document.round:
        return None  # It asks for a later round.
    given = view.given.get(document.incarnation, -1)
    if given >= document.round:
        # It ran in this round, and since then in another run: the store forgot one, then the other.
        return SetRecord(Status.JOIN, document.incarnation, given)
    if document.phase is Phase.CONFIRMING:
        return Confirm(document, document.ranks[view.me] == 0)
    # The round ran without this node, in a store that forgot.
    return SetRecord(Status.JOIN, document.incarnation, document.round)


def _ask(view: View, document: RoundDocument, confirmed: bool) -> Action | None:
    """What a node does that has no rank to confirm: say that it waits, and for what."""
    record, last = view.record, _last_round(view, document)
    judged = record.status is Status.RUN and last == document.round - 1
    if document.phase is Phase.FORMING and judged and document.faults.why_out(view.me):
        return Fail(Failure.CUT_OFF)
    if document.phase is Phase.FORMING and view.me in document.old_ranks:
        # It had a rank in a round that never ran, or that it never saw: say that it is not in it.
        if not record.asks or last < document.round - 1:
            round_ = max(last, document.round - 1)
            return SetRecord(Status.JOIN, document.incarnation, round_)
    elif record.status is Status.RUN and not confirmed:
        return SetRecord(Status.JOIN, record.incarnation, record.round)
    waits = record.status is Status.JOIN and document.phase is Phase.RUNNING
    if waits and view.me not in document.ranks and not _has_room(view, document):
        return SetRecord(Status.SPARE, record.incarnation, record.round, ring=False)
    return None


def _has_room(view: View, document: RoundDocument) -> bool:
    """Whether a round that runs lets this node in soon, as far as this node can tell."""
    if is_full(document, view.rules) or document.finishing or view.record.suspect:
        return False
    excluded = exclusion_of(document, view.record.address, view.wall) is not None
    return not excluded and not holds_newcomers(view.rules)


def is_full(document: RoundDocument, rules: Rules) -> bool:
    """Whether the round has as many nodes as it can have."""
    return document.size - len(document.lost) >= Sizes.of(rules).most


def _last_round(view: View, document: RoundDocument) -> int:
    """The last round of this run in which this node had a rank; -1: none."""
    return view.record.round if view.record.incarnation == document.incarnation else -1


def _on_mismatch(view: View, document: RoundDocument) -> Action:
    """Refuse to join a run of other ``--nnodes``; found a new run if all its nodes are gone."""
    if view.records is None:
        return ListRecords()
    holders = {*(document.participants or document.previous), document.leader}
    if not document.is_whole:
        # Anybody may be one of its nodes.
        holders |= {node for node, it in view.records.items() if fits(it, document)} | {MISSING}
    holders -= {view.me, None}
    if any(view.moved(str(node)) for node in holders):
        return Fail(Failure.MISMATCH)
    patience = view.share * view.rules.interval
    if not holders and view.document_age < view.rules.lease + patience:
        return Wait(view.rules.lease + patience - view.document_age)
    left = {node for node, record in view.records.items() if record.status is Status.LEFT}
    alive = [
        node
        for node in map(str, holders - left)
        if view.confirmed_silence(node) < view.lease(node) + patience
    ]
    if alive:
        return Wait(
            max(0.0, min(view.lease(n) + patience - view.possible_silence(n) for n in alive))
        )
    return _found(view, "resubmitted with other --nnodes")


def _found(view: View, note: str) -> Write:
    """Begin a run, with this node as its leader."""
    return Write(
        RoundDocument(
            incarnation=view.fresh,
            round=0,
            phase=Phase.FORMING,
            leader=view.me,
            min_nodes=view.rules.min_nodes,
            max_nodes=view.rules.max_nodes,
            cause=Cause(note=note),
        )
    )


def _watch_leader(view: View, document: RoundDocument) -> Action:
    """Rule 4: take over from a leader that left, whose beat stopped, or that does not lead."""
    leader = document.leader
    if leader is None:
        if view.document_age < (turn := _turn(view, document)):
            return Wait(turn - view.document_age)
        return Write(replace(document, leader=view.me))
    lease = view.lease(leader)
    # The leader's next heartbeat carries its count of listings: an interval later than they happen.
    idle = lease + (view.leader.interval if view.leader else view.rules.interval)
    if view.confirmed_silence(leader) < lease and view.confirmed_idleness < idle:
        return Wait(
            max(0.0, min(lease - view.possible_silence(leader), idle - view.possible_idleness))
        )
    turn = _turn(view, document)
    if view.confirmed_silence(leader) >= lease + turn:
        return _replace_the_dead(view, document, leader)
    if view.confirmed_idleness >= idle + turn:
        return Write(replace(document, leader=view.me))
    until = (lease + turn - view.possible_silence(leader), idle + turn - view.possible_idleness)
    return Wait(max(0.0, min(until)))


def _turn(view: View, document: RoundDocument) -> float:
    """Seconds that this node waits for other heirs to take the lead.

    The heirs take turns in rank order; the first may be gone together with the leader.
    """
    rank = document.ranks.get(view.me, document.old_ranks.get(view.me))
    turn = _spread(view, document)
    if rank is not None:
        before = (document.participants or document.previous)[:rank]
        # Of a roster in shards this node knows its own rank only.
        rank -= len({document.leader, *document.lost}.intersection(before))
        turn = min(turn, _TURN_SECONDS * rank)
    # Any other node is better than one that could not lead before.
    return turn + view.rules.lease if view.abdicated else turn


def _spread(view: View, document: RoundDocument) -> float:
    """This node's random share of an interval, few of them early.

    However many nodes there are, only a few have their turn before all can have read what the first
    one wrote: the density grows by a factor of e each 1/``steep`` of the interval, which makes up
    for their number.
    """
    nodes = max(1, document.max_nodes, document.size)
    steep = min(1.0 + math.log(nodes), _STEEPEST)
    return view.rules.interval * math.log1p(view.share * math.expm1(steep)) / steep


def _replace_the_dead(view: View, document: RoundDocument, leader: str) -> Action:
    """Take the lead from a node whose lease ran out.

    The evidence is against that node only: the windows of all others begin now.
    """
    done = view.leader is not None and view.leader.status is Status.DONE
    if done or not (document.is_whole and document.names(leader)):
        return Write(replace(document, leader=view.me))
    label = view.leader.label if view.leader else leader
    if document.phase is Phase.FORMING:
        previous = without(document.previous, [leader])
        cause = document.cause.plus(lost=[label])
        return Write(replace(document, leader=view.me, previous=previous, cause=cause))
    if document.phase is Phase.RUNNING and not view.rules.restart_on_loss:
        lost = (*without(document.lost, [leader]), leader)
        return Write(replace(document, leader=view.me, lost=lost))
    if document.phase is Phase.CONFIRMING and view.lag:
        # Under load it may be alive and slow. The next listing tells; the round need not end.
        return Write(replace(document, leader=view.me))
    ran = document.phase is Phase.RUNNING
    cause = (Cause() if ran else document.cause).plus(lost=[label])
    return Write(next_round(view, document, [leader], 0, cause))


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
        elif not is_full(document, rules):
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
