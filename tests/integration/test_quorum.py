"""The store that the agents run themselves: real agents on 127.0.0.1 and following."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.kv import (
    AccessDeniedError,
    ClientClosedError,
    Entry,
    KeyValueClient,
    RendezvousConnectionError,
)
from rdzv_plugins.kv.base import Limit
from rdzv_plugins.kv.contract import Attendance
from rdzv_plugins.kv.findings import Mark
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.register.member import ACCEPT_SECONDS
from rdzv_plugins.register.messages import Accepted, Answer, List
from rdzv_plugins.register.proposer import Changing, Outcome
from rdzv_plugins.settings.parsing import parse_options
from rdzv_plugins.stores import open_client
from rdzv_plugins.stores.quorum import registers
from rdzv_plugins.stores.quorum.attending import look_at
from rdzv_plugins.stores.quorum.client import Client
from rdzv_plugins.stores.quorum.members import Members, Options
from rdzv_plugins.stores.quorum.server import MemberThread
from rdzv_plugins.stores.quorum.wire import CLIENT, NODE, Wire, encode, identify
from rdzv_plugins.testing import KeyValueConformance, Store, TorchConformance
from rdzv_plugins.testing.harness import present, until
from rdzv_plugins.testing.threads import Background, together
from tests import Measure
from tests.integration.jobs import PATIENCE, Job
from tests.integration.stores import RunningStore, kind_of, started
from tests.integration.test_dashboard import ask, dashboard
from tests.integration.test_exporter import exporter, scrape
from tests.integration.test_killed import DEFAULTS, measured
from tests.servers import ServerProcess

INTERVAL, LEASE = 1.0, 3.0
CONFIG: dict[str, object] = {
    "keep_alive_interval": INTERVAL,
    "keep_alive_max_attempt": 3,
    "replacement_timeout": 0,
    "last_call_timeout": 1,
    "heartbeat_timeout": 3,
    "join_timeout": 90,
}

Submit = Callable[..., Job]


def quorum(hosts: int = 3, **config: str) -> RunningStore:
    """A store whose members are on 127.0.0.1 and following: "a" has the first, "b" the second."""
    endpoint = ",".join(f"127.0.0.{host + 1}" for host in range(hosts))
    return RunningStore(name="quorum", backend="quorum", endpoint=endpoint, config=config)


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
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
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    hosts.close()
    assert answering(hosts.store, hosts.run_id) == []


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


def answering(store: RunningStore, run_id: str) -> list[str]:
    """The hosts on which members of this run listen."""
    options = Client.of_run(parse_options(Options, store.config, {}), run_id)
    members = Members.of(store.endpoint, options)
    every = enumerate(name for name, _ in members.hosts)
    said = ((name, look_at(members, host, b"")[1]) for host, name in every)
    return [name for name, it in said if not it.startswith("runs none yet")]


def finish(job: Job, names: str) -> dict[str, int]:
    for name in names:
        job.finish(name)
    return job.await_ends(names)


def assert_nothing_is_left(job: Job, store: RunningStore | None = None) -> None:
    """A member ends with its agent; the ends of all agents were awaited."""
    assert answering(store or quorum(), job.run_id) == []


soak = pytest.mark.soak


@pytest.mark.parametrize("order", ["abc", pytest.param("cba", marks=soak)])
def test_a_job_of_three_leaves_nothing(
    submit: Submit, order: str, record_property: Measure
) -> None:
    # However late the last agent comes, it must not end a round of two.
    job = submit(last_call_timeout=PATIENCE)
    for name in order[:-1]:
        job.start_at(name)
    began = time.monotonic()
    job.start_at(order[-1])
    job.await_begun("abc")
    record_property("from the last agent's start, s", round(time.monotonic() - began, 2))
    assert len(answering(quorum(), job.run_id)) == 3
    ended = time.monotonic()
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    record_property("until all agents had ended, s", round(time.monotonic() - ended, 2))
    assert_nothing_is_left(job)
    assert not [line for line in job.lines("abc") if line.startswith(("W", "E"))]


@pytest.mark.parametrize(
    "victim", ["a", pytest.param("b", marks=soak), pytest.param("c", marks=soak)]
)
def test_a_member_is_killed_with_its_agent_and_replaced(
    submit: Submit, victim: str, record_property: Measure
) -> None:
    job = submit()
    job.begin("abc")
    others = [name for name in "abc" if name != victim]
    killed = job.agents[victim].kill()
    job.await_begun(others, after=killed, timeout=LEASE + PATIENCE)
    record_property("the others run, s", round(time.monotonic() - killed, 2))
    back = time.monotonic()
    job.start_at(victim)
    job.await_begun("abc", after=back)
    record_property("all run again, s", round(time.monotonic() - back, 2))
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job)


@soak
@pytest.mark.parametrize("victim", [*"abc"])
def test_a_killed_agent_is_noticed_at_once(
    submit: Submit, victim: str, record_property: Measure
) -> None:
    took = measured(submit(**DEFAULTS), victim)
    record_property("last worker began again, s", round(took, 2))


@soak
@pytest.mark.parametrize("victim", [*"abc"])
@pytest.mark.parametrize("phase", ["store", "forming", "confirming", "running", "ending"])
def test_any_of_three_is_lost_in_any_phase_and_replaced_at_once(
    submit: Submit, phase: str, victim: str, record_property: Measure
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
        lost = job.agents[victim].kill()
        assert job.await_ends(others) == dict.fromkeys(others, 0)
        record_property("the others ended, s", round(time.monotonic() - lost, 2))
    else:
        lost = job.agents[victim].kill()
        job.start_at(victim)
        if phase == "confirming":
            newcomer.signal(signal.SIGCONT)
        everyone = sorted([*others, victim])
        job.await_begun(everyone, after=lost, timeout=LEASE + 2 * PATIENCE)
        record_property("all run, s", round(time.monotonic() - lost, 2))
        assert finish(job, "".join(everyone)) == dict.fromkeys(everyone, 0)
    assert_nothing_is_left(job)


def phase_of(job: Job) -> Phase | None:
    document = job.document()
    return document.phase if document is not None else None


@pytest.mark.parametrize(
    ("survivor", "back"),
    [
        ("c", "a"),
        *(pytest.param(*it, marks=pytest.mark.soak) for it in ["ab", "bc", "ac", "ba", "cb"]),
    ],
)
def test_two_members_are_killed_and_one_comes_back(
    submit: Submit, survivor: str, back: str, record_property: Measure
) -> None:
    """What runs runs on; a restart waits for a majority."""
    job = submit(nodes="1:3")
    job.begin("abc")
    killed = time.monotonic()
    for name in {*"abc"} - {survivor}:
        job.agents[name].kill()
    job.assert_noted(survivor, [], killed, LEASE)
    came = time.monotonic()
    job.start_at(back)
    job.await_begun(sorted(survivor + back), after=came, timeout=LEASE + PATIENCE)
    record_property("two run, s after one came back", round(time.monotonic() - came, 2))
    assert finish(job, survivor + back) == {survivor: 0, back: 0}
    assert_nothing_is_left(job)


@soak
def test_all_are_killed_and_started_again(submit: Submit) -> None:
    job = submit()
    job.begin("abc")
    for name in "abc":
        job.agents[name].kill()
    killed = time.monotonic()
    for name in "abc":
        job.start_at(name)
    job.await_begun("abc", after=killed)
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job)


@soak
@pytest.mark.parametrize("name", ["a", "d"])
def test_a_node_that_comes_after_the_end(submit: Submit, name: str) -> None:
    """With a member or without, it waits for the others, as that of a new job would."""
    job = submit()
    job.begin("abc")
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job)
    job.start_at(name, join_timeout=10)
    own = "answers" if name == "a" else "runs none yet"
    others = "127.0.0.2 runs none yet, 127.0.0.3 runs none yet"
    job.await_line(
        name,
        f"waiting for the store, which has no majority of its members yet: 127.0.0.1 {own}, "
        f"{others}",
    )
    assert job.await_ends(name) == {name: 1}
    job.await_line(name, f"had no majority of its members within 10 s: 127.0.0.1 {own}, {others}")
    assert_nothing_is_left(job)


@pytest.mark.soak
def test_all_are_told_to_end_at_once(submit: Submit, record_property: Measure) -> None:
    """No one complains of a store that went away with the others."""
    job = submit()
    job.begin("abc")
    told = time.monotonic()
    for name in "abc":
        job.agents[name].signal(signal.SIGTERM)
    job.await_ends("abc")
    record_property("ended, s", round(time.monotonic() - told, 2))
    assert_nothing_is_left(job)
    assert complaints(job, "abc") == []


def complaints(job: Job, names: str) -> list[str]:
    """What agents say of errors, but for torch's own lines on a signal."""
    said = [line for line in job.lines(names) if line.startswith(("W", "E"))]
    ours = [line for line in said if "torch/distributed" not in line]
    return [line for line in ours if "this node was drained" not in line]


