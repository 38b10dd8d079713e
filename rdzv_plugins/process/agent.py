"""torch's agent for ``rdzv run``: it counts only the failures that its own workers caused.

torchrun counts every failure of a node's workers against ``--max-restarts``, by default 0. But
workers also fail because a peer is gone, long before the peer's lease expires. With torchrun the
surviving nodes then end a job that could continue.

The rule for a node whose workers failed in a round of this package's handler:

1. The node is alone in its round: the failure is its own.
2. ``num_nodes_waiting()`` says that the round is over, because a peer was lost, left or restarts.
   The failure follows from that and does not count; the workers start again in the next round.
3. The run was closed by a peer. This node ends with its failure, or with status 93 if the run was
   closed for ``no_progress_rounds``.
4. Otherwise the node reports the failure in the round's store, and waits. The node that reported
   first names the cause once all other nodes have reported; a lost node never does. If peers hang
   in a collective, it names the cause after the time within which a loss would show. The cause is
   the first node, or a node whose workers were killed (SIGKILL, for example out of memory) if the
   first node's were not, because no peer's failure kills workers.
5. The failure of the cause counts: its agent restarts its workers or ends the run. The other nodes
   wait for that, and count their own failure only if neither comes.

Hence a script that always fails ends the job at once, a job whose node was killed continues, and a
failure that ends all workers counts once, on one node. With ``--max-restarts=K`` a script that
always fails is tried up to K times per node, because the other nodes' failures look the same as
failures that follow from the first. Agents check their workers ten times a second
(``--monitor-interval``), so the order of closer failures is unknown.

Time in which the store does not answer does not count, because the leader cannot decide either.
With ``restart_on_loss=false`` a loss ends no round, and failures that follow from it count.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistError, DistStoreError, run
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record
from torch.distributed.launcher import api

from rdzv_plugins.kv import Attempts, exhausted
from rdzv_plugins.process.guard import Guard
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.process.notice import Notice
from rdzv_plugins.process.signals import signal_behind
from rdzv_plugins.process.stopping import stop
from rdzv_plugins.process.warm import Standbys, in_the_place_of
from rdzv_plugins.process.worker import VARIABLE
from rdzv_plugins.stores import is_store
from rdzv_plugins.torch.torchrun import parse

log = logging.getLogger(__name__)

# How long torch may take to reap a stopped worker; a worker that hangs in the kernel never ends.
_REAP_SECONDS = 1
# How often a waiting agent checks its handler's state in memory.
_LOOK_SECONDS = 0.05
# The time-out of a request to the store, and the pause before the next request.
_STORE_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
# How long the node that is the cause may take to stop its workers, and to rejoin or close the run.
_DECISION_SECONDS = 5.0
# After a longer outage of the store the failure counts, as after c10d's own time-out.
_LONGEST_OUTAGE = 300.0

# Keys in the round's store: each node's report of its failure, by rank; the rank of the node that
# reported first; and the rank of the cause.
_FAILED = "rdzv/failed/"
_FIRST = "rdzv/first"
_CAUSE = "rdzv/cause"
_KILLED = b"killed"


class RunAgent(LocalElasticAgent):
    """torch's agent, with the rule of this module for this package's handler.

    torch has no public hooks for this. The class overrides `_monitor_workers` for the count,
    `_invoke_run` for signals, and `_start_workers` for the guard, the standbys and the notice.
    ``tests/handlers/test_agent.py`` fails when torch changes the private names.
    """

    _failure: RunResult | None = None
    _guard: Guard | None = None
    _notice: Notice | None = None

    def __init__(self, *args: Any, standbys: Standbys | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._standbys = standbys
        if standbys is not None:
            standbys.attend(self._worker_group.spec)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, StoreRendezvousHandler):
            handler.blames = True
            self._notice = Notice(handler)
        try:
            result: RunResult = super().run(role)
            return result
        finally:
            if self._standbys is not None:
                self._standbys.close()
            if self._guard is not None:
                self._guard.stop()

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Like torch's, but raises the exception of a signal although an error has replaced it."""
        try:
            result: RunResult = super()._invoke_run(role)
            return result
        except Exception as error:
            if (signalled := signal_behind(error)) is not None:
                raise signalled from None
            raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._failure = None
        self._guard = guard = self._guard or Guard()
        guard.start()
        if self._standbys is not None:
            # Standbys become workers before this process knows their ranks.
            guard.watch(self._standbys.pids)
        if (handed_down := os.environ.get(VARIABLE)) is not None:
            guard.expect(VARIABLE, handed_down)
        with self._standbys.starting() if self._standbys is not None else nullcontext():
            started: dict[int, Any] = super()._start_workers(worker_group)
        guard.watch(started.values())
        self._stop_all_that_workers_start(guard)
        if self._notice is not None:
            self._notice.begin()
        return started

    def _stop_all_that_workers_start(self, guard: Guard) -> None:
        """Make torch's stop of the workers include the processes that they have started.

        All processes have ``--shutdown-timeout`` to end. torch itself heeds the option only at a
        signal and at the end, and otherwise kills workers after 30 s.
        """
        context = self._pcontext
        assert context is not None
        close, seconds, stopped = context.close, getattr(self, "_shutdown_timeout", 30), False

        def close_all(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            nonlocal seconds, stopped
            if self._notice is not None:
                self._notice.end()
            if not stopped and os.path.isdir("/proc/self"):
                stop(context.pids(), death_sig or signal.SIGTERM, seconds, self._patience)
                # The workers have ended, and new processes may get their pids.
                guard.watch(())
                stopped, seconds = True, _REAP_SECONDS
            close(death_sig, seconds)

        context.close = close_all  # type: ignore[method-assign]

    def _patience(self) -> float | None:
        """See `StoreRendezvousHandler.patience_after_a_loss`; None after a signal."""
        handler = self._worker_group.spec.rdzv_handler
        if signal_behind(sys.exception()) or not isinstance(handler, StoreRendezvousHandler):
            return None
        return handler.patience_after_a_loss

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Like torch's, but HEALTHY if the failure follows from a change of the round.

        The loop then detects the change, stops the remaining workers, and starts all in the next
        round.
        """
        handler = worker_group.spec.rdzv_handler
        if self._guard is not None:
            self._guard.renew()
        if self._standbys is not None:
            self._standbys.renew(isinstance(handler, StoreRendezvousHandler) and handler.can_save)
        if self._notice is not None:
            self._notice.look()
        # Keep the first result: stopping the remaining workers changes later results.
        result = self._failure or super()._monitor_workers(worker_group)
        if result.state is WorkerState.UNHEALTHY:
            return self._stuck(worker_group)
        if result.state is not WorkerState.FAILED or not isinstance(
            handler, StoreRendezvousHandler
        ):
            return result
        self._failure = result
        if self._is_own(worker_group, handler, result):
            return result
        log.warning("the workers failed because the round is over; no restart is counted")
        return RunResult(state=WorkerState.HEALTHY)

    def _stuck(self, worker_group: WorkerGroup) -> RunResult:
        """A failure for workers in uninterruptible sleep, which torch's launcher would ignore."""
        pids = self._pcontext.pids() if self._pcontext is not None else {}
        # torch's own table; it may not exist yet.
        stuck = set(getattr(self, "_uninterruptible_state_first_seen", pids.values()))
        failures = {}
        for local_rank, pid in pids.items():
            if pid in stuck:
                # The worker has no exit code, because it cannot end.
                failure = ProcessFailure(local_rank, pid, exitcode=0, error_file="")
                failure.message = "in uninterruptible sleep: the kernel, a device or a disk hangs"
                failures[worker_group.workers[local_rank].global_rank] = failure
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _is_own(
        self, worker_group: WorkerGroup, handler: StoreRendezvousHandler, result: RunResult
    ) -> bool:
        """Wait until it is known whether the failure is this node's own."""
        rank, nodes = worker_group.group_rank or 0, worker_group.group_world_size or 1
        report: _Report | None = None
        began, pauses = time.monotonic(), Attempts()
        try:
            while True:
                # Ask for the change first, because closing the run may show as a change, too.
                changed, closed = handler.num_nodes_waiting() > 0, handler.is_closed()
                if handler.made_no_progress:
                    return False  # The loop joins again, and the agent ends with status 93.
                if closed:
                    # Joining again would only replace torch's report of the failure.
                    self._remaining_restarts = 0
                    return True
                if changed:
                    return False
                if nodes == 1 or (report is not None and report.is_own):
                    return True
                if report is None and time.monotonic() - began > _LONGEST_OUTAGE:
                    return True
                if report is None and not pauses.seconds_left:
                    if not pauses.failures:
                        log.warning(
                            "the workers of this node failed; its agent waits up to %.0f s to "
                            "learn whether another node is gone",
                            handler.loss_shows_within,
                        )
                    # torch stops the remaining workers by SIGTERM.
                    ends = {failure.exitcode for failure in result.failures.values()}
                    killed = -signal.SIGKILL in ends <= {-signal.SIGKILL, -signal.SIGTERM}
                    patience = handler.loss_shows_within
                    try:
                        report = _Report(
                            worker_group.store, rank, nodes, killed, patience,
                            lambda: handler.grace_left,
                        )  # fmt: skip
                        report.start()
                    except Exception as error:
                        if exhausted(error) is None:
                            raise
                        report = None
                        pauses.fail()  # This host lets no thread start now.
                time.sleep(_LOOK_SECONDS)
        finally:
            if report is not None:
                report.stop()


class _Report(threading.Thread):
    """Reports this node's failure to the other nodes of its round, and learns the cause.

    A thread, because at a signal torch raises an exception in the agent's thread, which a store's
    client might swallow.

    Args:
        store: the round's store; ``Any``, because torch's stubs lack a Python store's methods.
        rank: the node's rank among the ``nodes`` of the round.
        killed: whether a signal killed the node's workers.
        patience: seconds within which the loss of a node shows.
        grace_left: see `StoreRendezvousHandler.grace_left`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        nodes: int,
        killed: bool,
        patience: float,
        grace_left: Callable[[], float],
    ) -> None:
        super().__init__(name="rdzv-failure", daemon=True)
        # A short time-out, because this thread itself waits until an outage ends.
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._rank = str(rank).encode()
        self._killed = killed
        self._everybody = [f"{_FAILED}{node}" for node in range(nodes)]
        self._patience = patience
        self._grace_left = grace_left
        self._first: bool | None = None
        self._cause: bytes | None = None
        # When the patience ends; None: the store is unreachable, or has no report yet.
        self._deadline: float | None = None
        self._away_since = time.monotonic()
        self._stopping = threading.Event()

    @property
    def is_own(self) -> bool:
        """Whether the failure of this node counts; False while that is unknown."""
        now, deadline = time.monotonic(), self._deadline
        if self._cause is not None and self._cause == self._rank:
            return True
        if deadline is None:
            return now - self._away_since > _LONGEST_OUTAGE
        return now > self._graced(deadline) + _DECISION_SECONDS

    def _graced(self, deadline: float) -> float:
        return max(deadline, time.monotonic() + self._grace_left() + self._patience)

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        while not self._stopping.is_set() and self._cause is None:
            try:
                if self._first is None:
                    self._first = self._send()
                cause = self._find_cause()
                # The named node may be lost before it acts, so the patience begins again.
                if self._deadline is None or cause is not None:
                    self._deadline = time.monotonic() + self._patience
                self._cause = cause
            except DistError:
                if self._deadline is not None:
                    self._deadline, self._away_since = None, time.monotonic()
            self._stopping.wait(_PAUSE_SECONDS)

    def _send(self) -> bool:
        """Report the failure; return whether this node is the first."""
        self._store.set(f"{_FAILED}{self._rank.decode()}", _KILLED if self._killed else b"failed")
        first: bytes = self._store.compare_set(_FIRST, "", self._rank)
        self._deadline = time.monotonic() + self._patience
        return first == self._rank

    def _find_cause(self) -> bytes | None:
        """The rank of the cause; None: no node has named it yet."""
        if not self._first:
            if not self._are_there([_CAUSE], _STORE_SECONDS):
                return None
            named: bytes = self._store.get(_CAUSE)
            return named
        rest = _STORE_SECONDS
        if self._deadline is not None:
            rest = min(rest, self._graced(self._deadline) - time.monotonic())
        if self._are_there(self._everybody, rest):
            return self._name_the_cause(self._everybody)
        if rest > 0:
            return None
        return self._name_the_cause([key for key in self._everybody if self._store.check([key])])

    def _name_the_cause(self, keys: list[str]) -> bytes:
        reports = zip(keys, self._store.multi_get(keys), strict=True)
        killed = [key.removeprefix(_FAILED).encode() for key, it in reports if it == _KILLED]
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
    """torchrun's main function, with `RunAgent` if the backend uses this package's handler.

    Raises the same errors as torchrun's: `ChildFailedError` if workers failed, `SignalException`,
    `SystemExit`, and the errors of a rendezvous.
    """
    options = parse(arguments)
    if hasattr(options, "signals_to_handle"):
        options.signals_to_handle = _without_ignored(options.signals_to_handle)
    # torchrun's main function does the same, but takes only unparsed arguments.
    launch = record(run.run)
    is_ours = not options.standalone and is_store(options.rdzv_backend)
    if options.warm and (options.no_python or options.run_path or not is_ours):
        log.warning(
            "--warm has no effect with --no-python, --run-path, --standalone and torch's backends"
        )
        options.warm = False
    if not is_ours:
        launch(options)
        return
    modules = ["torch", *filter(None, map(str.strip, options.preload.split(",")))]
    ours = partial(RunAgent, standbys=Standbys(modules)) if options.warm else RunAgent
    # The launcher has no parameter for the agent's class, and looks it up by this name.
    with in_the_place_of(api, "LocalElasticAgent", ours):
        launch(options)


def _without_ignored(names: str) -> str:
    """The signals of ``--signals-to-handle`` that this process does not ignore.

    A signal that is ignored from the start, as under nohup, must stay ignored here and in workers.
    """
    ignored = {it.name for it in signal.Signals if signal.getsignal(it) is signal.SIG_IGN}
    return ",".join(name for name in names.split(",") if name.strip() not in ignored)
