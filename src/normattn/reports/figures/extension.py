"""The same last tokens after contexts of every length: does a method make more context help?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from normattn.reports.extension_advice import spoken
from normattn.reports.extension_cells import LAST_ACCURACY, LAST_LOSS, Readings
from normattn.reports.figures.lines import Line, LinePanel, draw_lines
from normattn.reports.figures.reading import method_style
from normattn.reports.metrics import Metric


def draw_last_segment(found: Readings, lengths: Sequence[int], folder: Path) -> list[Path]:
    """Draw `last_segment`: loss and accuracy on the last tokens against the context's length."""
    train_length = found.rows[0].train_length
    panels = [
        LinePanel("loss", "nats per token", _lines(found, LAST_LOSS, lengths)),
        LinePanel("accuracy", "next tokens (%)", _lines(found, LAST_ACCURACY, lengths)),
    ]
    return draw_lines(
        panels,
        folder,
        "last_segment",
        title="The same last tokens as the context before them grows",
        caption=(
            f"{found.rows[0].variant}, trained to read {train_length:,} tokens. Upright lines: "
            "95 % bootstrap interval over windows. Dashed, hollow: with post-hoc log-n. Points of "
            "one length stand side by side."
        ),
        x_label="tokens of context",
        x_ticks=[(math.log2(length), spoken(length)) for length in lengths],
    )


def _lines(found: Readings, metric: Metric, lengths: Sequence[int]) -> tuple[Line, ...]:
    methods = [row.method for row in found.rows]
    lines = []
    for row in found.rows:
        values = [(length, found.value(row, metric, length)) for length in lengths]
        points = tuple((math.log2(n), value) for n, value in values if value is not None)
        if points:
            style = method_style(row.method, methods)
            name = row.method or "as is"
            dashed = style["linestyle"] != "-"
            lines.append(Line(name, points, style["color"], dashed))
    return tuple(lines)
