"""The decisions of a node, from what it knows. No I/O, no clock, no thread.

`decide` is a pure function. `node.py` calls it and carries out its decisions; the simulator and the
handler run both unchanged. The first row of a table that answers decides. The names of rules are
those of ``docs/protocol.md``.

A round goes forming -> confirming -> running. Confirming exists because torch's agent, once it has
its rank, waits for a message from every other agent. If a participant dies while the round forms,
the protocol must notice before it releases any agent; torch would need minutes.

Several nodes may believe that they lead. That is safe: each decision is a compare-and-set, and only
a node that read the latest document succeeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from msgspec.structs import replace

from rdzv_plugins.protocol import policies
from rdzv_plugins.protocol.accusations import (
    naming_the_accused,
    still_accused,
    until_a_verdict,
    until_answered,
)
from rdzv_plugins.protocol.documents import (
    Accusation,
    Cause,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.policies.checkpoint import seconds_left
from rdzv_plugins.protocol.policies.policy import Again, Stage
from rdzv_plugins.protocol.roster import MISSING
from rdzv_plugins.protocol.rounds import (
    amended,
    caught_up,
    evicting,
    founded,
    leaving_out,
    naming,
    naming_participants,
    next_round,
    with_orders_of,
    without_roster,
    without_the_gone,
)
from rdzv_plugins.protocol.rules import (
    Abdicate,
    Action,
    AskTombstone,
    Close,
    Confirm,
    Doubt,
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
from rdzv_plugins.protocol.situation import (
    Situation,
    assess,
    fits,
    has_no_room,
    round_in,
    unconfirmed,
    waits_for_a_living_round,
    without,
)
from rdzv_plugins.protocol.sizes import Sizes
from rdzv_plugins.protocol.stalls import stuck

# How much longer each successor of the leader waits than the successor before it: many times as
# long as a compare-and-set takes.
_TURN_SECONDS = 0.05

# The limit of the exponent in `_spread`: max_nodes comes from the store, and is not trusted.
_STEEPEST = 30.0

# If spares fill the round, the leader waits only this share of `rejoin_timeout` for participants
# that do not ask for it.
_SPARES_SUFFICE = 0.1

# A large part of the world is more than one in _LARGE_PART nodes, and at least _FEWEST_DOUBTED.
_LARGE_PART, _FEWEST_DOUBTED = 3, 8
# A node is late after this share of its lease without a beat, and after this many of its intervals.
_LATE_LEASES, _LATE_INTERVALS = 0.5, 1.25

_Decides: TypeAlias = Callable[[View], Action | None]
_Follows: TypeAlias = Callable[[View, RoundDocument], Action | None]
_Leads: TypeAlias = Callable[[View, Situation], Action | None]


def decide(view: View) -> Action:
    """The next thing that this node does."""
    action = _decide(view)
    # Check the time-out last, because a join whose round runs by now has not failed.
    if _is_over_time(view) and not isinstance(action, (Start, Fail)):
        return Fail(Failure.TIMEOUT)
    return action


def _is_over_time(view: View) -> bool:
    """Whether the node's join has timed out; a spare waits for as long as the round lasts.

    A named node gets one more lease, because a time-out would abort a round that is about to run.
    """
    if not view.join_timed_out or waits_for_a_living_round(view):
        return False
    document = view.document
    if document is None or document.phase is not Phase.CONFIRMING or view.me not in document.ranks:
        return True
    return view.document_age >= view.rules.lease


def _decide(view: View) -> Action:
    for row in _BY_WHAT_IT_HAS_READ:
        if (action := row(view)) is not None:
            return action
    document = view.document
    assert document is not None
    for follows in _BY_THE_DOCUMENT:
        if (action := follows(view, document)) is not None:
            return action
    return _look_after_the_run(view, document)


def lead(view: View, document: RoundDocument) -> Action:
    """The next thing that the leader does, by the records of all nodes."""
    if view.records is None:
        return ListRecords()
    at = assess(view, document)
    answers = (row(view, at) for row in (*_IN_ANY_PHASE, *_IN_PHASE[document.phase]))
    action = next(it for it in answers if it is not None)
    if isinstance(action, Write):
        return Write(policies.noted(view, at, action.document))
    if isinstance(action, Wait):
        ends = [action.seconds, until_a_verdict(view, at.document, at.records)]
        if document.is_whole and at.kept_out:
            # Wait at most until an exclusion of an asking node ends: its end rings no bell.
            asking = (it for node, it in at.kept_out.items() if _asks(at, node))
            ends += [max(0.0, it.seconds) for it in asking if it.seconds is not None]
        return Wait(min((it for it in ends if it is not None), default=None), action.enough)
    return action


def _asks(at: Situation, node: str) -> bool:
    record = at.records.get(node)
    return record is not None and record.asks


# Rows for every node: decisions from its memory, whatever the store holds.


def _start_what_ran(view: View) -> Action | None:
    """Release the agent once the round that this node confirmed has run.

    Release it also if the round ended, or the run was closed, before this node saw the round run:
    the released agents of the other nodes wait for this node's agent.
    """
    confirmed, latest = view.confirmed, view.latest
    if not view.joining or view.record.status is not Status.RUN:
        return None
    if confirmed is None or latest is None or latest.ran != confirmed.world_id:
        return None
    # After a store forgot, one round may have two tokens: take the token of the round that ran.
    return Start(
        replace(
            confirmed,
            phase=Phase.RUNNING,
            ran=latest.ran,
            master=latest.master,
            fencing_token=latest.fencing_token,
        )
    )


def _end_with_the_run(view: View) -> Action | None:
    record, latest = view.record, view.latest
    if latest is None or not latest.closed:
        return None
    if record.status is Status.RUN and _is_strange(view, latest):
        return AskTombstone(str(view.own_incarnation))
    if not view.joining and not record.is_unfit:
        return Wait()
    # A participant that was left out because its check failed ends as a spare does.
    was_in_it = record.is_unfit and view.own_incarnation == latest.incarnation
    spare = record.status is Status.SPARE or was_in_it
    return Fail(Failure.SPARE_CLOSED if spare else Failure.CLOSED)


def _follow_while_unfit(view: View) -> Action | None:
    """Unfit nodes: an unfit node gives up the lead and learns the end of its run."""
    document, latest = view.document, view.latest
    if view.record.status is not Status.LEFT:
        return None
    if not view.record.is_unfit or latest is None:
        return Wait()
    if document is None or _is_behind(document, latest):
        # Other nodes write the document back, unless the run has ended.
        asked = latest.incarnation in view.without_tombstone
        return Wait() if asked else AskTombstone(latest.incarnation)
    if document.leader == view.me and not document.closed:
        return Abdicate(replace(document, leader=None), fails=False)
    # Tell a drained node now: if it stays unfit, it asks for no round and would never learn it.
    return Fail(Failure.DRAINED) if view.me in document.drained else Wait()


def _look_for_the_own_run(view: View) -> Action | None:
    document = view.document
    if document is None or not _is_strange(view, document):
        return None
    return AskTombstone(str(view.own_incarnation))


def _begin_the_run(view: View) -> Action | None:
    """Found the run if this node has never read a document. `close_run` may found a closed one."""
    if view.latest is not None:
        return None
    return Write(founded(view, "first round")) if view.joining else Wait()


def _write_back(view: View) -> Action | None:
    """A store that forgets: restore the document that this node remembers."""
    latest = view.latest
    if latest is None or not _is_behind(view.document, latest):
        return None
    # The leader writes first, then the other nodes in turn, because the leader may be gone too.
    patience = 0.0 if latest.leader == view.me else _spread(view, latest)
    if view.document_age < patience:
        return Wait(patience - view.document_age)
    if latest.incarnation not in view.without_tombstone:
        # The document may have been swept because its run ended.
        return AskTombstone(latest.incarnation)
    if view.document is not None and view.document.is_of(latest):
        latest = with_orders_of(latest, view.document)
    return Write(replace(latest, leader=view.me))


def _is_strange(view: View, document: RoundDocument) -> bool:
    """Whether the document is of another run, and this node did not ask for its run's tombstone."""
    own = view.own_incarnation
    return own not in (None, document.incarnation) and own not in view.without_tombstone


