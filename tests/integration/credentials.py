"""Credentials: the secrets and rights of a store's user "joe", and certificates.

An `Administrator` changes joe's secret and takes his rights away. `Certificates` are of an
authority of ours, and of a foreign one that nobody trusts.
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
import redis
import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from kazoo.client import KazooClient
from kazoo.security import ACL, make_acl
from trustme import KeyType

from rdzv_plugins.kv.base import segments
from rdzv_plugins.kv.epochs import Epoch
from rdzv_plugins.observe.history import EXCLUDED, LIST, archive_run_id
from rdzv_plugins.protocol.documents import STATE_KEY
from rdzv_plugins.testing.harness import until
from tests.integration.stores import RunningStore, kind_of, started
from tests.servers import Security, ServerProcess
from tests.servers.http import ask

__all__ = ["ADMINISTRATORS", "Administrator", "Certificates", "Pair", "administered"]


def prefixes_of(run_id: str) -> list[str]:
    """Under which the keys stand that the nodes of a run need."""
    found = (run_id, archive_run_id(run_id), LIST, EXCLUDED)
    return ["/".join(segments(f"rdzv/{it}", "rdzv")) + "/" for it in found]


class Administrator(ABC):
    """The administrator of a store that lets in "joe" alone.

    Attributes:
        store: reached by joe, with the secret in `file`.
        file: what clients read; `hand_out` writes it.
        secret: what the server accepts.
    """

    name: ClassVar[str]
    option: ClassVar[str] = "password_file"

    def __init__(self, store: RunningStore, file: Path) -> None:
        config = {**store.config, self.option: str(file)}
        if self.option == "password_file":
            config["user"] = "joe"
        self.store = replace(store, config=config)
        self.file = file
        self.secret = str(uuid.uuid4())
        self.prepare()
        self.hand_out()

    @classmethod
    def security(cls) -> Security:
        """With which the server starts."""
        return Security()

    def of_others(self) -> RunningStore:
        """The store of Redis or etcd as somebody else reaches it, who has all rights."""
        raise NotImplementedError

    def rotate(self, *, hand_out: bool = True) -> None:
        """Replace the secret: the old one and all connections end at once."""
        self.secret = str(uuid.uuid4())
        self.change()
        if hand_out:
            self.hand_out()

    def hand_out(self) -> None:
        """Write the secret into the file, as Kubernetes and Vault's agent do."""
        new = self.file.with_suffix(".new")
        new.write_text(self.secret + "\n")
        new.replace(self.file)

    @abstractmethod
    def prepare(self) -> None:
        """Let joe in, with the secret."""

    @abstractmethod
    def change(self) -> None:
        """Make the secret joe's only one, and cut his connections."""

    @abstractmethod
    def forbid(self, run_id: str) -> None:
        """Take joe's right to this run; his connections live on."""

    def forbid_to_read(self, run_id: str) -> None:
        """Take joe's right to read this run; he may write. Consul knows no such right."""
        raise NotImplementedError

    def forbid_the_document(self, run_id: str) -> None:
        """Take joe's right to write the round document of this run of etcd, and no other."""
        raise NotImplementedError

    def forbid_to_write(self) -> None:
        """Take joe's right to write; he may read."""
        raise NotImplementedError

    def limit_to(self, run_id: str) -> None:
        """Let joe have this run of etcd alone, as the docs say of users of one run."""
        raise NotImplementedError


class _Redis(Administrator):
    name = "redis"

    def prepare(self) -> None:
        self._ask("ACL", "SETUSER", "joe", "on", f">{self.secret}", "~*", "&*", "+@all")
        self._ask("ACL", "SETUSER", "default", "+@all")

    def change(self) -> None:
        self._ask("ACL", "SETUSER", "joe", "resetpass", f">{self.secret}")
        self._ask("CLIENT", "KILL", "USER", "joe")

    def forbid(self, run_id: str) -> None:
        self._ask("ACL", "SETUSER", "joe", "-@all")

    def forbid_to_read(self, run_id: str) -> None:
        self._ask("ACL", "SETUSER", "joe", "-@read")

    def forbid_to_write(self) -> None:
        self._ask("ACL", "SETUSER", "joe", "-@write")

    def of_others(self) -> RunningStore:
        return replace(self.store, config={})

    def _ask(self, *command: str) -> None:
        host, port = self.store.address
        with redis.Redis(host, port) as admin:
            admin.execute_command(*command)


