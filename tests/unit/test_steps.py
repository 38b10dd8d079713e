"""What workers and their agent tell each other in shared memory."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rdzv_plugins
from rdzv_plugins.process import stacks, steps
from rdzv_plugins.process.steps import Slot, Steps, UndecidedError
from rdzv_plugins.process.worker import VARIABLE, CurrentRound, hand_down
from rdzv_plugins.protocol.progress import Doing, Resumed
from rdzv_plugins.testing.threads import Background

pytestmark = pytest.mark.rule("checkpoint")


@pytest.fixture
def agent() -> Iterator[Steps]:
    agent = Steps(pytest.fail, save_timeout=20.0)
    yield agent
    agent.end()


def slots(agent: Steps, ranks: int = 2, round_: str = "1-a") -> list[Slot]:
    path = agent.begin(round_)
    assert path is not None
    return [Slot(path, round_, rank, ranks) for rank in range(ranks)]


class TestProgress:
    def test_it_is_unknown_until_every_rank_has_stepped(self, agent: Steps) -> None:
        assert agent.progress() is None
        first, second = slots(agent)
        assert agent.progress() is None
        assert not first.step(7)
        assert agent.progress() is None
        assert not second.step(6)
        found = agent.progress()
        assert found is not None
        assert (found.step, found.fastest, found.rank, found.saved) == (6, 7, 1, 0)

    def test_saved_is_what_every_rank_has_saved(self, agent: Steps) -> None:
        first, second = slots(agent)
        first.step(5)
        second.step(5)
        assert not agent.has_saved()
        first.saved(5)
        assert agent.has_saved()
        assert not agent.has_saved()
        assert (found := agent.progress()) is not None
        assert found.saved == 0
        second.saved(5)
        assert (found := agent.progress()) is not None
        assert found.saved == 6

    def test_steps_that_jump_back_are_saved_once_more(self, agent: Steps) -> None:
        first, second = each = slots(agent)
        for slot in each:
            slot.step(100)
            slot.saved(100)
        assert agent.has_saved()
        first.step(10)
        assert not agent.has_saved(), "the other rank saved at 100, which was told"
        second.step(10)
        for slot in each:
            slot.step(100)
        assert (found := agent.progress()) is not None
        assert found.saved == 0

    def test_a_round_begins_with_no_steps_and_leaves_no_file(
        self, agent: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also none while it runs, because the agent may be killed."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        before = os.listdir("/proc/self/fd")
        slots(agent, 1)[0].step(5)
        agent.end()
        assert agent.progress() is None
        slots(agent, 1, "2-b")
        assert agent.progress() is None
        agent.end()
        assert list(tmp_path.iterdir()) == []
        assert os.listdir("/proc/self/fd") == before

    def test_a_worker_of_an_old_round_does_not_touch_other_files(
        self, agent: Steps, tmp_path: Path
    ) -> None:
        """The system gives a closed descriptor to the next file."""
        path = agent.begin("1-a")
        assert path is not None
        assert agent.begin("1-ab") == path
        with pytest.raises(OSError, match="not of round 1-a"):
            Slot(path, "1-a", 0, 1)
        agent.end()
        with (tmp_path / "other").open("wb+") as other:
            other.truncate(1 << 20)
            assert path.endswith(f"/{other.fileno()}")
            with pytest.raises(OSError, match="not of round 1-a"):
                Slot(path, "1-a", 0, 1)

    def test_the_pace_is_the_time_of_the_last_steps(
        self, agent: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = []
        (slot,) = slots(agent, 1)
        for step, seconds in ((0, 1), (1, 2), (5, 4), (2, 5), (3, 8), (4, 7)):
            monkeypatch.setattr(time, "monotonic_ns", lambda now=seconds: now * 10**9)
            slot.step(step)
            found.append(progress.milliseconds if (progress := agent.progress()) else -1)
        assert found == [0, 1000, 500, 500, 3000, 0], "steps jump back; a rank with an older time"

    @pytest.mark.parametrize("number", [-2, 2**52, 2**63 - 2])
    def test_a_record_can_take_each_number(self, agent: Steps, number: int) -> None:
        """A node whose record the others cannot read counts as absent."""
        first, second = slots(agent)
        first.step(5)
        second.step(number)
        assert agent.progress() is None
        second.step(7)
        first.saved(number)
        second.saved(number)
        assert (found := agent.progress()) is not None
        assert found.saved <= 8

    def test_how_long_a_step_has_stood_still(
        self, agent: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def stood(seconds: float) -> int | None:
            monkeypatch.setattr(time, "monotonic_ns", lambda: int(seconds * 10**9))
            found = agent.progress()
            return found.stood if found is not None else None

        (slot,) = slots(agent, 1)
        assert stood(10) is None
        slot.step(3)
        assert stood(14) == 4000
        # It may wait for the run.
        agent.propose(5)
        assert stood(30) == 0
        agent.settle(5, False)
        assert stood(31.5) == 1500
        agent.propose(7)
        agent.settle(7, True)
        assert stood(40) == 0
        # A save that takes longer than save_timeout is no wait any more.
        assert stood(53) == 1500
        agent.release()
        agent.release()
        assert stood(55) == 2000
        # A worker that has ended does not stand still.
        monkeypatch.setattr(stacks, "lives", lambda pid, _: pid != os.getpid())
        assert stood(60) == 0

    def test_the_rank_that_does_not_answer_is_the_slowest(
        self, agent: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answers = ['Thread 1 (most recent call first):\n  File "train.py", line 3 in f', ""]
        monkeypatch.setattr(stacks, "offer", lambda: 9)
        monkeypatch.setattr(stacks, "ask", lambda workers: answers)
        monkeypatch.setattr(stacks, "wake", lambda *_: "woken")
        for rank, slot in enumerate(slots(agent), 4):
            slot.introduce(rank)
            slot.step(1)
        agent.probe()
        assert (found := agent.progress()) is not None
        assert (found.rank, found.doing) == (5, Doing.NO_ANSWER)
        assert agent.slowest() == (5, "woken")


class TestResumed:
    def test_a_round_tells_how_its_training_began_and_what_it_repeats(
        self, agent: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 0.0
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(now * 10**9))

        def train(began: float, imported: float, first: int, stepped: float) -> list[Slot]:
            nonlocal now
            now = began
            both = slots(agent, 2, f"{began}-a")
            monkeypatch.setattr(rdzv_plugins, "_imported", int(imported * 10**9))
            now = stepped
            both[0].step(first)
            now = stepped + 0.1
            both[1].step(first)
            return both

        both = train(began=10, imported=12, first=5, stepped=15)
        assert (found := agent.progress()) is not None
        assert found.resumed == Resumed(started=2000, first_step=3100)
        now = 35.0
        for slot in both:
            slot.step(25)
        agent.end()
        # A worker that never finishes a step is in a round that trains nothing.
        slots(agent, 2, "dies")[0].step(16)
        agent.end()
        # A standby may have imported the package before the round.
        train(began=50, imported=45, first=16, stepped=51)
        assert (found := agent.progress()) is not None
        assert found.resumed == Resumed(started=0, first_step=1100, lost_steps=10, trained=10_000)
        agent.end()
        # Other nodes must be able to read the record, whatever the script counts.
        train(began=70, imported=45, first=2**50, stepped=71)
        assert (found := agent.progress()) is not None
        assert found.resumed == Resumed(0, 1100, 17 - 2**50, 0)
        agent.end()
        train(began=80, imported=45, first=-7, stepped=81)
        agent.end()
        train(began=90, imported=45, first=2, stepped=91)
        assert (found := agent.progress()) is not None
        assert found.resumed == Resumed(0, 1100, 2**50 - 1, 0)


class TestProposals:
    def test_a_rank_waits_at_the_step_until_all_have_agreed(self, agent: Steps) -> None:
        (slot,) = slots(agent, 1)
        slot.step(3)
        agent.propose(5)
        assert not slot.step(4)
        waits = Background(lambda: slot.step(5))
        assert not waits.done()
        agent.settle(5, True)
        assert waits.result(5.0) is True
        assert not slot.step(6)

    def test_a_withdrawn_step_is_passed(self, agent: Steps) -> None:
        (slot,) = slots(agent, 1)
        slot.step(3)
        agent.propose(5)
        agent.settle(5, False)
        agent.propose(9)
        agent.settle(9, True)
        assert [slot.step(number) for number in range(4, 11)] == [False] * 5 + [True, False]

    def test_a_step_between_two_calls_is_met_by_the_later_one(self, agent: Steps) -> None:
        first, second = slots(agent)
        for slot in (first, second):
            slot.step(10)
        for step, saves in ((12, True), (14, False)):
            agent.propose(step)
            agent.settle(step, saves)
        assert first.step(20)
        assert second.step(20)

    def test_the_first_step_of_a_rank_meets_none(self, agent: Steps) -> None:
        """Its agent cannot have accepted a step before."""
        (slot,) = slots(agent, 1)
        agent.propose(5)
        agent.settle(5, False)
        assert not slot.step(7)

    def test_more_proposals_than_there_is_room_for(self, agent: Steps) -> None:
        (slot,) = slots(agent, 1)
        slot.step(0)
        for step in range(1, 40):
            agent.propose(step)
            agent.settle(step, step == 39)
        assert slot.step(200)

    def test_the_wait_for_an_answer_ends(
        self, agent: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(steps, "_PATIENCE", 0.05)
        (slot,) = slots(agent, 1)
        slot.step(1)
        agent.propose(2)
        with pytest.raises(UndecidedError, match="step 2, because the run's store"):
            slot.step(2)

    def test_a_rank_that_has_saved_waits_for_the_end_of_the_round(self, agent: Steps) -> None:
        (slot,) = slots(agent, 1)
        slot.saved(0)
        slot.step(1)
        agent.propose(2)
        agent.settle(2, True)
        assert slot.step(2)
        waits = Background(lambda: slot.saved(2))
        assert not waits.done()
        agent.release()
        waits.result(5.0)

    def test_steps_that_jump_back_meet_a_later_proposal_first(self, agent: Steps) -> None:
        (slot,) = slots(agent, 1)
        slot.step(100)
        agent.propose(104)
        assert not slot.step(50)
        agent.settle(104, False)
        agent.propose(52)
        agent.settle(52, True)
        assert [slot.step(number) for number in range(51, 106)] == [False, True, *[False] * 53]

    def test_each_call_for_one_step_has_one_answer(self, agent: Steps) -> None:
        """Also in two threads."""
        (slot,) = slots(agent, 1)
        slot.step(1)
        agent.propose(2)
        calls = [Background(lambda: slot.step(2)) for _ in range(4)]
        assert not any(call.done() for call in calls)
        agent.settle(2, True)
        assert all(call.result(5.0) for call in calls)
        assert slot.step(2)
        assert not slot.step(3)


class TestWorker:
    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(steps, "_slot", None)
        monkeypatch.setattr(steps, "_looked", False)
        for name in (VARIABLE, "TORCHELASTIC_RUN_ID", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)

    def test_a_process_that_is_no_worker_does_nothing(self) -> None:
        assert not rdzv_plugins.step(1)
        rdzv_plugins.saved(1)

    def test_a_worker_finds_its_slot(self, agent: Steps) -> None:
        path = agent.begin("1-a")
        hand_down(CurrentRound(run_id="r", round=1, world_id="1-a", cause="", steps_file=path))
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        assert not rdzv_plugins.step(41)
        assert (found := agent.progress()) is not None
        assert found.step == 41

    def test_a_child_of_a_worker_does_nothing(
        self, agent: Steps, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It may count steps of its own."""
        path = agent.begin("1-a")
        hand_down(CurrentRound(run_id="r", round=1, world_id="1-a", cause="", steps_file=path))
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        rdzv_plugins.step(41)
        if (child := os.fork()) == 0:
            os._exit(rdzv_plugins.step(7) or len(caplog.records) != 1)
        assert os.waitpid(child, 0)[1] == 0
        assert (found := agent.progress()) is not None
        assert found.step == 41

    @pytest.mark.parametrize(
        "ranks",
        [("0", "0"), ("x", "1"), ("5000", "6000"), ("0", "1")],
        ids=lambda it: "of".join(it),
    )
    def test_what_cannot_be_told_is_logged_once(
        self, ranks: tuple[str, str], agent: Steps, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = agent.begin("1-a")
        hand_down(CurrentRound(run_id="r", round=1, world_id="1-a", cause="", steps_file=path))
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = ranks
        if ranks == ("0", "1"):
            agent.end()
        for number in range(3):
            assert not rdzv_plugins.step(number)
        assert len(caplog.records) == 1

    def test_an_agent_without_memory_warns_once(self) -> None:
        told: list[str] = []
        agent = Steps(told.append)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            assert [agent.begin(f"{number}-a") for number in range(3)] == [None] * 3
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        agent.propose(1)
        agent.settle(1, True)
        agent.release()
        assert agent.progress() is None
        agent.end()
        (line,) = told
        assert "step() and saved() have no effect" in line
