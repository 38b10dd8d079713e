"""A node's measurements of itself and of its store: for Prometheus, and through OpenTelemetry.

`TABLE` has all metrics, also those of the exporter; ``docs/metrics.md`` shows it, and a test
compares the two. Without the options ``metrics_port`` and ``otel`` a node makes no `Report`, and
imports neither prometheus-client nor OpenTelemetry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from importlib import import_module
from math import isnan, nan
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import rdzv_plugins
from rdzv_plugins.kv import (
    ClientClosedError,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousStateError,
    exhausted,
)
from rdzv_plugins.kv.retry import store_is_away
from rdzv_plugins.observe.logs import RunLog
from rdzv_plugins.observe.page_access import LOOPBACK, PageAccess
from rdzv_plugins.protocol import effects, round_record
from rdzv_plugins.protocol.documents import Cause, NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.node import Node
from rdzv_plugins.protocol.rules import View
from rdzv_plugins.protocol.stalls import StepReport, steps_of_node, steps_of_run
from rdzv_plugins.protocol.states import State, is_due, state_of
from rdzv_plugins.protocol.words import call_ends
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.settings.parsing import cannot_import

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

T = TypeVar("T")

CAUSES = (*round_record.CAUSES, "other")
"""The values of the label ``cause``: the fields of `documents.Cause`; "other": it names no node."""

STATES = tuple(state.value for state in State)
"""The values of the label ``state``."""

_REQUEST_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_FORMING_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip

# The methods of a client that are timed.
_REQUESTS = {
    "get", "get_many", "list", "put", "put_many", "delete", "delete_many", "compare_and_set", "add",
    "wait", "expire",
}  # fmt: skip


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class By(StrEnum):
    """The place that reports a metric."""

    NODE = "node"
    EXPORTER = "exporter"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table.

    Attributes:
        labels: the labels of a node's metric; the exporter puts the label ``run`` before them.
        of_run: False: the metric is about the store, so the exporter adds no label ``run``.
        buckets: the upper bounds of a histogram.
    """

    name: str
    kind: MetricKind
    by: By = By.NODE
    labels: tuple[str, ...] = ()
    of_run: bool = True
    buckets: tuple[float, ...] = ()
    text: str = field(kw_only=True)


