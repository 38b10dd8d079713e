"""Which node ends a run and which only leaves it: real handlers over the in-memory store.

A node leaves where its agent fails, or its workers do while it is new, and the others are enough.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousInfo

from rdzv_plugins.process import handler as handlers
from rdzv_plugins.process.factory import rules_of
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import Outcome, Phase, Status
from rdzv_plugins.protocol.rules import Rules
from rdzv_plugins.testing.threads import Background
from tests.handlers.site import Site

pytestmark = pytest.mark.rule("parting", "parting under torchrun")

MISSING = FileNotFoundError(2, "No such file or directory", "/none/train")


def node(site: Site, low: int, high: int, **options: Any) -> StoreRendezvousHandler:
    """One on a host of its own: a cause tells nodes apart by their names."""
    return site.handler(low, high, address=f"127.0.0.{len(site.handlers) + 1}", **options)


def workers_failed() -> ChildFailedError:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=3, error_file="")
    return ChildFailedError("train.py", {2: failure})


def end_with(handler: StoreRendezvousHandler, error: BaseException) -> bool:
    """What torch's launcher does when its agent raised."""
    try:
        raise error
    except type(error):
        return handler.shutdown()


def are_told(*handlers: StoreRendezvousHandler) -> bool:
    return all(handler.num_nodes_waiting() for handler in handlers)


def join_again(site: Site, *handlers: StoreRendezvousHandler) -> list[RendezvousInfo]:
    site.await_that(lambda: are_told(*handlers))
    return site.join(*handlers)


def take_in(site: Site, new: StoreRendezvousHandler, *old: StoreRendezvousHandler) -> None:
    """The next round of these, with a node more."""
    joins = Background(new.next_rendezvous)
    join_again(site, *old)
    assert joins.result(20.0).world_size == len(old) + 1


def with_a_newcomer(site: Site, low: int = 1, **options: Any) -> list[StoreRendezvousHandler]:
    """Two nodes of a round that ran, and the third of the next one, in this order."""
    old = [node(site, low, 3, **options) for _ in range(2)]
    site.join(*old)
    new = node(site, low, 3, **options)
    take_in(site, new, *old)
    return [*old, new]


def test_an_agent_that_fails_leaves_a_run_that_has_enough_without_it(site: Site) -> None:
    broken, *others = (node(site, 2, 3) for _ in range(3))
    site.join(broken, *others)
    assert end_with(broken, MISSING)
    assert [info.world_size for info in join_again(site, *others)] == [2, 2]
    assert site.document is not None
    label = broken._node.record.label
    assert f"{label} left (its agent failed (FileNotFoundError: [Errno 2] No such file or" in (
        site.document.reason
    )
    assert "joined again" not in site.document.reason


@pytest.mark.parametrize("error", [MISSING, workers_failed()], ids=["agent", "workers"])
def test_an_agent_that_fails_closes_a_run_that_has_too_few_without_it(
    site: Site, error: Exception
) -> None:
    first, second = node(site, 2, 2), node(site, 2, 2)
    site.join(first, second)
    assert end_with(second, error)
    assert site.document is not None
    assert site.document.outcome is Outcome.FAILED


@pytest.mark.parametrize("low", [1, 2, 3])
def test_where_all_agents_fail_at_once_the_run_is_closed_as_failed(site: Site, low: int) -> None:
    nodes = [node(site, low, 3, closed_ttl=60.0) for _ in range(3)]
    site.join(*nodes)
    ends = [Background(lambda each=each: end_with(each, MISSING)) for each in nodes]  # type: ignore[misc]
    assert all(end.result(20.0) for end in ends)
    assert site.document is not None
    assert site.document.outcome is Outcome.FAILED


def test_a_newcomer_whose_workers_fail_leaves(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    *old, new = with_a_newcomer(site)
    assert end_with(new, workers_failed())
    assert [info.world_size for info in join_again(site, *old)] == [2, 2]
    assert site.document is not None
    assert "left (its workers failed (rank 2 exited with 3))" in site.document.reason
    assert "this node leaves the run, which goes on without it: its workers failed" in caplog.text


def test_a_newcomer_does_not_try_again_at_the_others_cost(site: Site) -> None:
    """torchrun's agent asks for another round where it has restarts left."""
    *old, new = with_a_newcomer(site)
    with pytest.raises(RendezvousError, match="has left: its workers failed, and it was new"):
        new.next_rendezvous()
    assert [info.world_size for info in join_again(site, *old)] == [2, 2]


def test_with_restarts_to_spare_a_newcomer_tries_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "max_restarts", lambda: 3)
    *old, new = with_a_newcomer(site)
    take_in(site, new, *old)
    with pytest.raises(RendezvousError, match="has left"):
        new.next_rendezvous()


