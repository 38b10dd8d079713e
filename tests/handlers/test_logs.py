"""What real handlers say: one line an event, none in a loop, with fields."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background
from tests.handlers.site import Site, succeed

ME = f"127.0.0.1[{os.getpid()}]"

Lines = Callable[..., list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The lines of all nodes since the last call, without the name of the run; waits for them."""
    caplog.set_level(logging.INFO, "rdzv_plugins")

    def fresh(number: int = 0) -> list[str]:
        until(lambda: len(caplog.records) >= number, 30)
        found = [it.getMessage() for it in caplog.records if it.name.startswith("rdzv_plugins")]
        caplog.clear()
        assert all(line.startswith("run 'run': ") for line in found), found
        return [line.removeprefix("run 'run': ") for line in found]

    return fresh


def test_each_event_is_one_line(site: Site, lines: Lines) -> None:
    stays, other = (site.handler(1, 2) for _ in range(2))
    site.join(stays, other)
    master = site.document.master if site.document else None
    assert sorted(lines(4)) == [
        f"joined as {ME}, --nnodes=1:2",
        f"joined as {ME}, --nnodes=1:2",
        f"round 0: rank 0 of 2, MASTER {master} (first round)",
        f"round 0: rank 1 of 2, MASTER {master} (first round)",
    ]
    assert other._leave()
    site.await_that(stays.num_nodes_waiting)
    site.join(stays)
    master = site.document.master if site.document else None
    told = lines(4)
    # The leader may see the leave before the other node logs it.
    assert {*told[:2]} == {f"{ME} has left", f"round 1 forms: {ME} left"}
    assert told[2:] == [
        f"{ME} asks for the next round: its round is over",
        f"round 1: rank 0 of 1, MASTER {master} ({ME} left)",
    ]
    assert succeed(stays)
    assert lines() == [f"the run is closed: its workers succeeded; closed by {ME}"]


def test_a_node_that_finds_the_run_closed_says_who_closed_it(site: Site, lines: Lines) -> None:
    first, second = site.handler(2, 2), site.handler(2, 2)
    site.join(first, second)
    lines(4)
    first.set_closed()
    assert lines(1) == [f"the run is closed: by request; closed by {ME}"]
    # In one process both have one name, and only the node that closed a run is silent about it.
    assert not second._node.told_of_the_end
    assert succeed(second)
    assert lines() == [f"the run is closed: by request; closed by {ME}"]


def test_the_leader_names_a_lost_node(site: Site, lines: Lines) -> None:
    stays, dies = (site.handler(1, 2) for _ in range(2))
    site.join(stays, dies)
    lines(4)
    site.kill(dies)
    site.await_that(stays.num_nodes_waiting)
    assert lines(1) == [f"round 1 forms: lost {ME}: lease ran out"]


def test_workers_that_failed(site: Site, lines: Lines) -> None:
    alone = site.handler(1, 1)
    site.join(alone)
    lines(2)
    site.join(alone)
    first, *_, last = lines(3)
    assert first == f"{ME} asks for the next round: its workers failed"
    assert last.endswith(f"({ME} joined again (its workers failed))")


def test_a_steady_node_says_nothing(site: Site, lines: Lines) -> None:
    alone = site.handler(1, 1, keep_alive_interval=0.05)
    site.join(alone)
    lines(2)
    beat = alone._node.record.beat
    site.await_that(lambda: alone._node.record.beat > beat + 10)
    assert lines() == []


def test_the_time_out_ends_with_what_it_waited_for(site: Site) -> None:
    leads, waits = (site.handler(3, 3, join_timeout=seconds) for seconds in (1.5, 2.5))
    first = Background(leads.next_rendezvous)
    site.await_that(lambda: site.document is not None)
    second = Background(waits.next_rendezvous)
    with pytest.raises(RendezvousTimeoutError) as early:
        first.result(20.0)
    assert str(early.value) == (
        "run 'run': 2 of 3 nodes came within 1.5 s, and no round formed: "
        "waiting for 1 node: 2 of 3 are here"
    )
    with pytest.raises(RendezvousTimeoutError) as late:
        second.result(20.0)
    # A node that has given up has come too.
    text = str(late.value)
    assert "2 of 3 nodes came within 2.5 s, and no round formed: waiting for 2 nodes" in text
    assert text.endswith(f"missing: gave up {ME}")


def test_records_have_fields(site: Site, lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    alone = site.handler(1, 1)
    site.join(alone)
    site.join(alone)
    assert until(lambda: len(caplog.records) == 5, 30)
    succeed(alone)
    why = f"{ME} joined again (its workers failed)"
    found = [
        (fields["rdzv_run"], fields["rdzv_round"], fields["rdzv_node"], fields["rdzv_cause"])
        for it in caplog.records
        if (fields := vars(it)) and "rdzv_run" in fields
    ]
    assert [fields for number, fields in enumerate(found) if fields not in found[:number]] == [
        ("run", 0, ME, "first round"),
        ("run", 1, ME, why),
    ]
