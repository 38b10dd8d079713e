"""The one table of stores that every integration test is parametrised by."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

import pytest
import redis

from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError
from rdzv_plugins.settings.endpoint import is_loopback, parse_endpoint
from rdzv_plugins.stores import open_client
from rdzv_plugins.testing import Proxy, Store
from rdzv_plugins.testing.harness import until
from tests import servers
from tests.servers.azure import KEY as AZURITES_KEY
from tests.servers.azure import create_container
from tests.servers.process import HOST, find_file

__all__ = [
    "GUARDED",
    "KINDS",
    "Kind",
    "RunningStore",
    "absent",
    "every_store",
    "kind_of",
    "role_of_postgres",
    "running",
    "started",
]

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "http", "https", "postgresql", "nats", "tls")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table.

    Attributes:
        backend: as in ``--rdzv-backend``.
        server: a key of `servers.KINDS`.
        port: the one that clients use in the container.
        image: what testcontainers starts where no binary is installed; "": nothing.
        command: the container's.
        environment: the container's.
        config: what ``--rdzv-conf`` needs to reach the container; with a "url", that is what
            the variable names.
        client_environ: what a client's environment needs to reach the container.
        keeps: whether a server that was stopped has its data again.
    """

    name: str
    backend: str
    server: str
    port: int
    image: str
    command: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    endpoint: str = "{host}:{port}"
    config: Mapping[str, str] = field(default_factory=dict)
    client_environ: Mapping[str, str] = field(default_factory=dict)
    keeps: bool = True

    @property
    def variable(self) -> str:
        """The environment variable that names a server to use instead."""
        return f"RDZV_TEST_{self.server.upper()}"


KINDS = [
    Kind(name="redis", backend="redis", server="redis", port=6379, image="redis:7.4.2"),
    Kind(name="valkey", backend="redis", server="valkey", port=6379, image="valkey/valkey:8.1.0"),
    Kind(
        name="zookeeper",
        backend="zookeeper",
        server="zookeeper",
        port=2181,
        image="zookeeper:3.9.3",
        # No limit to a host's connections, and sessions as short as those of a local server.
        environment={"ZOO_MAX_CLIENT_CNXNS": "0", "ZOO_TICK_TIME": "500"},
    ),
    Kind(
        name="dynamodb",
        backend="dynamodb",
        server="dynamodb",
        port=8000,
        image="amazon/dynamodb-local:2.6.0",
        command="-jar DynamoDBLocal.jar -inMemory -sharedDb",
        endpoint="http://{host}:{port}",
        config={"create_table": "true"},
        client_environ={
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_DEFAULT_REGION": "us-east-1",
        },
    ),
    Kind(
        name="consul",
        backend="consul",
        server="consul",
        port=8500,
        image="hashicorp/consul:1.20.2",
        command="agent -dev -client 0.0.0.0",
    ),
    Kind(
        name="etcd-v3",
        backend="etcd-v3",
        server="etcd",
        port=2379,
        image="quay.io/coreos/etcd:v3.5.18",
        command="etcd --listen-client-urls http://0.0.0.0:2379 "
        "--advertise-client-urls http://0.0.0.0:2379",
    ),
    Kind(
        name="postgres",
        backend="postgres",
        server="postgres",
        port=5432,
        image="postgres:17.4",
        command="postgres -c max_connections=600",
        environment={"POSTGRES_HOST_AUTH_METHOD": "trust"},
        endpoint="postgresql://postgres@{host}:{port}/postgres",
        config={"create_table": "true"},
    ),
    Kind(
        name="nats",
        backend="nats",
        server="nats",
        port=4222,
        image="nats:2.11-alpine",
        command="-js",
        config={"create_bucket": "true"},
    ),
    # Its servers are those of the package that its clients need.
    Kind(
        name="quorum",
        backend="quorum",
        server="quorum",
        port=0,
        image="",
        config={"cluster": "local"},
        keeps=False,  # A majority does, in its memory.
    ),
    Kind(name="kubernetes", backend="kubernetes", server="kubernetes", port=0, image=""),
    Kind(
        name="s3",
        backend="s3",
        server="s3",
        port=8333,
        image="chrislusf/seaweedfs:4.48",
        command="server -s3",
        environment={"AWS_ACCESS_KEY_ID": "rdzv", "AWS_SECRET_ACCESS_KEY": "rdzv-local"},
        endpoint="s3://rdzv",
        config={"url": "http://{host}:{port}"},
        client_environ={
            "AWS_ACCESS_KEY_ID": "rdzv",
            "AWS_SECRET_ACCESS_KEY": "rdzv-local",
            "AWS_DEFAULT_REGION": "us-east-1",
        },
    ),
    Kind(
        name="azure",
        backend="azure",
        server="azure",
        port=10000,
        image="mcr.microsoft.com/azure-storage/azurite:3.35.0",
        command="azurite-blob --blobHost 0.0.0.0 --skipApiVersionCheck",
        endpoint="az://rdzv",
        config={"url": "http://{host}:{port}/devstoreaccount1", "account": "devstoreaccount1"},
        client_environ={"AZURE_STORAGE_ACCOUNT_KEY": AZURITES_KEY},
    ),
]


