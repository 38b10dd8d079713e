"""The requests of a node to the world: those that `Node.run` yields, and their answers."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from rdzv_plugins.kv import Entry, RendezvousConnectionError, Version
from rdzv_plugins.kv.retry import longest_pause
from rdzv_plugins.protocol.contact import Standing
from rdzv_plugins.protocol.documents import Exclusion, NodeRecord, Outcome, RoundDocument
from rdzv_plugins.protocol.round_record import RoundRecord
from rdzv_plugins.protocol.rules import Failure
from rdzv_plugins.protocol.words import Diagnosis

T = TypeVar("T")


# Here and in `rules` msgspec's structures, not dataclasses: a node makes dozens of them while its
# agent waits, and each takes a quarter of the time.
class Effect(msgspec.Struct, Generic[T], frozen=True):
    """A request of a node; ``answer = yield from effect`` hands it to the driver.

    The type parameter is that of the answer.
    """

    def __iter__(self) -> Generator[Effect[Any], Any, T]:
        answer: T = yield self
        return answer


Effects: TypeAlias = Generator[Effect[Any], Any, T]
"""Effects one after the other, and what comes of them in the end."""


class PutRecord(Effect[None], frozen=True):
    """Write this node's record; with ``ring`` also the bell, in the same round trip."""

    node: str
    record: NodeRecord
    ring: bool


class Ring(Effect[None], frozen=True):
    """Wake the leader; ``node`` rings."""

    node: str


class Read(Effect[Entry | None], frozen=True):
    """Answered with the key's `Entry` or None."""

    key: str


class CompareAndSet(Effect[tuple[Entry | None, bool]], frozen=True):
    """Answered with (`Entry` or None, whether it was written)."""

    key: str
    value: bytes
    expected: Version | None


class List(Effect[dict[str, Entry]], frozen=True):
    """Answered with a dict of `Entry` by key."""

    prefix: str


class Drop(Effect[None], frozen=True):
    """Delete keys."""

    keys: tuple[str, ...]


class Park(Effect[Entry | None], frozen=True):
    """Wait until the key's version differs; answered with its `Entry`, or None."""

    key: str
    version: Version | None
    seconds: float


class Rest(Effect[None], frozen=True):
    """Pause; ends early when an order arrives."""

    seconds: float


class Begin(Effect[None], frozen=True):
    """Do something beside the node, which must keep beating, unless that has begun already.

    Answered when it is done, or cannot be, but after ``seconds`` at the latest. The driver calls
    `Node.finished` then, in any thread; if that comes after the answer, and the effect `wakes`, the
    driver also ends the node's `Park` or `Rest`.

    Attributes:
        key: tells it from others of its kind.
    """

    key: str
    seconds: float

    @property
    def wakes(self) -> bool:
        """Whether the node is to turn to its result at once."""
        return self.seconds > 0


class OpenMaster(Begin, frozen=True):
    """Open a fresh TCPStore for the round of this world_id; its result is ``address:port``.

    Name resolution may hang.
    """

    @property
    def wakes(self) -> bool:
        """Always: it begins before the node writes the round, which may take longer than that."""
        return True


class DialPeer(Begin, frozen=True):
    """Connect to another node, and exchange data with it; its result is the seconds of that.

    Attributes:
        node: the other one; it answers nobody who does not know this.
        endpoint: its ``address:port``.
        exchanges: some megabytes each way; False: the connection is all, to rank 0's TCPStore.
        limit: seconds after which it has failed.
    """

    node: str
    endpoint: str
    exchanges: bool
    limit: float


class DropStores(Effect[None], frozen=True):
    """Delete the c10d stores of other incarnations, and of this one's rounds before that one."""

    incarnation: str
    before: int


class Expire(Effect[None], frozen=True):
    """Set the run's deadline: after ``seconds`` it reads as empty, unless this is sent again."""

    seconds: float


class PutShards(Effect[None], frozen=True):
    """Write the shards of a roster, by key."""

    values: Mapping[str, bytes]


class PutTombstone(Effect[None], frozen=True):
    """Note that this incarnation of the run ended, outside the keys that expire with the run."""

    document: RoundDocument


class ReadExclusions(Effect[tuple[Exclusion, ...]], frozen=True):
    """Read the exclusions that outlive the runs of an id."""


class ReadTombstone(Effect[Outcome | None], frozen=True):
    """Answered with the `documents.Outcome` of this incarnation; None: it has not ended."""

    incarnation: str


class HoldLinks(Effect[None], frozen=True):
    """Have links to these nodes, and to no others: each with its ``address:port``.

    ``standing`` is what this node says of itself over all its links. The driver calls
    `Node.report_gone`, `Node.report_back` and `Node.report_others`, and ends the node's `Park` or
    `Rest` then.
    """

    peers: tuple[tuple[str, str], ...]
    standing: Standing = Standing.ACCEPTED


class Tell(Effect[None], frozen=True):
    """A line for people in this node's log.

    ``about`` tells kinds of lines apart. A normal life has ``joined``, ``waiting`` (for what),
    ``forming`` (why the next round), ``round`` (which rank) and ``closed`` (by whom). The others
    are warnings: ``lost`` (why the next round), ``doubt`` (why not yet), ``spare``, ``settings``,
    ``evicted``, ``unfit``, ``drained``, ``excluded``, ``quarantine`` (of which host),
    ``exclusions`` (cannot be read), ``master``,
    ``network`` (who cannot reach whom), ``slow`` (whose exchange of data was), ``cut off`` (its
    workers are to stop), ``refused`` (all nodes are, so that they go on), ``two worlds`` (for how
    long there may have been), ``tombstone`` and ``unreadable`` (what stands in the store, and
    counts as absent).
    """

    about: str
    text: str

    @property
    def warns(self) -> bool:
        return self.about not in ("joined", "waiting", "forming", "round", "closed")


_AT_ONCE, _MOST_CONFLICTS = 3, 60


def after_conflict(conflicts: int) -> Effects[None]:
    """Pause before a compare-and-set is tried again at which others were faster, so many times.

    Raises `RendezvousConnectionError` after some 25 s of that: somebody writes in a loop.
    """
    if conflicts >= _MOST_CONFLICTS:
        raise RendezvousConnectionError(
            "others change the round document again and again, so that nothing was changed: try "
            "once more, and find out who else writes there"
        )
    if conflicts > _AT_ONCE:
        yield from Rest(longest_pause(conflicts - _AT_ONCE))


class RecordHistory(Effect[None], frozen=True):
    """Note a round, or the end of the run, in the run's history, for people."""

    record: RoundRecord


class Register(Effect[None], frozen=True):
    """Put a new run into the list of runs, for people; nobody waits for it."""

    record: RoundRecord


class JoinOutcome(msgspec.Struct, frozen=True):
    """How a join ended: in a round (``document``), by a `rules.Failure`, or by an error.

    ``diagnosis`` is what the node waited for when it failed.
    """

    document: RoundDocument | None = None
    failure: Failure | None = None
    diagnosis: Diagnosis | None = None
    error: Exception | None = None


class FinishJoin(Effect[None], frozen=True):
    """Release the agent that waits in ``next_rendezvous()``."""

    outcome: JoinOutcome


LOCAL = frozenset(
    (
        Rest, OpenMaster, DialPeer, HoldLinks, Register, ReadExclusions,
        Tell, FinishJoin,
    )
)  # fmt: skip
"""The effects that use none of the run's keys: what comes of them says nothing of those."""
