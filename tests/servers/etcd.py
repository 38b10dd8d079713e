"""etcd, one member or three."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.servers.http import ask
from tests.servers.process import (
    HOST,
    Kind,
    NotInstalledError,
    Security,
    ServerError,
    ServerProcess,
    find_file,
)


class Etcd(Kind):
    """etcd 3.4 or later; with a user and password, authentication is enabled."""

    name = "etcd"
    backend = "etcd-v3"
    ports_per_node = 2
    largest = 3

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        binary = find_file("etcd", ["etcd"])
        if binary is None:
            raise NotInstalledError("etcd is not installed: apt-get install etcd-server")
        self._binary = binary
        self._scheme = "https" if security.tls else "http"

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        client = f"{self._scheme}://{HOST}:{node.port}"
        members = [f"n{peer.index + 1}=http://{HOST}:{peer.ports[1]}" for peer in nodes]
        flags = {
            "name": f"n{node.index + 1}",
            "data-dir": str(node.directory / "data"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": f"http://{HOST}:{node.ports[1]}",
            "initial-advertise-peer-urls": f"http://{HOST}:{node.ports[1]}",
            "initial-cluster": ",".join(members),
            "logger": "zap",
            "log-level": "warn",
        }
        if len(nodes) == 1:
            flags |= {"heartbeat-interval": "10", "election-timeout": "100"}
        if self.security.tls:
            flags["cert-file"] = self.security.cert_file or ""
            flags["key-file"] = self.security.key_file or ""
            if self.security.client_cert_file:
                # With this file, etcd requires a certificate whatever client-cert-auth says.
                flags["trusted-ca-file"] = self.security.ca_file or ""
                flags["client-cert-auth"] = "true"
        return [str(self._binary), *(f"--{name}={value}" for name, value in flags.items())]

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        return ",".join(f"{HOST}:{node.port}" for node in nodes)

    def ready(self, node: ServerProcess) -> bool:
        answer = ask(node.port, "GET", "/health", security=self.security)[1]
        return isinstance(answer, dict) and str(answer.get("health")) == "true"

    def leads(self, node: ServerProcess) -> bool:
        answer = self._post(node, "maintenance/status", {})
        return "leader" in answer and answer["leader"] == answer["header"]["member_id"]

    def prepare(self, nodes: Sequence[ServerProcess]) -> None:
        user, password = self.security.user, self.security.password
        if not password:
            return
        if not user:
            raise ServerError("etcd needs a user in addition to the password")
        node = nodes[0]
        # Every key: from the zero byte (AA== in base64) on.
        everything = {"permType": "READWRITE", "key": "AA==", "range_end": "AA=="}
        self._post(node, "auth/role/add", {"name": "everything"})
        self._post(node, "auth/role/grant", {"name": "everything", "perm": everything})
        # etcd requires a user "root" before it enables authentication.
        for name, role in {
            "root": "root",
            user: "everything" if user != "root" else "root",
        }.items():
            self._post(node, "auth/user/add", {"name": name, "password": password})
            self._post(node, "auth/user/grant", {"user": name, "role": role})
        self._post(node, "auth/enable", {})

    def _post(self, node: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = ask(node.port, "POST", f"/v3/{path}", body, security=self.security)
        if status != 200 or not isinstance(answer, dict):
            raise OSError(f"etcd answered {status} to {path}: {answer}")
        return answer