TABLE = (
    Metric("rdzv_info", MetricKind.GAUGE, labels=("run", "node", "backend", "version"),
        text="1; the labels name this node and its run"),
    Metric("rdzv_condition", MetricKind.GAUGE, By.EXPORTER, labels=("condition",),
        text="1 for the run's condition, else 0: running, forming, dead or closed"),
    Metric("rdzv_rounds_total", MetricKind.COUNTER,
        text="rounds in which this node's agent got a rank"),
    Metric("rdzv_restarts_total", MetricKind.COUNTER, By.BOTH, labels=("cause",),
        text="rounds after the first of the node or of the run, once for each cause: nodes were "
        "lost, left, failed (their workers), joined, evicted, surplus, stuck (did no "
        "step), drained, excluded; or other"),
    Metric("rdzv_forming_seconds", MetricKind.HISTOGRAM, labels=("phase",),
        buckets=_FORMING_BUCKETS,
        text="seconds that a round took to form: gathering, until this node saw its rank, and "
        "confirming, until all nodes had seen theirs"),
    Metric("rdzv_restart_seconds", MetricKind.GAUGE, By.EXPORTER, labels=("phase",),
        text="seconds of the last restart, by the phases of rdzv history: noticed, stopped, "
        "last_call, formed; and if the script calls step(), started and first_step"),
    Metric("rdzv_restart_lost_steps", MetricKind.GAUGE, By.EXPORTER,
        text="steps that the last restart repeats, if the script calls step()"),
    Metric("rdzv_goodput_ratio", MetricKind.GAUGE, By.EXPORTER,
        text="the share of the run's time in steps that still count, 0 to 1, if the script calls "
        "step()"),
    Metric("rdzv_round", MetricKind.GAUGE, By.BOTH, text="number of the round"),
    Metric("rdzv_round_nodes", MetricKind.GAUGE, By.BOTH,
        text="nodes with a rank in the round; 0 while it forms"),
    Metric("rdzv_phase", MetricKind.GAUGE, By.BOTH, labels=("phase",),
        text="1 for the phase, else 0: forming, confirming, running or closed"),
    Metric("rdzv_phase_began_timestamp_seconds", MetricKind.GAUGE, By.BOTH,
        text="when this phase began, on the leader's wall clock; NaN if closed"),
    Metric("rdzv_last_call_ends_timestamp_seconds", MetricKind.GAUGE, By.BOTH,
        text="when the last call of the forming round ends, on the leader's wall clock"),
    Metric("rdzv_nodes", MetricKind.GAUGE, By.BOTH, labels=("state",),
        text="nodes of the run by state, as in rdzv status; of the nodes, only the leader reports "
        "it"),
    Metric("rdzv_nodes_waiting", MetricKind.GAUGE, By.BOTH,
        text="what num_nodes_waiting() returns to this node's agent, or to the agents of the last "
        "round: above 0, they start the next one"),
    Metric("rdzv_step", MetricKind.GAUGE, By.BOTH,
        text="last step() of the slowest rank of this node or of the run"),
    Metric("rdzv_step_seconds", MetricKind.GAUGE, By.BOTH,
        text="average seconds of its last steps; 0: not known, or below a millisecond"),
    Metric("rdzv_step_stalled_seconds", MetricKind.GAUGE, By.BOTH,
        text="seconds without a step, if more than 60 and 20 times the usual, or step_timeout; "
        "else 0"),
    Metric("rdzv_rank_behind", MetricKind.GAUGE, By.BOTH, labels=("host",),
        text="the rank that is behind or stands still, by its host; of the nodes, only the leader "
        "reports it"),
    Metric("rdzv_leads", MetricKind.GAUGE, text="1 if this node leads, else 0"),
    Metric("rdzv_heartbeat_age_seconds", MetricKind.GAUGE,
        text="seconds since this node last wrote its heartbeat"),
    Metric("rdzv_last_heartbeat_timestamp_seconds", MetricKind.GAUGE, By.EXPORTER,
        text="when the run's newest heartbeat was written, on the wall clock of its node"),
    Metric("rdzv_leader_silence_seconds", MetricKind.GAUGE, By.BOTH,
        text="seconds since the leader's heartbeat last moved, as seen by this node or the "
        "exporter; 0 on the leader"),
    Metric("rdzv_lease_seconds", MetricKind.GAUGE,
        text="seconds without a heartbeat after which this node is lost"),
    Metric("rdzv_clock_difference_seconds", MetricKind.GAUGE, By.EXPORTER, labels=("host",),
        text="seconds by which a host's wall clock is ahead of the exporter's; below 0: behind; "
        "only if more than 5 s"),
    Metric("rdzv_store_request_seconds", MetricKind.HISTOGRAM, labels=("kind",),
        buckets=_REQUEST_BUCKETS,
        text="seconds of a request to the store with its retries, by the client's method, such as "
        "get or put_many; wait includes the time it waits"),
    Metric("rdzv_store_failures_total", MetricKind.COUNTER, labels=("kind",),
        text="requests that failed with all retries"),
    Metric("rdzv_store_retries_total", MetricKind.COUNTER, text="retries of requests"),
    Metric("rdzv_store_outage_seconds_total", MetricKind.COUNTER,
        text="seconds for which the store was away"),
    Metric("rdzv_store_members_up", MetricKind.GAUGE, By.EXPORTER,
        text="members of the store that are up, if nodes run it"),
    Metric("rdzv_store_up", MetricKind.GAUGE, By.BOTH, of_run=False,
        text="0 while the store is away, else 1"),
)  # fmt: skip
"""Every metric, in the order of the page."""

METRICS = tuple(metric for metric in TABLE if metric.by is not By.EXPORTER)
"""The metrics of a node."""

Sample: TypeAlias = tuple[str, Mapping[str, str], float]
"""The name of a gauge, its labels, and its value; NaN: it is not known."""