def _is_behind(document: RoundDocument | None, latest: RoundDocument) -> bool:
    """Whether the store has no document, or an older one than this node remembers."""
    if document is None:
        return True
    if not document.is_of(latest):
        return True  # A run that is over replaced a live one: see Observer._is_later.
    return document.place < latest.place


_BY_WHAT_IT_HAS_READ: tuple[_Decides, ...] = (
    _start_what_ran,
    _end_with_the_run,  # Closed stays closed.
    _follow_while_unfit,  # Unfit nodes.
    _look_for_the_own_run,
    _begin_the_run,
    _write_back,  # A store that forgets.
)


def _give_up(view: View, document: RoundDocument) -> Action | None:
    """Drain and network check: end the join of a node that a policy lets leave."""
    if not view.joining or (why := policies.leaves(view, document)) is None:
        return None
    return Fail(why)


def _give_up_the_lead(view: View, document: RoundDocument) -> Action | None:
    """Lead: give up the lead if listings fail, which other nodes cannot see."""
    return Abdicate(replace(document, leader=None)) if view.cannot_list else None


def _take_part(view: View, document: RoundDocument) -> Action | None:
    """Ask for a round, or confirm a rank in it; a leader does so too."""
    if not view.joining:
        return None
    for row in _JOINING:
        if (action := row(view, document)) is not None:
            break
    if view.checks and isinstance(action, Confirm):
        # Look after the run while the node checks its network: the leader or rank 0 may be dead.
        meanwhile = _look_after_the_run(view, document)
        if isinstance(meanwhile, Wait):
            return Confirm(action.document, action.is_master, meanwhile.seconds)
        return meanwhile
    return action


