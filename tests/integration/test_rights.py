"""Users with no more rights than section 2 of their store's start page gives: `test_redis_rights`
has those of Redis, `test_kubernetes` those of Kubernetes."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import quote

import psycopg
import pytest
from botocore import xform_name
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl
from torch import distributed as dist
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.cli.check import store as trials
from rdzv_plugins.kv import AccessDeniedError
from rdzv_plugins.stores import _dynamodb_table
from rdzv_plugins.testing import harness
from rdzv_plugins.torch.c10d_store import KeyValueStore
from tests.integration.agents import Run, one_world, until
from tests.integration.pages import START, blocks
from tests.integration.stores import RunningStore, kind_of, role_of_postgres, started
from tests.integration.test_redis_rights import ask_for_everything
from tests.integration.test_start import action, saved
from tests.servers import Security
from tests.servers.http import ask

PASSWORD = str(uuid.uuid4())


def text_of(page: str, mark: str) -> str:
    """The one block of a start page in which ``mark`` stands."""
    (text,) = (text for _, text in blocks(START / f"{page}.md") if mark in text)
    return text


class Guard:
    """A store of our own, and who administers it.

    Attributes:
        rights: those that the page gives, one by one.
        told: what an error says of them.
    """

    name: str
    rights: Sequence[str]
    told: Sequence[str] = ()

    def __init__(self, store: RunningStore) -> None:
        self.store = store

    @classmethod
    def security(cls) -> Security:
        """With which the server starts."""
        return Security()

    def let_in(self, rights: Sequence[str]) -> RunningStore:
        """The store as a new user reaches it, who has these rights and no others."""
        raise NotImplementedError

    def of_others(self) -> RunningStore:
        """The store of a new user who has the documented rights where he belongs: elsewhere."""
        raise NotImplementedError

    def at(self, user: str, password: str = PASSWORD, **config: str) -> RunningStore:
        """The store as this user reaches it."""
        scheme, separator, host = self.store.endpoint.rpartition("://")
        endpoint = f"{scheme}{separator}{user}:{quote(password, safe='')}@{host}"
        return replace(self.store, endpoint=endpoint, config={**self.store.config, **config})


class _Postgres(Guard):
    name = "postgres"
    page = text_of("postgres", "GRANT")
    rights = tuple(
        f"{right} {where}"
        for list_of, where in re.findall("GRANT (.*?) (ON .*) TO rdzv;", page)
        for right in list_of.split(", ")
    )
    told = ("GRANT USAGE ON SCHEMA public TO ", "SELECT, INSERT, UPDATE, DELETE ON rdzv TO ")

    def __init__(self, store: RunningStore) -> None:
        super().__init__(store)
        self._database = "postgres"
        first, then = self.page.split("\\connect jobs\n")
        self._ask(first, "REVOKE CONNECT ON DATABASE jobs FROM PUBLIC")
        self._database = "jobs"
        # Else everybody would have what the page grants.
        self._ask("REVOKE ALL ON SCHEMA public FROM PUBLIC", *then.split(";"))

    def let_in(self, rights: Sequence[str]) -> RunningStore:
        user = f"u{secrets.token_hex(4)}"
        self._ask(role_of_postgres(user), *(f"GRANT {it} TO {user}" for it in rights))
        host, port = self.store.address
        endpoint = f"postgresql://{user}@{host}:{port}/jobs"
        return replace(self.store, endpoint=endpoint, config={})

    def of_others(self) -> RunningStore:
        table = f"t{secrets.token_hex(4)}"
        self._ask(f"CREATE TABLE {table} (LIKE rdzv INCLUDING ALL)")
        return self.let_in([it.replace("ON rdzv", f"ON {table}") for it in self.rights])

    def _ask(self, *statements: str) -> None:
        host, port = self.store.address
        where = f"postgresql://postgres@{host}:{port}/{self._database}"
        with psycopg.connect(where, autocommit=True) as admin:
            for statement in filter(str.strip, statements):
                admin.execute(statement.encode())


class _Http(Guard):
    """Its rights are those on one prefix."""

    headers: dict[str, str]
    prefix: str

    def let_in(self, rights: Sequence[str]) -> RunningStore:
        return self._let_in(rights, self.prefix)

    def of_others(self) -> RunningStore:
        # It begins alike.
        return self._let_in(self.rights, f"{self.prefix.rstrip('/')}2/")

    def _let_in(self, rights: Sequence[str], prefix: str) -> RunningStore:
        raise NotImplementedError

    def ask(self, method: str, path: str, body: object) -> Any:
        port = self.store.address[1]
        status, answer = ask(
            port, method, path, body, security=Security(), headers=self.headers, timeout=30
        )
        assert status == 200, answer
        return answer


class _Etcd(_Http):
    name = "etcd-v3"
    page = text_of("etcd", "grant-permission")
    kind, prefix = re.findall(r"role grant-permission rdzv (\S+) --prefix (\S+)\n", page)[0]
    rights = ("read", "write") if kind == "readwrite" else (kind,)
    told = (f"grant-permission <role> {kind} --prefix '{prefix}'",)

    @classmethod
    def security(cls) -> Security:
        return Security(user="root", password=PASSWORD)

    def __init__(self, store: RunningStore) -> None:
        super().__init__(store)
        self.headers = {}
        login = {"name": "root", "password": PASSWORD}
        self.headers = {"Authorization": self._post("authenticate", login)["token"]}

    def _let_in(self, rights: Sequence[str], prefix: str) -> RunningStore:
        name = secrets.token_hex(4)
        self._post("role/add", {"name": name})
        if rights:
            # As etcdctl understands --prefix: to the prefix with its last byte raised.
            end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
            keys = {"key": _base64(prefix), "range_end": _base64(end)}
            kind = "".join(rights).upper()
            self._post("role/grant", {"name": name, "perm": {"permType": kind, **keys}})
        self._post("user/add", {"name": name, "password": PASSWORD})
        self._post("user/grant", {"user": name, "role": name})
        return self.at(name)

    def _post(self, path: str, body: object) -> Any:
        return self.ask("POST", f"/v3/auth/{path}", body)


class _Consul(_Http):
    name = "consul"
    page = text_of("consul", "key_prefix")
    prefix, policy = re.findall(r'key_prefix "(.*?)" {\s*policy = "(.*?)"\s*}', page)[0]
    # Whoever may write may read.
    rights = ("read", "write") if policy == "write" else (policy,)
    told = (f'key_prefix "{prefix}" {{ policy = "{policy}" }}',)

    @classmethod
    def security(cls) -> Security:
        return Security(password=PASSWORD)

    def __init__(self, store: RunningStore) -> None:
        super().__init__(store)
        self.headers = {"X-Consul-Token": PASSWORD}

    def _let_in(self, rights: Sequence[str], prefix: str) -> RunningStore:
        name, token = secrets.token_hex(4), str(uuid.uuid4())
        policy = rights[-1] if "read" in rights else "deny"
        rules = f'key_prefix "{prefix}" {{ policy = "{policy}" }}'
        self.ask("PUT", "/v1/acl/policy", {"Name": name, "Rules": rules})
        self.ask("PUT", "/v1/acl/token", {"SecretID": token, "Policies": [{"Name": name}]})
        return self.at("", token)


class _ZooKeeper(Guard):
    """Each user has a prefix of its own: the list of runs belongs to who made it."""

    name = "zookeeper"
    (_line,) = re.findall(
        r'create /rdzv "" (auth:rdzv:[cdrwa]+)\n', text_of("zookeeper", "addauth")
    )
    (rights,) = re.findall("A job needs `([cdrwa]+)`", (START / "zookeeper.md").read_text())
    _words: ClassVar = {"c": "create", "d": "delete", "r": "read", "w": "write", "a": "admin"}

    def let_in(self, rights: Sequence[str]) -> RunningStore:
        self._user = secrets.token_hex(4)
        self.told = (f"setAcl /{self._user} {self._line.replace('rdzv', self._user)}",)
        self._acl = [self._right_of(self._user, rights), self._right_of("admin", "a")]
        self._ask(lambda admin: admin.create(f"/{self._user}", acl=self._acl))
        return self.at(self._user, prefix=self._user)

    def of_others(self) -> RunningStore:
        # The znodes of a run belong to the user that made it: even under its prefix.
        self._acl.append(self._right_of("other", self.rights))
        self._ask(lambda admin: admin.set_acls(f"/{self._user}", self._acl))
        return self.at("other", prefix=self._user)

    def _right_of(self, user: str, rights: Sequence[str]) -> Any:
        return make_digest_acl(user, PASSWORD, **{self._words[right]: True for right in rights})

    def _ask(self, request: Callable[[Any], object]) -> None:
        # Nobody needs a right on "/" but who administers.
        login = ("digest", f"admin:{PASSWORD}")
        with closing(KazooClient(self.store.endpoint, auth_data=[login])) as admin:
            admin.start()
            try:
                admin.set_acls("/", [make_digest_acl("admin", PASSWORD, all=True)])
                request(admin)
            finally:
                admin.stop()


class _Nats(Guard):
    """Each user has an account, and so a bucket, of its own."""

    name = "nats"
    rights = tuple(
        f"{verb} {subject}"
        for verb, listed in re.findall(
            r"(publish|subscribe): \[(.*?)\]", text_of("nats", "permissions"), re.DOTALL
        )
        for subject in re.findall('"(.*?)"', listed)
    )
    told = tuple(f'"{it.split()[1]}"' for it in rights)

    def __init__(self, store: RunningStore) -> None:
        super().__init__(store)
        self._accounts: dict[str, Any] = {}

    def let_in(self, rights: Sequence[str]) -> RunningStore:
        user = secrets.token_hex(4)
        permissions = {
            verb: {"allow": allowed} if allowed else {"deny": [">"]}
            for verb in ("publish", "subscribe")
            for allowed in [[it.split()[1] for it in rights if it.startswith(verb)]]
        }
        joe = {"user": user, "password": PASSWORD, "permissions": permissions}
        self._accounts[user] = {"jetstream": "enabled", "users": [joe]}
        assert self.store.server is not None
        (node,) = self.store.server.nodes
        file = node.directory / "nats.conf"
        file.write_text(json.dumps({**json.loads(file.read_text()), "accounts": self._accounts}))
        before = self._loaded(node.ports[2])
        os.kill(node.pid, signal.SIGHUP)
        until(lambda: self._loaded(node.ports[2]) != before, 30)
        return self.at(user)

    def of_others(self) -> RunningStore:
        return self.let_in(self.rights)

    def _loaded(self, port: int) -> Any:
        return ask(port, "GET", "/varz", security=Security(), timeout=30)[1]["config_load_time"]


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


GUARDS: list[type[Guard]] = [_Postgres, _Etcd, _Consul, _ZooKeeper, _Nats]
BY_NAME = {guard.name: guard for guard in GUARDS}
# Consul has no right to write without that to read.
WITHOUT = [
    (guard.name, right)
    for guard in GUARDS
    for right in guard.rights
    if (guard.name, right) != ("consul", "read")
]

Guarded = Callable[[str], Guard]


@pytest.fixture(scope="module")
def guards() -> Iterator[Guarded]:
    """A guarded store by its name, started when it is asked for first."""
    running: dict[str, Guard] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def guard(name: str) -> Guard:
            if name not in running:
                kind = kind_of(name)
                cls = BY_NAME[name]
                store = stack.enter_context(started(kind, security=cls.security()))
                for variable in ("USER", "PASSWORD", "TOKEN"):
                    patch.delenv(f"RDZV_PLUGINS_{variable}", raising=False)
                running[name] = cls(store)
            return running[name]

        yield guard


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer samples than a person gets of `rdzv check`."""
    for name, number in {"_SAMPLES": 5, "_WAKE_UPS": 2, "_CONTESTS": 2, "_WRITERS": 4}.items():
        monkeypatch.setattr(trials, name, number)


