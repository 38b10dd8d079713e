"""The nodes of a large round, which stand in shards beside the document."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_plugins.kv import Entry, MemoryClient, MemoryServer
from rdzv_plugins.observe.inspection import Inspection
from rdzv_plugins.protocol.cleanup import close_run
from rdzv_plugins.protocol.decide import decide
from rdzv_plugins.protocol.documents import (
    NODES_PREFIX,
    STATE_KEY,
    Cause,
    Outcome,
    Phase,
    RoundDocument,
    Status,
)
from rdzv_plugins.protocol.roster import (
    MISSING,
    ROSTER_PREFIX,
    apart,
    complete,
    prefixes,
    ranks_in,
    shard_key,
)
from rdzv_plugins.protocol.rules import SetRecord, Start, Wait
from tests import replace

from .life import RULES as PAIR
from .life import Life, Time, archive, finish, stored
from .views import as_named, document, record, running, view, written

pytestmark = pytest.mark.rule("large rounds")

LETTERS = st.characters(exclude_categories=["C", "Zl", "Zp"])  # As they pass the gate.
IDS = st.lists(st.text(LETTERS, max_size=4), unique=True, min_size=1, max_size=40).map(tuple)

APART = replace(PAIR, inline=1)


def named(nodes: tuple[str, ...], phase: Phase = Phase.CONFIRMING) -> RoundDocument:
    if phase is Phase.FORMING:
        return document(phase, participants=(), previous=nodes)
    return document(phase, participants=nodes)


def entries(shards: dict[str, dict[str, bytes]]) -> dict[str, Entry]:
    return {key: Entry(value, 1) for values in shards.values() for key, value in values.items()}


@given(IDS, st.integers(0, 10), st.sampled_from([Phase.FORMING, Phase.RUNNING]))
def test_all_nodes_are_found_again(nodes: tuple[str, ...], inline: int, phase: Phase) -> None:
    whole = named(nodes, phase)
    small, shards = apart(whole, inline)
    assert small.is_whole == (len(nodes) <= inline)
    read = RoundDocument.decode(small.encode())
    assert read.world_id == whole.world_id
    assert read.size == whole.size
    assert complete(read, entries(shards), {}) == whole


@given(IDS, st.integers(0, 10))
def test_a_node_finds_its_rank_in_one_shard(nodes: tuple[str, ...], inline: int) -> None:
    whole = named(nodes)
    small, shards = apart(whole, inline)
    if small.roster is None:
        return
    stands = entries(shards)
    for node in (*nodes, "another"):
        held = ranks_in(stands[shard_key(small.incarnation, small.roster, node)])
        assert held is not None
        assert held.get(node) == whole.ranks.get(node)


def test_the_document_of_a_large_round_is_small() -> None:
    nodes = tuple(f"{number:016x}" for number in range(10_000))
    small, shards = apart(named(nodes), 128)
    (values,) = shards.values()
    assert len(small.encode()) < 1000
    assert len(values) == 79
    assert max(map(len, values.values())) < 5000


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.CONFIRMING, Phase.RUNNING])
@pytest.mark.parametrize("damage", ["missing", "unreadable", "another's"])
def test_lost_shards_are_made_again_from_the_records(phase: Phase, damage: str) -> None:
    nodes = ("n3", "n1", "n2")
    whole = named(nodes, phase)
    small, shards = apart(whole, 1)
    stands = entries(shards)
    key = min(stands)
    if damage == "missing":
        del stands[key]
    else:
        text = b"garbage" if damage == "unreadable" else b'{"n9":0}'
        stands[key] = Entry(text, 2)
    assert not complete(small, stands, {}).is_whole
    last = whole.round - (phase is Phase.FORMING)
    records = {
        node: record(node, round_=last, status=Status.RUN, world_id=whole.world_id, rank=rank)
        for rank, node in enumerate(nodes)
    }
    assert complete(small, stands, records) == whole
    # Not while one is missing, or if one was of another round.
    assert not complete(small, stands, {"n1": records["n1"], "n2": records["n2"]}).is_whole
    strange = replace(records["n3"], round=last - 1, world_id="another")
    assert not complete(small, stands, {**records, "n3": strange}).is_whole


def pair(time: Time, server: MemoryServer) -> tuple[Life, Life]:
    """Two nodes that are about to run; the first leads."""
    leader = Life("n1", server, time, APART)
    leader.go()
    joiner = Life("n2", server, time, APART, seed=2)
    return leader, joiner


def test_nodes_run_whose_ranks_stand_apart(time: Time) -> None:
    leader, joiner = pair(time, MemoryServer())
    finish(leader, joiner)
    for life, rank in ((leader, 0), (joiner, 1)):
        (outcome,) = life.outcomes
        assert outcome.document is not None
        assert outcome.document.ranks[life.node.id] == rank
        assert outcome.document.size == 2
    assert stored(leader).participants == ()
    # One shard each, and no listing.
    asked = [name for name in joiner.log if ROSTER_PREFIX in name]
    assert len(asked) == 1
    assert asked[0].startswith("Read")


def test_the_shards_stand_before_the_document_that_names_them(time: Time) -> None:
    leader, joiner = pair(time, MemoryServer())
    joiner.go()
    leader.go()
    naming = leader.log.index("PutShards")
    assert leader.log[naming + 1] == f"CompareAndSet {STATE_KEY}"


def test_a_node_looks_again_for_a_shard_that_it_did_not_find(time: Time) -> None:
    """A store may show the document before the shards that were written before it."""
    leader, joiner = pair(time, MemoryServer())
    joiner.go()
    leader.go()
    shards = {key: it.value for key, it in leader.client.list(ROSTER_PREFIX).items()}
    leader.client.delete_many([*shards])
    joiner.go()
    assert not joiner.node.record.world_id
    for key, value in shards.items():
        leader.client.put(key, value)
    joiner.wake()
    assert joiner.node.record.world_id == stored(leader).world_id


def test_a_leader_writes_lost_shards_again(time: Time) -> None:
    """One that took over: who led before knows all nodes, and writes them with the document."""
    server = MemoryServer()
    leader, joiner = pair(time, server)
    finish(leader, joiner)
    (keys,) = [[*leader.client.list(prefix)] for prefix in prefixes(stored(leader))]
    leader.client.delete_many(keys)
    heir = replace(stored(leader), leader="n2")
    leader.client.put(STATE_KEY, heir.encode())
    joiner.go()
    joiner.wake()
    assert joiner.node.document is not None
    assert joiner.node.document.participants == ("n1", "n2")
    assert {*leader.client.list(ROSTER_PREFIX)} == {*keys}


def test_a_roster_that_nobody_knows_ends_after_a_lease(time: Time) -> None:
    """The silent ones are counted as lost, and the others form the next round."""
    server = MemoryServer()
    leader, joiner = pair(time, server)
    finish(leader, joiner)
    lost = [*joiner.client.list(ROSTER_PREFIX), "nodes/n1"]
    joiner.client.delete_many(lost)
    joiner.client.put(STATE_KEY, replace(stored(joiner), leader="n2").encode())
    joiner.go()
    began = time.now
    while stored(joiner).phase is Phase.RUNNING:
        joiner.wake()
        assert time.now < began + 2 * APART.lease
    assert time.now >= began + APART.lease
    after = stored(joiner)
    assert (after.round, after.previous) == (1, ("n2",))
    assert str(after.cause) == "lost 1 node: lease ran out"


def test_a_node_that_is_back_is_not_counted_in_a_lost_roster() -> None:
    """n3 was lost before this round formed: n1 and one that nobody knows are in its roster."""
    forming = named(("n1", "n2"), Phase.FORMING)
    small, _ = apart(replace(forming, round=5, cause=Cause().plus(lost=["n3[1]"])), 1)
    me, back = (record(it, round_=4, rank=rank) for it, rank in (("n1", 0), ("n3", 2)))
    seen = view(me, small, {"n3": back}, silent={MISSING: 1000.0})
    after = written(decide(seen))
    assert after.previous == ("n1", "n3")
    assert str(after.cause) == "lost n3[1] and 1 more: lease ran out"


def test_shards_of_earlier_rounds_are_deleted(time: Time) -> None:
    server = MemoryServer()
    leader, joiner = pair(time, server)
    finish(leader, joiner)
    first = {*leader.client.list(ROSTER_PREFIX)}
    leader.go()
    assert leader.client.list(ROSTER_PREFIX).keys() == first, "the round that runs still needs them"
    joiner.carry_out(joiner.node.farewell())
    third = Life("n3", server, time, APART, seed=3)
    leader.go()
    leader.join_again()
    finish(leader, third)
    leader.go()
    assert first.isdisjoint(leader.client.list(ROSTER_PREFIX))
    assert leader.client.list(ROSTER_PREFIX)


@pytest.mark.parametrize(
    ("phase", "sentence"),
    [
        (Phase.CONFIRMING, "confirming round 4: 1 of 3 nodes has not confirmed its rank"),
        (Phase.RUNNING, "running round 4, 3 of 2..3 nodes"),
    ],
)
def test_an_inspection_of_a_lost_roster_shows_the_ranks_of_the_known_nodes(
    phase: Phase, sentence: str
) -> None:
    """The round is as large as it was, and nobody moves up a rank."""
    server = MemoryServer()
    client = MemoryClient(server, "run")
    small, _ = apart(named(("n1", "n2", "n3"), phase), 1)
    client.put(STATE_KEY, small.encode())
    for node, rank in (("n1", 0), ("n3", 2)):
        confirmed = record(node, Status.RUN, small.round, world_id=small.world_id, rank=rank)
        client.put(NODES_PREFIX + node, confirmed.encode())
    client.put(f"{NODES_PREFIX}n2", record("n2", Status.JOIN).encode())
    seen = Inspection(client, archive(server), "run")
    seen.look()
    assert seen.event.startswith(sentence)
    assert seen.document is not None
    assert seen.document.size == 3
    assert [(it.node, it.rank) for it in seen.nodes()] == [("n1", 0), ("n3", 2), ("n2", None)]


def test_an_heir_of_the_leader_notes_the_ranks_that_others_had(time: Time) -> None:
    """It knew its own alone when it began to work in that round."""
    server = MemoryServer()
    leader, heir = pair(time, server)
    finish(leader, heir)
    leader.carry_out(leader.node.farewell())
    third = Life("n3", server, time, APART, seed=3)
    third.go()
    while stored(heir).phase is Phase.RUNNING:
        heir.go()
        heir.wake()
    heir.join_again()
    finish(heir, third)
    heir.go()
    last = archive(server).rows()[-1]
    assert (last.round, [(it.name, it.rank) for it in last.left]) == (1, [("n1[1]", 0)])


def test_a_large_run_is_closed_without_its_names_in_a_store_that_forgot(time: Time) -> None:
    nodes = tuple(f"n{number}" for number in range(129))
    life = Life("n1", MemoryServer(), time, APART)
    closing = close_run(
        "n1",
        named(nodes, Phase.RUNNING),
        Outcome.SUCCEEDED,
        "why",
        60.0,
        lambda now: now.names("n1"),
    )
    life.carry_out(closing)
    assert stored(life).closed
    assert (stored(life).participants, stored(life).size) == ((), 129)


@pytest.mark.parametrize("phase", [Phase.CONFIRMING, Phase.RUNNING])
def test_a_node_that_has_confirmed_its_rank_needs_no_shard_to_know_it(phase: Phase) -> None:
    """The store lost it, and shows the document: asking for another round would end this one."""
    whole = document(phase)
    small, _ = apart(whole, 1)
    assert small.roster is not None
    me = running("n2", whole)
    confirmed = as_named(whole)
    for shards in (small.roster, replace(small.roster, ranks={})):
        seen = replace(small, roster=shards)
        action = decide(view(me, seen, confirmed=confirmed))
        assert isinstance(action, Wait if phase is Phase.CONFIRMING else Start)
    # A node that has not confirmed is told to ask.
    other = replace(me, world_id="4-another")
    assert isinstance(decide(view(other, small, confirmed=None)), SetRecord)
