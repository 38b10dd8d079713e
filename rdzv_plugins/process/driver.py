"""Carries out a node's effects in one background thread, and makes no decision."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from rdzv_plugins.clock import take
from rdzv_plugins.kv import (
    AccessDeniedError,
    Attempts,
    ExhaustedError,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousStateError,
    exhausted,
    is_signal,
)
from rdzv_plugins.kv.findings import Mark
from rdzv_plugins.kv.retry import store_is_away
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.observe.logs import RunLog
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.contact import Standing
from rdzv_plugins.protocol.documents import BELL_KEY, NODES_PREFIX, STORE_PREFIX
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.round_record import RoundRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

Watcher: TypeAlias = Callable[[effects.Effect[Any], Any, Exception | None], object]
"""Sees each executed effect, with its answer or its error."""

# After an unforeseen error the node starts over; the pause prevents a busy loop.
_PAUSE_AFTER_A_BUG = 1.0
# Findings of `KeyValueClient.inspect` about the loss of a run or of the password.
_WARNED_FINDINGS = ("persistence", "eviction", "TLS")
# Seconds until a record of the history is written: agents start their workers first.
_HISTORY_DELAY = 1.0
# Name suffixes of the threads that work beside the node's thread.
_THREADS = {effects.OpenMaster: "master", effects.DialPeer: "network"}
# How long a record of the history is retried; servers that elect a leader need about 10 s.
_HISTORY_SECONDS = 30.0
# The node sends no heartbeat during an attempt, which may take a request's time-out.
_HISTORY_PAUSE = 10.0
# The shortest time between two log lines with the same refusal.
_REPEATED_AFTER_SECONDS = 60.0
# glibc's resolver gives up a query after twice 5 s, and may make several.
_LONGEST_LOOK_UP = 30.0


class Driver:
    """The thread that drives a node.

    Args:
        client: the run's namespace; the driver does not close it.
        open_master: opens a TCPStore for the round of a world_id, in a thread of its own, and
            returns ``address:port``. Raises `RendezvousStateError` if a retry does not help.
        dial: dials another node, in a thread of its own, and returns the seconds.
        keep_links: keeps links to exactly these nodes, ``address:port`` by id, and sends them this
            node's `Standing`; does not block. None: this node has no links.
    """

    def __init__(
        self,
        node: Node,
        client: KeyValueClient,
        archive: Archive,
        open_master: Callable[[str], str],
        run_id: str,
        watchers: Sequence[Watcher] = (),
        dial: Callable[[effects.DialPeer], float] | None = None,
        keep_links: Callable[[dict[str, str], Standing], None] | None = None,
    ) -> None:
        self._node = node
        self._watchers = watchers
        self._client = client
        self._archive = archive
        self._open_master = open_master
        self._log = RunLog(log, run_id, node, archive.command)
        self._name = f"rdzv-{run_id}"
        self._thread: threading.Thread | None = None
        # The last thread of each kind, and earlier threads that still hang (in name resolution).
        self._asides: list[_Aside] = []
        self._dial = dial
        self._keep_links = keep_links
        # Records for the archive, each with its monotonic time and its date.
        self._to_note: list[tuple[float, datetime, RoundRecord]] = []
        self._note_at = 0.0
        self._stopping = threading.Event()
        # Queues, not conditions: a signal's exception could leave a condition's lock held.
        self._nudges: SimpleQueue[None] = SimpleQueue()
        self._outcomes: SimpleQueue[effects.JoinOutcome] = SimpleQueue()
        self._outage_since: float | None = None
        self._accepted_at = time.monotonic()
        self._logged_outage = self._logged_refusal = False
        # When each refusal was logged last.
        self._refusals: dict[str, float] = {}
        # Whether this host, not the store, causes the outage.
        self._host_is_exhausted = False
        self._last_error: str | None = None
        self._warned_of_archive = False
        self._inspected = False
        node.inbox.wake = self._nudge

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def outage_seconds(self) -> float:
        """For how long no request has reached the store; 0: the last request has."""
        since = self._outage_since
        return time.monotonic() - since if since is not None else 0.0

    def join(
        self, failed: bool = False, waited: float = 0.0, patience: float = 0.0
    ) -> effects.JoinOutcome:
        """Order a join and wait for its outcome, which is empty after `stop`.

        One caller at a time. The caller makes no request, because at a signal torch raises an
        exception in it, which a store's client could swallow. An exception withdraws the join.

        Args:
            failed, waited: see `Inbox.join`.
            patience: how many seconds to retry while this host lets no thread start.

        Raises:
            ExhaustedError: no thread can start.
        """
        _empty(self._outcomes)
        if self._stopping.is_set():
            return effects.JoinOutcome()
        try:
            # Inside the try, because a signal may come while the thread starts.
            self._node.inbox.join(failed, waited)
            self._hand_over(patience - waited)
            return take(self._outcomes)
        except BaseException:
            self._node.inbox.withdraw()
            self._nudge_until(self._has_taken_up, 1)
            raise

    def stay_out(self, reason: str, seconds: float) -> effects.JoinOutcome | None:
        """Tell the others that this node is unfit, and wait for ``seconds``.

        Returns early, with an outcome, if the run is closed, or after `stop`. One caller at a time.
        """
        _empty(self._outcomes)
        if self._stopping.is_set():
            return effects.JoinOutcome()
        self._node.inbox.report_unfit(reason)
        with suppress(ExhaustedError):  # The next call reports the reason.
            self._hand_over(0.0)
        try:
            return take(self._outcomes, seconds)
        except Empty:
            return None

    def _hand_over(self, patience: float) -> None:
        """Start the node's thread if necessary, and wait until it has taken up the message."""
        deadline, attempts = time.monotonic() + patience, Attempts()
        while not self.running:
            self._thread = threading.Thread(target=self._live, name=self._name, daemon=True)
            try:
                self._thread.start()
                return
            except Exception as error:
                missing = _of_the_store(error)  # Raises a signal's exception: the thread may run.
                self._thread = None
            if time.monotonic() >= deadline:
                raise missing
            if attempts.fail():
                self._log.warning(f"{missing} -- what runs goes on, and this node keeps trying")
            with suppress(Empty):
                # Only `stop` delivers an outcome now; leave it for the caller.
                self._outcomes.put(take(self._outcomes, attempts.seconds_left))
                return
        self._nudge_until(self._has_taken_up, 5)

    def note_retry(self) -> None:
        """Report that the client repeats a request; from any thread."""
        self._node.note_retry()
        if self._thread is threading.current_thread() and (news := self._node.neighbours.news()):
            self._perform(news)

    def stop(self, seconds: float) -> None:
        """End the thread for good; wait for it for ``seconds`` at most."""
        self._stopping.set()
        self._outcomes.put(effects.JoinOutcome())
        self._nudge_until(lambda: not self.running, seconds)

    def await_masters(self, seconds: float) -> None:
        """Wait until no TCPStore is being opened: up to ``seconds`` here, and the rest at exit.

        TCPStore's C++ aborts the process if the interpreter ends first.
        """
        deadline = time.monotonic() + seconds
        for aside in self._asides:
            if isinstance(aside.begun, effects.OpenMaster):
                aside.thread.join(max(0.0, deadline - time.monotonic()))
                if aside.thread.is_alive():
                    atexit.register(aside.thread.join, _LONGEST_LOOK_UP)

    def _has_taken_up(self) -> bool:
        return self._stopping.is_set() or not self._node.has_messages

    def _nudge_until(self, done: Callable[[], bool], seconds: float) -> None:
        # Repeat the interrupt: it has no effect if it comes just before the thread parks.
        deadline = time.monotonic() + seconds
        pause = 0.001
        while not done() and time.monotonic() < deadline:
            self._nudge()
            if self._thread is not None and self._stopping.is_set():
                self._thread.join(pause)
            else:
                time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _nudge(self) -> None:
        """End the thread's `Park` or `Rest`, and every other wait in the store."""
        self._nudges.put(None)
        self._client.interrupt()

    def _live(self) -> None:
        missing: ExhaustedError | None = None
        while not self._stopping.is_set():
            try:
                self._drive(self._node.run(), missing)
            except Exception as error:
                # The restarted node's first request fails with the error of an exhausted host.
                if (missing := exhausted(error)) is None:
                    log.exception(
                        "this node's rendezvous met an unforeseen error, and starts over; please "
                        "report it"
                    )
                    self._deliver(effects.JoinOutcome(error=error))
                self._stopping.wait(_PAUSE_AFTER_A_BUG)
        with suppress(Exception):
            self._note()

    def _drive(self, life: effects.Effects[None], failed: Exception | None = None) -> None:
        """Carry out ``life``; ``failed`` is the answer to its first request."""
        request = next(life)
        over, broken = False, list[Watcher]()
        while self._node.closing or not self._stopping.is_set():
            answer = None
            if failed is None:
                try:
                    answer = self._perform(request)
                except Exception as error:
                    failed = _of_the_store(error)
            _show(self._watchers, broken, request, answer, failed)
            if failed is None:
                self._note_success(request)
                request = life.send(answer)
            else:
                request = life.throw(failed)
                if isinstance(request, effects.Rest):
                    self._note_failure(failed)
                failed = None
            was_over, over = over, self._node.over
            if over and not was_over:
                # End the agent's wait in its c10d store for nodes that are gone.
                self._client.interrupt()

    def _perform(self, request: effects.Effect[Any]) -> Any:
        match request:
            case effects.FinishJoin(outcome):
                return self._deliver(outcome)
            case effects.Begin():
                return self._beside(request)
            case effects.KeepLinks(peers, standing):
                if self._keep_links is not None:
                    self._keep_links(dict(peers), standing)
                return None
            case effects.Tell():
                return self._log.tell(request)
            case effects.RecordHistory(record) | effects.Register(record):
                wall = request.at if isinstance(request, effects.RecordHistory) else None
                at = datetime.fromtimestamp(time.time() if wall is None else wall, UTC)
                if not self._to_note:
                    self._note_at = time.monotonic() + _HISTORY_DELAY
                self._to_note.append((time.monotonic(), at, record))
                return None
            case effects.Park(key, version, seconds) if self._to_note:
                ends = time.monotonic() + seconds
                if time.monotonic() >= self._note_at:
                    self._note()
                # After a longer wait the node would report itself as slow to answer.
                ends = min(ends, self._note_at) if self._to_note else ends
                return self._client.wait(key, version, max(0.0, ends - time.monotonic()))
            case effects.Rest(seconds):
                _empty(self._nudges)
                with suppress(Empty):
                    self._nudges.get(timeout=seconds)
                return None
        return perform(self._client, self._archive, request)

    def _note(self) -> None:
        """Write the records to the archive; drop records that keep failing.

        The first time, also warn of the store; only a leader has records.
        """
        while self._to_note:
            begun, at, record = self._to_note[0]
            try:
                self._archive.note(record, at)
            except Exception as error:
                failure = _of_the_store(error)
                refused = isinstance(failure, AccessDeniedError) or not store_is_away(failure)
                if not refused and time.monotonic() - begun < _HISTORY_SECONDS:
                    self._note_at = time.monotonic() + _HISTORY_PAUSE
                    return
                if not self._warned_of_archive:
                    self._warned_of_archive = True
                    self._log.warning(
                        f"this node cannot write the history of the run, which training does not "
                        f"need: {failure}"
                    )
            self._to_note.pop(0)
            if not self._inspected:
                self._inspected = True
                self._warn_of_the_store()

    def _warn_of_the_store(self) -> None:
        """Log findings about the loss of the run or of its password."""
        with suppress(Exception):  # `_note_failure` reports an outage.
            for finding in self._client.inspect():
                if finding.mark is Mark.WARNING and finding.what in _WARNED_FINDINGS:
                    self._log.warning(f"{self._client.name}: {finding.line}")

    def _beside(self, begun: effects.Begin) -> None:
        """Begin the work in a thread, unless it is under way, and wait for ``begun.seconds``.

        If the work takes longer, its thread ends the node's wait when it is done.
        """
        kind = type(begun)
        mine = next((it for it in reversed(self._asides) if type(it.begun) is kind), None)
        if mine is None or mine.begun.key != begun.key or mine.done.is_set():

            def run(aside: _Aside) -> None:
                try:
                    result = self._result_of(begun)
                except Exception as error:
                    result = exhausted(error) or error
                self._node.finished(begun, result)
                aside.done.set()
                if aside.late:
                    taken_up = partial(self._is_taken_up, begun)
                    self._nudge_until(lambda: self._stopping.is_set() or taken_up(), 1)

            try:
                mine = _Aside(begun, run, f"{self._name}-{_THREADS[kind]}")
            except Exception as error:
                failure = _of_the_store(error)
                if kind is effects.OpenMaster:
                    failure = ExhaustedError(f"cannot open a TCPStore ({failure})")
                self._node.finished(begun, failure)
                return
            self._asides = [*(it for it in self._asides if it.thread.is_alive()), mine]
        if begun.seconds:
            mine.done.wait(begun.seconds)
        if begun.wakes and not mine.done.is_set():
            mine.late = True

    def _result_of(self, begun: effects.Begin) -> Any:
        if isinstance(begun, effects.OpenMaster):
            return self._open_master(begun.key)
        assert isinstance(begun, effects.DialPeer)
        assert self._dial is not None
        return self._dial(begun)

    def _is_taken_up(self, begun: effects.Begin) -> bool:
        if isinstance(begun, effects.OpenMaster):
            return self._node.record.world_id == begun.key
        return self._has_taken_up()

    def _deliver(self, outcome: effects.JoinOutcome) -> None:
        self._outcomes.put(outcome)

    def _note_failure(self, error: Exception) -> None:
        """Log a failure once, however often it repeats."""
        if isinstance(error, ExhaustedError) and self._outage_since is None:
            self._host_is_exhausted = True
        if isinstance(error, RendezvousStateError):
            # The store answers, so this is no outage.
            if str(error) != self._last_error:
                self._log.error(str(error))
            self._last_error = str(error)
            return
        denied, now = isinstance(error, AccessDeniedError), time.monotonic()
        if self._outage_since is None:
            self._outage_since = self._accepted_at
        elif self._logged_refusal or (self._logged_outage and not denied):
            return
        text = str(error)
        if denied and now - self._refusals.get(text, -math.inf) < _REPEATED_AFTER_SECONDS:
            return  # The store keeps refusing one request, and accepts others.
        self._logged_outage, self._logged_refusal = True, denied
        if denied:
            self._refusals[text] = now
            self._log.warning(
                f"{text} -- this node keeps trying; if others may have gone on without it once its "
                "lease is over, its workers are stopped"
            )
        elif (limit := self._node.rules.outage_limit) < math.inf:
            self._log.warning(
                f"{text} -- this node keeps trying; if no heartbeat of it is accepted for "
                f"{limit:g} s, its workers are stopped (on_outage=stop)"
            )
        else:
            self._log.warning(f"{text} -- what runs goes on, and this node keeps trying")

    def _note_success(self, request: effects.Effect[Any]) -> None:
        if type(request) in effects.LOCAL:
            return
        self._accepted_at = time.monotonic()
        if self._outage_since is None:
            return
        seconds = time.monotonic() - self._outage_since
        if self._host_is_exhausted:
            self._log.warning(f"this node can ask the store again after {seconds:.1f} s")
        elif self._logged_outage:
            self._log.warning(f"the store is back after {seconds:.1f} s")
        self._outage_since, self._host_is_exhausted = None, False
        self._logged_outage = self._logged_refusal = False


