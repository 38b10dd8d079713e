"""One member: it answers clients, recovers its memory from the others, and agrees on generations.

A member that starts has no memory. It asks the others for copies, and takes part once a majority of
the members, itself not counted, has sent them. Where fewer than that take part, a majority of the
members agrees on a new generation instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from rdzv_plugins.register.acceptor import MOST_BYTES, Acceptor
from rdzv_plugins.register.messages import (
    NEVER,
    Agreed,
    Answer,
    Ballot,
    Copied,
    Copy,
    Empty,
    Generation,
    Held,
    Install,
    Memory,
    PeerMessage,
    Propose,
    Request,
    Status,
)

ACCEPT_SECONDS = 0.3
"""A writer gives up an accept phase after this time. A new member waits as long before it agrees to
a generation: then no acceptance of its earlier life can complete a write."""

STATUS_SECONDS = 0.25
"""Between two messages by which a member tells the others that it lives."""

# A member that has said nothing for so long counts as gone.
_SILENCE_SECONDS = 4 * STATUS_SECONDS
# Between two requests for copies.
_ASK_SECONDS = 0.1
# Between two proposals; longer each time, so that one of several comes to its end.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 0.5

Sent = list[tuple[int, PeerMessage]]
"""Messages to other members, each with its addressee."""


class Member:
    """The state of one member. Its driver delivers messages, and calls `tick` often.

    Args:
        index: of this member among the ``size`` members.
        incarnation: larger than that of each earlier start of this member, as the wall clock is.
        now: the driver's monotonic clock, in seconds.
        dice: draws the pauses between proposals.
        room: the most bytes of keys and values.
    """

    sweep_seconds = 5.0

    def __init__(
        self,
        index: int,
        size: int,
        incarnation: int,
        now: float,
        dice: random.Random,
        room: int = MOST_BYTES,
    ) -> None:
        self.index, self.size = index, size
        self._dice, self._room = dice, room
        self._others = [it for it in range(size) if it != index]
        self._majority = size // 2 + 1
        # By peer: the generation in which it takes part, and when it said so.
        self._heard: dict[int, tuple[Generation, float]] = {}
        self._status_at = self._sweep_at = now
        self.acceptor = Acceptor(index, incarnation, room)
        self._start(incarnation, now)

    def _start(self, incarnation: int, now: float) -> None:
        """Begin a life without memory."""
        known, self.acceptor = (
            self.acceptor.incarnations,
            Acceptor(self.index, incarnation, self._room),
        )
        self.acceptor.learn(known)
        self._started = now
        # The latest generation to which it agreed, and the one that it proposes.
        self._agreed: Generation = NEVER
        self._proposed: Generation = NEVER
        self._agreements: dict[int, Agreed] = {}
        self._begin_at = now
        self._copies: dict[int, Memory] = {}
        self._confirmed: dict[int, Empty] = {}
        # What the sweep before this one has found, and in which lives of the others.
        self._found: tuple[dict[str, Ballot], dict[int, int]] = {}, {}
        self._ask_at = now
        self._pause = _FIRST_PAUSE
        self._propose_at = now + ACCEPT_SECONDS

    @property
    def takes_part(self) -> bool:
        """Whether it answers clients."""
        return self.acceptor.takes_part

    @property
    def generation(self) -> Generation:
        """The generation of its memory."""
        return self.acceptor.generation

    def up(self, now: float) -> set[int]:
        """The members that take part in this member's generation, as far as it knows."""
        own = {self.index} if self.takes_part else set()
        return own | self._at_work(self.generation, now)

    def answer(self, request: Request, now: float) -> Answer:
        """Carry out a client's request."""
        return self.acceptor.answer(request, now)

    def tick(self, now: float) -> Sent:
        """What it says by itself at this time."""
        sent: Sent = []
        if now >= self._status_at:
            self._status_at = now + STATUS_SECONDS
            sent += self._statuses()
        if self.takes_part and not self._is_left_behind(now):
            if now >= self._sweep_at:
                self._sweep_at = now + self.sweep_seconds
                sent += self._sweep()
            return sent
        if now >= self._ask_at:
            self._ask_at = now + _ASK_SECONDS
            sent += self._to_all(Copy(self._incarnation))
        if len(self._agreements) >= self._majority and now >= self._begin_at:
            return sent + self._begin_generation(now)
        if now >= self._propose_at and not self._can_copy(now):
            sent += self._propose(now)
        return sent

    def hear(self, sender: int, message: PeerMessage, now: float) -> Sent:
        """What it says to a message of another member."""
        acceptor, known = self.acceptor, self.acceptor.incarnations.get(sender, 0)
        if message.incarnation < known:
            return [(sender, self._status(sender))]
        is_new = message.incarnation > known
        acceptor.learn({sender: message.incarnation})
        match message:
            case Status(_, generation, known):
                if known > self._incarnation:
                    # The clock of this host was set back between two starts.
                    self._start(known + 1, now)
                return self._hear_status(sender, generation, is_new, now)
            case Copy() if self.takes_part:
                memory = acceptor.memory(now)
                return [(sender, Copied(self._incarnation, message.incarnation, memory))]
            case Copied():
                return self._take_copy(sender, message, now)
            case Propose(_, generation):
                return self._agree(sender, generation, now)
            case Agreed():
                return self._count_agreement(sender, message, now)
            case Install(_, memory):
                self._install(memory, now)
            case Empty() if self.takes_part and message.generation == self.generation:
                return self._hear_empty(sender, message)
        return []

    @property
    def _incarnation(self) -> int:
        return self.acceptor.incarnation

    def _status(self, peer: int) -> Status:
        generation = self.generation if self.takes_part else NEVER
        known = self.acceptor.incarnations.get(peer, 0)
        return Status(self._incarnation, generation, known)

    def _statuses(self) -> Sent:
        return [(it, self._status(it)) for it in self._others]

    def _to_all(self, message: PeerMessage) -> Sent:
        return [(it, message) for it in self._others]

    def _at_work(self, generation: Generation, now: float) -> set[int]:
        """The others that have said lately that they take part in this generation."""
        return {
            peer
            for peer, (theirs, at) in self._heard.items()
            if theirs == generation and now - at < _SILENCE_SECONDS
        }

    def _can_copy(self, now: float) -> bool:
        """Whether enough others take part in one generation for a recovery by copies."""
        generations = {theirs for theirs, _ in self._heard.values()} - {NEVER}
        return any(len(self._at_work(it, now)) >= self._majority for it in generations)

    def _is_left_behind(self, now: float) -> bool:
        """Whether there is a later generation, and no majority at work in this member's own."""
        later = any(
            self._at_work(it, now) for it, _ in self._heard.values() if it > self.generation
        )
        return later and len(self.up(now)) < self._majority

    def _is_in(self, generation: Generation) -> bool:
        return self.takes_part and self.generation == generation

    def _hear_status(self, sender: int, generation: Generation, is_new: bool, now: float) -> Sent:
        self._heard[sender] = generation, now
        others_work = len(self._at_work(generation, now)) >= self._majority
        if generation != NEVER and others_work and not self._is_in(generation):
            if self.takes_part or self._agreed > generation:
                # This memory belongs to an older history, or the proposal came to nothing.
                latest = max(self._incarnation, self.generation[0], self._agreed[0])
                self._start(latest + 1, now)
            self._ask_at = now
        return [(sender, self._status(sender))] if is_new else []

    # Recovery by copies.

    def _take_copy(self, sender: int, copied: Copied, now: float) -> Sent:
        ours = copied.asker == self._incarnation
        if self.takes_part or not ours or copied.memory.generation < self._agreed:
            return []
        self._copies[sender] = copied.memory
        generation = copied.memory.generation
        alike = [it for it in self._copies.values() if it.generation == generation]
        if len(alike) < self._majority:
            return []
        self.acceptor.begin(_united(alike), now)
        return self._statuses()

    # A new generation.

    def _propose(self, now: float) -> Sent:
        latest = max([self.generation, self._agreed, *(it for it, _ in self._heard.values())])
        number = max(latest[0] + 1, *self.acceptor.incarnations.values())
        # The bits tell it from another one of this number, which all may have forgotten.
        self._proposed, self._agreements = (number, self._dice.getrandbits(63)), {}
        self._begin_at = now + _ASK_SECONDS
        own = self._agree(self.index, self._proposed, now)
        asked = self._to_all(Propose(self._incarnation, self._proposed))
        return asked + [it for it in own if it[0] != self.index]

    def _agree(self, sender: int, generation: Generation, now: float) -> Sent:
        # A generation that this member has forgotten is below its incarnation.
        if generation <= max(self._agreed, self.generation, (self._incarnation, -1)):
            return []
        # Until then an acceptance of this member's earlier life may complete a write.
        if now < self._started + ACCEPT_SECONDS:
            return []
        if self.takes_part and len(self.up(now)) >= self._majority:
            return []
        agreed = Agreed(self._incarnation, generation, self.acceptor.memory(now))
        self._agreed, self.acceptor.takes_part = generation, False
        self._propose_at = now + self._pause * self._dice.uniform(1.0, 3.0)
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        if generation != self._proposed:
            self._proposed, self._agreements = NEVER, {}
        if sender == self.index:
            return self._count_agreement(sender, agreed, now)
        return [(sender, agreed)]

    def _count_agreement(self, sender: int, agreed: Agreed, now: float) -> Sent:
        if agreed.generation != self._proposed:
            return []
        self._agreements[sender] = agreed
        lately = {it for it, (_, at) in self._heard.items() if now - at < _SILENCE_SECONDS}
        if len(self._agreements) < self._majority or lately - self._agreements.keys():
            return []
        return self._begin_generation(now)

    def _begin_generation(self, now: float) -> Sent:
        """Begin it with the most advanced memory among those who have agreed."""
        memories = [it.memory for it in self._agreements.values()]
        newest = max(it.generation for it in memories)
        united = _united([it for it in memories if it.generation == newest])
        incarnations = {member: it.incarnation for member, it in self._agreements.items()}
        memory = Memory(
            self._proposed, united.floor, united.held, united.promised,
            united.incarnations | incarnations,
        )  # fmt: skip
        self._proposed, self._agreements = NEVER, {}
        others = [it for it in incarnations if it != self.index]
        self._install(memory, now)
        return [(it, Install(self._incarnation, memory)) for it in others] + self._statuses()

    def _install(self, memory: Memory, now: float) -> None:
        ours = memory.incarnations.get(self.index) == self._incarnation
        if ours and self._agreed == memory.generation and not self.takes_part:
            self.acceptor.begin(memory, now)

    # Registers that are empty everywhere.

    def _sweep(self) -> Sent:
        self._confirmed = {}
        empty = self.acceptor.empty()
        if self.size == 1:
            self.acceptor.drop(empty)
        asked = Empty(self._incarnation, self.generation, empty, asks=True)
        return self._to_all(asked) if empty else []

    def _hear_empty(self, sender: int, message: Empty) -> Sent:
        if message.asks:
            both = self.acceptor.agreed_empty(message.empty)
            return [(sender, Empty(self._incarnation, self.generation, both, asks=False))]
        self._confirmed[sender] = message
        if len(self._confirmed) == len(self._others):
            first, *others = (it.empty for it in self._confirmed.values())
            empty = {key: it for key, it in first.items() if all(o.get(key) == it for o in others)}
            lives = {member: it.incarnation for member, it in self._confirmed.items()}
            before, earlier_lives = self._found
            # A member may restart between its answer and the last one; then two sweeps differ.
            if lives == earlier_lives:
                self.acceptor.drop({key: it for key, it in empty.items() if before.get(key) == it})
            self._found, self._confirmed = (empty, lives), {}
        return []


def _united(memories: Iterable[Memory]) -> Memory:
    """The memory that follows from several of one generation: the latest of each register."""
    memories = list(memories)
    held: dict[str, Held] = {}
    for memory in memories:
        for key, it in memory.held.items():
            if key not in held or it.accepted > held[key].accepted:
                held[key] = it
    incarnations: dict[int, int] = {}
    for memory in memories:
        for member, incarnation in memory.incarnations.items():
            incarnations[member] = max(incarnation, incarnations.get(member, 0))
    return Memory(
        memories[0].generation,
        max(it.floor for it in memories),
        held,
        {key: max(it.promised.get(key, it.floor) for it in memories) for key in held},
        incarnations,
    )
