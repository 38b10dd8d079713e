"""What single stores once got wrong: crowds at a counter, lost leases, proxies, descriptors."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rdzv_plugins.kv import (
    AccessDeniedError,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousError,
)
from rdzv_plugins.stores import open_client
from rdzv_plugins.stores.etcd import RefusedError
from rdzv_plugins.testing import Proxy
from rdzv_plugins.testing.harness import SLACK, present, until
from rdzv_plugins.testing.threads import Background, together
from tests import Measure
from tests.integration.stores import KINDS, RunningStore, kind_of, started
from tests.nonsense import SAMPLES, silent, speaking
from tests.servers import Security


def only(*names: str) -> pytest.MarkDecorator:
    kinds = [kind for kind in KINDS if kind.name in names]
    assert len(kinds) == len(names)
    return pytest.mark.parametrize("running_store", kinds, ids=names, indirect=True)


@pytest.fixture
def client(running_store: RunningStore, run_id: str) -> Iterator[KeyValueClient]:
    client = running_store.open(run_id)
    yield client
    client.close()


@only(*(kind.name for kind in KINDS))
@pytest.mark.parametrize("parked", [True, False], ids=["parked", "asking"])
def test_paused_server_does_not_hold_up_an_interrupt(
    running_store: RunningStore, run_id: str, parked: bool, record_property: Measure
) -> None:
    if running_store.server is None:
        pytest.skip("not our own server")
    (node,) = running_store.server.nodes
    client = running_store.open(run_id, request_timeout=30)
    version = client.put("key", b"one")
    if not parked:
        node.pause()
    try:
        waiter = Background(lambda: client.wait("key", version, 60))
        assert not waiter.done(0.3)
        if parked:
            node.pause()
        # As long as a poll of DynamoDB takes to come, and be stuck.
        assert not waiter.done(1)
        began = time.monotonic()
        client.interrupt()
        told = time.monotonic()
        assert waiter.result(SLACK) is None
        record_property("interrupt", round(1000 * (told - began), 2))
        record_property("wait", round(1000 * (time.monotonic() - began), 2))
    finally:
        node.resume()
    assert present(client.get("key")).version == version
    client.close()


@only(*(kind.name for kind in KINDS if kind.name != "quorum"))
def test_nonsense_passes(running_store: RunningStore, run_id: str) -> None:
    """As of a proxy in between: it ends no client for good."""
    (*_, nonsense), greets = SAMPLES[running_store.backend], running_store.backend == "nats"
    with Proxy(running_store.address) as proxy, speaking(nonsense, greets) as address:
        client = running_store.open(run_id, address=proxy.address, request_timeout=0.5)
        proxy.lead_to(address)
        proxy.cut()
        for _ in range(3):
            with pytest.raises(RendezvousError) as told:
                client.put("key", b"")
            # A node that is denied stops its workers.
            assert not isinstance(told.value, AccessDeniedError)
        proxy.lead_to(running_store.address)
        proxy.cut()

        def written() -> bool:
            with suppress(RendezvousError):
                client.put("key", b"")
                return True
            return False

        assert until(written, 20)
        client.close()


@only("redis", "consul", "postgres")
def test_an_address_that_answers_nobody_leaves_time_for_the_next(
    running_store: RunningStore, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a name with an IPv6 address that the network does not carry."""
    (host, port), real = running_store.address, socket.getaddrinfo

    def getaddrinfo(name: str, *arguments: Any, **options: Any) -> list[Any]:
        names = ["127.0.0.9", host] if name == "store.test" and "flags" not in options else [name]
        return [it for name in names for it in real(name, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with silent(("127.0.0.9", port)):
        running_store.open(run_id, address=("store.test", port), request_timeout=6).close()


# The stores that add by compare-and-set.
@only("zookeeper", "consul", "etcd-v3", "postgres", "nats")
def test_a_crowd_at_a_counter_is_served(client: KeyValueClient) -> None:
    crowd = 100
    sums = together([partial(client.add, "count", 1) for _ in range(crowd)])
    assert sorted(sums) == [*range(1, crowd + 1)]


@only("consul")
def test_what_was_never_sent_is_not_in_doubt(
    running_store: RunningStore, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = running_store.open(run_id)
    with Proxy(running_store.address) as proxy:
        endpoint = "{}:{}".format(*proxy.address)
        client: Any = open_client(running_store.backend, endpoint, run_id, running_store.config)
        replace = client._replace

        def lose_the_server(*arguments: Any) -> bool:
            monkeypatch.setattr(client, "_replace", replace)
            proxy.refuse()
            rival.add("count", 1)
            threading.Timer(0.2, proxy.accept).start()
            return bool(replace(*arguments))

        monkeypatch.setattr(client, "_replace", lose_the_server)
        assert client.add("count", 1) == 2
        client.close()
    rival.close()


@only("etcd-v3")
def test_etcd_without_a_leader_has_done_nothing(client: Any) -> None:
    # The text and the codes of a member whose two peers were killed.
    refusals = [
        RefusedError(503, b'{"code": 14, "message": "etcdserver: %s"}' % text)
        for text in (b"no leader", b"request timed out")
    ]
    assert [client._problem(error).undone for error in refusals] == [True, False]
    assert not client._problem(ConnectionResetError()).undone


@only("etcd-v3")
def test_a_lost_lease_is_no_missing_gateway(client: Any) -> None:
    lost = b'{"code": 5, "message": "etcdserver: requested lease not found"}'
    assert client._problem(RefusedError(404, lost)).state
    for body in (b"404 page", b'{"code": 5, "message": "Not Found"}'):
        assert "no v3 gateway" in client._problem(RefusedError(404, body)).text


def test_an_etcd_with_users_that_lost_its_data_gets_a_new_token(run_id: str) -> None:
    kind = kind_of("etcd-v3")
    with started(kind, security=Security(user="joe", password=secrets.token_hex(8))) as store:
        other = store.open(run_id)
        for _ in range(20):
            other.put("key", b"old")
        other.close()
        # Its token is younger than all that the server knows after the restart.
        client = store.open(run_id)
        store.restart(empty=True)

        def written() -> bool:
            try:
                client.put("key", b"new")
            except RendezvousConnectionError:
                return False
            return True

        assert until(written, 30)
        assert present(client.get("key")).value == b"new"
        client.close()


@pytest.mark.parametrize("body", [b"<html>502</html>", b"<!DOCTYPE html><p>bad gateway", b""])
def test_a_proxys_error_before_dynamodb_is_passing(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BadGateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(502)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with ThreadingHTTPServer(("127.0.0.1", 0), BadGateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{server.server_port}"
            with pytest.raises(RendezvousConnectionError, match="or its proxy failed for 1 s"):
                open_client("dynamodb", endpoint, "run", {"region": "us-east-1"}, request_timeout=1)
        finally:
            server.shutdown()
            thread.join()


@only("dynamodb")
def test_a_large_value_is_not_read_by_each_poll(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = client.put("key", bytes(100_000))
    asked: list[str] = []
    ask = client._table.ask

    def note(limit: Any, operation: str, **arguments: Any) -> Any:
        asked.append(operation)
        return ask(limit, operation, **arguments)

    monkeypatch.setattr(client._table, "ask", note)
    assert client.wait("key", version, 0.5) is None
    assert {*asked} == {"query"}
    client.put("key", bytes(100_001))
    assert len(present(client.wait("key", version, 5)).value) == 100_001


CROWDED = """
import os, resource, sys
from rdzv_plugins.kv.base import Limit
from tests.servers import Security
from rdzv_plugins.stores import open_client
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
client = open_client("consul", sys.argv[1], sys.argv[2])
client.put("key", b"one")
assert max(it._socket.fileno() for it in client._transport.http._idle) >= 1024
print(client.get("key").value.decode())
client.close()
"""


@only("consul")
def test_consul_in_a_process_of_many_descriptors(running_store: RunningStore, run_id: str) -> None:
    command = [sys.executable, "-c", CROWDED, running_store.endpoint, run_id]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.strip() == "one", ended.stderr


@only("zookeeper")
def test_zookeeper_closes_while_the_interpreter_ends(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        # What Python 3.12 and later do in atexit's handlers; the tests may run on 3.11.
        raise RuntimeError("can't create new thread at interpreter shutdown")

    client.put("key", b"one")
    zk = client._session._zk
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        client.close()
    assert not zk.connected, "the session stays open"
