"""A node whose check fails asks for no round, says why, and the others do not wait for it."""

from __future__ import annotations

from functools import partial

import pytest

from rdzv_plugins.kv import MemoryServer
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.cleanup import close_run
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    Names,
    NodeRecord,
    Outcome,
    Phase,
    Status,
)
from rdzv_plugins.protocol.orders import give, nodes_named
from rdzv_plugins.protocol.rules import Failure, Rules
from rdzv_plugins.protocol.words import before_the_first_round
from tests import replace

from .crowd import Crowd, Member
from .life import RULES, Life, Time, sweep
from .views import diagnose

pytestmark = pytest.mark.rule("unfit nodes")

RULES_OF_3 = Rules(
    min_nodes=2, max_nodes=3, lease=3.0, interval=1.0, last_call_timeout=0.2, rejoin_timeout=100.0
)
ECC = "gpu: 2 uncorrected ECC errors"


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def record(crowd: Crowd, member: Life) -> NodeRecord | None:
    entry = member.client.get(NODES_PREFIX + member.node.id)
    return NodeRecord.decode(entry.value) if entry else None


def turn_unfit(member: Member, reason: str = ECC) -> None:
    """Its agent asks for a round, and its check fails."""
    member.joining = False
    member.stops = None
    member.node.inbox.report_unfit(reason)


def arrives_unfit(crowd: Crowd, name: str, rules: Rules) -> Member:
    """A newcomer whose check fails before its first join."""
    member = Member(name, crowd.server, crowd.time, rules, seed=99)
    # Its life as it is before the first request, without the order to join.
    member.node.inbox.joins = False
    turn_unfit(member)
    member.life = member.node.run()
    member.request = next(member.life)
    crowd.members[name] = member
    return member


def worlds(members: list[Member]) -> set[tuple[str, ...]]:
    return {member.given[-1].participants for member in members}


class TestAtARestart:
    def test_the_others_go_on_at_once(self, crowd: Crowd) -> None:
        a, b, c = crowd.begin(RULES_OF_3, "a", "b", "c")
        turn_unfit(c)
        took = crowd.play_until(lambda: len(a.given) == 2 and len(b.given) == 2, 10.0)
        assert took < 1.0, "they waited for it"
        assert worlds([a, b]) == {("a", "b")}
        assert crowd.document.reason == f"c[1] left ({ECC})"
        assert len(c.given) == 1

    @pytest.mark.parametrize("leader", ["a", "b"])
    def test_the_others_go_on_soon_whether_an_unfit_node_leads_or_not(
        self, crowd: Crowd, leader: str
    ) -> None:
        members = crowd.begin(RULES_OF_3, "a", "b", "c")
        unfit = crowd.members[leader]
        others = [member for member in members if member is not unfit]
        turn_unfit(unfit)
        took = crowd.play_until(lambda: all(len(it.given) == 2 for it in others), 10.0)
        assert took < 1.5
        assert crowd.document.leader in {it.node.id for it in others}

    def test_a_node_that_turns_unfit_is_no_longer_awaited(self, crowd: Crowd) -> None:
        """The others ask for the round first; then its check fails."""
        a, b, c = crowd.begin(RULES_OF_3, "a", "b", "c")
        a.ask()
        c.stops = None
        crowd.play_until(lambda: crowd.document.phase is Phase.FORMING and b.joining, 10.0)
        crowd.play(10.0)
        assert crowd.document.phase is Phase.FORMING
        turn_unfit(c)
        assert crowd.play_until(lambda: len(a.given) == 2 == len(b.given), 10.0) < 1.0
        assert f"c[1] left ({ECC})" in crowd.document.reason

    def test_it_joins_the_next_round_once_it_is_fit(self, crowd: Crowd) -> None:
        a, b, c = crowd.begin(RULES_OF_3, "a", "b", "c")
        turn_unfit(c)
        crowd.play_until(lambda: len(a.given) == 2 == len(b.given), 10.0)
        c.ask()
        crowd.play_until(lambda: len(c.given) == 2, 10.0)
        crowd.play_until(lambda: worlds([a, b, c]) == {("a", "b", "c")}, 10.0)
        it = record(crowd, c)
        assert it is not None
        assert (it.status, it.unfit) == (Status.RUN, "")

    def test_below_the_minimum_the_leader_says_whom_it_lacks_and_why(self, crowd: Crowd) -> None:
        rules = replace_rules(min_nodes=3)
        a, b, c = crowd.begin(rules, "a", "b", "c")
        turn_unfit(c)
        crowd.play(5.0)
        assert (len(a.given), len(b.given)) == (1, 1)
        sentence, _, since = a.node.diagnosis.lasting.partition("; forming since ")
        assert since.endswith(" UTC")
        assert sentence == f"waiting for 1 node: 2 of 3 are here; unfit: c[1] ({ECC})"
        crowd.play_until(lambda: any(sentence in line for line in a.said), 10.0)

    def test_a_loss_that_is_not_restarted_for_is_noted(self, crowd: Crowd) -> None:
        a, _, c = crowd.begin(replace_rules(restart_on_loss=False), "a", "b", "c")
        turn_unfit(c)
        crowd.play(2.0)
        assert crowd.document.absent == ("c",)
        assert a.node.num_nodes_waiting == 0


