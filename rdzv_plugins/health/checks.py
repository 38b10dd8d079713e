"""The contract of a check, and a check that is a Python callable."""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Callable
from typing import Protocol

_LONGEST_REASON = 200

# Codes that colour a terminal's text, as many programs print it into a pipe too.
_COLOURS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class CannotRunError(Exception):
    """The check could not be made: it says nothing about this host."""


class Check(Protocol):
    """One thing that must be well with this host; people see its name."""

    name: str

    def run(self, given_up: threading.Event) -> str | None:
        """None where all is well, else why not; raises `CannotRunError`.

        Called in a thread of its own. Once ``given_up`` is set nobody waits for the answer.
        """


class CallCheck:
    """A Python callable without arguments that returns None, or why the node is unfit.

    ``load`` returns the callable; it may import what is not installed.
    """

    def __init__(self, name: str, load: Callable[[], Callable[[], object]]) -> None:
        self.name = name
        self._load = load

    def run(self, given_up: threading.Event) -> str | None:
        try:
            reason = self._load()()
        except CannotRunError:
            raise
        except BaseException as error:  # In this thread SystemExit would end nothing.
            said = last_line(str(error))
            raise CannotRunError(f"it raised {type(error).__name__}: {said}") from error
        if reason is None:
            return None
        if isinstance(reason, str):
            return last_line(reason) or "it fails, and gives no reason"
        kind = type(reason).__name__
        raise CannotRunError(f"it returned {kind}, which is neither None nor a reason")


def last_line(text: str) -> str:
    """The last line that says something, without what a terminal would take for a command."""
    for line in reversed(text.splitlines()):
        plain = _COLOURS.sub("", line)
        shown = "".join(" " if unicodedata.category(it)[0] in "CZ" else it for it in plain)
        if words := " ".join(shown.split()):
            return words if len(words) <= _LONGEST_REASON else f"{words[: _LONGEST_REASON - 1]}…"
    return ""
