"""An unfit node does not join, and holds nobody up: real handlers over the in-memory store."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from rdzv_plugins.observe.inspection import Condition, Inspection, settle
from rdzv_plugins.process import fitness
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord
from rdzv_plugins.testing.threads import Background
from tests.handlers.site import LEASE, Site, succeed
from tests.handlers.site import site as make_site

pytestmark = pytest.mark.rule("unfit nodes")

BAD = "sh: GPU 3 is hot"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(fitness, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(fitness, "_LONGEST_PAUSE", 0.2)
    with make_site() as site:
        yield site


class Host:
    """Whether a host is well, as its check finds it; it counts how often it is asked."""

    def __init__(self, folder: Path) -> None:
        self._bad, self._asked = folder / "bad", folder / "asked"
        self.options: dict[str, Any] = {
            "check_command": f"sh -c 'echo >> {self._asked}; cat {self._bad} && exit 1; exit 0'"
        }

    def breaks(self, why: str = "GPU 3 is hot") -> None:
        self._bad.write_text(why)

    def mends(self) -> None:
        self._bad.unlink()

    @property
    def asked(self) -> int:
        return len(self._asked.read_text()) if self._asked.exists() else 0


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def record(site: Site, handler: StoreRendezvousHandler) -> NodeRecord | None:
    entry = site.client().get(NODES_PREFIX + handler._node.id)
    return NodeRecord.decode(entry.value) if entry is not None else None


def says_why(site: Site, handler: StoreRendezvousHandler) -> None:
    def said() -> bool:
        it = record(site, handler)
        return it is not None and it.is_unfit and it.unfit == BAD

    site.await_that(said)


def fail(handler: StoreRendezvousHandler) -> None:
    """What torch's launcher does when its agent raised."""
    try:
        raise RuntimeError("the agent failed")
    except RuntimeError:
        assert handler.shutdown()


class TestBeforeTheFirstRound:
    def test_an_unfit_node_joins_once_its_check_passes(
        self, site: Site, host: Host, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "rdzv_plugins")
        host.breaks()
        waits, other = site.handler(1, 2, **host.options), site.handler(1, 2)
        joins = Background(waits.next_rendezvous)
        says_why(site, waits)
        (info,) = site.join(other)
        assert info.world_size == 1, "the other does not wait for it"
        site.await_that(lambda: host.asked >= 4)
        assert not joins.done(0.0)
        host.mends()
        site.await_that(lambda: other.num_nodes_waiting() > 0)
        (info,) = site.join(other)
        assert (info.world_size, joins.result(20.0).world_size) == (2, 2)
        it = record(site, waits)
        assert it is not None
        assert it.unfit == ""
        own = [it.getMessage() for it in caplog.records if "this node is " in it.getMessage()]
        assert own[0].startswith(f"run 'run': this node is unfit and does not join: {BAD}; it ")
        assert own[-1] == "run 'run': this node is fit again, and joins"
        assert len(own) == 2, "a line for each change"

    def test_an_unfit_node_is_seen_from_outside_before_there_is_a_run(
        self, site: Site, host: Host
    ) -> None:
        host.breaks()
        waits = site.handler(1, 2, **host.options)
        joins = Background(waits.next_rendezvous)
        says_why(site, waits)
        seen = Inspection(site.client(), site.archive(), site.run_id)
        settle([seen])
        assert seen.condition is Condition.FORMING
        label = waits._node.record.label
        assert seen.sentence == f"no round has begun; unfit: {label} ({BAD})"
        host.mends()
        joins.result(20.0)

    def test_an_unfit_node_exits_if_told_so(self, site: Site, host: Host) -> None:
        host.breaks()
        exits = site.handler(1, 2, **host.options, on_unhealthy="exit")
        text = f"run 'run': this node is unfit, and exits: {BAD}"
        with pytest.raises(RendezvousError) as raised:
            exits.next_rendezvous()
        assert (str(raised.value), host.asked) == (text, 1)
        assert not isinstance(raised.value, RendezvousTimeoutError | RendezvousClosedError)
        fail(exits)
        assert site.document is None
        assert record(site, exits) is None

    def test_an_unfit_node_gives_up_after_join_timeout(self, site: Site, host: Host) -> None:
        host.breaks()
        waits = site.handler(1, 2, **host.options, join_timeout=1.0)
        began = time.monotonic()
        with pytest.raises(RendezvousTimeoutError) as raised:
            waits.next_rendezvous()
        assert str(raised.value) == f"run 'run': this node was unfit for join_timeout (1 s): {BAD}"
        # 0.05, 0.1 and then 0.2 s, as long as the next pause is within the second.
        assert host.asked == 7
        assert time.monotonic() - began > 0.7
        says_why(site, waits)

    def test_what_a_check_takes_is_not_of_join_timeout(self, site: Site) -> None:
        slow = f"{sys.executable} -c 'import time; time.sleep(1.5)'"
        (info,) = site.join(site.handler(1, 1, check_command=slow, join_timeout=1.0))
        assert info.world_size == 1

    def test_a_missing_program_keeps_it_out(self, site: Site) -> None:
        exits = site.handler(1, 1, check_command="/no/such/program", on_unhealthy="exit")
        with pytest.raises(RendezvousError, match="program: it cannot be started"):
            exits.next_rendezvous()

    def test_or_not_if_the_gate_fails_open(
        self, site: Site, caplog: pytest.LogCaptureFixture
    ) -> None:
        opens = site.handler(1, 1, check_command="/no/such/program", check_fails_open=True)
        assert site.join(opens)[0].world_size == 1
        assert "run 'run': the check 'program' cannot run, and counts as passed" in caplog.text


