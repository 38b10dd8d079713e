"""The documents in the store: the round document and the nodes' own records, as small JSON.

Values of the store are never trusted: msgspec checks the type of each field, and any mismatch
raises `RendezvousStateError`. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Any, Generic, Literal, TypeVar, overload

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rdzv_plugins.kv import RendezvousStateError
from rdzv_plugins.kv.contract import UNREADABLE
from rdzv_plugins.kv.gate import (
    DOCUMENT_BYTES,
    KNOWN_HOSTS,
    RECORD_BYTES,
    Clock,
    Count,
    EpochTime,
    Id,
    InvalidValueError,
    Key,
    Long,
    Nodes,
    Seconds,
    Text,
    cleaned,
    decode,
    is_host,
    is_master,
    plain,
    refuse_size,
)
from rdzv_plugins.kv.sealed import NO_SECRET_HERE, is_sealed
from rdzv_plugins.protocol.progress import Doing, Resumed

T = TypeVar("T")

Ids = Annotated[tuple[Id, ...], Long]
Pairs = Annotated[tuple[tuple[Id, Text], ...], Long]

STATE_KEY = "state"
# The state of handler=torch is a pickle, which nothing here loads.
TORCH_STATE_KEY = "torch-state"
BELL_KEY = "bell"
NODES_PREFIX = "nodes/"
STORE_PREFIX = "store/"

SCHEMA = 2

# Enough for millions of nodes. Limited, because a reader makes the key of each shard.
_MOST_SHARDS = 1 << 16

# Stored under short names, because a leader reads thousands of records.
_SHORT = {
    "address": "addr",
    "min_nodes": "min",
    "max_nodes": "max",
    "interval": "every",
    "incarnation": "in",
    "world_id": "world",
    "dials": "net",
    "step": "n",
    "resumed": "go",
}

# A cause keeps _NAMES_KEPT names; a sentence shows _NAMES_SHOWN of them.
_NAMES_KEPT = 16
_NAMES_SHOWN = 4


def store_prefix(incarnation: str, round_: int) -> str:
    """The prefix of a round's c10d store; it differs between successive runs of one id."""
    return f"{STORE_PREFIX}{incarnation}/{round_}/"


class CorruptDocumentError(RendezvousStateError):
    """The value of the document's key was written by no version of this package."""


class SealedRunError(CorruptDocumentError):
    """The run has a secret and this client has none: the client must not overwrite it."""


class Phase(StrEnum):
    """The phase of a round; within a round it only goes forward."""

    FORMING = "forming"
    """Nodes join; nobody has a rank."""
    CONFIRMING = "confirming"
    """Ranks are given; each participant confirms its rank, and rank 0 opens MASTER_PORT."""
    RUNNING = "running"
    """Every participant has confirmed; agents start their workers."""
    CLOSED = "closed"
    """No further round forms."""

    @property
    def order(self) -> int:
        return _PHASE_ORDER[self]


_PHASE_ORDER = {phase: order for order, phase in enumerate(Phase)}


class Status(StrEnum):
    """The status in a node's own record."""

    JOIN = "join"
    """It asks for a round, and none of its workers runs."""
    RUN = "run"
    """It has confirmed its rank; its workers may run."""
    SPARE = "spare"
    """It asks for a round, and the round that runs has no room for it, or lets it in later."""
    DONE = "done"
    """Its workers succeeded; it waits for the other nodes' workers."""
    LEFT = "left"
    """It is in no round and asks for none."""


class Outcome(StrEnum):
    """How a closed run ended."""

    SUCCEEDED = "succeeded"
    """The workers of a node succeeded, and no other node has work left."""
    FAILED = "failed"
    """An agent gave up, so the other nodes end too."""
    CLOSED = "closed"
    """Somebody closed the run: no further round forms, and the round that runs goes on."""
    NO_PROGRESS = "no progress"
    """Round after round ended after a short time: all nodes end."""

    @property
    def ends_workers(self) -> bool:
        """Whether the other nodes end their workers."""
        return self in (Outcome.FAILED, Outcome.NO_PROGRESS)


