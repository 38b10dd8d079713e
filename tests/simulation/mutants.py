"""Faults put into the protocol, one at a time; the simulator must catch each of them.

A mutant replaces functions or methods of ``rdzv_plugins.protocol`` by faulty ones for as long as
`broken` lasts. As a rule that is a wrapper which changes what goes in or what comes out, at one of
the seams of `Patch`: what a node knows, what it decides, what it asks the driver for. No mutant
knows the text of what it breaks, so that it outlives a change of that.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch as patched

from msgspec.structs import replace

from rdzv_plugins import protocol
from rdzv_plugins.kv import Attempts, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.protocol import (
    accusations,
    cleanup,
    heartbeat,
    parting,
    roster,
    rounds,
    situation,
    sizes,
)
from rdzv_plugins.protocol import decide as decisions
from rdzv_plugins.protocol.contact import Contact, Standing
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    Cause,
    Names,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.effects import (
    Begin,
    CompareAndSet,
    DialPeer,
    Drop,
    Effect,
    Effects,
    Expire,
    FinishJoin,
    OpenMaster,
    Park,
    PutRecord,
    PutShards,
    PutTombstone,
)
from rdzv_plugins.protocol.failure_detector import FailureDetector, Watched
from rdzv_plugins.protocol.join import Inbox
from rdzv_plugins.protocol.master import Master
from rdzv_plugins.protocol.neighbours import Neighbours
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.observer import Observer
from rdzv_plugins.protocol.own_checkpoint import OwnCheckpoint
from rdzv_plugins.protocol.parting import Service
from rdzv_plugins.protocol.policies import (
    checkpoint,
    growth,
    kept_out,
    network,
    quarantine,
    ranks,
    selection,
)
from rdzv_plugins.protocol.policies.kept_out import KeptOut
from rdzv_plugins.protocol.policies.network import Verdict, still_not_to_host
from rdzv_plugins.protocol.policies.no_progress import NoProgress
from rdzv_plugins.protocol.policies.policy import Reason
from rdzv_plugins.protocol.progress import Progress
from rdzv_plugins.protocol.record_cache import RecordCache
from rdzv_plugins.protocol.roster import MISSING, members_by_their_records
from rdzv_plugins.protocol.rules import (
    Action,
    Close,
    Fail,
    Failure,
    Rules,
    Start,
    View,
    Wait,
    Write,
)
from rdzv_plugins.protocol.situation import Situation

from .plan import EVERYTHING, UNSTEERED, Fault, Focus

__all__ = [
    "CALM",
    "FORGETS_A_STEP",
    "MOST_SEEDS_PER_MUTANT",
    "MUTANTS",
    "Mutant",
    "Patch",
    "broken",
]

# The search for a mutant begins at the seed that caught it first. After a change of the protocol's
# requests a seed is another run, and a later seed may catch the mutant.
MOST_SEEDS_PER_MUTANT = 3000

_MODULES = [
    importlib.import_module(it.name)
    for it in pkgutil.walk_packages(protocol.__path__, f"{protocol.__name__}.")
]


class Patch:
    """Puts faults in, until they are undone.

    Attributes:
        taken: how often each fault has been met since: what it replaces was called, or, where it
            changes what passes one of the seams, something was changed.
    """

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self.taken: Counter[str] = Counter()

    def __call__(self, owner: ModuleType | type, name: str, faulty: Callable[..., Any]) -> None:
        """Replace a function, method or property, wherever the protocol has imported it.

        Args:
            owner: where it is defined; raises `KeyError` if it is not there.
            faulty: what is called instead, with the original and then what that was called with.
        """
        what = f"{owner.__name__}.{name}"
        self.taken[what] = 0

        def noted(*arguments: Any, **named: Any) -> Any:
            self.taken[what] += 1
            return faulty(*arguments, **named)

        self._replace(owner, name, noted)

    def _replace(self, owner: ModuleType | type, name: str, faulty: Callable[..., Any]) -> None:
        original = vars(owner)[name]
        is_property = isinstance(original, property)
        called: Any = original.fget if is_property else original

        @functools.wraps(called)
        def replacement(*arguments: Any, **named: Any) -> Any:
            return faulty(called, *arguments, **named)

        if isinstance(owner, type):
            new = property(replacement) if is_property else replacement
            self._undo.enter_context(patched.object(owner, name, new))
            return
        for module in {owner, *_MODULES}:
            for known_as in [it for it, value in vars(module).items() if value is original]:
                self._undo.enter_context(patched.object(module, known_as, replacement))

    def _noted(self, seam: str, before: Any, after: Any) -> Any:
        self.taken[seam] += after is not before
        return after

    def view(self, change: Callable[[View], View]) -> None:
        """What a node knows when it decides."""
        self.taken["view"] = 0
        self._replace(
            decisions,
            "decide",
            lambda decide, view: decide(self._noted("view", view, change(view))),
        )

    def decision(self, change: Callable[[View, Action], Action]) -> None:
        """What a node decides."""
        self.taken["decision"] = 0

        def decide(original: Callable[[View], Action], view: View) -> Any:
            action = original(view)
            return self._noted("decision", action, change(view, action))

        self._replace(decisions, "decide", decide)

    def leaders_view(self, change: Callable[[View, RoundDocument], View]) -> None:
        """What a node knows when it decides as the leader."""
        self.taken["leader's view"] = 0

        def lead(original: Callable[..., Action], view: View, document: RoundDocument) -> Action:
            return original(self._noted("leader's view", view, change(view, document)), document)

        self._replace(decisions, "lead", lead)

    def leaders_decision(self, change: Callable[[View, RoundDocument, Action], Action]) -> None:
        """What the leader decides."""
        self.taken["leader's decision"] = 0

        def lead(original: Callable[..., Action], view: View, document: RoundDocument) -> Any:
            action = original(view, document)
            return self._noted("leader's decision", action, change(view, document, action))

        self._replace(decisions, "lead", lead)

    def effects(self, change: Callable[[Node, Effect[Any]], Effect[Any] | None]) -> None:
        """What a node asks of its driver; None: it does not, and goes on as if it had."""
        self.taken["effects"] = 0

        def run(original: Callable[[Node], Effects[None]], node: Node) -> Effects[None]:
            def changed(effect: Effect[Any]) -> Any:
                return self._noted("effects", effect, change(node, effect))

            return _through(original(node), changed)

        self._replace(Node, "run", run)


def _through(
    steps: Effects[Any],
    change: Callable[[Effect[Any]], Effect[Any] | None],
    answered: Callable[[Effect[Any], Any], Any] = lambda _, answer: answer,
) -> Generator[Effect[Any], Any, Any]:
    """Carry out ``steps`` with other effects, or with other answers to them."""
    answer: Any = None
    error: Exception | None = None
    with closing(steps):
        while True:
            try:
                effect = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration as end:
                return end.value
            answer, error = None, None
            if (changed := change(effect)) is None:
                continue
            try:
                answer = answered(changed, (yield changed))
            except (RendezvousConnectionError, RendezvousStateError) as failure:
                error = failure


@dataclass(frozen=True, slots=True)
class Mutant:
    """How it breaks a rule; ``breaks`` is the rule's heading in docs/protocol.md, and a sentence.

    ``seed`` is close to a seed that catches the mutant. If the necessary faults are too rare in
    unrestricted plans, ``focus`` restricts the plans.
    """

    breaks: str
    put_in: Callable[[Patch], None]
    seed: int = 1
    focus: Focus = EVERYTHING

    @property
    def rule(self) -> str:
        return self.breaks.partition(": ")[0]

    @property
    def plans(self) -> Focus:
        """``focus``; as when most of these seeds were found where it does not say otherwise."""
        settings = {"inline": 128, **UNSTEERED, **self.focus.settings}
        return dataclasses.replace(self.focus, settings=settings)


MUTANTS: dict[str, Mutant] = {}


def _mutant(
    breaks: str, seed: int = 1, focus: Focus = EVERYTHING
) -> Callable[[Callable[[Patch], None]], None]:
    """Add the mutant of a function that puts the fault in; its name is the function's."""

    def add(put_in: Callable[[Patch], None]) -> None:
        MUTANTS[put_in.__name__.strip("_").replace("_", "-")] = Mutant(breaks, put_in, seed, focus)

    return add


@contextmanager
def broken(name: str) -> Iterator[Patch]:
    """Have this mutant in the place of the protocol, in all of this process."""
    with ExitStack() as undo:
        patch = Patch(undo)
        MUTANTS[name].put_in(patch)
        yield patch


# Where links break with nodes that live, and are refused.
_DIES = Focus(
    kinds=("crash",),
    settings={
        "answer_timeout": 0.7, "staleness": 0.0, "poll": 0.0, "nodes": 4, "min_nodes": 2,
        "max_nodes": 4, "unfit": 0.0, "lost": 0.0, "unacknowledged": 0.0, "late": 0.0,
        "ambush": None, "latency": 0.01,
    },
)  # fmt: skip
_LINKED = Focus(
    kinds=("crash", "stall"),
    settings={
        "answer_timeout": 0.7,
        "staleness": 0.0,
        "poll": 0.0,
        "breaks": tuple(Fault(2.0 * n, "refuse") for n in range(10)),
    },
)
_UNFIT = Focus(settings={"unfit": 0.5, "checks_restarts": True})