@soak
def test_all_are_told_to_end_twice(submit: Submit) -> None:
    """Ctrl-C once more: nobody waits for the others, and none complains of a store that is gone."""
    job = submit()
    job.begin("abc")
    for name in "abc":
        job.agents[name].signal(signal.SIGINT)
    for name in "abc":
        job.await_line(name, "the workers get SIGINT")
        job.agents[name].signal(signal.SIGINT)
    job.await_ends("abc")
    assert_nothing_is_left(job)
    assert complaints(job, "abc") == []


@soak
@pytest.mark.parametrize("name", [*"abc"])
def test_a_node_with_a_member_is_drained(submit: Submit, name: str) -> None:
    """Its member stays until the run ends; so does that of a spare which comes later."""
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
    job.await_line(name, "stays for the other nodes, until the run ends")
    job.start_at("e")
    job.await_line("e", "joined as", timeout=PATIENCE)
    assert len(answering(quorum(), job.run_id)) == 3
    assert finish(job, others) == dict.fromkeys(others, 0)
    assert job.await_ends(name + "e") == {name: 0, "e": 0}
    assert_nothing_is_left(job)
    assert complaints(job, "abcde") == []


@soak
@pytest.mark.parametrize("name", [*"abc"])
def test_an_agent_of_three_is_suspended(
    submit: Submit, name: str, record_property: Measure
) -> None:
    """Its member stops with it; the others go on without both, and later with them."""
    job = submit()
    job.begin("abc")
    stopped = job.agents[name].signal(signal.SIGSTOP)
    others = [it for it in "abc" if it != name]
    job.await_begun(others, after=stopped)
    record_property("the others run, s", round(time.monotonic() - stopped, 2))
    back = job.agents[name].signal(signal.SIGCONT)
    job.await_begun("abc", after=back)
    record_property("all run again, s", round(time.monotonic() - back, 2))
    # It stood still itself: the others were up.
    assert not [line for line in job.lines(name) if "members of the store are up" in line]
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}
    assert_nothing_is_left(job)


