"""Ends the workers, or the server, of a process that was killed; ``kill -9`` calls no handler.

torch starts each worker in its own session, where it outlives a killed agent, keeps the GPU, and
writes the same checkpoint as its replacement. Therefore `rdzv run` starts this file as a program
without packages. It reads a pipe of the agent, which the system closes however the agent ends, and
then kills the processes that the agent named last. Linux's parent-death signal does not help: each
worker would have to set it, and it does not reach the worker's children.
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

# Prefix of a line with an environment variable in hexadecimal digits; other lines have pids.
_EXPECTED = "="
# Look _LOOKS times for processes, _PAUSE seconds apart, because a process may still start.
_LOOKS, _PAUSE = 3, 0.1


class Guard:
    """The process that kills workers once this process has ended; for one thread.

    Args:
        folders: the guard's process also deletes these folders.
    """

    def __init__(self, *folders: str) -> None:
        self._folders = folders
        self._process: subprocess.Popen[bytes] | None = None
        self._named: tuple[int, ...] = ()
        itself = weakref.ref(self)
        # A forked worker would keep the pipe open.
        os.register_at_fork(after_in_child=lambda: guard._let_go() if (guard := itself()) else None)

    def start(self) -> None:
        """Start the process unless it runs; if that fails, the workers have no guard."""
        if self._process is not None and self._process.poll() is None:
            return
        try:
            self._process = subprocess.Popen(
                # -I and -S keep installed packages out.
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
        """Start the process again if something has killed it."""
        if self._process is not None and self._process.poll() is not None:
            self.start()
            self.watch(self._named)

    def expect(self, variable: str, value: str) -> None:
        """Announce a unique variable of the processes that this process is about to start.

        This process may be killed before it knows and names all their pids.
        """
        self._say(_EXPECTED + f"{variable}={value}".encode().hex())

    def watch(self, workers: Iterable[int]) -> None:
        """Replace the processes that the guard kills when this process ends."""
        self._named = tuple(workers)
        self._say(" ".join(map(str, self._named)))

    def _say(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def stop(self) -> None:
        """End the guard's process, which first kills the named processes, if there are any."""
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
    """Map each live process of the workers' sessions, by pid, to its worker.

    The kernel gives no new process an ended worker's pid while the worker's session has processes.
    """
    found: dict[int, int] = {}
    for name in os.listdir("/proc") if workers else ():
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                state, _, _, session = stat.read().rpartition(b")")[2].split()[:4]
                pid, worker = int(name), int(session)
                # A worker may have no session of its own (Python's start methods give none).
                if state not in (b"Z", b"X") and (worker in workers or pid in workers):
                    found[pid] = worker if worker in workers else pid
    return found


def _started_with(entry: bytes) -> list[int]:
    """The other processes whose environment has ``entry``."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environ:
            if entry in environ.read().split(b"\0"):
                found.append(int(name))
    return found


def _main() -> None:
    # A signal to the whole service or terminal must not end the guard before the agent.
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
        for pid in processes([*workers, *(_started_with(entry) if entry else ())]):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    for folder in sys.argv[1:]:
        # Imported here, because only servers have folders.
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main()
