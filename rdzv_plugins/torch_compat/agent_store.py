"""The c10d store that torch's agents share in a round; it knows when the round is over.

torch's agents use it twice: they exchange roles after the rendezvous, where each waits for a key of
every other, and they meet in a barrier after their workers succeeded. If a key never comes, an
agent waits 300 s; in the exchange it then fails. So once the run has left the round, this store
answers the waiting reads itself. The agents reach their loops, find that the membership has
changed, and ask for the next round.

The names and shapes below are torch's own, of ``elastic/agent/server/api.py``, and not public;
`tests/handlers/test_agent_store.py` runs torch's agent against them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.torch_compat.c10d_store import KeyValueStore

__all__ = ["AgentStore"]

_ROLE = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"
_EXIT_BARRIER = "torchelastic/agent/terminal_state"


class AgentStore(KeyValueStore):
    """One agent's view of the store of one round.

    Args:
        client, prefix: as for `KeyValueStore`.
        rank, world_size: of the agent in the round.
        is_over: whether the run has left the round; called while a read waits, whenever the client
            is interrupted.
        on_done: called once, when the agent's workers have succeeded.

    Attributes:
        all_done: the workers of all agents of the round succeeded, as far as this agent knows.
    """

    # An interrupt that comes just before the client parks wakes nothing: look again after this.
    _longest_wait = 3.0

    def __init__(
        self,
        client: KeyValueClient,
        prefix: str,
        rank: int,
        world_size: int,
        is_over: Callable[[], bool],
        on_done: Callable[[], None],
    ) -> None:
        super().__init__(client, prefix)
        self._rank = rank
        self._world_size = world_size
        self._is_over = is_over
        self._on_done = on_done
        self.all_done = False

    def add(self, key: str, value: int) -> int:
        if key.startswith(_EXIT_BARRIER):
            self._on_done()
            if self._is_over():
                return 0  # No agent waits any more, and the run may be swept: write nothing.
        return super().add(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        found = self._collect(keys, self._timeout() if timeout is None else timeout)
        if any(key.startswith(_EXIT_BARRIER) for key in keys):
            # A stand-in has no version.
            self.all_done = all(entry.version is not None for entry in found.values())

    def _over(self) -> bool:
        return self._is_over()

    def _stand_in(self, key: str) -> bytes:
        """A value with which the agent reaches its loop, where it stops its workers at once."""
        if key.startswith(_EXIT_BARRIER):
            return b""
        if key.startswith(_ROLE):
            # As if every node were like this one, which has written its own role before.
            own = self._client.get(f"{self._prefix}{_ROLE}{self._rank}")
            if own is not None:
                return own.value
        if key.startswith(_RANKS):
            # Global rank and world size, then the same within the role, as for one worker a node.
            return json.dumps([self._rank, self._world_size] * 2).encode()
        raise DistStoreError(f"the round is over: no node will write '{key}'")
