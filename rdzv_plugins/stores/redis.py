"""Redis 6 and later, and Valkey.

A run is one hash, ``{<prefix>/<run id>}``, which only Lua scripts change.

Replication is asynchronous, so a fail-over (Sentinel, Cluster) may lose the last writes. The round
protocol survives that, as it survives a restart without data. Values up to 512 MB
(``proto-max-bulk-len``).

The user needs ``+@hash +@stream +@scripting +time +expire +pexpire +persist +del +hello`` on
``~{<prefix>/*``; for a database other than 0 also ``+select``, for a Cluster also
``+cluster|slots +command``.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import secrets
import select
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.resources import files
from typing import Any, ClassVar, NamedTuple

import hiredis
import msgspec
import redis
from redis import exceptions as errors
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from rdzv_plugins.kv import Capabilities, Entry, RendezvousStateError, Version
from rdzv_plugins.kv.base import (
    STAMP_BYTES,
    Limit,
    Problem,
    StoreClient,
    Stored,
    Wake,
    WokenError,
    find_problem,
    full,
    in_background,
    refused,
)
from rdzv_plugins.kv.findings import Finding, Mark, of_connection, of_space, of_version
from rdzv_plugins.settings.endpoint import parse_endpoint, redact
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import ServerOptions, given_or_in_file, option
from rdzv_plugins.stores._names import look_up
from rdzv_plugins.stores._tls import (
    context_if,
    is_of_tls,
    refuses_client,
    stays_refused,
    tls_problem,
    unheard_alert,
)

_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")

# Parameters of redis-py's URLs, and what to write here.
_ELSEWHERE = {
    "username": "write user=, or user@ in front of the host",
    "password": "set $RDZV_PLUGINS_PASSWORD",
    "socket_timeout": "write heartbeat_timeout=",
    "socket_connect_timeout": "write heartbeat_timeout=",
    "ssl_ca_certs": "write ca_file=",
    "ssl_certfile": "write cert_file=",
    "ssl_keyfile": "write key_file=",
    "ssl_cert_reqs": "certificates are always verified: ca_file names the authority to trust",
    "ssl_check_hostname": "certificates are always verified: ca_file names the authority to trust",
    "protocol": "this client speaks RESP2 with servers of any version",
}

# A parked read is renewed this often, in seconds, because a vanished server sends nothing.
_LONGEST_PARK = 30.0

# A wait checks this often, in seconds, whether a heartbeat has found another epoch of the hash.
_LONGEST_LOOK = 5.0

# The most bytes of an incomplete answer; a value may have 64 MiB.
_MOST_OF_AN_ANSWER = 1 << 28

# The most parked waits, each with a connection: a node waits for one key, sometimes for a second.
_MOST_PARKED = 2

# The most keys whose last id a client remembers.
_MOST_IDS = 1000

# MovedError is an AskError, MasterDownError a ClusterDownError.
_NOT_NOW_ERRORS = (
    errors.AskError,
    errors.BusyLoadingError,
    errors.ClusterDownError,
    errors.NoScriptError,
    errors.ReadOnlyError,
    errors.TryAgainError,
)
# Errors without a class in some versions of redis-py. Redis 6 reports an error in a script after
# "Error running script (...): @user_script: 5: -".
_NOT_NOW = re.compile(
    "(?:^|: -)(?:ASK|BUSY|CLUSTERDOWN|MASTERDOWN|MISCONF|MOVED|NOREPLICAS|READONLY|TRYAGAIN|"
    "UNBLOCKED) "
)
_REFUSALS = (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError)
_LOSSES = (errors.TimeoutError, errors.ConnectionError, errors.RedisClusterException, OSError)
_ERRORS = (errors.RedisError, errors.RedisClusterException, OSError)
_RIGHTS = "+@hash +@stream +@scripting +time +expire +pexpire +persist +del +hello"
# The key of the run holds another type of value: another program has written it.
_OTHERS_DATA = "WRONGTYPE"

# The text that Redis appends to an error in a script.
_SCRIPT = re.compile(r"\.? script: \w+, on @user_script.*")
_NO_PRIMARY = (
    "has no Sentinel that named a primary within {timeout:g} s ({said}); are they running, is "
    "sentinel=<name> the name in their configuration, and do they accept the password?"
)
# The meanings of errors, by a pattern of the class (or "not now") and the text; the first match
# counts.
_PROBLEMS = {
    # Redis 6 and 7.2 refuse a command inside a script with these words.
    "^NoPermissionError: |The user executing the script|ACL failure in script": Problem(
        "refused the credentials ({said}): the user lacks the rights that it needs; grant them: "
        "{grant}",
        undone=True,
        denied=True,
    ),
    # The answer of Redis 6.2 and later to a long command before the log-in.
    "^Auth(entication|orization)Error: |: Protocol error: unauthenticated ": Problem(
        "refused the credentials ({said}); set the user in the endpoint and the password in "
        "$RDZV_PLUGINS_PASSWORD; see rdzv docs stores for the rights it needs",
        undone=True,
        denied=True,
    ),
    "^_SentinelRefusalError: ": Problem(_NO_PRIMARY, retryable=True, denied=True),
    "^MasterNotFoundError: ": Problem(_NO_PRIMARY, retryable=True),
    # redis-py removes the code, OOM. A script that has written something is never refused.
    "used memory > 'maxmemory'": full("raise its maxmemory, or delete what nobody needs"),
    "max number of clients": Problem(
        "has no connection left for this node ({said}); raise its maxclients",
        retryable=True,
        undone=True,
    ),
    "^not now: ": Problem(
        "did not execute a request within {timeout:g} s ({name}: {said}); is it a primary that has "
        "loaded its data, does no script keep it busy, and do its replicas and its disk work? A "
        "Cluster needs cluster=true",
        retryable=True,
        undone=True,
    ),
}
_REFUSED_REQUESTS = {
    _OTHERS_DATA: Problem(
        "holds in the place of the run what another program writes again and again ({said}); set "
        "another prefix",
        retryable=True,
        undone=True,
    ),
    "unknown command": refused(
        "is it a Sentinel? It needs sentinel=<name>; else a proxy in between, or the server's "
        "rename-command, takes that command away"
    ),
    "": refused("the user needs: {grant}"),
}


def _script(name: str) -> str:
    return (files("rdzv_plugins.stores") / "redis_scripts" / f"{name}.lua").read_text("utf-8")


_NAMES = ("add", "clear", "compare_and_set", "delete", "expire", "list", "look", "put")
_SCRIPTS = {name: _script("prelude") + _script(name) for name in _NAMES}

DIGESTS = {
    name: hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    for name, script in _SCRIPTS.items()
}


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the redis backend, for endpoints ``host:port``, ``redis://``, ``rediss://``
    (TLS), ``unix://`` and several hosts for Sentinel or Cluster.
    """

    database: int = option(0, least=0)
    """database number; a number in the endpoint takes precedence"""
    sentinel: str | None = option(None)
    """name of the primary; the endpoint names Sentinels"""
    sentinel_user: str | None = option(None)
    """the Sentinels' own user"""
    sentinel_password: str | None = option(None, secret=True)
    """the Sentinels' own; set it in $RDZV_PLUGINS_SENTINEL_PASSWORD. Without it and sentinel_user,
    Sentinels are asked without a log-in, then with that of the servers"""
    sentinel_password_file: str | None = option(None)
    """file whose first line is that password"""
    sentinel_tls: bool | None = option(None)
    """whether the Sentinels speak TLS; default: as the servers do"""
    cluster: bool = option(False)
    """the endpoint names nodes of a Redis Cluster"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sentinel is None:
            for name in ("user", "password", "password_file", "tls"):
                if getattr(self, f"sentinel_{name}") is not None:
                    raise ValueError(f"option 'sentinel_{name}' needs sentinel=<name>")

    def current_sentinel_password(self) -> str | None:
        """The Sentinels' own password; see `current_password`."""
        given, path = self.sentinel_password, self.sentinel_password_file
        return given_or_in_file(given, "sentinel_password_file", path)


