"""Servers that allow few connections: a node has its own before it joins, or does not join."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing

import pytest
import redis

from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.testing.threads import Background
from tests.integration.agents import Run, one_world, until
from tests.integration.stores import KINDS, Kind, RunningStore, started
from tests.servers.consul import Consul
from tests.servers.process import ServerProcess

FULL = {"redis": "raise its maxclients", "consul": "http_max_conns_per_client"}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consul allows three connections for each of two nodes, and one for the history."""
    command = Consul.command

    def limited(kind: Consul, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        line = command(kind, node, nodes)
        limits = node.directory / "limits.json"
        limits.write_text(json.dumps({"limits": {"http_max_conns_per_client": 7}}))
        return [*line, "-config-file", str(limits)]

    monkeypatch.setattr(Consul, "command", limited)


def limit(store: RunningStore) -> None:
    """The same of Redis."""
    if store.name == "redis":
        with closing(redis.Redis(*store.address)) as admin:
            admin.config_set("maxclients", 7)


@pytest.mark.parametrize("kind", [it for it in KINDS if it.name in FULL], ids=lambda it: it.name)
@pytest.mark.usefixtures("few")
def test_a_node_that_gets_too_few_connections_holds_nobody_up(kind: Kind, run_id: str) -> None:
    """Whatever ends the waits of the others, which then give up no connection."""
    with started(kind) as store:
        limit(store)
        with Run(store, run_id) as run:
            agents = [run.start((2, 3)) for _ in range(2)]
            until(one_world(agents), 30)
            third = Background(lambda: run.handler((2, 3), heartbeat_timeout="2"))
            while not third.done(0.005):
                for agent in agents:
                    agent.handler._driver._nudge()
            with pytest.raises(RendezvousConnectionError, match=FULL[kind.name]):
                third.result(0)
            assert [len(agent.rounds) for agent in agents] == [1, 1]