def _look_after_the_run(view: View, document: RoundDocument) -> Action:
    if document.leader == view.me:
        return lead(view, document)
    return _watch_leader(view, document)


_BY_THE_DOCUMENT: tuple[_Follows, ...] = (_give_up, _give_up_the_lead, _take_part)


def _stay_out_of_another_size(view: View, document: RoundDocument) -> Action | None:
    """One size: do not join a run of other ``--nnodes``; found a run if all its nodes are gone."""
    rules = view.rules
    if (document.min_nodes, document.max_nodes) == (rules.min_nodes, rules.max_nodes):
        return None
    if view.records is None:
        return ListRecords()
    holders = {*(document.participants or document.previous), document.leader}
    if not document.is_whole:
        # Any record, and a missing roster, may be of the run's nodes.
        holders |= {node for node, it in view.records.items() if fits(it, document)} | {MISSING}
    holders -= {view.me, None}
    if any(view.moved(str(node)) for node in holders):
        return Fail(Failure.MISMATCH)
    patience = view.share * rules.interval
    if not holders and view.document_age < rules.lease + patience:
        return Wait(rules.lease + patience - view.document_age)
    left = {node for node, record in view.records.items() if record.status is Status.LEFT}
    alive = [
        node
        for node in map(str, holders - left)
        if view.confirmed_silence(node) < view.lease_and_lag(node) + patience
    ]
    if alive:
        return Wait(
            max(
                0.0, min(view.lease_and_lag(n) + patience - view.possible_silence(n) for n in alive)
            )
        )
    return Write(founded(view, "resubmitted with other --nnodes"))


def _confirm_its_rank(view: View, document: RoundDocument) -> Action | None:
    """Consistency: a node with an unconfirmed rank confirms it, or asks for another round."""
    if view.me not in document.ranks or _has_confirmed(view, document):
        return None
    if view.record.asks and round_in(document, view.record) >= document.round:
        return None  # This node asks for a later round.
    given = view.rounds_given.get(document.incarnation, -1)
    if given >= document.round:
        # This node ran in another run since: the store forgot first this run, then the other run.
        return SetRecord(Status.JOIN, document.incarnation, given)
    if document.phase is Phase.CONFIRMING:
        if view.opening_for is not None and view.opening_for >= view.rules.lease:
            # A fresh MASTER: this node asks for another round, with another rank 0.
            return SetRecord(Status.JOIN, document.incarnation, document.round, can_host=False)
        return Confirm(document, document.ranks[view.me] == 0)
    # The round ran without this node, in a store that forgot.
    return SetRecord(Status.JOIN, document.incarnation, document.round)


def _ask_for_a_round(view: View, document: RoundDocument) -> Action | None:
    """Exclusivity: say that this node is in no round, if it had a rank or its record says so."""
    record, last = view.record, round_in(document, view.record)
    if document.phase is Phase.FORMING and view.me in document.previous_order:
        # This node had a rank in a round that never ran, or whose document it never saw.
        if not record.asks or last < document.round - 1:
            round_ = max(last, document.round - 1)
            return SetRecord(Status.JOIN, document.incarnation, round_)
    elif record.status is Status.RUN and not _has_confirmed(view, document):
        return SetRecord(Status.JOIN, record.incarnation, record.round)
    return None


