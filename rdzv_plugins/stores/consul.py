"""HashiCorp Consul 1.7 and later.

A key of a run is stored as ``<prefix>/<run id>/=<epoch>/<key>!``, percent-encoded. A run that has
expired is deleted by a later run under the prefix. If each host has an agent of Consul, the clocks
of the hosts must agree within a few seconds.

Values up to 384,000 bytes. An agent accepts 200 connections per address
(``http_max_conns_per_client``) and a node holds three, so each host should have an agent.

The token needs ``key_prefix "<prefix>/" { policy = "write" }``.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, ClassVar
from urllib.parse import quote, unquote, urlencode

import consul.base
from consul import ConsulException

from rdzv_plugins.kv.base import (
    Limit,
    Problem,
    Stored,
    busy,
    find_problem,
    full,
    refused,
    segments,
    version_of,
)
from rdzv_plugins.kv.contract import Capabilities
from rdzv_plugins.kv.epochs import MARK, EpochClient
from rdzv_plugins.kv.findings import Finding, Mark, of_version
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.settings.endpoint import Endpoint, parse_endpoint, redact
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import ServerOptions, given_or_in_file, option
from rdzv_plugins.stores._http import Request, http_of, http_problem, time_of

_LARGEST_VALUE = 384_000

# The server holds a parked query for this many seconds. The next wait for the same key reuses it.
_LONGEST_PARK = 10.0

# The most expired runs that one `expire` removes.
_SWEEP = 20

# The meanings of errors, by a pattern of status and text; the first match counts.
_PROBLEMS = {
    "^HTTP 401|^HTTP 40[39]: .*Permission denied|^HTTP 403: .*ACL ": Problem(
        "refused the token ({said}); set one in $RDZV_PLUGINS_TOKEN that has {grant}", denied=True
    ),
    "^HTTP 403": Problem(
        "refused the token ({said}, perhaps a proxy's answer); set one in $RDZV_PLUGINS_TOKEN that "
        "has {grant}"
    ),
    "^HTTP 429": busy(
        "raise its limits (http_max_conns_per_client, rpc_rate) or keep_alive_interval"
    ),
    "^HTTP 413": Problem(
        "refused a value ({said}); its txn_max_req_len is below the default, which allows "
        f"{_LARGEST_VALUE:,} bytes",
        state=True,
    ),
    "^HTTP 400.*HTTPS": Problem(
        "requires TLS; write https:// in front of the endpoint, or tls=true"
    ),
    "^HTTP [1-4]": refused(
        "a proxy in between must let /v1/kv and /v1/txn through, and the token needs {grant}"
    ),
    # Some of the servers may have written the value.
    "no space left": replace(full("make room on the disks of its servers"), undone=False),
}

_FULL = ", and does its http_max_conns_per_client let this host connect once more"


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the consul backend, for endpoints ``host:port``, ``http://``, ``https://`` (TLS)
    and several hosts: agents of one cluster, of which the client uses one that answers.
    """

    token: str | None = option(None, secret=True)
    """ACL token; set it in $RDZV_PLUGINS_TOKEN; default: the password. With a token, user and
    password are for HTTP basic authentication"""
    token_file: str | None = option(None)
    """file whose first line is the ACL token"""
    datacenter: str | None = option(None)
    """datacenter; default: the agent's own"""
    namespace: str | None = option(None)
    """namespace (Consul Enterprise)"""
    partition: str | None = option(None)
    """admin partition (Consul Enterprise)"""


