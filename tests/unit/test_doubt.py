"""Whom a leader doubts, and for how long, when many nodes fall silent at once."""

from __future__ import annotations

import pytest

from rdzv_plugins.kv import Entry
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord, Phase, RoundDocument, Status
from rdzv_plugins.protocol.effects import List, Read
from rdzv_plugins.protocol.failure_detector import FailureDetector
from rdzv_plugins.protocol.observer import Observer
from rdzv_plugins.protocol.rules import Action, Doubt, Rules, View, Wait
from rdzv_plugins.protocol.words import of_node
from tests import replace

from .crowd import Crowd
from .life import Time
from .views import RULES, document, joining, record, running, view, written

pytestmark = pytest.mark.rule("doubt")

NAMES = tuple(f"n{number}" for number in range(1, 25))
MANY = NAMES[1:10]  # Nine of 24.
RAN = document(Phase.RUNNING, participants=NAMES, min_nodes=2, max_nodes=30)
LATE, OUT = 1.6, 3.0  # Seconds, where the lease is 3 s.


def wide(of: NodeRecord) -> NodeRecord:
    return replace(of, min_nodes=2, max_nodes=30)


def seen(silent: dict[str, float], forgiven: dict[str, float] | None = None) -> View:
    records = {name: wide(running(name, RAN)) for name in NAMES}
    mine = replace(RULES, max_nodes=30)
    return view(
        records["n1"], RAN, records, joining=False, silent=silent, forgiven=forgiven, rules=mine
    )


def waits(action: Action) -> float:
    assert isinstance(action, Wait)
    assert action.seconds is not None
    return action.seconds


class TestWhomALeaderDoubts:
    def test_a_large_part_of_the_world_when_the_first_lease_runs_out(self) -> None:
        silent = {**dict.fromkeys(MANY, LATE), "n2": OUT}
        action = decide(seen(silent))
        assert isinstance(action, Doubt)
        assert set(action.nodes) == set(MANY)
        assert (action.begins, action.late, action.world) == (True, 9, 24)

    @pytest.mark.parametrize("others", [MANY[1:7], ()])
    def test_fewer_are_acted_on_at_once(self, others: tuple[str, ...]) -> None:
        action = decide(seen({**dict.fromkeys(others, LATE), "n2": OUT}))
        assert "n2" not in written(action).previous

    def test_eight_are_few_in_a_world_of_24(self) -> None:
        action = decide(seen({**dict.fromkeys(MANY[1:8], LATE), "n2": OUT}))
        assert "n2" not in written(action).previous

    def test_nobody_is_late_before_half_a_lease_is_over(self) -> None:
        action = decide(seen({**dict.fromkeys(MANY, 1.4), "n2": OUT}))
        assert "n2" not in written(action).previous

    def test_nobody_before_a_lease_runs_out(self) -> None:
        assert waits(decide(seen(dict.fromkeys(MANY, 2.9)))) == pytest.approx(0.1)

    @pytest.mark.parametrize("forgiven", [2.0, 0.0])
    def test_whoever_is_doubted_already_is_not_doubted_again(self, forgiven: float) -> None:
        """Else the leader would do nothing else for ever: it reads nothing in between."""
        late, doubted = {**dict.fromkeys(MANY, 3.5)}, dict.fromkeys(MANY, forgiven)
        # Its own beats are late in its own listing.
        assert not isinstance(decide(seen({**late, "n1": 3.2}, doubted)), Doubt)
        # The lease of n20 is over, and its beat is not late yet.
        lonely = seen({**late, "n20": 3.2}, doubted)
        assert lonely.records is not None
        slow = replace(lonely.records["n20"], interval=OUT)
        action = decide(replace(lonely, records={**lonely.records, "n20": slow}))
        assert "n20" not in written(action).previous

    def test_a_node_lost_long_ago_is_not_doubted_with_them(self) -> None:
        action = decide(seen({**dict.fromkeys(MANY, LATE), "n2": 9.0}))
        assert "n2" not in written(action).previous

    def test_an_announced_leave_is_no_silence(self) -> None:
        base = seen(dict.fromkeys(MANY, OUT))
        assert base.records is not None
        left = {name: replace(base.records[name], status=Status.LEFT) for name in MANY}
        action = decide(replace(base, records={**base.records, **left}))
        assert set(MANY).isdisjoint(written(action).previous)


