"""Real handlers, with their threads, over the in-memory store."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousInfo

from rdzv_plugins.kv import MemoryClient, MemoryServer, RendezvousConnectionError
from rdzv_plugins.observe.history import Archive
from rdzv_plugins.process.factory import _answer_timeout, rules_of
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import STATE_KEY, RoundDocument
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.testing.harness import until
from rdzv_plugins.testing.threads import Background

__all__ = ["LEASE", "Cut", "Site", "succeed"]

INTERVAL = 0.3
LEASE = 3 * INTERVAL

_REQUESTS = {
    "get", "put", "put_many", "compare_and_set", "list", "wait", "expire", "add", "get_many",
    "delete_many",
}  # fmt: skip


def succeed(handler: StoreRendezvousHandler) -> bool:
    """What torch's agent and launcher do once the workers of all nodes have succeeded."""
    store = handler._store
    assert store is not None
    store.add("torchelastic/agent/terminal_state/num_members", 1)
    store.all_done = True
    return handler.shutdown()


class Cut(MemoryClient):
    """A client that can be cut off from the store, or for some requests only."""

    down = False
    refused: frozenset[str] = frozenset()
    error: Exception = RendezvousConnectionError("unreachable")

    def __getattribute__(self, name: str) -> Any:
        if name in _REQUESTS and (
            object.__getattribute__(self, "down")
            or name in object.__getattribute__(self, "refused")
        ):
            return self._refuse
        return object.__getattribute__(self, name)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        time.sleep(0.02)
        raise self.error.with_traceback(None)

    def cut(self, error: Exception | None = None) -> None:
        self.error = error or self.error
        self.down = True
        self.interrupt()


class Site:
    """The handlers of one run id on one store."""

    def __init__(self, run_id: str = "run") -> None:
        self.server = MemoryServer()
        self.run_id = run_id
        self.handlers: list[StoreRendezvousHandler] = []

    def client(self) -> Cut:
        return Cut(self.server, self.run_id)

    def archive(self) -> Archive:
        return Archive(partial(MemoryClient, self.server), self.run_id, history_ttl=3600.0)

    def handler(
        self,
        low: int,
        high: int,
        client: MemoryClient | None = None,
        address: str = "127.0.0.1",
        **options: Any,
    ) -> StoreRendezvousHandler:
        settings = Settings(
            **{
                "keep_alive_interval": INTERVAL,
                # Short only after a loss: a thread that starts late must not miss the first round.
                "last_call_timeout": 2.0,
                "replacement_timeout": 0.2,
                "join_timeout": 20.0,
                "close_timeout": 10.0,
                "closed_ttl": 1.0,
                **options,
            }
        )
        client = client or self.client()
        handler = StoreRendezvousHandler(
            client,
            self.archive(),
            self.run_id,
            rules_of(settings, low, high, _answer_timeout(client, settings)),
            settings,
            address,
        )
        self.handlers.append(handler)
        return handler

    def join(self, *handlers: StoreRendezvousHandler) -> list[RendezvousInfo]:
        """Their next round."""
        joins = [Background(handler.next_rendezvous) for handler in handlers]
        return [join.result(20.0) for join in joins]

    @property
    def document(self) -> RoundDocument | None:
        with self.server.changed:
            entry = self.server.keys(self.run_id).get(STATE_KEY)
        return RoundDocument.decode(entry.value) if entry else None

    def await_that(self, condition: Any, seconds: float = 20.0) -> None:
        assert until(condition, seconds), self.document

    def await_sweep(self) -> None:
        self.await_that(lambda: self.document is None)

    def kill(self, handler: StoreRendezvousHandler) -> None:
        """Its process is gone, without a word."""
        handler._ended = True
        atexit.unregister(handler._at_exit)
        handler._driver.stop(5.0)
        handler._release()


@contextmanager
def site() -> Iterator[Site]:
    """A run whose handlers are gone afterwards."""
    made = Site()
    try:
        yield made
    finally:
        for handler in made.handlers:
            made.kill(handler)
