"""PostgreSQL's own: rights, tables, errors, standbys, and what its waiters cost others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.settings.endpoint import redact
from rdzv_plugins.stores import open_client
from rdzv_plugins.stores.postgres import Connection
from rdzv_plugins.testing import Proxy
from rdzv_plugins.testing.harness import present, until
from rdzv_plugins.testing.threads import Background
from tests import Measure
from tests.integration import agents
from tests.integration.agents import Run, Watch, await_beats, one_world
from tests.integration.credentials import Certificates
from tests.integration.stores import RunningStore, kind_of, role_of_postgres, started
from tests.servers import LocalServer, Security, ServerError, start
from tests.servers.postgres import Postgres

KIND = kind_of("postgres")

# Seconds for clients to find the promoted standby, on a machine that has other things to do too.
PATIENCE = 30.0


@pytest.fixture(scope="module")
def store() -> Iterator[RunningStore]:
    with started(KIND) as store:
        yield store


@pytest.fixture
def admin(store: RunningStore) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(store.endpoint, autocommit=True) as connection:
        yield connection


def at(store: RunningStore, *, user: str = "postgres", database: str = "postgres") -> RunningStore:
    host, port = store.address
    return replace(store, endpoint=f"postgresql://{user}@{host}:{port}/{database}")


def configured(store: RunningStore, **config: str) -> RunningStore:
    return replace(store, config={**store.config, **config})


def refusal(store: RunningStore, timeout: float = 5.0) -> str:
    """What a client is told that cannot be opened, in one line."""
    with pytest.raises(RendezvousConnectionError) as caught:
        store.open("run", request_timeout=timeout).close()
    text = str(caught.value)
    assert "\n" not in text
    assert redact(store.endpoint) in text
    return text


def use(store: RunningStore, run_id: str) -> None:
    """Each kind of request."""
    client = store.open(run_id)
    client.put_many({"key": b"one", "other": b"one"})
    entry, won = client.compare_and_set("key", b"two", present(client.get("key")).version)
    assert won
    assert client.wait("key", None, 1) == entry == client.list("")["key"]
    assert client.add("count", 1) == 1
    client.delete("key")
    client.expire(60)
    client.expire(0)
    client.close()


def test_missing_table_is_made_by_the_statement_that_the_error_shows(
    store: RunningStore, admin: psycopg.Connection[Any], run_id: str
) -> None:
    admin.execute("CREATE SCHEMA runs")
    configured_store = configured(store, create_table="false", table="runs.Made")
    told = refusal(configured_store)
    assert "has no table runs.Made; set create_table=true, or run: CREATE TABLE" in told
    admin.execute(told.partition("run: ")[2].replace("Made", '"Made"'))
    use(configured_store, run_id)


def test_table_can_be_named_and_many_may_make_it_at_once(store: RunningStore, run_id: str) -> None:
    named = configured(store, table="at_once")
    opening = [Background(lambda: named.open(run_id)) for _ in range(8)]
    for each in opening:
        each.result(30).close()
    use(named, run_id)
    for bad in ("", "a.b.c", 'a"b', "a%b", "a b"):
        with pytest.raises(ValueError, match="option 'table'"):
            configured(store, table=bad).open(run_id)


def test_least_rights(store: RunningStore, admin: psycopg.Connection[Any], run_id: str) -> None:
    admin.execute(role_of_postgres("least"))
    least = configured(at(store, user="least"), table="least")
    assert "denied a right (permission denied for schema public" in refusal(least)
    store.open(run_id).close()
    configured(store, table="least").open(run_id).close()
    assert "SELECT, INSERT, UPDATE, DELETE on the table least" in refusal(least)
    admin.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON least TO least")
    use(least, run_id)


def test_what_is_wrong_is_told(store: RunningStore, admin: psycopg.Connection[Any]) -> None:
    told = refusal(at(store, database="nowhere"))
    assert 'has no such database (connection to server at "127.0.0.1"' in told
    assert "$RDZV_PLUGINS_PASSWORD" in refusal(at(store, user="nobody"))
    admin.execute("CREATE TABLE other (id int)")
    assert "has a table other with another schema" in refusal(configured(store, table="other"))
    admin.execute(role_of_postgres("few", "CONNECTION LIMIT 0"))
    told = refusal(at(store, user="few"), 2.0)
    assert "had no connection left for 2 s" in told
    admin.execute(role_of_postgres("outsider"))
    admin.execute("CREATE DATABASE closed")
    admin.execute("REVOKE CONNECT ON DATABASE closed FROM public")
    assert "CONNECT on the database" in refusal(at(store, user="outsider", database="closed"))
    tls = configured(store, tls="true")
    assert "server has TLS enabled" in refusal(tls)


def test_what_the_server_said_is_told_if_it_falls_silent(
    store: RunningStore, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last attempt of a request ends at its limit; that tells nobody why."""
    admin.execute(role_of_postgres("limited", "CONNECTION LIMIT 0"))
    with Proxy(store.address) as proxy:
        connect = Connection.open

        def open_once(*arguments: Any) -> Connection:
            try:
                return connect(*arguments)
            except psycopg.OperationalError:
                proxy.black_hole()
                raise

        monkeypatch.setattr(Connection, "open", open_once)
        endpoint = f"postgresql://limited@127.0.0.1:{proxy.address[1]}/postgres"
        told = refusal(replace(store, endpoint=endpoint), 2.0)
    assert "had no connection left for 2 s (" in told


