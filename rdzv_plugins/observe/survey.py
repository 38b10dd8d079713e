"""All runs under a prefix, read again and again over the same connections.

The page, the exporter and ``rdzv list`` show what a `Survey` has seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from msgspec import to_builtins

from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.observe.history import LIST, Archive, Listed, Row, read_list
from rdzv_plugins.observe.inspection import LOOK_SECONDS, SCHEMA, Condition, Inspection, what_it_was
from rdzv_plugins.protocol.documents import Outcome

log = logging.getLogger(__name__)

_BRIEF_WATCH_SECONDS = 1.0
# At most this many runs keep a connection open. A look at any other run opens and closes its own.
_MOST_CONNECTIONS = 32
# After the first look, each look reads at most this many of the other runs, in turn.
_MOST_IN_TURN = 64


class Seen:
    """A run as it was seen last.

    Attributes:
        listed: its entry in the list of runs; None: the store has lost the entry, not the run.
        inspection: the inspection of a run whose end is not recorded.
        client: its connection, while there is something to watch.
        error: why the run cannot be read, such as another version's round document.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.listed: Listed | None = None
        self.inspection: Inspection | None = None
        self.client: KeyValueClient | None = None
        self.error: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run's end is recorded. A run closed by request may finish its round."""
        if self.listed is None or self.listed.outcome is None:
            return False
        return self.listed.outcome is not Outcome.CLOSED or self.is_gone

    @property
    def is_gone(self) -> bool:
        """Whether its keys were gone at the last look."""
        return self.inspection is not None and self.inspection.document is None

    @property
    def can_tell(self) -> bool:
        """Whether the run has been watched for long enough to know which nodes live."""
        return self.is_over or (self.inspection is not None and self.inspection.can_tell)

    @property
    def is_known(self) -> bool:
        """Whether the run was watched for long enough that `condition` is no guess."""
        return self.is_over or (self.readable is not None and self.readable.is_known)

    @property
    def readable(self) -> Inspection | None:
        """The inspection of a run that goes on and could be read; else None."""
        return None if self.is_over or self.error is not None else self.inspection

    @property
    def condition(self) -> Condition | None:
        """The run's condition; None: the run cannot be read."""
        if self.is_over:
            return Condition.CLOSED
        return self.readable.condition if self.readable is not None else None

    @property
    def sentence(self) -> str:
        if self.is_over:
            return what_it_was(self.listed)
        if self.readable is None:
            return self.error or "it has not been read yet"
        return self.readable.sentence

    def report(self) -> dict[str, Any]:
        """`Inspection.report`, what the list of runs says, and ``told``: `can_tell`."""
        listed = self.listed
        found = None
        if self.readable is not None:
            try:
                found = self.readable.report()
            except Exception as error:
                # A broken run must not hide the others.
                self.error = _broken(self.run_id, error)
        if found is None:
            found = {
                "schema": SCHEMA,
                "run": self.run_id,
                "condition": self.condition or "unreadable",
                "sentence": self.sentence,
                "last": to_builtins(listed),
            }
        return found | {
            "told": self.can_tell,
            "began": listed.began if listed is not None else None,
            "noted": listed.at if listed is not None else None,
        }