class TestBeforeItsFirstRound:
    def test_it_is_in_no_round_and_says_why(self, crowd: Crowd) -> None:
        a, b = (crowd.join(name, RULES_OF_3) for name in "ab")
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play_until(lambda: bool(a.given and b.given), 10.0)
        assert worlds([a, b]) == {("a", "b")}
        crowd.play(30.0)
        assert (len(a.given), len(b.given), c.given) == (1, 1, [])
        it = record(crowd, c)
        assert it is not None
        assert (it.status, it.unfit) == (Status.LEFT, ECC)
        c.ask()
        crowd.play_until(lambda: bool(c.given), 10.0)
        assert set(c.given[-1].participants) == {"a", "b", "c"}

    def test_alone_it_founds_no_run(self, crowd: Crowd) -> None:
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play(10.0)
        assert crowd.stored is None
        it = record(crowd, c)
        assert it is not None
        assert it.is_unfit
        said = before_the_first_round([it])
        assert str(said) == f"no round has begun; unfit: c[1] ({ECC})"

    def test_alone_it_leaves_nothing_when_it_ends(self, crowd: Crowd) -> None:
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play(2.0)
        c.leave()
        assert c.client.list("").keys() <= {"bell"}

    def test_its_record_outlives_the_rounds_of_the_others(self, crowd: Crowd) -> None:
        a, b = crowd.begin(RULES_OF_3, "a", "b")
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play(2.0)
        for _ in range(3):
            rounds = len(b.given)
            a.ask()
            crowd.play_until(partial(has_more, b, rounds), 10.0)
            crowd.play(0.5)
            assert record(crowd, c) is not None
        crowd.members["c"].crash()
        crowd.play(8.0)
        rounds = len(b.given)
        a.ask()
        crowd.play_until(lambda: len(b.given) > rounds, 10.0)
        crowd.play(2.0)
        assert record(crowd, c) is None, "nobody says it any more"

    def test_a_round_of_others_is_not_told_of_it_as_lost_or_waiting(self, crowd: Crowd) -> None:
        a, b = crowd.begin(RULES_OF_3, "a", "b")
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play(5.0)
        c.crash()
        crowd.play(10.0)
        assert (len(a.given), len(b.given)) == (1, 1)
        assert crowd.document.waiters == 0


