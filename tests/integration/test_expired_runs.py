"""Stores that cannot delete by themselves: the next run that ends removes those that expired."""

from __future__ import annotations

import json
import secrets
import time
from http.client import HTTPConnection
from typing import Any

import psycopg
import pytest
from kazoo.client import KazooClient

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.kv.base import Limit
from rdzv_plugins.kv.epochs import MARK
from rdzv_plugins.stores import open_client
from rdzv_plugins.testing.harness import until
from tests.integration.stores import KINDS, Kind, running


def runs_of_zookeeper(address: tuple[str, int], prefix: str) -> set[str]:
    zk = KazooClient("{}:{}".format(*address))
    zk.start()
    try:
        return set(zk.get_children(f"/{prefix}"))
    finally:
        zk.stop()
        zk.close()


def runs_of_consul(address: tuple[str, int], prefix: str) -> set[str]:
    connection = HTTPConnection(*address)
    connection.request("GET", f"/v1/kv/{prefix}/?keys")
    keys = json.loads(connection.getresponse().read())
    connection.close()
    parts = (key.split("/") for key in keys)
    return {run[2].rstrip("!") if run[1] == "!expire" else run[1] for run in parts}


def runs_of_postgres(address: tuple[str, int], prefix: str) -> set[str]:
    host, port = address
    with psycopg.connect(host=host, port=port, user="postgres", dbname="postgres") as connection:
        runs = connection.execute("SELECT DISTINCT convert_from(run, 'UTF8') FROM rdzv").fetchall()
    return {run.removeprefix(f"{prefix}/") for (run,) in runs if run.startswith(f"{prefix}/")}


RUNS = {"zookeeper": runs_of_zookeeper, "consul": runs_of_consul, "postgres": runs_of_postgres}
EPOCHS = ("etcd-v3", "nats", "kubernetes")


def is_there(client: Any) -> bool:
    """Whether the store holds anything of the client's run."""
    limit = Limit(time.monotonic() + 10)
    return bool(client._scan_at("0/", limit) or client._read_at([MARK], limit))


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.name in (*RUNS, *EPOCHS)], ids=lambda kind: kind.name
)
def test_expired_runs_are_removed_by_the_next_that_ends(kind: Kind) -> None:
    prefix = f"expired-{secrets.token_hex(4)}"
    with running(kind) as store:
        opened: dict[str, KeyValueClient] = {}

        def end(run: str, seconds: float | None) -> KeyValueClient:
            config = {**store.config, "prefix": prefix}
            client = open_client(store.backend, store.endpoint, run, config)
            opened[run] = client
            client.put_many({f"key-{number}": b"value" for number in range(3)})
            if seconds is not None:
                client.expire(seconds)
            return client

        old = [end(f"old-{number}", 0.2) for number in range(3)]
        end("running", None)
        end("later", 100)
        assert until(lambda: all(client.list("") == {} for client in old), 30)
        end("last", 100)
        if kind.name in EPOCHS:
            left = {run for run, client in opened.items() if is_there(client)}
        else:
            left = RUNS[kind.name](store.address, prefix)
        assert left == {"running", "later", "last"}
        for client in opened.values():
            client.close()
