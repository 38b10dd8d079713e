"""Which nodes are silent, and for how long, by one observer's looks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_plugins.kv import Entry
from rdzv_plugins.protocol.documents import Status
from rdzv_plugins.protocol.failure_detector import FailureDetector
from rdzv_plugins.protocol.record_cache import RecordCache

from .views import record

pytestmark = pytest.mark.rule("leases")


def looks(*at: tuple[int | None, float]) -> FailureDetector:
    """A node's beat as seen at these times; answers come in no time."""
    leases = FailureDetector()
    for beat, now in at:
        leases.observe("n", beat, now, now)
    return leases


def test_an_unknown_node_is_not_silent() -> None:
    leases = FailureDetector()
    assert (
        leases.confirmed_silence("n"),
        leases.possible_silence("n", 9.0),
        leases.moved("n"),
    ) == (0, 0, False)


def test_the_first_look_begins_the_window() -> None:
    leases = looks((5, 100.0))
    assert leases.confirmed_silence("n") == 0
    assert leases.possible_silence("n", 103.0) == 3
    assert not leases.moved("n")


def test_silence_is_known_up_to_the_last_look_only() -> None:
    leases = looks((5, 100.0), (5, 102.0))
    assert leases.confirmed_silence("n") == 2
    assert leases.possible_silence("n", 110.0) == 10


def test_a_beat_that_moves_ends_the_silence() -> None:
    leases = looks((5, 100.0), (5, 102.0), (6, 103.0))
    assert leases.confirmed_silence("n") == 0
    assert leases.moved("n")


def test_a_slow_answer_shows_the_time_of_the_question() -> None:
    leases = looks((5, 100.0))
    leases.observe("n", 5, 101.0, 109.0)
    assert leases.confirmed_silence("n") == 1
    leases.observe("n", 6, 110.0, 119.0)
    leases.observe("n", 6, 120.0, 120.0)
    assert leases.confirmed_silence("n") == 1


def test_a_record_that_disappears_begins_a_window() -> None:
    leases = looks((5, 100.0), (None, 102.0), (None, 103.0))
    assert leases.confirmed_silence("n") == 1
    assert not leases.moved("n")


def test_a_record_that_comes_back_is_no_movement() -> None:
    leases = looks((None, 100.0), (5, 102.0))
    assert not leases.moved("n")


def test_a_lower_beat_is_no_sign_of_life() -> None:
    """It was written before the last one that was seen, and held up on its way."""
    leases = looks((5, 100.0), (4, 102.0))
    assert leases.confirmed_silence("n") == 2
    assert not leases.moved("n")


def test_a_record_that_comes_back_unchanged_begins_one_window_and_no_more() -> None:
    """A dead node's last record, deleted and put back again and again, kept it among the living."""
    leases = looks((5, 100.0), (None, 102.0), (5, 104.0), (None, 106.0), (5, 108.0))
    assert leases.confirmed_silence("n") == 6
    leases.observe("n", 6, 110.0, 110.0)
    assert leases.confirmed_silence("n") == 0
    leases.observe("n", None, 112.0, 112.0)
    assert leases.confirmed_silence("n") == 0


def test_a_lower_beat_after_none_is_no_sign_of_life_but_the_next_is() -> None:
    leases = looks((5, 100.0), (None, 102.0), (1, 103.0), (1, 104.0))
    assert leases.confirmed_silence("n") == 2
    leases.observe("n", 2, 105.0, 105.0)
    assert leases.confirmed_silence("n") == 0


def test_whatever_else_a_node_wrote_ends_its_silence() -> None:
    leases = looks((None, 100.0), (None, 102.0))
    leases.heard("n", 102.5)
    leases.observe("n", None, 103.0, 103.0)
    assert leases.confirmed_silence("n") == 0.5
    # It may have been written long before this observer first looked.
    assert not leases.moved("n")


