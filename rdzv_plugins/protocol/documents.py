"""The documents in the store: the round document and the nodes' own records, as small JSON.

Bytes from the store are never trusted: msgspec checks each field's type as it parses them, and what
is not as declared here is refused with `RendezvousStateError`. Nothing is unpickled.
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
    Id,
    Key,
    Long,
    Moment,
    Nodes,
    RefusedValueError,
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

# Enough for millions of nodes. A node that reads the document makes the key of each shard.
_MOST_SHARDS = 1 << 16

# A leader reads thousands of records: short names.
_SHORT = {
    "address": "addr",
    "min_nodes": "min",
    "max_nodes": "max",
    "interval": "every",
    "incarnation": "in",
    "world_id": "world",
    "found": "net",
}

# How many names a cause keeps, and how many of them a sentence shows.
_NAMES_KEPT = 16
_NAMES_SHOWN = 4


def store_prefix(incarnation: str, round_: int) -> str:
    """Where the c10d store of a round stands: no two runs of one id ever share one."""
    return f"{STORE_PREFIX}{incarnation}/{round_}/"


class CorruptDocumentError(RendezvousStateError):
    """No version of this package wrote the value that stands as the round document."""


class SealedRunError(CorruptDocumentError):
    """The run has a secret, and this client has none: it is not this one's to write over."""


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
    """The status in a node's own record."""

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
    """No further round forms by request; the round that runs goes on."""
    NO_PROGRESS = "no progress"
    """Its rounds ended again and again before they had run for long: all nodes end."""

    @property
    def ends_workers(self) -> bool:
        """Whether the workers of the other nodes are told to end."""
        return self in (Outcome.FAILED, Outcome.NO_PROGRESS)


class Names(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Nodes by their labels: the first few, and how many there are besides."""

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
        """How many nodes."""
        return len(self.first) + self.more

    def plus(self, labels: Iterable[str]) -> Names:
        """These and others."""
        fresh = sorted(set(labels) - set(self.first))
        if not fresh:
            return self
        room = _NAMES_KEPT - len(self.first)
        return Names((*self.first, *fresh[:room]), self.more + max(0, len(fresh) - room))

    def and_more(self, nodes: int) -> Names:
        """These and others whose labels nobody knows."""
        return Names(self.first, self.more + nodes) if nodes else self

    def without(self, labels: Collection[str]) -> Names:
        """These but for some of the first."""
        kept = tuple(label for label in self.first if label not in labels)
        return Names(kept, self.more) if kept != self.first else self


class Cause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a round: what became of which nodes. Amended while the round forms.

    Attributes:
        lost: their leases ran out, or they are ``gone``.
        gone: those of them, of a few, whose processes have ended, each with who has found that; by
            label.
        left: they said that they leave.
        failed: their workers failed, and their agents asked for another round; with those that left
            because their workers, or their agents, failed.
        joined: they are new.
        evicted: they live, but did not ask for the round in time.
        apart: pairs of nodes of which one could not exchange data with the other, or dial it.
        unfit: why some of those that left did: their check failed, or they gave up. By label, of a
            few.
        held: they were in the last round, and are left over from whole units and segments.
        drained: a person took them out for good.
        excluded: a person or the leader keeps their hosts out for a time.
        why: of those that are excluded, in the words of who did it.
        note: what else there is to say.
    """

    lost: Names = Names()
    gone: Annotated[tuple[tuple[Text, Text], ...], Meta(max_length=64)] = ()
    left: Names = Names()
    failed: Names = Names()
    joined: Names = Names()
    evicted: Names = Names()
    apart: Names = Names()
    unfit: Annotated[tuple[tuple[Id, Text], ...], Meta(max_length=64)] = ()
    held: Names = Names()
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
            f"drained {self.drained}" if self.drained else "",
            f"excluded {self.excluded}" + (f": {self.why}" if self.why else "")
            if self.excluded
            else "",
            f"{self.joined} joined" if self.joined else "",
            f"{self.held} left over from whole units or segments" if self.held else "",
            self.note,
        ]
        return "; ".join(part for part in parts if part)

    def plus(self, **names: Iterable[str]) -> Cause:
        """This cause with more nodes; each keyword is a field."""
        return replace(self, **{name: getattr(self, name).plus(to) for name, to in names.items()})

    def because(self, unfit: Mapping[str, str]) -> Cause:
        """This cause with the reasons of nodes that left since their check failed."""
        if not unfit:
            return self
        return replace(self, unfit=tuple({**dict(self.unfit), **unfit}.items())[:_NAMES_SHOWN])

    def found(self, gone: Mapping[str, Accusation]) -> Cause:
        """This cause with those whose processes are gone, and how that was found: by label."""
        if not gone:
            return self
        by = {**dict(self.gone), **{label: it.by for label, it in gone.items()}}
        return replace(self, gone=tuple(by.items())[:_NAMES_KEPT])

    @property
    def _why_lost(self) -> str:
        gone = {label: by for label, by in self.gone if label in self.lost}
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
    def _reasons(self) -> str:
        if self.left.count == 1 and self.unfit:
            return f" ({self.unfit[0][1]})"
        why = "; ".join(f"{label}: {reason}" for label, reason in self.unfit)
        return f" ({why})" if why else ""


