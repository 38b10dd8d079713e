"""``docs/simulation.md``: what was run, what was injected, what was checked, what was caught."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

from .campaign import Totals, failure_report, first_caught, run_seeds
from .invariants import INVARIANTS
from .mutants import MUTANTS

__all__ = ["write_page"]

_LARGE_SEEDS, _LARGE_NODES = 24, 200
_MUTANT_SEEDS = 1000

_HEAD = """\
# Proof of the protocol: the simulator

Written by `python -m tests.simulation --page docs/simulation.md`; do not edit.

The real code of `protocol.py`, `node.py` and all below them runs unchanged, as it does under
`handler.py`: a node is a generator of requests, and the simulator carries them out on an
in-memory store with real compare-and-set, over a network that delays and loses, for hosts with
clocks of their own rate (0.5 to 2), on virtual time. One seed draws the run's settings, its hosts,
their agents' manners and all its faults; the same seed and code give the same run, step by step.
An agent behaves as torch's does: it waits for a round, polls `num_nodes_waiting()` every 0.1 s,
takes its time to stop its workers, and asks again.

```
make simulate SEEDS=100000 FIRST_SEED=1   # progress, and a summary
python -m tests.simulation --seed 4711    # one seed, with all that happens in it
python -m tests.simulation --mutants      # how many seeds each mutant survives
```

A failing seed prints the invariant that failed, its last steps, and the line that repeats it.
"""

_TERMS = """\
## Terms

A *world* is a round as its participants were named: its number, and its participants in rank
order. A host *runs* a world from the moment its agent is given it until its workers have stopped;
a host that stalls goes on running.

The *lease* of a host in a world holds as long as no stretch of `lease / fastest clock rate` (less
the staleness of listings, where a seed has stale ones) has passed without a new beat of it
reaching the store. Once run out it does not come back in that world: a host that was cut off for
so long has been replaced, and runs on until it hears of it.

A world is *named* by each write that puts it into the store: by the one that gives out its ranks,
and by those that write it back into a store that forgot.

The *amnesia exception*: two hosts whose leases hold may run different worlds if the store forgot
everything between a naming of the one world and a later naming of the other, and the one's host had
no record in the listing that the namer of the other had last read. Participants write their records
back within an interval, so that only a round that completes sooner than that can be the second; and
the run must still end in one world within the bound below.

A launcher that gives up a join early, and starts another node in its place, is one of the faults
and ends with them: where a run needs all its nodes, and each is away now and then, there may be no
moment at which all are there.

A store that is swept after closing, so that the run's id is used again, counts as one that forgot.
"""


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
        "After the last fault a run must stand still, and stay so for a lease and two intervals of "
        "the slowest clock, within `8 x lease + last_call` on the slowest clock, plus twice the "
        "time to stop workers, plus 10 intervals; where nodes that joined before have a short "
        f"`join_timeout`, plus that. It took {median:.1f} s in the median and "
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
    rows = [f"| {name} | {what} |" for name, what in INVARIANTS.items()]
    head = "## Invariants, checked at every step\n"
    return "\n".join([head, "| name | what must hold |", "| --- | --- |", *rows, ""])


def _killed(hunted: list[tuple[str, int | None, str]]) -> str:
    rows = []
    for name, survived, invariant in hunted:
        fate = f"seed {MUTANTS[name].seed}" if survived is None else f"{survived + 1:,}"
        rows.append(f"| `{name}` | {MUTANTS[name].breaks} | {fate} | {invariant} |")
    return "\n".join(
        [
            "## Mutants\n",
            "The same code with one rule broken, and how many seeds it took to catch it; or, for "
            f"one that {_MUTANT_SEEDS:,} seeds did not catch, the seed that does.\n",
            "| mutant | what is broken | seeds | caught by |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
