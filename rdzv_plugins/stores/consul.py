"""HashiCorp Consul 1.7 and later.

A thin client over Python's own ``http.client``: a request takes a fifth to a third of py-consul's
time, ``/v1/txn`` reads or writes together what belongs together, and a blocking query on a socket
of our own can be ended at once; so nothing needs to be installed.

A run is the keys ``<prefix>/<run id>/=<key>!``, percent-encoded: the "!" lets a read of a tree, the
only one that a transaction survives when there is nothing to read, find exactly one key. Consul
neither moves an index nor wakes anybody for a value that stays the same, and after a restart with
an empty memory its indices come back; so each value begins with eight random bytes. A write is
guarded by ModifyIndex.

Consul's sessions end at least ten seconds late and delete only keys that they lock, so
`Client.expire` leaves a mark instead, ``<prefix>/!expire/<run id>!``: the time after which the run
reads as empty, on the agent's clock, which is in the Date of each of its answers. Whoever writes to
an expired run removes it, and so does the next run under the same prefix that expires.

Limits: linearizable (consistent reads). Values up to 384,000 bytes, which is some 38,000 nodes in
the round document. An agent takes 200 connections from one address (``http_max_conns_per_client``)
and a node needs up to three: let each host ask its own agent. Highly available with three or five
servers, while most of them live; `Client.put_many` is atomic up to 63 keys and 384,000 bytes.
A token needs ``key_prefix "<prefix>/" { policy = "write" }``.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from socket import gaierror
from ssl import SSLEOFError, SSLError, SSLSyscallError, SSLZeroReturnError
from typing import Any
from urllib.parse import quote, unquote

from rdzv_plugins.config import ServerOptions, first_line, option, parse_endpoint, redact
from rdzv_plugins.kv import (
    Capabilities,
    Entry,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
)
from rdzv_plugins.stores._consul_api import Api, Item, RefusedError
from rdzv_plugins.stores._consul_http import Http, InterruptedRequest
from rdzv_plugins.stores._stamped import Seen, StampedClient, entry_of, segments, stamped
from rdzv_plugins.stores._tls import tls_context, tls_failure

__all__ = ["Client", "Options"]

_LARGEST_VALUE = 384_000

# Of the 64 operations of a transaction one reads the mark.
_BATCH = 63

# A parked query is renewed this often: it finds a server that lost its memory under it.
_LONGEST_PARK = 10.0

# Expired runs that one `expire` removes.
_SWEEP = 20


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the consul backend, for endpoints ``host:port``, ``http://``, ``https://`` (TLS)
    and several hosts, agents of one cluster, of which one that answers is asked.

    ======================= ======= ===============================================================
    option                  default meaning
    ======================= ======= ===============================================================
    token                   none    ACL token, only from $RDZV_PLUGINS_TOKEN; none: the password.
                                    With a token, user and password are HTTP basic authentication
    token_file              none    a file whose first line is the ACL token
    datacenter              none    datacenter; none: the agent's own
    namespace               none    namespace (Consul Enterprise)
    partition               none    admin partition (Consul Enterprise)
    ======================= ======= ===============================================================
    """

    token: str | None = option(None, secret=True)
    token_file: str | None = option(None)
    datacenter: str | None = option(None)
    namespace: str | None = option(None)
    partition: str | None = option(None)


