"""What a node asks of the world: the requests that `Node.run` yields, and their answers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from rdzv_plugins.documents import NodeRecord, RoundDocument
from rdzv_plugins.kv import Version

__all__ = [
    "Chronicle",
    "CompareAndSet",
    "Deliver",
    "Drop",
    "DropStores",
    "Expire",
    "List",
    "OpenMaster",
    "Outcome",
    "Park",
    "PutRecord",
    "PutTombstone",
    "Read",
    "ReadTombstone",
    "Request",
    "Rest",
    "Ring",
    "Steps",
    "Tell",
]


@dataclass(frozen=True, slots=True)
class PutRecord:
    """Write this node's record; with ``ring`` also the bell, in the same round trip."""

    node: str
    record: NodeRecord
    ring: bool


@dataclass(frozen=True, slots=True)
class Ring:
    """Wake the leader; ``node`` rings."""

    node: str


@dataclass(frozen=True, slots=True)
class Read:
    """Answered with the key's `Entry` or None."""

    key: str


@dataclass(frozen=True, slots=True)
class CompareAndSet:
    """Answered with (`Entry` or None, whether it was written)."""

    key: str
    value: bytes
    expected: Version | None


@dataclass(frozen=True, slots=True)
class List:
    """Answered with a dict of `Entry` by key."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete keys."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Park:
    """Wait until the key's version differs; answered with its `Entry`, or None."""

    key: str
    version: Version | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Rest:
    """Pause; ends early when an order arrives.

    ``because``: what failed, for people.
    """

    seconds: float
    because: Exception | None = None


@dataclass(frozen=True, slots=True)
class OpenMaster:
    """Open a fresh TCPStore for the round of this naming, unless that has begun already.

    Answered when it is open, but after ``seconds`` at the latest: name resolution may hang, and the
    node must go on beating. The driver calls `Node.master_opened` when it is open or cannot be
    opened; if the answer came first, it ends the node's `Park` or `Rest` too.
    """

    naming: str
    seconds: float


@dataclass(frozen=True, slots=True)
class DropStores:
    """Delete the c10d stores of other incarnations, and of this one's rounds before that one."""

    incarnation: str
    before: int


@dataclass(frozen=True, slots=True)
class Expire:
    """From ``seconds`` from now the run reads as empty, unless its deadline is moved on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class PutTombstone:
    """Note that this incarnation of the run ended, where no expiry of the run takes it away."""

    document: RoundDocument


@dataclass(frozen=True, slots=True)
class ReadTombstone:
    """Answered with the `documents.Outcome` of this incarnation; None: it has not ended."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Tell:
    """A line for people in this node's log.

    ``about`` tells kinds of lines apart: ``found`` (a run that others hold), ``spare``,
    ``settings``, ``evicted``, ``master``, ``repair``.
    """

    about: str
    text: str


@dataclass(frozen=True, slots=True)
class Chronicle:
    """Note a round in the run's history, for people.

    ``seconds`` is how long the round took to form, ``members`` names some of its nodes.
    """

    document: RoundDocument
    seconds: float
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a join ended: in a round (``document``), by a `decisions.Failure`, or by an error."""

    document: RoundDocument | None = None
    failure: str | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Deliver:
    """Release the agent that waits in ``next_rendezvous()``."""

    outcome: Outcome


Request: TypeAlias = (
    PutRecord
    | Ring
    | Read
    | CompareAndSet
    | List
    | Drop
    | Park
    | Rest
    | OpenMaster
    | DropStores
    | Expire
    | PutTombstone
    | ReadTombstone
    | Tell
    | Chronicle
    | Deliver
)
Steps: TypeAlias = Generator[Request, Any, None]
