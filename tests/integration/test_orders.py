"""Orders from people, given with the rdzv command to jobs of real torchrun agents."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from threading import Event
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rdzv_plugins.cli import app
from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.observe import inspection
from rdzv_plugins.protocol.documents import NODES_PREFIX, STATE_KEY, Phase, RoundDocument
from rdzv_plugins.protocol.roster import apart
from rdzv_plugins.protocol.rules import INLINE
from rdzv_plugins.testing.threads import Background
from tests import Measure
from tests.integration import agents, forked
from tests.integration.jobs import Begin, Run
from tests.integration.stores import RunningStore, every_store
from tests.integration.test_dashboard import record


def rdzv(run: Run, store: RunningStore, command: str, *arguments: str) -> str:
    """The output of a command about the run."""
    where = [*store.where, "-i", run.run_id]
    done = forked.run([sys.executable, "-m", "rdzv_plugins.cli", command, *where, *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_effect(said: str, ordered: str, nodes: int) -> None:
    """The last two lines: what was ordered, and the round that runs for it, of so many nodes."""
    line, effect = said.splitlines()[-2:]
    told = re.fullmatch(rf"{re.escape(ordered)}; round (\d+) forms with {nodes} nodes", line)
    assert told, said
    # A peer's worker may have failed before its agent was told, which ends one more round.
    ran = re.fullmatch(rf"round (\d+) runs with {nodes} nodes after \d+\.\d s", effect)
    assert ran, said
    assert int(ran[1]) >= int(told[1])


def last_cause(run: Run, store: RunningStore) -> dict[str, object]:
    """The newest row of the run's history, once it has the round that runs."""
    number = run.round()

    def found() -> dict[str, object] | None:
        rows = rdzv(run, store, "history", "--json", "-n", "1").splitlines()
        row: dict[str, object] = json.loads(rows[0])
        return row if row["round"] == number else None

    return run.await_that(found, f"round {number} in the history", 30)


@every_store
@pytest.mark.parametrize("who", ["leader", pytest.param("another", marks=pytest.mark.soak)])
def test_a_drained_agent_ends_and_the_others_go_on(
    begin: Begin, store: RunningStore, who: str, record_property: Measure
) -> None:
    run = begin(history_ttl=600)
    before = run.begin("abc")
    leader = run.leader().name
    name = leader if who == "leader" else next(it for it in "abc" if it != leader)
    agent = run.agents[name]
    label = f"127.0.0.{ord(name) - ord('a') + 1}[{agent.pid}]"
    said = rdzv(run, store, "drain", label)
    assert_effect(said, f"drain of {label} from run '{run.run_id}' ordered", 2)
    world = run.await_world(sorted({*"abc"} - {name}), after=before.last_step_at)
    assert run.await_ends([name]) == {name: 0}
    record_property("stands still, s", f"{min(world.stepped.values()) - before.last_step_at:.2f}")
    # From the checkpoint on.
    assert 10 <= world.resumed <= before.last_step
    row = last_cause(run, store)
    # A peer's worker may have failed before its agent was told.
    assert f"drained {label}" in str(row["reason"])
    assert [it["name"] for it in row["drained"]] == [label]  # type: ignore[attr-defined]
    assert "this node was drained" in agent.log.read_text()
    # A new agent at its place is another node.
    again = run.start_at("d", ord(name) - ord("a") + 1)
    run.await_world(sorted({*"abcd"} - {name}))
    assert again.process.poll() is None


@every_store
def test_a_restart_without_a_loss(begin: Begin, store: RunningStore) -> None:
    # torchrun counts a worker that fails as its peer stops, before it sees the new round.
    run = begin(nodes="2:2", max_restarts=3, history_ttl=600)
    before = run.begin("ab")
    number = run.round()
    said = rdzv(run, store, "restart", "--why", "new data")
    first, effect = said.splitlines()
    assert first == f"restart of run '{run.run_id}' ordered; round {number + 1} forms with 2 nodes"
    assert re.fullmatch(rf"round {number + 1} runs with 2 nodes after \d+\.\d s", effect)
    assert run.round() == number + 1
    run.await_world("ab", after=before.last_step_at + 0.5, by_rank=True)
    assert run.round() == number + 1
    # A worker that fails as its peer stops is named before it.
    reason = "restarted by the command rdzv restart: new data"
    assert str(last_cause(run, store)["reason"]).split("; ")[-1] == reason


