from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rdzv_plugins.peers import addresses
from rdzv_plugins.peers.addresses import (
    Candidate,
    OwnAddress,
    candidates,
    gloo_address,
    interface_of,
    is_at_loopback,
    is_out_of_reach,
    is_own_ip,
    listen,
    node_address,
)
from rdzv_plugins.peers.reach import gloo_fault
from rdzv_plugins.stores import client_class
from tests.servers.process import free_ports

Resolve = Callable[..., list[Any]]


def route_address(target: str) -> str:
    """The address from which this host would send to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])


@pytest.fixture
def own() -> str:
    """An address of this host that is not loopback."""
    try:
        return route_address("192.0.2.1")
    except OSError:
        pytest.skip("this host has no route, and so no address but loopback")


@pytest.fixture
def name_service(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, str]], None]:
    """Sets this host's name and what names resolve to; addresses resolve to themselves."""
    real: Resolve = socket.getaddrinfo

    def install(fqdn: str, known: dict[str, str]) -> None:
        def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> list[Any]:
            host = known.get(host, host)
            try:
                ip_address(host)
            except ValueError:
                raise socket.gaierror(f"no such name: {host}") from None
            return real(host, *args, **kwargs)

        monkeypatch.setattr(socket, "getfqdn", lambda: fqdn)
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    return install


NameService = Callable[[str, dict[str, str]], None]


def announced(local_addr: str | None, hosts: list[tuple[str, int]], **options: Any) -> str:
    return node_address(local_addr, hosts, **options).address


def test_local_addr_comes_first() -> None:
    found = node_address("10.9.8.7", [("localhost", 1)], interface="ib7")
    assert found == OwnAddress("10.9.8.7", "--local-addr, which overrides interface=ib7")


@pytest.mark.parametrize("resolves_to", ["own", "127.0.1.1", "192.0.2.77", "not at all"])
@pytest.mark.parametrize("name", ["node-7.example.org", "3f9d0c1b2a"])
def test_a_name_is_never_announced(
    name_service: NameService, own: str, name: str, resolves_to: str
) -> None:
    name_service(name, {name: own if resolves_to == "own" else resolves_to})
    assert announced(None, [("192.0.2.1", 6379)]) == own
    # Also where the store is reached through a proxy on this host.
    assert announced(None, [("127.0.0.1", 6379)]) == own


def test_a_store_on_loopback_gives_the_default_route(name_service: NameService, own: str) -> None:
    name_service("vm", {"vm": "127.0.1.1", "localhost": "127.0.0.1"})
    found = node_address(None, [("localhost", 6379)])
    assert (found.address, found.why) == (
        own, "that of the default route, for the store is at loopback"
    )  # fmt: skip
    assert announced(None, [("localhost", 6379)], alone=True) == "127.0.0.1"


def have(monkeypatch: pytest.MonkeyPatch, *adapters: tuple[str, list[str]]) -> None:
    """Let this host have these interfaces and addresses, and no default route."""
    found = [Candidate(ip_address(it), name) for name, ips in adapters for it in ips]
    monkeypatch.setattr(addresses, "_addresses", lambda: found)
    monkeypatch.setattr(addresses, "_ANYWHERE", ())


LO = ("lo", ["127.0.0.1", "::1"])


def test_without_a_default_route_the_first_address_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = [("127.0.0.1", 6379)]
    have(monkeypatch, LO, ("eth0", ["fe80::1", "169.254.1.1"]), ("ib0", ["fd00::7", "10.1.0.7"]))
    assert announced(None, store) == "10.1.0.7"
    have(monkeypatch, LO, ("ib0", ["fe80::1", "fd00::7"]))
    assert announced(None, store) == "fd00::7"
    have(monkeypatch, LO, ("eth0", ["fe80::1", "169.254.1.1"]))
    assert node_address(None, store) == OwnAddress(
        "127.0.0.1", "this host has no other address, and the store is at loopback"
    )


