"""A training without torch, whose import takes 3 s of a processor in each worker of each round.

It has the options, the journal, the checkpoint and the ends of `tests.fleet.train`, which
the tests of `test_torchrun` run. In place of gloo's all-reduce, rank 0 hears of
each rank before each step, and answers all. As with gloo, who loses a peer ends with 1, and a peer
that stands still holds all up. It also writes down what it knows of its round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import rdzv_plugins
from tests.fleet.train import Journal

# As `tests.fleet.train`: far longer than any test waits.
_SECONDS = 60
# Shorter than the lease of the tests' runs.
_OLD_SECONDS = 2.5


class Peers:
    """The other ranks: rank 0 has a connection to each, and they have one to rank 0."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        # In many rounds a port may come again.
        world = now.world_id if (now := rdzv_plugins.current()) else ""
        at = folder / f"{host.replace(':', '-')}-{port}-{world}.port"
        made = self._listen(host, at) if self.rank == 0 else [self._dial(host, at)]
        self._files = [it.makefile("rw", encoding="utf-8") for it in made]

    def _listen(self, host: str, at: Path) -> list[socket.socket]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=self.size) as server:
            partial = at.with_suffix(f".{os.getpid()}")
            partial.write_text(str(server.getsockname()[1]))
            partial.replace(at)
            server.settimeout(_SECONDS)
            made = [server.accept()[0] for _ in range(self.size - 1)]
        for connection in made:
            connection.settimeout(_SECONDS)
        return made

    def _dial(self, host: str, at: Path) -> socket.socket:
        ends = time.monotonic() + _SECONDS
        while not at.exists():
            if time.monotonic() > ends:
                raise TimeoutError("rank 0 does not listen")
            time.sleep(0.01)
        return socket.create_connection((host, int(at.read_text())), timeout=_SECONDS)

    def exchange(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Wait for all; returns what rank 0 gave."""
        if self.rank == 0:
            self._hear()
            self._tell(mine)
            self._refuse_old(self._hear())
            return mine
        self._tell(mine)
        answer = self._hear()
        self._tell(mine)
        self._refuse_old(answer)
        return answer

    def _tell(self, what: dict[str, Any]) -> None:
        for file in self._files:
            file.write(json.dumps({**what, "at": time.monotonic()}) + "\n")
            file.flush()

    def _hear(self) -> dict[str, Any]:
        """A line from each peer; returns the oldest."""
        found = []
        for file in self._files:
            if not (line := file.readline()):
                raise ConnectionError("a peer is gone")
            found.append(json.loads(line))
        oldest: dict[str, Any] = min(found, key=lambda it: float(it["at"]), default={})
        return oldest

    def _refuse_old(self, answer: dict[str, Any]) -> None:
        at = answer.get("at")
        if isinstance(at, float) and time.monotonic() - at > _OLD_SECONDS:
            raise TimeoutError("this process stood still")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    options = parser.parse_args()
    journal = Journal(options.folder, options.name)
    journal.note("begin")
    if now := rdzv_plugins.current():
        known = json.dumps(dataclasses.asdict(now))
        (options.folder / f"{options.name}.round").write_text(known)
    try:
        _train(options, journal, Peers(options.folder))
    except (OSError, ValueError):
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    journal.note("end")


def _train(options: argparse.Namespace, journal: Journal, peers: Peers) -> None:
    checkpoint, stop = options.folder / "checkpoint.json", options.folder / "stop"
    saved = {"step": 0, "value": 1.0}
    if peers.rank == 0 and checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
    saved = peers.exchange(saved)
    first, value = int(saved["step"]), float(saved["value"])
    journal.note("resume", step=first)
    ends = time.monotonic() + options.seconds
    for step in range(first + 1, options.steps + 1):
        began = time.monotonic()
        value *= 0.999
        wants_to_stop = peers.rank == 0 and (stop.exists() or time.monotonic() > ends)
        stopping = bool(peers.exchange({"stop": wants_to_stop})["stop"])
        journal.note("step", step=step, loss=value)
        if asked := rdzv_plugins.step(step):
            journal.note("asked", step=step)
        if asked or step % options.checkpoint_every == 0 or stopping:
            if peers.rank == 0:
                partial = checkpoint.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps({"step": step, "value": value}))
                partial.replace(checkpoint)
            rdzv_plugins.saved(step)
        if stopping:
            break
        time.sleep(max(0.0, began + options.pace - time.monotonic()))


if __name__ == "__main__":
    main()
