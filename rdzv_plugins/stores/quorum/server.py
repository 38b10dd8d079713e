"""A member as a thread: it serves clients, and holds connections to the other members."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from rdzv_plugins import clock
from rdzv_plugins.kv.exhaustion import exhausted
from rdzv_plugins.register.acceptor import MOST_BYTES
from rdzv_plugins.register.member import Member, Sent
from rdzv_plugins.register.messages import (
    NEVER,
    Accept,
    Accepted,
    Copied,
    Found,
    PeerMessage,
    Refused,
    Request,
    Watch,
)
from rdzv_plugins.stores.quorum.wire import (
    BREAKS,
    CLIENT,
    NODE,
    HostPort,
    SecretError,
    Wire,
    addresses,
    dial,
    encode,
)

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
# How often the member looks for peers to dial, and how long it tries one place.
_LOOK_SECONDS, _DIAL_SECONDS = 0.1, 1.0
# A frame of a peer may hold a copy of all registers.
_MOST_FROM_PEER = 2 * MOST_BYTES
_MOST_FROM_CLIENT = 4 << 20
_MOST_CONNECTIONS, _BACKLOG = 20_000, 4096
# The member drops a client that leaves more bytes unread.
_MOST_UNSENT = 64 << 20
# How long a connection may take to prove the secret.
_GREETING_SECONDS = 5.0

_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE

_decode_request = msgspec.msgpack.Decoder(tuple[int, Request]).decode
_decode_message = msgspec.msgpack.Decoder(tuple[int, PeerMessage]).decode


class MemberThread(threading.Thread):
    """Runs a member until `stop`.

    Args:
        peers: for each member, the places where it may listen; none for this member.
        cluster, secret: see `Wire`.
    """

    def __init__(
        self,
        listener: socket.socket,
        peers: Sequence[Sequence[HostPort]],
        index: int,
        cluster: str,
        secret: bytes,
        name: str = "rdzv-member",
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._listener, self._places, self._index = listener, peers, index
        self._cluster, self._secret = cluster, secret
        # Peers with another secret; a line about each was logged.
        self._strange: set[int] = set()
        now = clock.now()
        incarnation = time.time_ns() // 1_000_000
        self.member = Member(index, len(peers), incarnation, now, random.Random())
        self._poll = selectors.DefaultSelector()
        # By file descriptor.
        self._wires: dict[int, Wire] = {}
        # By peer: the connection to it, and the connection that is being made.
        self._peers: dict[int, Wire] = {}
        self._dials: dict[int, Wire] = {}
        self._dial_at = now
        self._turn = 0
        # By key and connection: the waiting request and its number. By connection: its key.
        self._watches: dict[str, dict[int, tuple[int, Watch]]] = {}
        self._watched: dict[int, str] = {}
        self._ending = threading.Event()
        self._waker, self._woken = socket.socketpair()
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._poll.register(listener, selectors.EVENT_READ, None)
        self._poll.register(self._woken, selectors.EVENT_READ, None)
        _threads.add(self)

    @property
    def up(self) -> set[int]:
        """The members that take part in the store, as far as this member knows."""
        return self.member.up(clock.now())

    @property
    def nodes(self) -> int:
        """How many connections of nodes there are; the member does not end before them."""
        return sum(it.peer == NODE for it in [*self._wires.values()])

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                self._round()
        finally:
            self.close()

    def stop(self, seconds: float = 2.0) -> None:
        """End the member; idempotent."""
        self._ending.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"!")
        if self.ident is not None:
            self.join(seconds)

    def close(self) -> None:
        for wire in [*self._wires.values()]:
            wire.close()
        for line in (self._listener, self._waker, self._woken):
            line.close()
        self._poll.close()

    def _round(self) -> None:
        for key, events in self._poll.select(_TICK_SECONDS):
            wire = key.data
            if key.fileobj is self._listener:
                self._accept()
            elif wire is not None and wire.line.fileno() in self._wires:
                self._serve(wire, events)
        now = clock.now()
        self._deliver(self.member.tick(now))
        if now >= self._dial_at:
            self._dial_at = now + _LOOK_SECONDS
            if self._listener not in self._poll.get_map():
                self._poll.register(self._listener, selectors.EVENT_READ, None)
            self._end_strangers(now)
            self._dial(now)

    # Connections.

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError as error:
            # The listener stays ready, so without a pause this loop would spin.
            if exhausted(error) is not None and not _raise_limit():
                self._poll.unregister(self._listener)
            return
        if len(self._wires) >= _MOST_CONNECTIONS:
            line.close()
            return
        self._hold(self._wire(line, accepted=True))

    def _end_strangers(self, now: float) -> None:
        for wire in [*self._wires.values()]:
            if wire.peer is None and now > wire.since + _GREETING_SECONDS:
                self._end(wire)

    def _wire(self, line: socket.socket, accepted: bool) -> Wire:
        return Wire(line, self._cluster, self._secret, self._index, accepted, _MOST_FROM_PEER)

    def _hold(self, wire: Wire) -> None:
        self._wires[wire.line.fileno()] = wire
        self._poll.register(wire.line, _BOTH, wire)

    def _dial(self, now: float) -> None:
        """Dial each peer to which there is no connection, at one of its places at a time."""
        for wire in [*self._dials.values()]:
            if now > wire.since + _DIAL_SECONDS:
                self._end(wire)
        self._turn += 1
        for peer, places in enumerate(self._places):
            if peer not in self._peers and peer not in self._dials and places:
                found = addresses(places)
                with contextlib.suppress(OSError, ZeroDivisionError):
                    line = dial(found[self._turn % len(found)])
                    self._dials[peer] = self._wire(line, accepted=False)
                    self._hold(self._dials[peer])

    def _end(self, wire: Wire) -> None:
        number = wire.line.fileno()
        if number not in self._wires:
            return
        with contextlib.suppress(OSError):
            wire.flush()  # The greeting tells the other side which member it has dialled.
        self._poll.unregister(wire.line)
        del self._wires[number]
        wire.close()
        for lines in (self._peers, self._dials):
            for peer in [peer for peer, it in lines.items() if it is wire]:
                del lines[peer]
        self._forget_watch(number)

    def _serve(self, wire: Wire, events: int) -> None:
        stranger = wire.peer is None
        try:
            if events & selectors.EVENT_READ:
                for frame in wire.receive():
                    self._hear(wire, frame)
            if stranger and wire.peer is not None:
                self._welcome(wire, wire.peer)
            self._flush(wire)
        except BREAKS as error:
            if isinstance(error, SecretError):
                self._tell_of_another_secret(wire)
            self._end(wire)

    def _tell_of_another_secret(self, wire: Wire) -> None:
        for peer in [peer for peer, it in self._dials.items() if it is wire]:
            if peer not in self._strange:
                self._strange.add(peer)
                log.warning(
                    "the member at %s has another secret than this one, so it takes no part: give "
                    "all nodes the same, in $RDZV_PLUGINS_SECRET or secret_file",
                    self._places[peer][0][0],
                )

    def _welcome(self, wire: Wire, index: int) -> None:
        if index in (CLIENT, NODE):
            wire.most = _MOST_FROM_CLIENT
        elif index in range(len(self._places)) and index != self._index:
            self._peers[index] = wire
            if self._dials.get(index) is wire:
                del self._dials[index]
        else:
            raise ConnectionError("no member has this index")

    def _flush(self, wire: Wire) -> None:
        wire.flush()
        self._poll.modify(wire.line, _BOTH if wire.unsent else selectors.EVENT_READ, wire)

    # Messages.

    def _hear(self, wire: Wire, frame: bytes) -> None:
        now = clock.now()
        assert wire.peer is not None
        if wire.peer >= 0:
            _, message = _decode_message(frame)
            took_part = self.member.takes_part, self.member.generation
            self._deliver(self.member.hear(wire.peer, message, now))
            if (self.member.takes_part, self.member.generation) != took_part:
                self._refuse_watches()
            return
        if wire.unsent > _MOST_UNSENT:
            raise ConnectionError("it reads nothing")
        number, request = _decode_request(frame)
        answer: Any = self.member.answer(request, now)
        if isinstance(request, Watch) and isinstance(answer, Found) and not answer.held:
            line = wire.line.fileno()
            self._forget_watch(line)  # The client has given up its earlier watch.
            self._watches.setdefault(request.key, {})[line] = number, request
            self._watched[line] = request.key
            return
        wire.send(encode(number, answer))
        if isinstance(answer, Accepted) and isinstance(request, Accept):
            self._answer_watches(request.key, now)

    def _answer_watches(self, key: str, now: float) -> None:
        waiting = self._watches.pop(key, {})
        for number, (request_number, request) in waiting.items():
            del self._watched[number]
            self._send(number, encode(request_number, self.member.answer(request, now)))

    def _refuse_watches(self) -> None:
        """Make the clients ask again, because this member's generation has changed."""
        watches, self._watches = self._watches, {}
        self._watched.clear()
        for waiting in watches.values():
            for number, (request_number, _) in waiting.items():
                self._send(number, encode(request_number, Refused(NEVER)))

    def _forget_watch(self, number: int) -> None:
        key = self._watched.pop(number, None)
        if key is not None:
            del self._watches[key][number]
            if not self._watches[key]:
                del self._watches[key]

    def _deliver(self, sent: Sent) -> None:
        for peer, message in sent:
            wire = self._peers.get(peer)
            # A copy may be large, and the peer repeats its request until a copy arrives.
            if wire is not None and not (wire.unsent and isinstance(message, Copied)):
                self._send(wire.line.fileno(), encode(0, message))

    def _send(self, number: int, frame: bytes) -> None:
        if (wire := self._wires.get(number)) is not None:
            wire.send(frame)
            try:
                self._flush(wire)
            except BREAKS:
                self._end(wire)


def _raise_limit() -> bool:
    """Allow this process more open files than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * soft if hard == resource.RLIM_INFINITY else min(4 * soft, hard)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


_threads: weakref.WeakSet[MemberThread] = weakref.WeakSet()


def _let_go() -> None:
    # A forked child that outlives the agent would keep the port, and clients would connect to it.
    for thread in [*_threads]:
        thread.close()


os.register_at_fork(after_in_child=_let_go)
