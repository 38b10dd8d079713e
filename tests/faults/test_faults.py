"""The hour's plan is its seed's, its checks find what is planted, and three minutes of it pass."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import replace
from tests.faults import checks
from tests.faults.checks import End, Episode, Note
from tests.faults.page import DOCS, page
from tests.faults.table import FAULTS, STORES, draw
from tests.faults.training import START, after
from tests.faults.wire import EVERYBODY, Weather
from tests.integration.hosts import in_namespaces

NODES = ("10.1.0.1", "10.1.0.2", "10.1.0.3")


def world(token: int, at: float, start: int, steps: int, cause: str = "") -> list[Note]:
    """What three workers of a world note that takes a step a second, and saves each tenth."""
    parameters = [START]
    for step in range(1, start + steps + 1):
        parameters.append(after(parameters[-1], step))
    notes = []
    for rank, node in enumerate(NODES):
        blank = Note(
            event="begin", at=at, node=node, pid=100 * token + rank, agent=rank + 1, rank=rank,
            world_size=3, master="10.1.0.1:1", token=token, cause=cause,
        )  # fmt: skip
        notes += [blank, replace(blank, event="resume", at=at + 0.5, step=start)]
        for step in range(start + 1, start + steps + 1):
            taken = replace(
                blank, event="step", at=at + step - start, step=step, parameters=parameters[step]
            )
            notes.append(taken)
            if rank == 0 and step % 10 == 0:
                notes.append(replace(taken, event="saved", at=taken.at + 0.1, parameters=[]))
    return notes


GOOD = [*world(1, 0.0, 0, 25), *world(2, 30.0, 20, 25, "lost 10.1.0.2[7]: lease ran out")]


def test_all_is_well_with_what_is_well() -> None:
    assert [*checks.steps(GOOD), *checks.two_worlds(GOOD, [])] == []


def test_a_lost_checkpoint_is_found() -> None:
    lost = [*world(1, 0.0, 0, 25), *world(2, 30.0, 10, 5)]
    assert [*checks.steps(lost)] == ["world 2 resumed after step 10, but step 20 was saved"]


def test_a_step_that_is_left_out_or_taken_twice_is_found() -> None:
    out = [it for it in GOOD if (it.token, it.event, it.step, it.rank) != (2, "step", 22, 1)]
    assert [*checks.steps(out)] == ["10.1.0.2 took step 23 in place of step 22"]
    (twice,) = (it for it in GOOD if (it.event, it.step, it.rank) == ("step", 12, 1))
    found = [*checks.steps([*GOOD, replace(twice, at=twice.at + 0.5)])]
    assert found[0] == "10.1.0.2 took step 12 in place of step 13"


def test_a_step_without_a_rank_is_found() -> None:
    wrong = [
        replace(it, parameters=[1, 1, 1, 1]) if (it.event, it.step) == ("step", 24) else it
        for it in GOOD
    ]
    assert [*checks.steps(wrong)] == ["10.1.0.1 has wrong parameters after step 24"]


def test_an_older_checkpoint_over_a_newer_one_is_found() -> None:
    (saved,) = (it for it in GOOD if (it.event, it.step) == ("saved", 10))
    late = [*GOOD, replace(saved, at=41.0)]
    assert "the checkpoint of step 30 was replaced by that of step 10" in {*checks.steps(late)}


def episode(**changes: object) -> Episode:
    fields: dict[str, object] = {
        "fault": "a cut", "targets": (NODES[1],), "began": 26.0, "ended": 32.0, "over": 60.0,
        "names": (r"lost .*10\.1\.0\.2",),
    }  # fmt: skip
    return Episode(**{**fields, **changes})  # type: ignore[arg-type]


def test_two_worlds_are_found_and_are_allowed_while_a_cut_lasts() -> None:
    old = next(it for it in GOOD if it.token == 1 and it.rank == 1)
    notes = [*GOOD, replace(old, event="alive", at=50.0)]
    allowed = episode(ended=40.0, two_worlds=10.0)
    assert [*checks.two_worlds(notes, [allowed])] == []
    notes.append(replace(old, event="step", at=49.0, step=26, parameters=[]))
    assert [*checks.two_worlds(notes, [allowed])] == []
    lived, stepped = checks.two_worlds(notes, [episode(ended=40.0)])
    assert lived.startswith("workers of world 1 lived 19.0 s beside world 2")
    assert stepped == "world 1 took a step 18.0 s after world 2 did"


def test_a_wrong_cause_is_found() -> None:
    assert [*checks.causes(GOOD, [episode()])] == []
    assert len([*checks.causes(GOOD, [episode(restarts=False)])]) == 1
    told = "lost 10.1.0.2[7]: its process is gone, as 10.1.0.3[9] found"
    found = [*world(1, 0.0, 0, 25), *world(2, 30.0, 20, 25, told)]
    assert [*checks.causes(found, [episode()])] == []
    unnamed, blamed = checks.causes(
        GOOD, [episode(targets=(NODES[2],), names=(r"lost .*10\.1\.0\.3",))]
    )
    assert unnamed == "a cut of 10.1.0.3: not in lost 10.1.0.2[7]: lease ran out"
    assert blamed == "a cut of 10.1.0.3: blames 10.1.0.2: lost 10.1.0.2[7]: lease ran out"


def test_a_leak_is_found() -> None:
    first = {"processes": 9.0, "sockets of all agents": 4.0}
    kept = {"processes": 8.0, "sockets of all agents": 7.0}
    assert [*checks.leaks(first, kept, 3)] == []
    found = checks.leaks(first, {"processes": 10.0, "sockets of all agents": 8.0}, 3)
    assert [*found] == [
        "processes: 9 after the first minute, 10 at the end",
        "sockets of all agents: 4 after the first minute, 8 at the end",
    ]


def test_an_agent_that_ends_by_itself_is_found() -> None:
    end = End(at=30.0, address=NODES[1], status=1, line="no round within 300 s")
    assert [*checks.deaths([end], [episode(kills=True)])] == []
    for other in (episode(), episode(kills=True, targets=(NODES[0],))):
        (found,) = checks.deaths([end], [other])
        assert found == "the agent of 10.1.0.2 ended with 1 by itself: no round within 300 s"


def test_the_page_is_that_of_the_kept_reports() -> None:
    reports = json.loads((DOCS / "faults.json").read_text())
    assert (DOCS / "faults.md").read_text() == page(reports)


@pytest.mark.parametrize("store", STORES)
def test_a_seed_draws_the_same_faults_each_time_and_leaves_none_out(store: str) -> None:
    def first(seed: int) -> list[object]:
        return [*itertools.islice(draw(seed, store, [*NODES]), 3 * len(FAULTS))]

    assert first(1) == first(1)
    assert first(1) != first(2)
    here = {it.name for it in FAULTS if store in it.stores}
    once = itertools.islice(draw(3, store, [*NODES]), len(here))
    assert {it.fault.name for it in once} == here


def test_a_wire_cuts_in_one_direction() -> None:
    to_two = bytes(12) + b"\x08\x00" + bytes(12) + bytes([10, 1, 0, 1, 10, 1, 0, 2]) + bytes(80)
    from_two = bytes(12) + b"\x08\x00" + bytes(12) + bytes([10, 1, 0, 2, 10, 1, 0, 1]) + bytes(80)
    for sky, leaves, comes in (
        (Weather(), True, True),
        (Weather(mute=frozenset({NODES[1]})), False, True),
        (Weather(deaf=frozenset({NODES[1]})), True, False),
        (Weather(mute=EVERYBODY), False, True),
        (Weather(mute=frozenset({NODES[2]})), True, True),
        (Weather(largest=60), False, False),
        (Weather(loss=0.6), False, False),
        (Weather(loss=0.4), True, True),
    ):
        assert sky.passes(to_two, leaves=True, chance=0.5) is leaves
        assert sky.passes(from_two, leaves=False, chance=0.5) is comes


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [["--store=redis"], ["--store=redis", "--torch", "--neighbours=200"], ["--store=quorum"]],
    ids=["redis", "redis, torch, 200 neighbours", "quorum"],
)
def test_three_minutes_of_faults(options: list[str], tmp_path: Path) -> None:
    in_namespaces("tests.faults")  # Skips where there are none.
    command = [sys.executable, "-m", "tests.faults", "--minutes=3", "--agents=4"]
    subprocess.run([*command, *options, f"--folder={tmp_path}"], check=True)
