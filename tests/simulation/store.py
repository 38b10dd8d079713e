"""The store of a simulated run: compare-and-set, watches, stale listings, expiry, and its faults.

It forgets everything, fails over to a replica that lacks the last seconds of writes, or holds a
document that nobody can read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from rdzv_plugins.kv import Entry, Version
from rdzv_plugins.protocol.documents import Outcome

__all__ = ["Store"]

Wake = Callable[[Entry], None]


class Store:
    """Keys and values; every call happens at one instant of virtual time.

    Args:
        now: the virtual time.
        at: plans a call.
        remembers: whether `listing` may be asked for the past.
        reverts: whether `fail_over` may be called.
    """

    def __init__(
        self,
        now: Callable[[], float],
        at: Callable[..., None],
        remembers: bool,
        reverts: bool,
    ) -> None:
        self._now = now
        self._at = at
        self._remembers = remembers
        self._reverts = reverts
        self._versions = 0
        self._past: dict[str, tuple[list[float], list[Entry | None]]] = {}
        self._undo: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        self._parked: dict[str, dict[object, tuple[Version | None, Wake]]] = {}
        self.entries: dict[str, Entry] = {}
        self.tombstones: dict[str, Outcome] = {}
        """Outside of what expires."""
        self.deadline: float | None = None
        """When it reads as empty, unless that is moved on."""
        self.epoch = 0
        """How often it has lost what was written; what expires is not lost."""
        self.expired = 0
        """How often its deadline came, and when it last did."""
        self.expired_at = 0.0

    def put(self, key: str, value: bytes) -> Entry:
        self._versions += 1
        entry = Entry(value, self._versions)
        self._set(key, entry)
        parked = self._parked.get(key)
        if parked:
            for owner, (version, wake) in list(parked.items()):
                if version != entry.version:
                    del parked[owner]
                    wake(entry)
        return entry

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        current = self.entries.get(key)
        if (current.version if current else None) != expected:
            return current, False
        return self.put(key, value), True

    def delete(self, key: str) -> None:
        if key in self.entries:
            self._set(key, None)

    def listing(self, prefix: str, as_of: Callable[[], float] | None) -> dict[str, Entry]:
        """The entries under ``prefix``, each as it stood at ``as_of()``; None: now."""
        if as_of is None:
            return {key: entry for key, entry in self.entries.items() if key.startswith(prefix)}
        found = {}
        for key, (times, values) in self._past.items():
            if key.startswith(prefix):
                place = bisect_right(times, as_of())
                entry = values[place - 1] if place else None
                if entry is not None:
                    found[key] = entry
        return found

    def park(self, owner: object, key: str, version: Version | None, wake: Wake) -> None:
        """Call ``wake`` once, when the key's version differs; at once if it does."""
        entry = self.entries.get(key)
        if entry is not None and entry.version != version:
            wake(entry)
        else:
            self._parked.setdefault(key, {})[owner] = version, wake

    def unpark(self, owner: object, key: str) -> None:
        self._parked.get(key, {}).pop(owner, None)

    def put_tombstone(self, incarnation: str, outcome: Outcome) -> None:
        if self._reverts:
            self._note_undo(self.tombstones.pop, incarnation, None)
        self.tombstones[incarnation] = outcome

    def expire(self, seconds: float) -> None:
        """Read as empty from then on, unless told otherwise."""
        if self._reverts:
            self._note_undo(self._move_deadline, self.deadline)
        self._move_deadline(self._now() + seconds)

    def _move_deadline(self, deadline: float | None) -> None:
        self.deadline = deadline
        if deadline is not None:
            self._at(deadline, self._expire)

    def _expire(self) -> None:
        if self.deadline is not None and self._now() >= self.deadline:
            self._clear()
            self.expired += 1
            self.expired_at = self._now()

    def forget(self) -> None:
        """Restart empty. Nobody who is parked hears of it."""
        self._clear()
        self.tombstones.clear()
        self.epoch += 1

    def fail_over(self, seconds: float) -> int:
        """Lose the last seconds of writes; returns how many."""
        since, lost = self._now() - seconds, 0
        while self._undo and self._undo[-1][0] >= since:
            _, revert, arguments = self._undo.pop()
            revert(*arguments)
            lost += 1
        self.epoch += 1
        return lost

    def _clear(self) -> None:
        for key in list(self.entries):
            self._set(key, None)
        self.deadline = None
        self._undo.clear()

    def _set(self, key: str, entry: Entry | None) -> None:
        if self._reverts:
            self._note_undo(self._put_back, key, self.entries.get(key))
        self._put_back(key, entry)

    def _put_back(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self.entries.pop(key, None)
        else:
            self.entries[key] = entry
        if self._remembers:
            times, values = self._past.setdefault(key, ([], []))
            times.append(self._now())
            values.append(entry)

    def _note_undo(self, revert: Callable[..., Any], *arguments: Any) -> None:
        self._undo.append((self._now(), revert, arguments))
