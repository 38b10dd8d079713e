"""What only NATS has: its ways to log in, its buckets, and a cluster of which one server hangs."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import nkeys
import pytest
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.kv import AccessDeniedError, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.testing.harness import present, until
from rdzv_plugins.testing.threads import together
from tests.integration.stores import RunningStore, kind_of, started
from tests.integration.test_security import form_a_round
from tests.servers import Security, ServerProcess
from tests.servers.nats import Nats
from tests.servers.process import HOST, free_ports

Patch = pytest.MonkeyPatch


@contextmanager
def configured(folder: Path, settings: Mapping[str, Any]) -> Iterator[RunningStore]:
    """A server with these settings besides the usual ones."""

    class Configured(Nats):
        def command(self, node: ServerProcess, nodes: Any) -> list[str]:
            command = super().command(node, nodes)
            file = Path(command[-1])
            file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
            return command

    kind = Configured(Security())
    node = ServerProcess(kind, 0, free_ports(kind.ports_per_node), folder / "nats" / "0")
    node.launch()
    try:
        node.await_ready()
        yield RunningStore(
            name="nats", backend="nats", endpoint=f"{HOST}:{node.port}", config=kind.config()
        )
    finally:
        node.end()


def works(store: RunningStore, run_id: str, **config: str) -> None:
    with closing(replace(store, config={**store.config, **config}).open(run_id)) as client:
        client.put("key", b"value")
        assert client.wait("key", None, 5) is not None


def administer(store: RunningStore, do: Callable[[Any], Awaitable[object]]) -> None:
    """Do something with JetStream as an administrator."""

    async def connected() -> None:
        connection = await nats.connect(f"nats://{store.endpoint}")
        await do(connection.jetstream())
        await connection.close()

    asyncio.run(connected())


def test_a_token(tmp_path: Path, run_id: str, monkeypatch: Patch) -> None:
    with configured(tmp_path, {"authorization": {"token": "a-token"}}) as store:
        with pytest.raises(AccessDeniedError, match="RDZV_PLUGINS_TOKEN"):
            store.open(run_id)
        file = tmp_path / "token"
        file.write_text("a-token\n")
        works(store, run_id, token_file=str(file))
        works(replace(store, endpoint=f"nats://a-token@{store.endpoint}"), run_id)
        monkeypatch.setenv("RDZV_PLUGINS_TOKEN", "a-token")
        works(store, run_id)


def test_no_output_shows_a_token_of_the_endpoint(
    tmp_path: Path, run_id: str, caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    caplog.set_level(logging.DEBUG)
    with configured(tmp_path, {"authorization": {"token": "hunter2"}}) as store:
        store = replace(store, endpoint=f"nats://hunter2@{store.endpoint}")
        form_a_round(store, run_id)
        where = ["-b", "nats", "-e", store.endpoint]
        told = {
            name: CliRunner().invoke(app, [name, *where, *arguments])
            for name, arguments in {
                "check": ["--rdzv-conf", "create_bucket=true"], "runs": ["--json"],
                "status": ["-i", run_id], "history": ["-i", run_id],
            }.items()
        }  # fmt: skip
        assert "other users of each host see it" in told["check"].output
        assert "set $RDZV_PLUGINS_TOKEN" in told["check"].output
        command = [sys.executable, "-m", "rdzv_plugins.cli", "dashboard", "--port=0", *where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
            try:
                assert page.stdout is not None
                line = page.stdout.readline()
                with urllib.request.urlopen(f"{line.split()[0]}/api/runs") as answer:
                    line += answer.read().decode()
            finally:
                page.kill()
        shown = line + caplog.text + "".join(f"{it.output}{it.exception}" for it in told.values())
    # The server is gone.
    shown += CliRunner().invoke(app, ["runs", *where]).output
    assert f"nats://***@{store.endpoint.partition('@')[2]}" in shown
    assert "hunter2" not in shown


def seed(prefix: int) -> bytes:
    made: bytes = nkeys.encode_seed(secrets.token_bytes(32), prefix)
    return made


def public(of: bytes) -> str:
    key: bytes = nkeys.from_seed(bytearray(of)).public_key
    return key.decode()


def test_an_nkey(tmp_path: Path, run_id: str) -> None:
    user = seed(nkeys.PREFIX_BYTE_USER)
    with configured(tmp_path, {"authorization": {"users": [{"nkey": public(user)}]}}) as store:
        file = tmp_path / "user.nk"
        file.write_bytes(user)
        works(store, run_id, nkey_file=str(file))
        file.write_bytes(seed(nkeys.PREFIX_BYTE_USER))
        with pytest.raises(AccessDeniedError):
            works(store, run_id, nkey_file=str(file))


def signed(by: bytes, of: str, claims: Mapping[str, Any]) -> str:
    """A JWT as nsc makes it."""

    def part(what: bytes) -> str:
        return base64.urlsafe_b64encode(what).decode().rstrip("=")

    body = {
        "jti": secrets.token_hex(8), "iat": int(time.time()), "iss": public(by), "sub": of,
        "nats": claims,
    }  # fmt: skip
    header = {"typ": "JWT", "alg": "ed25519-nkey"}
    text = ".".join(part(json.dumps(it).encode()) for it in (header, body))
    return f"{text}.{part(nkeys.from_seed(bytearray(by)).sign(text.encode()))}"


def test_a_file_of_credentials(tmp_path: Path, run_id: str) -> None:
    operator = seed(nkeys.PREFIX_BYTE_OPERATOR)
    account, user = seed(nkeys.PREFIX_BYTE_ACCOUNT), seed(nkeys.PREFIX_BYTE_USER)
    unlimited = {
        "subs": -1, "data": -1, "payload": -1, "conn": -1, "leaf": -1, "imports": -1,
        "exports": -1, "wildcards": True,
    }  # fmt: skip
    of_jetstream = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    # The servers' own may have no JetStream.
    of_system = {"type": "account", "version": 2, "limits": unlimited}
    of_account = {**of_system, "limits": unlimited | of_jetstream}
    of_user = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}
    system = public(seed(nkeys.PREFIX_BYTE_ACCOUNT))
    settings = {
        "operator": signed(operator, public(operator), {"type": "operator", "version": 2}),
        "system_account": system,
        "resolver": "MEMORY",
        "resolver_preload": {
            public(account): signed(operator, public(account), of_account),
            system: signed(operator, system, of_system),
        },
    }
    file = tmp_path / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\n{signed(account, public(user), of_user)}\n"
        "------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.decode()}\n------END USER NKEY SEED------\n"
    )
    with configured(tmp_path, settings) as store:
        works(store, run_id, credentials_file=str(file))
        with pytest.raises(AccessDeniedError):
            store.open(run_id)


def test_a_bucket_that_is_not_there(tmp_path: Path, run_id: str) -> None:
    with configured(tmp_path, {}) as store:
        with pytest.raises(RendezvousStateError, match="has no bucket 'rdzv'; create it, with"):
            replace(store, config={}).open(run_id)
        # All nodes of a job create it at once.
        for client in together([lambda: store.open(run_id) for _ in range(8)]):
            client.close()
        works(replace(store, config={}), run_id)


def test_a_bucket_that_does_not_republish(tmp_path: Path, run_id: str) -> None:
    with configured(tmp_path, {}) as store:
        administer(store, lambda jetstream: jetstream.create_key_value(bucket="rdzv"))
        with pytest.raises(RendezvousStateError, match=r"does not republish.*nats stream edit"):
            store.open(run_id)


def test_a_server_with_a_small_payload(tmp_path: Path, run_id: str) -> None:
    with (
        configured(tmp_path, {"max_payload": 100_000}) as store,
        closing(store.open(run_id)) as client,
    ):
        client.put("key", b"x" * 90_000)
        with pytest.raises(RendezvousStateError, match="max_payload"):
            client.put("key", b"x" * 200_000)


def test_without_jetstream(tmp_path: Path, run_id: str) -> None:
    with (
        configured(tmp_path, {"jetstream": False}) as store,
        pytest.raises(RendezvousConnectionError, match="JetStream"),
    ):
        store.open(run_id, request_timeout=1)


@pytest.mark.parametrize("which", ["the one that is asked", "the leader"])
def test_one_of_three_hangs(which: str, run_id: str) -> None:
    with started(kind_of("nats"), nodes=3) as store:
        assert store.server is not None
        store.open(run_id).close()
        leader = store.server.leader()
        asked = leader if which == "the leader" else (leader + 1) % 3
        first = f"{HOST}:{store.server.nodes[asked].port}"
        alone = replace(store, endpoint=first).open(run_id)
        # Its own connection is to any of the three.
        with closing(store.open(run_id, request_timeout=20)) as client, closing(alone):
            version = client.put("key", b"one")
            store.server.nodes[asked].pause()
            try:
                began = time.monotonic()
                _, written = client.compare_and_set("key", b"two", version)
                assert written
                assert time.monotonic() - began < 20
                assert present(client.get("key")).value == b"two"
            finally:
                store.server.nodes[asked].resume()
            # A leader that was suspended answers with what it knows until it hears of another.
            assert until(lambda: present(alone.get("key")).value == b"two", 30)


def test_a_child_has_a_loop_of_its_own(tmp_path: Path, run_id: str) -> None:
    with configured(tmp_path, {}) as store, closing(store.open(run_id)) as client:
        client.put("key", b"value")
        if (child := os.fork()) == 0:
            status = 1
            try:
                with closing(store.open(run_id)) as ours:
                    status = 0 if ours.get("key") is not None else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert client.get("key") is not None
