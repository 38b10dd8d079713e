"""The files for Kubernetes and AWS fit the schemas, and the table of AWS is the one that we use."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins import servers
from tests.integration.namespaces import bring_up_loopback
from tests.recipes.pages import ROOT, page

EXAMPLES = ROOT / "examples"
CUSTOM = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def documents(file: Path) -> list[dict[str, Any]]:
    yaml: Any = import_module("yaml")
    return list(yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize("file", ["kubernetes/job.yaml", "aws/job.yaml"])
@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_it_fits_the_schema_of_kubernetes(file: str, version: str) -> None:
    run("kubernetes-validate", "--strict", "--kubernetes-version", version, EXAMPLES / file)


@pytest.mark.parametrize("file", ["jobset.yaml", "trainjob.yaml"])
def test_it_fits_the_models_of_jobset_and_kubeflow_trainer(file: str) -> None:
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
    run("cfn-lint", "--regions", "eu-central-1", "--template", EXAMPLES / "aws" / file)


def test_the_table_is_the_one_that_we_use() -> None:
    """``rdzv check`` is content with the template's table, which it does not create itself."""
    bring_up_loopback()
    decode: Any = import_module("cfnlint.decode")
    template, found = decode.decode(str(EXAMPLES / "aws" / "store.yaml"))
    assert not found
    table = dict(template["Resources"]["Table"]["Properties"])
    expiry = table.pop("TimeToLiveSpecification")
    boto3: Any = import_module("boto3")
    with closing(servers.start("dynamodb")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environ.items():
            patch.setenv(name, value)
        client = boto3.client("dynamodb", endpoint_url=server.endpoint)
        client.create_table(**table)
        client.update_time_to_live(TableName=table["TableName"], TimeToLiveSpecification=expiry)
        endpoint = ["--rdzv-backend", "dynamodb", "--rdzv-endpoint", server.endpoint]
        shown = run("rdzv", "check", *endpoint, "--rdzv-conf", "create_table=false")
    assert "time to live is on" in shown


def run(command: str, *arguments: object) -> str:
    """What a command of the environment prints; it must succeed."""
    done = subprocess.run(
        [Path(sys.executable).with_name(command), *map(str, arguments)],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
