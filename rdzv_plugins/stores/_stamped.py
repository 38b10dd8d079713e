"""Compare-and-set in two requests, for stores whose own version of a key is not enough.

Every stored value begins with its stamp, eight random bytes that are new with each write, and the
stamp is the version: it never comes back, neither after a delete nor in a server that lost its
memory; two equal values are two writes; and a write whose answer was lost is known again by it.

A write first looks at the key and compares the stamps, then writes on condition that the key is
still what it saw. So a refusal costs one read and no write.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from torch.distributed.elastic.rendezvous.api import RendezvousError

from rdzv_plugins.kv import (
    ClientClosedError,
    Entry,
    KeyValueClient,
    Version,
    parse_counter,
)
from rdzv_plugins.kv.retry import retry
from rdzv_plugins.stores._counting import outlast, uncounted

__all__ = ["STAMP_BYTES", "Seen", "StampedClient", "entry_of", "segments"]

T = TypeVar("T")

STAMP_BYTES = 8


@dataclass(frozen=True, slots=True)
class Seen:
    """A key as it was read: its entry, and what the store needs to write over exactly that."""

    entry: Entry | None
    guard: Any


class StampedClient(KeyValueClient):
    """A client whose store gives `_see` and `_replace`; the rest of compare-and-set is here.

    Requests get their deadline on the monotonic clock, in seconds.
    """

    def __init__(self, where: str, request_timeout: float) -> None:
        self._where = where
        self._timeout = request_timeout
        self._closed = False

    @abstractmethod
    def _see(self, key: str, deadline: float) -> Seen:
        """Read a key; linearizable."""

    @abstractmethod
    def _replace(self, key: str, stored: bytes, seen: Seen, deadline: float) -> bool:
        """Write if the key is still as seen; False: it surely was not written, look again."""

    @abstractmethod
    def _is_passing(self, error: Exception) -> bool:
        """Whether an error may be gone at the next attempt."""

    @abstractmethod
    def _is_undone(self, error: Exception) -> bool:
        """Whether a request that failed so has certainly changed nothing."""

    @abstractmethod
    def _explain(self, error: Exception) -> Exception:
        """The contract's error for one of the store's client."""

    def get(self, key: str) -> Entry | None:
        return self._call(lambda deadline: self._see(key, deadline)).entry

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        self.check_size(key, value)
        stored = stamped(value)
        written = entry_of(stored)

        def request(deadline: float) -> tuple[Entry | None, bool]:
            while True:
                seen = self._see(key, deadline)
                version = seen.entry.version if seen.entry else None
                # An earlier attempt whose answer was lost may be what stands there now.
                if version == written.version:
                    return written, True
                if version != expected:
                    return seen.entry, False
                if self._replace(key, stored, seen, deadline):
                    return written, True

        return self._call(request)

    def add(self, key: str, delta: int) -> int:
        return outlast(lambda: self._add_once(key, delta), key, self._where, self._timeout)

    def _add_once(self, key: str, delta: int) -> int | None:
        """One compare-and-set, again where it fails; None: a rival was faster."""
        doubtful: bytes | None = None
        base: Version | None = None

        def request(deadline: float) -> int | None:
            nonlocal doubtful, base
            while True:
                seen = self._see(key, deadline)
                version = seen.entry.version if seen.entry else None
                if doubtful is None:
                    total = parse_counter(key, seen.entry.value if seen.entry else b"0") + delta
                    stored = stamped(str(total).encode())
                elif version == entry_of(doubtful).version:
                    return int(entry_of(doubtful).value)
                elif version == base:
                    # The same stamp again: of the attempts at most one can be applied.
                    stored = doubtful
                else:
                    raise uncounted(key, self._where)
                try:
                    written = self._replace(key, stored, seen, deadline)
                except Exception as error:
                    if not self._is_undone(error):
                        doubtful, base = stored, version
                    raise
                if written:
                    return int(entry_of(stored).value)
                if doubtful is None:
                    return None

        return self._call(request)

    def _call(self, request: Callable[[float], T]) -> T:
        """The one place where the client's errors become the contract's."""
        if self._closed:
            raise ClientClosedError(self._where)
        deadline = time.monotonic() + self._timeout
        try:
            return retry(
                lambda: request(deadline),
                timeout=self._timeout,
                passing=lambda error: not self._closed and self._is_passing(error),
            )
        except Exception as error:
            # ssl's error for a certificate is a ValueError too.
            ours = isinstance(error, RendezvousError | ValueError)
            if ours and not isinstance(error, OSError):
                raise
            if self._closed:
                raise ClientClosedError(self._where) from error
            raise self._explain(error) from error


def stamped(value: bytes) -> bytes:
    """The value as it is stored, under a new stamp."""
    return secrets.token_bytes(STAMP_BYTES) + value


def entry_of(stored: bytes) -> Entry:
    """The entry in a stored value."""
    return Entry(stored[STAMP_BYTES:], stored[:STAMP_BYTES].hex())


def segments(namespace: str, prefix: str) -> list[str]:
    """The parts of a path for a namespace: those of the prefix, then one for the run.

    Each is percent-encoded, so that whatever stands in a run id cannot reach another run.
    """
    if not namespace.startswith(f"{prefix}/"):
        prefix = namespace.partition("/")[0]
    run = namespace[len(prefix) + 1 :]
    return [*(_segment(part) for part in prefix.split("/")), _segment(run)]


def _segment(part: str) -> str:
    encoded = quote(part, safe="")
    return encoded if encoded.strip(".") else "%" + encoded.replace(".", "%2E")