def test_interface_and_network_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    have(
        monkeypatch,
        LO,
        ("eth0", ["10.1.0.7", "10.2.0.7"]),
        ("ib0", ["fd00::7", "10.1.3.7", "169.254.3.7"]),
    )
    store = [("192.0.2.1", 6379)]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"interface": "ib0"}, "10.1.3.7"),
        ({"network": "10.2.0.0/16"}, "10.2.0.7"),
        ({"network": "10.2.0.9/16"}, "10.2.0.7"),
        ({"network": "fd00::/8"}, "fd00::7"),
        ({"network": "10.1.0.0/16"}, "10.1.0.7"),
        ({"network": "10.1.0.0/16", "interface": "ib0"}, "10.1.3.7"),
        ({"network": "169.254.0.0/16"}, "169.254.3.7"),
        ({"interface": "lo"}, "127.0.0.1"),
    ]
    for options, expected in cases:
        found = node_address(None, store, **options)
        asked = ", ".join(f"{name}={options[name]}" for name in sorted(options))
        assert found == OwnAddress(expected, asked)
    with pytest.raises(
        ValueError, match=r"no address on interface 'ib1'; it has 10\.1\.0\.7 \(eth"
    ):
        node_address(None, store, interface="ib1")
    with pytest.raises(
        ValueError, match=r"no address on interface 'ib0' in network '10\.2\.0\.0/16'"
    ):
        node_address(None, store, interface="ib0", network="10.2.0.0/16")


def test_the_addresses_of_this_host_are_found(own: str) -> None:
    found = candidates()
    assert own in [str(it.address) for it in found]
    assert interface_of(own) not in (None, "lo")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is interface_of("localhost") is None
    assert [it.is_global for it in found] == sorted((it.is_global for it in found), reverse=True)


