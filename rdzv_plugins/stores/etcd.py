"""etcd 3.4 and later, through its JSON gateway, as the backend ``etcd-v3``.

A key of a run is ``<prefix>/<run id>/<epoch>/<key>``. A run that has expired is deleted by a later
run under the prefix.

Values up to 1 MiB (``--max-request-bytes`` is 1.5 MiB). Name all members. The gateway must be on
(``--enable-grpc-gateway``, the default). It takes no user name from a client certificate: with
authentication on, set user and password, and use a certificate without a common name.

The user's role needs readwrite on the key prefix ``<prefix>/``.
"""

from __future__ import annotations

import json
import math
import random
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NoReturn

from rdzv_plugins.kv.base import (
    Limit,
    Problem,
    Stored,
    find_problem,
    full,
    refused,
    segments,
    version_of,
)
from rdzv_plugins.kv.contract import Capabilities
from rdzv_plugins.kv.epochs import MARK, Epoch, EpochClient
from rdzv_plugins.kv.findings import Finding, Mark, of_space, of_version
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.settings.endpoint import parse_endpoint, redact
from rdzv_plugins.settings.options import ServerOptions
from rdzv_plugins.stores._http import Request, http_of, http_problem

_LARGEST = 1024 * 1024
# etcd's --max-txn-ops, which counts comparisons separately.
_OPERATIONS = 128
_QUOTA = re.compile(rb"(?m)^etcd_server_quota_backend_bytes (\S+)$")
# The most expired runs that one `expire` deletes.
_SWEEP = 20

# gRPC status codes. Only a stopping member cancels: this client just closes its connection.
_CANCELLED, _UNKNOWN, _DEADLINE, _DENIED, _EXHAUSTED, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = (
    1, 2, 4, 7, 8, 13, 14, 16,
)  # fmt: skip

# With the header hasleader, a member without a leader refuses a request before executing it.
_NO_LEADER = "etcdserver: no leader"

_SILENT = Problem(
    "gave no answer within {timeout:g} s ({said}); is a majority of its members running, and do "
    "their disks and networks keep up?",
    retryable=True,
)
# The meanings of errors, by a pattern of gRPC code, "user" or "anonymous", HTTP status, "later" (a
# retry may succeed) or "never", and text; the first match counts.
_PROBLEMS = {
    "authentication is not enabled": Problem(
        "has authentication disabled ({said}); leave out the user", denied=True
    ),
    # Only with a user, because etcd denies requests without a user with the same code.
    f"^{_DENIED} user": Problem(
        "denied a right ({said}) to the user '{user}'; grant it to a role of the user: etcdctl "
        "role grant-permission <role> {grant}",
        denied=True,
    ),
    f"^({_DENIED}|{_UNAUTHENTICATED}) |user name is empty|authentication|auth store is": Problem(
        "refused the credentials ({said}); set the user in the endpoint and the password in "
        "$RDZV_PLUGINS_PASSWORD",
        retryable=True,  # The retry gets a new token.
        undone=True,
        denied=True,
    ),
    "CommonName of client": Problem(
        "refuses a client certificate with a common name while authentication is on; set cert_file "
        "to one without a common name",
        denied=True,
    ),
    # etcd itself also answers 404, for example if a lease is not found.
    r" 404 \w+: (?!etcdserver:)": Problem(
        "has no v3 gateway: it is older than 3.4, or runs with --enable-grpc-gateway=false, or is "
        "not etcd"
    ),
    "space exceeded": full("compact and defragment it, then `etcdctl alarm disarm`"),
    f" later: ({_NO_LEADER}$|.*too many requests)": replace(_SILENT, undone=True),
    " later: ": _SILENT,
    "": refused(
        "a proxy in between must let /v3 through, and with authentication the role of the user "
        "needs {grant}"
    ),
}

