"""Waits for changes of a key where the store cannot tell of them."""

from __future__ import annotations

import random
import time
from typing import Any

from rdzv_plugins.kv.base import Limit, Stored, version_of


class Polling:
    """How long one client sleeps between two polls.

    Args:
        options: with ``poll_interval_min`` and ``poll_interval_max``. Raises `ValueError` if the
            longest is less than the shortest.
    """

    def __init__(self, options: Any) -> None:
        if options.poll_interval_max < options.poll_interval_min:
            raise ValueError("option 'poll_interval_max' is less than 'poll_interval_min'")
        self.shortest, self.longest = options.poll_interval_min, options.poll_interval_max
        # By key: the version of the last wait, and since when.
        self._waits: dict[str, tuple[str | None, float]] = {}

    def sleep(self, key: str, seen: Stored | None, limit: Limit) -> None:
        """Sleep; the longer the key is unchanged, the longer the sleep."""
        known = version_of(seen)
        left, now = limit.seconds, time.monotonic()
        version, since = self._waits.get(key, ("", now))
        if version != known:
            if len(self._waits) > 100:
                self._waits.clear()
            # Kept across calls: a caller with many short waits must not poll fast forever.
            self._waits[key] = known, (since := now)
        longest = min(max((now - since) / 5, self.shortest), self.longest)
        limit.sleep(min(random.uniform(longest / 2, longest), left))
