"""On every store: what outlives a run, and runs with ids of all kinds in one list."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv_plugins.kv import RendezvousConnectionError
from rdzv_plugins.observe.history import Archive, list_runs
from rdzv_plugins.observe.inspection import Condition, Inspection, settle
from rdzv_plugins.process.factory import create_handler
from rdzv_plugins.process.handler import StoreRendezvousHandler
from rdzv_plugins.protocol.documents import Outcome, Phase
from rdzv_plugins.protocol.round_record import Member, RoundRecord
from rdzv_plugins.stores import open_client
from tests.integration.stores import RunningStore, every_store

RUNNING = RoundRecord(
    incarnation="0011", round=3, phase=Phase.RUNNING, nodes=2, leader="a[1]", reason="b[2] joined",
    members=(Member(name="a[1]", rank=0),),
)  # fmt: skip
ENDED = RoundRecord(
    incarnation="0011", round=3, phase=Phase.CLOSED, nodes=2, outcome=Outcome.SUCCEEDED,
    reason="done",
)  # fmt: skip

RUN_IDS = ("job", "team/job", "job 1", "..", "grün", "a+b%2F", "x" * 100)


@every_store
def test_runs_are_listed_and_kept(store: RunningStore) -> None:
    config = {**store.config, "prefix": f"archive-{secrets.token_hex(4)}"}
    opened = partial(open_client, store.backend, store.endpoint, config=config)
    for run_id in RUN_IDS:
        archive = Archive(opened, run_id, history_ttl=60.0)
        archive.note(RUNNING)
        if run_id != "job":
            archive.note(ENDED)
    listed = list_runs(opened)
    assert sorted(listed) == sorted(RUN_IDS)
    assert {run_id: it.outcome for run_id, it in listed.items()} == {
        run_id: None if run_id == "job" else Outcome.SUCCEEDED for run_id in RUN_IDS
    }
    for run_id in RUN_IDS:
        archive = Archive(opened, run_id, history_ttl=60.0)
        first, *ends = archive.rows()
        assert (first.reason, first.members) == (RUNNING.reason, RUNNING.members)
        assert len(ends) == (run_id != "job")
        with closing(opened(run_id)) as client:
            seen = Inspection(client, archive, run_id)
            settle([seen])
            ended = Condition.DEAD if run_id == "job" else Condition.CLOSED
            assert seen.condition is ended


def test_a_store_that_is_silent_costs_a_heartbeat_little_for_history(
    store: RunningStore, run_id: str
) -> None:
    options = {**store.config, "local_addr": "127.0.0.1", "heartbeat_timeout": "2"}
    params = RendezvousParameters(store.backend, store.endpoint, run_id, 1, 1, **options)
    handler = create_handler(store.backend, params)
    assert isinstance(handler, StoreRendezvousHandler)
    assert store.server is not None
    archive, (server,) = handler._archive, store.server.nodes
    asked: dict[Callable[[], object], str] = {
        lambda: archive.note(RUNNING): "within 1 s",
        lambda: archive.exclusions(0.0): "within 1 s",
        # Without its answer a run may begin that was closed.
        lambda: archive.tombstone("0011"): "within 2 s",
    }
    server.pause()
    try:
        for ask, said in asked.items():
            with pytest.raises(RendezvousConnectionError, match=said):
                ask()
    finally:
        server.resume()
        handler.shutdown()


@every_store
def test_what_is_kept_has_an_end(store: RunningStore) -> None:
    config = {**store.config, "prefix": f"archive-{secrets.token_hex(4)}"}
    opened = partial(open_client, store.backend, store.endpoint, config=config)
    Archive(opened, "job", history_ttl=60.0).note(ENDED)
    with closing(opened("!runs")) as client:
        client.expire(0)
    assert list_runs(opened) == {}
