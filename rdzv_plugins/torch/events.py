"""torch's own channels: the events of a rendezvous, and the durations of the agent's metrics.

torch's dynamic handler records an `RdzvEvent` at each of its steps, for platforms that have put a
logging handler in the place of torch's null handler. This module records the same events, under the
names that torch's have there, at the same points of this package's protocol; ``docs/logs.md`` lists
them. `construct_and_record_rdzv_event` is not used: it names an event after the file that calls it,
and walks the stack for that.

A platform's handler may be slow, or fail. So the events are handed to a thread, which starts with
the first event; a node never waits for it. Nobody listens: nothing is recorded, and no thread runs.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

from torch.distributed.elastic.events import record_rdzv_event
from torch.distributed.elastic.events.api import NodeState, RdzvEvent
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.metrics.api import NullMetricHandler, getStream, put_metric

from rdzv_plugins.kv import Attempts
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.documents import STATE_KEY, NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.situation import is_full
from rdzv_plugins.protocol.sizes import Sizes

__all__ = ["Events", "record_failed_creation"]

log = logging.getLogger(__name__)

_DESTINATION = "dynamic_rendezvous"
_LOGGER = logging.getLogger(f"torchelastic-events-{_DESTINATION}")
_METRICS_GROUP = "torchelastic"

# The classes of torch's dynamic_rendezvous.py whose methods record events.
_HANDLER = "DynamicRendezvousHandler"
_EXECUTOR = "_DistributedRendezvousOpExecutor"
_STATE = "_BackendRendezvousStateHolder"

# A listener that hangs must not fill the memory.
_MOST_QUEUED = 1000

# As torch's: counts the handlers of a process.
_local_ids = itertools.count()

# Where a node stands that asks for a round, by the names of torch's lists.
_ROUND, _WAIT_LIST, _REDUNDANCY_LIST = "participants", "wait_list", "redundancy_list"
_IN_WORDS = {
    _ROUND: "the participants",
    _WAIT_LIST: "the wait list",
    _REDUNDANCY_LIST: "the redundancy list",
}


class Events:
    """Records one node's events, in a thread of its own.

    Args:
        run_id: as in ``--rdzv-id``.
        address: of the node.
        node: whose effects `watch` is shown.
        name: of the thread.

    Attributes:
        heard: whether anybody listens; decided once, so that else nothing is on the node's path.
    """

    def __init__(self, run_id: str, address: str, node: Node, name: str) -> None:
        self._run_id = run_id
        self._address = address
        self._node = node
        self._name = name
        self.heard = _is_heard()
        self._pid = os.getpid()
        self._local_id = next(_local_ids)
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed = False
        self._attempts = Attempts()
        # The status of the record as last written, and in which of torch's lists the node stands.
        self._status: Status | None = None
        self._place: str | None = None

    # The handler's own events.

    @contextmanager
    def of(self, method: str) -> Iterator[None]:
        """Record the failure of the handler's method if it fails; put its outcome and duration."""
        began, outcome = time.monotonic(), "failure"
        try:
            yield
            outcome = "success"
        # SystemExit ends a spare: torch's handler records its own error in that place.
        except (Exception, SystemExit) as error:
            self.failed(method, error)
            raise
        finally:
            self._put(f"{method}.{outcome}", 1)
            self._put(f"{method}.duration.ms", round((time.monotonic() - began) * 1000))

    def attempts_to_join(self) -> None:
        """Record that the agent asks for a round."""
        self._handler("next_rendezvous", "attempts to join the next round of")

    def joined(self, rank: int, world_size: int, number: int) -> None:
        """Record that the agent gets a round."""
        self._handler(
            "next_rendezvous",
            f"has joined round {number}, as rank {rank} in a world of size {world_size}, of",
            rank=rank,
        )

    def closed(self) -> None:
        """Record that the run is closed, as this node has seen to."""
        self._handler("_close", "has closed", NodeState.SUCCEEDED)

    def failed(self, method: str, error: BaseException) -> None:
        """Record that a method of the handler raises, or could not do its work."""
        if self.heard:
            message = f"{type(error).__name__}: {error}"
            self._record(f"{_HANDLER}.{method}", message, NodeState.FAILED, error=error)

    # The node's.

    def watch(
        self, request: effects.Effect[Any], answer: Any, error: Exception | None = None
    ) -> None:
        """Record what an effect stands for; a `driver.Watcher`, where somebody listens."""
        match request:
            case effects.PutRecord(_, record, _):
                self._after_record(record, error)
            case effects.CompareAndSet(key, value, _) if key == STATE_KEY and error is None:
                self._after_document(RoundDocument.decode(value), written=answer[1])
        self._find_place()

    def _after_record(self, record: NodeRecord, error: Exception | None) -> None:
        before, status = self._status, record.status
        runs = status in (Status.RUN, Status.DONE)
        if error is not None:
            if status is before and runs:
                self.failed("_keep_alive", error)
            return
        self._status = status
        if status is before:
            self._executor("_keep_alive", "updated its keep-alive heartbeat time for")
            self._sync()
            if runs:
                self._handler("_keep_alive", "has sent a keep-alive heartbeat to")
            return
        if status is Status.SPARE:
            self._move(_REDUNDANCY_LIST)
        elif status is Status.RUN:
            self._move(_ROUND)
        elif status is Status.LEFT or (status is Status.JOIN and before is not Status.SPARE):
            # It leaves, or it asks for another round than its last one.
            self._move(None)
        self._sync()

    def _find_place(self) -> None:
        """Note where a node stands that asks for a round: as soon as it has read the document."""
        document, record = self._node.document, self._node.record
        if document is None or self._status not in (Status.JOIN, Status.SPARE):
            return
        asks_for_later = (record.incarnation, record.round) == (
            document.incarnation,
            document.round,
        )
        named = self._node.id in document.ranks and not asks_for_later
        if document.phase is Phase.FORMING or named:
            self._move(_ROUND)
        elif document.phase is Phase.RUNNING and self._place is None:
            full = is_full(document, Sizes.told(document, record))
            # A full round's newcomer becomes a spare with its next record.
            if not ((full or document.finishing) and self._node.id not in document.ranks):
                self._move(_WAIT_LIST)

    def _move(self, place: str | None) -> None:
        before, self._place = self._place, place
        if before == place:
            return
        # torch takes a node silently from its wait list to the participants.
        if before is not None and (place is None or before == _REDUNDANCY_LIST):
            self._executor(f"_remove_from_{before}", f"removed itself from {_IN_WORDS[before]} of")
        if place is not None:
            self._executor(f"_add_to_{place}", f"added itself to {_IN_WORDS[place]} of")

    def _after_document(self, document: RoundDocument, *, written: bool) -> None:
        if not written:
            self._sync(stale=True)
            return
        before = self._node.document
        if document.closed:
            if not document.expires:
                self._executor("_mark_rendezvous_closed", "marked as closed", NodeState.SUCCEEDED)
        elif before is not None:
            gone = {*document.cause.lost.first} - {*before.cause.lost.first}
            if gone or len(document.lost) > len(before.lost):
                who = document.cause.lost if gone else f"{len(document.lost)} of its nodes"
                self._state("sync", f"took out, since they had no heartbeat, {who} of")
            if document.phase is Phase.RUNNING and before.phase is Phase.CONFIRMING:
                self._executor(
                    "_mark_rendezvous_complete",
                    f"marked round {document.round} as complete in",
                    NodeState.SUCCEEDED,
                )
        self._sync()

    def _sync(self, *, stale: bool = False) -> None:
        does = "has a stale state and failed to sync" if stale else "has successfully synced"
        self._executor("run", f"{does} its local changes with the other nodes of")

    # How an event gets to who listens.

    def _handler(
        self,
        method: str,
        does: str,
        state: NodeState = NodeState.RUNNING,
        rank: int | None = None,
    ) -> None:
        if self.heard:
            self._record(f"{_HANDLER}.{method}", self._sentence(does), state, rank=rank)

    def _executor(self, method: str, does: str, state: NodeState = NodeState.RUNNING) -> None:
        self._record(f"{_EXECUTOR}.{method}", self._sentence(does), state)

    def _state(self, method: str, does: str) -> None:
        self._record(f"{_STATE}.{method}", self._sentence(does), NodeState.RUNNING)

    def _sentence(self, does: str) -> str:
        return f"The node '{self._node.record.label}' {does} the rendezvous '{self._run_id}'."

    def _record(
        self,
        name: str,
        message: str,
        state: NodeState,
        rank: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        event = RdzvEvent(
            name=f"dynamic_rendezvous.py:{name}",
            run_id=self._run_id,
            message=message,
            hostname=self._address,
            pid=self._pid,
            node_state=state,
            rank=rank,
            local_id=self._local_id,
            error_trace="".join(traceback.format_exception(error)) if error is not None else "",
        )
        self._hand_over(partial(record_rdzv_event, event))

    def _put(self, name: str, value: int) -> None:
        if not isinstance(getStream(_METRICS_GROUP).handler, NullMetricHandler):
            self._hand_over(partial(put_metric, f"rdzv.{name}", value, _METRICS_GROUP))

    def _hand_over(self, delivery: Callable[[], None]) -> None:
        if self._queue.qsize() >= _MOST_QUEUED or os.getpid() != self._pid:
            return
        self._queue.put(delivery)
        if self._thread is None and not self._attempts.seconds_left:
            self._thread = threading.Thread(target=self._deliver, name=self._name, daemon=True)
            try:
                self._thread.start()
            except (RuntimeError, MemoryError):
                # None can start now: with a later event, unless the process exits.
                self._thread = None
                self._attempts.fail()

    def _deliver(self) -> None:
        while (delivery := self._queue.get()) is not None:
            try:
                delivery()
            except Exception:
                if not self._failed:
                    log.exception(
                        "a listener to torch's events or metrics failed; the node goes on"
                    )
                self._failed = True

    def close(self, seconds: float) -> None:
        """Deliver what is queued, within so many seconds; what comes later is dropped."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(seconds)


def record_failed_creation(run_id: str, error: BaseException) -> None:
    """Record that no handler could be created; torch's function of that name does."""
    if not _is_heard():
        return
    event = RdzvEvent(
        name="dynamic_rendezvous.py:create_handler",
        run_id=run_id,
        message=f"{type(error).__name__}: {error}",
        hostname=socket.gethostname(),
        pid=os.getpid(),
        node_state=NodeState.FAILED,
        error_trace="".join(traceback.format_exception(error)),
    )
    try:
        record_rdzv_event(event)
    except Exception:
        log.exception("a listener to torch's events failed")


def _is_heard() -> bool:
    """Whether anybody listens to torch's events; torch itself asks for the first of these only."""
    return any(
        not isinstance(handler, logging.NullHandler)
        for handler in (get_logging_handler(_DESTINATION), *_LOGGER.handlers)
    )