def kind_of(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


LONG = ("kubernetes", "s3", "azure")
"""Those whose servers only the long run has."""

# Those with users and TLS; Valkey's are Redis', and of buckets test_buckets has what a gateway and
# other keys show.
GUARDED = [
    kind for kind in KINDS if kind.name not in ("valkey", "dynamodb", "quorum", "s3", "azure")
]

# Redis in every run; the others, which only another module serves, in the long one.
every_store = pytest.mark.parametrize(
    "store",
    [
        pytest.param(kind.name, marks=() if kind.name == "redis" else pytest.mark.soak)
        for kind in KINDS
    ],
    indirect=True,
)


@dataclass(frozen=True, kw_only=True)
class RunningStore:
    """A store that answers.

    Attributes:
        backend: as in ``--rdzv-backend``.
        endpoint: as in ``--rdzv-endpoint``.
        config: what ``--rdzv-conf`` needs to reach it; ``os.environ`` has the rest.
        server: the local server to stop and kill; None: it is not ours.
        keeps: as of `Kind`.
    """

    name: str
    backend: str
    endpoint: str
    config: Mapping[str, str]
    server: servers.LocalServer | None = None
    keeps: bool = True

    @property
    def address(self) -> tuple[str, int]:
        # The endpoint of a bucket names no host.
        where = self.config.get("url", self.endpoint)
        return parse_endpoint(where, default_port=0, schemes=SCHEMES).hosts[0]

    @property
    def where(self) -> list[str]:
        """The options of a command that name it."""
        conf = ",".join(f"{name}={value}" for name, value in self.config.items())
        return ["-b", self.backend, "-e", self.endpoint, *(["-c", conf] if conf else [])]

    def open(
        self,
        namespace: str,
        *,
        address: tuple[str, int] | None = None,
        request_timeout: float = 5.0,
    ) -> KeyValueClient:
        """Connect, straight or through a proxy at ``address``."""
        return open_client(
            self.backend,
            self.endpoint_at(address),
            namespace,
            self.config_at(address),
            request_timeout=request_timeout,
        )

    def endpoint_at(self, address: tuple[str, int] | None) -> str:
        """The endpoint, straight or through a proxy at ``address``."""
        if address is None:
            return self.endpoint
        old, new = ("{}:{}".format(*pair) for pair in (self.address, address))
        return self.endpoint.replace(old, new)

    def config_at(self, address: tuple[str, int] | None) -> dict[str, str]:
        """What ``--rdzv-conf`` needs, straight or through a proxy at ``address``."""
        if address is None or "url" not in self.config:
            return dict(self.config)
        old, new = ("{}:{}".format(*pair) for pair in (self.address, address))
        return {**self.config, "url": self.config["url"].replace(old, new)}

    def proxy(self) -> Proxy:
        """Stands before the store, at the same address of this host."""
        host, _ = self.address
        return Proxy(self.address, (host if is_loopback(host) else HOST, 0))

    def restart(self, *, empty: bool) -> None:
        assert self.server is not None
        self.server.nodes[0].stop()
        self.server.nodes[0].start(empty=empty)

    def conformance(self) -> Store:
        """What the conformance suite needs."""
        # We count past the client as nobody in particular, which a guarded server does not let us.
        signs = ("@", "rediss:", "valkeys:", "https:")
        guarded = "RDZV_PLUGINS_PASSWORD" in os.environ or any(s in self.endpoint for s in signs)
        count = None if guarded else _STORED.get(self.backend)
        return Store(
            open=self.open,
            address=self.address,
            restart=self.restart if self.server is not None else None,
            keeps=self.keeps,
            # A bucket tells its time in whole seconds.
            least_deadline={"kubernetes": 12.0, "s3": 2.0, "azure": 2.0}.get(self.backend, 0.0),
            # obstore's threads survive no fork.
            forks=self.backend not in ("s3", "azure"),
            stored=count(self) if count is not None else None,
        )


Stored = Callable[[str], int]


def _stored_in_redis(store: RunningStore) -> Stored:
    host, port = store.address
    server: Any = redis.Redis(host, port)
    return lambda namespace: sum(1 for _ in server.scan_iter(match=f"*{namespace}*", count=1000))


# DynamoDB is not among them: it takes its time, up to days, to delete what has expired.
_STORED: dict[str, Callable[[RunningStore], Stored]] = {
    "redis": _stored_in_redis,
}


def role_of_postgres(name: str, more: str = "") -> str:
    """The statement that makes a user, who has the password that libpq finds here."""
    return f"CREATE ROLE {name} LOGIN PASSWORD '{os.environ.get('PGPASSWORD', 'none')}' {more}"


@contextmanager
def running(kind: Kind) -> Iterator[RunningStore]:
    """A store of a kind: named in the environment, else a local binary, else a container.

    Skips the test where there is none; in CI, where one is expected, fails it.
    """
    if endpoint := os.environ.get(kind.variable):
        config = dict(kind.config)
        if "url" in config:
            endpoint, config["url"] = kind.endpoint, endpoint
        with _environment(kind.client_environ, override=False):
            yield RunningStore(
                name=kind.name, backend=kind.backend, endpoint=endpoint, config=config
            )
        return
    with ExitStack() as stack:
        try:
            store = stack.enter_context(_started(kind))
        except servers.NotInstalledError as error:
            if not kind.image:
                absent(f"no {kind.name}: {error}")
            if engine := _docker_failure():
                absent(
                    f"no {kind.name}: ${kind.variable} is not set; {error}; "
                    f"and no Docker engine answers ({engine})"
                )
            stack.enter_context(_environment(kind.client_environ))
            store = stack.enter_context(_container(kind))
        yield store


@contextmanager
def started(
    kind: Kind, *, nodes: int = 1, security: servers.Security | None = None
) -> Iterator[RunningStore]:
    """A local server of a kind for one test, which may do with it what it likes.

    Skips or fails the test as `running` does.
    """
    with ExitStack() as stack:
        try:
            store = stack.enter_context(_started(kind, nodes=nodes, security=security))
        except servers.NotInstalledError as error:
            absent(f"no {kind.name} of our own: {error}")
        yield store


@contextmanager
def _started(
    kind: Kind, *, nodes: int = 1, security: servers.Security | None = None
) -> Iterator[RunningStore]:
    if kind.server == "redis" and find_file("redis", ["redis-server"]) is None:
        # To others Valkey will do in its place; the tests have it under its own name.
        raise servers.NotInstalledError("redis-server is not installed")
    with (
        servers.start(kind.server, nodes=nodes, security=security, timeout=120) as server,
        _environment(server.environ),
    ):
        store = RunningStore(
            name=kind.name,
            backend=kind.backend,
            endpoint=server.endpoint,
            config=server.config,
            server=server,
            keeps=kind.keeps,
        )
        if kind.server == "dynamodb":
            # It has no table yet; the first takes longer than some tests let a request take.
            store.open("ready", request_timeout=30).close()
        yield store


def absent(reason: str) -> NoReturn:
    """Skip the test; in CI, where nothing may be missing, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def _environment(values: Mapping[str, str], *, override: bool = True) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            if override or name not in os.environ:
                patch.setenv(name, value)
        yield


def _docker_failure() -> str | None:
    """Why no Docker engine can be used; None: one answers."""
    try:
        docker: Any = import_module("docker")
        docker.from_env(timeout=5).ping()
    except Exception as error:
        return str(error)
    return None


@contextmanager
def _container(kind: Kind) -> Iterator[RunningStore]:
    from testcontainers.core.container import DockerContainer

    container: Any = DockerContainer(kind.image).with_exposed_ports(kind.port)
    if kind.command:
        container = container.with_command(kind.command)
    for name, value in kind.environment.items():
        container = container.with_env(name, value)
    with container:
        host, port = container.get_container_host_ip(), container.get_exposed_port(kind.port)
        store = RunningStore(
            name=kind.name,
            backend=kind.backend,
            endpoint=kind.endpoint.format(host=host, port=port),
            config={name: it.format(host=host, port=port) for name, it in kind.config.items()},
        )
        if kind.server == "azure":
            assert until(_has_container(int(port)), 60), f"{kind.image} makes no container"
        assert until(_answering(store), 60), f"the container of {kind.image} does not answer"
        yield store


def _has_container(port: int) -> Callable[[], bool]:
    def made() -> bool:
        try:
            create_container(port)
        except (OSError, servers.ServerError):
            return False
        return True

    return made


def _answering(store: RunningStore) -> Callable[[], bool]:
    def answers() -> bool:
        try:
            store.open("ready", request_timeout=1).close()
        except RendezvousConnectionError:
            return False
        return True

    return answers
