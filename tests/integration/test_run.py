"""``rdzv run`` on a real redis: what counts against --max-restarts; else it is torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    NodeRecord,
    RoundDocument,
    Status,
)
from rdzv_plugins.testing.harness import until
from tests import Measure
from tests.fleet.agents import RDZV_RUN, TORCHRUN
from tests.integration import forked
from tests.integration.forked import Forked, is_forkable
from tests.integration.hosts import as_pid_1
from tests.integration.jobs import LEASE, Begin, Pause, Run, runs
from tests.integration.stores import RunningStore, kind_of, running


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    with running(kind_of("redis")) as started:
        yield started


@pytest.fixture
def begin(store: RunningStore, tmp_path: Path) -> Iterator[Begin]:
    """Makes a run of agents of ``rdzv run``, without --max-restarts unless told otherwise."""
    with runs(store, tmp_path, launcher=RDZV_RUN, max_restarts=None) as make:
        yield make


def kill_rank_0(run: Run) -> tuple[list[str], Pause]:
    """``kill -9`` of rank 0 and its workers; the others' fail long before the lease runs out."""
    before = run.worlds()[-1]
    names = [before.nodes[rank] for rank in sorted(before.nodes)]
    logs = {name: run.agents[name].log.stat().st_size for name in names}
    killed = run.agents[names[0]].kill()
    world = run.await_world(names[1:], after=killed, by_rank=True)
    for name in names[1:]:
        log = run.agents[name].log.read_bytes()[logs[name] :].decode()
        assert "waits up to" in log, "its workers did not fail before the lease"
    return names, Pause.of(world, killed)


def test_survivors_train_on_though_their_workers_fail_at_once(
    begin: Begin, record_property: Measure
) -> None:
    run = begin()
    before = run.begin("abc")
    _, pause = kill_rank_0(run)
    record_property("trained, s", round(pause.trained, 2))
    assert run.worlds()[-1].resumed <= before.last_step
    run.stop_training()
    assert run.await_ends("bc") == {"b": 0, "c": 0}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_survivors_train_on_ten_times(begin: Begin, record_property: Measure) -> None:
    run = begin(last_call_timeout=0.02)
    run.begin("abc")
    for turn in range(10):
        names, pause = kill_rank_0(run)
        record_property(f"trained {turn + 1}, s", round(pause.trained, 2))
        names[0] = f"a{turn + 1}"
        run.start_at(names[0], 1)
        run.await_world(names, after=time.monotonic(), by_rank=True)


def test_what_a_leave_does_to_the_others_counts_against_nothing(begin: Begin) -> None:
    run = begin()
    run.begin("abc")
    told = run.agents["a"].signal(signal.SIGTERM)
    run.await_world("bc", after=told, by_rank=True)
    assert run.await_ends("a") == {"a": 128 + signal.SIGTERM}


def test_a_killed_worker_counts_on_its_node_alone(begin: Begin) -> None:
    # All three are needed: a node that came late, on a loaded machine, is new, and would leave.
    run = begin(nodes="3:3", max_restarts=1)
    run.begin("abc")
    for name in "bac":
        killed = run.agents[name].signal_workers(signal.SIGKILL)
        run.await_world("abc", after=killed + 1, by_rank=True)
    run.agents["a"].signal_workers(signal.SIGKILL)
    assert run.await_ends("abc") == {"a": 1, "b": 1, "c": 1}
    for agent in run.agents.values():
        assert "ChildFailedError" in agent.log.read_text()


class Launch:
    """One agent of any launcher with any arguments; its output goes to a file.

    Args:
        starter: the command that starts it; empty: it may be forked.
    """

    def __init__(
        self,
        log: Path,
        launcher: Sequence[str],
        *arguments: str,
        starter: Sequence[str] = (),
    ) -> None:
        self.log = log
        self.process: Forked | subprocess.Popen[bytes]
        command = [*starter, sys.executable, *launcher, *arguments]
        if not starter and is_forkable(command, os.environ):
            self.process = Forked(command, os.environ, log)
            return
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def end(self, timeout: float = 60) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self.log.read_text()}") from None

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGKILL)
                self.process.wait()


