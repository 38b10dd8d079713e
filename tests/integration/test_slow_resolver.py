"""Where DNS swallows every query: no round is lost, and beats go on.

c10d looks up the name of whatever address it connects to, or is connected from, for a line of its
log. torch 2.13 asks no more in a process in which that failed once.

Run as a program, in namespaces of its own, it mutes DNS for its process and those it forks, starts
a Redis server, plays one scenario, and prints what it saw as JSON.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord
from rdzv_plugins.stores import open_client
from rdzv_plugins.testing.proxy import Proxy
from rdzv_plugins.testing.threads import Background, together
from tests import Measure, servers
from tests.integration import hosts
from tests.integration.hosts import bring_up_loopback

_DNS = "127.53.0.1"
# No /etc/hosts has it.
_ADDRESS = "127.0.0.2"
_USUAL_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
# glibc's resolver gives a query up after twice 5 s.
RESOLVER_SECONDS = 10.0
INTERVAL = 0.5
REQUEST_TIMEOUT = 4.0
_STORE_NAME = "store.test"

_MS_BIND = 4096


class MutedDns:
    """DNS for this mount and network namespace: a socket that reads and never answers.

    Attributes:
        names: what was asked for, by this process and those it forked.
    """

    def __init__(self, hosts: str) -> None:
        folder = Path(tempfile.mkdtemp())
        files = {
            "/etc/resolv.conf": f"nameserver {_DNS}\n",
            "/etc/hosts": hosts,
            "/etc/nsswitch.conf": "hosts: files dns\n",
        }
        libc = ctypes.CDLL(None, use_errno=True)
        for path, text in files.items():
            source = folder / Path(path).name
            source.write_text(text)
            if libc.mount(str(source).encode(), path.encode(), None, _MS_BIND, None) != 0:
                raise OSError(ctypes.get_errno(), f"cannot mount over {path}")
        self.names: list[str] = []
        self._hosts = folder / "hosts"
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        bring_up_loopback()
        self._socket.bind((_DNS, 53))
        threading.Thread(target=self._swallow, daemon=True).start()

    def forget(self) -> None:
        """Leave only this host in /etc/hosts: DNS is asked for any other name."""
        self._hosts.write_text(_USUAL_HOSTS)

    def _swallow(self) -> None:
        while True:
            query, at, labels = self._socket.recv(4096), 12, []
            while length := query[at]:
                labels.append(query[at + 1 : at + 1 + length].decode())
                at += 1 + length
            self.names.append(".".join(labels))


def _handler(endpoint: str, run_id: str, nodes: int, **config: Any) -> RendezvousHandler:
    options = {"keep_alive_interval": INTERVAL, "join_timeout": 60, **config}
    return create_handler(
        "redis",
        RendezvousParameters(
            "redis", endpoint, run_id, nodes, nodes, local_addr=_ADDRESS, **options
        ),
    )


def _run_a_round(handlers: list[RendezvousHandler]) -> None:
    """All ask for a round; every rank finds the TCPStore of it, a new one."""
    infos = together([handler.next_rendezvous for handler in handlers])
    assert sorted(info.rank for info in infos) == list(range(len(handlers)))
    masters = {info.bootstrap_store_info.master_port for info in infos if info.bootstrap_store_info}
    assert len(masters) == 1, masters
    # From an address that has a name, or its thread asks DNS, as when any worker connects.
    named = ("127.0.0.1", 0)
    socket.create_connection((_ADDRESS, masters.pop()), 5, source_address=named).close()


def _in_a_child(call: Callable[[], None], seconds: float) -> str | None:
    """What it raised; c10d asks no more once a look-up failed in its process, so each has one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            os._exit(0)
        except BaseException:
            os.write(write, traceback.format_exc().encode()[:60_000])
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        ended = Background(lambda: os.waitpid(child, 0)[1])
        if not ended.done(seconds):
            os.kill(child, 9)
        status = ended.result(10)
        return told.read().decode() or (f"status {status}" if status else None)


