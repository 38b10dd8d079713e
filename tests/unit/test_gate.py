"""Whatever stands in the store: it is ours, within its limits, or it counts as absent."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdzv_plugins.kv import Entry, MemoryClient, MemoryServer, RendezvousStateError
from rdzv_plugins.kv.gate import DOCUMENT_BYTES, RECORD_BYTES, plain
from rdzv_plugins.observe.history import EXCLUDED, LIST, Archive, Row, archive_run_id, list_runs
from rdzv_plugins.peers.exchange import exchange
from rdzv_plugins.protocol.documents import (
    BELL_KEY,
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    CorruptDocumentError,
    Exclusion,
    NodeRecord,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.record_cache import RecordCache
from rdzv_plugins.protocol.roster import ranks_in
from rdzv_plugins.protocol.round_record import RoundRecord, record_of
from tests import replace
from tests.unit.life import RULES, Life, Time, finish, stored

from .test_documents import RECORD, RUNNING

NESTED = b'{"a":' + b"[" * 5000
FULL = replace(
    RUNNING,
    cause=Cause(note="why", unfit=(("host1[1]", "no disk"),)),
    excluded=(Exclusion("host9", 1e9, "broken"),),
    ran="3-x",
    fencing_token=7,
)


def _document(data: bytes) -> None:
    try:
        found = RoundDocument.decode(data)
    except RendezvousStateError as error:
        said = str(error)
        if len(said) > 1000 or not said.isprintable():
            raise AssertionError(ascii(said)) from error
        return
    assert len(found.reason) < 40_000
    assert found.world_id
    assert found.place
    for text in (found.reason, found.leader or "", found.master or "", found.restart):
        assert plain(text, 100_000) == " ".join(text.split())


def _record(data: bytes) -> None:
    found = RecordCache(RULES.lease).decode({NODES_PREFIX + "n1": Entry(data, "1")})
    for record in found.values():
        assert record.label
        assert record.asks in (True, False)
        assert RULES.lease / 10 <= record.lease <= RULES.lease * 10


def _read(run_id: str, key: str, read: Callable[[Archive, Any], object]) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        server = MemoryServer()
        MemoryClient(server, run_id).put(key, data)
        archive = Archive(lambda of: MemoryClient(server, of), "job", 60.0)
        read(archive, lambda of: MemoryClient(server, of))

    return decode


def _list(archive: Archive, open: Callable[[str], MemoryClient]) -> None:
    with suppress(RendezvousStateError):  # As it says, of what begins as a sealed value does.
        list_runs(open)
    archive.last()


ROW = Row(
    incarnation="r",
    round=3,
    phase=Phase.RUNNING,
    nodes=2,
    reason="why",
    at="2026-01-01T00:00:00+00:00",
)
LISTED = (
    b'{"run":"job","incarnation":"r","began":"2026-01-01T00:00+00:00",'
    b'"at":"2026-01-01T00:00+00:00","until":"2027-01-01T00:00+00:00",'
    b'"phase":"running","round":1,"nodes":2}'
)
ARCHIVED = archive_run_id("job")
ENDED = b'{"outcome":"failed","round":3,"reason":"why","at":"2026-01-01T00:00:00"}'

# What is decoded, and a value of ours.
DECODERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "document": (_document, FULL.encode()),
    "record": (_record, RECORD.encode()),
    "shard": (lambda data: ranks_in(Entry(data, "1")), b'{"n1":0,"n2":1}'),
    "row": (
        _read(ARCHIVED, "rounds/r/1", lambda it, _: (it.rows(), it.last())),
        msgspec.json.encode(ROW),
    ),
    "list": (_read(LIST, "job", _list), LISTED),
    "tombstone": (_read(ARCHIVED, "ended/r", lambda it, _: it.tombstone("r")), ENDED),
    "exclusions": (
        _read(EXCLUDED, "job", lambda it, _: it.exclusions(0.0)),
        b'[["host1",null,"why"],["host2",1e9,"why"]]',
    ),
}

HOSTILE = [
    b"9" * 4300, b"9" * 25, b"-1", b"1e308", b"1e18", b"4611686018427387904", b"null", b"true",
    b"[]", b"{}", b'"\\u0000"', b'"\\ud800"', b'"\\u001b]0;x\\u0007"', b'"' + b"x" * 5000 + b'"',
    b'"\xff"', b'"\xe2\x80\xae"', b"NaN", b"[" * 3000, b'{"a":' * 3000, b"\x00", b"\xc2\x9b",
    b'"a:99999999"',
]  # fmt: skip


def hostile(chance: random.Random, ours: bytes) -> bytes:
    """A value of ours that somebody has changed."""
    data = ours
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at, to = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        match chance.randrange(6):
            case 0:
                data = data[:at] + chance.randbytes(chance.choice((1, 1, 3))) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + data[to:]
            case 3:
                data = data[:to] + data[at:]
            case 4:
                data = data[:at] + chance.choice(HOSTILE) + data[at:]
            case _:
                # In the place of a field's value.
                parts = data.split(b":")
                if len(parts) > 1:
                    which = 1 + chance.randrange(len(parts) - 1)
                    rest = parts[which].partition(b",")
                    parts[which] = chance.choice(HOSTILE) + rest[1] + rest[2]
                    data = b":".join(parts)
        data = data or b" "
    return data


@pytest.mark.parametrize("what", DECODERS)
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), noise=st.binary(max_size=40))
def test_no_decoder_raises_anything_but_what_it_says(what: str, seed: int, noise: bytes) -> None:
    decode, ours = DECODERS[what]
    decode(noise)
    chance = random.Random(seed)
    for _ in range(20):
        decode(hostile(chance, ours))


@pytest.mark.parametrize("what", DECODERS)
def test_what_is_ours_passes(what: str) -> None:
    decode, ours = DECODERS[what]
    decode(ours)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (replace(RUNNING, master="host1"), "master"),
        (replace(RUNNING, master="host1:99999999"), "master"),
        (replace(RUNNING, master="host1:0"), "master"),
        (replace(RUNNING, master="ho\0st:29500"), "master"),
        (replace(RUNNING, master="host1\nSET x y:6379"), "master"),
        (replace(RUNNING, master=":29500"), "master"),
        (replace(RUNNING, cause=Cause(note="x" * 200_000)), "cause.note"),
        (replace(RUNNING, round=10**4300), "round"),
        (replace(RUNNING, round=-5), "round"),
        (replace(RUNNING, incarnation="x/../../y"), "incarnation"),
        (replace(RUNNING, participants=("n1", "n\x1b[2J")), "participants"),
        (replace(RUNNING, leader="n\r\n1"), "leader"),
        (replace(RUNNING, leader="n\x7f1"), "leader"),
        (replace(RUNNING, since=10**15), "since"),
        (replace(RUNNING, excluded=(Exclusion("host1", 1e300),)), "excluded"),
    ],
)  # fmt: skip
def test_a_document_beyond_its_limits_is_refused_by_the_name_of_the_field(
    document: RoundDocument, field: str
) -> None:
    if document.round == 10**4300:
        data = RUNNING.encode().replace(b'"round":3', b'"round":' + b"9" * 4300)
    else:
        data = document.encode()
    with pytest.raises(CorruptDocumentError, match=rf"\$\.{field}") as refused:
        RoundDocument.decode(data)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (replace(RECORD, address="no host"), "addr"),
        (replace(RECORD, address="host\r\nSET x y"), "address"),
        (replace(RECORD, address=""), "addr"),
        (replace(RECORD, address="x" * 256), "addr"),
        (replace(RECORD, port=65536), "port"),
        (replace(RECORD, port=-1), "port"),
        (replace(RECORD, beat=2**62), "beat"),
        (replace(RECORD, master="host1:x"), "master"),
        (replace(RECORD, unfit="x" * 5000), "unfit"),
        (replace(RECORD, lease=1e-9), "lease"),
        (replace(RECORD, rank=-1), "rank"),
    ],
)  # fmt: skip
def test_a_record_beyond_its_limits_is_refused_by_the_name_of_the_field(
    record: NodeRecord, field: str
) -> None:
    with pytest.raises(RendezvousStateError, match=rf"\$\.{field}") as refused:
        NodeRecord.decode(record.encode())
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


def test_a_value_of_megabytes_is_not_even_parsed() -> None:
    with pytest.raises(CorruptDocumentError, match="more than 8,388,608"):
        RoundDocument.decode(b'{"a":"' + b"x" * DOCUMENT_BYTES)
    with pytest.raises(RendezvousStateError, match="more than 65,536"):
        NodeRecord.decode(b'{"a":"' + b"x" * RECORD_BYTES)


def test_a_reason_is_cleaned_and_cut() -> None:
    """A terminal's commands, a line that is forged, letters that run backwards."""
    nasty = "no disk\n12:00:00 run 'job' is fine\x1b]0;owned\x07\x9b2J\u202egnol\u2028"
    found = NodeRecord.decode(replace(RECORD, unfit=nasty, status=Status.LEFT).encode())
    document = RoundDocument.decode(replace(RUNNING, cause=Cause(note=nasty)).encode())
    for text in (found.unfit, document.reason, plain(nasty)):
        assert text.isprintable(), ascii(text)
    assert plain("x" * 10_000_000, 10) == "x" * 9 + "…"
    assert plain(ValueError("a\n b\tc")) == "a b c"


