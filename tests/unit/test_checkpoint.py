"""The leader's part in a checkpoint before a planned change of a round."""

from __future__ import annotations

from typing import Any

import pytest

from rdzv_plugins.kv import MemoryServer
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import Phase, RoundDocument, Saving, Status
from rdzv_plugins.protocol.failure_detector import Watched
from rdzv_plugins.protocol.own_checkpoint import OwnCheckpoint
from rdzv_plugins.protocol.policies.checkpoint import MOST_REJECTIONS
from rdzv_plugins.protocol.progress import Progress
from rdzv_plugins.protocol.rules import View, Wait
from tests import replace

from .life import Life, Time
from .views import RULES, document, record, running, view

pytestmark = pytest.mark.rule("checkpoint")

ROUND = document(Phase.RUNNING, participants=("n1", "n2"))
ROUND = replace(ROUND, ran=ROUND.world_id)
RESTART = replace(ROUND, restart="somebody asked for it")
# The fastest worker is at step 100, and each step takes 10 ms.
STEP = (100, 10, 0)


def leads(
    now: RoundDocument, one: dict[str, Any], two: dict[str, Any] | None = None, **more: Any
) -> View:
    """The view of the leader, n1, with fields of the two records."""
    each = {"n1": one, "n2": one if two is None else two}
    records = {name: replace(running(name, now), **fields) for name, fields in each.items()}
    rules = replace(RULES, save_timeout=more.pop("save_timeout", 60.0))
    return view(records["n1"], now, records, joining=False, rules=rules, **more)


def written(here: View) -> RoundDocument | None:
    """The document that the leader writes; None: it writes none."""
    after: RoundDocument | None = getattr(decide(here), "document", None)
    return after


def saving(step: int = 152, **fields: Any) -> RoundDocument:
    return replace(RESTART, saving=Saving(step, **fields))


def test_a_step_ahead_of_the_fastest_rank_is_named() -> None:
    after = written(leads(RESTART, {"step": STEP}, {"step": (90, 10, 0)}))
    assert after == saving(152)


def test_the_step_is_near_if_the_time_of_a_step_is_unknown() -> None:
    now = {"step": (100, 0, 0)}
    assert written(leads(RESTART, now)) == saving(106)
    rejects = {**now, "vote": (106, 160)}
    assert written(leads(saving(106), rejects)) == saving(169, rejected=(106,))


def test_the_grace_after_an_outage_does_not_name_an_earlier_step() -> None:
    here = leads(
        RESTART,
        {"step": (50, 10, 0)},
        {"step": STEP},
        watched={"n2": Watched(1, since=6.0, looked=0.0)},
    )
    assert here.possible_silence("n2") < 0
    assert written(here) == saving(152)


def test_a_leave_asks_for_a_checkpoint() -> None:
    after = written(leads(ROUND, {"step": STEP}, {"step": STEP, "leaves": True}))
    assert after == replace(ROUND, saving=Saving(152))
    assert written(leads(ROUND, {"step": STEP})) is None


def test_newcomers_ask_for_a_checkpoint_where_the_run_grows_at_one() -> None:
    now = replace(ROUND, max_nodes=3)
    here = leads(now, {"step": STEP, "max_nodes": 3})
    records = {**(here.records or {}), "n3": record("n3", Status.SPARE, max_nodes=3)}
    rules = replace(here.rules, max_nodes=3, grow="checkpoint")
    assert written(replace(here, records=records, rules=rules)) == replace(now, saving=Saving(152))
    saved = replace(now, saving=Saving(152, agreed=True, saved=True))
    after = written(replace(here, records=records, rules=rules, document=saved, latest=saved))
    assert after is not None
    assert after.phase is Phase.FORMING


@pytest.mark.parametrize(
    ("two", "options"),
    [
        ({"step": None}, {}),
        ({"step": STEP}, {"save_timeout": 0.0}),
        ({"step": STEP, "world_id": "0-other"}, {}),
    ],
    ids=["a script without step()", "save_timeout=0", "another round"],
)
def test_the_round_ends_at_once_if_no_checkpoint_is_possible(
    two: dict[str, Any], options: dict[str, Any]
) -> None:
    after = written(leads(RESTART, {"step": STEP}, two, **options))
    assert after is not None
    assert after.phase is Phase.FORMING


def test_the_run_agrees_once_every_node_has_accepted() -> None:
    accepts = {"step": STEP, "vote": (152, 103)}
    assert isinstance(decide(leads(saving(), accepts, {"step": STEP})), Wait)
    assert isinstance(decide(leads(saving(), accepts, {"step": STEP, "vote": (99, 1)})), Wait)
    assert written(leads(saving(), accepts)) == saving(agreed=True)


