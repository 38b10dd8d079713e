"""A training says when newcomers may come, whatever becomes of the folder for temporary files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from examples.demo.agents import TORCHRUN
from rdzv_plugins.protocol.documents import Status
from tests import Measure
from tests.integration.jobs import Job
from tests.integration.small_tmp import SMALL_TMP, change
from tests.integration.stores import RunningStore

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).with_name("names_moments.py")

# A cleaner's work; then what an administrator or a neighbour does to a folder.
CLEAN = "rm -rf rdzv-*"
# The agent takes each moment's file away, so that there is room for one again, until that is taken.
FULL = (
    "n=0; refused=0; while [ $refused -lt 40 ]; do "
    "if touch full$n 2> /dev/null; then n=$((n + 1)); "
    "else refused=$((refused + 1)); sleep 0.02; fi; done"
)
READ_ONLY = 'mount -o remount,ro "$PWD"'


@pytest.fixture
def job(store: RunningStore, tmp_path: Path) -> Iterator[Job]:
    options = {
        "nodes": "1:2",
        "launcher": (*SMALL_TMP, *TORCHRUN),
        "grow": "checkpoint",
        "max_restarts": 0,
    }
    with closing(Job(tmp_path, store, SCRIPT, **options)) as made:
        made.begin("a")
        made.await_event("a", "named")
        yield made


def test_a_cleaner_takes_the_folder_and_newcomers_come_all_the_same(job: Job) -> None:
    first = job.agents["a"]
    change(first.pid, CLEAN)
    job.start_at("b")
    job.await_begun("ab")
    # That round has a folder again.
    change(first.pid, "test -d rdzv-*")
    job.finish("b")
    job.finish("a")
    assert job.await_ends("ab") == {"a": 0, "b": 0}
    found = [line for line in job.lines("ab") if "Traceback" in line]
    assert found == []


@pytest.mark.parametrize("command", [FULL, READ_ONLY], ids=["full", "read-only"])
def test_training_and_its_end_do_not_need_the_folder(
    job: Job, command: str, record_property: Measure
) -> None:
    first = job.agents["a"]
    change(first.pid, command)
    job.await_event("a", "unnamed")
    # It is a spare, whom nobody lets in.
    job.start_at("b")
    job.await_record("b", Status.SPARE)
    ended = job.finish("a")
    assert job.await_ends("a") == {"a": 0}
    took = time.monotonic() - ended
    record_property("end", f"{took:.1f} s")
    assert took < 8
    log = job.lines("a")
    assert len([line for line in log if "resize_now() could not tell the agent" in line]) == 1
    assert not [line for line in log if "Traceback" in line]
