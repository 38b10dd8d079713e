"""Other runs on the server of an hour of faults: handlers without workers, one a run.

python -m tests.faults.neighbours BACKEND ENDPOINT RUNS name=value...

Says "ready" when each has its round; when its input ends, of how many of them the round has ended.
"""

from __future__ import annotations

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler

_STARTED_AT_ONCE = 8


def begin(
    backend: str, endpoint: str, options: dict[str, str], number: int
) -> StoreRendezvousHandler:
    """A run of one node, in its first round."""
    params = RendezvousParameters(
        backend, endpoint, f"neighbour-{number}", 1, 1, local_addr="127.0.0.1", **options
    )
    handler = create_handler(backend, params)
    assert isinstance(handler, StoreRendezvousHandler)
    handler.next_rendezvous()
    return handler


def main() -> None:
    logging.getLogger("rdzv_plugins").addHandler(logging.NullHandler())
    backend, endpoint, runs, *pairs = sys.argv[1:]
    options = dict(pair.split("=", 1) for pair in pairs)
    with ThreadPoolExecutor(_STARTED_AT_ONCE) as starting:
        made = [*starting.map(partial(begin, backend, endpoint, options), range(int(runs)))]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    waiting = sum(it.num_nodes_waiting() > 0 for it in made)
    sys.stdout.write(f"{waiting}\n")
    ending = [threading.Thread(target=it.shutdown) for it in made]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join()


if __name__ == "__main__":
    main()