each_guard = pytest.mark.parametrize("name", BY_NAME)


@each_guard
def test_documented_rights_suffice_for_every_request(
    guards: Guarded, name: str, run_id: str
) -> None:
    guard = guards(name)
    ask_for_everything(guard.let_in(guard.rights).open, run_id)


def rdzv(store: RunningStore, command: str, *arguments: str) -> tuple[int, str]:
    conf = ",".join(f"{name}={value}" for name, value in store.config.items())
    where = ["-b", store.backend, "-e", store.endpoint, "-c", conf]
    ended = CliRunner().invoke(app, [command, *where, *arguments])
    assert isinstance(ended.exception, SystemExit | None), repr(ended.exception)
    return ended.exit_code, ended.output


def work(store: RunningStore, run_id: str) -> None:
    """All that nodes and people do with a run."""
    code, told = rdzv(store, "check", "-i", run_id)
    assert "failed" not in told, told
    assert code in (0, 1), told
    with Run(store, run_id) as run:
        agents = [run.start((1, 2)) for _ in range(2)]
        until(one_world(agents), 120)
        with closing(store.open(f"{run_id}-c10d")) as client:
            c10d = KeyValueStore(client, "store/", timedelta(seconds=30))
            # Private; it alone reaches a Python store from C++ threads as process groups do.
            dist._test_python_store(c10d)  # type: ignore[attr-defined]
            client.expire(0)
        until(lambda: bool(run.history()), 60)
        for command in ("status", "history"):
            code, told = rdzv(store, command, "-i", run_id)
            assert code == 0, told
        assert rdzv(store, "list")[0] == 0
        code, told = rdzv(store, "drain", "-i", run_id, "--rank", "1")
        assert code == 0, told
        # The agent that was drained ends a moment after the command.
        until(lambda: any(agent.error is not None for agent in agents), 60)
        (left,) = (agent for agent in agents if agent.error is None)
        until(one_world([left]), 120)
        code, told = rdzv(store, "exclude", "-i", run_id, "far-away", "--later", "--for", "60s")
        assert code == 0, told
        left.crash()
        code, told = rdzv(store, "clean", "-i", run_id)
        assert code == 0, told
        assert run.is_swept()