class Names(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Nodes by their labels: the first few, and the number of all others."""

    first: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    more: Nodes = 0

    def __bool__(self) -> bool:
        return bool(self.first or self.more)

    def __contains__(self, label: str) -> bool:
        return label in self.first

    def __str__(self) -> str:
        if not self.first:
            return {0: "", 1: "1 node"}.get(self.more, f"{self.more} nodes")
        hidden = max(0, len(self.first) - _NAMES_SHOWN) + self.more
        shown = ", ".join(self.first[:_NAMES_SHOWN])
        return f"{shown} and {hidden} more" if hidden > 0 else shown

    @property
    def count(self) -> int:
        return len(self.first) + self.more

    def plus(self, labels: Iterable[str]) -> Names:
        """These nodes and the nodes with ``labels``."""
        fresh = sorted(set(labels) - set(self.first))
        if not fresh:
            return self
        room = _NAMES_KEPT - len(self.first)
        return Names((*self.first, *fresh[:room]), self.more + max(0, len(fresh) - room))

    def and_more(self, nodes: int) -> Names:
        """These nodes and further ``nodes`` without known labels."""
        return Names(self.first, self.more + nodes) if nodes else self

    def without(self, labels: Collection[str]) -> Names:
        """These nodes without ``labels``, as far as they are in `first`."""
        kept = tuple(label for label in self.first if label not in labels)
        return Names(kept, self.more) if kept != self.first else self


NOBODY = Names()


class Cause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a round forms, by what happened to which nodes. Amended while the round forms.

    Attributes:
        lost: nodes whose leases ran out, or that are lost ``by_accusation``.
        by_accusation: for some lost nodes whose processes have ended: label, and the label of the
            node that found out.
        left: nodes that announced that they leave.
        failed: nodes that asked for another round because their workers failed, and nodes that left
            because their workers or agents failed.
        joined: new nodes.
        evicted: live nodes that did not ask for the round in time.
        apart: pairs of nodes that could not exchange data, or dial each other.
        unfit: for some nodes that left because a check failed or they gave up: label and reason.
        surplus: participants of the last round that do not fit into whole units and segments.
        stuck: the node of the rank whose step stood still first; ``note`` names the rank.
        drained: nodes that a person took out for good.
        excluded: nodes whose hosts a person or the leader keeps out for a time.
        why: the reasons of people who drained or excluded nodes.
        note: any other reason.
    """

    lost: Names = Names()
    by_accusation: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=64)] = ()
    left: Names = Names()
    failed: Names = Names()
    joined: Names = Names()
    evicted: Names = Names()
    apart: Names = Names()
    unfit: Annotated[tuple[tuple[Id, Text], ...], Meta(max_length=64)] = ()
    surplus: Names = Names()
    stuck: Names = Names()
    drained: Names = Names()
    excluded: Names = Names()
    why: Text = ""
    note: Text = ""

    def __str__(self) -> str:
        failed = self.failed.without(self.left.first)
        whose = "its" if failed.count == 1 else "their"
        parts = [
            self._why_lost,
            f"{self.left} left{self._reasons}" if self.left else "",
            f"{failed} joined again ({whose} workers failed)" if failed else "",
            f"{self.evicted} left out: did not ask for this round in time" if self.evicted else "",
            f"no connection between {self.apart}" if self.apart else "",
            self._why_kept_out,
            f"{self.joined} joined" if self.joined else "",
            f"{self.surplus} left over from whole units or segments" if self.surplus else "",
            self.note,
        ]
        return "; ".join(part for part in parts if part)

    def plus(self, **names: Iterable[str]) -> Cause:
        """This cause with more nodes; each keyword is a field."""
        return replace(self, **{name: getattr(self, name).plus(to) for name, to in names.items()})

    def because(self, unfit: Mapping[str, str]) -> Cause:
        """This cause with the reasons why these nodes are unfit."""
        if not unfit:
            return self
        return replace(self, unfit=tuple({**dict(self.unfit), **unfit}.items())[:_NAMES_SHOWN])

    def with_accusers(self, gone: Mapping[str, Accusation]) -> Cause:
        """This cause with the nodes, by label, whose processes have ended, and their accusers."""
        if not gone:
            return self
        by = {**dict(self.by_accusation), **{label: it.by for label, it in gone.items()}}
        return replace(self, by_accusation=tuple(by.items())[:_NAMES_KEPT])

    @property
    def _why_lost(self) -> str:
        gone = {label: by for label, by in self.by_accusation if label in self.lost}
        silent = self.lost.without(gone)
        parts = [f"lost {silent}: lease ran out"] if silent else []
        for by in dict.fromkeys(gone.values()):
            names = Names().plus(label for label in gone if gone[label] == by)
            if names.count == 1:
                parts.append(f"lost {names}: its process is gone, as {by} found")
            else:
                parts.append(f"lost {names}: their processes are gone, as {by} found")
        return "; ".join(parts)

    @property
    def _why_kept_out(self) -> str:
        both = (("drained", self.drained), ("excluded", self.excluded))
        said = "; ".join(f"{what} {nodes}" for what, nodes in both if nodes)
        return f"{said}: {self.why}" if said and self.why else said

    @property
    def _reasons(self) -> str:
        if self.left.count == 1 and self.unfit:
            return f" ({self.unfit[0][1]})"
        why = "; ".join(f"{label}: {reason}" for label, reason in self.unfit)
        return f" ({why})" if why else ""


