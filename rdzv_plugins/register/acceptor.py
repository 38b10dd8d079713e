"""The registers of one member: its promises, its acceptances, and the incarnations it knows."""

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
"""Bytes of keys and values in a member; a copy of more would take too long."""

# The memory of a register without its key and its value.
_REGISTER_BYTES = 400


class _Register(msgspec.Struct):
    promised: Ballot = NEVER
    accepted: Ballot = NEVER
    value: bytes | None = None
    accepted_at: float = 0.0


class Acceptor:
    """Answers clients. It takes part in one generation at a time, or in none."""

    def __init__(self, index: int, incarnation: int) -> None:
        self.index = index
        self.incarnations = {index: incarnation}
        self.generation: Generation = NEVER
        self.takes_part = False
        self._registers: dict[str, _Register] = {}
        self._floor: Ballot = NEVER
        self._left = MOST_BYTES

    @property
    def incarnation(self) -> int:
        return self.incarnations[self.index]

    def learn(self, incarnations: dict[int, int]) -> None:
        """Note the latest incarnation of each other member."""
        for member, incarnation in incarnations.items():
            if member != self.index:
                self.incarnations[member] = max(incarnation, self.incarnations.get(member, 0))

    def answer(self, request: Request, now: float) -> Answer:
        """Carry out a client's request; ``now`` is in seconds of the monotonic clock."""
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
            # This member gave the promise before it restarted, and has forgotten later promises.
            return Refused(self.generation)
        if any(self.incarnations.get(member, 0) > it for member, it in quorum.items()):
            # A member restarted after its promise, and may have copied this member's registers.
            return Refused(self.generation)
        self.learn(quorum)
        if ballot < (register.promised if quorum else max(register.accepted, self._floor)):
            return Refused(self.generation, register.promised)
        growth = len(request.held.value or b"") - len(register.value or b"")
        if growth > max(0, self._left):
            return Refused(self.generation, full=True)
        self._left -= growth
        register.promised, register.accepted = max(ballot, register.promised), ballot
        register.value, register.accepted_at = request.held.value, now - request.held.age
        return Accepted()

    def memory(self, now: float) -> Memory:
        return Memory(
            self.generation,
            self._floor,
            {key: _held(it, now) for key, it in self._registers.items()},
            {key: it.promised for key, it in self._registers.items()},
            dict(self.incarnations),
        )

    def begin(self, memory: Memory, now: float) -> None:
        """Take part in the generation of ``memory``, with its registers."""
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
        self._left = MOST_BYTES - used
        self.takes_part = True

    def empty(self) -> dict[str, Ballot]:
        """The empty registers, each with the ballot that emptied it."""
        return {key: it.accepted for key, it in self._registers.items() if it.value is None}

    def agreed_empty(self, asked: dict[str, Ballot]) -> dict[str, Ballot]:
        """The registers among ``asked`` for which this member never holds an older value again."""
        unknown = {key: ballot for key, ballot in asked.items() if key not in self._registers}
        # The floor keeps a late request from creating these registers.
        self._floor = max([self._floor, *unknown.values()])
        return unknown | {
            key: ballot
            for key, ballot in asked.items()
            if (it := self._registers.get(key)) and it.value is None and it.accepted == ballot
        }

    def drop(self, empty: dict[str, Ballot]) -> None:
        """Forget registers that are empty in all members; the floor refuses late writes."""
        still_empty = self.empty()
        for key, ballot in empty.items():
            if still_empty.get(key) == ballot:
                self._left += _REGISTER_BYTES + len(key)
                self._floor = max(self._floor, self._registers.pop(key).promised)


def _held(register: _Register, now: float) -> Held:
    return Held(register.accepted, register.value, now - register.accepted_at)
