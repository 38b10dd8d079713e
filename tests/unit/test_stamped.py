"""Paths and stamps of the stores that share compare-and-set in two requests."""

from __future__ import annotations

import time
from email.message import Message
from email.utils import formatdate

import pytest

from rdzv_plugins.kv.base import Stored, segments, stamped
from rdzv_plugins.stores.consul import _time_of


@pytest.mark.parametrize(
    ("namespace", "prefix", "parts"),
    [
        ("rdzv/run", "rdzv", ["rdzv", "run"]),
        ("ml/rdzv/run", "ml/rdzv", ["ml", "rdzv", "run"]),
        ("rdzv/a/b", "rdzv", ["rdzv", "a%2Fb"]),
        ("rdzv/..", "rdzv", ["rdzv", "%%2E%2E"]),
        ("rdzv/", "rdzv", ["rdzv", "%"]),
        ("other/ü", "rdzv", ["other", "%C3%BC"]),
    ],
)
def test_a_run_is_one_segment(namespace: str, prefix: str, parts: list[str]) -> None:
    assert segments(namespace, prefix) == parts


def test_runs_have_segments_of_their_own() -> None:
    runs = ["", ".", "..", "%2E", "%", "%%2E", "a/b", "a%2Fb", "!expire", "=k", "#k"]
    assert len({segments(f"rdzv/{run}", "rdzv")[1] for run in runs}) == len(runs)


def test_equal_values_have_different_versions() -> None:
    one, two = Stored.parse(stamped(b"same")), Stored.parse(stamped(b"same"))
    assert one.value == two.value == b"same"
    assert one.version != two.version


@pytest.mark.parametrize("ahead", [-3600.0, -1.5, 0.0, 1.5, 3600.0])
def test_the_agents_clock_counts(ahead: float) -> None:
    headers = Message()
    agent = time.time() + ahead
    headers["Date"] = formatdate(agent, usegmt=True)
    assert abs(_time_of(headers) - agent) <= 1.1