def test_under_rdzv_run_a_newcomer_has_all_its_restarts(site: Site) -> None:
    *old, new = with_a_newcomer(site)
    new.blames = True
    for _ in range(3):
        take_in(site, new, *old)
    assert end_with(new, workers_failed())
    assert [info.world_size for info in join_again(site, *old)] == [2, 2]


def test_each_of_two_newcomers_may_leave_unless_too_few_nodes_would_stay(site: Site) -> None:
    nodes = with_a_newcomer(site, low=2)
    first, second, new = nodes
    assert end_with(new, workers_failed())
    join_again(site, first, second)
    another = node(site, 2, 3)
    take_in(site, another, first, second)
    # Only one of those that were there before it is left.
    first._leave()
    join_again(site, second, another)
    assert end_with(another, workers_failed())
    assert site.document is not None
    assert site.document.outcome is Outcome.FAILED


def test_a_new_node_goes_on_where_the_agent_of_another_new_node_fails(site: Site) -> None:
    """Their workers may have failed for the same reason; an agent fails by itself."""
    old, *rest = with_a_newcomer(site, low=2)
    site.kill(rest[0])
    new = rest[1]
    join_again(site, old, new)
    another = node(site, 2, 3)
    take_in(site, another, old, new)
    assert end_with(new, MISSING)
    assert [info.world_size for info in join_again(site, old, another)] == [2, 2]


@pytest.mark.parametrize("options", [{}, {"min_uptime": 0.05}])
def test_a_node_that_has_served_ends_the_run_as_ever(
    site: Site, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    if not options:

        def brief(*given: Any) -> Rules:
            return replace(rules_of(*given), probation=0.05)

        monkeypatch.setattr("tests.handlers.site.rules_of", brief)
    *_, new = with_a_newcomer(site, **options)
    site.await_that(lambda: not new._service.is_new)
    assert end_with(new, workers_failed())
    assert site.document is not None
    assert site.document.outcome is Outcome.FAILED


def test_those_of_the_first_round_end_the_run_as_ever(site: Site) -> None:
    first, second = node(site, 1, 3), node(site, 1, 3)
    site.join(first, second)
    # In the second round too, of those of the first.
    Background(first.next_rendezvous)
    join_again(site, second)
    assert end_with(second, workers_failed())
    assert site.document is not None
    assert (site.document.phase, site.document.outcome) == (Phase.CLOSED, Outcome.FAILED)


def test_a_node_that_comes_back_is_new_to_the_run_that_goes_on(site: Site) -> None:
    *old, new = with_a_newcomer(site)
    site.kill(new)
    join_again(site, *old)
    back = node(site, 1, 3)
    take_in(site, back, *old)
    assert end_with(back, workers_failed())
    assert site.document is not None
    assert site.document.phase is not Phase.CLOSED
    assert back._node.record.status is Status.LEFT


@pytest.fixture
def later_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where these tests run on torch 2.6."""
    monkeypatch.setattr(handlers, "agent_ends_first", lambda: False)


@pytest.mark.usefixtures("later_torch")
def test_an_agent_that_ends_before_its_workers_succeeded_is_no_success(site: Site) -> None:
    """torch's launcher raises nothing where a worker is in uninterruptible sleep."""
    first, second = node(site, 1, 2), node(site, 1, 2)
    site.join(first, second)
    assert first.shutdown()
    assert site.document is not None
    assert site.document.outcome is Outcome.FAILED
    site.await_that(second.num_nodes_waiting)


@pytest.mark.usefixtures("later_torch")
def test_a_newcomer_whose_agent_ends_without_an_error_leaves_the_others_alone(site: Site) -> None:
    *old, new = with_a_newcomer(site)
    assert new.shutdown()
    join_again(site, *old)
    assert site.document is not None
    assert site.document.phase is not Phase.CLOSED
    assert new._node.record.status is Status.LEFT


def test_on_torch_2_6_the_launcher_says_what_failed_and_not_the_agent(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "agent_ends_first", lambda: True)
    first, second = node(site, 1, 2), node(site, 1, 2)
    site.join(first, second)
    assert first.shutdown()
    assert site.document is not None
    assert site.document.phase is Phase.RUNNING
    assert end_with(first, workers_failed())
    assert site.document.outcome is Outcome.FAILED
    assert "its workers failed" in site.document.reason
    site.await_that(second.num_nodes_waiting)


def test_the_failure_of_a_newcomer_counts_for_quarantine(site: Site) -> None:
    *old, new = with_a_newcomer(site, quarantine_after=2)
    assert end_with(new, workers_failed())
    join_again(site, *old)
    document = site.document
    assert document is not None
    assert [len(it.times) for it in document.strikes] == [1]