def build(registry: CollectorRegistry) -> dict[str, Counter | Gauge | Histogram]:
    """Make the metrics of `METRICS` in a registry of prometheus-client."""
    from prometheus_client import Counter, Gauge, Histogram

    kinds = {
        MetricKind.COUNTER: Counter, MetricKind.GAUGE: Gauge, MetricKind.HISTOGRAM: Histogram
    }  # fmt: skip
    built: dict[str, Counter | Gauge | Histogram] = {}
    for it in METRICS:
        more: dict[str, Any] = {"buckets": it.buckets} if it.buckets else {}
        built[it.name] = kinds[it.kind](it.name, it.text, it.labels, registry=registry, **more)
    return built


def causes_of(round_: Cause | round_record.RoundRecord) -> Sequence[str]:
    """The members of `CAUSES` for which a round formed."""
    return [name for name in CAUSES[:-1] if getattr(round_, name)] or CAUSES[-1:]


def refuse_unless_installed(settings: Settings) -> None:
    """Raise `ValueError` with the ``pip install`` if an option needs a package that is missing."""
    for option, wanted, package in (
        ("metrics_port", settings.metrics_port is not None, "prometheus_client"),
        ("otel", settings.otel, "opentelemetry.metrics"),
    ):
        try:
            if wanted:
                import_module(package)
        except ImportError as error:
            extra = f"rdzv-plugins[{option.partition('_')[0]}]"
            raise cannot_import(f"option '{option}'", extra, error) from error


