"""The rules of the registers, one message at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rdzv_plugins.register.member import ACCEPT_SECONDS, STATUS_SECONDS, Member
from rdzv_plugins.register.messages import (
    NEVER,
    Accept,
    Accepted,
    Agreed,
    Answer,
    Ballot,
    Copy,
    Found,
    Held,
    Prepare,
    Promised,
    Propose,
    Read,
    Refused,
    Request,
)
from rdzv_plugins.register.proposer import Changing, Outcome, Proposer, Rivals


class Site:
    """Members whose messages all arrive at once, except to and from those that are ``away``."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.size = size
        self.away: set[int] = set()
        self.members = [self.new(index, 1) for index in range(size)]
        self.run(4 * ACCEPT_SECONDS)

    def new(self, index: int, incarnation: int) -> Member:
        return Member(index, self.size, incarnation, self.now, random.Random(index))

    def restart(self, index: int) -> Member:
        self.members[index] = self.new(index, self.members[index].acceptor.incarnation + 1)
        return self.members[index]

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.05
            for index, member in enumerate(self.members):
                if index not in self.away:
                    self.deliver(index, member.tick(self.now))

    def deliver(self, sender: int, sent: list[tuple[int, Any]]) -> None:
        for to, message in sent:
            if not self.away & {sender, to}:
                self.deliver(to, self.members[to].hear(sender, message, self.now))

    def ask(self, index: int, request: Request) -> Answer:
        return self.members[index].answer(request, self.now)

    def prepare(self, ballot: int, *members: int) -> dict[int, int]:
        """The incarnations of these members, which all promise."""
        request = Prepare(self.generation, "key", (ballot, 1))
        answers = {member: self.ask(member, request) for member in members}
        return {it: one.incarnation for it, one in answers.items() if isinstance(one, Promised)}

    def accept(self, ballot: int, quorum: dict[int, int], index: int) -> Answer:
        held = Held((ballot, 1), b"%d" % ballot)
        return self.ask(index, Accept(self.generation, "key", held, quorum))

    def held(self, index: int) -> Ballot:
        found = self.ask(index, Read(self.members[index].generation, ["key"]))
        assert isinstance(found, Found)
        return found.held.get("key", Held()).accepted

    @property
    def generation(self) -> Any:
        return max(it.generation for it in self.members)


@pytest.fixture
def site() -> Site:
    site = Site(3)
    assert all(it.takes_part for it in site.members)
    return site


def test_a_member_accepts_nothing_below_its_promise(site: Site) -> None:
    quorum = site.prepare(10, 0, 1)
    site.prepare(20, 1, 2)
    assert isinstance(site.accept(10, quorum, 0), Accepted)
    assert site.accept(10, quorum, 1) == Refused(site.generation, (20, 1))


def test_a_member_accepts_only_what_it_has_promised_to(site: Site) -> None:
    quorum = site.prepare(10, 0, 1)
    site.prepare(5, 2)
    assert isinstance(site.accept(10, quorum, 2), Refused)


def test_a_member_accepts_nothing_for_its_earlier_life(site: Site) -> None:
    quorum = site.prepare(10, 0, 1)
    site.restart(0)
    site.run(1)
    assert site.members[0].takes_part
    assert isinstance(site.accept(10, quorum, 0), Refused)


def test_nobody_accepts_what_rests_on_a_promise_that_was_forgotten(site: Site) -> None:
    """The member that forgot has copied the others, and does not know of this value."""
    quorum = site.prepare(10, 0, 1)
    assert isinstance(site.accept(10, quorum, 0), Accepted)
    site.restart(0)
    site.run(1)
    assert site.held(0) == NEVER
    assert isinstance(site.accept(10, quorum, 1), Refused)


def test_a_new_member_keeps_the_promises_of_those_it_copies(site: Site) -> None:
    site.prepare(20, 1)
    site.restart(0)
    site.run(1)
    assert site.prepare(10, 0) == {}


def test_a_new_member_waits_for_a_majority_of_the_others(site: Site) -> None:
    quorum = site.prepare(10, 0, 1)
    site.accept(10, quorum, 0)
    site.accept(10, quorum, 1)
    site.away = {1}
    new = site.restart(2)
    # Before the silence of the one that is away shows, nobody agrees to another generation.
    site.run(STATUS_SECONDS)
    assert not new.takes_part
    site.away = set()
    site.run(1)
    assert new.takes_part
    assert site.held(2) == (10, 1)


def test_where_too_few_remember_a_new_generation_begins_with_what_is_known(site: Site) -> None:
    quorum, before = site.prepare(10, 0, 1), site.generation
    site.accept(10, quorum, 0)
    site.accept(10, quorum, 1)
    site.away = {1}
    site.restart(2)
    site.run(4)
    assert site.members[0].generation == site.members[2].generation > before
    assert site.held(2) == (10, 1)
    # The member that comes back finds a majority at work, and discards its own memory.
    site.away = set()
    site.run(4)
    assert {it.generation for it in site.members} == {site.generation}
    assert all(it.takes_part for it in site.members)


def test_two_members_that_work_in_different_generations_agree_on_a_new_one(site: Site) -> None:
    """One was away while the others began a generation; then one of these ends."""
    site.away = {0}
    site.restart(1)
    site.run(4)
    assert site.members[1].generation > site.members[0].generation
    site.away = {2}
    site.run(2)
    assert site.members[0].generation == site.members[1].generation
    assert site.members[0].up(site.now) == {0, 1}


def test_a_generation_that_all_have_forgotten_never_comes_back(site: Site) -> None:
    """Else a late message of the old one counts in the new one."""
    before = site.generation
    site.members = [
        Member(index, site.size, 1, site.now, random.Random(9 + index))
        for index in range(site.size)
    ]
    site.run(4 * ACCEPT_SECONDS)
    assert all(it.takes_part for it in site.members)
    assert site.generation != before


