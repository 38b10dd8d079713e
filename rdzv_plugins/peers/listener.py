"""One listening socket and one thread for the direct requests between nodes of a run.

A client that connects sends a greeting. A client that sends an unknown greeting, or takes long to
send one, gets no answer and is dropped.
"""

from __future__ import annotations

import heapq
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import NamedTuple
from weakref import WeakSet

from rdzv_plugins.peers.addresses import ANY_PORT, listen

_GREETING_SECONDS = 5.0
# The most clients that have not greeted yet, or that exchange data.
_MOST_CLIENTS = 16
_MOST_ACCEPTED_AT_ONCE = 16
# The pause in accepting after this process had no descriptor left.
_PAUSE_SECONDS = 0.5


class Line:
    """A connection that the thread serves.

    Attributes:
        since: when it began, in monotonic seconds.
        expires: when it is dropped; infinite: it may stay.
        writes: the connection waits until it can write; False: until it can read.
        counts: the connection counts towards _MOST_CLIENTS.
        known: the client has greeted.
    """

    counts = True
    known = True

    def __init__(self, line: socket.socket, seconds: float = math.inf) -> None:
        self.socket = line
        self.since = time.monotonic()
        self.expires = self.since + seconds
        self.writes = False

    def go_on(self) -> Line | None:
        """Read or write what is possible now; returns the `Line` that serves next; None: it ended.

        An OSError ends the connection.
        """
        raise NotImplementedError

    def part(self) -> None:
        """Send the last words before this end closes the connection in good order."""

    def over(self, error: OSError | None) -> None:
        """Called after the connection ended, with the error if any; not if this end closed it."""


class _Stranger(Line):
    """A client that has connected and not greeted yet."""

    known = False

    def __init__(self, line: socket.socket, greetings: Sequence[_Greeting]) -> None:
        super().__init__(line, _GREETING_SECONDS)
        self._greetings = greetings
        self._read = b""

    def go_on(self) -> Line | None:
        least = min((it.size for it in self._greetings), default=0)
        data = self.socket.recv(least - len(self._read)) if least else b""
        self._read += data
        # Keep the greetings that may begin with the bytes read so far.
        self._greetings = [
            it
            for it in self._greetings
            if it.opening.startswith(self._read) or self._read.startswith(it.opening)
        ]
        for greeting in self._greetings:
            if len(self._read) == greeting.size:
                return greeting.serve(self.socket, self._read[len(greeting.opening) :])
        return self if data and self._greetings else None


class _Greeting(NamedTuple):
    opening: bytes
    size: int
    serve: Callable[[socket.socket, bytes], Line]


