"""`rdzv check` on real servers: each thing that may be wrong is named in one line."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from typing import Any

import psycopg
import pytest
import redis as redis_py
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError
from rdzv_plugins.protocol.documents import NODES_PREFIX, STATE_KEY
from rdzv_plugins.servers.http import ask
from rdzv_plugins.servers.process import HOST, free_ports
from rdzv_plugins.stores import client_class
from rdzv_plugins.testing.harness import until
from tests.integration import topologies
from tests.integration.agents import Run, one_world
from tests.integration.certificates import Certificates
from tests.integration.stores import KINDS, Kind, RunningStore, running, started

Patch = pytest.MonkeyPatch

BY_NAME = {kind.name: kind for kind in KINDS}
# Valkey is told from Redis by its version alone.
STORES = [kind for kind in KINDS if kind.name != "valkey"]
GUARDED = [kind for kind in STORES if kind.name != "dynamodb"]

# What is down is retried for as long.
QUICK = "heartbeat_timeout=0.5"


@dataclass(frozen=True)
class Told:
    """What the command printed: its exit status, and (mark, what, rest) of each line."""

    status: int
    lines: list[tuple[str, str, str]]
    verdict: str

    def only(self, mark: str) -> tuple[str, str]:
        """What the one line with this mark is of, and says."""
        found = [(what, rest) for its, what, rest in self.lines if its == mark]
        assert len(found) == 1, self.lines
        return found[0]

    def of(self, what: str) -> tuple[str, str]:
        found = [(mark, rest) for mark, its, rest in self.lines if its == what]
        assert len(found) == 1, self.lines
        return found[0]


def check(*arguments: str) -> Told:
    """Run the command in this process: starting one of its own takes seconds."""
    result = CliRunner().invoke(app, ["check", *arguments])
    assert isinstance(result.exception, SystemExit | None), repr(result.exception)
    *lines, verdict = result.output.splitlines()
    parsed = []
    for line in lines:
        what, _, rest = line[9:].partition(": ")
        parsed.append((line[:8].strip(), what, rest))
    assert {mark for mark, _, _ in parsed} <= {"ok", "unknown", "warning", "failed"}, lines
    assert verdict.startswith("verdict: ")
    marks = [mark for mark, _, _ in parsed]
    assert result.exit_code == (2 if "failed" in marks else 1 if "warning" in marks else 0)
    return Told(result.exit_code, parsed, verdict)


def check_store(store: RunningStore, *more: str, **options: str | None) -> Told:
    config = {**store.config, **options}
    conf = ",".join(f"{name}={value}" for name, value in config.items() if value is not None)
    return check("-b", store.backend, "-e", store.endpoint, "-c", conf or QUICK, *more)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: Patch) -> None:
    for name in ("USER", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"RDZV_PLUGINS_{name}", raising=False)


@pytest.fixture(scope="module")
def redis() -> Iterator[RunningStore]:
    with started(BY_NAME["redis"]) as store:
        yield store


@pytest.fixture
def admin(redis: RunningStore) -> Iterator[Any]:
    with closing(redis_py.Redis(*redis.address)) as client:
        yield client


@pytest.fixture(scope="module")
def postgres() -> Iterator[RunningStore]:
    with started(BY_NAME["postgres"]) as store:
        yield store


@pytest.fixture(scope="module", params=STORES, ids=lambda kind: kind.name)
def plain(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    with running(request.param) as store:
        yield store


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """A store with TLS and a user."""

    store: RunningStore
    credentials: Mapping[str, str]
    wrong: Mapping[str, str]


@pytest.fixture(scope="module", params=GUARDED, ids=lambda kind: kind.name)
def guarded(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Guarded]:
    kind: Kind = request.param
    secret = str(uuid.uuid4())
    variable = "RDZV_PLUGINS_TOKEN" if kind.name == "consul" else "RDZV_PLUGINS_PASSWORD"
    user = {} if kind.name == "consul" else {"RDZV_PLUGINS_USER": "joe"}
    with started(kind, security=certificates.security(user="joe", password=secret)) as store:
        yield Guarded(
            store=store,
            credentials={**user, variable: secret},
            wrong={**user, variable: str(uuid.uuid4())},
        )


def set_all(monkeypatch: Patch, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


# What is well.


def test_everything_is_tried_and_nothing_left_behind(plain: RunningStore) -> None:
    told = check_store(plain, "--nnodes", "2:4", "--rdzv-id", "free")
    # PostgreSQL runs without fsync in the tests.
    assert told.status == (1 if plain.name == "postgres" else 0), told.lines
    made = {what: rest for _, what, rest in told.lines}
    assert "one winner each" in made["contention"]
    assert "read back" in made["largest value"]
    assert "nodes" in made["largest value"]
    assert all(f"{kind} " in made["latency"] for kind in ("get", "put", "list", "add"))
    assert ("polled" if plain.name == "dynamodb" else "pushed") in made["wake-up"]
    assert made["run"] == "'free' is free"
    if plain.name != "dynamodb":
        kind = {"etcd-v3": "etcd"}.get(plain.name, plain.name)
        assert made["version"].startswith(kind)
    assert told.verdict.startswith("verdict: a job works")


def test_the_temporary_run_is_deleted_also_after_an_error(monkeypatch: Patch) -> None:
    def keys() -> list[str]:
        connection = HTTPConnection(store.endpoint)
        with closing(connection):
            connection.request("GET", "/v1/kv/?keys")
            answer = connection.getresponse()
            return json.load(answer) if answer.status == 200 else []

    client = client_class("consul")
    seen = []

    def add(self: KeyValueClient, key: str, delta: int) -> int:
        seen.extend(keys())
        raise RendezvousConnectionError("it went away")

    with started(BY_NAME["consul"]) as store:
        before = keys()
        assert check_store(store).status == 0
        assert keys() == before
        monkeypatch.setattr(client, "add", add)
        assert check_store(store).only("failed") == ("rights", "it went away")
        assert any("check-" in key for key in seen)
        assert keys() == before


def test_json_has_the_same_findings(redis: RunningStore) -> None:
    arguments = ["-e", redis.endpoint, "--local-addr", "127.0.0.1", "--nnodes", "2"]
    result = CliRunner().invoke(app, ["check", *arguments, "--json"])
    shown = json.loads(result.output)
    assert shown["schema"] == 1
    assert shown["status"] == result.exit_code == 1
    assert shown["verdict"] == "a job works, with 1 warning (address)"
    lines = check(*arguments).lines
    assert [(it["mark"], it["what"]) for it in shown["findings"]] == [
        (mark, what) for mark, what, _ in lines
    ]
    values = {it["what"]: it["values"] for it in shown["findings"]}
    assert values["largest value"]["max_value_bytes"] == 512 << 20
    assert values["latency"]["get"]["p50_ms"] <= values["latency"]["get"]["p99_ms"]
    assert values["eviction"] == {"policy": "noeviction", "maxmemory_bytes": 0}


def test_as_a_person_runs_it(redis: RunningStore) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "rdzv_plugins.cli", "check"]
    shown = subprocess.run(
        [*command, "-e", redis.endpoint], capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    assert shown.stdout.splitlines()[-1].startswith("verdict: a job works: ")


# What keeps a job from its store.


def down(kind: Kind) -> str:
    scheme = "http://" if kind.name == "dynamodb" else ""
    return f"{scheme}{HOST}:{free_ports(1)[0]}"


def await_connection(kind: Kind, endpoint: str, monkeypatch: Patch, **options: str) -> Told:
    set_all(monkeypatch, kind.client_environ)
    conf = ",".join([QUICK, *(f"{name}={value}" for name, value in options.items())])
    return check("-b", kind.backend, "-e", endpoint, "-c", conf)


every_kind = pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.name)


@every_kind
def test_server_down(kind: Kind, monkeypatch: Patch) -> None:
    endpoint = down(kind)
    told = await_connection(kind, endpoint, monkeypatch)
    what, text = told.only("failed")
    assert what == "store"
    assert endpoint in text
    assert "could not be reached" in text
    assert told.verdict == "verdict: a job will not work: store failed"
    # What does not need the store is still done.
    assert told.of("address")[0] == "ok"
    assert told.of("options")[0] == "ok"


@every_kind
def test_wrong_port(kind: Kind, redis: RunningStore, monkeypatch: Patch) -> None:
    """Another server answers there: etcd where Redis is looked for, else Redis."""
    with running(BY_NAME["etcd-v3"]) if kind.name == "redis" else closing(_Nothing()) as other:
        host, port = (other if isinstance(other, RunningStore) else redis).address
        scheme = "http://" if kind.name == "dynamodb" else ""
        told = await_connection(kind, f"{scheme}{host}:{port}", monkeypatch)
    what, text = told.only("failed")
    assert what == "store"
    print(text)
    assert f"{host}:{port}" in text
    assert "--rdzv-endpoint name it" in text or "port" in text


class _Nothing:
    def close(self) -> None:
        pass


@every_kind
def test_unresolvable_name(kind: Kind, monkeypatch: Patch) -> None:
    scheme = "http://" if kind.name == "dynamodb" else ""
    told = await_connection(kind, f"{scheme}nowhere.invalid:7000", monkeypatch)
    what, text = told.only("failed")
    print(text)
    assert what == "store"
    assert "nowhere.invalid" in text
    assert "resolve" in text


def test_wrong_password(guarded: Guarded, monkeypatch: Patch) -> None:
    set_all(monkeypatch, guarded.wrong)
    what, text = check_store(guarded.store).only("failed")
    print(text)
    assert what == "store"
    assert "refused the " in text
    assert "$RDZV_PLUGINS_" in text
    assert guarded.wrong.get("RDZV_PLUGINS_PASSWORD", "-") not in text


def test_tls_is_told_where_it_is(guarded: Guarded, monkeypatch: Patch) -> None:
    set_all(monkeypatch, guarded.credentials)
    told = check_store(guarded.store)
    assert told.of("TLS") == ("ok", "encrypted; certificate and name verified")
    assert told.of("rights")[0] == "ok"


def test_plain_against_tls(guarded: Guarded, monkeypatch: Patch) -> None:
    set_all(monkeypatch, guarded.credentials)
    endpoint = guarded.store.endpoint.replace("rediss:", "redis:")
    store = replace(guarded.store, endpoint=endpoint)
    told = check_store(store, tls=None, ca_file=None, heartbeat_timeout="1")
    what, text = told.only("failed")
    print(text)
    assert what == "store"
    assert any(word in text for word in ("rediss://", "https://", "tls=true"))


def test_unknown_authority(
    guarded: Guarded, certificates: Certificates, monkeypatch: Patch
) -> None:
    set_all(monkeypatch, guarded.credentials)
    what, text = check_store(guarded.store, ca_file=certificates.foreign_ca_file).only("failed")
    print(text)
    assert what == "store"
    assert "TLS handshake" in text
    assert "ca_file" in text


@pytest.mark.parametrize("kind", GUARDED, ids=lambda kind: kind.name)
def test_tls_against_plain(kind: Kind, redis: RunningStore, postgres: RunningStore) -> None:
    pass
