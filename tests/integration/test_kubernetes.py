"""Kubernetes' own: rights, tokens, kubeconfigs, pods' accounts, watches, many requests.

The API server and its etcd are real, and so is each object. No kubelet and no controller runs: the
tests write what those would, such as a pod, or the files of its service account.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from rdzv_plugins.cli.check.store import check_requests
from rdzv_plugins.kv import AccessDeniedError, KeyValueClient, RendezvousConnectionError
from rdzv_plugins.kv.findings import Mark
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.stores import kubernetes, open_client
from rdzv_plugins.stores._http import Http
from rdzv_plugins.stores.kubernetes import Client
from rdzv_plugins.testing.harness import present, until
from rdzv_plugins.testing.threads import Background, together
from tests import Measure
from tests.integration.stores import RunningStore, kind_of, started
from tests.integration.test_rotation import patiently
from tests.servers import Security
from tests.servers.http import ask

KIND = kind_of("kubernetes")
PAGE = Path(__file__).parents[2] / "docs/start/kubernetes-api.md"
ADMIN = Security(user="root", password="admin-of-the-tests")
VERBS = ["get", "list", "watch", "create", "update", "delete"]
RULES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/{}"

# Seconds for what takes no time on a machine that has nothing else to do.
PATIENCE = 60.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300), pytest.mark.xdist_group("kubernetes")]


EXAMPLES = Path(__file__).parents[2] / "examples/kubernetes/api"


@dataclass(frozen=True)
class Cluster:
    """An API server under RBAC, and its administrator."""

    store: RunningStore

    @property
    def port(self) -> int:
        return self.store.address[1]

    @property
    def certificate(self) -> Path:
        return Path(self.store.config["ca_file"])

    def status(self, method: str, path: str, body: object = None, token: str = "") -> int:
        return self._ask(method, path, body, token)[0]

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """As the administrator; it must succeed."""
        status, answer = self._ask(method, path, body)
        assert 200 <= status < 300, answer
        return answer

    def _ask(self, method: str, path: str, body: object, token: str = "") -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token or ADMIN.password}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        secure = replace(ADMIN, cert_file=str(self.certificate))
        return ask(
            self.port, method, path, body, security=secure, headers=headers, timeout=PATIENCE
        )

    def make_pod(self, namespace: str, name: str) -> str:
        """Its path; on a node, so that it is there until a kubelet has ended it."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        container = {"name": "agent", "image": "train"}
        spec = {"nodeName": "node1", "restartPolicy": "Never", "containers": [container]}
        self.ask("POST", path, {"metadata": {"name": name}, "spec": spec})
        return f"{path}/{name}"

    def namespace(self, name: str) -> str:
        self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def apply(self, namespace: str, manifests: list[dict[str, Any]]) -> None:
        """As ``kubectl -n <namespace> apply``, of what is not there yet."""
        for it in manifests:
            kind = it["kind"].lower() + "s"
            group = "api" if it["apiVersion"] == "v1" else "apis"
            place = f"/{group}/{it['apiVersion']}/namespaces/{namespace}/{kind}"
            # kubectl adds it to the subjects too.
            subjects = [{**them, "namespace": namespace} for them in it.get("subjects", ())]
            self.ask("POST", place, it | ({"subjects": subjects} if subjects else {}))

    def token(self, namespace: str) -> str:
        """The token of the service account rdzv, as a kubelet asks for it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/rdzv/token"
        answer = self.ask("POST", path, {"spec": {"expirationSeconds": 600}})
        return str(answer["status"]["token"])

    def brief_token(self, namespace: str, seconds: float) -> str:
        """Signed as the API server signs it, which signs none for less than 600 s.

        It is accepted for a minute longer than it says.
        """
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/rdzv"
        account = {"name": "rdzv", "uid": self.ask("GET", path)["metadata"]["uid"]}
        issuer, now = "https://kubernetes.default.svc", int(time.time())
        claims = {
            "iss": issuer, "aud": [issuer], "sub": f"system:serviceaccount:{namespace}:rdzv",
            "iat": now - 120, "nbf": now - 120, "exp": now + seconds - 60,
            "kubernetes.io": {"namespace": namespace, "serviceaccount": account},
        }  # fmt: skip
        key = load_pem_private_key(self.certificate.with_suffix(".key").read_bytes(), None)
        assert isinstance(key, RSAPrivateKey)
        parts = [_encoded(json.dumps(it).encode()) for it in ({"alg": "RS256"}, claims)]
        signature = key.sign(".".join(parts).encode(), PKCS1v15(), SHA256())
        return ".".join([*parts, _encoded(signature)])

    def open(self, namespace: str, run: str = "run", **config: str) -> KeyValueClient:
        own = {"ca_file": str(self.certificate), "namespace": namespace, "owner": "none"}
        return open_client("kubernetes", self.store.endpoint, run, own | config)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def manifests() -> list[dict[str, Any]]:
    """The manifests of the page that tells which rights the pods need."""
    yaml: Any = pytest.importorskip("yaml")
    text = re.search(r"```yaml role.yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert text is not None
    return list(yaml.safe_load_all(text[1]))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started(KIND, security=ADMIN) as store:
        yield Cluster(store)


@pytest.fixture
def space(cluster: Cluster) -> str:
    """A namespace with the documented role, service account and binding."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.namespace(name)
    cluster.apply(name, manifests())
    await_rights(cluster, name, VERBS)
    return name


