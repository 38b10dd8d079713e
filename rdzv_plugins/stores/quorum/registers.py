"""The client of the members: each request goes to all members, and a majority's answers end it."""

from __future__ import annotations

import contextlib
import random
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from rdzv_plugins import clock
from rdzv_plugins.kv.base import Limit, WokenError
from rdzv_plugins.register.messages import Answer, Found, Held, Read, Request, Watch
from rdzv_plugins.register.proposer import Change, Changing, Look, Outcome, Proposer, Rivals, keep
from rdzv_plugins.stores.quorum.wire import (
    ALIKE,
    BREAKS,
    CLIENT,
    NODE,
    HostPort,
    OtherClusterError,
    SecretError,
    Wire,
    addresses,
    dial,
    encode,
)

_MOST_BYTES = 64 << 20
# How long the first attempt may take, and how long a later attempt may take at most.
_ATTEMPT_SECONDS = 0.5, 2.0
_DIAL_SECONDS = 1.0
# How long a reader waits for further answers if the first majority does not agree.
_MORE_SECONDS = 0.02
# A writer waits for acceptances for `_ACCEPT_SECONDS`, or for `_SLOWNESS` times as long as the
# promises took (a busy machine). Then another member may take the place of a silent one.
_ACCEPT_SECONDS, _SLOWNESS = 0.1, 10
# How often a reader looks at a change under way before it settles the change itself.
_LOOKS = 4
# Pauses between dials of a member.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
# Pauses between attempts: random, up to `_FIRST_BACKOFF`, which doubles `_DOUBLINGS` times.
_FIRST_BACKOFF, _DOUBLINGS = 0.002, 9

_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE

_decode_answer = msgspec.msgpack.Decoder(tuple[int, Answer]).decode

T = TypeVar("T")
A = TypeVar("A", Changing, Look)


class FullError(Exception):
    """The members have no room for the value."""


