"""Standbys of ``rdzv run --warm`` under torch's own start of workers, compared with cold starts."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    RunProcsResult,
    Std,
    start_processes,
)
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    subprocess_handler,
)

from rdzv_plugins.process import warm
from rdzv_plugins.process.standby import USES_GPU
from rdzv_plugins.process.warm import Standbys
from rdzv_plugins.process.worker import VARIABLE, CurrentRound
from rdzv_plugins.testing.harness import until

# Fast to import, and not imported by the program of a standby.
MODULE = "wave"

FACTS = f"""
import json, multiprocessing, os, pickle, signal, sys, threading
import rdzv_plugins
had = "{MODULE}" in sys.modules

def double(number):
    return 2 * number

if __name__ == "__main__":
    main = sys.modules["__main__"]
    child = os.fork()
    if child == 0:
        os._exit(5)
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.apply(double, (4,))
    facts = {{
        "doubled": doubled,
        "bound": rdzv_plugins.end_with_agent(),
        "forked": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]),
        "pickled": pickle.loads(pickle.dumps(double))(2),
        "argv": [sys.argv, sys.orig_argv, sys.flags.safe_path],
        "path": sys.path,
        "main": [str(getattr(main, name, None)) for name in
                 ("__name__", "__file__", "__spec__", "__package__", "__cached__", "__doc__")],
        "loader": type(main.__loader__).__name__,
        "globals": sorted(set(globals()) - {{"__annotations__"}}),
        "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getppid()],
        "fds": {{it: os.path.basename(os.path.realpath("/proc/self/fd/" + it))
                for it in os.listdir("/proc/self/fd")}},
        "input": sys.stdin.read(),
        "status": [it for it in open("/proc/self/status") if it.startswith(
            ("Umask", "SigB", "SigI", "SigC", "Cap", "NoNewPrivs", "Cpus", "Mems", "Threads"))],
        "limits": open("/proc/self/limits").read(),
        "threads": len(threading.enumerate()),
        "priority": [(os.getpriority(os.PRIO_PROCESS, t), os.sched_getscheduler(t)) for t in tasks],
        "oom": open("/proc/self/oom_score_adj").read(),
        "signals": [str(signal.getsignal(it)) for it in signal.valid_signals()],
        "cwd": os.getcwd(),
        "streams": [(it.isatty(), it.encoding, it.line_buffering, it.write_through)
                    for it in (sys.stdin, sys.stdout, sys.stderr)],
        "environment": dict(os.environ),
    }}
    print("warm" if had else "cold", file=sys.stderr)
    print(json.dumps(facts))
"""


class Node:
    """What the agent of a node does with its workers, without a rendezvous."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder = folder
        self.standbys = Standbys([MODULE, *modules])
        self.contexts: list[PContext] = []
        self.python = sys.executable
        self.options: dict[str, Any] = {}

    def fill(
        self,
        *arguments: str,
        ranks: int = 1,
        low: bool = False,
    ) -> None:
        handler: Any = SimpleNamespace(next_rendezvous=lambda: None)
        spec = WorkerSpec(
            role="test",
            local_world_size=ranks,
            rdzv_handler=handler,
            entrypoint=self.python,
            args=("-u", *arguments),
            **self.options,
        )
        self.standbys.attend(spec)
        if low:
            self.renew()
        else:
            handler.next_rendezvous()

    def renew(self) -> None:
        """What happens some seconds after the workers have started."""
        self.standbys._due = 0.0
        self.standbys.renew()

    def start(self, *arguments: str, ranks: int = 1, **logs: Any) -> PContext:
        """Start workers, from standbys if there are any."""
        folder = self.folder / f"logs{len(self.contexts)}"
        folder.mkdir()
        with self.standbys.starting():
            context = start_processes(
                name="trainer",
                entrypoint=self.python,
                args=dict.fromkeys(range(ranks), ("-u", *arguments)),
                envs={rank: {"RANK": str(rank), "ROLE_NAME": "x"} for rank in range(ranks)},
                logs_specs=DefaultLogsSpecs(log_dir=str(folder), **logs),
                log_line_prefixes={rank: f"[prefix{rank}]:" for rank in range(ranks)},
                **self.options,
            )
        self.contexts.append(context)
        return context

    def end(self, *arguments: str) -> tuple[RunProcsResult, str, str]:
        """Run a worker; its result, and what it printed."""
        result = self.start(*arguments, redirects=Std.ALL).wait(30, 0.02)
        assert result is not None
        return result, Path(result.stdouts[0]).read_text(), Path(result.stderrs[0]).read_text()

    def close(self) -> None:
        self.standbys.close()
        for context in self.contexts:
            context.close(signal.SIGKILL)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with closing(Node(tmp_path)) as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder / "train.py"


