"""The argument of `decide.decide` (a `View`), and its answers (an `Action`)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TypeAlias

import msgspec

from rdzv_plugins.protocol.documents import (
    Exclusion,
    NodeRecord,
    Outcome,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.failure_detector import Watched

INLINE = 128
"""See `Rules.inline`."""

_IN_POLICY = re.compile(r"(?:^|,)(\w+)=([\w.]{1,20})(?=,|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings of a run that its protocol depends on; times in seconds.

    Attributes:
        request: the longest that a request to the store takes, its retries included.
        rejoin: how long a live participant may take to ask for the next round.
        sweep_after: how long the keys of a closed run stay.
        abandoned: how long the keys of a run without a leader stay.
        replacement: how long a restart waits for a replacement of a lost node; None: ``last_call``.
        min_uptime: how long a round runs before it is ended for newcomers.
        resize_interval: how long after newcomers were let in the next ones are.
        grow: when newcomers are let in: ``now``, ``checkpoint`` or ``never``.
        no_progress_rounds, no_progress_uptime: after so many rounds in a row that ran for less, the
            run is closed; 0: never.
        quarantine_after: a host that ends so many rounds within ``quarantine_window`` is kept out
            for a time; 0: never; None: three, by its loss alone.
        inline: the most nodes whose ids stand in the document; more stand in shards of about so
            many each.
        node_unit: the number of nodes of a round is a multiple of it.
        segment: a round takes whole segments of so many nodes of one domain.
        network_check: a round runs once its nodes have exchanged data, and have reached rank 0.
        outage_limit: a node of which the store has accepted no heartbeat for so long stops its
            workers; infinite: only if the store refuses it, after its lease.
        answer: seconds within which a wake-up reaches a node and its heartbeat the store; None: no
            node has links, and nobody is accused.
        probation: for so long a node is new to a run, unless ``min_uptime`` says otherwise.
        run: its id; a document that says it is another run's is not believed. "": it is not known.
        sealed: nobody but its nodes and commands can have written what is read: what is older than
            what this node has read was put back, or a store that forgot has it.
    """

    min_nodes: int
    max_nodes: int
    lease: float
    interval: float
    last_call: float
    restart_on_loss: bool = True
    rank_order: str = "natural"
    request: float = 5.0
    rejoin: float = 480.0
    sweep_after: float = 60.0
    abandoned: float = 3600.0
    replacement: float | None = None
    min_uptime: float = 0.0
    resize_interval: float = 0.0
    grow: str = "now"
    no_progress_rounds: int = 0
    no_progress_uptime: float = 0.0
    quarantine_after: int | None = 0
    quarantine_window: float = 3600.0
    inline: int = INLINE
    node_unit: int = 1
    segment: int = 1
    network_check: bool = False
    outage_limit: float = math.inf
    probation: float = 60.0
    answer: float | None = None
    run: str = ""
    sealed: bool = False

    @classmethod
    def told(cls, document: RoundDocument, leader: NodeRecord | None) -> Rules:
        """As somebody knows them who has the document and the leader's record only.

        The record tells the options that are not at their defaults; those count here that have the
        same name as a setting, and a possible value.
        """
        known = cls(
            min_nodes=document.min_nodes,
            max_nodes=document.max_nodes,
            lease=leader.lease if leader is not None else 0.0,
            interval=leader.interval if leader is not None else 0.0,
            last_call=0.0,
        )
        for name, text in _IN_POLICY.findall(leader.policy if leader is not None else ""):
            if name not in _OPTIONS:
                continue
            try:
                value = msgspec.convert(text, type(getattr(known, name)), strict=False)
            except msgspec.ValidationError:
                continue  # It stands in the store, and is not ours to trust.
            known = replace(known, **{name: value})
        return known

    def of_run(self, run_id: str, *, sealed: bool = False) -> Rules:
        """The same, of this run."""
        return dataclasses.replace(self, run=run_id, sealed=sealed)

    @property
    def minds_domains(self) -> bool:
        """Whether it counts in which domain a node is."""
        return self.segment > 1 or self.rank_order == "topology"

    @property
    def outage(self) -> float:
        """A store that has not answered for longer has been away; slow ones answer sooner."""
        return max(self.interval, self.lease / 3)


_OPTIONS = {it.name for it in fields(Rules) if isinstance(it.default, bool | int | float | str)}


