"""Buckets: one that does not heed a condition is refused; what keeps a job from its bucket; forks;
and what a run asks, counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.kv import AccessDeniedError, KeyValueClient, RendezvousStateError
from rdzv_plugins.testing.threads import together
from tests import Measure
from tests.integration.agents import Run, one_world, until
from tests.integration.credentials import Certificates
from tests.integration.programs.gateway import Gateway, gateway
from tests.integration.stores import RunningStore, kind_of, started

KEYS = {"s3": "AWS_SECRET_ACCESS_KEY", "azure": "AZURE_STORAGE_ACCOUNT_KEY"}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def s3() -> Iterator[RunningStore]:
    with started(kind_of("s3")) as store:
        yield store


@pytest.fixture(scope="module", params=["s3", "azure"])
def bucket(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    with started(kind_of(request.param)) as store:
        yield store


@contextmanager
def behind(
    store: RunningStore, *drops: str, judges: Sequence[str] = (), tls: Sequence[str] = ()
) -> Iterator[tuple[Gateway, RunningStore]]:
    """A gateway, and the store as it is reached through it."""
    signs = store.backend == "s3"
    with gateway(store.address, drops=drops, judges=judges, signs=signs, tls=tls) as started:
        config = store.config_at(started.address)
        if tls:
            config["url"] = config["url"].replace("http:", "https:")
        yield started, replace(store, config=config)


def conf(store: RunningStore) -> str:
    return ",".join(f"{name}={value}" for name, value in store.config.items())


def check(store: RunningStore, *, patience: float = 60) -> tuple[int, str]:
    """The exit status of `rdzv check`, and what it printed."""
    # Patience with the machine: a contest is to end with one winner, not in time.
    options = f"{conf(store)},heartbeat_timeout={patience:g}"
    command = ["check", "-b", store.backend, "-e", store.endpoint, "-c", options]
    told = CliRunner().invoke(app, command)
    return told.exit_code, told.output


def test_a_gateway_that_passes_conditions_on_is_no_hindrance(s3: RunningStore) -> None:
    with behind(s3) as (_, store):
        status, told = check(store)
    assert status < 2, told
    assert "16 writers at once, 10 times: one winner each" in told, told


@pytest.mark.parametrize(
    ("drops", "named"),
    [
        (["If-None-Match"], "If-None-Match"),
        (["If-Match"], "If-Match"),
        (["If-Match", "If-None-Match"], "If-Match"),
    ],
    ids=["create", "replace", "both"],
)
def test_a_store_that_ignores_a_condition_is_refused_by_name(
    s3: RunningStore, drops: list[str], named: str
) -> None:
    with behind(s3, *drops) as (_, store):
        with pytest.raises(ValueError, match=f"s3://rdzv.* ignores {named}, or looks before"):
            Run(store, "ignored").handler((1, 2))
        status, told = check(store)
    assert status == 2
    (failed,) = (line for line in told.splitlines() if line.startswith("failed"))
    assert f" ignores {named}, or looks before it writes: " in failed


def test_an_agent_ends_with_the_line(s3: RunningStore) -> None:
    with behind(s3, "If-None-Match") as (_, store):
        ended = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=s3",
                f"--rdzv-endpoint={store.endpoint}", f"--rdzv-conf={conf(store)}",
                "--rdzv-id=ignored", "--nnodes=1:2", "--no-python", "true",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
        )  # fmt: skip
    assert ended.returncode != 0
    (line,) = (it for it in ended.stdout.splitlines() if "run 'ignored': " in it)
    assert "the store ignores If-None-Match, or looks before it writes: 2 of 2 writers" in line


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_store_that_looks_before_it_writes_is_refused(s3: RunningStore, header: str) -> None:
    """It refuses all but one of writers that come in turn: it takes two at once to tell."""
    said = f"ignores {header}, or looks before it writes: 2 of 2 writers at once wrote one object"
    with behind(s3, judges=[header]) as (_, store), pytest.raises(ValueError, match=said):
        Run(store, "looks").handler((1, 2))


AHEAD = """
import runpy, sys, time
wall, ahead = time.time, float(sys.argv.pop(1))
time.time = lambda: wall() + ahead
sys.argv[0] = "torchrun"
runpy.run_module("torch.distributed.run", run_name="__main__")
"""


def ahead_by(seconds: int, store: RunningStore, run_id: str, *arguments: str) -> list[str]:
    """torchrun on a host whose clock is ahead."""
    return [
        sys.executable, "-c", AHEAD, str(seconds), f"--rdzv-backend={store.backend}",
        f"--rdzv-endpoint={store.endpoint}", f"--rdzv-conf={conf(store)},abandoned_ttl=100",
        f"--rdzv-id={run_id}", "--local-addr=127.0.0.1", *arguments,
    ]  # fmt: skip


def test_a_clock_that_is_ahead_has_no_finished_job_trained_again(
    bucket: RunningStore, run_id: str, tmp_path: Path
) -> None:
    """An id is free after closed_ttl, a minute: with a clock 2 minutes ahead it was so at once."""
    for seconds, status in ((0, 0), (120, 1)):
        script = ["--no-python", "touch", str(tmp_path / f"{seconds}")]
        command = ahead_by(seconds, bucket, run_id, "--nnodes=1", *script)
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
        assert ended.returncode == status, ended.stderr
    assert [it.name for it in tmp_path.iterdir()] == ["0"]
    assert re.search("this host's clock is .12. s off the store's", ended.stderr)


def test_a_spare_whose_clock_is_ahead_leaves_a_live_run_alone(
    bucket: RunningStore, run_id: str
) -> None:
    """It emptied the run's folder, and took the place of a healthy node."""
    with closing(bucket.open(run_id)) as client, Run(bucket, run_id) as run:
        agents = [run.start((2, 2), abandoned_ttl="100") for _ in range(2)]
        until(one_world(agents), 30)
        client.put("ours", b"as long as the run")
        command = ahead_by(300, bucket, run_id, "--nnodes=2:2", "--no-python", "true")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as spare:
            try:
                until(lambda: len(client.list("nodes/")) == 3, 60)
                time.sleep(3)  # Some beats of each, within which it did.
            finally:
                spare.kill()
            assert spare.stderr is not None
            told = spare.stderr.read()
        assert [len(agent.rounds) for agent in agents] == [1, 1]
        assert client.get("ours") is not None
        assert re.search("this host's clock is .30. s off the store's", told)


