"""All checks of a job, in order; what one makes impossible is left out, with a finding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rdzv_plugins.cli.check import address, health, options, run, store
from rdzv_plugins.cli.check.job import Job
from rdzv_plugins.config import Settings
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.stores import open_run

__all__ = ["carry_out"]


def carry_out(job: Job) -> Iterator[Finding]:
    """The findings, each as soon as it is made."""
    yield from job.malformed
    chosen = yield from options.check(job)
    yield from address.check(job, chosen.settings if chosen is not None else Settings())
    yield from address.check_peers(job)
    if chosen is None:
        advice = "mend the options first"
        yield Finding(Mark.UNKNOWN, "store", "not checked, for its options are wrong", advice)
        return
    yield from health.check(chosen.settings)
    open = partial(
        open_run,
        chosen.client,
        job.endpoint,
        config=chosen.config,
        request_timeout=chosen.settings.heartbeat_timeout,
        job=job.run_id or None,
    )
    usable = yield from store.check(open, job, chosen)
    if usable and job.run_id:
        yield from run.check(open, job, chosen.settings)
