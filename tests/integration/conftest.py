"""Servers: one a kind and a session, or one of a test's own."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.integration.jobs import Begin, runs
from tests.integration.stores import KINDS, LONG, Kind, RunningStore, kind_of, running, started
from tests.integration.wheels import build

# On which stores `make test` runs the tests of a file. In other files it runs the tests of
# `running_store` on redis, and the others on each store. `make test-all` runs all of them.
_TWO = ("redis", "etcd-v3")
_STORES: dict[str, tuple[str, ...]] = {
    # One that pushes, and one that is polled; the one with epochs is the quorum, in `test_quorum`.
    "test_conformance": ("redis", "dynamodb"),
    "test_check": tuple(kind.name for kind in KINDS),
    "test_each_store": tuple(kind.name for kind in KINDS),
    "test_late_credentials": ("dynamodb",),
    "test_denials": _TWO,
    "test_ensembles": _TWO,
    "test_rotation": _TWO,
    "test_security": _TWO,
    "test_servers": _TWO,
}
# A request to DynamoDB Local takes ten times the processor time of another store's, its start 3 s.
_MANY_REQUESTS = ("rdzv_plugins.testing.concurrency", "rdzv_plugins.testing.killed_writers")
# Agents go through them once, on redis.
_SCENARIOS = (
    "test_secret_that_is_away_costs_attempts",
    "test_nobody_waits_for_a_node_that_may_write_and_not_read",
)
_RESTARTS = (
    "test_server_restart_with_its_data",
    "test_server_restart_with_an_empty_memory",
    "test_the_last_answers_of_a_stopping_server_are_no_refusals",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave those servers to the long run that are large to build or to install."""
    names = [kind.name for kind in KINDS]
    for item in items:
        given = getattr(item, "callspec", None)
        params = given.params if given is not None else {}
        if any(isinstance(it, Kind) and it.name in LONG for it in params.values()):
            item.add_marker(pytest.mark.soak)
        default = ("redis",) if "running_store" in params else names
        stores = [name for it in params.values() if (name := getattr(it, "name", it)) in names]
        if (
            not set(stores) <= set(_STORES.get(item.path.stem, default))
            or ("etcd-v3" in stores and item.originalname in _SCENARIOS)
            or (
                "dynamodb" in stores
                and (item.obj.__module__ in _MANY_REQUESTS or item.originalname in _RESTARTS)
            )
        ):
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session", autouse=True)
def boto_reads_once() -> None:
    """boto3 reads its JSON for each client, which takes 0.09 s of a processor."""
    import botocore.session

    botocore.session.create_loader = functools.cache(botocore.session.create_loader)


@pytest.fixture(
    scope="session",
    params=[
        # Their clients are those of nats and redis; what is their own has tests of its own.
        pytest.param(
            kind,
            id=kind.name,
            marks=pytest.mark.soak if kind.name in ("quorum", "valkey") else (),
        )
        for kind in KINDS
    ],
)
def running_store(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    """Each store in turn. A test that stops a server of it starts it again."""
    kind: Kind = request.param
    with running(kind) as store:
        yield store


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    """A store of the test's own, since some stop it; redis unless the test says otherwise."""
    name = getattr(request, "param", "redis")
    with running(kind_of(name)) as started:
        yield started


@pytest.fixture(scope="module", params=["redis", "valkey"])
def redis_server(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    """A Redis, then a Valkey, of the module's own."""
    with started(kind_of(request.param)) as server:
        yield server


@pytest.fixture
def redis_admin(redis_server: RunningStore) -> Iterator[Any]:
    client: Any = redis.Redis(*redis_server.address)
    yield client
    client.close()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as users get it. Its tests are in the group "wheel", so that it is built once."""
    return build(tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def begin(store: RunningStore, tmp_path: Path) -> Iterator[Begin]:
    """Makes a run of torchrun's agents on the store."""
    with runs(store, tmp_path) as make:
        yield make


@pytest.fixture
def run_id() -> str:
    return f"run-{secrets.token_hex(8)}"