class TestAtARestart:
    def test_the_others_go_on_without_it_and_it_comes_back(self, site: Site, host: Host) -> None:
        breaks = site.handler(2, 3, **host.options, check_at="restart")
        others = [site.handler(2, 3) for _ in range(2)]
        site.join(*others, breaks)
        host.breaks()
        joins = Background(breaks.next_rendezvous)
        site.await_that(lambda: all(other.num_nodes_waiting() for other in others))
        began = time.monotonic()
        assert {info.world_size for info in site.join(*others)} == {2}
        assert time.monotonic() - began < 5.0, "rejoin_timeout is 16 s here"
        document = site.document
        assert document is not None
        assert document.reason.endswith(f" left ({BAD})")
        seen = Inspection(site.client(), site.archive(), site.run_id)
        settle([seen])
        assert f"unfit: {breaks._node.record.label} ({BAD})" in seen.sentence
        (node,) = (it for it in seen.nodes() if it.node == breaks._node.id)
        assert (node.state, node.unfit) == ("unfit", BAD)
        assert not joins.done(LEASE)
        host.mends()
        site.await_that(lambda: all(other.num_nodes_waiting() for other in others))
        assert {info.world_size for info in site.join(*others)} == {3}
        assert joins.result(20.0).world_size == 3

    def test_the_check_is_not_asked_where_only_joins_are_checked(
        self, site: Site, host: Host
    ) -> None:
        pair = [site.handler(2, 2, **host.options), site.handler(2, 2)]
        site.join(*pair)
        host.breaks()
        assert {info.world_size for info in site.join(*pair)} == {2}
        assert host.asked == 1

    def test_but_who_was_replaced_joins_anew(self, site: Site, host: Host) -> None:
        cut = site.client()
        replaced, other = site.handler(1, 2, cut, **host.options), site.handler(1, 2)
        site.join(replaced, other)
        cut.cut()
        site.await_that(lambda: other.num_nodes_waiting() > 0)
        site.join(other)
        host.breaks()
        cut.down = False
        site.await_that(lambda: replaced.num_nodes_waiting() > 0)
        joins = Background(replaced.next_rendezvous)
        says_why(site, replaced)
        assert other.num_nodes_waiting() == 0
        host.mends()
        site.await_that(lambda: other.num_nodes_waiting() > 0)
        site.join(other)
        assert joins.result(20.0).world_size == 2

    @pytest.mark.parametrize("option", ["exit", "wait"])
    def test_an_unfit_node_that_gives_up_does_not_close_the_run_of_the_others(
        self, site: Site, host: Host, option: str
    ) -> None:
        gives_up = site.handler(
            1, 2, **host.options, check_at="restart", on_unhealthy=option, join_timeout=0.4
        )
        other = site.handler(1, 2)
        site.join(other, gives_up)
        host.breaks()
        with pytest.raises(RendezvousError):
            gives_up.next_rendezvous()
        fail(gives_up)
        site.await_that(lambda: other.num_nodes_waiting() > 0)
        (info,) = site.join(other)
        assert info.world_size == 1
        document = site.document
        assert document is not None
        assert document.reason.endswith(f" left ({BAD})")

    def test_a_check_that_hangs_holds_no_heartbeat_up(self, site: Site, host: Host) -> None:
        slow = f"{sys.executable} -c 'import time; time.sleep({2 * LEASE})'"
        pair = [
            site.handler(2, 2, check_command=slow, check_at="restart"),
            site.handler(2, 2),
        ]
        site.join(*pair)
        assert {info.world_size for info in site.join(*pair)} == {2}
        document = site.document
        assert document is not None
        assert document.round == 1
        assert not document.cause.lost


