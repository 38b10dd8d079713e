"""The sentences about a run: what it does and waits for, and a node's remarks. Pure functions.

A leader sees all records and names the missing nodes. Another node sees only the document. An
outside observer sees all records, and whether heartbeats stand still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from rdzv_plugins.protocol import policies
from rdzv_plugins.protocol.decide import rejoin_patience
from rdzv_plugins.protocol.documents import Names, NodeRecord, Phase, RoundDocument, Status, labels
from rdzv_plugins.protocol.policies.growth import GROWTH
from rdzv_plugins.protocol.policies.kept_out import describe_in_force, exclusion_of, summary
from rdzv_plugins.protocol.policies.network import own_findings, remark, sentence, slow, verdict_on
from rdzv_plugins.protocol.policies.policy import Reason
from rdzv_plugins.protocol.rules import View
from rdzv_plugins.protocol.situation import (
    Situation,
    assess,
    assess_from_outside,
    is_full,
    unconfirmed,
    waits_for_a_living_round,
)
from rdzv_plugins.protocol.sizes import Sizes, needed
from rdzv_plugins.protocol.wall_clock import shown

# Tell a changed sentence once it has stood this long, not at each step of a forming round.
_SETTLED_SECONDS = 1.0
_REPEAT_SECONDS = 30.0

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
        refused: how many asking nodes are not admitted to the next round, and why.
        network: between which nodes data do not pass, or pass slowly.
        since: since when the round forms.
        seconds: how long still, or how long already, as ``limit`` says; None: nothing limits it.
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
    refused: str = ""
    network: str = ""
    since: str = ""
    seconds: float | None = None
    limit: str = ""
    needs: bool = True

    @property
    def lasting(self) -> str:
        """The sentence without its seconds: it changes only when the run does."""
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
            self.refused,
            self.network,
            f"forming since {self.since}" if self.since else "",
        ]
        return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        if self.seconds is None:
            return self.lasting
        return f"{self.lasting}; {max(0.0, self.seconds):.0f} s {self.limit}"

    def at_the_end(self, left: Iterable[str], gave_up: Collection[str] = ()) -> Diagnosis:
        """The diagnosis when the time is over, with more nodes that have left or given up."""
        return Diagnosis(
            does=self.does,
            absent=self.absent,
            lost=self.lost,
            left=self.left.plus(left).without(gave_up),
            gave_up=_NOBODY.plus(gave_up),
            silent=self.silent,
            unfit=self.unfit,
            excluded=self.excluded,
            refused=self.refused,
            network=self.network,
            since=self.since,
        )


class Pace:
    """When the log tells what a join waits for: once the sentence has settled, and every 30 s."""

    def __init__(self, now: float) -> None:
        self._looked = now
        self._candidate = self._told = ""
        self._told_at = now

    def is_due(self, now: float) -> bool:
        """Whether to look again; a leader of many nodes decides much more often."""
        return now - self._looked >= _SETTLED_SECONDS

    def tells(self, sentence: str, now: float) -> bool:
        """Whether to tell this sentence, which has no seconds, now."""
        settled = sentence == self._candidate
        self._looked, self._candidate = now, sentence
        if not (settled and sentence != self._told) and now - self._told_at < _REPEAT_SECONDS:
            return False
        self._told, self._told_at = sentence, now
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Facts besides a situation, in seconds from now; None: not known.

    Attributes:
        join, last_call, rejoin: until ``join_timeout``, and until the round stops waiting.
        call_ends, since: when the last call ends, and since when the round forms, for people.
        quiet: seconds of watching in which no heartbeat was seen.
        leads: the leader speaks: a silent node that is not lost has one more lease.
    """

    join: float | None = None
    last_call: float | None = None
    rejoin: float | None = None
    call_ends: str = ""
    since: str = ""
    quiet: float | None = None
    hold: Reason | None = None
    leads: bool = False


def diagnose(
    document: RoundDocument | None,
    records: Mapping[str, NodeRecord],
    is_silent: Callable[[str], bool] = lambda _: False,
    quiet_for: float | None = None,
    now: float = 0.0,
    is_lost: Callable[[str], bool] | None = None,
) -> Diagnosis:
    """The diagnosis by an observer that has read all of the run and is no node of it.

    Args:
        is_silent: whether a heartbeat of the node is overdue.
        quiet_for: seconds of watching in which no heartbeat was seen; None: not observed.
        is_lost: whether its lease has run out; None: each silent node is lost.
    """
    if document is None:
        unfit = (it for node, it in records.items() if it.is_unfit and not is_silent(node))
        return Diagnosis(does="no round has begun", unfit=_reasons(unfit))
    return of_run(
        assess_from_outside(document, records, is_silent, is_lost or is_silent, now), quiet_for
    )