# Where hosts end round after round.
_FLAPS = Focus(
    kinds=("worker failure", "crash, then restart as a newcomer"),
    settings={"quarantine_after": 2, "quarantine_window": 30.0},
)
# Where people give orders.
_DRAINS, _EXCLUDES = (
    Focus(settings={"orders": tuple(Fault(3.0 * n, kind) for n, kind in enumerate(kinds, 1))})
    for kinds in (
        ("drain", "restart", "drain", "drain", "restart"),
        ("exclude", "exclude", "include", "exclude", "exclude"),
    )
)
# Where the store refuses hosts.
_REFUSED = Focus(
    kinds=("newcomer",),
    settings={"refusals": tuple(Fault(4.0 * n, kind) for n, kind in enumerate(("one", "all") * 2))},
)
# And nodes have links, to which nothing happens.
_REFUSED_LINKED = Focus(
    kinds=("worker failure",),
    settings={
        "answer_timeout": 0.7, "staleness": 0.0, "poll": 0.0, "breaks": (), "without_links": 0.0,
        "outage_limit": math.inf,
        "refusals": tuple(
            Fault(4.0 * n, kind) for n, kind in enumerate(("all", "some", "mute", "some"))
        ),
    },
)  # fmt: skip
# Where all but the smallest rounds stand in shards.
_APART = Focus(settings={"inline": 1})


def _parted(*kinds: str, **settings: Any) -> Focus:
    """Runs that check their network, to which these things happen again and again."""
    links = tuple(Fault(0.7 * n, kind) for n, kind in enumerate(3 * kinds))
    return Focus(
        kinds=("worker failure", "newcomer", "crash, then restart as a newcomer"),
        settings={"network_check": True, "links": links, **settings},
    )


_CALM = {"lost": 0.0, "unacknowledged": 0.0, "late": 0.0, "ambush": None}

# Where agents fail, and the workers of nodes that are new, though the others could go on.
_FAILS = {
    "failures": tuple(
        Fault(1.5 * n, kind) for n, kind in enumerate(("newcomer", "newcomer", "agent") * 4)
    ),
    "min_nodes": 2,
    "max_nodes": 6,
    "nodes": 4,
    "min_uptime": 0.0,
}
_FAILS_LATE = Focus(kinds=("newcomer",), settings=_FAILS)


def _all_fail(failing: str) -> Focus:
    """The same, and at the end these fail for good."""
    settings = {**_FAILS, "ending": "fails", "failing": failing}
    return Focus(kinds=("newcomer",), settings=settings)


_GROWS = {"min_nodes": 1, "max_nodes": 12, "last_call_timeout": 0.0}


def _grows(**settings: Any) -> Focus:
    """Runs that newcomers join while a round runs, under these policies."""
    return Focus(kinds=("newcomer", "newcomer", "crash"), settings={**_GROWS, **settings})


_RACKS = ("s0/r0", "s1/r1", "s0/r2", "s0/r0")
_UNITS = Focus(settings={"node_unit": 3, "min_nodes": 1, "max_nodes": 9})
_SEGMENTS = Focus(settings={"segment": 2, "min_nodes": 1, "max_nodes": 6, "domains": _RACKS})
_TOPOLOGY = Focus(
    kinds=("crash", "worker failure", "leave", "newcomer", "newcomer"),
    settings={"topology": True, "min_nodes": 1, "max_nodes": 5, "domains": _RACKS},
)
_FAILS_OVER = Focus(
    kinds=("fail-over", "worker failure"), settings={"stop": 0.05, "max_restarts": 100}
)

CALM = Focus(
    kinds=("many crash at once",),
    settings={"nodes": 30, "max_nodes": 30, "min_nodes": 4, **_CALM, **UNSTEERED},
)
"""Large worlds in which nothing fails but many hosts at once."""


def _under(view: View, **rules: Any) -> View:
    """The same under other settings."""
    return replace(view, rules=dataclasses.replace(view.rules, **rules))


def _with_document(view: View, **fields: Any) -> View:
    """The same with another document."""
    assert view.document is not None
    return replace(view, document=replace(view.document, **fields))


def _with_records(view: View, concerned: Callable[[str, NodeRecord], bool], **fields: Any) -> View:
    """The same with other records of the nodes that this concerns."""
    known = {**(view.records or {}), view.me: view.record}
    changed = {it: replace(was, **fields) for it, was in known.items() if concerned(it, was)}
    records = {**known, **changed}
    return replace(view, records=records, record=records[view.me]) if changed else view


def _watching(view: View, change: Callable[[str, Watched], Mapping[str, Any]]) -> View:
    """The same, where the node has seen something else of those that it watches."""
    nodes = {*(view.records or {}), *view.watched, MISSING}
    nodes |= {*view.document.ranks, *view.document.previous_order} if view.document else set()
    known = {it: view.watched.get(it) or Watched(None, view.now, view.now) for it in nodes}
    changed = {node: dataclasses.replace(it, **change(node, it)) for node, it in known.items()}
    return replace(view, watched=changed)


def _has_another_size(view: View) -> bool:
    """Whether the run has other ``--nnodes`` than this node."""
    document, rules = view.document, view.rules
    return (
        document is not None
        and not document.closed
        and ((document.min_nodes, document.max_nodes) != (rules.min_nodes, rules.max_nodes))
    )


def _lost(patch: Patch, is_lost: Callable[[View, str], bool]) -> None:
    """Take other nodes for lost, whose leases need not have run out."""

    def assess(original: Any, view: View, known: RoundDocument) -> Situation:
        at: Situation = original(view, known)
        others = {*at.records, *at.document.participants, *at.document.previous} - {view.me}
        lost = frozenset(node for node in others if is_lost(view, node))
        return replace(at, lost=lost.union(at.by_accusation))

    patch(situation, "assess", assess)


# Rounds: who is awaited, taken, and ranked.


@_mutant("exclusivity: a round does not wait for the participants of the last round", seed=3)
def no_exclusivity(patch: Patch) -> None:
    def has_rejoined(
        original: Any, document: RoundDocument, record: NodeRecord | None, ended: int
    ) -> bool:
        silent = record is None or not record.asks
        forms = document.phase is Phase.FORMING
        return (forms and silent) or original(document, record, ended)

    patch(situation, "has_rejoined", has_rejoined)


@_mutant("exclusivity: a join request from before the round counts as one from after it", seed=2)
def stale_join(patch: Patch) -> None:
    patch(
        situation,
        "has_rejoined",
        lambda _, document, record, ended: record is not None and record.asks,
    )


@_mutant("one document: a leader treats a refused write as done", seed=2)
def no_compare(patch: Patch) -> None:
    def answered(effect: Effect[Any], answer: Any) -> Any:
        return (answer[0], True) if isinstance(effect, CompareAndSet) else answer

    patch(Node, "run", lambda run, node: _through(run(node), lambda effect: effect, answered))


@_mutant("leases: a node is lost when the time in its record is a lease behind the reader's clock")
def wall_clocks(patch: Patch) -> None:
    def is_lost(view: View, node: str) -> bool:
        record = (view.records or {}).get(node)
        if record is None:
            return view.is_lost(node)
        return view.wall - record.at >= view.lease_and_lag(node)

    _lost(patch, is_lost)


@_mutant("leases: a node is lost after half a lease of silence", seed=2)
def half_a_lease(patch: Patch) -> None:
    _lost(patch, lambda view, node: view.confirmed_silence(node) >= view.patience(node) / 2)


@_mutant("lead: the leader is replaced without waiting for its lease")
def coup(patch: Patch) -> None:
    def impatient(view: View) -> View:
        leads = view.document.leader if view.document is not None else None
        if leads in (None, view.me):
            return view
        lease = view.lease_and_lag(leads or "")
        return _watching(
            view, lambda node, it: {"looked": it.looked + lease} if node == leads else {}
        )

    patch.view(impatient)


@_mutant("lead: no node takes over from a dead leader", seed=90)
def no_heir(patch: Patch) -> None:
    def stay(view: View, action: Action) -> Action:
        document = view.document
        if document is None or document is not view.latest:
            return action
        takes_over = (
            isinstance(action, Write)
            and document.leader not in (None, view.me)
            and action.document.is_of(document)
        )
        return Wait(view.rules.interval) if takes_over else action

    patch.decision(stay)


@_mutant(
    "a leader shows that it leads: a leader that sends heartbeats but cannot read all records "
    "stays the leader",
    seed=51,
    focus=Focus(kinds=("grey host",), settings={"stays_grey": True}),
)
def never_mind_leading(patch: Patch) -> None:
    patch(Observer, "cannot_list", lambda *_: False)
    patch.view(lambda view: replace(view, confirmed_idleness=0.0, possible_idleness=0.0))


@_mutant(
    "a leader shows that it leads: a leader that sends heartbeats but cannot write the document"
    " stays the leader",
    seed=70,
    focus=Focus(
        kinds=("grey host", "crash"), settings={"stays_grey": True, "writes_refused": True}
    ),
)
def never_mind_writing(patch: Patch) -> None:
    def listed(list_: Callable[[Observer], Effects[None]], observer: Observer) -> Effects[None]:
        observer.is_to_write = False
        yield from list_(observer)

    patch(Observer, "_list", listed)


@_mutant("consistency: a node puts itself first instead of reading its rank")
def own_ranks(patch: Patch) -> None:
    def first(view: View, action: Action) -> Action:
        if not isinstance(action, Start):
            return action
        people = sorted(action.document.participants, key=lambda node: node != view.me)
        return Start(replace(action.document, participants=tuple(people)))

    patch.decision(first)


@_mutant("last call: one node is enough for a round", seed=9)
def below_minimum(patch: Patch) -> None:
    patch(
        sizes,
        "world_size",
        lambda world_size, nodes, records, sizes: world_size(
            nodes, records, dataclasses.replace(sizes, min_nodes=1)
        ),
    )


@_mutant("last call: a round takes all nodes", seed=4)
def above_maximum(patch: Patch) -> None:
    patch(
        selection,
        "choose",
        lambda _, document, survivors, newcomers, *rest: [*survivors, *newcomers],
    )


