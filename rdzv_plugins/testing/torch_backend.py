"""The contract of torch's ``RendezvousBackend``, as its docstrings state it."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from rdzv_plugins.kv import ClientClosedError, KeyValueClient
from rdzv_plugins.testing.harness import Harness
from rdzv_plugins.testing.threads import together
from rdzv_plugins.torch.rendezvous_backend import KeyValueBackend

STATES = [b"x", b"", bytes(range(256)) * 100]
GARBAGE: list[Token] = ["invalid", "", 0, 1.5, b"x", object, (), [], {}]


class TorchConformance(Harness):
    """Override ``backend`` and ``second`` to test your own `RendezvousBackend`."""

    @pytest.fixture
    def backend(self, client: KeyValueClient) -> RendezvousBackend:
        return KeyValueBackend(client)

    @pytest.fixture
    def second(self, other: KeyValueClient) -> RendezvousBackend:
        """Another node's backend for the same run."""
        return KeyValueBackend(other)

    def test_backend_has_a_name(self, backend: RendezvousBackend) -> None:
        assert backend.name

    def test_no_state_is_none(self, backend: RendezvousBackend) -> None:
        assert backend.get_state() is None

    @pytest.mark.parametrize("state", STATES, ids=len)
    def test_state_is_created_without_a_token(
        self, backend: RendezvousBackend, second: RendezvousBackend, state: bytes
    ) -> None:
        stored, token = _write(backend, state, None)
        assert stored == state
        assert token is not None
        assert second.get_state() == (state, token)

    def test_existing_state_stays_without_a_token(
        self, backend: RendezvousBackend, second: RendezvousBackend
    ) -> None:
        first = _write(backend, b"x", None)
        assert second.set_state(b"y") == (*first, False)
        assert second.set_state(b"y", None) == (*first, False)
        assert backend.get_state() == first

    def test_current_token_replaces_the_state(
        self, backend: RendezvousBackend, second: RendezvousBackend
    ) -> None:
        _, token = _write(backend, b"x", None)
        state = second.get_state()
        assert state is not None
        replaced = _write(second, b"y", state[1])
        assert replaced[0] == b"y"
        assert replaced[1] != token
        assert backend.get_state() == replaced

    def test_stale_token_brings_the_current_state(
        self, backend: RendezvousBackend, second: RendezvousBackend
    ) -> None:
        _, stale = _write(backend, b"x", None)
        current = _write(second, b"y", stale)
        assert backend.set_state(b"z", stale) == (*current, False)
        # Also if the state has the same bytes again.
        current = _write(second, b"x", current[1])
        assert backend.set_state(b"z", stale) == (*current, False)
        assert backend.get_state() == current

    @pytest.mark.parametrize("token", GARBAGE, ids=repr)
    def test_garbage_token_changes_nothing(self, backend: RendezvousBackend, token: Token) -> None:
        result = backend.set_state(b"y", token)
        assert result is None or not result[2]
        assert backend.get_state() is None
        current = _write(backend, b"x", None)
        assert backend.set_state(b"y", token) == (*current, False)
        assert backend.get_state() == current

    def test_one_of_many_writers_wins(
        self, backend: RendezvousBackend, second: RendezvousBackend
    ) -> None:
        token: Token = None
        for round_number in range(25):
            values = [b"%d-%d" % (round_number, writer) for writer in range(4)]
            results = together(
                [
                    lambda node=node, value=value, token=token: node.set_state(value, token)  # type: ignore[misc]
                    for node, value in zip([backend, second] * 2, values, strict=True)
                ]
            )
            won = [result for result in results if result is not None and result[2]]
            assert len(won) == 1
            state, token, _ = won[0]
            assert backend.get_state() == second.get_state() == (state, token)

    def test_closed_connection_is_a_connection_error(
        self, backend: RendezvousBackend, client: KeyValueClient
    ) -> None:
        client.close()
        with pytest.raises(ClientClosedError):
            backend.get_state()
        with pytest.raises(ClientClosedError):
            backend.set_state(b"x")


def _write(backend: RendezvousBackend, state: bytes, token: Token) -> tuple[bytes, Token]:
    result = backend.set_state(state, token)
    assert result is not None
    assert result[2], "the state was not written"
    return result[0], result[1]