class Report:
    """Measures one node, and serves or reports what it measures."""

    def __init__(
        self, run_id: str, node: Node, backend: str, settings: Settings, log: RunLog
    ) -> None:
        self._node = node
        self._rules = node.rules
        self._info = {
            "run": run_id,
            "node": node.record.label,
            "backend": backend,
            "version": rdzv_plugins.__version__,
        }
        self._outputs: list[_Prometheus | _OpenTelemetry] = []
        self._server: Any = None
        self._rounds = 0
        self._status: Status | None = None
        self._world_id: str | None = None
        self._asked_at = self._confirmed_at = 0.0
        self._beat_at: float | None = None
        # When an effect was last carried out; None: there was none yet.
        self._lived_at: float | None = None
        # Up to when the present outage has been counted.
        self._away_at: float | None = None
        if settings.metrics_port is not None:
            self._serve(run_id, settings, settings.metrics_port, log)
        if settings.otel:
            # Last, because an SDK never forgets an instrument's callbacks.
            self._outputs.append(_OpenTelemetry(lambda: self.gauges() if self._outputs else ()))
        for cause in CAUSES:
            self._add("rdzv_restarts_total", 0, cause=cause)

    def _serve(self, run_id: str, settings: Settings, port: int, log: RunLog) -> None:
        from prometheus_client import CollectorRegistry

        from rdzv_plugins.observe.metrics_server import MetricsServer

        host, registry = settings.metrics_host or LOOPBACK, CollectorRegistry()
        output = _Prometheus(registry)
        try:
            access, name = PageAccess(host, settings), f"rdzv-{run_id}-metrics"
            self._server = MetricsServer(
                host, port, access, registry, lambda: output.take(self.gauges()), self.health,
                lambda: str(self._node.diagnosis), name,
            )  # fmt: skip
        except (OSError, UnicodeError) as error:
            if exhausted(error) is not None:
                raise  # The node is not made either.
            log.warning(
                f"this node serves no metrics: {host}:{port} cannot be opened ({error}); set "
                "another metrics_port, or 0 for a free one"
            )
            return
        self._outputs.append(output)
        log.info(f"metrics are served at {self._server.url}/metrics")

    def close(self) -> None:
        """End the server and all reports."""
        if self._server is not None:
            self._server.close()
        self._outputs = []

    def measured(self, client: KeyValueClient) -> KeyValueClient:
        """The client, with its requests measured."""
        retried = partial(self._add, "rdzv_store_retries_total")
        return cast("KeyValueClient", Measured(client, self._note_request, retried))

    def health(self) -> tuple[bool, str]:
        """Whether this node's thread does its work, as it does in an outage; and a sentence."""
        now, longest = time.monotonic(), self._rules.lease + self._rules.interval
        if self._lived_at is None:
            return True, "the agent has not asked for a round yet"
        if now - self._lived_at > longest + self._rules.request_timeout:
            return False, f"the node has stood still for {now - self._lived_at:.0f} s"
        if self._away_at is not None:
            return True, "the store is away; this node keeps trying"
        return True, "ok"

    def watch(
        self, request: effects.Effect[Any], answer: Any, error: Exception | None = None
    ) -> None:
        """Measure an effect; a `driver.Watcher`."""
        now = self._lived_at = time.monotonic()
        if type(request) not in effects.LOCAL:
            self._time_outage(now, away=error is not None and store_is_away(error))
        match request:
            case effects.PutRecord(_, record, _) if error is None:
                self._note_record(record, now)
            case effects.FinishJoin(effects.JoinOutcome(document=RoundDocument() as document)):
                self._note_round(document, now)

    def gauges(self) -> Iterator[Sample]:
        """The present gauges; may be called from any thread."""
        view, now = self._node.view(), time.monotonic()
        document = view.document
        leads = document is not None and not document.closed and document.leader == view.me
        yield "rdzv_info", self._info, 1
        yield "rdzv_round", {}, document.round if document is not None else nan
        yield "rdzv_round_nodes", {}, document.size if document is not None else 0
        for phase in Phase:
            is_in = document is not None and document.phase is phase
            yield "rdzv_phase", {"phase": phase.value}, is_in
        since = document.since if document is not None else 0
        yield "rdzv_phase_began_timestamp_seconds", {}, since or nan
        leader = view.record if leads else view.leader
        ends = call_ends(document, leader) if document is not None and leader is not None else 0
        yield "rdzv_last_call_ends_timestamp_seconds", {}, ends or nan
        if document is not None and leads and view.records is not None:
            for name, number in _by_state(view, document).items():
                yield "rdzv_nodes", {"state": name}, number
            steps = steps_of_run(document, {**view.records, view.me: view.record})
            if steps is not None and steps.rank is not None:
                yield "rdzv_rank_behind", {"host": str(steps.host)}, steps.rank
        for name, value in step_gauges(steps_of_node(view.record)):
            yield name, {}, value
        yield "rdzv_nodes_waiting", {}, self._node.num_nodes_waiting
        yield "rdzv_leads", {}, leads
        beat = self._beat_at
        age = nan if beat is None else max(0.0, now - beat)  # A beat may come at this moment.
        yield "rdzv_heartbeat_age_seconds", {}, age
        yield "rdzv_leader_silence_seconds", {}, _leaders_silence(view)
        yield "rdzv_lease_seconds", {}, self._rules.lease
        yield "rdzv_store_up", {}, self._away_at is None

    def _note_record(self, record: NodeRecord, now: float) -> None:
        asked_before = self._status in (Status.JOIN, Status.SPARE)
        if record.status is Status.JOIN and not asked_before:
            self._asked_at = now
        if record.status is Status.RUN and record.world_id != self._world_id:
            self._world_id, self._confirmed_at = record.world_id, now
        self._beat_at, self._status = now, record.status

    def _note_round(self, document: RoundDocument, now: float) -> None:
        gathering = self._confirmed_at - self._asked_at
        self._observe("rdzv_forming_seconds", gathering, phase="gathering")
        self._observe("rdzv_forming_seconds", now - self._confirmed_at, phase="confirming")
        self._add("rdzv_rounds_total")
        if self._rounds > 0:
            for cause in causes_of(document.cause):
                self._add("rdzv_restarts_total", cause=cause)
        self._rounds += 1

    def _time_outage(self, now: float, *, away: bool) -> None:
        if self._away_at is not None:
            self._add("rdzv_store_outage_seconds_total", now - self._away_at)
        self._away_at = now if away else None

    def _note_request(self, kind: str, seconds: float, error: Exception | None) -> None:
        self._observe("rdzv_store_request_seconds", seconds, kind=kind)
        if error is not None:
            self._add("rdzv_store_failures_total", kind=kind)

    def _add(self, name: str, amount: float = 1, **labels: str) -> None:
        for output in self._outputs:
            output.add(name, amount, labels)

    def _observe(self, name: str, value: float, **labels: str) -> None:
        for output in self._outputs:
            output.observe(name, value, labels)


