"""The time of one request on each store: compare-and-set and read of 2 KB, and a wake-up."""

from __future__ import annotations

import os
import threading
import time
import uuid

from rdzv_plugins.kv import KeyValueClient
from rdzv_plugins.stores import open_client

__all__ = ["measure"]

VALUE_BYTES = 2048


def measure(
    backend: str, endpoint: str, config: dict[str, str], samples: int
) -> dict[str, list[float]]:
    """Seconds of a compare-and-set, a read, and a wake-up (write to the waiter's return)."""
    run_id = uuid.uuid4().hex[:8]
    writer = open_client(backend, endpoint, run_id, config)
    waiter = open_client(backend, endpoint, run_id, config)
    try:
        return {
            "compare-and-set": _compare_and_set(writer, samples),
            "read": _read(writer, samples),
            "wake-up": _wake_up(writer, waiter, max(1, samples // 7)),
        }
    finally:
        writer.close()
        waiter.close()


def _compare_and_set(client: KeyValueClient, samples: int) -> list[float]:
    entry, _ = client.compare_and_set("state", os.urandom(VALUE_BYTES), None)
    times = []
    for _ in range(samples):
        assert entry is not None
        began = time.perf_counter()
        entry, written = client.compare_and_set("state", os.urandom(VALUE_BYTES), entry.version)
        times.append(time.perf_counter() - began)
        assert written
    return times


def _read(client: KeyValueClient, samples: int) -> list[float]:
    times = []
    for _ in range(samples):
        began = time.perf_counter()
        assert client.get("state") is not None
        times.append(time.perf_counter() - began)
    return times


def _wake_up(writer: KeyValueClient, waiter: KeyValueClient, samples: int) -> list[float]:
    version = writer.put("bell", b"0")
    times: list[float] = []
    for _ in range(samples):
        woken: list[float] = []

        def wait(version: object = version, woken: list[float] = woken) -> None:
            if waiter.wait("bell", version, 30.0) is not None:
                woken.append(time.perf_counter())

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        # Give the waiter time to block: the wake-up is measured, not a read.
        time.sleep(0.1)
        began = time.perf_counter()
        version = writer.put("bell", uuid.uuid4().bytes)
        thread.join()
        times.append(woken[0] - began)
    return times
