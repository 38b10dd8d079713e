"""What becomes of a run, and of the next one of its id: real handlers over the in-memory store."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from rdzv_plugins import clock
from rdzv_plugins.kv import MemoryClient, RendezvousStateError
from rdzv_plugins.observe.history import archive_run_id
from rdzv_plugins.process.explain import what_failed
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.testing.threads import Background
from tests import replace
from tests.handlers.site import LEASE, Site, succeed


def say_that_the_agent_failed(handler: StoreRendezvousHandler) -> bool:
    """What torch's launcher does when its agent raised."""
    try:
        raise RuntimeError("its workers failed")
    except RuntimeError:
        return handler.shutdown()


@pytest.mark.rule("replaced")
class TestWhoWasReplaced:
    """It was cut off, the others went on, and its own workers fail before it knows."""

    @pytest.mark.parametrize("agent_failed", [True, False])
    def test_a_replaced_node_does_not_close_the_run_that_goes_on(
        self, site: Site, agent_failed: bool
    ) -> None:
        cut = site.client()
        replaced, *others = (site.handler(2, 3, client) for client in (cut, None, None))
        site.join(replaced, *others)
        cut.cut()
        site.await_that(lambda: all(other.num_nodes_waiting() for other in others))
        site.join(*others)
        assert replaced._node.in_round, "it cannot know yet"
        ends = Background(
            lambda: say_that_the_agent_failed(replaced) if agent_failed else replaced.shutdown()
        )
        assert not ends.done(0.5)
        cut.down = False
        assert ends.result(20.0)
        document = site.document
        assert document is not None
        assert (document.phase, document.round) == ("running", 1)
        assert not any(other.is_closed() for other in others)
        assert site.server.deadlines[site.run_id] > 100, "the others' keys were told to expire"

    @pytest.mark.parametrize("by", [say_that_the_agent_failed, StoreRendezvousHandler.set_closed])
    def test_a_replaced_node_does_not_close_another_jobs_run_of_the_same_id(
        self, site: Site, by: Callable[[StoreRendezvousHandler], object]
    ) -> None:
        cut = site.client()
        replaced, other = site.handler(2, 2, cut), site.handler(2, 2)
        site.join(replaced, other)
        cut.cut()
        assert succeed(other)
        site.await_sweep()
        pair = [site.handler(2, 2) for _ in range(2)]
        site.join(*pair)
        ends = Background(lambda: by(replaced))
        assert not ends.done(0.5)
        cut.down = False
        ends.result(20.0)
        document = site.document
        assert document is not None
        assert (document.phase, document.round) == ("running", 0)
        assert not any(handler.is_closed() for handler in pair)


