"""Connections that break, servers that cannot be reached, and servers that restart."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from rdzv_plugins.kv import Entry, KeyValueClient, RendezvousConnectionError, Version
from rdzv_plugins.testing.harness import SLACK, Harness, Open, Store, present, until
from rdzv_plugins.testing.proxy import Proxy
from rdzv_plugins.testing.threads import Background

REQUEST_TIMEOUT = 1.0

REQUESTS: dict[str, Callable[[KeyValueClient], object]] = {
    "get": lambda client: client.get("key"),
    "put": lambda client: client.put("key", b"two"),
    "compare_and_set": lambda client: client.compare_and_set("key", b"two", None),
    "delete": lambda client: client.delete("key"),
    "list": lambda client: client.list(""),
    "add": lambda client: client.add("count", 1),
    "get_many": lambda client: client.get_many(["key", "other"]),
    "put_many": lambda client: client.put_many({"key": b"two", "other": b""}),
    "delete_many": lambda client: client.delete_many(["key", "other"]),
    "expire": lambda client: client.expire(60),
}

# How `Proxy` takes the server away, and how it brings it back.
SERVER_AWAY = {"refuse": Proxy.accept, "black_hole": Proxy.release}


class NetworkTests(Harness):
    # A client may need several requests for one write; the suite cuts each answer in turn.
    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_write_whose_answer_is_lost_is_resolved(
        self, through: KeyValueClient, proxy: Proxy, client: KeyValueClient, number: int
    ) -> None:
        first = present(through.compare_and_set("key", b"one", None)[0])
        proxy.cut_answer(number)
        entry, won = through.compare_and_set("key", b"two", first.version)
        assert number > 1 or proxy.answer_was_cut, "the suite cut nothing"
        assert won, "nobody else wrote: the write is ours"
        assert client.get("key") == entry
        assert present(entry).value == b"two"
        proxy.cut_answer(number)
        entry, won = through.compare_and_set("new", b"one", None)
        assert won
        assert client.get("new") == entry

    @pytest.mark.parametrize("number", [1, 2, 3])
    @pytest.mark.parametrize("exists", [False, True])
    def test_lost_refusal_is_no_success(
        self,
        through: KeyValueClient,
        proxy: Proxy,
        client: KeyValueClient,
        number: int,
        exists: bool,
    ) -> None:
        """Another client wrote equal bytes, which must not look like this client's own write."""
        stale: Version | None = None
        if exists:
            stale = through.put("key", b"before")
        client.put("key", b"same")
        through.compare_and_set("warm", b"same", None)
        proxy.cut_answer(number)
        entry, won = through.compare_and_set("key", b"same", stale)
        assert number > 1 or proxy.answer_was_cut, "the suite cut nothing"
        assert not won, "another client's write was taken for ours"
        assert client.get("key") == entry

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_lost_answer_to_a_plain_write(
        self, through: KeyValueClient, proxy: Proxy, client: KeyValueClient, number: int
    ) -> None:
        through.put_many({"key": b"one", "other": b"one"})
        proxy.cut_answer(number)
        version = through.put("key", b"two")
        assert client.get("key") == Entry(b"two", version)
        proxy.cut_answer(number)
        through.put_many({"key": b"three", "other": b"three"})
        found = client.get_many(["key", "other"])
        assert [found[key].value for key in ("key", "other")] == [b"three"] * 2
        proxy.cut_answer(number)
        through.delete("key")
        assert client.get("key") is None
        proxy.cut_answer(number)
        assert {*through.list("")} == {"other"}

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_addition_whose_answer_is_lost_counts_once_at_most(
        self, through: KeyValueClient, proxy: Proxy, client: KeyValueClient, number: int
    ) -> None:
        through.add("count", 1)
        proxy.cut_answer(number)
        try:
            total = through.add("count", 1)
        except RendezvousConnectionError:
            assert client.add("count", 0) in {1, 2}
        else:
            assert client.add("count", 0) == total == 2

    def test_connection_cut_while_idle_is_mended(
        self, through: KeyValueClient, proxy: Proxy
    ) -> None:
        through.put("key", b"one")
        for number in range(3):
            proxy.cut()
            assert present(through.get("key")).value
            proxy.cut()
            entry, won = through.compare_and_set(f"key-{number}", b"one", None)
            assert won, "the request never reached the server, and nobody else wrote"
            assert through.get(f"key-{number}") == entry

    def test_addition_over_a_connection_cut_while_idle(
        self, through: KeyValueClient, proxy: Proxy
    ) -> None:
        for total in range(1, 4):
            proxy.cut()
            assert through.add("count", 1) == total, "the request never reached the server"

    @pytest.mark.parametrize("away", SERVER_AWAY)
    def test_connecting_ends_within_its_deadline(
        self, open_through: Open, proxy: Proxy, away: str
    ) -> None:
        getattr(proxy, away)()
        begun = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match=str(proxy.address[1])):
            open_through(request_timeout=REQUEST_TIMEOUT)
        assert time.monotonic() - begun < REQUEST_TIMEOUT + SLACK

    @pytest.mark.parametrize("away", SERVER_AWAY)
    def test_requests_end_within_their_deadline(
        self, open_through: Open, proxy: Proxy, away: str
    ) -> None:
        client = open_through(request_timeout=REQUEST_TIMEOUT)
        client.put("key", b"one")
        getattr(proxy, away)()
        # Concurrent requests must all keep their deadlines.
        running = {name: Background(partial(call, client)) for name, call in REQUESTS.items()}
        deadline = time.monotonic() + REQUEST_TIMEOUT + SLACK
        for name, request in running.items():
            assert request.done(max(0.0, deadline - time.monotonic())), f"{name} has not ended"
            with pytest.raises(RendezvousConnectionError, match=str(proxy.address[1])):
                request.result(0)
        SERVER_AWAY[away](proxy)
        assert until(lambda: _answers(client), 10 + SLACK), "the client did not come back"
        client.put("after", b"three")
        assert present(client.get("after")).value == b"three"

    @pytest.mark.parametrize("away", SERVER_AWAY)
    def test_wait_ends_when_its_time_is_up_though_the_server_is_away(
        self, open_through: Open, proxy: Proxy, away: str
    ) -> None:
        client = open_through(request_timeout=REQUEST_TIMEOUT)
        waiter = Background(lambda: _wait(client, None, 2))
        assert not waiter.done(0.2), waiter.result(0)
        getattr(proxy, away)()
        assert waiter.result(2 + REQUEST_TIMEOUT + SLACK) is None

    def test_slow_answer_is_waited_for(self, through: KeyValueClient, proxy: Proxy) -> None:
        through.put("key", b"one")
        proxy.hold()
        reading = Background(lambda: through.get("key"))
        assert not reading.done(1)
        proxy.release()
        assert present(reading.result(5 + SLACK)).value == b"one"

    def test_waiter_outlives_a_cut_connection(
        self, through: KeyValueClient, proxy: Proxy, client: KeyValueClient
    ) -> None:
        known = through.put("key", b"one")
        for value in (b"two", b"three"):
            waiter = Background(lambda known=known: _wait_on(through, known))  # type: ignore[misc]
            assert not waiter.done(0.2)
            proxy.cut()
            version = client.put("key", value)
            assert waiter.result(10) == Entry(value, version)
            known = version

    @pytest.mark.parametrize("away", SERVER_AWAY)
    def test_waiter_sees_what_was_written_during_an_outage(
        self, open_through: Open, proxy: Proxy, client: KeyValueClient, away: str
    ) -> None:
        through = open_through(request_timeout=REQUEST_TIMEOUT)
        known = through.put("key", b"one")
        waiter = Background(lambda: _wait_on(through, known))
        assert not waiter.done(0.2)
        getattr(proxy, away)()
        version = client.put("key", b"two")
        assert not waiter.done(REQUEST_TIMEOUT + 0.5)
        SERVER_AWAY[away](proxy)
        assert waiter.result(15) == Entry(b"two", version)

    @pytest.mark.parametrize("away", SERVER_AWAY)
    def test_close_is_prompt_though_the_server_is_away(
        self, open_through: Open, proxy: Proxy, away: str
    ) -> None:
        client = open_through(request_timeout=30)
        waiter = Background(lambda: _wait(client, None, 30))
        assert not waiter.done(0.2)
        getattr(proxy, away)()
        closing = Background(client.close)
        closing.result(1 + SLACK)
        assert waiter.result(1 + SLACK) is None

    @pytest.mark.parametrize("parked", [True, False], ids=["parked", "asking"])
    def test_interrupt_is_prompt_though_the_server_hangs(
        self, open_through: Open, proxy: Proxy, parked: bool
    ) -> None:
        client = open_through(request_timeout=30)
        client.put("other", b"one")
        if not parked:
            proxy.black_hole()
        waiters = [Background(lambda: _wait(client, None, 60)) for _ in range(2)]
        assert not any(waiter.done(0.3) for waiter in waiters)
        if parked:
            proxy.black_hole()
        interrupts = [Background(client.interrupt) for _ in range(5)]
        for interrupt in interrupts:
            interrupt.result(SLACK)
        assert [waiter.result(SLACK) for waiter in waiters] == [None, None]
        waiter = Background(lambda: _wait(client, None, 60))
        assert not waiter.done(0.3), "an interrupt was kept for later"
        client.interrupt()
        assert waiter.result(SLACK) is None
        proxy.release()
        assert client.get("other") is not None

    def test_server_restart_with_its_data(self, store: Store, client: KeyValueClient) -> None:
        if store.restart is None:
            pytest.skip("Store.restart is not given")
        if not store.keeps:
            pytest.skip("the server keeps nothing over a restart")
        known = client.put("key", b"one")
        waiter = Background(lambda: _wait_on(client, known))
        assert not waiter.done(0.2)
        store.restart(empty=False)
        assert until(lambda: _answers(client), 20), "the client did not come back"
        assert client.get("key") == Entry(b"one", known)
        entry, won = client.compare_and_set("key", b"two", known)
        assert won
        assert waiter.result(20) == entry

    def test_the_last_answers_of_a_stopping_server_are_no_refusals(
        self, store: Store, namespace: str, client: KeyValueClient, open: Open
    ) -> None:
        if store.restart is None:
            pytest.skip("Store.restart is not given")
        # Many requests, because few hit the moment of the server's last answers.
        calls = [*REQUESTS.values()]
        calls += [lambda one: one.wait("key", None, 1)] * len(calls)
        clients = [open(f"{namespace}-{number}") for number in range(4)]
        stopped = threading.Event()

        def keep_asking(one: KeyValueClient, call: Callable[[KeyValueClient], object]) -> None:
            while not stopped.is_set():
                with contextlib.suppress(RendezvousConnectionError):
                    call(one)

        asking = [
            Background(partial(keep_asking, clients[number % len(clients)], call))
            for number, call in enumerate(calls)
        ]
        store.restart(empty=False)
        stopped.set()
        assert until(lambda: _answers(client), 20), "the client did not come back"
        for item in asking:
            item.result(30)

    def test_server_restart_with_an_empty_memory(
        self, store: Store, client: KeyValueClient, open: Open
    ) -> None:
        if store.restart is None:
            pytest.skip("Store.restart is not given")
        versions = {client.put("key", b"%d" % number) for number in range(5)}
        known = client.put("key", b"last")
        waiter = Background(lambda: _wait_on(client, known))
        assert not waiter.done(0.2)
        store.restart(empty=True)
        assert until(lambda: _answers(client), 20), "the client did not come back"
        assert client.get("key") is None
        assert client.compare_and_set("key", b"mine", known) == (None, False)
        newcomer = open()
        # At least as many writes as before, so that a version that only counts would repeat.
        again = {newcomer.put("key", b"%d again" % number) for number in range(12)}
        assert not again & {*versions, known}
        assert client.compare_and_set("key", b"mine", known)[1] is False
        seen = present(waiter.result(20))
        assert seen.version in again


def _answers(client: KeyValueClient) -> bool:
    try:
        client.get("key")
    except RendezvousConnectionError:
        return False
    return True


def _wait(client: KeyValueClient, version: Version | None, timeout: float) -> Entry | None:
    """The result of `wait`; None if it raises, as it may during an outage."""
    try:
        return client.wait("key", version, timeout)
    except RendezvousConnectionError:
        return None


def _wait_on(client: KeyValueClient, version: Version) -> Entry | None:
    """Wait for a new entry, and retry after errors."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        entry = _wait(client, version, 60)
        if entry is not None:
            return entry
    return None
