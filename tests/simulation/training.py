"""The steps of workers in virtual time: they train on while their agent hangs or is cut off."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rdzv_plugins.protocol.progress import Progress

Violated = Callable[[str, str], Any]


@dataclass
class Proposal:
    """A step at which workers wait; ``saves``: whether they save there; None: not settled."""

    step: int
    saves: bool | None = None


@dataclass
class Rank:
    """One worker.

    Attributes:
        ends: when its next step ends.
        waits: the proposal for which it waits, and since when.
        stepped: when its last step ended.
        hangs: it does no further step.
    """

    pace: float
    ends: float
    step: int = -1
    passed: int = 0
    waits: tuple[Proposal, float] | None = None
    saved: int = 0
    saves: set[int] = field(default_factory=set)
    stepped: float = 0.0
    hangs: bool = False


class Trainings:
    """All workers of a run, by world: what one of them answers, all must."""

    def __init__(self, now: Callable[[], float], violated: Violated) -> None:
        self.now, self.violated = now, violated
        self.worlds: dict[str, list[Training]] = {}
        self.saved_at: dict[str, set[int]] = {}
        # By world and node: when the last step ended of the first worker that hangs.
        self.hung: dict[tuple[str, str], float] = {}
        # The longest that a worker waited at a step, in seconds.
        self.waited = 0.0

    def judge(self, world: str, me: Rank, number: int, saves: bool) -> None:
        """A worker goes on from a step, at which it saves or does not."""
        saved_at = self.saved_at.setdefault(world, set())
        if not saves:
            if number in saved_at:
                self.violated("one checkpoint", f"a rank passes {number} of {world}, others save")
            return
        saved_at.add(number)
        for rank in (
            rank for other in self.worlds[world] for rank in other.ranks if rank is not me
        ):
            passes = rank.step > number or (rank.step == number and rank.waits is None)
            if passes and number not in rank.saves:
                self.violated("one checkpoint", f"a rank has passed {number} of {world}")


class Training:
    """The workers of one host; see `Workers`."""

    def __init__(
        self, all_of_them: Trainings, chance: random.Random, pace: float, save_timeout: float
    ) -> None:
        self._all, self._chance, self._pace = all_of_them, chance, pace
        self._save_timeout = save_timeout
        self.ranks: list[Rank] = []
        self._world = ""
        self._proposals: list[Proposal] = []
        self._told = 0
        # As `Steps`: from when on a rank that does no step stands still.
        self._counts_from = 0.0

    def begin(self, world: str) -> None:
        now, chance = self._all.now(), self._chance
        self._world, self._proposals, self._told = world, [], 0
        self._counts_from = 0.0
        self.ranks = [
            Rank(pace := self._pace * chance.uniform(0.9, 1.1), now + chance.uniform(0, 3) * pace)
            for _ in range(2)
        ]
        self._all.worlds.setdefault(world, []).append(self)

    def end(self) -> None:
        """The workers are stopped, and what they did counts no more."""
        self._advance()
        self._note_waits(*self.ranks)
        if self in self._all.worlds.get(self._world, ()):
            self._all.worlds[self._world].remove(self)
        self.ranks, self._proposals = [], []

    def progress(self) -> Progress | None:
        self._advance()
        if not self.ranks or any(rank.step < 0 for rank in self.ranks):
            return None
        steps = [rank.step for rank in self.ranks]
        slowest = min(self.ranks, key=lambda it: (it.step, it.stepped))
        stood = self._all.now() - max(slowest.stepped, self._counts_from)
        return Progress(
            step=min(steps),
            fastest=max(steps),
            milliseconds=int(1000 * self._pace),
            saved=min(rank.saved for rank in self.ranks),
            stood=int(1000 * max(0.0, stood)),
        )

    def probe(self) -> None: ...

    def hang(self, label: str) -> None:
        """Have one of them do no further step."""
        self._advance()
        rank = self._chance.choice(self.ranks)
        rank.hangs = True
        self._all.hung.setdefault((self._world, label), rank.stepped)

    @property
    def hangs(self) -> bool:
        return any(rank.hangs for rank in self.ranks)

    def propose(self, step: int) -> None:
        self._advance()
        self._counts_from = math.inf
        self._proposals.append(Proposal(step))

    def settle(self, step: int, saves: bool) -> None:
        self._advance()
        for it in self._proposals:
            if it.step == step and it.saves is None:
                it.saves = saves
        self._counts_from = self._all.now() + (self._save_timeout if saves else 0.0)
        self._advance()

    def release(self) -> None:
        if self._counts_from < math.inf:
            self._counts_from = min(self._counts_from, self._all.now())

    def has_saved(self) -> bool:
        """Whether a worker has saved since the last call."""
        self._advance()
        before, self._told = self._told, sum(rank.saved for rank in self.ranks)
        return self._told > before

    @property
    def waits_since(self) -> float | None:
        """Since when a worker waits at a step that is not settled; None: none does."""
        self._advance()
        return min((rank.waits[1] for rank in self.ranks if rank.waits is not None), default=None)

    def _advance(self) -> None:
        for rank in self.ranks:
            while self._moves(rank):
                pass

    def _moves(self, rank: Rank) -> bool:
        now = self._all.now()
        if rank.hangs:
            return False
        if rank.waits is not None:
            proposal, _ = rank.waits
            if proposal.saves is None:
                return False
            self._note_waits(rank)
            rank.waits = None
            self._answer(rank, rank.step, proposal.saves)
            rank.ends = now + rank.pace
        if rank.ends > now:
            return False
        before, rank.step, rank.stepped = rank.step, rank.step + 1, rank.ends
        for proposal in self._proposals[rank.passed :]:
            if proposal.step > rank.step:
                break
            rank.passed += 1
            if 0 <= before < proposal.step:
                rank.waits = proposal, rank.ends
                return True
        rank.ends += rank.pace
        self._all.judge(self._world, rank, rank.step, False)
        return True

    def _note_waits(self, *ranks: Rank) -> None:
        waits = [self._all.now() - it.waits[1] for it in ranks if it.waits is not None]
        self._all.waited = max([self._all.waited, *waits])

    def _answer(self, rank: Rank, number: int, saves: bool) -> None:
        if saves:
            rank.saves.add(number)
            rank.saved = number + 1
        self._all.judge(self._world, rank, number, saves)
