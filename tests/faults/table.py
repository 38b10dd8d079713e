"""The faults of an hour on real servers: one row each. docs/faults.md is generated from them.

A fault is a context manager: it begins the fault, and ends it when the context ends.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

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
        restarts: whether it may end a round.
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
            site.kill_process(pid)
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
    """Of the first target's cable; ``mute`` and ``deaf`` are "all", "store" or "peer"."""
    who = {
        "": frozenset[str](),
        "all": EVERYBODY,
        "store": frozenset({HERE} if site.server is not None else site.addresses[:3]),
        "peer": frozenset(targets[1:]),
    }
    sky = Weather(delay=delay, loss=loss, largest=largest, mute=who[mute], deaf=who[deaf])
    return Wire(site.hosts[targets[0]], sky, seed=site.seed)


LOST = (r"lost .*{host}\[", r"{host}\[\d+\] joined")
FAILED = (r"{host}\[\d+\].* joined again", "joined again")
APART = (*LOST, *FAILED)
BACK = 20.0
"""Seconds from the end of a cut until who was cut off has stopped its workers."""

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="an agent: SIGKILL",
        strikes=1,
        seconds=(1, 1),
        begin=kill,
        names=LOST,
    ),
    Fault(
        name="a node: nothing that it sends arrives",
        strikes=1,
        seconds=(2, 3 * LEASE),
        begin=partial(weather, mute="all"),
        names=APART,
        two_worlds=BACK,
    ),
    Fault(
        name="a node: nothing arrives that others send it",
        strikes=1,
        seconds=(2, 3 * LEASE),
        begin=partial(weather, deaf="all"),
        names=APART,
        two_worlds=BACK,
    ),
)


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
