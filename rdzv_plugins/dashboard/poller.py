"""The thread that reads the store for all viewers of the page."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from msgspec import to_builtins

from rdzv_plugins.observe.history import Row, goodput
from rdzv_plugins.observe.inspection import Condition
from rdzv_plugins.observe.survey import Survey
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.protocol.states import State

# Seconds between two reads of the store while a page is open, and while no page is open.
_INTERVAL = 1.0
_IDLE_INTERVAL = 15.0
# A page counts as open for this many seconds after its last request.
_ATTENTION_SECONDS = 10.0
_STOP_SECONDS = 2.0
# The most sizes of a run that the dashboard keeps.
_MOST_SIZES = 500
# The causes of a round by which nodes are gone, and the states of nodes that are not in it.
_GONE = ("lost", "left", "evicted", "drained", "excluded")
_ABSENT = {
    State.LOST, State.LEFT, State.DRAINED, State.EXCLUDED, State.EVICTED, State.UNFIT,
    State.UNKNOWN,
}  # fmt: skip


class Size(NamedTuple):
    """How many nodes a run's round had; while a round forms, how many are ready for it."""

    at: str  # Since when, ISO 8601 in UTC, on this host's clock.
    nodes: int
    incarnation: str
    round: int
    runs: bool


class Snapshot(NamedTuple):
    """The content of the store at one time, as plain data."""

    at: str  # ISO 8601 in UTC.
    taken: float  # The same time on the monotonic clock, in seconds.
    away: dict[str, str] | None  # Since when the store is away, and why.
    runs: list[dict[str, Any]]  # A line for each run, the newest first.
    reports: Mapping[str, dict[str, Any]]  # By run id; see `survey.Seen.report`.
    sizes: Mapping[str, list[Size]]  # By run id: the sizes that this process has seen.


class Poller:
    """Reads the store once a second while a page is open, else every 15 s.

    All methods except `close` are for the event loop's thread.
    """

    def __init__(self, survey: Survey) -> None:
        self.viewers = 0
        self.snapshot: Snapshot | None = None
        self._survey = survey
        self._sizes: dict[str, list[Size]] = {}
        self._asked = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rdzv-dashboard", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all connections to the store."""
        self._stopping.set()
        self._wake.set()
        self._survey.close()
        self._thread.join(_STOP_SECONDS)

    @property
    def lives(self) -> bool:
        return self._thread.is_alive()

    async def fresh(self) -> Snapshot | None:
        """The latest content of the store, old if it does not answer; None: nothing was read."""
        self._asked = time.monotonic()
        self._wake.set()
        known = self.snapshot
        if known is None or self._asked - known.taken > 2 * _INTERVAL:
            await self.news(_ATTENTION_SECONDS)
        return self.snapshot

    async def news(self, timeout: float) -> None:
        """Wait for the next snapshot, for so many seconds at most."""
        self._wake.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout)

    async def run(self, run_id: str) -> dict[str, Any] | None:
        """A run's report with ``rounds``, the newest first, and ``sizes``; None: there is none."""
        snapshot = self.snapshot
        if snapshot is None or run_id not in snapshot.reports:
            return None
        # Reads the store only after a round has begun or a run has ended.
        rows = await asyncio.to_thread(self._survey.rows, run_id)
        seen = sizes(rows, snapshot.sizes.get(run_id, []))
        good = goodput(rows, datetime.now(UTC))
        found = {"rounds": to_builtins(rows[::-1]), "goodput": good, "sizes": seen}
        return snapshot.reports[run_id] | found

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._survey.keep_looking()
            self._tell()
            self._stopping.wait(max(0.0, began + _INTERVAL - time.monotonic()))
            if not self.viewers and time.monotonic() - self._asked >= _ATTENTION_SECONDS:
                self._wake.wait(_IDLE_INTERVAL)
            self._wake.clear()

    def _tell(self) -> None:
        assert self._loop is not None
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        away = None
        if self._survey.away is not None:
            since, why = self._survey.away
            away = {"since": since.isoformat(timespec="milliseconds"), "error": why}
        reports = {run_id: seen.report() for run_id, seen in self._survey.runs.items()}
        self._sizes = {
            run_id: _grown(self._sizes.get(run_id, []), _size(report, now))
            for run_id, report in reports.items()
        }
        lines = [*map(_line, reports.values())]
        snapshot = Snapshot(now, time.monotonic(), away, lines, reports, self._sizes)
        # The loop is closed if the server has just ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._publish, snapshot)

    def _publish(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        waited, self._news = self._news, asyncio.Event()
        waited.set()


def _line(report: Mapping[str, Any]) -> dict[str, Any]:
    """A run in the list of runs."""
    nodes = report.get("nodes")
    last = report.get("last") or {}
    same = ("run", "condition", "told", "sentence", "began", "noted")
    return {name: report[name] for name in same} | {
        "outcome": report.get("outcome", last.get("outcome")),
        "round": report.get("round", last.get("round")),
        "nodes": last.get("nodes", 0)
        if nodes is None
        else sum(node["rank"] is not None for node in nodes),
    }


def sizes(rows: Sequence[Row], seen: Sequence[Size]) -> list[tuple[str, int]]:
    """How many nodes a run had, each with its begin; losses count at once, not at the next round.

    ``rows``, the oldest first, cover the time up to the last row, and ``seen`` the time since.
    """
    found: list[tuple[str, int]] = []
    for row in rows:
        if row.phase is Phase.CLOSED:
            found.append((row.at, 0))
            continue
        gone = sum(len(getattr(row, cause)) for cause in _GONE)
        if found and found[-1][1] and gone and row.seconds is not None:
            # These nodes were gone when the round began to form. A row names at most sixteen nodes
            # per cause.
            at, before = found[-1]
            began = datetime.fromisoformat(row.at) - timedelta(seconds=row.seconds.total)
            there = max(0, min(before - gone, row.nodes))
            found.append((max(began.isoformat(timespec="milliseconds"), at), there))
        found.append((row.at, row.nodes))
    # `_since` compares rounds and not times, because the clocks of two hosts differ. `max` keeps
    # the times in order, so that the line of the chart does not run backwards.
    last = found[-1][0] if found else ""
    found += [(max(it.at, last), it.nodes) for it in _since(rows, seen)]
    return [it for i, it in enumerate(found) if i == 0 or it[1] != found[i - 1][1]]


def _since(rows: Sequence[Row], seen: Sequence[Size]) -> Sequence[Size]:
    """The sizes in ``seen`` after the last row."""
    if not rows:
        return seen
    row = rows[-1]
    same = [i for i, it in enumerate(seen) if it.incarnation == row.incarnation]
    after = same[-1] + 1 if same else 0
    if row.phase is Phase.CLOSED:
        return seen[after:]
    place = row.round, True
    return seen[next((i for i in same if (seen[i].round, seen[i].runs) >= place), after) :]


def _size(report: Mapping[str, Any], at: str) -> Size | None:
    nodes, phase = report.get("nodes"), report.get("phase")
    if nodes is None or not report["told"] or phase == Phase.CLOSED:
        return None
    there = [
        node
        for node in nodes
        if node["state"] not in _ABSENT and (node["rank"] is not None or phase == Phase.FORMING)
    ]
    number = 0 if report["condition"] == Condition.DEAD else len(there)
    return Size(at, number, report["incarnation"], report["round"], phase == Phase.RUNNING)


def _grown(known: list[Size], size: Size | None) -> list[Size]:
    if size is None or (known and known[-1][1:] == size[1:]):
        return known
    return [*known[1 - _MOST_SIZES :], size]
