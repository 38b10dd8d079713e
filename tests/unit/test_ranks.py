"""The order of ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_plugins.protocol.documents import NodeRecord, Phase, Status
from rdzv_plugins.protocol.policies.ranks import old_places, order_ranks
from tests import replace

from . import views

pytestmark = pytest.mark.rule("rank order")


def record(
    address: str,
    pid: int = 1,
    hint: int | None = None,
    domain: str | None = None,
    can_host: bool = True,
) -> NodeRecord:
    return NodeRecord(
        address=address, pid=pid, beat=1, status=Status.JOIN, round=-1, min_nodes=1, max_nodes=64,
        interval=5.0, lease=15.0, hint=hint, domain=domain, can_host=can_host,
    )  # fmt: skip


def test_natural_compares_numbers_as_numbers() -> None:
    addresses = ["node2", "node10", "node1", "rack10-n1", "rack2-n11", "rack2-n9", "10.0.0.9"]
    records = {address: record(address) for address in addresses}
    assert order_ranks(addresses, records, (), "natural") == (
        "10.0.0.9", "node1", "node2", "node10", "rack2-n9", "rack2-n11", "rack10-n1",
    )  # fmt: skip


def test_processes_of_one_host_are_ordered_by_pid() -> None:
    records = {"c": record("host", 30), "b": record("host", 4), "a": record("host", 200)}
    assert order_ranks(records, records, (), "natural") == ("b", "c", "a")


def test_stable_keeps_survivors_in_place_and_newcomers_behind() -> None:
    records = {name: record(name) for name in ("n1", "n2", "n3", "n10")}
    order = order_ranks(["n1", "n2", "n3", "n10"], records, ("n3", "gone", "n2"), "stable")
    assert order == ("n3", "n2", "n1", "n10")


def test_hints_come_first_and_ties_are_natural() -> None:
    records = {
        "n1": record("n1"), "n2": record("n2", hint=1), "n3": record("n3", hint=0),
        "n10": record("n10", hint=1),
    }  # fmt: skip
    assert order_ranks(records, records, (), "hint") == ("n3", "n2", "n10", "n1")


def placed(**places: str) -> dict[str, NodeRecord]:
    """``a1="r1"``: nodes and their domains."""
    return {name: record(name, domain=domain) for name, domain in places.items()}


def test_rank_0_is_one_that_all_reach() -> None:
    """Over the version of IP that all have, whatever the order is."""
    both, old, new = record("2a00::1"), record("10.0.0.2"), record("2a00::3")
    old, new = replace(old, lacks=6), replace(new, lacks=4)
    assert order_ranks("ab", {"a": both, "b": old}, (), "natural") == ("b", "a")
    assert order_ranks("ab", {"a": both, "b": old}, ("a", "b"), "stable") == ("b", "a")
    assert order_ranks("ac", {"a": both, "c": new}, (), "natural") == ("a", "c")
    # Where nobody is, or the only one cannot open a TCPStore, as without this.
    assert order_ranks("bc", {"b": old, "c": new}, (), "natural") == ("c", "b")
    unable = replace(old, can_host=False)
    assert order_ranks("ab", {"a": both, "b": unable}, (), "natural") == ("a", "b")


class TestTopology:
    def test_domains_are_ordered_by_natural_name_and_nodes_within_them(self) -> None:
        records = placed(n1="rack10", n2="rack9", n10="rack9", n3="rack10", n4="rack9")
        records["n0"] = record("n0")
        order = order_ranks(records, records, (), "topology")
        assert order == ("n2", "n4", "n10", "n1", "n3", "n0")

    def test_levels_are_nested(self) -> None:
        records = placed(
            n1="s2/r1", n2="s1/r2", n3="s2/r2", n4="s1/r1", n5="s10/r1", n6="s1/r2", n7="s1",
        )  # fmt: skip
        order = order_ranks(records, records, (), "topology")
        assert order == ("n7", "n4", "n2", "n6", "n1", "n3", "n5")

    def test_a_replacement_of_the_domain_has_the_place_of_the_lost_node(self) -> None:
        records = placed(a1="r1", a3="r1", b1="r2", b2="r2", a9="r1", a2="r1")
        places = {"a1": 0, "a2": 1, "a3": 2, "b1": 3, "b2": 4}
        chosen = ["a1", "a3", "a9", "b1", "b2"]
        order = order_ranks(chosen, records, (), "topology", places)
        assert order == ("a1", "a9", "a3", "b1", "b2")

    def test_a_replacement_of_another_domain_has_not(self) -> None:
        records = placed(a1="r1", a2="r1", a3="r1", b1="r2", b2="r2", b0="r2")
        places = {"a1": 0, "a2": 1, "a3": 2, "b1": 3, "b2": 4}
        order = order_ranks(["a1", "a3", "b0", "b1", "b2"], records, (), "topology", places)
        assert order == ("a1", "a3", "b1", "b2", "b0")

    def test_the_first_names_of_several_nodes_get_the_first_places(self) -> None:
        records = placed(a5="r1", a2="r1", a3="r1", a7="r1", a8="r1", a1="r1", a9="r1")
        places = {"a5": 0, "a2": 1, "a3": 2, "a1": 3}
        order = order_ranks(["a2", "a3", "a8", "a7", "a9"], records, (), "topology", places)
        assert order == ("a7", "a2", "a3", "a8", "a9")

    def test_rank_0_can_host_and_brings_its_domain(self) -> None:
        records = placed(a1="s1/r1", a2="s1/r1", b1="s1/r2", b2="s1/r2", c1="s2/r1", c2="s2/r1")
        records |= {name: replace(records[name], can_host=False) for name in ("a1", "a2", "b1")}
        order = order_ranks(records, records, (), "topology")
        assert order == ("b2", "b1", "a1", "a2", "c1", "c2")
        records["b2"] = replace(records["b2"], can_host=False)
        order = order_ranks(records, records, (), "topology")
        assert order == ("c1", "c2", "a1", "a2", "b1", "b2")

    def test_domains_whose_numbers_are_equal_are_two(self) -> None:
        records = placed(n1="rack7/a", n2="rack07/b", n3="rack7/c")
        assert order_ranks(records, records, (), "topology") == ("n2", "n1", "n3")

    def test_places_are_told_by_the_records_also_of_who_is_gone(self) -> None:
        last = views.document(Phase.RUNNING, participants=("n3", "n1", "n2"))
        forming = views.document(
            Phase.FORMING, 5, previous=("n3", "n2"), ran=last.world_id, master="n3:1"
        )
        records = {
            name: replace(views.running(name, last), rank=rank)
            for rank, name in enumerate(last.participants)
        }
        assert old_places(forming, records) == {"n3": 0, "n1": 1, "n2": 2}
        # The last round never ran; or the store has lost the record of one.
        unknown = old_places(replace(forming, ran=None), records)
        assert sorted(unknown, key=unknown.__getitem__) == ["n3", "n2"]
        places = dict(old_places(replace(forming, previous=("n3", "n9", "n2")), records))
        assert {name: places.pop(name) for name in last.participants} == {"n3": 0, "n1": 1, "n2": 2}
        assert 0 < places.pop("n9") < 1
        assert not places


@given(
    st.lists(
        st.tuples(
            st.none() | st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_each_domain_is_in_one_piece_at_each_level(
    nodes: list[tuple[str | None, bool]], chance: random.Random
) -> None:
    records = {
        f"n{number}": record(f"n{number}", domain=domain, can_host=can_host)
        for number, (domain, can_host) in enumerate(nodes)
    }
    names = list(records)
    places = {name: place for place, name in enumerate(chance.sample(names, len(names) // 2))}
    chosen = chance.sample(names, chance.randint(len(names) // 2, len(names)))
    order = order_ranks(chosen, records, (), "topology", places)
    assert sorted(order) == sorted(chosen)
    for depth in (1, 2, 3):
        parts = [(records[name].domain or "").split("/")[:depth] for name in order]
        pieces = [
            part for part, before in zip(parts, [None, *parts], strict=False) if part != before
        ]
        assert len(pieces) == len({*map(tuple, pieces)}), parts
    if any(records[name].can_host for name in order):
        assert records[order[0]].can_host


def test_an_address_of_thousands_of_digits_is_ordered_too() -> None:
    records = {"long": record("n" + "9" * 5000), "short": record("n10"), "zero": record("n007")}
    assert order_ranks(records, records, (), "natural") == ("zero", "short", "long")


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.builds(
            record,
            st.text(max_size=8),
            st.integers(0, 3),
            st.none() | st.integers(0, 3),
            st.none() | st.sampled_from(["a", "a/b", "b/a", "b/b", "b10", "b9"]),
        ),
        max_size=12,
    ),
    st.sampled_from(["natural", "stable", "hint", "topology"]),
    st.randoms(use_true_random=False),
)
def test_everybody_gets_one_place_whatever_the_order_of_arrival(
    records: dict[str, NodeRecord], rank_order: str, chance: random.Random
) -> None:
    names = list(records)
    previous = tuple(chance.sample(names, len(names) // 2))
    order = order_ranks(names, records, previous, rank_order)
    assert sorted(order) == sorted(names)
    chance.shuffle(names)
    assert order_ranks(names, records, previous, rank_order) == order
