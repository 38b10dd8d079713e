"""Commands about jobs on several hosts, by the names and by the addresses of these."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest

from tests import Measure
from tests.integration import hosts
from tests.integration.stores import absent

pytestmark = pytest.mark.timeout(240)

every_way = pytest.mark.parametrize(
    ("store", "by"),
    [
        pytest.param("quorum", "names", marks=pytest.mark.full),
        ("redis", "names"),
        ("quorum", "addresses"),
    ],
)


def play(scenario: str, store: str, by: str) -> Any:
    if shutil.which("ip") is None:
        absent("ip is not installed")
    return hosts.play("tests.integration.named", scenario, store, by, seconds=200)


@every_way
def test_a_host_goes_by_its_name_and_by_its_address(store: str, by: str) -> None:
    seen = play("orders", store, by)
    *_, label = labels = seen["labels"]
    assert all(it in seen["status"][1] for it in labels)
    nodes = json.loads(seen["json"][1])["nodes"]
    assert [(it["name"], it["host"], it["address"]) for it in nodes] == [
        (label, f"node{n}", f"10.1.0.{n}") for n, label in enumerate(labels, start=1)
    ]
    has = f"it has {', '.join(labels)}"
    assert seen["unknown drain"] == [
        1, f"rdzv: run 'job' has no node 'node9': nobody was drained; {has}"
    ]  # fmt: skip
    status, said = seen["unknown exclude"]
    assert (status, said.partition(": ")[2].partition("; ")[0]) == (
        1, "run 'job' has no node 'node9': nobody was excluded"
    )  # fmt: skip
    assert seen["later"][0] == 0
    assert "node9" in seen["excluded"][1]
    for status, said in seen["accuse"]:
        assert (status, f"{labels[1]} lives" in said) == (0, True)
    for said, shown, back in zip(seen["exclude"], seen["while"], seen["include"], strict=True):
        assert said[0] == back[0] == 0
        assert f"exclusion of {label} from run 'job' ordered; round " in said[1]
        assert "2 running" in shown[1]
        assert "1 excluded" in shown[1]
    lines = seen["drain"][1].splitlines()
    assert lines[0].startswith(f"drain of {label} from run 'job' ordered; round ")
    assert "runs with 2 nodes" in lines[-1]
    assert json.loads(seen["history"])["reason"].endswith(f"drained {label}: a new disk")
    told = [line for line in seen["logs"]["node3"] if "this node was drained (a new disk)" in line]
    assert len(told) == 1
    assert any(f"joined as {label}" in line for line in seen["logs"]["node3"])
    assert seen["statuses"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("store", "by"), [pytest.param("quorum", "names", marks=pytest.mark.full), ("redis", "names")]
)
def test_the_id_of_a_closed_run_is_taken_while_nodes_train_in_it(store: str, by: str) -> None:
    seen = play("closed", store, by)
    who = ", ".join(seen["labels"])
    lives = r"rdzv: run 'job' has live nodes: (node[12]\[\d+\](, )?)+; {}, or use --force"
    assert seen["live"][0] == seen["clean"][0] == 1
    assert re.fullmatch(lives.format("close it first"), seen["live"][1])
    assert re.fullmatch(lives.format("wait until their workers have ended"), seen["clean"][1])
    closed, said = seen["close"]
    assert closed == 0
    # Round 1 if the second agent came after the last call of the first.
    assert re.fullmatch(
        rf"closed run 'job': {re.escape(who)} train on in round [01], and no further round forms; "
        r"its id is free 3 s after their workers have ended\n",
        said,
    )
    status, said = seen["status"]
    taken = f"its id is taken while {who} train in its last round"
    assert (status, taken in said, "2 running" in said) == (6, True, True)
    assert taken in seen["again"][1]
    assert taken in seen["newcomer"]
    assert seen["statuses"] == [0, 0, 1]
    if store != "quorum":
        assert json.loads(seen["over"])["condition"] == "closed"


@pytest.mark.parametrize("by", ["names", pytest.param("addresses", marks=pytest.mark.full)])
def test_of_a_quorum_commands_tell_what_its_hosts_know(by: str, record_property: Measure) -> None:
    seen = play("of_a_quorum", "quorum", by)
    assert seen["before"] == [0, "there is no run under this prefix\n"]
    assert re.search(r"job .* running .* running round \d+, 3 of 1\.\.3 nodes", seen["list"])
    for status, said in seen["unknown"]:
        assert status == 1
        assert "no run 'jobX' is known at " in said
        assert "is the id right; there are job? " in said
    member = (
        "node3 runs a member of the store, which stays until the run ends: leave the host up until "
        "then, or the store has one member less"
    )
    assert member in seen["drain"][1].splitlines()
    degraded = "2 of 3 members of the store are up; it survives no further loss"
    assert degraded not in seen["check"][1]
    for shown in ("down", "check down"):
        assert degraded in seen[shown][1]
    assert degraded in seen["line"]
    record_property("status with a host down, s", [round(it, 2) for it in seen["took, s"]])
    assert seen["statuses"] == [0, 0, 0]


@pytest.mark.parametrize("third", ["node9", "10.1.0.9"], ids=["no such name", "nobody there"])
def test_a_misspelt_host_of_a_quorum_is_told(third: str) -> None:
    """In the log, by the commands, as a metric, and on the page in a browser."""
    seen = play("misspelt", "quorum", third)
    degraded = "2 of 3 members of the store are up; it survives no further loss"
    assert f"{degraded}; away: {third}" in seen["line"]
    assert seen["line"].startswith("W")
    assert degraded in seen["status"]
    assert degraded in seen["check"]
    assert f"'{third}'" in seen["check"]
    assert seen["metric"] == 2
    assert seen["page"] == seen["page later"] == degraded
    assert seen["statuses"] == [0, 0]