class TestWhatIsTold:
    def test_the_leader_tells_it_once_for_each_reason(self, crowd: Crowd) -> None:
        a, b = crowd.begin(RULES_OF_3, "a", "b")
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play(5.0)
        for _ in range(3):
            c.node.inbox.report_unfit(ECC)
            crowd.play(3.0)
        c.node.inbox.report_unfit("disk: /tmp is full")
        crowd.play(3.0)
        told = [line for line in a.told + a.said if "does not join" in line]
        assert told == [f"c[1] does not join: {ECC}", "c[1] does not join: disk: /tmp is full"]
        assert not [line for line in b.told + b.said if "does not join" in line]

    def test_its_own_sentence(self, crowd: Crowd) -> None:
        crowd.begin(RULES_OF_3, "a", "b")
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play(1.0)
        assert str(c.node.diagnosis) == f"this node does not join: {ECC}"

    def test_a_run_that_goes_on_names_it_with_the_reason(self, crowd: Crowd) -> None:
        a, _, c = crowd.begin(RULES_OF_3, "a", "b", "c")
        turn_unfit(c)
        crowd.play(5.0)
        records = {it.node.id: it.node.record for it in crowd.members.values()}
        said = str(diagnose(crowd.document, records))
        assert said == f"running round 1, 2 of 2..3 nodes; unfit: c[1] ({ECC})"
        silent = str(diagnose(crowd.document, records, {"c"}.__contains__))
        assert silent == "running round 1, 2 of 2..3 nodes"
        assert a.given

    def test_where_nobody_is_fit(self, crowd: Crowd) -> None:
        members = crowd.begin(RULES_OF_3, "a", "b")
        for member in members:
            turn_unfit(member)
        crowd.play(5.0)
        records = {it.node.id: it.node.record for it in members}
        said = str(diagnose(crowd.document, records))
        assert said.endswith(f"no node is fit; unfit: a[1] ({ECC}), b[1] ({ECC})")
        for member in members:
            member.ask()
        crowd.play_until(lambda: worlds(members) == {("a", "b")}, 10.0)

    @pytest.mark.parametrize(
        ("left", "unfit", "text"),
        [
            (["a"], {"a": "full"}, "a left (full)"),
            (["a", "b"], {"b": "full"}, "a, b left (b: full)"),
            (["a", "b"], {"a": "hot", "b": "full"}, "a, b left (a: hot; b: full)"),
            (["a"], {}, "a left"),
        ],
    )
    def test_the_cause_has_the_reasons(
        self, left: list[str], unfit: dict[str, str], text: str
    ) -> None:
        assert str(Cause(left=Names().plus(left)).because(unfit)) == text

    def test_a_cause_keeps_few_reasons(self) -> None:
        cause = Cause().because({str(number): "full" for number in range(100)})
        assert len(cause.unfit) == 4


class TestWhenItIsDrained:
    def test_it_ends_though_it_asks_for_no_round(self, crowd: Crowd) -> None:
        a, b, c = crowd.begin(RULES_OF_3, "a", "b", "c")
        turn_unfit(c)
        crowd.play_until(lambda: len(a.given) == 2 == len(b.given), 10.0)
        crowd.play(3.0)
        assert nodes_named("c", {"c": seen(crowd, c)}) == ["c"]
        work = give("x", crowd.document.incarnation, lambda it: replace(it, drained=("c",)))
        a.carry_out(work)
        crowd.play_until(lambda: bool(c.failed), 5.0)
        assert [it.failure for _, it in c.failed] == [Failure.DRAINED]
        assert (seen(crowd, c).status, seen(crowd, c).unfit) == (Status.LEFT, "")
        crowd.play(5.0)
        assert len(c.failed) == 1
        assert len(a.given) == 2, "a round ended for it"


