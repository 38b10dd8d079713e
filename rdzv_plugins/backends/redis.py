"""Redis 6 and later, and Valkey.

A run is one hash, ``{<prefix>/<run id>}``, changed by Lua scripts only: each write takes the next
number of the run's counter. A key that somebody waits for is written to a stream of one entry as
well, under the same number, so that ``XREAD BLOCK`` resumes exactly where a read left off. The
braces are a hash tag: in a Cluster everything of a run lives in one slot.

Limits: linearizable on one primary; replication is asynchronous, so a fail-over (Sentinel, Cluster)
may lose the last writes, which the round protocol survives as it survives a restart with an empty
memory. Values up to 512 MB (``proto-max-bulk-len``), so the number of nodes is not limited by size.
The user needs ``+@hash +@stream +@scripting +time +expire +del +hello`` on ``~{<prefix>/*``.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
    TryAgainError,
)
from redis.retry import Retry

from rdzv_plugins.config import ServerOptions, option, parse_endpoint, redact
from rdzv_plugins.kv import (
    Capabilities,
    Entry,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
)
from rdzv_plugins.retry import retry

__all__ = ["Client", "Options"]

T = TypeVar("T")

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")

# A parked read is renewed this often: it finds a stream that was dropped (FLUSHALL) under it.
_LONGEST_PARK = 5.0


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the redis backend, for endpoints ``host:port``, ``redis://``, ``rediss://``
    (TLS), ``unix://`` and several hosts for Sentinel or Cluster.

    ======================= ======= ===============================================================
    option                  default meaning
    ======================= ======= ===============================================================
    database                0       database number; one in the endpoint's path comes first
    sentinel                none    name of the primary; the endpoint's hosts are Sentinels then
    cluster                 false   the endpoint's hosts are nodes of a Redis Cluster
    ======================= ======= ===============================================================
    """

    database: int = option(0, least=0)
    sentinel: str | None = option(None)
    cluster: bool = option(False)


# KEYS[1] is the run's hash, KEYS[1 + i] the stream of the i-th key. Fields of the hash: "#n" the
# counter, "#e" a nonce, "=<key>" a version, a space and the value, "!<key>" somebody waits for it.
# The counter starts at the server's time in microseconds, the nonce is random: a version of a
# server that lost its memory is not handed out again.
_PRELUDE = """
local hash, nonce = KEYS[1], ARGV[1]
local function next_version()
  if redis.call('HSETNX', hash, '#e', nonce) == 1 then
    local now = redis.call('TIME')
    redis.call('HSET', hash, '#n', string.format('%.0f', now[1] * 1000000 + now[2]))
  end
  local number = redis.call('HINCRBY', hash, '#n', 1)
  return string.format('%.0f', number) .. '-' .. redis.call('HGET', hash, '#e')
end
local function publish(stream, version, field, value)
  local sent = redis.pcall('XADD', stream, 'MAXLEN', '1', version, field, value)
  if type(sent) == 'table' and sent.err then
    -- The stream outlived its run, or the server's clock went back: begin it anew.
    redis.call('DEL', stream)
    redis.call('XADD', stream, 'MAXLEN', '1', version, field, value)
  end
end
local function write(key, stream, value)
  local version = next_version()
  redis.call('HSET', hash, '=' .. key, version .. ' ' .. value)
  if redis.call('HEXISTS', hash, '!' .. key) == 1 then
    publish(stream, version, 'v', value)
  end
  return version
end
local function read(key)
  local stored = redis.call('HGET', hash, '=' .. key)
  if not stored then return '', nil end
  local space = string.find(stored, ' ', 1, true)
  return string.sub(stored, 1, space - 1), string.sub(stored, space + 1)
end
"""