class View(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node knows when it decides, as plain data: a log of views can be decided again.

    Attributes:
        me: this node's id.
        record: this node's record as it last wrote it.
        joining: an agent waits for a round; False: its workers run, or it has not asked yet.
        join_left: seconds until its time is over.
        document: the document as last read; None: there is none, or it is unreadable.
        document_age: seconds since ``document`` was first seen as it is.
        round_age: seconds since its round was first seen.
        uptime: seconds since this node first saw its round run; 0 if it does not run.
        longest_uptime: seconds for which it may have run; infinite: this node did not see it form.
        grown_for: seconds since this node first saw the last round that let newcomers in.
        latest: as `observer.Observer.latest`.
        asked_tombstones: as `observer.Observer.asked_tombstones`.
        member: the round that the agent runs in, or ran in last.
        confirmed: the round whose rank this node confirmed last, as it stood then.
        given: the last round that the agent was given, by incarnation.
        records: all nodes' records, read after ``document``; None: not read.
        leader: the leader's record as this node, which does not lead, last read it.
        now: the time on this node's clock, in seconds.
        watched: what this node knows of the beats of those that it watches. The observer keeps it
            up to date: to keep a view for later, encode it.
        confirmed_idleness: seconds for which the leader's count of listings is known to have stood
            still.
        possible_idleness: seconds since that was last seen to move.
        lag: seconds more that this node gives others, since its own beats came late.
        cannot_list: this node leads, and has not been able to list all records for a lease.
        abdicated: it gave up a lead for that reason once.
        enough_for: seconds since this leader first counted ``min_nodes`` ready nodes; None: fewer.
        share: this node's random share of an interval, in [0, 1).
        fresh: an incarnation, should this node found a run.
        wall: the time on this host's wall clock, in seconds since the epoch; exclusions end by it.
        carried: the exclusions that outlive runs, for a leader; None: not read.
        checks: this node checks its network, and has not confirmed its rank yet.
        opening_for: of rank 0: seconds since it began to open the TCPStore of the round whose rank
            it is to confirm; None: it does not, or that has come to an end.
        unheard: the most seconds in a row in which this node's workers ran, in the round that they
            were given last, and the store accepted no heartbeat of it.
        unanswered: those that the document names as accused and that have not beaten since, each
            with the seconds for which this is known.
        latency: seconds that the last listing of all records took, or by which this node's last
            pause was too long.
        until_first_lease: seconds until the first of all leases could run out, the shortest after
            the longest silence; None: one has, as far as is confirmed, or this is not known. A
            leader that knows it need not go through all nodes.
    """

    me: str
    rules: Rules
    record: NodeRecord
    joining: bool
    document: RoundDocument | None
    document_age: float
    round_age: float
    uptime: float
    longest_uptime: float
    grown_for: float
    latest: RoundDocument | None
    asked_tombstones: frozenset[str]
    member: RoundDocument | None
    confirmed: RoundDocument | None
    given: Mapping[str, int]
    records: Mapping[str, NodeRecord] | None
    leader: NodeRecord | None
    now: float
    watched: Mapping[str, Watched]
    confirmed_idleness: float
    possible_idleness: float
    lag: float
    cannot_list: bool
    abdicated: bool
    enough_for: float | None
    share: float
    fresh: str
    wall: float
    carried: tuple[Exclusion, ...] | None
    checks: bool = False
    join_left: float = math.inf
    opening_for: float | None = None
    unheard: float = 0.0
    until_first_lease: float | None = None
    unanswered: Mapping[str, float] = {}
    latency: float = 0.0

    @property
    def own(self) -> str | None:
        """The incarnation in which this node confirmed a rank last."""
        return self.confirmed.incarnation if self.confirmed is not None else None

    @property
    def is_late(self) -> bool:
        """Whether the time is over of the agent that waits for a round."""
        return self.joining and self.join_left <= 0

    def confirmed_silence(self, node: str) -> float:
        """Seconds for which a node's beat is known to have stood still, on this node's clock."""
        seen = self.watched.get(node)
        # Not `Watched.silence`: a leader asks this of thousands of nodes.
        return max(0.0, seen.looked - seen.since) if seen is not None else 0.0

    def possible_silence(self, node: str) -> float:
        """Seconds since a node's beat was last seen to move; it may have moved since."""
        seen = self.watched.get(node)
        return self.now - seen.since if seen is not None else 0.0

    def forgiven(self, node: str) -> float | None:
        """Seconds of a node's silence that are not held against it; None: it was never doubted."""
        seen = self.watched.get(node)
        return seen.forgiven if seen is not None else None

    def moved(self, node: str) -> bool:
        """Whether a node's beat has moved since this node began to watch it."""
        seen = self.watched.get(node)
        return seen is not None and seen.moved

    def lease_and_lag(self, node: str) -> float:
        """The lease in the node's record, and this node's `lag`."""
        record = self.records.get(node) if self.records is not None else None
        if record is None and self.document is not None and node == self.document.leader:
            record = self.leader
        return self.lag + (self.rules.lease if record is None else record.lease)

    def patience(self, node: str) -> float:
        """As `Watched.patience`."""
        seen, lease = self.watched.get(node), self.lease_and_lag(node)
        return seen.patience(lease) if seen is not None else lease

    def is_lost(self, node: str) -> bool:
        """Whether another node is lost by its heartbeats: `Watched.is_lost`."""
        if node == self.me or self.until_first_lease is not None:
            return False
        seen = self.watched.get(node)
        return seen is not None and seen.is_lost(self.lease_and_lag(node))


class Failure(StrEnum):
    """Why a join cannot succeed."""

    CLOSED = "closed"
    """The run is closed."""
    SPARE_CLOSED = "spare closed"
    """The run was closed while this node waited as a spare."""
    DRAINED = "drained"
    """A person took this node out of the run."""
    CUT_OFF = "cut off"
    """This node failed the network check with several others, and is unfit."""
    MISMATCH = "mismatch"
    """The run was started with other ``--nnodes``."""
    TIMEOUT = "timeout"
    """No round formed within ``join_timeout``."""


class Write(msgspec.Struct, frozen=True):
    """Compare-and-set the document."""

    document: RoundDocument


class SetRecord(msgspec.Struct, frozen=True):
    """Write this node's record; ``ring`` tells the leader.

    ``hosts``: False: this node opened no TCPStore in time, and is not to be rank 0 again.
    """

    status: Status
    incarnation: str | None
    round: int
    ring: bool = True
    hosts: bool = True


class Confirm(msgspec.Struct, frozen=True):
    """Confirm the rank in this node's record; rank 0 opens MASTER_PORT first.

    ``seconds``: how long this may take before the node decides again; None: there is no limit.
    """

    document: RoundDocument
    is_master: bool
    seconds: float | None = None


class Start(msgspec.Struct, frozen=True):
    """The round runs: release the agent."""

    document: RoundDocument


class Fail(msgspec.Struct, frozen=True):
    """Raise in the agent's call."""

    failure: Failure


class Doubt(msgspec.Struct, frozen=True):
    """Give each of these nodes one more lease: so many at once may be the store or the load.

    Attributes:
        begins: nobody is doubted yet; else the doubt goes on with more nodes.
        late, world: how many nodes are late, of how many.
    """

    nodes: tuple[str, ...]
    begins: bool
    late: int
    world: int


class ListRecords(msgspec.Struct, frozen=True):
    """List all records: this node leads, or must know which nodes live."""


class AskTombstone(msgspec.Struct, frozen=True):
    """Look for a tombstone of the run that this node remembers."""

    incarnation: str


class Close(msgspec.Struct, frozen=True):
    """Close the run: no node has work left, or it makes no progress."""

    document: RoundDocument
    outcome: Outcome
    why: str


class Abdicate(msgspec.Struct, frozen=True):
    """Write the document without a leader: this node cannot lead.

    ``fails``: its listings fail; False: it is unfit, and may be well again.
    """

    document: RoundDocument
    fails: bool = True


class Wait(msgspec.Struct, frozen=True):
    """Do nothing until something changes or ``seconds`` have passed (None: no limit).

    ``enough``: this leader counts ``min_nodes`` ready nodes, so that the last call runs.
    """

    seconds: float | None = None
    enough: bool = False


Action: TypeAlias = (
    Write
    | SetRecord
    | Confirm
    | Start
    | Fail
    | ListRecords
    | AskTombstone
    | Doubt
    | Abdicate
    | Close
    | Wait
)
