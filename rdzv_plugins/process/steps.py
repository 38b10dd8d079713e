"""What the workers of one node and their agent tell each other about steps, in shared memory.

Workers write the step that they have finished. The agent proposes steps at which all ranks of the
run save; a worker that reaches a proposed step waits until the run has agreed on it or withdrawn
it. Rule: checkpoint.

The memory is an array of 64-bit words, each with one writer:

- ``LATEST``: how many steps the agent has proposed in this round; ``RANKS``: the local world size.
- ``_PROPOSALS`` places for proposals, used in turn: the step and its `_Verdict`.
- One slot for each local rank: the last step plus 1, when it ended, the last step saved plus 1, its
  global rank, its process id, the descriptor of the memory of its stacks (`process.stacks`), the
  first step, when it ended, and when the worker imported this package.

No lock guards the words. The agent proposes a step, waits until every processor sees it, and only
then looks whether a worker has passed it.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable
from enum import IntEnum
from itertools import zip_longest
from typing import BinaryIO

import rdzv_plugins
from rdzv_plugins.process import stacks
from rdzv_plugins.process.worker import current
from rdzv_plugins.protocol.progress import Doing, Progress, Resumed, Trained

log = logging.getLogger(__name__)

# Indexes of words: in the head, in a proposal, and in a slot.
_LATEST, _RANKS = 0, 1
_FIRST_PROPOSAL, _PROPOSALS = 2, 16
_FIRST_SLOT = _FIRST_PROPOSAL + 2 * _PROPOSALS
_STEP, _ENDED, _SAVED, _PID, _RANK, _STACKS = 0, 1, 2, 3, 4, 5
_FIRST, _FIRST_ENDED, _IMPORTED, _SLOT = 6, 7, 8, 9
_MOST_RANKS, _MOST_STEPS = 1024, 2**52
_MILLISECOND = 1_000_000
_YEAR = 365 * 24 * 3_600_000  # In milliseconds: a limit of `Resumed.trained`.
_BYTES = 8 * (_FIRST_SLOT + _SLOT * _MOST_RANKS)

# Within this time a write is visible to every processor of the host.
_VISIBLE_SECONDS = 0.01
# Seconds that a worker waits: at a proposed step before it fails, and after its save for the other
# ranks.
_PATIENCE, _SAVED_PATIENCE = 300.0, 30.0
_PAUSE = 0.001
# Check whether a worker has ended only after this long without a step.
_SHORT_NANOSECONDS = 10**9
_NEVER = 1 << 62


class _Verdict(IntEnum):
    """What has become of a proposed step."""

    OPEN = 0
    """Not decided: a worker that reaches the step waits."""
    WITHDRAWN = 1
    """No rank saves for it."""
    AGREED = 2
    """Every rank saves at it."""
    OVER = 3
    """Every rank saves at it, and trains on: no worker waits for the end of its round."""


class UndecidedError(RuntimeError):
    """Whether all ranks save at this step is unknown, because the store did not answer in time."""


class Steps:
    """The agent's side of the shared memory, which is new in each round. No method raises.

    Args:
        warn: takes a line for the log.
        save_timeout: seconds that workers have to save at an agreed step.
    """

    def __init__(self, warn: Callable[[str], object], save_timeout: float = 0.0) -> None:
        self._warn, self._save_nanoseconds = warn, int(save_timeout * 1e9)
        self._warned = False
        # Only this descriptor gives access to the memory: a killed agent leaves nothing behind.
        self._memory: BinaryIO | None = None
        self._words: memoryview | None = None
        self._pace = _Pace()
        self._saved: list[int] = []
        # From when on a rank that does no step stands still: workers may wait at a proposal.
        self._counts_from = 0
        # By slot: the worker's step when it was probed, what it did then, and its stacks.
        self._probed: dict[int, tuple[int, Doing, str]] = {}
        # When the round began, how its training began, and the steps of the round before.
        self._began = 0
        self._resumed: Resumed | None = None
        self._trained: Trained | None = None

    def end(self) -> None:
        """Forget the round, but keep which steps were trained: its workers have ended."""
        if (words := self._words) is not None and (progress := self.progress()) is not None:
            slot = min(_slots(words), key=lambda it: words[it + _STEP])
            self._trained = Trained(
                words[slot + _FIRST],
                progress.step,
                words[slot + _FIRST_ENDED],
                words[slot + _ENDED],
            )
        self._words = None
        if self._memory is not None:
            self._memory.close()

    def begin(self, world_id: str) -> str | None:
        """The file of this round for its workers; None: there can be none."""
        self.end()
        self._pace, self._saved, self._probed, self._counts_from = _Pace(), [], {}, 0
        self._began, self._resumed = time.monotonic_ns(), None
        try:
            self._memory = open(os.memfd_create(world_id), "r+b")  # noqa: SIM115
            descriptor = self._memory.fileno()
            # Allocate all pages: without memory for a page, a write would end the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, _BYTES)
            self._words = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")
        except (OSError, AttributeError) as error:  # Only Linux has memfd_create.
            if not self._warned:
                self._warned = True
                self._warn(
                    f"step() and saved() have no effect, because this host has no shared memory "
                    f"for them ({error})"
                )
            return None
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def progress(self) -> Progress | None:
        """See `Workers.progress`."""
        words = self._words
        if words is None or not words[_RANKS]:
            return None
        slots = _slots(words)
        steps = [words[slot + _STEP] for slot in slots]
        slowest, fastest = min(steps), max(steps)
        # Other nodes refuse a record with a larger step.
        if slowest <= 0 or fastest > _MOST_STEPS:
            return None
        slow = min(slots, key=lambda it: (words[it], self._doing(it), words[it + _ENDED]))
        stood = time.monotonic_ns() - max(words[slow + _ENDED], self._counts_from)
        if stood > _SHORT_NANOSECONDS and not stacks.lives(*_offer(words, slow)):
            stood = 0
        return Progress(
            step=slowest - 1,
            fastest=fastest - 1,
            rank=words[slow + _RANK],
            milliseconds=self._pace.of(slowest, words[slow + _ENDED]),
            saved=min(fastest, *(words[slot + _SAVED] for slot in slots)),
            stood=max(0, stood) // _MILLISECOND,
            doing=self._doing(slow),
            resumed=self._how_it_resumed(words, slots),
        )

    def probe(self) -> None:
        """See `Workers.probe`."""
        words = self._words
        if words is None:
            return
        slots = [it for it in _slots(words) if words[it + _STACKS]]
        for slot, text in zip(slots, stacks.ask([_offer(words, it) for it in slots]), strict=True):
            waits = Doing.COLLECTIVE if stacks.is_in_a_collective(text) else Doing.OWN_CODE
            self._probed[slot] = words[slot], waits if text else Doing.NO_ANSWER, text

    def slowest(self) -> tuple[int, str]:
        """The rank that is behind, and its stacks. Continues the worker if it is stopped."""
        words, progress = self._words, self.progress()
        if words is None or progress is None:
            return 0, ""
        slot = next(it for it in _slots(words) if words[it + _RANK] == progress.rank)
        text = self._probed[slot][2] if slot in self._probed else ""
        return progress.rank, text or stacks.wake(*_offer(words, slot))

    def _doing(self, slot: int) -> Doing:
        words, known = self._words, self._probed.get(slot)
        if known is None or words is None or known[0] != words[slot]:
            return Doing.OWN_CODE
        return known[1]

    def _how_it_resumed(self, words: memoryview, slots: list[int]) -> Resumed:
        if self._resumed is None:
            since, trained = self._began, self._trained
            imported = max(since, *(words[slot + _IMPORTED] for slot in slots))
            stepped = max(imported, *(words[slot + _FIRST_ENDED] for slot in slots))
            first, lost, kept = min(words[slot + _FIRST] for slot in slots), None, 0
            if trained is not None and 0 <= first <= _MOST_STEPS:
                lost = trained.last + 1 - first
                kept = max(-_YEAR, trained.kept(lost) // _MILLISECOND)
            self._resumed = Resumed(
                (imported - since) // _MILLISECOND, (stepped - imported) // _MILLISECOND, lost, kept
            )
        return self._resumed

    def has_saved(self) -> bool:
        """Whether a local rank has saved since the last call."""
        words = self._words
        if words is None or not words[_RANKS]:
            return False
        before, self._saved = self._saved, [words[at + _SAVED] for at in _slots(words)]
        return any(now and now != was for now, was in zip_longest(self._saved, before))

    def propose(self, step: int) -> None:
        """See `Workers.propose`."""
        if (words := self._words) is not None:
            self._counts_from = _NEVER
            at = _proposal(words[_LATEST])
            words[at], words[at + 1] = step, _Verdict.OPEN
            # On some processors another process may see a later write first.
            time.sleep(_VISIBLE_SECONDS)
            words[_LATEST] += 1
            time.sleep(_VISIBLE_SECONDS)

    def settle(self, step: int, saves: bool) -> None:
        """See `Workers.settle`."""
        if (words := self._words) is not None:
            for index in range(max(0, words[_LATEST] - _PROPOSALS), words[_LATEST]):
                if words[_proposal(index)] == step:
                    verdict = _Verdict.AGREED if saves else _Verdict.WITHDRAWN
                    words[_proposal(index) + 1] = verdict
            self._counts_from = time.monotonic_ns() + (self._save_nanoseconds if saves else 0)

    def release(self) -> None:
        """See `Workers.release`."""
        if (words := self._words) is not None and words[_LATEST]:
            at = _proposal(words[_LATEST] - 1)
            if words[at + 1] == _Verdict.AGREED:
                words[at + 1] = _Verdict.OVER
                self._counts_from = time.monotonic_ns()


class _Pace:
    """How long a step takes, from two looks at the slowest rank."""

    def __init__(self) -> None:
        self._before: tuple[int, int] | None = None
        self._milliseconds = 0

    def of(self, steps: int, ended: int) -> int:
        """Milliseconds that the last steps took on average; ``ended``: in nanoseconds."""
        before = self._before
        if before is None or steps != before[0]:
            self._before = steps, ended
            if before is not None and steps > before[0]:
                # Not below 0: another rank may be the slowest now, with an earlier end.
                took = max(0, ended - before[1])
                self._milliseconds = took // (steps - before[0]) // _MILLISECOND
        return self._milliseconds


class Slot:
    """A worker's side of the shared memory: its round's memory and its own slot."""

    def __init__(self, path: str, world_id: str, local_rank: int, local_world_size: int) -> None:
        if not 0 <= local_rank < local_world_size <= _MOST_RANKS:
            raise ValueError(f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size}")
        with open(path, "r+b") as file:
            # Once the round is over, the agent's descriptor may be of another file.
            if f":{world_id} " not in os.readlink(f"/proc/self/fd/{file.fileno()}"):
                raise OSError(f"{path} is not of round {world_id}")
            self._words = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")
        self._slot = slot = _FIRST_SLOT + _SLOT * local_rank
        # Refuse a worker's child, which inherits the environment and may count its own steps.
        other = self._words[slot + _PID]
        if other not in (0, os.getpid()) and os.path.exists(f"/proc/{other}"):
            raise OSError(f"process {other} tells the steps of this rank")
        self._words[slot + _PID] = os.getpid()
        self._words[_RANKS] = local_world_size
        self._words[slot + _RANK] = local_rank
        # The number of proposals that this worker has passed.
        self._passed = 0
        self._saves_at: int | None = None

    def introduce(self, rank: int) -> None:
        """Tell the agent the global rank, and let it ask for this worker's stacks."""
        self._words[self._slot + _RANK] = min(max(0, rank), _MOST_STEPS)
        self._words[self._slot + _STACKS] = stacks.offer()

    def step(self, number: int, ended: int = 0) -> bool:
        """See `rdzv_plugins.step`; ``ended``: the step's end, in monotonic ns; 0: now."""
        words, slot = self._words, self._slot
        words[slot + _ENDED] = ended = ended or time.monotonic_ns()
        if not words[slot]:
            words[slot + _FIRST], words[slot + _FIRST_ENDED] = number, ended
            words[slot + _IMPORTED] = rdzv_plugins._imported
        if number + 1 < words[slot]:
            words[slot + _SAVED] = 0  # Steps have jumped back, so a later step may come once more.
        words[slot] = number + 1
        if (latest := words[_LATEST]) != self._passed:
            self._meet(number, latest)
        return self._saves_at == number

    def _meet(self, number: int, latest: int) -> None:
        """Wait for the verdicts on all proposals up to this step."""
        # A worker that passes several proposals at once must answer all of them alike. The oldest
        # place is left out, because the agent may be writing the next proposal there.
        for index in range(max(self._passed, latest - _PROPOSALS + 1), latest):
            at = _proposal(index)
            # Steps may jump back, so that a later proposal is for an earlier step.
            if self._words[at] > number and self._words[at + 1] != _Verdict.WITHDRAWN:
                return
            if self._words[at] <= number and self._await(at):
                self._saves_at = number
            self._passed = index + 1

    def _await(self, at: int) -> bool:
        deadline = time.monotonic() + _PATIENCE
        while (verdict := self._words[at + 1]) == _Verdict.OPEN:
            if time.monotonic() > deadline:
                raise UndecidedError(
                    f"after {_PATIENCE:g} s it is unknown whether all ranks save at step "
                    f"{self._words[at]}, because the run's store does not answer; this rank must "
                    "not differ from them"
                )
            time.sleep(_PAUSE)
        return verdict != _Verdict.WITHDRAWN

    def saved(self, number: int) -> None:
        """See `rdzv_plugins.saved`."""
        words = self._words
        words[self._slot + _SAVED] = number + 1
        if not (latest := words[_LATEST]):
            return
        at = _proposal(latest - 1)
        deadline = time.monotonic() + _SAVED_PATIENCE
        # Wait, because the round ends now, and a further step of this rank would be lost.
        while words[at] <= number and words[at + 1] == _Verdict.AGREED:
            if time.monotonic() > deadline or words[_LATEST] != latest:
                return
            time.sleep(_PAUSE)


