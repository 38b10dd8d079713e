"""Runs the checks of a node, each within a time limit, and says why the node is unfit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points
from queue import Empty, SimpleQueue
from typing import TypeAlias

from rdzv_plugins.clock import take
from rdzv_plugins.health import disk, network
from rdzv_plugins.health.checks import CallCheck, CannotRunError, last_line
from rdzv_plugins.health.command import CommandCheck, arguments_of
from rdzv_plugins.health.gpu import GpuCheck
from rdzv_plugins.kv import Attempts, exhausted
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.settings.parsing import alternatives

Check: TypeAlias = CallCheck | CommandCheck

SHIPPED = ("gpu", "disk", "network")
"""The checks of this package, by name."""

_GROUP = "rdzv_plugins.health"

# How long a killed command may take to end.
_END_SECONDS = 5.0
# `network` gets this share of the limit, so that it answers within the limit.
_NETWORK_SHARE = 0.8


class Gate:
    """The checks of one node, in their order.

    Args:
        seconds: the limit of each check.
        fails_open: a check that cannot run counts as passed; ``warn`` takes a line about it.
    """

    def __init__(
        self, checks: Sequence[Check], seconds: float, fails_open: bool, warn: Callable[[str], None]
    ) -> None:
        self._checks = checks
        self._seconds = seconds
        self._fails_open = fails_open
        self._warn = warn
        # Given-up checks that have not ended.
        self._hung: dict[str, _Attempt] = {}
        self._attempt: _Attempt | None = None
        self._closed = False

    @property
    def names(self) -> list[str]:
        """The names of the checks, in their order."""
        return [check.name for check in self._checks]

    def check(self) -> str | None:
        """Why this node is unfit: the check and its reason; None: it is fit.

        An exception in the caller, such as a signal's, ends a running command at once.
        """
        for check in self._checks:
            try:
                reason = self._answer(check)
            except CannotRunError as error:
                if self._fails_open:
                    self._warn(
                        f"the check '{check.name}' cannot run, and counts as passed "
                        f"(check_fails_open): {error}"
                    )
                    continue
                reason = str(error)
            if reason is not None:
                return f"{check.name}: {reason}"
        return None

    def _answer(self, check: Check) -> str | None:
        """One check's answer; repeats the check while this host lacks a resource."""
        deadline, pauses = time.monotonic() + self._seconds, Attempts()
        while True:
            try:
                return self._attempted(check, max(0.0, deadline - time.monotonic()))
            except CannotRunError as error:
                pauses.fail()
                due = time.monotonic() + pauses.seconds_left
                if exhausted(error) is None or self._closed or due >= deadline:
                    raise
            time.sleep(pauses.seconds_left)

    def _attempted(self, check: Check, seconds: float) -> str | None:
        hung = self._hung.pop(check.name, None)
        if hung is not None and not hung.ended.is_set():
            self._hung[check.name] = hung
            raise CannotRunError("it still hangs, and is not started once more")
        attempt = self._attempt = _Attempt(check)
        if self._closed:
            attempt.given_up.set()
        try:
            # Inside the try, because a signal's exception may come while the thread starts.
            self._start(attempt)
            answer = take(attempt.answers, seconds)
        except Empty:
            raise CannotRunError(f"it gave no answer within {self._seconds:g} s") from None
        finally:
            # Also after a signal's exception in the caller.
            if not attempt.ends():
                self._hung[check.name] = attempt
        if isinstance(answer, CannotRunError):
            raise answer.with_traceback(None)
        return answer

    def _start(self, attempt: _Attempt) -> None:
        try:
            attempt.start()
        except Exception as error:
            if (missing := exhausted(error)) is None:
                raise
            attempt.ended.set()
            raise CannotRunError(f"it cannot be started ({missing})") from error

    def close(self) -> None:
        """End the running check, and start no more; call this in another thread than `check`.

        Called when the node has ended. A second signal may interrupt the caller of `check` before
        it has ended the check.
        """
        self._closed = True
        if self._attempt is not None:
            self._attempt.ends()


class _Attempt(threading.Thread):
    """One run of a check. The caller only waits, so that a signal can interrupt it at any point."""

    def __init__(self, check: Check) -> None:
        super().__init__(name=f"rdzv-check-{check.name}", daemon=True)
        self.answers: SimpleQueue[str | CannotRunError | None] = SimpleQueue()
        self.given_up = threading.Event()
        # Not is_alive(): in Python 3.11 it returns False after a signal has interrupted a join.
        self.ended = threading.Event()
        self._check = check

    def ends(self) -> bool:
        """Give the check up, which kills a command; returns whether it has ended."""
        self.given_up.set()
        # A callable may never end, and a wait for it would delay a signal.
        return self.ended.wait(_END_SECONDS if isinstance(self._check, CommandCheck) else 0.05)

    def run(self) -> None:
        try:
            # Skip a check that was given up before it began.
            self.answers.put(None if self.given_up.is_set() else self._check.run(self.given_up))
        except CannotRunError as error:
            self.answers.put(error)
        except BaseException as error:  # Also SystemExit, which would only end this thread.
            raised = CannotRunError(f"it raised {type(error).__name__}: {last_line(str(error))}")
            raised.__cause__ = error
            self.answers.put(raised)
        finally:
            self.ended.set()


def gate_of(
    settings: Settings,
    peer: Callable[[], tuple[str, int] | None],
    warn: Callable[[str], None],
) -> Gate | None:
    """The gate with the options' checks; None: there are none. ``peer``: see `network.check`."""
    checks: list[Check] = [_check(name, settings, peer) for name in settings.check_names]
    if settings.check_command is not None:
        checks.append(CommandCheck(arguments_of(settings.check_command)))
    if not checks:
        return None
    return Gate(checks, settings.check_timeout, settings.check_fails_open, warn)


def refuse_unknown_checks(settings: Settings) -> None:
    """Raise `ValueError` for an unknown check, or a malformed command."""
    if settings.check_command is not None:
        arguments_of(settings.check_command)
    # Searching all installed packages takes 5 ms, so skip it if all names are shipped.
    others = [name for name in settings.check_names if name not in SHIPPED]
    if others and not settings.check_fails_open:
        known = _names()
        for name in others:
            if name not in known:
                raise ValueError(f"option 'checks': {_unknown(name)}")


def _check(name: str, settings: Settings, peer: Callable[[], tuple[str, int] | None]) -> Check:
    shipped: dict[str, Callable[[], object]] = {
        "gpu": GpuCheck(),
        "disk": partial(disk.check, settings.check_disk, settings.check_disk_free),
        "network": partial(network.check, peer, _NETWORK_SHARE * settings.check_timeout),
    }
    return CallCheck(name, lambda: shipped[name] if name in shipped else _load(name))


def _load(name: str) -> Callable[[], object]:
    for found in entry_points(group=_GROUP, name=name):
        check: Callable[[], object] = found.load()
        return check
    raise CannotRunError(_unknown(name))


def _names() -> list[str]:
    return [*SHIPPED, *sorted({it.name for it in entry_points(group=_GROUP)} - {*SHIPPED})]


def _unknown(name: str) -> str:
    return f"there is no check '{name}'; {alternatives(name, _names())}"
