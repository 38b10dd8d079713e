"""The codecs of what stands in the store: nothing is lost, and nothing but our own is accepted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_plugins.kv import RendezvousStateError
from rdzv_plugins.protocol.documents import (
    Cause,
    CorruptDocumentError,
    Exclusion,
    Names,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Shards,
    Status,
    Strikes,
)
from tests import replace

pytestmark = pytest.mark.rule("keys")

IDS = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=12)
PEOPLE = st.lists(IDS, unique=True, max_size=200).map(tuple)
NUMBERS = st.integers(min_value=0, max_value=2**31)
# As they pass the gate: nothing that a terminal would take for more than text.
LETTERS = st.characters(exclude_categories=["C", "Zl", "Zp"])
TEXT = st.text(LETTERS, max_size=30)
KEYS = st.text(LETTERS.filter(lambda it: it != "/"), min_size=1, max_size=30)
HOSTS = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True)
MASTERS = st.builds("{}:{}".format, HOSTS, st.integers(1, 65535))
RECORDS = st.builds(
    NodeRecord,
    address=HOSTS,
    pid=NUMBERS,
    beat=NUMBERS,
    status=st.sampled_from(Status),
    round=NUMBERS,
    min_nodes=NUMBERS,
    max_nodes=NUMBERS,
    interval=st.floats(0.001, 1e6),
    lease=st.floats(1e6, 1e9),
    incarnation=st.none() | TEXT,
    world_id=st.none() | TEXT,
    rank=st.none() | NUMBERS,
    looks=NUMBERS,
    hint=st.none() | NUMBERS,
    master=st.none() | MASTERS,
    can_host=st.booleans(),
)
NAMES = st.builds(Names, st.lists(TEXT, max_size=5).map(tuple), st.integers(0, 5000))
CAUSES = st.builds(
    Cause,
    lost=NAMES,
    left=NAMES,
    failed=NAMES,
    joined=NAMES,
    evicted=NAMES,
    drained=NAMES,
    excluded=NAMES,
    why=TEXT,
    note=TEXT,
)


SHARDS = st.none() | st.builds(
    Shards, digest=KEYS, size=st.integers(10, 5000), count=st.integers(1, 10)
)

EXCLUSIONS = st.lists(
    st.builds(Exclusion, TEXT, st.none() | st.integers(0, 1 << 37).map(float), TEXT), max_size=3
).map(tuple)

SECONDS = st.integers(0, 1 << 37).map(float)
STRIKES = st.lists(
    st.builds(Strikes, TEXT, st.lists(SECONDS, max_size=3).map(tuple), NUMBERS, SECONDS), max_size=3
).map(tuple)


@st.composite
def documents(draw: st.DrawFn) -> RoundDocument:
    phase = draw(st.sampled_from(Phase))
    people = draw(PEOPLE)
    roster = draw(SHARDS)
    if roster is not None:
        people = ()
    elif phase in (Phase.CONFIRMING, Phase.RUNNING):
        people = people or ("n1",)
    return RoundDocument(
        incarnation=draw(KEYS),
        round=draw(NUMBERS),
        phase=phase,
        leader=draw(st.none() | IDS),
        min_nodes=draw(NUMBERS),
        max_nodes=draw(NUMBERS),
        participants=people,
        previous=draw(PEOPLE),
        roster=roster,
        previous_roster=draw(SHARDS),
        absent=draw(PEOPLE),
        still_running=draw(PEOPLE),
        waiters=draw(NUMBERS),
        cause=draw(CAUSES),
        finishing=draw(st.booleans()),
        outcome=draw(st.none() | st.sampled_from(Outcome)),
        expires=draw(st.booleans()),
        ran=draw(st.none() | TEXT),
        master=draw(MASTERS) if phase is Phase.RUNNING else draw(st.none() | MASTERS),
        drained=draw(PEOPLE),
        excluded=draw(EXCLUSIONS),
        restart=draw(TEXT),
        quarantined=draw(EXCLUSIONS),
        strikes=draw(STRIKES),
    )


RUNNING = RoundDocument(
    incarnation="the-run",
    round=3,
    phase=Phase.RUNNING,
    leader="n1",
    min_nodes=1,
    max_nodes=4,
    participants=("n1", "n2"),
    master="host1:29500",
)
RECORD = NodeRecord(
    address="host1", pid=1, beat=1, status=Status.RUN, round=3, min_nodes=1, max_nodes=4,
    interval=5.0, lease=15.0, incarnation="the-run",
)  # fmt: skip

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(documents())
def test_a_document_survives_the_store(document: RoundDocument) -> None:
    assert RoundDocument.decode(document.encode()) == document


@given(RECORDS)
def test_a_record_survives_the_store(record: NodeRecord) -> None:
    assert NodeRecord.decode(record.encode()) == record


def garbage() -> st.SearchStrategy[bytes]:
    ours = st.sampled_from([RUNNING.encode(), RECORD.encode()])
    return st.one_of(
        st.binary(),
        JSON.map(lambda value: json.dumps(value).encode()),
        st.builds(lambda data, cut: data[:cut], ours, st.integers(0, 200)),
        # A byte that is another, and something nested deeper than a decoder goes.
        st.builds(
            lambda data, at, byte: data[: at % len(data)] + byte + data[at % len(data) + 1 :],
            ours, st.integers(0, 1000), st.binary(min_size=1, max_size=1),
        ),
        st.sampled_from([b"[" * 5000, b'{"a":' * 5000]),
    )  # fmt: skip


@given(garbage())
def test_garbage_is_refused_and_nothing_else(data: bytes) -> None:
    for decode in (RoundDocument.decode, NodeRecord.decode):
        try:
            value = decode(data)
        except RendezvousStateError:
            continue
        # What is accepted is one of ours, whole.
        assert decode(value.encode()) == value


@given(st.sampled_from(sorted(json.loads(RUNNING.encode()))), JSON)
def test_a_document_with_a_wrong_field_is_refused(name: str, value: object) -> None:
    fields = json.loads(RUNNING.encode()) | {name: value}
    try:
        document = RoundDocument.decode(json.dumps(fields).encode())
    except RendezvousStateError:
        return
    assert type(document.round) is type(document.waiters) is int
    assert isinstance(document.reason, str)
    assert isinstance(document.world_id, str)


@given(st.sampled_from(sorted(json.loads(RECORD.encode()))), JSON)
def test_a_record_with_a_wrong_field_is_refused(name: str, value: object) -> None:
    fields = json.loads(RECORD.encode()) | {name: value}
    try:
        record = NodeRecord.decode(json.dumps(fields).encode())
    except RendezvousStateError:
        return
    assert type(record.beat) is type(record.round) is type(record.pid) is int
    assert isinstance(record.label, str)


@pytest.mark.parametrize(
    "document",
    [
        replace(RUNNING, participants=()),
        replace(RUNNING, phase=Phase.CONFIRMING, participants=()),
        replace(RUNNING, participants=("n1", "n1")),
        replace(RUNNING, master=None),
        replace(RUNNING, participants=(), roster=Shards(digest="d", size=3, count=4)),
        replace(RUNNING, participants=(), roster=Shards(digest="d", size=3, count=0)),
        replace(RUNNING, participants=(), roster=Shards(digest="d", size=1 << 40, count=1 << 40)),
    ],
)
def test_a_round_that_no_node_could_act_on_is_refused(document: RoundDocument) -> None:
    with pytest.raises(RendezvousStateError, match="unreadable"):
        RoundDocument.decode(document.encode())


def test_another_schema_says_what_to_do() -> None:
    data = RUNNING.encode().replace(b"{", b'{"schema":1,', 1)
    with pytest.raises(
        RendezvousStateError, match=r"schema 1.*reads 2: install the same version"
    ) as refused:
        RoundDocument.decode(data)
    # It is somebody's: not to be written over as what is damaged is.
    assert not isinstance(refused.value, CorruptDocumentError)


def test_phases_only_go_forward() -> None:
    places = [replace(RUNNING, round=r, phase=phase).place for r in (3, 4) for phase in Phase]
    assert places == sorted(set(places))


def test_namings_tell_rounds_apart() -> None:
    namings = {
        replace(RUNNING, incarnation=run, round=number, participants=people).world_id
        for run in ("the-run", "another")
        for number in (3, 4)
        for people in (("n1", "n2"), ("n2", "n1"), ("n1",))
    }
    assert len(namings) == 12
    assert replace(RUNNING, leader="n2", phase=Phase.CONFIRMING).world_id == RUNNING.world_id
