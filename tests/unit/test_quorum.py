"""The rules of the store quorum: which hosts have members, where, and with which secret."""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.peers import addresses
from rdzv_plugins.peers.addresses import is_at_loopback
from rdzv_plugins.settings.options import UnreadableFileError
from rdzv_plugins.settings.parsing import parse_options
from rdzv_plugins.stores import client_class
from rdzv_plugins.stores.quorum import attending as member
from rdzv_plugins.stores.quorum import wire
from rdzv_plugins.stores.quorum.client import Client
from rdzv_plugins.stores.quorum.members import SIZES, Members, Options
from rdzv_plugins.stores.quorum.wire import CLIENT, Wire
from rdzv_plugins.testing.harness import until

THREE = "node1,node2,node3"

Names = Callable[[str, Mapping[str, str]], None]


def members(endpoint: str = THREE, **options: Any) -> Members:
    return Members.of(endpoint, Options(**{"cluster": "job", **options}))


# The endpoint.


@pytest.mark.parametrize("count", range(1, 8))
def test_an_endpoint_names_one_three_or_five_members(count: int) -> None:
    endpoint = ",".join(f"node{number}" for number in range(count))
    if count in SIZES:
        assert len(members(endpoint).hosts) == count
    else:
        with pytest.raises(ValueError, match=f"names {count} hosts: name one, three or five"):
            members(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("a,b,a", "names a host twice"),
        ("a,b,A", "names a host twice"),
        ("a:1,b,a:1", "names a host twice"),
        ("joe@a", "members have no users"),
        ("joe:hunter2@a", "members have no users"),
        ("a/path", "path"),
        ("nats://a", "the endpoint"),
        ("a:0", "the endpoint"),
        ("a:70000", "the endpoint"),
    ],
)
def test_an_endpoint_that_means_no_members(endpoint: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        members(endpoint)
    assert "hunter2" not in str(caught.value)


def test_members_are_of_a_run() -> None:
    with pytest.raises(ValueError, match="with --rdzv-conf=cluster=<its id>"):
        members(cluster=None)
    assert Client.of_run(Options(), "job").cluster == "job"
    assert Client.of_run(Options(cluster="shared"), "job").cluster == "shared"
    # No run is named so: what is kept beside the runs.
    assert Client.of_run(Options(), "!index").cluster is None
    assert Client.of_run(Options(), "").cluster is None


# Ports.


@pytest.mark.parametrize("ports", ["", "29600", "29600-", "-29600", "9-8", "0-9", "1-65536"])
def test_no_range_of_ports(ports: str) -> None:
    with pytest.raises(ValueError, match=f"option 'ports': '{ports}' is no range such as"):
        Options(ports=ports)


@pytest.mark.parametrize("ports", ["29600-29699", "7-7", "100-101", "7-10"])
@pytest.mark.parametrize("cluster", ["job", "other", "", "ä b%"])
def test_ports_by_rule(ports: str, cluster: str) -> None:
    first, last = map(int, ports.split("-"))
    found = members(ports=ports, cluster=cluster)
    every = {tuple(found.ports(host)) for host in range(3)}
    assert len(every) == 1, "a client looks for all members on the same ports"
    (own,) = every
    # As many as there is room for, and none twice.
    assert len({*own}) == len(own) == min(3, last - first + 1)
    assert first <= min(own)
    assert max(own) <= last


def test_runs_spread_over_the_ports() -> None:
    found = {members(cluster=f"run-{number}").ports(0)[0] for number in range(200)}
    assert len(found) > 30


def test_a_port_in_the_endpoint_is_the_only_one() -> None:
    found = members("a:7000,b,[fd00::1]:7002")
    assert (found.ports(0), found.ports(2)) == ([7000], [7002])
    assert found.ports(1) == members().ports(0)
    assert [places[0] for places in found.dialled] == [
        ("a", 7000), ("b", found.ports(1)[0]), ("fd00::1", 7002)
    ]  # fmt: skip


def test_clients_dial_the_likeliest_places_first() -> None:
    found = members()
    hosts = ("node1", "node2", "node3")
    assert found.dialled == [[(host, port) for port in found.ports(0)] for host in hosts]


# The secret.


def test_a_secret_is_given_once_and_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are both set: leave one of them out"):
        Options(secret="hush", secret_file="file")
    with pytest.raises(UnreadableFileError):
        Options(cluster="job", secret_file=str(tmp_path / "none")).secret_bytes()
    with pytest.raises(ValueError, match=r"is a secret.*Set \$RDZV_PLUGINS_SECRET instead"):
        parse_options(Options, {"secret": "hush"}, {})
    assert "hush" not in repr(Options(secret="hush"))


# Which member this host is.


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Sets this host's name, and what names stand for here; 10.0.0.1 is its address."""

    def install(hostname: str, known: Mapping[str, str]) -> None:
        def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
            found = known.get(host, host)
            try:
                ip_address(found)
            except ValueError:
                raise socket.gaierror(f"no such name: {host}") from None
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]

        def is_own_ip(address: str) -> bool:
            return address == "10.0.0.1" or address.startswith("127.")

        monkeypatch.setattr(socket, "gethostname", lambda: hostname)
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        for module in (member, addresses):
            monkeypatch.setattr(module, "is_own_ip", is_own_ip)
        # From it the others are reached, and any other host.
        monkeypatch.setattr(addresses, "route_to", lambda hosts: ip_address("10.0.0.1"))
        own = [addresses.Candidate(ip_address(it), "eth0") for it in ("10.0.0.1", "127.0.0.1")]
        monkeypatch.setattr(addresses, "candidates", lambda: own)

    return install


