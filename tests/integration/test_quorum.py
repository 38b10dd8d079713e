"""The store that the agents run themselves: real agents on 127.0.0.1 and following, and members.

Each agent keeps its member's folder under the test's own, so that a member is known by that.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.config import parse_options
from rdzv_plugins.kv import AccessDeniedError, Entry, KeyValueClient, RendezvousConnectionError
from rdzv_plugins.kv.contract import Attendance
from rdzv_plugins.kv.findings import Mark
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.servers.quorum import find_binary, probe
from rdzv_plugins.stores import open_client
from rdzv_plugins.stores.quorum import Client, Members, Options
from rdzv_plugins.testing.harness import until
from tests import Measure
from tests.integration.jobs import Job
from tests.integration.stores import KINDS, RunningStore, started
from tests.integration.test_dashboard import ask, dashboard
from tests.integration.test_exporter import exporter, scrape
from tests.integration.test_killed import DEFAULTS, measured
from tests.integration.torchrun import PATIENCE

pytestmark = pytest.mark.timeout(240)

INTERVAL, LEASE = 1.0, 3.0
CONFIG: dict[str, object] = {
    "keep_alive_interval": INTERVAL,
    "keep_alive_max_attempt": 3,
    "replacement_timeout": 0,
    "last_call_timeout": 1,
    "heartbeat_timeout": 3,
    "join_timeout": 90,
}

# What NATS needs at most until another member leads, beyond a lease.
ELECTION = 12.0

# Until a member that remembers forgets, since those that came back have, and its start.
STUCK = 35.0

Submit = Callable[..., Job]


def quorum(hosts: int = 3, **config: str) -> RunningStore:
    """A store whose members are on 127.0.0.1 and following: "a" has the first, "b" the second."""
    endpoint = ",".join(f"127.0.0.{host + 1}" for host in range(hosts))
    return RunningStore(name="quorum", backend="quorum", endpoint=endpoint, config=config)


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Submit]:
    folder = tmp_path / "members"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    jobs: list[Job] = []

    def submit(
        store: RunningStore | None = None,
        nodes: str = "2:3",
        folder: str = "job",
        **options: object,
    ) -> Job:
        where = tmp_path / folder
        job = Job(where, store or quorum(), nodes=nodes, **{**CONFIG, **options})
        jobs.append(job)
        return job

    yield submit
    for job in jobs:
        job.close()


class Hosts:
    """Attendances of this process' own, one a host, without agents."""

    def __init__(self) -> None:
        self.run_id = f"run-{secrets.token_hex(4)}"
        self.store = quorum()
        self._attendances: dict[int, Attendance] = {}

    def start(self, *hosts: int, **config: str) -> None:
        """Let them have their part in the store, 127.0.0.1 as host 1."""
        for host in hosts:
            options = Client.of_run(parse_options(Options, config, {}), self.run_id)
            endpoint, address = self.store.endpoint, f"127.0.0.{host}"
            found = Client.attend(endpoint, options, address, self.run_id)
            assert found is not None
            self._attendances[host] = found
            assert until(found.member_runs, 30)

    def open(self, host: int, **config: str) -> KeyValueClient:
        """The client of this host's node."""
        options = {"cluster": self.run_id, **config}
        connect = partial(
            open_client, "quorum", self.store.endpoint, self.run_id, options, request_timeout=2
        )
        return self._attendances[host].open(connect, PATIENCE)

    def end(self, *hosts: int) -> None:
        for host in hosts:
            attendance = self._attendances.pop(host)
            attendance.hurry()
            attendance.close()

    def close(self) -> None:
        self.end(*self._attendances)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    (tmp_path / "members").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "members"))
    hosts = Hosts()
    yield hosts
    hosts.close()
    assert members(tmp_path) == {}
    assert [*(tmp_path / "members").glob("rdzv-quorum-*")] == []


def longest_gap(client: KeyValueClient, seconds: float) -> float:
    """Write for so long; the longest time without a success."""
    began = last = time.monotonic()
    longest = 0.0
    while last < began + seconds:
        with contextlib.suppress(RendezvousConnectionError):
            client.put("key", b"value")
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert time.monotonic() < began + seconds + PATIENCE, "the store takes no write any more"
    return longest


