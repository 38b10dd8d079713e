"""What the pages expect to be there: a Redis at port 6379, a Slurm cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests import servers
from tests.integration.hosts import bring_up_loopback
from tests.recipes.slurm import Cluster

# Without scripts/test-recipes there are neither the packages nor namespaces of our own.
if "RDZV_RECIPES" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def redis() -> Iterator[str]:
    """The endpoint of the server."""
    bring_up_loopback()
    with closing(servers.start("redis", port=6379)) as server:
        yield server.endpoint


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    bring_up_loopback()
    with closing(Cluster(tmp_path_factory.mktemp("slurm"), socket.gethostname(), nodes=3)) as it:
        yield it
