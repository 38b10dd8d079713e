"""The wheel as users get it, installed away from this checkout and read by torch's own registry."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rdzv_plugins.stores import STORES
from tests.integration.wheels import ROOT, pip

pytestmark = pytest.mark.xdist_group("wheel")

# Runs with nothing of the checkout on its path; argv is where the wheel is, then backends.
CHECK = """
import logging
import sys

records = []
logging.getLogger().addHandler(logging.Handler())
logging.getLogger().handlers[0].emit = records.append
logging.getLogger().setLevel(logging.WARNING)

from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

import rdzv_plugins

assert rdzv_plugins.__file__.startswith(sys.argv[1]), rdzv_plugins.__file__
backends = sys.argv[2:]
missing = set(backends) - set(registry._registry)
assert not missing, missing
assert not records, [record.getMessage() for record in records]
libraries = {"redis", "kazoo", "boto3", "botocore", "consul", "etcd3gw", "psycopg", "typer", "rich"}
assert not libraries & set(sys.modules), libraries & set(sys.modules)
ours = {name for name in sys.modules if name.startswith("rdzv_plugins")}
assert ours == {"rdzv_plugins", "rdzv_plugins.entry_points"}, ours

# Each creator is ours and reaches our options: torch itself would take no notice of this one.
for backend in backends:
    params = RendezvousParameters(backend, "127.0.0.1:1", "run", 1, 1, join_timeot="1")
    try:
        get_rendezvous_handler(params)
    except ValueError as error:
        assert "join_timeout" in str(error), error
    else:
        raise AssertionError(f"{backend} took an option that does not exist")
print("checked")
"""


PAGE = ("page.html", "page.css", "page.js", "icon.svg")


def test_it_ships_every_module_its_types_and_its_licence(wheel: Path) -> None:
    shipped = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "rdzv_plugins").rglob("*.py")}
    assert modules <= shipped
    assert "rdzv_plugins/py.typed" in shipped
    page = {f"rdzv_plugins/dashboard/{name}" for name in PAGE}
    assert page <= shipped
    docs = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {f"rdzv_plugins/cli/pages/{name}" for name in docs} <= shipped
    assert "rdzv_plugins/cli/train.py" in shipped
    assert any(name.endswith("/LICENSE") for name in shipped)
    strangers = {name for name in shipped if not name.startswith("rdzv_plugins")}
    assert not strangers


def test_its_extras_name_each_client(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if "Provides-Extra" in line}
    others = {"torch", "embedded", "metrics", "otel", "dashboard", "gpu", "all"}
    assert extras == {name.removesuffix("-v3") for name in STORES} | others
    unconditional = [line for line in lines if line.startswith("Requires-Dist") and ";" not in line]
    assert [line.split()[1].split(">")[0] for line in unconditional] == [
        "msgspec",
        "typer",
        "rich",
        "ifaddr",
    ]


def test_torch_finds_all_backends_in_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    result = subprocess.run(
        [sys.executable, "-c", CHECK, str(target), *STORES],
        capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == "checked\n"
