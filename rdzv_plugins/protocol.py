"""The round protocol: from what a node knows to what it does next. No I/O, no clock, no thread.

`decide` is a pure function. `node.py` feeds it and carries out its decisions; the simulator and the
handler run both unchanged. The rules by number are those of ``docs/design.md``.

A round goes forming -> confirming -> running. Confirming is there because torch's agent, once it
has its rank, blocks on a message from every other agent: a participant that died while the round
formed must be found out before any agent is released, not after a time-out of minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from rdzv_plugins.documents import NodeRecord, Phase, RoundDocument, Wants
from rdzv_plugins.ranks import order_ranks

__all__ = [
    "Action",
    "Confirm",
    "Fail",
    "Failure",
    "ListRecords",
    "Rules",
    "SetRecord",
    "Start",
    "View",
    "Wait",
    "Write",
    "decide",
    "nodes_waiting",
]

_NAMES_IN_A_REASON = 4

# What an heir of the leader leaves to the one before it: many times a compare-and-set.
_TURN_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings of a run that its protocol depends on; times in seconds."""

    min_nodes: int
    max_nodes: int
    lease: float
    interval: float
    last_call: float
    restart_on_loss: bool = True
    rank_order: str = "natural"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that a node knows when it decides.

    Attributes:
        me: this node's id.
        record: this node's record as it last wrote it.
        joining: an agent waits for a round; False: its workers run, or it has not asked yet.
        document: the document as last read; None: there is none.
        document_age: seconds since ``document`` was first seen as it is.
        latest: the document of the highest place that this node has seen.
        member: the round that the agent runs in.
        records: all nodes' records, read after ``document``; None: not read.
        age: seconds that a node's beat is known to have stood still, by this node's clock.
        silence: seconds since a node's beat was last seen to move; another look may end it.
        moved: whether a node's beat has moved since this node began to watch it.
        minimum_age: seconds since this leader first counted ``min_nodes`` ready nodes; None: fewer.
        share: this node's random share of an interval, in [0, 1).
    """

    me: str
    rules: Rules
    record: NodeRecord
    joining: bool
    document: RoundDocument | None
    document_age: float
    latest: RoundDocument | None
    member: RoundDocument | None
    records: Mapping[str, NodeRecord] | None
    age: Callable[[str], float]
    silence: Callable[[str], float]
    moved: Callable[[str], bool]
    minimum_age: float | None
    share: float


class Failure:
    """Why a join cannot succeed."""

    CLOSED = "closed"
    SPARE_CLOSED = "spare closed"
    MISMATCH = "mismatch"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Write:
    """Compare-and-set the document."""

    document: RoundDocument


@dataclass(frozen=True, slots=True)
class SetRecord:
    """Write this node's record; ``ring`` tells the leader."""

    wants: Wants
    round: int
    ring: bool = True


@dataclass(frozen=True, slots=True)
class Confirm:
    """Say in this node's record that it has seen its rank; rank 0 opens MASTER_PORT first."""

    round: int
    naming: str
    is_master: bool


@dataclass(frozen=True, slots=True)
class Start:
    """The round runs: release the agent."""

    document: RoundDocument


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise in the agent's call; ``failure`` is one of `Failure`."""

    failure: str


@dataclass(frozen=True, slots=True)
class ListRecords:
    """Read the document again, then all records: this node leads and must know them."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before something changes or ``seconds`` have passed (None: for any time)."""

    seconds: float | None = None
    minimum_reached: bool = False


Action: TypeAlias = Write | SetRecord | Confirm | Start | Fail | ListRecords | Wait


def nodes_waiting(view: View) -> int:
    """What ``num_nodes_waiting()`` returns: above 0 tells the agent to join again."""
    document, member = view.document, view.member
    if view.joining or member is None or document is None or document.phase is Phase.CLOSED:
        return 0
    if document.round < member.round:
        return 0  # A store that forgot; the living round is being written back.
    if document.round > member.round or document.participants != member.participants:
        return max(1, document.waiting)
    return 0


def decide(view: View) -> Action:
    """What this node does next."""
    document, latest = view.document, view.latest
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
        return _lead(view, document)
    return _watch_leader(view, document)


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
    named = view.me in document.participants
    wants_in = record.wants in (Wants.JOIN, Wants.SPARE)
    confirmed = named and record.naming == document.naming
    if named and document.phase is Phase.CONFIRMING and not confirmed:
        is_master = document.participants[0] == view.me
        return Confirm(document.round, document.naming, is_master)
    if named and document.phase is Phase.RUNNING:
        if record.wants is Wants.RUN and confirmed:
            return Start(document)
        if not confirmed and not (wants_in and record.round >= document.round):
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
            previous=_without(left, [leader]),
            reason="resubmitted with other --nnodes",
        )
    )


def _watch_leader(view: View, document: RoundDocument) -> Action:
    """Rule 4: take over from a leader that left or whose beat stopped."""
    leader, rules = document.leader, view.rules
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
            replace(document, leader=view.me, previous=_without(document.previous, [leader]))
        )
    if leader not in document.participants:
        return Write(replace(document, leader=view.me))
    reason = f"lost the leader {_name(view, leader)}: its lease ran out"
    if document.phase is Phase.RUNNING and not rules.restart_on_loss:
        lost = (*_without(document.lost, [leader]), leader)
        return Write(replace(document, leader=view.me, lost=lost))
    return Write(_next_round(view, document, [leader], 0, reason))


def _lead(view: View, document: RoundDocument) -> Action:
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
        )
    )


def _lead_confirming(
    view: View, document: RoundDocument, records: Mapping[str, NodeRecord]
) -> Action:
    lost, rejoined = _changes(view, document, records)
    if lost or rejoined:
        reason = _reason(view, records, lost, rejoined, [])
        return Write(_next_round(view, document, lost, 0, reason))
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
    return Write(replace(document, phase=Phase.RUNNING, master=master))


def _lead_running(view: View, document: RoundDocument, records: Mapping[str, NodeRecord]) -> Action:
    lost, rejoined = _changes(view, document, records)
    participants = set(document.participants)
    newcomers = [
        node
        for node, record in records.items()
        if node not in participants
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
        return Write(_next_round(view, document, [*gone], len(newcomers), reason))
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


def _next_round(
    view: View, document: RoundDocument, gone: Iterable[str], waiting: int, reason: str
) -> RoundDocument:
    return replace(
        document,
        round=document.round + 1,
        phase=Phase.FORMING,
        leader=view.me,
        participants=(),
        previous=_without(document.participants, gone),
        lost=(),
        waiting=waiting,
        reason=reason,
        master=None,
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


def _without(nodes: Iterable[str], gone: Iterable[str | None]) -> tuple[str, ...]:
    left_out = set(gone)
    return tuple(node for node in nodes if node not in left_out)


def _name(view: View, node: str) -> str:
    record = (view.records or {}).get(node)
    return record.label if record else node


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
