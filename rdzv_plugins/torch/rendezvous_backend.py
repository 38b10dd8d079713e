"""torch's ``RendezvousBackend`` over a key-value client, for torch's own dynamic handler."""

from __future__ import annotations

import zlib

from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from rdzv_plugins.kv import Entry, KeyValueClient, RendezvousStateError
from rdzv_plugins.kv.sealed import NO_SECRET_HERE, is_sealed
from rdzv_plugins.protocol.documents import TORCH_STATE_KEY
from rdzv_plugins.stores import client_class, opener
from rdzv_plugins.torch.c10d_store import KeyValueStore

__all__ = ["TORCH_STORE_PREFIX", "KeyValueBackend", "create_backend"]

TORCH_STORE_PREFIX = "torch-store/"
"""The prefix of the c10d store's keys within a run."""

# The most bytes of a state; 100,000 nodes need less. torch's handler would load any size.
_MOST_STATE = 64 << 20


class KeyValueBackend(RendezvousBackend):
    """The state of torch's ``DynamicRendezvousHandler``, one value changed by compare-and-set.

    The key is ``torch-state``, not ``state``: torch stores its own pickle, which this package's
    handler must never take for a round document. The state is compressed, so that a small value
    holds four times the nodes, and corruption is detected.

    A user who can write this key can run code on every node, because torch's handler unpickles it.
    """

    KEY = TORCH_STATE_KEY

    def __init__(self, client: KeyValueClient, name: str | None = None) -> None:
        """``name`` is what torch compares with ``--rdzv-backend``; None: the client's name."""
        self._client = client
        self._name = name or client.name

    @property
    def name(self) -> str:
        """The name in ``--rdzv-backend``."""
        return self._name

    def close(self) -> None:
        """Release the connection; idempotent."""
        self._client.close()

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token, or None if there is no state.

        Raises:
            RendezvousConnectionError: the store could not be reached.
            RendezvousStateError: the state is corrupt.
        """
        entry = self._client.get(self.KEY)
        return None if entry is None else (_decode(entry), entry.version)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state if its token is still ``token``; None: create the state.

        Returns the state that is stored now, its token, and whether this call has written it. Any
        other token, of any type, changes nothing. Returns None, like torch's c10d backend, if the
        state is gone; torch's handler then creates it again from memory.

        Raises:
            RendezvousConnectionError: the store could not be reached.
            RendezvousStateError: the state is corrupt, or too large for the store.
        """
        entry, written = self._client.compare_and_set(self.KEY, zlib.compress(state), token)
        if entry is None:
            return None
        return (state if written else _decode(entry)), entry.version, written


def create_backend(params: RendezvousParameters) -> tuple[KeyValueBackend, KeyValueStore]:
    """A backend and a store of this package for your own handler, like torch's modules offer.

    ``DynamicRendezvousHandler.from_backend(params.run_id, store, backend, ...)`` takes both. They
    share one connection, which ``backend.close()`` ends.

    Args:
        params: ``backend``, ``endpoint``, ``run_id`` and ``config`` are used; of the config the
            store's own options, and ``heartbeat_timeout``, seconds that one request may take.

    Raises:
        ValueError: an unknown backend, a bad endpoint or option, or a missing client package.
        RendezvousConnectionError: the store cannot be reached or refuses us.
    """
    _, connect = opener(client_class(params.backend), params)
    client = connect(params.run_id)
    return KeyValueBackend(client, params.backend), KeyValueStore(client, TORCH_STORE_PREFIX)


def _decode(entry: Entry) -> bytes:
    if is_sealed(entry.value):
        raise RendezvousStateError(f"the run {NO_SECRET_HERE}")
    try:
        # Limit the size: a few megabytes may decompress to a thousand times as many.
        unpacks = zlib.decompressobj()
        state = unpacks.decompress(entry.value, _MOST_STATE)
        if unpacks.unconsumed_tail or (not unpacks.eof and len(state) == _MOST_STATE):
            raise zlib.error(f"more than {_MOST_STATE:,} bytes")
        if not unpacks.eof or unpacks.unused_data:
            raise zlib.error("incomplete, or more than one")
        return state
    except zlib.error as error:
        raise RendezvousStateError(
            f"the key '{KeyValueBackend.KEY}' does not hold a state of torch's handler ({error}); "
            "delete it, or use another --rdzv-id or prefix"
        ) from error
