"""torch's events of a node's life: real handlers over the in-memory store, and who listens."""

from __future__ import annotations

import logging
import os
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

from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.testing.harness import until
from tests.handlers.site import Site
from tests.handlers.site import site as make_site

LOGGER = logging.getLogger("torchelastic-events-dynamic_rendezvous")

HANDLER = "dynamic_rendezvous.py:DynamicRendezvousHandler."


class Recorder(logging.Handler):
    """Keeps what it is given; fails where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[RdzvEvent] = []
        self.fails = False

    def handle(self, record: logging.LogRecord) -> bool:
        if self.fails:
            raise RuntimeError("the platform's handler failed")
        self.events.append(RdzvEvent.deserialize(record.getMessage()))
        return True

    def of(self, handler: StoreRendezvousHandler) -> list[tuple[str, NodeState]]:
        """What this handler recorded."""
        number = handler._events._local_id
        return [(it.name, it.node_state) for it in self.events if it.local_id == number]


@contextmanager
def listening(to: str) -> Iterator[Recorder]:
    """As a platform listens: torch's table of handlers has no public name."""
    recorder = Recorder()
    before = torchs._log_handlers["dynamic_rendezvous"]
    if to == "table":
        torchs._log_handlers["dynamic_rendezvous"] = recorder
    # torch reads the table when it makes the logger, and never again.
    LOGGER.addHandler(recorder)
    LOGGER.disabled = False
    try:
        yield recorder
    finally:
        torchs._log_handlers["dynamic_rendezvous"] = before
        LOGGER.removeHandler(recorder)
        LOGGER.disabled = True


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
CLOSED = (HANDLER + "_close", NodeState.SUCCEEDED)


def test_a_life_from_the_first_round_to_the_end(site: Site, recorder: Recorder) -> None:
    first, second = site.handler(2, 2), site.handler(2, 2)
    site.join(first, second)
    # Its workers fail, and the other follows.
    site.join(first, second)
    assert first.shutdown()
    assert second.shutdown()
    for handler in (first, second):
        assert recorder.of(handler) == [ATTEMPT, JOINED, ATTEMPT, JOINED, CLOSED]


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
        pid=os.getpid(),
        node_state=NodeState.RUNNING,
        local_id=alone._events._local_id,
    )
    ranks = {(event.name, event.rank) for event in recorder.events if event.rank is not None}
    assert ranks == {(HANDLER + "next_rendezvous", 0)}


def test_two_handlers_of_a_process_have_two_local_ids(site: Site) -> None:
    first, second = site.handler(1, 1), site.handler(1, 1)
    assert second._events._local_id == first._events._local_id + 1


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


def test_no_handler_could_be_created(recorder: Recorder) -> None:
    with pytest.raises(ValueError, match="zzz"):
        create_handler("redis", RendezvousParameters("redis", "", "run", 1, 1, zzz="1"))
    (event,) = recorder.events
    assert (event.name, event.node_state) == (
        "dynamic_rendezvous.py:create_handler",
        NodeState.FAILED,
    )
    assert event.message.startswith("ValueError: unknown option 'zzz'")


def test_a_listener_that_fails_harms_no_node(
    site: Site, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.fails = True
    alone = site.handler(1, 1)
    site.join(alone)
    assert alone.shutdown()
    assert "a listener to torch's events or metrics failed" in caplog.text


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
    kept.clear()
    site.join(*pair)
    assert 0 <= kept["rdzv.next_rendezvous.duration.ms"] < 10_000
    assert kept["rdzv.next_rendezvous.success"] == 1
    assert pair[0].shutdown()
    assert kept["rdzv.shutdown.success"] == 1
