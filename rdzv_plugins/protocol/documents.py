"""What stands in the store: the round document and the nodes' own records, as small JSON.

Bytes from the store are never trusted: they are parsed as JSON, checked field by field, and refused
with `RendezvousStateError`. Nothing is unpickled.
"""

from __future__ import annotations

import json
import types
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
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
    "Cause",
    "CorruptDocumentError",
    "Names",
    "NodeRecord",
    "Outcome",
    "Phase",
    "RoundDocument",
    "Status",
    "store_prefix",
]

STATE_KEY = "state"
BELL_KEY = "bell"
HISTORY_KEY = "history"
NODES_PREFIX = "nodes/"
STORE_PREFIX = "store/"

SCHEMA = 2

# Below this size compressing gains nothing; above it ids of many nodes shrink by a third.
_COMPRESS_ABOVE = 1024
_COMPRESSED = b"z"
_LARGEST_DOCUMENT = 16 * 1024 * 1024
_LONGEST_LEASE = 1e12

# How many names a cause keeps, and how many of them a sentence shows.
_NAMES_KEPT = 16
_NAMES_SHOWN = 4

# One for all: json.dumps makes another encoder for each call.
_JSON = json.JSONEncoder(separators=(",", ":"))

T = TypeVar("T")


def store_prefix(incarnation: str, round_: int) -> str:
    """Where the c10d store of a round stands: no two runs of one id ever share one."""
    return f"{STORE_PREFIX}{incarnation}/{round_}/"


class CorruptDocumentError(RendezvousStateError):
    """What stands as the round document was written by no version of this package."""


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


class Status(StrEnum):
    """What a node's own record says."""

    JOIN = "join"
    """It asks for a round; no worker of it runs."""
    RUN = "run"
    """It has seen its rank; its workers may run."""
    SPARE = "spare"
    """It asks for a round, and the one that runs has no room for it."""
    DONE = "done"
    """Its workers succeeded; it waits for those of the other nodes."""
    LEFT = "left"
    """It is in no round and asks for none."""


class Outcome(StrEnum):
    """How a run that is closed ended."""

    SUCCEEDED = "succeeded"
    """The workers of a node succeeded, and nobody else has work left."""
    FAILED = "failed"
    """An agent gave up: the others end too."""
    CLOSED = "closed"
    """Somebody status no further round; the one that runs goes on."""


