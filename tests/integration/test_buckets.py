"""Buckets: one that does not heed a condition is refused; forks; and what a run asks, counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing import get_context

import pytest
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.kv import KeyValueClient, RendezvousStateError
from rdzv_plugins.testing.threads import together
from tests import Measure
from tests.integration.agents import Run
from tests.integration.gateway import Gateway, gateway
from tests.integration.stores import KINDS, RunningStore, started

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def s3() -> Iterator[RunningStore]:
    with started(next(kind for kind in KINDS if kind.name == "s3")) as store:
        yield store


@contextmanager
def behind(
    store: RunningStore, *drops: str, judges: bool = False
) -> Iterator[tuple[Gateway, RunningStore]]:
    """A gateway, and the store as it is reached through it."""
    with gateway(store.address, drops=set(drops), judges=judges) as started:
        yield started, replace(store, config=store.config_at(started.address))


def conf(store: RunningStore) -> str:
    return ",".join(f"{name}={value}" for name, value in store.config.items())


def check(store: RunningStore) -> tuple[int, str]:
    """The exit status of `rdzv check`, and what it printed."""
    # Patience with the machine: a contest is to end with one winner, not in time.
    options = f"{conf(store)},heartbeat_timeout=60"
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
        (["If-Match", "If-None-Match"], "If-None-Match"),
    ],
    ids=["create", "replace", "both"],
)
def test_a_store_that_ignores_a_condition_is_refused_by_name(
    s3: RunningStore, drops: list[str], named: str
) -> None:
    with behind(s3, *drops) as (_, store):
        with pytest.raises(ValueError, match=f"s3://rdzv.* ignores {named}: "):
            Run(store, "ignored").handler((1, 2))
        status, told = check(store)
    assert status == 2
    (failed,) = (line for line in told.splitlines() if line.startswith("failed"))
    assert f" ignores {named}: " in failed


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
    assert "the store ignores If-None-Match: it let two writers create one object" in line


def test_a_store_that_looks_before_it_writes_loses_the_contest(s3: RunningStore) -> None:
    with behind(s3, judges=True) as (_, store):
        status, told = check(store)
    assert status == 2
    (failed,) = (line for line in told.splitlines() if line.startswith("failed"))
    assert "of 16 writers won a compare-and-set, not one" in failed


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


NODES, INTERVAL, SECONDS = 64, 5.0, 60.0


def test_what_a_round_of_64_and_its_rest_ask(s3: RunningStore, record_property: Measure) -> None:
    """With the default intervals; docs/choosing.md has the figures."""
    with behind(s3) as (passing, store):
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
    assert hourly["get"] < 2 * 493_000
