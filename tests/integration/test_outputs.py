"""Whoever can write to a store writes what a terminal would execute: no way out passes that on.

The ways out: the lines, tables and JSON of each command that looks; error lines; the page and its
JSON and events; the exporter's metrics and sentences; and of an agent its log, metrics, sentence,
events, the errors that its launcher prints, and the environment of its workers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from torch.distributed.elastic.events import handlers as events
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousParameters
from typer.testing import CliRunner

from rdzv_plugins.cli import _is_for_the_user, app
from rdzv_plugins.dashboard.server import Dashboard
from rdzv_plugins.observe.exporter import Exporter
from rdzv_plugins.observe.history import EXCLUDED, LIST, Archive, Listed, Row, archive_run_id
from rdzv_plugins.observe.page_access import PageAccess
from rdzv_plugins.observe.survey import Survey
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    Exclusion,
    Names,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.round_record import Durations, Member
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.testing.harness import until
from tests import replace
from tests.integration.stores import RunningStore, kind_of, running

HOSTILE = {
    "controls": "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnol\u2066\u200b\ufeff\u2028\x85\r\n"
    "12:00:00 run 'job': all is well\n# HELP x\nx 1\n",
    "long": "y" * 3999,
    "megabyte": "z" * (1 << 20),
    "no date": "9999-99-99T99:99:99",
}
# Where what is longer than anything, or no time, is worth a run of its own.
ONLY_AT = {
    "long": ("note", "unfit", "row", "listed"),
    "megabyte": ("note", "unfit", "host", "row", "listed"),
    "no date": ("row's time", "its time"),
}

# Those whose entry in the list counts as absent.
UNLISTED = {
    "its name, controls", "its time, controls", "its time, no date", "listed, megabyte",
}  # fmt: skip

# What a terminal executes, what ends a line, what turns text: none of it in any text.
BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
# A sentence names a few nodes, each of whose names may be as long as a reason.
MOST_OF_A_LINE = 64 << 10

pytestmark = pytest.mark.timeout(400)

NOW = int(time.time())
RECORD = NodeRecord(
    address="host1", pid=1, beat=1, status=Status.RUN, round=0, min_nodes=1, max_nodes=2,
    interval=0.05, lease=0.15, incarnation="it",  # Nobody waits long for its next heartbeat.
)  # fmt: skip
DOCUMENT = RoundDocument(
    incarnation="it", round=0, phase=Phase.RUNNING, leader="n1", min_nodes=1, max_nodes=2,
    participants=("n1",), master="10.0.0.1:29500", cause=Cause(note="first round"),
)  # fmt: skip
CLOSED = replace(DOCUMENT, phase=Phase.CLOSED, outcome=Outcome.FAILED, expires=True)
AT = "2026-01-01T00:00:00.000+00:00"
ROW = Row(incarnation="it", round=0, phase=Phase.RUNNING, nodes=1, at=AT, reason="first round")
LISTED = Listed(
    run="", incarnation="it", began=AT, at=AT, until="2999-01-01T00:00:00.000+00:00",
    phase=Phase.RUNNING, round=0, nodes=1,
)  # fmt: skip

# Where the text goes: into the document, the record, a row of the history, the entry in the list.
PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "note": lambda it: {"document": replace(DOCUMENT, cause=Cause(note=it))},
    "lost": lambda it: {"document": replace(DOCUMENT, cause=Cause(lost=Names((it,))))},
    "gone": lambda it: {
        "document": replace(DOCUMENT, cause=Cause(lost=Names(("a",)), by_accusation=(("a", it),)))
    },
    "why": lambda it: {
        "document": replace(DOCUMENT, cause=Cause(excluded=Names(("a",)), why=it)),
    },
    "unfit": lambda it: {
        "document": replace(DOCUMENT, cause=Cause(left=Names(("a",)), unfit=(("a", it),))),
        "record": replace(RECORD, status=Status.LEFT, unfit=it),
    },
    "excluded": lambda it: {
        "document": replace(DOCUMENT, excluded=(Exclusion("host1", NOW + 1e6, it),)),
    },
    "restart": lambda it: {"document": replace(DOCUMENT, restart=it)},
    "leader": lambda it: {"document": replace(DOCUMENT, leader=it)},
    "participant": lambda it: {"document": replace(DOCUMENT, participants=("n1", it))},
    "master": lambda it: {"document": replace(DOCUMENT, master=f"{it}:1")},
    "run": lambda it: {"document": replace(DOCUMENT, run=it)},
    "closed": lambda it: {"document": replace(CLOSED, cause=Cause(note=it))},
    "host": lambda it: {"record": replace(RECORD, address=it)},
    "domain": lambda it: {"record": replace(RECORD, domain=it)},
    "run_options": lambda it: {"record": replace(RECORD, run_options=it)},
    "row": lambda it: {"row": replace(ROW, reason=it)},
    "row's time": lambda it: {
        "row": replace(
            ROW,
            at=it,
            lost=(Member(name="a"),),
            seconds=Durations(gathering=1.0),
        )
    },
    "row's length": lambda it: {
        "row": replace(
            ROW, reason=it, lost=(Member(name="a"),), seconds=Durations(gathering=1e12)
        )
    },
    "member": lambda it: {"row": replace(ROW, lost=(Member(name=it),), members=(Member(name=it),))},
    "listed": lambda it: {"listed": replace(LISTED, reason=it)},
    "its end": lambda it: {"listed": replace(LISTED, reason=it, outcome=Outcome.FAILED)},
    "its name": lambda it: {"listed": replace(LISTED, run=it)},
    "its time": lambda it: {"listed": replace(LISTED, began=it, at=it)},
}  # fmt: skip


def write(store: RunningStore, run_id: str, found: dict[str, Any], hostile: str) -> None:
    with closing(store.open(run_id)) as client:
        client.put(NODES_PREFIX + "n1", found.get("record", RECORD).encode())
        client.put(NODES_PREFIX + hostile[:100], RECORD.encode())
        client.put(STATE_KEY, found.get("document", DOCUMENT).encode())
    with closing(store.open(archive_run_id(run_id))) as client:
        client.put("rounds/it/00000000", msgspec.json.encode(ROW))
        client.put("rounds/it/00000001", msgspec.json.encode(found.get("row", ROW)))
    listed = found.get("listed", LISTED)
    with closing(store.open(LIST)) as client:
        entry = listed if listed.run else replace(listed, run=run_id)
        client.put(run_id, msgspec.json.encode(entry))
        client.put(hostile[:100], msgspec.json.encode(replace(entry, run=hostile)))


@dataclass
class Site:
    store: RunningStore
    runs: list[str]

    def rdzv(self, *arguments: str) -> str:
        where = ("-b", self.store.backend, "-e", self.store.endpoint)
        done = CliRunner().invoke(app, [*arguments, *where])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            # What the command prints for it.
            assert isinstance(done.exception, Exception)
            assert _is_for_the_user(done.exception), done.exc_info
            return f"{done.stdout}{done.stderr}{done.exception}"
        return done.stdout + done.stderr

    @property
    def survey(self) -> Survey:
        open = self.store.open
        return Survey(open, lambda run_id: Archive(open, run_id, 600.0))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running(kind_of("redis")) as store:
        runs = []
        for place, of in PLACES.items():
            for kind, text in HOSTILE.items():
                if place in ONLY_AT.get(kind, (place,)):
                    runs.append(f"{place}, {kind}")
                    write(store, runs[-1], of(text), text)
        with closing(store.open(EXCLUDED)) as client:
            held = (Exclusion("host2", None, text) for text in HOSTILE.values() if len(text) < 4000)
            client.put("!all", msgspec.json.encode([*held]))
        yield Site(store, runs)


def texts(data: Any) -> Iterator[str]:
    """All strings of JSON: programs show them."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from texts(value)
    elif isinstance(data, list):
        for item in data:
            yield from texts(item)


