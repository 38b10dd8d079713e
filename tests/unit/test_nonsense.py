"""Servers that speak nonsense: each client ends with one line of its own, whatever they say."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

import pytest

from rdzv_plugins.kv import KeyValueClient, RendezvousError
from rdzv_plugins.stores import open_client
from rdzv_plugins.testing.threads import together
from tests.nonsense import ENVIRON, SAMPLES, reached, speaking

REQUESTS: list[Callable[[KeyValueClient], object]] = [
    lambda it: it.get("key"),
    lambda it: it.list(""),
    lambda it: it.put("key", b""),
    lambda it: it.compare_and_set("key", b"", None),
    lambda it: it.add("key", 1),
    lambda it: it.wait("key", None, 0.1),
    lambda it: it.expire(60),
]


def told(store: str, sample: bytes) -> list[str]:
    """The errors of a client; raises all that are no errors of the contract."""
    lines = []
    with speaking(sample, greets=store == "nats") as address, ExitStack() as stack:
        endpoint, config = reached(store, address)
        try:
            client = open_client(store, endpoint, "run", config, request_timeout=0.3)
        except RendezvousError as error:
            return [str(error)]
        # What it has asked so far, nonsense may answer.
        stack.enter_context(closing(client))
        for request in REQUESTS:
            try:
                request(client)
            except RendezvousError as error:
                lines.append(str(error))
    return lines


@pytest.mark.parametrize("store", SAMPLES)
def test_nonsense_is_told_in_one_line(
    store: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    for lines in together([partial(told, store, sample) for sample in SAMPLES[store]]):
        assert lines
        assert "\n" not in "".join(lines)
    assert time.monotonic() - began < 40
    assert "Traceback" not in capfd.readouterr().err
