"""Certificates for the tests: an authority of ours, and a foreign one that nobody trusts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from trustme import KeyType

from tests.servers import Security

__all__ = ["Certificates", "Pair"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Paths of a certificate and of its private key."""

    cert_file: str
    key_file: str


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files.

    Attributes:
        ca_file: the authority that signed all but what is foreign.
        foreign_ca_file: another authority.
        server: names 127.0.0.1 and localhost.
        misnamed: a server's, of another host.
        client: what clients show.
        foreign_client: a client's, signed by the other authority.
    """

    ca_file: str
    foreign_ca_file: str
    server: Pair
    misnamed: Pair
    client: Pair
    foreign_client: Pair

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """Write them into a folder."""
        ours, foreign = trustme.CA(), trustme.CA()
        return cls(
            ca_file=_write(folder / "ca.pem", ours.cert_pem.bytes()),
            foreign_ca_file=_write(folder / "foreign-ca.pem", foreign.cert_pem.bytes()),
            # kube-apiserver signs with the key too, and reads no elliptic curve in this form.
            server=_issue(folder / "server", ours, "127.0.0.1", "localhost", kind=KeyType.RSA),
            misnamed=_issue(folder / "misnamed", ours, "elsewhere.example", kind=KeyType.RSA),
            client=_issue(folder / "client", ours, "node.example"),
            foreign_client=_issue(folder / "foreign-client", foreign, "node.example"),
        )

    def security(
        self,
        *,
        user: str | None = None,
        password: str | None = None,
        server: Pair | None = None,
        client: bool = False,
    ) -> Security:
        """A server with TLS; with ``client`` it demands a certificate of its clients too."""
        shown = server or self.server
        return Security(
            user=user,
            password=password,
            ca_file=self.ca_file,
            cert_file=shown.cert_file,
            key_file=shown.key_file,
            client_cert_file=self.client.cert_file if client else None,
            client_key_file=self.client.key_file if client else None,
        )


def _issue(stem: Path, authority: trustme.CA, *names: str, kind: KeyType = KeyType.ECDSA) -> Pair:
    issued = authority.issue_cert(*names, key_type=kind)
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    # ZooKeeper reads no other form than PKCS #8.
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    return Pair(_write(stem.with_suffix(".pem"), chain), _write(stem.with_suffix(".key"), pem))


def _write(file: Path, content: bytes) -> str:
    file.touch(0o600)
    file.write_bytes(content)
    return str(file)
