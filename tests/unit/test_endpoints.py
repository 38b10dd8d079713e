"""No part of an endpoint is ignored: each store obeys it, or refuses it in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.stores import STORES, open_client
from rdzv_plugins.stores.redis import Options, _target
from tests.servers.process import HOST, free_ports, release

# What the refusal says, for each part of each store's endpoint; None: the part is obeyed.
PARTS: Mapping[str, Mapping[str, str | None]] = {
    "redis": {
        "{at}/3": None,
        "{at}/name": "the database 'name' in the endpoint is not a number",
        "redis://{at}?db=3": None,
        "redis://{at}?db=": "parameter 'db' of the endpoint has no value",
        "redis://{at}?db=1&db=2": "has the parameter 'db' twice",
        "redis://{at}/1?db=2": "names two databases",
        "redis://{at}?protocol=3": "unknown parameter 'protocol'; this client speaks RESP2",
        "rediss://{at}?ssl_cert_reqs=none": "'ssl_cert_reqs'; certificates are always verified",
        "redis://{at}?socket_timeout=3": "'socket_timeout'; write heartbeat_timeout=",
        "redis://{at}?nonsense=3": "unknown parameter 'nonsense'; there are: db",
        "redis://joe@{at}": None,
        "redis://:secret@{at}": None,
        "{at},{at}": "several hosts need --rdzv-conf sentinel=<name> or cluster=true",
        "unix:///run/none.sock": None,
        "unix:///run/none.sock?db=2": None,
        "unix:///run/none.sock?password=hunter2": "set $RDZV_PLUGINS_PASSWORD",
        "unix://run/none.sock": "needs an absolute path",
    },
    "zookeeper": {
        "{at}/chroot": None,
        "{at}?a=b": "unknown parameter 'a'; there are none",
        "joe:secret@{at}": None,
        "joe@{at}": "must be set together",
        ":secret@{at}": "must be set together",
        "{at},{at}": None,
        "unix:///run/none.sock": "starts with 'unix://'",
    },
    "consul": {
        "{at}/path": "the endpoint has a path, '/path': leave it out",
        "{at}?dc=dc1": "unknown parameter 'dc'; there are none",
        "joe:secret@{at}": "a user is for HTTP basic authentication, which needs a token",
        "joe@{at}": "a user is for HTTP basic authentication, which needs a token",
        ":secret@{at}": None,
        "{at},{at}": None,
        "unix:///run/none.sock": "starts with 'unix://'",
    },
    "etcd-v3": {
        "http://{at}/path": "the endpoint has a path, '/path': leave it out",
        "http://{at}?a=b": "unknown parameter 'a'; there are none",
        "joe:secret@{at}": None,
        "joe@{at}": None,
        ":secret@{at}": "the password ($RDZV_PLUGINS_PASSWORD) needs a user",
        "{at},{at}": None,
        "unix:///run/none.sock": "starts with 'unix://'",
    },
    "nats": {
        "nats://{at}/path": "the endpoint has a path, '/path': leave it out",
        "nats://{at}?a=b": "unknown parameter 'a'; there are none",
        "joe:secret@{at}": None,
        "joe@{at}": None,
        ":secret@{at}": "the password ($RDZV_PLUGINS_PASSWORD) needs a user",
        "{at},{at}": None,
        "unix:///run/none.sock": "starts with 'unix://'",
    },
    "kubernetes": {
        "https://{at}/path": None,
        "http://{at}?a=b": "unknown parameter 'a'; there are none",
        "joe:secret@{at}": "the endpoint has a user: leave it out, and set a token",
        "joe@{at}": "the endpoint has a user: leave it out, and set a token",
        ":secret@{at}": "the endpoint has a user: leave it out, and set a token",
        "{at},{at}": None,
        "unix:///run/none.sock": "starts with 'unix://'",
    },
    "postgres": {
        "postgresql://{at}/base": None,
        "postgresql://{at}/base?application_name=a": None,
        "postgresql://{at}/base?application_name=a&application_name=b": "'application_name' twice",
        "postgresql://{at}/base?nonsense=1": "with parameters of libpq only",
        "postgresql://{at}/base?connect_timeout=3": "no effect; write heartbeat_timeout=",
        "joe:secret@{at}": None,
        "joe@{at}": None,
        ":secret@{at}": None,
        "{at},{at}": None,
        "unix:///run/none.sock": "libpq cannot parse the endpoint",
    },
    "dynamodb": {
        "http://{at}/path": None,
        "http://{at}?a=b": "unknown parameter 'a'; there are none",
        "http://joe:secret@{at}": "the URL has a user name: remove it",
        "http://{at},{at}": "the URL names several hosts",
        "{at}": "is neither a region (us-east-1) nor a URL",
        "unix:///run/none.sock": "is neither a region (us-east-1) nor a URL",
    },
}

# Options of a store that contradict each other or the endpoint: (store, endpoint, options, says).
TOGETHER: list[tuple[str, str, Mapping[str, str], str]] = [
    ("redis", "{at}", {"sentinel": "a", "cluster": "true"}, "two ways to find a primary"),
    ("redis", "{at}", {"cluster": "true", "database": "3"}, "has the database 0 only"),
    ("redis", "{at}/3", {"cluster": "true"}, "has the database 0 only"),
    ("redis", "unix:///s", {"tls": "true"}, "option 'tls' is not for a unix:// endpoint"),
    ("redis", "unix:///s", {"sentinel": "a"}, "option 'sentinel' is not for a unix:// endpoint"),
    ("redis", "unix:///s", {"cluster": "true"}, "option 'cluster' is not for a unix:// endpoint"),
    ("redis", "{at}", {"ca_file": "ca.pem"}, "option 'ca_file': nothing would be encrypted"),
    ("redis", "unix:///s", {"ca_file": "ca.pem"}, "option 'ca_file': nothing would be encrypted"),
    ("zookeeper", "{at}", {"key_file": "a"}, "option 'key_file': nothing would be encrypted"),
    ("consul", "{at}", {"cert_file": "a"}, "option 'cert_file': nothing would be encrypted"),
    ("etcd-v3", "{at}", {"ca_file": "ca.pem"}, "option 'ca_file': nothing would be encrypted"),
    ("nats", "{at}", {"ca_file": "ca.pem"}, "option 'ca_file': nothing would be encrypted"),
    ("nats", "joe:secret@{at}", {"nkey_file": "a"}, "user and nkey_file are set together"),
    ("nats", "{at}", {"bucket": "a.b"}, "has more than letters, digits"),
    ("postgres", "{at}", {"ca_file": "ca.pem"}, "option 'ca_file': nothing would be encrypted"),
    ("postgres", "postgresql://{at}/?sslmode=prefer", {"tls": "true"}, "does without TLS"),
    ("postgres", "postgresql://{at}/?sslmode=prefer", {"ca_file": "a"}, "would be encrypted"),
    (
        "postgres", "postgresql://{at}/?sslmode=verify-full&sslcert=b&sslkey=b&sslrootcert=c",
        {"ca_file": __file__}, "cannot be used",
    ),
    ("kubernetes", "http://{at}", {"ca_file": "a"}, "option 'ca_file': nothing would be encrypted"),
    ("kubernetes", "{at}", {"user": "joe"}, "the Kubernetes API takes no user: leave it out"),
    ("kubernetes", "{at}", {"context": "a"}, "context and kubeconfig have no effect"),
    ("kubernetes", "{at}", {"TOKEN": "a", "PASSWORD": "b"}, "leave all but one out"),
    ("kubernetes", "{at}", {"TOKEN": "a", "token_file": "b"}, "are both set"),
    ("consul", "{at}", {"TOKEN": "a", "token_file": "b"}, "are both set"),
    ("nats", "{at}", {"TOKEN": "a", "token_file": "b"}, "are both set"),
    ("redis", "{at}", {"PASSWORD": "a", "password_file": "b"}, "are both set"),
]  # fmt: skip


@pytest.fixture
def at() -> Any:
    """An address where nobody listens."""
    (port,) = free_ports(1)
    yield f"{HOST}:{port}"
    release([port])


@pytest.mark.parametrize(
    ("backend", "endpoint", "says"),
    [(store, part, says) for store, parts in PARTS.items() for part, says in parts.items()],
)
def test_a_part_is_obeyed_or_refused(
    backend: str, endpoint: str, says: str | None, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "local")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    if says is None:
        with pytest.raises(RendezvousConnectionError):
            open_client(backend, endpoint.format(at=at), "run", request_timeout=0.05)
        return
    told = refusal(backend, endpoint.format(at=at))
    assert says in told


@pytest.mark.parametrize(
    ("backend", "scheme"),
    [
        ("etcd-v3", "http"), ("consul", "https"), ("redis", "rediss"), ("zookeeper", "zookeeper"),
        ("postgres", "postgresql"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "endpoint", ["{0}://a:1,{0}://b:1", "a:1,{0}://b", "{0}://j:hunter2@a,{0}://j:hunter2@b"]
)
def test_a_scheme_is_written_once(backend: str, scheme: str, endpoint: str) -> None:
    told = refusal(backend, endpoint.format(scheme))
    assert f"has '{scheme}://' after a comma: write it once, in front of the first host" in told


@pytest.mark.parametrize("backend", STORES)
def test_nothing_may_follow_a_hash(backend: str, at: str) -> None:
    scheme = {"dynamodb": "http://", "postgres": "postgresql://"}.get(backend, "")
    assert "a '#', which nothing may follow" in refusal(backend, f"{scheme}{at}/#hunter2")


@pytest.mark.parametrize(("backend", "endpoint", "options", "says"), TOGETHER)
def test_what_contradicts_is_refused(
    backend: str,
    endpoint: str,
    options: Mapping[str, str],
    says: str,
    at: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {name: value for name, value in options.items() if name.islower()}
    for name in options.keys() - config.keys():
        monkeypatch.setenv(f"RDZV_PLUGINS_{name}", options[name])
    assert says in refusal(backend, endpoint.format(at=at), config)


def refusal(backend: str, endpoint: str, config: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ValueError, match=re.escape(backend) + "|_file and ") as caught:
        open_client(backend, endpoint, "run", config, request_timeout=0.05)
    told = str(caught.value)
    assert "\n" not in told
    assert "hunter2" not in told.replace("/#hunter2", "")
    return told


@pytest.mark.parametrize(
    ("endpoint", "path", "database", "login"),
    [
        ("h/4", None, 4, (None, None)),
        ("redis://h?db=4", None, 4, (None, None)),
        ("redis://h/4?db=4", None, 4, (None, None)),
        ("unix:///run/a%20b.sock?db=2", "/run/a b.sock", 2, (None, None)),
        ("unix://joe:secret@/s", "/s", 7, ("joe", "secret")),
        ("h", None, 7, (None, None)),
    ],
)
def test_what_a_redis_endpoint_means(
    endpoint: str, path: str | None, database: int, login: tuple[str | None, str | None]
) -> None:
    target = _target(endpoint, Options(database=7))
    assert (target.path, target.database, target.user) == (path, database, login[0])
    given = target.log_in.get_credentials() if target.log_in is not None else (None, None)
    assert given == login
