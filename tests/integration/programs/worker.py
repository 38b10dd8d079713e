"""What the agents of `test_edges` run in place of a training; quick, since it imports no torch.

It works until the file ``<folder>/<name>.end`` is there, which holds its exit status. At SIGTERM or
SIGUSR1 it takes ``--saving`` seconds and then ends with 1. With ``--fence`` it holds that file
again and again, and adds its fencing token to ``<fence>.log``. What it does stands in its journal.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import rdzv_plugins
from rdzv_plugins.process.worker import FencedError
from tests.fleet.train import Journal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--saving", type=float, default=0.0)
    parser.add_argument("--fence", type=Path)
    options = parser.parse_args()
    journal = Journal(options.folder, options.name)

    def save(*_: object) -> None:
        journal.note("sigterm")
        time.sleep(options.saving)
        journal.note("saved")
        os._exit(1)

    # torch hands on the signal that its agent got.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, save)
    journal.note("begin")
    end = options.folder / f"{options.name}.end"
    fenced = False
    while not end.exists():
        if options.fence is not None and not fenced:
            fenced = not wrote(options.fence)
            if fenced:
                journal.note("fenced")
        time.sleep(0.02)
    journal.note("end")
    sys.exit(int(end.read_text()))


def wrote(fence: Path) -> bool:
    """Whether this worker may still write."""
    now = rdzv_plugins.current()
    assert now is not None
    try:
        with rdzv_plugins.fence(fence), fence.with_suffix(".log").open("a") as log:
            log.write(f"{now.fencing_token}\n")
    except FencedError:
        return False
    return True


if __name__ == "__main__":
    main()
