"""Real torchrun agents whose host runs out of threads or descriptors: no run ends by that."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

import pytest

from tests import Measure
from tests.integration import forked
from tests.integration.jobs import LEASE, Job
from tests.integration.launchers import (
    AS_USER,
    WITHOUT_THREADS,
    allow_threads,
    no_descriptors,
    no_threads,
    open_to_all,
)
from tests.integration.stores import RunningStore, every_store

Limit = Callable[[int], AbstractContextManager[None]]

# What a person must see of it in the log of the node that has too little.
TOLD: dict[Limit, tuple[str, ...]] = {
    no_threads: ("lets this process start no thread",),
    no_descriptors: ("may open no more files",),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_to_all() as made:
        yield made


def seconds_of_cpu(pid: int) -> float:
    """CPU of the process without c10d's own thread, which spins where it can accept nobody."""
    ticks = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # A thread that has ended.
            name, _, rest = (task / "stat").read_text().rpartition(")")
            if "(pt_tcpstore" not in name:
                ticks += sum(map(int, rest.split()[11:13]))
    return ticks / 100


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
        assert len(told()) <= 4  # Each once: a TCPStore, a request, the exclusions.
        assert not [line for line in log if "Traceback" in line]
        record_property("cpu", f"{used:.2f} s in {took:.1f} s, {len(log)} lines")
        assert used < 0.1 * took
        for name in "ab":
            job.finish(name)
        assert job.await_ends("ab") == {"a": 0, "b": 0}


@pytest.mark.parametrize("limit", TOLD)
def test_others_go_on_without_a_node_that_cannot_start_workers(
    store: RunningStore, folder: Path, limit: Limit, record_property: Measure
) -> None:
    with closing(Job(folder, store, nodes="1:3", launcher=AS_USER)) as job:
        job.begin("abc")
        with limit(job.agents["b"].pid):
            killed = job.agents["c"].kill()
            begun = job.await_begun("a", after=killed)
            record_property("others begun after, s", round(begun.began[0] - killed, 2))
            assert "(no worker can start: " in (told := job.status()), told
        restored = time.monotonic()
        begun = job.await_begun("ab", after=killed)
        record_property("begun again after, s", round(max(begun.began.values()) - restored, 2))
        log = job.lines("b")
        assert len([line for line in log if "no worker can start: " in line]) == 1
        assert not [line for line in log if "Traceback" in line or "is at loopback" in line]
        for name in "ab":
            job.finish(name)
        assert job.await_ends("ab") == {"a": 0, "b": 0}


@pytest.mark.parametrize("spare", [4, 12])
def test_a_tcpstore_is_not_tried_without_descriptors(spare: int) -> None:
    """c10d says nothing of them, waits for seconds or aborts the process, by how many are left."""
    script = (
        "import errno, os, resource\n"
        "from rdzv_plugins.torch.master_store import open_store\n"
        "open_store('127.0.0.1', 10.0)\n"
        "taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1 + {spare}, hard))\n"
        "try:\n    open_store('127.0.0.1', 10.0)\n"
        "except OSError as error:\n    print(errno.errorcode[error.errno])\n"
    )
    ended = forked.run([sys.executable, "-c", script])
    assert (ended.returncode, ended.stdout) == (0, "EMFILE\n"), ended.stderr


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
