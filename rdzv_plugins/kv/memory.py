"""A store in one process: the reference of the contract, and the store of fast tests."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from rdzv_plugins.kv.contract import (
    Capabilities,
    ClientClosedError,
    Entry,
    KeyValueClient,
    Version,
    parse_counter,
)


@dataclass(slots=True)
class MemoryServer:
    """The shared state of an in-memory store's clients."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    namespaces: dict[str, dict[str, Entry]] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    writes: int = 0

    def keys(self, namespace: str) -> dict[str, Entry]:
        """The namespace, empty if it has expired; the caller holds ``changed``."""
        if time.monotonic() >= self.deadlines.get(namespace, float("inf")):
            del self.deadlines[namespace]
            self.namespaces.pop(namespace, None)
        return self.namespaces.setdefault(namespace, {})


class MemoryClient(KeyValueClient):
    """The shortest implementation of the contract."""

    name = "memory"
    capabilities = Capabilities(
        push=True, linearizable=True, batch=True, ttl=True, max_value_bytes=512 * 1024 * 1024
    )

    def __init__(self, server: MemoryServer, namespace: str) -> None:
        self._server = server
        self._namespace = namespace
        self._interrupts = 0
        self._closed = False

    def _keys(self) -> dict[str, Entry]:
        if self._closed:
            raise ClientClosedError("memory")
        return self._server.keys(self._namespace)

    def _write(self, key: str, value: bytes) -> Entry:
        self.check_size(key, value)
        self._server.writes += 1
        # A str, because the version True would equal the version 1.
        entry = Entry(bytes(value), str(self._server.writes))
        self._keys()[key] = entry
        self._server.changed.notify_all()
        return entry

    def get(self, key: str) -> Entry | None:
        with self._server.changed:
            return self._keys().get(key)

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        with self._server.changed:
            current = self._keys().get(key)
            if (current.version if current else None) != expected:
                return current, False
            return self._write(key, value), True

    def put(self, key: str, value: bytes) -> Version:
        with self._server.changed:
            return self._write(key, value).version

    def delete(self, key: str) -> None:
        with self._server.changed:
            self._keys().pop(key, None)

    def list(self, prefix: str) -> dict[str, Entry]:
        with self._server.changed:
            return {key: entry for key, entry in self._keys().items() if key.startswith(prefix)}

    def add(self, key: str, delta: int) -> int:
        with self._server.changed:
            current = self._keys().get(key)
            total = parse_counter(key, current.value if current else b"0") + delta
            self._write(key, str(total).encode())
            return total

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        deadline = time.monotonic() + timeout
        with self._server.changed:
            interrupts = self._interrupts
            while not self._closed and self._interrupts == interrupts:
                entry = self._keys().get(key)
                if entry is not None and entry.version != version:
                    return entry
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._server.changed.wait(remaining)
        return None

    def interrupt(self) -> None:
        with self._server.changed:
            self._interrupts += 1
            self._server.changed.notify_all()

    def expire(self, seconds: float) -> None:
        with self._server.changed:
            self._keys()
            self._server.deadlines[self._namespace] = time.monotonic() + seconds

    def close(self) -> None:
        with self._server.changed:
            self._closed = True
            self._server.changed.notify_all()