class Client(EpochClient):
    """One run on Consul; requests reuse connections, and each parked waiter occupies one."""

    name = "consul"
    default_port = 8500
    run_by = "agents"
    options = Options
    capabilities = Capabilities(
        push=True,
        linearizable=True,
        batch=True,
        ttl=False,
        max_value_bytes=_LARGEST_VALUE,
        atomic=range(1, 65),
    )
    heartbeat_ms = 2.2
    # A transaction holds 64 operations, and 512 KiB in base64.
    batch = (64, 300_000)
    least_version: ClassVar[tuple[int, ...]] = (1, 7)

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        super().__init__(f"consul at {redact(endpoint) or 'localhost'}", request_timeout)
        *prefix, run = segments(namespace, options.prefix)
        self._prefix = "/".join(prefix)
        self._grant = f'key_prefix "{self._prefix}/" {{ policy = "write" }}'
        self._marks = f"{self._prefix}/!expire/"
        self._keys, self._mark = f"{self._prefix}/{run}/=", f"{self._marks}{run}!"
        scope = {"Namespace": options.namespace, "Partition": options.partition}
        self._scope = {name: value for name, value in scope.items() if value}
        self._transport = _Transport(endpoint, options, request_timeout)
        # With these arguments py-consul ignores the environment.
        self._api = consul.base.Consul("localhost", 0, scheme="http", verify=True)
        self._api.http = self._transport
        # Unlike a transaction, this fails for a token that may not read.
        self._connect(lambda limit: self._query(self._mark, limit))

    def hold(self, callers: int) -> None:
        # One more connection for a wait that its caller has given up: Consul answers it later.
        self._call(lambda limit: self._transport.hold(callers + 1, limit))

    def _read_at(self, paths: Iterable[str], limit: Limit) -> dict[str, Stored]:
        return self._found([self._path(path) for path in paths], limit)

    def _scan_at(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        return self._found([self._keys + quote(prefix, safe="")], limit)

    def _replace_at(self, path: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        index = seen.guard if seen is not None else 0
        return bool(self._within(limit).kv.put(self._path(path), data, cas=index))

    def _put_at(self, values: Mapping[str, bytes], limit: Limit) -> None:
        sets = [self._operation("set", self._path(path), data) for path, data in values.items()]
        self._commit(sets, limit)

    def _delete_at(self, paths: Iterable[str], limit: Limit) -> None:
        self._commit([self._operation("delete", self._path(path)) for path in paths], limit)

    def _empty(self, epoch: str, limit: Limit) -> bool:
        tree = self._keys + quote(f"{epoch}/", safe="")
        self._commit([self._operation("delete-tree", tree)], limit)
        return True

    def _server_time(self) -> float:
        return self._transport.agents_time

    def _sweep(self, limit: Limit) -> None:
        marks = self._commit([self._operation("get-tree", self._marks)], limit)
        others = [(path, mark) for path, mark in marks if path != self._mark]
        over = [(path, mark) for path, mark in others if self._has_ended(mark, limit)]
        for path, mark in over[:_SWEEP]:
            run = path[len(self._marks) : -1]
            gone = [
                self._operation("check-index", path, Index=mark.guard),
                self._operation("delete-tree", f"{self._prefix}/{run}/="),
                self._operation("delete", path),
            ]
            try:
                self._commit(gone, limit)
            except RefusedError as error:
                if error.status != 409:
                    raise

    def _park_at(self, path: str, seen: Stored | None, limit: Limit) -> Stored | None:
        key = self._path(path)
        if seen is not None:
            index = seen.guard
        else:
            # Get the index to wait from; the next look reads a value that arrived meanwhile.
            found, index = self._query(key, limit)
            if found is not None:
                return None
        while True:
            found, after = self._query(key, limit, index=index, held=_LONGEST_PARK)
            if version_of(found) not in (None, version_of(seen)):
                return found
            if after < index or (seen is not None and found is None):
                # Start again if the index goes backwards, as Consul's documentation demands, or if
                # the key was deleted.
                return None
            index = after

    def _problem(self, error: Exception) -> Problem | None:
        if isinstance(error, ConsulException):
            return self._odd(error)
        if not isinstance(error, RefusedError):
            hung_up = (
                isinstance(error, ConnectionError) and type(error) is not ConnectionRefusedError
            )
            return http_problem(self, error, _FULL if hung_up else "")
        said = str(error)
        problem = find_problem(_PROBLEMS, said, said=said, timeout=self.timeout, grant=self._grant)
        if problem is None:
            # Without a leader, or a connection to the leader, an agent forwards nothing.
            unsent = "No cluster leader" in said or "rpc error getting client" in said
            return self._unreachable(error, undone=unsent)
        # A server that has just started may not have read its tokens yet.
        late = error.was_accepted and problem.denied and "ACL not found" in said
        return replace(problem, retryable=problem.retryable or late)

    def inspect(self) -> Iterable[Finding]:
        yield self._transport.http.inspect(self._transport.sends_secret)
        agent, why = self._learn(lambda limit: self._within(limit).agent.self())
        if agent is None:
            yield Finding(Mark.UNKNOWN, "version", f"not known: {why}", "agent:read allows it")
        else:
            config = agent.get("Config", {})
            yield of_version("consul", str(config.get("Version", "")), self.least_version)
        leader, why = self._learn(lambda limit: self._within(limit).status.leader())
        if leader is None:
            yield Finding(Mark.UNKNOWN, "role", f"not known: {why}")
        elif not leader:
            advice = "start a majority of the servers"
            yield Finding(Mark.FAILED, "role", "the servers have no leader", advice)
        else:
            kind = "an agent"
            if agent is not None:
                kind = "a server" if agent.get("Config", {}).get("Server") else "a client agent"
            yield Finding(Mark.OK, "role", f"{kind} of a cluster with the leader {leader}")

    def _disconnect(self) -> None:
        self._transport.http.close()

    def _path(self, path: str) -> str:
        # "!" ends a name, because a transaction may get an empty tree, but not an absent key.
        return self._mark if path == MARK else f"{self._keys}{quote(path, safe='')}!"

    def _operation(self, verb: str, path: str, data: bytes = b"", **more: int) -> dict[str, Any]:
        operation: dict[str, Any] = {"Verb": verb, "Key": path, **more, **self._scope}
        if data:
            operation["Value"] = base64.b64encode(data).decode()
        return {"KV": operation}

    def _found(self, trees: Sequence[str], limit: Limit) -> dict[str, Stored]:
        read = self._commit([self._operation("get-tree", tree) for tree in trees], limit)
        found: dict[str, Stored] = {}
        for key, stored in read:
            path = MARK if key == self._mark else unquote(key[len(self._keys) : -1])
            # Skip names that this package would have encoded differently.
            if self._path(path) == key:
                found[path] = stored
        return found

    def _commit(
        self, operations: Sequence[dict[str, Any]], limit: Limit
    ) -> list[tuple[str, Stored]]:
        """Execute a transaction; returns the keys that it read and wrote."""
        results = self._within(limit).txn.put(operations)["Results"] or ()
        read = ((it["KV"], base64.b64decode(it["KV"]["Value"] or "")) for it in results)
        return [(kv["Key"], Stored.parse(data, kv["ModifyIndex"])) for kv, data in read]

    def _query(
        self, path: str, limit: Limit, index: int | None = None, held: float = 0.0
    ) -> tuple[Stored | None, int]:
        """A key and the index to wait from; Consul waits up to ``held`` s for a later ``index``."""
        # Consul prolongs the wait by up to a sixteenth.
        wait = f"{ceil(held * 16 / 17 * 1000)}ms"
        after, kv = self._within(limit, held).kv.get(path, index=index, wait=wait)
        found = Stored.parse(kv["Value"] or b"", kv["ModifyIndex"]) if kv else None
        return found, max(1, int(after))

    def _within(self, limit: Limit, held: float = 0.0) -> Any:
        """py-consul's interface, whose next request of this thread ends at the limit."""
        self._transport.bound(limit, held)
        return self._api


class RefusedError(Exception):
    """Consul answered with an error.

    Attributes:
        status: the HTTP status.
        was_accepted: an earlier request came with the same token and was not refused.
    """

    def __init__(self, status: int, body: bytes, was_accepted: bool) -> None:
        text = plain(body.decode(errors="replace"), 300)
        super().__init__(f"HTTP {status}: {text}")
        self.was_accepted = was_accepted
        # Consul's transaction API reports a missing permission as 409, not 403.
        self.status = 403 if status == 409 and "Permission denied" in text else status


class _Transport:
    """Sends py-consul's requests, each with token and scope and within the limit of its thread.

    py-consul's calls take no limit: `bound` sets it for the calling thread.
    """

    def __init__(self, endpoint: str, options: Options, request_timeout: float) -> None:
        port = 8501 if options.tls or endpoint.lower().startswith("https://") else 8500
        schemes = ("http", "https", "consul")
        target = parse_endpoint(endpoint, default_port=port, schemes=schemes)
        target.refuse_all_but()
        self.http = http_of(target, options, request_timeout)
        scope = {"dc": options.datacenter, "ns": options.namespace, "partition": options.partition}
        self._query = {name: value for name, value in scope.items() if value} | {"consistent": ""}
        files = options.token_file, options.password_file
        self._headers = FromFiles(partial(_headers, target, options), *files)
        self._accepted: Mapping[str, str] | None = None
        self._thread = threading.local()

    def bound(self, limit: Limit, held: float) -> None:
        """Limit this thread's next request; ``held``: seconds that Consul may hold it back."""
        self._thread.limit, self._thread.held = limit, held

    @property
    def sends_secret(self) -> bool:
        return len(self._headers.get()) > 1

    @property
    def agents_time(self) -> float:
        """The time, in seconds, of the agent that answered this thread's last request."""
        return time_of(self._thread.headers)

    def hold(self, connections: int, limit: Limit) -> None:
        request = Request("GET", "/v1/status/leader", self._headers.get(), None)
        for answer in self.http.hold(request, connections, limit):
            if answer.status != 200:
                raise RefusedError(answer.status, answer.body, was_accepted=True)

    # The methods that py-consul calls.

    def get(self, callback: Any, path: str, params: Any = None, **_: object) -> Any:
        return self._ask("GET", callback, path, params)

    def put(self, callback: Any, path: str, params: Any = None, data: Any = "", **_: object) -> Any:
        body = data.encode() if isinstance(data, str) else data
        return self._ask("PUT", callback, path, params, body)

    def _ask(
        self, method: str, callback: Any, path: str, params: Any, body: bytes | None = None
    ) -> Any:
        query = urlencode([*(params or ()), *self._query.items()])
        now = self._thread
        headers = self._headers.get()
        request = Request(method, f"{quote(path, safe='/:')}?{query}", headers, body)
        answer = self.http.ask(request, now.limit, now.held)
        now.headers = answer.headers
        if answer.status != 200 and (answer.status, method) != (404, "GET"):
            raise RefusedError(answer.status, answer.body, headers is self._accepted)
        self._accepted = headers
        text = answer.body.decode(errors="replace")
        return callback(consul.base.Response(answer.status, answer.headers, text))


def _headers(target: Endpoint, options: Options) -> Mapping[str, str]:
    """The headers of each request; raises `ValueError` for credentials that do not fit together."""
    user, password = target.user or options.user, target.password or options.current_password()
    token = given_or_in_file(options.token, "token_file", options.token_file)
    headers = {"Content-Type": "application/json"}
    if user is not None and token is None:
        raise ValueError(
            "a user is for HTTP basic authentication, which needs a token besides: "
            "set $RDZV_PLUGINS_TOKEN; a token alone needs no user"
        )
    if user is not None and token is not None:
        login = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
        headers["Authorization"] = f"Basic {login}"
    if token := token or password:
        headers["X-Consul-Token"] = token
    return headers
