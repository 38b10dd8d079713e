"""The main thread's waits: no signal is missed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from rdzv_plugins.clock import take
from rdzv_plugins.process.signals import SignalWatch, _ending
from rdzv_plugins.testing.harness import until

SECONDS = 20.0


class SignalError(Exception):
    """What the handler raises."""


@pytest.mark.parametrize("seconds", [None, 2 * SECONDS])
def test_a_signal_that_ends_no_wait_is_noticed_all_the_same(seconds: float | None) -> None:
    """One that comes between Python's last look and the wait is like one of another thread."""

    def handle(*_: object) -> None:
        raise SignalError

    queue: SimpleQueue[str] = SimpleQueue()
    noticed, in_time = threading.Event(), []

    def waits() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return frame.f_code is take.__code__

    def interrupt() -> None:
        assert until(waits, SECONDS)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        in_time.append(noticed.wait(SECONDS))
        queue.put("ends the wait")

    thread = threading.Thread(target=interrupt)
    was = signal.signal(signal.SIGUSR1, handle)
    try:
        thread.start()
        with pytest.raises(SignalError):
            take(queue, seconds)
    finally:
        noticed.set()
        signal.signal(signal.SIGUSR1, was)
        thread.join()
    assert in_time == [True]


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.7])
def test_the_main_thread_waits_as_long_as_it_is_told(seconds: float) -> None:
    queue: SimpleQueue[str] = SimpleQueue()
    began = time.monotonic()
    with pytest.raises(Empty):
        take(queue, seconds)
    assert time.monotonic() - began >= seconds
    queue.put("here")
    assert take(queue, seconds) == "here"


def test_a_signal_while_the_watch_begins_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    announced = threading.Event()
    watch = SignalWatch(announced.set, "signals of a test")
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        signal.raise_signal(signal.SIGTERM)
        start(thread)

    was = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    try:
        with pytest.raises(SignalException):
            watch.renew()
        assert announced.wait(SECONDS)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    finally:
        watch.release()
        signal.signal(signal.SIGTERM, was)


def test_a_signal_whose_exception_was_swallowed_is_raised_again() -> None:
    announced = threading.Event()
    watch = SignalWatch(announced.set, "signals of a test")
    was = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        watch.renew()
        with suppress(SignalException):
            signal.raise_signal(signal.SIGTERM)
        assert announced.wait(SECONDS)
        for _ in range(2):
            with pytest.raises(SignalException) as raised:
                watch.renew()
            assert raised.value.sigval is signal.SIGTERM
    finally:
        watch.release()
        signal.signal(signal.SIGTERM, was)


@pytest.mark.parametrize(
    ("told", "more"),
    [
        ("", set()),
        ("SIGUSR1, SIGUSR2", {signal.SIGUSR1, signal.SIGUSR2}),
        ("SIGTERM,SIGKILL,SIGCHLD,SIGNONSENSE,", set()),
    ],
)
def test_signals_that_torch_was_told_to_handle_end_the_process(
    told: str, more: set[signal.Signals]
) -> None:
    usual = {signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT}
    assert _ending(told) == usual | more
