"""Keys in portions, for stores that limit what one request may name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

__all__ = ["batches"]


def batches(keys: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """At most ``size`` keys at a time, each key once: a store refuses one that is named twice."""
    names = iter(dict.fromkeys(keys))
    while batch := tuple(islice(names, size)):
        yield batch
