"""A Redis user with no more rights than the documentation asks for."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from rdzv_plugins.kv import AccessDeniedError, KeyValueClient, RendezvousConnectionError
from rdzv_plugins.observe.history import Archive, archive_run_id
from rdzv_plugins.stores import open_client
from rdzv_plugins.stores import redis as backend
from rdzv_plugins.testing import KeyValueConformance, Store
from rdzv_plugins.testing.harness import SLACK
from tests.integration import topologies
from tests.integration.agents import Run, one_world, until
from tests.integration.stores import RunningStore, kind_of, started
from tests.integration.topologies import Topology

ROOT = Path(__file__).parents[2]
PASSWORD = secrets.token_hex(8)
# The backend's docstring names these rights.
DOCUMENTED = re.search(
    r"The user needs ``(?P<rights>[^`]*)`` on\s``~{<prefix>/\*``; "
    r"for a database other than 0 also ``(?P<database>[^`]*)``, "
    r"for a Cluster also\s``(?P<cluster>[^`]*)``",
    backend.__doc__ or "",
)


def documented(*needs: str) -> list[str]:
    """The rights that the documentation asks for, for these needs beside the general one."""
    assert DOCUMENTED is not None
    return " ".join(DOCUMENTED[need] for need in ("rights", *needs)).split()


def new_user(rights: list[str]) -> tuple[str, list[str]]:
    """A user's name, and what makes it."""
    user = secrets.token_hex(4)
    return user, ["ACL", "SETUSER", user, "on", f">{PASSWORD}", "~{rdzv/*", *rights]


def let_in(server: RunningStore, rights: list[str]) -> str:
    """Make a user; the endpoint for it."""
    host, port = server.address
    user, command = new_user(rights)
    admin: Any = redis.Redis(host, port)
    admin.execute_command(*command)
    admin.close()
    return f"redis://{user}:{PASSWORD}@{host}:{port}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningStore]:
    with started(kind_of("redis")) as store:
        yield store


@pytest.fixture(scope="module")
def endpoint(server: RunningStore) -> str:
    return let_in(server, documented())


@pytest.mark.full  # `test_documented_rights_suffice` asks for each kind of request once.
class TestDocumentedRightsSuffice(KeyValueConformance):
    @pytest.fixture
    def store(self, endpoint: str) -> Store:
        def connect(
            namespace: str, *, address: tuple[str, int] | None, request_timeout: float
        ) -> KeyValueClient:
            return open_client("redis", endpoint, namespace, request_timeout=request_timeout)

        return Store(open=connect)


def test_missing_right_is_told_as_such(server: RunningStore, run_id: str) -> None:
    endpoint = let_in(server, [right for right in documented() if right != "+time"])
    client = open_client("redis", endpoint, run_id)
    with pytest.raises(RendezvousConnectionError, match=r"refused the credentials .* the rights"):
        client.put("key", b"value")
    client.close()


def ask_for_everything(open: Callable[[str], KeyValueClient], run_id: str) -> None:
    with closing(open(run_id)) as client:
        version = client.put("key", b"value")
        client.put_many({"nodes/a": b"1", "nodes/b": b"2"})
        client.get_many(["key", "none"])
        client.list("nodes/")
        client.compare_and_set("key", b"other", version)
        client.add("counter", 1)
        client.wait("key", client.put("key", b"v"), 0.2)
        client.put("key", b"w")
        client.expire(60)
        client.delete_many(["key", "nodes/a"])
        client.expire(0)


def test_documented_rights_suffice(endpoint: str, run_id: str) -> None:
    ask_for_everything(partial(open_client, "redis", endpoint), run_id)


@pytest.mark.soak
# redis-py says hello where it may, and goes on where it may not.
@pytest.mark.parametrize("right", [it for it in documented() if it != "+hello"])
def test_without_any_one_right_a_run_fails_in_one_line(
    server: RunningStore, run_id: str, right: str
) -> None:
    """The right is taken out of what the user has: `-` after all others."""
    endpoint = let_in(server, [*documented(), right.replace("+", "-", 1)])
    admin: Any = redis.Redis(*server.address)
    admin.set(f"{{rdzv/{run_id}}}:watch:key", "of another program")
    admin.close()
    with pytest.raises(RendezvousConnectionError, match=r"the rights") as caught:
        ask_for_everything(partial(open_client, "redis", endpoint), run_id)
    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.mark.soak