def of_run(at: Situation, quiet_for: float | None = None) -> Diagnosis:
    """The diagnosis of a known situation."""
    document, now = at.document, at.wall
    known = _Known(quiet=quiet_for, since=shown(document.since, now), hold=_held(at))
    leader = at.records.get(document.leader or "")
    if leader is not None and (ends := call_ends(document, leader)):
        known = replace(known, last_call=ends - now, call_ends=f", until {shown(ends, now)}")
    return _with_exclusions(_with_records(at, known), document, now)


def call_ends(document: RoundDocument, leader: NodeRecord) -> int:
    """When the last call of the forming round ends, on its leader's wall clock; 0: unknown."""
    if document.phase is not Phase.FORMING or leader.last_call is None:
        return 0
    round_, ends = leader.last_call
    return ends if round_ == document.round and shown(ends, ends) else 0


def _with_exclusions(found: Diagnosis, document: RoundDocument, now: float) -> Diagnosis:
    if document.closed or not (document.excluded or document.quarantined):
        return found
    return replace(found, excluded=summary(document, now))


def of_node(view: View, join_left: float | None = None) -> Diagnosis:
    """The diagnosis by a node that waits for a round, ``join_left`` seconds before join_timeout."""
    document = view.document
    if view.record.is_unfit:
        return Diagnosis(does=f"this node does not join: {view.record.unfit}")
    if document is None:
        return Diagnosis(does="waiting for a first round", seconds=join_left, limit=_TO_JOIN)
    found = _of_node(view, document, join_left)
    if not found.network:
        checks = "this node checks its network" if view.checks else ""
        found = replace(found, network=checks or own_findings(view.record))
    return _with_exclusions(found, document, view.wall)


def _of_node(view: View, document: RoundDocument, join_left: float | None) -> Diagnosis:
    rules = view.rules
    in_it = view.confirmed is not None and view.record.world_id == document.world_id
    if document.phase is Phase.RUNNING and not in_it:
        led = _led(document, view.leader)
        does = f"waiting for the next round: round {document.round} runs with {_size(document)}"
        if document.has_lost_all:
            does = f"waiting for the next round: round {document.round} has lost all its nodes"
        sizes = Sizes.of(rules)
        if sizes.policy and document.size < sizes.most:
            led += f", which lets more in as {sizes.policy} demands"
        return Diagnosis(does=does + led, seconds=join_left, limit=_TO_JOIN)
    if view.records is None or not document.is_whole:
        return _without_records(document, view.leader, join_left, view.wall)

    at = assess(view, document)
    waits = document.phase is Phase.FORMING or at.growth > 0
    held = policies.holds(view, at) if waits else None
    known = _Known(
        join=join_left,
        last_call=0.0 if held is None else held.seconds,
        rejoin=rejoin_patience(rules, at.size) - view.round_age,
        hold=held,
        leads=True,
    )
    return _with_records(at, known)


def _without_records(
    document: RoundDocument, leader: NodeRecord | None, join_left: float | None, now: float
) -> Diagnosis:
    led, cause = _led(document, leader), document.cause
    match document.phase:
        case Phase.FORMING:
            ends = call_ends(document, leader) if leader is not None else 0
            call = f"; its last call ends at {shown(ends, now)}" if ends else ""
            return Diagnosis(
                does=f"waiting for a round of {_nnodes(document)} nodes{led}{call}",
                lost=cause.lost,
                left=cause.left,
                seconds=join_left,
                limit=_TO_JOIN,
            )
        case Phase.CONFIRMING:
            does = f"confirming round {document.round}, {_size(document)}{led}"
            return Diagnosis(does=does, seconds=join_left, limit=_TO_JOIN)
        case Phase.RUNNING:
            return Diagnosis(does=f"running round {document.round}, {_size(document)}{led}")
        case Phase.CLOSED:
            return _closed(document)


