"""Orders from people: what the commands write, and what the leader and the node make of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import pytest

from rdzv_plugins.kv import Entry, MemoryClient, MemoryServer, RendezvousConnectionError
from rdzv_plugins.observe.history import EXCLUDED as EXCLUDED_KEYS
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.process.driver import carry_out
from rdzv_plugins.protocol import effects, orders
from rdzv_plugins.protocol.cleanup import close_run
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    Accusation,
    Exclusion,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.orders import Given, accuse, drain, exclude, include, resize, restart
from rdzv_plugins.protocol.policies.kept_out import describe
from rdzv_plugins.protocol.remarks import remarks
from rdzv_plugins.protocol.rules import Action, Confirm, Fail, Failure, SetRecord, Start, Wait
from rdzv_plugins.protocol.words import of_node
from tests import replace

from .crowd import Crowd
from .life import NAMESPACE, Life, Time, archive, finish, stored
from .life import RULES as PAIR
from .views import RUN, all_running, diagnose, document, joining, record, running, view, written

T = TypeVar("T")

NOW = document(Phase.RUNNING)
FORMING = document(Phase.FORMING, round_=5, previous=("n1", "n2", "n3"))


def lead(now: RoundDocument, others: dict[str, NodeRecord], **more: Any) -> Action:
    everybody = (all_running(now) if now.participants else {}) | others
    me = everybody.get("n1") or record("n1")
    return decide(view(me, now, everybody, joining=False, **more))


@pytest.mark.rule("drain")
class TestTheLeader:
    def test_a_drained_participant_is_out_in_a_round_begun_now(self) -> None:
        after = written(lead(replace(NOW, drained=("n3",)), {}))
        assert (after.round, after.phase) == (5, Phase.FORMING)
        assert (after.previous, after.still_running) == (("n1", "n2"), ("n3",))
        assert after.reason == "drained n3[1]"

    def test_nobody_waits_for_a_drained_node_to_stop(self) -> None:
        forming = replace(FORMING, previous=("n1", "n2"), still_running=("n3",), drained=("n3",))
        others = joining("n1", "n2", round_=4) | {"n3": running("n3", NOW)}
        named = written(lead(forming, others, enough_for=5.0))
        assert named.participants == ("n1", "n2")
        assert named.still_running == ("n3",)

    def test_a_drained_node_is_in_no_later_round(self) -> None:
        forming = replace(FORMING, previous=("n1", "n2"), drained=("n3",))
        named = written(lead(forming, joining("n1", "n2", "n3", round_=4), enough_for=5.0))
        assert named.participants == ("n1", "n2")
        ran = document(Phase.RUNNING, participants=("n1", "n2"), drained=("n3",))
        others = all_running(ran) | joining("n3")
        assert isinstance(lead(ran, others), Wait)

    def test_a_node_drained_while_the_round_forms_is_left_out(self) -> None:
        forming = replace(FORMING, drained=("n3",))
        after = written(lead(forming, joining("n1", "n2", round_=4) | {"n3": running("n3", NOW)}))
        assert (after.round, after.previous, after.still_running) == (5, ("n1", "n2"), ("n3",))
        assert after.reason == "drained n3[1]"

    def test_a_node_drained_while_the_round_is_confirmed_ends_it(self) -> None:
        confirming = replace(document(Phase.CONFIRMING), drained=("n3",))
        after = written(lead(confirming, {}))
        assert (after.round, after.phase, after.previous) == (5, Phase.FORMING, ("n1", "n2"))

    def test_the_leader_itself(self) -> None:
        after = written(lead(replace(NOW, drained=("n1",)), {}))
        assert (after.leader, after.previous) == ("n1", ("n2", "n3"))

    def test_a_drained_node_that_is_lost_is_called_lost(self) -> None:
        after = written(lead(replace(NOW, drained=("n3",)), {}, silent={"n3": 3.0}))
        assert after.reason == "lost n3[1]: lease ran out"
        assert not after.still_running

    def test_a_node_that_is_done_is_not_drained(self) -> None:
        done = replace(running("n3", NOW), status=Status.DONE)
        assert isinstance(lead(replace(NOW, drained=("n3",)), {"n3": done}), Wait)

    def test_a_restart_begins_a_round_without_a_loss(self) -> None:
        why = "restarted by the command rdzv restart"
        after = written(lead(replace(NOW, restart=why), {}))
        assert (after.round, after.previous) == (5, ("n1", "n2", "n3"))
        assert (after.reason, after.restart) == (why, "")

    def test_what_a_node_has_done_is_not_started_again(self) -> None:
        done = replace(running("n3", NOW), status=Status.DONE)
        asked = replace(NOW, restart="restarted")
        assert written(lead(asked, {"n3": done})) == NOW

    def test_a_restart_does_not_hide_what_else_happens(self) -> None:
        after = written(lead(replace(NOW, restart="restarted"), {"n3": record("n3", Status.LEFT)}))
        assert after.reason == "n3[1] left; restarted"

    def test_the_oldest_that_have_ended_are_forgotten(self) -> None:
        many = tuple(f"d{n}" for n in range(70))
        forming = replace(FORMING, previous=("n1", "n2"), drained=many, still_running=("d1",))
        others = joining("n1", "n2", round_=4)
        others |= {"d0": record("d0", Status.LEFT), "d1": record("d1", Status.RUN, 4)}
        named = written(lead(forming, others, enough_for=5.0))
        assert named.drained == ("d1", *many[-64:])


@pytest.mark.rule("drain")
class TestTheNode:
    def test_a_drained_one_that_asks_for_a_round_ends(self) -> None:
        for now in (NOW, FORMING, document(Phase.FORMING)):
            drained = replace(now, drained=("n9",))
            assert decide(view(record("n9"), drained)) == Fail(Failure.DRAINED)

    def test_a_round_that_it_confirmed_is_started_first(self) -> None:
        # The other agents are released, and wait for this one's.
        after = replace(FORMING, ran=NOW.world_id, master=NOW.master, drained=("n2",))
        me = running("n2", NOW)
        seen = view(me, after, confirmed=document(Phase.CONFIRMING))
        assert isinstance(decide(seen), Start)

    def test_while_a_round_is_confirmed_it_leaves_the_end_of_that_to_the_leader(self) -> None:
        confirming = replace(document(Phase.CONFIRMING), drained=("n2",))
        assert isinstance(decide(view(record("n2", round_=3), confirming)), Confirm)
        assert isinstance(decide(view(running("n2", confirming), confirming)), Wait)

    def test_its_log_says_so(self) -> None:
        seen = view(running("n2", NOW), replace(NOW, drained=("n2",)), joining=False)
        assert [about for about, *_ in remarks(seen)] == ["drained"]
        assert not [*remarks(view(running("n3", NOW), replace(NOW, drained=("n2",))))]


BAD = Exclusion("n3", 100.0, "ECC errors")
EXCLUDED = replace(NOW, excluded=(BAD,))


@pytest.mark.rule("exclusions")
class TestExclusion:
    def test_a_participant_of_an_excluded_host_is_out_as_a_drained_one_is(self) -> None:
        after = written(lead(EXCLUDED, {}, wall=99.0))
        assert (after.previous, after.still_running) == (("n1", "n2"), ("n3",))
        assert after.reason == "excluded n3[1]: ECC errors"

    def test_an_excluded_node_is_let_in_again_when_the_exclusion_ends(self) -> None:
        ran = document(Phase.RUNNING, participants=("n1", "n2"), excluded=(BAD,))
        waits = record("n3", Status.SPARE)
        others = all_running(ran) | {"n3": waits}
        before = lead(ran, others, wall=98.5)
        assert before == Wait(1.5)
        after = written(lead(ran, others, wall=100.0))
        assert after.reason == "n3[1] joined"

    def test_one_without_an_end_holds_until_it_is_taken_back(self) -> None:
        endless = replace(EXCLUDED, excluded=(Exclusion("n3"),))
        assert written(lead(endless, {}, wall=1e12)).reason == "excluded n3[1]"

    def test_what_is_over_leaves_the_document_with_the_next_round(self) -> None:
        forming = replace(FORMING, previous=(), excluded=(BAD, Exclusion("n9", 200.0)))
        everybody = joining("n1", "n2", "n3", round_=4)
        assert written(lead(forming, everybody, wall=150.0)).excluded == (Exclusion("n9", 200.0),)

    def test_an_excluded_node_waits_as_a_spare_and_says_why(self) -> None:
        ran = document(Phase.RUNNING, participants=("n1", "n2"), excluded=(BAD,))
        seen = view(record("n3"), ran, leader=record("n1"), wall=60.0)
        assert decide(seen) == SetRecord(Status.SPARE, None, -1, ring=False)
        text = "n3 excluded until 00:01 UTC: ECC errors"
        assert [line for _, _, line, *_ in remarks(seen)] == [f"{text}; this node waits meanwhile"]
        assert str(of_node(seen)).endswith(f"; {text}")
        assert not [*remarks(replace(seen, wall=100.0))]

    def test_a_day_away_the_date_is_told(self) -> None:
        far = Exclusion("n3", 90_000.0)
        assert describe(far, 0.0) == "n3 excluded until 1970-01-02 01:00 UTC"
        assert describe(Exclusion("n3", 1e300, "why"), 0.0) == "n3 excluded: why"

    def test_the_sentence_of_the_run_names_two_and_counts_the_rest(self) -> None:
        many = tuple(Exclusion(f"n{n}") for n in range(4, 8))
        text = str(diagnose(replace(NOW, excluded=many), all_running(NOW)))
        assert text.endswith("n4 excluded; n5 excluded; 2 more kept out")

    def test_an_excluded_node_does_not_count_as_one_that_waits(self) -> None:
        ran = document(Phase.RUNNING, participants=("n1", "n2"), excluded=(Exclusion("n3"),))
        text = str(diagnose(ran, all_running(ran) | joining("n3")))
        assert "waiting" not in text

    def test_what_is_written_back_keeps_the_orders_of_what_stands(self) -> None:
        stands = replace(FORMING, drained=("n9",), excluded=(BAD,), restart="why")
        later = replace(NOW, round=6, drained=("n8",), excluded=(Exclusion("n3"), Exclusion("n7")))
        seen = view(running("n1", NOW), stands, latest=later, without_tombstone=frozenset({RUN}))
        back = written(decide(seen))
        assert back.drained == ("n8", "n9")
        assert back.excluded == (BAD, Exclusion("n7"))
        assert back.restart == "why"


@pytest.mark.rule("exclusions")
class TestTheFirstRound:
    def test_a_founder_keeps_out_the_nodes_that_earlier_runs_excluded(self) -> None:
        server, time = MemoryServer(), Time()
        archive(server).exclude(Exclusion("n2", time.now + 60.0), time.now)
        rules = replace(PAIR, min_nodes=1, max_nodes=2)
        founder, other = (Life(name, server, time, rules) for name in ("n1", "n2"))
        founder.go()
        other.go()
        founder.wake()  # Nobody has rung for some milliseconds.
        assert stored(founder).participants == ("n1",)
        assert [it.host for it in stored(founder).excluded] == ["n2"]
        time.now += 60.0
        founder.wake()
        assert stored(founder).phase is Phase.FORMING
        assert stored(founder).reason == "n2[1] joined"

    def test_a_round_that_forms_at_once_does_not_wait_for_it(self) -> None:
        """A node that should not be in it is taken out as soon as its leader has time."""
        crowd = Crowd()
        archive(crowd.server).exclude(Exclusion("n2"), 0.0)
        one, two = (crowd.join(name, PAIR) for name in ("n1", "n2"))
        crowd.play_until(lambda: bool(one.given and two.given), 0.04)
        crowd.play_until(lambda: crowd.document.round == 1, 3 * PAIR.interval)
        assert [it.host for it in crowd.document.excluded] == ["n2"]
        assert crowd.document.reason == "excluded n2[1]"

    def test_an_exclusion_that_a_person_ends_stays_ended_under_the_next_leader(self) -> None:
        crowd, kept_out = Crowd(), (Exclusion("n1"),)
        first, *_ = crowd.begin(replace(PAIR, max_nodes=3), "n1", "n2", "n3")
        archive(crowd.server).exclude(*kept_out, 0.0)
        crowd.write(excluded=kept_out)
        crowd.play_until(lambda: crowd.document.participants == ("n2", "n3"), 3 * PAIR.interval)
        assert crowd.document.leader == "n1"
        first.leave()
        crowd.play(3 * PAIR.interval)
        archive(crowd.server).include(["n1"], 0.0)
        crowd.write(excluded=())
        crowd.play(3 * PAIR.interval)
        assert crowd.document.leader != "n1"
        assert crowd.document.excluded == ()

    def test_what_cannot_be_read_for_a_lease_is_done_without(self) -> None:
        server, time = MemoryServer(), Time()
        life = Life(
            "n1", server, time, replace(PAIR, min_nodes=1, max_nodes=2, last_call_timeout=0.5)
        )
        life.fails = lambda request: isinstance(request, effects.ReadExclusions)
        life.go()
        began, asked = time.now, 0
        while not life.told:
            asked += life.wake().count("ReadExclusions")
        assert stored(life).phase is Phase.RUNNING, "no round waits for it"
        assert PAIR.lease <= time.now - began <= PAIR.lease + 2 * PAIR.interval
        assert asked <= PAIR.lease / PAIR.interval + 2
        (line,) = life.told
        assert line.startswith("this node cannot read which hosts are excluded")


class Interrupted(Archive):
    """Another command runs between this one's look at all exclusions and the deadline it sets."""

    def __init__(self, server: MemoryServer, other: Callable[[], None]) -> None:
        others = [other]

        class Client(MemoryClient):
            def expire(self, seconds: float) -> None:
                if others:
                    others.pop()()
                super().expire(seconds)

        super().__init__(partial(Client, server), NAMESPACE, history_ttl=3600.0)


