"""Agents that are forked from a process which has imported torch, which takes 2 s of a processor.

Such an agent has a process, a session, an environment and a log of its own, and runs the function
that the programs `torchrun` and `rdzv run` run. What depends on the start of Python starts it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

from examples.demo.agents import RDZV_RUN, TORCHRUN

__all__ = ["Forked", "is_forkable"]

# What torch reads as it is imported.
_AT_IMPORT = {"LOGLEVEL", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS"}

_SCRIPTS = {TORCHRUN: ["torchrun"], RDZV_RUN: ["rdzv", "run"]}


def is_forkable(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether it is Python with torchrun or `rdzv run`, and nothing around it."""
    if _AT_IMPORT & environ.keys():
        return False
    return command[0] == sys.executable and _launcher(command) is not None


def _launcher(command: Sequence[str]) -> tuple[str, ...] | None:
    return next((it for it in _SCRIPTS if tuple(command[1 : 1 + len(it)]) == it), None)


@cache
def _forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            __name__,
            "torch.distributed.run",
            "rdzv_plugins.process.agent",
            "rdzv_plugins.process.factory",
            "rdzv_plugins.cli",
        ]
    )
    return context


class Forked:
    """The process of an agent, with what `subprocess.Popen` has of the same names."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        launcher = _launcher(command)
        assert launcher is not None
        argv = [*_SCRIPTS[launcher], *command[1 + len(launcher) :]]
        self._command = command
        log.touch()
        # A daemon does not outlive the tests.
        self._process = _forks().Process(
            target=_become, args=(argv, dict(environ), os.getcwd(), log), daemon=True
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


def _become(argv: list[str], environ: dict[str, str], folder: str, log: Path) -> None:
    """Run an agent's program, and end as Python ends."""
    import torch.distributed.run

    import rdzv_plugins.cli

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    sys.argv = argv
    by_signal = False
    try:
        if argv[0] == "torchrun":
            torch.distributed.run.main()
        else:
            rdzv_plugins.cli.main()
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
