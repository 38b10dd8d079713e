"""The network check with real torchrun agents: who cannot be reached is left out, and says why.

Run as a program, in namespaces of its own, it starts a store, lets packets to one address vanish,
plays a job of three agents, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.protocol.documents import Status
from tests import Measure
from tests.integration.hosts import bring_up_loopback, play
from tests.integration.jobs import Begin, Job
from tests.integration.stores import KINDS, RunningStore, absent, every_store, kind_of, started

soak = pytest.mark.soak

# RFC 5737 reserves it. It sorts after loopback, so another node is rank 0.
SWALLOWED = "192.0.2.9"

INTERVAL, ATTEMPTS = 0.5, 4


def without_one(store: RunningStore, folder: Path) -> dict[str, Any]:
    """Three agents of which the others cannot reach one, though that one reaches the store."""
    job = Job(
        folder,
        store,
        nodes="2:3",
        keep_alive_interval=INTERVAL,
        keep_alive_max_attempt=ATTEMPTS,
        last_call_timeout=20,
        replacement_timeout=0,
        network_check="true",
    )
    with closing(job):
        for name in "ab":
            job.start_at(name)
        job.start("c", SWALLOWED)
        for name in "abc":
            job.await_record(name)
        came = time.monotonic()
        world = job.await_begun("ab")
        job.await_record("c", Status.SPARE)
        document = job.document()
        return {
            "seconds": max(world.began.values()) - came,
            "cause": document.reason if document is not None else None,
            "logs": {name: job.lines(name) for name in "abc"},
            "rounds": len({event.master for event in job.events}),
        }


@pytest.mark.parametrize(
    "name",
    [pytest.param(kind.name, marks=() if kind.name == "redis" else soak) for kind in KINDS],
)
def test_a_node_that_its_peers_cannot_reach_is_left_out(
    name: str, record_property: Measure
) -> None:
    if shutil.which("ip") is None:
        absent("ip is not installed")
    seen = play("tests.integration.test_network_check", name)
    record_property("the others run, s after all came", round(seen["seconds"], 2))
    assert seen["rounds"] == 1, "workers began in a round that could not last"
    assert re.search(rf"{SWALLOWED}\[\d+\] left \(network: no data passed between", seen["cause"])
    says = "this node is unfit, since others do not reach it, or it does not reach them: network: "
    assert any(says in line for line in seen["logs"]["c"]), seen["logs"]["c"]
    told = [line for name in "abc" for line in seen["logs"][name] if "does not run" in line]
    assert any(f"could not exchange data with {SWALLOWED}[" in line for line in told), told


@every_store
def test_the_usual_start_goes_on(
    begin: Begin, store: RunningStore, record_property: Measure
) -> None:
    run = begin(network_check="true")
    run.begin("ab")
    found = [record.dials for record in run.records()]
    took = [it.seconds for it in found if it is not None]
    assert len(took) == 2
    assert [it.why + it.unreached for it in found if it is not None] == ["", ""]
    record_property("exchange, s", max(took))
    document = run.document()
    assert document is not None
    assert (document.round, document.faults.links) == (0, ())


def main(name: str) -> None:
    bring_up_loopback()
    # It is no address of this network: what the loopback hands back is dropped, without a word.
    subprocess.run(["ip", "route", "add", SWALLOWED, "dev", "lo"], check=True)
    kind = kind_of(name)
    with started(kind) as store, tempfile.TemporaryDirectory() as folder:
        seen = without_one(store, Path(folder))
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
