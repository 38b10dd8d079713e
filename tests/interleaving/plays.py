"""What a few nodes do beside each other, drawn by a seed, and what must hold whatever the turns.

A node's agent is a thread that does with its handler what torch's agent does. A signal is one more
thread, which announces the leave, and an exception in the agent, wherever it waits.
"""

from __future__ import annotations

import errno
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from rdzv_plugins import clock
from rdzv_plugins.kv import MemoryClient, MemoryServer, exhaustion, memory, retry
from rdzv_plugins.observe import history as archive
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.process import driver, handler, master_servers, signals
from rdzv_plugins.process.factory import rules_of
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Outcome,
    RoundDocument,
)
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.torch import agent_store, c10d_store
from tests.interleaving.scheduler import Queue, Scheduler, StuckError, Task

__all__ = ["Play", "play"]

SETTINGS = Settings(
    keep_alive_interval=5, last_call_timeout=0.5, join_timeout=60, close_timeout=10, closed_ttl=30
)
# What is told arrives at once, in virtual time but for a few pauses; what is not, with a beat.
AT_ONCE = 2.0
ENDS = (RendezvousClosedError, RendezvousTimeoutError, RendezvousConnectionError)
STORE_ENDS = (DistNetworkError, DistStoreError)
# A thread repeats nothing this soon that it does by itself.
_A_MOMENT = 1e-3
_BARRIER = "torchelastic/agent/terminal_state/"


class Agent:
    """One node, and how its life is to end."""

    def __init__(self, play: Play, name: str) -> None:
        self.play = play
        self.name = name
        self.handler = play.make(name)
        self.last = play.random.choice(
            ("succeed", "succeed", "leave", "leave", "fail", "crash", "close")
        )
        self.last_at = play.random.choice((0.0, 0.001, 1.0, 7.0))
        self.rounds: list[Any] = []
        self.longest_join = 0.0
        self.signalled = False
        self.closed = False
        self.farewells = 0
        farewell = self.handler._node.farewell

        def counted(failure: str = "") -> Any:
            self.farewells += 1
            return farewell(failure)

        self.handler._node.farewell = counted  # type: ignore[method-assign]
        self.did: list[effects.Effect[Any]] = []
        self.did_at = 0.0
        self.handler._watchers.append(self.note)

    def note(self, request: effects.Effect[Any], answer: object, error: object) -> None:
        """No action repeats without a request, a wait or a change."""
        now = self.play.scheduler.now
        if type(request) not in effects.LOCAL or now - self.did_at > _A_MOMENT:
            self.did.clear()
        if type(request) in effects.LOCAL:
            self.did.append(request)
            # Twice where another thread answers just as the first ends.
            if self.did.count(request) > 2:
                self.play.repeated.append(f"{self.name} repeats {request}")
        self.did_at = now

    def live(self) -> None:
        """As the process of a launcher and its agent does."""
        try:
            self._launch()
        except SignalException:
            self.handler._leave_at_exit()

    def _launch(self) -> None:
        """As torch's launcher."""
        try:
            self._work()
            self.handler.shutdown()
        except SystemExit:
            self.handler.shutdown()
        except (*ENDS, *STORE_ENDS):
            self.handler.shutdown()
        except FailedError:
            self.closed = True
            self.handler.shutdown()

    def _work(self) -> None:
        end_at = self.play.scheduler.now + self.last_at
        while True:
            self._join()
            while self.handler.num_nodes_waiting() == 0:
                if self.play.scheduler.now >= end_at:
                    if self.last == "fail":
                        raise FailedError
                    if self.last == "close":
                        self.handler.set_closed()
                        return
                    if self.last == "crash":
                        self.handler._driver.stop(5)
                        self.handler._ended = True
                        self.handler._release()
                        return
                    if self.last == "succeed" or self.signalled:
                        self._meet_in_the_exit_barrier()
                        return
                self.play.scheduler.time.sleep(0.1)

    def _join(self) -> None:
        began = self.play.scheduler.now
        info = self.handler.next_rendezvous()
        self.longest_join = max(self.longest_join, self.play.scheduler.now - began)
        self.rounds.append(info)
        info.store.set(f"torchelastic/role_info/{info.rank}", "{}")
        info.store.multi_get([f"torchelastic/role_info/{n}" for n in range(info.world_size)])

    def _meet_in_the_exit_barrier(self) -> None:
        info = self.rounds[-1]
        key = f"{_BARRIER}{info.rank}"
        info.store.add(f"{_BARRIER}num_members", 1)
        info.store.set(key, "done")
        keys = [f"{_BARRIER}{n}" for n in range(info.world_size)]
        try:
            info.store.wait(keys, timedelta(seconds=100))
        except STORE_ENDS:
            return

    def be_told_to_leave(self, agent: Callable[[], Task]) -> None:
        """What a signal does: the handler's thread announces, the main one gets an exception.

        Or none: whoever waits in a join that another thread ends must be told by the join itself.
        """
        self.play.scheduler.time.sleep(self.last_at)
        self.signalled = True
        if self.play.random.random() < 0.6:
            error = SignalException("got a signal", signal.SIGTERM)
            self.play.scheduler.interrupt(agent(), error)
        self.handler._leave_at_exit()


class FailedError(Exception):
    """The agent's workers failed once too often."""


