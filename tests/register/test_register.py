"""Registers under seeded faults; ``python -m tests.register`` tries more seeds."""

from __future__ import annotations

import pytest

from .checker import faults
from .mutants import MUTANTS, broken
from .world import World


def play(seed: int) -> World:
    world = World(seed, size=(1, 3, 3, 3, 5, 5)[seed % 6])
    world.play()
    return world


def wrong(seed: int) -> str:
    """What is wrong with the play of a seed: its history, or where it ends; "": nothing."""
    world = play(seed)
    if found := faults(world):
        return found[0]
    members = world.members.values()
    if not all(it.takes_part for it in members) or len({it.generation for it in members}) > 1:
        return "not all members take part in one generation at the end"
    late = [it for it in world.history if it.began > world.seconds + 3]
    return "" if sum(it.ended is not None for it in late) > 3 else "nothing is done at the end"


def test_every_history_is_linearizable_and_the_members_recover() -> None:
    assert [found for seed in range(100) if (found := wrong(seed))] == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_checker_finds(mutant: str) -> None:
    with broken(mutant):
        assert any(faults(play(seed)) for seed in range(200))
