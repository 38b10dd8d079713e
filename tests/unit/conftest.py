"""A store, a clock, and two nodes of one run."""

from __future__ import annotations

import pytest

from rdzv_plugins.kv import (
    MemoryServer,
)
from tests.unit.life import RULES, Life, Time


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def pair(server: MemoryServer, time: Time) -> tuple[Life, Life]:
    leader = Life("n1", server, time, RULES)
    leader.go()
    return leader, Life("n2", server, time, RULES)
