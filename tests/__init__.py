"""Unit tests, tests against real servers, and the simulator of the protocol."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

# torch says so, as it is imported, to every program of an environment without NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

Measure = Callable[[str, object], None]
"""pytest's ``record_property``: what it is given is shown at the end of a run."""

T = TypeVar("T")


def replace(thing: T, **changes: Any) -> T:
    """A copy of a document, a record, or a dataclass of the protocol with other fields."""
    if isinstance(thing, msgspec.Struct):
        return msgspec.structs.replace(thing, **changes)
    copy: Any = dataclasses.replace
    changed: T = copy(thing, **changes)
    return changed
