"""torch's events of a node's life: real handlers over the in-memory store, and who listens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.distributed.elastic.events import handlers as torchs
from torch.distributed.elastic.events.api import NodeState, RdzvEvent
from torch.distributed.elastic.metrics.api import (
    MetricData,
    MetricHandler,
    NullMetricHandler,
    configure,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from rdzv_plugins.process import handler as handler_module
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background
from tests.handlers.site import Site
from tests.handlers.site import site as make_site

LOGGER = logging.getLogger("torchelastic-events-dynamic_rendezvous")

HANDLER = "dynamic_rendezvous.py:DynamicRendezvousHandler."
EXECUTOR = "dynamic_rendezvous.py:_DistributedRendezvousOpExecutor."
STATE = "dynamic_rendezvous.py:_BackendRendezvousStateHolder."


class Recorder(logging.Handler):
    """Keeps what it is given; fails, or hangs, where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[RdzvEvent] = []
        self.fails = False
        self.goes_on = threading.Event()
        self.goes_on.set()

    def handle(self, record: logging.LogRecord) -> bool:
        self.goes_on.wait(30.0)
        if self.fails:
            raise RuntimeError("the platform's handler failed")
        self.events.append(RdzvEvent.deserialize(record.getMessage()))
        return True

    def of(self, handler: StoreRendezvousHandler) -> list[tuple[str, NodeState]]:
        """What this handler recorded, without what comes again and again."""
        number = handler._events._local_id
        again = ("keep_alive", "Executor.run")
        return [
            (event.name, event.node_state)
            for event in self.events
            if event.local_id == number and not event.name.endswith(again)
        ]


@contextmanager
def listening(to: str) -> Iterator[Recorder]:
    """As a platform listens: torch's table of handlers has no public name."""
    recorder = Recorder()
    before = torchs._log_handlers["dynamic_rendezvous"]
    if to == "table":
        torchs._log_handlers["dynamic_rendezvous"] = recorder
    # torch reads the table when it makes the logger, and never again.
    LOGGER.addHandler(recorder)
    try:
        yield recorder
    finally:
        torchs._log_handlers["dynamic_rendezvous"] = before
        LOGGER.removeHandler(recorder)
        # pytest listens to each logger that does not propagate, as torch has it.
        LOGGER.propagate = True


@pytest.fixture(params=["table", "logger"])
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    with listening(request.param) as recorder:
        yield recorder


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    # A real TCPStore takes 5 s to open where a resolver loses a question, and costs the round.
    monkeypatch.setattr(StoreRendezvousHandler, "_open_master", lambda *_: "127.0.0.1:1")
    with make_site() as site:
        yield site


ATTEMPT = (HANDLER + "next_rendezvous", NodeState.RUNNING)
JOINED = (HANDLER + "next_rendezvous", NodeState.RUNNING)
COMPLETE = (EXECUTOR + "_mark_rendezvous_complete", NodeState.SUCCEEDED)


def step(name: str) -> tuple[str, NodeState]:
    return (EXECUTOR + name, NodeState.RUNNING)


def without(what: tuple[str, NodeState], steps: list[tuple[str, NodeState]]) -> list[object]:
    return [item for item in steps if item != what]


def test_a_life_from_the_first_round_to_the_end(site: Site, recorder: Recorder) -> None:
    first, second = site.handler(2, 2), site.handler(2, 2)
    site.join(first, second)
    # Its workers fail, and the other follows.
    first_again = site.join(first, second)
    assert {info.world_size for info in first_again} == {2}
    assert first.shutdown()
    assert second.shutdown()
    rounds = [step("_add_to_participants"), JOINED]
    for handler in (first, second):
        steps = without(COMPLETE, recorder.of(handler))
        asked = [item for item in steps if item != step("_add_to_wait_list")]
        closing = (EXECUTOR + "_mark_rendezvous_closed", NodeState.SUCCEEDED)
        assert without(closing, asked) == [  # type: ignore[arg-type]
            ATTEMPT, *rounds,
            ATTEMPT, step("_remove_from_participants"), *rounds,
            (HANDLER + "_close", NodeState.SUCCEEDED),
        ]  # fmt: skip
        assert (closing in asked) == (handler is first)
    every = recorder.of(first) + recorder.of(second)
    assert every.count(COMPLETE) == 2, "once a round, by who leads"
    assert step("_add_to_wait_list") in every, "the first that asked left a round that was running"


def test_an_events_fields_are_torchs(site: Site, recorder: Recorder) -> None:
    alone = site.handler(1, 1)
    site.join(alone)
    alone.shutdown()
    attempt, *_ = recorder.events
    label = alone._node.record.label
    assert attempt == RdzvEvent(
        name=HANDLER + "next_rendezvous",
        run_id="run",
        message=f"The node '{label}' attempts to join the next round of the rendezvous 'run'.",
        hostname="127.0.0.1",
        pid=alone._pid,
        node_state=NodeState.RUNNING,
        local_id=alone._events._local_id,
    )
    ranks = {(event.name, event.rank) for event in recorder.events if event.rank is not None}
    assert ranks == {(HANDLER + "next_rendezvous", 0)}


def test_two_handlers_of_a_process_have_two_local_ids(site: Site) -> None:
    first, second = site.handler(1, 1), site.handler(1, 1)
    assert second._events._local_id == first._events._local_id + 1


def test_a_heartbeat_is_what_torchs_is(site: Site, recorder: Recorder) -> None:
    alone = site.handler(1, 1)
    site.join(alone)
    beat = [EXECUTOR + "_keep_alive", EXECUTOR + "run", HANDLER + "_keep_alive"]

    def beats() -> list[str]:
        names = [event.name for event in recorder.events]
        return names[names.index(HANDLER + "_keep_alive") - 2 :][:3] if beat[2] in names else []

    site.await_that(beats)
    assert beats() == beat


