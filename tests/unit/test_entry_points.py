from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points, requires
from pathlib import Path
from typing import Any

import pytest

from rdzv_plugins.kv import AccessDeniedError
from rdzv_plugins.stores import STORES

NEED_A_PACKAGE = {
    "redis": "redis",
    "zookeeper": "kazoo",
    "dynamodb": "boto3",
    "consul": "consul",
    "postgres": "psycopg",
    "nats": "nats",
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
    # That of kubernetes reads a kubeconfig; a pod has none. That of a bucket is imported late.
    assert bool(brought) == (backend in {*NEED_A_PACKAGE, "kubernetes", "s3", "azure"}), brought


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


NEED_TORCH = (
    "process.agent", "process.explain", "process.factory", "process.fitness",
    "process.handler",
    "process.master_servers", "process.warm", "testing", "torch",
)  # fmt: skip


def test_only_what_runs_agents_needs_torch() -> None:
    program = f"""
import importlib, pkgutil, sys
sys.modules["torch"] = None  # makes its import fail as if it were not installed
import rdzv_plugins
need = set()
for module in pkgutil.walk_packages(rdzv_plugins.__path__, "rdzv_plugins.", onerror=lambda _: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        assert error.name.partition(".")[0] == "torch", (module.name, error)
        rooms = module.name.split(".")[1:]
        need.add(rooms[0] if rooms[0] in ("testing", "torch") else ".".join(rooms))
assert need == {{*{NEED_TORCH!r}}}, need
"""
    assert run(program) == ""


def test_the_errors_of_a_store_are_torchs_once_torch_meets_them() -> None:
    """Also those that were raised before, and those of another package's classes."""
    program = """
import pickle, sys
from rdzv_plugins import kv

class Theirs(kv.RendezvousStateError):
    pass

before = [kv.AccessDeniedError("no"), kv.ExhaustedError("no memory"), Theirs("too large")]
assert "torch" not in sys.modules
from torch.distributed.elastic.rendezvous import api
assert not any(isinstance(error, api.RendezvousError) for error in before)

import rdzv_plugins.torch
kinds = [api.RendezvousConnectionError, api.RendezvousConnectionError, api.RendezvousStateError]
for error, kind in zip(before, kinds, strict=True):
    assert isinstance(error, kv.RendezvousError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and copy.args == error.args
    try:
        raise error
    except kind as caught:
        assert caught is error
"""
    assert run(program) == ""


def test_an_error_that_was_pickled_beside_torch_is_read_without_it() -> None:
    import_module("rdzv_plugins.torch")
    pickled = pickle.dumps(AccessDeniedError("no")).hex()
    shown = run(
        f"import pickle, sys; error = pickle.loads(bytes.fromhex('{pickled}'))\n"
        "print(repr(error), 'torch' in sys.modules)"
    )
    assert shown == "AccessDeniedError('no') False\n"


@pytest.mark.parametrize(
    ("version", "found"),
    [("2.5.1+cu124", "2.5.1+cu124 is installed"), ("", "none is installed"), ("2.10.0a0+git", "")],
)
def test_a_torch_that_is_missing_or_too_old_is_told(
    version: str, found: str, tmp_path: Path
) -> None:
    """Before anything of it is imported, which may fail in any way."""
    metadata = tmp_path / "torch-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    shown = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        + ("" if version else "sys.modules['torch'] = None\n")
        + "from rdzv_plugins.entry_points import refuse_without_torch\n"
        "try: refuse_without_torch('an agent')\n"
        "except ValueError as error: print(error)"
    )
    line = (
        f"an agent needs torch 2.6 or later, and {found}. Install the build that fits this host's "
        'GPUs, or: pip install "rdzv-plugins[torch]"'
    )
    assert shown == (f"{line}\n" if found else "")
