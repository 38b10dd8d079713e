"""Members and clients on virtual time: messages are late, lost, doubled and blocked; members end,
come back without memory, and stand still."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rdzv_plugins.register.member import Member
from rdzv_plugins.register.messages import NEVER, Ballot, Generation, Held
from rdzv_plugins.register.proposer import Changing, Look, Outcome, Proposer, Rivals

from ..simulation.kernel import Kernel

__all__ = ["KEYS", "Operation", "World"]

KEYS = ("a/1", "a/2", "b")
_TICK = 0.05
_CLIENTS = 3


@dataclass
class Operation:
    """What a client did, and what it learned.

    Attributes:
        began, ended: virtual seconds; it did not end where ``ended`` is None.
        ballot: of the state that it left or found; `NEVER`: the register was empty.
        wrote: the register's value is this operation's own.
    """

    key: str
    began: float
    ended: float | None = None
    generation: Generation = NEVER
    ballot: Ballot = NEVER
    wrote: bool = False


@dataclass
class Write:
    """A value that members were asked to accept: what it follows, and whether it empties."""

    first: Ballot
    follows: Ballot
    empties: bool


class _Member(Member):
    sweep_seconds = 0.3


@dataclass
class World:
    """One play."""

    seed: int
    size: int = 3
    seconds: float = 5.0
    history: list[Operation] = field(default_factory=list)
    # By key and ballot.
    writes: dict[tuple[str, Ballot], Write] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.kernel = Kernel()
        self.members: dict[int, Member] = {}
        self.lives = dict.fromkeys(range(self.size), 0)
        self.stopped: set[int] = set()
        self.gone: set[int] = set()
        self.blocked: set[tuple[object, object]] = set()
        self.quiet = False
        self.values = 0
        # Values that were written whatever there was, and operations that such a value followed.
        self.puts: set[bytes] = set()
        self.overtaken: list[Operation] = []
        self.loss = self.dice.choice((0.0, 0.02, 0.1))
        self.slow = self.dice.choice((0.001, 0.01, 0.1))
        # In a storm members restart at once, and all clients write the same register.
        self.storm = self.dice.random() < 0.5
        if self.storm:
            self.slow = self.dice.choice((0.02, 0.05))
        self.steps_back = self.size > 1 and self.dice.random() < 0.2

    def play(self) -> None:
        """Faults for a while, then none."""
        for member in range(self.size):
            self.kernel.at(self.dice.uniform(0, 1), self.start, member)
        for client in range(_CLIENTS):
            self.kernel.at(self.dice.uniform(0, 1), self.client, client)
        for _ in range(80 if self.storm else self.dice.choice((0, 3, 10, 30))):
            self.kernel.at(self.dice.uniform(0, self.seconds), self.fault)
        self.kernel.run(self.seconds)
        self.quiet = True
        self.blocked.clear()
        # A majority is enough: in half of the plays the others end for good.
        dice = random.Random(self.seed)
        self.gone = {*dice.sample(range(self.size), dice.choice((0, self.size // 2)))}
        for member in range(self.size):
            self.resume(member)
            if member in self.gone:
                self.end(member)
            self.start(member)
        self.loss, self.slow = 0.0, 0.001
        self.kernel.run(self.seconds + 8)

    # Members.

    def start(self, member: int) -> None:
        if member in self.members or member in self.gone:
            return
        self.lives[member] += 1
        # By the wall clock of the host, which is set back sometimes.
        back = self.dice.choice((0.0, 5.0)) if self.steps_back else 0.0
        incarnation = int(1000 * (10 + self.kernel.now - back))
        self.members[member] = _Member(member, self.size, incarnation, self.kernel.now, self.dice)
        self.tick(member, self.lives[member])

    def end(self, member: int) -> None:
        self.members.pop(member, None)
        self.stopped.discard(member)

    def tick(self, member: int, life: int) -> None:
        if member in self.members and self.lives[member] == life:
            if member not in self.stopped:
                self.deliver_all(member, self.members[member].tick(self.kernel.now))
            self.kernel.after(_TICK, self.tick, member, life)

    def deliver_all(self, sender: int, messages: list[tuple[int, Any]]) -> None:
        for to, message in messages:
            self.send(sender, to, partial(self.deliver, to, sender, message))

    def deliver(self, to: int, sender: int, message: Any) -> None:
        if (member := self.members.get(to)) is not None:
            self.deliver_all(to, member.hear(sender, message, self.kernel.now))

    def send(self, sender: object, to: object, call: Any) -> None:
        """Have a message arrive, or not."""
        times = 1 + (not self.quiet and self.dice.random() < 0.03)
        for _ in range(times):
            if self.dice.random() >= self.loss:
                late = self.dice.expovariate(1 / self.slow) if self.dice.random() < 0.8 else 0.0002
                self.kernel.after(late, self.arrive, sender, to, call)

    def arrive(self, sender: object, to: object, call: Any) -> None:
        if to in self.stopped:
            self.kernel.after(0.2, self.arrive, sender, to, call)
        elif (sender, to) not in self.blocked:
            call()

    # Faults.

    def fault(self) -> None:
        member, other = self.dice.sample([*range(self.size), "clients"], 2)
        long = self.dice.choice((0.05, 0.5, 3.0))
        match self.dice.choice(("kill", "kill", "stop", "block", "block", "isolate", "lose")):
            case "kill" if isinstance(member, int):
                self.end(member)
                away = (0.001, 0.01, 0.05) if self.storm else (0.01, 0.2, 2.0, 5.0)
                self.kernel.after(self.dice.choice(away), self.start, member)
            case "stop" if isinstance(member, int) and member in self.members:
                self.stopped.add(member)
                self.kernel.after(long, self.resume, member)
            case "block":
                self.block({(member, other)} | ({(other, member)} if long > 1 else set()), long)
            case "isolate":
                everybody = [*range(self.size), "clients"]
                self.block(
                    {(member, it) for it in everybody} | {(it, member) for it in everybody}, long
                )
            case "lose" if self.dice.random() < 0.3:
                # A majority loses its memory.
                for it in self.dice.sample(range(self.size), self.size // 2 + 1):
                    self.end(it)
                    self.kernel.after(self.dice.uniform(0.01, 1.0), self.start, it)

    def block(self, pairs: set[tuple[object, object]], seconds: float) -> None:
        self.blocked |= pairs
        self.kernel.after(seconds, self.blocked.difference_update, pairs)

    def resume(self, member: int) -> None:
        self.stopped.discard(member)

    # Clients: each is a generator that yields attempts, and seconds to wait.

    def client(self, client: int) -> None:
        proposer = Proposer(self.size, self.dice)
        self.go_on(self.operations(proposer), None)

    def go_on(self, life: Generator[Any, Any, None], answer: Any) -> None:
        wanted = life.send(answer)
        if isinstance(wanted, float):
            self.kernel.after(wanted, self.go_on, life, None)
            return
        attempt = wanted
        ended: list[bool] = []

        def end() -> None:
            if not ended:
                ended.append(True)
                self.go_on(life, attempt)

        def ask(messages: list[tuple[int, Any]]) -> None:
            for member, request in messages:
                self.send("clients", member, partial(reach, member, request))

        def reach(to: int, request: Any) -> None:
            if (member := self.members.get(to)) is not None:
                answer = member.answer(request, self.kernel.now)
                self.send(to, "clients", partial(hear, to, answer))

        def hear(member: int, answer: Any) -> None:
            if not ended:
                sent = attempt.hear(member, answer, self.kernel.now)
                if sent and attempt.outcome is None:
                    self.note_write(attempt)
                ask(sent)
                if attempt.outcome is not None:
                    end()

        ask(attempt.begin())
        self.kernel.after(0.5 if self.storm else self.dice.choice((0.02, 0.1, 0.5)), end)

    def operations(self, proposer: Proposer) -> Generator[Any, Any, None]:
        seen: dict[str, bytes | None] = dict.fromkeys(KEYS)
        while True:
            storm = self.storm and not self.quiet
            yield self.dice.choice((0.001, 0.02) if storm else (0.01, 0.1, 0.5))
            # Ballots far apart: a low one in flight meets a higher one.
            proposer._number += self.dice.choice((0, 0, 0, 3, 10, 100))
            key = KEYS[0] if self.storm else self.dice.choice(KEYS)
            match self.dice.choice(("set", "set", "put", "empty", "read", "read", "list")):
                case "read" | "list" as kind:
                    yield from self.look(proposer, [key] if kind == "read" else "a/", seen)
                case "set":
                    yield from self.change(proposer, key, self.value(), seen[key], seen)
                case "put":
                    self.puts.add(value := self.value())
                    yield from self.change(proposer, key, value, ..., seen)
                case "empty":
                    yield from self.change(proposer, key, None, ..., seen)

    def value(self) -> bytes:
        self.values += 1
        return b"%d" % self.values

    def another(self, value: bytes | None) -> bytes | None:
        if value is None:
            return None
        another = self.value()
        if value in self.puts:
            self.puts.add(another)
        return another

    def change(
        self, proposer: Proposer, key: str, new: bytes | None, expected: Any, seen: Any
    ) -> Generator[Any, Any, None]:
        operation = Operation(key, self.kernel.now)
        self.history.append(operation)
        rivals: Rivals | None = None
        for turn in range(8):
            if turn and expected is ...:
                # An attempt that may have been carried out is an operation of its own.
                new, operation = self.another(new), Operation(key, self.kernel.now)
                self.history.append(operation)

            def make(value: bytes | None, new: bytes | None = new) -> bytes | None:
                return new if expected is ... or value == expected else value

            attempt = yield Changing(proposer, key, make)
            if attempt.outcome is Outcome.DONE:
                self.finish(operation, attempt, seen)
                return
            is_put = self.puts.__contains__ if new in self.puts else None
            rivals = rivals if rivals is not None and expected is not ... else Rivals(make, is_put)
            rivals.note(attempt)
            look = yield Look(proposer, [key])
            if look.outcome is Outcome.DONE and not look.unsettled:
                held = look.held.get(key, Held())
                if rivals.leave_nothing(held):
                    operation.ended, operation.generation = self.kernel.now, look.generation
                    operation.ballot, seen[key] = held.accepted, held.value
                    if is_put:
                        self.overtaken.append(operation)
                    return
            yield self.dice.uniform(0, 0.01 * 2**turn)

    def finish(self, operation: Operation, attempt: Changing, seen: Any) -> None:
        operation.ended = self.kernel.now
        operation.generation = attempt.generation
        wrote = attempt._sent_at is not None
        operation.ballot = attempt.ballot if wrote else attempt.before.accepted
        operation.wrote = wrote and self.is_first(operation.key, attempt.ballot)
        seen[operation.key] = attempt.after

    def look(self, proposer: Proposer, wanted: Any, seen: Any) -> Generator[Any, Any, None]:
        began = self.kernel.now
        for turn in range(4):
            attempt = yield Look(proposer, wanted)
            if attempt.outcome is Outcome.DONE:
                break
            yield self.dice.uniform(0, 0.01 * 2**turn)
        else:
            return
        settled = {key: it for key, it in attempt.held.items() if key not in attempt.unsettled}
        keys = [it for it in KEYS if it.startswith(wanted)] if isinstance(wanted, str) else wanted
        for key in keys:
            if key in attempt.unsettled:
                yield from self.change(proposer, key, None, b"never", seen)
                continue
            held = settled.get(key, Held())
            seen[key] = held.value
            self.history.append(
                Operation(key, began, self.kernel.now, attempt.generation, held.accepted)
            )

    # What stands behind a ballot.

    def note_write(self, attempt: Changing) -> None:
        key, before = attempt._key, attempt.before
        origin = self.writes.get((key, before.accepted))
        if attempt.after == before.value and origin is not None:
            self.writes[key, attempt.ballot] = origin
        else:
            empties = attempt.after is None
            self.writes[key, attempt.ballot] = Write(attempt.ballot, before.accepted, empties)

    def is_first(self, key: str, ballot: Ballot) -> bool:
        return self.writes[key, ballot].first == ballot