def of_a_run(store: RunningStore, run_id: str, nodes: str, lease: float, script: str) -> list[str]:
    options = {**store.config, "keep_alive_interval": lease / 3, "last_call_timeout": 0.1}
    return [
        f"--nnodes={nodes}",
        f"--rdzv-backend={store.backend}",
        f"--rdzv-endpoint={store.endpoint}",
        f"--rdzv-id={run_id}",
        f"--rdzv-conf={','.join(f'{name}={value}' for name, value in options.items())}",
        "--local-addr=127.0.0.1",
        "--no-python",
        "/bin/sh",
        "-c",
        script,
    ]


def test_a_script_that_always_fails_ends_the_job_at_once(
    store: RunningStore, tmp_path: Path, run_id: str, record_property: Measure
) -> None:
    script = f"touch {tmp_path}/failed.$GROUP_RANK; exit 3"
    arguments = of_a_run(store, run_id, "3:3", 60, script)
    with (
        Launch(tmp_path / "a", RDZV_RUN, *arguments) as a,
        Launch(tmp_path / "b", RDZV_RUN, *arguments) as b,
        Launch(tmp_path / "c", RDZV_RUN, *arguments) as c,
    ):
        assert [launch.end() for launch in (a, b, c)] == [1, 1, 1]
        ended = time.time()
        for launch in (a, b, c):
            assert "ChildFailedError" in launch.log.read_text()
            assert "exitcode  : 3" in launch.log.read_text()
    failed = max(file.stat().st_mtime for file in tmp_path.glob("failed.*"))
    record_property("ended after the last failure, s", round(ended - failed, 2))
    assert ended - failed < 20, "somebody waited for a lease"


def test_a_script_that_fails_on_one_node_ends_its_agent_after_the_lease(
    store: RunningStore, tmp_path: Path, run_id: str, record_property: Measure
) -> None:
    script = f'[ "$GROUP_RANK" = 0 ] && exec sleep 600; touch {tmp_path}/failed; exit 3'
    arguments = of_a_run(store, run_id, "2:2", LEASE, script)
    with (
        Launch(tmp_path / "a", RDZV_RUN, *arguments) as a,
        Launch(tmp_path / "b", RDZV_RUN, *arguments) as b,
    ):
        # The other ends too, for the run is closed, and may be faster.
        assert until(lambda: said(a, "ChildFailedError") or said(b, "ChildFailedError"), 60)
        ended = time.time()
        failing = a if said(a, "ChildFailedError") else b
        assert failing.end() == 1
    waited = ended - (tmp_path / "failed").stat().st_mtime
    record_property("waited, s", round(waited, 2))
    assert LEASE <= waited < LEASE + 10


def test_a_signal_ends_an_agent_that_waits_for_an_explanation(
    store: RunningStore, tmp_path: Path, run_id: str
) -> None:
    script = '[ "$GROUP_RANK" = 0 ] && exec sleep 600; exit 3'
    arguments = of_a_run(store, run_id, "2:2", 60, script)
    logs = tmp_path / "a", tmp_path / "b"
    with Launch(logs[0], RDZV_RUN, *arguments) as a, Launch(logs[1], RDZV_RUN, *arguments) as b:
        assert until(lambda: said(a, "waits up to") or said(b, "waits up to"), 60)
        waits = a if said(a, "waits up to") else b
        waits.process.send_signal(signal.SIGTERM)
        assert waits.end(20) == 128 + signal.SIGTERM, waits.log.read_text()
        assert said(waits, "rdzv: SIGTERM ended this agent")