def test_a_member_that_reaches_a_majority_refuses_another_generation(site: Site) -> None:
    later = site.generation[0] + 100, 2
    assert site.members[0].hear(2, Propose(1, later), site.now) == []
    assert site.members[0].takes_part


def test_a_member_that_has_agreed_takes_no_more_part(site: Site) -> None:
    site.away = {1, 2}
    site.run(2)
    later = site.generation[0] + 100, 2
    ((to, agreed),) = site.members[0].hear(2, Propose(1, later), site.now)
    assert to == 2
    assert isinstance(agreed, Agreed)
    assert site.ask(0, Read(site.generation, ["key"])) == Refused(NEVER)


def test_a_new_member_agrees_to_no_generation_at_once(site: Site) -> None:
    """Until then a writer may count an acceptance of its earlier life."""
    later = site.generation[0] + 100, 2
    new = site.restart(0)
    assert new.hear(2, Propose(1, later), site.now) == []
    assert new.hear(2, Propose(1, later), site.now + ACCEPT_SECONDS) != []


def test_a_member_whose_clock_was_set_back_takes_a_later_incarnation(site: Site) -> None:
    for _ in range(3):
        site.restart(0)
        site.run(1)
    site.members[0] = site.new(0, 1)
    site.run(1)
    assert site.members[0].takes_part
    assert site.members[0].acceptor.incarnation > 4


def test_a_register_that_is_empty_everywhere_is_forgotten(site: Site) -> None:
    quorum = site.prepare(20, 0, 1, 2)
    for member in quorum:
        site.ask(member, Accept(site.generation, "key", Held((20, 1), None), quorum))
    site.run(15)
    assert {site.held(member) for member in range(3)} == {NEVER}
    # What comes late is refused.
    assert site.prepare(15, 0, 1, 2) == {}


@pytest.mark.parametrize("told", [True, False])
def test_nothing_late_brings_a_forgotten_register_back(site: Site, told: bool) -> None:
    """A client stands still before its message to the third member."""
    first = (0, 1) if told else (0,)
    quorum = site.prepare(10, *first)
    if told:
        assert all(isinstance(site.accept(10, quorum, it), Accepted) for it in quorum)
    empties = site.prepare(20, 0, 1, 2) if told else site.prepare(20, 0, 1)
    for member in empties:
        site.ask(member, Accept(site.generation, "key", Held((20, 1), None), empties))
    site.run(15)
    assert {site.held(member) for member in range(3)} == {NEVER}
    if told:
        # Somebody has looked at the register since.
        assert len(site.prepare(30, 0, 1, 2)) == 3
        site.accept(10, {}, 2)
    else:
        assert site.prepare(10, 2) == {}
        site.accept(10, quorum | {2: 1}, 2)
    assert site.held(2) == NEVER


def test_a_register_that_one_member_still_holds_is_not_forgotten(site: Site) -> None:
    assert isinstance(site.accept(10, site.prepare(10, 2), 2), Accepted)
    quorum = site.prepare(20, 0, 1)
    for member in quorum:
        site.ask(member, Accept(site.generation, "key", Held((20, 1), None), quorum))
    site.run(15)
    assert [site.held(member) for member in range(3)] == [(20, 1), (20, 1), (10, 1)]


def test_a_full_member_says_so() -> None:
    site = Site(1)
    site.members[0].acceptor._left = 450
    quorum = site.prepare(10, 0)
    large = Accept(site.generation, "key", Held((10, 1), b"x" * 100), quorum)
    assert site.ask(0, large) == Refused(site.generation, full=True)


def test_a_register_that_was_only_asked_for_is_forgotten(site: Site) -> None:
    left = [it.acceptor._left for it in site.members]
    assert len(site.prepare(10, 0, 1, 2)) == 3
    site.run(15)
    assert [it.acceptor._left for it in site.members] == left
    # Its promise counts still.
    assert site.prepare(10, 0, 1, 2) == {}


def test_one_full_member_is_passed_over(site: Site) -> None:
    for full, outcome in (({2}, Outcome.DONE), ({1, 2}, Outcome.FULL)):
        for index in full:
            site.members[index].acceptor._left = 10
        proposer = Proposer(3, random.Random(1))
        proposer.note(0, Refused(site.generation))
        attempt = Changing(proposer, f"key {len(full)}", lambda _: b"value")
        sent = attempt.begin()[::-1]
        while sent and attempt.outcome is None:
            member, request = sent.pop(0)
            sent += attempt.hear(member, site.ask(member, request), site.now)
        assert attempt.outcome is outcome


def test_an_answer_to_an_earlier_life_is_no_copy(site: Site) -> None:
    site.away = {2}
    new = site.restart(2)
    old = site.members[0].hear(2, Copy(new.acceptor.incarnation - 1), site.now)
    for _, message in old:
        new.hear(0, message, site.now)
        new.hear(1, message, site.now)
    assert not new.takes_part


def test_a_client_whose_value_may_be_accepted_waits_for_what_follows_it() -> None:
    """A majority may hold that value yet, as long as it holds an earlier one."""
    proposer = Proposer(3, random.Random(1))
    attempt = Changing(proposer, "key", lambda value: b"new" if value == b"old" else value)
    for member in (0, 1):
        attempt.hear(member, Promised(1, Held((1, 1), b"old")), 0.0)
    assert attempt.is_doubtful
    rivals = Rivals(lambda value: b"new" if value == b"old" else value)
    rivals.note(attempt)
    number, bits = attempt.ballot
    assert not rivals.leave_nothing(Held((number, bits - 1), b"other"))
    assert rivals.leave_nothing(Held((number, bits + 1), b"other"))
