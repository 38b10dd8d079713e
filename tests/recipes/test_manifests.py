"""The files for Kubernetes and AWS fit the schemas; what they start is run, without a cluster."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests import Measure, servers
from tests.integration.hosts import bring_up_loopback
from tests.recipes.pages import ROOT, lose_one, page, shorten

EXAMPLES = ROOT / "examples"
REGION = "eu-central-1"
CUSTOM = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def documents(file: Path) -> list[dict[str, Any]]:
    yaml: Any = import_module("yaml")
    return list(yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize(
    "file",
    [
        "kubernetes/quorum.yaml", "kubernetes/job.yaml", "aws/job.yaml",
        "kubernetes/api/role.yaml", "kubernetes/api/job.yaml", "kubernetes/api/indexed-job.yaml",
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_a_manifest_fits_the_schema_of_kubernetes(file: str, version: str) -> None:
    run("kubernetes-validate", "--strict", "--kubernetes-version", version, EXAMPLES / file)


@pytest.mark.parametrize(
    "file", ["jobset.yaml", "trainjob.yaml", "api/jobset.yaml", "api/trainjob.yaml"]
)
def test_a_manifest_fits_the_models_of_jobset_and_kubeflow_trainer(file: str) -> None:
    models: Any = import_module("kubeflow_trainer_api.models")
    for document in documents(EXAMPLES / "kubernetes" / file):
        model: Any = getattr(models, CUSTOM[document["kind"]])
        # A field that the model does not know is missing afterwards.
        assert without_empty(model.from_dict(document).to_dict()) == without_empty(document)


def without_empty(value: Any) -> Any:
    """The same without what the models add, and cannot tell from what is absent."""
    if isinstance(value, dict):
        return {name: without_empty(it) for name, it in value.items() if it not in (None, {})}
    return [without_empty(it) for it in value] if isinstance(value, list) else value


def test_the_jobs_of_the_three_files_are_alike() -> None:
    (_, job), (jobset,) = (
        documents(EXAMPLES / "kubernetes" / name) for name in ("job.yaml", "jobset.yaml")
    )
    alone, inside = job["spec"], jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    # The JobSet has a service of its own.
    del alone["template"]["spec"]["subdomain"]
    assert alone == inside


@pytest.mark.parametrize("file", ["store.yaml", "eks.yaml", "batch.yaml"])
def test_cfn_lint_finds_nothing(file: str) -> None:
    assert f"examples/aws/{file}" in page("aws")
    run("cfn-lint", "--regions", REGION, "--template", EXAMPLES / "aws" / file)


@pytest.fixture
def dynamodb(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint of a DynamoDB Local with the template's table; AWS's variables lead to it."""
    bring_up_loopback()
    decode: Any = import_module("cfnlint.decode")
    template, found = decode.decode(str(EXAMPLES / "aws" / "store.yaml"))
    assert not found
    table = dict(template["Resources"]["Table"]["Properties"])
    expiry = table.pop("TimeToLiveSpecification")
    boto3: Any = import_module("boto3")
    with closing(servers.start("dynamodb")) as server:
        its = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_DEFAULT_REGION": REGION}
        for name, value in {**server.environ, **its}.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("dynamodb")
        client.create_table(**table)
        client.update_time_to_live(TableName=table["TableName"], TimeToLiveSpecification=expiry)
        yield server.endpoint


def test_the_table_is_the_one_that_we_use(dynamodb: str) -> None:
    """``rdzv check`` is content with the template's table, which it does not create itself."""
    endpoint = ["--rdzv-backend", "dynamodb", "--rdzv-endpoint", dynamodb]
    shown = run("rdzv", "check", *endpoint, "--rdzv-conf", "create_table=false")
    assert "time to live is on" in shown


