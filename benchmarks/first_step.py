"""From torchrun on each node to the first step of all: what somebody waits for who starts a job.

Real agents, each with one worker that imports torch and trains, on 127.0.0.1 and following. For
quorum that includes the start of its members, for c10d of its TCPStore; redis runs already.
"""

from __future__ import annotations

import socket
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.rendezvous import Sample
from tests import servers
from tests.fleet.agents import Fleet, TrainingError

__all__ = ["SUBJECTS", "measure"]

SUBJECTS: Mapping[str, str] = {
    "redis": "redis",
    "quorum": "quorum",
    "quorum, one member": "quorum",
    "c10d": "c10d",
}
"""What is measured, with its ``--rdzv-backend``."""

_LIMIT = 60.0


def measure(subject: str, nodes: int) -> Sample | None:
    """Seconds until the last worker begins, before it imports torch, and until its first step."""
    addresses = [f"127.0.0.{node + 1}" for node in range(nodes)]
    with ExitStack() as until_the_end:
        folder = Path(
            until_the_end.enter_context(tempfile.TemporaryDirectory(prefix="rdzv-bench-"))
        )
        match subject:
            case "redis":
                server = until_the_end.enter_context(servers.start("redis"))
                endpoint = server.endpoint
            case "c10d":
                with socket.create_server(("127.0.0.1", 0)) as free:
                    endpoint = f"127.0.0.1:{free.getsockname()[1]}"
            case "quorum":
                # The third member's host may have no node.
                endpoint = "127.0.0.1,127.0.0.2,127.0.0.3"
            case _:
                endpoint = "127.0.0.1"
        fleet = Fleet(
            folder,
            backend=SUBJECTS[subject],
            endpoint=endpoint,
            run_id=uuid.uuid4().hex[:8],
            nodes=f"{nodes}:{nodes}",
            config={},
            environ={},
            training={"seconds": 2 * _LIMIT},
        )
        until_the_end.enter_context(fleet)
        names = "abcdefgh"[:nodes]
        began = time.monotonic()
        for name, address in zip(names, addresses, strict=True):
            fleet.start(name, address)
        try:
            world = fleet.await_world(names, timeout=_LIMIT)
        except TrainingError:
            return None
        return {
            "workers began, s": max(world.began.values()) - began,
            "first step, s": max(world.stepped.values()) - began,
        }