@pytest.mark.timeout(400)
@pytest.mark.soak
@each_guard
def test_documented_rights_suffice_for_a_run(guards: Guarded, name: str, run_id: str) -> None:
    guard = guards(name)
    work(guard.let_in(guard.rights), run_id)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        # One of each store in every run.
        pytest.param(*case, marks=pytest.mark.soak if WITHOUT[at - 1][0] == case[0] else ())
        for at, case in enumerate(WITHOUT)
    ],
)
def test_without_any_one_right_a_request_fails_in_one_line(
    guards: Guarded, name: str, right: str, run_id: str
) -> None:
    guard = guards(name)
    store = guard.let_in([it for it in guard.rights if it != right])
    with pytest.raises(AccessDeniedError) as caught:
        ask_for_everything(store.open, run_id)
    assert_plain(str(caught.value), guard, right)


def assert_plain(text: str, guard: Guard, right: str) -> None:
    """One line that names the store, where it is, and what to grant."""
    assert "\n" not in text
    assert PASSWORD not in text
    assert text.startswith(f"{guard.store.backend.removesuffix('-v3')} at ")
    assert "{}:{}".format(*guard.store.address) in text
    wanted = ("CONNECT on the database",) if right.startswith("CONNECT") else guard.told
    assert all(words in text for words in wanted), text


