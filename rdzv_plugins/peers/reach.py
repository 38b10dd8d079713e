"""Checks beside a round that has begun whether this node's workers will reach the others.

Nothing waits for the checks or depends on them: they only log a warning.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rdzv_plugins.kv import exhausted, missing_for_workers
from rdzv_plugins.peers.addresses import gloo_address, interface_of
from rdzv_plugins.peers.exchange import dial
from rdzv_plugins.settings.endpoint import is_loopback

_DIAL_SECONDS = 5.0
_STOP_SECONDS = 0.2
# If a round ends at once, its TCPStore is closed already: look again before warning.
_ATTEMPTS, _PAUSE_SECONDS = 2, 1.0
# Seconds between the begin of a round and the look.
_DELAY_SECONDS = 1.0
# At most this many nodes dial rank 0's TCPStore in a second: it has one thread, and workers dial it
# too.
_DIALS_A_SECOND = 200.0


class Reach:
    """Checks each round, in one thread at a time; ``warn`` takes a line for people."""

    def __init__(self, address: str, warn: Callable[[str], None], name: str) -> None:
        self._address = address
        self._warn = warn
        self._name = name
        self._closed = threading.Event()
        self._planned: tuple[float, Callable[[], None]] | None = None
        self._thread: threading.Thread | None = None
        self._looked_at_gloo = False

    def plan(
        self,
        round_: int,
        master: str | None,
        size: int,
        others: Callable[[], bool],
        is_over: Callable[[], bool],
    ) -> None:
        """Have `go_on` check this round a while later, so that the check delays no round.

        Args:
            master: the ``address:port`` to dial; None: not from this node, or not yet.
            size: how many nodes the round has.
            others: whether the round has nodes on other hosts.
            is_over: whether the round has ended.
        """

        def look() -> None:
            try:
                if master is not None:
                    self._look_at_master(round_, master, is_over)
                # gloo_fault may ask a DNS server: once, and only if the round has other hosts.
                if not (self._looked_at_gloo or self._closed.is_set()) and others():
                    fault = gloo_fault(self._address)
                    self._looked_at_gloo = True
                    if fault and missing_for_workers() is None:
                        self._warn(f"round {round_} has several hosts, and {fault}")
            except Exception as error:
                # An exhausted host cannot tell which nodes it reaches.
                if exhausted(error) is None:
                    raise

        due = time.monotonic() + _DELAY_SECONDS + random.uniform(0.0, size / _DIALS_A_SECOND)
        self._planned = (due, look)

    def go_on(self) -> None:
        """Begin the planned check when its time has come; call this repeatedly."""
        if self._planned is None or time.monotonic() < self._planned[0]:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        (_, look), self._planned = self._planned, None
        # If no thread can start now, a later round is checked.
        with suppress(RuntimeError, MemoryError):
            thread = threading.Thread(target=look, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """End the thread, but do not wait for a thread that dials or hangs in a resolver."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)

    def _look_at_master(self, round_: int, master: str, is_over: Callable[[], bool]) -> None:
        for attempt in range(_ATTEMPTS):
            if attempt and self._closed.wait(_PAUSE_SECONDS):
                return
            try:
                dial(master, _DIAL_SECONDS)
                return
            except (OSError, UnicodeError) as error:
                fault = error
        if not (self._closed.is_set() or is_over() or exhausted(fault)):
            self._warn(f"round {round_}: {_told(master, fault)}")


def _told(master: str, error: Exception) -> str:
    address = master.rpartition(":")[0]
    if is_loopback(address):
        return (
            f"MASTER {master} is at loopback, and not on this host ({error}): rank 0 is on another "
            "one, whose address the workers here do not know. There, leave out --local-addr, or "
            "name an address that all hosts reach with it, interface= or network="
        )
    if isinstance(error, socket.gaierror | UnicodeError):
        return (
            f"this host cannot resolve MASTER {master} ({error}): its workers do not find rank 0. "
            "On rank 0's host, leave out --local-addr, or name an IP address with it"
        )
    return (
        f"this host cannot dial MASTER {master} ({error}): its workers do not reach rank 0. If the "
        "hosts share another network, name it with interface=, network= or --local-addr; if a "
        "firewall is in between, let master_port= pass"
    )


def gloo_fault(address: str) -> str:
    """The fault of gloo on several hosts, and its remedy; "": there is none.

    Looks up a name, which may take 2 s.
    """
    found = gloo_address()
    if found is None or not found.is_loopback or is_loopback(address):
        return ""
    name = interface_of(address) or "the interface that the others reach"
    return (
        f"the name of this host, '{socket.gethostname()}', stands for {found}, where gloo's "
        "workers on other hosts do not reach those here: if workers use gloo, set "
        f"GLOO_SOCKET_IFNAME={name}"
    )