class _WithUsersInAFile(Administrator):
    """For a server whose users stand in a file, joe among them from its start."""

    @classmethod
    def security(cls) -> Security:
        return Security(user="joe", password=str(uuid.uuid4()))

    def prepare(self) -> None:
        assert self.store.server is not None
        self.secret = str(self.store.server.nodes[0]._kind.security.password)


class _ZooKeeper(_WithUsersInAFile):
    """It reads the file at its start."""

    name = "zookeeper"

    def change(self) -> None:
        assert self.store.server is not None
        (node,) = self.store.server.nodes
        node._kind.security = replace(node._kind.security, password=self.secret)
        node.stop()
        node.start()

    def forbid(self, run_id: str) -> None:
        self._allow(run_id, make_acl("sasl", "jim", all=True))

    def forbid_to_read(self, run_id: str) -> None:
        self._allow(run_id, make_acl("sasl", "joe", write=True, create=True, delete=True))

    def _allow(self, run_id: str, right: ACL) -> None:
        login = {"mechanism": "DIGEST-MD5", "username": "joe", "password": self.secret}
        joe = KazooClient(self.store.endpoint, sasl_options=login)
        joe.start()
        try:
            path = "/" + "/".join(segments(f"rdzv/{run_id}", "rdzv"))
            joe.set_acls(path, [right])
        finally:
            joe.stop()
            joe.close()


class _Http(Administrator):
    headers: dict[str, str]

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        with closing(HTTPConnection(*self.store.address, timeout=10)) as line:
            line.request(method, path, json.dumps(body or {}), self.headers)
            answer = line.getresponse()
            text = answer.read()
            assert answer.status == 200, (path, answer.status, text)
            found = json.loads(text)
            return found if isinstance(found, dict) else {}


class _Consul(_Http):
    name = "consul"
    option = "token_file"
    _master: ClassVar[str] = str(uuid.uuid4())
    _accessor = ""

    @classmethod
    def security(cls) -> Security:
        return Security(password=cls._master)

    def prepare(self) -> None:
        self.headers = {"X-Consul-Token": self._master}
        self._policy = self.ask("PUT", "/v1/acl/policy", self._rules("write"))["ID"]
        self.change()

    def _rules(self, right: str) -> dict[str, Any]:
        return {"Name": "rdzv", "Rules": f'key_prefix "rdzv/" {{ policy = "{right}" }}'}

    def change(self) -> None:
        token = {"SecretID": self.secret, "Policies": [{"Name": "rdzv"}]}
        made = self.ask("PUT", "/v1/acl/token", token)["AccessorID"]
        if self._accessor:
            self.ask("DELETE", f"/v1/acl/token/{self._accessor}")
        self._accessor = made

    def forbid(self, run_id: str) -> None:
        self.ask("PUT", f"/v1/acl/policy/{self._policy}", self._rules("deny"))