def failed(store: RunningStore) -> str:
    """The only line of `rdzv check` about what failed."""
    status, told = check(store, patience=1)
    assert status == 2, told
    (line,) = (it for it in told.splitlines() if it.startswith("failed"))
    assert line.startswith("failed   store: "), line
    return line


def test_credentials_that_are_refused_are_not_shown(
    bucket: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = {"s3": "hunter2", "azure": "aHVudGVyMg=="}[bucket.name]
    monkeypatch.setenv(KEYS[bucket.name], secret)
    line = failed(bucket)
    assert " refused the credentials (" in line
    assert secret not in line


def test_a_client_that_is_refused_leaves_no_descriptor(
    bucket: RunningStore, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipes() -> int:
        every = (os.path.realpath(f"/proc/self/fd/{it}") for it in os.listdir("/proc/self/fd"))
        return sum("pipe:" in it for it in every)

    bucket.open(run_id).close()  # Later ones race no writers.
    monkeypatch.setenv(KEYS[bucket.name], "aHVudGVyMg==")
    before = pipes()
    with pytest.raises(AccessDeniedError):
        bucket.open(run_id)
    until(lambda: pipes() <= before, 5)


def test_no_credentials(bucket: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS[bucket.name])
    if bucket.name == "s3":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    # No host that a test runs on has a role.
    assert "without credentials (" in failed(bucket)


def test_a_key_of_azure_that_is_none(bucket: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    if bucket.name != "azure":
        pytest.skip("any text may be a key of S3")
    monkeypatch.setenv(KEYS["azure"], "hunter2")
    line = failed(bucket)
    assert "the credentials in the environment are not valid: " in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/", "Connection refused); is it running, and does the url name it?"),
        ("http://nowhere.invalid:9000", "check the spelling in the url, and this host's DNS"),
        ("127.0.0.1:9000", "the url '127.0.0.1:9000' must begin with http:// or https://"),
        ("https", "does not speak TLS ("),
    ],
    ids=["down", "unknown", "no scheme", "no TLS"],
)
def test_a_url_that_leads_nowhere(bucket: RunningStore, url: str, said: str) -> None:
    there = bucket.config["url"].replace("http:", "https:") if url == "https" else url
    assert said in failed(replace(bucket, config={**bucket.config, "url": there}))


