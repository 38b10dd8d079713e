"""torchrun with a platform's handler of torch's events, which writes each to a file.

The file is ``<folder>/<name>.events``, by the options of the same names that the script gets.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.events import handlers


class Writer(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        with self._file.open("a") as file:
            file.write(record.getMessage() + "\n")


def main() -> None:
    folder, name = (sys.argv[sys.argv.index(option) + 1] for option in ("--folder", "--name"))
    # Private, and the only way: torch has none for a platform but to replace the module.
    handlers._log_handlers["dynamic_rendezvous"] = Writer(Path(folder) / f"{name}.events")
    run.main()


if __name__ == "__main__":
    main()
