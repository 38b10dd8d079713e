"""A bucket as a store: each key of a run is an object, and writes are conditional on its ETag."""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import logging
import os
import random
import re
import secrets
import threading
import time
from abc import abstractmethod
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import closing, suppress
from contextvars import Context
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, TypeVar, TypeVarTuple
from urllib.parse import quote, unquote

from rdzv_plugins.kv import (
    Capabilities,
    ClientClosedError,
    LateCredentialsError,
    RendezvousStateError,
)
from rdzv_plugins.kv.base import (
    STAMP_BYTES,
    Limit,
    Problem,
    Stored,
    WokenError,
    busy,
    clock_hint,
    find_problem,
    refused,
    segments,
    stamped,
)
from rdzv_plugins.kv.epochs import MARK, Epoch, EpochClient
from rdzv_plugins.kv.findings import Finding, Mark, of_connection
from rdzv_plugins.settings.endpoint import Place, parse_endpoint, redact, redact_urls
from rdzv_plugins.settings.options import OptionError
from rdzv_plugins.settings.parsing import cannot_import
from rdzv_plugins.settings.run_ids import RESERVED

log = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Stores give an object's time of writing in whole seconds.
_WHOLE_SECONDS = 1.0

# A path has at most 1,024 bytes, and a name in it 255 if the store keeps each object in a file.
_LONGEST_NAME = 200

# Objects that are fetched at once.
_AT_ONCE = 16
# A service answers within a fraction of this time; `_ask` ends a request that has a shorter
# time-out.
_LONGEST_ATTEMPT = "5s"

# The most expired runs that one `expire` removes, and seconds since their expiry at least.
_SWEEP, _SWEEP_AFTER = 20, 60.0

# obstore's errors, by name, because only a new client imports obstore.
_ABSENT = {"NotFoundError", "FileNotFoundError"}
_HELD = {"AlreadyExistsError", "FileExistsError", "PreconditionError"}
_DENIED = {"UnauthenticatedError", "PermissionDeniedError", "PermissionError"}

_MARK_NAME = "mark"
# The folder of objects with which `_prove` tests conditional writes; no run has this name.
_PROOF = "~conditions"
# This many writers race, and only one may win. SeaweedFS delays concurrent writers by 1 s.
_WRITERS = 2
_NO_TAG = '"00000000000000000000000000000000"'

# Clocks that differ by fewer seconds are not reported: a request may have taken as long.
_CLOCKS_DIFFER = 5.0
_CLOCK_ADVICE = "have NTP set it: services refuse what is signed 15 minutes off"
# By store with tested conditional writes: its clock in Unix seconds, minus this host's monotonic
# clock. The difference is too small by at most a second and the time of one request.
_clocks: dict[str, float] = {}

