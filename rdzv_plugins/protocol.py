"""The round protocol: from what a node knows to what it does next. No I/O, no clock, no thread.

`decide` is a pure function. `node.py` feeds it and carries out its decisions; the simulator and the
handler run both unchanged. The rules by number are those of ``docs/design.md``.

A round goes forming -> confirming -> running. Confirming is there because torch's agent, once it
has its rank, blocks on a message from every other agent: a participant that died while the round
formed must be found out before any agent is released, not after a time-out of minutes.
"""

from __future__ import annotations

from dataclasses import replace

from rdzv_plugins import leading
from rdzv_plugins.decisions import (
    Action,
    Confirm,
    Fail,
    Failure,
    SetRecord,
    Start,
    View,
    Wait,
    Write,
)
from rdzv_plugins.documents import Phase, RoundDocument, Wants

__all__ = ["decide", "nodes_waiting"]

# What an heir of the leader leaves to the one before it: many times a compare-and-set.
_TURN_SECONDS = 0.05


def nodes_waiting(view: View) -> int:
    """What ``num_nodes_waiting()`` returns: above 0 tells the agent to join again."""
    document, member = view.document, view.member
    if view.joining or member is None or document is None or document.phase is Phase.CLOSED:
        return 0
    if view.latest is not None and document.place < view.latest.place:
        return 0  # A store that forgot; the living round is being written back.
    if document.round > member.round or document.participants != member.participants:
        return max(1, document.waiting)
    return 0


def decide(view: View) -> Action:
    """What this node does next."""
    document, latest = view.document, view.latest
    if view.joining and (mine := _confirmed_and_released(view)) is not None:
        return Start(mine)
    if latest is not None and latest.phase is Phase.CLOSED:
        return _on_closed(view)
    if view.record.wants is Wants.LEFT:
        return Wait()
    if document is None or (latest is not None and document.place < latest.place):
        return _write_back(view)
    if view.joining:
        action = _take_part(view, document)
        if action is not None:
            return action
    if document.leader == view.me:
        return leading.lead(view, document)
    return _watch_leader(view, document)


def _confirmed_and_released(view: View) -> RoundDocument | None:
    """The round that this node confirmed, once it runs.

    Also if it was over, or the run closed, before this node saw it run: the agents of the others
    were released and wait for this node's.
    """
    confirmed, latest = view.confirmed, view.latest
    if view.record.wants is not Wants.RUN or confirmed is None or latest is None:
        return None
    if latest.ran != confirmed.naming:
        return None
    return replace(confirmed, phase=Phase.RUNNING, ran=latest.ran, master=latest.master)


def _on_closed(view: View) -> Action:
    if not view.joining:
        return Wait()
    spare = view.record.wants is Wants.SPARE
    return Fail(Failure.SPARE_CLOSED if spare else Failure.CLOSED)


def _write_back(view: View) -> Action:
    """Rule 12: the store forgot, or is new."""
    latest = view.latest
    if latest is None:
        if not view.joining:
            return Wait()
        return Write(
            RoundDocument(
                round=view.record.round + 1,
                phase=Phase.FORMING,
                leader=view.me,
                min_nodes=view.rules.min_nodes,
                max_nodes=view.rules.max_nodes,
                reason="first round",
            )
        )
    # The leader first; the others in turn, should it be gone too.
    patience = 0.0 if latest.leader == view.me else view.share * view.rules.interval
    if view.document_age < patience:
        return Wait(patience - view.document_age)
    return Write(replace(latest, leader=view.me))


def _take_part(view: View, document: RoundDocument) -> Action | None:
    """What a node that wants into a round does, whoever leads."""
    record, rules = view.record, view.rules
    if (document.min_nodes, document.max_nodes) != (rules.min_nodes, rules.max_nodes):
        return _on_mismatch(view, document)
    named = view.me in document.ranks
    wants_in = record.wants in (Wants.JOIN, Wants.SPARE)
    confirmed = named and record.naming == document.naming
    if named and document.phase is Phase.CONFIRMING and not confirmed:
        is_master = document.ranks[view.me] == 0
        return Confirm(document.round, document.naming, is_master)
    asks_again = wants_in and record.round >= document.round
    if named and document.phase is Phase.RUNNING and not confirmed and not asks_again:
        # It ran without us, in a store that forgot: we are as good as lost in it.
        return SetRecord(Wants.JOIN, document.round)
    if document.phase is Phase.FORMING and view.me in document.previous:
        # Named in a round that never ran, or that we never saw: say that we are not in it.
        if not wants_in or record.round < document.round - 1:
            return SetRecord(Wants.JOIN, max(record.round, document.round - 1))
    elif record.wants is Wants.RUN and not confirmed:
        return SetRecord(Wants.JOIN, record.round)
    full = len(document.participants) - len(document.lost) >= document.max_nodes
    if record.wants is Wants.JOIN and document.phase is Phase.RUNNING and full and not named:
        return SetRecord(Wants.SPARE, record.round, ring=False)
    return None


def _on_mismatch(view: View, document: RoundDocument) -> Action:
    """Other ``--nnodes`` than the run's: refused, unless nobody lives who holds on to them."""
    leader = document.leader
    if leader is not None and view.moved(leader):
        return Fail(Failure.MISMATCH)
    patience = view.rules.lease + view.share * view.rules.interval
    age = view.age(leader) if leader is not None else view.document_age
    if age < patience:
        silence = view.silence(leader) if leader is not None else view.document_age
        return Wait(max(0.0, patience - silence))
    left = document.participants or document.previous
    return Write(
        RoundDocument(
            round=document.round + 1,
            phase=Phase.FORMING,
            leader=view.me,
            min_nodes=view.rules.min_nodes,
            max_nodes=view.rules.max_nodes,
            previous=leading.without(left, [leader]),
            reason="resubmitted with other --nnodes",
        )
    )


def _watch_leader(view: View, document: RoundDocument) -> Action:
    """Rule 4: take over from a leader that left or whose beat stopped."""
    leader, rules = document.leader, view.rules
    if leader is not None and view.age(leader) < rules.lease:
        return Wait(max(0.0, rules.lease - view.silence(leader)))
    # One after the other in rank order; not the first alone, who may be gone with the leader.
    old = document.participants or document.previous
    heirs = [node for node in old if node != leader and node not in document.lost]
    turn = view.share * rules.interval
    if view.me in heirs:
        turn = min(turn, heirs.index(view.me) * _TURN_SECONDS)
    if leader is None:
        if view.document_age < turn:
            return Wait(turn - view.document_age)
        return Write(replace(document, leader=view.me))
    if view.age(leader) < rules.lease + turn:
        return Wait(max(0.0, rules.lease + turn - view.silence(leader)))
    # That its beat stopped for a lease is evidence enough against the old leader, not against
    # anybody else: all other windows begin now.
    if document.phase is Phase.FORMING:
        return Write(
            replace(document, leader=view.me, previous=leading.without(document.previous, [leader]))
        )
    if leader not in document.ranks:
        return Write(replace(document, leader=view.me))
    reason = f"lost the leader {view.leader_label or leader}: its lease ran out"
    if document.phase is Phase.RUNNING and not rules.restart_on_loss:
        lost = (*leading.without(document.lost, [leader]), leader)
        return Write(replace(document, leader=view.me, lost=lost))
    return Write(leading.next_round(view, document, [leader], 0, reason))
