"""Metrics of all runs under a prefix, from the store alone: ``rdzv exporter``."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import nan

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rdzv_plugins.observe.history import Row, goodput
from rdzv_plugins.observe.inspection import Condition, Inspection
from rdzv_plugins.observe.metrics import (
    CAUSES,
    STATES,
    TABLE,
    By,
    Metric,
    MetricKind,
    causes_of,
    step_gauges,
)
from rdzv_plugins.observe.metrics_server import MetricsServer
from rdzv_plugins.observe.page_access import PageAccess
from rdzv_plugins.observe.survey import Seen, Survey
from rdzv_plugins.protocol.documents import Phase, RoundDocument
from rdzv_plugins.protocol.situation import to_join_again

log = logging.getLogger(__name__)

# Several scrapers within this time share one read.
_FRESH_SECONDS = 1.0

EXPORTED = tuple(
    replace(metric, labels=("run", *metric.labels) if metric.of_run else metric.labels)
    for metric in TABLE
    if metric.by is not By.NODE
)
"""The metrics of the exporter, with their labels."""


class Exporter(Collector):
    """Reads all runs whenever it is scraped. All methods except `close` are for one thread."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._looked = -_FRESH_SECONDS
        self._restarts: dict[str, _Restarts] = {}
        self._server: MetricsServer | None = None

    def serve(self, host: str, port: int, access: PageAccess) -> str:
        """Serve ``/metrics``, ``/healthz`` and ``/why`` from a thread; returns their address.

        Raises OSError or UnicodeError if it cannot listen there.
        """
        # Read once now: the first read takes longest, and no scrape should wait for it.
        deque(self.collect(), maxlen=0)
        registry = CollectorRegistry()
        registry.register(self)
        self._server = MetricsServer(
            host, port, access, registry, self.refresh, self.health, self.why, "rdzv-exporter"
        )
        return self._server.url

    def close(self) -> None:
        """End the server, and close all connections to the store."""
        self._survey.close()
        if self._server is not None:
            self._server.close()

    def refresh(self) -> None:
        """Read the store, unless it was read within the last second."""
        if time.monotonic() - self._looked < _FRESH_SECONDS:
            return
        self._survey.keep_looking()
        self._looked = time.monotonic()

    def health(self) -> tuple[bool, str]:
        """True even while the store is away, because a restart of this process would not help."""
        # Clients without a token may ask here, so only /why names the store.
        return True, "the store is away; /why says which" if self._survey.away else "ok"

    def why(self) -> str:
        """A line for each run: what it does and waits for."""
        self.refresh()
        away = self._survey.away
        lines = [f"the store is away: {away[1]}"] if away is not None else []
        for it in self._survey.runs.values():
            seen = it.readable
            odd = (seen.clocks, seen.away) if seen is not None else ()
            lines.append("; ".join(filter(None, (f"run '{it.run_id}': {it.sentence}", *odd))))
        return "\n".join(lines) or "there are no runs under this prefix"

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The metrics of the last read; none of a run while the store is away."""
        families = {metric.name: _family(metric) for metric in EXPORTED}
        away = self._survey.away is not None
        families["rdzv_store_up"].add_metric([], float(not away))
        if not away:
            for seen in self._survey.runs.values():
                try:
                    samples = [*self._samples(seen)]
                except Exception:  # A broken run must not hide the others.
                    log.debug("run '%s' has no metrics", seen.run_id, exc_info=True)
                    continue
                for name, labels, value in samples:
                    families[name].add_metric([seen.run_id, *labels], value)
            gone = self._restarts.keys() - self._survey.runs.keys()
            self._restarts = {run: it for run, it in self._restarts.items() if run not in gone}
        yield from families.values()

    def _samples(self, seen: Seen) -> Iterator[tuple[str, Sequence[str], float]]:
        known, now = seen.can_tell, seen.condition
        for condition in (it for it in Condition if it is not Condition.ABSENT):
            value = float(condition is now) if known else nan
            yield "rdzv_condition", [condition.value], value
        if (inspection := seen.readable) is not None and inspection.document is not None:
            yield from _now(inspection, inspection.document)
            yield from self._past(seen.run_id)

    def _past(self, run_id: str) -> Iterator[tuple[str, Sequence[str], float]]:
        rows = self._survey.rows(run_id)
        restarts = self._restarts.setdefault(run_id, _Restarts())
        restarts.note(rows)
        for cause, number in restarts.by_cause.items():
            yield "rdzv_restarts_total", [cause], number
        formed = [row.seconds for row in rows if row.seconds is not None]
        for name, seconds in formed[-1].phases.items() if formed else ():
            yield "rdzv_restart_seconds", [name], seconds
        if (lost := next((it.lost_steps for it in reversed(rows) if it.seconds), None)) is not None:
            yield "rdzv_restart_lost_steps", [], lost
        if (good := goodput(rows, datetime.now(UTC))) is not None:
            yield "rdzv_goodput_ratio", [], good


def _now(
    inspection: Inspection, document: RoundDocument
) -> Iterator[tuple[str, Sequence[str], float]]:
    yield "rdzv_round", [], document.round
    yield "rdzv_round_nodes", [], document.size
    for phase in Phase:
        yield "rdzv_phase", [phase.value], float(document.phase is phase)
    ended = document.phase is Phase.FORMING and document.ran is not None
    yield "rdzv_nodes_waiting", [], to_join_again(document) if ended else 0
    nodes = inspection.nodes()
    numbers = Counter(it.state.value for it in nodes)
    for name in STATES:
        yield "rdzv_nodes", [name], numbers[name]
    silence = next((it.silence for it in nodes if it.leader), nan)
    yield "rdzv_leader_silence_seconds", [], silence
    newest = max((record.at for record in inspection.records.values()), default=0)
    yield "rdzv_last_heartbeat_timestamp_seconds", [], newest or nan
    yield "rdzv_phase_began_timestamp_seconds", [], document.since or nan
    yield "rdzv_last_call_ends_timestamp_seconds", [], inspection.last_call_until or nan
    steps = inspection.steps
    for name, value in step_gauges(steps):
        yield name, [], value
    if steps is not None and steps.rank is not None:
        yield "rdzv_rank_behind", [str(steps.host)], steps.rank
    if inspection.members_up is not None:
        yield "rdzv_store_members_up", [], inspection.members_up.up
    clocks = {it.host: it.clock for it in nodes if it.host and it.clock is not None}
    for host, seconds in clocks.items():
        yield "rdzv_clock_difference_seconds", [host], seconds


class _Restarts:
    """Counts each restart of a run id once, although the store keeps only the last rounds."""

    def __init__(self) -> None:
        self.by_cause = dict.fromkeys(CAUSES, 0)
        self._seen: set[tuple[str, int]] = set()

    def note(self, rows: Iterable[Row]) -> None:
        rounds = {(it.incarnation, it.round): it for it in rows if it.phase is Phase.RUNNING}
        first: dict[str, int] = {}
        for incarnation, number in rounds:
            first[incarnation] = min(number, first.get(incarnation, number))
        for key, row in rounds.items():
            if key in self._seen or row.round == first[row.incarnation]:
                continue
            for cause in causes_of(row):
                self.by_cause[cause] += 1
        self._seen = set(rounds)


def _family(metric: Metric) -> GaugeMetricFamily | CounterMetricFamily:
    family = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    return family(metric.name, metric.text, labels=metric.labels)
