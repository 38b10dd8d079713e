"""Apache ZooKeeper 3.6 and later.

A run is one znode, ``/<prefix>/<run id>``; its children ``=<key>`` are its keys. The next client
that writes to a run that has expired removes it, and so does a later run under the prefix.

Values up to 1,046,528 bytes; a server with a ``jute.maxbuffer`` below the default closes the
connection instead. A server accepts ``maxClientCnxns`` connections per address (60 if it is not
set); a node needs one.

With a user, only this user has access to the run's znodes (``CREATOR_ALL``; a client certificate
also counts as a user), and each user needs a prefix of its own. The znodes of the prefix are open
to all. To restrict them, create them before the first run, with ``cdr`` (create, delete, read) for
the user. On the znodes above them the user needs no right.
"""

from __future__ import annotations

import contextlib
import random
import re
import secrets
import socket
import ssl
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote, unquote

from kazoo.exceptions import (
    AuthFailedError,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NoNodeError,
    OperationTimeoutError,
    QuotaExceededError,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.protocol.serialization import (
    CheckVersion,
    Create,
    Delete,
    Exists,
    GetChildren,
    SetData,
    Sync,
    Transaction,
)
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from rdzv_plugins.kv import Capabilities, RendezvousStateError
from rdzv_plugins.kv.base import (
    Limit,
    Problem,
    StoreClient,
    Stored,
    Wake,
    busy,
    find_problem,
    refused,
    segments,
)
from rdzv_plugins.kv.findings import Finding, Mark, of_connection, of_version
from rdzv_plugins.settings.endpoint import Endpoint, at, parse_endpoint, redact
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import ServerOptions, UnreadableFileError, option
from rdzv_plugins.stores._tls import context_if, is_of_tls, tls_problem
from rdzv_plugins.stores._zookeeper_session import NotConnectedError, ReadMany, Session

# The most reads or operations in a request: two for a thousand nodes, far below jute.maxbuffer.
_BATCH = 500

# The most runs that one `expire` checks: chosen at random, so that each run is checked at last.
_SWEEP = 200

# The most reads of a run until one is consistent: a run may be removed and created meanwhile.
_LOOKS = 10
# Characters that no name of a run has.
_LETTERS = re.compile("[^0-9a-z]")

# Errors of a refused log-in. A server that stops during a log-in causes them too, so the next
# log-in may succeed.
_REFUSALS = (AuthFailedError, SessionClosedRequireSaslError)
_REFUSED = (
    "refused the credentials ({name}); set the user in the endpoint, the password in "
    "$RDZV_PLUGINS_PASSWORD, and sasl=true if the server requires SASL"
)
# The meanings of errors, by a pattern of the name of the class; the first match counts.
_PROBLEMS = {
    "NoAuth": Problem(_REFUSED + "; or grant access, in zkCli.sh: {grant}", denied=True),
    "AuthFailed|RequireSasl": Problem(_REFUSED, denied=True),
    "Unimplemented": Problem("is too old: it does not know a request of {least}; upgrade it"),
    "ThrottledOp": busy("raise its zookeeper.request_throttle_max_requests or keep_alive_interval"),
    "QuotaExceeded": Problem(
        "is full: it took no write for {timeout:g} s (the quota of '{parent}' is used up); raise "
        "it with setquota, in zkCli.sh",
        retryable=True,
        undone=True,
    ),
    "": refused("the user needs rights there, in zkCli.sh: {grant}"),
}
_LOSSES = (
    ConnectionLoss,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
    TimeoutError,
)
# Errors of a transaction that do not come from the state of the znodes.
_FAULTS = (InvalidACLError, NoAuthError, QuotaExceededError)


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the zookeeper backend, for endpoints ``host:port[,host:port...][/chroot]``,
    also with ``zookeeper://`` in front.
    """

    sasl: bool = option(False)
    """log in by SASL (DIGEST-MD5); false: by the scheme ``digest``"""


class _Run(NamedTuple):
    """The run's znode as it was read."""

    # The path of a child. A znode's version begins at 0 again after a delete, so each delete
    # increments the guard's version, and a compare-and-set compares both.
    guard: str
    deletes: int  # The guard's version; 0 if it was not read.
    expired: bool  # Everything in the run counts as absent.
    is_this: Any  # The check that the run is still the same.


class Client(StoreClient):
    """One run on ZooKeeper: one session for requests and watches."""

    name = "zookeeper"
    default_port = 2181
    options = Options
    capabilities = Capabilities(
        push=True,
        linearizable=True,
        batch=False,
        ttl=False,
        max_value_bytes=1_046_528,
        atomic=range(1, _BATCH + 1),
    )
    heartbeat_ms = 1.5
    batch = (_BATCH, 500_000)
    least_version: ClassVar[tuple[int, ...]] = (3, 6)

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        super().__init__(f"zookeeper at {redact(endpoint) or 'localhost'}", request_timeout)
        target = parse_endpoint(endpoint, default_port=2181, schemes=("zookeeper",))
        target.refuse_all_but(path=True)
        self._hosts = target.hosts
        self._tls = context_if(options.tls, options, "set tls=true")
        settings = _settings(target, options, request_timeout)
        # DIGEST-MD5 does not send the password.
        self._sends_password = "auth_data" in settings
        self._acl = settings.get("default_acl", OPEN_ACL_UNSAFE)
        self._parents = ["/"]
        for part in (*filter(None, target.path.split("/")), *segments(namespace, options.prefix)):
            self._parents.append(f"{self._parents[-1].rstrip('/')}/{part}")
        self._root = self._parents.pop()
        user = target.user or options.user
        who = f"{'sasl' if options.sasl else 'auth'}:{user}" if user else "world:anyone"
        # "a" (admin) too: without it no user could change the access list again.
        self._grant = f"setAcl {self._parents[-1]} {who}:cdra"
        # The run as last read; and the mark's mzxid with the monotonic time of the run's end.
        self._run: _Run | None = None
        self._end: tuple[int, float] = (0, 0.0)
        self._parked: set[Wake] = set()
        self._session = Session(settings, self._encrypted, partial(_read_files, options, self._tls))
        self._connect(lambda limit: self._read([], limit))

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        paths = {self._path(key): key for key in keys}
        run, found = self._look_up([*paths], limit)
        return {
            paths[at]: Stored.parse(data or b"", (run, stat)) for at, (data, stat) in found.items()
        }

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        start = "=" + quote(prefix, safe="")
        names = self._children(self._root, limit)
        keys = [key for name in names if name.startswith(start) if (key := _key(name)) is not None]
        return self._read(keys, limit)

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        path = self._path(key)
        run = seen.guard[0] if seen is not None else self._run
        if run is None or run.expired:
            self._begin(run, limit)
            return False
        if seen is not None:
            check = CheckVersion(run.guard, run.deletes)
            write = SetData(path, data, seen.guard[1].version)
        else:
            check, write = CheckVersion(run.guard, -1), Create(path, data, self._acl, 0)
        return self._commit([check, write], limit) is not None

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        paths = {self._path(key): data for key, data in values.items()}
        # Expect that all exist, like a node's record at most of its heartbeats.
        existing: Collection[str] = paths
        while True:
            writes = [
                SetData(path, data, -1) if path in existing else Create(path, data, self._acl, 0)
                for path, data in paths.items()
            ]
            guard = self._guard
            read = ReadMany([self._root, guard])
            (own, guarded), results = self._session.ask(limit, read, Transaction(writes))
            run = self._run_of(own, guard, guarded, limit)
            if run is not None and run.guard == guard and not run.expired and _done(results):
                return
            run, existing = self._look_up([*paths], limit)
            if run is None or run.expired:
                self._begin(run, limit)

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        paths = [self._path(key) for key in keys]
        while True:
            run, found = self._look_up(paths, limit)
            if run is None or not found:
                return
            deletes = [Delete(path, -1) for path in found]
            if self._commit([SetData(run.guard, b"", -1), *deletes], limit):
                return
            self._strip(found, limit)

    def _expire(self, seconds: float, limit: Limit) -> None:
        """Mark the run, or remove it if ``seconds`` is 0; remove other runs that have expired."""
        milliseconds = round(seconds * 1000)
        while True:
            run, _ = self._look_up([], limit)
            if milliseconds <= 0:
                if run is not None:
                    self._remove(self._root, run.is_this, limit)
                return
            if run is None or run.expired:
                # An empty run gets a deadline too.
                self._begin(run, limit)
                continue
            mark = f"{run.guard.rpartition('#')[2]} {milliseconds}".encode()
            operations = [CheckVersion(run.guard, -1), SetData(self._root, mark, -1)]
            if results := self._commit(operations, limit):
                stat = results[1]
                self._end = (stat.mzxid, time.monotonic() + seconds)
                self._sweep(stat.mtime, limit)
                return

    def _park(self, key: str, seen: Stored | None, limit: Limit) -> Stored | None:
        changed = Wake()
        self._parked.add(changed)
        try:
            soon = limit.within(self.timeout)
            # Always the same method: kazoo keeps a set, which repeated waits do not enlarge.
            (stat,) = self._session.ask(soon, Exists(self._path(key), self._on_event))
            if seen is not None:
                if stat != seen.guard[1]:
                    return None
            elif stat is not None and (found := self._read([key], soon)):
                return found[key]  # Otherwise its run has expired.
            limit.await_ready(changed.fd)
            return None
        finally:
            self._parked.discard(changed)
            changed.close()

    def _on_event(self, event: Any) -> None:
        """Called when a watched znode has changed or the connection is lost."""
        for wake in self._parked.copy():
            wake.ring()

    def _problem(self, error: Exception) -> Problem | None:
        if isinstance(error, _LOSSES):
            return self._lost(error)
        if not isinstance(error, KazooException):
            return None
        name = type(error).__name__
        problem = find_problem(
            _PROBLEMS, name, said=f"{name} {error}".rstrip(), timeout=self.timeout, name=name,
            least=".".join(map(str, self.least_version)),
            grant=self._grant, parent=self._parents[-1],
        )  # fmt: skip
        late = isinstance(error, _REFUSALS) and self._session.may_recover(error)
        return replace(problem, retryable=True) if problem is not None and late else problem

    def _lost(self, error: Exception) -> Problem:
        reason = self._session.reason or str(error) or type(error).__name__
        if is_of_tls(reason):
            problem = tls_problem(reason)
        else:
            if reason.endswith("connection broken"):
                reason += ": it hung up; does it need tls=true, or has it too many clients?"
            problem = self._unreachable(ConnectionLoss(reason))
        undone = isinstance(error, NotConnectedError)
        return replace(problem, retryable=self._session.may_recover(error), undone=undone)

    def _disconnect(self) -> None:
        self._session.close()

    def inspect(self) -> Iterable[Finding]:
        hosts = [host for host, _ in self._hosts]
        yield of_connection(self._tls is not None, self._sends_password, hosts)
        told = self._srvr()
        version = re.search(r"^Zookeeper version: (\S+?)[-,\s]", told, re.MULTILINE)
        mode = re.search(r"^Mode: (.+)$", told, re.MULTILINE)
        if version is None or mode is None:
            why = " ".join(told.split())[:80] or "no answer"
            found = f"not known: the server does not execute srvr ({why})"
            yield Finding(Mark.UNKNOWN, "version", found, "4lw.commands.whitelist=srvr allows it")
        else:
            yield of_version("zookeeper", version[1], self.least_version)
            values = {"mode": mode[1]}
            if "read-only" in mode[1]:
                found = "a read-only server, cut off from the majority"
                yield Finding(Mark.FAILED, "role", found, "name all servers", values)
            else:
                yield Finding(Mark.OK, "role", mode[1], values=values)
        shared = self._acl is OPEN_ACL_UNSAFE
        who = "everybody who reaches the server" if shared else "this user only"
        yield Finding(Mark.OK, "access", f"the run's znodes are open to {who}")

    def _srvr(self) -> str:
        """The first server's answer to the command srvr; "" without one."""
        # kazoo's own `command` verifies a certificate against the server's address, not its name.
        for host, port in self._hosts:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, port), self.timeout) as raw,
                self._encrypted(raw, host) as line,
                line.makefile("rb") as answer,
            ):
                line.sendall(b"srvr")
                return answer.read().decode(errors="replace")
        return ""

    def _encrypted(self, line: socket.socket, host: str) -> socket.socket:
        return self._tls.get().wrap_socket(line, server_hostname=host) if self._tls else line

    def _path(self, key: str) -> str:
        return f"{self._root}/={quote(key, safe='')}"

    def _look_up(
        self, paths: Sequence[str], limit: Limit
    ) -> tuple[_Run | None, dict[str, tuple[bytes, Any]]]:
        """The run (None: there is none) and, by path, data and stat of the znodes that exist."""
        for _ in range(_LOOKS):
            guard = self._guard
            # Read the guard first: a later delete must change the version that was read.
            batches = [[self._root, guard, *paths[:_BATCH]]]
            batches += [[*paths[at : at + _BATCH]] for at in range(_BATCH, len(paths), _BATCH)]
            # A server that requires a log-in refuses the first request and hangs up.
            _, *answers = self._session.ask(limit, Sync(self._root), *map(ReadMany, batches))
            own, guarded, *results = [result for answer in answers for result in answer]
            run = self._run_of(own, guard, guarded, limit)
            if run is None:
                return None, {}
            if run.guard == guard:
                return run, {} if run.expired else _found(paths, results)
        raise RendezvousStateError(f"'{self._root}' was removed and created again and again")

    @property
    def _guard(self) -> str:
        """The path at which the run's guard is expected."""
        return self._run.guard if self._run is not None else f"{self._root}/#"

    def _run_of(self, own: Any, read: str, guarded: Any, limit: Limit) -> _Run | None:
        """The run in the results of `ReadMany` for its znode, and for a guard at this path."""
        if own is None:
            self._run = None
            return None
        if isinstance(own, Exception):
            raise own
        data, stat = own
        name, milliseconds = _parse(data)
        guard = f"{self._root}/#{name}"
        is_this = CheckVersion(guard, -1)
        deletes = guarded[1].version if isinstance(guarded, tuple) else 0
        expired = milliseconds is not None and self._is_past(guard, stat, milliseconds, limit)
        if guard == read and guarded is None:
            # Another program has overwritten the root znode's data: treat the run as absent.
            expired, is_this = True, CheckVersion(self._root, stat.version)
        self._run = run = _Run(guard, deletes, expired, is_this)
        return run

    def _is_past(self, guard: str, stat: Any, milliseconds: int, limit: Limit) -> bool:
        mark, end = self._end
        if mark != stat.mzxid:
            # Only a write returns the server's time.
            try:
                (written,) = self._session.ask(limit, SetData(guard, b"", -1))
            except NoNodeError:
                return True
            end = time.monotonic() + (stat.mtime + milliseconds - written.mtime) / 1000
            self._end = (stat.mzxid, end)
        return time.monotonic() >= end

    def _children(self, path: str, limit: Limit) -> Sequence[str]:
        """The names of a znode's children; none if it does not exist."""
        try:
            names: Sequence[str]
            _, names = self._session.ask(limit, Sync(path), GetChildren(path, None))
        except NoNodeError:
            return []
        return names

    def _commit(self, operations: Sequence[Any], limit: Limit) -> list[Any] | None:
        """Execute a transaction; returns its results. None: it was refused and changed nothing."""
        (results,) = self._session.ask(limit, Transaction(operations))
        return results if _done(results) else None

    def _begin(self, run: _Run | None, limit: Limit) -> None:
        """Create the run's znode, after removing the expired ``run``; others may be faster."""
        if run is not None:
            self._remove(self._root, run.is_this, limit)
        name = secrets.token_hex(8)
        missing: list[str] = []
        # From the prefix upwards, because the user may have no access to the znodes above.
        for path in reversed(self._parents[1:]):
            (results,) = self._session.ask(limit, ReadMany([path]))
            if _found([path], results):
                break
            missing.insert(0, path)
        operations = [Create(path, b"", OPEN_ACL_UNSAFE, 0) for path in missing]
        operations.append(Create(self._root, name.encode(), self._acl, 0))
        operations.append(Create(f"{self._root}/#{name}", b"", self._acl, 0))
        self._commit(operations, limit)

    def _remove(self, path: str, is_this: Any, limit: Limit) -> None:
        """Delete a run and all znodes below it, as long as the check holds."""
        while True:
            # The guard, whose name begins with "#", goes last.
            below = sorted(self._children(path, limit), reverse=True)
            gone = [f"{path}/{name}" for name in below[:_BATCH]]
            last = [path] if len(below) <= _BATCH else []
            if self._commit([is_this, *(Delete(it, -1) for it in [*gone, *last])], limit):
                if last:
                    return
            elif self._commit([is_this], limit) is None:
                return
            else:
                self._strip(gone, limit)

    def _strip(self, paths: Iterable[str], limit: Limit) -> None:
        """Delete other programs' znodes below these znodes; this package has none there."""
        found = [*paths]
        ours = len(found)
        for path in found:  # The loop appends to `found`.
            names = self._children(path, limit)
            if any(name.startswith("#") for name in names):
                raise RendezvousStateError(
                    f"'{path}' is a run under another prefix; take another run id, or prefix"
                )
            found += (f"{path}/{name}" for name in names)
        for path in reversed(found[ours:]):
            self._commit([Delete(path, -1)], limit)

    def _sweep(self, now: int, limit: Limit) -> None:
        """Remove other runs of our prefix that expired before ``now``, the server's time."""
        parent = self._parents[-1]
        # Stop at a run that cannot be deleted, and when the time is up: a later sweep tries others.
        with contextlib.suppress(KazooException, RendezvousStateError, TimeoutError):
            names = self._children(parent, limit)
            names = random.sample(names, min(len(names), _SWEEP))
            paths = [path for name in names if (path := f"{parent}/{name}") != self._root]
            (results,) = self._session.ask(limit, ReadMany(paths))
            for path, result in zip(paths, results, strict=True):
                if isinstance(result, tuple):
                    name, milliseconds = _parse(result[0])
                    if milliseconds is not None and result[1].mtime + milliseconds < now:
                        self._remove(path, CheckVersion(f"{path}/#{name}", -1), limit)


