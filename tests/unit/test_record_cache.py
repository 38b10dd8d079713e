"""All nodes' records, as one observer has read them."""

from __future__ import annotations

import pytest

from rdzv_plugins.kv import Entry
from rdzv_plugins.protocol.documents import NODES_PREFIX, NodeRecord, Status
from rdzv_plugins.protocol.record_cache import RecordCache
from tests import replace

from .views import record

pytestmark = pytest.mark.rule("leases")


def entries(version: str, *records: NodeRecord) -> dict[str, Entry]:
    return {NODES_PREFIX + one.address: Entry(one.encode(), version) for one in records}


def test_a_record_never_goes_back() -> None:
    """A beat that was held up on its way lands after the farewell of its node."""
    beat = record("n1", Status.RUN, 4, beat=7)
    left = replace(beat, beat=8, status=Status.LEFT)
    listing = RecordCache()
    assert listing.decode(entries("1", beat)) == {"n1": beat}
    assert listing.decode(entries("2", left)) == {"n1": left}
    for _ in range(2):
        assert listing.decode(entries("3", beat)) == {"n1": left}
    again = replace(beat, beat=9, status=Status.JOIN)
    assert listing.decode(entries("4", again)) == {"n1": again}


def test_what_nobody_can_read_is_left_out() -> None:
    listing = RecordCache()
    garbage = {NODES_PREFIX + "n2": Entry(b"garbage", "1")}
    assert listing.decode({**entries("1", record("n1")), **garbage}) == {"n1": record("n1")}


def test_what_was_read_by_itself_is_not_taken_back_by_a_listing() -> None:
    cache = RecordCache()
    done = record("n1", Status.DONE, beat=10)
    cache.read("n1", Entry(done.encode(), "v10"))
    late = Entry(record("n1", Status.RUN, beat=8).encode(), "v11")
    assert cache.decode({"nodes/n1": late})["n1"] == done
    # An older look does not take back a later listing either.
    cache.read("n1", Entry(record("n1", Status.RUN, beat=8).encode(), "v8"))
    assert cache.decode({"nodes/n1": late})["n1"] == done