def _wait_as_a_spare(view: View, document: RoundDocument) -> Action | None:
    """Spares: say that this node waits for a round that is full, or that lets nobody in now."""
    record = view.record
    waits = record.status is Status.JOIN and document.phase is Phase.RUNNING
    if not waits or view.me in document.ranks:
        return None
    no_room = has_no_room(document, Sizes.of(view.rules)) or document.finishing
    if no_room or policies.delays(view, document):
        return SetRecord(Status.SPARE, record.incarnation, record.round, ring=False)
    return None


def _has_confirmed(view: View, document: RoundDocument) -> bool:
    """Whether this node is in the round by its own record, even if the store loses its shard."""
    return view.record.status is Status.RUN and view.record.world_id == document.world_id


_JOINING: tuple[_Follows, ...] = (
    _stay_out_of_another_size,  # One size.
    _confirm_its_rank,  # Consistency.
    _ask_for_a_round,  # Exclusivity.
    _wait_as_a_spare,  # Spares.
)


# A node that does not lead watches the leader. Rule: lead.


def _watch_leader(view: View, document: RoundDocument) -> Action:
    """Take over from a leader that left, that stopped beating, or that does not list.

    Nobody is appointed: each node waits `_TURN_SECONDS` longer than the one before it in rank
    order. If a participant died with the leader, the new leader finds it lost one more lease later,
    because the new leader's windows begin anew, or sooner by an accusation.
    """
    leader = document.leader
    if leader is None:
        if view.document_age < (turn := _successor_pause(view, document)):
            return Wait(turn - view.document_age)
        return Write(replace(document, leader=view.me))
    if (action := _ask_the_leader(view, document, leader)) is not None:
        return action
    patience = view.lease_and_lag(leader)
    # The leader's heartbeat carries its count of listings an interval later than they happen.
    idle = patience + (view.leader.interval if view.leader else view.rules.interval)
    if view.confirmed_silence(leader) < patience and view.confirmed_idleness < idle:
        return Wait(
            max(0.0, min(patience - view.possible_silence(leader), idle - view.possible_idleness))
        )
    turn = _successor_pause(view, document)
    if view.confirmed_silence(leader) >= patience + turn:
        return Write(_replacing_the_dead(view, document, leader))
    if view.confirmed_idleness >= idle + turn:
        return Write(replace(document, leader=view.me))
    until = (patience + turn - view.possible_silence(leader), idle + turn - view.possible_idleness)
    return Wait(max(0.0, min(until)))


def _ask_the_leader(view: View, document: RoundDocument, leader: str) -> Action | None:
    """Accusations: if the link to the leader ended, ask the leader; lead if it is silent."""
    beat, record = dict(view.record.accuses).get(leader), view.leader
    if view.rules.answer_timeout is None or beat is None or record is None or record.beat > beat:
        return None
    if record.is_over or not record.link:
        return None
    others = tuple(it for it in document.accused if it.node != leader)
    asked = [it.beat for it in document.accused if it.node == leader and not it.lost]
    if asked and max(asked) > beat:
        return None  # This node has not read a later heartbeat that others saw.
    if beat not in asked:
        # Keep the leader's name in the document: only its own write would be a sign of life.
        named = Accusation(leader, beat, view.record.label)
        return Write(replace(document, accused=(*others, named)))
    if leader not in view.unanswered:
        return None
    if (left := until_answered(view, leader, record)) > 0:
        return Wait(left)
    return Write(replace(document, leader=view.me))


def _successor_pause(view: View, document: RoundDocument) -> float:
    """Seconds that this node waits for other successors; they take turns in rank order."""
    rank = document.ranks.get(view.me, document.previous_order.get(view.me))
    turn = _spread(view, document)
    if rank is not None:
        before = (document.participants or document.previous)[:rank]
        # If the roster is in shards, this node knows only its own rank.
        rank -= len({document.leader, *document.absent}.intersection(before))
        turn = min(turn, _TURN_SECONDS * rank)
    # A node that has abdicated lets all others go first.
    return turn + view.rules.lease if view.abdicated else turn