def members(tmp_path: Path) -> dict[int, str]:
    """The members' processes that live, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "nats-server" in command and str(tmp_path / "members") in command:
            found[int(folder.name)] = command
    return found


def answers(store: RunningStore, run_id: str) -> list[str]:
    """Where a member of this run answers."""
    options = Client.of_run(parse_options(Options, store.config, {}), run_id)
    where = Members.of(store.endpoint, options)
    found = []
    for index, (host, _) in enumerate(where.hosts):
        for port in where.ports(index):
            with contextlib.suppress(OSError, ValueError):
                if where.is_of(probe(host, port, 1.0)):
                    found.append(f"{host}:{port}")
    return found


def finish(job: Job, names: str) -> dict[str, int]:
    for name in names:
        job.finish(name)
    return job.await_ends(names)


def assert_nothing_is_left(job: Job, tmp_path: Path, store: RunningStore) -> None:
    folder = tmp_path / "members"
    job.await_that(lambda: not members(tmp_path), "the end of all members", 30)
    job.await_that(lambda: not [*folder.glob("rdzv-quorum-*")], "their folders to go", 30)
    assert answers(store, job.run_id) == []


soak = pytest.mark.soak


@pytest.mark.parametrize("order", ["abc", pytest.param("cba", marks=soak)])
def test_a_job_of_three_leaves_nothing(
    submit: Submit, tmp_path: Path, order: str, record_property: Measure
) -> None:
    job = submit()
    for name in order[:-1]:
        job.start_at(name)
    began = time.monotonic()
    job.start_at(order[-1])
    job.await_begun("abc")
    record_property("from the last agent's start, s", round(time.monotonic() - began, 2))
    assert len(members(tmp_path)) == 3
    ended = time.monotonic()
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    record_property("until all agents had ended, s", round(time.monotonic() - ended, 2))
    assert_nothing_is_left(job, tmp_path, quorum())
    assert not [line for line in job.lines("abc") if line.startswith(("W", "E"))]


@pytest.mark.parametrize(
    "victim", ["a", pytest.param("b", marks=soak), pytest.param("c", marks=soak)]
)
def test_a_member_is_killed_with_its_agent_and_replaced(
    submit: Submit, tmp_path: Path, victim: str, record_property: Measure
) -> None:
    job = submit()
    job.begin("abc")
    others = [name for name in "abc" if name != victim]
    killed = job.agents[victim].kill()
    job.await_begun(others, after=killed, timeout=LEASE + ELECTION + PATIENCE)
    record_property("the others run, s", round(time.monotonic() - killed, 2))
    back = time.monotonic()
    job.start_at(victim)
    job.await_begun("abc", after=back)
    record_property("all run again, s", round(time.monotonic() - back, 2))
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job, tmp_path, quorum())


@soak
@pytest.mark.parametrize("victim", [*"abc"])
def test_a_killed_agent_is_noticed_at_once(
    submit: Submit, victim: str, record_property: Measure
) -> None:
    """Its member of the store ends with it, and may have been the leader."""
    took = measured(submit(**DEFAULTS), victim)
    record_property("last worker began again, s", round(took, 2))


@soak
@pytest.mark.parametrize("victim", [*"abc"])
@pytest.mark.parametrize("phase", ["store", "forming", "confirming", "running", "ending"])
def test_any_of_three_is_lost_in_any_phase_and_replaced_at_once(
    submit: Submit, tmp_path: Path, phase: str, victim: str, record_property: Measure
) -> None:
    """Its host is lost: agent, workers and member; the same command starts there again."""
    job = submit(nodes="2:4", last_call_timeout=3)
    others = [name for name in "abc" if name != victim]
    if phase == "store":
        for name in "abc":
            job.start_at(name)
        job.await_line(victim, "this host runs a member of the store", timeout=PATIENCE)
    else:
        job.begin("abc")
    if phase in ("forming", "confirming"):
        newcomer = job.start_at("d")
        others.append("d")
        job.await_that(lambda: phase_of(job) is Phase.FORMING, "a last call", PATIENCE)
        if phase == "confirming":
            # It is in the round, and does not confirm it.
            newcomer.signal(signal.SIGSTOP)
            job.await_that(lambda: phase_of(job) is Phase.CONFIRMING, "ranks", PATIENCE)
    if phase == "ending":
        for name in "abc":
            job.finish(name)
        lost = lose(job, victim, tmp_path)
        assert job.await_ends(others) == dict.fromkeys(others, 0)
        record_property("the others ended, s", round(time.monotonic() - lost, 2))
    else:
        lost = lose(job, victim, tmp_path)
        job.start_at(victim)
        if phase == "confirming":
            newcomer.signal(signal.SIGCONT)
        everyone = sorted([*others, victim])
        job.await_begun(everyone, after=lost, timeout=LEASE + ELECTION + 2 * PATIENCE)
        record_property("all run, s", round(time.monotonic() - lost, 2))
        assert finish(job, "".join(everyone)) == dict.fromkeys(everyone, 0)
    assert_nothing_is_left(job, tmp_path, quorum())


def phase_of(job: Job) -> Phase | None:
    document = job.document()
    return document.phase if document is not None else None


def lose(job: Job, name: str, tmp_path: Path) -> float:
    """Lose an agent's host at once: its member too; returns when."""
    children = Path(f"/proc/{job.agents[name].pid}/task").glob("*/children")
    own = [int(pid) for file in children for pid in file.read_text().split()]
    (member,) = {*own} & {*members(tmp_path)}
    os.kill(member, signal.SIGKILL)
    return job.agents[name].kill()


