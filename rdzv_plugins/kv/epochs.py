"""Expiry for stores whose server does not delete a run by itself.

Each key of a run has the path ``<epoch>/<key>``. The run's mark, at the path `MARK`, names the
current epoch and its length in seconds by the server's clock. A client reads the mark again after
`EpochClient.mark_seconds`. No deadline is nearer, so every client knows a deadline in time.

- Once the epoch is over, the run reads as empty. The next write or ``expire`` begins an epoch
  without a deadline, and deletes the keys of the last epoch.
- A waiter that finds the epoch over waits for another mark.
- A client whose clock is slow may still write in the old epoch, and loses these writes.
- ``expire(0)`` deletes the keys and keeps the epoch, so that clients with the old mark go on.
- Each ``expire`` also deletes some other runs under the prefix that are over, if the store can list
  them (`EpochClient._sweep`). Reading a run never deletes it.
"""

from __future__ import annotations

import math
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, ClassVar, NamedTuple

import msgspec

from rdzv_plugins.kv.base import Limit, StoreClient, Stored, stamped, version_of
from rdzv_plugins.kv.contract import Version
from rdzv_plugins.kv.gate import SMALL_BYTES, InvalidValueError, Seconds, decode

MARK = "!"
"""The path of the mark."""

# The nearest deadline, in `EpochClient.mark_seconds`.
_MARGIN = 1.2
# How often a waiter reads the mark while its key does not change.
_UNCHANGED_SECONDS = 10.0


class Epoch(msgspec.Struct, frozen=True):
    """The value of a mark; a run without a mark has the default epoch.

    Attributes:
        lasts: the epoch's length in seconds; None: it has no deadline.
        since: the beginning of the epoch, from `EpochClient._stamp`.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{1,16}\Z")] = "0"
    lasts: Seconds | None = None
    since: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,20}(\.[0-9]{1,3})?\Z")] = "0"

    @classmethod
    def of(cls, stored: Stored | None) -> Epoch:
        """Parse a mark; a foreign mark counts as absent."""
        with suppress(InvalidValueError):
            if stored is not None and stored.version:
                return decode(_epochs, stored.value, SMALL_BYTES)
        return cls()


_epochs = msgspec.json.Decoder(Epoch)


class _Known(NamedTuple):
    """The mark that a client has read; ``over`` is the epoch's end in monotonic seconds."""

    epoch: Epoch = Epoch()
    stored: Stored | None = None
    over: float = math.inf

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.over

    def path(self, key: str) -> str:
        return f"{self.epoch.name}/{key}"