class Client(StoreClient):
    """One run on Redis.

    redis-py opens the connections, also for Sentinel, Cluster and TLS. This class keeps the idle
    connections: a read through redis-py's pool takes 0.04 instead of 0.02 ms, and redis-py 8's pool
    has at most 100 connections.
    """

    name = "redis"
    default_port = 6379
    tls_schemes = ("rediss", "valkeys")
    options = Options
    capabilities = Capabilities(
        push=True,
        linearizable=True,
        batch=True,
        ttl=True,
        max_value_bytes=512 * 1024 * 1024,
        atomic=range(1, 10_001),
    )
    heartbeat_ms = 0.2
    # Redis has no limit, but serves no other client while a script runs.
    batch = (10_000, 1 << 26)
    least_version: ClassVar[tuple[int, ...]] = (6,)

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        super().__init__(f"redis at {redact(endpoint) or 'localhost'}", request_timeout)
        self._hash = "{" + namespace + "}"
        target = self._target = _target(endpoint, options)
        self._grant = _grant(target, options)
        self._make, self._tls = _maker(target, options, request_timeout)
        self._cluster = options.cluster
        # Created with the first connection: a cluster client's constructor requests the slots.
        self._redis: Any = None
        self._doubtful = False
        self._idle: deque[Any] = deque()
        # By key: a wait that ended early for a heartbeat; the next wait takes its answer.
        self._parked: dict[str, _Parked] = {}
        # The epoch of the run's hash, as this client's last write found it.
        self._epoch: bytes | None = None
        # By key: the version that was read, and its id in the stream.
        self._ids: dict[str, tuple[str, bytes]] = {}
        self._failed_parks: set[str] = set()

        self._connect(lambda limit: self._read(["state"], limit))

    def hold(self, callers: int) -> None:
        def request(limit: Limit) -> None:
            # One more connection for a wait that its caller has given up: Redis answers it later.
            while len(self._idle) <= callers:
                self._open_and_keep()
                # At maxclients, Redis accepts a connection and refuses its first request.
                self._read(["state"], limit)

        self._call(request)

    def add(self, key: str, delta: int) -> int:
        # One script: most of hundreds of concurrent compare-and-sets would be refused.
        stamp = secrets.token_hex(STAMP_BYTES - 1)

        def request(limit: Limit) -> int:
            # Get an open connection first, because a failure to connect has certainly not counted.
            self._keep(self._take(limit, checked=True))
            try:
                total = self._run(limit, "add", [key], key, _tag(stamp), delta)
            except Exception as error:
                problem = self._meaning(error)
                if problem is None or problem.undone or problem.state:
                    raise
                raise self._uncounted(key) from error
            if total is None:
                raise RendezvousStateError(f"the value of '{key}' is not a counter")
            return int(total)

        return self._call(request)

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        names = [*keys]
        values = self._ask(limit, "HMGET", self._hash, *(f"={key}" for key in names))
        pairs = zip(names, values, strict=True)
        found = {key: _stored(data) for key, data in pairs if data is not None}
        if len(names) == 1:
            for key, stored in found.items():
                if stored.version:
                    self._remember(key, stored.version, stored.guard)
        return found

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        flat = self._run(limit, "list", [], prefix)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        read = {key.decode(errors="replace"): _stored(data) for key, data in pairs}
        # Skip fields that are not UTF-8: this package has not written them.
        return {key: stored for key, stored in read.items() if "\ufffd" not in key}

    def _set_if(
        self, key: str, data: bytes, expected: Version | None, limit: Limit
    ) -> Stored | None:
        # One script, because the base class would read first, in a second round trip.
        tag, value = _parted(data)
        # "-" is the tag of no write, and "" that of an absent key.
        if_tagged = "" if expected is None else _tag(expected) or "-"
        found = self._run(limit, "compare_and_set", [key], key, if_tagged, tag, value)
        if not isinstance(found, list):
            return _stored(found) if found is not None else None
        written = Stored.parse(data, found[0])
        self._remember(key, written.version, written.guard)
        return written

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        raise NotImplementedError("_set_if and add are scripts")

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        triples: list[Any] = []
        for key, data in values.items():
            triples += [key, *_parted(data)]
        self._epoch = self._run(limit, "put", [*values], *triples)

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        names = [*keys]
        self._run(limit, "delete", names, *names)

    def _expire(self, seconds: float, limit: Limit) -> None:
        # The script deletes the run at once for 0 ms, so that the next write is not lost.
        self._run(limit, "expire", [], max(0, int(seconds * 1000)), self._stream(""))

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        # `_look` may send nothing, because `_park` also looks, in its own round trip.
        if timeout <= 0 and not self._closed:
            entry = self.get(key)
            return entry if entry is not None and entry.version != version else None
        return super().wait(key, version, timeout)

    def _look(self, key: str, version: Version | None, limit: Limit) -> Stored | None:
        if key in self._failed_parks:
            # Raises the error of the last park, if its cause persists.
            self._run(limit, "look", [key], key, "")
            self._failed_parks.discard(key)
        known = self._ids.get(key)
        if version is None:
            return None
        if known is not None and known[0] == version:
            return Stored(b"", known[0], known[1])
        return super()._look(key, version, limit)

    def _park(self, key: str, seen: Stored | None, limit: Limit) -> Stored | None:
        after = seen.guard if seen is not None else b"0-0"
        try:
            parked = self._parked.pop(key, None)
            if parked is None or not self._goes_on(parked, after):
                parked = self._begin_to_park(key, after, limit)
            answer = self._await_change(key, parked, limit)
        except errors.NoScriptError:
            self._run(limit, "look", [key], key, after)
            return None
        except _EarlierError:
            # The server lost its data: it does not know the version.
            self._ids.pop(key, None)
            return self._read([key], limit).get(key)
        except (errors.RedisError, errors.RedisClusterException, OSError):
            # Not for a woken wait, after which the next look would send a needless request.
            self._failed_parks.add(key)
            raise
        for _, entries in answer:
            number, (field, value, *_) = entries[-1]
            if field == b"v":
                found = _stored(number + b" " + value)
                self._remember(key, found.version, found.guard)
                return found
            # The key was deleted.
            self._ids.pop(key, None)
        return None

    def _begin_to_park(
        self, key: str, after: bytes, limit: Limit, most: float = math.inf
    ) -> _Parked:
        """Send a request that is answered once the key's id is later than ``after``, or in the end.

        ``most``: the longest time in seconds, for a benchmark with one connection for each node.
        """
        seconds = min(most, _LONGEST_PARK)
        # BLOCK 0 would block forever.
        stream, block = self._stream(key), max(1, math.ceil(seconds * 1000))
        park = _packed(("XREAD", "BLOCK", block, "STREAMS", stream, after))
        line, epoch = self._take(limit), self._epoch
        try:
            # The look script puts a newer value into the stream, where XREAD finds it: one round
            # trip.
            look = ("EVALSHA", DIGESTS["look"], 2, self._hash, stream, key, after)
            line.send_packed_command([_packed(look) + park], check_health=False)
        except BaseException as error:
            self._failed(line, error, late=True)
            raise
        return _Parked(line, after, epoch, time.monotonic() + seconds + self.timeout)

    def _goes_on(self, parked: _Parked, after: bytes) -> bool:
        """Whether a new wait may use a parked request; False: its connection is idle or closed."""
        line = parked.line
        try:
            while line.can_read(timeout=0):
                # The answer is older than this wait, and may miss the last change.
                looked, parked.looked = parked.looked, True
                answer = line.read_response()
                if looked:
                    self._keep(line)
                    return False
                _refuse_earlier(parked.after, answer)
        except BaseException as error:
            self._failed(line, error, late=True)
            raise
        if (parked.after, parked.epoch) == (after, self._epoch):
            return True
        line.disconnect()
        return False

    def _await_change(self, key: str, parked: _Parked, limit: Limit) -> list[Any]:
        """The server's answer; empty: no change yet; another wait may use the request."""
        line = parked.line
        try:
            if not parked.looked:
                self._await_answer(line, limit.wake)
                parked.looked = True
                _refuse_earlier(parked.after, line.read_response())
            # This reply may have come with the reply before it.
            ready = line.can_read(timeout=0)
            while not ready:
                now = time.monotonic()
                if now >= parked.until:
                    raise errors.TimeoutError("no answer in time")
                until = min(limit.deadline, parked.until, now + _LONGEST_LOOK)
                if _has_answer(line, limit.wake, until - now):
                    # Under TLS the received bytes may hold no part of the answer.
                    ready = self._tls is None or line.can_read(timeout=0)
                elif time.monotonic() >= limit.deadline:
                    self._keep_parked(key, parked)
                    return []
                elif parked.epoch != self._epoch:
                    line.disconnect()
                    return []
            answer = line.read_response()
        except (WokenError, errors.NoScriptError):
            # The request's second answer is still to come.
            self._keep_parked(key, parked)
            raise
        except BaseException as error:
            self._failed(line, error, late=True)
            raise
        self._keep(line)
        return answer or []

    def _remember(self, key: str, version: str, number: bytes) -> None:
        if len(self._ids) > _MOST_IDS:
            self._ids.clear()
        self._ids[key] = version, number

    def _disconnect(self) -> None:
        self._drop_idle()
        if self._redis is not None:
            with contextlib.suppress(errors.RedisError, OSError):
                self._redis.close()

    def _problem(self, error: Exception) -> Problem | None:
        text, name = str(error), type(error).__name__
        if is_of_tls(text) and not isinstance(error, _REFUSALS):
            # redis-py wraps a failed handshake in a ConnectionError.
            return replace(tls_problem(text), retryable=not stays_refused(text))
        if isinstance(error, errors.InvalidResponse):
            return self._odd(error)
        kind = "not now" if _not_now(error) else name
        lost = isinstance(error, _LOSSES)
        said = _SCRIPT.sub("", text)
        problem = find_problem(
            _PROBLEMS | ({} if lost else _REFUSED_REQUESTS), f"{kind}: {text}", said=said,
            timeout=self.timeout, name=name, grant=self._grant,
        )  # fmt: skip
        if problem is not None and isinstance(error, _ERRORS):
            return problem
        if not lost:
            return None
        hung_up = re.search("closed by server|reset by peer", text) and self._tls is None
        # redis-py's Sentinel connection closes itself if a former primary refuses a write.
        undone = _not_now(error.__context__)
        hint = ", does it want rediss://, and is its protected-mode off" if hung_up else ""
        return self._unreachable(error, undone=undone, hint=hint)

    def inspect(self) -> Iterable[Finding]:
        info, why = self._learn(self._info)
        hosts = [host for host, _ in self._target.hosts]
        yield of_connection(self._tls is not None, self._target.log_in is not None, hosts)
        if info is None:
            for what in ("version", "role", "eviction", "space", "persistence"):
                found = f"not known: INFO gave no answer ({why})"
                yield Finding(Mark.UNKNOWN, what, found, "`ACL SETUSER <user> +info` allows it")
            return
        if "valkey_version" in info:
            yield of_version("valkey", info["valkey_version"], ())
        else:
            yield of_version("redis", info.get("redis_version", ""), self.least_version)
        yield self._role(info)
        yield _eviction(info)
        yield _space(info)
        yield self._persistence(info)

    def _info(self, limit: Limit) -> dict[str, str]:
        lines = self._ask(limit, "INFO").decode(errors="replace").splitlines()
        pairs = (line.partition(":") for line in lines if ":" in line)
        return {name: value for name, _, value in pairs}

    def _role(self, info: Mapping[str, str]) -> Finding:
        values = {"role": info.get("role"), "replicas": info.get("connected_slaves")}
        if info.get("cluster_enabled") == "1" and not self._cluster:
            found = "a member of a Cluster, which holds a part of the keys only"
            return Finding(Mark.FAILED, "role", found, "set cluster=true", values)
        if info.get("role") == "slave":
            primary = f"{info.get('master_host')}:{info.get('master_port')}"
            advice = f"name the primary ({primary}), or the Sentinels with sentinel=<name>"
            found = f"a replica of {primary}, which accepts no writes"
            return Finding(Mark.FAILED, "role", found, advice, values)
        found = f"primary; replicas: {values['replicas'] or 0}"
        return Finding(Mark.OK, "role", found, values=values)

    def _persistence(self, info: Mapping[str, str]) -> Finding:
        if info.get("aof_enabled") == "1":
            return Finding(Mark.OK, "persistence", "append-only file", values={"aof": True})
        answer, why = self._learn(lambda limit: self._ask(limit, "CONFIG", "GET", "save"))
        if answer is None:
            found = f"no append-only file; snapshots are not known: CONFIG GET gave none ({why})"
            return Finding(Mark.UNKNOWN, "persistence", found)
        if len(answer) > 1 and answer[1]:
            found = f"snapshots (save {answer[1].decode()})"
            return Finding(Mark.OK, "persistence", found, values={"aof": False})
        found = "none: a restart of the server loses the run until its nodes write it again"
        advice = "appendonly yes keeps it"
        return Finding(Mark.WARNING, "persistence", found, advice, {"aof": False})

    def _stream(self, key: str) -> str:
        return f"{self._hash}:watch:{key}"

    def _run(self, limit: Limit, name: str, keys: Sequence[str], *args: Any) -> Any:
        """Run a script; returns its result."""
        rest = (1 + len(keys), self._hash, *map(self._stream, keys), *args)
        try:
            return self._ask(limit, "EVALSHA", DIGESTS[name], *rest)
        except errors.NoScriptError:
            # The server has never seen the script, or has restarted since.
            return self._ask(limit, "EVAL", _SCRIPTS[name], *rest)

    def _ask(self, limit: Limit, *command: Any) -> Any:
        """The answer to a command."""
        line = self._take(limit)
        try:
            line.send_packed_command([_packed(command)], check_health=False)
            if limit.wake is not None:
                self._await_answer(line, limit.wake)
            answer = line.read_response()
        except BaseException as error:
            self._failed(line, error)
            if _OTHERS_DATA in str(error):
                # Treat an overwritten run as a deleted run: the next attempt finds no run.
                self._ask(limit, "EVAL", _SCRIPTS["clear"], 1, self._hash)
            raise
        self._keep(line)
        return answer

    def _failed(self, line: Any, error: BaseException, late: bool = False) -> None:
        """Close a connection whose request failed; ``late``: another answer may still come."""
        unknown = isinstance(error, errors.NoScriptError)
        refused = isinstance(error, errors.ResponseError) and not _not_now(error)
        if (unknown or refused) and not late:
            self._keep(line)
            return
        # Otherwise the next request would read a late answer as its own.
        line.disconnect()
        if not (refused or isinstance(error, WokenError | _EarlierError)):
            # Idle connections go to the same server, which failed or may never be primary again.
            self._drop_idle()
            self._doubtful = True

    def _await_answer(self, line: Any, wake: Wake | None) -> None:
        # Wait for the socket's time-out, not for the rest of the limit: "no answer" after a short
        # rest would hide the errors that the server answered before.
        if not _has_answer(line, wake, self.timeout):
            raise TimeoutError("no answer in time")

    def _take(self, limit: Limit, checked: bool = False) -> Any:
        """A connection for one request; if ``checked``, it is still open at the server."""
        while True:
            try:
                line = self._idle.pop()
            except IndexError:
                if limit.wake is None:
                    return self._open()
                # Connecting cannot be cancelled: a woken wait abandons it.
                limit.await_result(in_background("rdzv-redis-connect", self._open_and_keep))
                continue
            if not checked:
                return line
            with contextlib.suppress(errors.RedisError, OSError):
                # An idle connection is readable only if the server has closed it.
                if not line.can_read(timeout=0):
                    return line
            line.disconnect()

    def _open_and_keep(self) -> None:
        self._keep(self._open())

    def _open(self) -> Any:
        """A new connection."""
        pool = self._pool()
        # A cluster client's connections would only have the time-out of a slot look-up.
        patience = {"socket_timeout": self.timeout, "socket_connect_timeout": self.timeout}
        kind = _NAMED.get(pool.connection_class, pool.connection_class)
        line = kind(**_bounded({**pool.connection_kwargs, **patience}))
        try:
            line.connect()
        except BaseException as error:
            line.disconnect()
            self._doubtful = True
            if self._tls and isinstance(error, errors.ConnectionError):
                # Raises an error that names an unreadable file; redis-py's error does not.
                context = self._tls.get()
                alert = unheard_alert(line.host, int(line.port), context) if line.host else None
                if alert is not None:
                    raise alert from None
            raise
        return line

    def _keep(self, line: Any) -> None:
        self._idle.append(line)
        if self._closed:
            self._drop_idle()

    def _keep_parked(self, key: str, parked: _Parked) -> None:
        if key in self._parked or len(self._parked) >= _MOST_PARKED:
            self._drop_parked()
        self._parked[key] = parked
        if self._closed:
            self._drop_parked()

    def _drop_idle(self) -> None:
        self._drop_parked()
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().disconnect()

    def _drop_parked(self) -> None:
        with contextlib.suppress(KeyError):
            while True:
                self._parked.popitem()[1].line.disconnect()

    def _pool(self) -> Any:
        """redis-py's pool for the server that holds the run now."""
        try:
            if self._redis is None:
                self._redis = self._make()
            client: Any = self._redis
            if isinstance(client, redis.RedisCluster):
                cluster: Any = client
                if self._doubtful:
                    # The primary may be dead: the other nodes know which node has its slots now.
                    try:
                        cluster.nodes_manager.initialize()
                    except errors.RedisClusterException:
                        # All nodes may have new addresses: connect to the endpoint again.
                        self._redis = None
                        cluster.close()
                        self._redis = cluster = self._make()
                    self._doubtful = False
                client = cluster.get_redis_connection(cluster.get_node_from_key(self._hash))
        except errors.RedisClusterException as error:
            # redis-py wraps the cause, such as a wrong password, and wraps a missing right twice.
            cause = error.__cause__ or error
            inner = cause.__context__
            raise (inner if isinstance(inner, errors.ResponseError) else cause) from None
        return client.connection_pool


