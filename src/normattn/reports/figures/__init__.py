"""The figures: each a PNG and an SVG that can be read without any text beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normattn.reports.curves import Curve
from normattn.reports.figures.by_length import draw_by_length
from normattn.reports.figures.by_position import draw_by_position
from normattn.reports.figures.heat_map import draw_heat_map
from normattn.reports.figures.reading import draw_readings
from normattn.reports.figures.retrieval import draw_retrieval
from normattn.reports.table import Row

__all__ = [
    "draw_by_length",
    "draw_by_position",
    "draw_figures",
    "draw_heat_map",
    "draw_readings",
    "draw_retrieval",
]


def draw_figures(
    rows: Sequence[Row], positions: Sequence[Curve], lengths: Sequence[Curve], folder: Path
) -> list[Path]:
    """Draw what the rows and curves allow into `folder`; return the files written."""
    paths = []
    for protocol in dict.fromkeys(curve.protocol for curve in positions):
        shown = [curve for curve in positions if curve.protocol == protocol]
        paths += draw_by_position(shown, folder)
    if lengths:
        paths += draw_by_length(lengths, folder)
    return paths + (draw_heat_map(rows, folder) if rows else [])