def test_a_refused_step_is_followed_by_a_later_one() -> None:
    rejects = {"step": STEP, "vote": (152, 160)}
    after = written(leads(saving(), {"step": STEP, "vote": (152, 103)}, rejects))
    # One second ahead now, in steps of 10 ms.
    assert after == saving(261, rejected=(152,))


def test_a_record_that_the_store_has_lost_refuses_nothing() -> None:
    here = leads(saving(), {"step": STEP, "vote": (152, 100)})
    assert written(replace(here, records={"n1": here.record})) is None


def test_what_the_store_has_lost_of_a_checkpoint_comes_back_with_the_records() -> None:
    accepts = {"step": STEP, "vote": (152, 103)}
    knows = {**accepts, "agreed": 152}
    assert written(leads(ROUND, accepts)) == replace(ROUND, saving=Saving(152))
    assert written(leads(saving(106), accepts)) == saving(152, rejected=(106,))
    late = {"step": STEP, "vote": (106, 103)}
    assert written(leads(RESTART, late, knows)) == saving(152, agreed=True, rejected=(106,))
    assert written(leads(saving(), knows, silent={"n2": 9.0})) == saving(agreed=True)
    assert written(leads(ROUND, {**knows, "saved": 153})) is None


def test_a_step_that_was_rejected_stays_rejected() -> None:
    knows = {"step": STEP, "vote": (152, 103), "agreed": 152}
    after = written(leads(saving(rejected=(152,)), knows))
    assert after is not None
    assert after.phase is Phase.FORMING


def test_the_run_gives_up_after_many_refusals() -> None:
    rejected = tuple(range(MOST_REJECTIONS))
    answer = {"step": STEP, "vote": (152, 160)}
    after = written(leads(saving(rejected=rejected), answer))
    assert after == saving(rejected=(*rejected, 152))
    assert after is not None
    after = written(leads(after, answer))
    assert after is not None
    assert after.phase is Phase.FORMING


@pytest.mark.parametrize(("saved", "then"), [(152, False), (153, True)])
def test_the_round_ends_once_every_rank_has_saved(saved: int, then: bool) -> None:
    knows = {"step": STEP, "agreed": 152}
    here = leads(saving(agreed=True), {**knows, "saved": 153}, {**knows, "saved": saved})
    assert (written(here) == saving(agreed=True, saved=True)) is then
    after = written(leads(saving(agreed=True, saved=True), {"step": STEP}))
    assert after is not None
    assert (after.phase, after.saving) == (Phase.FORMING, None)


def test_a_save_from_before_steps_jumped_back_does_not_count_for_an_earlier_step() -> None:
    life = Life("n1", MemoryServer(), Time(), RULES)
    heartbeat, workers = life.node._heartbeat, life.workers
    checkpoint = OwnCheckpoint(workers, heartbeat)
    heartbeat.amend(status=Status.RUN, world_id=ROUND.world_id)

    def is_saved(step: int) -> bool:
        told = {"step": STEP, "agreed": heartbeat.record.agreed, "saved": heartbeat.record.saved}
        return written(leads(saving(step, agreed=True), told)) is not None

    for step in (100, 20):
        workers.found = Progress(step - 10, step - 10)
        checkpoint.take_up(saving(step))
        assert not is_saved(step), "the node does not know yet that the run has agreed"
        checkpoint.take_up(saving(step, agreed=True))
        assert not is_saved(step)
        workers.found = Progress(step, step, saved=step + 1)
        checkpoint.take_up(saving(step, agreed=True))
        assert is_saved(step)
        checkpoint.take_up(ROUND)


@pytest.mark.parametrize(("seconds", "then"), [(59.0, False), (60.0, True)])
def test_the_round_ends_without_a_checkpoint_after_save_timeout(seconds: float, then: bool) -> None:
    here = leads(saving(agreed=True), {"step": STEP}, saving_for=seconds)
    after = written(here)
    assert (after is not None and after.phase is Phase.FORMING) is then
    if not then:
        action = decide(here)
        assert isinstance(action, Wait)
        assert action.seconds is not None
        assert action.seconds <= 1.0


def test_a_lost_node_ends_the_round_at_once() -> None:
    after = written(leads(saving(agreed=True), {"step": STEP}, silent={"n2": 9.0}))
    assert after is not None
    assert after.phase is Phase.FORMING


def test_a_checkpoint_that_nobody_wants_any_more_is_dropped() -> None:
    now = replace(ROUND, saving=Saving(152, agreed=True, saved=True))
    assert written(leads(now, {"step": STEP})) == ROUND
