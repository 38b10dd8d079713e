"""Credentials that come after the agent: the metadata service of a host that boots."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.kv import KeyValueClient, LateCredentialsError, RendezvousConnectionError
from rdzv_plugins.testing.harness import until as until_true
from rdzv_plugins.testing.threads import Background
from tests.integration.agents import Run, one_world, until
from tests.integration.stores import KINDS, RunningStore
from tests.servers.process import HOST, free_ports, release

CREDENTIALS = "/latest/meta-data/iam/security-credentials/"
KEYS = {
    "Code": "Success",
    "Type": "AWS-HMAC",
    "AccessKeyId": "rdzv",
    "SecretAccessKey": "rdzv-local",
    "Token": "",  # SeaweedFS knows no session of that name.
    "LastUpdated": "2020-01-01T00:00:00Z",
    "Expiration": "2099-01-01T00:00:00Z",
}


class Metadata(BaseHTTPRequestHandler):
    """What a host in EC2 is told: a token, the name of its role, and the keys of that."""

    def do_PUT(self) -> None:
        self._answer("a-token")

    def do_GET(self) -> None:
        self._answer("a-role" if self.path == CREDENTIALS else json.dumps(KEYS))

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("X-aws-ec2-metadata-token-ttl-seconds", "21600")
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def metadata(port: int) -> Iterator[None]:
    with ThreadingHTTPServer((HOST, port), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


pytestmark = pytest.mark.parametrize(
    "running_store",
    [kind for kind in KINDS if kind.name in ("dynamodb", "s3")],
    ids=lambda kind: kind.name,
    indirect=True,
)


@pytest.fixture
def store(
    running_store: RunningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunningStore:
    """A table or a bucket that is there, on a host without credentials."""
    running_store.open("first").close()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    return running_store


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of the metadata service, once there is one."""
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{HOST}:{port}/")
    yield port
    release([port])


def test_an_agent_waits_for_its_credentials(
    store: RunningStore, port: int, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(store, run_id) as run:
        starting = [Background(lambda: run.start((2, 2))) for _ in range(2)]
        assert until_true(lambda: caplog.text.count("this node cannot join yet: ") == 2, 20)
        assert not any(each.done(1) for each in starting)
        with metadata(port):
            agents = [each.result(20) for each in starting]
            until(one_world(agents), 30)
    assert "without credentials (" in caplog.text
    assert "Unable to locate credentials" in caplog.text
    assert caplog.text.count("this node cannot join yet: ") == 2, "once a node"


def test_an_agent_waits_no_longer_than_join_timeout(
    store: RunningStore, port: int, run_id: str
) -> None:
    began = time.monotonic()
    with pytest.raises(LateCredentialsError, match="give this host a role") as caught:
        Run(store, run_id).handler((1, 1), join_timeout="3")
    assert 3 <= time.monotonic() - began < 15
    assert "\n" not in str(caught.value)


def test_a_command_does_not_wait(store: RunningStore, port: int, run_id: str) -> None:
    with pytest.raises(LateCredentialsError, match="Unable to locate credentials"):
        store.open(run_id)


def test_a_process_without_credentials_yet(
    store: RunningStore, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a host's role, or of a container's, it may answer later."""
    keys, config = tmp_path / "keys", tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = cat {keys}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with pytest.raises(LateCredentialsError, match="No such file"):
        store.open(run_id)
    keys.write_text(json.dumps({"Version": 1} | {it: KEYS[it] for it in KEYS if "Key" in it}))
    store.open(run_id).close()


def test_a_profile_that_changes_is_read_again(
    store: RunningStore, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Refused keys are replaced while the client lives; a session's are told of."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "training")
    keys = "[training]\naws_access_key_id=rdzv\naws_secret_access_key="
    file.write_text(f"{keys}rdzv-local\n")
    with closing(store.open(run_id)) as client:
        client.put("key", b"one")
        assert "are a session's" not in caplog.text
        if store.name == "s3":  # The other's server accepts any.
            file.write_text(f"{keys}wrong\n")
            assert until_true(lambda: not _puts(client), 20)
            file.write_text(f"{keys}rdzv-local\n")
            assert until_true(lambda: _puts(client), 20)
    file.write_text(f"{keys}rdzv-local\naws_session_token=token\n")
    with suppress(RendezvousConnectionError):  # SeaweedFS knows no such session.
        store.open(run_id).close()
    assert "(shared-credentials-file) are a session's, and nothing renews them" in caplog.text


def _puts(client: KeyValueClient) -> bool:
    try:
        client.put("key", b"two")
    except RendezvousConnectionError:
        return False
    return True
