"""Run ids as people choose them, on every store: each has its own keys and its own archive."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rdzv_plugins.kv import KeyValueClient, RendezvousStateError
from rdzv_plugins.observe.history import Archive, list_runs
from rdzv_plugins.observe.inspection import delete_run
from rdzv_plugins.protocol.documents import Phase, RoundDocument
from rdzv_plugins.protocol.round_record import record_of
from rdzv_plugins.settings.run_ids import refuse_unless_possible
from rdzv_plugins.stores import open_client
from rdzv_plugins.testing.harness import until as until_true
from tests.integration.agents import Run, until
from tests.integration.jobs import Job
from tests.integration.stores import RunningStore

# What is next to each other here must not be mixed up. The longest are as long as any may be.
TAILS = [
    "", "/rounds", "/ended", "/", ".", " ", "}", "{x}", "%2Frounds", "*", "?x=1&y#z", "\\", "-ü",
    "-u\u0308", "-🏖", ":watch:state", "/../x",
]  # fmt: skip
LONGEST = ["/" * 495, "\u65e5" * 165]


@pytest.fixture
def ids() -> list[str]:
    job = f"job-{secrets.token_hex(6)}"
    return [*(f"{job}{tail}" for tail in (*TAILS, *LONGEST)), job.upper()]


@pytest.fixture
def cleared(running_store: RunningStore, ids: list[str]) -> Iterator[RunningStore]:
    yield running_store
    for run_id in ids:
        for namespace in (run_id, f"!archive/{run_id}"):
            with closing(running_store.open(namespace)) as client:
                delete_run(client)


def running(incarnation: str) -> RoundDocument:
    return RoundDocument(
        incarnation=incarnation, round=1, phase=Phase.RUNNING, leader="n1", min_nodes=1,
        max_nodes=1, participants=("n1",), master="host:1",
    )  # fmt: skip


def test_no_id_sees_what_another_one_has(cleared: RunningStore, ids: list[str]) -> None:
    store, incarnations = cleared, {run_id: secrets.token_hex(8) for run_id in ids}
    for run_id, incarnation in incarnations.items():
        assert refuse_unless_possible(run_id) == run_id
        with closing(store.open(run_id)) as client:
            client.put("state", incarnation.encode())
            client.put(f"nodes/{incarnation}", b"here")
        archive = Archive(store.open, run_id, 600.0)
        archive.put_tombstone(running(incarnation))
        archive.note(record_of(running(incarnation), {}))
    for run_id, incarnation in incarnations.items():
        with closing(store.open(run_id)) as client:
            found = {key: entry.value for key, entry in client.list("").items()}
            assert found == {"state": incarnation.encode(), f"nodes/{incarnation}": b"here"}, run_id
        with closing(store.open(f"!archive/{run_id}")) as client:
            keys = {f"ended/{incarnation}", f"rounds/{incarnation}/00000001"}
            assert client.list("").keys() == keys, run_id
        assert [row.incarnation for row in Archive(store.open, run_id, 600.0).rows()] == [
            incarnation
        ]
    listed = list_runs(store.open)
    assert {it: listed[it].incarnation for it in ids} == incarnations
    # Whoever deletes one leaves the others what is theirs.
    with closing(store.open(ids[0])) as client:
        assert delete_run(client) == 2
    for run_id in ids[1:]:
        with closing(store.open(run_id)) as client:
            assert len(client.list("")) == 2, run_id


def test_an_id_that_is_another_teams_prefix_takes_none_of_its_runs(
    running_store: RunningStore, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZooKeeper, whose runs are znodes below the prefix, refuses the id."""
    monkeypatch.setattr("rdzv_plugins.stores._bucket._SWEEP_AFTER", 0.0)

    def open(run: str, prefix: str) -> KeyValueClient:
        config = {**running_store.config, "prefix": prefix}
        return open_client(running_store.backend, running_store.endpoint, run, config)

    with (
        closing(open("job", f"{run_id}/ml")) as theirs,
        closing(open("ml", run_id)) as namesake,
        closing(open("other", run_id)) as other,
    ):
        theirs.put("key", b"theirs")
        with suppress(RendezvousStateError):
            namesake.put("key", b"ours")
            namesake.expire(0.2)
            assert until_true(lambda: not namesake.list(""), 20)
        other.put("key", b"ours")
        other.expire(60)  # Deletes what is over.
        with suppress(RendezvousStateError):
            namesake.expire(0)
        assert [*theirs.list("")] == ["key"]


@pytest.mark.parametrize("tail", ["/x", " ü*?#%}", "." * 470])
def test_a_run_of_an_odd_id_lives_and_ends(running_store: RunningStore, tail: str) -> None:
    with Run(running_store, f"job-{secrets.token_hex(6)}{tail}") as run:
        agents = [run.start((1, 2)), run.start((1, 2))]
        until(lambda: all(it.world is not None and it.world[1] == 2 for it in agents), 30)
        until(lambda: len(run.history()) > 0, 30)


@pytest.mark.parametrize("run_id", ["job/1", "x" * 300], ids=["slash", "long"])
def test_torchrun_says_at_the_start_that_it_can_make_no_log_folder(
    store: RunningStore, tmp_path: Path, run_id: str
) -> None:
    with closing(Job(tmp_path, store, nodes="1:1", run_id=run_id, max_restarts=0)) as job:
        job.start_at("a")
        assert job.await_ends("a") == {"a": 1}
        log = job.lines("a")
    told = next(n for n, it in enumerate(log) if "so that the workers cannot start" in it)
    failed = next(n for n, it in enumerate(log) if "FileNotFound" in it or "name too long" in it)
    assert told < failed