KNOWN = {"node1": "10.0.0.1", "node2": "10.0.0.2", "node3": "10.0.0.3"}


def place(endpoint: str = THREE, local_addr: str | None = None) -> tuple[str, str] | str:
    """The host and the address of this host's member; else whether it may have one yet."""
    found = members(endpoint)
    own, unknown = member.own_member(found, local_addr)
    if own is None:
        return "unknown" if unknown else "none"
    assert not unknown
    return found.hosts[own.host][0], own.address


def test_its_address_tells_a_host_its_place(names: Names) -> None:
    names("vm", KNOWN)
    assert place() == ("node1", "10.0.0.1")
    assert place("node3,node2,node1") == ("node1", "10.0.0.1")
    assert place("10.0.0.3,10.0.0.1,10.0.0.2") == ("10.0.0.1", "10.0.0.1")
    assert place("10.0.0.4,10.0.0.5,node3") == "none"


@pytest.mark.parametrize("hostname", ["node2", "node2.example.org"])
def test_a_host_whose_own_name_is_127_0_1_1(names: Names, hostname: str) -> None:
    """Debian's /etc/hosts says so: no other host comes there."""
    for others in ({"node1": "10.0.0.2", "node3": "10.0.0.3"}, {}):
        names(hostname, {**others, "node2": "127.0.1.1"})
        assert place() == ("node2", "10.0.0.1")
        assert place("node2") == ("node2", "10.0.0.1")
        assert place(local_addr="node2") == ("node2", "10.0.0.1")
        assert place("node1,Node2,node3") == ("node2", "10.0.0.1")
        assert {host for host, _ in members().places(1)} == {"10.0.0.1", "node2"}
        assert {host for host, _ in members().places(0)} == {"node1"}
    # Not resolved at all, by its name; or by an alias.
    names(hostname, {"node1": "10.0.0.2"})
    assert place() == ("node2", "10.0.0.1")
    assert {host for host, _ in members().places(1)} == {"10.0.0.1", "node2"}
    names("vm", {"node2": "127.0.1.1"})
    assert place() == ("node2", "10.0.0.1")
    assert {host for host, _ in members().places(1)} == {"10.0.0.1", "node2"}


def test_a_name_that_stands_for_another_hosts_address(names: Names) -> None:
    names("vm", {**KNOWN, "node1": "10.0.0.9"})
    for local_addr, says in [
        ("node1", "--local-addr=node1 stands for 10.0.0.9, no address of this host: name one of "),
        ("10.0.0.2", "--local-addr=10.0.0.2 is no address of this host: name one of its own"),
    ]:
        with pytest.raises(ValueError, match=re.escape(says)):
            place(THREE, local_addr)


