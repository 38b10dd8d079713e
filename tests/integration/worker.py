"""What the agents of `test_edges` run in place of a training; quick, since it imports no torch.

It works until the file ``<folder>/<name>.end`` is there, which holds its exit status. At SIGTERM it
takes ``--saving`` seconds and then ends with 1. What it does stands in its journal.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from rdzv_plugins.demo.train import Journal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--saving", type=float, default=0.0)
    options = parser.parse_args()
    journal = Journal(options.folder, options.name)

    def save(*_: object) -> None:
        journal.note("sigterm")
        time.sleep(options.saving)
        journal.note("saved")
        os._exit(1)

    signal.signal(signal.SIGTERM, save)
    journal.note("begin")
    end = options.folder / f"{options.name}.end"
    while not end.exists():
        time.sleep(0.02)
    journal.note("end")
    sys.exit(int(end.read_text()))


if __name__ == "__main__":
    main()
