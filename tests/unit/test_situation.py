"""A leader, and whoever looks at its run from outside, derive the same facts."""

from __future__ import annotations

import pytest

from rdzv_plugins.protocol.documents import NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.situation import Situation, assess, assess_from_outside
from tests import replace
from tests.unit.views import all_running, document, joining, record, running, view

RAN = document(Phase.RUNNING)
FORMS = document(Phase.FORMING, round_=5, previous=("n1", "n2", "n3"))
BACK = joining("n1", "n2", round_=4)

FORMING = (
    "kept_out",
    "live",
    "not_rejoined",
    "previous_gone",
    "awaited",
    "asking",
    "ready",
    "size",
    "doubted",
)
RUNNING = (*FORMING[:2], "done", "absent", "present", "waiting", "newcomers", "growth", "room")


def of_both(
    now: RoundDocument, records: dict[str, NodeRecord], silent: tuple[str, ...] = ()
) -> tuple[Situation, Situation]:
    """As the leader, n1, and as an observer of the same records knows it."""
    ages = dict.fromkeys(silent, 9.0)
    inside = assess(view(records["n1"], now, records, silent=ages), now)
    is_lost = ages.__contains__
    return inside, assess_from_outside(now, records, is_lost, is_lost, 0.0)


@pytest.mark.parametrize(
    ("records", "silent", "not_rejoined", "size"),
    [
        (BACK | {"n3": running("n3", RAN)}, (), {"n3"}, 2),
        (BACK | {"n3": running("n3", RAN)}, ("n3",), {"n3"}, 2),
        (BACK | {"n3": record("n3", Status.LEFT, 4)}, (), {"n3"}, 2),
        (BACK | {"n3": record("n3", round_=4)}, (), set(), 3),
        (BACK, (), {"n3"}, 2),
        ({"n1": BACK["n1"]} | joining("n9"), ("n2", "n3"), {"n2", "n3"}, 2),
    ],
    ids=["works", "lost", "left", "asks", "without a record", "replaced"],
)
def test_while_a_round_forms(
    records: dict[str, NodeRecord], silent: tuple[str, ...], not_rejoined: set[str], size: int
) -> None:
    inside, outside = of_both(FORMS, records, silent)
    assert inside.not_rejoined == not_rejoined
    assert inside.size == size
    assert {it: getattr(inside, it) for it in FORMING} == {
        it: getattr(outside, it) for it in FORMING
    }


@pytest.mark.parametrize("done", [(), ("n2",)], ids=["all work", "one is done"])
def test_while_a_round_runs(done: tuple[str, ...]) -> None:
    now = replace(RAN, participants=("n1", "n2"), max_nodes=3)
    now = replace(now, ran=now.world_id)
    records = all_running(now) | joining("n8", "n9")
    records |= {node: replace(records[node], status=Status.DONE) for node in done}
    inside, outside = of_both(now, records, ("n9",))
    assert (inside.waiting, inside.growth, inside.room) == (["n8"], 0 if done else 1, 1)
    assert {it: getattr(inside, it) for it in RUNNING} == {
        it: getattr(outside, it) for it in RUNNING
    }


def test_a_fact_is_derived_once() -> None:
    at, _ = of_both(FORMS, BACK)
    assert at.ready is at.ready
    assert at.live is at.live