@pytest.mark.parametrize("lease", [1e11, RULES.lease * 10.5, RULES.lease / 10.5])
def test_a_lease_beyond_that_of_the_run_is_not_believed(
    lease: float, pair: tuple[Life, Life]
) -> None:
    """A record that asks, and whose node is never lost: no round would ever form without it."""
    leader, joiner = pair
    forged = replace(joiner.node.record, address="evil", lease=lease, interval=lease / 3)
    leader.client.put(NODES_PREFIX + "n0", forged.encode())
    finish(leader, joiner)
    assert [it.outcomes[0].document is not None for it in pair] == [True, True]
    assert stored(leader).participants == ("n1", "n2")
    leader.client.put(BELL_KEY, b"n0")
    for _ in range(10):
        leader.wake()
        leader.go()
    assert sum("is not believed: a lease of" in line for line in leader.told) == 1


def test_thousands_of_strange_records_are_told_a_few_times(pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    for at in range(200):
        leader.client.put(f"{NODES_PREFIX}x{at}", b"\xff" * at)
    leader.client.put(NODES_PREFIX + "a b\r\nSET x y", RECORD.encode())
    for _ in range(5):
        leader.client.put(BELL_KEY, b"n0")
        leader.wake()
        leader.go()
    told = [line for line in leader.told if "counts as absent" in line]
    assert 0 < len(told) <= 16
    assert all(line.isprintable() for line in told)


@pytest.mark.parametrize("size", [3000, 1 << 20])
def test_a_reason_that_changes_each_second_fills_no_log(pair: tuple[Life, Life], size: int) -> None:
    """One of a megabyte is refused and told once; one that passes is told cut, or not at all."""
    leader, joiner = pair
    finish(leader, joiner)
    for second in range(100):
        why = f"{second} " + "x" * size
        odd = replace(RECORD, status=Status.LEFT, unfit=why, beat=second, lease=RULES.lease)
        leader.client.put(NODES_PREFIX + "x1", odd.encode())
        leader.client.put(NODES_PREFIX + "x2", replace(odd, status=Status.JOIN).encode())
        leader.client.put(BELL_KEY, str(second).encode())
        leader.wake()
        leader.go()
        joiner.go()
    lines = [*leader.told, *leader.said]
    assert sum(len(plain(line)) for line in lines) < 20_000, len(lines)


@pytest.mark.parametrize(
    "forged",
    [
        b"garbage",
        NESTED,
        b'{"schema":3}',
        b'{"a":"\xff"}',
        replace(FULL, incarnation="*", master="host:99999999").encode(),
        replace(FULL, incarnation="*", cause=Cause(note="x" * 200_000)).encode(),
    ],
    ids=["garbage", "nested", "schema", "utf-8", "master", "cause"],
)
def test_the_living_write_over_what_does_not_pass(forged: bytes, pair: tuple[Life, Life]) -> None:
    leader, joiner = pair
    finish(leader, joiner)
    leader.go()
    ours = stored(leader)
    leader.client.put(STATE_KEY, forged.replace(b'"*"', json.dumps(ours.incarnation).encode()))
    leader.client.put(BELL_KEY, b"n0")
    for _ in range(30):
        for life in pair:
            life.wake()
            life.go()
    assert stored(leader).incarnation == ours.incarnation
    assert stored(leader).phase is Phase.RUNNING
    told = [line for line in (*leader.told, *joiner.told) if "counts as absent" in line]
    assert told
    assert len(told) <= 2
    assert all(line.isprintable() and len(line) < 600 for line in told)
    assert len(leader.outcomes) == len(joiner.outcomes) == 1


def test_the_document_of_another_run_is_written_over(server: MemoryServer, time: Time) -> None:
    """Run A's document under run B's key: the workers of B restarted."""
    pair = [Life(name, server, time, replace(RULES, run="b")) for name in ("n1", "n2")]
    finish(*pair)
    leader, joiner = pair
    leader.go()
    ours = stored(leader)
    assert ours.run == "b"
    other = replace(ours, run="a", incarnation="of-a", round=5, participants=("n1", "x"))
    leader.client.put(STATE_KEY, other.encode())
    leader.client.put(BELL_KEY, b"n0")
    for _ in range(30):
        for life in pair:
            life.wake()
            life.go()
    assert stored(leader).incarnation == ours.incarnation
    assert stored(leader).phase is Phase.RUNNING
    assert [joiner.node.num_nodes_waiting, leader.node.num_nodes_waiting] == [0, 0]
    told = [line for life in pair for line in life.told if "of the run 'a'" in line]
    assert 0 < len(told) <= 2


def test_a_node_id_with_line_ends_is_sent_nowhere() -> None:
    """Rule: the victim would send an attacker's line to any port that it reaches."""
    for node, endpoint in (
        ("x\r\nSET owned 1\r\n", "127.0.0.1:6379"),
        ("n1", "127.0.0.1\r\n:6379"),
        ("n1", "127.0.0.1:99999999"),
        ("n1", "127.0.0.1"),
    ):
        with pytest.raises(ConnectionError, match="what stands in the store is"):
            exchange(node, endpoint, 1.0)


def test_a_row_of_our_longest_cause_can_be_read_again() -> None:
    label = "x" * 590 + "[1]"
    names = replace(Cause().lost, first=(label,) * 16, more=3)
    cause = replace(Cause(note="n" * 3000), lost=names, left=names, joined=names)
    document = RoundDocument.decode(replace(RUNNING, cause=cause).encode())
    server = MemoryServer()
    archive = Archive(lambda of: MemoryClient(server, of), "job", 60.0)
    found: RoundRecord = record_of(document, {})
    archive.note(found, datetime.now(UTC))
    assert len(archive.rows()) == 1
    archive.put_tombstone(replace(document, phase=Phase.CLOSED, outcome=Outcome.FAILED))
    assert archive.tombstone(document.incarnation) is Outcome.FAILED


def test_one_broken_entry_costs_the_list_no_other(time: Time) -> None:
    server = MemoryServer()
    client = MemoryClient(server, LIST)
    client.put("job", LISTED)
    for run, value in (
        ("nested", NESTED),
        ("a\x1b]0;x\x07", LISTED.replace(b'"job"', rb'"a\u001b]0;x\u0007"')),
        ("x" * 600, LISTED.replace(b"job", b"x" * 600)),
        ("!runs", LISTED.replace(b"job", b"!runs")),
        ("of another", LISTED),
        ("no zone", LISTED.replace(b"job", b"no zone").replace(b"+00:00", b"")),
        ("no date", LISTED.replace(b"job", b"no date").replace(b"2026-01", b"2026-99")),
        ("last year", LISTED.replace(b"job", b"last year").replace(b"2026", b"9999")),
        ("cut", LISTED[:40]),
        ("utf", b'{"run":"\xff"}'),
    ):
        client.put(run, value)
    assert [*list_runs(lambda of: MemoryClient(server, of))] == ["job"]


@pytest.mark.soak
@pytest.mark.parametrize("what", DECODERS)
def test_a_million_hostile_values_of_each(what: str) -> None:
    decode, ours = DECODERS[what]
    chance = random.Random(what)
    for _ in range(1_430_000):
        decode(hostile(chance, ours))
