"""How many nodes a run had when, as the page shows it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from rdzv_plugins.dashboard.poller import Size, sizes
from rdzv_plugins.observe.history import Row
from rdzv_plugins.protocol.documents import Outcome, Phase
from rdzv_plugins.protocol.round_record import Durations, Member

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def row(
    round: int, seconds: float, nodes: int, *, lost: int = 0, joined: int = 0, took: float = 1.0
) -> Row:
    def members(count: int) -> tuple[Member, ...]:
        return tuple(Member(name=f"node{i}") for i in range(count))

    return Row(
        incarnation="it", round=round, phase=Phase.RUNNING, nodes=nodes, at=at(seconds),
        lost=members(lost), joined=members(joined), seconds=Durations(gathering=took),
    )  # fmt: skip


def end(seconds: float) -> Row:
    return Row(
        incarnation="it", round=9, phase=Phase.CLOSED, nodes=0, at=at(seconds),
        outcome=Outcome.SUCCEEDED,
    )  # fmt: skip


def seen(
    seconds: float, nodes: int, round: int, *, runs: bool = False, incarnation: str = "it"
) -> Size:
    return Size(at=at(seconds), nodes=nodes, incarnation=incarnation, round=round, runs=runs)


def test_nothing_is_known_of_a_run_without_rounds_that_nobody_saw() -> None:
    assert sizes([], []) == []


def test_the_rounds_tell_when_nodes_were_lost_and_when_others_came() -> None:
    rows = [row(0, 0, 4), row(1, 100, 3, lost=1, took=30), row(2, 200, 5, joined=2, took=20)]
    assert sizes(rows, []) == [(at(0), 4), (at(70), 3), (at(200), 5)]


def test_some_are_lost_and_others_come_in_one_round() -> None:
    rows = [row(0, 0, 4), row(1, 100, 4, lost=3, joined=3, took=30)]
    assert sizes(rows, []) == [(at(0), 4), (at(70), 1), (at(100), 4)]


def test_a_row_names_sixteen_of_them_at_most() -> None:
    rows = [row(0, 0, 100), row(1, 100, 60, lost=16, took=30)]
    assert sizes(rows, []) == [(at(0), 100), (at(70), 60)]


def test_no_round_began_to_form_before_the_one_before_it_ran() -> None:
    rows = [row(0, 50, 4), row(1, 60, 3, lost=1, took=30)]
    assert sizes(rows, []) == [(at(50), 4), (at(50), 3)]


def test_an_ended_run_has_no_nodes() -> None:
    assert sizes([row(0, 0, 2), end(10)], [seen(5, 2, 0, runs=True)]) == [(at(0), 2), (at(10), 0)]


def test_before_the_first_round_the_size_grows_as_nodes_join() -> None:
    assert sizes([], [seen(1, 1, 0), seen(2, 2, 0)]) == [(at(1), 1), (at(2), 2)]


def test_what_was_seen_counts_from_the_last_round_on() -> None:
    watched = [seen(1, 3, 0), seen(3, 4, 0, runs=True), seen(50, 3, 1), seen(60, 2, 1)]
    rows = [row(0, 2, 4)]
    assert sizes(rows, watched) == [(at(2), 4), (at(50), 3), (at(60), 2)]
    # A round that is noted, but was not seen yet.
    rows.append(row(1, 90, 2, lost=2, took=40))
    assert sizes(rows, watched) == [(at(2), 4), (at(50), 2)]


def test_a_clock_that_is_behind_hides_nothing() -> None:
    watched = [seen(-3600, 4, 0, runs=True), seen(-3500, 3, 1)]
    assert sizes([row(0, 0, 4)], watched) == [(at(0), 4), (at(0), 3)]


def test_the_next_run_of_an_id_follows_the_end_of_the_last() -> None:
    rows = [row(0, 0, 2), end(10)]
    watched = [seen(1, 2, 0, runs=True), seen(20, 1, 0, incarnation="next")]
    assert sizes(rows, watched) == [(at(0), 2), (at(10), 0), (at(20), 1)]
