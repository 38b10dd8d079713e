"""Kubernetes' own: rights, kubeconfigs, pods' service accounts and ends, what owns ConfigMaps.

The API server and its etcd are real, and so is each object. No kubelet and no controller runs: the
tests write what those would, such as a pod, or the files of its service account.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.cli.check.store import check_requests
from rdzv_plugins.kv import AccessDeniedError, KeyValueClient
from rdzv_plugins.kv.findings import Mark
from rdzv_plugins.servers import Security
from rdzv_plugins.servers.http import ask
from rdzv_plugins.stores import kubernetes, open_client
from rdzv_plugins.testing.harness import until
from tests import Measure
from tests.integration.jobs import Job
from tests.integration.stores import KINDS, RunningStore, started

KIND = next(kind for kind in KINDS if kind.name == "kubernetes")
PAGE = Path(__file__).parents[2] / "docs/start/kubernetes-api.md"
ADMIN = Security(user="root", password="admin-of-the-tests")
VERBS = ["get", "list", "watch", "create", "update", "delete"]
RULES = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/{}"

# Seconds for what takes no time on a machine that has nothing else to do.
PATIENCE = 60.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300), pytest.mark.xdist_group("kubernetes")]


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
            place = RULES.format(namespace, kind)
            if it["apiVersion"] == "v1":
                place = f"/api/v1/namespaces/{namespace}/{kind}"
            # kubectl adds it to the subjects too.
            subjects = [{**them, "namespace": namespace} for them in it.get("subjects", ())]
            self.ask("POST", place, it | ({"subjects": subjects} if subjects else {}))

    def token(self, namespace: str) -> str:
        """Of the service account rdzv, as a kubelet asks for it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/rdzv/token"
        answer = self.ask("POST", path, {"spec": {"expirationSeconds": 600}})
        return str(answer["status"]["token"])

    def open(self, namespace: str, run: str = "run", **config: str) -> KeyValueClient:
        own = {"ca_file": str(self.certificate), "namespace": namespace, "owner": "none"}
        return open_client("kubernetes", self.store.endpoint, run, own | config)


