"""`rdzv check` on real servers: each thing that may be wrong is named in one line."""

from __future__ import annotations

import base64
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import psycopg
import pytest
import redis as redis_py
from kazoo.client import KazooClient
from kazoo.security import READ_ACL_UNSAFE
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.cli.check import host as dials
from rdzv_plugins.cli.check import store as trials
from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError
from rdzv_plugins.settings.endpoint import redact
from rdzv_plugins.settings.parsing import parse_options
from rdzv_plugins.stores import client_class
from rdzv_plugins.stores.quorum.client import Client as QuorumClient
from rdzv_plugins.stores.quorum.members import Members, Options
from rdzv_plugins.testing.harness import until
from rdzv_plugins.torch.rendezvous_backend import KeyValueBackend
from tests.integration import topologies
from tests.integration.agents import Run, one_world
from tests.integration.credentials import Certificates
from tests.integration.stores import (
    GUARDED,
    KINDS,
    LONG,
    Kind,
    RunningStore,
    role_of_postgres,
    started,
)
from tests.nonsense import silent
from tests.servers import Security, ServerProcess
from tests.servers.http import ask
from tests.servers.process import HOST, free_ports

Patch = pytest.MonkeyPatch

BY_NAME = {kind.name: kind for kind in KINDS}
# Valkey is told from Redis by its version alone; quorum is tested by itself, below, and kubernetes
# with its rights; those of a bucket have none to ask for.
STORES = [kind for kind in KINDS if kind.name not in ("valkey", "quorum", *LONG)]

# What is down is retried for as long.
QUICK = "heartbeat_timeout=0.3"


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
    return check("-b", store.backend, "-e", store.endpoint, "-c", conf, *more)


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    """Less patience and fewer samples than a person gets, but for the test of everything.

    Each sample costs DynamoDB Local ten times the processor time of another store.
    """
    if "everything" not in request.node.name or "dynamodb" in request.node.name:
        for name, number in {"_SAMPLES": 5, "_WAKE_UPS": 2, "_CONTESTS": 2, "_WRITERS": 4}.items():
            monkeypatch.setattr(trials, name, number)
        monkeypatch.setattr(trials, "_DIAL_SECONDS", 0.3)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: Patch) -> None:
    for name in ("USER", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"RDZV_PLUGINS_{name}", raising=False)
    # What the name of the machine stands for is not of interest here.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def on(*kinds: Kind) -> pytest.MarkDecorator:
    """Run a test on the stores of these kinds that the tests of all files share."""
    return pytest.mark.parametrize(
        "running_store", kinds, ids=[kind.name for kind in kinds], indirect=True
    )


@pytest.fixture(scope="module")
def redis() -> Iterator[RunningStore]:
    with started(BY_NAME["redis"]) as store:
        yield store


@pytest.fixture(scope="module")
def etcd() -> Iterator[RunningStore]:
    with started(BY_NAME["etcd-v3"]) as store:
        yield store


@pytest.fixture
def admin(redis: RunningStore) -> Iterator[Any]:
    with closing(redis_py.Redis(*redis.address)) as client:
        yield client


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


@on(*STORES)
def test_everything_is_tried_and_nothing_left_behind(running_store: RunningStore) -> None:
    name = running_store.name
    told = check_store(running_store, "--nnodes", "2:4", "--rdzv-id", "free")
    # Only Consul's agents belong at loopback. PostgreSQL runs without fsync here.
    expected = {"consul": [], "postgres": ["store's host", "persistence"]}
    warnings = [what for mark, what, _ in told.lines if mark == "warning"]
    assert warnings == expected.get(name, ["store's host"]), told.lines
    assert told.status == bool(warnings)
    made = {what: rest for _, what, rest in told.lines}
    assert "one winner each" in made["contention"]
    assert "read back" in made["largest value"]
    assert all(f"{kind} " in made["latency"] for kind in ("get", "put", "list", "add"))
    assert ("polled" if name == "dynamodb" else "pushed") in made["wake-up"]
    assert made["run"] == "'free' is free"
    if name != "dynamodb":
        kind = {"etcd-v3": "etcd"}.get(name, name)
        assert made["version"].startswith(kind)
    assert told.verdict.startswith("verdict: a job works")


