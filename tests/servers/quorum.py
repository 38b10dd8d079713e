"""Members of a quorum as processes of their own, one or three: their cluster is named "local"."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rdzv_plugins.kv.base import Limit
from rdzv_plugins.stores.quorum.registers import Registers
from rdzv_plugins.stores.quorum.wire import identify
from tests.servers.process import HOST, Kind, ServerProcess

__all__ = ["Quorum"]

# Not where agents on this host are: an agent sees to a member at its own address.
_HOST = "127.0.0.10" if sys.platform == "linux" else HOST
_CLUSTER = "local"


class Quorum(Kind):
    """One member or three on this host, for several runs."""

    name = "quorum"
    largest = 3

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        # -P: the modules of this folder have the names of others.
        member, own = Path(__file__).with_name("member.py"), f"{_HOST}:{node.port}"
        return [sys.executable, "-P", str(member), _CLUSTER, own, *self._places(nodes)]

    def ready(self, node: ServerProcess) -> bool:
        name = f"{_CLUSTER} of {len(node.peers)} hosts"
        identify(_HOST, node.port, name, b"", 0.5)
        places = [[(_HOST, it.port)] for it in sorted(node.peers, key=lambda it: it.port)]
        with closing(Registers(places, name, b"")) as registers:
            registers.read([], Limit(time.monotonic() + 1.0))
        return True

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        return ",".join(self._places(nodes))

    def config(self) -> dict[str, str]:
        return {"cluster": _CLUSTER}

    def _places(self, nodes: Sequence[ServerProcess]) -> list[str]:
        return [f"{_HOST}:{node.port}" for node in nodes]
