"""Start, stop, kill and suspend a real server of each kind on this host, for the tests::

    with servers.start("redis") as server:
        print(server.endpoint)  # for --rdzv-endpoint
        server.nodes[0].kill()
        server.nodes[0].start(empty=True)

A server listens on 127.0.0.1, and elsewhere only where it is told a host. It keeps its data in its
own temporary directory, and ends with the process that started it, even if that process is killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from rdzv_plugins.servers import addresses_of
from rdzv_plugins.settings.endpoint import is_loopback
from tests.servers.azure import Azure
from tests.servers.consul import Consul
from tests.servers.dynamodb import DynamoDB
from tests.servers.etcd import Etcd
from tests.servers.kubernetes import Kubernetes
from tests.servers.nats import Nats
from tests.servers.postgres import Postgres
from tests.servers.process import (
    HOST,
    Kind,
    NotInstalledError,
    Security,
    ServerError,
    ServerProcess,
    free_ports,
    wait_until,
)
from tests.servers.quorum import Quorum
from tests.servers.redis import Redis, Valkey
from tests.servers.s3 import S3
from tests.servers.zookeeper import ZooKeeper

__all__ = [
    "KINDS",
    "LocalServer",
    "NotInstalledError",
    "Security",
    "ServerError",
    "ServerProcess",
    "start",
]

KINDS: dict[str, type[Kind]] = {
    kind.name: kind
    for kind in (
        Redis,
        Valkey,
        ZooKeeper,
        DynamoDB,
        Consul,
        Etcd,
        Postgres,
        Nats,
        Quorum,
        Kubernetes,
        S3,
        Azure,
    )
}
"""The kinds of server, by the name that `start` takes."""


class LocalServer:
    """A running server, or ensemble of servers; a context manager that stops it.

    Attributes:
        endpoint: as ``--rdzv-endpoint`` takes it; without secrets.
        backend: as ``--rdzv-backend`` takes it.
        config: options that ``--rdzv-conf`` needs to reach it.
        environ: environment variables that a client needs to reach it, secrets among them.
        nodes: the servers, each a `ServerProcess`.
    """

    def __init__(self, kind: Kind, nodes: tuple[ServerProcess, ...], directory: Path) -> None:
        self.kind, self.backend = kind.name, kind.backend
        self.endpoint = kind.endpoint(nodes)
        self.config = kind.config()
        self.environ = kind.environ()
        self.nodes = nodes
        self._directory = directory

    def leader(self, timeout: float = 15.0) -> int:
        """Index of the server that leads; `ServerError` if there is none within ``timeout``."""
        leaders: list[int] = []

        def found() -> bool:
            leaders[:] = [node.index for node in self.nodes if node.leads()]
            return len(leaders) == 1

        if not wait_until(found, timeout):
            raise ServerError(f"{self.kind} at {self.endpoint} has {len(leaders)} leaders")
        return leaders[0]

    def close(self) -> None:
        """Stop the servers and delete their data; idempotent."""
        for node in self.nodes:
            node.end()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start(
    kind: str,
    *,
    nodes: int = 1,
    port: int | None = None,
    host: str = HOST,
    security: Security | None = None,
    timeout: float = 30.0,
) -> LocalServer:
    """Start a server and wait until it serves.

    Args:
        kind: a key of `KINDS`.
        nodes: servers in the ensemble: 1, or 3 for zookeeper, consul, etcd and nats, or 2 for
            kubernetes.
        port: the clients' port of the first server; None: any free one.
        host: this host's name or address for clients on other hosts, for redis and valkey; the
            server listens at its addresses and at 127.0.0.1. Then ``security`` needs a password.
        security: users and certificates; None: no access control.
        timeout: seconds until each server must be ready.

    Raises:
        ValueError: an unknown kind, a number of nodes or a host that it cannot have, or a host that
            is not loopback without a password.
        NotInstalledError: the server is not installed; the message says how to install it.
        ServerError: the host is not this one, the port is taken, or the server did not start; the
            message has the end of its log.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown server '{kind}'; there are: {', '.join(KINDS)}")
    runner = KINDS[kind](security := security or Security())
    if nodes not in {1, runner.largest}:
        allowed = "1 node" if runner.largest == 1 else f"1 or {runner.largest} nodes"
        raise ValueError(f"a local {kind} has {allowed}, not {nodes}")
    if host != HOST:
        addresses = addresses_of(host)
        if not runner.for_others:
            raise ValueError(f"a local {kind} listens on {HOST} only; redis and valkey have --host")
        if not (security.password or all(map(is_loopback, addresses))):
            raise ValueError(f"a {kind} that other hosts reach needs a password")
        runner.listen(host, addresses)
    ports = free_ports(nodes * runner.ports_per_node, port, runner.addresses)
    memory = Path("/dev/shm")
    folder = memory if runner.in_memory and os.access(memory, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix=f"rdzv-{kind}-", dir=folder))
    each = runner.ports_per_node
    members = tuple(
        ServerProcess(runner, i, ports[i * each : (i + 1) * each], directory / str(i))
        for i in range(nodes)
    )
    server = LocalServer(runner, members, directory)
    try:
        for node in members:
            node.peers = members
            node.launch()
        for node in members:
            node.await_ready(timeout)
        runner.prepare(members)
    except BaseException:
        server.close()
        raise
    return server