@pytest.mark.rule("incarnations")
class TestFinishedRuns:
    def test_a_node_that_comes_back_after_the_sweep_does_not_run_it_again(self, site: Site) -> None:
        cut = site.client()
        away, other = site.handler(1, 2, cut), site.handler(1, 2)
        site.join(away, other)
        cut.cut()
        site.await_that(lambda: other.num_nodes_waiting() > 0)
        site.join(other)
        assert succeed(other)
        site.await_sweep()
        cut.down = False
        # The node learns that its run has ended, and writes nothing back. Its agent does not
        # restart the workers.
        site.await_that(away.is_closed)
        assert away.num_nodes_waiting() == 0
        with pytest.raises(RendezvousClosedError):
            site.join(away)
        assert site.document is None

    def test_a_node_that_comes_back_drags_nobody_of_the_next_job_into_its_own(
        self, site: Site
    ) -> None:
        cut = site.client()
        away, other = site.handler(2, 2, cut), site.handler(2, 2)
        for _ in range(3):
            # Its rounds are numbered higher than those of the next job.
            site.join(away, other)
        ended = site.document
        cut.cut()
        assert succeed(other)
        site.await_sweep()
        pair = [site.handler(2, 2) for _ in range(2)]
        site.join(*pair)
        before = site.document
        cut.down = False
        site.await_that(away.is_closed)
        assert site.document == before
        assert ended is not None
        assert before is not None
        assert ended.round > before.round
        assert [handler.num_nodes_waiting() for handler in pair] == [0, 0]
        # It drags nobody along later either, when the next job has gone on to another round.
        site.join(*pair)
        site.await_that(lambda: away._node.document == site.document)
        assert away.is_closed()
        with pytest.raises(RendezvousClosedError):
            site.join(away)

    def test_a_refused_newcomer_is_told_how_long_the_id_stays_taken(self, site: Site) -> None:
        """By who closed the run, whatever the newcomer's own closed_ttl is."""
        member = site.handler(1, 1, closed_ttl=50.0)
        site.join(member)
        member.set_closed()
        taken = r"; its id is taken while \S+\[\d+\] trains in its last round$"
        with pytest.raises(RendezvousClosedError, match=taken):
            site.join(site.handler(1, 1, closed_ttl=900.0))
        # A node that was in the run does not ask, because thousands would ask at once.
        with pytest.raises(
            RendezvousClosedError, match=r"; to free its id now: rdzv clean -i run$"
        ):
            site.join(member)
        with pytest.raises(RendezvousClosedError) as refused:
            site.join(site.handler(1, 1, closed_ttl=900.0))
        told = re.search(
            r"; its id is free in (\d+) s; now: rdzv clean -i run$", str(refused.value)
        )
        assert told, refused.value
        assert 0 < int(told[1]) <= 50

    def test_a_refused_newcomer_is_told_no_time_that_nobody_noted(self, site: Site) -> None:
        member = site.handler(1, 1, closed_ttl=50.0)
        site.join(member)
        member.set_closed()
        with site.server.changed:
            site.server.keys(archive_run_id(site.run_id)).clear()
        member.shutdown()
        with pytest.raises(
            RendezvousClosedError, match=r"; to free its id now: rdzv clean -i run$"
        ):
            site.join(site.handler(1, 1, closed_ttl=900.0))

    def test_two_runs_of_an_id_never_share_a_c10d_store(self, site: Site) -> None:
        """Rounds of both have the number 0: nothing that the first left behind is met again."""
        first = site.handler(1, 1)
        (info,) = site.join(first)
        info.store.set("mark", "of the first")
        succeed(first)
        site.await_sweep()
        second = site.handler(1, 1)
        (again,) = site.join(second)
        # A write of the first that was held up until now.
        prefixes = [one.store._prefix for one in (info, again)]  # type: ignore[attr-defined]
        MemoryClient(site.server, site.run_id).put(prefixes[0] + "late", b"")
        assert not again.store.check(["mark"])
        assert not again.store.check(["late"])
        assert all(re.fullmatch(r"store/[0-9a-f]{16}/0/", prefix) for prefix in prefixes)
        assert prefixes[0] != prefixes[1]


