"""What torch's backend contract leaves to us; the contract itself is in `TorchConformance`."""

from __future__ import annotations

import zlib

import pytest

from rdzv_plugins.kv import MemoryClient, MemoryServer, RendezvousStateError
from rdzv_plugins.torch_compat.rendezvous_backend import KeyValueBackend


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


@pytest.mark.parametrize("damage", [b"", b"garbage", zlib.compress(b"x")[:-1], b'{"schema":1}'])
def test_a_corrupt_state_is_told(
    backend: KeyValueBackend, client: MemoryClient, damage: bytes
) -> None:
    client.put(KeyValueBackend.KEY, damage)
    with pytest.raises(RendezvousStateError, match="torch-state"):
        backend.get_state()
    with pytest.raises(RendezvousStateError, match="torch-state"):
        backend.set_state(b"x")


def test_it_leaves_the_round_document_alone(backend: KeyValueBackend, client: MemoryClient) -> None:
    document = client.put("state", b"{}")
    backend.set_state(b"x")
    entry = client.get("state")
    assert entry is not None
    assert entry.version == document
