"""Start, watch and kill torchrun agents as processes of this host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

__all__ = ["RDZV_RUN", "TORCHRUN", "Agent", "Event", "Fleet", "Process", "TrainingError", "World"]

# torchrun's default of --rdzv-id.
_DEFAULT_RUN_ID = "none"

T = TypeVar("T")

TORCHRUN = ("-m", "torch.distributed.run")
RDZV_RUN = ("-m", "rdzv_plugins.cli", "run")


class TrainingError(RuntimeError):
    """The training did not reach an awaited state in time."""


@dataclass(frozen=True, slots=True)
class Event:
    """A line of a worker's journal, as `tests.fleet.train` writes it.

    Attributes:
        event: ``begin``, ``resume``, ``step`` or ``end``.
        at: seconds of this host's monotonic clock.
        node: the name of its agent; ``agent`` is that agent's process id.
        master: MASTER_ADDR:MASTER_PORT, which identifies the world.
        step: the training's step that was taken, or after which it resumes.
    """

    event: str
    at: float
    node: str
    pid: int
    agent: int
    rank: int
    world_size: int
    master: str
    step: int = 0
    loss: float | None = None


@dataclass(slots=True)
class World:
    """The workers with the same MASTER_ADDR:MASTER_PORT, by rank.

    Attributes:
        began: when each of them began, before it imported torch; monotonic seconds.
        stepped: when each of them took its first step.
    """

    master: str
    size: int
    nodes: dict[int, str] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    stepped: dict[int, float] = field(default_factory=dict)
    last_step_at: float = 0.0
    resumed: int = 0
    last_step: int = 0
    loss: float | None = None
    ended: set[int] = field(default_factory=set)

    @property
    def trains(self) -> bool:
        """Whether every rank has taken a step."""
        return len(self.stepped) == self.size

    def note(self, event: Event) -> None:
        self.nodes[event.rank] = event.node
        self.pids[event.rank] = event.pid
        if event.event == "begin":
            self.began[event.rank] = event.at
        elif event.event == "resume":
            self.resumed = event.step
        elif event.event == "step":
            self.stepped.setdefault(event.rank, event.at)
            self.last_step_at = max(self.last_step_at, event.at)
            if event.step >= self.last_step:
                self.last_step, self.loss = event.step, event.loss
        elif event.event == "end":
            self.ended.add(event.rank)


class Process(Protocol):
    """The process of an agent, as `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int) -> None: ...


class Agent:
    """One torchrun: its process, and its workers as far as they have written events."""

    def __init__(self, name: str, fleet: Fleet, process: Process) -> None:
        self.name = name
        self.started = time.monotonic()
        self.process = process
        self._fleet = fleet

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> Path:
        return self._fleet.folder / f"{self.name}.log"

    def workers(self) -> list[int]:
        """Process ids of its live workers."""
        self._fleet.read_events()
        pids = {event.pid for event in self._fleet.events if event.agent == self.pid}
        return [pid for pid in sorted(pids) if _alive(pid)]

    def signal(self, number: int, *, workers: bool = False) -> float:
        """Send a signal to the agent, with ``workers`` also to them; returns the time of it."""
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        if workers:
            self.signal_workers(number)
        return at

    def signal_workers(self, number: int) -> float:
        """Send a signal to the workers only; returns the time of it."""
        at = time.monotonic()
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return at

    def kill(self) -> float:
        """``kill -9`` agent and workers, as if the host lost power; returns the time of it."""
        # The agent first: otherwise it would report its worker's end to the other nodes.
        at = self.signal(signal.SIGKILL, workers=True)
        self.process.wait()
        return at


class Fleet:
    """The agents of one run and their training; a context manager that leaves no process behind.

    Args:
        folder: for the checkpoint, the events and the agents' logs.
        backend, endpoint, config, environ: of the store, as torchrun takes them.
        run_id: as ``--rdzv-id``; torchrun's default is not passed.
        nodes: as ``--nnodes``, such as "2:3".
        max_restarts: as ``--max-restarts``; None: not given.
        script: what the workers run; it writes a journal as `tests.fleet.train` does.
        training: the script's options.
        launcher: Python's arguments that run torchrun, such as `RDZV_RUN`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        backend: str,
        endpoint: str,
        run_id: str,
        nodes: str,
        config: Mapping[str, object],
        environ: Mapping[str, str],
        max_restarts: int | None = 3,
        script: Sequence[str] = ("--module", "tests.fleet.train"),
        training: Mapping[str, object] | None = None,
        launcher: Sequence[str] = TORCHRUN,
    ) -> None:
        self.folder = folder
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.agents: dict[str, Agent] = {}
        self.events: list[Event] = []
        self._nodes = nodes
        self._config = dict(config)
        self._environ = dict(environ)
        self._max_restarts = max_restarts
        self._script = tuple(script)
        self._training = dict(training or {})
        self._launcher = list(launcher)
        self._offsets: dict[Path, int] = {}
        self._worlds: dict[str, World] = {}

    def start(
        self,
        name: str,
        address: str | None = "127.0.0.1",
        config: Mapping[str, object] | None = None,
        training: Mapping[str, object] | None = None,
        *,
        within: Sequence[str] = (),
        endpoint: str | None = None,
    ) -> Agent:
        """Start an agent; its log gets the output of the agent and of its workers.

        Args:
            address: as ``--local-addr``; None: not given.
            config, training: this agent's own, on top of the fleet's.
            within: the command that becomes the agent, where it runs on another host.
            endpoint: this agent's own; None: the fleet's.
        """
        options = {**self._config, **(config or {})}
        command = [*within, sys.executable, *self._launcher]
        command += [f"--nnodes={self._nodes}", "--nproc-per-node=1"]
        command += [f"--rdzv-backend={self.backend}"]
        command += [f"--rdzv-endpoint={endpoint or self.endpoint}"]
        if self.run_id != _DEFAULT_RUN_ID:
            command += [f"--rdzv-id={self.run_id}"]
        if address is not None:
            command += [f"--local-addr={address}"]
        command += [f"--rdzv-conf={','.join(f'{key}={value}' for key, value in options.items())}"]
        if self._max_restarts is not None:
            command += [f"--max-restarts={self._max_restarts}"]
        command += [*self._script, "--folder", str(self.folder), "--name", name]
        command += [
            f"--{key}={value}" for key, value in {**self._training, **(training or {})}.items()
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, **_surroundings(), **self._environ}
        process = self._process(command, environ, self.folder / f"{name}.log")
        agent = self.agents[name] = Agent(name, self, process)
        return agent

    def _process(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Process:
        with log.open("ab") as file:
            # A separate session: Ctrl-C reaches only this process, which then stops the agents.
            return subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def stop_training(self) -> None:
        """Let the workers end after the current step, like a training that is done."""
        (self.folder / "stop").touch()

    def read_events(self) -> None:
        """Read the events that the workers have written since the last call."""
        fresh: list[Event] = []
        for path in sorted((self.folder / "events").glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            # The next call reads a line that is still being written.
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            fresh += [Event(**json.loads(line)) for line in whole.splitlines()]
        for event in sorted(fresh, key=lambda event: event.at):
            self.events.append(event)
            known = self._worlds.get(event.master)
            # In many rounds a port comes again.
            if known is None or (event.event == "begin" and event.rank in known.began):
                self._worlds[event.master] = World(event.master, event.world_size)
            self._worlds[event.master].note(event)

    def worlds(self) -> list[World]:
        """The worlds that have taken a step, ordered by the time of their first."""
        self.read_events()
        stepped = [world for world in self._worlds.values() if world.stepped]
        return sorted(stepped, key=lambda world: min(world.stepped.values()))

    def split(self) -> str | None:
        """Describes two worlds that trained at the same time; None: there are no such two."""
        worlds = self.worlds()
        for older, newer in pairwise(worlds):
            early = older.last_step_at - min(newer.stepped.values())
            if early > 0:
                return (
                    f"the world of {older.master} ({', '.join(older.nodes.values())}) still took "
                    f"a step {early:.3f} s after the first step of the world of {newer.master} "
                    f"({', '.join(newer.nodes.values())})"
                )
        return None

    def await_world(
        self,
        names: Iterable[str],
        *,
        after: float = 0.0,
        timeout: float = 60.0,
        by_rank: bool = False,
    ) -> World:
        """Wait until exactly these agents train in one world that has taken steps since ``after``.

        With ``by_rank`` also in this rank order. Raises `TrainingError` after ``timeout`` seconds,
        or as soon as one of them has ended.
        """
        wanted = list(names)

        def found() -> World | None:
            for world in reversed(self.worlds()):
                members = [world.nodes[rank] for rank in sorted(world.nodes)]
                same = members == wanted if by_rank else sorted(members) == sorted(wanted)
                if same and world.trains and world.last_step_at > after:
                    return world
            for name in wanted:
                if (status := self.agents[name].process.poll()) is not None:
                    raise TrainingError(f"{name} ended with {status}\n{self.log_tails([name])}")
            return None

        return self.await_that(found, f"{', '.join(wanted)} in one world", timeout)

    def await_step(self, world: World, step: int, timeout: float = 60.0) -> None:
        """Wait until this world has taken this step; raises `TrainingError`."""

        def found() -> bool:
            self.read_events()
            return world.last_step >= step

        self.await_that(found, f"step {step} in the world of {world.master}", timeout)

    def await_ends(self, names: Iterable[str], timeout: float = 60.0) -> dict[str, int]:
        """Wait until these agents have ended; their exit statuses. Raises `TrainingError`."""
        wanted = list(names)

        def found() -> dict[str, int] | None:
            statuses = {name: self.agents[name].process.poll() for name in wanted}
            ended = {name: status for name, status in statuses.items() if status is not None}
            return ended if len(ended) == len(wanted) else None

        return self.await_that(found, f"the end of {', '.join(wanted)}", timeout)

    def await_that(self, question: Callable[[], T | None], what: str, timeout: float) -> T:
        """Ask ``question`` until it is true; raises `TrainingError` with the ends of the logs."""
        began = time.monotonic()
        deadline = began + timeout
        while not (answer := question()):
            now = time.monotonic()
            if now > deadline:
                raise TrainingError(
                    f"waited more than {timeout:g} s for {what}\n{self.log_tails(self.agents)}"
                )
            # As `rdzv_plugins.testing.harness.until`, whose package imports torch.
            time.sleep(min(max(0.02, 2 * (now - began)), 0.5))
            began = time.monotonic()
        return answer

    def log_tails(self, names: Iterable[str], lines: int = 25) -> str:
        """The last lines of these agents' logs."""
        parts = []
        for name in names:
            log = self.agents[name].log
            tail = log.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {log}", *tail]))
        return "\n".join(parts)

    def close(self) -> None:
        """Stop all agents, kill those that do not end, and kill all their workers."""
        for agent in self.agents.values():
            # A suspended process does not handle SIGTERM.
            agent.signal(signal.SIGCONT, workers=True)
            agent.signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        for agent in self.agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(max(0.0, deadline - time.monotonic()))
            agent.kill()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _surroundings() -> dict[str, str]:
    """The environment in which several torchruns on one host behave like those on several hosts."""
    # The workers import this package from the checkout.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    # Otherwise gloo listens on the address of the host's name, if the name resolves.
    if "GLOO_SOCKET_IFNAME" not in os.environ and "lo" in dict(socket.if_nameindex()).values():
        own["GLOO_SOCKET_IFNAME"] = "lo"
    return own


def _alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # Gone meanwhile, or a system without /proc.
        return not Path("/proc/self").exists()
