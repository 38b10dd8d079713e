"""PostgreSQL, one server."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import struct
import subprocess
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

# For a temporary server, whose data need not reach the disk.
_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "600",
    "shared_buffers": "32MB",
    "dynamic_shared_memory_type": "mmap",
    "fsync": "off",
    "full_page_writes": "off",
    "logging_collector": "off",
}
_INITDB = ["-A", "scram-sha-256", "-E", "UTF8", "--no-locale", "--no-sync", "--wal-segsize=1"]


class Postgres(Kind):
    """PostgreSQL 12 or later, with the user ``postgres`` unless `Security` names one.

    That user executes commands of this host as the account of the server, and any account connects
    to loopback. It has the password of ``$PGPASSWORD``, which libpq reads, or a new one.

    PostgreSQL refuses to run as root: under root it runs as the user ``postgres``.
    """

    name = "postgres"
    stop_signal = signal.SIGINT
    end_signal = signal.SIGQUIT

    def __init__(self, security: Security) -> None:
        super().__init__(security)
        # Debian has the binaries of each version in a separate folder, outside PATH.
        folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
        binary = find_file("postgres", ["postgres"], folders)
        if binary is None:
            raise NotInstalledError(
                "PostgreSQL's server is not installed: apt-get install postgresql"
            )
        self._password = os.environ.get("PGPASSWORD") or secrets.token_urlsafe(24)
        # Follow a link: the other binaries are in the folder of its target.
        self._binary = binary.resolve()
        self._account: pwd.struct_passwd | None = None
        if os.geteuid() == 0:
            try:
                self._account = pwd.getpwnam("postgres")
            except KeyError:
                raise NotInstalledError(
                    "PostgreSQL does not run as root, and there is no user 'postgres' for it: "
                    "apt-get install postgresql"
                ) from None

    def command(self, node: ServerProcess, nodes: Sequence[ServerProcess]) -> list[str]:
        data = node.directory / "data"
        if self._account is not None:
            node.directory.parent.chmod(0o711)
            self._own(node.directory)
        node.directory.chmod(0o700)
        if not data.exists():
            self._make(node, data)
        self._provide(data)
        settings = {**_SETTINGS, "port": str(node.port)}
        if self.security.tls:
            settings |= {"ssl": "on", "ssl_cert_file": "server.pem", "ssl_key_file": "server.key"}
            if self.security.ca_file:
                settings["ssl_ca_file"] = "ca.pem"
        flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]
        return self._as_account(str(self._binary), "-D", str(data), *flags)

    def endpoint(self, nodes: Sequence[ServerProcess]) -> str:
        user = "" if self.security.user else "postgres@"
        return f"postgresql://{user}{super().endpoint(nodes)}/postgres"

    def config(self) -> dict[str, str]:
        return {**super().config(), "create_table": "true"}

    def environ(self) -> dict[str, str]:
        return super().environ() or {"PGPASSWORD": self._password}

    def ready(self, node: ServerProcess) -> bool:
        with socket.create_connection((HOST, node.port), 1) as connection:
            hello = struct.pack("!i", 3 << 16) + b"user\0postgres\0database\0postgres\0\0"
            connection.sendall(struct.pack("!i", len(hello) + 4) + hello)
            answer = connection.recv(1024)
            # A request for a password or an error, but not "starting up".
            return answer[:1] in (b"R", b"E") and b"57P03" not in answer

    def _make(self, node: ServerProcess, data: Path) -> None:
        """Make a database cluster, its access rules and, with a password, the user."""
        file = node.directory / "password"
        file.touch(0o600)
        file.write_text(self._password)
        self._own(file)
        initdb = [str(self._binary.parent / "initdb"), f"--pwfile={file}", *_INITDB]
        self._run(node, [*initdb, "-D", str(data), "-U", "postgres"])
        kind = "hostssl" if self.security.tls else "host"
        how = "scram-sha-256" + " clientcert=verify-ca" * bool(self.security.client_cert_file)
        (data / "pg_hba.conf").write_text(f"{kind} all,replication all {HOST}/32 {how}\n")
        if self.security.password:
            if not self.security.user:
                raise ServerError("PostgreSQL needs a user in addition to the password")
            name, password = _quoted(self.security.user, '"'), _quoted(self.security.password, "'")
            rights = f"GRANT CREATE ON SCHEMA public TO {name}"
            single = [str(self._binary), "--single", "-D", str(data), "postgres"]
            self._run(node, single, f"CREATE ROLE {name} LOGIN PASSWORD {password};\n{rights};\n")

    def _provide(self, data: Path) -> None:
        """Copy the files of TLS: PostgreSQL reads no key that belongs to another user."""
        files = {"server.pem": self.security.cert_file, "server.key": self.security.key_file}
        for name, file in {**files, "ca.pem": self.security.ca_file}.items():
            if file is not None:
                copy = data / name
                copy.touch(0o600)
                copy.write_bytes(Path(file).read_bytes())
                self._own(copy)

    def _own(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _as_account(self, *command: str) -> list[str]:
        if self._account is None:
            return [*command]
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise NotInstalledError("PostgreSQL does not run as root: apt-get install util-linux")
        ids = [f"--reuid={self._account.pw_uid}", f"--regid={self._account.pw_gid}"]
        return [setpriv, *ids, "--clear-groups", *command]

    def _run(self, node: ServerProcess, command: Sequence[str], text: str = "") -> None:
        ended = subprocess.run(
            self._as_account(*command),
            cwd=node.directory,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise ServerError(f"{command[0]} failed:\n{ended.stdout}")


def _version(folder: Path) -> float:
    try:
        return float(folder.parent.name)
    except ValueError:
        return 0.0


def _quoted(text: str, mark: str) -> str:
    return mark + text.replace(mark, 2 * mark) + mark