@every_store
def test_an_excluded_host_waits_until_it_is_included(
    begin: Begin, store: RunningStore, record_property: Measure
) -> None:
    run = begin(nodes="1:3", history_ttl=600)
    run.begin("abc")
    said = rdzv(run, store, "exclude", "127.0.0.2", "--for", "1h", "--why", "ECC errors")
    assert "127.0.0.2 excluded until " in said
    label = f"127.0.0.2[{run.agents['b'].pid}]"
    assert_effect(said, f"exclusion of {label} from run '{run.run_id}' ordered", 2)
    without = run.await_world("ac", by_rank=True)
    assert "excluded 127.0.0.2[" in str(last_cause(run, store)["reason"])
    status = rdzv(run, store, "status")
    # The workers of the others may have failed when those of the excluded node ended.
    assert re.search(
        r": running round \d+, 2 of 1\.\.3 nodes; 127\.0\.0\.2 excluded until ", status
    )
    assert "ECC errors" in rdzv(run, store, "excluded")
    log = run.agents["b"].log
    run.await_that(lambda: "; this node waits meanwhile" in log.read_text(), "its warning", 30)
    assert run.agents["b"].process.poll() is None
    assert rdzv(run, store, "include", "127.0.0.2").startswith("127.0.0.2 may join run")
    run.await_world("abc", after=without.last_step_at, by_rank=True)
    assert "no host is excluded" in rdzv(run, store, "excluded")


@pytest.mark.soak
@every_store
def test_the_next_run_of_the_id_keeps_the_host_out_until_the_time_is_over(
    begin: Begin, store: RunningStore
) -> None:
    run = begin(nodes="1:2", last_call_timeout=3)
    said = rdzv(run, store, "exclude", "127.0.0.1", "--later", "--for", "20s")
    assert "127.0.0.1 excluded until " in said
    run.start_at("a")
    run.start_at("b")
    first = run.await_world("b")
    assert "127.0.0.1 excluded until " in run.agents["a"].log.read_text()
    run.await_world("ab", after=first.last_step_at, by_rank=True)


# Steps of the tests' training are some 50 ms apart.
_SAME_TRAINING = 0.5
_FLAPS_EVERY, _WATCHED = 10.0, 90.0


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("store", ["redis", "etcd-v3"], indirect=True)
@pytest.mark.parametrize("quarantine", [{"quarantine_after": 0}, {}], ids=["off", "default"])
def test_a_host_that_flaps_does_not_keep_the_others_from_training(
    store: RunningStore, begin: Begin, quarantine: dict[str, int], record_property: Measure
) -> None:
    """Killed every ten seconds; the first three times all go on at once without it.

    The first quarantine, a tenth of the window, is longer than the watch.
    """
    run = begin(nodes="2:3", max_restarts=100, quarantine_window=1200, **quarantine)
    run.begin("ab")
    began = time.monotonic()
    flaps = 0
    while time.monotonic() < began + _WATCHED:
        flaps += 1
        agent, until = run.start_at(f"flap{flaps}", 3), time.monotonic() + _FLAPS_EVERY
        run.await_that(lambda until=until: time.monotonic() > until, "its end", 60)  # type: ignore[misc]
        agent.kill()
    ended = time.monotonic()
    run.read_events()
    steps = [it.at for it in run.events if it.event == "step" and it.node == "a"]
    steps = [at for at in steps if began <= at <= ended]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    share = sum(gap for gap in gaps if gap < _SAME_TRAINING) / (ended - began)
    record_property("share of time in steps", f"{share:.0%}, {flaps} flaps")
    log = run.agents["a"].log.read_text()
    if not quarantine:
        assert "127.0.0.3 quarantined until " in rdzv(run, store, "status")
        assert log.count("forms: lost 127.0.0.3") <= 3
        assert share > 0.5


# All nodes are in round 0, although they start one after the other.
PATIENT = {"last_call_timeout": "3", "replacement_timeout": "0.2"}