@_mutant("last call: the round completes as soon as the minimum is reached")
def no_last_call(patch: Patch) -> None:
    patch(growth, "last_call_seconds", lambda *_: 0.0)


@_mutant("spares: a waiting node restarts a full round", seed=3)
def spares_disturb(patch: Patch) -> None:
    def larger(view: View, document: RoundDocument) -> View:
        runs = document.phase is Phase.RUNNING
        return _under(view, max_nodes=view.rules.max_nodes + 1) if runs else view

    patch.leaders_view(larger)


@_mutant("spares: a waiting node is not admitted although there is room", seed=7)
def newcomers_wait(patch: Patch) -> None:
    patch(growth, "why_not_grow", lambda *_, **__: Reason("grow=never"))


@_mutant("loss: the loss of a participant does not restart the round", seed=331)
def loss_unseen(patch: Patch) -> None:
    patch.leaders_view(lambda view, document: _under(view, restart_on_loss=False))


@_mutant("loss: a participant that joins again does not restart the round of the others", seed=39)
def failure_unseen(patch: Patch) -> None:
    patch(
        situation,
        "has_rejoined",
        lambda has_rejoined, document, record, ended: (
            document.phase is not Phase.RUNNING and has_rejoined(document, record, ended)
        ),
    )


# Outages, and what proves that a node is silent.


@_mutant("outage: observation windows continue across an outage of the store", seed=37)
def no_window_after_outage(patch: Patch) -> None:
    def restart(original: Any, detector: Any, now: float, grace: float = 0.0, **rest: Any) -> None:
        if not grace:
            original(detector, now, **rest)

    patch(FailureDetector, "restart", restart)


@_mutant("outage: after an outage, a node that reconnects late gets no extra lease", seed=43)
def no_grace_after_outage(patch: Patch) -> None:
    patch(
        FailureDetector,
        "restart",
        lambda restart, detector, now, grace=0.0, **rest: restart(detector, now, **rest),
    )


@_mutant("outage: an outage through which a client repeated a request is none", seed=31000613)
def repeated_requests(patch: Patch) -> None:
    failed: set[Observer] = set()

    def fail(original: Any, seen: Observer) -> None:
        failed.add(seen)
        original(seen)

    def answer(original: Any, seen: Observer) -> None:
        fresh = seen.document_is_fresh
        if seen not in failed:
            seen.paused(1e9)  # As if it had paused by itself.
        failed.discard(seen)
        original(seen)
        seen.document_is_fresh = fresh

    patch(Observer, "failed", fail)
    patch(Observer, "answered", answer)


@_mutant(
    "outage: a node that is first seen after an outage gets no extra lease",
    seed=70000263,
    focus=Focus(kinds=("outage", "outage", "newcomer", "leave", "crash", "slow store")),
)
def no_grace_at_first_sight(patch: Patch) -> None:
    known: set[tuple[FailureDetector, str]] = set()

    def observe(
        original: Any,
        detector: FailureDetector,
        node: str,
        beat: int | None,
        asked: float,
        now: float,
    ) -> None:
        if (detector, node) not in known:
            detector.heard(node, now)
        known.add((detector, node))
        original(detector, node, beat, asked, now)

    def keep(original: Any, detector: FailureDetector, nodes: set[str]) -> None:
        original(detector, nodes)
        known.difference_update([it for it in known if it[0] is detector and it[1] not in nodes])

    patch(FailureDetector, "observe", observe)
    patch(FailureDetector, "keep", keep)


@_mutant("leases: a new leader judges nodes by observations from before it led", seed=451)
def no_window_at_takeover(patch: Patch) -> None:
    def restart(original: Any, detector: Any, now: float, grace: float = 0.0, **rest: Any) -> None:
        if grace:
            original(detector, now, grace, **rest)

    patch(FailureDetector, "restart", restart)


@_mutant(
    "leases: a slow answer counts as an observation at the time when it arrived",
    seed=84,
    focus=Focus(
        kinds=("slow store", "crash", "stall"),
        settings={"rates": (1.0, 1.0), "lease": 3.0, "latency": 0.3},
    ),
)
def answer_time(patch: Patch) -> None:
    patch(
        FailureDetector,
        "observe",
        lambda observe, detector, node, beat, asked, now: observe(detector, node, beat, now, now),
    )


@_mutant(
    "leases: documents written by the leader do not count as its heartbeats, although two "
    "amnesias within a lease hide the heartbeats",
    seed=141,
    focus=Focus(
        kinds=("amnesia",),
        settings={
            "rates": (0.84, 1.2),
            "lease": 2.0,
            "latency": 0.3,
            "request_timeout": 3.0,
            "other_settings": 0.0,
        },
    ),
)
def documents_are_no_beats(patch: Patch) -> None:
    patch(FailureDetector, "heard", lambda *_: None)


# A store that forgets.


@_mutant("a store that forgets: no node writes the document back after the store lost it", seed=13)
def no_write_back(patch: Patch) -> None:
    def forgetful(view: View) -> View:
        document, latest = view.document, view.latest
        if latest is None or latest.closed or (document and not document.is_of(latest)):
            return view
        forgot = document is None or document.place < latest.place
        return replace(view, document=None, latest=None) if forgot else view

    patch.view(forgetful)


@_mutant(
    "a store that forgets: a node accepts a document that is older than the one it remembers",
    seed=219,
    focus=_FAILS_OVER,
)
def newcomer_rules(patch: Patch) -> None:
    def trusting(view: View) -> View:
        document, latest = view.document, view.latest
        if document is None or latest is None or latest.closed or not document.is_of(latest):
            return view
        return replace(view, latest=document) if document.place < latest.place else view

    patch.view(trusting)


@_mutant(
    "a store that forgets: a node forgets that it has seen a later round",
    seed=215,
    focus=_FAILS_OVER,
)
def no_memory(patch: Patch) -> None:
    def view(original: Any, node: Node) -> View:
        found: View = original(node)
        document, latest = found.document, found.latest
        if document is None or latest is None or latest.closed or not document.is_of(latest):
            return found
        return replace(found, latest=document)

    def waiting(original: Any, view: View) -> int:
        document, mine = view.document, view.member
        # Else it restarts, needlessly, and so comes back.
        older = document and mine and document.is_of(mine) and document.round < mine.round
        return 0 if older else int(original(view))

    patch(Node, "view", view)
    patch(situation, "nodes_waiting", waiting)


@_mutant(
    "a store that forgets: a leader ignores nodes that run in a round it does not know", seed=402
)
def strays_unseen(patch: Patch) -> None:
    def blind(view: View, document: RoundDocument) -> View:
        known = {*document.previous, *document.still_running, view.me}
        records = {
            node: it
            for node, it in (view.records or {}).items()
            if it.status is not Status.RUN or node in known
        }
        forms = document.phase is Phase.FORMING and view.records is not None
        return replace(view, records=records) if forms else view

    patch.leaders_view(blind)


@_mutant(
    "a store that forgets: a leader numbers rounds without looking at the records",
    seed=5567,
    focus=Focus(
        kinds=("amnesia", "amnesia", "partition", "worker failure"),
        settings={"stop": 0.05, "max_restarts": 100, "last_call_timeout": 0.0, "min_nodes": 1},
    ),
)
def numbers_from_zero(patch: Patch) -> None:
    def blind(view: View, document: RoundDocument) -> View:
        def later(_: str, it: NodeRecord) -> bool:
            return it.incarnation == document.incarnation and it.round >= document.round

        forms = document.phase is Phase.FORMING
        return _with_records(view, later, round=document.round - 1) if forms else view

    patch.leaders_view(blind)


@_mutant("incarnations: two rounds with the same number are treated as the same round", seed=1154)
def numbers_alike(patch: Patch) -> None:
    def alike(document: RoundDocument, record: NodeRecord) -> NodeRecord:
        same = record.status is Status.RUN and record.round == document.round
        return replace(record, world_id=document.world_id) if same else record

    patch.view(
        lambda view: (
            view
            if view.document is None
            else replace(view, record=alike(view.document, view.record))
        )
    )
    patch(
        situation,
        "unconfirmed",
        lambda unconfirmed, document, records: unconfirmed(
            document, {node: alike(document, it) for node, it in records.items()}
        ),
    )


@_mutant("closed stays closed: a closed run continues", seed=3)
def closed_reopens(patch: Patch) -> None:
    def reopened(view: View) -> View:
        if view.latest is None or not view.latest.closed:
            return view
        latest = replace(view.latest, phase=Phase.RUNNING, outcome=None)
        same = view.document is view.latest
        return replace(view, latest=latest, document=latest if same else view.document)

    patch.view(reopened)


@_mutant("a round: a round runs before its participants have confirmed it", seed=5)
def no_confirmation(patch: Patch) -> None:
    patch(
        situation,
        "unconfirmed",
        lambda unconfirmed, document, records: [
            node for node in unconfirmed(document, records) if document.ranks[node] == 0
        ],
    )


@_mutant(
    "a round: the leader waits for a participant that dies while the round is being confirmed",
    seed=38,
)
def confirming_blind(patch: Patch) -> None:
    def blind(view: View, document: RoundDocument) -> View:
        if document.phase is not Phase.CONFIRMING:
            return view
        return _watching(view, lambda node, it: {"since": view.now, "looked": view.now})

    patch.leaders_view(blind)


@_mutant("one size: a node with other --nnodes is admitted", seed=6)
def mixed_nodes(patch: Patch) -> None:
    def agreeing(view: View) -> View:
        if not _has_another_size(view):
            return view
        assert view.document is not None
        return _under(view, min_nodes=view.document.min_nodes, max_nodes=view.document.max_nodes)

    patch.view(agreeing)
    patch(situation, "fits", lambda *_: True)