_SCRIPTS = {
    "compare_and_set": """
local key, expected, value = ARGV[2], ARGV[3], ARGV[4]
local version, current = read(key)
if version ~= expected then return {0, version, current} end
return {1, write(key, KEYS[2], value)}
""",
    "put": """
local version
for i = 2, #KEYS do version = write(ARGV[2 * i - 2], KEYS[i], ARGV[2 * i - 1]) end
return version
""",
    "add": """
local _, current = read(ARGV[2])
local total = tonumber(current or '0')
if not total then return redis.error_reply('NOTANUMBER') end
local sum = string.format('%.0f', total + tonumber(ARGV[3]))
write(ARGV[2], KEYS[2], sum)
return sum
""",
    "delete": """
for i = 2, #KEYS do
  local key = ARGV[i]
  redis.call('HDEL', hash, '=' .. key)
  if redis.call('HDEL', hash, '!' .. key) == 1 then
    -- Wake the waiters, so that they say again that they wait.
    publish(KEYS[i], next_version(), 'd', '')
    redis.call('EXPIRE', KEYS[i], 60)
  end
end
""",
    "list": """
local prefix, fields, found = '=' .. ARGV[2], redis.call('HGETALL', hash), {}
local length = #prefix
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, length) == prefix then
    found[#found + 1] = string.sub(fields[i], 2)
    found[#found + 1] = fields[i + 1]
  end
end
return found
""",
    "wait": """
local key, known = ARGV[2], ARGV[3]
redis.call('HSET', hash, '!' .. key, '1')
redis.call('PERSIST', KEYS[2])
local version, current = read(key)
if current and version ~= known then
  local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
  if #last == 0 or last[1][1] ~= version then publish(KEYS[2], version, 'v', current) end
  return 1
end
return 0
""",
    "expire": """
for _, field in ipairs(redis.call('HKEYS', hash)) do
  if string.sub(field, 1, 1) == '!' then
    redis.call('PEXPIRE', ARGV[3] .. string.sub(field, 2), ARGV[2])
  end
end
redis.call('PEXPIRE', hash, ARGV[2])
""",
}


