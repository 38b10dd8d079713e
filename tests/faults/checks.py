"""What must hold of an hour of faults, told from the workers' journals. Pure functions.

Each returns its findings as sentences; none: all is well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from tests.faults.training import START, after

__all__ = [
    "End",
    "Episode",
    "Note",
    "World",
    "causes",
    "deaths",
    "leaks",
    "steps",
    "two_worlds",
    "worlds",
]


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a worker's journal, as `tests.faults.training` writes it.

    Attributes:
        at: seconds of the clock that all processes here share.
        token: the fencing token of its world.
    """

    event: str
    at: float
    node: str
    pid: int
    agent: int
    rank: int
    world_size: int
    master: str
    token: int
    step: int = 0
    parameters: list[int] = []
    round: int = 0
    world_id: str = ""
    cause: str = ""


@dataclass(kw_only=True)
class World:
    """What is noted under one fencing token."""

    token: int
    size: int
    begins: list[Note] = field(default_factory=list)
    resumes: list[Note] = field(default_factory=list)
    steps: list[Note] = field(default_factory=list)
    alive: float = 0.0

    @property
    def began(self) -> float:
        return min(it.at for it in self.begins)

    @property
    def cause(self) -> str:
        return self.begins[0].cause


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of an agent.

    Attributes:
        status: as of a process; negative: a signal's number.
        line: the last of this package in its log.
    """

    at: float
    address: str
    status: int
    line: str


@dataclass(kw_only=True)
class Episode:
    """A fault and what came of it.

    Attributes:
        fault: its name; ``targets`` are the addresses that it struck, "store" among them.
        began, ended, over: when it began and ended, and when the next one began.
        names: what the cause of a restart must name, one of them, as regular expressions.
        restarts: whether it may end a round at all.
        kills: whether it ends the agents that it strikes.
        two_worlds: seconds after its end for which an older world's workers may still live beside a
            newer world's; None: only while they stop, whenever that is.
    """

    fault: str
    targets: tuple[str, ...]
    began: float
    ended: float
    over: float
    names: tuple[str, ...] = ()
    restarts: bool = True
    kills: bool = False
    two_worlds: float | None = None


# How long workers may take to stop once they are told, on a machine with other work.
STOP_SECONDS = 5.0

# A client keeps what its threads once needed at once: connections, and a pipe that wakes one. Two
# hours of 145 and 169 rounds left no more than these.
_KEPT = {
    "descriptors of an agent": 4,
    "sockets of an agent": 2,
    "sockets of all agents": 1,
    "connections to the server": 1,
}

# A part of a cause that says that somebody is gone.
_BLAMES = re.compile(
    r"^(?:lost|no connection between|drained|excluded) .*|.* left(?: \(.*)?$|.* left out: .*"
)
_LABEL = re.compile(r"([\w.:-]+)\[\d+\]")


def worlds(notes: Iterable[Note]) -> list[World]:
    """The worlds, by their tokens."""
    found: dict[int, World] = {}
    for note in sorted(notes, key=lambda it: it.at):
        world = found.setdefault(note.token, World(token=note.token, size=note.world_size))
        world.alive = max(world.alive, note.at)
        match note.event:
            case "begin":
                world.begins.append(note)
            case "resume":
                world.resumes.append(note)
            case "step":
                world.steps.append(note)
    return [found[token] for token in sorted(found) if found[token].begins]


def steps(notes: Sequence[Note]) -> Iterator[str]:
    """No step lost beyond the last checkpoint, none taken wrongly, twice or without a rank."""
    saved = sorted((it for it in notes if it.event == "saved"), key=lambda it: it.at)
    for one, other in pairwise(saved):
        if other.step <= one.step:
            yield f"the checkpoint of step {one.step} was replaced by that of step {other.step}"
    truth = [START]
    for world in worlds(notes):
        resumed = {it.step for it in world.resumes}
        if len(resumed) > 1:
            yield f"the ranks of world {world.token} resumed after different steps: {resumed}"
            continue
        if not resumed:
            continue
        (start,) = resumed
        least = max((it.step for it in saved if it.at < world.began), default=0)
        if start < least:
            yield f"world {world.token} resumed after step {start}, but step {least} was saved"
        at_rank: dict[tuple[str, int], int] = {}
        for note in world.steps:
            who = (note.node, note.pid)
            expected = at_rank.get(who, start) + 1
            at_rank[who] = note.step
            if note.step != expected:
                yield f"{note.node} took step {note.step} in place of step {expected}"
            while len(truth) <= note.step:
                truth.append(after(truth[-1], len(truth)))
            if note.parameters != truth[note.step]:
                yield f"{note.node} has wrong parameters after step {note.step}"
                return


def two_worlds(notes: Sequence[Note], episodes: Sequence[Episode]) -> Iterator[str]:
    """No older world's workers live beside a newer one that trains, for longer than said."""
    found = worlds(notes)
    for at, newer in enumerate(found):
        if not newer.steps:
            continue
        first = min(it.at for it in newer.steps)
        for older in found[:at]:
            if older.alive <= first + STOP_SECONDS:
                continue
            allowed = first + STOP_SECONDS
            for it in episodes:
                if it.began < older.alive and it.two_worlds is not None and first < it.over:
                    allowed = max(allowed, it.ended + it.two_worlds)
            if older.alive > allowed:
                yield (
                    f"workers of world {older.token} lived {older.alive - first:.1f} s beside "
                    f"world {newer.token}, {older.alive - allowed:.1f} s longer than allowed"
                )
            late = max((it.at for it in older.steps), default=0.0)
            # One that was in flight as the cable was cut ends when the cut does.
            if late > allowed:
                yield (
                    f"world {older.token} took a step {late - first:.1f} s after world "
                    f"{newer.token} did"
                )


def causes(notes: Sequence[Note], episodes: Sequence[Episode]) -> Iterator[str]:
    """Each restart tells its true cause: it names the fault's target, and blames nobody else."""
    found = worlds(notes)
    for episode in episodes:
        during = [it for it in found if episode.began <= it.began < episode.over]
        told = [it.cause for it in during]
        if told and not episode.restarts:
            yield f"{episode.fault}: a restart that need not be: {' | '.join(told)}"
            continue
        if told and not any(re.search(name, cause) for name in episode.names for cause in told):
            yield f"{episode.fault} of {', '.join(episode.targets)}: not in {' | '.join(told)}"
        for cause in told:
            for part in cause.split("; "):
                if not _BLAMES.match(part):
                    continue
                # Behind it stands who has found it.
                whom = part.partition(", as ")[0]
                if others := {*_LABEL.findall(whom)} - {*episode.targets}:
                    struck = ", ".join(episode.targets)
                    yield f"{episode.fault} of {struck}: blames {', '.join(sorted(others))}: {part}"


def deaths(ends: Iterable[End], episodes: Sequence[Episode]) -> Iterator[str]:
    """No agent ends but those that a fault ends."""
    for end in ends:
        if not any(
            it.began <= end.at < it.over and it.kills and end.address in it.targets
            for it in episodes
        ):
            yield f"the agent of {end.address} ended with {end.status} by itself: {end.line}"


def leaks(first: Mapping[str, float], last: Mapping[str, float], agents: int) -> Iterator[str]:
    """Nothing is more at the end than after the first minute, but for what each agent may keep."""
    for what, before in first.items():
        of_all = agents if "all agents" in what or "server" in what else 1
        if last[what] > before + _KEPT.get(what, 0) * of_all:
            yield f"{what}: {before:g} after the first minute, {last[what]:g} at the end"
