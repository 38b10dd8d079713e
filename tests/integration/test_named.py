"""Commands about jobs on several hosts, by the names and by the addresses of these.

Run as a program, in namespaces of its own, it plays one scenario, and prints what the commands said
as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.testing.proxy import Proxy
from tests import Measure
from tests.integration.browser import browser
from tests.integration.hosts import (
    ATTEMPTS,
    INTERVAL,
    PATIENCE,
    PORT,
    PROGRAM,
    Host,
    HostsJob,
    Scene,
    play_on_hosts,
)
from tests.integration.stores import RunningStore
from tests.integration.test_dashboard import dashboard, text
from tests.integration.test_exporter import exporter, scrape

HOSTS = ("node1", "node2", "node3")
# No shorter than a lease.
CLOSED_TTL = 3
_KNOWN = "127.0.0.1 localhost\n" + "".join(
    f"10.1.0.{number} {name}\n" for number, name in enumerate(HOSTS, start=1)
)


class Named(Scene):
    """A job on three hosts, and the commands about it.

    The endpoint names the hosts of a quorum, or, with ``by`` "addresses", has their addresses.
    Any other ``by`` takes the place of node3 there.
    """

    def __init__(self, stack: ExitStack, folder: Path, store: str, by: str) -> None:
        super().__init__(stack, folder)
        (folder / "hosts").write_text(_KNOWN)
        subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)
        self.hosts: list[Host] = self.network(*HOSTS, hosts_file=_KNOWN)
        if store == "quorum":
            self.endpoint = ",".join(
                f"10.1.0.{it.number}" if by == "addresses" else it.name for it in self.hosts
            )
            if by not in ("names", "addresses"):
                self.endpoint = f"node1,node2,{by}"
        else:
            proxy = self.enter(Proxy(self.server(), (f"10.1.0.{PROGRAM}", PORT)))
            self.endpoint = "{}:{}".format(*proxy.address)
        beats = f"keep_alive_interval={INTERVAL},keep_alive_max_attempt={ATTEMPTS}"
        conf = f"closed_ttl={CLOSED_TTL},{beats}"
        self.where = ("-b", store, "-e", self.endpoint, "-c", conf)
        self.fleet: HostsJob = super().job(store, self.endpoint, nodes="1:3", closed_ttl=CLOSED_TTL)

    def begin(self, hosts: int = 3) -> None:
        self.fleet.start_on(self.hosts[:hosts])
        self.fleet.await_begun(hosts)

    def label(self, name: str) -> str:
        return f"{name}[{self.fleet.agents[name].pid}]"

    def rdzv(self, command: str, *arguments: str, run: str = "job") -> tuple[int, str]:
        """The exit status and the output of a command."""
        of_run = ("-i", run) if run else ()
        done = CliRunner().invoke(app, [command, *of_run, *self.where, *arguments])
        if isinstance(done.exception, SystemExit | None):
            return done.exit_code, done.output
        return 1, f"rdzv: {done.exception}"

    def await_said(self, words: str, command: str, *arguments: str, run: str = "job") -> str:
        """The output of a command, once it has these words."""

        def found() -> str | None:
            said = self.rdzv(command, *arguments, run=run)[1]
            return said if words in said else None

        return self.fleet.await_that(found, f"'{words}' of rdzv {command}", PATIENCE)


def orders(scene: Named) -> dict[str, Any]:
    """A host is named by its name, its address, or a node on it."""
    scene.begin()
    seen: dict[str, Any] = {
        "labels": [scene.label(name) for name in HOSTS],
        "status": scene.rdzv("status"),
        "json": scene.rdzv("status", "--json"),
        "unknown drain": scene.rdzv("drain", "node9"),
        "unknown exclude": scene.rdzv("exclude", "node9"),
        "later": scene.rdzv("exclude", "node9", "--later", "--why", "ECC errors"),
        "excluded": scene.rdzv("excluded"),
        "accuse": [scene.rdzv("accuse", it) for it in ("node2", "10.1.0.2", scene.label("node2"))],
    }
    for told, back in (("Node3", "10.1.0.3"), ("10.1.0.3", "node3")):
        said = scene.rdzv("exclude", told, "--why", "ECC errors")
        seen.setdefault("exclude", []).append(said)
        scene.await_said("2 running", "status")
        seen.setdefault("while", []).append((0, scene.await_said("1 excluded", "status")))
        seen.setdefault("include", []).append(scene.rdzv("include", back))
        scene.await_said("3 running", "status")
    seen["drain"] = scene.rdzv("drain", scene.label("node3"), "--why", "a new disk")
    seen["history"] = scene.await_said("a new disk", "history", "--json", "-n", "1")
    scene.fleet.finish()
    return seen | {"statuses": scene.fleet.ends(), "logs": scene.fleet.logs()}


def closed(scene: Named) -> dict[str, Any]:
    """Nodes train on in a closed run for longer than its id would be taken without them."""
    scene.begin(2)
    seen: dict[str, Any] = {
        "labels": [scene.label(name) for name in HOSTS[:2]],
        "live": scene.rdzv("clean"),
        "close": scene.rdzv("close"),
    }
    ends = time.monotonic() + 3 * CLOSED_TTL
    scene.fleet.await_that(lambda: time.monotonic() > ends, "some time", PATIENCE)
    seen["status"] = scene.rdzv("status")
    seen["again"] = scene.rdzv("close")
    seen["clean"] = scene.rdzv("clean")
    scene.fleet.start_on(scene.hosts[2:])
    seen["newcomer"] = scene.fleet.await_line("node3", "is closed (")
    scene.fleet.finish()
    seen["statuses"] = scene.fleet.ends()
    if scene.where[1] != "quorum":  # A quorum's members end with the nodes.
        seen["over"] = scene.await_said('"last":', "status", "--json")
    return seen


def of_a_quorum(scene: Named) -> dict[str, Any]:
    """A run that nobody knows, a list of runs, a host that is down, and a drained member."""
    before = scene.rdzv("list", run="")
    scene.begin()
    seen: dict[str, Any] = {
        "before": before,
        "labels": [scene.label(name) for name in HOSTS],
        # The leader adds a run to the list a second after the round runs.
        "list": scene.await_said("running", "list", run=""),
        "unknown": [scene.rdzv(it, run="jobX") for it in ("status", "history", "clean", "close")],
        "drain": scene.rdzv("drain", "node3"),
        "check": (0, scene.await_said("3 of 3 members", "check")),
    }
    scene.hosts[2].cut()
    scene.await_said("2 of 3 members", "status")
    seen["took, s"] = []
    for _ in range(10):
        began = time.monotonic()
        seen["down"] = scene.rdzv("status")
        seen["took, s"].append(time.monotonic() - began)
    seen["check down"] = scene.rdzv("check")
    seen["line"] = scene.fleet.await_line("node1", "members of the store are up")
    scene.hosts[2].mend()
    scene.fleet.finish()
    return seen | {"statuses": scene.fleet.ends()}


def misspelt(scene: Named) -> dict[str, Any]:
    """The third host of the endpoint has no name that exists, or nobody is at its address."""
    scene.begin(2)
    seen: dict[str, Any] = {
        "line": scene.fleet.await_line("node1", "2 of 3 members of the store are up"),
        "status": scene.await_said("2 of 3 members", "status"),
        "check": scene.rdzv("check")[1],
    }
    one_run = RunningStore(
        name="quorum", backend="quorum", endpoint=scene.endpoint, config={"cluster": "job"}
    )
    up = ("rdzv_store_members_up", "job")
    with exporter(one_run) as scraped, dashboard(one_run) as page, browser() as chrome:
        seen["metric"] = scene.fleet.await_that(
            lambda: scrape(scraped).get(up) == 2, "the metric", PATIENCE
        )
        chrome.get(page)
        seen["page"] = scene.fleet.await_that(
            lambda: text(chrome, "#degraded"), "the page's line", PATIENCE
        )
        # The page also shows the state of the store at each look; the run's line stays.
        shown = text(chrome, "#live")
        scene.fleet.await_that(lambda: text(chrome, "#live") != shown, "another look", PATIENCE)
        seen["page later"] = text(chrome, "#degraded")
    scene.fleet.finish()
    return seen | {"statuses": scene.fleet.ends()}


SCENARIOS = {it.__name__: it for it in (orders, closed, of_a_quorum, misspelt)}


every_way = pytest.mark.parametrize(
    ("store", "by"),
    [
        pytest.param("quorum", "names", marks=pytest.mark.full),
        ("redis", "names"),
        ("quorum", "addresses"),
    ],
)


def play(scenario: str, store: str, by: str) -> Any:
    return play_on_hosts("tests.integration.test_named", scenario, store, by)


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
def test_commands_tell_what_the_hosts_of_a_quorum_know(by: str, record_property: Measure) -> None:
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
    assert seen["metric"]
    assert seen["page"] == seen["page later"] == degraded
    assert seen["statuses"] == [0, 0]


def main() -> None:
    name, store, by = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        print(json.dumps(SCENARIOS[name](Named(stack, Path(folder), store, by))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