@_mutant(
    "loss: a participant that returns to a round that continued without it stays lost", seed=67
)
def lost_for_good(patch: Patch) -> None:
    patch.leaders_view(lambda view, document: _watching(view, lambda node, it: {"moved": False}))


# What an agent is told.


@_mutant(
    "a round: a failed join is not reported to the agent while the store is unreachable", seed=292
)
def silent_failure(patch: Patch) -> None:
    unanswered: dict[Node, Effect[Any]] = {}

    def run(original: Any, node: Node) -> Effects[None]:
        def changed(effect: Effect[Any]) -> Effect[Any] | None:
            away = unanswered.pop(node, None) is not None
            if away and isinstance(effect, FinishJoin) and effect.outcome.failure:
                return None
            unanswered[node] = effect
            return effect

        def answered(effect: Effect[Any], answer: Any) -> Any:
            unanswered.pop(node, None)
            return answer

        return _through(original(node), changed, answered)

    patch(Node, "run", run)


@_mutant(
    "consistency: if a round ended before a participant saw it run, the participant never "
    "starts it",
    seed=272,
)
def missed_round(patch: Patch) -> None:
    def too_late(view: View) -> View:
        latest = view.latest
        if latest is None or latest.phase is Phase.RUNNING or latest.ran is None:
            return view
        return replace(view, latest=replace(latest, ran=None))

    patch.view(too_late)


@_mutant(
    "incarnations: a node writes a round back to an empty store without looking for the tombstone",
    seed=355,
)
def swept_runs_again(patch: Patch) -> None:
    def sure(view: View) -> View:
        if view.document is not None or view.latest is None:
            return view
        return replace(view, without_tombstone=view.without_tombstone | {view.latest.incarnation})

    patch.view(sure)


@_mutant(
    "incarnations: that a run had no tombstone holds for as long as the document stays away",
    seed=1025,
    focus=Focus(
        kinds=("workers succeed", "amnesia"),
        settings={
            "sweep_after": 1.0,
            "unacknowledged": 0.1,
            "ambush": "amnesia",
            "latency": 0.05,
            "inline": 2,
        },
    ),
)
def no_tombstone_for_ever(patch: Patch) -> None:
    def init(original: Any, seen: Observer, node_id: str, rules: Rules, clock: Any) -> None:
        original(seen, node_id, dataclasses.replace(rules, sweep_after=1e9), clock)

    patch(Observer, "__init__", init)


@_mutant(
    "incarnations: the node that closes a run writes no tombstone",
    seed=258,
    focus=Focus(kinds=("close, then resubmit",), settings={"sweep_after": 1.0}),
)
def no_tombstone(patch: Patch) -> None:
    patch(
        cleanup,
        "let_expire",
        lambda let_expire, *of: _through(
            let_expire(*of),
            lambda effect: None if isinstance(effect, PutTombstone) else effect,
        ),
    )


@_mutant(
    "incarnations: the nodes of an older run overwrite the document of another live run of the "
    "same id",
    seed=31,
)
def older_run_wins(patch: Patch) -> None:
    def adopt(original: Any, seen: Observer, *of: Any, **named: Any) -> Effects[None]:
        before = seen.latest
        yield from original(seen, *of, **named)
        if before is not None and not before.is_of(seen.latest):
            seen.latest = before

    patch(Observer, "adopt", adopt)


@_mutant(
    "closed stays closed: a node that was replaced closes the run of the others",
    seed=542,
    focus=Focus(
        kinds=("partition", "partition", "close", "close", "crash"),
        settings={"rates": (1.0, 1.0), "lease": 2.0},
    ),
)
def anybody_closes(patch: Patch) -> None:
    patch(
        cleanup,
        "close_run",
        lambda close_run, *of, may_close, **named: close_run(
            *of, may_close=lambda document: True, **named
        ),
    )


@_mutant(
    "closed stays closed: a node closes any run of its id, also another incarnation",
    seed=273,
    focus=Focus(
        kinds=("amnesia", "partition", "close", "close"),
        settings={"rates": (1.0, 1.0), "lease": 6.0, "poll": 0.5},
    ),
)
def closes_any_run(patch: Patch) -> None:
    patch(
        cleanup,
        "close_run",
        lambda close_run, node_id, latest, *of, **named: close_run(node_id, None, *of, **named),
    )


@_mutant(
    "closed stays closed: a run that is closed as failed does not end the other agents", seed=3
)
def nobody_told_of_failure(patch: Patch) -> None:
    def waiting(original: Any, view: View) -> int:
        latest = view.latest
        closed = latest is not None and latest.closed and latest.is_of(view.member)
        return 0 if closed else int(original(view))

    patch(situation, "nodes_waiting", waiting)


# Nodes that are done.


@_mutant("done: a node whose workers succeeded is treated as lost", seed=17)
def done_is_gone(patch: Patch) -> None:
    patch(situation, "is_done", lambda *_: False)


@_mutant(
    "done: newcomers restart a round in which a node's workers have succeeded",
    seed=191,
    focus=Focus(kinds=("workers succeed", "newcomer", "newcomer")),
)
def done_is_disturbed(patch: Patch) -> None:
    def unaware(view: View, document: RoundDocument) -> View:
        come = any(
            it.asks and node not in document.ranks for node, it in (view.records or {}).items()
        )
        if document.phase is not Phase.RUNNING or not come:
            return view
        return _with_records(
            view,
            lambda node, it: it.status is Status.DONE and not view.is_lost(node),
            status=Status.RUN,
        )

    patch.leaders_view(unaware)


@_mutant("done: nodes that are done wait in torch's exit barrier for lost nodes", seed=1147)
def nobody_closes_what_is_done(patch: Patch) -> None:
    def wait(view: View, document: RoundDocument, action: Action) -> Action:
        records = {**(view.records or {}), view.me: view.record}
        all_done = all(situation.is_done(document, records.get(it)) for it in document.participants)
        closes = isinstance(action, Close) and action.outcome is Outcome.SUCCEEDED
        return Wait(view.rules.interval) if closes and not all_done else action

    patch.leaders_decision(wait)


@_mutant("leases: each node is judged by the leader's lease instead of its own", seed=70)
def one_lease_for_all(patch: Patch) -> None:
    _lost(patch, lambda view, node: view.confirmed_silence(node) >= view.rules.lease)


@_mutant(
    "leases: a delayed heartbeat overrides a later record of the same node",
    seed=45,
    focus=Focus(kinds=("leave", "workers succeed", "worker failure"), settings={"late": 0.3}),
)
def beats_go_back(patch: Patch) -> None:
    patch(RecordCache, "decode", lambda decode, cache, entries: decode(RecordCache(), entries))


@_mutant(
    "one size: a node with other --nnodes creates a run while the nodes of another run live", seed=6
)
def stray_founds_at_once(patch: Patch) -> None:
    patch.view(
        lambda view: (
            _watching(view, lambda node, it: {"moved": False, "looked": it.since + 1e9})
            if _has_another_size(view)
            else view
        )
    )


@_mutant("exclusivity: a node that has not yet asked for the next round is evicted at once", seed=2)
def evicted_at_once(patch: Patch) -> None:
    patch(decisions, "rejoin_patience", lambda *_: 0.0)


# Orders from people, and quarantine.


@_mutant("drain: a leader names a drained node that asks for a round", seed=34, focus=_DRAINS)
def drained_joins_again(patch: Patch) -> None:
    def keep_out(
        original: Any, policy: KeptOut, document: RoundDocument, records: Any, now: float
    ) -> Any:
        out = original(policy, document, records, now)
        if document.phase is not Phase.FORMING:
            return out
        return {it: why for it, why in out.items() if it not in records or not records[it].asks}

    patch(KeptOut, "keep_out", keep_out)


@_mutant("drain: a leader takes no drained node out of the round that runs", seed=4, focus=_DRAINS)
def drained_stays(patch: Patch) -> None:
    patch(
        KeptOut,
        "keep_out",
        lambda keep_out, policy, document, *of: {
            node: why
            for node, why in keep_out(policy, document, *of).items()
            if node not in document.ranks
        },
    )


@_mutant("exclusions: a leader names the nodes of excluded hosts", focus=_EXCLUDES)
def excluded_is_named(patch: Patch) -> None:
    patch(
        KeptOut,
        "keep_out",
        lambda keep_out, policy, document, *of: {
            node: why
            for node, why in keep_out(policy, document, *of).items()
            if node in document.drained
        },
    )


@_mutant(
    "exclusions: a leader takes an exclusion that has ended for one that holds",
    seed=4,
    focus=_EXCLUDES,
)
def excluded_for_ever(patch: Patch) -> None:
    patch(
        kept_out,
        "in_force",
        lambda _, document, now: {
            it.host: it for it in (*document.quarantined, *document.excluded)
        },
    )


@_mutant(
    "exclusions: a run keeps nodes that were excluded from the run before it",
    seed=33,
    focus=Focus(
        kinds=("close, then resubmit",),
        settings={
            "orders": tuple(Fault(at, "exclude") for at in (1.0, 2.0, 3.0, 4.0, 6.0)),
            "sweep_after": 1.0,
            "ambush": None,
        },
    ),
)
def does_not_look_back(patch: Patch) -> None:
    patch.leaders_view(lambda view, document: replace(view, carried=()) if view.carried else view)


@_mutant(
    "quarantine: hosts stay in quarantine though the run cannot have the minimum of nodes "
    "without them",
    seed=19,
    focus=Focus(
        kinds=_FLAPS.kinds,
        settings={
            "nodes": 3,
            "min_nodes": 3,
            "max_nodes": 3,
            "quarantine_after": 1,
            "quarantine_window": 10000.0,
        },
    ),
)
def quarantine_starves(patch: Patch) -> None:
    patch(quarantine, "let_in", lambda *_: None)


