"""The rule of ``rdzv run``: real agents and workers, over the in-memory store, in threads."""

from __future__ import annotations

import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    PContext,
    SignalException,
    SubprocessContext,
)
from torch.distributed.launcher import api

from rdzv_plugins.kv import Entry, MemoryClient, MemoryServer, RendezvousConnectionError, Version
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.process import agent
from rdzv_plugins.process.agent import RunAgent
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import STATE_KEY, Outcome, Phase, RoundDocument
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.testing.harness import until

# Far beyond what a test may take: whoever waits for it is seen to.
LONG = 60.0


class Faulty(MemoryClient):
    """A client whose store can be away."""

    def __init__(self, server: MemoryServer, namespace: str) -> None:
        super().__init__(server, namespace)
        self.away = threading.Event()

    def _keys(self) -> dict[str, Entry]:
        if self.away.is_set():
            raise RendezvousConnectionError("the store is away")
        return super()._keys()

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        if self.away.is_set():
            raise RendezvousConnectionError("the store is away")
        return super().wait(key, version, timeout)


class Peer:
    """A node whose workers hang: it is in the round, lives, and notices nothing."""

    def __init__(self, server: MemoryServer, lease: float, nodes: tuple[int, int]) -> None:
        self.client = Faulty(server, "run")
        interval = lease / 3
        settings = Settings(keep_alive_interval=interval, join_timeout=LONG, closed_ttl=LONG)
        rules = Rules(
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            lease=lease,
            interval=interval,
            last_call_timeout=LONG,
            replacement_timeout=0.05,
        )
        archive = Archive(partial(MemoryClient, server), "run", history_ttl=3600.0)
        self.handler = StoreRendezvousHandler(
            self.client, archive, "run", rules, settings, "127.0.0.1"
        )
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.error: BaseException | None = None
        self.thread.start()

    def _live(self) -> None:
        try:
            self.live()
        except BaseException as error:
            self.error = error

    def live(self) -> None:
        self.handler.next_rendezvous()

    def die(self) -> None:
        """No beat from now on, and no farewell: ``kill -9``."""
        self.handler._driver.stop(5)


class Node(Peer):
    """A node with an agent; its workers are this script of a shell."""

    def __init__(
        self,
        server: MemoryServer,
        lease: float,
        nodes: tuple[int, int],
        script: str,
        folder: Path,
        max_restarts: int,
    ) -> None:
        self.script, self.folder, self.max_restarts = script, folder, max_restarts
        self.result: RunResult | None = None
        self.agent: RunAgent | None = None
        super().__init__(server, lease, nodes)

    def live(self) -> None:
        spec = WorkerSpec(
            role="test",
            local_world_size=1,
            rdzv_handler=self.handler,
            entrypoint="/bin/sh",
            args=("-c", self.script),
            max_restarts=self.max_restarts,
            monitor_interval=0.02,
        )
        self.agent = RunAgent(spec, DefaultLogsSpecs(log_dir=str(self.folder)))
        # As the launcher does.
        try:
            self.result = self.agent.run()
        finally:
            self.handler.shutdown()

    def end(self, timeout: float = 20) -> RunResult:
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "the agent still runs"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    @property
    def counted(self) -> int:
        assert self.agent is not None
        return self.max_restarts - self.agent._remaining_restarts


class Run:
    """Nodes of one run."""

    def __init__(self, folder: Path) -> None:
        self.server = MemoryServer()
        self.folder = folder
        self.peers: list[Peer] = []

    def node(
        self, script: str, *, lease: float, nodes: tuple[int, int], max_restarts: int = 0
    ) -> Node:
        folder = self.folder / str(len(self.peers))
        folder.mkdir()
        node = Node(self.server, lease, nodes, script, folder, max_restarts)
        self.peers.append(node)
        return node

    def peer(self, *, lease: float, nodes: tuple[int, int]) -> Peer:
        peer = Peer(self.server, lease, nodes)
        self.peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self.peers:
            peer.client.away.clear()
            peer.handler.shutdown()
            peer.thread.join(20)

    def closed(self) -> bool:
        entry = MemoryClient(self.server, "run").get(STATE_KEY)
        return entry is not None and RoundDocument.decode(entry.value).phase is Phase.CLOSED

    def someone_failed(self) -> bool:
        keys = MemoryClient(self.server, "run").list("store/")
        return any(key.endswith(agent._FIRST) for key in keys)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    # Peers without an agent take no part in the exchange of roles.
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    with closing(Run(tmp_path)) as started:
        yield started


