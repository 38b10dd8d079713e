"""Runs a Python program with a small folder for temporary files, of a file system of its own.

Its arguments are Python's. `change` does something in that folder, as nobody else can.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["SMALL_TMP", "change"]

SMALL_TMP = ("-m", "tests.integration.small_tmp", "-m", "torch.distributed.run")
"""Python's arguments that run torchrun so."""

_MOUNT = """
mount -t tmpfs -o nr_inodes=60,size=1m none "$TMPDIR" && exec "$@"
"""


def change(pid: int, command: str) -> None:
    """Run a shell's command in the folder of a process, such as ``rm -rf *``."""
    enter = ["nsenter", f"--target={pid}", "--mount", *(["--user"] if os.geteuid() else [])]
    environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
    (folder,) = (item.removeprefix("TMPDIR=") for item in environ if item.startswith("TMPDIR="))
    subprocess.run([*enter, "sh", "-ec", f'cd "{folder}"; {command}'], check=True, timeout=30)


if __name__ == "__main__":
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="small-tmp-")
    program = [sys.executable, *sys.argv[1:]]
    os.execvp(unshare[0], [*unshare, "sh", "-c", _MOUNT, "sh", *program])
