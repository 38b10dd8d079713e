"""A Redis user with no more rights than the documentation asks for."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from rdzv_plugins.backends import open_client
from rdzv_plugins.backends import redis as backend
from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError
from rdzv_plugins.testing import KeyValueConformance, Store
from tests.integration.stores import KINDS, RunningStore, started

PASSWORD = secrets.token_hex(8)
# As in the backend's docstring, whose default prefix is "rdzv".
DOCUMENTED = re.search(
    r"The user needs ``(?P<rights>[^`]*)`` on\s``~{<prefix>/", backend.__doc__ or ""
)


def let_in(server: RunningStore, user: str, rights: str) -> str:
    """Make the user; the endpoint for it."""
    host, port = server.address
    admin: Any = redis.Redis(host, port)
    admin.execute_command("ACL", "SETUSER", user, "on", f">{PASSWORD}", "~{rdzv/*", *rights.split())
    admin.close()
    return f"redis://{user}:{PASSWORD}@{host}:{port}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningStore]:
    with started(next(kind for kind in KINDS if kind.name == "redis")) as store:
        yield store


@pytest.fixture(scope="module")
def endpoint(server: RunningStore) -> str:
    assert DOCUMENTED is not None
    return let_in(server, "least", DOCUMENTED["rights"])


class TestDocumentedRightsSuffice(KeyValueConformance):
    @pytest.fixture
    def store(self, endpoint: str) -> Store:
        def connect(
            namespace: str, *, address: tuple[str, int] | None, request_timeout: float
        ) -> KeyValueClient:
            return open_client("redis", endpoint, namespace, request_timeout=request_timeout)

        return Store(open=connect)


def test_missing_right_is_told_as_such(server: RunningStore, run_id: str) -> None:
    assert DOCUMENTED is not None
    endpoint = let_in(server, "less", DOCUMENTED["rights"].replace("+time", ""))
    client = open_client("redis", endpoint, run_id)
    with pytest.raises(RendezvousConnectionError, match=r"refused the credentials .* the rights"):
        client.put("key", b"value")
    client.close()
