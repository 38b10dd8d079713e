"""The network check from a node's side: what it dials, what it says, and what becomes of it."""

from __future__ import annotations

import pytest

from rdzv_plugins.kv import MemoryServer
from rdzv_plugins.protocol import effects, words
from rdzv_plugins.protocol.documents import NODES_PREFIX, STATE_KEY, NodeRecord, Phase, Status
from rdzv_plugins.protocol.orders import resize
from rdzv_plugins.protocol.rules import Failure, Rules
from tests import replace

from .crowd import Crowd, Member
from .life import Life, Time, finish, stored

pytestmark = pytest.mark.rule("network check")

RULES = Rules(
    min_nodes=2, max_nodes=3, lease=3.0, interval=1.0, last_call_timeout=0.2, network_check=True
)
PAIR = replace(RULES, max_nodes=2)


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def record(life: Life) -> NodeRecord:
    entry = life.client.get(NODES_PREFIX + life.node.id)
    assert entry is not None
    return NodeRecord.decode(entry.value)


def part(crowd: Crowd, *cut: str, links: frozenset[frozenset[str]] = frozenset()) -> None:
    """From now on these are cut off from the others, and these links are bad."""
    for name, member in crowd.members.items():

        def dials(request: effects.DialPeer, name: str = name) -> float | Exception:
            bad = frozenset((name, request.node)) in links
            return TimeoutError("timed out") if bad or {name, request.node} & {*cut} else 0.01

        member.dials = dials


def sits_out(member: Member) -> str:
    """What the handler does with a node that was found to be cut off; returns why."""
    ((_, outcome),) = member.failed
    assert outcome.failure is Failure.AT_FAULT
    member.failed.clear()
    member.alive = True
    member.node.inbox.report_unfit(record(member).unfit)
    return record(member).unfit


class TestDials:
    def begin(self, rules: Rules = PAIR) -> tuple[Life, Life, list[effects.DialPeer]]:
        server, time = MemoryServer(), Time()
        a, b = (Life(name, server, time, rules, seed) for seed, name in enumerate("ab"))
        asked: list[effects.DialPeer] = []
        for life in (a, b):
            life.dials = lambda request: (asked.append(request), 0.25)[1]  # type: ignore[func-returns-value]
        return a, b, asked

    def test_each_exchanges_data_with_its_partner_and_followers_dial_rank_0(self) -> None:
        a, b, asked = self.begin()
        a.go()
        finish(a, b)
        assert [(it.node, it.endpoint, it.exchanges) for it in asked if it.node == "b"] == [
            ("b", "b:4711", True)
        ]
        assert [(it.node, it.endpoint, it.exchanges) for it in asked if it.node == "a"] == [
            ("a", "a:4711", True), ("a", "host:1", False)
        ]  # fmt: skip
        found = record(b).dials
        assert found is not None
        assert (found.partner, found.seconds, found.first, found.unreached) == ("a", 0.25, "a", "")

    def test_without_the_option_a_node_asks_for_nothing_more(self) -> None:
        logs = []
        for option in (False, True):
            a, b, asked = self.begin(replace(PAIR, network_check=option))
            a.go()
            finish(a, b)
            assert bool(asked) is option
            logs.append(len(a.log) + len(b.log))
            if not option:
                assert (record(b).dials, record(b).port) == (None, 0)
                a.join_again()
                a.go()
                entry = a.client.get(STATE_KEY)
                assert entry is not None
                assert b'"faults"' not in entry.value
                assert b'"lost"' not in entry.value
                assert b'"absent"' not in entry.value
        assert logs[0] < logs[1]

    def test_one_node_alone_dials_nobody(self) -> None:
        rules = replace(PAIR, min_nodes=1, max_nodes=1)
        life = Life("a", MemoryServer(), Time(), rules)
        life.dials = lambda request: pytest.fail("it dials")
        life.go()
        assert life.outcomes[0].document

    def test_a_node_without_the_option_is_not_dialled(self, crowd: Crowd) -> None:
        a = crowd.join("a", RULES)
        crowd.join("b", replace(RULES, network_check=False))
        part(crowd, "b")
        a.dials = lambda request: pytest.fail("it dials")
        crowd.play_until(lambda: bool(a.given), 20)

    def test_a_node_beats_while_a_dial_hangs(self) -> None:
        a, b, _ = self.begin()
        a.dials = b.dials = lambda request: None
        a.go()
        for _ in range(5):
            b.go()
            a.go()
        before = record(b).beat
        for _ in range(3):
            b.wake()
        assert record(b).beat > before
        assert not b.outcomes
        assert stored(b).phase is Phase.CONFIRMING

    def test_a_report_that_comes_too_late_is_nothing(self) -> None:
        a, b, asked = self.begin()
        a.go()
        finish(a, b)
        b.node.finished(asked[-1], 9.0)
        assert not b.node.has_messages


