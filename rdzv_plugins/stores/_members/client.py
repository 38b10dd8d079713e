"""The client of a quorum: requests to all members at once, done with the answers of a majority."""

from __future__ import annotations

import contextlib
import random
import secrets
import selectors
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec

from rdzv_plugins.kv.base import (
    STAMP_BYTES,
    Limit,
    Problem,
    StoreClient,
    Stored,
    WokenError,
)
from rdzv_plugins.kv.contract import Capabilities
from rdzv_plugins.kv.retry import pause_after
from rdzv_plugins.register.messages import Answer, Found, Held, Refused, Watch
from rdzv_plugins.register.proposer import Change, Changing, Look, Outcome, Proposer, keep
from rdzv_plugins.stores._members.wire import (
    CLIENT,
    OtherClusterError,
    SecretError,
    Wire,
    dial,
    encode,
)

__all__ = ["Links", "MembersClient"]

_MOST_BYTES = 256 << 20
# A member that refuses, or has no answer for so long, is passed over in this attempt.
_ATTEMPT_SECONDS = 0.1, 2.0
_DIAL_SECONDS = 1.0

REACHED, GONE = 0, -1

# A value replaced by `_replace` is known for so many replacements more, by the bytes of its stamp.
_STAMP, _EARLIER = STAMP_BYTES - 1, 16

_BREAKS = OSError, msgspec.MsgspecError, SecretError, OtherClusterError
_decode_answer = msgspec.msgpack.Decoder(tuple[int, Answer]).decode

Place = tuple[str, int]
T = TypeVar("T")
A = TypeVar("A", Changing, Look)


class FullError(Exception):
    """The members have no room for the value."""


class NoMajorityError(OSError):
    """Too few members answer."""


class Links:
    """Connections to all members, for one request at a time.

    Attributes:
        refused: why the last member that answered let nobody in.
    """

    def __init__(self, places: Sequence[Sequence[Place]], cluster: str, secret: bytes) -> None:
        self._places, self._cluster, self._secret = places, cluster, secret
        self._poll = selectors.DefaultSelector()
        self._members: dict[int, Wire] = {}
        # Connections that are being made, since when.
        self._dials: dict[Wire, tuple[int, float]] = {}
        self._dial_at = [0.0] * len(places)
        self._numbers = 0
        self._woken: int | None = None
        self.refused: Exception | None = None

    def close(self) -> None:
        for wire in [*self._members.values(), *self._dials]:
            wire.close()
        self._poll.close()

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def send(self, member: int, number: int, request: Any) -> bool:
        """Whether there is a connection to this member; its answer may still never come."""
        wire = self._members.get(member)
        if wire is None:
            return False
        wire.send(encode(number, request))
        return self._flush(wire)

    @property
    def connected(self) -> int:
        return len(self._members)

    def poll(self, limit: Limit, until: float) -> list[tuple[int, int, Answer | None]]:
        """What members have said by ``until``: who, the number of a request, and the answer to it.

        Where a connection was made or has broken, the number is `REACHED` or `GONE`.
        """
        self._dial()
        self._heed(limit)
        wait = min(limit.seconds, max(0.0, until - time.monotonic()), 0.5)
        got: list[tuple[int, int, Answer | None]] = []
        for key, events in self._poll.select(wait):
            if key.data is None:
                raise WokenError
            got += self._serve(key.data, events)
        return got

    def watch(self, watch: Watch, limit: Limit) -> None:
        """Return once a member holds something newer, or too few of them watch."""
        numbers = {self.number(): member for member in range(len(self._places))}
        lost = sum(not self.send(member, number, watch) for number, member in numbers.items())
        while 2 * lost < len(numbers):
            for _, number, answer in self.poll(limit, limit.deadline):
                if number in numbers and isinstance(answer, Found):
                    return
                lost += number == GONE or (number in numbers and isinstance(answer, Refused))

    def _heed(self, limit: Limit) -> None:
        wanted = limit.wake.fd if limit.wake is not None else None
        if wanted != self._woken:
            if self._woken is not None:
                self._poll.unregister(self._woken)
            if wanted is not None:
                self._poll.register(wanted, selectors.EVENT_READ, None)
            self._woken = wanted

    def _dial(self) -> None:
        now = time.monotonic()
        for wire, (_, since) in [*self._dials.items()]:
            if now > since + _DIAL_SECONDS:
                self._end(wire)
        for member, places in enumerate(self._places):
            if member in self._members or now < self._dial_at[member]:
                continue
            self._dial_at[member] = now + _DIAL_SECONDS * random.uniform(0.3, 1.0)
            for host, port in places:
                with contextlib.suppress(OSError):
                    line = dial(host, port)
                    wire = Wire(line, self._cluster, self._secret, CLIENT, False, _MOST_BYTES)
                    self._dials[wire] = member, now
                    self._poll.register(line, selectors.EVENT_READ | selectors.EVENT_WRITE, wire)

    def _serve(self, wire: Wire, events: int) -> list[tuple[int, int, Answer | None]]:
        got: list[tuple[int, int, Answer | None]] = []
        try:
            if events & selectors.EVENT_READ:
                for frame in wire.receive():
                    if wire.peer is not None:
                        number, answer = _decode_answer(frame)
                        got.append((wire.peer, number, answer))
            if wire in self._dials and wire.peer is not None:
                member, _ = self._dials.pop(wire)
                if wire.peer != member or member in self._members:
                    raise ConnectionError("another member is there")
                self._members[member] = wire
                got.append((member, REACHED, None))
            self._flush(wire)
        except _BREAKS as error:
            if isinstance(error, SecretError | OtherClusterError):
                self.refused = error
            got += self._end(wire)
        return got

    def _flush(self, wire: Wire) -> bool:
        try:
            wire.flush()
        except OSError:
            self._end(wire)
            return False
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.unsent else 0)
        self._poll.modify(wire.line, wanted, wire)
        return True

    def _end(self, wire: Wire) -> list[tuple[int, int, Answer | None]]:
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(wire.line)
        wire.close()
        self._dials.pop(wire, None)
        gone = [member for member, it in self._members.items() if it is wire]
        for member in gone:
            del self._members[member]
            self._dial_at[member] = 0.0
        return [(member, GONE, None) for member in gone]


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


