"""Programs that are forked from a process which has imported torch, which takes 2 s of a processor.

Such a program has a process, a session, an environment and a log of its own, and runs the function
that its module runs as a program. What depends on the start of Python starts it.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.fleet.agents import RDZV_RUN, TORCHRUN, Fleet, Process

__all__ = [
    "Forked",
    "ForkedFleet",
    "is_forkable",
    "run",
    "run_here",
    "serve",
    "serving",
    "unshare",
    "use",
]

# What torch reads as it is imported.
_AT_IMPORT = {"LOGLEVEL", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS"}

# What a fork has imported.
_IMPORTED = (
    __name__,
    "torch.distributed.run",
    "rdzv_plugins.process.agent",
    "rdzv_plugins.process.factory",
    "rdzv_plugins.stores.redis",
    "rdzv_plugins.stores.quorum.client",
    "rdzv_plugins.cli",
)

# Without the freeze each fork's garbage collector would go through torch's objects.
_SERVER = """
import gc, select
from importlib import import_module
from multiprocessing.forkserver import main
if {0} in select.select([{0}, {1}], [], [])[0]:
    gc.disable()
    for name in {imported}:
        import_module(name)
    gc.freeze()
    gc.enable()
    main({0}, {1}, ())
"""

_forkserver: Any = vars(forkserver)["_forkserver"]

_SCRIPTS = {TORCHRUN: ["torchrun"], RDZV_RUN: ["rdzv", "run"]}

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000


def is_forkable(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether it is Python with a launcher or a program of the tests, in namespaces or not."""
    if _AT_IMPORT & environ.keys() or sys.executable not in command:
        return False
    within, program = _parts(command)
    # Others than root enter namespaces by way of one for users.
    if within and (within[0] not in ("unshare", "nsenter") or os.geteuid() != 0):
        return False
    return program[0] == "-m" and (
        _launcher(program) is not None or program[1].startswith("tests.integration.")
    )