# The meanings of errors, by a pattern of the class and the text; the first match counts.
_PROBLEMS = {
    # AWS reports an expired token with the status 400.
    rf"^({'|'.join(_DENIED)}): |\b(ExpiredToken|InvalidToken|TokenRefreshRequired)\b": Problem(
        "refused the credentials ({said}){clock}; they must allow to get, put, delete and list "
        "objects under '{above}/', and so must policies and network rules",
        denied=True,
    ),
    # The bucket may have just been created.
    f"^({'|'.join(_ABSENT)}): ": Problem(
        "has no such bucket ({said}); create it, or name another; nodes that run write their run "
        "again",
        retryable=True,
    ),
    # A store that rejects conditional writes.
    "^NotSupportedError: |: .*(NotImplemented|A header you provided implies)": Problem(
        "knows no conditional writes ({said}); take another store", state=True
    ),
    r"(?i)\b(429|503|Slow ?Down|ServerBusy|TooManyRequests|OperationTimedOut)\b": replace(
        busy("raise keep_alive_interval and poll_interval_max"), undone=False
    ),
    r"(?i)^(?!GenericError: )|(?:status|code|error)[: ]+4\d\d\b": refused(
        "are bucket, region and url right?"
    ),
}
# The server's time in an error of S3 or Azure.
_SERVER_TIME = re.compile(r"(?:<ServerTime>|\bTime:)(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
# obstore says this only in its "Debug source".
_UNTRUSTED = re.compile(r"InvalidCertificate\(\s*(\w+)")
_SPEAKS_NO_TLS = "InvalidMessage("
_CAUSE = re.compile(r'\b(?:error|message): "([^"\n]{1,100})"')
# The services that give a host its own credentials.
_METADATA = re.compile(r"169\.254\.|/metadata/identity/|External AWS credential provider")
# obstore says this of a folder with a name that it cannot write, and lists none of the folder.
_UNLISTABLE = re.compile("object with invalid path")
# obstore's threads release Python objects shortly after an answer.
# Without this pause at exit, 1 to 5 of 100 processes died of SIGABRT.
_REST_SECONDS = 0.1
# During the exit no request begins. A store that does not answer delays the exit by at most this.
_LONGEST_END = 1.0
_URL = re.compile(r"https?://[^/\s@?#][^\s@?#]*")
# obstore quotes the URL, with an object's name, and the time: "GET http://... in 503.2µs".
_REQUEST = re.compile(r"https?://\S+( in \S+)?")
_LONG_URL = re.compile(r"(https?://\S{80})\S+")


class _Guard(NamedTuple):
    """The ETag of an object, and when the store wrote it."""

    tag: str
    written: float


class UnlistableError(Exception):
    """A folder has a name that obstore cannot write."""


class _Loop(asyncio.SelectorEventLoop):
    """Ignores late answers to given-up requests, for which obstore would print a traceback."""

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)


class _Requests:
    """Counts the running requests of all clients: the process exits only after they have ended."""

    def __init__(self) -> None:
        # obstore's threads run in the process of the first request, but not in its forked children.
        self.process: int | None = None
        self._number, self._over = 0, False
        self._changed = threading.Condition()

    def begin(self) -> bool:
        """Count a request; False: the process is ending."""
        with self._changed:
            if self.process is None:
                self.process = os.getpid()
                atexit.register(self._end_all)
            if not self._over:
                self._number += 1
            return not self._over

    def end(self) -> None:
        with self._changed:
            self._number -= 1
            self._changed.notify_all()

    def _end_all(self) -> None:
        if self.process != os.getpid():
            return
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: self._number == 0, _LONGEST_END)
        time.sleep(_REST_SECONDS)


_requests = _Requests()


