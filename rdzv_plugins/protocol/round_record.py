"""The rows of a run's history, for people: a round, or the end of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rdzv_plugins.kv.gate import Count, Id, Key, Lasted, Nodes, Seconds, Text, plain
from rdzv_plugins.protocol.documents import Names, NodeRecord, Outcome, Phase, RoundDocument

CAUSES = (
    "lost", "left", "failed", "joined", "evicted", "surplus", "stuck", "drained", "excluded",
)  # fmt: skip
"""The fields of `documents.Cause`, and of `RoundRecord`, that name nodes."""

_MEMBERS_KEPT = 16


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a round took, on its leader's clock.

    Attributes:
        noticed: from the last sign of life of the lost nodes until the round began.
        gathering: until its participants had joined, with the last call.
        last_call: how much of that the leader waited for more nodes than the minimum.
        confirming: from then until each participant had confirmed its rank.
        started: from then until all workers had imported this package. None: not told, because a
            worker has not called ``step()``.
        first_step: from then until every rank had finished a step. None: as ``started``.
    """

    noticed: Lasted = 0.0
    gathering: Lasted = 0.0
    last_call: Lasted = 0.0
    confirming: Lasted = 0.0
    started: Lasted | None = None
    first_step: Lasted | None = None

    @property
    def total(self) -> float:
        return self.gathering + self.confirming

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a restart that is known, in order.

        In ``stopped`` the participants, or the minimum of them, stop their workers and ask again.
        """
        phases = {
            "noticed": self.noticed,
            "stopped": max(0.0, self.gathering - self.last_call),
            "last_call": self.last_call,
            "formed": self.confirming,
            "started": self.started,
            "first_step": self.first_step,
        }
        return {name: it for name, it in phases.items() if it is not None}

    def __str__(self) -> str:
        """The sum of the phases, and the phases that people notice."""
        phases = self.phases
        whole = f"{sum(phases.values()):.2f} s"
        shown = [f"{name.replace('_', ' ')} {it:.1f}" for name, it in phases.items() if it >= 0.05]
        return f"{whole}: {', '.join(shown)}" if len(shown) > 1 else whole


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node as a history names it.

    Attributes:
        name: ``host[pid]``, or the node's id if its record was gone.
        rank: a participant's rank in the round, or another node's rank in the round before. None:
            the node had none, or the leader had not seen that round.
    """

    name: Id
    address: Id | None = None
    pid: Nodes | None = None
    rank: Nodes | None = None


Members = Annotated[tuple[Member, ...], Meta(max_length=64)]


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A round that began to run, or the end of a run.

    Attributes:
        phase: running; forming for a run that has had no round; closed at the end.
        nodes: how many participants; ``members`` are the first of them, in rank order.
        kept: how many more seconds the id of an ended run is taken.
        lost_steps: how many steps the round repeats. None: not known, as in the first round.
        trained: seconds from the first step of the round before to the last that is not repeated;
            less than 0: steps of earlier rounds are repeated too.
    """

    incarnation: Key
    round: Count
    phase: Phase
    nodes: Nodes
    leader: Id | None = None
    seconds: Durations | None = None
    reason: Text = ""
    members: Members = ()
    lost: Members = ()
    left: Members = ()
    failed: Members = ()
    joined: Members = ()
    evicted: Members = ()
    surplus: Members = ()
    stuck: Members = ()
    drained: Members = ()
    excluded: Members = ()
    outcome: Outcome | None = None
    kept: Seconds | None = None
    lost_steps: Count | None = None
    trained: Annotated[float, Meta(ge=-1e9, le=1e9)] = 0.0


def record_of(
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    before: RoundDocument | None = None,
    seconds: Durations | None = None,
    kept: float | None = None,
) -> RoundRecord:
    """The record of this round.

    Args:
        records: of the nodes, as far as they are known.
        before: the round before it, if this node was in it; tells the old ranks of nodes.
        kept: see `RoundRecord.kept`.
    """
    by_name = {record.label: (node, record) for node, record in records.items()}
    old = before.ranks if before is not None and before.is_of(document) else {}

    def members(names: Names) -> tuple[Member, ...]:
        found = ((name, *by_name.get(name, (name, None))) for name in names.first)
        return tuple(_member(name, record, old.get(node)) for name, node, record in found)

    first = document.participants[:_MEMBERS_KEPT]
    leader = records.get(document.leader) if document.leader is not None else None
    record = RoundRecord(
        incarnation=document.incarnation,
        round=document.round,
        phase=document.phase,
        nodes=document.size,
        leader=leader.label if leader is not None else document.leader,
        seconds=seconds,
        reason=plain(document.reason),
        members=tuple(_participants(first, records)),
        outcome=document.outcome,
        kept=kept,
    )
    return replace(record, **{it: members(getattr(document.cause, it)) for it in CAUSES})


def with_first_step(
    record: RoundRecord, document: RoundDocument, records: Mapping[str, NodeRecord]
) -> RoundRecord | None:
    """The record of a round once every rank has finished a step; None: a rank has not."""
    if len(document.ranks) < document.size:
        return None  # The shards of the other participants were not read yet.
    told = []
    for node in document.ranks:
        it = records.get(node)
        if it is None or it.world_id != document.world_id or it.resumed is None:
            return None
        told.append(it.resumed)
    started = max(it.started for it in told)
    whole = max(it.started + it.first_step for it in told)
    took = replace(
        record.seconds or Durations(), started=started / 1000, first_step=(whole - started) / 1000
    )
    # Take the maximum: a node that was not in the round before knows only an earlier step.
    known = [(it.lost_steps, it.trained) for it in told if it.lost_steps is not None]
    lost, trained = max(known, default=(None, 0))
    return replace(
        record,
        seconds=took,
        lost_steps=max(0, lost) if lost is not None else None,
        trained=trained / 1000,
    )


def _participants(nodes: Iterable[str], records: Mapping[str, NodeRecord]) -> Iterable[Member]:
    for rank, node in enumerate(nodes):
        record = records.get(node)
        yield _member(record.label if record is not None else node, record, rank)


def _member(name: str, record: NodeRecord | None, rank: int | None) -> Member:
    if record is None:
        return Member(name=name, rank=rank)
    return Member(name=name, address=record.address, pid=record.pid, rank=rank)