@_mutant(
    "quarantine: a host is put into quarantine the first time that it ends a round", focus=_FLAPS
)
def quarantined_at_once(patch: Patch) -> None:
    def quarantined(original: Any, at: Situation, cause: Cause) -> RoundDocument:
        most = min(1, at.rules.quarantine_after or 0)
        strict = dataclasses.replace(at.rules, quarantine_after=most)
        after: RoundDocument = original(replace(at, rules=strict), cause)
        return after

    patch(quarantine, "quarantined", quarantined)


@_mutant(
    "quarantine: by default a host is put into quarantine for workers that failed and start again",
    seed=28,
    focus=Focus(
        kinds=("worker failure",),
        settings={"quarantine_after": None, "quarantine_window": 30.0, "nodes": 3, "min_nodes": 1},
    ),
)
def quarantined_for_failures(patch: Patch) -> None:
    def blamed(original: Any, cause: Cause, rules: Rules) -> Any:
        return original(cause, dataclasses.replace(rules, quarantine_after=3))

    patch(quarantine, "blamed", blamed)


@_mutant(
    "drain: a leader does not restart a round that runs when people ask for it",
    seed=20,
    focus=_DRAINS,
)
def deaf_to_restart(patch: Patch) -> None:
    def lead(original: Any, view: View, document: RoundDocument) -> Action:
        deaf = replace(document, restart="")
        action: Action = original(view, deaf)
        return Write(deaf) if document.restart and isinstance(action, Wait) else action

    patch(decisions, "lead", lead)


@_mutant(
    "exclusivity: the leader waits for a node with a hanging agent as long as it sends heartbeats",
    seed=106,
)
def never_evicted(patch: Patch) -> None:
    patch(decisions, "rejoin_patience", lambda *_: 1e9)


@_mutant("spares: a spare keeps waiting after its round has ended", seed=166)
def spare_for_ever(patch: Patch) -> None:
    def waits(original: Any, view: View) -> bool:
        document = view.document
        if document is not None and document.phase is not Phase.RUNNING:
            view = _with_document(view, phase=Phase.RUNNING, participants=("somebody",))
        return bool(original(view))

    patch(situation, "waits_for_a_living_round", waits)


@_mutant("a round: the withdrawal of an abandoned join also cancels the next join", seed=6239)
def withdrawal_after_join(patch: Patch) -> None:
    withdrawn: set[Inbox] = set()

    def withdraw(original: Any, inbox: Inbox) -> None:
        original(inbox)
        withdrawn.add(inbox)

    def join(original: Any, inbox: Inbox, *how: Any) -> None:
        pending = inbox in withdrawn and inbox.any
        withdrawn.discard(inbox)
        original(inbox, *how)
        if pending:
            inbox.withdraw()

    patch(Inbox, "withdraw", withdraw)
    patch(Inbox, "join", join)


@_mutant("a round: an abandoned join still takes a rank", seed=197)
def join_goes_on(patch: Patch) -> None:
    patch(Inbox, "withdraw", lambda *_: None)


# What a run leaves in the store.


@_mutant("keys: no leader sets a deadline for the keys of a run", seed=4)
def no_expiry(patch: Patch) -> None:
    patch.effects(lambda node, effect: None if isinstance(effect, Expire) else effect)


@_mutant(
    "keys: a node that learns of its run's end does not delete the record that it has written "
    "since",
    seed=322,
    focus=Focus(kinds=("close, then resubmit",), settings={"sweep_after": 1.0}),
)
def zombie_leaves_its_record(patch: Patch) -> None:
    patch.effects(
        lambda node, effect: None if effect == Drop((NODES_PREFIX + node.id,)) else effect
    )


# Rank 0's TCPStore.


@_mutant("a fresh MASTER: a TCPStore that opens too late is used for the next round", seed=1636)
def old_master_is_taken(patch: Patch) -> None:
    opens: dict[Node, str] = {}

    def run(original: Any, node: Node) -> Effects[None]:
        def noted(effect: Effect[Any]) -> Effect[Any]:
            if isinstance(effect, OpenMaster):
                opens[node] = effect.key
            return effect

        return _through(original(node), noted)

    def finished(original: Any, node: Node, begun: Begin, result: Any) -> None:
        if isinstance(begun, OpenMaster):
            begun = replace(begun, key=opens.get(node, begun.key))
        original(node, begun, result)

    patch(Node, "run", run)
    patch(Node, "finished", finished)


@_mutant("a fresh MASTER: the round that is named does not tell rank 0 which MASTER was the last")
def forgets_the_last_master(patch: Patch) -> None:
    def naming(original: Any, at: Any) -> RoundDocument:
        named: RoundDocument = original(at)
        return replace(named, master=None)

    patch(rounds, "naming_participants", naming)


@_mutant(
    "a fresh MASTER: rank 0 that cannot open a TCPStore tries it again and again, and asks the "
    "store for nothing meanwhile",
    seed=16,
)
def opens_in_a_loop(patch: Patch) -> None:
    def open_master(original: Any, master: Master, world_id: str) -> Effects[Any]:
        while (found := (yield from original(master, world_id))) == 0.0:
            pass
        return found

    patch(Attempts, "seconds_left", lambda *_: 0.0)
    patch(Master, "open", open_master)


@_mutant(
    "a fresh MASTER: rank 0 that cannot open a TCPStore tries it again at once, after a look at"
    " the store",
    seed=2,
    focus=Focus(settings={"no_master": 0.9}),
)
def opens_without_a_pause(patch: Patch) -> None:
    patch(Attempts, "seconds_left", lambda *_: 0.0)


@_mutant("lead: a leader whose round runs lists the nodes again at once, though nothing is new")
def leads_without_a_pause(patch: Patch) -> None:
    def at_once(view: View, document: RoundDocument, action: Action) -> Action:
        waits = document.phase is Phase.RUNNING and isinstance(action, Wait)
        return Wait(0.0) if waits else action

    patch.leaders_decision(at_once)


@_mutant("a round: a node that is to list the records asks for nothing, and decides again", seed=6)
def decides_forever(patch: Patch) -> None:
    patch(Observer, "list_records", lambda *_: None)


@_mutant(
    "incarnations: a node that was in two runs asks for their tombstones in turn, forever",
    seed=458,
    focus=Focus(kinds=("amnesia", "fail-over", "crash", "newcomer")),
)
def one_tombstone_at_a_time(patch: Patch) -> None:
    last: dict[Observer, str] = {}

    def hear(original: Any, seen: Observer, incarnation: str, *what: Any) -> None:
        last[seen] = incarnation
        original(seen, incarnation, *what)

    patch(Observer, "hear_of_the_end", hear)
    patch(
        Observer,
        "without_tombstone",
        lambda asked, seen: asked(seen) & {last.get(seen, "")},
    )


@_mutant(
    "spares: a spare waits without end for a round that has lost all its nodes",
    seed=520,
    focus=Focus(kinds=("kill all, then resubmit",), settings={"restart_on_loss": False}),
)
def spares_of_the_dead(patch: Patch) -> None:
    patch(
        situation,
        "waits_for_a_living_round",
        lambda waits, view: waits(
            _with_document(view, absent=()) if view.document is not None else view
        ),
    )


# What a round says of its cause.


@_mutant("loss: a round that ends before it runs loses its cause", seed=77)
def cause_forgotten(patch: Patch) -> None:
    def lead(original: Any, view: View, document: RoundDocument) -> Action:
        action: Action = original(view, document)
        ends = isinstance(action, Write) and action.document.phase is Phase.FORMING
        if document.phase is Phase.CONFIRMING and ends:
            return original(view, replace(document, cause=Cause()))  # type: ignore[no-any-return]
        return action

    patch(decisions, "lead", lead)


@_mutant("loss: a node lost while a round forms is missing from the cause", seed=7)
def loss_unnamed(patch: Patch) -> None:
    def unnamed(view: View, document: RoundDocument, action: Action) -> Action:
        if not (isinstance(action, Write) and action.document.phase is Phase.CONFIRMING):
            return action
        cause, before = action.document.cause, document.cause
        if (cause.lost, cause.left) == (before.lost, before.left):
            return action
        cause = replace(cause, lost=before.lost, left=before.left)
        return Write(replace(action.document, cause=cause))

    patch.leaders_decision(unnamed)


@_mutant("a store that forgets: no node overwrites an unreadable document", seed=188)
def rubbish_stays(patch: Patch) -> None:
    def adopt(original: Any, seen: Observer, entry: Any, *known: Any) -> Effects[None]:
        if entry is not None:
            RoundDocument.decode(entry.value)
        yield from original(seen, entry, *known)

    patch(Observer, "adopt", adopt)


@_mutant(
    "a round: the c10d store of a finished round does not answer an agent's pending reads", seed=315
)
def waits_for_the_dead(patch: Patch) -> None:
    patch(Node, "over", lambda *_: False)


# Rosters that stand in shards.


@_mutant(
    "large rounds: nodes are taken for those of a round though not all of them were found",
    seed=51000359,
    focus=_APART,
)
def no_digest(patch: Patch) -> None:
    def complete(
        original: Any, document: RoundDocument, stored: Any, records: Mapping[str, NodeRecord]
    ) -> RoundDocument:
        document = original(document, stored, records)
        found = members_by_their_records(document, records)
        if found and document.roster is not None:
            document = replace(document, participants=found, roster=None)
        if found and document.previous_roster is not None:
            document = replace(document, previous=found, previous_roster=None)
        return document

    patch(roster, "complete", complete)


@_mutant(
    "large rounds: a leader whose store lost the shards waits for no node to write its record "
    "again",
    seed=51000190,
    focus=_APART,
)
def missing_is_lost(patch: Patch) -> None:
    def impatient(view: View, document: RoundDocument) -> View:
        if document.is_whole:
            return view
        return _watching(
            view, lambda node, it: {"looked": it.since + 1e9} if node == MISSING else {}
        )

    patch.leaders_view(impatient)


