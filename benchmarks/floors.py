"""Two lower bounds: the time that N nodes on one machine take without a rendezvous protocol.

Each class has the interface of a handler, so `rendezvous` measures it in the same way.
"""

from __future__ import annotations

import json
import os
import secrets
from types import SimpleNamespace
from typing import Any

import redis

__all__ = ["FLOORS"]

_LAST_ONE_OPENS = """
local count = redis.call('INCR', KEYS[1])
if count == tonumber(ARGV[1]) then redis.call('XADD', KEYS[2], '*', 'open', '1') end
return count
"""
_PATIENCE_MS = 60_000


class Barrier:
    """A bare barrier: each node runs one script and one blocking read."""

    def __init__(self, endpoint: str, run_id: str, nodes: int) -> None:
        self._redis: Any = redis.Redis.from_url(endpoint, single_connection_client=True)
        self._nodes = nodes
        self._run = run_id
        self._script = self._redis.script_load(_LAST_ONE_OPENS)

    def next_rendezvous(self) -> SimpleNamespace:
        count, opened = f"{self._run}:count", f"{self._run}:open"
        number = self._redis.evalsha(self._script, 2, count, opened, self._nodes)
        assert self._redis.xread({opened: "0"}, block=_PATIENCE_MS)
        return SimpleNamespace(rank=number - 1, world_size=self._nodes)


class Sketch:
    """The least program that assigns ranks and a MASTER_ADDR.

    It has no leases, confirmations or second round. Each node writes its record and rings a bell.
    The first node counts the records after each ring and writes one list of all nodes. Rank 0 then
    publishes an address.
    """

    def __init__(self, endpoint: str, run_id: str, nodes: int) -> None:
        self._redis: Any = redis.Redis.from_url(endpoint, single_connection_client=True)
        self._redis.ping()
        self._nodes = nodes
        self._run = run_id
        self._id = secrets.token_hex(5)

    def next_rendezvous(self) -> SimpleNamespace:
        if self._write_record():
            self._lead()
        named = self._await("named")
        rank = named.decode().split(" ").index(self._id)
        if rank == 0:
            self._redis.xadd(f"{self._run}:master", {"v": "127.0.0.1:29500"})
        self._await("master")
        return SimpleNamespace(rank=rank, world_size=self._nodes)

    def _write_record(self) -> bool:
        """Write the record; return whether this node is the first."""
        record = json.dumps({"addr": "127.0.0.1", "pid": os.getpid(), "beat": 1, "status": "join"})
        pipe = self._redis.pipeline(transaction=False)
        pipe.hset(f"{self._run}:nodes", self._id, record)
        pipe.xadd(f"{self._run}:bell", {"v": ""}, maxlen=1)
        pipe.set(f"{self._run}:leader", self._id, nx=True)
        return bool(pipe.execute()[-1])

    def _lead(self) -> None:
        heard = "0"
        while self._redis.hlen(f"{self._run}:nodes") < self._nodes:
            rung = self._redis.xread({f"{self._run}:bell": heard}, block=1000)
            heard = rung[0][1][-1][0] if rung else heard
        records = self._redis.hgetall(f"{self._run}:nodes")
        assert all(json.loads(record)["status"] == "join" for record in records.values())
        named = " ".join(sorted(node.decode() for node in records))
        self._redis.xadd(f"{self._run}:named", {"v": named})

    def _await(self, stream: str) -> bytes:
        answer = self._redis.xread({f"{self._run}:{stream}": "0"}, block=_PATIENCE_MS)
        value: bytes = answer[0][1][-1][1][b"v"]
        return value


FLOORS = {"redis: a bare barrier": Barrier, "redis: the least program": Sketch}
