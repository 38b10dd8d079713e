"""Orders from people, given with the rdzv command to jobs of real torchrun agents."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from tests import Measure
from tests.integration.stores import RunningStore, every_store
from tests.integration.torchrun import Begin, Run

pytestmark = pytest.mark.timeout(240)


def rdzv(run: Run, store: RunningStore, command: str, *arguments: str) -> str:
    """The output of a command about the run."""
    where = ["-b", store.backend, "-e", store.endpoint, "-i", run.run_id]
    if store.config:
        where += ["-c", ",".join(f"{name}={value}" for name, value in store.config.items())]
    done = subprocess.run(
        [sys.executable, "-m", "rdzv_plugins.cli", command, *where, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    assert said.startswith(f"drained {label} from run '{run.run_id}': the others go on")
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
    run = begin(nodes="2:2", max_restarts=0, history_ttl=600)
    before = run.begin("ab")
    number = run.round()
    said = rdzv(run, store, "restart", "--why", "new data")
    assert said == f"restarted run '{run.run_id}': round {number + 1} begins\n"
    run.await_round(number)
    run.await_world("ab", after=before.last_step_at + 0.5, by_rank=True)
    assert run.round() == number + 1
    reason = "restarted by the command rdzv restart: new data"
    assert last_cause(run, store)["reason"] == reason


@every_store
def test_an_excluded_host_waits_until_it_is_included(
    begin: Begin, store: RunningStore, record_property: Measure
) -> None:
    run = begin(nodes="1:3", history_ttl=600)
    run.begin("abc")
    said = rdzv(run, store, "exclude", "127.0.0.2", "--for", "1h", "--why", "ECC errors")
    assert "127.0.0.2 excluded until " in said
    assert f"run '{run.run_id}' goes on without 127.0.0.2[{run.agents['b'].pid}]" in said
    without = run.await_world("ac", by_rank=True)
    assert "excluded 127.0.0.2[" in str(last_cause(run, store)["reason"])
    status = rdzv(run, store, "status")
    # The workers of the others may have failed when those of the excluded node ended.
    assert re.search(
        r": running round \d+, 2 of 1\.\.3 nodes; 127\.0\.0\.2 excluded until ", status
    )
    assert "ECC errors" in rdzv(run, store, "excluded")
    log = run.agents["b"].log
    run.await_that(lambda: "; this node waits meanwhile" in log.read_text(), "its warning", 10)
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
    said = rdzv(run, store, "exclude", "127.0.0.1", "--for", "20s")
    assert "127.0.0.1 excluded until " in said
    run.start_at("a")
    run.start_at("b")
    first = run.await_world("b")
    assert "127.0.0.1 excluded until " in run.agents["a"].log.read_text()
    run.await_world("ab", after=first.last_step_at, by_rank=True)


# Steps of the demo's training are some 50 ms apart.
_SAME_TRAINING = 0.5
_FLAPS_EVERY, _WATCHED = 10.0, 90.0


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("store", ["redis", "etcd-v3"], indirect=True)
@pytest.mark.parametrize("quarantine_after", [0, 3])
def test_a_host_that_flaps_does_not_keep_the_others_from_training(
    store: RunningStore, begin: Begin, quarantine_after: int, record_property: Measure
) -> None:
    """Killed every ten seconds; the first three times all go on at once without it.

    The first quarantine, a tenth of the window, is longer than the watch.
    """
    options = {"quarantine_after": quarantine_after, "quarantine_window": 1200}
    run = begin(nodes="2:3", max_restarts=100, **options)
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
    if quarantine_after:
        assert "127.0.0.3 quarantined until " in rdzv(run, store, "status")
        assert log.count("forms: lost 127.0.0.3") <= 3
        assert share > 0.5