class _Aside:
    """Work in a thread beside the node's thread.

    Attributes:
        done: set when the work is done or has failed.
        late: whether the node no longer waits for the work.
    """

    def __init__(self, begun: effects.Begin, work: Callable[[_Aside], None], name: str) -> None:
        self.begun = begun
        self.done, self.late = threading.Event(), False
        self.thread = threading.Thread(target=work, args=(self,), name=name, daemon=True)
        self.thread.start()


def perform(client: KeyValueClient, archive: Archive, request: effects.Effect[Any]) -> Any:
    """Carry out an effect on the store; raises `KeyError` for any other effect."""
    return _ON_A_STORE[type(request)](client, archive, request)


def _put_record(client: KeyValueClient, archive: Archive, it: effects.PutRecord) -> None:
    values = {NODES_PREFIX + it.node: it.record.encode()}
    if it.ring:
        values[BELL_KEY] = f"{it.node} {it.record.beat}".encode()
    client.put_many(values)


def _drop_stores(client: KeyValueClient, archive: Archive, it: effects.DropStores) -> None:
    """Delete all c10d stores, but keep this incarnation's rounds from ``before`` on."""
    keys = []
    for key in client.list(STORE_PREFIX):
        run, _, rest = key.removeprefix(STORE_PREFIX).partition("/")
        number = rest.partition("/")[0]
        # No round has a number of 19 digits.
        is_past = number.isdecimal() and len(number) < 19 and int(number) < it.before
        if run != it.incarnation or is_past:
            keys.append(key)
    client.delete_many(keys)


