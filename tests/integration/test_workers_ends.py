"""How workers end, and what an agent makes of it: agents on a real redis."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.run import get_args_parser

from rdzv_plugins.protocol.documents import STATE_KEY, Outcome, RoundDocument, Status
from rdzv_plugins.testing.harness import until
from rdzv_plugins.torch.rendezvous_backend import KeyValueBackend
from tests import Measure
from tests.fleet.agents import RDZV_RUN, TORCHRUN
from tests.integration import forked
from tests.integration.jobs import LEASE, Job
from tests.integration.stores import RunningStore, kind_of, running
from tests.integration.test_run import Launch, of_a_run, said


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    with running(kind_of("redis")) as started:
        yield started


def pids(file: Path, count: int) -> list[int]:
    """The process ids that workers have written, one a line."""
    assert until(lambda: file.exists() and len(file.read_text().split()) == count, 60)
    return [*map(int, file.read_text().split())]


def live(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def outcome(store: RunningStore, run_id: str) -> Outcome | None:
    with closing(store.open(run_id)) as client:
        entry = client.get(STATE_KEY)
        return RoundDocument.decode(entry.value).outcome if entry else None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_workers_end_with_their_agent(
    store: RunningStore,
    tmp_path: Path,
    run_id: str,
    number: signal.Signals,
    record_property: Measure,
) -> None:
    """And what they have started, also where they ignore all that can be ignored."""
    # timeout has a process group of its own.
    begins = "timeout 600 sleep 600 & echo $! $$$$"
    script = f"trap '' TERM HUP; {begins} >> {tmp_path}/pids; wait"
    arguments = ["--nproc-per-node=2", *of_a_run(store, run_id, "1:1", 3, script)]
    with Launch(tmp_path / "a", RDZV_RUN, *arguments) as a:
        found = pids(tmp_path / "pids", 4)
        assert all(map(live, found))
        a.process.send_signal(number)
        began = time.monotonic()
        assert until(lambda: not any(map(live, found)), 30), a.log.read_text()
        record_property("ended after, s", round(time.monotonic() - began, 3))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_an_agent_that_a_signal_ends_as_it_starts_them(
    store: RunningStore, tmp_path: Path, run_id: str, number: signal.Signals
) -> None:
    """The signal comes when the first has begun: torch knows none of them yet."""
    script = f"echo $$$$ >> {tmp_path}/pids; exec sleep 600"
    arguments = ["--nproc-per-node=24", *of_a_run(store, run_id, "1:1", 3, script)]
    with Launch(tmp_path / "a", RDZV_RUN, *arguments) as a:
        assert until((tmp_path / "pids").exists, 60), a.log.read_text()
        a.process.send_signal(number)
        assert a.end() == 128 + number
    found = [*map(int, (tmp_path / "pids").read_text().split())]
    assert found
    assert until(lambda: not any(map(live, found)), 30), a.log.read_text()


AT_ITS_BEGIN = """
import os, rdzv_plugins, time
bound = rdzv_plugins.end_with_agent()
print(os.getpid() if bound else "not bound", file=open("FILE", "w"), flush=True)
time.sleep(600)
"""


def test_torchruns_workers_end_with_it_where_their_script_says_so(
    store: RunningStore, tmp_path: Path, run_id: str, record_property: Measure
) -> None:
    file = tmp_path / "pids"
    (tmp_path / "script.py").write_text(AT_ITS_BEGIN.replace("FILE", str(file)))
    arguments = of_a_run(store, run_id, "1:1", 3, f"exec {sys.executable} {tmp_path}/script.py")
    with Launch(tmp_path / "a", TORCHRUN, *arguments) as a:
        (worker,) = pids(file, 1)
        assert live(worker)
        a.process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert until(lambda: not live(worker), 30)
        record_property("ended after, s", round(time.monotonic() - began, 3))


# It starts a process each time, of which it has found none running; the first ignores SIGTERM.
LEAVES = """
cd FOLDER
for left in $(cat started 2>/dev/null); do
    grep -qs '^State:.[^Z]' /proc/$left/status && echo $left >> found
