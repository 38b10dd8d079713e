"""The state of a node, in one word: the same in tables, on the page, in metrics and as data."""

from __future__ import annotations

from enum import StrEnum

from rdzv_plugins.protocol.documents import NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.policies.kept_out import exclusion_of
from rdzv_plugins.protocol.situation import fits

# A node's heartbeats are up to 1.1 intervals apart; the rest is for slow requests.
_DUE_INTERVALS = 1.2


class State(StrEnum):
    """The state of a node, as far as an observer can know. ``docs/commands.md`` has the table."""

    JOINING = "joining"
    """It asks for the round that forms, or has not confirmed its rank yet."""
    READY = "ready"
    """It has confirmed its rank; the round begins to run once all have."""
    RUNNING = "running"
    """Its workers run, as far as its record tells."""
    WAITING = "waiting"
    """It asks for a round, and the present round has begun without it; a spare does so."""
    DONE = "done"
    """Its workers succeeded."""
    LEFT = "left"
    """It said that it leaves."""
    DRAINED = "drained"
    """A person took it out of the run for good."""
    EXCLUDED = "excluded"
    """Its host is kept out for a time, and it waits."""
    UNFIT = "unfit"
    """Its check failed, and it tries again."""
    EVICTED = "evicted"
    """It did not ask for the round in time, so the others go on without it."""
    SILENT = "silent"
    """A heartbeat is overdue."""
    LOST = "lost"
    """Its lease ran out, or the others go on without it for that reason."""
    UNKNOWN = "unknown"
    """It has no record."""

    @property
    def is_odd(self) -> bool:
        """Whether people see it first."""
        return self in _ODD


_ODD = frozenset(
    (
        State.LOST,
        State.SILENT,
        State.UNFIT,
        State.EVICTED,
        State.EXCLUDED,
        State.DRAINED,
        State.UNKNOWN,
    )
)


def is_due(silence: float, record: NodeRecord | None) -> bool:
    """Whether a heartbeat of the node was due in these seconds."""
    return silence >= (_DUE_INTERVALS * record.interval if record is not None else 0.0)


def state_of(
    document: RoundDocument | None,
    node: str,
    record: NodeRecord | None,
    *,
    silent: bool,
    lost: bool,
    now: float,
) -> State:
    """The state of the node.

    Args:
        record: the node's own; None: it has none.
        silent, lost: a heartbeat is overdue, or its lease ran out, on the caller's monotonic clock.
        now: seconds since the epoch; exclusions end by it.
    """
    if record is None:
        out = lost or (document is not None and node in document.lost)
        return State.LOST if out else State.UNKNOWN
    if record.has_ended:
        drained = document is not None and node in document.drained
        if record.status is Status.DONE:
            return State.DONE
        return State.DRAINED if drained else State.LEFT
    if document is not None and node in document.lost:
        return State.LOST
    if document is None or not document.closed:  # In a closed run nobody sends heartbeats.
        if lost or (document is not None and _is_left_behind(document, node, record)):
            return State.LOST
        if silent:
            return State.SILENT
    if record.is_unfit:
        return State.UNFIT
    if document is None:
        return State.JOINING if record.asks else State.RUNNING
    if node not in document.ranks and not document.closed:
        if node in document.drained:
            return State.DRAINED
        if node in document.evicted and not record.asks:
            return State.EVICTED
        if exclusion_of(document, record.address, now) is not None:
            return State.EXCLUDED
    if record.asks:
        forms = document.phase is Phase.FORMING and fits(record, document)
        asked = document.closed and record.status is Status.JOIN
        joins = forms or asked or node in document.ranks
        return State.JOINING if joins else State.WAITING
    confirms = document.phase is Phase.CONFIRMING and record.world_id == document.world_id
    return State.READY if confirms else State.RUNNING


def _is_left_behind(document: RoundDocument, node: str, record: NodeRecord) -> bool:
    """Whether the leader has called the node lost, whose record has not changed since."""
    ran = record.status is Status.RUN and record.incarnation == document.incarnation
    known = document.is_whole and not document.names(node) and node not in document.evicted
    return ran and known and record.round < document.round
