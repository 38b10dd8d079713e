"""``rdzv run --warm`` on a real redis: a spare's standby trains in a lost node's place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from rdzv_plugins.process.standby import KILLED_FIRST
from rdzv_plugins.testing.harness import until
from tests.fleet.agents import RDZV_RUN, Agent
from tests.integration.jobs import TRAINS, Run
from tests.integration.stores import RunningStore, kind_of, running
from tests.integration.test_workers_ends import live


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    with running(kind_of("redis")) as started:
        yield started


def standbys(agent: Agent) -> list[int]:
    """The children of the agent that still wait, or import."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    scores = {pid: Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in children}
    return [int(pid) for pid, score in scores.items() if score == KILLED_FIRST]


def test_a_standby_of_a_spare_takes_over_or_ends_with_its_agent(
    store: RunningStore, tmp_path: Path
) -> None:
    launcher = (*RDZV_RUN, "--warm", "--preload=wave")
    with closing(Run(tmp_path, store, nodes="1:1", launcher=launcher, script=TRAINS)) as run:
        run.begin("a")
        found = {}
        for name in "bc":
            agent = run.start_at(name)
            (found[name],) = run.await_that(partial(standbys, agent), "a standby", 60)
        run.agents["b"].kill()
        assert until(lambda: not live(found["b"]), 20)
        killed = run.agents["a"].kill()
        world = run.await_world("c", after=killed)
        assert world.pids == {0: found["c"]}
        modules = Path(f"/proc/{found['c']}/maps").read_text()
        assert "libtorch" in modules
        assert "start cold" not in run.agents["c"].log.read_text()
        # The next one comes while this one trains.
        (fresh,) = run.await_that(lambda: standbys(run.agents["c"]), "a standby", 60)
        run.agents["c"].kill()
        assert until(lambda: not live(fresh), 20)
