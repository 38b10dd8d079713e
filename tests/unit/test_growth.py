"""When newcomers are let into a running round, and how long a restart waits; no progress."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rdzv_plugins.process.factory import rules_of
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import Cause, Names, Outcome, Phase, RoundDocument, Status
from rdzv_plugins.protocol.policies import noted
from rdzv_plugins.protocol.policies.growth import last_call_seconds, why_not_grow
from rdzv_plugins.protocol.rounds import next_round
from rdzv_plugins.protocol.rules import Close, Rules, View
from rdzv_plugins.protocol.situation import assess
from rdzv_plugins.protocol.words import of_node
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.settings.parsing import parse_options
from tests import replace
from tests.unit.crowd import Crowd

from .views import RULES, diagnose, document, record, running, view

# Two train, and there is room for two more.
NOW = document(Phase.RUNNING, max_nodes=4, participants=("n1", "n2"))
NOW = replace(NOW, ran=NOW.world_id)


def leads(newcomers: int = 1, now: RoundDocument = NOW, **more: Any) -> View:
    """The view of the leader, n1, of two nodes, while others wait."""
    wide = {name: replace(running(name, now), max_nodes=4) for name in ("n1", "n2")}
    wide |= {f"n{i}": record(f"n{i}", max_nodes=4) for i in range(3, 3 + newcomers)}
    rules = replace(RULES, max_nodes=4, **{k: v for k, v in more.items() if k in Rules.__slots__})
    known = {k: v for k, v in more.items() if k not in Rules.__slots__}
    return view(wide["n1"], now, wide, joining=False, rules=rules, **known)


def grows(here: View) -> bool:
    action = decide(here)
    return getattr(getattr(action, "document", None), "phase", None) is Phase.FORMING


@pytest.mark.rule("growth")
class TestWhenNewcomersAreLetIn:
    def test_newcomers_that_fill_the_round_are_let_in_at_once(self) -> None:
        assert grows(leads(newcomers=2))

    @pytest.mark.parametrize(("counted", "then"), [(None, False), (4.9, False), (5.0, True)])
    def test_others_after_the_last_call(self, counted: float | None, then: bool) -> None:
        assert grows(leads(enough_for=counted)) is then

    @pytest.mark.parametrize(("uptime", "then"), [(59.0, False), (60.0, True)])
    def test_min_uptime(self, uptime: float, then: bool) -> None:
        assert grows(leads(newcomers=2, min_uptime=60.0, uptime=uptime)) is then

    @pytest.mark.parametrize(("grown_for", "then"), [(99.0, False), (100.0, True)])
    def test_resize_interval(self, grown_for: float, then: bool) -> None:
        assert grows(leads(newcomers=2, resize_interval=100.0, grown_for=grown_for)) is then

    @pytest.mark.parametrize("grow", ["never", "checkpoint"])
    def test_grow(self, grow: str) -> None:
        assert not grows(leads(newcomers=2, grow=grow, uptime=1e6, grown_for=1e6))

    def test_a_checkpoint_needs_no_last_call(self) -> None:
        here = leads(grow="checkpoint")
        assert here.records is not None
        moment = {**here.records, "n2": replace(here.records["n2"], may_grow=True)}
        assert grows(replace(here, records=moment))
        assert not grows(replace(here, records=moment, rules=replace(here.rules, min_uptime=9.0)))

    def test_an_order_overrules_all(self) -> None:
        now = replace(NOW, resize=True)
        assert grows(leads(now=now, grow="never", min_uptime=60.0, resize_interval=60.0))

    def test_an_order_is_for_now(self) -> None:
        action = decide(leads(newcomers=0, now=replace(NOW, resize=True)))
        assert getattr(action, "document", None) == NOW

    def test_a_loss_lets_them_in_at_once(self) -> None:
        here = leads(grow="never", min_uptime=60.0, silent={"n2": 9.0})
        assert grows(here)

    def test_a_newcomer_that_replaces_a_lost_node_is_no_growth(self) -> None:
        """With restart_on_loss=false the round went on without it."""
        lost = replace(NOW, absent=("n2",))
        here = leads(
            now=lost, grow="never", restart_on_loss=False, silent={"n2": 9.0}, enough_for=5.0
        )
        assert grows(here)
        assert not grows(replace(here, enough_for=4.9))

    @pytest.mark.parametrize(("newcomers", "then"), [(1, False), (2, True)])
    def test_a_round_that_has_lost_all_its_nodes_is_ended_for_enough(
        self, newcomers: int, then: bool
    ) -> None:
        """Whatever holds newcomers back is for the sake of those who train."""
        dead = replace(NOW, leader="n3", absent=("n1", "n2"))
        options = {"restart_on_loss": False, "min_uptime": 60.0, "resize_interval": 60.0}
        here = leads(newcomers, dead, silent={"n1": 9.0, "n2": 9.0}, **options)
        spare = record("n3", Status.SPARE, max_nodes=4)
        assert grows(replace(here, me="n3", record=spare, joining=True)) is then


@pytest.mark.rule("growth")
class TestWhatIsSaid:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"grow": "never"}, "1 waiting (grow=never)"),
            ({"grow": "checkpoint"}, "1 waiting (grow=checkpoint)"),
            ({"min_uptime": 60.0, "uptime": 19.0}, "1 waiting; 41 s to min_uptime"),
            ({"resize_interval": 60.0, "grown_for": 9.0}, "1 waiting; 51 s to resize_interval"),
            ({"enough_for": 2.0}, "1 waiting; 3 s of last call left"),
        ],
    )
    def test_the_leader_says_what_newcomers_wait_for(
        self, options: dict[str, Any], said: str
    ) -> None:
        sentence = str(of_node(leads(**options)))
        assert sentence == f"running round 4, 2 of 2..4 nodes, {said}"

    def test_an_observer_names_the_options(self) -> None:
        records = dict(leads().records or {})
        policy = "rank_order=stable,grow=never,min_uptime=60.0"
        records["n1"] = replace(records["n1"], run_options=policy)
        said = "running round 4, 2 of 2..4 nodes, 1 waiting (grow=never, min_uptime=60.0)"
        assert str(diagnose(NOW, records)) == said


@pytest.mark.rule("last call")
class TestTheLastCall:
    RULES = replace(RULES, last_call_timeout=30.0)

    def named(self, round_: int, **cause: tuple[str, ...]) -> RoundDocument:
        names: dict[str, Any] = {of: Names(who) for of, who in cause.items()}
        return document(Phase.FORMING, round_, cause=Cause(**names))

    def test_a_first_round_waits(self) -> None:
        assert last_call_seconds(self.RULES, self.named(0)) == 30.0

    @pytest.mark.parametrize("of", ["failed", "joined"])
    def test_a_restart_with_all_nodes_waits_for_nobody(self, of: str) -> None:
        assert last_call_seconds(self.RULES, self.named(3, **{of: ("n1[1]",)})) == 0.0

    @pytest.mark.parametrize("of", ["lost", "left", "evicted"])
    def test_one_after_a_loss_waits_for_a_replacement(self, of: str) -> None:
        now = self.named(3, **{of: ("n1[1]",), "failed": ("n2[1]",)})
        assert last_call_seconds(self.RULES, now) == 30.0
        assert last_call_seconds(replace(self.RULES, replacement_timeout=2.0), now) == 2.0
        assert last_call_seconds(replace(self.RULES, replacement_timeout=0.0), now) == 0.0

    @pytest.mark.parametrize("given", ["last_call_timeout", "replacement_timeout"])
    def test_one_waits_for_less_time_than_the_joins_of_those_that_wait(self, given: str) -> None:
        """Otherwise all of them would fail, and with them a job that has enough nodes."""
        options = parse_options(Settings, {"join_timeout": "100", given: "100"}, {})
        now = self.named(3, lost=("n1[1]",))
        assert last_call_seconds(rules_of(options, 2, 3), now) == 80.0

    def test_one_waits_no_longer_once_each_is_replaced(self) -> None:
        """Such as by an agent that its supervisor started again before the lease was over."""
        now = replace(self.named(3, lost=("n1[1]",), left=("n2[1]",)), previous=("n3", "n4"))
        assert last_call_seconds(self.RULES, now, 3) == 30.0
        assert last_call_seconds(self.RULES, now, 4) == 0.0

    def test_it_runs_while_the_round_trains(self) -> None:
        one, two = (leads(newcomers) for newcomers in (1, 2))
        held = why_not_grow(one, assess(one, NOW), permitted=False)
        assert held is not None
        assert held.seconds == 5.0
        assert why_not_grow(two, assess(two, NOW), permitted=False) is None


@pytest.mark.rule("no progress")
class TestProgress:
    CAUSE = Cause(failed=Names(("n2[1]",)))

    def after(self, cause: Cause, uptime: float, short: int = 1) -> int:
        here = leads(no_progress_rounds=3, no_progress_uptime=60.0, longest_uptime=uptime)
        now = replace(NOW, short_rounds=short)
        after = next_round(here, now, (), 0, cause)
        return noted(here, assess(here, now), after).short_rounds

    def test_short_rounds_are_counted(self) -> None:
        assert self.after(self.CAUSE, 59.0) == 2

    def test_a_long_one_ends_the_count(self) -> None:
        assert self.after(self.CAUSE, 60.0) == 0
        assert self.after(self.CAUSE, math.inf) == 0

    def test_a_round_that_ended_for_newcomers_does_not_count(self) -> None:
        assert self.after(Cause(joined=Names(("n3[1]",))), 1.0) == 1
        assert self.after(Cause(joined=Names(("n3[1]",))), 60.0) == 0

    @pytest.mark.parametrize(
        ("most", "said"),
        [
            (1, "a round ran for less than 60 s, it"),
            (3, "3 rounds in a row ran for less than 60 s, the last one"),
        ],
    )
    def test_at_the_limit_the_run_is_closed(self, most: int, said: str) -> None:
        now = document(Phase.FORMING, max_nodes=4, short_rounds=most, cause=self.CAUSE)
        action = decide(leads(now=now, no_progress_rounds=most, no_progress_uptime=60.0))
        assert isinstance(action, Close)
        assert action.outcome is Outcome.NO_PROGRESS
        assert action.why == (
            f"no progress: {said} ended so: n2[1] joined again (its workers failed)"
        )


@pytest.mark.rule("growth")
class TestNodes:
    def test_a_newcomer_that_comes_early_waits_as_a_spare(self) -> None:
        """Not for join_timeout only: it may take hours."""
        crowd = Crowd()
        each = Rules(
            min_nodes=1,
            max_nodes=3,
            lease=3.0,
            interval=1.0,
            last_call_timeout=0.0,
            min_uptime=500.0,
        )
        (first,) = crowd.begin(each, "n1")
        second = crowd.join("n2", each)
        crowd.play(200.0)
        assert second.node.record.status is Status.SPARE
        assert (len(first.given), second.given) == (1, [])
        assert any("lets newcomers in later" in line for line in second.told + second.said)
        took = crowd.play_until(lambda: bool(second.given), 400.0)
        assert 290.0 < took < 310.0
        assert len(first.given) == 2

    def test_workers_name_the_moment(self) -> None:
        crowd = Crowd()
        each = Rules(
            min_nodes=1,
            max_nodes=3,
            lease=3.0,
            interval=1.0,
            last_call_timeout=0.0,
            grow="checkpoint",
        )
        (first,) = crowd.begin(each, "n1")
        first.node.inbox.note_saved()
        crowd.play(5.0)
        second = crowd.join("n2", each)
        crowd.play(60.0)
        assert second.given == []  # That moment was another.
        first.node.inbox.note_saved()
        crowd.play_until(lambda: bool(second.given), 3.0)

    def test_a_scale_up_does_not_stop_workers_for_a_last_call(self) -> None:
        crowd = Crowd()
        each = Rules(min_nodes=1, max_nodes=4, lease=3.0, interval=1.0, last_call_timeout=30.0)
        first = crowd.join("n1", each)
        crowd.play_until(lambda: bool(first.given), 40.0)
        second = crowd.join("n2", each)
        crowd.play(10.0)
        third = crowd.join("n3", each)
        crowd.play(15.0)
        assert first.node.num_nodes_waiting == 0
        crowd.play_until(lambda: first.node.num_nodes_waiting > 0 or first.joining, 10.0)
        took = crowd.play_until(lambda: bool(second.given and third.given), 5.0)
        assert took < 1.0
        assert len(first.given) == 2
