"""Secrets and certificates that are replaced while a job runs; the old ones end at once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis

from rdzv_plugins.kv import AccessDeniedError, Entry, RendezvousConnectionError, Version
from rdzv_plugins.stores import open_client
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background
from tests import Measure
from tests.integration import topologies
from tests.integration.credentials import ADMINISTRATORS, Administrator, Certificates, administered
from tests.integration.jobs import Run
from tests.integration.stores import GUARDED, Kind, RunningStore, absent, started
from tests.integration.test_dashboard import record, write_run
from tests.integration.test_exporter import exporter, page
from tests.servers import NotInstalledError, Security
from tests.servers.dynamodb import DynamoDB
from tests.servers.process import HOST, ServerProcess, free_ports

# Seconds within which a client is let in again, a server's restart included.
SOON = 20.0

T = TypeVar("T")


@pytest.fixture(params=ADMINISTRATORS, ids=lambda kind: kind.name)
def administrator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Administrator]:
    with administered(request.param, tmp_path) as administrator:
        yield administrator


def test_client_goes_on_with_the_new_secret(
    administrator: Administrator, run_id: str, record_property: Measure
) -> None:
    client = administrator.store.open(run_id)

    def park(version: Version) -> Background[Entry | None]:
        # It has a connection of its own.
        return Background(lambda: patiently(lambda: client.wait("key", version, 60)))

    try:
        waiting = park(client.put("key", b"value"))
        assert not waiting.done(0.3)
        for number in range(2):
            administrator.rotate()
            began = time.monotonic()
            patiently(lambda: client.put("other", b"value"))
            record_property("let in again after, s", round(time.monotonic() - began, 2))
            newcomer = administrator.store.open(run_id)
            newcomer.put("key", b"%d" % number)
            newcomer.close()
            found = waiting.result(SOON)
            assert found is not None
            assert found.value == b"%d" % number
            waiting = park(found.version)
    finally:
        client.close()


def test_a_client_that_has_the_new_secret_first_is_not_refused(
    administrator: Administrator, run_id: str
) -> None:
    """The server cuts their connections; what is under way goes on with the new secret."""
    with closing(administrator.store.open(run_id)) as client:
        for number in range(3):
            version = client.put("key", b"%d" % number)
            waiting = Background(lambda: client.wait("key", version, 60))  # noqa: B023
            assert not waiting.done(0.3)
            administrator.secret = str(uuid.uuid4())
            administrator.hand_out()
            administrator.change()
            client.put("key", b"value")
            found = waiting.result(SOON)
            assert found is not None
            assert found.value == b"value"


def test_secret_that_is_away_costs_attempts(administrator: Administrator, run_id: str) -> None:
    with closing(administrator.store.open(run_id, request_timeout=1)) as client:
        client.put("key", b"value")
        for content in (None, ""):
            administrator.file.unlink()
            if content is not None:
                administrator.file.write_text(content)
            administrator.rotate(hand_out=False)
            for request in (lambda: client.get("key"), lambda: administrator.store.open(run_id)):
                with pytest.raises(RendezvousConnectionError, match="is it being replaced") as told:
                    request()
                assert not isinstance(told.value, AccessDeniedError)
                assert "\n" not in str(told.value)
                assert f"'{administrator.file}'" in str(told.value)
            administrator.hand_out()
            patiently(lambda: client.get("key"))
            administrator.store.open(run_id).close()


class Rotating:
    """A store behind TLS whose authority and certificates are replaced.

    Attributes:
        store: its clients' files stay at their paths.
    """

    def __init__(self, store: RunningStore, folder: Path) -> None:
        self._folder = folder
        self._server = store.server
        paths = {name: str(folder / name) for name in ("ca_file", "cert_file", "key_file")}
        self.store = replace(store, config={**store.config, **paths})

    def hand_out(self, certificates: Certificates, *names: str) -> None:
        """Write the clients' files, or those of these names."""
        client = certificates.client
        files = {
            "ca_file": certificates.ca_file,
            "cert_file": client.cert_file,
            "key_file": client.key_file,
        }
        for name in names or files:
            (self._folder / name).touch(0o600)
            (self._folder / name).write_bytes(Path(files[name]).read_bytes())

    def restart(self, certificates: Certificates) -> None:
        """Start the server anew with other certificates."""
        assert self._server is not None
        (node,) = self._server.nodes
        node.stop()
        node._kind.security = security(certificates)
        node.start()


def security(certificates: Certificates) -> Security:
    return certificates.security(client=True)