@pytest.mark.rule("exclusions")
class TestTheArchive:
    def test_the_next_run_of_the_id_finds_it_and_no_other(self) -> None:
        server = MemoryServer()
        archive(server).exclude(BAD, 0.0)
        other = Archive(partial(MemoryClient, server), "other", 60.0)
        assert archive(server).exclusions(0.0) == (BAD,)
        assert other.exclusions(0.0) == ()
        other.exclude(Exclusion("n5"), 0.0, all_runs=True)
        assert archive(server).exclusions(0.0) == (Exclusion("n5"), BAD)
        assert archive(server).exclusions(0.0, True) == (Exclusion("n5"),)

    def test_an_exclusion_ends(self) -> None:
        kept = archive(MemoryServer())
        kept.exclude(BAD, 0.0)
        assert kept.exclusions(100.0) == ()

    def test_the_last_of_a_host_counts(self) -> None:
        kept = archive(MemoryServer())
        kept.exclude(BAD, 0.0, all_runs=True)
        kept.exclude(Exclusion("n3", 200.0), 0.0)
        assert kept.exclusions(0.0) == (Exclusion("n3", 200.0),)
        kept.exclude(Exclusion("n3", 300.0), 0.0)
        assert kept.exclusions(0.0) == (Exclusion("n3", 300.0),)

    def test_an_exclusion_is_taken_back(self) -> None:
        server = MemoryServer()
        kept = archive(server)
        kept.exclude(BAD, 0.0)
        assert not kept.include(["n4"], 0.0)
        assert kept.include(["n3"], 0.0)
        assert kept.exclusions(0.0) == ()
        assert 0 < server.deadlines[EXCLUDED_KEYS] - monotonic() <= 60, "nothing is left then"

    def test_two_commands_at_once_lose_nothing(self) -> None:
        """The other one comes where this one looks for how long all must be kept."""
        server = MemoryServer()
        other = archive(server)
        kept = Interrupted(server, lambda: other.exclude(Exclusion("n4", 9000.0), 0.0))
        kept.exclude(BAD, 0.0)
        assert {it.host for it in kept.exclusions(0.0)} == {"n3", "n4"}
        assert server.deadlines[EXCLUDED_KEYS] - monotonic() > 8000

    def test_what_another_version_wrote_excludes_nobody(self) -> None:
        server = MemoryServer()
        MemoryClient(server, EXCLUDED_KEYS).put(NAMESPACE, b"{}")
        assert archive(server).exclusions(0.0) == ()


