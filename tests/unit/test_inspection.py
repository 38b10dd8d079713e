"""When it is known of a run whether its nodes live: at once, or after how long a watch."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rdzv_plugins.kv import MemoryClient, MemoryServer
from rdzv_plugins.observe.inspection import Inspection
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
)
from tests.unit.life import archive


def run_of(
    ages: list[float | None], phase: Phase = Phase.RUNNING, interval: float = 5.0
) -> Inspection:
    """A run after one look; its nodes wrote their records so many seconds ago, None: unknown."""
    server = MemoryServer()
    client = MemoryClient(server, "run")
    names = tuple(f"n{number}" for number in range(len(ages)))
    document = RoundDocument(
        incarnation="first", round=3, phase=phase, leader="n0", min_nodes=2, max_nodes=2,
        participants=names if phase is Phase.RUNNING else (), master="host:1",
        cause=Cause(note="first round"),
    )  # fmt: skip
    client.put(STATE_KEY, document.encode())
    status = Status.RUN if phase is Phase.RUNNING else Status.JOIN
    for name, age in zip(names, ages, strict=True):
        record = NodeRecord(
            address=name, pid=1, beat=7, status=status, round=3, min_nodes=2, max_nodes=2,
            interval=interval, lease=3 * interval, at=0 if age is None else int(time.time() - age),
        )  # fmt: skip
        client.put(NODES_PREFIX + name, record.encode())
    seen = Inspection(client, archive(server), "run")
    seen.look()
    return seen


@pytest.mark.parametrize(
    ("seen", "known", "told"),
    [
        (lambda: run_of([0, 0]), True, True),
        (lambda: run_of([4, 4]), True, True),
        (lambda: run_of([4, 3600]), True, True),
        # A heartbeat was due: the node is dead, or its clock is behind.
        (lambda: run_of([3600, 3600]), False, False),
        # Its clock is ahead, so that it may have been dead for as long.
        (lambda: run_of([-60, -60]), False, False),
        # Written by an earlier version.
        (lambda: run_of([None, None]), False, False),
        # To watch for a heartbeat takes no longer than the time may be off.
        (lambda: run_of([0, 0], interval=0.5), False, False),
        (lambda: run_of([4, 4], Phase.FORMING), True, True),
        # What it waits for is told by who lives.
        (lambda: run_of([4, 3600], Phase.FORMING), True, False),
    ],
)  # fmt: skip
def test_what_one_look_tells(seen: Callable[[], Inspection], known: bool, told: bool) -> None:
    it = seen()
    assert (it.is_known, it.can_tell) == (known, told)


def test_a_silence_that_was_watched_outdoes_a_clock() -> None:
    gone = run_of([0, 0], interval=2.0)
    assert gone.condition == "running"
    deadline = time.monotonic() + 10
    while gone.condition != "dead":
        assert time.monotonic() < deadline
        time.sleep(0.1)
        gone.look()
    assert gone.is_known
