"""Connections to Redis: how they are made, kept and asked.

redis-py's connections without the layers above them. A join is five requests, and those layers cost
more than the requests do: 0.16 ms of processor time each against 0.05 ms.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError
from redis.retry import Retry

from rdzv_plugins.config import parse_endpoint
from rdzv_plugins.stores._aside import aside
from rdzv_plugins.stores._redis_errors import LostAnswerError, not_now
from rdzv_plugins.stores._redis_scripts import SCRIPTS
from rdzv_plugins.stores._tls import tls_context, unheard_alert

if TYPE_CHECKING:
    from rdzv_plugins.stores.redis import Options

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")

DIGESTS = {
    name: hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    for name, script in SCRIPTS.items()
}

# A parked read is renewed this often: it finds a stream that was dropped (FLUSHALL) under it.
LONGEST_PARK = 5.0

# A connection that was used so recently is taken without asking whether it still stands.
_TRUSTED_SECONDS = 0.5


class Bell:
    """Wakes one thread that waits for an answer: a pipe, to be polled beside its socket."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.rung = False

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        # One byte at most, so this never blocks.
        if not self.rung:
            self.rung = True
            os.write(self._write, b"!")

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class Lines:
    """Connections of one client, each used by one thread at a time.

    Raises (every method but `close` and `interrupt`): what redis-py raises, and `OSError`.
    """

    def __init__(
        self, endpoint: str, options: Options, slot_key: str, request_timeout: float
    ) -> None:
        self._timeout = request_timeout
        self._make, self.context = _maker(endpoint, options, request_timeout)
        # Made with the first connection: a cluster's client asks for the slots as it is made.
        self._redis: Any = None
        self._doubtful = False
        self._slot_key = slot_key
        self._idle: deque[tuple[Any, float]] = deque()
        self._busy: set[Any] = set()
        self._waiting: set[Bell] = set()
        self._silent: list[Bell] = []
        self._lock = threading.Lock()
        self._closed = False

    def open(self, count: int) -> None:
        """Have ``count`` connections ready."""
        for _ in range(count - len(self._idle)):
            self._add()

    def _add(self) -> None:
        self._idle.append((self._connect(), time.monotonic()))
        if self._closed:
            self._drop_idle()

    def listen(self) -> Bell:
        """A bell that `interrupt` and `close` ring until it is given to `unlisten`."""
        with self._lock:
            bell = self._silent.pop() if self._silent else Bell()
            self._waiting.add(bell)
            if self._closed:
                bell.ring()
        return bell

    def unlisten(self, bell: Bell) -> None:
        with self._lock:
            self._waiting.remove(bell)
            if not (bell.rung or self._closed):
                self._silent.append(bell)
                return
        bell.close()

    def interrupt(self) -> None:
        """Ring every bell. Asks the server nothing, and touches no connection."""
        with self._lock:
            for bell in self._waiting:
                bell.ring()

    def exchange(
        self,
        *commands: tuple[Any, ...],
        park: float = 0.0,
        bell: Bell | None = None,
        once: bool = False,
    ) -> list[Any]:
        """Send commands in one go and return their answers; raises the first error among them.

        Each answer may take the request timeout, the last one ``park`` seconds more. When ``bell``
        rings there are no answers. ``once``: they must not be sent twice, and `LostAnswerError`
        says that they may have been done.
        """
        line = self._take(0.0 if once else _TRUSTED_SECONDS, bell)
        if line is None:
            return []
        try:
            line.send_packed_command(line.pack_commands(commands), check_health=False)
            if bell is not None:
                answers = self._parked(line, len(commands), park, bell)
            else:
                answers = [*(line.read_response() for _ in commands[1:]), _read(line)]
        except BaseException as error:
            with self._lock:
                self._busy.discard(line)
            line.disconnect()
            # What broke one connection has most likely broken those that lie idle.
            self._drop_idle()
            self._doubtful = True
            if self._closed:
                # A connection that is shut under a reader fails in many ways.
                raise redis.ConnectionError("the client was closed") from error
            # A Sentinel's connection breaks itself when a former primary refuses a write.
            undone = not_now(error) or not_now(error.__context__)
            if once and not undone and isinstance(error, Exception):
                raise LostAnswerError(str(error)) from error
            raise
        if len(answers) < len(commands):
            # An answer is yet to come on it: whoever used it next would take that for its own.
            # To keep it for that answer would save one connect for each interrupt, which is rare.
            with self._lock:
                self._busy.discard(line)
            line.disconnect()
            return []
        last = answers[-1]
        outdated = not_now(last)
        with self._lock:
            self._busy.discard(line)
            closed = self._closed
        if closed or outdated:
            line.disconnect()
        else:
            self._idle.append((line, time.monotonic()))
        if outdated:
            # The other connections are to the same server, which may never be the one again.
            self._drop_idle()
            self._doubtful = True
        if isinstance(last, Exception):
            raise last
        return answers

    def close(self) -> None:
        """End every exchange: the waiting ones by their bells, the others under their reader."""
        with self._lock:
            self._closed = True
            busy = [*self._busy]
            for bell in self._waiting:
                bell.ring()
            silent, self._silent = self._silent, []
        for bell in silent:
            bell.close()
        for line in busy:
            with contextlib.suppress(RedisError, OSError):
                line.disconnect()
        self._drop_idle()
        if self._redis is not None:
            with contextlib.suppress(RedisError, OSError):
                self._redis.close()

    def _parked(self, line: Any, count: int, park: float, bell: Bell) -> list[Any]:
        """So many answers, of which the last may park; fewer if the bell rang."""
        # Not select.select, which takes no descriptor from 1024 on.
        poll = select.poll()
        for readable in (line._sock, bell):
            poll.register(readable, select.POLLIN)
        answers: list[Any] = []
        for left in range(count, 0, -1):
            # What came with the answer before stands in the parser, or in TLS: no socket tells.
            if not (answers and line.can_read(timeout=0)):
                ready = poll.poll(1000 * (self._timeout + (0 if left > 1 else park)))
                if not ready:
                    raise redis.TimeoutError("no answer to a parked read")
                if bell.rung:
                    break
            # An error is raised at once, for the last command may park.
            answers.append(_read(line) if left == 1 else line.read_response())
        return answers

    def _take(self, trusted: float, bell: Bell | None) -> Any:
        """A connection; with a bell it is not one that `close` shuts under its reader."""
        line = self._standing(trusted)
        if line is None and bell is not None:
            # Connecting asks the server several things, and no bell ends that.
            aside(self._add, lambda: not bell.rung)
            if bell.rung:
                return None
            line = self._standing(trusted)
        line = line or self._connect()
        with self._lock:
            if self._closed:
                line.disconnect()
                raise redis.ConnectionError("the client was closed")
            if bell is None:
                self._busy.add(line)
        return line

    def _standing(self, trusted: float) -> Any:
        """The connection used last; None if there is none, or the server has closed it."""
        try:
            line, since = self._idle.pop()
        except IndexError:
            return None
        if time.monotonic() - since < trusted:
            return line
        try:
            # An idle connection has nothing to say, unless that it is at its end.
            if not line.can_read():
                return line
        except (RedisError, OSError):
            pass
        line.disconnect()
        return None

    def _connect(self) -> Any:
        pool = self._pool()
        # A cluster's client gives its connections the share of the time that one look-up has.
        patience = {"socket_timeout": self._timeout, "socket_connect_timeout": self._timeout}
        line = pool.connection_class(**{**pool.connection_kwargs, **patience})
        try:
            line.connect()
            # Loaded once a connection: a server that restarted has forgotten them.
            loads = [("SCRIPT", "LOAD", script) for script in SCRIPTS.values()]
            line.send_packed_command(line.pack_commands(loads), check_health=False)
            for answer in [_read(line) for _ in loads]:
                if isinstance(answer, Exception):
                    raise answer
        except BaseException as error:
            line.disconnect()
            self._doubtful = True
            if self.context and isinstance(error, redis.ConnectionError) and line.host:
                alert = unheard_alert(line.host, int(line.port), self.context)
                if alert is not None:
                    raise alert from None
            raise
        return line

    def _pool(self) -> Any:
        try:
            if self._redis is None:
                self._redis = self._make()
            client: Any = self._redis
            if isinstance(client, redis.RedisCluster):
                cluster: Any = client
                if self._doubtful:
                    # A dead primary tells nobody who has its slots now; the others do.
                    cluster.nodes_manager.initialize()
                    self._doubtful = False
                client = cluster.get_redis_connection(cluster.get_node_from_key(self._slot_key))
        except RedisClusterException as error:
            # It wraps what is wrong, be it a password, and a missing right once more.
            cause = error.__cause__ or error
            refusal = cause.__context__ if isinstance(cause.__context__, ResponseError) else None
            raise refusal or cause from None
        return client.connection_pool

    def _drop_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop()[0].disconnect()