@soak
def test_two_runs_on_the_same_hosts(submit: Submit) -> None:
    first, second = submit(), submit(folder="second")
    for name in "abc":
        first.start_at(name)
        second.start_at(name)
    for job in (first, second):
        job.await_begun("abc")
    assert [len(answering(quorum(), it.run_id)) for it in (first, second)] == [3, 3]
    lost = first.agents["a"].kill()
    first.await_begun("bc", after=lost, timeout=LEASE + PATIENCE)
    assert finish(second, "abc") == {"a": 0, "b": 0, "c": 0}
    assert second.noted("a") == ["begin", "end"]
    assert finish(first, "bc") == {"b": 0, "c": 0}
    assert_nothing_is_left(first)
    assert answering(quorum(), second.run_id) == []


@soak
@pytest.mark.parametrize("hosts", [3, 5])
def test_a_job_of_five(submit: Submit, hosts: int) -> None:
    """A run with five members may lose two at once."""
    store = quorum(hosts)
    job = submit(store, nodes="3:5")
    job.begin("abcde")
    assert len(answering(store, job.run_id)) == hosts
    lost = "ae" if hosts == 5 else "be"
    at = time.monotonic()
    for name in lost:
        job.agents[name].kill()
    others = "".join(it for it in "abcde" if it not in lost)
    job.await_begun(others, after=at, timeout=LEASE + PATIENCE)
    at = time.monotonic()
    for name in lost:
        job.start_at(name)
    job.await_begun("abcde", after=at)
    assert finish(job, "abcde") == dict.fromkeys("abcde", 0)
    assert_nothing_is_left(job, store)


@pytest.mark.soak
def test_the_second_agent_of_a_host_takes_the_member_over(
    submit: Submit, record_property: Measure
) -> None:
    job = submit(nodes="2:4")
    job.begin("abc")
    came = time.monotonic()
    job.start_at("d", 1)
    job.await_begun("abcd", after=came)
    assert len(answering(quorum(), job.run_id)) == 3
    killed = job.agents["a"].kill()
    job.await_line("d", "this host runs a member of the store")
    job.await_begun("bcd", after=killed, timeout=LEASE + PATIENCE)
    record_property("the others run, s", round(time.monotonic() - killed, 2))
    assert finish(job, "bcd") == {"b": 0, "c": 0, "d": 0}
    assert_nothing_is_left(job)


