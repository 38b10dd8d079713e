"""What workers can know of their round: real handlers, several in one process."""

from __future__ import annotations

from typing import Any

import pytest

from rdzv_plugins.process.steps import Slot
from rdzv_plugins.process.worker import VARIABLE, current
from rdzv_plugins.protocol.documents import Status
from rdzv_plugins.testing.threads import Background
from tests.handlers.site import Site


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests set them in this process."""
    for name in (VARIABLE, "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_last_that_got_a_round_tells_of_it(site: Site) -> None:
    one, two = (site.handler(1, 2, domain="r7", last_call_timeout=0.0) for _ in range(2))
    site.join(one)
    first = current()
    assert first is not None
    assert (first.run_id, first.round, first.cause) == ("run", 0, "first round")
    assert (first.domain, first.spares) == ("r7", 0)
    joins = Background(two.next_rendezvous)
    site.await_that(lambda: one.num_nodes_waiting() > 0)
    site.join(one)
    joins.result(20.0)
    second, document = current(), site.document
    assert second is not None
    assert document is not None
    assert (second.round, second.world_id) == (1, document.world_id)
    assert second.cause.endswith(" joined")
    for handler in (one, two):
        site.kill(handler)
    assert current() is None, "it outlives the handlers"


def test_spares_are_counted(site: Site) -> None:
    """A spare waits as the ranks are given, and is left over from a unit."""
    first, *others = (site.handler(2, 4, node_unit=2, last_call_timeout=2.0) for _ in range(3))
    joins = [Background(handler.next_rendezvous) for handler in (first, *others)]
    site.await_that(lambda: sum(join.done() for join in joins) == 2)
    found = current()
    assert found is not None
    assert found.spares == 1
    assert found.domain is None


def test_newcomers_come_in_when_a_worker_has_saved(site: Site) -> None:
    options: dict[str, Any] = {"grow": "checkpoint", "last_call_timeout": 0.0}
    first, second = (site.handler(1, 2, **options) for _ in range(2))
    site.join(first)
    now = current()
    assert now is not None
    assert now.steps_file is not None
    joins = Background(second.next_rendezvous)
    site.await_that(lambda: second._node.record.status is Status.SPARE)
    assert first.num_nodes_waiting() == 0
    Slot(now.steps_file, now.world_id, 0, 1).saved(7)
    site.await_that(lambda: first.num_nodes_waiting() > 0)
    site.join(first)
    joins.result(20.0)
    assert current() != now
    for handler in (first, second):
        site.kill(handler)
    with pytest.raises(OSError, match=now.steps_file):
        Slot(now.steps_file, now.world_id, 0, 1)
