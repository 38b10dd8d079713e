"""Runs a Python program with a small folder for temporary files, of a file system of its own.

Its arguments are the options of that file system, and then Python's. `change` does something in
that folder, as nobody else can.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.integration import forked

__all__ = ["NO_ROOM", "SMALL_TMP", "change"]

SMALL_TMP = ("-m", "tests.integration.small_tmp", "nr_inodes=60,size=1m")
"""Python's arguments, before those that name a program, that run it so."""

NO_ROOM = ("-m", "tests.integration.small_tmp", "nr_inodes=2")
"""The same; the folder has no room for a second file."""

_NAME = "small-tmp-"
_MOUNT = 'mount -t tmpfs -o "$1" none "$TMPDIR"; shift; exec "$@"'


def change(pid: int, command: str) -> None:
    """Run a shell's command in the folder of a process, such as ``rm -rf *``."""
    enter = ["nsenter", f"--target={pid}", "--mount", *(["--user"] if os.geteuid() else [])]
    mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
    (folder,) = (line.split()[1] for line in mounts if _NAME in line)
    subprocess.run([*enter, "sh", "-ec", f'cd "{folder}"; {command}'], check=True, timeout=30)


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