@dataclass(frozen=True, slots=True)
class Names:
    """Nodes by their labels: the first few, and how many there are besides."""

    first: tuple[str, ...] = ()
    more: int = 0

    def __bool__(self) -> bool:
        return bool(self.first)

    def __contains__(self, label: str) -> bool:
        return label in self.first

    def __str__(self) -> str:
        hidden = len(self.first) - _NAMES_SHOWN + self.more
        shown = ", ".join(self.first[:_NAMES_SHOWN])
        return f"{shown} and {hidden} more" if hidden > 0 else shown

    def plus(self, labels: Iterable[str]) -> Names:
        """These and others."""
        fresh = sorted(set(labels) - set(self.first))
        room = _NAMES_KEPT - len(self.first)
        return Names((*self.first, *fresh[:room]), self.more + max(0, len(fresh) - room))

    def without(self, labels: Collection[str]) -> Names:
        """These but for some of the first."""
        return replace(self, first=tuple(label for label in self.first if label not in labels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a round: what became of which nodes. Amended while the round forms.

    Attributes:
        lost: their leases ran out.
        left: they said that they leave.
        failed: their workers failed, and their agents asked for another round.
        joined: they are new.
        evicted: they live, but did not ask for the round in time.
        note: what else there is to say.
    """

    lost: Names = Names()
    left: Names = Names()
    failed: Names = Names()
    joined: Names = Names()
    evicted: Names = Names()
    note: str = ""

    def __str__(self) -> str:
        parts = [
            f"lost {self.lost}: lease ran out" if self.lost else "",
            f"{self.left} left" if self.left else "",
            f"{self.failed} joined again (its workers failed)" if self.failed else "",
            f"{self.evicted} left out: did not ask for this round in time" if self.evicted else "",
            f"{self.joined} joined" if self.joined else "",
            self.note,
        ]
        return "; ".join(part for part in parts if part)

    def plus(self, **names: Iterable[str]) -> Cause:
        """This cause with more nodes; each keyword is a field."""
        return replace(self, **{name: getattr(self, name).plus(to) for name, to in names.items()})

    def encode(self) -> str:
        """As JSON, without the fields that are empty."""
        fields: dict[str, Any] = {"note": self.note} if self.note else {}
        for name in _CAUSES:
            if names := getattr(self, name):
                fields[name] = [names.more, *names.first]
        return _JSON.encode(fields)

    @classmethod
    def decode(cls, text: str) -> Cause:
        """Raises TypeError or ValueError for what `encode` did not write."""
        fields = _typed(json.loads(text), dict)
        named = {}
        for name in _CAUSES:
            if name in fields:
                more, *first = _typed(fields[name], list)
                labels = tuple(_typed(label, str) for label in first)
                named[name] = Names(labels, _typed(more, int))
        return cls(**named, note=_typed(fields.get("note", ""), str))


_CAUSES = tuple(item.name for item in fields(Cause) if item.name != "note")


@dataclass(frozen=True, kw_only=True)
class RoundDocument:
    """The one thing that all nodes agree on; changed by compare-and-set only.

    Attributes:
        incarnation: random; the run that this is, of all that its id has named or will name.
        round: grows with every change of membership.
        leader: id of the node that turns records into rounds; None: it left, the next takes over.
        participants: ids in rank order; empty while forming.
        previous: while forming, participants of the last round that must be accounted for, in their
            old rank order.
        lost: participants that are gone from a running round that goes on without them.
        evicted: nodes that live and may not have stopped, but are waited for no more.
        waiting: nodes that were waiting when the document was written.
        cause: why this round, for people; of a closed run, why it was closed.
        finishing: a participant's workers succeeded, so that nobody new is let in.
        outcome: of a closed run.
        expires: of a closed run: its keys have been told to expire after ``closed_ttl``.
        ran: `world_id` of the round that runs; it stays until the next one has its participants,
            for those of a round that was over before they saw it run.
        master: ``address:port`` of rank 0's TCPStore in that round.
    """

    incarnation: str
    round: int
    phase: Phase
    leader: str | None
    min_nodes: int
    max_nodes: int
    participants: tuple[str, ...] = ()
    previous: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    waiting: int = 0
    cause: Cause = Cause()
    finishing: bool = False
    outcome: Outcome | None = None
    expires: bool = False
    ran: str | None = None
    master: str | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Where the document stands in the history of its run; a store only moves it forward.

        Places of two incarnations are not to be compared.
        """
        return self.round, self.phase.order

    @property
    def closed(self) -> bool:
        return self.phase is Phase.CLOSED

    @property
    def reason(self) -> str:
        """The cause, in words."""
        return str(self.cause)

    def is_of(self, other: RoundDocument | None) -> bool:
        """Whether both are of one run, and not of two that its id has named."""
        return other is not None and self.incarnation == other.incarnation

    def names(self, node: str) -> bool:
        """Whether the run counts on the node: it is in the round, or was in the last one."""
        return node in self.ranks or node in self.previous

    @cached_property
    def ranks(self) -> dict[str, int]:
        """Each participant's rank."""
        return {node: rank for rank, node in enumerate(self.participants)}

    @cached_property
    def world_id(self) -> str:
        """Tells rounds of one number apart: a store that forgot may see it given twice."""
        people = " ".join((self.incarnation, *self.participants)).encode(errors="backslashreplace")
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
            "incarnation": self.incarnation,
            "round": self.round,
            "phase": self.phase.value,
            "leader": self.leader,
            "nodes": [self.min_nodes, self.max_nodes],
            # One string is parsed a hundred times faster than a list of thousands.
            "participants": " ".join(self.participants),
            "previous": " ".join(self.previous),
            "lost": " ".join(self.lost),
            "evicted": " ".join(self.evicted),
            "waiting": self.waiting,
            "cause": self.cause.encode(),
            "finishing": int(self.finishing),
            "outcome": self.outcome,
            "expires": int(self.expires),
            "ran": self.ran,
            "master": self.master,
        }
        plain = _JSON.encode(fields).encode()
        if len(plain) <= _COMPRESS_ABOVE:
            return plain
        return _COMPRESSED + zlib.compress(plain, 1)

    @classmethod
    def decode(cls, data: bytes) -> RoundDocument:
        """Raises `RendezvousStateError` for another version's, else `CorruptDocumentError`."""
        fields = _parse(_expand(data), "the round document")
        schema = fields.get("schema")
        if schema is not None and schema != SCHEMA:
            raise RendezvousStateError(
                f"the round document has schema {schema!r}, this version of rdzv-plugins reads "
                f"{SCHEMA}: install the same version on every node, or use another --rdzv-id"
            )
        try:
            low, high = fields["nodes"]
            document = cls(
                incarnation=_typed(fields["incarnation"], str),
                round=_typed(fields["round"], int),
                phase=Phase(fields["phase"]),
                leader=_optional(fields["leader"], str),
                min_nodes=_typed(low, int),
                max_nodes=_typed(high, int),
                participants=_ids(_typed(fields["participants"], str)),
                previous=_ids(_typed(fields["previous"], str)),
                lost=_ids(_typed(fields["lost"], str)),
                evicted=_ids(_typed(fields["evicted"], str)),
                waiting=_typed(fields["waiting"], int),
                cause=_cause(_typed(fields["cause"], str)),
                finishing=bool(_typed(fields["finishing"], int)),
                outcome=None if fields["outcome"] is None else Outcome(fields["outcome"]),
                expires=bool(_typed(fields["expires"], int)),
                ran=_optional(fields["ran"], str),
                master=_optional(fields["master"], str),
            )
            document._check()
            return document
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDocumentError(f"the round document is unreadable: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What a node says of itself; written by nobody else.

    Attributes:
        beat: grows with every write; a node whose beat stands still is lost.
        incarnation: the run whose rounds ``round`` and ``world_id`` are; None before its first.
        round: the last round in which this node was named; -1 before its first.
        world_id: `RoundDocument.world_id` of the last round in which it has seen its rank.
        min_nodes, max_nodes: its ``--nnodes``.
        interval: seconds between two of its beats.
        lease: seconds without a beat after which it is lost.
        looks: how often it has read all records since it started, as a leader does.
        rank: its ``--rdzv-conf rank``.
        master: on rank 0, ``address:port`` of its TCPStore for ``round``.
        hosts: False: it could not open that TCPStore, and another is to be rank 0.
        failed: it asks for another round because its workers failed.
    """

    address: str
    pid: int
    beat: int
    status: Status
    round: int
    min_nodes: int
    max_nodes: int
    interval: float
    lease: float
    incarnation: str | None = None
    world_id: str | None = None
    looks: int = 0
    rank: int | None = None
    master: str | None = None
    hosts: bool = True
    failed: bool = False

    @property
    def label(self) -> str:
        """The node's name for people."""
        return f"{self.address}[{self.pid}]"

    def encode(self) -> bytes:
        fields: dict[str, Any] = {
            "addr": self.address,
            "pid": self.pid,
            "beat": self.beat,
            "status": self.status.value,
            "round": self.round,
            "nodes": [self.min_nodes, self.max_nodes],
            "lease": [self.interval, self.lease],
        }
        if self.incarnation is not None:
            fields["in"] = self.incarnation
        if self.world_id is not None:
            fields["world_id"] = self.world_id
        if self.looks:
            fields["looks"] = self.looks
        if self.rank is not None:
            fields["rank"] = self.rank
        if self.master is not None:
            fields["master"] = self.master
        if not self.hosts:
            fields["hosts"] = 0
        if self.failed:
            fields["failed"] = 1
        return _JSON.encode(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> NodeRecord:
        """Raises `RendezvousStateError` for anything that `encode` did not write."""
        fields = _parse(data, "a node's record")
        try:
            low, high = fields["nodes"]
            interval, lease = (float(_typed(item, int | float)) for item in fields["lease"])
            if not 0 < interval <= lease < _LONGEST_LEASE:
                raise ValueError(f"a beat every {interval} s, a lease of {lease} s")
            return cls(
                address=_typed(fields["addr"], str),
                pid=_typed(fields["pid"], int),
                beat=_typed(fields["beat"], int),
                status=Status(fields["status"]),
                round=_typed(fields["round"], int),
                min_nodes=_typed(low, int),
                max_nodes=_typed(high, int),
                interval=interval,
                lease=lease,
                incarnation=_optional(fields.get("in"), str),
                world_id=_optional(fields.get("world_id"), str),
                looks=_typed(fields.get("looks", 0), int),
                rank=_optional(fields.get("rank"), int),
                master=_optional(fields.get("master"), str),
                hosts=bool(_typed(fields.get("hosts", 1), int)),
                failed=bool(_typed(fields.get("failed", 0), int)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RendezvousStateError(f"a node's record is unreadable: {error!r}") from error


# The participants of a round that confirms are those of the round that runs: split them once.
@lru_cache(maxsize=8)
def _ids(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Most documents that a node reads have the cause of the one before.
@lru_cache(maxsize=8)
def _cause(text: str) -> Cause:
    return Cause.decode(text)


def _expand(data: bytes) -> bytes:
    if data[:1] != _COMPRESSED:
        return data
    expander = zlib.decompressobj()
    try:
        # The bound keeps a crafted value from filling every node's memory.
        plain = expander.decompress(data[1:], _LARGEST_DOCUMENT)
    except zlib.error as error:
        raise CorruptDocumentError("the round document cannot be decompressed") from error
    if not expander.eof:
        raise CorruptDocumentError("the round document is cut off or too large")
    return plain


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptDocumentError(f"{what} is not JSON") from error
    if not isinstance(fields, dict):
        raise CorruptDocumentError(f"{what} is not a JSON object")
    return fields


def _typed(value: Any, kind: type[T] | types.UnionType) -> Any:
    # bool is an int to Python, not to a reader of the document.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a {getattr(kind, '__name__', kind)}")
    return value


def _optional(value: object, kind: type[T]) -> Any:
    return None if value is None else _typed(value, kind)
