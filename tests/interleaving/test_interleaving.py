"""Thousands of turns of real handlers' threads; a seed that fails is one to run alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from rdzv_plugins.kv import Attempts
from rdzv_plugins.process.driver import Driver
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.master import Master
from tests import Measure
from tests.interleaving.plays import play
from tests.interleaving.scheduler import StuckError

SEEDS = 1500


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # What the plays break on purpose is told in the log.
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(300), id="some"),
        pytest.param(range(300, SEEDS), id="others", marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(600)
def test_whatever_the_turns_all_ends_as_it_must(seeds: range, record_property: Measure) -> None:
    turns = 0
    for seed in seeds:
        try:
            turns += play(seed).scheduler.turns
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    record_property("turns", turns)


def test_a_seed_gives_the_same_turns_again() -> None:
    assert play(7).scheduler.turns == play(7).scheduler.turns


def end_without_a_last_word(self: Any, last_word: Any, failed: str) -> bool:
    return bool(END(self, lambda: None, failed))


def stop_without_an_outcome(self: Any, seconds: float) -> None:
    self._stopping.set()
    self._nudge_until(lambda: not self.running, seconds)


def deliver_nothing(self: Any, outcome: Any) -> None:
    if self._node.document is None or self._node.document.round > 0:
        self._outcomes.put(outcome)


def end_whenever_asked(self: Any, last_word: Any, failed: str) -> bool:
    self._ended = False
    return bool(END(self, last_word, failed))


def open_in_a_loop(self: Any, world_id: str) -> Any:
    """As it was: nothing is asked, and nobody waits, between two attempts."""
    while True:
        self._attempts = Attempts(self._clock)
        found = yield from OPEN(self, world_id)
        if not (isinstance(found, float) and self._reopens):
            return found


END = StoreRendezvousHandler._end
OPEN = Master.open
MUTANTS: dict[str, tuple[type, str, Any]] = {
    "the farewell is never said": (StoreRendezvousHandler, "_end", end_without_a_last_word),
    "it is said by all who end the node": (StoreRendezvousHandler, "_end", end_whenever_asked),
    "a stop tells no waiting agent": (Driver, "stop", stop_without_an_outcome),
    "the first round's outcome is lost": (Driver, "_deliver", deliver_nothing),
    "what cannot be opened is tried again and again": (Master, "open", open_in_a_loop),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_is_broken_is_noticed(mutant: str) -> None:
    with patch.object(*MUTANTS[mutant]), pytest.raises((AssertionError, StuckError)):
        play_all()


def play_all() -> None:
    for seed in range(SEEDS):
        play(seed)