def test_a_late_node_waits_on_the_wait_list_and_then_takes_part(
    site: Site, recorder: Recorder
) -> None:
    early, late = site.handler(1, 2), site.handler(1, 2)
    site.join(early)
    joins = Background(late.next_rendezvous)
    site.await_that(early.num_nodes_waiting)
    site.join(early)
    assert joins.result(20.0).world_size == 2
    site.await_that(lambda: len(recorder.of(late)) == 4)
    assert recorder.of(late) == [
        ATTEMPT, step("_add_to_wait_list"), step("_add_to_participants"), JOINED,
    ]  # fmt: skip


def test_a_spare_waits_on_the_redundancy_list(site: Site, recorder: Recorder) -> None:
    member, spare = site.handler(1, 1), site.handler(1, 1)
    site.join(member)
    waits = Background(spare.next_rendezvous)
    site.await_that(lambda: step("_add_to_redundancy_list") in recorder.of(spare))
    member._leave()
    waits.result(20.0)
    site.await_that(lambda: len(recorder.of(spare)) >= 6)
    assert without(COMPLETE, recorder.of(spare)) == [
        ATTEMPT, step("_add_to_redundancy_list"), step("_remove_from_redundancy_list"),
        step("_add_to_participants"), JOINED,
    ]  # fmt: skip
    assert step("_remove_from_participants") in recorder.of(member)


def test_who_was_lost(site: Site, recorder: Recorder) -> None:
    stays, dies = (site.handler(1, 2) for _ in range(2))
    site.join(stays, dies)
    site.kill(dies)
    site.await_that(stays.num_nodes_waiting)
    lost = (STATE + "sync", NodeState.RUNNING)
    site.await_that(lambda: lost in recorder.of(stays))
    (event,) = [event for event in recorder.events if event.name == STATE + "sync"]
    assert dies._node.record.label in event.message


def test_a_join_that_fails_has_its_trace(site: Site, recorder: Recorder) -> None:
    lonely = site.handler(2, 2, join_timeout=0.5)
    with pytest.raises(RendezvousTimeoutError):
        lonely.next_rendezvous()
    lonely.set_closed()
    with pytest.raises(RendezvousClosedError):
        lonely.next_rendezvous()
    assert until(
        lambda: sum(event.node_state == NodeState.FAILED for event in recorder.events) == 2, 5
    )
    failed = [event for event in recorder.events if event.node_state == NodeState.FAILED]
    assert [event.message.partition(":")[0] for event in failed] == [
        "RendezvousTimeoutError", "RendezvousClosedError",
    ]  # fmt: skip
    for event in failed:
        assert event.name == HANDLER + "next_rendezvous"
        assert event.error_trace.startswith("Traceback")
    assert step("_remove_from_participants") in recorder.of(lonely)


def test_a_heartbeat_that_fails(site: Site, recorder: Recorder) -> None:
    client = site.client()
    alone = site.handler(1, 1, client)
    site.join(alone)
    client.cut()
    failed = (HANDLER + "_keep_alive", NodeState.FAILED)
    site.await_that(lambda: failed in [(it.name, it.node_state) for it in recorder.events])
    client.down = False


def test_no_handler_could_be_created(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="zzz"):
        create_handler("redis", RendezvousParameters("redis", "", "run", 1, 1, zzz="1"))
    (event,) = recorder.events
    assert (event.name, event.node_state) == (
        "dynamic_rendezvous.py:create_handler",
        NodeState.FAILED,
    )
    assert event.message.startswith("ValueError: unknown option 'zzz'")


@pytest.mark.parametrize("harm", ["fails", "hangs"])
def test_a_listener_harms_no_node(
    site: Site,
    recorder: Recorder,
    harm: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handler_module, "_STOP_SECONDS", 0.5)
    recorder.fails = harm == "fails"
    if harm == "hangs":
        recorder.goes_on.clear()
    first, second = site.handler(2, 2), site.handler(2, 2)
    site.join(first, second)
    site.join(first, second)
    assert first.shutdown()
    assert second.shutdown()
    told = [it.getMessage() for it in caplog.records if "listener" in it.getMessage()]
    assert len(told) == (2 if harm == "fails" else 0), "once a node"
    recorder.goes_on.set()


def test_nobody_listens_and_no_thread_runs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOGGER, "handlers", [logging.NullHandler()])
    alone = site.handler(1, 1)
    site.join(alone)
    alone.shutdown()
    assert alone._events._thread is None
    assert alone._watchers == []


class Kept(MetricHandler):
    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def emit(self, metric_data: MetricData) -> None:
        self.kept[metric_data.name] = metric_data.value


@pytest.fixture
def kept() -> Iterator[dict[str, int]]:
    handler = Kept()
    configure(handler, "torchelastic")
    yield handler.kept
    configure(NullMetricHandler(), "torchelastic")


def test_durations_go_to_torchs_metrics(site: Site, kept: dict[str, int]) -> None:
    lonely = site.handler(2, 2, join_timeout=0.5)
    with pytest.raises(RendezvousTimeoutError):
        lonely.next_rendezvous()
    assert until(lambda: "rdzv.next_rendezvous.duration.ms" in kept, 30)
    assert kept["rdzv.next_rendezvous.failure"] == 1
    assert 500 <= kept["rdzv.next_rendezvous.duration.ms"] < 10_000
    pair = site.handler(2, 2), site.handler(2, 2)
    site.join(*pair)
    assert until(lambda: kept["rdzv.next_rendezvous.duration.ms"] < 500, 30)
    assert kept["rdzv.next_rendezvous.success"] == 1
    assert pair[0].shutdown()
    assert kept["rdzv.shutdown.success"] == 1
