"""One server process on this host: start, stop, kill and pause it, and never orphan it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

from rdzv_plugins.servers import HOST, NotInstalledError, ServerError, refuse_taken

__all__ = [
    "HOST",
    "Kind",
    "NotInstalledError",
    "Security",
    "ServerError",
    "ServerProcess",
    "find_file",
    "wait_until",
]

# Below Linux's ephemeral range: otherwise a client that retries a stopped server's port could get
# that port as its own, and the server could not start again.
# Below those of a quorum's members too, which a job on this host may need.
_PORTS = range(20000, 29600)


@dataclass(frozen=True, kw_only=True)
class Security:
    """The requirements of a local server on its clients; by default none.

    Attributes:
        user: name of the one user; for Consul it is not used.
        password: that user's password; for Consul the ACL token, a UUID.
        ca_file: PEM file of the authority that signed the certificates.
        cert_file: PEM file of the server's certificate; with it the server accepts TLS only.
        key_file: PEM file of the server's private key.
        client_cert_file: PEM file of a client's certificate; with it clients need one.
        client_key_file: PEM file of that client's private key.
    """

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None

    @property
    def tls(self) -> bool:
        """Whether the server accepts TLS only."""
        return self.cert_file is not None

    def config(self) -> dict[str, str]:
        """The options that ``--rdzv-conf`` needs to connect, without secrets."""
        if not self.tls:
            return {}
        options = {
            "ca_file": self.ca_file,
            "cert_file": self.client_cert_file,
            "key_file": self.client_key_file,
        }
        return {"tls": "true"} | {name: path for name, path in options.items() if path}

    def environ(self) -> dict[str, str]:
        """The variables that a client needs to connect: user and password."""
        values = {"RDZV_PLUGINS_USER": self.user, "RDZV_PLUGINS_PASSWORD": self.password}
        return {name: value for name, value in values.items() if value}

    def context(self) -> ssl.SSLContext | None:
        """For the readiness checks, which do not verify the server's identity."""
        if not self.tls:
            return None
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if self.client_cert_file:
            context.load_cert_chain(self.client_cert_file, self.client_key_file)
        return context


class Kind(ABC):
    """How to run one kind of server: its command, and when it is ready."""

    name: ClassVar[str]
    backend: ClassVar[str]
    """The one of ``--rdzv-backend`` for it; if a class sets none, its name."""
    ports_per_node: ClassVar[int] = 1
    largest: ClassVar[int] = 1
    """The most servers that one ensemble may have."""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    """Stops the server cleanly, even while clients are connected."""
    end_signal: ClassVar[signal.Signals] = signal.SIGKILL
    """Stops the server at once; its data is not needed any more."""
    for_others: ClassVar[bool] = False
    """Whether it can also listen where other hosts reach it."""
    in_memory: ClassVar[bool] = False
    """Keep the data in a file system in memory if there is one: the real server does not have this
    server's disk costs."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "backend" not in vars(cls):
            cls.backend = cls.name

    def __init__(self, security: Security) -> None:
        self.security = security
        # The host of the endpoint, and what the server binds.
        self.host = HOST
        self.addresses = [HOST]

    def listen(self, host: str, addresses: Sequence[str]) -> None:
        """Listen also at these addresses, which clients reach by the name or address ``host``."""
        anywhere = {"0.0.0.0", "::"} & {*addresses}
        self.host = socket.gethostname() if anywhere else host
        # This process comes by 127.0.0.1.
        self.addresses = list(dict.fromkeys([*addresses, "0.0.0.0" if anywhere else HOST]))

    @abstractmethod
    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        """The command line; writes what it refers to into ``node.directory``."""

    @abstractmethod
    def ready(self, node: ServerProcess) -> bool:
        """Whether the server answers and can write; `OSError` means no."""

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        """As ``--rdzv-endpoint`` takes it, without secrets."""
        return ",".join(f"{HOST}:{node.port}" for node in nodes)

    def config(self) -> dict[str, str]:
        """Further options that ``--rdzv-conf`` needs, without secrets."""
        return self.security.config()

    def environ(self) -> dict[str, str]:
        """Further variables that a client's environment needs."""
        return self.security.environ()

    def leads(self, node: ServerProcess) -> bool:
        """Whether the server says that it leads its ensemble; `OSError` means no."""
        return True

    def prepare(self, nodes: Sequence[ServerProcess]) -> None:  # noqa: B027 - most kinds need nothing
        """Called once an empty server or ensemble is ready: make users and the like."""


