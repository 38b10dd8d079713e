"""The key-value contract that every store implements.

A client is bound to one namespace, ``<prefix>/<run id>/``; its keys are relative to it. Keys are
non-empty ``str``, values ``bytes``. Every method except `wait` ends within the client's request
timeout; only `add` may take twelve request timeouts, while other clients change the counter first.
Every client is safe to use from several threads.

Errors: `RendezvousConnectionError` (the store could not be reached within the request timeout), its
subclasses `AccessDeniedError` (the store answers, and refuses this client) and `ClientClosedError`
(`close` was called), `RendezvousStateError` (a value is unreadable or larger than the store's
limit), `ValueError` (a bad option; the message names the option and what is allowed).

They need no torch. Wherever torch meets them, they are its own errors of the same names as well:
``rdzv_plugins.torch`` sees to that. A client raises those of this module, not torch's.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from rdzv_plugins.settings.endpoint import Place, parse_endpoint

if TYPE_CHECKING:
    from rdzv_plugins.kv.findings import Finding

__all__ = [
    "UNREADABLE",
    "AccessDeniedError",
    "Attendance",
    "Capabilities",
    "ClientClosedError",
    "Entry",
    "KeyValueClient",
    "LateCredentialsError",
    "MembersUp",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousStateError",
    "Version",
    "parse_counter",
]

Version = Hashable
"""Opaque. Equal versions of a key mean equal bytes, also across deletes and restarts."""


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of a JSON decoder for bytes that this package did not write: damaged, or another's."""


_COUNTER = re.compile(rb"-?[0-9]{1,19}")


class RendezvousError(Exception):
    """The error of a store's client, except for a bad option."""


class RendezvousConnectionError(RendezvousError):
    """The store could not be reached within the request timeout; trying again may help."""


class RendezvousStateError(RendezvousError):
    """The store answers, but a value is unreadable or too large: trying again is of no use."""


class AccessDeniedError(RendezvousConnectionError):
    """The store answers, and refuses this client: its credentials, its rights, its certificate.

    The store lives, and other clients may reach it. The error is raised only for an answer of the
    server's own, never where this client does not trust the server.
    """


class LateCredentialsError(RendezvousConnectionError):
    """This host has no credentials, and may get them yet: its metadata service may come later."""


class ClientClosedError(RendezvousConnectionError):
    """The client was closed: a retry cannot succeed."""

    def __init__(self, where: str) -> None:
        super().__init__(f"the connection to {where} is closed")


