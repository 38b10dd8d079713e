"""The API server of Kubernetes with an etcd of its own; no controller and no kubelet run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
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

# The shell stays, so that whoever stops, suspends or kills it has the servers as its children. The
# API server keeps nothing, and would take seconds to end.
_BOTH = """
trap 'kill -9 $server; kill $etcd; wait; exit' TERM
{etcd} & etcd=$!
{server} & server=$!
wait $server
"""
# The first server makes the certificate of both.
_SECOND = """
trap 'kill -9 $server; exit' TERM
until [ -s {key} ]; do sleep 0.1; done
{server} & server=$!
wait $server
"""


# Not /logs, by which any account of this host would read /var/log as this one.
_PATHS = ("/api*", "/apis*", "/healthz*", "/livez*", "/openapi*", "/readyz*", "/version*")


def _for_everybody(**what: str) -> str:
    policy = {
        "apiVersion": "abac.authorization.kubernetes.io/v1beta1",
        "kind": "Policy",
        "spec": {"group": "system:unauthenticated", **what},
    }
    return json.dumps(policy)


class Kubernetes(Kind):
    """kube-apiserver 1.20 or later: one, or two on the etcd of the first.

    Without access control everybody may do everything with its objects, over TLS with a certificate
    of its own.
    `Security.password` is the bearer token of `Security.user`, whom RBAC lets do everything.
    """

    name = "kubernetes"
    ports_per_node = 3
    largest = 2

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        binary = find_file("kubernetes", ["kube-apiserver"])
        etcd = find_file("etcd", ["etcd"])
        if binary is None or etcd is None:
            missing = "kube-apiserver" if binary is None else "etcd, which kube-apiserver needs,"
            raise NotInstalledError(
                f"{missing} is not installed: scripts/install-servers etcd kubernetes"
            )
        self._binary, self._etcd = binary, etcd
        self._certificate = Path()

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        # Not in the node's folder: a server that starts empty has the same certificate.
        folder = node.directory.parent / "certificates"
        key = folder / "apiserver.key"
        security = self.security
        flags = {
            "etcd-servers": f"http://{HOST}:{nodes[0].ports[1]}",
            "bind-address": HOST,
            "advertise-address": HOST,
            "secure-port": str(node.port),
            "cert-dir": str(folder),
            "tls-cert-file": security.cert_file,
            "tls-private-key-file": security.key_file,
            "client-ca-file": security.ca_file if security.client_cert_file else None,
            "service-cluster-ip-range": "10.0.0.0/24",
            "service-account-issuer": "https://kubernetes.default.svc",
            # Nobody else signs tokens here.
            "service-account-signing-key-file": security.key_file or str(key),
            "service-account-key-file": security.key_file or str(key),
            # No controller makes service accounts.
            "disable-admission-plugins": "ServiceAccount",
            # It has no service that pods would use.
            "endpoint-reconciler-type": "none",
        }
        if security.password:
            if not security.user:
                raise ServerError("kube-apiserver needs a user in addition to the token")
            tokens = node.directory / "tokens.csv"
            tokens.touch(0o600)
            tokens.write_text(
                f'{security.password},{security.user},{security.user},"system:masters"\n'
            )
            flags |= {"token-auth-file": str(tokens), "authorization-mode": "RBAC"}
        else:
            policy = node.directory / "policy.jsonl"
            resources = dict.fromkeys(("namespace", "resource", "apiGroup"), "*")
            lines = [resources, *({"nonResourcePath": path} for path in _PATHS)]
            policy.write_text("\n".join(_for_everybody(**line) for line in lines))
            # Under AlwaysAllow it refuses whoever has no token.
            flags |= {"authorization-policy-file": str(policy), "authorization-mode": "ABAC"}
        server = _line(self._binary, flags)
        if node.index:
            script = _SECOND.format(key=security.key_file or shlex.quote(str(key)), server=server)
        else:
            script = _BOTH.format(etcd=self._line_of_etcd(node), server=server)
        return ["/bin/sh", "-c", script]

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        self._certificate = nodes[0].directory.parent / "certificates/apiserver.crt"
        return f"https://{super().endpoint(nodes)}"

    def config(self) -> dict[str, str]:
        return super().config() or {"ca_file": str(self._certificate)}

    def ready(self, node: ServerProcess) -> bool:
        # The namespace is made by the server, a moment after it is ready.
        paths = ("/readyz", "/api/v1/namespaces/default")
        token = {"Authorization": f"Bearer {self.security.password}"}
        headers = token if self.security.password else {}
        # It always speaks TLS.
        security = replace(self.security, cert_file=self.security.cert_file or "its own")
        return all(
            ask(node.port, "GET", path, security=security, headers=headers)[0] == 200
            for path in paths
        )

    def _line_of_etcd(self, node: ServerProcess) -> str:
        client, peer = (f"http://{HOST}:{port}" for port in node.ports[1:])
        flags = {
            "data-dir": str(node.directory / "etcd"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "logger": "zap",
            "log-level": "warn",
        }
        return _line(self._etcd, flags)


def _line(binary: Path, flags: Mapping[str, str | None]) -> str:
    """For a shell; flags without a value are left out."""
    given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    return shlex.join([str(binary), *given])
