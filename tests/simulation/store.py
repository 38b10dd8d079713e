"""The store of a simulated run: real compare-and-set, watches, stale listings, and amnesia."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from rdzv_plugins.documents import Outcome
from rdzv_plugins.kv import Entry, Version

__all__ = ["Store"]

Wake = Callable[[Entry], None]


class Store:
    """Keys and values; every call happens at one instant of virtual time.

    Args:
        now: the virtual time.
        remembers: whether `listing` may be asked for the past.
    """

    def __init__(self, now: Callable[[], float], remembers: bool) -> None:
        self._now = now
        self._remembers = remembers
        self._versions = 0
        self._past: dict[str, tuple[list[float], list[Entry | None]]] = {}
        self._parked: dict[str, dict[object, tuple[Version | None, Wake]]] = {}
        self.entries: dict[str, Entry] = {}
        self.tombstones: dict[str, Outcome] = {}
        self.epoch = 0
        """How often it has forgotten everything."""

    def put(self, key: str, value: bytes) -> Entry:
        self._versions += 1
        entry = self.entries[key] = Entry(value, self._versions)
        self._note(key, entry)
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
        if self.entries.pop(key, None) is not None:
            self._note(key, None)

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

    def forget(self) -> None:
        """Restart empty. Nobody who is parked hears of it."""
        for key in list(self.entries):
            self.delete(key)
        self.epoch += 1

    def _note(self, key: str, entry: Entry | None) -> None:
        if self._remembers:
            times, values = self._past.setdefault(key, ([], []))
            times.append(self._now())
            values.append(entry)
