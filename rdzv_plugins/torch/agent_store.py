"""The c10d store that torch's agents share in a round; it knows when the round is over.

torch's agents use it twice: they exchange roles after the rendezvous, where each agent waits for a
key of every other agent, and they meet in a barrier after their workers succeeded. If a key never
comes, or the store refuses this node, an agent waits 300 s; in the exchange it then fails. Once the
run has left the round, or this node takes itself for lost, this store answers the waiting reads
itself. The agents then reach their loops, find that they must join again, and ask for the next
round.

In an open run the exit barrier lasts as long as the round. The agent of rank 0 holds the TCPStore
that the other nodes' workers use, and a long save or an uneven last epoch takes longer than the
barrier's time-out. The time-out counts only in an outage of the store, and for rank 0 in a run that
was closed by request: the round goes on, and rank 0 does not learn of a loss.

The names and shapes below are torch's own, of ``elastic/agent/server/api.py``, and not public;
`tests/handlers/test_agent_store.py` runs torch's agent against them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

from torch.distributed import DistError, DistStoreError

from rdzv_plugins.kv import Entry, KeyValueClient, RendezvousConnectionError
from rdzv_plugins.kv.retry import store_is_away
from rdzv_plugins.torch.c10d_store import KeyValueStore

_ROLE = "torchelastic/role_info/"
_RANKS = "torchelastic/assigned_ranks/"
_EXIT_BARRIER = "torchelastic/agent/terminal_state"


class AgentStore(KeyValueStore):
    """One agent's view of the store of one round.

    Args:
        is_over: whether the run has left the round, or this node takes itself for lost; called
            while a read waits, whenever the client is interrupted, and while a request fails.
        on_done: called once, when the agent's workers have succeeded.
        trains_on: whether the round goes on although the run is closed.

    Attributes:
        all_done: the workers of all agents of the round succeeded, as far as this agent knows.
        made_up: this agent got roles or ranks that no agent wrote, or other agents lack its own:
            it must join again, even if ``is_over`` is False later.
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
        trains_on: Callable[[], bool] = bool,
    ) -> None:
        super().__init__(client, prefix)
        self._rank = rank
        self._world_size = world_size
        self._is_over = is_over
        self._on_done = on_done
        self._trains_on = trains_on
        self.all_done = self.made_up = False
        self._role: bytes | None = None

    def set(self, key: str, value: str | bytes) -> None:
        if key == f"{_ROLE}{self._rank}":
            self._role = value.encode() if isinstance(value, str) else bytes(value)
        super().set(key, value)

    def add(self, key: str, value: int) -> int:
        if key.startswith(_EXIT_BARRIER):
            self._on_done()
            if self._is_over_for_all():
                return 0  # No agent waits any more, and the run may be swept: write nothing.
            # If the store loses this count, the leader closes the run once all records say done. In
            # a run that is closed already, rank 0 waits until the barrier's time-out.
            with suppress(DistError):
                return super().add(key, value)
            return 0
        return super().add(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not any(key.startswith(_EXIT_BARRIER) for key in keys):
            super().wait(keys, timeout)
            return
        over, ends = False, math.inf
        while not (over or self.all_done):
            over = self._is_passed() or time.monotonic() >= ends
            if self._over():
                ends = min(ends, time.monotonic() + (timeout or self._timeout()).total_seconds())
            # Look once more if the wait is over: the last agent may have just come.
            missing = [key for key in keys if not self.check([key])]
            self.all_done = not missing
            if missing and not self._is_passed():
                self._patiently(partial(self._wait, missing[0], None, self._longest_wait))

    def _is_passed(self) -> bool:
        """Whether this agent may leave the exit barrier before its time-out."""
        return self._over() and (self._rank > 0 or self._is_over_for_all())

    def _is_over_for_all(self) -> bool:
        """Whether no agent waits any more; in a closed run rank 0 keeps the TCPStore for others."""
        return self._over() and (self.made_up or not self._trains_on())

    def _over(self) -> bool:
        return self.made_up or self._is_over()

    def _put(self, values: Mapping[str, bytes]) -> None:
        if not self.made_up:
            with self._without_the_store_once(self._over):
                super()._put(values)

    def _found(self, keys: Sequence[str]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        if not self.made_up:
            in_barrier = any(key.startswith(_EXIT_BARRIER) for key in keys)
            with self._without_the_store_once(self._is_passed if in_barrier else self._over):
                found = super()._found(keys)
        return found

    @contextmanager
    def _without_the_store_once(self, over: Callable[[], bool]) -> Iterator[None]:
        """Once ``over`` holds, ignore that the store is away."""
        try:
            yield
        except RendezvousConnectionError as error:
            if not (over() and store_is_away(error)):
                raise
            self.made_up = True

    def _stand_in(self, key: str) -> bytes:
        """A value with which the agent reaches its loop, where it stops its workers at once."""
        if key.startswith(_ROLE) and self._role is not None:
            # Answer as if every node had this node's role, which this node has already written.
            self.made_up = True
            return self._role
        if key.startswith(_RANKS):
            # Global rank and world size, then the same within the role, as for one worker a node.
            self.made_up = True
            return json.dumps([self._rank, self._world_size] * 2).encode()
        raise DistStoreError(f"the round is over: no node will write '{key}'")
