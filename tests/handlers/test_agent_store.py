"""torch's own agent on `AgentStore`: what waits for a node that is gone ends with the round.

The names and shapes that `AgentStore` makes up for are private to torch. Should torch change them,
a test here fails at its deadline, or says what it got.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import pytest
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
)

from rdzv_plugins.kv import (
    AccessDeniedError,
    Entry,
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
)
from rdzv_plugins.testing.threads import Background, together
from rdzv_plugins.torch.agent_store import AgentStore
from tests.handlers.site import LEASE, site

pytestmark = pytest.mark.rule("a round", "done")

WORLD, WORKERS = 2, 3
CHANGED = "torch waits for something else now: see rdzv_plugins/torch/agent_store.py"


class Agent(SimpleElasticAgent):
    """torch's, in a round, without workers of its own."""

    def __init__(self, store: AgentStore, rank: int) -> None:
        spec = WorkerSpec("role", WORKERS, None, entrypoint="x")  # type: ignore[arg-type]
        super().__init__(spec)
        self._store: Any = store
        self._rank = rank
        self._worker_group.group_world_size = WORLD  # type: ignore[assignment]

    def assign(self) -> list[tuple[int, int, int, int]]:
        """torch's exchange of roles."""
        spec = self._worker_group.spec
        workers: list[Worker] = self._assign_worker_ranks(self._store, self._rank, WORLD, spec)
        return [
            (worker.global_rank, worker.world_size, worker.role_rank, worker.role_world_size)
            for worker in workers
        ]

    def pass_exit_barrier(self) -> None:
        self._exit_barrier()  # type: ignore[no-untyped-call]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        raise NotImplementedError

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        raise NotImplementedError

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise NotImplementedError

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        raise NotImplementedError


class Round:
    """The stores of one round, as each of its agents sees them."""

    def __init__(self) -> None:
        server = MemoryServer()
        self.over = [False] * WORLD
        self.trains_on = False
        self.done = [0] * WORLD
        self.clients = [MemoryClient(server, "run") for _ in range(WORLD)]
        self.stores = [self._store(rank) for rank in range(WORLD)]
        self.agents = [Agent(store, rank) for rank, store in enumerate(self.stores)]

    def _store(self, rank: int) -> AgentStore:
        def on_done() -> None:
            self.done[rank] += 1

        return AgentStore(
            self.clients[rank], "store/a/0/", rank, WORLD, lambda: self.over[rank], on_done,
            lambda: self.trains_on,
        )  # fmt: skip

    def end(self) -> None:
        """What the driver does once the run has left the round."""
        for rank, client in enumerate(self.clients):
            self.over[rank] = True
            client.interrupt()

    def assert_waits(self, waiting: Background[Any]) -> None:
        assert not waiting.done(0.3), CHANGED


@pytest.fixture
def round_() -> Iterator[Round]:
    round_ = Round()
    yield round_
    for client in round_.clients:
        client.close()


def test_agents_exchange_their_roles(round_: Round) -> None:
    first, second = together([agent.assign for agent in round_.agents])
    assert first == [(rank, 6, rank, 6) for rank in (0, 1, 2)]
    assert second == [(rank, 6, rank, 6) for rank in (3, 4, 5)]


@pytest.mark.parametrize("rank", range(WORLD))
def test_the_exchange_ends_with_the_round(round_: Round, rank: int) -> None:
    """Rank 0 waits for the roles of all, the others for what rank 0 makes of them."""
    waiting = Background(round_.agents[rank].assign)
    round_.assert_waits(waiting)
    # Its own handler's other interrupts are no answer.
    round_.clients[rank].interrupt()
    round_.assert_waits(waiting)
    round_.end()
    # As many workers as it has; they are stopped before they do a thing.
    assert len(waiting.result(10.0)) == WORKERS, CHANGED


def test_an_exchange_begun_after_the_end_of_the_round_ends_at_once(round_: Round) -> None:
    round_.end()
    for agent in round_.agents:
        assert len(Background(agent.assign).result(10.0)) == WORKERS, CHANGED


def test_what_was_written_is_given_though_the_round_is_over(round_: Round) -> None:
    together([agent.assign for agent in round_.agents])
    written = round_.stores[0].get("torchelastic/role_info/1")
    round_.end()
    assert round_.stores[0].get("torchelastic/role_info/1") == written
    assert round_.agents[1].assign() == [(rank, 6, rank, 6) for rank in (3, 4, 5)]


def test_agents_that_all_succeed_pass_the_exit_barrier(round_: Round) -> None:
    first = Background(round_.agents[0].pass_exit_barrier)
    round_.assert_waits(first)
    assert round_.done == [1, 0], CHANGED
    assert not round_.stores[0].all_done
    round_.agents[1].pass_exit_barrier()
    first.result(10.0)
    assert round_.done == [1, 1]
    assert [store.all_done for store in round_.stores] == [True, True], CHANGED


