"""etcd 3.4 and later, through its JSON gateway, as the backend ``etcd-v3``.

torch's own backends ``etcd`` and ``etcd-v2`` speak the v2 API, which etcd 3.6 has removed (pytorch
#158326, #170707). To move a job, replace ``--rdzv-backend=etcd`` by ``--rdzv-backend=etcd-v3`` and
leave the endpoint as it is.

No client package is needed: this module sends the requests itself, because no client of the v3 API
on PyPI has authentication, several endpoints and a watch that can be ended.

A stored value begins with a stamp, eight random bytes that are new with each write. The stamp is
the version; a transaction compares it as a range of values. So a version never repeats, even if
etcd loses its data and counts its revisions from 1 again, and a client recognizes its own write
after a lost answer. A refused transaction reads the current value in the same request.
`Client.wait` watches from the revision after its read: it misses no change in between, and depends
on no revision that a compaction removes.

Limits: linearizable. Values up to 1 MiB (etcd's ``--max-request-bytes`` is 1.5 MiB).
`Client.put_many` is atomic up to 128 keys and 1 MiB.
`Client.add` is a compare-and-set: with 256 nodes adding to one counter at once it took seconds.
`Client.expire` uses a lease, at least two seconds with etcd's default timing, and longer if the
leader changes. A mark key at the run's own path has the lease. A new key gets the mark's lease in a
transaction that compares it, and a later put leaves a key its lease, so that all keys of a run
expire together. (A call that fails may leave a run of more than 126 keys with two deadlines, until
the next call.) Three members survive the loss of one, five the loss of two; name all members in the
endpoint.
The gateway must be enabled (``--enable-grpc-gateway``). It takes no user name from a client
certificate: with authentication enabled, set user and password too, and use a certificate without
a common name (CN), because the gateway refuses all others. The user's role needs readwrite on the
key prefix ``<prefix>/``.
"""

from __future__ import annotations

import json
import math
import random
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

from rdzv_plugins.kv.base import (
    STAMP_BYTES,
    Limit,
    Problem,
    StoreClient,
    Stored,
    find_problem,
    full,
    refused,
    segments,
    version_of,
)
from rdzv_plugins.kv.contract import Capabilities, Version
from rdzv_plugins.kv.findings import Finding, Mark, of_space, of_version
from rdzv_plugins.kv.gate import plain
from rdzv_plugins.kv.retry import pause_after
from rdzv_plugins.settings.endpoint import parse_endpoint, redact
from rdzv_plugins.settings.options import ServerOptions
from rdzv_plugins.stores._http import Request, http_of, http_problem

__all__ = ["Client", "Options"]

