"""What the exporter counts and calls its metrics; tests/integration/test_exporter.py scrapes it."""

from __future__ import annotations

from typing import Any

from rdzv_plugins.observe.exporter import EXPORTED, _Restarts
from rdzv_plugins.observe.history import Row
from rdzv_plugins.observe.metrics import METRICS, TABLE, By
from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.protocol.round_record import Member


def row(number: int, incarnation: str = "a", **fields: Any) -> Row:
    return Row(
        incarnation=incarnation, round=number, phase=fields.pop("phase", Phase.RUNNING), nodes=1,
        at="2026-01-01", **fields,
    )  # fmt: skip


WHO = (Member(name="host[1]"),)


def test_a_round_counts_once_for_each_cause_and_never_twice() -> None:
    restarts = _Restarts()
    rows = [row(0, joined=WHO), row(1, lost=WHO, failed=WHO), row(2)]
    restarts.note(rows)
    restarts.note(rows)
    counted = {cause: number for cause, number in restarts.by_cause.items() if number}
    assert counted == {"lost": 1, "failed": 1, "other": 1}


def test_rounds_that_the_store_drops_stay_counted_and_an_id_used_again_adds_to_them() -> None:
    restarts = _Restarts()
    restarts.note([row(0), row(1, lost=WHO)])
    restarts.note([row(1, lost=WHO), row(2, lost=WHO)])
    restarts.note(
        [row(2, lost=WHO), row(2, phase=Phase.CLOSED), row(0, "b"), row(1, "b", left=WHO)]
    )
    assert (restarts.by_cause["lost"], restarts.by_cause["left"]) == (2, 1)


def test_what_a_node_measures_too_is_described_once() -> None:
    names = [metric.name for metric in TABLE]
    assert len({*names}) == len(names)
    shared = {metric.name for metric in METRICS} & {metric.name for metric in EXPORTED}
    assert shared == {metric.name for metric in TABLE if metric.by is By.BOTH}
    assert len(shared) == 14
    runs = [metric.name for metric in EXPORTED if metric.labels[:1] != ("run",)]
    assert runs == ["rdzv_store_up"]