@pytest.mark.parametrize(
    ("survivor", "back"),
    [
        ("c", "a"),
        *(pytest.param(*it, marks=pytest.mark.soak) for it in ["ab", "bc", "ac", "ba", "cb"]),
    ],
)
def test_two_members_are_killed_and_one_comes_back(
    submit: Submit, tmp_path: Path, survivor: str, back: str, record_property: Measure
) -> None:
    """What runs runs on; a restart waits for a majority. Mostly the leader is among those lost."""
    job = submit(nodes="1:3")
    job.begin("abc")
    killed = time.monotonic()
    for name in {*"abc"} - {survivor}:
        job.agents[name].kill()
    job.assert_noted(survivor, [], killed, LEASE)
    came = time.monotonic()
    job.start_at(back)
    job.await_begun(sorted(survivor + back), after=came, timeout=LEASE + STUCK + PATIENCE)
    record_property("two run, s after one came back", round(time.monotonic() - came, 2))
    assert finish(job, survivor + back) == {survivor: 0, back: 0}
    assert_nothing_is_left(job, tmp_path, quorum())


@soak
def test_all_are_killed_and_started_again(submit: Submit, tmp_path: Path) -> None:
    job = submit()
    job.begin("abc")
    for name in "abc":
        job.agents[name].kill()
    killed = time.monotonic()
    job.await_that(lambda: not members(tmp_path), "the end of all members", 30)
    for name in "abc":
        job.start_at(name)
    job.await_begun("abc", after=killed)
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job, tmp_path, quorum())


@soak
@pytest.mark.parametrize("name", ["a", "d"])
def test_a_node_that_comes_after_the_end(submit: Submit, tmp_path: Path, name: str) -> None:
    """With a member or without, it waits for the others, as that of a new job would."""
    job = submit()
    job.begin("abc")
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job, tmp_path, quorum())
    job.start_at(name, join_timeout=10)
    own = "answers" if name == "a" else "runs none yet"
    others = "127.0.0.2 runs none yet, 127.0.0.3 runs none yet"
    job.await_line(
        name, f"waiting for a majority of the store's members: 127.0.0.1 {own}, {others}"
    )
    assert job.await_ends(name) == {name: 1}
    job.await_line(name, f"had no majority of its members within 10 s: 127.0.0.1 {own}, {others}")
    assert_nothing_is_left(job, tmp_path, quorum())


def test_a_member_that_ends_alone_is_started_again(submit: Submit, tmp_path: Path) -> None:
    job = submit()
    job.begin("abc")
    first = members(tmp_path)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
        job.await_that(
            lambda gone=pid: len(now := members(tmp_path)) == 3 and gone not in now,  # type: ignore[misc]
            "another member",
            10,
        )
    assert job.noted("a") == ["begin"]
    job.await_line("a", "the member of the store on this host has ended and is started again")
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job, tmp_path, quorum())


