"""Hosts as network namespaces: each with its own loopback, name, /etc/hosts and addresses.

A program makes them in namespaces of its own (see `in_namespaces`), with which they end. A `Scene`
has such hosts, servers, and jobs whose agents run on the hosts.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rdzv_plugins.protocol.documents import STATE_KEY, Phase, RoundDocument
from rdzv_plugins.settings.endpoint import parse_endpoint
from rdzv_plugins.stores import open_client
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.proxy import Proxy
from tests import servers
from tests.fleet.agents import World
from tests.integration import forked
from tests.integration.forked import Forked, ForkedFleet, is_forkable
from tests.integration.jobs import TRAINS_WITH_TORCH, WORKER
from tests.integration.stores import absent
from tests.servers.process import find_file

__all__ = [
    "ATTEMPTS",
    "DEBIAN",
    "INTERVAL",
    "PATIENCE",
    "PORT",
    "PROGRAM",
    "Host",
    "HostsJob",
    "Network",
    "Scene",
    "as_pid_1",
    "bring_up_loopback",
    "check",
    "in_namespaces",
    "ip",
    "play",
    "play_on_hosts",
]

INTERVAL, ATTEMPTS = 0.5, 4
PATIENCE = 60.0

# The port of the store, at any address.
PORT = 6000

PROGRAM = 254
"""In what the address of the program ends, in each network."""

_CLONE_NEWNET = 0x40000000
_LONGEST_SECONDS = 300.0

DEBIAN = "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {name}\n"
"""Debian's /etc/hosts: the host's own name is at loopback."""


@dataclass(frozen=True)
class Host:
    """A network namespace with a name.

    Attributes:
        number: its address in each network ends in it.
    """

    name: str
    number: int
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def within(self) -> list[str]:
        """The command in front of one that is to run on this host."""
        # Without --wd it would begin in the root directory.
        where = [f"--target={self.process.pid}", f"--wd={Path.cwd()}"]
        return ["nsenter", *where, "--net", "--uts", "--mount", "--"]

    def run(self, *command: str) -> str:
        """Its output. Raises `CalledProcessError`."""
        done = subprocess.run([*self.within, *command], check=True, stdout=subprocess.PIPE)
        return done.stdout.decode()

    def cut(self, network: int = 1) -> None:
        """Part it from the others, as a cable that is pulled out: nobody is told."""
        ip(f"link set v{network}h{self.number} down")

    def mend(self, network: int = 1) -> None:
        """End what `cut` began."""
        ip(f"link set v{network}h{self.number} up")

    def drop_between(self, ports: str) -> None:
        """Drop what comes from one of these ports to another, without a word."""
        between = f"iif eth1 ipproto tcp sport {ports} dport {ports} blackhole"
        # Before the route to this host itself, which is the first.
        for rule in (f"add pref 1 {between}", "add pref 2 lookup local", "del pref 0"):
            self.run("ip", "rule", *rule.split())

    def new_socket(self) -> socket.socket:
        """One of this host's."""
        made: list[socket.socket] = []

        def make() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            number = os.open(f"/proc/{self.process.pid}/ns/net", os.O_RDONLY)
            # It moves this thread alone.
            if libc.setns(number, _CLONE_NEWNET) == 0:
                made.append(socket.socket())
            os.close(number)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]

    def reaches(self, target: tuple[str, int]) -> bool:
        """Whether somebody listens there, as seen from this host."""
        with self.new_socket() as line:
            line.settimeout(2)
            return line.connect_ex(target) == 0

    def forward(self, target: tuple[str, int], port: int = 0) -> Proxy:
        """A proxy at this host's loopback for a server of the program's own host."""
        return Proxy(target, ("127.0.0.1", port), self.new_socket)


