"""Apache ZooKeeper 3.6 and later.

A run is one znode, ``/<prefix>/<run id>``; its children ``=<key>`` are its keys, percent-encoded.
Neither ZooKeeper's version, which begins at 0 again after a delete, nor its czxid, which begins
again in an ensemble that lost its data, names a value for ever; so each value begins with eight
random bytes that do. A write is guarded by the znode's version and by that of one more child, ``#``
and the run's own random name, which every delete moves on: no znode can be deleted and made again
between the look and the write.

ZooKeeper has no time to live. `Client.expire` leaves a mark on the run's znode, whose age is taken
from the server's own modification times; an expired run reads as empty and is removed by whoever
writes to it next, or by the next run under the same prefix that expires.

Limits: linearizable (each read is preceded by a sync). Values up to 1,046,528 bytes, which is some
100,000 nodes in the round document; servers with a lower ``jute.maxbuffer`` than the default close
the connection instead. A server takes ``maxClientCnxns`` connections from one address (60 where it
is not set), a node needs one. Highly available with three servers or more, while most of them live;
`Client.put_many` is atomic up to 500 keys and 500,000 bytes. With a user, the run's znodes are open
to that user only (``CREATOR_ALL``: a client certificate is one more user, so that those who share
one let each other in), those of the prefix to all; make them beforehand otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, unquote

from kazoo.exceptions import (
    AuthFailedError,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NoNodeError,
    OperationTimeoutError,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
)
from kazoo.protocol.serialization import Sync
from kazoo.security import CREATOR_ALL_ACL

from rdzv_plugins.config import Endpoint, ServerOptions, option, parse_endpoint, redact
from rdzv_plugins.kv import (
    Capabilities,
    Entry,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
)
from rdzv_plugins.stores._stamped import (
    Seen,
    StampedClient,
    entry_of,
    segments,
    stamped,
)
from rdzv_plugins.stores._tls import tls_context, tls_failure
from rdzv_plugins.stores._zookeeper_run import BATCH, RunZnode
from rdzv_plugins.stores._zookeeper_session import NotConnectedError, ReadMany, Session

__all__ = ["Client", "Options"]

_BATCH_BYTES = 500_000


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the zookeeper backend, for endpoints ``host:port[,host:port...][/chroot]``,
    also with ``zookeeper://`` in front.

    ======================= ======= ===============================================================
    option                  default meaning
    ======================= ======= ===============================================================
    sasl                    false   log in by SASL (DIGEST-MD5); false: by the scheme "digest"
    ======================= ======= ===============================================================
    """

    sasl: bool = option(False)


