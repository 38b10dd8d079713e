"""``docs/simulation.md``: what was run, what was injected, what was checked, what was caught."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

from . import invariants
from .campaign import Totals, failure_report, first_caught, run_seeds
from .mutants import MUTANTS

__all__ = ["write_page"]

_LARGE_SEEDS, _LARGE_NODES = 24, 200
_MUTANT_SEEDS = 30

_HEAD = """\
# The simulator: the protocol under faults

Written by `python -m tests.simulation --page docs/simulation.md`; do not edit.

The real code of `rdzv_plugins/protocol/` runs unchanged, as it
does under `handler.py`: a node is a generator of requests, and the simulator carries them out on an
in-memory store with real compare-and-set and expiry, over a network that delays and loses, for
hosts with clocks of their own rate (0.5 to 2), on virtual time. One seed draws the run's settings,
its hosts, their agents' manners and all its faults; the same seed and code give the same run, step
by step.

An agent behaves as torch's does: it waits for a round, exchanges roles with the agents of all other
participants over the c10d store, polls `num_nodes_waiting()` every 0.1 s, takes its time to stop
its workers, and asks again; when its workers fail once too often it fails, and when they succeed it
waits for the others in the exit barrier. It ends as `handler.shutdown()` decides. Both waits have
torch's time-out, 300 s, here 60 intervals. Launchers start again what failed, submit the run again,
or do not. Once the run stands still, its workers succeed, or fail for good, or all hosts vanish.

Not simulated: threads, signals, forks and the clients of real stores.

```
make simulate SEEDS=100000 FIRST_SEED=1   # progress, and a summary
python -m tests.simulation --seed 4711    # one seed, with all that happens in it
python -m tests.simulation --kinds amnesia crash --settings lease=3.0    # narrowed plans
python -m tests.simulation --mutants      # how many seeds each mutant survives
```

A failing seed prints the invariant that failed, its last steps, and the line that repeats it.
"""

# The page has the checks' terms as the code has them.
_TERMS = "## Terms\n\n" + (invariants.__doc__ or "").partition("\n\n")[2].replace("``", "`")


def write_page(
    path: Path, first: int, seeds: int, processes: int | None, say: Callable[[str], None]
) -> int:
    """Run everything and write the page; returns 0, or 1 if something failed."""
    small = run_seeds(first, seeds, 12, processes)
    say(str(small))
    large = run_seeds(first, _LARGE_SEEDS, _LARGE_NODES, processes)
    say(str(large))
    for totals in (small, large):
        if totals.failed:
            say(failure_report(totals.failed[0], totals.most_nodes))
            return 1
    hunted = []
    for name, survived, invariant in first_caught(list(MUTANTS), first, _MUTANT_SEEDS, processes):
        say(f"{name}: {survived}")
        if survived is None:
            ((_, own, invariant),) = first_caught([name], MUTANTS[name].seed, 1, processes)
            if own is None:
                say(f"no seed catches {name}")
                return 1
        hunted.append((name, survived, invariant))
    path.write_text(
        "\n".join([_HEAD, _runs(small, large), _faults(small), _TERMS, _checked(), _killed(hunted)])
    )
    return 0


def _runs(small: Totals, large: Totals) -> str:
    lines = [
        "## Seeds run\n",
        f"On {os.cpu_count()} cores, Python {platform.python_version()}.\n",
        "| hosts at the start | seeds | time | rounds run | requests | checks | failed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for totals, hosts in ((small, "1 to 12"), (large, f"{_LARGE_NODES // 2} to {_LARGE_NODES}")):
        last = totals.first + totals.seeds - 1
        lines.append(
            f"| {hosts} | {totals.seeds:,} ({totals.first} to {last}) | {totals.seconds:.0f} s | "
            f"{totals.rounds:,} | {totals.requests:,} | {totals.checks:,} | {len(totals.failed)} |"
        )
    share, seed = small.slowest
    median, most = statistics.median(small.settled), max(small.settled)
    lines += [
        "",
        "After the last fault a run of enough nodes must stand still, and stay so for a lease "
        "and two intervals of the slowest clock, within `8 x lease + last_call` on the slowest "
        "clock, plus twice the time to stop workers, plus 10 intervals, plus the time to ask for "
        "the next round where an agent hangs; the joins of one that has too few must end by their "
        "time-out. "
        f"It took {median:.1f} s in the median and "
        f"{most:.1f} s at most; the seed that came closest to its bound, {seed}, took {share:.0%} "
        f"of it. The amnesia exception was used for {small.excused:,} pairs of hosts.\n",
    ]
    return "\n".join(lines)


def _faults(totals: Totals) -> str:
    rows = [f"| {kind} | {count:,} |" for kind, count in totals.injected.most_common()]
    return "\n".join(
        ["## Faults injected\n", "| fault | times |", "| --- | --- |", *rows, ""],
    )


def _checked() -> str:
    rows = [f"| {name} | {what} |" for name, what in invariants.INVARIANTS.items()]
    head = "## Invariants, checked at every step\n"
    return "\n".join([head, "| name | what must hold |", "| --- | --- |", *rows, ""])


def _killed(hunted: list[tuple[str, int | None, str]]) -> str:
    rows = []
    for name, survived, invariant in hunted:
        fate = f"seed {MUTANTS[name].seed}" if survived is None else f"{survived + 1:,}"
        narrowed = f"`{focus}`" if str(focus := MUTANTS[name].focus) else ""
        rows.append(f"| `{name}` | {MUTANTS[name].breaks} | {fate} | {narrowed} | {invariant} |")
    return "\n".join(
        [
            "## Mutants\n",
            "The same code with one rule broken, and how many seeds it took to catch it; or, for "
            f"one that {_MUTANT_SEEDS:,} seeds did not catch, the seed that does. Where what it "
            "takes is rare, the plans are narrowed to a few kinds of faults.\n",
            "| mutant | what is broken | seeds | plans narrowed to | caught by |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
