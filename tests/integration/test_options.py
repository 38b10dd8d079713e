"""What torchrun is told and the store's handler cannot obey is named in the agent's log."""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests import Measure
from tests.fleet.agents import RDZV_RUN, TORCHRUN
from tests.integration import forked
from tests.integration.stores import RunningStore


@pytest.mark.parametrize("launcher", [TORCHRUN, RDZV_RUN], ids=["torchrun", "rdzv run"])
def test_torchs_timeout_is_obeyed_and_the_rest_is_named(
    store: RunningStore, run_id: str, launcher: list[str], record_property: Measure
) -> None:
    command = [
        sys.executable, *launcher, "--rdzv-backend=redis", f"--rdzv-endpoint={store.endpoint}",
        f"--rdzv-id={run_id}", "--rdzv-conf=rank=3,timeout=3,is_host=1,rank=4", "--nnodes=2",
        "--node-rank=1", "--master-port=29400", "--local-addr=127.0.0.1", "none.py",
    ]  # fmt: skip
    environ = {**os.environ, "RDZV_PLUGINS_JOIN_TIMEOT": "5", "RDZV_PLUGINS_SASL": "true"}
    began = time.monotonic()
    ended = forked.run(command, environ)
    record_property("ended after, s", round(time.monotonic() - began, 1))
    assert ended.returncode == 1
    for line in (
        "1 of 2 nodes came within 3 s, and no round formed: ",
        "option 'is_host' of torch's own backends has no effect: no node hosts the store",
        "option 'rank' has no effect: rank_order is not hint",
        "option 'rank' stands in --rdzv-conf more than once: the last one counts",
        "--node-rank=1 has no effect: --rdzv-conf rank_order=hint,rank=1 asks for that place",
        "--master-port=29400 has no effect: rank 0 opens another port in each round",
        "$RDZV_PLUGINS_JOIN_TIMEOT is no option and has no effect; did you mean $RDZV_PLUGINS_JOIN",
        "$RDZV_PLUGINS_SASL is an option of zookeeper, and has no effect on redis",
    ):
        assert line in ended.stderr, ended.stderr
