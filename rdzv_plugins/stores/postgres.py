"""PostgreSQL 12 and later.

One table holds every run, a row for each key::

    CREATE TABLE rdzv (run bytea, key bytea, data bytea NOT NULL, time timestamptz NOT NULL,
                       PRIMARY KEY (run, key))

A promoted standby may lack the last writes, which the round protocol survives. Values up to 64 MiB.
A node holds two of ``max_connections`` (100 by default), and at times two more for the history.
PgBouncer must be in session mode.

The user needs ``CONNECT`` on the database, ``USAGE`` on the schema and ``SELECT, INSERT, UPDATE,
DELETE`` on the table; to create the table (create_table=true), also ``CREATE`` on the schema.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo
from psycopg.errors import (
    DuplicateObject,
    DuplicateTable,
    InsufficientPrivilege,
    ReadOnlySqlTransaction,
    UndefinedTable,
    UniqueViolation,
)
from psycopg.waiting import Ready, Wait

from rdzv_plugins.kv import Capabilities
from rdzv_plugins.kv.base import (
    STAMP_BYTES,
    Limit,
    Problem,
    StoreClient,
    Stored,
    find_problem,
    full,
    refused,
    version_of,
)
from rdzv_plugins.kv.findings import Finding, Mark, of_connection, of_version
from rdzv_plugins.settings.endpoint import Place, parse_endpoint, redact
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import ServerOptions, option
from rdzv_plugins.stores._names import look_up
from rdzv_plugins.stores._tls import context_if, refuses_client

# Matches a socket's folder in a URL of libpq, as the host or as a parameter.
_SOCKET = re.compile(r"(?i)(//([^/]*@)?|[?&]host=)(/|%2F)")
# Variables of libpq; each of them replaces an endpoint.
_HOST_VARIABLES = {"PGHOST", "PGHOSTADDR", "PGSERVICE"}

# The most idle connections of a client: one for requests and one for a waiter.
_IDLE = 2

# A waiter reads again after this many seconds, to detect a connection that broke silently.
_LONGEST_PARK = 10.0

_TABLE = """CREATE TABLE {table} (run bytea, key bytea, data bytea NOT NULL,
 time timestamptz NOT NULL, PRIMARY KEY (run, key))""".replace("\n", "")

# When the run last expired; rows written before that time count as absent.
_EXPIRED = """coalesce((SELECT e.time FROM {table} AS e WHERE e.run = %(run)b AND e.key = ''
 AND e.time <= clock_timestamp()), '-infinity')"""

# NOTIFY wakes every listening session of the database, and such transactions commit one by one. A
# waiter holds a shared advisory lock on its key's hash, and a write notifies only if it cannot have
# the exclusive one.
_HASH = "encode(sha256(r.run || r.key), 'hex')"
_TELL = f"""CASE WHEN pg_try_advisory_xact_lock(('x' || left({_HASH}, 16))::bit(64)::bigint)
 THEN NULL ELSE pg_notify('rdzv_' || left({_HASH}, 32), '') END"""

_READ = f"""SELECT key, data FROM {{table}} AS r
 WHERE run = %(run)b AND key = ANY(%(keys)b) AND time > {_EXPIRED}"""
# No byte of UTF-8 is FF.
_SCAN = f"""SELECT key, data FROM {{table}} AS r WHERE run = %(run)b AND key <> ''
 AND key >= %(prefix)b AND key < %(prefix)b || '\\xff'::bytea AND time > {_EXPIRED}"""
_CREATE = f"""INSERT INTO {{table}} AS r VALUES (%(run)b, %(key)b, %(data)b, clock_timestamp())
 ON CONFLICT (run, key) DO UPDATE SET data = excluded.data, time = excluded.time
 WHERE r.time <= {_EXPIRED} RETURNING {_TELL}"""
_REPLACE = f"""UPDATE {{table}} AS r SET data = %(data)b, time = clock_timestamp()
 WHERE run = %(run)b AND key = %(key)b AND substring(data FOR {STAMP_BYTES}) = %(seen)b
 AND time > {_EXPIRED} RETURNING {_TELL}"""
_PUT = f"""INSERT INTO {{table}} AS r SELECT %(run)b, key, data, clock_timestamp()
 FROM unnest(%(keys)b::bytea[], %(values)b::bytea[]) AS new (key, data)
 ON CONFLICT (run, key) DO UPDATE SET data = excluded.data, time = excluded.time
 RETURNING {_TELL}"""
_DELETE = "DELETE FROM {table} WHERE run = %(run)b AND key = ANY(%(keys)b)"
_END = "DELETE FROM {table} WHERE run = %(run)b"
_EXPIRE = """WITH swept AS (DELETE FROM {table} AS r USING {table} AS e
 WHERE e.key = '' AND e.time <= clock_timestamp() AND r.run = e.run AND r.time <= e.time
 AND (r.run <> %(run)b OR r.key <> ''))
 INSERT INTO {table} VALUES
 (%(run)b, '', '', clock_timestamp() + make_interval(secs => %(seconds)s))
 ON CONFLICT (run, key) DO UPDATE SET time = excluded.time"""

# Postgres tells a user without rights on the schema that the table does not exist.
_HIDDEN = """SELECT nspname FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace
 WHERE relname = '{table}' AND NOT has_schema_privilege(n.oid, 'USAGE') AND nspname = ANY(
 regexp_split_to_array(replace(current_setting('search_path'), '"$user"', current_user), ', *'))"""

_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")
# The table's name is a literal; its oid tells apart tables of several schemas.
_ABOUT = """SELECT current_setting('server_version'), pg_is_in_recovery(), current_user::text,
 current_setting('fsync') = 'on', current_setting('max_connections')::int,
 (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
 (SELECT relpersistence::text FROM pg_class WHERE oid = to_regclass('{table}')),
 ARRAY(SELECT r FROM unnest(%(rights)s::text[]) AS r
 WHERE NOT has_table_privilege(to_regclass('{table}'), r))"""

# Parameters that an endpoint must not set, and what to write instead: neither psycopg nor this
# module obeys them when it connects.
_ELSEWHERE = {"connect_timeout": "write heartbeat_timeout="}

# The values of sslmode with which libpq surely encrypts.
_ENCRYPTS = ("require", "verify-ca", "verify-full")

# Several looks: in a pool of 8 with 6 busy clients one look in 30 did not show the mix-up.
_LOOKS = 10

# A connection that has logged in, and waits for the answer to libpq's own query.
_LOGGED_IN = (
    pq.ConnStatus.CHECK_WRITABLE, pq.ConnStatus.CHECK_TARGET,
    pq.ConnStatus.CHECK_STANDBY, pq.ConnStatus.CONSUME,
)  # fmt: skip

# The meanings of errors, by a pattern of code and text; the first match counts. Errors of a
# refused connection have no code.
_PROBLEMS = {
    r"authentication failed|no password supplied|role .*(does not exist|is not permitted)": Problem(
        "refused the credentials ({said}); set the user in the endpoint and the password in "
        "$RDZV_PLUGINS_PASSWORD, password_file or ~/.pgpass",
        denied=True,
    ),
    r"database .* does not exist|not currently accepting": Problem(
        "has no such database ({said}); name one in the endpoint (postgresql://host/database) or "
        "with database=, or create it"
    ),
    r"no encryption|SSL off": Problem(
        "requires an encrypted connection ({said}); set tls=true and ca_file", denied=True
    ),
    r"pg_hba\.conf|permission denied for database": Problem(
        "refuses this client ({said}); its pg_hba.conf needs a line for this host, user and "
        "database, and the user needs CONNECT on the database",
        denied=True,
    ),
    r"requires a valid client certificate": Problem(
        "refuses this client ({said}); set cert_file and key_file", denied=True
    ),
    r"does not support SSL": Problem(
        "speaks no TLS ({said}); leave out tls=true, or check that the server has TLS enabled"
    ),
    # A server that dies causes an unexpected eof.
    r"SSL error: (?!unexpected eof)|certificate|private key": Problem(
        "failed the TLS handshake ({said}); check that ca_file signed the server's certificate, "
        "that it names the endpoint's host and is valid by this host's clock, and cert_file and "
        "key_file if the server requires them"
    ),
    r"answered no query|query_wait_timeout|no more connections allowed": Problem(
        "is behind a pooler that had no connection left for {timeout:g} s ({said}); a node holds "
        "two, and at times two more for the history: raise its default_pool_size",
        retryable=True,
    ),
    r"^(26000|42P05)|statement pooling mode|gave this client's server": Problem(
        "is behind a pooler that keeps no connection for a client ({said}; of PgBouncer: "
        "pool_mode=transaction or statement), so that prepared statements, locks and LISTEN get "
        "mixed up; name the server itself, or a pool with pool_mode=session"
    ),
    r"^53300|too many (clients|connections)|remaining connection slots": Problem(
        "had no connection left for {timeout:g} s ({said}); a node holds two, and at times two "
        "more for the history: raise max_connections, or the limit of the user or database",
        retryable=True,
    ),
    r"^25006|session is read-only|hot standby mode": Problem(
        "accepted no writes for {timeout:g} s ({said}): it is a standby, or read-only; name the "
        "primary, or all servers: host1:5432,host2:5432",
        retryable=True,
    ),
    r"starting up|shutting down|recovery mode|not (yet )?accepting connections": Problem(
        "was not ready for {timeout:g} s ({said})", retryable=True
    ),
    r"^(40|55P03|57014)": Problem(
        "was too busy for {timeout:g} s ({said}), or another session locks the table {table}",
        retryable=True,
    ),
    r"^53100|No space left on device": full("make room on its disk"),
    r"^(53|58)": Problem("lacks resources ({said}); its log says more", retryable=True),
    r"^42P01": Problem("has no table {table}; set create_table=true, or run: {statement}"),
    # The second text is for a user who may use no schema and should create the table.
    r"^42501|no schema has been selected": Problem(
        "denied a right ({said}); the user needs SELECT, INSERT, UPDATE, DELETE on the table "
        "{table}, USAGE on its schema and, to create the table, CREATE on the schema; run: {grant}",
        denied=True,
    ),
    r"^(42703|42804|42P10|42883)": Problem(
        "has a table {table} with another schema ({said}); name another table with table="
    ),
}
_ANY_OTHER = {"": refused("the server's log says more; the user needs: {grant}")}


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the postgres backend, for endpoints ``host:port``, several of them, and
    ``postgresql://host/database?sslmode=verify-full`` with any parameters of libpq. Values that
    neither endpoint nor options set come from libpq's own sources: PGUSER, PGPASSWORD and similar
    variables, service files, ~/.pgpass.

    With tls=true the client verifies the certificate and its name (sslmode=verify-full) unless the
    endpoint sets another sslmode; without it libpq encrypts if the server can, and does not verify.
    """

    database: str | None = option(None)
    """database; a database in the endpoint takes precedence; default: libpq's default, the user's
    name"""
    table: str = option("rdzv")
    """the table, also as schema.table"""
    create_table: bool = option(False)
    """create the table if there is none"""


class UnconnectedError(psycopg.OperationalError):
    """No host accepted a connection: no request was sent."""


class LateError(UnconnectedError, TimeoutError):
    """No host accepted a connection in time; an earlier attempt may have a better reason."""


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose requests end at ``limit``; psycopg's own requests wait forever.

    Attributes:
        limit: the limit of the current request.
        pooled: whether a pooler is between the connection and the server.
        key: the key for which the connection listens.
        notified: whether a notification has arrived.
    """

    limit: Limit
    pooled = False
    key: str | None = None
    notified = False

    @classmethod
    def open(cls, conninfo: str, limit: Limit) -> Connection:
        """Connect to one host (psycopg's own connect cannot be woken).

        Raises `psycopg.OperationalError`, also if a pooler has no connection to the server left.
        """
        logged_in = False
        pgconn = pq.PGconn.connect_start(conninfo.encode())
        try:
            while (status := pgconn.connect_poll()) != pq.PollingStatus.OK:
                if status == pq.PollingStatus.FAILED:
                    raise psycopg.OperationalError(pgconn.error_message.decode("utf-8", "replace"))
                reading = status == pq.PollingStatus.READING
                logged_in = pgconn.status in _LOGGED_IN
                _await(pgconn.socket, Wait.R if reading else Wait.W, limit)
            pgconn.nonblocking = 1
            db = cls(pgconn)
            db.limit = limit
            db.autocommit = True
            db.add_notify_handler(db.hear)
            logged_in = True
            # A pooler gives its client a number that is no process of the server.
            db.pooled = db.process != pgconn.backend_pid
        except TimeoutError as error:
            pgconn.finish()
            if logged_in:
                said = "it logged this client in, and answered no query"
                raise psycopg.OperationalError(said) from error
            raise
        except BaseException:
            pgconn.finish()
            raise
        return db

    @property
    def process(self) -> int:
        """The server's process that executes its requests now."""
        row = self.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
        assert row is not None
        return int(row[0])

    def hear(self, _: psycopg.Notify) -> None:
        self.notified = True

    def wait(self, gen: Any, interval: float = 0.0, timeout: float | None = None) -> Any:
        try:
            want = next(gen)
            while True:
                want = gen.send(_await(self.pgconn.socket, want, self.limit))
        except StopIteration as end:
            return end.value

    def await_change(self, limit: Limit) -> None:
        """Wait for a notification of ``key``; raises TimeoutError and `WokenError`."""
        while not self.notified:
            limit.await_ready(self.pgconn.socket)
            self.pgconn.consume_input()
            while self.pgconn.notifies() is not None:
                self.notified = True


class Client(StoreClient):
    """One run in a PostgreSQL table; requests and waiters share its connections."""

    name = "postgres"
    default_port = 5432
    # A client first asks for TLS, and the server answers whether it speaks TLS.
    begins_with_tls = False
    options = Options
    capabilities = Capabilities(
        push=True,
        linearizable=True,
        batch=True,
        ttl=False,
        max_value_bytes=64 << 20,
        atomic=range(1, 101),
    )
    heartbeat_ms = 0.65
    least_version: ClassVar[tuple[int, ...]] = (12,)

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        super().__init__(f"postgres at {redact(endpoint) or 'the default host'}", request_timeout)
        self._run = namespace.encode()
        parts = options.table.split(".")
        if len(parts) > 2 or not all(re.fullmatch(r"[^\W\d][\w$]{0,62}", part) for part in parts):
            raise ValueError(f"option 'table': '{options.table}' is not a name or schema.name")
        self._name = options.table
        self._table = ".".join(f'"{part}"' for part in parts)
        self._create = options.create_table
        # libpq reads the files of TLS for each connection, but not the password.
        files = options.password_file, options.ca_file, options.cert_file, options.key_file
        self._server = FromFiles(partial(_server, endpoint, options, request_timeout), *files)
        parameters = self._server.get()
        self._user = parameters.get("user") or "<user>"
        self._verified = parameters.get("sslmode") in ("verify-ca", "verify-full")
        self._host: object = None
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        # Whether a pooler keeps a server for each connection; False: not known, or no pooler.
        self._keeps_sessions = False
        self._connect(self._begin)

    def _begin(self, limit: Limit) -> None:
        with self._connection(limit) as first:
            if first.pooled and not self._keeps_sessions:
                # Each node needs a second connection anyway.
                with self._connection(limit) as second:
                    self._learn_mode(first, second)
        self._read([], limit)

    def hold(self, callers: int) -> None:
        def request(limit: Limit) -> None:
            with ExitStack() as held:
                for _ in range(callers):
                    held.enter_context(self._connection(limit))

        self._call(request)

    def _learn_mode(self, first: Connection, second: Connection) -> None:
        """Raise `psycopg.OperationalError` unless the pooler keeps a server for each connection.

        Otherwise the pooler gives the server of ``first`` to ``second``, and another server to
        ``first``; in a busy pool this shows only after some looks.
        """
        before = first.process
        for _ in range(_LOOKS):
            second.execute("BEGIN")
            try:
                kept = second.process != before and first.process == before
            finally:
                second.execute("ROLLBACK")
            if not kept:
                raise psycopg.OperationalError("it gave this client's server to another one")
        self._keeps_sessions = True
        for db in (first, second):
            self._set_timeout(db)

    def _set_timeout(self, db: Connection) -> None:
        """Have the server cancel long statements, so that it executes no abandoned statement.

        A pooler in transaction mode would pass the time-out on to other clients.
        """
        # 0 would mean no time-out.
        milliseconds = max(1, int(self.timeout * 1000))
        if not db.pooled or self._keeps_sessions:
            db.execute(f"SET statement_timeout = {milliseconds}")

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        return _found(self._ask(_READ, limit, keys=_names(keys)))

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        return _found(self._ask(_SCAN, limit, prefix=prefix.encode()))

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        if seen is None:
            return bool(self._ask(_CREATE, limit, key=key.encode(), data=data))
        # Another program's value has no stamp: compare its first bytes.
        stamp = bytes.fromhex(seen.version) + b"=" if seen.version else seen.value[:STAMP_BYTES]
        return bool(self._ask(_REPLACE, limit, key=key.encode(), data=data, seen=stamp))

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        # Sorted: otherwise two writers of the same keys could deadlock.
        keys = sorted(values)
        self._ask(_PUT, limit, keys=_names(keys), values=[values[key] for key in keys])

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        self._ask(_DELETE, limit, keys=_names(keys))

    def _expire(self, seconds: float, limit: Limit) -> None:
        self._ask(_EXPIRE if seconds > 0 else _END, limit, seconds=float(seconds))

    def _park(self, key: str, seen: Stored | None, limit: Limit) -> Stored | None:
        with self._connection(limit.within(self.timeout), key) as db:
            if db.key != key:
                self._listen(db, key)
            while True:
                db.notified = False
                stored = _found(self._execute(db, _READ, keys=_names([key]))).get(key)
                if version_of(stored) != version_of(seen):
                    return stored
                db.await_change(limit.within(_LONGEST_PARK))
                db.limit = limit.within(self.timeout)

    def _problem(self, error: Exception) -> Problem | None:
        if not isinstance(error, psycopg.Error):
            return self._unreachable(error) if isinstance(error, OSError) else None
        said, grant = _said(error), self._grant(self._user)
        problem = find_problem(
            _PROBLEMS, f"{error.sqlstate or ''} {said}", said=said, timeout=self.timeout,
            table=self._name, statement=_TABLE.format(table=self._name), grant=grant,
        )  # fmt: skip
        if problem is not None:
            return replace(problem, undone=True, denied=problem.denied or refuses_client(said))
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            unsent = isinstance(error, UnconnectedError)
            return self._unreachable(psycopg.OperationalError(said), undone=unsent)
        return find_problem(_ANY_OTHER, "", said=said, grant=grant)

    def _disconnect(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for db in idle:
            db.close()

    @classmethod
    def locate(cls, endpoint: str) -> Place:
        if _SOCKET.search(endpoint):
            return Place(on_socket=True)
        by_libpq = not endpoint.strip() and _HOST_VARIABLES & os.environ.keys()
        return Place() if by_libpq else super().locate(endpoint)

    def inspect(self) -> Iterable[Finding]:
        def ask(limit: Limit) -> tuple[Any, ...]:
            with self._connection(limit) as db:
                rows = self._execute(db, _ABOUT, rights=[*_RIGHTS])
                return db.pgconn.ssl_in_use, *rows[0]

        about, why = self._learn(ask)
        if about is None:
            yield Finding(Mark.UNKNOWN, "version", f"not known: {why}")
            return
        tls, version, standby, user, syncs, most, used, kept, missing = about
        # The log-in by scram-sha-256, the default, does not send the password.
        yield of_connection(tls, False, [], self._verified)
        yield of_version("postgres", version, self.least_version)
        if self._keeps_sessions:
            found = "a pooler in session mode is in between; a node takes two of its connections"
            yield Finding(Mark.OK, "pooler", found)
        if standby:
            found = "a standby, which accepts no writes"
            yield Finding(Mark.FAILED, "role", found, "name the primary, or all servers")
        else:
            yield Finding(Mark.OK, "role", "primary, accepts writes")
        if missing:
            found = f"the user '{user}' has no {', '.join(missing)} on the table {self._name}"
            yield Finding(Mark.FAILED, "rights on the table", found, f"run: {self._grant(user)}")
        else:
            found = f"the user '{user}' has {', '.join(_RIGHTS)} on {self._name}"
            yield Finding(Mark.OK, "rights on the table", found)
        if kept == "u" or not syncs:
            found = f"the table {self._name} is unlogged" if kept == "u" else "fsync is off"
            advice = f"ALTER TABLE {self._name} SET LOGGED" if kept == "u" else "set fsync = on"
            found = f"{found}: a crash of the server may lose the run"
            yield Finding(Mark.WARNING, "persistence", found, advice)
        else:
            yield Finding(Mark.OK, "persistence", "write-ahead log")
        free = max(0, most - used)
        found = f"{used} of {most} are in use; a node holds two: {free // 2} more nodes"
        values = {"max_connections": most, "used": used, "nodes": free // 2}
        yield Finding(Mark.OK, "connections", found, values=values)

    def _grant(self, user: str) -> str:
        """The commands that give the user its rights, for psql."""
        schema, dot, _ = self._name.partition(".")
        return (
            f"GRANT USAGE ON SCHEMA {schema if dot else 'public'} TO {user}; "
            f"GRANT {', '.join(_RIGHTS)} ON {self._name} TO {user}"
        )

    def _ask(self, query: str, limit: Limit, **arguments: Any) -> list[tuple[Any, ...]]:
        with self._connection(limit) as db:
            return self._execute(db, query, **arguments)

    def _execute(self, db: Connection, query: str, **arguments: Any) -> list[tuple[Any, ...]]:
        statement = query.format(table=self._table)
        given = {"run": self._run, **arguments}
        try:
            cursor = db.execute(statement, given, binary=True)
        except UndefinedTable as error:
            if not self._create:
                if hidden := db.execute(_HIDDEN.format(table=self._name)).fetchone():
                    raise InsufficientPrivilege(f"no USAGE on schema {hidden[0]}") from error
                raise
            # A restarted server may have lost the table. Another client may create it faster.
            with suppress(DuplicateTable, DuplicateObject, UniqueViolation):
                db.execute(_TABLE.format(table=self._table))
            cursor = db.execute(statement, given, binary=True)
        except ReadOnlySqlTransaction:
            # The server is no longer the primary: the next connection searches for the primary.
            db.close()
            raise
        return cursor.fetchall() if cursor.description else []

    def _listen(self, db: Connection, key: str) -> None:
        name = hashlib.sha256(self._run + key.encode()).hexdigest()
        lock = int.from_bytes(bytes.fromhex(name[:16]), signed=True)
        db.key = None
        # The lock is granted only when the writers that do not notify are done.
        db.execute(
            f"UNLISTEN *; SELECT pg_advisory_unlock_all(); "
            f"SELECT pg_advisory_lock_shared({lock}); LISTEN rdzv_{name[:32]}"
        )
        db.key = key

    @contextmanager
    def _connection(self, limit: Limit, key: str | None = None) -> Iterator[Connection]:
        """An idle connection, preferably listening for ``key``, or else a new connection."""
        with self._lock:
            # A waiter's connection keeps listening for its key until another waiter gets it.
            self._idle.sort(key=lambda it: (it.key == key, (it.key is None) == (key is None)))
            db = self._idle.pop() if self._idle else None
        if db is None:
            db = self._open(limit)
        db.limit = limit
        try:
            yield db
        finally:
            # A connection that is not idle still waits for the answer to an ended request.
            idle = db.pgconn.transaction_status == pq.TransactionStatus.IDLE
            with self._lock:
                keep = idle and not self._closed and len(self._idle) < _IDLE
                if keep:
                    self._idle.append(db)
            if not keep:
                db.close()

    def _open(self, limit: Limit) -> Connection:
        attempts: list[Any] = conninfo_attempts(_with_addresses(self._server.get(), limit.seconds))
        # Try the last known primary first.
        attempts.sort(key=lambda it: (it.get("host"), it.get("port")) != self._host)
        failures: list[Exception] = []
        for number, attempt in enumerate(attempts):
            try:
                share = limit.seconds / (len(attempts) - number)
                conninfo = make_conninfo("", **attempt)
                db = Connection.open(conninfo, limit.within(share))
            except (psycopg.OperationalError, TimeoutError) as error:
                failures.append(error)
            else:
                self._host = attempt.get("host"), attempt.get("port")
                self._set_timeout(db)
                return db
        # A file may have been replaced meanwhile: libpq's error does not name the option.
        self._server.get()
        late = all(isinstance(error, TimeoutError) for error in failures)
        kind = LateError if late else UnconnectedError
        raise kind("; ".join(map(_said, failures)))


def _await(fd: int, want: Wait, limit: Limit) -> Ready:
    """Wait until a part of ``want`` is ready; raises TimeoutError and `WokenError`."""
    reads, writes = bool(want & Wait.R), bool(want & Wait.W)
    events = limit.await_ready(fd, select.POLLIN * reads | select.POLLOUT * writes)
    # Report an error as both: libpq then detects it.
    can_read = reads and events & ~select.POLLOUT
    can_write = writes and events & ~select.POLLIN
    return Ready((Ready.R if can_read else 0) | (Ready.W if can_write else 0))


def _said(error: Exception) -> str:
    """The error in one line, without libpq's hints whether the server is running."""
    lines = str(error).splitlines()
    return " ".join(line for line in lines if line and not line.startswith("\t"))


def _names(keys: Iterable[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _found(rows: Iterable[tuple[Any, ...]]) -> dict[str, Stored]:
    read = {key.decode(errors="replace"): Stored.parse(data) for key, data in rows}
    # Skip keys that are not UTF-8: this package has not written them.
    return {key: stored for key, stored in read.items() if "\ufffd" not in key}


def _server(endpoint: str, options: Options, request_timeout: float) -> dict[str, Any]:
    """The connection parameters for libpq."""
    given: dict[str, Any] = {}
    text = endpoint.strip()
    if text or not _HOST_VARIABLES & os.environ.keys():
        text = text or "localhost"
        # Not for "postgresql:///": its host is a parameter or libpq's default.
        if not text.partition("://")[2].startswith("/"):
            parse_endpoint(text, default_port=5432, schemes=("postgresql", "postgres"))
        try:
            given = dict(conninfo_to_dict(text if "://" in text else f"postgresql://{text}"))
        except psycopg.ProgrammingError:
            # Do not quote libpq's message, which may show the password.
            raise ValueError(
                "libpq cannot parse the endpoint; write postgresql://user@host:port,host:port/"
                "database?name=value, percent-encoded, with parameters of libpq only"
            ) from None
    for name, instead in _ELSEWHERE.items():
        if name in given:
            raise ValueError(f"the parameter '{name}' of the endpoint has no effect; {instead}")
    _refuse_half_encrypted(options, given)
    own: dict[str, Any] = {
        "sslrootcert": options.ca_file,
        "sslcert": options.cert_file,
        "sslkey": options.key_file,
        "user": options.user,
        "password": options.current_password(),
        "dbname": options.database,
        "target_session_attrs": "read-write",
        # A request to a host that has vanished must leave time for another host.
        "tcp_user_timeout": str(max(1, int(request_timeout * 500))),
        "application_name": "rdzv-plugins",
    }
    for name in ("sslrootcert", "sslcert", "sslkey"):
        if own[name] is not None and given.get(name) not in (None, own[name]):
            raise ValueError(f"the endpoint's {name} and its option name two files: leave one out")
    if options.tls and "sslmode" not in given:
        own |= {"sslmode": "verify-full", "sslrootcert": options.ca_file or "system"}
    return {name: value for name, value in {**own, **given}.items() if value is not None}


def _refuse_half_encrypted(options: Options, given: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the options ask for TLS, but libpq may connect without it."""
    mode = given.get("sslmode") or os.environ.get("PGSSLMODE")
    if options.tls and given.get("sslmode", "require") not in _ENCRYPTS:
        raise ValueError(
            f"tls=true, but sslmode={mode} in the endpoint does without TLS: leave one of them out"
        )
    # A service file of libpq may set the mode.
    encrypted = options.tls or mode in _ENCRYPTS
    if encrypted or not ("service" in given or "PGSERVICE" in os.environ):
        # Its error names the option of an unusable file; libpq's does not.
        context_if(encrypted, options, "set tls=true, or sslmode=verify-full in the endpoint")


def _with_addresses(server: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
    """The parameters with the hosts' addresses, so that a hanging resolver costs only a moment.

    A host that cannot be resolved is left out; raises `psycopg.OperationalError` if none can be.
    """
    hosts = str(server.get("host") or "").split(",")
    ports = [it for it in str(server.get("port") or "").split(",") if it]
    if not all(hosts) or server.get("hostaddr") or len(ports) not in (0, 1, len(hosts)):
        return server
    places: list[tuple[str, str, str]] = []
    problem: Exception | None = None
    for at, host in enumerate(hosts):
        try:
            # A path is a socket of this host.
            found = [] if host.startswith(("/", "@")) else look_up(host, 0, seconds)
        except socket.gaierror as error:
            problem = psycopg.OperationalError(str(error))
            continue
        port = ports[at % len(ports)] if ports else ""
        places += ((host, it, port) for it in [str(it[4][0]) for it in found] or [""])
    if not places and problem is not None:
        raise problem
    named = zip(("host", "hostaddr", "port"), zip(*places, strict=True), strict=True)
    return {**server, **{name: ",".join(them) for name, them in named if any(them)}}
