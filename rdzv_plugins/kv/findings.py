"""Findings of `rdzv check`. Each store yields its own in `KeyValueClient.inspect`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rdzv_plugins.settings.endpoint import is_loopback

# The used part of a server's space from which a finding warns.
_NEARLY_FULL = 0.9


class Mark(StrEnum):
    """How a check ended."""

    OK = "ok"
    UNKNOWN = "unknown"
    """The check could not be made, which is no reason for doubt."""
    WARNING = "warning"
    """A job works, but not as well as it could, or not in every case."""
    FAILED = "failed"
    """A job will not work."""


class Finding(msgspec.Struct, frozen=True):
    """One line of a report.

    Attributes:
        what: the subject, in a word or two: "version", "rights".
        found: the result.
        advice: what the user should do; "": nothing.
        values: the figures in ``found``, by name, for programs.
    """

    mark: Mark
    what: str
    found: str
    advice: str = ""
    values: Mapping[str, Any] = {}

    @property
    def line(self) -> str:
        """The finding without its mark."""
        text = f"{self.what}: {self.found}"
        mark = "" if text.endswith("?") else ";"
        return f"{text}{mark} {self.advice}" if self.advice else text


def of_version(server: str, version: str, least: tuple[int, ...]) -> Finding:
    """Whether a version, such as "7.0.15" or "3.4.0-rc.1", is supported.

    Args:
        least: the first supported version; (): all are supported.
    """
    needed = ".".join(map(str, least))
    leading = re.match(r"\d+(\.\d+)*", version)
    if leading is None:
        return Finding(Mark.UNKNOWN, "version", f"{server} tells no number: '{version[:40]}'")
    number = tuple(map(int, leading[0].split(".")))
    values = {"server": server, "version": version, "least": needed}
    if number < least:
        advice = f"upgrade it: this backend needs {needed} or later"
        return Finding(Mark.FAILED, "version", f"{server} {version} is too old", advice, values)
    return Finding(Mark.OK, "version", f"{server} {version}", values=values)


def of_connection(
    encrypted: bool, secret: bool, hosts: Iterable[str], verified: bool = True
) -> Finding:
    """Whether the connection is encrypted.

    Args:
        secret: the client sends a password or token in clear text.
        verified: whether the certificate and the name were verified.
    """
    values = {"tls": encrypted, "verified": encrypted and verified}
    if encrypted and verified:
        return Finding(Mark.OK, "TLS", "encrypted; certificate and name verified", values=values)
    if encrypted:
        found = "encrypted, but the server's certificate is not verified"
        return Finding(Mark.OK, "TLS", found, "tls=true and ca_file verify it", values)
    if secret and not all(map(is_loopback, hosts)):
        found = "plain: the password can be read on its way to another host"
        return Finding(Mark.WARNING, "TLS", found, "enable TLS on the server, and here", values)
    return Finding(Mark.OK, "TLS", "plain, not encrypted", values=values)


def of_space(used: int, most: int, advice: str) -> Finding:
    """Whether a server has room for writes, in bytes; ``most`` 0: its limit is unknown."""
    values = {"used_bytes": used, "max_bytes": most}
    if not most:
        return Finding(
            Mark.OK, "space", f"{used:,} bytes are used; the server tells no limit", values=values
        )
    found = f"{used:,} of {most:,} bytes are used"
    if used >= most:
        return Finding(Mark.FAILED, "space", f"{found}: writes are refused", advice, values)
    if used >= _NEARLY_FULL * most:
        found = f"{found}: little is left, and a full server takes no writes"
        return Finding(Mark.WARNING, "space", found, advice, values)
    return Finding(Mark.OK, "space", found, values=values)