def test_a_user_of_one_run_runs_it_and_sees_no_other(server: RunningStore, run_id: str) -> None:
    keys = re.findall(r"`(~\{[^`]+)`", (ROOT / "docs" / "operating.md").read_text())
    assert len(keys) == 4
    own = [it.replace("<prefix>", "rdzv").replace("<run id>", run_id) for it in keys]
    admin: Any = redis.Redis(*server.address)
    user, command = new_user(documented())
    admin.execute_command(*(it for it in command if not it.startswith("~")), *own)
    admin.close()
    host, port = server.address
    mine = replace(server, endpoint=f"redis://{user}:{PASSWORD}@{host}:{port}")
    with Run(mine, run_id) as run:
        agents = [run.start((2, 2)) for _ in range(2)]
        until(one_world(agents), 120)
        # The leader notes the round where all runs are listed.
        until(lambda: bool(Archive(mine.open, run_id, 60).rows()), 60)
        for other in (f"{run_id}-b", archive_run_id(f"{run_id}-b"), "x"):
            with pytest.raises(AccessDeniedError, match="the user lacks the rights"):
                mine.open(other).get("state")


def test_a_user_that_may_write_and_not_read_is_refused_before_it_writes(
    server: RunningStore, run_id: str
) -> None:
    """Others would wait for what it writes, and it would never learn what for."""
    endpoint = let_in(server, documented())
    user = endpoint.partition("//")[2].partition(":")[0]
    before, other = server.open(run_id), open_client("redis", endpoint, run_id)
    values = {"node": b"n" * 100, "bell": b"1"}
    requests: list[Callable[[KeyValueClient], object]] = [
        lambda client: client.put_many(values),  # A record that asks for a round.
        lambda client: client.put_many({"node": b"n" * 99 + b"2"}),  # A heartbeat.
        lambda client: client.compare_and_set("key", b"2", None),
        lambda client: client.add("counter", 1),
    ]
    other.put_many(values)
    admin: Any = redis.Redis(*server.address)
    admin.execute_command("ACL", "SETUSER", user, "-@read")
    found = before.list("")
    for request in requests:
        with pytest.raises(AccessDeniedError, match="the user lacks the rights"):
            request(other)
    assert before.list("") == found
    for client in (admin, before, other):
        client.close()


def test_another_database_needs_one_more_right(server: RunningStore, run_id: str) -> None:
    client = open_client("redis", let_in(server, documented("database")) + "/1", run_id)
    assert client.add("key", 1) == 1
    client.close()
    assert_refused(let_in(server, documented()) + "/1", run_id)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    with topologies.cluster(tmp_path_factory.mktemp("cluster")) as topology:
        yield topology


def let_in_to_all(cluster: Topology, rights: list[str]) -> str:
    host, port = cluster.endpoint.split(",")[0].split(":")
    user, (acl, *command) = new_user(rights)
    admin: Any = redis.RedisCluster(host, int(port))
    admin.execute_command(acl, *command, target_nodes=admin.ALL_NODES)
    admin.close()
    return f"redis://{user}:{PASSWORD}@{cluster.endpoint}"


def test_documented_rights_suffice_on_a_cluster(cluster: Topology, run_id: str) -> None:
    client = open_client(
        "redis", let_in_to_all(cluster, documented("cluster")), run_id, cluster.config
    )
    assert client.add("key", 1) == 1
    client.close()


@pytest.mark.parametrize("missing", documented("cluster")[-2:])
def test_right_missing_on_a_cluster_is_told_as_such(
    cluster: Topology, run_id: str, missing: str
) -> None:
    rights = [right for right in documented("cluster") if right != missing]
    assert_refused(let_in_to_all(cluster, rights), run_id, cluster.config)


def assert_refused(endpoint: str, run_id: str, config: Mapping[str, str] | None = None) -> None:
    """At once, and as a matter of rights."""
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=r"refused the credentials .* the rights"):
        open_client("redis", endpoint, run_id, config or {}, request_timeout=30)
    assert time.monotonic() - began < SLACK
