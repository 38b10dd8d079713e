"""Each start page, followed to the letter; and what cannot run here, compared with the code."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import time
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from rdzv_plugins.stores import STORES, _dynamodb_table, dynamodb, s3
from rdzv_plugins.stores import redis as redis_store
from tests import Measure, servers
from tests.integration.hosts import in_namespaces
from tests.integration.start import FOLDER, TRAIN, blocks, path
from tests.integration.stores import absent

PAGES = [
    "quorum", "redis", "zookeeper", "dynamodb", "consul", "etcd", "postgres", "nats",
    # A recipe has the shorter name.
    "kubernetes-api", "s3", "azure",
]  # fmt: skip
TOOLS = {
    "redis": "redis-cli", "zookeeper": "zkCli.sh", "consul": "consul", "etcd": "etcdctl",
    "postgres": "psql", "nats": "nats-server",
}  # fmt: skip

RUN_HERE = ("redis", "postgres")
every_page = pytest.mark.parametrize("name", PAGES)


def page(name: str) -> Path:
    return FOLDER / f"{name}.md"


# In the full run on the one that most run, and on one whose users need rights; the README's example
# runs without a server. The others, whose jobs begin with the same lines, in the long run.
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(it, marks=pytest.mark.full) for it in RUN_HERE),
        *(pytest.param(it, marks=pytest.mark.soak) for it in PAGES if it not in RUN_HERE),
    ],
)
@pytest.mark.timeout(420)
def test_the_page_leads_to_a_job_that_survives(
    name: str, tmp_path: Path, record_property: Measure
) -> None:
    tool = TOOLS.get(name)
    if tool is not None and which(tool, path=path()) is None:
        absent(f"{tool} is not installed: scripts/install-servers {name}")
    try:
        servers.KINDS[name.removesuffix("-api")](servers.Security())
    except servers.NotInstalledError as error:
        absent(str(error))
    began = time.monotonic()
    followed = subprocess.run(
        in_namespaces("tests.integration.start", name),
        stdout=subprocess.PIPE, cwd=tmp_path, timeout=400,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1])},
    )  # fmt: skip
    assert followed.returncode == 0
    parts: dict[str, float] = json.loads(followed.stdout)
    shown = {"all": time.monotonic() - began, "check": parts["sh"], "job": parts["sh job"]}
    shown |= {"alone after": parts["sh kill"], "back after": parts["sh again"]}
    for what, seconds in shown.items():
        record_property(what, f"{seconds:.1f} s")


def test_each_store_has_a_page() -> None:
    assert {name.removesuffix("-v3") for name in STORES} == {
        it.removesuffix("-api") for it in PAGES
    }
    listed = re.findall(r"^- \[.*\]\(([\w-]+)\.md\)$", page("index").read_text(), re.MULTILINE)
    assert listed == PAGES


@every_page
def test_only_what_cannot_run_here_is_left_out(name: str) -> None:
    left_out = [text for purpose, text in blocks(page(name)) if purpose == "sh elsewhere"]
    assert left_out
    for text in left_out:
        begins = ("docker compose ", "aws ", "az ", "nats kv ", "rdzv serve quorum ", "kubectl ")
        # Hosts with such names are not here.
        assert text.startswith(begins) or "node1,node2,node3" in text, text


@every_page
def test_each_command_is_there(name: str) -> None:
    """A block that lost its mark would be left out in silence."""
    purposes = [purpose for purpose, _ in blocks(page(name)) if purpose.startswith("sh ")]
    server = [] if name == "quorum" else ["sh server"]
    assert [it for it in purposes if it != "sh elsewhere"] == [
        "sh install", *server, "sh terminals", "sh job",
    ]  # fmt: skip
    on_any = [purpose for purpose, _ in blocks(page("every-store")) if purpose != "text"]
    assert on_any == ["sh kill", "sh again"]


@every_page
def test_the_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page(name).read_text())
    assert TRAIN in links
    assert [it for it in links if not (FOLDER / it).exists()] == []


def test_the_rights_on_redis_are_the_documented_ones() -> None:
    (line,) = (text for _, text in blocks(page("redis")) if "ACL SETUSER" in text)
    documented = re.search(r"The user needs ``([^`]*)``", redis_store.__doc__ or "")
    assert documented is not None
    assert re.findall(r"\+\S+", line) == [*documented[1].split(), "+info"]


def test_the_rights_on_dynamodb_are_for_what_is_called() -> None:
    policy = saved("dynamodb", "policy.json")
    assert policy["Version"] == "2012-10-17"
    table = "arn:aws:dynamodb:eu-central-1:123456789012:table/rdzv-plugins"
    runs, check = policy["Statement"]
    for statement in (runs, check):
        assert set(statement) == {"Sid", "Effect", "Action", "Resource"}
        assert statement["Effect"] == "Allow"
    assert runs["Resource"] == [table, f"{table}/index/{_dynamodb_table.INDEX}"]
    assert check["Resource"] == table
    described = {"describe_table", "describe_time_to_live"}
    assert {*check["Action"]} == set(map(action, described))
    assert runs["Action"] == sorted(set(map(action, requests() - described)))


def test_the_rights_on_s3_are_the_documented_ones() -> None:
    policy = saved("s3", "policy.json")
    objects, listing = policy["Statement"]
    documented = re.search(r"needs ``s3:([^`]*)`` on the objects", s3.__doc__ or "")
    assert documented is not None
    assert objects["Action"] == sorted(f"s3:{it}" for it in documented[1].split(", "))
    assert listing["Action"] == "s3:ListBucket"
    assert objects["Resource"].startswith(f"{listing['Resource']}/")


def action(request: str) -> str:
    """What a request of boto3 needs."""
    needed = {
        # The transactions write; the statements update.
        "transact_write_items": "PutItem",
        "batch_execute_statement": "PartiQLUpdate",
    }
    return "dynamodb:" + needed.get(request, request.title().replace("_", ""))


def requests() -> set[str]:
    """The names of all requests in the client's source."""
    tree = ast.parse(Path(dynamodb.__file__).read_text())
    asked = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "ask"
        and isinstance(node.args[1], ast.Constant)
    }
    return {str(it) for it in asked}


def test_the_table_on_dynamodb_is_the_one_that_agents_create() -> None:
    described = _dynamodb_table._description(_dynamodb_table.Options().table)
    assert saved("dynamodb", "table.json") == described


def saved(name: str, file: str) -> Any:
    """What the reader saves in a JSON file."""
    (text,) = (text for purpose, text in blocks(page(name)) if purpose == f"json {file}")
    return json.loads(text)
