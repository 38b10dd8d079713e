"""Agents of one run, played by threads: what torch's agents do with a handler, without workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from operator import contains
from typing import Any, Self, TypeVar

from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousParameters

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.observe.history import Archive, Row
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol import words
from rdzv_plugins.protocol.documents import NODES_PREFIX, STATE_KEY, NodeRecord
from rdzv_plugins.testing import harness
from tests.integration.stores import RunningStore

__all__ = [
    "QUICK",
    "Agent",
    "Run",
    "Watch",
    "await_beats",
    "crash",
    "exchange_roles",
    "one_world",
    "until",
]

# Long enough for a busy machine to beat three times in, short enough to wait for.
QUICK = {
    "keep_alive_interval": "0.5", "last_call_timeout": "0.2", "join_timeout": "30",
    "heartbeat_timeout": "5",
}  # fmt: skip

T = TypeVar("T")


def until(condition: Callable[[], bool], seconds: float) -> None:
    assert harness.until(condition, seconds), f"not within its deadline: {condition}"


class Agent:
    """What torch's agent does with a handler, without workers."""

    def __init__(self, handler: StoreRendezvousHandler) -> None:
        self.handler = handler
        self.rounds: list[RendezvousInfo] = []
        self.error: BaseException | None = None
        self._quit = threading.Event()
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._quit.is_set():
                info = self.handler.next_rendezvous()
                exchange_roles(self.handler, info)
                self.rounds.append(info)
                while self.handler.num_nodes_waiting() == 0 and not self._quit.is_set():
                    if self._failed.wait(0.01):
                        break
                self._failed.clear()
        except (Exception, SystemExit) as error:
            self.error = error

    @property
    def world(self) -> tuple[int, int, int] | None:
        """(rank, world size, MASTER_PORT) of the last round."""
        if not self.rounds:
            return None
        info = self.rounds[-1]
        assert info.bootstrap_store_info is not None
        return info.rank, info.world_size, info.bootstrap_store_info.master_port

    def __str__(self) -> str:
        node = self.handler._node
        threads = [it.name for it in threading.enumerate() if self.handler.get_run_id() in it.name]
        return (
            f"world {self.world}, error {self.error!r}, {node.record}, {node.document}, "
            f"latest {node.latest}, {words.of_node(node.view())}, threads {threads}"
        )

    def fail_workers(self) -> None:
        """Join again without having been asked to."""
        self._failed.set()

    def crash(self) -> None:
        """Stop beating without a word, as kill -9 does."""
        self._quit.set()
        crash(self.handler)

    def leave(self) -> None:
        """What happens at the exit of a process that got a SIGTERM."""
        self._quit.set()
        self.handler._leave()

    def end(self) -> None:
        self._quit.set()
        self.handler.shutdown()
        self._thread.join(10)


def crash(handler: StoreRendezvousHandler) -> None:
    """Let a node stop beating without a word, as kill -9 does."""
    handler._driver.stop(5)
    handler._ended = True
    handler._release()


def exchange_roles(handler: StoreRendezvousHandler, info: RendezvousInfo) -> None:
    """Every agent of a round waits for a word of every other, as torch's do before they go on."""
    key = "torchelastic/role_info/"
    info.store.set(f"{key}{info.rank}", str(info.rank))
    roles = info.store.multi_get([f"{key}{rank}" for rank in range(info.world_size)])
    expected = [str(rank).encode() for rank in range(info.world_size)]
    # Where the round is over already, nobody can be waited for.
    assert roles == expected or handler.num_nodes_waiting() > 0


class Run:
    """The agents of one run; a context manager that ends them."""

    def __init__(self, store: RunningStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self.agents: list[Agent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.agents:
            agent.end()

    def handler(self, nnodes: tuple[int, int], **config: str) -> StoreRendezvousHandler:
        """Made as torch makes it."""
        return self.handler_through(None, nnodes, **config)

    def handler_through(
        self, proxy: tuple[str, int] | None, nnodes: tuple[int, int], **config: str
    ) -> StoreRendezvousHandler:
        """One that reaches the store by a proxy at this address; None: straight."""
        options: dict[str, Any] = {
            "local_addr": "127.0.0.1",
            **QUICK,
            **self._store.config_at(proxy),
            **config,
        }
        params = RendezvousParameters(
            self._store.backend,
            self._store.endpoint_at(proxy),
            self._run_id,
            *nnodes,
            **options,
        )
        handler = create_handler(self._store.backend, params)
        assert isinstance(handler, StoreRendezvousHandler)
        return handler

    def start(self, nnodes: tuple[int, int], **config: str) -> Agent:
        agent = Agent(self.handler(nnodes, **config))
        self.agents.append(agent)
        return agent

    def history(self) -> list[Row]:
        return Archive(self._store.open, self._run_id, 0).rows()

    def tells(self, *words: str) -> Callable[[], bool]:
        """Whether the reasons of the last rounds hold these words, a round each.

        To be waited for: a round is released to its agents before its leader notes it.
        """

        def check() -> bool:
            reasons = [row.reason for row in self.history()][-len(words) :]
            return len(reasons) == len(words) and all(map(contains, reasons, words))

        return check

    def is_swept(self) -> bool:
        return self._ask(lambda client: client.get(STATE_KEY)) is None

    def _ask(self, question: Callable[[KeyValueClient], T]) -> T:
        with closing(self._store.open(self._run_id)) as client:
            return question(client)


def one_world(agents: list[Agent]) -> Callable[[], bool]:
    """Whether exactly these agents are in one world, with ranks 0..n-1 and one MASTER_PORT."""
    return _OneWorld(agents)


@dataclass(frozen=True)
class _OneWorld:
    agents: list[Agent]

    def __call__(self) -> bool:
        worlds = [agent.world for agent in self.agents]
        if any(world is None or world[1] != len(self.agents) for world in worlds):
            return False
        ranks, _, ports = zip(*(world for world in worlds if world), strict=True)
        return sorted(ranks) == list(range(len(self.agents))) and len(set(ports)) == 1

    def __str__(self) -> str:
        """Where each agent and its node stand, for a test that waited in vain."""
        return "".join(f"\n{agent}" for agent in self.agents)


@dataclass
class Watch:
    """What agents are told of others that wait, at every moment while the watch is on."""

    agents: list[Agent]
    seen: list[int] = field(default_factory=list)
    asked: int = 0

    def __enter__(self) -> Watch:
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="test-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._quit.set()
        self._thread.join(5)

    def _ask(self) -> None:
        while not self._quit.wait(0.01):
            counts = [agent.handler.num_nodes_waiting() for agent in self.agents]
            self.seen += [count for count in counts if count]
            self.asked += 1


def await_beats(store: RunningStore, run_id: str, nodes: int, seconds: float) -> None:
    """Wait until that many nodes have each written another beat into the store.

    What a server did not know that took over from another, they must have written again by then.
    """
    with closing(store.open(run_id, request_timeout=seconds)) as client:
        until(lambda: len(_beats(client)) == nodes, seconds)
        old = _beats(client)

        def beaten() -> bool:
            # All of them: a server that knows of nobody yet has heard no beat.
            now = _beats(client)
            return all(now.get(node, 0) > beat for node, beat in old.items())

        until(beaten, seconds)


def _beats(client: KeyValueClient) -> dict[str, int]:
    records = client.list(NODES_PREFIX)
    return {key: NodeRecord.decode(entry.value).beat for key, entry in records.items()}
