"""Redis 6 and later, and Valkey.

A run is one hash, ``{<prefix>/<run id>}``, changed by Lua scripts only: each write takes the next
number of the run's counter. A key that somebody waits for is written to a stream of one entry as
well, under the same number, so that ``XREAD BLOCK`` resumes exactly where a read left off. The
braces are a hash tag: in a Cluster everything of a run lives in one slot.

Limits: linearizable on one primary; replication is asynchronous, so a fail-over (Sentinel, Cluster)
may lose the last writes, which the round protocol survives as it survives a restart with an empty
memory. Values up to 512 MB (``proto-max-bulk-len``), so the number of nodes is not limited by size.
The user needs ``+@hash +@stream +@scripting +time +expire +pexpire +persist +del +hello`` on
``~{<prefix>/*``; for a database other than 0 also ``+select``, for a Cluster also
``+cluster|slots +command``.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import ConnectionError, RedisClusterException, RedisError, TimeoutError
from redis.sentinel import MasterNotFoundError

from rdzv_plugins.config import ServerOptions, option, redact
from rdzv_plugins.kv import (
    Capabilities,
    ClientClosedError,
    Entry,
    KeyValueClient,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
)
from rdzv_plugins.kv.retry import retry
from rdzv_plugins.stores._redis_errors import LostAnswerError, is_passing, is_refusal, not_now
from rdzv_plugins.stores._redis_lines import DIGESTS, LONGEST_PARK, Bell, Lines
from rdzv_plugins.stores._tls import tls_failure

__all__ = ["Client", "Options"]

T = TypeVar("T")

_VERSION = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the redis backend, for endpoints ``host:port``, ``redis://``, ``rediss://``
    (TLS), ``unix://`` and several hosts for Sentinel or Cluster.

    ======================= ======= ===============================================================
    option                  default meaning
    ======================= ======= ===============================================================
    database                0       database number; one in the endpoint's path takes precedence
    sentinel                none    name of the primary; the endpoint's hosts are Sentinels then
    cluster                 false   the endpoint's hosts are nodes of a Redis Cluster
    ======================= ======= ===============================================================
    """

    database: int = option(0, least=0)
    sentinel: str | None = option(None)
    cluster: bool = option(False)