@pytest.mark.soak
def test_all_are_told_to_end_at_once(
    submit: Submit, tmp_path: Path, record_property: Measure
) -> None:
    """No one complains of a store that went away with the others."""
    job = submit()
    job.begin("abc")
    told = time.monotonic()
    for name in "abc":
        job.agents[name].signal(signal.SIGTERM)
    job.await_ends("abc")
    record_property("ended, s", round(time.monotonic() - told, 2))
    assert_nothing_is_left(job, tmp_path, quorum())
    assert complaints(job, "abc") == []


def complaints(job: Job, names: str) -> list[str]:
    """What agents say of errors, but for torch's own lines on a signal."""
    said = [line for line in job.lines(names) if line.startswith(("W", "E"))]
    ours = [line for line in said if "torch/distributed" not in line]
    return [line for line in ours if "this node was drained" not in line]


@soak
def test_all_are_told_to_end_twice(submit: Submit, tmp_path: Path) -> None:
    """Ctrl-C once more: nobody waits for the others, and none complains of a store that is gone."""
    job = submit()
    job.begin("abc")
    for name in "abc":
        job.agents[name].signal(signal.SIGINT)
    for name in "abc":
        job.await_line(name, "the workers get SIGINT")
        job.agents[name].signal(signal.SIGINT)
    job.await_ends("abc")
    assert_nothing_is_left(job, tmp_path, quorum())
    assert complaints(job, "abc") == []


@soak
@pytest.mark.parametrize("name", [*"abc"])
def test_a_node_with_a_member_is_drained(submit: Submit, tmp_path: Path, name: str) -> None:
    """Its member hands over and ends with it; so do a spare and the others, later."""
    job = submit(nodes="2:3")
    job.begin("abc")
    job.start_at("d")
    job.await_line("d", "joined as")
    drained = time.monotonic()
    at = ["--rdzv-backend=quorum", f"--rdzv-endpoint={quorum().endpoint}"]
    shown = CliRunner().invoke(app, ["drain", job.label(name), "-i", job.run_id, *at])
    assert shown.exit_code == 0, shown.output
    others = "".join(it for it in "abcd" if it != name)
    job.await_begun(others, after=drained)
    assert job.await_ends(name) == {name: 0}
    assert until(lambda: len(members(tmp_path)) == 2, 45)
    job.start_at("e")
    job.await_line("e", "joined as", timeout=PATIENCE)
    assert finish(job, others) == dict.fromkeys(others, 0)
    assert job.await_ends("e") == {"e": 0}
    assert_nothing_is_left(job, tmp_path, quorum())
    assert complaints(job, "abcde") == []


@soak
@pytest.mark.parametrize("name", [*"abc"])
def test_an_agent_of_three_is_suspended(
    submit: Submit, tmp_path: Path, name: str, record_property: Measure
) -> None:
    """Its member runs on; the others go on without it, and later with it."""
    job = submit()
    job.begin("abc")
    stopped = job.agents[name].signal(signal.SIGSTOP)
    others = [it for it in "abc" if it != name]
    job.await_begun(others, after=stopped)
    record_property("the others run, s", round(time.monotonic() - stopped, 2))
    back = job.agents[name].signal(signal.SIGCONT)
    job.await_begun("abc", after=back)
    record_property("all run again, s", round(time.monotonic() - back, 2))
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job, tmp_path, quorum())


@soak
def test_two_runs_on_the_same_hosts(submit: Submit, tmp_path: Path) -> None:
    first, second = submit(), submit(folder="second")
    for name in "abc":
        first.start_at(name)
        second.start_at(name)
    for job in (first, second):
        job.await_begun("abc")
    assert len(members(tmp_path)) == 6
    lost = first.agents["a"].kill()
    first.await_begun("bc", after=lost, timeout=LEASE + ELECTION + PATIENCE)
    assert finish(second, "abc") == {"a": 0, "b": 0, "c": 0}
    assert second.noted("a") == ["begin", "end"]
    first.await_that(lambda: len(members(tmp_path)) == 2, "the end of the second run's members", 30)
    assert finish(first, "bc") == {"b": 0, "c": 0}
    assert_nothing_is_left(first, tmp_path, quorum())
    assert answers(quorum(), second.run_id) == []