class _Named(redis.Connection):
    """redis-py's connection, but a resolver that does not answer costs only a moment, and each
    address has an equal share of the time.
    """

    def _connect(self) -> Any:
        name, seconds = self.host, self.socket_connect_timeout or 0.0
        limit, problem = Limit(time.monotonic() + seconds), OSError("the host has no address")
        try:
            found = look_up(name, self.port, seconds)
            for number, (*_, address) in enumerate(found):
                # redis-py then looks up an address instead of a name.
                self.host = address[0]
                self.socket_connect_timeout = limit.seconds / (len(found) - number)
                try:
                    connect: Callable[[], Any] = super()._connect
                    return connect()
                except OSError as error:
                    problem = error
        finally:
            self.host, self.socket_connect_timeout = name, seconds
        raise problem


class _NamedTLS(redis.SSLConnection, _Named):
    """`_Named` with TLS; the handshake still has the name."""


_NAMED: dict[type, type] = {redis.Connection: _Named, redis.SSLConnection: _NamedTLS}
"""By redis-py's class. Sentinels give a primary's address, so its class is not replaced."""


@cache
def _bounded_parser(parser: Any) -> type:
    """A subclass of redis-py's parser that limits an answer's time and size."""

    class Bounded(parser):  # type: ignore[misc]
        def read_response(self, *args: Any, **options: Any) -> Any:
            # Limits when a read may begin; the last read has the socket's time-out too.
            self._until = time.monotonic() + (self._socket_timeout or math.inf)
            return super().read_response(*args, **options)

        def read_from_socket(self, *args: Any, **options: Any) -> Any:
            # redis-py 5 to 7 also read here to see whether there is an answer.
            awaited = options.get("raise_on_timeout", True)
            if awaited and time.monotonic() >= self._until:
                raise errors.TimeoutError("no answer in time")
            if self._reader is not None and self._reader.len() > _MOST_OF_AN_ANSWER:
                raise ValueError(f"its answer has more than {_MOST_OF_AN_ANSWER >> 20} MiB")
            return super().read_from_socket(*args, **options)

    return Bounded


