"""Connections to neighbours of a round, which show at once that a neighbour's process has ended.

The kernel ends the connections of a process that dies, within a millisecond. If a link ends without
a farewell, the node dials again. If nobody listens any more, or somebody else answers, the process
is gone, as far as this host can tell. That is evidence, not a verdict: a firewall may refuse too.
Three observations prove nothing:

- The other end is silent, or a link ends and the node answers the next dial.
- The dial is refused while the node's own link to this node is open. Neighbours have one link each
  way, and a process that dies ends both.
- The two ends of the link see different addresses. A sidecar proxy between them may end the link
  and refuse a dial, although the node lives.

Each end sends its `Standing` with the store in one character, once the link is made and whenever
the standing changes: a store that refuses one node may accept others, which go on without it.

A greeting names the node by a digest, and a stranger gets no answer. Only nodes of the run know
what greeting and answer contain: they prove which process sends them, and which addresses it sees.
"""

from __future__ import annotations

import errno
import hmac
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from ipaddress import ip_address
from typing import Any

from rdzv_plugins.peers.listener import Line, Listener, unforked
from rdzv_plugins.protocol.contact import Standing

_OPENING = b"rdzv-plugins link "
_NONCE = 16  # Characters; a digest of the greeting node follows.
_FAREWELL = b"bye\n"

# The time-out of a connection, and of the answer to its greeting.
_DIAL_SECONDS = 2.0
# A link that is closed within this time is dialled once more: its process may be ending.
_AT_ONCE_SECONDS = 0.05
# The pause between two dials of a silent or never reached node doubles each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# A process that was found gone is dialled again _OFTEN times, every _AGAIN_SECONDS, and then after
# the pauses above. It may live, because a firewall may have refused the dial; then only a link will
# show its death.
_AGAIN_SECONDS, _OFTEN = 0.2, 50
# Report the process again after this many refusals: its last heartbeat may have reached the store
# after the first report, and looked like an answer.
_TOLD_AGAIN = 10
# A firewall forgets a connection without traffic, so the kernel sends keep-alives; they wake no
# process.
_KEEP_ALIVE_SECONDS = 60
_MOST_LINKS = 256
# The third failed dial of a neighbour is logged.
_TOLD_PAUSE = 4 * _FIRST_PAUSE
# A link that broke within _SHORT_SECONDS, _MOST_SHORT times in a row, is made again after pauses.
_SHORT_SECONDS, _MOST_SHORT = 1.0, 3

_Address = tuple[int, Any]
_DIGEST = 16  # Bytes; twice as many characters.


def _digest(*parts: str) -> bytes:
    # Only the last part may have a blank.
    return blake2b(" ".join(parts).encode(), digest_size=_DIGEST).hexdigest().encode()


def _ends(dialled_from: tuple[Any, ...], answered_at: tuple[Any, ...]) -> str:
    """Both ends of a connection, as this end sees them."""
    hosts = [ip_address(it[0].partition("%")[0]) for it in (dialled_from, answered_at)]
    mapped = [getattr(it, "ipv4_mapped", None) or it for it in hosts]
    return f"{mapped[0]},{dialled_from[1]},{mapped[1]},{answered_at[1]}"


