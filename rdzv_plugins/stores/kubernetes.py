"""The Kubernetes API, 1.20 and later: a run's keys are ConfigMaps of one namespace.

In a pod the endpoint is empty: address, namespace and token are those of the pod's service account.
Elsewhere an empty endpoint means the kubeconfig, which the package ``kubernetes`` reads. To list
the ConfigMaps: ``kubectl get configmaps -l rdzv-plugins/run=<run id>``. In a pod that has a
controller, such as a Job, they belong to it (option `owner`), and are deleted with it.
A node whose round runs makes some 36 requests a minute with the default `keep_alive_interval`.

Values up to 1,000,000 bytes. No expiry takes less than 12 s. For a list the API server reads all
ConfigMaps of the namespace: give jobs a namespace without thousands of others.

The user needs the verbs get, list, watch, create, update and delete on ConfigMaps in the namespace;
for ``owner=auto`` also get on pods, and on the controllers of a Job.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import socket
import threading
import time
from base64 import b32encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from email.message import Message
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn
from urllib.parse import quote, unquote, urlencode

import msgspec

from rdzv_plugins.kv.base import (
    Limit,
    Problem,
    Stored,
    busy,
    clock_hint,
    find_problem,
    full,
    refused,
    segments,
    version_of,
)
from rdzv_plugins.kv.contract import UNREADABLE, Capabilities, Version
from rdzv_plugins.kv.epochs import MARK, EpochClient
from rdzv_plugins.kv.findings import Finding, Mark, of_version
from rdzv_plugins.kv.retry import pause_after
from rdzv_plugins.settings.endpoint import Place, parse_endpoint, redact
from rdzv_plugins.settings.files import FromFiles
from rdzv_plugins.settings.options import (
    OptionError,
    ServerOptions,
    first_line,
    given_or_in_file,
    option,
)
from rdzv_plugins.settings.parsing import cannot_import
from rdzv_plugins.settings.run_ids import RESERVED
from rdzv_plugins.stores._http import Answer, Http, Request, Stream, http_of, http_problem, time_of

log = logging.getLogger(__name__)

_LARGEST_VALUE = 1_000_000

# A watch is renewed this often, in seconds, in case its server hangs.
_WATCH_SECONDS = 30
# The most watches that a client keeps between waits, which are for the same few keys.
_WATCHES = 4

_PAGE = 500

# The most expired runs that one `expire` removes.
_SWEEP = 20

# Kubernetes puts the service account there in each pod.
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_RUN, _PREFIX, _PART = "rdzv-plugins/run", "rdzv-plugins/prefix", "rdzv-plugins/part"
_KEY = "rdzv-plugins/key"
# Marks a value that was written without a condition.
_PUT = "rdzv-plugins/put"
_OF_MARK = "mark"
_VALUE = "value"

_VERBS = "get, list, watch, create, update, delete"

# The meanings of errors, by a pattern of status and text; the first match counts.
_PROBLEMS = {
    "^HTTP 401": Problem(
        "refused the token ({said}){clock}; set another in $RDZV_PLUGINS_TOKEN or token_file, or "
        "log in to the kubeconfig's context anew",
        denied=True,
    ),
    '^HTTP 403.* User "system:anonymous"': Problem(
        "was asked without a token ({said}); set one in $RDZV_PLUGINS_TOKEN or token_file",
        denied=True,
    ),
    "^HTTP 403.* exceeded quota": full("raise the quota of the namespace '{space}'"),
    "^HTTP 403.* being terminated": Problem(
        "is deleting the namespace '{space}' ({said}); set another with namespace=", undone=True
    ),
    # RBAC denies with these words; a policy, a webhook or a proxy has others.
    "^HTTP 403: (?!Forbidden$)(?!.*is forbidden: User .* cannot )": Problem(
        "refused a request, and no role is the cause ({said}): ask who runs the cluster for its "
        "policies and admission webhooks, or look for a proxy in between; labels= gives the "
        "ConfigMaps the labels that a policy asks for",
        undone=True,
    ),
    "^HTTP 403": Problem(
        f"denied a right ({{said}}); bind the user to a role with the verbs {_VERBS}: kubectl -n "
        "{space} create role rdzv --resource=configmaps "
        f"--verb={_VERBS.replace(' ', '')}",
        denied=True,
    ),
    "^HTTP 404.*namespaces": Problem(
        "has no namespace '{space}'; kubectl create namespace {space}, or set namespace=",
        state=True,
    ),
    "^HTTP 429": busy(
        "raise keep_alive_interval, or the share of this user in its priority and fairness"
    ),
    "^HTTP 400.*HTTPS": Problem("requires TLS; write https:// in front of the endpoint"),
    "^HTTP 413|etcdserver: request is too large": Problem(
        "refused a value ({said}); its etcd takes less", state=True
    ),
    "space exceeded": full("compact and defragment its etcd, then `etcdctl alarm disarm`"),
    "^HTTP 5": Problem(
        "gave no answer within {timeout:g} s ({said}); is its etcd running, and every webhook that "
        "it asks?",
        retryable=True,
    ),
    "": refused(
        f"a proxy in between must let /api/v1 through, and the user needs the verbs {_VERBS} on "
        "ConfigMaps of the namespace '{space}'"
    ),
}

_HEADERS = {"Accept": "application/json", "User-Agent": "rdzv-plugins"}


@dataclass(frozen=True, kw_only=True)
class Options(ServerOptions):
    """Options of the kubernetes backend. The endpoint is empty: in a pod its service account,
    elsewhere the kubeconfig. Or it is ``https://host:port``, with several hosts for several API
    servers of one cluster, or ``http://`` for ``kubectl proxy``.
    """

    namespace: str | None = option(None)
    """namespace of the ConfigMaps; default: the pod's, the context's, or ``default``"""
    context: str | None = option(None)
    """context of the kubeconfig; default: the service account in a pod, elsewhere the current
    context"""
    kubeconfig: str | None = option(None)
    """path of the kubeconfig; default: $KUBECONFIG or ~/.kube/config"""
    token: str | None = option(None, secret=True)
    """bearer token for an endpoint; set it in $RDZV_PLUGINS_TOKEN; default: the password"""
    token_file: str | None = option(None)
    """file whose first line is the token"""
    owner: str = option("auto")
    """what the ConfigMaps belong to, and are deleted with: auto (in a pod, its controller), none,
    or ``<apiVersion>/<kind>/<name>/<uid>``"""
    labels: str | None = option(None)
    """more labels of the ConfigMaps: ``team=ml+cost-center=42``"""


class Client(EpochClient):
    """One run in a namespace; requests reuse connections, and each parked waiter has its own."""

    name = "kubernetes"
    options = Options
    capabilities = Capabilities(
        push=True, linearizable=True, batch=False, ttl=False, max_value_bytes=_LARGEST_VALUE
    )
    heartbeat_ms = 6.0
    # Two heartbeats of the default interval, because the server's time has whole seconds.
    mark_seconds = 10.0
    # A batch sends one request per key, so it has few keys.
    batch = (20, 1 << 20)
    least_version: ClassVar[tuple[int, ...]] = (1, 20)

    def __init__(
        self, endpoint: str, namespace: str, options: Options, request_timeout: float
    ) -> None:
        self._login = login = _log_in(endpoint, options, request_timeout)
        super().__init__(f"kubernetes at {login.where}", request_timeout)
        self._maps = f"{login.base}/api/v1/namespaces/{login.namespace}/configmaps"
        *prefix, run = segments(namespace, options.prefix)
        joined = "/".join(prefix)
        self._run = f"rdzv-{_hash(f'{joined}/{run}')}"
        self._labels = _own_labels(options.labels) | {
            "app.kubernetes.io/managed-by": "rdzv-plugins",
            _PREFIX: _label(joined),
            _RUN: _label(run),
        }
        self._owners: list[dict[str, Any]] = []
        # The server's clock minus this host's monotonic clock.
        self._offset = time.time() - time.monotonic()
        # By name: the last version of the keys that only this client writes by put.
        self._own: dict[str, _Guard] = {}
        self._watches: dict[str, _Watch] = {}
        self._watches_lock = threading.Lock()
        self._connect(self._present)
        if not run.startswith(quote(RESERVED)):
            try:
                self._owners = self._call(partial(self._find_owners, options.owner))
            except BaseException:
                self.close()
                raise

    def _read_at(self, paths: Iterable[str], limit: Limit) -> dict[str, Stored]:
        read = ((path, self._get(self._name_of(path), limit)) for path in paths)
        return {path: it.stored for path, it in read if it is not None}

    def _scan_at(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        selected = f"{_RUN}={self._labels[_RUN]}"
        if prefix.count("/") > 1:
            selected += f",{_PART}={_part(prefix)}"
        found = [it for it in self._list(selected, limit) if it.path.startswith(prefix)]
        # Skip an object whose name does not fit its path: this package has not made it.
        return {it.path: it.stored for it in found if it.name == self._name_of(it.path)}

    def _replace_at(self, path: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        if seen is None:
            return self._create(self._object(path, data), limit) is not None
        return self._update(self._object(path, data, seen.guard), limit) is not None

    def _put_at(self, values: Mapping[str, bytes], limit: Limit) -> None:
        for path, data in values.items():
            self._put_one(path, data, limit)

    def _delete_at(self, paths: Iterable[str], limit: Limit) -> None:
        for path in paths:
            self._remove(self._name_of(path), limit)

    def _sweep(self, limit: Limit) -> None:
        marks = self._list(f"{_PREFIX}={self._labels[_PREFIX]},{_PART}={_OF_MARK}", limit)
        others = [it for it in marks if it.name != self._run]
        over = [it for it in others if self._has_ended(it.stored, limit)]
        for mark in over[:_SWEEP]:
            for it in self._list(f"{_RUN}={mark.metadata.labels.get(_RUN, '')}", limit):
                if it.name.startswith(f"{mark.name}-"):
                    self._remove(it.name, limit)
            self._remove(mark.name, limit, mark.guard)

    def _look_at(self, path: str, version: Version | None, limit: Limit) -> Stored | None:
        with self._watches_lock:
            watch = self._watches.get(path)
        current = watch.current if watch is not None else None
        # The watch will report later changes, but may be too late for a value of another program.
        if (
            watch is not None
            and (current is None or current.version)
            and (version_of(current) == version)
        ):
            return current
        return super()._look_at(path, version, limit)

    def _park_at(self, path: str, seen: Stored | None, limit: Limit) -> Stored | None:
        with self._watches_lock:
            watch = self._watches.pop(path, None)
        if watch is not None and seen is None and watch.current is not None:
            watch.stream.close()  # The watch does not know yet that the key was deleted.
            watch = None
        going_on = True
        try:
            if watch is None:
                watch = self._watch(path, limit)
            while not watch.is_past(seen):
                going_on = watch.follow(limit)
                if not going_on:
                    return None  # Each watch ends in time: look again.
            return watch.current
        except OSError as error:
            going_on = isinstance(error, TimeoutError)
            raise
        finally:
            if watch is not None:
                self._keep(path, watch, going_on)

    def _problem(self, error: Exception) -> Problem | None:
        if not isinstance(error, RefusedError):
            return http_problem(self, error)
        said, clock = str(error), clock_hint(self._server_time())
        space = self._login.namespace
        problem = find_problem(
            _PROBLEMS, said, said=said, timeout=self.timeout, space=space, clock=clock
        )
        if problem is None or not error.renewed:
            return problem
        return replace(problem, retryable=True, undone=True)

    @classmethod
    def locate(cls, endpoint: str) -> Place:
        # An endpoint without a scheme is https, like a pod's. The kubeconfig is not read here.
        target = endpoint.strip() or _in_pod()
        if not target:
            return Place()
        return super().locate(target if "://" in target else f"https://{target}")

    def inspect(self) -> Iterable[Finding]:
        yield self._login.http.inspect("Authorization" in self._login.headers())
        version, why = self._learn(partial(self._ask_json, "GET", f"{self._login.base}/version"))
        if version is None:
            yield Finding(Mark.UNKNOWN, "version", f"not known: {why}")
        else:
            number = str(version.get("gitVersion", "")).removeprefix("v")
            yield of_version("kube-apiserver", number, self.least_version)
        review = {"spec": {"namespace": self._login.namespace}}
        path = f"{self._login.base}/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        answer, why = self._learn(lambda limit: self._ask_json("POST", path, limit, review))
        if answer is None:
            yield Finding(Mark.UNKNOWN, "rights", f"not known: {why}")
            return
        allowed = _verbs(answer["status"].get("resourceRules") or ())
        missing = [verb for verb in _VERBS.split(", ") if not {verb, "*"} & allowed]
        where = f"on ConfigMaps of the namespace '{self._login.namespace}'"
        if not missing:
            yield Finding(Mark.OK, "rights", f"{_VERBS} {where}")
        elif answer["status"].get("incomplete"):
            yield Finding(Mark.UNKNOWN, "rights", "an authorizer of the server tells none")
        else:
            yield Finding(
                Mark.FAILED, "rights", f"{', '.join(missing)} are missing {where}",
                "bind the user to a role that has them", {"missing": missing},
            )  # fmt: skip

    def _disconnect(self) -> None:
        with self._watches_lock:
            watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.stream.close()
        self._login.http.close()

    def _server_time(self) -> float:
        return self._offset + time.monotonic()

    # Writes without a condition.

    def _put_one(self, path: str, data: bytes, limit: Limit) -> None:
        """Write if no other client writes the key now; another client's put may stay instead.

        Without a condition the API server retries again and again if many nodes write one key.
        """
        name, refused = self._name_of(path), 0
        guard = self._own.pop(name, None)
        if guard is not None:
            written = self._update(self._object(path, data, guard, put=True), limit)
            if written is not None:
                self._own[name] = written.guard
                return
        there = self._get(name, limit)
        while True:
            if there is None:
                written = self._create(self._object(path, data, put=True), limit)
                if written is not None:
                    self._own[name] = written.guard
                    return
            elif self._update(self._object(path, data, there.guard, put=True), limit) is not None:
                return  # Other clients write the key too.
            before, there = there, self._get(name, limit)
            others = there is not None and (before is None or there.guard != before.guard)
            if there is not None and others and there.is_put:
                return  # As if the other write had followed this write.
            # Retry: a concurrent compare-and-set or delete may not have seen this write.
            limit.sleep(min(limit.seconds, pause_after(refused)))
            refused += 1

    # Watches.

    def _watch(self, path: str, limit: Limit) -> _Watch:
        """Watch a path from its present value on."""
        opening = limit.within(self.timeout)
        asked = {"fieldSelector": f"metadata.name={self._name_of(path)}"}
        page = self._ask("GET", f"{self._maps}?{urlencode(asked)}", opening)
        listed = _pages.decode(page.body)
        here = [it.stored for it in listed.items or ()]
        asked["resourceVersion"] = listed.metadata.resourceVersion
        asked |= {"watch": "1", "timeoutSeconds": str(_WATCH_SECONDS)}
        headers = self._login.headers()
        request = Request("GET", f"{self._maps}?{urlencode(asked)}", headers)
        stream = self._login.http.follow(request, opening)
        try:
            if stream.status != 200:
                body = b"".join(stream.lines(opening))
                self._refuse(stream.status, stream.headers, body, headers, opening)
        except BaseException:
            stream.close()
            raise
        return _Watch(stream, here[0] if here else None)

    def _keep(self, path: str, watch: _Watch, going_on: bool) -> None:
        """Keep a live watch for the next wait."""
        ended = [watch]
        with self._watches_lock:
            if going_on and not self._closed and path not in self._watches:
                self._watches[path] = ended.pop()
                if len(self._watches) > _WATCHES:
                    ended.append(self._watches.pop(next(iter(self._watches))))
        for it in ended:
            it.stream.close()

    # Requests.

    def _name_of(self, path: str) -> str:
        return self._run if path == MARK else f"{self._run}-{_hash(path)}"

    def _object(
        self, path: str, data: bytes, guard: _Guard | None = None, *, put: bool = False
    ) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self._name_of(path),
            "labels": self._labels | {_PART: _OF_MARK if path == MARK else _part(path)},
            "annotations": {_KEY: path} | ({_PUT: "true"} if put else {}),
            "ownerReferences": self._owners,
        }
        if guard is not None:
            metadata |= guard.fields
        return {"metadata": metadata, "binaryData": {_VALUE: data}}

    def _get(self, name: str, limit: Limit) -> _Item | None:
        answer = self._ask("GET", f"{self._maps}/{name}", limit, passing=(404,))
        return _items.decode(answer.body) if answer.status == 200 else None

    def _create(self, made: dict[str, Any], limit: Limit) -> _Item | None:
        """Create an object; None: an object of this name exists."""
        answer = self._ask("POST", self._maps, limit, made, passing=(409,))
        return _items.decode(answer.body) if answer.status != 409 else None

    def _update(self, made: dict[str, Any], limit: Limit) -> _Item | None:
        """Replace an object; None: it has changed or is gone."""
        name = made["metadata"]["name"]
        answer = self._ask("PUT", f"{self._maps}/{name}", limit, made, passing=(404, 409, 422))
        if answer.status == 422:
            if b"immutable" not in answer.body:
                raise RefusedError(answer.status, answer.body)
            # Another program made the object immutable: remove it for the next attempt.
            self._remove(name, limit)
        return _items.decode(answer.body) if answer.status == 200 else None

    def _remove(self, name: str, limit: Limit, guard: _Guard | None = None) -> None:
        """Delete an object, if it is unchanged (None: in any case)."""
        body = {"preconditions": guard.fields} if guard is not None else None
        self._ask("DELETE", f"{self._maps}/{name}", limit, body, passing=(404, 409))

    def _list(self, selector: str, limit: Limit) -> list[_Item]:
        found: list[_Item] = []
        more = ""
        while True:
            asked = {"labelSelector": selector, "limit": str(_PAGE), "continue": more}
            answer = self._ask("GET", f"{self._maps}?{urlencode(asked)}", limit, passing=(410,))
            if answer.status == 410:
                found, more = [], ""  # The server has forgotten the state of the first page.
                continue
            page = _pages.decode(answer.body)
            found += page.items or ()
            more = page.metadata.more
            if not more:
                return found

    def _find_owners(self, said: str, limit: Limit) -> list[dict[str, Any]]:
        """The object that the run's ConfigMaps belong to, or none."""
        if said == "none" or (said == "auto" and not self._login.in_pod):
            return []
        if said != "auto":
            version, *rest = said.rsplit("/", 3)
            if not all((version, *rest)) or len(rest) != 3:
                raise OptionError(
                    f"option 'owner': '{said}' is neither auto, none nor "
                    "<apiVersion>/<kind>/<name>/<uid>"
                )
            named = dict(zip(("kind", "name", "uid"), rest, strict=True))
            return [{"apiVersion": version, **named}]
        spaces = f"namespaces/{self._login.namespace}"
        name = os.environ.get("POD_NAME") or socket.gethostname()
        path, owners = f"/api/v1/{spaces}/pods/{name}", []
        while path:
            answer = self._ask("GET", self._login.base + path, limit, passing=(403, 404))
            path = ""
            if answer.status == 200:
                for it in msgspec.json.decode(answer.body)["metadata"].get("ownerReferences", ()):
                    if it.get("controller"):
                        names = ("apiVersion", "kind", "name", "uid")
                        owners = [{name: it[name] for name in names}]
                        kind = f"{it['kind'].lower()}s"
                        path = f"/apis/{it['apiVersion']}/{spaces}/{kind}/{it['name']}"
        return owners

    def _ask_json(self, method: str, path: str, limit: Limit, body: Any = None) -> Any:
        return msgspec.json.decode(self._ask(method, path, limit, body).body)

    def _ask(
        self, method: str, path: str, limit: Limit, body: Any = None, passing: tuple[int, ...] = ()
    ) -> Answer:
        """The answer; raises `RefusedError` for an error whose status is not in ``passing``."""
        headers, data = self._login.headers(), None
        if body is not None:
            headers = headers | {"Content-Type": "application/json"}
            data = msgspec.json.encode(body)
        answer = self._login.http.ask(Request(method, path, headers, data), limit)
        self._offset = time_of(answer.headers) - time.monotonic()
        if answer.status >= 400 and answer.status not in passing:
            self._refuse(answer.status, answer.headers, answer.body, headers, limit)
        return answer

    def _refuse(
        self, status: int, headers: Message, body: bytes, sent: Mapping[str, str], limit: Limit
    ) -> NoReturn:
        error = RefusedError(status, body)
        if status == 401:
            error.renewed = self._login.renew(sent)
        pause = headers.get("Retry-After", "")
        if error.status in (429, 503) and pause.isdecimal() and 0 < int(pause) < limit.seconds:
            # The random factor keeps clients from retrying all at the same moment.
            limit.sleep(min(limit.seconds, int(pause) * random.uniform(1, 1.25)))
        raise error