class TestWhatADoubtGives:
    def test_one_more_lease_from_then_on(self) -> None:
        # Doubted after 2 s of silence each, and the first after 3.
        forgiven = {**dict.fromkeys(MANY, 2.0), "n2": 3.0}
        action = decide(seen({**dict.fromkeys(MANY, 4.9), "n2": 5.9}, forgiven))
        assert waits(action) == pytest.approx(0.1)

    def test_then_all_are_lost_in_one_round(self) -> None:
        forgiven = {**dict.fromkeys(MANY, 2.0), "n2": 3.0}
        after = written(decide(seen({**dict.fromkeys(MANY, 5.0), "n2": 6.0}, forgiven)))
        assert (after.round, after.phase) == (RAN.round + 1, Phase.FORMING)
        assert set(after.previous) == set(NAMES) - set(MANY)
        assert len(after.cause.lost.first) == len(MANY)

    def test_none_to_whoever_has_had_a_lease_of_grace(self) -> None:
        after = written(decide(seen(dict.fromkeys(MANY, OUT), dict.fromkeys(MANY, 0.0))))
        assert set(after.previous) == set(NAMES) - set(MANY)

    def test_more_that_become_late_are_doubted_without_another_line(self) -> None:
        silent = {**dict.fromkeys(MANY, 3.5), "n20": OUT}
        action = decide(seen(silent, dict.fromkeys(MANY, 2.0)))
        assert action == Doubt(("n20",), False, 10, 24)

    def test_the_sentence_says_so(self) -> None:
        said = str(of_node(seen(dict.fromkeys(MANY, 3.5), dict.fromkeys(MANY, 2.0))))
        assert said.endswith("9 nodes late all at once, as if the store or the load were slow")
        assert "late" not in str(of_node(seen({"n2": OUT})))


class TestWhileARoundForms:
    """Those that are doubted and have asked for the round are neither here nor gone."""

    FORMING = document(
        Phase.FORMING, previous=NAMES[:12], min_nodes=2, max_nodes=30, leader="n1", round_=5
    )

    def lead(
        self,
        silent: dict[str, float],
        forgiven: dict[str, float] | None = None,
        forming: RoundDocument = FORMING,
    ) -> Action:
        records = {name: wide(it) for name, it in joining(*NAMES, round_=4).items()}
        mine = replace(RULES, max_nodes=30)
        return decide(
            view(
                records["n1"],
                forming,
                records,
                silent=silent,
                forgiven=forgiven,
                rules=mine,
                enough_for=9.0,
            )
        )

    def test_they_are_doubted(self) -> None:
        action = self.lead(silent=dict.fromkeys(MANY, OUT))
        assert isinstance(action, Doubt)

    def test_no_round_completes_without_them(self) -> None:
        silent, forgiven = dict.fromkeys(MANY, 3.5), dict.fromkeys(MANY, 3.0)
        action = self.lead(silent=silent, forgiven=forgiven)
        assert waits(action) == pytest.approx(2.5)
        assert isinstance(action, Wait)
        assert action.enough

    def test_the_round_completes_when_the_doubted_nodes_second_lease_is_over(self) -> None:
        silent, forgiven = dict.fromkeys(MANY, 6.0), dict.fromkeys(MANY, 3.0)
        amended = written(self.lead(silent=silent, forgiven=forgiven))
        assert {*amended.previous} == {*NAMES[:12]} - {*MANY}
        assert len(amended.cause.lost.first) == len(MANY)
        after = written(self.lead(silent=silent, forgiven=forgiven, forming=amended))
        assert set(after.participants) == set(NAMES) - set(MANY)


class TestTheDetector:
    def test_a_silence_is_doubted_once_until_the_next_beat(self) -> None:
        detector = FailureDetector()
        detector.observe("n1", 1, 0.0, 0.0)
        detector.observe("n1", 1, 3.0, 3.0)
        assert not detector.watched["n1"].had_grace
        detector.doubt(["n1", "unknown"])
        detector.observe("n1", 1, 4.0, 4.0)
        detector.doubt(["n1"])
        assert detector.watched["n1"].forgiven == 3.0
        detector.observe("n1", 2, 5.0, 5.0)
        assert not detector.watched["n1"].had_grace

    def test_grace_after_an_outage_is_what_a_doubt_would_give(self) -> None:
        detector = FailureDetector()
        detector.observe("n1", 1, 0.0, 0.0)
        detector.restart(5.0, 3.0)
        detector.observe("n2", 1, 6.0, 6.0)
        assert detector.watched["n1"].had_grace
        assert detector.watched["n2"].had_grace
        detector.restart(6.0)
        assert detector.watched["n1"].had_grace
        detector.observe("n3", 1, 9.0, 9.0)
        assert not detector.watched["n3"].had_grace

    def test_a_record_that_is_gone_is_no_beat(self) -> None:
        detector = FailureDetector()
        detector.observe("n1", 1, 0.0, 0.0)
        detector.observe("n1", 1, 3.0, 3.0)
        detector.doubt(["n1"])
        detector.observe("n1", None, 4.0, 4.0)
        assert detector.watched["n1"].forgiven == 3.0


def heir(time: Time, silence: float, late: float = 0.0) -> Observer:
    """It has taken the lead from n1, which had been silent for so long, and listed all."""
    made = Observer("n2", RULES, time)
    made.beat_was_late(late)
    led = document(Phase.RUNNING)
    record_of = {name: running(name, led) for name in led.participants}

    def look() -> None:
        work = made.observe()
        answer: object = None
        while True:
            try:
                request = work.send(answer)
            except StopIteration:
                return
            entries = {
                NODES_PREFIX + name: Entry(it.encode(), "1") for name, it in record_of.items()
            }
            answer = entries if isinstance(request, List) else None
            if isinstance(request, Read):
                answer = entries.get(request.key)

    assert [*made.adopt(Entry(led.encode(), "1"))] == []
    made.read_again(leader=True)
    look()
    time.now += silence
    made.read_again(leader=True)
    look()
    assert [*made.adopt(Entry(replace(led, leader="n2").encode(), "2"))] == []
    look()
    return made


