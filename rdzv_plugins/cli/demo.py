"""``rdzv demo``: three agents train on this host, one is killed, and the training continues."""

from __future__ import annotations

import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from rdzv_plugins.cli.options import DEFAULT_BACKEND

HERE = Path(__file__).resolve().parent
# setup.py puts the script into each wheel; a checkout has it elsewhere.
_SCRIPTS = HERE / "train.py", HERE.parents[1] / "examples" / "train.py"

# Each agent has its own address, as if it were on its own host.
_HOSTS = "127.0.0.1", "127.0.0.2", "127.0.0.3"
_PATIENCE = 180.0
_SHOWN = re.compile(r"round \d+(?: forms: .*|: [^(]*)|step \d+ in a world of (\d+), .*")


def demo(
    endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint", "-e", help="your own store; default: the agents run one themselves"
        ),
    ] = "",
    backend: Annotated[
        str, typer.Option("--rdzv-backend", "-b", help="backend of that endpoint, as for torchrun")
    ] = DEFAULT_BACKEND,
) -> None:
    """Train with three agents on this host, kill one, and see the training continue."""
    from rdzv_plugins.entry_points import refuse_without_torch
    from rdzv_plugins.settings.endpoint import redact

    refuse_without_torch("rdzv demo")
    script = next(it for it in _SCRIPTS if it.exists())
    with tempfile.TemporaryDirectory(prefix="rdzv-demo-") as folder:
        fleet = _Fleet(script, Path(folder), backend, endpoint)
        try:
            server = f"the store is {redact(endpoint)}" if endpoint else "there is no server"
            fleet.tell(f"three agents start and train with {script}; {server}")
            for host in _HOSTS:
                fleet.start(host)
            fleet.await_world(3)
            first = fleet.await_world(3)  # Wait for the next checkpoint.
            fleet.tell(f"kill -9 {first}, which has rank 0")
            killed = time.monotonic()
            fleet.kill(first)
            fleet.await_world(2)
            fleet.tell(f"two nodes train {time.monotonic() - killed:.1f} s after the kill")
            fleet.tell(f"{first} starts again")
            fleet.start(first)
            fleet.await_world(3)
            fleet.tell("three nodes train again; the demo stops them")
        finally:
            fleet.end()


class _Fleet:
    """The agents, and the lines that they print."""

    def __init__(self, script: Path, folder: Path, backend: str, endpoint: str) -> None:
        own = bool(endpoint)
        if not own:
            backend, endpoint = "quorum", ",".join(_HOSTS)
        self._began = time.monotonic()
        self._lines: queue.Queue[tuple[str, str]] = queue.Queue()
        self._agents: dict[str, subprocess.Popen[str]] = {}
        self._folder = folder
        self._command = [
            sys.executable, "-W", "ignore", "-m", "rdzv_plugins.cli", "run",
            f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id=demo-{secrets.token_hex(4)}", "--rdzv-conf=last_call_timeout=1",
            "--nnodes=2:3", "--nproc-per-node=1", str(script), "checkpoint.pt",
        ]  # fmt: skip
        # The user's own store may need the options that RDZV_PLUGINS_... set.
        ours = ("PET_", "TORCHELASTIC_", *(() if own else ("RDZV_",)))
        self._environ = {it: value for it, value in os.environ.items() if not it.startswith(ours)}
        if not own:
            # A secret, because other accounts of this host reach the ports.
            self._environ["RDZV_PLUGINS_SECRET"] = secrets.token_hex(16)

    def tell(self, text: str) -> None:
        typer.echo(f"{time.monotonic() - self._began:5.1f} s  {text}")

    def start(self, host: str) -> None:
        command = [*self._command]
        command.insert(command.index("run") + 1, f"--local-addr={host}")
        # A session of its own: Ctrl-C reaches only this process, which then stops the agents.
        agent = self._agents[host] = subprocess.Popen(
            command, env=self._environ, cwd=self._folder, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        threading.Thread(
            target=self._read, args=(host, agent.stdout), name=f"rdzv-demo-{host}", daemon=True
        ).start()

    def _read(self, host: str, output: Iterable[str]) -> None:
        for line in output:
            self._lines.put((host, line.rstrip()))

    def await_world(self, size: int) -> str:
        """Show the agents' lines until ``size`` nodes train; returns the host of rank 0."""
        deadline = time.monotonic() + _PATIENCE
        said: list[str] = []
        told: set[str] = set()
        while (left := deadline - time.monotonic()) > 0 and self._all_run():
            try:
                host, line = self._lines.get(timeout=min(left, 1.0))
            except queue.Empty:
                continue
            said.append(f"{host}: {line}")
            found = _SHOWN.search(line)
            # Show a line only once, because each node logs why a round forms.
            if found is None or found[0] in told or found[1] not in (None, str(size)):
                continue
            told.add(found[0])
            self.tell(f"{host}: {found[0].rstrip()}")
            if found[1]:
                return host
        last = "\n".join(said[-25:])
        raise ValueError(f"{size} nodes did not come to train together; the agents' log:\n{last}")

    def _all_run(self) -> bool:
        return all(agent.poll() is None for agent in self._agents.values())

    def kill(self, host: str) -> None:
        agent = self._agents.pop(host)
        agent.kill()
        agent.wait()

    def end(self) -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            for agent in self._agents.values():
                agent.send_signal(number)
            for agent in self._agents.values():
                try:
                    agent.wait(40)
                except subprocess.TimeoutExpired:
                    break
