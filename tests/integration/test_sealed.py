"""Attacks on a run whose nodes have a secret, by who can write to the store and has none."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from typer.testing import CliRunner

from rdzv_plugins.cli import app
from rdzv_plugins.kv import KeyValueClient, RendezvousStateError
from rdzv_plugins.observe.history import EXCLUDED, LIST, Archive
from rdzv_plugins.protocol.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    TORCH_STATE_KEY,
    NodeRecord,
    RoundDocument,
    Status,
)
from rdzv_plugins.testing import NetworkConformance, Store, TorchConformance
from rdzv_plugins.torch.rendezvous_backend import KeyValueBackend, create_backend
from tests.integration import forked
from tests.integration.agents import Agent, Run, one_world, until
from tests.integration.stores import KINDS, RunningStore

SECRET, ANOTHER = "a secret of all nodes and commands", "the secret of somebody else"
PATIENCE = 60.0

# The members of a quorum let nobody in who has another secret: nothing is left to be sealed out.
OPEN = [kind for kind in KINDS if kind.name != "quorum"]
every_open_store = pytest.mark.parametrize(
    "store",
    [
        pytest.param(kind.name, marks=() if kind.name == "redis" else pytest.mark.soak)
        for kind in OPEN
    ],
    indirect=True,
)

# The address of a MASTER that a stranger would like workers to dial.
EVIL = "127.0.0.66:6666"


def having(store: RunningStore, folder: Path, secret: str) -> RunningStore:
    """The store, for agents and commands that have a secret."""
    file = folder / secret.replace(" ", "-")
    file.write_text(secret + "\n")
    return replace(store, config={**store.config, "secret_file": str(file)})


@pytest.fixture
def sealed(store: RunningStore, tmp_path: Path) -> RunningStore:
    return having(store, tmp_path, SECRET)


@pytest.fixture
def run(sealed: RunningStore, run_id: str) -> Iterator[Run]:
    with Run(sealed, run_id) as run:
        yield run


@pytest.fixture
def stranger(store: RunningStore, run_id: str) -> Iterator[KeyValueClient]:
    with closing(store.open(run_id)) as client:
        yield client


@pytest.fixture
def member(sealed: RunningStore, run_id: str) -> Iterator[KeyValueClient]:
    """Reads what the nodes read."""
    with closing(sealed.open(run_id)) as client:
        yield client


@pytest.mark.soak
@pytest.mark.parametrize("running_store", OPEN, ids=lambda kind: kind.name, indirect=True)
class TestSealedStore(NetworkConformance, TorchConformance):
    @pytest.fixture
    def store(self, running_store: RunningStore, tmp_path: Path) -> Store:
        return having(running_store, tmp_path, SECRET).conformance()


def two_agents(run: Run) -> list[Agent]:
    agents = [run.start((1, 3)) for _ in range(2)]
    until(one_world(agents), PATIENCE)
    return agents


def document_of(client: KeyValueClient) -> RoundDocument:
    entry = client.get(STATE_KEY)
    assert entry is not None
    return RoundDocument.decode(entry.value)


def goes_on(run: Run, agents: list[Agent], member: KeyValueClient, incarnation: str) -> None:
    """A node that has the secret joins the same run, and nobody was told of another MASTER."""
    agents.append(run.start((1, 3)))
    until(one_world(agents), PATIENCE)
    assert document_of(member).incarnation == incarnation
    for agent in agents:
        assert agent.error is None
        for info in agent.rounds:
            assert info.bootstrap_store_info is not None
            assert info.bootstrap_store_info.master_addr == "127.0.0.1"
            assert info.bootstrap_store_info.master_port != 6666


SAID = {
    "none": "is sealed with a secret, and none is set here",
    "another": "is sealed with another secret than this one's",
    "unsealed": "is not sealed, for its nodes have no secret, and one is set here",
}


@every_open_store
@pytest.mark.parametrize("case", SAID)
def test_a_node_with_another_secret_does_not_join(
    case: str,
    store: RunningStore,
    run_id: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with_secret = having(store, tmp_path, SECRET)
    theirs = store if case == "unsealed" else with_secret
    ours = {
        "none": store, "another": having(store, tmp_path, ANOTHER), "unsealed": with_secret
    }[case]  # fmt: skip
    with Run(theirs, run_id) as run, Run(ours, run_id) as outsider:
        agents = [run.start((1, 3)) for _ in range(2)]
        until(one_world(agents), PATIENCE)
        with closing(theirs.open(run_id)) as client:
            before = document_of(client)
            rounds = [len(agent.rounds) for agent in agents]
            other = outsider.start((1, 3))
            # One line as soon as it has read, and the end of its agent: it does not try for ever.
            until(lambda: SAID[case] in caplog.text, PATIENCE)
            until(lambda: other.error is not None, PATIENCE)
            assert SAID[case] in str(other.error)
            assert not other.rounds
            assert document_of(client) == before
            assert [len(agent.rounds) for agent in agents] == rounds
            errors = [it for it in caplog.records if SAID[case] in it.getMessage()]
            assert len({it.getMessage() for it in errors}) <= 2, errors


@every_open_store
@pytest.mark.parametrize("secret", [None, ANOTHER])
def test_a_forged_round_moves_no_node(
    secret: str | None,
    store: RunningStore,
    run: Run,
    run_id: str,
    member: KeyValueClient,
    tmp_path: Path,
) -> None:
    agents = two_agents(run)
    true = document_of(member)
    forged = msgspec.structs.replace(
        true,
        round=true.round + 7,
        master=EVIL,
        leader="0" * 16,
        participants=("0" * 16, *true.participants),
    )
    by = store if secret is None else having(store, tmp_path, secret)
    with closing(by.open(run_id)) as stranger:
        for _ in range(20):
            stranger.put(STATE_KEY, forged.encode())
            stranger.put(BELL_KEY, b"evil 1")
            entry = member.get(STATE_KEY)
            assert entry is None or RoundDocument.decode(entry.value).master == true.master
            time.sleep(0.05)
    goes_on(run, agents, member, true.incarnation)


@every_open_store
def test_no_forged_value_counts(run: Run, member: KeyValueClient, stranger: KeyValueClient) -> None:
    """Those of the records of nodes: a lease of 3,000 years, a beat that jumps, what is no JSON."""
    agents = two_agents(run)
    true = document_of(member)
    node = true.participants[0]
    entry = member.get(NODES_PREFIX + node)
    assert entry is not None
    record = NodeRecord.decode(entry.value)
    forged = {
        NODES_PREFIX + "1" * 16: msgspec.structs.replace(
            record, status=Status.JOIN, lease=1e11, address="0"
        ).encode(),
        NODES_PREFIX + "2" * 16: b"[" * 100_000,
        NODES_PREFIX + "3" * 16: b"\xff\xfe",
        NODES_PREFIX + "4" * 16: msgspec.structs.replace(record, unfit="x" * 200_000).encode(),
        NODES_PREFIX + node: msgspec.structs.replace(
            record, beat=1 << 62, master="\0", status=Status.LEFT
        ).encode(),
    }
    stranger.put_many(forged)
    prefix = f"store/{true.incarnation}/{true.round + 1}/torchelastic/role_info/"
    stranger.put_many({f"{prefix}{rank}": b"forged" for rank in range(4)})
    assert not {NODES_PREFIX + digit * 16 for digit in "1234"} & {*member.list("")}
    goes_on(run, agents, member, true.incarnation)
    # The node has written over what stood at its own key.
    until(lambda: member.get(NODES_PREFIX + node) is not None, PATIENCE)


@every_open_store
def test_what_nobody_else_uses_is_no_obstacle(
    run: Run, member: KeyValueClient, stranger: KeyValueClient
) -> None:
    """One value under an id that is free keeps no job out for longer than a lease."""
    stranger.put(STATE_KEY, b'{"schema": 9}')
    agents = [run.start((2, 2)) for _ in range(2)]
    until(one_world(agents), PATIENCE)
    assert document_of(member).size == 2


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.file), "w")


@every_open_store
def test_no_pickle_of_a_stranger_is_read_with_torchs_handler(
    store: RunningStore, sealed: RunningStore, run_id: str, tmp_path: Path
) -> None:
    def backend_of(at: RunningStore) -> KeyValueBackend:
        params = RendezvousParameters(at.backend, at.endpoint, run_id, 1, 2, **at.config)
        return create_backend(params)[0]

    file = tmp_path / "ran"
    stranger, node = backend_of(store), backend_of(sealed)
    with closing(stranger), closing(node):
        stranger.set_state(pickle.dumps(Bomb(file)))
        assert node.get_state() is None
        with closing(sealed.open(run_id)) as client:
            assert client.get(TORCH_STATE_KEY) is None
    assert not file.exists()


def raw_of(store: RunningStore) -> Any:
    """Redis itself, as one who has its password."""
    return redis.Redis(*store.address)


def field_of(server: Any, run_id: str, key: str) -> tuple[str, bytes]:
    name = f"{{rdzv/{run_id}}}"
    return name, server.hget(name, f"={key}")


def test_nothing_can_be_moved_to_another_key_or_run(
    store: RunningStore, tmp_path: Path, run_id: str
) -> None:
    sealed = having(store, tmp_path, SECRET)
    with Run(sealed, run_id) as one, Run(sealed, run_id + "-b") as another:
        for run in one, another:
            run.start((1, 1))
            until(one_world(run.agents), PATIENCE)
        with (
            closing(raw_of(store)) as server,
            closing(sealed.open(run_id)) as a,
            closing(sealed.open(run_id + "-b")) as b,
        ):
            ours, theirs = document_of(a), document_of(b)
            name, stored = field_of(server, run_id, STATE_KEY)
            _, other = field_of(server, run_id + "-b", STATE_KEY)
            assert other is not None
            server.hset(name, f"={STATE_KEY}", other)
            assert a.get(STATE_KEY) is None
            server.hset(name, f"={STATE_KEY}", stored)
            assert document_of(a) == ours != theirs
            record = server.hget(name, f"={NODES_PREFIX}{ours.participants[0]}")
            server.hset(name, f"={NODES_PREFIX}{'5' * 16}", record)
            assert [*a.list(NODES_PREFIX)] == [NODES_PREFIX + ours.participants[0]]
            # A tail that is cut off, and one that is put to it.
            for altered in (stored[:-1], stored + b" "):
                server.hset(name, f"={STATE_KEY}", altered)
                assert a.get(STATE_KEY) is None
            server.hset(name, f"={STATE_KEY}", stored)


def test_an_earlier_round_that_is_put_back_is_refused(
    store: RunningStore, tmp_path: Path, run_id: str
) -> None:
    """A writer may put back what stood at the same key before: the nodes know better."""
    sealed = having(store, tmp_path, SECRET)
    with Run(sealed, run_id) as run:
        agents = [run.start((1, 3))]
        until(one_world(agents), PATIENCE)
        with closing(raw_of(store)) as server, closing(sealed.open(run_id)) as client:
            first = document_of(client)
            name, earlier = field_of(server, run_id, STATE_KEY)
            agents.append(run.start((1, 3)))
            until(one_world(agents), PATIENCE)
            second = document_of(client)
            assert second.round > first.round
            server.hset(name, f"={STATE_KEY}", earlier)
            assert document_of(client) == first
            agents.append(run.start((1, 3)))
            until(one_world(agents), PATIENCE)
            assert document_of(client).round > second.round
            assert all(agent.error is None for agent in agents)


def test_neither_exclusions_nor_the_list_of_runs_can_be_forged(
    store: RunningStore, tmp_path: Path, run_id: str
) -> None:
    sealed = having(store, tmp_path, SECRET)
    evil = Archive(store.open, run_id, 60)
    ours = Archive(sealed.open, run_id, 60)
    with closing(store.open(EXCLUDED)) as client:
        client.put(run_id, b'[["127.0.0.1",null,"evil"]]')
    with closing(store.open(LIST)) as client:
        client.put(run_id, b"{}")
    with Run(sealed, run_id) as run:
        assert [it.host for it in evil.exclusions(0.0, all_runs=False)] == ["127.0.0.1"]
        assert ours.exclusions(0.0, all_runs=False) == ()
        agents = two_agents(run)
        assert all(agent.error is None for agent in agents)


COMMANDS = (
    ("status",), ("history",), ("drain", "--rank", "0"), ("clean",), ("close",), ("restart",),
    ("resize",), ("exclude", "127.0.0.1"), ("status", "--json"), ("list",),
)  # fmt: skip


def test_commands_without_the_secret_say_so_in_one_line(
    sealed: RunningStore, run: Run, run_id: str, member: KeyValueClient
) -> None:
    two_agents(run)
    before = document_of(member)
    # The leader notes the round a second after it began.
    until(lambda: len(run_of(sealed, run_id).rows()) > 0, PATIENCE)
    for case, environ in (("none", {}), ("another", {"RDZV_PLUGINS_SECRET": ANOTHER})):
        for words in COMMANDS:
            asked = [*words, "-e", sealed.endpoint, *(() if "list" in words else ("-i", run_id))]
            done = CliRunner().invoke(app, asked, env=environ)
            said = str(done.exception)
            assert isinstance(done.exception, ValueError | RendezvousStateError), (words, said)
            assert SAID[case] in said, (words, said)
            assert "\n" not in said
            assert SECRET not in said
            assert ANOTHER not in said
    assert document_of(member) == before
    done = CliRunner().invoke(app, ["check", "-e", sealed.endpoint, "-i", run_id])
    assert f"failed   run: '{run_id}': the run {SAID['none']}" in done.stdout
    assert "secret: none: whoever can write to the store may join" in done.stdout


def run_of(store: RunningStore, run_id: str) -> Archive:
    return Archive(store.open, run_id, 60)


WORKER = """
import os
print("workers see", sorted({"RDZV_PLUGINS_SECRET", "PET_RDZV_ENDPOINT"} & {*os.environ}))
"""


@pytest.mark.parametrize(
    "launcher",
    [
        ("-m", "rdzv_plugins.cli", "run"),
        pytest.param(("-m", "torch.distributed.run"), marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("handler", ["rdzv", pytest.param("torch", marks=pytest.mark.soak)])
def test_workers_inherit_neither_secret_nor_password(
    launcher: tuple[str, ...],
    handler: str,
    store: RunningStore,
    run_id: str,
    tmp_path: Path,
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    where = ["--rdzv-backend=redis"]
    how = [f"--rdzv-id={run_id}", f"--rdzv-conf=last_call_timeout=0,handler={handler}"]
    done = forked.run(
        [sys.executable, *launcher, *where, *how, "--nnodes=1", str(script)],
        {**os.environ, "RDZV_PLUGINS_SECRET": SECRET, "PET_RDZV_ENDPOINT": store.endpoint},
    )
    assert done.returncode == 0, done.stderr
    assert "workers see []" in done.stdout
    assert SECRET not in done.stdout + done.stderr
