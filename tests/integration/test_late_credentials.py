"""Credentials that come after the agent: the metadata service of a host that boots."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.kv import LateCredentialsError
from rdzv_plugins.servers.process import HOST, free_ports, release
from rdzv_plugins.testing.harness import until as until_true
from rdzv_plugins.testing.threads import Background
from tests.integration.agents import Run, one_world, until
from tests.integration.stores import KINDS, RunningStore, started

CREDENTIALS = "/latest/meta-data/iam/security-credentials/"
KEYS = {
    "Code": "Success",
    "Type": "AWS-HMAC",
    "AccessKeyId": "local",
    "SecretAccessKey": "local",
    "Token": "token",
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


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningStore]:
    """A table that is there, on a host without credentials."""
    with started(next(kind for kind in KINDS if kind.name == "dynamodb")) as store:
        store.open("first").close()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        yield store


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of the metadata service, once there is one."""
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{HOST}:{port}/")
    yield port
    release([port])


def test_an_agent_waits_for_its_credentials(
    store: RunningStore, port: int, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(store, run_id)
    starting = [Background(lambda: run.start((2, 2))) for _ in range(2)]
    try:
        assert until_true(lambda: caplog.text.count("this node cannot join yet: ") == 2, 20)
        assert not any(each.done(1) for each in starting)
        with metadata(port):
            agents = [each.result(20) for each in starting]
            until(one_world(agents), 30)
    finally:
        for agent in run.agents:
            agent.end()
    assert "without credentials (Unable to locate credentials); set $AWS_PROFILE" in caplog.text
    assert caplog.text.count("this node cannot join yet: ") == 2, "once a node"


def test_it_waits_no_longer_than_join_timeout(store: RunningStore, port: int, run_id: str) -> None:
    began = time.monotonic()
    with pytest.raises(LateCredentialsError, match="give this host a role") as caught:
        Run(store, run_id).handler((1, 1), join_timeout="3")
    assert 3 <= time.monotonic() - began < 15
    assert "\n" not in str(caught.value)


def test_a_command_does_not_wait(store: RunningStore, port: int, run_id: str) -> None:
    with pytest.raises(LateCredentialsError, match="Unable to locate credentials"):
        store.open(run_id)
