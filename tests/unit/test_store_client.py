"""The base of all stores, on hooks over a `MemoryClient`: lost answers, errors, waking."""

from __future__ import annotations

import binascii
import json
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NoReturn

import pytest

from rdzv_plugins.kv import (
    Capabilities,
    MemoryServer,
    RendezvousConnectionError,
    RendezvousStateError,
)
from rdzv_plugins.kv.base import (
    Limit,
    Problem,
    StoreClient,
    Stored,
    Wake,
    WokenError,
    is_unresolved,
    segments,
    stamped,
)
from rdzv_plugins.kv.memory import MemoryClient
from rdzv_plugins.kv.retry import retry
from rdzv_plugins.settings.options import OptionError


class DictClient(StoreClient):
    """Hooks over a `MemoryClient`; polls, as a store does that cannot push."""

    name = "dict"
    capabilities = Capabilities(
        push=False, linearizable=True, batch=True, ttl=True, max_value_bytes=64 << 20
    )

    def __init__(self, server: MemoryServer, namespace: str, request_timeout: float = 5.0) -> None:
        super().__init__("dict at localhost", request_timeout)
        self.inner = MemoryClient(server, namespace)
        self.failures: list[tuple[Exception, bool]] = []
        """What the next calls of `_replace` raise, and whether they are done all the same."""

    def _read(self, keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        found = self.inner.get_many(keys)
        return {key: Stored.parse(it.value, it.version) for key, it in found.items()}

    def _scan(self, prefix: str, limit: Limit) -> dict[str, Stored]:
        return {k: Stored.parse(it.value) for k, it in self.inner.list(prefix).items()}

    def _replace(self, key: str, data: bytes, seen: Stored | None, limit: Limit) -> bool:
        error, done = self.failures.pop(0) if self.failures else (None, True)
        guard = seen.guard if seen is not None else None
        written = done and self.inner.compare_and_set(key, data, guard)[1]
        if error is not None:
            raise error
        return written

    def _put(self, values: Mapping[str, bytes], limit: Limit) -> None:
        self.inner.put_many(values)

    def _delete(self, keys: Iterable[str], limit: Limit) -> None:
        self.inner.delete_many(keys)

    def _expire(self, seconds: float, limit: Limit) -> None:
        self.inner.expire(seconds)

    def _problem(self, error: Exception) -> Problem | None:
        if isinstance(error, ConnectionRefusedError):
            return self._unreachable(error, undone=True)
        if isinstance(error, PermissionError):
            return Problem(f"refused: {error}", state=True)
        return self._unreachable(error) if isinstance(error, OSError) else None


@pytest.fixture
def client() -> DictClient:
    return DictClient(MemoryServer(), "run", 0.5)


def test_a_write_whose_answer_is_lost_is_known_by_its_stamp(client: DictClient) -> None:
    client.failures = [(ConnectionResetError("cut"), True)]
    entry, written = client.compare_and_set("key", b"one", None)
    assert written
    assert client.get("key") == entry


def test_an_addition_whose_answer_is_lost_counts_once(client: DictClient) -> None:
    client.failures = [(ConnectionResetError("cut"), True)]
    assert client.add("count", 2) == 2
    client.failures = [(ConnectionResetError("cut"), False)]
    assert client.add("count", 2) == 4
    client.failures = [(ConnectionRefusedError("away"), False)]
    assert client.add("count", 2) == 6


def test_an_addition_that_a_rival_wrote_over_is_in_doubt(
    client: DictClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = client._read

    def overtaken(keys: Iterable[str], limit: Limit) -> dict[str, Stored]:
        if not client.failures:
            client.put("count", b"9")
        return read(keys, limit)

    client.failures = [(ConnectionResetError("cut"), True)]
    monkeypatch.setattr(client, "_read", overtaken)
    with pytest.raises(RendezvousConnectionError, match="whether 'count' was counted is unknown"):
        client.add("count", 1)


def test_rivals_that_are_always_faster_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    client = DictClient(MemoryServer(), "run", 0.05)
    tries: list[str] = []

    def lose(key: str, *_: object) -> bool:
        tries.append(key)
        return False

    monkeypatch.setattr(client, "_replace", lose)
    with pytest.raises(RendezvousConnectionError, match=r"other clients .* throughout 0"):
        client.add("count", 1)
    # Without pauses it would be thousands.
    assert 3 <= len(tries) <= 60


def test_errors_are_the_contracts(client: DictClient) -> None:
    client.failures = [(PermissionError("no"), False)]
    with pytest.raises(RendezvousStateError, match=r"^dict at localhost refused: no$"):
        client.compare_and_set("key", b"", None)
    for error in (SignalError("a handler's"), OptionError("only other options help")):
        client.failures = [(error, False)]
        with pytest.raises(type(error)):
            client.compare_and_set("key", b"", None)
    client.failures = [(OSError("away"), False)] * 1000
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=r"within 0\.5 s \(away\)"):
        client.compare_and_set("key", b"", None)
    assert time.monotonic() - began < 2


class SignalError(Exception):
    """What a signal's handler raises in the midst of a request, as torch's does."""


@pytest.mark.parametrize("ends", ["interrupt", "close"])
@pytest.mark.parametrize("where", ["_read", "_park"])
def test_a_signal_is_not_lost_where_the_wait_ends_at_the_same_time(
    client: DictClient, monkeypatch: pytest.MonkeyPatch, where: str, ends: str
) -> None:
    def signalled(*_: object) -> None:
        getattr(client, ends)()
        raise SignalError

    monkeypatch.setattr(client, where, signalled)
    with pytest.raises(SignalError):
        client.wait("key", None, 5)


def test_values_that_are_not_ours_count_as_absent(client: DictClient) -> None:
    client.inner.put("key", b"somebody else's")
    assert client.get("key") is None
    assert client.list("") == client.get_many(["key"]) == {}
    entry, written = client.compare_and_set("key", b"ours", None)
    assert written
    assert client.get("key") == entry
    client.inner.put("count", b"x")
    assert client.add("count", 2) == 2


@pytest.mark.parametrize(
    "error",
    [
        IndexError("list index out of range"),
        KeyError("Value"),
        TypeError("'NoneType' object is not subscriptable"),
        AttributeError("no attribute"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        binascii.Error("Incorrect padding"),
        json.JSONDecodeError("Expecting value", "<html>\n", 0),
        RecursionError("maximum recursion depth exceeded"),
        struct.error("unpack requires a buffer of 4 bytes"),
        ValueError("invalid literal for int() with base 10: 'x'"),
        RuntimeError("xids do not match"),
        EOFError("cut"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_answer_that_makes_no_sense_is_one_line_and_tried_again(
    client: DictClient, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Cut answers of a server, or of a proxy in between, ended agents as `IndexError` did."""
    attempts = 0

    def odd(*_: object) -> NoReturn:
        nonlocal attempts
        attempts += 1
        raise error

    client.timeout = 0.05
    monkeypatch.setattr(client, "_read", odd)
    monkeypatch.setattr(client, "_scan", odd)
    for request in (partial(client.get, "key"), partial(client.list, "")):
        with pytest.raises(RendezvousConnectionError, match="an answer that makes no sense") as it:
            request()
        assert "\n" not in str(it.value)
    assert attempts > 2


def test_a_wake_rings_until_it_is_cleared() -> None:
    wake = Wake()
    assert not wake.rung
    wake.ring()
    assert wake.rung
    with pytest.raises(WokenError):
        Limit(time.monotonic() + 9, wake).seconds  # noqa: B018
    wake.clear()
    assert not wake.rung
    wake.close()
    wake.ring()


def test_a_limit_ends() -> None:
    with pytest.raises(TimeoutError):
        Limit(time.monotonic() - 1).seconds  # noqa: B018


def test_portions_fit_the_batch(client: DictClient) -> None:
    client.batch = 3, 10  # type: ignore[misc]
    parts = [*client._parts({"a": b"12345678", "b": b"123", "c": b"", "d": b"", "e": b"x" * 20})]
    assert [[*part] for part in parts] == [["a"], ["b", "c", "d"], ["e"]]


@pytest.mark.parametrize(
    ("namespace", "prefix", "parts"),
    [
        ("rdzv/run", "rdzv", ["rdzv", "run"]),
        ("ml/rdzv/run", "ml/rdzv", ["ml", "rdzv", "run"]),
        ("rdzv/a/b", "rdzv", ["rdzv", "a%2Fb"]),
        ("rdzv/..", "rdzv", ["rdzv", "%%2E%2E"]),
        ("rdzv/", "rdzv", ["rdzv", "%"]),
        ("other/ü", "rdzv", ["other", "%C3%BC"]),
    ],
)
def test_a_run_is_one_segment(namespace: str, prefix: str, parts: list[str]) -> None:
    assert segments(namespace, prefix) == parts


def test_runs_have_segments_of_their_own() -> None:
    runs = ["", ".", "..", "%2E", "%", "%%2E", "a/b", "a%2Fb", "!expire", "=k", "#k"]
    assert len({segments(f"rdzv/{run}", "rdzv")[1] for run in runs}) == len(runs)


def test_equal_values_have_different_versions() -> None:
    one, two = Stored.parse(stamped(b"same")), Stored.parse(stamped(b"same"))
    assert one.value == two.value == b"same"
    assert one.version != two.version


def test_errors_whose_causes_form_a_ring_are_looked_at_once() -> None:
    first, second = OSError("refused"), OSError("gave up")
    first.__cause__, second.__cause__ = second, first
    assert not is_unresolved(first)
    second.__cause__ = socket.gaierror(-2, "Name or service not known")
    first.__cause__ = second
    assert is_unresolved(first)


@pytest.mark.parametrize(("before", "told"), [("a standby", "a standby"), (None, "no time")])
def test_a_client_that_ran_out_of_time_is_told_what_was_wrong_before(
    before: str | None, told: str
) -> None:
    attempts = [] if before is None else [OSError(before)]

    def request() -> None:
        if attempts:
            raise attempts.pop()
        time.sleep(0.02)
        raise TimeoutError("no time")

    with pytest.raises(OSError, match=told):
        retry(request, timeout=0.02, retryable=lambda error: True)
