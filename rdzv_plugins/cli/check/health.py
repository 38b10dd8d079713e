"""Checks this node as its agent will before it joins, where the options ask for that."""

from __future__ import annotations

from collections.abc import Iterator

from rdzv_plugins.config import Settings
from rdzv_plugins.health import gate_of
from rdzv_plugins.kv.findings import Finding, Mark

__all__ = ["check"]


def check(settings: Settings) -> Iterator[Finding]:
    """Run the checks once. A node that has been in no round dials nobody."""
    warnings: list[str] = []
    gate = gate_of(settings, lambda: None, warnings.append)
    if gate is None:
        return
    reason = gate.check()
    for line in warnings:
        yield Finding(Mark.WARNING, "health", line)
    if reason is not None:
        found, advice = f"this node is unfit: {reason}", "it would not join; see rdzv docs policies"
        yield Finding(Mark.FAILED, "health", found, advice)
    elif not warnings:
        yield Finding(Mark.OK, "health", f"this node is fit: {', '.join(gate.names)}")
