"""A host that is lost again and again, as where the kernel ends its agent for lack of memory."""

from __future__ import annotations

import logging

import pytest

from rdzv_plugins.protocol.documents import Status
from rdzv_plugins.testing.threads import Background
from tests.handlers.site import site

pytestmark = pytest.mark.rule("quarantine")


def test_by_default_its_fourth_coming_ends_no_round(caplog: pytest.LogCaptureFixture) -> None:
    with site() as run, caplog.at_level(logging.WARNING):
        healthy = run.handler(1, 2)
        for _ in range(3):
            flapping = run.handler(1, 2, address="127.0.0.2")
            infos = run.join(healthy, flapping)
            assert [info.world_size for info in infos] == [2, 2]
            run.kill(flapping)
            run.await_that(healthy.num_nodes_waiting)
        (alone,) = run.join(healthy)
        assert alone.world_size == 1
        again = run.handler(1, 2, address="127.0.0.2")
        Background(again.next_rendezvous)
        run.await_that(lambda: again._node.record.status is Status.SPARE)
        assert healthy.num_nodes_waiting() == 0
    says = [line for line in caplog.messages if "quarantine_after" in line]
    assert len(says) == 1
    assert "127.0.0.2 quarantined until" in says[0]
    assert "3 rounds ended because of it within" in says[0]
