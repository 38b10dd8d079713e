"""etcd 3.4 and later, through its JSON gateway, as the backend ``etcd-v3``.

torch's own backends ``etcd`` and ``etcd-v2`` speak the v2 API, which etcd 3.6 has removed (pytorch
#158326, #170707). To move a job, replace ``--rdzv-backend=etcd`` by ``--rdzv-backend=etcd-v3`` and
leave the endpoint as it is.

A stored value begins with a stamp, twelve random bytes that are new with each write, and the stamp
is the version; a transaction compares it as a range of values. So a version never comes back, not
even from an etcd that lost its data and counts its revisions from 1 again, and a write whose
answer was lost is known by it. A refused transaction reads the current value in the same request.
`Client.wait` compares in a transaction as well and watches from the revision after the one at which
that was true: no change in between is missed, and there is nothing for a compaction to take away.

Limits: linearizable. Values up to 1 MiB (etcd's ``--max-request-bytes`` is 1.5 MiB), which is some
100,000 nodes in the round document. `Client.put_many` is atomic up to 128 keys and 1 MiB.
`Client.add` is a compare-and-set: 256 nodes adding to one counter at once took it some seconds.
`Client.expire` is a lease, at least two seconds with etcd's default timing, and longer if the
leader changes. A mark on the run's own path has it, and every write gives its key the mark's lease
in a transaction that compares it, so that a run ends as a whole. Three members survive the loss of
one, five of two; name them all in the endpoint.
The gateway must not be switched off (``--enable-grpc-gateway``), and it does not take a user's name
from a client certificate: with authentication on, give user and password too, and a certificate
without a common name (CN), for it refuses all others. The user's role needs readwrite on the key
prefix ``<prefix>/``.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rdzv_plugins.config import ServerOptions, parse_endpoint, redact
from rdzv_plugins.kv import (
    Capabilities,
    ClientClosedError,
    Entry,
    KeyValueClient,
    RendezvousStateError,
    Version,
    parse_counter,
)
from rdzv_plugins.kv.retry import retry
from rdzv_plugins.stores._batches import batches
from rdzv_plugins.stores._counting import outlast, uncounted
from rdzv_plugins.stores._etcd_gateway import (
    Gateway,
    decoded,
    explain,
    is_passing,
    is_undone,
)
from rdzv_plugins.stores._etcd_keys import NO_LEASE, Keys, entry_of, first_entry, stamped
from rdzv_plugins.stores._stamped import segments
from rdzv_plugins.stores._tls import tls_context

__all__ = ["Client", "Options"]

T = TypeVar("T")

_LARGEST = 1024 * 1024
# etcd's --max-txn-ops, of which the comparisons are counted apart.
_OPERATIONS = 128
# A watch is begun anew this often, in case its member hangs.
_LONGEST_PARK = 15.0


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the etcd-v3 backend, for endpoints ``host:port``, ``http://``, ``https://`` (TLS)
    and several members, separated by commas. It has none of its own.
    """


