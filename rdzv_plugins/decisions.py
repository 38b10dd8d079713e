"""What `protocol.decide` is given, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rdzv_plugins.documents import NodeRecord, RoundDocument, Wants

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
]


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
        confirmed: the round that this node last said it has seen, as it stood then.
        records: all nodes' records, read after ``document``; None: not read.
        leader_label: the leader's name for people; None: its record was not read.
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
    confirmed: RoundDocument | None
    records: Mapping[str, NodeRecord] | None
    leader_label: str | None
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
