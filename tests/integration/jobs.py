"""Jobs of real torchrun agents on one store, whose workers train or do as the test says."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.observe.inspection import Inspection, settle
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
)
from tests.fleet.agents import TORCHRUN, Agent, TrainingError, World
from tests.integration.forked import ForkedFleet
from tests.integration.programs import PROGRAMS
from tests.integration.stores import RunningStore

TRAINS = (str(PROGRAMS / "train.py"),)
"""What the workers run: a training without torch."""
TRAINS_WITH_TORCH = ("--module", "tests.fleet.train")
WORKER = PROGRAMS / "worker.py"
"""Workers that do as the test says, and import no torch."""

INTERVAL = 1.0
ATTEMPTS = 3
LEASE = INTERVAL * ATTEMPTS

# How long a survivor may take to restart: torch's import alone takes 3 s of CPU on a small
# machine, and the workers of one test's nodes share its cores. Measured times are reported, not
# asserted.
PATIENCE = 45.0


@dataclass(frozen=True, slots=True)
class Pause:
    """How long training stood still, in seconds since the cause.

    Attributes:
        began: until the last worker of the new world began, before it imported torch.
        trained: until the last of them took its first step.
    """

    began: float
    trained: float

    @classmethod
    def of(cls, world: World, since: float) -> Pause:
        return cls(
            max(world.began.values()) - since,
            max(world.stepped.values()) - since,
        )


class Run(ForkedFleet):
    """A fleet whose round document can be read."""

    def __init__(
        self,
        folder: Path,
        store: RunningStore,
        *,
        nodes: str = "2:3",
        max_restarts: int | None = 3,
        run_id: str | None = None,
        script: Sequence[str] = TRAINS,
        launcher: Sequence[str] = TORCHRUN,
        **config: object,
    ) -> None:
        run_id = run_id or f"run-{secrets.token_hex(4)}"
        super().__init__(
            folder,
            backend=store.backend,
            endpoint=store.endpoint,
            run_id=run_id,
            nodes=nodes,
            config={
                "keep_alive_interval": INTERVAL,
                "keep_alive_max_attempt": ATTEMPTS,
                "heartbeat_timeout": 5,
                "last_call_timeout": 0.3,
                "join_timeout": 90,
                **store.config,
                **config,
            },
            environ={},
            max_restarts=max_restarts,
            script=script,
            launcher=launcher,
        )
        self._open = partial(store.open, run_id, request_timeout=2)
        self.archive = Archive(store.open, run_id, history_ttl=0)

    @cached_property
    def client(self) -> KeyValueClient:
        """Opened when it is first asked for: a store that the agents run is not there before."""
        return self._open()

    def close(self) -> None:
        super().close()
        if "client" in vars(self):
            self.client.close()

    def begin(self, names: Iterable[str]) -> World:
        """Start agents on 127.0.0.1 and following, and wait until they train in that order.

        One letter a name; "a" has the first address, "b" the second, and so on.
        """
        for name in names:
            self.start_at(name)
        world = self.await_world(names, by_rank=True)
        # Past the first checkpoint.
        self.await_step(world, world.resumed + 12)
        return world

    def start_at(
        self,
        name: str,
        place: int | None = None,
        training: Mapping[str, object] | None = None,
        **config: object,
    ) -> Agent:
        """Start an agent on the address that its name stands for, or on 127.0.0.``place``."""
        return self.start(name, f"127.0.0.{place or ord(name) - ord('a') + 1}", config, training)

    def document(self) -> RoundDocument | None:
        """The round document, or None where there is none or the store is away."""
        try:
            entry = self.client.get(STATE_KEY)
        except RendezvousConnectionError:
            return None
        return RoundDocument.decode(entry.value) if entry else None

    def records(self) -> list[NodeRecord]:
        """All nodes' own records."""
        return [NodeRecord.decode(it.value) for it in self.client.list(NODES_PREFIX).values()]

    def leader(self) -> Agent:
        """The agent that leads the run; waits until a living one does."""

        def found() -> Agent | None:
            document = self.document()
            if document is None or document.leader is None:
                return None
            entry = self.client.get(NODES_PREFIX + document.leader)
            pid = NodeRecord.decode(entry.value).pid if entry else None
            return next((agent for agent in self.agents.values() if agent.pid == pid), None)

        return self.await_that(found, "a leader among the agents", 30)

    def await_round(self, after: int, timeout: float = PATIENCE) -> float:
        """Wait until a round above ``after`` runs; returns when, on the monotonic clock."""

        def found() -> float | None:
            document = self.document()
            if document is None or document.phase is not Phase.RUNNING or document.round <= after:
                return None
            return time.monotonic()

        return self.await_that(found, f"a round above {after}", timeout)

    def round(self) -> int:
        """The round's number as it stands in the store; waits while that is slow to answer."""
        return self.await_that(self.document, "the round document", 30).round