class TestATakeOver:
    def test_a_node_that_fell_silent_with_the_leader_has_had_a_lease(self, time: Time) -> None:
        made = heir(time, RULES.lease)
        assert made.liveness.watched["n3"].had_grace
        assert not made.liveness.watched["n1"].had_grace
        assert made.is_lost("n1")

    def test_a_leader_that_only_did_not_list_tells_nothing_of_the_others(self, time: Time) -> None:
        assert not heir(time, RULES.lease / 2).liveness.watched["n3"].had_grace

    def test_a_slow_heir_gives_the_leader_one_more_lease(self, time: Time) -> None:
        made = heir(time, RULES.lease + 0.5, late=1.0)
        assert made.liveness.watched["n1"].forgiven == RULES.lease + 0.5
        assert not made.is_lost("n1")


class TestLag:
    """A node that is late itself gives others as much more time."""

    def test_the_two_last_beats_count(self, time: Time) -> None:
        made = Observer("n2", RULES, time)
        assert made.delays.lag == 0.0
        made.beat_was_late(0.5)
        assert made.delays.lag == 0.0
        made.beat_was_late(4.0)
        made.beat_was_late(0.1)
        assert made.delays.lag == 3.5
        made.beat_was_late(0.1)
        assert made.delays.lag == 0.0

    def test_the_leader_is_followed_for_so_long(self) -> None:
        heir = seen({"n1": 3.5})
        late = replace(heir, me="n2", record=wide(running("n2", RAN)), records=None, lag=1.0)
        assert decide(late) == Wait(0.5)
        assert written(decide(replace(late, lag=0.0))).leader == "n2"

    def test_a_slow_heir_ends_no_round_that_is_confirmed(self) -> None:
        now = document(Phase.CONFIRMING)
        me = running("n2", now)
        late = view(me, now, silent={"n1": 9.0}, lag=1.0)
        assert written(decide(late)) == replace(now, leader="n2")
        assert written(decide(replace(late, lag=0.0))).phase is Phase.FORMING


class TestACrowd:
    RULES = Rules(min_nodes=4, max_nodes=30, lease=15.0, interval=5.0, last_call_timeout=1.0)

    def crowd(self) -> Crowd:
        crowd = Crowd()
        for name in NAMES:
            crowd.join(name, self.RULES)
            crowd.play(0.01)
        crowd.play_until(lambda: all(each.given for each in crowd.members.values()), 60.0)
        crowd.play_until(lambda: crowd.document.phase is Phase.RUNNING, 60.0)
        return crowd

    def test_half_of_the_fleet_is_out_in_one_round_within_two_leases(self) -> None:
        crowd = self.crowd()
        crowd.play(30.0)
        before = crowd.document.round
        leader = crowd.members[str(crowd.document.leader)]
        lost = [name for name in NAMES if name != leader.node.id][:12]
        for name in lost:
            crowd.members[name].crash()
        took = crowd.play_until(lambda: set(lost).isdisjoint(crowd.document.ranks), 60.0)
        assert 1.3 * self.RULES.lease < took < 2 * self.RULES.lease + 2 * self.RULES.interval
        crowd.play_until(lambda: crowd.document.phase is Phase.RUNNING, 30.0)
        assert crowd.document.round == before + 1
        assert len(crowd.document.participants) == 12
        assert [line for line in leader.told if "late with their heartbeats" in line]

    def test_many_that_are_late_and_come_back_lose_no_round(self) -> None:
        crowd = self.crowd()
        crowd.play(30.0)
        before = crowd.document
        slow = [name for name in NAMES if name != before.leader][:12]
        for name in slow:
            crowd.members[name].alive = False
        crowd.play(1.4 * self.RULES.lease)
        for name in slow:
            crowd.members[name].alive = True
        crowd.play(60.0)
        assert crowd.document.world_id == before.world_id


def test_shares_of_an_interval_are_small_for_few_nodes_only() -> None:
    """The first one's write is read before many others try, however many there are."""
    for nodes in (64, 1024, 16384):
        big = document(Phase.RUNNING, leader=None, max_nodes=nodes, participants=("n1", "n9"))
        turns = []
        for index in range(nodes):
            action = decide(view(record("n5", max_nodes=nodes), big, joining=False,
                                 share=index / nodes))  # fmt: skip
            turns.append(action.seconds or 0.0 if isinstance(action, Wait) else 0.0)
        turns.sort()
        assert turns[-1] < RULES.interval
        # Within a twentieth of an interval after the first.
        assert sum(turn <= turns[0] + 0.05 * RULES.interval for turn in turns) < 4
