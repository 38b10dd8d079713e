"""The network check with real torchrun agents: who cannot be reached is left out, and says why."""

from __future__ import annotations

import re
import shutil

import pytest

from tests import Measure
from tests.integration.cut_off import SWALLOWED
from tests.integration.hosts import play
from tests.integration.jobs import Begin
from tests.integration.stores import KINDS, RunningStore, absent, every_store

pytestmark = pytest.mark.timeout(240)

soak = pytest.mark.soak


@pytest.mark.parametrize(
    "name",
    [pytest.param(kind.name, marks=() if kind.name == "redis" else soak) for kind in KINDS],
)
def test_a_node_that_its_peers_cannot_reach_is_left_out(
    name: str, record_property: Measure
) -> None:
    if shutil.which("ip") is None:
        absent("ip is not installed")
    seen = play("tests.integration.cut_off", name)
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