@pytest.mark.rule("closed stays closed")
class TestClosing:
    def test_a_closed_run_whose_expiry_failed_is_freed_by_whoever_meets_it(
        self, site: Site
    ) -> None:
        refuses = site.client()
        closer = site.handler(1, 1, refuses, close_timeout=0.5)
        site.join(closer)
        refuses.refused = frozenset({"expire"})
        assert not closer.shutdown()
        document = site.document
        assert document is not None
        assert (document.phase, document.expires) == ("closed", False)
        with pytest.raises(RendezvousClosedError):
            site.join(site.handler(1, 1))
        assert site.document is None or site.document.expires
        site.await_sweep()
        site.join(site.handler(1, 1))

    def test_what_failed_when_a_run_was_closed_is_tried_again(self, site: Site) -> None:
        """Its first attempt has closed the run, but not put the tombstone nor the expiry."""
        refuses = site.client()
        closer = site.handler(1, 1, refuses)
        site.join(closer)
        refuses.refused = frozenset({"expire"})
        ends = Background(closer.shutdown)
        site.await_that(lambda: site.document is None or site.document.closed)
        assert not ends.done(0.2)
        refuses.refused = frozenset()
        assert ends.result(20.0)
        site.await_sweep()

    def test_a_leader_that_closes_the_run_is_not_stopped_half_way(self, site: Site) -> None:
        """What it writes first lets its own agent end, which stops it."""
        goes_on, expire = threading.Event(), site.client()
        at_once = expire.expire

        def hold(seconds: float) -> None:
            # The leader moves the end of a living run on, too.
            if site.document is not None and site.document.closed:
                assert goes_on.wait(10)
            at_once(seconds)

        expire.expire = hold  # type: ignore[method-assign]
        leader = site.handler(1, 1, expire)
        site.join(leader)
        leader._node.inbox.report_done()
        site.await_that(lambda: site.document is None or site.document.closed)
        ends = Background(leader.shutdown)
        assert not ends.done(0.2)
        goes_on.set()
        assert ends.result(20.0)
        assert site.document is None or site.document.expires
        site.await_sweep()

    def test_a_damaged_document_is_written_anew_by_those_of_the_run(self, site: Site) -> None:
        pair = [site.handler(1, 2) for _ in range(2)]
        site.join(*pair)
        before = site.document
        MemoryClient(site.server, site.run_id).put(STATE_KEY, b"garbage")
        # A newcomer has the patience to wait for that.
        spare = Background(site.handler(1, 2).next_rendezvous)
        site.await_that(lambda: _is_there(site))
        after = site.document
        assert before is not None
        assert after is not None
        assert (after.incarnation, after.round) == (before.incarnation, before.round)
        assert [handler.num_nodes_waiting() for handler in pair] == [0, 0]
        assert not spare.done(1.0)
        # Losses are noticed again.
        site.kill(pair[1])
        site.await_that(lambda: pair[0].num_nodes_waiting() > 0)

    def test_a_damaged_document_is_closed_by_those_of_the_run(self, site: Site) -> None:
        (handler,) = [site.handler(1, 1)]
        site.join(handler)
        site.kill(handler)
        again = site.handler(1, 1)
        again._node, again._service = handler._node, handler._service
        MemoryClient(site.server, site.run_id).put(STATE_KEY, b"garbage")
        assert again.shutdown()
        document = site.document
        assert document is not None
        assert (document.phase, document.outcome) == ("closed", Outcome.FAILED)


def _is_there(site: Site) -> bool:
    try:
        return site.document is not None
    except RendezvousStateError:
        return False


class SignalError(Exception):
    """What torch's launcher raises in the main thread at a signal."""


