"""The command about a store: is it there, are we let in, how fast does it answer?"""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from rdzv_plugins.cli.options import BackendOption, ConfOption, EndpointOption, connect
from rdzv_plugins.config import redact

__all__ = ["check"]

_SAMPLES = 20


def check(
    backend: BackendOption = "redis", endpoint: EndpointOption = "", conf: ConfOption = ""
) -> None:
    """Try on a store all that a rendezvous does, in a run of its own that is deleted again."""
    console = Console()
    began = time.perf_counter()
    with connect(backend, endpoint, f"check-{uuid.uuid4().hex[:12]}", conf) as client:
        connected = time.perf_counter() - began
        where = f" at '{redact(endpoint)}'" if endpoint else ""
        console.print(f"connected to {backend}{where} in {connected * 1000:,.0f} ms")
        table = Table("request", "median of 20")
        entry, _ = client.compare_and_set("state", b"0", None)
        versions = [entry.version if entry else None]

        def swap() -> None:
            entry, written = client.compare_and_set("state", uuid.uuid4().bytes, versions[-1])
            if entry is None or not written:
                raise ValueError("a compare-and-set without a rival was refused")
            versions.append(entry.version)

        try:
            table.add_row("get", _median(lambda: client.get("state")))
            table.add_row("put", _median(lambda: client.put("nodes/x", uuid.uuid4().bytes)))
            table.add_row("compare-and-set", _median(swap))
            table.add_row("list", _median(lambda: client.list("nodes/")))
            table.add_row("add", _median(lambda: client.add("counter", 1)))
            table.add_row("wake-up of a waiter", _wake_up(backend, endpoint, conf))
        finally:
            client.delete_many([*client.list("")])
        console.print(table)
        able = client.capabilities
        console.print(
            f"push: {'yes' if able.push else 'no, polled'}; "
            f"largest value: {able.max_value_bytes:,} bytes; "
            f"closed runs expire {'on the server' if able.ttl else 'when they are next used'}"
        )


def _median(request: Callable[[], object]) -> str:
    times = []
    for _ in range(_SAMPLES):
        began = time.perf_counter()
        request()
        times.append(time.perf_counter() - began)
    return f"{statistics.median(times) * 1000:.2f} ms"


def _wake_up(backend: str, endpoint: str, conf: str) -> str:
    """Time from a write until another connection's waiter has the value."""
    run_id = f"check-{uuid.uuid4().hex[:12]}"
    times = []
    with (
        connect(backend, endpoint, run_id, conf) as writer,
        connect(backend, endpoint, run_id, conf) as waiter,
    ):
        for sample in range(_SAMPLES):
            key = f"wake/{sample}"
            woken: list[float] = []

            def wait(key: str = key, woken: list[float] = woken) -> None:
                if waiter.wait(key, None, timeout=10.0) is not None:
                    woken.append(time.perf_counter())

            thread = threading.Thread(target=wait, name="rdzv-check", daemon=True)
            thread.start()
            # Let it park: what is measured is being woken, not finding a value.
            time.sleep(0.05)
            began = time.perf_counter()
            writer.put(key, b"x")
            thread.join()
            if not woken:
                raise ValueError("a waiter was not woken within 10 s")
            times.append(woken[0] - began)
        writer.delete_many([*writer.list("")])
    return f"{statistics.median(times) * 1000:.2f} ms"