def _bounded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a connection, with a bounded parser."""
    parser = _bounded_parser(settings.get("parser_class", DefaultParser))
    return {**settings, "parser_class": parser}


class _Parked(msgspec.Struct):
    """A request that waits for a key to change.

    Attributes:
        line: its connection, which nothing else uses until the answer has come.
        after: the id of the key that the client knows.
        epoch: the epoch of the run's hash when the wait began; a new hash does not end the wait.
        until: when the server answers at the latest, on the monotonic clock.
        looked: whether the answer to the preceding look has come.
    """

    line: Any
    after: bytes
    epoch: bytes | None
    until: float
    looked: bool = False


def _packed(command: tuple[Any, ...]) -> bytes:
    # redis-py's own packer handles each argument in Python: 1.4 us per request instead of 0.4.
    packed: bytes = hiredis.pack_command(command)
    return packed


class _EarlierError(Exception):
    """A key has an earlier id than a waiter knows: the server lost its data."""


def _has_answer(line: Any, wake: Wake | None, seconds: float) -> bool:
    """Whether there is something to read within ``seconds``; raises `WokenError`."""
    assert wake is not None  # Only waits ask.
    came = wake.poll(seconds, line._sock.fileno(), select.POLLIN)
    if wake.rung or wake.fd in came:
        raise WokenError
    return bool(came)


def _refuse_earlier(known: bytes, found: bytes) -> None:
    if found == known:
        return
    number, _, tag = found.partition(b"-")
    known_number, _, known_tag = known.partition(b"-")
    if number and (int(number), int(tag)) < (int(known_number), int(known_tag)):
        raise _EarlierError


# The scripts' `prelude` reads values in the same form.
_STORED = re.compile(rb"(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19}) ")


def _parted(data: bytes) -> tuple[int, bytes]:
    """The tag and the value in ``data``."""
    return int.from_bytes(data[: STAMP_BYTES - 1], "big"), data[STAMP_BYTES:]


def _stored(data: bytes) -> Stored:
    found = _STORED.match(data)
    if found is None:
        # Another program's value counts as absent, for the scripts too.
        return Stored(data, "", b"0-0")
    version = f"{int(found[2]):016x}"
    if len(version) > 16 or (len(found[1]) == 20 and int(found[1]) >> 64):
        return Stored(data, "", b"0-0")
    return Stored(data[found.end() :], version, data[: found.end() - 1])


def _tag(version: Version | None) -> str:
    """A version as the decimal tag of the scripts; "" for anything else."""
    known = isinstance(version, str) and re.fullmatch("[0-9a-f]{16}", version)
    return str(int(known[0], 16)) if known else ""


def _not_now(error: object) -> bool:
    """Whether the server refused the request, changed nothing, and may accept it later.

    The server is starting, is not the primary, lacks replicas or its disk, or another server has
    the slot.
    """
    return isinstance(error, _NOT_NOW_ERRORS) or (
        isinstance(error, errors.ResponseError) and _NOT_NOW.search(str(error)) is not None
    )


def _eviction(info: Mapping[str, str]) -> Finding:
    policy, limit = info.get("maxmemory_policy", ""), int(info.get("maxmemory", "0"))
    values = {"policy": policy, "maxmemory_bytes": limit}
    if policy in ("noeviction", ""):
        return Finding(Mark.OK, "eviction", policy or "not reported", values=values)
    when = f"at maxmemory ({limit:,} bytes)" if limit else "once maxmemory is set"
    found = f"the policy is {policy}: the server deletes keys {when}, those of a live run too"
    advice = "CONFIG SET maxmemory-policy noeviction"
    return Finding(Mark.WARNING, "eviction", found, advice, values)


class _SentinelRefusalError(MasterNotFoundError):
    """No Sentinel named a primary, and one of them refused this client."""


class _Sentinels(redis.Sentinel):
    """A client for each Sentinel and log-in; the client that answered last is asked first."""

    check_master_state: Any

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """The primary's address; raises MasterNotFoundError."""
        # redis-py's method treats a refusal like silence, and its error shows the settings.
        ways = Counter(map(_place, self.sentinels))
        refusals: Counter[str] = Counter()
        failures: dict[str, str] = {}
        answers: dict[str, str] = {}
        client: Any
        for at, client in enumerate(self.sentinels):
            place = _place(client)
            try:
                state = client.sentinel_masters().get(service_name)
            except (errors.ConnectionError, errors.TimeoutError, errors.NoPermissionError) as error:
                refused = isinstance(error, _REFUSALS) or refuses_client(str(error))
                refusals[place] += refused
                failures[place] = str(error)
                continue
            if state and self.check_master_state(state, service_name):
                self.sentinels[0], self.sentinels[at] = client, self.sentinels[0]
                return state["ip"], state["port"]
            answers[place] = f"knows no '{service_name}' that is up"
        failure = MasterNotFoundError
        if any(refusals[place] == number for place, number in ways.items()):
            failure = _SentinelRefusalError
        # The answer to an accepted log-in says more than another log-in's refusal.
        told = failures | answers
        said = ", ".join(f"{place}: {answer}" for place, answer in told.items())
        raise failure(said)