def test_a_script_that_always_fails_ends_the_job_at_once(fleet: Run) -> None:
    began = time.monotonic()
    nodes = [fleet.node("exit 3", lease=LONG, nodes=(3, 3)) for _ in range(3)]
    results = [node.end() for node in nodes]
    assert time.monotonic() - began < LONG / 4
    assert [result.state for result in results] == [WorkerState.FAILED] * 3
    codes = [failure.exitcode for result in results for failure in result.failures.values()]
    assert codes == [3, 3, 3]
    assert fleet.closed()


def test_alone_in_the_round_a_failure_is_ones_own(fleet: Run) -> None:
    began = time.monotonic()
    node = fleet.node("exit 1", lease=LONG, nodes=(1, 1), max_restarts=2)
    assert node.end().is_failed()
    assert time.monotonic() - began < LONG / 4
    assert node.counted == 2


def test_only_the_first_agent_counts_a_failure_of_all(fleet: Run) -> None:
    script = 'mkdir "$TMPDIR_OF_TEST/$GROUP_RANK" 2>/dev/null && exit 1; exit 0'
    script = script.replace("$TMPDIR_OF_TEST", str(fleet.folder / "tried"))
    (fleet.folder / "tried").mkdir()
    nodes = [fleet.node(script, lease=LONG, nodes=(3, 3), max_restarts=1) for _ in range(3)]
    assert [node.end().state for node in nodes] == [WorkerState.SUCCEEDED] * 3
    assert sorted(node.counted for node in nodes) == [0, 0, 1]


def test_a_worker_that_was_killed_is_the_cause_though_others_failed_first(fleet: Run) -> None:
    tried, failed = fleet.folder / "tried", fleet.folder / "failed"
    fails = f"mkdir {tried}.1 2>/dev/null || exit 0; exit 1"
    killed = f"""
        mkdir {tried}.2 2>/dev/null || exit 0
        while [ ! -e {failed} ]; do sleep 0.02; done
        kill -9 $$$$
    """  # torch makes one dollar of two.
    nodes = [
        fleet.node(script, lease=LONG, nodes=(2, 2), max_restarts=1) for script in (fails, killed)
    ]
    assert until(fleet.someone_failed, 30)
    failed.touch()
    assert [node.end().state for node in nodes] == [WorkerState.SUCCEEDED] * 2
    assert [node.counted for node in nodes] == [0, 1]


# In a world of two the worker fails when the test says so; alone it is done.
FAILS_WITH_TWO = """
[ "$GROUP_WORLD_SIZE" = 1 ] && exit 0
while [ ! -e FILE ]; do sleep 0.02; done
exit 1
"""


def fails_with_two(fleet: Run) -> tuple[str, Callable[[], None]]:
    file = fleet.folder / "fail"
    return FAILS_WITH_TWO.replace("FILE", str(file)), file.touch


def test_what_follows_a_loss_counts_against_nothing(fleet: Run) -> None:
    script, fail = fails_with_two(fleet)
    node = fleet.node(script, lease=0.9, nodes=(1, 2))
    peer = fleet.peer(lease=0.9, nodes=(1, 2))
    peer.thread.join(10)
    peer.die()
    fail()
    assert node.end().state is WorkerState.SUCCEEDED


def test_what_follows_a_leave_counts_against_nothing(fleet: Run) -> None:
    script, fail = fails_with_two(fleet)
    node = fleet.node(script, lease=LONG, nodes=(1, 2))
    peer = fleet.peer(lease=LONG, nodes=(1, 2))
    peer.thread.join(10)
    fail()
    assert until(fleet.someone_failed, 30)
    peer.handler._leave()
    assert node.end().state is WorkerState.SUCCEEDED


