"""When a run says that no step comes, when it ends the round, and which rank it names."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from rdzv_plugins.process import stacks
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import Phase, RoundDocument
from rdzv_plugins.protocol.progress import Doing, Progress
from rdzv_plugins.protocol.remarks import remarks
from rdzv_plugins.protocol.rules import View
from rdzv_plugins.protocol.stalls import stall_of, steps_of_run
from tests import replace

from .views import RULES, document, running, view

ROUND = document(Phase.RUNNING, participants=("n1", "n2", "n3"))
ROUND = replace(ROUND, ran=ROUND.world_id)
STEP = (41, 800, 0)
OVER = (10_000, Doing.OWN_CODE)


def leads(*fields: dict[str, Any], **more: Any) -> View:
    """The view of the leader, n1, of nodes with these records."""
    records = {
        f"n{number}": replace(running(f"n{number}", ROUND), **it)
        for number, it in enumerate(fields, 1)
    }
    rules = replace(RULES, step_timeout=more.pop("step_timeout", 10.0))
    return view(records["n1"], ROUND, records, joining=False, rules=rules, **more)


def ended(here: View) -> RoundDocument | None:
    """The next round, if the leader ends this one."""
    after: RoundDocument | None = getattr(decide(here), "document", None)
    return after if after is not None and after.phase is Phase.FORMING else None


@pytest.mark.parametrize(
    ("usual", "stood", "timeout", "told"),
    [
        (800, 59_999, 0.0, False),
        (800, 60_000, 0.0, True),
        (0, 60_000, 0.0, True),
        (4_000, 79_999, 0.0, False),
        (4_000, 80_000, 0.0, True),
        (800, 10_000, 10.0, True),
        (800, 60_000, 300.0, True),
    ],
)
def test_no_step_for_much_longer_than_usual(
    usual: int, stood: int, timeout: float, told: bool
) -> None:
    now = Progress(step=41, fastest=41, milliseconds=usual, stood=stood)
    found = stall_of(now, replace(RULES, step_timeout=timeout))
    assert found == ((stood, Doing.OWN_CODE) if told else None)
    assert stall_of(None, RULES) is None


@pytest.mark.parametrize(
    ("stalls", "named"),
    [
        (((41, Doing.OWN_CODE), (40, Doing.COLLECTIVE), (41, Doing.NO_ANSWER)), 2),
        (((41, Doing.COLLECTIVE), (41, Doing.OWN_CODE), (41, Doing.NO_ANSWER)), 3),
        (((41, Doing.COLLECTIVE), (41, Doing.OWN_CODE), (41, Doing.COLLECTIVE)), 2),
    ],
    ids=["fewest steps", "no answer", "in no collective"],
)
def test_the_rank_that_is_named(stalls: tuple[tuple[int, Doing], ...], named: int) -> None:
    fields = [
        {"step": (step, 800, number), "stall": (10_000 + number, doing)}
        for number, (step, doing) in enumerate(stalls, 1)
    ]
    after = ended(leads(*fields))
    assert after is not None
    assert after.cause.stuck.first == (f"n{named}[1]",)
    assert f"no step for 10 s (usually 0.8 s): rank {named} on n{named} stands" in after.reason


@pytest.mark.parametrize(
    ("other", "text"),
    [(Doing.COLLECTIVE, "for other ranks, as all others do"), (Doing.OWN_CODE, "for other ranks")],
)
def test_what_all_others_do_is_told_only_of_all_others(other: Doing, text: str) -> None:
    behind = {"step": (40, 800, 0), "stall": (10_000, Doing.COLLECTIVE)}
    after = ended(leads(behind, *[{"step": STEP, "stall": (10_000, other)}] * 2))
    assert after is not None
    assert after.reason.endswith(f"stands at step 40; it waits in torch {text}")


def test_the_one_that_stood_still_for_longest_is_named() -> None:
    told = [{"step": STEP, "stall": OVER}] * 3
    after = ended(leads(*told, silent={"n2": 0.5, "n3": 0.7}))
    assert after is not None
    assert after.cause.stuck.first == ("n3[1]",)


@pytest.mark.parametrize(
    ("here", "ends"),
    [
        (leads({"step": STEP}, {"step": STEP}, {"step": STEP, "stall": OVER}), False),
        (leads({"step": STEP}, {"step": STEP}, {"step": STEP, "stall": (11_000, 1)}), True),
        (leads({}, {}, {"step": STEP, "stall": OVER}), True),
        (leads(*[{"step": STEP, "stall": OVER}] * 3, step_timeout=0.0), False),
        (leads(*[{"step": STEP, "stall": (9_999, 1)}] * 3), False),
        (leads(*[{"step": STEP, "stall": OVER, "world_id": "0-other"}] * 3), False),
    ],
    ids=[
        "the others may tell it soon",
        "the others had an interval",
        "the others tell no steps",
        "off",
        "not long enough",
        "another round",
    ],
)
def test_when_the_round_ends(here: View, ends: bool) -> None:
    assert (ended(here) is not None) is ends


@pytest.mark.parametrize(
    ("one", "two", "text"),
    [
        ((5000, 800, 0), (4997, 800, 7), "step 4997, 0.8 s each"),
        ((5000, 800, 0), (4996, 800, 7), "step 4996, 0.8 s each; rank 7 on n2 is behind"),
        ((5000, 0, 0), (4900, 0, 7), "step 4900"),
    ],
    ids=["by the age of its record", "behind", "unknown pace"],
)
def test_the_rank_that_is_behind(one: Any, two: Any, text: str) -> None:
    records = {"n1": {"step": one}, "n2": {"step": two}}
    found = {node: replace(running(node, ROUND), **it) for node, it in records.items()}
    assert str(steps_of_run(ROUND, found)) == text
    assert steps_of_run(ROUND, {"n1": running("n1", ROUND)}) is None


def test_each_node_says_once_that_its_worker_stands_still() -> None:
    here = leads({"step": STEP, "stall": (312_000, 1)}, {}, {})
    (remark,) = [it for it in remarks(here) if it[0] == "stalled"]
    assert remark[1:] == (
        (ROUND.world_id, 41),
        "no step for 312 s (usually 0.8 s): rank 0 on n1 stands at step 41",
    )


def test_a_worker_answers_with_its_stacks() -> None:
    memory, pid = stacks.offer(), os.getpid()
    assert memory
    for _ in range(2):
        (text,) = stacks.ask([(pid, memory)])
        assert text.count("most recent call first") >= threading.active_count()
        assert "in test_a_worker_answers_with_its_stacks" in text
        assert not stacks.is_in_a_collective(text)
    assert stacks.is_in_a_collective(
        text.replace(stacks.__file__, "/lib/torch/distributed/distributed_c10d.py")
    )
    assert stacks.lives(pid, memory)
    os.close(memory)
    assert not stacks.lives(pid, memory)
    assert stacks.ask([(pid, memory), (pid, 0)]) == ["", ""]