class Exclusion(msgspec.Struct, frozen=True, array_like=True):
    """A host of which no node is to be in a round.

    Attributes:
        host: the address that its nodes use.
        until: when it ends, in seconds since the epoch; None: when it is taken back.
        why: for people.
    """

    host: Id
    until: Moment | None = None
    why: Text = ""

    def is_in_force(self, now: float) -> bool:
        """Whether it is in force at this time, in seconds since the epoch."""
        return self.until is None or now < self.until


class Accusation(msgspec.Struct, frozen=True, array_like=True):
    """A node that is asked whether it lives.

    Attributes:
        node: its id.
        beat: of its record then: a later one is its answer.
        by: the label of who accuses it.
        lost: it has not answered in time.
    """

    node: Id
    beat: Count
    by: Id = ""
    lost: bool = False


class Strikes(msgspec.Struct, frozen=True, array_like=True):
    """A count against a host.

    Attributes:
        host: the address that its nodes use.
        times: when rounds began whose predecessors it had ended, in seconds since the epoch.
        served: how often it has been in quarantine.
        served_until: when the last quarantine ends.
    """

    host: Id
    times: Annotated[tuple[Moment, ...], Long] = ()
    served: Count = 0
    served_until: Moment = 0.0


class Found(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The findings of a node about the network while it confirmed its rank.

    Attributes:
        partner: with which node it was to exchange data; empty: with none.
        seconds: how long that took.
        why: why it failed; empty: it did not.
        first: rank 0, if this node has dialled it.
        unreached: why that failed; empty: it did not.
    """

    partner: Id = ""
    seconds: Seconds = 0.0
    why: Text = ""
    first: Id = ""
    unreached: Text = ""


class Faults(msgspec.Struct, frozen=True, array_like=True):
    """The findings of the network check since a round last ran, or of the one that runs.

    Attributes:
        links: nodes that dialled another and could not exchange data with it, each with that one.
        rounds: how many rounds in a row did not run because of that.
        out: nodes that failed with several others, and why they are unfit: they are to say so.
        not_to_host: nodes that others could not dial as rank 0.
        blind: nodes that could not dial rank 0, each with who that was.
    """

    links: Pairs = ()
    rounds: Count = 0
    out: Pairs = ()
    not_to_host: Ids = ()
    blind: Pairs = ()

    def why_out(self, node: str) -> str:
        """Why the node is unfit; empty: it is not among those."""
        return dict(self.out).get(node, "")


NO_FAULTS = Faults()
"""The default of `RoundDocument.faults`: of a structure, only this very object is not written."""


class Shards(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Many nodes in rank order, which stand apart from the document that counts on them.

    See `rdzv_plugins.protocol.roster`.

    Attributes:
        digest: of the nodes, `digest_of`; their shards stand under it and never change.
        size: how many nodes.
        shards: how many shards.
        ranks: the ranks that this node has read, its own if it is one of them; None: none yet.
            Not stored.
    """

    digest: Key
    size: Nodes
    shards: Nodes
    ranks: dict[str, int] | None = None


class derived(Generic[T]):  # noqa: N801  # It is used as `property` is.
    """An attribute that is computed once, when it is first read, and not stored.

    Until Python 3.12 functools' own takes a lock: a twelfth of the time of a node's decisions.
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
    """The one thing that all nodes agree on; changed by compare-and-set only.

    Attributes:
        incarnation: random; the run that this is, of all that its id has named or will name.
        round: grows with every change of membership.
        leader: id of the node that turns records into rounds; None: it left, the next takes over.
        participants: ids in rank order; empty while forming, and where `roster` stands for them.
        previous: while forming, participants of the last round that must be accounted for, in their
            old rank order; empty where `previous_roster` stands for them.
        roster, previous_roster: of many participants, or many of the last round.
        lost: participants that are gone from a running round that goes on without them.
        evicted: nodes that live and may not have stopped, but are waited for no more.
        waiting: nodes that were waiting when the document was written.
        cause: why this round, for people; of a closed run, why it was closed.
        finishing: a participant's workers succeeded, so that nobody new is let in.
        outcome: of a closed run.
        expires: of a closed run: its keys have been told to expire after ``closed_ttl``.
        ran: `world_id` of the round that runs; it stays until the next one has its participants,
            for those of a round that was over before they saw it run.
        master: ``address:port`` of rank 0's TCPStore in the round that runs, or ran last: rank 0
            of the next one opens another port.
        resize: somebody said that now is the moment to let newcomers in.
        grew: the last round that let newcomers in.
        short_rounds: how many of the last rounds in a row ran for less than ``no_progress_uptime``.
        drained: nodes that are to be in no later round of this incarnation.
        excluded: hosts that are kept out for a time.
        quarantined: hosts that the leader keeps out for a time, since they end round after round.
        strikes: what counts against hosts, where quarantine is on.
        restart: a person asks for a new round, for this reason; empty: nobody does.
        faults: what the network check has found.
        accused: nodes that are to show that they live, or have not shown it.
        fencing_token: of the round that was named last; larger than that of each round before it.
        run: the id of the run, as far as who founded it knew.
        edition: of a run whose values are sealed: grows with each write, from the milliseconds when
            the run began, so that no earlier one takes its place; 0: they are not sealed.
        since: when its phase began, in seconds since the epoch on the wall clock of who wrote that;
            for people alone. 0: not known, or it is closed.
        schema: the first number is not written: a later one is a field without a default.
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
    lost: Ids = ()
    evicted: Ids = ()
    waiting: Nodes = 0
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
    excluded: Annotated[tuple[Exclusion, ...], Long] = ()
    quarantined: Annotated[tuple[Exclusion, ...], Long] = ()
    strikes: Annotated[tuple[Strikes, ...], Long] = ()
    restart: Text = ""
    faults: Faults = NO_FAULTS
    accused: Annotated[tuple[Accusation, ...], Long] = ()
    fencing_token: Count = 0
    edition: Count = 0
    run: Id = ""
    since: Clock = 0

    @property
    def place(self) -> tuple[int, int]:
        """Where the document stands in the history of its run; a store only moves it forward.

        Places of two incarnations are not to be compared.
        """
        return self.round, self.phase.order

    def is_before(self, later: RoundDocument) -> bool:
        """Whether it is an earlier one of the same incarnation."""
        if self.place != later.place:
            return self.place < later.place
        return self.edition < later.edition

    @property
    def edited(self) -> RoundDocument:
        """The document as it is written after another one of the same run."""
        return replace(self, edition=self.edition + 1) if self.edition else self

    @property
    def closed(self) -> bool:
        return self.phase is Phase.CLOSED

    @derived
    def reason(self) -> str:
        """The cause, in words."""
        return str(self.cause)

    def is_of(self, other: RoundDocument | None) -> bool:
        """Whether both are of one run, and not of two that its id has named."""
        return other is not None and self.incarnation == other.incarnation

    def names(self, node: str) -> bool:
        """Whether the run counts on the node: it is in the round, or was in the last one.

        Where they stand in shards, this is known only of the node that has read its own.
        """
        return node in self.ranks or node in self.old_ranks

    @property
    def size(self) -> int:
        """How many participants."""
        return len(self.participants) if self.roster is None else self.roster.size

    @property
    def has_lost_all(self) -> bool:
        """Whether no participant of the round that runs is left."""
        return self.phase is Phase.RUNNING and len(self.lost) >= self.size

    @property
    def rosters(self) -> list[Shards]:
        """The rosters that stand apart from it, one for the round and one for the last."""
        return [it for it in (self.roster, self.previous_roster) if it is not None]

    @property
    def is_whole(self) -> bool:
        """Whether all nodes are here on which it counts, and none stand in shards."""
        return self.roster is None and self.previous_roster is None

    @derived
    def ranks(self) -> dict[str, int]:
        """Each participant's rank, as far as it was read."""
        return _ranks(self.participants, self.roster)

    @derived
    def old_ranks(self) -> dict[str, int]:
        """The place of each node in ``previous``, as far as it was read."""
        return _ranks(self.previous, self.previous_roster)

    @derived
    def world_id(self) -> str:
        """Tells rounds of one number apart: a store that forgot may see it given twice."""
        roster = self.roster
        digest = roster.digest if roster else digest_of(self.incarnation, self.participants)
        return f"{self.round}-{digest}"

    def encode(self) -> bytes:
        return _ENCODER.encode(self._without_ranks())

    @classmethod
    def decode(cls, data: bytes) -> RoundDocument:
        """Raises `RendezvousStateError` for another version's, else `CorruptDocumentError`."""
        try:
            document = decode(_DOCUMENTS, data, DOCUMENT_BYTES)
            problem = document._problem()
        except RefusedValueError as error:
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
        """This without what one node alone has read."""
        if self.is_whole:
            return self
        roster, previous = self.roster, self.previous_roster
        return replace(
            self,
            roster=roster and replace(roster, ranks=None),
            previous_roster=previous and replace(previous, ranks=None),
        )

    def _problem(self) -> str | None:
        """Why no leader writes this, or no node could act on it."""
        if self.schema != SCHEMA:
            return f"schema {self.schema}"
        for shards in self.rosters:
            if not 0 < shards.shards <= min(shards.size, _MOST_SHARDS):
                return f"{shards.size} nodes in {shards.shards} shards"
        named = self.phase in (Phase.CONFIRMING, Phase.RUNNING)
        if named and (self.size == 0 or len({*self.participants}) != len(self.participants)):
            return f"{len(self.participants)} participants while {self.phase}, some of them twice"
        if self.phase is Phase.RUNNING and self.master is None:
            return "it runs, but names no MASTER_ADDR"
        if self.master is not None and not is_master(self.master):
            return "MASTER is no address:port - at `$.master`"
        return None


# gc=False: no cycle goes through what is immutable, and a leader makes thousands at each look.
class NodeRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, rename=_SHORT
):
    """A node's record of itself; written by nobody else.

    Attributes:
        beat: grows with every write; a node whose beat stands still is lost.
        incarnation: the run whose rounds ``round`` and ``world_id`` are; None before its first.
        round: the last round in which this node was named; -1 before its first.
        world_id: `RoundDocument.world_id` of the last round in which it has seen its rank.
        rank: its rank in that round.
        min_nodes, max_nodes: its ``--nnodes``.
        interval: seconds between two of its beats.
        lease: seconds without a beat after which it is lost.
        looks: how often it has read all records since it started, as a leader does, but for a
            reading that follows a write of the document which failed.
        hint: its ``--rdzv-conf rank``.
        master: on rank 0, ``address:port`` of its TCPStore for ``round``.
        hosts: False: it could not open that TCPStore, and another is to be rank 0.
        lacks: 4 or 6: its host has no address of that version of IP, and reaches none; 0: it has
            both, or that is not known.
        failed: it asks for another round because its workers failed, or it has left because they or
            its agent failed.
        may_grow: its workers say that now is a good moment to let newcomers in.
        unfit: why it asks for no round: its check failed, or it gave up. It beats while it tries
            again.
        policy: the options of the run that are not at their defaults, as text.
        domain: where it is, by levels with "/" between them; only where the run minds that.
        port: where it answers the network checks of others; 0: nowhere.
        link: where it answers the links of others, and then accusations too; 0: nowhere.
        accuses: nodes that were gone when it dialled them again, each with its beat then.
        found: what its own network check came to in the round of ``world_id``.
        suspect: the last round that named it did not run because of its network: no running round
            is ended for it.
        last_call: of a leader, the round that it forms, and when the last call of that ends on its
            wall clock; for people alone. None: none runs, or it has just begun.
        at: when it wrote this, in seconds since the epoch on its wall clock; for people alone. 0:
            not known.
        schema: as the document's; a node of another version disturbs no round of this one.
        slow: milliseconds that one of its last two heartbeats took to be written, or by which it
            woke late; 0: less than 50.
    """

    address: Id
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
    hosts: bool = True
    lacks: Literal[0, 4, 6] = 0
    failed: bool = False
    may_grow: bool = False
    unfit: Text = ""
    policy: Text = ""
    domain: Id | None = None
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    link: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    accuses: Annotated[tuple[tuple[Id, Count], ...], Long] = ()
    found: Found | None = None
    suspect: bool = False
    last_call: tuple[Count, Clock] | None = None
    schema: Literal[2] = 2
    # Last, for they change with each heartbeat: a store may send no more than the end of a value.
    slow: Count = 0
    looks: Count = 0
    at: Clock = 0
    beat: Count

    @property
    def label(self) -> str:
        """The node's name for people."""
        return f"{self.address}[{self.pid}]"

    @property
    def asks(self) -> bool:
        """Whether it asks for a round."""
        return self.status in (Status.JOIN, Status.SPARE)

    @property
    def is_over(self) -> bool:
        """Whether no round is to wait for it: it is in none, or its workers succeeded."""
        return self.status in (Status.LEFT, Status.DONE)

    @property
    def has_ended(self) -> bool:
        """Whether it is over for good: it does not try again either."""
        return self.is_over and not self.is_unfit

    @property
    def is_unfit(self) -> bool:
        """Whether it is in no round and asks for none until its check passes, or it gives up."""
        return self.status is Status.LEFT and self.unfit != ""

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> NodeRecord:
        """Raises `RendezvousStateError` for anything that `encode` did not write."""
        # A leader decodes thousands at each look: what is dear is looked at only where it is new.
        try:
            if len(data) > RECORD_BYTES:
                refuse_size(data, RECORD_BYTES)
            record = _decode_record(data)
            # As `may_hold_controls`, without a call.
            if not data.isascii() or 0x5C in data or 0x7F in data:
                record = cleaned(record)
            if not 0 < record.interval <= record.lease:
                raise RefusedValueError(
                    f"a beat every {record.interval} s, a lease of {record.lease} s - at `$.lease`"
                )
            if record.address not in KNOWN_HOSTS and not is_host(record.address):
                raise RefusedValueError("the name or number of no host - at `$.addr`")
            if record.master is not None and not is_master(record.master):
                raise RefusedValueError("no address:port - at `$.master`")
        except (*UNREADABLE, RefusedValueError) as error:
            raise RendezvousStateError(f"a node's record is unreadable: {plain(error)}") from None
        return record


def digest_of(incarnation: str, nodes: Iterable[str]) -> str:
    """Tells the nodes of one run, in this order, apart from all others."""
    text = " ".join((incarnation, *nodes)).encode(errors="backslashreplace")
    return blake2b(text, digest_size=8).hexdigest()


def labels(records: Mapping[str, NodeRecord], nodes: Iterable[str]) -> list[str]:
    """The nodes' names for people; the ids of those without a record."""
    return [records[node].label if node in records else node for node in nodes]


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
    """The schema of what may be another version's document; None: it is no document."""
    if len(data) > DOCUMENT_BYTES:
        return None
    try:
        found: object = _SCHEMAS.decode(data).schema
    except UNREADABLE:
        return None
    return found