def test_with_peers_that_hang_a_failure_is_ones_own_after_the_lease(fleet: Run) -> None:
    script, fail = fails_with_two(fleet)
    node = fleet.node(script, lease=0.9, nodes=(2, 2))
    peer = fleet.peer(lease=0.9, nodes=(2, 2))
    peer.thread.join(10)
    began = time.monotonic()
    fail()
    assert node.end().is_failed()
    assert time.monotonic() - began >= 0.9
    assert fleet.closed()


def failed_beside_a_peer(fleet: Run) -> tuple[Node, Peer]:
    """A node whose workers failed in a round with a peer that goes on."""
    script, fail = fails_with_two(fleet)
    node = fleet.node(script, lease=LONG, nodes=(2, 2), max_restarts=3)
    peer = fleet.peer(lease=LONG, nodes=(2, 2))
    peer.thread.join(10)
    fail()
    assert until(fleet.someone_failed, 30)
    return node, peer


def test_a_signal_ends_the_agent_although_an_error_replaced_its_exception(
    fleet: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        """Do what `threading.Thread.start` does at a signal, if the thread runs already."""
        try:
            raise SignalException("got a signal", signal.SIGTERM)
        except SignalException:
            raise KeyError from None

    monkeypatch.setattr(agent._Report, "start", start)
    script, fail = fails_with_two(fleet)
    node = fleet.node(script, lease=LONG, nodes=(2, 2))
    peer = fleet.peer(lease=LONG, nodes=(2, 2))
    peer.thread.join(10)
    fail()
    with pytest.raises(SignalException):
        node.end()
    assert not fleet.closed()


def test_a_peer_that_closes_the_run_ends_the_others_with_their_failure(fleet: Run) -> None:
    node, peer = failed_beside_a_peer(fleet)
    peer.handler.set_closed()
    assert node.end().is_failed()


def test_a_run_without_progress_ends_the_agents_with_93(fleet: Run) -> None:
    """Also one whose workers failed, and which has not asked for the next round yet."""
    node, peer = failed_beside_a_peer(fleet)
    handler = peer.handler
    handler._close(handler._service.close(Outcome.NO_PROGRESS, "no progress"))
    with pytest.raises(SystemExit) as ended:
        node.end()
    assert ended.value.code == 93


def test_a_run_that_is_closed_between_two_looks_ends_the_agents_with_93_too(fleet: Run) -> None:
    node, peer = failed_beside_a_peer(fleet)
    look = node.handler.num_nodes_waiting

    def look_and_close() -> int:
        seen = look()
        if not fleet.closed():
            peer.handler._close(peer.handler._service.close(Outcome.NO_PROGRESS, "no progress"))
            assert until(node.handler.is_closed, 10)
        return seen

    node.handler.num_nodes_waiting = look_and_close  # type: ignore[method-assign]
    with pytest.raises(SystemExit) as ended:
        node.end()
    assert ended.value.code == 93


def test_time_without_the_store_is_not_counted(fleet: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_DECISION_SECONDS", 0.5)
    script, fail = fails_with_two(fleet)
    node = fleet.node(script, lease=0.6, nodes=(1, 2))
    peer = fleet.peer(lease=0.6, nodes=(1, 2))
    peer.thread.join(10)
    node.client.away.set()
    peer.die()
    fail()
    time.sleep(node.handler.loss_shows_within + agent._DECISION_SECONDS + 1)
    assert node.result is None, "it was judged while nobody could know of the loss"
    node.client.away.clear()
    assert node.end().state is WorkerState.SUCCEEDED


def test_the_time_that_nodes_are_given_after_an_outage_is_not_counted(
    fleet: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that dies during it is found lost two leases after its end, not one."""
    monkeypatch.setattr(agent, "_DECISION_SECONDS", 0.0)
    script, fail = fails_with_two(fleet)
    node = fleet.node(script, lease=5.0, nodes=(1, 2))
    peer = fleet.peer(lease=5.0, nodes=(1, 2))
    peer.thread.join(10)
    node.client.away.set()
    peer.die()
    fail()
    assert until(lambda: node.handler._driver.outage_seconds > 5.0 / 3 + 1.0, 30)
    node.client.away.clear()
    assert node.end().state is WorkerState.SUCCEEDED


def test_a_failure_is_told_once_a_thread_can_start(
    fleet: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "rdzv-failure" and len(refused) < 6:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    nodes = [fleet.node("exit 3", lease=LONG, nodes=(2, 2)) for _ in range(2)]
    results = [node.end() for node in nodes]
    assert len(refused) == 6
    codes = [failure.exitcode for result in results for failure in result.failures.values()]
    assert codes == [3, 3]
    assert fleet.closed()


CHANGED = "torch changed what rdzv_plugins.process.agent leans on: "


def names(function: Any) -> set[str]:
    """The names that a function, perhaps a wrapped one, uses."""
    code = inspect.unwrap(function).__code__
    return {*code.co_names, *code.co_consts} if code else set()


def test_torchs_launcher_still_looks_its_agent_up_where_we_put_ours() -> None:
    assert vars(api)["LocalElasticAgent"] is LocalElasticAgent, CHANGED + "launcher.api"
    assert "LocalElasticAgent" in names(api.launch_agent), CHANGED + "launch_agent"
    assert "elastic_launch" in names(run.run), CHANGED + "torch.distributed.run"
    assert vars(run)["elastic_launch"] is api.elastic_launch, CHANGED + "torch.distributed.run"
    assert {"parse_args", "run"} >= names(run.main) - {None}, CHANGED + "torch.distributed.run"
    options = run.parse_args(["--rdzv-backend=redis", "train.py"])  # type: ignore[no-untyped-call]
    assert (options.rdzv_backend, options.standalone) == ("redis", False), CHANGED + "parse_args"


def test_torchs_loop_still_asks_as_we_answer() -> None:
    loop = names(SimpleElasticAgent._invoke_run)
    for name in ("_monitor_workers", "num_nodes_waiting", "_restart_workers"):
        assert name in loop, CHANGED + f"_invoke_run no longer uses {name}"
    for method in ("_monitor_workers", "_start_workers"):
        parameters = list(inspect.signature(getattr(LocalElasticAgent, method)).parameters)
        assert parameters == ["self", "worker_group"], CHANGED + method
    assert "_invoke_run" in names(SimpleElasticAgent.run), CHANGED + "run"
    assert "_remaining_restarts" in loop, CHANGED + "_remaining_restarts"
    assert "_start_workers" in names(SimpleElasticAgent._initialize_workers), CHANGED + "starting"


def test_torch_still_stops_its_workers_where_we_give_them_time() -> None:
    for stops in (LocalElasticAgent._shutdown, SubprocessContext._poll, MultiprocessContext._poll):
        assert "close" in names(stops), CHANGED + stops.__qualname__
    assert "_pcontext" in names(LocalElasticAgent._shutdown), CHANGED + "_pcontext"
    close = list(inspect.signature(PContext.close).parameters)
    assert close == ["self", "death_sig", "timeout"], CHANGED + "PContext.close"
    if hasattr(run.parse_args(["train.py"]), "shutdown_timeout"):  # type: ignore[no-untyped-call]
        assert "_shutdown_timeout" in names(SimpleElasticAgent.__init__), CHANGED + "its time"


def test_another_backends_agent_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(run, "run", lambda options: seen.append(vars(api)["LocalElasticAgent"]))
    agent.torchrun(["--rdzv-backend=c10d", "train.py"])
    agent.torchrun(["--standalone", "--rdzv-backend=redis", "train.py"])
    agent.torchrun(["train.py"])
    assert seen == [LocalElasticAgent] * 3
    agent.torchrun(["--rdzv-backend=redis", "train.py"])
    assert seen[-1] is RunAgent
    agent.torchrun(["--rdzv-backend=redis", "--warm", "--preload=a, b,", "train.py"])
    assert isinstance(seen[-1], partial)
    assert seen[-1].keywords["standbys"]._modules == "torch,a,b"
    assert vars(api)["LocalElasticAgent"] is LocalElasticAgent