class Network:
    """Hosts, a switch between those of each network, and the program's own host.

    A context manager. In the network ``10.N.0.0/24`` host n has the address ``10.N.0.n`` on the
    interface ``ethN``, and the program 10.N.0.254. Where ``apart`` has N, hosts reach the program
    alone. After ``seconds`` they end, should the program have ended without it.
    """

    def __init__(
        self,
        names: Sequence[str],
        networks: Sequence[int] = (1,),
        apart: Sequence[int] = (),
        hosts_file: str = DEBIAN,
        seconds: float = _LONGEST_SECONDS,
    ) -> None:
        bring_up_loopback()
        for network in networks:
            # Else its address is the lowest of what is plugged in, and changes with that.
            ip(f"link add br{network} address 02:00:00:00:{network:02}:fe type bridge")
            ip(f"addr add 10.{network}.0.{PROGRAM}/24 dev br{network}")
            ip(f"link set br{network} up")
        self.hosts: list[Host] = []
        for number, name in enumerate(names, start=1):
            host = Host(name, number, _new_namespaces(seconds))
            self.hosts.append(host)
            host.run("hostname", name)
            file = Path(tempfile.mkdtemp()) / "hosts"
            file.write_text(hosts_file.format(name=name, number=number))
            host.run("mount", "--bind", str(file), "/etc/hosts")
            host.run("ip", "link", "set", "lo", "up")
            for network in networks:
                end, inside = f"v{network}h{number}", f"eth{network}"
                pid = host.process.pid
                ip(f"link add {end} type veth peer name {inside} netns {pid}")
                ip(f"link set {end} master br{network} up")
                if network in apart:
                    ip(f"link set {end} type bridge_slave isolated on")
                address = f"10.{network}.0.{number}/24"
                host.run("ip", "addr", "add", address, "dev", inside)
                host.run("ip", "link", "set", inside, "up")

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            host.process.kill()
            host.process.wait()


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def _new_namespaces(seconds: float) -> subprocess.Popen[bytes]:
    """A process in namespaces of its own, which last as long as it does."""
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c"]
    command += [f"echo; exec sleep {seconds:g}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


def in_namespaces(module: str, *arguments: str) -> list[str]:
    """The command that runs a module in a mount and a network namespace; skips where it may not."""
    return [*_unshare("--mount", "--net"), sys.executable, "-m", module, *arguments]


def play(module: str, *arguments: str, seconds: float = 120) -> Any:
    """Run a module in a mount and a network namespace; it prints what it saw as JSON."""
    command = in_namespaces(module, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process: Forked | subprocess.Popen[bytes]
        if is_forkable(command, os.environ):
            process = Forked(command, os.environ, log)
        else:
            with log.open("w") as file:
                process = subprocess.Popen(command, stdout=file)
        try:
            status = process.wait(seconds)
        finally:
            process.send_signal(signal.SIGKILL)
        shown = log.read_text()
    assert status == 0, shown
    # C++ may have written a line after it.
    return json.loads(next(it for it in reversed(shown.splitlines()) if it.startswith("{")))


def play_on_hosts(module: str, *arguments: str) -> Any:
    """The same of one that makes hosts; skips where it cannot."""
    if shutil.which("ip") is None:
        absent("ip is not installed")
    return play(module, *arguments, seconds=200)


def as_pid_1(*command: str) -> list[str]:
    """The command that runs this one as PID 1, as a container does; skips where it may not."""
    return [*_unshare("--pid", "--fork", "--kill-child", "--mount-proc"), *command]


def _unshare(*namespaces: str) -> list[str]:
    unshare = ["unshare", *namespaces]
    if os.geteuid() != 0:
        unshare.insert(1, "--map-root-user")
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        absent(f"no namespaces of our own: {error}")
    return unshare


def bring_up_loopback() -> None:
    """The loopback of a new network namespace is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        up = struct.pack("16sH14x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(line, _SIOCSIFFLAGS, up)


class HostsJob(ForkedFleet):
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
            script=TRAINS_WITH_TORCH if trains else [str(WORKER)],
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

    def job(self, backend: str, endpoint: str, name: str = "job", **options: Any) -> HostsJob:
        job = HostsJob(self.folder / name, backend, endpoint, **options)
        self.enter(job)
        return job
