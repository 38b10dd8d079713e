"""What workers can know of their round, as the agent's process hands it down."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import rdzv_plugins
from rdzv_plugins.config import ENVIRONMENT_PREFIX
from rdzv_plugins.worker import VARIABLE, CurrentRound, current, hand_down, take_back
from tests import replace

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


def test_a_moment_in_a_run_that_ended_is_no_fault() -> None:
    hand_down(replace(NOW, resize_file="/nowhere/1-abc"))
    assert rdzv_plugins.resize_now()