@pytest.mark.parametrize("what", ["closed", "another job's", "an option", "a store that is gone"])
def test_an_error_of_the_rendezvous_is_one_line(
    store: RunningStore, tmp_path: Path, run_id: str, what: str
) -> None:
    arguments = of_a_run(store, run_id, "1:1", LEASE, "exit 0")
    told = {
        "closed": r"closed by 127\.0\.0\.1\[PID\]\); its id is free in \d+ s; now: rdzv clean "
        f"-i {run_id}",
        "another job's": "; use the same on every node, or another --rdzv-id",
        "an option": "unknown option 'nonsense'",
        "a store that is gone": "is it running, and does --rdzv-endpoint name it",
    }[what]
    with contextlib.ExitStack() as stack:
        if what == "closed":
            with Launch(tmp_path / "a", RDZV_RUN, *arguments) as a:
                assert a.end() == 0
            told = told.replace("PID", str(a.process.pid))
        elif what == "another job's":
            other = of_a_run(store, run_id, "2:2", LEASE, "exit 0")
            a = stack.enter_context(Launch(tmp_path / "a", RDZV_RUN, *other))
            assert until(lambda: said(a, "joined as"), 60)
        elif what == "an option":
            arguments = [*arguments[:-4], "--rdzv-conf=nonsense=1", *arguments[-4:]]
        else:
            gone = "--rdzv-endpoint=redis://127.0.0.1:9"
            arguments = [*arguments[:-4], gone, *arguments[-4:]]
        with Launch(tmp_path / "b", RDZV_RUN, *arguments) as b:
            assert b.end() == 1
    errors = [line for line in b.log.read_text().splitlines() if not line.startswith(("I", "W"))]
    assert len(errors) == 1, b.log.read_text()
    assert re.search(told, errors[0]), errors


def said(launch: Launch, words: str) -> bool:
    return words in launch.log.read_text()


# Each with what the worker prints: its rank, its arguments and how it was started.
SCRIPT = """
import os, sys
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
# One write: print would mix the workers' lines where PYTHONUNBUFFERED is set.
sys.stdout.write(f"worker {rank} {size} {__name__} {sys.argv[1:]}\\n")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        pytest.param("--standalone --nproc-per-node=2 {script} 0 --nnodes=5 -- -x", 0, id="script"),
        pytest.param("--standalone {script} 7", 1, id="failing script"),
        pytest.param("--standalone -m {module} 0 --help", 0, id="module"),
        pytest.param("--standalone --no-python /bin/sh -c exit 0", 0, id="no python"),
        # A port of its own: at c10d's default one both launchers would be in one run.
        pytest.param(
            "--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 -- {script} 0",
            0,
            id="c10d",
            marks=pytest.mark.soak,
        ),
        pytest.param("{script} 0", 0, id="no backend", marks=pytest.mark.soak),
        pytest.param("--nnodes=1 {redis} -m {module} 0", 0, id="redis"),
        pytest.param("--nnodes=1 {redis} --max-restarts=1 {script} 7", 1, id="redis, failing"),
        pytest.param(
            "--nnodes=1 {redis} --run-path {script} 0",
            0,
            id="redis, in process",
            marks=pytest.mark.soak,
        ),
        pytest.param("--no-such-option", 2, id="unknown option", marks=pytest.mark.soak),
        pytest.param("--nnodes=1", 2, id="no script"),
    ],
)
def test_rdzv_run_ends_as_torchrun_does(
    store: RunningStore,
    tmp_path: Path,
    arguments: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "script_of_the_test.py"
    script.write_text(SCRIPT)
    # For -m.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def launch(launcher: Sequence[str]) -> Launch:
        redis = (
            f"--rdzv-backend={store.backend} --rdzv-endpoint={store.endpoint} "
            f"--rdzv-id=run-{secrets.token_hex(4)} --local-addr=127.0.0.1"
        )
        filled = arguments.replace("{redis}", redis).split()
        filled = [argument.format(script=script, module=script.stem) for argument in filled]
        return Launch(tmp_path / launcher[1], launcher, *filled)

    with launch(TORCHRUN) as theirs, launch(RDZV_RUN) as ours:
        assert (theirs.end(), ours.end()) == (status, status)
    workers = [
        sorted(line for line in log.log.read_text().splitlines() if line.startswith("worker"))
        for log in (theirs, ours)
    ]
    assert workers[0] == workers[1]
    for error in ("ChildFailedError", "error: unrecognized", "error: the following arguments"):
        assert said(ours, error) == said(theirs, error)


@pytest.mark.parametrize("launcher", [RDZV_RUN, pytest.param(TORCHRUN, marks=pytest.mark.soak)])
def test_a_launcher_that_a_worker_starts_does_not_join_its_run(
    store: RunningStore,
    tmp_path: Path,
    run_id: str,
    launcher: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the settings of its own stand in variables of the environment."""
    for name, value in (("BACKEND", store.backend), ("ENDPOINT", store.endpoint), ("ID", run_id)):
        monkeypatch.setenv(f"PET_RDZV_{name}", value)
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=1")
    monkeypatch.setenv("PET_NNODES", "1:2")
    script = f"exec {sys.executable} -m torch.distributed.run --no-python /bin/sh -c 'exit 5'"
    arguments = ["--local-addr=127.0.0.1", "--no-python", "/bin/sh", "-c", script]
    with Launch(tmp_path / "a", launcher, *arguments) as a:
        assert a.end() == 1
    log = a.log.read_text()
    assert "exitcode  : 5" in log, "it was another node of the run"
    assert "round 1" not in log