def _with_records(at: Situation, known: _Known) -> Diagnosis:
    document, records = at.document, at.records
    if document.closed:
        return _closed(document)
    unfit = [it for node, it in records.items() if it.is_unfit and node not in at.silent]
    late = slow(document, records) if document.phase is Phase.RUNNING else ""
    return replace(
        _by_phase(at, known, bool(unfit)),
        unfit=_reasons(unfit),
        refused=_refused(at) if document.phase is not Phase.CONFIRMING else "",
        network="; ".join(filter(None, (sentence(document, records), late))),
        doubted=len(at.overdue) if known.leads else 0,
    )


def _reasons(unfit: Iterable[NodeRecord]) -> Names:
    return Names().plus(f"{record.label} ({record.unfit})" for record in unfit)


def _refused(at: Situation) -> str:
    found = Counter(it.why for it in at.not_admitted.values() if it.why)
    return "; ".join(f"{_count(nodes)} waiting: {why}" for why, nodes in found.items())


def _by_phase(at: Situation, known: _Known, has_unfit: bool) -> Diagnosis:
    document = at.document
    if has_unfit and not at.live:
        return Diagnosis(does=f"round {document.round} is {document.phase.value}, no node is fit")
    stands = f"dead: round {document.round} is {document.phase.value}, but"
    if all(record.status is Status.LEFT for record in at.records.values()):
        return Diagnosis(does=f"{stands} all its nodes have left")
    if not at.live:
        return _dead(f"{stands} none of its nodes lives", at, known)
    match document.phase:
        case Phase.FORMING:
            return _forming(at, known)
        case Phase.CONFIRMING:
            return _confirming(at, known)
        case _:
            return _running(at, known)


def _dead(does: str, at: Situation, known: _Known) -> Diagnosis:
    last = shown(max((it.at for it in at.records.values()), default=0), at.wall)
    if last:
        return Diagnosis(does=f"{does}; the last heartbeat came at {last}")
    return Diagnosis(does=does, seconds=known.quiet, limit="watched without a heartbeat")


def _forming(at: Situation, known: _Known) -> Diagnosis:
    document, records, sizes = at.document, at.records, at.sizes
    ready, size = len(at.ready), at.size
    more = needed(at.ready, records, sizes)
    needs = max(more, len(at.pending))
    here = f"{ready} of {_nnodes(document)}"
    lost = document.cause.lost.without(labels(records, at.ready))
    active = (it for it in at.lost if it in records and not records[it].is_over)
    lost = lost.plus(labels(records, active))
    if needs <= 0 and size >= sizes.most:
        return Diagnosis(does=f"{here} nodes are here: their round begins", since=known.since)
    if needs <= 0:
        does, limit = f"enough nodes ({here})", f"more {_for_whom(ready, sizes)}{known.call_ends}"
        if size < ready:
            lets = "let" if " and " in sizes.policy else "lets"
            does += f": {sizes.policy} {lets} {size} of them in"
        return Diagnosis(
            does=does,
            lost=lost,
            since=known.since,
            seconds=known.last_call,
            limit=limit,
            needs=False,
        )
    left = silent = _NOBODY
    if size == 0:
        gone = (it for it in records.values() if it.has_ended and it.status is Status.LEFT)
        unfit = [it.label for it in records.values() if it.is_unfit and it.status is Status.LEFT]
        left = document.cause.left.plus(it.label for it in gone).without(unfit)
        silent = _NOBODY if known.leads else silent.plus(labels(records, at.overdue))
    demands = f", as {sizes.policy} demands" if more > max(0, sizes.min_nodes - ready) else ""
    limits = [(known.join, _TO_JOIN)]
    if at.pending and known.rejoin is not None:
        limits.append((known.rejoin, "to rejoin_timeout"))
    seconds, limit = min(limits, key=lambda item: float("inf") if item[0] is None else item[0])
    return Diagnosis(
        does=f"waiting for {_count(needs)}: {here} {'is' if ready == 1 else 'are'} here{demands}",
        absent=Names().plus(labels(records, at.pending)),
        lost=lost,
        left=left,
        silent=silent,
        since=known.since,
        seconds=seconds,
        limit=limit,
        needs=size == 0,
    )


def _for_whom(ready: int, sizes: Sizes) -> str:
    more = sizes.most - ready
    if more != 1:
        return f"for up to {more} others" if more > 1 else "for others"
    return f"for {_ORDINALS.get(sizes.most, 'one more')}"


_ORDINALS = dict(enumerate(("a second", "a third", "a fourth", "a fifth", "a sixth"), 2))


