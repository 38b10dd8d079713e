"""Addresses of nodes on several hosts, which are network namespaces, with real torchrun agents.

Run as a program, in namespaces of its own, it plays one scenario, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.protocol.documents import Phase
from rdzv_plugins.testing.proxy import Proxy
from rdzv_plugins.torch.master_store import TAKES_SOCKETS
from tests import Measure
from tests.integration.hosts import PATIENCE, PORT, PROGRAM, Host, Scene, check, play_on_hosts
from tests.integration.stores import KINDS, kind_of, running

soak = pytest.mark.soak

GLOO = {"GLOO_SOCKET_IFNAME": "eth2"}

NAMED = "127.0.0.1 localhost\n::1 localhost\n10.1.0.{number} {name}\n"


def at_loopback(scene: Scene, name: str, handler: str = "rdzv") -> dict[str, Any]:
    """The store is reached at each host's own loopback, and the host's name is 127.0.1.1."""
    hosts = scene.network("a", "b")
    kind = kind_of(name)
    store = scene.enter(running(kind))
    for host in hosts:
        scene.enter(host.forward(store.address, PORT))
    endpoint = store.endpoint_at(("127.0.0.1", PORT))
    return _trains(scene, hosts, kind.backend, endpoint, handler=handler, **store.config)


def agents_of_consul(scene: Scene) -> dict[str, Any]:
    """Each host has an agent of the servers of Consul."""
    hosts = scene.network("a", "b")
    for host in [None, *hosts]:
        scene.agent_of_consul(host)
    return _trains(scene, hosts, "consul", "http://127.0.0.1:8500")


def _trains(
    scene: Scene, hosts: list[Host], backend: str, endpoint: str, **config: str
) -> dict[str, Any]:
    environ = {"GLOO_SOCKET_IFNAME": "eth1"}
    job = scene.job(backend, endpoint, trains=True, environ=environ, **config)
    job.start_on(hosts)
    world = job.await_world("ab", timeout=PATIENCE)
    job.await_step(world, 5)
    job.stop_training()
    conf = ",".join(f"{name}={value}" for name, value in config.items())
    return {
        "master": world.master,
        "statuses": job.ends(),
        "checked": check(hosts[0], backend, endpoint, "--nnodes", "2", "--rdzv-conf", conf),
    }


def members(scene: Scene, endpoint: str, interface: str = "") -> dict[str, Any]:
    """The hosts of the endpoint run the store; each one's own name is at loopback there.

    With an interface, such as "eth2", they know each other by the addresses of the second network.
    """
    hosts = scene.network("a", "b", "c", networks=(1, 2) if interface else (1,))
    known = 2 if interface else 1
    for host in hosts:
        others = "".join(f"10.{known}.0.{it.number} {it.name}\n" for it in hosts if it is not host)
        host.run("sh", "-c", 'printf %s "$1" >> /etc/hosts', "sh", others)
    options = {"interface": interface} if interface else {}
    conf = ",".join(f"{name}={value}" for name, value in options.items())
    named = ("--nnodes", str(len(hosts)), "-i", "job", "--rdzv-conf", conf)
    before = {host.name: check(host, "quorum", endpoint, *named) for host in hosts}
    job = scene.job("quorum", endpoint, nodes="3", **options)
    job.start_on(hosts)
    world = job.await_begun(3)
    while_it_runs = check(hosts[1], "quorum", endpoint, *named)
    job.finish()
    return {
        "master": world.master,
        "statuses": job.ends(),
        "before": before,
        "while it runs": while_it_runs,
        "logs": job.logs(),
    }


def parted(scene: Scene, name: str, how: str, phase: str = "running") -> dict[str, Any]:
    """Three hosts run the store; in this phase of a round one is parted from the others, loses its
    power or stays away."""
    known = "127.0.0.1 localhost\n" + "".join(
        f"10.1.0.{n} {it}\n" for n, it in enumerate("abcd", 1)
    )
    hosts = scene.network("a", "b", "c", "d", hosts_file=known)
    (host,) = (it for it in hosts if it.name == name)
    # With room for five, a round of four waits for the fifth until the last call ends.
    nodes = "2:5" if phase == "last call" else "2:4"
    job = scene.job("quorum", "a,b,c", nodes=nodes, keep_alive_interval=1, last_call_timeout=3)
    *three, newcomer = hosts
    job.start_on(three)
    if phase == "store":
        job.await_line(name, "this host runs a member of the store")
    else:
        job.await_begun(3)
    if phase in ("last call", "confirming"):
        job.start_on([newcomer])
        job.await_phase(Phase.FORMING)
    if phase == "confirming":
        # It is in the round, and does not confirm it.
        job.agents["d"].signal(signal.SIGSTOP)
        job.await_phase(Phase.CONFIRMING)
    if phase == "ending":
        job.finish()
    at = time.monotonic()
    host.cut()
    if how != "parted":
        # The member ends with its agent.
        job.agents[name].kill()
    seen: dict[str, Any] = {}
    if how != "lost" and phase != "ending":
        others = job.await_begun(2, at)
        seen["others"] = sorted(others.nodes.values())
        seen["went on, s"] = max(others.began.values()) - at
    if how != "gone":
        at = time.monotonic()
        host.mend()
        if how == "lost":
            job.start_on([host])
        if phase == "confirming":
            job.agents["d"].signal(signal.SIGCONT)
        seen["whole again, s"] = max(job.await_begun(len(job.agents), at).began.values()) - at
    job.finish()
    at = time.monotonic()
    return {**seen, "statuses": job.ends(), "ended, s": time.monotonic() - at}


def at_ipv6(scene: Scene) -> dict[str, Any]:
    """Hosts that the endpoint names by IPv6 addresses run the store; one has a port."""
    hosts = scene.network("a", "b", "c")
    for host in hosts:
        host.run("ip", "addr", "add", f"fd00::{host.number}/64", "dev", "eth1", "nodad")
    endpoint = "[fd00::1],[fd00::2]:31000,[fd00::3]"
    job = scene.job("quorum", endpoint, nodes="3")
    job.start_on(hosts)
    world = job.await_begun(3)
    checked = check(hosts[2], "quorum", endpoint, "--nnodes", "3", "-i", "job")
    job.finish()
    return {
        "master": world.master, "statuses": job.ends(), "logs": job.logs(), "checked": checked
    }  # fmt: skip


def dual_stack(scene: Scene) -> dict[str, Any]:
    """The first host in rank order reaches the store by IPv6, which the other one has not."""
    hosts = scene.network("a", "b")
    server, program = scene.server(), "2a00::254"
    subprocess.run(["ip", "addr", "add", f"{program}/64", "dev", "br1", "nodad"], check=True)
    hosts[0].run("ip", "addr", "add", "2a00::1/64", "dev", "eth1", "nodad")
    scene.enter(Proxy(server, (f"10.1.0.{PROGRAM}", PORT)))
    scene.enter(Proxy(server, (program, PORT), partial(socket.socket, socket.AF_INET6)))
    for host in hosts:
        host.run("sh", "-c", f"echo {program} store >> /etc/hosts")
        host.run("sh", "-c", f"echo 10.1.0.{PROGRAM} store >> /etc/hosts")
    job = scene.job("redis", f"store:{PORT}")
    job.start_on(hosts)
    master = job.await_begun(2).master
    job.finish()
    return {"master": master, "statuses": job.ends()}


def served(scene: Scene) -> dict[str, Any]:
    """A host serves the store of the others; its own name is at loopback, as Debian has it."""
    first, other = scene.network("a", "b")
    serve = [*first.within, sys.executable, "-u", "-m", "rdzv_plugins.cli", "serve"]

    def begin(*arguments: str) -> list[str]:
        """The lines that it shows, up to that with the command for a job."""
        serving = subprocess.Popen([*serve, *arguments], stdout=subprocess.PIPE, text=True)
        scene.callback(serving.wait)
        scene.callback(serving.kill)
        assert serving.stdout is not None
        lines: list[str] = []
        while not lines or "rdzv run" not in lines[-1]:
            lines.append(serving.stdout.readline())
            assert lines[-1], lines
        return lines

    def refused(*arguments: str) -> str:
        return subprocess.run(
            [*serve, *arguments], stderr=subprocess.PIPE, text=True, timeout=PATIENCE
        ).stderr

    def checked(endpoint: str, password: str) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RDZV_PLUGINS_PASSWORD", password)
            return check(other, "redis", endpoint)

    new = begin("--host", "10.1.0.1", "--port", "6379")
    (password,) = (re.findall(r"PASSWORD=(\S+)", line)[0] for line in new if "PASSWORD" in line)
    file = scene.folder / "password"
    file.write_text("of a file\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RDZV_PLUGINS_PASSWORD_FILE", str(file))
        given = begin("redis", "--host", "0.0.0.0", "--port", "6380")
    return {
        "new": new, "given": given,
        "checked": checked("redis://10.1.0.1:6379", password),
        "wrong": checked("redis://10.1.0.1:6379", "wrong"),
        "checked given": checked("redis://10.1.0.1:6380", "of a file"),
        "name": refused("--host", "a"),
        "elsewhere": refused("--host", "10.1.0.2"),
        "unknown": refused("--host", "no-such-host"),
        "kind": refused("etcd", "--host", "10.1.0.1"),
    }  # fmt: skip


def own_stores(scene: Scene) -> dict[str, Any]:
    """Each host has a store of its own at its loopback."""
    hosts = scene.network("a", "b")
    for host in hosts:
        scene.enter(host.forward(scene.server(), PORT))
    job = scene.job("redis", f"127.0.0.1:{PORT}", join_timeout=3)
    job.start_on(hosts)
    return {
        "statuses": job.ends(),
        "logs": job.logs(),
        "checked": check(hosts[0], "redis", f"127.0.0.1:{PORT}", "--nnodes", "2"),
    }


def own_names(scene: Scene, local_addr: str) -> dict[str, Any]:
    """Each host alone resolves its own dotted name; rank 0 may be told to announce it."""
    hosts = scene.network("a.internal", "b.internal", hosts_file=NAMED)
    store = scene.enter(Proxy(scene.server(), (f"10.1.0.{PROGRAM}", PORT)))
    job = scene.job("redis", "{}:{}".format(*store.address))
    for host in hosts:
        named = host.name if local_addr == "name" else None
        job.start(host.name, named, within=host.within)
    world = job.await_begun(2)
    told = job.await_line("b.internal", "cannot resolve MASTER") if local_addr == "name" else ""
    job.finish()
    arguments = ("--local-addr", "a.internal") if local_addr == "name" else ()
    return {
        "master": world.master,
        "told": told,
        "statuses": job.ends(),
        "checked": check(hosts[0], "redis", job.endpoint, *arguments, "--nnodes", "2"),
    }


def out_of_reach(scene: Scene) -> dict[str, Any]:
    """The hosts do not reach each other over the network in which the store is."""
    hosts = scene.network("a", "b", networks=(1, 2), apart=(1,))
    store = scene.enter(Proxy(scene.server(), (f"10.1.0.{PROGRAM}", PORT)))
    endpoint = "{}:{}".format(*store.address)
    lost = scene.job("redis", endpoint, "lost")
    lost.start_on(hosts)
    lost.await_begun(2)
    told = lost.await_line("b", "cannot dial MASTER")
    lost.finish()
    lost.ends()
    job = scene.job("redis", endpoint, trains=True, environ=GLOO, network="10.2.0.0/16")
    job.start_on(hosts)
    world = job.await_world("ab", timeout=PATIENCE)
    job.stop_training()
    job.ends()
    conf = "network=10.2.0.0/16"
    return {
        "told": told,
        "master": world.master,
        "checked": check(hosts[0], "redis", endpoint, "--rdzv-conf", conf, "--nnodes", "2"),
    }


def gloos_choice(scene: Scene) -> dict[str, Any]:
    """gloo would listen at loopback, since the host's name is there; then as the line says."""
    hosts = scene.network("a", "b")
    store = scene.enter(Proxy(scene.server(), (f"10.1.0.{PROGRAM}", PORT)))
    endpoint = "{}:{}".format(*store.address)
    job = scene.job("redis", endpoint, environ={"GLOO_SOCKET_IFNAME": ""})
    job.start_on(hosts)
    job.await_begun(2)
    told = {host.name: job.await_line(host.name, "set GLOO_SOCKET_IFNAME=") for host in hosts}
    job.finish()
    job.ends()
    return {"told": told, "checked": check(hosts[0], "redis", endpoint, "--nnodes", "2")}