_ON_A_STORE: dict[type, Callable[[KeyValueClient, Archive, Any], Any]] = {
    effects.Park: lambda client, _, it: client.wait(it.key, it.version, it.seconds),
    effects.PutRecord: _put_record,
    effects.PutShards: lambda client, _, it: client.put_many(it.values),
    effects.Ring: lambda client, _, it: client.put(
        BELL_KEY, f"{it.node} {time.monotonic_ns()}".encode()
    ),
    effects.Read: lambda client, _, it: client.get(it.key),
    effects.CompareAndSet: lambda client, _, it: client.compare_and_set(
        it.key, it.value, it.expected
    ),
    effects.List: lambda client, _, it: client.list(it.prefix),
    effects.Drop: lambda client, _, it: client.delete_many(it.keys),
    effects.DropStores: _drop_stores,
    effects.Expire: lambda client, _, it: client.expire(it.seconds),
    effects.PutTombstone: lambda _, archive, it: archive.put_tombstone(it.document),
    effects.ReadExclusions: lambda _, archive, it: archive.exclusions(time.time()),
    effects.ReadTombstone: lambda _, archive, it: archive.tombstone(it.incarnation),
    effects.RecordHistory: lambda _, archive, it: archive.note(it.record),
    effects.Register: lambda _, archive, it: archive.note(it.record),
}


