"""What `protocol.decide` is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rdzv_plugins.protocol.documents import NodeRecord, RoundDocument, Status

__all__ = [
    "Abdicate",
    "Action",
    "AskTombstone",
    "Close",
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
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings of a run that its protocol depends on; times in seconds.

    Attributes:
        request: the longest that a request to the store takes, its retries included.
        rejoin: how long a participant that lives may take to ask for the next round.
        sweep_after: how long the keys of a closed run stay.
        abandoned: how long the keys of a run stay that nobody leads any more.
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


# Not frozen: one is made for each decision, and a frozen one takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class View:
    """All that a node knows when it decides; nobody changes it.

    Attributes:
        me: this node's id.
        record: this node's record as it last wrote it.
        joining: an agent waits for a round; False: its workers run, or it has not asked yet.
        document: the document as last read; None: there is none, or nobody can read it.
        document_age: seconds since ``document`` was first seen as it is.
        round_age: seconds since its round was first seen.
        latest: the document of the highest place that this node has seen of its run.
        asked_tombstones: incarnations that were looked for among those that ended, and had not;
            none since ``document`` was last as it should be.
        own: the incarnation in which this node was named last.
        member: the round that the agent runs in, or ran in last.
        confirmed: the round that this node last said it has seen, as it stood then.
        records: all nodes' records, read after ``document``; None: not read.
        leader: the leader's record as this node, which does not lead, last read it.
        confirmed_silence: seconds for which a node's beat is known to have stood still, on this
            node's clock.
        possible_silence: seconds since a node's beat was last seen to move; it may have done so
            again.
        moved: whether a node's beat has moved since this node began to watch it.
        confirmed_idleness, possible_idleness: the same of the leader's looks at all records.
        cannot_list: this node leads, and has not been able to read all records for a lease.
        abdicated: so it was once.
        minimum_age: seconds since this leader first counted ``min_nodes`` ready nodes; None: fewer.
        share: this node's random share of an interval, in [0, 1).
        fresh: an incarnation, should this node found a run.
    """

    me: str
    rules: Rules
    record: NodeRecord
    joining: bool
    document: RoundDocument | None
    document_age: float
    round_age: float
    latest: RoundDocument | None
    asked_tombstones: frozenset[str]
    own: str | None
    member: RoundDocument | None
    confirmed: RoundDocument | None
    records: Mapping[str, NodeRecord] | None
    leader: NodeRecord | None
    confirmed_silence: Callable[[str], float]
    possible_silence: Callable[[str], float]
    moved: Callable[[str], bool]
    confirmed_idleness: float
    possible_idleness: float
    cannot_list: bool
    abdicated: bool
    minimum_age: float | None
    share: float
    fresh: str

    def lease(self, node: str) -> float:
        """Each node is judged by its own lease, as its record says."""
        record = self.records.get(node) if self.records is not None else None
        if record is None and self.document is not None and node == self.document.leader:
            record = self.leader
        return self.rules.lease if record is None else record.lease


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

    status: Status
    incarnation: str | None
    round: int
    ring: bool = True


@dataclass(frozen=True, slots=True)
class Confirm:
    """Say in this node's record that it has seen its rank; rank 0 opens MASTER_PORT first."""

    document: RoundDocument
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
    """Read the document again, then all records: this node leads, or must know who lives."""


@dataclass(frozen=True, slots=True)
class AskTombstone:
    """Look whether the run that this node remembers has ended."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Close:
    """Close the run as succeeded: nobody that is left has work."""

    document: RoundDocument


@dataclass(frozen=True, slots=True)
class Abdicate:
    """Compare-and-set the document to one without a leader: this node cannot lead."""

    document: RoundDocument


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before something changes or ``seconds`` have passed (None: for any time)."""

    seconds: float | None = None
    minimum_reached: bool = False


Action: TypeAlias = (
    Write
    | SetRecord
    | Confirm
    | Start
    | Fail
    | ListRecords
    | AskTombstone
    | Abdicate
    | Close
    | Wait
)
