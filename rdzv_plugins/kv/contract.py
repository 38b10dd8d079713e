"""The key-value contract that every store implements.

A client is bound to one namespace, ``<prefix>/<run id>/``, and its keys are relative to it. Keys
are non-empty ``str``, values ``bytes``. Every method except `wait` ends within the client's request
timeout; `add` may take twelve request timeouts, if other clients keep changing the counter. Every
client is safe to use from several threads.

Errors: `RendezvousConnectionError` (the store could not be reached within the request timeout), its
subclasses `AccessDeniedError` (the store answers, and refuses this client) and `ClientClosedError`
(`close` was called), `RendezvousStateError` (a value is unreadable or larger than the store's
limit), `ValueError` (a bad option; the message names the option and the allowed values).

Clients raise the errors of this module, which needs no torch. Once ``rdzv_plugins.torch`` is
imported, each of them is also a subclass of torch's error of the same name.
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

Version = Hashable
"""Opaque. Equal versions of a key mean equal bytes, also across deletes and restarts."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of a JSON decoder for damaged or foreign bytes."""

_COUNTER = re.compile(rb"-?[0-9]{1,19}")


class RendezvousError(Exception):
    """The base of the errors of a store's client; a bad option raises `ValueError`."""


class RendezvousConnectionError(RendezvousError):
    """The store could not be reached within the request timeout; a retry may help."""


class RendezvousStateError(RendezvousError):
    """The store answers, but a value is unreadable or too large; a retry does not help."""


class AccessDeniedError(RendezvousConnectionError):
    """The store answers, and refuses this client: its credentials, its rights, its certificate.

    Only an answer of the server raises this error. If this client does not trust the server, the
    error is a `RendezvousConnectionError`.
    """


class LateCredentialsError(RendezvousConnectionError):
    """This host has no credentials yet; its metadata service may start later."""


class ClientClosedError(RendezvousConnectionError):
    """The client was closed: a retry cannot succeed."""

    def __init__(self, where: str) -> None:
        super().__init__(f"the connection to {where} is closed")


