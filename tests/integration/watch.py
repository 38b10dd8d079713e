"""Agents that must not be disturbed, and whether they still beat."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord
from tests.integration.agents import Agent, until
from tests.integration.stores import RunningStore

__all__ = ["Watch", "await_beats"]


@dataclass
class Watch:
    """What agents are told of others that wait, at every moment while the watch is on."""

    agents: list[Agent]
    seen: list[int] = field(default_factory=list)
    asked: int = 0

    def __enter__(self) -> Watch:
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="test-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._quit.set()
        self._thread.join(5)

    def _ask(self) -> None:
        while not self._quit.wait(0.01):
            counts = [agent.handler.num_nodes_waiting() for agent in self.agents]
            self.seen += [count for count in counts if count]
            self.asked += 1


def await_beats(store: RunningStore, run_id: str, nodes: int, seconds: float) -> None:
    """Wait until that many nodes have each written another beat into the store.

    What a server did not know that took over from another, they must have written again by then.
    """
    client = store.open(run_id, request_timeout=seconds)
    try:
        until(lambda: len(_beats(client)) == nodes, seconds)
        old = _beats(client)

        def beaten() -> bool:
            # All of them: a server that knows of nobody yet has heard no beat.
            now = _beats(client)
            return all(now.get(node, 0) > beat for node, beat in old.items())

        until(beaten, seconds)
    finally:
        client.close()


def _beats(client: KeyValueClient) -> dict[str, int]:
    records = client.list(NODES_PREFIX)
    return {key: NodeRecord.decode(entry.value).beat for key, entry in records.items()}
