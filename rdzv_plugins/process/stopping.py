"""Stops an agent's workers and all processes that they have started, before new workers start.

torch signals the process group of a live worker, and waits only for the worker. The processes that
an ended worker leaves behind get no signal, and keep their memory, ports and GPU.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from rdzv_plugins.process.guard import processes

log = logging.getLogger(__name__)

# How long the processes of an ended worker have to stop after the signal. Some, such as the
# processes of multiprocessing, exit by themselves within `_SETTLE_SECONDS`.
_LEFT_SECONDS = 5.0
_SETTLE_SECONDS = 0.2
# How long to wait after SIGKILL; a process that hangs in the kernel does not end.
_KILLED_SECONDS = 1.0
_PAUSE = 0.05


def stop(
    workers: Mapping[int, int],
    number: signal.Signals,
    seconds: float,
    after_a_loss: Callable[[], float | None],
) -> None:
    """Stop workers and all processes of their sessions, at last with SIGKILL.

    Args:
        workers: pids by local rank.
        number: the first signal.
        seconds: until SIGKILL.
        after_a_loss: returns a shorter time in seconds, or None.
    """
    workers = {rank: pid for rank, pid in workers.items() if not _is_anothers(pid)}
    pids = [*workers.values()]
    live = processes(pids)
    if any(worker not in live for worker in live.values()):
        time.sleep(_SETTLE_SECONDS)
        live = processes(pids)
    left = {pid for pid, worker in live.items() if worker not in live}
    _send(live, number)
    if (patience := after_a_loss()) is not None:
        seconds = min(seconds, patience)
    if not live.keys().isdisjoint(pids):
        log.info("the workers get %s, and have %g s to end", number.name, seconds)
    now = time.monotonic()
    short = now + min(seconds, _LEFT_SECONDS)
    deadlines = {worker: now + seconds if worker in live else short for worker in pids}
    killed = _kill_in_time(workers, deadlines, after_a_loss)
    left |= {pid for pid, worker in killed.items() if worker not in killed}
    if left:
        log.warning(
            "workers of this node left %s of their processes behind, which are ended, %s of them "
            "by SIGKILL",
            len(left),
            len(left & killed.keys()),
        )


def _is_anothers(pid: int) -> bool:
    """Whether a process that is no child of this one has got a reaped worker's pid."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[1]) != os.getpid()
    return False


def _kill_in_time(
    workers: Mapping[int, int],
    deadlines: Mapping[int, float],
    after_a_loss: Callable[[], float | None],
) -> dict[int, int]:
    """Wait for the workers and their sessions; return the worker of each killed process."""
    killed: dict[int, int] = {}
    began, gives_up, lost = time.monotonic(), 0.0, False
    while live := processes(workers.values()):
        now = time.monotonic()
        if not lost and (patience := after_a_loss()) is not None:
            lost = True
            deadlines = {worker: min(it, now + patience) for worker, it in deadlines.items()}
        late = {pid: worker for pid, worker in live.items() if now >= deadlines[worker]}
        if fresh := late.keys() - killed.keys():
            if names := [f"{rank} (pid {pid})" for rank, pid in workers.items() if pid in fresh]:
                log.warning(
                    "workers that have not ended in %s s get SIGKILL: local rank %s",
                    round(now - began, 1),
                    ", ".join(names),
                )
            killed |= late
            gives_up = now + _KILLED_SECONDS
        elif late == live and now >= gives_up:
            break
        _send(late, signal.SIGKILL)
        time.sleep(_PAUSE)
    return killed


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