@pytest.mark.rule("a round")
class TestAbandonedJoin:
    def test_a_join_that_was_given_up_takes_no_rank(self, site: Site) -> None:
        gives_up = site.handler(2, 2)

        def tell() -> None:
            site.await_that(lambda: site.document is not None)
            os.kill(os.getpid(), signal.SIGUSR1)

        def be_told(*_: object) -> None:
            raise SignalError

        before = signal.signal(signal.SIGUSR1, be_told)
        try:
            teller = Background(tell)
            with pytest.raises(SignalError):
                gives_up.next_rendezvous()
            teller.result(20.0)
        finally:
            signal.signal(signal.SIGUSR1, before)
        # Its process lives on: a notebook, or a launcher that writes its error file.
        late = site.handler(2, 2)
        joins = Background(late.next_rendezvous)
        assert not joins.done(3 * LEASE), site.document
        record = MemoryClient(site.server, site.run_id).get(NODES_PREFIX + gives_up._node.id)
        assert record is not None
        assert NodeRecord.decode(record.value).status is Status.LEFT
        # And it may ask again.
        site.join(gives_up)
        assert joins.result(20.0).world_size == 2

    def test_also_while_its_thread_starts(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The caller waits for the start, and that is when the signal's exception comes."""
        gives_up, start = site.handler(2, 2), threading.Thread.start

        def be_told(thread: threading.Thread) -> None:
            start(thread)
            if thread is gives_up._driver._thread:
                site.await_that(lambda: site.document is not None)
                raise SignalError

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", be_told)
            with pytest.raises(SignalError):
                gives_up.next_rendezvous()
        late = Background(site.handler(2, 2).next_rendezvous)
        assert not late.done(3 * LEASE), site.document
        site.join(gives_up)
        assert late.result(20.0).world_size == 2


class TestWhoIsMissing:
    def test_the_time_out_names_who_gave_up_and_who_was_lost(self, site: Site) -> None:
        """A round of exactly the maximum: the others cannot go on without them."""
        stays, gives_up, dies = (site.handler(3, 3, join_timeout=3.0) for _ in range(3))
        site.join(stays, gives_up, dies)
        site.kill(dies)
        waits = Background(stays.next_rendezvous)
        site.await_that(lambda: gives_up.num_nodes_waiting() > 0)
        leaves = gives_up._node.record.label
        assert gives_up._leave()
        with pytest.raises(RendezvousTimeoutError) as timed_out:
            waits.result(20.0)
        text = str(timed_out.value)
        # All of one process here, they have one label.
        assert f"lost {dies._node.record.label}" in text
        assert f"left {leaves}" in text


def test_ids_of_nodes_have_64_bits(site: Site) -> None:
    ids = {site.handler(1, 1)._node.id for _ in range(8)}
    assert all(re.fullmatch(r"[0-9a-f]{16}", node) for node in ids)
    assert len(ids) == 8


def test_a_last_request_that_hangs_beyond_the_end_does_not_undo_the_farewell(site: Site) -> None:
    """The thread could not be stopped: its beat lands after the others were told that it left."""
    hangs, released = threading.Event(), threading.Event()

    class Slow(MemoryClient):
        def put_many(self, values: Any) -> None:
            # The node's own thread, not the one that says its last word.
            if hangs.is_set() and threading.current_thread().name == f"rdzv-{site.run_id}":
                released.wait(20.0)
            super().put_many(values)

    leaver = site.handler(1, 2, Slow(site.server, site.run_id))
    stays = site.handler(1, 2)
    site.join(stays, leaver)
    hangs.set()
    observer = MemoryClient(site.server, site.run_id)
    key = NODES_PREFIX + leaver._node.id
    # Until the thread hangs in the write of a beat.
    beat = leaver._node.record.beat
    site.await_that(lambda: leaver._node.record.beat > beat)

    def release_late() -> None:
        def told() -> bool:
            entry = observer.get(key)
            return entry is not None and NodeRecord.decode(entry.value).status is Status.LEFT

        site.await_that(told)
        released.set()

    late = Background(release_late)
    assert leaver._leave()
    late.result(20.0)
    site.await_that(lambda: stays.num_nodes_waiting() > 0)
    (info,) = site.join(stays)
    assert info.world_size == 1
    assert observer.get(BELL_KEY) is not None


class Agent(SimpleElasticAgent):
    """torch's, whose workers run until they are told to succeed."""

    def __init__(self, handler: Any, succeed: threading.Event) -> None:
        spec = WorkerSpec("role", 1, handler, entrypoint="x", max_restarts=3, monitor_interval=0.05)
        super().__init__(spec)
        self.succeed = succeed
        self.worlds: list[int] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.worlds.append(worker_group.workers[0].world_size)
        return {0: "worker"}

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        pass

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        rank = worker_group.workers[0].global_rank
        if self.succeed.is_set():
            return RunResult(WorkerState.SUCCEEDED, return_values={rank: None})
        return RunResult(WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        pass


class Given:
    """The handler, which has given this agent its first round already."""

    def __init__(self, handler: StoreRendezvousHandler, info: RendezvousInfo) -> None:
        self._handler = handler
        self._first: RendezvousInfo | None = info

    def next_rendezvous(self) -> RendezvousInfo:
        info, self._first = self._first, None
        return info or self._handler.next_rendezvous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.rule("a round")
def test_a_death_just_after_release_costs_a_round_and_no_more(site: Site, victim: int) -> None:
    """torch's agents wait for a word of the dead one, for 300 s, in their exchange of roles."""
    handlers = [site.handler(1, 3, last_call_timeout=0.5) for _ in range(3)]
    infos = site.join(*handlers)
    assert {info.world_size for info in infos} == {3}
    dead = next(each for each, info in zip(handlers, infos, strict=True) if info.rank == victim)
    site.kill(dead)
    succeed = threading.Event()

    def live(agent: Agent, handler: StoreRendezvousHandler) -> RunResult:
        # As launch_agent does.
        try:
            result: RunResult = agent.run()
            return result
        finally:
            handler.shutdown()

    agents = [
        (Agent(Given(handler, info), succeed), handler)
        for handler, info in zip(handlers, infos, strict=True)
        if handler is not dead
    ]
    replacement = site.handler(1, 3, last_call_timeout=0.5)
    agents.append((Agent(replacement, succeed), replacement))
    lives = [Background(lambda pair=pair: live(*pair)) for pair in agents]  # type: ignore[misc]
    site.await_that(lambda: all(agent.worlds[-1:] == [3] for agent, _ in agents), 30.0)
    succeed.set()
    results = [each.result(30.0) for each in lives]
    assert {result.state for result in results} == {WorkerState.SUCCEEDED}
    # It counts as no failure of theirs.
    assert [agent._remaining_restarts for agent, _ in agents] == [3, 3, 3]
    document = site.document
    assert document is None or document.outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ((3,), "its workers failed (rank 0 exited with 3)"),
        ((-9, 1, 1), "its workers failed (rank 0 was ended by SIGKILL and 2 more failed)"),
    ],
)
def test_the_reason_of_a_failure_names_a_worker(codes: tuple[int, ...], said: str) -> None:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        for rank, code in enumerate(codes)
    }
    assert what_failed(ChildFailedError("train.py", failures)) == said
    assert what_failed(RuntimeError("anything")) == "its agent failed (RuntimeError)"