@_mutant(
    "large rounds: a leader does not write shards again that a fail-over has lost",
    seed=52002430,
    focus=_APART,
)
def shards_written_once(patch: Patch) -> None:
    written: dict[Node, set[str]] = {}

    def once(node: Node, effect: Effect[Any]) -> Effect[Any] | None:
        if not isinstance(effect, PutShards):
            return effect
        before = written.setdefault(node, set())
        if before.issuperset(effect.values):
            return None
        before.update(effect.values)
        return effect

    patch.effects(once)


@_mutant(
    "one document: what a leader decided before an outage is written after it, once the shards are",
    seed=52003284,
    focus=_APART,
)
def decides_before_an_outage(patch: Patch) -> None:
    def answered(original: Any, seen: Observer) -> None:
        outages = seen.outages.count
        original(seen)
        seen.outages.count = outages

    patch(Observer, "answered", answered)


@_mutant(
    "one size: a node with other --nnodes takes a run over whose nodes it has not found",
    seed=51001219,
    focus=Focus(
        kinds=("newcomer with other --nnodes", "crash", "partition", "fail-over"),
        settings=_APART.settings,
    ),
)
def roster_of_no_one(patch: Patch) -> None:
    def blind(view: View) -> View:
        if not _has_another_size(view) or view.document is None or view.document.is_whole:
            return view
        return _with_document(view, roster=None, previous_roster=None)

    patch.view(blind)


@_mutant(
    "large rounds: a node whose shard is lost does not know that it may close the run that it "
    "is in",
    seed=393,
    focus=Focus(kinds=("fail-over", "close", "worker failure"), settings={"inline": 1}),
)
def closes_without_its_rank(patch: Patch) -> None:
    patch(roster, "known_ranks", lambda *_: {})


# Many nodes that are late at once.


@_mutant(
    "doubt: a leader takes a large part of the world for lost without another lease",
    seed=26,
    focus=CALM,
)
def no_doubt(patch: Patch) -> None:
    def sure(view: View, document: RoundDocument) -> View:
        return _watching(view, lambda node, it: {"had_grace": True})

    patch.leaders_view(sure)


@_mutant("doubt: a leader doubts the same silence again and again", seed=20, focus=CALM)
def doubts_for_ever(patch: Patch) -> None:
    def doubt(original: Any, detector: FailureDetector, nodes: Any) -> None:
        for node in nodes:
            # As if it had beaten when it was last looked at.
            looked = detector.confirmed_silence(node) - detector.possible_silence(node, 0.0)
            detector.heard(node, looked)

    patch(FailureDetector, "doubt", doubt)


@_mutant(
    "done: a leader waits for the lease of a participant that is done and gone",
    seed=48,
    focus=Focus(kinds=("workers succeed", "partition", "crash", "stall")),
)
def lists_for_the_done(patch: Patch) -> None:
    def impatient(view: View, document: RoundDocument, action: Action) -> Action:
        if not isinstance(action, Wait) or document.phase is not Phase.RUNNING:
            return action
        left = [
            view.patience(node) - view.possible_silence(node)
            for node, it in (view.records or {}).items()
            if node != view.me and situation.is_done(document, it)
        ]
        if not left or view.until_first_lease is not None:
            return action
        soonest = max(0.0, min(left))
        sooner = action.seconds is None or soonest < action.seconds
        return Wait(soonest, action.enough) if sooner else action

    patch.leaders_decision(impatient)


@_mutant(
    "doubt: a leader that followed a silent one doubts those that fell silent with it once more",
    seed=414,
    focus=CALM,
)
def heirs_doubt_again(patch: Patch) -> None:
    # The leader doubts some because it has just followed a silent one: it has seen no silence of
    # theirs yet.
    patch(
        FailureDetector,
        "doubt",
        lambda doubt, detector, nodes: doubt(
            detector, [node for node in nodes if detector.confirmed_silence(node) > 0]
        ),
    )


# Units, segments and domains.


@_mutant("units and segments: a round takes all nodes that are ready", focus=_UNITS)
def odd_worlds(patch: Patch) -> None:
    patch(
        sizes,
        "world_size",
        lambda world_size, nodes, records, sizes: world_size(
            nodes, records, dataclasses.replace(sizes, node_unit=1)
        ),
    )


@_mutant(
    "units and segments: a newcomer ends a round before a whole unit has come", seed=3, focus=_UNITS
)
def unit_disturbs(patch: Patch) -> None:
    patch.leaders_view(
        lambda view, document: (
            _under(view, node_unit=1) if document.phase is Phase.RUNNING else view
        )
    )


@_mutant("units and segments: nodes are taken wherever they are", focus=_SEGMENTS)
def torn_segments(patch: Patch) -> None:
    def whole(of: Any) -> Any:
        return dataclasses.replace(of, segment=1, node_unit=of.node_unit * of.segment)

    patch(
        sizes,
        "world_size",
        lambda world_size, nodes, records, sizes: world_size(nodes, records, whole(sizes)),
    )
    patch(
        selection,
        "choose",
        lambda choose, document, survivors, newcomers, records, rules: choose(
            document, survivors, newcomers, records, whole(rules)
        ),
    )


@_mutant(
    "units and segments: survivors are taken first though their segment is not whole",
    seed=2,
    focus=_SEGMENTS,
)
def survivors_torn(patch: Patch) -> None:
    patch(
        selection,
        "choose",
        lambda choose, document, survivors, newcomers, records, rules: [*survivors, *newcomers][
            : len(choose(document, survivors, newcomers, records, rules))
        ],
    )


@_mutant("rank order: nodes are in their natural order", focus=_TOPOLOGY)
def scattered_domains(patch: Patch) -> None:
    patch(
        ranks,
        "order_ranks",
        lambda order_ranks, chosen, records, previous, rank_order, places=None: order_ranks(
            chosen, records, previous, "natural" if rank_order == "topology" else rank_order
        ),
    )


@_mutant(
    "rank order: a node that can host is put first without its domain", seed=264, focus=_TOPOLOGY
)
def rank_0_leaves_its_domain(patch: Patch) -> None:
    def order(original: Any, chosen: Any, records: Any, *how: Any) -> tuple[str, ...]:
        able = {node: replace(it, can_host=True) for node, it in records.items()}
        nodes = original(chosen, able, *how)
        first = next((node for node in nodes if records[node].can_host), None)
        return tuple(sorted(nodes, key=lambda node: node != first))

    patch(ranks, "order_ranks", order)


@_mutant("rank order: survivors are in their natural order", seed=77, focus=_TOPOLOGY)
def places_forgotten(patch: Patch) -> None:
    patch(
        ranks,
        "order_ranks",
        lambda order_ranks, chosen, records, previous, rank_order, places=None: order_ranks(
            chosen, records, previous, rank_order
        ),
    )


# Checks of health and of the network.


@_mutant(
    "unfit nodes: a round waits for a node whose check failed as for one that will ask for it",
    seed=83000006,
    focus=_UNFIT,
)
def waits_for_the_unfit(patch: Patch) -> None:
    def hopeful(view: View, document: RoundDocument) -> View:
        return _with_records(
            view, lambda node, it: it.is_unfit and document.names(node), status=Status.RUN
        )

    patch.leaders_view(hopeful)


@_mutant(
    "unfit nodes: a node whose check failed says so, and stays in its round or asks for one all"
    " the same",
    seed=83000000,
    focus=_UNFIT,
)
def joins_unfit(patch: Patch) -> None:
    patch.effects(
        lambda node, effect: (
            replace(effect, record=replace(effect.record, status=Status.JOIN))
            if isinstance(effect, PutRecord) and effect.record.is_unfit
            else effect
        )
    )


@_mutant("leave: a node that left waits for a heartbeat that is never due", seed=12)
def no_rest(patch: Patch) -> None:
    patch.effects(
        lambda node, effect: (
            replace(effect, seconds=0.0)
            if isinstance(effect, Park) and node.record.has_ended
            else effect
        )
    )


@_mutant(
    "network check: a round runs whatever its nodes have found",
    seed=6,
    focus=_parted("cut off", "unreachable"),
)
def links_ignored(patch: Patch) -> None:
    patch(
        network,
        "verdict_on",
        lambda _, document, *of: Verdict(True, still_not_to_host(document.faults)),
    )


@_mutant(
    "network check: a node confirms its rank without having dialled rank 0", focus=_parted("hidden")
)
def rank_0_undialled(patch: Patch) -> None:
    def take_for_granted(node: Node, effect: Effect[Any]) -> Effect[Any] | None:
        if not isinstance(effect, DialPeer) or effect.exchanges:
            return effect
        node.finished(effect, 0.0)
        return None

    patch.effects(take_for_granted)


@_mutant(
    "network check: a rank 0 that nobody reached is rank 0 of the next round too",
    seed=72,
    focus=_parted("hidden"),
)
def rank_0_for_ever(patch: Patch) -> None:
    patch(network, "able_to_host", lambda _, document, records, chosen: records)


@_mutant(
    "network check: a node is left out that failed with one other",
    seed=40,
    focus=_parted("bad link"),
)
def one_failure_is_enough(patch: Patch) -> None:
    def verdict_on(original: Any, *of: Any) -> Verdict:
        verdict: Verdict = original(*of)
        if not verdict.failed or verdict.faults.out:
            return verdict
        out = ((verdict.failed[0][0], "network: no data passed"),)
        return Verdict(False, replace(verdict.faults, out=out), verdict.failed)

    patch(network, "verdict_on", verdict_on)