# A msgspec struct is created three times as fast as a dataclass; a leader lists thousands.
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
        ttl: the server itself deletes an expired namespace; False: the namespace reads as empty.
        max_value_bytes: the largest value; a larger value raises `RendezvousStateError`.
        atomic: a `put_many` with this number of keys is written as a whole or not at all.
    """

    push: bool
    linearizable: bool
    batch: bool
    ttl: bool
    max_value_bytes: int
    atomic: range = range(1, 2)


class MembersUp(msgspec.Struct, frozen=True):
    """How many of a store's members are up; each request needs a majority."""

    up: int
    size: int

    def __str__(self) -> str:
        more = self.up - (self.size // 2 + 1)
        survives = f"survives the loss of {more} more" if more else "survives no further loss"
        state = survives if more >= 0 else "has no majority, so nothing can be written"
        return f"{self.up} of {self.size} members of the store are up; it {state}"


class KeyValueClient(ABC):
    """A connection to one namespace of a store.

    The constructor connects: it raises the error of an unreachable store, a wrong password or a bad
    option.
    """

    name: ClassVar[str]
    """The store's name in messages, usually the name of its ``--rdzv-backend``."""

    options: ClassVar[type[Any]]
    """The class of its options, a `settings.options.StoreOptions`. `open_client` makes a client
    with ``(endpoint, namespace, options, request_timeout)``; the timeout is in seconds."""

    capabilities: ClassVar[Capabilities]

    heartbeat_ms: ClassVar[float | None] = None
    """Milliseconds of the server's CPU per heartbeat of a node, with the reads that belong to it;
    None: not measured. ``rdzv check`` derives from it how many nodes an interval suits."""

    default_port: ClassVar[int | None] = None
    """The server's port if the endpoint names none; None: the endpoint's scheme decides."""

    tls_schemes: ClassVar[tuple[str, ...]] = ("https",)
    """The schemes of an endpoint that ask for TLS."""

    begins_with_tls: ClassVar[bool] = True
    """A TLS connection begins with the handshake; False: the client first asks the server."""

    user_is_token: ClassVar[bool] = False
    """Whether the endpoint's user without a password is a secret."""

    run_by: ClassVar[str] = "servers"
    """What the endpoint names: ``servers``; ``agents`` of the same servers, perhaps one on each
    host; or ``nodes`` of the run, which run the store themselves (`attend`)."""

    sealed: ClassVar[bool] = False
    """Whether the client returns only values that a holder of the run's secret wrote."""

    on_retry: Callable[[], object] | None = None
    """Called before each further attempt at a request."""

    longest_poll: float = 0.1
    """The longest pause in seconds between two polls of `wait`, if the store cannot push."""

    @abstractmethod
    def get(self, key: str) -> Entry | None:
        """Read a key; linearizable. None: the key does not exist."""

    @abstractmethod
    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        """Write if the key's version is ``expected`` (None: if the key does not exist); atomic.

        Returns the new entry and True, or the current entry (None: there is none) and False. A
        version that no read or write returned is refused without an error. After a lost answer the
        client reads the key back before it returns.
        """

    @abstractmethod
    def put(self, key: str, value: bytes) -> Version:
        """Write unconditionally, and return the new version."""

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
        `RendezvousConnectionError` if the answer was lost. Then the store may have added already,
        and a retry could count twice.
        """

    @abstractmethod
    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        """Return the entry as soon as its version differs from ``version``.

        ``version`` None: as soon as the key exists. Returns None after ``timeout`` seconds, on
        `interrupt` and on `close`; a deletion need not end the wait. It never misses a change since
        the read that returned ``version``.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Make every current `wait` return None; the client stays usable.

        Sends nothing to the store and never blocks, even while the store hangs. Does not end a
        later `wait`. Several threads may call it at once.
        """

    @abstractmethod
    def expire(self, seconds: float) -> None:
        """Set the deadline, ``seconds`` from now, after which the whole namespace reads as empty.

        The deadline covers later writes of this client, and of clients that have read a key since
        the call. A later call moves it forward or back. 0: the namespace is empty at once, and
        earlier deadlines end, so that later writes stay. Expired keys never come back, and a run
        that begins afterwards has no deadline until a client sets one. The server's clock counts,
        if the store has one.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the connection and end every `wait`; idempotent.

        Later calls raise `ClientClosedError`; a later `wait` returns None.
        """

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        """Read several keys; absent keys are left out."""
        found = {key: self.get(key) for key in keys}
        return {key: entry for key, entry in found.items() if entry is not None}

    def put_many(self, values: Mapping[str, bytes]) -> None:
        """Write several keys, in order; atomic for the numbers of keys in `Capabilities.atomic`.

        If the client is killed, or loses its connection, only the first keys may be written.
        """
        for key, value in values.items():
            self.put(key, value)

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete several keys."""
        for key in keys:
            self.delete(key)

    def hold(self, callers: int) -> None:  # noqa: B027 - most stores limit none
        """Open and keep the connections that ``callers`` concurrent callers need.

        Only stores whose servers limit connections do anything. Raises
        `RendezvousConnectionError` if the server has too few left.
        """

    def inspect(self) -> Iterable[Finding]:
        """Findings about the server for `rdzv check`: its version, role, rights.

        Only reads. If the user may not ask for something, the finding has `Mark.UNKNOWN`. Raises
        `RendezvousConnectionError`.
        """
        return ()

    def members_up(self) -> MembersUp | None:
        """The members of a store that nodes run; None: the store has servers.

        Raises `RendezvousConnectionError`.
        """
        return None

    def why_absent(self, prefix: str) -> str:
        """Why no key under a prefix is readable to this client, for people; "": some are."""
        return ""

    @classmethod
    def locate(cls, endpoint: str) -> Place:
        """The servers' hosts, from the endpoint; none if the endpoint is malformed."""
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
        """The options of a client for this run; a store may derive options from the run's id."""
        return options

    @classmethod
    def clusters(cls, endpoint: str, options: Any) -> tuple[set[str], bool]:
        """The clusters of nodes that run this store at the endpoint, and whether all hosts answer.

        With a cluster in ``options``, only this one is looked for.
        """
        return set(), False

    @classmethod
    def attend(
        cls, endpoint: str, options: Any, local_addr: str | None, run_id: str
    ) -> Attendance | None:
        """Begin this node's part in a store that nodes run; None: the store has servers.

        Args:
            endpoint, run_id: as given to torchrun.
            options: of the class `options`.
            local_addr: as given to torchrun, or the address that ``interface`` or ``network``
                selects; None: none of them is given.
        """
        return None

    @classmethod
    def inspect_attendance(
        cls, endpoint: str, options: Any, local_addr: str | None
    ) -> Generator[Finding, None, bool]:
        """Findings for `rdzv check` about `attend`, whose arguments it has.

        Yields the findings, and returns whether the store can be tried now.
        """
        yield from ()
        return True

    def check_size(self, key: str, value: bytes) -> None:
        """Raise `RendezvousStateError`, with the limit, if the value is too large."""
        limit = self.capabilities.max_value_bytes
        if len(value) > limit:
            raise RendezvousStateError(
                f"the value of '{key}' has {len(value):,} bytes; "
                f"{self.name} holds at most {limit:,}"
            )


class Attendance(ABC):
    """A node's part in a store that the nodes of a run run themselves."""

    @abstractmethod
    def open(self, connect: Callable[[], KeyValueClient], patience: float) -> KeyValueClient:
        """Wait until the store is usable, and connect.

        Raises:
            RendezvousConnectionError: the wait took longer than ``patience`` seconds.
        """

    @abstractmethod
    def member_runs(self) -> bool:
        """Whether this host's member of the store runs; the first call starts it.

        Raises:
            ValueError: this host has no member.
        """

    @abstractmethod
    def stay(self) -> None:
        """Make `close` wait for the other nodes without a limit, because this node is drained."""

    @abstractmethod
    def hurry(self) -> None:
        """Make a current or later `close` short, because the process must end."""

    @abstractmethod
    def close(self) -> None:
        """End this part once no other node needs it, or after a time; idempotent."""


def parse_counter(key: str, value: bytes) -> int:
    """The 64-bit integer in a counter's value; raises `RendezvousStateError` for another value."""
    if _COUNTER.fullmatch(value) is None or not -(1 << 63) <= int(value) < 1 << 63:
        raise RendezvousStateError(f"the value of '{key}' is not a counter")
    return int(value)