@contextmanager
def stdin(descriptor: int) -> Iterator[None]:
    """This process and its workers read the file."""
    before = os.dup(0)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


@pytest.mark.parametrize("kind", ["script", "module", "folder", "archive", "link", "safe", "low"])
def test_a_script_finds_what_it_finds_after_a_cold_start(
    node: Node, script: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = CurrentRound(run_id="x", round=1, world_id="x", cause="x", agent=os.getpid())
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(now).decode())
    script.write_text(FACTS)
    no_spawn = FACTS.replace("pool.apply(double, (4,))", "8")
    arguments = [str(script)]
    if kind == "module":
        monkeypatch.chdir(script.parent)
        arguments = ["-m", "train"]
    elif kind == "folder":
        # Python spawns no processes from the main module of a folder or an archive.
        script.with_name("__main__.py").write_text(no_spawn)
        arguments = [str(script.parent)]
    elif kind == "archive":
        arguments = [str(script.with_suffix(".pyz"))]
        with zipfile.ZipFile(arguments[0], "w") as archive:
            archive.writestr("__main__.py", no_spawn)
    elif kind == "link":
        os.symlink(script, node.folder / "link")
        monkeypatch.chdir(node.folder)
        arguments = ["link"]
    elif kind == "safe":
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
    arguments += ["--lr", "-u", "\udc80 ü"]
    (node.folder / "input").write_text("typed")
    results = []
    for is_warm in (False, True):
        with stdin(os.open(node.folder / "input", os.O_RDONLY)):
            if is_warm:
                node.fill(*arguments, low=kind == "low")
                if kind == "low":
                    assert until(partial(is_low, node.standbys.pids[0]), 20)
            result, printed, errors = node.end(*arguments)
        assert errors == ("warm\n" if is_warm else "cold\n")
        assert not result.failures
        # Loaders show their place in memory, and pipes their number.
        facts = json.loads(re.sub(r" at 0x\w+|:\[\d+\]", "", printed))
        del facts["environment"]["TORCHELASTIC_ERROR_FILE"]
        results.append(facts)
    assert results[0] == results[1]
    assert results[1]["doubled"] == 8
    assert results[1]["bound"]
    assert results[1]["input"] == "typed"


def is_low(pid: int) -> bool:
    return os.sched_getscheduler(pid) == os.SCHED_BATCH


ENDS = {
    "exit": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('no data')",
    "error": "def f():\n    raise ValueError('boom')\nf()",
    "syntax": "def f(:",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "interrupt": "raise KeyboardInterrupt",
    "left": "import threading, os\n"
    "threading.Thread(target=lambda: (threading.main_thread().join(), os._exit(4))).start()",
    "recorded": "import json, os, sys\n"
    "json.dump({'message': 'boom'}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
    "sys.exit(1)",
}


@pytest.mark.parametrize("how", [*ENDS, "absent", "module"])
def test_a_worker_ends_as_after_a_cold_start(node: Node, script: Path, how: str) -> None:
    arguments = ["-m", "no.such.module"] if how == "module" else [str(script)]
    if how in ENDS:
        script.write_text(ENDS[how])
    seen = []
    for is_warm in (False, True):
        if is_warm:
            node.fill(*arguments)
        standbys = node.standbys.pids
        result, printed, errors = node.end(*arguments)
        failure = result.failures[0]
        assert (failure.pid in standbys) == is_warm
        said = failure.message.replace(str(failure.pid), "PID")
        seen.append((failure.exitcode, said, printed, errors))
        assert how != "recorded" or said == "boom"
    assert seen[0] == seen[1]
    assert seen[0][0] != 0


