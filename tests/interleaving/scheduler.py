"""Threads that take turns, and the parts of `threading`, `queue` and `time` that make them.

One thread runs at a time, until its next point: each operation on a lock, condition, event, queue
or thread is one, and with them each request to a `MemoryServer`. The seed draws the thread
that runs on. Time is virtual: it moves when nobody can run, and now and then a little earlier, as
where a thread is slow.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty
from types import SimpleNamespace
from typing import Any

__all__ = ["Scheduler", "StuckError"]

_LONGEST = 3600.0
# What each operation takes; without it, a loop until a deadline would have no end.
_OPERATION = 1e-6
_MOST_TURNS = 60_000
# Real seconds within which a thread must reach its next point.
_PATIENCE = 20.0


class StuckError(Exception):
    """Nobody can run any more, or they run for ever."""


class _AbandonedError(BaseException):
    """Ends the threads of a play that has failed."""


class Task(threading.Thread):
    """A thread that runs when it is its turn."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        super().__init__(name=name or "task", daemon=True)
        self.call: Callable[[], object] = lambda: target(*args)
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.wakes: float | None = None
        self.begun = self.ended = False
        self.error: BaseException | None = None
        self.pending: BaseException | None = None
        self._scheduler = scheduler

    def start(self) -> None:
        self.begun = True
        self._scheduler.tasks.append(self)
        super().start()
        self._scheduler.point()

    def run(self) -> None:
        self.turn.acquire()
        try:
            if self._scheduler.failure is None:
                self.call()
        except _AbandonedError:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._scheduler.pass_on(self)

    def join(self, timeout: float | None = None) -> None:
        self._scheduler.wait(lambda: self.ended, timeout)

    def is_alive(self) -> bool:
        self._scheduler.point()
        return self.begun and not self.ended

    def may_run(self, now: float) -> bool:
        if self.ended:
            return False
        due = self.wakes is not None and self.wakes <= now
        return self.ready is None or due or self.pending is not None or self.ready()