def _parts(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before Python, and Python's arguments."""
    python = command.index(sys.executable)
    return [*command[:python]], [*command[python + 1 :]]


def _launcher(program: Sequence[str]) -> tuple[str, ...] | None:
    return next((it for it in _SCRIPTS if tuple(program[: len(it)]) == it), None)


@cache
def _server() -> tuple[str, subprocess.Popen[bytes]]:
    """A fork server that ends with this process, and its address.

    It imports torch at its first request: some runs of the tests have none.
    """
    address = str(connection.arbitrary_address("AF_UNIX"))  # type: ignore[attr-defined]
    alive_r, _ = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        ends = (listener.fileno(), alive_r)
        program = _SERVER.format(*ends, imported=_IMPORTED)
        command = [sys.executable, "-c", program]
        server = subprocess.Popen(command, pass_fds=ends, cwd=Path(__file__).parents[2])
    os.close(alive_r)
    return address, server


def serve() -> str:
    """Start a fork server that other processes may `use`; returns its address."""
    return _server()[0]


def use(address: str) -> None:
    """Have this process's programs forked by the server at this address."""
    _forkserver._forkserver_address = address
    # multiprocessing hands a file to each fork, whose end would end its own server.
    _forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    # Otherwise multiprocessing starts a server, because this one is no child of the process.
    _forkserver.ensure_running = lambda: None


@cache
def _forks() -> ForkServerContext:
    if "ensure_running" not in vars(_forkserver):
        use(serve())
    return multiprocessing.get_context("forkserver")


class Forked:
    """The process of a program, with what `subprocess.Popen` has of the same names."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        errors: Path | None = None,
    ) -> None:
        """``errors`` is the file of its standard error; None: ``log``."""
        self._command = command
        log.touch()
        # A daemon does not outlive the tests. It may start nothing, as a program in new namespaces
        # does.
        self._process = _forks().Process(
            target=_become,
            args=(*_parts(command), dict(environ), os.getcwd(), log, errors or log),
            daemon=command[0] != "unshare",
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run(
    command: Sequence[str], environ: Mapping[str, str] | None = None, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end, as `subprocess.run` does."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        process = Forked(command, os.environ if environ is None else environ, out, errors)
        try:
            status = process.wait(seconds)
        finally:
            process.send_signal(signal.SIGKILL)
        return subprocess.CompletedProcess(command, status, out.read_text(), errors.read_text())


@contextmanager
def serving(command: Sequence[str], end: int, lines: int = 1) -> Iterator[list[str]]:
    """A Python program that serves until it gets the signal ``end``; it has no complaints.

    Yields its first lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        process = Forked(command, os.environ, out, errors)
        try:
            while process.poll() is None and out.read_text().count("\n") < lines:
                time.sleep(0.02)
            yield out.read_text().splitlines()
            process.send_signal(end)
            assert (process.wait(20), errors.read_text()) == (0, "")
        finally:
            process.send_signal(signal.SIGKILL)


class ForkedFleet(Fleet):
    """A fleet whose agents are forked where they can be."""

    def _process(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> Process:
        if is_forkable(command, environ):
            return Forked(command, environ, log)
        return super()._process(command, environ, log)

    def lines(self, names: Iterable[str]) -> list[str]:
        """The lines of these agents' logs."""
        logs = [self.agents[name].log.read_text(errors="replace") for name in names]
        return [line for log in logs for line in log.splitlines()]

    def await_line(self, name: str, *words: str, timeout: float = 60) -> str:
        """Wait until a line of an agent's log has all these words."""

        def found() -> str | None:
            lines = self.lines([name])
            return next((line for line in lines if all(word in line for word in words)), None)

        return self.await_that(found, f"a line with {words} in the log of {name}", timeout)

    def let_end(self, name: str, status: int = 0) -> None:
        """Let an agent's workers, which run `programs.worker`, end by themselves."""
        file = self.folder / f"{name}.end"
        # Renamed, so that no worker reads it half written.
        partial = file.with_suffix(".partial")
        partial.write_text(str(status))
        partial.rename(file)


def _become(
    within: list[str],
    program: list[str],
    environ: dict[str, str],
    folder: str,
    log: Path,
    errors: Path,
) -> None:
    """Run a program, and end as Python ends."""
    os.setsid()
    # The tests may run in a shell's background, where SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if within:
        _enter(within)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    for number, path in ((1, log), (2, errors)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    by_signal = False
    try:
        run_here(program)
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        by_signal = isinstance(error, KeyboardInterrupt)
        sys.exit(1)
    finally:
        # multiprocessing leaves these out.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        if by_signal:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


def run_here(program: Sequence[str]) -> None:
    """Do in this process what Python does with these arguments."""
    import torch.distributed.run

    import rdzv_plugins.cli

    launcher = _launcher(program)
    before = () if launcher is None else _SCRIPTS[launcher]
    sys.argv = [*before, *program[len(launcher or "-") :]]
    if launcher == TORCHRUN:
        torch.distributed.run.main()
    elif launcher == RDZV_RUN:
        rdzv_plugins.cli.main()
    elif program[0] == "-c":
        exec(program[1], {"__name__": "__main__"})
    else:
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)


def unshare(namespaces: int) -> None:
    """Give this process namespaces of its own, of files at least. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | namespaces):
        raise OSError(ctypes.get_errno(), "unshare failed")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _enter(within: list[str]) -> None:
    """Do what the command does that stands before Python: ``unshare``, or a host's ``nsenter``."""
    if within[0] == "unshare":
        unshare(_CLONE_NEWNET)
        _serve_forks()
    else:
        libc = ctypes.CDLL(None, use_errno=True)
        (pid,) = (it.removeprefix("--target=") for it in within if it.startswith("--target="))
        opened = [os.open(f"/proc/{pid}/ns/{it}", os.O_RDONLY) for it in ("net", "uts", "mnt")]
        if any(libc.setns(file, 0) for file in opened):
            raise OSError(ctypes.get_errno(), f"{within} failed")


def _serve_forks() -> None:
    """Make this process's fork server a fork of it; multiprocessing would start Python anew."""
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    alive_r, alive_w = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if os.fork() == 0:
            try:
                os.close(alive_w)
                forkserver.main(listener.fileno(), alive_r, [])
            finally:
                os._exit(0)
    os.close(alive_r)
    use(address)
