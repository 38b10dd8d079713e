"""Where the time of a restart goes, which steps it loses, and how much of the time was good."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from rdzv_plugins.observe.history import Row, goodput
from rdzv_plugins.protocol.documents import Outcome, Phase
from rdzv_plugins.protocol.progress import Progress, Resumed, Trained
from rdzv_plugins.protocol.round_record import Durations
from tests import replace
from tests.unit.crowd import Crowd
from tests.unit.life import RULES

NAMES = ("n1", "n2", "n3")
THREE = replace(RULES, max_nodes=3, last_call_timeout=0.5)
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def trains(crowd: Crowd, *resumed: Resumed) -> None:
    """Each node's workers, in this order, have finished their first step."""
    for member, it in zip(crowd.members.values(), resumed, strict=False):
        member.workers.found = Progress(step=7, fastest=7, resumed=it)


class TestRecord:
    def test_the_first_step_is_noted_once_every_rank_has_finished_one(self) -> None:
        crowd = Crowd()
        leader = crowd.begin(THREE, *NAMES)[0]
        trains(crowd, Resumed(10, 1990), Resumed(30, 1000))
        crowd.play(3.0)
        (row,) = leader.archive.rows()
        assert row.seconds is not None
        assert row.seconds.first_step is None
        trains(crowd, Resumed(10, 1990), Resumed(30, 1000), Resumed(20, 1500))
        crowd.play(3.0)
        (row,) = leader.archive.rows()
        assert row.seconds is not None
        assert (row.seconds.started, row.seconds.first_step) == (0.03, 1.97)
        assert [*row.seconds.phases][-2:] == ["started", "first_step"]
        assert (row.lost_steps, row.trained) == (None, 0.0)
        assert leader.log.count("RecordHistory") == 2
        # The others need it once.
        assert leader.node.record.resumed is not None
        crowd.play(15.0)
        assert leader.node.record.resumed is None
        assert leader.node.record.step == (7, 0, 0)
        assert leader.log.count("RecordHistory") == 2

    def test_the_steps_that_are_lost_are_those_of_the_round_before(self) -> None:
        crowd = Crowd()
        crowd.begin(THREE, *NAMES)
        trains(crowd, *[Resumed(0, 0)] * 3)
        crowd.play(3.0)
        crowd.members["n3"].crash()
        for member in crowd.members.values():
            member.workers.found = None
        crowd.play_until(lambda: crowd.document.size == 2 and crowd.document.round == 1, 30.0)
        # "n2" was not in the round before, and knows of an earlier step.
        trains(crowd, Resumed(0, 0, 40, 5000), Resumed(0, 0, -3, 9000))
        crowd.play(3.0)
        row = crowd.members["n1"].archive.rows()[-1]
        assert (row.round, row.lost_steps, row.trained) == (1, 40, 5.0)
        assert row.lost[0].pid == 1
        assert row.took.endswith("; 40 steps lost")


# Steps 1 to 11, 100 ns each.
@pytest.mark.parametrize(
    ("lost", "kept"), [(0, 1000), (4, 600), (10, 0), (11, -100), (30, -2000), (-5, 1000)]
)
def test_the_time_of_steps_that_are_kept(lost: int, kept: int) -> None:
    assert Trained(first=1, last=11, began=5000, ended=6000).kept(lost) == kept
    assert Trained(first=1, last=1, began=5000, ended=5000).kept(lost) == 0


def row(round_: int, at: float, trained: float = 0.0, **took: float) -> Row:
    return Row(
        incarnation="a", round=round_, phase=Phase.RUNNING, nodes=2, seconds=Durations(**took),
        trained=trained, at=(BEGAN + timedelta(seconds=at)).isoformat(),
    )  # fmt: skip


END = replace(row(0, 200.0), phase=Phase.CLOSED, seconds=None, outcome=Outcome.SUCCEEDED)
FIRST = row(0, 0.0, started=1.0, first_step=9.0)
FORMS = row(1, 60.0, noticed=5.0, gathering=4.0, confirming=1.0)
SECOND = row(1, 60.0, 30.0, noticed=5.0, gathering=4.0, confirming=1.0, started=1, first_step=9)


@pytest.mark.parametrize(
    ("rows", "good"),
    [
        ([], None),
        ([row(0, 0.0, gathering=1.0)], None),
        ([FIRST], 90),
        # Nobody knows yet what the second round repeats.
        ([FIRST, FORMS], 40),
        ([FIRST, SECOND], 30 + 30),
        ([replace(FIRST, incarnation="b"), SECOND], (40 - 10) / 0.4),
        ([FIRST, SECOND, END], (30 + 130) / 2),
        ([FIRST, replace(SECOND, trained=-500.0)], 0),
    ],
    ids=["none", "no steps", "first", "forms", "second", "of another run", "ended", "all lost"],
)
def test_goodput_is_the_share_of_time_in_steps_that_count(
    rows: list[Row], good: float | None
) -> None:
    found = goodput(rows, BEGAN + timedelta(seconds=100))
    assert found == (None if good is None else pytest.approx(good / 100))
