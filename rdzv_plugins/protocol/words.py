"""The sentences about a run: what it does and what it waits for. Pure functions.

A leader sees all records and names the missing nodes. Another node sees only the document. An
outside observer sees all records, and whether heartbeats stand still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from rdzv_plugins.protocol import policies
from rdzv_plugins.protocol.decide import rejoin_patience
from rdzv_plugins.protocol.documents import Names, NodeRecord, Phase, RoundDocument, Status, labels
from rdzv_plugins.protocol.policies.growth import GROWTH
from rdzv_plugins.protocol.policies.kept_out import summary
from rdzv_plugins.protocol.policies.network import own_findings, sentence, slow
from rdzv_plugins.protocol.policies.policy import Reason
from rdzv_plugins.protocol.rules import View
from rdzv_plugins.protocol.situation import Situation, assess, unconfirmed
from rdzv_plugins.protocol.sizes import Sizes, needed
from rdzv_plugins.protocol.wall_clock import shown

_TO_JOIN = "to join_timeout"
_NOBODY = Names()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The parts of the sentence; ``str`` puts them together.

    Attributes:
        does: what the run does, or for how many nodes it waits.
        absent: nodes of the last round that have not asked for this round.
        lost: nodes that are gone since the last round.
        left, silent: if the round needs more nodes: nodes that left, and nodes with an overdue
            heartbeat.
        gave_up: nodes that came for this round, and left before it formed.
        doubted: how many nodes are late all at once, so that each has one more lease.
        unfit: nodes that ask for no round because their check failed, each with the reason.
        excluded: which hosts are kept out, until when and why.
        not_admitted: how many asking nodes are not admitted to the next round, and why.
        network: between which nodes data do not pass, or pass slowly.
        since: since when the round forms.
        seconds: seconds left, or passed, as ``limit`` says; None: there is no limit.
        limit: the words after the seconds, such as "to join_timeout".
        needs: whether the round needs more nodes.
    """

    does: str
    absent: Names = _NOBODY
    lost: Names = _NOBODY
    left: Names = _NOBODY
    gave_up: Names = _NOBODY
    silent: Names = _NOBODY
    doubted: int = 0
    unfit: Names = _NOBODY
    excluded: str = ""
    not_admitted: str = ""
    network: str = ""
    since: str = ""
    seconds: float | None = None
    limit: str = ""
    needs: bool = True

    @property
    def lasting(self) -> str:
        """The sentence without seconds, so that it changes only when the run changes."""
        have = "has" if len(self.absent.first) + self.absent.more == 1 else "have"
        gone = (
            ("lost", self.lost),
            ("left", self.left),
            ("gave up", self.gave_up),
            ("silent", self.silent),
        )
        missing = ", ".join(f"{word} {who}" for word, who in gone if who)
        parts = [
            self.does,
            f"{self.absent} of the last round {have} not come back" if self.absent else "",
            f"missing: {missing}" if missing and self.needs else missing,
            f"{_count(self.doubted)} late all at once, as if the store or the load were slow"
            if self.doubted
            else "",
            f"unfit: {self.unfit}" if self.unfit else "",
            self.excluded,
            self.not_admitted,
            self.network,
            f"forming since {self.since}" if self.since else "",
        ]
        return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        if self.seconds is None:
            return self.lasting
        return f"{self.lasting}; {max(0.0, self.seconds):.0f} s {self.limit}"

    def at_the_end(self, left: Iterable[str], gave_up: Collection[str] = ()) -> Diagnosis:
        """The diagnosis at the time-out, with more nodes that have left or given up."""
        gone, quit_ = self.left.plus(left).without(gave_up), _NOBODY.plus(gave_up)
        return replace(self, left=gone, gave_up=quit_, doubted=0, seconds=None, needs=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Facts besides a situation, in seconds from now; None: not known.

    Attributes:
        sees_all: all records are read, and the document has all its nodes. A node that does not
            lead sees only the document and the leader's record.
        leads: the leader speaks: a silent node that is not lost has one more lease.
        leader: the leader's record.
        join, call_left, rejoin: until ``join_timeout``, and until the round stops waiting.
        call_until, since: when the last call ends, and since when the round forms, for people.
        quiet: seconds of watching in which no heartbeat was seen.
        network: what a node knows of its own network; it is told if there is nothing worse.
    """

    sees_all: bool = True
    leads: bool = False
    leader: NodeRecord | None = None
    join: float | None = None
    call_left: float | None = None
    rejoin: float | None = None
    call_until: str = ""
    since: str = ""
    quiet: float | None = None
    hold: Reason | None = None
    network: str = ""


_Says: TypeAlias = Callable[[Situation, _Known], Diagnosis]


def before_the_first_round(unfit: Iterable[NodeRecord]) -> Diagnosis:
    """The diagnosis by an observer while no round has begun, with the live unfit nodes."""
    return Diagnosis(does="no round has begun", unfit=_reasons(unfit))


def of_run(at: Situation, quiet_for: float | None = None) -> Diagnosis:
    """The diagnosis of a known situation by an observer that is no node of the run.

    ``quiet_for``: seconds of watching in which no heartbeat was seen; None: not observed.
    """
    leader = at.records.get(at.document.leader or "")
    ends, since = call_ends(at.document, leader), shown(at.document.since, at.wall)
    known = _Known(leader=leader, since=since, quiet=quiet_for, hold=_held(at))
    if ends:
        until = f", until {shown(ends, at.wall)}"
        known = replace(known, call_left=ends - at.wall, call_until=until)
    return _describe(at, known)


def call_ends(document: RoundDocument, leader: NodeRecord | None) -> int:
    """When the last call of the forming round ends, on its leader's wall clock; 0: unknown."""
    if document.phase is not Phase.FORMING or leader is None or leader.call_ends is None:
        return 0
    round_, ends = leader.call_ends
    return ends if round_ == document.round and shown(ends, ends) else 0


def of_node(view: View, join_left: float | None = None) -> Diagnosis:
    """The diagnosis by a node that waits for a round, ``join_left`` seconds before join_timeout."""
    document, record = view.document, view.record
    if record.is_unfit:
        return Diagnosis(does=f"this node does not join: {record.unfit}")
    if document is None:
        return Diagnosis(does="waiting for a first round", seconds=join_left, limit=_TO_JOIN)
    checks = "this node checks its network" if view.checks else own_findings(record)
    known = _Known(sees_all=False, leader=view.leader, join=join_left, network=checks)
    at = Situation(document=document, records={}, rules=view.rules, wall=view.wall)
    in_it = view.confirmed is not None and record.world_id == document.world_id
    if document.phase is Phase.RUNNING and not in_it:
        return _describe(at, known, _waiting_for_the_next)
    if view.records is not None and document.is_whole:
        at = assess(view, document)
        waits = document.phase is Phase.FORMING or at.growth > 0
        hold = policies.holds(view, at) if waits else None
        known = replace(
            known,
            sees_all=True,
            leads=True,
            call_left=0.0 if hold is None else hold.seconds,
            rejoin=rejoin_patience(view.rules, at.size) - view.round_age,
            hold=hold,
        )
    return _describe(at, known)


def _describe(at: Situation, known: _Known, does: _Says | None = None) -> Diagnosis:
    """The diagnosis of a run by a node or observer with this situation."""
    document, records = at.document, at.records
    found = _dead(at, known) if known.sees_all else None
    found = found or (does or _BY_PHASE[document.phase])(at, known)
    if document.closed:
        return found
    if known.sees_all:
        late = slow(document, records) if document.phase is Phase.RUNNING else ""
        found = replace(
            found,
            unfit=_reasons(_unfit(at)),
            not_admitted=_not_admitted(at) if document.phase is not Phase.CONFIRMING else "",
            network="; ".join(filter(None, (sentence(document, records), late))),
            doubted=len(at.doubted) if known.leads else 0,
        )
    network = found.network or known.network
    return replace(found, network=network, excluded=summary(document, at.wall))


def _unfit(at: Situation) -> list[NodeRecord]:
    return [it for node, it in at.records.items() if it.is_unfit and node not in at.silent]


def _reasons(unfit: Iterable[NodeRecord]) -> Names:
    return _NOBODY.plus(f"{record.label} ({record.unfit})" for record in unfit)


def _not_admitted(at: Situation) -> str:
    found = Counter(it.why for it in at.not_admitted.values() if it.why)
    return "; ".join(f"{_count(nodes)} waiting: {why}" for why, nodes in found.items())


def _dead(at: Situation, known: _Known) -> Diagnosis | None:
    """The diagnosis of a run in which no node can act; None: a node can."""
    document, records = at.document, at.records
    if document.closed:
        return None
    stands = f"round {document.round} is {document.phase.value}"
    if not at.live and _unfit(at):
        return Diagnosis(does=f"{stands}, no node is fit")
    if all(record.status is Status.LEFT for record in records.values()):
        return Diagnosis(does=f"stopped: all nodes left during round {document.round}")
    if at.live:
        return None
    does = f"dead: {stands}, but none of its nodes lives"
    if last := shown(max((it.at for it in records.values()), default=0), at.wall):
        return Diagnosis(does=f"{does}; the last heartbeat came at {last}")
    return Diagnosis(does=does, seconds=known.quiet, limit="watched without a heartbeat")


def _forming(at: Situation, known: _Known) -> Diagnosis:
    document, cause, ready = at.document, at.document.cause, len(at.ready)
    if not known.sees_all:
        ends = call_ends(document, known.leader)
        call = f"; its last call ends at {shown(ends, at.wall)}" if ends else ""
        does = f"waiting for a round of {_nnodes(document)} nodes{_led(document, known)}{call}"
        return Diagnosis(
            does=does, lost=cause.lost, left=cause.left, seconds=known.join, limit=_TO_JOIN
        )
    needs = max(needed(at.ready, at.records, at.sizes), len(at.awaited))
    here = f"{ready} of {_nnodes(document)}"
    if needs > 0:
        return _too_few(at, known, needs, here)
    if at.size >= at.sizes.most:
        return Diagnosis(does=f"{here} nodes are here: their round begins", since=known.since)
    does, units = f"enough nodes ({here})", at.sizes.constraints
    if at.size < ready:
        does += f": {units} {'let' if ' and ' in units else 'lets'} {at.size} of them in"
    return Diagnosis(
        does=does,
        lost=_lost(at),
        since=known.since,
        seconds=known.call_left,
        limit=f"more {_for_whom(ready, at.sizes)}{known.call_until}",
        needs=False,
    )


def _too_few(at: Situation, known: _Known, needs: int, here: str) -> Diagnosis:
    """The diagnosis of a forming round that waits for ``needs`` nodes."""
    records, sizes, ready = at.records, at.sizes, len(at.ready)
    left = silent = _NOBODY
    if at.size == 0:
        gone = [it for it in records.values() if it.status is Status.LEFT]
        ended = (it.label for it in gone if it.has_ended)
        unfit = [it.label for it in gone if it.is_unfit]
        left = at.document.cause.left.plus(ended).without(unfit)
        silent = _NOBODY if known.leads else _NOBODY.plus(labels(records, at.doubted))
    more = needed(at.ready, records, sizes)
    demands = f", as {sizes.demand}" if more > max(0, sizes.min_nodes - ready) else ""
    limits = [(known.join, _TO_JOIN)]
    if at.awaited and known.rejoin is not None:
        limits.append((known.rejoin, "to rejoin_timeout"))
    seconds, limit = min(limits, key=lambda item: float("inf") if item[0] is None else item[0])
    return Diagnosis(
        does=f"waiting for {_count(needs)}: {here} {'is' if ready == 1 else 'are'} here{demands}",
        absent=_NOBODY.plus(labels(records, at.awaited)),
        lost=_lost(at),
        left=left,
        silent=silent,
        since=known.since,
        seconds=seconds,
        limit=limit,
        needs=at.size == 0,
    )


def _lost(at: Situation) -> Names:
    """The nodes that are missing in the forming round because they are lost."""
    records = at.records
    lost = at.document.cause.lost.without(labels(records, at.ready))
    active = (it for it in at.lost if it in records and not records[it].is_over)
    return lost.plus(labels(records, active))


def _for_whom(ready: int, sizes: Sizes) -> str:
    more = sizes.most - ready
    if more != 1:
        return f"for up to {more} others" if more > 1 else "for others"
    return f"for {_ORDINALS.get(sizes.most, 'one more')}"


_ORDINALS = dict(enumerate(("a second", "a third", "a fourth", "a fifth", "a sixth"), 2))


def _confirming(at: Situation, known: _Known) -> Diagnosis:
    document = at.document
    does = f"confirming round {document.round}"
    if not known.sees_all:
        does += f", {_size(document)}{_led(document, known)}"
        return Diagnosis(does=does, seconds=known.join, limit=_TO_JOIN)
    missing = unconfirmed(document, at.records)
    # If the roster is lost, an observer knows only nodes that have confirmed.
    unknown = document.size - len(document.ranks)
    if number := len(missing) + unknown:
        have = "has not confirmed its rank" if number == 1 else "have not confirmed their rank"
        names = "" if unknown else f": {_NOBODY.plus(labels(at.records, missing))}"
        does += f": {number} of {_count(document.size)} {have}{names}"
    else:
        does += ": all nodes have confirmed their rank"
    return Diagnosis(does=does, seconds=known.join, limit=_TO_JOIN)


def _running(at: Situation, known: _Known) -> Diagnosis:
    document = at.document
    does = f"running round {document.round}, {_size(document)}"
    if not known.sees_all:
        return Diagnosis(does=does + _led(document, known))
    spares = len(at.waiting)
    word = "waiting" if at.room > 0 and not document.finishing else "spare"
    plural = "s" if word == "spare" and spares > 1 else ""
    held = known.hold if word == "waiting" and at.growth > 0 else None
    if word == "waiting" and not at.growth and at.sizes.constraints:
        word = f"waiting for {at.sizes.constraints}"
    why = f" ({held.why})" if held is not None and held.why else ""
    does += f", {len(document.absent)} of them gone" if document.absent else ""
    does += f", {len(at.done)} of them done" if at.done else ""
    does += f", {spares} {word}{plural}{why}" if spares else ""
    if held is None or held.seconds is None:
        return Diagnosis(does=does)
    return Diagnosis(does=does, seconds=held.seconds, limit=held.limit)


def _waiting_for_the_next(at: Situation, known: _Known) -> Diagnosis:
    """The diagnosis by a node that waits while a round runs without it."""
    document, sizes = at.document, at.sizes
    runs = f"runs with {_size(document)}"
    if document.all_absent:
        runs = "has lost all its nodes"
    does = f"waiting for the next round: round {document.round} {runs}{_led(document, known)}"
    if sizes.constraints and document.size < sizes.most:
        does += f", which lets more in as {sizes.demand}"
    return Diagnosis(does=does, seconds=known.join, limit=_TO_JOIN)


def _closed(at: Situation, known: _Known) -> Diagnosis:
    reason = at.document.reason
    return Diagnosis(does=f"closed: {reason}" if reason else "closed")


_BY_PHASE: dict[Phase, _Says] = {
    Phase.FORMING: _forming,
    Phase.CONFIRMING: _confirming,
    Phase.RUNNING: _running,
    Phase.CLOSED: _closed,
}


def _held(at: Situation) -> Reason:
    """The options that may hold newcomers back, from the record of the round's first node."""
    written = (at.records[node].run_options for node in at.document.ranks if node in at.records)
    options = next(written, "").split(",")
    return Reason(", ".join(it for it in options if it.partition("=")[0] in GROWTH))


def _led(document: RoundDocument, known: _Known) -> str:
    if document.leader is None:
        return ", whose leader left"
    return f", led by {known.leader.label}" if known.leader is not None else ""


def _nnodes(document: RoundDocument) -> str:
    low, high = document.min_nodes, document.max_nodes
    return str(low) if low == high else f"{low}..{high}"


def _size(document: RoundDocument) -> str:
    """How many nodes the round has, and how many it may have if that differs."""
    size = document.size
    if size == document.min_nodes == document.max_nodes:
        return _count(size)
    return f"{size} of {_nnodes(document)} nodes"


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"