@_mutant(
    "network check: a node that failed with several others stays in the round",
    seed=61,
    focus=_parted("cut off", "unreachable"),
)
def nobody_at_fault(patch: Patch) -> None:
    def verdict_on(original: Any, *of: Any) -> Verdict:
        verdict: Verdict = original(*of)
        if not verdict.faults.out:
            return verdict
        return Verdict(True, replace(verdict.faults, out=(), rounds=0), verdict.failed)

    patch(network, "verdict_on", verdict_on)


@_mutant("network check: the next round pairs the same nodes", seed=10, focus=_parted("bad link"))
def always_the_same_partner(patch: Patch) -> None:
    patch(network, "partner_in", lambda partner_in, ranks, me, round_: partner_in(ranks, me, 0))


@_mutant(
    "network check: a dial that fails is forgotten once the other one has dialled",
    seed=2,
    focus=_parted("unreachable", nodes=3, min_nodes=3, max_nodes=3),
)
def one_way_speaks_for_both(patch: Patch) -> None:
    def verdict_on(original: Any, document: RoundDocument, records: Any) -> Any:
        found = {node: records[node].dials for node in document.participants}
        passed = {(it.partner, node) for node, it in found.items() if it and not it.why}
        kept = tuple(link for link in document.faults.links if link not in passed)
        faults = replace(document.faults, links=kept)
        return original(replace(document, faults=faults), records)

    patch(network, "verdict_on", verdict_on)


@_mutant(
    "network check: a node that is left out asks again at once",
    seed=2,
    focus=_parted("cut off", "unreachable", "cut off"),
)
def unheard_verdict(patch: Patch) -> None:
    def decide(original: Any, view: View) -> Action:
        action: Action = original(view)
        if action == Fail(Failure.AT_FAULT) and view.document is not None:
            faults = replace(view.document.faults, out=())
            action = original(_with_document(view, faults=faults))
        return action

    patch(decisions, "decide", decide)


@_mutant(
    "network check: a running round is ended for a node that was cut off",
    seed=2,
    focus=_parted("cut off", "unreachable", min_nodes=2, max_nodes=6, nodes=4),
)
def ends_rounds_for_the_cut_off(patch: Patch) -> None:
    patch.leaders_view(
        lambda view, document: (
            _with_records(view, lambda _, it: it.was_at_fault, was_at_fault=False)
            if document.phase is Phase.RUNNING
            else view
        )
    )


@_mutant(
    "network check: a round that forms takes a node that was cut off, without need",
    seed=2,
    focus=_parted("cut off", "unreachable", min_nodes=2, max_nodes=6, nodes=5),
)
def tries_the_cut_off_at_once(patch: Patch) -> None:
    patch.leaders_view(
        lambda view, document: (
            _with_records(view, lambda _, it: it.was_at_fault, was_at_fault=False)
            if document.phase is Phase.FORMING
            else view
        )
    )


@_mutant(
    "network check: no round runs as long as one link is bad",
    seed=332,
    focus=_parted("bad link", "bad link", nodes=4, min_nodes=3, one_stays_bad=True),
)
def one_bad_link_for_ever(patch: Patch) -> None:
    def verdict_on(original: Any, document: RoundDocument, *of: Any) -> Verdict:
        verdict: Verdict = original(document, *of)
        if not (verdict.runs and verdict.failed):
            return verdict
        faults = replace(verdict.faults, rounds=document.faults.rounds + 1)
        return Verdict(False, faults, verdict.failed)

    patch(network, "verdict_on", verdict_on)


@_mutant(
    "network check: a leader that waits for a rank 0 which is dead finds out nothing",
    seed=122,
    focus=_parted("slow"),
)
def deaf_while_it_checks(patch: Patch) -> None:
    patch.view(lambda view: replace(view, checks=False) if view.checks else view)


# A node that is not heard, and fencing tokens.


@_mutant(
    "not heard: a node that the store refuses stops its workers after its lease", focus=_REFUSED
)
def stays_though_refused(patch: Patch) -> None:
    patch(Contact, "denied", lambda *_: None)


@_mutant(
    "not heard: a heartbeat that the store accepts ends a refusal",
    seed=2,
    focus=Focus(
        kinds=("outage",),
        settings={"refusals": tuple(Fault(3.0 * n, "some") for n in range(6))},
    ),
)
def refused_for_ever(patch: Patch) -> None:
    denied: set[Contact] = set()

    def deny(original: Any, contact: Contact) -> None:
        denied.add(contact)
        original(contact)

    def accept(original: Any, contact: Contact, sent: float) -> None:
        original(contact, sent)
        if contact in denied:
            contact.denied()

    patch(Contact, "denied", deny)
    patch(Contact, "accepted", accept)


@_mutant(
    "not heard: where the store refuses all nodes of a round, as their links tell, none stops",
    seed=70,
    focus=_REFUSED_LINKED,
)
def deaf_to_others_that_are_refused(patch: Patch) -> None:
    patch(Contact, "hear", lambda *_: None)


@_mutant(
    "not heard: a refused node stops though its neighbours are refused too, if others are not",
    focus=_REFUSED_LINKED,
)
def tells_nobody_that_it_is_lost(patch: Patch) -> None:
    patch(
        Contact,
        "hear",
        lambda hear, contact, others: hear(contact, {*others} - {Standing.LOST}),
    )
    patch(
        Neighbours,
        "_standing",
        lambda standing, mine: (
            Standing.FAILING if standing(mine) is Standing.LOST else standing(mine)
        ),
    )


@_mutant(
    "not heard: a link that says nothing may be that of a node which the store accepts",
    focus=_REFUSED_LINKED,
)
def takes_all_others_for_refused(patch: Patch) -> None:
    patch(Contact, "hear", lambda hear, contact, others: hear(contact, ()))


def _contact_under(patch: Patch, **rules: Any) -> None:
    """Judge one's own contact with the store under other settings."""
    patch(
        Contact,
        "__init__",
        lambda init, contact, of, clock: init(contact, dataclasses.replace(of, **rules), clock),
    )


@_mutant(
    "not heard: with on_outage=stop a node without an accepted heartbeat stops its workers",
    focus=Focus(kinds=("partition", "outage"), settings={"outage_limit": 2.0}),
)
def deaf_to_outage_limit(patch: Patch) -> None:
    _contact_under(patch, outage_limit=1e9)


@_mutant(
    "not heard: a store that comes back and refuses for less than an interval stops nobody",
    seed=2,
    focus=Focus(
        kinds=("outage",),
        settings={"refusals": tuple(Fault(1.0 * n, "all") for n in range(20))},
    ),
)
def stops_at_the_first_refusal(patch: Patch) -> None:
    _contact_under(patch, interval=0.0)


@_mutant(
    "not heard: in a closed run nobody beats, and the round that runs goes on",
    seed=20,
    focus=Focus(kinds=("close",), settings={"outage_limit": 2.0}),
)
def cut_off_in_a_closed_run(patch: Patch) -> None:
    looking: list[Node] = []

    def is_cut_off(original: Any, node: Node) -> bool:
        looking.append(node)
        try:
            return bool(original(node))
        finally:
            looking.pop()

    patch(Node, "is_cut_off", is_cut_off)
    patch(Observer, "closed", lambda closed, seen: not looking and closed(seen))


@_mutant(
    "replaced: a node stops its workers once it reads that a later round ran without it",
    seed=3,
    focus=Focus(kinds=("partition", "partition", "stall")),
)
def runs_on_replaced(patch: Patch) -> None:
    def waiting(original: Any, view: View) -> int:
        document, mine = view.document, view.member
        if document is None or mine is None or document.closed or not document.is_of(mine):
            return int(original(view))
        return int(original(view)) if document.round > mine.round + 2 else 0

    patch(situation, "nodes_waiting", waiting)


def _tokens(patch: Patch, token: Callable[[View, RoundDocument], int]) -> None:
    """Give each naming of ranks this fencing token."""

    def renumbered(view: View, document: RoundDocument, action: Action) -> Action:
        if isinstance(action, Write) and action.document.fencing_token != document.fencing_token:
            return Write(replace(action.document, fencing_token=token(view, document)))
        return action

    patch.leaders_decision(renumbered)


@_mutant(
    "fencing token: a fencing token grows with each round, whatever the clocks of leaders show",
    seed=42,
    focus=Focus(kinds=("leave", "newcomer"), settings={"last_call_timeout": 0.0, "min_nodes": 1}),
)
def token_by_the_clock(patch: Patch) -> None:
    _tokens(patch, lambda view, document: int(view.wall * 1000))


@_mutant(
    "fencing token: a fencing token is larger than all before also where the store lost them",
    seed=2,
    focus=Focus(kinds=("amnesia", "worker failure", "kill all, then resubmit")),
)
def token_by_the_count(patch: Patch) -> None:
    _tokens(patch, lambda view, document: document.fencing_token + 1)


# When a run grows, and when it gives up.


def _holds_under(patch: Patch, **rules: Any) -> None:
    """Hold newcomers under other settings."""
    patch(
        growth,
        "why_not_grow",
        lambda asked, view, *of, **named: asked(_under(view, **rules), *of, **named),
    )


@_mutant(
    "growth: a round runs for min_uptime before it is ended for newcomers",
    focus=_grows(min_uptime=5.0),
)
def ends_rounds_too_soon(patch: Patch) -> None:
    _holds_under(patch, min_uptime=0.0)


@_mutant(
    "growth: resize_interval passes between two rounds that let newcomers in",
    focus=_grows(resize_interval=8.0),
)
def grows_too_often(patch: Patch) -> None:
    _holds_under(patch, resize_interval=0.0)


@_mutant(
    "growth: newcomers that do not fill the round wait for the last call while it runs",
    focus=_grows(last_call_timeout=3.0),
)
def grows_without_a_last_call(patch: Patch) -> None:
    _holds_under(patch, last_call_timeout=0.0)