@pytest.mark.parametrize("kind", GUARDED, ids=lambda kind: kind.name)
def test_client_goes_on_with_the_new_certificates(
    kind: Kind, run_id: str, tmp_path: Path, record_property: Measure
) -> None:
    for name in ("old", "new", "clients"):
        (tmp_path / name).mkdir()
    old, new = Certificates.make(tmp_path / "old"), Certificates.make(tmp_path / "new")
    with started(kind, security=security(old)) as store:
        rotating = Rotating(store, tmp_path / "clients")
        rotating.hand_out(old)
        with closing(rotating.store.open(run_id, request_timeout=2)) as client:
            client.put("key", b"value")
            rotating.restart(new)
            # It trusts the old authority only.
            with pytest.raises(RendezvousConnectionError) as told:
                client.get("key")
            assert not isinstance(told.value, AccessDeniedError)
            # The certificate does not fit the key yet.
            rotating.hand_out(new, "ca_file", "cert_file")
            with pytest.raises(RendezvousConnectionError, match="is it being replaced"):
                client.get("key")
            with pytest.raises(RendezvousConnectionError, match="is it being replaced"):
                rotating.store.open(run_id)
            rotating.hand_out(new)
            began = time.monotonic()
            patiently(lambda: client.put("key", b"another"))
            record_property("let in again after, s", round(time.monotonic() - began, 2))
            rotating.store.open(run_id).close()
            # The server refuses a client that still shows the old certificate.
            rotating.hand_out(old, "cert_file", "key_file")
            with pytest.raises(AccessDeniedError):
                rotating.store.open(run_id)


def patiently(request: Callable[[], T], seconds: float = SOON) -> T:
    """What a node does: it tries again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return request()
        except RendezvousConnectionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


# Redis in every run; the others, where clients alone show it too, in the long one.
@pytest.mark.parametrize(
    "administrator",
    [
        pytest.param(kind, id=kind.name, marks=() if kind.name == "redis" else pytest.mark.soak)
        for kind in ADMINISTRATORS
    ],
    indirect=True,
)
def test_old_nodes_and_a_late_one_meet(
    administrator: Administrator, tmp_path: Path, record_property: Measure
) -> None:
    """Two train; the password is replaced, and a third comes: one world of three."""
    with closing(Run(tmp_path / "run", administrator.store, nodes="1:3")) as run:
        run.begin("ab")
        administrator.rotate()
        began = time.monotonic()
        run.start_at("c")
        run.await_world("abc")
        record_property("one world after, s", round(time.monotonic() - began, 2))
        assert run.split() is None


def test_redis_cluster_goes_on_with_the_new_secret(tmp_path: Path, run_id: str) -> None:
    with topologies.cluster(tmp_path / "servers") as topology:
        first, _, port = topology.endpoint.partition(",")[0].rpartition(":")
        members: Any = redis.RedisCluster(first, int(port))
        file = tmp_path / "secret"

        def let_in(*rights: str) -> None:
            secret = str(uuid.uuid4())
            for member in map(members.get_redis_connection, members.get_nodes()):
                set_user = ["ACL", "SETUSER", "joe", "on", "resetpass", f">{secret}"]
                member.execute_command(*set_user, *rights)
                member.execute_command("CLIENT", "KILL", "USER", "joe")
            file.write_text(secret)

        let_in("~*", "&*", "+@all")
        config = {**topology.config, "user": "joe", "password_file": str(file)}
        with closing(open_client("redis", topology.endpoint, run_id, config)) as client:
            client.put("key", b"value")
            let_in()
            patiently(lambda: client.put("key", b"another"))
            open_client("redis", topology.endpoint, run_id, config).close()


class _OneDatabaseForEachKey(DynamoDB):
    """It checks no credentials, but without -sharedDb each access key has tables of its own."""

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        return [part for part in super().command(node, nodes) if part != "-sharedDb"]


@pytest.mark.soak
def test_dynamodb_reads_the_file_of_keys_again(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def hand_out(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = x\n")

    hand_out("old")
    try:
        kind = _OneDatabaseForEachKey(Security())
    except NotInstalledError as error:
        absent(f"no DynamoDB of our own: {error}")
    (port,) = free_ports(1)
    node = ServerProcess(kind, 0, [port], tmp_path / "server")
    node.start()
    try:
        config = {"create_table": "true", "region": "us-east-1"}
        with closing(
            open_client("dynamodb", f"http://{HOST}:{port}", run_id, config, request_timeout=20)
        ) as client:
            client.put("key", b"of the old key")
            hand_out("new")
            assert client.get("key") is None
            client.put("key", b"of the new key")
            # Half a file is an attempt that fails, not an end.
            file.write_text("[default\n")
            with pytest.raises(RendezvousConnectionError, match="is it being replaced"):
                client.get("key")
            hand_out("old")
            found = client.get("key")
            assert found is not None
            assert found.value == b"of the old key"
    finally:
        node.end()


def test_commands_that_go_on_follow(tmp_path: Path, record_property: Measure) -> None:
    """An exporter opens connections while the file is away, and lives on."""
    kind = next(kind for kind in ADMINISTRATORS if kind.name == "redis")
    with administered(kind, tmp_path) as administrator:
        store = administrator.store
        with exporter(store) as address:
            write_run(store, "early", {"a": record(1, "10.0.0.1")})
            assert until(lambda: "run 'early'" in page(f"{address}/why"), 30)
            administrator.file.unlink()
            administrator.rotate(hand_out=False)
            assert until(lambda: "is it being replaced" in page(f"{address}/why"), 30)
            administrator.hand_out()
            began = time.monotonic()
            write_run(store, "late", {"a": record(1, "10.0.0.1")})
            assert until(lambda: "run 'late'" in page(f"{address}/why"), 30)
            assert "the store is away" not in page(f"{address}/why")
            record_property("follows after, s", round(time.monotonic() - began, 2))
