"""torch's contract for a rendezvous backend, as its documentation and its own tests have it."""

from __future__ import annotations

import pickle
import threading
import zlib

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token

from rdzv_plugins.backend import KeyValueBackend
from rdzv_plugins.kv import MemoryClient, MemoryServer, RendezvousStateError


@pytest.fixture
def client() -> MemoryClient:
    return MemoryClient(MemoryServer(), "run")


@pytest.fixture
def backend(client: MemoryClient) -> KeyValueBackend:
    return KeyValueBackend(client)


def test_the_name_is_the_clients_unless_given(client: MemoryClient) -> None:
    assert KeyValueBackend(client).name == "memory"
    assert KeyValueBackend(client, "redis").name == "redis"


def test_no_state_is_none(backend: KeyValueBackend) -> None:
    assert backend.get_state() is None


@pytest.mark.parametrize("state", [b"x", b"", bytes(range(256)) * 1000, pickle.dumps({"a": 1})])
def test_without_a_token_a_state_is_created(backend: KeyValueBackend, state: bytes) -> None:
    result = backend.set_state(state)
    assert result is not None
    stored, token, written = result
    assert (stored, written) == (state, True)
    assert token is not None
    assert backend.get_state() == (state, token)


def test_without_a_token_an_existing_state_stays(backend: KeyValueBackend) -> None:
    first = backend.set_state(b"x")
    assert first is not None
    assert backend.set_state(b"y") == (b"x", first[1], False)
    assert backend.get_state() == (b"x", first[1])


def test_the_current_token_replaces_the_state(backend: KeyValueBackend) -> None:
    backend.set_state(b"x")
    state = backend.get_state()
    assert state is not None
    result = backend.set_state(b"y", state[1])
    assert result is not None
    assert (result[0], result[2]) == (b"y", True)
    assert result[1] != state[1]
    again = backend.set_state(b"z", result[1])
    assert again is not None
    assert again[2]


def test_an_old_token_changes_nothing(backend: KeyValueBackend) -> None:
    first = backend.set_state(b"x")
    assert first is not None
    second = backend.set_state(b"y", first[1])
    assert second is not None
    assert backend.set_state(b"z", first[1]) == (b"y", second[1], False)
    # Nor does one of a state with the same bytes.
    third = backend.set_state(b"x", second[1])
    assert third is not None
    assert backend.set_state(b"z", first[1]) == (b"x", third[1], False)


@pytest.mark.parametrize("token", ["invalid", "", 0, 1, True, 1.5, b"x", object(), (), [], {}])
def test_a_token_of_any_other_kind_changes_nothing(backend: KeyValueBackend, token: Token) -> None:
    assert backend.set_state(b"x", token) is None
    assert backend.get_state() is None
    first = backend.set_state(b"x")
    assert first is not None
    assert backend.set_state(b"y", token) == (b"x", first[1], False)


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


def test_of_writers_at_once_one_wins(backend: KeyValueBackend) -> None:
    for _ in range(100):
        current = backend.get_state()
        results: list[bool] = []
        start = threading.Barrier(4)

        def write(state: bytes, token: Token, start: threading.Barrier, won: list[bool]) -> None:
            start.wait(10)
            result = backend.set_state(state, token)
            assert result is not None
            won.append(result[2])

        token = None if current is None else current[1]
        threads = [
            threading.Thread(target=write, args=(bytes([n]), token, start, results), daemon=True)
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(results) == [False, False, False, True]
