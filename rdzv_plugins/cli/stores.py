"""The command that checks a store: is it reachable, does it accept the credentials, how fast?"""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rdzv_plugins.cli.options import (
    Access,
    BackendOption,
    ConfOption,
    EndpointOption,
    plain_console,
)

if TYPE_CHECKING:
    from rdzv_plugins.kv import KeyValueClient

__all__ = ["check"]

_SAMPLES = 20


def check(
    backend: BackendOption = "redis", endpoint: EndpointOption = "", conf: ConfOption = ""
) -> None:
    """Try all operations of a rendezvous on a store, in a temporary run."""
    from rich.table import Table

    from rdzv_plugins.endpoint import redact

    console = plain_console()
    began = time.perf_counter()
    run_id = f"check-{uuid.uuid4().hex[:12]}"
    with _own_run(backend, endpoint, run_id, conf) as client:
        connected = time.perf_counter() - began
        where = f" at '{redact(endpoint)}'" if endpoint else ""
        console.print(f"connected to {backend}{where} in {connected * 1000:,.0f} ms")
        table = Table("request", "median of 20")
        entry, _ = client.compare_and_set("state", b"0", None)
        versions = [entry.version if entry else None]

        def swap() -> None:
            entry, written = client.compare_and_set("state", uuid.uuid4().bytes, versions[-1])
            if entry is None or not written:
                raise ValueError("a compare-and-set without another writer was refused")
            versions.append(entry.version)

        table.add_row("get", _median(lambda: client.get("state")))
        table.add_row("put", _median(lambda: client.put("nodes/x", uuid.uuid4().bytes)))
        table.add_row("compare-and-set", _median(swap))
        table.add_row("list", _median(lambda: client.list("nodes/")))
        table.add_row("add", _median(lambda: client.add("counter", 1)))
        with Access(backend, endpoint, conf).connect(run_id) as waiter:
            table.add_row("wake-up of a waiter", _wake_up(client, waiter))
        console.print(table)
        able = client.capabilities
        console.print(
            f"push: {'yes' if able.push else 'no, polled'}; "
            f"largest value: {able.max_value_bytes:,} bytes; "
            f"closed runs expire {'on the server' if able.ttl else 'when they are next used'}"
        )


@contextmanager
def _own_run(backend: str, endpoint: str, run_id: str, conf: str) -> Iterator[KeyValueClient]:
    """A client of a run that is deleted afterwards, even after an error."""
    from rdzv_plugins.inspection import delete_run
    from rdzv_plugins.kv import RendezvousConnectionError, RendezvousStateError

    with Access(backend, endpoint, conf).connect(run_id) as client:
        try:
            yield client
        except BaseException:
            # Raise the first error, not the error of the deletion.
            with suppress(RendezvousConnectionError, RendezvousStateError):
                delete_run(client)
            raise
        delete_run(client)


def _median(request: Callable[[], object]) -> str:
    times = []
    for _ in range(_SAMPLES):
        began = time.perf_counter()
        request()
        times.append(time.perf_counter() - began)
    return f"{statistics.median(times) * 1000:.2f} ms"


def _wake_up(writer: KeyValueClient, waiter: KeyValueClient) -> str:
    """Median time from a write until another connection's waiter has the value."""
    times = []
    for sample in range(_SAMPLES):
        key = f"wake/{sample}"
        outcome: list[float | Exception] = []

        def wait(key: str = key, outcome: list[float | Exception] = outcome) -> None:
            try:
                if waiter.wait(key, None, timeout=10.0) is not None:
                    outcome.append(time.perf_counter())
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=wait, name="rdzv-check", daemon=True)
        thread.start()
        # Let it park, to measure the wake-up and not a read.
        time.sleep(0.05)
        began = time.perf_counter()
        writer.put(key, b"x")
        thread.join()
        if not outcome:
            raise ValueError("a waiter was not woken within 10 s")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        times.append(outcome[0] - began)
    return f"{statistics.median(times) * 1000:.2f} ms"
