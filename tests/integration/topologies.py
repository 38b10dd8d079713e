"""Redis in several processes: a Cluster with replicas, and a primary watched by a Sentinel."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from rdzv_plugins.testing import Proxy
from rdzv_plugins.testing.harness import until
from tests.servers import Security, ServerProcess
from tests.servers.process import HOST, free_ports
from tests.servers.redis import Redis

__all__ = ["Moving", "Topology", "cluster", "moving_cluster", "sentinel"]

# The name by which the Sentinel knows the primary.
NAME = "training"


@dataclass(frozen=True)
class Topology:
    """Servers that take over from each other.

    Attributes:
        endpoint: as in ``--rdzv-endpoint``.
        config: as in ``--rdzv-conf``.
        primary: the server that holds a run, by the run's id.
        hand_over: makes another server the run's primary; the old one lives on.
    """

    endpoint: str
    config: Mapping[str, str]
    primary: Callable[[str], ServerProcess]
    hand_over: Callable[[str], None]


class Member(Redis):
    """A redis-server with more lines in its configuration."""

    def __init__(
        self, lines: Callable[[ServerProcess], Sequence[str]], password: str | None = None
    ) -> None:
        super().__init__(Security(password=password))
        self._lines = lines

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        binary, file = super().command(node, nodes)
        with Path(file).open("a") as config:
            # Else a primary waits 5 s for more replicas to send its data to.
            for line in ("repl-diskless-sync-delay 0", *self._lines(node)):
                config.write(f"{line}\n")
        return [binary, file]


# The lines of a configuration that a Sentinel does not know.
_OF_SERVERS = ("appendonly no", "save 3600 2000000000")


class Sentinel(Redis):
    """A redis-server that watches another.

    Args:
        password: of the servers.
        own: what it demands itself.
    """

    def __init__(self, watched: ServerProcess, password: str | None, own: Security) -> None:
        super().__init__(own)
        self._watched = watched
        self._password = password

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        binary, file = super().command(node, nodes)
        lines = [
            *(line for line in Path(file).read_text().splitlines() if line not in _OF_SERVERS),
            f"sentinel monitor {NAME} {HOST} {self._watched.port} 1",
            f"sentinel down-after-milliseconds {NAME} 500",
            f"sentinel failover-timeout {NAME} 5000",
        ]
        if self._password:
            lines.append(f"sentinel auth-pass {NAME} {self._password}")
        Path(file).write_text("\n".join(lines) + "\n")
        return [binary, file, "--sentinel"]


@contextmanager
def sentinel(
    folder: Path, password: str | None = None, own: Security | None = None
) -> Iterator[Topology]:
    """A primary, a replica and a Sentinel, which demands a user and TLS of its ``own``."""
    own = own or Security()
    ports = free_ports(3)

    def lines(node: ServerProcess) -> list[str]:
        login = [f"masterauth {password}"] if password else []
        return login + ([f"replicaof {HOST} {ports[0]}"] if node.index else [])

    member = Member(lines, password)
    servers = [
        ServerProcess(member, index, [ports[index]], folder / str(index)) for index in (0, 1)
    ]
    watcher = ServerProcess(Sentinel(servers[0], password, own), 2, [ports[2]], folder / "2")
    with _serving(servers):
        replica = _ask(servers[1], password)
        _await(lambda: replica.info("replication")["master_link_status"] == "up")
        with _serving([watcher]):
            told = _ask(watcher, own.password, own.user, own.ca_file)
            # Known, connected and of known rank: else it would not be promoted.
            _await(
                lambda: [it["master-link-status"] for it in told.sentinel_slaves(NAME)] == ["ok"]
            )

            def primary(run_id: str) -> ServerProcess:
                port = told.sentinel_get_master_addr_by_name(NAME)[1]
                return next(server for server in servers if server.port == port)

            yield Topology(
                f"{HOST}:{watcher.port}",
                {"sentinel": NAME},
                primary,
                lambda run_id: told.sentinel_failover(NAME),
            )


@contextmanager
def cluster(folder: Path) -> Iterator[Topology]:
    """Three primaries with a replica each."""
    ports = free_ports(12)
    member = Member(
        lambda node: [
            "cluster-enabled yes",
            f"cluster-port {node.ports[1]}",
            "cluster-node-timeout 1000",
            "cluster-replica-validity-factor 0",
        ]
    )
    servers = [
        ServerProcess(member, i, ports[2 * i : 2 * i + 2], folder / str(i)) for i in range(6)
    ]
    hosts = [f"{HOST}:{server.port}" for server in servers]

    def shard(run_id: str) -> tuple[ServerProcess, Sequence[ServerProcess]]:
        """Primary and replicas of the run's slot, as one that lives sees them."""
        living = _ask(next(server for server in servers if server.running))
        slot = living.execute_command("CLUSTER", "KEYSLOT", f"{{rdzv/{run_id}}}")
        for first, last, *members in _slots(living):
            if first <= slot <= last:
                ports = [int(member[1]) for member in members]
                nodes = [next(it for it in servers if it.port == port) for port in ports]
                return nodes[0], nodes[1:]
        raise AssertionError(f"nobody has slot {slot}")

    def hand_over(run_id: str) -> None:
        _, replicas = shard(run_id)
        _ask(replicas[0]).execute_command("CLUSTER FAILOVER")

    with _serving(servers):
        create = ["redis-cli", "--cluster", "create", *hosts, "--cluster-replicas", "1"]
        made = subprocess.run(
            [*create, "--cluster-yes"], capture_output=True, text=True, timeout=60, check=False
        )
        assert made.returncode == 0, made.stdout + made.stderr
        clients = [_ask(server) for server in servers]
        _await(lambda: all(_serves(client) for client in clients))
        yield Topology(
            ",".join(hosts[:2]), {"cluster": "true"}, lambda run_id: shard(run_id)[0], hand_over
        )


