"""The client of the members: requests to all at once, done with the answers of a majority."""

from __future__ import annotations

import contextlib
import random
import secrets
import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from rdzv_plugins import clock
from rdzv_plugins.kv.base import Limit, WokenError
from rdzv_plugins.register.messages import Answer, Found, Held, Read, Refused, Watch
from rdzv_plugins.register.proposer import Change, Changing, Look, Outcome, Proposer, Rivals, keep
from rdzv_plugins.stores.quorum.wire import (
    ALIKE,
    BREAKS,
    CLIENT,
    NODE,
    OtherClusterError,
    SecretError,
    Wire,
    addresses,
    dial,
    encode,
)

_MOST_BYTES = 64 << 20
# A member that refuses, or has no answer for so long, is passed over in this attempt.
_ATTEMPT_SECONDS = 0.5, 2.0
# How long a connection may take; and between two dials of one that failed, longer each time.
_DIAL_SECONDS = 1.0
# How long a reader waits for more than a majority where that does not agree.
_MORE_SECONDS = 0.02
# How long a writer waits for those who have promised, one of which may have fallen silent since:
# another member can take its place. On a busy machine so many times as long as promises took.
_ACCEPT_SECONDS, _SLOWNESS = 0.1, 10
# How many times it looks at a change under way, before it settles that itself.
_LOOKS = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0

# Between two attempts at random: up to this, doubled so often.
_FIRST_BACKOFF, _DOUBLINGS = 0.002, 9

_REACHED, _GONE = 0, -1

_decode_answer = msgspec.msgpack.Decoder(tuple[int, Answer]).decode

Place = tuple[str, int]
Heard = list[tuple[int, int, Answer | None]]
T = TypeVar("T")
A = TypeVar("A", Changing, Look)


class FullError(Exception):
    """The members have no room for the value."""


class NoMajorityError(OSError):
    """Too few members answer."""


class Registers:
    """Reads and changes the registers that the members keep; for several threads.

    Args:
        places: where each member may listen.
        cluster, secret: as of `Wire`.

    Attributes:
        is_node: the members stay until this client is closed; it counts from the next connection.
    """

    def __init__(self, places: Sequence[Sequence[Place]], cluster: str, secret: bytes) -> None:
        self.is_node = False
        self._places, self._cluster, self._secret = places, cluster, secret
        self._proposer = Proposer(len(places), random.Random(secrets.randbits(64)))
        self._idle: list[_Links] = []
        self._closed = False

    def read(self, wanted: Sequence[str] | str, limit: Limit) -> dict[str, Held]:
        """The registers of these keys, or under this prefix, that are not empty; linearizable."""
        found: dict[str, Held] = {}
        for _ in range(_LOOKS):
            look = self._attempt(partial(Look, self._proposer, wanted), limit)
            found |= look.held
            if not (wanted := look.unsettled):
                break
        for key in look.unsettled:
            settled = self._attempt(partial(Changing, self._proposer, key, keep), limit)
            found[key] = Held(settled.before.accepted, settled.after, settled.before.age)
        return {key: held for key, held in found.items() if held.value is not None}

    def change(
        self, key: str, change: Change, limit: Limit, is_put: Callable[[bytes], bool] | None = None
    ) -> bytes | None:
        """Change a register; returns what it holds then. ``is_put``: as of `Rivals`."""
        rivals, tries = Rivals(change, is_put), _Tries(limit)

        def over(links: _Links) -> Held | None:
            look = tries.make(links, Look(self._proposer, [key]))
            held = look.held.get(key, Held())
            settled = look.outcome is Outcome.DONE and not look.unsettled
            return held if settled and rivals.leave_nothing(held) else None

        def attempts(links: _Links) -> bytes | None:
            while True:
                attempt = tries.make(links, Changing(self._proposer, key, change))
                if attempt.outcome is Outcome.DONE:
                    return attempt.after
                rivals.note(attempt)
                # Once before the first pause, to know later what has followed.
                if tries.failures == 0 and (held := over(links)) is not None:
                    return held.value
                tries.pause(anew=attempt.generation != self._proposer.generation)
                if (held := over(links)) is not None:
                    return held.value

        return self._with_links(attempts)

    def watch(self, key: str, held: Held, limit: Limit) -> None:
        """Return once a majority holds something newer, or no majority watches."""
        watch = Watch(self._proposer.generation, key, held.accepted)
        self._with_links(lambda links: links.watch(watch, limit))

    def up(self, limit: Limit) -> int:
        """How many members take part in the store's generation and answer within the limit."""
        return self._with_links(lambda links: links.up(self._proposer, limit))

    def close(self) -> None:
        """Close the connections, those of a request once it ends; idempotent."""
        self._closed = True
        self.renew()

    def renew(self) -> None:
        """Close the idle connections: the next request dials."""
        while self._idle:
            self._idle.pop().close()

    def _attempt(self, make: Callable[[], A], limit: Limit) -> A:
        def attempts(links: _Links) -> A:
            tries = _Tries(limit)
            while (attempt := tries.make(links, make())).outcome is not Outcome.DONE:
                tries.pause(anew=attempt.generation != self._proposer.generation)
            return attempt

        return self._with_links(attempts)

    def _with_links(self, request: Callable[[_Links], T]) -> T:
        try:
            links = self._idle.pop()
        except IndexError:
            greets_as = NODE if self.is_node else CLIENT
            links = _Links(self._places, self._cluster, self._secret, greets_as)
        is_whole = False
        try:
            answer = request(links)
            is_whole = True
            return answer
        except (TimeoutError, WokenError):
            is_whole = True  # A node must not seem to leave as often as a wait ends.
            raise
        finally:
            if is_whole:
                self._idle.append(links)
            else:
                links.close()
            if self._closed:
                self.renew()


