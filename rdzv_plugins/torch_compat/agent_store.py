"""The c10d store that torch's agents share in a round, which knows when the round is over.

torch's agents use it for two things: an exchange of roles after the rendezvous, in which each waits
for a word of every other, and a barrier after their workers succeeded. In both a word that never
comes holds the others up for 300 s; in the exchange it then ends them. So once the run has left
the round, what they wait for is given or they are told to go on: they reach their loops, find that
the membership has changed, and ask for the next round.

The names and shapes below are torch's own, of ``elastic/agent/server/api.py``, and not public;
`tests/unit/test_agent_store.py` runs torch's agent against them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistStoreError

from rdzv_plugins.kv import Entry, KeyValueClient
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

    # The word that the round is over may come just before the client parks, and then wakes nobody.
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
                return 0  # Nobody counts any more, and the run may be swept: write nothing.
        return super().add(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        found = self._collect(keys, self._timeout() if timeout is None else timeout)
        if any(key.startswith(_EXIT_BARRIER) for key in keys):
            # What was made up has no version.
            self.all_done = all(entry.version is not None for entry in found.values())

    def _missing(self, keys: Sequence[str]) -> dict[str, Entry]:
        """What to give for keys that are not there; nothing: wait for them."""
        if not self._is_over():
            return {}
        return {key: Entry(self._stand_in(key), None) for key in keys}

    def _stand_in(self, key: str) -> bytes:
        """What lets the agent go on to its loop, whose workers are then stopped at once."""
        if key.startswith(_EXIT_BARRIER):
            return b""
        if key.startswith(_ROLE):
            # As if every node were like this one; it has written its own before it reads.
            own = self._client.get(f"{self._prefix}{_ROLE}{self._rank}")
            if own is not None:
                return own.value
        if key.startswith(_RANKS):
            # Global rank and world size, then the same within the role: as of one worker a node.
            return json.dumps([self._rank, self._world_size] * 2).encode()
        raise DistStoreError(f"the round is over: nobody will write '{key}'")