def test_the_exit_barrier_ends_with_the_round_and_not_all_are_done(
    round_: Round, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Background(round_.agents[0].pass_exit_barrier)
    round_.assert_waits(waiting)
    round_.end()
    waiting.result(10.0)
    assert round_.done == [1, 0], CHANGED
    assert not round_.stores[0].all_done
    # torch logs the error of a barrier that was not passed, and goes on.
    assert "Error waiting on exit barrier" not in caplog.text, CHANGED


def test_the_last_one_may_end_the_round_just_after_another_has_looked(
    round_: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = round_.stores[0]
    look = store._found

    def found(keys: Sequence[str]) -> Mapping[str, Entry]:
        entries = look(keys)
        if not round_.done[1]:
            round_.agents[1].pass_exit_barrier()
            round_.end()
        return entries

    monkeypatch.setattr(store, "_found", found)
    round_.agents[0].pass_exit_barrier()
    assert store.all_done


def test_nothing_is_made_up_while_the_round_lasts(round_: Round) -> None:
    store = round_.stores[0]
    store.set_timeout(timedelta(seconds=0.2))
    for key in ("torchelastic/role_info/1", "torchelastic/assigned_ranks/0", "other"):
        with pytest.raises(DistStoreError, match=r"wait timeout after 0\.2 s"):
            store.get(key)


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "while the store is away"])
def test_the_exit_barrier_lasts_as_long_as_the_round(
    round_: Round, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of rank 0 holds the TCPStore that the others' workers use."""

    def unreachable(*_: object) -> NoReturn:
        raise RendezvousConnectionError("unreachable")

    if not counted:
        monkeypatch.setattr(round_.clients[0], "add", unreachable)
    round_.agents[0]._exit_barrier_timeout = 0.1
    waiting = Background(round_.agents[0].pass_exit_barrier)
    round_.assert_waits(waiting)
    if counted:
        round_.agents[1].pass_exit_barrier()
    else:
        round_.end()
    waiting.result(10.0)
    assert round_.stores[0].all_done is counted


@pytest.mark.parametrize("ends", ["the others", "a failure", "the time-out"])
def test_the_exit_barrier_of_a_closed_run_that_trains_on(round_: Round, ends: str) -> None:
    """It lasts no longer than its time-out: no node tells there that another is lost."""
    round_.trains_on = True
    round_.end()
    round_.agents[0]._exit_barrier_timeout = 0.1 if ends == "the time-out" else 60
    waiting = Background(round_.agents[0].pass_exit_barrier)
    if ends != "the time-out":
        round_.assert_waits(waiting)
    if ends == "the others":
        round_.agents[1].pass_exit_barrier()
    elif ends == "a failure":
        round_.trains_on = False
    waiting.result(10.0)
    assert round_.stores[0].all_done is (ends == "the others")


def test_only_rank_0_waits_in_the_exit_barrier_of_a_closed_run(round_: Round) -> None:
    """It has the TCPStore."""
    round_.trains_on = True
    round_.end()
    first = Background(round_.agents[0].pass_exit_barrier)
    round_.assert_waits(first)
    Background(round_.agents[1].pass_exit_barrier).result(10)
    first.result(10)
    assert round_.stores[0].all_done


@pytest.mark.parametrize("closed", [False, True])
def test_the_time_out_of_the_exit_barrier_bounds_an_outage(
    round_: Round, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    if closed:
        round_.trains_on = True
        round_.end()

    def unreachable(keys: object) -> NoReturn:
        raise RendezvousConnectionError("unreachable")

    monkeypatch.setattr(round_.clients[0], "get_many", unreachable)
    store = round_.stores[0]
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(DistNetworkError):  # Not by the agent: torch's log of it takes seconds.
        Background(lambda: store.wait(["torchelastic/agent/terminal_state/last_member"])).result(10)


def test_what_nobody_knows_is_an_error_once_the_round_is_over(round_: Round) -> None:
    round_.end()
    with pytest.raises(DistStoreError, match="the round is over: no node will write 'other'"):
        round_.stores[0].get("other")


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("before", [True, False], ids=["before", "within"])
@pytest.mark.parametrize("answers", [True, False], ids=["refuses", "is silent"])
def test_the_exchange_ends_once_a_node_that_is_cut_off_takes_itself_for_lost(
    rank: int, before: bool, answers: bool
) -> None:
    """It is told to join again, also where the store has let it in meanwhile."""
    with site() as run:
        cut = run.client()
        silence: dict[str, Any] = {"on_outage": "stop", "outage_limit": LEASE}
        options = {} if answers else silence
        # Ranks follow the addresses. The other one's agent writes no role, and no ranks.
        handler = run.handler(2, 2, cut, f"127.0.0.{2 + rank}", **options)
        other = run.handler(2, 2, address=f"127.0.0.{3 - rank}", **options)
        info, _ = run.join(handler, other)
        assert info.rank == rank
        assert isinstance(info.store, AgentStore)
        denied = AccessDeniedError("the password was changed") if answers else None
        if before:
            cut.cut(denied)
        exchange = Background(Agent(info.store, rank).assign)
        if not before:
            assert not exchange.done(LEASE / 3), CHANGED
            cut.cut(denied)
        assert len(exchange.result(10.0)) == WORKERS, CHANGED
        cut.down = False
        run.await_that(lambda: not handler._node.is_cut_off)
        assert handler.num_nodes_waiting() > 0
        run.join(handler, other)
        assert handler.num_nodes_waiting() == 0


def test_an_agent_cut_off_for_a_moment_in_the_exchange_gets_what_is_written(round_: Round) -> None:
    first, second = round_.agents

    def unreachable(keys: object) -> Mapping[str, Entry]:
        raise RendezvousConnectionError("unreachable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_.clients[0], "get_many", unreachable)
        waiting = Background(first.assign)
        round_.assert_waits(waiting)
    assert second.assign() == [(rank, 6, rank, 6) for rank in (3, 4, 5)]
    assert waiting.result(10.0) == [(rank, 6, rank, 6) for rank in (0, 1, 2)]
    assert not round_.stores[0].made_up