class Commands:
    """The store of a run with n1 and n2 in a round, and n3 waiting."""

    def __init__(self, now: RoundDocument = NOW) -> None:
        self.server = MemoryServer()
        self.client = MemoryClient(self.server, NAMESPACE)
        self.client.put(STATE_KEY, now.encode())
        for name, it in {**all_running(NOW), "n4": record("n4")}.items():
            self.client.put(NODES_PREFIX + name, it.encode())

    def give(self, work: Generator[effects.Effect[Any], Any, T]) -> T:
        return carry_out(self.client, archive(self.server), work, tell=lambda _: None)

    @property
    def document(self) -> RoundDocument:
        entry = self.client.get(STATE_KEY)
        assert entry is not None
        return RoundDocument.decode(entry.value)


class TestTheCommands:
    @pytest.mark.parametrize("name", ["n2", "n2[1]"])
    def test_drain_writes_ids_and_rings(self, name: str) -> None:
        store = Commands()
        given = store.give(drain("rdzv", [name], lambda: 0.0))
        assert store.document == replace(NOW, drained=("n2",)) == given.document
        assert (given.nodes, given.remaining, given.size, given.stops) == (("n2[1]",), 3, 3, False)
        assert store.client.get(BELL_KEY) is not None

    def test_all_nodes_of_a_host(self) -> None:
        store = Commands()
        store.client.put(NODES_PREFIX + "n5", replace(record("n5"), address="n2", pid=7).encode())
        given = store.give(drain("rdzv", ["n2"], lambda: 0.0))
        # An id comes first: here n2 is the id of one and the address of both.
        assert set(store.document.drained) == {"n2", "n5"}
        assert given.nodes == ("n2[1]", "n2[7]")

    def test_a_node_that_has_left_goes_by_no_name(self) -> None:
        store = Commands()
        store.client.put(NODES_PREFIX + "n4", record("n4", Status.LEFT).encode())
        given = store.give(drain("rdzv", ["n2", "n4"], lambda: 0.0))
        assert given.unknown == ("n4",)
        assert store.document == NOW

    def test_a_participant_without_a_record_goes_by_its_id(self) -> None:
        store = Commands()
        store.client.delete(NODES_PREFIX + "n3")
        assert store.give(drain("rdzv", ["n3"], lambda: 0.0)).nodes == ("n3",)
        assert store.document.drained == ("n3",)

    def test_a_command_says_when_too_few_nodes_are_left(self) -> None:
        store = Commands()
        given = store.give(drain("rdzv", ["n2", "n3", "n4"], lambda: 0.0))
        assert (given.remaining, given.lacks, given.size, given.stops) == (1, 1, 0, True)
        assert store.document.drained == ("n2", "n3", "n4")

    @pytest.mark.parametrize("order", ["drain", "exclude"])
    def test_nothing_is_changed_where_what_it_would_come_to_is_refused(self, order: str) -> None:
        store = Commands()
        for node in ("n3", "n4"):
            store.client.delete(NODES_PREFIX + node)
        seen: list[Given] = []

        def refuse(would: Given) -> bool:
            seen.append(would)
            return not would.stops

        if order == "drain":
            given = store.give(drain("rdzv", ["n2"], lambda: 0.0, refuse))
        else:
            given = store.give(exclude("rdzv", Exclusion("n2"), lambda: 0.0, refuse))
        assert seen == [given]
        assert (given.nodes, given.remaining, given.lacks) == (("n2[1]",), 1, 1)
        assert store.document == NOW
        assert store.client.get(BELL_KEY) is None

    def test_the_dead_do_not_count(self) -> None:
        dead = {"n3", "n4"}.__contains__
        given = Commands().give(drain("rdzv", ["n2"], lambda: 0.0, lambda _: True, dead))
        assert (given.remaining, given.stops) == (1, True)
        # A run that has too few nodes anyway is not stopped.
        given = Commands().give(drain("rdzv", ["n3"], lambda: 0.0, lambda _: True, "n2".__eq__))
        assert (given.remaining, given.stops) == (2, False)
        everybody = {"n2", "n3", "n4"}.__contains__
        given = Commands().give(drain("rdzv", ["n3"], lambda: 0.0, lambda _: True, everybody))
        assert (given.remaining, given.lacks, given.stops) == (1, 1, False)

    def test_units_count(self) -> None:
        store = Commands()
        leader = replace(running("n1", NOW), run_options="node_unit=3")
        store.client.put(NODES_PREFIX + "n1", leader.encode())
        given = store.give(drain("rdzv", ["n2"], lambda: 0.0))
        assert (given.remaining, given.size, given.lacks, given.stops) == (3, 3, 0, False)
        given = store.give(drain("rdzv", ["n3"], lambda: 0.0))
        # Two are as many as --nnodes asks for, and no unit.
        assert (given.remaining, given.size, given.lacks, given.stops) == (2, 0, 1, True)

    def test_drained_twice_is_drained_once(self) -> None:
        store = Commands()
        store.give(drain("rdzv", ["n2"], lambda: 0.0))
        version = store.client.get(STATE_KEY)
        store.give(drain("rdzv", ["n2"], lambda: 0.0))
        assert store.client.get(STATE_KEY) == version

    def test_a_write_that_comes_between_is_kept(self) -> None:
        store = Commands()
        work = drain("rdzv", ["n2"], lambda: 0.0)
        client, answer, other = store.client, None, replace(NOW, absent=("n3",))
        while True:
            request = work.send(answer)
            if isinstance(request, effects.CompareAndSet):
                break
            read = isinstance(request, effects.Read)
            answer = client.get(STATE_KEY) if read else client.list(NODES_PREFIX)
        client.put(STATE_KEY, other.encode())
        answer = client.compare_and_set(STATE_KEY, request.value, request.expected)  # type: ignore[assignment]
        request = work.send(answer)
        assert isinstance(request, effects.CompareAndSet)
        assert RoundDocument.decode(request.value) == replace(other, drained=("n2",))

    @pytest.mark.parametrize("now", [None, document(Phase.CLOSED)], ids=["none", "closed"])
    def test_there_is_nothing_to_order(self, now: RoundDocument | None) -> None:
        store = Commands(now or NOW)
        if now is None:
            store.client.delete(STATE_KEY)
        assert store.give(drain("rdzv", ["n2"], lambda: 0.0)).document is None
        assert store.give(restart("rdzv", "why", lambda: 0.0)).document is None

    def test_restart_asks_the_leader(self) -> None:
        store = Commands()
        store.give(restart("rdzv", "why", lambda: 0.0))
        assert store.document == replace(NOW, restart="why")
        assert store.client.get(BELL_KEY) is not None

    def test_no_restart_once_a_node_is_done(self) -> None:
        store = Commands()
        done = replace(running("n2", NOW), status=Status.DONE)
        store.client.put(NODES_PREFIX + "n2", done.encode())
        assert store.give(restart("rdzv", "why", lambda: 0.0)).done == ("n2[1]",)
        assert store.document == NOW

    def test_no_restart_while_a_round_forms(self) -> None:
        store = Commands(FORMING)
        assert store.give(restart("rdzv", "why", lambda: 0.0)).document == FORMING
        assert store.document == FORMING
        assert store.client.get(BELL_KEY) is None

    def test_resize_lets_in_who_waits(self) -> None:
        store = Commands()
        store.client.put(NODES_PREFIX + "n9", record("n9", Status.SPARE).encode())
        assert store.give(resize("rdzv")).nodes == ("n4[1]", "n9[1]")
        assert store.document == replace(NOW, resize=True)
        assert store.client.get(BELL_KEY) is not None

    def test_resize_leaves_a_run_alone_for_which_nobody_waits(self) -> None:
        store = Commands()
        store.client.delete(NODES_PREFIX + "n4")
        assert store.give(resize("rdzv")).nodes == ()
        assert store.document == NOW

    def test_exclude_replaces_what_stands_for_the_host(self) -> None:
        store = Commands()
        store.give(exclude("rdzv", Exclusion("n3", 5.0), lambda: 0.0))
        given = store.give(exclude("rdzv", BAD, lambda: 0.0))
        assert store.document == EXCLUDED
        assert (given.nodes, given.remaining) == (("n3[1]",), 3)
        assert not store.give(include("rdzv", ["n9"]))
        assert store.give(include("rdzv", ["n3"]))
        assert store.document == NOW

    def test_an_accused_node_is_named_with_its_beat(self) -> None:
        store = Commands()
        beat = running("n2", NOW).beat
        assert store.give(accuse("rdzv", ["n2"])).nodes == ("n2[1]",)
        assert store.document.accused == (Accusation("n2", beat),)
        assert store.client.get(BELL_KEY) is not None
        # A node that was asked, or found gone, is not asked again for this.
        gone = replace(NOW, accused=(Accusation("n2", beat, "n3[1]", True),))
        store = Commands(gone)
        store.give(accuse("rdzv", ["n2"]))
        assert store.document == gone
        assert store.give(accuse("rdzv", ["n2", "nobody"])).unknown == ("nobody",)
        assert store.document == gone

    def test_another_run_of_the_id_gets_no_order(self) -> None:
        store = Commands()
        changed = orders.give("rdzv", "another", lambda it: replace(it, restart="why"))
        assert carry_out(store.client, archive(store.server), changed, lambda _: None) is None
        assert store.document == NOW


