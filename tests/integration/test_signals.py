"""A signal at each point of an agent's life: announced at once, and the process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    Phase,
    RoundDocument,
)
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background
from tests.integration.forked import Forked
from tests.integration.signalled import CASES, RAISED, make
from tests.integration.stores import KINDS, RunningStore, started
from tests.servers.process import ServerProcess

ANNOUNCED = {
    "joining SIGTERM": RAISED,
    "joining SIGHUP": RAISED,
    "joining SIGINT": -2,
    "roles SIGTERM": RAISED,
    "released SIGTERM": RAISED,
    "saving SIGTERM": RAISED,
    "joining SIGUSR1": RAISED,
    "handled SIGUSR1": RAISED,
    "unpolled SIGTERM": RAISED,
    "own SIGTERM": 7,
    "thread SIGTERM": RAISED,
    "forking SIGTERM": RAISED,
}
# Another signal comes while the last word waits for the store.
TWICE = "released away 0.1+SIGTERM 0.7+SIGTERM 0.7+back"
CLOSING = "ending away 1+SIGTERM 1+back"
AWAY = "released away 0.1+SIGTERM"
BARRIER = "barrier SIGTERM"


@dataclass(frozen=True)
class Ending:
    """What became of an agent.

    Attributes:
        status: of its process; None: that has not ended.
        seconds: from the first signal until its process had ended.
        announced: seconds from the first signal until its record said so; None: it did not.
    """

    status: int | None
    seconds: float
    announced: float | None
    record: str | None
    phase: Phase | None


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    kind = next(kind for kind in KINDS if kind.name == "redis")
    with started(kind) as store:
        yield store


@pytest.fixture
def play(store: RunningStore, run_id: str, tmp_path: Path) -> Callable[[str], Ending]:
    """Plays a case: how the agent lives, then signals, each with the seconds before it.

    ``away`` and ``back`` are of the store.
    """
    return lambda case: ending(store, run_id, case, tmp_path / "log")


def ending(store: RunningStore, run_id: str, case: str, log: Path) -> Ending:
    life, *steps = case.split()
    environ = dict(os.environ)
    if "SIGUSR1" in steps:
        # As torch's launcher does.
        environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGUSR1"
    program = [sys.executable, "-m", "tests.integration.signalled", store.endpoint, run_id, life]
    with contextlib.ExitStack() as stack:
        agent = Forked(program, environ, log)
        stack.callback(agent.send_signal, signal.SIGKILL)
        client = stack.enter_context(contextlib.closing(store.open(run_id)))
        if life == "barrier":
            peer = make(store.endpoint, run_id, CASES[life][1])
            stack.callback(peer.shutdown)
            Background(peer.next_rendezvous)
        assert until(lambda: f"{agent.pid} at {life}" in log.read_text(), 60), log.read_text()
        assert store.server is not None
        stack.callback(store.server.nodes[0].resume)
        began = take(steps, store.server.nodes[0], agent)
        announced = None
        while agent.poll() is None and time.monotonic() < began + 40:
            if "away" not in steps and announced is None and status(client, agent) == "left":
                announced = time.monotonic() - began
            time.sleep(0.02)
        seconds = time.monotonic() - began
        store.server.nodes[0].resume()
        entry = client.get(STATE_KEY)
        phase = RoundDocument.decode(entry.value).phase if entry else None
        return Ending(agent.poll(), seconds, announced, status(client, agent), phase)


def take(steps: list[str], server: ServerProcess, agent: Forked) -> float:
    """Take the steps of a case; returns the time of the first signal to the agent."""
    signals = []
    for step in steps:
        seconds, _, what = step.rpartition("+")
        time.sleep(float(seconds or 0))
        if what in ("away", "back"):
            (server.pause if what == "away" else server.resume)()
        else:
            signals.append(time.monotonic())
            agent.send_signal(getattr(signal, what))
    return signals[0]


def status(client: KeyValueClient, agent: Forked) -> str | None:
    records = (NodeRecord.decode(entry.value) for entry in client.list(NODES_PREFIX).values())
    return next((str(it.status.value) for it in records if it.pid == agent.pid), None)


@pytest.mark.parametrize("case", ANNOUNCED)
def test_the_leave_is_announced_at_once(play: Callable[[str], Ending], case: str) -> None:
    became = play(case)
    assert (became.status, became.record) == (ANNOUNCED[case], "left")
    assert became.announced is not None
    # Far below the 4 s that one of them takes to save.
    assert became.announced < 1.5


def test_a_second_signal_does_not_cut_the_farewell_short(play: Callable[[str], Ending]) -> None:
    became = play(TWICE)
    assert (became.status, became.record) == (RAISED, "left")


def test_a_signal_does_not_cut_the_closing_short(play: Callable[[str], Ending]) -> None:
    became = play(CLOSING)
    assert (became.status, became.phase) == (RAISED, "closed")


def test_without_a_store_the_process_ends_all_the_same(play: Callable[[str], Ending]) -> None:
    became = play(AWAY)
    assert became.status == RAISED
    assert became.seconds < 15


def test_one_that_is_done_stays_done(play: Callable[[str], Ending]) -> None:
    became = play(BARRIER)
    assert (became.status, became.record) == (RAISED, "done")