done
if [ ! -e started ]; then trap '' TERM; fi
sleep 600 & echo $! >> started
case $(wc -l < started) in
1) kill -9 $$$$ ;;
2) exit 3 ;;
esac
setsid sleep 600 & echo $! > free
"""


def test_what_a_worker_leaves_behind_ends_before_the_next_ones_start(
    store: RunningStore, tmp_path: Path, run_id: str
) -> None:
    """And at the end, but for what has a session of its own."""
    script = LEAVES.replace("FOLDER", str(tmp_path))
    arguments = ["--shutdown-timeout=1", "--max-restarts=2"]
    arguments += of_a_run(store, run_id, "1:1", 3, script)
    with Launch(tmp_path / "a", RDZV_RUN, *arguments) as a:
        assert a.end() == 0, a.log.read_text()
    started = pids(tmp_path / "started", 3)
    (free,) = pids(tmp_path / "free", 1)
    try:
        assert not (tmp_path / "found").exists()
        assert not [*filter(live, started)]
        assert live(free)
    finally:
        for pid in filter(live, (*started, free)):
            os.kill(pid, signal.SIGKILL)
    for count in (1, 0):
        line = f"left 1 of their processes behind, which are ended, {count} of them by SIGKILL"
        assert said(a, line), a.log.read_text()


@pytest.mark.parametrize("event", ["change", "failure"])
def test_workers_have_as_long_as_it_was_said(
    store: RunningStore, tmp_path: Path, run_id: str, event: str, record_property: Measure
) -> None:
    """Where the membership changes, and where another worker of the node has failed."""
    script = f"trap '' TERM; touch {tmp_path}/began.$GROUP_WORLD_SIZE.$RANK; "
    if event == "failure":
        script += (
            f'[ "$RANK" = 0 ] && while [ ! -e {tmp_path}/fail ]; do sleep 0.1; done && exit 3; '
        )
    script += "while :; do sleep 0.1; done"
    arguments = ["--shutdown-timeout=1", "--nproc-per-node=2"]
    arguments += of_a_run(store, run_id, "1:2", 60, script)
    with Launch(tmp_path / "a", RDZV_RUN, *arguments) as a:
        assert until((tmp_path / "began.1.1").exists, 60)
        if event == "failure":
            (tmp_path / "fail").touch()
            assert until(lambda: said(a, "the workers get SIGTERM"), 30)
            began = time.monotonic()
            assert a.end(20) == 1
        else:
            with Launch(tmp_path / "b", RDZV_RUN, *arguments):
                assert until(lambda: said(a, "the workers get SIGTERM"), 60)
                began = time.monotonic()
                assert until((tmp_path / "began.2.1").exists, 30), a.log.read_text()
    record_property("stopped after, s", round(time.monotonic() - began, 2))


# Rank 0 fails when it is told to, and rank 1 does not end.
FAILS = """
import os, pathlib, signal, sys, time, rdzv_plugins
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
rdzv_plugins.step(0)
(folder / f"began.{rank}").touch()
while rank == "1" or not (folder / "fail").exists():
    time.sleep(0.1)