def _spread(view: View, document: RoundDocument) -> float:
    """This node's random share of an interval; few nodes have an early share.

    The density grows by a factor of e each 1/``steep`` of the interval. Whatever the number of
    nodes, only a few act before all can have read what the first one wrote.
    """
    nodes = max(1, document.max_nodes, document.size)
    steep = min(1.0 + math.log(nodes), _STEEPEST)
    return view.rules.interval * math.log1p(view.share * math.expm1(steep)) / steep


def _replacing_the_dead(view: View, document: RoundDocument, leader: str) -> RoundDocument:
    """The document under this node's lead, after the lease of its leader ran out."""
    led = replace(document, leader=view.me)
    done = view.leader is not None and view.leader.status is Status.DONE
    if done or not (document.is_whole and document.names(leader)):
        return led  # Without the whole roster, the next listing forms the round.
    label = view.leader.label if view.leader else leader
    if document.phase is Phase.FORMING:
        previous = without(document.previous, [leader])
        return replace(led, previous=previous, cause=document.cause.plus(lost=[label]))
    if document.phase is Phase.RUNNING and not view.rules.restart_on_loss:
        return replace(led, absent=(*without(document.absent, [leader]), leader))
    if document.phase is Phase.CONFIRMING and view.lag:
        # Keep the round: under load its leader may be alive and slow, which the next listing tells.
        return led
    ran = document.phase is Phase.RUNNING
    cause = (Cause() if ran else document.cause).plus(lost=[label])
    after = next_round(view, document, [leader], 0, cause)
    return policies.noted(view, assess(view, document), after)


# Rows for the leader in any phase.


def _ask_the_accused(view: View, at: Situation) -> Action | None:
    """Accusations: name the nodes that must show that they live."""
    after = naming_the_accused(view, at.document, at.records)
    return Write(after) if after is not None else None


def _form_without_the_roster(view: View, at: Situation) -> Action | None:
    """Form a round without the silent nodes, if the store has lost the shards of the roster.

    First each node has a lease to write its record: all records together make the document whole.
    """
    if at.document.is_whole:
        return None
    lease = max(record.lease for record in at.records.values())
    if view.confirmed_silence(MISSING) < lease:
        return Wait(max(0.0, lease - view.possible_silence(MISSING)))
    return Write(without_roster(view, at))


def _doubt(view: View, at: Situation) -> Action | None:
    """Give one more lease to a large part of the world that falls silent at once. Rule: doubt.

    The store or the load may be slow. If the nodes are lost, that lease ends for all of them
    together. When the first lease runs out, the other nodes of a large part are late already;
    without this rule the first node would be a single loss.
    """
    document, records = at.document, at.records
    fresh = {node for node in at.silent if _is_fresh(view, node)}
    if not fresh:
        return None
    if document.phase is Phase.FORMING:
        world = {*document.previous, *(node for node in records if fits(records[node], document))}
    else:
        world = {*document.participants} - {*document.absent}
    # Leave out nodes that were lost long ago: their records stay in the store.
    world = {
        node
        for node in world
        if not (node in records and records[node].is_over)
        and (_is_fresh(view, node) or node not in at.lost)
    }
    late = {node for node in world if node != view.me and _is_late(view, node, records.get(node))}
    if len(late) < _FEWEST_DOUBTED or len(late) * _LARGE_PART <= len(world):
        return None
    if world.isdisjoint(fresh):
        return None
    begins = not any(view.watched[node].forgiven for node in late)
    nodes = sorted(node for node in late if not view.had_grace(node))
    return Doubt(tuple(nodes), begins, len(late), len(world)) if nodes else None


def _is_fresh(view: View, node: str) -> bool:
    """Whether the node was not doubted yet, and has not been lost for long."""
    longest = view.lease_and_lag(node) + view.rules.shortest_outage
    return not view.had_grace(node) and view.confirmed_silence(node) < longest


def _is_late(view: View, node: str, record: NodeRecord | None) -> bool:
    interval = record.interval if record is not None else view.rules.interval
    lease = view.lease_and_lag(node) - view.lag
    least = max(_LATE_LEASES * lease, _LATE_INTERVALS * interval)
    return view.confirmed_silence(node) >= least