def test_a_drained_node_ends_and_the_other_goes_on() -> None:
    server, time = MemoryServer(), Time()
    rules = replace(PAIR, min_nodes=1, last_call_timeout=5.0)
    leader, other = (Life(name, server, time, rules) for name in ("n1", "n2"))
    finish(other, leader)
    assert stored(leader).leader == "n1"
    work = drain("rdzv", ["n1"], time)
    carry_out(leader.client, leader.archive, work, lambda _: None)
    leader.go()
    other.go()
    assert leader.node.num_nodes_waiting > 0
    assert other.node.num_nodes_waiting > 0
    leader.join_again()
    leader.go()
    (outcome,) = leader.outcomes
    assert outcome.failure is Failure.DRAINED
    assert leader.node.record.status is Status.LEFT
    other.join_again()
    other.go()
    while not other.outcomes:
        other.wake()
    assert stored(other).participants == ("n2",)
    assert stored(other).reason == "drained n1[1]"
    assert "this node was drained" in leader.told[-1]


def test_rank_0_that_takes_the_lead_after_it_confirmed_keeps_its_tcpstore() -> None:
    """A second one would close the first, whose address the others were given."""
    server, time = MemoryServer(), Time()
    rules = replace(PAIR, min_nodes=2, max_nodes=2)
    first, leader = (Life(name, server, time, rules) for name in ("n1", "n2"))
    while stored(leader).phase is not Phase.CONFIRMING if leader.client.get(STATE_KEY) else True:
        leader.go()
        first.go() if leader.client.get(STATE_KEY) else None
        if isinstance(leader.request, effects.Rest):
            leader.wake()
    first.go()
    assert first.node.record.status is Status.RUN
    assert stored(first).phase is Phase.CONFIRMING
    leader.carry_out(leader.node.farewell())
    opened = first.log.count("OpenMaster")
    while stored(first).leader != "n1":
        first.wake()
    assert first.log.count("OpenMaster") == opened


