"""No server: the agents of one, three or five hosts run the members of the store themselves.

The endpoint names the hosts of the members, alike on all nodes. The agent on such a host runs a
member as a thread (`stores._quorum`), which keeps what the run needs in its memory. A majority of
the members is enough for each request, and none of them leads: a member that is dead, stopped or
cut off delays nobody (`rdzv_plugins.register`).

Each run has members of its own: its id is the cluster's name, which decides on which of the ports
they listen. A host on which another program has that port takes the next one, which clients try
too.

Once a majority of the members has ended, what trains trains on, and restarts wait until a majority
is back. That goes on from what its members remember; the last writes may be missing.

A member listens at its host's address in the endpoint. A host whose own name is at loopback, as
Debian sets it up, does not know that address: its member listens at the one given as
``--local-addr``, ``interface`` or ``network``, or from which the host reaches the other members.

Keys: ``<prefix>/<run>!<epoch>/<key>``; ``<prefix>/<run>!`` is the mark, which says which epoch
counts and until when. A new epoch begins once that time is over.

Limits: values of up to 1 MiB, 32 MiB in a member. Nothing is encrypted; with a secret, members and
clients prove to each other that they know it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec

from rdzv_plugins.kv.base import STAMP_BYTES, Limit, Problem, StoreClient, Stored, segments
from rdzv_plugins.kv.contract import Attendance, Capabilities, Standing
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.register.messages import Held
from rdzv_plugins.register.proposer import Change
from rdzv_plugins.settings.endpoint import redact
from rdzv_plugins.settings.run_ids import RESERVED
from rdzv_plugins.stores.quorum.members import Members, Options
from rdzv_plugins.stores.quorum.registers import FullError, NoMajorityError, Registers
from rdzv_plugins.stores.quorum.wire import OtherClusterError, SecretError

__all__ = ["Client"]

# How long `standing` waits for members that are silent.
_PATIENCE = 0.3

# A value replaced by `_replace` is known for so many replacements more, by the bytes of its stamp.
_STAMP, _EARLIER = STAMP_BYTES - 1, 16
# A value begins with the number of these stamps, or with this where `_put` wrote it.
_PUT = b"\x80"

T = TypeVar("T")


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    """Which keys of a namespace count, and until when.

    Attributes:
        epoch: stands in the keys.
        seconds: after which the namespace is empty, counted from the acceptance; None: never.
        unique: makes each mark another value, so that its age begins anew.
    """

    epoch: str = ""
    seconds: float | None = None
    unique: bytes = b""

    def is_over(self, age: float) -> bool:
        return self.seconds is not None and age >= self.seconds


class Client(StoreClient):
    """One run in the store that its nodes run."""

    name = "quorum"
    default_port = None
    run_by = "nodes"
    options = Options
    capabilities: ClassVar[Capabilities] = Capabilities(
        push=True, linearizable=True, batch=False, ttl=False, max_value_bytes=1 << 20
    )
    heartbeat_ms = 1.1

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        super().__init__(f"quorum at {redact(endpoint)}", request_timeout)
        self._members = members = Members.of(endpoint, options)
        self._namespace = "/".join(segments(namespace, options.prefix))
        self._registers = Registers(members.dialled, members.greeting, options.secret_bytes())
        self._epoch = ""
        self._connect(lambda limit: self._marked(limit))

    @classmethod
    def of_run(cls, options: Any, run_id: str) -> Options:
        """With the run's id as the name of the cluster, if it has none."""
        assert isinstance(options, Options)
        if options.cluster is None and run_id and not run_id.startswith(RESERVED):
            return replace(options, cluster=run_id)
        return options

    @classmethod
    def attend(
        cls, endpoint: str, options: Any, local_addr: str | None, run_id: str
    ) -> Attendance | None:
        # The member's thread; whoever only looks needs none of it.
        from rdzv_plugins.stores.quorum.attending import Attending

        assert isinstance(options, Options)
        return Attending(Members.of(endpoint, options), local_addr, run_id)

    @classmethod
    def inspect_attendance(
        cls, endpoint: str, options: Any, local_addr: str | None
    ) -> Generator[Finding, None, bool]:
        from rdzv_plugins.stores.quorum import check

        assert isinstance(options, Options)
        return (yield from check.check(endpoint, options, local_addr))

    def take_part(self) -> None:
        """Have the members stay until this client is closed."""
        self._registers.is_node = True
        self._registers.renew()
        self._call(lambda limit: self._marked(limit))

    def inspect(self) -> Iterable[Finding]:
        standing = self.standing()
        mark, advice = Mark.OK, ""
        if standing.up < standing.size:
            mark, advice = Mark.WARNING, "start the agents of the other hosts"
        values = {"members": standing.size, "up": standing.up}
        yield Finding(mark, "members", str(standing), advice, values)
        plain = "plain, not encrypted: members and clients have no TLS"
        yield Finding(Mark.OK, "TLS", plain, values={"encrypted": False})

    def standing(self) -> Standing:
        self._call(self._marked)  # In which generation most members take part.
        up = self._call(lambda limit: self._registers.up(limit.within(_PATIENCE)))
        return Standing(up, len(self._members.hosts))

    # The hooks.

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        asked = [*keys]

        def read() -> tuple[dict[str, Held], Held | None]:
            found = self._registers.read([*map(self._key, asked), self._mark], limit)
            return found, found.get(self._mark)

        found = self._in_epoch(read, limit)
        return {key: _stored(held) for key in asked if (held := found.get(self._key(key)))}

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        def scan() -> tuple[dict[str, Held], Held | None]:
            return self._registers.read(self._key(prefix), limit), self._marked(limit)

        found = self._in_epoch(scan, limit)
        cut = len(self._key(""))
        return {key[cut:]: _stored(held) for key, held in found.items()}

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        before, tries = seen.guard if seen is not None else None, 0

        def change(value: bytes | None) -> bytes | None:
            nonlocal tries
            tries += value == before
            return _after(value, data) if value == before else value

        (held,) = self._change({key: change}, limit)
        earlier, now = _split(held or b"")
        # Another client may have settled this value and replaced it before this one was told.
        known = {now[:_STAMP], *earlier}
        if data[:_STAMP] in known:
            return True
        if tries and len(earlier) == _EARLIER and _split(before or b"")[1][:_STAMP] not in known:
            raise NoMajorityError("others replaced the value too often to tell what became of it")
        return False

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        puts = {key: partial(_put, _PUT + data) for key, data in values.items()}
        self._change(puts, limit, lambda value: value.startswith(_PUT))

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        self._change(dict.fromkeys(keys, partial(_put, None)), limit)

    def _expire(self, seconds: float, limit: Limit) -> None:
        self._in_epoch(lambda: (None, self._marked(limit)), limit)
        mark = _Mark(self._epoch, seconds, secrets.token_bytes(4))
        self._registers.change(self._mark, partial(_put, msgspec.msgpack.encode(mark)), limit)

    def _park(self, key: str, seen: Stored | None, limit: Limit) -> Stored | None:
        held = self._registers.read([self._key(key)], limit).get(self._key(key), Held())
        if held.value == (seen.guard if seen is not None else None):
            self._registers.watch(self._key(key), held, limit)
        return None

    def _problem(self, error: Exception) -> Problem | None:
        if isinstance(error, SecretError):
            return Problem(
                "refused this client: give all nodes and commands the same secret, in "
                "$RDZV_PLUGINS_SECRET or secret_file",
                denied=True,
            )
        if isinstance(error, FullError):
            return Problem(
                "is full: its members hold up to 32 MiB each; delete runs that are over, with "
                "rdzv clean",
                retryable=True,
            )
        if isinstance(error, OtherClusterError):
            cluster = self._members.cluster
            return Problem(f"has no member of '{cluster}' on its ports: {error}", retryable=True)
        if isinstance(error, OSError):
            return self._unreachable(error)
        return None

    def _unreachable(self, error: Exception, *, undone: bool = False, hint: str = "") -> Problem:
        few = "a majority of its members" if len(self._members.hosts) > 1 else "its member"
        return Problem(
            f"could not be reached within {self.timeout:g} s "
            f"({str(error) or type(error).__name__}): {few} must run, which the agents of "
            f"'{self._members.cluster}' on these hosts start",
            retryable=True,
            undone=undone,
        )

    def _disconnect(self) -> None:
        self._registers.close()

    # Epochs.

    @property
    def _mark(self) -> str:
        return f"{self._namespace}!"

    def _key(self, key: str) -> str:
        return f"{self._namespace}!{self._epoch}/{key}"

    def _marked(self, limit: Limit) -> Held | None:
        return self._registers.read([self._mark], limit).get(self._mark)

    def _in_epoch(self, request: Callable[[], tuple[T, Held | None]], limit: Limit) -> T:
        """The answer to a request that was made in the epoch of the mark, which it reads too."""
        while True:
            asked = self._epoch
            answer, held = request()
            mark = _mark_in(held)
            if held is not None and mark.is_over(held.age):
                fresh = msgspec.msgpack.encode(_Mark(secrets.token_hex(4)))
                change = partial(_replaced, held.value, fresh)
                if self._registers.change(self._mark, change, limit) == fresh:
                    self._empty(mark.epoch, limit)
            elif mark.epoch == asked:
                return answer
            else:
                self._epoch = mark.epoch

    def _change(
        self,
        changes: Mapping[str, Change],
        limit: Limit,
        is_put: Callable[[bytes], bool] | None = None,
    ) -> list[bytes | None]:
        """Change registers of this epoch, in order; returns what they hold then."""
        self._in_epoch(lambda: (None, self._marked(limit)), limit)
        keys = {self._key(key): change for key, change in changes.items()}
        return [self._registers.change(key, it, limit, is_put) for key, it in keys.items()]

    def _empty(self, epoch: str, limit: Limit) -> None:
        """Delete the keys of an epoch that is over; nobody else would."""
        for key in self._registers.read(f"{self._namespace}!{epoch}/", limit):
            self._registers.change(key, partial(_put, None), limit)


def _after(value: bytes | None, data: bytes) -> bytes:
    """A register's value: what it holds, behind the stamps of what it held before."""
    earlier, before = _split(value) if value is not None else ([], b"")
    stamps = [before[:_STAMP], *earlier][:_EARLIER] if len(before) >= _STAMP else []
    return bytes([len(stamps)]) + b"".join(stamps) + data


def _split(value: bytes) -> tuple[list[bytes], bytes]:
    end = 1 + (value[0] % _PUT[0] if value else 0) * _STAMP
    return [value[i : i + _STAMP] for i in range(1, end, _STAMP)], value[end:]


def _put(data: bytes | None, _: bytes | None) -> bytes | None:
    return data


def _replaced(old: bytes | None, new: bytes, value: bytes | None) -> bytes | None:
    return new if value == old else value


def _mark_in(held: Held | None) -> _Mark:
    if held is not None and held.value is not None:
        # What is not ours counts as absent, as everywhere.
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(held.value, type=_Mark)
    return _Mark()


def _stored(held: Held) -> Stored:
    assert held.value is not None
    return Stored.parse(_split(held.value)[1], held.value)
