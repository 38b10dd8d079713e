"""The log of a node: lines on stderr in torch's format, without any set-up."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rdzv_plugins.kv.gate import plain
from rdzv_plugins.protocol.effects import Tell
from rdzv_plugins.protocol.node import Node

_PACKAGE = "rdzv_plugins"

# torch's format: I1122 13:20:01.250000 4711 rdzv_plugins.process.handler:208] ...
_FORMAT = "{levelname[0]}{asctime}.{msecs:03.0f}000 {process} {name}:{lineno}] {message}"


def set_up(level: str) -> None:
    """Show the package's lines from this level on, unless the application has set logging up.

    torchrun shows only warnings, and without time or name. Further calls have no effect.
    """
    package = logging.getLogger(_PACKAGE)
    if package.hasHandlers():
        return
    if package.level == logging.NOTSET:
        package.setLevel(level)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT, "%m%d %H:%M:%S", style="{"))
    # An application that sets logging up later shows each line itself.
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    package.addHandler(handler)


def told(error: BaseException) -> None:
    """Mark the error as logged, so that its traceback is not shown too."""
    if logging.getLogger(_PACKAGE).isEnabledFor(logging.ERROR):
        vars(error)["told_by_rdzv"] = True


def is_told(error: BaseException) -> bool:
    """Whether the log has the error's line."""
    return "told_by_rdzv" in vars(error)


class RunLog:
    """A node's lines. Each names the run, and its record has fields for filters and collectors.

    The fields: ``rdzv_run`` (the run's id), ``rdzv_round`` (the latest round's number, or None),
    ``rdzv_node`` (host[pid] of this node) and ``rdzv_cause`` (why that round, or why the run was
    closed; may be empty). ``command`` makes a command that a person can paste: `Archive.command`.
    """

    def __init__(
        self, logger: logging.Logger, run_id: str, node: Node, command: Callable[..., str]
    ) -> None:
        self._logger = logger
        self._run_id = run_id
        self._node = node
        self._command = command

    def info(self, text: str) -> None:
        self._log(logging.INFO, text)

    def warning(self, text: str) -> None:
        self._log(logging.WARNING, text)

    def error(self, text: str, lines: str = "") -> None:
        """Log an error; ``lines``: further lines, which are shown as they are."""
        self._log(logging.ERROR, text, lines)

    def tell(self, request: Tell) -> None:
        """Log a `Tell` of the node."""
        text = request.text
        if request.command:
            text = text.replace(f"rdzv {request.command[0]}", self._command(*request.command), 1)
        self._log(logging.WARNING if request.warns else logging.INFO, text)

    def _log(self, level: int, text: str, lines: str = "") -> None:
        if not self._logger.isEnabledFor(level):
            return
        latest = self._node.latest
        fields = {
            "rdzv_run": self._run_id,
            "rdzv_round": latest.round if latest is not None else None,
            "rdzv_node": self._node.record.label,
            "rdzv_cause": plain(latest.reason) if latest is not None else "",
        }
        # A server's error or a stored value may hold control characters.
        line, run = plain(text), f"run '{self._run_id}'"
        if not line.startswith(run):
            line = f"{run}: {line}"
        line = "\n  ".join((line, *map(plain, lines.splitlines())))
        # Name the source line of the caller's caller.
        self._logger.log(level, "%s", line, extra=fields, stacklevel=3)