class Client(StampedClient):
    """One run on Consul: a pool of connections for requests, and one a parked waiter."""

    name = "consul"
    options = Options
    capabilities = Capabilities(
        push=True, linearizable=True, batch=True, ttl=False, max_value_bytes=_LARGEST_VALUE
    )

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        super().__init__(f"consul at {redact(endpoint) or 'localhost'}", request_timeout)
        *prefix, run = segments(namespace, options.prefix)
        self._prefix = "/".join(prefix)
        self._keys, self._mark = self._places(run)
        scope = {"Namespace": options.namespace, "Partition": options.partition}
        query = {"dc": options.datacenter, "ns": options.namespace, "partition": options.partition}
        self._interrupts = 0
        self._http = _connections(endpoint, options, request_timeout)
        self._api = Api(
            self._http,
            {name: value for name, value in query.items() if value},
            {name: value for name, value in scope.items() if value},
        )
        try:
            # Unlike a transaction, this is not silently empty for a token that may not read.
            self._call(lambda deadline: self._api.query(self._mark, {}, deadline))
        except BaseException:
            self.close()
            raise

    def put(self, key: str, value: bytes) -> Version:
        self.check_size(key, value)
        stored = stamped(value)
        self._call(lambda deadline: self._put_batch([self._set(key, stored)], deadline))
        return entry_of(stored).version

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def list(self, prefix: str) -> dict[str, Entry]:
        tree = self._keys + quote(prefix, safe="")
        return self._call(lambda deadline: self._read([tree], deadline))

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        until = time.monotonic() + timeout
        interrupts = self._interrupts

        def wanted() -> bool:
            return not self._closed and interrupts == self._interrupts

        failures = 0
        while wanted():
            try:
                seen = self._call(lambda deadline: self._look(key, deadline, wanted))
                if seen is None:
                    return None
                if seen.entry is not None and seen.entry.version != version:
                    return seen.entry
                entry = self._park(key, seen, until, wanted)
            except InterruptedRequest:
                return None
            except RendezvousConnectionError:
                if not wanted():
                    return None
                raise
            except Exception as error:
                if not self._is_passing(error):
                    raise self._explain(error) from error
                # What is asked next is retried, and finds what was missed.
                time.sleep(min(0.5, 0.01 * 2**failures))
                failures = min(failures + 1, 6)
                continue
            failures = 0
            if entry is not None or time.monotonic() >= until:
                return entry
        return None

    def interrupt(self) -> None:
        self._interrupts += 1
        self._http.shut()

    def expire(self, seconds: float) -> None:
        def request(deadline: float) -> None:
            if seconds <= 0:
                self._remove(self._keys, self._mark, None, deadline)
                return
            read = self._api.operation("get-tree", self._mark)
            items, now = self._api.commit([read], deadline)
            while items and now >= int(items[0].stored) / 1000:
                # A later time would bring back what has expired.
                self._remove(self._keys, self._mark, items[0].modified, deadline)
                items, now = self._api.commit([read], deadline)
            end = str(round((now + seconds) * 1000)).encode()
            self._api.commit([self._api.operation("set", self._mark, end)], deadline)
            self._sweep(now, deadline)

        self._call(request)

    def close(self) -> None:
        self._closed = True
        self._http.close()

    def get_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        paths = [self._path(key) for key in keys]

        def request(deadline: float) -> dict[str, Entry]:
            found: dict[str, Entry] = {}
            for at in range(0, len(paths), _BATCH):
                found |= self._read(paths[at : at + _BATCH], deadline)
            return found

        return self._call(request)

    def put_many(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.check_size(key, value)
        for batch in _batches([self._set(key, stamped(value)) for key, value in values.items()]):
            self._call(partial(self._put_batch, batch))

    def delete_many(self, keys: Iterable[str]) -> None:
        deletes = [self._api.operation("delete", self._path(key)) for key in keys]
        for at in range(0, len(deletes), _BATCH):
            self._call(partial(self._api.commit, deletes[at : at + _BATCH]))

    def _places(self, run: str) -> tuple[str, str]:
        """Where a run's keys stand, and where its mark."""
        return f"{self._prefix}/{run}/=", f"{self._prefix}/!expire/{run}!"

    def _path(self, key: str) -> str:
        return f"{self._keys}{quote(key, safe='')}!"

    def _set(self, key: str, stored: bytes) -> dict[str, Any]:
        return self._api.operation("set", self._path(key), stored)

    def _look(self, key: str, deadline: float, wanted: Callable[[], bool]) -> Seen | None:
        """`_see` for a waiter; None: it is to end."""
        try:
            return self._see(key, deadline, wanted)
        except InterruptedRequest:
            return None

    def _see(self, key: str, deadline: float, wanted: Callable[[], bool] | None = None) -> Seen:
        read = self._api.operation("get-tree", self._path(key))
        items, mark = self._living([read], deadline, wanted)
        if not items:
            return Seen(None, (0, mark))
        return Seen(entry_of(items[0].stored), (items[0].modified, mark))

    def _replace(self, key: str, stored: bytes, seen: Seen, deadline: float) -> bool:
        index, mark = seen.guard
        if mark is not None:
            self._remove(self._keys, self._mark, mark, deadline)
            return False
        return self._api.attempt(
            [self._api.operation("cas", self._path(key), stored, index)], deadline
        )

    def _read(self, trees: Sequence[str], deadline: float) -> dict[str, Entry]:
        items, _ = self._living([self._api.operation("get-tree", tree) for tree in trees], deadline)
        start = len(self._keys)
        return {unquote(item.path[start:-1]): entry_of(item.stored) for item in items}

    def _put_batch(self, sets: Sequence[dict[str, Any]], deadline: float) -> None:
        while (mark := self._living(sets, deadline)[1]) is not None:
            # What was just written stands in an expired run: remove both, and write again.
            self._remove(self._keys, self._mark, mark, deadline)

    def _living(
        self,
        operations: Sequence[dict[str, Any]],
        deadline: float,
        wanted: Callable[[], bool] | None = None,
    ) -> tuple[Sequence[Item], int | None]:
        """Do that and read the mark; if the run is expired: nothing, and the mark's index."""
        read = self._api.operation("get-tree", self._mark)
        items, now = self._api.commit([read, *operations], deadline, wanted)
        for item in items:
            if item.path == self._mark:
                if now >= int(item.stored) / 1000:
                    return [], item.modified
                return [it for it in items if it is not item], None
        return items, None

    def _remove(self, keys: str, mark: str, index: int | None, deadline: float) -> None:
        """Delete a run and its mark, as long as the mark is the one of that index (None: any)."""
        operations = [self._api.operation("delete-tree", keys), self._api.operation("delete", mark)]
        if index is not None:
            operations.insert(0, self._api.operation("check-index", mark, index=index))
        self._api.attempt(operations, deadline)

    def _sweep(self, now: float, deadline: float) -> None:
        """Remove other runs of our prefix that expired."""
        _, marks = self._places("")
        items, _ = self._api.commit([self._api.operation("get-tree", marks[:-1])], deadline)
        past = [it for it in items if it.path != self._mark and int(it.stored) / 1000 < now]
        for item in past[:_SWEEP]:
            keys, mark = self._places(item.path[len(marks) - 1 : -1])
            self._remove(keys, mark, item.modified, deadline)

    def _park(self, key: str, seen: Seen, until: float, wanted: Callable[[], bool]) -> Entry | None:
        """Wait with blocking queries; None: look again, unless the time is up."""
        path = self._path(key)
        known = seen.entry.version if seen.entry else None
        index, _ = seen.guard
        if not index:
            # Absent: learn the index to wait from, then look again at what came meanwhile.
            deadline = time.monotonic() + self._timeout
            stored, index = self._api.query(path, {}, deadline, wanted)
            if stored is not None:
                again = self._see(key, deadline, wanted)
                if again.entry is not None:
                    return again.entry
                # It is expired; only what is written from now on counts.
                known = entry_of(stored).version
        while (remaining := until - time.monotonic()) > 0:
            # Consul adds up to a sixteenth.
            seconds = min(remaining, _LONGEST_PARK) * 16 / 17
            query = {"index": str(index), "wait": f"{math.ceil(seconds * 1000)}ms"}
            deadline = time.monotonic() + seconds + self._timeout
            stored, after = self._api.query(path, query, deadline, wanted)
            entry = None if stored is None else entry_of(stored)
            if entry is not None and entry.version != known:
                return entry
            if after < index or (entry is None and known is not None):
                # An index that goes backwards is begun anew, as Consul's documentation asks; one
                # of a key that is gone too.
                return None
            index = max(1, after)
        return None

    def _is_passing(self, error: Exception) -> bool:
        if isinstance(error, RefusedError):
            return error.status >= 500 or error.status == 429
        if isinstance(error, SSLError):
            # The others are of a failed handshake, which trying again cannot mend.
            return isinstance(error, SSLEOFError | SSLSyscallError | SSLZeroReturnError)
        return isinstance(error, OSError | HTTPException)

    def _is_undone(self, error: Exception) -> bool:
        if isinstance(error, RefusedError):
            # Without a leader, or a connection to it, an agent passes nothing on.
            text = str(error)
            unsent = "No cluster leader" in text or "rpc error getting client" in text
            return error.status == 429 or unsent
        return isinstance(error, ConnectionRefusedError | gaierror)

    def _explain(self, error: Exception) -> Exception:
        status = error.status if isinstance(error, RefusedError) else 0
        if status in (401, 403):
            return RendezvousConnectionError(
                f"{self._where} refused the token ({error}); set one in $RDZV_PLUGINS_TOKEN that "
                f'has key_prefix "{self._prefix}/" {{ policy = "write" }}'
            )
        if status == 429:
            return RendezvousConnectionError(
                f"{self._where} was too busy for {self._timeout:g} s ({error}); raise its limits "
                "(http_max_conns_per_client, rpc_rate) or keep_alive_interval"
            )
        if status == 413:
            return RendezvousStateError(
                f"{self._where} refused a value ({error}); its txn_max_req_len is below the "
                f"default, which holds {_LARGEST_VALUE:,} bytes"
            )
        if status == 400 and "HTTPS" in str(error):
            return RendezvousConnectionError(
                f"{self._where} speaks TLS; write https:// in front of the endpoint, or tls=true"
            )
        if status and status < 500:
            return RendezvousStateError(f"{self._where} refused a request: {error}")
        if isinstance(error, SSLError):
            return tls_failure(self._where, str(error))
        if status or isinstance(error, OSError | HTTPException):
            return RendezvousConnectionError(
                f"{self._where} could not be reached within {self._timeout:g} s ({error!s}); "
                "is it running and does --rdzv-endpoint name it?"
            )
        return error


def _batches(sets: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    size = 0
    for item in sets:
        length = len(item["KV"]["Value"]) + len(item["KV"]["Key"]) + 100
        if batch and (len(batch) == _BATCH or size + length > _LARGEST_VALUE):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += length
    if batch:
        yield batch


def _connections(endpoint: str, options: Options, request_timeout: float) -> Http:
    tls = options.tls or endpoint.startswith("https://")
    target = parse_endpoint(
        endpoint, default_port=8501 if tls else 8500, schemes=("http", "https", "consul")
    )
    if target.path.strip("/") or target.query:
        raise ValueError("a consul endpoint has neither a path nor parameters")
    user, password = target.user or options.user, target.password or options.secret()
    headers = {"Content-Type": "application/json"}
    token = options.token
    if token is None and options.token_file is not None:
        token = first_line("token_file", options.token_file)
    if user is not None and token is not None:
        login = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
        headers["Authorization"] = f"Basic {login}"
    if token := token or password:
        headers["X-Consul-Token"] = token
    return Http(
        target.hosts,
        tls_context(options) if tls else None,
        headers,
        request_timeout / len(target.hosts),
    )