def test_logs_prefixes_and_signals_are_torchs(
    node: Node, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(
        f"import os, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        # torch's tee splits lines that are written in parts.
        f"sys.stdout.write(f\"{{'{MODULE}' in sys.modules}}\\n\")\n"
        f"sys.stderr.write(os.environ['RANK'] + '\\n')\n"
        # A signal that comes just before a sleep does not end it.
        f"while True: time.sleep(0.05)"
    )
    node.fill(str(script), ranks=2)
    standbys = node.standbys.pids
    context = node.start(str(script), ranks=2, tee=Std.ALL)
    assert sorted(context.pids().values()) == sorted(standbys)
    texts = [*context.stdouts.values(), *context.stderrs.values()]
    assert until(lambda: all(Path(text).read_text().endswith("\n") for text in texts), 20)
    context.close(signal.SIGTERM, 20)
    result = context.wait(5, 0.02)
    assert result is not None
    assert {it.exitcode for it in result.failures.values()} == {7}
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[prefix0]:True", "[prefix1]:True"]
    assert sorted(shown.err.splitlines()) == ["[prefix0]:0", "[prefix1]:1"]


def test_what_an_import_prints_is_in_the_workers_logs(node: Node, script: Path) -> None:
    """Also if the agent has no outputs."""
    script.write_text("print('script')")
    script.with_name("says.py").write_text("import sys; print('a'); print('b', file=sys.stderr)")
    node.standbys = Standbys(["says", "no_such_module"])
    for number in (1, 2):
        os.set_inheritable(number, False)
    try:
        node.fill(str(script))
    finally:
        for number in (1, 2):
            os.set_inheritable(number, True)
    _, printed, errors = node.end(str(script))
    assert printed == "a\nscript\n"
    no_module = "ModuleNotFoundError(\"No module named 'no_such_module'\")"
    assert errors == f"b\nrdzv run: --preload: no_such_module: {no_module}\n"


def test_what_a_crashing_import_prints_is_in_the_workers_logs(node: Node, script: Path) -> None:
    go = node.folder / "go"
    script.touch()
    script.with_name("crashes.py").write_text(
        f"import os, time\n"
        f"while not os.path.exists('{go}'): time.sleep(0.01)\n"
        f"os.write(2, b'why')\n"
        f"os.abort()"
    )
    node.standbys = Standbys(["crashes"])
    node.fill(str(script))
    (pid,) = node.standbys.pids
    context = node.start(str(script), redirects=Std.ALL)
    assert context.pids() == {0: pid}
    errors = Path(context.stderrs[0])
    assert until(lambda: os.path.samefile(f"/proc/{pid}/fd/2", errors), 20)
    go.touch()
    result = context.wait(20, 0.02)
    assert result is not None
    assert result.failures[0].exitcode == -signal.SIGABRT
    assert errors.read_text() == "why"


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_script_from_stdin_starts_cold(node: Node, name: str) -> None:
    node.fill(name)
    assert not node.standbys.pids
    read, write = os.pipe()
    os.write(write, b"print('read')")
    os.close(write)
    with stdin(read):
        _, printed, _ = node.end(name)
    assert printed == "read\n"


def wrapper(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o700)
    return str(path)


def test_variables_of_a_wrapper_and_of_an_import_stay(node: Node, script: Path) -> None:
    node.python = wrapper(node.folder / "x", "export WRAPPED=1", f'exec {sys.executable} "$@"')
    script.with_name("sets.py").write_text(
        "import os; os.environ['IMPORTED'] = '2'; os.environ['HOME'] = '3'"
    )
    script.write_text("import os, sets; print(*map(os.getenv, ['WRAPPED', 'IMPORTED', 'HOME']))")
    node.standbys = Standbys(["sets"])
    for is_warm in (False, True):
        if is_warm:
            node.fill(str(script))
        standbys = node.standbys.pids
        _, printed, _ = node.end(str(script))
        assert ([*node.contexts[-1].pids().values()] == standbys) == is_warm
        assert printed == "1 2 3\n"


def test_numactl_binds_a_standby(node: Node, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numa = pytest.importorskip("torch.numa.binding")
    monkeypatch.setattr(numa, "_get_logical_cpus_to_bind_to", lambda **_: {3})
    wrapper(node.folder / "numactl", "export BOUND=$1", "shift", 'exec "$@"')
    monkeypatch.setenv("PATH", f"{node.folder}:{os.environ['PATH']}")
    node.options["numa_options"] = numa.NumaOptions(numa.AffinityMode.NODE)
    script.write_text("import os; print(os.environ['BOUND'])")
    node.fill(str(script))
    standbys = node.standbys.pids
    _, printed, _ = node.end(str(script))
    assert [*node.contexts[-1].pids().values()] == standbys
    assert printed == "--physcpubind=3\n"


def cold(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.getMessage() for it in caplog.records if "start cold" in it.getMessage()]


def test_a_changed_variable_starts_cold_with_one_line(
    node: Node, script: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script.write_text("import os; print(os.environ['OMP_NUM_THREADS'])")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    node.fill(str(script), ranks=2)
    standbys = node.standbys.pids
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    context = node.start(str(script), ranks=2, redirects=Std.ALL)
    assert not {*context.pids().values()} & {*standbys}
    result = context.wait(20, 0.02)
    assert result is not None
    assert Path(result.stdouts[0]).read_text() == "2\n"
    (line,) = cold(caplog)
    assert line == "2 of 2 workers start cold: since the standbys started, OMP_NUM_THREADS changed"
    # The next standbys have the variables of these workers.
    node.renew()
    assert not any(Path(f"/proc/{pid}").exists() for pid in standbys)
    standbys = node.standbys.pids
    assert sorted(node.start(str(script), ranks=2).pids().values()) == sorted(standbys)


@pytest.mark.parametrize("why", ["killed", "gpu", "absent", "wrapper", "unbound", "no memfd"])
def test_without_a_standby_workers_start_cold(
    node: Node,
    script: Path,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script.write_text("print('trained')")
    if why == "gpu":
        script.with_name("torch.py").write_text(
            "class cuda:\n    is_initialized = staticmethod(lambda: True)"
        )
        node.standbys = Standbys(["torch"])
    python = node.folder / "python"
    if why == "wrapper":
        monkeypatch.setattr(warm, "_ORDER_SECONDS", 0.2)
        wrapper(python, "[ $# = 2 ] || exec sleep 600", f'exec {sys.executable} "$@"')
    if why in ("absent", "wrapper"):
        node.python = str(python)
    if why == "unbound":
        # As if numactl were absent.
        monkeypatch.setattr(warm, "get_subprocess_handler", Mock(side_effect=RuntimeError))
    if why == "no memfd":
        # As a Python that was built with a glibc before 2.27.
        monkeypatch.delattr(os, "memfd_create")
    node.fill(str(script))
    if why == "absent":
        python.symlink_to(sys.executable)
    if why == "killed":
        os.kill(node.standbys.pids[0], signal.SIGKILL)
    for it in node.standbys._waiting if why != "wrapper" else ():
        assert it.process.wait(20) == (USES_GPU if why == "gpu" else -signal.SIGKILL)
    result, printed, _ = node.end(str(script))
    assert not result.failures
    assert printed == "trained\n"
    assert {
        "killed": "the standby ended with -9",
        "gpu": "--preload initializes CUDA",
        "absent": "no standby can start: [Errno 2]",
        "wrapper": "a standby could not take over (TimeoutError(",
        "unbound": "no standby was started",
        "no memfd": "no standby can start: module 'os' has no attribute 'memfd_create'",
    }[why] in "".join(cold(caplog))


def test_an_agent_without_outputs_lends_workers_none(
    node: Node, script: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = node.folder / "seen"
    script.write_text(f"import sys; open('{seen}', 'w').write(str(sys.stdout))")
    os.set_inheritable(1, False)
    try:
        node.fill(str(script))
        result = node.start(str(script)).wait(20, 0.02)
    finally:
        os.set_inheritable(1, True)
    assert result is not None
    assert not result.failures
    assert seen.read_text() == "None"
    assert "this agent has no outputs" in "".join(cold(caplog))


def test_the_order_may_come_while_modules_are_imported(node: Node, script: Path) -> None:
    script.write_text(f"import sys; print('{MODULE}' in sys.modules)")
    script.with_name("slow.py").write_text(
        "import os, time\n"
        "while 'RANK' not in os.environ and not os.path.exists('GO'): time.sleep(0.01)".replace(
            "GO", str(node.folder / "go")
        )
    )
    node.standbys = Standbys(["slow", MODULE])
    node.fill(str(script))
    (pid,) = node.standbys.pids
    context = node.start(str(script), redirects=Std.ALL)
    assert context.pids() == {0: pid}
    (node.folder / "go").touch()
    result = context.wait(20, 0.02)
    assert result is not None
    assert not result.failures
    assert Path(result.stdouts[0]).read_text() == "True\n"


def test_torch_still_starts_workers_where_we_hand_it_a_standby() -> None:
    changed = "torch changed what rdzv_plugins.process.warm leans on: SubprocessHandler"
    assert "Popen" in vars(subprocess_handler), changed
    code = inspect.unwrap(SubprocessHandler._popen).__code__
    given = {
        *code.co_names,
        *code.co_consts,
        *(it for c in code.co_consts if isinstance(c, tuple) for it in c),
    }
    assert {"Popen", "args", "env", "stdout", "stderr", "start_new_session"} <= given, changed
