"""How a run ends, and who deletes its keys.

`close_run` gives the keys of a closed run their end, after which the store shows none of them.
While ranks train on after a close by request, they put that end off (`Writer.keep_id`). A run that
nobody closes ends by the deadline that its leader renews (`Lead.renew`). `delete_earlier_rounds`
deletes what earlier rounds left, once the next round runs. A node deletes its own record when it
finds the run closed (`Writer.clear_away`, `Writer.ask_tombstone`). `rdzv clean` deletes a whole
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from rdzv_plugins.kv import Entry, RendezvousConnectionError, Version
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    CorruptDocumentError,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
)
from rdzv_plugins.protocol.effects import (
    CompareAndSet,
    Drop,
    DropStores,
    Effects,
    Expire,
    PutTombstone,
    Read,
    ReadTombstone,
    RecordHistory,
    Ring,
    Tell,
    after_conflict,
)
from rdzv_plugins.protocol.own_rank import with_rank
from rdzv_plugins.protocol.roster import apart, known_ranks
from rdzv_plugins.protocol.round_record import record_of
from rdzv_plugins.protocol.rules import INLINE

_TOMBSTONE_ATTEMPTS = 3


def close_run(
    node_id: str,
    latest: RoundDocument | None,
    outcome: Outcome,
    why: str,
    sweep_after: float,
    may_close: Callable[[RoundDocument], bool],
    told: bool = False,
) -> Effects[bool]:
    """Close a run, whatever its state, and let its keys expire. Rule: closed stays closed.

    Returns whether the run is closed, by this node or another.

    Args:
        latest: the run to close, as this node last saw it, even if the store has forgotten it; no
            other run of the id is closed. A document that was never stored founds a closed run.
            None: close whatever run is there.
        sweep_after: seconds for which its keys stay.
        may_close: whether the run may be closed with this document; called again whenever the
            document changes.
        told: this node's log says already that another node closed the run.
    """
    entry = yield from Read(STATE_KEY)
    conflicts = 0
    while True:
        document = _readable(entry, latest)
        if document is None and latest is not None:
            if (yield from ReadTombstone(latest.incarnation)):
                # Delete this node's record: keys that were written after the sweep never expire.
                yield from Drop((NODES_PREFIX + node_id,))
                return True
            # A waiting node needs only the end, not the names of thousands of nodes.
            document, _ = apart(latest, INLINE)
        if document is None or (latest is not None and not document.is_of(latest)):
            return False
        if not document.is_whole:
            document = yield from with_rank(document, node_id, known_ranks(latest))
        closed = _closed(document, node_id, outcome, why, may_close)
        if closed is None:
            yield from _leave_closed(document, entry, why, sweep_after, told)
            if document.outcome is Outcome.CLOSED and latest is not None:
                # This node no longer trains in the closed run.
                yield from Drop((NODES_PREFIX + node_id,))
            return document.closed
        expected = entry.version if entry else None
        entry, written = yield from CompareAndSet(STATE_KEY, closed.encode(), expected)
        if written:
            break
        conflicts += 1
        yield from after_conflict(conflicts)
    if not document.closed:
        yield from Tell("closed", f"the run is closed: {why}")
        # Joining nodes wait for the document; the leader waits for its bell.
        yield from Ring(node_id)
        yield from RecordHistory(record_of(closed, {}, kept=sweep_after))
        yield from let_expire(closed, entry and entry.version, sweep_after)
    return True


def _closed(
    document: RoundDocument,
    node_id: str,
    outcome: Outcome,
    why: str,
    may_close: Callable[[RoundDocument], bool],
) -> RoundDocument | None:
    """The document that closes the run; None: the run is closed already, or must not be closed."""
    if document.closed:
        if (document.outcome, outcome) != (Outcome.CLOSED, Outcome.FAILED):
            return None
        # Mark the run as failed: nodes that still train would wait for this node's workers forever.
        failed = replace(document, outcome=outcome, cause=Cause(note=why))
        return failed if document.names(node_id) else None
    if not may_close(document):
        return None
    # Without the time of the end (since=0), which the archive has.
    return replace(document, phase=Phase.CLOSED, outcome=outcome, cause=Cause(note=why), since=0)


def _leave_closed(
    document: RoundDocument, entry: Entry | None, why: str, sweep_after: float, told: bool
) -> Effects[None]:
    """Finish closing a run if this node closed it; otherwise log that it is closed."""
    if not document.closed:
        return
    mine = document.cause.note == why
    if not mine and not told:
        yield from Tell("closed", f"the run is closed: {document.reason}")
    if mine and not document.expires and entry is not None:
        # Only the node that closed the run finishes: at a job's end thousands of nodes come here.
        yield from let_expire(document, entry.version, sweep_after)


def _readable(entry: Entry | None, latest: RoundDocument | None) -> RoundDocument | None:
    """The document; None: there is none, or it is damaged and a valid one is known."""
    try:
        return RoundDocument.decode(entry.value) if entry else None
    except CorruptDocumentError:
        if latest is None:
            raise
        return None


def let_expire(closed: RoundDocument, version: Version | None, sweep_after: float) -> Effects[None]:
    """Free the id of a closed run after ``sweep_after`` seconds, once.

    The tombstone comes first: after the sweep only it tells a node that the run ended.
    """
    failure: RendezvousConnectionError | None = None
    for attempt in range(_TOMBSTONE_ATTEMPTS):
        try:
            yield from PutTombstone(closed)
            failure = None
        except RendezvousConnectionError as error:
            failure = error
        if attempt == 0:
            # If the store lost the run meanwhile, a new run may have the id: do not expire its
            # keys.
            document = _readable((yield from Read(STATE_KEY)), closed)
            if document is None or not (document.closed and document.is_of(closed)):
                return
            # If the store refuses only the tombstone, the id must become free too.
            yield from Expire(sweep_after)
        if failure is None:
            break
    else:
        yield from Tell(
            "tombstone",
            "this node cannot note that the run has ended; if a node that was cut off writes it "
            f"back, rdzv clean deletes it: {failure}",
            ("clean",),
        )
    done = replace(closed, expires=True)
    yield from CompareAndSet(STATE_KEY, done.encode(), version)


def delete_earlier_rounds(
    runs: RoundDocument,
    records: Mapping[str, NodeRecord],
    is_lost: Callable[[str], bool],
    outdated: Iterable[str],
) -> Effects[None]:
    """Delete the c10d stores and records of earlier rounds.

    Args:
        runs: the round that runs; only its leader calls this.
        outdated: the keys of shards of earlier documents.
    """
    yield from DropStores(runs.incarnation, runs.round)
    dead = [
        node
        for node, record in records.items()
        if node not in runs.ranks and (is_lost(node) or record.has_ended)
    ]
    old = (*outdated, *(NODES_PREFIX + node for node in dead))
    if old:
        yield from Drop(old)