class Client(KeyValueClient):
    """One run on Redis, over connections that requests and parked waiters take in turns."""

    name = "redis"
    options = Options
    capabilities = Capabilities(
        push=True, linearizable=True, batch=True, ttl=True, max_value_bytes=512 * 1024 * 1024
    )

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        self._shown = redact(endpoint) or "localhost"
        self._timeout = request_timeout
        self._hash = "{" + namespace + "}"
        self._closed = False
        self._lines = Lines(endpoint, options, self._hash, request_timeout)
        try:
            # Both connections of a node are opened here: joining is what must be fast.
            self._call(lambda: self._lines.open(2))
        except BaseException:
            self.close()
            raise

    def get(self, key: str) -> Entry | None:
        return _entry(self._ask("HGET", self._hash, f"={key}"))

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        self.check_size(key, value)
        if expected is not None and not (isinstance(expected, str) and expected):
            return self.get(key), False
        command = self._script("compare_and_set", [key], expected or "", value)
        written, version, *current = self._ask(*command)
        if written:
            return Entry(value, version.decode()), True
        if not current:
            return None, False
        *_, tag, _, _, _ = command
        # With our tag: an earlier attempt was done, and its answer lost.
        ours = version.endswith(b"-%s" % tag.encode())
        return Entry(current[0], version.decode()), ours

    def put(self, key: str, value: bytes) -> Version:
        self.check_size(key, value)
        version: bytes = self._ask(*self._script("put", [key], value))
        return version.decode()

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def list(self, prefix: str) -> dict[str, Entry]:
        flat = self._ask(*self._script("list", [], prefix))
        entries = zip((key.decode() for key in flat[::2]), map(_entry, flat[1::2]), strict=True)
        return {key: entry for key, entry in entries if entry is not None}

    def add(self, key: str, delta: int) -> int:
        # Asked once more only if it was refused: a lost answer may stand for a number added.
        command = self._script("add", [key], delta)
        return int(self._call(lambda: self._lines.exchange(command, once=True)[0]))

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        deadline = time.monotonic() + timeout
        known = version if isinstance(version, str) and _VERSION.fullmatch(version) else ""
        after = known or "0-0"
        remaining = timeout
        bell = self._lines.listen()
        try:
            while not bell.rung:
                # Never 0, which to Redis is for ever.
                park = max(1, int(min(remaining, LONGEST_PARK) * 1000))
                try:
                    answers = self._call(partial(self._park, key, known, after, park, bell), bell)
                except RendezvousConnectionError:
                    if bell.rung:
                        break
                    raise
                if not answers:
                    break
                differs, seen = answers
                for _, entries in seen or ():
                    number, (field, value, *_) = entries[-1]
                    if field == b"v":
                        return Entry(value, number.decode())
                    # Deleted: say again that we wait, from there.
                    known, after = "", number.decode()
                if differs and not seen:
                    # A version that is newer than the key's own: not of this key, or this server.
                    return self.get(key)
                if (remaining := deadline - time.monotonic()) <= 0:
                    break
        finally:
            self._lines.unlisten(bell)
        return None

    def interrupt(self) -> None:
        self._lines.interrupt()

    def expire(self, seconds: float) -> None:
        # 0 deletes at once: what is written next must not be lost.
        milliseconds = max(0, int(seconds * 1000))
        self._ask(*self._script("expire", [], milliseconds, self._stream("")))

    def close(self) -> None:
        self._closed = True
        self._lines.close()

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        names = [*keys]
        if not names:
            return {}
        stored = self._ask("HMGET", self._hash, *(f"={key}" for key in names))
        entries = zip(names, map(_entry, stored), strict=True)
        return {key: entry for key, entry in entries if entry is not None}

    def put_many(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.check_size(key, value)
        pairs = [item for pair in values.items() for item in pair]
        if pairs:
            self._ask(*self._script("put", [*values], *pairs[1:]))

    def delete_many(self, keys: Iterable[str]) -> None:
        names = [*keys]
        if names:
            self._ask(*self._script("delete", names, *names[1:]))

    def _stream(self, key: str) -> str:
        return f"{self._hash}:watch:{key}"

    def _script(self, name: str, keys: Sequence[str], *args: Any) -> tuple[Any, ...]:
        """The command that runs a script; its first arguments are a tag and the first key."""
        names = [self._hash, *map(self._stream, keys)]
        tag = str(secrets.randbits(63))
        return "EVALSHA", DIGESTS[name], len(names), *names, tag, *keys[:1], *args

    def _park(
        self, key: str, known: str, after: str, milliseconds: int, bell: Bell
    ) -> Sequence[Any]:
        # One round trip: the script makes the stream hold what XREAD then finds or waits for.
        read = ("XREAD", "BLOCK", milliseconds, "STREAMS", self._stream(key), after)
        script = self._script("wait", [key], known)
        return self._lines.exchange(script, read, park=milliseconds / 1000, bell=bell)

    def _ask(self, *command: Any) -> Any:
        return self._call(lambda: self._lines.exchange(command)[0])

    def _call(self, request: Callable[[], T], bell: Bell | None = None) -> T:
        """The one place where the client's errors become the contract's."""
        if self._closed:
            raise ClientClosedError(f"redis at {self._shown}")
        try:
            return retry(
                request,
                timeout=self._timeout,
                passing=lambda error: (
                    not (self._closed or (bell and bell.rung)) and is_passing(error)
                ),
            )
        except MasterNotFoundError as error:
            # In redis-py 6.2 to 7.3 it shows the settings of each connection, the password too.
            raise self._explain(error) from None
        except Exception as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> Exception:
        where = f"redis at {self._shown}"
        if "NOTANUMBER" in str(error):
            return RendezvousStateError(f"the counter in {where} is not a number")
        if is_refusal(error):
            return RendezvousConnectionError(
                f"{where} refused the credentials ({error}); set the user in the endpoint and the "
                "password in $RDZV_PLUGINS_PASSWORD; docs/stores.md names the rights it needs"
            )
        if "[SSL" in str(error):
            return tls_failure(where, str(error))
        if isinstance(error, MasterNotFoundError):
            return RendezvousConnectionError(
                f"no Sentinel at {self._shown} named a primary within {self._timeout:g} s "
                f"({str(error).partition(' : ')[0]}); are they running, is sentinel=<name> the "
                "one in their configuration, and do they take the password?"
            )
        if isinstance(error, LostAnswerError):
            return RendezvousConnectionError(
                f"{where} broke off ({error}) before it told whether it had added to a counter; "
                "is it running? Adding again could count twice"
            )
        if not_now(error):
            return RendezvousConnectionError(
                f"{where} has not done a request within {self._timeout:g} s "
                f"({type(error).__name__}: {error}); is it a primary that has loaded its data, and "
                "are its replicas and its disk in order? A Cluster needs cluster=true"
            )
        if isinstance(error, TimeoutError | ConnectionError | RedisClusterException | OSError):
            hung_up = re.search("closed by server|reset by peer", str(error))
            tls = ", and does it want rediss://" if hung_up and not self._lines.context else ""
            return RendezvousConnectionError(
                f"{where} could not be reached within {self._timeout:g} s ({error}); "
                f"is it running, does --rdzv-endpoint name it{tls}?"
            )
        if isinstance(error, RedisError):
            return RendezvousStateError(f"{where} refused a request: {error}")
        return error


def _entry(stored: bytes | None) -> Entry | None:
    if stored is None:
        return None
    version, _, value = stored.partition(b" ")
    return Entry(value, version.decode())
