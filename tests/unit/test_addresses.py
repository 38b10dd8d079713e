from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rdzv_plugins import addresses
from rdzv_plugins.addresses import is_out_of_reach, is_own_ip, node_address, store_hosts

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


def test_local_addr_comes_first() -> None:
    assert node_address("10.9.8.7", [("localhost", 1)]) == "10.9.8.7"


def test_a_full_name_that_resolves_to_this_host_is_taken(
    name_service: NameService, own: str
) -> None:
    name_service("node-7.example.org", {"node-7.example.org": own})
    assert node_address(None, [("127.0.0.1", 1)]) == "node-7.example.org"


@pytest.mark.parametrize("resolves_to", ["127.0.1.1", "192.0.2.77", "not at all"])
def test_a_name_that_is_not_this_hosts_own_is_not(
    name_service: NameService, own: str, resolves_to: str
) -> None:
    name_service("node-7.example.org", {"node-7.example.org": resolves_to})
    assert node_address(None, [("192.0.2.1", 6379)]) == own


def test_a_short_name_stands_for_its_address(name_service: NameService, own: str) -> None:
    name_service("3f9d0c1b2a", {"3f9d0c1b2a": own})
    assert node_address(None, [("192.0.2.1", 6379)]) == own
    # Even where the store is reached through a proxy on this host.
    assert node_address(None, [("127.0.0.1", 6379)]) == own


def test_a_store_on_loopback_gives_loopback(name_service: NameService) -> None:
    name_service("vm", {"vm": "127.0.1.1", "localhost": "127.0.0.1"})
    assert node_address(None, [("localhost", 6379)]) == "127.0.0.1"


def test_the_first_host_that_resolves_decides(name_service: NameService) -> None:
    name_service("vm", {"b": "127.0.0.1"})
    assert node_address(None, [("a", 1), ("b", 1), ("192.0.2.1", 1)]) == "127.0.0.1"


@pytest.mark.parametrize("hosts", [[], [("us-east-1", 9)]])
def test_without_a_host_the_default_route_decides(
    name_service: NameService, own: str, hosts: list[tuple[str, int]]
) -> None:
    name_service("vm", {})
    assert node_address(None, hosts) == own


def test_a_dead_name_service_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    monkeypatch.setattr(addresses, "_RESOLVER_SECONDS", 0.5)
    answered = threading.Event()
    real: Resolve = socket.getaddrinfo

    def stuck(*args: Any) -> str:
        answered.wait(60)
        return "too.late.example.org"

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        return real(host if host[0].isdecimal() else stuck(), *args, **kwargs)

    monkeypatch.setattr(socket, "getfqdn", stuck)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    start = time.monotonic()
    try:
        assert node_address(None, [("redis.example.org", 6379)]) == own
        assert time.monotonic() - start < 4
    finally:
        answered.set()


@pytest.mark.parametrize("hosts", [[], [("localhost", 6379)], [("192.0.2.1", 6379)]])
def test_a_server_on_the_real_address_can_be_reached(hosts: list[tuple[str, int]]) -> None:
    address = node_address(None, hosts)
    server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    server.set("key", "x")
    assert TCPStore(address, server.port, is_master=False).get("key") == b"x"


@pytest.mark.parametrize(
    ("endpoint", "hosts"),
    [
        ("", []),
        ("unix:///run/redis.sock", []),
        ("redis://me:pw@a:1,[::1]:2/0", [("a", 1), ("::1", 2)]),
        ("zk1:2181,zk2:2181/chroot", [("zk1", 2181), ("zk2", 2181)]),
        ("http://me:p/w@a", []),
    ],
)
def test_store_hosts(endpoint: str, hosts: list[tuple[str, int]]) -> None:
    assert store_hosts(endpoint) == hosts


def test_a_host_without_a_port_counts() -> None:
    assert [host for host, _ in store_hosts("consul")] == ["consul"]


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
