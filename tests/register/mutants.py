"""Faults put into the registers, one at a time; the checker must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from rdzv_plugins.register.acceptor import Acceptor
from rdzv_plugins.register.member import Member
from rdzv_plugins.register.messages import NEVER, List, Read
from rdzv_plugins.register.proposer import Changing, Look, Rivals

__all__ = ["MUTANTS", "broken"]

Broken = Callable[..., Any]


def forgets_promises(it: Acceptor, original: Broken, key: str, ballot: Any, now: float) -> Any:
    answer = original(it, key, ballot, now)
    if key in it._registers:
        it._registers[key].promised = it._registers[key].accepted
    return answer


def reads_in_any_generation(it: Acceptor, original: Broken, request: Any, now: float) -> Any:
    if isinstance(request, Read | List):
        request = replace(request, generation=it.generation)
    return original(it, request, now)


def sweeps_without_a_floor(it: Acceptor, original: Broken, empty: Any) -> None:
    original(it, empty)
    it._floor = NEVER


def reads_from_one(it: Look, original: Broken, *arguments: Any) -> Any:
    with patch.object(it._proposer, "majority", 1):
        return original(it, *arguments)


def takes_any_promised_value(it: Changing, original: Broken, now: float) -> Any:
    first = next(iter(it._promises.values())).held
    it._promises = {key: replace(one, held=first) for key, one in it._promises.items()}
    return original(it, now)


def writes_to_fewer(it: Changing, original: Broken, *arguments: Any) -> Any:
    with patch.object(it._proposer, "majority", it._proposer.size // 2):
        return original(it, *arguments)


def recovers_from_one(it: Member, original: Broken, *arguments: Any) -> Any:
    with patch.object(it, "_majority", 1):
        return original(it, *arguments)


def restarts_as_the_same(it: Member, original: Broken, incarnation: int, now: float) -> None:
    original(it, 1, now)


def starts_with_an_empty_memory(it: Member, original: Broken, incarnation: int, now: float) -> None:
    original(it, incarnation, now)
    it.acceptor.generation, it.acceptor.takes_part = (1, 0), True


def settles_nothing(it: Look, original: Broken) -> None:
    original(it)
    for key in it.unsettled:
        held = [answer.held[key] for answer in it._answers.values() if key in answer.held]
        it.held[key] = max(held, key=lambda one: one.accepted)
    it.unsettled = []


def leaves_to_an_earlier_put(it: Rivals, original: Broken, held: Any) -> Any:
    it._first = NEVER
    return original(it, held)


MUTANTS: dict[str, tuple[type, str, Broken]] = {
    "a promise is forgotten": (Acceptor, "_promise", forgets_promises),
    "a read counts members of any generation": (Acceptor, "answer", reads_in_any_generation),
    "a sweep leaves no floor": (Acceptor, "drop", sweeps_without_a_floor),
    "a read asks one member": (Look, "hear", reads_from_one),
    "a read settles nothing": (Look, "_compare", settles_nothing),
    "a change rests on any promised value": (Changing, "_accept", takes_any_promised_value),
    "a put is left to an earlier one": (Rivals, "leave_nothing", leaves_to_an_earlier_put),
    "a minority accepts": (Changing, "hear", writes_to_fewer),
    "one copy suffices": (Member, "_take_copy", recovers_from_one),
    "a member restarts in the same incarnation": (Member, "_start", restarts_as_the_same),
    "a new member takes part at once": (Member, "_start", starts_with_an_empty_memory),
}
"""What each mutant does wrong, and the function that stands in the place of a method.

`test_rules.py` has the rules whose absence only rare schedules show.
"""


@contextmanager
def broken(mutant: str) -> Iterator[None]:
    """Have the mutant at work."""
    owner, name, function = MUTANTS[mutant]
    with patch.object(owner, name, partialmethod(_call, function, getattr(owner, name))):
        yield


def _call(it: Any, function: Broken, original: Broken, *arguments: Any) -> Any:
    return function(it, original, *arguments)