sys.exit(3)
"""


def test_a_signal_is_announced_while_workers_end_after_a_failure(
    store: RunningStore, tmp_path: Path, run_id: str
) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    script = f"exec {sys.executable} {tmp_path}/fails.py {tmp_path}"
    arguments = ["--nproc-per-node=2", *of_a_run(store, run_id, "1:1", 3, script)]
    with Launch(tmp_path / "a", RDZV_RUN, *arguments) as a:
        assert until(lambda: all((tmp_path / f"began.{rank}").exists() for rank in "01"), 60)
        (tmp_path / "fail").touch()
        assert until(lambda: said(a, "the workers get SIGTERM"), 30)
        a.process.send_signal(signal.SIGTERM)
        assert until(lambda: said(a, "has left"), 15), a.log.read_text()
        a.process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("launcher", [TORCHRUN, RDZV_RUN], ids=["torchrun", "rdzv run"])
def test_a_spare_of_torchs_handler_ends_well(
    store: RunningStore, tmp_path: Path, launcher: Sequence[str]
) -> None:
    with closing(Job(tmp_path, store, nodes="1:1", launcher=launcher, handler="torch")) as job:
        job.begin("a")
        job.start_at("b")

        def is_spare() -> bool:
            found = KeyValueBackend(job.client, store.backend).get_state()
            return found is not None and bool(pickle.loads(found[0]).redundancy_list)

        job.await_that(is_spare, "a spare", 60)
        job.finish("a")
        assert job.await_ends("ab", 30) == {"a": 0, "b": 0}


@pytest.mark.parametrize(("launcher", "other"), [("torchrun", "done"), ("run", "lost")])
def test_rank_0_that_is_done_keeps_master_until_the_other_is(
    store: RunningStore, tmp_path: Path, launcher: str, other: str
) -> None:
    """Longer than torch's exit barrier waits: here a second."""
    impatient = ("-m", "tests.integration.launchers", "impatient", launcher)
    with closing(Job(tmp_path, store, nodes="2:2", launcher=impatient)) as job:
        job.begin("ab")
        job.finish("a")
        job.await_record("a", Status.DONE)
        document = job.document()
        assert document is not None
        assert document.master is not None
        host, _, port = document.master.rpartition(":")
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            socket.create_connection((host, int(port)), 5).close()
            time.sleep(0.1)
        if other == "done":
            job.finish("b")
            assert job.await_ends("ab", 20) == {"a": 0, "b": 0}
        else:
            job.agents["b"].kill()
            assert job.await_ends("a", LEASE + 20) == {"a": 0}
            job.await_line("a", job.label("b"), "lost")
        assert not any("Error waiting on exit barrier" in line for line in job.lines("a"))


def test_rank_0_that_is_done_keeps_master_in_a_run_that_was_closed(
    store: RunningStore, tmp_path: Path
) -> None:
    """The round that runs goes on, and ends well."""
    with closing(Job(tmp_path, store, nodes="2:2", launcher=RDZV_RUN)) as job:
        job.begin("ab")
        document = job.document()
        assert document is not None
        assert document.master is not None
        host, _, port = document.master.rpartition(":")
        close = [sys.executable, "-m", "rdzv_plugins.cli", "close"]
        assert forked.run([*close, "-e", store.endpoint, "-i", job.run_id]).returncode == 0
        job.await_line("a", "closed by the command rdzv close")
        job.finish("a")
        job.await_record("a", Status.DONE)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            socket.create_connection((host, int(port)), 5).close()
            time.sleep(0.1)
        job.finish("b")
        assert job.await_ends("ab", 20) == {"a": 0, "b": 0}
        assert outcome(store, job.run_id) is Outcome.CLOSED


takes_signals = pytest.mark.skipif(
    "--signals-to-handle" not in get_args_parser().format_help(),
    reason="this torch has no such option",
)


@takes_signals
@pytest.mark.parametrize(
    ("starter", "number"),
    [
        pytest.param(["nohup"], signal.SIGHUP, id="nohup"),
        pytest.param(["env", "--ignore-signal=INT"], signal.SIGINT, id="a shell's background"),
    ],
)
def test_what_was_ignored_at_the_start_stays_ignored(
    store: RunningStore,
    tmp_path: Path,
    run_id: str,
    starter: Sequence[str],
    number: signal.Signals,
) -> None:
    """While an agent waits for a round, and while it trains; by its workers too."""
    script = f"echo $$$$ >> {tmp_path}/pids; until [ -e {tmp_path}/done ]; do sleep 0.1; done"
    arguments = of_a_run(store, run_id, "2:2", 6, script)
    with Launch(tmp_path / "a", RDZV_RUN, *arguments, starter=starter) as a:
        assert until(lambda: said(a, "joined as"), 60), a.log.read_text()
        a.process.send_signal(number)
        with Launch(tmp_path / "b", RDZV_RUN, *arguments, starter=starter) as b:
            for process in [*pids(tmp_path / "pids", 2), a.process.pid, b.process.pid]:
                os.kill(process, number)
            (tmp_path / "done").touch()
            assert (a.end(), b.end()) == (0, 0), a.log.read_text()


