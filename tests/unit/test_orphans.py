"""The process that ends workers with their agent: real processes, and a real kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rdzv_plugins.testing.harness import until

# An agent whose worker is a child of each kind; it prints their process ids.
AGENT = """
import os, subprocess, sys, time
from rdzv_plugins.process.guard import Guard
guard = Guard()
guard.start()
forked = os.fork()
if forked == 0:
    time.sleep(600)
session = subprocess.Popen(["sleep", "600"], start_new_session=True)
guard.watch([forked, session.pid])
if sys.argv[1] == "renew":
    guard._process.kill()
    guard._process.wait()
    guard.renew()
print(forked, session.pid, flush=True)
sys.stdin.read()
if sys.argv[1] == "forget":
    guard.watch([])
guard.stop()
os.kill(forked, 9)
os.waitpid(forked, 0)
"""


def live(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_ended(pid: int) -> bool:
    return not live(pid)


@pytest.mark.parametrize("end", ["kill", "stop", "forget", "renew"])
def test_what_was_named_last_ends_with_the_agent(end: str) -> None:
    program = [sys.executable, "-c", AGENT, end]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        forked, session = map(int, agent.stdout.readline().split())
        try:
            assert live(forked)
            assert live(session)
            if end in ("kill", "renew"):
                agent.kill()
            else:
                agent.stdin.close()
                assert agent.wait(20) == 0
            assert until(lambda: not live(forked), 10)
            if end == "forget":
                assert live(session)
            else:
                assert until(lambda: not live(session), 10)
        finally:
            if live(session):
                os.kill(session, signal.SIGKILL)


# An agent that is killed as it starts its workers: it has named none yet, or those of before.
STARTING = """
import os, subprocess, sys
from rdzv_plugins.process.guard import Guard
guard = Guard()
guard.start()
standby = subprocess.Popen(["sleep", "600"], start_new_session=True)
guard.watch([standby.pid])
value = f"one {os.getpid()}"
guard.expect("ROUND", value)
environ = {**os.environ, "ROUND": value}
mine = subprocess.Popen(["sleep", "600"], start_new_session=True, env=environ)
environ["ROUND"] = f"{value} and more"
other = subprocess.Popen(["sleep", "600"], start_new_session=True, env=environ)
if sys.argv[1] == "named":
    guard.watch([])
print(mine.pid, standby.pid, other.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["starting", "named"])
def test_workers_end_with_an_agent_that_is_killed_before_it_has_named_them(when: str) -> None:
    program = [sys.executable, "-c", STARTING, when]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        mine, standby, other = map(int, agent.stdout.readline().split())
        try:
            agent.kill()
            for pid in (mine, standby):
                assert until(partial(has_ended, pid), 3 if when == "named" else 10) is (
                    when == "starting"
                )
            assert live(other)
        finally:
            for pid in filter(live, (mine, standby, other)):
                os.kill(pid, signal.SIGKILL)
