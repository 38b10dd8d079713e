"""What stands in the store: the round document and the nodes' own records, as small JSON.

Bytes from the store are never trusted: they are parsed as JSON, checked field by field, and refused
with `RendezvousStateError`. Nothing is unpickled.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from rdzv_plugins.kv import RendezvousStateError

__all__ = [
    "BELL_KEY",
    "HISTORY_KEY",
    "NODES_PREFIX",
    "STATE_KEY",
    "STORE_PREFIX",
    "NodeRecord",
    "Phase",
    "RoundDocument",
    "Wants",
]

STATE_KEY = "state"
BELL_KEY = "bell"
HISTORY_KEY = "history"
NODES_PREFIX = "nodes/"
STORE_PREFIX = "store/"

SCHEMA = 1

# Below this size compressing gains nothing; above it ids of many nodes shrink by a third.
_COMPRESS_ABOVE = 1024
_COMPRESSED = b"z"
_LARGEST_DOCUMENT = 16 * 1024 * 1024

T = TypeVar("T")


class Phase(StrEnum):
    """Where a round is. Within a round phases only go forward."""

    FORMING = "forming"
    """Nodes join; nobody has a rank."""
    CONFIRMING = "confirming"
    """Ranks are given; each participant says that it has seen them, rank 0 opens MASTER_PORT."""
    RUNNING = "running"
    """Every participant has confirmed; agents start their workers."""
    CLOSED = "closed"
    """No further round forms."""

    @property
    def order(self) -> int:
        return _PHASE_ORDER[self]


_PHASE_ORDER = {phase: order for order, phase in enumerate(Phase)}


class Wants(StrEnum):
    """What a node's own record says."""

    JOIN = "join"
    RUN = "run"
    SPARE = "spare"
    LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class RoundDocument:
    """The one thing that all nodes agree on; changed by compare-and-set only.

    Attributes:
        round: grows with every change of membership.
        leader: id of the node that turns records into rounds; None: it left, the next takes over.
        participants: ids in rank order; empty while forming.
        previous: while forming, participants of the last round that must be accounted for, in their
            old rank order.
        lost: participants that are gone from a running round that goes on without them.
        waiting: nodes that were waiting when the document was written.
        reason: why this round, for people.
        ran: `naming` of the round that runs; it stays until the next one has its participants, for
            those of a round that was over before they saw it run.
        master: ``address:port`` of rank 0's TCPStore in that round.
    """

    round: int
    phase: Phase
    leader: str | None
    min_nodes: int
    max_nodes: int
    participants: tuple[str, ...] = ()
    previous: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    waiting: int = 0
    reason: str = ""
    ran: str | None = None
    master: str | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Where the document stands in the history of its run; a store only moves it forward."""
        return self.round, self.phase.order

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Each participant's rank."""
        return {node: rank for rank, node in enumerate(self.participants)}

    @cached_property
    def naming(self) -> str:
        """Tells rounds of one number apart: a store that forgot may see it given twice."""
        people = " ".join(self.participants).encode(errors="backslashreplace")
        return f"{self.round}-{zlib.crc32(people):08x}"

    def _check(self) -> None:
        """Raises ValueError for what no leader writes and no node could act on."""
        if self.phase in (Phase.CONFIRMING, Phase.RUNNING):
            if not self.participants or len(self.ranks) != len(self.participants):
                raise ValueError(f"participants {self.participants!r} while {self.phase}")
            if self.phase is Phase.RUNNING and self.master is None:
                raise ValueError("it runs, but names no MASTER_ADDR")

    def encode(self) -> bytes:
        fields = {
            "schema": SCHEMA,
            "round": self.round,
            "phase": self.phase.value,
            "leader": self.leader,
            "nodes": [self.min_nodes, self.max_nodes],
            # One string is parsed a hundred times faster than a list of thousands.
            "participants": " ".join(self.participants),
            "previous": " ".join(self.previous),
            "lost": " ".join(self.lost),
            "waiting": self.waiting,
            "reason": self.reason,
            "ran": self.ran,
            "master": self.master,
        }
        plain = json.dumps(fields, separators=(",", ":")).encode()
        if len(plain) <= _COMPRESS_ABOVE:
            return plain
        return _COMPRESSED + zlib.compress(plain, 1)

    @classmethod
    def decode(cls, data: bytes) -> RoundDocument:
        """Raises `RendezvousStateError` for anything that `encode` did not write."""
        fields = _parse(_expand(data), "the round document")
        schema = fields.get("schema")
        if schema != SCHEMA:
            raise RendezvousStateError(
                f"the round document has schema {schema!r}, this version of rdzv-plugins reads "
                f"{SCHEMA}: install the same version on every node, or use another --rdzv-id"
            )
        try:
            low, high = fields["nodes"]
            document = cls(
                round=_typed(fields["round"], int),
                phase=Phase(fields["phase"]),
                leader=_optional(fields["leader"], str),
                min_nodes=_typed(low, int),
                max_nodes=_typed(high, int),
                participants=_ids(_typed(fields["participants"], str)),
                previous=_ids(_typed(fields["previous"], str)),
                lost=_ids(_typed(fields["lost"], str)),
                waiting=_typed(fields["waiting"], int),
                reason=_typed(fields["reason"], str),
                ran=_optional(fields["ran"], str),
                master=_optional(fields["master"], str),
            )
            document._check()
            return document
        except (KeyError, TypeError, ValueError) as error:
            raise RendezvousStateError(f"the round document is unreadable: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What a node says of itself; written by nobody else.

    Attributes:
        beat: grows with every write; a node whose beat stands still is lost.
        round: the last round in which this node was named; -1 before its first.
        naming: `RoundDocument.naming` of the last round in which it has seen its rank.
        min_nodes, max_nodes: its ``--nnodes``.
        rank: its ``--rdzv-conf rank``.
        master: on rank 0, ``address:port`` of its TCPStore for ``round``.
    """

    address: str
    pid: int
    beat: int
    wants: Wants
    round: int
    min_nodes: int
    max_nodes: int
    naming: str | None = None
    rank: int | None = None
    master: str | None = None

    @property
    def label(self) -> str:
        """The node's name for people."""
        return f"{self.address}[{self.pid}]"

    def encode(self) -> bytes:
        fields: dict[str, Any] = {
            "addr": self.address,
            "pid": self.pid,
            "beat": self.beat,
            "wants": self.wants.value,
            "round": self.round,
            "nodes": [self.min_nodes, self.max_nodes],
        }
        if self.naming is not None:
            fields["naming"] = self.naming
        if self.rank is not None:
            fields["rank"] = self.rank
        if self.master is not None:
            fields["master"] = self.master
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> NodeRecord:
        """Raises `RendezvousStateError` for anything that `encode` did not write."""
        fields = _parse(data, "a node's record")
        try:
            low, high = fields["nodes"]
            return cls(
                address=_typed(fields["addr"], str),
                pid=_typed(fields["pid"], int),
                beat=_typed(fields["beat"], int),
                wants=Wants(fields["wants"]),
                round=_typed(fields["round"], int),
                min_nodes=_typed(low, int),
                max_nodes=_typed(high, int),
                naming=_optional(fields.get("naming"), str),
                rank=_optional(fields.get("rank"), int),
                master=_optional(fields.get("master"), str),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RendezvousStateError(f"a node's record is unreadable: {error!r}") from error


# The participants of a round that confirms are those of the round that runs: split them once.
@lru_cache(maxsize=8)
def _ids(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _expand(data: bytes) -> bytes:
    if data[:1] != _COMPRESSED:
        return data
    expander = zlib.decompressobj()
    try:
        # The bound keeps a crafted value from filling every node's memory.
        plain = expander.decompress(data[1:], _LARGEST_DOCUMENT)
    except zlib.error as error:
        raise RendezvousStateError("the round document cannot be decompressed") from error
    if not expander.eof:
        raise RendezvousStateError("the round document is cut off or too large")
    return plain


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RendezvousStateError(f"{what} is not JSON") from error
    if not isinstance(fields, dict):
        raise RendezvousStateError(f"{what} is not a JSON object")
    return fields


def _typed(value: object, kind: type[T]) -> T:
    # bool is an int to Python, not to a reader of the document.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _optional(value: object, kind: type[T]) -> T | None:
    return None if value is None else _typed(value, kind)