def test_commands_reach_the_quorum_from_any_host(submit: Submit) -> None:
    job = submit()
    job.begin("abc")
    at = ["--rdzv-backend=quorum", f"--rdzv-endpoint={quorum().endpoint}"]
    for command in ("status", "history"):
        words = [command, "-i", job.run_id, *at]
        # A round is released to its agents before its leader notes it.
        assert until(lambda words=words: CliRunner().invoke(app, words).exit_code == 0, 30)  # type: ignore[misc]
    # It looks for members of any run on the hosts.
    assert job.run_id in CliRunner().invoke(app, ["list", *at]).output
    refused = CliRunner().invoke(app, ["excluded", "--all-runs", *at])
    assert isinstance(refused.exception, ValueError)
    assert "takes no run, with --rdzv-conf=cluster=<its id>" in str(refused.exception)
    # A command that takes no run is told by the cluster whose members to ask.
    for without in (["list"], ["excluded", "--all-runs"]):
        shown = CliRunner().invoke(app, [*without, *at, "-c", f"cluster={job.run_id}"])
        assert shown.exit_code == 0, shown.output
        assert without != ["list"] or job.run_id in shown.output
    assert finish(job, "abc") == {"a": 0, "b": 0, "c": 0}


def test_a_quorum_with_a_member_away_is_told(submit: Submit) -> None:
    job = submit()
    job.begin("abc")
    killed = job.agents["b"].kill()
    job.await_begun("ac", after=killed)
    told = "2 of 3 members of the store are up; it survives no further loss"
    job.await_line("a", f"{told}; away: 127.0.0.2")
    at = ["-i", job.run_id, "--rdzv-backend=quorum", f"--rdzv-endpoint={quorum().endpoint}"]
    assert told in CliRunner().invoke(app, ["status", *at]).output
    with exporter(quorum(cluster=job.run_id)) as scraped:
        assert until(lambda: scrape(scraped).get(("rdzv_store_members_up", job.run_id)) == 2, 30)
    job.start_at("b")
    job.await_line("a", "3 of 3 members of the store are up; it survives the loss of 1 more")
    job.await_begun("abc", after=killed)
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
    began = time.monotonic()
    with pytest.raises(AccessDeniedError, match="give all nodes and commands the same"):
        hosts.open(3, **wrong)
    record_property("refused, s", round(time.monotonic() - began, 2))
    assert time.monotonic() - began < 20
    longest_gap(own, 0.5)
    own.close()


def test_a_node_that_waits_stays_connected(hosts: Hosts) -> None:
    """A member that was drained leaves once it sees no node."""
    hosts.start(1, 2, 3)
    attending: list[Any] = [*hosts._attendances.values()]
    members: list[MemberThread] = [it._member for it in attending]

    def connected() -> list[set[Wire]]:
        every = [[*it._wires.values()] for it in members]
        return [{wire for wire in wires if wire.peer == NODE} for wires in every]

    with contextlib.closing(hosts.open(1)) as client:
        version = client.put("key", b"value")
        # A client greets a member only during a request.
        assert until(lambda: client.wait("key", version, 0.1) is None and all(connected()), 10)
        before = connected()
        for _ in range(5):
            client.wait("key", version, 0.05)
        waits = Background(lambda: client.wait("key", version, 30))
        assert not waits.done(0.2)
        client.interrupt()
        waits.result(10)
        assert connected() == before
        # No member keeps a wait that was given up.
        assert max(sum(map(len, it._watches.values())) for it in members) == 1


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("127.0.0.1,127.0.0.2,127.0.0.3,127.0.0.4,127.0.0.5", "of 3 hosts' is there"),
        ("localhost,127.0.0.2,127.0.0.3", "another member is there; name the same hosts"),
    ],
)
def test_endpoints_that_differ_are_told(hosts: Hosts, endpoint: str, why: str) -> None:
    """Other hosts would have a majority of their own, and other names another order."""
    hosts.start(1, 2, 3)
    hosts.open(1).close()
    with pytest.raises(RendezvousConnectionError, match=why):
        open_client("quorum", endpoint, hosts.run_id, {"cluster": hosts.run_id}, request_timeout=2)