@dataclass(frozen=True)
class Moving:
    """A Cluster behind a name that stays.

    Attributes:
        endpoint: as in ``--rdzv-endpoint``.
        move: stops all members, and starts them with their data at other addresses.
    """

    endpoint: str
    move: Callable[[], None]


@contextmanager
def moving_cluster(folder: Path) -> Iterator[Moving]:
    """A primary with all slots, behind a proxy that stands for the name."""
    member = Member(
        lambda node: [
            "cluster-enabled yes",
            f"cluster-port {node.ports[1]}",
            "cluster-node-timeout 1000",
            "appendonly yes",
        ]
    )
    old, new = (ServerProcess(member, 0, free_ports(2), folder / "member") for _ in range(2))
    with Proxy((HOST, old.port)) as proxy, _serving([old]):
        _ask(old).execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        _await(lambda: "cluster_state:ok" in _ask(old).execute_command("CLUSTER", "INFO"))

        def move() -> None:
            proxy.refuse()
            old.stop()
            new.start()
            _await(lambda: "cluster_state:ok" in _ask(new).execute_command("CLUSTER", "INFO"))
            proxy.lead_to((HOST, new.port))
            proxy.accept()

        try:
            yield Moving("{}:{}".format(*proxy.address), move)
        finally:
            new.end()


def _slots(client: Any) -> Any:
    """For each range of slots: the first, the last, the primary and its replicas."""
    # In two words, for redis-py 5 would rearrange the answer to "CLUSTER SLOTS".
    return client.execute_command("CLUSTER", "SLOTS")


def _serves(client: Any) -> bool:
    """Whether a member of the cluster sees all others, and has its primary's data."""
    return (
        client.info("replication").get("master_link_status", "up") == "up"
        and "cluster_state:ok" in client.execute_command("CLUSTER", "INFO")
        and all(len(row) == 4 for row in _slots(client))
    )


@contextmanager
def _serving(nodes: Sequence[ServerProcess]) -> Iterator[None]:
    try:
        for node in nodes:
            node.launch()
        for node in nodes:
            node.await_ready()
        yield
    finally:
        for node in nodes:
            node.end()


def _ask(
    node: ServerProcess,
    password: str | None = None,
    user: str | None = None,
    ca_file: str | None = None,
) -> Any:
    login = {"username": user, "password": password}
    tls = {"ssl": True, "ssl_ca_certs": ca_file} if ca_file else {}
    return redis.Redis(HOST, node.port, decode_responses=True, **login, **tls)  # type: ignore[arg-type]


def _await(condition: Callable[[], bool]) -> None:
    assert until(condition, 25), "the servers did not find each other"
