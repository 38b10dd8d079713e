"""Runs a Python program with a folder for temporary files that has no room for a second one.

Its arguments are Python's. The folder is a file system that only this process sees.
"""

from __future__ import annotations

import os
import sys
import tempfile

_MOUNT = """
mount -t tmpfs -o nr_inodes=2 none "$TMPDIR" && exec "$@"
"""

if __name__ == "__main__":
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="no-room-")
    program = [sys.executable, *sys.argv[1:]]
    os.execvp(unshare[0], [*unshare, "sh", "-c", _MOUNT, "sh", *program])