@_mutant(
    "growth: with grow=checkpoint newcomers wait until a worker names the moment",
    focus=_grows(grow="checkpoint"),
)
def grows_unasked(patch: Patch) -> None:
    _holds_under(patch, grow="now")


@_mutant(
    "growth: a restart after a loss waits for a replacement",
    seed=2,
    focus=_grows(replacement_timeout=2.0),
)
def no_last_call_after_a_loss(patch: Patch) -> None:
    patch(
        growth,
        "last_call_seconds",
        lambda last_call_seconds, rules, document, *of: (
            last_call_seconds(rules, document, *of) if document.round == 0 else 0.0
        ),
    )


# How a node parts from a run.


@_mutant("parting: an agent that fails leaves a run that has enough", focus=_FAILS_LATE)
def ends_what_others_can_go_on_with(patch: Patch) -> None:
    patch(parting, "goes_on_without", lambda *_: False)


@_mutant("parting: a newcomer whose workers fail leaves too", seed=9, focus=_FAILS_LATE)
def never_new(patch: Patch) -> None:
    patch(Service, "is_new", lambda *_: False)


@_mutant(
    "who counts when a node parts: each of the nodes that leave at once looks at the others once "
    "it has said that it leaves",
    seed=5,
    focus=_all_fail("all agents"),
)
def looks_before_it_has_left(patch: Patch) -> None:
    def others_go_on(original: Any, *of: Any, left: bool = False) -> Effects[bool]:
        return True if left else (yield from original(*of))

    patch(Service, "_others_go_on", others_go_on)


@_mutant(
    "who counts when a node parts: nobody leaves a run that is too small without it: nodes that"
    " have left do not count",
    seed=9,
    focus=_all_fail("all agents"),
)
def counts_those_that_left(patch: Patch) -> None:
    def goes_on(original: Any, me: str, document: RoundDocument, records: Any, *of: Any) -> bool:
        records = {it: replace(was, status=Status.JOIN) for it, was in (records or {}).items()}
        return bool(original(me, document, records or None, *of))

    patch(parting, "goes_on_without", goes_on)


@_mutant(
    "who counts when a node parts: a newcomer whose workers fail does not count on those that "
    "came with it, or since",
    seed=2,
    focus=Focus(
        kinds=("leave", "newcomer", "newcomer"),
        settings={**_FAILS, "min_nodes": 3, "nodes": 3, "max_restarts": 0},
    ),
)
def counts_newcomers(patch: Patch) -> None:
    patch(parting, "goes_on_without", lambda goes_on, *of: goes_on(*of[:-1], Names()))


@_mutant(
    "parting under torchrun: under torchrun a newcomer whose workers fail since another node "
    "was lost stays",
    seed=3,
    focus=Focus(
        kinds=("newcomer",),
        settings={
            **_FAILS,
            **_CALM,
            "torchrun": True,
            "max_restarts": 1,
            "rates": (1.0, 1.0),
            "staleness": 0.0,
            "poll": 0.0,
            "other_settings": 0.0,
            "failures": tuple(Fault(1.0 * n, "after a loss") for n in range(20)),
        },
    ),
)
def leaves_after_a_loss(patch: Patch) -> None:
    patch(
        Service,
        "_follows_from_a_loss",
        lambda follows, service, last, is_over: follows(service, last, lambda: True),
    )


@_mutant(
    "parting: a node is new to a run for its probation only", seed=9, focus=_all_fail("all workers")
)
def new_for_ever(patch: Patch) -> None:
    patch(Service, "is_new", lambda *_: True)


@_mutant(
    "no progress: only rounds that ran for less than no_progress_uptime count against a run",
    focus=_grows(no_progress_rounds=2, no_progress_uptime=0.5),
)
def gives_up_too_soon(patch: Patch) -> None:
    def note(original: Any, policy: NoProgress, view: View, at: Any, after: RoundDocument) -> Any:
        was = at.document
        if (was.phase, after.phase) == (Phase.RUNNING, Phase.FORMING):
            return replace(after, short_rounds=was.short_rounds + 1)
        return original(policy, view, at, after)

    patch(NoProgress, "note", note)


@_mutant("accusations: a node found gone is lost without having been asked", focus=_LINKED)
def asks_nobody(patch: Patch) -> None:
    patch(accusations, "answered_within", lambda answered_within, view, record: 0.0)


@_mutant("accusations: an accused node that lives answers at once", focus=_LINKED)
def does_not_answer(patch: Patch) -> None:
    patch(Neighbours, "_accusation", lambda *_: None)


@_mutant("accusations: a heartbeat that comes after the accusation is an answer", focus=_LINKED)
def hears_no_answer(patch: Patch) -> None:
    def with_verdicts(
        original: Any, view: View, document: RoundDocument, records: Any
    ) -> RoundDocument:
        beats = {it.node: it.beat for it in document.accused}
        old = {node: replace(it, beat=beats.get(node, it.beat)) for node, it in records.items()}
        deaf = replace(view, unanswered=dict.fromkeys(beats, 60.0))
        after: RoundDocument = original(deaf, document, old)
        return after

    patch(accusations, "with_verdicts", with_verdicts)


@_mutant(
    "accusations: a node that finds the leader gone asks it, and leads where it is silent",
    138,
    _DIES,
)
def waits_for_a_gone_leader(patch: Patch) -> None:
    patch(decisions, "_ask_the_leader", lambda *_: None)


@_mutant("accusations: the leader asks whom others have found gone", 68, _DIES)
def heeds_no_accusation(patch: Patch) -> None:
    patch(accusations, "naming_the_accused", lambda *_: None)


@_mutant("accusations: a node whose link broke says so in its record, and rings", 35, _DIES)
def keeps_what_it_found(patch: Patch) -> None:
    patch(Neighbours, "report_dead", lambda *_: None)


@_mutant(
    "accusations: a node that confirmed its rank has links soon, though the round does not run",
    525,
    _DIES,
)
def links_once_it_runs(patch: Patch) -> None:
    def owe(original: Any, neighbours: Neighbours, seconds: float = 0.0, nodes: int = 0) -> None:
        if seconds < 1.0:
            original(neighbours, seconds, nodes)

    patch(Neighbours, "owe_links", owe)


@_mutant(
    "accusations: a node lost by an accusation does not count again in the next round", 35, _DIES
)
def takes_the_gone_for_strays(patch: Patch) -> None:
    def lost_by_accusation(original: Any, document: RoundDocument, records: Any) -> dict[str, str]:
        gone: dict[str, str] = original(document, records)
        return gone if document.phase is Phase.RUNNING else {}

    patch(accusations, "lost_by_accusation", lost_by_accusation)


_SAVES = Focus(
    settings={
        "pace": 0.02,
        "save_timeout": 20.0,
        "notices": tuple(1.0 * n for n in range(1, 20)),
    },
)


@_mutant("checkpoint: the run agrees only on a step that no worker has passed", focus=_SAVES)
def agrees_on_a_refused_step(patch: Patch) -> None:
    def accepts(original: Any, record: NodeRecord, step: int) -> bool | None:
        return None if original(record, step) is None else True

    patch(NodeRecord, "accepts", accepts)


@_mutant("checkpoint: the run agrees only once every node has answered", seed=298, focus=_SAVES)
def agrees_before_all_have_answered(patch: Patch) -> None:
    def accepts(original: Any, record: NodeRecord, step: int) -> bool | None:
        answer: bool | None = original(record, step)
        return True if answer is None else answer

    patch(NodeRecord, "accepts", accepts)


@_mutant("checkpoint: a node refuses a step that one of its workers has passed", focus=_SAVES)
def accepts_a_step_that_was_passed(patch: Patch) -> None:
    def vote(original: Any, mine: OwnCheckpoint, step: int) -> None:
        mine._workers.propose(step)
        mine._open = step
        mine._heartbeat.change(rings=True, vote=(step, step - 1))

    patch(OwnCheckpoint, "_vote", vote)


@_mutant("checkpoint: a node that has accepted a step waits for the verdict", focus=_SAVES)
def saves_before_the_run_has_agreed(patch: Patch) -> None:
    def vote(original: Any, mine: OwnCheckpoint, step: int) -> None:
        original(mine, step)
        mine._workers.settle(step, True)

    patch(OwnCheckpoint, "_vote", vote)


FORGETS_A_STEP = Focus(
    settings={
        "nodes": 4, "max_nodes": 4, "pace": 0.1, "save_timeout": 6.0, "notices": (10.2,),
        "unfit": 0.3, "outage_limit": 2.0, "orders": (Fault(6.8, "exclude"),),
    },
)  # fmt: skip


@_mutant(
    "checkpoint: the records bring back an agreement that the store has lost",
    seed=8101171,
    focus=FORGETS_A_STEP,
)
def forgets_the_agreement(patch: Patch) -> None:
    patch(checkpoint, "_lost", lambda *_: None)


_HANGS = Focus(
    settings={
        "pace": 0.1,
        "step_timeout": 5.0,
        "hangs": (3.0, 9.0, 15.0),
        "save_timeout": 2.0,
        "notices": tuple(2.0 * n for n in range(1, 8)),
    },
)


@_mutant("stalls: the round ends for a worker that does no step", seed=38, focus=_HANGS)
def ends_no_hang(patch: Patch) -> None:
    patch(decisions, "stuck", lambda *_: None)


@_mutant(
    "stalls: a worker stands still for step_timeout before the round ends", seed=24, focus=_HANGS
)
def ends_a_hang_too_soon(patch: Patch) -> None:
    def stall_of(original: Any, progress: Progress | None, rules: Rules) -> Any:
        longer = progress and replace(progress, stood=20 * progress.stood)
        return original(longer, rules)

    patch(heartbeat, "stall_of", stall_of)
