"""Carries out a node's effects on a store, in one background thread. It decides nothing."""

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
"""Is shown each effect once it is carried out, with its answer or with why it failed."""

# After an unforeseen error the node starts over; the pause prevents a busy loop.
_PAUSE_AFTER_A_BUG = 1.0

# Findings of `KeyValueClient.inspect` that may lose a run, or the password.
_TOLD_OF_THE_STORE = ("persistence", "eviction", "TLS")

# Not while agents wait for the round and start their workers.
_NOTED_AFTER_SECONDS = 1.0
# The ends of the names of the threads that do something beside a node.
_THREADS = {
    effects.OpenMaster: "master",
    effects.DialPeer: "network",
}

# For how long a record is tried: a store's servers may elect a leader, which takes some 10 s.
_HISTORY_SECONDS = 30.0

# The same refusal is not told sooner again.
_REPEATED_AFTER_SECONDS = 60.0

# glibc's resolver gives a query up after twice 5 s, and may make several of them.
_LONGEST_LOOK_UP = 30.0


class Driver:
    """The thread that drives a node.

    Args:
        node: whose requests are carried out.
        client: the run's namespace; the driver does not close it.
        archive: of the run's id.
        open_master: opens a TCPStore for the round of a world_id and returns its ``address:port``;
            called in a thread of its own. Raises `RendezvousStateError` if trying again is of no
            use.
        run_id: after which the threads are named.
        watchers: of the node's effects.
        dial: carries out a dial of another node, and returns the seconds that it took; called in a
            thread of its own. None: no node asks for that.
        keep_links: has links to these nodes and to no others, ``address:port`` by id, and says this
            over them; returns at once. None: this node has none.
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
        self._log = RunLog(log, run_id, node)
        self._name = f"rdzv-{run_id}"
        self._thread: threading.Thread | None = None
        # The last of each kind, and earlier ones that still hang, as in name resolution.
        self._asides: list[_Aside] = []
        self._dial = dial
        self._keep_links = keep_links
        # For the archive: since when a record is to be written, when it was so, and the record.
        self._to_note: list[tuple[float, datetime, RoundRecord]] = []
        self._stopping = threading.Event()
        # Queues, not conditions: a signal's exception in the main thread could leave a lock held.
        self._nudges: SimpleQueue[None] = SimpleQueue()
        self._outcomes: SimpleQueue[effects.JoinOutcome] = SimpleQueue()
        self._outage_since: float | None = None
        self._told_of_outage = self._told_of_refusal = False
        # When each refusal was told last.
        self._refusals: dict[str, float] = {}
        # The outage is this host's, not the store's.
        self._ran_out = False
        self._told: str | None = None
        self._told_of_the_archive = False
        self._inspected = False

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def outage_seconds(self) -> float:
        """For how long no request has reached the store; 0: the last one has."""
        since = self._outage_since
        return time.monotonic() - since if since is not None else 0.0

    def join(
        self, failed: bool = False, waited: float = 0.0, patience: float = 0.0
    ) -> effects.JoinOutcome:
        """Order a join and wait for its outcome, which is empty if `stop` came first.

        One caller at a time. The caller only waits and makes no request: at a signal torch raises
        an exception in it, which a store's client could swallow. An exception withdraws the join.
        The first two arguments are those of `Node.order_join`. Where this host lets no thread start
        for ``patience`` seconds, this raises `ExhaustedError`.
        """
        _empty(self._outcomes)
        if self._stopping.is_set():
            return effects.JoinOutcome()
        try:
            # Inside the try: starting a thread waits, and the exception may be raised meanwhile.
            self._node.order_join(failed, waited)
            self._have_it_taken_up(patience - waited)
            return take(self._outcomes)
        except BaseException:
            self._node.order_withdrawal()
            self._nudge_until(self._has_taken_up, 1)
            raise

    def stay_out(self, reason: str, seconds: float) -> effects.JoinOutcome | None:
        """Tell the others that this node is unfit, and wait for ``seconds``.

        Returns early where the run is closed, with the outcome, or once `stop` came, with an empty
        one. As `join`, for one caller at a time.
        """
        _empty(self._outcomes)
        if self._stopping.is_set():
            return effects.JoinOutcome()
        self._node.report_unfit(reason)
        with suppress(ExhaustedError):  # It is told with the next reason.
            self._have_it_taken_up(0.0)
        try:
            return take(self._outcomes, seconds)
        except Empty:
            return None

    def _have_it_taken_up(self, patience: float) -> None:
        deadline, attempts = time.monotonic() + patience, Attempts()
        while not self.running:
            self._thread = threading.Thread(target=self._live, name=self._name, daemon=True)
            try:
                self._thread.start()
                return
            except Exception as error:
                self._thread = None
                missing = _of_the_store(error)
            if time.monotonic() >= deadline:
                raise missing
            if attempts.fail():
                self._log.warning(f"{missing} -- what runs goes on, and this node keeps trying")
            with suppress(Empty):
                # Nobody but `stop` tells of an outcome now, which the caller is to take.
                self._outcomes.put(take(self._outcomes, attempts.seconds_left))
                return
        self._nudge_until(self._has_taken_up, 5)

    def report_done(self) -> None:
        """The workers of this node succeeded."""
        self._node.report_done()
        self._nudge()

    def report_gone(self, node: str) -> None:
        """The process of this node has ended, as far as a link tells; from any thread."""
        self._node.report_gone(node)
        self._nudge()

    def report_back(self, node: str) -> None:
        """It answers after all; from any thread."""
        self._node.report_back(node)
        self._nudge()

    def report_others(self, others: frozenset[Standing]) -> None:
        """What they say of themselves over links; from any thread."""
        self._node.report_others(others)
        self._nudge()

    def note_retry(self) -> None:
        """The client makes a request again; from any thread."""
        self._node.note_retry()
        if self._thread is threading.current_thread() and (news := self._node.news_for_others()):
            self._perform(news)

    def allow_growth(self) -> None:
        """The workers of this node say that now is a good moment to let newcomers in."""
        self._node.allow_growth()
        self._nudge()

    def stop(self, seconds: float) -> None:
        """End the thread, for good; after ``seconds`` it is left to end by itself."""
        self._stopping.set()
        self._outcomes.put(effects.JoinOutcome())
        self._nudge_until(lambda: not self.running, seconds)

    def await_masters(self, seconds: float) -> None:
        """Wait until no TCPStore is being opened; what takes longer, the end of the process awaits.

        TCPStore's C++ aborts the process if the interpreter ends first.
        """
        deadline = time.monotonic() + seconds
        for aside in self._asides:
            if isinstance(aside.begun, effects.OpenMaster):
                aside.thread.join(max(0.0, deadline - time.monotonic()))
                if aside.thread.is_alive():
                    atexit.register(aside.thread.join, _LONGEST_LOOK_UP)

    def _has_taken_up(self) -> bool:
        return self._stopping.is_set() or not self._node.ordered

    def _nudge_until(self, done: Callable[[], bool], seconds: float) -> None:
        # An interrupt that comes just before the thread parks wakes nothing: repeat it.
        deadline = time.monotonic() + seconds
        pause = 0.001
        while not done() and time.monotonic() < deadline:
            self._nudge()
            if self._thread is not None:
                self._thread.join(pause) if self._stopping.is_set() else time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _nudge(self) -> None:
        """End the thread's `Park` or `Rest`, and whatever else waits in the store."""
        self._nudges.put(None)
        self._client.interrupt()

    def _live(self) -> None:
        missing: ExhaustedError | None = None
        while not self._stopping.is_set():
            try:
                self._drive(watched(self._node.run(), self._watchers), missing)
            except Exception as error:
                # In the node itself, which bears it as soon as it can.
                if (missing := exhausted(error)) is None:
                    log.exception(
                        "this node's rendezvous met an unforeseen error, and starts over; please "
                        "report it"
                    )
                    self._deliver(effects.JoinOutcome(error=error))
                self._stopping.wait(_PAUSE_AFTER_A_BUG)
        with suppress(Exception):
            self._note(math.inf)

    def _drive(self, life: effects.Effects[None], failed: Exception | None = None) -> None:
        """Carry out ``life``; ``failed``: what its first request is answered with."""
        request = next(life)
        over = False
        while self._node.closing or not self._stopping.is_set():
            if failed is None:
                try:
                    answer = self._perform(request)
                except Exception as error:
                    failed = _of_the_store(error)
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
                # The agent may wait in its c10d store for nodes that are gone.
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
                self._to_note.append((time.monotonic(), datetime.now(UTC), record))
                return None
            case effects.Park(key, version, seconds) if self._to_note:
                self._note(time.monotonic() - _NOTED_AFTER_SECONDS)
                quiet = _NOTED_AFTER_SECONDS if self._to_note else math.inf
                return self._client.wait(key, version, min(seconds, quiet))
            case effects.Rest(seconds):
                _empty(self._nudges)
                with suppress(Empty):
                    self._nudges.get(timeout=seconds)
                return None
        return perform(self._client, self._archive, request)

    def _note(self, since: float) -> None:
        """Write to the archive what is to be written since then, and not for 30 s already.

        The first time, the store is inspected too, so that the log of the leader warns of it.
        """
        while self._to_note and self._to_note[0][0] <= since:
            begun, at, record = self._to_note[0]
            try:
                self._archive.note(record, at)
            except Exception as error:
                failure = _of_the_store(error)
                refused = isinstance(failure, AccessDeniedError) or not store_is_away(failure)
                if not refused and time.monotonic() - begun < _HISTORY_SECONDS:
                    return
                if not self._told_of_the_archive:
                    self._told_of_the_archive = True
                    self._log.warning(
                        f"this node cannot write the history of the run, which training does not "
                        f"need: {failure}"
                    )
            self._to_note.pop(0)
            if not self._inspected:
                self._inspected = True
                self._warn_of_the_store()

    def _warn_of_the_store(self) -> None:
        """Log what may lose the run, or its password.

        A store that does not answer now is told of elsewhere, and odd answers by `rdzv check`.
        """
        with suppress(Exception):
            for finding in self._client.inspect():
                if finding.mark is Mark.WARNING and finding.what in _TOLD_OF_THE_STORE:
                    self._log.warning(f"{self._client.name}: {finding.line}")

    def _beside(self, begun: effects.Begin) -> None:
        """Do it in a thread of its own, unless that goes on; wait for it as long as it says.

        If it takes longer, its thread ends the node's wait once it is done.
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
            self._ran_out = True
        if isinstance(error, RendezvousStateError):
            # The store answers: what it holds, or this host, is at fault.
            if str(error) != self._told:
                self._log.error(str(error))
            self._told = str(error)
            return
        denied, now = isinstance(error, AccessDeniedError), time.monotonic()
        if self._outage_since is None:
            self._outage_since = now
        elif self._told_of_refusal or (self._told_of_outage and not denied):
            return
        text = str(error)
        if denied and now - self._refusals.get(text, -math.inf) < _REPEATED_AFTER_SECONDS:
            return  # One request alone is refused, again and again, and others are not.
        self._told_of_outage, self._told_of_refusal = True, denied
        if denied:
            self._refusals[text] = now
            self._log.warning(
                f"{text} -- this node keeps trying; if others may have gone on without it once its "
                "lease is over, its workers are stopped"
            )
        elif (limit := self._node.outage_limit) < math.inf:
            self._log.warning(
                f"{text} -- this node keeps trying; if no heartbeat of it is accepted for "
                f"{limit:g} s, its workers are stopped (on_outage=stop)"
            )
        else:
            self._log.warning(f"{text} -- what runs goes on, and this node keeps trying")

    def _note_success(self, request: effects.Effect[Any]) -> None:
        if self._outage_since is None or type(request) in effects.LOCAL:
            return
        seconds = time.monotonic() - self._outage_since
        if self._ran_out:
            self._log.warning(f"this node can ask the store again after {seconds:.1f} s")
        elif self._told_of_outage:
            self._log.warning(f"the store is back after {seconds:.1f} s")
        self._outage_since, self._ran_out = None, False
        self._told_of_outage = self._told_of_refusal = False


class _Aside:
    """A thread of its own beside the one that beats; the node asked for the last of each kind.

    Attributes:
        done: set when it is done, or has failed.
        late: whether the node no longer waits for it.
    """

    def __init__(self, begun: effects.Begin, work: Callable[[_Aside], None], name: str) -> None:
        self.begun = begun
        self.done, self.late = threading.Event(), False
        self.thread = threading.Thread(target=work, args=(self,), name=name, daemon=True)
        self.thread.start()


def perform(client: KeyValueClient, archive: Archive, request: effects.Effect[Any]) -> Any:
    """Carry out one effect with one call on the store; `effects.Tell` is not for a store."""
    match request:
        case effects.Park(key, version, seconds):
            return client.wait(key, version, seconds)
        case effects.PutRecord(node, record, ring):
            values = {NODES_PREFIX + node: record.encode()}
            if ring:
                values[BELL_KEY] = f"{node} {record.beat}".encode()
            return client.put_many(values)
        case effects.PutShards(values):
            return client.put_many(values)
        case effects.Ring(node):
            return client.put(BELL_KEY, f"{node} {time.monotonic_ns()}".encode())
        case effects.Read(key):
            return client.get(key)
        case effects.CompareAndSet(key, value, expected):
            return client.compare_and_set(key, value, expected)
        case effects.List(prefix):
            return client.list(prefix)
        case effects.Drop(keys):
            return client.delete_many(keys)
        case effects.DropStores(incarnation, before):
            return client.delete_many(_stores(client, incarnation, before))
        case effects.Expire(seconds):
            return client.expire(seconds)
        case effects.PutTombstone(document):
            return archive.put_tombstone(document)
        case effects.ReadExclusions():
            return archive.exclusions(time.time())
        case effects.ReadTombstone(incarnation):
            return archive.tombstone(incarnation)
        case effects.RecordHistory(record) | effects.Register(record):
            return archive.note(record)
    raise TypeError(f"{request!r} is not for a store")


def carry_out(
    client: KeyValueClient,
    archive: Archive,
    work: Generator[effects.Effect[Any], Any, T],
    tell: Callable[[effects.Tell], None],
) -> T:
    """Drive ``work`` to its end in the calling thread; raises what it makes of a failed request."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            request = work.send(answer) if error is None else work.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = error = None
        if isinstance(request, effects.Tell):
            tell(request)
            continue
        if isinstance(request, effects.Rest):
            time.sleep(request.seconds)
            continue
        try:
            answer = perform(client, archive, request)
        except Exception as failure:
            error = _of_the_store(failure)


