"""The registers of one member: promises, acceptances, and the incarnations that they depend on."""

from __future__ import annotations

import msgspec

from rdzv_plugins.register.messages import (
    NEVER,
    Accept,
    Accepted,
    Answer,
    Ballot,
    Found,
    Generation,
    Held,
    List,
    Memory,
    Prepare,
    Promised,
    Read,
    Refused,
    Request,
    Watch,
)

MOST_BYTES = 1 << 25
"""The memory of a member, for keys and values; a larger copy would take too long."""

# What Python takes for a register beside its key and its value.
_REGISTER_BYTES = 400


class _Register(msgspec.Struct):
    promised: Ballot = NEVER
    accepted: Ballot = NEVER
    value: bytes | None = None
    at: float = 0.0


class Acceptor:
    """Answers clients. It takes part in one generation at a time, or in none.

    Args:
        index: of its member.
        incarnation: of its member; larger at each start.
        room: the most bytes of keys and values.
    """

    def __init__(self, index: int, incarnation: int, room: int = MOST_BYTES) -> None:
        self.index = index
        self.incarnations = {index: incarnation}
        self.generation: Generation = NEVER
        self.takes_part = False
        self._registers: dict[str, _Register] = {}
        self._floor: Ballot = NEVER
        self._room = self._left = room

    @property
    def incarnation(self) -> int:
        return self.incarnations[self.index]

    def learn(self, incarnations: dict[int, int]) -> None:
        """Note incarnations of other members; the latest of each counts."""
        for member, incarnation in incarnations.items():
            if member != self.index:
                self.incarnations[member] = max(incarnation, self.incarnations.get(member, 0))

    def answer(self, request: Request, now: float) -> Answer:
        """Carry out a client's request. ``now``: the member's monotonic clock, in seconds."""
        if not self.takes_part or request.generation != self.generation:
            return Refused(self.generation if self.takes_part else NEVER)
        match request:
            case Prepare(_, key, ballot):
                return self._promise(key, ballot, now)
            case Accept():
                return self._accept(request, now)
            case Watch(_, key, accepted):
                register = self._registers.get(key)
                found = {key: register} if register and register.accepted > accepted else {}
            case Read(_, keys):
                found = {key: self._registers[key] for key in keys if key in self._registers}
            case List(_, prefix):
                found = {key: it for key, it in self._registers.items() if key.startswith(prefix)}
        return Found({key: _held(it, now) for key, it in found.items() if it.accepted != NEVER})

    def _promise(self, key: str, ballot: Ballot, now: float) -> Answer:
        register = self._registers.get(key) or _Register(promised=self._floor)
        if ballot <= register.promised:
            return Refused(self.generation, register.promised)
        if key not in self._registers:
            if self._left < (needed := _REGISTER_BYTES + len(key)):
                return Refused(self.generation, full=True)
            self._left -= needed
            self._registers[key] = register
        register.promised = ballot
        return Promised(self.incarnation, _held(register, now))

    def _accept(self, request: Accept, now: float) -> Answer:
        ballot, quorum = request.held.accepted, request.quorum
        register = self._registers.get(request.key)
        if register is None or (quorum and quorum.get(self.index) != self.incarnation):
            # An earlier life of this member gave the promise, and may have given others.
            return Refused(self.generation)
        if any(self.incarnations.get(member, 0) > it for member, it in quorum.items()):
            # A member that promised has lost its memory since, and may have copied this one's.
            return Refused(self.generation)
        self.learn(quorum)
        if ballot < (register.promised if quorum else max(register.accepted, self._floor)):
            return Refused(self.generation, register.promised)
        growth = len(request.held.value or b"") - len(register.value or b"")
        if growth > max(0, self._left):
            return Refused(self.generation, full=True)
        self._left -= growth
        register.promised, register.accepted = max(ballot, register.promised), ballot
        register.value, register.at = request.held.value, now - request.held.age
        return Accepted()

    def memory(self, now: float) -> Memory:
        """A copy of all that it holds, with its promises."""
        return Memory(
            self.generation,
            self._floor,
            {key: _held(it, now) for key, it in self._registers.items()},
            {key: it.promised for key, it in self._registers.items()},
            dict(self.incarnations),
        )

    def begin(self, memory: Memory, now: float) -> None:
        """Take part in a generation, from this memory on."""
        self.learn(memory.incarnations)
        self.generation, self._floor = memory.generation, memory.floor
        self._registers = {
            key: _Register(
                max(memory.promised.get(key, NEVER), it.accepted),
                it.accepted, it.value, now - it.age,
            )
            for key, it in memory.held.items()
        }  # fmt: skip
        used = sum(
            _REGISTER_BYTES + len(key) + len(it.value or b"") for key, it in memory.held.items()
        )
        self._left = self._room - used
        self.takes_part = True

    def empty(self) -> dict[str, Ballot]:
        """The registers that hold no value, with the ballots under which they were emptied."""
        return {key: it.accepted for key, it in self._registers.items() if it.value is None}

    def agreed_empty(self, asked: dict[str, Ballot]) -> dict[str, Ballot]:
        """The empty registers of a peer of which this member will hold nothing older."""
        unknown = {key: ballot for key, ballot in asked.items() if key not in self._registers}
        # A late request must not bring such a register into being.
        self._floor = max([self._floor, *unknown.values()])
        return unknown | {
            key: ballot
            for key, ballot in asked.items()
            if (it := self._registers.get(key)) and it.value is None and it.accepted == ballot
        }

    def drop(self, empty: dict[str, Ballot]) -> None:
        """Forget registers that are empty in all members. The floor keeps late writes out."""
        still = self.empty()
        for key, ballot in empty.items():
            if still.get(key) == ballot:
                self._left += _REGISTER_BYTES + len(key)
                self._floor = max(self._floor, self._registers.pop(key).promised)


def _held(register: _Register, now: float) -> Held:
    return Held(register.accepted, register.value, now - register.at)
