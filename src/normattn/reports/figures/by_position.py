"""Accuracy by position: where in a long text each variant starts to fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normattn.reports.curves import Curve
from normattn.reports.figures.panels import draw_panels

_SUBJECTS = {
    "non_repeated": "natural held-out text",
    "repeated": "repeated text (one segment tiled to the whole length)",
}


def draw_by_position(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Draw the curves of one protocol as `accuracy_by_position_<protocol>`."""
    protocol = curves[0].protocol
    return draw_panels(
        curves,
        folder,
        f"accuracy_by_position_{protocol}",
        title=f"Accuracy by position on {_SUBJECTS[protocol]}",
        caption=(
            "Each point: share of tokens in its stretch of positions that the model predicts "
            "exactly. Shaded: 95 % bootstrap interval over documents "
            "(and seeds, where several). Dashed, hollow: trained with log-n scaling. "
            "Right of the dotted line the text is longer than any seen in training."
        ),
        x_of=lambda point: (point.first + point.last) / 2,
        x_label="position (tokens read so far)",
        log_x=curves[0].points[-1].last > 16 * curves[0].train_length,
    )
