"""Azurite, which speaks Azure's Blob Storage: a container of the account that it has."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
from collections.abc import Sequence
from email.utils import formatdate
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

_CONTAINER = "rdzv"
# The account of every Azurite, as its documentation says.
_ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_SCRIPT = "node_modules/azurite/dist/src/blob/main.js"


class Azure(Kind):
    """Azurite's blob service, run by ``node``; ``$RDZV_AZURE_BINARY`` names its script."""

    name = "azure"

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        if security != Security():
            raise ValueError("a local azure has one account of its own, and no TLS")
        script, node = find_file("azure", [_SCRIPT]), shutil.which("node")
        if script is None or node is None:
            missing = "Azurite" if script is None else "node"
            raise NotInstalledError(f"{missing} is not installed: scripts/install-servers azure")
        self._script, self._node = script, node

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        data = node.directory / "data"
        data.mkdir(exist_ok=True)
        return [
            self._node, str(self._script), "--blobHost", HOST, "--blobPort", str(node.port),
            "--location", str(data), "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        ]  # fmt: skip

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        self._url = f"http://{HOST}:{nodes[0].port}/{_ACCOUNT}"
        return f"az://{_CONTAINER}"

    def config(self) -> dict[str, str]:
        return {"url": self._url, "account": _ACCOUNT}

    def environ(self) -> dict[str, str]:
        return {"AZURE_STORAGE_ACCOUNT_KEY": KEY}

    def ready(self, node: ServerProcess) -> bool:
        return ask(node.port, "GET", "/", security=self.security)[0] < 500

    def prepare(self, nodes: Sequence[ServerProcess]) -> None:
        create_container(nodes[0].port)


def create_container(port: int) -> None:
    """Create the container in the Azurite at this port of this host; one that is there stays."""
    status, said = put(port, f"{_CONTAINER}?restype=container")
    if status not in (201, 409):
        raise ServerError(f"the container could not be made: {said}")


def put(port: int, path: str, **headers: str) -> tuple[int, Any]:
    """Sign and send a PUT without a body, of a path in the account; returns status and answer."""
    headers |= {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    place = f"/{_ACCOUNT}/{path}"
    resource = f"/{_ACCOUNT}{place}".replace("?", "\n").replace("=", ":")
    text = "PUT" + "\n" * 12 + signed + resource
    key = base64.b64decode(KEY)
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest())
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{signature.decode()}"
    return ask(port, "PUT", place, security=Security(), headers=headers)
