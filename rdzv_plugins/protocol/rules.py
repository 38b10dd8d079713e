"""What `decide.decide` is given (a `View`), and what it answers (an `Action`)."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TypeAlias

import msgspec

from rdzv_plugins.protocol.documents import Exclusion, NodeRecord, Outcome, RoundDocument, Status
from rdzv_plugins.protocol.failure_detector import Watched

INLINE = 128
"""See `Rules.inline`."""

_IN_OPTIONS = re.compile(r"(?:^|,)(\w+)=([\w.]{1,20})(?=,|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings of a run that its protocol depends on; times in seconds.

    Attributes:
        request_timeout: the longest time that a request to the store takes, with its retries.
        rejoin_timeout: how long a live participant may take to ask for the next round.
        sweep_after: how long the keys of a closed run stay.
        abandoned_ttl: how long the keys of a run without a leader stay.
        replacement_timeout: how long a restart waits for a replacement of a lost node; None:
            ``last_call_timeout``.
        quarantine_after: rounds that a host may end within ``quarantine_window`` before it is kept
            out; 0: any number; None: three, and only losses count.
        inline: the most node ids that the document holds itself; a larger round is split into
            shards of about this size.
        node_unit: the number of nodes of a round is a multiple of it.
        segment: a round takes whole segments, of this many nodes of one domain each.
        outage_limit: a node stops its workers once the store has accepted none of its heartbeats
            for this long; infinite: only if the store refuses the node, after its lease.
        answer_timeout: seconds within which an accused node answers: a wake-up reaches it, and its
            heartbeat reaches the store. None: nodes have no links, and nobody is accused.
        save_timeout: how long a planned end of a round waits for its checkpoint; 0: not at all.
        step_timeout: a round ends once a rank has done no step for this long; 0: never.
        probation: how long a node is new to a run, where ``min_uptime`` is 0.
        run: the id of the run; a document with another id is not believed. "": not known.
        sealed: only nodes and commands of the run can have written what this node reads. An older
            document was then put back, or the store lost a newer one.
    """

    min_nodes: int
    max_nodes: int
    lease: float
    interval: float
    last_call_timeout: float
    restart_on_loss: bool = True
    rank_order: str = "natural"
    request_timeout: float = 5.0
    rejoin_timeout: float = 480.0
    sweep_after: float = 60.0
    abandoned_ttl: float = 3600.0
    replacement_timeout: float | None = None
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
    save_timeout: float = 0.0
    step_timeout: float = 0.0
    probation: float = 60.0
    answer_timeout: float | None = None
    run: str = ""
    sealed: bool = False

    @classmethod
    def as_stored(cls, document: RoundDocument, leader: NodeRecord | None) -> Rules:
        """The settings, read from the document and the leader's record."""
        known = cls(
            min_nodes=document.min_nodes,
            max_nodes=document.max_nodes,
            lease=leader.lease if leader is not None else 0.0,
            interval=leader.interval if leader is not None else 0.0,
            last_call_timeout=0.0,
        )
        for name, text in _IN_OPTIONS.findall(leader.run_options if leader is not None else ""):
            if name not in _OPTIONS:
                continue
            try:
                value = msgspec.convert(text, type(getattr(known, name)), strict=False)
            except msgspec.ValidationError:
                continue  # Stored values are not trusted.
            known = replace(known, **{name: value})
        return known

    def of_run(self, run_id: str, *, sealed: bool = False) -> Rules:
        """These settings with the run's id and whether it is sealed."""
        return dataclasses.replace(self, run=run_id, sealed=sealed)

    @property
    def minds_domains(self) -> bool:
        """Whether domains matter to the choice or the order of nodes."""
        return self.segment > 1 or self.rank_order == "topology"

    @property
    def shortest_outage(self) -> float:
        """Seconds without an answer; after less than this the store counts as slow, not as away."""
        return max(self.interval, self.lease / 3)


@dataclass(frozen=True, slots=True)
class Own:
    """What the parts of one node share.

    Attributes:
        clock: monotonic seconds.
        wall: see `View.wall`.
        chance: the source of its random share, its pauses and of incarnations.
    """

    id: str
    rules: Rules
    clock: Callable[[], float]
    wall: Callable[[], float]
    chance: random.Random


_OPTIONS = {it.name for it in fields(Rules) if isinstance(it.default, bool | int | float | str)}


