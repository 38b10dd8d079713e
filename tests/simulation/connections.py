"""The links between hosts: what ends them, and what dials come to."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from rdzv_plugins.protocol.contact import Standing

if TYPE_CHECKING:
    from .host import Host
    from .world import World

__all__ = ["Connections"]

_KERNEL = 0.01
"""Longest time until a host learns that a connection has ended, or is refused."""
_AGAIN = 0.2
"""Longest time until it finds out that what refused does so no more."""
_POWER = 0.25
"""How many crashes are of the machine: no connection ends, and dials come to nothing."""


class Connections:
    """All links of a world.

    Attributes:
        refusing: hosts whose firewalls refuse all connections to them.
        cut: those of them whose firewalls refuse their own as well.
        silent: hosts that no dial reaches, and that refuse none.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # It has a source of its own, so that all else is as it would be without links.
        self._chance = random.Random(f"connections of {world.plan.seed}")
        self.refusing: set[str] = set()
        self.cut: set[str] = set()
        self.silent: set[str] = set()
        # By who holds them: those that it holds links to, and whether it was told that one is gone.
        self._held: dict[str, dict[str, bool]] = {}
        self._reaches: set[str] = set()
        # What each says of itself, and what each was told of the others.
        self._said: dict[str, Standing] = {}
        self._told: dict[str, frozenset[Standing]] = {}
        self._words = random.Random(f"words of {world.plan.seed}")

    def hold(self, host: Host, peers: tuple[str, ...], standing: Standing) -> None:
        self._said[host.id] = standing
        before = {*self._held.get(host.id, ())}
        self._tell_later({host.id, *before, *peers, *self._holders(host.id)})
        held = self._held.setdefault(host.id, {})
        self._held[host.id] = {peer: held.get(peer, False) for peer in peers}
        for peer in peers:
            if peer not in held:
                self._later(self._dial, host, peer)

    def _holders(self, node: str) -> set[str]:
        return {holder for holder, held in self._held.items() if node in held}

    def _tell_later(self, whom: set[str]) -> None:
        for host in self._world.hosts:
            if host.id in whom:
                self._world.kernel.after(self._words.uniform(0.0005, _KERNEL), self._tell, host)

    def _tell(self, host: Host) -> None:
        """What stands at the other ends of its links; where one is missing, nobody knows."""
        hosts = {it.id: it for it in self._world.hosts}
        held = self._held.get(host.id, {})

        def stands(begun: str, to: str) -> bool:
            lives = hosts[to].alive and hosts[begun].alive
            # The link to a machine without power is not known to have ended.
            known = lives or self.silent & {it for it in (begun, to) if not hosts[it].alive}
            hidden = {begun, to} & {it for it in self.silent if hosts[it].alive}
            return bool(known) and not (hidden or to in self.refusing or begun in self.cut)

        ends = [it for it in held if stands(host.id, it)]
        missing = {Standing.ACCEPTED for _ in range(len(held) - len(ends))}
        ends += [it for it in self._holders(host.id) if stands(it, host.id)]
        others = frozenset(missing.union(self._said.get(it, Standing.ACCEPTED) for it in ends))
        if host.alive and self._told.get(host.id, frozenset()) != others:
            self._told[host.id] = others
            host.hear_of_others(others)

    def _later(self, call: object, *of: object) -> None:
        self._world.kernel.after(self._chance.uniform(0.0005, _KERNEL), call, *of)  # type: ignore[arg-type]

    def _dial(self, host: Host, node: str) -> None:
        """What comes of it; where none was ever answered, it is not told."""
        held = self._held.get(host.id, {})
        if not host.alive or node not in held or held[node]:
            return
        peer = next(it for it in self._world.hosts if it.id == node)
        if node in self.silent or (peer.alive and peer.stalls):
            return
        if peer.alive and node not in self.refusing and host.id not in self.cut:
            self._reaches.add(host.id)
        elif peer.alive and self._has_link(peer, host):
            self._world.inject("a link speaks for who refuses")
        elif host.id in self._reaches:
            held[node] = True
            self._world.inject("a link tells that a process is gone")
            host.hear_of(node, gone=True)

    def _has_link(self, one: Host, other: Host) -> bool:
        """Whether one that lives has a link of its own to the other."""
        hidden = other.id in self.refusing | self.silent or one.id in self.cut
        return not hidden and self._held.get(one.id, {}).get(other.id) is False

    def ended(self, host: Host) -> None:
        """A process has ended without a farewell, if it is not the whole machine."""
        if self._chance.random() < _POWER:
            self.silent.add(host.id)
        else:
            self._world.process_died(host)
            self._break({host.id})
        self._world.kernel.after(0.0, self._tell_later, {it.id for it in self._world.hosts})

    def _break(self, to: set[str]) -> None:
        for holder in self._world.hosts:
            for node in sorted(to.intersection(self._held.get(holder.id, ()))):
                self._later(self._dial, holder, node)

    def befall(self, kind: str) -> None:
        """Something happens between hosts that live."""
        chance, alive = self._chance, [it.id for it in self._world.hosts if it.alive]
        if not alive:
            return
        some = {node for node in alive if chance.random() < 0.5}
        whom = chance.choice(({chance.choice(alive)}, some, {*alive}))
        seconds = chance.choice((0.05, 0.5, 3.0, 10.0)) * chance.uniform(0.5, 1.5)
        world = self._world
        world.inject(f"links: {kind}")
        world.note(f"links {kind} for {seconds:.1f} s: {' '.join(sorted(whom))}")
        if kind == "refuse":
            self.refusing |= whom
            if chance.random() < 0.5:
                self.cut |= whom
            world.kernel.after(seconds, self._end, whom)
        elif kind == "hang":
            self.silent |= whom
            world.kernel.after(seconds, self._answer, whom)
        self._tell_later({it.id for it in world.hosts})
        self._break(whom)
        for node in sorted(self.cut & whom):
            for peer in self._held.get(node, ()):
                self._later(self._dial, next(it for it in world.hosts if it.id == node), peer)

    def _answer(self, whom: set[str]) -> None:
        self.silent -= {it.id for it in self._world.hosts if it.alive and it.id in whom}
        self._tell_later({it.id for it in self._world.hosts})

    def _end(self, whom: set[str]) -> None:
        self.refusing -= whom
        self.cut -= whom
        self._tell_later({it.id for it in self._world.hosts})
        for holder in self._world.hosts:
            held = {*self._held.get(holder.id, ())}
            for node in sorted(held if holder.id in whom else held & whom):
                self._world.kernel.after(self._chance.uniform(0, _AGAIN), self._again, holder, node)

    def _again(self, host: Host, node: str) -> None:
        held = self._held.get(host.id, {})
        peer = next(it for it in self._world.hosts if it.id == node)
        cut = node in self.refusing or host.id in self.cut
        if host.alive and held.get(node) and peer.alive and not cut:
            held[node] = False
            host.hear_of(node, gone=False)

    def draw(self) -> float:
        return self._chance.random()

    def mend(self) -> None:
        """The faults stop."""
        self._end({*self.refusing})
