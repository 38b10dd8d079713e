"""All checks of a job, in order, and what their findings mean together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import typer

from rdzv_plugins.cli.check.host import check_address, check_health, check_peers
from rdzv_plugins.cli.check.job import Job, check_options, check_secrets
from rdzv_plugins.cli.check.store import check_run, check_store
from rdzv_plugins.kv.findings import Finding, Mark
from rdzv_plugins.settings.options import Settings
from rdzv_plugins.stores import open_run

SCHEMA = 1
"""The version of `report`; raised by a change that breaks its readers."""

_COLOURS = {
    Mark.OK: typer.colors.GREEN,
    Mark.UNKNOWN: typer.colors.CYAN,
    Mark.WARNING: typer.colors.YELLOW,
    Mark.FAILED: typer.colors.RED,
}


def carry_out(job: Job) -> Iterator[Finding]:
    """Yield each finding as soon as it is known."""
    yield from job.malformed
    chosen = yield from check_options(job)
    yield from check_address(job, chosen.settings if chosen is not None else Settings())
    yield from check_peers(job)
    if chosen is None:
        advice = "mend the options first"
        yield Finding(Mark.UNKNOWN, "store", "not checked, for its options are wrong", advice)
        return
    yield from check_health(chosen.settings)
    yield from check_secrets(job, chosen)
    open = partial(
        open_run,
        chosen.client,
        job.endpoint,
        options=chosen.options,
        request_timeout=chosen.settings.request_timeout,
        job=job.run_id or None,
    )
    usable = yield from check_store(open, job, chosen)
    if usable and job.run_id:
        yield from check_run(open, job, chosen.settings)


def show(finding: Finding) -> None:
    """Print a finding in one line, even if it quotes several lines."""
    mark = typer.style(f"{finding.mark.value:<8}", fg=_COLOURS[finding.mark])
    typer.echo(f"{mark} {' '.join(finding.line.split())}")


def status(findings: Sequence[Finding]) -> int:
    """0: all is well; 1: it works, with warnings; 2: it will not work."""
    return 2 if _of(findings, Mark.FAILED) else 1 if _of(findings, Mark.WARNING) else 0


def sentence(findings: Sequence[Finding]) -> str:
    """The text of the last line, after its first words."""
    failed, warned, unknown = (
        _of(findings, it) for it in (Mark.FAILED, Mark.WARNING, Mark.UNKNOWN)
    )
    noun = "warning" if len(warned) == 1 else "warnings"
    warnings = f"{len(warned)} {noun} ({', '.join(dict.fromkeys(warned))})"
    passed = f"{len(findings) - len(unknown)} checks passed"
    if failed:
        more = f"; {warnings}" if warned else ""
        return f"a job will not work: {', '.join(dict.fromkeys(failed))} failed{more}"
    if warned:
        return f"a job works, with {warnings}"
    if unknown:
        return f"a job works, as far as was seen: {passed}, {len(unknown)} not known"
    return f"a job works: {passed}"


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings, the exit status and the sentence as plain data."""
    return {
        "schema": SCHEMA,
        "status": status(findings),
        "verdict": sentence(findings),
        "findings": msgspec.to_builtins(findings),
    }


def _of(findings: Sequence[Finding], mark: Mark) -> list[str]:
    return [finding.what for finding in findings if finding.mark is mark]
