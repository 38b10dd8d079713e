"""The shared dynamic handler: torch's RendezvousHandler over any store of this package."""

from __future__ import annotations

import atexit
import logging
import os
import random
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from rdzv_plugins import clock
from rdzv_plugins.health import gate_of
from rdzv_plugins.kv import (
    Attendance,
    ExhaustedError,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.kv.retry import retry, store_is_away
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.observe.logs import RunLog, told
from rdzv_plugins.observe.metrics import Report
from rdzv_plugins.peers.addresses import is_own_ip, lacking_version
from rdzv_plugins.peers.exchange import dial_peer, open_listener
from rdzv_plugins.peers.links import Links
from rdzv_plugins.peers.reach import Reach
from rdzv_plugins.process.driver import Driver, Watcher, carry_out
from rdzv_plugins.process.explain import Refusal, what_failed
from rdzv_plugins.process.fitness import Fitness
from rdzv_plugins.process.master_servers import MasterServers
from rdzv_plugins.process.signals import SignalWatch, signal_behind
from rdzv_plugins.process.steps import Steps
from rdzv_plugins.process.worker import CurrentRound, hand_down, take_back
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.cleanup import close_run
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
    store_prefix,
)
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.parting import Parting, Service, loss_shows_within, lost_one
from rdzv_plugins.protocol.record_cache import readable
from rdzv_plugins.protocol.rules import Failure, Rules
from rdzv_plugins.settings.environment import give_back, withhold
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.torch.agent_store import AgentStore
from rdzv_plugins.torch.events import Events
from rdzv_plugins.torch.torchrun import agent_ends_first, max_restarts

log = logging.getLogger(__name__)

T = TypeVar("T")

# How long `shutdown` waits for a thread that hangs in a request to the store or in a resolver.
_STOP_SECONDS = 2.0
# How long the exit of the process waits for a farewell that another thread sends.
_FAREWELL_SECONDS = 10.0
# How many further signals may interrupt that wait before the process gives it up.
_SIGNALS_BORNE = 5

# torch's default for --rdzv-id; all jobs without an id share it.
_DEFAULT_RUN_ID = "none"


