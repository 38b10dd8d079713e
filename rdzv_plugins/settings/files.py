"""Secrets and certificates from files that change while a job runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FromFiles(Generic[T]):
    """A value that is made from files, and made again once a file has changed.

    `get` costs 2 us for each file. The files need not be replaced all at once: `get` raises what
    ``make`` raises, and the next call tries again.

    Args:
        make: reads the files; called at once.
        files: their paths; None: there is no such file.
    """

    def __init__(self, make: Callable[[], T], *files: str | os.PathLike[str] | None) -> None:
        self._make = make
        self._files = [file for file in files if file is not None]
        self._made = self._states(), make()

    def get(self) -> T:
        """The present value."""
        states, (known, value) = self._states(), self._made
        if states != known:
            # `states` is from before the read: a file that changes during the read is read again.
            value = self._make()
            self._made = states, value
        return value

    def _states(self) -> list[tuple[int, ...] | None]:
        return [_state(file) for file in self._files]


def _state(file: str | os.PathLike[str]) -> tuple[int, ...] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    # The inode too: a link may now lead to another file of the same size and age.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
