"""Sealed values: whoever lacks the run's secret can write none that counts, and alter none.

`SealedClient` wraps a client at its public methods, so that every store and every command has it.
What it writes begins with `MARK` and a tag, HMAC-SHA256 over the key and the value, under a key
that is derived from the secret, the prefix and the run id: a value counts only at the very key of
the very run for which it was written. The tag is verified before anything looks at the value. What
fails counts as absent, and is written over.

A seal hides nothing, and stops neither deletion nor the replay of what stood at the same key
before: the protocol refuses what is older than what a node has seen.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from rdzv_plugins.kv.contract import (
    Entry,
    KeyValueClient,
    MembersUp,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
    parse_counter,
)
from rdzv_plugins.kv.findings import Finding
from rdzv_plugins.kv.retry import pause_after
from rdzv_plugins.settings.options import UnreadableFileError
from rdzv_plugins.settings.run_ids import RESERVED

log = logging.getLogger(__name__)

MARK = b"\0rs1"
"""What a sealed value begins with; no document does. Its number changes with the format."""

# Half of what SHA-256 gives, which is what RFC 2104 advises: a record has some 300 bytes.
_TAG_BYTES = 16
OVERHEAD = len(MARK) + _TAG_BYTES
"""Bytes by which a value grows."""

NO_SECRET_HERE = (
    "is sealed with a secret, and none is set here: set that of its nodes, in $RDZV_PLUGINS_SECRET "
    "or secret_file"
)
"""Continues "the run ..."."""

# The keys that stand for a living run: a client that has read no value of the run does not write
# over another's before it has stood still, with all others there, for a lease.
CLAIMS = ("state", "torch-state")

# A value of others is written over so often in a row; then somebody writes in a loop.
_MOST_REPLACED = 10
# The longest pause, in seconds, between two looks at a key that others write again and again.
_LONGEST_PAUSE = 1.0
# It is remembered for so many keys which value of others stood there last.
_MOST_PASSED = 1000
# For how many seconds, at most, an addition is tried again since others were faster.
_ADD_SECONDS = 60.0
# How often, in seconds, it is looked whether the file of the secret has changed.
_LOOK_SECONDS = 1.0
_KEY_SHOWN = 80


class ForeignValueError(RendezvousStateError):
    """A run lives, or may live, under this id whose values this client cannot verify."""


def is_sealed(data: bytes) -> bool:
    """Whether the value was written by a client that has a secret, whichever it is."""
    return data.startswith(MARK)


def why_unreadable(client: KeyValueClient, what: str, prefix: str = "") -> str:
    """Why what stands under a prefix is not this client's to read; "": it is, or nothing stands.

    Args:
        what: it is, for people, as in "the history of the run".
    """
    entries = client.list(prefix)
    if any(is_sealed(entry.value) for entry in entries.values()):
        return f"{what} {NO_SECRET_HERE}"
    return "" if entries else client.why_absent("")


class _Seal:
    """The tags under one secret in one run."""

    def __init__(self, secret: str, prefix: str, run_id: str) -> None:
        # Lengths keep prefix and run id apart: both may have a "/".
        names = [part.encode(errors="surrogatepass") for part in (prefix, run_id)]
        scope = b"".join(b"%d:%s," % (len(name), name) for name in names)
        root = secret.encode(errors="surrogateescape")
        key = hmac.digest(root, b"rdzv-plugins seal 1\0" + scope, "sha256")
        # HMAC by its definition: hmac's own takes twice as long, for it begins with the key anew.
        block = key.ljust(64, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))

    def tag(self, key: str, value: bytes) -> bytes:
        path = key.encode(errors="surrogatepass")
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(b"%d:%s,%s" % (len(path), path, value))
        outer.update(inner.digest())
        return outer.digest()[:_TAG_BYTES]


class SealedClient(KeyValueClient):
    """A client whose values are sealed; see the module.

    Its `add` is a compare-and-set in a loop, since no server can count what is sealed.

    Args:
        client: which it closes when it is closed.
        prefix, run_id: of the client's namespace.
        secrets: reads the secrets; the first seals, all are accepted. Raises `UnreadableFileError`.
        file: in which they stand, read again when it changes; None: they never do.
        patience: seconds for which another run's keys must stand still before this one may begin
            under its id: a lease.

    Raises:
        UnreadableFileError: as ``secrets``.
    """

    sealed = True

    def __init__(
        self,
        client: KeyValueClient,
        prefix: str,
        run_id: str,
        secrets: Callable[[], Sequence[str]],
        file: str | None = None,
        patience: float = 15.0,
    ) -> None:
        self.client = client
        self._where = str(getattr(client, "where", client.name))
        self._scope = prefix, run_id
        self._read, self._file, self._patience = secrets, file, patience
        # Elsewhere these belong to the class; here they are those of the client.
        self.name = client.name  # type: ignore[misc]
        self.heartbeat_ms = client.heartbeat_ms  # type: ignore[misc]
        most = client.capabilities.max_value_bytes - OVERHEAD
        self.capabilities = replace(client.capabilities, max_value_bytes=most)  # type: ignore[misc]
        self.longest_poll = client.longest_poll
        self._retries = 0
        client.on_retry = self._note_retry
        self._version_of_file = self._look_at_file()
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._secrets = tuple(secrets())
        self._seals = self._derive()
        # Whether it has read, or written, a key that stands for the run: then the run is its own.
        self._belongs = False
        # What of others stood in the namespace when it was first refused, and since when.
        self._others: tuple[float, dict[str, Version]] | None = None
        self._told_of_others = self._told_of_file = False
        # The last listing, by key: what stood there, and what it was found to be.
        self._listed: dict[str, tuple[Entry, Entry]] = {}
        # By key that is waited for: the version that is known, and that of others' last value.
        self._passed: dict[str, tuple[Version | None, Version]] = {}
        self._woken = threading.Condition()
        self._interrupts = 0

    def get(self, key: str) -> Entry | None:
        return self._opened(key, self.client.get(key))

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        return self._all_opened(self.client.get_many(keys))

    def list(self, prefix: str) -> dict[str, Entry]:
        entries = self.client.list(prefix)
        self._renew()
        listed: dict[str, tuple[Entry, Entry]] = {}
        found: dict[str, Entry] = {}
        before = self._listed
        for key, entry in entries.items():
            known = before.get(key)
            # Not by the version alone: a stranger chooses that of what he writes.
            if known is not None and known[0] == entry:
                opened: Entry | None = known[1]
            else:
                opened = self._opened(key, entry)
            if opened is not None:
                listed[key], found[key] = (entry, opened), opened
        self._listed = listed
        return found

    def put(self, key: str, value: bytes) -> Version:
        self.check_size(key, value)
        return self.client.put(key, self._sealed(key, value))

    def put_many(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.check_size(key, value)
        self.client.put_many({key: self._sealed(key, value) for key, value in values.items()})

    def delete(self, key: str) -> None:
        self.client.delete(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        self.client.delete_many(keys)

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        self.check_size(key, value)
        data = self._sealed(key, value)
        entry, written = self.client.compare_and_set(key, data, expected)
        opened = None if written else self._opened(key, entry)
        replaced = 0
        while not written and expected is None and entry is not None and opened is None:
            # It counts as absent, so it is replaced; a valid one that comes first is not.
            self._refuse_what_may_live(key, entry)
            if replaced == _MOST_REPLACED:
                raise RendezvousConnectionError(
                    f"{self._where}: others write {_shown(key)} again and again, who have not the "
                    "secret: take their rights to write from them"
                )
            time.sleep(pause_after(replaced))
            replaced += 1
            entry, written = self.client.compare_and_set(key, data, entry.version)
            opened = None if written else self._opened(key, entry)
        if not written:
            return opened, False
        assert entry is not None
        self._belongs = self._belongs or key in CLAIMS
        return Entry(value, entry.version), True

    def add(self, key: str, delta: int) -> int:
        deadline, refused = time.monotonic() + _ADD_SECONDS, 0
        while True:
            seen = self.get(key)
            total = parse_counter(key, seen.value if seen is not None else b"0") + delta
            retries = self._retries
            expected = seen.version if seen is not None else None
            _, written = self.compare_and_set(key, b"%d" % total, expected)
            if written:
                return total
            if self._retries != retries:
                # An attempt whose answer was lost may have been overtaken after it was applied.
                raise RendezvousConnectionError(
                    f"the answer of {self._where} was lost: whether '{key}' was counted is unknown"
                )
            if time.monotonic() >= deadline:
                raise RendezvousConnectionError(
                    f"other clients changed '{key}' in {self._where} throughout {_ADD_SECONDS:g} "
                    "s, so nothing was counted: they are too many, or the store is too slow"
                )
            time.sleep(pause_after(refused))
            refused += 1

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        deadline, interrupts, pause = time.monotonic() + timeout, self._interrupts, 0.0
        known, passed = self._passed.get(key, (None, None))
        after = passed if passed is not None and known == version else version
        while True:
            left = max(0.0, deadline - time.monotonic())
            entry = self.client.wait(key, after, min(left, _LONGEST_PAUSE) if pause else left)
            if self._interrupts != interrupts:
                return None
            if entry is not None:
                if entry.version != version and (opened := self._opened(key, entry)) is not None:
                    return opened
                # Others write there, perhaps in a loop: look less and less often.
                after = entry.version
                if len(self._passed) >= _MOST_PASSED:
                    self._passed.clear()
                self._passed[key] = version, after
                pause = min(2 * pause or 0.01, _LONGEST_PAUSE)
                with self._woken:
                    left = max(0.0, deadline - time.monotonic())
                    self._woken.wait_for(lambda: self._interrupts != interrupts, min(pause, left))
            if self._interrupts != interrupts or time.monotonic() >= deadline or not pause:
                return None

    def interrupt(self) -> None:
        with self._woken:
            self._interrupts += 1
            self._woken.notify_all()
        self.client.interrupt()

    def expire(self, seconds: float) -> None:
        self.client.expire(seconds)

    def close(self) -> None:
        with self._woken:
            self._interrupts += 1
            self._woken.notify_all()
        self.client.close()

    def hold(self, callers: int) -> None:
        self.client.hold(callers)

    def inspect(self) -> Iterable[Finding]:
        return self.client.inspect()

    def members_up(self) -> MembersUp | None:
        return self.client.members_up()

    def why_absent(self, prefix: str) -> str:
        entries = self.client.list(prefix)
        if not entries or any(
            self._verified(key, it.value) is not None for key, it in entries.items()
        ):
            return ""
        return self._whose(next(iter(entries.values())))

    def _sealed(self, key: str, value: bytes) -> bytes:
        self._renew()
        return MARK + self._seals[0].tag(key, value) + value

    def _all_opened(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        opened = {key: self._opened(key, entry) for key, entry in entries.items()}
        return {key: entry for key, entry in opened.items() if entry is not None}

    def _opened(self, key: str, entry: Entry | None) -> Entry | None:
        """The entry with the value alone; None: it is absent, or not ours."""
        if entry is None:
            return None
        self._renew()
        value = self._verified(key, entry.value)
        if value is not None:
            self._belongs = self._belongs or key in CLAIMS
            return Entry(value, entry.version)
        if self._belongs and not self._told_of_others:
            self._told_of_others = True
            log.warning(
                "run '%s': what stands at %s is not sealed with the run's secret, and counts as "
                "absent: a node or command has another secret or none, or a stranger writes there",
                self._scope[1],
                _shown(key),
            )
        return None

    def _verified(self, key: str, data: bytes) -> bytes | None:
        """The value in what stands at the key; None: nobody with the secret wrote it there."""
        if len(data) < OVERHEAD or not data.startswith(MARK):
            return None
        tag, value = data[len(MARK) : OVERHEAD], data[OVERHEAD:]
        for seal in self._seals:
            if hmac.compare_digest(seal.tag(key, value), tag):
                return value
        return None

    def _refuse_what_may_live(self, key: str, entry: Entry) -> None:
        """Raise `ForeignValueError` unless what stands at the key may be written over."""
        if self._belongs or key not in CLAIMS:
            return
        now, whose, before = time.monotonic(), self._whose(entry), self._others
        found: dict[str, Version] = {}
        if before is None or now - before[0] >= self._patience:
            for it, stands in self.client.list("").items():
                if self._verified(it, stands.value) is None:
                    found[it] = stands.version
            self._others = now, found
        if before is None or now - before[0] < self._patience:
            raise ForeignValueError(
                f"{whose}; this node begins another in its place if nothing of it changes for "
                f"{self._patience:g} s"
            )
        if any(version != before[1].get(it) for it, version in found.items()):
            raise ForeignValueError(f"{whose}; its nodes live, so this one does not begin another")

    def _whose(self, entry: Entry) -> str:
        prefix, run_id = self._scope
        of_runs = run_id.startswith(RESERVED)
        named = f"what stands under '{prefix}/{run_id}'" if of_runs else f"run '{run_id}'"
        if is_sealed(entry.value):
            return (
                f"{named} in {self._where} is sealed with another secret than this one's: give all "
                "nodes and commands the same, in $RDZV_PLUGINS_SECRET or secret_file"
            )
        return (
            f"{named} in {self._where} is not sealed, for its nodes have no secret, and one is set "
            "here: set it for all nodes and commands of a run, or for none"
        )

    def _note_retry(self) -> None:
        self._retries += 1
        if self.on_retry is not None:
            self.on_retry()

    def _derive(self) -> tuple[_Seal, ...]:
        return tuple(_Seal(secret, *self._scope) for secret in self._secrets)

    def _look_at_file(self) -> tuple[int, int, int] | None:
        if self._file is None:
            return None
        with suppress(OSError):
            found = os.stat(self._file)
            return found.st_mtime_ns, found.st_ino, found.st_size
        return None

    def _renew(self) -> None:
        """Read the secrets again if their file has changed; one that is away is being replaced."""
        if self._file is None or (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        version = self._look_at_file()
        if version is None or version == self._version_of_file:
            return
        with suppress(UnreadableFileError):
            found = tuple(self._read())
            self._version_of_file = version
            if not {*found} & {*self._secrets}:
                # Else nodes of a run that lives would write over each other's values.
                log.warning(
                    "run '%s': secret_file '%s' has none of the secrets that this process uses, "
                    "which goes on with those: write the new one below the old one first, on all "
                    "nodes",
                    self._scope[1],
                    self._file,
                )
                return
            self._secrets = found
            self._seals, self._listed = self._derive(), {}


def _shown(key: str) -> str:
    """A key, which others may have written, as text for people."""
    return ascii(key[:_KEY_SHOWN])