class BucketClient(EpochClient):
    """One run in a bucket."""

    capabilities = Capabilities(
        push=False, linearizable=True, batch=False, ttl=False, max_value_bytes=4 << 20
    )
    scheme: ClassVar[str]
    """The scheme of the endpoint."""
    # Each key is a request of its own.
    batch = (20, 8 << 20)
    mark_seconds = 1.0

    def __init__(self, endpoint: str, namespace: str, options: Any, request_timeout: float) -> None:
        try:
            self._api: Any = import_module("obstore")
        except ImportError as error:
            extra = f"rdzv-plugins[{self.name}]"
            raise cannot_import(f"the {self.name} backend", extra, error) from error
        bucket, folder = self._parse(endpoint)
        url = self._url(options)
        if url is not None and not _URL.fullmatch(url):
            raise ValueError(
                f"the url '{redact(url)}' must begin with http:// or https:// and name a host, "
                "without a user or parameters"
            )
        where = f" of {redact(url)}" if url else ""
        super().__init__(f"{self.name} at {redact(endpoint)}{where}", request_timeout)
        if url:
            self.named_by = "the url"
        self.shortest_poll = options.poll_interval_min
        self.longest_poll = options.poll_interval_max
        *prefix, run = segments(namespace, options.prefix)
        self._above = "/".join(filter(None, (*folder.split("/"), *prefix)))
        # Shorten a long id; no code reads a run's id from its folder.
        short = f"{run[:_LONGEST_NAME]}+{hashlib.sha256(run.encode()).hexdigest()[:32]}"
        self._run = f"{self._above}/{run if len(run) <= _LONGEST_NAME else short}"
        self._is_plain = (url or "").startswith("http://")
        more: dict[str, Any] = {
            "client_options": {
                "timeout": _LONGEST_ATTEMPT, "connect_timeout": _LONGEST_ATTEMPT,
                "allow_http": self._is_plain,
            },
            # The base class retries requests.
            "retry_config": {"max_retries": 0},
        }  # fmt: skip
        try:
            self._store = self._make_store(bucket, options, more)
        except self._api.exceptions.BaseError as error:
            raise ValueError(
                f"the options or the credentials in the environment are not valid: {_said(error)}; "
                "correct what that names"
            ) from None
        # By path: the objects as they were last listed; a list fetches only what has changed.
        self._held: dict[str, Stored] = {}
        self._connect(self._prove)
        if not run.startswith(quote(RESERVED)):
            self._connect(self._present)

    @abstractmethod
    def _make_store(self, bucket: str, options: Any, more: dict[str, Any]) -> Any:
        """obstore's store; raises `ValueError`."""

    @classmethod
    def _url(cls, options: Any) -> str | None:
        """The service's URL; None: the cloud's own."""
        url: str | None = options.url
        return url

    @classmethod
    def locate(cls, endpoint: str) -> Place:
        return Place()  # A bucket's name is not a host.

    @classmethod
    def _parse(cls, endpoint: str) -> tuple[str, str]:
        """The bucket, and the folder in it."""
        example = f"{cls.scheme}://bucket/folder"
        if not endpoint.strip():
            raise ValueError(f"the endpoint must name the bucket, as in {example}")
        found = parse_endpoint(endpoint, default_port=0, schemes=(cls.scheme,))
        found.refuse_all_but(path=True)
        if found.user or found.password or len(found.hosts) != 1 or found.hosts[0][1]:
            raise ValueError(f"the endpoint must name a bucket and no more, as in {example}")
        return found.hosts[0][0], "/".join(filter(None, found.path.split("/")))

    # The hooks.

    def _read_at(self, paths: Iterable[str], limit: Limit) -> dict[str, Stored]:
        names = {path: self._name(path) for path in paths}
        found = self._ask(limit, lambda: self._fetch(names.values()))
        return {path: found[name] for path, name in names.items() if name in found}

    def _scan_at(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        # A bucket lists whole folders.
        where = self._name(prefix.rpartition("/")[0])

        async def everything() -> dict[str, Stored]:
            listed = dict(await self._list(where))
            held = {path: it for path, it in self._held.items() if path in listed}
            same = {path: it for path, it in held.items() if it.guard.tag == listed[path]}
            return same | await self._fetch(listed.keys() - same.keys())

        try:
            found = self._ask(limit, everything)
        except UnlistableError:
            # Another program has written objects that obstore cannot delete: begin another epoch.
            self._begin_epoch(self._present(limit, fresh=True), limit)
            return {}
        # Forget deleted objects, because in a long run many nodes come and go.
        others = {p: it for p, it in [*self._held.items()] if not p.startswith(f"{where}/")}
        self._held = others | found
        read = {_path(name[len(self._run) + 1 :]): it for name, it in found.items()}
        return {path: it for path, it in read.items() if path and path.startswith(prefix)}

    def _replace_at(self, path: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        tag = seen.guard.tag if seen is not None else None
        return self._ask(limit, lambda: self._write(self._name(path), data, tag)) is not None

    def _put_at(self, values: Mapping[str, bytes], limit: Limit) -> None:
        async def each() -> None:
            for path, data in values.items():
                name = self._name(path)
                await self._api.put_async(self._store, name, data, use_multipart=False)

        self._ask(limit, each)

    def _delete_at(self, paths: Iterable[str], limit: Limit) -> None:
        self._remove([*map(self._name, paths)], limit)

    def _empty(self, epoch: str, limit: Limit) -> bool:
        return self._clear(self._name(epoch), limit)

    def _server_time(self) -> float:
        """The store's time; never later than its clock."""
        return _clocks[self.where] + time.monotonic()

    def _age(self, epoch: Epoch, mark: Stored, limit: Limit) -> float:
        written: float = mark.guard.written
        return self._server_time() - written - _WHOLE_SECONDS

    def _sweep(self, limit: Limit) -> None:
        list_folders = partial(self._api.list_with_delimiter_async, self._store, self._above)
        try:
            listed: Any = self._ask(limit, list_folders)
        except UnlistableError:
            return
        runs = [str(it) for it in listed["common_prefixes"]]
        others = [f"{it}/{_MARK_NAME}" for it in runs if it != self._run]
        some = random.sample(others, min(len(others), _SWEEP))
        for name, found in self._ask(limit, lambda: self._fetch(some)).items():
            if self._has_ended(found, limit, _SWEEP_AFTER):
                # Not all of the folder, which may be another team's prefix.
                folder = name.removesuffix(_MARK_NAME)
                epochs = {Epoch().name, Epoch.of(found).name}
                # Delete the mark last: without the mark the default epoch counts again.
                if all(self._clear(f"{folder}{it}", limit) for it in epochs):
                    self._remove([name], limit)

    def _problem(self, error: Exception) -> Problem | None:
        said, kind = _said(error), type(error).__name__
        if isinstance(error, TimeoutError):
            return self._unreachable(error)
        if not type(error).__module__.startswith("obstore") and kind not in _ABSENT | _DENIED:
            return None
        problem = find_problem(
            _PROBLEMS, _REQUEST.sub("", f"{kind}: {said}"), said=said, timeout=self.timeout,
            clock=_clock(error), above=self._above,
        )  # fmt: skip
        if problem is not None:
            return problem
        if (untrusted := _UNTRUSTED.search(str(error))) is not None:
            return Problem(
                f"failed the TLS handshake ({untrusted[1]}): the certificate must be valid by this "
                "host's clock and name the host of the url, and $SSL_CERT_FILE the PEM file of an "
                "authority that this host does not know"
            )
        if _SPEAKS_NO_TLS in str(error):
            return Problem(
                f"does not speak TLS ({said}); write http:// in the url, or name the port for TLS"
            )
        if (cause := _CAUSE.search(str(error).partition("Debug source")[2])) is not None:
            said = f"{said}: {cause[1]}"
        return self._unreachable(OSError(said), undone="kind: Connect" in str(error))

    def inspect(self) -> Iterable[Finding]:
        # Signatures send no secret.
        yield of_connection(not self._is_plain, False, [])
        ahead = self._host_ahead
        values = {"ahead_seconds": round(ahead, 1)}
        if abs(ahead) >= _CLOCKS_DIFFER:
            found = f"this host's is {ahead:+.0f} s off the store's, whose time counts"
            yield Finding(Mark.WARNING, "clock", found, _CLOCK_ADVICE, values)
        else:
            yield Finding(Mark.OK, "clock", "this host's and the store's agree", values=values)

    # Requests.

    def _name(self, path: str) -> str:
        """The name of the object."""
        return f"{self._run}/{_MARK_NAME if path == MARK else _encoded(path)}"

    def _prove(self, limit: Limit) -> None:
        """Test once in this process whether the store's conditional writes work; learn its time.

        Raises `OptionError` if the store lets two concurrent writers win.
        """
        if self.where in _clocks:
            return
        path = "/".join(filter(None, (self._above, _PROOF, secrets.token_hex(8))))
        # No writer may win this race. It also opens the connections, so that the next writers meet.
        self._race(path, _NO_TAG, 0, "If-Match", limit)
        # Extend the limit for four more requests, because the store answers.
        limit = Limit(limit.deadline + 4 * self.timeout, limit.wake)
        (won,) = self._race(path, None, 1, "If-None-Match", limit)
        self._race(path, won, 1, "If-Match", limit)
        written: Any = self._ask(limit, lambda: self._api.head_async(self._store, path))
        _clocks[self.where] = written["last_modified"].timestamp() - time.monotonic()
        self._remove([path], limit)
        if abs(self._host_ahead) >= _CLOCKS_DIFFER:
            log.warning(
                "%s: this host's clock is %s s off the store's, whose time counts; %s",
                self.where,
                f"{self._host_ahead:+.0f}",
                _CLOCK_ADVICE,
            )

    def _race(
        self, path: str, tag: str | None, winners: int, header: str, limit: Limit
    ) -> list[str]:
        """Let `_WRITERS` writers race; returns the winners' ETags, ``winners`` of them."""

        async def at_once() -> list[str | None]:
            writes = (self._write(path, stamped(b""), tag) for _ in range(_WRITERS))
            return await asyncio.gather(*writes)

        won = [it for it in self._ask(limit, at_once) if it is not None]
        if len(won) > winners:
            did = "replaced what was not there" if tag == _NO_TAG else "wrote one object"
            raise OptionError(
                f"the store ignores {header}, or looks before it writes: {len(won)} of {_WRITERS} "
                f"writers at once {did}, so that nodes would not meet. Take a version of the "
                "store, or of the gateway before it, that knows conditional writes"
            )
        if len(won) < winners:
            raise ValueError(f"none of {_WRITERS} writers at once wrote an object")
        return won

    @property
    def _host_ahead(self) -> float:
        """Seconds by which this host's clock is ahead of the store's."""
        return time.time() - self._server_time()

    async def _write(self, path: str, data: bytes, tag: str | None) -> str | None:
        """Write if the object has the ETag ``tag`` (None: is absent); None: it has another one."""
        mode: Any = "create" if tag is None else {"e_tag": tag}
        try:
            written = await self._api.put_async(
                self._store, path, data, mode=mode, use_multipart=False
            )
        except Exception as error:
            gone = tag is not None and _is_absent(error)
            if gone or type(error).__name__ in _HELD:
                return None
            raise
        return str(written["e_tag"])

    async def _get(self, path: str) -> Stored | None:
        try:
            answer = await self._api.get_async(self._store, path)
            # This package has not written a larger value, so it counts as absent.
            fits = answer.meta["size"] <= self.capabilities.max_value_bytes + STAMP_BYTES
            data = bytes(await answer.bytes_async()) if fits else b""
            written = answer.meta["last_modified"].timestamp()
            return Stored.parse(data, _Guard(str(answer.meta["e_tag"]), written))
        except Exception as error:
            if _is_absent(error):
                return None
            raise

    async def _fetch(self, paths: Iterable[str]) -> dict[str, Stored]:
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(path: str) -> tuple[str, Stored | None]:
            async with room:
                return path, await self._get(path)

        read = await asyncio.gather(*map(one, paths))
        return {path: it for path, it in read if it is not None}

    async def _list(self, folder: str) -> list[tuple[str, str]]:
        """(path, ETag) of each object in ``folder``."""
        found: list[tuple[str, str]] = []
        async for page in self._api.list(self._store, prefix=folder, chunk_size=1000):
            found += [(str(it["path"]), str(it["e_tag"])) for it in page]
        return found

    def _clear(self, folder: str, limit: Limit) -> bool:
        """Delete all objects in ``folder``; False: obstore cannot list or name some of them."""
        try:
            listed = self._ask(limit, lambda: self._list(folder))
        except UnlistableError:
            return False
        self._remove([path for path, _ in listed], limit)
        return True

    def _remove(self, paths: list[str], limit: Limit) -> None:
        async def remove() -> None:
            if paths:
                await self._api.delete_async(self._store, paths)

        try:
            self._ask(limit, remove)
        except Exception as error:
            if not _is_absent(error):
                raise

    def _ask(self, limit: Limit, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request within the limit; raises `WokenError` as soon as its wake rings."""
        if _requests.process not in (None, os.getpid()):
            raise RendezvousStateError(
                f"{self.where} cannot be asked in a process that was forked from one that has "
                "asked a bucket, for obstore's threads survive no fork: start it by spawn"
            )
        wake = limit.wake
        seconds = limit.seconds
        if not _requests.begin():
            raise ClientClosedError(self.where) if wake is None else WokenError
        try:
            # A new loop costs only 0.1 of the 0.8 ms of CPU time of a request.
            with closing(_Loop()) as loop:

                async def bounded() -> T:
                    task = asyncio.ensure_future(request())
                    if wake is not None:
                        loop.add_reader(wake.fd, task.cancel)
                    try:
                        return await asyncio.wait_for(task, seconds)
                    except asyncio.CancelledError:
                        raise WokenError from None
                    finally:
                        if wake is not None:
                            loop.remove_reader(wake.fd)

                return loop.run_until_complete(bounded())
        except Exception as error:
            if _UNLISTABLE.search(str(error)):
                raise UnlistableError from error
            if not _METADATA.search(said := _said(error)):
                raise
            raise LateCredentialsError(
                f"{self.where} cannot be asked without credentials ({said}); set those of the "
                "environment, or give this host a role"
            ) from error
        finally:
            _requests.end()


def _clock(error: Exception) -> str:
    """`clock_hint` for the server's time, which a refusal may contain."""
    told = _SERVER_TIME.search(str(error))
    with suppress(ValueError):
        return clock_hint(datetime.fromisoformat(f"{told[1]}+00:00").timestamp()) if told else ""
    return ""


def _is_absent(error: Exception) -> bool:
    """Whether the object is missing, and its bucket exists."""
    return type(error).__name__ in _ABSENT and not _NO_BUCKET.search(str(error))


def _said(error: Exception) -> str:
    """The error in one line, with the service's code instead of its whole answer."""
    text = _LONG_URL.sub(r"\1…", str(error).partition("Debug source")[0])
    said = redact_urls(" ".join(text.partition(": <")[0].split())[:300])
    code = re.search(r"<Code>(\w+)</Code>", text)
    return f"{said}, {code[1]}" if code else said


def _encoded(path: str) -> str:
    """Percent-encode each segment; "~" stands for an empty segment."""
    return "/".join(map(_segment, path.split("/")))


def _segment(part: str) -> str:
    if not part:
        return "~"
    encoded = quote(part, safe="").replace("~", "%7E")
    if len(encoded) <= _LONGEST_NAME:
        return encoded if encoded.strip(".") else encoded.replace(".", "%2E")
    # A long run id: base64 is shorter than percent-encoding. Its parts look like "+AA/+BB+".
    dense = urlsafe_b64encode(part.encode()).decode().rstrip("=")
    names = (dense[it : it + _LONGEST_NAME] for it in range(0, len(dense), _LONGEST_NAME))
    return f"+{'/+'.join(names)}+"


def _path(encoded: str) -> str | None:
    """The path that ``encoded`` stands for; None: this package has not written it."""
    parts: list[str] = []
    dense: str | None = None
    try:
        for name in encoded.split("/"):
            if name.startswith("+"):
                dense = (dense or "") + name.strip("+")
                if name.endswith("+"):
                    padding = "=" * (-len(dense) % 4)
                    parts.append(urlsafe_b64decode(dense + padding).decode())
                    dense = None
            else:
                parts.append("" if name == "~" else unquote(name))
    except ValueError:
        return None
    path = "/".join(parts)
    return path if _encoded(path) == encoded else None