def at_loopback_only(scene: Scene) -> dict[str, Any]:
    """The nodes of two hosts say that they are at loopback."""
    hosts = scene.network("a", "b")
    store = scene.enter(Proxy(scene.server(), (f"10.1.0.{PROGRAM}", PORT)))
    job = scene.job("redis", "{}:{}".format(*store.address))
    for host in hosts:
        job.start(host.name, f"127.0.0.{host.number}", within=host.within)
    world = job.await_begun(2)
    told = job.await_line("b", "is at loopback, and not on this host")
    job.finish()
    return {"master": world.master, "told": told, "statuses": job.ends()}


def ports(scene: Scene) -> dict[str, Any]:
    """MASTER_PORT is of a range, of which some ports are taken; and where it listens."""
    hosts = scene.network("a", "b", networks=(1, 2))
    store = scene.enter(Proxy(scene.server(), (f"10.1.0.{PROGRAM}", PORT)))
    endpoint, conf = "{}:{}".format(*store.address), "30000-30003"
    taken = scene.enter(hosts[0].new_socket())
    taken.bind(("10.1.0.1", 30000))
    taken.listen()
    job = scene.job("redis", endpoint, nodes="1:2", master_port=conf)
    job.start_on(hosts[:1])
    first = job.await_begun(1)
    port = int(first.master.rpartition(":")[2])
    reached = [f"10.{n}.0.1" for n in (1, 2) if hosts[1].reaches((f"10.{n}.0.1", port))]
    job.start_on(hosts[1:])
    second = job.await_begun(2)
    job.finish()
    job.ends()
    for number in (30001, 30002, 30003):
        more = scene.enter(hosts[0].new_socket())
        # The end that closed a link of the first job is still in TIME_WAIT.
        more.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        more.bind(("10.1.0.1", number))
        more.listen()
    full = scene.job("redis", endpoint, "full", nodes="1", master_port=conf, join_timeout=5)
    full.start_on(hosts[:1])
    arguments = ("--rdzv-conf", f"master_port={conf}", "--nnodes", "1:2")
    return {
        "masters": [first.master, second.master],
        "reached": reached,
        "statuses": full.ends(),
        "full": full.lines("a"),
        "checked": check(hosts[0], "redis", endpoint, *arguments),
    }


