"""The base class of the stores: it implements the whole contract on a few hooks.

A store's hooks read, write and wait with its client library. This module implements what the stores
share: versions, lost answers, retries within one deadline, `add`, `wait` and its end, batches, size
limits, closing, and the translation of a library's errors into the contract's.

Every stored value begins with its stamp: eight random bytes, new with each write, and "=". The
stamp is the version. A version never repeats, neither after a delete nor on a server that lost its
data; two writes of equal bytes have two versions; and a client recognizes its own write by the
stamp after a lost answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import re
import select
import socket
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar
from urllib.parse import quote

import msgspec

from rdzv_plugins.kv.contract import (
    AccessDeniedError,
    ClientClosedError,
    Entry,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    Version,
    parse_counter,
)
from rdzv_plugins.kv.exhaustion import ExhaustedError, exhausted
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.kv.retry import pause_after, retry
from rdzv_plugins.settings.endpoint import redact_urls
from rdzv_plugins.settings.options import OptionError, UnreadableFileError

__all__ = [
    "STAMP_BYTES",
    "UNREACHED",
    "Limit",
    "Problem",
    "StoreClient",
    "Stored",
    "Wake",
    "WokenError",
    "busy",
    "clock_hint",
    "find_problem",
    "full",
    "in_background",
    "is_unresolved",
    "refused",
    "segments",
    "stamped",
    "version_of",
]

log = logging.getLogger(__name__)

# Not os.urandom: its system calls made 256 nodes in one process contend. Not the module `random`:
# the application may seed it, with the same seed on all nodes.
_STAMPS = random.Random()
os.register_at_fork(after_in_child=_STAMPS.seed)

T = TypeVar("T")

STAMP_BYTES = 9
"""Length of a stamp, including its "="."""


UNREACHED = "could not be reached"
"""The words in the error of a store that gave no answer."""

# `add` fails after this many request timeouts in which other clients were always faster.
_ADD_TIMEOUTS = 12

# The C libraries' text; some client libraries pass on only the text.
_UNRESOLVED = re.compile(
    "Name or service not known|nodename nor servname|name resolution|No address associated"
    "|Name does not resolve|could not translate host name|Failed to resolve"
)

# Modules whose errors mean that an answer could not be parsed.
_PARSERS = {*sys.stdlib_module_names, msgspec.__name__}

# A smaller difference between this host's and a server's clock, in seconds, is not reported.
_CLOCK_SECONDS = 30.0

# For this many keys a client remembers since when they are unchanged, to poll them less often.
_MOST_UNCHANGED = 100


class Stored(msgspec.Struct, frozen=True):
    """A value as it was read.

    Attributes:
        value: without its stamp.
        version: the later `Entry.version`; "": this package did not write the value, so the value
            counts as absent and the next write replaces it.
        guard: what the store needs to replace or watch exactly this value, such as its own index.
    """

    value: bytes
    version: str
    guard: Any = None

    @classmethod
    def parse(cls, data: bytes, guard: Any = None) -> Stored:
        """Parse the result of `stamped`; other data is all ``value``, without a version."""
        if data[STAMP_BYTES - 1 : STAMP_BYTES] != b"=":
            return cls(data, "", guard)
        return cls(data[STAMP_BYTES:], data[: STAMP_BYTES - 1].hex(), guard)

    @property
    def entry(self) -> Entry:
        """The value and its version, as the contract returns them."""
        return Entry(self.value, self.version)


@dataclass(frozen=True, slots=True)
class Problem:
    """The meaning of an error of the client library.

    Attributes:
        text: continues "<store> at <endpoint> ..."; says what failed and what to do.
        retryable: the next attempt may succeed.
        undone: the request has certainly changed nothing.
        state: the store answered, and its data or the request is wrong: raise
            `RendezvousStateError` instead of `RendezvousConnectionError`.
        denied: the store answered, and refuses this client: raise `AccessDeniedError`.
        exhausted: this host has run out of something: raise `ExhaustedError`.
    """

    text: str
    retryable: bool = False
    undone: bool = False
    state: bool = False
    denied: bool = False
    exhausted: bool = False


def refused(likely: str) -> Problem:
    """A request that the store has answered and refused; it may lack a right or a setting.

    Args:
        likely: what may be missing, or be in between, and what to do.
    """
    text = f"refused a request: {{said}}; {likely}; rdzv check tries each kind of request"
    return Problem(text, state=True)


def busy(advice: str) -> Problem:
    """A server that refuses requests because it has too many."""
    text = f"was too busy for {{timeout:g}} s ({{said}}); {advice}"
    return Problem(text, retryable=True, undone=True)


def full(advice: str) -> Problem:
    """A server that refuses each write because it has no room."""
    text = f"is full: it took no write for {{timeout:g}} s ({{said}}); {advice}"
    return Problem(text, retryable=True, undone=True)


def find_problem(problems: Mapping[str, Problem], error: str, **words: object) -> Problem | None:
    """The first problem whose pattern is found in ``error``, with ``words`` put into its text."""
    for pattern, problem in problems.items():
        if re.search(pattern, error):
            return replace(problem, text=problem.text.format(**words))
    return None


class WokenError(Exception):
    """The wait was ended by `StoreClient.interrupt` or `StoreClient.close`."""


class Wake:
    """Ends a wait from another thread. A store's `_park` polls ``fd`` beside its own socket.

    Attributes:
        fd: readable from `ring` on.
        rung: whether it rang.
    """

    def __init__(self) -> None:
        # A pipe, because at most socket calls the threads of a process contend for the interpreter.
        self.fd, self._ringer = os.pipe()
        # Without a lock `ring` could write to another file that got the number of a closed one.
        self._lock = threading.Lock()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._ringer, False)
        # Not select.select, which takes no descriptor above 1023. Kept, because a node waits often.
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._other: tuple[int | None, int] = None, 0
        self.rung = False

    def ring(self) -> None:
        """End the present or the next wait; from any thread."""
        self.rung = True
        with self._lock, contextlib.suppress(OSError):
            os.write(self._ringer, b"!")

    def clear(self) -> None:
        """Forget that it rang."""
        self.rung = False
        with contextlib.suppress(OSError):
            while os.read(self.fd, 1024):
                pass

    def wait(self, seconds: float) -> bool:
        """Pause for ``seconds``, or until `ring`; returns whether it rang."""
        return bool(self.poll(seconds))

    def poll(self, seconds: float, fd: int | None = None, events: int = 0) -> dict[int, int]:
        """Wait up to ``seconds``; returns the events of `self.fd` and of ``fd``."""
        if (fd, events) != self._other:
            # A poll object identifies a descriptor by its number, which a new socket usually gets
            # again.
            if self._other[0] is not None:
                self._poll.unregister(self._other[0])
            if fd is not None:
                self._poll.register(fd, events)
            self._other = fd, events
        return dict(self._poll.poll(max(0, math.ceil(seconds * 1000))))

    def close(self) -> None:
        """Close the descriptors; no thread may wait any more."""
        with self._lock:
            os.close(self._ringer)
            self._ringer = -1
        os.close(self.fd)


class Limit(msgspec.Struct, frozen=True):
    """The deadline of a request.

    Attributes:
        deadline: on the monotonic clock, in seconds.
        wake: the `Wake` of the `wait` that makes the request; its ring ends the request.
    """

    deadline: float
    wake: Wake | None = None

    @property
    def seconds(self) -> float:
        """Seconds left. Raises TimeoutError if none are left, and `WokenError`."""
        if self.wake is not None and self.wake.rung:
            raise WokenError
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def within(self, seconds: float) -> Limit:
        """The sooner of this limit and ``seconds`` from now."""
        return self.until(time.monotonic() + seconds)

    def until(self, deadline: float) -> Limit:
        """The sooner of this limit and ``deadline``."""
        return Limit(min(self.deadline, deadline), self.wake)

    def await_ready(self, fd: int, events: int = select.POLLIN) -> int:
        """Wait for ``events`` of ``fd``; returns the events that came, including errors.

        Raises TimeoutError and `WokenError`.
        """
        if self.wake is None:
            poll = select.poll()
            poll.register(fd, events)
            ready = dict(poll.poll(math.ceil(self.seconds * 1000)))
        else:
            ready = self.wake.poll(self.seconds, fd, events)
            if self.wake.fd in ready:
                raise WokenError
        if not ready:
            raise TimeoutError("no answer in time")
        return ready[fd]

    def await_result(self, future: Future[T]) -> T:
        """Wait for the result of a future. Raises TimeoutError and `WokenError`."""
        if self.wake is None:
            return future.result(self.seconds)
        done = Wake()
        try:
            future.add_done_callback(lambda _: done.ring())
            self.await_ready(done.fd)
        finally:
            done.close()
        return future.result()

    def sleep(self, seconds: float) -> None:
        """Pause; raises `WokenError`."""
        if self.wake is None:
            time.sleep(seconds)
        elif self.wake.wait(seconds):
            raise WokenError


class StoreClient(KeyValueClient):
    """The contract on the hooks below. A hook makes one attempt and raises its library's errors.

    Attributes:
        where: names the store in errors: "<store> at <endpoint>", without secrets.
        timeout: seconds that a request may take with its retries.
        named_by: the option that names the host, for errors.
    """

    named_by = "--rdzv-endpoint"
    shortest_poll: float = 0.1
    """The longest pause in seconds between two polls of `wait`, if the key has just changed."""
    batch: ClassVar[tuple[int, int]] = (100, 1 << 20)
    """The most keys, and bytes of values, that one call of `_put`, `_read` or `_delete` gets."""

    def __init__(self, where: str, request_timeout: float) -> None:
        self.where = where
        self.timeout = request_timeout
        self._closed = False
        self._wakes: set[Wake] = set()
        self._spare_wakes: list[Wake] = []
        self._wakes_lock = threading.Lock()
        # By key: the version of the last poll, and since when.
        self._unchanged: dict[str, tuple[str | None, float]] = {}

    # The hooks of a store.

    @abstractmethod
    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        """The values of the keys that exist; linearizable."""

    @abstractmethod
    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        """The values of all keys that begin with ``prefix``; linearizable."""

    @abstractmethod
    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        """Write if the key is unchanged since ``seen`` (None: absent); False: it has changed."""

    @abstractmethod
    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        """Write unconditionally; idempotent."""

    @abstractmethod
    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        """Delete; absent keys are no error."""

    @abstractmethod
    def _expire(self, seconds: float, limit: Limit) -> None:
        """See `KeyValueClient.expire`."""

    @abstractmethod
    def _problem(self, error: Exception) -> Problem | None:
        """The meaning of an error; None: it is no error of the library, and is raised again."""

    def _set_if(
        self, key: str, data: bytes, expected: Version | None, limit: Limit
    ) -> Stored | None:
        """Write if the version is ``expected`` (None: absent); returns what the key holds then.

        ``seen`` of `_replace` may also be a value that counts as absent.

        A store whose refused write returns the key's value does this in one request. The caller
        may give any ``expected``, even a version that no store has returned.
        """
        refused = 0
        while True:
            seen = self._read([key], limit).get(key)
            if version_of(seen) != expected:
                return seen
            if self._replace(key, data, seen, limit):
                return Stored.parse(data)
            if refused:
                # Others keep changing the key: pause, to fall out of step with them.
                limit.sleep(min(limit.seconds, pause_after(refused)))
            refused += 1

    def _look(self, key: str, version: Version | None, limit: Limit) -> Stored | None:
        """Read before `wait` parks; may omit the value if the key still has ``version``."""
        return self._read([key], limit).get(key)

    def _park(self, key: str, seen: Stored | None, limit: Limit) -> Stored | None:
        """Return once the key may differ from ``seen``, with its value if that is known.

        Must not miss a change since `_look`. Ends at the limit at the latest, also by `WokenError`
        or TimeoutError. This default polls, for stores that cannot push, and pauses for longer the
        longer the key is unchanged.
        """
        version, now = version_of(seen), time.monotonic()
        known, since = self._unchanged.get(key, ("", now))
        if known != version:
            if len(self._unchanged) > _MOST_UNCHANGED:
                self._unchanged.clear()
            # Remembered across calls: a caller with many short waits must not poll fast forever.
            self._unchanged[key] = version, (since := now)
        longest = min(max((now - since) / 5, self.shortest_poll), self.longest_poll)
        limit.sleep(min(limit.seconds, random.uniform(longest / 2, longest)))
        return None

    def _disconnect(self) -> None:
        """Release all connections; called once or more, also when the constructor fails."""

    # The contract.

    def get(self, key: str) -> Entry | None:
        seen = self._call(lambda limit: self._read([key], limit).get(key))
        return entry_of(seen)

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for part in self._parts(dict.fromkeys(keys, b"")):
            read = self._call(partial(self._read, [*part]))
            found |= {key: stored.entry for key, stored in read.items() if stored.version}
        return found

    def list(self, prefix: str) -> dict[str, Entry]:
        found = self._call(partial(self._scan, prefix))
        return {key: stored.entry for key, stored in found.items() if stored.version}

    def put(self, key: str, value: bytes) -> Version:
        self.check_size(key, value)
        data = stamped(value)
        self._call(partial(self._put, {key: data}))
        return Stored.parse(data).version

    def put_many(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.check_size(key, value)
        for part in self._parts({key: stamped(value) for key, value in values.items()}):
            self._call(partial(self._put, part))

    def delete(self, key: str) -> None:
        self._call(partial(self._delete, [key]))

    def delete_many(self, keys: Iterable[str]) -> None:
        for part in self._parts(dict.fromkeys(keys, b"")):
            self._call(partial(self._delete, [*part]))

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        self.check_size(key, value)
        data = stamped(value)
        ours = Stored.parse(data).entry
        seen = self._call(partial(self._set_if, key, data, expected))
        entry = entry_of(seen)
        # Also true if an earlier attempt succeeded and its answer was lost.
        return entry, entry == ours

    def add(self, key: str, delta: int) -> int:
        seconds = _ADD_TIMEOUTS * self.timeout
        deadline, refused = time.monotonic() + seconds, 0
        while (total := self._add_once(key, delta)) is None:
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(
                    f"other clients changed '{key}' in {self.where} throughout {seconds:g} s, so "
                    "nothing was counted: they are too many, or the store is too slow"
                )
            # Growing pauses: otherwise hundreds of adders keep the store busy with refusals.
            time.sleep(pause_after(refused))
            refused += 1
        return total

    def _add_once(self, key: str, delta: int) -> int | None:
        """One compare-and-set, retried after errors; None: another client was faster."""
        doubtful: tuple[bytes, str | None] | None = None

        def request(limit: Limit) -> int | None:
            nonlocal doubtful
            while True:
                seen = self._read([key], limit).get(key)
                version = version_of(seen)
                if doubtful is None:
                    there = seen.value if seen is not None and version is not None else b"0"
                    total = parse_counter(key, there) + delta
                    data = stamped(b"%d" % total)
                else:
                    # The same stamp and version again: at most one attempt can be applied.
                    data, base = doubtful
                    if version == Stored.parse(data).version:
                        return int(Stored.parse(data).value)
                    if version != base:
                        raise self._uncounted(key)
                try:
                    written = self._replace(key, data, seen, limit)
                except Exception as error:
                    problem = self._meaning(error)
                    if problem is not None and not problem.undone:
                        doubtful = data, version
                    raise
                if written:
                    return int(Stored.parse(data).value)
                if doubtful is None:
                    return None

        return self._call(request)

    def _uncounted(self, key: str) -> RendezvousConnectionError:
        return RendezvousConnectionError(
            f"the answer of {self.where} was lost: whether '{key}' was counted is unknown"
        )

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        deadline = time.monotonic() + timeout
        try:
            wake = self._call(lambda _: self._take_wake())
        except ClientClosedError:
            return None
        try:
            return self._wait(key, version, deadline, wake)
        except WokenError:
            return None
        finally:
            self._return_wake(wake)

    def _wait(self, key: str, version: Version | None, deadline: float, wake: Wake) -> Entry | None:
        failures = 0
        while True:
            seen = self._call(lambda limit: self._look(key, version, limit), wake)
            if version_of(seen) in (None, version) and time.monotonic() < deadline:
                try:
                    seen = self._park(key, seen, Limit(deadline, wake))
                    failures = 0
                except TimeoutError:
                    seen = None
                except Exception as error:
                    if not self._retryable(error, wake):
                        self._fail(error, wake)
                    # The next look raises if the store stays unreachable.
                    self._note_retry()
                    wake.wait(pause_after(failures))
                    failures += 1
                    continue
            if seen is not None and version_of(seen) not in (None, version):
                return seen.entry
            if time.monotonic() >= deadline:
                return None

    def interrupt(self) -> None:
        with self._wakes_lock:
            for wake in self._wakes:
                wake.ring()

    def expire(self, seconds: float) -> None:
        self._call(partial(self._expire, seconds))

    def close(self) -> None:
        self._closed = True
        self.interrupt()
        with self._wakes_lock:
            spare, self._spare_wakes = self._spare_wakes, []
        for wake in spare:
            wake.close()
        self._disconnect()

    # For the stores.

    def _connect(self, request: Callable[[Limit], Any]) -> None:
        """Make the first request of a constructor; close all connections if it fails."""
        try:
            self._call(request)
            # Make a Wake now: otherwise a node's first wait would delay its first round.
            self._return_wake(self._take_wake())
        except BaseException:
            self.close()
            raise

    def _call(self, request: Callable[[Limit], T], wake: Wake | None = None) -> T:
        """Retry ``request`` within the request timeout; raises the contract's errors.

        ``wake``: the `Wake` of the calling `wait`; raises `WokenError` soon after it rings.
        """
        if self._closed:
            raise ClientClosedError(self.where) if wake is None else WokenError
        limit = Limit(time.monotonic() + self.timeout, wake)
        denials: list[Exception] = []

        def retryable(error: Exception) -> bool:
            problem = self._meaning(error)
            if problem is not None and problem.denied:
                denials.append(error)
            return self._retryable(error, wake)

        def pause(seconds: float) -> None:
            self._note_retry()
            limit.sleep(seconds)

        try:
            attempt = partial(request, limit)
            return retry(attempt, timeout=self.timeout, retryable=retryable, sleep=pause)
        except Exception as error:
            # One server's refusals tell more than another server's silence. Two refusals, because a
            # server that stops during a log-in looks like a refusal.
            problem = self._problem(error) if not isinstance(error, UnreadableFileError) else None
            is_silence = problem is not None and not problem.state
            self._fail(denials[-1] if len(denials) > 1 and is_silence else error, wake)

    def _retryable(self, error: Exception, wake: Wake | None) -> bool:
        if self._closed or (wake is not None and wake.rung):
            return False
        problem = self._meaning(error)
        return problem is not None and problem.retryable

    def _meaning(self, error: Exception) -> Problem | None:
        """`_problem`, and the problems of an exhausted host and of an unreadable file.

        Exhaustion is found even behind a library's error. The file was readable at the start.
        """
        unreadable = isinstance(error, UnreadableFileError)
        problem = self._problem(error) if not unreadable else None
        if problem is None and type(error).__module__.partition(".")[0] in _PARSERS:
            # A network error is an OSError of Python too.
            away = isinstance(error, OSError)
            problem = self._unreachable(error) if away else self._odd(error)
        if (missing := exhausted(error)) is not None:
            undone = problem is not None and problem.undone
            text = f"could not be asked: {missing}"
            return Problem(text, retryable=True, undone=undone, exhausted=True)
        if unreadable:
            return Problem(
                f"was not asked, for {error}; is it being replaced?", retryable=True, undone=True
            )
        return problem

    def _learn(self, request: Callable[[Limit], T]) -> tuple[T | None, str]:
        """For `inspect`: the answer, or None and the reason, such as a missing right."""
        try:
            return self._call(request), ""
        except (RendezvousConnectionError, RendezvousStateError) as error:
            return None, " ".join(str(error.__cause__ or error).split())

    def _note_retry(self) -> None:
        if self.on_retry is not None:
            self.on_retry()

    def _fail(self, error: Exception, wake: Wake | None) -> NoReturn:
        """Raise the contract's error for an error of the client library; `WokenError` in a wait."""
        if isinstance(error, WokenError):
            raise error
        woken = wake is not None and (self._closed or wake.rung)
        # A signal's handler, such as torch's, may raise an error of its own here. Libraries raise
        # errors about their own state when another thread closes the connection.
        if woken and self._meaning(error) is not None:
            raise WokenError from None
        if isinstance(error, RendezvousError | OptionError):
            raise error
        if (problem := self._meaning(error)) is None:
            raise error
        if self._closed:
            raise ClientClosedError(self.where) from error
        kind: type[RendezvousError] = RendezvousConnectionError
        if problem.exhausted:
            kind = ExhaustedError
        elif problem.state:
            kind = RendezvousStateError
        elif problem.denied:
            kind = AccessDeniedError
        # The text quotes the server: it may hold control characters, or secrets in URLs.
        text = plain(redact_urls(f"{self.where} {problem.text}"))
        # Raise from None: torchrun would print the library's frames before the line that counts.
        told = str(error)
        log.debug("%s", text, exc_info=error if redact_urls(told) == told else None)
        raise kind(text) from None

    def _odd(self, error: Exception) -> Problem:
        """The problem of an answer that is cut off or malformed."""
        said = plain(f"{type(error).__name__}: {error}", 200)
        return Problem(
            f"sent an answer that makes no sense ({said}); does {self.named_by} name it, and is a "
            "proxy in between?",
            retryable=True,
        )

    def _unreachable(self, error: Exception, *, undone: bool = False, hint: str = "") -> Problem:
        """The problem of most errors; ``hint`` continues the question at the end of the text."""
        if is_unresolved(error):
            return Problem(
                f"{UNREACHED} within {self.timeout:g} s, for its name cannot be resolved "
                f"({error}); check the spelling in {self.named_by}, and this host's DNS",
                retryable=True,
                undone=undone,
            )
        said = str(error) or type(error).__name__
        # A busy or full server does not refuse connections, but may hang or hang up.
        busy = "" if "refused" in said else ", not too busy and below its limit of connections"
        return Problem(
            f"{UNREACHED} within {self.timeout:g} s ({said}); "
            f"is it running{busy}, and does {self.named_by} name it{hint}?",
            retryable=True,
            undone=undone,
        )

    def _take_wake(self) -> Wake:
        with self._wakes_lock:
            # Creating a Wake takes 0.02 ms, so reuse one.
            wake = self._spare_wakes.pop() if self._spare_wakes else Wake()
            self._wakes.add(wake)
        if self._closed:
            wake.ring()
        return wake

    def _return_wake(self, wake: Wake) -> None:
        with self._wakes_lock:
            self._wakes.discard(wake)
            if not self._closed:
                if wake.rung:
                    wake.clear()
                self._spare_wakes.append(wake)
                return
        wake.close()

    def _parts(self, values: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
        """``values`` in parts that fit `batch`."""
        most_keys, most_bytes = self.batch
        part: dict[str, bytes] = {}
        size = 0
        for key, data in values.items():
            if part and (len(part) == most_keys or size + len(data) > most_bytes):
                yield part
                part, size = {}, 0
            part[key] = data
            size += len(data)
        if part:
            yield part


def in_background(name: str, work: Callable[[], T]) -> Future[T]:
    """Do ``work`` in a daemon thread; where none can start, in the calling thread.

    The work cannot be cancelled.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # Also SystemExit, or the caller would wait forever.
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        # The host has no thread left; or the interpreter ends, from Python 3.12 on.
        run()
    return future


def clock_hint(server: float | None) -> str:
    """A hint if this host's clock is off, because signatures and tokens hold for minutes; or "".

    Args:
        server: the server's time in seconds since 1970; None: unknown.
    """
    off = time.time() - server if server is not None else 0.0
    if abs(off) < _CLOCK_SECONDS:
        return ""
    way = "ahead of" if off > 0 else "behind"
    return f"; this host's clock is {abs(off):,.0f} s {way} the server's, so correct that first"


def is_unresolved(error: BaseException | None) -> bool:
    """Whether the error, or one of its causes, says that a host's name has no address."""
    behind: list[BaseException] = []
    # In redis-py's errors the causes may form a ring.
    while error is not None and error not in behind:
        if isinstance(error, socket.gaierror) or _UNRESOLVED.search(str(error)):
            return True
        behind.append(error)
        error = error.__cause__ or error.__context__
    return False


def stamped(value: bytes) -> bytes:
    """The stored form of the value, with a new stamp."""
    return _STAMPS.randbytes(STAMP_BYTES - 1) + b"=" + value


def entry_of(stored: Stored | None) -> Entry | None:
    """The entry that the contract returns for a key; None if `version_of` is None."""
    return stored.entry if stored is not None and stored.version else None


def version_of(stored: Stored | None) -> str | None:
    """The version of a key's value; None: no such key, or a value of another program."""
    return (stored.version or None) if stored is not None else None


def segments(namespace: str, prefix: str) -> list[str]:
    """The path segments of a namespace: the prefix's segments, then a segment for the run.

    Each segment is percent-encoded, so that no run id can address another run.
    """
    if not namespace.startswith(f"{prefix}/"):
        prefix = namespace.partition("/")[0]
    run = namespace[len(prefix) + 1 :]
    return [*(_segment(part) for part in prefix.split("/")), _segment(run)]


def _segment(part: str) -> str:
    encoded = quote(part, safe="")
    return encoded if encoded.strip(".") else "%" + encoded.replace(".", "%2E")
