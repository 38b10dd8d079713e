"""Orders from people, given at any time: a person has the same network as the hosts."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.protocol import effects, orders
from rdzv_plugins.protocol.documents import BELL_KEY, Exclusion, RoundDocument

from .plan import EPOCH, QUIET_AFTER

if TYPE_CHECKING:
    from .host import Host
    from .world import World

__all__ = ["ORDERS", "Command", "give", "now"]


class Command:
    """A process that carries out some effects, and ends.

    Args:
        world: where it lives.
        work: what it does.
        host: where it runs, which may be cut off; None: on none of those of the run.
        at_end: told what comes of it; None where a request failed.
    """

    def __init__(
        self,
        world: World,
        work: Generator[effects.Effect[Any], Any, object],
        host: Host | None = None,
        at_end: Callable[[object], None] = lambda _: None,
    ) -> None:
        self._world = world
        self._work = work
        self._host = host
        self._at_end = at_end
        self._step(None)

    def _step(self, answer: Any, error: Exception | None = None) -> None:
        try:
            request = self._work.send(answer) if error is None else self._work.throw(error)
        except StopIteration as stop:
            self._at_end(stop.value)
            return
        except (RendezvousConnectionError, RendezvousStateError) as failure:
            self._world.note(f"an order fails: {failure}")
            self._at_end(None)
            return
        if isinstance(request, effects.Rest):
            self._world.kernel.after(request.seconds, self._step, None)
        else:
            self._after(self._reach, request)

    def _after(self, call: Callable[..., None], *arguments: Any) -> None:
        world = self._world
        seconds = world.person.random() * (world.network.slow or world.plan.latency)
        world.kernel.after(seconds, call, *arguments)

    def _reach(self, request: effects.Effect[Any]) -> None:
        world, store = self._world, self._world.store
        if world.network.down or (self._host and not world.network.reaches(self._host)):
            self._step(None, RendezvousConnectionError("unreachable"))
            return
        answer: Any = None
        match request:
            case effects.Read(key):
                answer = store.entries.get(key)
            case effects.List(prefix):
                answer = world.store.listing(prefix, None)
            case effects.Ring():
                store.put(BELL_KEY, b"")
            case effects.CompareAndSet(key, value, expected):
                before = store.entries.get(key)
                answer = store.compare_and_set(key, value, expected)
                if answer[1] and before is not None:
                    world.ordered(RoundDocument.decode(before.value), RoundDocument.decode(value))
        if not world.network.quiet and world.person.random() < world.plan.unacknowledged:
            self._after(self._step, None, RendezvousConnectionError("lost"))
        else:
            self._after(self._step, answer)


def give(world: World, kind: str) -> None:
    """Somebody gives an order of this kind."""
    world.inject(f"order: {kind}")
    if (work := ORDERS[kind](world)) is not None:
        Command(world, work)


def _somebody(world: World) -> Host | None:
    """A live host; half of the time the leader or rank 0."""
    alive = [host for host in world.hosts if host.alive and not host.foreign]
    document = world.document
    if document is not None and world.person.random() < 0.5:
        wanted = world.person.choice((document.leader, *document.participants[:1]))
        alive = [host for host in alive if host.id == wanted] or alive
    return world.person.choice(alive) if alive else None


def _drain(world: World) -> Generator[effects.Effect[Any], Any, object] | None:
    host = _somebody(world)
    if host is None:
        return None
    name = world.person.choice((host.id, host.node.record.label, host.address))
    world.note(f"somebody drains {name}")
    return orders.drain("rdzv", [name], partial(now, world))


def _restart(world: World) -> Generator[effects.Effect[Any], Any, object]:
    world.note("somebody restarts the run")
    return orders.restart("rdzv", "restarted by the command rdzv restart", partial(now, world))


def _resize(world: World) -> Generator[effects.Effect[Any], Any, object]:
    world.note("somebody lets in who waits")
    return orders.resize("rdzv")


def _exclude(world: World) -> Generator[effects.Effect[Any], Any, object] | None:
    host = _somebody(world)
    if host is None:
        return None
    # It ends soon after the faults at the latest, or not at all.
    seconds = world.person.choice((None, 1.0, 4.0, 10.0, QUIET_AFTER + 3.0 - world.kernel.now))
    until = None if seconds is None else now(world) + seconds
    exclusion = Exclusion(host.address, until, "bad")
    world.note(f"somebody excludes {exclusion}")
    world.exclusions[host.address] = world.kernel.now, exclusion
    return orders.exclude("rdzv", exclusion, partial(now, world))


def _include(world: World) -> Generator[effects.Effect[Any], Any, object] | None:
    if not world.exclusions:
        return None
    host = world.person.choice(sorted(world.exclusions))
    world.note(f"somebody includes {host}")
    del world.exclusions[host]
    return orders.include("rdzv", [host])


def now(world: World) -> float:
    """What the clock of whoever gives orders shows."""
    return EPOCH + world.kernel.now


ORDERS: dict[str, Callable[[World], Generator[effects.Effect[Any], Any, object] | None]] = {
    "drain": _drain,
    "restart": _restart,
    "resize": _resize,
    "exclude": _exclude,
    "include": _include,
}