def _place(client: Any) -> str:
    settings = client.connection_pool.connection_kwargs
    return f"{settings['host']}:{settings['port']}"


class _LogIn(redis.CredentialProvider):
    """Gives redis-py the credentials of each connection: a password file may have changed."""

    def __init__(self, user: str | None, secret: Callable[[], str | None]) -> None:
        self._user = user
        self._secret = secret

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._secret() or ""
        return (self._user, password) if self._user else (password,)


def _log_in(user: str | None, secret: Callable[[], str | None]) -> _LogIn | None:
    """The log-in; None: there is neither a user nor a password."""
    return _LogIn(user, secret) if user is not None or secret() is not None else None


def _space(info: Mapping[str, str]) -> Finding:
    most = int(info.get("maxmemory", "0"))
    # Like the server, leave out the buffers of replicas and of the append-only file.
    used = int(info.get("used_memory", "0")) - int(info.get("mem_not_counted_for_evict", "0"))
    if info.get("maxmemory_policy", "noeviction") != "noeviction":
        most = 0  # The server evicts keys to make room.
    return of_space(used, most, "raise maxmemory, or delete what nobody needs")


class _Target(NamedTuple):
    """The servers that endpoint and options name: ``path`` of a socket of this host, or hosts."""

    path: str | None
    hosts: Sequence[tuple[str, int]]
    user: str | None
    log_in: _LogIn | None
    database: int
    tls: bool