def _confirming(at: Situation, known: _Known) -> Diagnosis:
    document = at.document
    missing = unconfirmed(document, at.records)
    # If the roster is lost, an observer knows only nodes that have confirmed.
    unknown = document.size - len(document.ranks)
    number = len(missing) + unknown
    does = f"confirming round {document.round}: "
    if number:
        have = "has not confirmed its rank" if number == 1 else "have not confirmed their rank"
        names = Names().plus(labels(at.records, missing))
        does += f"{number} of {_count(document.size)} {have}"
        does += "" if unknown else f": {names}"
    else:
        does += "all nodes have confirmed their rank"
    return Diagnosis(does=does, seconds=known.join, limit=_TO_JOIN)


def _running(at: Situation, known: _Known) -> Diagnosis:
    document, spares = at.document, len(at.waiting)
    word = "waiting" if at.room > 0 and not document.finishing else "spare"
    plural = "s" if word == "spare" and spares > 1 else ""
    held = known.hold if word == "waiting" and at.growth > 0 else None
    if word == "waiting" and not at.growth and at.sizes.policy:
        word = f"waiting for {at.sizes.policy}"
    why = f" ({held.why})" if held is not None and held.why else ""
    parts = [
        f"running round {document.round}",
        _size(document),
        f"{len(document.lost)} of them lost" if document.lost else "",
        f"{len(at.done)} of them done" if at.done else "",
        f"{spares} {word}{plural}{why}" if spares else "",
    ]
    does = ", ".join(part for part in parts if part)
    if held is None or held.seconds is None:
        return Diagnosis(does=does)
    return Diagnosis(does=does, seconds=held.seconds, limit=held.limit)


def _held(at: Situation) -> Reason:
    """The options that may hold newcomers back, as the round's first node has them."""
    policies = (at.records[node].policy for node in at.document.ranks if node in at.records)
    options = next(policies, "").split(",")
    return Reason(", ".join(it for it in options if it.partition("=")[0] in GROWTH))


def _closed(document: RoundDocument) -> Diagnosis:
    return Diagnosis(does=f"closed: {document.reason}" if document.reason else "closed")


def _led(document: RoundDocument, leader: NodeRecord | None) -> str:
    if document.leader is None:
        return ", whose leader left"
    return f", led by {leader.label}" if leader is not None else ""


def _nnodes(document: RoundDocument) -> str:
    low, high = document.min_nodes, document.max_nodes
    return str(low) if low == high else f"{low}..{high}"


def _size(document: RoundDocument) -> str:
    """How many nodes the round has, and may have if that differs."""
    size = document.size
    if size == document.min_nodes == document.max_nodes:
        return _count(size)
    return f"{size} of {_nnodes(document)} nodes"


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


Remark: TypeAlias = tuple[str, object, str]
"""A remark of a node for people: a kind, a key (each is told once), and a sentence."""


def remarks(view: View) -> Iterator[Remark]:
    """What this node has to tell now."""
    yield from _of_the_end(view)
    document = view.document
    if document is None or document.closed:
        return
    for kind in (_of_the_round, _of_two_worlds, _of_orders, _of_a_spare, _of_the_network):
        yield from kind(view, document)
    if document.leader == view.me:
        yield from _of_a_leader(view, document)


def _of_the_end(view: View) -> Iterator[Remark]:
    document, latest = view.document, view.latest
    if latest is None or not latest.closed:
        return
    if document is None or not document.closed:
        yield "closed", latest.incarnation, "the run was closed while the store was away"
    elif not document.reason.endswith(f"closed by {view.record.label}"):
        # A node that closed the run itself has already logged its end.
        yield "closed", latest.incarnation, f"the run is closed: {document.reason}"


def _of_the_round(view: View, document: RoundDocument) -> Iterator[Remark]:
    this_round, number = (document.incarnation, document.round), document.round
    if document.phase is Phase.FORMING and number > 0:
        about = "lost" if document.cause.lost else "forming"
        yield about, this_round, f"round {number} forms: {document.reason}"
    if document.lost and document.leader == view.me:
        names = Names().plus(labels(view.records or {}, document.lost))
        text = f"round {number} goes on without {names}: lease ran out"
        yield "lost", (*this_round, document.lost), text
    evicted = document.cause.evicted
    if evicted and view.record.label in evicted and not document.names(view.me):
        yield (
            "evicted",
            this_round,
            f"round {number} goes on without this node: its agent did not ask for it in time",
        )


