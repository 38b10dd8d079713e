"""A TCP proxy that counts round trips and breaks connections on demand."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

__all__ = ["Proxy"]

Address = tuple[str, int]


class Proxy:
    """Forwards connections of clients to a server; a context manager.

    Attributes:
        address: where clients connect: (host, port).
        round_trips: the number of answers on all connections; an answer is everything that the
            server sends between two requests of the client.

    Args:
        address: where to listen.
        new_socket: makes the listening sockets, perhaps in another network namespace.
    """

    def __init__(
        self,
        target: Address,
        address: Address = ("127.0.0.1", 0),
        new_socket: Callable[[], socket.socket] = socket.socket,
    ) -> None:
        self._target = target
        self._new_socket = new_socket
        self._changed = threading.Condition()
        self._links: set[_Link] = set()
        self._listener: socket.socket | None = None
        self._mode = "forward"
        self._answers_to_cut: int | None = None
        self.round_trips = 0
        self.address = address
        self.accept()

    def accept(self) -> None:
        """Listen again after `refuse`, at the same address."""
        listener = self._new_socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(self.address)
        listener.listen(128)
        self.address = listener.getsockname()
        self._listener = listener
        threading.Thread(
            target=self._accept, args=(listener,), name="proxy-accept", daemon=True
        ).start()

    def refuse(self) -> None:
        """Refuse new connections and cut all others, as if nothing listened."""
        if self._listener is not None:
            # Without the shutdown, the thread in accept() would keep the port open.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.cut()

    def lead_to(self, target: Address) -> None:
        """Forward new connections to another server."""
        self._target = target

    def cut(self) -> None:
        """Close every connection, and accept new ones."""
        with self._changed:
            links = [*self._links]
        for link in links:
            link.close()

    def cut_answer(self, number: int = 1) -> None:
        """Close the connection of the ``number``-th answer from now on, when the answer begins.

        The server has executed the request, and the client gets no answer.
        """
        with self._changed:
            self._answers_to_cut = number

    @property
    def answer_was_cut(self) -> bool:
        """Whether `cut_answer` has cut an answer; if not, this cancels it."""
        with self._changed:
            was_cut = self._answers_to_cut is None
            self._answers_to_cut = None
            return was_cut

    def hold(self) -> None:
        """Accept connections and bytes, and forward nothing until `release`."""
        self._set_mode("hold")

    def black_hole(self) -> None:
        """Accept connections and discard their bytes, until `release`."""
        self._set_mode("lose")

    def release(self) -> None:
        """Forward bytes again, first the held ones; cut each connection that lost bytes."""
        self._set_mode("forward")

    def close(self) -> None:
        """Refuse and cut all connections; idempotent."""
        self.refuse()
        self.release()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _set_mode(self, mode: str) -> None:
        with self._changed:
            self._mode = mode
            self._changed.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(client, server)
            with self._changed:
                self._links.add(link)
            for answers in (False, True):
                threading.Thread(
                    target=self._pump, args=(link, answers), name="proxy-pump", daemon=True
                ).start()

    def _pump(self, link: _Link, answers: bool) -> None:
        source, sink = (link.server, link.client) if answers else (link.client, link.server)
        try:
            while data := source.recv(65536):
                if not self._passes(link, answers):
                    break
                sink.sendall(data)
        except OSError:
            pass
        finally:
            link.close()
            with self._changed:
                self._links.discard(link)

    def _passes(self, link: _Link, answer: bool) -> bool:
        """Whether received bytes may be forwarded; False: the connection must be cut."""
        with self._changed:
            lost = self._mode == "lose"
            while self._mode != "forward":
                lost = lost or self._mode == "lose"
                self._changed.wait()
            if lost:
                return False
            begins = answer and link.asked
            link.asked = not answer
            if not begins:
                return True
            self.round_trips += 1
            if self._answers_to_cut is None:
                return True
            self._answers_to_cut -= 1
            if self._answers_to_cut:
                return True
            self._answers_to_cut = None
            return False


class _Link:
    """The two connections of one client."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.asked = False

    def close(self) -> None:
        for end in (self.client, self.server):
            # A close alone would not wake the thread that reads.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