def kubernetes_agent(file: str, index: int) -> tuple[list[str], dict[str, str]]:
    """An agent's command and environment, as Kubernetes would start it."""
    (pod,) = (
        it["spec"]["template"]["spec"] for it in documents(EXAMPLES / file) if it["kind"] == "Job"
    )
    (container,) = pod["containers"]
    environ = environment(container)
    # Kubernetes puts a variable in the place of its name.
    words = [*container["command"], *container["args"]]
    return [it.replace("$(RUN)", environ["RUN"]) for it in words], environ


def trainer_agent(file: str, index: int) -> tuple[list[str], dict[str, str]]:
    """The same of Kubeflow Trainer, which adds variables of its own."""
    runtime, job = documents(EXAMPLES / file)
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    added = {
        "PET_NNODES": "3", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29400",
    }  # fmt: skip
    return job["spec"]["trainer"]["command"], environment(container) | added


def environment(container: dict[str, Any]) -> dict[str, str]:
    """With a run id in the place of the label, and without the password, which is optional."""
    environ = {it["name"]: it["value"] for it in container["env"] if "value" in it}
    taken = [it["name"] for it in container["env"] if "fieldRef" in it.get("valueFrom", {})]
    return environ | dict.fromkeys(taken, "job1")


def batch_agent(file: str, index: int) -> tuple[list[str], dict[str, str]]:
    """The same of AWS Batch."""
    decode: Any = import_module("cfnlint.decode")
    template, _ = decode.decode(str(EXAMPLES / file))
    container = template["Resources"]["Training"]["Properties"]["ContainerProperties"]
    (region,) = container["Environment"]
    assert region["Value"] == {"Ref": "AWS::Region"}
    environ = {region["Name"]: REGION, "AWS_BATCH_JOB_ID": f"job1:{index}"}
    return list(container["Command"]), environ


# What is only in the image or in the cluster, and what takes its place.
HERE = {
    "redis.default.svc": "localhost",
    "cd /checkpoints && ": "",
    "=gpu": "=1",
    "/train.py": "train.py",
}


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("agent", "file", "store"),
    [
        (kubernetes_agent, "kubernetes/job.yaml", "redis"),
        (trainer_agent, "kubernetes/trainjob.yaml", "redis"),
        (kubernetes_agent, "aws/job.yaml", "dynamodb"),
        (batch_agent, "aws/batch.yaml", "dynamodb"),
    ],
)
def test_an_agent_is_killed(
    agent: Callable[[str, int], tuple[list[str], dict[str, str]]],
    file: str,
    store: str,
    record_property: Measure,
    request: pytest.FixtureRequest,
) -> None:
    """What the file starts in its containers, as processes of this machine."""
    request.getfixturevalue(store)
    shutil.copy(EXAMPLES / "train.py", "train.py")
    shorten()
    commands = []
    for index in range(2):
        words, environ = agent(file, index)
        pairs = [f"{name}={value}" for name, value in environ.items()]
        command = shlex.join(["env", *pairs, *words])
        for there, here in HERE.items():
            command = command.replace(there, here)
        commands.append(command)
    record_property("resumed", lose_one(commands, 1))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("folder")
def test_an_agent_is_killed_with_its_member_of_the_store(record_property: Measure) -> None:
    """Each pod is an address of this machine, which takes the place of its name."""
    bring_up_loopback()
    shutil.copy(EXAMPLES / "train.py", "train.py")
    shorten()
    words, environ = kubernetes_agent("kubernetes/quorum.yaml", 0)
    commands = []
    for pod in range(3):
        own = [*words[:2], f"--local-addr=train-{pod}", *words[2:]]
        command = shlex.join(["env", *(f"{name}={it}" for name, it in environ.items()), *own])
        here = HERE | {f"train-{it}": f"127.0.0.{it + 1}" for it in range(3)}
        for there, its in here.items():
            command = command.replace(there, its)
        commands.append(command)
    record_property("resumed", lose_one(commands, 1))


def run(command: str, *arguments: object) -> str:
    """What a command of the environment prints; it must succeed."""
    done = subprocess.run(
        [Path(sys.executable).with_name(command), *map(str, arguments)],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
