"""Invariants of the protocol, checked at every step against the contents of the store.

A *world* is one round as its participants were named: the incarnation, the round number, and the
participants in rank order. A host *runs* a world from the moment when its agent gets the round
until its workers have stopped or succeeded. A host that stalls, or whose agent hangs, still runs
its world.

The *lease* of a host in a world is valid while its heartbeats keep reaching the store: no gap
between two new heartbeats reaches ``lease / fastest clock rate`` (minus the staleness of listings,
if the seed has stale listings). An expired lease does not become valid again in that world: the
other nodes have replaced the host, and it keeps running until it learns of this. The same applies
to an *evicted* host, whose agent did not ask for the next round in time.

Each write that puts a world into the store *names* the world: the write that assigns the ranks, and
each write that restores the document after the store lost it.

The store *loses* data when it restarts empty, when it fails over to a replica that lacks the last
seconds, or when the document is damaged. Expiry is not a loss.

The *amnesia exception*: two hosts with valid leases may run different worlds under two conditions.
First, the store lost data between a naming of the one world and a later naming of the other.
Second, the last listing of the node that named the other world did not show that the host runs the
one: it had no record of the host, or it was stale and had a record from before the host confirmed.
Participants restore their records within an interval, so the second world can only be a round that
completes sooner than that (or sooner than the staleness). The run must still end in one world
within the bound.

A run is *finished* when its document was closed. Hosts that continue a finished run, because it was
not closed as failed, violate nothing. They do not belong to a later run of that id.

A host *leads* a run, for the check of its keys, if it leads when the run has settled and its
listings do not fail. A leader that is killed earlier may not have set the deadline of the keys:
then they stay until the id is used again. In that case the simulator starts a next run with as many
nodes as a round needs; the next run succeeds and is swept. If the next run is refused because the
last run was closed, it is started again after the sweep.

A launcher that gives up a join early, and starts another node instead, is one of the faults and
stops with them: if a run needs all its nodes, and each node is absent from time to time, there may
be no moment at which all nodes are present.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rdzv_plugins.protocol.documents import (
    Cause,
    Dials,
    Exclusion,
    Faults,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.rules import Rules
from tests import replace

from .places import are_contiguous, largest, most
from .plan import EPOCH, SKEW, SLOWEST

__all__ = ["INVARIANTS", "Checker", "Evidence", "InvariantError", "Track", "show", "world_of"]

INVARIANTS = {
    "one world": "all hosts with a valid lease run the same world (amnesia exception: see above)",
    "agreement": "all hosts that get a round get the same participants in the same rank order, "
    "and the same address of rank 0; the store held this round as running",
    "fresh MASTER": "a round that is named tells its rank 0 which MASTER was the last",
    "ranks": "the participants of a round are distinct, and each host that gets the round is one "
    "of them",
    "size": "a round has at least the minimum and at most the maximum of nodes, fewer than the "
    "maximum only after the last call, and only nodes with the run's own --nnodes",
    "confirmed": "a round runs only after the record of each participant has confirmed it, and "
    "with the address that rank 0 opened for it",
    "missed": "a host that confirmed a round asks for no other round while another host runs the "
    "confirmed one, because torch's agents wait for each other after their release; exceptions: "
    "its lease expired, the store lost data, its agent gave up, or another world runs too "
    "(amnesia exception: see above)",
    "readable": "each value written as the round document can be decoded",
    "rounds of a node": "in each incarnation, a node gets rounds with increasing numbers; a "
    "leader names a node only in rounds above the last round in the listed record of the node",
    "rounds of a run": "the document of an incarnation only moves forward in round and phase, "
    "unless the store lost data",
    "incarnations": "a document is replaced by one of another incarnation in two cases only: it "
    "is closed, and the other incarnation is not new; or all its nodes have left or been silent "
    "for a lease, and the other incarnation has other --nnodes",
    "evidence": "a node is declared lost only if no heartbeat of it reached the store for its "
    "lease, on the deciding node's clock; the time counts from the latest of: its last new "
    "heartbeat (or the first read that found no record of it, if that was earlier, unless none "
    "came between the last document written in its name and that read), the last document written "
    "in its name, the end of an outage of the deciding node (no request answered "
    "for more than an interval and more than a third of its lease, or one only then; then one "
    "more lease is added), the end of a stall that is surely longer than that, and the moment when "
    "the deciding node took the lead; a done node is not declared lost or left; after a listing "
    "showed a node as left or done, an older record does not make it awaited or counted again; a "
    "node is evicted at the earliest after a tenth of `rejoin_timeout`",
    "accused": "no node that lives, takes part and reaches the store is lost by an accusation: its "
    "join has not failed, it has not "
    "stood still, no request of it has failed, none takes a quarter of a second, and the store "
    "has lost nothing, since a document first named it",
    "at once": "where nothing else fails, a participant whose process dies a second after its "
    "round began or later is out of the document within twice the time for an answer, and forty "
    "times the longest time of a request besides",
    "doubt": "a leader that sees more than a third of the world, and at least eight nodes, late at "
    "once declares none of them lost that was silent for hardly more than its lease, unless"
    " it took the lead from a silent node, or the store was away, since that node's last "
    "heartbeat",
    "two leases": "where nothing else fails, participants that crash all at once are out of the "
    "document within two leases and three intervals, on the slowest clock, and one round later at "
    "most",
    "causes": "the cause of a running round names each participant of the last round that is "
    "missing, as lost, left, evicted, left over, drained, excluded or one of two between which no "
    "data passed; exceptions: the node is done, or the store lost data",
    "unit": "a round has a multiple of `node_unit` nodes",
    "segment": "a round has a multiple of `segment` nodes of each domain, and none without one",
    "undisturbed": "where `node_unit` or `segment` is set, newcomers alone end a round only if "
    "the nodes that the leader has listed could be in a larger one",
    "places": "with `rank_order=topology` the nodes of a domain are contiguous at each level, and "
    "those of the last round are in the same order within it, except for rank 0; where a domain "
    "has as many nodes as before, each has its place, as far as the leader has listed theirs",
    "health": "a node whose check failed is given no round, names itself in none, and each record "
    "that it writes until its check has passed says that it asks for no round, and why; no other "
    "record says so; a leader whose listing showed that does not name the node, does not evict "
    "it as one that was waited for, and does not list the nodes five times more while its round "
    "waits for it, unless a request failed or the store was away",
    "orders": "an order from people changes nothing of the document but the orders in it; an order "
    "to restart is carried out, unless a participant is done",
    "drained": "no round is named, or begins to run, that has a node which was drained in the "
    "document that it was decided on, or ever in that incarnation, unless the store lost data",
    "excluded": "no round is named, or begins to run, that has a node of a host which was excluded "
    "in the document that it was decided on, where the exclusion had not ended on any clock; nor "
    "does a run stand still with one that was excluded before it was founded, unless the store "
    "lost data, or the exclusions could not be read for a lease",
    "quarantine": "a host is put into quarantine only if the causes of `quarantine_after` rounds "
    "within `quarantine_window`, the one that forms among them, name a node of it as lost or "
    "failed (by default: of three, as lost or left), and for no longer than the window; a round "
    "that could have the minimum of nodes with those in quarantine does form (see: gets going)",
    "network": "with `network_check`, no round begins to run in which a node that knows rank 0 has "
    "not reached it, or in which a participant failed with two others since one last ran; the same "
    "nodes are paired differently in the next round; only who failed with two others is told to be "
    "unfit, and is named again only after its agent has heard; a rank 0 that nobody reached is not "
    "rank 0 of the next round, unless no other can be; no running round is ended for nodes alone "
    "that were cut off, and none that forms after one that did not run has one of them, if the "
    "others are enough; without it nobody dials, and the document says nothing of links",
    "done": "newcomers restart no round in which a participant is done, as far as the leader's "
    "listing showed it",
    "closed": "the document of a closed run is overwritten only by the same document with "
    "`expires`, or by nodes of a run that is not closed",
    "two worlds": "the workers of a host are told to stop within two polls of its agent once the "
    "store has accepted no heartbeat of it for its lease and has refused it an interval ago, where "
    "nodes have links only once it can know that the store accepts another node of its round, and "
    "never while it refuses all of a run; "
    "with `on_outage=stop` once none was accepted for `outage_limit`, and in any case once it has "
    "read that a later round of its run ran without it; for the first two reasons none is told so "
    "sooner, and none whose run was closed; so two worlds are there for no longer than "
    "the store is silent to a host after its lease, or not at all after `outage_limit`",
    "fencing": "the fencing token of a round that a host gets is larger than that of each earlier "
    "round of its incarnation, and than that of each round of any incarnation that was named "
    "before, by more than the clocks of hosts differ; the latter alone where the store lost data",
    "pace": "a running round that ends for newcomers alone has run for `min_uptime`, and for the "
    "last call unless they fill it or a worker named the moment; `resize_interval` has passed "
    "since the last round with newcomers was named; and `grow` allows it (`checkpoint`: a worker's "
    "record has named the moment, or the round has saved)",
    "one checkpoint": "if one worker of a round saves at a step, every worker that passes the step "
    "saves there; no worker waits at a step once the run stands still",
    "hang": "a round ends for a hang only if a worker of the node that it names has done no step "
    "for `step_timeout`; no worker hangs once the run stands still",
    "progress": "a run is closed for want of progress only after `no_progress_rounds` rounds in a "
    "row ran for less than `no_progress_uptime` and did not end for newcomers, unless the store "
    "lost data",
    "members close": "a node that closes a run leads it, or was named in its last round and got a "
    "round of the same incarnation, or was in the round before the one that forms",
    "goes on": "nobody ends what others can go on with: a node whose agent fails, or whose workers "
    "fail while it is new to the run, closes the run as failed only if those that work or wait, as "
    "far as it has read, are too few for a round without it; for a new node those do not count "
    "that came with it or since, and of a round in shards only its participants do; it leaves only "
    "if those that work or wait, as far as it has read since it said so, are enough; of nodes that "
    "fail together once the faults have stopped, the last ones close the run if the others are too "
    "few; under torchrun a new node does not leave for the failure of workers that follows the "
    "loss of another, if neither it nor the leader had trouble since",
    "finished": "nothing is written for a run that is closed or has a tombstone, unless the store "
    "lost data, or the writer looked for the tombstone before the run was closed, or the node that "
    "closed it died, or was cut off from the store, before it left one and the run's keys have "
    "expired since",
    "join ends": "each call of an agent ends with a round or with a reason",
    "rests": "no host makes more than 2,000 requests per second, or decides forever without a "
    "request, or asks again for the same tombstone within `closed_ttl`, without having read "
    "another document since the answer, or lists the nodes again and again within an interval, "
    "though nothing is new (20 times, and twice for each host), or repeats what it does beside the "
    "store or says without having asked the store, waited, or heard anything new, or tries to open "
    "a TCPStore for one round more than 6 times in a second",
    "gets going": "after the faults stop, every live host is in one world or a spare within a "
    "bounded time, if there are enough hosts; otherwise its join has ended, and nobody waits for "
    "a round that has lost all its nodes; no leader is dead or has failing listings; afterwards "
    "nothing changes any more",
    "all end": "once all workers of a run have succeeded, or the workers of one host have failed "
    "permanently, all its agents, including those of spares, have ended within a lease and 10 "
    "intervals; the run is closed or deleted, or was closed before the store lost the closing",
    "keys end": "after all hosts are gone, the keys of a run expire if a node led it, or if it was "
    "closed and the node that closed it lived to set their end; the next run of the id sweeps all "
    "other keys, unless the document was damaged and no live node has read another one; a node "
    "that knows that its run has ended has no record in the store after the sweep, unless a write "
    "that it had given up arrived later",
}

World: TypeAlias = tuple[str, int, tuple[str, ...]]

_ROUNDING = 1e-6

# The most newcomers that a document names.
_MOST_NAMED = 16

# A leader may have something else to do before it decides about its round, but not so often.
_DECISIONS = 5


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
        outage: when it last became void because the store had been away.
        known: whom it had looked at before that, and their beats.
        leads_since, leads_after: when it last took the lead, and from whom.
        read: when the record that it last read of each node stood in the store.
        seen: the records that it last read.
        listed: those of the nodes in its last listing; none goes back to an older one.
        asked: when it last looked whether an incarnation has a tombstone.
        heard: when it last read another document that a node leads, who alone writes in its name.
        missing: since when it has found no record of a node.
        looked: when it asked for its last listing.
        changed: when it was told of the beat that it last listed of each node.
        troubled: when a request of it last failed, or was answered after one had failed.
    """

    disturbed: float = 0.0
    outage: float = 0.0
    known: Mapping[str, int] = field(default_factory=dict)
    leads_since: float = 0.0
    leads_after: str | None = None
    read: dict[str, float] = field(default_factory=dict)
    seen: Mapping[str, NodeRecord] = field(default_factory=dict)
    listed: Mapping[str, NodeRecord] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)
    missing: Mapping[str, float] = field(default_factory=dict)
    looked: float = 0.0
    changed: Mapping[str, float] = field(default_factory=dict)
    troubled: float = 0.0

    def copy(self) -> Evidence:
        return replace(self, read=dict(self.read), asked=dict(self.asked), heard=dict(self.heard))


