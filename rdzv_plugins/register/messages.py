"""The messages of clients and members; `msgspec` encodes them."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Ballot: TypeAlias = tuple[int, int]
"""Orders attempts to write a register: a number, and 64 random bits that make it unique."""

Generation: TypeAlias = tuple[int, int]
"""Orders histories of the store: a number, and 63 random bits that make it unique."""

NEVER: Ballot = (0, 0)
"""Smaller than every ballot and every generation."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A register in one member.

    Attributes:
        accepted: the ballot of the value; `NEVER`: the member has accepted none.
        value: None: the register is empty.
        age: seconds since the member accepted the value, by the member's clock.
    """

    accepted: Ballot = NEVER
    value: bytes | None = None
    age: float = 0.0


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages; the name of the class is the tag."""


# From a client, which works in ``generation``, to a member.


class Prepare(Message, frozen=True):
    """Promise to accept nothing below this ballot."""

    generation: Generation
    key: str
    ballot: Ballot


class Accept(Message, frozen=True):
    """Accept this value.

    Attributes:
        held: the value; its age is old if the change kept the value.
        quorum: the incarnation of each member that promised; empty: a majority has accepted the
            value already, and the addressee gets a copy.
    """

    generation: Generation
    key: str
    held: Held
    quorum: dict[int, int]


class Read(Message, frozen=True):
    """Answer `Found` with these registers."""

    generation: Generation
    keys: list[str]


class List(Message, frozen=True):
    """Answer `Found` with the registers whose keys begin with ``prefix``."""

    generation: Generation
    prefix: str


class Watch(Message, frozen=True):
    """Answer `Found` once the register holds a value with a higher ballot than ``accepted``."""

    generation: Generation
    key: str
    accepted: Ballot


# From a member to a client.


class Promised(Message, frozen=True):
    incarnation: int
    held: Held


class Accepted(Message, frozen=True):
    pass


class Found(Message, frozen=True):
    """The requested registers for which the member has accepted a value."""

    held: dict[str, Held]


class Refused(Message, frozen=True):
    """The member did nothing.

    Attributes:
        generation: the generation in which the member takes part; `NEVER`: none.
        ballot: the member's promise for the register.
        full: the member has no room for the value.
    """

    generation: Generation
    ballot: Ballot = NEVER
    full: bool = False


# Between members; ``incarnation`` is the sender's.


class Status(Message, frozen=True):
    """The sender lives.

    Attributes:
        generation: the generation in which the sender takes part; `NEVER`: none.
        known: the latest incarnation of the addressee that the sender knows.
    """

    incarnation: int
    generation: Generation
    known: int


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """All that a member remembers.

    Attributes:
        floor: the highest promise of a register that the member has forgotten.
        held, promised: by key.
        incarnations: by member, the latest incarnation that this member knows.
    """

    generation: Generation = NEVER
    floor: Ballot = NEVER
    held: dict[str, Held] = {}
    promised: dict[str, Ballot] = {}
    incarnations: dict[int, int] = {}


class Copy(Message, frozen=True):
    """Send a copy of your memory: the sender has none."""

    incarnation: int


class Copied(Message, frozen=True):
    """A copy for the incarnation ``asker`` of the addressee."""

    incarnation: int
    asker: int
    memory: Memory


class Propose(Message, frozen=True):
    """Leave every generation below this one."""

    incarnation: int
    generation: Generation


class Agreed(Message, frozen=True):
    """The sender has left every generation below this one; ``memory`` is what it remembers."""

    incarnation: int
    generation: Generation
    memory: Memory


class Install(Message, frozen=True):
    """A majority has agreed: begin the generation with ``memory``."""

    incarnation: int
    memory: Memory


class Empty(Message, frozen=True):
    """These registers are empty, each since its ballot.

    Attributes:
        asks: the addressee answers with the registers for which it holds no older value.
    """

    incarnation: int
    generation: Generation
    empty: dict[str, Ballot]
    asks: bool


Request: TypeAlias = Prepare | Accept | Read | List | Watch
Answer: TypeAlias = Promised | Accepted | Found | Refused
PeerMessage: TypeAlias = Status | Copy | Copied | Propose | Agreed | Install | Empty