def judge(shown: str, *, is_json: bool = False) -> None:
    assert shown.strip()
    lines = shown.splitlines() if not is_json else shown.split("\n")
    for line in lines:
        assert BAD.search(line) is None, ascii(line[:2000])
        # JSON about many runs is longer.
        assert len(line) < MOST_OF_A_LINE or is_json, ascii(line[:500])
        assert not line.startswith("12:00:00 run 'job'"), "a forged line"
        if is_json and line.startswith(("{", "[")):
            for text in texts(json.loads(line)):
                assert BAD.search(text) is None, ascii(text[:2000])
                assert "\n" not in text, ascii(text[:2000])
                assert len(text) < MOST_OF_A_LINE


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=100) as answer:
        return str(answer.read().decode())


def was_read(url: str) -> bool:
    try:
        return bool(page(f"{url}/api/runs"))
    except HTTPError as error:
        if error.code != 503:
            raise
        return False


@contextmanager
def dashboard(site: Site) -> Iterator[str]:
    shown = Dashboard(site.survey, "redis", "127.0.0.1", 0, PageAccess("127.0.0.1", Settings()))
    ends = threading.Event()
    thread = threading.Thread(target=shown.serve, args=(ends.wait,))
    thread.start()
    try:
        yield shown.url
    finally:
        ends.set()
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("command", ["list", "list --json", "excluded", "excluded --json"])
def test_commands_about_all_runs(site: Site, command: str) -> None:
    words = command.split()
    if words[0] == "excluded":
        words.append("--all-runs")
    judge(site.rdzv(*words), is_json="--json" in words)


@pytest.mark.parametrize(
    "as_json", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["text", "json"]
)
def test_commands_about_a_run(site: Site, as_json: bool) -> None:
    for run_id in site.runs:
        of_rows = run_id.startswith(("row", "member"))
        command = ["history" if of_rows else "status", *(["--json"] if as_json else []), run_id]
        judge(site.rdzv(*command), is_json=as_json)


