"""Takes threads and descriptors from agents that run, by the limits that an administrator sets."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

__all__ = [
    "AS_USER",
    "WITHOUT_THREADS",
    "allow_threads",
    "no_descriptors",
    "no_threads",
    "open_to_all",
]

# The kernel limits no threads of root's; nobody else here has this number. Such a process may
# still read Python and this package, which may be root's alone.
_OTHER_USER = [
    "setpriv", "--reuid=64321", "--clear-groups",
    "--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override",
]  # fmt: skip
_USER = _OTHER_USER if os.getuid() == 0 else []


def _torchrun(*prefix: str) -> tuple[str, str]:
    return (
        "-c",
        "import os, sys\n"
        f"command = [*{[*_USER, *prefix]}, sys.executable, '-m', 'torch.distributed.run']\n"
        "os.execvp(command[0], [*command, *sys.argv[1:]])",
    )


AS_USER = _torchrun()
"""Python's arguments that run torchrun as a user whom limits bind."""

WITHOUT_THREADS = _torchrun("prlimit", "--nproc=0:")
"""The same, with no thread from the start, until `allow_threads`."""


@contextmanager
def open_to_all() -> Iterator[Path]:
    """A folder in which that user may write; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="rdzv-test-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def no_threads(*pids: int) -> Iterator[None]:
    """These processes of `AS_USER` can start neither a thread nor a process."""
    with ExitStack() as limits:
        for pid in pids:
            limits.enter_context(_limited(pid, "nproc", 0))
        yield


def allow_threads(pid: int) -> None:
    """End what `WITHOUT_THREADS` began."""
    most = _limit(pid, "nproc", "HARD")
    subprocess.run([*_USER, "prlimit", f"--pid={pid}", f"--nproc={most}:"], check=True)


@contextmanager
def no_descriptors(*pids: int) -> Iterator[None]:
    """These processes of `AS_USER` can open nothing more; what is open stays open."""
    with ExitStack() as limits:
        for pid in pids:
            taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
            free = next(number for number in range(len(taken) + 1) if number not in taken)
            limits.enter_context(_limited(pid, "nofile", free))
        yield


@contextmanager
def _limited(pid: int, what: str, limit: int) -> Iterator[None]:
    """With this soft limit; the user sets it, for whom more rights are not needed."""
    ask, before = [*_USER, "prlimit", f"--pid={pid}"], _limit(pid, what, "SOFT")
    subprocess.run([*ask, f"--{what}={limit}:"], check=True)
    try:
        yield
    finally:
        with suppress(subprocess.CalledProcessError):  # It has ended.
            subprocess.run([*ask, f"--{what}={before}:"], capture_output=True, check=True)


def _limit(pid: int, what: str, which: str) -> str:
    shown = [f"--pid={pid}", f"--{what}", f"--output={which}", "--raw", "--noheadings"]
    ask = [*_USER, "prlimit", *shown]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
