from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points, requires
from typing import Any

import pytest

from rdzv_plugins.stores import STORES

NEED_A_PACKAGE = {
    "redis": "redis",
    "zookeeper": "kazoo",
    "dynamodb": "boto3",
    "consul": "consul",
    "postgres": "psycopg",
}
CLIENT_LIBRARIES = ["botocore", "etcd3gw", "requests", *NEED_A_PACKAGE.values()]


def run(program: str) -> str:
    """What a fresh interpreter prints, its stderr included."""
    # What torch says in an environment without NumPy is not ours.
    warnings = ["-W", "error::ImportWarning", "-W", "ignore:Failed to initialize NumPy"]
    result = subprocess.run(
        [sys.executable, *warnings, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_each_backend_has_its_entry_point() -> None:
    names = {point.name for point in entry_points(group="torchrun.handlers")}
    assert names == set(STORES)


@pytest.mark.parametrize("backend", STORES)
def test_an_extra_brings_a_package_if_the_backend_needs_one(backend: str) -> None:
    marker = f'extra == "{backend.removesuffix("-v3")}"'
    brought = [line for line in requires("rdzv-plugins") or () if line.endswith(marker)]
    assert bool(brought) == (backend in NEED_A_PACKAGE), brought


def test_loading_them_imports_nothing_of_ours_nor_torch() -> None:
    program = f"""
import sys
from importlib.metadata import entry_points
factories = [point.load() for point in entry_points(group="torchrun.handlers")]
creators = [factory() for factory in factories]
assert len(creators) == {len(STORES)} and all(callable(creator) for creator in creators)
assert [factory() for factory in factories] == creators
ours = [name for name in sys.modules if name.startswith("rdzv_plugins")]
assert sorted(ours) == ["rdzv_plugins", "rdzv_plugins.entry_points"], ours
assert not set(sys.modules) & set({["torch", *CLIENT_LIBRARIES]!r})
"""
    assert run(program) == ""


@pytest.fixture(scope="module")
def errors() -> Any:
    """By backend, what its creator raises where its client package is not installed."""
    program = f"""
import json, sys
for package in {[*NEED_A_PACKAGE.values()]!r}:
    sys.modules[package] = None  # makes its import fail as if it were not installed
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from rdzv_plugins import entry_points
errors = dict()
for backend in {[*NEED_A_PACKAGE]!r}:
    creator = getattr(entry_points, backend)()
    try:
        creator(RendezvousParameters(backend, "localhost:1", "run", 1, 1))
    except ValueError as error:
        errors[backend] = str(error)
print(json.dumps(errors))
"""
    # The log, before it, says the same.
    return json.loads(run(program).splitlines()[-1])


@pytest.mark.parametrize("backend", NEED_A_PACKAGE)
def test_a_missing_extra_names_the_install_that_mends_it(errors: Any, backend: str) -> None:
    needed = f"the {backend} backend needs the package '{NEED_A_PACKAGE[backend]}"
    assert errors[backend].startswith(needed)
    assert errors[backend].endswith(f'pip install "rdzv-plugins[{backend}]"')