class View(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node knows when it decides, as plain data: a log of views can be decided again.

    Attributes:
        record: this node's record, as it is now or will be written next.
        joining: an agent waits for a round; False: its workers run, or it has not asked yet.
        join_left: seconds until the join times out.
        document: the document as last read; None: there is none, or it is unreadable.
        document_age: seconds since ``document`` was first seen.
        round_age: seconds since its round was first seen.
        uptime: seconds since this node first saw the round run; 0 if the round does not run.
        longest_uptime: the most seconds for which the round may have run; infinite: this node did
            not see it form.
        grown_for: seconds since this node first saw the last round that let newcomers in.
        saving_for: seconds since this node first saw that the round awaits a checkpoint.
        latest: the document of this node's run with the highest (round, phase) that it has read.
        without_tombstone: incarnations for which this node has lately found no tombstone.
        member: the round that the agent runs in, or ran in last.
        confirmed: the round whose rank this node confirmed last, as the document was then.
        rounds_given: by incarnation, the number of the last round that the agent was given.
        records: all nodes' records, read after ``document``; None: not read.
        leader: the leader's record as last read; None where this node leads.
        now: seconds on this node's monotonic clock.
        watched: the heartbeats that this node watches. The observer changes this mapping in place:
            to keep a view for later, encode it.
        confirmed_idleness: seconds for which the leader's count of listings is known to have stood
            still.
        possible_idleness: seconds since that count was last seen to change.
        lag: seconds that this node adds to every lease, because its own heartbeats were late.
        cannot_list: this node leads, and has not been able to list all records for a lease.
        abdicated: this node once gave up a lead because it could not list the records.
        enough_for: seconds since this leader first counted ``min_nodes`` ready nodes; None: fewer.
        share: this node's random share of an interval, in [0, 1).
        fresh: the incarnation to use if this node founds a run.
        wall: this host's wall clock, in seconds since the epoch: exclusions and quarantines end by
            it, and fencing tokens and editions count its milliseconds.
        carried: for a leader, the exclusions of earlier runs of the id; None: not read.
        checks: this node checks its network before it confirms its rank.
        opening_for: seconds since this node, rank 0, began to open its TCPStore; None: it opens
            none.
        unheard: the most seconds in a row in which the workers ran and the store accepted no
            heartbeat, in the round that they were given last.
        unanswered: the accused nodes of the document that are not known to have beaten since, each
            with the seconds for which that is known.
        latency: seconds that the last listing took, or by which this node's last pause was too
            long, whichever is more.
        until_first_lease: seconds until the first lease could run out, from the shortest lease and
            the longest silence. A leader that knows it skips the look at each node; None: look, as
            a lease has run out or the time is not known.
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
    without_tombstone: frozenset[str]
    member: RoundDocument | None
    confirmed: RoundDocument | None
    rounds_given: Mapping[str, int]
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
    saving_for: float = 0.0
    checks: bool = False
    join_left: float = math.inf
    opening_for: float | None = None
    unheard: float = 0.0
    until_first_lease: float | None = None
    unanswered: Mapping[str, float] = {}
    latency: float = 0.0

    @property
    def own_incarnation(self) -> str | None:
        """The incarnation in which this node last confirmed a rank."""
        return self.confirmed.incarnation if self.confirmed is not None else None

    @property
    def join_timed_out(self) -> bool:
        """Whether the join of the waiting agent has timed out."""
        return self.joining and self.join_left <= 0

    def confirmed_silence(self, node: str) -> float:
        """Seconds for which a node's beat is known to have stood still: up to the last look."""
        seen = self.watched.get(node)
        # Not `Watched.silence`: the call costs a leader of thousands of nodes too much.
        return max(0.0, seen.looked - seen.since) if seen is not None else 0.0

    def possible_silence(self, node: str) -> float:
        """Seconds since a node's beat was last seen to move; it may have moved since."""
        seen = self.watched.get(node)
        return self.now - seen.since if seen is not None else 0.0

    def had_grace(self, node: str) -> bool:
        """See `Watched.had_grace`."""
        seen = self.watched.get(node)
        return seen is not None and seen.had_grace

    def moved(self, node: str) -> bool:
        """See `Watched.moved`."""
        seen = self.watched.get(node)
        return seen is not None and seen.moved

    def lease_and_lag(self, node: str) -> float:
        """The sum of the lease in the node's record and this node's `lag`."""
        record = self.records.get(node) if self.records is not None else None
        if record is None and self.document is not None and node == self.document.leader:
            record = self.leader
        return self.lag + (self.rules.lease if record is None else record.lease)

    def patience(self, node: str) -> float:
        """See `Watched.patience`."""
        seen, lease_and_lag = self.watched.get(node), self.lease_and_lag(node)
        return seen.patience(lease_and_lag) if seen is not None else lease_and_lag

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
    AT_FAULT = "at fault"
    """The network check failed between this node and several others: this node is unfit."""
    MISMATCH = "mismatch"
    """The run was started with other ``--nnodes``."""
    TIMEOUT = "timeout"
    """No round formed within ``join_timeout``."""


class Write(msgspec.Struct, frozen=True):
    """Compare-and-set the document."""

    document: RoundDocument


class SetRecord(msgspec.Struct, frozen=True):
    """Write this node's record; ``ring``: ring the bell; ``can_host``: see `NodeRecord`."""

    status: Status
    incarnation: str | None
    round: int
    ring: bool = True
    can_host: bool = True


class Confirm(msgspec.Struct, frozen=True):
    """Confirm the rank, on rank 0 after it opened MASTER_PORT; give up after ``seconds``."""

    document: RoundDocument
    is_master: bool
    seconds: float | None = None


class Start(msgspec.Struct, frozen=True):
    """The round runs: release the agent."""

    document: RoundDocument


class Fail(msgspec.Struct, frozen=True):
    """End the join without a round; `process.explain` says how the agent's call ends."""

    failure: Failure


class Doubt(msgspec.Struct, frozen=True):
    """Give ``nodes`` one more lease: ``late`` of ``world`` are late; ``begins``: a new doubt."""

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
    """Close the run: no node has work left, or the run makes no progress."""

    document: RoundDocument
    outcome: Outcome
    why: str


class Abdicate(msgspec.Struct, frozen=True):
    """Write the document without a leader; ``fails``: listings fail, False: the node is unfit."""

    document: RoundDocument
    fails: bool = True


class Wait(msgspec.Struct, frozen=True):
    """Wait for a change or ``seconds``; ``enough``: enough nodes are ready for the last call."""

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
