"""Accusations of having ended: nodes that have are lost at once, and nodes that live never."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rdzv_plugins.observe.history import Archive
from rdzv_plugins.process.driver import carry_out
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord, Phase, RoundDocument
from rdzv_plugins.protocol.orders import accuse
from rdzv_plugins.protocol.rules import Rules
from tests import replace

from .crowd import Crowd, Member

pytestmark = pytest.mark.rule("accusations")

RULES = Rules(
    min_nodes=2, max_nodes=4, lease=15.0, interval=5.0, last_call_timeout=0.2, answer_timeout=0.5
)
NAMES = ("n1", "n2", "n3", "n4")


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def begin(crowd: Crowd, rules: Rules = RULES, names: tuple[str, ...] = NAMES) -> list[Member]:
    members = crowd.begin(rules, *names)
    crowd.play(1.0)
    return members


def dies(crowd: Crowd, *members: Member) -> None:
    """The links of the others tell them, and their dials are refused."""
    for member in members:
        member.crash()
    for other in crowd.members.values():
        for member in members:
            if other.alive and member.node.id in other.links:
                other.node.neighbours.report_dead(member.node.id)


def document(crowd: Crowd) -> RoundDocument:
    stored = crowd.stored
    assert stored is not None
    return stored


def record(crowd: Crowd, name: str) -> NodeRecord:
    entry = crowd.members[name].client.get(NODES_PREFIX + name)
    assert entry is not None
    return NodeRecord.decode(entry.value)


def runs_without(crowd: Crowd, *names: str) -> bool:
    now = document(crowd)
    return now.phase is Phase.RUNNING and not {*names} & {*now.participants} and now.round > 0


def test_neighbours_have_links_to_each_other(crowd: Crowd) -> None:
    begin(crowd)
    assert [[*crowd.members[it].links] for it in NAMES] == [
        ["n2", "n4"], ["n3", "n1"], ["n4", "n2"], ["n1", "n3"]
    ]  # fmt: skip


def test_in_a_round_of_shards_to_those_of_its_own_and_the_first_ones_to_the_leader(
    crowd: Crowd,
) -> None:
    begin(crowd, replace(RULES, max_nodes=6, inline=2), ("n1", "n2", "n3", "n4", "n5", "n6"))
    found = {name: [*member.links] for name, member in crowd.members.items()}
    assert all(name not in links for name, links in found.items())
    # Both ends hold each link, so that both notice its loss.
    assert all(name in found[node] for name, links in found.items() for node in links)
    leader = document(crowd).leader
    assert all(len(links) <= 3 for name, links in found.items() if name != leader)
    # All of them hear of each other.
    met, to_meet = {"n1"}, ["n1"]
    for name in to_meet:
        others = {*found[name], *(it for it in found if name in found[it])}
        to_meet += others - met
        met |= others
    assert met == {*NAMES, "n5", "n6"}


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_node_is_lost_at_once(crowd: Crowd, name: str) -> None:
    begin(crowd)
    dies(crowd, crowd.members[name])
    crowd.play_until(lambda: runs_without(crowd, name), 2.0)
    reason = document(crowd).reason
    assert reason.startswith(f"lost {name}[1]: its process is gone, as n"), reason
    # Its record, which has asked for no round, keeps nobody waiting either.
    settled = document(crowd).round
    crowd.play(40.0)
    assert document(crowd).round == settled


@pytest.mark.parametrize("links", [True, False], ids=["links", "lease"])
@pytest.mark.parametrize("name", NAMES)
def test_the_phases_of_a_restart_are_the_time_since_the_kill(
    crowd: Crowd, name: str, links: bool
) -> None:
    begin(crowd)
    member = crowd.members[name]
    if links:
        dies(crowd, member)
    else:
        member.crash()
    took = crowd.play_until(lambda: runs_without(crowd, name), 30.0)
    crowd.play(0.1)
    first, second = member.archive.rows()
    assert first.seconds is not None
    assert second.seconds is not None
    assert first.seconds.noticed == 0
    phases = second.seconds.phases
    assert (second.round, [*phases]) == (1, ["noticed", "stopped", "last_call", "formed"])
    assert 0.05 < phases["stopped"] < 0.3  # An agent stops its workers in 0.1 s.
    assert phases["last_call"] == pytest.approx(RULES.last_call_timeout, abs=0.05)
    # A lost node may have beaten up to an interval before it was killed.
    earlier = 0.0 if links else RULES.interval
    assert took - 0.1 < sum(phases.values()) < took + earlier + 0.1


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_node_killed_before_it_confirms_its_rank_is_lost_at_once(crowd: Crowd, name: str) -> None:
    for each in NAMES:
        crowd.join(each, RULES)
        crowd.play(0.001)
        if each == name:
            crowd.members[each].crash()
    crowd.play(2.0)
    assert document(crowd).phase is Phase.CONFIRMING
    dies(crowd, crowd.members[name])
    crowd.play_until(lambda: runs_without(crowd, name), 2.0)
    assert document(crowd).reason.startswith(f"lost {name}[1]: its process is gone, as n")


@pytest.mark.parametrize("gone", [("n1", "n2"), ("n2", "n3"), ("n1", "n4")])
def test_two_at_once(crowd: Crowd, gone: tuple[str, ...]) -> None:
    begin(crowd)
    dies(crowd, *(crowd.members[name] for name in gone))
    took = crowd.play_until(lambda: runs_without(crowd, *gone), 3.0)
    assert took < 3.0


def test_a_node_that_walks_past_gone_nodes_finds_those_behind(crowd: Crowd) -> None:
    names = tuple(f"n{number}" for number in range(1, 10))
    begin(crowd, replace(RULES, max_nodes=9), names)
    gone = ("n4", "n5", "n6")
    dies(crowd, *(crowd.members[name] for name in gone))
    crowd.play(0.05)
    assert all("n5" in crowd.members[it].links for it in ("n3", "n7"))
    crowd.members["n3"].node.neighbours.report_dead("n5")
    crowd.play_until(lambda: runs_without(crowd, *gone), 3.0)


@pytest.mark.parametrize("name", NAMES)
def test_an_accused_node_that_lives_answers_and_stays(crowd: Crowd, name: str) -> None:
    """A proxy refuses for it."""
    begin(crowd)
    before = record(crowd, name).beat
    for other in crowd.members.values():
        if name in other.links:
            other.node.neighbours.report_dead(name)
    crowd.play(0.2)
    assert record(crowd, name).beat > before
    crowd.play(40.0)
    assert (document(crowd).round, document(crowd).phase) == (0, Phase.RUNNING)
    assert all(len(member.given) == 1 for member in crowd.members.values())


def test_a_node_that_awaits_rank_0_in_a_network_check_has_time_to_answer(crowd: Crowd) -> None:
    members = begin(crowd, replace(RULES, network_check=True), ("n2", "n1", "n3", "n4"))
    for member in members:
        member.master = None
    members[0].ask()
    crowd.play(1.5)
    assert (document(crowd).leader, document(crowd).participants) == ("n2", NAMES)
    accuser, before = crowd.members["n4"].node.neighbours, record(crowd, "n3").beat
    accuser.report_dead("n3")
    crowd.play(4.0)
    assert record(crowd, "n3").beat > before
    assert (document(crowd).round, document(crowd).phase) == (1, Phase.CONFIRMING)
    # And one that is killed is lost sooner than by its lease still.
    crowd.members["n3"].crash()
    accuser.report_dead("n3")
    crowd.play_until(lambda: "n3" not in document(crowd).participants, 4.0)


@pytest.mark.parametrize("name", NAMES)
def test_one_for_whom_alone_the_store_is_far_has_time_to_answer(crowd: Crowd, name: str) -> None:
    """It says so in its record: to whoever judges it the store is near."""
    begin(crowd)
    crowd.members[name].slow = lambda request: 0.6
    crowd.play(3 * RULES.interval)
    assert 600 <= record(crowd, name).slow < 700
    for other in crowd.members.values():
        if name in other.links:
            other.node.neighbours.report_dead(name)
    crowd.play(40.0)
    assert (document(crowd).round, document(crowd).phase) == (0, Phase.RUNNING)
    # And one that is killed is lost sooner than by its lease still.
    dies(crowd, crowd.members[name])
    crowd.play_until(lambda: runs_without(crowd, name), 6.0)


@pytest.mark.parametrize("name", NAMES)
def test_after_an_outage_of_a_moment_some_answer_later(crowd: Crowd, name: str) -> None:
    """All pause between two attempts, each for a time of its own."""
    begin(crowd)
    late, back = crowd.members[name], crowd.time.now + 1.0
    late.slow = lambda request: max(0.001, back - late.since)
    for other in crowd.members.values():
        if name in other.links:
            other.node.neighbours.report_dead(name)
    crowd.play(0.1)
    for other in crowd.members.values():
        other.node.note_retry()
    crowd.play(40.0)
    assert (document(crowd).round, document(crowd).phase) == (0, Phase.RUNNING)


def away(crowd: Crowd, seconds: float, midway: Callable[[], None] = lambda: None) -> None:
    """The store is, for all: their requests and waits fail, and they try again."""
    for member in crowd.members.values():
        member.down = True
    crowd.play(seconds / 2)
    midway()
    crowd.play(seconds / 2)
    for member in crowd.members.values():
        member.down = False


@pytest.mark.parametrize("seconds", [3.0, 8.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_node_killed_in_an_outage_is_lost_soon_after_it(
    crowd: Crowd, name: str, seconds: float
) -> None:
    """However long it was, and though the others beat late by as much."""
    begin(crowd)
    away(crowd, seconds, lambda: dies(crowd, crowd.members[name]))
    crowd.play_until(lambda: runs_without(crowd, name), 3.0)
    assert "its process is gone" in document(crowd).reason


@pytest.mark.parametrize("name", NAMES)
def test_an_accused_node_that_is_back_last_from_an_outage_is_not_lost(
    crowd: Crowd, name: str
) -> None:
    begin(crowd)
    for other in crowd.members.values():
        if name in other.links:
            other.node.neighbours.report_dead(name)
    away(crowd, 8.0)
    crowd.members[name].down = True
    crowd.play(0.9)
    crowd.members[name].down = False
    crowd.play(40.0)
    assert (document(crowd).round, document(crowd).phase) == (0, Phase.RUNNING)


def test_an_answer_that_is_lost_is_repeated_in_time(crowd: Crowd) -> None:
    begin(crowd)
    before = record(crowd, "n3").beat
    crowd.members["n2"].node.neighbours.report_dead("n3")
    crowd.play_until(lambda: record(crowd, "n3").beat >= before + 3, RULES.answer_timeout or 0.0)


def test_a_node_that_all_accuse_answers_all(crowd: Crowd) -> None:
    """A mesh restarts."""
    begin(crowd)
    for _ in range(5):
        for other in crowd.members.values():
            for node in other.links:
                other.node.neighbours.report_dead(node)
        crowd.play(1.0)
        for other in crowd.members.values():
            for node in other.links:
                other.node.neighbours.report_alive(node)
        crowd.play(7.0)
    assert (document(crowd).round, document(crowd).phase) == (0, Phase.RUNNING)
    assert all(not record(crowd, name).accuses for name in NAMES)


def test_a_silent_node_that_nobody_accuses_is_lost_only_after_its_lease(crowd: Crowd) -> None:
    begin(crowd)
    crowd.members["n2"].crash()
    crowd.play(10.0)
    assert document(crowd).round == 0
    crowd.play_until(lambda: runs_without(crowd, "n2"), 15.0)
    assert document(crowd).reason.startswith("lost n2[1]: lease ran out")


def asks(crowd: Crowd, *names: str) -> None:
    """A person does."""
    client = crowd.members[NAMES[0]].client
    work = accuse("rdzv", names)
    carry_out(client, Archive(lambda _: client, "run", 0), work, tell=lambda _: None)


@pytest.mark.parametrize("links", [True, False])
def test_whom_a_person_accuses_answers_at_once(crowd: Crowd, links: bool) -> None:
    begin(crowd, RULES if links else replace(RULES, answer_timeout=None))
    before = {name: record(crowd, name).beat for name in NAMES}
    asks(crowd, *NAMES)
    crowd.play(0.05)
    assert all(record(crowd, name).beat > before[name] for name in NAMES)
    crowd.play(40.0)
    assert (document(crowd).round, document(crowd).phase) == (0, Phase.RUNNING)


def test_no_person_has_anybody_lost_who_does_not_answer(crowd: Crowd) -> None:
    begin(crowd)
    crowd.members["n2"].crash()
    for _ in range(5):
        asks(crowd, "n2")
        crowd.play(2.0)
    assert document(crowd).round == 0
    crowd.play_until(lambda: runs_without(crowd, "n2"), 15.0)
    assert document(crowd).reason.startswith("lost n2[1]: lease ran out")


def test_one_without_links_is_asked_nothing(crowd: Crowd) -> None:
    """A node of an earlier version answers no accusation."""
    crowd.join("n1", RULES)
    crowd.play(0.01)
    old = crowd.join("n2", replace(RULES, answer_timeout=None))
    crowd.play(0.01)
    third = crowd.join("n3", RULES)
    crowd.play_until(lambda: bool(third.given), 30.0)
    crowd.play(1.0)
    assert "n2" not in third.links
    assert not old.links
    third.node.neighbours.report_dead("n2")
    crowd.play(40.0)
    assert document(crowd).round == 0


def test_a_node_that_leaves_is_not_accused(crowd: Crowd) -> None:
    begin(crowd)
    crowd.members["n3"].leave()
    crowd.members["n2"].node.neighbours.report_dead("n3")
    crowd.play_until(lambda: runs_without(crowd, "n3"), 3.0)
    assert document(crowd).reason == "n3[1] left"
    assert record(crowd, "n2").accuses == ()


def test_leases_decide_where_over_a_third_of_many_nodes_die(crowd: Crowd) -> None:
    names = tuple(f"n{number}" for number in range(1, 25))
    begin(crowd, replace(RULES, max_nodes=24), names)
    many, before = names[2:24:2], document(crowd).round
    dies(crowd, *(crowd.members[name] for name in many))
    crowd.play(5.0)
    # What refuses for so many at once may be the network.
    assert document(crowd).round == before
    crowd.play_until(lambda: runs_without(crowd, *many), 40.0)


def test_a_row_of_twelve_that_die_at_once_is_found_from_its_edge(crowd: Crowd) -> None:
    """A node with links to the first of them goes on to the next ones, past all that refuse."""
    names = tuple(f"n{number:02}" for number in range(40))
    begin(crowd, replace(RULES, max_nodes=40), names)
    gone = names[10:22]
    for name in gone:
        crowd.members[name].crash()
    told = set[tuple[str, str]]()
    began = crowd.time.now
    while not runs_without(crowd, *gone):
        for name, member in crowd.members.items():
            for other in {*member.links} & {*gone} if member.alive else ():
                if (name, other) not in told:
                    told.add((name, other))
                    member.node.neighbours.report_dead(other)
        crowd.play(0.05)
        assert crowd.time.now < began + 5.0
