"""torch's agent for ``rdzv run``: it counts the failures of its own workers, not their peers' ends.

torchrun counts every failure of a node's workers against ``--max-restarts``, which is 0 unless told
otherwise. But workers also fail because a peer is gone, and notice that long before its lease has
run out: the survivors end a job that could go on.

The rule, for a node whose workers failed in a round of ours:

1. Alone in its round: the failure is its own.
2. ``num_nodes_waiting()`` says that the round is over: a peer was lost, left or starts again. The
   failure follows from that and counts against nothing; the workers start again in the next round.
3. The run was closed: a peer ended the job. This node ends too, with its failure.
4. Until then it waits. It says in the store of the round that its workers failed. The node that
   said so first names the cause as soon as all others have said so too, for a node that was lost
   says nothing; or, where peers hang in a collective, once the time is over within which a loss
   would have shown. The cause is itself, unless only others' workers were killed (SIGKILL, as for
   want of memory), which no peer's failure does to them.
5. The failure of the node that is the cause counts: its agent starts its workers again or ends the
   run. Those of the other nodes follow from that. They wait for it, and count their own only if
   nothing comes.

So a script that always fails ends the job at once; a job whose node was killed goes on; and of a
failure that brought down the workers of all nodes only one counts, on one node alone. Whether the
others failed because of it or of themselves nobody can know: with ``--max-restarts=K`` a script
that always fails is tried up to K times a node. And agents look at their workers ten times a second
(``--monitor-interval``): of failures that are closer together any may be taken for the first.

Time in which the store does not answer is not counted, since the leader could not decide either.
With ``restart_on_loss=false`` a loss ends no round, and what follows from it counts.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from rdzv_plugins.handler import StoreRendezvousHandler
from rdzv_plugins.stores import is_store

__all__ = ["RunAgent", "torchrun"]

log = logging.getLogger(__name__)

# How often a waiting agent looks at what its handler knows from memory.
_LOOK_SECONDS = 0.05

# One look at the store; and the pause after one that failed.
_STORE_SECONDS = 1.0
_PAUSE_SECONDS = 0.2

# What the first node that failed needs to stop its workers, and to ask again or to close the run.
_DECISION_SECONDS = 5.0

# A store that is away for longer has lost this job, as c10d's own time-out has it.
_LONGEST_OUTAGE = 300.0

# Keys in the store of a round: what each node says of its workers, by its rank; the rank of the
# node that said so first; and that of the node whose failure the others' follow from.
_FAILED = "rdzv/failed/"
_FIRST = "rdzv/first"
_CAUSE = "rdzv/cause"
_KILLED = b"killed"


class RunAgent(LocalElasticAgent):
    """torch's agent, with the rule of this module for our own handler.

    It leans on names that are not torch's public ones; ``tests/unit/test_agent.py`` says so when
    torch changes them. There is no public way to tell the agent's loop that a failure does not
    count: `_monitor_workers`, what an agent implements for the loop, is where it is told.
    """

    _failure: RunResult | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._failure = None
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """As torch's; HEALTHY for workers whose failure follows from a change of the round.

        The loop then finds the change itself, stops what is left of the workers, and starts them
        in the next round.
        """
        handler = worker_group.spec.rdzv_handler
        # Asked once: workers that failed and were stopped may look different the next time.
        result = self._failure or super()._monitor_workers(worker_group)
        if result.state is not WorkerState.FAILED or not isinstance(
            handler, StoreRendezvousHandler
        ):
            return result
        self._failure = result
        if self._is_own(worker_group, handler, result):
            return result
        log.warning("the workers failed because the round is over; that counts against nothing")
        return RunResult(state=WorkerState.HEALTHY)

    def _is_own(
        self, worker_group: WorkerGroup, handler: StoreRendezvousHandler, result: RunResult
    ) -> bool:
        """Whether the failure is this node's own; waits until that is known."""
        rank, nodes = worker_group.group_rank or 0, worker_group.group_world_size or 1
        word: _Word | None = None
        try:
            while True:
                # In this order: that a run was closed may be told as a change, too.
                changed = handler.num_nodes_waiting() > 0
                if handler.is_closed():
                    # To ask for another round would only replace torch's report of the failure.
                    self._remaining_restarts = 0
                    return True
                if changed:
                    return False
                if nodes == 1 or (word is not None and word.is_own):
                    return True
                if word is None:
                    log.warning(
                        "the workers failed; waiting up to %.0f s to learn whether a peer is gone",
                        handler.loss_shows_within,
                    )
                    # torch ends what is left of a node's workers by SIGTERM.
                    ends = {failure.exitcode for failure in result.failures.values()}
                    killed = -signal.SIGKILL in ends <= {-signal.SIGKILL, -signal.SIGTERM}
                    word = _Word(worker_group.store, rank, nodes, killed, handler.loss_shows_within)
                    word.start()
                time.sleep(_LOOK_SECONDS)
        finally:
            if word is not None:
                word.stop()


