"""Values under a secret: the whole contract, and what nobody can do who lacks the secret."""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv_plugins.kv import (
    Entry,
    KeyValueClient,
    MemoryClient,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
    Version,
    sealed,
)
from rdzv_plugins.kv.sealed import CLAIMS, MARK, OVERHEAD, ForeignValueError, SealedClient
from rdzv_plugins.protocol.documents import STATE_KEY, TORCH_STATE_KEY
from rdzv_plugins.settings.options import UnreadableFileError, first_line
from rdzv_plugins.testing import KeyValueConformance, Store, TorchConformance

SECRET = "a secret of all nodes and commands"

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def sealed_client(
    server: MemoryServer, run_id: str = "run", *secrets: str, prefix: str = "rdzv"
) -> SealedClient:
    client = MemoryClient(server, f"{prefix}/{run_id}")
    return SealedClient(client, prefix, run_id, lambda: secrets or (SECRET,))


def raw(server: MemoryServer, run_id: str = "run", prefix: str = "rdzv") -> MemoryClient:
    return MemoryClient(server, f"{prefix}/{run_id}")


class TestSealedMemory(KeyValueConformance, TorchConformance):
    @pytest.fixture
    def store(self) -> Store:
        server = MemoryServer()
        return Store(
            open=lambda namespace, **_: sealed_client(server, namespace),
            deadline_unit=0.2,
            forks=False,
        )


@given(key=KEYS, value=st.binary(max_size=200), secret=st.text(min_size=1))
def test_what_is_stored_is_hmac_over_key_and_value(key: str, value: bytes, secret: str) -> None:
    secret = secret.encode(errors="replace").decode()
    server = MemoryServer()
    sealed_client(server, "r/un", secret, prefix="pre").put(key, value)
    stored = raw(server, "r/un", "pre").get(key)
    scope = b"rdzv-plugins seal 1\x003:pre,4:r/un,"
    derived = hmac.digest(secret.encode(), scope, "sha256")
    path = key.encode()
    tag = hmac.digest(derived, b"%d:%s,%s" % (len(path), path, value), "sha256")[:16]
    assert stored is not None
    assert stored.value == MARK + tag + value


@given(
    key=KEYS,
    value=st.binary(max_size=50),
    at=st.integers(min_value=0, max_value=200),
    change=st.integers(min_value=1, max_value=255),
    cut=st.integers(min_value=0, max_value=60),
)
def test_no_altered_value_counts(key: str, value: bytes, at: int, change: int, cut: int) -> None:
    server = MemoryServer()
    client, stranger = sealed_client(server), raw(server)
    client.put(key, value)
    stored = stranger.get(key)
    assert stored is not None
    assert client.get(key) is not None
    altered = bytearray(stored.value)
    altered[at % len(altered)] ^= change
    for data in (bytes(altered), stored.value[:-1], stored.value + b"x", stored.value[cut:]):
        if data == stored.value:
            continue
        stranger.put(key, data)
        assert client.get(key) is None
        assert client.list("") == {}
        assert client.get_many([key]) == {}
        assert client.wait(key, None, 0) is None


@given(key=KEYS, other=KEYS, value=st.binary(max_size=50))
def test_a_value_counts_at_its_own_key_and_run_only(key: str, other: str, value: bytes) -> None:
    server = MemoryServer()
    sealed_client(server, "b/c", prefix="a").put(key, value)
    stored = raw(server, "b/c", "a").get(key)
    assert stored is not None
    places = [("a", "b/c", other), ("a", "b", key), ("x", "b/c", key), ("a/b", "c", key)]
    for prefix, run_id, moved in places:
        # One namespace has two names: a memory's "a/b" and "c" are "a" and "b/c".
        raw(server, run_id, prefix).put(moved, stored.value)
        found = sealed_client(server, run_id, prefix=prefix).get(moved)
        same = (prefix, run_id, moved) == ("a", "b/c", key)
        assert (found is not None) == same


@pytest.mark.parametrize("foreign", [b"", b"{}", b"12", MARK, MARK + bytes(32) + b"{}"])
def test_what_others_write_is_absent_and_is_written_over(foreign: bytes) -> None:
    server = MemoryServer()
    client, stranger = sealed_client(server), raw(server)

    def spoil(key: str) -> None:
        stranger.put(key, foreign)
        assert client.get(key) is None

    spoil("a")
    entry, written = client.compare_and_set("a", b"mine", None)
    assert written
    assert entry is not None
    assert entry.value == b"mine"
    assert client.get("a") == entry
    spoil("a")
    assert client.compare_and_set("a", b"next", entry.version) == (None, False)
    spoil("b")
    client.put("b", b"mine")
    assert [entry.value for entry in client.list("").values()] == [b"mine"]
    spoil("c")
    assert client.add("c", 2) == 2
    assert client.add("c", 3) == 5
    spoil("d")
    client.delete("d")
    assert stranger.get("d") is None