def manifests(file: str = "role") -> list[dict[str, Any]]:
    """Of the page that tells which rights the pods need."""
    yaml: Any = pytest.importorskip("yaml")
    text = re.search(rf"```yaml {file}.yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
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
    user = f"system:serviceaccount:{space}:rdzv"

    def allowed(verb: str) -> bool:
        asked = {"namespace": space, "resource": "configmaps", "verb": verb}
        review = {"spec": {"user": user, "resourceAttributes": asked}}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(cluster.ask("POST", path, review)["status"]["allowed"])

    # The API server learns of it by a watch of its own.
    assert until(lambda: [it for it in VERBS if allowed(it)] == verbs, PATIENCE)


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


class Ends:
    """Agents, each with a pod of its own, whose ends the test writes as Kubernetes would."""

    def __init__(self, cluster: Cluster, space: str, folder: Path) -> None:
        self.cluster, self.space = cluster, space
        config = {"ca_file": str(cluster.certificate), "namespace": space, "owner": "none"}
        store = replace(cluster.store, config=config)
        self.job = Job(
            folder, store, nodes="2:3", pods="true", keep_alive_interval=5, last_call_timeout=2
        )
        self.pods = {name: cluster.make_pod(space, f"train-{name}") for name in "abc"}
        for name in "abc":
            within = ["env", f"POD_NAME=train-{name}"]
            self.job.start(name, f"127.0.0.{ord(name) - ord('a') + 1}", within=within)
        self.job.await_begun("abc")

    def set_status(self, name: str, **status: Any) -> None:
        pod = self.cluster.ask("GET", self.pods[name])
        self.cluster.ask("PUT", f"{self.pods[name]}/status", pod | {"status": status})

    def resumes_without(self, name: str, began: float) -> tuple[float, str]:
        """Seconds until the last worker of the others began again, and why they did."""
        world = self.job.await_begun(sorted({*"abc"} - {name}), after=began)
        document = self.job.document()
        assert document is not None
        return max(world.began.values()) - began, document.reason


@pytest.fixture
def ends(cluster: Cluster, space: str, login: str, tmp_path: Path) -> Iterator[Ends]:
    cluster.apply(space, manifests("pods"))
    made = Ends(cluster, space, tmp_path)
    yield made
    made.job.close()


def of_leader(ends: Ends) -> str:
    leader = ends.job.leader()
    return next(name for name, it in ends.job.agents.items() if it is leader)


def another(ends: Ends) -> str:
    return next(name for name in "cba" if name != of_leader(ends))


WHO = pytest.mark.parametrize("who", [of_leader, another])
MESSAGE = "The node was low on resource: memory."


@WHO
def test_who_is_evicted_is_lost_long_before_its_lease(
    ends: Ends, who: Callable[[Ends], str], record_property: Measure
) -> None:
    """The test kills the process, and writes the pod's status, as the kubelet does."""
    name = who(ends)
    label = ends.job.label(name)
    ends.job.agents[name].kill()
    began = time.monotonic()
    ends.set_status(name, phase="Failed", reason="Evicted", message=MESSAGE)
    took, why = ends.resumes_without(name, began)
    assert why == f"lost {label}: evicted: {MESSAGE}"
    record_property("last worker began again, s", round(took, 2))


@WHO
def test_a_pod_that_is_deleted_by_force_with_its_process(
    ends: Ends, who: Callable[[Ends], str], record_property: Measure
) -> None:
    name = who(ends)
    label = ends.job.label(name)
    ends.job.agents[name].kill()
    began = time.monotonic()
    ends.cluster.ask("DELETE", ends.pods[name], {"gracePeriodSeconds": 0})
    took, why = ends.resumes_without(name, began)
    assert why == f"lost {label}: its pod was deleted"
    record_property("last worker began again, s", round(took, 2))


@WHO
def test_who_lives_and_is_preempted_leaves(
    ends: Ends, who: Callable[[Ends], str], record_property: Measure
) -> None:
    """No signal comes: as where a shell is the container's first process, and passes none on."""
    name = who(ends)
    label = ends.job.label(name)
    condition = {
        "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler",
        "message": "default-scheduler: preempting to accommodate a higher priority pod",
    }  # fmt: skip
    began = time.monotonic()
    ends.set_status(name, phase="Running", conditions=[condition])
    took, why = ends.resumes_without(name, began)
    assert why == f"{label} left (preempted: {condition['message']})"
    record_property("last worker began again, s", round(took, 2))
    ends.job.await_that(
        lambda: "asks for no round any more" in ends.job.agents[name].log.read_text(), "its log", 60
    )
    assert ends.job.agents[name].process.poll() is None


def test_who_lives_and_whose_pod_is_being_deleted_leaves(
    ends: Ends, record_property: Measure
) -> None:
    name = another(ends)
    label = ends.job.label(name)
    began = time.monotonic()
    ends.cluster.ask("DELETE", ends.pods[name])
    took, why = ends.resumes_without(name, began)
    assert why == f"{label} left (its pod is being deleted)"
    record_property("last worker began again, s", round(took, 2))


def test_a_pod_that_seems_to_live_proves_nothing(ends: Ends, record_property: Measure) -> None:
    name = another(ends)
    ends.set_status(name, phase="Running")
    label = ends.job.label(name)
    began = ends.job.agents[name].signal(signal.SIGKILL, workers=True)
    took, why = ends.resumes_without(name, began)
    assert why == f"lost {label}: lease ran out"
    record_property("last worker began again, s", round(took, 2))


@pytest.mark.usefixtures("login")
def test_pods_cannot_be_watched_without_the_rights_to(
    cluster: Cluster, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(cluster.open(space, pods="true")) as client:
        (_, pods) = (it for it in client.inspect() if it.what == "rights")
        assert pods.mark is Mark.FAILED
        assert "list, watch are missing on pods" in pods.found
        cluster.apply(space, manifests("pods"))

        def allowed() -> bool:
            return all(it.mark is Mark.OK for it in client.inspect() if it.what == "rights")

        assert until(allowed, PATIENCE)
        assert client.pods is not None
        with pytest.raises(ValueError, match="is not there: set POD_NAME"):
            client.pods.own()
        cluster.make_pod(space, "train-a")
        monkeypatch.setenv("POD_NAME", "train-a")
        assert client.pods.own().startswith("train-a/")
        monkeypatch.setenv("POD_UID", "another")
        with pytest.raises(ValueError, match="another one than"):
            client.pods.own()