class MembersClient(StoreClient):
    """One namespace of the registers that members keep.

    Args:
        where: names the members in errors.
        places: where each member may listen.
        cluster, secret: as of `Wire`.
    """

    name = "quorum"
    capabilities: ClassVar[Capabilities] = Capabilities(
        push=True, linearizable=True, batch=True, ttl=False, max_value_bytes=1 << 20
    )

    def __init__(
        self,
        where: str,
        places: Sequence[Sequence[Place]],
        cluster: str,
        secret: bytes,
        namespace: str,
        request_timeout: float,
    ) -> None:
        super().__init__(where, request_timeout)
        self._places, self._cluster, self._secret = places, cluster, secret
        self._namespace = namespace
        self._idle: list[Links] = []
        self._proposer = Proposer(len(places), random.Random(secrets.randbits(64)))
        self._epoch = ""
        self._connect(lambda limit: self._ask(["?"], limit))

    # The hooks.

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        asked = [*keys]

        def read() -> tuple[dict[str, Held], Held | None]:
            found = self._ask([*map(self._key, asked), self._mark], limit)
            return found, found.get(self._mark)

        found = self._in_epoch(read, limit)
        return {key: _stored(held) for key in asked if (held := found.get(self._key(key)))}

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        def scan() -> tuple[dict[str, Held], Held | None]:
            return self._ask(self._key(prefix), limit), self._marked(limit)

        found = self._in_epoch(scan, limit)
        cut = len(self._key(""))
        return {key[cut:]: _stored(held) for key, held in found.items()}

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        before = seen.guard if seen is not None else None

        def change(value: bytes | None) -> bytes | None:
            return _after(value, data) if value == before else value

        earlier, now = _split(self._change(key, change, limit) or b"\0")
        # Another client may have settled this value and replaced it before this one was told.
        return now == data or data[:_STAMP] in earlier

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        for key, data in values.items():
            self._change(key, partial(_put, _after(None, data)), limit)

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        for key in keys:
            self._change(key, partial(_put, None), limit)

    def _expire(self, seconds: float, limit: Limit) -> None:
        self._in_epoch(lambda: (None, self._marked(limit)), limit)
        mark = _Mark(self._epoch, seconds, secrets.token_bytes(4))
        self._settle(self._mark, partial(_put, msgspec.msgpack.encode(mark)), limit)

    def _park(self, key: str, seen: Stored | None, limit: Limit) -> Stored | None:
        held = self._ask([self._key(key)], limit).get(self._key(key), Held())
        if held.value == (seen.guard if seen is not None else None):
            watch = Watch(self._proposer.generation, self._key(key), held.accepted)
            self._with_links(lambda links: links.watch(watch, limit))
        return None

    def _problem(self, error: Exception) -> Problem | None:
        if isinstance(error, SecretError):
            return Problem(
                "refused this client: give all nodes and commands the same secret, in "
                "$RDZV_PLUGINS_SECRET or secret_file",
                denied=True,
            )
        if isinstance(error, FullError):
            return Problem("is full: delete runs that are over, with rdzv clean", state=True)
        if isinstance(error, OtherClusterError):
            return Problem(f"has no member of '{self._cluster}' there: {error}", retryable=True)
        if isinstance(error, OSError):
            return self._unreachable(error)
        return None

    def _disconnect(self) -> None:
        while self._idle:
            self._idle.pop().close()

    # Epochs.

    @property
    def _mark(self) -> str:
        return f"{self._namespace}!"

    def _key(self, key: str) -> str:
        return f"{self._namespace}!{self._epoch}/{key}"

    def _marked(self, limit: Limit) -> Held | None:
        return self._ask([self._mark], limit).get(self._mark)

    def _in_epoch(self, request: Callable[[], tuple[T, Held | None]], limit: Limit) -> T:
        """The answer to a request that was made in the epoch of the mark, which it reads too."""
        while True:
            asked = self._epoch
            answer, held = request()
            mark = _mark_in(held)
            if held is not None and mark.is_over(held.age):
                fresh = msgspec.msgpack.encode(_Mark(secrets.token_hex(4)))
                self._settle(self._mark, partial(_replaced, held.value, fresh), limit)
            elif mark.epoch == asked:
                return answer
            else:
                self._epoch = mark.epoch

    # Requests.

    def _change(self, key: str, change: Change, limit: Limit) -> bytes | None:
        """Change a register of this epoch; returns what it holds then."""
        self._in_epoch(lambda: (None, self._marked(limit)), limit)
        return self._settle(self._key(key), change, limit)

    def _settle(self, key: str, change: Change, limit: Limit) -> bytes | None:
        return self._attempt(lambda: Changing(self._proposer, key, change), limit).after

    def _ask(self, wanted: Sequence[str] | str, limit: Limit) -> dict[str, Held]:
        """The registers that are not empty."""
        for _ in range(3):
            look = self._attempt(lambda: Look(self._proposer, wanted), limit)
            if not look.unsettled:
                break
        for key in look.unsettled:
            settled = self._attempt(partial(Changing, self._proposer, key, keep), limit)
            look.held[key] = Held(settled.before.accepted, settled.after, settled.before.age)
        return {key: held for key, held in look.held.items() if held.value is not None}

    def _attempt(self, make: Callable[[], A], limit: Limit) -> A:
        return self._with_links(lambda links: self._attempts(links, make, limit))

    def _attempts(self, links: Links, make: Callable[[], A], limit: Limit) -> A:
        failures, doubtful = 0, False
        seconds, longest = _ATTEMPT_SECONDS
        while True:
            attempt = make()
            self._carry_out(links, attempt, limit, time.monotonic() + seconds)
            if attempt.outcome is Outcome.DONE:
                return attempt
            if attempt.outcome is Outcome.FULL:
                raise FullError
            if attempt.outcome is None:
                seconds = min(longest, 2 * seconds)
            # What others do with a value that may be accepted has to be seen before they go far.
            doubtful = doubtful or attempt.is_doubtful
            # A member that has just said its generation is asked again at once.
            if failures:
                longest_pause = 0.001 if doubtful else pause_after(failures - 1)
                limit.sleep(min(limit.seconds, random.uniform(0, longest_pause)))
            failures += 1

    def _carry_out(
        self, links: Links, attempt: Changing | Look, limit: Limit, until: float
    ) -> None:
        """Ask all members, those too that are reached meanwhile, until a majority has answered."""
        numbers: set[int] = set()
        late: dict[int, Any] = {}

        def send(messages: list[tuple[int, Any]]) -> None:
            for member, request in messages:
                number = links.number()
                if links.send(member, number, request):
                    numbers.add(number)
                else:
                    late[member] = request

        send(attempt.begin())
        while attempt.outcome is None and time.monotonic() < until:
            try:
                got = links.poll(limit, until)
            except TimeoutError:
                if links.refused is not None:
                    raise links.refused from None
                few = f"{links.connected} of {len(self._places)} members answer"
                raise NoMajorityError(few) from None
            for member, number, answer in got:
                if number == REACHED and member in late:
                    send([(member, late.pop(member))])
                elif number == GONE:
                    attempt.gone(member)
                elif number in numbers and answer is not None:
                    send(attempt.hear(member, answer, time.monotonic()))

    def _with_links(self, request: Callable[[Links], T]) -> T:
        try:
            links = self._idle.pop()
        except IndexError:
            links = Links(self._places, self._cluster, self._secret)
        try:
            answer = request(links)
        except BaseException:
            links.close()
            raise
        self._idle.append(links)
        if self._closed:
            self._disconnect()
        return answer


def _after(value: bytes | None, data: bytes) -> bytes:
    """A register's value: what it holds, behind the stamps of what it held before."""
    earlier, before = _split(value) if value is not None else ([], b"")
    stamps = [before[:_STAMP], *earlier][:_EARLIER] if len(before) >= _STAMP else []
    return bytes([len(stamps)]) + b"".join(stamps) + data


def _split(value: bytes) -> tuple[list[bytes], bytes]:
    end = 1 + value[0] * _STAMP
    return [value[i : i + _STAMP] for i in range(1, end, _STAMP)], value[end:]


def _put(data: bytes | None, _: bytes | None) -> bytes | None:
    return data


def _replaced(old: bytes | None, new: bytes, value: bytes | None) -> bytes | None:
    return new if value == old else value


def _mark_in(held: Held | None) -> _Mark:
    if held is None or held.value is None:
        return _Mark()
    return msgspec.msgpack.decode(held.value, type=_Mark)


def _stored(held: Held) -> Stored:
    assert held.value is not None
    return Stored.parse(_split(held.value)[1], held.value)