def test_a_valid_value_is_not_replaced_as_if_it_were_absent() -> None:
    server = MemoryServer()
    client, other = sealed_client(server), sealed_client(server)
    raw(server).put("a", b"not ours")

    class First(MemoryClient):
        """In front of whose second write another node writes."""

        def compare_and_set(
            self, key: str, value: bytes, expected: Version | None
        ) -> tuple[Entry | None, bool]:
            if expected is not None:
                other.put(key, b"theirs")
            return super().compare_and_set(key, value, expected)

    client.client = First(server, "rdzv/run")
    entry, written = client.compare_and_set("a", b"mine", None)
    assert not written
    assert entry is not None
    assert entry.value == b"theirs"


def test_a_listing_looks_again_at_what_changed_under_the_same_version() -> None:
    server = MemoryServer()
    client = sealed_client(server)
    client.put("a", b"1")
    assert client.list("")["a"].value == b"1"
    stored = server.keys("rdzv/run")["a"]
    server.keys("rdzv/run")["a"] = Entry(stored.value[:-1] + b"2", stored.version)
    assert client.list("") == {}


class Counting(MemoryClient):
    """Counts the waits that are asked of the store."""

    waits = 0

    def wait(self, key: str, version: Version | None, timeout: float) -> Entry | None:
        self.waits += 1
        return super().wait(key, version, timeout)


def test_a_waiting_client_does_not_spin_while_a_stranger_writes_in_a_loop() -> None:
    server, over = MemoryServer(), threading.Event()
    counting = Counting(server, "rdzv/run")
    client = SealedClient(counting, "rdzv", "run", lambda: (SECRET,))
    version = client.put("a", b"1")

    def write() -> None:
        stranger = raw(server)
        while not over.is_set():
            stranger.put("a", b"not ours")

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert client.wait("a", version, 2.0) is None
        # It looks after 10, 20, 40 ... ms: ten times or so, and not thousands of times.
        assert counting.waits < 30
        # Also where it asks again and again, as a node does at each beat.
        for _ in range(5):
            client.wait("a", version, 0.1)
        assert counting.waits < 80
    finally:
        over.set()
        for thread in threads:
            thread.join()
    # A change that comes meanwhile, or later, is not lost.
    client.put("a", b"2")
    found = client.wait("a", version, 30)
    assert found is not None
    assert found.value == b"2"


@pytest.mark.parametrize("end", ["interrupt", "close"])
def test_a_wait_over_which_a_stranger_writes_can_be_ended(end: str) -> None:
    server = MemoryServer()
    client = sealed_client(server)
    version = client.put("a", b"1")
    for number in range(8):  # Then it rests for long between two looks.
        raw(server).put("a", b"not ours %d" % number)
        client.wait("a", version, 0)
    answers: list[Entry | None] = []
    thread = threading.Thread(target=lambda: answers.append(client.wait("a", version, 60)))
    thread.start()
    deadline = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < deadline:
        getattr(client, end)()
        thread.join(0.05)
    assert answers == [None]


def test_what_others_write_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    server = MemoryServer()
    client = sealed_client(server)
    client.compare_and_set("state", b"{}", None)
    for key in ("nodes/\x1b[31mred", "nodes/b"):
        raw(server).put(key, b"not ours")
    for _ in range(3):
        assert client.list("nodes/") == {}
    (told,) = caplog.messages
    assert told == (
        "run 'run': what stands at 'nodes/\\x1b[31mred' is not sealed with the run's secret, and "
        "counts as absent: a node or command has another secret or none, or a stranger writes there"
    )


