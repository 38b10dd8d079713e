"""Stops the workers of an agent, and all that they have started, before the next ones start.

torch signals the process group of a worker that lives, and waits for the worker alone. What a
worker leaves behind that ended by itself gets no signal, and keeps its memory, ports and GPU.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from rdzv_plugins.orphans import processes

__all__ = ["stop"]

log = logging.getLogger(__name__)

# What a worker left behind that ended by itself has so long to stop, in seconds. Before that, some
# of it ends by itself too, such as what multiprocessing starts.
_LEFT_SECONDS = 5.0
_SETTLE_SECONDS = 0.2

# What gets SIGKILL is waited for so long: it may hang in the kernel.
_KILLED_SECONDS = 1.0

_PAUSE = 0.05


def stop(workers: Iterable[int], number: signal.Signals, seconds: float) -> None:
    """Stop these processes, and all of their sessions; what has not ended in time gets SIGKILL.

    Args:
        number: the signal that they get first.
        seconds: that they have to end.
    """
    workers = [*workers]
    live = processes(workers)
    if any(worker not in live for worker in live.values()):
        time.sleep(_SETTLE_SECONDS)
        live = processes(workers)
    left = {pid for pid, worker in live.items() if worker not in live}
    if not live.keys().isdisjoint(workers):
        log.info("the workers get %s, and have %g s to end", number.name, seconds)
    now = time.monotonic()
    short = now + min(seconds, _LEFT_SECONDS)
    deadlines = {worker: now + seconds if worker in live else short for worker in workers}
    _send(live, number)
    killed = _kill_in_time(deadlines)
    left |= killed - {*workers}
    if left:
        log.warning(
            "workers of this node left %s of their processes behind, which are ended, %s of them "
            "by SIGKILL",
            len(left),
            len(left & killed),
        )


def _kill_in_time(deadlines: dict[int, float]) -> set[int]:
    """Wait for the workers and their sessions, each until its deadline; who got SIGKILL."""
    killed: set[int] = set()
    gives_up = 0.0
    while live := processes(deadlines):
        now = time.monotonic()
        late = {pid for pid, worker in live.items() if now >= deadlines[worker]}
        if late - killed:
            killed |= late
            gives_up = now + _KILLED_SECONDS
        elif late == live.keys() and now >= gives_up:
            break
        _send(late, signal.SIGKILL)
        time.sleep(_PAUSE)
    return killed


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