class _Word(threading.Thread):
    """What a node says of its failure to the others of its round, and hears of its cause.

    A thread of its own: torch raises an exception in the agent's at a signal, in the midst of
    whatever it does, and a store's client might swallow it.

    Args:
        store: of the round; torch's stubs do not know what a store written in Python has.
        rank: of the node among the ``nodes`` of the round.
        killed: whether its workers were killed rather than failed.
        patience: seconds within which the loss of a node shows.
    """

    def __init__(self, store: Any, rank: int, nodes: int, killed: bool, patience: float) -> None:
        super().__init__(name="rdzv-failure", daemon=True)
        # One with a time-out of its own; outages are this thread's to sit out.
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._rank = str(rank).encode()
        self._killed = killed
        self._everybody = [f"{_FAILED}{node}" for node in range(nodes)]
        self._patience = patience
        self._first: bool | None = None
        self._cause: bytes | None = None
        # When the patience is over; None: the store is away, or has not been told.
        self._deadline: float | None = None
        self._away_since = time.monotonic()
        self._stopping = threading.Event()

    @property
    def is_own(self) -> bool:
        """Whether the failure of this node counts; False: it is not known to."""
        now, deadline = time.monotonic(), self._deadline
        if self._cause is not None and self._cause == self._rank:
            return True
        if deadline is None:
            return now - self._away_since > _LONGEST_OUTAGE
        return now > deadline + _DECISION_SECONDS

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.is_set() and self._cause is None:
            try:
                if self._first is None:
                    self._first = self._say()
                cause = self._hear()
                # For what the cause's node does there is as much time: it may be lost first.
                if self._deadline is None or cause is not None:
                    self._deadline = time.monotonic() + self._patience
                self._cause = cause
            except DistError:
                if self._deadline is not None:
                    self._deadline, self._away_since = None, time.monotonic()
            self._stopping.wait(_PAUSE_SECONDS)

    def _say(self) -> bool:
        """Returns whether this node is the first to say so."""
        word = _KILLED if self._killed else b"failed"
        self._store.set(f"{_FAILED}{self._rank.decode()}", word)
        first: bytes = self._store.compare_set(_FIRST, "", self._rank)
        self._deadline = time.monotonic() + self._patience
        return first == self._rank

    def _hear(self) -> bytes | None:
        """The cause as it is named, or as this node names it; None: not now."""
        if not self._first:
            if not self._are_there([_CAUSE], _STORE_SECONDS):
                return None
            named: bytes = self._store.get(_CAUSE)
            return named
        rest = _STORE_SECONDS
        if self._deadline is not None:
            rest = min(rest, self._deadline - time.monotonic())
        if self._are_there(self._everybody, rest):
            return self._name_the_cause(self._everybody)
        if rest > 0:
            return None
        return self._name_the_cause([key for key in self._everybody if self._store.check([key])])

    def _name_the_cause(self, said: list[str]) -> bytes:
        words = zip(said, self._store.multi_get(said), strict=True)
        killed = [key.removeprefix(_FAILED).encode() for key, word in words if word == _KILLED]
        cause = killed[0] if killed and not self._killed else self._rank
        self._store.set(_CAUSE, cause)
        return cause

    def _are_there(self, keys: list[str], seconds: float) -> bool:
        try:
            self._store.wait(keys, timedelta(seconds=max(0.0, seconds)))
            return True
        except DistStoreError:
            return False


def torchrun(arguments: Sequence[str]) -> None:
    """torchrun's main function, with `RunAgent` where the backend is one of this package.

    Raises what torchrun's does: `ChildFailedError` where workers failed, `SignalException`,
    `SystemExit`, and what a rendezvous raises.
    """
    options = run.parse_args(arguments)  # type: ignore[no-untyped-call]
    if options.standalone or not is_store(options.rdzv_backend):
        run.main(arguments)
        return
    with _in_the_place_of_torchs_agent():
        run.main(arguments)


@contextmanager
def _in_the_place_of_torchs_agent() -> Iterator[None]:
    # The launcher has no parameter for it; it looks its class up by this name.
    before, api.LocalElasticAgent = api.LocalElasticAgent, RunAgent  # type: ignore[attr-defined]
    try:
        yield
    finally:
        api.LocalElasticAgent = before  # type: ignore[attr-defined]
