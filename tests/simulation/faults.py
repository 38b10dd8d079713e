"""The planned faults: what each fault does to which host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rdzv_plugins.protocol.documents import STATE_KEY

from .host import Agent, Host
from .plan import FASTEST, SLOWEST

if TYPE_CHECKING:
    from .world import World

__all__ = ["FAULTS", "end_faults", "fail", "part", "refuse"]


def _victim(world: World) -> Host | None:
    """A random live host; half of the time the leader or rank 0."""
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
        world.note(f"{host.id} stalls for {seconds:.1f} s{', its clock too' if frozen else ''}")
        host.stall(seconds, frozen)


def _crash_many(world: World) -> None:
    """A rack, or half of the fleet."""
    victims = _many(world)
    world.note(f"{' '.join(host.id for host in victims)} crash at once")
    world.many_crashed(victims)
    again = world.chance.random() < 0.3
    for host in victims:
        host.crash()
        if again:
            world.start_again(host.address)


def _stall_many(world: World) -> None:
    """Their beats come later than a lease, as a rule before two are over."""
    victims = _many(world)
    lease = world.plan.rules.lease / world.plan.rates[1]
    seconds = lease * world.chance.uniform(0.9, 1.6)
    world.note(f"{' '.join(host.id for host in victims)} stall for {seconds:.1f} s")
    for host in victims:
        host.stall(seconds, frozen=False)


def _many(world: World) -> list[Host]:
    alive = [host for host in world.hosts if host.alive]
    share = world.chance.uniform(0.35, 0.7)
    return world.chance.sample(alive, round(share * len(alive)))


def _leave(world: World) -> None:
    host = _victim(world)
    if host and not host.stalls:
        host.leave()
        if world.chance.random() < 0.5:
            world.start_again(host.address)


def _fail(world: World) -> None:
    host = _victim(world)
    if host and not host.stalls:
        host.fail_workers()


def _succeed(world: World) -> None:
    """The workers of a host succeed; the workers of the others succeed soon after."""
    host = _victim(world)
    if host is None or host.stalls or host.track.world is None:
        return
    skew = world.chance.choice((0.0, 0.3, 3.0, 8.0))
    _, _, participants = host.track.world
    for other in world.hosts:
        if other.alive and other.id in participants:
            delay = world.chance.uniform(0, skew) if other is not host else 0.0
            world.kernel.after(delay, other.succeed, host.track.world)


def _abandon(world: World) -> None:
    host = _victim(world)
    if host and not host.stalls:
        host.abandon_join()


def _wedge(world: World) -> None:
    # At most one host: if all agents hang, no host can continue.
    host = _victim(world)
    if host and not host.stalls and not any(other.wedged for other in world.hosts):
        world.note(f"the agent of {host.id} will hang")
        host.wedged = True


def _grey(world: World) -> None:
    """Some requests of a host fail or are slow: an MTU black hole, a full disk, a bad cable."""
    host = _victim(world)
    if host is None or any(other.grey for other in world.hosts if other.alive):
        return
    host.grey = world.chance.choice(("lists", "lists", "some", "slow"))
    world.note(f"{host.id} is a grey host: {host.grey}")
    if world.chance.random() < 0.4:
        world.kernel.after(_duration(world), _clear_up, host)


def _clear_up(host: Host) -> None:
    host.grey = ""


def _newcomer(world: World) -> None:
    world.start()


def _foreigner(world: World) -> None:
    world.start_foreigner()


def _partition(world: World) -> None:
    seconds = _duration(world)
    cut = _cut_off(world, world.chance.choice((0.2, 0.5, 0.8)), seconds)
    world.kernel.after(seconds, _heal, cut)


def _heal(cut: list[Host]) -> None:
    for host in cut:
        host.cut_off = False


def _cut_off(world: World, share: float, seconds: float) -> list[Host]:
    cut = [host for host in world.hosts if host.alive and world.chance.random() < share]
    world.note(f"no access to the store for {seconds:.1f} s: {' '.join(host.id for host in cut)}")
    for host in cut:
        host.cut_off = True
        if world.chance.random() < 0.5:
            host.break_wait()
    return cut


def _outage(world: World) -> None:
    seconds = _duration(world)
    world.note(f"the store is down for {seconds:.1f} s")
    world.network.down = True
    _break_waits(world)
    world.kernel.after(seconds, _restore, world)


def _restore(world: World) -> None:
    world.network.down = False
    if world.network.quiet or world.chance.random() < 0.5:
        return
    # Each client reconnects after its own delay.
    for host in world.hosts:
        if host.alive and not host.cut_off:
            host.cut_off = True
            longest = 1.2 * world.plan.rules.lease
            world.kernel.after(world.chance.uniform(0, longest), _heal, [host])


def _slow(world: World) -> None:
    seconds, delay = _duration(world), world.chance.choice((0.3, 1.0, 4.0))
    world.note(f"the store takes up to {delay} s each way for {seconds:.1f} s")
    world.network.slow = delay
    world.kernel.after(seconds, _speed_up, world)


def _speed_up(world: World) -> None:
    world.network.slow = 0.0


def _amnesia(world: World) -> None:
    world.note("the store loses all data")
    world.store.forget()
    if world.chance.random() < 0.7:
        _break_waits(world)
    for _ in range(world.chance.choice((0, 0, 1, 2, 4))):
        world.start()


def _fail_over(world: World) -> None:
    seconds = world.chance.choice((0.01, 0.05, 0.3, 1.0, 2.0, 5.0))
    lost = world.store.fail_over(seconds)
    world.checker.beats_lost(world.kernel.now - seconds)
    world.note(f"a fail-over loses the last {seconds} s, {lost} writes")
    for host in world.hosts:
        if host.alive:
            host.break_wait()
    for _ in range(world.chance.choice((0, 0, 0, 1, 2))):
        world.start()


def _corrupt(world: World) -> None:
    if STATE_KEY in world.store.entries:
        world.note("the document is damaged")
        whole = world.store.entries[STATE_KEY].value
        rubbish = (b"", b"\xff\xfe", b"{}", whole[: len(whole) // 2])
        world.store.put(STATE_KEY, world.chance.choice(rubbish))
        # This counts as a loss of data.
        world.store.epoch += 1


def _break_waits(world: World) -> None:
    if world.chance.random() < 0.7:
        for host in world.hosts:
            if host.alive:
                host.break_wait()


def _change_rate(world: World) -> None:
    if host := _victim(world):
        rate = world.chance.uniform(SLOWEST, FASTEST)
        world.note(f"the clock of {host.id} now runs at rate {rate:.2f}")
        host.set_rate(rate)


def _close(world: World) -> None:
    host = _victim(world)
    if host and not host.stalls and host.agent is Agent.RUNNING:
        if world.chance.random() < 0.3:
            host.fail_workers(for_good=True)
        else:
            host.shut_down(error=False)


def _close_and_resubmit(world: World) -> None:
    """Close the run; some hosts are cut off until it was swept or submitted again."""
    if world.chance.random() < 0.7:
        seconds = world.plan.rules.sweep_after + world.chance.uniform(0.5, 6.0)
        cut = _cut_off(world, world.chance.choice((0.2, 0.5)), seconds)
        world.kernel.after(seconds, _heal, cut)
    _close(world)
    world.kernel.after(world.plan.rules.sweep_after, _resubmit_once_swept, world)


def _resubmit_once_swept(world: World) -> None:
    if world.network.quiet:
        return
    if world.closed:
        world.kernel.after(0.5, _resubmit_once_swept, world)
    elif world.store.expired:
        world.kernel.after(world.chance.uniform(0, 2.0), _resubmit, world, 0.8)


def _kill_and_resubmit(world: World) -> None:
    for host in world.hosts:
        if host.alive:
            host.crash()
    world.note("all hosts are killed")
    world.kernel.after(world.chance.choice((0.1, 1.0, 5.0, 15.0)), _resubmit, world, 1.0, 1)


def _resubmit(world: World, share: float, fewest: int | None = None) -> None:
    """Use the id again, perhaps with fewer nodes; some old processes may still run."""
    if world.network.quiet:
        return
    world.note("the run is submitted again")
    world.inject("resubmitted")
    for host in world.hosts:
        if host.alive and not host.cut_off and world.chance.random() < share:
            host.crash()
    rules = world.plan.rules
    least = min(rules.min_nodes, 6) if fewest is None else fewest
    for _ in range(world.chance.randint(least, rules.max_nodes)):
        world.start()


def part(world: World, kind: str) -> None:
    """Something happens to the network between hosts."""
    chance, network = world.links, world.network
    alive = [host for host in world.hosts if host.alive]
    if len(alive) < 2:
        return
    seconds = chance.choice((1.0, 5.0, 30.0))
    one, other = chance.sample(alive, 2)
    world.inject(f"link: {kind}")
    if kind == "bad link":
        link = frozenset((one.id, other.id))
        world.note(f"the link between {one.id} and {other.id} is bad for {seconds} s")
        network.bad_links.add(link)
        world.kernel.after(seconds, _mend_link, world, link)
    else:
        world.note(f"{one.id} is {kind} for its peers for {seconds} s")
        one.link = kind
        world.kernel.after(seconds, _mend, one)


def _mend(host: Host) -> None:
    host.link = ""


def _mend_link(world: World, link: frozenset[str]) -> None:
    if not (world.network.quiet and world.plan.one_stays_bad):
        world.network.bad_links.discard(link)


def refuse(world: World, whom: str) -> None:
    """The store answers some hosts that they have no right: their password was changed, say."""
    chance = world.refusals
    alive = [host for host in world.hosts if host.alive]
    if not alive:
        return
    seconds = chance.choice((1.0, 4.0, 10.0)) * chance.uniform(0.5, 1.5)
    chosen = {
        "one": [chance.choice(alive)],
        "blind": [chance.choice(alive)],
        "mute": alive,
        "some": [host for host in alive if chance.random() < 0.5],
        "all": alive,
    }[whom]
    world.inject(f"refused: {whom}")
    names = " ".join(host.id for host in chosen)
    world.note(f"the store refuses for {seconds:.1f} s: {names}")
    for host in chosen:
        host.refused, host.may = True, {"blind": "write", "mute": "read"}.get(whom, "")
        if chance.random() < 0.5:
            host.break_wait()  # Else what waits goes on, over the connection that it has.
    world.kernel.after(seconds, _admit, chosen)


def fail(world: World, whose: str) -> None:
    """The agent of one host fails or those of many do, or the workers of one that is new.

    Those fail together with others, as under torchrun, or since another host of its round is lost.
    """
    chance, agents = world.failures, whose.startswith("agent")
    running = [it for it in world.hosts if it.agent is Agent.RUNNING and not it.stalls]
    chosen = [host for host in running if agents or host.came_late]
    if not chosen:
        if not agents:
            world.start()
        return
    world.inject(f"failed: {whose}")
    host = chance.choice(chosen)
    if whose == "agent":
        host.fail_agent()
    elif whose == "agents":
        for each in running:
            if chance.random() < 0.7:
                world.kernel.after(chance.uniform(0.0, 0.5), each.fail_agent)
    elif whose == "after a loss":
        others = [it for it in running if it is not host and it.track.world == host.track.world]
        if others:
            lost = chance.choice(others)
            world.note(f"{lost.id} crashes, and the workers of {host.id} with it")
            lost.crash()
        world.kernel.after(chance.uniform(0.0, 0.3), host.fail_workers)
    else:
        host.fail_workers(for_good=chance.random() < 0.4)
        for other in running if world.plan.torchrun else ():
            if other.track.world == host.track.world and chance.random() < 0.7:
                world.kernel.after(chance.uniform(0.0, 0.3), other.fail_workers)


def _admit(chosen: list[Host]) -> None:
    for host in chosen:
        host.refused = False


def _duration(world: World) -> float:
    return world.chance.choice((0.2, 1.0, 3.0, 8.0)) * world.chance.uniform(0.5, 1.5)


def end_faults(world: World) -> None:
    """End all faults of hosts, clocks, network and store, except perhaps on a grey host."""
    world.note("-- the faults stop --")
    network = world.network
    network.down, network.slow, network.quiet = False, 0.0, True
    world.connections.mend()
    stays = world.plan.one_stays_bad
    network.bad_links = {*sorted(network.bad_links, key=sorted)[:1]} if stays else set()
    low, high = world.plan.rates
    for host in world.hosts:
        host.cut_off = host.refused = False
        host.link = ""
        if host.grey != "lists" or not world.plan.stays_grey:
            host.grey = ""
        if host.alive and host.foreign:
            host.crash()
        if host.alive:
            host.wake()
            if not low <= host.clock.rate <= high:
                host.set_rate(world.chance.uniform(low, high))


FAULTS: dict[str, Callable[[World], None]] = {
    "crash": _crash,
    "crash, then restart as a newcomer": _restart,
    "stall": _stall,
    "stall with the clock standing still": _freeze,
    "leave": _leave,
    "worker failure": _fail,
    "workers succeed": _succeed,
    "abandoned join": _abandon,
    "wedged agent": _wedge,
    "grey host": _grey,
    "fail-over": _fail_over,
    "corrupt document": _corrupt,
    "kill all, then resubmit": _kill_and_resubmit,
    "newcomer": _newcomer,
    "partition": _partition,
    "outage": _outage,
    "slow store": _slow,
    "amnesia": _amnesia,
    "clock changes its rate": _change_rate,
    "newcomer with other --nnodes": _foreigner,
    "close": _close,
    "close, then resubmit": _close_and_resubmit,
    "many crash at once": _crash_many,
    "many are late at once": _stall_many,
}
