"""What a steady run costs the store, counted by the server itself."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import redis
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.observe.history import list_runs
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.stores import open_client
from rdzv_plugins.stores.redis import DIGESTS
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import together
from tests import servers

INTERVAL = 1.0
NODES = 3
INTERVALS = 8
WRITES = ("put", "compare_and_set", "add")


class Monitor:
    """The commands that reach a Redis, by the name of the script or the command."""

    def __init__(self, port: int) -> None:
        self._client: Any = redis.Redis(port=port)
        self.seen: list[tuple[float, str, str]] = []
        self._names = {digest: name for name, digest in DIGESTS.items()}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(redis.ConnectionError), self._client.monitor() as monitor:
            for command in monitor.listen():
                # What a script does is shown too, marked as the script's.
                if command["client_type"] == "lua":
                    continue
                words = command["command"].split(" ")
                name = words[0].strip('"').upper()
                if name == "EVALSHA":
                    name = self._names[words[1].strip('"')]
                self.seen.append((time.monotonic(), name, command["command"]))

    def since(self, began: float) -> list[tuple[str, str]]:
        return [(name, text) for at, name, text in self.seen if at >= began]


def _phase(opened: Callable[[str], KeyValueClient]) -> Phase | None:
    listed = list_runs(opened).get("steady")
    return listed.phase if listed is not None else None


def _waits(names: list[str]) -> int:
    return sum(name in ("look", "XREAD") for name in names)


@pytest.fixture
def server() -> Iterator[servers.LocalServer]:
    with servers.start("redis") as server:
        yield server


def test_a_steady_node_writes_once_an_interval_and_asking_costs_nothing(
    server: servers.LocalServer,
) -> None:
    handlers = [
        create_handler(
            "redis",
            RendezvousParameters(
                "redis",
                server.endpoint,
                "steady",
                NODES,
                NODES,
                local_addr=f"a-rather-long-host-name-{index}.compute.internal.example",
                keep_alive_interval=str(INTERVAL),
            ),
        )
        for index in range(NODES)
    ]
    # The address is not one of this host: no TCPStore can be opened on it.
    for handler in handlers:
        handler._open_master = handler._driver._open_master = lambda world_id: "host:1"  # type: ignore[attr-defined]
    together([handler.next_rendezvous for handler in handlers])
    try:
        monitor = Monitor(int(server.endpoint.rpartition(":")[2]))
        # The window opens when the round's own writes are over, that to the list of runs too.
        opened = partial(open_client, "redis", server.endpoint)
        assert until(lambda: _phase(opened) is Phase.RUNNING, 30)
        time.sleep(INTERVAL)
        began = time.monotonic()
        asked = 0
        while time.monotonic() - began < INTERVALS * INTERVAL:
            assert all(handler.num_nodes_waiting() == 0 for handler in handlers)
            asked += NODES
            time.sleep(0.001)
        commands = monitor.since(began)
    finally:
        for handler in handlers:
            handler.shutdown()
    writes = [text for name, text in commands if name in WRITES]
    # One write a node and interval; the window's edges may each let one more in.
    assert 0 < len(writes) <= NODES * (INTERVALS + 1)
    records = [text for text in writes if "nodes/" in text]
    assert records == writes
    assert max(len(text[text.index('{"') :]) for text in records) <= 300
    reads = [name for name, _ in commands if name not in WRITES]
    # A look at the leader (the leader: a listing and the document). A wait goes on over beats.
    assert len(reads) - _waits(reads) <= (NODES + 1) * (INTERVALS + 1)
    assert _waits(reads) <= 2 * NODES
    assert asked > 10 * len(commands)


def test_writes_to_etcd_let_no_client_ask_again_for_the_end_of_its_run() -> None:
    with servers.start("etcd") as server:
        opened = partial(open_client, "etcd-v3", server.endpoint)
        with closing(opened("steady")) as client, closing(opened("another")) as other:
            client.expire(60)
            for _ in range(10):
                other.put("key", b"value")
                time.sleep(0.25)  # Then the client reads the mark again.
                client.get("key")
        with urllib.request.urlopen(f"http://{server.endpoint}/metrics") as answer:
            metrics = answer.read().decode()
    pattern = r'^grpc_server_started_total\{grpc_method="LeaseTimeToLive".*\} (\d+)$'
    (asked,) = re.findall(pattern, metrics, re.MULTILINE)
    assert 0 < int(asked) <= 3