class Scheduler:
    """Draws all from ``seed``."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.turns = 0
        self.tasks: list[Task] = []
        self.failure: StuckError | None = None
        self._current: Task | None = None
        self._over = threading.Semaphore(0)
        # Few switches find other faults than many.
        self._switches = self.random.choice((0.03, 0.2, 0.7))
        self._haste = self.random.choice((0.0, 0.0, 0.005))

    def run(self, *calls: tuple[str, Callable[[], object]]) -> list[Task]:
        """Run the calls beside each other until they and all that they began have ended."""
        began = [Task(self, call, name=name) for name, call in calls]
        for task in began:
            task.begun = True
            self.tasks.append(task)
            threading.Thread.start(task)
        self._hand_over(None)
        if not self._over.acquire(timeout=_PATIENCE):
            raise StuckError("a thread waits for something that is no point")
        if self.failure is not None:
            raise self.failure
        for task in began:
            if task.error is not None:
                raise task.error
        return began

    def point(self) -> None:
        """Another may run before what follows."""
        task = self._mine()
        if task is None:
            return
        self.now += _OPERATION
        if self.random.random() < self._switches:
            self._hand_over(task)

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Let others run until ``ready`` or the time is over; returns what ``ready`` says then."""
        task = self._mine()
        if task is None:
            return ready()
        task.ready = ready
        task.wakes = None if timeout is None else self.now + timeout
        self._hand_over(task)
        task.ready = task.wakes = None
        return ready()

    def interrupt(self, task: Task, error: BaseException) -> None:
        """Raise ``error`` in another thread at its next turn, as a signal does."""
        task.pending = error

    def pass_on(self, task: Task) -> None:
        if self.failure is None:
            self._hand_over(task)
        elif all(each.ended for each in self.tasks):
            self._over.release()

    def _mine(self) -> Task | None:
        task = threading.current_thread()
        return task if isinstance(task, Task) and task is self._current else None

    def _hand_over(self, task: Task | None) -> None:
        chosen = self._choose()
        if chosen is not None and chosen is not task:
            self._current = chosen
            chosen.turn.release()
            if task is not None and not task.ended:
                task.turn.acquire()
        if task is None or task.ended:
            return
        if self.failure is not None:
            raise _AbandonedError
        if task.pending is not None:
            error, task.pending = task.pending, None
            task.ready = task.wakes = None
            raise error

    def _choose(self) -> Task | None:
        if self.failure is not None:
            return None
        self.turns += 1
        able = [task for task in self.tasks if task.may_run(self.now)]
        asleep = [task.wakes for task in self.tasks if not task.ended and task.wakes is not None]
        asleep = [at for at in asleep if at > self.now]
        if asleep and (not able or self.random.random() < self._haste):
            self.now = min(asleep)
            able = [task for task in self.tasks if task.may_run(self.now)]
        if self.turns % 1000 == 0:
            self.tasks = [task for task in self.tasks if not task.ended]
        if all(task.ended for task in self.tasks):
            self._over.release()
            return None
        if not able or self.turns > _MOST_TURNS or self.now > 1000.0 + _LONGEST:
            self._fail()
            return None
        return self.random.choice(able)

    def _fail(self) -> None:
        alive = [task for task in self.tasks if not task.ended]
        names = ", ".join(task.name for task in alive)
        self.failure = StuckError(f"after {self.turns} turns, {self.now - 1000:g} s: {names}")
        for task in alive:
            task.turn.release()
        if not alive:
            self._over.release()

    def _monotonic(self) -> float:
        if self.failure is not None:
            self.now += 1.0  # No loop waits for its deadline in vain.
        return self.now

    # What stands in the place of the standard library's.

    @property
    def threading(self) -> SimpleNamespace:
        return SimpleNamespace(
            Thread=lambda **options: Task(self, **options),
            Lock=lambda: Condition(self),
            Condition=lambda: Condition(self),
            Event=lambda: Event(self),
            current_thread=threading.current_thread,
            # Signals are sent by the plays: none of these threads is the main one.
            main_thread=lambda: None,
        )

    @property
    def time(self) -> SimpleNamespace:
        return SimpleNamespace(
            monotonic=self._monotonic,
            time=lambda: self.now,
            monotonic_ns=lambda: int(self.now * 1e9) + self.turns,
            sleep=lambda seconds: self.wait(lambda: False, seconds),
        )


class Condition:
    """A lock, and a condition with it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held = False
        self._waiting: list[list[bool]] = []

    def __enter__(self) -> bool:
        self._scheduler.point()
        self._scheduler.wait(lambda: not self._held) if self._held else None
        self._held = True
        return True

    def __exit__(self, *_: object) -> None:
        self._held = False
        self._scheduler.point()

    def wait(self, timeout: float | None = None) -> bool:
        told = [False]
        self._waiting.append(told)
        self._held = False
        try:
            return self._scheduler.wait(lambda: told[0], timeout)
        finally:
            self._scheduler.wait(lambda: not self._held) if self._held else None
            self._held = True

    def notify_all(self) -> None:
        for told in self._waiting:
            told[0] = True
        self._waiting.clear()


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False

    def is_set(self) -> bool:
        self._scheduler.point()
        return self._set

    def set(self) -> None:
        self._scheduler.point()
        self._set = True
        self._scheduler.point()

    def wait(self, timeout: float | None = None) -> bool:
        self._scheduler.point()
        return self._set or self._scheduler.wait(lambda: self._set, timeout)


class Queue:
    """A `SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()

    def put(self, item: object) -> None:
        self._scheduler.point()
        self._items.append(item)
        self._scheduler.point()

    def get(self, timeout: float | None = None) -> Any:
        self._scheduler.point()
        if not self._items and not self._scheduler.wait(lambda: bool(self._items), timeout):
            raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        self._scheduler.point()
        if not self._items:
            raise Empty
        return self._items.popleft()