@on(BY_NAME["consul"])
def test_the_temporary_run_is_deleted_also_after_an_error(
    running_store: RunningStore, monkeypatch: Patch
) -> None:
    def keys() -> list[str]:
        with closing(HTTPConnection(running_store.endpoint)) as connection:
            connection.request("GET", "/v1/kv/?keys")
            answer = connection.getresponse()
            found: list[str] = json.load(answer) if answer.status == 200 else []
            return [key for key in found if "check-" in key]

    seen = []

    def add(self: KeyValueClient, key: str, delta: int) -> int:
        seen.extend(keys())
        raise RendezvousConnectionError("it went away")

    assert check_store(running_store).status == 0
    assert keys() == []
    monkeypatch.setattr(client_class("consul"), "add", add)
    assert check_store(running_store).only("failed") == ("rights", "it went away")
    assert seen
    assert keys() == []


def test_json_has_the_same_findings(redis: RunningStore) -> None:
    arguments = ["-e", redis.endpoint, "--local-addr", "127.0.0.1", "--nnodes", "2"]
    result = CliRunner().invoke(app, ["check", *arguments, "--json"])
    shown = json.loads(result.output)
    assert shown["schema"] == 1
    assert shown["status"] == result.exit_code == 1
    assert shown["verdict"] == "a job works, with 2 warnings (address, store's host)"
    lines = check(*arguments).lines
    assert [(it["mark"], it["what"]) for it in shown["findings"]] == [
        (mark, what) for mark, what, _ in lines
    ]
    values = {it["what"]: it["values"] for it in shown["findings"]}
    assert values["largest value"]["max_value_bytes"] == 512 << 20
    assert values["latency"]["get"]["p50_ms"] <= values["latency"]["get"]["p99_ms"]
    assert values["eviction"] == {"policy": "noeviction", "maxmemory_bytes": 0}


def test_the_command_ends_with_a_verdict(redis: RunningStore) -> None:
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
    assert redact(endpoint) in text
    assert "could not be reached" in text
    assert told.verdict == "verdict: a job will not work: store failed"
    # What does not need the store is still done.
    assert told.of("address")[0] == "ok"
    assert told.of("options")[0] == "ok"


@every_kind
def test_wrong_port(
    kind: Kind, redis: RunningStore, etcd: RunningStore, monkeypatch: Patch
) -> None:
    """Another server answers there: etcd where Redis or DynamoDB is looked for, else Redis."""
    host, port = (etcd if kind.name in ("redis", "dynamodb") else redis).address
    scheme = "http://" if kind.name == "dynamodb" else ""
    told = await_connection(kind, f"{scheme}{host}:{port}", monkeypatch)
    what, text = told.only("failed")
    assert what == "store"
    assert f"{host}:{port}" in text
    hint = "another server's port" if kind.name == "dynamodb" else "name it"
    assert hint in text


@every_kind
def test_unresolvable_name(kind: Kind, monkeypatch: Patch) -> None:
    scheme = "http://" if kind.name == "dynamodb" else ""
    told = await_connection(kind, f"{scheme}nowhere.invalid:7000", monkeypatch)
    what, text = told.only("failed")
    assert what == "store"
    assert "nowhere.invalid" in text
    assert "resolve" in text


def test_wrong_password(guarded: Guarded, monkeypatch: Patch) -> None:
    set_all(monkeypatch, guarded.wrong)
    what, text = check_store(guarded.store).only("failed")
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
    # libpq encrypts by itself unless it is told not to.
    endpoint += "?sslmode=disable" if guarded.store.name == "postgres" else ""
    store = replace(guarded.store, endpoint=endpoint)
    told = check_store(store, tls=None, ca_file=None, heartbeat_timeout="0.5")
    what, text = told.only("failed")
    assert what == "store"
    assert any(word in text for word in ("rediss://", "https://", "tls=true"))


def test_unknown_authority(
    guarded: Guarded, certificates: Certificates, monkeypatch: Patch
) -> None:
    set_all(monkeypatch, guarded.credentials)
    what, text = check_store(guarded.store, ca_file=certificates.foreign_ca_file).only("failed")
    assert what == "store"
    assert "TLS handshake" in text
    assert "ca_file" in text


@on(*STORES)
def test_tls_against_plain(running_store: RunningStore) -> None:
    endpoint = running_store.endpoint.replace("http:", "https:")
    options = {} if running_store.name == "dynamodb" else {"tls": "true"}
    store = replace(running_store, endpoint=endpoint.replace("redis:", "rediss:"))
    what, text = check_store(store, heartbeat_timeout="0.5", **options).only("failed")
    assert what == "store"
    assert "speaks no TLS" in text or "does not speak TLS" in text
    assert "leave out tls=true" in text


