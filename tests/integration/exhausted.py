"""Takes threads and descriptors from agents that run, by the limits that an administrator sets.

Run as a program, it is torchrun of a user whom limits bind, or a Python program whose folder for
temporary files has room for one file.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.integration import forked

__all__ = [
    "AS_USER",
    "NO_ROOM",
    "WITHOUT_THREADS",
    "allow_threads",
    "no_descriptors",
    "no_threads",
    "open_to_all",
]

# The kernel limits no threads of root's; nobody else here has this number. Such a process may
# still read Python and this package, which may be root's alone.
_UID = 64321
_OTHER_USER = [
    "setpriv", f"--reuid={_UID}", "--clear-groups",
    "--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override",
]  # fmt: skip
_USER = _OTHER_USER if os.getuid() == 0 else []

AS_USER = ("-m", "tests.integration.exhausted", "threads")
"""Python's arguments that run torchrun as a user whom limits bind."""

WITHOUT_THREADS = ("-m", "tests.integration.exhausted", "no-threads")
"""The same, with no thread from the start, until `allow_threads`."""

NO_ROOM = ("-m", "tests.integration.exhausted", "no-room")
"""Python's arguments, before those that name a program, that leave it room for no second file."""

_ONE_FILE = "nr_inodes=2"


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


def _be_the_user() -> None:
    """What setpriv does for `_OTHER_USER`, but in this process."""
    keep_caps, set_dumpable, ambient, add, dac_override = 8, 4, 47, 2, 1
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    mask = 1 << dac_override
    caps = (ctypes.c_uint32 * 6)(mask, mask, mask)
    done = [libc.prctl(keep_caps, 1, 0, 0, 0)]
    os.setgroups([])
    os.setresuid(_UID, _UID, _UID)
    done.append(libc.capset(header, caps))
    done.append(libc.prctl(ambient, add, dac_override, 0, 0))
    # As after the start of a program.
    done.append(libc.prctl(set_dumpable, 1, 0, 0, 0))
    if any(done):
        raise OSError(ctypes.get_errno(), "cannot become another user")


def _run_without_room(program: list[str]) -> None:
    folder = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="small-tmp-")
    mount = ["mount", "-t", "tmpfs", "-o", _ONE_FILE, "none", folder]
    if os.geteuid() == 0:
        # In this process, which may have been forked from one that has imported torch.
        forked.unshare(0)
        subprocess.run(mount, check=True)
        forked.run_here(program)
    else:
        shell = f'{" ".join(mount)}; exec "$@"'
        within = ["unshare", "--mount", "--map-root-user", "sh", "-ec", shell, "sh"]
        os.execvp(within[0], [*within, sys.executable, *program])


if __name__ == "__main__":
    if sys.argv[1] == "no-room":
        _run_without_room(sys.argv[2:])
        sys.exit()
    if _USER:
        _be_the_user()
    if sys.argv[1] == "no-threads":
        resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    from torch.distributed import run

    run.main(sys.argv[2:])
