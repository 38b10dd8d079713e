"""A client's part: it changes or reads registers with the answers of a majority."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TypeAlias

from msgspec.structs import replace

from rdzv_plugins.register.member import ACCEPT_SECONDS
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
    Prepare,
    Promised,
    Read,
    Refused,
    Request,
)

Change: TypeAlias = Callable[[bytes | None], bytes | None]
"""From a register's value to its next value; None: the register is empty."""

Sent = list[tuple[int, Request]]
"""Addressees and requests."""


class Outcome(Enum):
    """How an attempt ended."""

    DONE = auto()
    AGAIN = auto()
    FULL = auto()


def keep(value: bytes | None) -> bytes | None:
    """The change that settles which value a majority holds, and keeps the value."""
    return value


class Proposer:
    """One client's knowledge of the members; ``dice`` must differ between clients."""

    def __init__(self, size: int, dice: random.Random) -> None:
        self.size, self.majority = size, size // 2 + 1
        self._dice = dice
        self._number = 0
        self._generations: dict[int, Generation] = {}

    @property
    def generation(self) -> Generation:
        """The generation in which most members take part, as far as this client knows."""
        counted = Counter(it for it in self._generations.values() if it != NEVER)
        return max(counted, key=lambda it: (counted[it], it), default=NEVER)

    def ballot(self) -> Ballot:
        """A ballot above all ballots that this client has seen."""
        self._number += 1
        return self._number, self._dice.getrandbits(63) + 1

    def note(self, member: int, answer: Answer) -> None:
        if isinstance(answer, Refused):
            self._generations[member] = answer.generation
            self._number = max(self._number, answer.ballot[0])


class _Attempt:
    """One attempt at a request.

    Attributes:
        outcome: None: the attempt goes on.
        is_doubtful: a member may have accepted the value of this attempt.
    """

    is_doubtful = False
    _is_full = False

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.generation = proposer.generation
        self._failed: set[int] = set()
        self.outcome: Outcome | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether the members have a new generation since the attempt began."""
        return self.generation != self._proposer.generation

    def gone(self, member: int) -> None:
        """Note that a member does not answer, or refuses."""
        self._failed.add(member)
        if (
            self.outcome is None
            and len(self._failed) > self._proposer.size - self._proposer.majority
        ):
            self.outcome = self._failure

    @property
    def _failure(self) -> Outcome:
        return Outcome.FULL if self._is_full else Outcome.AGAIN

    def _refused(self, member: int, answer: Answer) -> None:
        self._proposer.note(member, answer)
        self._is_full |= isinstance(answer, Refused) and answer.full
        self.gone(member)


class Changing(_Attempt):
    """An attempt to change a register.

    Attributes:
        before: what the change was applied to.
        after: the result. If ``outcome`` is DONE, the register held it then; otherwise the register
            may come to hold it later.
    """

    def __init__(self, proposer: Proposer, key: str, change: Change) -> None:
        super().__init__(proposer)
        self._key, self._change = key, change
        self.ballot = proposer.ballot()
        self._promises: dict[int, Promised] = {}
        self._accepted: set[int] = set()
        self._sent_at: float | None = None
        self.before: Held = Held()
        self.after: bytes | None = None

    def begin(self) -> Sent:
        """The first requests: ask all members for a promise."""
        prepare = Prepare(self.generation, self._key, self.ballot)
        return [(member, prepare) for member in range(self._proposer.size)]

    def gone(self, member: int) -> None:
        if self._sent_at is None:
            super().gone(member)
        elif member in self._promises and self.outcome is None:
            self.outcome = self._failure

    def hear(self, member: int, answer: Answer, now: float) -> Sent:
        """The requests that follow a member's answer; ``now`` is in monotonic seconds."""
        if self.outcome is not None:
            return []
        match answer:
            case Promised() if self._sent_at is None:
                self._promises[member] = answer
                if len(self._promises) == self._proposer.majority:
                    return self._accept(now)
            case Accepted() if self._sent_at is not None:
                self._accepted.add(member)
                if len(self._accepted) == self._proposer.majority:
                    late = now > self._sent_at + ACCEPT_SECONDS
                    self.outcome = Outcome.AGAIN if late else Outcome.DONE
                    return [] if late else self._copies()
            case Refused():
                self._refused(member, answer)
        return []

    def _accept(self, now: float) -> Sent:
        promised = [it.held for it in self._promises.values()]
        self.before = max(promised, key=lambda it: it.accepted)
        self.after = self._change(self.before.value)
        if self.after == self.before.value and len({it.accepted for it in promised}) == 1:
            self.outcome = Outcome.DONE  # A majority holds the value already.
            return []
        self._sent_at, self.is_doubtful = now, True
        age = self.before.age if self.after == self.before.value else 0.0
        held = Held(self.ballot, self.after, age)
        quorum = {member: it.incarnation for member, it in self._promises.items()}
        self._request = Accept(self.generation, self._key, held, quorum)
        return [(member, self._request) for member in quorum]

    def _copies(self) -> Sent:
        copy = replace(self._request, quorum={})
        members = range(self._proposer.size)
        return [(member, copy) for member in members if member not in self._promises]


