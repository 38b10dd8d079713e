"""The conformance suite on the in-memory reference: where they disagree, one of them is wrong."""

from __future__ import annotations

import pytest

from rdzv_plugins.kv import MemoryClient, MemoryServer
from rdzv_plugins.testing import KeyValueConformance, Store, TorchConformance


class TestMemory(KeyValueConformance, TorchConformance):
    @pytest.fixture
    def store(self) -> Store:
        server = MemoryServer()
        return Store(
            open=lambda namespace, **_: MemoryClient(server, namespace),
            deadline_unit=0.2,
            forks=False,
        )
