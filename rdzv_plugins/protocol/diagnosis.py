"""What a run does, what it waits for and how long still: one sentence for people. Pure functions.

A leader sees all records and names whom it misses. Another node sees the document alone and says
what that says. An observer that is no node sees all records, and whose heartbeats stand still.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from rdzv_plugins.protocol.choice import Sizes, needed, world_size
from rdzv_plugins.protocol.decide import rejoin_patience
from rdzv_plugins.protocol.documents import (
    Names,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
    labels,
)
from rdzv_plugins.protocol.growth import GROWTH, Hold, hold, last_call
from rdzv_plugins.protocol.kept_out import kept_out, summary
from rdzv_plugins.protocol.links import own_findings, slow, told
from rdzv_plugins.protocol.rules import View
from rdzv_plugins.protocol.situation import assess, fits, has_rejoined, without
from rdzv_plugins.protocol.wall_clock import shown

__all__ = ["Diagnosis", "Pace", "call_ends", "diagnose", "of_node"]

# A changed sentence is told once it has stood for so long: not each step of a round that forms.
_SETTLED_SECONDS = 1.0
_REPEAT_SECONDS = 30.0

_TO_JOIN = "to join_timeout"
_NOBODY = Names()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The parts of the sentence; ``str`` puts them together.

    Attributes:
        does: what the run does, or for how many nodes it waits.
        absent: nodes of the last round that have not asked for this one.
        lost: nodes that are gone since the last round.
        left, silent: where the round needs more nodes, those that left, and those of which a
            heartbeat was due and did not come.
        gave_up: those that came for this round, and left before it formed.
        doubted: how many are late all at once, so that each has one more lease.
        unfit: nodes that ask for no round since their check failed, each with the reason.
        excluded: which hosts are kept out, until when and why.
        network: between whom no data pass, or pass slowly; or that this node finds that out.
        since: since when the round forms.
        seconds: how long still, or how long already, as ``limit`` says; None: nothing limits it.
        limit: what follows the seconds, such as "to join_timeout".
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
            self.network,
            f"forming since {self.since}" if self.since else "",
        ]
        return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        if self.seconds is None:
            return self.lasting
        return f"{self.lasting}; {max(0.0, self.seconds):.0f} s {self.limit}"

    def at_the_end(self, left: Iterable[str], gave_up: Collection[str] = ()) -> Diagnosis:
        """The same when the time is over, with more nodes that have left or given up."""
        return Diagnosis(
            does=self.does,
            absent=self.absent,
            lost=self.lost,
            left=self.left.plus(left).without(gave_up),
            gave_up=_NOBODY.plus(gave_up),
            silent=self.silent,
            unfit=self.unfit,
            excluded=self.excluded,
            network=self.network,
            since=self.since,
        )


class Pace:
    """When a join that waits tells its sentence: once it has settled, and every 30 s.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._looked = now
        self._candidate = self._told = ""
        self._told_at = now

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again; a leader of many nodes decides much more often."""
        return now - self._looked >= _SETTLED_SECONDS

    def tells(self, sentence: str, now: float) -> bool:
        """Whether this sentence, which is without its seconds, is to be told now."""
        settled = sentence == self._candidate
        self._looked, self._candidate = now, sentence
        if not (settled and sentence != self._told) and now - self._told_at < _REPEAT_SECONDS:
            return False
        self._told, self._told_at = sentence, now
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Seconds that are left, where the observer knows them; ``quiet`` are those since a beat.

    ``now`` are seconds since the epoch; the others say since when, and when the last call ends.
    """

    join: float | None = None
    last_call: float | None = None
    call_ends: str = ""
    since: str = ""
    rejoin: Callable[[int], float] | None = None
    quiet: float | None = None
    now: float = 0.0
    hold: Callable[[int, int], Hold | None] | None = None


def diagnose(
    document: RoundDocument | None,
    records: Mapping[str, NodeRecord],
    is_silent: Callable[[str], bool] = lambda _: False,
    quiet_for: float | None = None,
    now: float = 0.0,
    is_lost: Callable[[str], bool] | None = None,
) -> Diagnosis:
    """What somebody says who is no node of the run, but has read all of it.

    Args:
        is_silent: whether a node's heartbeat is known to have stood still for too long.
        quiet_for: seconds of watching in which no heartbeat was seen; None: not observed.
        now: seconds since the epoch; exclusions end by it.
        is_lost: whether its lease has run out; None: whoever is silent is lost.
    """
    if document is None:
        unfit = _unfit(records, is_silent)
        return Diagnosis(does="no round has begun", unfit=_reasons(records, unfit))
    sizes = Sizes.told(document, records.get(document.leader or ""))
    times = _Times(quiet=quiet_for, now=now, since=shown(document.since, now))
    leader = records.get(document.leader or "")
    if leader is not None and (ends := call_ends(document, leader)):
        times = replace(times, last_call=ends - now, call_ends=f", until {shown(ends, now)}")
    found = _with_records(document, records, is_silent, is_lost or is_silent, times, sizes)
    return _with_exclusions(found, document, now)