class Rivals:
    """What other clients have done to a register since this client's first attempt to change it.

    Concurrent attempts make each other fail, and reads do not. Therefore a client reads between two
    attempts, and stops if nothing is left to do.

    Args:
        is_put: whether a value was written unconditionally; None: this client's change has a
            condition.
    """

    def __init__(self, change: Change, is_put: Callable[[bytes], bool] | None = None) -> None:
        self._change, self._is_put = change, is_put
        self._first: Ballot | None = None
        self._ours: Ballot = NEVER

    def note(self, attempt: Changing) -> None:
        """Remember a failed attempt."""
        if attempt.is_doubtful:
            self._ours = attempt.ballot

    def leave_nothing(self, held: Held) -> bool:
        """Whether the change is done, or has no effect, if a majority holds ``held``.

        If another put followed, this put need not be written: no reader can tell the difference.
        """
        self._first = held.accepted if self._first is None else self._first
        if held.accepted < self._ours:
            return False  # A majority may still accept this client's own value.
        value, is_put = held.value, self._is_put
        followed = value is not None and is_put is not None and is_put(value)
        return (followed and held.accepted > self._first) or self._change(value) == value


class Look(_Attempt):
    """An attempt to read registers.

    Args:
        wanted: keys, or a prefix of keys.

    Attributes:
        held: by key, the registers on which a majority agrees.
        unsettled: the keys of the other registers. Read them again, or settle them with `keep`.
    """

    def __init__(self, proposer: Proposer, wanted: Sequence[str] | str) -> None:
        super().__init__(proposer)
        self._wanted = wanted
        self._answers: dict[int, Found] = {}
        self.held: dict[str, Held] = {}
        self.unsettled: list[str] = []

    def begin(self) -> Sent:
        request: Request
        if isinstance(self._wanted, str):
            request = List(self.generation, self._wanted)
        else:
            request = Read(self.generation, [*self._wanted])
        return [(member, request) for member in range(self._proposer.size)]

    @property
    def is_enough(self) -> bool:
        """Whether a majority has answered; its answers may differ."""
        return len(self._answers) >= self._proposer.majority

    def hear(self, member: int, answer: Answer, now: float) -> Sent:
        if self.outcome is None and isinstance(answer, Found):
            self._answers[member] = answer
            if self.is_enough:
                self._compare()
                everybody = len(self._answers) + len(self._failed) == self._proposer.size
                if everybody or not self.unsettled:
                    self.outcome = Outcome.DONE
        elif self.outcome is None:
            self._refused(member, answer)
        return []

    def end(self) -> None:
        """Wait for no more answers."""
        if self.outcome is None and self.is_enough:
            self.outcome = Outcome.DONE

    def _compare(self) -> None:
        answers = [it.held for it in self._answers.values()]
        self.held, self.unsettled = {}, []
        for key in {key: None for it in answers for key in it}:
            held = [it.get(key, Held()) for it in answers]
            ballot, number = Counter(it.accepted for it in held).most_common(1)[0]
            if number >= self._proposer.majority:
                self.held[key] = next(it for it in held if it.accepted == ballot)
            else:
                self.unsettled.append(key)
