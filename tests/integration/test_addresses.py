"""Addresses of nodes on several hosts, which are network namespaces, with real torchrun agents."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest

from rdzv_plugins.torch.master_store import TAKES_SOCKETS
from tests import Measure
from tests.integration import hosts
from tests.integration.stores import KINDS, absent

pytestmark = pytest.mark.timeout(240)

soak = pytest.mark.soak


def play(scenario: str, *arguments: str) -> Any:
    if shutil.which("ip") is None:
        absent("ip is not installed")
    return hosts.play("tests.integration.addressed", scenario, *arguments, seconds=200)


def only(lines: list[str], *words: str) -> str:
    """The only line that has all these words."""
    found = [line for line in lines if all(word in line for word in words)]
    assert len(found) == 1, lines
    return found[0]


@pytest.mark.parametrize(
    "scenario",
    [
        "agents_of_consul",
        # A proxy, a tunnel, a sidecar; of quorum, each host would be the member there itself.
        *(
            pytest.param(f"at_loopback {it.name}", marks=soak)
            for it in KINDS
            if it.name != "quorum"
        ),
        pytest.param("at_loopback redis torch", marks=soak),
    ],
)
def test_a_store_at_each_hosts_loopback(scenario: str) -> None:
    seen = play(*scenario.split())
    assert seen["master"].startswith("10.1.0.1:")
    assert seen["statuses"] == [0, 0]
    address = only(seen["checked"], "address: ")
    assert "other nodes dial '10.1.0.1' (the first one, for the store is at loopback" in address
    assert "this host has 10.1.0.1 (eth1), 127.0.0.1 (lo)" in address
    mark = "ok  " if "consul" in scenario else "warning "
    assert only(seen["checked"], "store's host: it is at loopback").startswith(mark)


@soak
@pytest.mark.parametrize(
    ("how", "phase"),
    [
        ("parted", "running"),
        # For good, or replaced at once.
        ("gone", "running"),
        ("gone", "ending"),
        *(("lost", phase) for phase in ("store", "last call", "confirming", "running")),
    ],
)
@pytest.mark.parametrize("name", [*"abc"])
def test_a_host_of_three_that_run_the_store_is_gone_and_comes_back(
    name: str, how: str, phase: str, record_property: Measure
) -> None:
    """No one tells the others: their connections to it stay open."""
    seen = play("parted", name, how, phase)
    for what, seconds in seen.items():
        if what.endswith(", s"):
            record_property(what, round(seconds, 2))
    assert seen.get("others") in (None, [it for it in "abc" if it != name])
    assert [it for it in seen["statuses"] if it != 0] == ([-9] if how == "gone" else [])
    # Where they knew nothing of it, they would stay for a node that is gone: 30 s.
    assert seen["ended, s"] < 20


@soak
def test_hosts_at_ipv6_run_the_store() -> None:
    seen = play("at_ipv6")
    assert re.fullmatch(r"\[?fd00::[123]\]?:\d+", seen["master"])
    assert seen["statuses"] == [0, 0, 0]
    only(seen["logs"]["b"], "this host runs a member of the store, at [fd00::2]:31000;")
    only(seen["checked"], "ok", "rights: ")


@pytest.mark.parametrize(
    ("endpoint", "interface"),
    [
        ("a,b,c", ""),
        *(pytest.param(*it, marks=soak) for it in [("c", ""), ("c", "eth2"), ("a,b,c", "eth2")]),
    ],
)
def test_hosts_whose_own_names_are_at_loopback_run_the_store(endpoint: str, interface: str) -> None:
    seen = play("members", endpoint, interface)
    network = "10.2.0" if interface else "10.1.0"
    # Of the first agent, which is at a, b or c.
    assert re.fullmatch(rf"{network}\.[123]:\d+", seen["master"])
    assert seen["statuses"] == [0, 0, 0]
    for name, lines in seen["before"].items():
        assert not [line for line in lines if "store's host" in line]
        other = "c" if endpoint == "c" else "ab"[name == "a"]
        if name != other:
            why = "interface=eth2" if interface else "from it this host reaches the store"
            says = f"address: other nodes dial '{network}.{'abc'.index(name) + 1}' ({why}; this "
            assert says in only(lines, "address: ")
            assert only(lines, f"member: '{other}' runs none yet").startswith("unknown")
        assert only(lines, "store: not tried: 0 of ").startswith("unknown")
        only(lines, "verdict: a job works")
    only(seen["while it runs"], "ok", "rights: ")
    for name, lines in seen["logs"].items():
        assert not [line for line in lines if "at loopback" in line and "gloo" not in line]
        if name in endpoint:
            at = f"this host runs a member of the store, at {network}.{'abc'.index(name) + 1}:"
            only(lines, at)


def test_the_others_reach_rank_0_where_only_some_hosts_have_ipv6() -> None:
    seen = play("dual_stack")
    assert seen["master"].startswith("10.1.0.2:")
    assert seen["statuses"] == [0, 0]


def test_a_host_serves_the_store_of_the_others() -> None:
    seen = play("served")
    new, given = "".join(seen["new"]), "".join(seen["given"])
    assert "valkey runs at redis://10.1.0.1:6379;" in new
    assert new.count("RDZV_PLUGINS_PASSWORD=") == 1
    # The name that the host has, where it listens at all its addresses; no given password is shown.
    assert "redis runs at redis://a:6380;" in given
    assert "of a file" not in given
    assert "PASSWORD" not in given
    for checked in (seen["checked"], seen["checked given"]):
        only(checked, "verdict: a job works")
    only(seen["wrong"], "verdict: a job will not work")
    assert seen["name"] == (
        "rdzv: 'a' is 127.0.1.1 on this host, where no other host reaches it: give the address by "
        "which the others reach this host\n"
    )
    assert seen["elsewhere"].startswith("rdzv: '10.1.0.2' is not this host: ")
    assert seen["unknown"].startswith("rdzv: the host 'no-such-host' is not known here (")
    assert seen["kind"].startswith("rdzv: rdzv serve starts valkey or redis, and with -e ")


def test_two_stores_each_at_its_hosts_loopback() -> None:
    seen = play("own_stores")
    assert seen["statuses"] == [1, 1]
    for name in "ab":
        error = only(seen["logs"][name], "handler", "1 of 2 nodes came within")
        assert "1 of 2 is here; the store is at loopback, so that other hosts have another" in error
    line = only(seen["checked"], "store's host: ")
    assert line.startswith("warning")
    assert "nodes on other hosts have another store there, and wait in vain" in line


def test_a_name_that_only_its_own_host_resolves_is_not_announced() -> None:
    seen = play("own_names", "none")
    assert seen["master"].startswith("10.1.0.1:")
    assert seen["statuses"] == [0, 0]
    assert "other nodes dial '10.1.0.1'" in only(seen["checked"], "address: ")


def test_a_name_that_others_cannot_resolve_is_told() -> None:
    seen = play("own_names", "name")
    assert seen["master"].startswith("a.internal:")
    assert f"this host cannot resolve MASTER {seen['master']} (" in seen["told"]
    line = only(seen["checked"], "other nodes dial 'a.internal'")
    assert line.endswith("; each of them must resolve that name")


def test_the_network_that_the_nodes_share_is_chosen() -> None:
    seen = play("out_of_reach")
    assert "this host cannot dial MASTER 10.1.0.1:" in seen["told"]
    assert "interface=, network= or --local-addr" in seen["told"]
    assert seen["master"].startswith("10.2.0.1:")
    line = only(seen["checked"], "address: ")
    assert (
        "other nodes dial '10.2.0.1' (network=10.2.0.0/16; this host has 10.1.0.1 (eth1), " in line
    )


def test_what_gloo_would_listen_at_is_told() -> None:
    seen = play("gloos_choice")
    for name in "ab":
        says = f"the name of this host, '{name}', stands for 127.0.1.1, where gloo's workers on"
        assert says in seen["told"][name]
        assert seen["told"][name].endswith("set GLOO_SOCKET_IFNAME=eth1")
    line = only(seen["checked"], "gloo: ")
    assert line.startswith("warning")
    assert line.endswith("set GLOO_SOCKET_IFNAME=eth1")


def test_a_master_at_loopback_of_another_host_is_told() -> None:
    seen = play("at_loopback_only")
    assert seen["master"].startswith("127.0.0.1:")
    says = f"MASTER {seen['master']} is at loopback, and not on this host ("
    assert says in seen["told"]


def test_ports_of_master() -> None:
    seen = play("ports")
    # The first was taken, the last is for links, and no round has the port of the one before.
    assert sorted(seen["masters"]) == ["10.1.0.1:30001", "10.1.0.1:30002"]
    # The host has 10.2.0.1 as well, where a TCPStore of an older torch listens, too.
    assert seen["reached"] == (["10.1.0.1"] if TAKES_SOCKETS else ["10.1.0.1", "10.2.0.1"])
    assert seen["statuses"] == [1]
    says = "no port of master_port=30000-30003 is free at '10.1.0.1'"
    assert [line for line in seen["full"] if says in line] != []
    assert only(seen["checked"], "address: ").startswith(f"failed   address: {says}")


def test_links_pass_a_firewall_that_lets_master_port_pass(record_property: Measure) -> None:
    seen = play("firewalled")
    record_property("found, s", round(seen["found, s"], 2))
    # Its lease is a minute.
    assert "its process is gone, as a[" in seen["why"]