def call_ends(document: RoundDocument, leader: NodeRecord) -> int:
    """When the last call of the round ends that forms, on its leader's wall clock; 0: unknown."""
    if document.phase is not Phase.FORMING or leader.last_call is None:
        return 0
    round_, ends = leader.last_call
    return ends if round_ == document.round and shown(ends, ends) else 0


def _with_exclusions(found: Diagnosis, document: RoundDocument, now: float) -> Diagnosis:
    if document.closed or not (document.excluded or document.quarantined):
        return found
    return replace(found, excluded=summary(document, now))


def of_node(view: View, join_left: float | None = None) -> Diagnosis:
    """What a node says that waits for a round; ``join_left`` are its seconds to join_timeout."""
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

    times = _Times(
        join=join_left,
        last_call=last_call(rules, document) - (view.enough_for or 0.0),
        rejoin=lambda ready: rejoin_patience(rules, ready) - view.round_age,
        now=view.wall,
    )
    at, lost = assess(view, document), len(document.lost)
    times = replace(times, hold=lambda wait, room: hold(view, wait, room, at.may_grow, lost))
    found = _with_records(document, at.records, view.is_silent, view.is_silent, times, at.sizes)
    return replace(found, doubted=len(at.doubted))


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


def _with_records(
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    is_silent: Callable[[str], bool],
    is_lost: Callable[[str], bool],
    times: _Times,
    sizes: Sizes,
) -> Diagnosis:
    if document.closed:
        return _closed(document)
    live = {
        node: record
        for node, record in records.items()
        if record.status is not Status.LEFT and not (is_silent(node) or is_lost(node))
    }
    unfit = _unfit(records, is_silent)
    found = _of_the_round(document, records, live, unfit, is_silent, is_lost, times, sizes)
    late = slow(document, records) if document.phase is Phase.RUNNING else ""
    network = "; ".join(filter(None, (told(document, records), late)))
    return replace(found, unfit=_reasons(records, unfit), network=network)


def _unfit(records: Mapping[str, NodeRecord], is_silent: Callable[[str], bool]) -> Collection[str]:
    """Nodes that live, and wait until their check passes."""
    return {node for node, record in records.items() if record.is_unfit and not is_silent(node)}


def _reasons(records: Mapping[str, NodeRecord], unfit: Collection[str]) -> Names:
    return Names().plus(f"{records[node].label} ({records[node].unfit})" for node in unfit)


def _of_the_round(
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    live: Mapping[str, NodeRecord],
    unfit: Collection[str],
    is_silent: Callable[[str], bool],
    is_lost: Callable[[str], bool],
    times: _Times,
    sizes: Sizes,
) -> Diagnosis:
    if unfit and not live:
        return Diagnosis(does=f"round {document.round} is {document.phase.value}, no node is fit")
    stands = f"dead: round {document.round} is {document.phase.value}, but"
    if all(record.status is Status.LEFT for record in records.values()):
        return Diagnosis(does=f"{stands} all its nodes have left")
    if not live:
        return _dead(f"{stands} none of its nodes lives", records, times)
    out = kept_out(document, records, times.now)
    waiting = [
        node
        for node, record in live.items()
        if record.asks and fits(record, document) and node not in out
    ]
    match document.phase:
        case Phase.FORMING:
            return _forming(document, records, is_silent, is_lost, waiting, unfit, times, sizes)
        case Phase.CONFIRMING:
            return _confirming(document, records, times)
        case _:
            return _running(document, records, waiting, times, sizes)


def _dead(does: str, records: Mapping[str, NodeRecord], times: _Times) -> Diagnosis:
    last = shown(max((it.at for it in records.values()), default=0), times.now)
    if last:
        return Diagnosis(does=f"{does}; the last heartbeat came at {last}")
    return Diagnosis(does=does, seconds=times.quiet, limit="watched without a heartbeat")