class Client(KeyValueClient):
    """One run on etcd: kept connections for requests and one connection a parked waiter."""

    name = "etcd-v3"
    options = Options
    capabilities = Capabilities(
        push=True, linearizable=True, batch=True, ttl=True, max_value_bytes=_LARGEST
    )

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        target = parse_endpoint(endpoint, default_port=2379, schemes=("http", "https"))
        secure = options.tls or target.scheme == "https"
        self._shown = redact(endpoint) or "localhost"
        self._timeout = request_timeout
        self._keys = Keys("/".join(segments(namespace, options.prefix)) + "/")
        self._woken = threading.Condition()
        self._interrupts = 0
        self._closed = False
        # That of the mark, as far as we know: every write is on condition that it is so.
        self._lease = NO_LEASE
        self._gateway = Gateway(
            target.hosts,
            tls_context(options) if secure else None,
            target.user or options.user,
            target.password or options.secret(),
            request_timeout,
        )
        try:
            # The mark would come first.
            first = self._ask("kv/range", {**self._keys.range(""), "keys_only": True, "limit": "1"})
            self._lease = self._keys.marked(first)
        except BaseException:
            self.close()
            raise

    def get(self, key: str) -> Entry | None:
        return first_entry(self._ask("kv/range", self._keys.one(key)))

    def compare_and_set(
        self, key: str, value: bytes, expected: Version | None
    ) -> tuple[Entry | None, bool]:
        self.check_size(key, value)
        comparison = self._keys.comparison(key, expected)
        if comparison is None:
            return self.get(key), False
        entry, written, _ = self._swap(key, value, comparison)
        return entry, written

    def put(self, key: str, value: bytes) -> Version:
        self.check_size(key, value)
        stored = stamped(value)
        self._write([(key, stored)])
        return entry_of(stored).version

    def delete(self, key: str) -> None:
        self._ask("kv/deleterange", self._keys.one(key))

    def list(self, prefix: str) -> dict[str, Entry]:
        found = self._ask("kv/range", self._keys.range(prefix)).get("kvs", [])
        return {
            key: entry_of(decoded(item["value"]))
            for item in found
            if (key := self._keys.relative(item))
        }

    def add(self, key: str, delta: int) -> int:
        where = f"etcd at {self._shown}"

        def attempt() -> int | None:
            current = self.get(key)
            total = parse_counter(key, current.value if current else b"0") + delta
            comparison = self._keys.comparison(key, current.version if current else None)
            _, written, doubtful = self._swap(key, str(total).encode(), comparison)
            if doubtful and not written:
                raise uncounted(key, where)
            return total if written else None

        return outlast(attempt, key, where, self._timeout)

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        deadline = time.monotonic() + timeout
        interrupts = self._interrupts
        pause = 0.01

        def going() -> bool:
            return not self._closed and self._interrupts == interrupts

        while going():
            looked = self._call(lambda: self._look(key, version, going), going=going)
            if looked is None:
                break
            entry, revision = looked
            if entry is not None and entry.version != version:
                return entry
            if time.monotonic() >= deadline:
                break
            until = min(deadline, time.monotonic() + _LONGEST_PARK)
            try:
                entry = self._watch(key, version, revision + 1, going, until)
            except TimeoutError:
                continue
            except Exception as error:
                if going() and not is_passing(error):
                    raise self._explain(error) from error
            if entry is not None:
                return entry
            # The watch broke; the next look raises if etcd stays away for the request timeout.
            with self._woken:
                if going():
                    self._woken.wait(random.uniform(0, pause))
            pause = min(2 * pause, 0.5)
        return None

    def interrupt(self) -> None:
        with self._woken:
            self._interrupts += 1
            self._woken.notify_all()
        self._gateway.interrupt()

    def expire(self, seconds: float) -> None:
        if seconds <= 0:
            self._ask("kv/deleterange", self._keys.range(""))
            return
        ttl = str(math.ceil(seconds))
        while True:
            old = self._keys.marked(self._ask("kv/range", self._keys.one("")))
            lease = NO_LEASE
            if old != NO_LEASE:
                # Also where another takes its place: it must not end before all are moved there.
                kept = self._ask("lease/keepalive", {"ID": old}).get("result", {}).get("TTL", "0")
                if kept == "0":
                    # Its keys are about to go: then we look again.
                    time.sleep(random.uniform(0.02, 0.1))
                    continue
                lease = old if kept == ttl else NO_LEASE
            if lease == NO_LEASE:
                lease = self._ask("lease/grant", {"TTL": ttl})["ID"]
                try:
                    answer = self._transact(
                        [self._keys.mark(old)],
                        [{"request_put": {**self._keys.one(""), "lease": lease}}],
                        [{"request_range": self._keys.one("")}],
                    )
                except RendezvousStateError as error:
                    if "lease not found" not in str(error):
                        raise
                    # We were held up, and it has ended.
                    continue
                if not answer.get("succeeded"):
                    there = self._keys.marked(answer["responses"][0]["response_range"])
                    # It is ours where the answer to an earlier attempt was lost.
                    if there != lease:
                        self._ask("lease/revoke", {"ID": lease})
                        continue
            self._lease = lease
            if self._move(lease) and old not in (NO_LEASE, lease):
                # Nobody can give it to a key any more, and none is left that has it.
                self._ask("lease/revoke", {"ID": old})
            return

    def close(self) -> None:
        with self._woken:
            self._closed = True
            self._woken.notify_all()
        self._gateway.close()

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for batch in batches(keys, _OPERATIONS):
            answer = self._transact([], [{"request_range": self._keys.one(key)} for key in batch])
            for key, response in zip(batch, answer["responses"], strict=True):
                if (entry := first_entry(response["response_range"])) is not None:
                    entries[key] = entry
        return entries

    def put_many(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.check_size(key, value)
        batch: list[tuple[str, bytes]] = []
        size = 0
        for key, value in values.items():
            if len(batch) == _OPERATIONS or size + len(value) > _LARGEST:
                self._write(batch)
                batch, size = [], 0
            batch.append((key, stamped(value)))
            size += len(value)
        if batch:
            self._write(batch)

    def delete_many(self, keys: Iterable[str]) -> None:
        for batch in batches(keys, _OPERATIONS):
            self._transact([], [{"request_delete_range": self._keys.one(key)} for key in batch])

    def _write(self, values: Sequence[tuple[str, bytes]]) -> None:
        while True:
            lease = self._lease
            puts = [self._keys.put(key, stored, lease) for key, stored in values]
            look = [{"request_range": self._keys.one("")}]
            answer = self._transact([self._keys.mark(lease)], puts, look)
            if answer.get("succeeded"):
                return
            self._lease = self._keys.marked(answer["responses"][0]["response_range"])

    def _swap(
        self, key: str, value: bytes, comparison: Sequence[dict[str, Any]] | None
    ) -> tuple[Entry | None, bool, bool]:
        """Write if the comparison holds: the entry there now, whether it is ours, and whether the
        answer to an attempt was lost."""
        stored = stamped(value)
        written = entry_of(stored)
        doubtful = False
        looks = [{"request_range": self._keys.one(name)} for name in (key, "")]
        while True:
            lease = self._lease
            body = {
                "compare": [*(comparison or ()), self._keys.mark(lease)],
                "success": [self._keys.put(key, stored, lease)],
                "failure": looks,
            }

            def request(body: dict[str, Any] = body) -> dict[str, Any]:
                nonlocal doubtful
                try:
                    return self._gateway.post("kv/txn", body)
                except Exception as error:
                    doubtful = doubtful or not is_undone(error)
                    raise

            answer = self._call(request)
            if answer.get("succeeded"):
                return written, True, doubtful
            there, mark = (response["response_range"] for response in answer["responses"])
            current = first_entry(there)
            # An earlier attempt whose answer was lost may be what stands there now.
            if current is not None and current.version == written.version:
                return current, True, doubtful
            self._lease = self._keys.marked(mark)
            if self._lease == lease:
                return current, False, doubtful

    def _look(
        self, key: str, version: Version | None, going: Callable[[], bool]
    ) -> tuple[Entry | None, int]:
        """The entry, unless its version is ``version``, and the revision at which that was so."""
        read = [{"request_range": self._keys.one(key)}]
        comparison = self._keys.comparison(key, version)
        body = {"failure": read, "compare": comparison} if comparison else {"success": read}
        answer = self._gateway.post("kv/txn", body, going)
        entry = None
        for response in answer.get("responses", []):
            entry = first_entry(response["response_range"])
        return entry, int(answer["header"]["revision"])

    def _watch(
        self,
        key: str,
        version: Version | None,
        revision: int,
        going: Callable[[], bool],
        deadline: float,
    ) -> Entry | None:
        """The next entry under another version; None if the watch ended before."""
        request = {**self._keys.one(key), "start_revision": str(revision), "filters": ["NODELETE"]}
        body = {"create_request": request}
        for message in self._gateway.stream("watch", body, going, deadline):
            if message.get("canceled"):
                return None
            for event in reversed(message.get("events", [])):
                entry = entry_of(decoded(event["kv"]["value"]))
                if entry.version != version:
                    return entry
        return None

    def _move(self, lease: str) -> bool:
        """Give all keys the lease of the mark; False: somebody else has given the mark another."""
        found = self._ask("kv/range", {**self._keys.range(""), "keys_only": True}).get("kvs", [])
        others = [item for item in found if item.get("lease", NO_LEASE) != lease]
        for batch in batches((self._keys.relative(item) for item in others), _OPERATIONS - 1):
            # A batch fails as a whole if one of its keys was deleted meanwhile.
            if self._attach(batch, lease) or all(self._attach([key], lease) for key in batch):
                continue
            if self._keys.marked(self._ask("kv/range", self._keys.one(""))) == NO_LEASE:
                # We were held up, and the time is over: what has not changed since is to be gone.
                for item in others:
                    revision = item["mod_revision"]
                    same = {"key": item["key"], "target": "MOD", "mod_revision": revision}
                    self._transact([same], [{"request_delete_range": {"key": item["key"]}}])
            return False
        return True

    def _attach(self, keys: Sequence[str], lease: str) -> bool:
        """Whether the keys that are there have the lease now; False: not all are, or not the mark.

        For a single key it is no matter whether it is there.
        """
        there = {"target": "VERSION", "result": "GREATER", "version": "0"}
        # The value and with it the version stay: this is no change.
        again = {"ignore_value": True, "lease": lease}
        answer = self._transact(
            [self._keys.mark(lease), *({**self._keys.one(key), **there} for key in keys)],
            [{"request_put": {**self._keys.one(key), **again}} for key in keys],
            [{"request_range": self._keys.one("")}],
        )
        if answer.get("succeeded"):
            return True
        return (
            len(keys) == 1 and self._keys.marked(answer["responses"][0]["response_range"]) == lease
        )

    def _transact(
        self,
        comparison: Sequence[dict[str, Any]],
        success: Sequence[dict[str, Any]],
        failure: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        return self._ask(
            "kv/txn", {"compare": comparison, "success": success, "failure": [*failure]}
        )

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call(lambda: self._gateway.post(path, body))

    def _call(self, request: Callable[[], T], *, going: Callable[[], bool] | None = None) -> T:
        """The one place where the gateway's errors become the contract's.

        ``going``: what breaks a wait off; it returns None then.
        """
        if self._closed and going is None:
            raise ClientClosedError(f"etcd at {self._shown}")
        go_on = going or (lambda: not self._closed)
        try:
            return retry(
                request,
                timeout=self._timeout,
                passing=lambda error: go_on() and is_passing(error),
            )
        except RendezvousStateError:
            raise
        except Exception as error:
            if going is not None and not going():
                return cast(T, None)
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> Exception:
        where = f"etcd at {self._shown}"
        if self._closed:
            return ClientClosedError(where)
        return explain(error, where, self._timeout, self._keys.base)
