"""For how long two worlds of one run train, where some nodes lose the store and others do not.

Real torchrun agents and real servers. The workers note each moment that matters: "begin", and
"sigterm" as their agent stops them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from rdzv_plugins.testing.threads import Background
from tests import Measure, replace
from tests.fleet.agents import TORCHRUN
from tests.integration import forked
from tests.integration.agents import Run as Players
from tests.integration.agents import crash
from tests.integration.credentials import ADMINISTRATORS, administered
from tests.integration.jobs import PATIENCE, Job
from tests.integration.stores import RunningStore, every_store, role_of_postgres

# A lease of 3 s, as in the other scenarios with torchrun.
INTERVAL, LEASE = 1.0, 3.0
CONFIG: dict[str, object] = {
    "keep_alive_interval": INTERVAL,
    "keep_alive_max_attempt": 3,
    "replacement_timeout": 0,
    "last_call_timeout": 1,
    "heartbeat_timeout": 2,
}

# torch's agents look ten times a second; they share two cores with all that a test runs.
SOON = 3.0


class Doorkeeper:
    """Users of a Redis or a PostgreSQL that are let in, or are not, from one moment to the next."""

    def __init__(self, store: RunningStore) -> None:
        self._store = store
        host, port = store.address
        self._is_redis = store.name == "redis"
        self._redis: Any = redis.Redis(host, port) if self._is_redis else None
        self._endpoint = store.endpoint

    def admit(self, user: str) -> RunningStore:
        """The store as this user reaches it."""
        host, port = self._store.address
        if self._is_redis:
            self._redis.acl_setuser(
                user, enabled=True, passwords=["+secret"], keys=["*"], channels=["*"],
                categories=["+@all"], reset=True,
            )  # fmt: skip
            return replace(self._store, endpoint=f"redis://{user}:secret@{host}:{port}")
        self._ask(role_of_postgres(user, "SUPERUSER"))
        return replace(self._store, endpoint=f"postgresql://{user}@{host}:{port}/postgres")

    def shut_out(self, user: str) -> float:
        """Refuse the user from now on, and end what it has; returns when."""
        if self._is_redis:
            self._redis.acl_setuser(user, enabled=False)
            self._redis.execute_command("CLIENT", "KILL", "USER", user)
        else:
            self._ask(f"ALTER ROLE {user} NOLOGIN")
            self._ask(
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{user}'"
            )
        return time.monotonic()

    def let_in(self, user: str) -> None:
        if self._is_redis:
            self._redis.acl_setuser(user, enabled=True)
        else:
            self._ask(f"ALTER ROLE {user} LOGIN")

    def _ask(self, statement: str) -> None:
        with psycopg.connect(self._endpoint, autocommit=True) as db:
            db.execute(statement)


Submit = Callable[..., Job]


@contextmanager
def jobs(folder: Path, **options: object) -> Iterator[Submit]:
    """Makes the parts of one job; each reaches the store in its own way."""
    made: list[Job] = []

    def submit(store: RunningStore) -> Job:
        run_id = made[0].run_id if made else None
        job = Job(
            folder,
            store,
            nodes="1:3",
            run_id=run_id,
            **{**CONFIG, **options},
        )
        made.append(job)
        return job

    try:
        yield submit
    finally:
        for job in made:
            job.close()


with_users = pytest.mark.parametrize(
    "store", ["redis", pytest.param("postgres", marks=pytest.mark.soak)], indirect=True
)


@with_users
def test_all_that_are_refused_stop_before_a_newcomer_trains(
    store: RunningStore, tmp_path: Path, record_property: Measure
) -> None:
    """The password is rotated, and the old nodes never read it again: alone they train on."""
    door = Doorkeeper(store)
    with jobs(tmp_path) as submit:
        old, new = submit(door.admit("old")), submit(store)
        old.begin("ab")
        refused = door.shut_out("old")
        for name in "ab":
            old.await_line(name, "the store refuses all nodes")
        old.assert_noted("a", [], refused, LEASE)
        assert old.noted("b", refused) == []
        came = time.monotonic()
        new.start_at("c")
        stopped = {
            name: old.await_event(name, "sigterm", 30 + LEASE, after=refused) for name in "ab"
        }
        world = new.await_begun("c")
        began = min(world.began.values())
        record_property("workers stopped after, s", round(max(stopped.values()) - came, 2))
        record_property("two worlds, s", round(max(stopped.values()) - began, 2))
        assert max(stopped.values()) < began + SOON
        for name in "ab":
            old.await_line(name, "the store refuses it", "its agent stops the workers")
        # They ask again, and come back once they are let in.
        door.let_in("old")
        everybody = [*old.agents.values(), *new.agents.values()]
        old.agents = {agent.name: agent for agent in everybody}
        assert old.await_begun("abc", after=began).size == 3


@with_users
def test_a_node_that_alone_is_refused_stops_and_the_other_goes_on(
    store: RunningStore, tmp_path: Path, record_property: Measure
) -> None:
    door = Doorkeeper(store)
    with jobs(tmp_path) as submit:
        one, other = submit(door.admit("one")), submit(door.admit("other"))
        one.start_at("a")
        other.start_at("b")
        together = {**one.agents, **other.agents}
        one.agents = other.agents = together
        one.await_begun("ab")
        refused = door.shut_out("one")
        stopped = one.await_event("a", "sigterm", LEASE + 10, after=refused)
        began = max(other.await_begun("b", after=refused).began.values())
        record_property("workers stopped after, s", round(stopped - refused, 2))
        record_property("two worlds, s", round(stopped - began, 2))
        assert stopped < began + SOON
        door.let_in("one")
        one.await_begun("ab", after=began)


@with_users
def test_a_node_refused_while_agents_exchange_their_roles_stops_and_comes_back(
    store: RunningStore, tmp_path: Path, record_property: Measure
) -> None:
    """It waits for the word of an agent that never gives it."""
    door = Doorkeeper(store)
    # Its workers run this long before its agent looks whether they are to stop.
    launcher = (*TORCHRUN, "--monitor-interval=5")
    with jobs(tmp_path, launcher=launcher) as submit:
        job = submit(door.admit("one"))
        job.begin("b")
        config = {name: str(value) for name, value in CONFIG.items()}
        silent = Players(store, job.run_id).handler((1, 3), **config)
        try:
            info = Background(silent.next_rendezvous).result(PATIENCE)
            assert (info.rank, info.world_size) == (0, 2)
            info.store.wait(["torchelastic/role_info/1"])
            refused = door.shut_out("one")
            job.await_that(lambda: "sigterm" in job.noted("b", refused), "b in its loop", 30)
            record_property("in its loop after, s", round(time.monotonic() - refused, 2))
            job.await_line("b", "the store refuses it", "its agent stops the workers")
        finally:
            crash(silent)
        door.let_in("one")
        job.await_begun("b", after=time.monotonic())


@every_store
def test_a_node_that_comes_back_from_a_silent_store_stops_at_once_and_tells(
    store: RunningStore, tmp_path: Path, record_property: Measure
) -> None:
    """Meanwhile its workers run on, and a fence keeps them from the checkpoint."""
    fence = tmp_path / "checkpoint.fence"

    def tokens() -> list[int]:
        log = fence.with_suffix(".log")
        return [int(line) for line in log.read_text().split()] if log.exists() else []

    with store.proxy() as proxy, jobs(tmp_path) as submit:
        away = submit(replace(store, endpoint=store.endpoint_at(proxy.address)))
        there = submit(store)
        away.start_at("a", training={"fence": fence})
        there.start_at("b", training={"fence": fence})
        away.agents = there.agents = {**away.agents, **there.agents}
        away.await_begun("ab")
        away.await_that(tokens, "the first token", 60)
        proxy.black_hole()
        cut = time.monotonic()
        began = max(there.await_begun("b", after=cut).began.values())
        away.await_event("a", "fenced")
        away.await_line("a", "what runs goes on, and this node keeps trying")
        assert away.noted("a", cut) == ["fenced"]
        proxy.release()
        released = time.monotonic()
        told = away.await_line("a", "two worlds of this run may have trained at once")
        seen = time.monotonic()
        stopped = away.await_event("a", "sigterm", 30)
        record_property("workers stopped after the network was back, s", stopped - released)
        record_property("workers stopped after it was told, s", stopped - seen)
        record_property("two worlds, s", round(stopped - began, 2))
        assert stopped < seen + SOON
        seconds = float(told.partition("for at most ")[2].partition(" s")[0])
        assert stopped - began <= seconds + SOON
        away.await_begun("ab", after=began)
        # One that came first may have trained alone before.
        away.await_that(lambda: len({*tokens()}) >= 3, "a token of each round", 60)
    assert tokens() == sorted(tokens())


@every_store
def test_with_on_outage_stop_the_workers_stop(
    store: RunningStore, tmp_path: Path, record_property: Measure
) -> None:
    limit = 2.5
    with (
        store.proxy() as proxy,
        jobs(tmp_path, on_outage="stop", outage_limit=limit) as submit,
    ):
        away = submit(replace(store, endpoint=store.endpoint_at(proxy.address)))
        there = submit(store)
        away.start_at("a")
        there.start_at("b")
        away.agents = there.agents = {**away.agents, **there.agents}
        away.await_begun("ab")
        proxy.black_hole()
        cut = time.monotonic()
        stopped = away.await_event("a", "sigterm", limit + 10)
        record_property("workers stopped after, s", round(stopped - cut, 2))
        assert stopped - cut < limit + SOON
        away.await_line("a", f"no heartbeat of it is accepted for {limit} s, its workers are")
        assert not [line for line in away.lines("a") if "what runs goes on" in line]
        began = max(there.await_begun("b", after=cut).began.values())
        record_property("two worlds, s", round(stopped - began, 2))
        assert stopped < began
        proxy.release()
        away.await_begun("ab", after=began)


@pytest.mark.soak
@pytest.mark.parametrize("store", ["redis"], indirect=True)
def test_with_on_outage_stop_a_closed_run_trains_on(store: RunningStore, tmp_path: Path) -> None:
    """Closed by request, or since another node has waited long enough for these to end."""
    with jobs(tmp_path, on_outage="stop", outage_limit=2.0) as submit:
        job = submit(store)
        job.begin("ab")
        close = [sys.executable, "-m", "rdzv_plugins.cli", "close"]
        before = time.monotonic()
        closed = forked.run([*close, "-e", store.endpoint, "-i", job.run_id])
        assert closed.returncode == 0, closed.stderr
        job.assert_noted("a", [], before, LEASE + SOON)
        for name in "ab":
            job.finish(name)
        assert [job.agents[name].process.wait(30) for name in "ab"] == [0, 0]


@pytest.mark.soak
def test_a_store_that_comes_back_before_its_users_stops_nobody(tmp_path: Path) -> None:
    """After an outage longer than the lease it refuses all nodes for a moment."""
    kind = next(kind for kind in ADMINISTRATORS if kind.name == "redis")
    with administered(kind, tmp_path) as administrator, jobs(tmp_path) as submit:
        job = submit(administrator.store)
        job.begin("ab")
        assert administrator.store.server is not None
        (server,) = administrator.store.server.nodes
        before = time.monotonic()
        server.stop()
        time.sleep(LEASE + SOON)
        server.start()
        for name in "ab":
            job.await_line(name, "refused the credentials")
        administrator.prepare()
        for name in "ab":
            job.await_line(name, "the store is back")
        job.assert_noted("a", [], before, SOON)
        assert job.noted("b", before) == []
