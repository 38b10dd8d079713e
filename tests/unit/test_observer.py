"""What a node makes of what it reads, and of what it cannot read."""

from __future__ import annotations

import pytest

from rdzv_plugins.kv import Entry
from rdzv_plugins.protocol.documents import CorruptDocumentError, Outcome, Phase, RoundDocument
from rdzv_plugins.protocol.observer import Observer
from tests import replace

from .life import Time
from .views import RULES, RUN, document, record

pytestmark = pytest.mark.rule("incarnations", "outage")

MINE = document(Phase.RUNNING)
THEIRS = document(Phase.RUNNING, incarnation="theirs", round_=0, leader="n9",
                  participants=("n8", "n9"))  # fmt: skip


def observer(time: Time, *seen: RoundDocument) -> Observer:
    """One that has seen these documents, and was named in the first."""
    made = Observer("n2", RULES, time)
    for number, each in enumerate(seen):
        take(made, entry(each, str(number)))
    if seen:
        made.confirm(seen[0])
    return made


def take(seen: Observer, found: Entry) -> None:
    """Let it adopt a document whose nodes all stand in it: it asks for no shard."""
    assert [*seen.adopt(found)] == []


def entry(of: RoundDocument, version: str) -> Entry:
    return Entry(of.encode(), version)


def test_a_node_of_a_run_that_ended_is_in_no_other(time: Time) -> None:
    seen = observer(time, MINE, THEIRS)
    assert not seen.closed
    seen.hear_of_the_end(RUN, Outcome.SUCCEEDED, time())
    assert seen.closed
    # Whatever becomes of the other run.
    take(seen, entry(replace(THEIRS, leader="n8"), "later"))
    assert seen.closed
    assert seen.latest is not None
    assert seen.latest.is_of(MINE)


def test_a_node_that_was_in_no_run_is_in_the_next(time: Time) -> None:
    closed = replace(MINE, phase=Phase.CLOSED, outcome=Outcome.CLOSED)
    seen = Observer("n7", RULES, time)
    take(seen, entry(closed, "1"))
    assert seen.closed
    take(seen, entry(THEIRS, "2"))
    assert not seen.closed
    assert seen.latest == THEIRS


def test_a_run_that_is_over_does_not_end_another(time: Time) -> None:
    seen = observer(time, MINE, replace(THEIRS, phase=Phase.CLOSED, outcome=Outcome.FAILED))
    assert not seen.closed
    assert seen.latest == MINE


def test_no_tombstone_is_no_end(time: Time) -> None:
    seen = observer(time, MINE, THEIRS)
    seen.hear_of_the_end(RUN, None, time())
    assert not seen.closed
    assert RUN in seen.without_tombstone()


def test_that_there_is_no_tombstone_holds_until_a_run_may_be_swept(time: Time) -> None:
    """It may have been closed just after the node asked, and its keys have expired since."""
    seen = observer(time, MINE, THEIRS)
    asked = time()
    time.now += 1.0
    seen.hear_of_the_end(RUN, None, asked)
    time.now += RULES.sweep_after - 1.1
    assert RUN in seen.without_tombstone()
    time.now += 0.2
    assert RUN not in seen.without_tombstone()


def test_a_damaged_document_is_none_to_whoever_has_a_valid_one(time: Time) -> None:
    seen = observer(time, MINE)
    take(seen, Entry(b"garbage", "later"))
    assert seen.document is None
    assert seen.latest == MINE
    assert seen.token == "later", "it could not be written over"
    with pytest.raises(CorruptDocumentError):
        take(observer(time), Entry(b"garbage", "1"))


def test_a_leader_is_judged_by_its_own_record(time: Time) -> None:
    """And not by that of another, who led for a moment while the store forgot."""
    running = replace(MINE, leader="n3")
    seen = observer(time, running)
    for version, leader, beat in (("a", "n1", 9), ("b", "n3", 4)):
        older = replace(MINE, phase=Phase.CONFIRMING, ran=None, master=None)
        take(seen, entry(running if leader == "n3" else older, version))
        seen.read_again(leader=True)
        observing = seen.observe()
        next(observing)
        written = record(leader, beat=beat, lease=float(beat))
        with pytest.raises(StopIteration):
            observing.send(Entry(written.encode(), version))
    assert seen.leader == written


@pytest.mark.parametrize("away", [0.5, 0.9, 1.5])
@pytest.mark.parametrize("fails", [True, False], ids=["requests fail", "one request is slow"])
def test_a_store_that_is_away_for_an_interval_voids_what_was_seen(
    time: Time, away: float, fails: bool
) -> None:
    """Whether requests fail or a client repeats one until the store is back."""
    seen = observer(time, MINE)
    seen.answered()
    seen.liveness.observe("n3", 1, time.now, time.now)
    for _ in range(4):
        time.now += 0.5
        seen.paused(0.5)
    seen.liveness.observe("n3", 1, time.now, time.now)
    for _ in range(2 * fails):
        # However many requests fail, and however long it rests between them.
        seen.failed()
        time.now += away / 2
        seen.paused(away / 2)
    time.now += 0.0 if fails else away
    seen.answered()
    # Another node may be connected again up to a lease later.
    time.now += RULES.lease - 0.1
    seen.liveness.observe("n3", 1, time.now, time.now)
    silence = 2.0 + RULES.lease - 0.1 + (0.0 if fails else away)
    voided = away > RULES.interval
    assert seen.liveness.confirmed_silence("n3") == pytest.approx(0.0 if voided else silence)


@pytest.mark.parametrize("pauses", [0, 1, 2])
def test_a_node_that_stood_still_judges_nobody_by_that_time(time: Time, pauses: int) -> None:
    """It was suspended, or starved of processor time, in a request or in a pause."""
    seen = observer(time, MINE)
    seen.answered()
    seen.liveness.observe("n3", 1, time.now, time.now)
    for _ in range(pauses):
        time.now += 1.6
        seen.paused(1.0)
    time.now += 1.5 if pauses < 2 else 0.0
    seen.answered()
    seen.liveness.observe("n3", 1, time.now, time.now)
    assert seen.liveness.confirmed_silence("n3") == 0


def test_the_first_answer_ends_no_outage(time: Time) -> None:
    """A node is made long before it joins; it owes no grace to those it has not seen."""
    seen = Observer("n2", RULES, time)
    time.now += 100
    seen.answered()
    seen.liveness.observe("n3", 1, time.now, time.now)
    time.now += 2
    seen.liveness.observe("n3", 1, time.now, time.now)
    assert seen.liveness.confirmed_silence("n3") == 2


def test_a_heartbeat_that_a_leader_reads_by_itself_counts(time: Time) -> None:
    """The network check reads the record of rank 0, which the last listing showed as silent."""
    seen = observer(time, replace(MINE, leader="n2"))
    seen.liveness.observe("n3", 1, time.now, time.now)
    time.now += RULES.lease
    seen.liveness.observe("n3", 1, time.now, time.now)
    assert seen.is_lost("n3")
    reading = seen.read_record("n3")
    next(reading)
    with pytest.raises(StopIteration):
        reading.send(Entry(record("n3", beat=2).encode(), "later"))
    assert not seen.is_lost("n3")