class TestWhatOthersHaveWritten:
    """Whoever can write to the store ends no agent by it, and forges none of its lines."""

    def test_the_error_of_a_closed_run_is_one_line(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        note = "done\n12:00:00 run 'run': all is well\x1b]0;owned\x07" + "x" * 2000
        closed = RoundDocument(
            incarnation="r", round=0, phase=Phase.CLOSED, leader=None, min_nodes=1, max_nodes=1,
            outcome=Outcome.FAILED, cause=Cause(note=note), expires=True,
        )  # fmt: skip
        site.client().put(STATE_KEY, closed.encode())
        with pytest.raises(RendezvousClosedError) as refused:
            site.handler(1, 1).next_rendezvous()
        for text in (str(refused.value), *caplog.messages):
            assert text.isprintable(), ascii(text)
            assert len(text) < 5000

    @pytest.mark.parametrize(
        "master", ["host", "host:99999999", "ho\0st:1", "host:x", ""], ids=ascii
    )
    def test_a_master_that_is_none_ends_no_agent(self, site: Site, master: str) -> None:
        """It raised ValueError in the agent, which then closed the run for all."""
        alone = site.handler(1, 1)
        site.join(alone)
        document, client = site.document, site.client()
        assert document is not None
        forged = replace(document, master=master, round=document.round + 1)
        client.put(STATE_KEY, forged.encode())

        def mended() -> bool:
            entry = client.get(STATE_KEY)
            return entry is not None and entry.value == document.encode()

        site.await_that(mended, 60.0)
        assert alone.num_nodes_waiting() == 0
        assert not alone.is_closed()
        assert alone.shutdown()


class Host:
    """A host whose clock goes on by some seconds at once, as while it was suspended."""

    suspended = 0.0

    def now(self) -> float:
        return time.monotonic() + self.suspended


def test_a_node_counts_the_time_for_which_its_host_was_suspended(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network is still away when the host goes on: its workers stop at once."""
    host, cut = Host(), site.client()
    monkeypatch.setattr(clock, "now", host.now)
    handler = site.handler(2, 2, cut, on_outage="stop", outage_limit=600.0)
    monkeypatch.undo()
    site.join(handler, site.handler(2, 2))
    cut.cut()
    assert handler.num_nodes_waiting() == 0
    host.suspended += 600.0
    assert handler.num_nodes_waiting() > 0


@pytest.mark.rule("outage")
def test_a_leader_whose_host_was_suspended_takes_nobody_for_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host()
    monkeypatch.setattr(clock, "now", host.now)
    leader = site.handler(2, 2)
    joins = Background(leader.next_rendezvous)
    site.await_that(lambda: site.document is not None)
    monkeypatch.undo()
    other = site.handler(2, 2)
    site.join(other)
    joins.result(20.0)
    for _ in range(3):
        beat = leader._node.record.beat
        host.suspended += 600.0
        site.await_that(lambda beat=beat: leader._node.record.beat > beat + 3)
    assert [it.num_nodes_waiting() for it in (leader, other)] == [0, 0]
    assert site.document is not None
    assert (site.document.round, site.document.leader) == (0, leader._node.id)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
def test_the_clock_of_a_node_goes_on_while_its_host_is_suspended() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= clock.now() <= time.clock_gettime(time.CLOCK_BOOTTIME)
