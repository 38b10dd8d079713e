"""What a node makes of what it reads, and of what it cannot read."""

from __future__ import annotations

import pytest

from rdzv_plugins.kv import Entry
from rdzv_plugins.protocol.documents import CorruptDocumentError, Outcome, Phase, RoundDocument
from rdzv_plugins.protocol.observer import Observer
from tests import replace

from .life import Time
from .views import RULES, RUN, document, record

MINE = document(Phase.RUNNING)
THEIRS = document(Phase.RUNNING, incarnation="theirs", round_=0, leader="n9",
                  participants=("n8", "n9"))  # fmt: skip


def observer(time: Time, *seen: RoundDocument) -> Observer:
    """One that has seen these documents, and was named in the first."""
    made = Observer("n2", RULES, time)
    for number, each in enumerate(seen):
        made.adopt(entry(each, str(number)))
    if seen:
        made.confirm(seen[0])
    return made


def entry(of: RoundDocument, version: str) -> Entry:
    return Entry(of.encode(), version)


def test_who_was_in_a_run_that_ended_is_in_no_other(time: Time) -> None:
    seen = observer(time, MINE, THEIRS)
    assert not seen.closed
    seen.hear_of_the_end(RUN, Outcome.SUCCEEDED)
    assert seen.closed
    # Whatever becomes of the other run.
    seen.adopt(entry(replace(THEIRS, leader="n8"), "later"))
    assert seen.closed
    assert seen.latest is not None
    assert seen.latest.is_of(MINE)


def test_who_was_in_none_of_them_is_in_the_next(time: Time) -> None:
    closed = replace(MINE, phase=Phase.CLOSED, outcome=Outcome.CLOSED)
    seen = Observer("n7", RULES, time)
    seen.adopt(entry(closed, "1"))
    assert seen.closed
    seen.adopt(entry(THEIRS, "2"))
    assert not seen.closed
    assert seen.latest == THEIRS


def test_a_run_that_is_over_does_not_end_another(time: Time) -> None:
    seen = observer(time, MINE, replace(THEIRS, phase=Phase.CLOSED, outcome=Outcome.FAILED))
    assert not seen.closed
    assert seen.latest == MINE


def test_no_tombstone_is_no_end(time: Time) -> None:
    seen = observer(time, MINE, THEIRS)
    seen.hear_of_the_end(RUN, None)
    assert not seen.closed
    assert RUN in seen.asked_tombstones


def test_a_damaged_document_is_none_to_whoever_has_a_valid_one(time: Time) -> None:
    seen = observer(time, MINE)
    seen.adopt(Entry(b"garbage", "later"))
    assert seen.document is None
    assert seen.latest == MINE
    assert seen.token == "later", "it could not be written over"
    with pytest.raises(CorruptDocumentError):
        observer(time).adopt(Entry(b"garbage", "1"))


def test_a_leader_is_judged_by_its_own_record(time: Time) -> None:
    """And not by that of another, who led for a moment while the store forgot."""
    running = replace(MINE, leader="n3")
    seen = observer(time, running)
    for version, leader, beat in (("a", "n1", 9), ("b", "n3", 4)):
        older = replace(MINE, phase=Phase.CONFIRMING, ran=None, master=None)
        seen.adopt(entry(running if leader == "n3" else older, version))
        seen.read_again(leader=True)
        observing = seen.observe()
        next(observing)
        written = record(leader, beat=beat, lease=float(beat))
        with pytest.raises(StopIteration):
            observing.send(Entry(written.encode(), version))
    assert seen.leader == written


@pytest.mark.parametrize("away", [0.5, 0.9, 1.5])
def test_only_an_outage_beyond_an_interval_voids_what_was_seen(time: Time, away: float) -> None:
    seen = observer(time, MINE)
    seen.liveness.observe("n3", 1, time.now, time.now)
    time.now += 2.0
    seen.liveness.observe("n3", 1, time.now, time.now)
    for _ in range(2):
        # However many requests fail.
        seen.failed(time.now)
    time.now += away
    seen.succeeded()
    time.now += 0.5
    seen.liveness.observe("n3", 1, time.now, time.now)
    assert seen.liveness.confirmed_silence("n3") == (2.5 if away <= RULES.interval else 0.0)


def test_own_requests_are_no_lateness_and_standing_still_is(time: Time) -> None:
    for seconds, voided in ((RULES.request, False), (RULES.request + 1.5, True)):
        seen = observer(time, MINE)
        seen.liveness.observe("n3", 1, time.now, time.now)
        seen.pauses(0.0)
        time.now += seconds
        seen.spent(seconds)
        seen.liveness.observe("n3", 1, time.now, time.now)
        seen.judge_punctuality()
        assert (seen.liveness.confirmed_silence("n3") == 0) is voided


def test_a_pause_does_not_forget_that_the_node_stood_still_before_it(time: Time) -> None:
    seen = observer(time, MINE)
    seen.liveness.observe("n3", 1, time.now, time.now)
    seen.pauses(0.0)
    time.now += 1.5
    seen.liveness.observe("n3", 1, time.now, time.now)
    seen.pauses(1.0)
    assert seen.liveness.confirmed_silence("n3") == 0
