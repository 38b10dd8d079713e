"""torchrun or `rdzv run` with a change for which neither has an option.

The first argument names the change, the second the launcher: "torchrun" or "run".
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.events import handlers
from torch.distributed.launcher import api

import rdzv_plugins.cli
import rdzv_plugins.process.agent


def impatient() -> None:
    """Give the agents' exit barrier a time-out of a second; torch's launcher gives it 300 s."""
    for module, name in ((api, "LocalElasticAgent"), (rdzv_plugins.process.agent, "RunAgent")):
        setattr(module, name, partial(getattr(module, name), exit_barrier_timeout=1))


class Writer(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        with self._file.open("a") as file:
            file.write(record.getMessage() + "\n")


def recorded() -> None:
    """Have torch's events in ``<folder>/<name>.events``, by the script's options of these names.

    The module's private table is the only way: torch gives a platform no other.
    """
    folder, name = (sys.argv[sys.argv.index(option) + 1] for option in ("--folder", "--name"))
    handlers._log_handlers["dynamic_rendezvous"] = Writer(Path(folder) / f"{name}.events")


if __name__ == "__main__":
    {"impatient": impatient, "recorded": recorded}[sys.argv.pop(1)]()
    if sys.argv[1] == "run":
        rdzv_plugins.cli.main()
    else:
        run.main(sys.argv[2:])
