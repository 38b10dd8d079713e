"""The planned faults, each a few lines: what befalls whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .host import Agent, Host
from .plan import FASTEST, SLOWEST

if TYPE_CHECKING:
    from .world import World

__all__ = ["FAULTS", "end_faults"]


def _victim(world: World) -> Host | None:
    """A live host; often the one whose loss matters most."""
    alive = [host for host in world.hosts if host.alive]
    if not alive:
        return None
    document = world.document
    if document is not None and world.chance.random() < 0.5:
        wanted = world.chance.choice((document.leader, *document.participants[:1]))
        for host in alive:
            if host.id == wanted:
                return host
    return world.chance.choice(alive)


def _crash(world: World) -> None:
    if host := _victim(world):
        world.note(f"{host.id} crashes")
        host.crash()


def _restart(world: World) -> None:
    if host := _victim(world):
        world.note(f"{host.id} crashes and restarts")
        host.crash()
        world.start_again(host.address)


def _stall(world: World) -> None:
    _stop_a_while(world, frozen=False)


def _freeze(world: World) -> None:
    _stop_a_while(world, frozen=True)


def _stop_a_while(world: World, frozen: bool) -> None:
    if host := _victim(world):
        seconds = world.chance.choice((0.3, 1.5, 3.0, 6.0, 12.0)) * world.chance.uniform(0.5, 1.5)
        world.note(f"{host.id} stalls for {seconds:.1f} s{' with its clock' if frozen else ''}")
        host.stall(seconds, frozen)


def _leave(world: World) -> None:
    host = _victim(world)
    if host and world.kernel.now >= host.stalled_until:
        host.leave()
        if world.chance.random() < 0.5:
            world.start_again(host.address)


def _fail(world: World) -> None:
    host = _victim(world)
    if host and world.kernel.now >= host.stalled_until:
        host.fail_workers()


def _newcomer(world: World) -> None:
    world.start()


def _foreigner(world: World) -> None:
    rules = world.plan.rules
    world.start(rules=replace(rules, max_nodes=rules.max_nodes + 1))


def _partition(world: World) -> None:
    share = world.chance.choice((0.2, 0.5, 0.8))
    cut = [host for host in world.hosts if host.alive and world.chance.random() < share]
    seconds = _duration(world)
    world.note(f"no store for {seconds:.1f} s on {' '.join(host.id for host in cut)}")
    for host in cut:
        host.cut_off = True
        if world.chance.random() < 0.5:
            host.break_wait()
    world.kernel.after(seconds, _heal, cut)


def _heal(cut: list[Host]) -> None:
    for host in cut:
        host.cut_off = False


def _outage(world: World) -> None:
    seconds = _duration(world)
    world.note(f"the store is down for {seconds:.1f} s")
    world.network.down = True
    _break_waits(world)
    world.kernel.after(seconds, _restore, world)


def _restore(world: World) -> None:
    world.network.down = False


def _slow(world: World) -> None:
    seconds, delay = _duration(world), world.chance.choice((0.3, 1.0, 4.0))
    world.note(f"the store takes up to {delay} s each way for {seconds:.1f} s")
    world.network.slow = delay
    world.kernel.after(seconds, _speed_up, world)


def _speed_up(world: World) -> None:
    world.network.slow = 0.0


def _amnesia(world: World) -> None:
    world.note("the store forgets everything")
    world.store.forget()
    if world.chance.random() < 0.7:
        _break_waits(world)
    for _ in range(world.chance.choice((0, 0, 1, 2, 4))):
        world.start()


def _break_waits(world: World) -> None:
    if world.chance.random() < 0.7:
        for host in world.hosts:
            if host.alive:
                host.break_wait()


def _change_rate(world: World) -> None:
    if host := _victim(world):
        rate = world.chance.uniform(SLOWEST, FASTEST)
        world.note(f"the clock of {host.id} goes on at {rate:.2f}")
        host.set_rate(rate)


def _close(world: World) -> None:
    host = _victim(world)
    if host and world.kernel.now >= host.stalled_until and host.agent is Agent.RUNNING:
        host.finish()


def _close_and_resubmit(world: World) -> None:
    _close(world)
    world.kernel.after(world.chance.uniform(0.5, 5.0), _resubmit, world)


def _resubmit(world: World) -> None:
    """A closed run was swept, and its id is used again; some old process may still hang."""
    if not world.closed or world.network.quiet:
        return
    world.note("the closed run is swept and submitted again")
    world.inject("resubmitted")
    for host in world.hosts:
        if host.alive and world.chance.random() < 0.8:
            host.crash()
    world.sweep()
    for _ in range(world.plan.rules.max_nodes):
        world.start()


def _duration(world: World) -> float:
    return world.chance.choice((0.2, 1.0, 3.0, 8.0)) * world.chance.uniform(0.5, 1.5)


def end_faults(world: World) -> None:
    """From now on hosts, clocks, network and store do as they should."""
    world.note("-- the faults stop --")
    network = world.network
    network.down, network.slow, network.quiet = False, 0.0, True
    low, high = world.plan.rates
    for host in world.hosts:
        host.cut_off = False
        if host.alive and host.foreign:
            host.crash()
        if host.alive:
            host.wake()
            if not low <= host.clock.rate <= high:
                host.set_rate(world.chance.uniform(low, high))
    if world.closed:
        return
    missing = world.plan.rules.min_nodes - len(world.concerned)
    for _ in range(missing):
        world.start()


FAULTS: dict[str, Callable[[World], None]] = {
    "crash": _crash,
    "crash, then restart as a newcomer": _restart,
    "stall": _stall,
    "stall with the clock standing still": _freeze,
    "leave": _leave,
    "worker failure": _fail,
    "newcomer": _newcomer,
    "partition": _partition,
    "outage": _outage,
    "slow store": _slow,
    "amnesia": _amnesia,
    "clock changes its rate": _change_rate,
    "newcomer with other --nnodes": _foreigner,
    "close": _close,
    "close, then resubmit": _close_and_resubmit,
}
