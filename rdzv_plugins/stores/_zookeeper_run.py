"""A run's own znode: made with its parents, read with its keys, marked as expired, removed.

The znode holds a random name, new each time that the run is made, and, once it expires, a space and
the milliseconds that it lives from its modification time on. Its child ``#<name>`` is the guard:
every delete of a key moves on the guard's version, and a run that is made again has another guard.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from kazoo.exceptions import KazooException, NoNodeError
from kazoo.protocol.serialization import GetChildren, Sync
from kazoo.security import OPEN_ACL_UNSAFE

from rdzv_plugins.kv import RendezvousStateError
from rdzv_plugins.stores._zookeeper_session import ReadMany, Session

__all__ = ["BATCH", "Run", "RunZnode"]

# Reads or operations in one request: a thousand nodes in two, each far below jute.maxbuffer.
BATCH = 500

# Runs that one `RunZnode.expire` looks at, drawn at random: in the end all are seen.
_SWEEP = 200


@dataclass(frozen=True, slots=True)
class Run:
    """The run's znode as it was read.

    Attributes:
        guard: path of the guard.
        deletes: the guard's version, where it was read too.
        expired: everything in the run counts as absent.
    """

    guard: str
    deletes: int
    expired: bool


class RunZnode:
    """The znode at ``path``, whose parents are made as needed.

    Every request ends at its deadline, on the monotonic clock, and raises kazoo's errors.
    """

    def __init__(self, session: Session, segments: Sequence[str]) -> None:
        self._session = session
        self._parents = ["/"]
        for part in segments:
            self._parents.append(f"{self._parents[-1].rstrip('/')}/{part}")
        self.path = self._parents.pop()
        self._guard = f"{self.path}/#"
        self._end: tuple[int, float] = (0, 0.0)

    def read(
        self, paths: Sequence[str], deadline: float
    ) -> tuple[Run | None, dict[str, tuple[bytes, int]]]:
        """The run (None: there is none) and, by path, data and version of the znodes that exist."""
        damaged = 0
        while True:
            guard = self._guard
            sync = self._session.submit(Sync(self.path), deadline)
            # The guard first: a delete after it must be seen as one.
            batches = [[self.path, guard, *paths[:BATCH]]]
            batches += [[*paths[at : at + BATCH]] for at in range(BATCH, len(paths), BATCH)]
            answers = [self._session.submit(ReadMany(batch), deadline) for batch in batches]
            # A server that wants a log-in says so to the first request, and hangs up.
            self._session.result(sync, deadline)
            results = [item for it in answers for item in self._session.result(it, deadline)]
            own, guarded, *rest = results
            run = self.of(own, deadline, guarded)
            if run is None or run.expired:
                return run, {}
            if run.guard != guard:
                continue
            if not isinstance(guarded, NoNodeError):
                break
            # Removed between the two reads, or by hand.
            damaged += 1
            if damaged == 3:
                raise RendezvousStateError(f"'{self.path}' is damaged, or not a run; delete it")
        found = {}
        for path, result in zip(paths, rest, strict=True):
            if isinstance(result, NoNodeError):
                continue
            if isinstance(result, Exception):
                raise result
            found[path] = result[0], result[1].version
        return run, found

    def of(self, own: Any, deadline: float, guarded: Any = None) -> Run | None:
        """The run in `ReadMany`'s result for `path` and, if there is one, that for the guard."""
        if isinstance(own, NoNodeError):
            return None
        if isinstance(own, Exception):
            raise own
        data, stat = own
        name, milliseconds = _parse(data)
        self._guard = guard = f"{self.path}/#{name}"
        deletes = guarded[1].version if isinstance(guarded, tuple) else 0
        expired = milliseconds is not None and self._is_past(guard, stat, milliseconds, deadline)
        return Run(guard, deletes, expired)

    def _is_past(self, guard: str, stat: Any, milliseconds: int, deadline: float) -> bool:
        mark, end = self._end
        if mark != stat.mzxid:
            # A write is the only way to learn the server's time.
            zk = self._session.client(deadline)
            try:
                now = self._session.result(zk.set_async(guard, b""), deadline).mtime
            except NoNodeError:
                return True
            end = time.monotonic() + (stat.mtime + milliseconds - now) / 1000
            self._end = (stat.mzxid, end)
        return time.monotonic() >= end

    def children(self, path: str, deadline: float) -> Sequence[str]:
        """The names of a znode's children; none if it does not exist."""
        answer = self._session.submit(GetChildren(path, None), deadline)
        try:
            return cast("Sequence[str]", self._session.result(answer, deadline))
        except NoNodeError:
            return []

    def begin(self, run: Run | None, deadline: float) -> None:
        """Make the run's znode after removing ``run``, an expired one; others may be faster."""
        if run is not None:
            self._remove(self.path, run.guard, deadline)
        answer = self._session.submit(ReadMany(self._parents), deadline)
        results = self._session.result(answer, deadline)
        missing = [
            path
            for path, result in zip(self._parents, results, strict=True)
            if isinstance(result, NoNodeError)
        ]
        name = secrets.token_hex(8)

        def build(transaction: Any) -> None:
            for path in missing:
                transaction.create(path, acl=OPEN_ACL_UNSAFE)
            transaction.create(self.path, name.encode())
            transaction.create(f"{self.path}/#{name}")

        self._session.commit(deadline, build)

    def expire(self, seconds: float, deadline: float) -> None:
        """Mark the run, or remove it if ``seconds`` is 0; remove others that are past theirs."""
        milliseconds = round(seconds * 1000)
        while True:
            run, _ = self.read([], deadline)
            if milliseconds <= 0:
                if run is not None:
                    self._remove(self.path, run.guard, deadline)
                return
            if run is None or run.expired:
                # An empty run has a deadline too.
                self.begin(run, deadline)
                continue
            guard = run.guard

            def build(transaction: Any, guard: str = guard) -> None:
                transaction.check(guard, -1)
                transaction.set_data(
                    self.path, f"{guard.rpartition('#')[2]} {milliseconds}".encode()
                )

            if results := self._session.commit(deadline, build):
                stat = results[1]
                self._end = (stat.mzxid, time.monotonic() + seconds)
                self._sweep(stat.mtime, deadline)
                return

    def _remove(self, path: str, guard: str, deadline: float) -> None:
        """Delete a run with all its keys, as long as it is the one that ``guard`` belongs to."""
        while True:
            names = self.children(path, deadline)
            if guard.rpartition("/")[2] not in names:
                return
            keys = [f"{path}/{name}" for name in names if name.startswith("=")]
            batch = keys[:BATCH]
            ends = [guard, path] if batch == keys else []

            def build(transaction: Any, gone: Sequence[str] = (*batch, *ends)) -> None:
                transaction.check(guard, -1)
                for znode in gone:
                    transaction.delete(znode)

            self._session.commit(deadline, build)

    def _sweep(self, now: int, deadline: float) -> None:
        """Remove other runs of our prefix that expired before ``now``, the server's time."""
        parent = self._parents[-1]
        try:
            names = self.children(parent, deadline)
            names = random.sample(names, min(len(names), _SWEEP))
            paths = [path for name in names if (path := f"{parent}/{name}") != self.path]
            answer = self._session.submit(ReadMany(paths), deadline)
            for path, result in zip(paths, self._session.result(answer, deadline), strict=True):
                if isinstance(result, Exception):
                    continue
                name, milliseconds = _parse(result[0])
                if milliseconds is not None and result[1].mtime + milliseconds < now:
                    self._remove(path, f"{path}/#{name}", deadline)
        except KazooException:
            # It is somebody else's run, or there is no time for it: the next one sees it again.
            return


def _parse(data: bytes | None) -> tuple[str, int | None]:
    name, _, mark = (data or b"").decode("ascii", "replace").partition(" ")
    return name, int(mark) if mark.isdecimal() else None
