"""Every command of the README, as it is written there.

Run as a program in an empty folder, in a network of its own, where port 6379 is free, it follows a
chapter to the letter, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.observe.history import list_runs
from tests import Measure
from tests.integration.hosts import bring_up_loopback, in_namespaces
from tests.integration.pages import DOCS, PATIENCE, README, Terminal, blocks, seen
from tests.integration.stores import RunningStore
from tests.integration.wheels import pip

ROOT = README.parent


# To which the README leads a reader whose job trains, or who has no server.
COMMANDS = DOCS / "commands.md"

SERVE = "rdzv serve --port 6379\n"

CLEAN = "rdzv clean -i job2"

# The line of the job on the quorum, and what differs in each terminal.
ON_QUORUM, LOCAL_ADDR = "rdzv run --local-addr", "--local-addr=127.0.0.1 "
ON_REDIS = "rdzv run --rdzv-backend=redis"

TRAIN = (README.parent / "examples" / "train.py").read_text()
STEPS = int(re.findall(r"^STEPS = (.*)$", TRAIN, re.MULTILINE)[0])


def commands() -> list[str]:
    """The blocks of commands of the README and of its page of commands."""
    found = [*blocks(README), *blocks(COMMANDS)]
    return [text for language, text in found if not language]


def block(beginning: str) -> str:
    """The only block that begins so."""
    (found,) = (text for text in commands() if text.startswith(beginning))
    return found


class Terminals:
    """The reader's, one after the other; a context manager that ends what is left."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._opened: list[Terminal] = []

    def __enter__(self) -> Terminals:
        return self

    def __exit__(self, *_: object) -> None:
        for terminal in self._opened:
            terminal.end()

    def start(self, *digits: int) -> list[Terminal]:
        """Start an agent for each; the digit is the last one of its --local-addr, if it has one."""
        started = []
        for digit in digits:
            command = self._command.replace(LOCAL_ADDR, f"{LOCAL_ADDR.rstrip('1 ')}{digit} ")
            started.append(Terminal(command))
        self._opened += started
        return started

    def see(self, condition: Callable[[], bool]) -> None:
        seen(condition, *self._opened)

    def see_a_world_of(self, size: int, *terminals: Terminal, after: int = 0) -> Terminal:
        """Wait until these train together; the one that prints, which is rank 0's."""

        def printing() -> list[Terminal]:
            return [it for it in terminals if it.is_in_a_world_of(size, after)()]

        self.see(lambda: bool(printing()))
        return printing()[0]

    @property
    def reached(self) -> int:
        return max(step for it in self._opened for step, _ in it.steps)


def ended(*terminals: Terminal) -> list[int]:
    """Wait for their ends; their exit statuses."""
    seen(lambda: None not in [it.process.poll() for it in terminals], *terminals)
    return [it.process.returncode for it in terminals]


def interrupt(*terminals: Terminal) -> None:
    """Ctrl-C in one after the other."""
    for terminal in terminals:
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGINT)
    ended(*terminals)