def _forming(
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    is_silent: Callable[[str], bool],
    is_lost: Callable[[str], bool],
    waiting: Iterable[str],
    unfit: Collection[str],
    times: _Times,
    sizes: Sizes,
) -> Diagnosis:
    awaited = {
        node
        for node in document.previous
        if not has_rejoined(document, records.get(node), document.round - 1)
    }
    pending = [
        node
        for node in awaited
        if not is_lost(node) and _status(records, node) not in (Status.LEFT, Status.DONE)
    ]
    present = [node for node in waiting if node not in awaited]
    ready, size = len(present), world_size(present, records, sizes)
    more = needed(present, records, sizes)
    needs = max(more, len(pending))
    here = f"{ready} of {_nnodes(document)}"
    active = [node for node in records if _status(records, node) not in _OVER]
    lost = document.cause.lost.without(labels(records, present))
    lost = lost.plus(labels(records, filter(is_lost, active)))
    if needs <= 0 and size >= sizes.most:
        return Diagnosis(does=f"{here} nodes are here: their round begins", since=times.since)
    if needs <= 0:
        does, limit = f"enough nodes ({here})", f"more {_for_whom(ready, sizes)}{times.call_ends}"
        if size < ready:
            lets = "let" if " and " in sizes.policy else "lets"
            does += f": {sizes.policy} {lets} {size} of them in"
        return Diagnosis(
            does=does,
            lost=lost,
            since=times.since,
            seconds=times.last_call,
            limit=limit,
            needs=False,
        )
    left = silent = _NOBODY
    if size == 0:
        gone = [node for node in records if _status(records, node) is Status.LEFT]
        left = document.cause.left.plus(labels(records, gone)).without(labels(records, unfit))
        quiet = [node for node in active if is_silent(node) and not is_lost(node)]
        silent = silent.plus(labels(records, quiet))
    demands = f", as {sizes.policy} demands" if more > max(0, sizes.min_nodes - ready) else ""
    limits = [(times.join, _TO_JOIN)]
    if pending and times.rejoin is not None:
        limits.append((times.rejoin(size), "to rejoin_timeout"))
    seconds, limit = min(limits, key=lambda item: float("inf") if item[0] is None else item[0])
    return Diagnosis(
        does=f"waiting for {_count(needs)}: {here} {'is' if ready == 1 else 'are'} here{demands}",
        absent=Names().plus(labels(records, pending)),
        lost=lost,
        left=left,
        silent=silent,
        since=times.since,
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


def _confirming(
    document: RoundDocument, records: Mapping[str, NodeRecord], times: _Times
) -> Diagnosis:
    missing = [
        node
        for node in document.ranks
        if _status(records, node) is not Status.RUN or records[node].world_id != document.world_id
    ]
    # Where the roster is lost, an observer knows only those that have confirmed.
    unknown = document.size - len(document.ranks)
    number = len(missing) + unknown
    does = f"confirming round {document.round}: "
    if number:
        have = "has not confirmed its rank" if number == 1 else "have not confirmed their rank"
        names = Names().plus(labels(records, missing))
        does += f"{number} of {_count(document.size)} {have}"
        does += "" if unknown else f": {names}"
    else:
        does += "all nodes have confirmed their rank"
    return Diagnosis(does=does, seconds=times.join, limit=_TO_JOIN)


def _running(
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    waiting: Iterable[str],
    times: _Times,
    sizes: Sizes,
) -> Diagnosis:
    spares = [node for node in waiting if node not in document.ranks]
    done = [node for node in document.ranks if _status(records, node) is Status.DONE]
    room = sizes.most - document.size + len(document.lost)
    word = "waiting" if room > 0 and not document.finishing else "spare"
    present = without(document.ranks, document.lost)
    plural = "s" if word == "spare" and len(spares) > 1 else ""
    held, more = None, world_size([*present, *spares], records, sizes) - len(present)
    if spares and word == "waiting" and more > 0:
        held = times.hold(more, room) if times.hold else Hold(_held(records, document))
    elif word == "waiting" and sizes.policy:
        word = f"waiting for {sizes.policy}"
    why = f" ({held.why})" if held is not None and held.why else ""
    parts = [
        f"running round {document.round}",
        _size(document),
        f"{len(document.lost)} of them lost" if document.lost else "",
        f"{len(done)} of them done" if done else "",
        f"{len(spares)} {word}{plural}{why}" if spares else "",
    ]
    does = ", ".join(part for part in parts if part)
    if held is None or held.seconds is None:
        return Diagnosis(does=does)
    return Diagnosis(does=does, seconds=held.seconds, limit=held.limit)


def _held(records: Mapping[str, NodeRecord], document: RoundDocument) -> str:
    """The options that may hold newcomers back, as the first node of the round has them."""
    policy = next((records[node].policy for node in document.ranks if node in records), "")
    return ", ".join(it for it in policy.split(",") if it.partition("=")[0] in GROWTH)


def _closed(document: RoundDocument) -> Diagnosis:
    return Diagnosis(does=f"closed: {document.reason}" if document.reason else "closed")


_OVER = (None, Status.LEFT, Status.DONE)


def _status(records: Mapping[str, NodeRecord], node: str) -> Status | None:
    record = records.get(node)
    return record.status if record is not None else None


def _led(document: RoundDocument, leader: NodeRecord | None) -> str:
    if document.leader is None:
        return ", whose leader left"
    return f", led by {leader.label}" if leader is not None else ""


def _nnodes(document: RoundDocument) -> str:
    low, high = document.min_nodes, document.max_nodes
    return str(low) if low == high else f"{low}..{high}"


def _size(document: RoundDocument) -> str:
    """How many nodes the round has, and may have where that differs."""
    size = document.size
    if size == document.min_nodes == document.max_nodes:
        return _count(size)
    return f"{size} of {_nnodes(document)} nodes"


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"
