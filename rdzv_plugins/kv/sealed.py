"""Sealed values: without the run's secret, a writer can neither write nor change a valid value.

`SealedClient` wraps the client of any store. Each value begins with `MARK` and a tag: HMAC-SHA256
over the store's key and the value. The HMAC's key is derived from the secret, the prefix and the
run id, so a value is valid only at its own key in its own run. The tag is verified before any code
parses the value. An invalid value counts as absent, and is overwritten.

A seal does not encrypt, and does not stop deletion or the replay of an earlier value of the same
key; the protocol refuses values that are older than what a node has seen.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
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
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import UnreadableFileError
from rdzv_plugins.settings.run_ids import RESERVED

log = logging.getLogger(__name__)

MARK = b"\0rs1"
"""The beginning of a sealed value, and of no document. Its number changes with the format."""

# Half of SHA-256, as RFC 2104 advises; a record has about 300 bytes.
_TAG_BYTES = 16
OVERHEAD = len(MARK) + _TAG_BYTES
"""The bytes that a seal adds to a value."""

NO_SECRET_HERE = (
    "is sealed with a secret, and none is set here: set that of its nodes, in $RDZV_PLUGINS_SECRET "
    "or secret_file"
)
"""Continues "the run ..."."""

# These keys mean that a run exists. A client that has read no valid value of the run overwrites an
# invalid one only after no invalid value of the namespace has changed for a lease.
CLAIMS = ("state", "torch-state")

# How often in a row a client overwrites an invalid value before it reports the other writer.
_MOST_REPLACED = 10
# The longest pause, in seconds, between two reads of a key to which others keep writing.
_LONGEST_PAUSE = 1.0
# The most keys whose last invalid version is remembered.
_MOST_PASSED = 1000
# How long, in seconds, `add` retries while other clients are faster.
_ADD_SECONDS = 60.0
# How often, in seconds, the secret's file is checked for a change.
_LOOK_SECONDS = 1.0
_KEY_SHOWN = 80


class ForeignValueError(RendezvousStateError):
    """A run whose values this client cannot verify has this id, and may live."""


def is_sealed(data: bytes) -> bool:
    """Whether a client with some secret wrote the value."""
    return data.startswith(MARK)


def why_unreadable(client: KeyValueClient, what: str, prefix: str = "") -> str:
    """Why this client cannot read the values under a prefix; "": it can, or there are none.

    Args:
        what: names these values for people, such as "the history of the run".
    """
    entries = client.list(prefix)
    if any(is_sealed(entry.value) for entry in entries.values()):
        return f"{what} {NO_SECRET_HERE}"
    return "" if entries else client.why_absent("")


class _Seal:
    """The tags under one secret in one run."""

    def __init__(self, secret: str, prefix: str, run_id: str) -> None:
        # The lengths separate prefix and run id, which may both contain a "/".
        names = [part.encode(errors="surrogatepass") for part in (prefix, run_id)]
        scope = b"".join(b"%d:%s," % (len(name), name) for name in names)
        root = secret.encode(errors="surrogateescape")
        key = hmac.digest(root, b"rdzv-plugins seal 1\0" + scope, "sha256")
        # HMAC by its definition; the `hmac` module takes twice as long, because it hashes the key
        # each time.
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
    """A client with sealed values. It closes ``client`` when it is closed.

    Its `add` is a compare-and-set in a loop, because no server can add to a sealed value.

    Args:
        secrets: reads the secrets; the first seals, all verify. Raises `UnreadableFileError`.
        file: the secrets' file, which is read again when it changes; None: they never change.
        patience: a lease, in seconds. A new run may take the id of another run after the keys of
            that run have not changed for this time.

    Raises:
        UnreadableFileError: from ``secrets``.
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
        self._read, self._file, self._patience = FromFiles(secrets, file), file, patience
        # Other clients have these attributes on the class.
        self.name = client.name  # type: ignore[misc]
        self.heartbeat_ms = client.heartbeat_ms  # type: ignore[misc]
        most = client.capabilities.max_value_bytes - OVERHEAD
        self.capabilities = replace(client.capabilities, max_value_bytes=most)  # type: ignore[misc]
        self.longest_poll = client.longest_poll
        self._retries = 0
        client.on_retry = self._note_retry
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._secrets = self._found = self._read.get()
        self._seals = self._derive()
        # Whether the run is this client's own: it has read or written a valid value in `CLAIMS`.
        self._belongs = False
        # When this client was first refused, and the versions of the invalid values then.
        self._others: tuple[float, dict[str, Version]] | None = None
        self._warned_of_others = False
        # The last listing, by key: the sealed entry, and the verified one.
        self._listed: dict[str, tuple[Entry, Entry]] = {}
        # By awaited key: the caller's version, and the version of the last invalid value.
        self._passed: dict[str, tuple[Version | None, Version]] = {}
        self._woken = threading.Condition()
        self._interrupts = 0

    def get(self, key: str) -> Entry | None:
        return self._opened(key, self.client.get(key))

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        entries = self.client.get_many(keys).items()
        opened = {key: self._opened(key, entry) for key, entry in entries}
        return {key: entry for key, entry in opened.items() if entry is not None}

    def list(self, prefix: str) -> dict[str, Entry]:
        entries = self.client.list(prefix)
        self._renew()
        listed: dict[str, tuple[Entry, Entry]] = {}
        found: dict[str, Entry] = {}
        before = self._listed
        for key, entry in entries.items():
            known = before.get(key)
            # Compare the values too, because a stranger can choose the version of his value.
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
            # The invalid value counts as absent and is replaced; a valid value is not replaced.
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
                # An attempt whose answer was lost may have counted before another client did.
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
                # Others may write there in a loop: wait longer each time.
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

    def _opened(self, key: str, entry: Entry | None) -> Entry | None:
        """The entry without its seal; None: it is absent or invalid."""
        if entry is None:
            return None
        self._renew()
        value = self._verified(key, entry.value)
        if value is not None:
            self._belongs = self._belongs or key in CLAIMS
            return Entry(value, entry.version)
        if self._belongs and not self._warned_of_others:
            self._warned_of_others = True
            log.warning(
                "run '%s': what stands at %s is not sealed with the run's secret, and counts as "
                "absent: a node or command has another secret or none, or a stranger writes there",
                self._scope[1],
                _shown(key),
            )
        return None

    def _verified(self, key: str, data: bytes) -> bytes | None:
        """The value of valid data; None: no holder of a secret wrote the data for this key."""
        if len(data) < OVERHEAD or not data.startswith(MARK):
            return None
        tag, value = data[len(MARK) : OVERHEAD], data[OVERHEAD:]
        for seal in self._seals:
            if hmac.compare_digest(seal.tag(key, value), tag):
                return value
        return None

    def _refuse_what_may_live(self, key: str, entry: Entry) -> None:
        """Raise `ForeignValueError` if the entry may belong to a living run."""
        if self._belongs or key not in CLAIMS:
            return
        now, whose, before = time.monotonic(), self._whose(entry), self._others
        found: dict[str, Version] = {}
        if before is None or now - before[0] >= self._patience:
            for it, other in self.client.list("").items():
                if self._verified(it, other.value) is None:
                    found[it] = other.version
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

    def _renew(self) -> None:
        """Read the secrets again if their file has changed; a missing file is being replaced."""
        if self._file is None or (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        with suppress(UnreadableFileError):
            found = self._read.get()
            if found is self._found:
                return
            self._found = found
            if not {*found} & {*self._secrets}:
                # Without a common secret, nodes of one run would overwrite each other's values.
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
    """A key, which a stranger may have written, as text for people."""
    return ascii(key[:_KEY_SHOWN])
