"""Times of hosts' wall clocks, for people: no decision of the protocol reads them."""

from __future__ import annotations

from datetime import UTC, datetime

CLOCKS_DIFFER = 5.0
"""Seconds. A smaller difference of clocks is not told: a heartbeat may have taken that long."""

_DAY = 24 * 3600.0


def as_iso(seconds: float) -> str | None:
    """ISO 8601 in UTC, of seconds since the epoch; None for 0, and for a number that is no date."""
    at = _time(seconds)
    return at.isoformat(timespec="seconds") if at is not None else None


def shown(seconds: float, now: float, clock: str = "%H:%M:%S") -> str:
    """For people, such as "07:24:02 UTC", with the date if a day off; "": not known."""
    at = _time(seconds)
    if at is None:
        return ""
    return at.strftime(f"{'' if abs(now - seconds) < _DAY else '%Y-%m-%d '}{clock} UTC")


def _time(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC) if seconds else None
    except (OverflowError, OSError, ValueError):
        return None  # Stored values are not trusted.