@pytest.mark.parametrize(
    "endpoint",
    ["mysql://h/d", "postgresql://h:x/d", "postgresql://u:hunter2@h/d?nonsense=1", "a b"],
)
def test_bad_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint") as caught:
        open_client("postgres", endpoint, "run")
    assert "hunter2" not in str(caught.value)


def test_places_that_libpq_knows(
    store: RunningStore, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = store.address
    service = tmp_path / "services"
    service.write_text(f"[runs]\nhost={host}\nport={port}\nuser=postgres\ndbname=postgres\n")
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    for endpoint in ("postgresql:///?service=runs", ""):
        use(replace(store, endpoint=endpoint), run_id)
        monkeypatch.setenv("PGSERVICE", "runs")
    monkeypatch.delenv("PGSERVICE")
    monkeypatch.setenv("PGUSER", "postgres")
    use(configured(replace(store, endpoint=f"{host}:{port}"), database="postgres"), run_id)


def test_only_writes_that_somebody_waits_for_notify(
    store: RunningStore, admin: psycopg.Connection[Any], run_id: str
) -> None:
    """A notification wakes each listening session of the database, and commits one by one."""
    client = store.open(run_id)
    client.put_many({"waited": b"", "not": b""})
    channels = {
        key: "rdzv_" + sha256(f"rdzv/{run_id}{key}".encode()).hexdigest()[:32]
        for key in ("waited", "not")
    }
    for channel in channels.values():
        admin.execute(f"LISTEN {channel}")
    waiter = Background(lambda: client.wait("waited", present(client.get("waited")).version, 30))
    assert not waiter.done(0.3)
    other = store.open(run_id)
    for _ in range(10):
        other.put("not", b"")
    other.put("waited", b"")
    assert waiter.result(5) is not None
    heard = [it.channel for it in admin.notifies(timeout=0.5)]
    assert heard == [channels["waited"]]
    client.close()
    other.close()


def test_a_node_holds_two_connections(store: RunningStore, run_id: str) -> None:
    with psycopg.connect(store.endpoint, autocommit=True) as admin:
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'rdzv-plugins'"

        def held() -> int:
            row = admin.execute(count).fetchone()
            assert row is not None
            return int(row[0])

        assert until(lambda: held() == 0, 30)
        client = store.open(run_id)
        for number in range(5):
            waiters = [Background(lambda: client.wait("key", None, 30)) for _ in range(4)]
            assert not waiters[0].done(0.1)
            assert client.add("count", 1) == number + 1
            client.interrupt()
            assert [waiter.result(5) for waiter in waiters] == [None] * 4
        assert until(lambda: held() == 2, 30), held()
        client.close()
        assert until(lambda: held() == 0, 30)


def test_a_blocked_write_ends_in_the_server_too(
    store: RunningStore, admin: psycopg.Connection[Any], run_id: str
) -> None:
    client = store.open(run_id, request_timeout=1)
    client.put("key", b"one")
    with admin.transaction():
        admin.execute("LOCK TABLE rdzv")
        with pytest.raises(RendezvousConnectionError, match=r"(for|within) 1 s"):
            client.put("key", b"late")
        time.sleep(0.5)
    time.sleep(0.5)
    assert present(client.get("key")).value == b"one"
    client.close()


def test_what_was_never_sent_is_not_in_doubt(
    store: RunningStore, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = store.open(run_id)
    with Proxy(store.address) as proxy:
        client: Any = store.open(run_id, address=proxy.address)
        replace = client._replace

        def lose_the_server(*arguments: Any) -> bool:
            monkeypatch.setattr(client, "_replace", replace)
            proxy.refuse()
            client._disconnect()
            rival.add("count", 1)
            threading.Timer(0.2, proxy.accept).start()
            return bool(replace(*arguments))

        monkeypatch.setattr(client, "_replace", lose_the_server)
        assert client.add("count", 1) == 2
        client.close()
    rival.close()


def test_a_server_with_tls_that_dies_is_no_failed_handshake(tmp_path: Path, run_id: str) -> None:
    with started(KIND, security=Certificates.make(tmp_path).security()) as guarded:
        assert guarded.server is not None
        client = guarded.open(run_id, request_timeout=30)
        version = client.put("key", b"one")
        for how in ("kill", "stop"):
            waiter = Background(partial(client.wait, "key", version, 30))
            assert not waiter.done(0.3)
            getattr(guarded.server.nodes[0], how)()
            back = Background(guarded.server.nodes[0].start)
            assert present(client.get("key")).version == version
            back.result(30)
            version = client.put("key", b"two")
            assert present(waiter.result(15)).version == version
        client.close()


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    pair = Security(cert_file=certificates.server.cert_file, key_file=certificates.client.key_file)
    with pytest.raises(ServerError, match=r"ended during its start:\n.*private key"):
        start("postgres", security=pair)


CROWDED = """
import os, resource, sys
from rdzv_plugins.stores import open_client
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
client = open_client("postgres", sys.argv[1], sys.argv[2])
version = client.put("key", b"one")
assert client.wait("key", version, 0.2) is None
assert min(db.pgconn.socket for db in client._idle) >= 1024
print(client.get("key").value.decode())
client.close()
"""


def test_a_process_of_many_descriptors(store: RunningStore, run_id: str) -> None:
    command = [sys.executable, "-c", CROWDED, store.endpoint, run_id]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.strip() == "one", ended.stderr


# The store of both servers; kills the primary, promotes the standby, and returns when it did.
Replicated = tuple[RunningStore, Callable[[], float]]


@pytest.fixture
def replicated() -> Iterator[Replicated]:
    """A primary with a synchronous standby."""
    with started(KIND) as primary, started(KIND) as standby:
        assert primary.server is not None
        assert standby.server is not None
        _follow(standby.server, primary)
        with psycopg.connect(primary.endpoint, autocommit=True) as admin:
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            admin.execute("SELECT pg_reload_conf()")
        hosts = ",".join("{}:{}".format(*it.address) for it in (primary, standby))
        server = primary.server

        def fail_over() -> float:
            killed = time.monotonic()
            server.nodes[0].kill()
            with psycopg.connect(standby.endpoint, autocommit=True) as admin:
                admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
                admin.execute("SELECT pg_promote()")
            return killed

        both = f"postgresql://postgres@{hosts}/postgres"
        yield replace(primary, endpoint=both), fail_over


def _follow(standby: LocalServer, primary: RunningStore) -> None:
    """Make one server the other's standby."""
    (node,) = standby.nodes
    node.stop()
    data = node.directory / "data"
    kind: Any = node._kind
    assert isinstance(kind, Postgres)
    subprocess.run(["rm", "-r", str(data)], check=True)
    copy = str(kind._binary.parent / "pg_basebackup")
    command = [copy, "-d", primary.endpoint, "-D", str(data), "-R", "-c", "fast", "--no-sync"]
    subprocess.run(kind._as_account(*command), check=True, cwd=node.directory)
    node.start()


def test_clients_follow_the_primary(
    replicated: Replicated, run_id: str, record_property: Measure
) -> None:
    store, fail_over = replicated
    # The standby takes seconds to become the primary, and a client fails after request_timeout.
    client = store.open(run_id, request_timeout=PATIENCE)
    version = client.put("key", b"before")
    waiter = Background(lambda: client.wait("key", version, 60))
    assert not waiter.done(0.3)
    killed = fail_over()

    def write() -> bool:
        try:
            return client.compare_and_set("key", b"after", version)[1]
        except RendezvousConnectionError:
            return False

    assert until(write, PATIENCE), "the write before the primary's death is lost"
    record_property("written again, s", round(time.monotonic() - killed, 2))
    assert present(waiter.result(PATIENCE)).value == b"after"
    client.close()


def test_a_standby_alone_is_told(replicated: Replicated, run_id: str) -> None:
    store, _ = replicated
    endpoint = store.endpoint
    first, _, second = endpoint.partition("@")[2].partition("/")[0].partition(",")
    alone = replace(store, endpoint=endpoint.replace(f"{first},{second}", second))
    told = refusal(alone, 4.0)
    assert "accepted no writes for 4 s" in told
    assert "it is a standby" in told
    reversed_hosts = endpoint.replace(f"{first},{second}", f"{second},{first}")
    use(replace(store, endpoint=reversed_hosts), run_id)


def test_primary_dies_while_a_round_runs(
    replicated: Replicated, run_id: str, record_property: Measure
) -> None:
    store, fail_over = replicated
    with Run(store, run_id) as run:
        members = [run.start((2, 3)) for _ in range(2)]
        agents.until(one_world(members), 30)
        with Watch(members) as watch:
            killed = fail_over()
            await_beats(store, run_id, len(members), PATIENCE)
            record_property("beating again, s", round(time.monotonic() - killed, 2))
            time.sleep(2)
        assert watch.seen == []
        assert [len(agent.rounds) for agent in members] == [1, 1]
        members.append(run.start((2, 3)))
        agents.until(one_world(members), 30)
