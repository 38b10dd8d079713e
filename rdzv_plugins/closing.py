"""What ends: a run, and what a round leaves behind when the next one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rdzv_plugins.documents import NODES_PREFIX, STATE_KEY, NodeRecord, Phase, RoundDocument, Wants
from rdzv_plugins.kv import Entry
from rdzv_plugins.steps import Chronicle, CompareAndSet, Drop, DropStores, Read, Ring, Steps

__all__ = ["close_run", "tidy_up"]

_MEMBERS_IN_HISTORY = 16


def close_run(node_id: str, latest: RoundDocument, reason: str) -> Steps:
    """Close a run, whatever its state. Rule 14.

    Args:
        node_id: who closes.
        latest: what to close where there is no document.
        reason: for people.
    """
    entry: Entry | None = yield Read(STATE_KEY)
    written = False
    while not written:
        document = RoundDocument.decode(entry.value) if entry else latest
        if document.phase is Phase.CLOSED:
            return
        closed = replace(document, phase=Phase.CLOSED, reason=reason)
        expected = entry.version if entry else None
        entry, written = yield CompareAndSet(STATE_KEY, closed.encode(), expected)
    # Joiners wait for the document; the leader waits for its bell.
    yield Ring(node_id)
    yield Chronicle(closed, 0.0, ())


def tidy_up(
    runs: RoundDocument,
    seconds: float,
    records: Mapping[str, NodeRecord],
    is_silent: Callable[[str], bool],
) -> Steps:
    """Note the round that runs, and drop the stores and the records of what was before it.

    Args:
        runs: the round; only its leader tidies up.
        seconds: how long it took to form.
        records: all nodes'.
        is_silent: whether a node's lease has run out.
    """
    first = runs.participants[:_MEMBERS_IN_HISTORY]
    members = tuple(records[node].label for node in first if node in records)
    yield Chronicle(runs, seconds, members)
    yield DropStores(runs.round)
    dead = [
        node
        for node, record in records.items()
        if node not in runs.ranks and (record.wants is Wants.LEFT or is_silent(node))
    ]
    if dead:
        yield Drop(tuple(NODES_PREFIX + node for node in dead))
