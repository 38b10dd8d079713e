"""A training that names a moment for newcomers ten times a second, and notes whether it could.

It works until the file ``<folder>/<name>.end`` is there, which holds its exit status.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import rdzv_plugins
from examples.demo.train import Journal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    options = parser.parse_args()
    journal = Journal(options.folder, options.name)
    journal.note("begin")
    end, before = options.folder / f"{options.name}.end", None
    while not end.exists():
        if (named := rdzv_plugins.resize_now()) != before:
            journal.note("named" if named else "unnamed")
        before = named
        time.sleep(0.1)
    journal.note("end")
    sys.exit(int(end.read_text()))


if __name__ == "__main__":
    main()
