"""NATS JetStream 2.10 and later: a key-value bucket.

A key of a run is the subject ``$KV.<bucket>.<prefix>.<run id>./<epoch>.<key>``. The bucket
republishes what it stores, which wakes the waiters.

A leader that was suspended or cut off may read old values for up to 10 s, and takes no write.
Values up to 1,000,000 bytes, with a ``max_payload`` above that. In a cluster use three replicas.

The user needs to publish to ``$KV.<bucket>.<prefix>.>`` and to ``$JS.API.STREAM.INFO``, ``MSG.GET``
and ``PURGE`` of ``KV_<bucket>``, with create_bucket=true also to ``$JS.API.STREAM.CREATE``, and to
subscribe to ``_INBOX.>`` and ``$RKV.<bucket>.<prefix>.>``. The prefix limits only writes: users who
are not to read each other's keys need an account each.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, unquote

import msgspec
import nats.aio.client
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.errors import APIError
from nats.protocol.parser import Parser

from rdzv_plugins.kv.base import (
    Limit,
    Problem,
    Stored,
    find_problem,
    full,
    in_background,
    refused,
    segments,
    version_of,
)
from rdzv_plugins.kv.contract import Capabilities
from rdzv_plugins.kv.epochs import MARK, Epoch, EpochClient
from rdzv_plugins.kv.findings import Finding, Mark, of_connection, of_space, of_version
from rdzv_plugins.settings.endpoint import Endpoint, at, parse_endpoint, redact
from rdzv_plugins.settings.options import ServerOptions, first_line, given_or_in_file, option
from rdzv_plugins.stores._names import look_up
from rdzv_plugins.stores._tls import context_if, is_of_tls, tls_problem

T = TypeVar("T")

_LARGEST_VALUE = 1_000_000
# Bytes of a message: no server takes a larger max_payload.
_MOST_OF_A_MESSAGE = 1 << 26

# A resolver may take this many seconds; the connecting thread gives up sooner.
_LONGEST_LOOK_UP = 30.0

# The client pings a connection that was silent for this many seconds; two missing answers end it.
_PING_SECONDS = 5

# How long a request waits for its answer until it is made again, in seconds.
_LEAST_ATTEMPT, _LONGEST_ATTEMPT = 1.0, 3.0

# The most subscriptions that a client keeps, because waits are for the same few keys.
_SUBSCRIPTIONS = 8

# The most reads that are under way at once.
_READS = 500

# Error codes of JetStream's API.
_NO_MESSAGE, _NO_STREAM, _OTHER_STREAM = 10037, 10059, 10058
_NOT_CLUSTERED = 10074
_OTHER_SEQUENCE = (10071, 10164)
_OUT_OF_SPACE = (10002, 10023, 10025, 10027, 10028, 10047, 10077, 10118)
_NO_JETSTREAM = (10039, 10076)
# After these codes dial another link, which creates a missing bucket. None: no stream takes the
# message.
_GONE = (None, _NO_STREAM, *_NO_JETSTREAM)

_REPUBLISH = "--republish-source='$KV.{bucket}.>' --republish-destination='$RKV.{bucket}.>'"
# The meanings of errors, by a pattern of the class and the text; of JetStream's answers, by a
# pattern of status, "made" (by create_bucket) or "not made", and text. The first match counts.
_PROBLEMS = {
    rf"^answer .*, made: .*\[{_NO_STREAM}\]": Problem(
        "has lost its bucket '{bucket}'; it is created again", retryable=True
    ),
    rf"^answer .*\[{_NO_STREAM}\]": Problem(
        "has no bucket '{bucket}'; create it, with nats kv add {bucket} "
        + _REPUBLISH
        + ", or with create_bucket=true",
        state=True,
    ),
    # One of three replicas may have written the message.
    rf"^answer .*\[({'|'.join(map(str, _OUT_OF_SPACE))})\]": replace(
        full("raise the limits of the bucket, the account or the servers"), undone=False
    ),
    rf"^answer .*\[({'|'.join(map(str, _NO_JETSTREAM))})\]": Problem(
        "offers no JetStream to this user ({said}); enable it for the server (-js) and the account",
        denied=True,
    ),
    "^answer [0-4]": refused(
        "was the bucket made by another program? The permissions must allow {grant}"
    ),
    "^SilentBucketError": Problem(
        "has a bucket '{bucket}' that does not republish, so nobody would be woken; run nats "
        "stream edit KV_{bucket} " + _REPUBLISH,
        state=True,
    ),
    "^MaxPayloadError": Problem(
        f"refused a value: its max_payload is below {_LARGEST_VALUE:,} bytes", state=True
    ),
    "(?i)^(?!answer ).*permissions violation": Problem(
        "denied a right ({said}); the user's permissions must allow {grant}", denied=True
    ),
    "(?i)^(?!answer ).*(authorization|authentication|credentials|expired)": Problem(
        "refused the user ({said}); set user and $RDZV_PLUGINS_PASSWORD, $RDZV_PLUGINS_TOKEN, "
        "nkey_file or credentials_file; its permissions must allow {grant}",
        denied=True,
    ),
    "^NoRespondersError": Problem(
        "has no JetStream that answers: start its servers with -js, a majority of them, and set "
        "domain= to theirs if they have one",
        retryable=True,
    ),
}

# Seconds that closing a connection may take.
_CLOSE_SECONDS = 1.0

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the nats backend, for endpoints ``host:port``, ``nats://``, ``tls://`` (TLS) and
    several hosts: servers of one cluster, of which the client uses one that answers.
    """

    bucket: str = option("rdzv")
    """name of the key-value bucket"""
    create_bucket: bool = option(False)
    """create the bucket if there is none"""
    replicas: int = option(0, least=0)
    """copies of a bucket that it creates; 0: three in a cluster, else one"""
    storage: str = option("file", choices=("file", "memory"))
    """storage of a bucket that it creates: file or memory"""
    domain: str | None = option(None)
    """JetStream's domain, as behind a leaf node; default: the server's own"""
    token: str | None = option(None, secret=True)
    """token; set it in $RDZV_PLUGINS_TOKEN"""
    token_file: str | None = option(None)
    """file whose first line is the token"""
    nkey_file: str | None = option(None)
    """file with the seed of an nkey"""
    credentials_file: str | None = option(None)
    """file with the JWT and the seed of a user, as nsc makes it"""