class Client(KeyValueClient):
    """One run on Redis: a pool of connections for requests and one connection a parked waiter."""

    name = "redis"
    capabilities = Capabilities(
        push=True, linearizable=True, batch=True, ttl=True, max_value_bytes=512 * 1024 * 1024
    )

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        self._shown = redact(endpoint) or "localhost"
        self._timeout = request_timeout
        self._hash = "{" + namespace + "}"
        self._wake = f"{self._hash}:wake:{secrets.token_hex(8)}"
        self._last_wake = "0-0"
        self._nonce = str(secrets.randbits(32))
        self._parked = 0
        self._lock = threading.Lock()
        self._closed = False
        self._redis = _connect(endpoint, options, request_timeout)
        self._waiting = _connect(endpoint, options, _LONGEST_PARK + request_timeout)
        self._scripts = {
            name: self._redis.register_script(_PRELUDE + body) for name, body in _SCRIPTS.items()
        }
        try:
            self._call(lambda: self._redis.ping())
        except BaseException:
            self.close()
            raise

    def get(self, key: str) -> Entry | None:
        stored = self._call(lambda: self._redis.hget(self._hash, f"={key}"))
        return _entry(cast("bytes | None", stored))

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        self.check_size(key, value)
        if expected is not None and not (isinstance(expected, str) and expected):
            return self.get(key), False
        attempts = 0

        def request() -> tuple[Entry | None, bool]:
            nonlocal attempts
            attempts += 1
            written, version, *current = self._run("compare_and_set", [key], expected or "", value)
            if written:
                return Entry(value, version.decode()), True
            entry = Entry(current[0], version.decode()) if current else None
            # An earlier attempt whose answer was lost may be what stands there now.
            return entry, attempts > 1 and entry is not None and entry.value == value

        return self._call(request)

    def put(self, key: str, value: bytes) -> Version:
        self.check_size(key, value)
        version = self._call(lambda: self._run("put", [key], value))
        return cast(bytes, version).decode()

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def list(self, prefix: str) -> dict[str, Entry]:
        flat = self._call(lambda: self._run("list", [], prefix))
        entries = (
            (key.decode(), _entry(stored))
            for key, stored in zip(flat[::2], flat[1::2], strict=True)
        )
        return {key: entry for key, entry in entries if entry is not None}

    def add(self, key: str, delta: int) -> int:
        return int(self._call(lambda: self._run("add", [key], delta), timeout=0))

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        deadline = time.monotonic() + timeout
        known = version if isinstance(version, str) else ""
        after, wake = known or "0-0", self._last_wake
        with self._lock:
            self._parked += 1
        try:
            while not self._closed and (remaining := deadline - time.monotonic()) > 0:
                park = max(1, int(min(remaining, _LONGEST_PARK) * 1000))
                parked = partial(self._park, key, known, after, wake, park)
                seen = self._call(parked, unless_closed=True)
                for stream, entries in seen or ():
                    if stream.decode() == self._wake:
                        return None
                    number, fields = entries[-1]
                    if b"v" in fields:
                        return Entry(fields[b"v"], number.decode())
                    known, after = "", number.decode()
        finally:
            with self._lock:
                self._parked -= 1
        return None

    def interrupt(self) -> None:
        with self._lock:
            if not self._parked:
                return
        with contextlib.suppress(RendezvousConnectionError):
            last = self._call(lambda: self._redis.xadd(self._wake, {"w": ""}, maxlen=1))
            self._last_wake = cast(bytes, last).decode()
            self._call(lambda: self._redis.expire(self._wake, 60))

    def expire(self, seconds: float) -> None:
        milliseconds = max(1, int(seconds * 1000))
        self._call(lambda: self._run("expire", [], milliseconds, self._stream("")))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Shut the sockets: a waiter must not have to wait for a server that may be gone.
        for client in (self._waiting, self._redis):
            with contextlib.suppress(RedisError, OSError):
                client.close()
                for pool in _pools(client):
                    pool.disconnect(inuse_connections=True)

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        names = [*keys]
        if not names:
            return {}
        fields = [f"={key}" for key in names]
        stored = cast(
            "list[bytes | None]", self._call(lambda: self._redis.hmget(self._hash, fields))
        )
        entries = ((key, _entry(item)) for key, item in zip(names, stored, strict=True))
        return {key: entry for key, entry in entries if entry is not None}

    def put_many(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.check_size(key, value)
        pairs = [item for pair in values.items() for item in pair]
        if pairs:
            self._call(lambda: self._run("put", [*values], *pairs[1:]))

    def delete_many(self, keys: Iterable[str]) -> None:
        names = [*keys]
        if names:
            self._call(lambda: self._run("delete", names, *names[1:]))

    def _stream(self, key: str) -> str:
        return f"{self._hash}:watch:{key}"

    def _run(self, script: str, keys: Sequence[str], *args: Any) -> Any:
        names = [self._hash, *(self._stream(key) for key in keys)]
        return self._scripts[script](keys=names, args=[self._nonce, *keys[:1], *args])

    def _park(self, key: str, known: str, after: str, wake: str, milliseconds: int) -> Any:
        # One round trip: the script makes the stream hold what XREAD then finds or waits for.
        stream = self._stream(key)
        script = self._scripts["wait"].script
        pipeline = self._waiting.pipeline(transaction=False)
        pipeline.eval(script, 2, self._hash, stream, self._nonce, key, known)
        pipeline.xread({stream: after, self._wake: wake}, block=milliseconds)
        seen = pipeline.execute()[1]
        return seen.items() if isinstance(seen, dict) else seen

    def _call(
        self, request: Callable[[], T], *, timeout: float | None = None, unless_closed: bool = False
    ) -> T:
        """The one place where the client's errors become the contract's."""
        if self._closed:
            raise RendezvousConnectionError(f"the connection to redis at {self._shown} is closed")
        try:
            return retry(
                request,
                timeout=self._timeout if timeout is None else timeout,
                passing=lambda error: not self._closed and _is_passing(error),
            )
        except Exception as error:
            if self._closed and unless_closed:
                return cast(T, None)
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> Exception:
        where = f"redis at {self._shown}"
        if "NOTANUMBER" in str(error):
            return RendezvousStateError(f"the counter in {where} is not a number")
        if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
            return RendezvousConnectionError(
                f"{where} refused the credentials ({error}); set the user in the endpoint and the "
                "password in $RDZV_PLUGINS_PASSWORD"
            )
        if isinstance(error, TimeoutError | ConnectionError | RedisClusterException | OSError):
            return RendezvousConnectionError(
                f"{where} could not be reached within {self._timeout:g} s ({error}); "
                "is it running and does --rdzv-endpoint name it?"
            )
        if isinstance(error, RedisError):
            return RendezvousStateError(f"{where} refused a request: {error}")
        return error


def _is_passing(error: Exception) -> bool:
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
        return False
    # redis wraps a failed TLS handshake in a ConnectionError; trying again cannot mend it.
    if "CERTIFICATE_VERIFY_FAILED" in str(error) or "WRONG_VERSION_NUMBER" in str(error):
        return False
    return isinstance(
        error,
        ConnectionError
        | TimeoutError
        | BusyLoadingError
        | ReadOnlyError
        | TryAgainError
        | RedisClusterException
        | OSError,
    )


def _entry(stored: bytes | None) -> Entry | None:
    if stored is None:
        return None
    version, _, value = stored.partition(b" ")
    return Entry(value, version.decode())


def _pools(client: Any) -> list[Any]:
    if isinstance(client, redis.RedisCluster):
        nodes = (node.redis_connection for node in cast(Any, client).get_nodes())
        return [node.connection_pool for node in nodes if node is not None]
    return [client.connection_pool]


def _connect(endpoint: str, options: Options, socket_timeout: float) -> Any:
    """A redis-py client that neither retries (`retry` does) nor has connected yet."""
    path = endpoint.removeprefix("unix://")
    common: dict[str, Any] = {
        "socket_timeout": socket_timeout,
        "socket_connect_timeout": min(socket_timeout, 5.0),
        "retry": Retry(NoBackoff(), 0),
        "username": options.user,
        "password": options.secret(),
        "health_check_interval": 0,
    }
    if path != endpoint:
        if not path.startswith("/"):
            raise ValueError("a unix:// endpoint needs an absolute path: unix:///run/redis.sock")
        return redis.Redis(unix_socket_path=path, db=options.database, **common)
    target = parse_endpoint(endpoint, default_port=6379, schemes=SCHEMES)
    common["username"] = target.user or options.user
    common["password"] = target.password or options.secret()
    common["socket_keepalive"] = True
    if options.tls or target.scheme in ("rediss", "valkeys"):
        common["ssl"] = True
        common["ssl_ca_certs"] = options.ca_file
        common["ssl_certfile"] = options.cert_file
        common["ssl_keyfile"] = options.key_file
    untyped: Any = redis
    if options.cluster:
        nodes = [untyped.cluster.ClusterNode(host, port) for host, port in target.hosts]
        return redis.RedisCluster(startup_nodes=nodes, **common)
    database = _database(target.path, target.query, options.database)
    if options.sentinel:
        sentinel = untyped.Sentinel([*target.hosts], sentinel_kwargs=common, **common)
        return sentinel.master_for(options.sentinel, db=database)
    if len(target.hosts) > 1:
        raise ValueError("several hosts need --rdzv-conf sentinel=<name> or cluster=true")
    host, port = target.hosts[0]
    return redis.Redis(host=host, port=port, db=database, **common)


def _database(path: str, query: Mapping[str, str], default: int) -> int:
    text = query.get("db") or path.strip("/")
    if text and not text.isdecimal():
        raise ValueError(f"the database '{text}' in the endpoint is not a number")
    return int(text) if text else default