@pytest.mark.parametrize("what", ["restart", "close"])
def test_what_others_undo_again_and_again_ends(what: str) -> None:
    """`rdzv drain` sent 165,510 scripts in 45 s, and did not end."""
    steps: Generator[Any, Any, Any]
    steps = restart("me", "why", lambda: 0.0) if what == "restart" else _closes()
    requests, rests = 0, 0.0

    def drive() -> None:
        nonlocal requests, rests
        answer: Any = None
        while True:
            request = steps.send(answer)
            answer = None
            match request:
                case effects.Read() | effects.CompareAndSet():
                    requests += 1
                    entry = Entry(NOW.encode(), str(requests))
                    answer = entry if isinstance(request, effects.Read) else (entry, False)
                case effects.List():
                    answer = {
                        NODES_PREFIX + node: Entry(it.encode(), node)
                        for node, it in all_running(NOW).items()
                    }
                case effects.Rest(seconds):
                    rests += seconds

    with pytest.raises(RendezvousConnectionError, match="again and again") as refused:
        drive()
    assert 20 < requests < 100
    assert 10 < rests < 60
    assert "\n" not in str(refused.value)


def _closes() -> effects.Effects[bool]:
    return close_run("me", None, Outcome.CLOSED, "why", 1.0, may_close=lambda _: True)


def test_exclusions_that_others_change_again_and_again_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv_plugins.observe.history.pause_after", lambda _: 0.0)

    class Rival(MemoryClient):
        tries = 0

        def compare_and_set(self, key: str, value: bytes, expected: Any) -> Any:
            Rival.tries += 1
            return Entry(b"[]", str(Rival.tries)), False

    kept = Archive(partial(Rival, MemoryServer()), "run", 1.0)
    with pytest.raises(RendezvousConnectionError, match="again and again"):
        kept.exclude(Exclusion("host1"), 0.0)
    assert Rival.tries < 100
