"""SQLite: all nodes of a run open one file, so they must be on one host.

A row holds one key of a run: its value and the time of the write. The row with the empty key holds
the time at which the run expires. From then on, rows written up to that time read as absent.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rdzv_plugins.kv import Capabilities
from rdzv_plugins.kv.base import STAMP_BYTES, Limit, Problem, StoreClient, Stored
from rdzv_plugins.settings.options import StoreOptions, option

TABLE = """CREATE TABLE IF NOT EXISTS runs
    (run BLOB, key BLOB, data BLOB, time REAL, PRIMARY KEY (run, key)) WITHOUT ROWID"""

# Rows written after the run's last expiry; :now is the time of the request.
LIVE = """run = :run AND key <> x'' AND time > coalesce(
    (SELECT time FROM runs WHERE run = :run AND key = x'' AND time <= :now), 0)"""

SWEEP = """DELETE FROM runs WHERE EXISTS (SELECT 1 FROM runs AS ends WHERE ends.run = runs.run
    AND ends.key = x'' AND ends.time <= :now AND runs.time <= ends.time)"""


@dataclass(frozen=True, kw_only=True)
class Options(StoreOptions):
    """Options of mystore; the endpoint is the path of a file."""

    durable: bool = option(False)
    """each write waits until the data is on disk"""


class Client(StoreClient):
    """One run in an SQLite file. Each request opens the file, so any thread may call a method."""

    name = "mystore"
    options = Options
    capabilities = Capabilities(
        push=False,
        linearizable=True,
        batch=True,
        ttl=False,
        max_value_bytes=64 << 20,
        atomic=range(1, 101),
    )

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        if not endpoint:
            raise ValueError("the endpoint must be the path of a file")
        super().__init__(f"mystore at {endpoint}", request_timeout)
        self._path, self._run = endpoint, namespace.encode()
        self._synchronous = "FULL" if options.durable else "OFF"
        self._connect(lambda limit: self._ask(limit, TABLE))

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        names = {f"key{number}": key.encode() for number, key in enumerate(keys)}
        marks = ", ".join(f":{name}" for name in names)
        return self._select(limit, f"key IN ({marks})", **names)

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        # UTF-8 never contains the byte FF.
        first = prefix.encode()
        return self._select(
            limit, "key >= :first AND key < :last", first=first, last=first + b"\xff"
        )

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        row = {"key": key.encode(), "data": data}
        if seen is None:
            # Overwrite only a row that has expired.
            live = f"EXISTS (SELECT 1 FROM runs WHERE key = :key AND {LIVE})"
            statement = f"""INSERT OR REPLACE INTO runs
                SELECT :run, :key, :data, :now WHERE NOT {live}"""
        else:
            row["stamp"] = seen.guard
            statement = f"""UPDATE runs SET data = :data, time = :now
                WHERE key = :key AND substr(data, 1, {STAMP_BYTES}) = :stamp AND {LIVE}"""
        return self._ask(limit, statement, row) == 1

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        rows = [{"key": key.encode(), "data": data} for key, data in values.items()]
        self._ask(limit, "INSERT OR REPLACE INTO runs VALUES (:run, :key, :data, :now)", *rows)

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        rows = [{"key": key.encode()} for key in keys]
        self._ask(limit, "DELETE FROM runs WHERE run = :run AND key = :key", *rows)

    def _expire(self, seconds: float, limit: Limit) -> None:
        if seconds <= 0:
            self._ask(limit, "DELETE FROM runs WHERE run = :run")
            return
        given = self._given({"end": time.time() + seconds})
        with closing(self._open(limit)) as db, db:
            # Delete expired rows of all runs: a later expiry time would make them live again.
            db.execute(SWEEP, given)
            db.execute("INSERT OR REPLACE INTO runs VALUES (:run, x'', x'', :end)", given)

    def _problem(self, error: Exception) -> Problem | None:
        code = getattr(error, "sqlite_errorname", "")
        if code.startswith("SQLITE_BUSY") or isinstance(error, TimeoutError):
            return Problem(
                f"was locked by others for {self.timeout:g} s; is the file on a local disk?",
                retryable=True,
                undone=True,
            )
        if code == "SQLITE_CANTOPEN":
            return Problem(f"cannot be opened ({error}); is there such a folder, and is it ours?")
        if isinstance(error, sqlite3.Error):
            likely = "is the file ours to write, and not another program's?"
            return Problem(f"refused a request: {error}; {likely}", state=True)
        return None

    def _select(self, limit: Limit, which: str, **names: bytes) -> dict[str, Stored]:
        statement = f"SELECT key, data FROM runs WHERE {which} AND {LIVE}"
        with closing(self._open(limit)) as db:
            rows = db.execute(statement, self._given(names)).fetchall()
        return {key.decode(): Stored.parse(data, data[:STAMP_BYTES]) for key, data in rows}

    def _ask(self, limit: Limit, statement: str, *rows: Mapping[str, Any]) -> int:
        """Execute the statement for each row in one transaction; return how many rows changed."""
        with closing(self._open(limit)) as db, db:
            return sum(db.execute(statement, self._given(row)).rowcount for row in rows or [{}])

    def _given(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": self._run, "now": time.time(), **row}

    def _open(self, limit: Limit) -> sqlite3.Connection:
        # A wait for a lock cannot be interrupted: keep it short, the base class retries.
        moment = min(0.1, limit.seconds)
        db = sqlite3.connect(self._path, timeout=moment, isolation_level="IMMEDIATE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {self._synchronous}")
        return db