def _read(line: Any) -> Any:
    """One answer; an error of one command leaves the answers of the others to be read."""
    try:
        return line.read_response()
    except ResponseError as error:
        return error


def _maker(
    endpoint: str, options: Options, timeout: float
) -> tuple[Callable[[], Any], ssl.SSLContext | None]:
    """Makes a redis-py client that does not retry (`retry` does); and what its TLS amounts to.

    Raises `ValueError`.
    """
    path = endpoint.removeprefix("unix://")
    common: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "username": options.user,
        "password": options.secret(),
        "protocol": 2,
    }
    if path != endpoint:
        if not path.startswith("/"):
            raise ValueError("a unix:// endpoint needs an absolute path: unix:///run/redis.sock")
        return partial(redis.Redis, unix_socket_path=path, db=options.database, **common), None
    target = parse_endpoint(endpoint, default_port=6379, schemes=SCHEMES)
    common["username"] = target.user or options.user
    common["password"] = target.password or options.secret()
    common["socket_keepalive"] = True
    context: ssl.SSLContext | None = None
    if options.tls or target.scheme in ("rediss", "valkeys"):
        context = tls_context(options)
        common["ssl"] = True
        # Not so by itself before redis-py 6.
        common["ssl_check_hostname"] = True
        common["ssl_ca_certs"] = options.ca_file
        common["ssl_certfile"] = options.cert_file
        common["ssl_keyfile"] = options.key_file
    untyped: Any = redis
    if options.cluster:
        nodes = [untyped.cluster.ClusterNode(host, port) for host, port in target.hosts]
        common |= _share(timeout, len(nodes))
        return partial(redis.RedisCluster, startup_nodes=nodes, **common), context
    database = _database(target.path, target.query, options.database)
    if options.sentinel:
        guarded = common["password"] is not None
        asked = common | _share(timeout, len(target.hosts) * (2 if guarded else 1))
        sentinel = untyped.Sentinel([*target.hosts], sentinel_kwargs=asked, **common)
        if guarded:
            # Sentinels often demand no password where their servers do, and then refuse one.
            asked |= {"username": None, "password": None}
            bare = untyped.Sentinel([*target.hosts], sentinel_kwargs=asked)
            sentinel.sentinels = [*bare.sentinels, *sentinel.sentinels]
        return partial(sentinel.master_for, options.sentinel, db=database), context
    if len(target.hosts) > 1:
        raise ValueError("several hosts need --rdzv-conf sentinel=<name> or cluster=true")
    host, port = target.hosts[0]
    return partial(redis.Redis, host=host, port=port, db=database, **common), context


def _share(timeout: float, hosts: int) -> dict[str, float]:
    """So much patience with each host that all of them, and then the primary, have their turn."""
    share = timeout / (hosts + 1)
    return {"socket_timeout": share, "socket_connect_timeout": share}


def _database(path: str, query: Mapping[str, str], default: int) -> int:
    text = query.get("db") or path.strip("/")
    if text and not text.isdecimal():
        raise ValueError(f"the database '{text}' in the endpoint is not a number")
    return int(text) if text else default
