"""Jobs of real torchrun agents whose workers do as the test says, and import no torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from rdzv_plugins.observe.inspection import Inspection, settle
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord, Status
from tests.fleet.agents import TrainingError, World
from tests.integration.stores import RunningStore
from tests.integration.torchrun import PATIENCE, Run

__all__ = ["Job"]

_WORKER = Path(__file__).with_name("worker.py")


class Job(Run):
    """A fleet of agents that run `tests.integration.worker`, or another script of its kind.

    One letter a name, as in `Run`: "a" is on 127.0.0.1, and comes first in rank order.
    """

    def __init__(
        self, folder: Path, store: RunningStore, script: object = _WORKER, **options: object
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