@soak
@pytest.mark.parametrize("hosts", [3, 5])
def test_a_job_of_five(submit: Submit, tmp_path: Path, hosts: int) -> None:
    """Of five members two may be lost at once."""
    store = quorum(hosts)
    job = submit(store, nodes="3:5")
    job.begin("abcde")
    assert len(members(tmp_path)) == hosts
    lost = "ae" if hosts == 5 else "be"
    at = time.monotonic()
    for name in lost:
        job.agents[name].kill()
    others = "".join(it for it in "abcde" if it not in lost)
    job.await_begun(others, after=at, timeout=LEASE + ELECTION + PATIENCE)
    at = time.monotonic()
    for name in lost:
        job.start_at(name)
    job.await_begun("abcde", after=at)
    assert finish(job, "abcde") == dict.fromkeys("abcde", 0)
    assert_nothing_is_left(job, tmp_path, store)


@pytest.mark.soak
def test_the_second_agent_of_a_host_takes_the_member_over(
    submit: Submit, tmp_path: Path, record_property: Measure
) -> None:
    job = submit(nodes="2:4")
    job.begin("abc")
    came = time.monotonic()
    job.start_at("d", 1)
    job.await_begun("abcd", after=came)
    assert len(members(tmp_path)) == 3
    killed = job.agents["a"].kill()
    job.await_line("d", "this host runs a member of the store")
    job.await_begun("bcd", after=killed, timeout=LEASE + ELECTION + PATIENCE)
    record_property("the others run, s", round(time.monotonic() - killed, 2))
    assert finish(job, "bcd") == {"b": 0, "c": 0, "d": 0}
    assert_nothing_is_left(job, tmp_path, quorum())


@pytest.mark.soak
def test_two_of_the_hosts_are_enough_and_one_member_may_hang(
    submit: Submit, tmp_path: Path
) -> None:
    job = submit()
    job.begin("bc")
    pid = next(iter(members(tmp_path)))
    os.kill(pid, signal.SIGSTOP)
    job.assert_noted("b", ["begin"], 0, 3 * LEASE)
    os.kill(pid, signal.SIGCONT)
    back = time.monotonic()
    job.start_at("a")
    job.await_begun("abc", after=back)
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job, tmp_path, quorum())


def test_commands_reach_it_from_any_host(submit: Submit) -> None:
    job = submit()
    job.begin("abc")
    at = ["--rdzv-backend=quorum", f"--rdzv-endpoint={quorum().endpoint}"]
    for command in ("status", "history"):
        words = [command, "-i", job.run_id, *at]
        # A round is released to its agents before its leader notes it.
        assert until(lambda words=words: CliRunner().invoke(app, words).exit_code == 0, 30)  # type: ignore[misc]
    # Of those that take no run, the cluster says whose members they are to ask.
    for without in (["list"], ["excluded", "--all-runs"]):
        refused = CliRunner().invoke(app, [*without, *at])
        assert isinstance(refused.exception, ValueError)
        assert "takes no run, with --rdzv-conf=cluster=<its id>" in str(refused.exception)
        shown = CliRunner().invoke(app, [*without, *at, "-c", f"cluster={job.run_id}"])
        assert shown.exit_code == 0, shown.output
        assert without != ["list"] or job.run_id in shown.output
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}


@soak
def test_dashboard_and_exporter_show_one_run(submit: Submit) -> None:
    job = submit()
    job.begin("abc")
    one_run = quorum(cluster=job.run_id)
    with exporter(one_run) as scraped, dashboard(one_run) as page:
        assert until(lambda: scrape(scraped).get(("rdzv_round_nodes", job.run_id)) == 3, 30)
        assert until(lambda: job.run_id.encode() in ask(page, "/api/runs")[2], 30)
        assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
        # The members end with their run, and its last state stays on the page.
        assert until(lambda: scrape(scraped) == {("rdzv_store_up",): 0.0}, 60)
        assert until(lambda: b'"quorum at ' in ask(page, "/api/runs")[2], 60)
        assert job.run_id.encode() in ask(page, "/api/runs")[2]