def test_gloo_listens_where_its_hosts_name_is(
    name_service: NameService, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    for resolves_to, address in (
        ("127.0.1.1", "127.0.1.1"), (own, own), ("192.0.2.77", "127.0.0.1"), ("", "127.0.0.1")
    ):  # fmt: skip
        name_service("vm", {"vm": resolves_to})
        assert str(gloo_address()) == address
        fault = gloo_fault(own)
        assert bool(fault) == (address != own)
        assert not fault or fault.endswith(f"set GLOO_SOCKET_IFNAME={interface_of(own)}")
        assert gloo_fault("127.0.0.1") == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert gloo_address() is None
    assert gloo_fault(own) == ""


def test_the_first_host_that_resolves_decides_unless_it_is_this_one(
    name_service: NameService, own: str
) -> None:
    name_service("vm", {"b": "127.0.0.1"})
    hosts = [("a", 1), ("b", 1), ("192.0.2.1", 1)]
    assert announced(None, hosts[:2], alone=True) == "127.0.0.1"
    assert announced(None, hosts, alone=True) == own


@pytest.mark.parametrize("hosts", [[], [("us-east-1", 9)]])
def test_without_a_host_the_default_route_decides(
    name_service: NameService, own: str, hosts: list[tuple[str, int]]
) -> None:
    name_service("vm", {})
    assert announced(None, hosts) == own


def test_a_dead_name_service_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    monkeypatch.setattr(addresses, "_RESOLVER_SECONDS", 0.5)
    answered = threading.Event()
    real: Resolve = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        if not host[0].isdecimal():
            answered.wait(60)
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    start = time.monotonic()
    try:
        assert announced(None, [("redis.example.org", 6379)]) == own
        assert time.monotonic() - start < 2
    finally:
        answered.set()


@pytest.mark.parametrize("hosts", [[], [("localhost", 6379)], [("192.0.2.1", 6379)]])
def test_a_server_on_the_real_address_can_be_reached(hosts: list[tuple[str, int]]) -> None:
    address = announced(None, hosts)
    server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    server.set("key", "x")
    assert TCPStore(address, server.port, is_master=False).get("key") == b"x"


def test_ports_are_taken_in_their_order() -> None:
    ports = free_ports(3)
    with listen("127.0.0.1", ports) as first, listen("127.0.0.1", ports) as second:
        assert [it.getsockname()[1] for it in (first, second)] == ports[:2]
        with listen("127.0.0.1", ports), pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", ports)


@pytest.mark.parametrize(
    ("backend", "endpoint", "here"),
    [
        ("redis", "unix:///run/redis.sock", True),
        ("redis", "redis://localhost:1", True),
        ("etcd-v3", "[::1]:1", True),
        ("zookeeper", "127.0.0.1:1,localhost:2/rdzv", True),
        # One of its servers is on this host.
        ("zookeeper", "127.0.0.1:1,192.0.2.1:1/rdzv", False),
        ("redis", "192.0.2.1:6379", False),
        # No endpoint is localhost, but for DynamoDB.
        ("consul", "", True),
        ("dynamodb", "", False),
        ("dynamodb", "us-east-1", False),
        ("dynamodb", "http://127.0.0.1:8000", True),
        # Nothing is known of where a kubeconfig leads.
        ("kubernetes", "", False),
        ("kubernetes", "127.0.0.1:6443", True),
        ("postgres", "postgresql:///db?host=/run/postgresql", True),
        ("postgres", "postgresql://me@%2Frun%2Fpostgresql/db", True),
        ("postgres", "postgresql://me:x@192.0.2.1/db?host=/a", True),
        ("postgres", "postgresql://me:x@192.0.2.1/db", False),
    ],
)
def test_a_store_at_loopback(backend: str, endpoint: str, here: bool) -> None:
    assert is_at_loopback(client_class(backend).locate(endpoint)) is here


@pytest.mark.parametrize(
    ("endpoint", "hosts"),
    [
        ("", [("localhost", 6379)]),
        ("unix:///run/redis.sock", []),
        ("redis://me:pw@a:1,[::1]:2/0", [("a", 1), ("::1", 2)]),
        ("zk1:2181,zk2:2181/chroot", [("zk1", 2181), ("zk2", 2181)]),
        ("http://me:p/w@a", []),
    ],
)
def test_the_hosts_of_a_store(endpoint: str, hosts: list[tuple[str, int]]) -> None:
    assert client_class("redis").locate(endpoint).dialled == hosts


def test_a_pod_reaches_kubernetes_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert client_class("kubernetes").locate("").hosts == (("fd00::1", 6443),)


def test_the_environment_may_say_where_postgres_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_class("postgres").locate("").hosts == (("localhost", 5432),)
    monkeypatch.setenv("PGHOST", "db.cluster")
    assert client_class("postgres").locate("").hosts == ()


def test_a_host_without_a_port_counts() -> None:
    assert [host for host, _ in client_class("consul").locate("consul").hosts] == ["consul"]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_is_out_of_reach_where_the_store_is_on_another_host(
    address: str, own: str
) -> None:
    assert is_out_of_reach(address, [("192.0.2.1", 6379)])
    # The store is on this host, or nowhere that is known.
    for here in ([("localhost", 6379)], [("127.0.0.1", 6379)], []):
        assert not is_out_of_reach(address, here)


@pytest.mark.parametrize("address", ["10.0.0.1", "node7.cluster", "fd00::7"])
def test_other_addresses_are_not(address: str) -> None:
    assert not is_out_of_reach(address, [("192.0.2.1", 6379)])


def test_an_ip_address_of_this_host_is_known_without_its_name_service(
    name_service: NameService, own: str
) -> None:
    name_service("node-7", {})
    assert is_own_ip("127.0.0.1")
    assert is_own_ip(own)
    for other in ("192.0.2.1", "localhost", "node-7", ""):
        assert not is_own_ip(other)


def test_a_host_of_the_store_announces_what_leads_to_its_others(
    name_service: NameService, own: str
) -> None:
    """The first of its hosts is this one, and its name stands for 127.0.1.1 here, or nothing."""
    for known in ({"node1": "127.0.1.1"}, {"node1": own}, {}):
        name_service("node1", known)
        hosts = client_class("quorum").locate("node1,192.0.2.1,192.0.2.3").dialled
        found = node_address(None, hosts)
        assert (found.address, found.why) == (own, "from it this host reaches the store")
        assert is_out_of_reach("127.0.0.1", hosts)
        assert not is_at_loopback(client_class("zookeeper").locate("node1,192.0.2.1,192.0.2.3"))