@takes_signals
def test_the_others_go_on_at_a_signal_that_torch_was_told_of(
    store: RunningStore, tmp_path: Path, record_property: Measure
) -> None:
    """Slurm's USR1@120: they do not wait until the workers of the first have saved."""
    launcher = (*TORCHRUN, "--signals-to-handle=SIGTERM,SIGUSR1")
    with closing(Job(tmp_path, store, nodes="1:2", launcher=launcher)) as job:
        for name in "ab":
            job.start_at(name, training={"saving": 12 if name == "a" else 0})
        job.await_begun("ab")
        told = job.agents["a"].signal(signal.SIGUSR1)
        job.await_begun("b", after=told)
        took = time.monotonic() - told
        assert job.agents["a"].process.poll() is None, "it has saved already"
        record_property("the other began after, s", round(took, 2))


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
def test_workers_that_do_not_end_are_killed_soon_after_a_loss_alone(
    store: RunningStore, tmp_path: Path, run_id: str, ends: signal.Signals
) -> None:
    """Where a node has left, they may save."""
    begins = f"trap '' TERM; touch {tmp_path}/began.$GROUP_WORLD_SIZE.$GROUP_RANK"
    script = f"{begins}; until [ -e {tmp_path}/done ]; do sleep 0.1; done"
    arguments = ["--shutdown-timeout=4", *of_a_run(store, run_id, "1:2", 3, script)]
    conf = next(place for place, it in enumerate(arguments) if it.startswith("--rdzv-conf="))
    arguments[conf] += ",loss_shutdown_timeout=0.5"
    alone, *both = (tmp_path / f"began.{it}" for it in ("1.0", "2.0", "2.1"))
    with Launch(tmp_path / "a", RDZV_RUN, *arguments) as a:
        with Launch(tmp_path / "b", RDZV_RUN, *arguments) as b:
            assert until(lambda: all(it.exists() for it in both), 60), a.log.read_text()
            alone.unlink(missing_ok=True)
            b.process.send_signal(ends)
            assert until(alone.exists, 60), a.log.read_text()
            (tmp_path / "done").touch()
        assert a.end() == 0
    told = re.findall(r"not ended in ([\d.]+) s get SIGKILL: local rank 0", a.log.read_text())
    assert (float(told[-1]) < 4) is (ends is signal.SIGKILL)


# A worker in uninterruptible sleep, as where a disk or a GPU hangs: it waits for a child that has
# its memory; the child waits for the other end of a pipe. Only SIGKILL wakes it.
STUCK = """
import os, sys
os.mkfifo(sys.argv[1])
opens = (os.POSIX_SPAWN_OPEN, 3, sys.argv[1], os.O_RDONLY, 0)
os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[opens])
"""


@pytest.mark.skipif(
    not hasattr(local_elastic_agent, "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"),
    reason="this torch does not look for workers in uninterruptible sleep",
)
@pytest.mark.parametrize(
    ("launcher", "status"),
    [pytest.param(RDZV_RUN, 1, id="rdzv run"), pytest.param(TORCHRUN, 0, id="torchrun")],
)
def test_a_worker_that_hangs_in_the_kernel_is_no_success(
    store: RunningStore,
    tmp_path: Path,
    run_id: str,
    launcher: Sequence[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's own status is torch's; the run is not told that it succeeded."""
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "1")
    pipe = tmp_path / "pipe"
    (tmp_path / "stuck.py").write_text(STUCK)
    script = f"exec {sys.executable} {tmp_path}/stuck.py {pipe}"
    arguments = ["--shutdown-timeout=1", *of_a_run(store, run_id, "1:1", 3, script)]
    with Launch(tmp_path / "a", launcher, *arguments) as a:
        try:
            assert until(lambda: said(a, "stuck in uninterruptible sleep"), 60)
            if launcher is TORCHRUN:
                # It would wait for 30 s until it kills the worker.
                os.close(os.open(pipe, os.O_WRONLY))
            assert a.end() == status, a.log.read_text()
        finally:
            with suppress(OSError):
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    if launcher is RDZV_RUN:
        assert said(a, "in uninterruptible sleep: the kernel, a device or a disk hangs")
    assert outcome(store, run_id) is Outcome.FAILED
