"""The expiry that stores share, on hooks over a `MemoryClient`; conformance has the rest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import pytest

from rdzv_plugins.kv import Capabilities, MemoryServer
from rdzv_plugins.kv.base import Limit, Problem, Stored
from rdzv_plugins.kv.epochs import MARK, EpochClient
from rdzv_plugins.kv.memory import MemoryClient
from rdzv_plugins.testing.harness import until


class DictClient(EpochClient):
    name = "dict"
    capabilities = Capabilities(
        push=False, linearizable=True, batch=True, ttl=False, max_value_bytes=64 << 20
    )
    mark_seconds = 0.01

    def __init__(self, server: MemoryServer) -> None:
        super().__init__("dict at localhost", 5.0)
        self.inner = MemoryClient(server, "run")

    def _read_at(self, paths: Iterable[str], limit: Limit) -> dict[str, Stored]:
        found = self.inner.get_many(paths)
        return {path: Stored.parse(it.value, it.version) for path, it in found.items()}

    def _scan_at(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        found = self.inner.list(prefix)
        return {path: Stored.parse(it.value, it.version) for path, it in found.items()}

    def _replace_at(self, path: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        guard = seen.guard if seen is not None else None
        return self.inner.compare_and_set(path, data, guard)[1]

    def _put_at(self, values: Mapping[str, bytes], limit: Limit) -> None:
        self.inner.put_many(values)

    def _delete_at(self, paths: Iterable[str], limit: Limit) -> None:
        self.inner.delete_many(paths)

    def _server_time(self) -> float:
        return time.monotonic()

    def _problem(self, error: Exception) -> Problem | None:
        return None


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


def test_a_client_that_only_reads_a_run_that_is_over_writes_nothing(server: MemoryServer) -> None:
    writer, reader = DictClient(server), DictClient(server)
    writer.put_many({"key": b"old", "nodes/n1": b"old"})
    writer.expire(0.02)
    stands = {**server.namespaces["run"]}
    assert until(lambda: reader.list("") == {}, 5)
    assert reader.get("key") is None
    assert reader.get_many(["key", "nodes/n1"]) == {}
    assert reader.wait("key", None, 0.05) is None
    reader.delete("key")
    assert server.namespaces["run"] == stands
    # The next write begins another epoch, and takes the keys of the last one away.
    writer.put("key", b"new")
    assert {key: it.value for key, it in reader.list("").items()} == {"key": b"new"}
    assert len(server.namespaces["run"]) == 2


def test_an_emptied_run_leaves_nothing(server: MemoryServer) -> None:
    client = DictClient(server)
    client.put_many({"key": b"one", "nodes/n1": b"one"})
    client.expire(60)
    assert MARK in server.namespaces["run"]
    client.expire(0)
    assert server.namespaces["run"] == {}