@pytest.mark.parametrize("backend", ["redis", "zookeeper", "consul", "etcd-v3"])
def test_tls_against_a_server_that_hangs_up(backend: str) -> None:
    """Python 3.11.7 and later say that with another error than 3.11.2, one of TLS."""

    class HangUp(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)

    with ThreadingTCPServer((HOST, 0), HangUp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"{HOST}:{server.server_address[1]}"
        conf = "tls=true,heartbeat_timeout=0.5"
        what, text = check("-b", backend, "-e", endpoint, "-c", conf).only("failed")
        server.shutdown()
    assert what == "store"
    assert "does not speak TLS: leave out tls=true" in text


@on(BY_NAME["postgres"], BY_NAME["dynamodb"])
def test_no_table(running_store: RunningStore) -> None:
    what, text = check_store(running_store, table="none", create_table="false").only("failed")
    assert what == "store"
    assert "no table" in text
    assert "none" in text
    assert "create_table=true" in text


# DynamoDB, a service, has no versions to choose from.
@on(*GUARDED)
def test_too_old(running_store: RunningStore, monkeypatch: Patch) -> None:
    """No old server is installed here: the least version is raised above that of a real one."""
    monkeypatch.setattr(client_class(running_store.name), "least_version", (99, 1))
    told = check_store(running_store)
    what, text = told.only("failed")
    assert what == "version"
    assert "is too old; upgrade it: this backend needs 99.1 or later" in text
    # Nothing is tried on it.
    assert "rights" not in {what for _, what, _ in told.lines}


# Rights, each with what to paste.


def test_redis_rights(redis: RunningStore, admin: Any) -> None:
    admin.execute_command(
        "ACL", "SETUSER", "poor", "on", ">hunter2", "~{rdzv/*", "+@hash", "+hello"
    )
    store = replace(redis, endpoint=redis.endpoint.replace("//", "//poor:hunter2@"))
    told = check_store(store)
    what, text = told.only("failed")
    assert what == "rights"
    assert "hunter2" not in text
    line = text.partition("grant them: ")[2]
    assert line.startswith("ACL SETUSER poor ~{rdzv/* +@hash ")
    admin.execute_command(*line.split())
    mended = check_store(store)
    assert mended.only("warning")[0] == "password"
    assert mended.of("rights")[0] == "ok"
    for what in ("version", "role", "eviction", "space", "persistence"):
        mark, text = mended.of(what)
        assert mark == "unknown"
        assert "INFO gave no answer (" in text


@on(BY_NAME["postgres"])
def test_postgres_rights(running_store: RunningStore) -> None:
    postgres = running_store
    host, port = postgres.address
    with psycopg.connect(postgres.endpoint, autocommit=True) as admin:
        postgres.open("made").close()
        admin.execute(role_of_postgres("poor"))
        store = replace(postgres, endpoint=f"postgresql://poor@{host}:{port}/postgres", config={})
        what, text = check_store(store).only("failed")
        assert what == "store"
        paste(admin, text)
        admin.execute("REVOKE UPDATE, DELETE ON rdzv FROM poor")
        what, text = check_store(store).only("failed")
        assert what == "rights on the table"
        assert "'poor' has no UPDATE, DELETE on the table rdzv" in text
        paste(admin, text)
    assert check_store(store).of("rights")[0] == "ok"


def paste(admin: psycopg.Connection[Any], text: str) -> None:
    line = text.rpartition("run: ")[2]
    assert line.startswith("GRANT ")
    for statement in line.split("; "):
        admin.execute(statement.encode())


def test_etcd_rights(monkeypatch: Patch) -> None:
    password = secrets.token_hex(8)
    security = Security(user="joe", password=password)
    with started(BY_NAME["etcd-v3"], security=security) as store:

        def post(path: str, body: Any, **headers: str) -> Any:
            status, answer = ask(
                store.address[1], "POST", f"/v3/{path}", body, security=security, headers=headers
            )
            assert status == 200, answer
            return answer

        login = post("auth/authenticate", {"name": "root", "password": password})
        token = {"Authorization": login["token"]}
        post("auth/role/add", {"name": "few"}, **token)
        post("auth/user/add", {"name": "poor", "password": password}, **token)
        post("auth/user/grant", {"user": "poor", "role": "few"}, **token)
        set_all(monkeypatch, {"RDZV_PLUGINS_USER": "poor", "RDZV_PLUGINS_PASSWORD": password})
        what, text = check_store(store).only("failed")
        assert what == "store"
        assert "denied a right" in text
        assert text.endswith("etcdctl role grant-permission <role> readwrite --prefix 'rdzv/'")
        # As etcdctl understands it: from the prefix on, to the prefix with its last byte raised.
        keys = {"key": b64(b"rdzv/"), "range_end": b64(b"rdzv0")}
        post("auth/role/grant", {"name": "few", "perm": {"permType": "READWRITE", **keys}}, **token)
        assert check_store(store).of("rights")[0] == "ok"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_consul_rights(monkeypatch: Patch) -> None:
    master = str(uuid.uuid4())
    security = Security(password=master)
    with started(BY_NAME["consul"], security=security) as store:

        def put(path: str, body: Any) -> Any:
            headers = {"X-Consul-Token": master}
            port = store.address[1]
            status, answer = ask(
                port, "PUT", f"/v1/acl/{path}", body, security=security, headers=headers
            )
            assert status == 200, answer
            return answer

        token = put("token", {"Description": "poor"})
        set_all(monkeypatch, {"RDZV_PLUGINS_TOKEN": token["SecretID"]})
        what, text = check_store(store).only("failed")
        assert what == "store"
        rule = text.partition("that has ")[2]
        assert rule == 'key_prefix "rdzv/" { policy = "write" }'
        put("policy", {"Name": "keys", "Rules": rule})
        put(f"token/{token['AccessorID']}", {**token, "Policies": [{"Name": "keys"}]})
        assert until(lambda: check_store(store).status == 0, 30)
        mark, text = check_store(store).of("version")
        assert mark == "unknown"
        assert "agent:read" in text


@on(BY_NAME["zookeeper"])
def test_zookeeper_rights(running_store: RunningStore) -> None:
    admin: Any = KazooClient(running_store.endpoint)
    admin.start()
    try:
        admin.create("/closed", acl=READ_ACL_UNSAFE)
    finally:
        admin.stop()
        admin.close()
    what, text = check_store(running_store, prefix="closed").only("failed")
    assert what == "rights"
    assert text.endswith("in zkCli.sh: setAcl /closed world:anyone:cdra")


# What only some servers have.


def test_replica(redis: RunningStore, admin: Any, tmp_path: Path) -> None:
    host, port = redis.address
    # Else it waits 5 s for more replicas.
    admin.config_set("repl-diskless-sync-delay", 0)
    member = topologies.Member(lambda node: [f"replicaof {host} {port}"])
    node = ServerProcess(member, 0, free_ports(1), tmp_path / "replica")
    node.launch()
    try:
        node.await_ready()
        with closing(redis_py.Redis(HOST, node.port)) as replica:
            up = {"master_link_status": "up"}.items()
            assert until(lambda: up <= replica.info("replication").items(), 30)
        told = check("-e", f"{HOST}:{node.port}")
    finally:
        node.end()
    what, text = told.only("failed")
    assert what == "role"
    assert f"a replica of {host}:{port}, which accepts no writes; name the primary" in text


def test_eviction_and_persistence(redis: RunningStore, admin: Any) -> None:
    before = admin.config_get("save")["save"], admin.config_get("maxmemory")["maxmemory"]
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        told = check_store(redis)
        what, text = told.only("warning")
        assert what == "eviction"
        assert "allkeys-lru" in text
        assert "noeviction" in text
        assert told.verdict == "verdict: a job works, with 1 warning (eviction)"
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("save", "")
        assert check_store(redis).only("warning")[0] == "persistence"
        # Enough for the keys, but not for a large value.
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + (1 << 19))
        told = check_store(redis)
        assert "'maxmemory'" in told.of("largest value")[1]
        assert told.of("largest value")[0] == "warning"
    finally:
        admin.config_set("maxmemory", before[1])
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("save", before[0])