def carry_out(
    client: KeyValueClient,
    archive: Archive,
    work: Generator[effects.Effect[Any], Any, T],
    tell: Callable[[effects.Tell], None],
    watchers: Sequence[Watcher] = (),
) -> T:
    """Drive ``work`` to its end in the calling thread; raises the errors of ``work``."""
    answer: Any = None
    error: Exception | None = None
    broken: list[Watcher] = []
    while True:
        try:
            request = work.send(answer) if error is None else work.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = error = None
        try:
            if isinstance(request, effects.Tell):
                tell(request)
            elif isinstance(request, effects.Rest):
                time.sleep(request.seconds)
            else:
                answer = perform(client, archive, request)
        except Exception as failure:
            error = _of_the_store(failure)
        _show(watchers, broken, request, answer, error)


def _show(
    watchers: Sequence[Watcher],
    failed: list[Watcher],
    request: effects.Effect[Any],
    answer: Any,
    error: Exception | None,
) -> None:
    """Show an effect to watchers; the first error of each is logged, and has no effect."""
    for watcher in watchers:
        try:
            watcher(request, answer, error)
        except Exception as failure:
            if is_signal(failure):
                raise  # A signal's exception is not the watcher's error.
            if watcher not in failed:
                log.exception(
                    "this node could not report what it does, and goes on; please report the error"
                )
                failed.append(watcher)


def _of_the_store(error: Exception) -> Exception:
    """The error as the node expects it from a failed request; raises any other error."""
    if isinstance(error, RendezvousConnectionError | RendezvousStateError):
        return error
    if (missing := exhausted(error)) is None:
        raise error
    return missing


def _empty(queue: SimpleQueue[Any]) -> None:
    with suppress(Empty):
        while True:
            queue.get_nowait()
