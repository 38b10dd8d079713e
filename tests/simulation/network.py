"""Between hosts and store: delays, losses, partitions, outages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rdzv_plugins.kv import Entry
from rdzv_plugins.protocol import effects

if TYPE_CHECKING:
    from .host import Host
    from .world import World

__all__ = ["Network"]

_REFUSED = 0.01
"""Seconds until a host learns that a store refuses connections."""
_GREY_SHARE = 0.35
"""How many requests of a grey host fail that loses some."""
_WRITES = (effects.PutRecord, effects.PutShards, effects.Ring, effects.Drop, effects.Expire)
"""What a host may ask that may write and not read: the store takes it without a look."""
_READS = (effects.Read, effects.List, effects.Park, effects.ReadExclusions,
          effects.ReadTombstone)  # fmt: skip
_ALLOWED = {"write": _WRITES, "read": _READS}
_LATEST = 3.0
"""Longest time after its sender gave up that a late write still lands."""


class Network:
    """Carries requests; ``down`` and ``slow`` are set by the faults."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.down = False
        # Pairs of hosts between which no data pass.
        self.bad_links: set[frozenset[str]] = set()
        self.slow = 0.0
        self.quiet = False

    def latency(self) -> float:
        return self._world.chance.random() * (self.slow or self._world.plan.latency)

    def splits_batch(self) -> bool:
        """Whether a batch loses its second key; some stores have no atomic batch."""
        plan, chance = self._world.plan, self._world.chance
        if self.quiet or not plan.unacknowledged or chance.random() >= plan.unacknowledged:
            return False
        self._world.inject("half of a batch")
        return True

    def list(self, prefix: str) -> dict[str, Entry]:
        world = self._world
        if self.quiet or not world.plan.staleness:
            return world.store.listing(prefix, None)
        world.inject("stale listing")
        now = world.kernel.now
        return world.store.listing(
            prefix, lambda: now - world.chance.uniform(0, world.plan.staleness)
        )

    def carry(self, host: Host, turn: int, request: effects.Effect[Any]) -> None:
        world, chance, plan = self._world, self._world.chance, self._world.plan
        after = world.kernel.after
        timeout = host.clock.real(plan.rules.request_timeout)
        evidence = (
            host.track.evidence.copy() if isinstance(request, effects.CompareAndSet) else None
        )
        if self._is_cut_off(host):
            if plan.retries and chance.random() < plan.retries:
                deadline = world.kernel.now + timeout
                after(self._pause(), self._retry, host, turn, request, evidence, deadline)
            else:
                after(chance.choice((_REFUSED, timeout)), host.fails, turn, "unreachable")
            return
        if host.refused and not isinstance(request, _ALLOWED.get(host.may, ())):
            world.inject("refused")
            seconds = (world.refusals.random() + world.refusals.random()) * plan.latency
            after(seconds, host.is_refused, turn)
            return
        out, back = self.latency(), self.latency()
        if host.grey == "lists" and plan.writes_refused:
            if isinstance(request, effects.CompareAndSet):
                world.inject("write refused")
                after(out + back, host.is_refused, turn)
                return
        elif host.grey and self._fails_there(host, request):
            world.inject(f"grey host: {host.grey}")
            after(chance.choice((_REFUSED, timeout)), host.fails, turn, "unreachable")
            return
        if host.grey == "slow":
            out, back = (chance.uniform(0, 0.5) * plan.rules.interval for _ in range(2))
        if not self.quiet:
            draw = chance.random()
            if draw < plan.lost:
                world.inject("request lost")
                host.deaf = turn
                after(chance.choice((_REFUSED, timeout)), host.fails, turn, "lost")
                return
            draw -= plan.lost
            if not isinstance(request, effects.Park):
                if draw < plan.unacknowledged:
                    world.inject("answer lost")
                    after(out, host.perform, -1, request, back, evidence)
                    after(out + chance.choice((back, timeout)), host.fails, turn, "lost")
                    return
                draw -= plan.unacknowledged
                if draw < plan.late:
                    world.inject("done late")
                    after(timeout, host.fails, turn, "timed out")
                    late = timeout + chance.uniform(0, _LATEST)
                    after(late, self._land, host, request, back, evidence, world.store.expired)
                    return
        if out + back > timeout and not isinstance(request, effects.Park):
            world.inject("timed out")
            after(timeout, host.fails, turn, "timed out")
            if out > timeout:
                # Done, but for nobody.
                after(out, self._land, host, request, back, evidence, world.store.expired)
                return
        after(out, self._reach, host, turn, request, back, evidence)

    def _retry(self, host: Host, turn: int, request: effects.Effect[Any], evidence: Any,
               deadline: float) -> None:  # fmt: skip
        """What a store's client does while it cannot reach the store."""
        if not host.awaits(turn):
            return
        now, after = self._world.kernel.now, self._world.kernel.after
        if not self._is_cut_off(host):
            self._world.inject("retried")
            after(self.latency(), self._reach, host, turn, request, self.latency(), evidence)
        elif now < deadline:
            pause = min(self._pause(), deadline - now)
            after(pause, self._retry, host, turn, request, evidence, deadline)
        else:
            host.fails(turn, "unreachable")

    def _pause(self) -> float:
        """Until the next attempt; one of three servers may hang for a third of the time."""
        return self._world.chance.choice((0.1, self._world.plan.rules.request_timeout / 3))

    def answer(self, host: Host, turn: int, answer: Any, seconds: float) -> None:
        self._world.kernel.after(seconds, self._arrive, host, turn, answer)

    def _land(self, host: Host, request: effects.Effect[Any], back: float, evidence: Any,
              expired: int) -> None:  # fmt: skip
        """A request that its sender gave up; no run is swept as soon as that after its end."""
        if expired == self._world.store.expired:
            host.landed_late = host.landed_late or isinstance(request, effects.PutRecord)
            host.perform(-1, request, back, evidence)

    def _reach(self, host: Host, turn: int, request: effects.Effect[Any], back: float,
               evidence: Any) -> None:  # fmt: skip
        if self._is_cut_off(host):
            host.fails(turn, "unreachable")
        else:
            host.perform(turn, request, back, evidence)

    def _arrive(self, host: Host, turn: int, answer: Any) -> None:
        if self._is_cut_off(host):
            host.fails(turn, "unreachable")
        else:
            host.receive(turn, answer)

    def reaches(self, host: Host) -> bool:
        return not (self._is_cut_off(host) or host.refused)

    def _fails_there(self, host: Host, request: effects.Effect[Any]) -> bool:
        match host.grey:
            case "lists":
                return isinstance(request, effects.List)
            case "some":
                return self._world.chance.random() < _GREY_SHARE
        return False

    def _is_cut_off(self, host: Host) -> bool:
        return self.down or host.cut_off

    def dial(self, host: Host, request: effects.DialPeer) -> tuple[float, Exception | None]:
        """How long a dial of another host takes, and why it fails."""
        world, chance = self._world, self._world.links
        limit = host.clock.real(request.limit)
        other = next((it for it in world.hosts if it.id == request.node), None)
        if (why := self._between(host, other, request)) is not None:
            return (limit if why == "no answer" else chance.choice((_REFUSED, limit))), OSError(why)
        slow = other is not None and "slow" in (host.link, other.link)
        return (0.3 * limit if slow else chance.uniform(0.001, 0.1)), None

    def _between(self, host: Host, other: Host | None, request: effects.DialPeer) -> str | None:
        """Why this dial fails; None: it does not."""
        if other is None or not other.alive:
            return "refused"
        if other.stalls and request.exchanges:
            return "no answer"
        why = ""
        if "cut off" in (host.link, other.link):
            why = "cut off"
        elif other.link == "unreachable" or (other.link == "hidden" and not request.exchanges):
            why = other.link
        elif frozenset((host.id, other.id)) in self.bad_links:
            why = "bad link"
        if why:
            self._world.inject(f"dial failed: {why}")
        return why or None
