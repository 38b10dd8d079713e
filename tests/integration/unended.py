"""A program that ends while its store is away, without ending its three nodes; see `test_endings`.

Its arguments: an endpoint of Redis and a run id. It prints "in" once the nodes are in a round, and
"away" once each has missed the store for longer than a request may take; then it ends.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import together

REQUEST_SECONDS = 3.0

if __name__ == "__main__":
    endpoint, run_id = sys.argv[1:]
    config = {"keep_alive_interval": 0.5, "heartbeat_timeout": REQUEST_SECONDS}
    params = RendezvousParameters("redis", endpoint, run_id, 3, 3, local_addr="127.0.0.1", **config)
    nodes = [create_handler("redis", params) for _ in range(3)]
    together([node.next_rendezvous for node in nodes], 30)
    sys.stdout.write("in\n")
    sys.stdout.flush()
    drivers = [node._driver for node in nodes]  # type: ignore[attr-defined]
    assert until(lambda: min(it.outage_seconds for it in drivers) > REQUEST_SECONDS, 60)
    sys.stdout.write("away\n")
    sys.stdout.flush()
