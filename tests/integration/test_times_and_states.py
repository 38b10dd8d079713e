"""What commands, exporter and page say of a killed node: a time that was measured, and one word."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.testing.harness import until
from tests.integration.jobs import Job
from tests.integration.stores import RunningStore, kind_of, running
from tests.integration.test_dashboard import ask, dashboard
from tests.integration.test_exporter import exporter, page, scrape

RDZV = [sys.executable, "-m", "rdzv_plugins.cli"]


@pytest.fixture(scope="module")
def redis() -> Iterator[RunningStore]:
    with running(kind_of("redis")) as store:
        yield store


def status(job: Job, *more: str) -> str:
    """In this process, without the seconds that imports take."""
    where = ("-b", job.backend, "-e", job.endpoint, "-i", job.run_id)
    shown = CliRunner().invoke(app, ["status", *where, *more], terminal_width=300)
    assert shown.stderr == ""
    return shown.stdout


def row(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith("│") and f" {name} " in line]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_killed_node_and_the_last_call_after_it(redis: RunningStore, tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        redis,
        nodes="2:3",
        run_id="killed",
        keep_alive_interval=1,
        keep_alive_max_attempt=3,
        last_call_timeout=60,
        replacement_timeout=60,
    )
    with exporter(redis) as exported, dashboard(redis) as served:
        try:
            job.begin("abc")
            lost, here = job.label("b"), [job.label("a"), job.label("c")]
            before, first = time.time(), json.loads(status(job, "--json"))
            assert {node["state"] for node in first["nodes"]} == {"running"}
            assert all(abs(at(node["last_beat"]) - before) < 30 for node in first["nodes"])
            last_seen = min(at(node["last_beat"]) for node in first["nodes"])
            job.agents["b"].kill()
            killed = time.time()

            def data() -> Any:
                return json.loads(status(job, "--json"))

            # It is silent before it is lost; its last heartbeat stays where it was.
            assert until(lambda: state_of(data(), lost) in ("silent", "lost"), 30)
            assert until(lambda: data()["phase"] == "forming" and data()["last_call_until"], 30)
            found, now = data(), time.time()
            assert found["states"] == {"joining": 2, "lost": 1}
            assert re.fullmatch(
                r"enough nodes \(2 of 2\.\.3\); lost \S+; forming since [0-9:]{8} UTC; "
                r"\d\d s more for a third, until [0-9:]{8} UTC",
                found["sentence"],
            )
            assert killed < at(found["since"]) + 1 < at(found["last_call_until"])
            assert at(found["since"]) + 40 < at(found["last_call_until"]) < now + 61
            (beat,) = [node["last_beat"] for node in found["nodes"] if node["name"] == lost]
            assert last_seen <= at(beat) <= killed
            text = status(job)
            assert re.search(r"3 nodes at [0-9:]{8} UTC: 1 lost, 2 joining", text)
            assert row(text, lost)[2:4] == ["lost", f"{beat[11:19]} UTC"]
            assert [row(text, name)[2] for name in here] == ["joining"] * 2

            # The exporter and the page have watched for longer, and say the same.
            assert until(lambda: scrape(exported).get(("rdzv_nodes", "killed", "lost")) == 1, 30)
            metrics = scrape(exported)
            assert metrics["rdzv_nodes", "killed", "joining"] == 2
            began = metrics["rdzv_phase_began_timestamp_seconds", "killed"]
            assert began == at(found["since"])
            ends = metrics["rdzv_last_call_ends_timestamp_seconds", "killed"]
            assert abs(ends - at(found["last_call_until"])) <= 1
            newest = metrics["rdzv_last_heartbeat_timestamp_seconds", "killed"]
            assert killed < newest < time.time() + 1
            assert "more for a third, until" in page(f"{exported}/why")
            seen = json.loads(ask(served, f"/api/runs/{quote(job.run_id)}")[2])
            assert state_of(seen, lost) == "lost"
            assert seen["since"] == found["since"]
        finally:
            job.close()


def at(iso: str) -> float:
    time_ = datetime.fromisoformat(iso)
    assert time_.tzinfo == UTC
    return time_.timestamp()


def state_of(report: Any, name: str) -> str:
    (state,) = [node["state"] for node in report["nodes"] if node["name"] == name]
    return str(state)


def test_a_terminal_of_24_rows(redis: RunningStore, tmp_path: Path) -> None:
    job = Job(tmp_path, redis, nodes="2:3", run_id="watched")
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [*RDZV, "watch", "-b", job.backend, "-e", job.endpoint, "-i", job.run_id]
    shown: list[bytes] = []
    try:
        job.begin("abc")
        with subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "24"},
        ) as watching:
            os.close(follower)
            try:

                def screen() -> str:
                    with suppress(OSError):
                        shown.append(os.read(leader, 1 << 16))
                    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", b"".join(shown))
                    return text.decode(errors="replace").rpartition("run 'watched':")[2]

                assert until(lambda: "3 nodes at" in screen() and "running" in screen(), 30)
                before = job.round()
                job.agents["b"].kill()
                job.await_round(before)
                words = ("why this round: lost 127.0.0.2", "2 of 2..3 nodes", "2 running")
                assert until(lambda: all(word in screen() for word in words), 30), screen()
            finally:
                watching.terminate()
    finally:
        os.close(leader)
        job.close()