class RefusedError(Exception):
    """The server refused a request.

    Attributes:
        status: the HTTP status.
        renewed: there is a newer token than the refused token.
    """

    renewed = False

    def __init__(self, status: int, body: bytes) -> None:
        try:
            text = str(msgspec.json.decode(body)["message"])
        except (*UNREADABLE, KeyError, TypeError):
            text = body.decode(errors="replace")
        super().__init__(f"HTTP {status}: {' '.join(text[:300].split())}")
        self.status = status


class _Guard(NamedTuple):
    """The attributes that an object must still have to be replaced or deleted."""

    revision: int
    uid: str

    @property
    def fields(self) -> dict[str, str]:
        return {"resourceVersion": str(self.revision), "uid": self.uid}


class _Metadata(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""  # noqa: N815 - the API's name
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    more: str = msgspec.field(name="continue", default="")


class _Item(msgspec.Struct):
    """A ConfigMap."""

    metadata: _Metadata
    binaryData: dict[str, bytes] = {}  # noqa: N815 - the API's name

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def path(self) -> str:
        return self.metadata.annotations.get(_KEY, "")

    @property
    def is_put(self) -> bool:
        return _PUT in self.metadata.annotations

    @property
    def guard(self) -> _Guard:
        return _Guard(int(self.metadata.resourceVersion), self.metadata.uid)

    @property
    def stored(self) -> Stored:
        return Stored.parse(self.binaryData.get(_VALUE, b""), self.guard)


class _Page(msgspec.Struct):
    metadata: _Metadata
    items: list[_Item] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_items, _pages = msgspec.json.Decoder(_Item), msgspec.json.Decoder(_Page)
_events = msgspec.json.Decoder(_Event)


class _Watch:
    """A watch of a key, and what the key held at the last event."""

    def __init__(self, stream: Stream, current: Stored | None) -> None:
        self.stream, self.current = stream, current
        self._until = time.monotonic() + _WATCH_SECONDS

    def is_past(self, seen: Stored | None) -> bool:
        """Whether the key holds a later value than ``seen``."""
        if self.current is None or seen is None:
            return self.current is not None
        later = self.current.guard.revision > seen.guard.revision
        return later and self.current.version != seen.version

    def follow(self, limit: Limit) -> bool:
        """Take the next events; False: the watch has ended."""
        left = self._until - time.monotonic()
        if left <= 0:
            return False
        try:
            lines = self.stream.lines(limit.within(left))
        except TimeoutError:
            if time.monotonic() >= limit.deadline:
                raise
            return False
        for line in lines:
            event = _events.decode(line)
            if event.type == "ERROR":
                return False  # Such as 410, Gone: the server has forgotten the watch's position.
            self.current = None if event.type == "DELETED" else _items.decode(event.object).stored
        return bool(lines)


@dataclass(frozen=True, kw_only=True)
class _Login:
    """Where the API server is, and how to log in.

    Attributes:
        where: the server's name for people.
        base: the beginning of each URL path.
        headers: returns a request's headers, with the present token.
        renew: whether there is a newer token than in the refused headers.
    """

    where: str
    namespace: str
    http: Http
    base: str = ""
    headers: Callable[[], dict[str, str]]
    renew: Callable[[Mapping[str, str]], bool]
    in_pod: bool = False


def _log_in(endpoint: str, options: Options, timeout: float) -> _Login:
    """Log in by endpoint, the pod's service account, or kubeconfig; raises `ValueError`."""
    if options.user is not None:
        raise ValueError("the Kubernetes API takes no user: leave it out, and set a token")
    ways = (options.token, options.token_file, options.password or options.password_file)
    if sum(it is not None for it in ways) > 1:
        raise ValueError("several of token, token_file and password are set: leave all but one out")
    by_file = options.context is not None or options.kubeconfig is not None
    if by_file and endpoint.strip():
        raise ValueError("with an endpoint, context and kubeconfig have no effect: leave them out")
    if endpoint.strip():
        return _of_endpoint(endpoint, options, timeout)
    if by_file or not _in_pod():
        return _of_kubeconfig(options, timeout)
    options = replace(
        options,
        namespace=options.namespace or first_line("the namespace", str(_ACCOUNT / "namespace")),
        ca_file=options.ca_file or str(_ACCOUNT / "ca.crt"),
        token_file=options.token_file if any(ways) else str(_ACCOUNT / "token"),
    )
    login = _of_endpoint(_in_pod(), options, timeout)
    return replace(login, in_pod=True)


def _in_pod() -> str:
    """The endpoint from a pod's environment; "": this host is no pod."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{it}", "") for it in ("HOST", "PORT"))
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{port or 443}" if host else ""


def _of_endpoint(endpoint: str, options: Options, timeout: float) -> _Login:
    port = 80 if endpoint.lower().startswith("http://") else 443
    target = parse_endpoint(endpoint, default_port=port, schemes=("https", "http"))
    target.refuse_all_but(path=True)
    if target.user or target.password:
        raise ValueError("the endpoint has a user: leave it out, and set a token")
    target = replace(target, scheme=target.scheme or "https")

    def headers() -> dict[str, str]:
        token = options.token or options.current_password()
        token = given_or_in_file(token, "token_file", options.token_file)
        return _HEADERS | ({"Authorization": f"Bearer {token}"} if token else {})

    kept = FromFiles(headers, options.token_file, options.password_file)
    return _Login(
        where=redact(endpoint),
        namespace=options.namespace or "default",
        http=http_of(target, options, timeout),
        base=target.path.rstrip("/"),
        headers=kept.get,
        renew=lambda sent: sent.get("Authorization") != kept.get().get("Authorization"),
    )


def _kubeconfig(options: Options) -> Callable[[], tuple[Any, dict[str, Any]]]:
    """A reader of the kubeconfig: how to reach the server, and the context in use."""
    try:
        client: Any = import_module("kubernetes.client")
        config: Any = import_module("kubernetes.config.kube_config")
    except ImportError as error:
        raise cannot_import("a kubeconfig", "rdzv-plugins[kubernetes]", error) from error
    path = options.kubeconfig or config.KUBE_CONFIG_DEFAULT_LOCATION
    if not any(os.path.exists(os.path.expanduser(it)) for it in path.split(os.pathsep)):
        raise ValueError(
            f"there is no endpoint, no service account of a pod, and no kubeconfig ({path})"
        )

    def load() -> tuple[Any, dict[str, Any]]:
        read = config.KubeConfigMerger(path).config
        loader = config.KubeConfigLoader(read, options.context, config_base_path=None)
        made = client.Configuration()
        loader.load_and_set(made)
        return made, loader.current_context["context"]

    return load


def _of_kubeconfig(options: Options, timeout: float) -> _Login:
    load, lock = _kubeconfig(options), threading.Lock()
    try:
        known, context = load()
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(f"the kubeconfig cannot be used ({said})") from error
    if not known.verify_ssl:
        raise ValueError("the kubeconfig verifies no certificate: give it a certificate authority")
    if getattr(known, "tls_server_name", None):
        raise ValueError("the kubeconfig has a tls-server-name, which this backend cannot check")

    def token() -> dict[str, str]:
        with lock:
            said = known.get_api_key_with_prefix("BearerToken", "authorization")
        return _HEADERS | ({"Authorization": said} if said else {})

    def renew(sent: Mapping[str, str]) -> bool:
        nonlocal known
        # A file that is being replaced may be gone, or incomplete.
        with lock, suppress(Exception):
            known, _ = load()
        return token().get("Authorization") != sent.get("Authorization")

    own = replace(
        options,
        namespace=options.namespace or context.get("namespace"),
        ca_file=options.ca_file or known.ssl_ca_cert,
        cert_file=options.cert_file or known.cert_file,
        key_file=options.key_file or known.key_file,
    )
    made = _of_endpoint(known.host, own, timeout)
    if options.token or options.token_file or options.current_password():
        return made
    return replace(made, headers=token, renew=renew)


def _verbs(rules: Iterable[Mapping[str, Any]]) -> set[str]:
    """The verbs that the rules allow on all ConfigMaps."""
    return {
        verb
        for rule in rules
        if {"", "*"} & {*(rule.get("apiGroups") or ())}
        and {"configmaps", "*"} & {*(rule.get("resources") or ())}
        and not rule.get("resourceNames")
        for verb in rule.get("verbs") or ()
    }


def _own_labels(said: str | None) -> dict[str, str]:
    """The labels of option 'labels'; the API server checks their values."""
    pairs = [it.partition("=") for it in (said or "").split("+") if it]
    if not all(name and equals for name, equals, _ in pairs):
        raise ValueError(f"option 'labels': '{said}' is not <name>=<value>+<name>=<value>")
    return {name: value for name, _, value in pairs}


def _hash(text: str) -> str:
    """A hash of ``text`` in 26 characters that a name may have."""
    return b32encode(hashlib.sha256(text.encode()).digest()[:16]).decode().rstrip("=").lower()


def _label(text: str) -> str:
    """A label's value for ``text``, for people and selectors; two texts may have the same."""
    return re.sub("[^A-Za-z0-9._-]", "_", unquote(text))[:60].strip("._-")


def _part(path: str) -> str:
    """A label's value for the first segment of a key."""
    return f"of.{_label(path.split('/')[1])}".rstrip(".")