def interrupt(launch: Launch) -> None:
    """Ctrl-C in a terminal: all processes of the agent's group get it; workers have groups."""
    os.killpg(launch.process.pid, signal.SIGINT)


def terminate(launch: Launch) -> None:
    launch.process.send_signal(signal.SIGTERM)


def record_of_the_only_node(store: RunningStore, run_id: str) -> NodeRecord:
    with contextlib.closing(store.open(run_id)) as client:
        (entry,) = client.list(NODES_PREFIX).values()
    return NodeRecord.decode(entry.value)


def has_ended(pid: int) -> bool:
    """A zombie has."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("ends", [interrupt, terminate])
@pytest.mark.parametrize("joins", [False, True], ids=["trains", "joins"])
def test_a_signal_is_one_line_and_a_shells_status(
    store: RunningStore, tmp_path: Path, ends: Callable[[Launch], None], joins: bool
) -> None:
    """torchrun shows a traceback, and its status is 1, as of any error."""
    number = signal.SIGINT if ends is interrupt else signal.SIGTERM
    run_id, began = f"run-{secrets.token_hex(4)}", tmp_path / "began"
    # torch makes one dollar of two.
    script = f"echo $$$$ > {began}.part; mv {began}.part {began}; exec sleep 600"
    nodes = "2:2" if joins else "1:1"
    arguments = of_a_run(store, run_id, nodes, LEASE, script)
    with Launch(tmp_path / "log", RDZV_RUN, *arguments) as agent:
        ready = (lambda: said(agent, "waiting for")) if joins else began.exists
        assert until(ready, 60), agent.log.read_text()
        ends(agent)
        assert agent.end() == 128 + number
    log = agent.log.read_text()
    assert "Traceback" not in log
    assert "SignalException" not in log
    lines = [line for line in log.splitlines() if line.startswith("rdzv: ")]
    assert lines == [f"rdzv: {number.name} ended this agent"]
    # It left: the run stays open for others, and its worker is gone.
    assert record_of_the_only_node(store, run_id).status is Status.LEFT
    with contextlib.closing(store.open(run_id)) as client:
        entry = client.get(STATE_KEY)
    assert entry is not None
    assert not RoundDocument.decode(entry.value).closed
    if not joins:
        assert until(lambda: has_ended(int(began.read_text())), 30)


@pytest.mark.parametrize(
    ("shell", "found"),
    [
        ('"$@" | cat', "bash"),
        ('exec "$@"', "None"),
        ("trap 'kill $!' TERM; \"$@\" & wait", "None"),
    ],
)
def test_a_parent_that_sigterm_does_nothing_to_is_found(shell: str, found: str) -> None:
    prints = "from rdzv_plugins.process.signals import deaf_parent; print(deaf_parent())"
    command = as_pid_1("bash", "-c", shell, "bash", sys.executable, "-c", prints)
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == found


def test_a_containers_shell_that_passes_no_sigterm_on_is_told_of(
    store: RunningStore, tmp_path: Path, run_id: str
) -> None:
    arguments = of_a_run(store, run_id, "1:1", LEASE, "exit 0")
    starter = as_pid_1("bash", "-c", '"$@" | cat', "bash")
    with Launch(tmp_path / "a", RDZV_RUN, *arguments, starter=starter) as a:
        assert a.end() == 0
    assert said(a, "the parent of this agent, PID 1 (bash), passes no SIGTERM on")


def test_help_is_torchruns() -> None:
    shown = forked.run([sys.executable, *RDZV_RUN, "--help"])
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("usage: rdzv run ")
    # What differs comes before all options.
    differs = shown.stdout.index("does not count against")
    assert differs < shown.stdout.index("--nnodes")
    assert "--rdzv-backend" in shown.stdout
    assert "training_script" in shown.stdout
    assert "--warm" in shown.stdout