class Clock:
    """The time by which others' keys stand still."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    sleep = staticmethod(time.sleep)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sealed, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda server: raw(server), "is not sealed, for its nodes have no secret"),
        (
            lambda server: sealed_client(server, "run", "another"),
            "is sealed with another secret than this one's",
        ),
    ],
)
def test_a_node_with_another_secret_does_not_write_over_a_run(
    write: Callable[[MemoryServer], KeyValueClient], said: str, clock: Clock
) -> None:
    server = MemoryServer()
    theirs = write(server)
    theirs.put("state", b"{}")
    theirs.put("nodes/a", b"1")
    before = dict(server.keys("rdzv/run"))
    client = sealed_client(server)
    client.put("nodes/mine", b"0")
    with pytest.raises(ForeignValueError, match=said):
        client.compare_and_set("state", b"mine", None)
    clock.now = 14.9
    with pytest.raises(ForeignValueError, match=said):
        client.compare_and_set("state", b"mine", None)
    theirs.put("nodes/a", b"2")
    client.put("nodes/mine", b"1")  # It is no sign of their life.
    clock.now = 15.0
    with pytest.raises(ForeignValueError, match="its nodes live"):
        client.compare_and_set("state", b"mine", None)
    assert server.keys("rdzv/run")["state"] == before["state"]
    assert said in client.why_absent("state")
    assert client.why_absent("nodes/mine") == ""
    assert client.why_absent("nobody's") == ""


def test_what_stands_still_for_a_lease_blocks_no_run(clock: Clock) -> None:
    server = MemoryServer()
    raw(server).put("state", b"{")
    client = sealed_client(server)
    with pytest.raises(ForeignValueError):
        client.compare_and_set("state", b"mine", None)
    client.put("nodes/mine", b"1")
    clock.now = 15.0
    _, written = client.compare_and_set("state", b"mine", None)
    assert written


def test_the_nodes_of_a_run_write_it_again_at_once() -> None:
    server = MemoryServer()
    founder, member = sealed_client(server), sealed_client(server)
    founder.compare_and_set("state", b"1", None)
    member.get("state")
    for client in (founder, member):
        raw(server).put("state", b"{}")
        _, written = client.compare_and_set("state", b"2", None)
        assert written
    # Two begin at once, with two secrets: the second does not take it from the first.
    raw(server).delete("state")
    one, two = sealed_client(server, "run", "one"), sealed_client(server, "run", "two")
    one.compare_and_set("state", b"1", None)
    with pytest.raises(ForeignValueError):
        two.compare_and_set("state", b"2", None)


def test_the_keys_that_stand_for_a_run_are_those_of_both_handlers() -> None:
    assert CLAIMS == (STATE_KEY, TORCH_STATE_KEY)


def test_values_may_be_as_large_as_the_store_takes_less_the_seal() -> None:
    class Small(MemoryClient):
        capabilities = MemoryClient.capabilities.__class__(
            push=True, linearizable=True, batch=True, ttl=True, max_value_bytes=100
        )

    client = SealedClient(Small(MemoryServer(), "rdzv/run"), "rdzv", "run", lambda: (SECRET,))
    client.put("a", bytes(100 - OVERHEAD))
    with pytest.raises(RendezvousStateError, match=f"holds at most {100 - OVERHEAD}"):
        client.put("a", bytes(101 - OVERHEAD))


class Secrets:
    """A file with secrets, looked at without waiting for a second to pass."""

    def __init__(self, path: Path, server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._server = path, server
        monkeypatch.setattr(sealed, "_LOOK_SECONDS", 0.0)

    def write(self, *secrets: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(secrets))
        os.replace(new, self.path)

    def read(self) -> Sequence[str]:
        first_line("secret_file", str(self.path))
        return self.path.read_text().splitlines()

    def client(self) -> SealedClient:
        return SealedClient(
            MemoryClient(self._server, "rdzv/run"), "rdzv", "run", self.read, str(self.path)
        )


def test_a_secret_is_replaced_while_nodes_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MemoryServer()
    here = Secrets(tmp_path / "here", server, monkeypatch)
    there = Secrets(tmp_path / "there", server, monkeypatch)
    with pytest.raises(UnreadableFileError):
        here.client()
    for host in (here, there):
        host.write("old")
    one, two = here.client(), there.client()

    def each_reads_the_other() -> bool:
        one.put("a", b"1")
        two.put("b", b"2")
        return one.get("b") is not None and two.get("a") is not None

    assert each_reads_the_other()
    # As docs/operating.md says: host after host, in three steps.
    for step in (("old", "new"), ("new", "old"), ("new",)):
        for host in (here, there):
            host.write(*step)
            assert each_reads_the_other()
    assert sealed_client(server, "run", "new").get("a") is not None
    assert sealed_client(server, "run", "old").get("a") is None


def test_a_secret_that_has_nothing_in_common_with_the_last_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = MemoryServer()
    file = Secrets(tmp_path / "secret", server, monkeypatch)
    file.write("old")
    client = file.client()
    client.put("a", b"1")
    file.path.unlink()
    assert client.get("a") is not None  # It is being replaced.
    file.write("wrong")
    for _ in range(3):
        assert client.get("a") is not None
    (told,) = caplog.messages
    assert "has none of the secrets that this process uses" in told
    assert "wrong" not in told


def test_a_retried_addition_that_was_overtaken_is_told_as_unknown() -> None:
    server = MemoryServer()

    class Lossy(MemoryClient):
        """Its first write is applied and its answer lost; before the retry another node adds."""

        lost = False

        def compare_and_set(
            self, key: str, value: bytes, expected: Version | None
        ) -> tuple[Entry | None, bool]:
            answer = super().compare_and_set(key, value, expected)
            if self.lost:
                return answer
            self.lost = True
            sealed_client(server).add(key, 10)
            assert self.on_retry is not None
            self.on_retry()
            return self.get(key), False

    client = SealedClient(Lossy(server, "rdzv/run"), "rdzv", "run", lambda: (SECRET,))
    noted: list[None] = []
    client.on_retry = lambda: noted.append(None)
    with pytest.raises(RendezvousConnectionError, match="whether 'n' was counted is unkno"):
        client.add("n", 1)
    assert client.add("n", 0) == 11
    assert len(noted) == 1
