"""Where DNS swallows every query: no round is lost, and beats go on.

c10d looks up the name of whatever address it connects to, or is connected from, for a line of its
log. torch 2.13 asks no more in a process in which that failed once.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import Measure
from tests.integration import hosts
from tests.integration.silent_dns import INTERVAL, REQUEST_TIMEOUT, RESOLVER_SECONDS


def play(scenario: str, handler: str, amount: float) -> Any:
    # A mount namespace has its own /etc/resolv.conf, a network namespace a port 53 to listen at.
    return hosts.play("tests.integration.silent_dns", scenario, handler, str(amount))


def test_no_round_asks_dns_and_none_is_lost(record_property: Measure) -> None:
    seen = play("rounds", "rdzv", 50)
    record_property("slowest", round(seen["slowest"], 1))
    assert seen["lost"] == []
    assert seen["names"] == []


def test_torchs_handler_waits_for_the_resolver_and_loses_no_round() -> None:
    seen = play("rounds", "torch", 2)
    assert seen["lost"] == []


@pytest.mark.parametrize("lease", [1.5 * RESOLVER_SECONDS, 0.3 * RESOLVER_SECONDS])
def test_beats_go_on_while_a_look_up_hangs(lease: float, record_property: Measure) -> None:
    # /etc/hosts does not have ::1 here. With the shorter lease, rank 0 is given up meanwhile.
    seen = play("beats", "rdzv", lease)
    record_property("seconds", round(seen["seconds"], 1))
    record_property("longest gap", round(max(seen["gaps"]), 2))
    assert seen["names"] != [], "DNS was not asked: this test tells nothing"
    assert len(seen["gaps"]) == 3
    assert max(seen["gaps"]) < 3 * INTERVAL


@pytest.mark.parametrize(
    "store",
    [
        "redis",
        *(
            pytest.param(it, marks=pytest.mark.soak)
            for it in ("etcd", "consul", "nats", "postgres")
        ),
    ],
)
def test_a_store_whose_name_was_known_is_reached_while_dns_hangs(
    store: str, record_property: Measure
) -> None:
    seen = play("reconnects", store, 2)
    record_property("reconnected after, s", round(max(seen["took"]), 2))
    assert seen["names"] != [], "DNS was not asked: this test tells nothing"
    # The resolver's 10 s made a node miss its beats, and be lost.
    assert max(seen["took"]) < REQUEST_TIMEOUT