class Survey:
    """Reads all runs under a prefix.

    A run whose end is recorded is read only from the list of runs. Only `rows` and `close` may be
    called from another thread than `look`.

    Attributes:
        runs: by run id, the newest first.
        away: since when the store does not answer or cannot be read, and why, as a line; None: the
            last look read it.
    """

    def __init__(
        self, open: Callable[[str], KeyValueClient], archive: Callable[[str], Archive]
    ) -> None:
        self.runs: dict[str, Seen] = {}
        self.away: tuple[datetime, str] | None = None
        self._open = open
        self._archive = archive
        self._list: KeyValueClient | None = None
        # When each run was looked at, in monotonic seconds.
        self._looked: dict[str, float] = {}
        self._connected: set[str] = set()
        self._rows: dict[str, tuple[Listed | None, list[Row]]] = {}

    def look(self) -> None:
        """Read the store once; `away` tells whether it answered.

        Raises `ValueError` for a bad option, and `RendezvousStateError` if the list of runs was not
        written by this package.
        """
        runs = dict(self.runs)
        try:
            if self._list is None:
                self._list = self._open(LIST)
            listed = read_list(self._list)
            in_turn = 0
            # Begin with the run whose last look is longest ago.
            for run_id in sorted({**runs, **listed}, key=lambda run: self._looked.get(run, 0.0)):
                seen = runs.setdefault(run_id, Seen(run_id))
                if seen.inspection is not None and seen.client is None and not seen.is_gone:
                    in_turn += 1
                    if in_turn > _MOST_IN_TURN and not seen.is_over:
                        continue
                self._looked[run_id] = time.monotonic()
                self._look_at(seen, listed.get(run_id))
            self._looked = {run: it for run, it in self._looked.items() if run in runs}
        except RendezvousConnectionError as error:
            self._note_away(error)
            return
        finally:
            known = [seen for seen in runs.values() if seen.listed or seen.inspection]
            self.runs = {it.run_id: it for it in sorted(known, key=_began, reverse=True)}
        self.away = None

    def keep_looking(self) -> None:
        """Like `look`, but what `look` raises is noted in `away` too."""
        try:
            self.look()
        except (RendezvousStateError, ValueError) as error:
            self._note_away(error)

    def _note_away(self, error: Exception) -> None:
        since = self.away[0] if self.away is not None else datetime.now(UTC)
        self.away = since, str(error)

    def settle(self) -> None:
        """Look until each run's living nodes are known, at most 1 s longer than one look.

        Raises as `look` does, and `RendezvousConnectionError` if the store is away.
        """
        self.look()
        ends = time.monotonic() + _BRIEF_WATCH_SECONDS
        while self.away is None and time.monotonic() < ends:
            if all(it.is_known or it.error is not None for it in self.runs.values()):
                return
            time.sleep(LOOK_SECONDS)
            self.look()
        if self.away is not None:
            raise RendezvousConnectionError(self.away[1])

    def rows(self, run_id: str) -> list[Row]:
        """The stored rounds and ends of a run id, oldest first; read only if there are new rows.

        While the store is away, returns the rows that were read before.
        """
        seen = self.runs.get(run_id)
        listed = seen.listed if seen is not None else None
        if run_id not in self._rows or self._rows[run_id][0] != listed:
            with suppress(RendezvousConnectionError):
                # A leader writes the row before it writes the list.
                self._rows[run_id] = listed, self._archive(run_id).rows()
        return self._rows.get(run_id, (listed, []))[1]

    def close(self) -> None:
        """Close all connections, which ends a `look` in another thread."""
        for seen in list(self.runs.values()):
            self._hang_up(seen)
        if self._list is not None:
            self._list.close()

    def _hang_up(self, seen: Seen) -> None:
        self._connected.discard(seen.run_id)
        if seen.client is not None:
            seen.client.close()
            seen.client = None

    def _look_at(self, seen: Seen, listed: Listed | None) -> None:
        before, seen.listed = seen.listed, listed
        # Watch anew after an outage, in which no node could write a heartbeat.
        anew = self.away is not None or seen.is_gone
        nothing_left = listed is None and (seen.inspection is None or seen.is_gone)
        if seen.is_over or nothing_left or (seen.is_gone and listed == before):
            self._hang_up(seen)
            if nothing_left:
                seen.inspection = None
                self._rows.pop(seen.run_id, None)
            return
        try:
            if seen.client is None:
                seen.client = self._open(seen.run_id)
            inspection = seen.inspection
            if inspection is None or anew:
                inspection = Inspection(seen.client, self._archive(seen.run_id), seen.run_id)
            inspection.client = seen.client
            inspection.look()
            seen.inspection, seen.error = inspection, None
        except RendezvousConnectionError:
            raise
        except RendezvousStateError as error:
            seen.error = str(error)
        except Exception as error:
            seen.error = _broken(seen.run_id, error)
        finally:
            if seen.client is not None:
                self._connected.add(seen.run_id)
            if seen.is_gone or len(self._connected) > _MOST_CONNECTIONS:
                self._hang_up(seen)


def _broken(run_id: str, error: Exception) -> str:
    """The text for a run that cannot be read; the log has the error."""
    log.debug("run '%s' cannot be read", run_id, exc_info=error)
    return plain(f"it cannot be read ({type(error).__name__}: {error})", 300)


def _began(seen: Seen) -> str:
    return seen.listed.began if seen.listed is not None else ""
