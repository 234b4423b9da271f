"""Figures as JSON values, for the page that draws them itself."""

from __future__ import annotations

import math
from typing import Any

from normattn.lab.report.figure import Curves, Density, Figure, Grid, Intervals, Panel
from normattn.lab.report.palette import line_colour, ranked
from normattn.lab.stats import Estimate

DIGITS = 6
"""Significant digits of a number: more than a picture or a tooltip shows."""


def figure_json(figure: Figure) -> dict[str, Any]:
    """The figure's kind, title and numbers; what is not finite is None."""
    known = {"title": figure.title, "name": figure.name}
    match figure:
        case Curves():
            return known | _curves(figure)
        case Intervals():
            columns = [
                {
                    "title": column.title,
                    "zero": column.zero,
                    "values": [_estimate(value) for value in column.values],
                }
                for column in figure.columns
            ]
            return known | {
                "kind": "intervals",
                "rows": list(figure.rows),
                "columns": columns,
                "symlog": figure.symlog,
            }
        case Grid():
            return known | {
                "kind": "grid",
                "rows": list(figure.rows),
                "columns": list(figure.columns),
                "values": [[_number(value) for value in line] for line in figure.values],
                "texts": [list(line) for line in figure.texts],
                "x": figure.x_title,
                "y": figure.y_title,
                "scale": figure.scale_title,
                "log": figure.log,
            }
        case Density():
            rows = [
                {
                    "label": row.label,
                    "low": _number(row.low),
                    "high": _number(row.high),
                    "heights": [[_number(height) for height in line] for line in row.heights],
                    "names": list(row.names),
                }
                for row in figure.rows
            ]
            return known | {"kind": "density", "rows": rows, "x": figure.x_title}


def _curves(figure: Curves) -> dict[str, Any]:
    families = [line.family or line.label for panel in figure.panels for line in panel.lines]
    places = ranked(families, figure.first)
    return {
        "kind": "curves",
        "shared": figure.shared_y,
        "panels": [_panel(panel, places) for panel in figure.panels],
    }


def _panel(panel: Panel, places: dict[str, int]) -> dict[str, Any]:
    return {
        "title": panel.title,
        "x": panel.x_title,
        "y": panel.y_title,
        "logX": panel.log_x,
        "logY": panel.log_y,
        "steps": panel.steps,
        "marks": [{"x": _number(mark.x), "label": mark.label} for mark in panel.marks],
        "lines": [
            {
                "label": line.label,
                "colour": line_colour(places[line.family or line.label]),
                "dashed": line.dashed,
                "points": [
                    [_number(value) for value in (point.x, point.value, point.low, point.high)]
                    for point in line.points
                ],
            }
            for line in panel.lines
            if line.points
        ],
    }


def _estimate(estimate: Estimate | None) -> list[int | float | None] | None:
    return (
        None
        if estimate is None
        else [_number(v) for v in (estimate.value, estimate.low, estimate.high)]
    )


def _number(value: float | None) -> int | float | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short