def test_restart_begins_all_windows_but_one() -> None:
    leases = looks((5, 100.0), (6, 101.0), (6, 104.0))
    leases.observe("deposed", 1, 100.0, 100.0)
    leases.observe("deposed", 1, 104.0, 104.0)
    leases.restart(105.0, unless="deposed")
    assert leases.confirmed_silence("n") == 0
    assert not leases.moved("n")
    assert leases.possible_silence("n", 106.0) == 1
    assert leases.confirmed_silence("deposed") == 4


def test_a_grace_ends_with_a_beat_that_was_written_in_it() -> None:
    leases = looks((5, 100.0), (5, 102.0))
    leases.restart(103.0, grace=3.0)
    # Written before the outage, and not seen then.
    leases.observe("n", 6, 103.5, 103.5)
    leases.observe("n", 6, 107.0, 107.0)
    assert leases.confirmed_silence("n") == 1
    assert not leases.moved("n")
    leases.restart(108.0, grace=3.0)
    leases.observe("n", 6, 108.5, 108.5)
    for now in (109.0, 110.0):
        leases.observe("n", 7, now, now)
    assert leases.confirmed_silence("n") == 1
    assert leases.moved("n")


def test_an_older_beat_takes_no_grace_away() -> None:
    """A store that failed over shows an older beat at first, and then the last one again."""
    leases = FailureDetector()
    leases.observe("n1", 12, 100.0, 100.0)
    leases.restart(103.0, grace=3.0)
    cache = RecordCache()
    for beat, now in ((12, 102.9), (10, 103.1), (12, 103.2), (12, 107.0)):
        entry = Entry(record("n1", Status.RUN, beat=beat).encode(), str(now))
        shown = cache.read("n1", entry)
        assert shown is not None
        leases.observe("n1", shown.beat, now, now)
    assert leases.confirmed_silence("n1") == 1.0


def test_a_node_that_is_first_seen_after_an_outage_has_the_same_grace() -> None:
    leases = FailureDetector()
    leases.restart(100.0, grace=3.0)
    leases.observe("n", 5, 100.5, 100.5)
    leases.observe("n", 5, 104.0, 104.0)
    assert leases.confirmed_silence("n") == 1.0


def test_being_late_takes_no_grace_away() -> None:
    leases = looks((5, 100.0), (5, 102.0))
    leases.restart(103.0, grace=3.0)
    leases.restart(103.0)
    leases.observe("n", 5, 106.5, 106.5)
    assert leases.confirmed_silence("n") == 0.5


def test_an_outage_is_taken_out_of_every_window() -> None:
    leases = looks((5, 100.0), (5, 102.0))
    leases.discount(1.5, 103.5)
    leases.observe("n", 5, 104.0, 104.0)
    assert leases.confirmed_silence("n") == 2.5
    # Never more than there is.
    leases.discount(9.0, 104.0)
    assert leases.confirmed_silence("n") == 0


def test_keep_forgets_the_others() -> None:
    leases = looks((5, 100.0), (6, 102.0), (6, 105.0))
    leases.keep({"other"})
    assert leases.confirmed_silence("n") == 0
    assert not leases.moved("n")


LOOKS = st.tuples(st.none() | st.integers(0, 3), st.floats(0, 10), st.floats(0, 10))


@given(st.lists(LOOKS, min_size=1, max_size=30))
def test_age_runs_from_the_first_answer_to_the_last_question(
    looked: list[tuple[int | None, float, float]],
) -> None:
    leases, now = FailureDetector(), 0.0
    # What stands there, the last beat, and whether its record was gone since that.
    shown: int | None = -1
    last, gone = -1, False
    since = 0.0
    for at, (beat, pause, wait) in enumerate(looked):
        asked, now = now + pause, now + pause + wait
        leases.observe("n", beat, asked, now)
        begins = not at or (beat > last if beat is not None else shown is not None and not gone)
        gone = (bool(at) and begins and beat is None) or (gone and not begins)
        shown, last = beat, beat if beat is not None else last
        since = now if begins else since
        expected = 0.0 if begins else asked - since
        assert leases.confirmed_silence("n") == expected
        assert leases.possible_silence("n", now) == now - since
