"""torchrun rendezvous on the store you already run."""

from __future__ import annotations

# Nothing is imported here: torch loads every entry point of this package at each start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from contextlib import AbstractContextManager

    from rdzv_plugins.process.worker import CurrentRound

__version__ = "0.1.0"


def current() -> CurrentRound | None:
    """The round that this worker was started in; None in a process that is no worker.

    It costs no request: the agent hands it down as it starts its workers::

        import rdzv_plugins

        now = rdzv_plugins.current()
        if now is not None:
            print(f"round {now.round}: {now.cause}; {now.spares} spares, domain {now.domain}")
    """
    from rdzv_plugins.process import worker

    return worker.current()


def fence(path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Hold ``path``, unless a later round has held it: no older world overwrites a checkpoint.

    ``path`` is a small file beside the checkpoint, on a file system that all nodes share and that
    has locks. A round that has held it shuts out all rounds with a smaller
    `CurrentRound.fencing_token`, also where their workers run on because their node is cut off from
    the store::

        now = rdzv_plugins.current()
        part = f"checkpoint.{now.fencing_token if now else 0}.part"  # No other round has it.
        torch.save(state, part)
        with rdzv_plugins.fence("checkpoint.fence"):
            os.replace(part, "checkpoint.pt")

    In a process that is no worker of this package it does nothing; nor in a thread that holds it.

    Raises:
        rdzv_plugins.process.worker.FencedError: a later round has held it.
        OSError: the file cannot be opened, locked or written.
        ValueError: the file is no fence, but holds other data, as a checkpoint does.
    """
    from rdzv_plugins.process import worker

    return worker.fence(path)


def end_with_agent() -> bool:
    """Have this worker killed at once when its agent is gone; the first line of a script.

    torchrun's workers outlive an agent that is killed with ``kill -9``: they write the same
    checkpoint as their replacements, and keep the GPU. `rdzv run` ends them itself. For Linux::

        import rdzv_plugins

        rdzv_plugins.end_with_agent()

    Returns:
        Whether it is so: False on another system, in a process that is no worker, and in one that
        the agent has not started itself, such as a script that a shell runs.
    """
    from rdzv_plugins.process import worker

    return worker.end_with_agent()


def resize_now() -> bool:
    """Say that now is a good moment to let newcomers in, such as just after a checkpoint.

    For jobs with ``grow=checkpoint``; one worker is enough. If nodes wait, the round ends within a
    second or two. The moment lasts one ``keep_alive_interval``. It costs no request::

        save(checkpoint)
        rdzv_plugins.resize_now()

    Returns:
        Whether anybody is told: False in a process that is no worker, without ``grow=checkpoint``,
        and where the agent's folder for temporary files cannot be written, which is said on stderr
        once. It never raises.
    """
    from rdzv_plugins.process import worker

    return worker.resize_now()
