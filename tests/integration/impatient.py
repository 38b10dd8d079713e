"""torchrun or `rdzv run`, whose agents have a time-out of their exit barrier of a second."""

from __future__ import annotations

import sys
from functools import partial

from torch.distributed import run
from torch.distributed.launcher import api

import rdzv_plugins.cli
import rdzv_plugins.process.agent


def main() -> None:
    # No option says it: torch's launcher makes its agent with 300 s.
    for module, name in ((api, "LocalElasticAgent"), (rdzv_plugins.process.agent, "RunAgent")):
        setattr(module, name, partial(getattr(module, name), exit_barrier_timeout=1))
    if sys.argv[1] == "run":
        rdzv_plugins.cli.main()
    else:
        run.main(sys.argv[2:])


if __name__ == "__main__":
    main()
