"""Orders of people to a run: take nodes out, let nodes in, begin a new round, ask who lives.

An order is part of the round document; the leader or a successor carries it out. It outlives the
command that gave it, and needs only the nodes themselves.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from rdzv_plugins.kv import Entry
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Accusation,
    Exclusion,
    NodeRecord,
    Phase,
    RoundDocument,
    labels,
)
from rdzv_plugins.protocol.effects import CompareAndSet, Effects, List, Read, Ring, after_conflict
from rdzv_plugins.protocol.policies import keeps_out
from rdzv_plugins.protocol.policies.kept_out import without_hosts
from rdzv_plugins.protocol.record_cache import RecordCache
from rdzv_plugins.protocol.situation import is_done
from rdzv_plugins.protocol.sizes import Sizes, needed, world_size

_LABEL = re.compile(r"(.+?)(?:\[(\d+)\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The effect of an order; the document has the order, unless nothing had to change.

    Attributes:
        document: the document with the order; None: there is no such run, or it is closed.
        ids: the ids of the nodes that the order is about.
        nodes: the labels of these nodes.
        unknown: names that no node of the run has.
        done: nodes whose workers succeeded, so that the order changed nothing.
        remaining: how many nodes remain that could be in a round, as far as their records tell.
        lacks: how many more nodes a round needs.
        size: how many of the remaining nodes a round takes; 0: too few remain.
        stops: without the order there are enough nodes for a round, and with it too few.
    """

    document: RoundDocument | None = None
    ids: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    remaining: int = 0
    lacks: int = 0
    size: int = 0
    stops: bool = False


def nodes_named(name: str, records: Mapping[str, NodeRecord]) -> list[str]:
    """The nodes that have not ended and have this id or label, or are on this host."""
    host, pid = host_and_pid(name)
    return [
        node
        for node, record in records.items()
        if (name == node or (host in record.called and pid in ("", str(record.pid))))
        and not record.has_ended
    ]


def host_and_pid(name: str) -> tuple[str, str]:
    """The host and the process id of a label; the process id of a mere host name is empty."""
    found = _LABEL.fullmatch(name.lower())
    return (found[1], found[2] or "") if found is not None else (name, "")


def _always(_: Given) -> bool:
    return True


def drain(
    giver: str,
    names: Collection[str],
    now: Callable[[], float],
    may: Callable[[Given], bool] = _always,
    is_silent: Callable[[str], bool] = lambda _: False,
    why: str = "",
) -> Effects[Given]:
    """Take nodes out of the run for good; changes nothing if one of the names is unknown.

    Args:
        giver: the id that rings the leader's bell.
        names: names of nodes, or of hosts, which stand for all their nodes.
        now: seconds since the epoch.
        may: asked before anything is changed, with what the order would do; False: change nothing.
        is_silent: whether a node is known to be dead.
    """
    document, records = yield from _look()
    if document is None:
        return Given()
    found = {name: nodes_named(name, records) for name in names}
    # If the store has lost a participant's record, its id is a name too.
    found |= {name: [name] for name, nodes in found.items() if not nodes and document.names(name)}
    if unknown := tuple(name for name, nodes in found.items() if not nodes):
        return Given(document=document, unknown=unknown)
    nodes = [node for of_name in found.values() for node in of_name]

    def drained(run: RoundDocument) -> RoundDocument:
        fresh = [node for node in dict.fromkeys(nodes) if node not in run.drained]
        return replace(run, drained=(*run.drained, *fresh), drain_why=why)

    def given(run: RoundDocument) -> Given:
        return _given(run, records, nodes, is_silent, now())

    return (yield from _give_if(giver, document, drained, given, may))


def restart(
    giver: str,
    why: str,
    now: Callable[[], float],
    is_silent: Callable[[str], bool] = lambda _: False,
) -> Effects[Given]:
    """Begin a new round, unless one forms already or a node is done; arguments as for `drain`."""
    document, records = yield from _look()
    if document is None:
        return Given()
    if done := [node for node, it in records.items() if is_done(document, it)]:
        return Given(document=document, done=tuple(sorted(labels(records, done))))

    def restarted(run: RoundDocument) -> RoundDocument:
        return replace(run, restart=why) if run.phase is Phase.RUNNING else run

    after = yield from give(giver, document.incarnation, restarted)
    return Given() if after is None else _given(after, records, (), is_silent, now())


def resize(giver: str) -> Effects[Given]:
    """Let the waiting nodes (`Given.nodes`) in, even if the run's options keep them out."""
    document, records = yield from _look()
    if document is None:
        return Given()
    waiting = [
        node for node, record in records.items() if record.asks and node not in document.ranks
    ]
    if not waiting:
        return Given(document=document)

    def resized(run: RoundDocument) -> RoundDocument:
        return replace(run, resize=True) if run.phase is Phase.RUNNING else run

    after = yield from give(giver, document.incarnation, resized)
    if after is None:
        return Given()
    return Given(
        document=after, nodes=tuple(sorted(labels(records, waiting))), remaining=len(records)
    )