@pytest.mark.soak
@pytest.mark.parametrize(("name", "right"), WITHOUT)
def test_without_any_one_right_check_and_nodes_tell_it(
    guards: Guarded, name: str, right: str, run_id: str
) -> None:
    guard = guards(name)
    store = guard.let_in([it for it in guard.rights if it != right])
    code, told = rdzv(store, "check", "-i", run_id)
    assert code == 2, told
    (line,) = (it for it in told.splitlines() if it.startswith("failed"))
    what, _, _ = line.removeprefix("failed").strip().partition(": ")
    assert what in ("store", "rights", "rights on the table"), line
    run = Run(store, run_id)
    try:
        agents = [run.start((2, 2)) for _ in range(2)]
        # Some rights a run needs only later, and ends without.
        assert harness.until(lambda: any(it.error or it.rounds for it in agents), 60)
        errors = [it.error for it in agents if it.error is not None]
    except AccessDeniedError as refusal:
        errors = [refusal]
    finally:
        for agent in run.agents:
            agent.crash()
    for error in errors:
        assert isinstance(error, AccessDeniedError)
        assert_plain(str(error), guard, right)


@pytest.mark.soak
@each_guard
def test_a_user_of_others_does_not_see_a_run(guards: Guarded, name: str, run_id: str) -> None:
    guard = guards(name)
    own, others = guard.let_in(guard.rights), guard.of_others()
    with closing(own.open(run_id)) as client:
        client.put("key", b"value")
        with suppress(AccessDeniedError), closing(others.open(run_id)) as other:
            # This is an account with a bucket of its own.
            assert other.get("key") is None
            other.put("key", b"theirs")
            other.expire(0)
        entry = client.get("key")
        assert entry is not None
        assert entry.value == b"value"


@pytest.mark.timeout(400)
@pytest.mark.soak
def test_the_rights_on_dynamodb_are_those_that_a_run_uses(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DynamoDB Local checks no rights: what boto3 was asked for is compared with the policy."""
    asked: set[str] = set()
    connect = _dynamodb_table._connect

    def recorded(*arguments: Any) -> Any:
        boto = connect(*arguments)
        boto.meta.events.register("before-call.dynamodb", lambda model, **_: asked.add(model.name))
        return boto

    with started(kind_of("dynamodb")) as store:
        # Only the first client that opens the table needs more, and the table is there now.
        monkeypatch.setattr(_dynamodb_table, "_connect", recorded)
        ask_for_everything(store.open, run_id)
        work(store, run_id)
        used = {action(xform_name(name)) for name in asked}
    runs, check = saved("dynamodb", "policy.json")["Statement"]
    assert used == {*runs["Action"], *check["Action"]}
