"""Many seeds at a time, in a few processes."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import multiprocessing.pool
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rdzv_plugins.protocol.documents import NodeRecord, RoundDocument

from .mutants import MUTANTS, broken
from .plan import EVERYTHING, Focus
from .world import Result, simulate

__all__ = ["Totals", "failure_report", "first_caught", "new_first_seed", "run_seeds"]

_SEEDS_PER_TASK = 20
_TRACE_LINES = 40


@dataclass(slots=True)
class Totals:
    """Sums over seeds; `slowest` is the seed whose run took most of its bound to settle."""

    first: int
    most_nodes: int
    seeds: int = 0
    seconds: float = 0.0
    requests: int = 0
    rounds: int = 0
    given: int = 0
    checks: int = 0
    excused: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    waited: float = 0.0
    settled: list[float] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, 0)
    failed: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.requests += result.requests
        self.rounds += result.rounds
        self.given += result.given
        self.checks += result.checks
        self.excused += result.excused
        self.injected += result.injected
        self.waited = max(self.waited, result.waited)
        if result.violation:
            self.failed.append(result)
        else:
            self.settled.append(result.settled)
            self.slowest = max(self.slowest, (result.settled / result.bound, result.seed))

    def __str__(self) -> str:
        asked, agreed, saved = (
            self.injected[f"told: checkpoint {it}"] for it in ("asked for", "agreed", "saved")
        )
        return (
            f"seeds {self.first} to {self.first + self.seeds - 1} of up to {self.most_nodes} "
            f"nodes: {len(self.failed)} failed, {self.rounds:,} rounds, {self.requests:,} "
            f"requests, {self.checks:,} checks, {self.seconds:.0f} s; {asked:,} checkpoints asked "
            f"for, {agreed:,} agreed, {saved:,} saved, the longest wait {self.waited:.1f} s"
        )


def new_first_seed() -> int:
    """Another one each second, so that every run tries schedules that none has tried."""
    return int(time.time()) % 10_000_000 * 100_000


def run_seeds(
    first: int,
    count: int,
    most_nodes: int = 12,
    processes: int | None = None,
    progress: Callable[[Totals], None] | None = None,
    focus: Focus = EVERYTHING,
) -> Totals:
    """Simulate ``count`` seeds from ``first``; a few failures end it early."""
    totals, began = Totals(first, most_nodes), time.monotonic()
    tasks = (
        (range(seed, min(seed + size, first + count)), most_nodes, focus)
        for size in [_SEEDS_PER_TASK if most_nodes <= 12 else 1]
        for seed in range(first, first + count, size)
    )
    with _pool(processes) as pool:
        for results in pool.imap_unordered(_simulate_all, tasks):
            for result in results:
                totals.add(result)
            totals.seconds = time.monotonic() - began
            if progress is not None:
                progress(totals)
            if len(totals.failed) >= 5:
                break
    return totals


def first_caught(
    names: list[str], first: int, limit: int, processes: int | None = None
) -> Iterator[tuple[str, int | None, str]]:
    """For each mutant: its name, how many seeds it survived until it was caught, and by what.

    The plans are narrowed to what the mutant needs. None instead of a number: it outlived all
    ``limit`` seeds.
    """
    tasks = ((name, range(first, first + limit)) for name in names)
    with _pool(processes) as pool:
        yield from pool.imap(_hunt, tasks)


def failure_report(result: Result, most_nodes: int, focus: Focus = EVERYTHING) -> str:
    """What happened, in the last lines before the violation, and how to see it again."""
    traced = simulate(result.seed, most_nodes, traced=True, focus=focus).trace
    options = f" --nodes {most_nodes}" if most_nodes != 12 else ""
    options += f" {focus}" if str(focus) else ""
    shown = "\n".join(line[:200] for line in traced[-_TRACE_LINES:])
    return (
        f"seed {result.seed}: {result.violation}\n{shown}\n"
        f"reproduce: python -m tests.simulation --seed {result.seed}{options}"
    )


def _pool(processes: int | None) -> multiprocessing.pool.Pool:
    context = multiprocessing.get_context("fork")
    return context.Pool(processes or os.cpu_count() or 1, _prepare)


def _prepare() -> None:
    """Decode equal bytes once, as all nodes read them in one process; collect between seeds."""
    gc.disable()
    for kind in (NodeRecord, RoundDocument):
        kind.decode = functools.lru_cache(4096)(kind.decode)  # type: ignore[method-assign, assignment]


def _simulate_all(task: tuple[range, int, Focus]) -> list[Result]:
    seeds, most_nodes, focus = task
    results = [simulate(seed, most_nodes, focus=focus) for seed in seeds]
    gc.collect()  # A world and its hosts hold one another.
    return results


def _hunt(task: tuple[str, range]) -> tuple[str, int | None, str]:
    name, seeds = task
    with broken(name):
        for survived, seed in enumerate(seeds):
            if survived % _SEEDS_PER_TASK == 0:
                gc.collect()
            violation = simulate(seed, focus=MUTANTS[name].plans).violation
            if violation:
                return name, survived, violation.partition(":")[0]
    return name, None, ""
