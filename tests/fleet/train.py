"""Trains a small model on the CPU under torchrun, for the tests and the benchmarks.

Data-parallel by hand: each worker computes the gradients of its own batches, an all-reduce over
gloo averages them, all take the same step. Rank 0 writes a checkpoint from time to time; a new
world continues from it. Each worker writes its events as lines to a file in ``<folder>/events/``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Far longer than any test waits, so that tests notice a collective that hangs.
_COLLECTIVE_SECONDS = 60


class Journal:
    """This process's events; one JSON object per line, one file per process."""

    def __init__(self, folder: Path, node: str) -> None:
        self._constant = {
            "node": node,
            "pid": os.getpid(),
            "agent": os.getppid(),
            "rank": int(os.environ["RANK"]),
            "world_size": int(os.environ["WORLD_SIZE"]),
            "master": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        }
        directory = folder / "events"
        directory.mkdir(parents=True, exist_ok=True)
        # No `with`: it stays open as long as the process, and each line is written at once.
        self._file = (directory / f"{node}-{os.getpid()}.jsonl").open("a", buffering=1)

    def note(self, event: str, **fields: object) -> None:
        """Write a line; ``at`` is CLOCK_MONOTONIC, which all processes of a host share."""
        line = {"event": event, "at": time.monotonic(), **self._constant, **fields}
        self._file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="checkpoint and events")
    parser.add_argument("--name", required=True, help="name of the node, for the events")
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps of the whole training")
    parser.add_argument("--seconds", type=float, default=600, help="longest life of a world")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds per step")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    options = parser.parse_args()
    # Before the import of torch, which takes seconds: the worker runs from here on.
    journal = Journal(options.folder, options.name)
    journal.note("begin")

    # Garbage collection makes the import of torch a tenth slower.
    gc.disable()
    import torch.distributed

    gc.enable()
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
    try:
        _train(options, journal)
    except Exception:
        # A peer is gone. torch's cleanup takes 0.7 s, for which the other nodes would wait.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    torch.distributed.destroy_process_group()
    journal.note("end")


def _train(options: argparse.Namespace, journal: Journal) -> None:
    import torch

    # Here, because the phase "started" of a restart ends with it: torch is imported by then.
    import rdzv_plugins

    # Not torch.optim: its first step imports more of torch, which takes two seconds.
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    checkpoint, stop = options.folder / "checkpoint.pt", options.folder / "stop"
    parameters = list(model.parameters())
    first = _resume(model, checkpoint, rank)
    journal.note("resume", step=first)
    ends = time.monotonic() + options.seconds
    for step in range(first + 1, options.steps + 1):
        began = time.monotonic()
        inputs = torch.rand(
            64, 2, generator=torch.Generator().manual_seed(step * world_size + rank)
        )
        targets = torch.sin(3 * inputs[:, :1]) * inputs[:, 1:]
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, parameters)
        wants_to_stop = rank == 0 and (stop.exists() or time.monotonic() > ends)
        # One message: the gradients, the loss, and whether to stop, so that all stop together.
        flat = [gradient.flatten() for gradient in gradients]
        message = torch.cat(
            [*flat, torch.stack([loss.detach(), torch.tensor(float(wants_to_stop))])]
        )
        torch.distributed.all_reduce(message)
        message /= world_size
        values = torch.nn.utils.parameters_to_vector(parameters).detach() - 0.1 * message[:-2]
        torch.nn.utils.vector_to_parameters(values, parameters)
        stopping = message[-1].item() > 0
        journal.note("step", step=step, loss=message[-2].item())
        if rdzv_plugins.step(step) or step % options.checkpoint_every == 0 or stopping:
            if rank == 0:
                _save(model, checkpoint, step)
            rdzv_plugins.saved(step)
        if stopping:
            break
        time.sleep(max(0.0, began + options.pace - time.monotonic()))


def _resume(model: torch.nn.Module, checkpoint: Path, rank: int) -> int:
    """Rank 0 reads the checkpoint and broadcasts it; returns the last step that was taken."""
    import torch

    step = 0
    if rank == 0 and checkpoint.exists():
        saved: dict[str, Any] = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        model.load_state_dict(saved["model"])
    parameters = list(model.parameters())
    values = torch.nn.utils.parameters_to_vector(parameters).detach()
    message = torch.cat([values, torch.tensor([float(step)])])
    torch.distributed.broadcast(message, src=0)
    torch.nn.utils.vector_to_parameters(message[:-1], parameters)
    return int(message[-1].item())


def _save(model: torch.nn.Module, checkpoint: Path, step: int) -> None:
    """Replace the checkpoint atomically: a crash leaves the last one whole."""
    import torch

    partial = checkpoint.with_suffix(f".{os.getpid()}")
    torch.save({"step": step, "model": model.state_dict()}, partial)
    partial.replace(checkpoint)


if __name__ == "__main__":
    main()
