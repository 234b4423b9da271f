"""Accuracy on one fixed last segment against context length: does more context help or harm?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normattn.reports.curves import Curve
from normattn.reports.figures.panels import draw_panels


def draw_by_length(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Draw the fixed-last-segment curves as `accuracy_by_context_length`."""
    return draw_panels(
        curves,
        folder,
        "accuracy_by_context_length",
        title="Accuracy on the same last tokens as the context before them grows",
        caption=(
            "Every point scores the same tokens: the last training length of each text, read "
            "with ever more text before it. Rising: the model "
            "uses the longer context. Falling: the context confuses it. Shaded: 95 % bootstrap "
            "interval over documents (and seeds). Dashed, hollow: log-n."
        ),
        x_of=lambda point: float(point.last),
        x_label="context length in tokens, and in training lengths",
        log_x=True,
    )