def watched(
    work: Generator[effects.Effect[Any], Any, T], watchers: Sequence[Watcher]
) -> Generator[effects.Effect[Any], Any, T]:
    """``work``, whose effects the watchers see; what one raises is logged and harms nothing."""
    return _watched(work, watchers) if watchers else work


def _watched(
    work: Generator[effects.Effect[Any], Any, T], watchers: Sequence[Watcher]
) -> Generator[effects.Effect[Any], Any, T]:
    answer: Any = None
    error: Exception | None = None
    failed: list[Watcher] = []
    while True:
        try:
            request = work.send(answer) if error is None else work.throw(error)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = error = None
        try:
            answer = yield request
        except (RendezvousConnectionError, RendezvousStateError) as failure:
            error = failure
        for watcher in watchers:
            try:
                watcher(request, answer, error)
            except Exception as failure:
                if is_signal(failure):
                    raise  # It is no error of the watcher's.
                if watcher not in failed:
                    log.exception(
                        "this node could not report what it does, and goes on; please report the "
                        "error"
                    )
                    failed.append(watcher)


def _of_the_store(error: Exception) -> Exception:
    """The error that the node is told of a failed request; raises any other error."""
    if isinstance(error, RendezvousConnectionError | RendezvousStateError):
        return error
    if (missing := exhausted(error)) is None:
        raise error
    return missing


def _empty(queue: SimpleQueue[Any]) -> None:
    with suppress(Empty):
        while True:
            queue.get_nowait()


def _stores(client: KeyValueClient, incarnation: str, before: int) -> list[str]:
    """The keys of all c10d stores except those of this incarnation's rounds from ``before`` on."""
    keys = []
    for key in client.list(STORE_PREFIX):
        run, _, rest = key.removeprefix(STORE_PREFIX).partition("/")
        number = rest.partition("/")[0]
        # A number of more digits is no round's.
        is_past = number.isdecimal() and len(number) < 19 and int(number) < before
        if run != incarnation or is_past:
            keys.append(key)
    return keys
