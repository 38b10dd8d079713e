"""What the agents of `tests.faults` run: a training of which every step can be checked.

The parameters are whole numbers, and a step adds to them the sum of the gradients of all samples
of that step, whichever rank computes which: what they are after step n does not depend on the
worlds that took the steps. A step that is lost, taken twice or without a rank shows in all later.

Without ``--torch`` the ranks exchange their sums over sockets of their own: the import of torch
takes two seconds of a processor, and an hour restarts thousands of workers. With it they use
torch's gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import rdzv_plugins
from rdzv_plugins.process.worker import CurrentRound, FencedError
from tests.fleet.train import Journal

__all__ = ["CHECKPOINT_EVERY", "START", "after"]

MODULUS = 2**31 - 1
SAMPLES = 24
START = [1, 2, 3, 4]
CHECKPOINT_EVERY = 10
_PACE = 0.2
# The limit of a collective; those of gloo and NCCL are longer.
_EXCHANGE_SECONDS = 40.0
_ALIVE_SECONDS = 0.5


def gradient(parameters: list[int], step: int, samples: Iterable[int]) -> list[int]:
    """The sum of the gradients of these samples."""
    total = [0] * len(parameters)
    for sample in samples:
        seen = (step * SAMPLES + sample + 1) * 2654435761 % MODULUS
        for at, parameter in enumerate(parameters):
            total[at] += (seen * parameter + seen + at) % MODULUS
    return total


def added(parameters: list[int], total: list[int]) -> list[int]:
    """The parameters after a step with this sum over all samples."""
    return [(one + other) % MODULUS for one, other in zip(parameters, total, strict=True)]


def after(parameters: list[int], step: int) -> list[int]:
    """The parameters after this step, from those before it."""
    return added(parameters, gradient(parameters, step, range(SAMPLES)))


class Sockets:
    """The ranks' exchange: each sends its sum to rank 0, which sends all of them the whole."""

    def __init__(self, rank: int, size: int, address: str, token: int) -> None:
        self._rank = rank
        # A port of this world's own, which no worker of an earlier one still has.
        place = (address, 20000 + token % 20000)
        self._lines: list[Any] = []
        if rank == 0:
            with socket.create_server(place) as listener:
                listener.settimeout(_EXCHANGE_SECONDS)
                while len(self._lines) < size - 1:
                    connection, _ = listener.accept()
                    connection.settimeout(_EXCHANGE_SECONDS)
                    line = connection.makefile("rw", buffering=1)
                    if line.readline().strip() == str(token):
                        self._lines.append(line)
            return
        deadline = time.monotonic() + _EXCHANGE_SECONDS
        while True:
            try:
                connection = socket.create_connection(place, 5)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        connection.settimeout(_EXCHANGE_SECONDS)
        self._lines.append(connection.makefile("rw", buffering=1))
        self._say(self._lines[0], token)

    def sum(self, values: list[int]) -> list[int]:
        """The sum over all ranks."""
        if self._rank == 0:
            for line in self._lines:
                values = [one + other for one, other in zip(values, self._hear(line), strict=True)]
            for line in self._lines:
                self._say(line, values)
            return values
        self._say(self._lines[0], values)
        return self._hear(self._lines[0])

    def _say(self, line: Any, what: object) -> None:
        line.write(json.dumps(what) + "\n")

    def _hear(self, line: Any) -> list[int]:
        said = line.readline()
        if not said.endswith("\n"):
            raise ConnectionError("a peer is gone")
        heard: list[int] = json.loads(said)
        return heard


class Gloo:
    """The same by torch."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=_EXCHANGE_SECONDS))

    def sum(self, values: list[int]) -> list[int]:
        tensor = self._torch.tensor(values, dtype=self._torch.int64)
        self._torch.distributed.all_reduce(tensor)
        summed: list[int] = tensor.tolist()
        return summed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--torch", type=int, default=0)
    options = parser.parse_args()
    rdzv_plugins.end_with_agent()
    now = rdzv_plugins.current()
    assert now is not None
    journal = Journal(options.folder, options.name)

    def note(event: str, **fields: object) -> None:
        journal.note(event, token=now.fencing_token, **fields)

    note("begin", round=now.round, world_id=now.world_id, cause=now.cause)
    threading.Thread(target=_tell_that_it_lives, args=(note,), daemon=True).start()
    try:
        _train(options.folder, bool(options.torch), note, now)
    except Exception:
        # At once: torch's clean-up would take 0.7 s, for which the others wait.
        traceback.print_exc()
        os._exit(1)


def _train(folder: Path, uses_torch: bool, note: Callable[..., None], now: CurrentRound) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks: Sockets | Gloo = (
        Gloo() if uses_torch else Sockets(rank, size, os.environ["MASTER_ADDR"], now.fencing_token)
    )
    checkpoint = folder / "checkpoint.json"
    step, parameters = 0, START
    # Rank 0's is what counts: a rank that reads for itself may read a later one.
    if rank == 0 and checkpoint.exists():
        step, parameters = json.loads(checkpoint.read_text())
    step, *parameters = ranks.sum([step, *parameters] if rank == 0 else [0] * (len(START) + 1))
    note("resume", step=step)
    while True:
        step += 1
        total = ranks.sum(gradient(parameters, step, range(rank, SAMPLES, size)))
        parameters = added(parameters, total)
        note("step", step=step, parameters=parameters)
        if rank == 0 and step % CHECKPOINT_EVERY == 0:
            _save(checkpoint, step, parameters, note, now)
        if rank == 0:
            time.sleep(_PACE)


def _save(
    checkpoint: Path, step: int, parameters: list[int], note: Callable[..., None], now: CurrentRound
) -> None:
    part = checkpoint.with_suffix(f".{now.fencing_token}.part")
    part.write_text(json.dumps([step, parameters]))
    try:
        with rdzv_plugins.fence(checkpoint.with_suffix(".fence")):
            part.replace(checkpoint)
            note("saved", step=step)
    except FencedError:
        note("fenced", step=step)
        with contextlib.suppress(OSError):
            part.unlink()


def _tell_that_it_lives(note: Callable[..., None]) -> None:
    while True:
        note("alive")
        time.sleep(_ALIVE_SECONDS)


if __name__ == "__main__":
    main()
