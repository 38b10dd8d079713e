"""Three agents of a job of which the others cannot reach one, though that one reaches the store.

Run as a program, in namespaces of its own (see `test_network_check`): it starts a store, lets
packets to one address vanish, plays the job, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rdzv_plugins.protocol.documents import Status
from tests.integration.hosts import bring_up_loopback
from tests.integration.jobs import Job
from tests.integration.stores import KINDS, RunningStore, started

# For documentation (RFC 5737). It sorts after loopback: it is not rank 0, which opens a TCPStore.
SWALLOWED = "192.0.2.9"

INTERVAL, ATTEMPTS = 0.5, 4


def play(store: RunningStore, folder: Path) -> dict[str, Any]:
    job = Job(
        folder,
        store,
        nodes="2:3",
        keep_alive_interval=INTERVAL,
        keep_alive_max_attempt=ATTEMPTS,
        last_call_timeout=20,
        replacement_timeout=0,
        network_check="true",
    )
    with closing(job):
        for name in "ab":
            job.start_at(name)
        job.start("c", SWALLOWED)
        for name in "abc":
            job.await_record(name)
        came = time.monotonic()
        world = job.await_begun("ab")
        job.await_record("c", Status.SPARE)
        document = job.document()
        return {
            "seconds": max(world.began.values()) - came,
            "cause": document.reason if document is not None else None,
            "logs": {name: job.lines(name) for name in "abc"},
            "rounds": len({event.master for event in job.events}),
        }


def main(name: str) -> None:
    bring_up_loopback()
    # It is no address of this network: what the loopback hands back is dropped, without a word.
    subprocess.run(["ip", "route", "add", SWALLOWED, "dev", "lo"], check=True)
    kind = next(kind for kind in KINDS if kind.name == name)
    with started(kind) as store, tempfile.TemporaryDirectory() as folder:
        seen = play(store, Path(folder))
    print(json.dumps(seen))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