def _slots(words: memoryview) -> list[int]:
    return [_FIRST_SLOT + _SLOT * rank for rank in range(min(words[_RANKS], _MOST_RANKS))]


def _offer(words: memoryview, slot: int) -> tuple[int, int]:
    """The process id of a worker, and the descriptor of the memory of its stacks."""
    return words[slot + _PID], words[slot + _STACKS]


def _proposal(index: int) -> int:
    """The index of a proposal's first word, by the proposal's number in the round."""
    return _FIRST_PROPOSAL + 2 * (index % _PROPOSALS)


_slot: Slot | None = None
# Whether this process has looked for its slot.
_looked = False


def _forget() -> None:
    global _slot, _looked
    _slot, _looked = None, False


os.register_at_fork(after_in_child=_forget)


def of_this_worker() -> Slot | None:
    """The slot of this process; None: it is no worker, or its agent's file cannot be used."""
    global _slot, _looked
    if _looked:
        return _slot
    _looked = True
    now = current()
    if now is None or now.steps_file is None:
        return None
    try:
        local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        slot = Slot(now.steps_file, now.world_id, local, size)
        slot.introduce(int(os.environ.get("RANK", local)))
        _slot = slot
    except (OSError, KeyError, ValueError) as error:
        log.warning("step() and saved() cannot tell the agent anything (%s)", error)
    return _slot