def _target(endpoint: str, options: Options) -> _Target:
    """The servers of the endpoint; raises `ValueError` for a bad endpoint."""
    found = parse_endpoint(endpoint, default_port=6379, schemes=_SCHEMES)
    on_socket = found.scheme == "unix"
    if on_socket and (found.hosts or not found.path.strip("/")):
        raise ValueError("a unix:// endpoint needs an absolute path: unix:///run/redis.sock")
    found.refuse_all_but(path=True, parameters=["db"], instead=_ELSEWHERE)
    named = {found.query.get("db", ""), "" if on_socket else found.path.strip("/")} - {""}
    if len(named) > 1:
        raise ValueError("the endpoint names two databases, in its path and with db=")
    for text in named:
        if not text.isdecimal():
            raise ValueError(f"the database '{redact(text)}' in the endpoint is not a number")
    database = int(named.pop()) if named else options.database
    if options.sentinel and options.cluster:
        raise ValueError("sentinel= and cluster=true are two ways to find a primary: set one")
    if options.cluster and database:
        raise ValueError(
            f"a Redis Cluster has the database 0 only: leave out {database}, and tell jobs apart "
            "with prefix="
        )
    tls = options.tls or found.scheme in ("rediss", "valkeys")
    if on_socket:
        for name in ("tls", "sentinel", "cluster"):
            if getattr(options, name):
                raise ValueError(f"option '{name}' is not for a unix:// endpoint: leave it out")
    user, password = found.user or options.user, found.password
    log_in = _log_in(user, (lambda: password) if password is not None else options.current_password)
    path = found.path if on_socket else None
    return _Target(path, found.hosts, user, log_in, database, tls)


