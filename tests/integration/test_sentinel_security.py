"""Sentinels that demand a user, a password and TLS of their own, other than their servers'."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from rdzv_plugins.kv import AccessDeniedError, RendezvousConnectionError
from rdzv_plugins.testing.harness import until
from tests.integration import topologies
from tests.integration.credentials import Certificates
from tests.integration.stores import RunningStore
from tests.integration.topologies import Topology
from tests.servers import Security

SERVERS, SENTINELS = secrets.token_hex(8), secrets.token_hex(8)


@pytest.fixture(autouse=True)
def of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_PLUGINS_PASSWORD", SERVERS)


@pytest.fixture
def topology(tmp_path: Path) -> Iterator[Topology]:
    with topologies.sentinel(tmp_path, SERVERS, Security(user="joe", password=SENTINELS)) as it:
        yield it


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(SENTINELS)
    return file


def store_of(topology: Topology, **config: str) -> RunningStore:
    return RunningStore(
        name="redis",
        backend="redis",
        endpoint=topology.endpoint,
        config={**topology.config, **config},
    )


def test_log_in_of_their_own(
    topology: Topology, file: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_of(topology, sentinel_user="joe", sentinel_password_file=str(file)).open(run_id).close()
    monkeypatch.setenv("RDZV_PLUGINS_SENTINEL_PASSWORD", SENTINELS)
    store_of(topology, sentinel_user="joe").open(run_id).close()


@pytest.mark.parametrize("config", [{}, {"sentinel_user": "jim"}])
def test_refusal_of_the_sentinels(
    topology: Topology, run_id: str, config: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if config:
        monkeypatch.setenv("RDZV_PLUGINS_SENTINEL_PASSWORD", "hunter2")
    with pytest.raises(AccessDeniedError, match="do they accept the password") as refusal:
        store_of(topology, **config).open(run_id, request_timeout=3)
    assert topology.endpoint in str(refusal.value)
    assert "hunter2" not in repr(refusal.value)
    assert SERVERS not in repr(refusal.value)


def test_one_sentinel_refuses_and_another_is_silent(topology: Topology, run_id: str) -> None:
    both = replace(store_of(topology), endpoint=f"127.0.0.1:1,{topology.endpoint}")
    with pytest.raises(AccessDeniedError):
        both.open(run_id, request_timeout=3)


def test_sentinels_that_know_no_primary_refuse_nobody(tmp_path: Path, run_id: str) -> None:
    """They demand no password, and refuse the servers' one: that tells nothing of this client."""
    with topologies.sentinel(tmp_path, SERVERS) as topology:
        store = store_of(topology, sentinel="inference")
        with pytest.raises(RendezvousConnectionError, match="knows no 'inference'") as told:
            store.open(run_id, request_timeout=3)
    assert not isinstance(told.value, AccessDeniedError)


def test_their_password_is_replaced(topology: Topology, file: Path, run_id: str) -> None:
    store = store_of(topology, sentinel_user="joe", sentinel_password_file=str(file))
    host, _, port = topology.endpoint.rpartition(":")
    with closing(store.open(run_id, request_timeout=2)) as client:
        client.put("key", b"value")
        new = secrets.token_hex(8)
        admin: Any = redis.Redis(host, int(port), username="joe", password=SENTINELS)
        admin.execute_command("ACL", "SETUSER", "joe", "resetpass", f">{new}")
        topology.primary(run_id).kill()
        # A client that has lost the primary asks the Sentinels anew.
        admin.execute_command("CLIENT", "KILL", "USER", "joe")
        with pytest.raises(AccessDeniedError):
            client.put("key", b"another")
        file.write_text(new)

        def goes_on() -> bool:
            try:
                client.put("key", b"another")
            except RendezvousConnectionError:
                return False
            return True

        assert until(goes_on, 30)
        store.open(run_id).close()


def test_tls_of_their_own(tmp_path: Path, run_id: str) -> None:
    certificates = Certificates.make(tmp_path)
    own = replace(certificates.security(), user="joe", password=SENTINELS)
    (tmp_path / "secret").write_text(SENTINELS)
    with topologies.sentinel(tmp_path, SERVERS, own) as topology:
        config = {
            "sentinel_user": "joe",
            "sentinel_password_file": str(tmp_path / "secret"),
            "sentinel_tls": "true",
            "ca_file": certificates.ca_file,
        }
        store_of(topology, **config).open(run_id).close()
        distrusting = config | {"ca_file": certificates.foreign_ca_file}
        with pytest.raises(RendezvousConnectionError, match="TLS handshake") as told:
            store_of(topology, **distrusting).open(run_id, request_timeout=3)
        assert not isinstance(told.value, AccessDeniedError)