def firewalled(scene: Scene) -> dict[str, Any]:
    """A firewall passes nothing from one of the ports that the kernel chooses to another."""
    hosts = scene.network("a", "b")
    store = scene.enter(Proxy(scene.server(), (f"10.1.0.{PROGRAM}", PORT)))
    for host in hosts:
        host.drop_between("32768-60999")
    job = scene.job(
        "redis", "{}:{}".format(*store.address), nodes="1:2", master_port="30000-30010",
        keep_alive_interval=5, keep_alive_max_attempt=12, replacement_timeout=0,
    )  # fmt: skip
    job.start_on(hosts)
    job.await_begun(2)
    killed = time.monotonic()
    job.agents["b"].signal(signal.SIGKILL, workers=True)
    why = job.await_line("a", "lost b[")
    return {"found, s": time.monotonic() - killed, "why": why}


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    it.__name__: it
    for it in (
        at_loopback, agents_of_consul, members, parted, at_ipv6, served, own_stores, own_names,
        out_of_reach, gloos_choice, at_loopback_only, ports, firewalled, dual_stack,
    )
}  # fmt: skip


def play(scenario: str, *arguments: str) -> Any:
    return play_on_hosts("tests.integration.test_addresses", scenario, *arguments)


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
    # The master is at the first agent, which is at a, b or c.
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


def main(scenario: str, *arguments: str) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        seen = SCENARIOS[scenario](Scene(stack, folder), *arguments)
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
