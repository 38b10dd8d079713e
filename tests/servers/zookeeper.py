"""Apache ZooKeeper, one server or three."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from tests.servers.process import (
    HOST,
    Kind,
    NotInstalledError,
    Security,
    ServerError,
    ServerProcess,
    find_file,
)


class ZooKeeper(Kind):
    """ZooKeeper's jar run by ``java``, as Debian's package ``zookeeper`` installs it.

    ``$RDZV_ZOOKEEPER_BINARY`` names the jar. With a user and password, clients must log in by
    SASL (DIGEST-MD5); the scheme "digest" needs no configuration here.
    """

    name = "zookeeper"
    ports_per_node = 3
    largest = 3

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        jar = find_file(
            "zookeeper", ["zookeeper.jar"], ["/usr/share/java", "/usr/share/zookeeper/lib"]
        )
        java = shutil.which("java")
        if jar is None or java is None:
            missing = "ZooKeeper" if jar is None else "java"
            raise NotInstalledError(f"{missing} is not installed: apt-get install zookeeper")
        self._jar, self._java = jar, java

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        data = node.directory / "data"
        data.mkdir(exist_ok=True)
        lines = [
            f"tickTime={500 if len(nodes) == 1 else 200}",
            f"dataDir={data}",
            "admin.enableServer=false",
            "4lw.commands.whitelist=srvr",
            "maxClientCnxns=0",
        ]
        flags: list[str] = []
        if self.security.tls:
            lines += self._tls(node)
        else:
            lines += [f"clientPort={node.port}", f"clientPortAddress={HOST}"]
        if self.security.password:
            flags.append(f"-Djava.security.auth.login.config={self._jaas(node)}")
            lines += [
                "authProvider.sasl=org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
                "sessionRequireClientSASLAuth=true",
            ]
        if len(nodes) > 1:
            lines += ["initLimit=20", "syncLimit=10", "standaloneEnabled=false"]
            lines += [
                f"server.{peer.index + 1}={HOST}:{peer.ports[1]}:{peer.ports[2]}" for peer in nodes
            ]
            (data / "myid").write_text(str(node.index + 1))
        (node.directory / "zoo.cfg").write_text("\n".join(lines) + "\n")
        # Debian's jar names most of its dependencies; TLS needs the two of netty in addition.
        beside = ("slf4j-simple.jar", "netty-codec.jar", "netty-resolver.jar")
        classes = [self._jar, *(self._jar.parent / name for name in beside)]
        return [
            self._java,
            "-Xmx512m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-Dzookeeper.admin.enableServer=false",
            *flags,
            "-cp",
            ":".join(str(file) for file in classes),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(node.directory / "zoo.cfg"),
        ]

    def _tls(self, node: ServerProcess) -> list[str]:
        if "-----BEGIN PRIVATE KEY-----" not in _read(self.security.key_file):
            raise ServerError(
                f"ZooKeeper reads private keys in PKCS #8 form only; "
                f"make one with: openssl pkcs8 -topk8 -nocrypt -in {self.security.key_file}"
            )
        # A key store in PEM form is one file with the key first.
        store, trust = node.directory / "server.pem", node.directory / "ca.pem"
        store.touch(0o600)
        store.write_text(_read(self.security.key_file) + _read(self.security.cert_file))
        trust.write_text(_read(self.security.ca_file))
        return [
            f"secureClientPort={node.port}",
            f"secureClientPortAddress={HOST}",
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
            f"ssl.keyStore.location={store}",
            f"ssl.trustStore.location={trust}",
            f"ssl.clientAuth={'need' if self.security.client_cert_file else 'none'}",
        ]

    def _jaas(self, node: ServerProcess) -> Path:
        file = node.directory / "jaas.conf"
        file.touch(0o600)
        file.write_text(
            "Server {\n  org.apache.zookeeper.server.auth.DigestLoginModule required\n"
            f'  user_{self.security.user}="{self.security.password}";\n}};\n'
        )
        return file

    def config(self) -> dict[str, str]:
        return super().config() | ({"sasl": "true"} if self.security.password else {})

    def ready(self, node: ServerProcess) -> bool:
        return "Mode: " in self._srvr(node)

    def leads(self, node: ServerProcess) -> bool:
        return any(f"Mode: {mode}" in self._srvr(node) for mode in ("leader", "standalone"))

    def _srvr(self, node: ServerProcess) -> str:
        with socket.create_connection((HOST, node.port), 1) as raw:
            context = self.security.context()
            connection = context.wrap_socket(raw) if context else raw
            connection.sendall(b"srvr")
            answer = b""
            while part := connection.recv(4096):
                answer += part
            return answer.decode()


def _read(file: str | None) -> str:
    if file is None:
        raise ServerError("TLS needs ca_file, cert_file and key_file")
    return Path(file).read_text()