class Played(agents.Run):
    """Agents without workers, each on an address of its own, and the command about their run."""

    def __init__(self, store: RunningStore, run_id: str) -> None:
        super().__init__(store, run_id)
        self.run_id = run_id

    def begin(self, nodes: int, nnodes: tuple[int, int], **config: str) -> None:
        """Start so many on 127.0.0.1 and following, and wait until they are in one round."""
        for _ in range(nodes):
            self.add(nnodes, **config)
        agents.until(agents.one_world(self.agents), 30)

    def add(self, nnodes: tuple[int, int], **config: str) -> agents.Agent:
        return self.start(nnodes, local_addr=self.address(len(self.agents)), **config)

    @staticmethod
    def address(number: int) -> str:
        return f"127.0.0.{number + 1}"

    def label(self, number: int) -> str:
        return f"{self.address(number)}[{os.getpid()}]"

    @property
    def clean(self) -> str:
        """The command that frees the id, as a person can paste it."""
        return f"rdzv clean -i {self.run_id} -b {self._store.backend} -e {self._store.endpoint}"

    def rdzv(self, command: str, *arguments: str) -> Result:
        store = self._store
        where = ["-b", store.backend, "-e", store.endpoint, "-i", self.run_id]
        return CliRunner().invoke(app, [command, *where, *arguments])

    def said(self, command: str, *arguments: str) -> list[str]:
        """The lines of a command that succeeds."""
        done = self.rdzv(command, *arguments)
        assert done.exit_code == 0, (done.exception, done.output)
        return done.stdout.splitlines()

    def refusal(self, command: str, *arguments: str) -> str:
        """The one line with which `rdzv` ends with status 1."""
        done = self.rdzv(command, *arguments)
        assert isinstance(done.exception, ValueError), (done.exception, done.output)
        assert done.stdout == ""
        return str(done.exception)

    def document(self) -> RoundDocument:
        def decoded(client: KeyValueClient) -> RoundDocument:
            entry = client.get(STATE_KEY)
            assert entry is not None
            return RoundDocument.decode(entry.value)

        return self._ask(decoded)


@pytest.fixture
def played(store: RunningStore, run_id: str) -> Iterator[Played]:
    with Played(store, run_id) as run:
        yield run


RAN = r"round (\d+) runs with (\d+) nodes? after \d+\.\d s"


@pytest.mark.parametrize("order", [("restart",), ("resize",), ("drain", "127.0.0.1")])
def test_a_dead_run_is_given_no_order(played: Played, order: tuple[str, ...]) -> None:
    played.begin(2, (2, 2))
    for agent in played.agents:
        agent.crash()
    before = played.document()
    assert re.fullmatch(
        rf"run '{played.run_id}' is dead, and nobody carries an order out: round 0 is running, but "
        rf"none of its nodes lives; .*; its id is free after {re.escape(played.clean)}",
        played.refusal(*order),
    )
    assert played.document() == before
    # What is not for those nodes alone is kept, and says of whom.
    assert played.said("exclude", "127.0.0.1")[1:] == [
        f"run '{played.run_id}' is dead: no round of it is ended for that"
    ]
    (row,) = map(json.loads, played.said("close", "--json"))
    assert (row["order"], row["was"], row["free_in"]) == ("close", "dead", 60)
    assert row["said"] == [
        f"closed run '{played.run_id}': nobody lives in it; its id is free in 60 s; now: "
        f"{played.clean}"
    ]
    why = "closed by the command rdzv close"
    free = rf"; its id is free in \d+ s; now: {re.escape(played.clean)}"
    closed = f"run '{played.run_id}' is closed: {why}"
    assert re.fullmatch(re.escape(closed) + free, played.refusal(*order))
    (row,) = map(json.loads, played.said("close", "--json"))
    assert (row["was"], 0 < row["free_in"] <= 60) == ("closed", True)
    before_it = f"run '{played.run_id}' was closed before: {why}"
    assert re.fullmatch(re.escape(before_it) + free, row["said"][0])
    (row,) = map(json.loads, played.said("clean", "--json"))
    assert (row["order"], row["run"], row["keys"] > 0) == ("clean", played.run_id, True)


@pytest.mark.parametrize("died", [False, True])
def test_rdzv_close_tells_what_was_seen_of_the_nodes(played: Played, died: bool) -> None:
    """The close comes so soon after their last heartbeat that none is due yet."""
    played.begin(2, (2, 2), keep_alive_interval="3")
    for agent in played.agents if died else ():
        agent.crash()
    said = (
        f"{played.label(0)}, {played.label(1)} train on in round 0, and no further round forms; "
        "its id is free 60 s after their workers have ended"
    )
    if died:
        said = f"nobody lives in it; its id is free in 60 s; now: {played.clean}"
    assert played.said("close") == [f"closed run '{played.run_id}': {said}"]