def _grant(target: _Target, options: Options) -> str:
    """The command that gives the user its rights, for redis-cli."""
    rights = _RIGHTS
    if target.database:
        rights += " +select"
    if options.cluster:
        rights += " +cluster|slots +command"
    return f"ACL SETUSER {target.user or 'default'} ~{{{options.prefix}/* {rights}"


def _maker(
    target: _Target, options: Options, timeout: float
) -> tuple[Callable[[], Any], FromFiles[ssl.SSLContext] | None]:
    """A maker of redis-py clients that do not retry (the base class does), and the TLS contexts.

    Raises `ValueError` for a bad option.
    """
    common: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "credential_provider": target.log_in,
        "protocol": 2,
    }
    encrypted = target.tls or bool(options.sentinel_tls)
    contexts = context_if(encrypted, options, "set tls=true, or write rediss:// in the endpoint")
    tls = contexts if target.tls else None
    if target.path is not None:
        db = target.database
        return partial(redis.Redis, unix_socket_path=target.path, db=db, **common), None
    common["socket_keepalive"] = True
    untyped: Any = redis
    served = common | _encryption(target.tls, options)
    if options.cluster:
        nodes = [untyped.cluster.ClusterNode(host, port) for host, port in target.hosts]
        served |= _share(timeout, len(nodes))
        return partial(redis.RedisCluster, startup_nodes=nodes, **served), tls
    if options.sentinel:
        make: Any = _Sentinels
        sentinels = make([], **served)
        sentinels.sentinels = _clients_of_sentinels(target, options, common, timeout)
        return partial(sentinels.master_for, options.sentinel, db=target.database), tls
    if len(target.hosts) > 1:
        raise ValueError("several hosts need --rdzv-conf sentinel=<name> or cluster=true")
    host, port = target.hosts[0]
    return partial(redis.Redis, host=host, port=port, db=target.database, **served), tls


