"""Records of ended runs of an id, outside the run's own keys, which expire soon after the end.

A node that was disconnected while its run was closed and expired finds an empty store, as after a
loss of the store's data. The node reads these records before it writes its old round back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.protocol.documents import Outcome, RoundDocument

__all__ = ["Tombstones", "tombstone_run_id"]

_KEPT_SECONDS = 7 * 24 * 3600.0
# The most records of one run id, however often the id is used again.
_MOST = 64


class Tombstones:
    """The ended incarnations of one run id; each call opens its own connection: calls are rare.

    Args:
        open: connects to the namespace of the run id that `tombstone_run_id` gives.
    """

    def __init__(self, open: Callable[[], KeyValueClient]) -> None:
        self._open = open

    def put(self, ended: RoundDocument) -> None:
        """Record that this incarnation ended; all records expire a week after the last one."""
        outcome = ended.outcome or Outcome.CLOSED
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        story = {"outcome": outcome.value, "round": ended.round, "reason": ended.reason, "at": at}
        with closing(self._open()) as client:
            client.put(ended.incarnation, json.dumps(story).encode())
            client.expire(_KEPT_SECONDS)
            stones = client.list("")
            if len(stones) > _MOST:
                by_age = sorted(stones, key=lambda key: str(_read(stones[key].value).get("at", "")))
                client.delete_many(by_age[: len(stones) - _MOST])

    def get(self, incarnation: str) -> Outcome | None:
        """How this incarnation ended; None: no end is recorded."""
        with closing(self._open()) as client:
            entry = client.get(incarnation)
        if entry is None:
            return None
        try:
            return Outcome(str(_read(entry.value)["outcome"]))
        except (KeyError, ValueError):
            return Outcome.CLOSED


def tombstone_run_id(run_id: str) -> str:
    """The run id whose namespace holds the tombstones of ``run_id``."""
    return f"!ended/{run_id}"


def _read(value: bytes) -> dict[str, object]:
    try:
        story = json.loads(value)
    except ValueError:
        return {}
    return story if isinstance(story, dict) else {}
