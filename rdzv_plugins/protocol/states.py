"""The state of a node, in one word: the same in tables, on the page, in metrics and as data."""

from __future__ import annotations

from enum import StrEnum

from rdzv_plugins.protocol.documents import NodeRecord, Outcome, Phase, RoundDocument, Status
from rdzv_plugins.protocol.policies.kept_out import exclusion_of
from rdzv_plugins.protocol.situation import fits

# A node's heartbeats are up to 1.1 intervals apart; the other 0.1 is for slow requests.
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
    """Its host is kept out for a time."""
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
        """Whether people should see a node in this state first."""
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
    """Whether the node should have sent a heartbeat in ``silence`` seconds."""
    return silence >= (_DUE_INTERVALS * record.interval if record is not None else 0.0)


def state_of(
    document: RoundDocument,
    node: str,
    record: NodeRecord | None,
    *,
    silent: bool,
    lost: bool,
    now: float,
) -> State:
    """The state of the node.

    Args:
        record: the node's record; None: it has no record.
        silent, lost: a heartbeat is overdue, the lease ran out, on the caller's monotonic clock.
        now: seconds since the epoch; exclusions end by it.
    """
    called_lost = node in document.absent
    if record is None:
        return State.LOST if lost or called_lost else State.UNKNOWN
    asks, ended = record.asks, record.has_ended
    # In a closed run only nodes whose workers go on send heartbeats.
    beats = not document.closed or document.outcome is Outcome.CLOSED
    forms = document.phase is Phase.FORMING
    out = not document.closed and node not in document.ranks
    excluded = out and exclusion_of(document, record, now) is not None
    of_it = record.world_id == document.world_id
    joins = (forms and fits(record, document)) or (document.closed and record.status is Status.JOIN)
    table = (
        (ended and record.status is Status.DONE, State.DONE),
        (ended and node in document.drained, State.DRAINED),
        (ended, State.LEFT),
        (called_lost, State.LOST),
        (beats and (lost or _is_left_behind(document, node, record)), State.LOST),
        (beats and silent, State.SILENT),
        (record.is_unfit, State.UNFIT),
        (out and node in document.drained, State.DRAINED),
        (excluded, State.EXCLUDED),
        (out and node in document.still_running and not asks, State.EVICTED),
        (asks and (joins or node in document.ranks), State.JOINING),
        (asks, State.WAITING),
        (document.phase is Phase.CONFIRMING and of_it, State.READY),
    )
    return next((state for holds, state in table if holds), State.RUNNING)


def _is_left_behind(document: RoundDocument, node: str, record: NodeRecord) -> bool:
    """Whether the leader has called the node lost, and its record has not changed since."""
    ran = record.status is Status.RUN and record.incarnation == document.incarnation
    known = document.is_whole and not document.names(node) and node not in document.still_running
    return ran and known and record.round < document.round