@pytest.mark.parametrize(
    "places",
    [("host", "closed"), pytest.param(tuple(PLACES), marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_commands_that_act(site: Site, places: tuple[str, ...]) -> None:
    """What they refuse, wait for, and say of what they did, and of those whom they name."""
    for place in places:
        run_id, soon = f"acts: {place}", ["--timeout", "0.05", "--force"]
        write(site.store, run_id, PLACES[place](HOSTILE["controls"]), HOSTILE["controls"])
        for command in (
            ["drain", run_id, "nobody"], ["drain", "--dry-run", run_id, "n1"],
            ["drain", *soon, run_id, "n1"], ["resize", *soon[:2], run_id, "1:1"],
            ["exclude", "--dry-run", run_id, "host1"], ["exclude", *soon, run_id, "host1"],
            ["include", *soon[:2], run_id, "host1"], ["restart", *soon[:2], run_id],
            ["accuse", *soon[:2], run_id, "n1"], ["clean", run_id], ["close", run_id],
            ["watch", run_id], ["clean", "--force", run_id],
        ):  # fmt: skip
            judge(site.rdzv(*command))


def test_the_page(site: Site) -> None:
    with dashboard(site) as url:
        judge(page(url))
        assert until(lambda: was_read(url), 100)
        shown = json.loads(page(f"{url}/api/runs"))
        listed = [it["run"] for it in shown["runs"]]
        assert {*site.runs} - {*listed} == UNLISTED
        judge(json.dumps(shown), is_json=True)
        for run_id in listed:
            judge(page(f"{url}/api/runs/{quote(run_id)}"), is_json=True)
            with urllib.request.urlopen(f"{url}/events?run={quote(run_id)}", timeout=100) as stream:
                # The last of the three: store, runs, run.
                seen = [stream.readline().decode() for _ in range(8)]
            assert seen[6] == "event: run\n", ascii(seen[6][:100])
            judge(seen[7].removeprefix("data: "), is_json=True)
        assert page(f"{url}/healthz") == "ok\n"


def test_the_exporter(site: Site) -> None:
    survey = site.survey
    survey.look()
    with closing(Exporter(survey)) as exporter:
        registry = CollectorRegistry()
        registry.register(exporter)
        for shown in (metrics := generate_latest(registry).decode(), exporter.why()):
            judge(shown)
        runs = set(re.findall(r'run="([^"]*)"', metrics))
        assert {*site.runs} - runs == UNLISTED


class Listens(logging.Handler):
    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.append(record.getMessage())


@pytest.mark.parametrize(
    "kind", ["controls", *(pytest.param(it, marks=pytest.mark.soak) for it in ("long", "megabyte"))]
)
def test_an_agent(
    site: Site, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that joins where all of this stands, leads, and learns that the run is closed."""
    caplog.set_level("DEBUG", "rdzv_plugins")
    told: list[str] = []
    logger = logging.getLogger("torchelastic-events-dynamic_rendezvous")
    listens = Listens(told)
    # Torch reads its table once, when it makes the logger.
    monkeypatch.setitem(events._log_handlers, "dynamic_rendezvous", listens)
    monkeypatch.setattr(logger, "handlers", [listens])
    monkeypatch.setattr(logger, "disabled", False)
    text, run_id = HOSTILE[kind], f"agent, {kind}"
    conf = {"metrics_port": "0", "local_addr": "127.0.0.1", "last_call_timeout": "0"}
    params = RendezvousParameters("redis", site.store.endpoint, run_id, 1, 2, **conf)
    handler = create_handler("redis", params)
    assert isinstance(handler, StoreRendezvousHandler)
    with closing(site.store.open(run_id)) as client:
        for number, (place, of) in enumerate(PLACES.items()):
            record = of(text).get("record", replace(RECORD, status=Status.LEFT, unfit=text))
            record = replace(record, interval=5.0, lease=15.0)
            client.put(f"{NODES_PREFIX}x{number}", record.encode())
            client.put(NODES_PREFIX + text[:100] + place, record.encode())
        handler.next_rendezvous()
        judge("".join(f"{name}={it}\n" for name, it in os.environ.items() if "RDZV" in name))
        assert handler._report is not None
        url = handler._report._server.url
        for path in ("/metrics", "/why", "/healthz"):
            judge(page(url + path))
        entry = client.get(STATE_KEY)
        assert entry is not None
        ours = RoundDocument.decode(entry.value)
        closed = replace(
            ours, phase=Phase.CLOSED, outcome=Outcome.FAILED, cause=Cause(note=text[:4000])
        )
        client.put(STATE_KEY, closed.encode())
        assert until(handler.is_closed, 60)
        judge(page(f"{url}/why"))
        with pytest.raises(RendezvousClosedError) as refused:
            handler.next_rendezvous()
        judge(str(refused.value))
        handler.shutdown()
    assert told
    for line in (*caplog.messages, *told):
        judge(line)
    for logged in caplog.records:
        judge(f"{getattr(logged, 'rdzv_cause', '')}.")
    assert sum(map(len, caplog.messages)) < MOST_OF_A_LINE