class TestCutOff:
    def begin(self, crowd: Crowd, *cut: str, rules: Rules = RULES) -> list[Member]:
        members = [crowd.join(name, rules) for name in "abc"]
        part(crowd, *cut)
        return members

    def come_back(self, crowd: Crowd) -> tuple[Member, Member, Member]:
        """Two run; the third was cut off, can be reached again, and asks."""
        a, b, c = self.begin(crowd, "c")
        crowd.play_until(lambda: bool(a.given and b.given), 60)
        sits_out(c)
        part(crowd)
        c.ask()
        return a, b, c

    @pytest.mark.parametrize("cut", ["a", "b", "c"])
    def test_the_others_run_without_it(self, crowd: Crowd, cut: str) -> None:
        members = self.begin(crowd, cut)
        well = [it for it in members if it.node.id != cut]
        (out,) = (it for it in members if it.node.id == cut)
        crowd.play_until(lambda: all(it.given for it in well), 60)
        assert crowd.document.size == 2
        why = sits_out(out)
        assert why.startswith("network: no data passed between this node and ")
        assert record(out).is_unfit
        assert f"{cut}[1] left ({why})" in crowd.document.reason
        assert any("does not run" in line for it in members for line in it.told)
        own = "the network check of this node failed: this node could not "
        assert any(own in line for it in members for line in it.told)

    def test_a_node_that_was_cut_off_comes_in_with_the_next_round_and_ends_none(
        self, crowd: Crowd
    ) -> None:
        a, _, c = self.come_back(crowd)
        crowd.play(20.0)
        assert (len(a.given), record(c).status) == (1, Status.SPARE)
        assert any("not ended for a node that failed its network check" in it for it in c.told)
        a.ask()
        crowd.play_until(lambda: bool(c.given), 30)
        assert crowd.document.size == 3
        c.ask()
        crowd.play(0.1)
        assert not record(c).was_at_fault

    def test_a_person_lets_it_in_at_once(self, crowd: Crowd) -> None:
        a, _, c = self.come_back(crowd)
        crowd.play(5.0)
        a.carry_out(resize("rdzv"))
        crowd.play_until(lambda: bool(c.given), 30)

    def test_a_run_that_needs_it_says_why_it_waits(self, crowd: Crowd) -> None:
        members = self.begin(crowd, "c", rules=replace(RULES, min_nodes=3))
        c = members[-1]
        crowd.play_until(lambda: bool(c.failed), 60)
        why = sits_out(c)
        crowd.play(3.0)
        leader = crowd.members[crowd.document.leader or ""]
        assert str(words.of_node(leader.node.view())).startswith(
            f"waiting for 1 node: 2 of 3 are here; unfit: c[1] ({why})"
        )
        part(crowd)
        c.ask()
        crowd.play_until(lambda: all(it.given for it in members), 30)

    def test_one_bad_link_is_told_and_holds_nobody_up(self, crowd: Crowd) -> None:
        members = self.begin(crowd)
        part(crowd, links=frozenset({frozenset("bc")}))
        crowd.play_until(lambda: all(it.given for it in members), 60)
        assert crowd.document.faults.links == (("b", "c"),)
        told = [line for it in members for line in it.told]
        assert any("runs all the same: " in line for line in told), told
        leader = crowd.members[crowd.document.leader or ""]
        assert "no data passes between b[1] and c[1]" in str(words.of_node(leader.node.view()))

    def test_two_nodes_that_do_not_reach_each_other_try_again(self, crowd: Crowd) -> None:
        """Nobody can say whose fault it is."""
        a, b = crowd.join("a", PAIR), crowd.join("b", PAIR)
        part(crowd, "b")
        crowd.play(30.0)
        assert [a.given, b.given, a.failed, b.failed] == [[], [], [], []]
        assert 3 < crowd.document.round < 15
        part(crowd)
        crowd.play_until(lambda: bool(a.given and b.given), 30)

    def test_a_rank_0_that_nobody_can_dial_is_another(self, crowd: Crowd) -> None:
        members = self.begin(crowd)
        for it in members:
            it.master = f"{it.node.id}:1"
            it.dials = lambda request: TimeoutError() if request.endpoint == "a:1" else 0.01
        crowd.play_until(lambda: all(it.given for it in members), 60)
        assert crowd.document.participants[0] == "b"
        assert crowd.document.size == 3

    def test_a_partner_that_is_dead_is_lost_and_nobody_is_blamed(self, crowd: Crowd) -> None:
        a, b, c = self.begin(crowd)
        for it in (a, b, c):
            it.dials = lambda request: None
        crowd.play_until(lambda: crowd.stored is not None and crowd.document.size == 3, 30)
        c.crash()
        part(crowd, "c")
        crowd.play_until(lambda: bool(a.given and b.given), 60)
        assert "lost c[1]" in crowd.document.reason
        assert (a.failed, b.failed) == ([], [])