def test_little_space_and_none(redis: RunningStore, admin: Any) -> None:
    try:
        # Enough ballast that the connections of the check are little beside it.
        for _ in range(32):
            admin.rpush("ballast", *[b"x" * (1 << 14)] * 64)
        used = admin.info("memory")["used_memory"]
        # Enough for the requests of the check, its largest value included.
        admin.config_set("maxmemory", 64 << 20)
        assert check_store(redis).of("space")[0] == "ok"
        admin.config_set("maxmemory", int(used * 1.06))
        told = check_store(redis)
        mark, text = told.of("space")
        assert mark == "warning"
        assert "little is left, and a full server takes no writes; raise maxmemory" in text
        admin.config_set("maxmemory", used // 2)
        told = check_store(redis)
        assert told.status == 2
        assert told.only("failed")[0] == "space"
        assert "bytes are used: writes are refused; raise maxmemory" in told.only("failed")[1]
    finally:
        admin.config_set("maxmemory", 0)
        admin.delete("ballast")


def test_the_leaders_log_warns_of_eviction_and_of_no_persistence(
    redis: RunningStore, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rdzv_plugins")
    before = admin.config_get("save")["save"]
    admin.config_set("maxmemory-policy", "allkeys-lru")
    admin.config_set("save", "")
    run = Run(redis, f"warned-{uuid.uuid4().hex[:8]}")
    try:
        agents = [run.start((3, 3)) for _ in range(3)]
        assert until(one_world(agents), 30)
        told = ["redis: persistence: none: a restart", "redis: eviction: the policy is allkeys-lru"]
        assert until(lambda: all(it in caplog.text for it in told), 30)
        agents[0].fail_workers()
        assert until(lambda: [len(agent.rounds) for agent in agents] == [2, 2, 2], 30)
        assert until(lambda: len(run.history()) == 2, 30)
        assert [caplog.text.count(it) for it in told] == [1, 1]
    finally:
        for agent in run.agents:
            agent.end()
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("save", before)


def test_member_of_a_cluster_without_cluster(tmp_path: Path) -> None:
    member = topologies.Member(
        lambda node: ["cluster-enabled yes", f"cluster-port {node.ports[1]}"]
    )
    node = ServerProcess(member, 0, free_ports(2), tmp_path / "member")
    node.launch()
    try:
        node.await_ready()
        endpoint = ("-e", f"{HOST}:{node.port}")
        what, text = check(*endpoint, "-c", QUICK).only("failed")
        assert what == "store"
        assert "A Cluster needs cluster=true" in text
        with closing(redis_py.Redis(HOST, node.port)) as admin:
            slots: Any = admin
            slots.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            assert until(lambda: is_ok(slots), 30)
        # It has this run's keys, and not those of each other run.
        what, text = check(*endpoint).only("failed")
        assert what == "role"
        assert text.endswith("set cluster=true")
    finally:
        node.end()


def is_ok(member: Any) -> bool:
    # In two words, for redis-py would parse the answer to "CLUSTER INFO".
    return b"cluster_state:ok" in member.execute_command("CLUSTER", "INFO")


def test_sentinel_in_place_of_its_server(tmp_path: Path) -> None:
    with topologies.sentinel(tmp_path) as topology:
        text = check("-e", topology.endpoint, "-c", QUICK).only("failed")[1]
        assert "is it a Sentinel? It needs sentinel=<name>" in text
        conf = ",".join(f"{name}={value}" for name, value in topology.config.items())
        assert check("-e", topology.endpoint, "-c", conf).of("rights")[0] == "ok"


def test_full_etcd() -> None:
    with started(BY_NAME["etcd-v3"]) as store:
        alarm = {"action": "ACTIVATE", "alarm": "NOSPACE"}
        port = store.address[1]
        status, answer = ask(port, "POST", "/v3/maintenance/alarm", alarm, security=Security())
        assert status == 200, answer
        told = check_store(store)
        # 2 GiB is etcd's own default; it is told in its metrics, of 3.6 in its status.
        assert "of 2,147,483,648 bytes are used" in told.of("space")[1]
        what, text = told.only("failed")
    assert what == "alarms"
    assert "NOSPACE: writes are refused; compact" in text


# Options.


def test_each_wrong_option_is_named(redis: RunningStore, monkeypatch: Patch) -> None:
    monkeypatch.setenv("RDZV_PLUGINS_CLOSED_TTL", "long")
    told = check_store(
        redis, last_call_timeot="5", keep_alive_interval="soon", password="hunter2", databse="1"
    )
    wrong = [rest for mark, what, rest in told.lines if (mark, what) == ("failed", "options")]
    expected = (
        "unknown option 'last_call_timeot'; did you mean 'last_call_timeout'?",
        "unknown option 'databse'; did you mean 'database'?",
        "option 'keep_alive_interval': 'soon' is not a valid float",
        "option '$RDZV_PLUGINS_CLOSED_TTL': 'long' is not a valid float",
        "option 'password' is a secret",
    )
    assert len(wrong) == len(expected)
    for beginning in expected:
        assert any(line.startswith(beginning) for line in wrong), (beginning, wrong)
    assert "hunter2" not in str(told)
    assert told.status == 2
    assert told.of("store")[0] == "unknown"
    assert told.of("address")[0] == "ok"


def test_wrong_option_of_the_handler_does_not_keep_from_the_store(redis: RunningStore) -> None:
    told = check_store(redis, join_timeout="0")
    assert told.only("failed")[1].startswith("option 'join_timeout': '0' must be at least")
    assert told.of("rights")[0] == "ok"


def test_misspelt_variable(redis: RunningStore, monkeypatch: Patch) -> None:
    monkeypatch.setenv("RDZV_PLUGINS_LAST_CAL_TIMEOUT", "hunter2")
    monkeypatch.setenv("RDZV_PLUGINS_SASL", "true")
    told = check_store(redis)
    what, text = told.only("warning")
    assert what == "environment"
    assert text == (
        "$RDZV_PLUGINS_LAST_CAL_TIMEOUT is no option and has no effect; "
        "did you mean $RDZV_PLUGINS_LAST_CALL_TIMEOUT?"
    )
    other = [rest for mark, what, rest in told.lines if (mark, what) == ("ok", "environment")]
    assert other == ["$RDZV_PLUGINS_SASL is an option of zookeeper, and has no effect on redis"]


@pytest.mark.parametrize(
    ("arguments", "what", "said"),
    [
        (("-b", "rediss"), "backend", "unknown backend 'rediss'"),
        (("-c", "cluster"), "options", "the option 'cluster' has no value"),
        (("-c", "prefix=/x"), "options", "option 'prefix'"),
        (("-c", "ca_file=/nowhere,tls=true"), "store", "ca_file '/nowhere' cannot be used"),
        (("-c", "handler=torch,rank=1"), "options", "handler=torch has no rank"),
        (("-c", "outage_limit=60"), "options", "'outage_limit' has a meaning with on_outage=stop"),
        (("--nnodes", "4:2"), "nnodes", "--nnodes '4:2' is neither N nor MIN:MAX"),
        (("--peers", "a:b"), "peers", "--peers: 'a:b' is neither host nor host:port"),
        (("-e", "mysql://h"), "store", "starts with 'mysql://'"),
    ],
)
def test_wrong_arguments(
    redis: RunningStore, arguments: tuple[str, ...], what: str, said: str
) -> None:
    endpoint = () if "-e" in arguments else ("-e", redis.endpoint)
    told = check(*endpoint, *arguments)
    found = told.only("failed")
    assert found[0] == what
    assert said in found[1]


# Addresses.


def test_loopback_address_while_the_store_is_elsewhere() -> None:
    """The store is at an address for documentation (RFC 5737), where nobody answers."""
    told = check("-e", "198.51.100.1:6379", "--local-addr", "127.0.0.1", "-c", QUICK)
    what, text = told.only("warning")
    assert what == "address"
    assert "'127.0.0.1' is loopback, but the store or a peer is on another host" in text
    assert "--local-addr" in text
    assert told.only("failed")[0] == "store"


def test_loopback_address_that_was_asked_for(redis: RunningStore) -> None:
    arguments = ("--local-addr", "localhost")
    assert "is loopback: nodes on other" in check_store(redis, *arguments).only("warning")[1]
    alone = check_store(redis, *arguments, "--nnodes", "1")
    assert alone.status == 0


def test_address_of_nobody(redis: RunningStore) -> None:
    what, text = check_store(redis, "--local-addr", "nowhere.invalid").only("failed")
    assert what == "address"
    assert "this host cannot be reached at 'nowhere.invalid' (" in text
    assert "name an address of this host with --local-addr" in text


def test_peers(redis: RunningStore, monkeypatch: Patch) -> None:
    monkeypatch.setattr(dials, "_PATIENCE", 0.3)
    host, port = redis.address
    closed = free_ports(1)[0]
    with silent((HOST, 0)) as address:
        mute = "{}:{}".format(*address)
        peers = f"{host}:{port},{host},{host}:{closed},nowhere.invalid:22,[::1]:{closed},{mute}"
        told = check_store(redis, "--peers", peers)
    found = [(mark, rest) for mark, what, rest in told.lines if what == "peer"]
    assert [mark for mark, _ in found] == ["ok", "ok", "failed", "failed", "failed", "failed"]
    assert found[0][1].startswith(f"{host}:{port} was dialled in ")
    assert "nothing was dialled" in found[1][1]
    assert f"{host}:{closed} refused the connection" in found[2][1]
    assert "nowhere.invalid:22 cannot be resolved" in found[3][1]
    assert f"[::1]:{closed} " in found[4][1]
    assert f"{mute} is unreachable: it does not answer" in found[5][1]
    assert "firewall" in found[5][1]
    assert told.verdict.startswith("verdict: a job will not work: peer failed")


# The run that holds an id.


def test_id_that_is_held(redis: RunningStore, run_id: str) -> None:
    with Run(redis, run_id) as run:
        agents = [run.start((2, 3)) for _ in range(2)]
        until(one_world(agents), 30)
        told = check_store(redis, "-i", run_id, "--nnodes", "2:3")
        # The store is at loopback, as told before.
        (_, what, text) = [line for line in told.lines if line[0] == "warning"][-1]
        assert what == "run"
        assert (
            f"'{run_id}' is held by a run (running round 0, 2 of 2..3 nodes) of 127.0.0.1[" in text
        )
        what, text = check_store(redis, "-i", run_id, "--nnodes", "2").only("failed")
        assert what == "run"
        assert "was started with --nnodes=2:3, this job with --nnodes=2:2" in text
        theirs = check_store(redis, "-i", run_id, handler="torch").only("warning")
        assert "of handler=rdzv" in theirs[1]
        for agent in agents:
            agent.crash()
        what, text = check_store(redis, "-i", run_id).only("warning")
        assert "is held by a run whose nodes are gone (dead: round 0 " in text


def test_id_of_a_run_that_has_ended(redis: RunningStore, run_id: str) -> None:
    run = Run(redis, run_id)
    agent = run.start((1, 1))
    until(one_world([agent]), 30)
    agent.end()
    what, text = check_store(redis, "-i", run_id, closed_ttl="77").only("warning")
    assert what == "run"
    assert f"'{run_id}' is held by a run that has ended (" in text
    # As long as the run left it, not as this job's closed_ttl says.
    _, _, left = text.partition("its id is free in ")
    assert left.endswith(
        f" s; now: rdzv clean -i {run_id} -b redis -e {redis.endpoint}; else use another --rdzv-id"
    ), text
    assert 0 < int(left.partition(" ")[0]) <= 60


def test_id_of_the_other_handler(redis: RunningStore, run_id: str) -> None:
    with closing(redis.open(run_id)) as client:
        client.put(KeyValueBackend.KEY, b"a pickle, which is never loaded")
        assert "handler=torch" in check_store(redis, "-i", run_id).only("warning")[1]
        assert check_store(redis, "-i", run_id, handler="torch").only("unknown")[0] == "run"


# Members that the agents run.

THREE = "127.0.0.31,127.0.0.32,127.0.0.33"

StartMembers = Callable[..., None]


@pytest.fixture
def members(run_id: str) -> Iterator[StartMembers]:
    """Starts members of the run as ``rdzv serve quorum`` does: by their hosts."""
    client, begun = client_class("quorum"), []

    def start(*hosts: str, endpoint: str = THREE, run: str = run_id, **config: str) -> None:
        options = client.of_run(parse_options(client.options, config, os.environ), run)
        for host in hosts:
            begun.append(client.attend(endpoint, options, host, run))
        for attendance in begun:
            assert attendance is not None
            assert until(attendance.member_runs, 30)

    yield start
    for attendance in begun:
        assert attendance is not None
        attendance.hurry()
    for attendance in begun:
        assert attendance is not None
        attendance.close()


def check_quorum(run_id: str | None, *more: str, endpoint: str = THREE, conf: str = "") -> Told:
    """From the first of the hosts."""
    named = ["-i", run_id] if run_id else []
    at = ["-b", "quorum", "-e", endpoint, "--local-addr", "127.0.0.31"]
    return check(*at, *named, "-c", f"heartbeat_timeout=5{conf}", *more)


def of_member(told: Told) -> list[tuple[str, str]]:
    """The mark and the text of each line of a member."""
    return [(mark, rest) for mark, what, rest in told.lines if what == "member"]


def ports_of(run_id: str) -> list[int]:
    options = QuorumClient.of_run(Options(), run_id)
    return Members.of(THREE, options).ports(0)


def test_quorum_before_the_job(run_id: str) -> None:
    told = check_quorum(run_id)
    assert told.of("secret")[0] == "ok"
    assert of_member(told) == [
        ("ok", "this host is '127.0.0.31': an agent started here runs a member, at 127.0.0.31"),
        ("unknown", "'127.0.0.32' runs none yet"),
        ("unknown", "'127.0.0.33' runs none yet"),
    ]
    port = ports_of(run_id)[0]
    assert told.of("ports") == (
        "ok", f"the member of this host will listen on {port} at 127.0.0.31"
    )  # fmt: skip
    mark, text = told.of("store")
    assert mark == "unknown"
    assert "0 of 3 members answer, which is no majority yet" in text
    # The warning is about 127.0.0.31 alone.
    assert told.only("warning")[0] == "address"


def test_quorum_once_a_majority_runs(
    run_id: str, members: StartMembers, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("RDZV_PLUGINS_SECRET", "of all nodes and commands")
    members("127.0.0.31", "127.0.0.33")
    told = check_quorum(run_id, "--nnodes", "1:3")
    assert "the member of this host runs already" in told.of("ports")[1]
    assert of_member(told)[1:] == [
        ("unknown", "'127.0.0.32' runs none yet"), ("ok", "'127.0.0.33' answers")
    ]  # fmt: skip
    assert told.of("members") == (
        "warning",
        "2 of 3 members of the store are up; it survives no further loss; start the "
        "agents of the other hosts",
    )
    made = {what: mark for mark, what, _ in told.lines}
    tried = ("store", "rights", "largest value", "contention", "latency", "wake-up")
    assert {made[what] for what in tried} == {"ok"}, told.lines
    assert told.of("TLS") == ("ok", "plain, not encrypted: members and clients have no TLS")
    assert told.of("run")[1] == f"'{run_id}' is free"
    assert told.verdict.startswith("verdict: a job works")
    monkeypatch.setenv("RDZV_PLUGINS_SECRET", "of another")
    told = check_quorum(run_id)
    assert told.of("store")[1].startswith("not tried: 0 of 3 members answer")
    secret = "'127.0.0.33' has another secret; give all nodes and commands the same secret"
    assert any(text.startswith(secret) for _, text in of_member(told))


def test_quorum_of_one_and_of_two_hosts(run_id: str, members: StartMembers) -> None:
    told = check_quorum(run_id, endpoint="127.0.0.31")
    assert told.of("members")[0] == "warning"
    assert "0 of 1 members answer" in told.of("store")[1]
    members("127.0.0.31", endpoint="127.0.0.31")
    told = check_quorum(run_id, endpoint="127.0.0.31")
    assert (told.of("store")[0], told.of("rights")[0]) == ("ok", "ok")
    what, text = check_quorum(run_id, endpoint="127.0.0.31,127.0.0.32").only("failed")
    assert what == "store"
    assert "names 2 hosts: name one, three or five" in text


def test_quorum_whose_ports_others_have(run_id: str, members: StartMembers) -> None:
    first, second, third = ports_of(run_id)
    with ExitStack() as stack:
        stack.enter_context(closing(socket.create_server(("127.0.0.31", first))))
        mark, text = check_quorum(run_id).of("ports")
        assert mark == "ok"
        assert text.startswith(f"the member of this host will listen on {second} at 127.0.0.31; ")
        assert text.endswith(f"{first} at 127.0.0.31 is another program's")
        other = f"127.0.0.31:{second},127.0.0.32,127.0.0.33"
        members("127.0.0.31", endpoint=other, run="another")
        mark, text = check_quorum(run_id).of("ports")
        assert mark == "ok"
        assert text.startswith(f"the member of this host will listen on {third} at 127.0.0.31; ")
        assert f"{second} at 127.0.0.31 is another store's: 'another of 3 hosts' is there" in text
        stack.enter_context(closing(socket.create_server(("127.0.0.31", third))))
        told = check_quorum(run_id)
        what, text = told.only("failed")
        assert what == "ports"
        assert text.startswith("none is free for the member: ")
        assert text.endswith(": name others with ports=..., or in the endpoint")
        assert check_quorum(run_id, conf=",ports=29700-29799").of("ports")[0] == "ok"


def test_quorum_of_names_that_nobody_knows_yet(run_id: str) -> None:
    told = check_quorum(run_id, endpoint="127.0.0.31,b.invalid,c.invalid")
    unknown = "is no name that this host knows; check the spelling, and this host's DNS or /etc/h"
    assert [mark for mark, text in of_member(told) if unknown in text] == ["unknown"] * 2
    assert {mark for mark, *_ in told.lines} == {"ok", "unknown", "warning"}
    told = check_quorum(run_id, endpoint="a.invalid,b.invalid,c.invalid")
    assert of_member(told)[0][1].startswith("not known whether this host is one of a.invalid,b.inv")
    assert "ports" not in {what for _, what, _ in told.lines}


def test_quorum_seen_by_a_host_that_runs_no_member(run_id: str) -> None:
    told = check_quorum(run_id, endpoint="127.0.0.41,127.0.0.42,127.0.0.43")
    assert of_member(told)[0][1].startswith(
        "this host is none of 127.0.0.41,127.0.0.42,127.0.0.43: it runs no member; if it is one, "
    )
    assert len(of_member(told)) == 4


def test_quorum_without_a_run() -> None:
    mark, text = check_quorum(None).of("store")
    assert mark == "unknown"
    assert text.endswith("name the run with -i")
