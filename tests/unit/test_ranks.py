"""The order of ranks."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rdzv_plugins.protocol.documents import NodeRecord, Status
from rdzv_plugins.protocol.ranks import order_ranks


def record(address: str, pid: int = 1, hint: int | None = None) -> NodeRecord:
    return NodeRecord(
        address=address, pid=pid, beat=1, status=Status.JOIN, round=-1,
        min_nodes=1, max_nodes=64, interval=5.0, lease=15.0, hint=hint,
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


def test_an_address_of_thousands_of_digits_is_ordered_too() -> None:
    records = {"long": record("n" + "9" * 5000), "short": record("n10"), "zero": record("n007")}
    assert order_ranks(records, records, (), "natural") == ("zero", "short", "long")


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5),
        st.builds(record, st.text(max_size=8), st.integers(0, 3), st.none() | st.integers(0, 3)),
        max_size=12,
    ),
    st.sampled_from(["natural", "stable", "hint"]),
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
