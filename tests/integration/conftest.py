"""One server a kind and a session."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.integration.stores import KINDS, Kind, RunningStore, running


@pytest.fixture(scope="session", params=KINDS, ids=lambda kind: kind.name)
def running_store(request: pytest.FixtureRequest) -> Iterator[RunningStore]:
    """Each store in turn. A test that stops a server of it starts it again."""
    kind: Kind = request.param
    with running(kind) as store:
        yield store


@pytest.fixture
def run_id() -> str:
    return f"run-{secrets.token_hex(8)}"