class Play:
    """A run of two or three nodes under one seed."""

    def __init__(self, seed: int) -> None:
        self.scheduler = Scheduler(seed)
        self.random = random.Random(seed)
        self.server = MemoryServer(changed=self.scheduler.threading.Condition())
        self.nodes = self.random.choice((1, 2, 2, 3))
        self.least = self.random.randint(1, self.nodes)
        self.opening = self.random.choice((0.0, 0.0, 0.0, 0.06, 3.0, 40.0))
        # When no host lets a thread start, and opens anything.
        begins = 1000.0 + self.random.choice((0.0, 0.0, 0.3, 5.0))
        self.refuses = begins, begins + self.random.choice((0.0, 0.0, 0.0, 0.5, 4.0))
        self.repeated: list[str] = []
        self.agents: list[Agent] = []

    def refuse(self, error: Exception) -> None:
        begins, ends = self.refuses
        if begins <= self.scheduler.now < ends:
            raise error

    def thread(self, **options: Any) -> Task:
        made = Task(self.scheduler, **options)
        start = made.start

        def start_unless_refused() -> None:
            self.refuse(RuntimeError("can't start new thread"))
            start()

        made.start = start_unless_refused  # type: ignore[method-assign]
        return made

    def make(self, name: str) -> StoreRendezvousHandler:
        made = StoreRendezvousHandler(
            MemoryClient(self.server, "run"),
            Archive(partial(MemoryClient, self.server), "run", history_ttl=3600.0),
            "run",
            rules_of(SETTINGS, self.least, self.nodes),
            SETTINGS,
            name,
        )
        made._masters._check_address = lambda: None  # type: ignore[method-assign]
        # It looks at the real network, in a real thread.
        made._reach.plan = lambda *_: None  # type: ignore[method-assign]
        return made

    def open_server(self, *_: object) -> SimpleNamespace:
        self.refuse(OSError(errno.EMFILE, "Too many open files"))
        self.scheduler.time.sleep(self.opening * self.random.random())
        return SimpleNamespace(port=self.random.randint(1, 9999))

    def run(self) -> None:
        with self._in_its_world():
            self.agents = [Agent(self, f"host{n}") for n in range(self.nodes)]
            calls: list[tuple[str, Callable[[], object]]] = []
            for agent in self.agents:
                calls.append((agent.name, agent.live))
                if agent.last == "leave":

                    def tell(agent: Agent = agent) -> None:
                        agent.be_told_to_leave(lambda: self._task(agent.name))

                    calls.append((f"signal of {agent.name}", tell))
            try:
                self.scheduler.run(*calls)
            except StuckError:
                assert not self.repeated, self.repeated[0]  # That is why.
                raise
            self.check()

    def _task(self, name: str) -> Task:
        return self.tasks[name]

    @property
    def tasks(self) -> dict[str, Task]:
        return {task.name: task for task in self.scheduler.tasks}

    @contextmanager
    def _in_its_world(self) -> Iterator[None]:
        scheduler = self.scheduler
        drawn = random.Random(self.random.random())
        secrets = SimpleNamespace(
            token_hex=lambda size: f"{drawn.getrandbits(8 * size):0{2 * size}x}",
            randbits=drawn.getrandbits,
        )
        at_exit = SimpleNamespace(register=lambda _: None, unregister=lambda _: None)
        calendar = SimpleNamespace(
            now=lambda zone: datetime.fromtimestamp(scheduler.now, zone),
            fromtimestamp=datetime.fromtimestamp,
        )
        places: list[tuple[object, str, object]] = [
            (driver, "datetime", calendar),
            (archive, "datetime", calendar),
            (handler, "secrets", secrets),
            (handler, "atexit", at_exit),
            (master_servers, "open_store", self.open_server),
            (clock, "now", scheduler.time.monotonic),
            (retry, "random", drawn),
        ]
        modules = (clock, driver, exhaustion, handler, memory, retry, signals)
        for module in (*modules, agent_store, c10d_store):
            threading = scheduler.threading
            if module in (driver, handler):
                threading.Thread = self.thread
            for name, value in (
                ("threading", threading),
                ("time", scheduler.time),
                ("SimpleQueue", lambda: Queue(scheduler)),
            ):
                if hasattr(module, name):
                    places.append((module, name, value))
        patches = [patch.object(*place) for place in places]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def check(self) -> None:
        assert not self.repeated, self.repeated[0]
        client = MemoryClient(self.server, "run")
        entry = client.get(STATE_KEY)
        document = RoundDocument.decode(entry.value) if entry else None
        closed = document is not None and document.closed
        for agent in self.agents:
            made = agent.handler
            assert not made._driver.running, f"the thread of {agent.name} lives on"
            assert not any(aside.thread.is_alive() for aside in made._driver._asides)
            assert made._gone.is_set()
            assert agent.farewells <= 1, f"{agent.name} said farewell {agent.farewells} times"
            found = client.get(NODES_PREFIX + made._node.id)
            if found is not None and agent.signalled and not closed:
                status = NodeRecord.decode(found.value).status
                assert status in ("left", "done"), (
                    f"{agent.name} left, and its record says {status}"
                )
        if closed and document is not None and document.outcome is Outcome.FAILED:
            # Only a member's failure closes a run as failed.
            assert any(agent.closed and agent.rounds for agent in self.agents), document.reason
        if self.is_calm:
            for agent in self.agents:
                assert agent.rounds, f"{agent.name} was in no round"
                assert agent.longest_join <= AT_ONCE, f"{agent.name}: {agent.longest_join} s"
            assert document is not None
            assert document.outcome is Outcome.SUCCEEDED

    @property
    def is_calm(self) -> bool:
        """Nobody fails, leaves or is slow: every word arrives at once."""
        return (
            all(agent.last == "succeed" and agent.last_at >= 1.0 for agent in self.agents)
            and self.opening < 0.1
            and self.refuses[0] == self.refuses[1]
            and self.scheduler._haste == 0.0
        )


def play(seed: int) -> Play:
    """Raises what does not hold."""
    played = Play(seed)
    played.run()
    return played