class Links:
    """The links of one node: links that this node began, and links that others began.

    The listener's thread serves the links, and makes all calls.

    Args:
        node: the id of this node, which only the nodes of its run know.
        host: the address at which others reach this node.
        gone: called with the id of a node whose process is gone.
        back: called with the id of a node that answers after all.
        others: called with the `Standing` of all other ends.
        warn: takes a line for people.
    """

    def __init__(
        self,
        listener: Listener,
        run_id: str,
        node: str,
        host: str,
        gone: Callable[[str], None],
        back: Callable[[str], None],
        others: Callable[[frozenset[Standing]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._run_id = run_id
        self._node = node
        self._host = host
        self._gone = gone
        self.found_back = back
        self._others = others
        self._heard: set[Standing] = set()
        self._standing = Standing.ACCEPTED
        self._warn = warn
        # Hosts without a link that the log has named.
        self._told: set[str] = set()
        self._peers: dict[str, _Peer] = {}
        self._accepted: list[_Accepted] = []
        # By host of a node that has answered: whether both ends saw the same addresses. A refusal
        # by another host proves nothing, because a firewall may refuse.
        self._reached: dict[str, bool] = {}
        rest = _NONCE + 2 * _DIGEST + 2
        listener.answer(_OPENING + _digest(node, run_id) + b" ", rest, self._accept)

    def hold(self, peers: Mapping[str, str], standing: Standing = Standing.ACCEPTED) -> None:
        """Have links to exactly these nodes: ``address:port`` by id. From any thread.

        ``standing``: what this node says over all its links.
        """
        self._listener.call(partial(self._hold, dict(peers), standing))

    def _hold(self, peers: dict[str, str], standing: Standing) -> None:
        for node in [*self._peers]:
            if node not in peers:
                self._peers.pop(node).end()
        for node, endpoint in peers.items():
            if node not in self._peers:
                self._peers[node] = _Peer(self, self._listener, node, endpoint)
        if standing is not self._standing:
            self._standing = standing
            for line in self._lines():
                line.say(standing)
        self.listen()

    def _lines(self) -> list[_Link]:
        """The open links."""
        begun = (it.link for it in self._peers.values())
        return [it for it in (*self._accepted, *begun) if it is not None and it.is_open]

    def listen(self) -> None:
        """Pass on the `Standing` of all other ends if it has changed."""
        unknown = {Standing.ACCEPTED for it in self._peers.values() if it.link is None}
        others = unknown.union(it.heard for it in self._lines())
        if others != self._heard:
            self._heard = others
            self._others(frozenset(others))

    def tell(self) -> None:
        """Warn of neighbours without a link, once for each host."""
        without = [it.endpoint for it in self._peers.values() if it.lacks_link]
        hosts = {endpoint.rpartition(":")[0] for endpoint in without}
        if hosts - self._told:
            self._told |= hosts
            self._warn(
                f"no links to {len(without)} of {len(self._peers)} neighbours "
                f"({', '.join(sorted(without))}): the end of a process there shows only when its "
                "lease has run out. If a firewall is in between, let master_port= pass"
            )

    def greeting(self, node: str, nonce: str, ends: str) -> bytes:
        """This node's greeting to ``node`` over a connection with these ``ends``."""
        itself = _digest("from", nonce, self._node, ends, self._run_id)
        return b"%s%s %s %s\n" % (_OPENING, _digest(node, self._run_id), nonce.encode(), itself)

    def answer(self, node: str, nonce: str, ends: str) -> bytes:
        """The answer that only ``node`` can give, and only if it sees these ``ends``."""
        itself = _digest(nonce, node, self._run_id)
        return itself + _digest(nonce, node, ends, self._run_id) + b"\n"

    def _accept(self, line: socket.socket, rest: bytes) -> Line:
        self._accepted = [it for it in self._accepted if it.is_open]
        if len(self._accepted) >= _MOST_LINKS:
            self._make_room()
        nonce, _, by = rest[:-1].decode("ascii", "replace").partition(" ")
        ends = _ends(line.getpeername(), line.getsockname())
        answer = self.answer(self._node, nonce, ends)

        def is_from(node: str) -> bool:
            itself = _digest("from", nonce, node, ends, self._run_id)
            return hmac.compare_digest(itself, by.encode())

        accepted = _Accepted(line, answer, is_from, self.listen, self._over)
        self._accepted.append(accepted)
        self.begins(accepted)
        return accepted

    def _make_room(self) -> None:
        """Close the oldest link of no neighbour, without a farewell, because this node goes on."""
        strangers = (it for it in self._accepted if not any(map(it.is_from, self._peers)))
        oldest = next(strangers, self._accepted[0])
        self._accepted.remove(oldest)
        oldest.says_farewell = False
        self._listener.drop(oldest)

    def _over(self, accepted: _Accepted) -> None:
        """Dial the node again whose own link has ended: a refusal now counts."""
        self.listen()
        for node, peer in self._peers.items():
            if accepted.is_from(node):
                peer.ask_again()

    # What a peer tells.

    def held(self, link: _Dialled, host: str, direct: bool) -> None:
        self._reached[host] = direct
        self.begins(link)

    def begins(self, link: _Link) -> None:
        if self._standing is not Standing.ACCEPTED:
            link.say(self._standing)
        self.listen()

    def is_evidence(self, node: str, host: str, direct: bool | None) -> bool:
        """Report the node as gone if a refusal by its host proves that; returns whether it does.

        ``direct``: whether both ends of its link saw the same addresses; None: it had no link.
        """
        if any(it.is_open and it.is_from(node) for it in self._accepted):
            return False
        if direct is None:
            direct = self._reached.get(host)
        if direct is None:
            # Connections within this host prove nothing, because they pass no firewall.
            direct = any(it for other, it in self._reached.items() if other != self._host)
        if direct:
            self._gone(node)
        return direct


class _Link(Line):
    """A link, at either end; ``heard`` is the other end's `Standing`."""

    counts = False
    heard = Standing.ACCEPTED

    def __init__(self, line: socket.socket, listen: Callable[[], None], seconds: float) -> None:
        super().__init__(line, seconds)
        self._listen = listen

    def say(self, standing: Standing) -> None:
        """Send this node's standing. If the send fails, the link is about to end."""
        with suppress(OSError):
            self.socket.send(standing.encode())

    def _hears(self, data: bytes) -> bool:
        """Take the last character as the other end's `Standing`; returns whether it is one."""
        try:
            self.heard = Standing(data[-1:].decode("ascii", "replace"))
        except ValueError:
            return False
        self._listen()
        return True

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() >= 0


class _Accepted(_Link):
    """A link that another node has begun."""

    def __init__(
        self,
        line: socket.socket,
        answer: bytes,
        is_from: Callable[[str], bool],
        listen: Callable[[], None],
        over: Callable[[_Accepted], None],
    ) -> None:
        super().__init__(line, listen, math.inf)
        self.writes = self.says_farewell = True
        # Tells whether a given node has begun this link, with the addresses that this end sees.
        self.is_from = is_from
        self._answer = answer
        self._over = over
        _keep_alive(line)

    def go_on(self) -> Line | None:
        if self.writes:
            self._answer = self._answer[self.socket.send(self._answer) :]
            self.writes = bool(self._answer)
            return self
        data = self.socket.recv(64)
        return self if data.endswith(_FAREWELL) or self._hears(data) else None

    def say(self, standing: Standing) -> None:
        if self.writes:
            self._answer += standing.encode()
        else:
            super().say(standing)

    def part(self) -> None:
        if self.says_farewell:
            self.socket.send(_FAREWELL)
        self.socket.shutdown(socket.SHUT_WR)

    def over(self, error: OSError | None) -> None:
        self._over(self)


class _Dialled(_Link):
    """A link that this node begins."""

    def __init__(
        self,
        address: _Address,
        greeting: Callable[[str], bytes],
        answer: Callable[[str], bytes],
        is_held: Callable[[bool], None],
        listen: Callable[[], None],
        over: Callable[[_Dialled], None],
    ) -> None:
        family, target = address
        super().__init__(socket.socket(family, socket.SOCK_STREAM), listen, _DIAL_SECONDS)
        self.writes = True
        self.error: OSError | None = None
        self.held = self.said_farewell = self.connected = False
        self._greet, self._answer = greeting, answer
        self._greeting = self._expected = self._read = b""
        self._is_held = is_held
        self._over = over
        self.socket.setblocking(False)
        self._result = self.socket.connect_ex(target)

    @property
    def has_begun(self) -> bool:
        """Whether the connection may still succeed; False: it failed at once."""
        return self._result in (0, errno.EINPROGRESS)

    def go_on(self) -> Line | None:
        if self.writes:
            return self._send()
        if self.held:
            data = self.socket.recv(64)
            self.said_farewell = data.endswith(_FAREWELL)
            return None if self.said_farewell or not self._hears(data) else self
        data = self.socket.recv(len(self._expected) - len(self._read))
        self._read += data
        itself = self._read[: 2 * _DIGEST]
        if not data or not self._expected.startswith(itself):
            return None
        if len(self._read) == len(self._expected):
            self.held, self.expires = True, math.inf
            _keep_alive(self.socket)
            self._is_held(hmac.compare_digest(self._read, self._expected))
        return self

    def _send(self) -> Line | None:
        self._result = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if self._result:
            return None
        # Without a listener at the port, TCP may have connected this socket to itself.
        own, other = self.socket.getsockname(), self.socket.getpeername()
        if own == other:
            self._result = errno.ECONNREFUSED
            return None
        if not self.connected:
            self.connected, ends = True, _ends(own, other)
            self._greeting, self._expected = self._greet(ends), self._answer(ends)
        self._greeting = self._greeting[self.socket.send(self._greeting) :]
        self.writes = bool(self._greeting)
        return self

    def part(self) -> None:
        if self.held:
            self.socket.send(_FAREWELL)

    def over(self, error: OSError | None) -> None:
        self.error = error
        self._over(self)

    @property
    def is_refused(self) -> bool:
        """Whether no process listens at the port."""
        return self._result == errno.ECONNREFUSED and not self.connected

    @property
    def is_strange(self) -> bool:
        """Whether a stranger has answered, or closed the connection without an answer."""
        reset = isinstance(self.error, ConnectionResetError | BrokenPipeError)
        return self.connected and not self.held and (self.error is None or reset)


class _Peer:
    """A node to which this node keeps a link: it dials again until `end`."""

    def __init__(self, links: Links, listener: Listener, node: str, endpoint: str) -> None:
        self._links = links
        self._listener = listener
        self._node = node
        self.endpoint = endpoint
        self._host = endpoint.rpartition(":")[0].strip("[]")
        self._addresses: list[_Address] = []
        self._next_address = 0
        self._line: _Dialled | None = None
        self._ended = False
        # How many dials in a row were refused, or answered by a stranger.
        self._refusals = 0
        # Whether both ends of the last link saw the same addresses. None: there was no link yet.
        self._direct: bool | None = None
        # How many links in a row ended within _SHORT_SECONDS.
        self._short_links = 0
        # The process was found gone and has not answered since.
        self._is_gone = False
        # Refusals since the last report; None: the next refusal is reported.
        self._since_report: int | None = None
        self._pause = _FIRST_PAUSE
        self._planned = 0
        self._resolve(int(endpoint.rpartition(":")[2]))

    @property
    def lacks_link(self) -> bool:
        """Whether the node has no link, and is not known to have ended."""
        return not (self.link or self._ended or self._is_gone)

    @property
    def link(self) -> _Dialled | None:
        """The open link; None: there is none."""
        return self._line if self._line is not None and self._line.held else None

    def end(self) -> None:
        """Drop the link, and dial no more."""
        self._ended = True
        if self._line is not None:
            self._listener.drop(self._line)

    def _resolve(self, port: int) -> None:
        def look_up() -> None:
            # A name that cannot be resolved gets no link.
            with suppress(OSError, UnicodeError, ValueError):
                found = socket.getaddrinfo(self._host, port, type=socket.SOCK_STREAM)
                addresses: list[_Address] = [(it[0], it[4]) for it in found]
                self._listener.call(partial(self._begin, addresses))

        try:
            ip_address(self._host.partition("%")[0])
        except ValueError:
            # getaddrinfo may hang. If no thread can start, this peer gets no link.
            with suppress(RuntimeError, MemoryError):
                threading.Thread(target=look_up, daemon=True).start()
        else:
            look_up()

    def _begin(self, addresses: list[_Address]) -> None:
        self._addresses = addresses
        self.dial()

    def dial(self) -> None:
        """Dial now, unless there is a link."""
        if self._ended or self._line is not None or not self._addresses:
            return
        nonce = secrets.token_hex(_NONCE // 2)
        greeting = partial(self._links.greeting, self._node, nonce)
        answer = partial(self._links.answer, self._node, nonce)
        calls = self._held, self._links.listen, self._over
        line: _Dialled | None = None
        with unforked:
            with suppress(OSError):  # OSError: this process has no descriptor left.
                line = _Dialled(self._addresses[self._next_address], greeting, answer, *calls)
            if line is not None and line.has_begun:
                self._line = line
                self._listener.serve(line)
                return
            if line is not None:
                line.socket.close()
        self._failed(line is not None and line.is_refused, strange=False)

    def ask_again(self) -> None:
        """Dial now: the node's own link has ended, so the node lived until now. Report it anew."""
        self._since_report = None
        self.dial()

    def _held(self, direct: bool) -> None:
        self._refusals, self._pause = 0, _FIRST_PAUSE
        self._direct, self._since_report = direct, None
        assert self._line is not None
        self._links.held(self._line, self._host, direct)
        if self._is_gone:
            self._is_gone = False
            self._links.found_back(self._node)

    def _over(self, line: _Dialled) -> None:
        self._line = None
        self._links.listen()
        if self._ended:
            return
        if not line.held:
            self._failed(line.is_refused, line.is_strange)
            return
        self._ended = line.said_farewell
        is_short = time.monotonic() - line.since < _SHORT_SECONDS
        self._short_links = self._short_links + 1 if is_short else 0
        if self._ended or self._short_links < _MOST_SHORT:
            self.dial()
        else:
            self._dial_later()

    def _failed(self, refused: bool, strange: bool) -> None:
        if self._direct is None:
            self._next_address = (self._next_address + 1) % len(self._addresses)
        if not (refused or strange):
            self._refusals = 0
            self._dial_later()
            return
        self._refusals += 1
        addresses = len(self._addresses) if self._direct is None else 1
        is_evidence = partial(self._links.is_evidence, self._node, self._host, self._direct)
        if self._refusals < (addresses if refused else 2 * addresses):
            self._dial_after(_AT_ONCE_SECONDS)
            return
        if self._since_report is None and not is_evidence():
            self._dial_later()
            return
        self._is_gone, self._since_report = True, (self._since_report or 0) + 1
        if self._since_report > _OFTEN:
            self._dial_later()
            return
        if self._since_report == _TOLD_AGAIN:
            is_evidence()
        self._dial_after(_AGAIN_SECONDS)

    def _dial_later(self) -> None:
        self._dial_after(self._pause)
        if self._pause >= _TOLD_PAUSE:
            self._links.tell()
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _dial_after(self, seconds: float) -> None:
        """Dial after ``seconds``; this replaces an earlier planned dial."""
        self._planned += 1
        planned = self._planned
        self._listener.later(seconds, lambda: self.dial() if planned == self._planned else None)


def _keep_alive(line: socket.socket) -> None:
    with suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
