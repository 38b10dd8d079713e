"""Ends the workers, or the server, of a process that is killed: ``kill -9`` reaches no handler.

torch starts each worker in a session of its own, where it outlives its agent, writes the same
checkpoint as its replacement, and keeps the GPU. So `rdzv run` has a process beside it: this file,
run as a program without packages. It reads the agent's pipe, which the system closes however the
agent ends, and then kills what the agent has named last. Linux's parent-death signal would have to
be set in each worker, and reaches none of its children.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Collection, Iterable

log = logging.getLogger(__name__)

_STOP_SECONDS = 2.0

# Begins a line with what stands in an environment, in hexadecimal digits; others name processes.
_EXPECTED = "="
# How often to look for what is to end, with pauses of so many seconds: one may be on its way.
_LOOKS, _PAUSE = 3, 0.1


class Guard:
    """The process that kills workers when this process is gone; for one thread.

    Args:
        folders: are deleted then.
    """

    def __init__(self, *folders: str) -> None:
        self._folders = folders
        self._process: subprocess.Popen[bytes] | None = None
        self._named: tuple[int, ...] = ()
        itself = weakref.ref(self)
        # A forked worker would hold the pipe open.
        os.register_at_fork(after_in_child=lambda: guard._let_go() if (guard := itself()) else None)

    def start(self) -> None:
        """Start the process, unless it runs; where that fails, the workers have no guard."""
        if self._process is not None and self._process.poll() is None:
            return
        try:
            self._process = subprocess.Popen(
                # Without site: nothing that is installed runs in it.
                [sys.executable, "-I", "-S", __file__, *self._folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            self._process = None
            log.warning(
                "what this process starts will outlive it if it is killed, and is to be ended by "
                "hand then: %s",
                error,
            )

    def renew(self) -> None:
        """Start the process again where it has ended: the system, or a person, has killed it."""
        if self._process is not None and self._process.poll() is not None:
            self.start()
            self.watch(self._named)

    def expect(self, variable: str, value: str) -> None:
        """Say what stands in the environment of those that this process starts until it names them.

        It may be killed before it knows them all. ``value`` is of no other process's children.
        """
        self._say(_EXPECTED + f"{variable}={value}".encode().hex())

    def watch(self, workers: Iterable[int]) -> None:
        """Name the processes that are to end with this one, in place of those named before."""
        self._named = tuple(workers)
        self._say(" ".join(map(str, self._named)))

    def _say(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def stop(self) -> None:
        """End the process; what was named last ends, unless that was nothing."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(_STOP_SECONDS)

    def _let_go(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                os.close(self._process.stdin.fileno())
            self._process = None


def processes(workers: Collection[int]) -> dict[int, int]:
    """The live processes of these workers, themselves and those of their sessions, by worker.

    The number of a worker that has ended is no other process's while its session has processes.
    """
    found: dict[int, int] = {}
    for name in os.listdir("/proc") if workers else ():
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                state, _, _, session = stat.read().rpartition(b")")[2].split()[:4]
                pid, worker = int(name), int(session)
                # Python's own start methods give a worker no session.
                if state not in (b"Z", b"X") and (worker in workers or pid in workers):
                    found[pid] = worker if worker in workers else pid
    return found


def _started_with(entry: bytes) -> list[int]:
    """The processes in whose environment this stands, but for this one."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environ:
            if entry in environ.read().split(b"\0"):
                found.append(int(name))
    return found


def _main() -> None:
    # A signal to a whole service, or from a terminal, must not end it before the agent.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    workers: list[int] = []
    entry = b""
    for line in sys.stdin:
        if line.startswith(_EXPECTED):
            entry = bytes.fromhex(line.removeprefix(_EXPECTED))
        else:
            workers, entry = [int(word) for word in line.split()], b""
    for look in range(_LOOKS if entry or workers else 0):
        time.sleep(_PAUSE * min(look, 1))
        for pid in processes(_started_with(entry) if entry else workers):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    for folder in sys.argv[1:]:
        # Imported here: only a server has a folder.
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
