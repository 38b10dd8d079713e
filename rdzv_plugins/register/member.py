"""One member: it answers clients, recovers its memory from the others, and agrees on generations.

A member that starts has no memory and asks the others for copies. It takes part once other members,
a majority of all, have sent them. If too few members take part for that, a majority agrees on a new
generation instead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from rdzv_plugins.register.acceptor import Acceptor
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
"""A writer gives up its accept phase after this time. A new member waits as long before it agrees
to a generation; by then no acceptance from before its restart can complete a write."""

STATUS_SECONDS = 0.25
"""Seconds between two `Status` messages of a member."""

# A member that has sent no `Status` for this time counts as gone.
_SILENCE_SECONDS = 4 * STATUS_SECONDS
# Seconds between two requests for copies.
_COPY_SECONDS = 0.1
# Seconds between two proposals. The pause grows, so that one of several proposers succeeds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 0.5

Sent = list[tuple[int, PeerMessage]]
"""Addressees and messages."""


class Member:
    """The state of one member. Its driver delivers messages, and calls `tick` often.

    Args:
        incarnation: larger than at each earlier start of this member, such as the wall clock.
        now: seconds of the driver's monotonic clock.
    """

    sweep_seconds = 5.0

    def __init__(
        self, index: int, size: int, incarnation: int, now: float, dice: random.Random
    ) -> None:
        self.index, self.size = index, size
        self._dice = dice
        self._others = [it for it in range(size) if it != index]
        self._majority = size // 2 + 1
        # By peer: the generation of its last `Status`, and when that came.
        self._heard: dict[int, tuple[Generation, float]] = {}
        self._status_at = self._sweep_at = now
        self.acceptor = Acceptor(index, incarnation)
        self._start(incarnation, now)

    def _start(self, incarnation: int, now: float) -> None:
        """Begin a new incarnation without memory."""
        known, self.acceptor = self.acceptor.incarnations, Acceptor(self.index, incarnation)
        self.acceptor.learn(known)
        self._started = now
        # The latest generation to which this member agreed, and the generation that it proposes.
        self._agreed: Generation = NEVER
        self._proposed: Generation = NEVER
        self._agreements: dict[int, Agreed] = {}
        self._begin_at = now
        self._copies: dict[int, Memory] = {}
        self._confirmed: dict[int, Empty] = {}
        # Results of the last sweep: the empty registers, and the incarnations of the others.
        self._swept: tuple[dict[str, Ballot], dict[int, int]] = {}, {}
        self._copy_at = now
        self._pause = _FIRST_PAUSE
        self._propose_at = now + ACCEPT_SECONDS

    @property
    def takes_part(self) -> bool:
        return self.acceptor.takes_part

    @property
    def generation(self) -> Generation:
        return self.acceptor.generation

    def up(self, now: float) -> set[int]:
        """The members that take part in this member's generation, as far as this member knows."""
        own = {self.index} if self.takes_part else set()
        return own | self._at_work(self.generation, now)

    def answer(self, request: Request, now: float) -> Answer:
        return self.acceptor.answer(request, now)

    def tick(self, now: float) -> Sent:
        """The messages that are due now."""
        sent: Sent = []
        if now >= self._status_at:
            self._status_at = now + STATUS_SECONDS
            sent += self._statuses()
        if self.takes_part and not self._is_left_behind(now):
            if now >= self._sweep_at:
                self._sweep_at = now + self.sweep_seconds
                sent += self._sweep()
            return sent
        if now >= self._copy_at:
            self._copy_at = now + _COPY_SECONDS
            sent += self._to_all(Copy(self._incarnation))
        if len(self._agreements) >= self._majority and now >= self._begin_at:
            return sent + self._begin_generation(now)
        if now >= self._propose_at and not self._can_copy(now):
            sent += self._propose(now)
        return sent

    def hear(self, sender: int, message: PeerMessage, now: float) -> Sent:
        """The replies to a message of another member."""
        acceptor, known = self.acceptor, self.acceptor.incarnations.get(sender, 0)
        if message.incarnation < known:
            return [(sender, self._status(sender))]
        is_new = message.incarnation > known
        acceptor.learn({sender: message.incarnation})
        match message:
            case Status(_, generation, known):
                if known > self._incarnation:
                    # This host's clock was set back between two starts.
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
        """The other members that take part in this generation; not after `_SILENCE_SECONDS`."""
        return {
            peer
            for peer, (theirs, at) in self._heard.items()
            if theirs == generation and now - at < _SILENCE_SECONDS
        }

    def _can_copy(self, now: float) -> bool:
        """Whether enough others take part in one generation to recover from their copies."""
        generations = {theirs for theirs, _ in self._heard.values()} - {NEVER}
        return any(len(self._at_work(it, now)) >= self._majority for it in generations)

    def _is_left_behind(self, now: float) -> bool:
        """Whether others work in a later generation, and no majority in this member's own."""
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
                # This memory belongs to an older history, or the proposal has failed.
                latest = max(self._incarnation, self.generation[0], self._agreed[0])
                self._start(latest + 1, now)
            self._copy_at = now
        return [(sender, self._status(sender))] if is_new else []

    # Recovery by copies.

    def _take_copy(self, sender: int, copied: Copied, now: float) -> Sent:
        generation = copied.memory.generation
        if self.takes_part or copied.asker != self._incarnation or generation < self._agreed:
            return []
        self._copies[sender] = copied.memory
        copies = [it for it in self._copies.values() if it.generation == generation]
        if len(copies) < self._majority:
            return []
        self.acceptor.begin(_merged(copies), now)
        return self._statuses()

    # Methods that agree on a new generation.

    def _propose(self, now: float) -> Sent:
        latest = max([self.generation, self._agreed, *(it for it, _ in self._heard.values())])
        number = max(latest[0] + 1, *self.acceptor.incarnations.values())
        # All members may have forgotten a generation with this number; the random bits differ.
        self._proposed, self._agreements = (number, self._dice.getrandbits(63)), {}
        self._begin_at = now + _COPY_SECONDS
        own = self._agree(self.index, self._proposed, now)
        asked = self._to_all(Propose(self._incarnation, self._proposed))
        return asked + [it for it in own if it[0] != self.index]

    def _agree(self, sender: int, generation: Generation, now: float) -> Sent:
        # Any generation that this member has forgotten has a smaller number than its incarnation.
        if generation <= max(self._agreed, self.generation, (self._incarnation, -1)):
            return []
        # Before that, an acceptance from before this member's restart may complete a write.
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
        """Begin the proposed generation with the latest memory of the members that agreed."""
        memories = [it.memory for it in self._agreements.values()]
        newest = max(it.generation for it in memories)
        merged = _merged([it for it in memories if it.generation == newest])
        incarnations = {member: it.incarnation for member, it in self._agreements.items()}
        memory = replace(
            merged, generation=self._proposed, incarnations=merged.incarnations | incarnations
        )
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
            confirmed = [it.empty.items() for it in self._confirmed.values()]
            empty = dict(set(confirmed[0]).intersection(*confirmed))
            lives = {member: it.incarnation for member, it in self._confirmed.items()}
            before, earlier_lives = self._swept
            # A member may restart between its answer and the last answer; then two sweeps differ.
            if lives == earlier_lives:
                self.acceptor.drop(dict(empty.items() & before.items()))
            self._swept, self._confirmed = (empty, lives), {}
        return []


def _merged(memories: Sequence[Memory]) -> Memory:
    """Merge memories of one generation: the latest value of each register."""
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
