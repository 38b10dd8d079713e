"""torch's own channels: the events of a rendezvous, and the durations of the agent's metrics.

A listener to torch's dynamic handler gets this package's events under the same names;
``docs/logs.md`` lists them. A listener that fails is logged, and harms no node.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.events import record_rdzv_event
from torch.distributed.elastic.events.api import NodeState, RdzvEvent
from torch.distributed.elastic.metrics.api import put_metric

log = logging.getLogger(__name__)

_CLASS = "DynamicRendezvousHandler."
# Like torch's own: counts the handlers of a process.
_local_ids = itertools.count()


class Events:
    """Records what the handler of one node does; ``label`` names the node in messages."""

    def __init__(self, run_id: str, address: str, label: str) -> None:
        self._run_id, self._address, self._label = run_id, address, label
        self._local_id = next(_local_ids)

    @contextmanager
    def of(self, method: str) -> Iterator[None]:
        """Record the outcome and duration of the handler's method, and its failure."""
        began, outcome = time.monotonic(), "failure"
        try:
            yield
            outcome = "success"
        # Also SystemExit, which ends a spare: torch's handler records its own error there.
        except (Exception, SystemExit) as error:
            self.failed(_CLASS + method, error)
            raise
        finally:
            milliseconds = round((time.monotonic() - began) * 1000)
            with _harmless():
                put_metric(f"rdzv.{method}.{outcome}", 1, "torchelastic")
                put_metric(f"rdzv.{method}.duration.ms", milliseconds, "torchelastic")

    def joins(self, what: str, rank: int | None = None) -> None:
        """Record a step of a join: "The node 'host1[7]' <what> the rendezvous 'job1'."."""
        self._did("next_rendezvous", what, NodeState.RUNNING, rank)

    def closed(self) -> None:
        """Record that this node has closed the run."""
        self._did("_close", "has closed", NodeState.SUCCEEDED)

    def _did(self, method: str, what: str, state: NodeState, rank: int | None = None) -> None:
        message = f"The node '{self._label}' {what} the rendezvous '{self._run_id}'."
        self._record(_CLASS + method, message, state, rank=rank)

    def failed(self, name: str, error: BaseException) -> None:
        """Record an error, with its trace."""
        trace = "".join(traceback.format_exception(error))
        self._record(name, f"{type(error).__name__}: {error}", NodeState.FAILED, error_trace=trace)

    def _record(self, name: str, message: str, state: NodeState, **more: Any) -> None:
        name, where = f"dynamic_rendezvous.py:{name}", self._address
        event = RdzvEvent(name, self._run_id, message, where, os.getpid(), state, **more)
        event.local_id = self._local_id
        with _harmless():
            record_rdzv_event(event)


@contextmanager
def _harmless() -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("a listener to torch's events or metrics failed; the node goes on")