def _of_two_worlds(view: View, document: RoundDocument) -> Iterator[Remark]:
    was = view.member
    if was is None or view.unheard < view.rules.lease or not _went_on(view, document, was):
        return
    yield (
        "two worlds",
        was.world_id,
        f"round {document.round} came without this node, whose workers ran on in round "
        f"{was.round}: two worlds of this run may have trained at once, for at most "
        f"{view.unheard:.1f} s, in which the store accepted no heartbeat of this node",
    )


def _of_orders(view: View, document: RoundDocument) -> Iterator[Remark]:
    exclusion = exclusion_of(document, view.record.address, view.wall)
    if view.me in document.drained:
        text = "this node was drained: the others go on without it, its agent ends with status 0"
        yield "drained", document.incarnation, text
    elif exclusion is not None:
        text = f"{describe_in_force(document, exclusion, view.wall)}; this node waits meanwhile"
        yield "excluded", (document.incarnation, exclusion), text


def _of_a_spare(view: View, document: RoundDocument) -> Iterator[Remark]:
    excluded = exclusion_of(document, view.record.address, view.wall) is not None
    if excluded or view.leader is None or not waits_for_a_living_round(view):
        return
    why = "which is full"
    if document.finishing:
        why = "whose workers are about to end"
    elif view.record.suspect:
        why = "which is not ended for a node that failed its network check"
    elif not is_full(document, Sizes.of(view.rules)):
        why = f"which lets newcomers in later ({view.record.policy})"
    yield (
        "spare",
        (document.incarnation, document.round),
        f"this node waits as a spare of round {document.round}, {why}: {document.size} of "
        f"{document.max_nodes} nodes, led by {view.leader.label}. If that is another job, give "
        "this one an --rdzv-id of its own",
    )


def _of_the_network(view: View, document: RoundDocument) -> Iterator[Remark]:
    if document.leader == view.me and view.records is not None and document.is_whole:
        yield from _remarks_on_the_network(view, document)
    elif said := own_findings(view.record):
        yield "network", view.record.world_id, f"the network check of this node failed: {said}"


def _of_a_leader(view: View, document: RoundDocument) -> Iterator[Remark]:
    for exclusion in document.quarantined:
        told = describe_in_force(document, exclusion, view.wall)
        text = f"{told}; rdzv include ends it, and quarantine_after=0 turns quarantine off"
        yield "quarantine", (document.incarnation, exclusion), text
    rules = view.rules
    for record in (view.records or {}).values():
        if record.is_unfit and record.label != view.record.label:
            text = f"{record.label} does not join: {record.unfit}"
            if record.failed:
                text = f"{record.label} left: {record.unfit}"
            yield "unfit", (record.label, record.unfit, record.round), text
        if (record.interval, record.lease) != (rules.interval, rules.lease):
            yield (
                "settings",
                record.label,
                f"{record.label} beats every {record.interval:g} s with a lease of "
                f"{record.lease:g} s, this node every {rules.interval:g} s with one of "
                f"{rules.lease:g} s: set keep_alive_interval and keep_alive_max_attempt alike",
            )
        if record.policy != view.record.policy:
            yield (
                "settings",
                record.policy,
                f"{record.label} has {record.policy or 'no such option'} in --rdzv-conf, this "
                f"node {view.record.policy or 'none'}: set them alike on all nodes, for only "
                "those of the node that leads have an effect",
            )


def _went_on(view: View, document: RoundDocument, member: RoundDocument) -> bool:
    """Whether the run has had a later round than ``member``, without this node."""
    if view.me in document.ranks or document.ran in (None, member.world_id):
        return False
    return document.is_of(member) or member.incarnation in view.asked_tombstones


def _remarks_on_the_network(view: View, document: RoundDocument) -> Iterator[Remark]:
    this_round = document.incarnation, document.round
    records = {**(view.records or {}), view.me: view.record}
    runs = document.phase is Phase.RUNNING
    if document.phase is Phase.CONFIRMING and not unconfirmed(document, records):
        if not verdict_on(document, records, view.rules).runs:
            yield "network", this_round, remark(document, records, runs=False)
    elif runs and document.faults.links:
        yield "network", this_round, remark(document, records, runs=True)
    if runs and (late := slow(document, records)):
        yield "slow", this_round, f"round {document.round}: {late}"
