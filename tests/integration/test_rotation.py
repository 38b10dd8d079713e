"""Secrets and certificates that are replaced while a job runs; the old ones end at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from rdzv_plugins.kv import AccessDeniedError, Entry, RendezvousConnectionError, Version
from rdzv_plugins.servers import Security
from rdzv_plugins.testing.threads import Background
from tests import Measure
from tests.integration.administrators import ADMINISTRATORS, Administrator, administered
from tests.integration.certificates import Certificates
from tests.integration.stores import KINDS, Kind, RunningStore, started
from tests.integration.torchrun import Run

# Seconds within which a client is let in again, a server's restart included.
SOON = 20.0

TLS_KINDS = [kind for kind in KINDS if kind.name not in ("valkey", "dynamodb")]

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


def test_secret_that_is_away_costs_attempts(administrator: Administrator, run_id: str) -> None:
    client = administrator.store.open(run_id, request_timeout=1)
    try:
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
    finally:
        client.close()


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


@pytest.mark.parametrize("kind", TLS_KINDS, ids=lambda kind: kind.name)
def test_client_goes_on_with_the_new_certificates(
    kind: Kind, run_id: str, tmp_path: Path, record_property: Measure
) -> None:
    for name in ("old", "new", "clients"):
        (tmp_path / name).mkdir()
    old, new = Certificates.make(tmp_path / "old"), Certificates.make(tmp_path / "new")
    with started(kind, security=security(old)) as store:
        rotating = Rotating(store, tmp_path / "clients")
        rotating.hand_out(old)
        client = rotating.store.open(run_id, request_timeout=2)
        try:
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
            # Who still shows the old certificate is refused by the server.
            rotating.hand_out(old, "cert_file", "key_file")
            with pytest.raises(AccessDeniedError):
                rotating.store.open(run_id)
        finally:
            client.close()


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


def test_old_nodes_and_a_late_one_meet(tmp_path: Path, record_property: Measure) -> None:
    """Two train; the password is replaced, and a third comes: one world of three."""
    redis = next(kind for kind in ADMINISTRATORS if kind.name == "redis")
    with administered(redis, tmp_path) as administrator:
        run = Run(tmp_path / "run", administrator.store, nodes="1:3")
        try:
            run.begin("ab")
            administrator.rotate()
            began = time.monotonic()
            run.start_at("c")
            run.await_world("abc")
            record_property("one world after, s", round(time.monotonic() - began, 2))
            assert run.split() is None
        finally:
            run.close()
