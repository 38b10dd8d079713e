"""The limits of all that is read from a store: whoever can write to it could have written anything.

A field's limits are its type's, so that the decoder checks them and its error names the field. What
is beyond them counts as absent, and the living write over it. What passes is short, and holds no
character that a terminal, a log or a page would take for more than text.
"""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rdzv_plugins.kv.contract import UNREADABLE

T = TypeVar("T")

# Bytes of a value. A document of 100,000 participants, half of them lost, has 2 MB.
DOCUMENT_BYTES = 8 << 20
RECORD_BYTES = 64 << 10
SHARD_BYTES = 1 << 20
SMALL_BYTES = 256 << 10
"""The most for an entry of the history, of the list of runs, of the exclusions, a tombstone."""

LEASES = 10.0
"""A record's lease is that of the run, times or divided by so much at most: else nobody is lost."""

# Characters of a reason, and of anything else.
_MOST_TEXT = 4000
_MOST = 600

Id = Annotated[str, Meta(max_length=_MOST)]
"""An id, an address, a label."""
Key = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"\A[^/]*\Z")]
"""A part of keys: whoever deletes what stands under it is to delete nothing else."""
Text = Annotated[str, Meta(max_length=_MOST_TEXT)]
"""A reason, for people."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""Any number that grows."""
Nodes = Annotated[int, Meta(ge=0, le=2**31)]
"""A number of nodes, a rank."""
Lasted = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration that is reckoned with dates."""
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
"""A duration."""
Clock = Annotated[int, Meta(ge=-(2**40), le=2**40)]
"""Seconds since the epoch on somebody's wall clock, which may be years off."""
Moment = Annotated[float, Meta(ge=-(2**40), le=253_402_300_799)]
"""The same, until the last year that has a date."""
Long = Meta(max_length=1 << 17)
"""The most entries in a list of nodes."""

# What a terminal executes, what ends a line, and what turns or hides the letters around it.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# The fields that people write, and errors: they are cleaned. In any other such a character is
# refused, for it is part of a name.
_FREE = frozenset({"why", "note", "unfit", "restart", "reason", "policy", "unreached", "out"})

_LAST_YEAR = 9000

_HOST = re.compile(r"[\w.:%\[\]-]{1,255}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


class RefusedValueError(ValueError):
    """What stands in the store is none of what this package writes; the text says where and why."""


def decode(decoder: msgspec.json.Decoder[T], data: bytes, most: int) -> T:
    """The value, if all of it is within its limits; raises `RefusedValueError`, in one line."""
    if len(data) > most:
        refuse_size(data, most)
    try:
        value = decoder.decode(data)
    except UNREADABLE as error:
        said = plain(error, 200)
        raise RefusedValueError(said) from None
    return cleaned(value) if may_hold_controls(data) else value


def may_hold_controls(data: bytes) -> bool:
    """Whether JSON needs `cleaned`: else it has nothing but letters, digits and the like."""
    # By number: `in` looks for a byte ten times as fast as for bytes.
    return not data.isascii() or 0x5C in data or 0x7F in data  # A backslash; delete.


def refuse_size(data: bytes, most: int) -> NoReturn:
    """Raise for a value of more bytes than that."""
    raise RefusedValueError(f"it has {len(data):,} bytes, more than {most:,}")


def cleaned(value: T) -> T:
    """The value with its texts cleaned; raises `RefusedValueError` for a name that is none."""
    found: T = _vetted(value, "")
    return found


def _vetted(value: Any, field: str) -> Any:
    """The value with its texts cleaned; raises `RefusedValueError` for one that is to be none."""
    if isinstance(value, str):
        if _CONTROLS.search(value) is None:
            return value
        if field not in _FREE:
            raise RefusedValueError(f"a control character - at `$.{field}`")
        return type(value)(_CONTROLS.sub(" ", value))
    if isinstance(value, msgspec.Struct):
        found = {it: getattr(value, it) for it in value.__struct_fields__}
        changed = {}
        for name, old in found.items():
            inner = name if field not in _FREE else field
            if (new := _vetted(old, inner)) is not old:
                changed[name] = new
        return replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        items = tuple(_vetted(item, field) for item in value)
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else items
    if isinstance(value, dict):
        for key in value:
            _vetted(key, field)
    return value


def is_time(text: str) -> bool:
    """Whether it is a date and time with its zone, in ISO 8601, that can be reckoned with."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return False
    # A host without a clock of its own begins in 1970.
    return found.tzinfo is not None and 1970 <= found.year < _LAST_YEAR


def plain(text: object, most: int = _MOST_TEXT) -> str:
    """The text in one line for a terminal, a log, a page or an environment: cleaned and cut.

    Args:
        text: of whatever comes from a store or a server; an error is its text.
        most: characters.
    """
    # What is cut off is not looked at: it may have megabytes.
    found = str(text)[: most + 1]
    found = " ".join(_CONTROLS.sub(" ", found).split())
    return found if len(found) <= most else f"{found[: most - 1]}…"


KNOWN_HOSTS: set[str] = set()
"""The hosts for which `is_host` is known, as many as a large run has."""
_MOST_KNOWN = 1 << 15


def is_host(address: str) -> bool:
    """Whether it can be the name or the number of a host."""
    found = _HOST.fullmatch(address) is not None
    if found:
        if len(KNOWN_HOSTS) >= _MOST_KNOWN:
            KNOWN_HOSTS.clear()
        KNOWN_HOSTS.add(address)
    return found


@lru_cache(maxsize=64)
def is_master(master: str) -> bool:
    """Whether it is ``address:port``."""
    address, _, port = master.rpartition(":")
    return is_host(address) and _PORT.fullmatch(port) is not None and int(port) < 1 << 16