@pytest.fixture
def login(cluster: Cluster, space: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The service account's token, in this process' environment."""
    monkeypatch.delenv("RDZV_PLUGINS_USER", raising=False)
    monkeypatch.delenv("RDZV_PLUGINS_PASSWORD", raising=False)
    token = cluster.token(space)
    monkeypatch.setenv("RDZV_PLUGINS_TOKEN", token)
    return token


def allow(cluster: Cluster, space: str, verbs: list[str]) -> None:
    """Have the role only these verbs on ConfigMaps, from now on."""
    (role,) = (it for it in manifests() if it["kind"] == "Role")
    (rule,) = (it for it in role["rules"] if it["resources"] == ["configmaps"])
    rule["verbs"] = verbs
    cluster.ask("PUT", RULES.format(space, "roles/rdzv"), role)
    await_rights(cluster, space, verbs)


def await_rights(
    cluster: Cluster, space: str, verbs: list[str], resource: str = "configmaps"
) -> None:
    """The API server learns of a role by a watch of its own."""
    user = f"system:serviceaccount:{space}:rdzv"

    def allowed(verb: str) -> bool:
        asked = {"namespace": space, "resource": resource, "verb": verb}
        review = {"spec": {"user": user, "resourceAttributes": asked}}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(cluster.ask("POST", path, review)["status"]["allowed"])

    assert until(lambda: [it for it in VERBS if allowed(it)] == verbs, PATIENCE)


def test_the_files_of_the_recipe_are_applied(cluster: Cluster) -> None:
    """The server, 1.20, drops what later versions brought, and runs no Job: no controller does."""
    yaml: Any = pytest.importorskip("yaml")
    space = cluster.namespace(f"test-{secrets.token_hex(4)}")
    role = list(yaml.safe_load_all((EXAMPLES / "role.yaml").read_text()))
    assert role == manifests()
    cluster.apply(space, role)
    made = {}
    for name in ("job", "indexed-job"):
        jobs = list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))
        jobs[-1]["metadata"]["name"] = name
        cluster.apply(space, jobs)
        path = f"/apis/batch/v1/namespaces/{space}/jobs/{name}"
        made[name] = cluster.ask("GET", path)["spec"]["template"]["spec"]
    for pod in made.values():
        assert pod["serviceAccountName"] == "rdzv"
        (container,) = pod["containers"]
        env = [it for it in container["env"] if "valueFrom" in it]
        fields = {it["name"]: it["valueFrom"]["fieldRef"]["fieldPath"] for it in env}
        assert fields["POD_NAME"] == "metadata.name"
    wanted = {("configmaps", it) for it in VERBS} | {("pods", "get"), ("jobs", "get")}
    assert until(lambda: rights(cluster, space) == wanted, PATIENCE)


def rights(cluster: Cluster, space: str) -> set[tuple[str, str]]:
    """What the service account may do with objects of these kinds."""
    found = set()
    user = f"system:serviceaccount:{space}:rdzv"
    groups = {"configmaps": "", "pods": "", "secrets": "", "jobs": "batch"}
    for kind, group in groups.items():
        for verb in (*VERBS, "patch", "deletecollection"):
            asked = {"namespace": space, "resource": kind, "verb": verb, "group": group}
            review = {"spec": {"resourceAttributes": asked, "user": user}}
            path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
            if cluster.ask("POST", path, review)["status"]["allowed"]:
                found.add((kind, verb))
    return found


@pytest.mark.usefixtures("login")
def test_the_documented_role_is_enough(cluster: Cluster, space: str) -> None:
    with closing(cluster.open(space)) as client:
        found = check_requests(client)
        assert found.mark is Mark.OK, found
        rights = [it for it in client.inspect() if it.what == "rights"]
    assert [it.mark for it in rights] == [Mark.OK], rights


@pytest.mark.usefixtures("login")
@pytest.mark.parametrize("verb", VERBS)
def test_without_one_of_its_verbs_a_job_is_told_which(
    cluster: Cluster, space: str, verb: str
) -> None:
    others = [it for it in VERBS if it != verb]
    allow(cluster, space, others)
    told = ""
    try:
        with closing(cluster.open(space)) as client:
            (rights,) = (it for it in client.inspect() if it.what == "rights")
            assert rights.mark is Mark.FAILED
            assert f"{verb} are missing" in rights.found
            told = check_requests(client).found
    except AccessDeniedError as error:
        told = str(error)
    assert "denied a right" in told
    assert f'cannot {verb} resource "configmaps"' in told
    assert "kubectl" in told
    assert "\n" not in told
    allow(cluster, space, VERBS)
    with closing(cluster.open(space)) as client:
        assert check_requests(client).mark is Mark.OK


def test_a_token_that_is_renewed_outlives_the_old_one(
    cluster: Cluster, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet renews the file before the token in it expires; here it is late once, too."""
    monkeypatch.delenv("RDZV_PLUGINS_USER", raising=False)
    monkeypatch.delenv("RDZV_PLUGINS_PASSWORD", raising=False)
    path = f"/api/v1/namespaces/{space}/configmaps"
    file = tmp_path / "token"
    old = cluster.brief_token(space, 15)
    file.write_text(old)
    with closing(cluster.open(space, token_file=str(file))) as client:
        client.put("key", b"one")
        # The API server remembers for some seconds that a token was good.
        assert until(lambda: cluster.status("GET", path, token=old) == 401, PATIENCE)
        with pytest.raises(AccessDeniedError, match="refused the token"):
            client.put("key", b"late")
        file.write_text(cluster.brief_token(space, 15))
        client.put("key", b"two")
        renewed = file.read_text()
        file.write_text(cluster.token(space))
        assert until(lambda: cluster.status("GET", path, token=renewed) == 401, PATIENCE)
        client.put("key", b"three")
        assert present(client.get("key")).value == b"three"


@pytest.fixture
def pod(
    cluster: Cluster, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Let this process be in a pod of this name: its variables, and its account's files.

    Those of a real pod are in a folder below /var/run, in whose place is one of the test's.
    """
    for name in ("USER", "PASSWORD", "CA_FILE"):
        monkeypatch.delenv(f"RDZV_PLUGINS_{name}", raising=False)
    (tmp_path / "token").write_text(cluster.token(space))
    (tmp_path / "ca.crt").write_bytes(cluster.certificate.read_bytes())
    (tmp_path / "namespace").write_text(space)
    monkeypatch.setattr(kubernetes, "_ACCOUNT", tmp_path)

    def be(name: str) -> None:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.port))
        monkeypatch.setenv("POD_NAME", name)

    return be


def maps(cluster: Cluster, space: str) -> list[Any]:
    path = f"/api/v1/namespaces/{space}/configmaps?labelSelector=rdzv-plugins/run"
    return list(cluster.ask("GET", path)["items"])


def test_a_pod_needs_no_endpoint_and_its_job_gets_what_it_leaves(
    cluster: Cluster, space: str, pod: Callable[[str], None]
) -> None:
    container = {"name": "agent", "image": "train"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    made = cluster.ask(
        "POST",
        f"/apis/batch/v1/namespaces/{space}/jobs",
        {"metadata": {"name": "train"}, "spec": {"template": template}},
    )
    owner = {
        "apiVersion": "batch/v1", "kind": "Job", "name": "train", "controller": True,
        "uid": made["metadata"]["uid"],
    }  # fmt: skip
    metadata = {"name": "train-0-xyz", "ownerReferences": [owner]}
    path = f"/api/v1/namespaces/{space}/pods"
    cluster.ask("POST", path, {"metadata": metadata, "spec": template["spec"]})
    pod("train-0-xyz")
    with closing(open_client("kubernetes", "", "run")) as client:
        client.put("key", b"one")
        client.expire(600)
        found = maps(cluster, space)
        assert len(found) == 2
        named = {name: it for name, it in owner.items() if name != "controller"}
        for it in found:
            # What Kubernetes' collector goes by.
            assert it["metadata"]["ownerReferences"] == [named]
    with closing(open_client("kubernetes", "", "other", {"owner": "none"})) as client:
        client.put("key", b"one")
        assert sum("ownerReferences" not in it["metadata"] for it in maps(cluster, space)) == 1


@pytest.mark.usefixtures("login")
def test_labels_for_a_policy_and_a_namespace_that_is_deleted(cluster: Cluster, space: str) -> None:
    with pytest.raises(ValueError, match="option 'labels'"):
        cluster.open(space, labels="team")
    with closing(cluster.open(space, labels="team=ml+cost-center=42")) as client:
        client.put("key", b"")
        client.expire(600)
        own = [it["metadata"]["labels"] for it in maps(cluster, space)]
        assert [(it["team"], it["cost-center"]) for it in own] == [("ml", "42")] * 2
        # No controller deletes what is in it: it stays so.
        cluster.ask("DELETE", f"/api/v1/namespaces/{space}")
        with pytest.raises(RendezvousConnectionError, match="is deleting the namespace") as told:
            client.put("other", b"")
        assert not isinstance(told.value, AccessDeniedError)


def test_a_pod_without_a_controller_owns_nothing(
    cluster: Cluster, space: str, pod: Callable[[str], None]
) -> None:
    pod("nobody-knows-it")
    with closing(open_client("kubernetes", "", "run")) as client:
        client.put("key", b"one")
    assert ["ownerReferences" in it["metadata"] for it in maps(cluster, space)] == [False]


def test_a_kubeconfig_names_server_namespace_and_token(
    cluster: Cluster, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kubernetes.config")
    for name in ("USER", "PASSWORD"):
        monkeypatch.delenv(f"RDZV_PLUGINS_{name}", raising=False)
    other = cluster.namespace(f"{space}-b")
    server = {"server": cluster.store.endpoint, "certificate-authority": str(cluster.certificate)}
    users = {"admin": ADMIN.password, "pod": cluster.token(space)}
    contexts = {"first": (space, "pod"), "second": (other, "admin"), "denied": (other, "pod")}
    file = tmp_path / "config"
    file.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "first",
                "clusters": [{"name": "it", "cluster": server}],
                "users": [{"name": n, "user": {"token": it}} for n, it in users.items()],
                "contexts": [
                    {"name": name, "context": {"cluster": "it", "namespace": place, "user": user}}
                    for name, (place, user) in contexts.items()
                ],
            }
        )
    )
    given = {"kubeconfig": str(file)}
    contexts_of: list[tuple[dict[str, str], str]] = [({}, space), ({"context": "second"}, other)]
    for context, place in contexts_of:
        with closing(open_client("kubernetes", "", "run", given | context)) as client:
            client.put("key", place.encode())
        assert len(maps(cluster, place)) == 1
    with pytest.raises(AccessDeniedError, match="denied a right"):
        open_client("kubernetes", "", "run", given | {"context": "denied"}).close()
    with pytest.raises(ValueError, match="none"):
        open_client("kubernetes", "", "run", given | {"context": "none"}).close()


@pytest.mark.usefixtures("login")
def test_a_list_comes_in_pages_and_begins_again_if_the_server_forgets(
    cluster: Cluster, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_PAGE", 7)
    with closing(cluster.open(space)) as client:
        assert isinstance(client, Client)
        keys = {f"nodes/{number}": b"%d" % number for number in range(30)}
        client.put_many(keys)
        asked: list[str] = []
        statuses: list[int] = []
        http = client._login.http
        whole = http.ask

        def watched(request: Any, limit: Any) -> Any:
            if re.search(r"continue=\w", request.target) and len(asked) == 3:
                forget_the_past(cluster, space)
            asked.append(request.target)
            answer = whole(request, limit)
            statuses.append(answer.status)
            return answer

        monkeypatch.setattr(http, "ask", watched)
        assert {key: it.value for key, it in client.list("nodes/").items()} == keys
        pages = [it for it in asked if "continue=" in it]
        # Five pages; three of them twice, since the fourth was of a state that was gone.
        assert statuses.count(410) == 1
        assert len(pages) > 5


@pytest.mark.usefixtures("login")
def test_many_write_one_key_at_once(
    cluster: Cluster, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they ring a bell. A write that meets another has been replaced by it, and is done."""
    asked: list[tuple[str, int]] = []
    whole = Http.ask

    def counted(self: Http, request: Any, limit: Any, held: float = 0.0) -> Any:
        answer = whole(self, request, limit, held)
        asked.append((request.method, answer.status))
        return answer

    clients = [cluster.open(space) for _ in range(16)]
    monkeypatch.setattr(Http, "ask", counted)
    try:
        for number in range(10):
            values = [b"%d of %d" % (it, number) for it in range(len(clients))]
            together(
                [partial(it.put, "bell", own) for it, own in zip(clients, values, strict=True)]
            )
            assert {present(it.get("bell")).value for it in clients[:2]} < {*values}
    finally:
        for it in clients:
            it.close()
    writes = [status for method, status in asked if method in ("PUT", "POST")]
    assert max(writes) == 409, "none met another one, or the server gave up"
    # The first of all may have found none to replace.
    assert len(writes) <= 2 * 10 * len(clients)


@pytest.mark.usefixtures("login")
def test_a_node_at_rest_asks_as_often_as_the_page_says(
    cluster: Cluster, space: str, monkeypatch: pytest.MonkeyPatch, record_property: Measure
) -> None:
    text = (Path(__file__).parents[2] / "docs/stores.md").read_text()
    said = re.search(r"some (\d+)\s+requests\s+a\s+minute", text)
    assert said is not None
    nodes, seconds = 4, 60.0
    config = {"ca_file": str(cluster.certificate), "namespace": space, "owner": "none"}
    asked: list[float] = []
    for name in ("ask", "follow"):
        whole = getattr(Http, name)

        def counted(*args: Any, whole: Any = whole, **more: Any) -> Any:
            asked.append(time.monotonic())
            return whole(*args, **more)

        monkeypatch.setattr(Http, name, counted)
    handlers = [
        create_handler(
            "kubernetes",
            RendezvousParameters(
                "kubernetes", cluster.store.endpoint, "rest", nodes, nodes,
                local_addr="127.0.0.1", **config,
            ),
        )
        for _ in range(nodes)
    ]  # fmt: skip
    try:
        together([it.next_rendezvous for it in handlers])
        # The leader tidies up, and the history is written.
        time.sleep(10)
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            assert all(it.num_nodes_waiting() == 0 for it in handlers)
            time.sleep(1)
        each = sum(it > began for it in asked) / nodes * 60 / (time.monotonic() - began)
    finally:
        for it in handlers:
            it.shutdown()
    record_property("requests a node and minute", round(each, 1))
    assert 0.7 * int(said[1]) < each < 1.3 * int(said[1])


@pytest.mark.usefixtures("login")
def test_a_write_that_meets_a_compare_and_set_comes_after_it(cluster: Cluster, space: str) -> None:
    """Nobody's compare-and-set is lost by a write that it did not see."""
    with closing(cluster.open(space)) as one, closing(cluster.open(space)) as other:
        for number in range(50):
            before = one.put("key", b"%d" % number)
            calls: list[Callable[[], Any]] = [
                partial(other.put, "key", b"put"),
                partial(one.compare_and_set, "key", b"set", before),
            ]
            put, (entry, won) = together(calls)
            # In either order the write is the last.
            found = present(one.get("key"))
            assert (found.value, found.version) == (b"put", put)
            assert won == (present(entry).value == b"set")


def forget_the_past(cluster: Cluster, space: str) -> None:
    """Have etcd forget all but its latest state, as the API server does every five minutes."""
    path = f"/api/v1/namespaces/{space}/configmaps"
    cluster.ask("POST", path, {"metadata": {"name": f"other-{time.monotonic_ns()}"}})
    server = cluster.store.server
    assert server is not None
    port, plain = server.nodes[0].ports[1], Security()
    latest = ask(port, "POST", "/v3/kv/range", {"key": "AA=="}, security=plain)[1]
    revision = latest["header"]["revision"]
    body = {"revision": revision, "physical": True}
    assert ask(port, "POST", "/v3/kv/compaction", body, security=plain)[0] == 200


@pytest.fixture
def open_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a server without access control beside the one that has it."""
    for name in ("USER", "PASSWORD", "CA_FILE"):
        monkeypatch.delenv(f"RDZV_PLUGINS_{name}", raising=False)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("open_to_all")
def test_a_watch_of_what_the_server_has_forgotten_misses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The API server is started anew between a waiter's read and its watch: 410, Gone."""
    with started(KIND) as store, closing(store.open("run")) as writer:
        assert store.server is not None
        node = store.server.nodes[0]
        events: list[Any] = []
        first = writer.put("key", b"one")
        waiter = store.open("run", request_timeout=5 * PATIENCE)
        assert isinstance(waiter, Client)
        http = waiter._login.http
        whole, once = http.follow, [True]

        def late(request: Any, limit: Any) -> Any:
            if once:
                once.clear()
                # These are other keys; the last change of all is that of the key.
                writer.put_many({f"other/{number}": b"x" for number in range(3)})
                node.stop()
                node.start(timeout=4 * PATIENCE)
                patiently(partial(writer.put, "last", b"x"), PATIENCE)
            stream = whole(request, limit)
            lines = stream.lines

            def told(limit: Any) -> list[bytes]:
                found = lines(limit)
                events.extend(json.loads(it) for it in found)
                return found

            monkeypatch.setattr(stream, "lines", told)
            return stream

        monkeypatch.setattr(http, "follow", late)
        waiting = Background(lambda: waiter.wait("key", first, 6 * PATIENCE))
        assert until(lambda: not once, PATIENCE)
        assert until(lambda: bool(events) or waiting.done(), 5 * PATIENCE)
        second = patiently(partial(writer.put, "key", b"two"), PATIENCE)
        assert present(waiting.result(PATIENCE)).version == second
        gone = [it["object"].get("code") for it in events if it["type"] == "ERROR"]
        assert gone == [410], events
        waiter.close()


@pytest.mark.usefixtures("open_to_all")
def test_one_of_two_api_servers_is_killed() -> None:
    with started(KIND, nodes=2) as store:
        assert store.server is not None
        # The first one has the etcd of both as its child: clients use the second first.
        hosts = store.endpoint.removeprefix("https://").split(",")
        swapped = replace(store, endpoint=f"https://{','.join(reversed(hosts))}")
        with closing(swapped.open("run")) as client, closing(store.open("run")) as other:
            version = client.put("key", b"one")
            waiting = Background(lambda: client.wait("key", version, PATIENCE))
            assert not waiting.done(1.0)
            store.server.nodes[1].kill()
            began = time.monotonic()
            client.put("bell", b"after")
            took = time.monotonic() - began
            written = other.put("key", b"two")
            assert present(waiting.result(PATIENCE)).version == written
            assert present(other.get("bell")).value == b"after"
            assert took < 5, "a request takes its time, and no more"


@pytest.mark.usefixtures("login")
def test_an_api_server_that_is_too_busy_is_asked_again_when_it_says(
    cluster: Cluster, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its priority and fairness lets this user make few requests at once, and rejects the rest."""
    flow = "/apis/flowcontrol.apiserver.k8s.io/v1beta1"
    limited = {"assuredConcurrencyShares": 1, "limitResponse": {"type": "Reject"}}
    level = {"metadata": {"name": "few"}, "spec": {"type": "Limited", "limited": limited}}
    subject = {"kind": "ServiceAccount", "serviceAccount": {"namespace": space, "name": "rdzv"}}
    everything = {
        "verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"],
    }  # fmt: skip
    rule = {"subjects": [subject], "resourceRules": [everything]}
    schema = {
        "metadata": {"name": "few"},
        "spec": {
            "priorityLevelConfiguration": {"name": "few"}, "matchingPrecedence": 10,
            "distinguisherMethod": {"type": "ByUser"}, "rules": [rule],
        },
    }  # fmt: skip
    cluster.ask("POST", f"{flow}/prioritylevelconfigurations", level)
    cluster.ask("POST", f"{flow}/flowschemas", schema)
    rejected: list[str | None] = []
    refuse = Client._refuse

    def counted(self: Client, status: int, headers: Any, *rest: Any) -> Any:
        if status == 429:
            rejected.append(headers.get("Retry-After"))
        return refuse(self, status, headers, *rest)

    monkeypatch.setattr(Client, "_refuse", counted)
    config = {"ca_file": str(cluster.certificate), "namespace": space, "owner": "none"}
    clients = [
        open_client("kubernetes", cluster.store.endpoint, "run", config, request_timeout=60)
        for _ in range(16)
    ]
    written = 0
    try:
        deadline = time.monotonic() + PATIENCE
        while not rejected and time.monotonic() < deadline:
            value = b"x" * 300_000
            together([partial(it.put, f"key/{n}", value) for n, it in enumerate(clients)])
            written += 1
        assert {it.value for it in clients[0].list("key/").values()} == {value}
    finally:
        for it in clients:
            it.close()
        cluster.ask("DELETE", f"{flow}/flowschemas/few")
        cluster.ask("DELETE", f"{flow}/prioritylevelconfigurations/few")
    assert rejected, f"{written} times 16 writers were not too many"
    assert set(rejected) == {"1"}