def _clients_of_sentinels(
    target: _Target, options: Options, common: Mapping[str, Any], timeout: float
) -> list[Any]:
    own = _log_in(options.sentinel_user, options.current_sentinel_password)
    ways: list[_LogIn | None] = [own]
    if own is None and target.log_in is not None:
        # Sentinels often have no password although their servers do, and then refuse one.
        ways.append(target.log_in)
    encrypted = target.tls if options.sentinel_tls is None else options.sentinel_tls
    settings = {**common, **_encryption(encrypted, options)}
    settings |= _share(timeout, len(target.hosts) * len(ways))
    clients = [
        redis.Redis(host, port, **{**settings, "credential_provider": log_in})
        for log_in in ways
        for host, port in target.hosts
    ]
    for client in clients:
        pool: Any = client.connection_pool
        pool.connection_class = _NAMED[pool.connection_class]
        pool.connection_kwargs = _bounded(pool.connection_kwargs)
    return clients


def _encryption(wanted: bool, options: Options) -> dict[str, Any]:
    """redis-py's settings of TLS; it reads the files for each connection."""
    if not wanted:
        return {}
    return {
        "ssl": True,
        # This is the default only since redis-py 6.
        "ssl_check_hostname": True,
        "ssl_ca_certs": options.ca_file,
        "ssl_certfile": options.cert_file,
        "ssl_keyfile": options.key_file,
    }


def _share(timeout: float, hosts: int) -> dict[str, float]:
    """Socket time-outs that leave time for every host in turn, and then for the primary."""
    share = timeout / (hosts + 1)
    return {"socket_timeout": share, "socket_connect_timeout": share}
