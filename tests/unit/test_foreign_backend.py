"""A store in a package of its own, as docs/writing-a-backend.md says."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from rdzv_plugins.config import StoreOptions
from rdzv_plugins.kv import MemoryClient, MemoryServer

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-backend.md"


class Client(MemoryClient):
    options = StoreOptions
    server = MemoryServer()

    def __init__(self, endpoint: str, namespace: str, options: StoreOptions, patience: float):
        super().__init__(self.server, namespace)


def test_the_pages_entry_point_makes_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = PAGE.read_text().rpartition("```python\n")[2].partition("```")[0]
    module: Any = types.ModuleType("mypackage.mystore")
    module.Client = Client
    monkeypatch.setitem(sys.modules, "mypackage.mystore", module)
    names: dict[str, Any] = {}
    exec(snippet, names)
    params = RendezvousParameters("mystore", "", "run", 1, 1, local_addr="127.0.0.1")
    handler = names["mystore"]()(params)
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()
