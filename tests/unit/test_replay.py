"""What was written before, put back by who has no secret: nodes that have read later ones know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as with_rules

import pytest

from rdzv_plugins.kv import Entry, MemoryClient, MemoryServer
from rdzv_plugins.kv.sealed import SealedClient
from rdzv_plugins.observe.history import EXCLUDED, Archive
from rdzv_plugins.protocol import orders
from rdzv_plugins.protocol.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    TORCH_STATE_KEY,
    Exclusion,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.record_cache import RecordCache
from rdzv_plugins.protocol.rules import Failure
from tests import replace
from tests.unit.life import RULES, Life, Time, finish, stored

from .views import document, record

SEALED = with_rules(RULES, sealed=True)
EARLIER = "somebody has put it back"


@pytest.fixture
def sealed(server: MemoryServer, time: Time) -> tuple[Life, Life]:
    """Two nodes in a round that runs."""
    leader = Life("n1", server, time, SEALED)
    leader.go()
    pair = leader, Life("n2", server, time, SEALED)
    finish(*pair)
    leader.go()
    return pair


def put_back(life: Life, document: RoundDocument) -> None:
    life.client.put(STATE_KEY, document.encode())
    life.client.put(BELL_KEY, b"x")


def go(*lives: Life, until: Callable[[], bool] = bool, looks: int = 30) -> None:
    for _ in range(looks):
        for life in lives:
            life.go()
            life.wake()
        if until():
            return


def entries(beat: int) -> dict[str, Entry]:
    data = record("n1", Status.RUN, beat=beat).encode()
    return {NODES_PREFIX + "n1": Entry(data, f"v{beat}")}


class TestBeats:
    def test_no_earlier_beat_is_believed_however_many_rise(self) -> None:
        cache = RecordCache()
        found = [cache.decode(entries(beat))["n1"].beat for beat in (100, *range(50, 60))]
        assert set(found) == {100}
        assert cache.decode(entries(101))["n1"].beat == 101

    def test_no_earlier_beat_is_believed_after_the_record_was_deleted(self) -> None:
        cache = RecordCache()
        cache.decode(entries(100))
        for _ in range(3):
            assert not cache.decode({})
            assert not cache.decode(entries(50))
            assert cache.read("n1", entries(51)[NODES_PREFIX + "n1"]) is None
        # A record that comes back unchanged begins no new window: see test_failure_detector.py.
        assert cache.decode(entries(100))["n1"].beat == 100
        assert cache.decode(entries(101))["n1"].beat == 101

    def test_a_reader_that_has_seen_no_beat_believes_each_once(self) -> None:
        cache = RecordCache()
        assert [cache.decode(entries(beat))["n1"].beat for beat in (50, 51, 50)] == [50, 51, 51]

    @pytest.mark.parametrize("deletes", [False, True])
    def test_a_dead_node_is_lost_whose_beats_are_put_back(
        self, sealed: tuple[Life, Life], deletes: bool
    ) -> None:
        leader, dead = sealed
        beats: list[NodeRecord] = []
        for _ in range(8):
            dead.wake()
            leader.wake()
            beats.append(dead.node.record)
        assert stored(leader).round == 0
        began = leader.time.now
        for beat in (*beats, *beats, *beats):
            key = NODES_PREFIX + "n2"
            if deletes:
                leader.client.delete(key)
                leader.wake()
            leader.client.put(key, beat.encode())
            leader.wake()
            if stored(leader).round > 0:
                break
        assert stored(leader).round == 1
        # The store may have forgotten a record that is gone: it has one more lease, once.
        assert leader.time.now - began <= 2 * RULES.lease + RULES.interval


class TestDocuments:
    def test_one_of_an_earlier_phase_or_round_counts_as_absent(
        self, sealed: tuple[Life, Life]
    ) -> None:
        first = stored(sealed[0])
        sealed[1].join_again()
        go(*sealed, until=lambda: stored(sealed[0]).round > first.round)
        now = stored(sealed[0])
        put_back(sealed[0], first)
        go(*sealed, looks=5)
        assert not stored(sealed[0]).is_before(now)
        told = [line for life in sealed for line in life.told if EARLIER in line]
        # A node that reads it before it is written over says so, once.
        assert 1 <= len(told) <= 2

    def test_one_of_the_same_phase_takes_no_order_back(self, sealed: tuple[Life, Life]) -> None:
        leader, other = sealed
        before = stored(leader)
        # Kept for the next round: nothing else changes by it.
        ordered = replace(before.edited, drained=("n9",))
        leader.client.put(STATE_KEY, ordered.encode())
        for life in sealed:
            life.wake()
        go(*sealed, looks=2)
        put_back(leader, before)
        go(*sealed, looks=5)
        assert stored(leader).drained == ("n9",)
        assert stored(leader).edition > ordered.edition
        assert [life.node.num_nodes_waiting for life in (leader, other)] == [0, 0]

    def test_an_order_of_an_earlier_round_is_carried_out_once(
        self, sealed: tuple[Life, Life]
    ) -> None:
        leader, other = sealed
        leader.carry_out(orders.restart("giver", "because", lambda: leader.time.now))
        ordered = stored(leader)
        assert ordered.restart == "because"
        leader.go()
        for life in sealed:
            life.join_again()
        go(*sealed, until=lambda: stored(leader).phase is Phase.RUNNING)
        now = stored(leader)
        assert now.round == 1
        for _ in range(3):
            put_back(leader, ordered)
            go(*sealed, looks=4)
        assert stored(leader).round == 1
        assert [life.node.num_nodes_waiting for life in (leader, other)] == [0, 0]

    @pytest.mark.parametrize("later", [False, True])
    def test_one_of_an_earlier_run_of_the_id_moves_nobody(
        self, sealed: tuple[Life, Life], later: bool
    ) -> None:
        ours = stored(sealed[0])
        edition = ours.edition + (-1000 if later else -1_000_000)
        other = replace(
            ours, incarnation="other", participants=("x1",), leader="x1", edition=edition
        )
        put_back(sealed[0], other)
        go(*sealed, looks=3)
        if later:
            # It may be a run that began after the store had forgotten this one: they join that.
            assert stored(sealed[0]).incarnation == "other"
            return
        assert stored(sealed[0]).incarnation == ours.incarnation
        assert [life.node.num_nodes_waiting for life in sealed] == [0, 0]
        assert any(EARLIER in line for line in sealed[0].told)

    def test_each_run_has_a_number_from_the_start(self, server: MemoryServer, time: Time) -> None:
        life = Life("n1", server, time, SEALED)
        life.go()
        assert stored(life).phase is Phase.FORMING
        assert int(time.now * 1000) <= stored(life).edition < int(time.now * 1000) + 10

    def test_without_a_secret_there_is_no_such_number(self, pair: tuple[Life, Life]) -> None:
        finish(*pair)
        assert stored(pair[0]).edition == 0


class TestWhatRemains:
    """What `SECURITY.md` says can be put back with effect."""

    @staticmethod
    def opened(server: MemoryServer, run_id: str = "job") -> SealedClient:
        client = MemoryClient(server, f"rdzv/{run_id}")
        return SealedClient(client, "rdzv", run_id, lambda: ["secret"])

    def test_the_end_of_an_earlier_run_refuses_newcomers_where_no_node_lives(
        self, server: MemoryServer, time: Time
    ) -> None:
        ended = replace(document(Phase.CLOSED), edition=1)
        MemoryClient(server, "run").put(STATE_KEY, ended.encode())
        newcomer = Life("n1", server, time, SEALED)
        newcomer.go()
        assert newcomer.outcomes[0].failure is Failure.CLOSED

    def test_and_none_where_one_lives(self, sealed: tuple[Life, Life]) -> None:
        ours = stored(sealed[0])
        put_back(sealed[0], replace(document(Phase.CLOSED), incarnation="other", edition=1))
        go(*sealed, looks=3)
        assert stored(sealed[0]).incarnation == ours.incarnation

    def test_earlier_exclusions(self, server: MemoryServer) -> None:
        archive = Archive(lambda run_id: self.opened(server, run_id), "job", 60)
        raw = MemoryClient(server, f"rdzv/{EXCLUDED}")
        archive.exclude(Exclusion("host9"), 0.0)
        before = raw.get("job")
        assert before is not None
        assert archive.include(["host9"], 0.0)
        assert not archive.exclusions(0.0)
        raw.put("job", before.value)
        assert [it.host for it in archive.exclusions(0.0)] == ["host9"]

    @pytest.mark.parametrize("key", ["store/x/3/counter", TORCH_STATE_KEY])
    def test_what_agents_tell_each_other_and_the_state_of_torchs_handler(
        self, server: MemoryServer, key: str
    ) -> None:
        client, raw = self.opened(server), MemoryClient(server, "rdzv/job")
        client.put(key, b"1")
        before = raw.get(key)
        assert before is not None
        client.put(key, b"2")
        raw.put(key, before.value)
        entry = client.get(key)
        assert entry is not None
        assert entry.value == b"1"
