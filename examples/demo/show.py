"""The demonstration: torchrun agents train, one is killed, training continues, another joins."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from examples.demo.agents import Fleet, TrainingError, World
from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.observe.history import Archive, Row
from rdzv_plugins.settings.endpoint import redact
from rdzv_plugins.stores import open_client

__all__ = ["show"]

_INTERVAL, _ATTEMPTS = 1, 3
_STEPS_TO_SEE = 25


def show(endpoint: str, backend: str, agents: int, kill: int) -> int:
    """Run the demonstration; returns an exit status, 0 only if the training continued to its end.

    Args:
        endpoint: as ``--rdzv-endpoint``; "": the agents run a quorum on this host.
        backend: as ``--rdzv-backend``.
        agents: the number of nodes to start; at least 3, so that two are left.
        kill: the rank whose node is killed.
    """
    story = Story(Console())
    if not agents >= 3 or not 0 <= kill < agents:
        story.tell(f"the demonstration needs 3 agents or more and a rank to kill below {agents}")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="rdzv-demo-"))
    went_on = keep_logs = False
    try:
        with _interruptible():
            endpoint = _endpoint(story, backend, endpoint)
            run_id = f"demo-{secrets.token_hex(4)}"
            fleet = Fleet(
                folder,
                backend=backend,
                endpoint=endpoint,
                run_id=run_id,
                nodes=f"2:{agents}",
                config={
                    "keep_alive_interval": _INTERVAL,
                    "keep_alive_max_attempt": _ATTEMPTS,
                    "last_call_timeout": 1,
                    "join_timeout": 60,
                },
                environ={},
                # If this process is killed, the agents must not run forever.
                training={"seconds": 120},
            )
            archive = Archive(partial(open_client, backend, endpoint, job=run_id), run_id, 0)
            with fleet:
                _play(story, fleet, archive, agents, kill)
            went_on = True
    except KeyboardInterrupt:
        story.tell("interrupted; all agents and their workers have ended")
        return 130
    except TrainingError as error:
        keep_logs = True
        story.tell(f"the demonstration failed: {error}")
        story.tell(f"the agents' logs are in {folder}")
    except (
        ValueError,
        RendezvousConnectionError,
        RendezvousStateError,
    ) as error:
        story.tell(f"the demonstration failed: {error}")
    finally:
        if not keep_logs:
            shutil.rmtree(folder, ignore_errors=True)
    if went_on:
        story.print_timeline()
    return 0 if went_on else 1


class Story:
    """Prints messages during the demonstration, and the timeline at its end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._began_by_wall_clock = time.time()
        self._rows: list[tuple[float, str]] = []

    def tell(self, text: str) -> None:
        # No markup: a node's name has brackets.
        elapsed = time.monotonic() - self._began
        self._console.print(
            f"{elapsed:5.1f} s  {text}", markup=False, highlight=False, soft_wrap=True
        )

    def note(self, at: float, text: str) -> None:
        """Add a row to the timeline; ``at`` in monotonic seconds."""
        self._rows.append((at - self._began, text))

    def add_rounds(self, rounds: list[Row], fleet: Fleet) -> None:
        for row in rounds:
            at = datetime.fromisoformat(row.at).timestamp() - self._began_by_wall_clock
            reason = _named(row.reason, fleet)
            members = _named(", ".join(member.name for member in row.members), fleet)
            self._rows.append((at, f"round {row.round} after {row.seconds}: {members} ({reason})"))

    def print_timeline(self) -> None:
        table = Table("after", "what happened", title="What happened", title_justify="left")
        for at, text in sorted(self._rows):
            table.add_row(f"{at:.1f} s", text)
        self._console.print(table, markup=False, highlight=False)


def _play(story: Story, fleet: Fleet, archive: Archive, agents: int, kill: int) -> None:
    names = [f"node-{number}" for number in range(1, agents + 1)]
    story.tell(f"starting {agents} torchrun agents; each first imports torch")
    # As if each had a host of its own.
    address = {name: f"127.0.0.{number}" for number, name in enumerate(names, 1)}
    for name in names:
        story.note(fleet.start(name, address[name]).started, f"{name} started")
    world = fleet.await_world(names)
    _tell_training(story, world)
    fleet.await_step(world, world.resumed + _STEPS_TO_SEE)

    victim = world.nodes[kill]
    killed = fleet.agents[victim].kill()
    fleet.read_events()
    reached = world.last_step
    story.note(killed, f"{victim} (rank {kill}) killed at step {reached}")
    story.tell(
        f"killed {victim} (rank {kill}), agent and worker, with kill -9 at step {reached}; "
        f"its lease is {_INTERVAL * _ATTEMPTS} s"
    )
    names.remove(victim)
    world = fleet.await_world(names, after=killed)
    _tell_training(story, world, killed)
    if not 0 < world.resumed <= reached:
        raise TrainingError(f"training resumed at step {world.resumed + 1}, not at its checkpoint")
    fleet.await_step(world, world.resumed + _STEPS_TO_SEE)

    replacement = f"node-{agents + 1}"
    story.tell(f"starting {replacement} in its place")
    started = fleet.start(replacement, address[victim]).started
    story.note(started, f"{replacement} started")
    names.append(replacement)
    world = fleet.await_world(names, after=started)
    _tell_training(story, world, started)
    fleet.await_step(world, world.resumed + _STEPS_TO_SEE)

    # Now: a quorum ends with its agents.
    story.add_rounds(archive.rows(), fleet)
    story.tell(f"ending the training at step {world.last_step}")
    fleet.stop_training()
    statuses = fleet.await_ends(names)
    if any(statuses.values()):
        raise TrainingError(f"agents ended with errors: {statuses}\n{fleet.log_tails(statuses)}")
    ended = "all agents ended with status 0"
    story.note(time.monotonic(), ended)
    story.tell(ended)


def _tell_training(story: Story, world: World, since: float | None = None) -> None:
    trains = max(world.stepped.values())
    ranks = ", ".join(f"{world.nodes[rank]} is rank {rank}" for rank in sorted(world.nodes))
    told = f"{world.size} nodes train: {ranks}"
    noted = f"{world.size} nodes train"
    if world.resumed:
        told += f"; they continued from the checkpoint of step {world.resumed}"
        noted += f" from step {world.resumed} on"
    if since is not None:
        told += f", {trains - since:.1f} s later"
    story.note(trains, noted)
    story.tell(f"{told}; loss {world.loss:.4f}")


def _endpoint(story: Story, backend: str, endpoint: str) -> str:
    """Where the store is; without one of the user's the agents run it themselves."""
    if endpoint:
        story.tell(f"using {backend} at {redact(endpoint)}")
        return endpoint
    if not {"RDZV_PLUGINS_SECRET", "RDZV_PLUGINS_SECRET_FILE"} & os.environ.keys():
        # Any account of this host reaches the store: none joins.
        os.environ["RDZV_PLUGINS_SECRET"] = secrets.token_hex(16)
    endpoint = "127.0.0.1,127.0.0.2,127.0.0.3"
    story.tell(f"no server: the agents at {endpoint} run the store themselves")
    return endpoint


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end this process, its agents and its server as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _named(text: str, fleet: Fleet) -> str:
    """The text with the agents' names instead of the run's node names, ``address[process id]``."""
    for agent in fleet.agents.values():
        text = re.sub(rf"127\.0\.0\.\d+\[{agent.pid}\]", agent.name, text)
    return text