class Client(EpochClient):
    """One run in a bucket; all its requests and waits share one connection."""

    name = "nats"
    default_port: ClassVar[int | None] = 4222
    tls_schemes = ("tls",)
    user_is_token = True
    options: ClassVar[type[Any]] = Options
    capabilities = Capabilities(
        push=True, linearizable=True, batch=False, ttl=False, max_value_bytes=_LARGEST_VALUE
    )
    heartbeat_ms = 1.0
    least_version: ClassVar[tuple[int, ...]] = (2, 10)

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        target = parse_endpoint(endpoint, default_port=4222, schemes=("nats", "tls"))
        target.refuse_all_but()
        super().__init__(f"nats at {redact(endpoint) or 'localhost'}", request_timeout)
        if not re.fullmatch("[A-Za-z0-9_-]+", options.bucket):
            raise ValueError(
                f"option 'bucket': '{options.bucket}' has more than letters, digits, '_' and '-'"
            )
        *prefix, run = (_token(part) for part in segments(namespace, options.prefix))
        self._prefix = f"$KV.{options.bucket}.{'.'.join(prefix)}"
        self._mark = f"{self._prefix}.{run}"
        self._options = options
        self._grant = _grant(self._prefix, options)
        # The server's clock minus this host's monotonic clock.
        self._offset = 0.0
        self._transport = Transport(target, options, request_timeout, self._greet)
        self._connect(self._present)

    def _read_at(self, paths: Iterable[str], limit: Limit) -> dict[str, Stored]:
        return self._transport.run(self._fetched([*paths]), limit)

    def _scan_at(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        return self._transport.run(self._listed(prefix), limit)

    def _replace_at(self, path: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        expected = seen.guard if seen is not None else 0
        return self._transport.run(self._publish(self._subject(path), data, expected), limit)

    def _put_at(self, values: Mapping[str, bytes], limit: Limit) -> None:
        writes = (self._publish(self._subject(path), data) for path, data in values.items())
        self._transport.run(_together(writes), limit)

    def _delete_at(self, paths: Iterable[str], limit: Limit) -> None:
        purges = (self._purge(self._subject(path)) for path in paths)
        self._transport.run(_together(purges), limit)

    def _empty(self, epoch: str, limit: Limit) -> bool:
        self._transport.run(self._purge(f"{self._mark}./{epoch}.>"), limit)
        return True

    def _server_time(self) -> float:
        return self._offset + time.monotonic()

    def _sweep(self, limit: Limit) -> None:
        self._transport.run(self._swept(limit), limit)

    def _park_at(self, path: str, seen: Stored | None, limit: Limit) -> Stored | None:
        return self._transport.run(self._watched(path, seen), limit, True)

    def _problem(self, error: Exception) -> Problem | None:
        if isinstance(error, ssl.SSLError) and is_of_tls(str(error)):
            return tls_problem(str(error))
        if isinstance(error, PlainError):
            return Problem(str(error))
        if isinstance(error, nats.errors.Error | SilentBucketError):
            said = " ".join(str(error).split()).removeprefix("nats: ")
            kind = type(error).__name__
            if isinstance(error, APIError):
                said = f"{error.description} [{error.err_code}]"
                made = "made" if self._options.create_bucket else "not made"
                kind = f"answer {error.code or 0}, {made}"
            problem = find_problem(
                _PROBLEMS, f"{kind}: {said}", said=said,
                timeout=self.timeout, bucket=self._options.bucket, grant=self._grant,
            )  # fmt: skip
            if problem is not None:
                return problem
        if isinstance(error, NonsenseError | nats.errors.ProtocolError):
            why = error.__cause__
            return self._odd(why if isinstance(why, Exception) else error)
        if isinstance(error, OSError | nats.errors.Error):
            undone = isinstance(error, ConnectionRefusedError | socket.gaierror)
            return self._unreachable(error, undone=undone)
        return None

    def inspect(self) -> Iterable[Finding]:
        link = self._call(lambda limit: self._transport.run(self._transport.link(), limit))
        yield self._transport.inspect(link)
        yield of_version("nats-server", link.info.get("version", ""), self.least_version)
        found, why = self._learn(
            lambda limit: self._transport.run(self._ask("STREAM.INFO", {}), limit)
        )
        if found is None:
            yield Finding(Mark.UNKNOWN, "role", f"not known: {why}")
            return
        config, cluster = found["config"], found.get("cluster") or {}
        replicas = config.get("num_replicas", 1)
        away = [it["name"] for it in cluster.get("replicas") or () if it.get("offline")]
        if away:
            yield Finding(
                Mark.WARNING, "role", f"of {replicas} replicas {', '.join(away)} are away",
                "start those servers",
            )  # fmt: skip
        else:
            led = f", led by {cluster['leader']}" if cluster.get("leader") else ""
            yield Finding(Mark.OK, "role", f"a bucket with {replicas} replicas{led}")
        if replicas == 1 and config.get("storage") == "memory":
            yield Finding(
                Mark.WARNING, "persistence", "the bucket is in the memory of one server",
                "a restart of that server costs the run a restart; storage=file keeps it",
            )  # fmt: skip
        yield of_space(
            found["state"]["bytes"], max(0, config.get("max_bytes", 0)), "raise its max_bytes"
        )

    def _disconnect(self) -> None:
        self._transport.close()

    # The coroutines that the hooks await.

    async def _fetched(self, paths: list[str]) -> dict[str, Stored]:
        read = await _together(self._get(self._subject(path)) for path in paths)
        found = zip(paths, read, strict=True)
        return {path: Stored.parse(data, at) for path, (data, at) in found if at}

    async def _listed(self, prefix: str) -> dict[str, Stored]:
        start = f"{self._mark}./"
        subjects = await self._subjects(f"{self._subject(prefix.rpartition('/')[0])}.>")
        read = (_path(it[len(start) :]) for it in subjects)
        # Skip subjects that do not decode to UTF-8: this package has not written them.
        paths = [path for path in read if path.startswith(prefix) and "\ufffd" not in path]
        found: dict[str, Stored] = {}
        for first in range(0, len(paths), _READS):
            found |= await self._fetched(paths[first : first + _READS])
        return found

    async def _swept(self, limit: Limit) -> None:
        marks = await self._subjects(f"{self._prefix}.*")
        others = [subject for subject in marks if subject != self._mark][:_READS]
        found = await _together(self._get(subject) for subject in others)
        for subject, (data, number) in zip(others, found, strict=True):
            mark = Stored.parse(data)
            if number and self._has_ended(mark, limit):
                await self._purge(f"{subject}./{Epoch.of(mark).name}.>")
                await self._purge(subject, number)

    async def _watched(self, path: str, seen: Stored | None) -> Stored | None:
        link = await self._transport.link()
        subject = self._subject(path).replace("$KV.", "$RKV.", 1)
        watch = link.watches.get(subject)
        told = watch.latest if watch is not None else None
        if watch is None or seen is None:
            watch = watch or await link.watch(subject)
            # A subscription reports neither earlier writes nor deletions.
            now = (await self._fetched([path])).get(path)
            if version_of(now) not in (None, version_of(seen)):
                return now
        while True:
            latest = watch.latest
            if latest is not None and (
                latest is not told if seen is None else latest.guard > seen.guard
            ):
                return latest
            if seen is not None and latest is not told:
                return None  # The message came late, or the bucket is a new one: look again.
            await watch.changed()

    # Requests to JetStream.

    async def _greet(self, link: Link) -> None:
        """The requests with which each new connection begins."""
        bucket = self._options.bucket
        try:
            answer = await link.ask(f"STREAM.INFO.KV_{bucket}", {}, self.timeout)
        except APIError as error:
            if error.err_code != _NO_STREAM or not self._options.create_bucket:
                raise
            answer = await self._create_bucket(link)
        republished = answer["config"].get("republish") or {}
        if republished.get("dest") != f"$RKV.{bucket}.>" or republished.get("headers_only"):
            raise SilentBucketError
        self._learn_time(answer)

    async def _create_bucket(self, link: Link) -> dict[str, Any]:
        bucket = self._options.bucket
        config = {
            "name": f"KV_{bucket}", "subjects": [f"$KV.{bucket}.>"], "max_msgs_per_subject": 1,
            "republish": {"src": f"$KV.{bucket}.>", "dest": f"$RKV.{bucket}.>"},
            "storage": self._options.storage, "discard": "new", "allow_rollup_hdrs": True,
            "deny_delete": True, "description": "rdzv-plugins",
        }  # fmt: skip
        wanted = self._options.replicas
        for replicas in [wanted] if wanted else [3, 1]:
            try:
                asked = {**config, "num_replicas": replicas}
                return await link.ask(f"STREAM.CREATE.KV_{bucket}", asked, self.timeout)
            except APIError as error:
                if error.err_code == _OTHER_STREAM:
                    break
                if error.err_code != _NOT_CLUSTERED or replicas == 1 or wanted:
                    raise
        return await link.ask(f"STREAM.INFO.KV_{bucket}", {}, self.timeout)

    async def _get(self, subject: str) -> tuple[bytes, int]:
        """The last message of a subject and its sequence number; 0: there is none."""
        try:
            found = (await self._ask("STREAM.MSG.GET", {"last_by_subj": subject}))["message"]
        except APIError as error:
            if error.err_code != _NO_MESSAGE:
                raise
            return b"", 0
        return base64.b64decode(found.get("data", "")), found["seq"]

    async def _publish(self, subject: str, data: bytes, expected: int | None = None) -> bool:
        """Store a message; False: the subject's last message is not ``expected`` (0: none)."""
        headers = None if expected is None else {_EXPECTED: str(expected)}
        link = await self._transport.link()
        try:
            _answer(await link.connection.request(subject, data, self.timeout, headers=headers))
        except APIError as error:
            if error.err_code not in _OTHER_SEQUENCE:
                raise
            return False
        return True

    async def _purge(self, subjects: str, up_to: int | None = None) -> None:
        """Delete all messages of these subjects, or those up to a sequence number."""
        bound = {} if up_to is None else {"seq": up_to + 1}
        await self._ask("STREAM.PURGE", {"filter": subjects} | bound)

    async def _subjects(self, pattern: str) -> list[str]:
        """The subjects of the bucket that have a message; learns the server's time too."""
        found: list[str] = []
        while True:
            asked = {"subjects_filter": pattern, "offset": len(found)}
            answer = await self._ask("STREAM.INFO", asked)
            self._learn_time(answer)
            subjects = answer["state"].get("subjects") or {}
            found += subjects
            if not subjects or len(found) >= answer.get("total", 0):
                return found

    def _learn_time(self, answer: Mapping[str, Any]) -> None:
        self._offset = datetime.fromisoformat(answer["ts"]).timestamp() - time.monotonic()

    async def _ask(self, verb: str, what: Mapping[str, Any]) -> dict[str, Any]:
        """A request to JetStream's API about the bucket's stream."""
        link = await self._transport.link()
        return await link.ask(f"{verb}.KV_{self._options.bucket}", what, self.timeout)

    def _subject(self, path: str) -> str:
        return self._mark if path == MARK else f"{self._mark}./{_subject(path)}"


class PlainError(Exception):
    """Only one of server and client asks for TLS."""


class SilentBucketError(Exception):
    """The bucket does not republish stored messages, which wake the waiters."""


class NonsenseError(OSError):
    """The server has sent something other than NATS' protocol."""


class _Parser(Parser):
    async def parse(self, data: bytes = b"") -> None:
        try:
            await super().parse(data)
        except (nats.errors.Error, OSError):
            raise
        except Exception as error:
            # Otherwise nats-py logs a traceback and wakes no waiter.
            raise NonsenseError from error
        if len(self.buf) > _MOST_OF_A_MESSAGE:
            raise OSError(f"its answer has more than {_MOST_OF_A_MESSAGE >> 20} MiB")


class _Connection(nats.aio.client.Client):
    """Uses TLS if client and server ask for it, else `PlainError`; nats-py asks only the server.

    Attributes:
        broke: called with the error that has broken the connection.
    """

    broke: Callable[[Exception], None]

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Parser(self)  # Private: it limits answers, and passes errors on.

    async def _process_op_err(self, e: Exception) -> None:
        # Private. nats-py first writes remaining data, and hides a failure of that write: a request
        # or a wait would go on until its time is over.
        if not self.is_closed:
            self.broke(e)
        await super()._process_op_err(e)

    @property
    def ssl_context(self) -> ssl.SSLContext:
        if "tls" not in self.options:
            raise PlainError("requires TLS; write tls:// in front of the endpoint, or tls=true")
        context: ssl.SSLContext = super().ssl_context
        return context

    def _connect_command(self) -> bytes:
        # Private, because nats-py does not pass on the server's announcement before the log-in.
        if "tls" in self.options and not self._server_info.get("tls_required"):
            raise PlainError(
                "speaks no TLS; give the server a certificate, or write nats:// and "
                "leave out tls=true"
            )
        command: bytes = super()._connect_command()
        return command


class _Watch:
    """The last message of a subscription."""

    def __init__(self) -> None:
        self.latest: Stored | None = None
        self._changed = asyncio.Event()
        self.subscription: Subscription | None = None

    async def take(self, message: Msg) -> None:
        headers = message.headers or {}
        number = headers.get("Nats-Sequence", "0")
        found = Stored.parse(message.data, int(number) if number.isdecimal() else 0)
        if found.version:
            self.latest = found
            self._changed.set()

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Link:
    """One connection with its subscriptions; used only in the loop's thread."""

    def __init__(self, api: str) -> None:
        self._api = api
        self.connection = _Connection()
        self.connection.broke = self.fail
        self.watches: dict[str, _Watch] = {}
        # The requests under way, and why the connection failed.
        self.tasks: set[asyncio.Task[Any]] = set()
        self.failure: Exception | None = None

    @property
    def info(self) -> dict[str, Any]:
        """The server's description of itself."""
        found: dict[str, Any] = self.connection._server_info
        return found

    async def ask(self, verb: str, what: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        asked = msgspec.json.encode(what)
        return _answer(await self.connection.request(f"{self._api}.{verb}", asked, seconds))

    async def watch(self, subject: str) -> _Watch:
        watch = self.watches[subject] = _Watch()
        watch.subscription = await self.connection.subscribe(subject, cb=watch.take)
        while len(self.watches) > _SUBSCRIPTIONS:
            # Drop the oldest; a wait on it looks again in time.
            oldest = self.watches.pop(next(iter(self.watches)))
            if oldest.subscription is not None:
                await oldest.subscription.unsubscribe()
        return watch

    async def unless_it_fails(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work``, but raise an error of the connection at once: a server does not answer a
        request without permission, but reports it as an error of the connection.
        """
        caller, task = asyncio.current_task(), asyncio.ensure_future(work)
        self.tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            # A cancelled caller needs no reason.
            if self.failure is None or (caller is not None and caller.cancelling()):
                raise
            raise self.failure from None
        finally:
            self.tasks.discard(task)

    async def failed(self, error: Exception) -> None:
        """Called by nats-py with each error, while it connects and later."""
        connects = not self.connection.is_connected
        if connects or "permissions violation" in str(error).lower():
            self.fail(error)
        # Raise, because nats-py would dial forever. The reading task closes its own connection.
        if connects and not isinstance(error, nats.errors.UnexpectedEOF):
            raise error

    async def closed(self) -> None:
        # The accepted user may have a new secret by now, which the next log-in uses.
        self.fail(ConnectionResetError(str(self.connection.last_error or "")))

    def fail(self, error: Exception) -> None:
        """End all requests under way."""
        # Keep a TLS alert, which says more than the end of the connection that follows it.
        if not isinstance(self.failure, ssl.SSLError):
            self.failure = error
        for task in self.tasks:
            task.cancel()


class Transport:
    """A connection that is dialled again after it broke, with the secrets of that time."""

    def __init__(
        self,
        target: Endpoint,
        options: Options,
        seconds: float,
        welcome: Callable[[Link], Coroutine[Any, Any, None]],
    ) -> None:
        self._target, self._options = target, options
        self._attempt_seconds = min(max(_LEAST_ATTEMPT, seconds / 4), _LONGEST_ATTEMPT)
        self._tls = context_if(
            options.tls or target.scheme == "tls", options, "write tls:// or set tls=true"
        )
        self._hosts = list(target.hosts)
        random.shuffle(self._hosts)
        self._api = _api(options)
        self._welcome = welcome
        self._link: Link | None = None
        self._dialling: asyncio.Lock | None = None
        # Keep a reference, because asyncio keeps only a weak one.
        self._ending: asyncio.Future[None] | None = None
        _login(target, options)

    def inspect(self, link: Link) -> Finding:
        secret = any(name in ("password", "token") for name in _login(self._target, self._options))
        return of_connection(self._tls is not None, secret, [host for host, _ in self._hosts])

    def run(self, work: Coroutine[Any, Any, T], limit: Limit, parked: bool = False) -> T:
        """Run ``work`` in the loop, within the limit; ``parked``: it waits for other clients."""
        try:
            future = asyncio.run_coroutine_threadsafe(self._attempt(work), _loop())
        except BaseException:
            work.close()
            raise
        if not parked:
            # While a cluster elects a leader, it loses requests.
            limit = limit.within(self._attempt_seconds)
        try:
            return limit.await_result(future)
        except TimeoutError:
            if not parked and self._link is not None:
                # Leave this server, because another server may answer.
                link = self._link
                _loop().call_soon_threadsafe(self._leave, link)
            raise
        finally:
            future.cancel()

    async def _attempt(self, work: Coroutine[Any, Any, T]) -> T:
        with contextlib.closing(work):
            link = await self.link()
            try:
                return await link.unless_it_fails(work)
            except (APIError, nats.errors.NoRespondersError) as error:
                if getattr(error, "err_code", None) in _GONE:
                    self._leave(link)
                raise

    async def link(self) -> Link:
        """The connection; dials if there is none."""
        if self._dialling is None:
            self._dialling = asyncio.Lock()
        async with self._dialling:
            link = self._link
            if link is None or link.failure is not None or not link.connection.is_connected:
                if link is not None:
                    # nats-py keeps the connection open on which the server refused a request.
                    self._ending = asyncio.ensure_future(_end(link))
                link = self._link = await self._dial()
            return link

    async def _dial(self) -> Link:
        failure: Exception | None = None
        for _ in self._hosts:
            host, port = self._hosts[0]
            link = Link(self._api)
            try:
                await link.connection.connect(
                    f"nats://{at(host, port)}",
                    error_cb=link.failed, closed_cb=link.closed, name="rdzv-plugins",
                    allow_reconnect=False, tls_hostname=host if self._tls else None,
                    tls=self._tls.get() if self._tls is not None else None,
                    connect_timeout=self._attempt_seconds,  # type: ignore[arg-type]
                    ping_interval=_PING_SECONDS, **_login(self._target, self._options),
                )  # fmt: skip
                link.failure = None
                await link.unless_it_fails(self._welcome(link))
                return link
            except Exception as error:
                # Keep the first refusal: it explains more than another server that is unreachable.
                if not isinstance(failure, nats.errors.Error):
                    failure = link.failure if isinstance(link.failure, ssl.SSLError) else error
                self._hosts.append(self._hosts.pop(0))
                await _end(link)
            except BaseException:
                self._hosts.append(self._hosts.pop(0))
                self._ending = asyncio.ensure_future(_end(link))
                raise
        assert failure is not None  # An endpoint has a host.
        raise failure

    def _leave(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._hosts.append(self._hosts.pop(0))
        link.fail(TimeoutError("no answer in time"))
        self._ending = asyncio.ensure_future(_end(link))

    def close(self) -> None:
        """End the connection; idempotent."""
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(_end(link), _loop()).result(_CLOSE_SECONDS)


async def _end(link: Link) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(link.connection.close(), _CLOSE_SECONDS)


def _login(target: Endpoint, options: Options) -> dict[str, Any]:
    """nats-py's arguments; raises `ValueError` for credentials that are incomplete or too many."""
    user, password = target.user or options.user, target.password or options.current_password()
    token = given_or_in_file(options.token, "token_file", options.token_file)
    # A user alone is a token, as other clients read nats://token@host.
    as_user = {"token": user} if password is None else {"user": user, "password": password}
    ways: dict[str, tuple[str | None, dict[str, Any]]] = {
        "user": (user, as_user),
        "token": (token, {"token": token}),
        "nkey_file": (options.nkey_file, {"nkeys_seed": options.nkey_file}),
        "credentials_file": (
            options.credentials_file,
            {"user_credentials": options.credentials_file},
        ),
    }
    given = [name for name, (value, _) in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are set together: leave all but one out")
    for name in given:
        value, arguments = ways[name]
        if name.endswith("_file") and value is not None:
            first_line(name, value)
        return arguments
    if password is not None:
        raise ValueError("the password ($RDZV_PLUGINS_PASSWORD) needs a user: set one with user=")
    return {}


def _grant(prefix: str, options: Options) -> str:
    """The permissions that a user needs, in the server's words."""
    verbs = ["INFO", "MSG.GET", "PURGE", *(["CREATE"] if options.create_bucket else ())]
    api = f"{_api(options)}.STREAM"
    to = [f"{prefix}.>", *(f"{api}.{verb}.KV_{options.bucket}" for verb in verbs)]
    of = [prefix.replace("$KV.", "$RKV.", 1) + ".>", "_INBOX.>"]
    named = ["[" + ", ".join(f'"{it}"' for it in subjects) + "]" for subjects in (to, of)]
    return f"publish: {named[0]}, subscribe: {named[1]}"


def _api(options: Options) -> str:
    return f"$JS.{options.domain}.API" if options.domain else "$JS.API"


def _answer(message: Msg) -> dict[str, Any]:
    """An answer of JetStream; raises its error."""
    found: dict[str, Any] = msgspec.json.decode(message.data)
    if error := found.get("error"):
        raise APIError.from_error(error)
    return found


async def _together(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all of ``work`` concurrently; if one fails, cancel the rest."""
    tasks = [asyncio.ensure_future(it) for it in work]
    try:
        return [*await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's loop, but each name is looked up in a daemon thread.

    The process would wait for asyncio's own threads at its end, however long a resolver takes.
    """

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:
        work = partial(look_up, host, port, _LONGEST_LOOK_UP)
        return await asyncio.wrap_future(in_background("rdzv-nats-name", work), loop=self)


_started: asyncio.AbstractEventLoop | None = None
_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, in a thread of its own."""
    global _started
    with _starting:
        if _started is None:
            loop = _Loop()
            thread = threading.Thread(target=loop.run_forever, name="rdzv-nats", daemon=True)
            try:
                thread.start()
            except BaseException:
                loop.close()
                raise
            _started = loop
        return _started


def _forget_loop() -> None:
    # A forked child has the loop, but not its thread.
    global _started, _starting
    _started, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)


def _token(part: str) -> str:
    """A percent-encoded segment as a part of a subject."""
    return part.replace(".", "%2E").replace("~", "%7E").replace("%", "=")


def _subject(path: str) -> str:
    """A path as parts of a subject."""
    return ".".join(_token(quote(part, safe="")) or "=" for part in path.split("/"))


def _path(subject: str) -> str:
    """The path of a subject's parts."""
    parts = ("" if part == "=" else unquote(part.replace("=", "%")) for part in subject.split("."))
    return "/".join(parts)