@dataclass(frozen=True, slots=True)
class _HeldUp:
    """A leader's round waits for nodes that are unfit, and it has listed them so many times."""

    document: RoundDocument
    since: float
    listings: int = 1


@dataclass(slots=True)
class Track:
    """What the checker knows of one host.

    Attributes:
        label: what people call it.
        address: of its host.
        rate: the fastest that its clock has been.
        nodes: its ``--nnodes``.
        lease: its own.
        domain: where it is.
        beats, arrivals: the beats that reached the store, when each was new.
        standing: of these arrivals, those that the store has not lost since.
        shown: of the last two of these, those that were not hidden since by an older write.
        confirmed: namings that its record has confirmed, with the first record that did.
        masters: of those, each address that it opened as rank 0; a store that forgot may see the
            same round confirmed twice.
        awaits: the naming that it confirmed last, until it is given that round or gives up.
        stopped_at: its beat when its workers stopped last, or its agent gave up.
        last_rounds: the last round that it was given, by incarnation.
        member: the incarnation in which it was last given a round.
        came: the round of that incarnation that it was given first, if it was new there.
        newcomers: the labels of those that were new in a round that it was given there.
        unnamed: whether more were than the documents, or the node itself, name.
        done: namings of rounds in which its workers succeeded, as its record says, and the epoch.
        evicted: this round of an incarnation goes on without it, and was not to wait for it.
        named_moment: when its workers last said that newcomers may come.
        unfit_after, fit_after: its beats when its check failed first and when it passed again; what
            it wrote in between says that it is unfit. None: it is fit.
        gave_up: it hears that the run is closed, and says that it leaves.
        checks: it checks its network.
        out_at: its beat when it was last told to be unfit.
        held_up: unfit nodes for which its round waits, since it leads.
    """

    label: str
    address: str
    rate: float
    nodes: tuple[int, int]
    lease: float
    domain: str | None = None
    evidence: Evidence = field(default_factory=Evidence)
    beats: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    standing: list[float] = field(default_factory=list)
    shown: list[float] = field(default_factory=list)
    confirmed: dict[str, NodeRecord] = field(default_factory=dict)
    masters: dict[str, set[str | None]] = field(default_factory=dict)
    awaits: tuple[str, int] | None = None
    stopped_at: int = -1
    last_rounds: dict[str, int] = field(default_factory=dict)
    member: str | None = None
    came: int | None = None
    newcomers: set[str] = field(default_factory=set)
    unnamed: bool = False
    done: dict[str, int] = field(default_factory=dict)
    world: World | None = None
    lease_lost: bool = False
    evicted: tuple[str, int] | None = None
    named_moment: float = -1.0
    unfit_after: list[int] = field(default_factory=list)
    fit_after: list[int] = field(default_factory=list)
    gave_up: bool = False
    checks: bool = False
    out_at: int = -1
    held_up: _HeldUp | None = None

    @property
    def is_unfit(self) -> bool:
        return len(self.unfit_after) > len(self.fit_after)

    def was_unfit(self, beat: int) -> bool:
        """Whether it wrote this beat while it was unfit."""
        return bisect_left(self.unfit_after, beat) > bisect_left(self.fit_after, beat)


@dataclass(slots=True)
class _Named:
    """How a world came into the store; ``epoch`` grows each time that the store loses something.

    ``listed`` has the beats of the records that its namer had read.
    """

    epoch: int
    listed: Mapping[str, int]


