"""Amazon's DynamoDB Local."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from tests.servers.http import ask
from tests.servers.process import HOST, Kind, NotInstalledError, Security, ServerProcess, find_file


class DynamoDB(Kind):
    """DynamoDB Local: a jar run by ``java``; ``$RDZV_DYNAMODB_BINARY`` names the jar.

    It has neither users nor TLS; it accepts any credentials, but requires some.
    """

    name = "dynamodb"
    in_memory = True

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        if security != Security():
            raise ValueError("DynamoDB Local has neither users nor TLS")
        jar = find_file("dynamodb", ["DynamoDBLocal.jar", "package/emulator/DynamoDBLocal.jar"])
        java = shutil.which("java")
        if jar is None or java is None:
            missing = "DynamoDB Local" if jar is None else "java"
            raise NotInstalledError(f"{missing} is not installed: scripts/install-servers dynamodb")
        self._jar, self._java = jar, java

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        data = node.directory / "data"
        data.mkdir(exist_ok=True)
        return [
            self._java,
            "-Xmx256m",
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            f"-Djava.library.path={self._jar.parent / 'DynamoDBLocal_lib'}",
            "-jar",
            str(self._jar),
            "-port",
            str(node.port),
            "-dbPath",
            str(data),
            "-sharedDb",
        ]

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        return f"http://{HOST}:{nodes[0].port}"

    def config(self) -> dict[str, str]:
        return {"create_table": "true"}

    def environ(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def ready(self, node: ServerProcess) -> bool:
        return ask(node.port, "GET", "/", security=self.security)[0] == 400
