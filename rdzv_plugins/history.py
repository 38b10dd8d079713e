"""The last rounds of a run: time, members, duration and reason. For display only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.protocol.documents import HISTORY_KEY, RoundDocument

__all__ = ["Row", "append", "read"]

_LONGEST = 50
_NAMED = ("lost", "left", "failed", "joined", "evicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A round that began to run, or the closing of the run.

    Attributes:
        at: wall-clock time of the writer, ISO 8601 in UTC.
        seconds: from the round's first document until the round ran.
        nodes: the number of participants.
        members: names of the first participants, in rank order.
        reason: why the round formed, in words.
        lost, left, failed, joined, evicted: nodes that were the reason; see `documents.Cause`.
        outcome: of the run, if this row is its closing.
    """

    round: int
    phase: str
    at: str
    seconds: float
    nodes: int
    members: tuple[str, ...]
    reason: str
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    outcome: str | None = None


def append(
    client: KeyValueClient, document: RoundDocument, seconds: float, members: tuple[str, ...]
) -> None:
    """Add a row and drop the oldest beyond fifty. Two writers at once may lose a row."""
    row = Row(
        round=document.round,
        phase=document.phase.value,
        at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        seconds=round(seconds, 6),
        nodes=len(document.participants),
        members=members,
        reason=document.reason,
        **{name: getattr(document.cause, name).first for name in _NAMED},
        outcome=document.outcome,
    )
    rows = [asdict(item) for item in [*read(client), row]][-_LONGEST:]
    client.put(HISTORY_KEY, json.dumps(rows, separators=(",", ":")).encode())


def read(client: KeyValueClient) -> list[Row]:
    """The rows, oldest first; none if the history is unreadable."""
    entry = client.get(HISTORY_KEY)
    try:
        items = json.loads(entry.value) if entry else []
        named = ("members", *_NAMED)
        return [
            Row(**{**item, **{name: tuple(item.get(name, ())) for name in named}}) for item in items
        ]
    except (ValueError, TypeError, KeyError):
        return []
