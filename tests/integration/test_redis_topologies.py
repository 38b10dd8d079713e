"""A round on Redis Cluster and on Redis Sentinel, while another server takes over."""

from __future__ import annotations

import secrets
import socket
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.testing.harness import SLACK
from tests import Measure
from tests.integration import topologies
from tests.integration.agents import QUICK, Run, Watch, await_beats, one_world, until
from tests.integration.stores import RunningStore
from tests.integration.topologies import Topology
from tests.servers.process import HOST, free_ports

LEASE = 3 * float(QUICK["keep_alive_interval"])

# Seconds for the servers to agree on another primary, on a machine that has other things to do.
PATIENCE = 30.0


@pytest.fixture(
    params=[pytest.param("open sentinel", marks=pytest.mark.soak), "sentinel", "cluster"]
)
def topology(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Topology]:
    if request.param == "cluster":
        with topologies.cluster(tmp_path) as topology:
            yield topology
        return
    # The servers' password; the Sentinel has none, and refuses to be given one.
    password = secrets.token_hex(8) if request.param == "sentinel" else None
    if password:
        monkeypatch.setenv("RDZV_PLUGINS_PASSWORD", password)
    with topologies.sentinel(tmp_path, password) as topology:
        yield topology


@pytest.fixture
def run(topology: Topology, run_id: str) -> Iterator[Run]:
    with Run(store_of(topology), run_id) as run:
        yield run


def store_of(topology: Topology, **config: str) -> RunningStore:
    return RunningStore(
        name="redis",
        backend="redis",
        endpoint=topology.endpoint,
        config={**topology.config, **config},
    )


@pytest.mark.parametrize("how", ["killed", pytest.param("handed over", marks=pytest.mark.soak)])
def test_another_server_takes_over(
    topology: Topology, run: Run, run_id: str, how: str, record_property: Measure
) -> None:
    agents = [run.start((2, 3)) for _ in range(2)]
    until(one_world(agents), 30)
    primary = topology.primary(run_id)
    with Watch(agents) as watch:
        began = time.monotonic()
        primary.kill() if how == "killed" else topology.hand_over(run_id)
        until(lambda: topology.primary(run_id) is not primary, PATIENCE)
        record_property("new primary, s", round(time.monotonic() - began, 2))
        await_beats(store_of(topology), run_id, len(agents), PATIENCE)
        record_property("beating again, s", round(time.monotonic() - began, 2))
        # Whoever judged by what could not be read would have by then.
        time.sleep(2 * LEASE)
    assert watch.asked > 100
    assert watch.seen == []
    assert [len(agent.rounds) for agent in agents] == [1, 1]
    late = time.monotonic()
    agents.append(run.start((2, 3)))
    until(one_world(agents), 30)
    record_property("late node let in, s", round(time.monotonic() - late, 2))


def test_nodes_join_while_there_is_no_primary(
    topology: Topology, run: Run, run_id: str, record_property: Measure
) -> None:
    agents = [run.start((3, 3)) for _ in range(2)]
    until(lambda: all(agent.handler._node.document is not None for agent in agents), 30)
    began = time.monotonic()
    topology.primary(run_id).kill()
    agents.append(run.start((3, 3), heartbeat_timeout=str(PATIENCE)))
    record_property("last node connected, s", round(time.monotonic() - began, 2))
    until(one_world(agents), PATIENCE)
    record_property("round of 3 complete, s", round(time.monotonic() - began, 2))
    assert all(agent.error is None and len(agent.rounds) == 1 for agent in agents)


def test_all_members_of_a_cluster_have_other_addresses(
    tmp_path: Path, run_id: str, record_property: Measure
) -> None:
    """As pods that were all made anew: only the name in the endpoint leads to them."""
    with topologies.moving_cluster(tmp_path) as moving:
        store = RunningStore(
            name="redis", backend="redis", endpoint=moving.endpoint, config={"cluster": "true"}
        )
        with Run(store, run_id) as run:
            agents = [run.start((2, 3), heartbeat_timeout="2") for _ in range(2)]
            until(one_world(agents), 30)
            with Watch(agents) as watch:
                moving.move()
                began = time.monotonic()
                await_beats(store, run_id, len(agents), PATIENCE)
                record_property("beating again, s", round(time.monotonic() - began, 2))
            assert watch.seen == []
            agents.append(run.start((2, 3)))
            until(one_world(agents), 30)


@pytest.mark.parametrize("option", ["sentinel", "cluster"])
def test_nobody_answers(option: str, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_PLUGINS_PASSWORD", "hunter2")
    endpoint = f"{HOST}:{free_ports(1)[0]}"
    config = {option: "true" if option == "cluster" else "training"}
    store = RunningStore(name="redis", backend="redis", endpoint=endpoint, config=config)
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError) as refusal:
        store.open(run_id, request_timeout=1)
    assert time.monotonic() - began < 1 + SLACK
    assert_clear(refusal.value, endpoint)


def test_host_that_says_nothing_leaves_time_for_the_others(topology: Topology, run_id: str) -> None:
    with socket.create_server((HOST, 0)) as silent:
        endpoint = f"{HOST}:{silent.getsockname()[1]},{topology.endpoint}"
        store = replace(store_of(topology), endpoint=endpoint)
        began = time.monotonic()
        client = store.open(run_id, request_timeout=8)
        assert client.add("key", 1) == 1
        assert time.monotonic() - began < 8
        client.close()


def test_wrong_password_of_the_servers(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with topologies.sentinel(tmp_path, secrets.token_hex(8)) as topology:
        monkeypatch.setenv("RDZV_PLUGINS_PASSWORD", "hunter2")
        began = time.monotonic()
        with pytest.raises(RendezvousConnectionError) as refusal:
            store_of(topology).open(run_id)
    assert time.monotonic() - began < 1 + SLACK
    assert "$RDZV_PLUGINS_PASSWORD" in str(refusal.value)
    assert_clear(refusal.value, topology.endpoint)


def test_another_name_for_the_primary(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_PLUGINS_PASSWORD", "hunter2")
    with (
        topologies.sentinel(tmp_path) as topology,
        pytest.raises(RendezvousConnectionError, match="sentinel=<name>") as refusal,
    ):
        store_of(topology, sentinel="inference").open(run_id, request_timeout=1)
    assert_clear(refusal.value, topology.endpoint)
    assert "inference" in str(refusal.value)


def assert_clear(error: Exception, endpoint: str) -> None:
    """A line that names the endpoint, and no more than a line; no secret in its causes either."""
    text = str(error)
    assert endpoint in text
    assert "\n" not in text
    assert len(text) < 300
    shown = "".join(traceback.format_exception(error))
    # Not shown by pytest in its turn.
    assert shown.find("hunter2") < 0