def kill(*terminals: Terminal) -> float:
    """``kill -9`` of the agents; the time of it."""
    for terminal in terminals:
        os.kill(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait()
    return time.monotonic()


def example() -> dict[str, object]:
    """The first hour, once.

    Nothing depends on how fast the commands on the run are: it trains for longer than a test may
    take, until Ctrl-C.
    """
    export, lines = of_commands("quorum")
    early = {line: ask(export, line) for line in lines if "status" in line or "history" in line}
    Path("train.py").write_text(TRAIN)
    with Terminals(block(ON_QUORUM)) as terminals:
        agents = dict(zip((3, 1, 2), terminals.start(3, 1, 2), strict=True))
        first = terminals.see_a_world_of(3, *agents.values())
        digit = next(it for it, agent in agents.items() if agent is first)
        before, killed = terminals.reached, kill(agents.pop(digit))
        terminals.see_a_world_of(2, *agents.values(), after=before)
        alone = time.monotonic() - killed
        (agents[digit],) = terminals.start(digit)
        terminals.see_a_world_of(3, *agents.values(), after=before)
        asked = {line: ask(export, line) for line in lines if "close" not in line}
        interrupt(*agents.values())
        reached = nearly_done()
        last = terminals.start(1, 2, 3)
        statuses = ended(*last)
        late = {line: ask(export, line) for line in early}
        return {
            "early": early, "asked": asked, "late": late, "alone": alone,
            "reached": reached, "statuses": statuses, "last": terminals.reached,
        }  # fmt: skip


def again() -> dict[str, object]:
    """What a reader does who kills two, and then goes through the hour anew, at once."""
    export, lines = of_commands("quorum")
    Path("train.py").write_text(TRAIN)
    with Terminals(block(ON_QUORUM)) as terminals:
        agents = dict(zip((1, 2, 3), terminals.start(1, 2, 3), strict=True))
        terminals.see_a_world_of(3, *agents.values())
        # Two are killed, and the third is started again with them.
        kill(agents[1], agents[3])
        before = terminals.reached
        interrupt(agents[2])
        agents = dict(zip((1, 2, 3), terminals.start(1, 2, 3), strict=True))
        terminals.see_a_world_of(3, *agents.values(), after=before)
        interrupt(*agents.values())
        nearly_done()
        statuses = ended(*terminals.start(1, 2, 3))

        # Again from the top: whoever comes when the others have ended is alone.
        nothing_left = terminals.start(2, 1, 3)
        terminals.see(lambda: any("trained to step" in it.shown for it in nothing_left))
        interrupt(*nothing_left)
        Path("job1.pt").unlink()
        anew = terminals.start(1, 2, 3)
        terminals.see_a_world_of(3, *anew)
        asked = {line: ask(export, line) for line in lines if "close" in line}
        for terminal in anew:
            interrupt(terminal)
        return {
            "statuses": statuses, "asked": asked,
            "nothing left": "".join(it.shown for it in nothing_left),
            "anew": min(step for it in anew for step, _ in it.steps),
        }  # fmt: skip


def on_a_server() -> dict[str, object]:
    """The same on a server: two terminals, of which one is killed; then again, at once."""
    server = Terminal(SERVE)
    export, lines = of_commands("redis")
    Path("train.py").write_text(TRAIN)
    try:
        with Terminals(block(ON_REDIS)) as terminals:
            agents = terminals.start(1, 2)
            first = terminals.see_a_world_of(2, *agents)
            before = terminals.reached
            kill(first)
            agents.remove(first)
            terminals.see_a_world_of(1, *agents, after=before)
            agents += terminals.start(1)
            terminals.see_a_world_of(2, *agents, after=before)
            asked = {line: ask(export, line) for line in lines if line != CLEAN}
            served = ask(export, SERVE)
            interrupt(*agents)
            nearly_done("job2.pt")
            statuses = ended(*terminals.start(1, 2))
            (closed,) = terminals.start(1)
            statuses += ended(closed)
            asked[CLEAN] = ask(export, CLEAN)
            (nothing_left,) = terminals.start(1)
            statuses += ended(nothing_left)
            return {
                "asked": asked, "served": served, "statuses": statuses, "closed": closed.shown,
                "nothing left": nothing_left.shown,
            }  # fmt: skip
    finally:
        server.end()


def of_commands(backend: str) -> tuple[str, list[str]]:
    """The export and the lines under "Looking at a run", without their comments."""
    export, *lines = block(f"export RDZV_BACKEND={backend}").splitlines()
    return export, [line.partition(" # ")[0].strip() for line in lines]


def nearly_done(checkpoint: str = "job1.pt") -> int:
    """Put it some seconds before the end, as if it had trained on; returns the step it had."""
    import torch

    saved = torch.load(checkpoint)
    reached = int(saved["step"])
    torch.save({**saved, "step": STEPS - 200}, checkpoint)
    return reached


def ask(export: str, line: str) -> tuple[int, str]:
    """The exit status and the output of a line under "Looking at a run"."""
    terminal = Terminal(f"bash -c '{export}; {line}'")
    # `rdzv watch` does not end by itself.
    with suppress(subprocess.TimeoutExpired):
        terminal.process.wait(6 if "watch" in line else 200)
    runs_on = terminal.process.poll() is None and "watch" in line
    terminal.end()
    return 0 if runs_on else terminal.process.returncode, terminal.shown


def with_torchrun() -> dict[str, object]:
    """torchrun itself: one node trains, and ends when it is told to."""
    Path("train.py").write_text(TRAIN)
    server = Terminal(SERVE)
    terminal = Terminal(block("torchrun --rdzv-backend"))
    try:
        seen(terminal.is_in_a_world_of(1), terminal)
        os.kill(terminal.process.pid, signal.SIGTERM)
        return {"status": terminal.process.wait(PATIENCE), "shown": terminal.shown}
    finally:
        terminal.end()
        server.end()


def follow(chapter: str, folder: Path) -> Any:
    command = in_namespaces("tests.integration.test_readme", chapter)
    played = subprocess.run(
        command, stdout=subprocess.PIPE, cwd=folder, timeout=580,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert played.returncode == 0
    return json.loads(played.stdout)


def answers(asked: dict[str, tuple[int, str]]) -> None:
    for line, (status, shown) in asked.items():
        if "node9" in line and "--all-runs" not in line:
            # The job has no such host.
            assert (status, "nobody was excluded; --later" in shown) == (1, True), (line, shown)
            continue
        # `rdzv check` warns of loopback, and of a Redis without persistence.
        assert status in ((0, 1) if "rdzv check" in line else (0,)), (line, status, shown)
        assert "Traceback" not in shown


@pytest.mark.timeout(600)
def test_the_example_survives_a_kill_of_rank_0(tmp_path: Path, record_property: Measure) -> None:
    saw = follow("example", tmp_path)
    for status, shown in [*saw["early"].values(), *saw["late"].values()]:
        assert status != 0
        assert shown.count("\n") == 1
        assert "no run 'job1' is known at 127.0.0.1,127.0.0.2,127.0.0.3" in shown
    # It went on from the checkpoint, not from the beginning.
    assert 0 < saw["reached"] < STEPS
    assert saw["last"] == STEPS
    assert saw["statuses"] == [0, 0, 0]
    record_property("alone", f"{saw['alone']:.1f} s after the kill")
    asked = saw["asked"]
    answers(asked)
    assert "running round" in asked["rdzv status -i job1"][1]
    assert "round" in asked["rdzv history -i job1"][1]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_example_survives_a_reader_who_goes_through_it_again(tmp_path: Path) -> None:
    saw = follow("again", tmp_path)
    assert saw["statuses"] == [0, 0, 0]
    assert f"trained to step {STEPS}; to train anew, delete job1.pt" in saw["nothing left"]
    assert saw["anew"] == 1
    answers(saw["asked"])


@pytest.mark.timeout(600)
@pytest.mark.soak  # As `test_start` does with each store's page.
def test_the_example_on_a_server_survives_a_kill_of_rank_0(tmp_path: Path) -> None:
    saw = follow("store", tmp_path)
    asked = saw["asked"]
    answers(asked)
    assert "job2" in asked["rdzv list"][1]
    assert "round" in asked["rdzv history -i job2"][1]
    assert saw["served"] == [1, "rdzv: port 6379 of 127.0.0.1 is taken (Address already in use)\n"]
    # To the end; while the run is closed; with nothing left.
    assert saw["statuses"] == [0, 0, 1, 0]
    assert "run 'job2' is closed" in saw["closed"]
    assert CLEAN in saw["closed"]
    assert "Traceback" not in saw["closed"]
    assert f"trained to step {STEPS}; to train anew, delete job2.pt" in saw["nothing left"]


@pytest.mark.timeout(420)
def test_torchrun_takes_the_same_arguments(tmp_path: Path) -> None:
    saw = follow("torchrun", tmp_path)
    assert saw["status"] != 0, "SIGTERM ends it"
    assert "round 0: rank 0 of 1" in saw["shown"]


@pytest.mark.xdist_group("wheel")
@pytest.mark.parametrize(
    ("extras", "brought"), [("quorum", None), ("redis,embedded", "redis[hiredis]")]
)
def test_pip_installs_it_with_the_extra(
    wheel: Path, tmp_path: Path, extras: str, brought: str | None
) -> None:
    command = block(f'pip install "rdzv-plugins[{extras}]"').split()
    assert command[:2] == ["pip", "install"]
    # No index and no dependencies: what the extra brings is read from the metadata.
    offline = ["--no-index", "--no-deps", "--find-links", str(wheel.parent), "--target"]
    pip("install", command[2].strip('"'), *offline, str(tmp_path))
    asked = "from importlib.metadata import metadata; print(metadata('rdzv-plugins'))"
    told = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert all(f"Provides-Extra: {extra}\n" in told.stdout for extra in extras.split(","))
    if brought is None:
        assert f'extra == "{extras}"' not in told.stdout
    else:
        assert brought in told.stdout


@pytest.mark.full  # As the example.
@pytest.mark.timeout(300)
def test_the_demo_on_ones_own_server(store: RunningStore) -> None:
    line, _, says = block("make demo").splitlines()[0].partition("#")
    assert store.endpoint.startswith("redis://")
    assert "ENDPOINT=redis://" in says
    command = f"{line} ENDPOINT={store.endpoint}"
    shown = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert shown.returncode == 0, shown.stderr
    assert f"the store is {store.endpoint}" in shown.stdout
    assert "three nodes train again" in shown.stdout
    assert any(run_id.startswith("demo-") for run_id in list_runs(store.open))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_demo_of_the_command() -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(
        ["bash", "-c", block("rdzv demo")], capture_output=True, text=True, timeout=280,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    promised = re.findall(r"\d s  (\w+ (?:agents|nodes) .*?train)\b", README.read_text())
    assert len(promised) == 3
    assert [it for it in (*promised, "in a world of 2") if it not in shown.stdout] == []


def test_it_names_the_server_that_the_example_ran_on() -> None:
    assert block("rdzv serve") == SERVE
    assert CLEAN in block("export RDZV_BACKEND=redis")
    assert LOCAL_ADDR in block(ON_QUORUM)


def test_the_second_command_is_what_ci_runs() -> None:
    assert block("make demo").splitlines()[1].split()[:2] == ["make", "test"]
    assert (ROOT / ".ci" / "run").read_text().endswith("exec make test\n")


def test_no_command_is_left_out() -> None:
    tried = (
        "pip install", "rdzv serve", "torchrun --rdzv", "make demo", "rdzv run",
        "export RDZV_BACKEND", "rdzv demo",
    )  # fmt: skip
    assert not [it for it in commands() if not it.startswith(tried)]


if __name__ == "__main__":
    bring_up_loopback()
    chapters = {
        "example": example, "again": again, "store": on_a_server, "torchrun": with_torchrun
    }  # fmt: skip
    json.dump(chapters[sys.argv[1]](), sys.stdout)
