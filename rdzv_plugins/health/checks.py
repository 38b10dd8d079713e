"""A check of this host that is a Python callable."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from rdzv_plugins.kv.gate import plain

_LONGEST_REASON = 200

# Terminal colour codes, which many programs print into a pipe too.
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class CannotRunError(Exception):
    """The check could not be made: it says nothing about this host."""


class CallCheck:
    """A Python callable without arguments that returns None, or why the node is unfit.

    ``load`` returns the callable; it may import what is not installed.
    """

    def __init__(self, name: str, load: Callable[[], Callable[[], object]]) -> None:
        self.name = name
        self._load = load

    def run(self, given_up: threading.Event) -> str | None:
        """Why the node is unfit; None: it is fit. Raises what the callable raises.

        Called in a thread of its own. Once ``given_up`` is set, nothing waits for the answer.
        """
        reason = self._load()()
        if reason is None:
            return None
        if isinstance(reason, str):
            return last_line(reason) or "it fails, and gives no reason"
        kind = type(reason).__name__
        raise CannotRunError(f"it returned {kind}, which is neither None nor a reason")


def last_line(text: str) -> str:
    """The last line that is not blank, without terminal codes."""
    for line in reversed(text.splitlines()):
        if shown := plain(" ".join(_COLOURS.sub("", line).split()), _LONGEST_REASON):
            return shown
    return ""