class StoreRendezvousHandler(RendezvousHandler):
    """One node of one run.

    Args:
        client: the run's namespace; the handler closes it.
        address: where other nodes reach this node.
        names: see `NodeRecord.names`.
        store_is_here: whether the store's address is loopback, so that other hosts may reach a
            different store. It is called only after a join has timed out.
        attendance: this node's part in a store that nodes run; the handler closes it.

    Attributes:
        blames: whether the agent itself finds the node whose failure ended all workers, and then
            asks for another round only if the failure was its own (`process.agent`).
    """

    blames = False

    def __init__(
        self,
        client: KeyValueClient,
        archive: Archive,
        run_id: str,
        rules: Rules,
        settings: Settings,
        address: str,
        names: tuple[str, ...] = (),
        store_is_here: Callable[[], bool] = bool,
        attendance: Attendance | None = None,
    ) -> None:
        self._client = client
        self._attendance = attendance
        self._archive = archive
        self._run_id = run_id
        rules = rules.of_run(run_id, sealed=client.sealed)
        self._settings = settings
        self._masters = MasterServers(
            address, settings.ports, settings.master_port, rules, f"rdzv-{run_id}-door"
        )
        self._store: AgentStore | None = None
        self._saw_change = False
        self._handed_down: str | None = None
        self._pid = os.getpid()
        node_id = secrets.token_hex(8)
        self._listener = open_listener(node_id, address, run_id, rules, settings)
        port = self._listener.port if self._listener is not None else 0
        record = _first_record(address, names, rules, settings, port)
        self._steps = Steps(lambda text: self._log.warning(text), rules.save_timeout)
        self._node = Node(
            node_id,
            record,
            rules,
            settings.join_timeout,
            clock.now,
            random.Random(secrets.randbits(64)),
            time.time,
            self._steps,
        )
        self._log = RunLog(log, run_id, self._node, archive.command)
        self._refusal = Refusal(
            run_id, self._node, client, archive, settings.join_timeout, store_is_here
        )
        self._reach = Reach(address, self._log.warning, f"rdzv-{run_id}-reach")
        # Read before torchrun's variables are withheld from the workers.
        restarts = max_restarts() or 0
        self._service = Service(self._node, time.monotonic, time.time, restarts)
        self._events = Events(run_id, address, record.label)
        self._watchers: list[Watcher] = []
        self._report: Report | None = None
        client.on_retry = lambda: self._driver.note_retry()
        if settings.metrics_port is not None or settings.otel:
            try:
                self._report = Report(run_id, self._node, client.name, settings, self._log)
            except BaseException:  # This host lacks a thread, say: another handler is made later.
                if self._listener is not None:
                    self._listener.close()
                raise
            self._client = client = self._report.measured(client)
            self._watchers.append(self._report.watch)
        self._links = self._make_links()
        self._driver: Driver = Driver(
            self._node,
            client,
            archive,
            self._open_master,
            run_id,
            self._watchers,
            lambda request: dial_peer(request, self.use_agent_store),
            self._links.hold if self._links is not None else None,
        )
        self._fitness = Fitness(
            run_id, settings, self._node, self._driver, self._log,
            gate_of(settings, lambda: self._service.rank_0, self._log.warning),
            lambda: self._ended, self._refuse, self._raise,
        )  # fmt: skip
        self._closed = False
        self._ending = threading.Lock()
        self._ended = False
        self._gone = threading.Event()
        # torch's launcher calls no shutdown() after a signal: the node leaves at exit, so that the
        # others need not wait for its lease. A weak reference lets the handler be freed before.
        itself = weakref.ref(self)
        self._at_exit = lambda: handler._leave_at_exit() if (handler := itself()) else None
        atexit.register(self._at_exit)
        self._signals = SignalWatch(self._at_exit, f"rdzv-{run_id}-signals")
        if run_id == _DEFAULT_RUN_ID:
            self._log.warning(
                f"the run id is '{run_id}', torch's default: every job on this store that has none "
                "is in the same run. Give each job an --rdzv-id of its own"
            )

    def _make_links(self) -> Links | None:
        """Links to this node's neighbours in a round; None: leases alone decide who is lost."""
        if self._listener is None or self._node.rules.answer_timeout is None:
            return None
        neighbours = self._node.neighbours
        return Links(
            self._listener,
            self._run_id,
            self._node.id,
            self._node.record.address,
            neighbours.report_dead,
            neighbours.report_alive,
            neighbours.report_others,
            self._log.warning,
        )

    def get_backend(self) -> str:
        return self._client.name

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether workers share rank 0's TCPStore; an environment variable of torch decides."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    @property
    def loss_shows_within(self) -> float:
        """Seconds within which the loss of a participant shows in `num_nodes_waiting`.

        They count from the end of a grace (`grace_left`). The loss shows later only if the store is
        away, or if the leader was lost together with its first successors.
        """
        return loss_shows_within(self._node.rules)

    @property
    def grace_left(self) -> float:
        """Seconds until the grace after an outage of the store ends; negative: it has ended."""
        return self._node.grace_ends - clock.now()

    @property
    def patience_after_a_loss(self) -> float | None:
        """Seconds that workers have to end after a loss or a hang; None: there was neither."""
        last, latest = self._service.last, self._node.latest
        if last is None or latest is None or not (lost_one(last, latest) or self._hung):
            return None
        return self._settings.loss_shutdown_timeout

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; blocks until it runs.

        Raises:
            RendezvousClosedError: the run is closed.
            SystemExit: with status 0, the run ended while this node was a spare, or the node was
                drained (torch's `RendezvousGracefulExitError` makes `launch_agent` fail). With
                status 93, the run was closed for ``no_progress_rounds``.
            RendezvousTimeoutError: no round formed, or this node's checks did not pass, within
                ``join_timeout``.
            RendezvousError: a check of this node failed, and ``on_unhealthy`` is exit; or this
                node's workers failed while it was new, and the run goes on without it.
            RendezvousConnectionError: the store was away for ``join_timeout``.
            RendezvousStateError: the round document is unreadable, or the run was started with
                another ``--nnodes``.
        """
        self._events.joins("attempts to join the next round of")
        with self._events.of("next_rendezvous"):
            document = self._join()
        rank, world_size = document.ranks[self._node.id], document.size
        joined = f"has joined round {document.round}, as rank {rank} in a world of {world_size}, of"
        self._events.joins(joined, rank)
        self._hand_down(document)
        address, _, port = (document.master or "").rpartition(":")
        if (
            self._run_id == _DEFAULT_RUN_ID
            and world_size > 1
            and (who := self._refusal.who(document))
        ):
            self._log.warning(
                f"the run id is '{self._run_id}', torch's default, so that these nodes are in one "
                f"run, of whatever jobs they are: {who}"
            )
        self._store = AgentStore(
            self._client,
            store_prefix(document.incarnation, document.round),
            rank,
            world_size,
            is_over=lambda: self._ended or self._node.over,
            on_done=self._node.inbox.report_done,
            trains_on=lambda: not self._ended and self._node.trains_on,
        )
        self._try_to_reach(document, address)
        return RendezvousInfo(
            self._store, rank, world_size, RendezvousStoreInfo(address, int(port))
        )

    def _hand_down(self, document: RoundDocument) -> None:
        """Give the workers the round, but neither passwords nor torchrun's options."""
        withholds = self._handed_down is None
        self._handed_down = hand_down(
            CurrentRound(
                run_id=self._run_id,
                round=document.round,
                world_id=document.world_id,
                # A worker with megabytes in its environment could not start.
                cause=plain(document.reason),
                spares=document.waiters,
                domain=self._settings.domain,
                fencing_token=document.fencing_token,
                steps_file=self._steps.begin(document.world_id),
                agent=self._pid,
            )
        )
        if withholds:
            withhold()

    def _try_to_reach(self, document: RoundDocument, address: str) -> None:
        """Plan the warning about other hosts that this node's workers will not reach."""
        if document.size == 1:
            return
        is_first = document.ranks[self._node.id] == 0

        def has_other_hosts() -> bool:
            # Ranks follow the order of hosts, so the last participant is on another host if any is.
            if not is_first:
                return self._is_elsewhere(address)
            if not document.participants:
                return True  # A round that needs shards has more than one host.
            with suppress(RendezvousConnectionError, RendezvousStateError):
                last = readable(self._client.get(NODES_PREFIX + document.participants[-1]))
                return last is not None and self._is_elsewhere(last.address)
            return False

        def is_over() -> bool:
            latest = self._node.latest
            return self._ended or latest is None or not latest.is_of(document)

        # If workers do not share the agent's store, a worker opens the master's port later.
        master = document.master if self.use_agent_store and not is_first else None
        self._reach.plan(document.round, master, document.size, has_other_hosts, is_over)

    def _is_elsewhere(self, address: str) -> bool:
        """Whether the address of a node seems to be another host's."""
        return address != self._node.record.address and not is_own_ip(address)

    def _join(self) -> RoundDocument:
        """The next round; raises as `next_rendezvous` does."""
        self._refuse_if_ended()
        self._steps.end()
        # An agent that joins again without a change of membership has failed workers.
        failed = self._store is not None and not self._saw_change
        costs = failed and self._costs_the_others()
        # If the run was closed in the meantime, the join below reports how it ended.
        is_closed = (latest := self._node.latest) is not None and latest.closed
        if costs and not is_closed and self._give_up("its workers failed", True, looked=True):
            run = f"run '{self._run_id}'"
            self._raise(
                RendezvousError(f"{run}: this node has left: its workers failed, and it was new")
            )
        waited = self._fitness.await_fitness(has_had_workers=self._store is not None)
        patience = self._settings.join_timeout
        try:
            outcome = self._driver.join(failed, waited, patience)
            while outcome.failure is Failure.AT_FAULT and not self._ended:
                self._fitness.wait_at_fault(self._node.record.unfit)
                waited_on = waited + self._fitness.at_fault_for
                outcome = self._driver.join(failed, waited_on, patience)
        except ExhaustedError as error:
            self._raise(error)
        self._saw_change = False
        self._refuse(outcome)
        document = outcome.document
        assert document is not None
        self._service.begin(document)
        self._fitness.begin()
        self._masters.keep(document.world_id)
        return document

    def _refuse_if_ended(self) -> None:
        self._signals.renew()
        if self._ended:
            raise RendezvousClosedError(f"this handler of run '{self._run_id}' was shut down")

    def _refuse(self, outcome: effects.JoinOutcome) -> None:
        self._refuse_if_ended()
        if outcome.document is None:
            self._raise(self._refusal.of(outcome, was_in_the_run=self._store is not None))

    def _raise(self, error: BaseException) -> NoReturn:
        if isinstance(error, Exception):
            self._log.error(str(error))
            told(error)
        raise error.with_traceback(None) from None

    def num_nodes_waiting(self) -> int:
        """Above 0 if the agent should join again; reads memory, without I/O.

        Raises only the exception of a signal: see `SignalWatch.renew`.
        """
        # Only the main thread can renew; next_rendezvous() may have run in another thread.
        self._signals.renew()
        if self._steps.has_saved():
            self._node.inbox.note_saved()
        self._reach.go_on()
        made_up = self._store is not None and self._store.made_up
        waiting = self._node.num_nodes_waiting or int(made_up)
        if waiting and not self._saw_change:
            self._tell_of_a_hang()
        self._saw_change = self._saw_change or waiting > 0
        return waiting

    @property
    def _hung(self) -> bool:
        """Whether the round ended because of a hang."""
        last, latest = self._service.last, self._node.latest
        return (
            last is not None
            and latest is not None
            and latest.is_of(last)
            and latest.round > last.round
            and bool(latest.cause.stuck)
        )

    def _tell_of_a_hang(self) -> None:
        """Log the stacks of this node's worker if the round ended because the worker hangs."""
        latest = self._node.latest
        if latest is None or not self._hung or self._node.record.label not in latest.cause.stuck:
            return
        rank, stacks = self._steps.slowest()
        found = stacks or "none, because the worker does not answer"
        self._log.error(f"rank {rank} of this node stood still; the stacks of its threads:", found)

    @property
    def leave_notice(self) -> float:
        """Seconds of the option ``leave_notice``, at most ``save_timeout``."""
        return min(self._settings.leave_notice, self._node.rules.save_timeout)

    @property
    def can_save(self) -> bool:
        """Whether each worker of this node has called ``step()`` in this round; reads memory."""
        return self._steps.progress() is not None

    def order_leave(self) -> None:
        """Have the run save, after which this node leaves: see `may_leave`."""
        self._node.inbox.leave()

    @property
    def may_leave(self) -> bool:
        """Whether the run has saved for this node's leave, or the round ended before that."""
        latest = self._node.latest
        if latest is None or self._node.over or not self._node.in_round:
            return True
        return latest.saving is not None and latest.saving.saved

    def is_closed(self) -> bool:
        latest = self._node.latest
        if self._driver.running and latest is not None:
            return latest.closed
        with self._events.of("is_closed"):
            entry = self._client.get(STATE_KEY)
            with suppress(RendezvousStateError):  # An unreadable document counts as absent.
                return entry is not None and RoundDocument.decode(entry.value).closed
            return False

    @property
    def made_no_progress(self) -> bool:
        """Whether the run was closed for ``no_progress_rounds``, as far as this node knows."""
        latest = self._node.latest
        return latest is not None and latest.outcome is Outcome.NO_PROGRESS

    def set_closed(self) -> None:
        """Close the run for all nodes; raises `RendezvousConnectionError` after close_timeout.

        A later run with the same id stays open.
        """
        never_seen = RoundDocument(
            incarnation=secrets.token_hex(8),
            round=0,
            phase=Phase.FORMING,
            leader=None,
            min_nodes=self._node.rules.min_nodes,
            max_nodes=self._node.rules.max_nodes,
        )

        def close() -> None:
            latest = self._node.latest
            if latest is None and self._client.get(STATE_KEY) is None:
                latest = never_seen
            work = close_run(
                self._node.id,
                latest,
                Outcome.CLOSED,
                f"by request; closed by {self._node.record.label}",
                self._settings.sweep_after,
                may_close=lambda _: True,
                told=self._node.told_of_the_end,
            )
            self._close(work)
            self._closed = True

        with self._events.of("set_closed"):
            self._await_store(close)

    def shutdown(self) -> bool:
        """End this node, and close the run if this node is in it, as torch's handler does.

        torch's launcher calls this while an exception is raised if the agent failed. Then, and if
        this node's workers did not succeed, the run is closed as failed, and the other agents end.

        The run stays open, and the node only leaves, in these cases:

        - the node is in no round: it was not admitted, timed out or was replaced;
        - its workers succeeded while other nodes still work;
        - it got a signal (torch 2.6 calls this after signals, too);
        - its agent failed, or its workers failed while it was new to the run, and the other nodes
          are enough for a round.

        Returns False if the store could not be told.
        """
        error = sys.exception()
        all_done = self._store is not None and self._store.all_done
        if _is_of_a_signal(error) or self._service.only_leaves(all_done):
            return self._leave()
        latest = self._node.latest
        closed = self._closed or (latest is not None and latest.closed)
        if error is None and (self._node.done or closed):
            outcome, why = Outcome.SUCCEEDED, "its workers succeeded"
        elif error is None and agent_ends_first():
            return True  # The launcher calls this again with the error.
        elif error is None:
            # torch's launcher raises nothing if a worker is in uninterruptible sleep.
            outcome, why = Outcome.FAILED, "its agent ended, and its workers had not"
        else:
            outcome, why = Outcome.FAILED, what_failed(error)
        of_workers = error is None or isinstance(error, ChildFailedError)
        if outcome is Outcome.FAILED and self._service.may_give_up(of_workers):
            return self._give_up(why, of_workers)

        def end() -> None:
            if not self._await_store(lambda: self._close(self._service.close(outcome, why))):
                self._say_farewell()  # This node has been replaced, so the run stays open.

        close = self._archive.command("close")
        return self._end(end, f"this node could not close the run; {close} does")

    def _costs_the_others(self) -> bool:
        """Whether this node, whose workers failed, should leave so that the others go on.

        Under torchrun each failure of this node's workers makes the others' workers fail, too, and
        costs each node a restart. But if the loss of another node made all workers fail, this node
        stays. A thread asks the store, because at a signal torch raises an exception in this one.
        """
        if self.blames or not self._service.fails_again() or not self._node.in_round:
            return False
        answers: list[bool] = []

        def ask() -> None:
            work = self._service.costs_the_others(lambda: self._ended, self.grace_left)
            with suppress(RendezvousConnectionError, RendezvousStateError):
                answers.append(self._carry_out(work))

        thread = threading.Thread(target=ask, name=f"rdzv-{self._run_id}-end", daemon=True)
        with suppress(RuntimeError):  # No thread can start; there are no answers.
            thread.start()
            thread.join()
        return any(answers)

    def _give_up(self, why: str, of_workers: bool, *, looked: bool = False) -> bool:
        """Leave the run if it goes on without this node; otherwise close it as failed.

        Args:
            of_workers: this node is new, and its workers failed; False: its agent failed.
            looked: whether the other nodes are known to be enough.
        """

        def end() -> None:
            service = self._service
            parting = self._await_store(
                lambda: self._carry_out(service.give_up(why, of_workers=of_workers, looked=looked))
            )
            if parting is Parting.CLOSED:
                self._events.closed()
                return
            self._log.info(f"{self._node.record.label} has left")
            if parting is Parting.LEFT:
                new = ""
                if of_workers:
                    new = f", and it was new: in the run for {service.seconds:.0f} s"
                self._log.error(f"this node leaves the run, which goes on without it: {why}{new}")

        close = self._archive.command("close")
        return self._end(end, f"this node could not close the run; {close} does")

    def _await_store(self, request: Callable[[], T]) -> T:
        return retry(request, timeout=self._settings.close_timeout, retryable=store_is_away)

    def _close(self, work: effects.Effects[bool]) -> bool:
        if closed := self._carry_out(work):
            self._events.closed()
        return closed

    def _carry_out(self, work: effects.Effects[T]) -> T:
        return carry_out(self._client, self._archive, work, self._log.tell, self._watchers)

    def _leave(self, *, at_exit: bool = False) -> bool:
        """Tell the others that this node leaves, without closing the run."""
        if self._attendance is not None:
            self._hasten(self._attendance, at_exit)
        # At exit several handlers end one after another; none waits for a store that is away.
        gives_up = at_exit and self._driver.outage_seconds > self._node.rules.request_timeout

        def leave() -> None:
            if self._node.latest is not None and self._node.latest.closed:
                return
            if gives_up:
                raise RendezvousConnectionError("the store is away")
            self._say_farewell()

        patience = 0.0 if gives_up else _STOP_SECONDS
        return self._end(
            leave,
            "this node could not tell the others that it leaves: they wait for its lease",
            patience,
        )

    def _hasten(self, attendance: Attendance, at_exit: bool) -> None:
        error, latest = sys.exception(), self._node.latest
        drained = latest is not None and self._node.id in latest.drained
        if drained and not at_exit and isinstance(error, SystemExit | None):
            attendance.stay()
        elif at_exit or error is not None:
            attendance.hurry()

    def _say_farewell(self) -> None:
        self._carry_out(self._node.farewell())
        self._log.info(f"{self._node.record.label} has left")

    def _leave_at_exit(self) -> None:
        for _ in range(_SIGNALS_BORNE):
            try:
                self._leave(at_exit=True)
                return
            except BaseException as error:
                # Another thread sends the farewell; the next call waits for it.
                if not _is_of_a_signal(error):
                    raise

    def _end(
        self, last_word: Callable[[], None], failed: str, patience: float = _STOP_SECONDS
    ) -> bool:
        """Stop the node and send its last word, once; False if the store could not be told.

        A new thread does this, so that the exception of a signal cannot interrupt it. If another
        thread already ends the node, wait for that thread.

        Args:
            patience: how many seconds to wait for the node's thread.
        """
        if os.getpid() != self._pid:
            return True  # A forked child has a copy of this object, but no node.
        with self._ending:
            first, self._ended = not self._ended, True
        if not first:
            self._gone.wait(_FAREWELL_SECONDS)
            return True
        sent: list[bool] = []

        def end() -> None:
            try:
                self._fitness.close()
                with self._events.of("shutdown"):
                    self._driver.stop(patience)
                    last_word()
                sent.append(True)
            except (RendezvousConnectionError, RendezvousStateError) as error:
                self._log.warning(f"{failed}: {error}")
            finally:
                self._release()

        thread = threading.Thread(target=end, name=f"rdzv-{self._run_id}-end", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            end()  # From Python 3.12 on, no thread can start while the process exits.
        else:
            thread.join()
        # `_release` ran in another thread; only the main thread can restore signal handlers.
        self._signals.release()
        return bool(sent)

    def _release(self) -> None:
        try:
            self._client.close()
            if self._attendance is not None:
                self._attendance.close()
            if self._listener is not None:
                self._listener.close(_STOP_SECONDS)
            self._reach.close()
            self._driver.await_masters(_STOP_SECONDS)
            self._masters.keep(None)
            take_back(self._handed_down)
            if self._handed_down is not None:
                self._handed_down = None
                give_back()
            self._steps.end()
            self._signals.release()
            if self._report is not None:
                self._report.close()
        finally:
            # Even after an error, because the exit of the process waits for `_gone`.
            atexit.unregister(self._at_exit)
            self._gone.set()

    def _open_master(self, world_id: str) -> str:
        latest = self._node.latest
        before = latest.master.rpartition(":")[2] if latest and latest.master else ""
        return self._masters.open(world_id, before, for_workers=not self.use_agent_store)


def _is_of_a_signal(error: BaseException | None) -> bool:
    return isinstance(error, KeyboardInterrupt) or signal_behind(error) is not None


def _first_record(
    address: str, names: tuple[str, ...], rules: Rules, settings: Settings, port: int
) -> NodeRecord:
    """This node's record before its first join; ``port``: of its listener, 0: it has none."""
    return NodeRecord(
        address=address,
        names=tuple("" if name == address else name for name in names),
        pid=os.getpid(),
        beat=0,
        status=Status.JOIN,
        round=-1,
        min_nodes=rules.min_nodes,
        max_nodes=rules.max_nodes,
        interval=rules.interval,
        lease=rules.lease,
        hint=settings.rank,
        run_options=settings.run_options,
        domain=settings.domain if rules.minds_domains else None,
        lacks=lacking_version(address) if rules.max_nodes > 1 else 0,
        port=port if rules.network_check else 0,
        link=port if rules.answer_timeout is not None else 0,
    )