def _judge(view: View, at: Situation, stage: Stage) -> Action | None:
    verdict = policies.judged(view, at, stage)
    if not isinstance(verdict, Again):
        return verdict
    if (left := verdict.seconds - view.document_age) > 0:
        return Wait(left)
    return Write(next_round(view, verdict.document, (), 0, verdict.document.cause))


_IN_ANY_PHASE: tuple[_Leads, ...] = (
    _form_without_the_roster,
    _ask_the_accused,  # Accusations.
    _doubt,
    partial(_judge, stage=Stage.BEFORE_ALL),  # Exclusions, no progress and checkpoint.
)


# Rows for the leader while a round forms.


def _catch_up(view: View, at: Situation) -> Action | None:
    after = caught_up(at)
    return Write(after) if after is not None else None


def _leave_out_the_kept_out(view: View, at: Situation) -> Action | None:
    out = [node for node in at.document.previous if node in at.kept_out]
    return Write(leaving_out(at, out)) if out else None


def _await_the_last_round(view: View, at: Situation) -> Action | None:
    """Exclusivity: wait until each node of the last round asks again, is gone, or is evicted."""
    if not at.awaited:
        return None
    patience = rejoin_patience(view.rules, at.size)
    gone = [node for node in at.previous_gone if node in at.not_rejoined]
    if view.round_age >= patience:
        return Write(evicting(at, gone))
    if gone:
        return Write(without_the_gone(at, gone))
    until = (_until_lease(view, at.awaited), patience - view.round_age)
    return Wait(min(seconds for seconds in until if seconds is not None), at.has_enough)


def _await_the_doubted(view: View, at: Situation) -> Action | None:
    """Doubt: wait for doubted nodes that asked; in a full round only for the last round's nodes."""
    full, previous = at.size >= at.sizes.most, at.document.previous_order
    unsure = [node for node in at.doubted if not full or node in previous]
    if not unsure:
        return None
    if gone := [node for node in at.previous_gone if node in at.not_rejoined]:
        return Write(without_the_gone(at, gone))
    return Wait(_until_lease(view, unsure), at.has_enough)


def _name_the_gone(view: View, at: Situation) -> Action | None:
    """Name the gone nodes, also those that had asked for this round, while it waits for nodes."""
    if not at.previous_gone or at.is_full:
        return None
    return Write(without_the_gone(at, at.previous_gone))


def _judge_too_few(view: View, at: Situation) -> Action | None:
    return None if at.has_enough else _judge(view, at, Stage.TOO_FEW)


def _await_more(view: View, at: Situation) -> Action | None:
    """Wait for enough nodes, and then for as long as policies hold the round."""
    if at.is_full:
        return None
    if not at.has_enough:
        return Wait(None)
    held = policies.holds(view, at)
    return Wait(held.seconds, enough=True) if held is not None else None


def _name_participants(view: View, at: Situation) -> Action | None:
    return Write(naming_participants(at))


_FORMING: tuple[_Leads, ...] = (
    _catch_up,  # A store that forgets.
    _leave_out_the_kept_out,  # Drain and exclusions.
    _await_the_last_round,  # Exclusivity.
    _await_the_doubted,  # Doubt.
    _name_the_gone,
    _judge_too_few,  # Quarantine.
    _await_more,  # Last call and growth.
    _name_participants,  # Rank order, units and segments, quarantine and fencing token.
)


def rejoin_patience(rules: Rules, size: int) -> float:
    """Seconds that a round of ``size`` nodes waits for a live participant of the last round."""
    return rules.rejoin_timeout * (_SPARES_SUFFICE if size >= Sizes.of(rules).most else 1.0)


# Rows for the leader while a round is confirmed.


def _form_anew(view: View, at: Situation) -> Action | None:
    """Form another round if a participant is gone, asks again, or is to be kept out."""
    if not (at.newly_gone or at.rejoined or at.taken_out):
        return None
    # This round never ran, so its cause still counts.
    cause = amended(at.document.cause, at.records, at.newly_gone, at.by_accusation)
    cause = naming(cause, at, at.taken_out)
    return Write(next_round(view, at.document, at.newly_gone, 0, cause, at.taken_out))


def _await_confirmations(view: View, at: Situation) -> Action | None:
    if not unconfirmed(at.document, at.records):
        return None
    return Wait(_until_lease(view, at.document.participants))