class EpochClient(StoreClient):
    """Adds expiry: it implements the hooks of `StoreClient` with simpler hooks for paths."""

    mark_seconds: ClassVar[float] = 0.25
    """How old a client's mark may become, in seconds."""

    def __init__(self, where: str, request_timeout: float) -> None:
        super().__init__(where, request_timeout)
        self._known, self._asked = _Known(), -math.inf

    # The hooks of a store; each does what its namesake in `StoreClient` does, for paths.

    @abstractmethod
    def _read_at(self, paths: Iterable[str], limit: Limit) -> dict[str, Stored]: ...

    @abstractmethod
    def _scan_at(self, prefix: str, limit: Limit) -> dict[str, Stored]: ...

    @abstractmethod
    def _replace_at(self, path: str, data: bytes, seen: Stored | None, limit: Limit) -> bool: ...

    @abstractmethod
    def _put_at(self, values: Mapping[str, bytes], limit: Limit) -> None: ...

    @abstractmethod
    def _delete_at(self, paths: Iterable[str], limit: Limit) -> None: ...

    def _look_at(self, path: str, version: Version | None, limit: Limit) -> Stored | None:
        return self._read_at([path], limit).get(path)

    def _park_at(self, path: str, seen: Stored | None, limit: Limit) -> Stored | None:
        return super()._park(path, seen, limit)

    def _server_time(self) -> float:
        """The server's clock in seconds, from its last answer; for `_stamp` and `_age`."""
        return 0.0

    def _stamp(self, lasts: float, limit: Limit) -> str:
        """The beginning of an epoch, for its mark."""
        return f"{self._server_time():.3f}"

    def _age(self, epoch: Epoch, mark: Stored, limit: Limit) -> float:
        """Seconds since the mark was written, by the server's clock."""
        return self._server_time() - float(epoch.since)

    def _empty(self, epoch: str, limit: Limit) -> bool:
        """Delete the keys of an epoch; False: some keys cannot be deleted."""
        self._delete_at(self._scan_at(f"{epoch}/", limit), limit)
        return True

    def _has_ended(self, mark: Stored, limit: Limit, longer: float = 0.0) -> bool:
        """Whether the epoch of a mark, perhaps another run's, ended ``longer`` seconds ago."""
        epoch = Epoch.of(mark)
        lasts = epoch.lasts
        return lasts is not None and self._age(epoch, mark, limit) >= lasts + longer

    def _sweep(self, limit: Limit) -> None:
        """Delete some other runs under the prefix that are over."""

    # The hooks of `StoreClient`.

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        known = self._present(limit)
        if known.is_over:
            return {}
        paths = {known.path(key): key for key in keys}
        return {paths[it]: stored for it, stored in self._read_at(paths, limit).items()}

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        known = self._present(limit)
        if known.is_over:
            return {}
        found, start = self._scan_at(known.path(prefix), limit), len(known.path(""))
        return {path[start:]: stored for path, stored in found.items()}

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        return self._replace_at(self._living(limit).path(key), data, seen, limit)

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        known = self._living(limit)
        self._put_at({known.path(key): data for key, data in values.items()}, limit)

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        known = self._present(limit)
        if not known.is_over:
            self._delete_at([known.path(key) for key in keys], limit)

    def _look(self, key: str, version: Version | None, limit: Limit) -> Stored | None:
        known = self._known
        old = time.monotonic() >= self._asked + _UNCHANGED_SECONDS
        if version is None or known.is_over or old:
            known = self._present(limit)
        if known.is_over:
            return None
        found = self._look_at(known.path(key), version, limit)
        if version_of(found) == version or self._present(limit).epoch.name == known.epoch.name:
            return found
        return self._read([key], limit).get(key)

    def _park(self, key: str, seen: Stored | None, limit: Limit) -> Stored | None:
        known = self._known
        limit = limit.within(_UNCHANGED_SECONDS)
        if known.is_over:
            self._park_at(MARK, known.stored, limit)
            return None
        return self._park_at(known.path(key), seen, limit.until(known.over))

    def _expire(self, seconds: float, limit: Limit) -> None:
        if seconds <= 0:
            known = self._present(limit, fresh=True)
            if not self._empty(known.epoch.name, limit):
                self._begin_epoch(known, limit)
            elif known.epoch.name == Epoch().name:
                self._delete_at([MARK], limit)
                self._asked = -math.inf
            elif known.epoch.lasts is not None and not known.is_over:
                self._write_mark(known, Epoch(known.epoch.name), limit)
            return
        lasts, written = max(seconds, _MARGIN * self.mark_seconds), False
        while not written:
            known = self._living(limit, fresh=True)
            epoch = Epoch(known.epoch.name, lasts, self._stamp(lasts, limit))
            written = self._write_mark(known, epoch, limit)
        with suppress(TimeoutError):
            self._sweep(limit.within(limit.seconds / 2))

    def _present(self, limit: Limit, fresh: bool = False) -> _Known:
        """The mark; its epoch may be over."""
        known = self._known
        if fresh or known.is_over or time.monotonic() >= self._asked + self.mark_seconds:
            known = self._learn_mark(limit)
        return known

    def _living(self, limit: Limit, fresh: bool = False) -> _Known:
        """The mark of an epoch that is not over; begins another epoch if necessary."""
        known = self._present(limit, fresh)
        while known.is_over:
            last = known.epoch.name
            self._begin_epoch(known, limit)
            known = self._learn_mark(limit)
            if known.epoch.name != last:
                with suppress(TimeoutError):
                    self._empty(last, limit.within(limit.seconds / 2))
        return known

    def _learn_mark(self, limit: Limit) -> _Known:
        asked = time.monotonic()
        stored = self._read_at([MARK], limit).get(MARK)
        known = self._known
        if stored != known.stored or known.is_over:
            epoch, over = Epoch.of(stored), math.inf
            if stored is not None and epoch.lasts is not None:
                over = time.monotonic() + epoch.lasts - self._age(epoch, stored, limit)
            known = _Known(epoch, stored, over)
        # Threads read the mark concurrently; a late answer must not replace a newer one.
        if asked >= self._asked:
            self._known, self._asked = known, asked
        return known

    def _begin_epoch(self, known: _Known, limit: Limit) -> None:
        self._write_mark(known, Epoch(secrets.token_hex(4)), limit)

    def _write_mark(self, known: _Known, epoch: Epoch, limit: Limit) -> bool:
        """Replace the mark if it is still ``known``; the next `_present` reads it again."""
        written = self._replace_at(MARK, stamped(msgspec.json.encode(epoch)), known.stored, limit)
        self._asked = -math.inf
        return written
