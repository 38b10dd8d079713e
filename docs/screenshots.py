"""Take the pictures in docs/ of real runs: python -m docs.screenshots

dashboard.png is of a headless Chromium, status.svg and watch.svg of a terminal.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from tests.integration.browser import browser
from tests.integration.jobs import Job
from tests.integration.stores import KINDS, RunningStore, running

HERE = Path(__file__).parent
COLUMNS = 104
RDZV = [sys.executable, "-W", "ignore", "-m", "rdzv_plugins.cli"]


def main() -> None:
    with running(KINDS[0]) as store, tempfile.TemporaryDirectory() as folder:
        take(store, Path(folder))


def take(store: RunningStore, folder: Path) -> None:
    done = Job(folder / "done", store, nodes="2", run_id="vision-ablation-12", closed_ttl=3)
    short = Job(folder / "short", store, nodes="3", run_id="reward-model")
    job = Job(folder / "job", store, nodes="3:8", run_id="llama-pretrain", last_call_timeout=2)
    served = subprocess.Popen(
        [*RDZV, "dashboard", "-e", store.endpoint, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert served.stdout is not None
        url = served.stdout.readline().split()[0]
        done.begin("ab")
        for name in "ab":
            done.finish(name)
        done.await_ends("ab")
        for name in "ab":
            short.start_at(name)
        job.begin("abcdefg")
        await_row(job)
        job.agents["c"].kill()
        job.await_begun("abdefg", after=time.monotonic())
        job.agents["e"].signal_workers(signal.SIGKILL)
        job.await_begun("abdefg", after=time.monotonic())
        job.start_at("h")
        job.await_begun("abdefgh", after=time.monotonic())
        job.agents["f"].signal(signal.SIGTERM)
        job.await_begun("abdegh", after=time.monotonic())
        await_row(job)
        job.agents["b"].kill()
        job.await_begun("adegh", after=time.monotonic())
        time.sleep(3)
        (HERE / "dashboard.png").write_bytes(page(f"{url}/#{job.run_id}"))
        reach = ["-e", store.endpoint, "-i", job.run_id]
        for command in ("status", "watch"):
            lines = shown([*RDZV, command, *reach], stop_after=4 if command == "watch" else None)
            picture(f"rdzv {command} -i {job.run_id}", lines, HERE / f"{command}.svg")
    finally:
        served.terminate()
        served.wait()
        for it in (job, short, done):
            it.close()


def await_row(job: Job) -> None:
    """Wait until the round that runs is in the history: its leader may be killed next."""
    job.await_cause(job.round() - 1)


def page(url: str) -> bytes:
    """The whole page, however high it is."""
    with browser(width=1280, height=900) as chrome:
        chrome.get(url)
        time.sleep(3)
        height = chrome.execute_script("return document.documentElement.scrollHeight + 8")
        metrics = {"width": 1280, "height": height, "deviceScaleFactor": 1.2, "mobile": False}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        time.sleep(1.5)
        return chrome.get_screenshot_as_png()


def shown(command: list[str], stop_after: float | None = None) -> str:
    """What a command shows last on a terminal; it ends so many seconds after its first frame."""
    leader, follower = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": "60", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdout=follower, stderr=follower, stdin=follower,
        env=os.environ | size, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    output, began = b"", float("inf")
    while process.poll() is None or select.select([leader], [], [], 0.2)[0]:
        if stop_after is not None and time.monotonic() - began > stop_after:
            process.terminate()
            process.wait()
            break
        if select.select([leader], [], [], 0.2)[0]:
            try:
                output += os.read(leader, 65536)
            except OSError:  # Its end, on Linux.
                break
            if output.count(b"\n") > 3:
                began = min(began, time.monotonic())
    process.wait()
    os.close(leader)
    # A live display moves up and writes each frame over the one before.
    frames = re.split(r"(?:\x1b\[1A\x1b\[2K)+|\x1b\[2J", output.decode())
    frame = [frame for frame in frames if frame.count("\n") > 3][-1]
    return re.sub(r"\x1b\[\?25[lh]", "", frame).replace("\r", "").rstrip("\n")


def picture(command: str, output: str, path: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi(output))
    picture = console.export_svg(title=command, theme=DIMMED_MONOKAI)
    # The fonts of a server elsewhere.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    path.write_text(picture.replace("Fira Code", "DejaVu Sans Mono"), encoding="utf-8")


if __name__ == "__main__":
    main()