class Exclusion(msgspec.Struct, frozen=True, array_like=True):
    """A host whose nodes are kept out; ``until`` in seconds since the epoch, None: no end."""

    host: Id
    until: EpochTime | None = None
    why: Text = ""

    def is_in_force(self, now: float) -> bool:
        """Whether the exclusion holds at ``now``, in seconds since the epoch."""
        return self.until is None or now < self.until


class Accusation(msgspec.Struct, frozen=True, array_like=True):
    """A node that must prove that it lives, by a beat above ``beat``.

    Attributes:
        by: the label of the accuser.
        lost: the node has not answered in time.
    """

    node: Id
    beat: Count
    by: Id = ""
    lost: bool = False


class Strikes(msgspec.Struct, frozen=True, array_like=True):
    """When rounds began that replaced a round which this host ended, in seconds since the epoch.

    Attributes:
        served: how often the host has been in quarantine.
        served_until: when the last quarantine ends.
    """

    host: Id
    times: Annotated[tuple[EpochTime, ...], Long] = ()
    served: Count = 0
    served_until: EpochTime = 0.0


class Dials(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The dials of a node's network check, before it confirmed its rank.

    Attributes:
        partner: the node with which it was to exchange data; empty: none.
        seconds: how long that took.
        why: why the exchange failed; empty: it succeeded.
        first: rank 0, if this node has dialled it.
        unreached: why dialling rank 0 failed; empty: it succeeded.
    """

    partner: Id = ""
    seconds: Seconds = 0.0
    why: Text = ""
    first: Id = ""
    unreached: Text = ""


class Faults(msgspec.Struct, frozen=True, array_like=True):
    """What the network check found since a round last ran, or in the round that runs.

    Attributes:
        links: pairs (a node that dialled, the node with which it could not exchange data).
        rounds: how many rounds in a row did not run because of such faults.
        out: nodes that failed with several others, each with the reason why it is unfit.
        not_to_host: nodes that others could not dial as rank 0.
        blind: pairs (a node, the rank 0 that it could not dial).
    """

    links: Pairs = ()
    rounds: Count = 0
    out: Pairs = ()
    not_to_host: Ids = ()
    blind: Pairs = ()

    def why_out(self, node: str) -> str:
        """Why the node is unfit; empty: the check did not find it at fault."""
        return dict(self.out).get(node, "")


NO_FAULTS = Faults()
"""The default of `RoundDocument.faults`: msgspec omits a structure only if it is this very object.
"""


class Saving(msgspec.Struct, frozen=True, array_like=True):
    """The step at which all ranks save before a planned change of the round. Rule: checkpoint.

    Attributes:
        agreed: every participant's workers wait at the step, or have reached it.
        saved: every rank has saved it.
        rejected: steps that were named before, and that a rank had passed already.
    """

    step: Count
    agreed: bool = False
    saved: bool = False
    rejected: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()


class Shards(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Many nodes in rank order, stored apart from the document. See `rdzv_plugins.protocol.roster`.

    Attributes:
        digest: `digest_of` the nodes; part of the keys of their shards, which never change.
        ranks: the ranks that this node has read: its own, or none if it is not among the nodes.
            None: not read yet. Not stored.
    """

    digest: Key
    size: Nodes
    count: Nodes
    ranks: dict[str, int] | None = None


class derived(Generic[T]):  # noqa: N801  # It is used as `property` is.
    """An attribute that is computed when it is first read, and not stored.

    Before Python 3.12 functools.cached_property takes a lock: 1/12 of a node's time to decide.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> derived[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object | None, kind: type) -> derived[T] | T:
        if owner is None:
            return self
        value = owner.__dict__[self._name] = self._compute(owner)
        return value


class RoundDocument(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """The one value that all nodes agree on; changed by compare-and-set only.

    Attributes:
        incarnation: a random id of this run; later runs of the same id have others.
        round: grows with every change of membership.
        leader: id of the node that turns records into rounds; None: it left, and a successor takes
            over.
        participants: ids in rank order; empty while the round forms, and if ``roster`` is set.
        previous: while the round forms, the participants of the last round that are not known to be
            gone or ``still_running``, in their old rank order; empty if ``previous_roster`` is set.
        roster, previous_roster: replace ``participants`` and ``previous`` if these are many.
        absent: participants that are gone from a running round that goes on without them.
        still_running: live nodes whose workers may still run, and for which no round waits.
        waiters: how many nodes waited when the document was written.
        cause: why the round forms; of a closed run, why it was closed.
        finishing: a participant's workers succeeded, so no newcomer is let in.
        expires: of a closed run: its keys expire after `Rules.sweep_after`.
        ran: `world_id` of the round that runs. It stays until the next round has its participants,
            for nodes that did not see their round run before it ended.
        master: ``address:port`` of rank 0's TCPStore in the round that runs or ran last.
        resize: an order to let newcomers in now.
        grew: the last round that let newcomers in.
        short_rounds: how many of the last rounds in a row ran for less than ``no_progress_uptime``.
        drain_why: a person's reason for the last drain.
        excluded: hosts that people keep out for a time.
        quarantined: hosts that the leader keeps out for a time, because they ended round after
            round.
        restart: a person's reason for an ordered restart; empty: none is ordered.
        faults: what the network check has found.
        saving: the checkpoint that the round awaits before it ends.
        accused: nodes that must prove that they live, or did not in time.
        fencing_token: the token of the last round with ranks; larger than in each round before.
        run: the id of the run, if its founder knew it.
        edition: in a sealed run it grows with each write, so that an old document is recognised. It
            starts at the time of the founding, in milliseconds. 0: the run is not sealed.
        since: when its phase began, by the wall clock of the writer, in seconds since the epoch;
            for people alone. 0: not known, or closed.
        schema: 2 is not stored, so a later schema must be a field without a default.
    """

    schema: int = SCHEMA
    incarnation: Key
    round: Count
    phase: Phase
    leader: Id | None
    min_nodes: Nodes
    max_nodes: Nodes
    participants: Ids = ()
    previous: Ids = ()
    roster: Shards | None = None
    previous_roster: Shards | None = None
    absent: Ids = ()
    still_running: Ids = ()
    waiters: Nodes = 0
    cause: Cause = Cause()
    finishing: bool = False
    outcome: Outcome | None = None
    expires: bool = False
    ran: Id | None = None
    master: Id | None = None
    resize: bool = False
    grew: Count = 0
    short_rounds: Count = 0
    drained: Ids = ()
    drain_why: Text = ""
    excluded: Annotated[tuple[Exclusion, ...], Long] = ()
    quarantined: Annotated[tuple[Exclusion, ...], Long] = ()
    strikes: Annotated[tuple[Strikes, ...], Long] = ()
    restart: Text = ""
    faults: Faults = NO_FAULTS
    saving: Saving | None = None
    accused: Annotated[tuple[Accusation, ...], Long] = ()
    fencing_token: Count = 0
    edition: Count = 0
    run: Id = ""
    since: Clock = 0

    @property
    def place(self) -> tuple[int, int]:
        """The document's place in the history of one incarnation; a store only moves forward."""
        return self.round, self.phase.order

    def is_before(self, later: RoundDocument) -> bool:
        """Whether ``later`` is a later document of the same incarnation."""
        if self.place != later.place:
            return self.place < later.place
        return self.edition < later.edition

    @property
    def edited(self) -> RoundDocument:
        """The document with its edition increased for the next write; edition 0 stays."""
        return replace(self, edition=self.edition + 1) if self.edition else self

    @property
    def closed(self) -> bool:
        return self.phase is Phase.CLOSED

    @derived
    def reason(self) -> str:
        return str(self.cause)

    def is_of(self, other: RoundDocument | None) -> bool:
        """Whether both documents are of one incarnation."""
        return other is not None and self.incarnation == other.incarnation

    def names(self, node: str) -> bool:
        """Whether the node is in this or the last round, as far as the rosters were read."""
        return node in self.ranks or node in self.previous_order

    @property
    def size(self) -> int:
        return len(self.participants) if self.roster is None else self.roster.size

    @property
    def all_absent(self) -> bool:
        """Whether every participant of the running round is absent."""
        return self.phase is Phase.RUNNING and len(self.absent) >= self.size

    @property
    def rosters(self) -> list[Shards]:
        """The rosters that are stored apart from the document."""
        return [it for it in (self.roster, self.previous_roster) if it is not None]

    @property
    def is_whole(self) -> bool:
        """Whether the document itself holds all its nodes."""
        return self.roster is None and self.previous_roster is None

    @derived
    def ranks(self) -> dict[str, int]:
        """Each participant's rank, as far as it was read."""
        return _ranks(self.participants, self.roster)

    @derived
    def previous_order(self) -> dict[str, int]:
        """Each node's index in ``previous``, as far as it was read."""
        return _ranks(self.previous, self.previous_roster)

    @derived
    def world_id(self) -> str:
        """Identifies the membership: after a store forgot, a round's number may be given twice."""
        roster = self.roster
        digest = roster.digest if roster else digest_of(self.incarnation, self.participants)
        return f"{self.round}-{digest}"

    def encode(self) -> bytes:
        return _ENCODER.encode(self._without_ranks())

    @classmethod
    def decode(cls, data: bytes) -> RoundDocument:
        """Parse a stored document.

        Raises `RendezvousStateError` for another version's document, and `CorruptDocumentError` for
        data that is no document.
        """
        try:
            document = decode(_DOCUMENTS, data, DOCUMENT_BYTES)
            problem = document._problem()
        except InvalidValueError as error:
            problem = str(error)
        if problem is None:
            return document._without_ranks()
        if is_sealed(data):
            raise SealedRunError(f"the run {NO_SECRET_HERE}")
        schema = _schema_of(data)
        if schema not in (None, SCHEMA):
            raise RendezvousStateError(
                f"the round document has schema {schema}, this version of rdzv-plugins reads "
                f"{SCHEMA}: install the same version on every node, or use another --rdzv-id"
            )
        raise CorruptDocumentError(
            f"the round document is unreadable ({problem}): a live node of the run writes it "
            "again; if none lives, the next node that joins does, or rdzv clean deletes it"
        )

    def _without_ranks(self) -> RoundDocument:
        """This document without the ranks that one node alone has read."""
        if self.is_whole:
            return self
        roster, previous = self.roster, self.previous_roster
        return replace(
            self,
            roster=roster and replace(roster, ranks=None),
            previous_roster=previous and replace(previous, ranks=None),
        )

    def _problem(self) -> str | None:
        """Why no leader can have written this document, or no node could act on it."""
        if self.schema != SCHEMA:
            return f"schema {self.schema}"
        for shards in self.rosters:
            if not 0 < shards.count <= min(shards.size, _MOST_SHARDS):
                return f"{shards.size} nodes in {shards.count} shards"
        named = self.phase in (Phase.CONFIRMING, Phase.RUNNING)
        if named and (self.size == 0 or len({*self.participants}) != len(self.participants)):
            return f"{len(self.participants)} participants while {self.phase}, some of them twice"
        if self.phase is Phase.RUNNING and self.master is None:
            return "it runs, but names no MASTER_ADDR"
        if self.master is not None and not is_master(self.master):
            return "MASTER is no address:port - at `$.master`"
        return None


# gc=False: immutable values form no cycle, and a leader makes thousands of records at each look.
class NodeRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, rename=_SHORT
):
    """A node's record of itself, which no other node writes.

    Attributes:
        names: its host's names in lower case, first the name for people; "" means the address.
        beat: grows with every write; a node whose beat stands still is silent, and in time lost.
        incarnation: the run to which ``round`` and ``world_id`` belong; None before the first
            round.
        round: the last round in which this node was named; -1 before the first one.
        world_id: `RoundDocument.world_id` of the last round whose rank this node confirmed.
        rank: its rank in that round.
        interval: seconds between two beats.
        lease: seconds without a beat after which the node is lost.
        looks: how often it has listed all records since it started, without listings after a failed
            write of the document.
        master: on rank 0, ``address:port`` of its TCPStore for ``round``.
        can_host: False: this node could not open that TCPStore, so another node becomes rank 0.
        lacks: 4 or 6: the IP version that its host neither has nor reaches; 0: none, or not known.
        failed: it asks for another round, or has left, because its workers or agent failed.
        may_grow: its workers say that now is a good moment to let newcomers in.
        unfit: why it asks for no round: its check failed, or it gave up. It beats while it tries
            again.
        run_options: the run's options that are not at their defaults, as text.
        domain: its domain, with "/" between levels; only if the run minds domains.
        port: the port of its listener for network checks; 0: none.
        link: the port of its listener for links; with one it may be accused. 0: none.
        accuses: nodes that were gone when this node dialled them again, each with its last beat.
        dials: what its network check found in the round of ``world_id``.
        was_at_fault: its last round did not run because of its network, so no running round ends
            for it.
        leaves: it leaves once the run has saved a checkpoint.
        vote: the step named for a checkpoint, and the step that its fastest worker had reached
            when all of them knew of it; it accepts if that is an earlier step.
        agreed: the last step that it knows the run to have agreed on, should the store lose that.
        saved: the last step that all its workers have saved, plus 1, once that is ``agreed`` or a
            later one; 0: not yet.
        step: the last step of its slowest worker, the milliseconds of a step (0: unknown), and the
            global rank of that worker; None: not every worker has called ``step()`` in this round.
        stall: milliseconds since that step, and a `progress.Doing`; None: the step is recent.
        resumed: how its workers came to train in this round; told in the first heartbeats only.
        call_ends: of a leader: the round that forms, and when its last call ends, by the leader's
            wall clock; for people alone. None: none runs, or it has just begun.
        at: when it wrote this record, by its wall clock, in seconds since the epoch; for people
            alone. 0: not known.
        slow: milliseconds that one of its last two heartbeats took to be written, or by which it
            woke late; 0: less than 50.
    """

    address: Id
    names: Annotated[tuple[Id, ...], Meta(max_length=8)] = ()
    pid: Nodes
    status: Status
    round: Annotated[int, Meta(ge=-1, le=2**53)]
    min_nodes: Nodes
    max_nodes: Nodes
    interval: Seconds
    lease: Seconds
    incarnation: Id | None = None
    world_id: Id | None = None
    rank: Nodes | None = None
    hint: Count | None = None
    master: Id | None = None
    can_host: bool = True
    lacks: Literal[0, 4, 6] = 0
    failed: bool = False
    may_grow: bool = False
    unfit: Text = ""
    run_options: Text = ""
    domain: Id | None = None
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    link: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    accuses: Annotated[tuple[tuple[Id, Count], ...], Long] = ()
    dials: Dials | None = None
    was_at_fault: bool = False
    leaves: bool = False
    vote: tuple[Count, Count] | None = None
    agreed: Count | None = None
    saved: Count = 0
    call_ends: tuple[Count, Clock] | None = None
    resumed: Resumed | None = None
    schema: Literal[2] = 2
    # Last, because they change with each heartbeat and a store may send only the end of a value.
    slow: Count = 0
    step: tuple[Count, Count, Count] | None = None
    stall: tuple[Count, Doing] | None = None
    looks: Count = 0
    at: Clock = 0
    beat: Count

    @property
    def host(self) -> str:
        """What people call the node's host."""
        return (self.names and self.names[0]) or self.address

    @property
    def called(self) -> tuple[str, ...]:
        """Its host's names and its address: an order may name the host by any of them."""
        return (*filter(None, self.names), self.address)

    @property
    def label(self) -> str:
        return f"{self.host}[{self.pid}]"

    @property
    def asks(self) -> bool:
        return self.status in (Status.JOIN, Status.SPARE)

    @property
    def is_over(self) -> bool:
        """Whether no round waits for the node: it has left, or its workers succeeded."""
        return self.status in (Status.LEFT, Status.DONE)

    @property
    def has_ended(self) -> bool:
        """Whether the node is over and does not try again either."""
        return self.is_over and not self.is_unfit

    @property
    def is_unfit(self) -> bool:
        """Whether the node is out of all rounds until its check passes, or it gives up."""
        return self.status is Status.LEFT and self.unfit != ""

    def accepts(self, step: int) -> bool | None:
        """Whether its workers wait at the named ``step``; None: the node has not voted."""
        if self.agreed == step:
            return True
        if self.vote is None or self.vote[0] != step:
            return None
        return self.vote[1] < step

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> NodeRecord:
        """Parse a record; raises `RendezvousStateError` for data that `encode` did not write."""
        # A leader decodes thousands of records at each listing, so make expensive checks rarely.
        try:
            if len(data) > RECORD_BYTES:
                refuse_size(data, RECORD_BYTES)
            record = _decode_record(data)
            # Inlined `may_hold_controls`.
            if not data.isascii() or 0x5C in data or 0x7F in data:
                record = cleaned(record)
            if not 0 < record.interval <= record.lease:
                raise InvalidValueError(
                    f"a beat every {record.interval} s, a lease of {record.lease} s - at `$.lease`"
                )
            for host in record.called:
                if host not in KNOWN_HOSTS and not is_host(host):
                    raise InvalidValueError("the name or number of no host - at `$.addr`")
            if record.master is not None and not is_master(record.master):
                raise InvalidValueError("no address:port - at `$.master`")
        except (*UNREADABLE, InvalidValueError) as error:
            raise RendezvousStateError(f"a node's record is unreadable: {plain(error)}") from None
        return record


