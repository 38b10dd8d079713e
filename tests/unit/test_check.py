"""`rdzv check` without a server: arguments, verdict, and what its trials say of a bad store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module

import pytest
from kazoo.exceptions import UnimplementedError

from rdzv_plugins.cli.check import plan, store
from rdzv_plugins.cli.check.job import parse_nnodes, parse_peers
from rdzv_plugins.kv import (
    Capabilities,
    Entry,
    KeyValueClient,
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    Version,
)
from rdzv_plugins.kv.base import is_unresolved
from rdzv_plugins.kv.findings import Finding, Mark, of_connection, of_version
from rdzv_plugins.settings.options import ServerOptions, Settings
from rdzv_plugins.settings.parsing import (
    option_names,
    parse_options,
    refused_options,
    unknown_options,
    unknown_variables,
)
from rdzv_plugins.stores import STORES, client_class, redis
from rdzv_plugins.stores._tls import tls_problem
from rdzv_plugins.stores.zookeeper import Client as ZooKeeperClient

OK = Finding(Mark.OK, "version", "redis 7.0.15")
UNKNOWN = Finding(Mark.UNKNOWN, "role", "not known")
WARNING = Finding(Mark.WARNING, "eviction", "it evicts", "do not")
FAILED = Finding(Mark.FAILED, "store", "is it running?", "start it")


@pytest.mark.parametrize(
    ("text", "nnodes"), [("1", (1, 1)), ("4", (4, 4)), ("2:4", (2, 4)), (" 2:2 ", (2, 2))]
)
def test_nnodes(text: str, nnodes: tuple[int, int]) -> None:
    assert parse_nnodes(text) == nnodes


@pytest.mark.parametrize("text", ["", "0", "0:2", "3:2", "-1", "2:", ":2", "2:3:4", "two", "٢"])
def test_bad_nnodes(text: str) -> None:
    with pytest.raises(ValueError, match="is neither N nor MIN:MAX"):
        parse_nnodes(text)


def test_peers() -> None:
    assert parse_peers("") == []
    assert parse_peers("a, b:22,[fd00::1],[::1]:7,") == [
        ("a", None), ("b", 22), ("fd00::1", None), ("::1", 7),
    ]  # fmt: skip
    for bad in ("a:0", "a:b", "a:70000", "fd00::1", "a b", "http://a"):
        with pytest.raises(ValueError, match=re.escape(f"'{bad}' is neither host nor host:port")):
            parse_peers(f"good,{bad}")


@pytest.mark.parametrize(
    ("findings", "status", "sentence"),
    [
        ([OK, OK], 0, "a job works: 2 checks passed"),
        ([OK, UNKNOWN], 0, "a job works, as far as was seen: 1 checks passed, 1 not known"),
        ([OK, WARNING], 1, "a job works, with 1 warning (eviction)"),
        ([WARNING, UNKNOWN, WARNING], 1, "a job works, with 2 warnings (eviction)"),
        ([OK, FAILED, FAILED], 2, "a job will not work: store failed"),
        ([FAILED, WARNING], 2, "a job will not work: store failed; 1 warning (eviction)"),
    ],
)
def test_verdict(findings: list[Finding], status: int, sentence: str) -> None:
    assert plan.status(findings) == status
    assert plan.sentence(findings) == sentence
    shown = plan.report(findings)
    assert (shown["schema"], shown["status"], shown["verdict"]) == (1, status, sentence)
    assert [it["mark"] for it in shown["findings"]] == [it.mark.value for it in findings]


def test_a_finding_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert WARNING.line == "eviction: it evicts; do not"
    assert FAILED.line == "store: is it running? start it"
    plan.show(Finding(Mark.FAILED, "store", "two\nlines [bold]:b:"))
    assert capsys.readouterr().out == "failed   store: two lines [bold]:b:\n"


@pytest.mark.parametrize(
    ("version", "least", "mark"),
    [
        ("7.0.15", (6,), Mark.OK),
        ("6", (6,), Mark.OK),
        ("5.0.7", (6,), Mark.FAILED),
        ("3.10.0", (3, 6), Mark.OK),
        ("3.5.9", (3, 6), Mark.FAILED),
        ("15.18 (Debian 15.18-0+deb12u1)", (12,), Mark.OK),
        ("1.20.2+ent", (1, 7), Mark.OK),
        ("3.4.0-rc.1", (3, 4), Mark.OK),
        ("8.1.0", (), Mark.OK),
        ("unstable", (6,), Mark.UNKNOWN),
        ("", (6,), Mark.UNKNOWN),
    ],
)
def test_version(version: str, least: tuple[int, ...], mark: Mark) -> None:
    finding = of_version("server", version, least)
    assert finding.mark is mark
    if mark is Mark.FAILED:
        assert ".".join(map(str, least)) in finding.advice


@pytest.mark.parametrize(
    "backend", [name for name in STORES if name not in ("dynamodb", "quorum", "s3", "azure")]
)
def test_least_version_is_the_documented_one(backend: str) -> None:
    client = client_class(backend)
    page = import_module(client.__module__).__doc__ or ""
    documented = re.search(r"(\d+(?:\.\d+)?) and later", page)
    assert documented is not None
    least: tuple[int, ...] = client.least_version  # type: ignore[attr-defined]
    assert ".".join(map(str, least)) == documented[1]


def test_rights_to_paste_are_the_documented_ones() -> None:
    assert f"``{redis._RIGHTS}``" in (redis.__doc__ or "").replace("\n", " ")
    for endpoint, options, line in (
        ("h", {}, "ACL SETUSER default ~{rdzv/* " + redis._RIGHTS),
        ("redis://joe@h/1", {"prefix": "a/b"}, f"ACL SETUSER joe ~{{a/b/* {redis._RIGHTS} +select"),
        ("h", {"user": "x", "cluster": "true"},
         f"ACL SETUSER x ~{{rdzv/* {redis._RIGHTS} +cluster|slots +command"),
        ("unix:///s", {"database": "2"}, f"ACL SETUSER default ~{{rdzv/* {redis._RIGHTS} +select"),
    ):  # fmt: skip
        parsed = parse_options(redis.Options, options, {})
        assert redis._grant(redis._target(endpoint, parsed), parsed) == line


@pytest.mark.parametrize(
    ("arguments", "mark"),
    [
        ((True, True, ["far"]), Mark.OK),
        ((False, False, ["far"]), Mark.OK),
        ((False, True, ["localhost", "127.0.0.1", "::1"]), Mark.OK),
        ((False, True, ["localhost", "far"]), Mark.WARNING),
        ((False, True, ["10.0.0.1"]), Mark.WARNING),
    ],
)
def test_password_on_a_plain_connection(
    arguments: tuple[bool, bool, list[str]], mark: Mark
) -> None:
    assert of_connection(*arguments).mark is mark


def test_unverified_connection_is_told_as_such() -> None:
    finding = of_connection(True, False, [], verified=False)
    assert finding.mark is Mark.OK
    assert "not verified" in finding.found


def test_all_faults_are_found_not_only_the_first() -> None:
    config = {"join_timeout": "soon", "rank": "-1", "closed_ttl": "5", "unknown": "1"}
    environ = {"RDZV_PLUGINS_LAST_CALL_TIMEOUT": "x", "RDZV_PLUGINS_RANK": "y"}
    found = refused_options(Settings, config, environ)
    assert [name for name, _ in found] == ["join_timeout", "last_call_timeout", "rank"]
    assert refused_options(ServerOptions, {"password": "hunter2"}, {})[0][0] == "password"
    assert "hunter2" not in str(refused_options(ServerOptions, {"password": "hunter2"}, {}))


def test_unknown_options_and_variables() -> None:
    known = option_names(Settings)
    # torch adds a timeout of its own.
    unknown = unknown_options({"join_timeot": "1", "rank": "1", "timeout": "9"}, known)
    assert [name for name, _ in unknown] == ["join_timeot"]
    assert "did you mean 'join_timeout'?" in unknown[0][1]
    environ = {
        "RDZV_PLUGINS_RANK": "1",
        "RDZV_PLUGINS_JOIN_TIMEOT": "1",
        "RDZV_PLUGINS_join_timeout": "1",
        "RDZV_PLUGINS_ZZZ": "1",
        "RDZV_REDIS_BINARY": "1",
        "PATH": "1",
    }
    assert unknown_variables(environ, known) == [
        ("RDZV_PLUGINS_JOIN_TIMEOT", "RDZV_PLUGINS_JOIN_TIMEOUT"),
        ("RDZV_PLUGINS_ZZZ", None),
        ("RDZV_PLUGINS_join_timeout", "RDZV_PLUGINS_JOIN_TIMEOUT"),
    ]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "does not speak TLS; leave out tls="),
        ("[SSL: RECORD_LAYER_FAILURE] record layer failure", "does not speak TLS; leave out tls="),
        (
            "certificate verify failed: Hostname mismatch, certificate is not valid for 'h'",
            "the certificate is of another host",
        ),
        (
            "certificate verify failed: unable to get local issuer certificate",
            "the authority of the server's certificate is not trusted; set ca_file",
        ),
        ("certificate verify failed: self-signed certificate", "set ca_file"),
        ("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED]", "cert_file and key_file"),
    ],
)
def test_cause_of_a_failed_handshake(reason: str, said: str) -> None:
    text = tls_problem(reason).text
    assert text.startswith(f"failed the TLS handshake ({reason})")
    assert said in text


def test_unresolved_name_is_seen_behind_other_errors() -> None:
    error = RuntimeError("could not connect")
    error.__cause__ = OSError("[Errno -2] Name or service not known")
    assert is_unresolved(error)
    assert not is_unresolved(RuntimeError("Connection refused"))


def test_zookeeper_that_is_too_old() -> None:
    client = object.__new__(ZooKeeperClient)
    client._session = Quiet()  # type: ignore[assignment]
    client.timeout, client._grant, client._parents = 5.0, "", ["/"]
    problem = client._problem(UnimplementedError())
    assert problem is not None
    assert "is too old: it does not know a request of 3.6" in problem.text


class Quiet:
    def may_recover(self, error: Exception) -> bool:
        return False


# Stores that are not as they should be.


def client(kind: type[MemoryClient] = MemoryClient) -> MemoryClient:
    return kind(MemoryServer(), "check")


class Deaf(MemoryClient):
    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        return None


class HungUp(MemoryClient):
    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        raise RendezvousConnectionError("the store hung up")


def test_waiter_that_is_not_woken() -> None:
    server = MemoryServer()
    finding = store.check_wake_up(MemoryClient(server, "a"), lambda: Deaf(server, "a"))
    assert finding.mark is Mark.FAILED
    assert "was not woken" in finding.found
    with pytest.raises(RendezvousConnectionError, match="the store hung up"):
        store.check_wake_up(MemoryClient(server, "a"), lambda: HungUp(server, "a"))


class Partitioned(MemoryClient):
    """Half of the clients speak with one server, half with another."""

    servers = MemoryServer(), MemoryServer()
    made = 0

    def __init__(self) -> None:
        Partitioned.made += 1
        super().__init__(self.servers[self.made % 2], "a")


def test_two_winners_are_told() -> None:
    finding = store.check_contention(Partitioned)
    assert finding.mark is Mark.FAILED
    assert "2 of 16 writers won a compare-and-set, not one" in finding.found


class Refusing(MemoryClient):
    def expire(self, seconds: float) -> None:
        raise RendezvousConnectionError("the user may not expire")


class Forgetful(MemoryClient):
    def put_many(self, values: Mapping[str, bytes]) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "said"), [(Refusing, "may not expire"), (Forgetful, "did not return what was just")]
)
def test_refused_request_and_lost_write(kind: type[MemoryClient], said: str) -> None:
    finding = store.check_requests(client(kind))
    assert (finding.mark, finding.what) == (Mark.FAILED, "rights")
    assert said in finding.found


class Small(MemoryClient):
    capabilities = Capabilities(
        push=True, linearizable=True, batch=True, ttl=True, max_value_bytes=10_000
    )


def test_largest_value() -> None:
    small = client(Small)
    finding = store.check_size(small)
    assert finding.mark is Mark.OK
    assert finding.found == "10,000 bytes; 10,000 were written and read back"
    assert small.get("large") is None


class Measured(MemoryClient):
    heartbeat_ms = 2.0


def test_heartbeats() -> None:
    measured = client(Measured)
    finding = store.check_heartbeats(measured, 5.0, (2, 1000))
    assert (finding.mark, finding.values) == (
        Mark.OK,
        {"keep_alive_interval": 5.0, "nodes": 1300},
    )
    finding = store.check_heartbeats(measured, 5.0, (2, 2000))
    assert finding.mark is Mark.WARNING
    assert "keep_alive_interval=8;" in finding.advice
    assert store.check_heartbeats(measured, 8.0, (2, 2000)).mark is Mark.OK
    assert store.check_heartbeats(client(), 5.0, (2, 2000)).mark is Mark.UNKNOWN


def test_latency_of_a_slow_store() -> None:
    slow: KeyValueClient = client()
    assert store.check_latency(slow, 5.0).mark is Mark.OK
    finding = store.check_latency(slow, 1e-7)
    assert finding.mark is Mark.WARNING
    assert "heartbeat_timeout" in finding.advice
