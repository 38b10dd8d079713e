"""A signal at each point of an agent's life: announced at once, and the process ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.signalled import RAISED
from tests.integration.stores import KINDS, RunningStore, started

# One after the other, each with an agent of its own: 39 s on two idle cores.
pytestmark = pytest.mark.timeout(330)

ANNOUNCED = {
    "joining SIGTERM": RAISED,
    "joining SIGHUP": RAISED,
    "joining SIGINT": -2,
    "roles SIGTERM": RAISED,
    "released SIGTERM": RAISED,
    "saving SIGTERM": RAISED,
    "joining SIGUSR1": RAISED,
    "handled SIGUSR1": RAISED,
    "unpolled SIGTERM": RAISED,
    "own SIGTERM": 7,
    "thread SIGTERM": RAISED,
    "forking SIGTERM": RAISED,
}
# Another signal comes while the last word waits for the store.
TWICE = "released away 0.1+SIGTERM 0.7+SIGTERM 0.7+back"
CLOSING = "ending away 1+SIGTERM 1+back"
AWAY = "released away 0.1+SIGTERM"
BARRIER = "barrier SIGTERM"


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    kind = next(kind for kind in KINDS if kind.name == "redis")
    with started(kind) as store:
        yield store


@pytest.fixture(scope="module")
def seen(store: RunningStore) -> Any:
    assert store.server is not None
    program = [sys.executable, "-m", "tests.integration.signalled"]
    place = [store.endpoint, str(store.server.nodes[0].pid)]
    cases = [*ANNOUNCED, TWICE, CLOSING, AWAY, BARRIER]
    played = subprocess.run(
        [*program, *place, *cases], stdout=subprocess.PIPE, timeout=300, check=True
    )
    return json.loads(played.stdout)


def found(seen: Any, case: str) -> Any:
    assert "failed" not in seen[case], seen[case]["failed"]
    return seen[case]


@pytest.mark.parametrize("case", ANNOUNCED)
def test_the_leave_is_announced_at_once(seen: Any, case: str) -> None:
    became = found(seen, case)
    assert (became["status"], became["record"]) == (ANNOUNCED[case], "left")
    # Far below the 4 s that one of them takes to save.
    assert became["announced"] < 1.5


def test_a_second_signal_does_not_cut_the_farewell_short(seen: Any) -> None:
    became = found(seen, TWICE)
    assert (became["status"], became["record"]) == (RAISED, "left")


def test_a_signal_does_not_cut_the_closing_short(seen: Any) -> None:
    became = found(seen, CLOSING)
    assert (became["status"], became["phase"]) == (RAISED, "closed")


def test_without_a_store_the_process_ends_all_the_same(seen: Any) -> None:
    became = found(seen, AWAY)
    assert became["status"] == RAISED
    assert became["seconds"] < 15


def test_one_that_is_done_stays_done(seen: Any) -> None:
    became = found(seen, BARRIER)
    assert (became["status"], became["record"]) == (RAISED, "done")
