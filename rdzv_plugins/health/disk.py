"""The check ``disk``: there is free space in a directory, and a file can be written there."""

from __future__ import annotations

import os
import shutil
import tempfile

_GIB = 1 << 30
_BLOCK = b"\0" * 4096


def check(directory: str | None, least: float) -> str | None:
    """Why the directory has less than ``least`` GiB free, or takes no file; None: it is fine.

    ``directory`` None: $TMPDIR, or the system's temporary directory.
    """
    # Check $TMPDIR itself: gettempdir() skips it if it is not writable.
    place = directory or os.environ.get("TMPDIR") or tempfile.gettempdir()
    try:
        free = shutil.disk_usage(place).free / _GIB
        if free < least:
            return f"{place} has {free:.1f} GiB free of the {least:g} GiB that it needs"
        with tempfile.NamedTemporaryFile(dir=place, prefix=".rdzv-check-") as file:
            file.write(_BLOCK)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{place} cannot be written: {error.strerror or error}"
    return None