class _Etcd(_Http):
    name = "etcd-v3"
    _password: ClassVar[str] = str(uuid.uuid4())

    @classmethod
    def security(cls) -> Security:
        return Security(user="joe", password=cls._password)

    def prepare(self) -> None:
        self.change()

    def change(self) -> None:
        # It makes joe's tokens invalid; a watch of his goes on.
        self._log_in()
        self.ask("POST", "/v3/auth/user/changepw", {"name": "joe", "password": self.secret})

    def forbid(self, run_id: str) -> None:
        self._log_in()
        self.ask("POST", "/v3/auth/user/revoke", {"name": "joe", "role": "everything"})

    def forbid_to_read(self, run_id: str) -> None:
        self._allow("WRITE")

    def forbid_to_write(self) -> None:
        self._allow("READ")

    def _allow(self, what: str) -> None:
        self.forbid("")
        first, end = (b64encode(key).decode() for key in (b"rdzv/", b"rdzv0"))
        right = {"permType": what, "key": first, "range_end": end}
        self.ask("POST", "/v3/auth/role/add", {"name": "some"})
        self.ask("POST", "/v3/auth/role/grant", {"name": "some", "perm": right})
        self.ask("POST", "/v3/auth/user/grant", {"user": "joe", "role": "some"})

    def forbid_the_document(self, run_id: str) -> None:
        self.forbid(run_id)
        self.ask("POST", "/v3/auth/role/add", {"name": "beats"})
        state = f"{prefixes_of(run_id)[0]}{Epoch().name}/{STATE_KEY}".encode()
        after = state + b"\0"
        for right, first, end in (
            ("READWRITE", b"rdzv/", state), ("READ", state, after), ("READWRITE", after, b"rdzv0"),
        ):  # fmt: skip
            keys = {"key": b64encode(first).decode(), "range_end": b64encode(end).decode()}
            right_to = {"name": "beats", "perm": {"permType": right, **keys}}
            self.ask("POST", "/v3/auth/role/grant", right_to)
        self.ask("POST", "/v3/auth/user/grant", {"user": "joe", "role": "beats"})

    def limit_to(self, run_id: str) -> None:
        self.forbid(run_id)
        self.ask("POST", "/v3/auth/role/add", {"name": "one"})
        prefixes = prefixes_of(run_id)
        ranges = [(it, it[:-1] + "0") for it in prefixes]  # "0" follows "/".
        ranges += [(it[:-1].replace("/", "/!marks/"), "") for it in prefixes]
        for first, end in ranges:
            first, end = (b64encode(it.encode()).decode() for it in (first, end))
            right = {"permType": "READWRITE", "key": first, "range_end": end}
            self.ask("POST", "/v3/auth/role/grant", {"name": "one", "perm": right})
        self.ask("POST", "/v3/auth/user/grant", {"user": "joe", "role": "one"})

    def of_others(self) -> RunningStore:
        file = self.file.with_name("root")
        file.write_text(f"{self._password}\n")
        config = {**self.store.config, "user": "root", "password_file": str(file)}
        return replace(self.store, config=config)

    def _log_in(self) -> None:
        self.headers = {}
        login = {"name": "root", "password": self._password}
        self.headers = {"Authorization": self.ask("POST", "/v3/auth/authenticate", login)["token"]}


class _Postgres(Administrator):
    name = "postgres"

    def prepare(self) -> None:
        server = self.store.server
        assert server is not None
        endpoint = self.store.endpoint.replace("postgres@", "")
        self.store = replace(self.store, endpoint=endpoint)
        rules = server.nodes[0].directory / "data" / "pg_hba.conf"
        rules.write_text(f"host all joe 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        self._ask(
            "SELECT pg_reload_conf()",
            f"CREATE ROLE joe LOGIN PASSWORD '{self.secret}'",
            "GRANT CREATE ON SCHEMA public TO joe",
        )

    def change(self) -> None:
        self._ask(
            f"ALTER ROLE joe PASSWORD '{self.secret}'",
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'joe'",
        )

    def forbid(self, run_id: str) -> None:
        self._ask("ALTER TABLE rdzv OWNER TO postgres", "REVOKE ALL ON rdzv FROM joe")

    def forbid_to_read(self, run_id: str) -> None:
        self.forbid(run_id)
        self._ask("GRANT INSERT, UPDATE, DELETE ON rdzv TO joe")

    def forbid_to_write(self) -> None:
        self.forbid("")
        self._ask("GRANT SELECT ON rdzv TO joe")

    def _ask(self, *statements: str) -> None:
        host, port = self.store.address
        with psycopg.connect(f"postgresql://postgres@{host}:{port}", autocommit=True) as admin:
            for statement in statements:
                admin.execute(statement.encode())