# Ends the server when its own input ends, however this process did. It is told the server's id as
# soon as that is known; until then it knows it by its folder. PR_SET_PDEATHSIG would fire when the
# thread ends that started the server.
_WATCHDOG = """
while read -r told; do
    [ "$told" = end ] && exit
    pid=$told
done
end_those_in() {
    for it in /proc/[0-9]*; do
        [ "$it/cwd" -ef "$1" ] && kill -9 "${it#/proc/}"
    done
}
[ -n "$pid" ] && kill -9 "$pid" $(cat "/proc/$pid/task/$pid/children")
end_those_in "$1"
sleep 0.2
end_those_in "$1"
rm -rf "$2"
"""


class ServerProcess:
    """One server; its address and data directory stay the same over restarts."""

    def __init__(self, kind: Kind, index: int, ports: Sequence[int], directory: Path) -> None:
        self.index = index
        self.ports = tuple(ports)
        self.directory = directory
        self.peers: Sequence[ServerProcess] = (self,)
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """The port for clients."""
        return self.ports[0]

    @property
    def pid(self) -> int:
        """The running server's process id; `ServerError` if it is stopped."""
        if self._process is None:
            raise ServerError(f"{self} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, empty: bool = False, timeout: float = 30.0) -> None:
        """Start on the same port with the same data (``empty``: with none), and wait until ready.

        A server of an ensemble is ready when the ensemble has a leader. A server that was killed
        keeps what it had written to disk: nothing, for redis and valkey. A member of an ensemble
        cannot start empty (`ValueError`).
        """
        if empty and len(self.peers) > 1:
            raise ValueError(f"{self} is one of several: it cannot start empty")
        self.launch(empty=empty)
        self.await_ready(timeout)
        if empty:
            self._kind.prepare(self.peers)

    def launch(self, *, empty: bool = False) -> None:
        """Start without waiting."""
        if self.running:
            raise ServerError(f"{self} is running already")
        if empty:
            shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        # Before the server: it ends one that was just started, too.
        watchdog = self._watchdog = self._watchdog or self._watch()
        try:
            command = self._kind.command(self, self.peers)
            with (self.directory / "log").open("ab") as log:
                # A separate session: Ctrl-C reaches only this process, which then stops the server.
                self._process = subprocess.Popen(
                    command,
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except BaseException:
            self._reap()
            raise
        with contextlib.suppress(BrokenPipeError):
            assert watchdog.stdin is not None
            watchdog.stdin.write(b"%d\n" % self._process.pid)
            watchdog.stdin.flush()

    def _watch(self) -> subprocess.Popen[bytes]:
        watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "watchdog", self.directory, self.directory.parent],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if watchdog.stdin is not None:
            _pipes.add(watchdog.stdin)
        return watchdog

    def await_ready(self, timeout: float = 30.0) -> None:
        """Wait until the server can serve; `ServerError` with the end of its log if it does not."""

        def ready() -> bool:
            if not self.running:
                raise ServerError(f"{self} ended during its start:\n{self._log_tail()}")
            return self._answers(self._kind.ready)

        if not wait_until(ready, timeout):
            raise ServerError(f"{self} was not ready within {timeout:g} s:\n{self._log_tail()}")

    def check(self) -> None:
        """Raise `ServerError` with the end of its log if the server has ended by itself."""
        if not self.running:
            raise ServerError(f"{self} has ended:\n{self._log_tail()}")

    def leads(self) -> bool:
        """Whether this server runs and says that it leads its ensemble."""
        return self.running and self._answers(self._kind.leads)

    def stop(self, timeout: float = 15.0) -> None:
        """Stop the server cleanly, with its data saved; nothing if it is stopped."""
        if self._process is None:
            return
        self.resume()
        self._process.send_signal(self._kind.stop_signal)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise ServerError(f"{self} did not stop within {timeout:g} s; killed it") from error
        self._reap()

    def kill(self) -> None:
        """SIGKILL; nothing if it is stopped."""
        if self._process is None:
            return
        children = self._children()
        self._process.kill()
        self._process.wait()
        for pid in children:
            _signal(pid, signal.SIGKILL)
        # PostgreSQL does not start again while one of them lives.
        wait_until(lambda: not any(map(_alive, children)), 5)
        self._reap()

    def end(self) -> None:
        """Stop the server for good, by `Kind.end_signal`, then by SIGKILL; release its ports."""
        if self._process is not None and self.running and self._kind.end_signal != signal.SIGKILL:
            self.resume()
            self._process.send_signal(self._kind.end_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self.kill()
        release(self.ports)

    def pause(self) -> None:
        """SIGSTOP: connections stay open, and the server does not answer."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        # The server may answer until its last thread has stopped.
        stopped = os.WSTOPPED | os.WNOHANG
        if not wait_until(lambda: os.waitid(os.P_PID, pid, stopped) is not None, 5):
            raise ServerError(f"{self} was not suspended within 5 s of SIGSTOP")
        for child in self._children():
            _signal(child, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        for child in self._children():
            _signal(child, signal.SIGCONT)
        os.kill(self.pid, signal.SIGCONT)

    def __str__(self) -> str:
        return f"{self._kind.name} {self.index + 1} on {self._kind.host}:{self.port}"

    def _children(self) -> list[int]:
        """The process ids of the server's children: PostgreSQL has one per connection."""
        try:
            file = Path(f"/proc/{self.pid}/task/{self.pid}/children")
            return [int(pid) for pid in file.read_text().split()]
        except OSError:
            return []

    def _answers(self, question: Callable[[ServerProcess], bool]) -> bool:
        try:
            return question(self)
        except (OSError, ValueError):
            return False

    def _reap(self) -> None:
        self._process = None
        if self._watchdog is not None:
            with contextlib.suppress(BrokenPipeError):
                self._watchdog.communicate(b"end\n")
            self._watchdog = None

    def _log_tail(self) -> str:
        lines = (self.directory / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])


# The pipes by whose end a watchdog detects that this process has ended.
_pipes: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _let_go() -> None:
    # A child that was forked, and outlives this process, would keep the servers up.
    for pipe in [*_pipes]:
        with contextlib.suppress(OSError):
            pipe.close()


os.register_at_fork(after_in_child=_let_go)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Check every 10 ms, at least once; False after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def free_ports(
    count: int, first: int | None = None, addresses: Sequence[str] = (HOST,)
) -> list[int]:
    """Distinct ports on which nobody listens; on Linux no other call gives them until `release`.

    A server may start long after its port was chosen (initdb takes seconds), or stop for a while.

    Args:
        first: the first of them; `ServerError` if it is taken at one of the addresses.
        addresses: at which the server is to listen.
    """
    if first is None:
        return [_draw() for _ in range(count)]
    for address in addresses:
        refuse_taken(address, first)
    return [first, *(_draw() for _ in range(count - 1))]


def release(ports: Iterable[int]) -> None:
    """Let others have these ports of `free_ports`."""
    for port in ports:
        if port in _held:
            _held.pop(port).close()


def _draw() -> int:
    # Not `random` itself: two processes that seed it must not get the same ports.
    for port in random.SystemRandom().sample(_PORTS, 200):
        holder = socket.socket()
        try:
            # Without SO_REUSEADDR, so that it fails where another process holds the port.
            holder.bind((HOST, port))
        except OSError:
            holder.close()
            continue
        if sys.platform == "linux":
            # Now a server, which sets it too, may have the port beside the holder.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _held[port] = holder
        else:
            holder.close()
        return port
    raise ServerError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on {HOST}")


_held: dict[int, socket.socket] = {}


def find_file(
    kind: str,
    names: Sequence[str],
    folders: Sequence[str | Path] = (),
    environ: Mapping[str, str] = os.environ,
) -> Path | None:
    """A server's binary or jar: ``$RDZV_<KIND>_BINARY``, then PATH, ``folders`` and ``.servers``.

    ``scripts/install-servers`` fills ``.servers``.

    Raises:
        ServerError: the environment variable names no file.
    """
    variable = f"RDZV_{kind.upper()}_BINARY"
    if named := environ.get(variable):
        if not Path(named).is_file():
            raise ServerError(f"${variable} names '{named}', which is no file")
        return Path(named)
    local = Path(__file__).resolve().parents[2] / ".servers" / kind
    path = environ.get("PATH", "").split(os.pathsep)
    for folder in (*path, "/usr/sbin", "/usr/local/sbin", *folders, local):
        for name in names:
            file = Path(folder) / name
            if folder and file.is_file():
                return file
    return None
