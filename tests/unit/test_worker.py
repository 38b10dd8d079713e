"""What workers can know of their round, as the agent's process hands it down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rdzv_plugins
from rdzv_plugins.config import ENVIRONMENT_PREFIX
from rdzv_plugins.protocol.documents import Status
from rdzv_plugins.testing.threads import Background
from rdzv_plugins.worker import VARIABLE, CurrentRound, current, hand_down, take_back
from tests import replace
from tests.handlers.site import Site, site

NOW = CurrentRound(
    run_id="run", round=3, world_id="3-abc", cause="n2[7] left", spares=1, domain="r7"
)


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests set them in this process."""
    for name in (VARIABLE, "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


class TestVariable:
    def test_what_is_handed_down_arrives(self) -> None:
        hand_down(NOW)
        assert rdzv_plugins.current() == NOW

    @pytest.mark.parametrize("value", [None, "", "{", "[]", '{"round": "x"}'])
    def test_another_process_knows_of_no_round(self, value: str | None) -> None:
        if value is not None:
            os.environ[VARIABLE] = value
        assert current() is None

    def test_a_field_of_a_later_version_is_no_fault(self) -> None:
        os.environ[VARIABLE] = '{"run_id":"r","round":1,"world_id":"1-a","cause":"","more":[1]}'
        assert current() == CurrentRound(run_id="r", round=1, world_id="1-a", cause="")

    def test_a_worker_of_another_run_does_not_take_it_for_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of another backend's agent, which a worker of this one started."""
        hand_down(NOW)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
        assert current() is None
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        assert current() == NOW

    def test_only_who_handed_it_down_takes_it_back(self) -> None:
        first = hand_down(NOW)
        second = hand_down(CurrentRound(run_id="other", round=0, world_id="0-b", cause=""))
        take_back(first)
        assert VARIABLE in os.environ
        take_back(second)
        take_back(second)
        take_back(None)
        assert VARIABLE not in os.environ

    def test_it_does_not_look_like_an_option(self) -> None:
        """`rdzv check` tells of variables that do, and are none."""
        assert not VARIABLE.startswith(ENVIRONMENT_PREFIX)

    def test_a_worker_need_not_import_torch(self) -> None:
        code = (
            "import sys, rdzv_plugins; now = rdzv_plugins.current()\n"
            "print(now.round, now.cause, now.domain, 'torch' in sys.modules)"
        )
        hand_down(NOW)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout == "3 n2[7] left r7 False\n"


@pytest.fixture
def here() -> Iterator[Site]:
    with site() as made:
        yield made


class TestHandlers:
    """Real ones: several in one process, as only tests start them."""

    def test_the_last_that_got_a_round_tells_of_it(self, here: Site) -> None:
        one, two = (here.handler(1, 2, domain="r7", last_call_timeout=0.0) for _ in range(2))
        here.join(one)
        first = current()
        assert first is not None
        assert (first.run_id, first.round, first.cause) == ("run", 0, "first round")
        assert (first.domain, first.spares) == ("r7", 0)
        joins = Background(two.next_rendezvous)
        here.await_that(lambda: one.num_nodes_waiting() > 0)
        here.join(one)
        joins.result(20.0)
        second, document = current(), here.document
        assert second is not None
        assert document is not None
        assert (second.round, second.world_id) == (1, document.world_id)
        assert second.cause.endswith(" joined")
        for handler in (one, two):
            here.kill(handler)
        assert current() is None, "it outlives the handlers"

    def test_spares_are_counted(self, here: Site) -> None:
        """Who waits as the ranks are given, and is left over from a unit."""
        first, *others = (here.handler(2, 4, node_unit=2, last_call_timeout=2.0) for _ in range(3))
        joins = [Background(handler.next_rendezvous) for handler in (first, *others)]
        here.await_that(lambda: sum(join.done() for join in joins) == 2)
        found = current()
        assert found is not None
        assert found.spares == 1
        assert found.domain is None

    def test_a_worker_names_the_moment(self, here: Site) -> None:
        options: dict[str, Any] = {"grow": "checkpoint", "last_call_timeout": 0.0}
        first, second = (here.handler(1, 2, **options) for _ in range(2))
        here.join(first)
        now = current()
        assert now is not None
        assert now.resize_file is not None
        joins = Background(second.next_rendezvous)
        here.await_that(lambda: second._node.record.status is Status.SPARE)
        assert first.num_nodes_waiting() == 0
        assert rdzv_plugins.resize_now()
        here.await_that(lambda: first.num_nodes_waiting() > 0)
        here.join(first)
        joins.result(20.0)
        # The file is of a round: a moment of the last one is over.
        assert not Path(now.resize_file).exists()
        for handler in (first, second):
            here.kill(handler)
        assert not Path(now.resize_file).parent.exists()

    def test_nobody_asks_for_a_moment_by_default(self, here: Site) -> None:
        assert not rdzv_plugins.resize_now()
        here.join(here.handler(1, 1))
        assert not rdzv_plugins.resize_now()

    def test_a_moment_in_a_run_that_ended_is_no_fault(self) -> None:
        hand_down(replace(NOW, resize_file="/nowhere/1-abc"))
        assert rdzv_plugins.resize_now()
