"""What all findings together mean: one line, an exit status, plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import typer

from rdzv_plugins.kv.findings import Finding, Mark

__all__ = ["SCHEMA", "report", "sentence", "show", "status"]

SCHEMA = 1
"""Of `report`; a change that breaks its readers raises it."""

_COLOURS = {
    Mark.OK: typer.colors.GREEN,
    Mark.UNKNOWN: typer.colors.CYAN,
    Mark.WARNING: typer.colors.YELLOW,
    Mark.FAILED: typer.colors.RED,
}


def show(finding: Finding) -> None:
    """Print one line, whatever the finding quotes."""
    mark = typer.style(f"{finding.mark.value:<8}", fg=_COLOURS[finding.mark])
    typer.echo(f"{mark} {' '.join(finding.line.split())}")


def status(findings: Sequence[Finding]) -> int:
    """0: all is well; 1: it works, with warnings; 2: it will not work."""
    marks = {finding.mark for finding in findings}
    return 2 if Mark.FAILED in marks else 1 if Mark.WARNING in marks else 0


def sentence(findings: Sequence[Finding]) -> str:
    """The last line, without its beginning."""
    failed, warned = _of(findings, Mark.FAILED), _of(findings, Mark.WARNING)
    if failed:
        more = f"; {_counted(warned)}" if warned else ""
        return f"a job will not work: {', '.join(dict.fromkeys(failed))} failed{more}"
    if warned:
        return f"a job works, with {_counted(warned)}"
    unknown = _of(findings, Mark.UNKNOWN)
    passed = f"{len(findings) - len(unknown)} checks passed"
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


def _counted(warned: Sequence[str]) -> str:
    noun = "warning" if len(warned) == 1 else "warnings"
    return f"{len(warned)} {noun} ({', '.join(dict.fromkeys(warned))})"
