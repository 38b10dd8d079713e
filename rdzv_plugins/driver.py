"""Carries out a node's requests on a store, in one background thread. It decides nothing."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from rdzv_plugins import history, steps
from rdzv_plugins.documents import BELL_KEY, NODES_PREFIX, STORE_PREFIX
from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.node import Node

__all__ = ["Driver", "carry_out", "perform"]

log = logging.getLogger(__name__)

# After an error that nobody foresaw the node starts over; not in a busy loop.
_PAUSE_AFTER_A_BUG = 1.0


class Driver:
    """The thread that lives a node's life.

    Args:
        node: whose requests are carried out.
        client: the run's namespace; the driver does not close it.
        open_master: opens a TCPStore and returns its ``address:port``; raises what it raises.
        name: of the thread.
    """

    def __init__(
        self, node: Node, client: KeyValueClient, open_master: Callable[[], str], name: str
    ) -> None:
        self._node = node
        self._client = client
        self._open_master = open_master
        self._name = name
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._nudged = threading.Event()
        self._delivered = threading.Condition()
        self._outcome: steps.Outcome | None = None
        self._outage_since: float | None = None
        self._told: str | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> steps.Outcome:
        """Order a join and wait for its outcome, which is empty if `stop` came first.

        One caller at a time. It only waits: torch raises an exception in it at a signal, which a
        store's client might swallow.
        """
        self._outcome = None
        self._node.order_join()
        if not self.running:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._live, name=self._name, daemon=True)
            self._thread.start()
        else:
            self._nudge_until(lambda: not self._node.join_ordered, time.monotonic() + 5)
        with self._delivered:
            self._delivered.wait_for(lambda: self._outcome or self._stopping.is_set())
        return self._outcome or steps.Outcome()

    def stop(self, seconds: float) -> None:
        """End the thread; after ``seconds`` it is left to end by itself."""
        self._stopping.set()
        with self._delivered:
            self._delivered.notify_all()
        self._nudge_until(lambda: not self.running, time.monotonic() + seconds)

    def _nudge_until(self, done: Callable[[], bool], deadline: float) -> None:
        # An interrupt may come just before the thread parks, and then wakes nobody: repeat it.
        pause = 0.001
        while not done() and time.monotonic() < deadline:
            self._nudged.set()
            self._client.interrupt()
            if self._thread is not None:
                self._thread.join(pause) if self._stopping.is_set() else time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _live(self) -> None:
        while not self._stopping.is_set():
            try:
                self._drive(self._node.run())
            except Exception as error:
                log.exception("the rendezvous of this node met an unforeseen error; it starts over")
                self._deliver(steps.Outcome(error=error))
                self._stopping.wait(_PAUSE_AFTER_A_BUG)

    def _drive(self, life: steps.Steps) -> None:
        request = next(life)
        while not self._stopping.is_set():
            try:
                answer = self._perform(request)
            except (RendezvousConnectionError, RendezvousStateError) as error:
                request = life.throw(error)
            else:
                self._note_success(request)
                request = life.send(answer)

    def _perform(self, request: steps.Request) -> Any:
        match request:
            case steps.Deliver(outcome):
                return self._deliver(outcome)
            case steps.OpenMaster():
                return self._open_master()
            case steps.Rest(seconds, because):
                if because is not None:
                    self._note_failure(because)
                self._nudged.clear()
                self._nudged.wait(seconds)
                return None
        return perform(self._client, request)

    def _deliver(self, outcome: steps.Outcome) -> None:
        with self._delivered:
            self._outcome = outcome
            self._delivered.notify_all()

    def _note_failure(self, error: Exception) -> None:
        """Say once what fails, however often it does."""
        if isinstance(error, RendezvousStateError):
            # The store answers; what it holds, or this host, is at fault.
            if str(error) != self._told:
                log.error("%s", error)
            self._told = str(error)
        elif self._outage_since is None:
            self._outage_since = time.monotonic()
            log.warning("%s -- what runs goes on, and this node keeps trying", error)

    def _note_success(self, request: steps.Request) -> None:
        if self._outage_since is None or isinstance(request, steps.Rest | steps.Deliver):
            return
        log.warning("the store is back after %.1f s", time.monotonic() - self._outage_since)
        self._outage_since = None


def perform(client: KeyValueClient, request: steps.Request) -> Any:
    """One request, one call on the store: the only place that knows both sides."""
    match request:
        case steps.Park(key, version, seconds):
            return client.wait(key, version, seconds)
        case steps.PutRecord(node, record, ring):
            values = {NODES_PREFIX + node: record.encode()}
            if ring:
                values[BELL_KEY] = f"{node} {record.beat}".encode()
            return client.put_many(values)
        case steps.Ring(node):
            return client.put(BELL_KEY, f"{node} {time.monotonic_ns()}".encode())
        case steps.Read(key):
            return client.get(key)
        case steps.CompareAndSet(key, value, expected):
            return client.compare_and_set(key, value, expected)
        case steps.List(prefix):
            return client.list(prefix)
        case steps.Drop(keys):
            return client.delete_many(keys)
        case steps.DropStores(before):
            return client.delete_many(_stores(client, before))
        case steps.Chronicle(document, seconds, members):
            return history.append(client, document, seconds, members)
    raise TypeError(f"{request!r} is not for a store")


def carry_out(client: KeyValueClient, work: steps.Steps) -> None:
    """Drive ``work`` to its end in the calling thread; raises what a request raises."""
    answer: Any = None
    with contextlib.suppress(StopIteration):
        while True:
            answer = perform(client, work.send(answer))


def _stores(client: KeyValueClient, before: int) -> list[str]:
    """The keys of the c10d stores of rounds below ``before``."""
    keys = []
    for key in client.list(STORE_PREFIX):
        number = key.removeprefix(STORE_PREFIX).partition("/")[0]
        if number.isdecimal() and int(number) < before:
            keys.append(key)
    return keys