class TestWhenTheRunEnds:
    def test_an_unfit_node_of_the_run_ends_with_it(self, site: Site, host: Host) -> None:
        out = site.handler(1, 2, **host.options, check_at="restart")
        other = site.handler(1, 2)
        site.join(other, out)
        host.breaks()
        joins = Background(out.next_rendezvous)
        site.await_that(lambda: other.num_nodes_waiting() > 0)
        site.join(other)
        assert succeed(other)
        with pytest.raises(SystemExit) as raised:
            joins.result(20.0)
        assert raised.value.code == 0

    def test_a_newcomer_is_refused(self, site: Site, host: Host) -> None:
        host.breaks()
        out, other = site.handler(1, 2, **host.options), site.handler(1, 2)
        site.join(other)
        joins = Background(out.next_rendezvous)
        says_why(site, out)
        assert succeed(other)
        with pytest.raises(RendezvousClosedError, match="run 'run' is closed"):
            joins.result(20.0)

    def test_its_own_end_ends_the_wait(self, site: Site, host: Host) -> None:
        host.breaks()
        out = site.handler(1, 2, **host.options)
        joins = Background(out.next_rendezvous)
        says_why(site, out)
        assert out.shutdown()
        with pytest.raises(RendezvousClosedError, match="was shut down"):
            joins.result(20.0)
        assert record(site, out) is None, "there is no run whose end would be the record's"


class TestRank0:
    """Whom the check `network` dials."""

    def test_it_is_known_while_the_run_counts_on_it(self, site: Site) -> None:
        first, second = site.handler(1, 2), site.handler(1, 2)
        assert second._service.rank_0 is None
        site.join(first, second)
        document = site.document
        assert document is not None
        rank_0, other = (first, second) if document.ranks[first._node.id] == 0 else (second, first)
        assert rank_0._service.rank_0 is None
        place = other._service.rank_0
        assert place is not None
        assert f"{place[0]}:{place[1]}" == document.master
        site.kill(rank_0)
        site.await_that(lambda: other.num_nodes_waiting() > 0)
        assert other._service.rank_0 is None

    def test_nodes_that_reach_it_restart_with_the_check(self, site: Site) -> None:
        pair = [site.handler(2, 2, checks="network", check_at="restart") for _ in range(2)]
        for _ in range(3):
            assert {info.world_size for info in site.join(*pair)} == {2}
