"""The page in a real browser, of real runs on a real redis."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from urllib.parse import quote, urlsplit
from zoneinfo import ZoneInfo

import pytest
from msgspec.structs import replace
from selenium.webdriver import Chrome, Keys

from rdzv_plugins.cli import pages
from rdzv_plugins.cli.options import Access
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    NodeRecord,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.round_record import record_of
from rdzv_plugins.testing.harness import until
from tests.integration.browser import browser, complaints
from tests.integration.forked import serving
from tests.integration.jobs import Job
from tests.integration.stores import RunningStore, kind_of, running

HTML = "<img src=/x onerror=document.title='owned'><b>bold</b>"


@contextmanager
def dashboard(store: RunningStore, *options: str, lines: int = 1) -> Iterator[str]:
    """The address of a dashboard of the store, as a person starts and ends it.

    Args:
        lines: that it says at its start; it is the last one's first word.
    """
    command = [sys.executable, "-m", "rdzv_plugins.cli", "dashboard", "--port", "0", *options]
    with serving([*command, *store.where], signal.SIGINT, lines) as said:
        yield said[-1].split()[0]


@pytest.mark.full
def test_ctrl_c_shows_no_traceback(store: RunningStore) -> None:
    """Thirty times, because a signal may come anywhere in an event loop."""
    for _ in range(30):
        with dashboard(store):
            pass


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningStore]:
    with running(kind_of("redis")) as store:
        yield store


@pytest.fixture(scope="module")
def address(shared: RunningStore) -> Iterator[str]:
    with dashboard(shared) as address:
        yield address


@pytest.fixture(scope="module")
def started() -> Iterator[Chrome]:
    with browser() as chrome:
        yield chrome


@pytest.fixture
def chrome(started: Chrome) -> Iterator[Chrome]:
    yield started
    started.get("about:blank")
    complaints(started)


def ask(
    address: str, path: str, host: str | None = None, **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    parts = urlsplit(address)
    assert parts.hostname is not None
    with closing(HTTPConnection(parts.hostname, parts.port, timeout=20)) as connection:
        headers |= {"Host": host} if host is not None else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers.items()), answer.read()


def text(chrome: Chrome, selector: str) -> str:
    found: str = chrome.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(it => it.innerText).join('\\n')",
        selector,
    )
    return found


def number(chrome: Chrome, script: str) -> float:
    found: float = chrome.execute_script(f"return {script}")
    return found


def await_that(condition: Callable[[], bool], seconds: float, chrome: Chrome) -> None:
    assert until(condition, seconds), text(chrome, "body")


def record(number: int, address: str, status: Status = Status.RUN, beat: int = 1) -> NodeRecord:
    return NodeRecord(
        address=address, pid=4000 + number, beat=beat, status=status, round=0, min_nodes=1,
        max_nodes=2000, interval=4.0, lease=12.0, incarnation="it",
    )  # fmt: skip


def write_run(store: RunningStore, run_id: str, records: Mapping[str, NodeRecord]) -> None:
    """A running round of these nodes, as their leader writes it."""
    document = RoundDocument(
        incarnation="it", round=0, phase=Phase.RUNNING, leader=next(iter(records)), min_nodes=1,
        max_nodes=2000, participants=tuple(records), master="10.0.0.1:29500",
        cause=Cause(note="first round"),
    )  # fmt: skip
    with closing(store.open(run_id)) as client:
        client.put_many({NODES_PREFIX + node: it.encode() for node, it in records.items()})
        client.put(STATE_KEY, document.encode())
    Archive(store.open, run_id, 600).note(record_of(document, records))


def test_it_shows_who_was_lost_and_the_next_round(
    shared: RunningStore, address: str, chrome: Chrome, tmp_path: Path
) -> None:
    with closing(Job(tmp_path, shared, nodes="2:3", run_id="job 1%2F of 2")) as job:
        chrome.get(address)
        job.begin("abc")
        # Two may have formed a round before the third came.
        killed, round_ = job.label("b"), job.round()
        running = f"running round {round_}, 3 of 2..3 nodes"
        await_that(lambda: text(chrome, "#sentence") == running, 60, chrome)
        assert number(chrome, "document.querySelectorAll('#grid [data-state=running]').length") == 3
        job.agents["b"].kill()
        job.await_round(round_)
        await_that(lambda: f"lost {killed}" in text(chrome, "#rounds .chip"), 60, chrome)
        assert text(chrome, "#sentence") == f"running round {job.round()}, 2 of 2..3 nodes"
        assert killed in text(chrome, "#others [data-state=lost]")
        assert killed not in text(chrome, "#grid")
        assert number(chrome, "document.querySelectorAll('#forming-plot rect').length") >= 2
        assert text(chrome, "#runs b") == "job 1%2F of 2"
        status, _, body = ask(address, f"/api/runs/{quote('job 1%2F of 2')}")
        assert status == 200
        report: Any = json.loads(body)
        assert [it["name"] for it in report["rounds"][0]["lost"]] == [killed]
        for name in "ac":
            job.finish(name)
        job.await_ends("ac")
        await_that(lambda: text(chrome, "#condition") == "succeeded", 60, chrome)
        assert text(chrome, "#sentence").startswith("succeeded at ")
    assert complaints(chrome) == []


def test_a_thousand_nodes_fit(
    shared: RunningStore,
    address: str,
    chrome: Chrome,
    record_property: Callable[[str, object], None],
) -> None:
    nodes = {f"n{i:04}": record(i, f"gpu-{i:04}.cluster") for i in range(1000)}
    write_run(shared, "large", nodes)
    await_that(lambda: b"large" in ask(address, "/api/runs")[2], 60, chrome)
    began = time.monotonic()
    chrome.get(f"{address}/#large")
    cells = "document.querySelectorAll('#grid .node').length"
    await_that(lambda: number(chrome, cells) == 1000, 60, chrome)
    record_property("seconds until 1,000 nodes are shown", round(time.monotonic() - began, 2))
    record_property("of that to build the grid", number(chrome, BUILD) / 1000)
    assert number(chrome, BUILD) < 1000
    assert number(chrome, "document.documentElement.scrollWidth - innerWidth") <= 0
    grid = "document.getElementById('grid').getBoundingClientRect()"
    assert number(chrome, f"{grid}.height") < number(chrome, "innerHeight") * 0.7
    assert (
        number(chrome, "document.querySelector('#grid .node').getBoundingClientRect().width") > 10
    )
    with closing(shared.open("large")) as client:
        for node in ("n0100", "n0900"):
            client.put(NODES_PREFIX + node, record(1, "gpu-spot", Status.DONE, beat=2).encode())
    await_that(lambda: "2 done" in text(chrome, "#legend"), 10, chrome)
    await_that(lambda: "silent" in text(chrome, "#odd"), 60, chrome)
    assert complaints(chrome) == []


# Milliseconds that a rebuild of the whole grid takes, up to its layout.
BUILD = """(() => {
  const nodes = run.nodes, began = performance.now();
  document.getElementById('grid').replaceChildren();
  showWorld(nodes);
  document.getElementById('grid').getBoundingClientRect();
  return performance.now() - began;
})()"""


@contextmanager
def beating(
    store: RunningStore, run_id: str, records: Mapping[str, NodeRecord]
) -> Iterator[dict[str, NodeRecord]]:
    """Send heartbeats of the nodes that are in what it yields."""
    beats, ended = dict(records), threading.Event()

    def beat() -> None:
        with closing(store.open(run_id)) as client:
            number = 1
            while not ended.wait(1.0):
                number += 1
                entries = {
                    NODES_PREFIX + node: replace(it, beat=number).encode()
                    for node, it in list(beats.items())
                }
                client.put_many(entries)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield beats
    finally:
        ended.set()
        thread.join()


def test_the_counts_of_300_nodes_come_first_then_those_that_need_a_look(
    shared: RunningStore, address: str, chrome: Chrome
) -> None:
    nodes = {f"n{i:03}": record(i, f"gpu-{i:03}.cluster") for i in range(300)}
    write_run(shared, "of 300", nodes)
    with beating(shared, "of 300", nodes) as beats, width(chrome, 400):
        chrome.get(f"{address}/#of%20300")
        await_that(lambda: text(chrome, "#legend").endswith("300 running"), 60, chrome)
        assert text(chrome, "#odd") == ""
        for node in ("n250", "n007"):
            del beats[node]
        await_that(lambda: "2 silent" in text(chrome, "#legend"), 60, chrome)
        assert text(chrome, "#legend").splitlines()[0] == "298 running"
        assert text(chrome, "#odd b").splitlines() == [
            "gpu-007.cluster[4007]",
            "gpu-250.cluster[4250]",
        ]
        # Below them, all in rank order.
        tops = [top(chrome, it) for it in ("#legend", "#odd", "#grid")]
        assert tops == sorted(tops)
        assert number(chrome, "document.querySelectorAll('#grid .node').length") == 300
        assert number(chrome, "document.documentElement.scrollWidth") <= 400
    assert complaints(chrome) == []


def top(chrome: Chrome, selector: str) -> float:
    return number(chrome, f"document.querySelector('{selector}').getBoundingClientRect().top")


@contextmanager
def width(chrome: Chrome, pixels: int) -> Iterator[None]:
    size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@contextmanager
def in_zone(chrome: Chrome, name: str) -> Iterator[None]:
    chrome.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": name})
    try:
        yield
    finally:
        chrome.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


def test_runs_are_searched_and_filtered(store: RunningStore, chrome: Chrome) -> None:
    with dashboard(store) as address:
        for i in range(12):
            write_run(store, f"{'eval' if i % 3 else 'train'}-{i}", {"a": record(i, f"host{i}")})
        with beating(store, "train-0", {"a": record(0, "host0")}):
            chrome.get(address)
            ids = "#runs b"
            await_that(lambda: text(chrome, "#count") == "12", 60, chrome)
            chrome.find_element("id", "search").send_keys("TRAIN")
            assert sorted(text(chrome, ids).split()) == ["train-0", "train-3", "train-6", "train-9"]
            assert text(chrome, "#count") == "4 of 12"
            # The others send no heartbeat.
            await_that(lambda: "dead 11" in text(chrome, "#filters"), 40, chrome)
            dead = "[data-condition=dead]"
            chrome.find_element("css selector", f"#filters {dead}").click()
            assert sorted(text(chrome, ids).split()) == ["train-3", "train-6", "train-9"]
            chrome.find_element("id", "search").send_keys(" 9")
            assert text(chrome, ids) == "train-9"
            chrome.find_element("id", "search").send_keys("9")
            assert text(chrome, "#unmatched") == "No run matches."
            chrome.find_element("id", "search").send_keys(Keys.CONTROL + "a", Keys.DELETE)
            chrome.find_element("css selector", "#filters button").click()
            assert text(chrome, "#count") == "12"
        assert complaints(chrome) == []


TIME = re.compile(r"\d\d:\d\d:\d\d(?:\.\d+)?(.{0,10})")


def test_times_are_utc_unless_switched_and_say_so(
    shared: RunningStore, address: str, chrome: Chrome
) -> None:
    write_run(shared, "zoned", {"a": record(1, "host1")})
    (row,) = Archive(shared.open, "zoned", 600).rows()
    with in_zone(chrome, "Asia/Kolkata"):
        chrome.get(f"{address}/#zoned")
        await_that(lambda: text(chrome, "#rounds") != "", 60, chrome)
        utc = f"{row.at[:10]} {row.at[11:19]} UTC"
        assert utc in text(chrome, "#rounds")
        assert utc in text(chrome, "#facts")
        zones = TIME.findall(text(chrome, "body"))
        assert len(zones) >= 3
        assert all(zone.startswith(" UTC") and "+" not in zone for zone in zones)
        chrome.find_element("id", "zone").click()
        there = datetime.fromisoformat(row.at).astimezone(ZoneInfo("Asia/Kolkata"))
        local = f"{there:%Y-%m-%d %H:%M:%S} UTC+05:30"
        assert local in text(chrome, "#rounds")
        assert local in text(chrome, "#facts")
        assert "UTC+05:30" in text(chrome, "#live")
        # It is kept.
        chrome.refresh()
        await_that(lambda: local in text(chrome, "#rounds"), 60, chrome)
        chrome.find_element("id", "zone").click()
        await_that(lambda: utc in text(chrome, "#rounds"), 60, chrome)
    assert complaints(chrome) == []


def test_a_forming_round_has_a_beginning_and_its_last_call_an_end(
    shared: RunningStore, address: str, chrome: Chrome, tmp_path: Path
) -> None:
    with closing(Job(tmp_path, shared, nodes="2:3", run_id="forms", last_call_timeout=40)) as job:
        job.start_at("a")
        chrome.get(f"{address}/#{job.run_id}")
        await_that(lambda: "forming since" in text(chrome, "#facts"), 60, chrome)
        assert "last call" not in text(chrome, "#facts")
        await_that(lambda: text(chrome, "#legend") == "1 joining", 60, chrome)
        job.start_at("b")
        await_that(lambda: "last call until" in text(chrome, "#facts"), 60, chrome)
        report: Any = json.loads(ask(address, f"/api/runs/{job.run_id}")[2])
        since, until = (datetime.fromisoformat(report[it]) for it in ("since", "last_call_until"))
        assert 30 < (until - since).total_seconds() < 60
        shown = text(chrome, "#facts").splitlines()
        for name, at in (("forming since", since), ("last call until", until)):
            assert shown[shown.index(name) + 1] == f"{at:%Y-%m-%d %H:%M:%S} UTC"
        # The one word for each node's state, as the command and the metrics have it.
        assert text(chrome, "#legend") == "2 joining"
        assert [node["state"] for node in report["nodes"]] == ["joining", "joining"]
        job.start_at("c")
        job.await_begun("abc")
        await_that(lambda: "running since" in text(chrome, "#facts"), 60, chrome)
        assert "last call" not in text(chrome, "#facts")
        assert text(chrome, "#legend") == "3 running"
        for name in "abc":
            job.finish(name)
        job.await_ends("abc")
    assert complaints(chrome) == []


def test_why_has_room_on_a_phone(shared: RunningStore, address: str, chrome: Chrome) -> None:
    write_run(shared, "narrow", {"a": record(1, "host1")})
    with width(chrome, 400):
        chrome.get(f"{address}/#narrow")
        await_that(lambda: "first round" in text(chrome, "#rounds"), 60, chrome)
        why = "document.querySelector('#rounds td:last-child .why').getBoundingClientRect()"
        assert number(chrome, f"{why}.height") < 30
        assert number(chrome, f"{why}.right") < 400
        assert number(chrome, "document.documentElement.scrollWidth") <= 400
        history = "document.getElementById('history')"
        assert number(chrome, f"{history}.scrollWidth - {history}.clientWidth") <= 0
    assert complaints(chrome) == []


def test_the_number_of_nodes_falls_when_one_is_lost(
    shared: RunningStore, address: str, chrome: Chrome, tmp_path: Path
) -> None:
    job = Job(tmp_path, shared, nodes="3:3", run_id="falls")

    def sizes() -> list[int]:
        status, _, body = ask(address, f"/api/runs/{job.run_id}")
        if status == 404:
            return []  # It has just begun.
        report: Any = json.loads(body)
        times = [at for at, _ in report["sizes"]]
        assert times == sorted(times)
        return [size for _, size in report["sizes"]]

    def lowest() -> float:
        """Where the line has been lowest, in nodes."""
        return number(chrome, LOWEST)

    try:
        job.begin("abc")
        chrome.get(f"{address}/#{job.run_id}")
        # The leader writes the round a second after it began.
        await_that(lambda: len(job.archive.rows()) == 1, 60, chrome)
        await_that(lambda: sizes()[-1:] == [3], 60, chrome)
        await_that(lambda: lowest() == 3, 60, chrome)
        job.agents["b"].kill()
        # No round can run without it.
        await_that(lambda: sizes()[-1:] == [2], 60, chrome)
        await_that(lambda: lowest() == 2, 60, chrome)
        assert len(job.archive.rows()) == 1
        job.start_at("d")
        job.await_begun("acd")
        await_that(lambda: sizes() == [3, 2, 3], 60, chrome)
        # One that is started now knows it of the rounds, once the leader has written the second.
        await_that(lambda: len(job.archive.rows()) == 2, 60, chrome)
        with dashboard(shared) as later:
            report: Any = json.loads(ask(later, f"/api/runs/{job.run_id}")[2])
        assert [size for _, size in report["sizes"]] == [3, 2, 3]
        for name in "acd":
            job.finish(name)
        job.await_ends("acd")
        await_that(lambda: sizes() == [3, 2, 3, 0], 60, chrome)
    finally:
        job.close()
    assert complaints(chrome) == []


# By the axis' labels, which stand 4 pixels below their line.
LOWEST = """(() => {
  const svg = document.getElementById('sizes-plot');
  const path = svg.querySelector('.step')?.getAttribute('d');
  if (path === undefined) return null;
  const labels = [...svg.querySelectorAll('text')].filter(it => /^[0-9]+$/.test(it.textContent));
  const heights = labels.map(it => Number(it.getAttribute('y')) - 4);
  const unit = (heights[0] - heights[1]) / (labels[1].textContent - labels[0].textContent);
  const lines = [...path.matchAll(/[V,]([0-9.]+)/g)].map(it => Number(it[1]));
  return Math.round(100 * (heights[0] - Math.max(...lines)) / unit) / 100;
})()"""


def test_names_are_shown_as_text(shared: RunningStore, address: str, chrome: Chrome) -> None:
    # A host's name cannot be that: such a record counts as absent.
    nodes = {"a": replace(record(1, "plain"), unfit=HTML), "b": record(2, HTML)}
    write_run(shared, HTML, nodes)
    chrome.get(f"{address}/#{quote(HTML)}")
    await_that(lambda: HTML in text(chrome, "#name"), 60, chrome)
    await_that(lambda: HTML in text(chrome, "#grid"), 60, chrome)
    assert HTML in text(chrome, "#runs")
    assert number(chrome, "document.querySelectorAll('body img').length") == 1  # The page's own.
    assert number(chrome, "document.querySelectorAll('#grid b b, nav b b, h2 b').length") == 0
    assert chrome.title != "owned"
    assert complaints(chrome) == []


def test_an_outage_shows_and_ends(store: RunningStore, chrome: Chrome) -> None:
    with dashboard(store) as address:
        _show_an_outage(store, address, chrome)


def _show_an_outage(store: RunningStore, address: str, chrome: Chrome) -> None:
    chrome.get(address)
    await_that(lambda: "no runs" in text(chrome, "#nothing"), 60, chrome)
    write_run(store, "job", {"a": record(1, "host1")})
    await_that(lambda: "host1" in text(chrome, "#grid"), 60, chrome)
    assert store.server is not None
    store.server.nodes[0].kill()
    await_that(lambda: "store away since" in text(chrome, "#away:not([hidden])"), 60, chrome)
    assert ask(address, "/healthz")[0] == 200
    status, _, body = ask(address, "/api/runs")
    assert status == 200
    assert json.loads(body)["away"]["error"].startswith("redis at ")
    assert "host1" in text(chrome, "#grid")
    store.server.nodes[0].start(empty=True)
    await_that(lambda: text(chrome, "#away:not([hidden])") == "", 60, chrome)
    write_run(store, "other", {"a": record(1, "host2")})
    await_that(lambda: "other" in text(chrome, "#runs"), 60, chrome)


def test_it_refuses_foreign_hosts_and_allows_its_own_files_only(address: str) -> None:
    port = urlsplit(address).port
    for host in (f"localhost:{port}", f"127.0.0.1:{port}"):
        assert ask(address, "/", host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "a@b"):
        assert ask(address, "/api/runs", host)[0] == 400
    status, headers, page = ask(address, "/")
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy["script-src"], policy["style-src"], policy["connect-src"]} == {"'self'"}
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    for path in set(re.findall(rb'(?:src|href)="([^"]+)"', page)):
        assert path.startswith(b"/")
        status, headers, content = ask(address, path.decode())
        assert status == 200
        assert content.replace(b"http://www.w3.org/2000/svg", b"").find(b"http") == -1
        assert "content-security-policy" in headers
    assert ask(address, "/api/runs/none-such")[0] == 404


def test_it_answers_beside_more_clients_than_it_has_room_for(address: str) -> None:
    """They say nothing, and may have no token."""
    parts = urlsplit(address)
    with ExitStack() as stack:
        for _ in range(250):
            stack.enter_context(closing(socket.create_connection((parts.hostname, parts.port), 20)))
        for path in ("/healthz", "/api/runs"):
            assert ask(address, path)[0] == 200


def test_a_dashboard_that_others_reach_shows_a_token_and_asks_for_it(
    shared: RunningStore, chrome: Chrome
) -> None:
    write_run(shared, "guarded", {"a": record(0, "host1")})
    # Loopback, as nobody can tell from its spelling.
    with dashboard(shared, "--host", "127.1", lines=2) as shown:
        link = urlsplit(shown)
        address, token = f"http://127.0.0.1:{link.port}", link.query.removeprefix("token=")
        assert len(token) >= 32
        for path in ("/", "/page.js", "/api/runs", "/api/runs/guarded", "/events", "/?token=x"):
            status, headers, said = ask(address, path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer"), path
            assert b"guarded" not in said
        assert ask(address, "/healthz") == (200, ANY, b"ok\n")
        for sent, status in ((token, 200), (f"{token}x", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {sent}"}
            assert ask(address, "/api/runs", **headers)[0] == status
        status, headers, _ = ask(address, f"/?token={token}")
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert "HttpOnly; Path=/; SameSite=lax" in cookie
        assert token not in cookie
        assert ask(address, "/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
        chrome.get(f"{address}/?token={token}#guarded")
        await_that(lambda: "guarded" in text(chrome, "#name"), 60, chrome)
        assert chrome.current_url == f"{address}/#guarded"


def test_a_taken_port_and_a_bad_endpoint_are_one_line(shared: RunningStore) -> None:
    taken = shared.address[1]
    with pytest.raises(ValueError, match=rf"^cannot listen at 127.0.0.1:{taken} \(.*--port$"):
        pages.dashboard(Access("redis", shared.endpoint), port=taken)
    with pytest.raises(ValueError, match=r"^redis at 'ftp://host': .*allowed"):
        pages.dashboard(Access("redis", "ftp://host"))


def test_without_its_libraries_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ValueError, match=r'pip install "rdzv-plugins\[dashboard\]"$'):
        pages.dashboard(Access())
