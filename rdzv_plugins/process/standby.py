"""The program of a standby: it imports modules, waits, and then becomes a worker.

`process.warm` runs this file with the workers' interpreter, which may lack this package; therefore
the file imports Python's own modules only. Its arguments: the descriptor of a socket, "low" or
"normal" for the priority, the modules to import, and the worker's own arguments, which begin with
the script, or with "-m" and a module.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import shutil
import socket
import sys
import threading
import types
import zipfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

USES_GPU = 75
"""The exit status of a standby whose modules have initialized CUDA."""

KILLED_FIRST = "1000"
"""A standby's score: if memory runs out, the kernel kills standbys before workers."""

READY = b"!"
"""What a standby sends before it reads its order."""

_NICE = 10
_OOM_SCORE = "/proc/self/oom_score_adj"


class _Order(threading.Thread):
    """Waits for the agent's order to become a worker; ends the process when the agent has ended.

    A thread, because the agent may be killed while the main thread imports modules.

    Attributes:
        content: the round's variables and the worker's arguments; None: there was no order yet.
        end_status: the exit status if no order can come any more.
    """

    def __init__(self, agent: socket.socket, low: bool) -> None:
        super().__init__(daemon=True)
        self.content: dict[str, Any] | None = None
        self.end_status = 0
        self._agent = agent
        self._low = low

    def run(self) -> None:
        undo = _stand_back(self._low)
        try:
            self._agent.send(READY)
            text, outputs, _, _ = socket.recv_fds(self._agent, 1, 2)
            while text and (part := self._agent.recv(1 << 16)):
                text += part
            content = json.loads(text)
        except (OSError, ValueError):
            # A killed agent leaves an incomplete order.
            os._exit(self.end_status)
        self._agent.close()
        undo()
        # An import that ends the process must have shown why.
        _release(outputs)
        self.content = content


def _stand_back(low: bool) -> Callable[[], None]:
    """Lower this process's priority; returns the undo function. Not for the main thread."""
    main, own = os.getpid(), threading.get_native_id()
    before, score, is_batch = os.getpriority(os.PRIO_PROCESS, own), "", False
    with suppress(OSError):
        with open(_OOM_SCORE) as file:
            score = file.read()
        with open(_OOM_SCORE, "w") as file:
            file.write(KILLED_FIRST)
    if low and sys.platform == "linux":
        if is_batch := os.sched_getscheduler(main) == os.SCHED_OTHER:
            os.sched_setscheduler(main, os.SCHED_BATCH, os.sched_param(0))
        with suppress(OSError):
            # Try on this thread whether the process may raise its priority again.
            os.setpriority(os.PRIO_PROCESS, own, before + 1)
            os.setpriority(os.PRIO_PROCESS, own, before)
            os.setpriority(os.PRIO_PROCESS, main, before + _NICE)

    def undo() -> None:
        with suppress(OSError), open(_OOM_SCORE, "w") as file:
            file.write(score)
        # Look twice: meanwhile a thread may start another one, which gets its low priority.
        for _ in range(2 if is_batch else 0):
            for task in map(int, os.listdir("/proc/self/task")):
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, task, before)
                with suppress(OSError):
                    os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))

    return undo


def _release(outputs: list[int]) -> None:
    """Give the worker its outputs, and what the imports have printed."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        printed = os.dup(number)
        os.dup2(outputs[number - 1], number)
        os.close(outputs[number - 1])
        with (
            suppress(OSError),
            open(printed, "rb") as file,
            open(number, "wb", 0, closefd=False) as output,
        ):
            file.seek(0)
            shutil.copyfileobj(file, output)


def _preload(modules: list[str], arguments: list[str]) -> None:
    sys.argv = arguments
    if not getattr(sys.flags, "safe_path", False):  # New in Python 3.11.
        script = os.path.realpath(arguments[0])
        is_archive = os.path.isdir(script) or zipfile.is_zipfile(script)
        folder = arguments[0] if is_archive else os.path.dirname(script)
        sys.path[0] = os.getcwd() if arguments[0] == "-m" else folder
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:
            print(f"rdzv run: --preload: {module}: {error!r}", file=sys.stderr)  # noqa: T201


def _program(arguments: list[str]) -> Callable[[], object]:
    """What runs the script, or the module after -m, as Python's own start does."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    script, *others = arguments
    if script == "-m":
        sys.argv = ["-m", *others[1:]]
        return functools.partial(runpy._run_module_as_main, others[0])  # type: ignore[attr-defined]
    path = os.path.abspath(script)
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        return functools.partial(
            runpy._run_module_as_main,  # type: ignore[attr-defined]
            "__main__",
            alter_argv=False,
        )
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file)
        if code is None:
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file '{path}': {why}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    return functools.partial(exec, code, main.__dict__)


def _become_worker() -> Callable[[], object]:
    """Wait as a standby; returns the worker's program."""
    channel, priority, modules, *arguments = sys.argv[1:]
    agent = socket.socket(fileno=int(channel))
    agent.set_inheritable(False)
    order = _Order(agent, priority == "low")
    order.start()
    _preload(modules.split(","), arguments)
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if order.content is None and cuda is not None and cuda.is_initialized():
        # An order may already be under way; after shutdown() the agent can send no order.
        order.end_status = USES_GPU
        with suppress(OSError):
            agent.shutdown(socket.SHUT_RD)
    order.join()
    assert order.content is not None
    # The variables that the interpreter's wrapper and the modules have set stay.
    os.environ.update(order.content["environment"])
    sys.argv = order.content["arguments"]
    sys.orig_argv[-len(arguments) - 4 :] = sys.argv
    return _program(sys.argv)


if __name__ == "__main__":
    try:
        # The script runs in its own `__main__` module, and does not see this module's globals.
        (_become_worker())()
    except BaseException as error:
        # Show only the script's own frames; a bare `raise` adds no frame.
        while (trace := error.__traceback__) and trace.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = trace.tb_next
        raise
