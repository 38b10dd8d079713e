"""Real torchrun agents whose host runs out of threads or descriptors: no run ends by that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from tests import Measure
from tests.integration.exhausted import (
    AS_USER,
    WITHOUT_THREADS,
    allow_threads,
    no_descriptors,
    no_threads,
    open_to_all,
)
from tests.integration.jobs import Job
from tests.integration.stores import RunningStore, every_store
from tests.integration.torchrun import LEASE

pytestmark = pytest.mark.timeout(240)

Limit = Callable[[int], AbstractContextManager[None]]

# What a person must see of it in the log of the node that has too little; the store's client may
# need another descriptor before a TCPStore does, or not.
TOLD: dict[Limit, tuple[str, ...]] = {
    no_threads: ("lets this process start no thread",),
    no_descriptors: ("cannot open a TCPStore (", "may open no more files"),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_to_all() as made:
        yield made


def seconds_of_cpu(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / 100


@every_store
@pytest.mark.parametrize("limit", TOLD)
def test_rank_0_that_has_nothing_left_ends_nothing(
    store: RunningStore, folder: Path, limit: Limit, record_property: Measure
) -> None:
    with closing(Job(folder, store, nodes="1:3", launcher=AS_USER)) as job:
        job.begin("abc")
        first = job.agents["a"]

        def told() -> list[str]:
            return [line for line in job.lines("a") if any(it in line for it in TOLD[limit])]

        with limit(first.pid):
            before, began = seconds_of_cpu(first.pid), time.monotonic()
            killed = job.agents["c"].kill()
            job.await_that(told, "a line of what is missing", 3 * LEASE + 10)
            # For longer than the lease, in which it was tried thousands of times.
            time.sleep(LEASE)
            used, took = seconds_of_cpu(first.pid) - before, time.monotonic() - began
        job.await_begun("ab", after=killed)
        log = job.lines("a")
        assert len(told()) <= 4  # Of each once: a TCPStore, a request, the exclusions.
        assert not [line for line in log if "Traceback" in line]
        record_property("cpu", f"{used:.2f} s in {took:.1f} s, {len(log)} lines")
        assert used < 0.1 * took
        for name in "ab":
            job.finish(name)
        assert job.await_ends("ab") == {"a": 0, "b": 0}


@every_store
def test_a_newcomer_waits_until_its_host_lets_threads_start(
    store: RunningStore, folder: Path
) -> None:
    with (
        closing(Job(folder, store, nodes="1:3", launcher=AS_USER)) as job,
        closing(
            Job(folder, store, nodes="1:3", launcher=WITHOUT_THREADS, run_id=job.run_id)
        ) as poor,
    ):
        job.begin("a")
        late = poor.start_at("b")
        poor.await_line("b", "lets this process start no thread", timeout=40)
        time.sleep(LEASE)
        allow_threads(late.pid)
        job.agents["b"] = late
        begun = job.await_begun("ab")
        assert begun.size == 2
        log = poor.lines("b")
        assert len([line for line in log if "start no thread" in line]) <= 3
        assert not [line for line in log if "Traceback" in line]


def test_a_newcomer_gives_up_after_its_join_timeout(store: RunningStore, folder: Path) -> None:
    with closing(Job(folder, store, nodes="1:3", launcher=WITHOUT_THREADS, join_timeout=5)) as job:
        job.start_at("a")
        assert job.await_ends("a") == {"a": 1}
        assert job.await_line("a", "E", "lets this process start no thread")