class Job(Run):
    """A fleet of agents that run `programs.worker`, or another script of its kind.

    One letter a name, as in `Run`: "a" is on 127.0.0.1, and comes first in rank order.
    """

    def __init__(
        self, folder: Path, store: RunningStore, script: object = WORKER, **options: object
    ) -> None:
        super().__init__(
            folder,
            store,
            script=[str(script)],
            **options,  # type: ignore[arg-type]
        )

    def begin(self, names: Iterable[str]) -> World:
        """Start these agents and wait until their workers run in one world."""
        for name in names:
            self.start_at(name)
        return self.await_begun(names)

    def await_begun(
        self, names: Iterable[str], *, after: float = 0.0, timeout: float = PATIENCE
    ) -> World:
        """Wait until the workers of exactly these agents have begun in one world since then.

        Raises `TrainingError` after ``timeout`` seconds, or as soon as one of them has ended.
        """
        wanted = sorted(names)

        def found() -> World | None:
            self.read_events()
            for world in self._worlds.values():
                whole = len(world.began) == world.size and min(world.began.values()) > after
                if whole and sorted(world.nodes.values()) == wanted:
                    return world
            for name in wanted:
                if (status := self.agents[name].process.poll()) is not None:
                    raise TrainingError(f"{name} ended with {status}\n{self.log_tails([name])}")
            return None

        return self.await_that(found, f"the workers of {', '.join(wanted)} in one world", timeout)

    def finish(self, name: str, status: int = 0) -> float:
        """Let an agent's workers end by themselves; returns when they did."""
        self.let_end(name, status)
        return self.await_event(name, "end")

    def close(self) -> None:
        super().close()
        # Also those whose agent was killed before they had begun: nobody knows them.
        for name in self.agents:
            self.let_end(name, 1)

    def noted(self, name: str, since: float = 0.0) -> list[str]:
        """What the workers of an agent have noted since then, one after the other."""
        self.read_events()
        return [event.event for event in self.events if event.node == name and event.at >= since]

    def assert_noted(self, name: str, events: list[str], since: float, seconds: float) -> None:
        """For so long an agent's workers must have noted this since then, and no more."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.noted(name, since) == events, f"the workers of {name}"
            time.sleep(0.05)

    def await_event(
        self, name: str, kind: str, timeout: float = 30, *, after: float = 0.0
    ) -> float:
        """Wait until a worker of this agent has noted such an event; returns when the last did.

        Only what it noted later than ``after`` counts.
        """

        def found() -> float | None:
            self.read_events()
            wanted = (name, kind)
            seen = [it.at for it in self.events if (it.node, it.event) == wanted and it.at > after]
            return seen[-1] if seen else None

        return self.await_that(found, f"'{kind}' of a worker of {name}", timeout)

    def await_record(self, name: str, status: Status | None = None) -> None:
        """Wait until an agent's own record is in the store, and has this status."""
        pid = self.agents[name].pid

        def found() -> bool:
            entries = self.client.list(NODES_PREFIX).values()
            records = [NodeRecord.decode(entry.value) for entry in entries]
            return any(
                record.pid == pid and (status is None or record.status is status)
                for record in records
            )

        self.await_that(found, f"the record of {name}", PATIENCE)

    def label(self, name: str) -> str:
        """How the run calls an agent that `start_at` put on its own address."""
        return f"127.0.0.{ord(name) - ord('a') + 1}[{self.agents[name].pid}]"

    def await_cause(self, after: int) -> str:
        """The reason of the first round above ``after``, as soon as the history has it."""

        def found() -> str | None:
            rows = [row for row in self.archive.rows() if row.round > after]
            return rows[0].reason if rows else None

        return self.await_that(found, f"a round above {after} in the history", 30)

    def status(self) -> str:
        """All that `rdzv status` and the dashboard have of the run."""
        seen = Inspection(self.client, self.archive, self.run_id)
        settle([seen])
        return str(seen.report())

    def stored(self) -> list[str]:
        """The keys of the run that the store has."""
        return sorted(self.client.list(""))


Begin = Callable[..., Run]
"""Makes a run; its arguments are `Run`'s after the store."""


@contextmanager
def runs(store: RunningStore, folder: Path, **defaults: object) -> Iterator[Begin]:
    """Makes runs on the store and ends them; no two worlds of a run may have trained at once."""
    made: list[Run] = []

    def make(**options: object) -> Run:
        run = Run(folder / str(len(made)), store, **{**defaults, **options})  # type: ignore[arg-type]
        made.append(run)
        return run

    try:
        yield make
    finally:
        for run in made:
            run.close()
    assert [run.split() for run in made] == [None] * len(made)