_LARGEST = 1024 * 1024
# etcd's --max-txn-ops, which counts comparisons separately.
_OPERATIONS = 128
# A watch is renewed this often, in seconds, in case its member hangs.
_LONGEST_PARK = 15.0
_QUOTA = re.compile(rb"(?m)^etcd_server_quota_backend_bytes (\S+)$")
_VERSION = re.compile(f"[0-9a-f]{{{2 * (STAMP_BYTES - 1)}}}")
# The most keys of which a client remembers that it has put them.
_REMEMBERED = 1000
# etcd's own value for it.
_NO_LEASE = "0"

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
# Errors' meanings, by a pattern of gRPC code, "user" or "anonymous", HTTP status, "later" (a retry
# may succeed) or "never", and text: the first that matches counts.
_PROBLEMS = {
    "authentication is not enabled": Problem(
        "has authentication disabled ({said}); leave out the user", denied=True
    ),
    # A request without a user is denied too.
    f"^{_DENIED} user": Problem(
        "denied a right ({said}) to the user '{user}'; grant it to a role of the user: etcdctl "
        "role grant-permission <role> {grant}",
        denied=True,
    ),
    f"^({_DENIED}|{_UNAUTHENTICATED}) |user name is empty|authentication|auth store is": Problem(
        "refused the credentials ({said}); set the user in the endpoint and the password in "
        "$RDZV_PLUGINS_PASSWORD",
        retryable=True,  # With a new token.
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
    # A member that is cut off from the others must end its watches.
    "Grpc-Metadata-hasleader": "true",
}

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the etcd-v3 backend, for endpoints ``host:port``, ``http://``, ``https://`` (TLS)
    and several members, separated by commas. It has none of its own.
    """


class Client(StoreClient):
    """One run on etcd; requests reuse connections, and each parked waiter opens one."""

    name = "etcd-v3"
    default_port = 2379
    options = Options
    capabilities = Capabilities(
        push=True,
        linearizable=True,
        batch=True,
        ttl=True,
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
        self._grant = f"readwrite --prefix '{'/'.join(prefix)}/'"
        # The path itself is the key of the mark.
        self._path = "/".join([*prefix, run, ""])
        # The last known lease of the mark, which a transaction compares.
        self._lease = _NO_LEASE
        # Keys that this client has put, and the mark's lease then: most still exist, and keep their
        # lease at the next put. Under another mark, an `_expire` that was cut short may have left
        # them theirs.
        self._existing: dict[str, str] = {}
        self._connect(self._learn_lease)

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        names = [*keys]
        if len(names) == 1:
            # 0.59 ms; a transaction takes 0.66 ms.
            found = self._ask("kv/range", self._one(names[0]), limit)
            first = _first(found, found)
            return {names[0]: first} if first is not None else {}
        answer = self._transact([], [{"request_range": self._one(key)} for key in names], limit)
        firsts = (_first(response["response_range"], answer) for response in answer["responses"])
        return {key: it for key, it in zip(names, firsts, strict=True) if it is not None}

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        found = self._ask("kv/range", self._range(prefix), limit).get("kvs", [])
        return {
            key: Stored.parse(_value(item))
            for item in found
            # What is no UTF-8 is nobody's key.
            if (key := self._relative(item)) and "\ufffd" not in key
        }

    def _set_if(
        self, key: str, data: bytes, expected: Version | None, limit: Limit
    ) -> Stored | None:
        if not (expected is None or (isinstance(expected, str) and _VERSION.fullmatch(expected))):
            return self._read([key], limit).get(key)
        look = {"request_range": self._one(key)}
        lease, holds, refused = self._lease, self._holds(key, expected), 0
        while True:
            # One request takes 1.5 ms; the base class's two take 1.9 ms.
            answer = self._write(holds, {key: data}, lease, limit, look)
            if answer.get("succeeded"):
                return Stored.parse(data)
            there = _first(answer["responses"][0]["response_range"], answer)
            if version_of(there) != expected:
                return there
            holds = self._holds(key, expected)
            if there is not None and not there.version:
                # It counts as absent: replace exactly that.
                equal = {"target": "VALUE", "result": "EQUAL", "value": _encoded(there.value)}
                holds = [{**self._one(key), **equal}]
            if refused > 1:
                limit.sleep(min(limit.seconds, pause_after(refused)))
            refused += 1
            lease = self._learn_lease(limit)

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        return self._set_if(key, data, version_of(seen), limit) == Stored.parse(data)

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        lease = self._lease
        if len(values) == 1 and all(self._existing.get(key) == lease for key in values):
            # 0.67 ms; a transaction takes 0.84 ms, more for a large value.
            ((key, data),) = values.items()
            put = {**self._one(key), "value": _encoded(data), "ignore_lease": True}
            # It may have been deleted, or have expired.
            with suppress(MissingError):
                self._ask("kv/put", put, limit)
                return
        while not self._write([], values, lease, limit).get("succeeded"):
            lease = self._learn_lease(limit)
        if len(self._existing) > _REMEMBERED:
            self._existing.clear()
        self._existing.update(dict.fromkeys(values, lease))

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        names = [*keys]
        for key in names:
            self._existing.pop(key, None)
        if len(names) == 1:
            self._ask("kv/deleterange", self._one(names[0]), limit)
        else:
            self._transact([], [{"request_delete_range": self._one(key)} for key in names], limit)

    def _expire(self, seconds: float, limit: Limit) -> None:
        if seconds <= 0:
            self._ask("kv/deleterange", self._range(""), limit)
            return
        ttl = str(math.ceil(seconds))
        # So many keys change with the mark: this client may be killed before it has moved the rest.
        room = _OPERATIONS - 2
        while True:
            items = self._list(limit)
            old = self._lease = _lease_in(self._mark_in(items))
            if old != _NO_LEASE:
                # Also if a new lease replaces it: it must not expire before all keys have moved.
                kept = self._ask("lease/keepalive", {"ID": old}, limit)
                left = kept.get("result", {}).get("TTL", "0")
                if left == "0":
                    # It has expired: look again when its keys are deleted.
                    limit.sleep(random.uniform(0.02, 0.1))
                    continue
                if left == ttl:
                    self._move(items, limit)
                    return
            lease = self._ask("lease/grant", {"TTL": ttl}, limit)["ID"]
            keys = [item for item in items if self._relative(item)][:room]
            puts = [{"request_put": {**self._one(""), "lease": lease}}, *_attaching(keys, lease)]
            look = {"request_range": self._listing()}
            try:
                answer = self._transact([self._marked(old)], [*puts, look], limit)
            except MissingError:
                # A key was deleted meanwhile, or this client was delayed and the lease has expired.
                answer, room = {}, 0
            if answer.get("succeeded"):
                break
            with suppress(MissingError):
                self._ask("lease/revoke", {"ID": lease}, limit)
        self._lease = lease
        self._move(answer["responses"][-1]["response_range"]["kvs"], limit)
        if old != _NO_LEASE:
            # No key has the old lease, and no client can attach it any more.
            with suppress(MissingError):
                self._ask("lease/revoke", {"ID": old}, limit)

    def _park(self, key: str, seen: Stored | None, limit: Limit) -> Stored | None:
        if seen is None:
            # Get the revision to watch from; the next look reads a value that arrived meanwhile.
            answer = self._ask("kv/range", self._one(key), limit)
            if answer.get("kvs"):
                return None
            revision = int(answer["header"]["revision"])
        else:
            revision = seen.guard
        start = {"start_revision": str(revision + 1), "filters": ["NODELETE"]}
        body = json.dumps({"create_request": {**self._one(key), **start}}).encode()
        headers = self._authorised(limit)
        watch = Request("POST", "/v3/watch", headers, body)
        with self._http.stream(watch, limit.within(_LONGEST_PARK)) as (response, member):
            if response.status != 200:
                self._refuse(member, response.status, response.read(), headers)
            for line in response:
                message = dict(json.loads(line))
                if "error" in message:
                    self._refuse(member, response.status, line, headers)
                for event in reversed(message["result"].get("events", [])):
                    stored = Stored.parse(_value(event["kv"]))
                    if version_of(stored) not in (None, version_of(seen)):
                        return stored
                if message["result"].get("canceled"):
                    break
        # `wait` pauses before it looks again.
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

    def _one(self, key: str) -> Json:
        return {"key": _encoded((self._path + key).encode())}

    def _range(self, prefix: str) -> Json:
        path = (self._path + prefix).encode()
        # The path ends in "/" or in a UTF-8 character, so its last byte is never 255.
        return {"key": _encoded(path), "range_end": _encoded(path[:-1] + bytes([path[-1] + 1]))}

    def _listing(self) -> Json:
        """The range of all keys, the mark's first; their values would be a load."""
        return {**self._range(""), "keys_only": True}

    def _mark_in(self, items: Sequence[Json]) -> Json:
        """The mark, if it is the first of the keys that a range found; else {}."""
        return next((item for item in items[:1] if not self._relative(item)), {})

    def _relative(self, item: Mapping[str, Any]) -> str:
        return b64decode(item["key"]).decode(errors="replace")[len(self._path) :]

    def _holds(self, key: str, version: str | None) -> list[Json]:
        """Comparisons that hold while the key has ``version`` (None: while it is absent)."""
        if version is None:
            none = {"target": "CREATE", "result": "EQUAL", "create_revision": "0"}
            return [{**self._one(key), **none}]
        stamp = bytes.fromhex(version)
        # Each stamp is followed by "=", and ">" is the next byte after "=".
        bounds = (("GREATER", stamp), ("LESS", stamp + b">"))
        return [
            {**self._one(key), "target": "VALUE", "result": result, "value": _encoded(bound)}
            for result, bound in bounds
        ]

    def _marked(self, lease: str) -> Json:
        """A comparison that holds while the mark has that lease; _NO_LEASE: or is absent."""
        return {**self._one(""), "target": "LEASE", "result": "EQUAL", "lease": lease}

    # Requests.

    def _learn_lease(self, limit: Limit) -> str:
        items = self._ask("kv/range", self._one(""), limit).get("kvs", [])
        self._lease = _lease_in(self._mark_in(items))
        return self._lease

    def _write(
        self,
        holds: Sequence[Json],
        values: Mapping[str, bytes],
        lease: str,
        limit: Limit,
        *looks: Json,
    ) -> Json:
        """Write with the lease if it is the mark's and ``holds``; else execute ``looks``."""
        puts = [
            {"request_put": {**self._one(key), "value": _encoded(data), "lease": lease}}
            for key, data in values.items()
        ]
        return self._transact([*holds, self._marked(lease)], puts, limit, looks)

    def _list(self, limit: Limit) -> Sequence[Json]:
        items: Sequence[Json] = self._ask("kv/range", self._listing(), limit).get("kvs", [])
        return items

    def _move(self, items: Sequence[Json], limit: Limit) -> None:
        """Give all keys the lease of the mark; ``items``: the mark and they, as just listed."""
        while True:
            mark = self._mark_in(items)
            lease = _lease_in(mark)
            others = [it for it in items if _lease_in(it) != lease]
            batches = (others[at : at + _OPERATIONS] for at in range(0, len(others), _OPERATIONS))
            # Missing: one of the keys was deleted meanwhile.
            with suppress(MissingError):
                if all(self._attach(batch, lease, limit) for batch in batches):
                    return
            # If another client has changed the mark's lease, help it: it may have been killed.
            past, items = items, self._list(limit)
            if mark and not self._mark_in(items):
                # This client was delayed, and the run has expired: delete its unchanged keys. What
                # has changed belongs to the next run, which has no deadline.
                for item in past:
                    same = {"target": "MOD", "mod_revision": item["mod_revision"]}
                    gone = {"request_delete_range": {"key": item["key"]}}
                    self._transact([{"key": item["key"], **same}], [gone], limit)
                items = self._list(limit)

    def _attach(self, items: Sequence[Json], lease: str, limit: Limit) -> bool:
        """Attach the lease to the keys; False: the mark has another. Raises `MissingError`."""
        answer = self._transact([self._marked(lease)], _attaching(items, lease), limit)
        return bool(answer.get("succeeded"))

    def _transact(
        self,
        holds: Sequence[Json],
        success: Sequence[Json],
        limit: Limit,
        failure: Sequence[Json] = (),
    ) -> Json:
        body = {"compare": holds, "success": success, "failure": failure}
        return self._ask("kv/txn", body, limit)

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
            self._token = token
        return {**_HEADERS, "Authorization": token}

    def _refuse(
        self, member: int, status: int, body: bytes, headers: Mapping[str, str]
    ) -> NoReturn:
        """Raise a member's error; after a retryable one the next request goes to another member."""
        error = RefusedError(status, body)
        if error.of_token:
            self._token = None
            # A member that has restarted knows no token; the next log-in tells whom it lets in.
            error.stale = headers.get("Authorization") == self._accepted
        elif error.retryable:
            self._http.leave(member)
        elif str(error).endswith(("key not found", "lease not found")):
            raise MissingError(status, body)
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


class MissingError(RefusedError):
    """The key or the lease of a request does not exist."""


def _role(status: Mapping[str, Any]) -> Finding:
    if str(status.get("leader", "0")) == "0":
        advice = "start a majority of the members"
        return Finding(Mark.FAILED, "role", "the member knows no leader", advice)
    if status.get("isLearner"):
        advice = "name a voting member, or promote it: etcdctl member promote"
        return Finding(Mark.FAILED, "role", "a learner, which serves no requests", advice)
    leads = status["leader"] == status.get("header", {}).get("member_id")
    return Finding(Mark.OK, "role", "leader" if leads else "follower of a leader")


def _first(found: Mapping[str, Any], answer: Mapping[str, Any]) -> Stored | None:
    """The first key that a range found; a watch of it begins at the revision of the answer."""
    for item in found.get("kvs", []):
        return Stored.parse(_value(item), int(answer["header"]["revision"]))
    return None


def _value(item: Mapping[str, Any]) -> bytes:
    """The gateway leaves out one that is empty."""
    return b64decode(item.get("value", ""))


def _lease_in(item: Mapping[str, Any]) -> str:
    """The lease of a key, or of the mark if that exists."""
    return str(item.get("lease", _NO_LEASE))


def _attaching(items: Sequence[Json], lease: str) -> list[Json]:
    """Operations that attach the lease to the keys; their values, and so the versions, stay."""
    puts = [{"key": it["key"], "ignore_value": True, "lease": lease} for it in items]
    return [{"request_put": put} for put in puts]


def _encoded(data: bytes) -> str:
    return b64encode(data).decode()