class TestWhenTheRunEnds:
    def test_an_unfit_node_of_the_run_ends_as_a_spare_does(self, crowd: Crowd) -> None:
        a, _, c = crowd.begin(RULES_OF_3, "a", "b", "c")
        turn_unfit(c)
        crowd.play(3.0)
        close(a)
        crowd.play_until(lambda: bool(c.failed), 5.0)
        assert c.failed[0][1].failure is Failure.SPARE_CLOSED
        assert record(crowd, c) is None

    def test_a_newcomer_is_refused(self, crowd: Crowd) -> None:
        a, _ = crowd.begin(RULES_OF_3, "a", "b")
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play(1.0)
        close(a)
        crowd.play_until(lambda: bool(c.failed), 5.0)
        assert c.failed[0][1].failure is Failure.CLOSED

    def test_it_finds_the_tombstone_of_a_run_that_was_swept(self, crowd: Crowd) -> None:
        a, b, c = crowd.begin(RULES_OF_3, "a", "b", "c")
        turn_unfit(c)
        crowd.play(3.0)
        c.down = True
        close(a)
        a.crash()
        b.crash()
        sweep(crowd.server)
        crowd.play(3.0)
        c.down = False
        crowd.play_until(lambda: bool(c.failed), 10.0)
        assert c.client.get(STATE_KEY) is None
        assert record(crowd, c) is None

    def test_it_closes_nothing_itself(self, crowd: Crowd) -> None:
        _, _, c = crowd.begin(RULES_OF_3, "a", "b", "c")
        assert c.node.in_round
        c.node.inbox.report_unfit(ECC)
        assert not c.node.in_round, "shutdown() must only leave, also before this is written"

    def test_its_farewell_keeps_the_reason(self, crowd: Crowd) -> None:
        a, b, c = crowd.begin(RULES_OF_3, "a", "b", "c")
        c.node.inbox.report_unfit(ECC)
        c.leave()
        crowd.play_until(lambda: len(a.given) == 2 == len(b.given), 10.0)
        assert crowd.document.reason == f"c[1] left ({ECC})"

    def test_a_node_that_gives_up_a_join_in_an_outage_and_turns_unfit_says_why(
        self, crowd: Crowd
    ) -> None:
        crowd.begin(RULES_OF_3, "a", "b")
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play(3.0)
        c.down = True
        c.node.inbox.join()
        c.node.inbox.withdraw()
        c.node.inbox.report_unfit("disk: /tmp is full")
        crowd.play(3.0)
        c.down = False
        crowd.play(3.0)
        said = record(crowd, c)
        assert said is not None
        assert (said.status, said.unfit) == (Status.LEFT, "disk: /tmp is full")

    def test_a_node_that_gives_up_a_join_at_once_is_fit_all_the_same(self, crowd: Crowd) -> None:
        crowd.begin(RULES_OF_3, "a", "b")
        c = arrives_unfit(crowd, "c", RULES_OF_3)
        crowd.play(3.0)
        c.node.inbox.join()
        c.node.inbox.withdraw()
        crowd.play(3.0)
        said = record(crowd, c)
        assert said is not None
        assert (said.status, said.unfit) == (Status.LEFT, "")


class TestOneNode:
    """Request by request."""

    def test_it_beats_once_an_interval_and_asks_nothing_else(self) -> None:
        life = Life("a", MemoryServer(), Time(), RULES)
        life.node.inbox.joins = False
        life.node.inbox.report_unfit(ECC)
        life.life = life.node.run()
        life.request = next(life.life)
        life.go()
        assert isinstance(life.request, effects.Park)
        # In an empty store it looks whether a run was founded that it was not told of.
        assert life.wake() == ["PutRecord", "Read state"]
        assert life.wake() == ["PutRecord", "Read state"]

    def test_a_leader_that_turns_unfit_gives_up_the_lead_in_one_write(self) -> None:
        server, time = MemoryServer(), Time()
        alone = replace_rules(min_nodes=1, max_nodes=1)
        life = Life("a", server, time, alone)
        life.go()
        assert life.outcomes
        life.node.inbox.report_unfit(ECC)
        life.send(None)
        asked = life.go()
        assert "CompareAndSet state" in asked
        document = life.node.document
        assert document is not None
        assert document.leader is None
        life.outcomes.clear()
        life.node.inbox.join()
        life.send(None)
        for _ in range(10):
            life.go()
            if life.outcomes:
                break
            life.wake()
        assert life.outcomes[0].document is not None
        assert life.outcomes[0].document.round == 1

    def test_the_time_that_it_was_unfit_counts_against_join_timeout(self) -> None:
        life = Life("a", MemoryServer(), Time(), RULES)
        life.go()
        life.node.inbox.join(waited=58.0)
        life.send(None)
        began = life.time.now
        while not life.outcomes:
            life.go()
            if not life.outcomes:
                life.wake()
        assert life.outcomes[0].failure is Failure.TIMEOUT
        assert 1.9 < life.time.now - began < 3.0

    def test_without_a_check_nothing_more_is_stored(self) -> None:
        life = Life("a", MemoryServer(), Time(), RULES)
        life.go()
        entry = life.client.get(NODES_PREFIX + "a")
        assert entry is not None
        assert b"unfit" not in entry.value


def seen(crowd: Crowd, member: Member) -> NodeRecord:
    found = record(crowd, member)
    assert found is not None
    return found


def has_more(member: Member, rounds: int) -> bool:
    return len(member.given) > rounds


def close(member: Member) -> None:
    member.carry_out(close_run("x", None, Outcome.SUCCEEDED, "done", 1.0, may_close=lambda _: True))


def replace_rules(**changes: object) -> Rules:
    return replace(RULES_OF_3, **changes)
