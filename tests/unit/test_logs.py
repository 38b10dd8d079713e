"""What a node says in its life: one line an event, none in a loop; and where the lines go."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from rdzv_plugins.kv import MemoryClient, MemoryServer
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.observe.logs import RunLog, set_up
from rdzv_plugins.process import factory
from rdzv_plugins.protocol import effects
from rdzv_plugins.protocol.documents import Exclusion, Outcome, Phase, Status
from rdzv_plugins.protocol.remarks import remarks
from rdzv_plugins.settings.options import Settings
from tests import replace
from tests.unit.crowd import Crowd
from tests.unit.life import RULES, Life, Time, finish
from tests.unit.views import all_running, document, record, view


def waits(life: Life) -> list[str]:
    """Its lines about what it waits for."""
    return [line for line in life.said if line.startswith("waiting")]


class TestANodesLife:
    """On virtual time."""

    def test_it_says_what_it_waits_for_every_30_seconds(
        self, server: MemoryServer, time: Time
    ) -> None:
        leader = Life("n1", server, time, replace(RULES, min_nodes=3, max_nodes=3))
        leader.go()
        began = time.now
        while not leader.outcomes:
            leader.wake()
        told = [(line.rpartition("; ")[0], line.rpartition("; ")[2]) for line in waits(leader)]
        assert {does for does, _ in told} == {"waiting for 2 nodes: 1 of 3 is here"}
        left = [int(seconds.partition(" ")[0]) for _, seconds in told]
        assert len(left) == 2, "one once it has settled, one 30 s later"
        assert left[0] in range(57, 60)
        assert left[0] - left[1] in (30, 31)
        assert time.now - began < 61
        (outcome,) = leader.outcomes
        assert outcome.diagnosis is not None
        assert outcome.diagnosis.lasting == told[0][0]

    def test_it_says_so_when_that_changes(self, server: MemoryServer, time: Time) -> None:
        rules = replace(RULES, min_nodes=3, max_nodes=3)
        leader = Life("n1", server, time, rules)
        leader.go()
        for _ in range(3):
            leader.wake()
        other = Life("n2", server, time, rules)
        for _ in range(4):
            other.go()
            leader.go()
            other.wake()
            leader.wake()
        assert [line.partition(";")[0] for line in waits(leader)] == [
            "waiting for 2 nodes: 1 of 3 is here",
            "waiting for 1 node: 2 of 3 are here",
        ]
        assert [line.partition(";")[0] for line in waits(other)] == [
            "waiting for a round of 3 nodes, led by n1[1]",
        ]

    def test_a_round_that_forms_at_once_is_not_waited_for(self, pair: tuple[Life, Life]) -> None:
        leader, joiner = pair
        finish(leader, joiner)
        leader.go()
        for life, rank in ((leader, 0), (joiner, 1)):
            assert life.said == [
                f"joined as n{rank + 1}[1], --nnodes=2:2",
                f"round 0: rank {rank} of 2, MASTER host:1 (first round)",
            ]

    def test_telling_asks_nothing_of_the_store(self, server: MemoryServer, time: Time) -> None:
        leader = Life("n1", server, time, RULES)
        leader.go()
        assert "ReadExclusions" in leader.wake(), "once, since it has nothing else to do"
        asked = {tuple(leader.wake()) for _ in range(40)}
        assert waits(leader)
        assert asked == {
            ("PutRecord", "List nodes/", "Read state"),
            ("PutRecord", "List nodes/", "Read state", "Expire"),
        }

    def test_a_closed_run_is_told_by_who_closed_it_and_by_the_others(self) -> None:
        crowd = Crowd()
        for name in ("n1", "n2", "n3"):
            crowd.join(name, replace(RULES, min_nodes=3, max_nodes=3))
        members = crowd.members
        crowd.play_until(lambda: all(member.given for member in members.values()), 30.0)
        for member in members.values():
            member.said.clear()
            member.node.inbox.report_done()
        crowd.play_until(lambda: crowd.document.closed, 30.0)
        crowd.play(5.0)
        by = crowd.document.leader
        line = f"the run is closed: its workers succeeded; closed by {by}[1]"
        assert {name: member.said for name, member in members.items()} == {
            name: [line] for name in members
        }
        told = {name for name, member in members.items() if member.node.told_of_the_end}
        assert told == members.keys() - {by}

    def test_a_spare_is_told_once_and_not_every_30_seconds(self) -> None:
        now = document(Phase.RUNNING)
        waits = view(record("n4"), now, leader=record("n1"))
        spare = replace(waits, record=replace(waits.record, status=Status.SPARE))
        assert [about for about, *_ in remarks(spare)] == ["spare"]

    def test_a_round_that_goes_on_names_its_lost_nodes_in_the_leaders_log(self) -> None:
        now = document(Phase.RUNNING, absent=("n2", "n3"))
        records = all_running(document(Phase.RUNNING))
        records["n2"] = replace(records["n2"], status=Status.LEFT)
        told = list(remarks(view(records["n1"], now, records)))
        why = "lost n3[1]: lease ran out; n2[1] left"
        assert [text for _, _, text, *_ in told] == [
            f"round 4 goes on (restart_on_loss=false): {why}"
        ]

    def test_a_command_that_a_line_names_can_be_pasted(
        self, server: MemoryServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        held = Exclusion("n3", None, "it ended rounds")
        now = document(Phase.RUNNING, quarantined=(held,))
        records = all_running(now)
        ((about, _, text, *command),) = remarks(view(records["n1"], now, records))
        archive = Archive(lambda _: MemoryClient(server, "job"), "job", 60.0, where=["-b", "redis"])
        life = Life("n1", server, Time(), RULES)
        log = RunLog(logging.getLogger("rdzv_plugins"), "job", life.node, archive.command)
        log.tell(effects.Tell(about, text, tuple(command)))
        assert "; rdzv include -i job -b redis n3 ends it, and" in caplog.messages[-1]

    def test_the_end_of_a_run_that_only_its_tombstone_told(self) -> None:
        was = document(Phase.RUNNING)
        ended = replace(was, phase=Phase.CLOSED, outcome=Outcome.SUCCEEDED)
        told = list(remarks(view(all_running(was)["n2"], None, latest=ended)))
        assert [text for _, _, text, *_ in told] == ["the run was closed while the store was away"]

    def test_what_belongs_to_a_normal_life_is_no_warning(self) -> None:
        normal = [about for about in ABOUT if not effects.Tell(about, "").warns]
        assert normal == ["joined", "waiting", "forming", "round", "closed"]


ABOUT = re.findall(r"``(\w+)``", effects.Tell.__doc__ or "")[1:]


@contextmanager
def bare() -> Iterator[logging.Logger]:
    """The package's logger as it is in a process that has set nothing up.

    No fixture: pytest adds handlers of its own after those.
    """
    root, package = logging.getLogger(), logging.getLogger("rdzv_plugins")
    before = root.handlers, package.handlers, package.level
    root.handlers, package.handlers = [], []
    package.setLevel(logging.NOTSET)
    try:
        yield package
    finally:
        root.handlers, package.handlers = before[:2]
        package.setLevel(before[2])


class TestWhereTheLinesGo:
    def test_to_stderr_as_torchs_do(self, capsys: pytest.CaptureFixture[str]) -> None:
        with bare():
            set_up("INFO")
            set_up("DEBUG")
            log = logging.getLogger("rdzv_plugins.process.handler")
            log.info("run '%s': a line", "r")
            log.debug("no line")
        assert re.fullmatch(
            rf"I\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} {os.getpid()} rdzv_plugins\.process\.handler:\d+\] "
            r"run 'r': a line\n",
            capsys.readouterr().err,
        )

    def test_from_the_level_on_that_was_asked_for(self, capsys: pytest.CaptureFixture[str]) -> None:
        with bare() as package:
            set_up("WARNING")
            package.info("no line")
            package.warning("a line")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("] a line")

    @pytest.mark.parametrize("whose", ["", "rdzv_plugins"])
    def test_not_where_the_application_has_set_up_logging(self, whose: str) -> None:
        with bare() as package:
            own = logging.StreamHandler(io.StringIO())
            logging.getLogger(whose).addHandler(own)
            set_up("DEBUG")
            assert logging.getLogger(whose).handlers == [own]
            assert package.level == logging.NOTSET
            assert package.handlers == ([own] if whose else [])

    def test_its_level_stays_where_it_has_one(self) -> None:
        with bare() as package:
            package.setLevel(logging.ERROR)
            set_up("DEBUG")
            assert package.level == logging.ERROR

    def test_no_line_twice_where_the_application_sets_it_up_later(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with bare() as package:
            set_up("INFO")
            logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))
            package.info("a line")
        assert capsys.readouterr().err == "a line\n"

    def test_every_handler_sees_to_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        params = RendezvousParameters("redis", "127.0.0.1:1", "run", 1, 1)
        monkeypatch.setattr(factory, "opener", lambda *_: (Settings(log_level="ERROR"), _refuse))
        with bare() as package:
            with pytest.raises(ConnectionRefusedError):
                factory.create_handler("redis", params)
            assert package.level == logging.ERROR
            assert len(package.handlers) == 1


def _refuse(namespace: str) -> MemoryClient:
    raise ConnectionRefusedError