class _Nats(_WithUsersInAFile):
    """It reads the file anew at SIGHUP."""

    name = "nats"

    def change(self) -> None:
        self._write(lambda joe: joe.update(password=self.secret))

    def forbid(self, run_id: str) -> None:
        nothing = {"publish": {"deny": [f"$KV.rdzv.rdzv.{run_id}.>", "$JS.API.STREAM.MSG.GET.>"]}}
        self._write(lambda joe: joe.update(permissions=nothing))

    def forbid_to_read(self, run_id: str) -> None:
        nothing = {"publish": {"deny": ["$JS.API.STREAM.MSG.GET.>"]}}
        self._write(lambda joe: joe.update(permissions=nothing))

    def _write(self, change: Callable[[dict[str, Any]], object]) -> None:
        assert self.store.server is not None
        (node,) = self.store.server.nodes
        file = node.directory / "nats.conf"
        settings = json.loads(file.read_text())
        (joe,) = settings["authorization"].get("users") or [settings["authorization"]]
        change(joe)
        settings["authorization"] = {"users": [joe]}
        file.write_text(json.dumps(settings))
        before = self._loaded(node)
        os.kill(node.pid, signal.SIGHUP)
        assert until(lambda: self._loaded(node) != before, 30)

    def _loaded(self, node: ServerProcess) -> Any:
        return ask(node.ports[2], "GET", "/varz", security=Security())[1]["config_load_time"]


ADMINISTRATORS: list[type[Administrator]] = [
    _Redis, _ZooKeeper, _Consul, _Etcd, _Postgres, _Nats,
]  # fmt: skip


@contextmanager
def administered(kind: type[Administrator], folder: Path) -> Iterator[Administrator]:
    """A store of our own, and its administrator; clients have the secret from a file only."""
    row = kind_of(kind.name)
    with (
        started(row, security=kind.security()) as store,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in ("USER", "PASSWORD", "TOKEN"):
            patch.delenv(f"RDZV_PLUGINS_{name}", raising=False)
        yield kind(store, folder / "secret")


@dataclass(frozen=True, slots=True)
class Pair:
    """Paths of a certificate and of its private key."""

    cert_file: str
    key_file: str


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files.

    Attributes:
        ca_file: the authority that signed all but what is foreign.
        foreign_ca_file: another authority.
        server: names 127.0.0.1 and localhost.
        misnamed: a server's, of another host.
        client: what clients show.
        foreign_client: a client's, signed by the other authority.
    """

    ca_file: str
    foreign_ca_file: str
    server: Pair
    misnamed: Pair
    client: Pair
    foreign_client: Pair

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """Write them into a folder."""
        ours, foreign = trustme.CA(), trustme.CA()
        return cls(
            ca_file=_write(folder / "ca.pem", ours.cert_pem.bytes()),
            foreign_ca_file=_write(folder / "foreign-ca.pem", foreign.cert_pem.bytes()),
            # kube-apiserver signs with the key too, and reads no elliptic curve in this form.
            server=_issue(folder / "server", ours, "127.0.0.1", "localhost", kind=KeyType.RSA),
            misnamed=_issue(folder / "misnamed", ours, "elsewhere.example", kind=KeyType.RSA),
            client=_issue(folder / "client", ours, "node.example"),
            foreign_client=_issue(folder / "foreign-client", foreign, "node.example"),
        )

    def security(
        self,
        *,
        user: str | None = None,
        password: str | None = None,
        server: Pair | None = None,
        client: bool = False,
    ) -> Security:
        """A server with TLS; with ``client`` it demands a certificate of its clients too."""
        shown = server or self.server
        return Security(
            user=user,
            password=password,
            ca_file=self.ca_file,
            cert_file=shown.cert_file,
            key_file=shown.key_file,
            client_cert_file=self.client.cert_file if client else None,
            client_key_file=self.client.key_file if client else None,
        )


def _issue(stem: Path, authority: trustme.CA, *names: str, kind: KeyType = KeyType.ECDSA) -> Pair:
    issued = authority.issue_cert(*names, key_type=kind)
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    # ZooKeeper reads no other form than PKCS #8.
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    return Pair(_write(stem.with_suffix(".pem"), chain), _write(stem.with_suffix(".key"), pem))


def _write(file: Path, content: bytes) -> str:
    file.touch(0o600)
    file.write_bytes(content)
    return str(file)