_HEADERS = {
    "Content-Type": "application/json",
    # With this header a member that is cut off from the others ends its watches.
    "Grpc-Metadata-hasleader": "true",
}

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the etcd-v3 backend, for endpoints ``host:port``, ``http://``, ``https://`` (TLS)
    and several members, separated by commas. It has none of its own.
    """


class Client(EpochClient):
    """One run on etcd; requests reuse connections, and each parked waiter opens one."""

    name = "etcd-v3"
    default_port = 2379
    options = Options
    capabilities = Capabilities(
        push=True,
        linearizable=True,
        batch=True,
        ttl=False,
        max_value_bytes=_LARGEST,
        atomic=range(1, _OPERATIONS + 1),
    )
    heartbeat_ms = 3.2
    batch = (_OPERATIONS, _LARGEST)
    least_version: ClassVar[tuple[int, ...]] = (3, 4)

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        super().__init__(f"etcd at {redact(endpoint) or 'localhost'}", request_timeout)
        target = parse_endpoint(endpoint, default_port=2379, schemes=("http", "https"))
        target.refuse_all_but()
        # Spread the nodes over the members.
        target = replace(target, hosts=tuple(random.sample(target.hosts, len(target.hosts))))
        self._http = http_of(target, options, request_timeout)
        self._user = target.user or options.user
        password = target.password
        # A password in a file may have changed before the next log-in.
        self._secret = (lambda: password) if password is not None else options.current_password
        if self._user is None and self._secret() is not None:
            raise ValueError(
                "the password ($RDZV_PLUGINS_PASSWORD) needs a user: set one with user="
            )
        self._token: str | None = None
        # The last token that a member has accepted.
        self._accepted: str | None = None
        *prefix, run = segments(namespace, options.prefix)
        self._above, self._run = "/".join([*prefix, ""]), run
        self._path = f"{self._above}{run}/"
        self._grant = f"readwrite --prefix '{self._above}'"
        # No run has such a name.
        self._marks = f"{self._above}!marks/"
        self._connect(self._present)

    def _read_at(self, paths: Iterable[str], limit: Limit) -> dict[str, Stored]:
        names = [*paths]
        if len(names) == 1:
            # kv/range takes 0.59 ms, a transaction 0.66 ms.
            found = self._ask("kv/range", self._one(names[0]), limit)
            first = _first(found, found)
            return {names[0]: first} if first is not None else {}
        answer = self._transact([], [{"request_range": self._one(path)} for path in names], limit)
        firsts = (_first(response["response_range"], answer) for response in answer["responses"])
        return {path: it for path, it in zip(names, firsts, strict=True) if it is not None}

    def _scan_at(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        found = self._ask("kv/range", _range(self._path + prefix), limit).get("kvs", [])
        read = ((_key(item)[len(self._path) :], item) for item in found)
        # Skip keys that are not UTF-8: this package has not written them.
        return {path: Stored.parse(_value(it)) for path, it in read if "\ufffd" not in path}

    def _replace_at(self, path: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        # An absent key has the revision 0.
        modified = str(seen.guard.modified if seen is not None else 0)
        same = {**self._one(path), "target": "MOD", "result": "EQUAL", "mod_revision": modified}
        answer = self._transact([same], [self._write(path, data)], limit)
        return bool(answer.get("succeeded"))

    def _put_at(self, values: Mapping[str, bytes], limit: Limit) -> None:
        writes = [self._write(path, data) for path, data in values.items()]
        if len(writes) == 1:
            # kv/put takes 0.67 ms, a transaction 0.84 ms and more for a large value.
            self._ask("kv/put", writes[0]["request_put"], limit)
        else:
            self._transact([], writes, limit)

    def _delete_at(self, paths: Iterable[str], limit: Limit) -> None:
        gone = [{"request_delete_range": self._one(path)} for path in paths]
        self._transact([], gone, limit)

    def _empty(self, epoch: str, limit: Limit) -> bool:
        self._ask("kv/deleterange", _range(f"{self._path}{epoch}/"), limit)
        return True

    def _stamp(self, lasts: float, limit: Limit) -> str:
        # This lease holds no key. Its remaining time is a clock that all members of etcd share.
        lease = self._ask("lease/grant", {"TTL": str(math.ceil(lasts))}, limit)
        return str(lease["ID"])

    def _age(self, epoch: Epoch, mark: Stored, limit: Limit) -> float:
        told = self._ask("lease/timetolive", {"ID": epoch.since}, limit)
        left = int(told.get("TTL", "0"))
        # Whole seconds, rounded down; -1: the lease has ended.
        return (epoch.lasts or 0.0) - (max(left, 0.25) if left >= 0 else 0.0)

    def _sweep(self, limit: Limit) -> None:
        try:
            found = self._ask("kv/range", _range(self._marks), limit).get("kvs", [])
            for item in random.sample(found, min(len(found), _SWEEP)):
                name = _key(item).removeprefix(self._marks)
                stored = Stored.parse(_value(item))
                if name != self._run and self._has_ended(stored, limit):
                    mark = {"key": item["key"]}
                    same = {**mark, "target": "VALUE", "result": "EQUAL", "value": item["value"]}
                    # Not all below the name, which may be another team's prefix.
                    epochs = {Epoch().name, Epoch.of(stored).name}
                    gone = [_range(f"{self._above}{name}/{it}/") for it in epochs]
                    each = [{"request_delete_range": it} for it in (*gone, mark)]
                    self._transact([same], each, limit)
        except RefusedError as error:
            # A user of one run may not list or delete others.
            if error.code != _DENIED:
                raise

    def _park_at(self, path: str, seen: Stored | None, limit: Limit) -> Stored | None:
        if seen is None:
            # Get the revision to watch from; the next look reads a value that arrived meanwhile.
            answer = self._ask("kv/range", self._one(path), limit)
            if answer.get("kvs"):
                return None
            revision = int(answer["header"]["revision"])
        else:
            revision = seen.guard.store
        start = {"start_revision": str(revision + 1), "filters": ["NODELETE"]}
        body = json.dumps({"create_request": {**self._one(path), **start}}).encode()
        headers = self._authorised(limit)
        watch = Request("POST", "/v3/watch", headers, body)
        with closing(self._http.follow(watch, limit)) as stream:
            if stream.status != 200:
                body = b"".join(stream.lines(limit))
                self._refuse(stream.server, stream.status, body, headers)
            for line in chain.from_iterable(iter(partial(stream.lines, limit), [])):
                message = dict(json.loads(line))
                if "error" in message:
                    self._refuse(stream.server, stream.status, line, headers)
                for event in reversed(message["result"].get("events", [])):
                    stored = Stored.parse(_value(event["kv"]))
                    if version_of(stored) not in (None, version_of(seen)):
                        return stored
                if message["result"].get("canceled"):
                    break
        # Raise, so that `wait` pauses before it looks again.
        raise ConnectionAbortedError("the member ended the watch")

    def _problem(self, error: Exception) -> Problem | None:
        if not isinstance(error, RefusedError):
            return http_problem(self, error, ", or does it want https://")
        said = str(error)
        who = "anonymous" if self._user is None else "user"
        when = "later" if error.retryable else "never"
        problem = find_problem(
            _PROBLEMS, f"{error.code} {who} {error.status} {when}: {said}",
            said=said, timeout=self.timeout, user=self._user, grant=self._grant,
        )  # fmt: skip
        if problem is not None and problem.denied and problem.retryable and not error.of_token:
            return replace(problem, retryable=False, undone=False)
        return replace(problem, denied=False) if problem is not None and error.stale else problem

    def _disconnect(self) -> None:
        self._http.close()

    def inspect(self) -> Iterable[Finding]:
        yield self._http.inspect(self._user is not None)
        status, why = self._learn(lambda limit: self._ask("maintenance/status", {}, limit))
        if status is None:
            yield Finding(Mark.UNKNOWN, "version", f"not known: {why}")
        else:
            yield of_version("etcd", str(status.get("version", "")), self.least_version)
            yield _role(status)
            size, quota = int(status.get("dbSize", 0)), self._quota(status)
            yield of_space(
                size, quota, "compact and defragment it, or raise its --quota-backend-bytes"
            )
        alarm = {"action": "GET"}
        answer, why = self._learn(lambda limit: self._ask("maintenance/alarm", alarm, limit))
        if answer is None:
            yield Finding(Mark.UNKNOWN, "alarms", f"not known: {why}")
            return
        alarms = sorted({str(it.get("alarm")) for it in answer.get("alarms", [])})
        if alarms:
            advice = "compact and defragment it, then `etcdctl alarm disarm`"
            found = f"{', '.join(alarms)}: writes are refused"
            yield Finding(Mark.FAILED, "alarms", found, advice, {"alarms": alarms})
        else:
            yield Finding(Mark.OK, "alarms", "none", values={"alarms": []})

    def _quota(self, status: Mapping[str, Any]) -> int:
        """The most bytes of the member's database; 0: not known."""
        if "dbSizeQuota" in status:  # Since 3.6.
            return int(status["dbSizeQuota"])
        metrics = Request("GET", "/metrics", {})
        answer, _ = self._learn(lambda limit: self._http.ask(metrics, limit))
        found = _QUOTA.search(answer.body) if answer is not None else None
        return int(float(found[1])) if found else 0

    # Parts of requests about the run's keys.

    def _one(self, path: str) -> Json:
        key = self._marks + self._run if path == MARK else self._path + path
        return {"key": _encoded(key.encode())}

    def _write(self, path: str, data: bytes) -> Json:
        return {"request_put": {**self._one(path), "value": _encoded(data)}}

    # Requests.

    def _transact(self, holds: Sequence[Json], operations: Sequence[Json], limit: Limit) -> Json:
        return self._ask("kv/txn", {"compare": holds, "success": operations}, limit)

    def _ask(
        self, path: str, body: Json, limit: Limit, headers: Mapping[str, str] | None = None
    ) -> Json:
        headers = headers or self._authorised(limit)
        try:
            request = Request("POST", f"/v3/{path}", headers, json.dumps(body).encode())
            answer = self._http.ask(request, limit)
        except TimeoutError:
            # An etcd that lost its data, or was restored, does not refuse an older token but holds
            # the request back (etcd-io/etcd #11377).
            self._token = None
            raise
        if answer.status != 200:
            self._refuse(answer.server, answer.status, answer.body, headers)
        self._accepted = headers.get("Authorization")
        return dict(json.loads(answer.body))

    def _authorised(self, limit: Limit) -> Mapping[str, str]:
        """The headers of a request."""
        if self._user is None:
            return _HEADERS
        if (token := self._token) is None:
            login = {"name": self._user, "password": self._secret() or ""}
            token = str(self._ask("auth/authenticate", login, limit, _HEADERS)["token"])
            # Accepted from now on: a restart may make the member forget it before its first use.
            self._token = self._accepted = token
        return {**_HEADERS, "Authorization": token}

    def _refuse(
        self, member: int, status: int, body: bytes, headers: Mapping[str, str]
    ) -> NoReturn:
        """Raise a member's error; after a retryable one the next request goes to another member."""
        error = RefusedError(status, body)
        if error.of_token:
            self._token = None
            # A restarted member knows no token; the next log-in shows whether it accepts the user.
            error.stale = headers.get("Authorization") == self._accepted
        elif error.retryable:
            self._http.leave(member)
        raise error