# msgspec's structs are made three times as fast as dataclasses: a leader lists thousands.
class Entry(msgspec.Struct, frozen=True):
    """A value and the version under which it was read."""

    value: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a store; the conformance suite checks each attribute.

    Attributes:
        push: the store wakes `KeyValueClient.wait`; False: `wait` polls the store.
        linearizable: a read returns the latest completed write of any client.
        batch: `put_many`, `get_many` and `list` are one round trip each.
        ttl: the server itself deletes an expired namespace; False: it only reads as empty.
        max_value_bytes: the largest value; a larger one raises `RendezvousStateError`.
        atomic: of how many keys a `put_many` is written as a whole or not at all.
    """

    push: bool
    linearizable: bool
    batch: bool
    ttl: bool
    max_value_bytes: int
    atomic: range = range(1, 2)


class MembersUp(msgspec.Struct, frozen=True):
    """How many members of a store are up, of how many; a majority is needed for each request."""

    up: int
    size: int

    def __str__(self) -> str:
        more = self.up - (self.size // 2 + 1)
        survives = f"survives the loss of {more or 'none'}{' more' if more > 0 else ''}"
        told = survives if more >= 0 else "has no majority, so nothing can be written"
        return f"{self.up} of {self.size} members of the store are up; it {told}"


class KeyValueClient(ABC):
    """A connection to one namespace of a store.

    The constructor connects: an unreachable store, a wrong password or a bad option is raised
    there, not at the first request.
    """

    name: ClassVar[str]
    """The store's name in messages, usually that of ``--rdzv-backend``."""

    options: ClassVar[type[Any]]
    """The class of its options, a `settings.options.StoreOptions`. `open_client` makes a client
    with ``(endpoint, namespace, options, request_timeout)``, the last in seconds."""

    capabilities: ClassVar[Capabilities]

    heartbeat_ms: ClassVar[float | None] = None
    """Milliseconds of the server's processor time that a node's heartbeat takes, with what it reads
    then; None: not measured. ``rdzv check`` tells by it which interval fits how many nodes."""

    default_port: ClassVar[int | None] = None
    """Where a server listens if the endpoint names no port; None: as the endpoint's scheme says."""

    tls_schemes: ClassVar[tuple[str, ...]] = ("https",)
    """The schemes of an endpoint that ask for TLS."""

    begins_with_tls: ClassVar[bool] = True
    """With TLS, a connection begins with its handshake; False: the server is asked first."""

    user_is_token: ClassVar[bool] = False
    """Whether a user without a password, in the endpoint, is a secret."""

    run_by: ClassVar[str] = "servers"
    """What the endpoint names: ``servers``; ``agents`` of the same servers, of which each host may
    have its own; or ``nodes`` of the run, which keep the store up themselves (`attend`)."""

    sealed: ClassVar[bool] = False
    """Nobody without the run's secret can have written what it reads."""

    on_retry: Callable[[], object] | None = None
    """Called before each attempt after a request's first, by a client that makes several."""

    longest_poll: float = 0.1
    """Seconds between two polls of `wait` at most, where the store cannot push."""

    @abstractmethod
    def get(self, key: str) -> Entry | None:
        """Read a key; linearizable. None: it does not exist."""

    @abstractmethod
    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        """Write if the key's version is ``expected`` (None: if it does not exist); atomic.

        Returns the new entry and True, or the current entry (None: there is none) and False. A
        version that no read or write returned is refused; it is no error. After a lost answer the
        client reads the key back before it returns.
        """

    @abstractmethod
    def put(self, key: str, value: bytes) -> Version:
        """Write unconditionally; returns the new version."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete; a key that does not exist is no error."""

    @abstractmethod
    def list(self, prefix: str) -> dict[str, Entry]:
        """All entries whose keys start with ``prefix``, by full relative key."""

    @abstractmethod
    def add(self, key: str, delta: int) -> int:
        """Add to a decimal counter (absent: 0) and return the sum; atomic.

        Raises `RendezvousStateError` if the value is not a decimal integer, and
        `RendezvousConnectionError` if the answer was lost: the store may or may not have added, so
        a retry could count twice.
        """

    @abstractmethod
    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        """Return the entry as soon as its version differs from ``version``.

        ``version`` None: as soon as the key exists. Returns None after ``timeout`` seconds, on
        `interrupt` and on `close`; a deletion need not wake it. A change between the read that
        returned ``version`` and this call is never missed.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Make every `wait` that is parked now return None; the client stays usable.

        Sends nothing to the store and never blocks, even while the store hangs. Does not end a
        `wait` that begins afterwards. Several threads may call it at once.
        """

    @abstractmethod
    def expire(self, seconds: float) -> None:
        """Let the whole namespace read as empty from ``seconds`` from now on.

        This includes later writes of this client, and of clients that have read a key since the
        call. A later call moves the deadline forward or back. 0: at once; clients that know of the
        call also cancel earlier deadlines, so that later writes stay. Expired keys never come back,
        and a run that begins afterwards has no deadline until one is set. Measured on the server's
        clock if the store has one.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the connection and wake every waiter; idempotent.

        Later calls raise `ClientClosedError`; a later `wait` returns None.
        """

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        """Read several keys; absent ones are left out."""
        found = {key: self.get(key) for key in keys}
        return {key: entry for key, entry in found.items() if entry is not None}

    def put_many(self, values: Mapping[str, bytes]) -> None:
        """Write several keys, in order; atomic only for as many as `Capabilities.atomic` says.

        Where a killed client or a lost connection ends a larger one, its first keys may be written.
        """
        for key, value in values.items():
            self.put(key, value)

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete several keys."""
        for key in keys:
            self.delete(key)

    def hold(self, callers: int) -> None:  # noqa: B027 - most stores limit none
        """Open and keep the connections that so many callers need at a time.

        It does nothing where all share one, or no server limits them. Raises
        `RendezvousConnectionError` where the server has too few left.
        """

    def inspect(self) -> Iterable[Finding]:
        """This store's findings of its server, for `rdzv check`: its version, role, rights.

        Reads only, and changes nothing on the server. What the user may not ask is a finding with
        `Mark.UNKNOWN`. Raises `RendezvousConnectionError`.
        """
        return ()

    def members_up(self) -> MembersUp | None:
        """How the members of a store stand that the nodes of a run keep up; None: it has none.

        Raises `RendezvousConnectionError`.
        """
        return None

    def why_absent(self, prefix: str) -> str:
        """Why all that stands under a prefix counts as absent, for people; "": it does not."""
        return ""

    @classmethod
    def locate(cls, endpoint: str) -> Place:
        """Where an endpoint says that the servers are; no host of one that this cannot parse."""
        scheme, found, _ = endpoint.strip().lower().partition("://")
        if found and scheme == "unix":
            return Place(on_socket=True)
        port = cls.default_port
        if port is None:
            port = (443 if scheme in cls.tls_schemes else 80) if found else 0
        try:
            parsed = parse_endpoint(endpoint, default_port=port, schemes=[scheme] if found else [])
        except ValueError:
            return Place()
        return Place(parsed.hosts, of_nodes=cls.run_by == "nodes")

    @classmethod
    def of_run(cls, options: Any, run_id: str) -> Any:
        """The options of a client for this run; a store may derive some from the run's id."""
        return options

    @classmethod
    def attend(
        cls, endpoint: str, options: Any, local_addr: str | None, run_id: str
    ) -> Attendance | None:
        """Begin a node's part in a store that the nodes of a run keep up; None: a server is there.

        Args:
            endpoint, run_id: as given to torchrun.
            options: of the class `options`.
            local_addr: as given to torchrun, else this host's address as ``interface`` and
                ``network`` say; None: none of them is given.
        """
        return None

    @classmethod
    def inspect_attendance(
        cls, endpoint: str, options: Any, local_addr: str | None
    ) -> Generator[Finding, None, bool]:
        """For `rdzv check`, what `attend` would find; the arguments are those of it.

        Yields its findings, and returns whether there is a store by now that can be tried.
        """
        yield from ()
        return True

    def check_size(self, key: str, value: bytes) -> None:
        """Raise `RendezvousStateError`, naming the limit, for a value that is too large."""
        limit = self.capabilities.max_value_bytes
        if len(value) > limit:
            raise RendezvousStateError(
                f"the value of '{key}' has {len(value):,} bytes; "
                f"{self.name} holds at most {limit:,}"
            )


class Attendance(ABC):
    """A node's part in a store that the nodes of a run keep up themselves."""

    @abstractmethod
    def open(self, connect: Callable[[], KeyValueClient], patience: float) -> KeyValueClient:
        """Wait until the store can be used, and connect.

        Raises:
            RendezvousConnectionError: that took longer than ``patience`` seconds; or what
                ``connect`` raises.
        """

    @abstractmethod
    def member_runs(self) -> bool:
        """Whether this host's part of the store runs; the first call has it started.

        Raises:
            ValueError: it is to have none.
        """

    @abstractmethod
    def stay(self) -> None:
        """This node is drained: a `close` that comes is to wait for the others, however long."""

    @abstractmethod
    def hurry(self) -> None:
        """The process was told to end: a `close` that runs, or that comes, is to be short."""

    @abstractmethod
    def close(self) -> None:
        """End it, once no other node needs it, or after a time; idempotent."""


def parse_counter(key: str, value: bytes) -> int:
    """The integer in a counter's value, of 64 bits; raises `RendezvousStateError` for another."""
    if _COUNTER.fullmatch(value) is None or not -(1 << 63) <= int(value) < 1 << 63:
        raise RendezvousStateError(f"the value of '{key}' is not a counter")
    return int(value)
