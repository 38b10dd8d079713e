"""A process that is killed (SIGKILL) at random moments, in the midst of a write."""

from __future__ import annotations

import os
import random
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, pairwise
from typing import NoReturn, TypeVar

import pytest

from rdzv_plugins.kv import Entry, KeyValueClient
from rdzv_plugins.testing.harness import SLACK, Harness, Open, Store, present, until
from rdzv_plugins.testing.threads import Background

__all__ = ["KilledWriterTests"]

KILLS = 4

# How long a writer may take to connect and to complete two writes.
BEGINS_WITHIN = 30.0

# The time-out of clients that write afterwards, in seconds.
REQUEST_TIMEOUT = 5.0

# The size of a node's record, and of a value of many packets.
SIZES = [300, 100_000]

# Keys of a record and its bell, of a batch that most stores write atomically, and of a larger one.
BATCHES = [2, 20, 150]

T = TypeVar("T")

Write = Callable[[KeyValueClient, int], object]
"""Writes a number: 1, 2, 3 and so on."""

Writers = Callable[[Write], Iterator[int]]
"""Kills one writer after another; yields the number of each one's completed writes."""


class KilledWriterTests(Harness):
    """A write is complete or absent, and a dead writer does not delay other clients."""

    @pytest.fixture
    def writers(self, store: Store, open: Open) -> Writers:
        if not store.forks:
            pytest.skip("Store.forks is False: no other process can write to this store")
        return lambda write: (_kill_one(open, write) for _ in range(KILLS))

    @pytest.fixture
    def client(self, open: Open) -> KeyValueClient:
        """A client that is connected before the kill."""
        return open(request_timeout=REQUEST_TIMEOUT)

    @pytest.mark.parametrize("size", SIZES)
    def test_killed_put_leaves_the_old_or_the_new_value(
        self, writers: Writers, client: KeyValueClient, open: Open, size: int
    ) -> None:
        for done in writers(lambda writer, number: writer.put("key", _value(number, size))):
            # The dead writer's last request may still arrive; then its value stays.
            seen = [_number(present(client.get("key")).value) for _ in range(3)]
            assert {*seen} <= {done, done + 1}
            assert seen == sorted(seen), "the old value came back"
            for successor in (client, open(request_timeout=REQUEST_TIMEOUT)):
                _in_time(partial(successor.put, "other", b"mine"))
                _in_time(partial(successor.put, "key", _value(0, size)))
                assert _number(present(client.get("key")).value) in {0, done + 1}

    @pytest.mark.parametrize("size", SIZES)
    def test_killed_compare_and_set_leaves_the_old_or_the_new_value(
        self, writers: Writers, client: KeyValueClient, open: Open, size: int
    ) -> None:
        last: Entry | None = None

        def write(writer: KeyValueClient, number: int) -> None:
            nonlocal last
            version = last.version if last is not None else None
            last, won = writer.compare_and_set("key", _value(number, size), version)
            assert won

        for done in writers(write):
            entry, won = client.get("key"), False
            attempts = 0
            while not won:
                assert _number(present(entry).value) in {done, done + 1}
                set_mine = partial(client.compare_and_set, "key", b"mine", present(entry).version)
                entry, won = _in_time(set_mine)
                attempts += 1
                assert attempts <= 2, "the dead writer wrote more than once"
            # The dead writer's last request can no longer be applied.
            newcomer = open(request_timeout=REQUEST_TIMEOUT)
            assert newcomer.get("key") == entry
            assert _in_time(partial(newcomer.compare_and_set, "key", b"", present(entry).version))[
                1
            ]
            client.delete("key")

    @pytest.mark.parametrize("keys", BATCHES)
    def test_killed_put_many_leaves_a_whole_batch_or_its_beginning(
        self, writers: Writers, client: KeyValueClient, open: Open, keys: int
    ) -> None:
        names = [f"batch/{number:04}" for number in range(keys)]

        def batch(number: int) -> dict[str, bytes]:
            return dict.fromkeys(names, _value(number, 40))

        def numbers() -> list[int]:
            found = client.get_many(names)
            assert len(found) == keys, f"{keys - len(found)} of {keys} keys were lost"
            return [_number(found[name].value) for name in names]

        def is_sound(seen: list[int]) -> bool:
            if keys in client.capabilities.atomic:
                return len({*seen}) == 1
            return all(earlier >= later for earlier, later in pairwise(seen))

        for done in writers(lambda writer, number: writer.put_many(batch(number))):
            # The dead writer's last request may arrive during a read of many keys.
            assert until(lambda: is_sound(numbers()), SLACK), f"it left a half batch: {numbers()}"
            assert {*numbers()} <= {done, done + 1}
            for successor in (client, open(request_timeout=REQUEST_TIMEOUT)):
                _in_time(partial(successor.put_many, batch(0)))
                assert {*numbers()} <= {0, done + 1}

    def test_killed_add_counts_once_or_not_at_all(
        self, writers: Writers, client: KeyValueClient, open: Open
    ) -> None:
        for done in writers(lambda writer, _: writer.add("count", 1)):
            first = _in_time(partial(client.add, "count", 1))
            second = _in_time(partial(open(request_timeout=REQUEST_TIMEOUT).add, "count", 1))
            # The dead writer's last addition counts before, between or not at all.
            counted = first - done, second - first
            assert counted in {(1, 1), (2, 1), (1, 2)}, f"{done} counted, then {first}, {second}"
            assert present(client.get("count")).value == b"%d" % second
            client.delete("count")


def _value(number: int, size: int) -> bytes:
    """About ``size`` bytes: a first half that never changes, and the repeated number."""
    return b"." * (size // 2) + b"%08d;" % number * (size // 2 // 9)


def _number(value: bytes) -> int:
    """The number in a complete value."""
    numbers = {*value.lstrip(b".").split(b";")[:-1]}
    assert len(numbers) == 1, f"a value is torn: it has {sorted(numbers)}"
    number = int(numbers.pop())
    assert value == _value(number, 2 * value.count(b".")), "a value is torn"
    return number


def _in_time(write: Callable[[], T]) -> T:
    """The result of a write, which must end within its request timeout."""
    return Background(write).result(REQUEST_TIMEOUT + SLACK)


def _kill_one(open: Open, write: Write) -> int:
    """Kill a process that keeps writing; return the number of its completed writes."""
    done, tells = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads; the new process uses only its own client.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _write_on(open, write, tells, parent)
    os.close(tells)
    try:
        for _ in range(2):
            begun = time.monotonic()
            select.select([done], [], [], BEGINS_WITHIN)
            told = os.read(done, 1)
        # A random moment of the next writes.
        time.sleep(random.uniform(0, 2 * (time.monotonic() - begun)))
    finally:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    with os.fdopen(done, "rb") as rest:
        assert told, "the writer failed or was not ready; its error, if any, is on stderr"
        number = 2 + len(rest.read())
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the writer failed: see stderr"
    return number


def _write_on(open: Open, write: Write, tells: int, parent: int) -> NoReturn:
    try:
        writer = open(request_timeout=REQUEST_TIMEOUT)
        for number in count(1):
            write(writer, number)
            os.write(tells, b".")
            if os.getppid() != parent:
                break
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)
