"""A store, a clock, and two nodes of one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rdzv_plugins.kv import MemoryServer
    from tests.unit.life import Life, Time

# The fixtures import what they need: pytest-xdist reads this file before it starts its processes,
# and they would wait until it has imported torch, which it does not need itself.


@pytest.fixture
def server() -> MemoryServer:
    from rdzv_plugins.kv import MemoryServer

    return MemoryServer()


@pytest.fixture
def time() -> Time:
    from tests.unit.life import Time

    return Time()


@pytest.fixture
def pair(server: MemoryServer, time: Time) -> tuple[Life, Life]:
    from tests.unit.life import RULES, Life

    leader = Life("n1", server, time, RULES)
    leader.go()
    return leader, Life("n2", server, time, RULES)