def rounds(dns: MutedDns, endpoint: str, handler: str, amount: int) -> dict[str, Any]:
    """Rounds of two and three nodes, each asked for again, in processes that never asked DNS."""
    took, lost = [], []
    for number in range(amount // 2):
        nodes = 2 + number % 2

        def run(number: int = number, nodes: int = nodes) -> None:
            handlers = [
                _handler(endpoint, f"run-{number}", nodes, handler=handler) for _ in range(nodes)
            ]
            _run_a_round(handlers)
            _run_a_round(handlers)
            together([each.shutdown for each in handlers])

        began = time.monotonic()
        if error := _in_a_child(run, 90):
            lost.append(error)
        took.append(time.monotonic() - began)
    return {"lost": lost, "slowest": max(took), "names": dns.names}


def beats(dns: MutedDns, endpoint: str, handler: str, lease: float) -> dict[str, Any]:
    """Three nodes, where opening a TCPStore takes as long as the resolver."""
    attempts = round(lease / INTERVAL)
    handlers = [
        _handler(endpoint, "run", 3, handler=handler, keep_alive_max_attempt=attempts)
        for _ in range(3)
    ]
    ended = threading.Event()
    began = time.monotonic()
    gaps = Background(lambda: _longest_gaps(endpoint, ended))
    _run_a_round(handlers)
    took = time.monotonic() - began
    ended.set()
    longest = gaps.result(10)
    _run_a_round(handlers)
    together([each.shutdown for each in handlers])
    return {"seconds": took, "gaps": longest, "names": dns.names}


def _longest_gaps(endpoint: str, ended: threading.Event) -> list[float]:
    """The longest time that each node's beat stood still."""
    client = open_client("redis", endpoint, "run")
    last: dict[str, tuple[int, float]] = {}
    longest: dict[str, float] = {}
    while not ended.wait(0.01):
        now = time.monotonic()
        for key, entry in client.list(NODES_PREFIX).items():
            beat = NodeRecord.decode(entry.value).beat
            before, since = last.get(key, (beat, now))
            longest[key] = max(longest.get(key, 0.0), now - since)
            last[key] = (beat, since if beat == before else now)
    client.close()
    return sorted(longest.values())


def reconnects(dns: MutedDns, store: str, amount: int) -> dict[str, Any]:
    """A client of a server with a name whose connections end while DNS does not answer."""
    took = []
    with servers.start(store) as server, Proxy(("127.0.0.1", server.nodes[0].port)) as proxy:
        os.environ.update(server.environ)
        endpoint = f"{_STORE_NAME}:{proxy.address[1]}"
        if store == "postgres":
            endpoint = f"postgresql://postgres@{endpoint}/postgres"
        backend = {"etcd": "etcd-v3"}.get(store, store)
        client = open_client(
            backend, endpoint, "run", server.config, request_timeout=REQUEST_TIMEOUT
        )
        version = client.put("key", b"value")
        dns.forget()
        for _ in range(amount):
            proxy.cut()
            began = time.monotonic()
            entry = client.get("key")
            took.append(time.monotonic() - began)
            assert entry is not None
            assert entry.version == version
        client.close()
    return {"took": took, "names": dns.names}


def play(scenario: str, handler: str, amount: float) -> Any:
    # A mount namespace has its own /etc/resolv.conf, a network namespace a port 53 to listen at.
    return hosts.play("tests.integration.test_slow_resolver", scenario, handler, str(amount))


def test_no_round_asks_dns_and_none_is_lost(record_property: Measure) -> None:
    seen = play("rounds", "rdzv", 50)
    record_property("slowest", round(seen["slowest"], 1))
    assert seen["lost"] == []
    assert seen["names"] == []


def test_torchs_handler_waits_for_the_resolver_and_loses_no_round() -> None:
    seen = play("rounds", "torch", 2)
    assert seen["lost"] == []


@pytest.mark.parametrize("lease", [1.5 * RESOLVER_SECONDS, 0.3 * RESOLVER_SECONDS])
def test_beats_go_on_while_a_look_up_hangs(lease: float, record_property: Measure) -> None:
    # /etc/hosts does not have ::1 here. With the shorter lease, rank 0 is given up meanwhile.
    seen = play("beats", "rdzv", lease)
    record_property("seconds", round(seen["seconds"], 1))
    record_property("longest gap", round(max(seen["gaps"]), 2))
    assert seen["names"] != [], "DNS was not asked: this test tells nothing"
    assert len(seen["gaps"]) == 3
    assert max(seen["gaps"]) < 3 * INTERVAL


@pytest.mark.parametrize(
    "store",
    [
        "redis",
        *(
            pytest.param(it, marks=pytest.mark.soak)
            for it in ("etcd", "consul", "nats", "postgres")
        ),
    ],
)
def test_a_store_whose_name_was_known_is_reached_while_dns_hangs(
    store: str, record_property: Measure
) -> None:
    seen = play("reconnects", store, 2)
    record_property("reconnected after, s", round(max(seen["took"]), 2))
    assert seen["names"] != [], "DNS was not asked: this test tells nothing"
    # The resolver's 10 s made a node miss its beats, and be lost.
    assert max(seen["took"]) < REQUEST_TIMEOUT


def main(scenario: str, handler: str, amount: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if scenario == "reconnects":
        named = f"127.0.0.1 {_STORE_NAME}\n::1 {_STORE_NAME}\n"
        told = reconnects(MutedDns(_USUAL_HOSTS + named), handler, int(amount))
        print(json.dumps(told))  # noqa: T201
        return
    hosts = _USUAL_HOSTS if scenario == "rounds" else "127.0.0.1 localhost\n"
    dns = MutedDns(hosts)
    with servers.start("redis") as server:
        if scenario == "rounds":
            seen = rounds(dns, server.endpoint, handler, int(amount))
        else:
            seen = beats(dns, server.endpoint, handler, float(amount))
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