def test_rdzv_close_tells_that_nothing_was_seen_of_the_nodes(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_LONGEST_WATCH_SECONDS", 0.5)
    played.begin(2, (2, 2), keep_alive_interval="60")
    assert re.fullmatch(
        rf"closed run '{played.run_id}': .* train on in round 0 if they live, whose last heartbeat "
        r"came at [0-9:]{8} UTC, and no further round forms; its id is free 60 s after their "
        r"workers have ended",
        played.said("close")[0],
    )


def test_rdzv_close_tells_that_the_run_was_closed_meanwhile(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.begin(1, (1, 1))

    def settle_late(seen: list[inspection.Inspection], **how: Any) -> None:
        settle(seen, **how)
        played.agents[0].handler.set_closed()

    settle = inspection.settle
    monkeypatch.setattr(inspection, "settle", settle_late)
    (line,) = played.said("close")
    assert line.startswith(f"run '{played.run_id}' was closed before: by request; closed by ")


def test_an_accused_node_that_lives_says_so_and_a_dead_one_is_not_lost_by_it(
    played: Played,
) -> None:
    played.begin(2, (2, 2), keep_alive_interval="5", links="true")
    (row,) = map(json.loads, played.said("accuse", played.label(1), "--json"))
    assert (row["answered"], row["gone"], row["silent"]) == ([played.label(1)], [], [])
    assert played.said("accuse", "127.0.0.1")[1:] == [f"{played.label(0)} lives"]
    assert played.refusal("accuse", "nobody").partition("; it has ")[0] == (
        f"run '{played.run_id}' has no node 'nobody': nobody was asked"
    )
    played.agents[1].crash()
    run = played.rdzv("accuse", "127.0.0.2", "--timeout", "1")
    assert run.exit_code == 7
    assert played.document().round == 0


def test_an_order_to_a_run_that_is_gone_names_its_state(played: Played) -> None:
    unknown = f"run '{played.run_id}': {inspection.NOTHING_STORED}"
    assert played.refusal("restart") == unknown
    assert played.refusal("close") == unknown
    played.begin(2, (2, 2), abandoned_ttl="6")
    agents.until(played.tells("first round"), 30)
    for agent in played.agents:
        agent.crash()
    agents.until(played.is_swept, 30)
    assert re.fullmatch(
        rf"run '{played.run_id}' is dead, and nobody carries an order out: .*, and it is no longer "
        r"stored \(expired or cleaned\); .*",
        played.refusal("drain", "127.0.0.1"),
    )
    assert played.said("close") == [
        f"closed run '{played.run_id}': nobody lives in it; its id is free"
    ]
    assert played.refusal("restart").startswith(f"run '{played.run_id}' is closed: ")
    assert played.said("close")[0].startswith(f"run '{played.run_id}' was closed before: ")


def test_what_would_stop_a_job_needs_force(played: Played) -> None:
    played.begin(3, (2, 3), **PATIENT)
    before = played.document()
    (would,) = played.said("drain", "--dry-run", played.label(1))
    assert would == (
        f"drain of {played.label(1)} from run '{played.run_id}' would be ordered; round 1 forms "
        "with 2 nodes"
    )
    both = played.label(1), played.label(2)
    refusal = (
        f"run '{played.run_id}' would stop without {both[0]}, {both[1]}: 1 node would be left, 1 "
        "fewer than a round needs; nothing was changed. --force does it all the same"
    )
    assert played.refusal("drain", *both) == refusal
    assert played.refusal("drain", "--dry-run", *both) == refusal
    assert played.document() == before

    # All nodes but one run elsewhere now.
    said = played.said("exclude", "127.0.0.2", "--for", "1h")
    assert re.fullmatch(RAN, said[-1])
    assert "would stop without 127.0.0.3[" in played.refusal("exclude", "127.0.0.3")
    assert "would stop without 127.0.0.3[" in played.refusal("exclude", "--dry-run", "127.0.0.3")
    assert "would stop without 127.0.0.3[" in played.refusal("exclude", "--all-runs", "127.0.0.3")
    assert "127.0.0.3" not in played.rdzv("excluded").stdout
    would = played.said("exclude", "127.0.0.3", "--dry-run", "--force")[1]
    few = "1 node is left, 1 fewer than a round needs: no round forms until others come"
    label = played.label(2)
    assert would == f"exclusion of {label} from run '{played.run_id}' would be ordered; {few}"
    assert "127.0.0.3" not in played.rdzv("excluded").stdout

    said = played.said("drain", label, "--force")
    assert said == [f"drain of {label} from run '{played.run_id}' ordered; {few}"]
    # And so it does: the two that live wait.
    agents.until(lambda: played.rdzv("status").exit_code == 3, 30)


def test_an_order_waits_for_its_effect_and_tells_it(played: Played) -> None:
    played.begin(3, (2, 4), grow="never", **PATIENT)
    said = played.said("restart", "--why", "new data")
    assert said[0] == f"restart of run '{played.run_id}' ordered; round 1 forms with 3 nodes"
    assert re.fullmatch(RAN, said[1])
    document = played.document()
    assert (document.round, document.phase, document.size) == (1, Phase.RUNNING, 3)

    late = played.add((2, 4), grow="never", **PATIENT)
    agents.until(lambda: " wait" in played.said("status")[0], 30)
    assert late.world is None
    (row,) = map(json.loads, played.said("resize", "--json"))
    assert (row["schema"], row["order"], row["run"]) == (1, "resize", played.run_id)
    assert row["nodes"] == [played.label(3)]
    assert (row["round"], row["world"], row["seconds"] > 0) == (2, 4, True)
    assert re.fullmatch(RAN, row["said"][1])
    assert played.said("resize") == [f"no node waits for a place in run '{played.run_id}'"]

    rank = next(agent for agent in played.agents if agent.world and agent.world[0] == 2)
    drained = played.agents.index(rank)
    (row,) = map(json.loads, played.said("drain", "--rank", "2", "--json"))
    assert row["nodes"] == [played.label(drained)]
    assert (row["left"], row["size"], row["round"], row["world"]) == (3, 3, 3, 3)
    agents.until(lambda: isinstance(rank.error, SystemExit), 30)
    ended = f"run '{played.run_id}' has no node of rank 7 now: running round 3, 3 of 2..4 nodes"
    assert played.refusal("drain", "--rank", "7") == ended
    assert played.rdzv("drain").exit_code == 2

    # Nobody but one that waits is disturbed for one that waits.
    played.add((2, 4), grow="never", **PATIENT)
    agents.until(lambda: " wait" in played.said("status")[0], 30)
    spare = played.label(4)
    said = played.said("drain", "127.0.0.5")
    assert said[0].endswith(" ordered; round 3 is not ended for that")
    assert re.fullmatch(rf"{re.escape(spare)} ended after \d+\.\d s", said[1])
    assert played.document().round == 3


def test_the_nodes_of_a_large_round_are_known(played: Played, store: RunningStore) -> None:
    """They stand apart from the document, of which an order reads no more."""
    records = {f"n{rank:03}": record(rank, f"10.0.0.{rank}") for rank in range(200)}
    whole = RoundDocument(
        incarnation="it", round=4, phase=Phase.RUNNING, leader="n000", min_nodes=200, max_nodes=300,
        participants=tuple(records), master="10.0.0.1:29500",
    )  # fmt: skip
    document, shards = apart(whole, INLINE)
    assert not document.participants
    with closing(store.open(played.run_id)) as client:
        client.put_many({key: it for of in shards.values() for key, it in of.items()})
        client.put_many({NODES_PREFIX + node: it.encode() for node, it in records.items()})
        client.put(STATE_KEY, document.encode())
        beating = Event()

        def beat() -> None:
            beats = 1
            while not beating.wait(0.2):
                beats += 1
                moved = record(0, "10.0.0.0", beat=beats)
                client.put(f"{NODES_PREFIX}n000", moved.encode())

        beats = Background(beat)
        try:
            (would,) = played.said("drain", "--rank", "150", "--dry-run", "--force")
            refused = played.refusal("drain", "--rank", "150", "--dry-run")
            played.said("exclude", "10.0.0.9", "--no-wait", "--force")
        finally:
            beating.set()
            beats.result(10)
    few = "199 nodes are left, 1 fewer than a round needs: no round forms until others come"
    name = records["n150"].label
    assert would == f"drain of {name} from run '{played.run_id}' would be ordered; {few}"
    assert refused.startswith(f"run '{played.run_id}' would stop without {name}: 199 nodes")
    assert [it.host for it in played.document().excluded] == ["10.0.0.9"]


def test_an_order_that_is_not_awaited_says_what_is_to_come(played: Played) -> None:
    played.begin(2, (2, 2))
    restart = f"restart of run '{played.run_id}' ordered; round 1 forms with 2 nodes"
    ordered, unseen = played.said("restart", "--no-wait")
    assert ordered == restart
    assert re.fullmatch(
        f"whether it is carried out was not waited for; the last heartbeat of run '{played.run_id}'"
        r" came at [0-9:]{8} UTC",
        unseen,
    )
    agents.until(lambda: all(len(agent.rounds) == 2 for agent in played.agents), 30)

    # An agent that does not come: a thread that stands still.
    played.agents[0]._quit.set()
    played.agents[0]._thread.join(10)
    late = played.rdzv("restart", "--timeout", "5")
    assert late.exit_code == 7
    assert late.stdout.splitlines() == [restart.replace("round 1", "round 2")]
    assert re.fullmatch(
        rf"rdzv: run '{played.run_id}': the order stands, and is not carried out after 5 s: "
        r"waiting for 1 node: 1 of 2 is here.*\n",
        late.stderr,
    )
