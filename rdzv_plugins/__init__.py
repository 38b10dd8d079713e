"""torchrun rendezvous on the store you already run."""

from __future__ import annotations

# Import no other module here: torch loads every entry point of this package at each start.
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from contextlib import AbstractContextManager

    from rdzv_plugins.process.worker import CurrentRound

__version__ = "0.1.0"

_imported = time.monotonic_ns()
"""When this process imported this package, which tells when a worker has started."""


def current() -> CurrentRound | None:
    """The round that this worker was started in; None in a process that is no worker.

    It costs no request, because the agent passes the round on when it starts its workers::

        import rdzv_plugins

        now = rdzv_plugins.current()
        if now is not None:
            print(f"round {now.round}: {now.cause}; {now.spares} spares, domain {now.domain}")
    """
    from rdzv_plugins.process import worker

    return worker.current()


def fence(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Hold the fence ``path``, so that no older round overwrites a checkpoint.

    ``path`` is a small file beside the checkpoint, on a file system that all nodes share and that
    has locks. A round that has held the fence shuts out all rounds with a smaller
    `CurrentRound.fencing_token`, even if their workers run on because their node is cut off from
    the store::

        now = rdzv_plugins.current()
        part = f"checkpoint.{now.fencing_token if now else 0}.part"  # No other round has it.
        torch.save(state, part)
        with rdzv_plugins.fence("checkpoint.fence"):
            os.replace(part, "checkpoint.pt")

    It does nothing in a process that is no worker of this package, and in a thread that already
    holds the fence.

    Raises:
        rdzv_plugins.process.worker.FencedError: a later round has held the fence.
        OSError: the file cannot be opened, locked or written.
        ValueError: the file is no fence, but holds other data, such as a checkpoint.
    """
    from rdzv_plugins.process import worker

    return worker.fence(path)


def end_with_agent() -> bool:
    """Have this worker killed at once when its agent is gone; call it first in a script.

    torchrun's workers outlive an agent that is killed with ``kill -9``: they write the same
    checkpoint as their replacements, and keep the GPU. `rdzv run` ends them itself. For Linux::

        import rdzv_plugins

        rdzv_plugins.end_with_agent()

    Returns:
        Whether this worker will be killed: False on another system, in a process that is no
        worker, and in a process that the agent has not started itself, such as a script that a
        shell runs.
    """
    from rdzv_plugins.process import worker

    return worker.end_with_agent()


def step(number: int) -> bool:
    """Say that this worker has finished a step; returns whether every rank must save now.

    Every rank calls it after each step, with the same numbers, from 0 on. It costs a few
    microseconds, and no request. The run asks for a checkpoint before a planned change: a node was
    told to leave, or newcomers wait with ``grow=checkpoint``. The answer for a step is the same on
    all ranks::

        for number in range(start, STEPS):
            train_one_step()
            if rdzv_plugins.step(number) or number % 1000 == 0:
                save(number)
                rdzv_plugins.saved(number)

    It returns False in a process that is no worker of this package, and in the children of a worker
    that has called it.

    Raises:
        rdzv_plugins.process.steps.UndecidedError: the store has not answered for five minutes, so
            it is unknown whether the other ranks save at this step.
    """
    ended = time.monotonic_ns()  # Before the first call's imports.
    from rdzv_plugins.process import steps

    slot = steps.of_this_worker()
    return slot is not None and slot.step(number, ended)


def saved(number: int) -> None:
    """Say that this rank's part of the checkpoint of step ``number`` is complete.

    Every rank calls it. With ``grow=checkpoint`` newcomers are then let in. If the run had asked
    for this checkpoint, the call waits up to 30 s for the end of the round, so that no rank begins
    a step that would be lost.
    """
    from rdzv_plugins.process import steps

    if (slot := steps.of_this_worker()) is not None:
        slot.saved(number)