def _run(view: View, at: Situation) -> Action | None:
    document = at.document
    master = at.records[document.participants[0]].master
    after = replace(document, phase=Phase.RUNNING, ran=document.world_id, master=master)
    return Write(replace(after, accused=still_accused(document, at.records)))


_CONFIRMING: tuple[_Leads, ...] = (
    _form_anew,  # Leases, leave and drain.
    _await_confirmations,
    partial(_judge, stage=Stage.BEFORE_RUNNING),  # Network check.
    _run,
)


# Rows for the leader while a round runs.


def _end_the_round(view: View, at: Situation) -> Action | None:
    """Form the next round: on request, for a lost or hanging node, or to grow."""
    document, records = at.document, at.records
    # Ignore `rdzv restart` once a node's workers succeeded, because that node never joins again.
    ordered = bool(at.taken_out or (document.restart and not at.done))
    ends_for_a_loss = bool(at.newly_gone) and view.rules.restart_on_loss
    grows = at.growth > 0 and policies.holds(view, at) is None
    planned = (ordered or grows) and seconds_left(view, at) is None
    hangs = stuck(view, at)
    if not (at.rejoined or ends_for_a_loss or planned or hangs):
        return None
    failed = [node for node in at.rejoined if records[node].failed]
    # A node without failed workers joins again if the store forgot its round.
    joined = [*at.newcomers, *without(at.rejoined, failed)]
    cause = amended(Cause(), records, at.absent, at.by_accusation).plus(
        failed=[records[node].label for node in failed],
        joined=[records[node].label for node in joined],
    )
    if hangs is not None:
        cause = replace(cause.plus(stuck=[hangs[0].label]), note=hangs[1])
    cause = naming(cause, at, at.taken_out)
    gone = at.absent | at.done
    return Write(next_round(view, document, gone, len(at.newcomers), cause, at.taken_out))


def _note_the_lost(view: View, at: Situation) -> Action | None:
    """Update the lost participants of a round that goes on without them."""
    if at.absent == {*at.document.absent}:
        return None
    return Write(replace(at.document, absent=tuple(sorted(at.absent))))


def _close_when_done(view: View, at: Situation) -> Action | None:
    """Close a run whose participants are all done or lost.

    Done nodes may wait in torch's exit barrier for lost nodes, or for each other.
    """
    if at.done and at.done >= {*at.document.participants} - at.absent:
        return Close(at.document, Outcome.SUCCEEDED, "its workers succeeded")
    return None


def _say_that_it_finishes(view: View, at: Situation) -> Action | None:
    if at.done and at.newcomers and not at.document.finishing:
        return Write(replace(at.document, finishing=True))
    return None


def _drop_what_came_to_nothing(view: View, at: Situation) -> Action | None:
    """Drop an order to grow or restart that is void: no node waits, or a node is done."""
    if (at.document.resize or at.document.restart) and seconds_left(view, at) is None:
        return Write(replace(at.document, resize=False, restart=""))
    return None


def _await_a_change(view: View, at: Situation) -> Action | None:
    """Wait until newcomers may be let in, or the lease of a node that is not done may run out."""
    held = policies.holds(view, at) if at.growth else None
    until = (
        _until_lease(view, without(at.present, at.done)),
        held.seconds if held is not None else None,
        seconds_left(view, at),
    )
    seconds = min((it for it in until if it is not None), default=None)
    return Wait(seconds, enough=at.growth > 0)


_RUNNING: tuple[_Leads, ...] = (
    _end_the_round,  # Spares, loss, growth and drain.
    _note_the_lost,  # Loss, with restart_on_loss=false.
    _close_when_done,  # Done.
    _say_that_it_finishes,  # Done.
    _drop_what_came_to_nothing,  # Drain.
    _await_a_change,
)

_IN_PHASE: dict[Phase, tuple[_Leads, ...]] = {
    Phase.FORMING: _FORMING,
    Phase.CONFIRMING: _CONFIRMING,
    Phase.RUNNING: _RUNNING,
}


def _until_lease(view: View, nodes: Iterable[str]) -> float | None:
    """Seconds until the first lease of these nodes could run out."""
    if view.until_first_lease is not None:
        return view.until_first_lease
    left = [view.patience(node) - view.possible_silence(node) for node in nodes if node != view.me]
    return max(0.0, min(left)) if left else None