@dataclass(slots=True)
class _Ended:
    """When a run was closed, and how.

    ``orphaned``: a node that closed it died before it left a tombstone, or could not leave it.
    """

    at: float
    epoch: int
    outcome: Outcome
    orphaned: bool = False


class Checker:
    """Told of each step; raises `InvariantError`."""

    def __init__(
        self,
        now: Callable[[], float],
        rules: Rules,
        fastest: float,
        staleness: float,
        shortest_lease: float,
        steady: bool = True,
    ) -> None:
        self._now = now
        self._rules = rules
        # The lease of a node that has no record in a store that forgot it is not known.
        self._shortest = shortest_lease / fastest - staleness
        self._staleness = staleness
        # No clock changes its rate.
        self._steady = steady
        self._tracks: dict[str, Track] = {}
        self._named: dict[World, list[_Named]] = {}
        self._ran: dict[World, RoundDocument] = {}
        self._given: set[World] = set()
        self._last_ran: dict[str, tuple[RoundDocument, int]] = {}
        self._stood: set[RoundDocument] = set()
        self._forming: dict[tuple[str, int], float] = {}
        self._ended: dict[str, _Ended] = {}
        # When each world was first written as running, and the last one with newcomers was named.
        self._running: dict[World, float] = {}
        self._grew: dict[tuple[str, int], float] = {}
        # How long the rounds of each incarnation ran, but for those that ended for newcomers.
        self._uptimes: dict[str, list[tuple[float, int]]] = {}
        # Which node was drained in an incarnation, and in which epoch.
        self._drained: dict[tuple[str, str], int] = {}
        # When each world was named first and last, in which epoch, and the tokens that hosts got.
        self._namings: dict[World, tuple[float, float, int]] = {}
        self._tokens: dict[World, int] = {}
        self._ever_drained: set[str] = set()
        self._founded: dict[str, float] = {}
        self._blamed: dict[tuple[str, str], list[float]] = {}
        # By round: each dial (from, to, with data), and whether one has passed.
        self._dials: dict[World, dict[tuple[str, str, bool], bool]] = {}
        # By node: whom it dialled last.
        self._partners: dict[str, tuple[World, str]] = {}
        # What nodes found in a round of a world_id; since a round last ran, who could not exchange
        # data with whom it dialled, and in which epoch that is known.
        self._dials_by_round: dict[str, dict[str, Dials]] = {}
        self._vain: dict[str, tuple[int, set[tuple[str, str]]]] = {}
        # Pairs whose records name a failed dial.
        self._failing: set[tuple[str, str]] = set()
        # By round: rank 0 of the round before, if no dial reached it, and the epoch of that.
        self._unreached: dict[tuple[str, int], tuple[str, int]] = {}
        self.excused = 0
        """Pairs of hosts that the amnesia exception let run different worlds."""
        self.checks = 0

    def host(
        self,
        node: str,
        label: str,
        address: str,
        rate: float,
        rules: Rules,
        domain: str | None = None,
    ) -> Track:
        nodes = rules.min_nodes, rules.max_nodes
        track = self._tracks[node] = Track(label, address, rate, nodes, rules.lease, domain)
        track.checks = rules.network_check
        return track

    def dialled(
        self, node: str, document: RoundDocument, peer: str, exchanges: bool, passed: bool
    ) -> None:
        """A node has dialled another in the round that it confirms."""
        self.checks += 1
        dials = self._dials.setdefault(world_of(document), {})
        dials[node, peer, exchanges] = passed or dials.get((node, peer, exchanges), False)
        if not exchanges or not 2 < document.size <= self._rules.inline:
            return
        last = self._partners.get(node)
        self._partners[node] = world_of(document), peer
        if last == ((document.incarnation, document.round - 1, document.participants), peer):
            raise InvariantError("network", f"{node} dials {peer} once more in {show(document)}")

    def _judge_network(
        self,
        node: str,
        before: RoundDocument,
        after: RoundDocument,
        epoch: int,
    ) -> None:
        """What a leader made of what the nodes had found."""
        if not self._rules.network_check and after.faults != Faults():
            raise InvariantError("network", f"{node} wrote {after}")
        if not self._tracks[node].checks:
            return
        dials, first = self._dials.get(world_of(before), {}), (*before.participants, "")[0]
        confirms = before.phase is Phase.CONFIRMING
        judged = after.faults.rounds > before.faults.rounds
        if confirms and (after.phase is Phase.RUNNING or judged):
            self._note_vain(node, before, after, epoch)
        if confirms and after.phase is Phase.RUNNING:
            self._judge_links(node, after, dials)
        if confirms and after.phase is Phase.FORMING and after.faults.rounds > before.faults.rounds:
            self.checks += 1
            for person, _ in after.faults.out:
                self._tracks[person].out_at = self._tracks[person].beats[-1]
                # One failure more is enough for who was at fault before, in another run too.
                if len({other for one, other in self._failing if one == person}) < 2:
                    raise InvariantError("network", f"{person} is out in {show(after)}")
            out = {person for person, _ in after.faults.out}
            tried = [ok for (one, peer, data), ok in dials.items()
                     if peer == first and not data and one not in out]  # fmt: skip
            if tried and not any(tried) and first not in out:
                self._unreached[after.incarnation, after.round] = first, epoch
        if after.phase is Phase.CONFIRMING and before.phase is Phase.FORMING:
            for person in after.participants:
                track = self._tracks[person]
                if person in dict(before.faults.out) and track.stopped_at < track.out_at:
                    raise InvariantError("network", f"{person}, who is out, is in {show(after)}")
            first = after.participants[0]
            could = {*after.participants} - {*before.faults.not_to_host}
            if could and self._unreached.get((after.incarnation, after.round)) == (first, epoch):
                raise InvariantError("network", f"nobody reached {first}: {show(after)}")

    def _judge_suspects(
        self, before: RoundDocument, after: RoundDocument, evidence: Evidence
    ) -> None:
        """No round after one that did not run has a node that was cut off, if others are enough."""
        if after.phase is not Phase.CONFIRMING or not before.faults.rounds:
            return
        people = after.participants
        well = [it for it in people if (of := evidence.seen.get(it)) is None or not of.was_at_fault]
        enough = largest([self._tracks[it].domain for it in well], self._rules)
        if len(well) < len(people) and enough and before.phase is Phase.FORMING:
            raise InvariantError("network", f"{_names({*people} - {*well})} is in {show(after)}")

    def _note_vain(
        self, node: str, before: RoundDocument, after: RoundDocument, epoch: int
    ) -> None:
        """A node that fails with one after the other does not stay, though its dials may pass."""
        known, vain = self._vain.get(after.incarnation, (epoch, set()))
        found = self._dials_by_round.get(before.world_id, {})
        tried = {(it, of.partner): bool(of.why) for it, of in found.items() if of.partner}
        here = {*before.participants}
        vain = {pair for pair in vain if here.issuperset(pair) and known == epoch}
        vain = {pair for pair in vain if tried.get(pair, True)}
        vain |= {pair for pair, failed in tried.items() if failed and here.issuperset(pair)}
        now = {it for pair, failed in tried.items() if failed for it in pair}
        if after.phase is Phase.RUNNING:
            self.checks += 1
            for person in now:
                others = {it for pair in vain if person in pair for it in pair} - {person}
                if len(others) > 1:
                    raise InvariantError(
                        "network", f"{person} failed with {_names(others)}: {show(after)}"
                    )
            vain = set()
        out = {person for person, _ in after.faults.out}
        vain = {pair for pair in vain if out.isdisjoint(pair)}
        self._vain[after.incarnation] = epoch, vain

    def _judge_links(
        self, node: str, after: RoundDocument, dials: Mapping[tuple[str, str, bool], bool]
    ) -> None:
        self.checks += 1
        first = after.participants[0]
        if len(after.participants) <= self._rules.inline:
            for person in after.participants[1:]:
                if self._tracks[person].checks and not dials.get((person, first, False)):
                    raise InvariantError(
                        "network", f"{person} did not reach {first}: {show(after)}"
                    )
        failed = Counter[str]()
        links = {frozenset((one, other)) for (one, other, _), ok in dials.items() if not ok}
        for link in links:
            failed.update(link)
        if bad := [it for it, times in failed.items() if times > 1]:
            raise InvariantError("network", f"{node} lets {_names(bad)} run in {show(after)}")

    def ended(self, world: World) -> Outcome | None:
        """How the run of this world was closed; None: it was not."""
        ended = self._ended.get(world[0])
        return ended.outcome if ended else None

    def beat_arrived(self, node: str, record: NodeRecord, epoch: int) -> None:
        track, now = self._tracks[node], self._now()
        # The store may have lost the order since the node heard of it.
        drained = node in self._ever_drained
        gave_up = track.gave_up or (drained and record.status is Status.LEFT)
        fresh = record.beat > max(track.fit_after, default=-1)
        if record.unfit.startswith("network: ") and fresh:
            # Its node has heard so before its agent does, and may have said so twice.
            self.unfit(node, record.beat - 1)
            track.unfit_after[-1] = min(track.unfit_after[-1], record.beat - 1)
        if (found := record.dials) is not None:
            self._dials_by_round.setdefault(record.world_id or "", {})[node] = found
            named = (found.partner if found.why else "", found.first if found.unreached else "")
            self._failing |= {pair for it in named if it for pair in ((node, it), (it, node))}
        said = track.was_unfit(record.beat)
        # A record may be under way while its check passes.
        if record.is_unfit and not said:
            said = track.was_unfit(record.beat - 1)
        if record.is_unfit != said and not gave_up:
            raise InvariantError("health", f"{node} wrote {record}")
        late = bool(track.beats) and record.beat <= track.beats[-1]
        if not late:
            self._judge_lease(track)
            track.beats.append(record.beat)
            track.arrivals.append(now)
            track.standing.append(now)
            track.shown = [*track.shown[-1:], now]
            if track.awaits is not None and record.status in (Status.JOIN, Status.SPARE):
                self._judge_missed(node, track, epoch)
        else:
            # It hides the last beat, perhaps before anybody saw that.
            track.shown = track.shown[:1]
        if record.status is Status.DONE and record.world_id:
            track.done[record.world_id] = epoch
        if record.status is Status.RUN and record.world_id:
            track.masters.setdefault(record.world_id, set()).add(record.master)
            if record.world_id not in track.confirmed:
                track.confirmed[record.world_id] = record
                track.lease_lost = late
                if record.beat > track.stopped_at:
                    track.awaits = record.world_id, epoch

    def unfit(self, node: str, beat: int) -> None:
        """The node's check failed when it had written this beat."""
        track = self._tracks[node]
        if not track.is_unfit:
            track.unfit_after.append(beat)

    def fit(self, node: str, beat: int) -> None:
        """The node's check passed, and its agent asks for a round."""
        track = self._tracks[node]
        if track.is_unfit:
            track.fit_after.append(beat)

    def gave_up(self, node: str) -> None:
        """The node waits for its check no longer, since its run was closed."""
        self._tracks[node].gave_up = True

    def looked(self, node: str, document: RoundDocument) -> None:
        """A node listed all others, as far as its document is whole."""
        track, was = self._tracks[node], self._tracks[node].held_up
        track.held_up = None
        if document.leader != node or document.phase is not Phase.FORMING:
            return
        evidence = track.evidence
        waits = {it for it in {*document.previous} - {node} if _is_unfit(evidence, it)}
        if not waits:
            return
        trouble = max(evidence.troubled, evidence.disturbed, evidence.outage)
        # Not a document that is equal: another may have been written in between.
        if was is None or was.document is not document or trouble > was.since:
            track.held_up = _HeldUp(document, self._now())
            return
        self.checks += 1
        track.held_up = replace(was, listings=was.listings + 1)
        if was.listings >= _DECISIONS:
            raise InvariantError(
                "health", f"{show(document)} waits for {_names(waits)}, who is unfit"
            )

    def beats_lost(self, since: float) -> None:
        """The store lost what was written since then."""
        for track in self._tracks.values():
            del track.standing[bisect_left(track.standing, since) :]
            track.shown = track.standing[-1:] or track.arrivals[:1]

    def stopped(self, node: str, beat: int) -> None:
        """Its workers have stopped or succeeded, or its agent gave up.

        ``beat`` is of its last record: a rank that it confirms may still be on its way.
        """
        track = self._tracks[node]
        track.world = track.awaits = None
        track.stopped_at = beat

    def given(self, node: str, document: RoundDocument) -> None:
        """The node's agent got its round."""
        self.checks += 1
        track = self._tracks[node]
        people = document.participants
        if len(set(people)) != len(people) or node not in people:
            raise InvariantError("ranks", f"{node} was given {show(document)}")
        last = track.last_rounds.get(document.incarnation, -1)
        if document.round <= last:
            raise InvariantError("rounds of a node", f"{node} got {show(document)} after {last}")
        if track.is_unfit:
            raise InvariantError("health", f"{node} is unfit and was given {show(document)}")
        if track.nodes != (document.min_nodes, document.max_nodes):
            raise InvariantError("size", f"{node} of --nnodes {track.nodes} got {show(document)}")
        world = world_of(document)
        stood = self._ran.get(world)
        if stood is None or stood.master != document.master:
            raise InvariantError(
                "agreement", f"{node} was given {show(document)}, nobody wrote that"
            )
        self._judge_token(node, world, document)
        self._given.add(world)
        track.last_rounds[document.incarnation] = document.round
        if track.member != document.incarnation:
            joined = document.cause.joined
            is_new = document.round > 0 and (track.label in joined or joined.more > 0)
            track.came = document.round if is_new and joined.count < document.size else None
            track.newcomers, track.unnamed = set(), False
        track.newcomers |= {*document.cause.joined.first}
        track.unnamed |= document.cause.joined.more > 0 or len(track.newcomers) > _MOST_NAMED
        track.member = document.incarnation
        track.world, track.awaits = world, None
        incarnation, round_ = track.evicted or ("", 0)
        if incarnation != document.incarnation or round_ <= document.round:
            track.evicted = None  # It is in a later round, or in another run.
        self._judge_lease(track)
        for other, theirs in self._tracks.items():
            if theirs.world is None or theirs.world == world:
                continue
            self._judge_lease(theirs)
            if theirs.lease_lost or track.lease_lost or theirs.evicted:
                continue
            if theirs.world[0] in self._ended or world[0] in self._ended:
                continue  # One of the two is finished.
            if not self._is_excused(node, track, other, theirs):
                raise InvariantError(
                    "one world",
                    f"{node} was given {_show_world(world)} while {other} runs "
                    f"{_show_world(theirs.world)}, and the leases of both hold",
                )

    def _judge_token(self, node: str, world: World, document: RoundDocument) -> None:
        token, (named, _, epoch) = document.fencing_token, self._namings[world]
        for other, theirs in self._tokens.items():
            _, last, then = self._namings[other]
            earlier = other[0] == world[0] and other[1] < world[1] and then == epoch
            if (earlier or named - last > 2 * SKEW) and theirs >= token:
                raise InvariantError(
                    "fencing",
                    f"{node} was given {show(document)} with the token {token}, and "
                    f"{_show_world(other)} had {theirs}",
                )
        self._tokens[world] = max(token, self._tokens.get(world, 0))

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
        track = self._tracks[node]
        self._founded.setdefault(after.incarnation, self._now())
        if after.phase is Phase.CONFIRMING:
            world = world_of(after)
            first, _, since = self._namings.get(world, (self._now(), 0.0, epoch))
            self._namings[world] = first, self._now(), since
        if after.closed:
            self._judge_closing(node, track, before, after, epoch)
            self._stood.add(_image(after))
            return
        if (before is not None and before.closed) or not self._is_orphaned(after):
            self._judge_finished(node, evidence, after, epoch)
        if before is not None and not after.is_of(before):
            self._judge_incarnations(node, track, before, after, evidence)
            before = None
        if before is None:
            # Written back by who may have read it last before an order.
            self._drained = {it: epoch for it, epoch in self._drained.items()
                             if it[0] != after.incarnation or it[1] in after.drained}  # fmt: skip
        else:
            if before.closed:
                raise InvariantError("closed", f"{node} wrote {show(after)} over a closed run")
            if after.place < before.place:
                raise InvariantError("rounds of a run", f"{show(before)} became {show(after)}")
        image = _image(after)
        # Else it was written back after an amnesia, or only its leader changed.
        is_new = image not in self._stood
        if after.leader == node and (is_new if before is None else before.leader != node):
            track.evidence.leads_since = self._now()
            track.evidence.leads_after = before.leader if before else None
            if before is not None:
                # What it does to its predecessor rests on the window from before it led.
                evidence.leads_after = before.leader
        if is_new and before is not None:
            declared = set(_declared_lost(before, after, evidence.seen))
            for gone in {it.node for it in after.accused if it.lost} & declared:
                # `World` judges that.
                self._tracks[gone].lease_lost = True
                declared.discard(gone)
            for lost in sorted(declared):
                self._judge_evidence(node, track, evidence, lost, after)
            if before.leader == node:
                self._judge_doubt(node, track, evidence, declared, before, after)
            self._judge_pace(node, track, before, after, evidence, epoch)
            self._judge_evictions(node, track, before, after)
            self._judge_farewells(node, before, after, evidence)
            self._judge_done(node, before, after, evidence, epoch)
            self._judge_disturbance(node, before, after, evidence)
        if not is_new and before is not None and after.round > before.round:
            # A round that the store had lost comes back; its cause knows of none that ran since.
            self._last_ran.pop(after.incarnation, None)
        self._stood.add(image)
        if before is not None:
            self._judge_quarantine(node, before, after)
            self._judge_restart(node, before, after, evidence)
        if is_new and before is not None:
            self._judge_network(node, before, after, epoch)
            self._judge_suspects(before, after, evidence)
        if after.phase is Phase.RUNNING and (before is None or before.phase is not after.phase):
            self._blame(after)
        if after.phase is Phase.FORMING:
            self._forming.setdefault((after.incarnation, after.round), self._now())
        world = world_of(after)
        if after.phase in (Phase.CONFIRMING, Phase.RUNNING) and (
            before is None or world_of(before) != world
        ):
            world_id = _Named(epoch, {node: it.beat for node, it in evidence.seen.items()})
            self._named.setdefault(world, []).append(world_id)
        begins = after.phase is Phase.RUNNING and before and before.phase is Phase.CONFIRMING
        if is_new and before is not None and (after.phase is Phase.CONFIRMING or begins):
            self._judge_kept_out(node, before, after, epoch)
        if is_new and after.phase is Phase.CONFIRMING:
            if not after.min_nodes <= len(after.participants) <= after.max_nodes:
                raise InvariantError("size", show(after))
            self._judge_places(before, after, evidence)
            if before is not None and before.is_of(after) and before.master != after.master:
                raise InvariantError(
                    "fresh MASTER", f"rank 0 is not told of {before.master}: {show(after)}"
                )
            for person in after.participants:
                listed = evidence.seen.get(person)
                unfit = self._tracks[person].is_unfit
                sees = unfit if person == node else _is_unfit(evidence, person)
                if sees:
                    raise InvariantError("health", f"{person} is unfit in {show(after)}")
                # A leader may know more of itself than it listed.
                if (
                    listed
                    and person != node
                    and listed.incarnation == after.incarnation
                    and listed.round >= after.round
                ):
                    raise InvariantError(
                        "rounds of a node", f"{person} of round {listed.round} in {show(after)}"
                    )
            formed = self._now() - self._forming.get((after.incarnation, after.round), 0.0)
            if (
                before is not None
                and before.phase is Phase.FORMING
                and before.round == after.round
                and len(after.participants) < most(self._rules)
                and formed < self._last_call(before, after) / track.rate - _ROUNDING
            ):
                raise InvariantError(
                    "size", f"after {formed:.3f} s without a last call, {show(after)}"
                )
        if after.phase is Phase.RUNNING:
            self._check_running(before, after, epoch)

    def _last_call(self, before: RoundDocument, named: RoundDocument) -> float:
        """Seconds that a round waits for more nodes than the minimum."""
        rules, cause = self._rules, named.cause
        if named.round == 0:
            return rules.last_call_timeout
        gone = (before.cause.lost, before.cause.left, before.cause.evicted)
        if len(named.participants) >= len(before.previous) + sum(it.count for it in gone):
            return 0.0  # Each is replaced.
        if not (cause.lost or cause.left or cause.evicted):
            return 0.0
        return (
            rules.last_call_timeout
            if rules.replacement_timeout is None
            else rules.replacement_timeout
        )

    def _judge_pace(
        self,
        node: str,
        track: Track,
        before: RoundDocument,
        after: RoundDocument,
        evidence: Evidence,
        epoch: int,
    ) -> None:
        rules, now = self._rules, self._now()
        if after.phase is Phase.CONFIRMING and {*after.participants} - {*before.previous}:
            # A round that the store had lost may come back, beside another of its number.
            self._grew.setdefault((after.incarnation, after.round), now)
        if before.phase is not Phase.RUNNING or after.round == before.round:
            return
        began = self._running.get(world_of(before), 0.0)
        ran = now - began
        joined = after.cause.joined
        # A participant asks again without failed workers if the store forgot its round.
        again = any(self._tracks[person].label in joined for person in before.participants)
        if before.restart or after.cause.drained or after.cause.excluded:
            return  # People ended it.
        if again or after.cause != Cause(joined=joined):
            self._uptimes.setdefault(after.incarnation, []).append((ran, epoch))
            return
        if ran >= rules.no_progress_uptime / SLOWEST + _ROUNDING:
            self._uptimes.setdefault(after.incarnation, []).append((ran, epoch))
        if before.resize:
            return  # A person said so.
        if before.all_absent:
            return  # Nobody is there whom newcomers would disturb.
        suspects = {it.label for it in evidence.seen.values() if it.was_at_fault}
        alone = not joined.more and suspects.issuperset(joined.first)
        if alone and {*before.participants} - {*before.absent}:
            raise InvariantError("network", f"{node} wrote {show(after)} for {joined} alone")
        self.checks += 1
        saved = before.saving is not None and before.saving.saved
        named = (
            saved
            or track.named_moment > began
            or any(
                (record := evidence.seen.get(person)) is not None and record.may_grow
                for person in before.participants
            )
        )
        fills = after.waiters >= most(rules) - len(before.participants)
        grew = now - self._grew.get((before.incarnation, before.grew), 0.0)
        for least, passed, option in (
            (rules.min_uptime, ran, "min_uptime"),
            (0.0 if named or fills else rules.last_call_timeout, ran, "last_call_timeout"),
            (rules.resize_interval, grew, "resize_interval"),
        ):
            if passed < least / track.rate - _ROUNDING:
                raise InvariantError(
                    "pace", f"{node} wrote {show(after)} after {passed:.3f} s, against {option}"
                )
        if rules.grow == "never" or (rules.grow == "checkpoint" and not named):
            raise InvariantError("pace", f"{node} wrote {show(after)}, and grow={rules.grow}")

    def _judge_progress(self, node: str, after: RoundDocument, epoch: int) -> None:
        if after.outcome is not Outcome.NO_PROGRESS:
            return
        self.checks += 1
        rules = self._rules
        last = self._uptimes.get(after.incarnation, [])[-rules.no_progress_rounds :]
        if any(when != epoch for _, when in last):
            return  # The store may have lost one that ran for long.
        short = [ran for ran, _ in last if ran < rules.no_progress_uptime / SLOWEST + _ROUNDING]
        if len(short) < rules.no_progress_rounds:
            ran = ", ".join(f"{ran:.3f}" for ran, _ in last)
            raise InvariantError("progress", f"{node} wrote {show(after)}; rounds ran for {ran} s")

    def ordered(self, before: RoundDocument, after: RoundDocument, epoch: int) -> None:
        """An order from people was written into the document."""
        self.checks += 1
        orders = {
            "drained": before.drained,
            "restart": before.restart,
            "resize": before.resize,
            "excluded": before.excluded,
            "quarantined": before.quarantined,
            "strikes": before.strikes,
            "edition": before.edition,
        }
        if before.closed or replace(after, **orders) != before:
            raise InvariantError("orders", f"{before} became {after}")
        for node in {*after.drained} - {*before.drained}:
            self._drained[after.incarnation, node] = epoch
            self._ever_drained.add(node)
        self._stood.add(_image(after))

    def kept_out(self, document: RoundDocument) -> list[str]:
        """Participants of this round that no round should have; one that is done stays in it.

        One that is lost has left the round.
        """
        stay = {*document.participants} - {*document.absent}
        out = stay & self._ordered_out(document)
        return sorted(it for it in out if document.world_id not in self._tracks[it].done)

    def _judge_quarantine(self, node: str, before: RoundDocument, after: RoundDocument) -> None:
        was = {it.host: it for it in before.quarantined}
        for it in after.quarantined:
            if was.get(it.host) == it:
                continue
            self.checks += 1
            longest = EPOCH + self._now() + SKEW + self._rules.quarantine_window
            ended = [
                at
                for at in self._blamed.get((after.incarnation, it.host), [])
                if self._now() - at < self._rules.quarantine_window + 2 * SKEW
            ]
            after_rounds = self._rules.quarantine_after
            least = 3 if after_rounds is None else after_rounds
            if len(ended) + 1 < least or (it.until or longest) > longest:
                raise InvariantError(
                    "quarantine", f"{node} keeps out {it} in {show(after)}, it ended {len(ended)}"
                )

    def _blame(self, runs: RoundDocument) -> None:
        """Note whose hosts ended the round before this one, as its cause says."""
        cause = runs.cause
        # By default only where they did not start again.
        failed = cause.left if self._rules.quarantine_after is None else cause.failed
        names = (*cause.lost.first, *failed.first)
        hosts = {label.rpartition("[")[0] for label in names}
        for host in hosts:
            self._blamed.setdefault((runs.incarnation, host), []).append(self._now())

    def _judge_kept_out(
        self, node: str, before: RoundDocument, after: RoundDocument, epoch: int
    ) -> None:
        """A round was named, or begins to run, over ``before``."""
        for person in after.participants:
            if (
                person in before.drained
                or self._drained.get((after.incarnation, person), -1) == epoch
            ):
                raise InvariantError("drained", f"{node} wrote {show(after)}, {person} was drained")
        now = EPOCH + self._now() + SKEW
        hosts = {it.host for it in (*before.excluded, *before.quarantined) if it.is_in_force(now)}
        if out := [it for it in after.participants if self._tracks[it].address in hosts]:
            raise InvariantError("excluded", f"{node} wrote {show(after)}, {out} are excluded")

    def excluded_before(
        self, document: RoundDocument, exclusions: Collection[tuple[float, Exclusion]]
    ) -> list[str]:
        """Participants whom these exclusions keep out; each is older than the run."""
        began = self._founded.get(document.incarnation, 0.0)
        now = EPOCH + self._now() + SKEW
        hosts = {it.host for since, it in exclusions if since < began and it.is_in_force(now)}
        return [it for it in document.participants if self._tracks[it].address in hosts]

    def _judge_closing(
        self,
        node: str,
        track: Track,
        before: RoundDocument | None,
        after: RoundDocument,
        epoch: int,
    ) -> None:
        if before is not None and before.closed:
            if after != replace(before, expires=True):
                raise InvariantError("closed", f"{show(before)} became {show(after)}")
            return
        self._judge_progress(node, after, epoch)
        if before is not None and not after.is_of(before):
            raise InvariantError("members close", f"{node} wrote {show(after)} over {show(before)}")
        if before is not None and after.place < (before.round, 0):
            raise InvariantError("rounds of a run", f"{show(before)} became {show(after)}")
        was = before or after
        last = track.last_rounds.get(after.incarnation)
        # If the store has lost the document, the closed one tells the phase.
        forms = was.phase is Phase.FORMING or (before is None and not after.participants)
        follows = forms and last == was.round - 1
        member = track.member == after.incarnation and (was.names(node) or follows)
        if not member and was.leader != node:
            raise InvariantError("members close", f"{node} of {track.member}: {show(after)}")
        ended = self._ended.get(after.incarnation)
        if ended is None or ended.epoch != epoch:  # A store that forgot may see it closed again.
            outcome = after.outcome or Outcome.CLOSED
            self._ended[after.incarnation] = _Ended(self._now(), epoch, outcome)

    def could_go_on(
        self, node: str, known: RoundDocument, listing: Mapping[str, NodeRecord] | None, new: bool
    ) -> set[str]:
        """The nodes that can go on without this one, if they live, as far as it has read.

        Args:
            node: the one that gives up.
            known: the document as it last read it.
            listing: the records that it has read since it gave up; None: none.
            new: it came late, and its workers failed.
        """
        self.checks += 1
        track, others = self._tracks[node], set[str]()
        hosts = {it.host for it in (*known.excluded, *known.quarantined)}
        for other, theirs in self._tracks.items():
            record = listing.get(other) if listing is not None else None
            if other == node or other in {*known.absent, *known.drained} or theirs.address in hosts:
                continue
            is_lost = theirs.label in known.cause.lost and not known.names(other)
            if theirs.nodes != track.nodes or is_lost:
                continue
            if listing is not None:
                if record is None or record.status in (Status.LEFT, Status.DONE):
                    continue
                runs = record.status is Status.RUN and record.incarnation == known.incarnation
                if not (record.asks or (runs and known.names(other))):
                    continue
            if new and (theirs.label in track.newcomers or track.unnamed):
                continue
            if not known.is_whole and other not in known.ranks:
                continue
            others.add(other)
        return others

    def left(
        self, node: str, run: RoundDocument, listing: Mapping[str, NodeRecord], new: bool
    ) -> None:
        """The node leaves this run; ``listing``, ``new``: as for `could_go_on`."""
        self.checks += 1
        if run.closed:
            return  # Another node closed the run meanwhile: nobody is left behind.
        track = self._tracks[node]
        others = [
            other
            for other, record in listing.items()
            if other != node
            and (record.asks or record.status is Status.RUN)
            and not (new and record.label in track.newcomers)
        ]
        if not largest([self._tracks[it].domain for it in others], self._rules):
            who = _names(others) or "nobody"
            raise InvariantError("goes on", f"{node} leaves {show(run)} to {who}")

    def closing_failed(self, run: RoundDocument | None, tombstones: Collection[str]) -> None:
        """A node that closed this run died, or the store was away; these tombstones are in it."""
        incarnation = run.incarnation if run is not None else ""
        if incarnation in self._ended and incarnation not in tombstones:
            self._ended[incarnation].orphaned = True

    def left_tombstone(self, run: RoundDocument, stands: bool) -> None:
        """A node that closed this run left its tombstone, or could not, and may not succeed."""
        if run.incarnation in self._ended:
            self._ended[run.incarnation].orphaned = not stands

    def _is_orphaned(self, document: RoundDocument) -> bool:
        ended = self._ended.get(document.incarnation)
        return ended is not None and ended.orphaned

    def _judge_finished(
        self, node: str, evidence: Evidence, after: RoundDocument, epoch: int
    ) -> None:
        ended = self._ended.get(after.incarnation)
        if ended is None or epoch != ended.epoch:
            return
        if evidence.asked.get(after.incarnation, ended.at) < ended.at:
            return
        raise InvariantError("finished", f"{node} wrote {show(after)}, and it was closed")

    def _judge_incarnations(
        self,
        node: str,
        track: Track,
        before: RoundDocument,
        after: RoundDocument,
        evidence: Evidence,
    ) -> None:
        known = any(image.incarnation == after.incarnation for image in self._stood)
        what = f"{node} wrote {show(after)} over {show(before)}"
        if before.closed:
            if not known:
                raise InvariantError("incarnations", what)
            return
        same_nodes = (before.min_nodes, before.max_nodes) == (after.min_nodes, after.max_nodes)
        if known or same_nodes:
            raise InvariantError("incarnations", what)
        for holder in {*before.participants, *before.previous, before.leader} - {None}:
            record = evidence.seen.get(str(holder))
            if record is None or record.status is not Status.LEFT:
                self._judge_evidence(node, track, evidence, str(holder), after)

    def _judge_evictions(
        self, node: str, track: Track, before: RoundDocument, after: RoundDocument
    ) -> None:
        evicted = {*after.still_running} - {*before.still_running}
        if not evicted or not after.is_of(before):
            return
        for person in evicted:
            if person in self._tracks:
                self._tracks[person].evicted = after.incarnation, after.round
        # An exclusion may end while the request is repeated that acts on it.
        hosts = {it.host for it in (*before.excluded, *before.quarantined)}
        evicted -= self._ordered_out(before) | {
            person
            for person in evicted & self._tracks.keys()
            if (track_of := self._tracks[person]).address in hosts
            and track_of.label in after.cause.excluded
        }
        if not evicted:
            return
        if waited := {it for it in evicted if _is_unfit(track.evidence, it)}:
            raise InvariantError("health", f"{node} waited for {_names(waited)}: {show(after)}")
        began = self._forming.get((after.incarnation, after.round), self._now())
        patience = 0.1 * self._rules.rejoin_timeout / track.rate
        if self._now() - began < patience - _ROUNDING:
            raise InvariantError(
                "evidence", f"{node} evicted {_names(evicted)} in {show(after)} at once"
            )

    def _ordered_out(self, document: RoundDocument) -> set[str]:
        """The nodes that people took out: nobody waits for them, whatever the hosts' clocks say."""
        now = EPOCH + self._now() - SKEW
        held = (*document.excluded, *document.quarantined)
        hosts = {it.host for it in held if it.is_in_force(now)}
        return {*document.drained} | {
            node for node, track in self._tracks.items() if track.address in hosts
        }

    @staticmethod
    def _judge_farewells(
        node: str, before: RoundDocument, after: RoundDocument, evidence: Evidence
    ) -> None:
        counted = {*after.previous, *after.participants} - {*before.previous, *before.participants}
        if after.round == before.round:
            counted |= {*before.absent} - {*after.absent}
        for person in counted - {node}:
            record = _listed(evidence, person)
            if record is not None and record.status in (Status.LEFT, Status.DONE):
                raise InvariantError(
                    "evidence", f"{node} counts on {person}, who {record.status}, in {show(after)}"
                )

    def _judge_done(
        self,
        node: str,
        before: RoundDocument,
        after: RoundDocument,
        evidence: Evidence,
        epoch: int,
    ) -> None:
        done = {
            person
            for person in before.participants
            if (record := evidence.seen.get(person)) is not None
            and record.status is Status.DONE
            and self._tracks[person].done.get(before.world_id) == epoch
        }
        if not done:
            return
        cause = after.cause
        if fresh := {*after.absent} - {*before.absent}:
            named = fresh & done
        else:
            # A node that was lost before a round stays in its cause, also when it is done in it.
            known = before.cause if after.round == before.round else None
            named = {
                person
                for person in done
                if _blames(cause, label := self._tracks[person].label)
                and not (known is not None and _blames(known, label))
            }
        if named:
            raise InvariantError(
                "evidence", f"{node} takes {_names(named)}, who are done, for lost"
            )
        restarts = before.phase is Phase.RUNNING and after.round > before.round
        # A participant asks again without failed workers if another run took the place of its own.
        again = any(self._tracks[person].label in cause.joined for person in before.participants)
        ordered = before.restart or cause.drained or cause.excluded
        if restarts and not (again or ordered or cause.lost or cause.left or cause.failed):
            raise InvariantError("done", f"{node} wrote {show(after)}, and {_names(done)} are done")

    def _judge_restart(
        self, node: str, before: RoundDocument, after: RoundDocument, evidence: Evidence
    ) -> None:
        """An order to restart is dropped only where a node is done."""
        if not before.restart or after.restart or world_of(after) != world_of(before):
            return
        if before.phase is not Phase.RUNNING or after.phase is not Phase.RUNNING:
            return
        if before.world_id in self._tracks[node].done:
            return  # It knows that of itself before a listing shows it.
        if not any(record.status is Status.DONE for record in evidence.seen.values()):
            raise InvariantError("orders", f"{node} does not restart {show(after)}")

    def _judge_places(
        self, before: RoundDocument | None, after: RoundDocument, evidence: Evidence
    ) -> None:
        """The nodes of a round that is newly named."""
        rules, people = self._rules, after.participants
        if len(people) % rules.node_unit:
            raise InvariantError("unit", f"{len(people)} of {rules.node_unit}: {show(after)}")
        where = {person: self._tracks[person].domain or "" for person in people}
        if rules.segment > 1:
            counts = Counter(where.values())
            if counts[""] or any(count % rules.segment for count in counts.values()):
                raise InvariantError("segment", f"{dict(counts)}: {show(after)}")
        if rules.rank_order != "topology":
            return
        if not are_contiguous([where[person] for person in people]):
            raise InvariantError("places", f"{[*where.values()]}: {show(after)}")
        ran = self._last_ran.get(after.incarnation)
        # The forming document has at the end whom its writer had not known of.
        orders = [before.previous_order if before else {}, ran[0].ranks if ran else {}]

        def keeps(old: Mapping[str, int], domain: str) -> bool:
            # Another may have to be rank 0.
            ranks = [old[it] for it in people[1:] if it in old and where[it] == domain]
            return ranks == sorted(ranks)

        for domain in {*where.values()}:
            if not any(keeps(old, domain) for old in orders):
                raise InvariantError("places", f"{before and show(before)} became {show(after)}")
        if before is None or ran is None or before.ran != ran[0].world_id:
            return
        listed = [evidence.seen.get(person) for person in ran[0].participants]
        if any(record is None or record.world_id != before.ran for record in listed):
            return
        self.checks += 1
        was = {person: self._tracks[person].domain or "" for person in ran[0].participants}
        for domain in {*where.values()} - {where[people[0]]}:
            then = [person for person in was if was[person] == domain]
            now = [person for person in people if where[person] == domain]
            moved = [it for it in then if it in now and then.index(it) != now.index(it)]
            if len(then) == len(now) and moved:
                raise InvariantError("places", f"{show(ran[0])} became {show(after)}")

    def _judge_disturbance(
        self, node: str, before: RoundDocument, after: RoundDocument, evidence: Evidence
    ) -> None:
        """Whether newcomers ended a round in vain."""
        rules, cause = self._rules, after.cause
        if rules.node_unit == rules.segment == 1 or after.round != before.round + 1:
            return
        if before.phase is not Phase.RUNNING or after.phase is not Phase.FORMING:
            return
        again = any(self._tracks[person].label in cause.joined for person in before.participants)
        if again or cause.lost or cause.left or cause.failed or not cause.joined:
            return
        if before.restart or cause.drained or cause.excluded or cause.stuck:
            return
        self.checks += 1
        newcomers = [
            other
            for other, record in evidence.seen.items()
            if other not in before.ranks and record.status in (Status.JOIN, Status.SPARE)
        ]
        here = [self._tracks[it].domain for it in {*before.participants, *newcomers, node}]
        # A run that strays have founded has their --nnodes.
        rules = replace(rules, min_nodes=before.min_nodes, max_nodes=before.max_nodes)
        if largest(here, rules) <= len(before.participants):
            raise InvariantError("undisturbed", f"{show(before)} became {show(after)}")

    def _check_running(
        self, before: RoundDocument | None, after: RoundDocument, epoch: int
    ) -> None:
        world = world_of(after)
        self._running.setdefault(world, self._now())
        if before is None or before.phase is not Phase.RUNNING or before.round != after.round:
            for person in after.participants:
                if after.world_id not in self._tracks[person].confirmed:
                    raise InvariantError("confirmed", f"{person} never saw {show(after)}")
            first = self._tracks[after.participants[0]]
            if after.master is None or after.master not in first.masters[after.world_id]:
                raise InvariantError(
                    "confirmed", f"{after.master} is not the master of {show(after)}"
                )
        elif (before.participants, before.master) != (after.participants, after.master):
            raise InvariantError("agreement", f"{show(before)} became {show(after)}")
        if world not in self._ran:
            self._judge_cause(after, epoch)
            self._last_ran[after.incarnation] = after, epoch
        if world not in self._given:
            # A store that forgot it before anybody was told may see it run again.
            self._ran[world] = after

    def _judge_cause(self, after: RoundDocument, epoch: int) -> None:
        """A node that is missing from a round that runs is named in its cause."""
        last, when = self._last_ran.get(after.incarnation, (None, -1))
        if last is None or when != epoch:
            return
        cause = after.cause
        cut_off = {label for pair in cause.apart.first for label in pair.split(" and ")}
        for person in last.participants:
            track = self._tracks[person]
            if person in after.ranks or last.world_id in track.done:
                continue
            if track.label in cut_off or cause.apart.more:
                continue  # No data passed: it waits until another round forms.
            by_people = cause.drained, cause.excluded
            named = (cause.lost, cause.left, cause.evicted, cause.surplus, *by_people)
            # One whose record was forgotten has no other name.
            if not any(track.label in it or person in it or it.more for it in named):
                raise InvariantError(
                    "causes", f"{person} is missing from {show(after)}: {after.reason}"
                )

    def _judge_lease(self, track: Track) -> None:
        last = track.shown[-1] if track.shown else self._now()
        if self._now() - last >= self._shortest - _ROUNDING:
            track.lease_lost = True

    def _judge_missed(self, node: str, track: Track, epoch: int) -> None:
        assert track.awaits is not None
        world_id, confirmed_in = track.awaits
        track.awaits = None
        if track.lease_lost or track.evicted or epoch != confirmed_in:
            return
        self.checks += 1
        waits = None
        for other, theirs in self._tracks.items():
            if theirs.world is None:
                continue
            self._judge_lease(theirs)
            if self._ran[theirs.world].world_id == world_id:
                waits = other
            elif not theirs.lease_lost:
                return  # Two worlds at once: `given` has judged that pair.
        if waits:
            raise InvariantError(
                "missed", f"{node} asks for another round than {world_id}, which {waits} runs"
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
        told = self._tracks[host].confirmed[self._ran[world].world_id].beat
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
        if shown := evidence.seen.get(lost):
            # A late write, or a fail-over, may hide a later beat.
            known = bisect_right(theirs.beats, shown.beat)
        else:
            known = bisect_right(theirs.arrivals, read - self._staleness)
        since = theirs.arrivals[known - 1] if known else 0.0
        if shown is None:
            # A beat that the store lost before the decider looked is nothing that it could know of.
            missing, heard = evidence.missing.get(lost, read), evidence.heard.get(lost)
            since = min(since, missing)
            if heard is not None and not any(heard < it <= missing for it in theirs.arrivals):
                since = min(since, heard)
        since = max(since, evidence.disturbed, evidence.heard.get(lost, 0.0))
        if lost != evidence.leads_after:
            since = max(since, evidence.leads_since)
        lease = theirs.lease if lost in evidence.seen else min(theirs.lease, self._own(track))
        least = lease / track.rate - self._staleness
        # Until another beat is seen, which may have been written before the outage.
        same = shown is None or evidence.known.get(lost) == shown.beat
        if evidence.outage and since == evidence.outage and lost in evidence.known and same:
            least += self._own(track) / track.rate  # Nobody knows when it was back.
        if read - since < least - _ROUNDING:
            raise InvariantError(
                "evidence",
                f"{decider} declared {lost} lost in {show(after)}; its silence was "
                f"{read - since:.3f} s at {read:.3f}, it needs {least:.3f} s",
            )

    def _judge_doubt(
        self,
        decider: str,
        track: Track,
        evidence: Evidence,
        declared: Collection[str],
        before: RoundDocument,
        after: RoundDocument,
    ) -> None:
        if not declared or not self._steady:
            return
        world = {*before.participants, *before.previous} - {*before.absent}
        if before.phase is Phase.FORMING:
            world |= {*evidence.listed}
        late = {node for node in world if node != decider and self._is_late(track, evidence, node)}
        if len(late) < 8 or 3 * len(late) <= len(world):
            return
        self.checks += 1
        for lost in sorted({*declared} & late):
            theirs = self._tracks[lost]
            since = max(evidence.changed[lost], evidence.heard.get(lost, 0.0))
            silence = (evidence.read[lost] - since) * track.rate
            least = min(self._outage(track), _least_late(evidence.seen[lost]))
            if silence < theirs.lease + 0.9 * least:
                raise InvariantError(
                    "doubt",
                    f"{decider} declared {lost} lost in {show(after)} after {silence:.3f} s, and "
                    f"{len(late)} of {len(world)} nodes were late",
                )

    def _is_late(self, track: Track, evidence: Evidence, node: str) -> bool:
        """Surely, as the decider sees it, and for the first time."""
        record, theirs = evidence.seen.get(node), self._tracks.get(node)
        if record is None or theirs is None or node not in evidence.changed:
            return False
        if record.status in (Status.LEFT, Status.DONE):
            return False
        known = bisect_right(theirs.beats, record.beat)
        if known and theirs.arrivals[known - 1] <= max(evidence.disturbed, evidence.leads_since):
            return False  # It has had its second lease since then.
        last = max(evidence.changed[node], evidence.heard.get(node, 0.0))
        since = max(last, evidence.disturbed, evidence.troubled, evidence.leads_since)
        least = _least_late(record) + 0.25 * record.interval
        if (evidence.looked - since) * track.rate < least:
            return False
        # Old records stay, of nodes that were lost one by one. A short trouble ends no silence.
        return (evidence.looked - last) * track.rate < record.lease + 0.9 * self._outage(track)

    def _outage(self, track: Track) -> float:
        return track.lease * max(self._rules.interval / self._rules.lease, 1 / 3)

    def crashed(
        self,
        nodes: Collection[str],
        before: RoundDocument,
        after: RoundDocument | None,
        again: bool,
    ) -> None:
        """Two leases ago these participants crashed all at once, and nothing else failed.

        ``again``: others were started in their places, or a TCPStore opened too late; both may
        begin more rounds.
        """
        if after is None or after.closed or not after.is_of(before):
            return
        self.checks += 1
        counted = {*after.participants, *after.previous} - {*after.absent}
        if left := counted & {*nodes}:
            raise InvariantError("two leases", f"{_names(left)} crashed, there is {show(after)}")
        if after.round > before.round + 1 and not again:
            raise InvariantError("two leases", f"{show(before)} became {show(after)}")

    @staticmethod
    def _own(track: Track) -> float:
        return track.lease


def _listed(evidence: Evidence, node: str) -> NodeRecord | None:
    """The record of a node in the last listing, or a later one that was read alone."""
    listed, seen = evidence.listed.get(node), evidence.seen.get(node)
    later = listed is not None and seen is not None and seen.beat > listed.beat
    return seen if later else listed


def _is_unfit(evidence: Evidence, node: str) -> bool:
    record = _listed(evidence, node)
    return record is not None and record.is_unfit


def _least_late(record: NodeRecord) -> float:
    """The silence from which on a node is late, as protocol.md has it."""
    return max(0.5 * record.lease, 1.25 * record.interval)


def _image(document: RoundDocument) -> RoundDocument:
    """What of a document tells it from others, who leads and what is ordered aside."""
    return replace(
        document,
        leader=None,
        waiters=0,
        cause=Cause(),
        finishing=False,
        drained=(),
        excluded=(),
        restart="",
        resize=False,
        quarantined=(),
        strikes=(),
        edition=0,
        accused=(),
    )


def _blames(cause: Cause, label: str) -> bool:
    return label in cause.lost or label in cause.left


def _declared_lost(
    before: RoundDocument, after: RoundDocument, seen: Mapping[str, NodeRecord]
) -> list[str]:
    """Nodes that this write leaves out because they are silent; not those that left or rejoined."""
    if after.round > before.round:
        out = {*before.participants, *before.previous} - {*after.previous, *before.absent}
    elif after.phase is Phase.CONFIRMING and before.phase is Phase.FORMING:
        out = {
            node
            for node in before.previous
            if (record := seen.get(node)) is None
            or record.status is Status.RUN
            or (record.status is not Status.LEFT and _round_in(before, record) < before.round - 1)
        }
    else:
        out = {*before.previous} - {*after.previous, *after.participants}
        out |= {*after.absent} - {*before.absent}
    out -= {*after.still_running}
    return sorted(
        node
        for node in out
        if (record := seen.get(node)) is None
        or not (
            record.status in (Status.LEFT, Status.DONE)
            or _only_loses_its_rank(before, after, record)
        )
    )


def _only_loses_its_rank(before: RoundDocument, after: RoundDocument, record: NodeRecord) -> bool:
    """Whether the node asks for a round or is in another run, and only its old rank is lost."""
    asks = record.status in (Status.JOIN, Status.SPARE)
    asks |= record.incarnation != before.incarnation
    said = record.label in after.cause.lost and record.label not in before.cause.lost
    return asks and after.phase is Phase.FORMING and not said


def _round_in(document: RoundDocument, record: NodeRecord) -> int:
    return record.round if record.incarnation == document.incarnation else -1


def world_of(document: RoundDocument) -> World:
    return document.incarnation, document.round, document.participants


def show(document: RoundDocument) -> str:
    run = document.incarnation[:4]
    people = " ".join(document.participants) or "previous " + " ".join(document.previous)
    lost = f" lost {' '.join(document.absent)}" if document.absent else ""
    return (
        f"{run} round {document.round} {document.phase.value} of {document.leader} [{people}]{lost}"
    )


def _names(nodes: Collection[str]) -> str:
    return " ".join(sorted(nodes))


def _show_world(world: World) -> str:
    return f"{world[0][:4]} round {world[1]} [{' '.join(world[2])}]"