class Listener:
    """Listens at `port`, and serves in one thread; its arguments are those of `listen`."""

    def __init__(self, address: str | None, name: str, ports: Sequence[int] = ANY_PORT) -> None:
        self._server = listen(address, ports)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._woken.setblocking(False)
        self._greetings: tuple[_Greeting, ...] = ()
        self._lines: set[Line] = set()
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        self._ends = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._close()
            raise
        _open.add(self)

    def answer(
        self, opening: bytes, more: int, serve: Callable[[socket.socket, bytes], Line]
    ) -> None:
        """Serve clients that greet with ``opening`` and ``more`` bytes, which ``serve`` gets."""
        self._greetings = (*self._greetings, _Greeting(opening, len(opening) + more, serve))

    def call(self, call: Callable[[], object]) -> None:
        """Call ``call`` in the listener's thread, unless that has ended; from any thread."""
        self._calls.put(call)
        # A full socket wakes the thread too; a closed socket means that the thread has ended.
        with suppress(OSError):
            self._wakes.send(b"\0")

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call ``call`` after ``seconds``; only in the listener's thread."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), call))

    def serve(self, line: Line) -> None:
        """Serve a connection that this node has begun; only in the listener's thread."""
        self._lines.add(line)
        self._selector.register(line.socket, _events(line), line)

    def drop(self, line: Line) -> None:
        """Close a connection in good order; only in the listener's thread."""
        with unforked:
            self._forget(line)
            with suppress(OSError):
                line.part()
            line.socket.close()

    def close(self, seconds: float = 2.0) -> None:
        """End the thread; wait for its end for ``seconds`` at most."""
        self.call(partial(setattr, self, "_ends", True))
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _close(self) -> None:
        for it in (self._server, self._selector, self._wakes, self._woken):
            it.close()

    def close_in_child(self) -> None:
        """Close a forked child's copies of the sockets; they stay open in the parent."""
        # Do not unregister them: the child shares the selector with its parent.
        for it in (self._server, self._wakes, self._woken, *(line.socket for line in self._lines)):
            it.close()

    def _serve(self) -> None:
        selector = self._selector
        selector.register(self._server, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        try:
            while not self._ends:
                # Read before the deadlines: if this process stood still, a client that answered
                # meanwhile is not late.
                for key, _ in selector.select(self._patience()):
                    if key.data in self._lines:
                        self._go_on(key.data)
                    elif key.fileobj is self._woken:
                        with suppress(BlockingIOError):
                            self._woken.recv(1 << 12)
                    elif key.fileobj is self._server:
                        self._accept()
                with suppress(Empty):
                    while True:
                        self._calls.get_nowait()()
                now = time.monotonic()
                for line in [it for it in self._lines if it.expires <= now]:
                    self._finish(line, TimeoutError("timed out"))
                while self._timers and self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[2]()
        finally:
            for line in [*self._lines]:
                self.drop(line)
            self._close()

    def _patience(self) -> float | None:
        """Seconds until a timer is due or a connection expires; None: nothing is due."""
        timers = (due for due, _, _ in self._timers[:1])
        due = min((math.inf, *timers, *(it.expires for it in self._lines)))
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED_AT_ONCE):
            with unforked:
                if not self._accept_one():
                    return

    def _accept_one(self) -> bool:
        """Accept one connection; False: none waits."""
        try:
            line, _ = self._server.accept()
        except BlockingIOError:
            return False
        except OSError:
            # This process may have no descriptor left: try again after a pause. Without
            # SO_ACCEPTCONN the socket is destroyed, and never accepts again.
            self._selector.unregister(self._server)
            if self._server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                register = self._selector.register
                self.later(_PAUSE_SECONDS, partial(register, self._server, selectors.EVENT_READ))
            return False
        line.setblocking(False)
        few = [it for it in self._lines if it.counts]
        if len(few) >= _MOST_CLIENTS:
            # Drop a stranger first, else the oldest connection.
            self.drop(min(few, key=lambda it: (it.known, it.since)))
        self.serve(_Stranger(line, self._greetings))
        return True

    def _go_on(self, line: Line) -> None:
        wrote = line.writes
        try:
            after = line.go_on()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._finish(line, error)
            return
        if after is None:
            self._finish(line, None)
        elif after is not line or after.writes != wrote:
            self._lines.discard(line)
            self._lines.add(after)
            self._selector.modify(after.socket, _events(after), after)

    def _finish(self, line: Line, error: OSError | None) -> None:
        with unforked:
            self._forget(line)
            line.socket.close()
        line.over(error)

    def _forget(self, line: Line) -> None:
        if line in self._lines:
            self._lines.discard(line)
            self._selector.unregister(line.socket)


def _events(line: Line) -> int:
    return selectors.EVENT_WRITE if line.writes else selectors.EVENT_READ


unforked = threading.RLock()
"""Prevents a fork while a connection is open that no listener serves."""

_open: WeakSet[Listener] = WeakSet()


def _close_in_child() -> None:
    unforked.release()
    for listener in [*_open]:
        listener.close_in_child()


# A forked child closes its copies of the agent's links and port. Otherwise they would stay open
# after the agent's end, and no other node would see its end.
os.register_at_fork(
    before=unforked.acquire, after_in_parent=unforked.release, after_in_child=_close_in_child
)