def test_the_data_outlives_the_restart_of_each_member(run_id: str) -> None:
    """A member by itself keeps nothing: it has it from the others."""
    with started(next(kind for kind in KINDS if kind.name == "quorum"), nodes=3) as store:
        assert store.server is not None
        client = store.open(run_id, request_timeout=ELECTION)
        entry = Entry(b"kept", client.put("key", b"kept"))
        for node in store.server.nodes:
            node.stop()
            assert client.get("key") == entry
            node.start()
            # The next one may only stop once this one has it.
            assert until(lambda: all(it.mark is Mark.OK for it in client.inspect()), ELECTION)
        assert client.get("key") == entry
        client.close()


def test_a_leader_that_ends_hands_over(hosts: Hosts, record_property: Measure) -> None:
    """The store takes writes all the time; after a SIGKILL it takes none for 4 s and more."""
    hosts.start(1, 2, 3)
    client = hosts.open(1)
    longest_gap(client, 2)
    (role,) = [it.found for it in client.inspect() if it.what == "role"]
    hosts.end(int(role.rpartition("@127.0.0.")[2]))
    gap = longest_gap(client, 2)
    client.close()
    record_property("longest time without a write, s", round(gap, 2))
    assert gap < 3.5


@pytest.mark.parametrize("secret", ["another", None])
def test_another_secret_is_refused_at_once(
    hosts: Hosts, secret: str | None, tmp_path: Path, record_property: Measure
) -> None:
    """Also where the node's own member takes it."""
    files = {"own": "one", "theirs": secret or ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    right = {"secret_file": str(tmp_path / "own")}
    wrong = {"secret_file": str(tmp_path / "theirs")} if secret else {}
    hosts.start(1, 2, **right)
    hosts.start(3, **wrong)
    own = hosts.open(1, **right)
    longest_gap(own, 0.5)
    assert until(lambda: len(members(tmp_path)) == 3, 30)
    began = time.monotonic()
    with pytest.raises(AccessDeniedError, match="give all nodes and commands the same"):
        hosts.open(3, **wrong)
    record_property("refused, s", round(time.monotonic() - began, 2))
    assert time.monotonic() - began < 20
    longest_gap(own, 0.5)
    own.close()
    for command in members(tmp_path).values():
        assert "one" not in command.split()
    for file in (tmp_path / "members").rglob("nats.conf"):
        assert file.stat().st_mode & 0o077 == 0
    for file in (tmp_path / "members").rglob("log"):
        assert "rdzv:" not in file.read_text()


def test_a_stranger_is_refused_and_breaks_nothing(hosts: Hosts, tmp_path: Path) -> None:
    """By NATS' protocols for clients and for other members, and by none of its."""
    (tmp_path / "own").write_text("one")
    right = {"secret_file": str(tmp_path / "own")}
    hosts.start(1, 2, **right)
    client = hosts.open(1, **right)
    client.put("key", b"value")
    options = parse_options(Options, {"cluster": hosts.run_id}, {})
    port = Members.of(hosts.store.endpoint, options).ports(0)[0]
    member = {"server_name": f"{hosts.run_id}@127.0.0.3", "cluster": f"{hosts.run_id}+secret"}
    login = b"CONNECT " + json.dumps({**member, "verbose": False}).encode() + b"\r\n"
    said = [
        ask_raw(port, b'CONNECT {"verbose":false}\r\nSUB > 1\r\nPING\r\n'),
        ask_raw(port, b'CONNECT {"user":"rdzv","pass":"one"}\r\nSUB > 1\r\nPING\r\n'),
        ask_raw(port, b"SUB > 1\r\nPING\r\n"),
        ask_raw(port + 1, login + b"RS+ $G >\r\nPING\r\n"),
        ask_raw(port + 1, b"INFO " + login[8:] + login + b"RS+ $G >\r\nPING\r\n"),
        ask_raw(port + 1, b"\0\xff" * 3000 + b"\r\n"),
    ]
    for answer in said:
        greeting, _, rest = answer.partition(b"\r\n")
        assert greeting.startswith(b"INFO ")
        assert b'"auth_required":true' in greeting
        assert rest in (b"-ERR 'Authorization Violation'\r\n", b"-ERR 'Parser Error'\r\n", b""), (
            rest
        )
    assert longest_gap(client, 1) < 3
    client.close()


def ask_raw(port: int, text: bytes) -> bytes:
    """All that a member says until it ends the connection."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), 30) as line, contextlib.suppress(OSError):
        while not found.endswith(b"\r\n"):
            found += line.recv(4096)
        line.sendall(text)
        while part := line.recv(4096):
            found += part
    return found


def delete(folder: Path) -> None:
    """Also while a server writes into it."""

    def is_gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    assert until(is_gone, 30)


def test_a_member_whose_folder_is_deleted_is_started_again(
    hosts: Hosts, tmp_path: Path, record_property: Measure
) -> None:
    """One after the other: from what the deleted files had, no other member could be filled."""
    hosts.start(1, 2, 3)
    client = hosts.open(1)
    client.put("first", b"value")
    for folder in sorted((tmp_path / "members").glob("rdzv-quorum-*")):
        known = members(tmp_path)
        (gone,) = [pid for pid, command in known.items() if str(folder) in command]
        delete(folder)
        assert until(lambda gone=gone: len(now := members(tmp_path)) == 3 and gone not in now, 30)  # type: ignore[misc]
        longest_gap(client, 3)
    for gone in members(tmp_path):
        os.kill(gone, signal.SIGKILL)
        assert until(lambda gone=gone: len(now := members(tmp_path)) == 3 and gone not in now, 30)  # type: ignore[misc]
        gap = longest_gap(client, 3)
        record_property(f"no write after the death of {gone}, s", round(gap, 2))
    found = client.get("first")
    assert found is not None
    assert found.value == b"value"
    client.close()


def test_runs_whose_first_ports_are_the_same(hosts: Hosts, tmp_path: Path) -> None:
    """The other run's members refuse this one's password, which each run has of its own."""
    (tmp_path / "own").write_text("one")
    first = 29700 + 6 * secrets.randbelow(16)
    own = {"secret_file": str(tmp_path / "own"), "ports": f"{first}-{first + 5}"}
    other = Hosts()
    where = [
        Members.of(hosts.store.endpoint, parse_options(Options, {**own, "cluster": run}, {}))
        for run in (hosts.run_id, other.run_id)
    ]
    while where[0].ports(0) != where[1].ports(0):
        other = Hosts()
        options = parse_options(Options, {**own, "cluster": other.run_id}, {})
        where[1] = Members.of(hosts.store.endpoint, options)
    with contextlib.closing(other):
        for one in (other, hosts):
            one.start(1, 2, **own)
            with contextlib.closing(one.open(1, **own)) as client:
                longest_gap(client, 0.5)


def test_members_whose_ports_are_taken_find_each_other(hosts: Hosts, tmp_path: Path) -> None:
    """One has another program on its port, and one on that for the other members."""
    where = Members.of(hosts.store.endpoint, Options(cluster=hosts.run_id))
    port = where.ports(0)[0]
    with contextlib.ExitStack() as others:
        for place in (("127.0.0.1", port), ("127.0.0.2", port + 1)):
            others.enter_context(contextlib.closing(socket.create_server(place)))
        hosts.start(1, 2, 3)
        client = hosts.open(1)
        longest_gap(client, 2)
        files = [*(tmp_path / "members").rglob("nats.conf")]
        assert len(files) == 3

        def dialled() -> set[str]:
            read = [json.loads(file.read_text())["cluster"]["routes"] for file in files]
            return {route.partition("//")[2] for routes in read for route in routes}

        moved = {f"127.0.0.{host}:{where.ports(0)[1] + 1}" for host in (1, 2)}
        assert until(lambda: dialled() == {*moved, f"127.0.0.3:{port + 1}"}, 30)
        hosts.end(3)
        longest_gap(client, 2)
        client.close()


@pytest.mark.parametrize(
    "dies",
    ["exec false", pytest.param('exec timeout 1 "{real}" "$@"', marks=soak)],
    ids=["as it starts", "again and again"],
)
def test_a_member_that_does_not_stay_is_started_ever_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dies: str
) -> None:
    starts, binary = tmp_path / "starts", tmp_path / "nats-server"
    dies = dies.format(real=find_binary())
    binary.write_text(f"#!/bin/sh\necho >> {starts}\n{dies}\n")
    binary.chmod(0o755)
    monkeypatch.setenv("RDZV_NATS_BINARY", str(binary))
    run_id = f"run-{secrets.token_hex(4)}"
    options = Client.of_run(Options(), run_id)
    attendance = Client.attend("127.0.0.1", options, "127.0.0.1", run_id)
    assert attendance is not None
    began = time.monotonic()
    try:
        attendance.member_runs()
        assert until(lambda: starts.exists() and len(starts.read_text()) >= 8, 90)
    finally:
        attendance.hurry()
        attendance.close()
    # Each half a second, they would be after 4 s.
    assert time.monotonic() - began > 6
    told = [it.getMessage() for it in caplog.records if "the member of the store" in it.message]
    assert len(told) == len({*told})
    assert len(told) <= 2


def test_serving_a_member_ends_where_it_cannot_start(tmp_path: Path) -> None:
    command = ["serve", "quorum", "-e", "127.0.0.1", "-i", f"run-{secrets.token_hex(4)}"]
    environ = {**os.environ, "RDZV_NATS_BINARY": "/bin/false", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "rdzv_plugins.cli", *command],
        env=environ, stderr=subprocess.PIPE, text=True,
    ) as serving:  # fmt: skip
        assert serving.stderr is not None
        try:
            while "the member of the store on this host cannot start: " not in (
                line := serving.stderr.readline()
            ):
                assert line
            serving.send_signal(signal.SIGINT)
            assert serving.wait(30) == 0
        finally:
            serving.kill()
    assert [*tmp_path.iterdir()] == []


_FORKS = """
import os, sys, time
from rdzv_plugins.stores.quorum import Client, Options
run = f"forks-{os.getpid()}"
attendance = Client.attend("127.0.0.1", Options(cluster=run), "127.0.0.1", run)
while not attendance.member_runs():
    time.sleep(0.1)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(120)
"""


def test_a_forked_child_does_not_keep_the_member(tmp_path: Path) -> None:
    folder = tmp_path / "members"
    folder.mkdir()
    command = [sys.executable, "-c", _FORKS]
    environ = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        child = int(agent.stdout.readline())
        assert len(members(tmp_path)) == 1
        agent.kill()
        agent.wait()
        try:
            assert until(lambda: not members(tmp_path) and not [*folder.iterdir()], 30)
        finally:
            os.kill(child, signal.SIGKILL)


_LOST_AT_THE_START = """
import os, signal, subprocess, time
from rdzv_plugins.stores.quorum import Client, Options
real = subprocess.Popen
def popen(command, **options):
    started = real(command, **options)
    if "nats-server" in str(command[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    return started
subprocess.Popen = popen
run = f"lost-{os.getpid()}"
Client.attend("127.0.0.1", Options(cluster=run), "127.0.0.1", run).member_runs()
time.sleep(120)
"""


def test_an_agent_that_is_killed_as_its_member_starts_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "members"
    folder.mkdir()
    command = [sys.executable, "-c", _LOST_AT_THE_START]
    subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, timeout=60)
    assert until(lambda: not members(tmp_path) and not [*folder.iterdir()], 30)


@soak
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "another"])
def test_a_member_that_is_suspended_holds_nobody_up(
    run_id: str, leads: bool, record_property: Measure
) -> None:
    with started(next(kind for kind in KINDS if kind.name == "quorum"), nodes=3) as store:
        assert store.server is not None
        client = store.open(run_id, request_timeout=2 * ELECTION)
        entry = Entry(b"before", client.put("key", b"before"))
        leader = store.server.leader()
        node = store.server.nodes[leader if leads else (leader + 1) % 3]
        node.pause()
        began = time.monotonic()
        written, won = client.compare_and_set("key", b"after", entry.version)
        record_property("written, s", round(time.monotonic() - began, 2))
        assert won, "the write before is lost"
        node.resume()
        assert client.get("key") == written
        client.close()