def test_a_client_that_cannot_take_part_is_closed(hosts: Hosts) -> None:
    opened: list[KeyValueClient] = []

    def connect() -> KeyValueClient:
        options = {"cluster": hosts.run_id}
        client = open_client(
            "quorum", hosts.store.endpoint, hosts.run_id, options, request_timeout=1
        )
        opened.append(client)
        hosts.end(2, 3)
        return client

    hosts.start(1, 2, 3)
    hosts.open(1).close()  # The members are up.
    with pytest.raises(
        RendezvousConnectionError, match=r"had no (majority|agreement) of its members"
    ):
        hosts._attendances[1].open(connect, 0)
    with pytest.raises(ClientClosedError):
        opened[0].get("key")


def test_runs_whose_first_ports_are_the_same(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("one")
    first = 29700 + 3 * secrets.randbelow(30)
    own = {"secret_file": str(tmp_path / "own"), "ports": f"{first}-{first + 2}"}
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


def test_members_whose_ports_are_taken_find_each_other(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    port = Members.of(hosts.store.endpoint, Options(cluster=hosts.run_id)).ports(0)[0]
    with contextlib.ExitStack() as others:
        for place in (("127.0.0.1", port), ("127.0.0.2", port)):
            others.enter_context(contextlib.closing(socket.create_server(place)))
        hosts.start(1, 2, 3)
        assert f"{port} at 127.0.0.1 is another program's, so this host's member" in caplog.text
        hosts.end(3)
        client = hosts.open(1)
        longest_gap(client, 1)
        client.close()


def test_a_stranger_with_an_index_of_no_member_is_told() -> None:
    members = Members.of("127.0.0.1", Options(cluster="strange"))
    listener = socket.create_server(("127.0.0.1", members.ports(0)[0]))
    stranger = MemberThread(listener, [[]] * 9, 7, members.greeting, b"")
    stranger.start()
    try:
        assert look_at(members, 0, b"")[1].startswith("takes itself for 'host 7'")
    finally:
        stranger.stop()


def test_a_member_that_is_served_by_hand() -> None:
    run_id = f"run-{secrets.token_hex(4)}"
    command = ["serve", "quorum", "-e", "127.0.0.1", "-i", run_id]
    one = RunningStore(name="quorum", backend="quorum", endpoint="127.0.0.1", config={})
    with subprocess.Popen([sys.executable, "-m", "rdzv_plugins.cli", *command]) as serving:
        try:
            assert until(lambda: answering(one, run_id) == ["127.0.0.1"], 30)
            serving.send_signal(signal.SIGINT)
            assert serving.wait(30) == 0
        finally:
            serving.kill()
    assert answering(one, run_id) == []


_FORKS = """
import os, sys, time
from rdzv_plugins.stores.quorum.client import Client
from rdzv_plugins.stores.quorum.members import Options
run = f"forks-{os.getpid()}"
attendance = Client.attend("127.0.0.1", Options(cluster=run), "127.0.0.1", run)
while not attendance.member_runs():
    time.sleep(0.1)
child = os.fork()
if child:
    print(run, child, flush=True)
time.sleep(120)
"""


def test_a_forked_child_does_not_keep_the_port() -> None:
    with subprocess.Popen([sys.executable, "-c", _FORKS], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        run_id, child = agent.stdout.readline().decode().split()
        one = RunningStore(name="quorum", backend="quorum", endpoint="127.0.0.1", config={})
        try:
            assert answering(one, run_id) == ["127.0.0.1"]
            agent.kill()
            agent.wait()
            assert until(lambda: answering(one, run_id) == [], 10)
            port = Members.of("127.0.0.1", Options(cluster=run_id)).ports(0)[0]
            socket.create_server(("127.0.0.1", port)).close()
        finally:
            os.kill(int(child), signal.SIGKILL)


# Members as processes of their own.


@contextlib.contextmanager
def three() -> Iterator[RunningStore]:
    with started(kind_of("quorum"), nodes=3) as store:
        yield store


@pytest.fixture
def served() -> Iterator[RunningStore]:
    with three() as store:
        yield store


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningStore]:
    with three() as store:
        yield store


class TestThreeMembers(KeyValueConformance, TorchConformance):
    @pytest.fixture
    def store(self, shared: RunningStore) -> Store:
        return Store(open=shared.open)


def nodes(store: RunningStore) -> Sequence[ServerProcess]:
    assert store.server is not None
    return store.server.nodes


def test_a_writer_learns_whether_it_won_while_members_stop(
    served: RunningStore, run_id: str
) -> None:
    """While one member is stopped, others may replace a write before its writer is told of it."""
    ended = threading.Event()

    def stop_members() -> None:
        while not ended.is_set():
            for node in nodes(served):
                node.pause()
                ended.wait(0.2)
                node.resume()
                ended.wait(0.1)

    def increment(client: KeyValueClient) -> None:
        entry, won = client.get("key"), False
        for _ in range(40):
            while not won:
                number = int(present(entry).value) + 1
                entry, won = client.compare_and_set("key", b"%d" % number, present(entry).version)
            won = False

    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(contextlib.closing(served.open(run_id, request_timeout=30)))
            for _ in range(6)
        ]
        stopping = Background(stop_members)
        for _ in range(3):
            clients[0].put("key", b"0")
            together([partial(increment, client) for client in clients])
            assert present(clients[0].get("key")).value == b"240"
        ended.set()
        stopping.result(10)


def test_nobody_waits_for_a_member_that_is_killed_or_stopped(
    served: RunningStore, run_id: str, record_property: Measure
) -> None:
    """What one has kept outlives the restart of each."""
    with contextlib.closing(served.open(run_id, request_timeout=30)) as client:
        entry = Entry(b"kept", client.put("before", b"kept"))
        for node in nodes(served):
            busy = Background(lambda: longest_gap(client, 3))
            node.pause()
            assert not busy.done(0.5)
            node.resume()
            assert not busy.done(0.5)
            node.kill()
            node.start()
            worst = busy.result(30)
            record_property(f"{node} stopped and killed, s", round(worst, 3))
            assert worst < 2
            # The next one is killed only once this one has recovered.
            assert until(lambda: all(it.mark is Mark.OK for it in client.inspect()), 10)
        assert client.get("before") == entry


def test_a_member_that_falls_silent_after_its_promise_is_passed_over(
    served: RunningStore, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = sorted(nodes(served), key=lambda it: it.port)
    hear, silent = Changing.hear, list[ServerProcess]()

    def stops(attempt: Changing, member: int, answer: Answer, now: float) -> Any:
        sent = hear(attempt, member, answer, now)
        if not silent and attempt.is_doubtful and attempt.outcome is None:
            silent.append(members[sent[0][0]])
            silent[0].pause()
        return sent

    with contextlib.closing(served.open(run_id, request_timeout=30)) as client:
        assert until(lambda: str(client.members_up()).startswith("3 of 3"), 15)
        monkeypatch.setattr(registers, "_ATTEMPT_SECONDS", (20.0, 20.0))
        monkeypatch.setattr(Changing, "hear", stops)
        began = time.monotonic()
        client.put("key", b"value")
    assert silent
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("others", [3, 140])
def test_nothing_is_counted_twice_by_a_client_that_stood_still(
    shared: RunningStore, run_id: str, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the acceptances and its look at them others count."""
    hear, stands_still = Changing.hear, [True]

    def late(attempt: Changing, member: int, answer: Answer, now: float) -> Any:
        late = bool(stands_still) and isinstance(answer, Accepted)
        sent = hear(attempt, member, answer, now + 2 * ACCEPT_SECONDS * late)
        if late and attempt.outcome is Outcome.AGAIN:
            stands_still.clear()
            for writer in range(others):
                other._seed = writer  # type: ignore[attr-defined] # A value names its last 127 writers.
                other.add("n", 1)
        return sent

    with (
        contextlib.closing(shared.open(run_id)) as client,
        contextlib.closing(shared.open(run_id)) as other,
    ):
        other.add("n", 1)
        monkeypatch.setattr(Changing, "hear", late)
        if others < 127:
            client.add("n", 1)
        else:
            with pytest.raises(RendezvousConnectionError, match="over 127 others replaced"):
                client.add("n", 1)
        assert present(other.get("n")).value == b"%d" % (others + 2)


def test_a_majority_that_came_back_without_memory_begins_anew(
    served: RunningStore, run_id: str
) -> None:
    first, second, third = nodes(served)
    with contextlib.closing(served.open(run_id, request_timeout=30)) as client:
        # The member that lives on has to be one of those that accept the value.
        first.pause()
        client.put("key", b"value")
        first.resume()
        for node in (first, second):
            node.kill()
        first.start()
        # The member that lives remembers.
        assert present(client.get("key")).value == b"value"
        for node in (first, third):
            node.kill()
        for node in (first, third):
            node.launch()
        assert client.list("") == {}


def test_what_has_expired_is_deleted(served: RunningStore, run_id: str) -> None:
    with contextlib.closing(served.open(run_id)) as client:
        client.put_many({f"key-{number}": b"value" for number in range(10)})
        client.expire(0)
        assert client.list("") == {}
        held: Any = client
        limit = Limit(time.monotonic() + 5)
        assert [*held._registers.read(held._namespace, limit)] == []


def test_members_that_are_away_are_counted(served: RunningStore, run_id: str) -> None:
    def told() -> str:
        (found,) = [it for it in client.inspect() if it.what == "members"]
        return found.found

    with contextlib.closing(served.open(run_id, request_timeout=2)) as client:
        # A member on a busy host may answer too late for one look.
        every = "3 of 3 members of the store are up; it survives the loss of 1 more"
        assert until(lambda: told() == every, 15), told()
        nodes(served)[0].kill()
        two = "2 of 3 members of the store are up; it survives no further loss"
        assert until(lambda: told() == two, 15), told()
        nodes(served)[1].kill()
        with pytest.raises(RendezvousConnectionError, match="1 of 3 members answer"):
            client.put("key", b"value")


def test_a_place_that_was_another_members_is_forgotten(served: RunningStore) -> None:
    """As after a name that led to another host for a while."""
    members = Members.of(served.endpoint, Options(cluster="local"))
    places = [members.places(it) for it in range(3)]
    right, places[0] = places[0], places[1]
    with contextlib.closing(registers.Registers(places, members.greeting, b"")) as client:

        def up() -> int:
            client.read([], Limit(time.monotonic() + 5))
            return client.up(Limit(time.monotonic() + 0.5))

        assert until(lambda: up() == 2, 15)
        places[0] = right
        assert until(lambda: up() == 3, 15)
        for node in nodes(served)[:2]:
            node.kill()
        with pytest.raises(OSError, match="1 of 3 members answer"):
            client.read([], Limit(time.monotonic() + 2))


def test_strangers_and_nonsense_do_a_member_no_harm(served: RunningStore, run_id: str) -> None:
    nested = b"\x95\x01\xa0\x00\xc4\x00".ljust(1024, b"\x91")
    undecodable = b"\x94\x01\xa2\xff\xff\x00\xc4\x00"
    frames = [struct.pack(">I", len(it)) + it for it in (b"\xc1", nested, undecodable)]
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, *frames):
        with socket.create_connection(("127.0.0.10", nodes(served)[0].port)) as stranger:
            stranger.sendall(said)
            stranger.settimeout(10)
            if said:
                stranger.recv(4096)  # Its greeting.
                assert stranger.recv(1) == b"", f"it went on after {said[:8]!r}"
        assert identify("127.0.0.10", nodes(served)[0].port, "local of 3 hosts", b"", 10) in range(
            3
        )
    with contextlib.closing(served.open(run_id)) as client:
        client.put("key", b"value")


def test_a_client_that_reads_nothing_costs_little_memory(served: RunningStore, run_id: str) -> None:
    """Its requests come at once, and each answer is large."""
    member = nodes(served)[0]
    with (
        contextlib.closing(served.open(run_id)) as client,
        socket.create_connection(("127.0.0.10", member.port)) as line,
    ):
        assert isinstance(client, Client)
        client.put_many({f"key{it}": bytes(1_000_000) for it in range(5)})
        wire = Wire(line, "local of 3 hosts", b"", CLIENT, False, 1 << 20)
        while wire.peer is None:
            wire.flush()
            assert not [*wire.receive()]
        for _ in range(100):
            wire.send(encode(0, List(client._registers._proposer.generation, "")))
        wire.flush()
        # It hangs up, rather than keep what nobody takes.
        line.setblocking(True)
        line.settimeout(30)
        with contextlib.suppress(ConnectionError):
            while line.recv(1 << 20):
                pass
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{member.pid}/status").read_text())
    assert peak is not None
    assert int(peak[1]) < 300_000
