"""Measured figures in README and the docs, between comments that name them.

``<!-- restart; quorum; 3; kill to step -->4.5 s<!-- -->`` has scenario, subject, nodes and
measure, and the median. With ``; spread`` at its end it has the least and the most.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from benchmarks.results import Results

__all__ = ["quoted", "quoting_pages", "write_quotes"]

# No "|", which would end a cell of a table.
_QUOTE = re.compile(r"<!-- ([^;>]+); ([^;>]+); (\d+); ([^;>]+?)(; spread)?\s-->[^<]*<!-- -->")


def quoted(results: Results, text: str) -> str:
    """The text with each quoted figure as it was measured; raises `LookupError`."""
    return _QUOTE.sub(partial(_quote, results), text)


def quoting_pages(root: Path) -> list[Path]:
    """README and the pages of the docs that quote a figure."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [it for it in pages if _QUOTE.search(it.read_text(encoding="utf-8"))]


def write_quotes(results: Results, root: Path) -> None:
    """Renew the figures of all pages."""
    for page in quoting_pages(root):
        page.write_text(quoted(results, page.read_text(encoding="utf-8")), encoding="utf-8")


def _quote(results: Results, found: re.Match[str]) -> str:
    scenario, subject, nodes, measure, spread = found.groups()
    it = results.get(scenario, subject, int(nodes), measure)
    if it is None or it.median is None or it.least is None or it.most is None:
        raise LookupError(f"{found[0]}: there is no such figure")
    value = f"{_short(it.least)} to {_short(it.most)} s" if spread else f"{_short(it.median)} s"
    return f"{found[0].partition('-->')[0]}-->{value}<!-- -->"


def _short(seconds: float) -> str:
    return f"{seconds:.1g}" if seconds < 1 else f"{seconds:.1f}"
