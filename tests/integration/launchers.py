"""torchrun and `rdzv run` under a change for which neither has an option.

Run as a program, its first argument names the change, the second the launcher: "torchrun" or "run".
The change may be a user whom limits bind: tests take threads and descriptors from such agents while
they run, as an administrator does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
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

AS_USER = ("-m", "tests.integration.launchers", "as-user", "torchrun")
"""Python's arguments that run torchrun as a user whom limits bind."""

WITHOUT_THREADS = ("-m", "tests.integration.launchers", "no-threads", "torchrun")
"""The same, with no thread from the start, until `allow_threads`."""

NO_ROOM = ("-m", "tests.integration.launchers", "no-room")
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


def as_user() -> None:
    """Be the other user: what setpriv does for `_OTHER_USER`, but in this process."""
    if not _USER:
        return
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


def without_threads() -> None:
    as_user()
    resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))


def without_room() -> None:
    """Run the program that the arguments name, and end."""
    program = sys.argv[1:]
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
    sys.exit()


def impatient() -> None:
    """Give the agents' exit barrier a time-out of a second; torch's launcher gives it 300 s."""
    from torch.distributed.launcher import api

    import rdzv_plugins.process.agent

    for module, name in ((api, "LocalElasticAgent"), (rdzv_plugins.process.agent, "RunAgent")):
        setattr(module, name, partial(getattr(module, name), exit_barrier_timeout=1))


class Writer(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        with self._file.open("a") as file:
            file.write(record.getMessage() + "\n")


def recorded() -> None:
    """Have torch's events in ``<folder>/<name>.events``, by the script's options of these names.

    The module's private table is the only way: torch gives a platform no other.
    """
    from torch.distributed.elastic.events import handlers

    folder, name = (sys.argv[sys.argv.index(option) + 1] for option in ("--folder", "--name"))
    handlers._log_handlers["dynamic_rendezvous"] = Writer(Path(folder) / f"{name}.events")


_CHANGES = {
    "impatient": impatient,
    "recorded": recorded,
    "as-user": as_user,
    "no-threads": without_threads,
    "no-room": without_room,
}


if __name__ == "__main__":
    _CHANGES[sys.argv.pop(1)]()
    # Imported under the limits, as a launcher of that user would be.
    if sys.argv[1] == "run":
        import rdzv_plugins.cli

        rdzv_plugins.cli.main()
    else:
        from torch.distributed import run

        run.main(sys.argv[2:])
