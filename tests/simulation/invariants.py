"""What must hold at every step, judged from outside: by what reached the store, and when.

A *world* is a round as its participants were named: its number, and its participants in rank
order. A host *runs* a world from the moment its agent is given it until its workers have stopped;
a host that stalls goes on running.

The *lease* of a host in a world holds as long as no stretch of ``lease / fastest clock rate`` (less
the staleness of listings, where a seed has stale ones) has passed without a new beat of it
reaching the store. Once run out it does not come back in that world: a host that was cut off for
so long has been replaced, and runs on until it hears of it.

A world is *named* by each write that puts it into the store: by the one that gives out its ranks,
and by those that write it back into a store that forgot.

The *amnesia exception*: two hosts whose leases hold may run different worlds if the store forgot
everything between a naming of the one world and a later naming of the other, and the listing that
the namer of the other had last read did not show that the one's host runs: it had no record of the
host, or, being stale, one from before the host confirmed. Participants write their records back
within an interval, so that only a round that completes sooner than that, or than the staleness, can
be the second; and the run must still end in one world within the bound.

A launcher that gives up a join early, and starts another node in its place, is one of the faults
and ends with them: where a run needs all its nodes, and each is away now and then, there may be no
moment at which all are there.

A store that is swept after closing, so that the run's id is used again, counts as one that forgot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rdzv_plugins.decisions import Rules
from rdzv_plugins.documents import Cause, NodeRecord, Phase, RoundDocument, Wants

__all__ = ["INVARIANTS", "Checker", "Evidence", "InvariantError", "Track", "show"]

INVARIANTS = {
    "one world": "hosts whose leases hold all run the same world (amnesia exception above)",
    "agreement": "all hosts that are given a round hold the same participants, in the same rank "
    "order, and the same address of rank 0; it stood in the store as running",
    "ranks": "participants differ from one another, and whoever is given a round is among them",
    "size": "a round has at least the minimum and at most the maximum of nodes, fewer than the "
    "maximum only after the last call, and only nodes with the run's own --nnodes",
    "confirmed": "a round runs only after each participant's record has said that it has seen it, "
    "and with the address that rank 0 opened for it",
    "missed": "a host that confirmed a round asks for no other, once another host was given that "
    "round and while it runs it, unless its lease ran out, the store forgot, or another world runs "
    "too (amnesia exception above): torch's agents, once released, wait for each other",
    "readable": "what is written as the round document can be read as one",
    "rounds of a node": "a node is given rounds of growing numbers, and named only in rounds above "
    "the last one that its listed record tells of",
    "rounds of a run": "the document only moves forward in round and phase; a store that forgot "
    "is the only way back",
    "evidence": "nobody is declared lost whose beats reached the store within a lease of the "
    "deciding node's clock, counted from the latest of: the last new beat, the decider's last "
    "failed request, the end of a stall of more than two intervals, its taking the lead",
    "closed": "the document of a closed run is never replaced (a store that forgot has none)",
    "join ends": "an agent's call ends in a round, or with a reason",
    "rests": "no host makes more than 2,000 requests in a second, or decides for ever without one",
    "gets going": "after the faults stop every live host is in one world or a spare within a "
    "bounded time, and then nothing changes any more",
}

World: TypeAlias = tuple[int, tuple[str, ...]]

_ROUNDING = 1e-6


class InvariantError(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        assert invariant in INVARIANTS
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


@dataclass(slots=True)
class Evidence:
    """What a host may judge others by.

    Attributes:
        disturbed: when all of it last became void.
        leads_since, leads_after: when it last took the lead, and from whom.
        read: when the record that it last read of each node stood in the store.
        seen: the records that it last read.
    """

    disturbed: float = 0.0
    leads_since: float = 0.0
    leads_after: str | None = None
    read: dict[str, float] = field(default_factory=dict)
    seen: Mapping[str, NodeRecord] = field(default_factory=dict)

    def copy(self) -> Evidence:
        return replace(self, read=dict(self.read))


@dataclass(slots=True)
class Track:
    """What the checker knows of one host.

    Attributes:
        rate: the fastest that its clock has been.
        nodes: its ``--nnodes``.
        beats, arrivals: the beats that reached the store, when each was new.
        confirmed: namings that its record has confirmed, with the first record that did.
        awaits: the naming that it confirmed last, until it is given that round or gives up.
    """

    rate: float
    nodes: tuple[int, int]
    evidence: Evidence = field(default_factory=Evidence)
    beats: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    confirmed: dict[str, NodeRecord] = field(default_factory=dict)
    awaits: tuple[str, int] | None = None
    last_round: int = -1
    world: World | None = None
    lease_lost: bool = False


@dataclass(slots=True)
class _Named:
    """How a world came into the store; ``epoch`` grows each time that the store forgets.

    ``listed`` has the beats of the records that its namer had read.
    """

    epoch: int
    listed: Mapping[str, int]


class Checker:
    """Told of each step; raises `InvariantError`."""

    def __init__(
        self, now: Callable[[], float], rules: Rules, fastest: float, staleness: float
    ) -> None:
        self._now = now
        self._lease = rules.lease
        self._last_call = rules.last_call
        self._shortest = rules.lease / fastest - staleness
        self._staleness = staleness
        self._tracks: dict[str, Track] = {}
        self._named: dict[World, list[_Named]] = {}
        self._ran: dict[World, RoundDocument] = {}
        self._stood: set[RoundDocument] = set()
        self._forming: dict[int, float] = {}
        self.excused = 0
        """Pairs of hosts that the amnesia exception let run different worlds."""
        self.checks = 0

    def host(self, node: str, rate: float, rules: Rules) -> Track:
        track = self._tracks[node] = Track(rate, (rules.min_nodes, rules.max_nodes))
        return track

    def beat_arrived(self, node: str, record: NodeRecord, epoch: int) -> None:
        track, now = self._tracks[node], self._now()
        late = bool(track.beats) and record.beat <= track.beats[-1]
        if not late:
            self._judge_lease(track)
            track.beats.append(record.beat)
            track.arrivals.append(now)
            if track.awaits is not None and record.wants in (Wants.JOIN, Wants.SPARE):
                self._judge_missed(node, track, epoch)
        if record.wants is Wants.RUN and record.naming and record.naming not in track.confirmed:
            track.confirmed[record.naming] = record
            track.lease_lost = late
            track.awaits = record.naming, epoch

    def stopped(self, node: str) -> None:
        """Its workers have stopped, or its agent gave up."""
        self._tracks[node].world = self._tracks[node].awaits = None

    def given(self, node: str, document: RoundDocument) -> None:
        """The node's agent got its round."""
        self.checks += 1
        track = self._tracks[node]
        people = document.participants
        if len(set(people)) != len(people) or node not in people:
            raise InvariantError("ranks", f"{node} was given {show(document)}")
        if document.round <= track.last_round:
            raise InvariantError(
                "rounds of a node", f"{node} got round {document.round} after {track.last_round}"
            )
        if track.nodes != (document.min_nodes, document.max_nodes):
            raise InvariantError("size", f"{node} of --nnodes {track.nodes} got {show(document)}")
        world = document.round, people
        stood = self._ran.get(world)
        if stood is None or stood.master != document.master:
            raise InvariantError(
                "agreement", f"{node} was given {show(document)}, nobody wrote that"
            )
        track.last_round = document.round
        track.world, track.awaits = world, None
        self._judge_lease(track)
        for other, theirs in self._tracks.items():
            if theirs.world is None or theirs.world == world:
                continue
            self._judge_lease(theirs)
            if theirs.lease_lost or track.lease_lost:
                continue
            if not self._is_excused(node, track, other, theirs):
                raise InvariantError(
                    "one world",
                    f"{node} was given {_show_world(world)} while {other} runs "
                    f"{_show_world(theirs.world)}, and the leases of both hold",
                )

    def wrote(
        self,
        node: str,
        before: RoundDocument | None,
        after: RoundDocument,
        evidence: Evidence,
        epoch: int,
    ) -> None:
        """A compare-and-set of the document was done; the node may not know it yet."""
        self.checks += 1
        if before is not None:
            if before.phase is Phase.CLOSED:
                raise InvariantError("closed", f"{node} wrote {show(after)} over a closed run")
            if after.place < before.place:
                raise InvariantError("rounds of a run", f"{show(before)} became {show(after)}")
        track = self._tracks[node]
        if after.leader == node and (before is None or before.leader != node):
            track.evidence.leads_since = self._now()
            track.evidence.leads_after = before.leader if before else None
            if before is not None:
                # What it does to its predecessor rests on the window from before it led.
                evidence.leads_after = before.leader
        image = replace(after, leader=None, waiting=0, cause=Cause())
        # Else it was written back after an amnesia, or only its leader changed.
        is_new = image not in self._stood
        if is_new and before is not None and after.phase is not Phase.CLOSED:
            for lost in _declared_lost(before, after, evidence.seen):
                self._judge_evidence(node, track, evidence, lost, after)
        self._stood.add(image)
        if after.phase is Phase.FORMING:
            self._forming.setdefault(after.round, self._now())
        world = after.round, after.participants
        if after.phase in (Phase.CONFIRMING, Phase.RUNNING) and (
            before is None or (before.round, before.participants) != world
        ):
            naming = _Named(epoch, {node: it.beat for node, it in evidence.seen.items()})
            self._named.setdefault(world, []).append(naming)
        if is_new and after.phase is Phase.CONFIRMING:
            if not after.min_nodes <= len(after.participants) <= after.max_nodes:
                raise InvariantError("size", show(after))
            for person in after.participants:
                listed = evidence.seen.get(person)
                # A leader may know more of itself than it listed.
                if listed and person != node and listed.round >= after.round:
                    raise InvariantError(
                        "rounds of a node", f"{person} of round {listed.round} in {show(after)}"
                    )
            formed = self._now() - self._forming.get(after.round, 0.0)
            if (
                before is not None
                and before.phase is Phase.FORMING
                and before.round == after.round
                and len(after.participants) < after.max_nodes
                and formed < self._last_call / track.rate - _ROUNDING
            ):
                raise InvariantError(
                    "size", f"after {formed:.3f} s without a last call, {show(after)}"
                )
        if after.phase is Phase.RUNNING:
            self._check_running(before, after)

    def _check_running(self, before: RoundDocument | None, after: RoundDocument) -> None:
        world = after.round, after.participants
        if before is None or before.phase is not Phase.RUNNING or before.round != after.round:
            for person in after.participants:
                if after.naming not in self._tracks[person].confirmed:
                    raise InvariantError("confirmed", f"{person} never saw {show(after)}")
            first = self._tracks[after.participants[0]]
            if after.master is None or first.confirmed[after.naming].master != after.master:
                raise InvariantError(
                    "confirmed", f"{after.master} is not the master of {show(after)}"
                )
        elif (before.participants, before.master) != (after.participants, after.master):
            raise InvariantError("agreement", f"{show(before)} became {show(after)}")
        self._ran.setdefault(world, after)

    def _judge_lease(self, track: Track) -> None:
        last = track.arrivals[-1] if track.arrivals else self._now()
        if self._now() - last >= self._shortest - _ROUNDING:
            track.lease_lost = True

    def _judge_missed(self, node: str, track: Track, epoch: int) -> None:
        assert track.awaits is not None
        naming, confirmed_in = track.awaits
        track.awaits = None
        if track.lease_lost or epoch != confirmed_in:
            return
        self.checks += 1
        waits = None
        for other, theirs in self._tracks.items():
            if theirs.world is None:
                continue
            self._judge_lease(theirs)
            if self._ran[theirs.world].naming == naming:
                waits = other
            elif not theirs.lease_lost:
                return  # Two worlds at once: `given` has judged that pair.
        if waits:
            raise InvariantError(
                "missed", f"{node} asks for another round than {naming}, which {waits} runs"
            )

    def _is_excused(self, node: str, mine: Track, other: str, theirs: Track) -> bool:
        assert mine.world is not None
        assert theirs.world is not None
        excused = self._forgot(node, mine.world, theirs.world) or self._forgot(
            other, theirs.world, mine.world
        )
        self.excused += excused
        return excused

    def _forgot(self, host: str, world: World, other: World) -> bool:
        """Whether ``other`` was named in ignorance of the ``host`` of ``world``."""
        first = self._named[world][0]
        told = self._tracks[host].confirmed[self._ran[world].naming].beat
        return any(
            later.epoch > first.epoch and later.listed.get(host, told - 1) < told
            for later in self._named[other]
        )

    def _judge_evidence(
        self, decider: str, track: Track, evidence: Evidence, lost: str, after: RoundDocument
    ) -> None:
        if lost == decider:
            return
        self.checks += 1
        theirs = self._tracks.get(lost)
        read = evidence.read.get(lost)
        if theirs is None or read is None:
            raise InvariantError(
                "evidence", f"{decider} never looked at {lost}, lost in {show(after)}"
            )
        known = bisect_right(theirs.arrivals, read - self._staleness)
        since = max(theirs.arrivals[known - 1] if known else 0.0, evidence.disturbed)
        if lost != evidence.leads_after:
            since = max(since, evidence.leads_since)
        least = self._lease / track.rate - self._staleness
        if read - since < least - _ROUNDING:
            raise InvariantError(
                "evidence",
                f"{decider} declared {lost} lost in {show(after)}; its silence was "
                f"{read - since:.3f} s at {read:.3f}, a lease of {decider} is {least:.3f} s",
            )


def _declared_lost(
    before: RoundDocument, after: RoundDocument, seen: Mapping[str, NodeRecord]
) -> list[str]:
    """Nodes that this write leaves out because they are silent; not those that left or rejoined."""
    if after.round > before.round:
        out = {*before.participants, *before.previous} - {*after.previous, *before.lost}
    elif after.phase is Phase.CONFIRMING and before.phase is Phase.FORMING:
        out = {
            node
            for node in before.previous
            if (record := seen.get(node)) is None
            or record.wants is Wants.RUN
            or (record.wants is not Wants.LEFT and record.round < before.round - 1)
        }
    else:
        out = {*before.previous} - {*after.previous, *after.participants}
        out |= {*after.lost} - {*before.lost}
    return sorted(
        node for node in out if (record := seen.get(node)) is None or record.wants != Wants.LEFT
    )


def show(document: RoundDocument) -> str:
    people = " ".join(document.participants) or "previous " + " ".join(document.previous)
    lost = f" lost {' '.join(document.lost)}" if document.lost else ""
    return f"round {document.round} {document.phase.value} of {document.leader} [{people}]{lost}"


def _show_world(world: World) -> str:
    return f"round {world[0]} [{' '.join(world[1])}]"
