"""A ``torch.distributed.Store`` over a key-value client: what agents and trainers share.

It behaves like c10d's TCPStore, with four differences:

- While the server is away, idempotent requests are repeated until the store's time-out.
- A connection that breaks during `add` or a queue call raises, so that nothing is counted twice.
- `delete_key`, `append` and the queue calls take two requests.
- A queue is one value, so the store's size limit bounds the whole queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TypeVar

import msgspec
import torch.distributed
from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]

from rdzv_plugins.kv import Entry, KeyValueClient, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.kv.contract import UNREADABLE
from rdzv_plugins.kv.retry import pause_after, retry, store_is_away

__all__ = ["KeyValueStore"]

T = TypeVar("T")

# The prefix of a queue's stored value; a MessagePack array of the queue's items follows.
_QUEUE = b"\x00rdzv queue\x00"
_QUEUES = msgspec.msgpack.Decoder(list[bytes])

# torch has QueueEmptyError and the queue calls since 2.8.
_QueueEmptyError = getattr(torch.distributed, "QueueEmptyError", DistStoreError)

# An error names at most this many keys.
_KEYS_SHOWN = 5


class KeyValueStore(Store):
    """A c10d store on the keys under one prefix of a client's namespace.

    Values given as ``str`` are stored as UTF-8; values are returned as ``bytes``. Calls that wait
    do so for ``timeout`` (`set_timeout` changes it), as c10d's do, 300 s unless told otherwise.

    A ``PrefixStore`` over it does not keep it alive: hold a reference yourself. torch passes no
    queue calls from there to a store in Python.

    Raises (every method):
        DistStoreError: a wait timed out, or a value is unreadable or over the store's limit.
        DistNetworkError: the store could not be reached; its cause is attached.
    """

    # Seconds after which a waiting read looks again.
    _longest_wait = float("inf")

    def __init__(
        self, client: KeyValueClient, prefix: str, timeout: timedelta = timedelta(seconds=300)
    ) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._clones: list[KeyValueStore] = []
        self.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._patiently(lambda: self._put({self._prefix + key: _bytes(value)}))

    def get(self, key: str) -> bytes:
        """The value, as soon as there is one; b"" for a queue, as from a TCPStore."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        """Add to a counter (absent: 0) and return the sum; ``add(key, 0)`` reads it."""
        with _c10d_errors():
            return self._client.add(self._prefix + key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all the keys exist; a queue exists while it is not empty."""
        found = self._patiently(lambda: self._found(keys))
        return sum(map(_exists, found.values())) == len(set(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return as soon as all the keys exist; a queue exists while it is not empty."""
        self._collect(keys, self._timeout() if timeout is None else timeout)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set the value if it is the expected one, or if there is none and "" is expected.

        Returns what the key holds now, or ``expected_value`` if it does not exist.
        """
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        found = self._change(key, lambda it: desired if _value(it) == expected else None)
        if _value(found) == expected:
            return desired
        return expected if found is None else found.value

    def append(self, key: str, value: str | bytes) -> None:
        self._change(key, lambda it: _value(it) + _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all the keys, as soon as all of them exist."""
        found = self._collect(keys, self._timeout())
        return [b"" if _is_queue(found[key]) else found[key].value for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys but {len(values)} values")
        pairs = zip(keys, values, strict=True)
        written = {self._prefix + key: _bytes(value) for key, value in pairs}
        self._patiently(lambda: self._put(written))

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append to the queue of this key. Raises `DistStoreError` if the key holds a value."""

        def longer(entry: Entry | None) -> bytes:
            if entry is not None and not _is_queue(entry):
                raise DistStoreError(f"'{key}' holds a value: it cannot be a queue too")
            return _queue([*_queued(entry), _bytes(value)])

        self._change(key, longer)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of the queue; each value is returned once, in push order.

        Waits for a value. If not ``block``, raises torch's ``QueueEmptyError`` at once instead.
        """
        timeout = self._timeout()
        deadline = time.monotonic() + timeout.total_seconds()

        def shorter(entry: Entry | None) -> bytes | None:
            queued = _queued(entry)
            return _queue(queued[1:]) if queued else None

        while not (queued := _queued(found := self._change(key, shorter))):
            if not block:
                raise _QueueEmptyError(f"queue is empty: '{key}'")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DistStoreError(_timed_out(timeout, [key]))
            self._patiently(partial(self._wait, key, found, remaining), remaining)
        return queued[0]

    def queue_len(self, key: str) -> int:
        """The number of values in the queue; 0 if there is none."""
        return len(_queued(self._patiently(lambda: self._client.get(self._prefix + key))))

    def _wait(self, key: str, seen: Entry | None, seconds: float) -> Entry | None:
        """The key's next entry; None: it has not changed, or the client was interrupted."""
        version = seen.version if seen is not None else None
        return self._client.wait(self._prefix + key, version, seconds)

    def delete_key(self, key: str) -> bool:
        """Delete; returns whether the key was there."""
        with _c10d_errors():
            existed = self._client.get(self._prefix + key) is not None
            self._client.delete(self._prefix + key)
            return existed

    def list_keys(self) -> list[str]:
        with _c10d_errors():
            entries = self._client.list(self._prefix)
            # A TCPStore does not list queues as keys either.
            plain = (key for key, entry in entries.items() if not _is_queue(entry))
            return [key.removeprefix(self._prefix) for key in plain]

    def num_keys(self) -> int:
        return len(self.list_keys())

    # c10d calls these two methods of a Python store by their C++ names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set are supported."""
        return True

    def clone(self) -> KeyValueStore:
        """A store on the same keys with a time-out of its own.

        It shares the connection: clients may be used from several threads at once.
        """
        clone = KeyValueStore(self._client, self._prefix, self._timeout())
        # C++ keeps no reference to the Python half of a store, which has the methods.
        self._clones.append(clone)
        return clone

    def _timeout(self) -> timedelta:
        # torch's stubs lack self.timeout.
        # Never keep a copy: c10d sets it without calling set_timeout.
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout

    def _change(self, key: str, change: Callable[[Entry | None], bytes | None]) -> Entry | None:
        """Replace a value by the result of ``change`` for its entry; None: leave the value.

        Returns the entry that was replaced or left. Raises `DistStoreError` once others have
        changed the key throughout the store's time-out.
        """
        seconds = self._timeout().total_seconds()
        deadline = time.monotonic() + seconds
        with _c10d_errors():
            entry = self._client.get(self._prefix + key)
            for refused in count():
                if (value := change(entry)) is None:
                    break
                before, version = entry, None if entry is None else entry.version
                entry, written = self._client.compare_and_set(self._prefix + key, value, version)
                if written:
                    return before
                if (left := deadline - time.monotonic()) <= 0:
                    raise DistStoreError(
                        f"others changed '{key}' throughout {seconds:g} s, so that nothing was "
                        "changed"
                    )
                time.sleep(min(pause_after(refused), left))
        return entry

    def _put(self, values: Mapping[str, bytes]) -> None:
        self._client.put_many(values)

    def _found(self, keys: Sequence[str]) -> dict[str, Entry]:
        found = self._client.get_many([self._prefix + key for key in dict.fromkeys(keys)])
        return {key.removeprefix(self._prefix): entry for key, entry in found.items()}

    def _collect(self, keys: Sequence[str], timeout: timedelta) -> dict[str, Entry]:
        deadline = time.monotonic() + timeout.total_seconds()
        found: dict[str, Entry] = {}

        def look() -> bool:
            missing = [key for key in keys if key not in found]
            over = self._over()
            entries = self._found(missing) if missing else {}
            found.update((key, entry) for key, entry in entries.items() if _exists(entry))
            missing = [key for key in missing if key not in found]
            if not missing:
                return True
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DistStoreError(_timed_out(timeout, missing))
            if over:
                found.update((key, Entry(self._stand_in(key), None)) for key in missing)
                return True
            if self._over():
                return False  # Read once more: a key may have been written just before.
            pause = min(remaining, self._longest_wait)
            empty_queue = entries.get(missing[0])
            entry = self._wait(missing[0], empty_queue, pause)
            if entry is not None and _exists(entry):
                found[missing[0]] = entry
            # An early None means an interrupted client, and is no answer.
            return False

        while not self._patiently(look, deadline - time.monotonic()):
            pass
        return found

    def _over(self) -> bool:
        """Whether no agent will write the missing keys."""
        return False

    def _stand_in(self, key: str) -> bytes:
        """A value for a missing key; called only once `_over` is true."""
        raise NotImplementedError

    def _patiently(self, request: Callable[[], T], seconds: float | None = None) -> T:
        """Repeat the request until the store answers, so that an outage ends no agent."""
        timeout = self._timeout().total_seconds() if seconds is None else seconds
        with _c10d_errors():
            return retry(request, timeout=timeout, retryable=store_is_away)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _value(entry: Entry | None) -> bytes:
    return b"" if entry is None else entry.value


def _queue(values: Sequence[bytes]) -> bytes:
    return _QUEUE + msgspec.msgpack.encode(values)


def _is_queue(entry: Entry) -> bool:
    return entry.value.startswith(_QUEUE)


def _exists(entry: Entry) -> bool:
    return entry.value != _queue([])


def _queued(entry: Entry | None) -> list[bytes]:
    """The values of a queue; none if there is no queue."""
    if entry is None or not _is_queue(entry):
        return []
    try:
        return _QUEUES.decode(entry.value[len(_QUEUE) :])
    except UNREADABLE as error:
        raise DistStoreError(f"a queue is unreadable: {error}") from error


def _timed_out(timeout: timedelta, missing: Sequence[str]) -> str:
    shown = ", ".join(missing[:_KEYS_SHOWN])
    more = f" and {len(missing) - _KEYS_SHOWN} more" if len(missing) > _KEYS_SHOWN else ""
    return f"wait timeout after {timeout.total_seconds():g} s, keys: {shown}{more}"


@contextmanager
def _c10d_errors() -> Iterator[None]:
    """Turn the contract's errors into the errors that torch's callers of a store expect."""
    try:
        yield
    except RendezvousConnectionError as error:
        raise DistNetworkError(str(error)) from error
    except RendezvousStateError as error:
        raise DistStoreError(str(error)) from error