class RefusedError(Exception):
    """etcd refused a request.

    Attributes:
        code: the gRPC status code; _UNKNOWN if the answer was not etcd's.
        status: the HTTP status.
        of_token: a retry with a new token may succeed.
        retryable: the next attempt, perhaps at another member, may succeed.
        stale: the token was accepted before.
    """

    stale = False

    def __init__(self, status: int, body: bytes) -> None:
        try:
            answer = json.loads(body)
            # A stream nests the error one level deeper.
            answer = answer["error"] if isinstance(answer.get("error"), dict) else answer
            self.code = int(answer.get("grpc_code", answer.get("code", _UNKNOWN)))
            text = plain(answer.get("message") or answer.get("error"), 300)
        except (ValueError, AttributeError, TypeError, RecursionError):
            self.code = _UNKNOWN
            text = f"HTTP {status}, not from etcd: " + " ".join(
                body[:200].decode("utf-8", "replace").split()
            )
        super().__init__(text)
        self.status = status
        self.of_token = self.code == _UNAUTHENTICATED or "revision of auth store is old" in text
        codes = (_CANCELLED, _DEADLINE, _INTERNAL, _UNAVAILABLE)
        self.retryable = self.of_token or status >= 500 or self.code in codes
        if self.code == _EXHAUSTED:
            self.retryable = "too many requests" in text