class Registers:
    """Reads and changes the members' registers; for several threads.

    Args:
        places: where each member may listen.
        cluster, secret: see `Wire`.

    Attributes:
        is_node: connections made from now on keep the members alive until this client is closed.
    """

    def __init__(self, places: Sequence[Sequence[HostPort]], cluster: str, secret: bytes) -> None:
        self.is_node = False
        self._places, self._cluster, self._secret = places, cluster, secret
        self._proposer = Proposer(len(places), random.Random(secrets.randbits(64)))
        self._idle: list[_Links] = []
        self._closed = False

    def read(self, wanted: Sequence[str] | str, limit: Limit) -> dict[str, Held]:
        """The non-empty registers with these keys, or with this prefix; linearizable."""
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
        """Change a register and return its value afterwards. ``is_put``: see `Rivals`."""
        rivals, tries = Rivals(change, is_put), _Tries(limit)

        def settled(links: _Links) -> Held | None:
            """The register's value, if this client has nothing left to change."""
            look = tries.make(links, Look(self._proposer, [key]))
            held = look.held.get(key, Held())
            agreed = look.outcome is Outcome.DONE and not look.unsettled
            return held if agreed and rivals.leave_nothing(held) else None

        def attempts(links: _Links) -> bytes | None:
            while True:
                attempt = tries.make(links, Changing(self._proposer, key, change))
                if attempt.outcome is Outcome.DONE:
                    return attempt.after
                rivals.note(attempt)
                # The look before the first pause tells later looks which values are newer.
                if tries.failures == 0 and (held := settled(links)) is not None:
                    return held.value
                tries.pause(attempt)
                if (held := settled(links)) is not None:
                    return held.value

        return self._with_links(attempts)

    def watch(self, key: str, held: Held, limit: Limit) -> None:
        """Return once a majority holds a newer value, or once no majority watches."""
        watch = Watch(self._proposer.generation, key, held.accepted)
        self._with_links(lambda links: links.watch(watch, limit))

    def up(self, limit: Limit) -> int:
        """How many members of the store's generation answer within the limit."""
        return self._with_links(lambda links: links.up(self._proposer, limit))

    def close(self) -> None:
        """Close all connections; a request under way keeps its own to its end. Idempotent."""
        self._closed = True
        self.renew()

    def renew(self) -> None:
        """Close the idle connections; the next request dials again."""
        while self._idle:
            self._idle.pop().close()

    def _attempt(self, make: Callable[[], A], limit: Limit) -> A:
        def attempts(links: _Links) -> A:
            tries = _Tries(limit)
            while (attempt := tries.make(links, make())).outcome is not Outcome.DONE:
                tries.pause(attempt)
            return attempt

        return self._with_links(attempts)

    def _with_links(self, request: Callable[[_Links], T]) -> T:
        try:
            links = self._idle.pop()
        except IndexError:
            wire = partial(
                Wire, cluster=self._cluster, secret=self._secret,
                index=NODE if self.is_node else CLIENT, accepted=False, most=_MOST_BYTES,
            )  # fmt: skip
            links = _Links(self._places, wire)
        is_whole = False
        try:
            answer = request(links)
            is_whole = True
            return answer
        except (TimeoutError, WokenError):
            is_whole = True  # The members must not think that the node left when a wait ends.
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
        self, places: Sequence[Sequence[HostPort]], make_wire: Callable[[socket.socket], Wire]
    ) -> None:
        self._places, self._make_wire = places, make_wire
        self._poll = selectors.DefaultSelector()
        self._members: dict[int, Wire] = {}
        # Connections that are being made: the member, and when it was dialled.
        self._dials: dict[Wire, tuple[int, float]] = {}
        self._dial_at = [0.0] * len(places)
        self._pauses = [_FIRST_PAUSE] * len(places)
        self._number = 0
        # _asked: by request number, the member that has not answered. _late: by member, the request
        # to send once connected.
        self._asked: dict[int, int] = {}
        self._late: dict[int, Request] = {}
        self._wake_fd: int | None = None
        # By member: the last SecretError or OtherClusterError from its addresses.
        self._refusals: dict[int, Exception] = {}

    def close(self) -> None:
        for wire in [*self._members.values(), *self._dials]:
            wire.close()
        self._poll.close()

    def _begin(self, sent: Sequence[tuple[int, Request]]) -> None:
        self._asked, self._late = {}, {}
        self._ask(sent)

    def _ask(self, sent: Sequence[tuple[int, Request]]) -> None:
        for member, request in sent:
            wire = self._members.get(member)
            if wire is None:
                self._late[member] = request
                continue
            self._number += 1
            wire.send(encode(self._number, request))
            try:
                self._flush(wire)
                self._asked[self._number] = member
            except OSError:
                self._end(wire)

    def _heard(self, limit: Limit, until: float) -> list[tuple[int, Answer | None]]:
        """Members' answers that come before ``until``; None: the member's connection has ended."""
        self._dial()
        self._heed(limit)
        missing = (at for member, at in enumerate(self._dial_at) if member not in self._members)
        until = min(until, *missing, time.monotonic() + _DIAL_SECONDS)
        wait = min(limit.seconds, max(0.0, until - time.monotonic()))
        heard: list[tuple[int, Answer | None]] = []
        for key, events in self._poll.select(wait):
            if key.data is None:
                raise WokenError
            heard += self._serve(key.data, events)
        return heard

    def carry_out(self, attempt: Changing | Look, limit: Limit, until: float) -> None:
        """Ask all members until a majority has answered, or until ``until``."""
        began = time.monotonic()
        self._begin(attempt.begin())
        while attempt.outcome is None and (now := time.monotonic()) < until:
            if isinstance(attempt, Look) and attempt.is_enough:
                until = min(until, now + _MORE_SECONDS)
            elif attempt.is_doubtful:
                until = min(until, now + max(_ACCEPT_SECONDS, _SLOWNESS * (now - began)))
            try:
                heard = self._heard(limit, until)
            except TimeoutError:
                raise self._why_too_few() from None
            secret = [it for it in self._refusals.values() if isinstance(it, SecretError)]
            if 2 * len(secret) > len(self._places):
                raise secret[0]
            for member, answer in heard:
                if answer is None:
                    attempt.gone(member)
                else:
                    self._ask(attempt.hear(member, answer, clock.now()))
        if isinstance(attempt, Look):
            attempt.end()

    def watch(self, watch: Watch, limit: Limit) -> None:
        """See `Registers.watch`."""
        size = len(self._places)
        self._begin([(member, watch) for member in range(size)])
        newer = 0
        # One member with a newer value may only show a change under way: wait for a majority.
        while 2 * (len(self._asked) + newer) > size > 2 * newer:
            newer += sum(isinstance(it, Found) for _, it in self._heard(limit, limit.deadline))

    def up(self, proposer: Proposer, limit: Limit) -> int:
        """See `Registers.up`."""
        size = len(self._places)
        self._begin([(member, Read(proposer.generation, [])) for member in range(size)])
        answers: list[Answer] = []
        with contextlib.suppress(TimeoutError):
            while len(answers) < size:
                answers += [it for _, it in self._heard(limit, limit.deadline) if it is not None]
        return sum(isinstance(it, Found) for it in answers)

    def _why_too_few(self) -> Exception:
        few = f"{len(self._members)} of {len(self._places)} members answer"
        return next(iter(self._refusals.values()), OSError(few))

    def _heed(self, limit: Limit) -> None:
        wanted = limit.wake.fd if limit.wake is not None else None
        if wanted != self._wake_fd:
            if self._wake_fd is not None:
                self._poll.unregister(self._wake_fd)
            if wanted is not None:
                self._poll.register(wanted, selectors.EVENT_READ, None)
            self._wake_fd = wanted

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
                    wire = self._make_wire(dial(address))
                    self._dials[wire] = member, now
                    self._poll.register(wire.line, _BOTH, wire)

    def _serve(self, wire: Wire, events: int) -> list[tuple[int, Answer | None]]:
        heard: list[tuple[int, Answer | None]] = []
        try:
            if events & selectors.EVENT_READ:
                for frame in wire.receive():
                    if wire.peer is not None:
                        number, answer = _decode_answer(frame)
                        if self._asked.pop(number, None) is not None:
                            heard.append((wire.peer, answer))
            if wire in self._dials and wire.peer is not None:
                self._connected(wire)
            self._flush(wire)
        except BREAKS as error:
            member, _ = self._dials.get(wire, (-1, 0.0))
            if member not in self._members and isinstance(error, SecretError | OtherClusterError):
                self._refusals[member] = error
            heard += [(member, None) for member in self._end(wire)]
        return heard

    def _connected(self, wire: Wire) -> None:
        member, _ = self._dials[wire]
        if wire.peer != member:
            raise OtherClusterError(f"another member is there; {ALIKE}")
        del self._dials[wire]
        if member in self._members:
            raise ConnectionError("this member is connected")
        self._members[member] = wire
        self._refusals.pop(member, None)
        self._pauses[member] = _FIRST_PAUSE
        if member in self._late:
            self._ask([(member, self._late.pop(member))])

    def _flush(self, wire: Wire) -> None:
        wire.flush()
        self._poll.modify(wire.line, _BOTH if wire.unsent else selectors.EVENT_READ, wire)

    def _end(self, wire: Wire) -> list[int]:
        """Close a connection; return the member that it connected."""
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
            self._asked = {it: asked for it, asked in self._asked.items() if asked != member}
        return gone


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

    def pause(self, attempt: Changing | Look) -> None:
        """Wait, unless the attempt failed because the members have a new generation."""
        if not attempt.is_outdated:
            longest = _FIRST_BACKOFF * 2.0 ** min(self.failures, _DOUBLINGS)
            self._limit.sleep(min(self._limit.seconds, random.uniform(0, longest)))
        self.failures += 1
