"""The rules of the store quorum: who is a member, where, and under which name and password."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import tempfile
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from nats.js.errors import APIError

from rdzv_plugins import addresses
from rdzv_plugins.addresses import is_at_loopback
from rdzv_plugins.config import UnreadableFileError, parse_options
from rdzv_plugins.stores import _quorum_member as member
from rdzv_plugins.stores import client_class
from rdzv_plugins.stores.nats import Options as Login
from rdzv_plugins.stores.nats import SilentBucketError, Transport, UnfitServerError
from rdzv_plugins.stores.quorum import SIZES, Client, Members, Options, OtherClusterError

THREE = "node1,node2,node3"

Names = Callable[[str, Mapping[str, str]], None]


def members(endpoint: str = THREE, **options: Any) -> Members:
    return Members.of(endpoint, Options(**{"cluster": "job", **options}))


# The endpoint.


@pytest.mark.parametrize("count", range(1, 8))
def test_so_many_members_there_may_be(count: int) -> None:
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
        ("a:1,b,a:1", "names a host twice"),
        ("joe@a", "members have no users"),
        ("joe:hunter2@a", "members have no users"),
        ("a/path", "path"),
        ("nats://a", "the endpoint"),
        ("a:0", "the endpoint"),
        ("a:70000", "the endpoint"),
        ("a:65535", "none follows that of a:65535: name one up to 65534"),
        ("a,[fd00::1]:65535,b", r"none follows that of \[fd00::1\]:65535"),
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


@pytest.mark.parametrize("ports", ["", "29600", "29600-", "-29600", "9-9", "9-8", "0-9", "1-65536"])
def test_no_range_of_ports(ports: str) -> None:
    with pytest.raises(ValueError, match=f"option 'ports': '{ports}' is no range such as"):
        Options(ports=ports)


@pytest.mark.parametrize("ports", ["29600-29699", "29600-29698", "29601-29699", "100-101", "7-10"])
@pytest.mark.parametrize("cluster", ["job", "other", "", "ä b%"])
def test_ports_by_rule(ports: str, cluster: str) -> None:
    first, last = map(int, ports.split("-"))
    found = members(ports=ports, cluster=cluster)
    every = {tuple(found.ports(host)) for host in range(3)}
    assert len(every) == 1, "a client looks for all members on the same ports"
    (own,) = every
    # As many as there is room for: each with the next one, and none shared by two.
    assert len(own) == min(3, (last - first + 1) // 2)
    taken = [port for pair in own for port in (pair, pair + 1)]
    assert len({*taken}) == len(taken)
    assert first <= min(taken)
    assert max(taken) <= last


def test_runs_spread_over_the_ports() -> None:
    found = {members(cluster=f"run-{number}").ports(0)[0] for number in range(200)}
    assert len(found) > 30


def test_a_port_in_the_endpoint_is_the_only_one() -> None:
    found = members("a:7000,b,[fd00::1]:7002")
    assert (found.ports(0), found.ports(2)) == ([7000], [7002])
    assert found.ports(1) == members().ports(0)
    assert found.dialled.hosts[:3] == (("a", 7000), ("b", found.ports(1)[0]), ("fd00::1", 7002))


def test_clients_dial_the_likeliest_places_first() -> None:
    found = members()
    ports = found.ports(0)
    hosts = ("node1", "node2", "node3")
    assert found.dialled.hosts == tuple((host, port) for port in ports for host in hosts)


# Names.


@pytest.mark.parametrize("run", ["job", "a b", "50%", "50%25", "ä/ö", "a@b", "@", "a@", "名前"])
def test_a_name_is_of_its_own_cluster_only(run: str) -> None:
    own = members("node1,[fd00::2],node3:7000", cluster=run)
    others = ["job", "a b", "50%", "50%25", "ä/ö", "a@b", "@", "a@", "名前", "jo", "job1", "a"]
    names = [own.name(host) for host in range(3)]
    assert len({*names}) == 3
    for name in names:
        assert own.is_of(name)
        assert name.isascii()
        # NATS takes no spaces.
        assert " " not in name
        for other in others:
            assert members(cluster=other).is_of(name) == (other == run)


def test_a_name_has_the_port_that_the_endpoint_says() -> None:
    found = members("a:7000,a:7002,b", cluster="job")
    assert [found.name(host) for host in range(3)] == ["job@a:7000", "job@a:7002", "job@b"]


# The secret.


def test_each_cluster_has_a_password_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hush\nanother line\n")
    own = Options(cluster="job", secret="hush").password()
    assert own is not None
    assert own == Options(cluster="job", secret_file=str(file)).password()
    # It is in URLs of routes.
    assert own.isalnum()
    assert "hush" not in own
    others = {
        Options(cluster=cluster, secret=secret).password()
        for cluster, secret in [("job", "hush!"), ("job2", "hush"), ("jo", "bhush")]
    }
    assert len({own, *others}) == 4
    assert Options(cluster="job").password() is None


def test_a_secret_is_given_once_and_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="are both set: leave one of them out"):
        Options(secret="hush", secret_file="file")
    with pytest.raises(UnreadableFileError):
        Options(cluster="job", secret_file=str(tmp_path / "none")).password()
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
    own, unknown = member.own_place(found, local_addr)
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
        assert place("node1,Node2,node3") == ("Node2", "10.0.0.1")
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


# What the members answer.


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (nats.errors.AuthorizationError(), "give all nodes and commands the same secret"),
        (APIError(code=404, err_code=10059), "lost its data; the nodes that live write it again"),
        (APIError(code=503, err_code=10076), "the log of that member says why, which its agent"),
        (APIError(code=503, err_code=10023), "is full: "),
        (APIError(code=503, err_code=10008), "a majority of its members must run, which the agent"),
        (APIError(code=400, err_code=10003), "refused a request: "),
        (OtherClusterError("has no member of 'job' on its ports: '' is there"), "has no member of"),
        (SilentBucketError(), "has a server on its ports that no agent has started"),
        (UnfitServerError("requires TLS; write tls://"), "that no agent has started"),
        (nats.errors.ConnectionClosedError(), "a majority of its members must run"),
        (ConnectionRefusedError(), "a majority of its members must run"),
    ],
    ids=lambda it: it if isinstance(it, str) else type(it).__name__,
)
def test_an_error_is_told_in_the_words_of_members(error: Exception, says: str) -> None:
    """None of a bucket, an account or permissions, of which its users know nothing."""
    client = Client.__new__(Client)
    client._members, client.timeout = members(), 3.0
    client._transport = Transport(client._members.dialled, Login(), 3.0, None, client._vet)
    problem = client._problem(error)
    assert problem is not None
    assert says in problem.text
    for word in ("bucket", "account", "permissions", "nats ", "tls"):
        assert word not in problem.text


# Folders of members.


def test_a_folder_that_was_left_goes_and_those_of_living_members_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, held, young = (tmp_path / f"rdzv-quorum-{it}" for it in ("left", "held", "young"))
    another = tmp_path / "another"
    for folder in (left, held, another):
        (folder / "member").mkdir(parents=True)
        os.utime(folder, times=(0, 0))
    young.mkdir()
    (tmp_path / "rdzv-quorum-link").symlink_to(another)
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    member.delete_left_folders()
    assert {it for it in (left, held, young, another) if it.exists()} == {held, young, another}
    os.close(lock)
    member.delete_left_folders()
    assert not held.exists()