def _role(status: Mapping[str, Any]) -> Finding:
    if str(status.get("leader", "0")) == "0":
        advice = "start a majority of the members"
        return Finding(Mark.FAILED, "role", "the member knows no leader", advice)
    if status.get("isLearner"):
        advice = "name a voting member, or promote it: etcdctl member promote"
        return Finding(Mark.FAILED, "role", "a learner, which serves no requests", advice)
    leads = status["leader"] == status.get("header", {}).get("member_id")
    return Finding(Mark.OK, "role", "leader" if leads else "follower of a leader")


@dataclass(frozen=True, slots=True)
class _Guard:
    """The key's revision, and the store's when the key was read, after which a watch begins.

    Each write to etcd changes the store's revision, so it is not compared.
    """

    modified: int
    store: int = field(compare=False)


def _first(found: Mapping[str, Any], answer: Mapping[str, Any]) -> Stored | None:
    """The first key that a range found."""
    for item in found.get("kvs", []):
        guard = _Guard(int(item["mod_revision"]), int(answer["header"]["revision"]))
        return Stored.parse(_value(item), guard)
    return None


def _value(item: Mapping[str, Any]) -> bytes:
    """The value of a key; the gateway leaves out an empty value."""
    return b64decode(item.get("value", ""))


def _key(item: Mapping[str, Any]) -> str:
    return b64decode(item["key"]).decode(errors="replace")


def _range(prefix: str) -> Json:
    """The range of all keys that begin with ``prefix``."""
    start = prefix.encode()
    # The prefix ends in "/" or in a UTF-8 character, so its last byte is never 255.
    return {"key": _encoded(start), "range_end": _encoded(start[:-1] + bytes([start[-1] + 1]))}


def _encoded(data: bytes) -> str:
    return b64encode(data).decode()