def exclude(
    giver: str,
    exclusion: Exclusion,
    now: Callable[[], float],
    may: Callable[[Given], bool] = _always,
    is_silent: Callable[[str], bool] = lambda _: False,
) -> Effects[Given]:
    """Keep the nodes of a host out of the rounds of a run; arguments as for `drain`."""
    document, records = yield from _look()
    if document is None:
        return Given()

    def excluded(run: RoundDocument) -> RoundDocument:
        return replace(run, excluded=(*without_hosts(run.excluded, [exclusion.host]), exclusion))

    def given(run: RoundDocument) -> Given:
        return _given(run, records, nodes_named(exclusion.host, records), is_silent, now())

    return (yield from _give_if(giver, document, excluded, given, may))


def include(giver: str, hosts: Collection[str]) -> Effects[bool]:
    """End exclusions and quarantines of these hosts; returns whether there were any."""
    document, _ = yield from _look()
    if document is None:
        return False

    def included(run: RoundDocument) -> RoundDocument:
        return replace(
            run,
            excluded=without_hosts(run.excluded, hosts),
            quarantined=without_hosts(run.quarantined, hosts),
            strikes=tuple(it for it in run.strikes if it.host not in hosts),
        )

    yield from give(giver, document.incarnation, included)
    return any(it.host in hosts for it in (*document.excluded, *document.quarantined))


def accuse(giver: str, names: Collection[str]) -> Effects[Given]:
    """Ask nodes of the run to show that they live; changes nothing if a name is unknown.

    Live nodes of `Given.ids` answer by a beat above that in `Given.document`. No node is lost by
    this alone.
    """
    document, records = yield from _look()
    if document is None:
        return Given()
    found = {name: nodes_named(name, records) for name in names}
    if unknown := tuple(name for name, nodes in found.items() if not nodes):
        return Given(document=document, unknown=unknown)
    nodes = tuple(dict.fromkeys(node for of_name in found.values() for node in of_name))

    def asked(run: RoundDocument) -> RoundDocument:
        kept = [it for it in run.accused if it.node not in nodes]
        known = {it.node: it for it in run.accused}
        fresh = []
        for node in nodes:
            before, beat = known.get(node), records[node].beat
            # The run asked this node already, or called it lost: do not postpone its answer.
            fresh.append(before if before and before.beat >= beat else Accusation(node, beat))
        return replace(run, accused=(*kept, *fresh))

    after = yield from give(giver, document.incarnation, asked)
    if after is None:
        return Given()
    return Given(document=after, ids=nodes, nodes=tuple(sorted(labels(records, nodes))))


def give(
    giver: str, incarnation: str, change: Callable[[RoundDocument], RoundDocument]
) -> Effects[RoundDocument | None]:
    """Change the document of this incarnation unless it is closed, and tell the leader.

    Returns the document with the change; None: that run is over.
    """
    entry: Entry | None = yield from Read(STATE_KEY)
    conflicts = 0
    while True:
        document = RoundDocument.decode(entry.value) if entry is not None else None
        if document is None or document.closed or document.incarnation != incarnation:
            return None
        after = change(document)
        if after == document:
            return document
        after, expected = after.edited, entry.version if entry is not None else None
        entry, written = yield from CompareAndSet(STATE_KEY, after.encode(), expected)
        if written:
            yield from Ring(giver)
            return after
        conflicts += 1
        yield from after_conflict(conflicts)


def _look() -> Effects[tuple[RoundDocument | None, dict[str, NodeRecord]]]:
    """The document of an open run, and the records of its nodes."""
    entry = yield from Read(STATE_KEY)
    document = RoundDocument.decode(entry.value) if entry is not None else None
    if document is None or document.closed:
        return None, {}
    entries = yield from List(NODES_PREFIX)
    return document, RecordCache().decode(entries)


def _give_if(
    giver: str,
    document: RoundDocument,
    change: Callable[[RoundDocument], RoundDocument],
    given: Callable[[RoundDocument], Given],
    may: Callable[[Given], bool],
) -> Effects[Given]:
    """Give an order if ``may`` accepts its effect."""
    had_enough = not given(document).lacks

    def of(run: RoundDocument) -> Given:
        found = given(run)
        return dataclasses.replace(found, stops=had_enough and found.lacks > 0)

    if not may(would := of(change(document))):
        return would
    after = yield from give(giver, document.incarnation, change)
    return Given() if after is None else of(after)


def _given(
    document: RoundDocument,
    records: Mapping[str, NodeRecord],
    nodes: Collection[str],
    is_silent: Callable[[str], bool],
    now: float,
) -> Given:
    out = keeps_out(document, records, now)
    left = [
        node
        for node, it in records.items()
        if node not in out and not it.is_over and not is_silent(node)
    ]
    sizes = Sizes.as_stored(document, records.get(document.leader or ""))
    return Given(
        document=document,
        ids=tuple(dict.fromkeys(nodes)),
        nodes=tuple(sorted(set(labels(records, nodes)))),
        remaining=len(left),
        lacks=needed(left, records, sizes),
        size=world_size(left, records, sizes),
    )
