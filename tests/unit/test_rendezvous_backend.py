"""What torch's backend contract leaves to us; the contract itself is in `TorchConformance`."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest

from rdzv_plugins.kv import MemoryClient, MemoryServer, RendezvousStateError
from rdzv_plugins.torch.rendezvous_backend import KeyValueBackend


@pytest.fixture
def client() -> MemoryClient:
    return MemoryClient(MemoryServer(), "run")


@pytest.fixture
def backend(client: MemoryClient) -> KeyValueBackend:
    return KeyValueBackend(client)


def test_the_name_is_the_clients_unless_given(client: MemoryClient) -> None:
    assert KeyValueBackend(client).name == "memory"
    assert KeyValueBackend(client, "redis").name == "redis"


def test_a_token_for_a_state_that_is_gone_creates_nothing(
    backend: KeyValueBackend, client: MemoryClient
) -> None:
    first = backend.set_state(b"x")
    assert first is not None
    client.delete(KeyValueBackend.KEY)
    assert backend.set_state(b"y", first[1]) is None
    assert backend.get_state() is None


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"garbage", zlib.compress(b"x")[:-1], zlib.compress(b"x") + b"x", b'{"schema":1}',
        zlib.compress(bytes((64 << 20) + 1), 1),
    ],
    ids=["empty", "garbage", "cut", "longer", "json", "too large"],
)  # fmt: skip
def test_a_corrupt_state_is_told(
    backend: KeyValueBackend, client: MemoryClient, damage: bytes
) -> None:
    client.put(KeyValueBackend.KEY, damage)
    with pytest.raises(RendezvousStateError, match="torch-state"):
        backend.get_state()
    with pytest.raises(RendezvousStateError, match="torch-state"):
        backend.set_state(b"x")


@pytest.mark.soak
def test_a_bomb_takes_no_more_memory_than_the_largest_state(
    backend: KeyValueBackend, client: MemoryClient
) -> None:
    """1.9 MB became 1.5 GB in each agent."""
    packs = zlib.compressobj(9)
    bomb = b"".join(packs.compress(bytes(1 << 24)) for _ in range(12)) + packs.flush()
    assert len(bomb) < 250_000
    client.put(KeyValueBackend.KEY, bomb)
    tracemalloc.start()
    with pytest.raises(RendezvousStateError, match="more than 67,108,864 bytes"):
        backend.get_state()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * (64 << 20)


def test_the_backend_leaves_the_round_document_alone(
    backend: KeyValueBackend, client: MemoryClient
) -> None:
    document = client.put("state", b"{}")
    backend.set_state(b"x")
    entry = client.get("state")
    assert entry is not None
    assert entry.version == document
