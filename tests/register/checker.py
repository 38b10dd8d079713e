"""Whether what clients saw of each register, in each generation, has an order: linearizability.

Within a generation ballots order the states of a register. Therefore it suffices that each write
follows the one before it, that nobody who begins later sees an earlier state, and that no
generation is seen after a later one.
"""

from __future__ import annotations

from collections import defaultdict

from rdzv_plugins.register.messages import NEVER, Ballot

from .world import Operation, World

__all__ = ["faults"]


def faults(world: World) -> list[str]:
    """What is wrong, in words; nothing else is."""
    found: list[str] = []
    by_register: dict[tuple[str, object], list[Operation]] = defaultdict(list)
    ended = [it for it in world.history if it.ended is not None]
    for it in ended:
        by_register[it.key, it.generation].append(it)
    for (key, generation), operations in by_register.items():
        found += _forks(world, key, generation, operations)
        found += _steps_back(world, key, generation, operations)
    found += _overtaken_too_early(world)
    latest = NEVER
    for at, begins, generation in sorted(
        [(it.began, True, it.generation) for it in ended]
        + [(it.ended or 0.0, False, it.generation) for it in ended]
    ):
        if begins and generation < latest and not world.steps_back:
            found.append(f"an operation that began at {at:.3f} was in {generation} after {latest}")
        elif not begins:
            latest = max(latest, generation)
    return found


def _empties(world: World, key: str, after: Ballot, before: Ballot) -> bool:
    """Whether the register may have become empty between two ballots."""
    return any(
        it.empties and after <= it.first <= before
        for (of, _), it in world.writes.items()
        if of == key
    )


def _overtaken_too_early(world: World) -> list[str]:
    """Puts that were left to another put which had ended before."""
    found = []
    for it in world.overtaken:
        for other in world.history:
            before = other.ended is not None and other.ended < it.began
            if other.wrote and before and (other.key, other.ballot) == (it.key, it.ballot):
                found.append(
                    f"{it.key}: a put that began at {it.began:.3f} was left to {it.ballot}"
                )
    return found


def _forks(world: World, key: str, generation: object, operations: list[Operation]) -> list[str]:
    found = []
    previous: Operation | None = None
    for it in sorted((it for it in operations if it.wrote), key=lambda it: it.ballot):
        if previous is not None:
            base = world.writes[key, it.ballot].follows
            while (
                base > previous.ballot
                and (origin := world.writes[key, base]).first > previous.ballot
            ):
                base = origin.follows
            first = world.writes[key, base].first if base != NEVER else NEVER
            is_swept = base == NEVER and _empties(world, key, previous.ballot, it.ballot)
            if first != previous.ballot and not is_swept:
                found.append(
                    f"{key} in {generation}: the write {it.ballot} follows {first}, not "
                    f"{previous.ballot}"
                )
        previous = it
    return found


def _steps_back(
    world: World, key: str, generation: object, operations: list[Operation]
) -> list[str]:
    """Operations that began after another one had ended, and saw less."""
    found = []
    events = sorted(
        [(it.began, 1, it) for it in operations] + [(it.ended or 0.0, 0, it) for it in operations],
        key=lambda event: event[:2],
    )
    latest, least = NEVER, {}
    for at, begins, it in events:
        if begins:
            least[id(it)] = latest
            continue
        state = world.writes[key, it.ballot].first if it.ballot != NEVER else NEVER
        seen = least[id(it)]
        if it.ballot == NEVER:
            if seen != NEVER and not _empties(world, key, seen, (1 << 60, 0)):
                found.append(f"{key} in {generation}: empty at {at:.3f}, after {seen}")
        elif state < seen:
            found.append(f"{key} in {generation}: {state} at {at:.3f}, after {seen}")
        latest = max(latest, state)
    return found
