"""The requests that `Node.run` yields to its driver, and the driver's answers."""

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


# msgspec, because a node makes dozens while its agent waits, and dataclasses take four times as
# long.
class Effect(msgspec.Struct, Generic[T], frozen=True):
    """A request of a node; ``answer = yield from effect`` hands it to the driver.

    The type parameter is the type of the answer.
    """

    def __iter__(self) -> Generator[Effect[Any], Any, T]:
        answer: T = yield self
        return answer


Effects: TypeAlias = Generator[Effect[Any], Any, T]
"""A generator of effects that returns a `T`."""


class PutRecord(Effect[None], frozen=True):
    """Write this node's record; with ``ring`` also ring the bell, in the same round trip."""

    node: str
    record: NodeRecord
    ring: bool


class Ring(Effect[None], frozen=True):
    """Wake the leader; ``node`` is the node that rings."""

    node: str


class Read(Effect[Entry | None], frozen=True):
    """Answered with the key's `Entry`, or None."""

    key: str


class CompareAndSet(Effect[tuple[Entry | None, bool]], frozen=True):
    """Answered with the key's `Entry` or None, and whether the value was written."""

    key: str
    value: bytes
    expected: Version | None


class List(Effect[dict[str, Entry]], frozen=True):
    """Answered with each `Entry` by its key."""

    prefix: str


class Drop(Effect[None], frozen=True):
    """Delete keys."""

    keys: tuple[str, ...]


class Park(Effect[Entry | None], frozen=True):
    """Answered with the key's `Entry` once its version differs; after ``seconds`` with None."""

    key: str
    version: Version | None
    seconds: float


class Rest(Effect[None], frozen=True):
    """Pause; ends early when `Inbox.wake` is called."""

    seconds: float


class Begin(Effect[None], frozen=True):
    """Begin work beside the node, which must keep beating, unless the work has begun already.

    Answered when the work has ended, and after ``seconds`` at the latest. When the work ends the
    driver calls `Node.finished`, in any thread. If that is after the answer, and the effect
    `wakes`, the driver also ends the node's `Park` or `Rest`.

    Attributes:
        key: identifies the work among effects of its kind.
    """

    key: str
    seconds: float

    @property
    def wakes(self) -> bool:
        """Whether the node takes up the result at once."""
        return self.seconds > 0


class OpenMaster(Begin, frozen=True):
    """Open a fresh TCPStore for the round whose world_id is ``key``; the result is its address."""

    @property
    def wakes(self) -> bool:
        """Always: the work begins before the node writes the round, and may end later."""
        return True


class DialPeer(Begin, frozen=True):
    """Connect to another node and exchange data with it; the result is the seconds that this took.

    Attributes:
        node: id of the other node, which answers nobody who does not know its id.
        endpoint: its ``address:port``.
        exchanges: exchange some megabytes each way; False: only connect to rank 0's TCPStore.
        limit: seconds after which it has failed.
    """

    node: str
    endpoint: str
    exchanges: bool
    limit: float


class DropStores(Effect[None], frozen=True):
    """Delete the c10d stores of other incarnations, and of this one's rounds below ``before``."""

    incarnation: str
    before: int


class Expire(Effect[None], frozen=True):
    """Make the run's keys read as empty after ``seconds``, unless this is sent again."""

    seconds: float


class PutShards(Effect[None], frozen=True):
    """Write the shards of a roster, by key."""

    values: Mapping[str, bytes]


class PutTombstone(Effect[None], frozen=True):
    """Note that this incarnation ended, outside the keys that expire with the run."""

    document: RoundDocument


class ReadExclusions(Effect[tuple[Exclusion, ...]], frozen=True):
    """Read the exclusions that outlive the runs of an id."""


class ReadTombstone(Effect[Outcome | None], frozen=True):
    """Answered with the outcome of this incarnation; None: it has no tombstone."""

    incarnation: str


class KeepLinks(Effect[None], frozen=True):
    """Keep links to exactly these nodes, each with its ``address:port``.

    ``standing`` is what this node says of itself over all its links. When links tell something, the
    driver calls a method of `Node.neighbours`.
    """

    peers: tuple[tuple[str, str], ...]
    standing: Standing = Standing.ACCEPTED


class Tell(Effect[None], frozen=True):
    """A line for people in this node's log.

    ``about`` is the kind of line. A normal life has ``joined``, ``waiting`` (what for), ``forming``
    (why the next round), ``round`` (which rank) and ``closed`` (by whom). All others are warnings:
    ``lost`` (why the next round), ``doubt`` (why not yet), ``spare``, ``settings``, ``evicted``,
    ``unfit``, ``drained``, ``excluded``, ``quarantine`` (of which host), ``exclusions``
    (unreadable), ``master``, ``network`` (who cannot reach whom), ``slow`` (whose exchange of data
    was slow), ``cut off`` (its workers stop), ``refused`` (the store refuses all nodes, so training
    goes on), ``stalled`` (since when no step came), ``two worlds`` (for how long there may have
    been two), ``tombstone`` and ``unreadable`` (a value that counts as absent).

    `command` has the arguments of the command that the text names as "rdzv <name>"; the log has the
    command as a person can paste it.
    """

    about: str
    text: str
    command: tuple[str, ...] = ()

    @property
    def warns(self) -> bool:
        return self.about not in ("joined", "waiting", "forming", "round", "closed")


_AT_ONCE, _MOST_CONFLICTS = 3, 60


def after_conflict(conflicts: int) -> Effects[None]:
    """Pause before the next try of a compare-and-set that has failed ``conflicts`` times.

    Raises `RendezvousConnectionError` after some 25 s: another client writes in a loop.
    """
    if conflicts >= _MOST_CONFLICTS:
        raise RendezvousConnectionError(
            "others change the round document again and again, so that nothing was changed: try "
            "once more, and find out who else writes there"
        )
    if conflicts > _AT_ONCE:
        yield from Rest(longest_pause(conflicts - _AT_ONCE))


class RecordHistory(Effect[None], frozen=True):
    """Note a round, or the end of the run, in the run's history, for people.

    ``at``: the time of the event, in seconds since the epoch on this host's clock; None: now. A
    second record of a round replaces the first.
    """

    record: RoundRecord
    at: float | None = None


class Register(Effect[None], frozen=True):
    """Add a new run to the list of runs, for people; no node waits for this."""

    record: RoundRecord


class JoinOutcome(msgspec.Struct, frozen=True):
    """How a join ended: with a round, with a failure and its diagnosis, or with an error."""

    document: RoundDocument | None = None
    failure: Failure | None = None
    diagnosis: Diagnosis | None = None
    error: Exception | None = None


class FinishJoin(Effect[None], frozen=True):
    """Release the agent that waits in ``next_rendezvous()``."""

    outcome: JoinOutcome


LOCAL = frozenset(
    (
        Rest, OpenMaster, DialPeer, KeepLinks, RecordHistory, Register, ReadExclusions,
        Tell, FinishJoin,
    )
)  # fmt: skip
"""Effects that use none of the run's keys, so that their answers say nothing about the keys."""
