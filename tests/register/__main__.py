"""Many seeds in a few processes: ``python -m tests.register FIRST SEEDS``."""

from __future__ import annotations

import multiprocessing
import sys

from .test_register import wrong


def main(first: int, seeds: int) -> int:
    found = 0
    with multiprocessing.Pool() as pool:
        every = range(first, first + seeds)
        for seed, fault in zip(every, pool.imap(wrong, every, 50), strict=True):
            if fault:
                found += 1
                print(f"seed {seed}: {fault}", flush=True)  # noqa: T201
    print(f"seeds {first} to {first + seeds - 1}: {found} failed")  # noqa: T201
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
