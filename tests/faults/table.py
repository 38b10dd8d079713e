"""The faults of an hour on real servers: one row each. docs/faults.md is generated from them.

A fault is a context manager: it begins the fault, and ends it when the context ends.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.faults.site import HERE, LEASE, Site
from tests.faults.wire import EVERYBODY, Weather, Wire

__all__ = ["FAULTS", "Fault", "Plan", "draw"]

STORES = ("redis", "quorum")
Strike = Callable[[Site, tuple[str, ...]], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row.

    Attributes:
        name: what happens, and to whom.
        strikes: how many nodes it strikes; 0: the store.
        seconds: the shortest and the longest time that it lasts.
        begin: begins it at these addresses.
        names: what the cause of a restart names, one of them; ``{host}`` is a target's address.
        restarts, kills: as of `checks.Episode`.
        within: seconds from its end until all nodes train in one world again.
        two_worlds: as of `checks.Episode`.
        stores: where it can be.
    """

    name: str
    strikes: int
    seconds: tuple[float, float]
    begin: Strike
    names: tuple[str, ...] = ()
    restarts: bool = True
    kills: bool = False
    within: float = 60.0
    two_worlds: float | None = None
    stores: tuple[str, ...] = STORES


@contextmanager
def kill(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """SIGKILL; a launcher starts the agent again."""
    for address in targets:
        site.signal(address, signal.SIGKILL)
    yield


@contextmanager
def terminate(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """SIGTERM, as a platform preempts."""
    for address in targets:
        site.signal(address, signal.SIGTERM)
    yield


@contextmanager
def suspend(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """SIGSTOP of the agent alone; its worker runs on."""
    for address in targets:
        site.signal(address, signal.SIGSTOP)
    try:
        yield
    finally:
        for address in targets:
            site.signal(address, signal.SIGCONT)


@contextmanager
def crash_worker(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """SIGKILL of the worker alone."""
    for address in targets:
        for pid in site.workers(address):
            site.kill(pid)
    yield


@contextmanager
def unplug(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """The cable is pulled out."""
    for address in targets:
        site.hosts[address].cut()
    try:
        yield
    finally:
        for address in targets:
            site.hosts[address].mend()


def weather(
    site: Site, targets: tuple[str, ...], *, delay: float = 0.0, loss: float = 0.0,
    largest: int = 0, mute: str = "", deaf: str = "",
) -> AbstractContextManager[object]:  # fmt: skip
    """Disturb the first target's cable; ``mute`` and ``deaf`` are "all", "store" or "peer"."""
    who = {
        "": frozenset[str](),
        "all": EVERYBODY,
        "store": frozenset({HERE} if site.server is not None else site.addresses[:3]),
        "peer": frozenset(targets[1:]),
    }
    sky = Weather(delay=delay, loss=loss, largest=largest, mute=who[mute], deaf=who[deaf])
    return Wire(site.hosts[targets[0]], sky, seed=site.seed)


@contextmanager
def kill_host(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """SIGKILL of all that runs there, as if it lost its power; it is back after the fault."""
    for address in targets:
        for pid in site.processes(address):
            site.kill(pid)
    yield


@contextmanager
def stall_server(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """SIGSTOP: connections stay open, and nobody answers."""
    node = site.node
    node.pause()
    try:
        yield
    finally:
        node.resume()


@contextmanager
def restart_server(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """It is stopped, and saves its data."""
    site.node.stop()
    try:
        yield
    finally:
        site.node.start()


@contextmanager
def empty_server(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """SIGKILL, and a start without any data."""
    site.node.kill()
    try:
        yield
    finally:
        site.node.start(empty=True)


@contextmanager
def lose_writes(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """It falls back on what it had saved before, as a replica does that lagged."""
    site.redis("SAVE")
    try:
        yield
    finally:
        site.node.kill()
        site.node.start()


@contextmanager
def lose_a_round(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """The same, and a node was killed meanwhile."""
    with lose_writes(site, targets), kill(site, targets):
        yield


@contextmanager
def cut_clients(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """It ends all connections."""
    site.redis("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    site.redis("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")
    yield


@contextmanager
def lack_memory(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """maxmemory is reached: every write is refused."""
    site.redis("CONFIG", "SET", "maxmemory", "1")
    try:
        yield
    finally:
        site.redis("CONFIG", "SET", "maxmemory", "0")


@contextmanager
def fill_disk(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """It can save nothing, and refuses every write for that."""
    ballast = site.disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    site.save_in_background()
    try:
        yield
    finally:
        ballast.unlink()
        site.save_in_background()


@contextmanager
def rotate_password(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """A new one in the nodes' files; then the old one ends, and all connections with it."""
    old, new = site.password_file.read_text(), secrets.token_hex(8)
    for gone, comes in ((old, new), (new, old)):
        site.redis("ACL", "SETUSER", "default", f">{comes}")
        part = site.password_file.with_suffix(".part")
        part.write_text(comes)
        part.replace(site.password_file)
        site.redis("ACL", "SETUSER", "default", f"<{gone}")
        with cut_clients(site, targets):
            if comes == new:
                yield


def show_certificate(site: Site, name: str, days: float) -> None:
    """The server has a new certificate from now on, and ends all connections."""
    cert_file, key_file = site.certificate(name, days)
    site.redis("CONFIG", "SET", "tls-key-file", key_file, "tls-cert-file", cert_file)
    with cut_clients(site, ()):
        pass


@contextmanager
def renew_certificate(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """The server's, while all are connected; then all connect anew."""
    show_certificate(site, "renewed", 30)
    yield


@contextmanager
def expire_certificate(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """The server shows one that has expired; then a good one again."""
    show_certificate(site, "expired", -1)
    try:
        yield
    finally:
        show_certificate(site, "first", 30)


@contextmanager
def mute_dns(site: Site, targets: tuple[str, ...]) -> Iterator[None]:
    """The hosts' DNS answers no query, and all connections to the store are to be made anew."""
    site.dns_answers = False
    for address in site.addresses:
        site.names(address, known=False)
    try:
        with cut_clients(site, targets):
            yield
    finally:
        site.dns_answers = True
        for address in site.addresses:
            site.names(address, known=True)


BACK = 20.0
"""Seconds from the end of a cut until who was cut off has stopped its workers."""

# Shorter than the lease by more than an interval; longer by more than the store's clients need.
SHORT, LONG = (1.0, LEASE - 3), (LEASE + 4, 2.5 * LEASE)
LOST = (r"lost .*{host}\[", r"{host}\[\d+\] joined")
FAILED = (r"{host}\[\d+\].* joined again",)


def agent(name: str, begin: Strike, names: tuple[str, ...], **more: Any) -> Fault:
    return Fault(name=name, begin=begin, names=names, **{"strikes": 1, "seconds": (1, 1), **more})


def cut(name: str, seconds: tuple[float, float], strikes: int = 1, **sky: Any) -> Fault:
    """A cut of one node's cable; one that is shorter than a lease ends no round."""
    is_long = seconds == LONG
    return Fault(
        name=f"{name}, {'longer' if is_long else 'shorter'} than the lease",
        strikes=strikes,
        seconds=seconds,
        begin=partial(weather, **sky),
        names=LOST,
        restarts=is_long,
        two_worlds=BACK if is_long else None,
    )


def server(name: str, begin: Strike, seconds: tuple[float, float], **more: Any) -> Fault:
    """A fault of a server that is alone: no outage ends a round."""
    fields = {"strikes": 0, "restarts": False, "stores": ("redis",), **more}
    return Fault(name=name, begin=begin, seconds=seconds, **fields)


CUTS: dict[str, dict[str, Any]] = {
    "a node: nothing that it sends arrives": {"mute": "all"},
    "a node: nothing arrives that others send it": {"deaf": "all"},
    "a node and the store: nothing passes": {"mute": "store", "deaf": "store"},
    "a node and the store: nothing that the node sends arrives": {"mute": "store"},
    "a node and the store: nothing arrives that the store sends": {"deaf": "store"},
}

FAULTS: tuple[Fault, ...] = (
    agent("an agent: SIGKILL", kill, LOST, kills=True),
    agent("two agents at once: SIGKILL", kill, LOST, strikes=2, kills=True),
    agent("a node: SIGKILL of all that runs there", kill_host, LOST, kills=True),
    agent("an agent: SIGTERM", terminate, (r"{host}\[\d+\] left", r"{host}\[\d+\] joined"),
          kills=True),
    agent("a worker: SIGKILL", crash_worker, FAILED),
    agent("an agent: SIGSTOP, shorter than the lease", suspend, (), seconds=SHORT, restarts=False),
    agent("an agent: SIGSTOP, longer than the lease", suspend, LOST, seconds=LONG, two_worlds=BACK),
    agent("a node: its cable is out", unplug, LOST, seconds=LONG, two_worlds=BACK),
    *(cut(name, seconds, **sky) for name, sky in CUTS.items() for seconds in (SHORT, LONG)),
    Fault(
        name="two nodes: nothing passes between them",
        strikes=2,
        seconds=LONG,
        begin=partial(weather, mute="peer", deaf="peer"),
        restarts=False,
    ),
    agent(
        "a node: a fifth of all packets is lost", partial(weather, loss=0.2), LOST,
        seconds=LONG, two_worlds=BACK,
    ),
    agent(
        "a node: each packet takes 0.2 s", partial(weather, delay=0.2), (),
        seconds=LONG, restarts=False,
    ),
    agent(
        "a node: packets above 500 bytes are lost", partial(weather, largest=500), LOST,
        seconds=LONG, two_worlds=BACK,
    ),
    server("the server: SIGSTOP, shorter than the lease", stall_server, SHORT),
    server("the server: SIGSTOP, longer than the lease", stall_server, LONG),
    server("the server: stopped and started with its data", restart_server, LONG),
    server("the server: SIGKILL, and a start without data", empty_server, LONG),
    server("the server: falls back on older data", lose_writes, LONG),
    server(
        "the server: falls back on data from before an agent's SIGKILL", lose_a_round, LONG,
        strikes=1, names=LOST, restarts=True, kills=True,
    ),
    server("the server: ends all connections", cut_clients, (1, 1)),
    server("the server: maxmemory is reached", lack_memory, LONG),
    server("the server: its disk is full", fill_disk, LONG),
    server("the server: another password, in the nodes' files before", rotate_password, SHORT),
    server("the server: its certificate is renewed", renew_certificate, SHORT),
    server("the server: its certificate has expired, shorter than the lease",
           expire_certificate, SHORT),
    server("DNS hangs while all connect anew", mute_dns, LONG),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One fault to come.

    Attributes:
        seconds: for which it lasts.
        calm: seconds after all train again until the next one.
    """

    fault: Fault
    targets: tuple[str, ...]
    seconds: float
    calm: float


def draw(seed: int, store: str, addresses: list[str]) -> Iterator[Plan]:
    """The faults of a seed, without end: each of the store's once, then each once again."""
    dice = random.Random(seed)
    possible = [it for it in FAULTS if store in it.stores]
    while True:
        for fault in dice.sample(possible, len(possible)):
            yield Plan(
                fault=fault,
                targets=tuple(dice.sample(addresses, fault.strikes)) or ("store",),
                seconds=round(dice.uniform(*fault.seconds), 1),
                calm=round(dice.uniform(1, 6), 1),
            )