class _Links:
    """Connections to all members, for one request at a time."""

    def __init__(
        self, places: Sequence[Sequence[Place]], cluster: str, secret: bytes, greets_as: int
    ) -> None:
        self._places, self._cluster, self._secret = places, cluster, secret
        self._greets_as = greets_as
        self._poll = selectors.DefaultSelector()
        self._members: dict[int, Wire] = {}
        # Connections that are being made, since when.
        self._dials: dict[Wire, tuple[int, float]] = {}
        self._dial_at = [0.0] * len(places)
        self._pauses = [_FIRST_PAUSE] * len(places)
        self._numbers = 0
        self._woken: int | None = None
        # By member: why the last one at its places lets nobody in.
        self._refusals: dict[int, Exception] = {}

    def close(self) -> None:
        for wire in [*self._members.values(), *self._dials]:
            wire.close()
        self._poll.close()

    def ask(self, sent: Sequence[tuple[int, Any]]) -> tuple[set[int], dict[int, Any]]:
        """The numbers of these requests, and those whose members are not connected yet."""
        numbers: set[int] = set()
        late: dict[int, Any] = {}
        for member, request in sent:
            wire = self._members.get(member)
            if wire is None:
                late[member] = request
                continue
            self._numbers += 1
            wire.send(encode(self._numbers, request))
            if self._flush(wire):
                numbers.add(self._numbers)
        return numbers, late

    def poll(self, limit: Limit, until: float) -> Heard:
        """What members have said by ``until``: who, the number of a request, and the answer to it.

        Where a connection was made or has broken, the number is `_REACHED` or `_GONE`.
        """
        self._dial()
        self._heed(limit)
        missing = (at for member, at in enumerate(self._dial_at) if member not in self._members)
        until = min(until, *missing, time.monotonic() + _DIAL_SECONDS)
        wait = min(limit.seconds, max(0.0, until - time.monotonic()))
        got: Heard = []
        for key, events in self._poll.select(wait):
            if key.data is None:
                raise WokenError
            got += self._serve(key.data, events)
        return got

    def carry_out(self, attempt: Changing | Look, limit: Limit, until: float) -> None:
        """Ask all members, those too that are reached meanwhile, until a majority has answered."""
        began = time.monotonic()
        numbers, late = self.ask(attempt.begin())
        while attempt.outcome is None and (now := time.monotonic()) < until:
            if isinstance(attempt, Look) and attempt.is_enough:
                until = min(until, now + _MORE_SECONDS)
            elif attempt.is_doubtful:
                until = min(until, now + max(_ACCEPT_SECONDS, _SLOWNESS * (now - began)))
            try:
                got = self.poll(limit, until)
            except TimeoutError:
                raise self._why_too_few() from None
            secret = [it for it in self._refusals.values() if isinstance(it, SecretError)]
            if 2 * len(secret) > len(self._places):
                raise secret[0]
            for member, number, answer in got:
                sent: Sequence[tuple[int, Any]] = ()
                if number == _REACHED and member in late:
                    sent = [(member, late.pop(member))]
                elif number == _GONE:
                    attempt.gone(member)
                elif number in numbers and answer is not None:
                    sent = attempt.hear(member, answer, clock.now())
                more, unsent = self.ask(sent)
                numbers |= more
                late |= unsent
        if isinstance(attempt, Look):
            attempt.end()

    def watch(self, watch: Watch, limit: Limit) -> None:
        """See `Registers.watch`."""
        size = len(self._places)
        numbers, late = self.ask([(member, watch) for member in range(size)])
        # At the first member that holds it, a change is under way, which all would look at.
        lost, newer = len(late), 0
        while 2 * lost < size and 2 * newer < size:
            for member, number, answer in self.poll(limit, limit.deadline):
                if number == _REACHED and member in late:
                    numbers |= self.ask([(member, late.pop(member))])[0]
                    lost -= 1
                newer += number in numbers and isinstance(answer, Found)
                lost += number == _GONE or (number in numbers and isinstance(answer, Refused))

    def up(self, proposer: Proposer, limit: Limit) -> int:
        """See `Registers.up`."""
        request = Read(proposer.generation, [])
        numbers, late = self.ask([(member, request) for member in range(len(self._places))])
        waiting, up = len(self._places), 0
        with contextlib.suppress(TimeoutError):
            while waiting:
                for member, number, answer in self.poll(limit, limit.deadline):
                    if number == _REACHED and member in late:
                        numbers |= self.ask([(member, late.pop(member))])[0]
                    elif number in numbers:
                        waiting, up = waiting - 1, up + isinstance(answer, Found)
        return up

    def _why_too_few(self) -> Exception:
        few = f"{len(self._members)} of {len(self._places)} members answer"
        return next(iter(self._refusals.values()), NoMajorityError(few))

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
            self._dial_at[member] = now + _DIAL_SECONDS
            for address in addresses(places):
                with contextlib.suppress(OSError):
                    line = dial(address)
                    cluster, secret = self._cluster, self._secret
                    wire = Wire(line, cluster, secret, self._greets_as, False, _MOST_BYTES)
                    self._dials[wire] = member, now
                    self._poll.register(line, selectors.EVENT_READ | selectors.EVENT_WRITE, wire)

    def _serve(self, wire: Wire, events: int) -> Heard:
        got: Heard = []
        try:
            if events & selectors.EVENT_READ:
                for frame in wire.receive():
                    if wire.peer is not None:
                        number, answer = _decode_answer(frame)
                        got.append((wire.peer, number, answer))
            if wire in self._dials and wire.peer is not None:
                member, _ = self._dials.pop(wire)
                if wire.peer != member:
                    raise OtherClusterError(f"another member is there; {ALIKE}")
                if member in self._members:
                    raise ConnectionError("this member is connected")
                self._members[member] = wire
                self._refusals.pop(member, None)
                self._pauses[member] = _FIRST_PAUSE
                got.append((member, _REACHED, None))
            self._flush(wire)
        except BREAKS as error:
            member, _ = self._dials.get(wire, (-1, 0.0))
            if member not in self._members and isinstance(error, SecretError | OtherClusterError):
                self._refusals[member] = error
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

    def _end(self, wire: Wire) -> Heard:
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(wire.line)
        wire.close()
        if wire in self._dials:
            member, _ = self._dials.pop(wire)
            if not any(it == member for it, _ in self._dials.values()):
                pause = self._pauses[member]
                self._pauses[member] = min(_LONGEST_PAUSE, 2 * pause)
                self._dial_at[member] = time.monotonic() + pause * random.uniform(0.5, 1.0)
        gone = [member for member, it in self._members.items() if it is wire]
        for member in gone:
            del self._members[member]
            self._dial_at[member] = 0.0
        return [(member, _GONE, None) for member in gone]


class _Tries:
    """The attempts at one request."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._seconds, self._longest = _ATTEMPT_SECONDS
        self.failures = 0

    def make(self, links: _Links, attempt: A) -> A:
        """Make an attempt; raises `FullError`."""
        links.carry_out(attempt, self._limit, time.monotonic() + self._seconds)
        if attempt.outcome is Outcome.FULL:
            raise FullError
        if attempt.outcome is None:
            self._seconds = min(self._longest, 2 * self._seconds)
        return attempt

    def pause(self, anew: bool) -> None:
        """``anew``: the members have just told another generation, so they are asked at once."""
        if not anew:
            longest = _FIRST_BACKOFF * 2.0 ** min(self.failures, _DOUBLINGS)
            self._limit.sleep(min(self._limit.seconds, random.uniform(0, longest)))
        self.failures += 1