def digest_of(incarnation: str, nodes: Iterable[str]) -> str:
    """A digest of the nodes of one run, in this order."""
    text = " ".join((incarnation, *nodes)).encode(errors="backslashreplace")
    return blake2b(text, digest_size=8).hexdigest()


def labels(records: Mapping[str, NodeRecord], nodes: Iterable[str]) -> list[str]:
    """The nodes' labels; the id of a node without a record."""
    return [records[node].label if node in records else node for node in nodes]


def at_work(
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    is_silent: Callable[[str], bool],
) -> Names:
    """The nodes whose workers train on in a run that was closed by request."""
    if document.outcome is not Outcome.CLOSED:
        return NOBODY
    runs = (node for node, it in records.items() if it.status is Status.RUN and not is_silent(node))
    return Names().plus(labels(records, runs))


def _ranks(nodes: tuple[str, ...], shards: Shards | None) -> dict[str, int]:
    if shards is not None:
        return shards.ranks or {}
    return dict(zip(nodes, range(len(nodes)), strict=True))


_ENCODER = msgspec.json.Encoder()
_DOCUMENTS = msgspec.json.Decoder(RoundDocument)
_decode_record = msgspec.json.Decoder(NodeRecord).decode


class _AnyVersion(msgspec.Struct):
    schema: int | None = None


_SCHEMAS = msgspec.json.Decoder(_AnyVersion)


def _schema_of(data: bytes) -> object:
    """The schema of a document of another version, perhaps; None: the value is no document."""
    if len(data) > DOCUMENT_BYTES:
        return None
    try:
        found: object = _SCHEMAS.decode(data).schema
    except UNREADABLE:
        return None
    return found
