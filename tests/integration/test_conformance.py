"""The conformance suite on every store's real server."""

from __future__ import annotations

import pytest

from rdzv_plugins.testing import NetworkConformance, Store, TorchConformance
from tests.integration.stores import RunningStore


class TestStore(NetworkConformance, TorchConformance):
    @pytest.fixture
    def store(self, running_store: RunningStore) -> Store:
        return running_store.conformance()