@pytest.mark.parametrize("folder", ["metadata", "429"])
def test_the_name_of_a_folder_is_no_reason(bucket: RunningStore, folder: str) -> None:
    nowhere = {**bucket.config, "url": "http://127.0.0.1:9/"}
    line = failed(replace(bucket, endpoint=f"{bucket.endpoint}/{folder}", config=nowhere))
    assert "Connection refused); is it running, and does the url name it?" in line


def test_no_bucket(bucket: RunningStore) -> None:
    assert " has no such bucket (" in failed(replace(bucket, endpoint=f"{bucket.endpoint}-none"))


def test_tls_with_an_authority_of_ones_own(
    bucket: RunningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates.make(tmp_path)
    pair = certificates.server
    with behind(bucket, tls=(pair.cert_file, pair.key_file)) as (_, store):
        line = failed(store)
        assert "failed the TLS handshake (UnknownIssuer)" in line
        assert "$SSL_CERT_FILE" in line
        monkeypatch.setenv("SSL_CERT_FILE", certificates.ca_file)
        status, told = check(store)
        assert status < 2, told
        assert "TLS: encrypted; certificate and name verified" in told
    misnamed = certificates.misnamed
    with behind(bucket, tls=(misnamed.cert_file, misnamed.key_file)) as (_, store):
        assert "failed the TLS handshake (NotValidForName" in failed(store)


def test_the_url_of_the_environment(s3: RunningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.config["url"])
    with closing(replace(s3, config={}).open("rdzv/environment")) as client:
        client.put("key", b"here")


def test_a_forked_process_is_told_that_it_cannot_ask(s3: RunningStore) -> None:
    with closing(s3.open("rdzv/forked")) as client:
        version = client.put("key", b"here")
        child = get_context("fork").Process(target=_ask, args=(client,))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        entry = client.get("key")
        assert entry is not None
        assert entry.version == version


def _ask(client: KeyValueClient) -> None:
    """End with 0 if the request is refused as it should be."""
    try:
        client.get("key")
    except RendezvousStateError as error:
        os._exit(0 if "was forked" in str(error) else 1)
    os._exit(2)


ENDING = """
import json, sys, threading, time
from rdzv_plugins.stores import open_client

backend, endpoint, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

def ask(client):
    while True:
        client.put("key", b"value")
        client.list("")

for number in range(4):
    client = open_client(backend, endpoint, f"ending/{number}", config)
    threading.Thread(target=ask, args=(client,), daemon=True).start()
time.sleep(0.2)
"""


def test_a_process_ends_though_its_threads_ask(bucket: RunningStore) -> None:
    """One of 20 ended by SIGABRT, of obstore's threads."""
    where = [bucket.backend, bucket.endpoint, json.dumps(dict(bucket.config))]
    for _ in range(20):
        ended = subprocess.run([sys.executable, "-c", ENDING, *where], stderr=subprocess.PIPE)
        assert ended.returncode == 0, ended.stderr


NODES, INTERVAL, SECONDS = 64, 5.0, 60.0


def test_what_a_round_of_64_and_its_rest_ask(
    bucket: RunningStore, record_property: Measure
) -> None:
    """With the default intervals; docs/choosing.md has the figures."""
    with behind(bucket) as (passing, store):
        run = Run(store, "counted")
        options = {"keep_alive_interval": f"{INTERVAL:g}", "last_call_timeout": "1"}
        handlers = [run.handler((NODES, NODES), **options) for _ in range(NODES)]
        try:
            before, began = passing.asked(), time.monotonic()
            together([handler.next_rendezvous for handler in handlers])
            record_property("formed through the gateway, s", round(time.monotonic() - began, 1))
            record_property("a round", dict(passing.asked() - before))
            # The writes of the round itself are over, and waiters poll as seldom as they do.
            time.sleep(3 * INTERVAL)
            before, began = passing.asked(), time.monotonic()
            time.sleep(SECONDS)
            asked, took = passing.asked() - before, time.monotonic() - began
        finally:
            together([handler.shutdown for handler in handlers])
    hourly = {kind: round(number * 3600 / took) for kind, number in asked.items()}
    record_property("an hour at rest", hourly)
    # As docs/choosing.md has it.
    beats = NODES * 3600 / (1.05 * INTERVAL)
    assert 0.7 * beats < hourly["put"] < 1.3 * beats
    assert hourly["get"] < 1.2 * 306_500