def step_gauges(steps: StepReport | None) -> Iterator[tuple[str, float]]:
    """The values of the metrics about steps, of a node or of a run."""
    yield "rdzv_step", nan if steps is None else steps.step
    yield "rdzv_step_seconds", nan if steps is None else steps.seconds
    yield "rdzv_step_stalled_seconds", nan if steps is None else steps.stalled


def _by_state(view: View, document: RoundDocument) -> dict[str, int]:
    """How many nodes are in each of `STATES`, as the leader sees it."""
    numbers = dict.fromkeys(STATES, 0)
    for node, record in {**(view.records or {}), view.me: view.record}.items():
        silent = node != view.me and is_due(view.confirmed_silence(node), record)
        lost = view.is_lost(node)
        state = state_of(document, node, record, silent=silent, lost=lost, now=view.wall)
        numbers[state.value] += 1
    return numbers


def _leaders_silence(view: View) -> float:
    leader = view.document.leader if view.document is not None else None
    if leader is None:
        return nan
    return 0.0 if leader == view.me else view.possible_silence(leader)


class Measured:
    """Wraps a client and times its requests; everything else is passed to the client.

    ``note`` gets the method's name, its seconds, and the error of a request that failed.
    ``retried`` is called after what the client calls already at a retry.
    """

    def __init__(
        self,
        client: KeyValueClient,
        note: Callable[[str, float, Exception | None], object],
        retried: Callable[[], object],
    ) -> None:
        self._client = client
        self._note = note
        tell = client.on_retry or bool
        client.on_retry = lambda: (tell(), retried())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return partial(self._timed, name, found) if name in _REQUESTS else found

    def _timed(self, kind: str, request: Callable[..., T], *arguments: Any, **named: Any) -> T:
        began = time.monotonic()
        try:
            answer = request(*arguments, **named)
        except ClientClosedError:
            raise
        except (RendezvousConnectionError, RendezvousStateError) as error:
            self._note(kind, time.monotonic() - began, error)
            raise
        self._note(kind, time.monotonic() - began, None)
        return answer


class _Prometheus:
    """Like `_OpenTelemetry`: `add` and `observe` are called from several threads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._built: dict[str, Any] = dict(build(registry))

    def _of(self, name: str, labels: Mapping[str, str]) -> Any:
        metric = self._built[name]
        return metric.labels(**labels) if labels else metric

    def add(self, name: str, amount: float, labels: Mapping[str, str]) -> None:
        self._of(name, labels).inc(amount)

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._of(name, labels).observe(value)

    def take(self, samples: Iterable[Sample]) -> None:
        """Set all gauges to the samples; gauges without a sample are not shown."""
        for metric in METRICS:
            if metric.kind is MetricKind.GAUGE and metric.labels:
                self._built[metric.name].clear()
        for name, labels, value in samples:
            self._of(name, labels).set(value)


class _OpenTelemetry:
    """The same metrics as instruments of OpenTelemetry, in the SDK that the application set up."""

    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        from opentelemetry import metrics

        self._samples = samples
        self._built: dict[str, Any] = {}
        meter = metrics.get_meter("rdzv_plugins", rdzv_plugins.__version__)
        for it in METRICS:
            shared = it.name, "s" if "seconds" in it.name else "1", it.text
            match it.kind:
                case MetricKind.COUNTER:
                    made: Any = meter.create_counter(*shared)
                case MetricKind.HISTOGRAM:
                    made = meter.create_histogram(
                        *shared, explicit_bucket_boundaries_advisory=it.buckets
                    )
                case MetricKind.GAUGE:
                    read = [partial(self._read, it.name)]
                    made = meter.create_observable_gauge(shared[0], read, *shared[1:])
            self._built[it.name] = made

    def _read(self, wanted: str, _: object) -> Iterable[Any]:
        from opentelemetry.metrics import Observation

        return [
            Observation(value, labels)
            for name, labels, value in self._samples()
            if name == wanted and not isnan(value)
        ]

    def add(self, name: str, amount: float, labels: Mapping[str, str]) -> None:
        self._built[name].add(amount, labels)

    def observe(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        self._built[name].record(value, labels)
