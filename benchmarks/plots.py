"""The figures as SVG, both axes logarithmic; drawn by Vega-Lite.

Not by matplotlib: it needs NumPy, with which torch starts more slowly, and all that is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.floors import FLOORS
from benchmarks.rendezvous import TORCH_OWN
from benchmarks.results import Figure, Results

__all__ = ["PLOTS", "write"]

PLOTS = ("benchmarks-form.svg", "benchmarks-shared.svg")

_KINDS = ("rdzv-plugins", "torch's own", "without a protocol")
_SHARED = {
    "bytes a node": "bytes a node",
    "server ms a node": "server's processor time a node, ms",
    "leader ms": "leader's processor time, ms",
    "node ms": "a node's processor time, ms",
}


def write(results: Results, folder: Path) -> list[Path]:
    """Write all plots; returns the files."""
    # Only this module needs it, and it takes a while to load.
    from vl_convert import vegalite_to_svg

    written = []
    for name, spec in zip(PLOTS, (_form(results), _shared(results)), strict=True):
        file = folder / name
        file.write_text(vegalite_to_svg(spec) + "\n", encoding="utf-8")
        written.append(file)
    return written


def _form(results: Results) -> dict[str, Any]:
    figures = results.of("form", "s")
    values = [
        {"nodes": it.nodes, "value": it.median, "of": it.subject, "kind": _kind(it.subject)}
        for it in figures
        if it.median is not None
    ]
    return {
        **_frame("all nodes join at once: seconds until the last has its rank"),
        "width": 560,
        "height": 400,
        "data": {"values": values},
        **_lines(values, "seconds", [*dict.fromkeys(str(it["of"]) for it in values)]),
    }


def _shared(results: Results) -> dict[str, Any]:
    parts = []
    for measure, title in _SHARED.items():
        values = [
            *_points(results.of("form", measure), "handlers"),
            *_points(results.of("swarm", measure), "swarm"),
        ]
        parts.append(
            {
                "title": title,
                "width": 300,
                "height": 200,
                "data": {"values": values},
                **_lines(values, "", ["handlers", "swarm"]),
            }
        )
    return {**_frame("one round on redis"), "concat": parts, "columns": 2}


def _points(figures: Iterable[Figure], of: str) -> list[Mapping[str, Any]]:
    return [
        {"nodes": it.nodes, "value": it.median, "of": of, "kind": _KINDS[0]}
        for it in figures
        if it.subject == "redis" and it.median
    ]


def _kind(subject: str) -> str:
    if subject in FLOORS:
        return _KINDS[2]
    return _KINDS[1] if subject in TORCH_OWN else _KINDS[0]


def _frame(title: str) -> dict[str, Any]:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {"text": title, "anchor": "start"},
        "background": "white",
        "padding": 12,
        "config": {"font": "sans-serif", "axis": {"gridColor": "#e4e4e4"}},
    }


def _lines(values: Iterable[Mapping[str, Any]], title: str, order: list[str]) -> dict[str, Any]:
    sizes = sorted({int(it["nodes"]) for it in values})
    kinds = {
        "field": "kind",
        "sort": [*_KINDS],
        "scale": {"domain": [*_KINDS], "range": [[1, 0], [6, 3], [2, 3]]},
        "legend": {"title": None, "symbolType": "stroke"} if len(order) > 2 else None,
    }
    return {
        "encoding": {
            "x": {
                "field": "nodes",
                "type": "quantitative",
                "scale": {"type": "log", "base": 2, "nice": False},
                "axis": {"values": sizes, "format": "d", "labelOverlap": True, "title": "nodes"},
            },
            "y": {
                "field": "value",
                "type": "quantitative",
                "scale": {"type": "log"},
                "axis": {"title": title, "format": "~g"},
            },
            "color": {
                "field": "of",
                "sort": order,
                "scale": {"scheme": "tableau20" if len(order) > 10 else "tableau10"},
                "legend": {"title": None, "symbolType": "stroke"},
            },
        },
        # In one layer, the legend of the dashes would have points instead of lines.
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 1.8}, "encoding": {"strokeDash": kinds}},
            {"mark": {"type": "point", "filled": True, "size": 30}},
        ],
    }
