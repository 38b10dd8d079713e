"""HashiCorp Consul, one server or three."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.servers.http import ask
from tests.servers.process import HOST, Kind, NotInstalledError, Security, ServerProcess, find_file


class Consul(Kind):
    """A Consul server agent; `Security.password` is the ACL token, a UUID."""

    name = "consul"
    ports_per_node = 3
    largest = 3

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        binary = find_file("consul", ["consul", "usr/bin/consul"])
        if binary is None:
            raise NotInstalledError("consul is not installed: scripts/install-servers consul")
        self._binary = binary

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        data = node.directory / "data"
        data.mkdir(exist_ok=True)
        http, server, serf = node.ports
        tls = self.security.tls
        ports = {"http": -1 if tls else http, "https": http if tls else -1, "server": server}
        ports |= {"serf_lan": serf, "serf_wan": -1, "dns": -1, "grpc": -1}
        settings: dict[str, Any] = {
            "server": True,
            "bootstrap_expect": len(nodes),
            "data_dir": str(data),
            "node_name": f"n{node.index + 1}",
            "bind_addr": HOST,
            "client_addr": HOST,
            "ports": ports,
            "retry_join": [f"{HOST}:{peer.ports[2]}" for peer in nodes if peer is not node],
            "retry_interval": "1s",
            "performance": {"raft_multiplier": 1, "leave_drain_time": "0s"},
            # A stopped server starts again: it must not leave the ensemble's quorum.
            "leave_on_terminate": False,
            "skip_leave_on_interrupt": True,
            # All nodes of a test share one address; real nodes have an agent each.
            "limits": {"http_max_conns_per_client": 8192},
            "disable_update_check": True,
            "log_level": "warn",
        }
        if tls:
            settings |= {
                "ca_file": self.security.ca_file,
                "cert_file": self.security.cert_file,
                "key_file": self.security.key_file,
                "verify_incoming_https": self.security.client_cert_file is not None,
            }
        if self.security.password:
            settings["acl"] = {
                "enabled": True,
                "default_policy": "deny",
                "tokens": {"master": self.security.password},
            }
        file = node.directory / "consul.json"
        file.touch(0o600)
        file.write_text(json.dumps(settings))
        return [str(self._binary), "agent", "-config-file", str(file)]

    def environ(self) -> dict[str, str]:
        # A token has no user.
        return replace(self.security, user=None).environ()

    def ready(self, node: ServerProcess) -> bool:
        status, answer = self._ask(node, "PUT", "/v1/kv/rdzv-ready", "1")
        return status == 200 and answer is True

    def leads(self, node: ServerProcess) -> bool:
        leader = self._ask(node, "GET", "/v1/status/leader")[1]
        return isinstance(leader, str) and leader == f"{HOST}:{node.ports[1]}"

    def _ask(
        self, node: ServerProcess, method: str, path: str, body: object = None
    ) -> tuple[int, Any]:
        token = self.security.password
        headers = {"X-Consul-Token": token} if token else {}
        return ask(node.port, method, path, body, security=self.security, headers=headers)