class Client(StampedClient):
    """One run on ZooKeeper: one session for requests and watches."""

    name = "zookeeper"
    options = Options
    capabilities = Capabilities(
        push=True, linearizable=True, batch=False, ttl=False, max_value_bytes=1_046_528
    )

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        super().__init__(f"zookeeper at {redact(endpoint) or 'localhost'}", request_timeout)
        target = parse_endpoint(endpoint, default_port=2181, schemes=("zookeeper",))
        chroot = [part for part in target.path.split("/") if part]
        self._changed = threading.Condition()
        self._changes = 0
        self._interrupts = 0
        self._session = Session(_settings(target, options, request_timeout), self._change)
        self._run = RunZnode(self._session, [*chroot, *segments(namespace, options.prefix)])
        try:
            self._call(lambda deadline: self._run.read([], deadline))
        except BaseException:
            self.close()
            raise

    def put(self, key: str, value: bytes) -> Version:
        self.check_size(key, value)
        stored, path = stamped(value), self._path(key)

        def request(deadline: float) -> Version:
            while True:
                answer = self._session.submit(ReadMany([self._run.path]), deadline)
                writing = self._session.client(deadline).set_async(path, stored)
                run = self._run.of(self._session.result(answer, deadline)[0], deadline)
                try:
                    self._session.result(writing, deadline)
                    if run and not run.expired:
                        return entry_of(stored).version
                except NoNodeError:
                    if run and not run.expired and self._create(path, stored, deadline):
                        return entry_of(stored).version
                if run is None or run.expired:
                    self._run.begin(run, deadline)

        return self._call(request)

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def list(self, prefix: str) -> dict[str, Entry]:
        start = "=" + quote(prefix, safe="")

        def request(deadline: float) -> dict[str, Entry]:
            self._session.submit(Sync(self._run.path), deadline)
            names = self._run.children(self._run.path, deadline)
            keys = [unquote(name[1:]) for name in names if name.startswith(start)]
            return self._read(keys, deadline)

        return self._call(request)

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        until = time.monotonic() + timeout
        interrupts = self._interrupts

        def wanted() -> bool:
            return not self._closed and interrupts == self._interrupts

        while wanted():
            with self._changed:
                changes = self._changes
            try:
                entry = self._call(
                    lambda deadline: self._watch(key, deadline, wanted) if wanted() else None
                )
            except RendezvousConnectionError:
                if not wanted():
                    return None
                raise
            if entry is not None and entry.version != version:
                return entry
            with self._changed:
                while changes == self._changes and wanted():
                    remaining = until - time.monotonic()
                    if remaining <= 0:
                        return None
                    self._changed.wait(remaining)
        return None

    def interrupt(self) -> None:
        with self._changed:
            self._interrupts += 1
            self._changed.notify_all()

    def expire(self, seconds: float) -> None:
        self._call(lambda deadline: self._run.expire(seconds, deadline))

    def close(self) -> None:
        self._closed = True
        self._change()
        self._session.close()

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        names = [*keys]
        return self._call(lambda deadline: self._read(names, deadline))

    def put_many(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.check_size(key, value)
        items = [(self._path(key), stamped(value)) for key, value in values.items()]
        for batch in _batches(items):
            self._call(partial(self._put_batch, batch))

    def delete_many(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in dict.fromkeys(keys)]

        def request(deadline: float) -> None:
            while True:
                run, found = self._run.read(paths, deadline)
                if run is None or not found:
                    return
                batch = [*found][:BATCH]

                def build(transaction: Any, guard: str = run.guard, batch: Any = batch) -> None:
                    transaction.set_data(guard, b"")
                    for path in batch:
                        transaction.delete(path)

                if self._session.commit(deadline, build) and len(batch) == len(found):
                    return

        if paths:
            self._call(request)

    def _see(self, key: str, deadline: float) -> Seen:
        path = self._path(key)
        run, found = self._run.read([path], deadline)
        stored, version = found.get(path, (b"", None))
        return Seen(None if version is None else entry_of(stored), (run, version))

    def _replace(self, key: str, stored: bytes, seen: Seen, deadline: float) -> bool:
        run, version = seen.guard
        if run is None or run.expired:
            self._run.begin(run, deadline)
            return False
        path = self._path(key)

        def build(transaction: Any) -> None:
            transaction.check(run.guard, run.deletes)
            if version is None:
                transaction.create(path, stored)
            else:
                transaction.set_data(path, stored, version)

        return self._session.commit(deadline, build) is not None

    def _path(self, key: str) -> str:
        return f"{self._run.path}/={quote(key, safe='')}"

    def _read(self, keys: Sequence[str], deadline: float) -> dict[str, Entry]:
        paths = {self._path(key): key for key in keys}
        _, found = self._run.read([*paths], deadline)
        return {paths[path]: entry_of(stored) for path, (stored, _) in found.items()}

    def _watch(self, key: str, deadline: float, wanted: Callable[[], bool]) -> Entry | None:
        """Read a key such that `_change` is called when it changes afterwards."""
        path = self._path(key)
        while True:
            self._session.submit(Sync(self._run.path), deadline, wanted)
            answer = self._session.submit(ReadMany([self._run.path]), deadline, wanted)
            # One bound method: kazoo keeps a set, so waiting again and again adds nothing.
            reading = self._session.client(deadline, wanted).get_async(path, self._on_event)
            run = self._run.of(self._session.result(answer, deadline, wanted)[0], deadline)
            try:
                stored, _ = self._session.result(reading, deadline, wanted)
            except NoNodeError:
                zk = self._session.client(deadline, wanted)
                if self._session.result(zk.exists_async(path, self._on_event), deadline, wanted):
                    continue
                return None
            return entry_of(stored) if run and not run.expired else None

    def _on_event(self, event: Any) -> None:
        self._change()

    def _change(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _create(self, path: str, stored: bytes, deadline: float) -> bool:
        def build(transaction: Any) -> None:
            transaction.create(path, stored)

        return self._session.commit(deadline, build) is not None

    def _put_batch(self, batch: Sequence[tuple[str, bytes]], deadline: float) -> None:
        while True:
            run, found = self._run.read([path for path, _ in batch], deadline)
            if run is None or run.expired:
                self._run.begin(run, deadline)
                continue

            def build(transaction: Any, found: Any = found) -> None:
                for path, stored in batch:
                    if path in found:
                        transaction.set_data(path, stored)
                    else:
                        transaction.create(path, stored)

            if self._session.commit(deadline, build):
                return

    def _is_passing(self, error: Exception) -> bool:
        if isinstance(error, AuthFailedError | ConnectionLoss | SessionClosedRequireSaslError):
            return self._session.passing(error)
        return isinstance(
            error,
            OperationTimeoutError | SessionExpiredError | SessionMovedError | ThrottledOpError,
        )

    def _is_undone(self, error: Exception) -> bool:
        return isinstance(error, NotConnectedError | ThrottledOpError)

    def _explain(self, error: Exception) -> Exception:
        if isinstance(error, AuthFailedError | NoAuthError | SessionClosedRequireSaslError):
            return RendezvousConnectionError(
                f"{self._where} refused the credentials ({type(error).__name__}); set the user in "
                "the endpoint, the password in $RDZV_PLUGINS_PASSWORD, and sasl=true if the "
                "server asks for SASL"
            )
        if isinstance(error, ThrottledOpError):
            return RendezvousConnectionError(
                f"{self._where} was too busy for {self._timeout:g} s; raise its "
                "zookeeper.request_throttle_max_requests or keep_alive_interval"
            )
        if self._is_passing(error) or isinstance(error, ConnectionLoss):
            reason = self._session.reason or str(error) or type(error).__name__
            if "[SSL" in reason:
                return tls_failure(self._where, reason)
            if reason.endswith("connection broken"):
                reason += ": it hung up; does it want tls=true, or serve too many already?"
            return RendezvousConnectionError(
                f"{self._where} could not be reached within {self._timeout:g} s ({reason}); "
                "is it running and does --rdzv-endpoint name it?"
            )
        if isinstance(error, KazooException):
            return RendezvousStateError(
                f"{self._where} refused a request: {type(error).__name__} {error}".rstrip()
            )
        return error


def _batches(items: Sequence[tuple[str, bytes]]) -> Iterator[Sequence[tuple[str, bytes]]]:
    batch: list[tuple[str, bytes]] = []
    size = 0
    for path, stored in items:
        if batch and (len(batch) == BATCH or size + len(stored) > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((path, stored))
        size += len(stored) + len(path)
    if batch:
        yield batch


def _settings(target: Endpoint, options: Options, request_timeout: float) -> dict[str, Any]:
    """The arguments of `KazooClient`."""
    hosts = ",".join(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in target.hosts
    )
    # kazoo waits as long for a host that does not answer; then there must be time for another.
    settings: dict[str, Any] = {"hosts": hosts, "timeout": max(1.0, request_timeout * 2 / 3)}
    if options.tls:
        tls_context(options)
        settings |= {"use_ssl": True, "check_hostname": True, "ca": options.ca_file}
        settings |= {"certfile": options.cert_file, "keyfile": options.key_file}
    user, password = target.user or options.user, target.password or options.secret()
    if (user is None) != (password is None):
        raise ValueError("a user needs a password ($RDZV_PLUGINS_PASSWORD), and that a user")
    if options.sasl and user is None:
        raise ValueError("option 'sasl': true needs a user and $RDZV_PLUGINS_PASSWORD")
    if user is None:
        return settings
    settings["default_acl"] = CREATOR_ALL_ACL
    if not options.sasl:
        return settings | {"auth_data": [("digest", f"{user}:{password}")]}
    if find_spec("puresasl") is None:
        raise ValueError("option 'sasl': true needs a package: pip install pure-sasl")
    login = {"mechanism": "DIGEST-MD5", "username": user, "password": password}
    return settings | {"sasl_options": login}
