"""Runs a script of examples/ as a worker: notes the steps that it tells, and its checkpoints."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

import rdzv_plugins
from tests.fleet.train import Journal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--example", required=True)
    options = parser.parse_args()
    journal = Journal(options.folder, options.name)
    journal.note("begin")
    step, saved = rdzv_plugins.step, rdzv_plugins.saved
    is_first = True

    def noted_step(number: int) -> bool:
        nonlocal is_first
        if is_first:
            journal.note("resume", step=number - 1)
            is_first = False
        journal.note("step", step=number)
        if saves := step(number):
            journal.note("asked", step=number)
        return saves

    def noted_saved(number: int) -> None:
        journal.note("saved", step=number)
        saved(number)

    rdzv_plugins.step, rdzv_plugins.saved = noted_step, noted_saved
    os.chdir(options.folder)
    sys.argv = [options.example]
    runpy.run_path(options.example, run_name="__main__")
    journal.note("end")


if __name__ == "__main__":
    main()
