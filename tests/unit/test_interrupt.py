"""Commands that go on until Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from rdzv_plugins.cli.interrupt import Interrupt
from rdzv_plugins.testing.harness import until

SECONDS = 20.0


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    were = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield Interrupt()
    finally:
        for number, handler in were.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_came_before_the_wait_ends_it(
    interrupt: Interrupt, number: signal.Signals
) -> None:
    signal.raise_signal(number)
    interrupt.wait(lambda: pytest.fail("it waited"))


def test_a_signal_during_a_look_ends_the_wait(interrupt: Interrupt) -> None:
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 2:
            signal.raise_signal(signal.SIGINT)

    interrupt.wait(look)
    assert len(looks) == 2


def test_a_signal_that_ends_no_wait_is_noticed_all_the_same(interrupt: Interrupt) -> None:
    """One that comes between Python's last look and the wait is like one of another thread."""
    noticed, in_time = threading.Event(), []

    def waits() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return frame.f_code is Interrupt.wait.__code__

    def send() -> None:
        assert until(waits, SECONDS)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        in_time.append(noticed.wait(SECONDS))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    interrupt.wait()
    noticed.set()
    thread.join()
    assert in_time == [True]