def _found(paths: Sequence[str], results: Sequence[Any]) -> dict[str, tuple[bytes, Any]]:
    """The znodes that `ReadMany` found, by path; raises its errors."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return {path: it for path, it in zip(paths, results, strict=True) if it is not None}


def _done(results: Sequence[Any]) -> bool:
    """Whether a transaction succeeded; raises errors that do not come from the znodes' state."""
    for result in results:
        if isinstance(result, _FAULTS):
            raise result
    return not any(isinstance(result, KazooException) for result in results)


def _key(name: str) -> str | None:
    """The key of a znode's name; None: this package gives no such name."""
    key = unquote(name[1:])
    return key if quote(key, safe="") == name[1:] else None


def _parse(data: bytes | None) -> tuple[str, int | None]:
    """A run's name, and its lifetime in milliseconds from its modification time on, if any."""
    name, _, mark = (data or b"").decode("ascii", "replace").partition(" ")
    # Other programs' data may have no name, a path as name, or an endless lifetime.
    return _LETTERS.sub("", name)[:64], int(mark) if mark.isdecimal() and len(mark) < 19 else None


def _settings(target: Endpoint, options: Options, request_timeout: float) -> dict[str, Any]:
    """The arguments of `KazooClient`."""
    hosts = ",".join(at(host, port) for host, port in target.hosts)
    # kazoo waits this long for a host that does not answer: leave time for another host.
    settings: dict[str, Any] = {"hosts": hosts, "timeout": max(1.0, request_timeout * 2 / 3)}
    user, password = target.user or options.user, target.password or options.current_password()
    if (user is None) != (password is None):
        raise ValueError("user and password ($RDZV_PLUGINS_PASSWORD) must be set together")
    if options.sasl and user is None:
        raise ValueError("option 'sasl': true needs a user and $RDZV_PLUGINS_PASSWORD")
    if user is None:
        return settings
    settings["default_acl"] = CREATOR_ALL_ACL
    if not options.sasl:
        return settings | {"auth_data": [("digest", f"{user}:{password}")]}
    if find_spec("puresasl") is None:
        raise ValueError("option 'sasl': true needs a package: pip install pure-sasl")
    login: dict[str, Any] = {"mechanism": "DIGEST-MD5", "username": user}
    if target.password is not None:
        login["password"] = password
    else:
        # pure-sasl calls this at each log-in if it was given no password.
        login["callback"] = lambda _: _secret_or_none(options)
    return settings | {"sasl_options": login}


def _secret_or_none(options: Options) -> str:
    """The password; "" while it is unreadable: kazoo would treat an exception as a refusal."""
    with contextlib.suppress(UnreadableFileError):
        return options.current_password() or ""
    return ""


def _read_files(options: Options, tls: FromFiles[ssl.SSLContext] | None) -> None:
    """Raise UnreadableFileError if a file that the next connection needs cannot be read."""
    if options.sasl:
        # Only SASL reads the password at each log-in.
        options.current_password()
    if tls is not None:
        tls.get()
