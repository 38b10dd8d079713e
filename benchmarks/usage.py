"""What a server has used so far: processor time, and bytes from and to its clients."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import redis

from tests.servers import LocalServer

__all__ = ["Meter", "Usage", "raise_client_limit"]

_KEEPS_COUNT = ("redis", "valkey")
# Above the largest number of nodes with two connections each; the server needs some files more.
_MOST_CLIENTS = 19_900


@dataclass(frozen=True)
class Usage:
    """Since the start of the server.

    Attributes:
        seconds: of processor time, of all its processes.
        passed: bytes in and out; None where the server does not count them.
    """

    seconds: float
    passed: int | None = None

    def since(self, earlier: Usage) -> Usage:
        """The difference."""
        passed = None
        if self.passed is not None and earlier.passed is not None:
            passed = self.passed - earlier.passed
        return Usage(self.seconds - earlier.seconds, passed)


class Meter:
    """What a server uses from now on, without what reading that costs."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        # The least of three: something else may pass between two readings.
        readings = [_of_server(server) for _ in range(4)]
        self._before = readings[-1]
        costs = [later.since(earlier) for earlier, later in pairwise(readings)]
        counted = [it.passed for it in costs if it.passed is not None]
        self._reading = Usage(min(it.seconds for it in costs), min(counted, default=None))

    def read(self) -> Usage:
        """Until now; once."""
        return _of_server(self._server).since(self._before).since(self._reading)


def _of_server(server: LocalServer) -> Usage:
    """Read it now. Redis counts all of it; of the others the kernel knows the processor time."""
    if server.kind in _KEEPS_COUNT:
        return _of_redis(server)
    return Usage(sum(map(_processor_time, _processes(server))))


def raise_client_limit(server: LocalServer) -> None:
    """Let as many clients connect to Redis as this process may have files: 10,000 by default."""
    if server.kind in _KEEPS_COUNT:
        with _connected(server) as client:
            client.config_set("maxclients", _MOST_CLIENTS)


def _connected(server: LocalServer) -> Any:
    return redis.Redis.from_url(server.endpoint, protocol=2)


def _of_redis(server: LocalServer) -> Usage:
    with _connected(server) as client:
        cpu, stats = client.info("cpu"), client.info("stats")
    seconds = sum(cpu[f"used_cpu_{kind}"] for kind in ("user", "sys"))
    return Usage(seconds, stats["total_net_input_bytes"] + stats["total_net_output_bytes"])


def _processes(server: LocalServer) -> set[int]:
    """The servers and their children: PostgreSQL has a process for each connection."""
    found: set[int] = set()
    due = [node.pid for node in server.nodes]
    while due:
        pid = due.pop()
        found.add(pid)
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                due += map(int, file.read_text().split())
            except OSError:
                continue  # The process has ended.
    return found


def _processor_time(pid: int) -> float:
    # The clock of another process, as clock_getcpuclockid(3) makes it: /proc counts only in 10 ms.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0  # It has ended.
