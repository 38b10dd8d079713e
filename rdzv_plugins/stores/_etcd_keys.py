"""A run's keys in etcd: where they stand, what is stored, and parts of requests about them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rdzv_plugins.kv import Entry, RendezvousStateError, Version
from rdzv_plugins.stores._etcd_gateway import decoded, encoded

__all__ = ["NO_LEASE", "Keys", "entry_of", "first_entry", "stamped"]

_STAMP_BYTES = 12

NO_LEASE = "0"
"""As etcd writes it."""


class Keys:
    """The keys below ``base``, which ends in "/"; on ``base`` itself stands the mark."""

    def __init__(self, base: str) -> None:
        self.base = base

    def _path(self, key: str) -> bytes:
        return (self.base + key).encode()

    def relative(self, item: Mapping[str, Any]) -> str:
        return decoded(item["key"]).decode()[len(self.base) :]

    def one(self, key: str) -> dict[str, Any]:
        return {"key": encoded(self._path(key))}

    def range(self, prefix: str) -> dict[str, Any]:
        path = self._path(prefix)
        # It ends in "/" or in a character of UTF-8, so its last byte is never 255.
        return {"key": encoded(path), "range_end": encoded(path[:-1] + bytes([path[-1] + 1]))}

    def put(self, key: str, stored: bytes, lease: str) -> dict[str, Any]:
        return {"request_put": {**self.one(key), "value": encoded(stored), "lease": lease}}

    def mark(self, lease: str) -> dict[str, Any]:
        """What holds while the mark has that lease; NO_LEASE: or there is no mark."""
        return {**self.one(""), "target": "LEASE", "result": "EQUAL", "lease": lease}

    def marked(self, answer: Mapping[str, Any]) -> str:
        """The lease of the mark in the answer to a range that begins with it."""
        for item in answer.get("kvs", [])[:1]:
            if not self.relative(item):
                return str(item.get("lease", NO_LEASE))
        return NO_LEASE

    def comparison(self, key: str, expected: Version | None) -> Sequence[dict[str, Any]] | None:
        """What holds while the key's version is ``expected``; None: it can never hold."""
        if expected is None:
            none = {"target": "CREATE", "result": "EQUAL", "create_revision": "0"}
            return [{**self.one(key), **none}]
        try:
            stamp = bytes.fromhex(cast(str, expected))
        except (TypeError, ValueError):
            return None
        if len(stamp) != _STAMP_BYTES or stamp.hex() != expected:
            return None
        # "=" follows each stamp, and ">" follows "=".
        bounds = (("GREATER", stamp), ("LESS", stamp + b">"))
        return [
            {**self.one(key), "target": "VALUE", "result": result, "value": encoded(bound)}
            for result, bound in bounds
        ]


def stamped(value: bytes) -> bytes:
    return secrets.token_bytes(_STAMP_BYTES) + b"=" + value


def entry_of(stored: bytes) -> Entry:
    if stored[_STAMP_BYTES : _STAMP_BYTES + 1] != b"=":
        raise RendezvousStateError("a value in etcd is not this package's: use another prefix")
    return Entry(stored[_STAMP_BYTES + 1 :], stored[:_STAMP_BYTES].hex())


def first_entry(answer: Mapping[str, Any]) -> Entry | None:
    for item in answer.get("kvs", []):
        return entry_of(decoded(item["value"]))
    return None
