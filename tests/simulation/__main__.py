"""Run seeds, look at one, hunt mutants, or write the page of the docs."""

from __future__ import annotations

import argparse
import ast
import sys
import time
from pathlib import Path

from .campaign import Totals, failure_report, first_caught, new_first_seed, run_seeds
from .mutants import MUTANTS
from .page import write_page
from .plan import AT_ONCE, KINDS, Focus, Plan
from .world import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5000, help="how many")
    parser.add_argument("--first", type=_seed, default=None, help="the first; else a new one")
    parser.add_argument("--nodes", type=int, default=12, help="most nodes that start a run")
    parser.add_argument("--processes", type=int, default=None, help="else one a core")
    parser.add_argument("--seed", type=int, help="only this one, with all that happens in it")
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=(),
        choices=(*KINDS, *AT_ONCE),
        metavar="KIND",
        help="no other faults",
    )
    parser.add_argument(
        "--settings", nargs="+", default=(), metavar="NAME=VALUE", help="what is not to be drawn"
    )
    parser.add_argument("--notices", action="store_true", help="ask for many checkpoints")
    parser.add_argument(
        "--mutants",
        nargs="*",
        choices=MUTANTS,
        metavar="NAME",
        help="how many seeds each survives, of these or of all",
    )
    parser.add_argument("--page", type=Path, help="write the docs' page here")
    options = parser.parse_args()
    settings = dict(map(_setting, options.settings))
    focus = Focus(kinds=tuple(options.kinds), settings=settings, notices=options.notices)
    if options.seed is not None:
        return _show(options.seed, options.nodes, focus)
    first = new_first_seed() if options.first is None else options.first
    if options.mutants is not None:
        names = options.mutants or list(MUTANTS)
        return _hunt(names, first, options.seeds, options.processes)
    if options.page:
        return write_page(options.page, first, options.seeds, options.processes, _say)
    _say(f"seeds {first} to {first + options.seeds - 1}")
    totals = run_seeds(first, options.seeds, options.nodes, options.processes, _Progress(), focus)
    _say(str(totals))
    for result in totals.failed:
        _say(failure_report(result, options.nodes, focus))
    return 1 if totals.failed else 0


class _Progress:
    """A line every few seconds, and one for each seed that fails."""

    def __init__(self) -> None:
        self._next = 0.0
        self._told = 0

    def __call__(self, totals: Totals) -> None:
        for result in totals.failed[self._told :]:
            _say(f"seed {result.seed}: {result.violation}")
        self._told = len(totals.failed)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 5
            _say(f"{totals.seeds:,} seeds, {len(totals.failed)} failed, {totals.seconds:.0f} s")


def _show(seed: int, nodes: int, focus: Focus) -> int:
    _say(str(Plan.draw(seed, nodes, focus)))
    result = simulate(seed, nodes, traced=True, focus=focus)
    _say("\n".join(result.trace))
    _say(result.violation or f"all held; it stood still {result.settled:.1f} s after the faults")
    return 1 if result.violation else 0


def _hunt(names: list[str], first: int, seeds: int, processes: int | None) -> int:
    survivors = 0
    for name, survived, invariant in first_caught(names, first, seeds, processes):
        survivors += survived is None
        fate = "SURVIVED" if survived is None else f"{survived + 1:,} by {invariant}"
        _say(f"{name:24} {fate:40} {MUTANTS[name].breaks}")
    return 1 if survivors else 0


def _setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, ast.literal_eval(value)


def _seed(text: str) -> int | None:
    # An empty variable of make is no seed.
    return int(text) if text else None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
