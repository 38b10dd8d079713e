"""The limits of all values that are read from a store, in which a stranger may have written.

The type of a field has its limits, so that the decoder checks them and its error names the field. A
value beyond its limits counts as absent, and nodes overwrite it. An accepted value is short, and
has no character that a terminal, a log or a page would interpret.
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

# The most bytes of a value. A document of 100,000 participants, half of them lost, has 2 MB.
DOCUMENT_BYTES = 8 << 20
RECORD_BYTES = 64 << 10
SHARD_BYTES = 1 << 20
SMALL_BYTES = 256 << 10
"""For an entry of the history, the list of runs or the exclusions, and for a tombstone."""

LEASES = 10.0
"""A record's lease may differ from the run's by this factor; with a longer lease the node would
never be lost."""

# The most characters: _MOST_TEXT of a reason, _MOST of any other text.
_MOST_TEXT = 4000
_MOST = 600

Id = Annotated[str, Meta(max_length=_MOST)]
"""An id, an address, a label."""
Key = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"\A[^/]*\Z")]
"""A segment of a key. It has no slash, so that a deletion under it cannot reach other keys."""
Text = Annotated[str, Meta(max_length=_MOST_TEXT)]
"""A reason, for people."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A number that grows."""
Nodes = Annotated[int, Meta(ge=0, le=2**31)]
"""A number of nodes, a rank."""
Lasted = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration in seconds that is added to a date."""
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
"""A duration."""
Clock = Annotated[int, Meta(ge=-(2**40), le=2**40)]
"""Unix time on a host's wall clock, which may be wrong by years."""
EpochTime = Annotated[float, Meta(ge=-(2**40), le=253_402_300_799)]
"""Unix time before the year 10000, the last that `datetime` can show."""
Long = Meta(max_length=1 << 17)
"""The most entries in a list of nodes."""

# Characters that a terminal executes, that end a line, or that turn or hide other letters.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# Free text of people and errors, which is cleaned. A control character in another field is refused,
# because it is part of a name.
_FREE = frozenset(
    {"why", "note", "unfit", "restart", "drain_why", "reason", "run_options", "unreached", "out"}
)

_LAST_YEAR = 9000

_HOST = re.compile(r"[\w.:%\[\]-]{1,255}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


class InvalidValueError(ValueError):
    """This package did not write the value; the text names the field and the reason."""


def decode(decoder: msgspec.json.Decoder[T], data: bytes, most: int) -> T:
    """Decode at most ``most`` bytes, within the limits; raises `InvalidValueError`, in one line."""
    if len(data) > most:
        refuse_size(data, most)
    try:
        value = decoder.decode(data)
    except UNREADABLE as error:
        said = plain(error, 200)
        raise InvalidValueError(said) from None
    return cleaned(value) if may_hold_controls(data) else value


def may_hold_controls(data: bytes) -> bool:
    """Whether a JSON value may hold control characters, and needs `cleaned`."""
    # `in` finds an integer ten times as fast as bytes of length one.
    return not data.isascii() or 0x5C in data or 0x7F in data  # A backslash; delete.


def refuse_size(data: bytes, most: int) -> NoReturn:
    """Raise `InvalidValueError` for a value of more than ``most`` bytes."""
    raise InvalidValueError(f"it has {len(data):,} bytes, more than {most:,}")


def cleaned(value: T) -> T:
    """The value with clean texts; raises `InvalidValueError` for control characters in a name."""
    clean: T = _cleaned(value, "")
    return clean


def _cleaned(value: Any, field: str) -> Any:
    if isinstance(value, str):
        if _CONTROLS.search(value) is None:
            return value
        if field not in _FREE:
            raise InvalidValueError(f"a control character - at `$.{field}`")
        return type(value)(_CONTROLS.sub(" ", value))
    if isinstance(value, msgspec.Struct):
        changed = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            if (new := _cleaned(old, name if field not in _FREE else field)) is not old:
                changed[name] = new
        return replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        items = tuple(_cleaned(item, field) for item in value)
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else items
    if isinstance(value, dict):
        for key in value:
            _cleaned(key, field)
    return value


def is_time(text: str) -> bool:
    """Whether ``text`` is a plausible date and time with a zone, in ISO 8601."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return False
    # A host without a clock starts in 1970.
    return found.tzinfo is not None and 1970 <= found.year < _LAST_YEAR


def plain(text: object, most: int = _MOST_TEXT) -> str:
    """Text from a store or a server in one clean line of at most ``most`` characters."""
    # Cut first: the text may have megabytes.
    line = str(text)[: most + 1]
    line = " ".join(_CONTROLS.sub(" ", line).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


KNOWN_HOSTS: set[str] = set()
"""Hosts that `is_host` has accepted, as many as a large run has."""
_MOST_KNOWN = 1 << 15


def is_host(address: str) -> bool:
    """Whether ``address`` can be a host's name or IP address."""
    if _HOST.fullmatch(address) is None:
        return False
    if len(KNOWN_HOSTS) >= _MOST_KNOWN:
        KNOWN_HOSTS.clear()
    KNOWN_HOSTS.add(address)
    return True


@lru_cache(maxsize=64)
def is_master(master: str) -> bool:
    """Whether ``master`` is ``address:port``."""
    address, _, port = master.rpartition(":")
    return is_host(address) and _PORT.fullmatch(port) is not None and int(port) < 1 << 16
