"""What clients and members say to each other. Every message is data; `msgspec` encodes it."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Ballot: TypeAlias = tuple[int, int]
"""Orders the attempts to write a register: a number, and 64 random bits that make it unique."""

Generation: TypeAlias = tuple[int, int]
"""Orders the histories of the store: a number, and 63 random bits that make it unique."""

NEVER: Ballot = (0, 0)
"""Smaller than every ballot, and than every generation."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What one member holds of a register.

    Attributes:
        accepted: the ballot under which the member accepted the value; `NEVER`: it has none.
        value: None: the register is empty.
        age: seconds since the member accepted the value, by the member's clock.
    """

    accepted: Ballot = NEVER
    value: bytes | None = None
    age: float = 0.0


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages; a message's tag is the name of its class."""


# From a client to a member. Each names the generation in which the client works.


class Prepare(Message, frozen=True):
    """Promise to accept nothing below this ballot."""

    generation: Generation
    key: str
    ballot: Ballot


class Accept(Message, frozen=True):
    """Accept this value.

    Attributes:
        held: the ballot and the value, which is as old as it was where the change keeps it.
        quorum: the incarnation of each member that promised; empty: a majority has accepted the
            value, and the addressee, which was not asked, is to hold it too.
    """

    generation: Generation
    key: str
    held: Held
    quorum: dict[int, int]


class Read(Message, frozen=True):
    """Tell what these registers hold."""

    generation: Generation
    keys: list[str]


class List(Message, frozen=True):
    """Tell what all registers hold whose keys begin with ``prefix``."""

    generation: Generation
    prefix: str


class Watch(Message, frozen=True):
    """Answer, as to `Read`, once the register holds something newer than ``accepted``."""

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
    """The registers that were asked for and hold something."""

    held: dict[str, Held]


class Refused(Message, frozen=True):
    """The member did nothing.

    Attributes:
        generation: in which the member takes part; `NEVER`: in none.
        ballot: what the member has promised for the register.
        full: the member has no room for the value.
    """

    generation: Generation
    ballot: Ballot = NEVER
    full: bool = False


# Between members. Each names the incarnation of its sender.


class Status(Message, frozen=True):
    """The sender lives.

    Attributes:
        generation: in which it takes part; `NEVER`: in none.
        known: the latest incarnation that it knows of the addressee.
    """

    incarnation: int
    generation: Generation
    known: int


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """All that a member holds.

    Attributes:
        generation: of its registers.
        floor: the highest ballot of a register that was swept.
        promised: by key, the ballot that the member has promised.
        incarnations: the latest incarnation that the member knows of each member.
    """

    generation: Generation = NEVER
    floor: Ballot = NEVER
    held: dict[str, Held] = {}
    promised: dict[str, Ballot] = {}
    incarnations: dict[int, int] = {}


class Copy(Message, frozen=True):
    """The sender has lost its memory and asks for a copy."""

    incarnation: int


class Copied(Message, frozen=True):
    """A copy, for the life of the addressee that has this incarnation."""

    incarnation: int
    asker: int
    memory: Memory


class Propose(Message, frozen=True):
    """Take no more part in any generation below this one."""

    incarnation: int
    generation: Generation


class Agreed(Message, frozen=True):
    """The sender takes no more part in a generation below this one; this is what it holds."""

    incarnation: int
    generation: Generation
    memory: Memory


class Install(Message, frozen=True):
    """A majority has agreed: begin the generation with this memory."""

    incarnation: int
    memory: Memory


class Empty(Message, frozen=True):
    """These registers are empty since these ballots.

    Attributes:
        asks: the addressee is to say in which of them it holds nothing older.
    """

    incarnation: int
    generation: Generation
    empty: dict[str, Ballot]
    asks: bool


Request: TypeAlias = Prepare | Accept | Read | List | Watch
Answer: TypeAlias = Promised | Accepted | Found | Refused
PeerMessage: TypeAlias = Status | Copy | Copied | Propose | Agreed | Install | Empty
