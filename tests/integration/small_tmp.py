"""Runs a Python program with a small folder for temporary files, of a file system of its own.

Its arguments are the options of that file system, and then Python's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from tests.integration import forked

__all__ = ["NO_ROOM"]

NO_ROOM = ("-m", "tests.integration.small_tmp", "nr_inodes=2")
"""Python's arguments, before those that name a program, that leave it room for no second file."""

_NAME = "small-tmp-"
_MOUNT = 'mount -t tmpfs -o "$1" none "$TMPDIR"; shift; exec "$@"'


if __name__ == "__main__":
    options, *program = sys.argv[1:]
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=_NAME)
    if os.geteuid() == 0:
        # In this process, which may have been forked from one that has imported torch.
        forked.unshare(0)
        mount = ["mount", "-t", "tmpfs", "-o", options, "none", tempfile.tempdir]
        subprocess.run(mount, check=True)
        forked.run_here(program)
    else:
        within = ["unshare", "--mount", "--map-root-user", "sh", "-ec", _MOUNT, "sh", options]
        os.execvp(within[0], [*within, sys.executable, *program])
