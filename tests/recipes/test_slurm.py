"""Slurm without a Redis: nodes are killed, the first among them, the store, and the whole job."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rdzv_plugins.testing.harness import until
from tests import Measure
from tests.recipes.pages import Node, block, take
from tests.recipes.slurm import Cluster, add_address

STEP = re.compile(r"step (\d+) in a world of (\d+), loss")


class Log:
    """A job's logs, one of each task, to which each of its runs appends."""

    def __init__(self, folder: Path, job: str) -> None:
        self._folder = folder
        self._job = job
        # How much of each was read, so that the lines keep their order.
        self._read: dict[Path, int] = {}
        self.text = ""

    @property
    def steps(self) -> list[tuple[int, int]]:
        for file in self._folder.glob(f"train-{self._job}-*.log"):
            new = file.read_bytes()[self._read.get(file, 0) :]
            new = new[: new.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(new)
            self.text += new.decode(errors="replace")
        return [(int(step), int(size)) for step, size in STEP.findall(self.text)]

    def await_that(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        assert until(condition, seconds), f"not within {seconds} s: {what}\n{self.text[-8000:]}"

    def await_world(self, size: int) -> int:
        """Wait for a new line of a world of this size; returns its step."""
        known = len(self.steps)
        self.await_that(
            lambda: any(it[1] == size for it in self.steps[known:]), f"a world of {size}"
        )
        return self.steps[-1][0]


class Login:
    """The reader's shell there."""

    def __init__(self) -> None:
        self._served: list[Node] = []

    def serve(self) -> None:
        """As the page says; what the shell ran in the background stays."""
        export, serve = block("slurm", "export RDZV_PLUGINS_PASSWORD_FILE").splitlines()
        os.environ["RDZV_PLUGINS_PASSWORD_FILE"] = os.path.expanduser(export.partition("=")[2])
        runs_already = reached("login1", 6379)
        served = Node(serve.removesuffix(" &"))
        self._served.append(served)
        # Where one runs already, this one ends.
        ends, begins = (lambda: served.process.poll() == 1), (lambda: reached("login1", 6379))
        assert until(ends if runs_already else begins, 60), Path("store.log").read_text()

    def kill_store(self) -> None:
        for served in self._served:
            served.die()
        assert until(lambda: not reached("login1", 6379), 20)

    def submit(self) -> str:
        """The job that the page submits."""
        shown = subprocess.run(
            ["bash", "-c", block("slurm", "export RDZV_ENDPOINT")],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        job = shown.strip().removeprefix("Submitted batch job ")
        assert job.isdigit(), shown
        return job

    close = kill_store


@pytest.fixture
def login(folder: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    """The login node: this host has its address and its name, and the user's home."""
    add_address("10.1.0.1", 2)
    hosts = folder / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "10.1.0.1 login1\n")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    for name, value in {**slurm.environ, "HOME": str(folder)}.items():
        monkeypatch.setenv(name, value)
    opened = Login()
    yield opened
    opened.close()
    subprocess.run(["umount", "/etc/hosts"], check=True)


def reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


@pytest.mark.timeout(900)
def test_a_node_is_killed_and_the_job_is_queued_again(
    folder: Path, slurm: Cluster, login: Login, record_property: Measure
) -> None:
    take("slurm", "train.py", "slurm/train.sbatch", "slurm/node.sh")
    login.serve()
    # The cluster is one machine of two cores: three workers that import torch at once are slow.
    job = login.submit()
    log = Log(folder, job)
    step = log.await_world(3)

    slurm.kill_node("node2")
    after = log.await_world(2)
    assert after > step
    record_property("killed", f"after step {step}; two nodes went on at step {after}")
    log.await_that(lambda: "down" in slurm.ask("sinfo", "--nodes=node2"), "node2 down")
    # Slurm knows of the loss, and lets the job run.
    assert log.await_world(2) > after
    assert slurm.ask("squeue", "--noheader", "--format=%t") == "R"

    start_node(slurm, log, "node2")
    before = log.steps[-1][0]
    urgent = slurm.ask("sbatch", "--partition=urgent", "--nodes=3", "--wrap=true")
    assert urgent.startswith("Submitted"), urgent
    await_restart(slurm, log, job, 1)
    resumed = log.await_world(3)
    assert resumed > before - 20
    record_property("preempted", f"after step {before}; three nodes went on at step {resumed}")

    # What Slurm does before the time limit, because of --signal.
    slurm.ask("scancel", "--signal=USR1", job)
    before = log.steps[-1][0]
    await_restart(slurm, log, job, 2)
    assert log.await_world(3) > before - 20
    assert all(f"slurm-{job}-{restart}" in log.text for restart in range(3))
    slurm.ask("scancel", job)


@pytest.mark.timeout(900)
def test_the_first_node_dies_and_the_store(
    folder: Path, slurm: Cluster, login: Login, record_property: Measure
) -> None:
    """And a second job uses the store of the first one."""
    take("slurm", "train.py", "slurm/train.sbatch", "slurm/node.sh")
    login.serve()
    log = Log(folder, job := login.submit())
    log.await_world(3)

    login.kill_store()
    log.await_world(3)
    login.serve()
    # The agents write their run again; until then nobody knows whom a killed node left.
    log.await_that(lambda: is_running(job, 3), "the run stands in the new store")
    trained = log.await_world(3)
    slurm.kill_node("node1")
    after = log.await_world(2)
    assert after > trained - 20
    record_property("first node", f"two nodes went on at step {after}")
    log.await_that(lambda: "down" in slurm.ask("sinfo", "--nodes=node1"), "node1 down")
    assert log.await_world(2) > after
    assert slurm.ask("squeue", "--noheader", "--format=%t") == "R"

    # The time limit: the batch script, and srun, are gone.
    start_node(slurm, log, "node1")
    slurm.ask("scancel", "--signal=USR1", job)
    release(slurm, log, job)
    await_restart(slurm, log, job, 2)
    assert log.await_world(3) > after - 20

    # The next workers read the script, and fail.
    script = Path("train.py")
    training = script.read_text()
    script.write_text("raise SystemExit('no data')")
    before = log.await_world(3)
    slurm.kill_node("node1")
    log.await_that(lambda: bool(log.steps) and "queueing the job again" in log.text, "it fails")
    log.await_that(lambda: "down" in slurm.ask("sinfo", "--nodes=node1"), "node1 down")
    script.write_text(training)
    start_node(slurm, log, "node1")
    release(slurm, log, job)
    await_restart(slurm, log, job, 4)
    assert log.await_world(3) > before - 20

    # Or they soon come to its end.
    last = shorten(log.steps[-1][0] + 300)
    slurm.kill_node("node1")
    log.await_that(lambda: slurm.ask("squeue", "--noheader") == "", "the job ends", 180)
    assert max(log.steps)[0] >= last - 20
    assert f"trained to step {last}" in log.text
    assert "JobState=CANCELLED" in slurm.ask("scontrol", "show", "job", job)

    # Another job, which begins with the checkpoint of that one.
    start_node(slurm, log, "node1")
    login.serve()
    assert "port 6379" in Path("store.log").read_text()
    shorten(last + 100)
    node = Path("node.sh")
    node.write_text(node.read_text().replace("train-$SLURM_JOB_ID.pt", f"train-{job}.pt"))
    again = login.submit()
    second = Log(folder, again)
    second.await_that(lambda: slurm.ask("squeue", "--noheader") == "", "the job ends", 180)
    assert [it[0] for it in second.steps] == [last + 20 * number for number in range(1, 6)]
    assert "JobState=COMPLETED" in slurm.ask("scontrol", "show", "job", again)


@pytest.mark.timeout(600)
def test_the_first_node_dies_with_its_member_of_the_store(
    folder: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch, record_property: Measure
) -> None:
    """Each node is an address of this machine, which takes the place of its name."""
    take("slurm", "train.py", "slurm/train.sbatch", "slurm/node.sh")
    names = {f"node{number}": f"127.0.0.{number}" for number in (1, 2, 3)}
    hosts = folder / "hosts"
    lines = "".join(f"{address} {name}\n" for name, address in names.items())
    hosts.write_text(Path("/etc/hosts").read_text() + lines)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    script = Path("node.sh")
    address = '--local-addr="127.0.0.${SLURMD_NODENAME#node}"'
    script.write_text(script.read_text().replace("exec rdzv run", f"exec rdzv run {address}"))
    for name, value in {**slurm.environ, "HOME": str(folder)}.items():
        monkeypatch.setenv(name, value)
    try:
        job = slurm.ask(*block("slurm", "sbatch").split()).removeprefix("Submitted batch job ")
        log = Log(folder, job)
        trained = log.await_world(3)
        slurm.kill_node("node1")
        after = log.await_world(2)
        assert after > trained - 20
        record_property("first node", f"two nodes went on at step {after}")
        start_node(slurm, log, "node1")
        slurm.ask("scancel", job)
    finally:
        subprocess.run(["umount", "/etc/hosts"], check=True)


def shorten(last: int) -> int:
    """The training ends with this step."""
    script = Path("train.py")
    script.write_text(re.sub(r"STEPS = .*", f"STEPS = {last}", script.read_text()))
    return last


def is_running(job: str, nodes: int) -> bool:
    command = ["rdzv", "status", "-e", "redis://login1:6379", "-i", f"slurm-{job}-0"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    return f"running round 0, {nodes} of" in shown


def start_node(slurm: Cluster, log: Log, name: str) -> None:
    slurm.start_node(name)
    log.await_that(lambda: "idle" in slurm.ask("sinfo", f"--nodes={name}"), f"{name} idle")


def release(slurm: Cluster, log: Log, job: str) -> None:
    """As the page says: Slurm holds the job, because the first node kept its files."""
    start_soon(slurm, log, job)
    held = "Reason=launch_failed_requeued_held"
    log.await_that(lambda: held in slurm.ask("scontrol", "show", "job", job), "the job is held")
    slurm.ask("bash", "-c", block("slurm", "scontrol release").replace("$JOB", job))


def await_restart(slurm: Cluster, log: Log, job: str, restarts: int) -> None:
    def runs_again() -> bool:
        shown = slurm.ask("scontrol", "show", "job", job)
        return f"Restarts={restarts} " in shown and "JobState=RUNNING" in shown

    start_soon(slurm, log, job)
    log.await_that(runs_again, f"restart {restarts}")


def start_soon(slurm: Cluster, log: Log, job: str) -> None:
    """Slurm waits for two minutes, because a node refuses a job as old as the one that it ended.

    Five seconds are enough for that: it compares whole ones.
    """
    pending = "JobState=PENDING"
    log.await_that(lambda: pending in slurm.ask("scontrol", "show", "job", job), "queued again")
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now+5")
