"""Hosts as network namespaces: each with its own loopback, name, /etc/hosts and addresses.

A program makes them in namespaces of its own (see `in_namespaces`), with which they end.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rdzv_plugins.testing.proxy import Proxy
from tests.integration.forked import Forked, is_forkable
from tests.integration.stores import absent

__all__ = [
    "DEBIAN",
    "PROGRAM",
    "Host",
    "Network",
    "as_pid_1",
    "bring_up_loopback",
    "in_namespaces",
    "ip",
    "play",
]

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
            # Of this thread alone.
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