def test_names_that_nobody_knows_yet(names: Names) -> None:
    names("vm", {})
    assert place() == "unknown"
    names("vm", {"node1": "10.0.0.7"})
    assert place() == "unknown"
    names("vm", {"node2": "10.0.0.1"})
    assert place() == ("node2", "10.0.0.1")


def test_all_members_on_this_host(names: Names) -> None:
    names("vm", {"localhost": "127.0.0.1", "a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"})
    assert place("127.0.0.1,127.0.0.2,127.0.0.3") == ("127.0.0.1", "127.0.0.1")
    assert place("a,b,c") == ("a", "127.0.0.1")
    assert place("localhost") == ("localhost", "127.0.0.1")


def test_local_addr_tells_which_of_them(names: Names) -> None:
    names("vm", KNOWN)
    three = "127.0.0.1,127.0.0.2,127.0.0.3"
    assert place(three, "127.0.0.2") == ("127.0.0.2", "127.0.0.2")
    # An agent at another loopback address is none of them, though they are all this host's.
    assert place(three, "127.0.0.4") == "none"
    assert place(THREE, "node1") == ("node1", "10.0.0.1")
    # One that says another interface's is still the host that the endpoint means.
    assert place(THREE, "10.9.0.1") == ("node1", "10.0.0.1")
    names("vm", {})
    assert place(THREE, "127.0.0.1") == "unknown"


# What the node says of itself and of the store.


def test_members_are_at_loopback_only_where_the_endpoint_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a Debian host its own name is at loopback; its member is not."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        return real("127.0.1.1" if host == "node1" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert not is_at_loopback(client_class("quorum").locate("node1"))
    assert is_at_loopback(client_class("redis").locate("node1"))
    assert not is_at_loopback(client_class("quorum").locate("node1,192.0.2.1,192.0.2.2"))
    assert is_at_loopback(client_class("quorum").locate("127.0.0.1"))
    assert is_at_loopback(client_class("quorum").locate("127.0.0.1:7000,127.0.0.2,localhost"))
    assert not is_at_loopback(client_class("quorum").locate("127.0.0.1,192.0.2.1,192.0.2.2"))


def test_a_name_without_an_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of a member serves nobody meanwhile."""
    real, answers = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        if host == "silent.test" and not kwargs.get("flags"):
            answers.wait(60)
        return real("127.0.0.1" if answers.is_set() else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    places = [("silent.test", port) for port in (1, 2, 3)]
    began = time.monotonic()
    assert [it for _ in range(100) for it in wire.addresses(places)] == []
    assert time.monotonic() - began < 5
    answers.set()
    assert until(lambda: len(wire.addresses(places)) == 3, 10)


# The connections.


def received(wire: Wire) -> list[bytes]:
    assert select.select([wire.line], [], [], 10)[0]
    return [*wire.receive()]


def test_a_stranger_that_passes_a_greeting_on_can_say_nothing() -> None:
    """A stranger on a member's port, between a client and the member."""
    pairs = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pairs.append((socket.create_connection(listener.getsockname()), listener.accept()[0]))
    (line, between), (other, member) = pairs
    client = Wire(line, "job", b"secret", CLIENT, False, 1024)
    server = Wire(member, "job", b"secret", 0, True, 1024)
    for side in (client, server):
        side.flush()
    while server.peer is None or client.peer is None:
        for reached, near, far in ((server, between, other), (client, other, between)):
            far.sendall(near.recv(4096))
            assert received(reached) == []
            reached.flush()
    client.send(b"honest")
    client.flush()
    honest = between.recv(4096)
    other.sendall(honest)
    assert received(server) == [b"honest"]
    for said in (honest, struct.pack(">I", 22) + b"forged" + 16 * b"x"):
        other.sendall(said)
        with pytest.raises(ConnectionError, match="somebody in between"):
            received(server)
    for it in (line, between, other, member):
        it.close()
