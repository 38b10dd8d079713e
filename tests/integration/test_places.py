"""Real torchrun agents on a real redis: whole units, and ranks that follow the racks."""

from __future__ import annotations

import json

import pytest

from rdzv_plugins.process.worker import CurrentRound
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord, Phase
from tests import Measure, replace
from tests.fleet.agents import Agent
from tests.integration.jobs import Begin, Pause, Run


def known(run: Run, name: str) -> CurrentRound:
    """What the last worker of this agent knew of its round."""
    return CurrentRound(**json.loads((run.folder / f"{name}.round").read_text()))


def await_spare(run: Run, agent: Agent) -> None:
    """Wait until it says that it waits as a spare."""
    run.await_that(lambda: "as a spare" in agent.log.read_text(), "word of the spare", 30)


def test_half_a_unit_disturbs_nobody(begin: Begin, record_property: Measure) -> None:
    run = begin(nodes="2:6", node_unit=2)
    world = run.begin("ab")
    number = run.round()
    # The agent that started it, and the memory that it shares with that, are a worker's own.
    mine = known(run, "a")
    assert mine == replace(known(run, "b"), agent=mine.agent, steps_file=mine.steps_file)
    assert (known(run, "a").round, known(run, "a").domain) == (number, None)
    third = run.start_at("c")
    await_spare(run, third)
    assert "lets newcomers in later (node_unit=2): 2 of 6 nodes" in third.log.read_text()
    run.await_step(world, world.last_step + 60)
    assert run.worlds() == [world], "one newcomer started another round"
    assert run.round() == number
    started = run.start_at("d").started
    larger = run.await_world("abcd", after=started, by_rank=True)
    record_property("trained, s", round(Pause.of(larger, started).trained, 2))
    now, document = known(run, "c"), run.document()
    assert document is not None
    assert (now.round, now.world_id, now.spares) == (number + 1, document.world_id, 0)
    assert now.cause == document.reason
    assert now.cause.endswith("joined")
    # One of four is lost: a whole unit goes on, and the other node of the broken unit waits.
    killed = run.agents["d"].kill()
    world = run.await_world("ab", after=killed, by_rank=True)
    assert known(run, "a").spares == 1
    assert "left over from whole units or segments" in known(run, "a").cause


def test_a_replacement_in_its_rack_takes_the_rank(begin: Begin) -> None:
    run = begin(nodes="2:4", rank_order="topology", last_call_timeout=3)
    racks = {"a": "rack2", "b": "rack10", "c": "rack2", "d": "rack10"}
    for name, rack in racks.items():
        run.start_at(name, domain=rack)
    run.await_world("acbd", by_rank=True)
    assert {known(run, name).domain for name in "ac"} == {"rack2"}
    # The names of both spares come before those of the others; one is of the other rack.
    for place, name, rack in ((5, "x", "rack10"), (6, "y", "rack2")):
        await_spare(run, run.start(name, f"127.0.0.{place}", {"domain": rack}))
    killed = run.agents["a"].kill()
    run.await_world("ycbd", after=killed, by_rank=True)
    assert known(run, "y").spares == 1


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("store", ["redis", "etcd-v3"], indirect=True)
def test_sixteen_agents_of_four_racks(begin: Begin) -> None:
    """Their workers import no torch, for the cores are few."""
    run = begin(
        nodes="8:16",
        rank_order="topology",
        last_call_timeout=60,
        keep_alive_interval=3,
        script=("--module", "tests.integration.programs.worker"),
    )
    for number in range(16):
        run.start(f"n{number}", f"127.0.1.{number + 1}", {"domain": f"s/r{number % 4}"})
    before = ranks(run, 0)
    assert all(before[f"n{number}"] // 4 == number % 4 for number in range(16))
    for victim in ("n5", "n0"):
        number = run.round()
        run.agents[victim].kill()
        rack = int(victim[1:]) % 4
        run.start(f"{victim}-again", f"127.0.2.{rack + 1}", {"domain": f"s/r{rack}"})
        after = ranks(run, number + 1)
        assert after.pop(f"{victim}-again") == before.pop(victim)
        assert after == before
        before = ranks(run, number + 1)


def ranks(run: Run, number: int) -> dict[str, int]:
    """The agents' names and ranks in this round, once it runs."""

    def found() -> dict[str, int] | None:
        document = run.document()
        if document is None or (document.round, document.phase) != (number, Phase.RUNNING):
            return None
        names = {agent.pid: name for name, agent in run.agents.items()}
        entries = run.client.list(NODES_PREFIX)
        return {
            names[NodeRecord.decode(entries[NODES_PREFIX + node].value).pid]: rank
            for rank, node in enumerate(document.participants)
        }

    return run.await_that(found, f"round {number}", 240)
