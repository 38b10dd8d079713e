"""Agents on several hosts, which are network namespaces, and the addresses that they give.

Run as a program, in namespaces of its own (see `test_addresses`): it plays one scenario, and prints
what it saw as JSON.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.protocol.documents import STATE_KEY, Phase, RoundDocument
from rdzv_plugins.settings.endpoint import parse_endpoint
from rdzv_plugins.stores import open_client
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.proxy import Proxy
from tests import servers
from tests.fleet.agents import World
from tests.integration import forked
from tests.integration.forked import ForkedFleet
from tests.integration.hosts import PROGRAM, Host, Network
from tests.integration.jobs import WORKER
from tests.integration.stores import KINDS, running
from tests.servers.process import find_file

INTERVAL, ATTEMPTS = 0.5, 4
PATIENCE = 60.0

# Of the store, at any address.
PORT = 6000

GLOO = {"GLOO_SOCKET_IFNAME": "eth2"}

NAMED = "127.0.0.1 localhost\n::1 localhost\n10.1.0.{number} {name}\n"


class Job(ForkedFleet):
    """A fleet whose agents run on hosts."""

    def __init__(
        self,
        folder: Path,
        backend: str,
        endpoint: str,
        *,
        nodes: str = "2",
        environ: dict[str, str] | None = None,
        trains: bool = False,
        **config: object,
    ) -> None:
        super().__init__(
            folder,
            backend=backend,
            endpoint=endpoint,
            run_id=folder.name,
            nodes=nodes,
            config={
                "keep_alive_interval": INTERVAL,
                "keep_alive_max_attempt": ATTEMPTS,
                "last_call_timeout": 0.5,
                "join_timeout": 60,
                **config,
            },
            environ=environ or {},
            max_restarts=3,
            script=("--module", "tests.fleet.train") if trains else [str(WORKER)],
        )

    def start_on(self, hosts: Sequence[Host], **config: object) -> None:
        for host in hosts:
            self.start(host.name, None, config, within=host.within)

    def await_begun(self, size: int, after: float = 0.0) -> World:
        """Wait until the workers of so many agents have begun in one world, since then."""

        def found() -> World | None:
            self.read_events()
            whole = (it for it in self._worlds.values() if len(it.began) == it.size == size)
            return next((it for it in whole if min(it.began.values()) > after), None)

        return self.await_that(found, f"a world of {size}", PATIENCE)

    def await_phase(self, phase: Phase) -> None:
        """Wait until the run's round, of a quorum, is in this phase."""
        hosts = ",".join(f"10.1.0.{ord(name) - ord('a') + 1}" for name in self.endpoint.split(","))
        options = {"cluster": self.run_id}
        with closing(
            open_client("quorum", hosts, self.run_id, options, request_timeout=PATIENCE)
        ) as client:

            def found() -> bool:
                entry = client.get(STATE_KEY)
                return entry is not None and RoundDocument.decode(entry.value).phase is phase

            self.await_that(found, f"a round that is {phase}", PATIENCE)

    def logs(self) -> dict[str, list[str]]:
        return {name: self.lines([name]) for name in self.agents}

    def finish(self) -> None:
        """Let all workers end by themselves, with success."""
        for name in self.agents:
            self.let_end(name)

    def ends(self, timeout: float = PATIENCE) -> list[int]:
        """The exit statuses of all agents, once they have ended."""
        return [agent.process.wait(timeout) for agent in self.agents.values()]


def check(host: Host, backend: str, endpoint: str, *arguments: str) -> list[str]:
    """The lines of ``rdzv check`` on a host."""
    command = [sys.executable, "-m", "rdzv_plugins.cli", "check", "-b", backend, "-e", endpoint]
    return forked.run([*host.within, *command, *arguments]).stdout.splitlines()


class Scene:
    """What a scenario needs, and what is closed after it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.enter, self.callback = stack.enter_context, stack.callback
        self.folder = folder

    def network(self, *names: str, **options: Any) -> list[Host]:
        return self.enter(Network(names, **options)).hosts

    def server(self) -> tuple[str, int]:
        """The address of a Redis on the program's own host."""
        return parse_endpoint(
            self.enter(servers.start("redis")).endpoint, default_port=0, schemes=["redis"]
        ).hosts[0]

    def agent_of_consul(self, host: Host | None) -> None:
        """Start a client on a host; a server on the program's own. It ends with its namespace."""
        binary = find_file("consul", ["consul", "usr/bin/consul"])
        if binary is None:
            raise servers.NotInstalledError("consul is not installed")
        folder = self.folder / f"consul-{host.name if host else 'server'}"
        at = f"10.1.0.{host.number if host else PROGRAM}"
        command = [str(binary), "agent", f"-node={folder.name}", f"-bind={at}"]
        command += [f"-data-dir={folder}", "-log-level=warn"]
        command += [f"-retry-join=10.1.0.{PROGRAM}"] if host else ["-server", "-bootstrap-expect=1"]
        within = host.within if host else []
        agent = subprocess.Popen([*within, *command], stdout=subprocess.DEVNULL)
        self.callback(agent.wait)
        self.callback(agent.kill)
        ask = [*within, str(binary), "kv", "put", "is-ready", "yes"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if not until(lambda: subprocess.run(ask, **quiet).returncode == 0, PATIENCE):  # type: ignore[call-overload]
            raise TimeoutError(f"Consul's agent at {at} does not serve")

    def job(self, backend: str, endpoint: str, name: str = "job", **options: Any) -> Job:
        job = Job(self.folder / name, backend, endpoint, **options)
        self.enter(job)
        return job


def at_loopback(scene: Scene, name: str, handler: str = "rdzv") -> dict[str, Any]:
    """The store is reached at each host's own loopback, and the host's name is 127.0.1.1."""
    hosts = scene.network("a", "b")
    (kind,) = (it for it in KINDS if it.name == name)
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
    # Of five, a round of four waits for the fifth until the last call ends.
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


def main(scenario: str, *arguments: str) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        seen = SCENARIOS[scenario](Scene(stack, folder), *arguments)
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
