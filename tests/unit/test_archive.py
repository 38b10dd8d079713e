"""What outlives a run: its rounds, its end, and the list of runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from msgspec.structs import replace

from rdzv_plugins.kv import MemoryClient, MemoryServer
from rdzv_plugins.observe.history import EXCLUDED, LIST, Archive, archive_run_id, list_runs
from rdzv_plugins.protocol.documents import (
    Cause,
    Names,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.round_record import Durations, Member, RoundRecord, record_of

pytestmark = pytest.mark.rule("keys")

RUNNING = RoundDocument(
    incarnation="the-run", round=1, phase=Phase.RUNNING, leader="n1", min_nodes=1, max_nodes=2,
    participants=("n1", "n2"), master="host:1",
    cause=Cause(lost=Names(("host3[3]",)), failed=Names(("host1[1]",))),
)  # fmt: skip
CLOSED = replace(RUNNING, phase=Phase.CLOSED, outcome=Outcome.SUCCEEDED, cause=Cause(note="done"))
FOUNDED = RoundDocument(
    incarnation="the-run", round=0, phase=Phase.FORMING, leader="n1", min_nodes=1, max_nodes=2
)


def node(number: int) -> NodeRecord:
    return NodeRecord(
        address=f"host{number}", pid=number, beat=1, status=Status.RUN, round=1, min_nodes=1,
        max_nodes=2, interval=1.0, lease=3.0,
    )  # fmt: skip


RECORDS = {f"n{number}": node(number) for number in (1, 2, 3)}


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def archive(server: MemoryServer) -> Archive:
    return Archive(partial(MemoryClient, server), "job", history_ttl=100.0)


def note(archive: Archive, *documents: RoundDocument) -> None:
    for document in documents:
        archive.note(record_of(document, RECORDS))


class TestRecord:
    def test_it_names_the_nodes_with_the_ranks_that_they_had(self) -> None:
        before = replace(RUNNING, round=0, participants=("n3", "n1"))
        made = record_of(RUNNING, RECORDS, before, Durations(gathering=2.0, confirming=0.5))
        assert made.leader == "host1[1]"
        assert [(it.name, it.rank) for it in made.members] == [("host1[1]", 0), ("host2[2]", 1)]
        assert made.lost == (Member(name="host3[3]", address="host3", pid=3, rank=0),)
        assert made.failed == (Member(name="host1[1]", address="host1", pid=1, rank=1),)
        assert made.seconds is not None
        assert made.seconds.total == 2.5

    def test_a_node_without_a_record_has_its_name_only(self) -> None:
        made = record_of(RUNNING, {})
        assert made.lost == (Member(name="host3[3]"),)
        assert made.members == (Member(name="n1", rank=0), Member(name="n2", rank=1))

    def test_ranks_of_another_run_are_not_taken_for_those_of_this_one(self) -> None:
        before = replace(RUNNING, incarnation="another", participants=("n3", "n1"))
        assert record_of(RUNNING, RECORDS, before).lost[0].rank is None


class TestHistory:
    def test_rounds_and_the_end_are_kept_in_order(self, archive: Archive) -> None:
        note(archive, FOUNDED, RUNNING, replace(RUNNING, round=2), CLOSED)
        rows = archive.rows()
        assert [(row.round, row.phase) for row in rows] == [
            (1, Phase.RUNNING), (2, Phase.RUNNING), (1, Phase.CLOSED),
        ]  # fmt: skip
        assert rows[0].lost[0].name == "host3[3]"
        assert rows[-1].outcome is Outcome.SUCCEEDED

    def test_fifty_are_kept(self, archive: Archive) -> None:
        note(archive, *(replace(RUNNING, round=number) for number in range(60)))
        assert [row.round for row in archive.rows()] == list(range(10, 60))

    def test_a_row_of_another_version_is_passed_over(
        self, archive: Archive, server: MemoryServer
    ) -> None:
        note(archive, RUNNING)
        client = MemoryClient(server, archive_run_id("job"))
        client.put("rounds/x/00000009", b'{"round": "nine"}')
        client.put("rounds/x/00000010", b"\xff")
        assert len(archive.rows()) == 1

    def test_nothing_is_written_where_history_ttl_is_0(self, server: MemoryServer) -> None:
        archive = Archive(partial(MemoryClient, server), "job", history_ttl=0.0)
        note(archive, FOUNDED, RUNNING, CLOSED)
        assert archive.rows() == []
        assert list_runs(partial(MemoryClient, server)) == {}

    def test_tombstones_and_rounds_do_not_mix(self, archive: Archive) -> None:
        note(archive, RUNNING)
        archive.put_tombstone(CLOSED)
        assert archive.tombstone("the-run") is Outcome.SUCCEEDED
        assert archive.tombstone("another") is None
        assert len(archive.rows()) == 1


class TestList:
    def test_a_run_is_listed_from_its_founding_to_its_end(
        self, archive: Archive, server: MemoryServer
    ) -> None:
        opened = partial(MemoryClient, server)
        note(archive, FOUNDED)
        founded = list_runs(opened)["job"]
        assert (founded.phase, founded.nodes, founded.outcome) == (Phase.FORMING, 0, None)
        note(archive, RUNNING)
        runs = list_runs(opened)["job"]
        assert (runs.phase, runs.nodes, runs.began) == (Phase.RUNNING, 2, founded.began)
        note(archive, CLOSED)
        ended = list_runs(opened)["job"]
        assert (ended.outcome, ended.began) == (Outcome.SUCCEEDED, founded.began)

    def test_a_new_run_of_the_id_takes_its_place(
        self, archive: Archive, server: MemoryServer
    ) -> None:
        note(archive, CLOSED, replace(FOUNDED, incarnation="the next"))
        listed = list_runs(partial(MemoryClient, server))["job"]
        assert (listed.incarnation, listed.outcome) == ("the next", None)

    def test_old_entries_are_dropped_when_another_run_begins(self, server: MemoryServer) -> None:
        opened = partial(MemoryClient, server)
        gone = RoundRecord(incarnation="a", round=0, phase=Phase.CLOSED, nodes=0)
        Archive(opened, "old", history_ttl=1e-6).note(gone)
        note(Archive(opened, "job", history_ttl=100.0), FOUNDED)
        assert list(list_runs(opened)) == ["job"]

    def test_a_run_that_ends_after_its_entry_is_old_stays_in_it(self, server: MemoryServer) -> None:
        opened = partial(MemoryClient, server)
        archive = Archive(opened, "job", history_ttl=100.0)
        note(archive, FOUNDED)
        archive.note(record_of(CLOSED, RECORDS), datetime.now(UTC) + timedelta(seconds=200))
        assert list_runs(opened)["job"].outcome is Outcome.SUCCEEDED

    def test_what_no_run_can_be_is_not_in_it(self, server: MemoryServer, archive: Archive) -> None:
        """Agents of an earlier version have put it there, if that was their run id."""
        opened = partial(MemoryClient, server)
        for run_id in ("!excluded", "!runs"):
            note(Archive(opened, run_id, history_ttl=100.0), RUNNING)
        note(archive, RUNNING)
        assert list(list_runs(opened)) == ["job"]

    def test_what_is_noted_late_hides_nothing(self, archive: Archive, server: MemoryServer) -> None:
        at = datetime.now(UTC) - timedelta(seconds=1)
        note(archive, CLOSED)
        archive.note(record_of(RUNNING, RECORDS), at)
        assert [row.phase for row in archive.rows()] == [Phase.RUNNING, Phase.CLOSED]
        assert list_runs(partial(MemoryClient, server))["job"].outcome is Outcome.SUCCEEDED


class TestTheEndByHand:
    def test_it_ends_a_run_whose_end_nobody_noted(
        self, archive: Archive, server: MemoryServer
    ) -> None:
        note(archive, FOUNDED, RUNNING)
        assert archive.end_by_hand("cleaned by hand")
        end = archive.rows()[-1]
        assert (end.incarnation, end.round, end.nodes) == ("the-run", 1, 2)
        assert (end.phase, end.outcome, end.reason) == (
            Phase.CLOSED, Outcome.CLOSED, "cleaned by hand",
        )  # fmt: skip
        assert archive.last() == end
        assert list_runs(partial(MemoryClient, server))["job"].outcome is Outcome.CLOSED
        assert not archive.end_by_hand("once more")

    def test_also_one_that_had_no_round(self, archive: Archive) -> None:
        note(archive, FOUNDED)
        last = archive.last()
        assert last is not None
        assert (last.phase, last.outcome) == (Phase.FORMING, None)
        assert archive.end_by_hand("cleaned by hand")
        assert [row.reason for row in archive.rows()] == ["cleaned by hand"]

    def test_what_is_known_of_the_end_stays(self, archive: Archive) -> None:
        assert not archive.end_by_hand("of nothing")
        assert archive.last() is None
        note(archive, RUNNING, CLOSED)
        assert not archive.end_by_hand("cleaned by hand")
        assert [row.reason for row in archive.rows()][-1] == "done"

    def test_the_last_run_of_the_id_is_meant(self, archive: Archive) -> None:
        before = datetime.now(UTC) - timedelta(seconds=1)
        archive.note(record_of(CLOSED, RECORDS), before)
        note(archive, replace(FOUNDED, incarnation="the next"))
        assert archive.end_by_hand("cleaned by hand")
        assert archive.rows()[-1].incarnation == "the next"


def test_when_the_id_of_an_ended_run_is_free(archive: Archive) -> None:
    now, ended = datetime.now(UTC), replace(CLOSED, expires=True)
    unknown = None, "to free its id now: rdzv clean -i job"
    assert archive.free_in(ended, now) == unknown
    end = replace(record_of(CLOSED, RECORDS), kept=60.0)
    archive.note(end, now - timedelta(seconds=13))
    seconds, words = archive.free_in(ended, now)
    assert seconds == pytest.approx(47, abs=0.01)
    assert words == "its id is free in 47 s; now: rdzv clean -i job"
    # The end of another run; an end before the keys were told to expire; a clock that is behind,
    # and one that is ahead, or a store that frees it late.
    assert archive.free_in(replace(ended, incarnation="another"), now) == unknown
    assert archive.free_in(CLOSED, now) == unknown
    assert archive.free_in(ended, now - timedelta(seconds=20)) == unknown
    assert archive.free_in(ended, now + timedelta(seconds=100)) == unknown


DAMAGED = [
    b"",
    b"\xff",
    b"[" * 5000,
    b'{"x":' * 5000,
    b'{"incarnation":"\xff"}',
    b'[["\xff"]]',
    b"[1]",
]


@pytest.mark.parametrize("value", DAMAGED, ids=[repr(it[:12]) for it in DAMAGED])
def test_a_damaged_value_costs_no_other_run_anything(
    server: MemoryServer, archive: Archive, value: bytes
) -> None:
    """Anybody who may write to the store may write such a value."""
    note(archive, FOUNDED, RUNNING)
    for run_id, key in (
        (archive_run_id("job"), "rounds/another/1"), (LIST, "another"), (EXCLUDED, "job"),
    ):  # fmt: skip
        MemoryClient(server, run_id).put(key, value)
    assert {row.round for row in archive.rows()} == {1}
    assert [*list_runs(partial(MemoryClient, server))] == ["job"]
    assert archive.exclusions(0.0) == ()
    note(archive, CLOSED)
    assert archive.rows()[-1].phase is Phase.CLOSED
