"""The alerts, options and figures of the page on operating are those of the product."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rdzv_plugins.cli.check.store import nodes_within
from rdzv_plugins.observe.exporter import EXPORTED
from rdzv_plugins.observe.inspection import Condition
from rdzv_plugins.observe.metrics import CAUSES, METRICS, STATES, Metric, MetricKind
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.stores import STORES, client_class

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
RULES = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
assert RULES is not None
ALERTS = re.findall(r"alert: (\w+)", RULES[1])
EXPRESSIONS = re.findall(r"expr: (?:>-)?(.*?)(?=\n {6,8}(?:for|- alert)|\Z)", RULES[1], re.DOTALL)

# The values of labels whose values the product chooses.
VALUES = {
    "condition": {it.value for it in Condition},
    "cause": {*CAUSES},
    "state": {*STATES},
    "phase": {it.value for it in Phase},
}
BY_PROMETHEUS = {"instance", "job", "le"}


def sampled(metric: Metric) -> list[str]:
    """The names under which Prometheus has it."""
    if metric.kind is not MetricKind.HISTOGRAM:
        return [metric.name]
    return [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]


LABELS: dict[str, set[str]] = {}
for each in (*METRICS, *EXPORTED):
    for name in sampled(each):
        LABELS.setdefault(name, set(BY_PROMETHEUS)).update(each.labels)


def test_there_are_alerts() -> None:
    assert len(ALERTS) == len(EXPRESSIONS) == 6
    assert all(re.search(r"\brdzv_\w+", it) for it in EXPRESSIONS)


ROWS = re.findall(
    r"^\| `([a-z0-9-]+)` \| ([^|]+) \| ([0-9,]+) \| ([0-9,]+) \|$", PAGE, re.MULTILINE
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_nodes_of_the_page_are_those_that_check_tells(row: tuple[str, ...]) -> None:
    backend, cost, every_5, every_15 = row
    heartbeat_ms = client_class(backend).heartbeat_ms
    assert heartbeat_ms is not None
    assert backend == "dynamodb" or cost == str(heartbeat_ms)
    assert every_5 == f"{nodes_within(heartbeat_ms, 5):,}"
    assert every_15 == f"{nodes_within(heartbeat_ms, 15):,}"


def test_each_store_that_was_measured_has_its_row() -> None:
    measured = [it for it in STORES if client_class(it).heartbeat_ms is not None]
    assert [row[0] for row in ROWS] == measured


def test_each_metric_of_the_page_is_there() -> None:
    names = {*re.findall(r"\brdzv_[a-z_]+\b", PAGE)} - {"rdzv_plugins"}
    assert names
    assert not names - {*LABELS}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_alert_uses_the_labels_of_its_metrics(expression: str) -> None:
    for metric, selector in re.findall(r"\b(rdzv_\w+)(?:\{(.*?)\})?", expression):
        for label, value in re.findall(r'(\w+)!?="(.*?)"', selector):
            assert label in LABELS[metric]
            assert not value or value in VALUES.get(label, {value})
    grouped = {name for it in re.findall(r"by \((.*?)\)", expression) for name in it.split(", ")}
    metrics = re.findall(r"\brdzv_\w+", expression)
    assert all(grouped <= LABELS[metric] for metric in metrics)


def test_the_table_of_timeouts_has_the_defaults() -> None:
    chapter = PAGE.partition("## Timeouts")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`.*? \| ([\d,]+) s", chapter, re.MULTILINE)
    assert len(rows) > 7
    for option, default in rows:
        assert getattr(Settings(), option) == float(default.replace(",", ""))
