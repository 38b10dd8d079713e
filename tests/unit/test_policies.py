"""The questions that policies answer, and the policy that docs/writing-a-policy.md writes."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rdzv_plugins.protocol import policies
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import Phase, Status
from rdzv_plugins.protocol.policies.policy import Policy, Stage
from rdzv_plugins.protocol.rules import Rules, SetRecord, View
from rdzv_plugins.protocol.situation import assess
from rdzv_plugins.protocol.words import of_node
from tests import replace

from .views import RULES, document, record, view, written

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-policy.md"


def asked(rules: Rules, **domains: str) -> View:
    """What the leader n1 knows of nodes that ask for a first round."""
    size: dict[str, Any] = {"min_nodes": rules.min_nodes, "max_nodes": rules.max_nodes}
    records = {name: record(name, domain=domain, **size) for name, domain in domains.items()}
    now = document(Phase.FORMING, 0, **size)
    return view(records["n1"], now, records, rules=rules)


class Settings(Rules):
    """Those of a run with the option of the page's policy."""

    per_domain = 2


@pytest.fixture
def at_most_two_of_a_domain() -> Any:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    module = types.ModuleType("per_domain")
    exec(source, module.__dict__)
    its = (module.PerDomain(), *policies.POLICIES)
    with patch.object(policies, "POLICIES", its):
        yield Settings(min_nodes=2, max_nodes=4, lease=3.0, interval=1.0, last_call_timeout=0.0)


class TestThePolicyOfThePage:
    def test_a_round_has_two_of_each_domain(self, at_most_two_of_a_domain: Rules) -> None:
        here = asked(at_most_two_of_a_domain, n1="r1", n2="r1", n3="r1", n4="r2")
        assert written(decide(here)).participants == ("n1", "n2", "n4")

    def test_a_node_that_is_not_admitted_counts_among_those_that_wait(
        self, at_most_two_of_a_domain: Rules
    ) -> None:
        here = asked(at_most_two_of_a_domain, n1="r1", n2="r1", n3="r1", n4="r2")
        assert written(decide(here)).waiters == 1

    def test_people_are_told_for_what_the_others_wait(self, at_most_two_of_a_domain: Rules) -> None:
        rules = replace(at_most_two_of_a_domain, last_call_timeout=9.0)
        here = asked(rules, n1="r1", n2="r1", n3="r1")
        assert "1 node waiting: a round has at most 2 nodes of a domain" in str(of_node(here))

    def test_a_node_that_comes_later_is_a_spare(self, at_most_two_of_a_domain: Rules) -> None:
        runs = document(Phase.RUNNING, max_nodes=4)
        late = record("n4", domain="r1", max_nodes=4)
        action = decide(view(late, runs, rules=at_most_two_of_a_domain))
        assert action == SetRecord(Status.SPARE, None, -1, ring=False)

    def test_survivors_come_first(self, at_most_two_of_a_domain: Rules) -> None:
        here = asked(at_most_two_of_a_domain, n1="r1", n2="r1", n3="r1", n4="r2")
        assert here.document is not None
        at = assess(here, replace(here.document, previous=("n3", "n2")))
        assert policies.not_admitted(at, {"n1", "n2", "n3", "n4"}).keys() == {"n1"}


class TestQuestions:
    def test_a_policy_without_an_opinion_changes_nothing(self) -> None:
        here = asked(RULES, n1="r1", n2="r1", n3="r1")
        assert here.document is not None
        at, nobody = assess(here, here.document), Policy()
        assert not nobody.keep_out(here.document, at.records, 0.0)
        assert not nobody.admit(at, at.ready)
        assert nobody.choose(at, ["n2", "n1"]) == ["n2", "n1"]
        assert nobody.hold(here, at) is None
        assert all(nobody.judge(here, at, stage) is None for stage in Stage)
        assert nobody.note(here, at, here.document) is here.document
        assert not nobody.delays(here, here.document)
        assert nobody.leave(here, here.document) is None

    def test_where_no_option_is_set_nobody_is_kept_out(self) -> None:
        """Nothing is made for it either: a leader of 10,000 nodes asks at each decision."""
        here = asked(RULES, n1="r1", n2="r1", n3="r1")
        assert here.document is not None
        at = assess(here, here.document)
        assert at.kept_out is at.not_admitted
        assert at.ready is at.asking

    def test_others_know_the_options_by_the_leaders_record(self) -> None:
        leader = record(
            "n1", run_options="node_unit=4,grow=checkpoint,segment=0x,min_uptime=5.0,x=1"
        )
        told = Rules.as_stored(document(Phase.FORMING), leader)
        assert (told.node_unit, told.segment) == (4, 1)
        assert (told.grow, told.min_uptime) == ("checkpoint", 5.0)
