"""Checks whether the run id is free, or what run holds it. Reads only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime

from rdzv_plugins.archive import Archive
from rdzv_plugins.cli.check.job import Job
from rdzv_plugins.config import Settings
from rdzv_plugins.inspection import Condition, Inspection, is_torchs, settle
from rdzv_plugins.kv import KeyValueClient, RendezvousConnectionError, RendezvousStateError
from rdzv_plugins.kv.findings import Finding, Mark

__all__ = ["check"]


def check(open: Callable[[str], KeyValueClient], job: Job, settings: Settings) -> Iterator[Finding]:
    """One finding; it takes up to 12 s to tell that nodes with slow heartbeats are gone."""
    try:
        with closing(open(job.run_id)) as client:
            archive = Archive(open, job.run_id, settings.history_ttl)
            yield _holder(Inspection(client, archive, job.run_id), job, settings)
    except (RendezvousConnectionError, RendezvousStateError) as error:
        yield Finding(Mark.FAILED, "run", f"'{job.run_id}': {error}")


def _holder(seen: Inspection, job: Job, settings: Settings) -> Finding:
    name, another = f"'{job.run_id}'", "use another --rdzv-id"
    seen.look()
    document = seen.document
    if is_torchs(seen.client):
        if settings.handler == "torch":
            found = f"{name} is in use; the state of handler=torch is not read"
            return Finding(Mark.UNKNOWN, "run", found)
        found = (
            f"{name} is held by a run of handler=torch, whose nodes never meet those of this job"
        )
        return Finding(Mark.WARNING, "run", found, f"{another}, or handler=torch")
    if document is None:
        return Finding(Mark.OK, "run", f"{name} is free")
    if settings.handler == "torch":
        found = f"{name} is held by a run of handler=rdzv, whose nodes never meet those of this job"
        return Finding(Mark.WARNING, "run", found, f"{another}, or handler=rdzv")
    if document.closed:
        found = f"{name} is held by a run that has ended ({document.reason})"
        _, wait = seen.archive.free_in(document, datetime.now(UTC))
        return Finding(Mark.WARNING, "run", found, f"{wait}; else {another}")
    theirs = document.min_nodes, document.max_nodes
    if job.nnodes is not None and job.nnodes != theirs:
        found = (
            f"{name} was started with --nnodes={theirs[0]}:{theirs[1]}, this job with "
            f"--nnodes={job.nnodes[0]}:{job.nnodes[1]}"
        )
        return Finding(Mark.FAILED, "run", found, f"use the same on every node, or {another}")
    settle([seen])
    if seen.condition is Condition.DEAD:
        found = f"{name} is held by a run whose nodes are gone ({seen.sentence})"
        wait = f"this job continues it once its lease ({settings.lease:g} s) has run out"
        return Finding(Mark.WARNING, "run", found, f"{wait}; `rdzv clean` deletes it")
    living = [
        it.name for it in seen.nodes() if it.state not in ("silent", "lost", "unknown", "left")
    ]
    found = f"{name} is held by a run ({seen.sentence}) of {', '.join(sorted(living)[:4])}"
    if latest := seen.last_beat:
        found += f", whose last heartbeat came at {latest}"
    advice = f"a node that starts now joins it; for another job {another}"
    return Finding(Mark.WARNING, "run", found, advice)
