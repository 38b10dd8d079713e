"""A signal at each point of an agent's life: announced at once, and the process ends.

Run as a program with an endpoint of Redis, a run id and the name of a case, it is such an agent,
and prints a line when the signal may come. It plays torch's agent: its handlers of signals are
torch's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as torchs
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler
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
from tests.integration.stores import RunningStore, kind_of, started
from tests.servers.process import ServerProcess

# A lease of a minute: what is seen earlier was announced.
CONFIG = {"keep_alive_interval": 20, "join_timeout": 60, "last_call_timeout": 0}
SAVING = 4.0
# The exit status of a process that torch's handler of signals ends, by an exception.
RAISED = 1


def make(endpoint: str, run_id: str, nodes: int) -> StoreRendezvousHandler:
    params = RendezvousParameters(
        "redis", endpoint, run_id, nodes, nodes, local_addr="127.0.0.1", **CONFIG
    )
    handler = create_handler("redis", params)
    assert isinstance(handler, StoreRendezvousHandler)
    return handler


def install_torchs_handlers() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, torchs._terminate_process_handler)


def begin(case: str) -> None:
    """The test waits for this line, and then sends the signal."""
    os.write(1, b"%d at %s\n" % (os.getpid(), case.encode()))


def await_the_signal() -> None:
    # In short sleeps: a signal that comes just before a sleep begins is handled after it.
    for _ in range(1200):
        time.sleep(0.05)


def poll(handler: StoreRendezvousHandler, case: str) -> NoReturn:
    install_torchs_handlers()
    handler.num_nodes_waiting()
    begin(case)
    while True:
        handler.num_nodes_waiting()
        time.sleep(0.05)


def handled(handler: StoreRendezvousHandler) -> None:
    """As with ``--signals-to-handle=SIGUSR1``: the agent stops its workers, which save."""
    handler.next_rendezvous()
    signal.signal(signal.SIGUSR1, torchs._terminate_process_handler)
    try:
        handler.num_nodes_waiting()
        begin("handled")
        await_the_signal()
    except SignalException:
        time.sleep(SAVING)
        raise


def joining(handler: StoreRendezvousHandler) -> None:
    def once_it_asks() -> None:
        if until(lambda: handler._node.record.at > 0, 60):
            begin("joining")

    threading.Thread(target=once_it_asks, daemon=True).start()
    handler.next_rendezvous()


def exchanging_roles(handler: StoreRendezvousHandler) -> None:
    info = handler.next_rendezvous()
    begin("roles")
    info.store.get("torchelastic/role_info/7")


def released(handler: StoreRendezvousHandler) -> None:
    handler.next_rendezvous()
    install_torchs_handlers()
    begin("released")
    await_the_signal()


def saving(handler: StoreRendezvousHandler) -> None:
    handler.next_rendezvous()
    try:
        poll(handler, "saving")
    except SignalException:
        time.sleep(SAVING)
        raise


def saving_at_once(handler: StoreRendezvousHandler) -> None:
    """The signal comes before the agent's first look at its workers, an interval after start."""
    handler.next_rendezvous()
    install_torchs_handlers()
    try:
        begin("unpolled")
        await_the_signal()
    except SignalException:
        time.sleep(SAVING)
        raise


def ending(handler: StoreRendezvousHandler) -> None:
    handler.next_rendezvous()
    install_torchs_handlers()
    handler.num_nodes_waiting()
    begin("ending")
    time.sleep(2)  # The store goes away meanwhile.
    handler.shutdown()


def in_the_exit_barrier(handler: StoreRendezvousHandler) -> None:
    info = handler.next_rendezvous()
    install_torchs_handlers()
    handler.num_nodes_waiting()
    info.store.add("torchelastic/agent/terminal_state/num_members", 1)
    begin("barrier")
    info.store.wait(["torchelastic/agent/terminal_state/last_member"], timedelta(seconds=60))


def with_a_handler_of_its_own(handler: StoreRendezvousHandler) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    handler.next_rendezvous()
    handler.num_nodes_waiting()
    begin("own")
    await_the_signal()


def joining_in_a_thread(handler: StoreRendezvousHandler) -> None:
    Background(handler.next_rendezvous).result(30)
    handler.num_nodes_waiting()
    begin("thread")
    await_the_signal()


def forking(handler: StoreRendezvousHandler) -> None:
    """Its children end in every way; then it gets the signal itself."""
    handler.next_rendezvous()
    install_torchs_handlers()
    handler.num_nodes_waiting()

    def wait_for_the_signal() -> None:
        os.write(ready, b"x")
        await_the_signal()

    lives: list[Callable[[], object]] = [
        sys.exit,
        handler.shutdown,
        handler.num_nodes_waiting,
        wait_for_the_signal,
    ]
    for life in lives:
        read, ready = os.pipe()
        child = os.fork()
        if child == 0:
            life()
            sys.exit(0)
        if life is wait_for_the_signal:
            os.read(read, 1)  # What comes before the child is ready, Python forgets.
            os.kill(child, signal.SIGTERM)
        ended = Background(lambda child=child: os.waitpid(child, 0)[1])  # type: ignore[misc]
        status = os.waitstatus_to_exitcode(ended.result(60))
        assert status == (RAISED if life is wait_for_the_signal else 0), status
    assert handler._client.get(NODES_PREFIX + handler._node.id) is not None
    record = handler._node.record
    assert (record.status, handler._ended) == ("run", False)
    poll(handler, "forking")


CASES: dict[str, tuple[Callable[[StoreRendezvousHandler], None], int]] = {
    # How it lives until the signal comes, and nodes in its round.
    "joining": (joining, 2),
    "roles": (exchanging_roles, 1),
    "released": (released, 1),
    "saving": (saving, 1),
    "handled": (handled, 1),
    "unpolled": (saving_at_once, 1),
    "ending": (ending, 1),
    "barrier": (in_the_exit_barrier, 2),
    "own": (with_a_handler_of_its_own, 1),
    "thread": (joining_in_a_thread, 1),
    "forking": (forking, 1),
}


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
CLOSING = "ending away 3+SIGTERM 1+back"
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
    kind = kind_of("redis")
    with started(kind) as store:
        yield store


@pytest.fixture
def play(store: RunningStore, run_id: str, tmp_path: Path) -> Callable[[str], Ending]:
    """Plays a case: how the agent lives, then signals, each with the seconds before it.

    ``away`` and ``back`` are of the store.
    """
    return lambda case: end(store, run_id, case, tmp_path / "log")


def end(store: RunningStore, run_id: str, case: str, log: Path) -> Ending:
    life, *steps = case.split()
    environ = dict(os.environ)
    if "SIGUSR1" in steps:
        # As torch's launcher does.
        environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGUSR1"
    program = [sys.executable, "-m", "tests.integration.test_signals", store.endpoint, run_id, life]
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
        if "away" not in steps and announced is None and status(client, agent) == "left":
            announced = seconds
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
    # Before the 4 s that one of them takes to save, and far below the lease.
    assert became.announced < SAVING


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


def test_a_node_that_is_done_stays_done(play: Callable[[str], Ending]) -> None:
    became = play(BARRIER)
    assert (became.status, became.record) == (RAISED, "done")


if __name__ == "__main__":
    # A shell that runs the tests in the background lets them ignore it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    endpoint, run_id, case = sys.argv[1:]
    lives, nodes = CASES[case]
    lives(make(endpoint, run_id, nodes))
