"""A store that refuses a client in the midst of a run, and says so: `AccessDeniedError`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv_plugins.kv import AccessDeniedError
from tests.integration.administrators import ADMINISTRATORS, Administrator, administered


@pytest.fixture(params=ADMINISTRATORS, ids=lambda kind: kind.name)
def administrator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Administrator]:
    with administered(request.param, tmp_path) as administrator:
        yield administrator


def test_rights_that_end_while_connected(administrator: Administrator, run_id: str) -> None:
    client = administrator.store.open(run_id)
    try:
        client.put("key", b"value")
        administrator.forbid(run_id)
        with pytest.raises(AccessDeniedError):
            client.put("key", b"another")
        with pytest.raises(AccessDeniedError):
            client.wait("key", None, 5)
    finally:
        client.close()


def test_secret_that_ends_and_is_not_handed_out(administrator: Administrator, run_id: str) -> None:
    client = administrator.store.open(run_id)
    try:
        client.put("key", b"value")
        administrator.rotate(hand_out=False)
        with pytest.raises(AccessDeniedError):
            client.get("key")
        with pytest.raises(AccessDeniedError):
            administrator.store.open(run_id)
    finally:
        client.close()
