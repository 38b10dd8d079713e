"""The Python stacks of workers that stand still, which their agent asks for by a signal.

faulthandler writes them from C, so a worker answers also while its main thread is in a collective.
It writes into memory that the agent reads through /proc: nothing is left behind, and only a process
that can answer gets the signal.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import BinaryIO

# A real-time signal that no known library uses.
_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
_NAME = "rdzv-stacks"
# Seconds that the answers may take, and seconds between two looks at them.
_PATIENCE, _PAUSE = 0.5, 0.02
_MOST_BYTES = 32 << 10

# The first frame of the main thread, which faulthandler writes last.
_INNERMOST = re.compile(r'.*most recent call first\):\s+File "([^"]*)"', re.DOTALL)
_COLLECTIVE = re.compile(r"/torch/(distributed|autograd|cuda)/")


def offer() -> int:
    """Let the agent of this worker ask for its stacks; returns the descriptor of the memory.

    Returns 0 if this is not possible here, or a script has a handler of the signal.
    """
    if _SIGNAL is None or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return 0
    with suppress(OSError, AttributeError, RuntimeError):
        memory = os.memfd_create(_NAME)
        faulthandler.register(_SIGNAL, memory)
        return memory
    return 0


def lives(pid: int, memory: int) -> bool:
    """Whether the worker that made the offer lives; True also without an offer."""
    if not memory:
        return True
    try:
        return os.readlink(f"/proc/{pid}/fd/{memory}").startswith(f"/memfd:{_NAME}")
    except OSError:
        return False


def ask(workers: Sequence[tuple[int, int]]) -> list[str]:
    """The present stacks of each worker, given by pid and descriptor; "": no answer."""
    return _answers(workers, _SIGNAL)


def wake(pid: int, memory: int) -> str:
    """The stacks of a worker that has not answered. SIGCONT continues a stopped worker."""
    return _answers([(pid, memory)], signal.SIGCONT)[0]


def is_in_a_collective(stacks: str) -> bool:
    """Whether the main thread waits in torch, as ranks do that wait for another rank."""
    innermost = _INNERMOST.match(stacks)
    return innermost is not None and _COLLECTIVE.search(innermost[1]) is not None


def _answers(workers: Sequence[tuple[int, int]], number: int | None) -> list[str]:
    with ExitStack() as opened:
        # Open before the signal: a worker that SIGCONT continues may end before its answer is read.
        files = [_open(opened, *it) if number is not None else None for it in workers]
        for (pid, _), file in zip(workers, files, strict=True):
            if file is not None and number is not None:
                if number == _SIGNAL:
                    file.truncate(0)
                with suppress(OSError):
                    os.kill(pid, number)
        ends, last = time.monotonic() + _PATIENCE, [""]
        while True:
            now = ["" if file is None else _read(file) for file in files]
            answered = all(text or file is None for text, file in zip(now, files, strict=True))
            if (answered and now == last) or time.monotonic() > ends:
                return now
            last = now
            time.sleep(_PAUSE)


def _open(opened: ExitStack, pid: int, memory: int) -> BinaryIO | None:
    path = f"/proc/{pid}/fd/{memory}"
    with suppress(OSError):
        if memory and lives(pid, memory):
            return opened.enter_context(open(path, "r+b", buffering=0))
    return None


def _read(file: BinaryIO) -> str:
    # After `truncate` the worker writes on at its old offset, behind a hole.
    file.seek(0)
    return file.read().lstrip(b"\0")[-_MOST_BYTES:].decode(errors="replace").strip()
